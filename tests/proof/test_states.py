"""What two checkpoints state beside tensors, steps and groups."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from zckpt.core.checkpoint.entries import Entry
from zckpt.core.checkpoint.facts import (
    Engine,
    FlatBufferEngine,
    NamedWeightsEngine,
    StateDictEngine,
    StepPlace,
)
from zckpt.core.checkpoint.inert import Foreign, Global, Size
from zckpt.core.checkpoint.manifest import Files, Manifest, Parameter, Run, Sibling
from zckpt.core.checkpoint.origin import Origin
from zckpt.core.storage.fragments import Runs
from zckpt.proof import states
from zckpt.proof.sibling_files import siblings

from ..conftest import texts

FLAT = FlatBufferEngine("flats", None, None, None, False, None, {})
PLAIN = StateDictEngine("plain", None, (), None, None, None, None, False, False)
NAN = float("nan")
GRAPH = NamedWeightsEngine("graph", None, None, None, None)


def manifest(
    state: dict[str, Any], engine: Engine | None = FLAT, origin: Origin | None = None, **fields: Any
) -> Manifest:
    groups = ({"lr": 0.1},)
    return Manifest(
        "", "x", Run(origin or Origin(), engine=engine), {}, {}, groups=groups, state=state
    ).replace(**fields)


def differences(a: Manifest, b: Manifest) -> dict[str, Any]:
    return {
        line["key"]: line.get("only") or (line["a"], line["b"]) for line in states.states(a, b)[0]
    }


def not_compared(a: Manifest, b: Manifest) -> list[str]:
    return [line.partition(":")[0] for line in texts(states.states(a, b)[1])]


def test_values_of_both() -> None:
    scheduler = {"last_epoch": 3, "lrs": (1.0, float("nan"))}
    a = manifest({"lr_scheduler": scheduler})
    other = {"last_epoch": 4, "lrs": (2.0, float("nan"))}
    b = manifest({"lr_scheduler": other})
    assert states.states(a, a) == ([], [])
    assert differences(a, b) == {
        "lr_scheduler.last_epoch": (3, 4),
        "lr_scheduler.lrs.0": (1.0, 2.0),
    }


def test_objects_and_dictionaries_of_other_keys() -> None:
    def scaler(scale: float) -> Foreign:
        return Foreign(Global("a.Scaler"), (), {"scale": scale}, "new")

    a = manifest({"client_state": {"scaler": scaler(1.0), 7: {"x": 1}}})
    b = manifest({"client_state": {"scaler": scaler(2.0), 7: {"x": 2}}})
    assert differences(a, b) == {
        "client_state.scaler.scale": (1.0, 2.0),
        "client_state.7.x": (1, 2),
    }
    a, b = (manifest({"client_state": {(1, 2): {"x": x, "y": 0}}}) for x in (1, 2))
    assert differences(a, b) == {"client_state.'(1, 2)'.x": (1, 2)}


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (Size((2, 3)), Size((2, 4)), {"client_state.x.1": (3, 4)}),
        (OrderedDict(y=1), OrderedDict(y=2), {"client_state.x.y": (1, 2)}),
        (OrderedDict(y=1, z=1), {"z": 1, "y": 2}, {"client_state.x.y": (1, 2)}),
    ],
)
def test_values_of_types_that_json_has_under_a_tag(
    ours: object, theirs: object, expected: dict[str, Any]
) -> None:
    a, b = (manifest({"client_state": {"x": value}}) for value in (ours, theirs))
    assert differences(a, b) == expected


@pytest.mark.parametrize("part", ["lr_scheduler", "client_state", "module_extra"])
@pytest.mark.parametrize("engine", [FLAT, PLAIN])
def test_what_a_program_saved_is_lost(part: str, engine: Engine) -> None:
    a, b = manifest({part: {"seed": 1}}), manifest({}, engine)
    assert differences(a, b) == {part: "a"}
    assert differences(b, a) == {part: "b"}
    assert differences(a, manifest({part: {"other": None}}, engine)) == {f"{part}.seed": "a"}


def test_what_an_engine_has_no_place_for_is_named() -> None:
    a = manifest({"counters": {"steps": 7}, "lr_scheduler": {"last_epoch": 7}})
    lines, sentences = states.states(a, manifest({}, GRAPH))
    assert lines == []
    (sentence,) = texts(sentences)
    assert sentence.startswith("counters, lr_scheduler: only ")
    assert not_compared(a, manifest({"lr_scheduler": {"last_epoch": 7}}, PLAIN)) == ["counters"]
    assert differences(a, manifest({"lr_scheduler": {"last_epoch": 7}})) == {"counters": "a"}


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (("counters",), "counters: only a has it, and the format of b cannot store it"),
        (
            ("counters", "lr_scheduler"),
            "counters, lr_scheduler: only a has them, and the format of b cannot store them",
        ),
    ],
)
def test_what_has_no_place_is_said_of_both(parts: tuple[str, ...], said: str) -> None:
    a, b = replace(manifest({part: {"x": 1} for part in parts}), root="a"), manifest({}, GRAPH)
    lines, notes = states.states(a, replace(b, root="b"))
    assert (lines, texts(notes)) == ([], [said])


def test_folders_of_model_and_optimizer_have_extra_states_of_modules_alone() -> None:
    a = manifest({"module_extra": {"x": 1}, "lr_scheduler": {"y": 1}})
    b = manifest({}, replace(PLAIN, folders=("model", "optimizer")))
    assert differences(a, b) == {"module_extra": "a"}
    assert not_compared(a, b) == ["lr_scheduler"]


def test_weights_alone_have_no_state() -> None:
    weights = Manifest("", "x", Run(Origin(), engine=PLAIN), {}, {})
    assert not_compared(manifest({"client_state": {"seed": 1}}), weights) == [
        "schedulers, counters and the like"
    ]
    assert states.states(weights, weights) == ([], [])
    moments = {"w/exp_avg": Entry("w", "exp_avg", "F32", (1,), Runs([]))}
    run = replace(weights, entries=moments)  # it goes on, though it states no groups
    assert differences(manifest({"client_state": {"seed": 1}}), run) == {"client_state": "a"}


def test_nothing_is_no_state() -> None:
    a = manifest({"client_state": {}, "data_sampler": None, "lr_scheduler": {"empty": {}}})
    assert states.states(a, manifest({"lr_scheduler": {}})) == ([], [])


def test_a_loss_scale_as_an_object_and_as_numbers() -> None:
    def of(scale: float, dynamic: bool) -> dict[str, Any]:
        state = {"cur_scale": scale, "scale_factor": 2.0, "min_scale": 1}
        scaler = Foreign(Global("a.Scaler"), (), state, "new")
        return {"loss_scaler": scaler, "dynamic_loss_scale": dynamic, "overflow": False}

    def numbers(scale: float, dynamic: bool) -> dict[str, Any]:
        return {"cur_scale": scale, "scale_factor": 2.0, "dynamic_loss_scale": dynamic}

    for dynamic in (True, False):
        a, b = (
            manifest({"optimizer": optimizer}, origin=Origin(zero_stage=stage))
            for stage, optimizer in enumerate((numbers(8.0, dynamic), of(8.0, dynamic)))
        )
        other = manifest({"optimizer": of(4.0, dynamic)}, origin=Origin(zero_stage=1))
        assert states.states(a, b) == ([], [])
        assert differences(a, other) == {"optimizer.cur_scale": (8.0, 4.0)}
        assert differences(b, other) == {"optimizer.loss_scaler.cur_scale": (8.0, 4.0)}


def test_a_loss_scale_that_only_one_side_has_as_an_object() -> None:
    """Also without any other number; what the object would replace is compared as it is."""
    scaler = Foreign(Global("a.Scaler"), (), {"cur_scale": 8.0}, "new")
    a = manifest({"optimizer": {"loss_scaler": scaler}})
    b = manifest({"optimizer": {"cur_scale": 8.0}})
    assert states.states(a, b) == states.states(b, a) == ([], [])
    assert differences(a, manifest({"optimizer": {"cur_scale": 4.0}})) == {
        "optimizer.cur_scale": (8.0, 4.0)
    }
    numbers = manifest({"optimizer": {"cur_scale": 8.0, "scale_window": 5}})
    assert differences(numbers, manifest({"optimizer": {"scale_window": 6}})) == {
        "optimizer.cur_scale": "a",
        "optimizer.scale_window": (5, 6),
    }


@pytest.mark.parametrize("key", ["cur_iter", "last_overflow_iter", "scale_factor", "scale_window"])
@pytest.mark.parametrize("dynamic", [True, False])
def test_how_a_loss_scale_changes_matters_if_it_does(dynamic: bool, key: str) -> None:
    scaler = Foreign(Global("a.Scaler"), (), {"cur_scale": 8.0, key: 2.0}, "new")
    numbers = {"cur_scale": 8.0, key: 3.0, "dynamic_loss_scale": dynamic}
    a = manifest({"optimizer": {"loss_scaler": scaler, "dynamic_loss_scale": dynamic}})
    expected = {f"optimizer.{key}": (2.0, 3.0)} if dynamic else {}
    assert differences(a, manifest({"optimizer": numbers})) == expected


def test_a_loss_scale_of_which_one_side_has_nothing() -> None:
    """An object stands for numbers only where the other side has these; one may have no state."""
    scaler = Foreign(Global("a.Scaler"), (), {"cur_scale": 8.0}, "new")
    a, none = manifest({"optimizer": {"loss_scaler": scaler}}), manifest({"optimizer": {}})
    assert differences(a, none) == {"optimizer.loss_scaler": "a"}
    assert differences(manifest({}), a) == {"optimizer.loss_scaler": "b"}
    empty = manifest({"optimizer": {"loss_scaler": replace(scaler, state=None)}})
    numbers = manifest({"optimizer": {"cur_scale": 8.0}})
    assert differences(empty, numbers) == {"optimizer.cur_scale": "b"}


@pytest.mark.parametrize(
    ("state", "is_equal"),
    [
        ({"cur_scale": 1.0, "dynamic": False}, True),
        ({"cur_scale": 1.0}, True),
        ({"cur_scale": 2.0, "dynamic": False}, False),
        ({"cur_scale": 1.0, "dynamic": True}, False),
        ({"cur_scale": 1.0, "min_scale": 1}, False),  # older ones do not say that they are dynamic
    ],
)
def test_no_loss_scaler_and_one_that_scales_nothing(state: dict[str, Any], is_equal: bool) -> None:
    scaler = Foreign(Global("a.Scaler"), (), state, "new")
    a, b = (manifest({"optimizer": {"loss_scaler": own}}) for own in (None, scaler))
    assert (differences(a, b) == {}) == (differences(b, a) == {}) == is_equal
    assert states.states(a, a) == ([], [])


def scheduler_of(name: str | None, state: Any, **fields: Any) -> Manifest:
    """A run whose configuration names a scheduler, and whose files have a state."""
    config = {} if name is None else {"scheduler": {"type": name}}
    return manifest({"lr_scheduler": state}, replace(FLAT, config=config), **fields)


COUNTED, OF_TORCH = {"last_batch_iteration": 3}, {"last_epoch": 4}


def test_schedulers_of_other_kinds_are_named_and_not_compared() -> None:
    own = scheduler_of("WarmupLR", COUNTED)
    for other in (
        scheduler_of(None, OF_TORCH),
        scheduler_of(None, None),
        manifest({}, PLAIN),
        manifest({"lr_scheduler": OF_TORCH}, PLAIN),
    ):
        assert differences(own, other) == differences(other, own) == {}
        assert "lr_scheduler" in not_compared(own, other)
    assert differences(own, scheduler_of("WarmupLR", None)) == {"lr_scheduler": "a"}
    later = scheduler_of("WarmupLR", {"last_batch_iteration": 4})
    assert differences(own, later) == {"lr_scheduler.last_batch_iteration": (3, 4)}


def test_a_scheduler_that_the_program_keeps_itself() -> None:
    own = scheduler_of(None, OF_TORCH)
    within = manifest({"client_state": {"app": {"sched": OF_TORCH}}}, PLAIN)
    trainer = replace(manifest({}, PLAIN), files=Files(siblings=(Sibling("scheduler.pt", "x", 1),)))
    for other in (within, trainer):
        assert "lr_scheduler" in not_compared(own, other)
        assert "lr_scheduler" not in differences(own, other)
    another = manifest({"client_state": {"app": {"sched": {"last_epoch": 5}}}}, PLAIN)
    assert differences(own, another)["lr_scheduler"] == "a"


def test_a_loss_scale_of_another_engine_is_compared() -> None:
    """How it is saved is a matter of wrappers of one engine."""
    a, b = (manifest({"optimizer": {"cur_scale": 8.0}}, engine) for engine in (FLAT, PLAIN))
    a = a.replace(engine=replace(FLAT, optimizer_class="FP16_Optimizer"))
    assert states.states(a, b) == ([], [])
    other = manifest({"optimizer": {"cur_scale": 4.0}}, PLAIN)
    assert differences(a, other) == {"optimizer.cur_scale": (8.0, 4.0)}


def test_keys_of_the_optimizer_depend_on_the_stage() -> None:
    a, b, c = (
        manifest({"optimizer": optimizer}, origin=Origin(zero_stage=stage))
        for stage, optimizer in ((2, {"clip_grad": 1.0}), (3, {}), (2, {}))
    )
    assert not_compared(a, b) == ["optimizer.clip_grad"]
    assert differences(a, c) == {"optimizer.clip_grad": "a"}
    counters = replace(a, state={"counters": {"steps": 7}})
    assert differences(counters, replace(b, state={})) == {"counters": "a"}


def test_types_of_steps_are_named() -> None:
    """Their places are compared by `values.step_places`."""
    a, b = (manifest({}, step_place=StepPlace("state", kind)) for kind in ("int", "F32"))
    assert states.states(a, a) == ([], [])
    assert not_compared(a, b) == ["step.type"]
    assert not_compared(a, manifest({})) == not_compared(manifest({}), a) == ["step"]


def beside(tmp_path: Path, name: str, **files: str) -> Manifest:
    folder = tmp_path / name
    folder.mkdir()
    siblings = []
    for file, text in files.items():
        path = folder / file.replace("_json", ".json").replace("_pt", ".pt")
        path.write_text(text)
        siblings.append(Sibling(path.name, str(path), len(text)))
    return manifest({}).replace(root=name, siblings=tuple(siblings))


def test_files_beside_a_checkpoint(tmp_path: Path) -> None:
    state = '{"best_model_checkpoint": "%s", "step": %d}'
    a = beside(tmp_path, "a", config_json="one", trainer_state_json=state % ("a", 1))
    b = beside(tmp_path, "b", config_json="two", trainer_state_json=state % ("b", 1))
    c = beside(tmp_path, "c", trainer_state_json=state % ("a", 2), scheduler_pt="x", rng_pt="y")
    assert siblings(a, b) == ([{"key": "config.json", "a": "3 bytes", "b": "3 other bytes"}], [])
    lines, sentences = siblings(a, c)
    assert [line["key"] for line in lines] == ["trainer_state.json", "scheduler.pt"]
    assert lines[1] == {"key": "scheduler.pt", "only": "b"}
    assert texts(sentences) == ["config.json: only beside a", "rng.pt: only beside c"]
    assert siblings(a, manifest({}))[0] == []


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (NAN, NAN, True),
        (NAN, 1.0, False),
        ((1, [NAN, 2]), [1, (NAN, 2)], True),
        ((1, 2), (1, 3), False),
        ([1], [1, 2], False),
        ([1], 1, False),
    ],
)
def test_values_that_are_alike(a: object, b: object, expected: bool) -> None:
    assert states.alike(a, b) == states.alike(b, a) == expected


KINDS = ("counters", "lr_scheduler", "optimizer", "client_state")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("ours", "theirs", "place"),
    [
        (1, 2, ""),
        (NAN, 1.0, ""),
        ([1, 2, 3], [1, 5, 3], ".1"),
        ([1], [1, 2], ""),
        ([1], 1, ""),
        ({"deep": 1}, {"deep": 2}, ".deep"),
        ({"deep": 1}, [1], ""),
    ],
)
def test_one_leaf_of_a_state(kind: str, ours: object, theirs: object, place: str) -> None:
    a, b = (manifest({kind: {"x": {"same": 0, "y": leaf}}}) for leaf in (ours, theirs))
    assert [line["key"] for line in states.states(a, b)[0]] == [f"{kind}.x.y{place}"]
    assert [line["key"] for line in states.states(b, a)[0]] == [f"{kind}.x.y{place}"]
    assert states.states(a, a) == states.states(b, b) == ([], [])


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_one_state_lacks(kind: str) -> None:
    a, b = (manifest({kind: {"x": inner}}) for inner in ({"same": 0, "y": 1}, {"same": 0}))
    assert states.states(a, b)[0] == [{"key": f"{kind}.x.y", "only": "a"}]
    assert states.states(b, a)[0] == [{"key": f"{kind}.x.y", "only": "b"}]


def test_sizes_of_a_run_are_named_where_programs_keep_them() -> None:
    def of(size: int) -> dict[str, Any]:
        args = Foreign(Global("argparse.Namespace"), (), {"world_size": size, "lr": 0.1}, "new")
        return {"client_state": {"args": args, "world_size": size}}

    a, b = manifest(of(2)), manifest(of(3))
    assert differences(a, b) == {"client_state.world_size": (2, 3)}
    assert not_compared(a, b) == ["client_state.args.world_size"]


def test_names_of_tensors_that_one_side_lacks_are_compared_as_tensors() -> None:
    entry = Entry("w", "param", "F32", (1,), Runs([]))
    a = replace(manifest({"module": ["v", "w"]}), entries={("w", "param"): entry})
    assert differences(a, manifest({"module": ["v"]})) == {}
    assert differences(a, manifest({"module": ["w"]})) == {"names.v": "a"}
    moment = replace(a, entries={("v", "exp_avg"): replace(entry, parameter="v", slot="exp_avg")})
    assert differences(moment, manifest({"module": ["w"]})) == {"names.v": "a"}


def test_how_a_run_was_saved_is_named() -> None:
    a, b = (manifest({}, replace(FLAT, version=version)) for version in ("1", "2"))
    assert states.states(a, b)[0] == []
    assert not_compared(a, b) == ["engine.version"]


@pytest.mark.parametrize("fact", [{"guessed": True}, {"ordered": True}, {"file": "x.pt"}])
def test_what_is_known_of_names_is_no_matter_of_saving(fact: dict[str, Any]) -> None:
    """Nor is what a file is called; which folders a save has is one."""
    a, b = manifest({}, PLAIN), manifest({}, replace(PLAIN, **fact))
    assert states.states(a, b) == states.states(b, a) == ([], [])
    folders = manifest({}, replace(PLAIN, folders=("model", "optimizer")))
    assert not_compared(a, folders) == ["engine.folders"]


# -- what depends on the files of both


ONE, TWO = Origin(zero_stage=1, dp=2), Origin(zero_stage=1, dp=4)


@pytest.mark.parametrize("part", ["tensor_parallel", "pipeline", "universal"])
def test_how_tensors_were_cut_is_compared_of_files_of_the_same_sizes(part: str) -> None:
    a, b = (manifest({part: {"ranks": ranks}}, origin=ONE) for ranks in (1, 2))
    assert differences(a, b) == {f"{part}.ranks": (1, 2)}
    other = b.replace(origin=TWO)
    assert states.states(a, other) == states.states(other, a) == ([], [])


def test_states_that_no_form_keeps_are_compared_of_the_same_engine() -> None:
    a, b = (manifest({"optimizer": {"other": {"w": {"k": value}}}}) for value in (1, 2))
    assert differences(a, b) == {"optimizer.other.w.k": (1, 2)}
    assert states.states(a, b.replace(engine=PLAIN)) == ([], [])
    assert states.states(a, manifest({})) == ([], [])  # `values.lacking` says it


def test_what_further_ranks_state() -> None:
    """What is not listed of a rank is as the first rank has it."""
    state = {"client_state": {"seed": 1, "epoch": 3}}
    a = manifest(state, of_ranks={"rank_1": {"client_state.seed": 2}})
    assert differences(a, manifest(state)) == {"rank_1: client_state.seed": (2, 1)}
    assert differences(manifest(state), a) == {"rank_1: client_state.seed": (1, 2)}
    b = manifest(state, of_ranks={"rank_1": {"client_state.seed": 2, "client_state.epoch": 4}})
    assert differences(a, b) == {"rank_1: client_state.epoch": (3, 4)}
    assert states.states(a, a) == ([], [])
    alone = manifest({}, of_ranks={"rank_1": {"client_state.seed": 2, "epoch": 4}})
    assert differences(alone, manifest({"epoch": 3})) == {
        "epoch": "b",
        "rank_1: client_state.seed": (2, None),
        "rank_1: epoch": (4, 3),
    }
    of_all = manifest(state, of_ranks={"rank_1": {"client_state": {"seed": 2, "epoch": 3}}})
    assert differences(of_all, manifest(state)) == {"rank_1: client_state.seed": (2, 1)}
    other = b.replace(origin=TWO)
    lines, sentences = states.states(a, other)
    assert lines == []
    assert [line.partition(" of the ranks after")[0] for line in texts(sentences)] == [
        "client_state.seed",
        "client_state.seed, client_state.epoch",
    ]


def test_what_files_state_of_their_parts() -> None:
    """A version of an engine may not write all of it."""
    a = manifest({}, layout={"f": {"offset": 4, "old": 1}})
    b = manifest({}, layout={"f": {"offset": 5, "new": 1}})
    assert differences(a, b) == {"f: layout.offset": (4, 5)}
    assert not_compared(a, b) == ["f"]
    assert differences(a, manifest({})) == {"f: layout.offset": "a", "f: layout.old": "a"}
    assert differences(manifest({}), a) == {"f: layout.offset": "b", "f: layout.old": "b"}
    assert states.states(a, b.replace(origin=TWO)) == ([], [])


def test_parts_that_one_version_does_not_state_are_in_order() -> None:
    layouts = dict.fromkeys("hgfedcba", 1)
    a, b = (manifest({}, layout={"f": own}) for own in (layouts, {"offset": 1}))
    names = ", ".join(f"f: layout.{key}" for key in "abcd")
    assert texts(states.states(a, b)[1]) == [
        f"{names} and 5 more: the two differ in how they were saved"
    ]


def test_modules_of_another_type_are_other_files() -> None:
    """So what only one of them states of its parts is no difference."""
    a, b = (
        manifest({}, replace(FLAT, dtype=dtype), layout=layout)
        for dtype, layout in (("bf16", {"f": {"offset": 4}}), ("fp16", {}))
    )
    assert states.twins(a, a)
    assert not states.twins(a, b)
    assert states.states(a, b) == ([], [])


def test_a_stage_of_zero_is_as_good_as_none() -> None:
    """Files without ZeRO state none, or this."""
    part = {"universal": {"ranks": 1}}
    a, b = (manifest(part, origin=Origin(zero_stage=stage, dp=2)) for stage in (0, None))
    assert states.twins(a, b)
    assert not states.twins(a, manifest(part, origin=ONE))


def tied(origin: Origin, engine: Engine, *aliases: str, **more: Any) -> Manifest:
    parameters = {"w": Parameter((2,), aliases=aliases)}
    return manifest({}, engine, origin).replace(parameters=parameters, **more)


def test_second_names_that_files_of_other_sizes_lack() -> None:
    a = tied(ONE, FLAT, "head")
    assert differences(a, tied(TWO, FLAT)) == {"names.head": "a"}
    assert differences(tied(TWO, FLAT), a) == {"names.head": "b"}
    assert states.states(a, tied(TWO, FLAT, "head")) == ([], [])
    own = {"head": Parameter((2,), aliases=("w",))}
    first = replace(manifest({}, FLAT, TWO), parameters=own)
    assert states.states(a, first) == ([], [])
    assert states.states(a, tied(TWO, FLAT, state={"module": ["head"]})) == ([], [])
    assert states.states(a, manifest({}, FLAT, TWO)) == ([], [])  # it lacks the parameter
    assert differences(a, tied(Origin(), PLAIN)) == {"names.head": "a"}
    assert not_compared(a, tied(Origin(), replace(PLAIN, dialect="hf"))) == ["names.head"]
    assert not_compared(a, tied(Origin(), replace(PLAIN, storage="one"))) == ["names.head"]
    assert not_compared(a, tied(Origin(), GRAPH)) == ["names.head"]
    weights = tied(Origin(), PLAIN, groups=None)
    assert states.states(a, weights)[0] == []
    assert not_compared(a, weights) == ["schedulers, counters and the like"]


def below(path: str, value: Any) -> dict[str, Any]:
    """A state with a value at a path."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value  # type: ignore[no-any-return]


