"""Directories of NeMo and of Megatron-Bridge, which keep files beside those of Megatron-Core."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt as package
from zckpt import errors
from zckpt.formats.megatron.saving_program import arguments_of

from ...conftest import ROOT, texts

ITEMS = ROOT / "tests" / "data" / "megatron-0.16.1-tp2" / "iter_0000003"
CONFIG = """\
checkpoint:
  save: /runs/1
  tensor_model_parallel_size: 7
model:
  _target_: megatron.bridge.models.llama.Llama
  num_query_groups: 2
  gated_linear_unit: true
  rotary:
    num_query_groups: 9
  share_embeddings_and_output_weights: true
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 1
  window: [1, 2]
train:
  tensor_model_parallel_size: 8
"""


def _without_arguments(folder: Path, **others: Any) -> None:
    """The common state, as a program saves it that is not Megatron-LM."""
    common = torch.load(folder / "common.pt", weights_only=False)
    del common["args"]
    torch.save({**common, **others}, folder / "common.pt")


@pytest.fixture
def bridge(tmp_path: Path) -> Path:
    run = tmp_path / "bridge"
    folder = run / "iter_0000003"
    shutil.copytree(ITEMS, folder)
    _without_arguments(folder)
    (folder / "run_config.yaml").write_text(CONFIG)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    for path in (folder / "train_state.pt", run / "latest_train_state.pt"):
        torch.save({"step": torch.tensor(3)}, path)
    (folder / "modelopt_state").mkdir()
    return run


def test_bridges_files_go_along(bridge: Path, tmp_path: Path, zckpt: Callable[..., Any]) -> None:
    """Also through a universal checkpoint: without them a run does not resume."""
    ended = zckpt("reshard", bridge, tmp_path / "one")
    assert ended.code == 0, ended.err
    assert "checkpoint.load=" in ended.out
    assert zckpt("convert", bridge, tmp_path / "universal").code == 0
    assert zckpt("reshard", tmp_path / "universal", tmp_path / "two").code == 0
    for target in (tmp_path / "one", tmp_path / "two"):
        for name in ("run_config.yaml", "train_state.pt", "tokenizer/tokenizer.json"):
            own = target / "iter_0000003" / name
            assert own.read_bytes() == (bridge / "iter_0000003" / name).read_bytes()
        latest = (target / "latest_train_state.pt").read_bytes()
        assert latest == (target / "iter_0000003" / "train_state.pt").read_bytes()
        assert not (target / "run_config.yaml").exists()
        written = package.read(target)
        assert "rng_state/shard_0.1_1.2" in written.state["megatron"]["objects"]
        assert package.verify(target, ITEMS)["differences"] == []
    omitted = package.read(bridge).notices.omitted
    assert texts(omitted) == ["modelopt_state, an unknown file of the directory"]


def test_bridges_sizes(bridge: Path, tmp_path: Path) -> None:
    """They stand where the arguments of Megatron-LM would have them."""
    folder = bridge / "iter_0000003"
    assert arguments_of(str(folder)) == {
        "num_query_groups": 2,
        "gated_linear_unit": True,
        "swiglu": True,
        "untie_embeddings_and_output_weights": False,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 1,
    }
    parameters = package.read(bridge).parameters
    assert parameters["embedding.word_embeddings.weight"].aliases == ("output_layer.weight",)
    (folder / "run_config.yaml").write_text(
        CONFIG.replace("  num_query_groups: 2", "  num_query_groups: 1")
    )
    with pytest.raises(errors.UnsupportedCheckpoint, match="1 query group on 2 tensor ranks"):
        package.read(bridge)
    (folder / "run_config.yaml").write_text("[]")
    assert package.read(bridge).step == 3


def _nemo(folder: Path) -> Path:
    """One checkpoint of NeMo; without the prefix of its keys, which the engine's tests have."""
    shutil.copytree(ITEMS, folder / "weights")
    common = torch.load(folder / "weights" / "common.pt", weights_only=False)
    _without_arguments(folder / "weights", optimizer=[common["optimizer"]], global_step=3)
    (folder / "context" / "nemo_tokenizer").mkdir(parents=True)
    (folder / "context" / "nemo_tokenizer" / "vocab.json").write_text("{}")
    (folder / "context" / "model.yaml").write_text("model: 1\n")
    return folder


def test_nemos_directories(tmp_path: Path, zckpt: Callable[..., Any]) -> None:
    """A checkpoint, its folder of weights, and a run with one or two checkpoints."""
    run = tmp_path / "checkpoints"
    first = _nemo(run / "gpt--val_loss=1.00-step=2")
    for path in (first, first / "weights", run):
        assert package.read(path).step == 3
    target = tmp_path / "target"
    ended = zckpt("reshard", first, target)
    assert ended.code == 0, ended.err
    assert "AutoResume" in ended.out
    names = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert {"context/model.yaml", "context/nemo_tokenizer/vocab.json", "weights/.metadata"} < names
    assert not any(name.startswith(("iter_", "latest_")) for name in names)
    optimizer = torch.load(target / "weights" / "common.pt", weights_only=False)["optimizer"]
    assert isinstance(optimizer, list)
    assert len(optimizer) == 1
    assert len(optimizer[0]["optimizer"]["param_groups"]) == 2
    assert package.verify(target, first)["equal"]
    _nemo(run / "gpt--val_loss=1.00-step=3-last")
    ended = zckpt("inspect", run)
    assert ended.code == 1
    assert "step=2" in ended.err
    assert package.read(run, tag="gpt--val_loss=1.00-step=3-last").step == 3


def test_states_of_single_ranks_are_left_out(tmp_path: Path) -> None:
    """A state of the machine that repeats steps has items for one size of the world alone."""
    folder = tmp_path / "iter_0000003"
    shutil.copytree(ITEMS, folder)
    common = torch.load(folder / "common.pt", weights_only=False)
    torch.save({**common, "rerun_state_machine": {"mode": 1}}, folder / "common.pt")
    report = package.reshard(folder, tmp_path / "target")
    assert any("rerun_state_machine" in line for line in texts(report["left_out"]))
    written = package.read(tmp_path / "target").state["megatron"]["common"]
    assert "rerun_state_machine" not in written
    assert written["iteration"] == 3


def test_like_a_run_of_another_program(
    bridge: Path, tmp_path: Path, zckpt: Callable[..., Any]
) -> None:
    """Bridge's configuration arrives, and not its counters; NeMo's counters cannot be written."""
    source = tmp_path / "source"
    package.convert(ITEMS, source, to="dcp")
    ended = zckpt("convert", source, tmp_path / "target", "--to", "megatron", "--like", bridge)
    written = tmp_path / "target" / "iter_0000003"
    assert (written / "run_config.yaml").is_file()
    assert not (written / "train_state.pt").exists()
    assert not (tmp_path / "target" / "latest_train_state.pt").exists()
    assert "checkpoint.load_rng=false" in ended.out
    nemo = _nemo(tmp_path / "nemo")
    with pytest.raises(errors.UnsupportedCheckpoint, match="is a NeMo checkpoint"):
        package.convert(source, tmp_path / "other", to="megatron", like=str(nemo))
