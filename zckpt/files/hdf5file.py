"""Reads HDF5 files: where the bytes of each tensor lie, and the values of small datasets.

h5py only tells where a dataset's bytes are; zckpt then reads them from the file itself. A dataset
must be one contiguous range of bytes in this file.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

from msgspec import Struct

from ..core.checkpoint.dtypes import FROM_TORCH, NUMBERS
from ..core.storage import byte_sources, sources
from ..core.storage.fileio import align
from ..core.storage.fragments import Extent
from ..errors import MALFORMED, OF_SYSTEM, CorruptCheckpoint, MissingExtra, UnsupportedCheckpoint
from .hdf5blocks import Blocks

MAGIC = b"\x89HDF\r\n\x1a\n"
MAX_ELEMENTS = 1 << 16  # the most elements of a dataset that is read as a value
MAX_DEPTH = 64
MAX_STEPS = 500_000  # steps from text to text in heaps; a heap of 4096 bytes has at most 256 texts
REFERENCE = struct.Struct("<IQI")  # to a string: its length, a heap's address, a number in it
DTYPES = {name: dtype for name, dtype in FROM_TORCH.items() if dtype in NUMBERS - {"BF16"}}
"""Maps numpy's names of dtypes, such as `float32`, to zckpt's; torch uses numpy's names too."""


class Dataset(Struct, frozen=True):
    """A tensor of an HDF5 file, stored in one byte range."""

    dtype: str
    shape: tuple[int, ...]
    extent: Extent


class HDF5Contents(Struct, frozen=True):
    """A file's tensors, and its values (numbers, lists of numbers, texts), by paths inside it.

    `orphans` are byte ranges beside datasets that belong to no object, though they are not zero.
    """

    tensors: Mapping[str, Dataset]
    values: Mapping[str, Any]
    orphans: Sequence[Extent]


def import_h5py() -> Any:
    """Imports h5py; raises MissingExtra if it is not installed."""
    try:
        import h5py
    except ImportError as error:
        raise MissingExtra(
            "extra-missing",
            "HDF5 files need the package h5py, which is not installed",
            hint="pip install h5py",
        ) from error
    return h5py


def is_hdf5(path: str) -> bool:
    """Whether a file begins like an HDF5 file."""
    with sources.opened(path) as file:
        return file.read(8) == MAGIC


def root_names(path: str) -> set[bytes]:
    """The names in the root group; empty if the file is damaged, or is not HDF5.

    Raises MissingExtra if the file is HDF5 and h5py is not installed.
    """
    if not is_hdf5(path):
        return set()
    h5py = import_h5py()
    try:
        with _opened(h5py, path) as (_, opened):
            return set(opened.id)
    except (OSError, RuntimeError, *MALFORMED) as error:
        _raise_if_system(path, error)
        return set()


@contextmanager
def _opened(h5py: Any, path: str) -> Iterator[tuple[int, Any]]:
    """Opens a file; yields its descriptor and h5py's object for it."""
    with sources.opened(path) as file:
        # h5py is faster if it opens a path itself, but that file may have no bytes of its own
        given = file if byte_sources.of(file.fileno()) else path
        with h5py.File(given, "r", locking=False) as opened:
            yield file.fileno(), opened


def _raise_if_system(path: str, error: Exception) -> None:
    """Raises OSError if h5py failed because of the operating system, not because of the bytes.

    h5py (3.16) puts the number into `errno`, or only into the text: "... errno = 5, error ...".
    """
    if isinstance(error, OSError):
        match = re.search(r"errno = (\d+)", str(error))
        number = error.errno or (int(match[1]) if match else 0)
        if number in OF_SYSTEM:
            raise OSError(number, os.strerror(number), path) from error


def read(path: str, is_tensor: Callable[[str], bool]) -> HDF5Contents:
    """Reads the contents of a file; tensors are only located.

    `is_tensor` is called with the path of each dataset, and returns whether the dataset is a
    tensor; if not, its value is read. Raises CorruptCheckpoint, UnsupportedCheckpoint (chunks,
    compression, links, user blocks), MissingExtra.
    """
    h5py = import_h5py()
    try:
        with _opened(h5py, path) as (file, opened):
            return _contents(h5py, path, file, opened, is_tensor)
    except (OSError, RuntimeError, *MALFORMED) as error:
        _raise_if_system(path, error)
        raise CorruptCheckpoint(
            "file-damaged", f"{path} is a damaged HDF5 file: {error}", file=path
        ) from error


