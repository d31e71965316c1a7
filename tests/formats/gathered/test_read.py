"""Files of torch.save, whole and of ranks, as they are read."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zckpt
from zckpt import errors
from zckpt.core.checkpoint.manifest import Manifest

from ... import faults
from ...conftest import Result, texts
from ...engines import torch_engine, trainers
from ...engines.torch_cases import CASES
from ..contract import FormatContract
from ..equality import load, plain, same_bits
from . import torch_ranks
from .engine_cases import (
    FULL,
    RANKS,
    SHARDED,
    WHOLE,
    Trained,
    engines,
    names_of,
    oracle_of,
    source_of,
)
from .plain_torch import (
    save,
    trained_pair,
)

Zckpt = Callable[..., Result]


def assert_holds(universal: Path, oracle: Mapping[str, Any]) -> None:
    """Tensors, steps, aliases and groups, bit for bit."""
    tensors = {name: t for name, t in load(universal).items() if not name.endswith("/state")}
    buffers = {f"{name}/param": tensor for name, tensor in oracle["buffers"].items()}
    expected = {**oracle["tensors"], **buffers}
    assert sorted(tensors) == sorted(expected)
    assert [name for name in expected if not same_bits(tensors[name], expected[name])] == []
    manifest = json.loads((universal / "manifest.json").read_text())
    parameters = manifest["parameters"]
    assert {name for name, p in parameters.items() if p["trainable"]} == set(names_of(oracle))
    assert {name: parameters[name]["step"] for name in oracle["steps"]} == oracle["steps"]
    aliases = {alias: name for name, p in parameters.items() for alias in p["aliases"]}
    assert aliases == oracle["aliases"]
    for place, group in enumerate(oracle["groups"]):
        assert [n for n, p in parameters.items() if p["group"] == place] == group["params"]
        options = {key: plain(value) for key, value in group.items() if key != "params"}
        assert manifest["groups"][place] == options


@pytest.mark.parametrize(
    ("case", "world"),
    engines(
        *(*WHOLE, *FULL, *RANKS, *SHARDED),
        *("fsdp2_hsdp_local", "fsdp2_2d_local", "never_stepped_ddp"),
    ),
)
def test_reads_what_engines_save(
    case: str, world: int, torch_trained: Trained, tmp_path: Path
) -> None:
    trained = torch_trained(case, world)
    oracle = oracle_of(trained)
    source, target = source_of(trained), tmp_path / "universal"
    names = None if case in (*FULL, *SHARDED) else names_of(oracle)
    if names:  # the model has vectors that only their names tell apart
        with pytest.raises(errors.MissingData) as raised:
            zckpt.read(source)
        assert "--param-names" in raised.value.hint
    report = zckpt.convert(source, target, param_names=names)
    assert_holds(target, oracle)
    assert report["records"]["unchecked"] == 0


@pytest.mark.engines
@pytest.mark.parametrize("trainer", ["hf_trainer", "accelerate", "lightning"])
def test_reads_what_trainers_save(trainer: str, tmp_path: Path) -> None:
    """With FSDP2 and whole state dicts."""
    checkpoint = trainers.fsdp(f"{trainer}_fsdp_full", tmp_path / "trained", 2)
    oracle = oracle_of(tmp_path / "trained")
    manifest = zckpt.read(checkpoint)
    beside = {sibling.name for sibling in manifest.files.siblings}
    assert beside >= {"hf_trainer": {"trainer_state.json"}}.get(trainer, set())
    zckpt.convert(checkpoint, tmp_path / "universal")
    assert_holds(tmp_path / "universal", oracle)


@pytest.mark.engines
@pytest.mark.parametrize(
    ("case", "world", "said"),
    [
        ("fsdp1_local", 2, "LOCAL_STATE_DICT: .* is a flat parameter"),
        ("fsdp1_flat_local", 2, "LOCAL_STATE_DICT: .* is a flat parameter"),
    ],
)
def test_what_is_not_read_is_named(
    case: str, world: int, said: str, torch_trained: Trained
) -> None:
    with pytest.raises(errors.UnsupportedCheckpoint, match=said):
        zckpt.read(torch_trained(case, world) / "run")


def test_swapped_ranks_of_dtensors(tmp_path: Path) -> None:
    """A DTensor does not state its rank: the name under which its file was saved does."""
    model = {"w": torch.arange(32.0).reshape(8, 4)}
    run = torch_ranks.save(tmp_path / "run", 2, model, torch_ranks.dtensors((2,), [0]))
    whole = zckpt.load(run, "w/param")
    assert torch.equal(whole, model["w"])
    one, other = sorted(run.glob("model*"))
    faults.swap_files(one, other, renamed=False)
    with pytest.raises(errors.InconsistentCheckpoint, match=f"was saved as {other.name}"):
        zckpt.read(run)
    assert not zckpt.verify(run)["equal"]


@pytest.mark.engines
@pytest.mark.first
class TestRanks(FormatContract):
    """A copy of real FSDP1 ranks' files (ShardedTensor), whole and damaged."""

    format = "gathered"

    @pytest.fixture
    def checkpoint(self, tmp_path: Path, torch_trained: Trained) -> Path:
        trained = torch_trained("fsdp1_sharded_pt", 2)
        return Path(shutil.copytree(trained / "run", tmp_path / "run"))

    def file(self, checkpoint: Path, kind: str, rank: int) -> Path:
        return checkpoint / f"{kind}_world_size_2_rank_{rank}.pt"

    @pytest.mark.parametrize("kind", ["model", "optim"])
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_missing_rank(self, kind: str, rank: int, checkpoint: Path) -> None:
        self.file(checkpoint, kind, rank).unlink()
        path = self.file(checkpoint, kind, rank)
        with pytest.raises(errors.IncompleteCheckpoint, match=f"lacks {path.name}") as error:
            zckpt.read(checkpoint)
        assert error.value.paths == (str(path),)

    def test_any_file_stands_for_all_of_its_kind(self, checkpoint: Path) -> None:
        manifest = zckpt.read(self.file(checkpoint, "model", 1))
        assert manifest.groups is None
        assert len(manifest.files.paths) == 2

    @pytest.mark.parametrize(
        ("renamed", "said"),
        [(True, "was written by rank 1 of 2"), (False, r"was saved as model_world_size_2_rank_1")],
    )
    def test_swapped_ranks(self, renamed: bool, said: str, checkpoint: Path) -> None:
        a, b = self.file(checkpoint, "model", 0), self.file(checkpoint, "model", 1)
        faults.swap_files(a, b, renamed=renamed)
        with pytest.raises(errors.InconsistentCheckpoint, match=said):
            zckpt.read(checkpoint)

    def test_files_of_two_world_sizes(self, checkpoint: Path) -> None:
        shutil.copy(self.file(checkpoint, "model", 0), checkpoint / "model_world_size_4_rank_0.pt")
        with pytest.raises(errors.AmbiguousCheckpoint, match="several saves, by 2 and 4 ranks"):
            zckpt.read(checkpoint)

    def test_two_saves(self, checkpoint: Path, torch_trained: Trained, tmp_path: Path) -> None:
        later = dataclasses.replace(CASES["fsdp1_sharded_pt"], steps=4)
        torch_engine.train(later, 2, tmp_path / "later", losses=0)
        shutil.copy(tmp_path / "later" / "run" / self.file(checkpoint, "optim", 1).name, checkpoint)
        with pytest.raises(errors.InconsistentCheckpoint, match=r"step differs: 3 .*, 4 "):
            zckpt.read(checkpoint)

    @pytest.mark.parametrize("keep", [0, 100, -100])
    def test_a_short_file(self, keep: int, checkpoint: Path) -> None:
        path = self.file(checkpoint, "model", 1)
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(errors.CorruptCheckpoint, match=path.name):
            zckpt.read(checkpoint)

    def test_a_flipped_bit(self, checkpoint: Path, tmp_path: Path) -> None:
        manifest = zckpt.read(checkpoint)
        extent = manifest.entries["trunk.0.weight", "exp_avg"].fragments[1].extent
        data = bytearray(Path(extent.file).read_bytes())
        data[extent.offset] ^= 1
        Path(extent.file).write_bytes(data)
        with pytest.raises(errors.CorruptCheckpoint, match="rank_1"):
            zckpt.convert(checkpoint, tmp_path / "target")
        assert not (tmp_path / "target").exists()

    def test_random_states_are_left_out(self, manifest: Manifest) -> None:
        assert manifest.source["dp"] == 2
        assert all("rank 0's values are used" in line for line in texts(manifest.notices.omitted))


