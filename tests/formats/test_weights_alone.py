"""Optimizer files beside whole weights, of each format: damage there does not keep the weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import zckpt
from zckpt.errors import ZckptError

from ..conftest import EXAMPLE, ROOT

DATA = ROOT / "tests" / "data"
TRAINER = ROOT / "examples" / "trainer" / "checkpoint-4"


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def of_the_trainer(run: Path) -> None:
    run.mkdir()
    model, optimizer = trained()
    save_file(model.state_dict(), run / "model.safetensors")
    torch.save(optimizer.state_dict(), run / "optimizer.pt")


def of_fsdp(run: Path) -> None:
    run.mkdir()
    model, optimizer = trained()
    torch.save(model.state_dict(), run / "pytorch_model_fsdp.bin")
    torch.save(optimizer.state_dict(), run / "optimizer.bin")


def of_ranks(run: Path) -> None:
    shutil.copytree(DATA / "torch_checkpointing-0.1.1-w2" / "items", run)


def of_accelerate(run: Path) -> None:
    zckpt.convert(TRAINER, run, to="dcp", dialect="accelerate")


def of_automodel(run: Path) -> None:
    shutil.copytree(DATA / "automodel-0.7.0-w2", run)


def of_zckpt(run: Path) -> None:
    zckpt.convert(EXAMPLE, run)


def of_deepspeeds_converter(run: Path) -> None:
    zckpt.convert(EXAMPLE, run, to="deepspeed-universal")


def missing(file: Path) -> None:
    file.unlink()


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def zeros(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


CASES: dict[str, tuple[Callable[[Path], None], str, tuple[Callable[[Path], None], ...]]] = {
    "Trainer": (of_the_trainer, "optimizer.pt", (cut, zeros)),
    "FSDP, whole": (of_fsdp, "optimizer.bin", (cut,)),
    "ranks' items": (of_ranks, "optimizer_1.pt", (missing, cut)),
    "Accelerate": (of_accelerate, "optimizer_0/.metadata", (missing, cut)),
    "AutoModel": (of_automodel, "optim/.metadata", (missing, zeros)),
    "zckpt": (of_zckpt, "exp_avg.safetensors", (missing, cut)),
    "zckpt, masters": (of_zckpt, "master.safetensors", (missing, cut)),
    "universal": (of_deepspeeds_converter, "exp_avg.pt", (cut,)),
}
ROWS = [
    pytest.param(name, damage, id=f"{name}, {damage.__name__}")
    for name, (_, _, damages) in CASES.items()
    for damage in damages
]


@pytest.mark.parametrize(("name", "damage"), ROWS)
def test_weights_are_read(name: str, damage: Callable[[Path], None], tmp_path: Path) -> None:
    """They are those of the sound checkpoint; a command that needs more says how to get them."""
    make, pattern, _ = CASES[name]
    run = tmp_path / "run"
    make(run)
    zckpt.convert(run, tmp_path / "sound", weights_only=True)
    files = [file for file in run.rglob("*") if file.match(pattern)]
    assert files
    for file in files:
        damage(file)
    report = zckpt.convert(run, tmp_path / "out", weights_only=True)
    (warning,) = [each for each in report["warnings"] if each["code"] == "optimizer-missing"]
    assert warning["message"].endswith("lost")
    found, sound = (load_file(tmp_path / each / "model.safetensors") for each in ("out", "sound"))
    assert found.keys() == sound.keys()
    assert all(torch.equal(found[key], sound[key]) for key in sound)
    for words in ({}, {"to": "dcp"}):
        with pytest.raises(ZckptError) as raised:
            zckpt.convert(run, tmp_path / "refused", **words)
        assert f"`zckpt convert {run} DST --weights-only`" in raised.value.hint


def test_damaged_weights_are_no_matter_of_the_optimizer(tmp_path: Path) -> None:
    run = tmp_path / "run"
    of_fsdp(run)
    cut(run / "pytorch_model_fsdp.bin")
    with pytest.raises(ZckptError, match="pytorch_model_fsdp") as raised:
        zckpt.convert(run, tmp_path / "out", weights_only=True)
    assert "--weights-only" not in raised.value.hint


def test_a_weight_that_only_its_master_had(tmp_path: Path) -> None:
    """ZeRO-3 saves no 16-bit weights: without the masters nothing is left."""
    run = tmp_path / "run"
    zckpt.convert(DATA / "zckpt-0.1-z3_dp3", run)
    missing(run / "master.safetensors")
    with pytest.raises(ZckptError, match=r"lacks .*master"):
        zckpt.convert(run, tmp_path / "out", weights_only=True)
