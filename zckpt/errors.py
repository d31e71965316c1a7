"""What can go wrong, in the user's words: one sentence that names the thing, one hint."""

from __future__ import annotations

from collections.abc import Sequence


def listed(names: Sequence[str], most: int = 8) -> str:
    """Names in one sentence."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class ZckptError(Exception):
    """Every error that zckpt raises on purpose; `hint` says the next thing to do."""

    usual_hint = ""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint or self.usual_hint


class NotACheckpoint(ZckptError):
    """The path holds nothing that any format recognises."""

    usual_hint = "see `zckpt formats` for what is recognised"


class AmbiguousCheckpoint(ZckptError):
    """The path holds several checkpoints, and nothing says which one is meant."""


class IncompleteCheckpoint(ZckptError):
    """A rank, a file or a part of one is missing."""


class CorruptCheckpoint(ZckptError):
    """Bytes are not what the file itself says they are."""

    usual_hint = "take another copy of this file, or an earlier checkpoint"


def not_understood(path: str, error: Exception) -> CorruptCheckpoint:
    """What cannot be read, though nothing shows damage: a sound file may be of an unknown kind."""
    return CorruptCheckpoint(
        f"{path} is damaged, or laid out in a way that zckpt does not know: {error!r}",
        hint="if another copy is no better, its layout is not supported: see `zckpt formats`",
    )


class InconsistentCheckpoint(ZckptError):
    """Files of one checkpoint contradict each other: tags, steps, world sizes, shapes."""

    usual_hint = "files of different saves seem to be mixed; take those of one save"


class UnsupportedCheckpoint(ZckptError):
    """Recognised, but not read or written yet."""

    usual_hint = "see `zckpt formats` for what is read and written"


class MissingExtra(ZckptError):
    """A package that only some commands or formats need is not installed."""


class MissingData(ZckptError):
    """The target needs something that the source does not hold."""

    usual_hint = "see `zckpt inspect` for what the source holds"


class TargetExists(ZckptError):
    """The target, or what an interrupted run left of it, is already there."""


class NotEnoughSpace(ZckptError):
    """The target's filesystem cannot take the bytes."""


class ProcessFailed(ZckptError):
    """Another of the processes that gather together has failed."""

    usual_hint = "its own message says why"


class WrongOption(ZckptError):
    """Options that contradict each other or this checkpoint (exit code 2)."""

    usual_hint = "see --help for what is understood"
