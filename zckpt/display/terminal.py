"""What every report is printed with: tables, progress bars, JSON, files."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from ..core import fileio
from ..core.grouping import by_key
from ..errors import WrongOption, counted, joined, safe

NARROW = 6  # characters per column; a drawn table would lose some with less


def answer(
    report: dict[str, Any], as_json: bool, quiet: bool, show: Callable[..., None], *more: Any
) -> None:
    """Prints the report of a command: as one JSON document, or as `show` does for people."""
    if as_json:
        document(report)
    else:
        show(report, quiet, *more)


def document(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2 if sys.stdout.isatty() else None, allow_nan=False))


def states(lines: Sequence[dict[str, Any]], *keys: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """States of the optimizer for a sentence: `GG and Q of 4 parameters`, and the first one's line.

    States of as many parameters are named together if their lines have equal values for `keys`.
    """
    alike = by_key(((line["parameters"], *(line.get(key) for key in keys)), line) for line in lines)
    for own in alike.values():
        names = joined([safe(line["state"]) for line in own])
        count = own[0]["parameters"]
        owners = counted(count, "parameter") if count else "no parameter"
        yield f"{names} of {owners}", own[0]


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Rows on stdout, numbers to the right: a table on a terminal, else columns for grep and awk.

    The names in `heads` are empty for a list of facts.
    """
    cells = [[cell(value) for value in row] for row in rows]
    right = [any(isinstance(row[i], (int, float)) for row in rows) for i in range(len(heads))]
    if sys.stdout.isatty():
        _drawn_table(heads, cells, right)
    else:
        plain_columns([heads, *cells] if any(heads) else cells, right)


def _drawn_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]
) -> None:
    """A table as wide as the terminal at most; longer cells continue on the next line."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if console.width < NARROW * len(heads):
        listed_rows(heads, rows)
        return
    drawn = Table(box=box.SIMPLE_HEAD, show_header=any(heads), show_edge=False)
    for head, to_right in zip(heads, right, strict=True):
        drawn.add_column(Text(head), justify="right" if to_right else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*map(Text, row))
    console.print(drawn)


def listed_rows(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A line per cell, for a table of many columns on a narrow terminal."""
    width = max(map(len, heads))
    for row in rows:
        for head, text in zip(heads, row, strict=True):
            print(f"{head.ljust(width)}  {text}".rstrip())
        print()


def plain_columns(lines: Sequence[Sequence[str]], right: Sequence[bool]) -> None:
    """Columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(line, widths, right, strict=True)
        ]
        print("  ".join(cells).rstrip())


def cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else safe(value)


def warn(lines: Iterable[Mapping[str, Any]], quiet: bool) -> None:
    """Warnings on stderr: lines of a report."""
    if not quiet and sys.stderr is not None:
        for line in lines:
            print(f"Warning: {spoken(line, sys.stderr)}", file=sys.stderr)


def spoken(line: Mapping[str, Any], stream: TextIO | None = None) -> str:
    """What a line of a report says, for a terminal: its sentence, and its code."""
    return safe(line["message"]) + shown(line["code"], sys.stdout if stream is None else stream)


def shown(code: str, stream: TextIO | None) -> str:
    """The code behind a sentence, dim, if a person reads it on a terminal."""
    if stream is None or not stream.isatty():
        return ""
    return f" [{code}]" if os.environ.get("NO_COLOR") else f" \033[2m[{code}]\033[0m"


def brief(value: Any) -> str:
    """A value as JSON; a text without quotes."""
    return value if isinstance(value, str) else json.dumps(value)


def checked(report: dict[str, Any]) -> str:
    """What the end of a line says of checksums; nothing if none was checked, or one is wrong.

    Only where all parts of files have one, it has no number.
    """
    records = report.get("records")
    lines = (*report.get("problems", ()), *report.get("notes", ()))
    is_damaged = any("stated" in line for line in lines)  # in padding, too
    if not records or not records["checked"] or is_damaged:
        return ""
    if not records["unchecked"]:
        return ", checksums ok"
    every = records["checked"] + records["unchecked"]
    return f", {records['checked']:,} of {every:,} checksums ok"


def unchecked(report: dict[str, Any]) -> None:
    """How many parts of files could not be checked and why, and what can still be done."""
    records = report.get("records") or {"unchecked": 0, "without_checksum": 0}
    without = records["without_checksum"]
    if without:
        print(f"{counted(without, 'part')} of files without a checksum: not checked")
    if partly := records["unchecked"] - without:
        print(f"{counted(partly, 'checksum')} not checked: only a part was read")
    if advice := report.get("advice"):
        print(f"note: {spoken(advice)}")


def first_of(findings: Sequence[str]) -> str:
    """The first of several findings, for a line of one of several paths."""
    more = f", and {len(findings) - 1:,} more: --json lists all" if len(findings) > 1 else ""
    return findings[0] + more


def warned(warnings: Sequence[Mapping[str, Any]]) -> str:
    """How many warnings a report has, for the end of such a line."""
    return f"; {counted(len(warnings), 'warning')}" if warnings else ""


def can_save(path: str) -> None:
    """Raises WrongOption where no report could be written, before the work is done."""
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise WrongOption(
            "output-not-writable",
            f"{path} cannot be written",
            hint="name a file in a folder that is there",
        )
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        what = "a link" if os.path.islink(path) else "no regular file"  # such as /dev/stdout
        raise WrongOption(
            "output-not-writable",
            f"{path} is {what}, and would be replaced by a file",
            hint="name another file",
        )


def save(path: str, report: dict[str, Any]) -> None:
    """A report as a file, whole or not at all."""
    save_text(path, json.dumps(report, indent=1, allow_nan=False) + "\n")


def save_text(path: str, text: str) -> None:
    """A text as a file, whole or not at all."""
    fileio.save(path, text.encode("utf-8", "backslashreplace"))  # names of files may be any bytes


class Bar:
    """Progress on a terminal: bytes, and what is being done. `bar` is a `Progress` of rich."""

    def __init__(self, bar: Any, total: int) -> None:
        self.bar = bar
        for task in bar.task_ids:  # a pass over the bytes ends before the next one begins
            bar.update(task, visible=False)
        self.task = bar.add_task("", total=total)

    def __call__(self, count: int) -> None:
        self.bar.advance(self.task, count)

    def describe(self, text: str) -> None:
        self.bar.update(self.task, description=safe(text))


@contextmanager
def progress(hidden: bool) -> Iterator[Callable[[int], Callable[[int], None]] | None]:
    """A bar on stderr while bytes move, if that is a terminal."""
    if hidden or sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from rich import progress as rich_progress
    from rich.console import Console

    bar = rich_progress.Progress(
        rich_progress.BarColumn(20),
        rich_progress.DownloadColumn(),
        rich_progress.TransferSpeedColumn(),
        rich_progress.TimeRemainingColumn(),
        rich_progress.TextColumn("{task.description}", markup=False),
        console=Console(stderr=True),
        transient=True,
    )

    with bar:
        yield lambda total: Bar(bar, total)
