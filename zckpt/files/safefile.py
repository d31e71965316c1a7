"""Reads and writes the header of a safetensors file, which says where the tensors are.

    8 bytes     length of the header, little-endian
    header      {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
    data        without holes

The safetensors package returns tensors, but zckpt needs byte offsets, without numpy or torch. So
this module reads and writes headers itself, by the package's rules: see `read_with_metadata`.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct, convert

from ..core.checkpoint.dtypes import SIZES, Dtype
from ..core.checkpoint.manifest import Sizes
from ..core.grouping import portions
from ..core.passes.layout import Shell
from ..core.storage import sources
from ..core.storage.fileio import align
from ..core.storage.fragments import Extent
from ..errors import MALFORMED, CorruptCheckpoint, UnsupportedCheckpoint, brief

T = TypeVar("T")

FORMAT = {"format": "pt"}
Offset = Annotated[int, Meta(ge=0)]
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors package


class SavedTensor(Struct, frozen=True):
    """One tensor of a safetensors file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    extent: Extent


class _Stated(Struct):
    """The JSON form of a tensor in the header; its offsets count bytes after the header's end."""

    dtype: Dtype
    shape: Sizes
    data_offsets: tuple[Offset, Offset]

    def at(self, name: str, path: str, first: int) -> SavedTensor:
        """Converts this to a SavedTensor; `first` is the file's first byte after the header."""
        start, stop = self.data_offsets
        return SavedTensor(name, self.dtype, self.shape, Extent(path, first + start, stop - start))


def read(path: str) -> list[SavedTensor]:
    """Reads the header: the tensors in the order of their bytes. Raises as `read_with_metadata`."""
    return read_with_metadata(path)[0]


def read_with_metadata(path: str, begin: int = 0) -> tuple[list[SavedTensor], dict[str, str]]:
    """Reads the header: the tensors in the order of their bytes, and the metadata's texts.

    `begin` is the byte at which the safetensors content begins, with the header's length. Raises
    CorruptCheckpoint for a header that is malformed, too long or names a tensor twice, and for
    tensors that overlap, leave gaps, or do not end at the file's end.
    """
    with sources.opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(begin)
        length = int.from_bytes(file.read(8), "little")
        first = begin + 8 + length
        if size < begin + 8 or first > size:
            raise CorruptCheckpoint(
                "file-cut-short", f"{path} ends early, or is not a safetensors file", file=path
            )
        if length > MAX_HEADER:
            raise CorruptCheckpoint(
                "file-damaged",
                f"{path} has a header of {length} bytes; safetensors allows {MAX_HEADER}",
                file=path,
            )
        try:
            header = json.loads(file.read(length).decode(), object_pairs_hook=_unique)
            metadata = header.pop("__metadata__", None) or {}
            texts = {key: text for key, text in metadata.items() if isinstance(text, str)}
            tensors = [
                item.at(name, path, first)
                for name, item in convert(header, dict[str, _Stated]).items()
            ]
            tensors.sort(key=lambda stored: (stored.extent.offset, stored.extent.length))
        except MALFORMED as error:
            raise CorruptCheckpoint(
                "file-damaged", f"{path}: the safetensors header is malformed", file=path
            ) from error
    end = first
    for stored in tensors:
        extent = stored.extent
        if extent.offset != end or extent.length != prod(stored.shape) * SIZES[stored.dtype]:
            raise CorruptCheckpoint(
                "file-damaged",
                f"{path}: the header states wrong offsets for {brief(stored.name)}",
                file=path,
            )
        end += extent.length
    if end != size:
        raise CorruptCheckpoint(
            "file-cut-short",
            f"{path} has {size} bytes, but its header says {end}",
            file=path,
        )
    return tensors, texts


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    by_name = dict(pairs)
    if len(by_name) != len(pairs):
        raise ValueError("a name occurs twice")
    return by_name


def split(
    stem: str, tensors: Iterable[T], length: Callable[[T], int], most: int
) -> list[tuple[str, list[T]]]:
    """Distributes tensors over files of at most `most` bytes; returns each file's name and tensors.

    The `stem` "model" gives `model.safetensors`, or `model-00001-of-00002.safetensors` and so on if
    there are several files. `length` returns the bytes of a tensor. A tensor larger than `most`
    gets a separate file.
    """
    parts = [*portions(tensors, length, most)] or [[]]
    if len(parts) == 1:
        return [(f"{stem}.safetensors", parts[0])]
    names = (f"{stem}-{n:05d}-of-{len(parts):05d}.safetensors" for n in range(1, 1 + len(parts)))
    return list(zip(names, parts, strict=True))


def shell(name: str, tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> Shell:
    """Lays out the safetensors file `name`, in which the copy later fills in the tensors' bytes.

    `tensors` has (name, dtype, shape) of each tensor, in the order of their bytes.
    """
    head, size = header(tensors)
    return Shell(name, size, ((0, head),))


def header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] = FORMAT
) -> tuple[bytes, int]:
    """The header of a file with consecutive tensors `(name, dtype, shape)`, and the file's size.

    The data begin at a multiple of 4096 bytes, so direct reads need no copy.
    """
    start, items = 0, {"__metadata__": dict[str, Any](metadata)}
    for name, dtype, shape in tensors:
        if name in items:
            raise UnsupportedCheckpoint(
                "name-unsupported", f"a safetensors file cannot have two tensors named {name}"
            )
        stop = start + prod(shape) * SIZES[dtype]
        items[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, stop)}
        start = stop
    text = json.dumps(items, ensure_ascii=False, separators=(",", ":")).encode()
    length = align(8 + len(text)) - 8
    return length.to_bytes(8, "little") + text.ljust(length), 8 + length + start
