"""State dicts whose tensors are leaves: dtype, shape and where the bytes lie, wherever that is.

A tree is what a program gave to torch.save or torch.distributed.checkpoint.save: dictionaries,
lists and plain values, with a `Leaf` for every tensor, however many files hold its pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ...inert import Scalar
from ...manifest import Fragments, Record, Sibling
from ...torchfile import Tensor, TorchFile


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """One whole tensor.

    `twin` is equal for leaves that hold the same bytes (one memory, or pieces cut alike with equal
    checksums) and None where that is not known. `number` reads the value of a 0-d tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    fragments: Fragments
    number: Callable[[], Scalar]
    twin: Any = None

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(slots=True)
class Found:
    """What a format has found, before its meaning is known.

    `source` is the manifest's; `orders` lists, for an optimizer that knows its parameters by
    number, the numbers whose order is that of the model's parameters: by default each group's.
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


def leaf(file: TorchFile, tensor: Tensor) -> Leaf:
    """A tensor that one file holds whole."""
    return Leaf(
        tensor.dtype,
        tensor.shape,
        file.fragments(tensor),
        lambda: file.scalar(tensor),
        (file.path, *tensor.place, tensor.shape, tensor.strides) if tensor.numel else None,
    )


def leaves(file: TorchFile, value: Any) -> Any:
    """The same value with a leaf for every tensor."""
    from ...inert import map_values

    if isinstance(value, Tensor):
        return leaf(file, value)
    return map_values(value, lambda item, _: leaves(file, item))
