"""Directories of torch.distributed.checkpoint that zckpt writes: torch loads the same state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from msgspec.structs import replace
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import zckpt
from zckpt import errors
from zckpt.formats.dcp import write as dcp_writing
from zckpt.training.options import Options

from ...conftest import EXAMPLE, texts
from ..contract import FormatContract
from ..equality import assert_proven, same_bits
from .torch_dcp import alike, saved, whole


class TestWritten(FormatContract):
    """What zckpt wrote, of DeepSpeed's files."""

    format = "dcp"

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        zckpt.convert(EXAMPLE, tmp_path / "run", to="dcp", dp=3)
        return tmp_path / "run"


@pytest.mark.parametrize("dp", [1, 2, 3, 5])
@pytest.mark.parametrize("most", [8 << 30, 20_000])
def test_torch_reads_what_it_saved(checkpoint: Path, dp: int, most: int, tmp_path: Path) -> None:
    zckpt.reshard(checkpoint, tmp_path / "again", dp=dp, max_file_size=most)
    assert alike(whole(tmp_path / "again"), whole(checkpoint))
    assert_proven(checkpoint, tmp_path / "again")


def test_pieces_are_those_of_the_ranks(tmp_path: Path) -> None:
    rows = torch.arange(37 * 5000, dtype=torch.float32).view(37, 5000)
    dcp.save({"model": {"w": rows, "b": torch.ones(3)}}, checkpoint_id=tmp_path / "run")
    zckpt.reshard(tmp_path / "run", tmp_path / "again", dp=4)
    metadata = FileSystemReader(tmp_path / "again").read_metadata()
    cut = [tuple(chunk.sizes) for chunk in metadata.state_dict_metadata["model.w"].chunks]
    assert cut == [(10, 5000), (10, 5000), (10, 5000), (7, 5000)]
    files = {
        metadata.storage_data[MetadataIndex("model.w", (at, 0))].relative_path for at in (0, 30)
    }
    assert files == {"__0_0.distcp", "__3_0.distcp"}
    assert len(metadata.state_dict_metadata["model.b"].chunks) == 1
    assert torch.equal(whole(tmp_path / "again")["model"]["w"], rows)


def test_flat_keys(checkpoint: Path, tmp_path: Path) -> None:
    zckpt.convert(checkpoint, tmp_path / "flat", to="dcp", dcp_layout="flat")
    keys = FileSystemReader(tmp_path / "flat").read_metadata().planner_data
    assert keys["optim.state.trunk.0.weight.exp_avg"] == ("optim", "state.trunk.0.weight.exp_avg")
    zckpt.convert(tmp_path / "flat", tmp_path / "nested", to="dcp", dcp_layout="nested")
    nested, before = whole(tmp_path / "nested"), whole(checkpoint)
    # flat keys keep no order of groups' members but the model's
    for group in (*nested["optim"]["param_groups"], *before["optim"]["param_groups"]):
        group["params"].sort()
    assert alike(nested, before)


@pytest.mark.parametrize(
    "kind",
    ["Adadelta", "Adafactor", "Adamax", "ASGD", "LBFGS", "Muon", "NAdam", "RAdam", "Rprop"],
)
@pytest.mark.parametrize("stepped", [True, False])
def test_groups_get_no_keys_of_another_optimizer(kind: str, stepped: bool, tmp_path: Path) -> None:
    model = torch.nn.Linear(6, 4, bias=False)
    optimizer = getattr(torch.optim, kind)(model.parameters())

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 6)).square().mean()
        loss.backward()
        return loss

    if stepped:
        optimizer.step(closure)
    state = optimizer.state_dict()
    named = {
        "state": {"weight": state["state"][0]} if stepped else {},
        "param_groups": [{**state["param_groups"][0], "params": ["weight"]}],
    }
    dcp.save({"model": model.state_dict(), "optim": named}, checkpoint_id=tmp_path / "run")
    zckpt.convert(tmp_path / "run", tmp_path / "universal")
    zckpt.convert(tmp_path / "universal", tmp_path / "again", to="dcp")
    assert alike(whole(tmp_path / "again"), whole(tmp_path / "run"))


