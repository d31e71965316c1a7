"""What `--like RUN` takes from the run, and what from the source; both are made by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import zckpt
from zckpt.core.checkpoint.facts import FlatBufferEngine, TensorParallel, Vocabulary
from zckpt.core.checkpoint.manifest import Manifest, Sighting
from zckpt.core.checkpoint.optimizer_states import StateRow, States
from zckpt.errors import MissingData, UnsupportedCheckpoint, WrongOption, ZckptError
from zckpt.formats.deepspeed.run_template import as_in_run
from zckpt.formats.options import options_of
from zckpt.training import trainers_steps

from ...conftest import texts
from . import made

OF_SOURCE: made.Groups = ({"embed": (4, 2), "head": (2,)}, {"norm": (3,)})
OF_RUN: made.Groups = ({"norm": (3,)}, {"head": (2,), "embed": (4, 2)})
HYPER = {"lr": 0.5, "weight_decay": 0.1, "betas": (0.9, 0.95), "foreach": None}


@pytest.fixture
def source(tmp_path: Path) -> Manifest:
    """Two groups, with the learning rates 0.25 and 0.125."""
    return read(tmp_path / "source", OF_SOURCE, {"lr": 0.25}, {"lr": 0.125})


@pytest.fixture
def run(tmp_path: Path) -> Manifest:
    """The same parameters in groups of another order, after as many steps."""
    return read(tmp_path / "like", OF_RUN, {}, {})


def read(path: Path, groups: made.Groups, *own: Mapping[str, Any]) -> Manifest:
    """A run whose groups have `HYPER`, and values of their `own`."""
    model, ranks = made.stage_2(groups, 2)
    for rank in ranks:
        listed = rank["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]
        for group, more in zip(listed, own, strict=True):
            group |= {**HYPER, **more}
    return zckpt.read(made.saved(path, (model, ranks)))


def with_state(manifest: Manifest, **more: Any) -> Manifest:
    return replace(manifest, state={**manifest.state, **more})


def at_step_5(manifest: Manifest) -> Manifest:
    own = {name: replace(each, step=5) for name, each in manifest.parameters.items()}
    return replace(manifest, parameters=own)


def in_run(source: Manifest, run: Manifest, **options: Any) -> Manifest:
    return as_in_run(source, run, options_of(options))


def said(result: Manifest, run: Manifest) -> str:
    """The warnings that neither side had."""
    return "; ".join(
        texts(line for line in result.notices.warnings if line not in run.notices.warnings)
    )


def test_tensors_are_of_the_source_and_their_order_is_of_the_run(
    source: Manifest, run: Manifest
) -> None:
    result = in_run(source, run)
    assert [*result.parameters] == ["norm", "head", "embed"]
    assert [own.group for own in result.parameters.values()] == [0, 1, 1]
    assert {entry.fragments[0].extent.file for entry in result.entries.values()} == {
        entry.fragments[0].extent.file for entry in source.entries.values()
    }
    assert result.source["tag"] is None  # the target's own step names it
    assert said(result, run) == ""


def test_hyper_parameters_follow_the_parameters(source: Manifest, run: Manifest) -> None:
    """Embed and head, whose learning rate is 0.25, are the run's second group."""
    assert [group["lr"] for group in in_run(source, run).groups or ()] == [0.125, 0.25]


def test_members_of_one_group_that_the_source_has_apart(run: Manifest, tmp_path: Path) -> None:
    groups: made.Groups = ({"embed": (4, 2)}, {"head": (2,), "norm": (3,)})
    apart = read(tmp_path / "apart", groups, {"lr": 0.25}, {"lr": 0.125})
    with pytest.raises(
        ZckptError, match=r"head and embed are in one group .* different values of lr for them"
    ):
        in_run(apart, run)


def test_how_an_optimizer_computes_is_as_in_the_run(source: Manifest, run: Manifest) -> None:
    """`foreach` changes no number; and a pair has the form that the run gives it."""
    own = tuple({**group, "foreach": True, "betas": [0.8, 0.9]} for group in source.groups or ())
    for group in in_run(replace(source, groups=own), run).groups or ():
        assert (group["foreach"], group["betas"]) == (None, (0.8, 0.9))


def test_what_the_source_does_not_state(source: Manifest, run: Manifest) -> None:
    own = tuple({"betas": group["betas"]} for group in source.groups or ())
    result = in_run(replace(source, groups=own), run)
    assert [group["lr"] for group in result.groups or ()] == [0.5, 0.5]
    for number in (0, 1):
        assert f"lr, weight_decay of group {number} is taken from --like" in said(result, run)
    # for weights alone it does not matter
    result = in_run(replace(source, groups=own), run, weights_only=True)
    assert said(result, run) == ""


