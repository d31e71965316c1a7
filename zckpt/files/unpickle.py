"""Reads a pickle as plain data: imports nothing, calls nothing that the pickle names.

Over 600 lines: one closed table of opcodes, which should be visible in one file.

The standard Unpickler with a guarded `find_class` would be half as long. But it calls the classes
that it resolves and sets attributes on them, and a hostile memo index or nested key can exhaust
memory or the C stack. Here every opcode either builds plain data or leaves an inert record (see
inert.py). `table` maps the dotted names of globals to functions that build a value from arguments.
"""

from __future__ import annotations

import codecs
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from ..core.checkpoint.inert import (
    MAX_INTEGER,
    OWN_HASH,
    Foreign,
    Global,
    Size,
    require_spread,
    require_tree,
    types_in,
)
from ..core.passes.resources import uncollected
from ..core.storage import sources
from ..errors import MALFORMED, CorruptCheckpoint
from .dcprows import ROWS, Rows, Unusual

Build = Callable[..., Any]
MAX_KEY_DEPTH = 16
MAX_KEY_ITEMS = 1000
MAX_MEMO = 1 << 32  # the limit of memo numbers; LONG_BINPUT has four bytes for them
# The most values that a pickle may build, counted at every reference, and the most containers among
# them. One more is allowed for every BYTES_FOR_ONE bytes beyond SMALL: a file of 10 MB should take
# less than 5 seconds, a larger one may take more. A short pickle may have as many: a reference
# takes two bytes. The metadata of torch.distributed.checkpoint has a value for 4 bytes and a
# container for 12.
MOST_VALUES, MOST_CONTAINERS = 4_000_000, 1_500_000
SMALL, BYTES_FOR_ONE = 10_000_000, 3
# The most work that a pickle may need: a fixed number, and more for each of its bytes. Copying a
# value counts as one, and so does comparing a key with another. In `.metadata`, a box has three
# calls and five containers in 35 bytes, a tensor as many in 60.
SPARE_WORK, WORK_PER_BYTE, CALL, CONTAINER = 2_000_000, 4, 20, 13


def _encode(text: str, encoding: str = "latin1") -> bytes:
    # protocol 2 has no bytes: b"..." is _codecs.encode("...", "latin1")
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise CorruptCheckpoint(
            "file-damaged", "a pickle encodes text in a way that no pickler writes"
        )
    return text.encode("latin1")


BUILTINS: dict[str, Build] = {
    "collections.OrderedDict": lambda pairs=(): OrderedDict(_pairs(pairs) if pairs != () else ()),
    "_codecs.encode": _encode,
    "builtins.set": lambda items=(): set(_keys(items)),
    "builtins.frozenset": lambda items=(): frozenset(_keys(items)),
    "builtins.bytes": lambda data=(): bytes(_octets(data)),
    "builtins.bytearray": lambda data=(), encoding="latin1": bytearray(
        _encode(data, encoding) if isinstance(data, str) else _octets(data)
    ),
    "builtins.complex": complex,
    "torch.Size": lambda items=(): Size(items),
}


def _octets(data: Any) -> bytes | list[int] | tuple[int, ...]:
    if not isinstance(data, (bytes, list, tuple)):  # bytes(number) would allocate `number` bytes
        raise CorruptCheckpoint("file-damaged", "a pickle builds bytes from a value that has none")
    return data


def _pairs(pairs: Any) -> list[tuple[Hashable, Any]]:
    pairs = [(_key(key), value) for key, value in pairs]
    require_spread(key for key, _ in pairs)
    return list(pairs)


def _keys(values: Any) -> list[Hashable]:
    keys = [_key(value) for value in values]
    require_spread(keys)
    return keys


def _key(value: Any) -> Hashable:
    """Returns `value` if it may be a key of a dictionary; raises CorruptCheckpoint otherwise.

    A key must be hashable, and not be nested so deeply that hashing would exhaust the C stack.
    """
    _parts_of_key(value)
    if not isinstance(value, Hashable):
        raise CorruptCheckpoint("file-damaged", "a pickle uses a list or dictionary as a key")
    return value


