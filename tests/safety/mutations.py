"""How are inputs of a fuzzer changed: bytes, opcodes of a pickle, values of a JSON document?

Every function takes a random generator and gives a new input, so that a seed repeats a run.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Sequence
from functools import lru_cache
from random import Random
from typing import Any

MAX_LENGTH = 1 << 16  # bytes of an input
NUMBERS = (
    *(0, 1, 2, 3, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 1 << 20, (1 << 31) - 1, 1 << 31),
    *((1 << 32) - 1, 1 << 32, (1 << 60) - 1, 1 << 62, (1 << 63) - 1, (1 << 64) - 1),
)


# -- bytes


def bytes_(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Flips bits, writes integers at their limits, cuts, repeats, or joins two inputs."""
    text = bytearray(data)
    if not text:
        return bytes(random.randbytes(8))
    place = random.randrange(len(text))
    kind = random.randrange(9)
    if kind < 2:
        text[place] ^= 1 << random.randrange(8)
    elif kind == 2:
        text[place] = random.randrange(256)
    elif kind == 3:
        size = random.choice((1, 2, 4, 8))
        number = random.choice(NUMBERS) & ((1 << 8 * size) - 1)
        text[place : place + size] = number.to_bytes(size, random.choice(("little", "big")))
    elif kind == 4:
        del text[place:]
    elif kind == 5:
        del text[place : place + random.randrange(1, 17)]
    elif kind == 6:
        part = text[place : place + random.randrange(1, 65)]
        text[place:place] = part * random.choice((1, 2, 30))
    elif kind == 7:
        other = random.choice(others)
        begin = random.randrange(len(other) + 1)
        part = other[begin : begin + random.randrange(1, 129)]
        text[place : place + random.choice((0, len(part)))] = part
    else:
        number = text[place]
        text[place] = (number + random.choice((-1, 1))) % 256
    return bytes(text[:MAX_LENGTH])


# -- pickles

FIXED = {  # bytes behind an opcode
    0x80: 1, 0x95: 8, 0x4A: 4, 0x4B: 1, 0x4D: 2, 0x47: 8,
    0x71: 1, 0x72: 4, 0x68: 1, 0x6A: 4,
}  # fmt: skip
COUNTED = {  # the form of the count of bytes behind an opcode
    0x58: "<I", 0x8C: "<B", 0x8D: "<Q", 0x42: "<I", 0x43: "<B", 0x8E: "<Q", 0x96: "<Q",
    0x54: "<I", 0x55: "<B", 0x8A: "<B", 0x8B: "<I",
}  # fmt: skip
LINES = {0x63: 2, 0x69: 2, 0x49: 1, 0x4C: 1, 0x46: 1, 0x53: 1, 0x56: 1, 0x70: 1, 0x67: 1, 0x50: 1}
GLOBALS = (
    b"collections OrderedDict", b"builtins set", b"builtins frozenset", b"builtins bytearray",
    b"builtins complex", b"builtins bytes", b"_codecs encode", b"torch Size", b"os system",
    b"torch float32", b"torch bfloat16", b"torch FloatStorage", b"torch BFloat16Storage",
    b"torch._utils _rebuild_tensor_v2", b"torch._utils _rebuild_tensor_v3",
    b"torch._utils _rebuild_parameter", b"torch._tensor _rebuild_from_type_v2",
    b"torch.distributed.checkpoint.metadata MetadataIndex", b"argparse Namespace",
)  # fmt: skip
PALETTE = (
    *(b"(", b"0", b"1", b"2", b"N", b"\x88", b"\x89", b")", b"t", b"\x85", b"\x86", b"\x87"),
    *(b"]", b"a", b"e", b"l", b"}", b"s", b"u", b"d", b"\x8f", b"\x90", b"\x91", b"\x93"),
    *(b"R", b"b", b"\x81", b"\x92", b"o", b"Q", b"\x94", b"."),
    *(b"q" + bytes([number]) for number in range(4)),
    *(b"h" + bytes([number]) for number in range(12)),
    *(b"c" + name.replace(b" ", b"\n") + b"\n" for name in GLOBALS),
    *(b"K" + bytes([number]) for number in (0, 1, 255)),
    *(b"J" + struct.pack("<i", number) for number in (-1, -(1 << 31), (1 << 31) - 1)),
    *(b"\x8a\x09" + number.to_bytes(9, "little") for number in NUMBERS[-6:]),
    *(b"G" + struct.pack(">d", number) for number in (0.5, 1e300, float("nan"), float("inf"))),
    *(b"X" + struct.pack("<I", len(text)) + text for text in (b"", b"0", b"step", b"\xed\xa0\x80")),
    *(b"F1e999\n", b"I01\n", b"L99999999999999999999L\n", b"S'a'\n", b"Va\\ud800\n"),
)


