"""Keeps objects of a pickle whose classes are never imported, in memory and as JSON.

A checkpoint's pickle names classes of engines and of users. zckpt imports none of them. An object
becomes a `Foreign` record (which global, which arguments, which state); a bare class or dtype
becomes a `Global`. Both survive as JSON in a universal manifest, and can be written into a pickle
again as the same global.

JSON has no tuples, sets, bytes, integer keys or NaN. They are written as objects with one `$` key.
"""

import base64
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from msgspec import Struct, field

from ...errors import MALFORMED, CorruptCheckpoint, brief
from .dtypes import NUMBERS, SIZES

MAX_DEPTH = 100
MAX_NESTING = 150  # levels of a pickle; recursive functions take four frames for each level
MAX_VALUES = 5_000_000  # a small pickle that refers to itself over and over is stopped here
MAX_PATH = 1000  # characters
MAX_INTEGER = 1024  # bytes; Python writes no integer of more than 4300 digits (1785 bytes)
MAX_EQUAL_HASHES = 100
PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray})
"""The types of values that contain no other values: numbers, texts and the like."""
OWN_HASH = 1 << 60  # smaller integers are their own hashes, so no two of them have the same hash


PYTHON_NUMBERS: dict[str, type[int] | type[float]] = {"int": int, "float": float, "bool": bool}
"""The dtypes of a `Scalar` that is a Python number, not a tensor."""


def is_dotted(name: Any) -> bool:
    """Whether a name is a dotted path of identifiers: `module.name`."""
    parts = name.split(".") if isinstance(name, str) else ()
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


class Size(tuple):  # type: ignore[type-arg]
    """A torch.Size in a pickle, kept without importing torch."""

    __slots__ = ()


class Global(Struct, frozen=True):
    """The name of a class, function or constant in a pickle, such as `torch.float32`; not imported.

    Raises CorruptCheckpoint unless the name is a dotted path of identifiers. In a pickle, a line
    end inside a name would begin another instruction.
    """

    name: str

    def __post_init__(self) -> None:
        if not is_dotted(self.name):
            raise CorruptCheckpoint(
                "file-damaged", f"{brief(self.name)} is not the name of a class or function"
            )


known_global = lru_cache(1 << 10)(Global)
"""Makes a `Global` (the name of a class or function in a pickle), or takes it from a cache."""
# the items of OmegaConf's containers refer to their container as `_parent`
ITSELF = Global("zckpt.itself")
"""Replaces an object's reference to itself, so that recursive functions end.

A value with it cannot be written to a pickle.
"""


class Foreign(Struct, eq=False):
    """An object in a pickle whose class is not imported, as the data that would create it.

    function, arguments    the call that creates the object
    how                    "call" (the pickle's REDUCE) or "new" (NEWOBJ: cls.__new__)
    state                  what BUILD would set
    appended, items        what APPENDS and SETITEMS would add
    """

    function: "Global | Foreign"
    arguments: tuple[Any, ...] = ()
    state: Any = None
    how: str = "call"
    keywords: dict[str, Any] = field(default_factory=dict)
    appended: list[Any] = field(default_factory=list)
    items: list[tuple[Any, Any]] = field(default_factory=list)

    @classmethod
    def instance(cls, name: str, **attributes: Any) -> "Foreign":
        """The record of an instance of class `name` with these attributes, as pickle creates it."""
        return cls(known_global(name), (), attributes or None, "new")

    def __repr__(self) -> str:
        return f"<object of {self.name}>"

    @property
    def name(self) -> str:
        """The dotted name of the object's class, or of the function that creates it."""
        function = self.function
        while isinstance(function, Foreign):  # the result of a call, which is called again
            function = function.function
        return function.name


class Scalar(Struct, frozen=True):
    """A number: a tensor of one element, or a Python number.

    `dtype` is the tensor's dtype as in safetensors (`F32`). For a Python number it is `int`,
    `float` or `bool`, and `shape` is empty.
    """

    value: float | int | bool
    dtype: str
    shape: tuple[int, ...] = ()

    def unwrapped(self) -> "Scalar | float | int | bool":
        """Returns a Python number as a plain `int`, `float` or `bool`, and a tensor unchanged."""
        kind = PYTHON_NUMBERS.get(self.dtype)
        return self if kind is None else kind(self.value)


class TensorName(Struct, frozen=True):
    """Stands for a tensor inside the program's saved state, such as a random state.

    The tensor itself is in the manifest, under the parameter name `name` and the slot `state`.
    """

    name: str


