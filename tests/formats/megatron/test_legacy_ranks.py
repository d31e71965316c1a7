"""`mp_rank_*` directories: experts that are spread over ranks, and rules that a user gives."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zckpt as package
from zckpt import errors

from ...conftest import ROOT, texts

DATA = ROOT / "tests" / "data"
ITERATION = "iter_0000003"
NAMES = {"param": "model", "master": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
ADAPTER = "decoder.layers.{}.mlp.adapter.weight"
Change = Callable[[dict[Any, Any]], object]


@pytest.fixture
def spread(tmp_path: Path) -> Path:
    """Two tensor ranks, and two ranks of experts."""
    shutil.copytree(DATA / "megatron-0.16.1-legacy-ep2" / ITERATION, tmp_path / "run" / ITERATION)
    return tmp_path / "run" / ITERATION


@pytest.fixture
def sliced(tmp_path: Path) -> Path:
    """Two tensor ranks."""
    shutil.copytree(DATA / "megatron-0.16.1-legacy-tp2" / ITERATION, tmp_path / "run" / ITERATION)
    return tmp_path / "run" / ITERATION


def _changed(folder: Path, change: Change, *names: str, file: str = "model_optim_rng.pt") -> None:
    """Writes a file of the named folders again; of all of them without names."""
    for path in sorted(folder.rglob(file)):
        if not names or path.parent.name in names:
            value = torch.load(path, weights_only=False)
            change(value)
            torch.save(value, path)


# -- experts that are spread over ranks


def test_tensors_are_the_optimizers(
    spread: Path, tmp_path: Path, zckpt: Callable[..., Any]
) -> None:
    assert zckpt("convert", spread, tmp_path / "out").code == 0
    expected = load_file(DATA / "megatron-0.16.1-legacy-ep2" / "expected.safetensors")
    read = {
        f"{name}/{slot}": tensor
        for slot, file in NAMES.items()
        for name, tensor in load_file(tmp_path / "out" / f"{file}.safetensors").items()
    }
    assert read.keys() == expected.keys()
    assert [name for name in read if not torch.equal(read[name], expected[name])] == []
    manifest = package.read(spread)
    groups, parameters = manifest.groups, manifest.parameters
    assert manifest.step == 3
    assert groups is not None
    assert [group["is_expert_parallel"] for group in groups] == [False, False, True]
    layer = "decoder.layers.0.mlp"
    for expert in range(4):
        assert parameters[f"{layer}.experts.local_experts.{expert}.linear_fc1.weight"].group == 2
    assert parameters[f"{layer}.router.weight"].group == 0


def test_both_kinds_of_runs_resume(spread: Path, tmp_path: Path) -> None:
    """The list of optimizers is that of the source, or that of a run whose experts are together."""
    package.reshard(spread, tmp_path / "spread")
    package.reshard(spread, tmp_path / "together", ep=1)
    of_run = {
        name: package.read(tmp_path / name).state["megatron"]["common"]["optimizer"]
        for name in ("spread", "together")
    }
    assert [len(of_run["spread"][key]["optimizer"]["param_groups"]) for key in (0, 1)] == [2, 1]
    assert len(of_run["together"]["optimizer"]["param_groups"]) == 2
    assert package.verify(tmp_path / "spread", spread)["equal"]
    report = package.verify(tmp_path / "together", spread)
    assert report["differences"] == []
    assert report["tensors"] == 76


def test_lost_folders(spread: Path) -> None:
    (spread / "mp_rank_01_001" / "distrib_optim.pt").unlink()
    with pytest.raises(errors.IncompleteCheckpoint, match=r"mp_rank_01_001/distrib_optim\.pt"):
        package.read(spread)
    shutil.rmtree(spread / "mp_rank_01_001")
    with pytest.raises(errors.IncompleteCheckpoint, match="lacks mp_rank_01_001/"):
        package.read(spread)
    shutil.rmtree(spread / "mp_rank_00_001")
    with pytest.raises(errors.IncompleteCheckpoint, match="lacks mp_rank_00_001/"):
        package.read(spread)


def test_folders_of_another_run(spread: Path) -> None:
    shutil.copytree(spread / "mp_rank_00_000", spread / "mp_rank_00_000_000")
    with pytest.raises(errors.InconsistentCheckpoint, match="the run had no such rank"):
        package.read(spread)


@pytest.mark.parametrize("writers", [(0, 1, 2, 3), (0, 0, 0, 0), (None, None, None, None)])
def test_arguments_that_fit_the_folders(writers: tuple[int | None, ...], spread: Path) -> None:
    """Megatron-LM's arguments have the rank of each writer; converted files have one, or none."""
    _written_by(spread, writers)
    assert len(package.read(spread).files.paths) > 4


