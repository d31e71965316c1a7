"""Is there a file of each rank that has saved?"""

from __future__ import annotations

from collections.abc import Mapping

from ..core.facts import MAX_DP
from ..core.missing_ranks import missing_ranks
from ..errors import CorruptCheckpoint, InconsistentCheckpoint


def require_all(paths: Mapping[int, str], world: int, where: str, reason: str, hint: str) -> None:
    """Raises unless there is a file of each of `world` ranks; `paths` are by rank.

    IncompleteCheckpoint, which names the ranks without a file; InconsistentCheckpoint for a file of
    a further rank, CorruptCheckpoint for more ranks than there can be.
    """
    some, last = paths[min(paths)], max(paths)
    if last >= world:
        raise InconsistentCheckpoint(
            f"{paths[last]} is of rank {last}, but {some} says that there are {world} ranks"
        )
    if world > MAX_DP:
        raise CorruptCheckpoint(f"{some} states {world} ranks, and zckpt reads up to {MAX_DP}")
    if missing := [rank for rank in range(world) if rank not in paths]:
        raise missing_ranks(where, missing, reason=reason, hint=hint)
