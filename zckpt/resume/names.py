"""Resumes without a copy: the path that a run gets has the names of the files, not their tensors.

The engine's own loader, which is given that path, loads the source instead (`zckpt/loading/`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .. import api
from ..errors import MissingExtra, WrongOption
from .runs import Candidate

ENGINE = "deepspeed"
HINT = "leave out copy=False: it is written for this size then"


def refuse_engine(source: str, engine: str) -> None:
    """Raises WrongOption for a checkpoint of another engine, or if DeepSpeed has another version.

    Raises MissingExtra if torch or DeepSpeed is not installed.
    """
    if engine != ENGINE:
        message = f"{source}: the engine of {engine} loads no checkpoint without a copy"
        raise WrongOption("load-unsupported", message, hint=HINT, file=source)
    try:
        import deepspeed  # noqa: F401

        from ..loading.support import refuse_version
    except ImportError as error:
        message = "copy=False needs torch and deepspeed, of which one is not installed"
        raise MissingExtra("extra-missing", message, hint=HINT) from error
    refuse_version(source)


def tag_in(source: str, report: Mapping[str, Any]) -> str:
    """Returns the tag of a target, which is the folder of its files in the `report` of `reshard`.

    Raises WrongOption if the engine could not load these files from memory.
    """
    from ..loading.support import STATES, refuse_files

    files: list[str] = report["files"]
    refuse_files(source, files)
    file = next(name for name in files if name.endswith(STATES))
    return os.path.basename(os.path.dirname(file))


def absolute(path: str) -> str:
    """Returns a path that means the same in other directories and processes; a URL unchanged."""
    return path if api.is_url(path) else os.path.abspath(path)


def serve(directory: str, candidate: Candidate, plan: Mapping[str, Any]) -> None:
    """Makes the engine's loader load `candidate` when it is given `directory`.

    Raises WrongOption for a version of DeepSpeed that was not tested.
    """
    from ..loading import hook

    words = {name: word for name, word in plan["words"].items() if name != "as_run"}
    path = absolute(candidate.path)
    hook.serve(directory, hook.Source(path, candidate.tag, plan["target_tag"], words))
