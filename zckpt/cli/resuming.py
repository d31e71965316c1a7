"""The commands for resuming a run, each a thin layer over `zckpt.resume`."""

from __future__ import annotations

import os
from typing import Any

import click

from .. import display
from ..core.passes.description import Report
from ..formats.reading import NamedKeywords
from ..remote.url_arguments import jobs_for
from ..training import options
from . import parameters, several_paths
from .help import ExplainedCommand, format_names
from .options import (
    OF_WRITING,
    common,
    declared_option,
    form,
    given,
    grouped,
    masters_from_weights,
    memory,
    moving,
    of_run,
    progress,
    replicas,
    resuming,
    single,
    stacked,
    threads,
    wide,
)
from .parameters import PATH

OF_RUN = (options.DP, options.TP, options.PP, options.EP)


@click.command(
    "auto-resume",
    cls=ExplainedCommand,
    examples=(
        "zckpt auto-resume out --dp 16",
        "zckpt auto-resume out --dp 16 --scratch /scratch/resumed",
        "torchrun --nproc-per-node 8 -m zckpt auto-resume out",
    ),
)
@click.argument("run", metavar="RUN", type=PATH)
@grouped(
    "Source",
    "--verify",
    type=click.Choice(["records", "files"]),
    default="records",
    show_default=True,
    help="Read all bytes and check checksums (records), or only look for missing files (files).",
)
@grouped(
    "Files",
    "--scratch",
    type=PATH,
    metavar="DIR",
    help="The directory for resharded checkpoints.  [default: RUN/.zckpt]",
)
@grouped(
    "Files",
    "--keep",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    metavar="N",
    help="Older resharded checkpoints to keep. If N jobs start at the same time, give N.",
)
@resuming
@replicas
@masters_from_weights
@threads(OF_WRITING)
@memory
@single
@progress
@of_run
def auto_resume(
    run: str,
    config: Any,
    jobs: int | None,
    memory: int,
    asked: bool,
    as_json: bool,
    quiet: bool,
    **words: Any,
) -> None:
    """Print the path from which a run resumes, for any number of ranks.

    RUN is the directory in which a training saves. auto-resume takes its newest complete
    checkpoint. If the engine cannot load it on this number of ranks, auto-resume first writes a
    resharded copy below RUN/.zckpt, once. Only the path goes to stdout, and nothing if RUN has no
    checkpoint.

    All processes of a launch print the path. The default of --dp comes from the number of processes
    of the launch, or without a launcher from the checkpoint.
    """
    from ..api import Copying
    from ..processes.launcher import launched
    from ..resume.auto import auto_resume as resume

    launch = None if words["single"] else launched()
    said: dict[str, Any] = {k: v for k, v in words.items() if v or type(v) is int}
    is_quiet = quiet or (launch is not None and launch.rank > 0)
    with display.progress("auto-resume", run, is_quiet, as_json=as_json, asked=asked) as begin:
        path = resume(
            run,
            ds_config=config,
            copying=Copying(jobs or jobs_for(memory, run), memory),
            tell=lambda lines: display.warn(list(lines), quiet),
            begin=begin,
            **{**said, "single": launch is None},
        )
    if as_json:
        display.document(None if path is None else path.report)
    elif path is not None:
        print(path)


