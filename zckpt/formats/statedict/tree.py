"""State dicts as a tree in which each tensor is replaced by a `Leaf`: type, shape, byte ranges.

A tree is what a program gave to torch.save or torch.distributed.checkpoint.save: dictionaries,
lists and plain values. A `Leaf` stands for one full tensor, whether its shards are in one file or
in many.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from math import prod
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ...core.checkpoint.dtypes import SIZES, decode
from ...core.checkpoint.entries import Entry
from ...core.checkpoint.inert import Scalar, map_values
from ...core.checkpoint.manifest import Sibling
from ...core.checkpoint.origin import Origin
from ...core.storage import sources
from ...core.storage.fragments import (
    Box,
    Boxes,
    Extent,
    Fragment,
    Fragments,
    Record,
    RunColumns,
    Runs,
    boxes,
    row_major,
    tile,
)
from ...core.storage.sequences import Joined, Made
from ...errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    Notice,
    UnsupportedCheckpoint,
)
from ...files.dcptable import METADATA, ItemBox
from ...files.safefile import SavedTensor
from ...files.torchfile import Tensor, TorchFile

MAX_CUT = 8  # axes
MAX_LIST = 1_000_000  # elements of all lists of a tree
TreePath = tuple[Any, ...]
"""The keys that lead to a value in a tree, from the outermost one on."""


def dotted(path: TreePath) -> str:
    """The path of a value as torch.distributed.checkpoint names it: "optim.state.0.exp_avg"."""
    return ".".join(map(str, path))


def put(tree: Any, path: TreePath, value: Any, room: int) -> int:
    """Sets the value at a path of nested dictionaries and lists; creates missing ones.

    An integer in the path is an index in a list. All lists together may grow by `room` elements;
    returns what is left of `room`. Raises CorruptCheckpoint if the path has a value, leads through
    a plain value, or needs more room.
    """
    container = tree
    for key, following in pairwise((*path, None)):
        if not isinstance(container, (dict, list)) or (
            isinstance(container, list) and type(key) is not int
        ):
            raise CorruptCheckpoint(
                "file-damaged",
                f"{METADATA} has the key {'.'.join(map(str, path))} below a value that is not a "
                "dictionary or list",
            )
        if isinstance(container, list):
            room -= max(0, key + 1 - len(container))
            if key < 0 or room < 0:
                what = f"{METADATA} has the key {dotted(path)}: its list index {key} is too large"
                raise CorruptCheckpoint("file-damaged", what)
            container.extend([None] * (key + 1 - len(container)))
        value_before = container[key] if isinstance(container, list) else container.get(key)
        if following is None and value_before is not None:
            raise CorruptCheckpoint(
                "file-damaged",
                f"{METADATA} has two values for the key {'.'.join(map(str, path))}",
            )
        if following is None:
            container[key] = value
        elif value_before is None:
            container[key] = [] if type(following) is int else {}
        container = container[key]
    return room


def no_twin() -> None:
    """Returns None: the `Leaf.twin` of a tensor whose checksums are unknown."""


class Leaf(Struct, frozen=True, eq=False):
    """A tensor in a tree of state dicts, without its elements.

    dtype      the type, such as "F32"
    fragments  the byte ranges of the full tensor, in any number of files
    number     a function that reads the value of a 0-d tensor
    memory     equal for two names of one tensor; None if unknown or empty
    find_twin  a function that computes `twin`; it may open files
    twin       checksums, which are equal for tensors with equal shards; None if one is unknown
    sharded    whether ranks hold shards; None if unknown
    name       the name in the manifest, if zckpt wrote the files
    parts      the shapes of the ranks' shards
    """

    dtype: str
    shape: tuple[int, ...]
    fragments: Fragments
    number: Callable[[], Scalar]
    memory: Any = None
    find_twin: Callable[[], Any] = no_twin
    sharded: bool | None = None
    name: str | None = None
    parts: frozenset[tuple[int, ...]] = frozenset()

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def twin(self) -> Any:
        return self.find_twin()

    def entry(self, parameter: str, slot: str) -> Entry:
        return Entry(parameter, slot, self.dtype, self.shape, self.fragments)


class StepStatement(Struct, frozen=True):
    """A step (number of updates) that files state under a key `step`.

    `path` is the path of this key in the tree of state dicts. `value` is a number or a tensor's
    `Leaf`.
    """

    path: TreePath
    files: tuple[str, ...]
    value: Any


class Difference(Struct, frozen=True):
    """A value that differs between the files of two ranks, such as a running mean.

    `path` is the value's path in the state dicts. `files` are the two ranks' files. `shapes` are
    the shapes of the two tensors; None for a value that is no tensor.
    """

    path: TreePath
    files: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def is_alike(self) -> bool:
        """Whether the two values have the same shape, or are not tensors."""
        return self.shapes is None or self.shapes[0] == self.shapes[1]


def leads_to_step(path: TreePath) -> bool:
    """Whether the last key of a path is `step` or ends with `.step`: the value is then a step."""
    return bool(path) and str(path[-1]).rpartition(".")[2] == "step"


class ReadFiles(Struct, eq=False):
    """The files of a checkpoint, as in the manifest's `Files`.

    records        byte ranges of the files, with stated checksums
    siblings       other files of the directory, which a target gets too
    omitted_files  other files of the directory, which no target gets
    unused         byte ranges that belong to no value
    laid           {folder: its `.metadata` table} of a target that has no tensors' bytes yet
    """

    paths: list[str] = field(default_factory=list)
    records: Joined[Record] = field(default_factory=Joined)
    siblings: list[Sibling] = field(default_factory=list)
    omitted_files: list[Sibling] = field(default_factory=list)
    unused: list[Extent] = field(default_factory=list)
    laid: dict[str, Any] = field(default_factory=dict)


class FileLayout(Struct, eq=False):
    """How the program distributed its state dicts over files.

    folders   names of the model's and the optimizer's folder; None if there is one folder
    models    keys of several models, if separate files show these
    file      the name of the single file; None for several files
    storage   where weights outside of the state dict are: "ranks", "adapter" (keys.py) or None
    in_order  whether the model's names are in the program's order
    """

    folders: list[str] | None = None
    models: list[str] = field(default_factory=list)
    file: str | None = None
    storage: str | None = None
    in_order: bool = True  # not in safetensors files, which sort names

    @property
    def keeps_groups(self) -> bool:
        """Whether the files can contain parameter groups; safetensors files alone cannot."""
        return self.storage is None or self.folders is not None


class RankComparison(Struct, eq=False):
    """What a comparison of the ranks' files showed. The tree has rank 0's values.

    steps       every step that a rank's file states
    different   the values that differ between two ranks
    of_ranks    other ranks' differing values: {file name: {path: value}}
    uncompared  the number of tensors that could be compared only by reading them
    """

    steps: list[StepStatement] = field(default_factory=list)
    different: list[Difference] = field(default_factory=list)
    of_ranks: dict[str, Any] = field(default_factory=dict)
    uncompared: int = 0


class SavedTree(Struct, eq=False):
    """All state dicts of a checkpoint as one tree, and what a format's reader learned about them.

    root      the path of the checkpoint
    origin    the manifest's `run.origin`: format, version, number of ranks
    tree      the state dicts, with a `Leaf` instead of each tensor
    files     the files that were read, and files beside them
    layout    how the program distributed its state dicts over files
    ranks     what a comparison of the ranks' files showed
    facts     {path of a model: what zckpt wrote beside it}; the key None is for all other models
    orders    lists of parameter numbers, each in the model's order; None: one list per group
    omitted   notices about contents that no target gets
    """

    root: str
    origin: Origin
    tree: dict[Any, Any]
    files: ReadFiles = field(default_factory=ReadFiles)
    layout: FileLayout = field(default_factory=FileLayout)
    ranks: RankComparison = field(default_factory=RankComparison)
    facts: dict[TreePath | None, dict[str, Any]] = field(default_factory=dict)
    orders: list[list[int]] | None = None
    omitted: list[Notice] = field(default_factory=list)
    warnings: list[Notice] = field(default_factory=list)

    def facts_of(self, model: TreePath) -> dict[str, Any] | None:
        """The facts that zckpt wrote beside a model, such as the names of buffers (own_facts.py).

        `model` is the path of the model's state dict. None if zckpt wrote no facts.
        """
        return self.facts.get(model, self.facts.get(None))


class InPieces(Struct, frozen=True):
    """A tensor of a special class (`name`), of which every rank saved a shard.

    Only the class itself can interpret the shards, so zckpt only compares them. `pieces` are pairs
    of a shard's offsets and its value.
    """

    name: str
    pieces: Sequence[tuple[tuple[int, ...], Any]]

    def refused(self, path: str) -> UnsupportedCheckpoint:
        """The error that zckpt does not read this tensor; `path` is its key.

        Optimizer states of a special class are not refused, but only compared.
        """
        return UnsupportedCheckpoint(
            "type-unsupported",
            f"{path} is a sharded tensor of the class {self.name}, which zckpt does not read",
            hint="save it whole, or as a plain tensor",
            file=path,
        )


def leaf(file: TorchFile, tensor: Tensor) -> Leaf:
    """Describes a tensor that one torch.save file contains completely."""
    part = (0,) * len(tensor.shape), tensor, file
    return Leaf(
        tensor.dtype,
        tensor.shape,
        file.fragments(tensor),
        lambda: file.scalar(tensor),
        memory_of([part]),
        partial(twin_of, tensor.dtype, tensor.shape, [part]),
    )


LeafPart = tuple[tuple[int, ...], Tensor, TorchFile]
"""A shard of the tensor that a `Leaf` describes: its offsets, the shard as saved, its file."""


def memory_of(parts: Sequence[LeafPart]) -> Any:
    """Computes `Leaf.memory`: each shard's storage, and the shard's elements in this storage.

    Two names of one tensor have equal results. None for a tensor without elements.
    """
    views = [
        (*_view(offsets, tensor), file.path, tensor.place[0])
        for offsets, tensor, file in parts
        if tensor.numel
    ]
    return tuple(sorted(views)) or None


def twin_of(dtype: str, shape: tuple[int, ...], parts: Sequence[LeafPart]) -> Any:
    """Computes `Leaf.twin`, which is equal for two tensors with equal shards.

    None if a file states no checksum, or if there are no elements.
    """
    crcs = []
    for offsets, tensor, file in parts:
        if tensor.numel:
            storage = file.crc(tensor)
            if storage[1] is None:
                return None
            # the places of the elements in their storage, and the storage's checksum
            crcs.append((*_view(offsets, tensor), storage))
    return (dtype, shape, tuple(sorted(crcs))) if crcs else None


def _view(offsets: tuple[int, ...], tensor: Tensor) -> tuple[Any, ...]:
    return offsets, tensor.place[1], tensor.shape, tensor.strides


def leaves(file: TorchFile, value: Any, names: Iterator[str] | None = None) -> Any:
    """Replaces every tensor in a value by a `Leaf`, which has its byte ranges.

    `names` yields the `name` of each, for tensors that are not 0-d.
    """
    if isinstance(value, Tensor):
        whole = leaf(file, value)
        return replace(whole, name=next(names, None)) if names and value.shape else whole
    return map_values(value, lambda item, _: leaves(file, item, names))


def missing_number() -> Any:
    """The `Leaf.number` of a tensor whose file is lost: returns None instead of a value."""


def number_of(stored: SavedTensor) -> Callable[[], Scalar]:
    """Returns a function that reads the value of a 0-d tensor from a safetensors file."""

    def number() -> Scalar:
        with sources.opened(stored.extent.file) as file:
            data = sources.pread(file.fileno(), stored.extent.length, stored.extent.offset)
        return Scalar(decode(stored.dtype, data), stored.dtype)

    return number


class TensorPiece(Struct, frozen=True):
    """One rank's shard of a tensor, and the bytes of a file that store it.

    offsets  where the shard begins along each axis of the full tensor
    sizes    its length along each axis
    strides  the distance of neighbors along each axis in the file, in elements
    first    the index of the shard's first element in `extent`
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    first: int
    extent: Extent

    @property
    def numel(self) -> int:
        return prod(self.sizes)


