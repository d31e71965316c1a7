"""How is a run printed (`zckpt list`)? A row for each checkpoint, and below it what is wrong.

A row is never broken: on a terminal that is too narrow for all columns, some are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from ..core.grouping import by_key
from ..errors import counted, safe, sized
from .terminal import cell, first_of, listed_rows, plain_columns, spoken, warn

Row = dict[str, Any]
BEING_WRITTEN = "being written"
STYLES = {
    "damaged": "bold red",
    "mixed": "bold red",
    "unknown": "bold yellow",
    "weights": "yellow",
    BEING_WRITTEN: "bold yellow",
    "no": "yellow",
}
"""How a cell looks on a terminal; its word says the same without colours."""
LEFT_OUT = ("engine", "ranks", "size", "step", "saved")
"""The columns that a narrow terminal can do without, the first one first."""
TO_RIGHT = ("step", "size")


def listed_run(report: dict[str, Any], quiet: bool) -> None:
    """The report of `list`; `quiet` prints only what is wrong."""
    rows = report["checkpoints"]
    sizes = _sizes(report["sizes"])
    if not quiet:
        _table([_cells(row, sizes) for row in rows])
    wrong = [row for row in rows if state_of(row) in MEANINGS]
    for row in wrong:
        print(f"{safe(row['name'])} is {MEANINGS[state_of(row)]}: {_why(row)}")
    if quiet:
        return
    for row in rows:
        for line in row["unread"] if row not in wrong else ():
            print(f"{safe(row['name'])}: {spoken(line)}")
    _print_obstacles(rows, sizes)
    _print_count(rows, len(wrong))
    _warn(rows)


def state_of(row: Row) -> str:
    """A checkpoint's state in one word."""
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
    "damaged": "damaged",
    "mixed": "not of one save",
    "unknown": "not looked at",
}


def _cells(row: Row, sizes: str) -> dict[str, str]:
    """The cells of a checkpoint by their columns."""
    loads = {f"at {sizes}": {True: "loads", False: "no", None: "-"}[row["loads"]]} if sizes else {}
    return {
        "checkpoint": safe(row["name"]),
        "step": cell(row["step"]),
        "saved": BEING_WRITTEN if row["being_written"] else _local(row["saved"]),
        "ranks": _sizes(row["sizes"]) or "-",
        "size": sized(row["bytes"]),
        "engine": row["format"] or "-",
        **loads,
        "state": state_of(row),
    }


def _sizes(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{name} {size}" for name, size in sizes.items())


def _local(saved: str | None) -> str:
    """A time in the time zone of this machine, to the minute."""
    if saved is None:
        return "-"
    return datetime.fromisoformat(saved).astimezone().strftime("%Y-%m-%d %H:%M")


def _table(rows: Sequence[dict[str, str]]) -> None:
    heads = [*rows[0]]
    if not sys.stdout.isatty():
        right = [head in TO_RIGHT for head in heads]
        plain_columns([heads, *([*row.values()] for row in rows)], right)
        return
    from rich import box
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    widths = {head: max(cell_len(head), *(cell_len(row[head]) for row in rows)) for head in heads}
    without: list[str] = []
    while _width(heads, widths) > console.width and len(without) < len(LEFT_OUT):
        without.append(LEFT_OUT[len(without)])
        heads.remove(without[-1])
    if _width(heads, widths) > console.width:
        listed_rows([*rows[0]], [[*row.values()] for row in rows])
        return
    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for head in heads:
        drawn.add_column(head, justify="right" if head in TO_RIGHT else "left", no_wrap=True)
    for row in rows:
        drawn.add_row(*(Text(row[head], STYLES.get(row[head], "")) for head in heads))
    console.print(drawn)
    for head in without:  # most runs have one engine, and one number of ranks
        values = {row[head] for row in rows} - {"-"}
        print(f"{head}: {values.pop() if len(values) == 1 else 'the terminal is too narrow'}")


def _width(heads: Sequence[str], widths: dict[str, int]) -> int:
    """Characters of a row: two between columns."""
    return sum(widths[head] + 2 for head in heads) - 2


def _why(row: Row) -> str:
    """What is wrong with a checkpoint: the first thing, and how many there are."""
    sentences = dict.fromkeys(spoken(line) for line in row["problems"])  # of several files, one
    return first_of([*sentences] or [spoken(row["unread"][0])])


def _print_obstacles(rows: Sequence[Row], sizes: str) -> None:
    """Why checkpoints do not load: those with the same reasons in one line."""
    alike = by_key(
        (tuple(spoken(line) for line in row["obstacles"]), row) for row in rows if row["obstacles"]
    )
    for reasons, own in alike.items():
        some = counted(len(own), "checkpoint")
        does = "does" if len(own) == 1 else "do"
        print(f"{some} {does} not load{f' at {sizes}' if sizes else ''}: {first_of(reasons)}")


def _print_count(rows: Sequence[Row], wrong: int) -> None:
    """How many are sound, and how that was found out."""
    count = f"{len(rows) - wrong:,} of {counted(len(rows), 'checkpoint')}"
    if any(row["intact"] is not None for row in rows):
        print(f"intact, of which all bytes were read: {count}")
    else:
        print(f"whole by the metadata: {count} (--intact reads all bytes)")


def _warn(rows: Sequence[Row]) -> None:
    """Warnings on stderr, those with one code once: forty checkpoints may have the same."""
    alike = by_key((line["code"], line) for row in rows for line in row["warnings"])
    for lines in alike.values():
        warn(lines[:1], quiet=False)
        if len(lines) > 1:
            more = counted(len(lines) - 1, "more such warning")
            print(f"         {more}: --json lists all", file=sys.stderr)
