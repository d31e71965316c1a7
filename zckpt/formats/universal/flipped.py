"""Finds the bit that was flipped in a damaged manifest.json.

The manifest states the CRC-32 of its contents (`agreement.checksum`), not of its bytes. To test a
bit, this module flips it back and parses the text again. If the contents then have the stated
CRC-32, this bit was the flipped one. Only likely bits are tested:

    the text is no valid JSON    the bits near the position of the error
    the text is valid JSON       the bits of the stated CRC-32; the bit of the contents whose flip
                                 gives the computed CRC-32 instead of the stated one; bits of words
                                 and keys that occur only once in the text, as a damaged name does
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from ...core.storage.checksum import crc32, flipped_bits
from .agreement import canonical, checksum

BEFORE, BEHIND = 400, 8  # bytes around the place at which the text stops to be JSON
LIMIT = 1 << 29  # bytes that are parsed, all tries together
WORD = re.compile(rb"[^\"/,:\s]+")
MARK = re.compile(rb'["\[\],:{}]')  # beside which the text may have spaces
KEY = re.compile(rb'"([^"\n]{1,40})":')
AROUND = 6  # bytes on each side by which a place of the contents is found in the text

Bit = tuple[int, int]
"""A bit of a file's text: (byte offset, number of the bit in this byte)."""


def flipped(text: bytes, limit: int = LIMIT) -> list[Bit]:
    """Finds the bits of a damaged manifest.json whose flip restores the stated CRC-32.

    Returns pairs (byte offset, bit). Only likely bits are tried. The list is empty if none of them
    fits, or if the tries would parse more than `limit` bytes.
    """
    left = limit
    found: list[Bit] = []
    for place, bit in dict.fromkeys(_candidates(text)):
        if (left := left - len(text)) < 0:
            return []
        changed = bytearray(text)
        changed[place] ^= 1 << bit
        document = _parsed(bytes(changed))
        if isinstance(document, dict) and document.get("crc32") == checksum(document):
            found.append((place, bit))
    return found


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _candidates(text: bytes) -> Iterator[Bit]:
    try:
        document = json.loads(text)
    except UnicodeDecodeError as error:
        yield from _bits(text, error.start - BEHIND, error.end + BEHIND)
        return
    except json.JSONDecodeError as error:
        place = len(error.doc[: error.pos].encode())
        yield from _bits(text, place - BEFORE, place + BEHIND)
        return
    except (ValueError, RecursionError):
        return
    if not isinstance(document, dict):
        return
    for match in re.finditer(rb'"crc32": ?"?([0-9a-z]{8})', text[-64:]):
        start = max(0, len(text) - 64) + match.start()
        yield from _bits(text, start, start + len(match[0]))
    yield from _bits_by_checksum(text, document)
    yield from _bits_of_rare_words(text)


def _bits(text: bytes, start: int, stop: int) -> Iterator[Bit]:
    for place in range(max(0, start), min(len(text), stop)):
        for bit in range(8):
            yield place, bit


def _bits_by_checksum(text: bytes, document: dict[str, Any]) -> Iterator[Bit]:
    """Yields the bits of the text that may explain the difference of stated and computed CRC-32."""
    stated_crc = document.get("crc32")
    if not isinstance(stated_crc, str) or not re.fullmatch("[0-9a-f]{8}", stated_crc):
        return
    # both CRC-32s show which bit of the sorted JSON was flipped. The text may list its keys in
    # another order, so the bytes around this bit are searched for in the text
    contents = canonical(document)
    for place, bit in flipped_bits(int(stated_crc, 16), crc32(contents), len(contents)):
        start, stop = max(0, place - AROUND), place + AROUND + 1
        ends = (match.end() for match in MARK.finditer(contents[start:place]))
        begin = max(ends, default=0)
        behind = MARK.search(contents[place + 1 : stop])
        piece = contents[start + begin : place + 1 + behind.start() if behind else stop]
        for match in re.finditer(re.escape(piece), text):
            yield match.start() + place - start - begin, bit


def _bits_of_rare_words(text: bytes) -> Iterator[Bit]:
    """Yields bits of words that occur once, if the flip makes them equal to another word.

    After these, yields all bits of the JSON keys that occur once.
    """
    words: dict[bytes, list[int]] = {}
    for match in WORD.finditer(text):
        words.setdefault(match[0], []).append(match.start())
    for word, places in words.items():
        for place, byte in enumerate(word if len(places) == 1 else b""):
            for bit in range(8):
                other = word[:place] + bytes([byte ^ 1 << bit]) + word[place + 1 :]
                if other in words:
                    yield places[0] + place, bit
    for match in KEY.finditer(text):
        if text.count(match[0]) == 1:
            yield from _bits(text, match.start(1), match.end(1))
