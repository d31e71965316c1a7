"""Runs a command: its exit code, and the error that it prints.

Exit codes: 0 done or equal; 1 failed (there is no target); 2 wrong usage; 3 `verify`, `diff`,
`report`, `probe-diff`, `check`, `list` or `mend --dry-run` found something.
"""

from __future__ import annotations

import gc
import json
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from ..core.passes.resources import own_rank
from ..errors import Interrupted, ProcessFailed, WrongOption, meant
from . import output, signals
from .commands import cli
from .failures import Failure, ended, failure_of, trace, with_mend

OBJECTS = 200_000  # how many new objects start Python's search for reference cycles


def main(arguments: list[str] | None = None) -> NoReturn:
    """The console script: runs the command in `arguments` (default: sys.argv), and exits.

    It prints an error as one sentence and a hint.
    """
    words = sys.argv[1:] if arguments is None else arguments
    if arguments is None:
        # zckpt starts its own threads. The threads of numpy's BLAS would only wait in a busy loop.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        # With 10,000 tensors, a third of the time would go into the search for cycles.
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
    except KeyboardInterrupt as error:
        code = 128 + (error.args[0] if error.args else signals.SIGINT)
        hint = after_interrupt(words, error)
        fail(words, Failure("Interrupted", ended("interrupted", "interrupted", hint), code))
    except Exception as error:
        if isinstance(error, ProcessFailed) and error.exit_code is not None:
            sys.exit(error.exit_code)  # another process prints the error
        fail(words, failure_of(error if "mend" in words else with_mend(error)))
    output.flush()
    sys.exit(code if isinstance(code, int) else 0)


WRITING = {"convert", "reshard", "export", "mend", "auto-resume"}
OF_OTHERS = {
    ("zckpt reshard", "--to"): "reshard keeps the format of SRC: zckpt convert SRC DST --to FORMAT "
    "writes another one",
    **{
        (f"zckpt {name}", "--html"): "zckpt report PATH writes the page of a checkpoint"
        for name in ("inspect", "verify", "diff", "stats")
    },
}
"""Hints for options that exist only in another command, by command and option."""


def command(words: list[str]) -> Any:
    """Runs the command in `words` and returns its result. Exits with code 2 at wrong usage."""
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
            message, hint = error.message, like or hint  # click's text has worse guesses
        fail(words, Failure("UsageError", ended("usage-error", message, hint), 2))
    except click.Abort as error:
        cause = error.__cause__
        raise cause if isinstance(cause, KeyboardInterrupt) else KeyboardInterrupt from None


def after_interrupt(words: Sequence[str], cause: BaseException | None) -> str:
    """The hint after an interrupt: how to continue the command, or that nothing was written."""
    if not isinstance(cause, Interrupted):
        return "no target was written" if WRITING & {*words} else "nothing was changed"
    again = [word for word in words if word != "--resume"]
    return f"continue with: {shlex.join(['zckpt', *again, '--resume'])}"


def fail(words: list[str], failure: Failure) -> NoReturn:
    """Prints the error, as JSON if `words` contain --json, and exits with the failure's code."""
    trace()
    # one process of several prints the document
    if "--json" in words and not ("--gather" in words and own_rank()):
        command = next((word for word in words if word in cli.commands), None)
        try:
            print(json.dumps(failure.document(command)), flush=True)
        except OSError:  # a full disk: at its exit, Python would try to write it again and fail
            output.discard()
    else:
        failure.tell()
    sys.exit(failure.code)
