"""The commands that show and write a checkpoint, each a thin layer over `zckpt.api`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from .. import display
from ..core.checkpoint.manifest import Manifest
from ..core.passes import description
from ..core.passes.description import Report
from ..core.version import __version__
from ..errors import NotEnoughSpace, WrongOption, counted, meant, safe, sized, warning
from ..formats import FORMATS, other_objects
from ..formats.reading import Reading
from ..judging import verdict
from ..remote.mirror import spelled
from ..remote.url_arguments import jobs_for, local, telling, translated
from ..remote.urls import is_url
from . import documents, launched, output, pages, several_paths, signals
from .checking import diff, probe_diff, stats, verify
from .help import WIDTH, Commands, format_names
from .mending import mend
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
    wide,
    writing,
)
from .parameters import PATH
from .resuming import auto_resume, check, list_run

LOCAL = warning(
    "option-without-effect",
    "--no-read-back changes nothing here: only uploads to an object store are read again",
    subject="--no-read-back",
)
OTHER_WORDS = {"max-shard-size": "max-file-size"}
"""Options named as in save_pretrained (transformers), and zckpt's names for them."""


@click.group(
    cls=Commands,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": WIDTH,
        "token_normalize_func": lambda word: OTHER_WORDS.get(word, word),
    },
)
@click.version_option(__version__, prog_name="zckpt")
def cli() -> None:
    """Read, convert, write and compare sharded checkpoints of ZeRO, FSDP and Megatron.

    `zckpt help COMMAND` has examples and options. Begin with: zckpt inspect PATH

    \b
    To let bash complete commands and options, add this to ~/.bashrc:
    eval "$(_ZCKPT_COMPLETE=bash_source zckpt)"
    (zsh: zsh_source; fish: _ZCKPT_COMPLETE=fish_source zckpt | source)
    """


@cli.command(
    examples=(
        "zckpt inspect run/checkpoint-500",
        "zckpt inspect run/checkpoint-500 --steps",
        "zckpt inspect run/checkpoint-500 --tensors '*/exp_avg' --layout",
    )
)
@several_paths.PATHS
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
@grouped("What to show", "--layout", is_flag=True, help="Draw which file stores which elements.")
@grouped(
    "What to show", "--state", is_flag=True, help="Print everything that is not a tensor, as JSON."
)
@wide
@common
def inspect(
    paths: tuple[str, ...],
    tensors: str | None,
    steps: bool,
    layout: bool,
    state: bool,
    wide: bool,
    as_json: bool,
    quiet: bool,
    **reading: Any,
) -> int:
    """Show what a checkpoint contains, without reading a tensor.

    PATH is a directory of DeepSpeed, Megatron, torch.distributed.checkpoint (DCP), torch.save
    (complete, or one file per rank) or ONNX Runtime. It may also be a universal checkpoint, a
    single file of torch.save, safetensors or ONNX Runtime, or the directory that Hugging Face
    Trainer, Accelerate, Lightning or torchtitan writes around a checkpoint. Only replicas in files
    without checksums are read, to compare them.
    """
    from ..reading import read

    several_paths.refuse_for_several(paths, "--state", state and not as_json, "add --json")
    asked = {"--state": state, "--steps": steps, "--layout": layout}
    asked["--tensors"] = bool(tensors) and not layout
    if not as_json and len(given := [flag for flag, is_asked in asked.items() if is_asked]) > 1:
        raise WrongOption(
            "options-conflict",
            f"{given[0]} and {given[1]} cannot be printed together",
            hint="give one of them, or add --json, which prints both",
        )
    is_report = as_json or not (tensors or steps or layout or state)

    def look(path: str) -> tuple[Report, int]:
        with local(path) as here, telling():
            manifest = read(here, Reading(**reading, inspected=True, nameless=True))
            if not is_report:
                if len(paths) > 1:
                    print(f"{safe(path)}:")
                show(manifest)
                return {}, 0
            manifest = verdict.with_warnings(manifest)
            report = description.inspect(manifest, other_objects(manifest))
            if as_json and (tensors or layout):
                report["tensors"] = description.tensors(manifest, tensors or "*", fragments=layout)
            if as_json and state:
                report["state"] = description.state(manifest)
            return translated(report), 0

    def show(manifest: Manifest) -> None:
        if manifest.run.origin.slices is not None:  # the list shows shapes of slices
            display.warn(translated(description.said(manifest.notices.warnings)), quiet)
        if state:
            display.document(description.state(manifest))
        elif steps:
            display.steps(manifest)
        elif layout:
            display.layout(manifest, tensors or "*", spelled)
        else:
            display.tensors(description.tensors(manifest, tensors or "*"), wide)

    if len(paths) > 1:
        line = display.summary_in_a_line if is_report else lambda *_: print()
        return several_paths.look_at_each("inspect", paths, look, line, as_json, quiet)
    report, code = look(paths[0])
    if is_report:
        display.answer(report, as_json, quiet, display.summary, wide)
    return code


