"""Commands, options and exit codes: what `zckpt` understands on a command line.

Exit codes: 0 done or equal, 1 could not do it (no target was made), 2 wrong usage, 3 `verify`,
`diff` or `probe-diff` looked and found something.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from typing import NoReturn

import click

from ..errors import CorruptCheckpoint, WrongOption, ZckptError
from ..errors import cause as why_of
from .commands import cli as cli


def main(arguments: list[str] | None = None) -> NoReturn:
    """The console script: runs a command, and prints an error as one sentence and a hint."""
    words = sys.argv[1:] if arguments is None else arguments
    if arguments is None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, stop)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path in another encoding
    try:
        code = cli.main(words, prog_name="zckpt", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        sys.exit(2)
    except click.UsageError as error:
        message = error.format_message()
        where = error.ctx.command_path if error.ctx else "zckpt"
        fail(words, "UsageError", message, f"`{where} --help` lists the options", 2)
    except WrongOption as error:
        fail(words, type(error).__name__, error.message, error.hint, 2)
    except ZckptError as error:
        fail(words, type(error).__name__, error.message, error.hint, 1)
    except BrokenPipeError:  # `zckpt inspect ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        fail(words, "OSError", what, "check the path, and whether you may read or write it", 1)
    except (click.Abort, KeyboardInterrupt) as error:
        cause = error.__cause__ if isinstance(error, click.Abort) else error
        code = 128 + (cause.args[0] if cause and cause.args else signal.SIGINT)
        fail(words, "Interrupted", "interrupted", "no target was made", code)
    except (MemoryError, RecursionError) as error:  # a last net: readers name the file
        what = f"the checkpoint cannot be read: {why_of(error)}"
        fail(words, "CorruptCheckpoint", what, CorruptCheckpoint.usual_hint, 1)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        fail(words, "InternalError", what, "a bug of zckpt: ZCKPT_TRACEBACK=1 shows where", 1)
    sys.exit(code if isinstance(code, int) else 0)


def stop(number: int, _frame: object) -> NoReturn:
    """Ends the command; ignores further signals while it cleans up."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt(number)


def fail(words: list[str], kind: str, message: str, hint: str, code: int) -> NoReturn:
    """Prints the error, as JSON if --json was given, and exits with `code`."""
    if os.environ.get("ZCKPT_TRACEBACK") and sys.exc_info()[0]:
        import traceback

        traceback.print_exc()
    from ..api import own_rank

    if "--json" in words and not own_rank():  # of several processes one prints a document
        command = next((word for word in words if word in cli.commands), None)
        report = {"zckpt": 1, "command": command, "error": kind, "message": message, "hint": hint}
        print(json.dumps(report))
    else:
        from ..display import safe

        click.echo(f"Error: {safe(message)}", err=True)
        for place, line in enumerate(hint.splitlines()):
            click.echo(f"{'' if place else 'Hint: '}{safe(line)}", err=True)
    sys.exit(code)