def _parts_of_key(value: Any) -> int:
    """The number of values in a key that is a tuple, including nested tuples; 0 for other keys."""
    nested, depth, total = [value] if isinstance(value, (tuple, frozenset)) else [], 0, 0
    while nested:
        depth += 1
        count = sum(map(len, nested))
        total += count
        if depth > MAX_KEY_DEPTH or count > MAX_KEY_ITEMS:
            raise CorruptCheckpoint("file-damaged", "a pickle nests a dictionary key too deeply")
        nested = [
            item for outer in nested for item in outer if isinstance(item, (tuple, frozenset))
        ]
    return total


class Unpickler:
    """Reads one pickle of `data` from `start`; afterwards `position` is the first byte after it.

    table         maps the names of allowed functions to code that builds their values
    persistent    converts a persistent id (torch: a storage) to a value
    collects      a type; built values of this type are also put into `collected`
    rows          for `.metadata`: stores chunks and locations as numbers (see dcprows.py). If
                  Unusual is raised, read the pickle again without `rows`
    is_trusted    zckpt has just written the pickle: `require_tree` does not check its value

    Raises CorruptCheckpoint for a malformed pickle, and for more work than any valid one of this
    length needs.
    """

    def __init__(
        self,
        data: Any,
        start: int = 0,
        *,
        table: Mapping[str, Build] = BUILTINS,
        persistent: Callable[[Any], Any] | None = None,
        most_values: int = MOST_VALUES,
        most_containers: int = MOST_CONTAINERS,
        collects: type | None = None,
        rows: Rows | None = None,
        is_trusted: bool = False,
    ) -> None:
        self.data = data
        self.is_trusted = is_trusted
        self.rows = rows
        self.collects = collects
        self.collected: list[Any] = []
        beyond = max(len(data) - start - SMALL, 0) // BYTES_FOR_ONE
        self.most_values = most_values + beyond
        self.most_containers = most_containers + beyond
        self.position = start
        self.table = table
        self.persistent = persistent
        self.stack: list[Any] = []  # the values above the topmost mark
        self.marked: list[list[Any]] = []  # the stacks below each mark
        self.start = start
        self.work = 0
        # how often a container has keys with one hash; texts are not counted
        self.hashes: Counter[tuple[int, int]] = Counter()
        self.memo: dict[int, Any] = {}
        self.globals: dict[str, Global] = {}

    def load(self) -> Any:
        """Reads the value of the pickle.

        The garbage collector is stopped meanwhile, since it would find nothing. The names of all
        classes and functions in the pickle are recorded (`sources.note_objects`), even if the value
        contains nothing that they built.
        """
        with uncollected():
            try:
                value = self._load()
                sources.note_objects(self.globals)
                return value
            finally:
                self.memo, self.persistent = {}, None  # `persistent` may be a method of this object

    def _load(self) -> Any:
        try:
            self._operate()
            value = self.stack.pop()
        except struct.error as error:
            raise CorruptCheckpoint("file-damaged", "a pickle ends early") from error
        except MemoryError as error:
            self.stack, self.marked, self.memo = [], [], {}
            raise CorruptCheckpoint(
                "file-damaged", "a pickle needs more memory than there is"
            ) from error
        except MALFORMED as error:
            raise CorruptCheckpoint(
                "file-damaged", f"malformed pickle near byte {self.position}"
            ) from error
        if self.stack or self.marked:
            raise CorruptCheckpoint("file-damaged", "a pickle ends with more than one value")
        if not self.is_trusted:
            require_tree(value, self.most_values, self.most_containers)
        return value

    def _operate(self) -> None:
        """Carries out opcodes up to the last one.

        Opcodes that are frequent in pickles of tensors are carried out in this method itself, which
        takes a third of the time of a call.
        """
        data, memo, marked, position = self.data, self.memo, self.marked, self.position
        rows = self.rows
        dispatch, number = _OPCODES, _NUMBER.unpack_from
        stack = self.stack
        try:
            while True:
                code = data[position]
                position += 1
                if code == _MEMOIZE:
                    memo[len(memo) + (rows.skipped if rows is not None else 0)] = stack[-1]
                elif code == _LONG_BINPUT:
                    place = number(data, position)[0]
                    if rows is not None and place != len(memo) + rows.skipped:
                        raise Unusual
                    memo[place] = stack[-1]
                    position += 4
                elif code in (_LONG_BINGET, _BINGET):
                    if code == _BINGET:
                        place = data[position]
                        position += 1
                    else:
                        place = number(data, position)[0]
                        position += 4
                    if place not in memo and rows is not None:
                        stack.append(rows.recall(place))
                        continue
                    value = memo[place]
                    if rows is not None and type(value) is Global:
                        row = rows.match(value.name, data, position, memo)
                        if row is not None:
                            values, position = row
                            stack.extend(values)
                            continue
                    stack.append(value)
                elif code == _BININT1:
                    stack.append(data[position])
                    position += 1
                elif code == _BINUNICODE:
                    start = position + 4
                    position = start + number(data, position)[0]
                    if position > len(data):
                        raise CorruptCheckpoint("file-damaged", "a pickle ends early")
                    stack.append(str(data[start:position], "utf-8", "surrogatepass"))
                elif code == _TUPLE1:
                    self.position = position
                    self.spend(CONTAINER)
                    stack[-1] = (stack[-1],)
                elif code == _REDUCE:
                    self.position = position
                    arguments = stack.pop()
                    stack[-1] = self.call(stack[-1], arguments)
                elif code == _TUPLE:
                    self.position = position
                    self.spend(CONTAINER)
                    value = tuple(self.pop_mark())
                    stack = self.stack
                    stack.append(value)
                elif code == _MARK:
                    marked.append(stack)
                    self.stack = stack = []
                elif code == _BINPUT:
                    place = data[position]
                    if rows is not None and place != len(memo) + rows.skipped:
                        raise Unusual
                    memo[place] = stack[-1]
                    position += 1
                elif code == _EMPTY_TUPLE:
                    stack.append(())
                elif code == _STOP:
                    return
                else:
                    self.position = position
                    dispatch[code](self)
                    position, stack = self.position, self.stack
        finally:
            self.position = max(self.position, position)

    # -- bytes

    def take(self, count: int) -> bytes:
        start = self.position
        self.position = start + count
        taken = bytes(self.data[start : self.position])
        if len(taken) != count:
            raise CorruptCheckpoint("file-damaged", "a pickle ends early")
        return taken

    def number(self, form: str, size: int) -> Any:
        value = struct.unpack_from(form, self.data, self.position)[0]
        self.position += size
        return value

    def line(self) -> bytes:
        start = self.position
        end = self.data.find(b"\n", start)
        if end < 0:
            raise CorruptCheckpoint("file-damaged", "a pickle ends early")
        self.position = end + 1
        return bytes(self.data[start:end])

    # -- the stack

    def pop_mark(self) -> list[Any]:
        """Removes the topmost mark on the stack and all values above it; returns these values."""
        items = self.stack
        if not self.marked:
            raise CorruptCheckpoint(
                "file-damaged", "a pickle has a closing mark without an opening one"
            )
        self.stack = self.marked.pop()
        return items

    # -- objects

    def named(self, module: str, name: str) -> Global:
        full = f"{_PYTHON2.get(module, module)}.{name}"
        global_ = self.globals.get(full)
        if global_ is None:
            global_ = self.globals[full] = Global(full)
        return global_

    def call(self, function: Any, arguments: Any) -> Any:
        if not isinstance(arguments, tuple):
            raise CorruptCheckpoint(
                "file-damaged", "a pickle calls a function with arguments that are not a tuple"
            )
        self.spend(CALL)
        if isinstance(function, Global):
            build = self.table.get(function.name)
            if build is not None:
                return self.build(build, arguments)
        elif not isinstance(function, Foreign):
            raise CorruptCheckpoint("file-damaged", "a pickle calls a value that is not a function")
        return Foreign(function, arguments)

    def new(self, cls: Any, arguments: Any, keywords: Any = None) -> Any:
        if not isinstance(cls, (Global, Foreign)) or not isinstance(arguments, tuple):
            raise CorruptCheckpoint(
                "file-damaged", "a pickle builds an object from a value that is not a class"
            )
        if not isinstance(keywords, (dict, type(None))) or not all(
            isinstance(key, str) for key in keywords or ()
        ):
            raise CorruptCheckpoint(
                "file-damaged", "a pickle builds an object with malformed keywords"
            )
        self.spend(CALL + len(keywords or ()))
        if isinstance(cls, Global) and cls.name in self.table and not keywords:
            return self.build(self.table[cls.name], arguments)
        return Foreign(cls, arguments, None, "new", keywords or {})

    def build(self, build: Build, arguments: tuple[Any, ...]) -> Any:
        # a function may copy an argument that the memo supplies repeatedly
        copied = len(arguments)
        for item in arguments:
            if type(item) in _SIZED:
                copied += len(item)
        if build in _KEYED:  # its arguments are keys, or pairs with keys
            sized = [item for item in arguments if type(item) in _SIZED]
            copied += sum([_nested(part) for item in sized for part in item if type(part) in _KEYS])
        self.spend(copied)
        value = build(*arguments)
        if type(value) is self.collects:
            self.collected.append(value)
        return value

    def need_plain(self) -> None:
        """Raises Unusual if this unpickler has `rows`; called before an object gets more values.

        With `rows`, one object may stand for all objects with the same bytes, so no object may
        change.
        """
        if self.rows is not None:
            raise Unusual

    def spend(self, work: int) -> None:
        """Counts work; raises CorruptCheckpoint for more work than any valid pickle needs.

        The limit grows with the bytes that were read.
        """
        self.work += work
        if self.work > SPARE_WORK + WORK_PER_BYTE * (self.position - self.start):
            raise CorruptCheckpoint(
                "file-damaged", "a pickle needs more work than any valid one of its length"
            )

    def key(self, value: Any, container: Any) -> Hashable:
        """Returns `value` as a new key of `container`; raises CorruptCheckpoint for unsafe keys."""
        if type(value) is str or (type(value) is int and -OWN_HASH < value < OWN_HASH):
            return value
        key = _key(value)
        self.spend(_parts_of_key(value))
        if type(value) in (Global, Foreign):
            return key
        place = id(container), hash(key)
        self.spend(self.hashes[place])  # the key is compared with all of these
        self.hashes[place] += 1
        return key


