"""The exceptions of zckpt. Each has one sentence about what is wrong, and a hint what to do."""

from __future__ import annotations

import errno
import json
import os
import shlex
import struct
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from logging import INFO, WARNING, Logger
from reprlib import Repr
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from msgspec import Struct
from msgspec.structs import replace

MALFORMED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)
"""The exceptions that Python raises for files whose values have unexpected types or sizes."""
MAX_MESSAGE = 2000  # characters
RESTORABLE = "use another copy of this file, or see what can be restored: zckpt mend SRC --dry-run"
"""The hint for damaged bytes that have a checksum in the file."""
_REPR = Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother, _REPR.maxlong = 2, 100, 100, 100


def removal(path: str) -> str:
    """The shell command that removes a directory, for a hint."""
    return f"rm -r {shlex.quote(path)}"


def listed(items: Sequence[object], most: int = 8) -> str:
    """Lists names or numbers for a sentence, such as `a, b and 3 more`.

    At most `most` are listed. Line breaks in names are escaped.
    """
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(str(item).replace("\n", "\\n") for item in items[:most]) + more


def joined(names: Sequence[str]) -> str:
    """Joins names for a sentence: `a, b and c`."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """A number and its noun: 1 tensor, 2,400 tensors."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def sized(size: int) -> str:
    """A number of bytes for a sentence: 1.49 GB."""
    if size < 1000:
        return f"{size} B"
    number = float(size)
    for unit in ("kB", "MB", "GB", "TB"):
        number /= 1000
        if number < 999.5 or unit == "TB":
            break
    return f"{number:.3g} {unit}" if number < 999.5 else f"{number:,.0f} {unit}"


def literal(text: str) -> str:
    """`text` as a Python string literal in quotes, for code that the user copies from a hint."""
    return json.dumps(text, ensure_ascii=False)


def meant(word: str, names: Iterable[str]) -> str:
    """A hint for a misspelled word, such as "Did you mean --dp?"; "" if no name is similar.

    If a name differs from `word` only by swapped letters, it is preferred.
    """
    names = [*names]
    swapped = [name for name in names if name != word and sorted(name) == sorted(word)]
    like = dict.fromkeys([*swapped[:1], *([] if swapped else get_close_matches(word, names))])
    return f"Did you mean {' or '.join(like)}?" if like else ""


