"""Which parameters torch's ZeroRedundancyOptimizer gives to which rank, and the order they had.

    group        c  a  b  d        sorted by numel, the largest first; equal ones keep their order
    sizes        each goes to the rank with the fewest elements so far, the lowest of several
    ranks        [c, d]  [a, b]    numbered anew on every rank, through its part of every group

Sizes run on from group to group and count frozen parameters too. Ranks' own files have whole
tensors under these local numbers: dealing their lists again in the same way restores the order
(torch 2.13.0, distributed/optim/zero_redundancy_optimizer.py; a partition that the program chose,
as with `overlap_with_ddp`, follows another rule).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from ...errors import InconsistentCheckpoint


class OwnedParameter(NamedTuple):
    """A parameter by the rank that owns it, and by its place in that rank's part of its group."""

    rank: int
    position: int


def partition(groups: Sequence[Sequence[int]], world: int) -> list[list[list[int]]]:
    """What each rank owns of each group, by place in the group: `[rank][group]`."""
    parts: list[list[list[int]]] = [[] for _ in range(world)]
    sizes = [0] * world
    for numels in groups:
        for part in parts:
            part.append([])
        for place in sorted(range(len(numels)), key=lambda place: -numels[place]):
            rank = sizes.index(min(sizes))
            parts[rank][-1].append(place)
            sizes[rank] += numels[place]
    return parts


def dealt(ranks: Sequence[Sequence[Sequence[int]]]) -> list[list[OwnedParameter]]:
    """Every group's parameters in the order in which they were dealt, largest first.

    `ranks[rank][group]` lists numels in the order of the rank's local numbers. Raises
    InconsistentCheckpoint, which names rank and group, for lists that the rule never gives.
    """
    if len({len(groups) for groups in ranks}) > 1:
        counts = ", ".join(str(len(groups)) for groups in ranks)
        raise InconsistentCheckpoint(f"ranks have different numbers of parameter groups: {counts}")
    sizes = [0] * len(ranks)
    orders: list[list[OwnedParameter]] = []
    for group in range(len(ranks[0])):
        numels = [groups[group] for groups in ranks]
        taken = [0] * len(ranks)
        order: list[OwnedParameter] = []
        before: int | None = None
        for _ in range(sum(map(len, numels))):
            rank = sizes.index(min(sizes))
            if taken[rank] == len(numels[rank]):
                more = next(r for r, each in enumerate(numels) if taken[r] < len(each))
                raise InconsistentCheckpoint(
                    f"group {group}: by the rule of ZeroRedundancyOptimizer over {len(ranks)} "
                    f"ranks, rank {rank} should own the next parameter, but rank {more} does",
                    hint="is a rank's file of another save, or was the partition the program's own "
                    "(overlap_with_ddp)? consolidate_state_dict() gives files without ranks",
                )
            numel = numels[rank][taken[rank]]
            if before is not None and numel > before:
                raise InconsistentCheckpoint(
                    f"group {group}: rank {rank} owns a parameter of {numel} elements after one of "
                    f"{before} elements, but ZeroRedundancyOptimizer deals the largest first",
                    hint="files of different saves seem to be mixed; take those of one save",
                )
            order.append(OwnedParameter(rank, taken[rank]))
            taken[rank] += 1
            sizes[rank] += numel
            before = numel
        orders.append(order)
    return orders


def runs(numels: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges [start, stop) of equal numel: these parameters are in the program's own order."""
    cuts = [place for place in range(1, len(numels)) if numels[place] != numels[place - 1]]
    return list(pairwise([0, *cuts, len(numels)])) if numels else []
