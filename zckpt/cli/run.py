"""How does a command end? Its exit code, and the error that is printed.

Exit codes: 0 done or equal, 1 could not do it (no target was made), 2 wrong usage, 3 `verify`,
`diff`, `report`, `probe-diff` or `check` looked and found something.
"""

from __future__ import annotations

import gc
import json
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

import click
from msgspec import to_builtins

from ..core.description import VERSION
from ..core.resources import own_rank
from ..display.terminal import shown
from ..errors import (
    CorruptCheckpoint,
    Interrupted,
    Notice,
    ProcessFailed,
    WrongOption,
    ZckptError,
    meant,
    notice_of,
    safe,
)
from ..errors import cause as why_of
from . import output, signals
from .commands import cli

OBJECTS = 200_000  # new ones before Python looks for reference cycles


def main(arguments: list[str] | None = None) -> NoReturn:
    """The console script: runs the command of `arguments`, or of the process, and exits.

    An error is printed as one sentence and a hint.
    """
    words = sys.argv[1:] if arguments is None else arguments
    if arguments is None:
        # zckpt has threads of its own. Those of numpy's BLAS would wait for work in a loop.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        # With 10,000 tensors it would take a third of the time to look for cycles, which are few.
        gc.set_threshold(OBJECTS)
        signals.handle()
        output.set_up()
    try:
        if "" in words:
            raise WrongOption(
                "option-invalid",
                "an argument is empty",
                hint="a variable of your shell may be empty; `set -x` shows what the shell runs",
            )
        code = command(words)
    except ZckptError as error:
        if isinstance(error, ProcessFailed) and error.exit_code is not None:
            sys.exit(error.exit_code)  # another process prints it
        code = 2 if isinstance(error, WrongOption) else 1
        fail(words, type(error).__name__, error.notice, code)
    except OSError as error:
        fail(words, "OSError", notice_of(error), 1)
    except KeyboardInterrupt as error:
        code = 128 + (error.args[0] if error.args else signals.SIGINT)
        hint = after_interrupt(words, error)
        fail(words, "Interrupted", ended("interrupted", "interrupted", hint), code)
    except MemoryError:
        hint = "use a lower -j or --memory, or a machine with more memory"
        fail(words, "MemoryError", ended("out-of-memory", "too little memory is free", hint), 1)
    except RecursionError as error:  # a last net: readers name the file
        what = f"the checkpoint cannot be read: {why_of(error)}"
        hint = CorruptCheckpoint.usual_hint
        fail(words, "CorruptCheckpoint", ended("file-damaged", what, hint), 1)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        hint = "a bug of zckpt: please report it, with what ZCKPT_TRACEBACK=1 shows"
        fail(words, "InternalError", ended("internal-error", what, hint), 1)
    output.flush()
    sys.exit(code if isinstance(code, int) else 0)


OF_OTHERS = {
    ("zckpt reshard", "--to"): "reshard keeps the format of SRC: zckpt convert SRC DST --to FORMAT "
    "writes another one",
}
"""What to type instead of an option that another command has."""


def command(words: list[str]) -> Any:
    """What the command returns; ends the process for words that it does not understand."""
    try:
        return cli.main(words, prog_name="zckpt", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        sys.exit(2)
    except click.UsageError as error:
        message = error.format_message()
        where = error.ctx.command_path if error.ctx else "zckpt"
        hint = f"`{where} --help` lists the options"
        if isinstance(error, click.NoSuchOption) and error.ctx:
            flags = [flag for each in error.ctx.command.get_params(error.ctx) for flag in each.opts]
            like = OF_OTHERS.get((where, error.option_name)) or meant(error.option_name, flags)
            message, hint = error.message, like or hint  # click asks too, for less likely ones
        fail(words, "UsageError", ended("usage-error", message, hint), 2)
    except click.Abort as error:
        cause = error.__cause__
        raise cause if isinstance(cause, KeyboardInterrupt) else KeyboardInterrupt from None


def after_interrupt(words: Sequence[str], cause: BaseException | None) -> str:
    """What an interrupted command has left, and how to continue it."""
    if not isinstance(cause, Interrupted):
        return "no target was written"
    again = [word for word in words if word != "--resume"]
    return f"continue with: {shlex.join(['zckpt', *again, '--resume'])}"


def ended(code: str, message: str, hint: str) -> Notice:
    """Why a command ended, if no error of zckpt says it."""
    return Notice(code=code, severity="error", message=message, hint=hint)


def fail(words: list[str], kind: str, notice: Notice, code: int) -> NoReturn:
    """Prints the error, as JSON if --json was given, and exits with `code`."""
    if os.environ.get("ZCKPT_TRACEBACK") and sys.exc_info()[0]:
        traceback.print_exc()
    # of several processes one prints a document
    if "--json" in words and not ("--gather" in words and own_rank()):
        command = next((word for word in words if word in cli.commands), None)
        report = {"zckpt": VERSION, "command": command, "error": kind, **to_builtins(notice)}
        try:
            print(json.dumps(report), flush=True)
        except OSError:  # a full disk: Python's own end would write it again, and fail
            output.discard()
    else:
        with suppress(OSError):  # a full disk behind stderr: the exit code says it
            output.say(f"Error: {safe(notice.message)}{shown(notice.code, sys.stderr)}")
            for place, line in enumerate(notice.hint.splitlines()):
                output.say(f"{'' if place else 'Hint: '}{safe(line)}")
    sys.exit(code)
