"""Checks that every rank's file exists, and that files of model ranks are not swapped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..core.checkpoint.facts import MAX_DP
from ..core.storage.inventory import Role, Row, gaps, parse_name, refuse_gaps
from ..errors import CorruptCheckpoint, InconsistentCheckpoint, listed


def require_all(
    paths: Mapping[int, str],
    world: int,
    where: str,
    reason: str,
    hint: str = "",
    roles: Sequence[Role] = (),
) -> None:
    """Raises IncompleteCheckpoint unless each of the ranks 0 to `world` - 1 has a file.

    paths     maps ranks to files in the folder `where`
    reason    how zckpt knows `world`: "model_rank_0.pt is the file of one of 4 ranks"
    roles     the format's patterns of file names; they give the names of missing files

    Raises InconsistentCheckpoint for a file of a higher rank, and CorruptCheckpoint if `world` is
    impossibly large.
    """
    some, last = paths[min(paths)], max(paths)
    if last >= world:
        raise InconsistentCheckpoint(
            "world-size-disagrees",
            f"{paths[last]} is of rank {last}, but {some} says that there are {world} ranks",
            file=paths[last],
        )
    if world > MAX_DP:
        raise CorruptCheckpoint(
            "file-damaged", f"{some} states {world} ranks, but zckpt reads at most {MAX_DP}"
        )
    if parse_name(roles, some) is None:  # the program's own names
        missing = [rank for rank in range(world) if rank not in paths]
        rows = [Row("", "", where, (("dp", rank),), "missing") for rank in missing]
    else:
        rows = gaps_along("dp", roles, paths, world)
    refuse_gaps(where, rows, reason, hint)


def gaps_along(axis: str, roles: Sequence[Role], paths: Mapping[int, str], count: int) -> list[Row]:
    """Lists the missing files of the ranks along one axis, such as "tp": a table row for each.

    `paths` has the existing files by rank; there are `count` ranks. One of the patterns in `roles`
    must match the existing files. It gives the missing files their names.
    """
    some = paths[min(paths)]
    role_of_file = parse_name(roles, some)
    assert role_of_file is not None
    there = {role_of_file.numbers_with(axis, rank): path for rank, path in paths.items()}
    return gaps(
        role_of_file.role, there, (role_of_file.numbers_with(axis, n) for n in range(count)), some
    )


def refuse_other_writers(where: str, writers: Sequence[object]) -> None:
    """Raises InconsistentCheckpoint if the files of model ranks seem to be swapped.

    `writers` has the rank that Megatron saved in each file, in the order of the files' names; None
    for an unknown rank. The ranks must increase. Nothing is refused if one is None or occurs twice.
    """
    # a converter writes the same rank into all files
    known_writers = [writer for writer in writers if isinstance(writer, int)]
    if len(set(known_writers)) == len(writers) and known_writers != sorted(known_writers):
        raise InconsistentCheckpoint(
            "swapped-files",
            f"{where}: the files of model ranks are swapped: in the order of their names, the "
            f"arguments saved in them state the ranks {listed(known_writers)}",
            hint="copy all files again, under their own names. If the files are sorted by name, "
            "the ranks that they state must increase",
        )
