"""HDF5 files of any name, one per rank (ORTTrainer.save_checkpoint, ONNX Runtime 1.7 to 1.16).

    model/full_precision/<w>            of an fp32 run whole on every rank; of a mixed one on its
                                        owners alone, as a flat piece where ranks share it
    optimizer/<w>/Moment_1, Moment_2, Update_Count    of what the rank owns
    optimizer/shared_optimizer_state/Step             Lamb's
    partition_info/<w>/original_dim     the shape of a weight that is split on this rank
    trainer_options/...                 rank, sizes, optimizer, precision
    train_step_info/...                 since 1.12
    user_dict                           a pickle as hexadecimal text: never opened

A `/` in a name makes groups, which its path undoes. The 16-bit copies are not stored. Before the
release of 1.7 the sizes of data and horizontal parallelism were missing, and groups could be empty.

Where a file's bytes lie is asked of h5py, with one exception: whether a file is one of these at all
is read from its first group's names, because other programs' HDF5 files may lie beside.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ...core.fragments import Extent, Record
from ...errors import (
    CorruptCheckpoint,
    InconsistentCheckpoint,
    MissingExtra,
    UnsupportedCheckpoint,
)
from .ranks import COUNT, OPTIMIZERS, SHARED, SLOTS, Held, Rank, Save

MAGIC = b"\x89HDF\r\n\x1a\n"
FULL = "model/full_precision/"
MOST = 1 << 16  # elements of what is read by value
MAX_DEPTH = 64
REFERENCE = struct.Struct("<IQI")  # to a string: its length, a heap's address, a number in it
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
SHARED_GROUPS = ("shared_optimizer_state",)
TOLD_ALIKE = (
    "mixed_precision",
    "zero_stage",
    "world_size",
    "data_parallel_size",
    "horizontal_parallel_size",
    "optimizer_name",
)


def import_h5py() -> Any:
    """The h5py package; raises MissingExtra."""
    try:
        import h5py
    except ImportError as error:
        raise MissingExtra(
            "ONNX Runtime's HDF5 checkpoints need the package h5py, which is not installed",
            hint="pip install 'zckpt[onnxruntime]'",
        ) from error
    return h5py


# -- whether a file is one


def is_one(path: str) -> bool:
    """By the names in its root group, without h5py."""
    try:
        with open(path, "rb") as file:
            if file.read(8) != MAGIC:
                return False
            names = _root_names(file.fileno())
    except OSError:
        return False
    if names is None:  # a newer superblock than h5py writes unless told to
        try:
            with import_h5py().File(path, "r", locking=False) as opened:
                names = {name.encode() for name in opened}
        except (MissingExtra, OSError, RuntimeError, ValueError):
            return False
    return {b"model", b"trainer_options"} <= names


def _root_names(file: int) -> set[bytes] | None:
    """Names in the root group of a file with superblock version 0, from its local heap."""
    head = os.pread(file, 96, 0)
    if len(head) < 96 or head[8] != 0 or head[13:15] != b"\x08\x08":
        return None
    cached, heap = struct.unpack_from("<I", head, 72)[0], struct.unpack_from("<Q", head, 88)[0]
    about = os.pread(file, 32, heap) if heap < 1 << 62 else b""
    if cached != 1 or len(about) < 32 or about[:4] != b"HEAP":
        return None
    size, _, place = struct.unpack_from("<QQQ", about, 8)
    if place >= 1 << 62:
        return None
    return set(os.pread(file, min(size, 1 << 16), place).split(b"\0"))


# -- what a file holds


@dataclass(frozen=True, slots=True)
class File:
    """One file: `tensors` and `values` (numbers, lists, text) by their paths inside it."""

    path: str
    tensors: Mapping[str, Held]
    values: Mapping[str, Any]

    def under(self, group: str) -> dict[str, Any]:
        """The values directly inside a group."""
        prefix = f"{group}/"
        return {
            name.removeprefix(prefix): value
            for name, value in self.values.items()
            if name.startswith(prefix) and "/" not in name.removeprefix(prefix)
        }

    @property
    def options(self) -> dict[str, Any]:
        return self.under("trainer_options")

    def size(self, name: str, default: int) -> int:
        """A number of the trainer's options; raises CorruptCheckpoint."""
        value = self.options.get(name, default)
        if type(value) is not int or value < 0:
            raise CorruptCheckpoint(f"{self.path}: trainer_options/{name} is {value!r}")
        return value

    @property
    def is_partition(self) -> bool:
        """Whether it is one rank of several, not a checkpoint by itself."""
        return self.size("zero_stage", 0) > 0 and self.size("world_size", 1) > 1


def open_file(path: str) -> File:
    """What a file holds; raises CorruptCheckpoint, UnsupportedCheckpoint, MissingExtra."""
    h5py = import_h5py()
    try:
        with h5py.File(path, "r", locking=False) as opened:
            return _contents(h5py, path, opened)
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(f"{path} is a damaged HDF5 file: {error}") from error


