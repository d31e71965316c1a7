"""Files of two saves in one directory of Megatron-Core, by the steps that they state."""

from __future__ import annotations

import dataclasses
import io
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

import zckpt as package
from zckpt import errors

from ...conftest import ROOT

DATA = ROOT / "tests" / "data"
ITERATION = "iter_0000003"
GROUPS = "optimizer.distributed.dp_group_idx_1.optimizer/shard_0_1"
BEGIN = "optimizer.param_to_group_meta.module.module.module."
OF_RANK_3 = (
    "embedding.position_embeddings.weight.step",
    "decoder.layers.0.self_attention.linear_qkv.weight.step",
    "decoder.layers.0.mlp.linear_fc2.weight.step",
    "decoder.layers.0.input_layernorm.bias.step",
    "decoder.layers.0.pre_mlp_layernorm.bias.step",
    "decoder.final_layernorm.bias.step",
)
Change = Callable[[Any], Any]


def copied(kind: str, tmp_path: Path) -> Path:
    folder = tmp_path / "run" / ITERATION
    shutil.copytree(DATA / kind / ITERATION, folder)
    return folder


def restated(folder: Path, key: str, change: Change) -> str:
    """Writes an item again, in its own bytes; returns the name of its file."""
    places = FileSystemReader(folder).read_metadata().storage_data
    (place,) = [place for index, place in places.items() if index.fqn == key]
    path = folder / place.relative_path
    data, stop = bytearray(path.read_bytes()), place.offset + place.length
    value = torch.load(io.BytesIO(data[place.offset : stop]), weights_only=False)
    buffer = io.BytesIO()
    torch.save(change(value), buffer)
    assert len(buffer.getvalue()) == place.length
    data[place.offset : stop] = buffer.getvalue()
    path.write_bytes(data)
    return path.name


def refused(folder: Path, *words: str) -> None:
    """Convert names files and steps, and writes nothing; so does verify; a policy decides."""
    target = folder.parent.parent / "out"
    with pytest.raises(errors.InconsistentCheckpoint) as raised:
        package.convert(folder, target)
    assert [word for word in (*words, "3 (", "5 (") if word not in raised.value.message] == []
    assert not target.exists()
    (problem,) = package.verify(folder)["problems"]
    assert problem["message"] == raised.value.message
    with pytest.raises(errors.InconsistentCheckpoint):
        package.read(folder, step_policy="keep")
    assert package.read(folder, step_policy="max").step == 5


def later_groups(value: Any) -> Any:
    for group in value[0]["param_groups"]:
        group["step"] = 5
    return value


def test_flat_buffers(tmp_path: Path) -> None:
    folder = copied("megatron-0.16.1-buffers-tp2", tmp_path)
    assert restated(folder, GROUPS, later_groups) == "__1_0.distcp"
    refused(folder, "__0_0.distcp", "__1_0.distcp")


def test_groups_of_megatron_fsdp(tmp_path: Path) -> None:
    folder = copied("megatron-0.16.1-fsdp", tmp_path)
    files = {restated(folder, BEGIN + name, lambda _: 5) for name in OF_RANK_3}
    assert files == {"__3_0.distcp"}
    refused(folder, "__2_0.distcp", "__3_0.distcp")


def with_steps_in_states(folder: Path) -> None:
    """Torch's Adam keeps a step of every parameter: as if Megatron-FSDP had saved it."""
    metadata = FileSystemReader(folder).read_metadata()
    assert metadata.planner_data is not None

    def renamed(key: str) -> str:
        return key.replace(".param_to_group_meta.", ".state.") if key.endswith(".step") else key

    metadata.state_dict_metadata = {
        renamed(key): item for key, item in metadata.state_dict_metadata.items()
    }
    metadata.planner_data = {
        renamed(key): (path[0], "state", *path[2:]) if renamed(key) != key else path
        for key, path in metadata.planner_data.items()
    }
    metadata.storage_data = {
        dataclasses.replace(index, fqn=renamed(index.fqn)): place
        for index, place in metadata.storage_data.items()
    }
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_states_of_megatron_fsdp(tmp_path: Path) -> None:
    folder = copied("megatron-0.16.1-fsdp", tmp_path)
    with_steps_in_states(folder)
    assert package.read(folder).step == 3
    for name in OF_RANK_3:
        restated(folder, BEGIN.replace("param_to_group_meta", "state") + name, lambda _: 5)
    refused(folder, "__2_0.distcp", "__3_0.distcp")


def restate_folder(folder: Path, change: Change) -> None:
    path = folder / "mp_rank_01" / "model_optim_rng.pt"
    value = torch.load(path, weights_only=False)
    change(value)
    torch.save(value, path)


def test_folders_of_ranks(tmp_path: Path) -> None:
    folder = copied("megatron-0.16.1-legacy-tp2", tmp_path)

    def change(value: Any) -> None:
        for group in value["optimizer"]["optimizer"]["param_groups"]:
            group["step"] = 5

    restate_folder(folder, change)
    refused(folder, "mp_rank_00/", "mp_rank_01/")


def test_iterations_of_folders(tmp_path: Path) -> None:
    """They differ without an optimizer too."""
    folder = copied("megatron-0.16.1-legacy-tp2", tmp_path)
    assert package.read(folder, weights_only=True)
    restate_folder(folder, lambda value: value.update(iteration=5))
    with pytest.raises(errors.InconsistentCheckpoint, match=r"3 \(mp_rank_00.*, 5 \(mp_rank_01"):
        package.read(folder, weights_only=True)
