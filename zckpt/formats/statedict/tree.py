"""State dicts whose tensors are leaves: dtype, shape and where the bytes lie, wherever that is.

A tree is what a program gave to torch.save or torch.distributed.checkpoint.save: dictionaries,
lists and plain values, with a `Leaf` for every tensor, however many files hold its pieces.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any

from ...core.dtypes import SIZES, decode
from ...core.fragments import Box, Extent, Fragments, Record, Runs, boxes
from ...core.inert import Scalar, map_values
from ...core.manifest import Sibling
from ...errors import IncompleteCheckpoint, InconsistentCheckpoint, UnsupportedCheckpoint
from ...files.safefile import Stored
from ...files.torchfile import Tensor, TorchFile

MAX_CUT = 8  # axes
Path = tuple[Any, ...]
"""Keys that lead to a value of a tree."""


def dotted(path: Path) -> str:
    """As torch.distributed.checkpoint calls what is at a path."""
    return ".".join(map(str, path))


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """One whole tensor.

    `place` is equal for leaves that look at one memory, `twin` for those that are cut alike and
    have equal checksums; None where that is not known. `number` reads the value of a 0-d tensor.
    `sharded` says whether ranks hold parts of it; None where that does not show. `name` is the
    manifest's, where a writer of ours has stated it.
    """

    dtype: str
    shape: tuple[int, ...]
    fragments: Fragments
    number: Callable[[], Scalar]
    place: Any = None
    twin: Any = None
    sharded: bool | None = None
    name: str | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(slots=True)
class Found:
    """What a format has found, before its meaning is known.

    `source` is the manifest's; `orders` lists, for an optimizer that knows its parameters by
    number, the numbers whose order is that of the model's parameters: by default each group's.
    `known` is what a writer of ours has stated: aliases, buffers, frozen weights. `folders` are
    Accelerate's, where model and optimizer lie apart. `in_order` says whether the model's names
    stand as its program gave them; safetensors sorts them. `inferred` are names of parameters that
    nothing states. `adapter` says whether the model's state has PEFT's names (see peft.py).
    """

    root: str
    source: dict[str, Any]
    tree: dict[Any, Any]
    records: list[Record] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    siblings: list[Sibling] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    orders: list[list[int]] | None = None
    known: dict[str, Any] | None = None
    folders: list[str] | None = None
    in_order: bool = True
    inferred: list[str] = field(default_factory=list)
    adapter: bool = False


def leaf(file: TorchFile, tensor: Tensor) -> Leaf:
    """A tensor that one file holds whole."""
    part = (0,) * len(tensor.shape), tensor, file
    return Leaf(
        tensor.dtype,
        tensor.shape,
        file.fragments(tensor),
        lambda: file.scalar(tensor),
        *identities(tensor.dtype, tensor.shape, [part]),
    )


def identities(
    dtype: str,
    shape: tuple[int, ...],
    parts: Sequence[tuple[tuple[int, ...], Tensor, TorchFile]],
) -> tuple[Any, Any]:
    """`place` and `twin` of a leaf whose parts are tensors of files, each at its offsets."""
    held = [part for part in parts if part[1].numel]
    places, crcs = [], []
    for offsets, tensor, file in held:
        storage = file.crc(tensor)
        seen = offsets, tensor.place[1], tensor.shape, tensor.strides
        places.append((*seen, file.path, tensor.place[0]))
        if storage[1] is not None:  # equal storages, equally looked at
            crcs.append((*seen, storage))
    twin = (dtype, shape, tuple(sorted(crcs))) if held and len(crcs) == len(held) else None
    return (tuple(sorted(places)) or None), twin


def leaves(file: TorchFile, value: Any, names: Iterator[str] | None = None) -> Any:
    """The same value with a leaf for every tensor; `names` are those of all that are not 0-d."""
    if isinstance(value, Tensor):
        made = leaf(file, value)
        return replace(made, name=next(names, None)) if names and value.shape else made
    return map_values(value, lambda item, _: leaves(file, item, names))


def number_of(stored: Stored) -> Callable[[], Scalar]:
    """Reads the value of a 0-d tensor of a safetensors file."""

    def number() -> Scalar:
        with open(stored.extent.file, "rb") as file:
            data = os.pread(file.fileno(), stored.extent.length, stored.extent.offset)
        return Scalar(decode(stored.dtype, data), stored.dtype)

    return number


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [offset, offset + size) along every axis of a tensor, as one rank holds them.

    They lie in `extent` from element `first` on, with `strides` in elements.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    first: int
    extent: Extent

    @property
    def numel(self) -> int:
        return prod(self.sizes)


def solid_piece(stored: Stored, offsets: tuple[int, ...]) -> Piece:
    """A piece that a safetensors file holds, which has rows one behind the other."""
    shape = stored.shape
    strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return Piece(offsets, shape, strides, 0, stored.extent)


def assembled(what: str, dtype: str, shape: Sequence[int], pieces: Sequence[Piece]) -> Fragments:
    """The fragments of a tensor of which `pieces` are to hold every element once.

    Empty pieces count for nothing. Raises IncompleteCheckpoint and InconsistentCheckpoint, which
    name `what`.
    """
    held = [piece for piece in pieces if piece.numel]
    for piece in held:
        fits = len(piece.offsets) == len(piece.sizes) == len(piece.strides) == len(shape)
        if not fits or any(
            offset < 0 or offset + size > whole
            for offset, size, whole in zip(piece.offsets, piece.sizes, shape, strict=True)
        ):
            raise InconsistentCheckpoint(
                f"{piece.extent.file} holds a piece of {what} of shape {list(piece.sizes)} at "
                f"{list(piece.offsets)}, outside of its shape {list(shape)}"
            )
    made = boxes(
        Box(shape, p.offsets, p.sizes, p.strides, p.first, SIZES[dtype], p.extent) for p in held
    )
    total = sum(piece.numel for piece in held)
    if total < prod(shape):
        raise IncompleteCheckpoint(
            f"{what} has {prod(shape)} elements, the files hold {total}",
            hint="a rank's file is missing, or the save did not finish",
        )
    if total > prod(shape) or _overlap(made, held, shape):
        raise InconsistentCheckpoint(f"pieces of {what} overlap")
    return made


def _overlap(made: Fragments, pieces: Sequence[Piece], shape: Sequence[int]) -> bool:
    """Whether pieces, which have as many elements as the whole, hold one twice.

    They tile it if every corner of a piece is shared by an even number of them, but for the whole's
    own: then each element is held an odd number of times, and so once. To compare all pairs would
    take hours where a tensor is in 100,000 pieces.
    """
    if isinstance(made, Runs):
        ends = [fragment.stop for fragment in made]
        return ends[:-1] != made.starts[1:]
    cut = [axis for axis, whole in enumerate(shape) if any(p.sizes[axis] != whole for p in pieces)]
    if len(cut) > MAX_CUT:
        raise UnsupportedCheckpoint(f"a tensor that is cut along {len(cut)} axes")
    odd: set[tuple[int, ...]] = set()
    for piece in pieces:
        ends_of = ((piece.offsets[a], piece.offsets[a] + piece.sizes[a]) for a in cut)
        odd.symmetric_difference_update(product(*ends_of))
    return odd != set(product(*((0, shape[axis]) for axis in cut)))