@pytest.mark.parametrize("writers", [(1, 0, 2, 3), (0, 2, 1, 3), (0, 3, 2, 1)])
def test_swapped_folders(writers: tuple[int, ...], spread: Path) -> None:
    _written_by(spread, writers)
    with pytest.raises(
        errors.InconsistentCheckpoint, match="are swapped: in the order of their names"
    ):
        package.read(spread)


def _written_by(spread: Path, writers: tuple[int | None, ...]) -> None:
    folders = ("mp_rank_00_000", "mp_rank_01_000", "mp_rank_00_001", "mp_rank_01_001")
    for folder, writer in zip(folders, writers, strict=True):
        _changed(spread, lambda value, w=writer: setattr(value["args"], "rank", w), folder)


def test_copies_of_what_is_of_no_expert(
    spread: Path, tmp_path: Path, zckpt: Callable[..., Any]
) -> None:
    """The folders of the second expert rank have the weights of all else too."""

    def change(value: dict[Any, Any]) -> None:
        value["model"]["decoder.final_layernorm.weight"][3] += 1

    _changed(spread, change, "mp_rank_00_001")
    ended = zckpt("convert", spread, tmp_path / "out", "--json")
    assert ended.document["error"] == "InconsistentCheckpoint"
    assert "replicas of decoder.final_layernorm.weight that differ" in ended.document["message"]
    assert zckpt("verify", spread).code == 3

    def lose(value: dict[Any, Any]) -> None:
        del value["model"]["decoder.final_layernorm.weight"]

    _changed(spread, lose, "mp_rank_00_001", "mp_rank_01_001")
    with pytest.raises(
        errors.InconsistentCheckpoint, match="only some rank folders of pipeline stage"
    ):
        package.read(spread)


def _of_other_tensor_ranks(value: dict[Any, Any]) -> None:
    value["args"].expert_tensor_parallel_size = 1


def _grouped(value: dict[Any, Any]) -> None:
    model = value["model"]
    layer = "decoder.layers.0.mlp.experts"
    for name in [name for name in model if ".local_experts." in name]:
        del model[name]
    model[f"{layer}.weight1"] = torch.zeros(8, 32, dtype=torch.bfloat16)  # GroupedMLP


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_of_other_tensor_ranks, "cut over another number of tensor ranks"),
        (_grouped, "one module for several experts"),
    ],
)
def test_other_experts_are_refused(spread: Path, change: Change, message: str) -> None:
    _changed(spread, change)
    with pytest.raises(errors.UnsupportedCheckpoint, match=message) as caught:
        package.read(spread)
    assert "torch_dist" in (caught.value.hint or "")


LINEARS = ("linear_fc1", "linear_fc2")
SIZES = {"linear_fc1": 64, "linear_fc2": 32}  # elements on a tensor rank


def _of_transformer_engine(value: dict[Any, Any], scales: Any = None) -> None:
    """Both experts of a rank as one module, with one state: TEGroupedMLP."""
    model = value["model"]
    layer = "decoder.layers.0.mlp.experts"
    grouped = {
        f"{layer}.{linear}.weight{expert}": model[f"{layer}.local_experts.{expert}.{linear}.weight"]
        for linear in LINEARS
        for expert in range(2)
    }
    model |= grouped | {f"{layer}.{linear}._extra_state": scales for linear in LINEARS}
    for name in [name for name in model if ".local_experts." in name]:
        del model[name]


