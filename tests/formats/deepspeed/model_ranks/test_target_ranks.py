"""Which model ranks a target has of made-up sources, and what is copied, cut or laid out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from zckpt.core.checkpoint.facts import ExpertLayer, FlatBufferEngine, Pipeline, TensorParallel
from zckpt.core.checkpoint.grid import Grid, GridPlace
from zckpt.core.checkpoint.manifest import Manifest, Parameter, Run
from zckpt.core.checkpoint.origin import Origin
from zckpt.core.checkpoint.placement import Cut
from zckpt.errors import UnsupportedCheckpoint, WrongOption
from zckpt.formats.deepspeed.read import stacked
from zckpt.formats.deepspeed.target_ranks import TargetRanks, target_ranks
from zckpt.formats.options import options_of

STAGES = [["1.a"], ["2.a", "3.a"]]
NAMES = [name for stage in STAGES for name in stage]
PIPELINE = Pipeline(STAGES, [[], []], [1, 2, 3])
RULES = TensorParallel(dict.fromkeys(NAMES, Cut(0)), {})
ENGINE = FlatBufferEngine("deepspeed", "0.19.8", None, "BF16", False, None, {})


def model(origin: Origin, **facts: Any) -> Manifest:
    return Manifest(
        root="run",
        format="deepspeed",
        entries={},
        parameters={name: Parameter((4, 2), group=0) for name in NAMES},
        groups=({"lr": 0.1},),
        state={"module": NAMES, "counters": {}, "optimizer": {}},
        run=Run(origin=origin, engine=ENGINE),
    ).replace(**facts)


WHOLE = model(Origin(dp=1), tensor_parallel=RULES)
PIPE = model(Origin(dp=1, pp=2, tp=1), pipeline=PIPELINE, tensor_parallel=RULES)


def apart(grid: Grid, whole: Manifest) -> Manifest:
    """The ranks of a grid, which are not joined; each tensor rank has the same."""
    places = [GridPlace(n, grid) for n in range(grid.pp * grid.tp)]
    ranks = [
        replace(
            whole,
            parameters={name: whole.parameters[name] for name in STAGES[place.number // grid.tp]}
            if grid.pp > 1
            else whole.parameters,
            place=place,
        )
        for place in places
    ]
    return replace(stacked(ranks), models=(whole,) * grid.tp)


def names(ranks: TargetRanks) -> list[list[str]]:
    return [[*rank.parameters] for rank in ranks.ranks]


def test_a_plain_run_has_one_rank() -> None:
    source = model(Origin(dp=1))
    ranks = target_ranks(source, options_of({}))
    assert (ranks.grid, ranks.table, [*ranks.ranks]) == (None, None, [source])
    with pytest.raises(WrongOption, match="--pp does not apply to run, which is not a pipeline"):
        target_ranks(source, options_of({"pp": 2}))


def test_ranks_of_slices() -> None:
    ranks = target_ranks(WHOLE, options_of({"tp": 2}))
    assert (ranks.grid, ranks.pipeline, ranks.layers) == (Grid(1, 2), None, ())
    assert [rank.place and rank.place.number for rank in ranks.ranks] == [0, 1]
    assert {own.shape for rank in ranks.ranks for own in rank.parameters.values()} == {(2, 2)}
    assert ranks.table is not None
    one = target_ranks(WHOLE, options_of({"tp": 1}))
    assert (one.grid, one.table) == (None, None)
    assert one.ranks[0].run.tensor_parallel is None


def test_a_pipeline_of_other_slices_gets_its_files_of_layers_anew() -> None:
    ranks = target_ranks(PIPE, options_of({"tp": 2}))
    assert (ranks.grid, names(ranks)) == (
        Grid(2, 2, staged=True),
        [*STAGES[:1] * 2, *STAGES[1:] * 2],
    )
    assert ranks.pipeline is not None
    assert [own.shape for whole in ranks.wholes for own in whole.parameters.values()] == [
        (2, 2)
    ] * 6
    assert (ranks.layers, ranks.copies) == ((), ())
    one = target_ranks(PIPE, options_of({"pp_bounds": (0, 2, 3, 4)}))
    assert (one.grid, names(one)) == (Grid(3, 1, staged=True), [["1.a"], ["2.a"], ["3.a"]])


def test_ranks_that_are_kept() -> None:
    """Another data-parallel size: each rank is as it was, and so are the files of layers."""
    source = apart(Grid(2, 2, staged=True), PIPE)
    ranks = target_ranks(source, options_of({"dp": 3}))
    assert [*ranks.ranks] == [*source.ranks]
    assert (ranks.wholes, ranks.copies, ranks.layers) == ((), (), source.models)


def test_stages_that_are_cut_anew() -> None:
    """One copy of a tied layer may come of two, which are compared."""
    source = apart(Grid(2, 2, staged=True), PIPE)
    ranks = target_ranks(source, options_of({"pp": 1}))
    assert (ranks.grid, names(ranks)) == (Grid(1, 2, staged=True), [NAMES, NAMES])
    assert ranks.copies == ranks.wholes == ranks.layers == source.models
    with pytest.raises(WrongOption, match="--pp does not apply to run, which is not a pipeline"):
        target_ranks(apart(Grid(1, 2), WHOLE), options_of({"pp": 2}))


@pytest.mark.parametrize(
    ("grid", "options", "said", "hint"),
    [
        (Grid(2, 2, staged=True), {"stage": 0}, "--stage does not apply", "give --tp 2 too"),
        (Grid(2, 2, staged=True), {"vocab_size": 9}, "--vocab-size does not", "--to universal"),
        (Grid(2, 1, staged=True), {"weights_only": True}, "--weights-only does", "--to universal"),
        (Grid(1, 1), {"dtype": "fp32"}, "--dtype does not apply", "--to universal"),
        (Grid(2, 1, staged=True), {"stage": 1}, "", ""),
        (Grid(1, 2), {"dtype": "fp32"}, "", ""),
        (Grid(1, 1), {"rename": (("a", "b"),)}, "", ""),
    ],
)
def test_options_that_need_the_whole_model(
    grid: Grid, options: dict[str, Any], said: str, hint: str
) -> None:
    source = apart(grid, PIPE if grid.staged else WHOLE)
    if not said:
        ranks = target_ranks(source, options_of(options))
        assert bool(ranks.pipeline) == grid.staged  # files of layers are written anew
        assert len(ranks.copies) == int(grid.staged)  # of a tied layer's copies one is taken
        return
    with pytest.raises(WrongOption, match=said) as raised:
        target_ranks(source, options_of(options))
    assert hint in (raised.value.hint or "")


def test_layers_that_have_other_names_now() -> None:
    parameters = {name.replace("3.", "norm."): own for name, own in PIPE.parameters.items()}
    for renamed in (
        replace(PIPE, parameters=parameters, state={**PIPE.state, "module": [*parameters]}),
        replace(PIPE, state={**PIPE.state, "module": NAMES[:2]}),
        replace(PIPE, parameters={**PIPE.parameters, "3.a": Parameter((4, 2), False)}),
    ):
        with pytest.raises(UnsupportedCheckpoint, match="no longer have the names of its layers"):
            target_ranks(renamed, options_of({}))


def test_every_stage_needs_experts() -> None:
    """A run of one rank becomes a pipeline without files of layers."""
    layers = tuple(ExpertLayer(f"{n}", 4, 1) for n in (1, 3))
    engine = replace(ENGINE, experts=layers)
    source = WHOLE.replace(engine=engine, origin=Origin(dp=1, zero_stage=2, ep=1))
    ranks = target_ranks(source, options_of({"pp_bounds": (0, 2, 4)}))
    assert (ranks.grid, names(ranks), ranks.pipeline) == (Grid(2, 1), [["1.a"], NAMES[1:]], None)
    with pytest.raises(WrongOption, match="a stage of the target would have none of the layers of"):
        target_ranks(source, options_of({"pp_bounds": (0, 2, 3, 4)}))
    with pytest.raises(UnsupportedCheckpoint, match="experts only for a single tensor rank"):
        target_ranks(source, options_of({"tp": 2}))


def test_files_of_layers_are_copied_in_their_order(tmp_path: Path) -> None:
    """By their numbers: 100 comes after 20. Other files are written."""
    files = ["layer_100-model_states.pt", "mp_rank_00_model_states.pt", "layer_20-model_states.pt"]
    for name in files:
        (tmp_path / name).write_bytes(b"x")
    source = PIPE.replace(paths=tuple(str(tmp_path / name) for name in files))
    ranks = TargetRanks(source=source, ranks=[source], layers=[source])
    siblings = ranks.layer_siblings("tag")
    assert [name for name, _ in siblings] == [f"tag/{files[2]}", f"tag/{files[0]}"]
    assert [sibling.size for _, sibling in siblings] == [1, 1]
    assert TargetRanks(source=source, ranks=[source]).layer_siblings("tag") == []
