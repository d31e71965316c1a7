"""Makes objects of Python, torch and numpy from a pickle that was read as plain data, and not run.

A checkpoint's pickles are never run. They are read as plain data, in which an inert record stands
for an object: the name of its class and its state. This module makes objects from these records,
but only of the classes in the tables below: zckpt calls these classes itself, with plain arguments.

If a pickle refers to one value twice, the result has one object for both.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import io
import pathlib
from collections.abc import Callable
from math import prod
from typing import Any

import numpy
import torch
from msgspec import Struct, field
from torch.torch_version import TorchVersion

from ..core.checkpoint.dtypes import TORCH_NAMES
from ..core.checkpoint.inert import Foreign, Global, Scalar, Size, TensorName
from ..files.torchfile import Tensor


class NotLoaded(Exception):
    """Raised if a value cannot be restored.

    The message is a clause, such as `it is an object of ...`.
    """


def rebuilt(value: Any, tensor: Callable[[Any], torch.Tensor]) -> Any:
    """Replaces the inert records in a value (class names with states) by objects of these classes.

    `tensor` loads a tensor in the value. Raises NotLoaded for an object of a class that is not in
    this module's tables.
    """
    try:
        return _Rebuilding(value, tensor).rebuild(value)
    except RecursionError:
        raise NotLoaded("it is nested too deeply, or refers to itself") from None
    except (
        ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError
    ) as error:  # fmt: skip
        raise NotLoaded(f"it is malformed: {error}") from error


class _Rebuilding(Struct, eq=False):
    """Makes objects from the inert records (class names with states) in the value `whole`.

    `done` maps the Python `id` of each converted part to its object, so that a part that occurs
    twice becomes one object.
    """

    whole: Any
    tensor: Callable[[Any], torch.Tensor]
    done: dict[int, Any] = field(default_factory=dict)

    def rebuild(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in _ATOMS:
            return value
        if id(value) in self.done:
            return self.done[id(value)]
        make = _MAKERS.get(kind)
        if make is None:
            raise NotLoaded(f"it holds a {kind.__name__}, which zckpt does not load")
        return self.keep(value, make(self, value))

    def keep(self, value: Any, result: Any) -> Any:
        self.done[id(value)] = result
        return result

    def list_(self, value: list[Any]) -> list[Any]:
        result: list[Any] = self.keep(value, [])  # before its items, because it may contain itself
        result.extend(map(self.rebuild, value))
        return result

    def dict_(self, value: dict[Any, Any]) -> dict[Any, Any]:
        result: dict[Any, Any] = self.keep(value, type(value)())
        for key, item in value.items():
            result[self.rebuild(key)] = self.rebuild(item)
        if hasattr(value, "_metadata"):  # of a module's state_dict
            result._metadata = self.rebuild(value._metadata)  # type: ignore[attr-defined]
        return result

    def named(self, value: Global) -> Any:
        """Returns a class or a constant that a pickle names, such as `torch.float32`."""
        module, _, name = value.name.rpartition(".")
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module == "builtins" and name in _CLASSES:
            return _CLASSES[name]
        raise NotLoaded(self.about(value.name, "the class or function"))

    def foreign(self, value: Foreign) -> Any:
        make = _OBJECTS.get(value.name)
        if make is None or not isinstance(value.function, Global):
            raise NotLoaded(self.about(value.name, "an object of"))
        result = make(self, value)
        if value.appended and hasattr(result, "extend"):
            result.extend(map(self.rebuild, value.appended))
        for key, item in value.items:
            result[self.rebuild(key)] = self.rebuild(item)
        return result

    def arguments(self, value: Foreign) -> list[Any]:
        return [self.rebuild(item) for item in value.arguments]

    def about(self, name: str, what: str) -> str:
        is_whole = isinstance(self.whole, (Foreign, Global)) and self.whole.name == name
        verb = "is" if is_whole else "holds"
        return f"it {verb} {what} {name}, whose pickle would have to be run"


_ATOMS = frozenset({bool, int, float, complex, str, bytes, bytearray})
_CLASSES = {
    cls.__name__: cls
    for cls in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
} | {"long": int, "unicode": str}  # Python 2's names, which pickles of protocol 2 have
_MAKERS: dict[type, Callable[[_Rebuilding, Any], Any]] = {
    list: _Rebuilding.list_,
    dict: _Rebuilding.dict_,
    collections.OrderedDict: _Rebuilding.dict_,
    tuple: lambda self, value: tuple(map(self.rebuild, value)),
    set: lambda self, value: set(map(self.rebuild, value)),
    frozenset: lambda self, value: frozenset(map(self.rebuild, value)),
    Size: lambda self, value: torch.Size(value),
    Scalar: lambda self, value: scalar(value),
    Tensor: lambda self, value: self.tensor(value),
    TensorName: lambda self, value: self.tensor(value),
    Global: _Rebuilding.named,
    Foreign: _Rebuilding.foreign,
}


def scalar(value: Scalar) -> torch.Tensor:
    return torch.tensor(value.value, dtype=getattr(torch, TORCH_NAMES[value.dtype]))


# -- objects of known classes


def _plain(cls: Callable[..., Any]) -> Callable[[_Rebuilding, Foreign], Any]:
    return lambda self, value: cls(*self.arguments(value))


def _path(self: _Rebuilding, value: Foreign) -> pathlib.PurePath:
    cls = pathlib.PurePath if "Pure" in value.name else pathlib.Path
    return cls(*map(str, self.arguments(value)))


def _file(self: _Rebuilding, value: Foreign) -> io.BytesIO:
    """Makes a BytesIO with the data and the position of a pickled one.

    TransformerEngine's modules have such an object in their extra state.
    """
    data, position, _ = value.state
    result = io.BytesIO(data)
    result.seek(position)
    return result


# -- numpy's


def _dtype(self: _Rebuilding, value: Any) -> numpy.dtype[Any]:
    """Restores a numpy type from a pickled `dtype("f4", False, True)` and its state.

    The state has the byte order and, for dates, the unit.
    """
    if not isinstance(value, Foreign) or value.name != "numpy.dtype":
        raise NotLoaded("it holds a numpy array without a dtype")
    result = numpy.dtype(value.arguments[0])
    _, order, *_ = value.state or (0, "|")
    if value.state is not None and result.kind in "mM":
        unit, count, *_ = value.state[-1][1]
        unit = unit.decode() if isinstance(unit, bytes) else unit
        result = numpy.dtype(f"{result.str}[{count}{unit}]")
    if result.hasobject or result.names or result.subdtype:
        raise NotLoaded(f"it holds a numpy array of dtype {result}")
    ordered: numpy.dtype[Any] = result.newbyteorder(order) if order in "<>" else result
    return ordered


def _array(self: _Rebuilding, value: Foreign) -> numpy.ndarray[Any, Any]:
    """Restores an array from `_reconstruct(ndarray, (0,), b"b")` and its pickled state.

    The state is (version, shape, dtype, order, data).
    """
    cls, *_ = value.arguments
    if cls != Global("numpy.ndarray"):
        raise NotLoaded(self.about(getattr(cls, "name", str(cls)), "an object of"))
    _, shape, dtype, is_fortran, data = value.state
    return _numbers(data, _dtype(self, dtype), shape, "F" if is_fortran else "C")


def _buffer(self: _Rebuilding, value: Foreign) -> numpy.ndarray[Any, Any]:
    """Restores an array from `_frombuffer(data, dtype, shape, order)` (pickle protocol 5)."""
    data, dtype, shape, order = value.arguments
    return _numbers(data, _dtype(self, dtype), shape, order)


def _numbers(
    data: bytes, dtype: numpy.dtype[Any], shape: tuple[int, ...], order: Any
) -> numpy.ndarray[Any, Any]:
    if min(shape, default=0) < 0 or prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for an array of shape {shape}")
    return numpy.ndarray(shape, dtype, bytes(data), order=order).copy(order="K")


def _numpy_scalar(self: _Rebuilding, value: Foreign) -> Any:
    dtype, data = value.arguments
    return numpy.frombuffer(data, _dtype(self, dtype), 1)[0]


_PLAIN: tuple[type, ...] = (
    *(torch.device, TorchVersion, range, slice, decimal.Decimal),
    *(collections.defaultdict, collections.Counter, collections.deque),
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
)
"""Classes that are called with the arguments in the pickle."""
_NUMPY: dict[str, Callable[[_Rebuilding, Foreign], Any]] = {
    "multiarray._reconstruct": _array,
    "multiarray.scalar": _numpy_scalar,
    "numeric._frombuffer": _buffer,
}
_OBJECTS: dict[str, Callable[[_Rebuilding, Foreign], Any]] = {
    **{f"{cls.__module__}.{cls.__qualname__}": _plain(cls) for cls in _PLAIN},
    "builtins.xrange": _plain(range),
    **{
        f"{module}.{name}": _path
        for module in ("pathlib", "pathlib._local")  # Python 3.13's
        for name in ("PosixPath", "PurePosixPath")
    },
    "argparse.Namespace": lambda self, value: argparse.Namespace(**self.rebuild(value.state or {})),
    "_io.BytesIO": _file,
    "numpy.dtype": _dtype,
    **{f"numpy.{core}.{name}": make for core in ("core", "_core") for name, make in _NUMPY.items()},
}
