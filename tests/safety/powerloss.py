"""What may a disk hold after a power loss, given the calls of a run and when it synced?

The model is POSIX's: fsync of a file keeps its bytes and its size, fsync of a folder keeps its
names. Everything else may be there, or not, or in part, in any order. A rename is one change of one
folder.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .runner import Call

Change = tuple[tuple[str, "Folder | File | None"], ...]
"""Names of a folder that change together, and what they stand for afterwards."""
Keeps = Callable[[int, int], bool]
"""Whether the change number i of n that were not synced is on the disk."""


@dataclass
class File:
    """Bytes that were synced, and what was written since: (offset, bytes), or (size, None)."""

    synced: bytearray = field(default_factory=bytearray)
    since: list[tuple[int, bytes | None]] = field(default_factory=list)

    def bytes_with(self, keeps: Keeps, are_zeros: bool) -> bytes:
        data = bytearray(self.synced)
        for number, (offset, written) in enumerate(self.since):
            if keeps(number, len(self.since)):
                _write(data, offset, written)
            elif are_zeros:  # the size is known, the bytes are not there yet
                end = offset if written is None else offset + len(written)
                data.extend(bytes(max(0, end - len(data))))
        return bytes(data)

    def sync(self) -> None:
        for offset, written in self.since:
            _write(self.synced, offset, written)
        self.since.clear()


def _write(data: bytearray, offset: int, written: bytes | None) -> None:
    end = offset if written is None else offset + len(written)
    data.extend(bytes(max(0, end - len(data))))
    if written is None:
        del data[end:]
    else:
        data[offset:end] = written


@dataclass
class Folder:
    """Names that were synced, those that are there now, and the changes between."""

    synced: dict[str, Folder | File] = field(default_factory=dict)
    now: dict[str, Folder | File] = field(default_factory=dict)
    since: list[Change] = field(default_factory=list)

    def change(self, *names: tuple[str, Folder | File | None]) -> None:
        self.since.append(names)
        _apply(self.now, names)

    def names_with(self, keeps: Keeps) -> dict[str, Folder | File]:
        names = dict(self.synced)
        for number, change in enumerate(self.since):
            if keeps(number, len(self.since)):
                _apply(names, change)
        return names

    def sync(self) -> None:
        self.synced = dict(self.now)
        self.since.clear()


def _apply(names: dict[str, Folder | File], change: Change) -> None:
    for name, item in change:
        if item is None:
            names.pop(name, None)
        else:
            names[name] = item


class Disk:
    """The folder `root`, which is empty and synced, while a run goes on."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.top = Folder()

    def apply(self, call: Call) -> bool:
        """Whether a call changed something, or synced it."""
        if call.result < 0 or not call.path.startswith(self.root + os.sep):
            if call.path == self.root and call.function == "fsync" and not call.result:
                self.top.sync()
                return True
            return False
        function = call.function
        if function == "open":
            return self._open(call)
        if function in ("mkdir", "mkdirat"):
            folder, name = self._place(call.path)
            folder.change((name, Folder()))
        elif function in ("rename", "renameat", "renameat2"):
            folder, name = self._place(call.path)
            other, new = self._place(call.other)
            item = folder.now[name]
            if folder is other:
                folder.change((name, None), (new, item))
            else:  # each folder is synced for itself
                other.change((new, item))
                folder.change((name, None))
        elif function in ("link", "linkat"):
            other, new = self._place(call.other)
            other.change((new, self._at(call.path)))
        elif function in ("unlink", "unlinkat", "rmdir"):
            folder, name = self._place(call.path)
            folder.change((name, None))
        elif function in ("fsync", "fdatasync"):
            self._at(call.path).sync()
        elif function in ("write", "pwrite", "pwritev"):
            assert len(call.data) == call.result, f"{call} was recorded without its data"
            self._file(call.path).since.append((call.offset, call.data))
        elif function in ("ftruncate", "ftruncate64", "truncate64"):
            self._file(call.path).since.append((call.length, None))
        elif function in ("fallocate", "fallocate64"):
            file = self._file(call.path)
            size = len(file.bytes_with(lambda _i, _n: True, False))
            file.since.append((max(size, call.offset + call.length), None))
        else:
            assert function != "sendfile", "sendfile is not modelled"
            return False
        return True

    def _open(self, call: Call) -> bool:
        if not call.flags & (os.O_CREAT | os.O_TRUNC):
            return False
        folder, name = self._place(call.path)
        if name not in folder.now:
            folder.change((name, File()))
        elif call.flags & os.O_TRUNC:
            self._file(call.path).since.append((0, None))
        return True

    def _at(self, path: str) -> Folder | File:
        item: Folder | File = self.top
        for name in Path(path).relative_to(self.root).parts:
            assert isinstance(item, Folder)
            item = item.now[name]
        return item

    def _file(self, path: str) -> File:
        file = self._at(path)
        assert isinstance(file, File)
        return file

    def _place(self, path: str) -> tuple[Folder, str]:
        folder = self._at(os.path.dirname(path))
        assert isinstance(folder, Folder)
        return folder, os.path.basename(path)

    def after(self, names: Keeps, data: Keeps, are_zeros: bool) -> dict[str, bytes]:
        """Names and bytes below `root` after a power loss; folders end in a slash."""
        return dict(_walk(self.top, "", names, data, are_zeros))

    def states(self, seeds: Iterable[int]) -> Iterator[dict[str, bytes]]:
        """What a power loss may leave now."""

        def everything(_i: int, _n: int) -> bool:
            return True

        def nothing(_i: int, _n: int) -> bool:
            return False

        def last(i: int, n: int) -> bool:
            return i == n - 1

        for names, data, are_zeros in (
            (everything, everything, False),
            (nothing, nothing, False),
            (everything, nothing, False),
            (everything, nothing, True),
            (everything, last, True),
            (last, everything, False),
            (last, nothing, False),
        ):
            yield self.after(names, data, are_zeros)
        for seed in seeds:
            chance = random.Random(seed)
            some = _some(chance)
            yield self.after(some, some, bool(seed % 2))


def _some(chance: random.Random) -> Keeps:
    return lambda _i, _n: chance.random() < 0.5


def _walk(
    folder: Folder, at: str, names: Keeps, data: Keeps, are_zeros: bool
) -> Iterator[tuple[str, bytes]]:
    for name, item in folder.names_with(names).items():
        if isinstance(item, Folder):
            yield f"{at}{name}/", b""
            yield from _walk(item, f"{at}{name}/", names, data, are_zeros)
        else:
            yield at + name, item.bytes_with(data, are_zeros)


def below(state: dict[str, bytes], folder: str) -> dict[str, bytes] | None:
    """The part of a state below a folder; None if the folder is not there."""
    if f"{folder}/" not in state:
        return None
    start = len(folder) + 1
    return {name[start:]: data for name, data in state.items() if name.startswith(f"{folder}/")} | {
        "": b""
    }


def write(state: dict[str, bytes], root: Path) -> None:
    """Makes a state real."""
    for name, data in sorted(state.items()):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir(exist_ok=True)
        else:
            path.write_bytes(data)


def losses(calls: Sequence[Call], root: Path) -> Iterator[tuple[int, Call, Disk]]:
    """The disk after every call that changed it."""
    disk = Disk(root)
    for number, call in enumerate(calls):
        if disk.apply(call):
            yield number, call, disk
