"""Finds the element of a flat buffer at which each parameter begins.

A buffer has the parameters of one model chunk and one weight type, in reverse model order. Each
parameter begins at a multiple of 64 elements of its bucket. Buckets follow each other; the padding
at the end of a bucket is not stored. In `dp_reshardable` directories, each bucket is a tensor. In
`distrib_optim.pt`, all buckets are one tensor, and no file states where they end.

Megatron-Core's rule gives a position, and the bytes confirm it: the fp32 masters there must round
to the parameter's weights. This module compares the first elements of each parameter; a
conversion compares all of them (`Format.compares`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

from msgspec import Struct

from ....core.checkpoint.cast import are_rounded, rounded
from ....core.checkpoint.dtypes import SIZES
from ....core.checkpoint.entries import Entry
from ....core.grouping import by_key
from ....core.storage.fileio import align
from ....core.storage.fragments import Extent, Runs

ALIGNMENT = 64  # elements
SAMPLE = 64  # elements

ReadBytes = Callable[[Extent], bytes]


class Local(Struct, frozen=True, eq=False):
    """A tensor rank's shard of a parameter: `numel` elements of type `dtype`.

    `first` is the byte range of the weight's first elements in its file (at most 64). These are
    compared with masters, to find the parameter in a flat buffer.
    """

    name: str
    numel: int
    dtype: str
    first: Extent


class Flat(Struct, frozen=True, eq=False):
    """One flat optimizer buffer of a model-parallel rank.

    `dtype` is the type of the weights. `sizes` are the element counts of its buckets. `tensors`
    maps each optimizer state to the file ranges of its buckets, in order. If `coalesced`, all
    buckets of the buffer are stored as a single tensor.
    """

    name: str
    dtype: str
    sizes: tuple[int, ...]
    tensors: dict[str, list[Runs]]
    coalesced: bool = False

    def part(self, slot: str, place: tuple[int, int], numel: int) -> Runs:
        """The file ranges of `numel` elements of a state, from `place` (bucket, element) on.

        `slot` is the name of the optimizer state.
        """
        bucket, start = place
        return self.tensors[slot][bucket].part(start, start + numel, SIZES["F32"])

    def entries(self, name: str, place: tuple[int, int], shape: tuple[int, ...]) -> Iterator[Entry]:
        """Yields the optimizer states of a parameter that begins at `place`: (bucket, element)."""
        for slot in self.tensors:
            yield Entry(name, slot, "F32", shape, self.part(slot, place, prod(shape)))


Places = tuple[tuple[int, int] | None, ...]
"""The place of each parameter as (bucket, element); None for one outside of the buffer."""

State = tuple[int, int, int]
"""How far a buffer is filled: (bucket, filled elements, bucket's start modulo ALIGNMENT)."""


def places(
    locals_: Sequence[Local], flat: Flat, read_bytes: ReadBytes, may_lack: bool = False
) -> list[Places]:
    """Finds the ways in which the parameters `locals_` fill a buffer exactly, in this order.

    A way lists each parameter's position (bucket, element). At most two ways are returned: two show
    that the bytes do not decide. With `may_lack`, the buffer may lack parameters: their position is
    None.
    """
    # parameters by the bytes of their first weight: only those to which a master rounds are tried
    firsts = enumerate(locals_) if may_lack else ()
    by_first = by_key(
        (read_bytes(local.first)[: SIZES[local.dtype]], number)
        for number, local in firsts
        if local.numel
    )
    full = len(flat.sizes) - 1, flat.sizes[-1]
    ends: list[Any] = []
    # for each next parameter: states with up to two ways, each one a pair of the previous way and
    # the last place
    at: list[dict[State, list[Any]]] = [{} for _ in range(len(locals_) + 1)]
    at[0][0, 0, 0] = [None]
    for number, states in enumerate(at):
        for state, ways in states.items():
            if state[:2] == full and (may_lack or number == len(locals_)):
                ends += ways
                continue
            for place in _starts(flat, state):
                candidates = (
                    by_first.get(_rounded(flat, place, read_bytes), ()) if may_lack else [number]
                )
                for other in candidates:
                    if not number <= other < len(locals_):
                        continue
                    local = locals_[other]
                    if not _fits(local, flat, state, place, read_bytes):
                        continue
                    base = place[1] % ALIGNMENT if flat.coalesced else 0
                    behind = place[0], place[1] + local.numel, base
                    kept_ways = at[other + 1].setdefault(behind, [])
                    kept_ways += [(way, (other, place)) for way in ways]
                    del kept_ways[2:]
        states.clear()
    result = []
    for way in ends[:2]:
        chosen: dict[int, tuple[int, int]] = {}
        while way is not None:
            way, (other, place) = way
            chosen[other] = place
        result.append(tuple(chosen.get(number) for number in range(len(locals_))))
    return result


def _starts(flat: Flat, state: State) -> list[tuple[int, int]]:
    """All positions (bucket, element) at which the next parameter may begin.

    `state` says how far the buffer is filled. A parameter begins at the next multiple of 64
    elements, or in a new bucket.
    """
    bucket, end, base = state
    if flat.coalesced:
        # a new bucket may begin at any element; the bytes show whether one does
        starts = sorted({base + align(end - base, ALIGNMENT), end})
        return [(0, start) for start in starts if start <= flat.sizes[0]]
    start = align(end, ALIGNMENT)
    result = [(bucket, start)] if start <= flat.sizes[bucket] else []
    # a copy of a tied embedding begins a bucket, and the previous bucket is filled up
    if flat.sizes[bucket] in (end, start) and bucket + 1 < len(flat.sizes):
        result.append((bucket + 1, 0))
    return result


def _rounded(flat: Flat, place: tuple[int, int], read_bytes: ReadBytes) -> bytes:
    """The bytes of the master at `place`, rounded to the type of the weights.

    Empty at the end of the buffer, and for a type to which zckpt does not round.
    """
    first = [rounded(read_bytes(run.extent), flat.dtype) for run in flat.part("master", place, 1)]
    return next(iter(first), None) or b""


def _fits(
    local: Local, flat: Flat, state: State, place: tuple[int, int], read_bytes: ReadBytes
) -> bool:
    """Whether a parameter may begin at position `place` in a buffer that is filled as `state` says.

    There must be space for it there. If it begins a new bucket, the previous bucket must have no
    space for it. Its first masters must round to its first weights.
    """
    if place[0] > state[0] and align(state[1], ALIGNMENT) + local.numel <= flat.sizes[state[0]]:
        return False
    if place[1] + local.numel > flat.sizes[place[0]]:
        return False
    runs = flat.part("master", place, local.first.length // SIZES[local.dtype])
    wide = b"".join(read_bytes(run.extent) for run in runs)
    return not local.numel or are_rounded(wide, "F32", read_bytes(local.first), local.dtype) is True
