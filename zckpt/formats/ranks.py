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
    """Raises unless each of `world` ranks has a file; `paths` maps ranks to files.

    Raises IncompleteCheckpoint for missing files; it names them if `roles` has the pattern of their
    names. Raises InconsistentCheckpoint for a file of a rank beyond `world`, and CorruptCheckpoint
    if `world` is impossibly large. `where` is the folder, for the error.
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
    """The missing files of ranks along one axis, as rows of the table of expected files.

    `count` is the number of ranks on the axis; `paths` has the existing files by rank.
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

    Programs of Megatron save the global rank in the arguments of each file. `writers` has these
    ranks in the order of the files' names; None for a file without one. If no files are swapped,
    the ranks increase. Programs that convert files state one rank for all files, so nothing is
    refused then.
    """
    known_writers = [writer for writer in writers if isinstance(writer, int)]
    if len(set(known_writers)) == len(writers) and known_writers != sorted(known_writers):
        raise InconsistentCheckpoint(
            "swapped-files",
            f"{where}: the files of model ranks are swapped: in the order of their names, the "
            f"arguments saved in them state the ranks {listed(known_writers)}",
            hint="copy all files again: these ranks must increase with the files' names",
        )
