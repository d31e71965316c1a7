"""Prints the damaged bytes that `mend` can restore, and those that are lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import counted, joined, listed, safe, sized
from . import listing
from .terminal import checked, spoken, warn

MOST = 20  # places of each kind
MOST_NAMES = 4  # in a sentence
HEADS = {
    "restored": "can be restored exactly",
    "accepted": "is restored by flipping one bit; only the checksum is evidence (--accept-chance)",
    "needs-consent": "can be restored by flipping one bit, if you accept that only the checksum is "
    "evidence (--accept-chance)",
    "lost": "is lost",
    "elsewhere": "was in lost files, but can be taken from other files",
    "rebuilt": "was in lost files, and is made up: other values take its place (--rebuild)",
    "made-up": "was in lost files, and would have to be made up: other values would take its place",
    "gone": "was in lost files alone, and is lost for good",
}
"""Maps the state of damaged or lost data to the headline above the list of these data."""


def damaged(places: Sequence[dict[str, Any]], quiet: bool) -> None:
    """Prints the damaged byte ranges (`places`), before anything is written."""
    if quiet:
        return
    for state, head in HEADS.items():
        places_of_state = [line for line in places if line["state"] == state]
        if places_of_state:
            print(f"{head}:")
        for line in places_of_state[:MOST]:
            print(f"  {spoken(line)}")
        if len(places_of_state) > MOST:
            print(f"  and {counted(len(places_of_state) - MOST, 'other place')}; --json lists all")


def mended(report: dict[str, Any], quiet: bool) -> None:
    """Prints the result of `mend`: what was written, what is left out, and what to do next.

    With --dry-run, it prints only what cannot be restored, and what to do. The damage itself is not
    printed here: `damaged` is called before.
    """
    warn(report["warnings"], quiet)
    source = safe(report["source"]["path"])
    for line in report["problems"]:
        print(f"cannot be restored: {spoken(line)}")
        if line["hint"]:
            print(f"  {safe(line['hint'])}")
    if quiet:
        return
    if report["dry_run"]:
        if not (report["places"] or report["lost"] or report["problems"]):
            print(f"nothing is damaged in {source}")
        listing.interrupted(report.get("interrupted"))
        if instead := report.get("instead"):
            print(f"next: resume from {safe(instead)}, which is complete according to its metadata")
        return
    where = safe(report["target"])
    if report.get("already_complete"):
        print(f"{where} is complete already; nothing was written")
        return
    files = counted(len(report["files"]), "file")
    print(
        f"{where}: a mended copy of {source}, {files}, {sized(report['bytes'])}, "
        f"{report['seconds']:.1f} s" + checked(report)
    )
    if report.get("resumed"):
        print(f"continued: an earlier run had written {sized(report['resumed'])}")
    for line in report["left_out"]:
        print(f"left out: {spoken(line)}")
    if report["next"]:
        print(f"next: {safe(report['next'])}")
    rebuilt = [line for line in report["lost"] if line["state"] == "rebuilt"]
    tensors = [each["tensor"] for line in rebuilt for each in line["tensors"]]
    values = [line["subject"] for line in rebuilt if not line["tensors"]]
    if rebuilt:
        parts = f"values in {counted(len(tensors), 'tensor')}" if tensors else ""
        others = counted(len(values), "other value") if values else ""
        print(
            f"made up (--rebuild): {joined([*filter(None, (parts, others))])}, in place of lost "
            f"ones: {listed([*tensors, *values], MOST_NAMES)}"
        )
