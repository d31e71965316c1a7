"""Runs a command in this process alone, or in all processes of a launch."""

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
    """Runs a conversion in all processes of a launch, such as torchrun's.

    Rank 0 returns the report, all other ranks None. With `single` or a `part`, this process works
    alone and returns a report. Raises MissingExtra if the processes need torch to connect and it is
    not installed.
    """
    launch = None if part is not None else _others(single)
    if launch is not None and address() is None:
        # the processes cannot connect: each writes its own part, and returns a report
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
            # a launch that was restarted continues the conversion that it began before
            elif not (words["dry_run"] or resume) and processes.continues(target):
                resume = words["begins_anew"] = True
            report = command(source, target, sharing=processes, resume=resume, **words)
            return None if processes.rank else report
    except MissingExtra as error:
        if error.subject != PROCESSES:
            raise
        parts = f"or write parts, which needs no torch: --part auto, or --part K/{launch.size}"
        raise error.again(hint=f"{error.hint}; {parts}") from error


def verify(
    path: str,
    against: str | None,
    *,
    single: bool,
    gather: bool,
    **words: Any,
) -> Report | None:
    """Runs `verify` in all processes of a launch, such as torchrun's.

    Rank 0 returns the report, the other ranks None. With `gather` every process returns a report,
    because all take part in torch's all-gather.
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
    """Whether this process prints progress: in a launch that shares the work, only rank 0 does."""
    launch = _others(single)
    return launch is None or not launch.rank


def leave_to_rank_0(context: click.Context, _: click.Parameter, single: bool) -> None:
    """Exits unless this process is rank 0 of its launch, or `single`."""
    launch = _others(single)
    if launch is not None and launch.rank:
        context.exit()


def _tell_torch(launch: Launch | None) -> None:
    """Sets the variables RANK and WORLD_SIZE as torchrun does, also under another launcher.

    Without a launch, removes WORLD_SIZE: the process runs alone. Raises WrongOption if no launcher
    has set an address at which the processes can connect.
    """
    if launch is None:
        os.environ.pop("WORLD_SIZE", None)
        return
    os.environ |= {"RANK": str(launch.rank), "WORLD_SIZE": str(launch.size)}
    meeting_place()


def _others(single: bool) -> Launch | None:
    """The launch, such as torchrun's, if this process is one of several in it.

    None otherwise, and with `single`.
    """
    launch = None if single else launched()
    return launch if launch is not None and launch.size > 1 else None
