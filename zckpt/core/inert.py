"""How are objects of a pickle kept whose classes are never imported: in memory, and as JSON?

A checkpoint's pickle names classes of engines and of users. zckpt imports none of them. An object
becomes a `Foreign` record (which global, which arguments, which state); a bare class or dtype
becomes a `Global`. Both survive as JSON in a universal manifest, and can be written into a pickle
again as the same global.

JSON has no tuples, sets, bytes, integer keys or NaN. They are written as objects with one `$` key.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ..errors import CorruptCheckpoint

MAX_DEPTH = 100
MAX_VALUES = 5_000_000  # a small pickle that refers to itself over and over stops here


PYTHON_NUMBERS: dict[str, type[int] | type[float]] = {"int": int, "float": float, "bool": bool}
"""The types of a `Scalar` that is a Python number, not a tensor."""


def is_dotted(name: Any) -> bool:
    """Whether a name is that of a module and of something in it: `module.name`."""
    parts = name.split(".") if isinstance(name, str) else ()
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


class Size(tuple):  # type: ignore[type-arg]
    """A torch.Size."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Global:
    """A class, function or constant that a pickle names: `torch.float32`.

    Raises CorruptCheckpoint for a name that is not a dotted identifier: in a pickle, a line's end
    in a name would begin another instruction.
    """

    name: str

    def __post_init__(self) -> None:
        if not is_dotted(self.name):
            raise CorruptCheckpoint(f"{self.name!r} is not the name of a class or function")


