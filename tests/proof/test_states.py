"""What two checkpoints state beside tensors, steps and groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from zckpt.core.facts import Engine, FlatBufferEngine, GraphEngine, StateDictEngine, StepPlace
from zckpt.core.fragments import Runs
from zckpt.core.inert import Foreign, Global
from zckpt.core.manifest import Entry, Manifest, Sibling
from zckpt.proof import states
from zckpt.proof.beside import siblings

FLAT = FlatBufferEngine("flats", None, None, None, False, None, {})
PLAIN = StateDictEngine("plain", None, (), None, None, None, None, False, False)
NAN = float("nan")
GRAPH = GraphEngine("graph", None, None, None, None)


def manifest(
    state: dict[str, Any], engine: Engine | None = FLAT, source: Any = None, **fields: Any
) -> Manifest:
    groups = ({"lr": 0.1},)
    return Manifest(
        "", "x", source or {}, {}, {}, groups=groups, engine=engine, state=state, **fields
    )


def differences(a: Manifest, b: Manifest) -> dict[str, Any]:
    return {
        line["key"]: line.get("only") or (line["a"], line["b"]) for line in states.states(a, b)[0]
    }


def not_compared(a: Manifest, b: Manifest) -> list[str]:
    return [line.partition(":")[0] for line in states.states(a, b)[1]]


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
    (sentence,) = sentences
    assert sentence.startswith("counters, lr_scheduler: only ")
    assert not_compared(a, manifest({"lr_scheduler": {"last_epoch": 7}}, PLAIN)) == ["counters"]
    assert differences(a, manifest({"lr_scheduler": {"last_epoch": 7}})) == {"counters": "a"}


def test_weights_alone_have_no_state() -> None:
    weights = Manifest("", "x", {}, {}, {}, engine=PLAIN)
    assert not_compared(manifest({"client_state": {"seed": 1}}), weights) == [
        "schedulers, counters and the like"
    ]


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
            manifest({"optimizer": optimizer}, source={"zero_stage": stage})
            for stage, optimizer in enumerate((numbers(8.0, dynamic), of(8.0, dynamic)))
        )
        other = manifest({"optimizer": of(4.0, dynamic)}, source={"zero_stage": 1})
        assert states.states(a, b) == ([], [])
        assert differences(a, other) == {"optimizer.cur_scale": (8.0, 4.0)}
        assert differences(b, other) == {"optimizer.loss_scaler.cur_scale": (8.0, 4.0)}


def test_keys_of_the_optimizer_depend_on_the_stage() -> None:
    a, b, c = (
        manifest({"optimizer": optimizer}, source={"zero_stage": stage})
        for stage, optimizer in ((2, {"clip_grad": 1.0}), (3, {}), (2, {}))
    )
    assert not_compared(a, b) == ["optimizer.clip_grad"]
    assert differences(a, c) == {"optimizer.clip_grad": "a"}


def test_types_of_steps_are_named() -> None:
    """Their places are compared by `values.step_places`."""
    a, b = (manifest({}, step_place=StepPlace("state", kind)) for kind in ("int", "F32"))
    assert states.states(a, a) == ([], [])
    assert not_compared(a, b) == ["step.type"]


def beside(tmp_path: Path, name: str, **files: str) -> Manifest:
    folder = tmp_path / name
    folder.mkdir()
    siblings = []
    for file, text in files.items():
        path = folder / file.replace("_json", ".json").replace("_pt", ".pt")
        path.write_text(text)
        siblings.append(Sibling(path.name, str(path), len(text)))
    return replace(manifest({}), root=name, siblings=tuple(siblings))


def test_files_beside_a_checkpoint(tmp_path: Path) -> None:
    state = '{"best_model_checkpoint": "%s", "step": %d}'
    a = beside(tmp_path, "a", config_json="one", trainer_state_json=state % ("a", 1))
    b = beside(tmp_path, "b", config_json="two", trainer_state_json=state % ("b", 1))
    c = beside(tmp_path, "c", trainer_state_json=state % ("a", 2), scheduler_pt="x", rng_pt="y")
    assert siblings(a, b) == ([{"key": "config.json", "a": "3 bytes", "b": "3 bytes"}], [])
    lines, sentences = siblings(a, c)
    assert [line["key"] for line in lines] == ["trainer_state.json", "scheduler.pt"]
    assert lines[1] == {"key": "scheduler.pt", "only": "b"}
    assert sentences == ["config.json: only beside a", "rng.pt: only beside c"]
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
    entry = Entry("w/param", "F32", (1,), Runs([]))
    a = replace(manifest({"module": ["v", "w"]}), entries={"w/param": entry})
    assert differences(a, manifest({"module": ["v"]})) == {}
    assert differences(a, manifest({"module": ["w"]})) == {"names.v": "a"}


def test_how_a_run_was_saved_is_named() -> None:
    a, b = (manifest({}, replace(FLAT, version=version)) for version in ("1", "2"))
    assert states.states(a, b)[0] == []
    assert not_compared(a, b) == ["engine.version"]
