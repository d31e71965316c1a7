"""What `convert` refuses, no function hands out: `load`, `StorageReader`, `stream`, `export`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict

import zckpt
import zckpt.dcp
from examples.make_checkpoint import Model
from zckpt import probe
from zckpt.errors import InconsistentCheckpoint
from zckpt.judging import contents

from .conftest import EXAMPLE
from .formats.test_masters import TRAINER, edit, swap_in_average

WEIGHT, MOMENT = "fc1.weight/master", "fc1.weight/exp_avg"


def load_in_torch(path: Path, **words: Any) -> dict[str, torch.Tensor]:
    """The state dict of `fc1` after a load; raises what zckpt has raised inside of torch."""
    state = {"fc1.weight": torch.zeros(Model().fc1.weight.shape)}
    try:
        dcp.load(state, storage_reader=zckpt.dcp.StorageReader(path, **words), no_dist=True)
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error
    return state


def load_a_weight(path: Path, **words: Any) -> object:
    return zckpt.load(path, WEIGHT, **words)


def load_a_moment(path: Path, **words: Any) -> object:
    return zckpt.load(path, MOMENT, **words)


def stream(path: Path, **words: Any) -> object:
    with probe.stream(Model(), path, **words):
        return True


DOORS = [load_a_weight, load_a_moment, load_in_torch, stream]
Door = Callable[..., object]


@pytest.fixture
def mixed(example: Path) -> Path:
    """DeepSpeed's model file beside the optimizer files of another run."""
    for path in example.rglob("*optim_states.pt"):
        edit(path, _train_otherwise)
    return example


def _train_otherwise(states: Any) -> None:
    for master in states["optimizer_state_dict"]["single_partition_of_fp32_groups"]:
        master.data.add_(1)


@pytest.mark.parametrize("door", DOORS)
def test_optimizer_files_of_another_run(door: Door, mixed: Path) -> None:
    with pytest.raises(InconsistentCheckpoint, match="are not the rounded masters") as refused:
        door(mixed)
    with pytest.raises(InconsistentCheckpoint) as of_convert:
        zckpt.convert(mixed, mixed.parent / "out")
    assert refused.value.message == of_convert.value.message
    with pytest.warns(UserWarning, match="are not the rounded masters"):
        door(mixed, accept_weights=True)


def test_export_refuses_them_too(tmp_path: Path) -> None:
    run = Path(shutil.copytree(TRAINER, tmp_path / "checkpoint-4"))
    swap_in_average(run)
    with pytest.raises(InconsistentCheckpoint, match="are not the rounded masters"):
        zckpt.export(run, tmp_path / "out")
    zckpt.export(run, tmp_path / "out", accept_weights=True)


@pytest.mark.parametrize("door", DOORS)
def test_a_sound_checkpoint_is_taken_without_a_word(
    door: Door, recwarn: pytest.WarningsRecorder
) -> None:
    door(EXAMPLE)
    assert not [
        line for line in recwarn if "torch.distributed is disabled" not in str(line.message)
    ]


# -- directories of torch's own, which StorageReader loads as they are


def save(path: Path, *steps: int, numbers: bool = False) -> None:
    """Folders `model` and `optim` in two files each, of a run at each of these steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(1, 1 + max(steps)):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        if step in steps:
            weights, states = get_state_dict(model, optimizer)
            optim = optimizer.state_dict() if numbers else states
            for name, state in (("model", weights), ("optim", optim)):
                writer = dcp.FileSystemWriter(path / str(step) / name, thread_count=2)
                dcp.save(state, storage_writer=writer, no_dist=True)


@pytest.fixture(params=[False, True], ids=["named", "numbered"])
def two_saves(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A directory of which one file of `optim` is of a later step."""
    save(tmp_path, 2, 4, numbers=request.param)
    shutil.copy(tmp_path / "4" / "optim" / "__0_1.distcp", tmp_path / "2" / "optim")
    return tmp_path / "2"


def load_weights(path: Path, **words: Any) -> None:
    state = {"0.weight": torch.zeros(8, 8)}
    try:
        dcp.load(state, storage_reader=zckpt.dcp.StorageReader(path, **words), no_dist=True)
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error
    assert state["0.weight"].any()


def test_a_file_of_another_step(two_saves: Path) -> None:
    with pytest.raises(InconsistentCheckpoint, match="different steps"):
        load_weights(two_saves)
    load_weights(two_saves, step_policy="keep")


def test_what_is_not_a_model_is_loaded_as_before(tmp_path: Path) -> None:
    """A directory of torch's own may hold anything: zckpt cannot read it, and loads its items."""
    dcp.save({"a": torch.ones(3), "b": {"c": 4}}, checkpoint_id=str(tmp_path / "any"), no_dist=True)
    state = {"a": torch.zeros(3)}
    reader = zckpt.dcp.StorageReader(tmp_path / "any")
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert state["a"].all()


# -- how often


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The checkpoints whose tensors were checked."""
    paths: list[str] = []
    check = contents.check_tensors

    def noted(manifest: zckpt.Manifest, *words: Any) -> list[str]:
        paths.append(manifest.root)
        return check(manifest, *words)

    monkeypatch.setattr(contents, "check_tensors", noted)
    return paths


def test_many_loads_ask_once(example: Path, asked: list[str]) -> None:
    for name in (WEIGHT, MOMENT, WEIGHT):
        zckpt.load(example, name)
    assert len(asked) == 1
    (path, *_) = example.rglob("*optim_states.pt")
    edit(path, lambda states: None)  # the file is another one
    zckpt.load(example, WEIGHT)
    assert len(asked) == 2


def test_of_many_ranks_the_coordinator_asks(example: Path, asked: list[str]) -> None:
    for is_coordinator in (False, True, False):
        reader = zckpt.dcp.StorageReader(example)
        reader.set_up_storage_reader(reader.read_metadata(), is_coordinator)
        plan = reader.prepare_local_plan(dcp.LoadPlan([]))
        if is_coordinator:
            assert not asked
            reader.prepare_global_plan([plan])
        reader.read_data(plan, dcp.DefaultLoadPlanner())
    assert len(asked) == 1


def test_a_program_without_a_plan_asks(mixed: Path) -> None:
    """torch's own tools may call `read_data` alone."""
    reader = zckpt.dcp.StorageReader(mixed)
    with pytest.raises(InconsistentCheckpoint):
        reader.read_data(dcp.LoadPlan([]), dcp.DefaultLoadPlanner())
