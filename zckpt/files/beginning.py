"""Which number does the dictionary in a file of torch.save have under a key?

The file is read from its beginning, and only as far as the number: a program states its counter in
front of its tensors, or behind them in the same pickle. No tensor is made, and no directory of the
zip is read, so that hundreds of files take less than a second.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection
from typing import Any

from ..core.checkpoint.inert import Global
from ..core.storage import sources
from ..errors import CorruptCheckpoint, UnsupportedCheckpoint
from .torchfile import MAX_PICKLE, MOST_CONTAINERS, MOST_VALUES, ZIP, TorchFile
from .unpickle import Unpickler

FIRST, TIMES = 1 << 16, 16  # bytes of the first look, and how many times more each further one has
MARGIN = 1 << 12  # bytes: where a text ends early, the parser stands this near to its end
HEADER, PICKLE = 30, b"/data.pkl"
LAST = 64  # keys and values in front of a container that are looked at; all of them in the end
TENSORS = "torch._utils._rebuild_"
PUT, INTEGER = rb"(?:q.|r.{4}|\x94)?", rb"(?:K(.)|M(.{2})|J(.{4}))"  # opcodes: see unpickle.py


def number_in(path: str, keys: Collection[str], pair: tuple[str, str] | None = None) -> int | None:
    """The first whole number of the saved dictionary whose key is one of `keys`; None without it.

    `pair` are a key and the next one, if a program always writes both in turn: where these bytes
    stand, nothing else needs to be parsed, however many tensors are in front of them. None also for
    a file that cannot be parsed. Raises OSError.
    """
    sign = pair and re.compile(_text(pair[0]) + INTEGER + _text(pair[1]), re.DOTALL)
    try:
        with sources.opened(path) as file:
            head = file.read(FIRST << 2 if pair else FIRST)
            start = _pickle_in(head)
            while start is not None:
                if sign and (match := sign.search(head, start)):
                    return int.from_bytes(match[match.lastindex or 0], "little")
                parser = _Search(head, start, keys)
                try:
                    return parser.search()
                except CorruptCheckpoint:
                    is_all = parser.position + MARGIN < len(head) or len(head) >= MAX_PICKLE
                    more = b"" if is_all else file.read((TIMES - 1) * len(head))
                    if not more:
                        return None
                    head += more
        value = TorchFile(path).value
    except (CorruptCheckpoint, UnsupportedCheckpoint):
        return None
    return _number(value, keys)


def _text(key: str) -> bytes:
    """A pattern for the opcodes of a short text."""
    return b"X" + re.escape(struct.pack("<I", len(key)) + key.encode()) + PUT


def _pickle_in(head: bytes) -> int | None:
    """Where the pickle of a zip begins; None if it is not the first member, as of old torch."""
    if not head.startswith(ZIP) or len(head) < HEADER:
        return None
    length, extra = struct.unpack_from("<HH", head, 26)
    is_pickle = head[HEADER : HEADER + length].endswith(PICKLE)
    return HEADER + length + extra if is_pickle else None


def _number(value: Any, keys: Collection[str]) -> int | None:
    pairs = value.items() if isinstance(value, dict) else ()
    return next((number for key, number in pairs if key in keys and type(number) is int), None)


class _Enough(Exception):
    def __init__(self, number: int) -> None:
        self.number = number


class _Search(Unpickler):
    """Parses a pickle until the outermost dictionary has a number under one of the keys."""

    def __init__(self, data: bytes, start: int, keys: Collection[str]) -> None:
        super().__init__(
            data,
            start,
            persistent=lambda _identity: None,
            most_values=MOST_VALUES,
            most_containers=MOST_CONTAINERS,
        )
        self.keys = keys

    def search(self) -> int | None:
        """The number; raises CorruptCheckpoint if the text ends before it, or is no pickle."""
        try:
            return _number(self.load(), self.keys)
        except _Enough as enough:
            return enough.number

    def call(self, function: Any, arguments: Any) -> Any:
        """As the unpickler, but no tensor is made."""
        if isinstance(function, Global) and function.name.startswith(TENSORS):
            return None
        return super().call(function, arguments)

    def spend(self, work: int) -> None:
        """Before each container and call, looks at the pairs that the dictionary has so far."""
        super().spend(work)
        if len(self.marked) > 2 or not self.marked:  # within a dictionary in the outermost one
            return
        if len(self.marked[0]) != 1 or type(self.marked[0][0]) is not dict:
            return
        pairs = self.marked[1] if len(self.marked) > 1 else self.stack
        for place in range(max(0, len(pairs) // 2 * 2 - LAST), len(pairs) - 1, 2):
            key, value = pairs[place], pairs[place + 1]
            if type(value) is int and type(key) is str and key in self.keys:
                raise _Enough(value)
