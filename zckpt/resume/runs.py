"""Finds the checkpoints of a run, the newest first, and the path that the engine loads for each.

    RUN/checkpoint-500, RUN/checkpoints/checkpoint_3      a folder each: the Trainer, Accelerate
    RUN/step3/model_and_optim, RUN/global_step_3/actor    a checkpoint in each numbered folder
    RUN/lightning_logs/version_0/checkpoints/*.ckpt       a folder or a file each: Lightning
    RUN/global_step500, RUN/iter_0000500, RUN/step-500    tags: DeepSpeed, Megatron-Core, torchtitan

A folder whose name differs from that of a checkpoint only in its numbers counts as a checkpoint
too, even if a save has just begun to write it. `formats.by_age` decides which one is the newest. A
checkpoint that the run's own pointer file (such as `latest`) names comes first.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from msgspec import Struct

from .. import api, formats
from ..core.grouping import by_key
from ..core.passes.description import Report
from ..core.storage import sources
from ..core.storage.names_alone import refuse_names
from ..errors import (
    AmbiguousCheckpoint,
    NotACheckpoint,
    Notice,
    WrongOption,
    ZckptError,
    listed,
    problem,
    warning,
)
from ..formats import DEPTH, FORMATS, MOST_FOLDERS
from ..formats.order import in_name
from ..formats.paths import LATEST
from ..judging import verdict
from ..judging.inventory import roles_beside
from ..judging.verdict import Verdict

FILE = ".ckpt"
OF_FILESYSTEM = "lost+found"
"""A folder that the filesystem makes by itself, and that users may not list."""
LINKS = (LATEST, "last")
"""Names of links to the last checkpoint."""
TRACKER, MOST = "latest_checkpointed_iteration.txt", 64  # bytes
"""The file in which Megatron-LM and verl (0.7) store the number of the last checkpoint."""

LACKS = "missing-file"
"""The code of the warning that a checkpoint lacks a file which all others of the run have."""
VERSION = re.compile(r"version_\d+", re.ASCII)
"""The folder that Lightning makes for each start of a run: `version_0`."""


Notices = tuple[Notice, ...]


class Candidate(Struct, frozen=True):
    """A checkpoint of a run; `path` and `tag` are the arguments for `zckpt.read`.

    `loaded` is the path to give to the engine's loader. `notes` are warnings for a user who resumes
    from this checkpoint.
    """

    path: str
    name: str
    loaded: str
    tag: str | None = None
    notes: Notices = ()

    @property
    def where(self) -> str:
        """The folder with the checkpoint's own files, or its only file: `path` with the tag."""
        return os.path.join(self.path, self.tag) if self.tag else self.path


def alone(path: str, tag: str | None = None) -> Candidate:
    """The checkpoint at `path`, which is not a run with several checkpoints."""
    return Candidate(path, os.path.basename(os.path.abspath(path)), path, tag)


def no_checkpoint(run: str, error: NotACheckpoint) -> NotACheckpoint:
    """Makes the error "the run has no checkpoint", with the hint of `error`."""
    if error.code == "no-such-path":
        return error.again(code="no-checkpoint")
    return error.again(code="no-checkpoint", message=f"{run} has no checkpoint", file=run)


def folder_of(candidate: Candidate) -> str:
    """The trainer's folder of a checkpoint, for messages: `run5/checkpoint-500`.

    The engine's own folder may be inside: `run5/checkpoint-500/global_step500`.
    """
    above = os.path.dirname(candidate.where) or os.curdir
    return above if formats.is_of_trainer(above) else candidate.where


def since(checkpoints: Iterable[Candidate], step: float, run: str) -> list[Candidate]:
    """Selects the checkpoints of step `step` or later, and those without a known step.

    Raises WrongOption if all are older.
    """
    numbers = [(each, formats.number_of(each.where)) for each in checkpoints]
    kept = [each for each, number in numbers if number is None or number >= step]
    if numbers and not kept:
        last = max(number for _, number in numbers if number is not None)
        raise WrongOption(
            "option-names-nothing",
            f"{run} has no checkpoint of step {step:.15g} or later",
            hint=f"the last one is of step {last:.15g}",
        )
    return kept