@pytest.mark.parametrize(("of_run", "how"), [(True, "weights"), (False, "gradients")])
def test_another_adam(source: Manifest, run: Manifest, of_run: bool, how: str) -> None:
    own, theirs = (
        tuple({**group, "decoupled_weight_decay": flag} for group in each.groups or ())
        for each, flag in ((source, not of_run), (run, of_run))
    )
    result = in_run(replace(source, groups=own), replace(run, groups=theirs))
    assert f"group 1: the optimizer of --like applies weight decay to the {how}" in said(
        result, run
    )
    without = tuple({**group, "weight_decay": 0.0} for group in own)
    result = in_run(replace(source, groups=without), replace(run, groups=theirs))
    assert "weight decay" not in said(result, run)


def with_experts(source: Manifest, run: Manifest) -> tuple[Manifest, Manifest]:
    assert isinstance(run.run.engine, FlatBufferEngine)
    engine = replace(run.run.engine, experts=({"name": "moe"},))  # type: ignore[arg-type]
    return source, run.replace(engine=engine)


def without_groups(source: Manifest, run: Manifest) -> tuple[Manifest, Manifest]:
    return source, replace(run, groups=None)


def with_ranks(source: Manifest, run: Manifest) -> tuple[Manifest, Manifest]:
    return replace(source, ranks=(source,)), run


def of_another_shape(source: Manifest, run: Manifest) -> tuple[Manifest, Manifest]:
    narrow = replace(run.parameters["norm"], shape=(2,))
    return source, replace(run, parameters={**run.parameters, "norm": narrow})


def with_a_tie(source: Manifest, run: Manifest) -> tuple[Manifest, Manifest]:
    """The source has one weight by two names, which the run has apart."""
    parameters = {name: own for name, own in source.parameters.items() if name != "embed"}
    parameters["twin"] = replace(source.parameters["embed"], aliases=("embed",))
    tied = {"embed": "twin"}
    renamed = [
        replace(entry, parameter=tied.get(entry.parameter, entry.parameter))
        for entry in source.entries.values()
    ]
    entries = {entry.key: entry for entry in renamed}
    more = {"twin": run.parameters["embed"]}
    return (
        replace(source, parameters=parameters, entries=entries),
        replace(run, parameters={**run.parameters, **more}),
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (with_experts, UnsupportedCheckpoint, "which has experts"),
        (without_groups, UnsupportedCheckpoint, "which has no parameter groups"),
        (with_ranks, WrongOption, "--like does not apply to"),
        (of_another_shape, MissingData, r"norm \(\[3\] and \[2\]\)"),
        (with_a_tie, MissingData, "embed and twin are one tied weight in"),
    ],
)
def test_what_does_not_fit(
    change: Callable[[Manifest, Manifest], tuple[Manifest, Manifest]],
    error: type[ZckptError],
    message: str,
    source: Manifest,
    run: Manifest,
) -> None:
    with pytest.raises(error, match=message) as raised:
        in_run(*change(source, run))
    assert raised.value.hint


@pytest.mark.parametrize(("used", "fits"), [(3, True), (4, True), (5, False)])
def test_rows_that_only_pad_a_vocabulary(
    used: int, fits: bool, source: Manifest, run: Manifest
) -> None:
    """The run has 6 rows, of which `used` have a meaning; the source has 4."""
    wide = replace(run.parameters["embed"], shape=(6, 2))
    run = replace(run, parameters={**run.parameters, "embed": wide})
    run = run.replace(tensor_parallel=TensorParallel({}, {"embed": Vocabulary(6, used)}))
    if fits:
        assert in_run(source, run).parameters["embed"].shape == (4, 2)
    else:
        with pytest.raises(MissingData, match=r"embed \(\[4, 2\] and \[6, 2\]\)"):
            in_run(source, run)


# -- what is not a tensor


@pytest.mark.parametrize(
    ("of_run", "samples"),
    [
        ({"global_steps": 3, "global_samples": 24}, 40),
        ({"global_steps": 3, "global_samples": 25}, 0),
        ({}, 0),
    ],
)
def test_counters_of_as_many_steps(
    of_run: dict[str, Any], samples: int, source: Manifest, run: Manifest
) -> None:
    """The source, which has none, made 5 steps; each step of the run had 8 samples."""
    source = with_state(at_step_5(source), counters=None)
    result = in_run(source, with_state(run, counters=of_run))
    expected = {"global_steps": 5, "skipped_steps": 0, "global_samples": samples}
    assert result.state["counters"] == expected
    assert ("the number of samples per step is unknown" in said(result, run)) == (not samples)


def test_counters_of_the_trainer(source: Manifest, run: Manifest) -> None:
    """It has counted updates that the optimizer has skipped."""
    counted = Sighting("x", 6, False, trainers_steps.TRAINER)
    source = with_state(at_step_5(source), counters=None).replace(steps=(counted,))
    result = in_run(source, with_state(run, counters={"global_steps": 3, "global_samples": 24}))
    expected = {"global_steps": 6, "skipped_steps": 0, "global_samples": 48}
    assert result.state["counters"] == expected


