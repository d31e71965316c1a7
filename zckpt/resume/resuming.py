"""The steps of `auto_resume` until all ranks have a path.

1. rank 0 lists the checkpoints, and reads the metadata of the newest one
2. if the engine cannot load it on this number of ranks, rank 0 looks for an earlier resharded copy,
   or for space for a new copy
3. all ranks read all bytes of what will be loaded or resharded, and check the checksums
4. all ranks write the resharded copy together, once; `cache.py` chooses the path and locks it
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from shlex import quote
from typing import Any

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from .. import api
from ..core.comparison.replicas import not_compared
from ..core.passes.description import VERSION, Report, line_of, said, unopened
from ..core.passes.resources import Begin, Copying
from ..core.storage.names_alone import note_of
from ..errors import (
    IncompleteCheckpoint,
    MissingData,
    NotEnoughSpace,
    Notice,
    TargetExists,
    UnsupportedCheckpoint,
    WrongOption,
    ZckptError,
    again,
    counted,
    note,
    problem,
    sized,
    warning,
)
from ..formats.numbered import name_of
from ..judging import verdict
from ..judging.loads import batch_changes, missing_of, obstacles
from ..processes.ranks import Ranks, Told
from . import cache, names
from .fitting import Asked, Words, conversion, name_for, sizes_of, to_load
from .runs import Candidate, alone, candidates, damage, judged

READING = (
    *("format", "root", "step_policy", "tp_rules", "buffers", "param_names", "follow_links"),
)
"""The options for reading a checkpoint."""
GOING_ON: dict[str, Any] = {"resume": True, "begins_anew": True}
"""Options of `zckpt.reshard` that continue an unfinished copy.

