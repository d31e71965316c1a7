"""Reads one number from the dictionary in a file of torch.save, without reading the complete file.

A program saves its counter before its tensors, or after them in the same pickle. The pickle is
parsed from its beginning, and only up to this number. No tensor is made, and no directory of the
zip is read. So hundreds of files take less than a second.
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

# bytes of the first read, and the factor by which each further read is longer
FIRST, TIMES = 1 << 16, 16
MARGIN = 1 << 12  # bytes; if the text ends early, the parser stops this near to its end
HEADER, PICKLE = 30, b"/data.pkl"
LAST = 64  # keys and values before a container that are examined each time; in the end all are
TENSORS = "torch._utils._rebuild_"
PUT, INTEGER = rb"(?:q.|r.{4}|\x94)?", rb"(?:K(.)|M(.{2})|J(.{4}))"  # opcodes: see unpickle.py


def number_in(path: str, keys: Collection[str], pair: tuple[str, str] | None = None) -> int | None:
    """The first integer in a saved dictionary under one of `keys`; None if there is none.

    `pair` is the wanted key, and a key that the program always writes right after it: the bytes of
    both are searched for before anything is parsed. None also for a file that cannot be parsed.
    Raises OSError.
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
    """A regular expression that matches the opcodes by which a pickle writes this text."""
    return b"X" + re.escape(struct.pack("<I", len(key)) + key.encode()) + PUT


def _pickle_in(head: bytes) -> int | None:
    """The byte of a zip at which the pickle `data.pkl` begins, given the first bytes of the zip.

    None if the pickle is not the first member, as in old versions of torch.
    """
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
        """Parses until the outermost dictionary has an integer under one of the keys; returns it.

        None if there is none. Raises CorruptCheckpoint if the bytes end too early or are no pickle.
        """
        try:
            return _number(self.load(), self.keys)
        except _Enough as enough:
            return enough.number

    def call(self, function: Any, arguments: Any) -> Any:
        """Calls a function that the pickle names, as the unpickler does; a tensor becomes None."""
        if isinstance(function, Global) and function.name.startswith(TENSORS):
            return None
        return super().call(function, arguments)

    def spend(self, work: int) -> None:
        """Counts work, and raises `_Enough` if a wanted integer has been parsed.

        It is wanted if it stands under one of `keys` in the outermost dictionary.
        """
        # the unpickler calls this before it makes a container or calls a function, so the search
        # ends soon after the integer
        super().spend(work)
        # inside of a dictionary within the outermost one
        if len(self.marked) > 2 or not self.marked:
            return
        if len(self.marked[0]) != 1 or type(self.marked[0][0]) is not dict:
            return
        pairs = self.marked[1] if len(self.marked) > 1 else self.stack
        for place in range(max(0, len(pairs) // 2 * 2 - LAST), len(pairs) - 1, 2):
            key, value = pairs[place], pairs[place + 1]
            if type(value) is int and type(key) is str and key in self.keys:
                raise _Enough(value)
