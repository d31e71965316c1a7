"""Made-up grids of about ten integers: a whole, and what the ranks of one axis hold of it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from zckpt.core.checkpoint.entries import Entry
from zckpt.core.checkpoint.manifest import Manifest, Parameter, Run
from zckpt.core.checkpoint.placement import Boxes, Replicated, Row, Sliced, Sum, Table
from zckpt.core.checkpoint.slicing import cut, replicated
from zckpt.core.checkpoint.weights import WEIGHTS
from zckpt.core.ranks.split import names_in, split
from zckpt.core.storage.fragments import Extent, Runs, solid

SIZE = 4
Files = dict[str, Any]  # what bytes of files hold, as numbers


class Placed(Struct):
    """A parameter, how it is cut, if it is, and by rank the places in the whole that it has."""

    name: str
    shape: tuple[int, ...]
    sliced: Sliced | None
    parts: list[Any]


class Grid(Struct):
    """A whole, and its ranks along one axis."""

    files: Files
    whole: Manifest
    table: Table
    ranks: list[Manifest]


def stored(files: Files, entry: Entry, values: Any, rank: str = "") -> Entry:
    """The entry, with its numbers in a file of its own."""
    file = rank + entry.name
    files[file] = values.reshape(-1).tolist()
    return replace(entry, fragments=solid(values.size, Extent(file, 0, values.size * SIZE)))


def numbers(files: Files, entry: Entry) -> list[int]:
    """All elements of an entry, each of which must be there once."""
    found: dict[int, int] = {}
    for fragment in entry.fragments:
        for run in fragment.runs(0, entry.numel):
            first = run.extent.offset // SIZE
            for place in range(run.start, run.stop):
                assert place not in found
                found[place] = files[run.extent.file][first + place - run.start]
    return [found[place] for place in range(entry.numel)]


def cut_up(name: str, shape: tuple[int, ...], axis: int, widths: list[list[int]]) -> Placed:
    """A tensor whose sub-parameters along an axis are each cut into these widths."""
    places, ranks = np.arange(prod(shape)).reshape(shape), len(widths[0])
    bounds = np.cumsum([width for part in widths for width in part])[:-1]
    pieces = np.split(places, bounds, axis)
    parts = [np.concatenate(pieces[rank::ranks], axis) for rank in range(ranks)]
    slicing = cut(prod(shape[:axis]), prod(shape[axis + 1 :]), widths)
    return Placed(name, shape, Sliced(shape, slicing, Boxes("cut")), parts)


def grid(placements: Sequence[Placed], slots: Sequence[str] = ("param",)) -> Grid:
    """The grid of these parameters, of which those named `buffer` are none."""
    files: Files = {}
    by_name, ranks = {each.name: each for each in placements}, len(placements[0].parts)
    trained = [each for each in placements if not each.name.startswith("buffer")]
    entries = {}
    for each in placements:
        for slot in slots if each in trained else ("param",):
            entry = Entry(each.name, slot, "I32", each.shape, Runs(()))
            values = len(files) * 1000 + np.arange(prod(each.shape))
            entries[entry.key] = stored(files, entry, values)
    parameters = {
        each.name: Parameter(each.shape, True, group, 3 + group)
        for group in (0, 1)
        for each in trained[group::2]
    }
    state = {"counters": {"global_steps": 3}, "optimizer": {"scale": 8}, "module": [*by_name]}
    buffers = tuple(each.name for each in placements if each not in trained)
    groups = ({"lr": 1.0}, {"lr": 2.0})
    whole = Manifest("run", "x", Run(), entries, parameters, buffers, groups, state=state)
    cuts = {each.name: each.sliced for each in placements if each.sliced is not None}
    rows = [
        Row(
            [name for name in names_in(whole) if by_name[name].parts[rank] is not None],
            {name: by_name[name].parts[rank].shape for name in cuts},
        )
        for rank in range(ranks)
    ]
    table, made = Table("rank", cuts, rows), []
    for rank, part in enumerate(split(whole, table)):
        own = {}
        for entry in part.entries.values():
            values = np.array(files[entry.name])[by_name[entry.parameter].parts[rank]]
            sliced = cuts.get(entry.parameter)
            if sliced is not None and sliced.placement.is_sum and entry.slot in WEIGHTS:
                values = values + 500 * rank
            own[entry.key] = stored(files, entry, values, f"{rank}:")
        made.append(replace(part, entries=own))
    return Grid(files, whole, table, made)


@st.composite
def placed(draw: st.DrawFn, name: str, ranks: int) -> Placed:
    """A parameter that is cut, a sum of parts, on all ranks, or on some."""
    kind = draw(st.sampled_from(["cut", "cut", "whole", "whole", "some"]))
    if kind == "cut":
        width = st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks)
        widths = draw(st.lists(width, min_size=1, max_size=2))
        widths[0][draw(st.integers(0, ranks - 1))] += 1
        axis, other, total = draw(st.integers(0, 1)), draw(st.integers(1, 2)), sum(map(sum, widths))
        return cut_up(name, (total, other) if axis == 0 else (other, total), axis, widths)
    shape = (draw(st.integers(1, 4)),)
    whole = np.arange(prod(shape))
    if kind == "some":
        holders = draw(st.sets(st.integers(0, ranks - 1), min_size=1))
        return Placed(name, shape, None, [whole if r in holders else None for r in range(ranks)])
    placement = draw(st.sampled_from([Replicated(), Sum()]))
    return Placed(name, shape, Sliced(shape, replicated(shape, ranks), placement), [whole] * ranks)


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    ranks, name = draw(st.integers(1, 4)), st.sampled_from([*"abcdef", "buffer_a", "buffer_b"])
    names = draw(st.lists(name, min_size=1, max_size=5, unique=True))
    slots = draw(st.sampled_from([("param",), ("master", "exp_avg"), ("param", "exp_avg")]))
    return grid([draw(placed(each, ranks)) for each in names], slots)
