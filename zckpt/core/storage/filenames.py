"""Numbers in the names of files, names that lead out of a folder, and the folders above a path."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator

from ...errors import CorruptCheckpoint, brief

COUNTED = re.compile(r"(?s)(.+)_(0|[1-9]\d*)", re.ASCII)


def file_names(pattern: str) -> re.Pattern[str]:
    r"""Compiles a pattern of file names, in which `(\d+)` matches only the digits 0 to 9."""
    return re.compile(pattern, re.ASCII)


def counted(name: str, ending: str) -> tuple[str, int] | None:
    """Splits a name such as `model_7.bin` into the text `model` and the number 7.

    `ending` is `.bin` here. None for a name that does not end with `_`, a number and `ending`.
    """
    match = COUNTED.fullmatch(name.removesuffix(ending)) if name.endswith(ending) else None
    return match and (match[1], int(match[2]))


def by_counting(names: Iterable[str]) -> list[str]:
    """Sorts names by the numbers in them, so that `step-9` comes before `step-10`.

    The order says nothing about time: see formats/order.py.
    """
    return sorted(names, key=counting)


def counting(name: str) -> tuple[list[str | int], str]:
    """The sort key of a file name, which sorts its numbers by value: `step-9` before `step-10`."""
    stem, ending = os.path.splitext(name)
    parts = re.split(r"([0-9]+)", stem if ending[1:].isalpha() else name)
    return [int(part) if place % 2 else part for place, part in enumerate(parts)], name


def numbered(name: str, number: int) -> str:
    """The name of the file or key of model number `number`: `optimizer_1.bin` for `optimizer.bin`.

    The number 0 leaves the name as it is.
    """
    stem, dot, ending = name.partition(".")
    return f"{stem}_{number}{dot}{ending}" if number else name


def number_of(name: str) -> int:
    """The number of a model in the name of its file or key: 1 for `model_1` and `optimizer_1.bin`.

    A name without a number belongs to the first model, so the result is 0.
    """
    stem_and_number = counted(name.partition(".")[0], "")
    return stem_and_number[1] if stem_and_number else 0


MOST_FOLDERS = 4
"""The maximum number of nested folders in a tag: `epoch_1/step_3` has two."""


def is_tag(tag: str) -> bool:
    """Whether a tag is a relative path that stays inside a folder, such as `epoch_1/step_3`."""
    parts = tag.split("/")
    return len(parts) <= MOST_FOLDERS and all(
        part.strip(".") and {*part}.isdisjoint("\\\0") for part in parts
    )


def path_inside(folder: str, name: str, stated_by: str) -> str:
    """The path of the file `name` in a folder; `stated_by` is the file that contains the name.

    Raises CorruptCheckpoint if the name leads out of the folder, or to the folder itself.
    """
    if not isinstance(name, str):
        raise CorruptCheckpoint(
            "unsafe-name",
            f"{folder}: a file name in {stated_by} is not a text: {brief(name)}",
            file=folder,
        )
    outside = os.path.isabs(name) or ".." in name.split("/") or os.path.normpath(name) == "."
    if outside or "\0" in name:
        raise CorruptCheckpoint(
            "unsafe-name",
            f"{folder}: {stated_by} names a file outside of this directory: {brief(name)}",
            file=folder,
        )
    return os.path.join(folder, name)


def with_parents(path: str) -> Iterator[str]:
    """Yields a path, the folder that contains it, and so on up to the root."""
    yield path
    while path != (path := os.path.dirname(path)):
        yield path
