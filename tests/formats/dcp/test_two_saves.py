"""Files of two saves in one directory, and runs that look like it and are whole."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import zckpt as package
from zckpt import errors

from ...conftest import Result
from ...engines import torch_engine
from ...engines.torch_cases import CASES

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

Run = Callable[..., Result]
FILES = ("__0_0.distcp", "__0_1.distcp")
LATE = ("0.weight", "0.bias")  # are frozen until the last update
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
Change = Callable[[dict[str, Any]], Any]


def train(updates: int, late: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(updates)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    for update in range(updates):
        optimizer.zero_grad()
        model(torch.randn(3, 8)).square().mean().backward()
        for name, parameter in model.named_parameters():
            if late and name in LATE and update < updates - 1:
                parameter.grad = None
        optimizer.step()
    return model, optimizer


def save(
    folder: Path,
    updates: int,
    *,
    late: bool = False,
    options: StateDictOptions | None = None,
    change: Change = lambda state: None,
    **writer: Any,
) -> Path:
    """Two files, as two ranks write them: both have steps."""
    model, optim = get_state_dict(*train(updates, late), options=options)
    state: dict[str, Any] = {"model": model, "optim": optim}
    change(state)
    options_ = {"thread_count": 2, **writer}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, **options_))
    return folder


def exchanged(folder: Path, other: Path, name: str) -> Path:
    shutil.copy(other / name, folder / name)
    return folder


def counts_in_numbers(state: dict[str, Any]) -> None:
    """As many optimizers of users do; such steps are items that are no tensors."""
    for each in state["optim"]["state"].values():
        each["step"] = int(each["step"])


def counts_in_groups(state: dict[str, Any]) -> None:
    """As Apex does. Every parameter is in a group of its own."""
    states, (group,) = state["optim"]["state"], state["optim"]["param_groups"]
    step = int(next(iter(states.values()))["step"])
    groups = [{**group, "step": step, "params": [name]} for name in group["params"]]
    for each in states.values():
        del each["step"]
    state["optim"]["param_groups"] = groups


FORMS: dict[str, dict[str, Any]] = {
    "nested": {},
    "flat": {"options": FLAT},
    "numbers": {"change": counts_in_numbers},
    "groups": {"change": counts_in_groups},
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("form", FORMS)
def test_a_file_of_another_save(form: str, name: str, tmp_path: Path, zckpt: Run) -> None:
    run, older = (save(tmp_path / str(n), n, **FORMS[form]) for n in (6, 5))
    assert zckpt("verify", run).code == 0
    exchanged(run, older, name)
    words = {*FILES, "5", "6", "--step-policy keep"}
    converted = zckpt("convert", run, tmp_path / "out")
    assert converted.code == 1
    assert [word for word in words if word not in converted.err] == []
    assert not (tmp_path / "out").exists()
    verified = zckpt("verify", run)
    assert verified.code == 3
    assert [word for word in words if word not in verified.out] == []


def test_keep_goes_on(tmp_path: Path, zckpt: Run) -> None:
    run = exchanged(save(tmp_path / "run", 6), save(tmp_path / "older", 5), FILES[0])
    assert zckpt("convert", run, tmp_path / "out", "--step-policy", "keep").code == 0
    parameters = json.loads((tmp_path / "out" / "manifest.json").read_text())["parameters"]
    assert {item["step"] for item in parameters.values()} == {5, 6}
    assert zckpt("verify", run, "--step-policy", "keep").code == 0
    both = "verify", tmp_path / "out", "--against", run
    assert zckpt(*both).code == 3
    assert zckpt(*both, "--step-policy", "keep").code == 0


# -- whole checkpoints whose parameters have several steps


def steps_of(path: Path) -> set[float | int | None]:
    return {parameter.step for parameter in package.read(path).parameters.values()}


@pytest.mark.parametrize("writer", [{}, {"single_file_per_rank": False}], ids=["ranks", "items"])
def test_layers_that_were_unfrozen_late(writer: dict[str, Any], tmp_path: Path) -> None:
    """A file of one item cannot say that its steps agree."""
    run = save(tmp_path / "run", 6, late=True, **writer)
    assert steps_of(run) == {1, 6}
    assert package.verify(run)["equal"]


def test_a_program_s_own_step(tmp_path: Path) -> None:
    """It counts something else, and shows nothing."""

    def change(state: dict[str, Any]) -> None:
        state["step"] = 1000
        state["sampler"] = {"state": {"step": torch.tensor(1000)}}

    run, older = (save(tmp_path / str(n), n, change=change) for n in (6, 5))
    assert steps_of(run) == {6}
    for name in FILES:
        mixed = exchanged(Path(shutil.copytree(run, tmp_path / f"mixed{name}")), older, name)
        with pytest.raises(errors.InconsistentCheckpoint):
            package.read(mixed)


def test_what_zckpt_writes(tmp_path: Path) -> None:
    """However many files it writes, one of them has all steps."""
    package.convert(save(tmp_path / "run", 6, late=True), tmp_path / "universal")
    words = {"to": "dcp", "dp": 1}
    package.convert(tmp_path / "universal", tmp_path / "out", max_file_size=10_000, **words)
    assert len(list((tmp_path / "out").glob("*.distcp"))) > 1
    assert package.verify(tmp_path / "universal", tmp_path / "out")["equal"]
    package.convert(tmp_path / "universal", tmp_path / "tiny", max_file_size=2100, **words)
    with pytest.raises(errors.InconsistentCheckpoint):
        package.read(tmp_path / "tiny")


# -- FSDP2


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Trains with FSDP2 on two ranks with two files each; both files of rank 1 have steps."""

    def train(**changes: Any) -> Path:
        case = dataclasses.replace(CASES["fsdp2_threads"], **changes)
        return torch_engine.train(case, 2, tmp_path_factory.mktemp("fsdp2"), losses=0)

    return train


