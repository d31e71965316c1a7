"""The shards of tensors in the ranks' files: gives them names, and divides them among processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from msgspec.structs import replace

from ...core.checkpoint.dtypes import SIZES
from ...core.checkpoint.entries import Entry, Key
from ...core.checkpoint.manifest import Manifest
from ...core.grouping import by_key
from ...core.ranks.partition import (
    BoxPart,
    FlatMember,
    Joined,
    Named,
    Nameless,
    Partition,
    Partitioned,
    Whole,
)
from ...core.storage.fragments import Box, Extent, Fragment, Runs
from .buckets import Cut, Spread, kind_of, side_by_side


def alone(entry: Entry) -> Named:
    """Describes a tensor that is not divided among ranks.

    The result is a `Whole` if the tensor lies in one file, perhaps with strides. Otherwise it is a
    `Partitioned`, whose parts are the byte ranges of the tensor's elements, in order.
    """
    fragments = entry.fragments
    if isinstance(fragments, Box):  # the only box, so it is the complete tensor
        size = fragments.size
        last = sum(
            (count - 1) * step
            for count, step in zip(fragments.sizes, fragments.strides, strict=True)
        )
        extent = fragments.extent.part(fragments.first * size, (fragments.first + last + 1) * size)
        return Whole(entry.key, entry.dtype, fragments.sizes, extent, fragments.strides)
    # a piece that is cut along an inner axis has many runs, between the runs of other pieces
    runs = (run for fragment in fragments for run in fragment.runs(0, entry.numel))
    extents = tuple(run.extent for run in sorted(runs, key=lambda run: run.start))
    return Partitioned(entry.dtype, extents, [FlatMember(entry.key, entry.shape, 0)])


class WithNames(NamedTuple):
    """The shards in the ranks' files, after each has got the name of its tensor.

    parts        the shards
    of_reader    the names that no file states, and that were taken from zckpt's own reader
    unsupported  tensors without a name, because zckpt's reader does not read them
    """

    parts: list[Named]
    of_reader: list[str]
    unsupported: list[Nameless]


def with_names(parts: Sequence[Partition], manifest: Manifest) -> WithNames:
    """Names the tensors whose names no file states, by comparing them with the manifest.

    A tensor gets the name of the manifest's tensor with the same slot (such as `exp_avg`), type,
    shape and position of the first byte.
    """
    entries: dict[tuple[str, int] | None, list[Entry]] = {}
    if any(isinstance(part, Nameless) for part in parts):
        for entry in (*manifest.entries.values(), *manifest.replicas):
            first = next(iter(entry.fragments.overlapping(0, 1)), None)
            if first is not None or not entry.numel:
                place = _place(first.extent) if first else None
                entries.setdefault(place, []).append(entry)
    result = WithNames([], [], [])
    for part in parts:
        if not isinstance(part, Nameless):
            result.parts.append(part)
            continue
        tensor = part.tensor
        begin = first_extent(tensor) if prod(tensor.shape) else None  # None: it is empty
        there = entries.get(_place(begin) if begin else None, [])
        same = [
            entry
            for entry in there
            if (entry.slot, entry.dtype, entry.shape) == (part.slot, tensor.dtype, tensor.shape)
        ]
        if same:
            there.remove(same[0])
            result.parts.append(replace(tensor, key=same[0].key))
            result.of_reader.append(same[0].name)
        # the manifest may store a tensor of at most one element as a number
        elif prod(tensor.shape) > 1 and all(entry.slot != "state" for entry in there):
            result.unsupported.append(part)
    return result


def _place(extent: Extent) -> tuple[str, int]:
    return os.path.abspath(extent.file), extent.offset


def first_extent(part: Joined | Whole) -> Extent | None:
    """The byte range (extent) that begins with a tensor's first element; None if it is empty."""
    if isinstance(part, Whole):
        return part.extent
    return next(
        (
            box.extent
            for box in part.parts
            if box.extent.length and not any((*box.offsets, box.first))
        ),
        None,
    )


def by_name(
    parts: Sequence[Named], manifest: Manifest
) -> tuple[list[Named], dict[Key, Entry], dict[Key, Entry]]:
    """Gives every tensor in the ranks' shards a unique key, such as ("fc1.weight", "exp_avg").

    Returns the shards, the tensors by key, and further copies by key. Copies are momenta that
    several ranks store completely, and second names of tied weights (under the first name).
    """
    owners = manifest.owners
    named: list[Named] = []
    entries: dict[Key, Entry] = {}
    copies: dict[Key, Entry] = {}
    for part in parts:
        if isinstance(part, Partitioned):
            for member in part.members:
                entry = Entry(*member.key, part.dtype, member.shape, Runs([]))
                entries.setdefault(member.key, entry)
            named.append(part)
            continue
        parameter, slot = part.key
        parameter = owners.get(parameter, parameter)
        first = first_extent(part)
        begin = Runs([Fragment(0, prod(part.shape), first)] if first else [])
        entry = Entry(parameter, slot, part.dtype, part.shape, begin)
        key = entry.key
        if key in entries:
            key = parameter, f"{slot}#{len(copies)}"
            copies[key] = entry
        else:
            entries[key] = entry
        named.append(replace(part, key=key))
    return named, entries, copies


def keys_of(part: Named) -> list[Key]:
    """The keys (name, slot) of one tensor, or of all tensors in a flat buffer."""
    return [each.key for each in part.members] if isinstance(part, Partitioned) else [part.key]


def cut_over(part: Named, size: int) -> Iterator[Cut]:
    """Divides a tensor or flat buffer into items that all-gathers can move, for `size` processes.

    A tensor of boxes (rectangular shards) gives an item for each group of boxes that lie side by
    side. A tensor in one file is divided among the processes. Boxes with strides are left out: see
    `strided`.
    """
    if isinstance(part, Joined):
        boxes = tuple(box for box in part.parts if box.strides is None)
        yield from side_by_side(replace(part, parts=boxes))
    elif isinstance(part, Partitioned):
        yield part
    elif not part.strides:
        yield _spread(part, size)


def _spread(part: Whole, size: int) -> Spread:
    width = SIZES[part.dtype]
    numel = part.extent.length // width
    part_size = -(-numel // size) * width
    ends = [min((rank + 1) * part_size, numel * width) for rank in range(size)]
    ranks = [part.extent.part(min(rank * part_size, end), end) for rank, end in enumerate(ends)]
    return Spread(part.dtype, tuple(ranks), [FlatMember(part.key, part.shape, 0)])


def strided(part: Named) -> Iterator[Joined]:
    """Yields the shards (boxes) of a tensor that are not row-major in their files.

    Each is a `Joined` (a tensor of boxes) with one box. These shards are compared one by one,
    without an all-gather.
    """
    if isinstance(part, Whole) and part.strides:
        box = BoxPart((0,) * len(part.shape), part.shape, part.extent, strides=part.strides)
        yield Joined(part.key, part.dtype, part.shape, (box,))
    elif isinstance(part, Joined):
        yield from (replace(part, parts=(box,)) for box in part.parts if box.strides)


def by_kind(parts: Sequence[Cut]) -> list[Cut]:
    """Sorts tensors and flat buffers so that those which one all-gather can move are neighbors."""
    kinds = by_key((kind_of(part), part) for part in parts)
    return [part for alike in kinds.values() for part in alike]