def write(
    command: str,
    source: str,
    target: str,
    *,
    jobs: int | None,
    memory: int,
    io: str,
    dry_run: bool,
    asked: bool,
    as_json: bool,
    quiet: bool,
    **words: Any,
) -> None:
    """Runs `convert`, `reshard` or `export`, shows its progress, and prints the report."""
    from .. import api

    shown: list[dict[str, Any]] = []
    unused = [] if words["read_back"] or is_url(target) else [LOCAL]

    def tell(warnings: Sequence[dict[str, Any]]) -> None:
        shown.extend(warnings)
        display.warn(warnings, quiet or as_json)

    about = f"{source} to {target}"
    is_quiet = quiet or dry_run or not launched.speaks(words["single"])
    with display.progress(command, about, is_quiet, as_json=as_json, asked=asked) as begin:
        report = launched.write(
            getattr(api, command),
            source,
            target,
            **words,
            dry_run=dry_run,
            copying=api.Copying(jobs or jobs_for(memory, source), memory, io),
            begin=begin,
            tell=tell,
            before_rename=signals.ignore,
        )
    if report is None:  # rank 0 reports what all ranks have written
        return
    report["warnings"] += description.said(unused)
    try:
        display.answer(report, as_json, quiet, display.converted, shown)
        sys.stdout.flush()
        if dry_run and report["bytes"] > report["free"]:
            raise NotEnoughSpace(
                "not-enough-space",
                f"{target} needs {sized(report['bytes'])}, but only "
                f"{sized(report['free'])} are free",
                hint="choose a target on another filesystem, or free some space",
                file=target,
            )
    except OSError as error:  # a full disk behind stdout
        if dry_run:
            raise
        message = f"{target} is complete, but not reported: {error}"
        display.warn(description.said([warning("output-not-writable", message)]), quiet=False)
        output.discard()


@cli.command(
    examples=(
        "zckpt convert run/checkpoint-500 universal",
        "zckpt convert run/checkpoint-500 resumed --to dcp --dp 8",
        "zckpt convert run/checkpoint-500 weights --weights-only --dtype bf16",
    )
)
@source_and_target
@grouped(
    "Engine",
    "--to",
    default="universal",
    show_default=True,
    help="The target's format: see `zckpt formats`.",
    **format_names(targets=True),
)
@writing
@replicas
@masters_from_weights
@copying
@common
def convert(**words: Any) -> None:
    """Write a checkpoint in another format.

    DST is a new directory. The report lists the state that DST's format cannot store.
    """
    write("convert", **words)


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
    help="If SRC is a run: write all or best-and-last.",
)
@writing
@replicas
@masters_from_weights
@copying
@common
def reshard(**words: Any) -> None:
    """Write a checkpoint for another number of ranks or another ZeRO stage.

    DST is a new directory in the format of SRC. The program that saved SRC resumes from DST. If SRC
    is universal, DST has the format from which SRC was converted.
    """
    write("reshard", **words)


