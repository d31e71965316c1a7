"""How does a command end? Its exit code, and the error that is printed.

Exit codes: 0 done or equal, 1 could not do it (no target was made), 2 wrong usage, 3 `verify`,
`diff` or `probe-diff` looked and found something.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from ..errors import (
    CorruptCheckpoint,
    Interrupted,
    ProcessFailed,
    WrongOption,
    ZckptError,
    hint_for,
    meant,
)
from ..errors import cause as why_of
from . import signals
from .plain import plain

UNPRINTABLE = "backslashreplace"
"""What happens to characters that the terminal's encoding lacks: a path may have them."""


def run(arguments: list[str] | None = None) -> NoReturn:
    """Runs a command, prints an error as one sentence and a hint, and exits."""
    words = sys.argv[1:] if arguments is None else arguments
    if arguments is None:
        signals.handle()
        open_standard_files()
        sys.stdout = output()
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=UNPRINTABLE)
    try:
        if "" in words:
            raise WrongOption(
                "an argument is empty",
                hint="a variable of your shell may be empty; `set -x` shows what the shell runs",
            )
        if line := plain(words):
            from . import work

            name, given = line
            code = work.COMMANDS[name](**given)
        else:
            code = command(words)
    except ProcessFailed as error:
        if error.code is not None:  # another process prints it
            sys.exit(error.code)
        fail(words, type(error).__name__, error.message, error.hint, 1)
    except WrongOption as error:
        fail(words, type(error).__name__, error.message, error.hint, 2)
    except ZckptError as error:
        fail(words, type(error).__name__, error.message, error.hint, 1)
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        fail(words, "OSError", what, hint_for(error), 1)
    except KeyboardInterrupt as error:
        code = 128 + (error.args[0] if error.args else signals.SIGINT)
        fail(words, "Interrupted", "interrupted", after_interrupt(words, error), code)
    except MemoryError:
        hint = "use a lower -j or --memory, or a machine with more memory"
        fail(words, "MemoryError", "too little memory is free", hint, 1)
    except RecursionError as error:  # a last net: readers name the file
        what = f"the checkpoint cannot be read: {why_of(error)}"
        fail(words, "CorruptCheckpoint", what, CorruptCheckpoint.usual_hint, 1)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        fail(
            words,
            "InternalError",
            what,
            "a bug of zckpt: please report it, with what ZCKPT_TRACEBACK=1 shows",
            1,
        )
    flush()
    code = code if isinstance(code, int) else 0
    if arguments is None and not is_watched():
        # Python's own end would free what is in memory, a tenth of the time of `inspect`. It has
        # nothing else to do, except for coverage and profilers, which write their reports there.
        with suppress(OSError):
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def is_watched() -> bool:
    """Whether a debugger, a profiler or coverage watches this process."""
    monitoring = getattr(sys, "monitoring", None)  # Python 3.12 and newer
    tools = [monitoring.get_tool(number) for number in range(6)] if monitoring else []
    return bool(sys.gettrace() or sys.getprofile() or any(tools))


OF_OTHERS = {
    ("zckpt reshard", "--to"): "reshard keeps the format of SRC: zckpt convert SRC DST --to FORMAT "
    "writes another one",
}
"""What to type instead of an option that another command has."""


def command(words: list[str]) -> Any:
    """What the command returns; ends the process for words that it does not understand."""
    import click

    from .commands import cli

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
        fail(words, "UsageError", message, hint, 2)
    except click.Abort as error:
        cause = error.__cause__
        raise cause if isinstance(cause, KeyboardInterrupt) else KeyboardInterrupt from None


def flush() -> None:
    """Ends the process with code 1 if the report cannot be written: a full disk behind stdout."""
    try:
        sys.stdout.flush()
    except OSError as error:
        with suppress(OSError):
            say(f"Error: the report could not be printed: {error.strerror}")
        os._exit(1)  # Python's own end would flush again


def open_standard_files() -> None:
    """Opens /dev/null for standard files that are closed.

    A target's file would get their numbers else, and libraries print errors to number 2.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


class Pipe(io.FileIO):
    """Standard output; when nobody reads it any more (`| head`), what follows goes nowhere.

    A command's exit code says what it did, not whether its report was read.
    """

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


def output() -> io.TextIOWrapper:
    """Standard output for every command."""
    pipe = Pipe(1, "w", closefd=False)
    encoding = getattr(sys.stdout, "encoding", None)
    return io.TextIOWrapper(
        io.BufferedWriter(pipe), encoding, UNPRINTABLE, line_buffering=pipe.isatty()
    )


def after_interrupt(words: Sequence[str], cause: BaseException | None) -> str:
    """What an interrupted command has left, and how to continue it."""
    if not isinstance(cause, Interrupted):
        return "no target was written"
    import shlex

    again = [word for word in words if word != "--resume"]
    return f"continue with: {shlex.join(['zckpt', *again, '--resume'])}"


def fail(words: list[str], kind: str, message: str, hint: str, code: int) -> NoReturn:
    """Prints the error, as JSON if --json was given, and exits with `code`."""
    if os.environ.get("ZCKPT_TRACEBACK") and sys.exc_info()[0]:
        import traceback

        traceback.print_exc()
    from ..proving import own_rank

    # of several processes one prints a document
    if "--json" in words and not ("--gather" in words and own_rank()):
        import json

        from .commands import cli

        command = next((word for word in words if word in cli.commands), None)
        report = {"zckpt": 1, "command": command, "error": kind, "message": message, "hint": hint}
        try:
            print(json.dumps(report), flush=True)
        except OSError:  # a full disk: Python's own end would write it again, and fail
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    else:
        from ..display import safe

        with suppress(OSError):  # a full disk behind stderr: the exit code says it
            say(f"Error: {safe(message)}")
            for place, line in enumerate(hint.splitlines()):
                say(f"{'' if place else 'Hint: '}{safe(line)}")
    sys.exit(code)


def say(line: str) -> None:
    """Prints a line on stderr."""
    print(line, file=sys.stderr, flush=True)
