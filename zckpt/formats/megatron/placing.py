"""At which elements of a flat buffer does each parameter begin?

A buffer has the parameters of one model part and one type, in the reverse of the model's order.
Each begins at a multiple of 64 elements of its bucket. Buckets follow each other; the padding at
the end of a bucket is not stored. `dp_reshardable` has one tensor for each bucket. In
`distrib_optim.pt` the buckets are one tensor, and no file says where they end.

So Megatron-Core's rule gives a place, and the bytes prove it: there the fp32 master rounds to the
weight. Here this is done for the first elements of each parameter; `read.check` does it for all.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from ...core.difference import rounds_to
from ...core.dtypes import SIZES
from ...core.fragments import Extent, Fragment, Runs
from ...core.values import valueclass

ALIGNMENT = 64  # elements
SAMPLE = 64  # elements

ReadBytes = Callable[[Extent], bytes]


@valueclass(eq=False)
class Local:
    """One rank's part of a parameter: its elements, and where the first of its weight lie."""

    name: str
    numel: int
    dtype: str
    first: Extent


@valueclass(eq=False)
class Flat:
    """One flat buffer of a model-parallel rank, or the buckets of it.

    `dtype` is that of the weights. `tensors` has for every slot the elements of each bucket, whose
    sizes are `sizes`. If `coalesced`, the one bucket is all buckets of the buffer in sequence.
    """

    name: str
    dtype: str
    sizes: tuple[int, ...]
    tensors: dict[str, list[Runs]]
    coalesced: bool = False

    def part(self, slot: str, place: tuple[int, int], numel: int) -> Runs:
        """The `numel` elements of a slot that begin at a place (bucket, element)."""
        bucket, start = place
        runs, stop = self.tensors[slot][bucket], start + numel
        parts = []
        for run in runs.overlapping(start, stop):
            low, high = max(start, run.start), min(stop, run.stop)
            size = run.extent.length // (run.stop - run.start)
            extent = run.extent.part((low - run.start) * size, (high - run.start) * size)
            parts.append(Fragment(low - start, high - start, extent))
        return Runs(parts)


Places = tuple[tuple[int, int], ...]


def places(locals_: Sequence[Local], flat: Flat, read: ReadBytes) -> list[Places]:
    """All ways to place parameters, in the order of the buffer, so that nothing is left over.

    A place is (bucket, element). Up to two ways are given: with more than one the bytes do not
    decide.
    """
    if flat.coalesced:
        return _coalesced(locals_, flat, read)
    bucket = end = 0
    result = []
    for local in locals_:
        start = _aligned(end)
        if start + local.numel > flat.sizes[bucket]:
            # a copy of a tied embedding begins a bucket, and the one before is filled up
            if flat.sizes[bucket] not in (end, start) or bucket + 1 == len(flat.sizes):
                return []
            bucket, start = bucket + 1, 0
        if not _fits(local, flat, (bucket, start), read):
            return []
        result.append((bucket, start))
        end = start + local.numel
    is_full = bucket + 1 == len(flat.sizes) and flat.sizes[bucket] == end
    return [tuple(result)] if is_full else []


def _coalesced(locals_: Sequence[Local], flat: Flat, read: ReadBytes) -> list[Places]:
    """Behind each parameter a new bucket may begin, at once; the bytes tell whether it does.

    A state is where the last parameter ended, and where its bucket began, modulo the alignment.
    """
    states: dict[tuple[int, int], list[Places]] = {(0, 0): [()]}
    for local in locals_:
        following: dict[tuple[int, int], list[Places]] = {}
        for (end, base), ways in states.items():
            for start in sorted({base + _aligned(end - base), end}):
                at = (start + local.numel, start % ALIGNMENT)
                if at[0] > flat.sizes[0] or not _fits(local, flat, (0, start), read):
                    continue
                known = following.setdefault(at, [])
                known += [(*way, (0, start)) for way in ways]
                del known[2:]
        states = following
    ways = [way for (end, _), ways in states.items() if end == flat.sizes[0] for way in ways]
    return ways[:2]


