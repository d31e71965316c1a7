"""`.metadata` of torch.distributed.checkpoint as no program writes it: wrong types, huge numbers.

`samples` are changes to the metadata of a small checkpoint: every field with every wrong value, and
files of a few megabytes that would keep a careless reader busy for ever.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from zckpt.core.checkpoint.inert import Foreign, Global, Size
from zckpt.files.dcpfile import most_metadata
from zckpt.files.pickling import dumps
from zckpt.files.unpickle import Unpickler

Sample = Callable[[Path], None]
"""Writes the `.metadata` of a copy of the small checkpoint anew."""

KEY = "optim.state.0.weight.exp_avg"

WRONG: dict[str, Any] = {
    "none": None,
    "true": True,
    "minus_one": -1,
    "two_63": 1 << 63,
    "two_1000": 1 << 1000,
    "nan": float("nan"),
    "infinity": float("inf"),
    "text": "x",
    "empty_text": "",
    "long_text": "x" * 100_000,
    "outside": "../__0_0.distcp",
    "absolute": "/etc/passwd",
    "this_folder": ".",
    "nul": "a\0b",
    "newline": "a\nb",
    "surrogate": "\ud800",
    "bytes": b"x",
    "list": [],
    "dictionary": {},
    "tuple": (),
    "set": {1},
    "nested": [[["x"]]],
    "numbers": (1,) * 5000,
    "negative": (-1, -1),
    "sizes": Size((1 << 59, 1 << 59)),
    "object": Foreign(Global("os.system"), ("true",)),
    "class": Global("torch.float32"),
    "dictionary_of_numbers": {1: 2},
    "list_of_none": [None],
}


def load(run: Path) -> Foreign:
    value = Unpickler((run / ".metadata").read_bytes()).load()
    assert isinstance(value, Foreign)
    return value


def _first(fields: dict[str, Any], kind: str) -> Foreign:
    """The index of one item, or where it lies."""
    for index, info in fields["storage_data"].items():
        if index.state["fqn"] == KEY:
            return index if kind == "index" else info
    raise AssertionError


FIELDS: dict[str, Callable[[dict[str, Any]], tuple[Any, Any]]] = {
    **{
        name: lambda fields, name=name: (fields, name)  # type: ignore[misc]
        for name in ("state_dict_metadata", "planner_data", "storage_data", "version")
    },
    "storage_meta": lambda fields: (fields, "storage_meta"),
    "zckpt": lambda fields: (fields, "zckpt"),
    "item": lambda fields: (fields["state_dict_metadata"], KEY),
    "properties": lambda fields: (fields["state_dict_metadata"][KEY].state, "properties"),
    "size": lambda fields: (fields["state_dict_metadata"][KEY].state, "size"),
    "chunks": lambda fields: (fields["state_dict_metadata"][KEY].state, "chunks"),
    "chunk": lambda fields: (fields["state_dict_metadata"][KEY].state["chunks"], 0),
    "offsets": lambda f: (f["state_dict_metadata"][KEY].state["chunks"][0].state, "offsets"),
    "sizes": lambda f: (f["state_dict_metadata"][KEY].state["chunks"][0].state, "sizes"),
    "path": lambda fields: (fields["planner_data"], KEY),
    "fqn": lambda fields: (_first(fields, "index").state, "fqn"),
    "offset": lambda fields: (_first(fields, "index").state, "offset"),
    "file": lambda fields: (_first(fields, "info").state, "relative_path"),
    "begin": lambda fields: (_first(fields, "info").state, "offset"),
    "length": lambda fields: (_first(fields, "info").state, "length"),
    "transform": lambda fields: (_first(fields, "info").state, "transform_descriptors"),
}


def with_value(field: str, value: Any) -> Sample:
    def write(run: Path) -> None:
        content = load(run)
        container, key = FIELDS[field](content.state)
        container[key] = value
        (run / ".metadata").write_bytes(dumps(content, lambda _: None))

    return write


def wrong_types() -> Iterator[tuple[str, Sample]]:
    for field in FIELDS:
        for name, value in WRONG.items():
            yield f"{field}-{name}", with_value(field, value)
    for name in ("aliases", "buffers", "frozen", "inferred", "names", "numbers"):
        for kind in ("none", "text", "two_63", "list_of_none", "dictionary_of_numbers", "object"):
            stated = {"aliases": {}, "buffers": [], "frozen": [], "names": {}, name: WRONG[kind]}
            yield f"zckpt_{name}-{kind}", with_value("zckpt", stated)


# -- much work in a small file


def described(chunks: Any, size: tuple[int, ...] = (4,)) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(), torch.Size(size), chunks)


def chunk(offset: int = 0, size: int = 4) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size((offset,)), torch.Size((size,)))


def stored(key: str, offset: int | None, begin: int = 0) -> tuple[MetadataIndex, _StorageInfo]:
    at = None if offset is None else (offset,)
    return MetadataIndex(key, at), _StorageInfo("__0_0.distcp", begin, 1577)


def content(items: Any = None, paths: Any = None, places: Any = None, **others: Any) -> bytes:
    """Metadata as torch pickles it: a value that occurs again is a reference."""
    metadata = Metadata(items or {}, paths, places or {})
    metadata.__dict__.update(others)
    return pickle.dumps(metadata, protocol=2)


def _bytes(make: Callable[[], bytes]) -> Sample:
    def write(run: Path) -> None:
        text = make()
        assert len(text) < 10_000_000, len(text)
        (run / ".metadata").write_bytes(text)

    return write


def shared_chunks(items: int, chunks: int) -> bytes:
    same = described([chunk()] * chunks)
    return content({f"a.{n}": same for n in range(items)}, None, dict([stored("a.0", 0)]))


def shared_path(keys: int, length: int) -> bytes:
    path = ["x"] * length
    names = {f"a.{n}": BytesStorageMetadata() for n in range(keys)}
    return content(names, dict.fromkeys(names, path), dict(stored(n, None) for n in names))


def many_places(count: int) -> bytes:
    return content({}, None, dict(stored(f"a.{n}", n) for n in range(count)))


def one_place(count: int) -> bytes:
    """Many tensors that begin at one byte, as in a safetensors file; it is none."""
    names = [f"a.{n}" for n in range(count)]
    return content(
        {n: described([chunk()]) for n in names},
        {n: tuple(n.split(".")) for n in names},
        dict(stored(n, 0) for n in names),
    )


def pieces(count: int) -> bytes:
    return content(
        {"a.w": described([chunk(n, 1) for n in range(count)], (count,))},
        {"a.w": ("a", "w")},
        dict(stored("a.w", n, n * 1577) for n in range(count)),
    )


def far_places(count: int) -> bytes:
    names = {f"a.{900_000 + n}": ("a", 900_000 + n) for n in range(count)}
    items = {n: BytesStorageMetadata() for n in names}
    return content(items, names, dict(stored(n, None, k * 1577) for k, n in enumerate(names)))


def references(count: int, where: str) -> bytes:
    """`count` references to one list: 2 bytes each."""
    same = list(range(1000))
    return content(**{where: [same] * count})


def doubled(levels: int) -> bytes:
    value: Any = ["x"]
    for _ in range(levels):
        value = [value, value]
    return content(storage_meta=value, version=value, zckpt=value)


def deep(levels: int) -> bytes:
    """Lists in lists: PROTO 2, EMPTY_LIST ..., APPEND ..., STOP."""
    return b"\x80\x02" + b"]" * levels + b"a" * (levels - 1) + b"."


def long_key(length: int) -> bytes:
    key = "k" * length
    return content({key: described([chunk()])}, {key: (key,)}, dict([stored(key, 0)]))


def sparse(run: Path) -> None:
    with open(run / ".metadata", "wb") as file:
        file.write(b"\x80\x04")
        os.truncate(file.fileno(), 2 * most_metadata())


def huge(size: tuple[int, ...]) -> bytes:
    zeros = (0,) * len(size)
    item = described([ChunkStorageMetadata(zeros, size)])  # type: ignore[arg-type]
    item.size = size  # type: ignore[assignment]  # torch.Size refuses 2 ** 63
    index, info = stored("a.w", None)
    object.__setattr__(index, "offset", zeros)
    return content({"a.w": item}, {"a.w": ("a", "w")}, {index: info})


def heavy(few: bool = True) -> dict[str, Sample]:
    """Samples that take time or memory if work is not bounded; fewer references if `few`."""
    scale = 1 if few else 8
    return {
        "shared_chunks": _bytes(lambda: shared_chunks(5_000 * scale, 50_000 * scale)),
        "shared_path": _bytes(lambda: shared_path(2_000 * scale, 100_000 * scale)),
        "many_places": _bytes(lambda: many_places(4_000 * scale)),
        "one_place": _bytes(lambda: one_place(2_000 * scale)),
        "pieces": _bytes(lambda: pieces(3_000 * scale)),
        "far_places": _bytes(lambda: far_places(2_000 * scale)),
        "references": _bytes(lambda: references(75_000 * scale, "storage_meta")),
        "references_in_version": _bytes(lambda: references(75_000 * scale, "version")),
        "doubled": _bytes(lambda: doubled(60)),
        "deep": _bytes(lambda: deep(100_000 * scale)),
        "long_key": _bytes(lambda: long_key(1_000_000 * scale)),
        "rows": _bytes(lambda: huge((10**9, 10**9))),
        "elements": _bytes(lambda: huge((1 << 63,))),
        "axes": _bytes(lambda: huge((1,) * 100_000)),
        "sparse": sparse,
    }


def truncated(run: Path, length: int) -> None:
    path = run / ".metadata"
    path.write_bytes(path.read_bytes()[:length])


def other_pickles() -> Iterator[tuple[str, Sample]]:
    """Pickles of something else, and none."""
    for name, value in WRONG.items():
        if not isinstance(value, (Foreign, Global, Size)):
            yield f"pickle-{name}", _bytes(lambda value=value: pickle.dumps(value))  # type: ignore[misc]
    yield "empty", _bytes(lambda: b"")
    yield "json", _bytes(lambda: b'{"state_dict_metadata": {}}')
    yield "zeros", _bytes(lambda: bytes(1000))
