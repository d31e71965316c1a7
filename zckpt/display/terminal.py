"""What every report is printed with: tables, progress bars, JSON, files."""

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
    for lines_alike in alike.values():
        names = joined([safe(line["state"]) for line in lines_alike])
        count = lines_alike[0]["parameters"]
        owners = counted(count, "parameter") if count else "no parameter"
        yield f"{names} of {owners}", lines_alike[0]


def warn(lines: Iterable[Mapping[str, Any]], quiet: bool) -> None:
    """Warnings on stderr: lines of a report."""
    if not quiet and sys.stderr is not None:
        for line in lines:
            word = painted("Warning:", YELLOW, sys.stderr)
            print(f"{word} {spoken(line, sys.stderr)}", file=sys.stderr)
            if line.get("hint"):
                print(f"  {safe(line['hint'])}", file=sys.stderr)


def spoken(line: Mapping[str, Any], stream: TextIO | None = None) -> str:
    """What a line of a report says to people: its sentence, and the code to look it up by."""
    return safe(line["message"]) + shown(line["code"], sys.stdout if stream is None else stream)


def shown(code: str, stream: TextIO | None) -> str:
    """The code behind a sentence, dim on a terminal: docs/codes.md says what to do."""
    if stream is None:
        return ""
    return f" {painted(f'[{code}]', DIM, stream)}"


DIM, RED, YELLOW = "2", "1;31", "1;33"
"""Of a terminal. What is red or yellow says the same in words."""


def painted(text: str, colour: str, stream: TextIO | None = None) -> str:
    """A text in a colour, if `stream` (stdout) is a terminal and NO_COLOR does not forbid it."""
    stream = sys.stdout if stream is None else stream
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty():
        return text
    return f"\033[{colour}m{text}\033[0m"


def brief(value: Any) -> str:
    """A value as JSON; a text without quotes."""
    return value if isinstance(value, str) else json.dumps(value)


def checked(report: dict[str, Any]) -> str:
    """What the end of a line says of checksums; nothing if none was checked, or one is wrong.

    Only where all parts of files have one that was checked, it has no number.
    """
    records = report.get("records")
    lines = (*report.get("problems", ()), *report.get("notes", ()))
    # in padding, too
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


WIDE = 80  # characters of a terminal that has room for a long bar
MIN_TEXT = 12
NUMBERS = 38  # characters of `999.9/999.9 GB 999.9 MB/s 0:00:00` and of the gaps around


class Bar:
    """Progress on a terminal: bytes, and what is being done, in at most `room` characters.

    `bar` is a `Progress` of rich, which would break numbers to show all of a long name.
    """

    def __init__(self, bar: Any, total: int, room: int = 100) -> None:
        self.bar = bar
        self.room = room
        for task in bar.task_ids:  # a pass over the bytes ends before the next one begins
            bar.update(task, visible=False)
        self.task = bar.add_task("", total=total)

    def __call__(self, count: int) -> None:
        self.bar.advance(self.task, count)

    def describe(self, text: str) -> None:
        text = safe(text)
        if len(text) > self.room:  # the end of a name tells more
            text = f"...{text[len(text) - self.room + 3 :]}" if self.room > MIN_TEXT else ""
        self.bar.update(self.task, description=text)


@contextmanager
def progress(
    command: str, about: str, hidden: bool, *, as_json: bool = False, asked: bool = False
) -> Iterator[Callable[[int], Callable[[int], None]] | None]:
    """How far a command is, on stderr: a bar on a terminal, else a line a minute.

    If it is `asked` for, lines it is everywhere, the first one at once. With --json they are
    documents, and there are none if nobody asks. `about` says to what the `command` does it.
    """
    if hidden or sys.stderr is None or (as_json and not asked):
        yield None
        return
    if asked or not sys.stderr.isatty():

        def say(line: Line) -> None:
            text = json.dumps(head | to_builtins(line)) if as_json else f"zckpt: {safe(line)}"
            with suppress(OSError, ValueError):  # a full disk behind stderr, or it is closed
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