def judged(candidate: Candidate, reading: Mapping[str, Any]) -> Verdict:
    """Judges, from metadata only, whether a checkpoint is complete and from one save."""
    # if the tag's folder is missing, reading without a tag blames the file that names it
    tag = candidate.tag if candidate.tag and os.path.isdir(candidate.where) else None
    return verdict.judged(
        lambda: api.read(candidate.path, tag=tag, nameless=True, by_checksums=True, **reading)
    )


def instead_of(path: str, tag: str | None = None) -> str | None:
    """Finds the newest complete checkpoint that can replace another checkpoint of the same run.

    `path` is the checkpoint to replace, or the run with the checkpoint `tag` (None: its last one).
    Reads only metadata. Returns None if no other checkpoint is complete.
    """
    with suppress(ZckptError, OSError):
        for candidate in others(path, tag):
            with suppress(ZckptError, OSError):
                if not judged(candidate, {}).obstacles:
                    return candidate.where
    return None


def others(path: str, tag: str | None) -> list[Candidate]:
    """The other checkpoints of the same run, the newest first.

    Their names differ from the name of `path`, or from `tag`, only in numbers.
    """
    checkpoints = candidates(path)
    if tag is not None:
        return [each for each in checkpoints if tag not in (each.tag, each.name)]
    if len(checkpoints) > 1 or any(each.tag for each in checkpoints):
        return checkpoints[1:]
    folder = os.path.abspath(path)
    name = os.path.basename(folder)
    above = os.path.dirname(path.rstrip(os.sep)) or os.curdir
    if _shape(name) == name or os.path.abspath(above) != os.path.dirname(folder):
        return []
    checkpoints = candidates(above)
    return [each for each in checkpoints if each.name != name and _shape(each.name) == _shape(name)]


def damage(report: Report, accept_weights: bool = False) -> list[Notice]:
    """The faults in a report of `verify`, also in files that resuming does not read."""
    fields = Notice.__struct_fields__
    notices = [Notice(**{key: line[key] for key in fields}) for line in report["problems"]]
    for line in () if accept_weights else report["differences"]:
        message = f"{line['tensor']}: two stored replicas differ"
        notices.append(problem("tensor-differs", message, subject=line["tensor"]))
    return notices


@sources.looks_again
def candidates(run: str) -> list[Candidate]:
    """Finds the checkpoints of a run, the newest first; empty if there is none.

    Raises NotACheckpoint if `run` is a file and no checkpoint.
    """
    if sources.status(run) is None:
        return []
    refuse_names(run)
    checkpoints = _by_tag(run)
    there = [each for each in checkpoints if sources.is_folder(each.where)]
    if checkpoints and len(there) <= 1 and formats.is_of_trainer(run):  # its folder is a part
        return [alone(run)]
    if checkpoints:
        return checkpoints
    if _is_one(run, neutral=True) or formats.inside_numbered(run):
        return [alone(run)]
    if not sources.is_folder(run):
        raise NotACheckpoint(
            "not-a-checkpoint",
            f"{run} is a file, not the folder of a run",
            hint="give the folder in which a run has saved",
            file=run,
        )
    return _in_folders(run)