def _contents(h5py: Any, path: str, opened: Any) -> File:
    if opened.userblock_size:
        raise UnsupportedCheckpoint(f"{path} begins with a user block")
    room = os.path.getsize(path)
    tensors: dict[str, Held] = {}
    values: dict[str, Any] = {}
    for name, dataset in _datasets(h5py, path, opened.id):
        if name.startswith("model/") or name.rpartition("/")[2] in SLOTS:
            tensors[name] = _tensor(h5py, path, room, name, dataset)
        else:
            values[name] = _value(h5py, path, room, name, dataset)
    return File(path, tensors, values)


def _datasets(h5py: Any, path: str, root: Any) -> Iterator[tuple[str, Any]]:
    """Every dataset by its path; links that lead elsewhere, or in circles, are refused.

    By h5py's low-level objects: there are tens of thousands, and the others take 4 times as long.
    """
    seen: set[int] = set()
    waiting: list[tuple[str, Any, int]] = [("", h5py.h5g.open(root, b"/"), 0)]
    while waiting:
        prefix, group, depth = waiting.pop()
        for name in group:
            inside = prefix + name.decode("utf-8", "surrogateescape")
            if group.links.get_info(name).type != h5py.h5l.TYPE_HARD:
                raise UnsupportedCheckpoint(f"{path}: {inside} is a link to somewhere else")
            item = h5py.h5o.open(group, name)
            address = h5py.h5o.get_info(item).addr
            if address in seen or depth > MAX_DEPTH:
                raise CorruptCheckpoint(f"{path}: {inside} is in two places")
            seen.add(address)
            if isinstance(item, h5py.h5d.DatasetID):
                yield inside, item
            elif isinstance(item, h5py.h5g.GroupID):
                waiting.append((f"{inside}/", item, depth + 1))
            else:
                raise UnsupportedCheckpoint(f"{path}: {inside} is neither group nor dataset")


def _tensor(h5py: Any, path: str, room: int, name: str, dataset: Any) -> Held:
    """Where its bytes lie: one plain run of the file."""
    kind = dataset.dtype
    dtype = DTYPES.get(kind.name)
    if dtype is None or kind.byteorder == ">":
        raise UnsupportedCheckpoint(f"{path}: {name} has elements of type {kind}")
    shape, extent = _run(h5py, path, room, name, dataset, kind.itemsize)
    return Held(dtype, shape, extent)


def _run(
    h5py: Any, path: str, room: int, name: str, dataset: Any, size: int
) -> tuple[tuple[int, ...], Extent]:
    """Shape and bytes of a dataset whose elements take `size` bytes each."""
    shape = tuple(map(int, dataset.shape or ()))
    created = dataset.get_create_plist()
    plain = created.get_layout() == h5py.h5d.CONTIGUOUS and not created.get_external_count()
    if not plain or dataset.shape is None:
        raise UnsupportedCheckpoint(
            f"{path}: {name} is not stored as one plain run of bytes (chunked, compressed, compact "
            "or in another file)",
            hint="ONNX Runtime writes none such; undo it with `h5repack -l CONTI -f NONE`",
        )
    length = prod(shape) * size
    if not length:
        return shape, Extent(path, 0, 0)
    offset = dataset.get_offset()
    if offset is None or offset + length > room:
        raise CorruptCheckpoint(
            f"{path} ends early: {name} is not inside it",
            hint="the file was cut short, or the save did not finish",
        )
    return shape, Extent(path, int(offset), length)


def _value(h5py: Any, path: str, room: int, name: str, dataset: Any) -> Any:
    """A number, a list of numbers, or text.

    The bytes are read here: the library trusts what it finds in a damaged file, and crashes.
    """
    kind = dataset.dtype
    text = kind.kind == "O" and h5py.check_string_dtype(kind) is not None
    if not text and kind.kind not in "iufb":
        raise UnsupportedCheckpoint(f"{path}: {name} is neither number nor text ({kind})")
    size = REFERENCE.size if text else kind.itemsize
    shape, extent = _run(h5py, path, room, name, dataset, size)
    if prod(shape) > MOST or (text and shape):
        raise UnsupportedCheckpoint(f"{path}: {name} has shape {shape}")
    with open(path, "rb") as file:
        data = os.pread(file.fileno(), extent.length, extent.offset)
        if text:
            return _text(file.fileno(), path, room, name, data)
    import numpy as np  # h5py has imported it

    return np.frombuffer(data, kind).reshape(shape).tolist()


