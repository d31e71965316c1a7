"""Which leaves do the files of a checkpoint have, and how is one of them changed?

A leaf is a number, a flag, a text or a None in a pickle or in JSON, the line of a file of one line,
or one bit of a tensor. No reader of zckpt takes part: pickles are read by Python's own unpickler,
which notes at which byte each value lies, and the value is changed in place. Checksums become those
of the changed bytes, as if a program had saved the other value.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any, ClassVar

from zckpt.core.storage.fragments import Extent
from zckpt.files.zipdirectory import read_directory
from zckpt.formats.universal.agreement import checksum

MANIFEST = "manifest.json"
TENSORS = ("_rebuild_tensor_v2", "_rebuild_tensor_v3")
Way = tuple[Any, ...]
Items = Mapping[str, list[tuple[str, int, int]]]


@dataclass(frozen=True)
class Leaf:
    """What lies at `way` in a file: `old` bytes at `place` become `new`.

    In a JSON document `new` is the value at `way`.
    """

    file: str
    way: Way
    place: int
    old: bytes
    new: Any

    def __str__(self) -> str:
        return f"{self.file}: {'.'.join(map(str, self.way))}"


def leaves(root: Path) -> Iterator[Leaf]:
    """Every leaf of every file below `root` that is not a program."""
    items = _items(root)
    for path in sorted(root.rglob("*")):
        if not path.is_file() or path.suffix == ".py":
            continue
        name, data = str(path.relative_to(root)), path.read_bytes()
        if path.suffix == ".json":
            for way, value in _flattened(json.loads(data)):
                yield Leaf(name, way, 0, b"", other(value))
        elif path.suffix == ".safetensors":
            yield from _of_safetensors(name, data)
        elif path.name == ".metadata":
            yield from _of_pickle(name, data, 0, len(data), {})
        elif path.suffix == ".distcp":
            for key, offset, length in items[name]:
                yield from _of_zip(name, data, Extent(str(path), offset, length), (key,))
        elif data[:2] == b"PK":
            yield from _of_zip(name, data, Extent(str(path), 0, len(data)))
        else:
            assert len(data) < 200, f"{path}: of which kind is it?"
            yield Leaf(name, (), 0, data[:1], _letter(data[:1]))


def plant(leaf: Leaf, sound: Path, target: Path) -> Path:
    """A copy of `sound` with another value at one leaf; all other files become hard links."""
    shutil.copytree(sound, target, copy_function=os.link)
    path = target / leaf.file
    data = bytearray(path.read_bytes())
    path.unlink()
    if path.suffix == ".json":
        document = json.loads(data)
        _put(document, leaf.way, leaf.new)
        data = bytearray(json.dumps(document).encode())
    else:
        assert data[leaf.place : leaf.place + len(leaf.old)] == leaf.old
        data[leaf.place : leaf.place + len(leaf.old)] = leaf.new
    path.write_bytes(data)
    if leaf.way != ("crc32",):  # else the manifest's own checksum is wrong
        _mend(target, path, _items(sound))
    return target


def other(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return False if value is None else _letter(value.encode()).decode()


def _letter(text: bytes) -> bytes:
    """The same text with another first letter."""
    return (b"y" if text[:1] == b"x" else b"x") + text[1:]


# -- JSON and safetensors


def _flattened(document: Any, way: Way = ()) -> Iterator[tuple[Way, Any]]:
    if isinstance(document, (dict, list)):
        pairs = document.items() if isinstance(document, dict) else enumerate(document)
        for key, value in pairs:
            yield from _flattened(value, (*way, key))
    else:
        yield way, document


def _put(document: Any, way: Way, value: Any) -> None:
    for key in way[:-1]:
        document = document[key]
    document[way[-1]] = value


def _of_safetensors(name: str, data: bytes) -> Iterator[Leaf]:
    length = struct.unpack("<Q", data[:8])[0]
    for key, item in json.loads(data[8 : 8 + length]).items():
        if key != "__metadata__" and item["data_offsets"][0] < item["data_offsets"][1]:
            yield _bit(name, data, 8 + length + item["data_offsets"][0], (key,))


def _bit(name: str, data: bytes, place: int, way: Way) -> Leaf:
    byte = data[place : place + 1]
    return Leaf(name, way, place, byte, bytes([byte[0] ^ 1]))


# -- pickles


@dataclass
class Value:
    """A leaf of a pickle: `old` bytes at `place`, which another value of its kind would change."""

    value: Any
    place: int
    old: bytes
    new: bytes

    def __hash__(self) -> int:
        return hash(self.value)

    def __eq__(self, other: object) -> bool:
        return bool(self.value == (other.value if isinstance(other, Value) else other))


class Stub:
    """An object of a class, which is not imported: what it was called with, and its state."""

    parts: list[Any]

    def __new__(cls, *arguments: Any) -> Stub:
        self = super().__new__(cls)
        self.parts = list(arguments)
        return self

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.parts.append(state)

    def append(self, item: Any) -> None:
        self.parts.append(item)

    def __setitem__(self, key: Any, item: Any) -> None:
        self.parts.append((key, item))


class Dictionary(OrderedDict[Any, Any]):
    """An OrderedDict that keeps what a pickle sets as its attributes."""

    def __setstate__(self, state: Mapping[Any, Any]) -> None:
        vars(self).update({_plain(key): value for key, value in state.items()})


KINDS = {"OrderedDict": Dictionary, "set": set, "frozenset": frozenset}


class Unpickler(pickle._Unpickler):  # type: ignore[name-defined, misc]
    """Python's unpickler, which gives a Value for each leaf, and a Stub for each object."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)  # type: ignore[attr-defined]

    def __init__(self, data: bytes) -> None:
        self.data, self.source = data, BytesIO(data)
        super().__init__(self.source)

    def find_class(self, module: Any, name: Any) -> Any:
        return KINDS.get(_plain(name)) or type(_plain(name), (Stub,), {})

    def persistent_load(self, pid: Any) -> Any:
        return pid

    def load_frame(self) -> None:
        self.read(8)  # without frames, the place in the file is that of the next opcode

    def load_stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(self.find_class(module, name))

    dispatch[pickle.FRAME[0]] = load_frame
    dispatch[pickle.STACK_GLOBAL[0]] = load_stack_global


