"""The commands that show and write a checkpoint, each a thin layer over `zckpt.api`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from ..errors import NotEnoughSpace, WrongOption
from ..version import __version__
from . import launched, looking, signals
from .checking import diff, probe_diff, stats, verify
from .help import WIDTH, Commands, FormatName
from .options import (
    as_document,
    common,
    copying,
    exporting,
    grouped,
    masters_from_weights,
    reading,
    replicas,
    source_and_target,
    writing,
)
from .parameters import PATH


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDTH},
)
@click.version_option(__version__, prog_name="zckpt")
def cli() -> None:
    """Read, convert, write and prove sharded ZeRO checkpoints.

    `zckpt COMMAND --help` has examples and options. Begin with: zckpt inspect PATH
    """


@cli.command(
    examples=(
        "zckpt inspect run/checkpoint-500",
        "zckpt inspect run/checkpoint-500 --steps",
        "zckpt inspect run/checkpoint-500 --tensors '*/exp_avg' --layout",
    )
)
@click.argument("path", type=PATH)
@grouped(
    "What to show",
    "--tensors",
    metavar="GLOB",
    help="List the tensors whose name matches, such as '*/exp_avg'.",
)
@grouped(
    "What to show",
    "--steps",
    is_flag=True,
    help="List every place that stores a step, and which one is used.",
)
@grouped("What to show", "--layout", is_flag=True, help="Draw which file has which elements.")
@grouped(
    "What to show", "--state", is_flag=True, help="Print everything that is not a tensor, as JSON."
)
@common
def inspect(**words: Any) -> None:
    """Show what a checkpoint contains, without reading a tensor.

    PATH can be a directory of DeepSpeed, of torch.distributed.checkpoint, of torch.save files
    (whole, or one per rank) or of ONNX Runtime's rank files; a Hugging Face Trainer, Accelerate,
    Lightning or torchtitan directory around one of these; a single file; a universal checkpoint.
    """
    looking.inspect(**words)


@cli.command(
    examples=(
        "zckpt convert run/checkpoint-500 universal",
        "zckpt convert run/checkpoint-500 resumed --to dcp --dp 8",
        "zckpt convert run/checkpoint-500 weights --weights-only --dtype bf16",
    )
)
@source_and_target
@grouped(
    "Target",
    "--to",
    type=FormatName(targets=True),
    default="universal",
    show_default=True,
    help="The target's format: see `zckpt formats`.",
)
@writing
@replicas
@masters_from_weights
@copying
@common
def convert(source: str, target: str, to: str, **words: Any) -> None:
    """Write a checkpoint in another format.

    DST is a new directory. The report lists what its format cannot store.
    """
    write("convert", source, target, words, to=to)


@cli.command(
    examples=(
        "zckpt reshard run/checkpoint-500 resumed/checkpoint-500 --dp 16",
        "zckpt reshard run/checkpoint-500 resumed/checkpoint-500 --dp 4 --stage 3",
        "zckpt reshard run resumed --dp 16 --checkpoints best-and-last",
    )
)
@source_and_target
@grouped(
    "Source",
    "--checkpoints",
    type=click.Choice(["all", "best-and-last"]),
    metavar="WHICH",
    help="If SRC is a whole run: all or best-and-last.",
)
@writing
@replicas
@copying
@common
def reshard(source: str, target: str, **words: Any) -> None:
    """Write a checkpoint for another number of ranks or another ZeRO stage.

    DST is a new directory. The trainer of SRC resumes from it, unmodified, on --dp ranks. A
    universal SRC is written for the engine that it came from.
    """
    write("reshard", source, target, words)


@cli.command(
    examples=(
        "zckpt export run/checkpoint-500 model --dtype bf16",
        "zckpt export run/checkpoint-500 model --max-shard-size 5GB",
        "zckpt export run/global_step500 model --config ../base-model",
    )
)
@source_and_target
@grouped(
    "Target",
    "--to",
    type=click.Choice(["hf"]),
    default="hf",
    show_default=True,
    help="The kind of folder.",
)
@exporting
@replicas
@copying
@reading
def export(
    source: str,
    target: str,
    to: str,
    model_config: str | None,
    max_file_size: int | None,
    param_names: tuple[str, ...] | None,
    **words: Any,
) -> None:
    """Write the weights as a folder for from_pretrained, and nothing else.

    DST gets the weights (of a PEFT run: the adapter), configuration, tokenizer and processor files.
    Files that only a trainer needs are left out.
    """
    if param_names is not None:
        raise WrongOption(
            "--param-names does not apply to export",
            hint="leave it out: export writes no optimizer state",
        )
    write("export", source, target, words, config=model_config, max_shard_size=max_file_size)


def write(command: str, source: str, target: str, words: dict[str, Any], **more: Any) -> None:
    """The work that convert, reshard and export share: options, progress, the report."""
    from .. import api, display

    as_json, quiet = (words.pop(key) for key in ("as_json", "quiet"))
    dry_run: bool = words["dry_run"]
    copying = api.Copying(*(words.pop(key) for key in ("jobs", "memory", "io")))
    shown: list[str] = []

    def tell(warnings: Sequence[str]) -> None:
        shown.extend(warnings)
        display.warn(warnings, quiet or as_json)

    with display.progress(quiet or as_json or dry_run) as begin:
        report = launched.write(
            getattr(api, command),
            source,
            target,
            **more,
            **words,
            copying=copying,
            begin=begin,
            tell=tell,
            before_rename=signals.ignore,
        )
    if report is None:  # rank 0 reports what all have written
        return
    try:
        display.answer(report, as_json, quiet, display.converted, shown)
        sys.stdout.flush()
        if dry_run and report["bytes"] > report["free"]:
            raise NotEnoughSpace(
                f"{target} needs {report['bytes'] / 1e9:.3f} GB, but only "
                f"{report['free'] / 1e9:.3f} GB are free",
                hint="choose a target on another filesystem, or free some space",
            )
    except OSError as error:  # a full disk behind stdout
        if dry_run:
            raise
        click.echo(f"Warning: {target} is complete, but not reported: {error}", err=True)
        os._exit(0)


for command in (verify, diff, stats, probe_diff):
    cli.add_command(command)


@cli.command(examples=("zckpt formats", "zckpt formats --json"))
@as_document
def formats(as_json: bool) -> None:
    """List the formats that zckpt reads and writes."""
    from .. import display
    from ..formats import FORMATS

    listed = [
        {"format": f.name, "reads": f.reads, "writes": f.writes, "about": f.about} for f in FORMATS
    ]
    if as_json:
        display.document({"zckpt": 1, "command": "formats", "formats": listed})
    else:
        display.table(
            ("format", "reads", "writes", ""),
            [(f.name, f.reads, f.writes, f.about) for f in FORMATS],
        )
