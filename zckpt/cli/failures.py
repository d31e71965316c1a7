"""Turns an exception into a `Failure`: the class for reports, the message, and the exit code."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from typing import Any

from msgspec import Struct, to_builtins

from ..core.passes.description import VERSION
from ..display.terminal import RED, painted, shown
from ..errors import (
    CorruptCheckpoint,
    Notice,
    WrongOption,
    ZckptError,
    notice_of,
    safe,
)
from ..errors import cause as why_of
from . import output


class Failure(Struct, frozen=True):
    """Why a command failed: `kind` is the exception's class, `code` the exit code."""

    kind: str
    notice: Notice
    code: int

    def document(self, command: str | None) -> dict[str, Any]:
        """The failure as the JSON that `--json` prints; `command` is the name of the command."""
        return {
            "zckpt": VERSION,
            "command": command,
            "error": self.kind,
            **to_builtins(self.notice),
        }

    def tell(self) -> None:
        """Prints the failure to stderr: its message as one sentence, and its hint."""
        with suppress(OSError):  # stderr on a full disk: the exit code still tells of the failure
            notice = self.notice
            word = painted("Error:", RED, sys.stderr)
            output.say(f"{word} {safe(notice.message)}{shown(notice.code, sys.stderr)}")
            for place, line in enumerate(notice.hint.splitlines()):
                output.say(f"{'' if place else 'Hint: '}{safe(line)}")


def failure_of(error: Exception) -> Failure:
    """Turns an exception into a `Failure`, with the exit code of the command."""
    if isinstance(error, ZckptError):
        code = 2 if isinstance(error, WrongOption) else 1
        return Failure(type(error).__name__, error.notice, code)
    if isinstance(error, OSError):
        return Failure("OSError", notice_of(error), 1)
    if isinstance(error, MemoryError):
        hint = "use a lower -j or --memory, or a machine with more memory"
        return Failure("MemoryError", ended("out-of-memory", "too little memory is free", hint), 1)
    if isinstance(error, RecursionError):  # rare: most readers raise an error with the file's name
        what = f"the checkpoint cannot be read: {why_of(error)}"
        hint = CorruptCheckpoint.usual_hint
        return Failure("CorruptCheckpoint", ended("file-damaged", what, hint), 1)
    what = f"{type(error).__name__}: {error}"
    hint = "a bug in zckpt: please report it, with the traceback that ZCKPT_TRACEBACK=1 prints"
    return Failure("InternalError", ended("internal-error", what, hint), 1)


UNREADABLE = ("file-damaged", "file-cut-short", "file-not-understood", "record-damaged")
"""The codes of files that cannot be opened, perhaps because of one flipped bit."""


def with_mend(error: Exception) -> Exception:
    """Adds a hint to an error about a file that cannot be opened: what `zckpt mend` would restore.

    Any other error is returned unchanged.
    """
    if not isinstance(error, CorruptCheckpoint) or error.code not in UNREADABLE:
        return error
    from .. import api

    with suppress(ZckptError, OSError):
        if error.file is not None and (what := api.restorable(error.file)):
            return error.with_way(f"to {what}: zckpt mend SRC DST")
    return error


def ended(code: str, message: str, hint: str) -> Notice:
    """Makes the error notice for an exception that is not a ZckptError, such as OSError.

    `code` is one of the codes in docs/codes.md, not the exit code.
    """
    return Notice(code=code, severity="error", message=message, hint=hint)


def trace() -> None:
    """Prints the traceback of the current exception, if ZCKPT_TRACEBACK is set."""
    if os.environ.get("ZCKPT_TRACEBACK") and sys.exc_info()[0]:
        traceback.print_exc()
