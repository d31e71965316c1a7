"""Callbacks record what real trainers do: equal runs are equal, and another rate is seen."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import zckpt
from zckpt import probe
from zckpt.errors import TargetExists
from zckpt.probe import runs

from ..conftest import ROOT, needs

pytestmark = pytest.mark.engines
RATE, STEPS = 0.1, 4
DATA = [{"x": torch.arange(3.0) * n, "labels": torch.ones(1) * n} for n in range(8)]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.second(self.first(x).tanh())
        return {"loss": (y - labels).square().mean(), "logits": y}


def huggingface(
    root: Path,
    name: str,
    rate: float = RATE,
    resumed: Path | None = None,
    callback: Any = None,
    **options: Any,
) -> Path:
    """Trains from step 0, or from `resumed`; returns what the callback recorded."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(root / f"{name}_checkpoints"),
        max_steps=STEPS,
        learning_rate=rate,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_steps=2,
    )
    callback = callback or probe.TrainerCallback(root / name, parameters=True, **options)
    trainer = Trainer(Model(), arguments, train_dataset=DATA, callbacks=[callback])
    trainer.train(resume_from_checkpoint=str(resumed) if resumed else None)
    assert not trainer.model.first._forward_hooks
    return root / name


def steps(directory: Path) -> set[int]:
    return {record.step for record in runs.read(directory).ranks[0]}


@pytest.mark.first
def test_a_trainer_resumes_without_any_difference(tmp_path: Path) -> None:
    whole = huggingface(tmp_path, "whole")
    resumed = tmp_path / "whole_checkpoints" / "checkpoint-2"
    later = huggingface(tmp_path, "later", resumed=resumed)
    assert (steps(whole), steps(later)) == ({0, 1, 2, 3}, {2, 3})
    report = probe.compare(whole, later)
    assert (report["equal"], report["steps"]) == (True, [2, 3])
    batches = {record.batch for record in runs.read(whole).ranks[0] if record.kind == "forward"}
    assert batches == {"0", "1"}


@pytest.mark.first
def test_another_rate_of_a_trainer_is_seen_after_the_first_update(tmp_path: Path) -> None:
    whole, faster = huggingface(tmp_path, "whole"), huggingface(tmp_path, "faster", 2 * RATE)
    report = probe.compare(whole, faster)
    assert report["first"]["step"] == 1
    assert report["first"]["meaning"].startswith("equal until the first update")


def test_a_trainer_records_a_range_of_steps(tmp_path: Path) -> None:
    assert steps(huggingface(tmp_path, "part", start_step=1, end_step=3)) == {1, 2}


def test_a_second_training_does_not_replace_the_first(tmp_path: Path) -> None:
    callback = probe.TrainerCallback(tmp_path / "once")
    huggingface(tmp_path, "once", callback=callback)
    with pytest.raises(TargetExists):
        huggingface(tmp_path, "once", callback=callback)


@pytest.mark.first
def test_training_that_begins_again_is_recorded_from_there(tmp_path: Path) -> None:
    """Trainer's auto_find_batch_size begins again after an error, and says no end."""
    from transformers import TrainerControl, TrainerState, TrainingArguments

    callback = probe.TrainerCallback(tmp_path / "run")
    model, state = Model(), TrainerState()
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    for _ in range(2):
        callback.on_train_begin(arguments, state, TrainerControl(), model=model)
        model(**DATA[0])
    callback.on_train_end(arguments, state, TrainerControl())
    forwards = [r.key for r in runs.read(tmp_path / "run").ranks[0] if r.key == "first#0/out"]
    assert len(forwards) == 1
    assert not model.first._forward_hooks


# -- Lightning


def lightning(
    root: Path,
    name: str,
    *,
    rate: float = RATE,
    package: str = "lightning.pytorch",
    forward: bool = False,
    resumed: Path | None = None,
    fails: bool = False,
    strategy: str = "auto",
    **options: Any,
) -> Path:
    """Trains from step 0, or from `resumed`; returns what the callback recorded."""
    pl = import_module(package)

    class Inner(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = Model()

        def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
            if fails and self.global_step == 2:
                raise FloatingPointError("nan")
            loss: Tensor = self.called()(**batch)["loss"]
            return loss

        def called(self) -> Callable[..., Any]:
            return self.network

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=rate)

    class Outer(Inner):
        def called(self) -> Callable[..., Any]:
            return self

        def forward(self, **batch: Tensor) -> Any:
            return self.network(**batch)

    trainer = pl.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        strategy=strategy,
        devices=1,
        use_distributed_sampler=False,
        logger=False,
        default_root_dir=root,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            probe.LightningCallback(root / name, parameters=True, **options),
            pl.callbacks.ModelCheckpoint(
                root / f"{name}_checkpoints", "{step}", every_n_train_steps=2, save_top_k=-1
            ),
        ],
    )
    module = Outer() if forward else Inner()
    trainer.fit(module, DataLoader(DATA[:4], batch_size=2), ckpt_path=resumed)  # type: ignore[arg-type]
    assert not module.network.first._forward_hooks
    return root / name


