"""Read, convert, write and prove sharded ZeRO checkpoints, without the engine that wrote them.

    read, load              a checkpoint's manifest, and one of its tensors
    inspect                 what a checkpoint holds
    convert, reshard        write it in another format, or for another number of ranks
    export                  weights for inference
    mend                    a copy of a damaged one, with what can be restored
    auto_resume             the path from which a run goes on, at any number of processes
    list_checkpoints        in which state each checkpoint of a run is
    group                   the processes of a launch, which share one of these functions
    verify, diff, stats     check it, compare it, look at its numbers
    report                  all of that as one document, and a page of it
    At                      a path in an object store that the program has opened
    zckpt.dcp               load it into a program of torch.distributed.checkpoint
    zckpt.deepspeed         load it into a DeepSpeed engine of any size; nothing is written
    zckpt.probe             what a running model computes: recorded, compared, streamed

Functions give the reports that the command line prints with --json. Errors are ZckptError.
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

_ELSEWHERE = {  # and not in api.py
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
    # on use: `zckpt --help` needs none of them
    if name in _NEED_TORCH:
        return import_module(f".{name}", __name__)
    if name in __all__:
        return getattr(import_module(f".{_ELSEWHERE.get(name, 'api')}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    own = [name for name in globals() if name.startswith("__")]
    return sorted([*own, *__all__, *(_NEED_TORCH if find_spec("torch") else ())])
