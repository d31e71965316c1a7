"""The command that writes a mended copy of a damaged checkpoint, a thin layer over `zckpt.api`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import click

from .. import display
from ..errors import CorruptCheckpoint, IncompleteCheckpoint
from ..remote.url_arguments import jobs_for
from . import signals
from .help import ExplainedCommand
from .options import by_rank_0, common, copying_alone, grouped
from .parameters import PATH

WHOLE = "which is complete according to its metadata"


@click.command(
    cls=ExplainedCommand,
    examples=(
        "zckpt mend run/checkpoint-500 --dry-run",
        "zckpt mend run/checkpoint-500 mended",
        "zckpt mend run/checkpoint-500 mended --older run/checkpoint-400",
    ),
)
@click.argument("source", metavar="SRC", type=PATH)
@click.argument("target", metavar="[DST]", type=PATH, required=False)
@grouped(
    "Source",
    "--older",
    type=PATH,
    metavar="PATH",
    help="An older checkpoint of the run, for tensors that have not changed since.",
)
@grouped(
    "Source",
    "--accept-chance",
    is_flag=True,
    help="Restore a flipped bit that only a checksum shows; it may be the wrong one.",
)
@grouped(
    "Source",
    "--rebuild",
    multiple=True,
    type=click.Choice(["masters", "moments=zero", "moments=older", "model"]),
    help="Make up lost masters (from 16-bit weights), moments (zeros, or those of --older), or "
    "values of the model file (needs --older).",
)
@copying_alone
@by_rank_0
@common
def mend(
    source: str,
    target: str | None,
    older: str | None,
    accept_chance: bool,
    rebuild: tuple[str, ...],
    jobs: int | None,
    memory: int,
    io: str,
    asked: bool,
    as_json: bool,
    quiet: bool,
    dry_run: bool,
    **words: Any,
) -> int:
    """Write a mended copy of a checkpoint with flipped bits or lost files.

    mend reads all bytes, as verify does, and lists the damaged ones and their original values. It
    finds a flipped bit by the checksum of a record (a byte range in a file). Damage of many bits
    can look like one flipped bit: in 1 of 2,000 cases for a record of 256 KiB. In a larger record,
    mend restores the bit only with --accept-chance, or if other bytes confirm it: a replica, the
    same tensor in --older, or a 16-bit weight beside its master.

    mend lists what lost files contained, and what other files have of it. It rewrites a file that
    is the same on all other ranks, such as the model files of stage 3. Frozen weights in such a
    file come from --older. With --rebuild, mend makes up values that no file has. For an optimizer
    file of stage 1 or 2, these are masters and moments, so training losses change. For a model
    file, these are counters and buffers; its weights are exact.

    DST has the files of SRC, and zckpt-mended.json, the list of what was restored. Checkpoints made
    from DST get this list too. SRC is never changed.

    Exit code 3: --dry-run found damage.
    """
    from .. import api
    from ..resume.interrupted import interrupted
    from ..resume.runs import instead_of

    def tell(places: Sequence[dict[str, Any]]) -> None:
        display.damaged(places, quiet or as_json)

    about = source if target is None else f"{source} to {target}"
    with display.progress("mend", about, quiet, as_json=as_json, asked=asked) as begin:
        try:
            report = api.mend(
                source,
                target,
                older=older,
                accept_chance=accept_chance,
                rebuild=rebuild,
                dry_run=dry_run,
                copying=api.Copying(jobs or jobs_for(memory, source), memory, io),
                begin=begin,
                tell=tell,
                before_rename=signals.ignore,
                **words,
            )
        except (CorruptCheckpoint, IncompleteCheckpoint) as error:
            if (instead := instead_of(source, words.get("tag"))) is None:
                raise
            raise error.with_way(f"resume from {instead}, {WHOLE}") from error
    if report["problems"]:
        report["instead"] = instead_of(source, words.get("tag"))
    if report["problems"] or dry_run:
        save = interrupted(source, words.get("tag"))
        own = report["source"].get("tag"), os.path.basename(os.path.abspath(source))
        is_mended = not report["problems"] and save is not None and save["name"] in own
        report["interrupted"] = None if is_mended else save
    display.answer(report, as_json, quiet, display.mended)
    return 3 if dry_run and (report["places"] or report["lost"] or report["problems"]) else 0
