"""Which command lines are understood without click?

click and the declarations of all options take 20 ms, a fifth of the time of a small conversion. The
commonest lines have a few simple options. Every other line is for click, and every wrong one too:
so all usage errors are click's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

Parse = Callable[[str], Any]
"""The value that a word stands for; None if click has to decide."""


def _text(word: str) -> str | None:
    return None if word.startswith("-") or not word else word


def _number(word: str) -> int | None:
    return int(word) if word.isascii() and word.isdecimal() and len(word) < 6 else None


def _stage(word: str) -> int | None:
    return int(word) if word in ("0", "1", "2", "3") else None


def _one_of(*choices: str) -> Parse:
    return lambda word: word if word in choices else None


class Line(Struct, frozen=True):
    """What the line of a command may have: arguments, flags, and options with a value, by name."""

    arguments: tuple[str, ...]
    flags: Mapping[str, str]
    options: Mapping[str, tuple[str, Parse]]


FORMATS = (
    "universal",
    "deepspeed",
    "deepspeed-universal",
    "onnxruntime",
    "dcp",
    "gathered",
    "megatron",
)
_OUTPUT = {"-q": "quiet", "--quiet": "quiet", "--json": "as_json"}
_WRITTEN = {**_OUTPUT, "--weights-only": "weights_only", "--resume": "resume"}
_TARGET = {
    "--dp": ("dp", _number),
    "--dtype": ("dtype", _one_of("fp32", "bf16", "fp16")),
}
LINES = {
    "inspect": Line(("path",), _OUTPUT, {}),
    "convert": Line(("source", "target"), _WRITTEN, {**_TARGET, "--to": ("to", _one_of(*FORMATS))}),
    "reshard": Line(
        ("source", "target"),
        _WRITTEN,
        {**_TARGET, "--stage": ("stage", _stage)},
    ),
    "verify": Line(("path",), _OUTPUT, {"--against": ("against", _text)}),
}
"""By the name of the command."""


def plain(words: Sequence[str]) -> tuple[str, dict[str, Any]] | None:
    """The command of a plain command line, and its arguments; None for any other line."""
    line = LINES.get(words[0]) if words else None
    if line is None or "_ZCKPT_COMPLETE" in os.environ:
        return None
    arguments: list[str] = []
    values: dict[str, Any] = {}
    rest = iter(words[1:])
    for word in rest:
        if word in line.flags:
            values[line.flags[word]] = True
        elif word in line.options:
            name, parse = line.options[word]
            value = parse(next(rest, ""))
            if value is None or name in values:
                return None
            values[name] = value
        elif _text(word) is None:
            return None
        else:
            arguments.append(word)
    if len(arguments) != len(line.arguments):
        return None
    return words[0], dict(zip(line.arguments, arguments, strict=True)) | values
