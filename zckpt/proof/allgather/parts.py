"""The parts of tensors that ranks hold: under which names, and which process reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import TypeGuard

from ...core.dtypes import SIZES
from ...core.fragments import Box, Runs, solid
from ...core.manifest import Entry, Manifest
from ...core.partition import (
    Member,
    Partition,
    Partitioned,
    Whole,
)


def alone(entry: Entry) -> Partition:
    """A tensor as the only part there is of it."""
    fragments = entry.fragments
    if isinstance(fragments, Box):  # the only one, so it is the whole tensor
        size = fragments.size
        last = sum(
            (count - 1) * step
            for count, step in zip(fragments.sizes, fragments.strides, strict=True)
        )
        extent = fragments.extent.part(fragments.first * size, (fragments.first + last + 1) * size)
        return Whole(entry.name, entry.dtype, fragments.sizes, extent, fragments.strides)
    # a piece that is cut along an inner axis has many runs, between the runs of other pieces
    runs = (run for fragment in fragments for run in fragment.runs(0, entry.numel))
    extents = tuple(run.extent for run in sorted(runs, key=lambda run: run.start))
    return Partitioned(entry.dtype, extents, [Member(entry.name, entry.shape, 0)])


def named(
    parts: Sequence[Partition], manifest: Manifest
) -> tuple[list[Partition], dict[str, Entry], dict[str, Entry]]:
    """The parts, each under its own key; the tensors by name; further copies of them by key.

    A tied weight gets its owner's name. Copies are whole momenta on several ranks, and tied weights
    that were saved separately.
    """
    owners = {alias: name for name, about in manifest.parameters.items() for alias in about.aliases}
    named: list[Partition] = []
    entries: dict[str, Entry] = {}
    copies: dict[str, Entry] = {}
    for part in parts:
        if isinstance(part, Partitioned):
            for member in part.members:
                entry = Entry(member.name, part.dtype, member.shape, Runs([]))
                entries.setdefault(member.name, entry)
            named.append(part)
            continue
        parameter, _, slot = part.name.rpartition("/")
        name = f"{owners.get(parameter, parameter)}/{slot}"
        fragments = Runs([]) if part.strides else solid(prod(part.shape), part.extent)
        entry = Entry(name, part.dtype, part.shape, fragments)
        key = name if name not in entries else f"{name}#{len(copies)}"
        (entries if key == name else copies)[key] = entry
        named.append(replace(part, name=key))
    return named, entries, copies


def is_flat(part: Partition) -> TypeGuard[Whole]:
    return isinstance(part, Whole) and part.strides is None


def spread(part: Whole, size: int) -> Partitioned:
    """A whole tensor cut into a part for each process, so that each reads only its own."""
    width = SIZES[part.dtype]
    numel = part.extent.length // width
    each = -(-numel // size) * width
    ends = [min((rank + 1) * each, numel * width) for rank in range(size)]
    ranks = [part.extent.part(min(rank * each, end), end) for rank, end in enumerate(ends)]
    return Partitioned(part.dtype, tuple(ranks), [Member(part.name, part.shape, 0)])


def by_kind(parts: Sequence[Partitioned]) -> list[Partitioned]:
    """Sorted by what fits into common buckets, else in their order."""
    kinds: dict[tuple[str, int], list[Partitioned]] = {}
    for part in parts:
        kinds.setdefault((part.dtype, len(part.ranks)), []).append(part)
    return [part for alike in kinds.values() for part in alike]
