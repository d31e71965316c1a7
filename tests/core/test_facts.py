"""Facts of an engine in a manifest's JSON."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from zckpt.core.facts import (
    Engine,
    FlatBufferEngine,
    NamedWeightsEngine,
    StateDictEngine,
    StepPlace,
    facts_of,
    with_facts,
)

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
            {"optimizer": {"other": {}}},
            {
                "engine": DICTS_JSON,
                "optimizer": {"other": {}, "step": {"in": "state", "type": "int"}},
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
        (GRAPH, None, {"user_dict": {}}, {"engine": GRAPH_JSON, "user_dict": {}}),
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
    assert facts_of(written) == (state, engine, place)


def test_a_manifest_of_fewer_keys_is_read() -> None:
    _, engine, place = facts_of({"engine": {"name": "graph", "dtype": "BF16"}})
    assert engine == NamedWeightsEngine("graph", None, None, "BF16", None, None)
    assert place is None
    assert facts_of({"engine": None, "optimizer": None}) == ({"optimizer": None}, None, None)


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
        {"engine": {"model": [], "file": "../x.ckpt"}},
        {"engine": {"model": [], "file": ".."}},
        {"optimizer": []},
        {"optimizer": {"step": "state"}},
        {"optimizer": {"step": {"in": 3}}},
        {"optimizer": {"step": {"shape": ["a"]}}},
        {"engine": {"config": {}, "dtype": "x"}},
    ],
)
def test_facts_of_other_types_are_refused(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Expected"):
        facts_of(state)
