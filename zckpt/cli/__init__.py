"""The command line: `main` runs it, and `cli` is the group of its commands.

`zckpt --version` is answered here, before click and the commands are imported.

    commands.py     inspect, convert, reshard, export: click's view of them
    checking.py     verify, diff, stats, probe-diff
    options.py      the options that they share; parameters.py reads values
    plain.py        the commonest command lines, understood without click
    work.py         what the commands do, once their words are understood
    run.py          how a command ends: exit code and error; signals.py at Ctrl-C
    launched.py     in this process alone, or in all processes of a launch
    help.py         how `--help` looks
"""

from __future__ import annotations

import gc
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from ..version import __version__

if TYPE_CHECKING:
    from .commands import cli as cli


def main(arguments: list[str] | None = None) -> NoReturn:
    """The console script: runs the command of `arguments`, or of the process, and exits."""
    if arguments is None and sys.argv[1:] == ["--version"]:
        try:
            os.write(1, f"zckpt, version {__version__}\n".encode())
        except OSError:  # no stdout, or a full disk behind it: click's own way says so
            pass
        else:
            sys.exit(0)
    if arguments is None:
        # What is read of a checkpoint has no cycles. To search it again and again while it grows
        # takes a tenth of the time. A progress bar starts the collector (display/terminal.py).
        gc.disable()
        # zckpt has threads of its own. Those of numpy's BLAS would wait for work in a loop.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from .run import run

    run(arguments)


def __getattr__(name: str) -> Any:
    if name == "cli":
        from .commands import cli

        return cli
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
