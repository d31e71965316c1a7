"""Makes the JSON document of `zckpt report`, for a checkpoint or a run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from .. import api
from ..core.passes.description import VERSION, Report, line_of
from ..core.passes.resources import READING_JOBS, Begin, Copying
from ..core.storage.sources import unchanged
from ..core.version import __version__
from ..errors import ZckptError, notice_of, warning
from ..judging.damaged_source import NO_FAULT, NOTHING_TO_SHOW, Found, what_is_there
from ..resume.runs import Candidate, alone, candidates
from ..resume.runs import since as since_step
from . import against as other_checkpoint
from . import byte_map, faults, masters, next_steps, numbers, run, steps, summary
from .measuring import measured

if sys.version_info >= (3, 11):
    from typing import Unpack
elif TYPE_CHECKING:
    from typing_extensions import Unpack

Path = str | os.PathLike[str]


@api.takes_urls("path", "against")
def report(
    path: Path,
    *,
    against: Path | None = None,
    since: float | None = None,
    jobs: int = READING_JOBS,
    memory: int = 256 << 20,
    begin: Begin | None = None,
    **source: Unpack[api.NamedKeywords],
) -> Report:
    """Makes the JSON document of `zckpt report` about a checkpoint or a run.

    `docs/report.md` describes its sections. Problems, such as damaged bytes, are listed in
    `faults`; the other sections describe what could be read.

        against    a checkpoint to compare with; then every byte is read twice
        since      for a run: read only checkpoints of this step or later
        jobs       the number of threads
        memory     bytes of memory for tensors
        begin      as for `zckpt.convert`, called for each pass over the bytes
        source     the arguments of `read`

    Raises a ZckptError if there is nothing to show, for a wrong option, or if a file changes.
    """
    started = time.monotonic()
    copying = Copying(jobs, memory)
    chosen, gone = _checkpoints(os.fspath(path), source)
    if since is not None:
        chosen = since_step(chosen, since, os.fspath(path))
    shown: Report = {}
    strip: list[Report] = []
    losses: list[Any] = []
    for candidate in chosen:
        source_of_tag = {**source, "tag": candidate.tag} if candidate.tag else source
        other = None if against is None or candidate is not chosen[-1] else os.fspath(against)
        try:
            shown = _document(candidate, source_of_tag, other, copying, begin)
        except NOTHING_TO_SHOW as error:
            if len(chosen) == 1:
                raise
            shown = _nothing(candidate, error)
        strip.append(run.checkpoint(shown, candidate.name))
        losses = shown["about"]["losses"] or losses  # each log has those before it
    if not shown["next"]["resumes"]:
        intact = [e for e, line in zip(chosen, strip, strict=True) if not line["faults"]]
        older = intact[::-1] if len(chosen) > 1 else next_steps.older_than(chosen[0])
        shown["next"] = next_steps.with_older(shown["next"], older)
    if len(chosen) > 1:
        losses = [point for point in losses if since is None or point[0] >= since]
        shown["run"] = run.section(strip, shown, losses)
        shown["path"] = os.fspath(path)
    shown["faults"] = faults.ordered(
        [
            *shown["faults"],
            *run.faults_of(strip),
            *run.missing_checkpoints(os.fspath(path), gone),
            *run.notes_of(chosen),
        ]
    )
    return shown | {"seconds": round(time.monotonic() - started, 3)}


def _nothing(candidate: Candidate, error: ZckptError) -> Report:
    """The document for a folder in a run that has no checkpoint, such as an empty folder."""
    checkpoint = Found(candidate.path)
    checkpoint.faults.append(line_of(error.notice, kind="unreadable", fault=True))
    return _not_read(checkpoint, candidate)


def _checkpoints(path: str, source: Mapping[str, Any]) -> tuple[list[Candidate], list[Candidate]]:
    """The checkpoints to show, the oldest first, and missing ones.

    A missing checkpoint does not exist, but a file of the run, such as `latest`, names it; the name
    may be cut short. One checkpoint is shown if `source` has a `tag` or `format`, or if `path` is
    not a run.
    """
    itself = [alone(path, source.get("tag"))]
    if source.get("tag") or source.get("format") or not os.path.isdir(path):
        return itself, []
    try:
        listed_checkpoints = candidates(path)[::-1]
    except NOTHING_TO_SHOW:
        raise
    except (ZckptError, OSError):  # reading the path as one checkpoint raises the better error
        return itself, []
    there = [
        checkpoint
        for checkpoint in listed_checkpoints
        if os.path.isdir(checkpoint.where) or os.path.isfile(checkpoint.where)
    ]
    return (
        (there, [checkpoint for checkpoint in listed_checkpoints if checkpoint not in there])
        if there
        else (itself, [])
    )


def _document(
    candidate: Candidate,
    source: Mapping[str, Any],
    against: str | None,
    copying: Copying,
    begin: Begin | None,
) -> Report:
    with what_is_there(candidate.path, source, api.read) as checkpoint:
        if checkpoint.manifest is None:
            return _not_read(checkpoint, candidate)
        document = _begun(checkpoint, candidate)
        lines = [*faults.of_files(checkpoint)]
        try:
            with unchanged(checkpoint.manifest.files.fingerprints):
                document |= _read(checkpoint, copying, begin, lines)
        except NO_FAULT:
            raise
        except (ZckptError, OSError) as error:
            lines.append(line_of(notice_of(error), kind="unreadable"))
            document |= _metadata_sections(checkpoint)
        if against is not None:
            document |= _against(checkpoint, against, source, copying, begin, lines)
        document["faults"] = faults.section(checkpoint, lines)
        document["next"] = next_steps.section(checkpoint, candidate, document["faults"])
        return document


def _not_read(checkpoint: Found, candidate: Candidate) -> Report:
    """The document for a checkpoint that could not be read, with the names of its files."""
    wrong = faults.section(checkpoint, ())
    return _begun(checkpoint, candidate) | {
        "faults": wrong,
        "next": next_steps.section(checkpoint, candidate, wrong),
        "map": byte_map.files_alone(checkpoint),
    }


def _begun(checkpoint: Found, candidate: Candidate) -> Report:
    return {
        "zckpt": VERSION,
        "command": "report",
        "path": checkpoint.root,
        "version": __version__,
        "line": summary.section(checkpoint),
        "about": summary.about(checkpoint, candidate),
    }


def _metadata_sections(checkpoint: Found) -> Report:
    return {
        "tensors": numbers.table(checkpoint),
        "layers": numbers.names(checkpoint),
        "map": byte_map.section(checkpoint, ()),
        "steps": steps.section(checkpoint),
    }


def _read(checkpoint: Found, copying: Copying, begin: Begin | None, lines: list[Report]) -> Report:
    """Reads the tensors, and makes the sections about them; adds faults to `lines`."""
    done = measured(checkpoint, copying, begin)
    lines += done.problems
    lines += faults.contradictions(checkpoint.known)
    lines += masters.faults(checkpoint, done.distances, done.ranges)
    lines += faults.denormal(done.lines.items())
    wrong = sum(each["kind"] == "checksum" for each in done.problems)
    about = summary.section(checkpoint) | {
        "checked": summary.checked(done.records, wrong, lacks=bool(checkpoint.lost)),
        "digest": done.digest,
    }
    return {
        "line": about,
        "tensors": numbers.table(checkpoint, done.lines),
        "layers": numbers.names(checkpoint),
        "numbers": numbers.section(checkpoint, done.lines, done.updates),
        "map": byte_map.section(checkpoint, done.problems),
        "masters": masters.section(checkpoint, done.distances),
        "steps": steps.section(checkpoint),
    }


def _against(
    checkpoint: Found,
    against: str,
    source: Mapping[str, Any],
    copying: Copying,
    begin: Begin | None,
    lines: list[Report],
) -> Report:
    """Compares with the checkpoint at the path `against`, and returns the section "against".

    If nothing was compared, the result is empty, and `lines` gets the reason.
    """
    if checkpoint.lost or checkpoint.stated:
        message = f"not compared with {against}, because this checkpoint has faults"
        lines.append(line_of(warning("not-compared", message, file=against), kind="warning"))
        return {}
    try:
        differing = api.diff(
            checkpoint.path,
            against,
            jobs=copying.jobs,
            memory=copying.memory,
            begin=begin,
            **source,
        )
        step = api.read(against, nameless=True).step
    except NO_FAULT:
        raise
    except (ZckptError, OSError) as error:
        other = notice_of(error)
        named = replace(other, message=f"{against}: {other.message}")
        lines.append(line_of(named, kind="unreadable"))
        return {}
    return {"against": other_checkpoint.section(checkpoint, differing, against, step)}
