"""Reads the weights of a checkpoint whose optimizer cannot be read.

A command that asks for weights alone gets them, and the manifest's `lost` states what was not read.
For any other command the error is raised, with a hint: the command that reads the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from shlex import quote
from typing import NoReturn

from msgspec.structs import replace

from ..core.checkpoint.manifest import Manifest
from ..errors import (
    MALFORMED,
    CorruptCheckpoint,
    IncompleteCheckpoint,
    UnsupportedCheckpoint,
    ZckptError,
)
from .reading import Reading

OF_FILES = (IncompleteCheckpoint, CorruptCheckpoint, UnsupportedCheckpoint)
"""Error classes for files that are missing, damaged, or of an unsupported kind."""
HALVES = ("BF16", "F16")


def is_of_files(error: ZckptError, are_optimizers: Callable[[str], bool]) -> bool:
    """Whether an error concerns only files of an optimizer, so that the weights are readable.

    `are_optimizers(path)` is true for an optimizer's file.
    """
    files = [notice.file for notice in error.notices]
    return isinstance(error, OF_FILES) and all(file and are_optimizers(file) for file in files)


def weights_or_raise(
    error: ZckptError,
    read_weights: Callable[[Reading], Manifest],
    path: str,
    reading: Reading,
    has_masters: bool = False,
    is_all: Callable[[Manifest], bool] = lambda _: False,
) -> Manifest:
    """Reads only the weights, after reading the optimizer failed with `error`.

    The manifest's `lost` states what was not read. Raises `error` if the command needs more than
    weights, or if the weights cannot be read either.

        read_weights    reads without the optimizer's files
        has_masters     whether fp32 masters were not read; `lost` says so if weights are 16-bit
        is_all          whether the whole optimizer is lost; then every command gets weights
    """
    try:
        manifest = read_weights(replace(reading, weights_only=True))
    except (ZckptError, *MALFORMED):
        _raise(error)
    tag = f" --tag {quote(reading.tag)}" if reading.tag else ""
    way = f"`zckpt convert {quote(path)} DST --weights-only{tag}` writes the weights: all are there"
    # if all of the optimizer is lost, a command that needs it raises an error later
    if not (reading.weights_only or is_all(manifest)):
        raise error.with_way(way) from error
    how = "not read" if isinstance(error, UnsupportedCheckpoint) else "lost"
    dtypes = {entry.dtype for entry in manifest.entries.values() if entry.slot == "param"}
    what, subject = "only the weights are read; the optimizer is", None
    if has_masters and not dtypes.isdisjoint(HALVES):
        what, subject = "only the 16-bit weights are read; the masters are", "master"
    lost = error.as_lost(f"{what} {how}", hint=way, subject=subject, file=manifest.root)
    return manifest.replace(lost=(lost,))


def _raise(error: ZckptError) -> NoReturn:
    raise error from None
