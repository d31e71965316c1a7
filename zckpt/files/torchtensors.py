"""Tensors in the pickles of torch.save: what torch's functions would build, as plain records.

A `Tensor` has a dtype, a shape, strides and its `Storage`. `TENSORS` is the table of the functions
that build a tensor. A tensor subclass stays a `Foreign` record that names the class.
"""

from __future__ import annotations

from math import prod
from typing import Any

from msgspec import Struct

from ..core.checkpoint.dtypes import FROM_TORCH, SIZES
from ..core.checkpoint.inert import Foreign, Global
from ..errors import CorruptCheckpoint, UnsupportedCheckpoint, brief
from .unpickle import Build

TORCH_DTYPES = {f"torch.{torch_name}": name for torch_name, name in FROM_TORCH.items()}
MAX_AXES = 64  # torch's own limit


class Storage(Struct, frozen=True):
    """A storage of `length` bytes; the file calls it `key`.

    If the pickle contains only a view of a storage, the view begins at byte `start` of the storage.
    """

    key: str
    dtype: str
    length: int
    start: int = 0


class Tensor(Struct, frozen=True):
    """A tensor inside a pickle: `offset` and `strides` count elements of `storage`."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        if not self.numel:
            return True
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True

    @property
    def place(self) -> tuple[str, int]:
        """The storage's key, and the byte of the storage at which the tensor begins.

        Both are equal for tensors that share memory, such as tied weights.
        """
        return self.storage.key, self.storage.start + self.offset * SIZES[self.dtype]

    def part(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a contiguous tensor, as a flat tensor."""
        return Tensor(self.storage, self.dtype, self.offset + start, (stop - start,), (1,))


def size_of(count: Any) -> int:
    if type(count) is not int or not 0 <= count < 1 << 60:
        raise CorruptCheckpoint("file-damaged", "a tensor has an impossible size or stride")
    return count


def _tensor(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    _grad: Any = None,
    _hooks: Any = None,
    lazy: Any = None,
) -> Tensor:
    if not isinstance(storage, Storage) or len(shape) != len(strides):
        raise CorruptCheckpoint(
            "file-damaged", "a pickle builds a tensor from a value that is not a storage"
        )
    if len(shape) > MAX_AXES:
        message = f"a tensor has {len(shape)} axes, and torch allows {MAX_AXES}"
        raise CorruptCheckpoint("file-damaged", message)
    if lazy:  # {"conj": True} or {"neg": True}: the bytes are not the values
        raise UnsupportedCheckpoint(
            "storage-unsupported",
            "a tensor has a pending conjugation or negation",
            hint="save what tensor.resolve_conj().resolve_neg() returns",
        )
    sizes, steps = tuple(map(size_of, shape)), tuple(map(size_of, strides))
    size_of(prod(sizes))
    return Tensor(storage, storage.dtype, size_of(offset), sizes, steps)


CONTIGUOUS = ((), (1,))
"""Strides with which a tensor is always contiguous: those of 0-d tensors, and (1,)."""


def runs_of(tensor: Tensor) -> int:
    """The number of separate byte ranges that hold a tensor's elements; 0 if it is contiguous."""
    if tensor.contiguous:
        return 0
    inner = [size for size, stride in zip(tensor.shape, tensor.strides, strict=True) if stride == 1]
    return tensor.numel // max([1, *inner])


def _typed_tensor(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    grad: Any,
    hooks: Any,
    dtype: Any,
    lazy: Any = None,
) -> Tensor:
    # dtypes that have no storage class: float8, uint16... (torch >= 2.0)
    name = TORCH_DTYPES.get(dtype.name) if isinstance(dtype, Global) else None
    if name is None:
        raise UnsupportedCheckpoint(
            "type-unsupported",
            f"zckpt does not read tensors of type {brief(getattr(dtype, 'name', dtype))}",
            hint="cast them before saving, or leave them out of the checkpoint",
        )
    plain = _tensor(storage, offset, shape, strides, grad, hooks, lazy)
    return Tensor(plain.storage, name, plain.offset, plain.shape, plain.strides)


def _from_type(function: Any, cls: Any, arguments: Any, state: Any) -> Any:
    # a tensor with attributes, such as ZeRO-3's fp32 groups (`ds_id`); other classes stay records
    plain = isinstance(function, Global) and function.name in TENSORS
    if plain and isinstance(cls, Global) and cls.name in _PLAIN_TENSORS:
        return TENSORS[function.name](*arguments)
    return Foreign(Global(REBUILD), (function, cls, arguments, state))


def class_of(value: Any) -> str:
    """The class name of a tensor subclass; "" for any other value.

    `value` was read from a pickle, in which a tensor subclass is a call that rebuilds it.
    """
    if not isinstance(value, Foreign) or value.name != REBUILD or len(value.arguments) != 4:
        return ""
    cls = value.arguments[1]
    return cls.name if isinstance(cls, Global) else "?"


def shape_of_record(value: Foreign) -> tuple[int, ...] | None:
    """The shape of a tensor subclass, read from the call that rebuilds it; None if it has no shape.

    Only calls of `_rebuild_wrapper_subclass` contain a shape.
    """
    function, _, arguments, _ = value.arguments
    is_wrapper = isinstance(function, Global) and function.name.endswith("_wrapper_subclass")
    sizes = arguments[2] if is_wrapper and isinstance(arguments, tuple) and arguments[2:] else None
    are_sizes = isinstance(sizes, tuple) and all(type(size) is int for size in sizes)
    return tuple(sizes) if sizes is not None and are_sizes else None


REBUILD = "torch._tensor._rebuild_from_type_v2"
_PLAIN_TENSORS = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.Parameter")
TENSORS: dict[str, Build] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _typed_tensor,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
    REBUILD: _from_type,
}
