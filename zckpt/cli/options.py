"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ..core.dtypes import OPTIONS as DTYPES
from ..training.options import DCP_LAYOUTS, DIALECTS, OPTIMIZERS
from .parameters import Config, Names, Pairs, Rename, Size, Tie

Command = Callable[..., Any]


def renaming(command: Command) -> Command:
    """Other names for what the source, PATH or A holds."""
    return click.option(
        "--rename",
        type=Rename(),
        multiple=True,
        metavar="REGEX=REPL",
        help="Rewrite the names of parameters, as re.sub does; in order, if repeated.",
    )(command)


def tying(command: Command) -> Command:
    """Second names of tied weights that a file has once."""
    return click.option(
        "--tie",
        type=Tie(),
        multiple=True,
        metavar="NAME=NAME",
        help="A tied weight's second name that the source lacks, and its name in the source.",
    )(command)


def common(command: Command) -> Command:
    """What every command that reads a checkpoint understands."""
    for option in (
        click.option("-q", "--quiet", is_flag=True, help="No progress and no warnings."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON document."),
        click.option(
            "--step-policy",
            metavar="max|min|keep|N",
            help="The step to take where ranks or weights disagree, which is an error otherwise.",
        ),
        click.option(
            "--param-names",
            type=Names(),
            metavar="FILE",
            help="Names of parameters, one per line, where the source tells no order of them or "
            "knows them by number alone: those of model.named_parameters().",
        ),
        click.option("--tag", help="The tag, where a run directory holds several."),
        click.option("--from", "format", metavar="FORMAT", help="The source's format."),
    ):
        command = option(command)
    return command


def moving(command: Command) -> Command:
    """How bytes are read."""
    for option in (
        click.option(
            "--memory",
            type=Size(),
            default="256MiB",
            show_default=True,
            help="Bound of all buffers.",
        ),
        click.option(
            "-j",
            "--jobs",
            type=click.IntRange(1, 64),
            default=4,
            show_default=True,
            help="Threads; more for a cold or remote source.",
        ),
    ):
        command = option(command)
    return command


def copying(command: Command) -> Command:
    """How bytes are read and written."""
    for option in (
        click.option("--dry-run", is_flag=True, help="Say what would be written, and stop."),
        click.option(
            "--io",
            type=click.Choice(["auto", "direct", "buffered"]),
            default="auto",
            show_default=True,
            help="How files are written.",
        ),
        moving,
    ):
        command = option(command)
    return command


def writing(command: Command) -> Command:
    """What commands that write a checkpoint understand."""
    for option in (
        renaming,
        tying,
        click.option(
            "--max-file-size",
            type=Size(),
            help="Split larger safetensors and .distcp files [default: 8GiB]",
        ),
        click.option(
            "--group-defaults",
            type=Pairs(),
            multiple=True,
            metavar="[N:]K=V,...",
            help="Hyper-parameters that the source does not hold, for all groups or for group N; "
            "may be repeated.",
        ),
        click.option(
            "--dialect",
            type=click.Choice(DIALECTS),
            help="Kind of files: hdf5 (default) or l2 for onnxruntime, safetensors for gathered, "
            "accelerate for dcp.",
        ),
        click.option(
            "--dcp-layout",
            type=click.Choice(DCP_LAYOUTS),
            help="How torch.distributed.checkpoint's keys are made [default: the source's]",
        ),
        click.option(
            "--ds-config",
            "config",
            type=Config(),
            metavar="FILE",
            help="The ds_config that the target will run with, instead of the source's.",
        ),
        click.option(
            "--optimizer",
            type=click.Choice(OPTIMIZERS),
            help="Keep the step as this class of Adam does.",
        ),
        click.option(
            "--dtype",
            type=click.Choice(list(DTYPES)),
            help="What the module's weights become, made of the masters.",
        ),
        click.option("--weights-only", is_flag=True, help="Leave the optimizer's states out."),
        click.option(
            "--stage", type=click.Choice(["1", "2", "3"]), help="ZeRO stage [default: the source's]"
        ),
        click.option("--dp", type=int, help="Data-parallel size [default: the source's]"),
    ):
        command = option(command)
    return command
