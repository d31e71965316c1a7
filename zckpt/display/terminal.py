"""Functions for printing all kinds of reports: progress bars, warnings, colours, JSON, files."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from msgspec import to_builtins

from ..core.grouping import by_key
from ..core.passes.description import VERSION
from ..core.passes.pace import Line, telling
from ..core.storage import fileio
from ..errors import WrongOption, counted, joined, safe


def answer(
    report: dict[str, Any], as_json: bool, quiet: bool, show: Callable[..., None], *more: Any
) -> None:
    """Prints a command's report, as one JSON document or by `show(report, quiet, *more)`."""
    if as_json:
        document(report)
    else:
        show(report, quiet, *more)


def document(value: Any) -> None:
    """Prints one JSON document to stdout."""
    print(json.dumps(value, indent=2 if sys.stdout.isatty() else None, allow_nan=False))


def states(lines: Sequence[dict[str, Any]], *keys: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Groups report lines about optimizer states that are alike, for one line of output each.

    Yields a string such as `GG and Q of 4 parameters`, and the first line of the group. Lines are
    alike if their states belong to equally many parameters, and have equal values for `keys`.
    """
    alike = by_key(((line["parameters"], *(line.get(key) for key in keys)), line) for line in lines)
    for lines_alike in alike.values():
        names = joined([safe(line["state"]) for line in lines_alike])
        count = lines_alike[0]["parameters"]
        owners = counted(count, "parameter") if count else "no parameter"
        yield f"{names} of {owners}", lines_alike[0]


def warn(lines: Iterable[Mapping[str, Any]], quiet: bool) -> None:
    """Prints warnings, which are lines of a report, to stderr."""
    if not quiet and sys.stderr is not None:
        for line in lines:
            word = painted("Warning:", YELLOW, sys.stderr)
            print(f"{word} {spoken(line, sys.stderr)}", file=sys.stderr)
            if line.get("hint"):
                print(f"  {safe(line['hint'])}", file=sys.stderr)


def spoken(line: Mapping[str, Any], stream: TextIO | None = None) -> str:
    """The text of a notice in a report: its message, and its code, which docs/codes.md explains."""
    return safe(line["message"]) + shown(line["code"], sys.stdout if stream is None else stream)


def shown(code: str, stream: TextIO | None) -> str:
    """A notice's code as text to print after its message; dim on a terminal.

    If `stream` is None, the text is "". docs/codes.md explains the codes.
    """
    if stream is None:
        return ""
    return f" {painted(f'[{code}]', DIM, stream)}"


DIM, RED, YELLOW = "2", "1;31", "1;33"
"""The numbers of ANSI styles. No meaning depends on a colour alone: the words always say it too."""


def painted(text: str, colour: str, stream: TextIO | None = None) -> str:
    """The text in a colour if `stream` (default: stdout) is a terminal and NO_COLOR is not set."""
    stream = sys.stdout if stream is None else stream
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty():
        return text
    return f"\033[{colour}m{text}\033[0m"


def brief(value: Any) -> str:
    """A value as JSON text, but a string without quotes."""
    return value if isinstance(value, str) else json.dumps(value)


def checked(report: dict[str, Any]) -> str:
    """A phrase about checksums for the end of a line.

    It is "" if no checksum was checked, or one is wrong. `checksums ok` means that all checksums of
    all files were checked, and no bytes lack one. Otherwise it says how many were checked.
    """
    records = report.get("records")
    lines = (*report.get("problems", ()), *report.get("notes", ()))
    # damage in padding is a note
    is_damaged = any("stated" in line or line.get("code") == "record-damaged" for line in lines)
    if not records or not records["checked"] or is_damaged:
        return ""
    if not records["unchecked"]:
        return ", checksums ok"
    without = records["without_checksum"]
    texts = [
        f"{counted(records['checked'], 'checksum')} ok",
        f"{without:,} {'part has' if without == 1 else 'parts have'} none" if without else "",
        f"{records['unchecked'] - without:,} not checked" if records["unchecked"] > without else "",
    ]
    return f", {', '.join(filter(None, texts))}"


def unchecked(report: dict[str, Any]) -> None:
    """Prints how many byte ranges (records) of files were not checked, why, and what to do."""
    records = report.get("records") or {"unchecked": 0, "without_checksum": 0}
    without = records["without_checksum"]
    if without:
        print(f"{counted(without, 'part')} of files without a checksum: not checked")
    if partly := records["unchecked"] - without:
        print(f"{counted(partly, 'checksum')} not checked: only a part was read")
    if advice := report.get("advice"):
        print(f"note: {spoken(advice)}")


def first_of(findings: Sequence[str]) -> str:
    """The first of several findings, and the number of further findings, as text for one line."""
    more = f", and {len(findings) - 1:,} more: --json lists all" if len(findings) > 1 else ""
    return findings[0] + more


def warned(warnings: Sequence[Mapping[str, Any]]) -> str:
    """The number of warnings as text for the end of a line; "" if there are none."""
    return f"; {counted(len(warnings), 'warning')}" if warnings else ""


def can_save(path: str) -> None:
    """Raises WrongOption if a report cannot be written to `path`; called before the work begins."""
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise WrongOption(
            "output-not-writable",
            f"{path} cannot be written",
            hint="name a file in an existing folder",
        )
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        what = "a link" if os.path.islink(path) else "no regular file"  # such as /dev/stdout
        raise WrongOption(
            "output-not-writable",
            f"{path} is {what}, and would be replaced by a file",
            hint="name another file",
        )


def save(path: str, report: dict[str, Any]) -> None:
    """Writes a report to a file, which appears complete or not at all."""
    save_text(path, json.dumps(report, indent=1, allow_nan=False) + "\n")


def save_text(path: str, text: str) -> None:
    """Writes a text to a file, which appears complete or not at all."""
    fileio.save(path, text.encode("utf-8", "backslashreplace"))  # file names may be any bytes


WIDE = 80  # characters: a terminal as wide as this has a long bar
MIN_TEXT = 12
NUMBERS = 38  # characters: `999.9/999.9 GB 999.9 MB/s 0:00:00` and the gaps around it


class Bar:
    """A progress bar of bytes, with a description of at most `room` characters.

    `bar` is a `Progress` of rich, which would break the numbers if the description were longer.
    """

    def __init__(self, bar: Any, total: int, room: int = 100) -> None:
        self.bar = bar
        self.room = room
        for task in bar.task_ids:  # the bars of earlier passes over the bytes
            bar.update(task, visible=False)
        self.task = bar.add_task("", total=total)

    def __call__(self, count: int) -> None:
        self.bar.advance(self.task, count)

    def describe(self, text: str) -> None:
        text = safe(text)
        if len(text) > self.room:  # keeps the end of a name, which tells more
            text = f"...{text[len(text) - self.room + 3 :]}" if self.room > MIN_TEXT else ""
        self.bar.update(self.task, description=text)


@contextmanager
def progress(
    command: str, about: str, hidden: bool, *, as_json: bool = False, asked: bool = False
) -> Iterator[Callable[[int], Callable[[int], None]] | None]:
    """Shows progress on stderr: a bar on a terminal, otherwise a line per minute.

        as_json    lines are JSON documents, and are shown only if `asked`
        asked      (by --progress) lines on a terminal too, and the first one immediately

    Yields None if nothing is shown; otherwise a function that gets the total number of bytes, and
    returns a function to call with each number of new bytes.
    """
    if hidden or sys.stderr is None or (as_json and not asked):
        yield None
        return
    if asked or not sys.stderr.isatty():

        def say(line: Line) -> None:
            text = json.dumps(head | to_builtins(line)) if as_json else f"zckpt: {safe(line)}"
            with suppress(OSError, ValueError):  # stderr is on a full disk, or closed
                print(text, file=sys.stderr, flush=True)

        head = {"zckpt": VERSION, "command": command}
        with telling(f"{command} {about}", say, at_once=asked) as pace:
            yield pace.begin
        return
    from rich import progress as rich_progress
    from rich.console import Console
    from rich.table import Column

    console = Console(stderr=True)
    width = 20 if console.width >= WIDE else 8
    bar = rich_progress.Progress(
        rich_progress.BarColumn(width, table_column=Column(no_wrap=True)),
        rich_progress.DownloadColumn(table_column=Column(no_wrap=True)),
        rich_progress.TransferSpeedColumn(table_column=Column(no_wrap=True)),
        rich_progress.TimeRemainingColumn(table_column=Column(no_wrap=True)),
        rich_progress.TextColumn("{task.description}", markup=False),
        console=console,
        transient=True,
    )
    room = max(console.width - width - NUMBERS, 0)

    with bar:
        yield lambda total: Bar(bar, total, room)
