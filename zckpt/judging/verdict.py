"""Decides whether a checkpoint is complete, and whether its files are from one save.

`verify`, `report`, `check` and `auto-resume` use it.

    whole        all files that resuming needs exist and are readable. If one is missing, resuming
                 fails, or silently starts the optimizer or the schedule anew
    of one save  files do not contradict each other about steps, ranks and names
    intact       checksums, values and replicas are right; this needs all bytes: `proof.verify`
    loads here   sizes, stage, engine and model fit the program: loads.py

A damaged file that resuming does not read is reported, and does not disqualify the checkpoint.
`training/needs.py` decides which files are necessary.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from shlex import quote

from msgspec import Struct
from msgspec.structs import asdict, replace

from .. import formats
from ..core.checkpoint import mended
from ..core.checkpoint.manifest import Manifest
from ..core.checkpoint.unlisted import refuse_share
from ..core.storage.inventory import Row, State
from ..errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    MissingData,
    NotACheckpoint,
    Notice,
    SourceChanged,
    UnsupportedCheckpoint,
    ZckptError,
    again,
    listed,
    notice_of,
    problem,
    warning,
)
from ..formats.numbered import is_optimizers
from ..formats.paths import LATEST, pointing
from ..training import needs, trainers_steps
from .file_state import OF_TORCH
from .inventory import OTHER, has_optimizer, inventory, needs_of

MISSING = (IncompleteCheckpoint, MissingData, NotACheckpoint, FileNotFoundError)
NOT_ITS_OWN = (InconsistentCheckpoint, SourceChanged)
CONTRADICTIONS = (CorruptCheckpoint, IncompleteCheckpoint, InconsistentCheckpoint)
"""Errors that commands such as `report` list as findings, instead of failing with them."""
BROKEN = (*MISSING, *NOT_ITS_OWN, CorruptCheckpoint, UnsupportedCheckpoint)
"""Errors about the files of one checkpoint, after which another checkpoint may be tried."""
WORDS: Mapping[State, str] = {
    "missing": "is missing",
    "empty": "is empty",
    "zeros": "has zeros alone",
    "cut": "ends too early",
    "unreadable": "is damaged",
    "foreign": "is of another run",
    "unexpected": "is of a rank that the run did not have",
}
ENDS = "without which the program cannot resume"
ANEW = "without which the program silently begins its optimizer and schedule anew"
REMOVE = "remove it: the run goes on without it (rm {})"
FAILS = "with which the program cannot resume"


class Verdict(Struct, frozen=True):
    """The problems of a checkpoint, by kind. `manifest` is None if it could not be read.

    missing, damaged    files that a program needs to resume
    of_one_save         contradictions between files, perhaps of different saves
    unread              damaged files that no program needs to resume
    alone               the checkpoint has weights, but no optimizer
    doubts              signs without proof, such as another number in a folder's name
    links               files that are links out of the folder
    rows                all files with their purpose and state
    """

    manifest: Manifest | None = None
    rows: tuple[Row, ...] = ()
    missing: tuple[Notice, ...] = ()
    damaged: tuple[Notice, ...] = ()
    of_one_save: tuple[Notice, ...] = ()
    unread: tuple[Notice, ...] = ()
    alone: tuple[Notice, ...] = ()
    doubts: tuple[Notice, ...] = ()
    error: ZckptError | OSError | None = None
    """The error that stopped the reader."""
    links: tuple[Notice, ...] = ()
    restored: tuple[Notice, ...] = ()
    """Warnings about values of the checkpoint that `zckpt mend` has restored."""

    @property
    def whole(self) -> tuple[Notice, ...]:
        """The files that resuming needs and that are missing or damaged.

        The tuple is empty if the checkpoint is complete ("whole").
        """
        return (*self.missing, *self.damaged)

    @property
    def problems(self) -> tuple[Notice, ...]:
        """The reasons why the checkpoint is not complete, or not of one save; may be empty."""
        return (*self.whole, *self.of_one_save)

    @property
    def obstacles(self) -> tuple[Notice, ...]:
        """The reasons why no program can resume from the checkpoint; empty if one can."""
        return (*self.problems, *self.alone)

    @property
    def remarks(self) -> list[Notice]:
        """Findings that do not prevent a program from resuming, as warnings."""
        return [*_as_warnings((*self.unread, *self.doubts)), *self.links, *self.restored]

    def warnings(self, resumes: bool = True) -> list[Notice]:
        """All findings as warnings, for a conversion.

        If no run will resume from the target (`resumes` is False), only findings about files that
        the target gets are returned.
        """
        if resumes:
            return [*_as_warnings(self.problems), *self.remarks]
        lost = () if self.manifest is None else self.manifest.notices.lost
        files = (*self.damaged, *self.unread)
        of_files = (each for each in files if each.subject not in needs.OF_RUN)
        return [*_as_warnings((*lost, *of_files)), *self.links, *self.restored]


def _as_warnings(notices: Iterable[Notice]) -> list[Notice]:
    return [replace(each, severity="warning") for each in notices]


def judged(read_manifest: Callable[[], Manifest]) -> Verdict:
    """Reads a checkpoint and judges it, even if it cannot be read.

    An error about the checkpoint, such as a missing file, becomes a part of the verdict. Other
    errors are raised: permissions, the network, a wrong option.
    """
    try:
        manifest = read_manifest()
    except BROKEN as error:
        notices = (notice_of(error),) if isinstance(error, OSError) else error.notices
        if isinstance(error, NOT_ITS_OWN):
            return Verdict(of_one_save=notices, error=error)
        if isinstance(error, MISSING):
            return Verdict(missing=notices, error=error)
        return Verdict(damaged=notices, error=error)
    return of(manifest)


def of(manifest: Manifest) -> Verdict:
    """Judges a checkpoint that was read; reads no tensor."""
    required = {need.role.name: need for need in needs_of(manifest)}
    rows, steps = inventory(manifest, required), trainers_steps.disagreements(manifest)
    missing, alone = _without_optimizer(manifest, rows, is_known=bool(required))
    missing += _pointer(manifest)
    damaged, unread = list[Notice](), list[Notice]()
    for row in rows:
        need = required.get(row.role)
        if row.state == "missing" and need is not None:
            missing.append(_wrong(row, ENDS if need.missing == "ends" else ANEW))
        elif row.state != "ok" and need is not None and need.damaged in needs.LOST:
            hint = REMOVE.format(quote(row.path)) if need.missing == "goes on" else ""
            damaged.append(_wrong(row, FAILS, hint))
        elif row.state != "ok":
            unread.append(_unread(row, need))
    try:
        refuse_share(manifest)
    except IncompleteCheckpoint as error:
        missing += error.notices
    return Verdict(
        manifest,
        tuple(rows),
        tuple(missing),
        tuple(damaged),
        tuple(each for each in steps if each.severity == "error"),
        tuple(unread),
        tuple(alone),
        (*(each for each in steps if each.severity != "error"), *_ranks_without(manifest, rows)),
        links=manifest.notices.links,
        restored=tuple(mended.warnings(manifest.notices.mended, manifest.where)),
    )


def refuse_lost(manifest: Manifest) -> None:
    """Raises IncompleteCheckpoint if weights were trained, and the optimizer's files are lost."""
    for lost in manifest.notices.lost:
        raise again(IncompleteCheckpoint, {**asdict(lost), "paths": ()})


