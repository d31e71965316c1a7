"""A process that has imported the engine once and forks the ranks of every job.

Importing torch and DeepSpeed takes seconds, a fork takes none. Where ranks use a GPU, each one
imports them: CUDA does not survive a fork. Jobs come in and answers go out as
pickles; the end of the input ends the process. Run as a module, never imported by a test; its
argument is the module with the work of a rank: `rank` or `torch_rank`.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from .device import DEVICE, DIED

FORKS = DEVICE == "cpu"
processes_of = multiprocessing.get_context("fork" if FORKS else "spawn")


def serve(module: str) -> None:
    rank = importlib.import_module(f".{module}", __package__)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not get into the answers
    rank.prepare()
    gc.freeze()  # or every rank would copy the pages when it collects
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        name, extension, *rest = job
        try:
            if extension is not None:
                rank.compile_extension(extension)
            answer = run(getattr(rank, name), *rest)
        except Exception as error:
            answer = describe(error)
        pickle.dump(answer, answers)
        answers.flush()


def run(
    work: Callable[..., None], ranks: int, arguments: tuple[Any, ...], log: Path, timeout: float
) -> str | None:
    """Runs `work` on every rank; the first failure, or None. No rank is left behind."""
    processes, reports = [], []
    for number in range(ranks):
        receiver, sender = processes_of.Pipe(duplex=False)
        process = processes_of.Process(target=run_rank, args=(work, number, arguments, log, sender))
        process.start()
        sender.close()
        processes.append(process)
        reports.append(receiver)
    try:
        return wait_for(reports, time.monotonic() + timeout)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def wait_for(reports: list[Connection], deadline: float) -> str | None:
    """Every rank reports a failure or None when it is done."""
    while reports:
        ready = wait(reports, max(0.0, deadline - time.monotonic()))
        if not ready:
            return f"TimeoutError: {len(reports)} ranks did not finish"
        for report in [each for each in reports if each in ready]:
            try:
                failure: str | None = report.recv()
            except EOFError:
                return DIED
            if failure is not None:
                return failure
        reports = [each for each in reports if each not in ready]
    return None


def run_rank(
    work: Callable[..., None],
    number: int,
    arguments: tuple[Any, ...],
    log: Path,
    sender: Connection,
) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        if not FORKS:
            importlib.import_module(work.__module__).prepare()
        work(number, *arguments)
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        sender.send(describe(error))
    else:
        sender.send(None)


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    serve(sys.argv[1])
