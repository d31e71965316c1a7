"""Weights beside the model: those of an EMA are named where they are left out, and `--root` takes
them; Lightning's WeightAveraging saves the average in the place of the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from zckpt import load

from ...conftest import Result

Program = Callable[..., Result]
FIRST = torch.arange(16.0).reshape(4, 4)
WEIGHTS = {"fc.weight": FIRST, "fc.bias": torch.arange(4.0)}
AVERAGES = {name: tensor + 0.5 for name, tensor in WEIGHTS.items()}
OPTIMIZER = {
    "state": {
        number: {"step": torch.tensor(3.0), "exp_avg": tensor / 7, "exp_avg_sq": tensor / 9}
        for number, tensor in enumerate(WEIGHTS.values())
    },
    "param_groups": [{"params": [0, 1], "lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}],
}
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "alone": ("ema", {"model": WEIGHTS, "ema": AVERAGES}),
    "with an optimizer": ("ema", {"model": WEIGHTS, "ema": AVERAGES, "optimizer": OPTIMIZER}),
    "timm": (
        "state_dict_ema",
        {"state_dict": WEIGHTS, "state_dict_ema": AVERAGES, "optimizer": OPTIMIZER, "epoch": 3},
    ),
    "with its decay": (
        "model_ema.module",
        {"model": WEIGHTS, "model_ema": {"module": AVERAGES, "decay": 0.9}},
    ),
    "beside a whole model": ("ema", {**WEIGHTS, "ema": AVERAGES}),
}


@pytest.mark.parametrize("name", FILES)
def test_weights_alone(name: str, tmp_path: Path, zckpt: Program) -> None:
    root, content = FILES[name]
    torch.save(content, tmp_path / "x.pt")
    said = zckpt("convert", tmp_path / "x.pt", tmp_path / "a", "--weights-only")
    assert (
        f"left out: {root}: tensors beside the model; to read them instead, add --root {root} "
        "[weights-omitted]\n" in said.out
    )
    zckpt("convert", tmp_path / "x.pt", tmp_path / "b", "--weights-only", "--root", root)
    for folder, weights in (("a", WEIGHTS), ("b", AVERAGES)):
        written = load_file(tmp_path / folder / "model.safetensors")
        assert written.keys() == weights.keys()
        assert all(torch.equal(written[key], tensor) for key, tensor in weights.items())


def test_a_key_with_a_point_is_named_once(tmp_path: Path, zckpt: Program) -> None:
    torch.save({"model": WEIGHTS, "x.y": {"t": torch.ones(2, 2)}}, tmp_path / "x.pt")
    said = zckpt("convert", tmp_path / "x.pt", tmp_path / "a", "--weights-only")
    assert said.code == 0, said.err
    assert said.out.count("left out: x.y") == 1, said.out


def test_names_after_renaming_take_nothing_away(tmp_path: Path, zckpt: Program) -> None:
    """A source that needs no names is read as it is."""
    content = {"model": WEIGHTS, "optimizer": OPTIMIZER, "own": {"x": torch.ones(2, 2)}}
    torch.save(content, tmp_path / "x.pt")
    zckpt("convert", tmp_path / "x.pt", tmp_path / "u")
    (tmp_path / "names.txt").write_text("lin.weight\nlin.bias\n")
    words = ("--rename", "^fc=lin", "--param-names", tmp_path / "names.txt")
    said = zckpt("convert", tmp_path / "u", tmp_path / "d", "--to", "dcp", *words)
    assert said.code == 0, said.err
    assert "tensors of the program's own state" not in said.out


def test_a_tensor_beside_the_model(tmp_path: Path, zckpt: Program) -> None:
    """It is no model, and no root."""
    torch.save({"model": WEIGHTS, "loss_scale": torch.ones(2)}, tmp_path / "x.pt")
    assert "models" not in zckpt("inspect", tmp_path / "x.pt").out
    said = zckpt("convert", tmp_path / "x.pt", tmp_path / "a", "--weights-only").out
    assert "left out: loss_scale: tensors of the program's own state [weights-omitted]\n" in said


def test_weights_without_names(tmp_path: Path, zckpt: Program) -> None:
    """Those of torch_ema are a list."""
    shadow = {"decay": 0.9, "shadow_params": [*AVERAGES.values()]}
    torch.save({"model": WEIGHTS, "ema": shadow, "rng": torch.ones(4)}, tmp_path / "x.pt")
    said = zckpt("convert", tmp_path / "x.pt", tmp_path / "a", "--weights-only").out
    assert "left out: ema: tensors of the program's own state [weights-omitted]\n" in said


@pytest.mark.parametrize("to", ["universal", "deepspeed", "dcp"])
def test_weights_alone_of_a_target(to: str, tmp_path: Path, zckpt: Program) -> None:
    """Every target keeps them, and its weights alone lack them."""
    torch.save(FILES["with an optimizer"][1], tmp_path / "x.pt")
    assert zckpt("convert", tmp_path / "x.pt", tmp_path / "a", "--to", to).code == 0
    said = zckpt("convert", tmp_path / "a", tmp_path / "b", "--weights-only").out
    assert "left out: ema: " in said


def test_an_exported_model(tmp_path: Path, zckpt: Program) -> None:
    torch.save(FILES["with an optimizer"][1], tmp_path / "x.pt")
    (tmp_path / "config.json").write_text('{"model_type": "own"}')
    config = ("--config", tmp_path / "config.json")
    said = zckpt("export", tmp_path / "x.pt", tmp_path / "a", *config).out
    assert (
        "left out: ema: tensors beside the model; to read them instead, add --root ema "
        "[weights-omitted]\n" in said
    )
    zckpt("export", tmp_path / "x.pt", tmp_path / "b", "--root", "ema", *config)
    written = load_file(tmp_path / "b" / "model.safetensors")
    assert torch.equal(written["fc.weight"], AVERAGES["fc.weight"])


def test_averages_with_the_optimizer(tmp_path: Path, zckpt: Program) -> None:
    torch.save(FILES["timm"][1], tmp_path / "x.pt")
    for root, states in (("state_dict_ema", False), ("state_dict_ema=optimizer", True)):
        target = tmp_path / f"{states}"
        assert zckpt("reshard", tmp_path / "x.pt", target, "--root", root).code == 0
        written = torch.load(target / "x.pt")
        assert torch.equal(written["state_dict_ema"]["fc.weight"], AVERAGES["fc.weight"])
        assert ("optimizer" in written) == states
        assert "state_dict" not in written
        assert written["epoch"] == 3
    # the file with all of it keeps both
    zckpt("reshard", tmp_path / "x.pt", tmp_path / "all")
    assert torch.load(tmp_path / "all" / "x.pt").keys() >= FILES["timm"][1].keys()


# -- Lightning's WeightAveraging


def fitted(folder: Path, steps: int, averages: bool, start: Path | None = None) -> Path:
    """Trains with real Lightning up to a number of steps; gives the file that it saves."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback, EMAWeightAveraging

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.body, self.head = nn.Linear(3, 5), nn.Linear(5, 2)

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            output: Tensor = self.head(torch.tanh(self.body(batch)))
            return output.square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    torch.manual_seed(7)
    trainer = Trainer(
        max_steps=steps,
        accelerator="cpu",
        callbacks=[EMAWeightAveraging(decay=0.5)] if averages else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = torch.utils.data.DataLoader(torch.randn(4, 3).expand(12, 4, 3), batch_size=None)
    saved = folder / f"{steps}.ckpt"

    class Saving(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == steps:
                trainer.save_checkpoint(saved)

    trainer.callbacks.append(Saving())
    trainer.fit(Module(), batches, ckpt_path=start, weights_only=False)
    return saved


@pytest.fixture
def averaged(tmp_path: Path) -> Path:
    return fitted(tmp_path, 3, averages=True)


def test_what_lightning_saves_is_said(averaged: Path, zckpt: Program) -> None:
    for command in (("inspect",), ("verify",)):
        said = zckpt(*command, averaged)
        assert said.code == 0
        assert (
            "state_dict has averages of the weights, and current_model_state has the weights"
            in said.err
        )


def test_lightning_resumes_with_both(averaged: Path, tmp_path: Path, zckpt: Program) -> None:
    expected = torch.load(fitted(tmp_path, 6, averages=True), weights_only=False)
    assert zckpt("reshard", averaged, tmp_path / "out").code == 0
    resumed = fitted(tmp_path, 6, averages=True, start=tmp_path / "out" / averaged.name)
    again = torch.load(resumed, weights_only=False)
    for key in ("state_dict", "current_model_state"):
        for name, tensor in expected[key].items():
            assert torch.equal(again[key][name], tensor), (key, name)


def test_lightning_resumes_with_the_trained_weights(
    averaged: Path, tmp_path: Path, zckpt: Program
) -> None:
    """Those that the optimizer updates; without the callback they are the model's."""
    expected = torch.load(fitted(tmp_path, 6, averages=True), weights_only=False)
    out = tmp_path / "out"
    assert zckpt("reshard", averaged, out, "--root", "current_model_state").code == 0
    resumed = fitted(tmp_path, 6, averages=False, start=out / averaged.name)
    again = torch.load(resumed, weights_only=False)["state_dict"]
    for name, tensor in expected["current_model_state"].items():
        assert torch.equal(again[name], tensor), name


@pytest.mark.parametrize("to", ["dcp", "deepspeed", "deepspeed-universal", "onnxruntime", "parts"])
def test_averages_are_not_trained_on(
    to: str, averaged: Path, tmp_path: Path, zckpt: Program
) -> None:
    """Lightning loads both from one file alone, so that another target needs a choice."""
    way = ["--to", "gathered", "--dialect", "safetensors"] if to == "parts" else ["--to", to]
    refused = zckpt("convert", averaged, tmp_path / "out", *way)
    assert refused.code == 1
    assert "--root current_model_state, or with --root state_dict" in refused.err
    out = tmp_path / "chosen"
    said = zckpt("convert", averaged, out, *way, "--root", "current_model_state")
    assert said.code == 0
    assert "left out: state_dict, averaging_state: --root selects current_model_state" in said.out
    saved = torch.load(averaged, weights_only=False)["current_model_state"]
    slot = "master" if to.startswith("deepspeed") else "param"
    weight = torch.as_tensor(load(out, f"body.weight/{slot}"))
    assert torch.equal(weight, saved["body.weight"])
