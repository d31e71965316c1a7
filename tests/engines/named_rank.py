"""A DeepSpeed engine over parameters of given names and shapes, which loads a checkpoint.

    python -m tests.engines.named_rank JOB.json

The job has `parameters` and `aliases` by name, `groups` of names, a `stage` and the number of
`ranks`. What the engine of rank 0 holds after it has loaded `checkpoint` goes to `output`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

from . import oracle
from .rank import ENABLE, join, prepare


def module(parameters: dict[str, list[int]], aliases: dict[str, str]) -> nn.Module:
    """Modules as the dots in the names say; second names are those of tied weights."""
    torch.manual_seed(7)
    root = nn.Module()
    for name, shape in parameters.items():
        _put(root, name, nn.Parameter(torch.randn(shape)))
    known = dict(root.named_parameters())
    for alias, name in aliases.items():
        _put(root, alias, known[name])
    return root


def _put(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.register_parameter(last, parameter)


def load(rank: int, job: dict[str, Any]) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    prepare()
    join(rank, job["ranks"], Path(job["output"] + ".store"))
    model = module(job["parameters"], job["aliases"])
    known = dict(model.named_parameters())
    groups = [{"params": [known[name] for name in names]} for names in job["groups"]]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": job["stage"]},
        **ENABLE["bf16"],
    }
    optimizer = torch.optim.AdamW(groups)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    loaded, _ = engine.load_checkpoint(job["checkpoint"])
    if loaded is None:
        raise FileNotFoundError(f"the engine found no checkpoint in {job['checkpoint']}")
    state = oracle.record(engine)
    if state is not None:
        torch.save(state, job["output"])


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    torch.multiprocessing.spawn(load, (given,), given["ranks"])