def _in_order_of_transformer_engine(value: list[Any]) -> None:
    """The buffer has fc1 of all experts before fc2 of all; in reverse, at multiples of 64."""
    (tensors,) = value[1][0].values()
    for slot in ("param", "exp_avg", "exp_avg_sq"):
        rest, parts = tensors[slot], {}
        for expert, linear in ((1, "linear_fc2"), (1, "linear_fc1"), (0, "linear_fc2")):
            parts[expert, linear], rest = rest[: SIZES[linear]], rest[64:]
        parts[0, "linear_fc1"] = rest
        whole = torch.zeros(0)
        for linear in reversed(LINEARS):
            for expert in (1, 0):
                whole = torch.cat([whole, torch.zeros(-len(whole) % 64), parts[expert, linear]])
        tensors[slot] = whole


def test_experts_of_transformer_engine(
    spread: Path, tmp_path: Path, zckpt: Callable[..., Any]
) -> None:
    """They get the names and keys of experts that are modules of their own."""
    package.reshard(spread, tmp_path / "apart")
    _changed(spread, _of_transformer_engine)
    _changed(spread, _in_order_of_transformer_engine, file="distrib_optim.pt")
    report = package.verify(spread, tmp_path / "apart", gather=True, device="cpu")
    assert report["equal"], report
    package.reshard(spread, tmp_path / "grouped")
    apart, grouped = (
        package.read(tmp_path / name).state["megatron"] for name in ("apart", "grouped")
    )
    assert grouped["keys"] == apart["keys"]
    assert grouped["objects"] == apart["objects"]

    def change(value: dict[Any, Any]) -> None:
        value["args"].fp8 = "hybrid"

    _changed(spread, change)
    assert "decoder.layers.0.mlp.experts.linear_fc1._extra_state" in texts(
        package.read(spread).notices.omitted
    )
    ended = zckpt("reshard", spread, tmp_path / "scales", "--json")
    assert "several experts share one _extra_state with scales" in ended.document["message"]
    assert "--like" in ended.document["hint"]


# -- rules that a user gives


def _with_adapter(value: dict[Any, Any]) -> None:
    for layer in range(2):
        value["model"][ADAPTER.format(layer)] = torch.ones(4, 4, dtype=torch.bfloat16)


def test_modules_that_no_rule_knows(sliced: Path, tmp_path: Path) -> None:
    """The hint has the lines of a file of rules, and only what is not known is left open."""
    _changed(sliced, _with_adapter)
    with pytest.raises(errors.MissingData, match="how 2 parameters are sliced") as caught:
        package.read(sliced, weights_only=True)
    lines = (caught.value.hint or "").splitlines()
    assert [line for line in lines if "= ?" in line] == [
        r"  decoder\.layers\.\d+\.mlp\.adapter\.weight = ?  # [4, 4] on each rank"
    ]
    rules = tmp_path / "rules"
    for rule, shape in (("1", (4, 8)), ("0", (8, 4)), ("replicated", (4, 4))):
        rules.write_text(f".*adapter.* = {rule}\n")
        manifest = package.read(sliced, weights_only=True, tp_rules=str(rules))
        assert manifest.parameters[ADAPTER.format(1)].shape == shape
    rules.write_text(".*adapter.* = sum\n")
    with pytest.raises(errors.UnsupportedCheckpoint, match="the sum of the tensor ranks' values"):
        package.read(sliced, weights_only=True, tp_rules=str(rules))


def test_rules_count_before_those_of_a_model(sliced: Path, tmp_path: Path) -> None:
    """All rules of the model, written by hand, give the same model."""
    package.convert(sliced, tmp_path / "out", tp_rules="megatron-swiglu")
    assert package.verify(tmp_path / "out", sliced)["equal"]
    with pytest.raises(errors.WrongOption, match="linear_fc1"):
        package.read(sliced, tp_rules="megatron")  # without gates
    rules = tmp_path / "rules"
    rules.write_text(r".*linear_fc2\.weight = replicated")
    with pytest.raises(
        errors.InconsistentCheckpoint, match=r"replicas of .*linear_fc2.* that differ"
    ):
        package.convert(sliced, tmp_path / "copies", tp_rules=str(rules))
    assert not (tmp_path / "copies").exists()


@pytest.mark.parametrize("kind", ["megatron-0.16.1-tp2", "megatron-0.16.1-fsdp"])
def test_rules_of_files_that_need_none(kind: str) -> None:
    (line,) = [
        line
        for line in texts(package.read(DATA / kind, tp_rules="megatron-swiglu").notices.warnings)
        if "--tp-rules" in line
    ]
    assert "is not used" in line