@pytest.mark.first
def test_lightning_resumes_without_any_difference(tmp_path: Path) -> None:
    whole = lightning(tmp_path, "whole")
    later = lightning(tmp_path, "later", resumed=tmp_path / "whole_checkpoints" / "step=2.ckpt")
    assert (steps(whole), steps(later)) == ({0, 1, 2, 3}, {2, 3})
    report = probe.compare(whole, later)
    assert (report["equal"], report["steps"]) == (True, [2, 3])


@pytest.mark.first
def test_another_rate_of_lightning_is_seen_after_the_first_update(tmp_path: Path) -> None:
    whole, faster = lightning(tmp_path, "whole"), lightning(tmp_path, "faster", rate=2 * RATE)
    report = probe.compare(whole, faster)
    assert report["first"]["step"] == 1
    assert report["first"]["meaning"].startswith("equal until the first update")


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_which_module_lightning_calls(package: str, tmp_path: Path) -> None:
    needs(package.partition(".")[0])
    inner = lightning(tmp_path, "inner", package=package)
    named = lightning(tmp_path, "named", package=package, module="network")
    outer = lightning(tmp_path, "outer", package=package, forward=True)
    assert probe.compare(inner, named)["equal"]
    keys = {record.key for record in runs.read(outer).ranks[0]}
    assert {"network.first#0/out", "network.first.weight"} <= keys


@pytest.mark.parametrize("forward", [False, True])
def test_lightning_with_ddp_has_the_same_records(forward: bool, tmp_path: Path) -> None:
    """DDP runs training_step as the forward of the LightningModule, which calls its own again."""
    alone = lightning(tmp_path, "alone", forward=forward)
    ddp = lightning(tmp_path, "ddp", forward=forward, strategy="ddp")
    assert probe.compare(alone, ddp)["first"] is None
    first, second = (
        [(r.step, r.batch, r.key) for r in runs.read(run).ranks[0] if "(model)" not in r.key]
        for run in (alone, ddp)
    )
    assert first == second


def test_a_training_that_fails_leaves_a_readable_run(tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError):
        lightning(tmp_path, "failed", fails=True)
    assert steps(tmp_path / "failed") == {0, 1}


def test_a_module_that_is_not_known(tmp_path: Path) -> None:
    from zckpt.probe.lightning import called_module

    with pytest.raises(zckpt.ZckptError, match="has no module 'net'") as raised:
        called_module(Model(), "net")
    assert "'first', 'second'" in (raised.value.hint or "")
    pl = import_module("lightning.pytorch")
    module = pl.LightningModule()
    module.a, module.b = nn.Linear(1, 1), nn.Linear(1, 1)
    with pytest.raises(zckpt.ZckptError, match="2 modules with parameters"):
        called_module(module, None)


# -- both


@pytest.mark.first
@pytest.mark.parametrize("name", ["TrainerCallback", "LightningCallback"])
def test_options_are_checked_at_once(name: str, tmp_path: Path) -> None:
    callback = getattr(probe, name)
    with pytest.raises(TypeError, match="unexpected keyword argument 'stpe'"):
        callback(tmp_path, stpe=3)
    with pytest.raises(TypeError, match="step= is not needed"):
        callback(tmp_path, step=3)


@pytest.mark.first
def test_frameworks_are_imported_on_use() -> None:
    code = """
import sys, zckpt.probe
zckpt.probe.record
assert not {"transformers", "lightning", "pytorch_lightning"} & set(sys.modules)
for name in ("transformers", "lightning", "pytorch_lightning"):
    sys.modules[name] = None
for name in ("TrainerCallback", "LightningCallback"):
    try:
        getattr(zckpt.probe, name)
    except zckpt.ZckptError as error:
        print(error.message, error.hint, sep="; ")
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == [
        "probe.TrainerCallback needs transformers, which is not installed; "
        "pip install transformers",
        "probe.LightningCallback needs lightning, which is not installed; pip install lightning",
    ]