def short(value: object, digits: int = 6) -> str:
    """A value as text for a message; a float is rounded to `digits` significant digits."""
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def safe(text: object) -> str:
    """A text on one line, without control characters; names in files are not to be trusted."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def brief(value: object) -> str:
    """A value from a file as short text for a message. The value may be very large or nested."""
    return _REPR.repr(value)


def cause(error: BaseException) -> str:
    """A short text that says why a file could not be read.

    It is shortened, because some exceptions contain the text of the file.
    """
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, MemoryError):
        return "it needs more memory than is available"
    texts = [brief(item) for item in error.args if isinstance(item, (str, int))]
    return f"{type(error).__name__}({', '.join(texts)})"


if TYPE_CHECKING:
    from typing_extensions import Self

Severity = Literal["error", "warning", "note"]
Kind = TypeVar("Kind", bound="ZckptError")


class Notice(Struct, frozen=True, kw_only=True):
    """An error, a warning or a note of zckpt.

    code     a stable name for programs; it tells what to do next. notices.py lists all
    message  what zckpt has found, only for people
    subject  the parameter, state or rank in question
    file     the path in question
    hint     what to do, only for people
    """

    code: str
    severity: Severity
    subject: str | None = None
    file: str | None = None
    message: str
    hint: str = ""


def warning(
    code: str,
    message: str,
    *,
    subject: str | None = None,
    file: str | None = None,
    hint: str = "",
) -> Notice:
    """Returns a `Notice` of a fact that the user must know, although the command goes on."""
    return Notice(
        code=code, severity="warning", subject=subject, file=file, message=message, hint=hint
    )


def problem(
    code: str,
    message: str,
    *,
    subject: str | None = None,
    file: str | None = None,
    hint: str = "",
) -> Notice:
    """Returns a `Notice` of a fault in a checkpoint that a command reports before it goes on."""
    return Notice(
        code=code, severity="error", subject=subject, file=file, message=message, hint=hint
    )


def note(code: str, message: str, *, subject: str | None = None, file: str | None = None) -> Notice:
    """Returns a `Notice` of a harmless fact, or a natural result of what the user asked for."""
    return Notice(code=code, severity="note", subject=subject, file=file, message=message)


class ZckptError(Exception):
    """The base class of zckpt's errors.

    `code`, `message`, `hint`, `subject` and `file` are those of `Notice`.
    """

    usual_hint = ""

    def __init__(
        self,
        code: str,
        message: str,
        hint: str = "",
        *,
        subject: str | None = None,
        file: str | None = None,
    ) -> None:
        if len(message) > MAX_MESSAGE:  # a name in a hostile file may have any length
            message = f"{message[: MAX_MESSAGE // 2]} ... {message[-MAX_MESSAGE // 2 :]}"
        super().__init__(message)
        self.code, self.message, self.hint = code, message, hint or self.usual_hint
        self.subject, self.file = subject, file

    def __reduce__(self) -> tuple[Any, ...]:
        return again, (type(self), self.__dict__)

    def again(self, **fields: Any) -> Self:
        """A copy of the error with some fields replaced, such as the message."""
        return again(type(self), self.__dict__ | fields)

    def with_way(self, way: str) -> Self:
        """A copy of the error whose hint ends with `way`, one more thing that the user can do."""
        return self.again(hint=f"{self.hint}; {way}")

    def as_lost(self, what: str, *, hint: str, subject: str | None, file: str) -> Notice:
        """Turns the error into a notice that the optimizer is left out because of it.

        Its message is the error's message, a colon, and `what`.
        """
        message = f"{self.message}: {what}"
        return problem("optimizer-missing", message, subject=subject, file=file, hint=hint)

    @property
    def notice(self) -> Notice:
        """The error as a `Notice`."""
        return Notice(
            code=self.code,
            severity="error",
            subject=self.subject,
            file=self.file,
            message=self.message,
            hint=self.hint,
        )

    @property
    def notices(self) -> tuple[Notice, ...]:
        """The error as notices: one for each fault."""
        return (self.notice,)


def log(logger: Logger, notices: Iterable[Notice]) -> None:
    """Logs warnings as WARNING and notes as INFO."""
    for notice in notices:
        logger.log(INFO if notice.severity == "note" else WARNING, "%s", safe(notice.message))


def again(kind: type[Kind], fields: Mapping[str, Any]) -> Kind:
    """Creates an exception of the class `kind` without calling it, as pickle does.

    `fields` are its attributes.
    """
    error = kind.__new__(kind, fields["message"])
    error.__dict__.update(fields)
    return error


class NotACheckpoint(ZckptError):
    """No format recognizes the path."""

    usual_hint = "`zckpt formats` lists what is read"


class AmbiguousCheckpoint(ZckptError):
    """The path holds several checkpoints, and no option chooses one."""


class IncompleteCheckpoint(ZckptError):
    """A rank, a file or a part of a file is missing; `paths` are the missing files, if known."""

    usual_hint = "copy all files of the checkpoint again, or use an earlier one"

    def __init__(
        self,
        code: str,
        message: str,
        hint: str = "",
        paths: Sequence[str] = (),
        *,
        subject: str | None = None,
        file: str | None = None,
    ) -> None:
        super().__init__(code, message, hint, subject=subject, file=file)
        self.paths = tuple(paths)

    @property
    def notices(self) -> tuple[Notice, ...]:
        """A notice for each missing file, if the files are known."""
        return tuple(replace(self.notice, file=path) for path in self.paths) or (self.notice,)


class CorruptCheckpoint(ZckptError):
    """Bytes of a file contradict what the file states about them."""

    usual_hint = "use another copy of this file, or an earlier checkpoint"


def not_understood(path: str, error: Exception) -> CorruptCheckpoint:
    """Makes the error for a file that is damaged, or intact but of an unknown layout."""
    return CorruptCheckpoint(
        "file-not-understood",
        f"{path} is damaged, or has a layout that zckpt does not know: {cause(error)}",
        hint="try another copy; if it fails too, `zckpt formats` says which versions are read",
        file=path,
    )


class SourceChanged(ZckptError):
    """A file of the source has changed since it was first read: another program writes there."""

    usual_hint = "stop the program that writes there, or copy the checkpoint; then start again"


class InconsistentCheckpoint(ZckptError):
    """Files of one checkpoint contradict each other: tags, steps, world sizes, shapes.

    If steps differ, `steps` lists the places with their steps.
    """

    usual_hint = "files of different saves seem to be mixed; use the files of one save"

    def __init__(
        self,
        code: str,
        message: str,
        hint: str = "",
        steps: Sequence[tuple[str, float | int]] = (),
        *,
        subject: str | None = None,
        file: str | None = None,
    ) -> None:
        super().__init__(code, message, hint, subject=subject, file=file)
        self.steps = tuple(steps)


class UnsupportedCheckpoint(ZckptError):
    """zckpt recognizes this kind of checkpoint, but cannot read or write it."""

    usual_hint = "`zckpt formats` lists what is read and written"


class FlatParameters(UnsupportedCheckpoint):
    """The tensors are FSDP1's flat parameters, and no file states which weights they contain."""


