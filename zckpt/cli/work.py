"""What do the commands do, once the words of a command line are understood?

This module imports neither click nor the functions of `zckpt.api` before a command needs them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import NotEnoughSpace, sized
from . import launched, signals

THREADS = 4  # of a conversion, unless -j says another number


def inspect(
    path: str,
    tensors: str | None = None,
    steps: bool = False,
    layout: bool = False,
    state: bool = False,
    as_json: bool = False,
    quiet: bool = False,
    **reading: Any,
) -> None:
    """Prints what a checkpoint contains."""
    from .. import display, formats  # `api` also imports what writing needs
    from ..core import description
    from ..formats.reading import Reading
    from ..reading import read

    manifest = read(path, Reading(**reading, inspected=True))
    is_summary = not (tensors or steps or layout or state)
    if "slices" in manifest.source and not (is_summary or as_json):
        display.warn(list(manifest.warnings), quiet)  # a shape in a list is not the tensor's

    def summary() -> dict[str, Any]:
        return description.inspect(manifest, formats.other_objects(manifest))

    if as_json:
        report = summary()
        if tensors or layout:
            report["tensors"] = description.tensors(manifest, tensors or "*", fragments=layout)
        if state:
            report["state"] = description.state(manifest)
        display.document(report)
    elif state:
        display.document(description.state(manifest))
    elif steps:
        display.steps(manifest)
    elif layout:
        display.layout(manifest, tensors or "*")
    elif tensors:
        display.tensors(description.tensors(manifest, tensors))
    else:
        display.summary(summary(), quiet)


def write(
    command: str,
    source: str,
    target: str,
    *,
    jobs: int = THREADS,
    memory: int = launched.MEMORY,
    io: str = "auto",
    dry_run: bool = False,
    as_json: bool = False,
    quiet: bool = False,
    **words: Any,
) -> None:
    """Converts, reshards or exports a checkpoint, with progress, and prints the report."""
    from .. import api, display

    shown: list[str] = []

    def tell(warnings: Sequence[str]) -> None:
        shown.extend(warnings)
        display.warn(warnings, quiet or as_json)

    with display.progress(quiet or as_json or dry_run) as begin:
        report = launched.write(
            getattr(api, command),
            source,
            target,
            **words,
            dry_run=dry_run,
            copying=api.Copying(jobs, memory, io),
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
                f"{target} needs {sized(report['bytes'])}, but only "
                f"{sized(report['free'])} are free",
                hint="choose a target on another filesystem, or free some space",
            )
    except OSError as error:  # a full disk behind stdout
        if dry_run:
            raise
        display.warn([f"{target} is complete, but not reported: {error}"], quiet=False)
        os._exit(0)


def verify(
    path: str,
    against: str | None = None,
    *,
    save_proof: str | None = None,
    as_json: bool = False,
    quiet: bool = False,
    **words: Any,
) -> int:
    """Checks a checkpoint and prints the findings; gives the exit code."""
    from .. import api, display

    if save_proof:
        display.can_save(save_proof)
    with display.progress(quiet or as_json) as begin:
        report = launched.look(api.verify, path, against, begin=begin, **words)
    if report is None or report["rank"]:  # rank 0 reports the findings of all
        return 0
    display.answer(report, as_json, quiet, display.verified)
    if save_proof:
        display.save(save_proof, report)
    return 0 if report["equal"] else 3


def diff(a: str, b: str, *, as_json: bool = False, quiet: bool = False, **words: Any) -> int:
    """Compares two checkpoints and prints the differences; gives the exit code."""
    from .. import api, display

    with display.progress(quiet or as_json) as begin:
        report = launched.look(api.diff, a, b, begin=begin, **words)
    if report is None:
        return 0
    display.answer(report, as_json, quiet, display.differing)
    return 0 if report["equal"] else 3


def stats(path: str, *, as_json: bool = False, quiet: bool = False, **words: Any) -> None:
    """Prints statistics of every tensor."""
    from .. import api, display

    with display.progress(quiet or as_json) as begin:
        report = launched.look(api.stats, path, begin=begin, **words)
    if report is not None:
        display.answer(report, as_json, quiet, display.statistics)


def convert(source: str, target: str, **words: Any) -> None:
    """`write` for `zckpt convert`."""
    write("convert", source, target, **words)


def reshard(source: str, target: str, **words: Any) -> None:
    """`write` for `zckpt reshard`."""
    write("reshard", source, target, **words)


COMMANDS: dict[str, Callable[..., int | None]] = {
    "inspect": inspect,
    "convert": convert,
    "reshard": reshard,
    "verify": verify,
    "diff": diff,
    "stats": stats,
}
"""Those that `plain` understands, by name."""
