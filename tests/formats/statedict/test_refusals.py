"""What is refused is refused in every container: refusals crossed with containers of real FSDP1."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import zckpt
from zckpt.dcp import StorageReader
from zckpt.errors import UnsupportedCheckpoint

from ...conftest import Once
from ...engines import slices

BOTH = ("ranks", "kinds", "dcp", "accelerate", "lightning", "hf")
WEIGHTS = ("safetensors", "lightning_file", "whole_file")
REFUSALS = {
    "flat_weights": ("LOCAL_STATE_DICT", (*BOTH, *WEIGHTS)),
    "flat_states": ("has states of FSDP1's flat parameters", BOTH),
}
CASES = [
    (name, container, said)
    for name, (said, containers) in REFUSALS.items()
    for container in containers
]


@pytest.fixture(scope="module")
def fsdp1(once: Once) -> Path:
    return once("slices", "fsdp1", partial(slices.saved, "fsdp1", 2))


@pytest.mark.parametrize(("name", "container", "said"), CASES)
def test_every_container_is_refused(
    name: str, container: str, said: str, fsdp1: Path, tmp_path: Path
) -> None:
    run = fsdp1 / name / container
    for nameless in (False, True):
        with pytest.raises(UnsupportedCheckpoint, match=said):
            zckpt.read(run, nameless=nameless)
    with pytest.raises(UnsupportedCheckpoint, match=said):
        zckpt.verify(run)
    if name == "flat_states":  # the weights are whole
        zckpt.convert(run, tmp_path / "weights", weights_only=True)
        assert zckpt.read(tmp_path / "weights").parameters["0.weight"].shape == (10, 6)
        return
    with pytest.raises(UnsupportedCheckpoint, match=said):
        zckpt.convert(run, tmp_path / "weights", weights_only=True)
    with pytest.raises(UnsupportedCheckpoint, match=said):
        StorageReader(run)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("container", ["dcp", "lightning"])
def test_torchs_own_directory_loads_only_weights(container: str, fsdp1: Path) -> None:
    run = fsdp1 / "flat_states" / container
    model = "model" if container == "dcp" else "state_dict"
    weights = {model: {"0.weight": torch.zeros(10, 6)}}
    dcp.load(weights, storage_reader=StorageReader(run))
    assert weights[model]["0.weight"].any()
    optimizer = "optim" if container == "dcp" else "optimizer_0"
    stored = StorageReader(run).read_metadata().state_dict_metadata
    size = stored[f"{optimizer}.state.0.exp_avg"].size
    state = {"state": {0: {"exp_avg": torch.zeros(size)}}}
    for keys in ({optimizer: state}, {**weights, optimizer: state}):
        with pytest.raises(CheckpointException, match="has states of FSDP1's flat parameters"):
            dcp.load(keys, storage_reader=StorageReader(run))


@pytest.mark.parametrize("container", [name for name in BOTH if name != "hf"])
def test_the_same_container_is_read(container: str, fsdp1: Path) -> None:
    shapes = {
        name: p.shape for name, p in zckpt.read(fsdp1 / "sound" / container).parameters.items()
    }
    assert shapes == {"0.weight": (10, 6), "0.bias": (10,), "1.weight": (3, 10), "1.bias": (3,)}
