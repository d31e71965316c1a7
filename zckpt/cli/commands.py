"""The commands of `zckpt`, each a thin layer over a function of `zckpt.api`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from ..errors import NotEnoughSpace, WrongOption
from ..version import __version__
from . import signals
from .options import common, copying, exporting, moving, renaming, writing


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="zckpt")
def cli() -> None:
    """Read, convert, write and prove sharded ZeRO checkpoints."""


@cli.command()
@click.argument("path")
@click.option(
    "--tensors", metavar="GLOB", help="List the tensors whose name matches, such as '*/exp_avg'."
)
@click.option(
    "--steps", is_flag=True, help="List every place that stores a step, and which one is used."
)
@click.option("--layout", is_flag=True, help="Draw which file holds which elements.")
@click.option("--state", is_flag=True, help="Print everything that is not a tensor, as JSON.")
@common
def inspect(
    path: str,
    tensors: str | None,
    steps: bool,
    layout: bool,
    state: bool,
    as_json: bool,
    quiet: bool,
    **reading: Any,
) -> None:
    """Show what a checkpoint contains. Reads no tensor.

    PATH can be a directory of DeepSpeed, of torch.distributed.checkpoint, of torch.save files
    (whole, or one per rank) or of ONNX Runtime's rank files; a Hugging Face Trainer, Accelerate,
    Lightning or torchtitan directory around one of these; a single file; a universal checkpoint.
    """
    from .. import api, display

    manifest = api.read(path, **reading)
    if as_json:
        report = api.inspect(manifest)
        if tensors or layout:
            report["tensors"] = api.tensors(manifest, tensors or "*", fragments=layout)
        if state:
            report["state"] = api.state(manifest)
        display.document(report)
    elif state:
        display.document(api.state(manifest))
    elif steps:
        display.steps(manifest)
    elif layout:
        display.layout(manifest, tensors or "*")
    elif tensors:
        display.tensors(api.tensors(manifest, tensors))
    else:
        display.summary(api.inspect(manifest), quiet)


@cli.command()
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option(
    "--to", default="universal", show_default=True, metavar="FORMAT", help="The target's format."
)
@writing
@copying
@common
def convert(source: str, target: str, to: str, **words: Any) -> None:
    """Write SRC as a new checkpoint DST, in another format.

    Only the weights, for inference: zckpt convert SRC DST --weights-only --dtype bf16
    """
    write("convert", source, target, words, to=to)


@cli.command()
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option(
    "--checkpoints",
    type=click.Choice(["all", "best-and-last"]),
    help="SRC is a Trainer's output directory: write all its checkpoints, or the best and "
    "the last.",
)
@writing
@copying
@common
def reshard(source: str, target: str, **words: Any) -> None:
    """Write SRC as DST for another number of ranks or another ZeRO stage.

    The unmodified trainer of SRC resumes from DST on --dp ranks. A universal SRC is written for the
    engine that it came from.
    """
    write("reshard", source, target, words)


@cli.command()
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option(
    "--to", type=click.Choice(["hf"]), default="hf", show_default=True, help="The kind of folder."
)
@exporting
@copying
@common
def export(
    source: str,
    target: str,
    to: str,
    model_config: str | None,
    max_file_size: int | None,
    param_names: tuple[str, ...] | None,
    **words: Any,
) -> None:
    """Write the weights of SRC as a folder for from_pretrained, and nothing else.

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
        report = getattr(api, command)(
            source,
            target,
            **more,
            **words,
            copying=copying,
            begin=begin,
            tell=tell,
            before_rename=signals.ignore,
        )
    try:
        if as_json:
            display.document(report)
        else:
            display.converted(report, quiet, shown)
        sys.stdout.flush()
        if dry_run and report["bytes"] > report["free"]:
            raise NotEnoughSpace(
                f"{target} needs {report['bytes'] / 1e9:.3f} GB, {report['free'] / 1e9:.3f} GB are "
                "free",
                hint="choose a target on another filesystem, or free some space",
            )
    except OSError as error:  # a full disk behind stdout
        if dry_run:
            raise
        click.echo(f"Warning: {target} is complete, but not reported: {error}", err=True)
        os._exit(0)


