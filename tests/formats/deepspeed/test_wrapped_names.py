"""Names of torch's wrappers in DeepSpeed's files: one name for a weight and its states.

`named_parameters()`, which the engine lists, has checkpoint_wrapper's word, and the module's state
dict has not. The judges are DeepSpeed itself and a run without wrappers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import zckpt
from zckpt.formats.deepspeed_states.module_names import as_in_module

from ...conftest import ROOT

PROGRAM = """
import sys
import deepspeed, torch
from tests.naming.test_wrapped_models import Net, WRAPPED

folder, kind, stage = sys.argv[1:]
torch.manual_seed(0)
model = WRAPPED[kind](Net()) if kind != "plain" else Net()
config = {
    "train_batch_size": 8,
    "zero_optimization": {"stage": int(stage)},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for number in range(2):
    numbers = torch.randn(8, 5, generator=torch.Generator().manual_seed(number))
    engine.backward(engine(numbers).square().mean())
    engine.step()
engine.save_checkpoint(folder)
"""
ALONE = {
    "DS_ACCELERATOR": "cpu",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


def trained(folder: Path, kind: str, stage: int) -> Path:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(folder), kind, str(stage)],
        env={**os.environ, **ALONE, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return folder


@pytest.mark.engines
@pytest.mark.parametrize(
    ("kind", "stage"),
    [("checkpointed blocks", 2), ("both", 2), ("checkpointed blocks", 3)],
)
def test_a_wrapped_run_equals_a_plain_one(kind: str, stage: int, tmp_path: Path) -> None:
    run = trained(tmp_path / "run", kind, stage)
    plain = trained(tmp_path / "plain", "plain", stage)
    for words in ({}, {"gather": True, "device": "cpu"}):
        for pair in ((run, plain), (plain, run)):
            report = zckpt.verify(*pair, **words)
            assert report["equal"], (words, report["problems"][:2], report["states"][:2])
    zckpt.convert(run, tmp_path / "weights", weights_only=True)
    zckpt.convert(plain, tmp_path / "plain_weights", weights_only=True)
    own, other = (
        load_file(tmp_path / name / "model.safetensors") for name in ("weights", "plain_weights")
    )
    assert {name: tensor.tolist() for name, tensor in own.items()} == {
        name: tensor.tolist() for name, tensor in other.items()
    }
    zckpt.convert(run, tmp_path / "gathered", to="gathered")
    assert zckpt.verify(tmp_path / "gathered", plain)["equal"]
    zckpt.reshard(run, tmp_path / "two", dp=2)
    assert zckpt.verify(tmp_path / "two", run)["equal"]


def test_lists_of_a_model_file_get_the_names_of_its_module() -> None:
    word = "_checkpoint_wrapped_module"
    model: dict[str, Any] = {
        "module": {"a.w": 1, "b.w": 2, "b.mean": 3},
        "param_shapes": [{f"a.{word}.w": (2, 3)}, {"c.w": (1,)}],
        "frozen_param_shapes": {f"b.{word}.w": (4,)},
        "frozen_param_fragments": {f"b.{word}.w": "tensor"},
        "buffer_names": [f"b.{word}.mean"],
        "shared_params": {"tied.w": f"a.{word}.w"},
        "global_steps": 7,
    }
    assert as_in_module(model) == {
        **model,
        "param_shapes": [{"a.w": (2, 3)}, {"c.w": (1,)}],
        "frozen_param_shapes": {"b.w": (4,)},
        "frozen_param_fragments": {"b.w": "tensor"},
        "buffer_names": ["b.mean"],
        "shared_params": {"tied.w": "a.w"},
    }
    for same in ({"module": None}, {**model, "param_shapes": None}, as_in_module(model)):
        assert as_in_module(same) is same
