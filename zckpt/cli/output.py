"""Prints to standard output and standard error, which may be closed, full or unread."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import Any, TextIO

UNPRINTABLE = "backslashreplace"
"""How Python prints characters that the terminal's encoding lacks, such as in paths."""


def set_up() -> None:
    """Prepares stdin, stdout and stderr: opens closed ones, and replaces sys.stdout by a `Pipe`.

    A `Pipe` discards output that no process reads any more.
    """
    open_standard_files()
    pipe = Pipe(sys.stdout.fileno(), "w", closefd=False)
    encoding = getattr(sys.stdout, "encoding", None)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(pipe), encoding, UNPRINTABLE, line_buffering=pipe.isatty()
    )


def open_standard_files() -> None:
    """Opens /dev/null for each of stdin, stdout and stderr that is closed.

    Otherwise another file, such as the target, could get descriptor 2, to which libraries print
    errors.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    # a library (libffi 3.5) may have opened a file with number 1 or 2 before: print nothing to it
    sys.stdout = sys.stdout or nowhere()
    sys.stderr = sys.stderr or nowhere()


def nowhere() -> TextIO:
    """Opens /dev/null as a text file: it discards everything that is written to it."""
    return os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", closefd=False)


class Pipe(io.FileIO):
    """Standard output that discards further output when its reader has exited (`| head`).

    The exit code tells what the command did, not whether its report was read.
    """

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            discard()
            return len(data)


def discard() -> None:
    """Discards the text that standard output still buffers, and all later text.

    The text cannot be written, and Python would try it again when it exits.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def flush() -> None:
    """Flushes stdout. Exits with code 1 if that fails, such as on a full disk."""
    try:
        sys.stdout.flush()
    except OSError as error:
        discard()
        with suppress(OSError):
            say(f"Error: the report could not be printed: {error.strerror}")
        sys.exit(1)


def say(line: str) -> None:
    """Prints a line to stderr."""
    print(line, file=sys.stderr, flush=True)