def refuse_widened(manifest: Manifest, dtype: str | None) -> None:
    """Raises IncompleteCheckpoint if --dtype asks for fp32 weights, but the fp32 masters are lost.

    Only 16-bit weights are left then.
    """
    for lost in manifest.notices.lost:
        if dtype == "F32" and lost.subject == "master":
            raise IncompleteCheckpoint(
                "optimizer-missing",
                f"--dtype fp32 writes the masters, but of {lost.file} only the 16-bit weights are "
                "read; the masters are lost",
                hint="leave out --dtype: the weights are written in the type that they have",
                file=lost.file,
            )


def with_warnings(manifest: Manifest) -> Manifest:
    """Adds the findings about a checkpoint, such as missing files, to its manifest's warnings."""
    return manifest.replace(warnings=(*manifest.notices.warnings, *of(manifest).warnings()))


def step_of(manifest: Manifest) -> int | float | None:
    """The number of completed updates; for Megatron-Core the iteration in the folder's name.

    If no engine file states it, it is the Trainer's counter, or None.
    """
    iteration = str(manifest.run.origin.tag).rpartition("_")[2]
    if formats.named(manifest.format).to_load and iteration.isdecimal():
        return int(iteration)
    return trainers_steps.global_step(manifest) if manifest.step is None else manifest.step


