"""What one rank does of programs whose learning rate a scheduler sets, in torch and in DeepSpeed.

    train     FSDP2 trains some updates, saves, and goes on
    resume    DeepSpeed loads what was converted, and must go on with the same rates and losses

DeepSpeed's own schedulers drive torch's optimizer, too: so both engines have the same rates.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from . import rank as engine_rank
from .checked_rank import STEPS, loss_of, model, rows

prepare = engine_rank.prepare

RATE = 0.01
PARAMS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_num_steps": 6, "warmup_max_lr": RATE},
    "WarmupDecayLR": {"warmup_num_steps": 3, "warmup_max_lr": RATE, "total_num_steps": 9},
    "WarmupCosineLR": {"warmup_num_steps": 6, "total_num_steps": 12},
    "OneCycle": {"cycle_min_lr": 0.001, "cycle_max_lr": RATE, "cycle_first_step_size": 5},
    "LRRangeTest": {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 2},
}
"""DeepSpeed's schedulers, none of which has ended when the run is saved."""
TORCH = "LambdaLR"
"""The program's own scheduler, which it saves as part of DCP's application state."""


def configuration(name: str, stage: int) -> dict[str, Any]:
    """The ds_config of a program with this scheduler."""
    scheduler = {"scheduler": {"type": name, "params": PARAMS[name]}} if name in PARAMS else {}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **scheduler,
    }


def scheduler_of(name: str, optimizer: torch.optim.Optimizer) -> Any:
    from deepspeed.runtime import lr_schedules

    if name == TORCH:
        return engine_rank.decaying(optimizer)
    return getattr(lr_schedules, name)(optimizer, **PARAMS[name])


def updates(net: Callable[..., Any], step: Callable[[torch.Tensor], None], groups: Any) -> Any:
    """The learning rates and losses of some updates."""
    found = []
    for number in range(STEPS):
        rate, loss = groups[0]["lr"], loss_of(net, number)
        step(loss)
        found.append([rate, loss.item()])
    return torch.tensor(found)


def train(rank: int, store: Path, ranks: int, root: Path) -> None:
    """For each scheduler `root`/NAME/source, and in expected.pt what the next updates have."""
    engine_rank.join(rank, ranks, store)
    for name in (*PARAMS, TORCH):
        net, optimizer = rows(ranks, 1)
        scheduler = scheduler_of(name, optimizer)
        advance = _step_of(optimizer, scheduler)
        updates(net, advance, optimizer.param_groups)
        weights, states = get_state_dict(net, optimizer)
        state: dict[str, Any] = {"model": weights, "optim": states}
        if name == TORCH:
            state = {"app": {**state, "lr_scheduler": scheduler.state_dict()}}
        dcp.save(state, checkpoint_id=root / name / "source")
        following = updates(net, advance, optimizer.param_groups)
        if rank == 0:
            torch.save(following, root / name / "expected.pt")


def _step_of(optimizer: torch.optim.Optimizer, scheduler: Any) -> Callable[[torch.Tensor], None]:
    def step(loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()

    return step


def resume(rank: int, store: Path, ranks: int, root: Path, stage: int) -> None:
    """Raises unless every `root`/NAME/run goes on as its source did."""
    import deepspeed

    engine_rank.join(rank, ranks, store)
    for name in (*PARAMS, TORCH):
        torch.manual_seed(2)
        net: nn.Module = model()
        engine, *_ = deepspeed.initialize(
            model=net,
            optimizer=torch.optim.AdamW(net.parameters(), lr=RATE),
            lr_scheduler=engine_rank.decaying if name == TORCH else None,
            config=configuration(name, stage),
        )
        path, _ = engine.load_checkpoint(str(root / name / "run"))
        assert path is not None, "nothing was loaded"

        def step(loss: torch.Tensor, engine: Any = engine) -> None:
            engine.backward(loss)
            engine.step()

        found = updates(engine, step, engine.optimizer.param_groups)
        expected = torch.load(root / name / "expected.pt")
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7, msg=f"{name}: {found}")
