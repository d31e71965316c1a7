"""The options that several commands share, in the order of `--help`.

Each format declares the options that it understands as a target: see formats/options.py.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from functools import reduce
from typing import Any

import click

from .. import formats
from ..formats.format import Format
from ..formats.options import OF_CONVERSIONS, declared
from ..remote.url_arguments import JOBS
from ..training.options import FAMILY, PARAM_NAMES, RENAME, Option
from .help import GroupedOption, format_names
from .launched import leave_to_rank_0
from .parameters import KINDS, PATH, part, size

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]


def stacked(*options: Decorator) -> Decorator:
    """Combines click's decorators of options into one; `--help` shows them in this order."""
    return lambda command: reduce(lambda inner, option: option(inner), reversed(options), command)


def grouped(group: str, *flags: str, **words: Any) -> Decorator:
    """Returns click's decorator for an option in the section `group` of `--help`."""
    return click.option(*flags, cls=GroupedOption, group=group, **words)


def declared_option(option: Option[Any], hidden: bool = False) -> Decorator:
    """Returns click's decorator for an `Option` that a format or `training/options.py` declares.

    A `hidden` option is accepted, but not shown in the help.
    """
    end = f".  [default: {option.usual}]" if option.usual else "."
    how = {"type": click.Choice(option.choices)} if option.choices else KINDS[option.kind]
    words = {"help": option.help + end, "metavar": option.metavar, **how}
    return grouped(option.group, option.flag, option.name, rare=option.rare, hidden=hidden, **words)


def of_targets(targets: Iterable[Format], without: Container[str]) -> Decorator:
    """Makes a decorator that adds the options of the target formats to a command.

    An option that several formats declare is added once. Those named in `without` are left out.
    """
    return stacked(
        *(declared_option(option) for option in declared(targets) if option.name not in without)
    )


source_and_target = stacked(
    click.argument("source", metavar="SRC", type=PATH),
    click.argument("target", metavar="DST", type=PATH),
)
"""The arguments of every command that writes a checkpoint."""

uncompared = stacked(
    grouped("Comparison", "--weights-only", is_flag=True, help="Compare only weights and buffers."),
    grouped(
        "Comparison",
        "--drop-state",
        multiple=True,
        metavar="NAME",
        help="Do not compare this optimizer state. Repeatable.",
    ),
)
"""Options that leave something out of a comparison."""

renaming = declared_option(RENAME)
"""--rename, which renames parameters of the first checkpoint: PATH in `verify`, A in `diff`."""

family = declared_option(FAMILY)
"""--family, which renames and repacks the parameters for another program."""

_format = grouped(
    "Source",
    "--from",
    "format",
    help="The source's format.  [default: by content]",
    **format_names(targets=False),
)
_tag = grouped("Source", "--tag", metavar="NAME", help="The tag to read, if a run has several.")
_root = grouped(
    "Source",
    "--root",
    rare=True,
    metavar="MODEL[=OPTIMIZER]",
    help="The model and optimizer to read, if the checkpoint has several.",
)
_step_policy = grouped(
    "Optimizer and steps",
    "--step-policy",
    metavar="max|min|keep|N",
    help="The step to use if steps disagree.  [default: an error]",
)
_tp_rules = grouped(
    "Source",
    "--tp-rules",
    rare=True,
    metavar="FILE|FAMILY",
    help="How tensor-parallel ranks slice parameters, if the checkpoint does not state it: a file "
    "of lines REGEX = RULE, or megatron, megatron-swiglu, neox, neox-parallel, bloom or llama.",
)
_buffers = grouped(
    "Source",
    "--buffers",
    rare=True,
    multiple=True,
    metavar="GLOB",
    help="Treat these tensors as buffers, if the files do not tell buffers from frozen parameters. "
    "If their values differ between ranks, in files without an optimizer, rank 0's are used. "
    "Repeatable.",
)
_follow_links = grouped(
    "Source",
    "--follow-links",
    rare=True,
    is_flag=True,
    help="Follow links that lead out of the folder, for files beside the checkpoint, such as a "
    "trainer's.",
)
replicas = grouped(
    "Source",
    "--replicas",
    rare=True,
    type=click.Choice(["rank0", "mean"]),
    metavar="rank0|mean",
    help="If tensor-parallel ranks hold different replicas: use rank 0's, or the mean.  "
    "[default: an error]",
)
"""--replicas, of the commands that write a checkpoint."""
masters_from_weights = grouped(
    "Source",
    "--masters-from-weights",
    rare=True,
    is_flag=True,
    help="If fp32 masters of Megatron-Core do not round to their weights: make the masters from "
    "the weights, and leave out the optimizer states of these parameters.",
)
"""--masters-from-weights, of `convert`, `reshard` and `auto-resume`."""
_quiet = grouped("Output", "-q", "--quiet", is_flag=True, help="Print no progress and no warnings.")
progress = grouped(
    "Output",
    "--progress",
    "asked",
    rare=True,
    is_flag=True,
    help="Print progress to stderr at the start and every minute; with --json, as JSON documents.",
)
as_document = grouped("Output", "--json", "as_json", is_flag=True, help="Print one JSON document.")


