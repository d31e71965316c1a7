"""Reads files of torch.save without their data and without importing their classes.

Since torch 1.6 a file is a zip of STORED members: `<folder>/data.pkl`, whose tensors name storages,
and one member `<folder>/data/<key>` per storage. Before 1.6 it is several pickles followed by the
storages. In both cases a `Tensor` has a dtype, a shape, strides and its storage, and a `TorchFile`
says which bytes of the file are that storage. torch is not imported.

Equal pickles are parsed once: the ranks of a ZeRO run often write the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from math import prod
from threading import Lock
from typing import Any

from msgspec import Struct

from ..core.checkpoint.dtypes import NUMBERS, SIZES, STORAGES, decode
from ..core.checkpoint.entries import Entry, Key
from ..core.checkpoint.inert import Global, Scalar, TensorName, inside, map_values, to_json
from ..core.storage import sources
from ..core.storage.checksum import crc32
from ..core.storage.fileio import crc_of
from ..core.storage.fragments import Extent, Fragments, Record, boxes, row_major, solid, strided
from ..errors import (
    RESTORABLE,
    CorruptCheckpoint,
    NotACheckpoint,
    UnsupportedCheckpoint,
    ZckptError,
)
from .torchtensors import CONTIGUOUS, TENSORS, runs_of, size_of
from .torchtensors import Storage as Storage
from .torchtensors import Tensor as Tensor
from .unpickle import BUILTINS, Unpickler
from .zipdirectory import Directories, ZipMember, read_directory

# The most bytes of a file's pickle, which is parsed in memory. A tensor takes 100 to 300, so the
# weights and states of a million parameters fit.
MAX_PICKLE = 1 << 30
FIRST_READ = 1 << 24  # bytes of a file of torch before 1.6, whose pickles are at the beginning
# As in unpickle.py. Long files of engines have at most one value for 10 bytes, and one container
# for 45 bytes.
MOST_VALUES, MOST_CONTAINERS = 1_200_000, 270_000
# Tensors of one file may share memory: tied weights, views of a flat buffer, and masks that were
# expanded to a batch (stride 0). These bounds leave room for all of them. Without bounds, a tensor
# with stride 0 could have any size, and reading it would never end.
# bytes of all tensors: a fixed number, and a multiple of the file's size
SPARE_BYTES, COPIES = 64 << 20, 8
SPARE_RUNS, BYTES_PER_RUN = 250_000, 8  # runs of elements that are not contiguous
ZIP, PROTOCOLS = b"PK\3\4", (b"\2", b"\3", b"\4", b"\5")  # the first bytes of files and pickles
SMALL = 1 << 20  # bytes; a record up to this size is checked when a tensor in it is read
FUNCTIONS = {**BUILTINS, **TENSORS}
_refused: dict[tuple[str, tuple[int, int, int]], ZckptError] = {}
"""The last pickle that could not be read: its error, by the file."""


class _Loaded(Struct, frozen=True, eq=False):
    """A parsed pickle: its value, and sums over its tensors.

    In the sums, tensors with the same storage, offset, shape and strides count once.

    bytes    total size of the tensors
    runs     number of separate byte ranges in tensors that are not contiguous
    names    the classes and functions that the pickle names
    """

    value: Any
    bytes: int
    runs: int
    names: tuple[str, ...]


class Parsed(dict[tuple[int, int, int], _Loaded]):
    """A cache for the files of all ranks, so that equal contents are parsed once.

    It maps a pickle (by its length, CRC-32 and hash) to its parsed contents. `files` has opened
    files by path, for readers that open a file twice. `directories` are parsed zip directories.
    """

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, TorchFile] = {}
        self.directories: Directories = {}
        self.lock = Lock()  # while one thread parses, the others wait


_peeked: dict[tuple[int, int, int], _Loaded] = {}
"""The last pickle that `peek` parsed, until a TorchFile takes it."""


Read = Callable[[str, int, int], bytes]
"""Reads a file, given its path, and the number and the offset of bytes."""


def _read(path: str, length: int, offset: int) -> bytes:
    with sources.opened(path) as file:
        return sources.pread(file.fileno(), length, offset)


class TorchFile:
    """One file of torch.save: `value` is the saved value; `extent` locates a tensor's bytes.

    `within` is its byte range if the file at `path` holds several, and `file` the descriptor if
    that file is open. Raises CorruptCheckpoint (truncated, damaged pickle, overlapping members),
    UnsupportedCheckpoint (big-endian, compressed, torch < 0.1.10) and NotACheckpoint (a pickle that
    torch.save did not write).
    """

    def __init__(
        self,
        path: str,
        parsed: Parsed | None = None,
        within: Extent | None = None,
        file: int | None = None,
    ) -> None:
        self.path = path
        self.pread: Read = _read
        # the folder in the zip, which torch.save names after the file
        self.saved_as: str | None = None
        self.records: dict[str, Record] = {}
        cache = Parsed() if parsed is None else parsed
        if file is None:
            with sources.opened(path) as opened:
                loaded = self._loaded(opened.fileno(), within, cache)
        else:
            loaded = self._loaded(file, within, cache)
        self.value = loaded.value
        if loaded.bytes > SPARE_BYTES + COPIES * self.size:
            raise CorruptCheckpoint(
                "file-damaged",
                f"{path} has {self.size} bytes, but its tensors would need {loaded.bytes}",
                hint="a tensor was expanded, or many tensors are views of the same elements: save "
                "copies, which tensor.clone() makes",
                file=path,
            )
        if loaded.runs > SPARE_RUNS + self.size // BYTES_PER_RUN:
            raise UnsupportedCheckpoint(
                "storage-unsupported",
                f"{path} has tensors that are not contiguous: their elements lie in {loaded.runs} "
                "separate places",
                hint="save what tensor.contiguous() returns",
                file=path,
            )

    @classmethod
    def of(
        cls, record: Record, dtype: str, shape: tuple[int, ...], pread: Read = _read
    ) -> TorchFile:
        """Makes a TorchFile for one row-major tensor in `record`, without opening the file.

        It is for lost files, and for items of torch.distributed.checkpoint whose byte range is
        computed from similar items. `pread` reads the tensor's bytes.
        """
        file, extent = cls.__new__(cls), record.extent
        file.pread = pread
        file.path, file.saved_as, file.size = extent.file, None, extent.length
        file.records = {"0": record}
        file.value = Tensor(Storage("0", dtype, extent.length), dtype, 0, shape, row_major(shape))
        return file

    def _loaded(self, file: int, within: Extent | None, parsed: Parsed) -> _Loaded:
        self.size = os.fstat(file).st_size
        if within is None:
            within = Extent(self.path, 0, self.size)
        head = sources.pread(file, 4, within.offset)
        if head == ZIP:
            return self._read_zip(file, within, parsed)
        if _is_legacy(head) and not within.offset:
            return self._read_legacy(file)
        if not self.size:
            raise CorruptCheckpoint(
                "unfinished-save",
                f"{self.path} is empty",
                hint="the save did not finish; use an earlier checkpoint",
                file=self.path,
            )
        if head == b"vers":  # "version https://git-lfs.github.com/..."
            raise CorruptCheckpoint(
                "lfs-pointer",
                f"{self.path} is a Git LFS pointer",
                hint="run `git lfs pull`",
                file=self.path,
            )
        raise CorruptCheckpoint(
            "file-damaged", f"{self.path} is not a file of torch.save", file=self.path
        )

    # -- the bytes of a tensor

    def extent(self, tensor: Tensor) -> Extent:
        """The byte range of a contiguous tensor."""
        size = SIZES[tensor.dtype]
        record = self._record(tensor)
        start = tensor.storage.start + tensor.offset * size
        return record.extent.part(start, start + tensor.numel * size)

    def reach(self, tensor: Tensor) -> tuple[Extent, tuple[int, ...] | None]:
        """The byte range from a tensor's first element to its last, and its strides.

        The strides are None if the tensor is contiguous.
        """
        if tensor.contiguous:
            return self.extent(tensor), None
        pairs = zip(tensor.shape, tensor.strides, strict=True)
        count = 1 + sum((size - 1) * stride for size, stride in pairs)
        return self.extent(tensor.part(0, count)), tensor.strides

    def fragments(self, tensor: Tensor) -> Fragments:
        """The fragments of a tensor with any strides: byte ranges of its row-major elements."""
        if tensor.contiguous:
            return solid(tensor.numel, self.extent(tensor))
        size, strides, extent = SIZES[tensor.dtype], tensor.strides, self.whole(tensor)
        box = strided(tensor.shape, strides=strides, first=tensor.offset, size=size, extent=extent)
        return boxes([box])

    def whole(self, tensor: Tensor) -> Extent:
        """The byte range of the tensor's complete storage."""
        record = self._record(tensor)
        return record.extent.part(tensor.storage.start, record.extent.length)

    def read(self, tensor: Tensor) -> bytes:
        """Reads the bytes of a small contiguous tensor; raises CorruptCheckpoint for a wrong CRC.

        It is used for tensors such as the step, which no conversion copies and checks like a
        weight. So the CRC-32 of the tensor's storage is checked here, if the storage is small.
        """
        extent, record = self.extent(tensor), self._record(tensor)
        crc, whole = record.crc, record.extent
        if crc is None or whole.length > SMALL:
            crc, whole = None, extent
        data = self.pread(self.path, whole.length, whole.offset)
        if len(data) != whole.length or (crc is not None and crc32(data) != crc):
            raise CorruptCheckpoint(
                "record-damaged",
                f"{self.path} is damaged: storage {tensor.storage.key!r} does not have the CRC-32 "
                "that the file states",
                hint=RESTORABLE,
                file=self.path,
            )
        start = extent.offset - whole.offset
        return data[start : start + extent.length]

    def scalar(self, tensor: Tensor) -> Scalar:
        """The value of a 0-d or one-element tensor."""
        try:
            return Scalar(decode(tensor.dtype, self.read(tensor)), tensor.dtype, tensor.shape)
        except KeyError as error:
            raise UnsupportedCheckpoint(
                "type-unsupported",
                f"{self.path} has a number of type {tensor.dtype}, which zckpt does not read",
                file=self.path,
            ) from error

    def number(self, value: Any) -> Any:
        """The value of a tensor of one element; any other value is returned unchanged."""
        is_number = isinstance(value, Tensor) and value.numel == 1 and value.dtype in NUMBERS
        return self.scalar(value) if is_number else value

    def kept(self, value: Any, path: str, entries: dict[Key, Entry]) -> Any:
        """Copies a value, with a name in place of each tensor; adds the tensors to `entries`.

        `path` is the value's path in the saved dictionary. A tensor's name is its own path, such as
        `client_state.rng`, and its key in `entries` is (name, "state"). A 0-d tensor that is not
        complex becomes its number.
        """
        if isinstance(value, Tensor):
            if not value.shape and value.dtype != "C64":
                return self.scalar(value)
            entry = Entry(path, "state", value.dtype, value.shape, self.fragments(value))
            entries[entry.key] = entry
            return TensorName(path)
        return map_values(value, lambda item, key: self.kept(item, inside(path, key), entries))

    def crc(self, tensor: Tensor) -> tuple[int, int | None]:
        """The size of the record (zip member) with the tensor's storage, and its stated CRC-32."""
        record = self._record(tensor)
        return record.extent.length, record.crc

    def summary(self, value: Any) -> Any:
        """Converts a value to JSON that is equal for equal values.

        A tensor is converted to a text of its type, shape and CRC-32. The tensor's bytes are read
        if it is only a part of its storage, or if the file states no checksum.
        """
        return to_json(self._summary(value, None))

    def _summary(self, value: Any, _key: Any) -> Any:
        if not isinstance(value, Tensor):
            return map_values(value, self._summary)
        length, crc = self.crc(value)
        whole = value.contiguous and length == value.numel * SIZES[value.dtype]
        if crc is None or not whole:
            crc = self.crc_of_elements(value)
        return f"{value.dtype} {list(value.shape)} {crc:08x}"

    def crc_of_elements(self, tensor: Tensor) -> int:
        """The CRC-32 of the row-major elements; reads their bytes."""
        runs = [
            run for fragment in self.fragments(tensor) for run in fragment.runs(0, tensor.numel)
        ]
        return crc_of(run.extent for run in sorted(runs, key=lambda run: run.start))

    def _record(self, tensor: Tensor) -> Record:
        record = self.records.get(tensor.storage.key)
        if record is None and not tensor.numel:
            return Record(Extent(self.path, 0, 0), None)  # an empty storage
        if record is None:
            raise CorruptCheckpoint(
                "file-damaged",
                f"{self.path} lacks the storage {tensor.storage.key!r}",
                file=self.path,
            )
        size = SIZES[tensor.dtype]
        if tensor.numel:
            last = tensor.offset + sum(
                (count - 1) * stride
                for count, stride in zip(tensor.shape, tensor.strides, strict=True)
            )
            stop = tensor.storage.start + (last + 1) * size
            # that of a lost file may have been longer than that of the file that stands in
            if stop > record.extent.length and not sources.is_stand_in(self.path):
                raise CorruptCheckpoint(
                    "file-cut-short",
                    f"{self.path}: a tensor exceeds its storage {tensor.storage.key!r}",
                    file=self.path,
                )
        return record

    # -- torch >= 1.6

    def _read_zip(self, file: int, within: Extent, parsed: Parsed) -> _Loaded:
        members = read_directory(file, within, parsed.directories)
        pickles = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise CorruptCheckpoint(
                "file-damaged",
                f"{self.path} is a zip, but torch.save did not write it",
                file=self.path,
            )
        folder = pickles[0].removesuffix("data.pkl")
        self.saved_as = folder[:-1]
        order = members.get(folder + "byteorder")
        if order and _member(file, order, self.path) != b"little":
            raise UnsupportedCheckpoint(
                "storage-unsupported",
                f"{self.path} was written on a big-endian machine",
                file=self.path,
            )

        pickle_member = members[pickles[0]]
        if pickle_member.length > MAX_PICKLE:
            raise UnsupportedCheckpoint(
                "file-too-large",
                f"{self.path} has a pickle of {pickle_member.length} bytes; zckpt reads up to "
                f"{MAX_PICKLE}",
                hint="save large values as tensors, or in separate files",
                file=self.path,
            )
        start, data = f"{folder}data/", self.records
        beside = list[Record]()
        for name, member in members.items():
            record = Record(Extent(self.path, member.offset, member.length), member.crc)
            if name.startswith(start):
                data[name.removeprefix(start)] = record
            elif member not in (order, pickle_member) and member.crc is not None:
                beside.append(record)
        sources.note_beside(beside)
        loaded = self._parsed(_member(file, pickle_member, self.path), pickle_member.crc, parsed)
        sources.note_objects(loaded.names)  # `peek` may have parsed it before the reader started
        return loaded

    def _parsed(self, text: bytes, crc: int | None, parsed: Parsed) -> _Loaded:
        """Parses a zip's pickle; equal pickles of several files are parsed once."""
        # with CRC-32 alone, one of 10,000 checkpoints of 1,000 ranks would have two equal keys by
        # chance
        key = (len(text), crc32(text) if crc is None else crc, hash(text))
        with parsed.lock:
            if key not in parsed:
                peeked = _peeked.pop(key) if key in _peeked else None
                parsed[key] = peeked or self._parse(text, key)
            return parsed[key]

    def _parse(self, text: bytes, key: tuple[int, int, int]) -> _Loaded:
        """Parses the pickle of a zip; keeps its error for the next format that tries the file."""
        error_of_first = _refused.get((self.path, key))
        if error_of_first is not None:
            raise error_of_first
        try:
            return _Parser(text, self.path).loaded()
        except (CorruptCheckpoint, UnsupportedCheckpoint) as error:
            _refused.clear()
            _refused[self.path, key] = error.again()
            raise

    # -- torch < 1.6

    def _read_legacy(self, file: int) -> _Loaded:
        """Parses the pickles at the beginning of an old file, and finds its storages.

        Files of torch before 1.6 have no zip: the storages follow the pickles.
        """
        most = FIRST_READ
        while True:
            text = sources.pread(file, min(most, self.size, MAX_PICKLE), 0)
            try:
                loaded, storages, offset = self._legacy_pickles(text)
                break
            except CorruptCheckpoint:
                if len(text) < most or most >= MAX_PICKLE:
                    raise
            most <<= 4  # the text may end in the middle of a pickle
        for storage in storages:
            head = sources.pread(file, 8, offset)
            length = int.from_bytes(head, "little", signed=True) * SIZES[storage.dtype]
            if len(head) < 8 or length < 0 or offset + 8 + length > self.size:
                raise CorruptCheckpoint(
                    "file-cut-short",
                    f"{self.path} ends early",
                    file=self.path,
                )
            # this container has no checksums
            self.records[storage.key] = Record(Extent(self.path, offset + 8, length), None)
            offset += 8 + length
        return loaded

    def _legacy_pickles(self, data: bytes) -> tuple[_Loaded, list[Storage], int]:
        """Parses the saved value; also returns its storages in file order, and where they begin."""
        magic = _Parser(data, self.path)
        if magic.load() != 0x1950A86A20F9469CFC6C:
            raise NotACheckpoint(
                "not-a-checkpoint",
                f"{self.path} is a pickle, but torch.save did not write it",
                file=self.path,
            )
        protocol = _Parser(data, self.path, magic.position)
        if protocol.load() != 1001:
            raise UnsupportedCheckpoint(
                "version-unsupported",
                f"{self.path} was written by torch before 0.1.10",
                file=self.path,
            )
        system = _Parser(data, self.path, protocol.position)
        about = system.load()
        if not (isinstance(about, dict) and about.get("little_endian", True)):
            raise UnsupportedCheckpoint(
                "storage-unsupported",
                f"{self.path} was written on a big-endian machine",
                file=self.path,
            )
        parser = _Parser(data, self.path, system.position)
        loaded = parser.loaded()
        keys = _Parser(data, self.path, parser.position)
        names = keys.load()
        listed = names if isinstance(names, list) else [names]
        storages = [parser.storages.get(key) for key in listed if isinstance(key, str)]
        if len(storages) < len(listed) or None in storages:
            raise CorruptCheckpoint(
                "file-damaged", f"{self.path} lists a storage that no tensor uses", file=self.path
            )
        return loaded, [storage for storage in storages if storage], keys.position


