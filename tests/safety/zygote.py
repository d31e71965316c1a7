"""A process that has imported zckpt once and forks a command for every job.

A fork takes 10 ms, a new Python 300. Jobs come in and answers go out as pickles; the end of the
input ends the process. Run as a module, with shim.c loaded by LD_PRELOAD; never imported by a test.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pickle
import select
import signal
import sys
import time
import traceback

from .runner import LIMIT, ROOT, Ended, Job

SMALL = 1000  # bytes; some files of the tiny checkpoints are larger


def serve() -> None:
    shim = ctypes.CDLL(os.environ["ZCKPT_SHIM"])
    for name in ("shim_count", "shim_fired"):
        getattr(shim, name).restype = ctypes.c_long
    shim.shim_arm.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    import_everything()
    gc.freeze()  # or every command would copy the pages when it collects
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(forked(shim, job), answers)
        answers.flush()


def import_everything() -> None:
    """What a command would import, torch aside."""
    import h5py  # noqa: F401
    import numpy  # noqa: F401

    for path in sorted((ROOT / "zckpt").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if (
            parts[-1] != "__main__"
            and parts[1] not in ("probe", "dcp", "deepspeed", "loading")
            and "allgather" not in parts
        ):
            importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    assert "torch" not in sys.modules
    from zckpt.core.storage import fileio

    fileio.SMALL_FILE = SMALL


def forked(shim: ctypes.CDLL, job: Job) -> Ended:
    files = [os.memfd_create(name) for name in ("out", "err", "record")]
    started = time.monotonic()
    child = os.fork()
    if not child:
        try:
            code = command(shim, job, *files)
        except BaseException:
            traceback.print_exc()
            code = 70
        shim.shim_disarm()
        os._exit(code)
    waiting = os.pidfd_open(child)
    is_hanging = not select.select([waiting], [], [], LIMIT)[0]
    if is_hanging:
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    seconds = time.monotonic() - started
    out, err, record = (os.pread(file, os.fstat(file).st_size, 0) for file in files)
    for file in (*files, waiting):
        os.close(file)
    return Ended(
        status,
        out.decode(errors="replace"),
        err.decode(errors="replace"),
        shim.shim_count(),
        shim.shim_fired(),
        seconds,
        is_hanging,
        record,
    )


def command(shim: ctypes.CDLL, job: Job, out: int, err: int, record: int) -> int:
    """Runs a command as the console script does; its exit code."""
    from zckpt.cli import main

    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.argv = ["zckpt", *job.words]
    for prefix in job.watched:
        shim.shim_watch(os.fsencode(prefix))
    if job.is_recorded:
        shim.shim_record(record, job.is_recorded_with_data)
    fault = job.fault
    shim.shim_arm(fault.mode, fault.value, fault.first, fault.last)
    try:
        main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    serve()
