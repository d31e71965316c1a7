"""Writes a pickle of protocol 2 without importing any class: the reverse of unpickle.py.

The standard Pickler would import every class that it names. This one writes plain data, a `Global`
(a class or function) by its name, and a `Foreign` (an object) as the call that it was read from;
see inert.py. Only names and texts get memo numbers.
Tensors that share memory name the same storage, by its key.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from msgspec import Struct, field

from ..core.checkpoint.inert import Foreign, Global, Size, known_global, types_in

# protocol 2 uses these names of modules
_PYTHON2 = {"builtins": "__builtin__", "copyreg": "copy_reg"}
LONG = 10_000  # from this number on, integers are written in a faster way


def dumps(value: Any, special: Callable[[Any], Any]) -> bytes:
    """Returns the pickle of `value`.

    `special` is called for a value of an unknown type, and turns it into a `Foreign`, a `Global` or
    a `Persistent`. If it returns None, a TypeError is raised.
    """
    parts: list[bytes] = [b"\x80\x02"]
    _Writer(parts.append, special).write(value)
    parts.append(b".")
    return b"".join(parts)


class Persistent(Struct, frozen=True):
    """A value that the pickle names by a persistent id (torch: a storage)."""

    identity: tuple[Any, ...]


class Repeated(Struct, frozen=True, eq=False):
    """A value that occurs many times: from the third time on, its pickled bytes are reused."""

    value: Any


class Record(Struct, frozen=True, eq=False):
    """One of many objects of a class; it gives the bytes of a `Foreign`, but in less time.

    `form` has the class and the names of its attributes: one tuple object, which all records of the
    class must share. `values` are the attributes' values, in the order of the names.
    """

    form: tuple[Global, tuple[str, ...]]
    values: tuple[Any, ...]


class _Writer(Struct, eq=False):
    emit: Callable[[bytes], None]
    special: Callable[[Any], Any]
    # the bytes of the reference to each
    memo: dict[str | Global, bytes] = field(default_factory=dict)
    repeated: dict[int, bytes | None] = field(default_factory=dict)  # by identity
    forms: dict[int, list[bytes]] = field(default_factory=dict)  # bytes between values

    def write(self, value: Any) -> None:
        if type(value) is str and (reference := self.memo.get(value)) is not None:
            self.emit(reference)  # most values are texts that were written before
            return
        write = _WRITERS.get(type(value))
        if write is not None:
            write(self, value)
            return
        replacement = self.special(value)
        if replacement is None:
            raise TypeError(f"cannot pickle {type(value).__name__}")
        self.write(replacement)

    def again(self, value: Repeated) -> None:
        """Writes a value that occurs many times.

        The first time, the texts and globals in it get memo numbers. The second time, it is written
        with references to these numbers. From then on the bytes of the second time are reused.
        """
        opcodes = self.repeated.get(id(value))
        if opcodes is None and id(value) in self.repeated:
            emit, parts = self.emit, list[bytes]()
            self.emit = parts.append
            self.write(value.value)
            self.emit = emit
            opcodes = self.repeated[id(value)] = b"".join(parts)
        if opcodes is not None:
            self.emit(opcodes)
            return
        self.repeated[id(value)] = None
        self.write(value.value)

    def record(self, value: Record) -> None:
        """Writes a record; from the second of a class on, the bytes between values are reused."""
        function, names = value.form
        form_opcodes = self.forms.get(id(value.form))  # forms are recognized by identity
        if form_opcodes is None:  # written in full, so that class and names get memo numbers
            self.foreign(Foreign(function, (), dict(zip(names, value.values, strict=True)), "new"))
            first, *other_names = (self.memo[name] for name in names)
            self.forms[id(value.form)] = [self.memo[function] + b")\x81}(" + first, *other_names]
            return
        emit, write = self.emit, self.write
        for before, item in zip(form_opcodes, value.values, strict=True):
            emit(before)
            if type(item) is int:
                self.integer(item)
            else:
                write(item)
        emit(b"ub")

    def tuple_(self, value: tuple[Any, ...]) -> None:
        if len(value) > 3:
            self.emit(b"(")
        for item in value:
            self.write(item)
        self.emit((b")", b"\x85", b"\x86", b"\x87")[len(value)] if len(value) <= 3 else b"t")

    def list_(self, value: list[Any]) -> None:
        self.emit(b"]")
        self._append(value)

    def _append(self, items: list[Any]) -> None:
        if items:
            self.emit(b"(")
            if len(items) >= LONG and types_in(items) == {int}:
                self._integers(items)
            else:
                for item in items:
                    self.write(item)
            self.emit(b"e")

    def _integers(self, items: list[int]) -> None:
        """Writes a long list of integers, all with the same opcode if they have 32 bits."""
        try:
            numbers = array("i", items)
        except OverflowError:
            for item in items:
                self.integer(item)
            return
        if sys.byteorder == "big":
            numbers.byteswap()
        data = numbers.tobytes()
        text = bytearray(5 * len(items))
        text[::5] = b"J" * len(items)
        for byte in range(4):
            text[byte + 1 :: 5] = data[byte::4]
        self.emit(bytes(text))

    def dict_(self, value: dict[Any, Any]) -> None:
        self.emit(b"}")
        self._set_items(list(value.items()))

    def _set_items(self, items: list[tuple[Any, Any]]) -> None:
        if items:
            self.emit(b"(")
            for key, item in items:
                self.write(key)
                self.write(item)
            self.emit(b"u")

    def ordered(self, value: OrderedDict[Any, Any]) -> None:
        self.write(Global("collections.OrderedDict"))
        self.emit(b")R")
        self._set_items(list(value.items()))
        if hasattr(value, "_metadata"):  # of a module's state_dict
            self.write({"_metadata": value._metadata})
            self.emit(b"b")

    def foreign(self, value: Foreign) -> None:
        self.write(value.function)
        self.write(tuple(value.arguments))
        # NEWOBJ_EX belongs to protocol 4, but readers of any protocol support it
        if value.keywords:
            self.write(value.keywords)
            self.emit(b"\x92")
        else:
            self.emit(b"\x81" if value.how == "new" else b"R")
        self._append(value.appended)
        self._set_items(value.items)
        if value.state is not None:
            self.write(value.state)
            self.emit(b"b")

    def named(self, value: Global) -> None:
        if (reference := self.memo.get(value)) is not None:
            self.emit(reference)
        else:
            module, _, name = value.name.rpartition(".")
            self.emit(f"c{_PYTHON2.get(module, module)}\n{name}\n".encode())
            self._remember(value)

    def _remember(self, value: str | Global) -> None:
        place = len(self.memo)
        number = bytes([place]) if place < 256 else struct.pack("<I", place)
        self.memo[value] = (b"h" if place < 256 else b"j") + number
        self.emit((b"q" if place < 256 else b"r") + number)

    def persistent(self, value: Persistent) -> None:
        self.write(value.identity)
        self.emit(b"Q")

    def text(self, value: str) -> None:
        """Writes a text that was not written before, and gives it a memo number."""
        data = value.encode("utf-8", "surrogatepass")
        self.emit(b"X" + struct.pack("<I", len(data)) + data)
        self._remember(value)

    def integer(self, value: int) -> None:
        if 0 <= value < 256:
            self.emit(b"K" + bytes([value]))
        elif -(1 << 31) <= value < 1 << 31:
            self.emit(b"J" + struct.pack("<i", value))
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            head = b"\x8a" + bytes([len(data)]) if len(data) < 256 else None
            self.emit((head or b"\x8b" + struct.pack("<I", len(data))) + data)

    def call(self, name: str, *arguments: Any) -> None:
        self.write(known_global(name))
        self.tuple_(arguments)
        self.emit(b"R")


_WRITERS: dict[type, Callable[[_Writer, Any], None]] = {
    type(None): lambda self, value: self.emit(b"N"),
    bool: lambda self, value: self.emit(b"\x88" if value else b"\x89"),
    int: _Writer.integer,
    float: lambda self, value: self.emit(b"G" + struct.pack(">d", value)),
    str: _Writer.text,
    Repeated: _Writer.again,
    Record: _Writer.record,
    bytes: lambda self, value: self.call("_codecs.encode", value.decode("latin1"), "latin1"),
    bytearray: lambda self, value: self.call(
        "builtins.bytearray", value.decode("latin1"), "latin1"
    ),
    complex: lambda self, value: self.call("builtins.complex", value.real, value.imag),
    set: lambda self, value: self.call("builtins.set", sorted(value, key=repr)),
    frozenset: lambda self, value: self.call("builtins.frozenset", sorted(value, key=repr)),
    tuple: _Writer.tuple_,
    Size: lambda self, value: self.call("torch.Size", tuple(value)),
    list: _Writer.list_,
    dict: _Writer.dict_,
    OrderedDict: _Writer.ordered,
    Foreign: _Writer.foreign,
    Global: _Writer.named,
    Persistent: _Writer.persistent,
}