def of_sources(has_names: bool, *chosen: Decorator) -> Decorator:
    """Returns a decorator with the options of a command that reads a checkpoint.

    It includes `chosen`, the options that choose one of several checkpoints, such as --tag. If
    `has_names` is False, --param-names is hidden from the help.
    """
    names = declared_option(PARAM_NAMES, hidden=not has_names)
    decorators = (_root, _tp_rules, _buffers, _follow_links, names, _step_policy)
    return stacked(_format, *chosen, *decorators, as_document, _quiet)


common = of_sources(True, _tag)
"""Options of every command that reads a checkpoint."""

reading = of_sources(False, _tag)
"""The options of `export`: as `common`, but --param-names is hidden and refused with a hint."""

of_run = of_sources(True)
"""The options of commands that read a whole run: those in `common`, but without --tag."""


def given(words: dict[str, Any]) -> dict[str, Any]:
    """The options that the user gave; for the others the API has defaults."""
    return {name: value for name, value in words.items() if value is not None}


def threads(shown: str) -> Decorator:
    """Makes the option --jobs; `shown` describes the default in its help."""
    return grouped(
        "Copying",
        "-j",
        "--jobs",
        type=click.IntRange(1, 64),
        metavar="N",
        show_default=shown,
        help="Number of threads.",
    )


OF_WRITING = f"4; {JOBS} for a URL"
memory = grouped(
    "Copying",
    "--memory",
    rare=True,
    type=size,
    default="256MiB",
    show_default=True,
    help="Limit for the memory of all buffers together.",
)

moving = stacked(
    threads(f"one per processor, at least 2, at most 4; {JOBS} for a URL"), memory, progress
)
"""Options for reading tensors."""

single = grouped(
    "Copying",
    "--single",
    rare=True,
    is_flag=True,
    help="Do all work in this process, also under torchrun, srun or mpirun.",
)
"""--single, for commands whose work the processes of a launch share by default."""

by_rank_0 = grouped(
    "Copying",
    "--single",
    rare=True,
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=leave_to_rank_0,
    help="Do all work in this process, also under torchrun, srun or mpirun.",
)
"""--single, for commands that by default run only in rank 0 of a launch; other ranks exit."""

_io = grouped(
    "Copying",
    "--io",
    rare=True,
    type=click.Choice(["auto", "direct", "buffered"]),
    default="auto",
    show_default=True,
    help="Write without the page cache (direct), with it (buffered), or without it where the "
    "filesystem allows that (auto).",
)
_resume = grouped(
    "Copying",
    "--resume",
    is_flag=True,
    help="Continue an interrupted run with the same options, or start.",
)
_read_back = grouped(
    "Copying",
    "--no-read-back",
    "read_back",
    rare=True,
    is_flag=True,
    flag_value=False,
    default=True,
    help="Skip re-reading uploads on object stores that state no MD5.",
)
_dry_run = grouped(
    "Output",
    "--dry-run",
    is_flag=True,
    help="Report what would be written, without writing.",
)

copying_alone = stacked(threads(OF_WRITING), memory, _io, _resume, _read_back, _dry_run, progress)
"""Options for copying tensors in one process."""

copying = stacked(
    threads(OF_WRITING),
    memory,
    _io,
    _resume,
    _read_back,
    grouped(
        "Copying",
        "--part",
        rare=True,
        type=part,
        metavar="K/N|auto",
        help="Write part K of N; auto: the part of this process under srun or mpirun. The last "
        "part to end completes DST.",
    ),
    single,
    _dry_run,
    progress,
)
"""Options for copying tensors."""

form = grouped(
    "Output",
    "--format",
    "form",
    type=click.Choice(["text", "github", "junit"]),
    default="text",
    show_default=True,
    help="For a CI job: GitHub annotations, or JUnit XML with a test case per checkpoint.",
)
"""--format, of commands whose findings a CI job shows."""

wide = grouped(
    "Output",
    "--wide",
    rare=True,
    is_flag=True,
    help="Print all columns of tables, also on a narrow terminal.",
)
"""--wide, of commands whose tables omit columns on a narrow terminal."""

_trained = [item for item in formats.FORMATS if item.is_resumed]
writing = of_targets(_trained, without={"param_names", "buffers"})
"""Options of the commands that write a checkpoint for training."""

resuming = of_targets(_trained, without={"param_names", "buffers", *OF_CONVERSIONS})
"""Options of `auto-resume`, which changes the numbers of ranks and nothing else of a run."""

exporting = of_targets([formats.named("hf")], without={"param_names", "weights_only", "drop_state"})
"""Options of `export`, which always writes weights only."""