def is_torch(path: str) -> bool:
    """Whether a file begins like a file of torch.save."""
    if not sources.is_file(path):
        return False
    with sources.opened(path) as file:
        head = file.read(4)
    return head == ZIP or _is_legacy(head)


def _is_legacy(head: bytes) -> bool:
    """Whether bytes are the beginning of a pickle, and so of a file of torch before 1.6."""
    return head[:1] == b"\x80" and head[1:2] in PROTOCOLS


def peek(path: str) -> Any:
    """The saved value of a file whose format is not known yet; raises as `TorchFile` does.

    The last parsed pickle is kept until a TorchFile with the same pickle takes it, because several
    formats may try a file. Files of torch before 1.6 are parsed every time.
    """
    parsed = Parsed()
    value = TorchFile(path, parsed).value
    _peeked.clear()
    _peeked.update(parsed)
    return value


class _Parser(Unpickler):
    """The unpickler that also handles the functions which rebuild torch's storages and tensors."""

    def __init__(self, data: Any, path: str, start: int = 0) -> None:
        super().__init__(
            data,
            start,
            table=FUNCTIONS,
            persistent=self.storage,
            most_values=MOST_VALUES,
            most_containers=MOST_CONTAINERS,
            collects=Tensor,
        )
        self.path = path
        self.storages: dict[str, Storage] = {}

    def loaded(self) -> _Loaded:
        """The value of the pickle, and the sums over its tensors (see `_Loaded`)."""
        value = self.load()
        views = {
            (tensor.storage.key, tensor.offset, tensor.shape, tensor.strides): tensor
            for tensor in self.collected
        }.values()
        length = sum([prod(tensor.shape) * SIZES[tensor.dtype] for tensor in views])
        runs = sum([runs_of(tensor) for tensor in views if tensor.strides not in CONTIGUOUS])
        return _Loaded(value, length, runs, (*self.globals,))

    def load(self) -> Any:
        try:
            return super().load()
        except (CorruptCheckpoint, UnsupportedCheckpoint) as error:
            raise error.again(message=f"{self.path}: {error.message}", file=self.path) from error

    def storage(self, identity: Any) -> Storage:
        """The storage of torch's persistent id: ("storage", type, key, location, numel[, view])."""
        if not isinstance(identity, tuple) or len(identity) not in (5, 6):
            raise CorruptCheckpoint(
                "file-damaged", "a pickle names a storage in a way that torch does not"
            )
        kind, cls, key, _location, numel, *view = identity
        dtype = STORAGES.get(cls.name.rsplit(".", 1)[-1]) if isinstance(cls, Global) else None
        if kind != "storage" or dtype is None or not isinstance(key, str):
            raise UnsupportedCheckpoint(
                "type-unsupported",
                f"a storage of an unknown type: {getattr(cls, 'name', type(cls).__name__)}",
                hint="cast its tensors before saving, or leave them out of the checkpoint",
            )
        # torch < 1.6: the view is (key, offset, numel) in a larger storage
        first = view[0][1] if view and view[0] else 0
        size = SIZES[dtype]
        storage = Storage(key, dtype, size_of(numel) * size, size_of(first) * size)
        self.storages.setdefault(key, storage)
        return storage


def _member(file: int, member: ZipMember, path: str) -> bytes:
    """Reads all bytes of a small zip member; raises CorruptCheckpoint if its CRC-32 differs."""
    data = sources.pread(file, member.length, member.offset)
    if len(data) != member.length or (member.crc is not None and crc32(data) != member.crc):
        raise CorruptCheckpoint(
            "record-damaged",
            f"{path}: {member.name} is damaged (its CRC-32 differs)",
            hint=RESTORABLE,
            file=path,
        )
    return data