_KEYS = frozenset({tuple, frozenset, Size})
_SIZED = frozenset({str, bytes, bytearray, tuple, Size, list, dict, OrderedDict, set, frozenset})
_KEYED = frozenset(
    BUILTINS[name] for name in ("builtins.set", "builtins.frozenset", "collections.OrderedDict")
)


def _nested(part: Any) -> int:
    """The number of values, at any depth, in the tuples and frozensets among the items of `part`.

    `part` is a key, or a pair of a key and its value. Raises CorruptCheckpoint for too deep keys.
    """
    return sum([_parts_of_key(item) for item in part if type(item) in _KEYS]) if part else 0


def _push(make: Callable[[Unpickler], Any]) -> Callable[[Unpickler], None]:
    def operate(self: Unpickler) -> None:
        value = make(self)  # which may change the stack
        self.stack.append(value)

    return operate


def _container(make: Callable[[Unpickler], Any]) -> Callable[[Unpickler], None]:
    def operate(self: Unpickler) -> None:
        self.spend(CONTAINER)
        value = make(self)
        self.stack.append(value)

    return operate


def _constant(value: Any) -> Callable[[Unpickler], None]:
    return lambda self: self.stack.append(value)


def _number(form: str, size: int) -> Callable[[Unpickler], None]:
    unpack = struct.Struct(form).unpack_from

    def operate(self: Unpickler) -> None:
        position = self.position
        self.stack.append(unpack(self.data, position)[0])
        self.position = position + size

    return operate