def _noting(load: Callable[[Any], None], shift: int) -> Callable[[Any], None]:
    """The unpickler's own function for an opcode whose value begins `shift` bytes after it."""

    def noted(self: Unpickler) -> None:
        place = self.source.tell() - 1 + shift
        load(self)
        value, old = self.stack[-1], self.data[place : self.source.tell()]
        self.stack[-1] = Value(value, place, old, _changed(value, old))

    return noted


def _changed(value: Any, old: bytes) -> bytes:
    """Bytes of the same number that stand for another value."""
    if value is None or isinstance(value, bool):
        return pickle.NEWFALSE if value else pickle.NEWTRUE
    if isinstance(value, float):
        return struct.pack(">d", value + 1.0 if abs(value) < 1e15 else 1.0)
    if isinstance(value, int):
        return bytes([(old[0] + 1) % 256]) + old[1:]
    return _letter(old) if old else old


SHIFTS = {
    0: (pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
    1: (pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.BINFLOAT),
    2: (pickle.LONG1, pickle.SHORT_BINUNICODE, pickle.SHORT_BINBYTES),
    5: (pickle.BINUNICODE, pickle.BINBYTES),
}
for _shift, _codes in SHIFTS.items():
    for _code in _codes:
        Unpickler.dispatch[_code[0]] = _noting(Unpickler.dispatch[_code[0]], _shift)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Value) else value


