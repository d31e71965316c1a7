"""The report of `zckpt list`: the state of each checkpoint of a run.

The oldest checkpoint is the first, as on the page of `report`. So the newest one is the last line
above the prompt.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from .. import api
from ..core.checkpoint.manifest import Manifest
from ..core.passes.description import VERSION, Report, said
from ..core.passes.resources import READING_JOBS, Begin
from ..core.storage import sources
from ..errors import (
    InconsistentCheckpoint,
    NotACheckpoint,
    Notice,
    SourceChanged,
    UnsupportedCheckpoint,
    ZckptError,
    notice_of,
)
from ..judging.loads import obstacles
from ..judging.verdict import BROKEN, step_of
from .fitting import Asked
from .interrupted import interrupted
from .runs import LACKS, Candidate, alone, candidates, damage, judged, no_checkpoint

if sys.version_info >= (3, 11):
    from typing import Unpack
elif TYPE_CHECKING:
    from typing_extensions import Unpack

NO_ANSWER = (UnsupportedCheckpoint, SourceChanged)
"""Errors that do not tell whether the files are complete."""
BEING_WRITTEN = 60
"""Seconds. If a file changed within this time, the save may not have ended."""


@api.takes_urls("run")
def list_checkpoints(
    run: str | os.PathLike[str],
    *,
    dp: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
    stage: int | None = None,
    intact: bool = False,
    jobs: int = READING_JOBS,
    memory: int = 256 << 20,
    begin: Begin | None = None,
    **source: Unpack[api.NamedKeywords],
) -> Report:
    """Lists the checkpoints of a run, the oldest first, each with its state.

        dp, tp, pp, ep, stage    if one is given, each row states whether the engine loads the
                                 checkpoint with these sizes
        intact          True: read all bytes, as `verify` does. By default only metadata are read,
                        which show whether a checkpoint is complete and from one save
        jobs, memory    for `intact`: the number of threads, and the memory in bytes
        begin           as for `zckpt.convert`, called for each pass over the bytes
        source          the arguments of `read` without `tag`

    If a checkpoint cannot be read, its row has the error. Raises NotACheckpoint if the run has no
    checkpoint, or another ZckptError.
    """
    started = time.monotonic()
    run = os.fspath(run)
    if "tag" in source:
        raise TypeError("list_checkpoints() takes no argument 'tag'")
    sizes = {"dp": dp, "tp": tp, "pp": pp, "ep": ep, "stage": stage}
    given = {name: size for name, size in sizes.items() if size is not None}
    asked = Asked(None, given) if given else None
    reading = {name: value for name, value in source.items() if value not in (None, ())}
    proving = {"jobs": jobs, "memory": memory, "begin": begin} if intact else None
    rows = []
    checkpoints = candidates(run)
    if not checkpoints:  # weights alone are no run's, and may be the path itself
        verdict = judged(alone(run), reading)
        if isinstance(verdict.error, NotACheckpoint):
            raise no_checkpoint(run, verdict.error)
        checkpoints = [] if verdict.manifest is None else [alone(run)]
    for candidate in checkpoints[::-1]:
        was_there = not _is_gone(candidate.where)
        row = _row(candidate, asked, reading, proving)
        if row["problems"] and was_there and _is_gone(candidate.where):
            continue  # the run has removed it meanwhile, as its oldest one
        rows.append(row)
    if not rows:
        raise NotACheckpoint("no-checkpoint", f"{run} has no checkpoint", file=run)
    is_whole = all(row["whole"] for row in rows)
    return {
        "zckpt": VERSION,
        "command": "list",
        "run": run,
        "sizes": given,
        "checkpoints": rows,
        "interrupted": None if is_whole else interrupted(run, None, reading),
        "seconds": round(time.monotonic() - started, 3),
    }


def _is_gone(path: str) -> bool:
    with suppress(OSError):
        return sources.status(path) is None
    return False


def _row(
    candidate: Candidate,
    asked: Asked | None,
    reading: Mapping[str, Any],
    proving: Mapping[str, Any] | None,
) -> Report:
    """Makes the row of one checkpoint, whatever is wrong with it.

    `proving` are the arguments of `verify`, or None if no bytes are to be read.
    """
    notes = candidate.notes
    row: Report = {
        "name": candidate.name,
        "path": candidate.where,
        **dict.fromkeys(("step", "format", "version", "zero_stage")),
        "sizes": {},
        **on_disk(candidate.where),
        **dict.fromkeys(("whole", "of_one_save", "intact", "loads")),
        "weights_alone": False,
        **{key: [] for key in ("problems", "unread", "obstacles")},
        "warnings": said(notes),
    }
    try:
        verdict = judged(candidate, reading)
    except (ZckptError, OSError) as error:
        return row | _failed(error, "whole", row)
    if isinstance(verdict.error, NO_ANSWER):
        return row | _failed(verdict.error, "whole", row)
    manifest, problems = verdict.manifest, verdict.problems
    row |= {
        "whole": _answer(verdict.whole, manifest is not None),
        "of_one_save": _answer(verdict.of_one_save, manifest is not None),
        "weights_alone": bool(verdict.alone),
        "problems": said(problems),
        "unread": said(verdict.unread),
        "obstacles": said(verdict.alone),
    }
    if problems:  # the problems name the missing files already
        row["warnings"] = said(note for note in notes if note.code != LACKS)
        notes = ()
    if manifest is None:
        return row
    origin = manifest.run.origin
    row |= {
        "step": step_of(manifest),
        "format": manifest.format,
        "version": origin.version,
        "zero_stage": origin.zero_stage,
        "sizes": origin.sizes,
    }
    row["warnings"] = said(
        [
            *(*notes, *manifest.notices.warnings, *verdict.links),
            *(() if problems else verdict.doubts),
        ]
    )
    if asked is not None:
        row["warnings"] += said(asked.unused(manifest.format))
        reasons = [*verdict.alone, *_obstacles(manifest, asked)]
        row |= {"loads": not (reasons or problems), "obstacles": said(reasons)}
    if proving is not None:
        try:
            tag = candidate.tag
            damages = damage(api.verify(candidate.path, tag=tag, **reading, **proving))
        except (ZckptError, OSError) as error:
            return row | _failed(error, "intact", row)
        more = [notice for notice in damages if notice not in verdict.unread]
        row["intact"] = not (damages or verdict.unread)
        row["problems"] = said([*problems, *more])
    return row


def _answer(problems: Sequence[Notice], is_known: bool) -> bool | None:
    return False if problems else True if is_known else None


def _failed(error: ZckptError | OSError, question: str, row: Report) -> Report:
    """The keys that an error changes in the row of a checkpoint.

    `question` is the key that was being determined, such as "whole". Its value becomes False if the
    error shows that the checkpoint is broken, else None.
    """
    notices = error.notices if isinstance(error, ZckptError) else [notice_of(error)]
    is_answer = isinstance(error, BROKEN) and not isinstance(error, NO_ANSWER)
    # the error is about this key, whatever was being determined
    question = "of_one_save" if isinstance(error, InconsistentCheckpoint) else question
    return {
        question: False if is_answer else None,
        "problems": [*row["problems"], *said(notices)],
        "being_written": row["being_written"] or isinstance(error, SourceChanged),
    }


def _obstacles(manifest: Manifest, asked: Asked) -> list[Notice]:
    """Why the engine cannot load a checkpoint on the requested number of ranks; may be empty."""
    try:
        return obstacles(manifest, asked.of(manifest))
    except ZckptError as error:  # such as sizes that do not fit this one
        return [*error.notices]


def on_disk(path: str) -> Report:
    """Report keys: the time of a checkpoint's newest file, and its number of files and bytes."""
    row: Report = {"saved": None, "being_written": False, "files": 0, "bytes": 0}
    with suppress(OSError):
        now = sources.status(path)
        if now is None:
            return row
        last, sizes = now.st_mtime_ns, [now.st_size]
        if stat.S_ISDIR(now.st_mode):
            last, sizes = _below(path)
        row |= {"files": len(sizes), "bytes": sum(sizes)}
        seconds = (last or now.st_mtime_ns) / 1e9  # an empty folder has only its own time
        row["being_written"] = abs(time.time() - seconds) < BEING_WRITTEN
        with suppress(ValueError, OverflowError):  # a time that no calendar has
            saved = datetime.fromtimestamp(int(seconds), timezone.utc)
            row["saved"] = saved.isoformat()
    return row


def _below(folder: str) -> tuple[int, list[int]]:
    """The time of the newest file below a folder, in nanoseconds, and the size of each file.

    For a link to a file, the size is that of the file. Without files the time is 0.
    """
    last, sizes = 0, list[int]()
    for entry in sources.walk(folder):
        if not entry.is_dir(follow_symlinks=False):
            with suppress(FileNotFoundError):  # removed meanwhile, or a broken link
                last = max(last, entry.stat(follow_symlinks=False).st_mtime_ns)
                if entry.is_file():
                    sizes.append(entry.stat().st_size)
    return last, sizes