@pytest.mark.engines
def test_files_of_fsdp2(engine: Callable[..., Path], tmp_path: Path) -> None:
    run, older, late = engine(steps=4), engine(steps=3), engine(steps=4, late="trunk")
    assert steps_of(run) - {None} == {4}
    assert steps_of(late) - {None} == {1, 4}
    assert package.verify(late)["equal"]
    refused = set()
    for name in sorted(path.name for path in run.glob("*.distcp")):
        mixed = exchanged(Path(shutil.copytree(run, tmp_path / name)), older, name)
        report = package.verify(mixed)
        if not report["equal"]:
            refused.add(name)
            (problem,) = report["problems"]
            assert f"3 ({name})" in problem["message"]
    assert refused == {"__1_0.distcp", "__1_1.distcp"}  # the others state no step


# -- ranks that save without collectives have copies of all steps


def with_a_second_rank(run: Path, other: Path) -> Path:
    """A save of rank 0 alone, and beside it what rank 1 wrote of the same values in `other`."""
    for name in FILES:
        shutil.copy(other / name, run / name.replace("__0", "__1"))
    metadata = pickle.loads((other / "__0.metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = place.relative_path.replace("__0", "__1")
    (run / "__1.metadata").write_bytes(pickle.dumps(metadata))
    return run


def save_alone(folder: Path, updates: int) -> Path:
    model, optim = get_state_dict(*train(updates, late=True))
    writer = dcp.FileSystemWriter(folder, thread_count=2)
    dcp.save({"model": model, "optim": optim}, storage_writer=writer, use_collectives=False)
    return folder


def test_copies_of_steps(tmp_path: Path) -> None:
    run, same, older = (
        save_alone(tmp_path / name, n) for name, n in (("a", 6), ("b", 6), ("c", 5))
    )
    assert steps_of(with_a_second_rank(run, same)) == {1, 6}
    for policy in (None, "keep"):
        with pytest.raises(errors.InconsistentCheckpoint, match=r"5 .*__1_\d.*, 6 .*__0_\d"):
            package.read(with_a_second_rank(run, older), step_policy=policy)
    assert package.read(run, step_policy="max").step == 6