def _text(form: str, size: int) -> Callable[[Unpickler], None]:
    return _push(lambda self: str(self.take(self.number(form, size)), "utf-8", "surrogatepass"))


def _bytes(form: str, size: int) -> Callable[[Unpickler], None]:
    return _push(lambda self: self.take(self.number(form, size)))


def _string(form: str, size: int) -> Callable[[Unpickler], None]:
    # str of Python 2; torch's storage keys of that time are ASCII
    return _push(lambda self: str(self.take(self.number(form, size)), "latin1"))


def _long(form: str, size: int) -> Callable[[Unpickler], None]:
    def make(self: Unpickler) -> int:
        length = self.number(form, size)
        if length > MAX_INTEGER:
            raise CorruptCheckpoint("file-damaged", f"a pickle has an integer of {length} bytes")
        return int.from_bytes(self.take(length), "little", signed=True)

    return _push(make)


def _tuple(count: int) -> Callable[[Unpickler], None]:
    def operate(self: Unpickler) -> None:
        if len(self.stack) < count:
            raise CorruptCheckpoint(
                "file-damaged", "a pickle takes more values than it has put on the stack"
            )
        self.spend(CONTAINER)
        self.stack[-count:] = [tuple(self.stack[-count:])]

    return operate


def _get(index: Callable[[Unpickler], int]) -> Callable[[Unpickler], None]:
    def operate(self: Unpickler) -> None:
        if self.rows is not None:
            raise Unusual
        self.stack.append(self.memo[index(self)])

    return operate