@cli.command(
    examples=(
        "zckpt export run/checkpoint-500 model --dtype bf16",
        "zckpt export run/checkpoint-500 model --max-file-size 5GB",
        "zckpt export run/global_step500 model --config ../base-model",
    )
)
@source_and_target
@grouped(
    "Files",
    "--to",
    type=click.Choice(["hf"]),
    default="hf",
    show_default=True,
    help="The layout of DST.",
)
@exporting
@replicas
@copying
@reading
def export(
    to: str,
    model_config: str | None,
    max_file_size: int | None,
    param_names: tuple[str, ...] | None,
    **words: Any,
) -> None:
    """Write the weights as a folder for from_pretrained, without training state.

    DST gets the weights (of a PEFT run: the adapter), and the configuration, tokenizer and
    processor files. It does not get files that only a trainer needs.
    """
    if param_names is not None:
        raise WrongOption(
            "option-not-applicable",
            "--param-names does not apply to export",
            hint="leave it out: export writes no optimizer state",
        )
    write("export", config=model_config, max_shard_size=max_file_size, **words)


for command in (mend, auto_resume, check, list_run, verify, diff, stats, pages.report, probe_diff):
    cli.add_command(command)


@cli.command(
    "clean-up",
    examples=(
        "zckpt clean-up s3://bucket/resumed --dry-run",
        "zckpt clean-up s3://bucket/resumed",
    ),
)
@click.argument("url", type=PATH)
@grouped("Output", "--dry-run", is_flag=True, help="List what would be removed.")
@as_document
def clean_up(url: str, dry_run: bool, as_json: bool) -> None:
    """Remove what a stopped run has left in an object store, without asking.

    URL is the DST of the stopped run. Make sure first that the run no longer writes. clean-up
    removes the files that the run listed in zckpt-unfinished.json, but never a complete checkpoint.
    Unfinished uploads of other programs are only listed, each with the command that ends it.
    """
    from ..remote.cleanup import clean_up

    report = clean_up(url, dry_run)
    if as_json:
        display.document(report)
        return
    for name in report["files"]:
        print(f"  {safe(name)}")
    for key in report["uploads"]:
        print(f"  {safe(key)} (an unfinished upload)")
    for upload in report["other_uploads"]:
        print(f"  {safe(upload['key'])} (of another program; to end it: {safe(upload['command'])})")
    if not report["files"] and not report["uploads"]:
        print(f"nothing was removed: zckpt has begun nothing at {safe(report['path'])}")
        return
    done = "would be removed from" if dry_run else "removed from"
    files = counted(len(report["files"]) + len(report["uploads"]), "file")
    print(f"{files} ({sized(report['bytes'])}) {done} {safe(report['path'])}")


@cli.command(examples=("zckpt formats", "zckpt formats --json"))
@as_document
def formats(as_json: bool) -> None:
    """List the formats that zckpt reads and writes."""
    listed = [
        {"format": f.name, "reads": f.reads, "writes": f.writes, "about": f.about} for f in FORMATS
    ]
    if as_json:
        display.document({"zckpt": description.VERSION, "command": "formats", "formats": listed})
    else:
        display.table(
            ("format", "reads", "writes", ""),
            [(f.name, f.reads, f.writes, f.about) for f in FORMATS],
            prose=True,
        )


@cli.command("schema", examples=("zckpt schema verify", "zckpt schema progress"))
@click.argument("command")
def schema(command: str) -> None:
    """Print the JSON Schema of COMMAND's --json output.

    Give "progress" as COMMAND for the schema of the lines of --json --progress.
    """
    display.document(documents.schema(command))


def completed_command(
    context: click.Context, _: click.Parameter, begin: str
) -> list[CompletionItem]:
    return [CompletionItem(name) for name in cli.list_commands(context) if name.startswith(begin)]


@cli.command("help", examples=("zckpt help", "zckpt help convert"))
@click.argument("command", required=False, shell_complete=completed_command)
@click.pass_context
def print_help(context: click.Context, command: str | None) -> None:
    """Print the help of COMMAND, or the list of commands."""
    above = context.find_root()
    if command is None:
        click.echo(above.get_help())
        return
    meant_command = cli.get_command(above, command)
    if meant_command is None:
        hint = meant(command, cli.commands) or "`zckpt help` lists the commands"
        raise WrongOption("usage-error", f"there is no command {command}", hint=hint)
    settings = {"info_name": command, "parent": above, **cli.context_settings}
    click.echo(click.Context(meant_command, **settings).get_help())
