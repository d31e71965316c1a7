"""The commands of `zckpt`, each a thin layer over a function of `zckpt.api`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from ..core.dtypes import OPTIONS as DTYPES
from ..errors import NotEnoughSpace
from ..version import __version__
from .options import common, copying, moving, renaming, tying, writing
from .parameters import Size


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="zckpt")
def cli() -> None:
    """Read, convert, write and prove sharded ZeRO checkpoints."""


@cli.command()
@click.argument("path")
@click.option("--tensors", metavar="GLOB", help="List the tensors whose name matches.")
@click.option("--steps", is_flag=True, help="Every place that holds a step, and which is true.")
@click.option("--layout", is_flag=True, help="Draw which file holds which elements.")
@click.option("--state", is_flag=True, help="Everything that is no tensor, as JSON.")
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
    """What a checkpoint holds. No tensor is read.

    PATH: a directory of DeepSpeed, of torch.distributed.checkpoint, of files of torch.save (whole
    ones or one per rank), of ONNX Runtime's rank files, a Hugging Face Trainer, Accelerate,
    Lightning or torchtitan directory around one, a single file, or a universal checkpoint.
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

    Weights alone, for inference: zckpt convert SRC DST --weights-only --dtype bf16
    """
    write("convert", source, target, words, to=to)


@cli.command()
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option(
    "--checkpoints",
    type=click.Choice(["all", "best-and-last"]),
    help="SRC is a Trainer's output directory; write these of its checkpoints.",
)
@writing
@copying
@common
def reshard(source: str, target: str, **words: Any) -> None:
    """Write SRC as DST, from which its unmodified trainer resumes on --dp ranks.

    A universal SRC goes back to the engine that it came from.
    """
    write("reshard", source, target, words)


@cli.command()
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option(
    "--to", type=click.Choice(["hf"]), default="hf", show_default=True, help="The kind of folder."
)
@click.option(
    "--dtype", type=click.Choice(list(DTYPES)), help="Type of the weights [default: the module's]"
)
@click.option(
    "--config",
    metavar="FILE|DIR",
    help="config.json (adapter_config.json of PEFT), or a folder with it and the tokenizer, where "
    "SRC has none.",
)
@click.option(
    "--max-shard-size",
    type=Size(),
    help="Split larger weights into several files [default: 8GiB]",
)
@tying
@renaming
@copying
@common
def export(source: str, target: str, to: str, **words: Any) -> None:
    """Write the weights of SRC as a folder for from_pretrained, and nothing else.

    DST gets weights, configuration, tokenizer and processor files; of a PEFT run the adapter.
    Everything that only a trainer needs stays behind.
    """
    write("export", source, target, words)


def merged(given: Sequence[dict[Any, Any]]) -> dict[Any, Any]:
    """What `--group-defaults` gives, one after the other; a group's own values under its number."""
    found: dict[Any, Any] = {}
    for pairs in given:
        for key, value in pairs.items():
            found[key] = {**found.get(key, {}), **value} if isinstance(key, int) else value
    return found


def write(command: str, source: str, target: str, words: dict[str, Any], **more: Any) -> None:
    """What convert and reshard share: options, progress, the report."""
    from .. import api, display

    as_json, quiet, dry_run = (words.pop(key) for key in ("as_json", "quiet", "dry_run"))
    copying = api.Copying(*(words.pop(key) for key in ("jobs", "memory", "io")))
    if command == "export":  # there is no optimizer to read
        del words["step_policy"], words["param_names"]
    else:
        words["stage"] = int(words["stage"]) if words["stage"] else None
        words["group_defaults"] = merged(words["group_defaults"])
    reading = {key: words.pop(key) for key in ("format", "tag", "step_policy") if key in words}
    told: list[str] = []

    def tell(warnings: Sequence[str]) -> None:
        told.extend(warnings)
        display.warn(warnings, quiet or as_json)

    with display.progress(quiet or as_json or dry_run) as begin:
        report = getattr(api, command)(
            source,
            target,
            **reading,
            **more,
            **words,
            copying=copying,
            dry_run=dry_run,
            begin=begin,
            tell=tell,
        )
    try:
        if as_json:
            display.document(report)
        else:
            display.converted(report, quiet, told)
        sys.stdout.flush()
        if dry_run and report["bytes"] > report["free"]:
            raise NotEnoughSpace(
                f"{target} needs {report['bytes'] / 1e9:.3f} GB, {report['free'] / 1e9:.3f} GB are "
                "free",
                hint="choose a target on another filesystem, or free some space",
            )
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk behind stdout
        if dry_run:
            raise
        click.echo(f"Warning: {target} is complete, but not reported: {error}", err=True)
        os._exit(0)


