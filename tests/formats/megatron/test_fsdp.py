"""Megatron-FSDP's directories, with Megatron-Core as the judge, and what is refused of them.

What zckpt reads is what the optimizers held, bit for bit. Runs of Megatron-Core without FSDP resume
from what zckpt writes of it, and their next update makes the same weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp

import zckpt as package
from zckpt import errors
from zckpt.core.checkpoint.inert import TensorName
from zckpt.formats.megatron.fsdp import plain_name

from ...conftest import ROOT
from ...engines import megatron

Resumed = tuple[str, dict[str, Any], dict[str, Any]]
DATA = ROOT / "tests" / "data" / "megatron-0.16.1-fsdp"
ITERATION = "iter_0000003"
MOMENTS = ("exp_avg", "exp_avg_sq")
FILES = {"param": "model", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
FC1 = "module.decoder.layers.0.mlp.linear_fc1.weight"
FC2 = "module.decoder.layers.0.mlp.linear_fc2.weight"
# name of a source, options of the conversion, and the run that loads
RESUMED: list[Resumed] = [
    ("fsdp_dp3", {}, {"world": 1}),
    ("fsdp_tp2", {}, {"world": 2, "tp": 2}),  # the same grid, which asks for random states
    ("fsdp_tp2", {"dtype": "bf16"}, {"world": 2, "pp": 2}),
    ("fsdp_fp32", {}, {"world": 2, "tp": 2}),
    ("fsdp_moe_dp2", {"ep": 2}, {"world": 2, "ep": 2}),
    ("fsdp_moe_ep2", {"ep": 1}, {"world": 2}),
    ("fsdp_moe_ep2_dp4", {"ep": 2}, {"world": 2, "ep": 2}),
]


def test_directory(tmp_path: Path, zckpt: Callable[..., Any]) -> None:
    """A gated model on two tensor ranks of two data-parallel ranks, as Megatron-Core held it."""
    assert zckpt("convert", DATA, tmp_path / "out").code == 0
    expected = load_file(DATA / "expected.safetensors")
    read = read_back(tmp_path / "out")
    assert read.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(expected[key], read[key])] == []
    manifest = package.read(DATA)
    assert (manifest.format, manifest.step, manifest.optimizer) == ("megatron", 3, "Adam")
    assert manifest.source["zero_stage"] == 3
    assert manifest.source["tag"] == ITERATION
    assert manifest.groups is not None
    assert [group["wd_mult"] for group in manifest.groups] == [1.0, 0.0]
    assert manifest.groups[0]["betas"] == (0.9, 0.999)
    assert manifest.parameters["decoder.layers.0.mlp.linear_fc1.weight"].shape == (12, 8)
    kept = manifest.state["megatron"]
    assert kept["keys"]["decoder.layers.mlp.linear_fc1.weight"] == 1
    assert kept["common"]["opt_param_scheduler"] == {"max_lr": 0.01, "num_steps": 24}
    ranks = kept["objects"]["rng_state/shard_0.1_1.2"]
    assert isinstance(ranks[0][0].pop("torch_rng_state"), TensorName)
    assert ranks == [[{"random_rng_state": (3, (1, 2), None)}]]
    assert zckpt("verify", DATA).code == 0
    ended = zckpt("verify", DATA, "--gather", "--against", tmp_path / "out", "--json")
    assert "files of Megatron-FSDP, for which --gather has no rule" in ended.document["message"]
    assert zckpt("convert", DATA, tmp_path / "weights", "--weights-only").code == 0


def test_torch_dist_is_written(tmp_path: Path, zckpt: Callable[..., Any]) -> None:
    ended = zckpt("convert", DATA, tmp_path / "out", "--to", "megatron", "--dtype", "bf16")
    assert ended.code == 0, ended.err
    expected = load_file(DATA / "expected.safetensors")
    manifest = package.read(tmp_path / "out")
    names = {f"{name}/{slot}" for name in manifest.parameters for slot in ("master", *MOMENTS)}
    assert names == expected.keys()
    assert all(manifest.entries[name, "param"].dtype == "BF16" for name in manifest.parameters)
    assert zckpt("convert", tmp_path / "out", tmp_path / "back").code == 0
    for slot in ("master", *MOMENTS):
        for key, tensor in load_file(tmp_path / "back" / f"{slot}.safetensors").items():
            assert torch.equal(expected[f"{key}/{slot}"], tensor)


def saved(
    path: Path,
    stages: int = 1,
    model: str = "model",
    state: Any = None,
    groups: bool = True,
    ranks: tuple[str, ...] = ("(0, 1)",),
    **changes: Any,
) -> Path:
    """A directory with a small layer on two tensor ranks; `changes` are further weights.

    `state` is that of one weight; `ranks` are the keys of random states.
    """
    weights = {
        "module.decoder.layers.0.mlp.linear_fc1.weight_w": torch.ones(4, 3),
        "module.decoder.layers.0.mlp.linear_fc1.weight_v": torch.zeros(4, 3),
        "module.decoder.layers.0.mlp.linear_fc2.weight": torch.ones(3, 4),
        **changes,
    }
    weights = {name: tensor for name, tensor in weights.items() if tensor is not None}
    meta = {"lr": 0.1, "step": 3}
    saved_state = {
        "args": argparse.Namespace(pipeline_model_parallel_size=stages),
        model: weights,
        "optimizer": {
            "state": {f"module.{FC2}": state or {"exp_avg": torch.ones(3, 4)}},
            "param_to_group_meta": {f"module.{FC2}": meta} if groups else {},
        },
        "rng_state": {rank: [{"torch_rng_state": torch.ones(3)}] for rank in ranks},
    }
    dcp.save(saved_state, checkpoint_id=path, no_dist=True)
    return path


@pytest.mark.filterwarnings("ignore")
def test_what_is_refused(tmp_path: Path) -> None:
    manifest = package.read(saved(tmp_path / "good"))
    assert manifest.parameters[FC2.removeprefix("module.")].trainable
    wrong = {
        "2 pipeline stages": saved(tmp_path / "pp", stages=2),
        "several model chunks": saved(tmp_path / "vpp", model="model0"),
        "exactly the two halves": saved(tmp_path / "half", **{f"{FC1}_v": None}),
        "differ in shape or type": saved(tmp_path / "unlike", **{f"{FC1}_v": torch.ones(2, 3)}),
        "are one tensor": saved(
            tmp_path / "whole", **{f"{FC1}_w": None, f"{FC1}_v": None, FC1: torch.ones(8, 3)}
        ),
        "lacks its weight": saved(tmp_path / "lost", **{FC2: None}),
        "has the shape .*, its weight another": saved(
            tmp_path / "shape", state={"exp_avg": torch.ones(4, 3)}
        ),
        "has the type F16": saved(tmp_path / "type", state={"exp_avg": torch.ones(3, 4).half()}),
        "does not know the optimizer key": saved(
            tmp_path / "deep", state={"exp_avg": {"scale": 1.0}}
        ),
    }
    for message, path in wrong.items():
        with pytest.raises(errors.ZckptError, match=message):
            package.read(path)
    with pytest.raises(errors.NotACheckpoint):
        package.read(tmp_path / "good", format="dcp")


@pytest.mark.filterwarnings("ignore")
def test_states_without_groups_are_read(tmp_path: Path) -> None:
    path = saved(tmp_path / "run", groups=False, ranks=("all", "(0, 1)"))
    manifest = package.read(path)
    assert (FC2.removeprefix("module."), "exp_avg") in manifest.entries
    assert not manifest.groups
    package.convert(path, tmp_path / "out")
    (moment,) = load_file(tmp_path / "out" / "exp_avg.safetensors").values()
    assert torch.equal(moment, torch.ones(3, 4))


@pytest.mark.filterwarnings("ignore")
def test_random_states_of_unknown_ranks_are_kept(tmp_path: Path) -> None:
    manifest = package.read(saved(tmp_path / "run", ranks=("all",)))
    (kept,) = manifest.state["megatron"]["common"]["rng_state"]["all"]
    assert isinstance(kept["torch_rng_state"], TensorName)


def test_names() -> None:
    """Transformer Engine has the weights of all experts in one module."""
    inner = "decoder.layers.1.mlp.experts."
    assert plain_name(f"module.module.{inner}linear_fc1.weight3") == (
        f"{inner}local_experts.3.linear_fc1.weight"
    )
    assert plain_name("decoder.layers.1.mlp.linear_fc1.layer_norm_weight") == (
        "decoder.layers.1.pre_mlp_layernorm.weight"
    )


def read_back(universal: Path) -> dict[str, torch.Tensor]:
    """The tensors of a universal checkpoint whose weights are the masters."""
    return {
        f"{key}/{'master' if slot == 'param' else slot}": tensor
        for slot, file in FILES.items()
        for key, tensor in load_file(universal / f"{file}.safetensors").items()
    }


def compare(runs: Path, tmp_path: Path, zckpt: Callable[..., Any], name: str) -> None:
    expected, steps = megatron.expected(runs / name)
    target = tmp_path / "universal"
    ended = zckpt("convert", runs / name, target, "--json")
    assert ended.code == 0, ended.err
    assert zckpt("verify", runs / name, "--against", target).code == 0
    assert steps == {ended.document["step"]} == {3}
    read = read_back(target)
    assert not (target / "master.safetensors").exists()  # the weights are the masters
    assert read.keys() == expected.keys()
    assert not any(tensor.isnan().any() for tensor in expected.values())
    assert [key for key in expected if not torch.equal(expected[key], read[key])] == []
    manifest = package.read(runs / name)
    parameters, groups = manifest.parameters, manifest.groups
    assert groups is not None
    for key, parameter in parameters.items():
        decayed = not (key.endswith(".bias") or len(parameter.shape) == 1)
        assert parameter.group is not None
        assert groups[parameter.group]["wd_mult"] == decayed


@pytest.mark.engines
def test_state_is_the_optimizers(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, zckpt: Callable[..., Any]
) -> None:
    """A gated model whose pieces are uneven, on two tensor ranks of two data-parallel ranks."""
    root = tmp_path_factory.mktemp("megatron-fsdp")
    megatron.train([megatron.FSDP], root)
    compare(root, tmp_path, zckpt, megatron.FSDP["name"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("megatron-fsdp")
    megatron.train(megatron.MORE_FSDP, root)
    return root


@pytest.fixture(scope="module")
def new_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("megatron-fsdp-new")
    megatron.train(megatron.NEW_FSDP, root, megatron.NEW_VERSION)
    return root


@pytest.mark.matrix
@pytest.mark.parametrize("name", [case["name"] for case in megatron.NEW_FSDP])
def test_states_of_0_19_are_the_optimizers(
    new_runs: Path, tmp_path: Path, zckpt: Callable[..., Any], name: str
) -> None:
    compare(new_runs, tmp_path, zckpt, name)


@pytest.mark.matrix
@pytest.mark.parametrize("name", [case["name"] for case in megatron.MORE_FSDP])
def test_states_are_the_optimizers(
    runs: Path, tmp_path: Path, zckpt: Callable[..., Any], name: str
) -> None:
    compare(runs, tmp_path, zckpt, name)


@pytest.fixture(scope="module")
def loaded(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs that load what zckpt writes from each source."""
    root = tmp_path_factory.mktemp("resumed")
    (root / "loaded").mkdir()
    loading = []
    for source, options, run in RESUMED:
        target = root / megatron.name_of((source, options, {}))
        package.convert(runs / source, target, to="megatron", **options)
        like = next(case for case in megatron.MORE_FSDP if case["name"] == source)
        name = megatron.name_of((source, options, run))
        case = {**like, "tp": 1, "ep": 1, **run, "fsdp": None, "load": str(target), "name": name}
        loading.append(case)
    megatron.train(loading, root / "loaded")
    return root / "loaded"


@pytest.mark.matrix
@pytest.mark.parametrize("resumed", RESUMED, ids=megatron.name_of)
def test_runs_resume(runs: Path, loaded: Path, resumed: Resumed) -> None:
    """All ranks hold the source's state; and after one more update that of the source's ranks."""
    for when, step in (("rank", 3), ("next", 4)):
        expected, steps = megatron.expected(runs / resumed[0], when)
        state, loaded_steps = megatron.expected(loaded / megatron.name_of(resumed), when)
        assert loaded_steps == steps == {step}
        weights = {key: tensor for key, tensor in state.items() if key.endswith("/param")}
        assert state.keys() - weights.keys() == expected.keys()
        assert [key for key in expected if not torch.equal(expected[key], state[key])] == []
        for key, tensor in weights.items():
            assert torch.equal(state[f"{key[:-6]}/master"].to(tensor.dtype), tensor), key