def test_other_state_survives(checkpoint: Path, tmp_path: Path) -> None:
    state = whole(checkpoint)
    state["rng"] = [torch.arange(7, dtype=torch.uint8), {"seed": 3}]
    state["app"] = {"tuple": (torch.zeros(2), 1.5), "text": "a", "half": torch.tensor(1.5)}
    dcp.save(state, checkpoint_id=tmp_path / "run")
    zckpt.convert(tmp_path / "run", tmp_path / "universal")
    zckpt.convert(tmp_path / "universal", tmp_path / "again", to="dcp")
    assert alike(whole(tmp_path / "again"), whole(tmp_path / "run"))


@pytest.mark.parametrize("shape", [(0,), (0, 3)])
@pytest.mark.parametrize("to", ["universal", "dcp", "gathered"])
def test_state_that_is_empty(shape: tuple[int, ...], to: str, tmp_path: Path) -> None:
    state = {"model": torch.nn.Linear(3, 4).state_dict(), "seen": torch.zeros(shape)}
    dcp.save(state, checkpoint_id=tmp_path / "run")
    zckpt.convert(tmp_path / "run", tmp_path / "between", to=to)
    zckpt.convert(tmp_path / "between", tmp_path / "again", to="dcp")
    assert alike(whole(tmp_path / "again"), whole(tmp_path / "run"))


@pytest.mark.parametrize(
    "own",
    [{"model": "small"}, {"optim": {"param_groups": [{"lr": 5.0}]}}, {"lr_scheduler": {"a": 1}}],
)
def test_a_clients_names_do_not_take_a_place(own: dict[str, Any], tmp_path: Path) -> None:
    """DeepSpeed keeps them apart."""
    source = replace(zckpt.read(EXAMPLE), state={**zckpt.read(EXAMPLE).state, "client_state": own})
    target = dcp_writing.DcpWriter(source, Options())
    assert any("client_state" in line for line in texts(target.omitted))
    keys = [".".join(map(str, path)) for path, _ in target.parts[""]]
    assert len(keys) == len(set(keys))
    assert not {"model", "lr_scheduler.a"} & set(keys)


@pytest.mark.parametrize("step", [7, torch.tensor(7.0), torch.tensor([7], dtype=torch.int32)])
def test_a_step_that_groups_keep(step: Any, tmp_path: Path) -> None:
    """Apex's FusedAdam looks for it there, and begins at 1 where it is not.

    If `capturable`, it adds in place to a tensor of shape [1], so that a 0-d one stops it.
    """
    group = {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "bias_correction": True}
    saved(tmp_path / "run", {}, {**group, "step": step})
    zckpt.convert(tmp_path / "run", tmp_path / "universal")
    zckpt.convert(tmp_path / "universal", tmp_path / "again", to="dcp")
    before, after = (whole(tmp_path / name)["optim"] for name in ("run", "again"))
    assert alike(after["state"], before["state"])
    assert alike([group["step"] for group in after["param_groups"]], [step, step])
    assert zckpt.read(tmp_path / "again").step == 7


def test_steps_of_several_types(tmp_path: Path) -> None:
    """They become torch's own; a type of one parameter is not that of all."""
    saved(tmp_path / "run", {"step": torch.tensor(7.0)}, {"weight_decay": 0.0})
    state = whole(tmp_path / "run")
    state["optim"]["state"]["a"]["step"] = 7
    dcp.save(state, checkpoint_id=tmp_path / "mixed")
    zckpt.convert(tmp_path / "mixed", tmp_path / "again", to="dcp")
    after = whole(tmp_path / "again")["optim"]["state"]
    assert all(same_bits(after[name]["step"], torch.tensor(7.0)) for name in "ab")


