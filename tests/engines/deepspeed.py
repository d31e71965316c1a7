"""Real DeepSpeed on this machine's processor, or its GPU: train a case, or resume a directory.

python -m tests.engines.deepspeed --list
python -m tests.engines.deepspeed CASE DIR      trains one case into DIR
python -m tests.engines.deepspeed --all DIR     trains each case into DIR/<case>

With ENGINE_DEVICE=cuda, DeepSpeed and PyTorch's engines train on a GPU, which ranks share.
"""

from __future__ import annotations

import argparse
import atexit
import dataclasses
import functools
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .cases import CASES, STAGE_0, Case
from .device import DIED

EVERY = {**CASES, **STAGE_0}
TIMEOUT = 180.0  # seconds for one job
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "LOCAL_RANK": "0",
    "TORCHDYNAMO_DISABLE": "1",  # Muon is decorated with torch.compile, which would need minutes
    "PYTHONWARNINGS": "ignore",
}
HIDE_GPUS = {"DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES"}
ON_A_GPU = {key: value for key, value in ENVIRONMENT.items() if key not in HIDE_GPUS}
ON_A_GPU["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for torch's deterministic algorithms


class EngineError(RuntimeError):
    """The engine failed; the message is its own."""


class RankDied(EngineError):
    """A rank's process crashed, and said nothing."""


def train(case: Case, root: Path, *, losses: int = 5) -> Path:
    """Trains `case` with DeepSpeed, saves it in `root`/run and what it held in `root`/oracle.pt."""
    root.mkdir(parents=True, exist_ok=True)
    submit("rank", "train", case.dp, (case, root.resolve(), losses), root, case.extension)
    return root / "run"


def resume(
    case: Case,
    directory: Path,
    root: Path,
    *,
    dp: int | None = None,
    sp: int | None = None,
    stage: int | None = None,
    config: Mapping[str, Any] | None = None,
    optimizer: str | None = None,
    losses: int = 5,
    load: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What a new engine holds after `load_checkpoint(directory)`, and its next losses.

    The engine is that of `case` with the given changes and another seed. `load` are arguments of
    `load_checkpoint`, by default those of the case; `root` takes the log and temporary files.
    Raises EngineError with the engine's message.
    """
    root.mkdir(parents=True, exist_ok=True)
    resumed = dataclasses.replace(
        case,
        dp=case.dp if dp is None else dp,
        sp=case.sp if sp is None else sp,
        stage=case.stage if stage is None else stage,
        config=case.config if config is None else config,
        optimizer=case.optimizer if optimizer is None else optimizer,
    )
    output = root.resolve() / "resumed.pt"
    arguments = (
        resumed,
        directory.resolve(),
        output,
        dict(case.load if load is None else load),
        losses,
    )
    submit("rank", "resume", resumed.dp, arguments, root, resumed.extension)
    recorded: dict[str, Any] = torch.load(output, weights_only=False)
    return recorded


def save_again(case: Case, directory: Path, output: Path, steps: int = 1) -> None:
    """A new engine of `case` loads `directory`, trains and saves into `output`."""
    output.mkdir(parents=True, exist_ok=True)
    arguments = (case, directory.resolve(), output.resolve(), steps)
    submit("rank", "save_again", case.dp, arguments, output, case.extension)


def submit(
    module: str,
    work: str,
    ranks: int,
    arguments: tuple[Any, ...],
    root: Path,
    extension: str | None = None,
) -> None:
    """Runs `work` of `module` in so many ranks; `arguments` follow the rank and its store."""
    log = root.resolve() / "engine.log"
    process = start_zygote(module, os.environ.get("ENGINE_DEVICE", "cpu"))
    assert process.stdin is not None
    assert process.stdout is not None
    with tempfile.TemporaryDirectory() as meeting:
        arguments = (Path(meeting) / "store", *arguments)
        job = (work, extension, ranks, arguments, log, TIMEOUT)
        try:
            pickle.dump(job, process.stdin)
            process.stdin.flush()
            failure = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError):
            start_zygote.cache_clear()
            failure = "the process that forks the ranks died"
    if failure == DIED:
        raise RankDied(failure)
    if failure is not None:
        raise EngineError(failure)


@functools.cache
def start_zygote(module: str, device: str) -> subprocess.Popen[bytes]:
    added = ENVIRONMENT if device == "cpu" else ON_A_GPU
    process = subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.zygote", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **added, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    atexit.register(process.communicate)
    return process


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("case", nargs="?", choices=EVERY, metavar="CASE")
    parser.add_argument("directory", nargs="?", type=Path, metavar="DIR")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--all", type=Path, metavar="DIR")
    arguments = parser.parse_args()
    if arguments.list:
        for case in EVERY.values():
            print(f"{case.name:32} {case.kind}")
    elif arguments.all:
        for case in EVERY.values():
            print_training(case, arguments.all / case.name)
    elif arguments.directory:
        print_training(EVERY[arguments.case], arguments.directory)
    else:
        parser.print_help()


def print_training(case: Case, root: Path) -> None:
    started = time.monotonic()
    try:
        train(case, root)
        outcome = "ok"
    except EngineError as error:
        outcome = str(error)
    print(f"{case.name:32} {time.monotonic() - started:6.1f} s  {outcome}", flush=True)


if __name__ == "__main__":
    main()
