"""What is wrong with a checkpoint, worst first: the section `faults`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..core.description import Report
from ..core.manifest import Manifest
from ..proof import damage
from .lost import Found

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
"""The kinds, worst first, and whether each is a fault: exit code 3. Others are oddities."""
FIELDS = ("kind", "fault", "tensor", "file", "offset", "length", "message")
ORDER = {kind: place for place, kind in enumerate(KINDS)}


def section(found: Found, lines: Iterable[Report]) -> list[Report]:
    """All lines with the same keys, worst first; files by their names below the checkpoint."""
    every = [_line(found, line) for line in (*found.faults, *lines)]
    unique = {(line["message"], line["tensor"]): line for line in every}
    return ordered(unique.values())


def ordered(lines: Iterable[Report]) -> list[Report]:
    """Lines, worst first."""
    return sorted(lines, key=lambda line: ORDER[line["kind"]])


def _line(found: Found, line: Report) -> Report:
    kind = line.get("kind", "impossible")
    file = line.get("file")
    message = found.real(line["message"])
    if kind.lower() not in message.lower():
        message = f"{kind}: {message}"
    given = {
        "kind": kind,
        "fault": line.get("fault", KINDS[kind]),
        "file": found.name(file) if file else None,
        "message": message,
    }
    return {key: given.get(key, line.get(key)) for key in FIELDS}


def warnings(manifest: Manifest) -> Iterator[Report]:
    """The sentences of the reader for the user."""
    for line in manifest.warnings:
        yield {"kind": "warning", "message": line}


def contradictions(manifest: Manifest) -> Iterator[Report]:
    """Tensors that have bytes of each other, and bytes that no tensor has."""
    for message in damage.overlapping(manifest):
        yield {"kind": "missing", "message": message}
    for line in damage.unused(manifest):
        place = {key: line[key] for key in ("file", "offset", "length", "message")}
        yield {"kind": "warning", "fault": True, **place}


def denormal(lines: Iterable[tuple[str, Report]]) -> Iterator[Report]:
    """Tensors with numbers that are too small to be normal ones of their type."""
    for name, line in lines:
        if count := line.get("denormal"):
            yield {
                "kind": "denormal",
                "tensor": name,
                "message": f"{name} has {count:,} denormal numbers",
            }
