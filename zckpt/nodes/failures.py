"""Why has a process failed, as it tells the others?"""

from __future__ import annotations

import signal

from msgspec import Struct

from ..errors import (
    MALFORMED,
    ProcessFailed,
    ProcessLost,
    WrongOption,
    ZckptError,
)
from .handover import parsed, unreadable


class Failure(Struct, frozen=True):
    """Why a process has failed, as it tells the others; `keeps` is true if `--resume` helps."""

    rank: int
    message: str
    hint: str
    code: int
    keeps: bool


def failure_of(rank: int, error: BaseException, again: str) -> Failure:
    """A failure as others see it, with the exit code of cli/run.py; `again` says how to go on."""
    if isinstance(error, KeyboardInterrupt):
        code = 128 + (error.args[0] if error.args else signal.SIGINT)
        return Failure(rank, "interrupted", again, code, keeps=True)
    if isinstance(error, ZckptError):
        code = 2 if isinstance(error, WrongOption) else 1
        keeps = isinstance(error, ProcessLost)
        return Failure(rank, error.message, error.hint, code, keeps)
    return Failure(rank, str(error), "see the message of that process", 1, keeps=False)


def failure_in(data: bytes) -> Failure:
    """The failure that a process has left; raises CorruptCheckpoint for anything else."""
    try:
        failure = Failure(**parsed(data))
        texts = failure.message, failure.hint
        if {type(text) for text in texts} != {str} or type(failure.rank) is not int:
            raise TypeError
        if not (type(failure.code) is int and 0 < failure.code < 256):
            raise ValueError
    except MALFORMED as error:
        raise unreadable("it is no failure") from error
    return failure


def error_of(failure: Failure) -> ProcessFailed:
    """The error of a process that ends because another one has failed."""
    kind = ProcessLost if failure.keeps else ProcessFailed
    error = kind(f"rank {failure.rank}: {failure.message}", failure.hint)
    error.code = failure.code
    return error
