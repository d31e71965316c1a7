"""Where does a command print? Standard output and errors that may be closed, full or unread."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import Any, TextIO

UNPRINTABLE = "backslashreplace"
"""What happens to characters that the terminal's encoding lacks: a path may have them."""


def set_up() -> None:
    """Opens what is closed, and gives every command the same standard output."""
    open_standard_files()
    pipe = Pipe(sys.stdout.fileno(), "w", closefd=False)
    encoding = getattr(sys.stdout, "encoding", None)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(pipe), encoding, UNPRINTABLE, line_buffering=pipe.isatty()
    )


def open_standard_files() -> None:
    """Opens /dev/null for standard files that are closed.

    A target's file would get their numbers else, and libraries print errors to number 2. A file
    that a library opened before may have such a number (libffi 3.5 opens itself): it stays open,
    and nothing is printed to it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    sys.stdout = sys.stdout or nowhere()
    sys.stderr = sys.stderr or nowhere()


def nowhere() -> TextIO:
    """A file that takes all that is printed."""
    return os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", closefd=False)


class Pipe(io.FileIO):
    """Standard output; when nobody reads it any more (`| head`), what follows goes nowhere.

    A command's exit code says what it did, not whether its report was read.
    """

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            discard()
            return len(data)


def discard() -> None:
    """Lets all output go nowhere, also what is printed already and could not be written.

    Python writes that again at its end.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def flush() -> None:
    """Ends the process with code 1 if the report cannot be written: a full disk behind stdout."""
    try:
        sys.stdout.flush()
    except OSError as error:
        discard()
        with suppress(OSError):
            say(f"Error: the report could not be printed: {error.strerror}")
        sys.exit(1)


def say(line: str) -> None:
    """Prints a line on stderr."""
    print(line, file=sys.stderr, flush=True)
