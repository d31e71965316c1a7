"""What is said of a file that a checkpoint should have, and that is missing or lies elsewhere?"""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..errors import CorruptCheckpoint, IncompleteCheckpoint, InconsistentCheckpoint, brief, listed
from .annotations import TYPE_CHECKING
from .regex import Regex

if TYPE_CHECKING:
    import re

RANK = Regex(r"(?<=rank)_?\d+")


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
        f"{path} is missing" + (f", which {stated_by} names" if stated_by else ""), hint
    )


def missing_ranks(
    where: str, ranks: Sequence[int], what: str = "", reason: str = "", hint: str = ""
) -> IncompleteCheckpoint:
    """The error of ranks that have no file; `reason` says from what their number is known."""
    return IncompleteCheckpoint(
        f"{where}: the {what + ' ' if what else ''}file of rank {listed(ranks)} is missing"
        + (f" ({reason})" if reason else ""),
        hint,
    )


def refuse_other_writers(where: str, writers: Sequence[object]) -> None:
    """Raises InconsistentCheckpoint if files of model ranks were not written in their order.

    Megatron's programs save the global rank of each writer in the arguments. It grows with the
    model rank. `writers` are these ranks in the order of the names; some may be None.
    """
    known = [writer for writer in writers if isinstance(writer, int)]
    if len(set(known)) == len(writers) and known != sorted(known):
        raise InconsistentCheckpoint(
            f"{where}: the files of model ranks are swapped: by their arguments, rank "
            f"{', '.join(map(str, known))} wrote them, in the order of their names",
            hint="copy all files again; the names must have the order of the ranks",
        )


def refuse_other_rank(path: str, saved_as: str | None, rank: re.Pattern[str] = RANK) -> None:
    """Raises InconsistentCheckpoint if the file of one rank has the name of another rank's.

    torch.save gives the folder in its zip the file's name without the ending (torch 1.6 to 2.13).
    So a file that was renamed still says whose it was. A name of another form says nothing: some
    programs save into a buffer, and torch calls that `archive`. `rank` finds ranks in a name, of
    which the first one counts.
    """
    name, ending = os.path.splitext(os.path.basename(path))
    if saved_as is None or saved_as == name or rank.sub("", saved_as) != rank.sub("", name):
        return
    if _first(rank, name) != _first(rank, saved_as):
        raise InconsistentCheckpoint(
            f"{path} was saved as {saved_as}{ending}: files of two ranks are swapped, or one was "
            "renamed or copied",
            hint=f"give the file its own name again ({saved_as}{ending}), or copy all files again",
        )


def _first(rank: re.Pattern[str], name: str) -> int | None:
    match = rank.search(name)
    return int(match[0].lstrip("_")) if match else None
