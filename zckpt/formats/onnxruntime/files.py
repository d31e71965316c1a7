"""Which files make one checkpoint: a directory of rank files, or one file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from ...core.grouping import by_key
from ...core.storage import sources
from ...core.storage.filenames import by_counting
from ...core.storage.inventory import known, role
from ...errors import (
    AmbiguousCheckpoint,
    InconsistentCheckpoint,
    MissingExtra,
    NotACheckpoint,
    listed,
)
from ..ranks import require_all
from . import hdf5, legacy
from .ranks import Save

OTHER_FILES = (".safetensors", ".json", ".jsonl", ".distcp", "_states.pt", ".py")
"""Files of other programs: they are not opened to see whether they are HDF5."""
MOST_OPENED = 32
"""Files of one ending that are opened at either end of their order, since a folder may have 50,000
samples or logs. All are, if no format recognizes the folder by these."""
NUMBERS = re.compile("[0-9]+")

ROLES = (
    legacy.OF_RANK,
    role("all states", r"(?P<stem>[^/]*?)rank[_-]?(\d+)(?=[._-])[^/]*", "dp"),
)
"""What its files are for; the names of HDF5 files are the program's own."""


class CheckpointFiles(Struct, frozen=True):
    """The files of one checkpoint, each with its rank.

    `name` is what messages call the checkpoint. `ranks` is the number of ranks that the files
    state. `parsed` are the opened files of an HDF5 checkpoint, whose ranks only their contents
    tell; empty for a legacy checkpoint.
    """

    name: str
    files: tuple[tuple[int, str], ...]
    ranks: int
    parsed: tuple[hdf5.RankFile, ...] = ()


def detect(path: str) -> list[str]:
    """One empty tag if there is a checkpoint; `find` says which one, if there are several."""
    if not sources.is_folder(path):
        return [""] if sources.is_file(path) and (hdf5.is_one(path) or legacy.is_one(path)) else []
    try:
        names = _candidates(path)
    except PermissionError:  # lost+found
        return []
    return [""] if _hold_one(path, _some_of_each_kind(names)) else []


def detect_weak(path: str) -> list[str]:
    """As `detect`, by the files that it has not opened."""
    if not sources.is_folder(path) or sources.is_denied(path):
        return []
    names = _candidates(path)
    opened = {*_some_of_each_kind(names)}
    return [""] if _hold_one(path, (name for name in names if name not in opened)) else []


def _hold_one(folder: str, names: Iterable[str]) -> bool:
    files = filter(sources.is_file, (os.path.join(folder, name) for name in names))
    return any(file.endswith(legacy.SUFFIX) or _may_be_hdf5(file) for file in files)


def _some_of_each_kind(names: Sequence[str]) -> Iterator[str]:
    """All files that have few others of their ending, and of many the first and the last ones."""
    endings = ((name[name.rfind(".") + 1 :], name) for name in names)
    kinds = by_key((end if end.isalpha() else NUMBERS.sub("#", end), name) for end, name in endings)
    for alike in kinds.values():
        if len(alike) <= 2 * MOST_OPENED:
            yield from alike
        else:
            yield from (*alike[:MOST_OPENED], *alike[-MOST_OPENED:])


def _may_be_hdf5(path: str) -> bool:
    """Whether a file in a folder is one of these; False if that cannot be seen.

    This user may not read the file, or h5py is not installed.
    """
    try:
        return hdf5.is_one(path)
    except (PermissionError, MissingExtra):
        return False


def _candidates(folder: str) -> list[str]:
    """Names of the files in a folder that may belong to a checkpoint."""
    return sorted(name for name in sources.names(folder) if not name.endswith(OTHER_FILES))


