"""Does a command run in this process alone, or in all processes of a launch?"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import click

from ..core.passes.description import Report
from ..errors import MissingExtra
from ..processes.launcher import Launch, address, launched, meeting_place


def write(
    command: Callable[..., Report],
    source: str,
    target: str,
    *,
    single: bool,
    part: Any = None,
    resume: bool = False,
    **words: Any,
) -> Report | None:
    """The report of a conversion, which all processes of a launch share; None but on rank 0.

    A `single` process runs by itself, and so does a process with a `part`. Processes that cannot
    meet write parts. Processes that were restarted continue their own run.
    """
    launch = None if part is not None else _others(single)
    if launch is not None and address() is None:
        from ..api import Part

        part, launch = Part(launch.rank + 1, launch.size), None
    if launch is None:
        if part is not None:
            words["sharing"] = part
        return command(source, target, resume=resume, **words)
    from ..processes.sharing import Processes
    from ..processes.store import PROCESSES

    try:
        with Processes(launch) as processes:
            if processes.rank:
                words |= {"begin": None, "tell": None}
            elif not (words["dry_run"] or resume) and processes.continues(target):
                resume = words["begins_anew"] = True
            report = command(source, target, sharing=processes, resume=resume, **words)
            return None if processes.rank else report
    except MissingExtra as error:
        if error.subject != PROCESSES:
            raise
        parts = f"or write parts, which need none either: --part auto, or --part K/{launch.size}"
        raise error.again(hint=f"{error.hint}; {parts}") from error


def verify(
    path: str,
    against: str | None,
    *,
    single: bool,
    gather: bool,
    **words: Any,
) -> Report | None:
    """The report of `verify`, as `write` gives that of a conversion.

    The processes of `gather` meet by torch's own all-gather.
    """
    from .. import api

    launch = _others(single)
    if gather:
        _tell_torch(launch)
        launch = None
    if launch is None:
        return api.verify(path, against, gather=gather, **words)
    from ..processes.sharing import Processes

    with Processes(launch) as processes:
        if processes.rank:
            words["begin"] = None
        report = api.verify(path, against, sharing=processes, **words)
        return None if processes.rank else report


def speaks(single: bool) -> bool:
    """Whether this process says how far the work is: of a launch that shares it, rank 0 alone."""
    launch = _others(single)
    return launch is None or not launch.rank


def leave_to_rank_0(context: click.Context, _: click.Parameter, single: bool) -> None:
    """Ends this process if rank 0 of its launch works alone."""
    launch = _others(single)
    if launch is not None and launch.rank:
        context.exit()


def _tell_torch(launch: Launch | None) -> None:
    """Sets the variables in which torchrun says who this process is, if another launcher began it.

    Without others the process runs alone. Raises WrongOption if nothing says where they meet.
    """
    if launch is None:
        os.environ.pop("WORLD_SIZE", None)
        return
    os.environ |= {"RANK": str(launch.rank), "WORLD_SIZE": str(launch.size)}
    meeting_place()


def _others(single: bool) -> Launch | None:
    """The launch of this process, if others of it share the command."""
    launch = None if single else launched()
    return launch if launch is not None and launch.size > 1 else None