On a filesystem without locks, the copy is written from the beginning instead.
"""


UNSUPPORTED, ALONE = "unsupported", "alone"
"""Kinds of reasons for skipping a checkpoint: unsupported version; weights without optimizer."""


class Resumed(str):
    """The checkpoint from which a run resumes; its path is for the engine's loader.

    step      completed updates; for Megatron-Core its iteration
    tag       the checkpoint's tag, or None
    report    the document of `zckpt auto-resume --json`
    """

    step: int | float | None
    tag: str | None
    report: dict[str, Any]

    def __new__(cls, path: str, report: dict[str, Any]) -> Resumed:
        self = super().__new__(cls, path)
        self.step, self.tag, self.report = report["step"], report["tag"], report
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)  # a trainer may send the path to other ranks, or save it


class Resuming(Struct, dict=True):
    """One call of `auto_resume` in one rank.

    Methods that begin with `_` run in rank 0 only. Two of them run in all ranks: `_none_is_whole`,
    and `_written` when it writes a copy.
    """

    ranks: Ranks
    stack: ExitStack
    run: str
    asked: Asked
    verify: str
    scratch: str | os.PathLike[str] | None
    keep: int
    copying: Copying
    begin: Begin | None
    copy: bool = True

    def __post_init__(self) -> None:
        self.is_elsewhere = api.is_url(self.run)
        if self.is_elsewhere and self.scratch is None:
            raise Told(
                WrongOption(
                    "option-needed",
                    f"{self.run} is in an object store, and the engine cannot load from there",
                    hint="name a folder that all nodes share: scratch=, or --scratch DIR",
                )
            )
        self.folder = cache.folder_of(self.run, self.scratch)
        self.damaged: set[str] = set()
        self._removed: list[str] = []
        self.records: dict[str, int] | None = None
        self._is_alone = False
        self._shared = {"begin": None if self.ranks.rank else self.begin, **self.ranks.words}
        given = {name: self.asked.words.get(name) for name in READING}
        self._reading = {name: value for name, value in given.items() if value is not None}

    def resumed(self) -> tuple[Resumed | None, list[Report]]:
        left: list[Words] = []
        for each in self.ranks.told(self._candidates):
            notes = tuple(Notice(**line) for line in each["notes"])
            candidate = Candidate(**{**each, "notes": notes})
            while "reason" not in (plan := self.planned(candidate)):
                if taken := self.taken(candidate, plan, left):
                    return taken
            left.append({"path": candidate.where, **plan})
        if left:
            raise Told(self._none_is_whole(left))
        is_there = self.is_elsewhere or os.path.isdir(self.run)
        message = f"{self.run} does not exist: nothing to resume"
        return None, said([] if is_there else [note("no-checkpoint", message, file=self.run)])

    def _none_is_whole(self, left: list[Words]) -> ZckptError:
        """Makes the error that all checkpoints of a run were skipped.

        `left` has a dictionary for each checkpoint, the newest first, with `path`, `kind` and
        `reason`.
        """
        newest, count = left[0], counted(len(left), "checkpoint")
        if newest["kind"] == UNSUPPORTED:
            return again(UnsupportedCheckpoint, newest["reason"])
        if all(each["kind"] == ALONE for each in left):
            return MissingData(
                "optimizer-missing",
                f"{self.run} has {count}, but none has an optimizer: training cannot resume from "
                "weights only",
                hint=f"`zckpt export {quote(newest['path'])} MODEL` writes the newest weights for "
                "from_pretrained; start a new training from them, in another directory",
                file=self.run,
            )
        anew = "`zckpt verify PATH` shows more; to start anew, choose another directory"
        return IncompleteCheckpoint(
            "none-is-whole",
            f"{self.run} has {count}, but none is complete: {_of(newest)}",
            hint="; ".join(filter(None, [newest["reason"]["hint"], anew])),
            file=self.run,
        )

    def planned(self, candidate: Candidate) -> Words:
        """Plans how to resume from a checkpoint, and checks the bytes that will be read.

        The result has a `reason` if the checkpoint cannot be used.
        """
        while True:
            plan: Words = self.ranks.told(partial(self._plan, candidate))
            if "reason" in plan:
                return plan
            target = plan["target"] if plan.get("is_complete") and self.copy else None
            # rank 0 has found the files of the source
            loaded = os.path.join(target, plan["inside"]) if target else None
            reason = self.ranks.told(partial(self._missing, loaded)) if loaded else None
            if not reason and self.verify == "records":
                path, tag = (loaded, None) if loaded else (candidate.path, candidate.tag)
                reason = self.damage(path, tag, {} if target else self._reading)
            if not reason:
                return plan
            if not target:
                return {"reason": reason, "kind": ""}
            self.damaged.add(target)  # it is removed, or a copy is written beside it
            self.ranks.told(partial(self._discard, target))

    def damage(self, path: str, tag: str | None, reading: Words) -> Report | None:
        """The first fault of a checkpoint, or None; all ranks read its bytes together."""
        more = {"jobs": self.copying.jobs, "memory": self.copying.memory, **self._shared}
        report = api.verify(path, tag=tag, **reading, **more)
        self.records = report.get("records")  # None if the files contradict each other
        found = damage(report, bool(self.asked.words.get("accept_weights")))
        return next((line_of(each) for each in found if each.code != verdict.UNREAD), None)

    def taken(
        self, candidate: Candidate, plan: Words, left: list[Words]
    ) -> tuple[Resumed, list[Report]] | None:
        """Returns the path to resume from, and warnings; writes a copy if `plan` asks for one.

        `left` are the newer checkpoints that were skipped, each with its `path` and `reason`.
        Returns None if another job has put another copy at this path meanwhile: the caller plans
        again.
        """
        target = plan["target"]
        if target and not plan["is_complete"]:
            written = self._written(candidate, plan, self._shared) if self.copy else None
            finished = self.ranks.told(partial(self._finish, candidate, plan, written))
            if finished is None:  # possible on a filesystem without locks
                return None
            plan |= finished
        if target:
            cache.hold(target)
        loaded = os.path.normpath(os.path.join(target, plan["inside"])) if target else None
        if loaded and not self.copy:
            names.serve(loaded, candidate, plan)
        aside = [
            warning(
                "checkpoint-set-aside",
                f"{skipped['path']} is skipped: {skipped['reason']['message']}; "
                f"{candidate.where} is used",
                file=skipped["path"],
            )
            for skipped in left
        ]
        lines = said([*aside, *candidate.notes])
        for line in (*plan["lines"], *plan["said"]):
            lines += [line] if line not in lines else []
        report = {
            "zckpt": VERSION,
            "command": "auto-resume",
            "run": self.run,
            "path": loaded or candidate.loaded,
            "checkpoint": candidate.where,
            "load_dir": loaded or candidate.path,
            **plan["about"],
            "written": plan["is_written"] and self.copy,
            "names": bool(loaded) and not self.copy,
            "bytes": plan["bytes"] if plan["is_written"] and self.copy else 0,
            "seconds": plan["seconds"] if plan["is_written"] and self.copy else 0.0,
            "records": self.records,
            "left_aside": [{key: each[key] for key in ("path", "reason")} for each in left],
            "removed": plan["removed"],
            "warnings": lines,
        }
        return Resumed(report["path"], report), lines

    def _written(self, candidate: Candidate, plan: Words, more: Words) -> Words:
        more = {"gives_way": True, "copying": self.copying, **more}
        words = {**GOING_ON, **plan["words"], **more}
        return api.reshard(candidate.path, plan["target"], tag=candidate.tag, **words)

    # -- rank 0

    def _candidates(self) -> Any:
        with api.local(self.run) as run:
            return api.translated(to_builtins(candidates(run)))

    def _plan(self, candidate: Candidate) -> Words:
        """Plans how to resume: from the checkpoint itself, or from a resharded copy.

        The result has a `reason` if the checkpoint cannot be used.
        """
        with api.local(candidate.path) as path:
            try:
                plan = api.translated(self._plan_at(candidate, replace(candidate, path=path)))
            except ZckptError as error:  # not about this checkpoint: an older one would not help
                if error.file is not None:
                    raise
                message = f"{candidate.where}: {error.message}"
                raise error.again(message=message, file=candidate.where) from error
            return {**plan, "removed": self._removed}

    def _plan_at(self, candidate: Candidate, here: Candidate) -> Words:
        """Plans how to resume from `candidate`; see `_plan`.

        `here` is the same checkpoint with a path on this machine, if `candidate` has a URL.
        """
        judgement = judged(here, self._reading)
        manifest = judgement.manifest
        if manifest is None or judgement.obstacles:
            kind = UNSUPPORTED if isinstance(judgement.error, UnsupportedCheckpoint) else ""
            kind = kind or ("" if judgement.problems else ALONE)
            return {"reason": line_of(judgement.obstacles[0]), "kind": kind}
        words = self.asked.of(manifest)
        are_read = self.verify == "records"
        unsure = [] if are_read else not_compared(manifest)
        unsure += judgement.remarks
        unsure += self.asked.unused(str(manifest.run.origin.format))
        missing = missing_of(manifest, str(manifest.run.origin.format), words)
        missing = [replace(each, severity="warning") for each in missing]
        differences = obstacles(manifest, words)
        if self.is_elsewhere and not differences:
            message = f"{self.run} is in an object store"
            differences = [problem("format-differs", message, file=self.run)]
        about: Words = {
            "tag": manifest.run.origin.tag,
            "step": verdict.step_of(manifest),
            "format": manifest.format,
            "sizes": sizes_of(words),
            "ranks_before": manifest.run.origin.dp,
            **({} if are_read else unopened(manifest)),
            "obstacles": said(differences),
        }
        plan: Words = {"about": about, "target": None, "is_written": False, "said": []}
        if not differences:
            say = to_load(candidate, manifest)
            told = [warning("program-must-set", say)] if say else []
            return plan | {
                "lines": said([*told, *missing, *batch_changes(manifest, words, ()), *unsure])
            }
        if not self.copy:
            names.refuse_engine(candidate.where, str(manifest.run.origin.format))
        more = conversion(manifest, manifest.format, words).words
        numbered = name_of(manifest)  # the folder name for which the program looks
        plan["inside"], more = numbered, {**more, "as_run": True} if numbered else more
        name = name_for(candidate.name, words)
        place = self._place(candidate, name if self.copy else f"{name}-names", more)
        changes = said([*missing, *batch_changes(manifest, words, place["lines"])])
        return {**plan, **place, "words": more, "lines": [*changes, *place["lines"]]}

    def _place(self, candidate: Candidate, name: str, words: Words) -> Words:
        """Chooses the directory for the copy; says whether a complete copy is there already.

        If none is there, this job holds the folder's lock and must write the copy. Raises
        NotEnoughSpace.
        """
        if os.path.isdir(self.folder):
            cache.opened(self.folder).close()
        removed: set[str] = set()
        number = 1
        while True:
            target = os.path.join(self.folder, name if number == 1 else f"{name}-{number}")
            try:
                dry = self._tried(candidate, target, words)
                is_complete = "already_complete" in dry
                if is_complete and target not in self.damaged:
                    cache.hold(target)
            except TargetExists:  # made from another source or options, or being written now
                if self._becomes_alone(target):
                    continue
                if target in removed or not self._removes(target):
                    number += 1
                removed.add(target)
                continue
            if is_complete and target in self.damaged:  # another job holds the damaged one
                number += 1
                continue
            if not is_complete and self._becomes_alone(target):
                continue  # looks again: another job may have written it meanwhile
            if not is_complete and dry["bytes"] > dry["free"]:
                raise NotEnoughSpace(
                    "not-enough-space",
                    f"{target} needs {sized(dry['bytes'])}, but only {sized(dry['free'])} are free",
                    hint="free some space, or name another filesystem: scratch=, or --scratch DIR",
                    file=target,
                )
            return {
                "target": target,
                "target_tag": None if self.copy else names.tag_in(candidate.where, dry),
                "is_complete": is_complete,
                "bytes": dry["bytes"],
                "lines": dry["warnings"],
            }

    def _tried(self, candidate: Candidate, target: str, words: Words) -> Words:
        words = {**GOING_ON, **words, "dry_run": True, "names": self._note(candidate)}
        return api.reshard(candidate.path, target, tag=candidate.tag, **words)

    def _note(self, candidate: Candidate) -> bytes | None:
        """The content of zckpt-names.json, which names the checkpoint to load without a copy.

        None if a copy is written.
        """
        return None if self.copy else note_of(names.absolute(candidate.path), candidate.tag)

    def _becomes_alone(self, target: str) -> bool:
        """Waits for the folder's lock and takes it; returns False if this job has it already."""
        if self._is_alone:
            return False
        cache.make(self.folder, self.run)
        self.stack.enter_context(cache.alone_in(self.folder))
        self._is_alone = True
        self._removed += cache.sweep(self.folder, target)
        return True

    def _removes(self, target: str) -> bool:
        is_gone = self._remove(target)
        return self._remove(target + cache.PARTIAL) and is_gone

    def _remove(self, path: str) -> bool:
        was_there = os.path.lexists(path)
        is_gone = cache.remove(path)
        self._removed += [path] if was_there and is_gone else []
        return is_gone

    def _missing(self, target: str) -> Report | None:
        """The first problem of a resharded copy that was already on disk; None if it has none.

        The result is a report line. Files of the copy may have been lost since it was written.
        """
        problems = judged(alone(target), {}).problems
        return line_of(problems[0]) if problems else None

    def _discard(self, target: str) -> None:
        cache.let_go(target)
        self._becomes_alone(target)
        self._remove(target)

    def _finish(self, candidate: Candidate, plan: Words, report: Words | None) -> Words | None:
        """Locks the directory that was written, removes old copies, and returns what was done.

        `report` is the result of `reshard`; with `copy=False` it is None, and this method writes
        the directory. Returns None if another job has put its own copy at that path.
        """
        if report is None:  # writes a directory of empty files; see `names.py`
            report = self._written(candidate, plan, {"names": self._note(candidate)})
        target = plan["target"]
        if "is_of_another" in report:
            return None
        cache.hold(target)
        self._removed += cache.tidy(self.folder, target, self.keep)
        is_written = "already_complete" not in report  # False: another job was faster
        return {
            "said": report["warnings"],
            "removed": self._removed,
            "is_written": is_written,
            "seconds": report.get("seconds", 0.0),
        }


def _of(candidate: Words) -> str:
    """Says which checkpoint was skipped, and why, as a message."""
    path, message = candidate["path"], str(candidate["reason"]["message"])
    return message if message.startswith(path) else f"{path}: {message}"
