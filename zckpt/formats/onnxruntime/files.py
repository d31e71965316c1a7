"""Finds the files of one ONNX Runtime checkpoint: a directory of ranks' files, or one file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from ...core.grouping import by_key
from ...core.storage import sources
from ...core.storage.filenames import by_counting
from ...core.storage.inventory import parse_name, role
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
"""Endings of other programs' files, which are therefore not opened to look for HDF5."""
MOST_OPENED = 32  # a folder may have 50,000 samples or logs
"""Of the files with one ending, sorted by name, `detect` opens the first 32 and the last 32.

`detect_weak` opens the rest later, if no format has recognized the folder.
"""
NUMBERS = re.compile("[0-9]+")

ROLES = (
    legacy.OF_RANK,
    role("all states", r"(?P<stem>[^/]*?)rank[_-]?(\d+)(?=[._-])[^/]*", "dp"),
)
"""The roles of this format's files; programs choose the names of HDF5 files."""


class CheckpointFiles(Struct, frozen=True):
    """The files of one checkpoint, each with its rank.

    name      the checkpoint's name in messages
    files     pairs of a rank and a path
    ranks     the number of ranks that the files state
    parsed    the contents of HDF5 files, which must be opened to find their ranks; else empty
    """

    name: str
    files: tuple[tuple[int, str], ...]
    ranks: int
    parsed: tuple[hdf5.RankFile, ...] = ()


def detect(path: str) -> list[str]:
    """[""] (a checkpoint without tags) if `path` has a checkpoint; else [].

    If a folder has several checkpoints, the result is [""] too; `locate` then tells them apart. Of
    many files with the same ending, only the first and last ones are opened.
    """
    if not sources.is_folder(path):
        return [""] if sources.is_file(path) and (hdf5.is_one(path) or legacy.is_one(path)) else []
    try:
        names = _candidates(path)
    except PermissionError:  # lost+found
        return []
    return [""] if _hold_one(path, _some_of_each_kind(names)) else []


def detect_weak(path: str) -> list[str]:
    """Like `detect`, for those files of a folder that `detect` did not open."""
    if not sources.is_folder(path) or sources.is_denied(path):
        return []
    names = _candidates(path)
    opened = {*_some_of_each_kind(names)}
    return [""] if _hold_one(path, (name for name in names if name not in opened)) else []


def _hold_one(folder: str, names: Iterable[str]) -> bool:
    files = filter(sources.is_file, (os.path.join(folder, name) for name in names))
    return any(file.endswith(legacy.SUFFIX) or _may_be_hdf5(file) for file in files)


def _some_of_each_kind(names: Sequence[str]) -> Iterator[str]:
    """Selects the names of the files that `detect` opens.

    These are all files with a rare ending, and the first and last files with each frequent ending.
    """
    endings = ((name[name.rfind(".") + 1 :], name) for name in names)
    kinds = by_key((end if end.isalpha() else NUMBERS.sub("#", end), name) for end, name in endings)
    for alike in kinds.values():
        if len(alike) <= 2 * MOST_OPENED:
            yield from alike
        else:
            yield from (*alike[:MOST_OPENED], *alike[-MOST_OPENED:])


def _may_be_hdf5(path: str) -> bool:
    """Whether a file is one of ONNX Runtime's HDF5 files.

    False also if the user may not read the file, or if h5py is not installed.
    """
    try:
        return hdf5.is_one(path)
    except (PermissionError, MissingExtra):
        return False


def _candidates(folder: str) -> list[str]:
    """The names of the files in a folder that may belong to a checkpoint, by their endings."""
    return sorted(name for name in sources.names(folder) if not name.endswith(OTHER_FILES))


def locate(path: str) -> CheckpointFiles:
    """Finds the files of the one checkpoint at `path`, a folder or a file.

    If `path` is the file of one rank, the files of all ranks are found. Raises NotACheckpoint,
    AmbiguousCheckpoint, IncompleteCheckpoint (a rank is missing), InconsistentCheckpoint (two files
    of one rank) and MissingExtra (h5py).
    """
    if sources.is_folder(path):
        checkpoints = _checkpoints_in(path, _candidates(path))
    else:
        folder, name = os.path.dirname(path) or ".", os.path.basename(path)
        alone = parse_name((legacy.OF_RANK,), name) is None
        if hdf5.is_one(path):
            alone = not hdf5.open_file(path).is_partition
        every = _checkpoints_in(folder, [name] if alone else {name, *_candidates(folder)}, alone)
        full_path = os.path.join(folder, name)
        checkpoints = [each for each in every if full_path in dict(each.files).values()][:1]
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
            hint=f"give one file of a checkpoint, such as {by_name[names[-1]].files[0][1]}",
            file=path,
        )
    return _require_one_file_per_rank(path, checkpoints[0])


def _checkpoints_in(
    folder: str, names: Iterable[str], of_any_name: bool = False
) -> list[CheckpointFiles]:
    """Groups files into checkpoints, incomplete ones included.

    `names` are the files in `folder` to consider. With `of_any_name`, every file that is not HDF5
    counts as a file of torch.save, whatever its name.
    """
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
        elif (recognized := parse_name((legacy.OF_RANK,), name)) is not None:
            rank, last = recognized.numbers
            sharded.setdefault((recognized.stem, last + 1), []).append((rank, full))
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


def _require_one_file_per_rank(path: str, checkpoint: CheckpointFiles) -> CheckpointFiles:
    """Returns `checkpoint` unchanged if each of its ranks has exactly one file.

    Raises InconsistentCheckpoint for two files of a rank, and IncompleteCheckpoint for a missing
    one.
    """
    by_rank: dict[int, str] = {}
    for rank, file in checkpoint.files:
        if by_rank.setdefault(rank, file) != file:
            what = f"{by_rank[rank]} and {file} both belong to rank {rank}"
            raise InconsistentCheckpoint("mixed-saves", what)
    reason, hint = f"it has {len(by_rank)} of {checkpoint.ranks} ranks' files", ""
    if checkpoint.parsed:
        hint = "copy the missing file: trainer_options/world_rank in the file states its rank"
    roles = () if checkpoint.parsed else (legacy.OF_RANK,)
    where = path if sources.is_folder(path) else os.path.dirname(path) or "."
    require_all(by_rank, checkpoint.ranks, where, reason, hint, roles)
    return checkpoint


def opened(path: str) -> Save:
    """Reads the contents of all ranks' files of the checkpoint at `path`."""
    checkpoint = locate(path)
    if checkpoint.parsed:
        return hdf5.opened(path, checkpoint.parsed)
    return legacy.opened(path, [file for _, file in sorted(checkpoint.files)])
