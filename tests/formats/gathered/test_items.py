"""Ranks' items as torch_checkpointing 0.1.1 saved them, and what else has such names."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import zckpt
from zckpt import errors

from ... import faults
from ...conftest import ROOT, Result, needs, texts
from ..contract import FormatContract
from .test_read import assert_holds
from .torch_ranks import as_rank, dtensors, save

DATA = ROOT / "tests" / "data" / "torch_checkpointing-0.1.1-w2"
Zckpt = Callable[..., Result]


@pytest.fixture
def items(tmp_path: Path) -> Path:
    """FSDP2 on two ranks: model, optimizer, scheduler, and items without a tensor."""
    return Path(shutil.copytree(DATA / "items", tmp_path / "items"))


@pytest.fixture
def slices(tmp_path: Path) -> Path:
    """A model of two ranks in safetensors, with `metadata.pkl`."""
    return Path(shutil.copytree(DATA / "slices", tmp_path / "slices"))


class TestItems(FormatContract):
    format = "gathered"

    @pytest.fixture
    def checkpoint(self, items: Path) -> Path:
        return items


def test_parts_are_joined(items: Path, tmp_path: Path) -> None:
    report = zckpt.convert(items, tmp_path / "universal")
    assert_holds(tmp_path / "universal", torch.load(DATA / "oracle.pt", weights_only=False))
    assert texts(report["left_out"]) == [
        "dataloader.rank: the values differ between ranks; rank 0's are used",
        "metadata.pkl: the offsets of the source's shards",
    ]
    for words in ({}, {"against": tmp_path / "universal"}):
        assert zckpt.verify(items, **words)["equal"]
    assert zckpt.verify(items, against=tmp_path / "universal", gather=True)["equal"]


def test_targets(items: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    zckpt.convert(items, tmp_path / "dcp", to="dcp", dp=3)
    zckpt.reshard(items, tmp_path / "whole")
    zckpt.export(items, tmp_path / "hf", config=tmp_path)
    for target in ("dcp", "whole"):
        assert zckpt.verify(tmp_path / target, against=items)["equal"]
        assert not (tmp_path / target / "metadata.pkl").exists()
    oracle = torch.load(DATA / "oracle.pt", weights_only=False)
    model = torch.load(tmp_path / "whole" / "model.pt")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    for name in ("trunk.0.weight", "temperature"):
        assert torch.equal(model[name], oracle["tensors"][f"{name}/param"])
        assert torch.equal(weights[name], oracle["tensors"][f"{name}/param"])


def test_a_file_stands_for_all_of_its_item(items: Path) -> None:
    manifest = zckpt.read(items / "model_1.pt")
    assert sorted(map(Path, manifest.files.paths)) == [items / "model_0.pt", items / "model_1.pt"]
    assert manifest.groups is None
    with pytest.raises(errors.MissingData, match="but not of a model") as raised:
        zckpt.read(items / "optimizer_1.pt")
    assert raised.value.hint == f"give {items}, which has the model and the optimizer"
    with pytest.raises(errors.NotACheckpoint) as other:
        zckpt.read(items / "epoch_0.pt")
    assert str(items) in other.value.hint


@pytest.mark.parametrize("item", ["model", "optimizer"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_rank(item: str, rank: int, items: Path) -> None:
    (items / f"{item}_{rank}.pt").unlink()
    for path in (items, items / f"{item}_{1 - rank}.pt"):
        with pytest.raises(errors.IncompleteCheckpoint, match=rf"lacks {item}_{rank}\.pt"):
            zckpt.read(path)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_may_save_no_file_of_an_item_that_is_not_distributed(rank: int, items: Path) -> None:
    for item in ("dataloader", "lr_scheduler"):
        (items / f"{item}_{rank}.pt").unlink()
    assert zckpt.read(items).state["lr_scheduler"]["last_epoch"] == 3


@pytest.mark.parametrize("item", ["model", "optimizer"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_that_was_copied_over_another(
    item: str, rank: int, items: Path, zckpt: Zckpt
) -> None:
    shutil.copy(items / f"{item}_{rank}.pt", items / f"{item}_{1 - rank}.pt")
    for words in (("verify", items), ("convert", items, items.parent / "target")):
        ended = zckpt(*words)
        said = (
            f"{item}_{1 - rank}.pt is named as the file of rank {1 - rank}, but was written by "
            f"rank {rank} of 2"
        )
        assert said in ended.out + ended.err
        assert ended.code == (3 if words[0] == "verify" else 1)


@pytest.mark.parametrize("states_rank", [True, False])
def test_rank_files_that_were_swapped(
    states_rank: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older torch states no rank, but a coordinate in the mesh."""
    if not states_rank:
        whole = DeviceMesh.__getstate__

        def older(mesh: DeviceMesh) -> dict[str, Any]:
            return {key: value for key, value in whole(mesh).items() if key != "_rank"}

        monkeypatch.setattr(DeviceMesh, "__getstate__", older)
    model = {"fc.weight": torch.arange(24.0).reshape(8, 3)}
    folder = save(tmp_path / "run", 4, model, dtensors((2, 2), (0, None)))
    assert zckpt.read(folder).step == 5
    faults.swap_files(*(folder / f"model_world_size_4_rank_{rank}.pt" for rank in (1, 2)))
    with pytest.raises(errors.InconsistentCheckpoint, match="was written by rank 2 of 4"):
        zckpt.read(folder)


