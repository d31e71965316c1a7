"""Turns the text of an option into its value: a size, names, pairs, rules.

The functions raise click.BadParameter for a text that they cannot parse.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from ..core.storage.sources import opened
from ..errors import MALFORMED, cause
from ..processes.launcher import LAUNCHERS, launched
from ..remote.url_arguments import local
from ..remote.urls import is_url

if TYPE_CHECKING:
    from ..api import Part

PATH = click.Path(readable=False)  # zckpt's own errors say why a path cannot be read
"""The type of arguments that are files or directories; a shell completes them."""
UNITS = {"": 1, "K": 1000, "M": 10**6, "G": 10**9, "T": 10**12}
UNITS |= {f"{unit}I": 1024**power for power, unit in enumerate("KMGT", 1)}


def size(text: str) -> int:
    """Parses a number of bytes: 256MiB, 8GiB, 500MB, 1000000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.upper())
    if not match or match[2] not in UNITS:
        raise click.BadParameter(f"{text!r} is not a size: write 256MiB, 8GiB, 500MB or 1000000")
    return int(float(match[1]) * UNITS[match[2]])


def pairs(text: str) -> dict[Any, Any]:
    """Parses pairs of a name and a JSON value: lr=3e-4,betas=[0.9,0.95],fused=null.

    1:lr=3e-4 gives {1: {"lr": 3e-4}}: a value for group 1.
    """
    number, colon, rest = text.partition(":")
    if not (colon and number.strip().isdecimal()):
        number, rest = "", text
    values: dict[str, Any] = {}
    try:
        while rest:
            key, _, rest = rest.partition("=")
            values[key.strip()], end = json.JSONDecoder().raw_decode(rest := rest.lstrip())
            comma, rest = rest[end:].lstrip()[:1], rest[end:].lstrip()[1:]
            if comma not in ("", ","):
                raise ValueError(comma)
    except MALFORMED:
        values = {}
    if not values or not all(key.isidentifier() for key in values):
        raise click.BadParameter(f"{text!r} is not a list such as lr=3e-4,weight_decay=0.1")
    for key, item in values.items():
        values[key] = tuple(item) if isinstance(item, list) else item
    return {int(number): values} if number else values


def merged(
    _context: click.Context, _option: click.Parameter, values: Sequence[dict[Any, Any]]
) -> dict[Any, Any]:
    """Merges the dictionaries of an option that was given several times, such as --group-defaults.

    Values for a single optimizer group are in a dictionary under the group's number.
    """
    defaults: dict[Any, Any] = {}
    for group_values in values:
        for key, value in group_values.items():
            defaults[key] = {**defaults.get(key, {}), **value} if isinstance(key, int) else value
    return defaults


def in_file(path: str, parse: Callable[[str], Any]) -> Any:
    """Reads a text file, which may be at a URL, and returns the result of `parse` for its text."""
    try:
        with local(path) as here, opened(here) if is_url(path) else open(here, "rb") as file:
            return parse(file.read().decode("utf-8-sig"))  # Windows begins with a mark
    except FileNotFoundError as error:
        raise click.BadParameter(f"{path} does not exist") from error
    except json.JSONDecodeError as error:
        raise click.BadParameter(f"{path} is no JSON: {error.msg}, line {error.lineno}") from error
    except (OSError, *MALFORMED) as error:
        why = error if isinstance(error, OSError) else cause(error)
        raise click.BadParameter(f"{path} cannot be read: {why}") from error


def config(path: str) -> dict[str, Any]:
    """Reads a JSON file that contains an object."""
    document = in_file(path, json.loads)
    if not isinstance(document, dict):
        raise click.BadParameter(f"{path} is not a JSON object")
    return document


def names_in(text: str) -> Any:
    """Parses a list of names: a JSON list, or else a text with one name per line."""
    return json.loads(text) if text.lstrip().startswith("[") else text.splitlines()


class Names(tuple[str, ...]):
    """Names that a user gives in the file `path`, such as those of `--param-names`."""

    path: str


def names(path: str) -> Names:
    """Reads a file of names: one per line, or a JSON list."""
    listed = in_file(path, names_in)
    if not listed or not all(isinstance(name, str) for name in listed):
        raise click.BadParameter(f"{path} is not a list of names, one per line or as JSON")
    parsed = Names(name.strip() for name in listed if name.strip())
    parsed.path = path
    return parsed


def integers(text: str) -> tuple[int, ...]:
    """Parses integers between commas: 0,12,24."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise click.BadParameter(f"{text!r} is not a list of integers such as 0,12,24")
    return tuple(map(int, parts))


def rule(text: str) -> tuple[str, str]:
    """Parses REGEX=REPL, separated at the last `=`."""
    regex, equals, replacement = text.rpartition("=")
    if not equals:
        raise click.BadParameter(f"{text!r} is not of the form REGEX=REPL")
    return regex, replacement


def tie(text: str) -> tuple[str, str]:
    """Parses ALIAS=NAME: the second name of a tied weight, and its name in the source."""
    alias, _, owner = text.partition("=")
    if not alias or not owner:
        raise click.BadParameter(f"{text!r} is not of the form NAME=NAME")
    return alias, owner


def part(text: str) -> Part:
    """Parses K/N: part K of N, counted from 1. `auto`: the rank of this process, plus 1."""
    from ..api import Part

    if text == "auto":
        if (launch := launched()) is None:
            variables = " or ".join(name for name, _ in LAUNCHERS.values())
            raise click.BadParameter(f"--part auto needs a launcher that sets {variables}")
        return Part(launch.rank + 1, launch.size)
    number, _, count = text.partition("/")
    if not number.isdecimal() or not count.isdecimal():
        raise click.BadParameter(f"{text!r} is not of the form K/N, such as 1/8")
    return Part(int(number), int(count))


KINDS: dict[str, dict[str, Any]] = {
    "text": {},
    "texts": {"multiple": True},
    "switch": {"is_flag": True},
    "integer": {"type": int},
    "integers": {"type": integers},
    "size": {"type": size},
    "json": {"type": config, "shell_complete": PATH.shell_complete},
    "names": {"type": names, "shell_complete": PATH.shell_complete},
    "pairs": {"type": pairs, "multiple": True, "callback": merged},
    "rules": {"type": rule, "multiple": True},
    "ties": {"type": tie, "multiple": True},
}
"""The arguments of `click.option` for each kind of declared option."""
