"""How does a target directory appear whole or not at all?

Everything is written into `<target>.partial` and synced to the disk. One rename makes it the
target. A run that fails removes what it wrote. A run that is killed leaves `.partial` behind.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

from ..errors import NotEnoughSpace, TargetExists, WrongOption
from . import sources
from .checksum import crc32
from .expected import path_inside
from .manifest import Sibling


@dataclass(frozen=True, slots=True)
class Shell:
    """A file of `size` bytes without its tensors; `parts` are what it holds: (offset, bytes)."""

    name: str
    size: int
    parts: tuple[tuple[int, bytes], ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """What a format is going to write; each call of `shells()` gives all files again.

    `siblings` pairs names in the target with files that are copied unchanged. `left_out` and
    `warnings` are the whole report, with the source's part. `from_masters` is True if weights are
    cast from the masters even where the source holds weights. `about` describes the target in one
    line.
    """

    shells: Callable[[], Iterator[Shell]]
    siblings: Sequence[tuple[str, Sibling]]
    left_out: Sequence[str]
    warnings: Sequence[str]
    from_masters: bool = False
    about: str = ""


REMEMBERED = 64 << 20  # bytes of shells that are kept from the first pass for the second


def remembered(
    shells: Callable[[], Iterator[Shell]], limit: int = REMEMBERED
) -> Callable[[], Iterator[Shell]]:
    """`shells`, made once if all of their bytes together fit into `limit`, else at every call.

    Names and sizes are reported before there is a directory to write into. Shells of equal `parts`
    count once.
    """
    kept: list[Shell] = []
    is_complete = False

    def passing() -> Iterator[Shell]:
        nonlocal is_complete
        if is_complete:
            yield from kept
            return
        kept.clear()
        seen: set[int] = set()
        size = 0
        for shell in shells():
            if size <= limit:
                kept.append(shell)
                if id(shell.parts) not in seen:
                    seen.add(id(shell.parts))
                    size += sum(len(data) for _, data in shell.parts)
            yield shell
            if size > limit:
                kept.clear()
        is_complete = size <= limit

    return passing


class Staging:
    """`with Staging(target) as staging:` write below `staging.path`; the end of the block renames.

    Raises TargetExists if the target or `<target>.partial` exists already.
    """

    def __init__(self, target: str) -> None:
        self.target = os.path.abspath(target)
        self.path = f"{self.target}.partial"

    def __enter__(self) -> Staging:
        refuse_existing(self.target)
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        os.mkdir(self.path)
        return self

    def lay(self, shells: Iterable[Shell]) -> None:
        """Writes shells; their holes take no space yet."""
        for shell in shells:
            path = self._inside(shell.name)
            with open(path, "xb") as file:
                file.truncate(shell.size)
                for offset, data in shell.parts:
                    file.seek(offset)
                    file.write(data)

    def _inside(self, name: str) -> str:
        """The path of a new file, whose folder is created; raises if the name leads outside."""
        path = os.path.normpath(path_inside(self.path, name, "the source"))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return path

    def copy(self, source: str, name: str) -> tuple[int, int]:
        """Copies a whole file unchanged to `name`; gives its size and CRC-32."""
        path = self._inside(name)
        size = crc = 0
        with sources.opened(source) as read, open(path, "xb") as write:
            while data := read.read(1 << 20):
                write.write(data)
                crc = crc32(data, crc)
                size += len(data)
        return size, crc

    def __exit__(
        self, kind: type[BaseException] | None, _: object, _trace: TracebackType | None
    ) -> None:
        if kind is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            return
        try:
            for entry in sources.walk(self.path):
                _sync(entry.path)
            _sync(self.path)
            refuse_existing(self.target, partial=False)
            os.rename(self.path, self.target)
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        _sync(os.path.dirname(self.target))


def refuse_existing(target: str, partial: bool = True) -> None:
    """Raises TargetExists if the target, or with `partial` its `.partial`, exists already."""
    target = os.path.normpath(target)
    if os.path.lexists(target) and not _is_empty(target):
        raise TargetExists(f"{target} exists", hint="choose another name, or remove it first")
    if partial and os.path.lexists(f"{target}.partial"):
        raise TargetExists(
            f"{target}.partial exists: another run is writing there, or one was killed",
            hint=f"if none is running, remove it: rm -r {shlex.quote(target + '.partial')}",
        )


def _is_empty(target: str) -> bool:
    """Whether a target is an empty directory."""
    if os.path.islink(target) or not os.path.isdir(target):
        return False
    with os.scandir(target) as items:
        return next(items, None) is None


def refuse_inside(source: str, target: str) -> None:
    """Raises WrongOption if the target is inside the source, of which it would become a part."""
    outer, inner = os.path.realpath(source), os.path.realpath(target)
    if os.path.isdir(outer) and inner.startswith(outer + os.sep):
        raise WrongOption(
            f"{target} is inside of {source}", hint="choose a target beside the source"
        )


def free_space(target: str) -> int:
    """The free bytes of the filesystem that `target` would be on."""
    folder = os.path.dirname(os.path.abspath(target))
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def need_space(target: str, size: int) -> None:
    """Raises NotEnoughSpace if `size` bytes do not fit on the filesystem of `target`."""
    free = free_space(target)
    if size > free:
        raise NotEnoughSpace(
            f"{target} needs {size / 1e9:.3f} GB, {free / 1e9:.3f} GB are free",
            hint="choose a target on another filesystem, or free some space",
        )


def _sync(path: str) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
