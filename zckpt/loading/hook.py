"""Makes `engine.load_checkpoint` load the real checkpoint when it gets a directory of empty files.

`auto_resume(copy=False)` makes this directory for programs that look for the files' names, and
writes no copy. `serve` tells which checkpoint belongs to the directory. Its first call replaces
`DeepSpeedEngine.load_checkpoint` in this process; for any other path, the method works as before,
but refuses a directory of empty files. `undo` restores the original method.
"""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any

from msgspec import Struct

from ..core.storage.names_alone import refuse_names
from .load import load
from .support import refuse_version


class Source(Struct, frozen=True):
    """The real checkpoint that an engine loads in place of a directory of empty files.

    path, tag    the real checkpoint
    words        keyword arguments for `zckpt.reshard`
    target       the tag of the empty files
    """

    path: str
    tag: str | None
    target: str | None
    words: dict[str, Any]


_served: dict[str, Source] = {}  # by the directory's path without links
_original: list[Any] = []


def serve(directory: str, source: Source) -> None:
    """Makes `engine.load_checkpoint(directory)` load the checkpoint `source` in this process.

    Raises WrongOption for a version of DeepSpeed that was not tested.
    """
    refuse_version(source.path)
    _served[os.path.realpath(directory)] = source
    if not _original:
        _replace()


def undo() -> None:
    """Restores DeepSpeed's own `load_checkpoint`, which `serve` has replaced."""
    _served.clear()
    if _original:
        from deepspeed.runtime.engine import DeepSpeedEngine

        DeepSpeedEngine.load_checkpoint = _original.pop()


def _replace() -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    original = DeepSpeedEngine.load_checkpoint
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_checkpoint(*arguments: Any, **words: Any) -> Any:
        given = signature.bind(*arguments, **words).arguments
        directory = os.fspath(given["load_dir"])
        source = _served.get(os.path.realpath(directory))
        if source is None:
            refuse_names(directory)
        # a program may pass the tag of the empty files, or none
        if source is None or given.get("tag") not in (None, source.target):
            return original(*arguments, **words)
        about = given.pop("self"), source.path, source.tag
        given = {name: given[name] for name in given.keys() - {"load_dir", "tag"}}
        return load(*about, given, **source.words)

    _original.append(original)
    DeepSpeedEngine.load_checkpoint = load_checkpoint
