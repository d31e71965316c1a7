"""Prints a run (`zckpt list`): a row per checkpoint, and what is wrong below the table."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from ..core.grouping import by_key
from ..errors import counted, listed, safe, sized
from .tables import table
from .terminal import RED, YELLOW, first_of, painted, spoken, warn

Row = dict[str, Any]
MOST = 4  # names in a sentence
STYLES = {
    "damaged": "bold red",
    "mixed": "bold red",
    "unknown": "bold yellow",
    "weights": "yellow",
    "no": "yellow",
}
"""The colours of a cell on a terminal, by its text."""
LEFT_OUT = ("engine", "ranks", "size", "step", "saved")
"""The columns that are omitted on a narrow terminal, in this order."""


def listed_run(report: dict[str, Any], quiet: bool, wide: bool = False) -> None:
    """Prints the report of `list`. With `quiet`, prints only what is wrong."""
    rows = report["checkpoints"]
    sizes = _sizes(report["sizes"])
    if not quiet:
        cells = [_cells(row, sizes) for row in rows]
        table(
            [*cells[0]],
            [[*each.values()] for each in cells],
            spare=[*zip(LEFT_OUT)],
            style=_style,
            right=("size",),
            wide=wide,
        )
    wrong = [row for row in rows if state_of(row) in MEANINGS]
    for row in wrong:
        state = f"{safe(row['name'])} {MEANINGS[state_of(row)]}"
        print(f"{painted(state, COLOURS[state_of(row)])}: {_why(row)}")
        if row["being_written"] and not quiet:
            print("  a file of it changed within the last minute: the save may not have ended")
    if quiet:
        return
    for row in rows:
        for line in row["unread"] if row not in wrong else ():
            print(f"{safe(row['name'])}: {spoken(line)}")
    interrupted(report["interrupted"])
    _print_obstacles(rows, sizes)
    _print_count(rows, len(wrong))
    _warn(rows)


def interrupted(report: Row | None) -> None:
    """Prints which files of an interrupted save are complete, and which are not.

    Also prints the newest complete checkpoint of the run, and how many tensors of the interrupted
    one it has with the same name, type and shape.
    """
    if report is None:
        return
    by_state = by_key((each["state"], each["file"]) for each in report["files"])
    complete = len(by_state.pop("ok", ()))
    wrong = "; ".join(f"{state}: {listed(files, MOST)}" for state, files in by_state.items())
    files = counted(len(report["files"]), "file")
    print(f"{safe(report['name'])}: {complete} of {files} are complete" + (wrong and f"; {wrong}"))
    if report["older"] is None:
        print("  no other checkpoint of the run is complete")
        return
    fits = f"  {safe(report['older'])} is the newest complete one"
    if report["tensors"] is not None:
        fits += f": {report['alike']} of {counted(report['tensors'], 'tensor')} have the same name,"
        fits += " type and shape there"
    if report["frozen"]:
        fits += f", including the frozen weights {listed(report['frozen'], MOST)}"
    print(fits)


def state_of(row: Row) -> str:
    """The state of a checkpoint in one word: "whole" (complete), "damaged", or another word.

    "intact" means that it is complete and all of its bytes were read.
    """
    if row["whole"] is False:
        return "damaged"
    if row["of_one_save"] is False:
        return "mixed"
    if row["intact"] is False and row["problems"]:
        return "damaged"
    if row["whole"] is None or row["problems"]:
        return "unknown"
    if row["weights_alone"]:
        return "weights"
    return "intact" if row["intact"] else "whole"


MEANINGS = {
    "damaged": "is damaged",
    "mixed": "is not of one save",
    "unknown": "could not be looked at",
}
COLOURS = {"damaged": RED, "mixed": RED, "unknown": YELLOW}


def _cells(row: Row, sizes: str) -> dict[str, object]:
    """The cells of a checkpoint's row in the table, by column."""
    loads = {f"at {sizes}": {True: "loads", False: "no", None: "-"}[row["loads"]]} if sizes else {}
    return {
        "checkpoint": safe(row["name"]),
        "step": row["step"],
        "saved": _local(row["saved"]),
        "ranks": _sizes(row["sizes"]) or "-",
        "size": sized(row["bytes"]),
        "engine": row["format"] or "-",
        **loads,
        "state": state_of(row),
    }


def _sizes(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{name} {size}" for name, size in sizes.items())


def _local(saved: str | None) -> str:
    if saved is None:
        return "-"
    return datetime.fromisoformat(saved).astimezone().strftime("%Y-%m-%d %H:%M")


def _style(_head: str, value: object) -> str:
    return STYLES.get(str(value), "")


def _why(row: Row) -> str:
    sentences = dict.fromkeys(spoken(line) for line in row["problems"])  # equal ones once
    return first_of([*sentences] or [spoken(row["unread"][0])])


def _print_obstacles(rows: Sequence[Row], sizes: str) -> None:
    """Prints why checkpoints do not load; checkpoints with the same reasons share a line."""
    alike = by_key(
        (tuple(spoken(line) for line in row["obstacles"]), row) for row in rows if row["obstacles"]
    )
    for reasons, rows_alike in alike.items():
        some = counted(len(rows_alike), "checkpoint")
        does = "does" if len(rows_alike) == 1 else "do"
        print(f"{some} {does} not load{f' at {sizes}' if sizes else ''}: {first_of(reasons)}")


def _print_count(rows: Sequence[Row], wrong: int) -> None:
    """Prints how many checkpoints are intact (all bytes were read), or complete by metadata."""
    count = f"{len(rows) - wrong:,} of {counted(len(rows), 'checkpoint')}"
    if any(row["intact"] is not None for row in rows):
        print(f"intact (all bytes were read): {count}")
    else:
        more = " (--intact reads all bytes)" if wrong < len(rows) else ""
        print(f"complete according to the metadata: {count}{more}")


def _warn(rows: Sequence[Row]) -> None:
    """Prints the first warning of each code to stderr, and how many more have this code."""
    alike = by_key((line["code"], line) for row in rows for line in row["warnings"])
    for lines in alike.values():
        warn(lines[:1], quiet=False)
        if len(lines) > 1:
            more = counted(len(lines) - 1, "more such warning")
            print(f"         {more}: --json lists all", file=sys.stderr)
