"""Checkpoints that real trainers make around DeepSpeed's or FSDP's, and their own way to resume.

    hf_trainer   transformers.Trainer         <checkpoint-3>/global_step3, model.safetensors, ...
    accelerate   Accelerator.save_state       <state>/pytorch_model/, random_states_0.pkl, ...
    lightning    lightning DeepSpeedStrategy  <x.ckpt>/checkpoint/

    *_lora       the Trainer with PEFT: adapters in place of model.safetensors

    *_fsdp       the same with FSDP2      pytorch_model_fsdp_0/, optimizer_0/; Lightning: x.ckpt/
    *_fsdp_full  whole state dicts        pytorch_model_fsdp.bin, optimizer.bin; Lightning: x.ckpt
    *_fsdp1      with FSDP1               accelerate 1.15 loads no moments of it: it asks what an
                                          optimizer has that has not stepped
    *_fsdp_ranks one file per rank        pytorch_model_fsdp_0_rank0.bin, optimizer_0_rank0.bin
    lightning_*  ddp: <x.ckpt>, one file; deepspeed: as `lightning`, in fp32

All run unmodified on a processor, except that Lightning, and all with FSDP, are told that it is a
CUDA device (see `lightning_rank.py`, `fsdp_trainers.py`).

    python -m tests.engines.trainers TRAINER STAGE RANKS DIR
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from .deepspeed import ENVIRONMENT, EngineError

TIMEOUT = 300.0  # seconds for one run, imports included
TRAINERS = ("hf_trainer", "accelerate", "lightning")
LORA = "hf_trainer_lora"
FSDP = ("fsdp", "fsdp_full", "fsdp1", "fsdp_ranks")  # not all trainers have all
LIGHTNING = ("lightning_ddp", "lightning_deepspeed")
EVERY = (
    *TRAINERS,
    LORA,
    *LIGHTNING,
    *(f"{trainer}_{kind}" for trainer in TRAINERS for kind in FSDP),
)
ACCELERATE = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_TORCH_DEVICE": "cpu"}


def hf_trainer(root: Path, stage: int, dp: int) -> Path:
    """Trains a tiny Llama; returns `root`/run/checkpoint-3, `root`/oracle.pt beside."""
    return train("hf_trainer", root, stage, dp)


def accelerate(root: Path, stage: int, dp: int) -> Path:
    """Trains `models.Model`; returns `root`/run/state, `root`/oracle.pt beside."""
    return train("accelerate", root, stage, dp)


def lightning(root: Path, stage: int, dp: int) -> Path:
    """Trains `models.Model`; returns `root`/run/x.ckpt, `root`/oracle.pt beside."""
    return train("lightning", root, stage, dp)


def fsdp(trainer: str, root: Path, world: int) -> Path:
    """Trains with FSDP, e.g. `accelerate_fsdp`; returns what it saved, `root`/oracle.pt beside."""
    return train(trainer, root, 0, world)


def train(trainer: str, root: Path, stage: int, dp: int) -> Path:
    """Trains 3 steps, saves, records what the engine holds and the losses of the next 5 steps.

    The oracle has the keys of `oracle.record`, `losses` and `directory`, the saved path.
    """
    return Path(run(trainer, root, stage, dp, None)["directory"])


def resume(
    trainer: str, directory: Path, root: Path, stage: int, dp: int, copy: bool | None = None
) -> dict[str, Any]:
    """What the trainer's engine holds after resuming from `directory`, and the next 5 losses.

    `directory` is what `train` returned, or one laid out like it for `dp` ranks. With `copy` the
    ranks ask `zckpt.auto_resume` for the path, which makes it fit in `root`.
    """
    return run(trainer, root, stage, dp, directory, copy)


def run(
    trainer: str,
    root: Path,
    stage: int,
    dp: int,
    directory: Path | None,
    copy: bool | None = None,
) -> dict[str, Any]:
    root.mkdir(parents=True, exist_ok=True)
    output = root.resolve() / ("resumed.pt" if directory else "oracle.pt")
    arguments = {
        "trainer": trainer,
        "root": str(root.resolve()),
        "stage": stage,
        "dp": dp,
        "directory": str(directory.resolve()) if directory else None,
        "output": str(output),
        "copy": copy,
    }
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("LOCAL_RANK", None)
    if trainer in ("hf_trainer", LORA, "accelerate"):
        environment.update(ACCELERATE)
    process = subprocess.run(
        [sys.executable, "-m", f"{__package__}.trainer_rank", json.dumps(arguments)],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    if process.returncode:
        raise EngineError(process.stderr.strip().splitlines()[-1])
    result: dict[str, Any] = torch.load(output, weights_only=False)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("trainer", choices=EVERY)
    parser.add_argument("stage", type=int)
    parser.add_argument("ranks", type=int)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    print(train(arguments.trainer, arguments.directory, arguments.stage, arguments.ranks))


if __name__ == "__main__":
    main()
