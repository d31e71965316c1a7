"""Actor folders of verl, written and loaded by its own FSDPCheckpointManager."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import zckpt
from zckpt.errors import UnsupportedCheckpoint, WrongOption

from ...conftest import Result
from ...engines import verl
from . import torch_ranks

Zckpt = Callable[..., Result]
WORLD = 2


def flat_folder(folder: Path) -> dict[str, torch.Tensor]:
    """An actor's folder of FSDP1; the weights in it."""
    weights = {"a.weight": torch.randn(6, 4), "a.bias": torch.randn(6), "b.weight": torch.randn(4)}
    folder.mkdir(parents=True)
    make = torch_ranks.sharded_tensors(WORLD)
    for rank in range(WORLD):
        with torch_ranks.as_rank(rank, WORLD):
            model = {name: make(rank, weight) for name, weight in weights.items()}
            rest = f"world_size_{WORLD}_rank_{rank}.pt"
            torch.save(model, folder / f"model_{rest}")
        flat = torch.nn.Parameter(torch.randn(17))
        optimizer = torch.optim.AdamW([flat])
        flat.sum().backward()
        optimizer.step()
        torch.save(optimizer.state_dict(), folder / f"optim_{rest}")
        torch.save({"lr_scheduler": None, "rng": rank}, folder / f"extra_state_{rest}")
    return weights


def test_flat_parameters_are_named_as_the_reason(tmp_path: Path, zckpt: Zckpt) -> None:
    folder = tmp_path / "actor"
    flat_folder(folder)
    (tmp_path / "names").write_text("a.weight\na.bias\nb.weight")
    for words in (("inspect",), ("verify",), ("verify", "--param-names", tmp_path / "names")):
        printed = zckpt(words[0], folder, *words[1:])
        assert printed.code != 0
        assert "has states of FSDP1's flat parameters, sharded over the ranks" in printed.err
        assert f"zckpt convert {folder} DST --weights-only" in printed.err
        assert "--param-names names.txt" not in printed.err


def test_the_weights_beside_flat_parameters_are_converted(tmp_path: Path) -> None:
    weights = flat_folder(tmp_path / "actor")
    zckpt.convert(tmp_path / "actor", tmp_path / "out", to="gathered", weights_only=True)
    converted: dict[str, Any] = torch.load(tmp_path / "out" / "model.pt")
    assert weights.keys() == converted.keys()
    assert all(torch.equal(converted[name], weight) for name, weight in weights.items())


