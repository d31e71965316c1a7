"""The map: every element of every tensor once, and few lines for large checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from zckpt.core.checkpoint.entries import Entry
from zckpt.core.checkpoint.manifest import Files, Manifest, Run
from zckpt.core.checkpoint.origin import Origin
from zckpt.core.storage.fragments import Extent, Fragment, Runs, Slices, solid
from zckpt.judging.damaged_source import Found
from zckpt.judging.inventory import of_engine
from zckpt.reporting import byte_map, numbers

from ..conftest import EXAMPLE
from .conftest import Document

Make = Callable[..., Document]
GRID = {"tp": 2, "pp": 2}


def test_pieces_are_the_bytes_of_tensors(document: Make) -> None:
    made = document(EXAMPLE)
    pieces, table = made["map"]["pieces"], made["tensors"]
    lengths = dict.fromkeys(range(len(table["name"])), 0)
    for number, tensor in enumerate(pieces["tensor"]):
        lengths[tensor] += pieces["length"][number]
        assert pieces["slot"][number] == table["slot"][tensor]
        assert pieces["group"][number] == made["map"]["of_tensor"][tensor]
    assert list(lengths.values()) == table["bytes"]


@pytest.mark.parametrize(
    ("format", "name", "source", "rank"),
    [
        ("deepspeed", "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt", {"dp": 4}, {"dp": 3}),
        (
            *("deepspeed", "zero_pp_rank_1_mp_rank_03_model_states.pt", GRID),
            {"dp": 1, "tp": 1, "pp": 1},
        ),
        ("deepspeed", "mp_rank_02_model_states.pt", GRID, {"tp": 0, "pp": 1}),
        ("deepspeed", "mp_rank_00_model_states.pt", {"dp": 4}, None),
        ("dcp", "__12_0.distcp", {}, {"dp": 12}),
        ("gathered", "pytorch_model_fsdp_rank_2.pt", {}, {"dp": 2}),
        ("gathered", "model.safetensors", {}, None),
    ],
)  # fmt: skip
def test_ranks_in_names(
    format: str, name: str, source: dict[str, Any], rank: dict[str, int] | None
) -> None:
    manifest = Manifest("", format, Run(Origin.of_json(source)), {}, {}, files=Files(paths=(name,)))
    (row,) = of_engine(manifest)
    assert byte_map.rank_of(manifest.run.origin, row) == rank


def test_neighbours_are_one_piece(tmp_path: Path) -> None:
    runs = Runs([Fragment(n, n + 1, Extent("a", 10 + 4 * n, 4)) for n in range(3)])
    entry = Entry("w", "param", "F32", (3,), runs)
    made = byte_map.section(found(tmp_path, [entry], ["a"]), ())
    assert made["pieces"] == {
        "file": [0], "tensor": [0], "group": [0], "slot": ["param"],
        "start": [0], "stop": [3], "offset": [10], "length": [12],
    }  # fmt: skip


def found(folder: Path, entries: list[Entry], files: list[str]) -> Found:
    entries_by_name = {entry.key: entry for entry in entries}
    manifest = Manifest(
        str(folder), "dcp", Run(), entries_by_name, {}, files=Files(paths=tuple(files))
    )
    return Found(str(folder), manifest)


def test_many_pieces_are_summed(tmp_path: Path) -> None:
    flats = [Extent(f"f{rank}", 0, 1 << 30) for rank in range(100)]
    entries = [
        Entry(f"layers.{place // 30}.w{place % 30}", "master", "F32", (950,), cut)
        for place in range(300)
        for cut in (Slices(flats, 10 * place, 950, 4),)
    ]
    made = byte_map.section(found(tmp_path, entries, [flat.file for flat in flats]), ())
    pieces = made["pieces"]
    assert pieces["tensor"] is None
    assert len(pieces["file"]) == 10 * 95
    assert sum(pieces["length"]) == 300 * 950 * 4
    assert sum(pieces["stop"]) == 300 * 950


def test_a_document_of_50_000_tensors_is_small(tmp_path: Path) -> None:
    kinds = [f"mlp.experts.{number}.{name}.weight" for number in range(69) for name in "uvw"]
    names = [f"model.layers.{layer}.{kind}" for layer in range(61) for kind in kinds]
    slots = ("param", "master", "exp_avg", "exp_avg_sq")
    entries = [
        Entry(name, slot, "F32", (64, 64), solid(4096, Extent(f"f{rank}", 0, 16384)))
        for rank, name in zip(cycle(range(64)), names, strict=False)
        for slot in slots
    ]
    lines = {
        entry.name: dict.fromkeys(numbers.NUMBERS, 1 / (7 + number))
        for number, entry in enumerate(entries)
    }
    own = found(tmp_path, entries, [f"f{number}" for number in range(64)])
    made = {
        "tensors": numbers.table(own, lines),
        "numbers": numbers.section(own, lines, {}),
        "map": byte_map.section(own, ()),
    }
    assert len(entries) > 50_000
    assert made["map"]["pieces"]["tensor"] is None
    assert len(made["numbers"]["rows"]) == 61
    assert len(json.dumps(made)) < 30e6