def test_counters_of_the_source(source: Manifest, run: Manifest) -> None:
    source = with_state(source, counters={"global_steps": 7})
    assert in_run(source, run).state["counters"] == {"global_steps": 7}


def test_a_scheduler_moves_to_the_step_of_the_source(source: Manifest, run: Manifest) -> None:
    source = with_state(at_step_5(source), lr_scheduler=None)
    theirs = {"last_epoch": 3, "_step_count": 4, "base_lrs": [0.5]}
    result = in_run(source, with_state(run, lr_scheduler=theirs))
    assert result.state["lr_scheduler"] == {"last_epoch": 5, "_step_count": 6, "base_lrs": [0.5]}
    assert "moved to the source's step: last_epoch = 5, _step_count = 6" in said(result, run)
    theirs = {"base_lrs": [0.5]}  # which does not say how often it was called
    result = in_run(source, with_state(run, lr_scheduler=theirs))
    assert result.state["lr_scheduler"] == theirs
    assert "the learning rate scheduler is taken from --like, unchanged" in said(result, run)
    source = with_state(source, lr_scheduler={"last_epoch": 1})
    result = in_run(source, with_state(run, lr_scheduler=theirs))
    assert result.state["lr_scheduler"] == {"last_epoch": 1}


def test_the_client_state_is_of_the_source_but_for_the_grid(
    source: Manifest, run: Manifest
) -> None:
    """`args` and the rules of slices are about ranks; `iteration` is the step."""
    source = with_state(at_step_5(source), client_state={"args": "of one rank", "epoch": 2})
    theirs = {"args": "of the grid", "iteration": 3, "epoch": 9, "seed": 1}
    result = in_run(source, with_state(run, client_state=theirs))
    assert result.state["client_state"] == {
        "args": "of the grid",
        "iteration": 5,
        "epoch": 2,
        "seed": 1,
    }
    assert "client state has these keys from the run of --like: args, seed" in said(result, run)


def test_what_counts_the_batches_of_the_run(source: Manifest, run: Manifest) -> None:
    """The members of groups are counted anew, and the loss scale stays the run's."""
    assert isinstance(run.run.engine, FlatBufferEngine)
    run = run.replace(engine=replace(run.run.engine, dtype="F16"))
    optimizer = {"members": [[0]], "clip_grad": 1.0}
    run = with_state(run, optimizer=optimizer, random_ltd={"seen": 4})
    source = with_state(source, optimizer={"members": [[1]]})
    states = [States((StateRow("k", "other", (name,), 1),)) for name in "ab"]
    run, source = replace(run, states=states[0]), replace(source, states=states[1])
    result = in_run(source, run)
    assert result.run.engine == run.run.engine
    assert (result.state["optimizer"], result.states) == ({"clip_grad": 1.0}, states[1])
    assert "the loss scale is taken from --like; random_ltd is taken from --like" in said(
        result, run
    )
    result = in_run(with_state(source, optimizer={}), run)
    assert result.state["optimizer"] == {"clip_grad": 1.0}


COUNTED = {"last_batch_iteration": 2}


def with_config(manifest: Manifest, scheduler: str) -> Manifest:
    """A run whose ds_config names a scheduler."""
    engine = manifest.run.engine
    assert isinstance(engine, FlatBufferEngine)
    config = {**engine.config, "scheduler": {"type": scheduler}}
    return manifest.replace(engine=replace(engine, config=config))


def test_the_scheduler_of_the_source_if_the_program_loads_it(
    source: Manifest, run: Manifest
) -> None:
    """Else that of the run, after as many updates as the source has made."""
    run = with_state(run, lr_scheduler=COUNTED)
    of_torch = with_state(at_step_5(source), lr_scheduler={"last_epoch": 5})
    result = in_run(of_torch, run)
    assert result.state["lr_scheduler"] == {"last_batch_iteration": 4}
    assert "from --like, moved to the source's step: last_batch_iteration = 4" in said(result, run)
    own = with_state(at_step_5(source), lr_scheduler={"last_batch_iteration": 1})
    assert in_run(own, run).state["lr_scheduler"] == {"last_batch_iteration": 1}
    own, of_run = with_config(own, "WarmupLR"), with_config(run, "WarmupLR")
    assert in_run(own, of_run).state["lr_scheduler"] == {"last_batch_iteration": 1}
    result = in_run(own, with_config(run, "OneCycle"))
    assert result.state["lr_scheduler"] == {"last_batch_iteration": 4}
    without = with_state(run, lr_scheduler=None)
    assert in_run(of_torch, without).state["lr_scheduler"] == {"last_epoch": 5}
