"""At which elements of a flat buffer does each parameter begin?

A buffer has the parameters of one model part and one type, in the reverse of the model's order.
Each begins at a multiple of 64 elements of its bucket. Buckets follow each other; the padding at
the end of a bucket is not stored. `dp_reshardable` has one tensor for each bucket. In
`distrib_optim.pt` the buckets are one tensor, and no file says where they end.

So Megatron-Core's rule gives a place, and the bytes prove it: there the fp32 master rounds to the
weight. Here this is done for the first elements of each parameter; `read.check` does it for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from ....core.cast import are_rounded, rounded
from ....core.dtypes import SIZES
from ....core.fragments import Extent, Fragment, Runs

ALIGNMENT = 64  # elements
SAMPLE = 64  # elements

ReadBytes = Callable[[Extent], bytes]


class Local(Struct, frozen=True, eq=False):
    """One rank's part of a parameter: its elements, and where the first of its weight lie."""

    name: str
    numel: int
    dtype: str
    first: Extent


class Flat(Struct, frozen=True, eq=False):
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

    The bytes alone tell which ones these are. The first master behind a parameter is looked up
    among the first weights of the parameters that may follow.
    """
    by_first: dict[bytes, list[int]] = {}
    for number, local in enumerate(locals_):
        if local.numel:
            by_first.setdefault(read(local.first)[: SIZES[local.dtype]], []).append(number)
    full = len(flat.sizes) - 1, flat.sizes[-1]
    ends: list[Any] = []
    # by the next parameter that may follow: states (bucket, its next element, where a bucket began)
    # with up to two ways, each one a pair of the way before and the last place
    at: list[dict[tuple[int, int, int], list[Any]]] = [{} for _ in range(len(locals_) + 1)]
    at[0][0, 0, 0] = [None]
    for number, states in enumerate(at):
        for state, ways in states.items():
            if state[:2] == full:
                ends += ways
                continue
            for place in _next_starts(flat, state):
                first = _rounded(flat, place, read)
                for other in by_first.get(first, ()):
                    local = locals_[other]
                    if other < number or place not in _starts(local, flat, state):
                        continue
                    if not _fits(local, flat, place, read):
                        continue
                    stop = place[1] + local.numel
                    base = place[1] % ALIGNMENT if flat.coalesced else 0
                    known = at[other + 1].setdefault((place[0], stop, base), [])
                    known += [(way, (other, place)) for way in ways]
                    del known[2:]
        states.clear()
    result = []
    for way in ends[:2]:
        chosen: dict[int, tuple[int, int]] = {}
        while way is not None:
            way, (other, place) = way
            chosen[other] = place
        result.append(tuple(chosen.get(number) for number in range(len(locals_))))
    return result


def _next_starts(flat: Flat, state: tuple[int, int, int]) -> list[tuple[int, int]]:
    """All places at which any parameter may begin behind a state."""
    bucket, end, base = state
    if flat.coalesced:
        starts = sorted({base + _aligned(end - base), end})
        return [(0, start) for start in starts if start < flat.sizes[0]]
    start = _aligned(end)
    result = [(bucket, start)] if start < flat.sizes[bucket] else []
    if flat.sizes[bucket] in (end, start) and bucket + 1 < len(flat.sizes):
        result.append((bucket + 1, 0))
    return result


def _starts(local: Local, flat: Flat, state: tuple[int, int, int]) -> list[tuple[int, int]]:
    """The places at which a parameter may begin behind a state."""
    bucket, end, _ = state
    if flat.coalesced:
        return [
            place for place in _next_starts(flat, state) if place[1] + local.numel <= flat.sizes[0]
        ]
    start = _aligned(end)
    if start + local.numel <= flat.sizes[bucket]:
        return [(bucket, start)]
    is_full = flat.sizes[bucket] in (end, start) and bucket + 1 < len(flat.sizes)
    return [(bucket + 1, 0)] if is_full and local.numel <= flat.sizes[bucket + 1] else []


def _rounded(flat: Flat, place: tuple[int, int], read: ReadBytes) -> bytes:
    """The first master at a place, as a weight; empty for types that have no masters."""
    (run,) = flat.part("master", place, 1)
    return rounded(read(run.extent), flat.dtype) or b""


def _aligned(element: int) -> int:
    return -(-element // ALIGNMENT) * ALIGNMENT


def _fits(local: Local, flat: Flat, place: tuple[int, int], read: ReadBytes) -> bool:
    """Whether the first masters round to the first weights."""
    if not local.numel:
        return True
    count = local.first.length // SIZES[local.dtype]
    runs = flat.part("master", place, count)
    wide = b"".join(read(run.extent) for run in runs)
    return are_rounded(wide, "F32", read(local.first), local.dtype) is True
