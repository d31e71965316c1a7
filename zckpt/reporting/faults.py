"""The section `faults` of a report: what is wrong with a checkpoint, worst first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..core.checkpoint.manifest import Manifest
from ..core.passes.description import Report, line_of
from ..errors import Notice, warning
from ..judging.damaged_source import Found
from ..proof import damage

KINDS = {
    "missing": True,
    "unreadable": True,
    "checksum": True,
    "NaN": True,
    "infinite": True,
    "impossible": True,
    "stale": True,
    "step": True,
    "dead": False,
    "constant": False,
    "denormal": False,
    "warning": False,
}
"""The kinds, worst first. True: the kind is a fault (exit code 3). False: it is an oddity."""
FIELDS = (*Notice.__struct_fields__, "kind", "fault", "tensor", "offset", "length", "checkpoint")
"""The keys of a line in the section `faults`.

`checkpoint` is the name of an older checkpoint of the run, or None for the checkpoint that is
shown.
"""
OF_FILES = ("missing-file", "missing-rank-file")
"""The codes of missing files, whose messages do not get "missing: " (the kind) in front."""
KIND_OF = {
    **dict.fromkeys((*OF_FILES, "unfinished-save"), "missing"),
    **dict.fromkeys(("elements-missing", "tensor-missing", "state-missing"), "missing"),
    "master-differs": "stale",
    "record-damaged": "checksum",
    "steps-disagree": "step",
}
"""Maps the code of a problem to its kind; a problem with any other code has kind `impossible`."""
ORDER = {kind: place for place, kind in enumerate(KINDS)}


def section(checkpoint: Found, lines: Iterable[Report]) -> list[Report]:
    """Sorts the lines about faults, worst first, and drops duplicates.

    Paths of files become relative to the checkpoint.
    """
    every = [_line(checkpoint, line) for line in (*checkpoint.faults, *lines)]
    unique = {(line["code"], line["message"], line.get("tensor")): line for line in every}
    return ordered(unique.values())


def ordered(lines: Iterable[Report]) -> list[Report]:
    """Sorts the lines about faults, worst first; missing keys (of FIELDS) become None."""
    full = [{key: line.get(key) for key in FIELDS} for line in lines]
    return sorted(full, key=lambda line: ORDER[line["kind"]])


def _line(checkpoint: Found, line: Report) -> Report:
    kind = line.get("kind", "impossible")
    file = line.get("file")
    message = checkpoint.real(line["message"])
    if line["code"] not in OF_FILES and kind.lower() not in message.lower():
        message = f"{kind}: {message}"
    name = checkpoint.name(file) if file else None
    return {"kind": kind, "fault": KINDS[kind], **line, "file": name, "message": message}


def of_files(checkpoint: Found) -> Iterator[Report]:
    """Yields a line for each missing or damaged file, each file of another save, and each warning.

    The warnings are those of the reader.
    """
    verdict = checkpoint.judged
    yield from (line_of(notice, kind="warning") for notice in checkpoint.known.notices.warnings)
    for notice in verdict.missing:
        # the optimizer of a checkpoint that lacks a file was left out by this command
        is_lost = notice in checkpoint.known.notices.lost
        if is_lost or not (checkpoint.faults and notice.code == "optimizer-missing"):
            yield line_of(notice, kind="missing")
    for notice in (*verdict.damaged, *verdict.unread):
        yield line_of(notice, kind="unreadable")
    yield from (line_of(notice, kind="warning") for notice in verdict.doubts)
    for notice in verdict.of_one_save:
        yield line_of(notice, kind=KIND_OF.get(notice.code, "impossible"))


def contradictions(manifest: Manifest) -> Iterator[Report]:
    """Yields lines about byte ranges that two tensors share, and about bytes of no tensor."""
    for notice in damage.overlapping(manifest):
        yield line_of(notice, kind="missing")
    for line in damage.unused(manifest):
        yield {**line, "kind": "warning", "fault": True}


def denormal(lines: Iterable[tuple[str, Report]]) -> Iterator[Report]:
    """Yields a line for each tensor with denormal numbers; `lines` are statistics by tensor."""
    for name, line in lines:
        if count := line.get("denormal"):
            message = f"{name} has {count:,} denormal numbers"
            notice = warning("too-small", message, subject=name)
            yield line_of(notice, kind="denormal", tensor=name)