@cli.command()
@click.argument("path")
@click.option("--against", metavar="PATH", help="Compare with this checkpoint, of any format.")
@click.option(
    "--gather", is_flag=True, help="Rebuild PATH as its engine would, by all-gathering (torch)."
)
@click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    help="Where to gather and compare [default: a GPU if there is one]",
)
@click.option("--tensors", metavar="GLOB", help="Only the tensors whose name matches.")
@click.option("--save-proof", metavar="FILE", help="Write the report with all checksums.")
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
    """Prove that PATH contradicts itself nowhere, or equals another checkpoint.

    Alone: checksums of files and tensors, every element covered once, copies on several ranks,
    weights and the masters that they were rounded from, steps. What is said only once can be wrong
    unseen: ranks swapped in a ZeRO-3 without 16-bit weights show only --against another checkpoint.

    --against a checkpoint: shared tensors bit for bit, steps and hyper-parameters by value. Or
    --against the FILE of an earlier --save-proof, when the original is gone.

    --gather shares no code with the copying but the parser of files. Faster on several GPUs:
    torchrun --nproc-per-node 4 -m zckpt verify PATH --against PATH --gather

    Exit code 3: something was found.
    """
    from .. import api, display

    if save_proof:
        display.can_save(save_proof)
    with display.progress(quiet or as_json) as begin:
        report = api.verify(path, against, begin=begin, **words)
    if report["rank"]:  # rank 0 tells what all have found
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
@click.option("--tensors", metavar="GLOB", help="Only these tensors, the equal ones too.")
@renaming
@moving
@common
def diff(a: str, b: str, as_json: bool, quiet: bool, **words: Any) -> int:
    """In what two checkpoints of any format differ: first and worst.

    Tensors in the order of the model, steps, hyper-parameters, schedulers. Exit code 3: something
    differs.
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
@click.option("--tensors", metavar="GLOB", help="Only the tensors whose name matches.")
@moving
@common
def stats(path: str, as_json: bool, quiet: bool, **words: Any) -> None:
    """What the numbers in PATH look like, and which are dead or impossible.

    In float64, over finite numbers: min, max, mean, std (with n - 1, as torch.std), L2 norm; counts
    of NaN, infinite, negative, zero and positive ones; how many have which magnitude, in powers of
    two. Warnings name second moments that are zero or negative, constant weights, NaN, infinities,
    steps that low precision has stopped.
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
@click.option("--noise", metavar="RUN_A2", help="A second run of what RUN_A is one of.")
@click.option("--summary", metavar="DIR", help="Write a text for each step and run.")
@click.option("--svg", metavar="FILE", help="Draw steps and modules for a browser.")
@click.option("-q", "--quiet", is_flag=True, help="No notes and no picture.")
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
    """The first big difference of two runs that zckpt.probe recorded.

    Or that ONNX Runtime's StatisticsSubscriber dumped. Names step, module, forward or backward, and
    what that place means. --noise measures how far two runs of the original are apart: as long as
    they are equal, any difference is a big one.

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
    """What is read and written."""
    from .. import display
    from ..formats import TABLE

    listed = [
        {"format": f.name, "reads": f.reads, "writes": f.writes, "about": f.about} for f in TABLE
    ]
    if as_json:
        display.document({"zckpt": 1, "command": "formats", "formats": listed})
    else:
        display.table(
            ("format", "reads", "writes", ""),
            [(f.name, f.reads, f.writes, f.about) for f in TABLE],
        )