@click.command(
    cls=ExplainedCommand,
    examples=(
        "zckpt check out --dp 48",
        "zckpt check out/checkpoint-500 --dp 48 --for deepspeed --ds-config ds.json",
        "zckpt check out --dp 8 --like saved-by-the-new-program",
    ),
)
@several_paths.PATHS
@stacked(*(declared_option(option) for option in (*OF_RUN, options.SP)))
@grouped(options.SIZES, "--stage", type=click.IntRange(0, 3), metavar="N", help="The ZeRO stage.")
@grouped(
    "Engine",
    "--for",
    "engine",
    help="The format that the next run loads.  [default: the checkpoint's format]",
    **format_names(targets=True),
)
@grouped("Engine", "--ds-config", type=PATH, metavar="FILE", help="The ds_config of the next run.")
@grouped(
    "Engine",
    "--like",
    type=PATH,
    metavar="RUN",
    help="A checkpoint that the next program has saved. Names, shapes and the members of each "
    "optimizer group are compared with it.",
)
@form
@common
def check(
    paths: tuple[str, ...],
    engine: str | None,
    ds_config: str | None,
    like: str | None,
    form: str,
    as_json: bool,
    quiet: bool,
    **words: Any,
) -> int:
    """Tell whether an engine loads a checkpoint on N ranks, without reading a tensor.

    PATH is a checkpoint or a run. Of a run, check takes the newest checkpoint, or the one that
    --tag names. If the engine cannot load it unchanged, the report lists the reasons, and a command
    if that removes every reason.

    Exit code 3: the engine cannot load it unchanged, or files are missing, damaged or from
    different saves. Exit code 1: check could not tell, for example because PATH holds no
    checkpoint.
    """
    from ..resume.check import check as ask
    from ..resume.fitting import Asked

    tag = words.pop("tag", None)
    reading = {name: words.pop(name) for name in NamedKeywords.__annotations__ if name in words}
    config = None if ds_config is None else parameters.config(ds_config)
    given = {"config": ds_config, "param_names": getattr(reading.get("param_names"), "path", None)}
    files = {name: os.path.abspath(file) for name, file in given.items() if file is not None}
    asked = Asked(None, words | {"config": config})

    def look(path: str) -> tuple[Report, int]:
        report = ask(path, asked, engine, like, reading, files, tag)
        return report, 0 if report["loads"] else 3

    if form != "text":
        return several_paths.look_for_a_job("check", paths, look, form, as_json)
    if len(paths) > 1:
        show = display.fitting_in_a_line
        return several_paths.look_at_each("check", paths, look, show, as_json, quiet)
    report, code = look(paths[0])
    display.answer(report, as_json, quiet, display.fitting)
    return code


@click.command(
    "list",
    cls=ExplainedCommand,
    examples=(
        "zckpt list out",
        "zckpt list out --dp 16",
        "zckpt list s3://bucket/out --intact",
    ),
)
@click.argument("run", metavar="RUN", type=PATH)
@stacked(*(declared_option(option) for option in OF_RUN))
@grouped(options.SIZES, "--stage", type=click.IntRange(0, 3), metavar="N", help="The ZeRO stage.")
@grouped(
    "What to show",
    "--intact",
    is_flag=True,
    help="Read all bytes of each checkpoint, as verify does.",
)
@moving
@form
@wide
@of_run
def list_run(
    run: str,
    intact: bool,
    form: str,
    wide: bool,
    asked: bool,
    as_json: bool,
    quiet: bool,
    **words: Any,
) -> int:
    """List the checkpoints of a run and their state, the oldest first.

    A row tells, from the metadata, whether the checkpoint is complete and from one save. If not,
    the reasons follow below the table. There, another line says that the save may still be running
    if a file of this checkpoint changed within the last minute.

    With a size, such as --dp 16, a row tells whether the engine loads the checkpoint on that many
    ranks. A damaged checkpoint does not hide the others.

    Exit code 3: a checkpoint is incomplete or from different saves, or --intact found damage. Exit
    code 1: a checkpoint could not be read.
    """
    from ..resume import listing

    is_quiet = quiet or not (intact or asked)  # metadata are no bytes to count

    def look(run: str) -> tuple[Report, int]:
        with display.progress("list", run, is_quiet, as_json=as_json, asked=asked) as begin:
            report = listing.list_checkpoints(run, intact=intact, begin=begin, **given(words))
        rows = report["checkpoints"]
        if any(False in (row["whole"], row["of_one_save"], row["intact"]) for row in rows):
            return report, 3
        return report, 1 if any(row["problems"] for row in rows) else 0

    if form != "text":
        return several_paths.look_for_a_job("list", [run], look, form, as_json)
    report, code = look(run)
    display.answer(report, as_json, quiet, display.listed_run, wide)
    return code