def _by_tag(run: str, inside: bool = False) -> list[Candidate]:
    """Finds the checkpoints of a run that stores tags (`global_step500`); empty for other runs.

    The tag that the run's pointer file (such as `latest`) names comes first, then the newest.
    `inside` is True if a search below the user's path has found the folder `run`.
    """
    for format in FORMATS:
        # a folder with one tag, if it is inside a run, may be a trainer's folder of one checkpoint
        if len(tags := format.tags(run)) > (inside and format.pointer is not None):
            break
    else:
        return []
    standings = _newest_first(
        os.path.join(run, tag) for tag in {*tags, *_tags_of_same_shape(run, tags)}
    )
    notes = {os.path.relpath(path, run): own for path, own in standings.items()}
    linked = sources.beside(os.path.join(run, LATEST))
    pointed = format.pointer(run) if format.pointer else linked
    if pointed is not None:
        newest = next(iter(notes))
        is_behind = {newest, pointed} <= {*tags} and newest != pointed
        notes_of_pointed = (_set_back(run, pointed, newest),) if is_behind else ()
        notes = {pointed: notes_of_pointed, **_without(notes, pointed)}
    return [
        Candidate(
            run,
            tag,
            run if (tag == pointed and not linked) or format.to_load else os.path.join(run, tag),
            tag,
            notes_of_tag,
        )
        for tag, notes_of_tag in notes.items()
    ]


def _set_back(run: str, pointed: str, newest: str) -> Notice:
    return warning(
        "pointer-behind",
        f"{run} names {pointed} as its last checkpoint, which is used: the save of {newest} may "
        f"not have ended, or the user may have set the run back to {pointed}",
        file=os.path.join(run, pointed),
    )


def _newest_first(paths: Iterable[str]) -> dict[str, Notices]:
    """Sorts the paths of checkpoints, the newest first, and maps each to its warnings.

    A checkpoint gets a warning if only the times of its files decide its place in the order.
    """
    order = formats.by_age(paths)[::-1]
    notes: dict[str, Notices] = {standing.path: () for standing in order}
    for standing, older in zip(order, [*order[1:], None], strict=True):
        if standing.is_timed and len(order) > 1:
            place = f"directly above {older.path}" if older else "below all others"
            timed = warning(
                "place-inferred",
                f"neither the files of {standing.path} nor its name state a step: by the times of "
                f"its files it is placed {place}",
                file=standing.path,
            )
            notes[standing.path] = (timed,)
    return notes


def _in_folders(run: str) -> list[Candidate]:
    """Finds the checkpoints that are folders or files below a run.

    The run's folder is searched first. If it contains no checkpoint, the folders in it are
    searched, and so on down to DEPTH levels.
    """
    level = [run]
    for _ in range(DEPTH):
        inside = {folder: _names(folder) for folder in level}
        runs = [tags for path in _subfolders(inside) if (tags := _by_tag(path, inside=True))]
        _refuse_several(run, [tags[0].path for tags in runs])
        if runs:
            return runs[0]
        paths: list[str] = []
        versions: dict[str, str] = {}  # a folder of each run
        for folder, names in inside.items():
            if inside_it := _checkpoints(folder, names):
                versions[VERSION.sub("", folder)] = folder
                paths += inside_it
        _refuse_several(run, [*versions.values()])
        if paths:
            return _ordered(paths)
        level = _subfolders(inside)[:MOST_FOLDERS]
    return []


def _checkpoints(folder: str, names: Iterable[str]) -> list[str]:
    """Finds the checkpoints in a folder: returns their paths.

    Names that differ only in numbers are treated alike: when one of them is found to be a
    checkpoint, all count as checkpoints, and the others are not opened.
    """
    by_shape = by_key((_shape(name), name) for name in names)
    alike_names: list[str] = []
    for alike in by_shape.values():
        if any(_is_saved(os.path.join(folder, name)) for name in alike):
            alike_names += alike
    return [os.path.join(folder, name) for name in alike_names]


def _ordered(paths: Iterable[str]) -> list[Candidate]:
    """Sorts checkpoints, the newest first, except that the current one comes before all others.

    The current checkpoint is the one to which a link such as `latest` leads, or which a file of the
    program names. Without a link or file, it is the newest one.
    """
    notes = _newest_first(paths)
    links = {
        os.path.join(folder, sources.beside(os.path.join(folder, link)) or link)
        for folder in map(os.path.dirname, notes)
        for link in LINKS
    }
    links |= {path for path in notes if _is_tracked(path)}
    newest = next(iter(notes))
    if (pointed := next(filter(links.__contains__, notes), newest)) != newest:
        run, name = os.path.split(pointed)
        behind = _set_back(run, name, os.path.basename(newest))
        notes = {pointed: (behind,), **_without(notes, pointed)}
    lacks = _lacking(notes)
    return [
        Candidate(path, os.path.basename(path), path, notes=(*notes_of_path, *lacks[path]))
        for path, notes_of_path in notes.items()
    ]