def is_number(value: Any, tensor: type[Any]) -> bool:
    """Whether a value is one number: a Python number, or a one-element instance of `tensor`."""
    if isinstance(value, tensor):
        return bool(value.numel == 1 and value.dtype in NUMBERS)
    return type(value) in PYTHON_NUMBERS.values()


def types_in(values: Iterable[Any]) -> set[type]:
    """The set of the values' types, found without a Python loop: lists may be very long."""
    return set(map(type, values))


def map_values(value: Any, change: Callable[[Any, Any], Any]) -> Any:
    """Copies a container, and replaces each item by `change(item, key)`.

    `key` is the item's key in a dictionary, its index in a list, or a name of its place in an
    object, such as `("argument", 0)`. In dictionaries and lists, numbers, strings and other items
    of the types PLAIN stay as they are.
    """
    kind = type(value)

    def changed(item: Any, key: Any) -> Any:
        return item if type(item) in PLAIN else change(item, key)

    if kind in (dict, OrderedDict):
        if types_in(value.values()) <= PLAIN:
            return kind(value)
        return kind([(key, changed(item, key)) for key, item in value.items()])
    if kind in (list, tuple, Size):
        if types_in(value) <= PLAIN:
            return kind(value)
        return kind([changed(item, number) for number, item in enumerate(value)])
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
    """Appends a key to the path of a container, as in `client_state.rng`.

    Different keys give different paths. Unusual keys are written as by `repr`. A path longer than
    MAX_PATH ends with a hash instead, because every value below a long key would repeat that key.
    """
    full = f"{path}.{key if isinstance(key, str) and _is_word(key) else repr(key)}"
    if len(full) <= MAX_PATH:
        return full
    import hashlib

    digest = hashlib.sha256(full.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{full[: MAX_PATH // 2]}...{digest[:32]}"


def nested(value: Any, *keys: Any) -> Any:
    """Returns value[key][key]..., or None if any key is missing."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _is_word(key: str) -> bool:
    letters = key.replace("_", "a")
    first = letters[:1]
    return letters.replace("-", "a").isalnum() and first != "-" and not first.isdecimal()


# -- how much work a value is


_PLAIN_NUMBERS = frozenset({type(None), bool, int, float})
_TEXTS = frozenset({str, bytes, bytearray})
_TUPLES = frozenset({tuple, Size})
_NESTING = frozenset({dict, OrderedDict, list, tuple, Size, set, frozenset, Foreign})


def _too_many(most: int, noun: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        "file-damaged",
        f"the pickle has more than {most:,} {noun} (a shared one counts once per reference)",
    )


def require_tree(
    value: Any, most: int, most_containers: int, most_nested: int = MAX_NESTING
) -> None:
    """Raises CorruptCheckpoint for a value that is too large or deep for recursive functions.

    A container counts once per reference, since a recursive function visits it as often.

        most               allowed number of values; a key is one, and 64 characters of text are one
        most_containers    allowed number of containers
        most_nested        allowed depth

    A container that contains itself is refused. An object's reference to itself is replaced by
    ITSELF.
    """
    # of each finished container: values, containers, depth
    done: dict[int, tuple[int, int, int]] = {}
    begun: dict[int, tuple[int, list[Any]]] = {}
    waiting = [value] if type(value) in _NESTING else []
    while waiting:
        top = waiting[-1]
        key = id(top)
        if key in begun:
            count, parts = begun.pop(key)
            sizes = [done[id(part)] for part in parts]
            # a small pickle can refer to one container a million times
            values = count + sum([size[0] for size in sizes])
            containers = 1 + sum([size[1] for size in sizes])
            depth = 1 + max([size[2] for size in sizes], default=0)
            if values > most:
                raise _too_many(most, "values")
            if containers > most_containers:
                raise _too_many(most_containers, "lists and dictionaries")
            if depth > most_nested:
                raise CorruptCheckpoint(
                    "file-damaged", f"values are nested more than {most_nested} levels deep"
                )
            done[key] = values, containers, depth
        if key in done:
            waiting.pop()
            continue
        items = _parts(top)
        kinds = types_in(items)
        parts = [item for item in items if type(item) in _NESTING] if kinds & _NESTING else []
        if len(items) > 2 * most:
            raise _too_many(most, "values")
        if len(done) + len(begun) + len(parts) > most_containers:
            raise _too_many(most_containers, "lists and dictionaries")
        texts = [item for item in items if type(item) in _TEXTS] if kinds & _TEXTS else ()
        work = len(items)
        if type(top) is dict:
            work = 2 * len(top)
        elif type(top) is list and kinds <= _PLAIN_NUMBERS:
            work //= 2  # two numbers count as one value
        work += sum(map(len, texts)) // 64
        if not parts and work <= most:  # the usual case: no part has to be done first
            done[key] = work, 1, 1
            waiting.pop()
            continue
        begun[key] = work, parts
        if not begun.keys().isdisjoint(map(id, parts)):
            _replace_cycles(top, begun)
            parts[:] = [part for part in parts if id(part) not in begun]
        for part in parts:
            if id(part) not in done:
                if type(part) in _TUPLES and types_in(part) <= _PLAIN_NUMBERS:  # there may be many
                    done[id(part)] = len(part), 1, 1
                else:
                    waiting.append(part)


def _replace_cycles(value: Any, outer: Collection[int]) -> None:
    """Puts ITSELF in place of references from `value` back to an object that contains it.

    `outer` has the ids of all containers and objects around `value`. Raises CorruptCheckpoint for
    any other reference back, such as to a list, or from a tuple.
    """
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, list):
        pairs = enumerate(value)
    for place in [key for key, part in pairs if type(part) is Foreign and id(part) in outer]:
        value[place] = ITSELF
    if any(id(part) in outer for part in _parts(value)):
        raise CorruptCheckpoint("file-damaged", "a value refers to itself")


def _parts(value: Any) -> Collection[Any]:
    """The values that a container refers to; a value with two references is listed twice."""
    if isinstance(value, dict):
        parts = [*value.values()]
        if not types_in(value) <= {int, Global}:
            parts += [key for key in value if type(key) not in (int, Global)]
        if hasattr(value, "_metadata"):  # of a module's state dict
            parts.append(value._metadata)
        return parts
    if isinstance(value, Foreign):
        pairs = [part for pair in value.items for part in pair]
        named = [*value.keywords.values(), *value.keywords]
        return [value.function, value.state, *value.arguments, *named, *value.appended, *pairs]
    items: Collection[Any] = value
    return items


def require_spread(keys: Iterable[Hashable]) -> None:
    """Raises CorruptCheckpoint if many keys of one dictionary or set have the same hash.

    Python randomizes only the hashes of strings and bytes. A hostile file could contain many
    numbers with one hash, and every insertion would compare the new key with all earlier keys.
    """
    keys = list(keys)
    numbers = [key for key in keys if type(key) is int]
    if types_in(keys) <= {str, int} and (not numbers or max(map(abs, numbers)) < OWN_HASH):
        return
    hashes = Counter([hash(key) for key in keys if type(key) is not str])
    if hashes and max(hashes.values()) > MAX_EQUAL_HASHES:
        raise CorruptCheckpoint(
            "file-damaged",
            f"a dictionary or set has more than {MAX_EQUAL_HASHES} keys with the same hash, as "
            "only a file made to slow down its reader has",
        )


def to_json(value: Any) -> Any:
    """Encodes a value as tagged JSON: `{"$tuple": [1, 2]}` stands for a tuple, and so on.

    Raises CorruptCheckpoint for a value that is too large, or of a type that no pickle yields.
    """
    if type(value) in _NESTING:
        require_tree(value, MAX_VALUES, MAX_VALUES, MAX_DEPTH)
    return _encoded(value)


def _encoded(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if value.bit_length() <= 4096 else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is list:
        return _items(value)
    if kind is tuple:
        return {"$tuple": _items(value)}
    if kind is dict:
        if all(type(key) is str for key in value) and not any(k[:1] == "$" for k in value):
            return dict(zip(value, _items(value.values()), strict=True))
        return {"$dict": [_items(pair) for pair in value.items()]}
    if kind in (set, frozenset):  # sorted, to make the JSON the same every time
        return {f"${kind.__name__}": sorted(_items(value), key=json.dumps)}
    if kind is Foreign:
        parts = {
            "function": _encoded(value.function),
            "arguments": _items(value.arguments),
            "state": _encoded(value.state),
            "how": value.how,
        }
        if value.keywords:
            parts["keywords"] = _encoded(value.keywords)
        if value.appended:
            parts["appended"] = _items(value.appended)
        if value.items:
            parts["items"] = [_items(pair) for pair in value.items]
        return {"$object": parts}
    tag = _TAGS.get(kind)
    if tag is None:
        raise CorruptCheckpoint(
            "file-damaged", f"the state contains an object of type {kind.__name__}"
        )
    name, plain = tag
    return {name: _encoded(plain(value))}


def _items(values: Iterable[Any]) -> list[Any]:
    return list(map(_encoded, values))


def by_value(value: Any) -> Any:
    """Converts a value so that `==` compares contents: scalars become numbers, lists tuples."""
    if isinstance(value, Scalar):
        return value.value
    if isinstance(value, Mapping):
        return {key: by_value(item) for key, item in value.items()}
    return tuple(map(by_value, value)) if isinstance(value, (list, tuple)) else value


def plain_group(group: dict[str, Any]) -> dict[str, Any]:
    """Converts the hyper-parameters of a param group to plain JSON for reports; no tuples."""
    return {
        key if type(key) is str else brief(key): to_json(
            list(value) if type(value) is tuple else value
        )
        for key, value in group.items()
    }


def from_json(value: Any) -> Any:
    """Decodes tagged JSON, the result of `to_json`; raises CorruptCheckpoint for other JSON."""
    try:
        result = _decoded(value)
    except MALFORMED as error:
        raise CorruptCheckpoint(
            "file-damaged", f"the saved state has a value of a wrong type: {brief(value)}"
        ) from error
    if type(result) in _NESTING:
        # the limit is higher, since keys and texts count more here
        require_tree(result, 3 * MAX_VALUES, MAX_VALUES)
    return result


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [item if type(item) in PLAIN else _decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, inner),) = value.items()
        if tag == "$object":
            return _foreign(inner)
        if tag in _MAKERS:
            return _MAKERS[tag](_decoded(inner))
        if tag.startswith("$"):
            raise CorruptCheckpoint(
                "file-damaged", f"the saved state has an unknown tag {brief(tag)}"
            )
    return {key: _decoded(item) for key, item in value.items()}


def _foreign(parts: dict[str, Any]) -> Foreign:
    function, keywords = _decoded(parts["function"]), _decoded(parts.get("keywords", {}))
    if not isinstance(function, (Global, Foreign)) or parts["how"] not in ("call", "new"):
        raise CorruptCheckpoint("file-damaged", "the saved state has an object without a class")
    if not isinstance(keywords, dict) or not all(type(key) is str for key in keywords):
        raise CorruptCheckpoint(
            "file-damaged", f"the saved state has a malformed object of {function.name}"
        )
    return Foreign(
        function,
        tuple(_list(_decoded(parts["arguments"]))),
        _decoded(parts["state"]),
        parts["how"],
        keywords,
        _list(_decoded(parts.get("appended", []))),
        [(key, item) for key, item in _list(_decoded(parts.get("items", [])))],
    )


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("not a list")
    return value


def _keys(value: Any) -> list[Any]:
    require_spread(_list(value))
    return _list(value)


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    pairs = [(key, item) for key, item in _list(value)]
    require_spread(key for key, _ in pairs)
    return pairs


def _integer(text: Any) -> int:
    if len(text) > 2 * MAX_INTEGER + 3:  # hex digits after "-0x"
        raise ValueError("too long")
    return int(text, 16)


def _scalar(parts: Any) -> Scalar:
    value, dtype, *shapes = _list(parts)
    has_known_type = isinstance(dtype, str) and (dtype in SIZES or dtype in PYTHON_NUMBERS)
    if not has_known_type or type(value) not in (bool, int, float) or len(shapes) > 1:
        raise TypeError("not a number")
    shape = tuple(_list(shapes[0])) if shapes else ()
    if any(size != 1 for size in shape):
        raise TypeError("not one number")
    return Scalar(value, dtype, shape)


def _tensor_name(name: Any) -> TensorName:
    if not isinstance(name, str):
        raise TypeError("not a name")
    return TensorName(name)


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(bytes(data)).decode("ascii")


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


# type -> (tag, a function that gives the tag's value); then the inverse functions
_TAGS: dict[type, tuple[str, Callable[[Any], Any]]] = {
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
    "$tuple": lambda items: tuple(_list(items)),
    "$size": lambda items: Size(_list(items)),
    "$set": lambda items: set(_keys(items)),
    "$frozenset": lambda items: frozenset(_keys(items)),
    "$bytes": _from_base64,
    "$bytearray": lambda text: bytearray(_from_base64(text)),
    "$complex": lambda parts: complex(*parts),
    "$ordered": lambda pairs: OrderedDict(_pairs(pairs)),
    "$dict": lambda pairs: dict(_pairs(pairs)),
    "$float": float,
    "$int": _integer,
    "$global": Global,
    "$scalar": _scalar,
    "$tensor": _tensor_name,
}


def alike(a: Any, b: Any) -> bool:
    """Whether two values are equal. NaN equals NaN, and a tuple equals a list with equal items."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b) or (a != a and b != b)
