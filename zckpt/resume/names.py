"""Resumes a run with other sizes without a resharded copy of the checkpoint on disk.

The program gets the path of a directory with empty files, which have the names of the engine's
files. When the program passes this path to the engine's own loader, zckpt reads the source
checkpoint, and gives the loader the contents of the files in memory (`zckpt/loading/`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .. import api
from ..errors import MissingExtra, WrongOption
from .runs import Candidate

ENGINE = "deepspeed"
HINT = "leave out copy=False: then zckpt writes a copy for this number of ranks"


def refuse_engine(source: str, engine: str) -> None:
    """Raises WrongOption if zckpt cannot load a checkpoint into `engine` without a copy on disk.

    zckpt can do this only for DeepSpeed, in an installed version that was tested. Raises
    MissingExtra if torch or DeepSpeed is not installed.
    """
    if engine != ENGINE:
        what = "copy=False (no resharded copy on disk) works only with DeepSpeed"
        message = f"{source}: {what}, and this checkpoint is for {engine}"
        raise WrongOption("load-unsupported", message, hint=HINT, file=source)
    try:
        import deepspeed  # noqa: F401

        from ..loading.support import refuse_version
    except ImportError as error:
        message = "copy=False needs torch and deepspeed, but one of them is not installed"
        raise MissingExtra("extra-missing", message, hint=HINT) from error
    refuse_version(source)


def tag_in(source: str, report: Mapping[str, Any]) -> str:
    """Finds the target's DeepSpeed tag in the report of `reshard`: the name of the tag's folder.

    Raises WrongOption if the target has files of tensor, pipeline or expert parallelism: zckpt does
    not load such files into an engine without a copy on disk.
    """
    from ..loading.support import STATES, refuse_files

    files: list[str] = report["files"]
    refuse_files(source, files)
    file = next(name for name in files if name.endswith(STATES))
    return os.path.basename(os.path.dirname(file))


def absolute(path: str) -> str:
    """Makes a path absolute, so that it is valid in other processes; a URL stays unchanged."""
    return path if api.is_url(path) else os.path.abspath(path)


def serve(directory: str, candidate: Candidate, plan: Mapping[str, Any]) -> None:
    """Makes `engine.load_checkpoint(directory)` load the checkpoint `candidate` in this process.

    The engine's files in `directory` are empty: programs look for their names before they load.
    `plan` has the arguments of `zckpt.reshard` (key `words`), and the tag in `directory`
    (`target_tag`). Raises WrongOption for a version of DeepSpeed that was not tested.
    """
    from ..loading import hook

    words = {name: word for name, word in plan["words"].items() if name != "as_run"}
    path = absolute(candidate.path)
    hook.serve(directory, hook.Source(path, candidate.tag, plan["target_tag"], words))