def rows_folder(folder: Path, make: torch_ranks.Make) -> torch.nn.Module:
    """An actor's folder of FSDP2; the whole module."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5))
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    module(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    cut = {name for name, _ in module.named_parameters()}
    folder.mkdir(parents=True)
    (folder / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 2}')
    for rank in range(WORLD):
        with torch_ranks.as_rank(rank, WORLD):
            rest = f"world_size_{WORLD}_rank_{rank}.pt"
            state = {n: make(rank, t) if n in cut else t for n, t in module.state_dict().items()}
            torch.save(state, folder / f"model_{rest}")
            optim = optimizer.state_dict()
            optim["state"] = {
                number: {key: make(rank, t) if t.ndim else t for key, t in values.items()}
                for number, values in optim["state"].items()
            }
            torch.save(optim, folder / f"optim_{rest}")
            extra = {"lr_scheduler": {"last_epoch": 1}, "rng": {"cpu": torch.get_rng_state()}}
            torch.save(extra, folder / f"extra_state_{rest}")
    return module


def test_files_of_ranks_are_written_for_other_ranks(tmp_path: Path) -> None:
    """More ranks than rows, too; torch itself loads the files, with the mesh of each rank."""
    module = rows_folder(tmp_path / "actor", torch_ranks.dtensors([WORLD], [0]))
    expected = dict(module.named_parameters())
    first = tmp_path / "actor" / "extra_state_world_size_2_rank_0.pt"
    random = torch.load(first)["rng"]["cpu"]
    for ranks in (1, 3, 7):
        target = tmp_path / f"actor{ranks}"
        zckpt.reshard(tmp_path / "actor", target, dp=ranks)
        assert json.loads((target / "fsdp_config.json").read_text())["world_size"] == ranks
        assert zckpt.verify(target, against=tmp_path / "actor")["equal"]
        for rank in range(ranks):
            rest = f"world_size_{ranks}_rank_{rank}.pt"
            with torch_ranks.as_rank(rank, ranks):
                state = torch.load(target / f"model_{rest}", weights_only=False)
                mesh = init_device_mesh("cpu", (ranks,))
                for name, whole in expected.items():
                    local = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
                    assert state[name].device_mesh == mesh
                    assert state[name]._spec == local._spec
                    assert torch.equal(state[name].to_local(), local.to_local())
                for name, buffer in module.named_buffers():
                    assert torch.equal(state[name], buffer)
            extra = torch.load(target / f"extra_state_{rest}")
            assert extra["lr_scheduler"] == {"last_epoch": 1}
            assert torch.equal(extra["rng"]["cpu"], random)
    with pytest.raises(WrongOption, match="--dp does not apply to --dialect safetensors"):
        zckpt.reshard(tmp_path / "actor", tmp_path / "out", dp=3, dialect="safetensors")
    zckpt.reshard(tmp_path / "actor7", tmp_path / "again", dp=WORLD)
    assert zckpt.verify(tmp_path / "again", against=tmp_path / "actor")["equal"]


@pytest.mark.parametrize(
    "make", [torch_ranks.dtensors([1, 2], [None, 0]), torch_ranks.dtensors([WORLD], [1])]
)
def test_other_cuts_are_not_written_for_other_ranks(
    make: torch_ranks.Make, tmp_path: Path, zckpt: Zckpt
) -> None:
    rows_folder(tmp_path / "actor", lambda rank, whole: make(rank, whole.view(len(whole), -1)))
    refused = zckpt("reshard", tmp_path / "actor", tmp_path / "out", "--dp", "3")
    assert refused.code == 2
    assert "--dp does not apply" in refused.err
    assert "leave out --dp" in refused.err
    assert zckpt("reshard", tmp_path / "actor", tmp_path / "out").code == 0


@pytest.mark.engines
def test_flat_parameters_of_verl(tmp_path: Path) -> None:
    verl.run(1, WORLD, tmp_path)
    with pytest.raises(UnsupportedCheckpoint, match="FSDP1's flat parameters"):
        zckpt.read(tmp_path / "actor")
    report = zckpt.convert(tmp_path / "actor", tmp_path / "out", to="gathered", weights_only=True)
    assert report["tensors"] == 21


@pytest.mark.engines
def test_verl_goes_on_at_other_numbers_of_ranks(tmp_path: Path) -> None:
    """From the numbered folder that it looks for: it reads the number behind the last _."""
    run, name = tmp_path / "run", f"global_step_{verl.SAVED_AT}"
    losses = verl.run(2, WORLD, run / name)
    torch.save({"_num_yielded": verl.SAVED_AT}, run / name / "data.pt")  # of its dataloader
    for ranks in (1, 2, 3):
        path = zckpt.auto_resume(run, dp=ranks)
        assert path is not None
        assert Path(path).name == name
        assert (path == str(run / name)) == (ranks == WORLD)
        report = zckpt.verify(path, against=run / name)
        assert all("extra_state.rng." in line["key"] for line in report["states"])  # of rank 1
        assert report["equal"] or (ranks == WORLD and not report["differences"])
        assert (Path(path) / "data.pt").read_bytes() == (run / name / "data.pt").read_bytes()
        resumed = verl.run(2, ranks, tmp_path / f"on{ranks}", Path(path) / "actor")
        assert resumed == pytest.approx(losses[verl.SAVED_AT :], abs=1e-5)
