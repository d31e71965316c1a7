"""What do the ranks do until all of them have a path?

1. rank 0 lists the checkpoints, and looks at the metadata of the newest one
2. if its engine does not load it at this size: is it there at this size? does it fit there?
3. all ranks read all bytes of what will be loaded or resharded, and check their checksums
4. all ranks write it at this size, once; `beside.py` says where, and who else may be there
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from shlex import quote
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from .. import api
from ..core.description import VERSION, Report, line_of, said
from ..core.replicas import not_compared
from ..core.resources import Begin, Copying
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
from ..judging import verdict
from . import beside
from .fitting import (
    Asked,
    Words,
    batch,
    conversion,
    missing_of,
    name_for,
    obstacles,
    sizes_of,
    to_load,
)
from .ranks import Ranks, Told
from .runs import Candidate, candidates, damage, judged

READING = ("format", "root", "step_policy", "tp_rules", "buffers", "param_names")
"""The words that say how a checkpoint is read."""
GOING_ON: dict[str, Any] = {"resume": True, "begins_anew": True}
"""What was begun is continued. Without locks it is written anew, or another job's is taken."""


class Resumed(str):
    """The path that the engine's loader takes.

    `step` counts completed updates, or is Megatron-Core's iteration. `tag` is the tag of the
    checkpoint, if it has one, and `report` says what was found and done.
    """

    step: int | float | None
    tag: str | None
    report: dict[str, Any]

    def __new__(cls, path: str, report: dict[str, Any]) -> Resumed:
        self = super().__new__(cls, path)
        self.step, self.tag, self.report = report["step"], report["tag"], report
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)  # a trainer may send it to others, or save it


class Settings(Struct, frozen=True):
    """What the user says beside the next run's sizes."""

    verify: str
    scratch: str | os.PathLike[str] | None
    keep: int
    copying: Copying
    begin: Begin | None