def _pointer(manifest: Manifest) -> Iterable[Notice]:
    """Yields a problem if the file `latest`, which names the folder to load, is missing.

    Nothing is yielded if the checkpoint's program does not read this file.
    """
    tag, format = manifest.run.origin.tag, formats.of(manifest)
    folder = manifest.root
    for _ in str(tag).split("/"):
        folder = os.path.dirname(folder)
    if (
        format is None
        or format.pointer is None
        or format.to_load
        or not tag
        or not needs.reads_pointer(manifest)
    ):
        return
    if format.pointer(folder) is None:
        yield problem(
            "unfinished-save",
            f"{folder} has no file `{LATEST}`, which a save writes last: without it the program "
            f"does not find {tag}",
            hint=f"if the save did end: {pointing(folder, tag)}",
            file=folder,
        )


def _ranks_without(manifest: Manifest, rows: Iterable[Row]) -> Iterable[Notice]:
    """Warns about ranks without a file of random states, if other ranks have one."""
    random_states = [row for row in rows if row.role == needs.RANDOM_STATE.name and row.rank]
    there = {number for row in random_states for _, number in row.rank}
    origin = manifest.run.origin
    ranks = (origin.dp or 0) if {origin.tp, origin.pp} <= {None, 1} else 0
    without = sorted({*range(max((ranks, *(number + 1 for number in there))))} - there)
    if there and without:
        yield warning(
            "missing-rank-file",
            f"{os.path.dirname(random_states[0].path)} has no random state of rank "
            f"{listed(without)}: these ranks continue with other random numbers",
            subject=needs.RANDOM_STATE.name,
            file=os.path.dirname(random_states[0].path),
        )


def _without_optimizer(
    manifest: Manifest, rows: Iterable[Row], is_known: bool
) -> tuple[list[Notice], list[Notice]]:
    """Finds out whether the optimizer's files were lost, or none was saved.

    Returns two lists, one for each case; at most one of them has a notice. `is_known` tells whether
    the program is known, and so the names of its optimizer files.
    """
    if manifest.notices.lost:
        return [*manifest.notices.lost], []
    if has_optimizer(manifest):
        return [], []
    beside = (row.name for row in rows if row.role == OTHER and row.path != manifest.root)
    around = (item.name for item in manifest.files.around)
    if not is_known and (
        any(name.endswith(OF_TORCH) for name in beside) or any(map(is_optimizers, around))
    ):
        return [], []  # it may be there, under another name
    scheduler = next((row for row in rows if row.role == needs.SCHEDULER.name), None)
    what = "has weights and no optimizer"
    if scheduler is None or scheduler.state == "missing" or not is_known:
        message = f"{manifest.root} {what}: no run can resume from it"
        hint = "`zckpt export` and a new training need only weights"
        return [], [problem("optimizer-missing", message, hint=hint, file=manifest.root)]
    message = (
        f"{manifest.root} {what}, but trainers save {scheduler.name} together with an optimizer: "
        "the optimizer was lost"
    )
    return [problem("optimizer-missing", message, file=manifest.root)], []


def _wrong(row: Row, why: str, hint: str = "") -> Notice:
    message = f"{row.path} {WORDS[row.state]}, {why}"
    hint = hint or "take another copy of it, or an earlier checkpoint"
    return problem("trainer-file-damaged", message, hint=hint, subject=row.role, file=row.path)


UNREAD = "unread-file-damaged"
"""The code of damage in a file that resuming does not read; the checkpoint can still be used."""


def _unread(row: Row, need: needs.Need | None) -> Notice:
    goes_on = need is not None and need.damaged == "goes on"
    then = (
        "the program goes on without it"
        if goes_on
        else "the program resumes without reading this file"
    )
    return problem(
        UNREAD,
        f"{row.path} {WORDS[row.state]}; {then}",
        hint="take another copy of it",
        subject=row.role,
        file=row.path,
    )
