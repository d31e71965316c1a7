"""How does a command line write the value of an option: a size, names, pairs, rules?"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from ..errors import MALFORMED, cause
from ..processes.launcher import LAUNCHERS, launched

if TYPE_CHECKING:
    from click import ParamType as ParamType

    from ..api import Part
else:

    class ParamType(click.ParamType):
        """click's, which takes a type in brackets since 8.4 only."""

        def __class_getitem__(cls, _value):
            return cls


PATH = click.Path(readable=False)  # zckpt itself says why one cannot be read
"""Of files and directories, which a shell completes."""
UNITS = {"": 1, "K": 1000, "M": 10**6, "G": 10**9, "T": 10**12}
UNITS |= {f"{unit}I": 1024**power for power, unit in enumerate("KMGT", 1)}


class ByteCount(ParamType[int]):
    """Bytes: 256MiB, 8GiB, 500MB, 1000000."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", value.upper())
        if not match or match[2] not in UNITS:
            self.fail(f"{value!r} is not a size: write 256MiB, 8GiB, 500MB or 1000000", param, ctx)
        return int(float(match[1]) * UNITS[match[2]])


class Pairs(ParamType[dict[Any, Any]]):
    """lr=3e-4,betas=[0.9,0.95],fused=null: names and JSON values; 1:lr=3e-4 is for group 1."""

    name = "pairs"

    def convert(self, value: Any, param: Any, ctx: Any) -> dict[Any, Any]:
        if isinstance(value, dict):
            return value
        number, colon, text = value.partition(":")
        if not (colon and number.strip().isdecimal()):
            number, text = "", value
        try:
            # a comma within brackets belongs to a value
            pairs = [pair.partition("=") for pair in re.split(r",(?![^\[]*\])", text)]
            values = {key.strip(): json.loads(item) for key, _, item in pairs}
        except MALFORMED:
            values = {}
        if not values or not all(key.isidentifier() for key in values):
            self.fail(f"{value!r} is not a list such as lr=3e-4,weight_decay=0.1", param, ctx)
        for key, item in values.items():
            values[key] = tuple(item) if isinstance(item, list) else item
        return {int(number): values} if number else values


def merged(
    _context: click.Context, _option: click.Parameter, values: Sequence[dict[Any, Any]]
) -> dict[Any, Any]:
    """Repeated pairs in one dictionary; a group's own values under its number."""
    defaults: dict[Any, Any] = {}
    for pairs in values:
        for key, value in pairs.items():
            defaults[key] = {**defaults.get(key, {}), **value} if isinstance(key, int) else value
    return defaults


def in_file(
    type: ParamType[Any], path: str, parse: Callable[[str], Any], param: Any, ctx: Any
) -> Any:
    """What `parse` makes of a file's text; a usage error if it cannot be read or parsed."""
    try:
        with open(path, encoding="utf-8-sig") as file:  # Windows begins with a mark
            return parse(file.read())
    except (OSError, *MALFORMED) as error:
        why = error if isinstance(error, OSError) else cause(error)
        return type.fail(f"{path} cannot be read: {why}", param, ctx)


class Config(ParamType[dict[str, Any]]):
    """A JSON file with one object."""

    name = "file"
    shell_complete = PATH.shell_complete

    def convert(self, value: Any, param: Any, ctx: Any) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        config = in_file(self, value, json.loads, param, ctx)
        if not isinstance(config, dict):
            self.fail(f"{value} is not a JSON object", param, ctx)
        return config


def names_in(text: str) -> Any:
    """A JSON list, or the lines of a text."""
    return json.loads(text) if text.lstrip().startswith("[") else text.splitlines()


class NameList(ParamType[tuple[str, ...]]):
    """A file of names, one per line, or a JSON list of them."""

    name = "file"
    shell_complete = PATH.shell_complete

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = in_file(self, value, names_in, param, ctx)
        if not names or not all(isinstance(name, str) for name in names):
            self.fail(f"{value} is not a list of names, one per line or as JSON", param, ctx)
        return tuple(name.strip() for name in names if name.strip())


class Integers(ParamType[tuple[int, ...]]):
    """0,12,24: integers between commas."""

    name = "integers"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.split(",")]
        if not all(part.isascii() and part.isdecimal() for part in parts):
            self.fail(f"{value!r} is not a list of integers such as 0,12,24", param, ctx)
        return tuple(map(int, parts))


class Rename(ParamType[tuple[str, str]]):
    """REGEX=REPL; the last `=` separates."""

    name = "rule"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        regex, equals, replacement = value.rpartition("=")
        if not equals:
            self.fail(f"{value!r} is not of the form REGEX=REPL", param, ctx)
        return regex, replacement


class Tie(ParamType[tuple[str, str]]):
    """NAME=NAME: a tied weight's second name, and its name in the source."""

    name = "tie"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        alias, _, owner = value.partition("=")
        if not alias or not owner:
            self.fail(f"{value!r} is not of the form NAME=NAME", param, ctx)
        return alias, owner


class PartOf(ParamType["Part"]):
    """K/N: part K of N, counted from 1; `auto`: this process's part, as its launcher says."""

    name = "part"

    def convert(self, value: Any, param: Any, ctx: Any) -> Part:
        from ..api import Part

        if isinstance(value, Part):
            return value
        if value == "auto":
            if (launch := launched()) is None:
                names = " nor ".join(name for name, _ in LAUNCHERS.values())
                self.fail(f"no launcher says which part this is: there is no {names}", param, ctx)
            return Part(launch.rank + 1, launch.size)
        number, _, count = value.partition("/")
        if not number.isdecimal() or not count.isdecimal():
            self.fail(f"{value!r} is not of the form K/N, such as 1/8", param, ctx)
        return Part(int(number), int(count))


KINDS: dict[str, dict[str, Any]] = {
    "text": {},
    "texts": {"multiple": True},
    "switch": {"is_flag": True},
    "integer": {"type": int},
    "integers": {"type": Integers()},
    "size": {"type": ByteCount()},
    "json": {"type": Config()},
    "names": {"type": NameList()},
    "pairs": {"type": Pairs(), "multiple": True, "callback": merged},
    "rules": {"type": Rename(), "multiple": True},
    "ties": {"type": Tie(), "multiple": True},
}
"""What click needs for each kind of a declared option."""