@cli.command()
@click.argument("path")
@click.option(
    "--against",
    metavar="PATH",
    help="Compare with this checkpoint (of any format), or with a saved proof.",
)
@click.option(
    "--gather",
    is_flag=True,
    help="Rebuild PATH as its engine would, by all-gathering the ranks. Needs torch.",
)
@click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    help="Where to gather and compare [default: a GPU if there is one]",
)
@click.option("--tensors", metavar="GLOB", help="Check only the tensors whose name matches.")
@click.option("--save-proof", metavar="FILE", help="Write the report, with all checksums, to FILE.")
@renaming
@moving
@common
def verify(
    path: str,
    against: str | None,
    save_proof: str | None,
    as_json: bool,
    quiet: bool,
    **words: Any,
) -> int:
    """Check a checkpoint for internal consistency, or compare it with another.

    Without --against, verify checks the checksums of files and tensors, that every element is
    stored once, that copies on several ranks are equal, that weights are the rounded masters, and
    steps. It can only find contradictions. Two swapped rank files of a ZeRO-3 checkpoint without
    16-bit weights do not contradict each other: use --against.

    --against a checkpoint compares shared tensors bit for bit, steps and hyper-parameters by value.
    If the original is gone, use --against the FILE of an earlier --save-proof.

    --gather shares no code with the copying except the parser of files. It is faster on several
    GPUs: torchrun --nproc-per-node 4 -m zckpt verify PATH --against PATH --gather

    Exit code 3: verify found something.
    """
    from .. import api, display

    if save_proof:
        display.can_save(save_proof)
    with display.progress(quiet or as_json) as begin:
        report = api.verify(path, against, begin=begin, **words)
    if report["rank"]:  # rank 0 reports the findings of all
        return 0
    if as_json:
        display.document(report)
    else:
        display.verified(report, quiet)
    if save_proof:
        display.save(save_proof, report)
    return 0 if report["equal"] else 3


@cli.command()
@click.argument("a")
@click.argument("b")
@click.option(
    "--tensors",
    metavar="GLOB",
    help="Compare only the tensors whose name matches, and list equal ones too.",
)
@renaming
@moving
@common
def diff(a: str, b: str, as_json: bool, quiet: bool, **words: Any) -> int:
    """Show the differences between two checkpoints of any format: the first and the worst.

    Compares tensors in the order of the model, steps, hyper-parameters and schedulers.

    Exit code 3: something differs.
    """
    from .. import api, display

    with display.progress(quiet or as_json) as begin:
        report = api.diff(a, b, begin=begin, **words)
    if as_json:
        display.document(report)
    else:
        display.differing(report, quiet)
    return 0 if report["equal"] else 3


@cli.command()
@click.argument("path")
@click.option("--tensors", metavar="GLOB", help="Measure only the tensors whose name matches.")
@moving
@common
def stats(path: str, as_json: bool, quiet: bool, **words: Any) -> None:
    """Show statistics of every tensor in PATH, and warn of dead or impossible numbers.

    Over finite numbers, in float64: min, max, mean, std (with n - 1, as torch.std) and L2 norm.
    Counts of NaN, infinite, negative, zero and positive numbers. A histogram of magnitudes in
    powers of two. Warnings name second moments that are zero or negative, constant weights, NaN,
    infinities, and steps that stopped in low precision.
    """
    from .. import api, display

    with display.progress(quiet or as_json) as begin:
        report = api.stats(path, begin=begin, **words)
    if as_json:
        display.document(report)
    else:
        display.statistics(report, quiet)


@cli.command("probe-diff")
@click.argument("a", metavar="RUN_A")
@click.argument("b", metavar="RUN_B")
@click.option(
    "--noise",
    metavar="RUN_A2",
    help="A repetition of RUN_A, to measure the noise between equal runs.",
)
@click.option("--summary", metavar="DIR", help="Write a text file for each step and run to DIR.")
@click.option("--svg", metavar="FILE", help="Draw steps and modules as a picture for a browser.")
@click.option("-q", "--quiet", is_flag=True, help="Print no notes and no picture.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def probe_diff(
    a: str,
    b: str,
    noise: str | None,
    summary: str | None,
    svg: str | None,
    quiet: bool,
    as_json: bool,
) -> int:
    """Show the first big difference between two recorded runs.

    zckpt.probe or ONNX Runtime's StatisticsSubscriber recorded the runs. The report names the step,
    the module, forward or backward, and what a difference there means. --noise measures how far two
    runs of the same program are apart. Without noise, any difference is a big one.

    Exit code 3: there is a big difference.
    """
    from .. import display
    from ..probe import comparing, picture, runs

    if svg:
        display.can_save(svg)
    first, second = runs.read(a), runs.read(b)
    report = comparing.report(first, second, runs.read(noise) if noise else None)
    if summary:
        picture.summarise(summary, [("a", first), ("b", second)])
    if svg:
        display.save_text(svg, picture.svg(report))
    if as_json:
        display.document(report)
    else:
        display.probed(report, quiet)
    return 3 if report["big"] else 0


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
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
