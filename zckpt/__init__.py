"""Read, convert, write and compare sharded checkpoints without the engine that wrote them.

    read, load              reads a checkpoint's manifest; loads one tensor
    inspect                 reports what a checkpoint contains
    convert, reshard        writes a checkpoint in another format, or for another number of ranks
    export                  writes a checkpoint's weights for inference
    mend                    writes a repaired copy of a damaged checkpoint
    auto_resume             finds the path from which a run resumes, on any number of processes
    list_checkpoints        lists the checkpoints of a run and their state
    group                   joins the processes of a launch, to share one of these functions
    verify, diff, stats     checks a checkpoint, compares two, measures the tensors
    report                  makes one document of all this, which `zckpt report` shows as a page
    At                      a path in an object store that the program has opened
    zckpt.dcp               loads a checkpoint into a program of torch.distributed.checkpoint
    zckpt.deepspeed         loads a checkpoint into a DeepSpeed engine of any size, without a copy
    zckpt.probe             records what a running model computes, compares runs, streams weights

The functions return the reports that the command line prints with --json. They raise ZckptError.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .core.version import __version__ as __version__

if TYPE_CHECKING:
    from . import dcp as dcp
    from . import deepspeed as deepspeed
    from . import probe as probe
    from .api import (
        At,
        Copying,
        Manifest,
        Options,
        Part,
        convert,
        diff,
        export,
        inspect,
        load,
        mend,
        read,
        reshard,
        stats,
        verify,
    )
    from .errors import ZckptError
    from .processes.sharing import group
    from .reporting.document import report
    from .resume.auto import auto_resume
    from .resume.listing import list_checkpoints

_ELSEWHERE = {  # names that are not in api.py
    "auto_resume": "resume.auto",
    "group": "processes.sharing",
    "list_checkpoints": "resume.listing",
    "report": "reporting.document",
    "ZckptError": "errors",
}
_NEED_TORCH = ("dcp", "deepspeed", "probe")
__all__ = [
    "At",
    "Copying",
    "Manifest",
    "Options",
    "Part",
    "ZckptError",
    "auto_resume",
    "convert",
    "diff",
    "export",
    "group",
    "inspect",
    "list_checkpoints",
    "load",
    "mend",
    "read",
    "report",
    "reshard",
    "stats",
    "verify",
]


def __getattr__(name: str) -> Any:
    # imported on use, because `zckpt --help` needs none of these modules
    if name in _NEED_TORCH:
        return import_module(f".{name}", __name__)
    if name in __all__:
        return getattr(import_module(f".{_ELSEWHERE.get(name, 'api')}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    own = [name for name in globals() if name.startswith("__")]
    return sorted([*own, *__all__, *(_NEED_TORCH if find_spec("torch") else ())])