def test_a_number_in_a_flat_group_stays_a_tensor(tmp_path: Path) -> None:
    saved(tmp_path / "run", {"step": torch.tensor(7.0)}, {"lr": torch.tensor([0.1])}, flat=True)
    zckpt.reshard(tmp_path / "run", tmp_path / "again", dp=2)
    written = whole(tmp_path / "again")["optim"]["param_groups.a.lr"]
    assert same_bits(written, torch.tensor([0.1]))


def test_tensors_in_flat_groups_are_refused(tmp_path: Path) -> None:
    rates = torch.tensor([0.1, 0.2])
    saved(tmp_path / "run", {"step": torch.tensor(7.0)}, {"lr": rates}, flat=True)
    with pytest.raises(errors.WrongOption, match="lr is a tensor"):
        zckpt.reshard(tmp_path / "run", tmp_path / "again", dp=2)
    assert not (tmp_path / "again").exists()
    zckpt.convert(tmp_path / "run", tmp_path / "again", to="dcp", dcp_layout="nested")
    groups = whole(tmp_path / "again")["optim"]["param_groups"]
    assert all(same_bits(group["lr"], rates) for group in groups)


def test_accelerates_folders(tmp_path: Path) -> None:
    report = zckpt.convert(EXAMPLE, tmp_path / "out", to="dcp", dialect="accelerate")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "optimizer_0",
        "pytorch_model_fsdp_0",
    ]
    model = whole(tmp_path / "out" / "pytorch_model_fsdp_0")
    optimizer = whole(tmp_path / "out" / "optimizer_0")
    assert (list(model), list(optimizer)) == (["model"], ["optimizer"])
    assert_proven(EXAMPLE, tmp_path / "out", harmless=("padding", "type"))
    assert report["format"] == "dcp"


def test_bf16_stays_and_masters_are_made_with_a_warning(tmp_path: Path) -> None:
    weight = torch.randn(7, 5).bfloat16()
    state = {"exp_avg": weight * 2, "exp_avg_sq": weight * weight, "step": torch.tensor(4.0)}
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": ["w"]}
    optim = {"state": {"w": state}, "param_groups": [group]}
    dcp.save({"model": {"w": weight}, "optim": optim}, checkpoint_id=tmp_path / "run")
    report = zckpt.convert(tmp_path / "run", tmp_path / "universal")
    slots = zckpt.inspect(zckpt.read(tmp_path / "universal"))["slots"]
    assert {slot["dtype"] for slot in slots.values()} == {"BF16"}
    assert report["warnings"] == []
    report = zckpt.convert(tmp_path / "run", tmp_path / "zero", to="deepspeed", dp=2, stage=2)
    assert any("no fp32 masters" in warning for warning in texts(report["warnings"]))
    slots = zckpt.inspect(zckpt.read(tmp_path / "zero"))["slots"]
    assert slots["master"]["dtype"] == slots["exp_avg"]["dtype"] == "F32"
    assert slots["param"]["dtype"] == "BF16"


class Counting(torch.nn.Module):
    """Saves more than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 3)
        self.extra = {"count": 1, "table": torch.zeros(3)}

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.inner(features)

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, extra: Any) -> None:
        self.extra = extra


@pytest.mark.parametrize("through", ["gathered", "universal", "dcp"])
def test_extra_states_of_modules_arrive(through: str, tmp_path: Path) -> None:
    module = Counting()
    module.extra = {"count": 5, "table": torch.arange(3.0)}
    torch.save({"model": module.state_dict()}, tmp_path / "run.pt")
    zckpt.convert(tmp_path / "run.pt", tmp_path / "between", to=through)
    zckpt.convert(tmp_path / "between", tmp_path / "dcp", to="dcp")
    fresh = Counting()
    state = {"model": fresh.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    fresh.load_state_dict(state["model"])
    assert fresh.extra["count"] == 5
    assert torch.equal(fresh.extra["table"], torch.arange(3.0))
    zckpt.convert(tmp_path / "between", tmp_path / "whole", to="gathered")
    (file,) = {"run.pt", "model.pt"}.intersection(
        path.name for path in (tmp_path / "whole").iterdir()
    )
    whole = torch.load(tmp_path / "whole" / file, weights_only=False)
    assert whole.get("model", whole)["_extra_state"]["count"] == 5


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (["q.lora_A.second.weight", "q.lora_B.second.weight"], "the adapter second"),
        (["e.lora_embedding_A.default", "e.lora_embedding_B.default"], "e.base_layer.weight"),
    ],
)
def test_adapters_that_accelerate_would_not_load(
    names: list[str], error: str, tmp_path: Path
) -> None:
    """From a Trainer's directory; both names the targets that work."""
    source = tmp_path / "run"
    source.mkdir()
    model = {f"base_model.model.{name}": torch.ones(2, 2) for name in names}
    torch.save(model, source / "model.pt")
    parameters = [torch.nn.Parameter(tensor) for tensor in model.values()]
    optimizer = torch.optim.AdamW(zip(model, parameters, strict=True))
    torch.save(optimizer.state_dict(), source / "optim.pt")
    (source / "trainer_state.json").write_text("{}")
    with pytest.raises(errors.ZckptError, match=error) as raised:
        zckpt.convert(source, tmp_path / "out", to="dcp", dialect="accelerate", dp=2)
    assert "--to deepspeed" in raised.value.hint