def _contents(
    h5py: Any, path: str, file: int, opened: Any, is_tensor: Callable[[str], bool]
) -> HDF5Contents:
    if opened.userblock_size:
        raise UnsupportedCheckpoint(
            "storage-unsupported",
            f"{path} begins with a user block, which zckpt does not read",
            hint="remove it: `h5unjam -i FILE -o NEW_FILE --delete`",
            file=path,
        )
    file_size = sources.size(path)
    tensors: dict[str, Dataset] = {}
    values: dict[str, Any] = {}
    bounds = _Bounds(path, file_size)
    blocks = Blocks(path, file, file_size)
    for name, dataset in _datasets(h5py, path, blocks, opened.id):
        if is_tensor(name):
            tensors[name] = _tensor(h5py, path, bounds, name, dataset)
            extent = tensors[name].extent
        else:
            values[name], extent = _value(h5py, path, bounds, name, dataset, blocks)
        blocks.add_dataset(name, h5py.h5o.get_info(dataset).addr, extent)
    blocks.require_apart()
    return HDF5Contents(tensors, values, blocks.orphans())


class _Bounds:
    """Limits how much is read from a hostile file.

    All datasets and texts together have at most the file's size in bytes (see `take`). The search
    for texts examines at most MAX_STEPS objects in heaps (see `step`).
    """

    def __init__(self, path: str, file_size: int) -> None:
        self.path = path
        self.file_size = file_size
        self.bytes = file_size  # datasets that share bytes could have any total size
        self.steps = MAX_STEPS  # the search for a text passes over all texts before it

    def take(self, name: str, length: int) -> None:
        """Counts a dataset's bytes; raises CorruptCheckpoint if all exceed the file's size."""
        self.bytes -= length
        if self.bytes < 0:
            raise CorruptCheckpoint(
                "file-damaged",
                f"{self.path}: {name} shares its bytes with other datasets",
                file=self.path,
            )

    def step(self) -> None:
        """Counts an object that `_text` examines; raises CorruptCheckpoint after MAX_STEPS."""
        self.steps -= 1
        if self.steps < 0:
            raise CorruptCheckpoint(
                "file-damaged", f"{self.path}: its heaps have too many texts", file=self.path
            )


def _datasets(h5py: Any, path: str, blocks: Blocks, root: Any) -> Iterator[tuple[str, Any]]:
    """Yields every dataset by its path; refuses soft and external links, and circles of groups.

    This function uses h5py's low-level objects: a file has tens of thousands of datasets, and the
    high-level objects take 4 times as long.
    """
    addresses: set[int] = set()
    waiting: list[tuple[str, Any, int]] = [("", h5py.h5g.open(root, b"/"), 0)]
    while waiting:
        prefix, group, depth = waiting.pop()
        names = list(group)
        for name in names:
            full_name = prefix + name.decode("utf-8", "surrogateescape")
            if group.links.get_info(name).type != h5py.h5l.TYPE_HARD:
                raise UnsupportedCheckpoint(
                    "storage-unsupported",
                    f"{path}: {full_name} is a soft or external link",
                    file=path,
                )
            item = h5py.h5o.open(group, name)
            address = h5py.h5o.get_info(item).addr
            if address in addresses or depth > MAX_DEPTH:
                raise CorruptCheckpoint(
                    "file-damaged", f"{path}: {full_name} has two paths or is too deep", file=path
                )
            addresses.add(address)
            if isinstance(item, h5py.h5d.DatasetID):
                yield full_name, item
            elif isinstance(item, h5py.h5g.GroupID):
                waiting.append((f"{full_name}/", item, depth + 1))
            else:
                raise UnsupportedCheckpoint(
                    "storage-unsupported",
                    f"{path}: {full_name} is neither group nor dataset",
                    file=path,
                )
        blocks.add_group(prefix.rstrip("/"), h5py.h5o.get_info(group).addr, set(names))