class StoreError(ZckptError):
    """An object store refused a request, or did not answer."""


class MissingExtra(ZckptError):
    """A package that only some commands or formats need is not installed."""


class MissingData(ZckptError):
    """The target needs data that the source does not hold."""

    usual_hint = "`zckpt inspect` shows what the source has"


class UnsupportedState(ZckptError):
    """The target's format cannot store a state of the source's optimizer."""


class TargetExists(ZckptError):
    """The target exists already, or an interrupted run left an unfinished target."""


class Interrupted(KeyboardInterrupt):
    """The run was interrupted. What it wrote is kept, so that --resume can continue."""


class NotEnoughSpace(ZckptError):
    """The target's filesystem has too little space."""


class ProcessFailed(ZckptError):
    """Another process that shares this command has failed.

    If `exit_code` is set, the failed process prints the error, and this process only exits with the
    code.
    """

    usual_hint = "see the message of that process"
    exit_code: int | None = None


class ProcessLost(ProcessFailed):
    """Another process of this launch, or torch's rendezvous store, has disappeared.

    What was written is kept.
    """

    usual_hint = (
        "see the messages of the other processes, and end all; then repeat the command, with "
        "--resume if it writes"
    )


class WrongOption(ZckptError):
    """Options contradict each other or this checkpoint (exit code 2)."""

    usual_hint = "see --help for the options"


def sentence(error: BaseException) -> str:
    """The message of an error on one line. An error of the filesystem names the file."""
    if isinstance(error, ZckptError):
        return error.message
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return brief(error)


OF_SYSTEM = {
    errno.EIO: (
        "disk-failed",
        "the disk or the network storage failed: see `dmesg`, and take another copy",
    ),
    errno.EBADMSG: (
        "disk-failed",
        "the filesystem found damage: see `dmesg`, and take another copy",
    ),
    errno.ESTALE: (
        "disk-failed",
        "the network filesystem no longer has this file: mount it again",
    ),
    errno.ETIMEDOUT: (
        "disk-failed",
        "the network storage does not answer: try again when it does",
    ),
    errno.ENOTCONN: ("disk-failed", "the network storage is not connected: mount it again"),
    errno.EACCES: (
        "permission-denied",
        "check the permissions of the path: `namei -l PATH` lists them",
    ),
    errno.EPERM: (
        "permission-denied",
        "check the permissions of the path: `namei -l PATH` lists them",
    ),
    errno.EROFS: (
        "permission-denied",
        "the filesystem is mounted read-only: choose another one",
    ),
    errno.ENOENT: ("no-such-path", "check the path"),
    errno.ENOTDIR: ("no-such-path", "check the path: a part of it is a file"),
    errno.EISDIR: ("no-such-path", "check the path: it is a directory"),
    errno.ELOOP: ("no-such-path", "check the path: its links lead in a circle"),
    errno.ENAMETOOLONG: ("no-such-path", "choose a shorter path"),
    errno.ENOMEM: ("out-of-memory", "too little memory is free: use a lower -j or --memory"),
    errno.EMFILE: (
        "too-many-open-files",
        "too many files are open: raise the limit (`ulimit -n`), or use a lower -j",
    ),
    errno.ENFILE: (
        "too-many-open-files",
        "the machine has too many open files: end other programs, or use a lower -j",
    ),
    errno.ENOSPC: (
        "not-enough-space",
        "free some space, or choose a target on another filesystem",
    ),
    errno.EDQUOT: (
        "not-enough-space",
        "free some of your quota, or choose a target on another filesystem",
    ),
    errno.EFBIG: (
        "not-enough-space",
        "the filesystem (or `ulimit -f`) limits the size of files: use --max-file-size",
    ),
}
"""For each error number of the filesystem: the code of the notice, and the hint."""


def notice_of(error: ZckptError | OSError) -> Notice:
    """An error as a `Notice`. For an error of the filesystem, `file` is its path."""
    if isinstance(error, ZckptError):
        return error.notice
    usual = ("system-error", "check the path, and whether you may read or write it")
    code, hint = OF_SYSTEM.get(error.errno or 0, usual)
    file = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else None
    return Notice(code=code, severity="error", file=file, message=sentence(error), hint=hint)
