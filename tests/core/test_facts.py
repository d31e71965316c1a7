"""Facts of an engine in a manifest's JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from zckpt.core.checkpoint.facts import (
    Engine,
    ExpertLayer,
    FlatBufferEngine,
    NamedWeightsEngine,
    Pipeline,
    StateDictEngine,
    StepPlace,
    TensorParallel,
    Vocabulary,
    facts_of,
    with_cuts,
    with_facts,
)
from zckpt.core.checkpoint.inert import Scalar
from zckpt.core.checkpoint.optimizer_states import NO_STATES
from zckpt.core.checkpoint.placement import Cut, Replicated

FLAT = FlatBufferEngine("flats", "1.2", "Wrapper", "BF16", True, None, {"stage": 2})
FLAT_JSON = {
    "name": "flats",
    "version": "1.2",
    "class": "Wrapper",
    "dtype": "BF16",
    "elastic": True,
    "excludes_frozen": None,
    "config": {"stage": 2},
}
DICTS = StateDictEngine(
    "dicts", "F32", ("app", 0), ("optim",), "flat", None, ("a", "b"), True, False
)
DICTS_JSON = {
    "name": "dicts",
    "dtype": "F32",
    "model": ["app", 0],
    "optimizer": ["optim"],
    "layout": "flat",
    "scheduler": None,
    "folders": ["a", "b"],
    "guessed": True,
    "adapter": False,
    "group_step": None,
}
GRAPH = NamedWeightsEngine("graph", None, "hdf5", "F16", "F32")
GRAPH_JSON = {
    "name": "graph",
    "version": None,
    "dialect": "hdf5",
    "dtype": "F16",
    "moments": "F32",
    "ordered": False,
}
LOSS = {"loss_scale": 8.0}


@pytest.mark.parametrize(
    ("engine", "place", "state", "document"),
    [
        (None, None, {"module": ["w"]}, {"module": ["w"]}),
        (
            FLAT,
            StepPlace("state", "int", stale=0),
            {"optimizer": LOSS},
            {
                "engine": FLAT_JSON,
                "optimizer": {**LOSS, "step": {"in": "state", "type": "int"}, "group_step": 0},
            },
        ),
        (
            FLAT,
            StepPlace("state", "I64", (1,)),
            {"optimizer": {}},
            {
                "engine": FLAT_JSON,
                "optimizer": {
                    "step": {"in": "state", "type": "I64", "shape": [1]},
                    "group_step": None,
                },
            },
        ),
        (
            replace(FLAT, ordered=True, given=True),
            None,
            {"optimizer": LOSS},
            {
                "engine": {**FLAT_JSON, "ordered": True, "hyper_parameters": "given"},
                "optimizer": {**LOSS, "step": None, "group_step": None},
            },
        ),
        (FLAT, None, {"module": []}, {"engine": FLAT_JSON, "module": []}),  # weights alone
        (DICTS, None, {}, {"engine": DICTS_JSON}),
        (
            DICTS,
            StepPlace("group", "int"),
            {"client_state": {}},
            {"engine": {**DICTS_JSON, "group_step": "int"}, "client_state": {}},
        ),
        (
            DICTS,
            StepPlace("state", "int"),
            {"optimizer": {"scale": {}}},
            {
                "engine": DICTS_JSON,
                "optimizer": {"scale": {}, "step": {"in": "state", "type": "int"}},
            },
        ),
        (
            replace(DICTS, whole=True, file="x.ckpt"),
            StepPlace("state", "F64"),
            {},
            {
                "engine": {**DICTS_JSON, "dialect": None, "file": "x.ckpt"},
                "optimizer": {"step": {"in": "state", "type": "F64"}},
            },
        ),
        (
            DICTS,
            StepPlace("state", "F32", stale=0),
            {},
            {
                "engine": DICTS_JSON,
                "optimizer": {"step": {"in": "state", "type": "F32"}, "group_step": 0},
            },
        ),
        (
            DICTS,
            StepPlace("group", "F32", (1,)),
            {},
            {
                "engine": {**DICTS_JSON, "group_step": "F32"},
                "optimizer": {"step": {"in": "group", "type": "F32", "shape": [1]}},
            },
        ),
        (
            DICTS,
            StepPlace("group", "int", optimizer="Prodigy"),
            {},
            {
                "engine": {**DICTS_JSON, "group_step": "int"},
                "optimizer": {"step": {"in": "group", "type": "int", "optimizer": "Prodigy"}},
            },
        ),
        (GRAPH, None, {"user_dict": {}}, {"engine": GRAPH_JSON, "user_dict": {}}),
        (GRAPH, None, {"optimizer": LOSS}, {"engine": GRAPH_JSON, "optimizer": LOSS}),
        (
            replace(GRAPH, ordered=None),
            None,
            {},
            {"engine": {key: value for key, value in GRAPH_JSON.items() if key != "ordered"}},
        ),
        (
            GRAPH,
            StepPlace("state", "I64", (1,), first=1),
            {"optimizer": {}},
            {
                "engine": GRAPH_JSON,
                "optimizer": {
                    "step": {"in": "state", "type": "I64", "shape": [1], "first": 1},
                    "group_step": None,
                },
            },
        ),
    ],
)
def test_facts_have_their_keys_in_a_manifest_and_come_back(
    engine: Engine | None, place: StepPlace | None, state: dict[str, Any], document: dict[str, Any]
) -> None:
    written = with_facts(state, engine, place)
    assert written == document
    assert list(written) == list(document)
    assert facts_of(written) == (state, engine, place, None, None, NO_STATES)


def test_a_manifest_of_fewer_keys_is_read() -> None:
    _, engine, place, *_ = facts_of({"engine": {"name": "graph", "dtype": "BF16"}})
    assert engine == NamedWeightsEngine("graph", None, None, "BF16", None, None)
    assert place is None
    nothing = dict.fromkeys(("engine", "optimizer", "pipeline", "tensor_parallel"))
    assert facts_of(nothing) == ({"optimizer": None}, None, None, None, None, NO_STATES)


def test_what_fewer_keys_leave_open_is_as_usual() -> None:
    """Nothing is guessed, an adapter or bare that is not said to be; one update counts once."""
    flats = facts_of({"engine": {"config": {}}}).engine
    assert flats == FlatBufferEngine(
        "", None, None, None, elastic=False, excludes_frozen=None, config={}
    )
    dicts = facts_of({"engine": {"model": []}}).engine
    assert dicts == StateDictEngine(
        *("", None, (), None, None, None, None), guessed=False, adapter=False, bare=False
    )
    place = facts_of({"optimizer": {"step": {"in": "group"}}}).step_place
    assert place == StepPlace("group", "F32", first=0, last_only=False, times=1)


def test_a_step_needs_no_other_state_of_the_optimizer() -> None:
    written = with_facts({}, GRAPH, StepPlace("state", "I64"))
    assert written["optimizer"] == {"step": {"in": "state", "type": "I64"}, "group_step": None}


def test_an_elastic_engine_needs_no_configuration() -> None:
    _, engine, *_ = facts_of({"engine": {"name": "flats", "elastic": True}})
    assert engine == FlatBufferEngine("flats", None, None, None, True, None, {})


def test_only_a_program_of_state_dicts_has_the_type_of_a_step_beside_its_name() -> None:
    assert facts_of({"engine": {**DICTS_JSON, "group_step": "int"}}).step_place is not None
    assert facts_of({"engine": {**FLAT_JSON, "group_step": "int"}}).step_place is None


def test_a_stale_step_is_no_state_of_the_program() -> None:
    facts = facts_of({"engine": FLAT_JSON, "optimizer": {**LOSS, "group_step": 0}})
    assert facts.state == {"optimizer": LOSS}


def test_a_place_counts_from_its_first_number() -> None:
    place = StepPlace("state", "I64", (1,), first=1)
    assert place.number(3) == Scalar(4, "I64", (1,))
    assert place.completed(4) == 3


@pytest.mark.parametrize(("ep", "local"), [(1, 8), (4, 2), (8, 1)])
def test_each_rank_has_as_many_experts(ep: int, local: int) -> None:
    layer = ExpertLayer("moe", 8, ep)
    engine = replace(FLAT, experts=(layer,))
    assert layer.local == local
    assert FlatBufferEngine.of_state(engine.to_state()) == engine


@pytest.mark.parametrize("ep", [-2, 0, 3, 16])
def test_a_layer_that_ranks_cannot_share_is_refused(ep: int) -> None:
    layers = [{"layer": "moe", "experts": 8, "ep": ep}]
    with pytest.raises(ValueError, match=f"cannot be spread evenly .*experts=8, ep={ep}"):
        facts_of({"engine": {**FLAT_JSON, "experts": layers}})


STAGES = Pipeline([["tied_modules.e.w", "1.w"], ["2.w"]], [[], ["2.b"]], [0, 1, 2], {0: "e"})
STAGES_JSON = {
    "parameters": [["tied_modules.e.w", "1.w"], ["2.w"]],
    "buffers": [[], ["2.b"]],
    "layers": [0, 1, 2],
    "tied": [[0, "e"]],
}
SLICES = TensorParallel({"1.w": Cut(0), "2.w": Replicated()}, {"1.w": Vocabulary(8, 5)})
SLICES_JSON = {
    "rules": {"1.w": "0", "2.w": "replicated"},
    "vocabulary": {"1.w": {"rows": 8, "used": 5}},
}


def test_how_a_model_was_cut_stands_last_in_a_manifest_and_comes_back() -> None:
    state = {"counters": {}, "optimizer": LOSS}
    written = with_facts(state, FLAT, None, STAGES, SLICES)
    assert written["pipeline"] == STAGES_JSON
    assert written["tensor_parallel"] == SLICES_JSON
    assert [*written] == ["engine", *state, "pipeline", "tensor_parallel"]
    assert [*written["pipeline"], *written["tensor_parallel"]] == [*STAGES_JSON, *SLICES_JSON]
    assert facts_of(json.loads(json.dumps(written))) == (
        state, FLAT, None, STAGES, SLICES, NO_STATES,
    )  # fmt: skip
    assert with_cuts(state, None, SLICES) == {**state, "tensor_parallel": SLICES_JSON}
    assert with_cuts(state, None, None) == state


def test_cuts_of_fewer_keys_are_read() -> None:
    stages = {key: value for key, value in STAGES_JSON.items() if key != "tied"}
    facts = facts_of({"pipeline": stages, "tensor_parallel": {"rules": {"w": "0"}}})
    assert facts.pipeline == replace(STAGES, tied={})
    assert facts.tensor_parallel == TensorParallel({"w": Cut(0)}, {})
    facts = facts_of({"tensor_parallel": {"rules": None, "vocabulary": SLICES_JSON["vocabulary"]}})
    assert facts.tensor_parallel == replace(SLICES, placements={})


def test_cuts_under_other_names() -> None:
    names = {"1.w": "1.v", "2.b": "2.c"}
    stages = STAGES.renamed(names)
    assert stages.parameters == [["tied_modules.e.w", "1.v"], ["2.w"]]
    assert (stages.buffers, stages.layers, stages.tied) == ([[], ["2.c"]], [0, 1, 2], {0: "e"})
    slices = SLICES.renamed(names)
    assert slices == TensorParallel({"1.v": Cut(0), "2.w": Replicated()}, {"1.v": Vocabulary(8, 5)})


@pytest.mark.parametrize(
    "state",
    [
        {"engine": "a text"},
        {"engine": {"name": 3}},
        {"engine": {"config": "a path"}},
        {"engine": {"config": {}, "elastic": "yes"}},
        {"engine": {"model": "a.path"}},
        {"engine": {"model": [], "folders": {}}},
        {"engine": {"model": [["a"]]}},
        {"engine": {"model": [], "optimizer": ["a", 10**9]}},
        {"engine": {"model": [], "optimizer": ["a", -1]}},
        {"engine": {"model": [], "file": "../x.ckpt"}},
        {"engine": {"model": [], "file": ".."}},
        {"optimizer": []},
        {"optimizer": {"step": "state"}},
        {"optimizer": {"step": {"in": 3}}},
        {"optimizer": {"step": {"shape": ["a"]}}},
        {"engine": {"config": {}, "dtype": "x"}},
        {"pipeline": "stages"},
        {"pipeline": {"parameters": []}},
        {"pipeline": {**STAGES_JSON, "parameters": [["w"], "w"]}},
        {"pipeline": {**STAGES_JSON, "parameters": {"w": 0}}},
        {"pipeline": {**STAGES_JSON, "buffers": [[1]]}},
        {"pipeline": {**STAGES_JSON, "layers": ["0"]}},
        {"pipeline": {**STAGES_JSON, "layers": [True]}},
        {"pipeline": {**STAGES_JSON, "tied": {"0": "e"}}},
        {"pipeline": {**STAGES_JSON, "tied": [0, "e"]}},
        {"pipeline": {**STAGES_JSON, "tied": [[0, "e", "f"]]}},
        {"pipeline": {**STAGES_JSON, "tied": [["e", 0]]}},
        {"tensor_parallel": ["rules"]},
        {"tensor_parallel": {"rules": ["0"]}},
        {"tensor_parallel": {"rules": {"w": 0}}},
        {"tensor_parallel": {"rules": {1: "0"}}},
        {"tensor_parallel": {**SLICES_JSON, "vocabulary": {"w": 5}}},
        {"tensor_parallel": {**SLICES_JSON, "vocabulary": {"w": {"rows": 8}}}},
        {"tensor_parallel": {**SLICES_JSON, "vocabulary": {"w": {"rows": "8", "used": 5}}}},
    ],
)
def test_facts_of_other_types_are_refused(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Expected|missing required"):
        facts_of(state)