def _put(index: Callable[[Unpickler], int]) -> Callable[[Unpickler], None]:
    def operate(self: Unpickler) -> None:
        if self.rows is not None:
            raise Unusual
        number = index(self)
        if not 0 <= number < MAX_MEMO:
            raise CorruptCheckpoint(
                "file-damaged", "a pickle uses memo numbers in a way that no pickler does"
            )
        self.memo[number] = self.stack[-1]

    return operate


def _int_line(self: Unpickler) -> int:
    line = self.line()
    return line == b"01" if line in (b"00", b"01") else int(line)  # protocol 0's booleans


def _pop(self: Unpickler) -> None:
    if self.stack:
        self.stack.pop()
    else:  # a mark
        self.pop_mark()


def _pop_mark(self: Unpickler) -> None:
    self.pop_mark()


def _append(self: Unpickler) -> None:
    value = self.stack.pop()
    _extend(self, self.stack[-1], [value])


def _appends(self: Unpickler) -> None:
    items = self.pop_mark()
    _extend(self, self.stack[-1], items)


def _extend(self: Unpickler, target: Any, items: list[Any]) -> None:
    if isinstance(target, list) and self.rows is not None:
        self.rows.extend(target, items)
    elif isinstance(target, list):
        target.extend(items)
    elif isinstance(target, Foreign):
        self.need_plain()
        target.appended.extend(items)
    else:
        raise CorruptCheckpoint("file-damaged", "a pickle appends to a value that is not a list")


def _set_items(self: Unpickler, target: Any, flat: list[Any]) -> None:
    if isinstance(target, dict):
        if self.rows is not None and not types_in(flat).isdisjoint(ROWS):
            flat = self.rows.set_items(target, flat)
        keys, values = flat[::2], flat[1::2]
        if len(keys) > len(values):
            raise CorruptCheckpoint("file-damaged", "a pickle has a key without a value")
        pairs = zip(keys, values, strict=True)
        if types_in(keys) <= {str}:
            target.update(pairs)
            return
        for key, value in pairs:
            target[key if type(key) is str else self.key(key, target)] = value
    elif isinstance(target, Foreign):
        self.need_plain()
        for i in range(0, len(flat), 2):
            self.spend(_parts_of_key(flat[i]))
            target.items.append((_key(flat[i]), flat[i + 1]))
    else:
        raise CorruptCheckpoint(
            "file-damaged", "a pickle sets items of a value that is not a dictionary"
        )


def _setitem(self: Unpickler) -> None:
    value, key = self.stack.pop(), self.stack.pop()
    target = self.stack[-1]
    if isinstance(target, dict) and type(key) is str:
        target[key] = value
    else:
        _set_items(self, target, [key, value])


def _setitems(self: Unpickler) -> None:
    flat = self.pop_mark()
    _set_items(self, self.stack[-1], flat)


def _additems(self: Unpickler) -> None:
    items, target = self.pop_mark(), self.stack[-1]
    if not isinstance(target, set):
        raise CorruptCheckpoint("file-damaged", "a pickle adds items to a value that is not a set")
    for item in items:
        target.add(self.key(item, target))


def _dict(self: Unpickler) -> None:
    self.spend(CONTAINER)
    flat, value = self.pop_mark(), {}  # type: ignore[var-annotated]
    _set_items(self, value, flat)
    self.stack.append(value)


def _build(self: Unpickler) -> None:
    state = self.stack.pop()
    target = self.stack[-1]
    if isinstance(target, Foreign):
        if self.rows is not None:
            self.rows.build(target, state, self.position)
        target.state = state
    elif isinstance(target, OrderedDict) and isinstance(state, dict) and "_metadata" in state:
        target._metadata = state["_metadata"]  # type: ignore[attr-defined]  # of a module's state_dict
    # attributes of any other value are dropped


def _newobj(self: Unpickler) -> None:
    arguments = self.stack.pop()
    self.stack.append(self.new(self.stack.pop(), arguments))


def _newobj_ex(self: Unpickler) -> None:
    keywords, arguments = self.stack.pop(), self.stack.pop()
    self.stack.append(self.new(self.stack.pop(), arguments, keywords))


