"""Does a command run in this process alone, or in all processes of a launch?"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import WrongOption
from ..nodes.launch import launched
from . import signals

Report = dict[str, Any]
MEMORY = 256 << 20  # bytes of all buffers, unless --memory says another size
JOINING = ("convert", "reshard", "export", "verify", "diff", "stats")
"""The commands that several processes share."""


def joins_later(words: Sequence[str]) -> bool:
    """Whether this process will join those of a launch, and is not rank 0.

    Until then a signal ends it without a word. If rank 0 fails at once, the launcher ends processes
    that have not begun, and rank 0 prints why.
    """
    try:
        launch = launched()
    except WrongOption:  # the command says so
        return False
    if launch is None or launch.rank == 0 or not words or words[0] not in JOINING:
        return False
    return not any(word in ("--single", "--gather") or word.startswith("--part") for word in words)


def write(
    command: Callable[..., Report],
    source: str,
    target: str,
    *,
    single: bool = False,
    part: Any = None,
    resume: bool = False,
    **words: Any,
) -> Report | None:
    """The report of a conversion, which all processes of a launch share; None but on rank 0.

    A `single` process runs by itself, and so does a process with a `part`. Processes that were
    restarted continue their own run.
    """
    if part is not None:
        return command(source, target, sharing=part, resume=resume, **words)
    launch = None if single else launched()
    if launch is None:
        return command(source, target, resume=resume, **words)
    from ..nodes.conversion import Leader, take_part
    from ..nodes.group import Group

    with Group(launch, _words(command, source, target), beside=target, resumes=True) as group:
        signals.begin()
        group.agree()
        if group.rank:
            take_part(group, os.fspath(source), os.fspath(target), words["copying"])
            return None
        resume = group.has_begun(target) or resume
        if not words["dry_run"]:
            group.note_begun(target)
        words["begin"] = group.watched(words["begin"])
        report = command(source, target, sharing=Leader(group), resume=resume, **words)
        if not words["dry_run"]:
            group.note_done(target)
        return report


def look(
    command: Callable[..., Report],
    *paths: Any,
    single: bool = False,
    jobs: int | None = None,
    memory: int = MEMORY,
    **words: Any,
) -> Report | None:
    """The report of a command that only reads, as `write` gives that of a conversion.

    The processes of `--gather` meet by themselves.
    """
    from ..api import READING_JOBS, Copying

    words |= {"jobs": jobs or READING_JOBS, "memory": memory}
    launch = None if single or words.get("gather") else launched()
    if launch is None:
        return command(*paths, **words)
    from ..nodes.group import Group
    from ..nodes.passes import LeaderPool, take_part

    beside = os.path.join(os.getcwd(), ".zckpt")
    with Group(launch, _words(command, *paths), beside) as group:
        signals.begin()
        group.agree()
        if group.rank:
            take_part(group, _paths(paths), Copying(words["jobs"], words["memory"]))
            return None
        words["begin"] = group.watched(words["begin"])
        return command(*paths, pool=LeaderPool(group), **words)


def _words(command: Callable[..., Report], *paths: Any) -> list[str]:
    """The command and its paths, which must be the same in all processes."""
    return [command.__name__, *_paths(paths)]


def _paths(paths: Sequence[Any]) -> list[str]:
    return [os.fspath(path) for path in paths if path is not None]