def _tensor(h5py: Any, path: str, bounds: _Bounds, name: str, dataset: Any) -> Dataset:
    numpy_dtype = dataset.dtype
    dtype = DTYPES.get(numpy_dtype.name)
    if dtype is None or numpy_dtype.byteorder == ">":
        raise UnsupportedCheckpoint(
            "type-unsupported",
            f"{path}: {name} has elements of type {numpy_dtype}, which zckpt does not read",
            file=path,
        )
    shape, extent = _location(h5py, path, bounds, name, dataset, numpy_dtype.itemsize)
    return Dataset(dtype, shape, extent)


def _location(
    h5py: Any, path: str, bounds: _Bounds, name: str, dataset: Any, size: int
) -> tuple[tuple[int, ...], Extent]:
    """The shape and the byte range of a dataset whose elements have `size` bytes each."""
    shape = tuple(map(int, dataset.shape or ()))
    properties = dataset.get_create_plist()
    plain = properties.get_layout() == h5py.h5d.CONTIGUOUS and not properties.get_external_count()
    if not plain or dataset.shape is None:
        raise UnsupportedCheckpoint(
            "storage-unsupported",
            f"{path}: {name} is not stored as one run of bytes (it is chunked, compressed, compact "
            "or in another file)",
            hint="rewrite the file with `h5repack -l CONTI -f NONE`",
            file=path,
        )
    length = prod(shape) * size
    if not length:
        return shape, Extent(path, 0, 0)
    offset = dataset.get_offset()
    if offset is None or offset + length > bounds.file_size:
        raise CorruptCheckpoint(
            "file-cut-short",
            f"{path} ends before the end of {name}",
            file=path,
        )
    if dataset.get_storage_size() != length:
        raise CorruptCheckpoint(
            "file-damaged",
            f"{path}: {name} needs {length:,} bytes by its shape, but stores another number",
            file=path,
        )
    bounds.take(name, length)
    return shape, Extent(path, int(offset), length)


def _value(
    h5py: Any, path: str, bounds: _Bounds, name: str, dataset: Any, blocks: Blocks
) -> tuple[Any, Extent]:
    """Reads a number, a list of numbers, or a text; also returns its byte range.

    The bytes are read here, not by h5py: in a damaged file, h5py's library trusts the sizes that it
    reads, and crashes.
    """
    numpy_dtype = dataset.dtype
    is_text = numpy_dtype.kind == "O" and h5py.check_string_dtype(numpy_dtype) is not None
    if not is_text and numpy_dtype.kind not in "iufb":
        raise UnsupportedCheckpoint(
            "type-unsupported",
            f"{path}: {name} is neither number nor text ({numpy_dtype})",
            file=path,
        )
    size = REFERENCE.size if is_text else numpy_dtype.itemsize
    shape, extent = _location(h5py, path, bounds, name, dataset, size)
    if prod(shape) > MAX_ELEMENTS or (is_text and shape):
        raise UnsupportedCheckpoint(
            "type-unsupported",
            f"{path}: {name} has shape {shape}; zckpt reads single texts and short lists of "
            "numbers",
            file=path,
        )
    with sources.opened(path) as file:
        data = sources.pread(file.fileno(), extent.length, extent.offset)
        if is_text:
            return _text(file.fileno(), path, bounds, name, data, blocks), extent
    import numpy as np  # h5py has imported it

    return np.frombuffer(data, numpy_dtype).reshape(shape).tolist(), extent


def _text(
    file: int, path: str, bounds: _Bounds, name: str, reference: bytes, blocks: Blocks
) -> str:
    """Reads a string: the object that `reference` identifies by its number in a global heap.

    HDF5 2.0 would loop for ever here if a bit of an object's size is flipped.
    """
    file_size = bounds.file_size
    length, address, number = REFERENCE.unpack(reference)
    head = sources.pread(file, 16, address) if address < file_size else b""
    end = address + int.from_bytes(head[8:16], "little")
    offset = address + 16
    while head[:4] == b"GCOL" and offset + 16 <= min(end, file_size):
        bounds.step()
        candidate, size = struct.unpack("<H6xQ", sources.pread(file, 16, offset))
        if candidate == number and length <= size and offset + 16 + size <= file_size:
            bounds.take(name, length)
            blocks.add_texts(address, end)
            return sources.pread(file, length, offset + 16).decode("utf-8", "surrogateescape")
        if not candidate:  # the heap's free space
            break
        offset += 16 + align(size, 8)
    raise CorruptCheckpoint("file-damaged", f"{path}: the text of {name} is missing", file=path)