@lru_cache(1024)
def opcodes(data: bytes) -> array[int]:
    """Where opcodes begin, and the end; behind the last one may be what cannot be parsed.

    The same inputs are changed again and again.
    """
    places, place, end = array("I", [0]), 0, len(data)
    while place < end:
        code = data[place]
        stop = place + 1
        if code in FIXED:
            stop += FIXED[code]
        elif code in COUNTED:
            form = COUNTED[code]
            stop += struct.calcsize(form)
            if stop > end:
                break
            stop += struct.unpack_from(form, data, place + 1)[0]
        else:
            for _ in range(LINES.get(code, 0)):
                stop = data.find(b"\n", stop) + 1 or end
        if stop > end:
            break
        places.append(stop)
        place = stop
    if place < end:
        places.append(end)
    return places


def pickles(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Deletes, repeats, swaps, replaces or inserts opcodes, or changes an argument."""
    places = opcodes(data)
    last = len(places) - 1
    if not last:
        return random.choice(PALETTE)
    number, kind = random.randrange(last), random.randrange(8)
    start, stop = places[number], places[number + 1]
    part, new = data[start:stop], b""
    if kind == 1:
        behind = places[min(number + random.randrange(1, 9), last)]
        new = data[start:behind] * random.choice((1, 9)) + part
    elif kind == 2:
        other = random.randrange(last)
        number, other = min(number, other), max(number, other)
        start, behind, second, stop = (places[at] for at in (number, number + 1, other, other + 1))
        if number != other:
            new = data[second:stop] + data[behind:second]
        new += data[start:behind]
    elif kind == 3:
        new = random.choice(PALETTE)
    elif kind == 4:
        new = random.choice(PALETTE) + part
    elif kind == 5 and len(part) > 1:
        new = part[:1] + bytes_(random, part[1:], others)
    elif kind == 6:
        stranger = random.choice(others)
        strange = opcodes(stranger)
        begin = random.randrange(len(strange))
        behind = min(begin + random.randrange(1, 17), len(strange) - 1)
        new = stranger[strange[begin] : strange[behind]] + part
    elif kind:
        whole = [at for at in range(last) if data[places[at]] in b"KMJ\x8a"]
        if whole:
            number = random.choice(whole)
            start, stop = places[number], places[number + 1]
            part = random.choice(PALETTE)
        new = part
    return (data[:start] + new + data[stop:])[:MAX_LENGTH]


# -- JSON

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 0.5, 1e308, float("nan"), float("inf"), 1 << 31, 1 << 63,
    10**400, "", "a", "/", "..", "a/b", "\ud800", "\0", "F32", "0" * 8, "zzzzzzzz", [], {}, [[]],
    [0], [1, 2], [-1], ["a"], [None], {"": None}, {"a": {}}, {"step": 1}, [1 << 62, 1 << 62],
    {"$tuple": []}, {"$tuple": 1}, {"$dict": [[[], 1]]}, {"$dict": [[1]]}, {"$set": [[1]]},
    {"$float": "x"}, {"$float": "nan"}, {"$int": "0x" + "f" * 20}, {"$int": 5}, {"$global": "a.b"},
    {"$global": 5}, {"$bytes": "!"}, {"$bytes": 1}, {"$scalar": []}, {"$scalar": [1, "F32", 3]},
    {"$scalar": [[], {}]}, {"$tensor": []}, {"$tensor": "x"}, {"$complex": ["a"]}, {"$object": 1},
    {"$object": {"function": {"$global": "a.b"}, "arguments": [], "state": None, "how": "call"}},
    {"$object": {"function": 1, "arguments": 1, "state": 1, "how": 1}}, {"$ordered": [1]},
    {"$size": ["a"]}, {"$frozenset": [{}]}, {"$unknown": 1},
)  # fmt: skip
KEYS = ("", "a", "shape", "step", "dtype", "data_offsets", "fragments", "__metadata__", "\ud800")


def json_(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Replaces, deletes, repeats, moves or nests a value, or renames a key."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return bytes_(random, data, others)
    container: Any = [document]
    root, key = container, 0
    for _ in range(random.choice((0, 1, 2, 2, 3, 3, 4, 5, 6))):
        inner = container[key]
        if not isinstance(inner, (dict, list)) or not inner:
            break
        container = inner
        keys = list(inner) if isinstance(inner, dict) else range(len(inner))
        key = random.choice(keys)  # type: ignore[arg-type]
    kind = random.randrange(9)
    if kind < 4:
        container[key] = random.choice(VALUES)
    elif kind == 4:
        del container[key]
    elif kind == 5 and isinstance(container, dict):
        container[random.choice(KEYS)] = container.pop(key)
    elif kind == 6:
        try:
            container[key] = json.loads(random.choice(others))
        except (ValueError, RecursionError):
            container[key] = [container[key]] * 3
    elif kind == 7:
        value = container[key]
        for _ in range(random.choice((1, 2, 60, 150))):
            value = random.choice(([value], {"a": value}, {"$tuple": [value]}))
        container[key] = value
    elif type(container[key]) is int:
        container[key] += random.choice((-1, 1, 1 << 40))
    else:
        container[key] = random.choice((str, list, repr))("x")
    try:
        return json.dumps(root[0] if root else None).encode()[:MAX_LENGTH]
    except (ValueError, RecursionError):
        return data
