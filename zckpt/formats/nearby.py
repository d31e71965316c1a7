"""Searches for a file that a checkpoint lacks: in an unpacked zip, or in another node's folder.

    global_step7/mp_rank_00_model_states/data.pkl     some programs unpack files of torch.save
    node0/global_step7, node1/global_step7            each node has saved on a disk of its own
    checkpoint-500, tmp-checkpoint-500                the Trainer renamed it before all had saved

The result is only a hint: nothing is read from the file that is found.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import chain
from shlex import quote

from ..core.storage import sources
from ..errors import IncompleteCheckpoint, NotACheckpoint, ZckptError

PICKLE = "data.pkl"
TEMPORARY = "tmp-"
DEPTH = 3
"""The number of levels above a lost file that are searched for folders of nodes."""
MOST = 64
"""The largest number of folders that are searched at each level."""


def hint_of(error: ZckptError, path: str) -> str | None:
    """Returns a hint about a file that was missing when `path` was read; None without a hint.

    The hint says in which other node's folder the file is, or how to pack an unpacked file again.
    """
    lost = [*error.paths] if isinstance(error, IncompleteCheckpoint) else []
    folders = [error.file or "", *chain(*((file, os.path.splitext(file)[0]) for file in lost))]
    if isinstance(error, NotACheckpoint):
        folders += _folders_from(path)
    if (folder := next(filter(is_unpacked, folders), None)) is not None:
        return f"{folder} is an unpacked file of torch.save: {packing(folder)}"
    if not lost or (pair := _folders_of_two_nodes(lost[0])) is None:
        return None
    folder_here, other = pair
    is_temporary = os.path.basename(folder_here).startswith(TEMPORARY)
    start, end = map(quote, (folder_here, other) if is_temporary else (other, folder_here))
    return (
        f"{other} has {os.path.basename(lost[0])}: if {folder_here} is of the same save, bring "
        f"both together: cp -rn {start}/. {end}"
    )


# -- unpacked files


def is_unpacked(path: str) -> bool:
    """Whether a folder is a file of torch.save (a zip archive) that was unpacked."""
    return sources.is_folder(path) and sources.is_file(os.path.join(path, PICKLE))


def packing(folder: str) -> str:
    """The shell commands that zip an unpacked folder, so that it is a file of torch.save again.

    The file gets the folder's name, with `.pt` added if the name has no ending.
    """
    above, name = os.path.split(os.path.abspath(folder))
    stem, ending = os.path.splitext(name)
    rename = f"mv {quote(name)} {quote(stem)} && " if ending else ""
    file = name if ending else f"{stem}.pt"
    return f"(cd {quote(above)} && {rename}zip -0 -r {quote(file)} {quote(stem)})"


def _folders_from(path: str) -> Iterator[str]:
    """Yields `path` and the folders below it: DEPTH levels in all, at most MOST folders each."""
    level = [path]
    for _ in range(DEPTH):
        yield from level
        level = [each for above in level for each in _folders(above)][:MOST]


def _folders(path: str) -> list[str]:
    if not sources.is_folder(path) or sources.is_denied(path):
        return []
    with os.scandir(path) as items:
        return sorted(item.path for item in items if sources.is_folder(item.path))[:MOST]


# -- folders of nodes


def _folders_of_two_nodes(lost: str) -> tuple[str, str] | None:
    """Finds the file `lost` in another node's folder; returns this node's folder and the other.

    The folders' names may differ only in numbers (node0, node1), or in the Trainer's `tmp-`. None
    if there is no such folder.
    """
    inside, own_folder = os.path.basename(lost), os.path.dirname(os.path.abspath(lost))
    for _ in range(DEPTH):
        inside, own_folder = (
            os.path.join(os.path.basename(own_folder), inside),
            os.path.dirname(own_folder),
        )
        name = os.path.basename(own_folder)
        for other in _folders(os.path.dirname(own_folder)):
            is_like = other != own_folder and _are_alike(name, os.path.basename(other))
            has_it = is_like and sources.is_file(os.path.join(other, inside))
            # a folder that also has all files of this node may belong to another run
            if has_it and _has_further_files(own_folder, other, inside):
                return own_folder, other
    return None


def _are_alike(one: str, other: str) -> bool:
    names = {one, other}
    if any(name.removeprefix(TEMPORARY) in names - {name} for name in names):
        return True
    return re.sub(r"\d+", "#", one) == re.sub(r"\d+", "#", other) != one


def _has_further_files(own_folder: str, other: str, inside: str) -> bool:
    """Whether this node's folder has a file (not the lost one) that the other folder lacks."""
    folder = os.path.dirname(inside)
    here, there = (_files(os.path.join(each, folder)) for each in (own_folder, other))
    return bool({*here} - {*there})


def _files(folder: str) -> list[str]:
    if not sources.is_folder(folder):
        return []
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.is_file()]
