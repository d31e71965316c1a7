"""What is said of a file that a checkpoint should have, and that is missing or lies elsewhere?"""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..errors import CorruptCheckpoint, IncompleteCheckpoint, InconsistentCheckpoint, brief, listed


def path_inside(folder: str, name: str, stated_by: str) -> str:
    """The path of the file `name` of a folder; `stated_by` is the file that names it.

    Raises CorruptCheckpoint if the name leads out of the folder, or to the folder itself.
    """
    if not isinstance(name, str):
        raise CorruptCheckpoint(f"{folder}: {stated_by} names a file by {brief(name)}")
    outside = os.path.isabs(name) or ".." in name.split("/") or os.path.normpath(name) == "."
    if outside or "\0" in name:
        raise CorruptCheckpoint(f"{folder}: {stated_by} names a file outside of it: {brief(name)}")
    return os.path.join(folder, name)


def missing_file(path: str, stated_by: str = "", hint: str = "") -> IncompleteCheckpoint:
    """The error of a file that is not there; `stated_by` is the file that names it."""
    return IncompleteCheckpoint(
        f"{path} is missing" + (f", which {stated_by} names" if stated_by else ""), hint, [path]
    )


def expecting(name: str) -> str:
    """The hint for a file that is lost; `name` is its name."""
    return f"expected {name}: copy it again, or take an earlier checkpoint (of a run: --tag)"


def missing_ranks(
    where: str,
    ranks: Sequence[int],
    what: str = "",
    reason: str = "",
    hint: str = "",
    expected: str = "",
) -> IncompleteCheckpoint:
    """The error of ranks that have no file; `reason` says from what their number is known.

    `expected` is the name of the first one's file in the folder `where`, if that is known.
    """
    return IncompleteCheckpoint(
        f"{where}: the {what + ' ' if what else ''}file of rank {listed(ranks)} is missing"
        + (f" ({reason})" if reason else ""),
        hint or (expecting(expected) if expected else ""),
        [os.path.join(where, expected)] if expected else (),
    )


def refuse_other_writers(where: str, writers: Sequence[object]) -> None:
    """Raises InconsistentCheckpoint if files of model ranks were not written in their order.

    Megatron's programs save the global rank of each writer in the arguments. It grows with the
    place in the grid. Programs that convert files state one for all. `writers` are these ranks in
    the order of the names, of which some may be None.
    """
    known = [writer for writer in writers if isinstance(writer, int)]
    if len(set(known)) == len(writers) and known != sorted(known):
        raise InconsistentCheckpoint(
            f"{where}: the files of model ranks are swapped: by their arguments, rank "
            f"{listed(known)} wrote them, in the order of their names",
            hint="copy all files again; the names must have the order of the ranks",
        )