def test_state_of_very_many_values_is_left_out(tmp_path: Path) -> None:
    """Each value would be an item with a pickle of its own: half a million take minutes."""
    state = {"seen": {number: number for number in range(10_001)}, "few": {1: 2}}
    torch.save({"model": {"w": torch.ones(3)}, **state}, tmp_path / "checkpoint.pt")
    report = zckpt.convert(tmp_path / "checkpoint.pt", tmp_path / "target", to="dcp")
    (line,) = texts(report["left_out"])
    assert line.startswith("client_state seen: 10,001 values, each of which")
    assert whole(tmp_path / "target")["few"] == {"1": 2}


@pytest.mark.parametrize("dp", [None, 2, 3])
def test_values_of_ranks_are_named(dp: int | None, tmp_path: Path) -> None:
    """A data loader of another number of ranks refuses them, and loses nothing that is not said."""
    loader = {"dp_rank_0": b"a", "dp_rank_1": b"b", "world_size": 2}
    state = {"model": {"w": torch.ones(4, 3)}, "dataloader": loader}
    dcp.save(state, checkpoint_id=tmp_path / "run")
    report = zckpt.reshard(tmp_path / "run", tmp_path / "again", dp=dp)
    lines = [line for line in texts(report["warnings"]) if "dp_rank_0, dp_rank_1" in line]
    assert bool(lines) == (dp != 2)
    assert all(line.startswith("dataloader has values of 2 ranks") for line in lines)
    assert whole(tmp_path / "again")["dataloader"] == loader


def test_torchtitans_keys(tmp_path: Path) -> None:
    """Names of weights without a root key, and a flat optimizer, as its CheckpointManager asks."""
    torch.manual_seed(1)

    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2, bias=False))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
        loss = model(torch.linspace(0, 1, 4)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    first = build()
    for _ in range(3):
        step(*first)
    torch.save(
        {"model": first[0].state_dict(), "optimizer": first[1].state_dict()}, tmp_path / "run.pt"
    )
    zckpt.convert(tmp_path / "run.pt", tmp_path / "step-3", to="dcp", dialect="torchtitan")
    second = build()
    step(*second)  # so that the optimizer has states
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = get_state_dict(*second, options=options)
    dcp.load({**model, "optimizer": optimizer}, checkpoint_id=tmp_path / "step-3")
    set_state_dict(*second, model_state_dict=model, optim_state_dict=optimizer, options=options)
    assert [step(*second) for _ in range(3)] == [step(*first) for _ in range(3)]
    keys = FileSystemReader(tmp_path / "step-3").read_metadata().state_dict_metadata
    assert {"0.weight", "optimizer.state.0.weight.exp_avg"} <= keys.keys()
    again = zckpt.read(tmp_path / "step-3")
    assert (again.step, list(again.parameters)) == (3, ["0.weight", "0.bias", "1.weight"])