def places_of_trained(
    locals_: Sequence[Local], flat: Flat, read: ReadBytes
) -> list[tuple[tuple[int, int] | None, ...]]:
    """As `places`, if some parameters are not in the buffer: None stands for their places.

    The bytes alone tell which ones these are.
    """
    masters: dict[tuple[int, int], bytes] = {}

    def fits(weights: bytes, local: Local, place: tuple[int, int]) -> bool:
        count = len(weights) // SIZES[local.dtype]
        if len(masters.get(place, b"")) < count * SIZES["F32"]:
            runs = flat.part("master", place, count)
            masters[place] = b"".join(read(run.extent) for run in runs)
        return _rounds(masters[place][: count * SIZES["F32"]], weights, local.dtype)

    rest = sum(_aligned(local.numel) + ALIGNMENT for local in locals_)
    total = sum(flat.sizes)
    before = [sum(flat.sizes[:bucket]) for bucket in range(len(flat.sizes))]
    # by the bucket, its next element, and where a bucket began: up to two ways, each one a pair of
    # the way before and the last place
    states: dict[tuple[int, int, int], list[Any]] = {(0, 0, 0): [None]}
    for local in locals_:
        weights = read(local.first)
        rest -= _aligned(local.numel) + ALIGNMENT
        following: dict[tuple[int, int, int], list[Any]] = {}
        for (bucket, end, base), ways in states.items():
            moves: list[tuple[tuple[int, int, int], tuple[int, int] | None]] = []
            if total - before[bucket] - end <= rest:
                moves.append(((bucket, end, base), None))
            for place in _starts(local, flat, (bucket, end, base)):
                if fits(weights, local, place):
                    stop = place[0], place[1] + local.numel, place[1] % ALIGNMENT
                    moves.append((stop if flat.coalesced else (*stop[:2], 0), place))
            for state, move in moves:
                known = following.setdefault(state, [])
                known += [(way, move) for way in ways]
                del known[2:]
        states = following
    full = len(flat.sizes) - 1, flat.sizes[-1]
    ends = [way for state, ways in states.items() if state[:2] == full for way in ways]
    result = []
    for way in ends[:2]:
        listed: list[tuple[int, int] | None] = []
        while way is not None:
            way, move = way
            listed.append(move)
        result.append(tuple(reversed(listed)))
    return result


def _starts(local: Local, flat: Flat, state: tuple[int, int, int]) -> list[tuple[int, int]]:
    """The places at which the next parameter of a buffer may begin."""
    bucket, end, base = state
    if flat.coalesced:
        starts = sorted({base + _aligned(end - base), end})
        return [(0, start) for start in starts if start + local.numel <= flat.sizes[0]]
    start = _aligned(end)
    if start + local.numel <= flat.sizes[bucket]:
        return [(bucket, start)]
    is_full = flat.sizes[bucket] in (end, start) and bucket + 1 < len(flat.sizes)
    return [(bucket + 1, 0)] if is_full and local.numel <= flat.sizes[bucket + 1] else []


def _aligned(element: int) -> int:
    return -(-element // ALIGNMENT) * ALIGNMENT


def _fits(local: Local, flat: Flat, place: tuple[int, int], read: ReadBytes) -> bool:
    """Whether the first masters round to the first weights."""
    if not local.numel:
        return True
    count = local.first.length // SIZES[local.dtype]
    runs = flat.part("master", place, count)
    wide = b"".join(read(run.extent) for run in runs)
    return _rounds(wide, read(local.first), local.dtype)


def _rounds(wide: bytes, narrow: bytes, dtype: str) -> bool:
    """Whether float32 numbers, rounded to another type, are these."""
    if len(wide) // SIZES["F32"] != len(narrow) // SIZES[dtype]:
        return False
    if dtype == "F32":
        return wide == narrow
    if dtype == "BF16":
        return rounds_to(memoryview(wide), memoryview(narrow))
    if dtype == "F16":
        values = struct.unpack(f"<{len(wide) // 4}f", wide)
        try:
            return struct.pack(f"<{len(values)}e", *values) == narrow
        except OverflowError:  # Python has no rounding to infinity
            return False
    return False