def test_a_damaged_file(items: Path) -> None:
    path = items / "model_0.pt"
    path.write_bytes(path.read_bytes()[:200])
    for each in (items, items / "model_1.pt"):
        with pytest.raises(errors.CorruptCheckpoint, match=r"model_0\.pt"):
            zckpt.read(each)


def test_other_numbered_files_are_the_programs_own(items: Path) -> None:
    torch.save({"fc.weight": torch.ones(3)}, items / "snapshot_17.pt")
    (items / "notes_0.pt").write_text("not of torch.save")
    manifest = zckpt.read(items)
    assert len(manifest.files.paths) == 12
    assert {each.name for each in manifest.files.siblings} == {"snapshot_17.pt", "notes_0.pt"}


def test_whole_files_beside_them(items: Path, tmp_path: Path) -> None:
    """A consolidated model is not read twice; a whole model with its optimizer is enough."""
    zckpt.convert(items, tmp_path / "whole", to="gathered")
    consolidated = items / "model.safetensors"
    save_file({"other.weight": torch.ones(3)}, consolidated)
    assert "other.weight" not in zckpt.read(items).parameters
    for name in ("model.pt", "optim.pt"):
        shutil.copy(tmp_path / "whole" / name, items)
    files = [Path(file).name for file in zckpt.read(items).files.paths]
    assert files == ["model.pt", "optim.pt"]


def test_plain_files_stay_alternatives(tmp_path: Path) -> None:
    for epoch in range(2):
        torch.save({"fc.weight": torch.ones(3) * epoch}, tmp_path / f"model_{epoch}.pt")
    with pytest.raises(errors.AmbiguousCheckpoint, match=r"2 checkpoints .*model_0\.pt, model_1"):
        zckpt.read(tmp_path)
    assert zckpt.read(tmp_path, tag="model_1.pt").files.paths == (str(tmp_path / "model_1.pt"),)
    assert zckpt.read(tmp_path / "model_0.pt").files.paths == (str(tmp_path / "model_0.pt"),)


def test_one_rank(tmp_path: Path) -> None:
    model = {"fc.weight": torch.arange(12.0).reshape(4, 3)}
    folder = save(tmp_path / "run", 1, model, dtensors((1,), (0,)))
    for kind in ("model", "optim"):
        (folder / f"{kind}_world_size_1_rank_0.pt").rename(folder / f"{kind}_0.pt")
    assert zckpt.read(folder).step == 5