def _text(file: int, path: str, room: int, name: str, reference: bytes) -> str:
    """A string, which lies among others in a global heap: its object of that number."""
    length, address, wanted = REFERENCE.unpack(reference)
    head = os.pread(file, 16, address) if address < room else b""
    end = address + int.from_bytes(head[8:16], "little")
    here = address + 16
    while head[:4] == b"GCOL" and here + 16 <= min(end, room):
        number, size = struct.unpack("<H6xQ", os.pread(file, 16, here))
        if number == wanted and length <= size and here + 16 + size <= room:
            return os.pread(file, length, here + 16).decode("utf-8", "surrogateescape")
        if not number:  # what is free
            break
        here += 16 + -(-size // 8) * 8
    raise CorruptCheckpoint(f"{path}: the text of {name} is not inside it")


# -- what all ranks' files hold


def opened(root: str, files: Sequence[File]) -> Save:
    """What files in rank order hold; raises InconsistentCheckpoint and its like."""
    first = files[0]
    for file in files:
        _check_kind(file)
        for name in TOLD_ALIKE:
            if file.options.get(name) != first.options.get(name):
                raise InconsistentCheckpoint(
                    f"{file.path} says {name} {file.options.get(name)!r}, {first.path} says "
                    f"{first.options.get(name)!r}"
                )
    ranks = [_rank(file) for file in files]
    optimizer = first.options.get("optimizer_name")
    state: dict[str, Any] = {
        "trainer_options": {k: v for k, v in first.options.items() if k != "world_rank"},
        "train_step_info": first.under("train_step_info"),
        "user_dict": first.values.get("user_dict"),
    }
    left_out = []
    for what, told in (
        ("user_dict", [file.values.get("user_dict") for file in files]),
        ("train_step_info", [file.under("train_step_info") for file in files]),
    ):
        if any(each != told[0] for each in told):
            left_out.append(f"{what} of ranks other than 0")
    others = {name for file in files for name in file.tensors if not _is_known(name)}
    return Save(
        root,
        "hdf5",
        ranks,
        # ORTTrainer mixes fp16 alone, and says no more than this
        "F16" if first.options.get("mixed_precision") else None,
        OPTIMIZERS.get(str(optimizer)),
        _shapes(files),
        {key: value for key, value in state.items() if value},
        records=[
            Record(held.extent, None)
            for file in files
            for name, held in file.tensors.items()
            if _is_known(name)
        ],
        left_out=[*left_out, *sorted(others)],
    )


def _is_known(name: str) -> bool:
    return name.startswith((FULL, "optimizer/"))


def _check_kind(file: File) -> None:
    horizontal = file.size("horizontal_parallel_size", 1)
    cut = any(
        name.rpartition("/")[2] == "megatron_row_partition" and value not in ([-1], -1)
        for name, value in file.values.items()
    )
    if horizontal > 1 or cut:
        raise UnsupportedCheckpoint(
            f"{file.path} was saved with horizontal (Megatron) parallelism of {horizontal}, which "
            "zckpt does not read",
            hint="what is read: ZeRO with data parallelism alone",
        )
    name = file.options.get("optimizer_name")
    if name is not None and name not in OPTIMIZERS:
        raise UnsupportedCheckpoint(f"{file.path} is of an optimizer {name!r}")


def _shapes(files: Sequence[File]) -> dict[str, tuple[int, ...]]:
    """Shapes of split weights, which every one of their owners states."""
    found: dict[str, tuple[int, ...]] = {}
    for file in files:
        for name, shape in _split(file).items():
            if found.setdefault(name, shape) != shape:
                raise InconsistentCheckpoint(
                    f"{file.path} says that {name} has shape {shape}, another rank {found[name]}"
                )
    return found


def _split(file: File) -> dict[str, tuple[int, ...]]:
    """Weights that are split on this rank, with their shapes."""
    end, prefix = "/original_dim", "partition_info/"
    found = {}
    for name, value in file.values.items():
        if name.startswith(prefix) and name.endswith(end):
            if not isinstance(value, list) or not all(type(d) is int and d >= 0 for d in value):
                raise CorruptCheckpoint(f"{file.path}: {name} is {value!r}, no shape")
            found[name.removeprefix(prefix).removesuffix(end)] = tuple(value)
    return found


def _rank(file: File) -> Rank:
    rank = Rank(file.path)
    split = _split(file)
    for name, held in file.tensors.items():
        if name.startswith(FULL):
            weight = name.removeprefix(FULL)
            # a weight that stays fp32 in a mixed run is whole, though its moments are split
            whole = weight not in split or held.numel == prod(split[weight])
            (rank.weights if whole else rank.pieces)[weight] = held
        elif name.startswith("optimizer/"):
            weight, _, moment = name.removeprefix("optimizer/").rpartition("/")
            rank.moments.setdefault(weight, {})[SLOTS[moment]] = held
    for name, value in file.values.items():
        group, _, last = name.removeprefix("optimizer/").rpartition("/")
        if not name.startswith("optimizer/"):
            continue
        number = value[0] if isinstance(value, list) and len(value) == 1 else value
        if type(number) is not int or number < 1:
            raise CorruptCheckpoint(f"{file.path}: {name} is {value!r}, no counter from 1")
        if group in SHARED_GROUPS and last.lower() == SHARED.lower():
            rank.shared = number
        elif last == COUNT:
            rank.counts[group] = number
        else:
            raise UnsupportedCheckpoint(f"{file.path} holds {name}, of an optimizer unknown here")
    return rank
