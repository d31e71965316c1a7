"""Which parameters torch's ZeroRedundancyOptimizer gives to which rank, and back.

    group        c  a  b  d        sorted by numel, the largest first; equal ones keep their order
    sizes        each goes to the rank that holds fewest elements so far, the lowest of several
    ranks        [c, d]  [a, b]    numbered anew on every rank, through its part of every group

Sizes run on from group to group and count frozen parameters too. Ranks' own files hold whole
tensors under these local numbers: dealing their lists again in the same way gives the order back
(torch 2.13.0, distributed/optim/zero_redundancy_optimizer.py; a partition that the program gave
itself, `overlap_with_ddp`, follows another rule).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from ...errors import InconsistentCheckpoint


class Place(NamedTuple):
    """A parameter by rank, and by its place in that rank's part of its group."""

    rank: int
    position: int


def partition(groups: Sequence[Sequence[int]], world: int) -> list[list[list[int]]]:
    """What each rank gets of each group, by place in the group: `[rank][group]`."""
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


def dealt(ranks: Sequence[Sequence[Sequence[int]]]) -> list[list[Place]]:
    """Every group's parameters in the order in which they were dealt, largest first.

    `ranks[rank][group]` lists numels in the order of the rank's local numbers. Raises
    InconsistentCheckpoint, naming rank and group, for lists that the rule never makes.
    """
    if len({len(groups) for groups in ranks}) > 1:
        told = ", ".join(str(len(groups)) for groups in ranks)
        raise InconsistentCheckpoint(f"ranks have different numbers of parameter groups: {told}")
    sizes = [0] * len(ranks)
    found: list[list[Place]] = []
    for group in range(len(ranks[0])):
        numels = [groups[group] for groups in ranks]
        taken = [0] * len(ranks)
        order: list[Place] = []
        before: int | None = None
        for _ in range(sum(map(len, numels))):
            rank = sizes.index(min(sizes))
            if taken[rank] == len(numels[rank]):
                more = next(r for r, each in enumerate(numels) if taken[r] < len(each))
                raise InconsistentCheckpoint(
                    f"group {group}: rank {rank} should own a further parameter where rank {more} "
                    f"does, by the rule of ZeroRedundancyOptimizer over {len(ranks)} ranks",
                    hint="is a rank's file of another save, or was the partition the program's own "
                    "(overlap_with_ddp)? consolidate_state_dict() gives files without ranks",
                )
            numel = numels[rank][taken[rank]]
            if before is not None and numel > before:
                raise InconsistentCheckpoint(
                    f"group {group}: rank {rank} owns a parameter of {numel} elements after one of "
                    f"{before} elements, where ZeroRedundancyOptimizer deals the largest first",
                    hint="files of different saves seem to be mixed; take those of one save",
                )
            order.append(Place(rank, taken[rank]))
            taken[rank] += 1
            sizes[rank] += numel
            before = numel
        found.append(order)
    return found


def runs(numels: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges [start, stop) of equal numel: these parameters stand in the program's own order."""
    cuts = [place for place in range(1, len(numels)) if numels[place] != numels[place - 1]]
    return list(pairwise([0, *cuts, len(numels)])) if numels else []