def solid_piece(stored: SavedTensor, offsets: tuple[int, ...]) -> TensorPiece:
    """Describes a tensor of a safetensors file as a shard that begins at `offsets`."""
    return TensorPiece(offsets, stored.shape, row_major(stored.shape), 0, stored.extent)


_strides = lru_cache(1024)(row_major)  # rows have equal sizes, so the cache helps


def whole_piece(extent: Extent, sizes: tuple[int, ...], offsets: tuple[int, ...]) -> TensorPiece:
    """Describes a byte range whose elements are a row-major shard that begins at `offsets`."""
    return TensorPiece(offsets, sizes, _strides(sizes), 0, extent)


def piece_of(file: TorchFile, tensor: Tensor, offsets: tuple[int, ...]) -> TensorPiece:
    """Describes a tensor of a torch.save file as a shard that begins at `offsets`."""
    extent = file.whole(tensor)
    return TensorPiece(offsets, tensor.shape, tensor.strides, tensor.offset, extent)


def assembled(
    name: str, dtype: str, shape: Sequence[int], pieces: Sequence[TensorPiece]
) -> Fragments:
    """Finds the byte ranges of a full tensor from those of its shards (`pieces`).

    Each element must be in exactly one shard. Raises IncompleteCheckpoint if elements are missing,
    and InconsistentCheckpoint if shards overlap or exceed the shape. `name` is for messages.
    """
    nonempty = [piece for piece in pieces if piece.numel]
    if (rows := _rows(dtype, shape, nonempty)) is not None:
        return rows
    for piece in nonempty:
        fits = len(piece.offsets) == len(piece.sizes) == len(piece.strides) == len(shape)
        if not fits or any(
            offset < 0 or offset + size > whole
            for offset, size, whole in zip(piece.offsets, piece.sizes, shape, strict=True)
        ):
            raise InconsistentCheckpoint(
                "file-damaged",
                f"{piece.extent.file}: a shard of {name} has the shape {list(piece.sizes)} at "
                f"offsets {list(piece.offsets)}, which exceeds the tensor's shape {list(shape)}",
                file=piece.extent.file,
                subject=name,
            )
    made = partial(_box, shape, SIZES[dtype])
    fragments = boxes(map(made, nonempty))
    total = sum(piece.numel for piece in nonempty)
    if total < prod(shape):
        raise IncompleteCheckpoint(
            "elements-missing",
            f"{name} has {prod(shape)} elements, but the files hold only {total}",
            hint="a rank's file is missing, or the save did not finish",
            subject=name,
        )
    if total > prod(shape) or _overlap(fragments, nonempty, shape):
        raise InconsistentCheckpoint("elements-overlap", f"shards of {name} overlap", subject=name)
    if isinstance(fragments, Boxes) and isinstance(pieces, Made):  # made on demand, to save memory
        return Boxes(Made(made, pieces))
    return fragments


