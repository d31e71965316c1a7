"""Where a checkpoint comes from, as a manifest's JSON states it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import ValidationError
from msgspec.structs import replace

from zckpt.core.checkpoint.manifest import Manifest, Run
from zckpt.core.checkpoint.origin import OF_ANY_ENGINE, Origin

WRITTEN = sorted(Path("tests/data/universal").glob("*/*/manifest.json"))
RUN = Origin("deepspeed", "0.19.8", 2, 4, "global_step7")
RUN_JSON = {
    "format": "deepspeed",
    "version": "0.19.8",
    "zero_stage": 2,
    "dp": 4,
    "tag": "global_step7",
}
DICTS_JSON = {"format": "gathered", "version": None, "dp": None, "tag": None}
MEGATRON_JSON = {
    "format": "megatron",
    "version": None,
    "zero_stage": None,
    "dp": 2,
    "tag": "iter_0000003",
}


@pytest.mark.parametrize(
    ("origin", "document"),
    [
        (RUN, RUN_JSON),
        (replace(RUN, tp=2, pp=2), {**RUN_JSON, "tp": 2, "pp": 2}),
        (
            replace(RUN, ep=2, tp=2, pp=1, model_ranks=2, tp_rules="llama"),
            {**RUN_JSON, "ep": 2, "tp": 2, "pp": 1, "model_ranks": 2, "tp_rules": "llama"},
        ),
        (
            Origin("onnxruntime", zero_stage=0, dp=1, dialect="hdf5"),
            {
                "format": "onnxruntime",
                "version": None,
                "zero_stage": 0,
                "dp": 1,
                "tag": None,
                "dialect": "hdf5",
            },
        ),
        (Origin("gathered"), DICTS_JSON),
        (
            Origin("gathered", slices=2, root="actor", mesh=("cpu", None)),
            {**DICTS_JSON, "slices": 2, "root": "actor", "mesh": ["cpu", None]},
        ),
        (
            Origin(
                "megatron", dp=2, tag="iter_0000003", nulls=OF_ANY_ENGINE | {"zero_stage"}
            ),
            MEGATRON_JSON,
        ),
        (
            Origin("x", other_fields={"odd": {"a": [1]}}),
            {**DICTS_JSON, "format": "x", "odd": {"a": [1]}},
        ),
        (Origin(nulls=frozenset()), {}),
        (Origin(nulls=frozenset({"format", "root"})), {"format": None, "root": None}),
    ],
)  # fmt: skip
def test_an_origin_and_its_json(origin: Origin, document: dict[str, Any]) -> None:
    assert list(origin.to_json().items()) == list(document.items())  # in this order
    assert Origin.of_json(document) == origin
    assert Manifest("/", "x", Run(origin), {}, {}).source == document


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: "-".join(path.parts[-3:-1]))
def test_what_every_version_wrote_is_read_and_written_again(path: Path) -> None:
    source = json.loads(path.read_text())["source"]
    origin = Origin.of_json(source)
    assert origin.other_fields == {}
    assert json.dumps(origin.to_json()) == json.dumps(source)


def test_there_are_such_files() -> None:
    assert len(WRITTEN) > 10


@pytest.mark.parametrize(
    "document",
    [
        None,
        "deepspeed",
        [],
        {"format": 1},
        {"version": 0.19},
        {"zero_stage": "two"},
        {"zero_stage": True},
        {"dp": "4"},
        {"dp": 4.0},
        {"tag": ["global_step7"]},
        {"tp": "2"},
        {"pp": {}},
        {"ep": [2]},
        {"model_ranks": "4"},
        {"tp_rules": 1},
        {"dialect": {}},
        {"slices": "all"},
        {"root": 0},
        {"mesh": "cpu"},
        {"mesh": ["cpu"]},
        {"mesh": [None, None]},
    ],
)
def test_values_of_other_types_are_refused(document: Any) -> None:
    with pytest.raises(ValidationError):
        Origin.of_json(document)


def test_keys_that_are_not_known_are_kept_and_are_no_fields() -> None:
    document = {"nulls": ["dp"], "others": {"dp": 3}}
    origin = Origin.of_json(document)
    assert (origin.dp, origin.nulls, origin.other_fields) == (None, frozenset(), document)
    assert origin.to_json() == document


def test_a_value_that_is_taken_away_is_null_if_every_engine_states_it() -> None:
    origin = replace(Origin.of_json({**RUN_JSON, "tp": 2}), tag=None, tp=None)
    assert origin.to_json() == {**RUN_JSON, "tag": None}


def test_sizes_are_those_that_are_stated() -> None:
    assert Origin().sizes == {}
    assert replace(RUN, tp=1, pp=2, ep=2).sizes == {"dp": 4, "tp": 1, "pp": 2, "ep": 2}
