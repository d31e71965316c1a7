"""Where the tensors of a safetensors file are: reads and writes its header.

    8 bytes     length of the header, little-endian
    header      {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
    data        without holes

The safetensors package returns tensors, but zckpt needs byte offsets, without numpy or torch. So
this module reads and writes headers itself, by the package's rules: see `read_with_metadata`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from json.encoder import encode_basestring
from math import prod
from typing import Any, TypeVar

from msgspec import Struct

from ..core import sources
from ..core.dtypes import SIZES
from ..core.fileio import align
from ..core.fragments import Extent
from ..core.inert import types_in
from ..core.layout import Shell
from ..errors import MALFORMED, CorruptCheckpoint, brief

T = TypeVar("T")

FORMAT = {"format": "pt"}
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors package


class SavedTensor(Struct, frozen=True):
    """One tensor of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    extent: Extent


def read(path: str) -> list[SavedTensor]:
    """The tensors of a file in the order of their bytes; raises as `read_with_metadata`."""
    return read_with_metadata(path)[0]


def read_with_metadata(path: str, begin: int = 0) -> tuple[list[SavedTensor], dict[str, str]]:
    """The tensors in the order of their bytes, and the texts of the header's metadata.

    `begin` is the first byte of the safetensors data in the file. Raises CorruptCheckpoint if the
    header is too long, is malformed or names a tensor twice, and if its offsets leave holes,
    overlap or pass the end of the file.
    """
    with sources.opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(begin)
        length = int.from_bytes(file.read(8), "little")
        first = begin + 8 + length
        if size < begin + 8 or first > size:
            raise CorruptCheckpoint(f"{path} ends early, or is not a safetensors file")
        if length > MAX_HEADER:
            raise CorruptCheckpoint(
                f"{path} has a header of {length} bytes; safetensors allows {MAX_HEADER}"
            )
        try:
            header = _parsed(file.read(length).decode())
            metadata = _texts(header.pop("__metadata__", None) or {})
            tensors = _tensors(path, first, header)
        except MALFORMED as error:
            raise CorruptCheckpoint(f"{path}: the safetensors header is malformed") from error
    end = first
    for stored in tensors:
        extent = stored.extent
        if extent.offset != end or extent.length != prod(stored.shape) * SIZES[stored.dtype]:
            raise CorruptCheckpoint(
                f"{path}: the header contradicts itself at {brief(stored.name)}"
            )
        end += extent.length
    if end != size:
        raise CorruptCheckpoint(
            f"{path} has {size} bytes, but its header says {end}",
            hint="use another copy: the file was cut short or changed",
        )
    return tensors, metadata


def _parsed(text: str) -> Any:
    """The header; raises ValueError if a name occurs twice.

    Of two values of one name the first is lost, but not its colon. Only if there are more colons
    than values, which may be in names too, every dictionary is looked at: that takes twice as long.
    """
    header = json.loads(text)
    if text.count(":") == len(header) + sum(map(len, header.values())):
        return header
    return json.loads(text, object_pairs_hook=_unique)


def _texts(metadata: Any) -> dict[str, str]:
    """The texts of the metadata: safetensors itself has no other values there."""
    return {key: text for key, text in metadata.items() if isinstance(text, str)}


def _tensors(path: str, begin: int, header: dict[str, Any]) -> list[SavedTensor]:
    """What a header lists, in the order of the bytes; these begin at byte `begin` of the file.

    Types are looked at for all tensors at once, in a third of the time. Raises ValueError.
    """
    items = header.values()
    dtypes = [item["dtype"] for item in items]
    shapes = [item["shape"] for item in items]
    ranges = [item["data_offsets"] for item in items]
    if not types_in(dtypes) <= {str} or not {*dtypes} <= SIZES.keys():
        raise ValueError("unknown dtype")
    numbers = [*chain.from_iterable(shapes), *chain.from_iterable(ranges)]
    are_lists = types_in(shapes) | types_in(ranges) <= {list}
    if not are_lists or not types_in(numbers) <= {int} or min(numbers, default=0) < 0:
        raise ValueError("no sizes")
    tensors = [
        SavedTensor(name, dtype, tuple(shape), Extent(path, begin + start, stop - start))
        for name, dtype, shape, (start, stop) in zip(header, dtypes, shapes, ranges, strict=True)
    ]
    tensors.sort(key=lambda stored: (stored.extent.offset, stored.extent.length))
    return tensors


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    by_name = dict(pairs)
    if len(by_name) != len(pairs):
        raise ValueError("a name occurs twice")
    return by_name


def split(
    stem: str, tensors: Iterable[T], length: Callable[[T], int], most: int
) -> list[tuple[str, list[T]]]:
    """Files of at most `most` bytes each, by their names; a larger tensor has one of its own."""
    parts: list[list[T]] = [[]]
    size = 0
    for tensor in tensors:
        if parts[-1] and size + length(tensor) > most:
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += length(tensor)
    if len(parts) == 1:
        return [(f"{stem}.safetensors", parts[0])]
    names = (f"{stem}-{n:05d}-of-{len(parts):05d}.safetensors" for n in range(1, 1 + len(parts)))
    return list(zip(names, parts, strict=True))


def shell(name: str, tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> Shell:
    """A file with consecutive tensors `(name, dtype, shape)`."""
    head, size = header(tensors)
    return Shell(name, size, ((0, head),))


def header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] = FORMAT
) -> tuple[bytes, int]:
    """The header of a file with consecutive tensors `(name, dtype, shape)`, and the file's size.

    The data begin at a multiple of 4096 bytes, so that direct reads need no copy.
    """
    items = [f'"__metadata__":{json.dumps(metadata, separators=(",", ":"))}']
    start = 0
    for name, dtype, shape in tensors:
        stop = start + prod(shape) * SIZES[dtype]
        sizes = ",".join(map(str, shape))
        items.append(
            f'{encode_basestring(name)}:{{"dtype":"{dtype}","shape":[{sizes}],'
            f'"data_offsets":[{start},{stop}]}}'
        )
        start = stop
    text = f"{{{','.join(items)}}}".encode()
    length = align(8 + len(text)) - 8
    return length.to_bytes(8, "little") + text.ljust(length), 8 + length + start