@dataclass(slots=True, eq=False)
class Foreign:
    """An object of a class that is not imported: `function(*arguments)`, then `state`.

    `how` is the pickle's way to create it: "call" (REDUCE) or "new" (NEWOBJ: `cls.__new__`).
    `appended` holds the values that APPENDS put into it, `items` the pairs of SETITEMS.
    """

    function: Global | Foreign
    arguments: tuple[Any, ...] = ()
    state: Any = None
    how: str = "call"
    keywords: dict[str, Any] = field(default_factory=dict)
    appended: list[Any] = field(default_factory=list)
    items: list[tuple[Any, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The dotted name of the class or function."""
        function = self.function
        while isinstance(function, Foreign):  # the result of a call, which is called again
            function = function.function
        return function.name


@dataclass(frozen=True, slots=True)
class Scalar:
    """A tensor of one element, by value; `dtype` as safetensors names it.

    A Python number has the dtype `int`, `float` or `bool`, and no shape.
    """

    value: float | int | bool
    dtype: str
    shape: tuple[int, ...] = ()

    def unwrapped(self) -> Scalar | float | int | bool:
        """The number itself if this is a Python number; otherwise this scalar."""
        kind = PYTHON_NUMBERS.get(self.dtype)
        return self if kind is None else kind(self.value)


@dataclass(frozen=True, slots=True)
class TensorName:
    """A tensor inside the state, by the name of its manifest entry (slot `state`)."""

    name: str


def map_values(value: Any, change: Callable[[Any, Any], Any]) -> Any:
    """A copy of a container with items `change(item, key)`; each key occurs once in a container."""
    kind = type(value)
    if kind in (dict, OrderedDict):
        return kind((key, change(item, key)) for key, item in value.items())
    if kind in (list, tuple, Size):
        return kind(change(item, number) for number, item in enumerate(value))
    if kind is Foreign:
        return Foreign(
            value.function,
            tuple(change(item, ("argument", n)) for n, item in enumerate(value.arguments)),
            change(value.state, "state"),
            value.how,
            {key: change(item, ("keyword", key)) for key, item in value.keywords.items()},
            [change(item, ("appended", n)) for n, item in enumerate(value.appended)],
            [(key, change(item, ("item", key))) for key, item in value.items],
        )
    return value


def inside(path: str, key: Any) -> str:
    """The path of an item: `client_state.rng`. Odd keys are written as by `repr`, so all differ."""
    plain = isinstance(key, str) and re.fullmatch(r"[^\W\d][\w-]*", key)
    return f"{path}.{key if plain else repr(key)}"


def to_json(value: Any) -> Any:
    """Tagged JSON; raises CorruptCheckpoint for cycles and for types that no pickle should hold."""
    budget = MAX_VALUES

    def spend(count: int) -> None:
        nonlocal budget
        budget -= count
        if budget < 0:
            raise CorruptCheckpoint("state is too large, or refers to itself")

    def encode(value: Any, depth: int) -> Any:
        # long strings cost more: a pickle may refer to the same one a million times
        spend(1 + (len(value) // 100 if isinstance(value, (str, bytes, bytearray)) else 0))
        if depth > MAX_DEPTH:
            raise CorruptCheckpoint("state is nested too deeply, or refers to itself")

        def each(values: Iterable[Any]) -> list[Any]:
            return [encode(item, depth + 1) for item in values]

        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if value.bit_length() <= 4096 else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if kind is list:
            return each(value)
        if kind is dict:
            if all(type(key) is str for key in value) and not any(k[:1] == "$" for k in value):
                spend(sum(map(len, value)) // 100)
                return {key: encode(item, depth + 1) for key, item in value.items()}
            return {"$dict": [each(pair) for pair in value.items()]}
        if kind in (set, frozenset):  # sorted, so that the JSON is the same every time
            return {f"${kind.__name__}": sorted(each(value), key=json.dumps)}
        if kind is Foreign:
            parts = {
                "function": encode(value.function, depth + 1),
                "arguments": each(value.arguments),
                "state": encode(value.state, depth + 1),
                "how": value.how,
            }
            if value.keywords:
                parts["keywords"] = encode(value.keywords, depth + 1)
            if value.appended:
                parts["appended"] = each(value.appended)
            if value.items:
                parts["items"] = [each(pair) for pair in value.items]
            return {"$object": parts}
        tag = _TAGS.get(kind)
        if tag is None:
            raise CorruptCheckpoint(f"state holds a value of type {kind.__name__}")
        name, plain = tag
        return {name: encode(plain(value), depth + 1)}

    return encode(value, 0)


def plain_group(group: dict[str, Any]) -> dict[str, Any]:
    """Hyper-parameters as JSON that people expect: tuples are lists (betas)."""
    return {
        key: to_json(list(value) if type(value) is tuple else value) for key, value in group.items()
    }


def from_json(value: Any) -> Any:
    """The inverse of `to_json`; raises CorruptCheckpoint for an unknown tag."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, inner),) = value.items()
        if tag == "$object":
            return _foreign(inner)
        if tag in _MAKERS:
            return _MAKERS[tag](from_json(inner))
        if tag.startswith("$"):
            raise CorruptCheckpoint(f"state holds an unknown tag {tag!r}")
    return {key: from_json(item) for key, item in value.items()}


def _foreign(parts: dict[str, Any]) -> Foreign:
    return Foreign(
        from_json(parts["function"]),
        tuple(from_json(parts["arguments"])),
        from_json(parts["state"]),
        parts["how"],
        from_json(parts.get("keywords", {})),
        from_json(parts.get("appended", [])),
        [(key, item) for key, item in from_json(parts.get("items", []))],
    )


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(bytes(data)).decode("ascii")


# type -> (tag, a function to the tag's value); and the inverse functions
_TAGS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    tuple: ("$tuple", list),
    Size: ("$size", list),
    bytes: ("$bytes", _base64),
    bytearray: ("$bytearray", _base64),
    complex: ("$complex", lambda value: [value.real, value.imag]),
    OrderedDict: ("$ordered", lambda value: [list(pair) for pair in value.items()]),
    Global: ("$global", lambda value: value.name),
    Scalar: (
        "$scalar",
        lambda value: [value.value, value.dtype, *([list(value.shape)] if value.shape else [])],
    ),
    TensorName: ("$tensor", lambda value: value.name),
}
_MAKERS: dict[str, Callable[[Any], Any]] = {
    "$tuple": tuple,
    "$size": Size,
    "$set": set,
    "$frozenset": frozenset,
    "$bytes": base64.b64decode,
    "$bytearray": lambda text: bytearray(base64.b64decode(text)),
    "$complex": lambda parts: complex(*parts),
    "$ordered": lambda pairs: OrderedDict((key, item) for key, item in pairs),
    "$dict": lambda pairs: dict(map(tuple, pairs)),
    "$float": float,
    "$int": lambda text: int(text, 16),
    "$global": Global,
    "$scalar": lambda parts: Scalar(*parts[:2], *map(tuple, parts[2:])),
    "$tensor": TensorName,
}