def _box(whole: Sequence[int], size: int, piece: TensorPiece) -> Box:
    return Box(
        whole=whole,
        offsets=piece.offsets,
        sizes=piece.sizes,
        strides=piece.strides,
        first=piece.first,
        size=size,
        extent=piece.extent,
    )


def assembled_rows(
    shape: Sequence[int], boxes: Iterable[ItemBox], extents: Sequence[Extent]
) -> RunColumns | None:
    """Like `assembled`, but only for shards that are complete rows, one after the other.

    Returns None for other shards. `boxes` are the shards' offsets and sizes; `extents` are their
    byte ranges.
    """
    inner, starts, stop = tuple(shape[1:]), array("q"), 0
    row, length = prod(inner), shape[0] if shape else 0
    for box in boxes:
        offsets, sizes = box.offsets, box.sizes
        if not shape or offsets[0] * row != stop or sizes[1:] != inner or any(offsets[1:]):
            return None
        starts.append(stop)
        stop += sizes[0] * row
    return RunColumns(starts, stop, extents) if starts and stop == length * row else None


def _rows(dtype: str, shape: Sequence[int], pieces: Sequence[TensorPiece]) -> Runs | None:
    """The byte ranges of a tensor whose shards are complete rows, one after the other.

    None for other shards.
    """
    inner, size, stop = tuple(shape[1:]), SIZES[dtype], 0
    row = prod(inner)
    runs = []
    for piece in pieces:
        sizes, numel = piece.sizes, piece.numel
        is_next = not any(piece.offsets) if not stop else piece.offsets[0] * row == stop
        if sizes[1:] != inner or not is_next or any(piece.offsets[1:]):
            return None
        if len(piece.offsets) != len(shape) or piece.strides != _strides(sizes):
            return None
        first = piece.first * size
        extent = (
            piece.extent
            if not first and piece.extent.length == numel * size
            else (piece.extent.part(first, first + numel * size))
        )
        runs.append(Fragment(stop, stop + numel, extent))
        stop += numel
    return Runs(runs) if runs and stop == prod(shape) else None


def _overlap(fragments: Fragments, pieces: Sequence[TensorPiece], shape: Sequence[int]) -> bool:
    """Whether two shards overlap, if all shards together have as many elements as the tensor."""
    if isinstance(fragments, Runs):
        ends = [fragment.stop for fragment in fragments]
        return ends[:-1] != [fragment.start for fragment in fragments.listed[1:]]
    cut = [axis for axis, whole in enumerate(shape) if any(p.sizes[axis] != whole for p in pieces)]
    if len(cut) > MAX_CUT:
        raise UnsupportedCheckpoint(
            "writer-unsupported",
            f"a tensor is sharded along {len(cut)} axes; zckpt reads shards along up to {MAX_CUT}",
        )
    return not tile(shape, [(piece.offsets, piece.sizes) for piece in pieces])