@pytest.mark.parametrize("layout", ["nested", "flat"])
def test_stages_of_a_pipeline(layout: str, tmp_path: Path) -> None:
    """Each rank has the names of its stage alone, in the groups too."""
    run, target = tmp_path / "run", tmp_path / "universal"
    run.mkdir()
    of_stage = {0: {"a.weight": torch.arange(20.0).reshape(5, 4)}, 1: {"b.weight": torch.eye(6)}}
    for rank in range(4):
        with as_rank(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"]

            def part(whole: torch.Tensor, mesh: Any = mesh, place: int = rank % 2) -> DTensor:
                own, sizes = whole.chunk(2)[place].clone(), whole.stride()
                placed = {"run_check": False, "shape": whole.shape, "stride": sizes}
                return DTensor.from_local(own, mesh, [Shard(0)], **placed)

            weights = of_stage[rank // 2]
            states = {
                name: {"exp_avg": part(weight + 1), "step": torch.tensor(3.0)}
                for name, weight in weights.items()
            }
            optimizer: dict[str, Any] = {
                "state": states,
                "param_groups": [{"lr": 0.1, "params": list(weights)}],
            }
            if layout == "flat":
                optimizer = {f"param_groups.{name}.lr": 0.1 for name in weights}
                for name, state in states.items():
                    optimizer |= {f"state.{name}.{key}": value for key, value in state.items()}
            torch.save({n: part(weight) for n, weight in weights.items()}, run / f"model_{rank}.pt")
            torch.save(optimizer, run / f"optimizer_{rank}.pt")
    manifest = zckpt.read(run)
    assert all(each.trainable for each in manifest.parameters.values())
    for name, whole in {**of_stage[0], **of_stage[1]}.items():
        assert torch.equal(zckpt.load(run, f"{name}/exp_avg"), whole + 1)
    zckpt.convert(run, target)
    assert zckpt.verify(run, against=target, gather=True)["equal"]


def test_groups_that_name_their_parameters(tmp_path: Path) -> None:
    """What torch_checkpointing's `optimizer_transform_pre` makes of an optimizer's state."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW([{"params": [each]} for each in model.named_parameters()])
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    names = [name for name, _ in model.named_parameters()]
    for group in state["param_groups"]:
        del group["params"]
    state["state"] = dict(zip(names, state["state"].values(), strict=True))
    state["_optimizer_state_format_version"] = 1
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "run.pt")
    manifest = zckpt.read(tmp_path / "run.pt")
    assert (manifest.step, manifest.optimizer) == (1, "AdamW")
    assert [each.group for each in manifest.parameters.values()] == [0, 1]
    assert manifest.groups is not None
    assert all("param_names" not in group for group in manifest.groups)
    zckpt.convert(tmp_path / "run.pt", tmp_path / "universal")
    against = tmp_path / "universal"
    assert zckpt.verify(tmp_path / "run.pt", against=against, gather=True)["equal"]


# -- slices in safetensors

SAID = "seem to be slices of one model on 2 ranks"


@pytest.mark.parametrize("name", [".", "model_0.safetensors", "model_1.safetensors"])
def test_slices_are_shown_and_not_used(name: str, slices: Path, zckpt: Zckpt) -> None:
    path, target = slices / name if name != "." else slices, slices.parent / "target"
    shown = zckpt("inspect", path, "--json")
    assert shown.code == 0
    assert not shown.document["complete"]
    assert SAID in shown.document["problems"][0]["message"]
    for option in ("--tensors=*", "--steps", "--layout", "--state"):
        assert SAID in zckpt("inspect", path, option).err
    universal = ROOT / "examples" / "run"
    for words in (
        ("verify", path),
        ("verify", universal, "--against", path),
        ("verify", path, "--gather", "--against", universal),
        ("convert", path, target),
        ("reshard", path, target),
        ("export", path, target),
        ("diff", path, universal),
        ("diff", universal, path),
        ("stats", path),
    ):
        ended = zckpt(*words)
        assert ended.code == 1, words
        assert SAID in ended.err
    assert not target.exists()
    assert "consolidate_hf_safetensors_checkpoint" in ended.err


@pytest.mark.parametrize("name", [".", "model_1.safetensors"])
def test_the_hint_reads_a_file_as_a_whole_model(name: str, slices: Path, zckpt: Zckpt) -> None:
    refused = zckpt("verify", slices / name if name != "." else slices)
    words = re.search(r"of one epoch, give (.*? --from gathered)", refused.err)
    assert words is not None
    for command in ("inspect", "verify", "stats"):
        ended = zckpt(command, *shlex.split(words[1]))
        assert ended.code == 0
        assert SAID not in ended.out + ended.err
    first, second = (slices / f"model_{number}.safetensors" for number in (0, 1))
    assert zckpt("diff", first, second, "--from", "gathered").code == 3
    assert zckpt("verify", first, "--against", first, "--from", "gathered").code == 0
    assert zckpt("verify", first, "--against", slices, "--from", "gathered").code == 1
    assert zckpt("convert", slices, slices.parent / "target", "--from", "gathered").code == 1
    tagged = ("--from", "gathered", "--tag", "model_0.safetensors")
    assert zckpt("convert", slices, slices.parent / "target", *tagged).code == 0


def changed(path: Path, change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    tensors = load_file(path)
    save_file(dict(change(tensors)), path)


@pytest.mark.parametrize(
    "what",
    [
        "equal bytes",
        "a number is missing",
        "no model_0",
        "another name",
        "one file",
        "leading zero",
    ],
)
def test_what_is_no_slice(what: str, slices: Path) -> None:
    first, second = slices / "model_0.safetensors", slices / "model_1.safetensors"
    if what == "equal bytes":
        shutil.copy(first, second)
    elif what == "a number is missing":
        second = second.rename(slices / "model_2.safetensors")
    elif what == "no model_0":  # Accelerate's second and third model
        first = first.rename(slices / "model_2.safetensors")
    elif what == "another name":
        changed(second, lambda tensors: {**tensors, "more": torch.ones(1)})
    elif what == "leading zero":
        first = first.rename(slices / "model_00.safetensors")
        second = second.rename(slices / "model_01.safetensors")
    else:
        second.unlink()
        second = slices
    for path in (first, second):
        assert zckpt.verify(path)["equal"]
    if second != slices:
        with pytest.raises(errors.NotACheckpoint) as raised:
            zckpt.read(slices)
        assert f"such as {min(first, second)}" in raised.value.hint


def test_a_damaged_slice_makes_no_whole_model_of_the_others(slices: Path) -> None:
    path = slices / "model_1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(errors.UnsupportedCheckpoint, match=SAID):
        zckpt.read(slices / "model_0.safetensors")


def test_accelerates_first_model_beside_others(slices: Path) -> None:
    """`model.safetensors` is whole, whatever lies beside it."""
    whole = {"fc.weight": torch.ones(3)}
    save_file(whole, slices / "model.safetensors")
    assert list(zckpt.read(slices).parameters) == ["fc.weight"]
    with pytest.raises(errors.UnsupportedCheckpoint, match=SAID):
        zckpt.read(slices / "model_0.safetensors")


def test_slices_of_a_model_beside_a_distributed_optimizer(items: Path) -> None:
    for rank in range(2):
        (items / f"model_{rank}.pt").unlink()
        shutil.copy(DATA / "slices" / f"model_{rank}.safetensors", items)
    with pytest.raises(errors.UnsupportedCheckpoint, match=SAID):
        zckpt.read(items)


def test_what_the_other_hint_writes_is_read(slices: Path) -> None:
    needs("torch_checkpointing")
    from torch_checkpointing.hf import consolidation
    from torch_checkpointing.storage import filesystem

    storage = filesystem.LocalFileSystemStorageConfig(use_direct_io=False)
    consolidation.consolidate_hf_safetensors_checkpoint(str(slices), storage_config=storage)
    manifest = zckpt.read(slices)
    oracle = torch.load(DATA / "oracle.pt", weights_only=False)
    for name in ("trunk.0.weight", "readout.weight"):
        assert manifest.entries[name, "param"].shape == oracle["tensors"][f"{name}/param"].shape
