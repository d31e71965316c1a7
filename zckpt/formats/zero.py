"""The arithmetic of ZeRO partitions: the elements that each rank owns. No I/O.

ZeRO-1/2 concatenate the parameters of a group, pad the end, and cut the result into partitions:

    group   [ a a a a | a b b b | b b c . ]      dots are padding
    rank        0         1         2

ZeRO-3 cuts every parameter separately and pads its end; a rank concatenates its slices:

    a [ a a a | a a . ]   b [ b b | b b ]   c [ c | . ]
    rank 0    a a a b b c                   rank 1    a a . b b .
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from msgspec import Struct

from ..core.storage.fragments import Extent, Fragment, Runs


def round_robin(count: int, dp: int) -> list[int]:
    """The order in which `round_robin_gradients` lays out `count` parameters: 0, dp, ..., 1, dp+1..

    It depends on the data-parallel size. DeepSpeed 0.4.x to 0.19.8, stage_1_and_2.py
    `_round_robin_reorder`.
    """
    return [place for first in range(min(dp, count)) for place in range(first, count, dp)]


def undo_round_robin(count: int, dp: int) -> list[int]:
    """For each parameter in the user's order: its position in the order of `round_robin`."""
    places = [0] * count
    for laid_out, original in enumerate(round_robin(count, dp)):
        places[original] = laid_out
    return places


def offsets(numels: Sequence[int], paddings: Sequence[int]) -> list[int]:
    """Where each parameter begins in its flat group, in elements; last, the length of the group.

    `paddings[i]` zeros follow parameter i (DeepSpeed 0.19 `parameter_alignment`).
    """
    sizes = (numel + padding for numel, padding in zip(numels, paddings, strict=True))
    return list(accumulate(sizes, initial=0))


def fits(total: int, padded: int, dp: int) -> bool:
    """Whether a group of `total` elements may be stored as `padded` elements on `dp` ranks.

    The padding fills up to a multiple of 2*dp (of dp before 0.5.1; DeepSpeed's
    `nccl_start_alignment_factor`), so it is smaller than 2*dp. Elastic checkpoints are saved
    without the padding.
    """
    return 0 <= padded - total < 2 * dp


def partition_sizes(total: int, dp: int) -> set[int]:
    """The two lengths that a rank's padded partition of a group may have.

    DeepSpeed has aligned a group to dp elements (before 0.5.1) or 2*dp.
    """
    return {2 * -(-total // (2 * dp)), -(-total // dp)}


def partition_size(total: int, dp: int) -> int:
    """The number of elements in each rank's padded partition of a group (DeepSpeed since 0.5.1)."""
    return 2 * -(-total // (2 * dp))


def alignment_paddings(numels: Sequence[int], size: int) -> list[int]:
    """The number of zeros that follow each parameter under `parameter_alignment` (DeepSpeed 0.19).

    They make the next parameter begin at a multiple of 16 bytes, so no zeros follow the last one.
    `size` is the number of bytes per element of the module.
    """
    alignment, end, paddings = max(1, 16 // size), 0, []
    for numel in numels[:-1]:
        paddings.append(-(end + numel) % alignment)
        end += numel + paddings[-1]
    return [*paddings, 0][: len(numels)]


def sub_groups(widths: Sequence[int], limit: int) -> list[list[int]]:
    """Cuts a group into ZeRO-3's sub-groups: lists of the parameters' positions.

    `widths` are a rank's elements per parameter. A sub-group is closed once it has `limit`
    elements, so the cuts depend on the data-parallel size (DeepSpeed 0.19.8, stage3.py
    `_create_fp16_sub_groups`).
    """
    if limit >= sum(widths):
        return [list(range(len(widths)))]
    groups: list[list[int]] = [[]]
    elements = 0
    for place, width in enumerate(widths):
        if elements >= limit:
            groups.append([])
            elements = 0
        groups[-1].append(place)
        elements += width
    return groups


class FlatGroup(Struct, eq=False, dict=True):
    """One flat buffer of a parameter group: the ranks' partitions, one after another.

    `size` is the number of bytes per element.
    """

    partitions: Sequence[Extent]
    size: int

    def __post_init__(self) -> None:
        lengths = (part.length // self.size for part in self.partitions)
        self.starts = list(accumulate(lengths, initial=0))

    @property
    def numel(self) -> int:
        """Elements on all ranks, padding included."""
        return self.starts[-1]

    def owns(self, rank: int, start: int, stop: int) -> bool:
        """Whether the partition of `rank` contains any of the buffer's elements [start, stop)."""
        return start < self.starts[rank + 1] and stop > self.starts[rank] and stop > start

    def cut(self, start: int, stop: int) -> Runs:
        """The byte ranges in files of the buffer's elements [start, stop), in rank order."""
        rank = bisect_right(self.starts, start, hi=len(self.partitions)) - 1
        fragments, place = [], start
        while place < stop:
            end = min(stop, self.starts[rank + 1])
            first = self.starts[rank]
            extent = self.partitions[rank].part(
                (place - first) * self.size, (end - first) * self.size
            )
            fragments.append(Fragment(place - start, end - start, extent))
            place, rank = end, rank + 1
        return Runs(fragments)
