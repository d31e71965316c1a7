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
    """Other names for the parameters of the source, PATH or A."""
    return click.option(
        "--rename",
        type=Rename(),
        multiple=True,
        metavar="REGEX=REPL",
        help="Rename parameters, as re.sub does. Repeat it for several rules; they apply in order.",
    )(command)


def tying(command: Command) -> Command:
    """Second names of tied weights that the source stores once."""
    return click.option(
        "--tie",
        type=Tie(),
        multiple=True,
        metavar="NAME=NAME",
        help="A tied weight: its second name, which the source lacks, and its name in the source.",
    )(command)


def common(command: Command) -> Command:
    """Options of every command that reads a checkpoint."""
    for option in (
        click.option("-q", "--quiet", is_flag=True, help="Print no progress and no warnings."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON document."),
        click.option(
            "--step-policy",
            metavar="max|min|keep|N",
            help="Which step to take if ranks or weights disagree [default: that is an error]",
        ),
        click.option(
            "--param-names",
            type=Names(),
            metavar="FILE",
            help="Names of the parameters in the order of model.named_parameters(), one per line, "
            "for a source that stores no order, or only their numbers.",
        ),
        click.option("--tag", help="Which tag to read, if a run directory has several."),
        click.option(
            "--from",
            "format",
            metavar="FORMAT",
            help="The source's format [default: recognised by content]",
        ),
    ):
        command = option(command)
    return command


def moving(command: Command) -> Command:
    """Options for reading tensors."""
    for option in (
        click.option(
            "--memory",
            type=Size(),
            default="256MiB",
            show_default=True,
            help="Limit for all buffers together.",
        ),
        click.option(
            "-j",
            "--jobs",
            type=click.IntRange(1, 64),
            default=4,
            show_default=True,
            help="Number of threads; use more for a cold or remote source.",
        ),
    ):
        command = option(command)
    return command


def copying(command: Command) -> Command:
    """Options for copying tensors."""
    for option in (
        click.option(
            "--dry-run", is_flag=True, help="Report what would be written, and write nothing."
        ),
        click.option(
            "--io",
            type=click.Choice(["auto", "direct", "buffered"]),
            default="auto",
            show_default=True,
            help="Write past the page cache (direct), through it (buffered), or as fits (auto).",
        ),
        moving,
    ):
        command = option(command)
    return command


def writing(command: Command) -> Command:
    """Options of the commands that write a checkpoint for training."""
    for option in (
        renaming,
        tying,
        click.option(
            "--max-file-size",
            type=Size(),
            help="Split safetensors and .distcp files that would be larger [default: 8GiB]",
        ),
        click.option(
            "--group-defaults",
            type=Pairs(),
            multiple=True,
            metavar="[N:]K=V,...",
            help="Hyper-parameters that the source does not store, for all groups or for group N. "
            "May be repeated.",
        ),
        click.option(
            "--dialect",
            type=click.Choice(DIALECTS),
            help="The kind of files to write: hdf5 (default) or l2 with --to onnxruntime, "
            "safetensors with --to gathered, accelerate with --to dcp.",
        ),
        click.option(
            "--dcp-layout",
            type=click.Choice(DCP_LAYOUTS),
            help="The form of the keys with --to dcp [default: the source's, or nested]",
        ),
        click.option(
            "--ds-config",
            "config",
            type=Config(),
            metavar="FILE",
            help="The ds_config that the target will run with [default: the source's]",
        ),
        click.option(
            "--optimizer",
            type=click.Choice(OPTIMIZERS),
            help="Store the step as this kind of Adam does [default: as the source]",
        ),
        click.option(
            "--dtype",
            type=click.Choice(list(DTYPES)),
            help="Store module weights in this type, cast from the fp32 masters.",
        ),
        click.option("--weights-only", is_flag=True, help="Write no optimizer state."),
        click.option(
            "--stage", type=click.Choice(["1", "2", "3"]), help="ZeRO stage [default: the source's]"
        ),
        click.option("--dp", type=int, help="Data-parallel size [default: the source's]"),
    ):
        command = option(command)
    return command