class TestFiles(FormatContract):
    """model.pt + optim.pt of plain torch."""

    format = "gathered"

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        return save(tmp_path / "run", trained_pair(named=True))


class TestOneFile(FormatContract):
    """Everything in one file of any name."""

    format = "gathered"

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        model, optimizer = trained_pair(named=True)
        states = {"epoch": 3, "net": model.state_dict(), "opt": optimizer.state_dict()}
        torch.save({**states, "best": [torch.tensor(0.5)]}, tmp_path / "run.best")
        return tmp_path / "run.best"

    def test_what_else_it_holds_is_kept(self, manifest: Manifest) -> None:
        assert manifest.state["client_state"]["epoch"] == 3
        assert manifest.state["client_state"]["best"][0].value == 0.5


# -- names


def test_names_from_a_file(tmp_path: Path, zckpt: Zckpt) -> None:
    """Two layers of one shape, of which the optimizer has one."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    optimizer = torch.optim.AdamW([model[1].weight])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save(tmp_path / "run", (model, optimizer))
    refused = zckpt("convert", tmp_path / "run", tmp_path / "u")
    assert refused.code == 1
    assert "several weights have the same shape" in refused.err
    (tmp_path / "names").write_text("1.weight\n")
    words = ("convert", tmp_path / "run", tmp_path / "u", "--param-names", tmp_path / "names")
    assert zckpt(*words).code == 0
    assert "1.weight/exp_avg" in load(tmp_path / "u")


class TestNamesOfNumbers:
    """Files whose optimizer does not say which weight is whose."""

    def saved(self, folder: Path, model: nn.Module, optim: dict[str, Any]) -> Path:
        folder.mkdir()
        torch.save(model.state_dict(), folder / "model.pt")
        torch.save(optim, folder / "optim.pt")
        return folder

    def stepped(self, model: nn.Module) -> dict[str, Any]:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained)
        for parameter in trained:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        return optimizer.state_dict()

    @pytest.mark.parametrize("first", ["student", "teacher"])
    @pytest.mark.parametrize("updates", [0, 1])
    def test_a_frozen_copy(self, first: str, updates: int, tmp_path: Path) -> None:
        """Which is trained, nothing tells: the first is not taken for it."""
        names = ["student", "teacher"] if first == "student" else ["teacher", "student"]
        model = nn.ModuleDict({name: nn.Linear(6, 6) for name in names})
        model["teacher"].load_state_dict(model["student"].state_dict())
        model["teacher"].requires_grad_(False)
        optimizer = torch.optim.AdamW(model["student"].parameters(), lr=0.0)
        for parameter in model["student"].parameters():
            parameter.grad = torch.randn_like(parameter) if updates else None
        optimizer.step()
        folder = self.saved(tmp_path / "run", model, optimizer.state_dict())
        with pytest.raises(errors.MissingData, match="ways"):
            zckpt.read(folder)
        manifest = zckpt.read(folder, param_names=["student.weight", "student.bias"])
        assert {name for name, parameter in manifest.parameters.items() if parameter.trainable} == {
            "student.weight",
            "student.bias",
        }
        if not updates:
            assert not any(parameter.aliases for parameter in manifest.parameters.values())

    def test_layers_that_begin_alike(self, tmp_path: Path) -> None:
        """nn.TransformerEncoder copies its layer."""
        layer = nn.Linear(4, 4)
        model = nn.Sequential(layer, nn.Linear(4, 4))
        model[1].load_state_dict(layer.state_dict())
        optimizer = torch.optim.AdamW(model.parameters())
        manifest = zckpt.read(self.saved(tmp_path / "run", model, optimizer.state_dict()))
        assert list(manifest.parameters) == ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert all(parameter.trainable for parameter in manifest.parameters.values())

    @pytest.mark.parametrize(
        "names",
        [
            ["1.weight", "1.bias", "0.weight", "0.bias"],  # of another order
            ["0.weight", "0.bias", "0.weight", "0.bias"],
        ],
    )
    def test_names_that_do_not_fit(self, names: list[str], tmp_path: Path) -> None:
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))
        optim = self.stepped(model)
        optim["param_groups"][0]["param_names"] = names
        with pytest.raises(errors.InconsistentCheckpoint, match="weight"):
            zckpt.read(self.saved(tmp_path / "run", model, optim))

    def test_names_with_a_wrappers_prefix(self, tmp_path: Path) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].requires_grad_(False)
        optim = self.stepped(model)
        trained = ["0.weight", "0.bias", "2.weight", "2.bias"]
        optim["param_groups"][0]["param_names"] = [f"module.{name}" for name in trained]
        manifest = zckpt.read(self.saved(tmp_path / "run", model, optim))
        assert [n for n, parameter in manifest.parameters.items() if parameter.trainable] == trained

    def test_a_parameter_in_two_groups(self, tmp_path: Path) -> None:
        model = nn.Linear(3, 5)
        optim = self.stepped(model)
        optim["param_groups"] *= 2
        with pytest.raises(errors.InconsistentCheckpoint, match="more than once"):
            zckpt.read(self.saved(tmp_path / "run", model, optim))

    def test_a_state_of_no_group(self, tmp_path: Path) -> None:
        model = nn.Linear(3, 5)
        optim = self.stepped(model)
        optim["state"][7] = {"exp_avg": torch.ones(3)}
        manifest = zckpt.read(self.saved(tmp_path / "run", model, optim))
        assert [item.key for item in manifest.states.of_form("unsupported")] == ["7"]


class TestStepsOfRanks:
    """Flattened state dicts, one file per rank."""

    def save(self, folder: Path, *ranks: dict[str, int]) -> Path:
        """Every rank has these parameters, at these steps."""
        folder.mkdir()
        for rank, steps in enumerate(ranks):
            optim: dict[str, Any] = {}
            for name, step in steps.items():
                state = {"step": torch.tensor(float(step)), "exp_avg": torch.ones(3)}
                optim |= {f"state.{name}.{key}": value for key, value in state.items()}
                optim[f"param_groups.{name}.lr"] = 0.1
            torch.save(optim, folder / f"optim_rank_{rank}.pt")
            model = {name: torch.ones(3) for name in steps}
            torch.save(model, folder / f"model_rank_{rank}.pt")
        return folder

    def test_copies_that_differ(self, tmp_path: Path) -> None:
        run = self.save(tmp_path / "run", {"a": 6, "b": 6}, {"a": 6, "b": 5})
        with pytest.raises(errors.InconsistentCheckpoint, match=r"5 .*rank_1.*, 6 .*rank_0"):
            zckpt.read(run)
        assert zckpt.read(run, step_policy="max").step == 6

    def test_parts_that_differ(self, tmp_path: Path) -> None:
        run = self.save(tmp_path / "run", {"a": 6, "b": 6}, {"c": 5})
        with pytest.raises(errors.InconsistentCheckpoint, match=r"5 .*rank_1.*, 6 .*rank_0"):
            zckpt.read(run)
        parameters = zckpt.read(run, step_policy="keep").parameters
        assert [item.step for item in parameters.values()] == [6, 6, 5]

    def test_parameters_that_were_unfrozen_late(self, tmp_path: Path) -> None:
        run = self.save(tmp_path / "run", {"a": 6, "b": 2}, {"c": 6})
        assert [item.step for item in zckpt.read(run).parameters.values()] == [6, 2, 6]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (3, "it has an int, not a dictionary of tensors"),
        ([torch.ones(2)], "it has a list, not a dictionary of tensors"),
        ({"a": 1}, "it has a dictionary without tensors"),
        (torch.ones(3), "it has one tensor, which has no name"),
    ],
    ids=["int", "list", "dict", "tensor"],
)
def test_what_a_file_without_state_dicts_has(value: Any, said: str, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "scaler.pt")
    with pytest.raises(errors.NotACheckpoint, match=said):
        zckpt.read(tmp_path / "scaler.pt")