def locate(path: str) -> CheckpointFiles:
    """The one checkpoint at `path`; the file of one rank stands for all ranks.

    Raises NotACheckpoint, AmbiguousCheckpoint, IncompleteCheckpoint (a rank is missing),
    InconsistentCheckpoint (two files of one rank) and MissingExtra (h5py).
    """
    if sources.is_folder(path):
        checkpoints = _all(path, _candidates(path))
    else:
        folder, name = os.path.dirname(path) or ".", os.path.basename(path)
        alone = known((legacy.OF_RANK,), name) is None
        if hdf5.is_one(path):
            alone = not hdf5.open_file(path).is_partition
        every = _all(folder, [name] if alone else {name, *_candidates(folder)}, alone)
        own = os.path.join(folder, name)
        checkpoints = [each for each in every if own in dict(each.files).values()][:1]
    if not checkpoints:
        raise NotACheckpoint(
            "not-a-checkpoint", f"{path} holds no checkpoint of ONNX Runtime", file=path
        )
    if len(checkpoints) > 1:
        by_name = {os.path.basename(each.name): each for each in checkpoints}
        names = by_counting(by_name)
        raise AmbiguousCheckpoint(
            "several-checkpoints",
            f"{path} holds {len(checkpoints)} checkpoints: {listed(names)}",
            hint=f"name the file (one of them is enough): {by_name[names[-1]].files[0][1]}",
            file=path,
        )
    return _complete(path, checkpoints[0])


def _all(folder: str, names: Iterable[str], of_any_name: bool = False) -> list[CheckpointFiles]:
    """Every checkpoint among files of a folder."""
    checkpoints: list[CheckpointFiles] = []
    sharded: dict[tuple[str, int], list[tuple[int, str]]] = {}
    partitions: list[hdf5.RankFile] = []
    for name in sorted(names):
        full = os.path.join(folder, name)
        if not sources.is_file(full):
            continue
        if hdf5.is_one(full):
            file = hdf5.open_file(full)
            if file.is_partition:
                partitions.append(file)
            else:
                checkpoints.append(CheckpointFiles(full, ((0, full),), 1, (file,)))
        elif (own := known((legacy.OF_RANK,), name)) is not None:
            rank, last = own.numbers
            sharded.setdefault((own.stem, last + 1), []).append((rank, full))
        elif name.endswith(legacy.SUFFIX) or of_any_name:
            checkpoints.append(CheckpointFiles(full, ((0, full),), 1))
    for (prefix, count), files in sharded.items():
        pattern = os.path.join(folder, f"{prefix}.ZeRO.*.{count - 1}{legacy.SUFFIX}")
        checkpoints.append(CheckpointFiles(pattern, tuple(sorted(files)), count))
    if partitions:
        partitions.sort(key=lambda file: file.options.world_rank)
        label = f"{os.path.basename(partitions[0].path)} and the other ranks' files"
        by_rank = tuple((file.options.world_rank, file.path) for file in partitions)
        world = max(file.options.world_size for file in partitions)
        checkpoints.append(CheckpointFiles(label, by_rank, world, tuple(partitions)))
    return checkpoints


def _complete(path: str, checkpoint: CheckpointFiles) -> CheckpointFiles:
    """`checkpoint`, if each of its ranks has exactly one file."""
    by_rank: dict[int, str] = {}
    for rank, file in checkpoint.files:
        if by_rank.setdefault(rank, file) != file:
            what = f"{by_rank[rank]} and {file} are both of rank {rank}"
            raise InconsistentCheckpoint("mixed-saves", what)
    reason, hint = f"it holds {len(by_rank)} of {checkpoint.ranks}", ""
    if checkpoint.parsed:
        hint = "copy the missing file: its rank is inside it (trainer_options/world_rank)"
    roles = () if checkpoint.parsed else (legacy.OF_RANK,)
    where = path if sources.is_folder(path) else os.path.dirname(path) or "."
    require_all(by_rank, checkpoint.ranks, where, reason, hint, roles)
    return checkpoint


def opened(path: str) -> Save:
    """The contents of all ranks' files."""
    checkpoint = locate(path)
    if checkpoint.parsed:
        return hdf5.opened(path, checkpoint.parsed)
    return legacy.opened(path, [file for _, file in sorted(checkpoint.files)])