def _inst(self: Unpickler) -> None:
    cls = self.named(self.line().decode(), self.line().decode())
    arguments = tuple(self.pop_mark())
    self.stack.append(self.call(cls, arguments))


def _obj(self: Unpickler) -> None:
    cls, *arguments = self.pop_mark()
    self.stack.append(self.call(cls, tuple(arguments)))


def _stack_global(self: Unpickler) -> None:
    name, module = self.stack.pop(), self.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise CorruptCheckpoint(
            "file-damaged", "a pickle names a global by a value that is not a text"
        )
    self.stack.append(self.named(module, name))


def _persist(self: Unpickler, identity: Any) -> None:
    if self.persistent is None:
        raise CorruptCheckpoint("file-damaged", "a pickle refers to values outside of it")
    self.stack.append(self.persistent(identity))


def _skip(size: int) -> Callable[[Unpickler], None]:
    def operate(self: Unpickler) -> None:
        self.position += size

    return operate


def _refuse(self: Unpickler) -> None:
    code = self.data[self.position - 1]
    raise CorruptCheckpoint(
        "file-damaged", f"a pickle uses opcode {code:#04x}, which no checkpoint needs"
    )


def _python2_string(self: Unpickler) -> str:
    line = self.line()
    if len(line) < 2 or line[:1] not in (b"'", b'"') or line[-1:] != line[:1]:
        raise CorruptCheckpoint("file-damaged", "a pickle has a malformed string")
    return codecs.escape_decode(line[1:-1])[0].decode("latin1")


_PYTHON2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}

# opcodes that Unpickler._operate does not carry out itself
_TABLE: dict[bytes, Callable[[Unpickler], None]] = {
    b"\x80": _skip(1),  # PROTO
    b"\x95": _skip(8),  # FRAME
    b"0": _pop,
    b"1": _pop_mark,
    b"2": lambda self: self.stack.append(self.stack[-1]),  # DUP
    b"N": _constant(None),
    b"\x88": _constant(True),
    b"\x89": _constant(False),
    b"I": _push(_int_line),
    b"L": _push(lambda self: int(self.line().rstrip(b"L"))),
    b"J": _number("<i", 4),
    b"M": _number("<H", 2),
    b"\x8a": _long("<B", 1),
    b"\x8b": _long("<I", 4),
    b"F": _push(lambda self: float(self.line())),
    b"G": _number(">d", 8),
    b"S": _push(_python2_string),
    b"T": _string("<I", 4),
    b"U": _string("<B", 1),
    b"V": _push(lambda self: self.line().decode("raw-unicode-escape")),
    b"\x8c": _text("<B", 1),
    b"\x8d": _text("<Q", 8),
    b"B": _bytes("<I", 4),
    b"C": _bytes("<B", 1),
    b"\x8e": _bytes("<Q", 8),
    b"\x96": _push(lambda self: bytearray(self.take(self.number("<Q", 8)))),
    b"\x86": _tuple(2),
    b"\x87": _tuple(3),
    b"]": _container(lambda self: []),
    b"a": _append,
    b"e": _appends,
    b"l": _container(lambda self: self.pop_mark()),
    b"}": _container(lambda self: {}),
    b"s": _setitem,
    b"u": _setitems,
    b"d": _dict,
    b"\x8f": _container(lambda self: set()),
    b"\x90": _additems,
    b"\x91": _container(lambda self: frozenset(_keys(self.pop_mark()))),
    b"c": _push(lambda self: self.named(self.line().decode(), self.line().decode())),
    b"\x93": _stack_global,
    b"b": _build,
    b"\x81": _newobj,
    b"\x92": _newobj_ex,
    b"i": _inst,
    b"o": _obj,
    b"p": _put(lambda self: int(self.line())),
    b"g": _get(lambda self: int(self.line())),
    b"P": lambda self: _persist(self, self.line().decode()),
    b"Q": lambda self: _persist(self, self.stack.pop()),
}
_BINPUT, _LONG_BINPUT, _BINGET, _LONG_BINGET = b"qrhj"
_BINUNICODE, _BININT1, _EMPTY_TUPLE, _MARK, _STOP = b"XK)(."
_TUPLE, _TUPLE1, _REDUCE, _MEMOIZE = b"t\x85R\x94"
_NUMBER = struct.Struct("<I")
_OPCODES = [_TABLE.get(bytes([code]), _refuse) for code in range(256)]