@pytest.mark.parametrize("place", ["megatron.common.args", "client_state.args", "trainer_options"])
def test_each_program_keeps_its_arguments_in_a_place_of_its_own(place: str) -> None:
    a, b = (manifest(below(f"{place}.world_size", size)) for size in (2, 3))
    assert (differences(a, b), not_compared(a, b)) == ({}, [f"{place}.world_size"])


BESIDE = {
    "megatron.common.args.seed": "megatron.common.args.other",
    "client_state.args.seed": "client_state.args.other",
    "client_state.universal_checkpoint_info": "client_state.other",
    "trainer_options": "",
    "train_step_info": "",
}
"""What some versions alone write, and what else is in the dictionary around it."""


@pytest.mark.parametrize("path", BESIDE)
def test_what_a_version_does_not_write_is_named(path: str) -> None:
    a = manifest(below(path, {"x": 1}))
    b = manifest(below(BESIDE[path], 1) if BESIDE[path] else {})
    assert path in ", ".join(not_compared(a, b))
    assert not any(key.startswith(path) for key in differences(a, b))


@pytest.mark.parametrize(("argument", "is_lost"), [("no_save_rng", False), ("bf16", True)])
def test_random_states_of_a_run_that_saves_none(argument: str, is_lost: bool) -> None:
    """It says so among its arguments; no other argument excuses that they are missing."""
    a, b = (
        manifest({"megatron": {"objects": {"x": 1, **rng}, "common": {"args": {argument: value}}}})
        for value, rng in ((False, {"rng_0": 1}), (True, {}))
    )
    assert differences(a, b) == ({"megatron.objects.rng_0": "a"} if is_lost else {})