def _of_pickle(
    name: str, data: bytes, start: int, stop: int, storages: Mapping[str, int], way: Way = ()
) -> Iterator[Leaf]:
    """Leaves of a pickle; a tensor has one, in the storage whose place `storages` has."""
    seen: set[int] = set()
    for inner, value in _walked(Unpickler(data[start:stop]).load(), way):
        if isinstance(value, Value):
            if value.old and value.place not in seen:
                seen.add(value.place)
                yield Leaf(name, inner, start + value.place, value.old, value.new)
        else:
            (_, kind, key, *_), offset, sizes = value.parts[:3]
            size = 2 if kind.__name__ in ("HalfStorage", "BFloat16Storage") else 4
            numel = prod(map(_plain, sizes))
            if numel:
                place = storages[_plain(key)] + _plain(offset) * size
                yield _bit(name, data, place, (*inner, f"tensor of {numel}"))


def _walked(value: Any, way: Way) -> Iterator[tuple[Way, Any]]:
    if isinstance(value, Value) or type(value).__name__ in TENSORS:
        yield way, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _walked(item, (*way, _plain(key)))
        if isinstance(value, Dictionary):
            yield from _walked(dict(vars(value)), way)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for place, item in enumerate(value):
            yield from _walked(item, (*way, place))
    elif isinstance(value, Stub):
        for place, item in enumerate(value.parts):
            # the state of an object is a dictionary: its keys are enough
            yield from _walked(item, way if isinstance(item, dict) else (*way, place))


def _of_zip(name: str, data: bytes, extent: Extent, way: Way = ()) -> Iterator[Leaf]:
    with open(extent.file, "rb") as file:
        members = {
            member.partition("/")[2]: place
            for member, place in read_directory(file.fileno(), extent).items()
        }
    storages = {
        member.removeprefix("data/"): place.offset
        for member, place in members.items()
        if member.startswith("data/")
    }
    text = members["data.pkl"]
    yield from _of_pickle(name, data, text.offset, text.offset + text.length, storages, way)


def _items(root: Path) -> Items:
    """By .distcp file: the key, the offset and the length of each item, as .metadata has them."""
    result: dict[str, list[tuple[str, int, int]]] = {}
    for path in root.rglob(".metadata"):
        folder = path.parent.relative_to(root)
        for index, place in pickle.loads(path.read_bytes()).storage_data.items():
            file = str(folder / place.relative_path)
            result.setdefault(file, []).append((index.fqn, place.offset, place.length))
    return result


# -- checksums


def _mend(root: Path, path: Path, items: Items) -> None:
    """States the checksums of the bytes that a file has now."""
    data = path.read_bytes()
    if path.suffix == ".distcp":
        for _, offset, length in items[str(path.relative_to(root))]:
            _mend_zip(path, offset, length)
    elif data[:2] == b"PK":
        _mend_zip(path, 0, len(data))
    if (root / MANIFEST).is_file():
        _mend_manifest(root, path)


def _mend_zip(path: Path, offset: int, length: int) -> None:
    with open(path, "r+b") as file:
        for member in read_directory(file.fileno(), Extent(str(path), offset, length)).values():
            file.seek(member.offset)
            crc = zlib.crc32(file.read(member.length))
            file.seek(member.entry + 16)
            file.write(struct.pack("<I", crc))


def _mend_manifest(root: Path, path: Path) -> None:
    document = json.loads((root / MANIFEST).read_text())
    if path.suffix == ".safetensors":
        data = path.read_bytes()
        document["files"][path.name]["crc32"] = f"{zlib.crc32(data):08x}"
        length = struct.unpack("<Q", data[:8])[0]
        slot = "param" if path.stem == "model" else path.stem
        for name, item in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                start, stop = (8 + length + place for place in item["data_offsets"])
                crc = f"{zlib.crc32(data[start:stop]):08x}"
                document["entries"][f"{name}/{slot}"]["crc32"] = crc
    document["crc32"] = checksum(document)
    (root / MANIFEST).unlink()
    (root / MANIFEST).write_text(json.dumps(document))
