"""Which options do the commands have, and in which order?

Those of a conversion are declared by the formats that understand them: see formats/options.py.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

import click

from .. import formats
from ..formats.format import Format
from ..formats.options import declared
from ..training.options import PARAM_NAMES, RENAME, WEIGHTS_ONLY, Option
from .parameters import KINDS, Size

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]


def together(*options: Decorator) -> Decorator:
    """One decorator for several options, in the order of `--help`."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def asked(option: Option[Any]) -> Decorator:
    """The command line's option for one that is declared."""
    end = f" [default: {option.usual}]" if option.usual else "."
    how = {"type": click.Choice(option.choices)} if option.choices else KINDS[option.kind]
    words = {"help": option.help + end, "metavar": option.metavar, **how}
    return click.option(option.flag, option.name, **words)


def of_targets(targets: Iterable[Format], without: Container[Option[Any]]) -> Decorator:
    """The options that these formats understand as targets."""
    return together(*(asked(option) for option in declared(targets) if option not in without))


renaming = asked(RENAME)
"""Other names for the parameters of the source, PATH or A."""

common = together(
    click.option(
        "--from",
        "format",
        metavar="FORMAT",
        help="The source's format [default: recognised by content]",
    ),
    click.option("--tag", help="Which tag to read, if a run directory has several."),
    asked(PARAM_NAMES),
    click.option(
        "--step-policy",
        metavar="max|min|keep|N",
        help="Which step to take if ranks or weights disagree [default: that is an error]",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON document."),
    click.option("-q", "--quiet", is_flag=True, help="Print no progress and no warnings."),
)
"""Options of every command that reads a checkpoint."""

moving = together(
    click.option(
        "-j",
        "--jobs",
        type=click.IntRange(1, 64),
        default=4,
        show_default=True,
        help="Number of threads; use more for a cold or remote source.",
    ),
    click.option(
        "--memory",
        type=Size(),
        default="256MiB",
        show_default=True,
        help="Limit for all buffers together.",
    ),
)
"""Options for reading tensors."""

copying = together(
    moving,
    click.option(
        "--io",
        type=click.Choice(["auto", "direct", "buffered"]),
        default="auto",
        show_default=True,
        help="Write past the page cache (direct), through it (buffered), or as fits (auto).",
    ),
    click.option(
        "--resume",
        is_flag=True,
        help="Continue an interrupted run of the same source and options. Without one, start.",
    ),
    click.option(
        "--dry-run", is_flag=True, help="Report what would be written, and write nothing."
    ),
)
"""Options for copying tensors."""

writing = of_targets([item for item in formats.FORMATS if item.is_resumed], without={PARAM_NAMES})
"""Options of the commands that write a checkpoint for training."""

exporting = of_targets([formats.named("hf")], without={PARAM_NAMES, WEIGHTS_ONLY})
"""Options of `export`, which always writes weights only."""