def test_random_states_of_runs_of_other_sizes() -> None:
    def megatron(size: int, **objects: int) -> Manifest:
        args = {"tensor_model_parallel_size": size}
        return manifest({"megatron": {"objects": objects, "common": {"args": args}}})

    a, b = megatron(1, both=1, rng_0=1), megatron(2, both=2, rng_1=1)
    assert differences(a, b) == {"megatron.objects.both": (1, 2)}
    said = dict(line.split(":", 1) for line in texts(states.states(a, b)[1]))
    assert [*said][1:] == ["megatron.objects.rng_0", "megatron.objects.rng_1"]
    scheduled = replace(a, state={**a.state, "lr_scheduler": {"last_epoch": 7}})
    assert differences(scheduled, b) == {"megatron.objects.both": (1, 2), "lr_scheduler": "a"}
    same = megatron(1, both=2, rng_1=1)
    assert differences(a, same) == {
        "megatron.objects.both": (1, 2),
        "megatron.objects.rng_0": "a",
        "megatron.objects.rng_1": "b",
    }


def wrapped(name: str | None, **optimizer: Any) -> Manifest:
    engine = replace(FLAT, optimizer_class=name)
    return manifest({"optimizer": optimizer}, engine, origin=ONE)


def test_what_another_wrapper_of_the_same_engine_has_no_place_for() -> None:
    """One that leaves clipping to the configuration, and one that keeps no scale of its own."""
    plain, third = "BF16_Optimizer", "DeepSpeedZeroOptimizer_Stage3"
    clipped = wrapped("FP16_Optimizer", clip_grad=1.0)
    for name in (third, "FP16_UnfusedOptimizer", None):
        assert not_compared(clipped, wrapped(name)) == ["engine.class", "optimizer.clip_grad"]
    assert differences(clipped, wrapped(plain)) == {"optimizer.clip_grad": "a"}
    assert differences(wrapped(third, clip_grad=1.0), wrapped(third)) == {
        "optimizer.clip_grad": "a"
    }
    assert differences(wrapped(plain, other_key=1.0), wrapped(third)) == {
        "optimizer.other_key": "a"
    }
    scaled = wrapped("FP16_Optimizer", cur_scale=2.0, step_of=1)
    said = ["optimizer.cur_scale, engine.class"]
    assert not_compared(scaled, wrapped(plain, cur_scale=1.0, step_of=1)) == said
    assert differences(scaled, wrapped(plain, cur_scale=1.0, step_of=2)) == {
        "optimizer.step_of": (1, 2)
    }
    assert differences(scaled, wrapped("FP16_Optimizer", cur_scale=1.0, step_of=1)) == {
        "optimizer.cur_scale": (2.0, 1.0)
    }


@pytest.mark.parametrize("where", ["beside", "among"])
def test_numbers_of_no_parameter_need_a_dictionary(where: str) -> None:
    """Those beside an optimizer's `state`, or in it."""
    a, name = manifest({"optimizer": {where: {"k": 1}}}), f"optimizer.{where}.k"
    assert differences(a, manifest({})) == {name: "a"}
    assert differences(a, manifest({}, PLAIN)) == {name: "a"}
    first, second = (manifest({"optimizer": {"x": n, where: {"k": n}}}) for n in (1, 2))
    assert [*differences(first, second)] == ["optimizer.x", name]
    for other in (manifest({}, GRAPH), replace(manifest({}), format=states.MERGED)):
        assert not_compared(a, other) == [name]


def test_each_kind_of_files_has_its_parts() -> None:
    own = manifest({"counters": {"x": 1}}, GRAPH)
    assert differences(own, manifest({}, GRAPH)) == {"counters": "a"}
    assert not_compared(own, manifest({}, replace(GRAPH, dialect="l2"))) == ["counters"]
    versions = manifest({"trainer_options": {"x": 1}})
    assert not_compared(versions, manifest({})) == ["trainer_options"]
