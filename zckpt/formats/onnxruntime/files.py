"""Which files belong together: a directory of rank files, or one file."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from ...errors import (
    AmbiguousCheckpoint,
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    NotACheckpoint,
)
from ...training.options import MAX_DP
from . import hdf5, legacy
from .ranks import Save

# files of other kinds, of which there may be thousands: not worth a look inside
OTHERS = (".safetensors", ".json", ".distcp", "_states.pt", ".py")


@dataclass(frozen=True, slots=True)
class Found:
    """One checkpoint: its files by rank, and the name to call it by; `ranks` as they say.

    `parsed` are HDF5 files, which are opened to tell their ranks; none of a legacy one.
    """

    name: str
    files: tuple[tuple[int, str], ...]
    ranks: int
    parsed: tuple[hdf5.File, ...] = ()


def detect(path: str) -> list[str]:
    """One nameless checkpoint where there is any; which one, where there are more, `find` asks."""
    if os.path.isdir(path):
        if not os.access(path, os.R_OK | os.X_OK):  # lost+found
            return []
        with os.scandir(path) as items:
            files = [item for item in items if item.is_file() and not item.name.endswith(OTHERS)]
        return [""] if any(_is_named(item.name) or hdf5.is_one(item.path) for item in files) else []
    return [""] if os.path.isfile(path) and (hdf5.is_one(path) or legacy.is_one(path)) else []


def _listed(folder: str) -> list[str]:
    """Names of what may be files of a checkpoint."""
    return sorted(name for name in os.listdir(folder) if not name.endswith(OTHERS))


def _is_named(name: str) -> bool:
    return name.endswith(legacy.SUFFIX)


def find(path: str) -> Found:
    """The one checkpoint at `path`; a file that is one rank of several stands for them all.

    Raises NotACheckpoint, AmbiguousCheckpoint, IncompleteCheckpoint (a rank is missing) and
    InconsistentCheckpoint (two files of one rank).
    """
    if os.path.isdir(path):
        found = _all(path, _listed(path))
        if not found:
            raise NotACheckpoint(f"{path} holds no checkpoint of ONNX Runtime")
        if len(found) > 1:
            raise AmbiguousCheckpoint(
                f"{path} holds {len(found)} checkpoints: "
                + ", ".join(os.path.basename(each.name) for each in found[:8]),
                hint=f"name the file (one of them is enough): {found[0].files[0][1]}",
            )
        return _complete(path, found[0])
    folder = os.path.dirname(path) or "."
    name = os.path.basename(path)
    alone = not legacy.SHARDED.fullmatch(name)
    if hdf5.is_one(path):
        alone = not hdf5.open_file(path).is_partition
    for each in _all(folder, [name] if alone else {name, *_listed(folder)}, alone):
        if any(os.path.basename(file) == name for _, file in each.files):
            return _complete(path, each)
    raise NotACheckpoint(f"{path} holds no checkpoint of ONNX Runtime")


def _all(folder: str, names: Iterable[str], of_any_name: bool = False) -> list[Found]:
    """Every checkpoint among files of a folder."""
    found: list[Found] = []
    sharded: dict[tuple[str, int], list[tuple[int, str]]] = {}
    partitions: list[hdf5.File] = []
    for name in sorted(names):
        full = os.path.join(folder, name)
        if not os.path.isfile(full):
            continue
        if hdf5.is_one(full):
            file = hdf5.open_file(full)
            if file.is_partition:
                partitions.append(file)
            else:
                found.append(Found(full, ((0, full),), 1, (file,)))
        elif told := legacy.SHARDED.fullmatch(name):
            ranks = sharded.setdefault((told[1], int(told[3]) + 1), [])
            ranks.append((int(told[2]), full))
        elif _is_named(name) or of_any_name:
            found.append(Found(full, ((0, full),), 1))
    for (prefix, count), files in sharded.items():
        called = os.path.join(folder, f"{prefix}.ZeRO.*.{count - 1}{legacy.SUFFIX}")
        found.append(Found(called, tuple(sorted(files)), count))
    if partitions:
        partitions.sort(key=lambda file: file.size("world_rank", 0))
        called = f"{os.path.basename(partitions[0].path)} and the other ranks' files"
        by_rank = tuple((file.size("world_rank", 0), file.path) for file in partitions)
        world = max(file.size("world_size", 1) for file in partitions)
        found.append(Found(called, by_rank, world, tuple(partitions)))
    return found


def _complete(path: str, found: Found) -> Found:
    """`found`, if every rank is there once."""
    if found.ranks > MAX_DP:
        raise CorruptCheckpoint(f"{found.files[0][1]} states {found.ranks} ranks")
    here: dict[int, str] = {}
    for rank, file in found.files:
        if rank in here:
            raise InconsistentCheckpoint(
                f"{here[rank]} and {file} are both of rank {rank}",
                hint="files of two saves seem to be mixed; keep those of one save in a directory",
            )
        here[rank] = file
    if max(here) >= found.ranks:
        raise InconsistentCheckpoint(f"{here[max(here)]} is of rank {max(here)} of {found.ranks}")
    missing = [rank for rank in range(found.ranks) if rank not in here]
    if missing:
        told = ", ".join(map(str, missing[:5])) + (" ..." if len(missing) > 5 else "")
        expected = "" if found.parsed else found.name.replace("*", str(missing[0]))
        raise IncompleteCheckpoint(
            f"{path} lacks the file of rank {told}: it holds {len(here)} of {found.ranks}",
            hint=f"expected {os.path.basename(expected)}"
            if expected
            else "the rank is inside the file (trainer_options/world_rank), not in its name",
        )
    return found


def opened(path: str) -> Save:
    """What the ranks' files hold."""
    found = find(path)
    if found.parsed:
        return hdf5.opened(path, found.parsed)
    return legacy.opened(path, [file for _, file in sorted(found.files)])
