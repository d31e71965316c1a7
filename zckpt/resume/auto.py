"""`auto_resume`: the path from which a run resumes, on the number of processes that it has now.

All ranks get the same path or raise the same error, because rank 0 decides and sends its result or
its error to the other ranks.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, Literal

from ..core.passes.description import Report
from ..core.passes.pace import telling
from ..core.passes.resources import DEFAULT_COPYING, Begin, Copying, Tell
from ..errors import ProcessFailed, WrongOption, ZckptError, counted, notice_of, safe
from ..processes.launcher import Launch, address, joined, launched
from ..processes.ranks import Ranks, Told
from ..processes.sharing import Processes
from .fitting import Asked
from .resuming import Resumed, Resuming

LOG = logging.getLogger("zckpt")
"""Rank 0 logs here: at INFO which checkpoint is resumed, and warnings.

Without logging set up, nothing is printed.
"""
LOG.addHandler(logging.NullHandler())


def auto_resume(
    run: str | os.PathLike[str],
    *,
    verify: Literal["records", "files"] = "records",
    scratch: str | os.PathLike[str] | None = None,
    keep: int = 1,
    ds_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    single: bool = False,
    copy: bool = True,
    copying: Copying = DEFAULT_COPYING,
    tell: Tell | None = None,
    begin: Begin | None = None,
    **words: Any,
) -> Resumed | None:
    """Finds the path from which a run resumes, on the number of processes that it has now.

        trainer.train(resume_from_checkpoint=zckpt.auto_resume(args.output_dir))

    The result is the path of the newest complete checkpoint of the directory `run`, or None if the
    run has no checkpoint. If the engine does not load the checkpoint on this number of ranks, the
    result is the path of a resharded copy, written once below `run`/.zckpt. Every process calls
    this function, before or after torch.distributed is initialised. All processes share the work,
    and return the same path or raise the same error.

        verify      "records" reads all bytes and checks those that have checksums; "files" only
                    checks that all files exist, have the right size and belong to one save
        scratch     the directory for resharded copies, instead of `run`/.zckpt
        keep        how many older resharded copies are kept in that directory
        ds_config   the ds_config of the next run, if it changes: a dictionary, or the path of a
                    JSON file
        single      True: work alone in this process, and ignore a launcher's variables, such as to
                    prepare another job. Then `dp` defaults to the source's
        copy        False, only for DeepSpeed: in place of a copy, write empty files with the names
                    of the engine's files. In this process, `engine.load_checkpoint` is replaced:
                    for the path of these files, it reads the original checkpoint.
                    `zckpt.deepspeed.undo()` reverts this
        copying     a `zckpt.Copying`: the number of threads, and the memory
        tell        a function that is called in rank 0 with the warnings. By default they become
                    Python warnings, unless the logger "zckpt" prints them. The logger gets them in
                    any case, and at INFO the path
        begin       as for `zckpt.convert`, called for each pass over the bytes
        dp, tp, pp, ep, stage    the sizes of the next run. `dp` defaults to the number of processes
                    divided by tp * pp
        accept_weights, drop_state, step_policy, param_names    as for `zckpt.reshard`, as are all
                    other options of a conversion

    Raises a ZckptError, also if the run has checkpoints but none is complete.
    """
    if verify not in ("records", "files"):
        raise WrongOption("option-invalid", f"verify {verify!r} is neither 'records' nor 'files'")
    if type(keep) is not int or keep < 0:
        raise WrongOption("option-invalid", f"keep must be a number of directories, not {keep!r}")
    if ds_config is not None:
        words["config"] = ds_config if isinstance(ds_config, Mapping) else _json(ds_config)
    launch = Launch(0, 1) if single else joined() or launched() or Launch(0, 1)
    asked = Asked(None if single else launch.size, words)
    is_told = begin is None and launch.rank == 0
    watch = telling(f"auto-resume {os.fspath(run)}", lambda line: LOG.info("%s", safe(line)))
    with watch if is_told else nullcontext() as pace:
        begin = begin if pace is None else pace.begin
        about = os.fspath(run), asked, verify, scratch, keep, copying, begin, copy
        outcome = _outcome(Ranks(), *about) if launch.size == 1 else _outcome_of_all(launch, *about)
    if isinstance(outcome, Exception):
        raise outcome
    resumed, lines = outcome
    if launch.rank == 0:
        for line in lines:
            LOG.warning("%s", safe(_sentence(line)))
        LOG.info("%s", safe(_what_is_resumed(resumed) or f"{run} has no checkpoint: a new run"))
        if lines and not (tell is None and _is_log_shown()):
            (tell or _warn)(lines)
    return resumed


def _what_is_resumed(resumed: Resumed | None) -> str:
    """A line for the log: which checkpoint is resumed, and why newer ones were skipped."""
    if resumed is None:
        return ""
    report = resumed.report
    said = f"resuming from {report['checkpoint']}"
    if report["step"] is not None:
        said += f", step {report['step']}"
    if report["ranks_before"]:
        said += f", saved by {counted(report['ranks_before'], 'rank')}"
    sizes = " ".join(f"{name} {size}" for name, size in report["sizes"].items())
    if report["names"]:
        said += f", without a copy for {sizes}: {report['path']}"
    elif report["written"]:
        said += f", written for {sizes} in {report['seconds']:.1f} s: {report['path']}"
    elif report["obstacles"]:
        said += f", which an earlier start has written for {sizes}: {report['path']}"
    for each in report["left_aside"]:
        said += f"; {os.path.basename(each['path'])} set aside: {_sentence(each['reason'])}"
    return said


Outcome = tuple[Resumed | None, list[Report]] | Exception
"""The path that all ranks return, with warnings; or the error that all ranks raise."""


def _outcome_of_all(launch: Launch, *about: Any) -> Outcome:
    if joined() is None and address() is None:
        return WrongOption(
            "launcher-variables",
            f"this process is rank {launch.rank} of {launch.size}, and MASTER_ADDR and MASTER_PORT "
            "do not say where the processes meet",
            hint="call torch.distributed.init_process_group first, or set MASTER_ADDR and "
            "MASTER_PORT; if this process runs alone: single=True (--single)",
        )
    try:
        with Processes(launch) as processes:
            return _outcome(Ranks(processes), *about)
    except ProcessFailed as error:
        return error
    except (ZckptError, OSError) as error:  # the other ranks raise this error too
        problem = notice_of(error)
        message = f"rank {launch.rank}: {problem.message}"
        failed = ProcessFailed(problem.code, message, problem.hint, file=problem.file)
        failed.__cause__ = error
        return failed


def _outcome(ranks: Ranks, *about: Any) -> Outcome:
    with ExitStack() as stack:
        try:
            return Resuming(ranks, stack, *about).resumed()
        except Told as told:
            return told.error


def _json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a ds_config from a file; raises WrongOption if it is not a JSON object."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            document = json.load(file)
    except ValueError as error:
        raise WrongOption("ds-config-wrong", f"{os.fspath(path)} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise WrongOption("ds-config-wrong", f"{os.fspath(path)} is not a JSON object")
    return document


def _is_log_shown() -> bool:
    """Whether the logger prints warnings to stderr or stdout, as after `logging.basicConfig()`."""
    logger: logging.Logger | None = LOG
    while logger is not None and LOG.isEnabledFor(logging.WARNING):
        streams = [getattr(handler, "stream", None) for handler in logger.handlers]
        if any(stream is not None and stream in (sys.stderr, sys.stdout) for stream in streams):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def _warn(lines: Sequence[Report]) -> None:
    for line in lines:
        warnings.warn(_sentence(line), stacklevel=3)


def _sentence(line: Report) -> str:
    return "; ".join(filter(None, (line["message"], line.get("hint"))))
