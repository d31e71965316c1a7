"""The CRC-32 behind the pickle in a `.metadata` that zckpt wrote.

torch (2.13) reads no further than the end of the pickle, so it loads such a file as any other.
"""

from __future__ import annotations

import re
import zlib

from ..errors import CorruptCheckpoint

SEAL = re.compile(rb"\nzckpt-crc32 ([0-9a-f]{8})\n\Z")


def sealed(text: bytes) -> bytes:
    """A pickle with its CRC-32 behind it."""
    return text + b"\nzckpt-crc32 %08x\n" % zlib.crc32(text)


def check(text: bytes) -> None:
    """Raises CorruptCheckpoint if the bytes before the CRC-32 are others; torch writes none."""
    match = SEAL.search(text, max(0, len(text) - 32))
    if match and zlib.crc32(text[: match.start()]) != int(match[1], 16):
        raise CorruptCheckpoint("its bytes do not have the CRC-32 behind them")
