"""Which checkpoints has a run, the newest first, and what does its engine call each of them?

    RUN/checkpoint-500, RUN/checkpoints/checkpoint_3      a folder each: the Trainer, Accelerate
    RUN/lightning_logs/version_0/checkpoints/*.ckpt       a folder or a file each: Lightning
    RUN/global_step500, RUN/iter_0000500, RUN/step-500    tags: DeepSpeed, Megatron-Core, torchtitan

A folder whose name is like those of the others is one of them, also if a save has just begun it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from msgspec import Struct

from .. import api
from ..core import sources
from ..core.filenames import STEP, oldest_first
from ..errors import AmbiguousCheckpoint, NotACheckpoint, ZckptError, listed
from ..formats import DEPTH, FORMATS, MOST_FOLDERS

FILE = ".ckpt"
LAST = re.compile(r"last(-v\d+)?\.ckpt", re.ASCII)
"""Lightning's last one beside the best ones: its name has no step."""

VERSION = re.compile(r"version_\d+", re.ASCII)
"""A start of one run that goes on: Lightning numbers them."""


class Candidate(Struct, frozen=True):
    """A checkpoint of a run: `path` and `tag` as `zckpt.read` takes them.

    `loaded` is what the engine's loader takes. `note` is a warning if this one is taken.
    """

    path: str
    name: str
    loaded: str
    tag: str | None = None
    note: str = ""

    @property
    def where(self) -> str:
        """Its own folder, for a sentence."""
        return os.path.join(self.path, self.tag) if self.tag else self.path


@sources.looks_again
def candidates(run: str) -> list[Candidate]:
    """The checkpoints of the run, the newest first; none if it has none.

    Raises NotACheckpoint for a file that is none.
    """
    if sources.status(run) is None:
        return []
    if found := _by_tag(run):
        return found
    if _is_one(run, neutral=True):
        return [Candidate(run, os.path.basename(os.path.abspath(run)), run)]
    if not sources.is_folder(run):
        raise NotACheckpoint(
            f"{run} is a file, and not a run", hint="give the folder in which a run has saved"
        )
    return _in_folders(run)


def _by_tag(run: str, inside: bool = False) -> list[Candidate]:
    """Those of a run whose checkpoints are tags; none for another folder.

    A folder `inside` of a run may be a trainer's own, in which its engine has one tag.

    The tag that the run names comes first: a later save has not ended, or the user has set the run
    back.
    """
    for format in FORMATS:
        if len(tags := format.tags(run)) > (inside and format.pointer is not None):
            break
    else:
        return []
    newest = [*reversed(oldest_first({*tags, *_alike(run, tags)}))]
    pointed = format.pointer(run) if format.pointer else None
    note = ""
    if pointed is not None and newest[0] in tags and newest[0] != pointed:
        note = (
            f"{run} names {pointed} as its last checkpoint, which is taken: the save of {newest[0]}"
            " has not ended, or the run was set back"
        )
    return [
        Candidate(
            run,
            tag,
            run if tag == pointed or format.to_load else os.path.join(run, tag),
            tag,
            note if tag == pointed else "",
        )
        for tag in dict.fromkeys([*([] if pointed is None else [pointed]), *newest])
    ]


def _in_folders(run: str) -> list[Candidate]:
    """Those that are a folder or a file each, of the level next to the run that has any."""
    level = [run]
    for _ in range(DEPTH):
        inside = {folder: _names(folder) for folder in level}
        runs = [tags for path in _paths(inside) if (tags := _by_tag(path, inside=True))]
        _refuse_several(run, [tags[0].path for tags in runs])
        if runs:
            return runs[0]
        found: list[str] = []
        versions: dict[str, str] = {}  # a folder of each run
        for folder, names in inside.items():
            own = [name for name in names if _is_one(os.path.join(folder, name))]
            shapes = {*map(_shape, own)}
            if own:
                versions[VERSION.sub("", folder)] = folder
            found += [
                os.path.join(folder, name)
                for name in names
                if name in own or (_shape(name) != name and _shape(name) in shapes)
            ]
        _refuse_several(run, [*versions.values()])
        if found:
            ordered = sorted(found, key=_age, reverse=True)
            return [Candidate(path, os.path.basename(path), path) for path in ordered]
        level = _paths(inside)[:MOST_FOLDERS]
    return []


def _refuse_several(run: str, others: list[str]) -> None:
    if len(others) > 1:
        raise AmbiguousCheckpoint(
            f"{run} holds several runs: {listed(others)}", hint="give one of them"
        )


def _paths(inside: dict[str, list[str]]) -> list[str]:
    """The folders among the names of a level."""
    paths = (os.path.join(folder, name) for folder, names in inside.items() for name in names)
    return [path for path in paths if sources.is_folder(path)]


def _names(folder: str) -> list[str]:
    """The folders of a folder, and the files that may be a checkpoint; not hidden ones."""
    with os.scandir(folder) as entries:
        return sorted(
            entry.name
            for entry in entries
            if not entry.name.startswith(".")
            and (entry.name.endswith(FILE) or sources.is_folder(entry.path))
            and not sources.is_denied(entry.path)
        )


def _alike(run: str, tags: Iterable[str]) -> list[str]:
    """Folders whose names differ from those of tags in their numbers alone."""
    shapes = {_shape(tag) for tag in tags if _shape(tag) != tag}
    names = (name for name in _names(run) if sources.is_folder(os.path.join(run, name)))
    return [name for name in names if _shape(name) in shapes]


def _shape(name: str) -> str:
    return re.sub(r"[0-9]+", "#", name)


def _is_one(path: str, neutral: bool = False) -> bool:
    """Whether a format finds a checkpoint; zckpt's own, which no engine loads, if `neutral`."""
    try:
        return any(f.detect(path) for f in FORMATS if neutral or not f.is_neutral)
    except ZckptError:
        return True  # its files say what is wrong when they are read


def _age(path: str) -> tuple[float, int]:
    """How new a checkpoint is: the step in its name, or that of its files, then its time."""
    name, time = os.path.basename(path), os.stat(path).st_mtime_ns
    step = STEP.match(name)
    numbers = [step[1]] if step else re.findall(r"[0-9]+", name)
    if numbers and not LAST.fullmatch(name):
        return float(numbers[-1]), time
    try:
        return float(api.read(path, weights_only=True).step or 0), time
    except (ZckptError, OSError):  # it comes first, and is named as broken
        return float("inf"), time