class Resuming:
    """One call, in one rank. Methods whose names begin with `_` run in rank 0 alone."""

    def __init__(
        self, run: str, asked: Asked, settings: Settings, ranks: Ranks, stack: ExitStack
    ) -> None:
        self.run, self.asked, self.settings, self.ranks = run, asked, settings, ranks
        self.is_elsewhere = api.is_url(run)
        if self.is_elsewhere and settings.scratch is None:
            raise Told(
                WrongOption(
                    "option-needed",
                    f"{run} is in an object store, from which the engine loads nothing",
                    hint="name a folder that all nodes see: scratch=, or --scratch DIR",
                )
            )
        self.folder = beside.folder_of(run, settings.scratch)
        self.damaged: set[str] = set()
        self._removed: list[str] = []
        self.records: dict[str, int] | None = None
        self._stack, self._is_alone = stack, False
        self._shared = {"begin": None if ranks.rank else settings.begin, **ranks.words}
        given = {name: asked.words.get(name) for name in READING}
        self._reading = {name: value for name, value in given.items() if value is not None}

    def resumed(self) -> tuple[Resumed | None, list[Report]]:
        left: list[Words] = []
        broken: list[Words] = []
        found = self.ranks.told(self._candidates)
        for path, name, loaded, tag, said_of in found:
            notes = tuple(Notice(**line) for line in said_of)
            candidate = Candidate(path, name, loaded, tag, notes)
            while "broken" not in (plan := self.planned(candidate)):
                if taken := self.taken(candidate, plan, left):
                    return taken
            broken.append(plan)
            left.append({"path": candidate.where, "reason": plan["broken"]})
        if left:
            newest = broken[0]
            if newest["is_unsupported"]:
                raise Told(again(UnsupportedCheckpoint, newest["broken"]))
            if all(each["is_alone"] for each in broken):
                raise Told(self._without_optimizer(left))
            anew = "`zckpt verify PATH` says more; to start anew, choose another directory"
            raise Told(
                IncompleteCheckpoint(
                    "none-is-whole",
                    f"{self.run} has {counted(len(left), 'checkpoint')}, and none is whole: "
                    f"{left[0]['path']}: {left[0]['reason']['message']}",
                    hint="; ".join(filter(None, [newest["broken"]["hint"], anew])),
                    file=self.run,
                )
            )
        is_there = self.is_elsewhere or os.path.isdir(self.run)
        message = f"{self.run} does not exist: nothing to resume"
        return None, said([] if is_there else [note("no-checkpoint", message, file=self.run)])

    def _without_optimizer(self, left: list[Words]) -> MissingData:
        """The error of a run in which all checkpoints have weights alone."""
        return MissingData(
            "optimizer-missing",
            f"{self.run} has {counted(len(left), 'checkpoint')}, and none has an optimizer: no "
            "training goes on from weights alone",
            hint=f"`zckpt export {quote(left[0]['path'])} MODEL` writes the newest weights for "
            "from_pretrained, with which another training may begin; for that choose another "
            "directory",
            file=self.run,
        )

    def planned(self, candidate: Candidate) -> Words:
        """What is to be done with a checkpoint, after all bytes that count were checked."""
        while True:
            plan: Words = self.ranks.told(partial(self._plan, candidate))
            if "broken" in plan:
                return plan
            target = plan["target"] if plan["is_complete"] else None
            # those of the source are there
            reason = self.ranks.told(partial(self._missing, target)) if target else None
            if not reason and self.settings.verify == "records":
                path, tag = (target, None) if target else (candidate.path, candidate.tag)
                reason = self.damage(path, tag, {} if target else self._reading)
            if not reason:
                return plan
            if not target:
                return {"broken": reason, "is_unsupported": False, "is_alone": False}
            self.damaged.add(target)  # it is removed, or another one is written beside it
            self.ranks.told(partial(self._discard, target))

    def damage(self, path: str, tag: str | None, reading: Words) -> Report | None:
        """What is wrong with a checkpoint; None if it is whole. All ranks read it together."""
        copying = self.settings.copying
        more = {"jobs": copying.jobs, "memory": copying.memory, **self._shared}
        report = api.verify(path, tag=tag, **reading, **more)
        self.records = report.get("records")  # none if the files contradict each other
        found = damage(report, bool(self.asked.words.get("accept_weights")))
        return next((line_of(each) for each in found if each.code != verdict.UNREAD), None)

    def taken(
        self, candidate: Candidate, plan: Words, left: list[Words]
    ) -> tuple[Resumed, list[Report]] | None:
        """The path of a checkpoint that is whole, which is written first if that is to be done.

        None if a job that no lock showed has another target there by now: it is to be planned anew.
        """
        target, is_written = plan["target"], plan["target"] and not plan["is_complete"]
        if is_written:
            more = {"gives_way": True, "copying": self.settings.copying, **self._shared}
            written = api.reshard(
                candidate.path, target, tag=candidate.tag, **GOING_ON, **plan["words"], **more
            )
            finished = self.ranks.told(partial(self._finish, target, written))
            if finished is None:
                return None
            plan |= finished
            is_written = plan["is_written"]
        if target:
            beside.hold(target)
        aside = [
            warning(
                "checkpoint-set-aside",
                f"{each['path']} is left aside: {each['reason']['message']}; {candidate.where} "
                "is taken",
                file=each["path"],
            )
            for each in left
        ]
        lines = said([*aside, *candidate.notes])
        for line in (*plan["lines"], *plan.get("said", ())):
            lines += [line] if line not in lines else []
        report = {
            "zckpt": VERSION,
            "command": "auto-resume",
            "run": self.run,
            "path": target or candidate.loaded,
            "checkpoint": candidate.where,
            "load_dir": target or candidate.path,
            **{
                key: plan[key]
                for key in ("tag", "step", "format", "sizes", "ranks_before", "obstacles")
            },
            "written": bool(is_written),
            "bytes": plan["bytes"] if is_written else 0,
            "records": self.records,
            "left_aside": left,
            "removed": plan["removed"],
            "warnings": lines,
        }
        return Resumed(report["path"], report), lines

    # -- rank 0

    def _candidates(self) -> list[Any]:
        with api.local(self.run) as run:
            found = [
                [each.path, each.name, each.loaded, each.tag, said(each.notes)]
                for each in candidates(run)
            ]
            return [api.translated(each) for each in found]

    def _plan(self, candidate: Candidate) -> Words:
        """Whether the engine loads it, else where it is written; or why it is `broken`."""
        with api.local(candidate.path) as path:
            try:
                plan = api.translated(self._plan_at(candidate, replace(candidate, path=path)))
            except ZckptError as error:  # no fact of this checkpoint, so that no older one is taken
                if error.file is not None:
                    raise
                message = f"{candidate.where}: {error.message}"
                raise error.again(message=message, file=candidate.where) from error
            return {**plan, "removed": self._removed}

    def _plan_at(self, candidate: Candidate, here: Candidate) -> Words:
        """The same; `here` is where this machine reads it."""
        own = judged(here, self._reading)
        manifest = own.manifest
        if manifest is None or own.obstacles:
            broken = line_of(own.obstacles[0])
            kinds = {
                "is_unsupported": isinstance(own.error, UnsupportedCheckpoint),
                "is_alone": not own.problems,
            }
            return {"broken": broken, **kinds}
        words = self.asked.of(manifest)
        are_read = self.settings.verify == "records"
        unsure = [] if are_read else not_compared(manifest)
        unsure += own.remarks
        missing = missing_of(manifest, str(manifest.origin.format), words)
        missing = [replace(each, severity="warning") for each in missing]
        plan: Words = {
            "step": verdict.step_of(manifest),
            "tag": manifest.origin.tag,
            "format": manifest.format,
            "sizes": sizes_of(words),
            "obstacles": said(obstacles(manifest, words) or self._elsewhere()),
            "ranks_before": manifest.origin.dp,
            "lines": [],
            "target": None,
            "is_complete": False,
        }
        if not plan["obstacles"]:
            say = to_load(candidate, manifest)
            told = [warning("program-must-set", say)] if say else []
            return plan | {"lines": said([*told, *missing, *batch(manifest, words, ()), *unsure])}
        plan["words"] = conversion(manifest, manifest.format, words).words
        place = self._place(candidate, name_for(candidate.name, words), plan["words"])
        changes = said([*missing, *batch(manifest, words, place["lines"])])
        return plan | place | {"lines": [*changes, *place["lines"]]}

    def _elsewhere(self) -> list[Notice]:
        """Why an engine does not load what is in a store."""
        message = f"{self.run} is in an object store"
        return [problem("format-differs", message, file=self.run)] if self.is_elsewhere else []

    def _place(self, candidate: Candidate, name: str, words: Words) -> Words:
        """The directory for it: complete, or to be written by this job, which is alone then."""
        if os.path.isdir(self.folder):
            beside.opened(self.folder).close()
        removed: set[str] = set()
        number = 1
        while True:
            target = os.path.join(self.folder, name if number == 1 else f"{name}-{number}")
            try:
                dry = api.reshard(
                    candidate.path, target, tag=candidate.tag, dry_run=True, **GOING_ON, **words
                )
                is_complete = "already_complete" in dry
                if is_complete and target not in self.damaged:
                    beside.hold(target)
            except TargetExists:  # of another source, options or version; or being written now
                if self._becomes_alone(target):
                    continue
                if target in removed or not self._removes(target):
                    number += 1
                removed.add(target)
                continue
            if is_complete and target in self.damaged:  # and another job has it
                number += 1
                continue
            if not is_complete and self._becomes_alone(target):
                continue  # to look again: the job before may have written it
            if not is_complete and dry["bytes"] > dry["free"]:
                raise NotEnoughSpace(
                    "not-enough-space",
                    f"{target} needs {sized(dry['bytes'])}, but only {sized(dry['free'])} are free",
                    hint="free some space, or name another filesystem: scratch=, or --scratch DIR",
                    file=target,
                )
            return {
                "target": target,
                "is_complete": is_complete,
                "bytes": dry["bytes"],
                "lines": dry["warnings"],
            }

    def _becomes_alone(self, target: str) -> bool:
        """Waits until no other job writes in the folder; False if that is so already."""
        if self._is_alone:
            return False
        beside.make(self.folder, self.run)
        self._stack.enter_context(beside.alone_in(self.folder))
        self._is_alone = True
        self._removed += beside.sweep(self.folder, target)
        return True

    def _removes(self, target: str) -> bool:
        """Whether nothing is there now, complete or begun."""
        is_gone = self._remove(target)
        return self._remove(target + beside.PARTIAL) and is_gone

    def _remove(self, path: str) -> bool:
        was_there = os.path.lexists(path)
        is_gone = beside.remove(path)
        self._removed += [path] if was_there and is_gone else []
        return is_gone

    def _missing(self, target: str) -> Report | None:
        """What is missing in a complete directory by now."""
        own = verdict.judged(lambda: api.read(target, nameless=True, by_checksums=True), target)
        return line_of(own.problems[0]) if own.problems else None

    def _discard(self, target: str) -> None:
        beside.let_go(target)
        self._becomes_alone(target)
        self._remove(target)

    def _finish(self, target: str, report: Words) -> Words | None:
        """What becomes of a target that is there; None if it is another one than was to be."""
        if "is_of_another" in report:
            return None
        beside.hold(target)
        self._removed += beside.tidy(self.folder, target, self.settings.keep)
        is_written = "already_complete" not in report  # another job's was there first
        return {"said": report["warnings"], "removed": self._removed, "is_written": is_written}