def _is_tracked(path: str) -> bool:
    """Whether `latest_checkpointed_iteration.txt` in the run has this checkpoint's number."""
    tracker, number = os.path.join(os.path.dirname(path), TRACKER), in_name(path)
    if number is None or not sources.is_file(tracker) or sources.size(tracker) > MOST:
        return False
    with sources.opened(tracker) as file:
        word: bytes = file.read().strip()
    return word.isdigit() and float(word) == number


def _lacking(paths: Iterable[str]) -> dict[str, list[Notice]]:
    """Warns about a file, such as a scheduler's, that only one checkpoint of the run lacks.

    At least two other checkpoints must have the file. Returns the warnings by the path of the
    checkpoint.
    """
    roles = {path: roles_beside(path) for path in paths}
    counts = Counter(role for own in roles.values() for role in own)
    common = {role for role, count in counts.items() if count == len(roles) - 1 >= 2}
    return {
        path: [
            warning(
                LACKS,
                f"{path} has no file for the {role}, which all other checkpoints of the run have",
                subject=role,
                file=path,
            )
            for role in sorted(common - roles_of_path)
        ]
        for path, roles_of_path in roles.items()
    }


def _without(notes: dict[str, Notices], name: str) -> dict[str, Notices]:
    return {other: own for other, own in notes.items() if other != name}


def _refuse_several(run: str, runs: list[str]) -> None:
    if len(runs) > 1:
        raise AmbiguousCheckpoint(
            "several-checkpoints",
            f"{run} holds several runs: {listed(runs)}",
            hint="give one of them",
            file=run,
        )


def _subfolders(inside: dict[str, list[str]]) -> list[str]:
    paths = (os.path.join(folder, name) for folder, names in inside.items() for name in names)
    return [path for path in paths if sources.is_folder(path)]


def _names(folder: str) -> list[str]:
    """Lists what may be a checkpoint in a folder: subfolders, and files by their endings.

    Hidden names are left out, and so are links to another name in the same folder.
    """
    if sources.is_denied(folder):
        return []
    with os.scandir(folder) as entries:
        return sorted(
            entry.name
            for entry in entries
            if not entry.name.startswith(".")
            and (entry.name.endswith(FILE) or not entry.is_file(follow_symlinks=False))
            and (entry.name.endswith(FILE) or sources.is_folder(entry.path))
            and not (entry.name == OF_FILESYSTEM and sources.is_denied(entry.path))
            and sources.beside(entry.path) is None
        )


def _tags_of_same_shape(run: str, tags: Iterable[str]) -> list[str]:
    """Lists the folders in `run` whose names differ from one of `tags` only in numbers, if at all.

    A tag without a number is not considered.
    """
    shapes = {_shape(tag) for tag in tags if _shape(tag) != tag}
    names = (name for name in _names(run) if sources.is_folder(os.path.join(run, name)))
    return [name for name in names if _shape(name) in shapes]


def _shape(name: str) -> str:
    return re.sub(r"[0-9]+", "#", name)


def _is_saved(path: str) -> bool:
    """Whether the path is a checkpoint, or weights that a trainer saved without an optimizer."""
    return _is_one(path) or formats.are_weights_alone(path) or bool(formats.inside_numbered(path))


def _is_one(path: str, neutral: bool = False) -> bool:
    """Whether a format recognizes the path as a checkpoint.

    zckpt's universal checkpoints count only if `neutral` is True. A path that cannot be read
    counts: reading it later raises the error.
    """
    try:
        return any(f.detect(path) for f in FORMATS if neutral or not f.is_neutral)
    except (ZckptError, OSError):
        return True  # reading the files later raises the error
