"""Reading Megatron-Core's directories: names, groups, both places of the common state, refusals."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp

import zckpt as package
from zckpt import errors
from zckpt.core.checkpoint.manifest import Manifest
from zckpt.formats.megatron.groups import members
from zckpt.formats.megatron.names import axes_of, named

from ...conftest import ROOT, texts
from ..contract import FormatContract

DATA = ROOT / "tests" / "data" / "megatron-0.16.1-tp2"
ITERATION = "iter_0000003"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's directory whose tracker file names the one iteration."""
    shutil.copytree(DATA, tmp_path / "run")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("3")
    return tmp_path / "run"


class TestContract(FormatContract):
    format = "megatron"

    @pytest.fixture
    def checkpoint(self, run: Path) -> Path:
        return run


def test_tensors_are_the_optimizers(run: Path, tmp_path: Path, zckpt: Callable[..., Any]) -> None:
    """A gated model on two tensor ranks, as Megatron-Core held it."""
    assert zckpt("convert", run, tmp_path / "out").code == 0
    expected = load_file(DATA / "expected.safetensors")
    files = {"param": "model", "master": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    read = {
        f"{name}/{slot}": tensor
        for slot, file in files.items()
        for name, tensor in load_file(tmp_path / "out" / f"{file}.safetensors").items()
    }
    assert read.keys() == expected.keys()
    assert [name for name in read if not torch.equal(read[name], expected[name])] == []


def test_values(run: Path) -> None:
    manifest = package.read(run)
    assert (manifest.step, manifest.optimizer, manifest.source["tag"]) == (3, "Adam", ITERATION)
    assert manifest.groups is not None
    assert [group["wd_mult"] for group in manifest.groups] == [1.0, 0.0]
    assert all("step" not in group for group in manifest.groups)
    parameters = manifest.parameters
    assert parameters["decoder.layers.1.mlp.linear_fc1.weight"].group == 0
    assert parameters["decoder.layers.1.input_layernorm.weight"].group == 1
    assert parameters["embedding.word_embeddings.weight"].aliases == ("output_layer.weight",)
    kept = manifest.state["megatron"]
    assert kept["vocabulary"] == {"rows": 16, "used": 11}
    assert kept["gated"] is True
    assert kept["keys"]["decoder.layers.mlp.linear_fc1.weight"] == 1
    assert "rng_state/shard_0.1_1.2" in kept["objects"]
    extra = "decoder.layers.mlp.linear_fc1._extra_state/shard_1_2"
    assert kept["objects"][extra] == [None]


def test_tags(run: Path) -> None:
    shutil.copytree(run / ITERATION, run / "iter_0000007")
    assert package.read(run).root.endswith(ITERATION)
    assert package.read(run, tag="iter_0000007").root.endswith("iter_0000007")
    (run / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(errors.AmbiguousCheckpoint):
        package.read(run)


def test_the_latest_is_not_there(run: Path) -> None:
    """Another iteration is not taken for the one that the tracker file names."""
    shutil.copytree(run / ITERATION, run / "iter_0000007")
    tracker = run / "latest_checkpointed_iteration.txt"
    for word in ("9", "../elsewhere"):
        tracker.write_text(word)
        with pytest.raises(errors.IncompleteCheckpoint, match=r"no such checkpoint") as caught:
            package.read(run)
        assert "--tag" in (caught.value.hint or "")
    tracker.write_text("7")
    (run / "iter_0000007" / "metadata.json").unlink()
    with pytest.raises(errors.IncompleteCheckpoint, match="iter_0000007"):
        package.read(run)
    assert package.read(run, tag=ITERATION).root.endswith(ITERATION)


def copied(folder: Path, target: Path, without: str = "", **changes: torch.Tensor) -> Manifest:
    """The same items written by torch itself, as 0.19 keeps the common state: as an item.

    `without` is a pattern of tensors' keys, and of keys in the common state, that are lost.
    """
    from zckpt.files.dcpfile import read_table

    table = read_table(str(folder))
    tensors = {
        key: torch.empty(item.shape, dtype=getattr(torch, item.torch_dtype))
        for key, item in table.items.items()
        if item is not None and not re.fullmatch(without, key)
    }
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    tensors |= changes
    values: dict[str, Any] = {
        key: [None] for key, item in table.items.items() if item is None and "_extra_state" in key
    }
    common = torch.load(folder / "common.pt", weights_only=False)
    common = {key: value for key, value in common.items() if not re.fullmatch(without, key)}
    state = {**tensors, **values, "common_state/shard_0_1": [common]}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, checkpoint_id=target, planner=planner, no_dist=True)
    shutil.copy(folder / "metadata.json", target)
    return package.read(target)


@pytest.mark.filterwarnings("ignore")
def test_common_state_as_an_item(run: Path, tmp_path: Path, zckpt: Callable[..., Any]) -> None:
    """One box per stacked tensor holds several layers."""
    manifest = copied(run / ITERATION, tmp_path / "new")
    assert manifest.step == 3
    assert zckpt("verify", run, "--against", tmp_path / "new", "--tensors", "*").code == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("decoder.layers.1.mlp.linear_fc2.weight", "decoder.layers.1.mlp.linear_fc2.weight/param"),
        (
            "chained_0.optimizer.state.exp_avg.decoder.final_layernorm.weight",
            "decoder.final_layernorm.weight/exp_avg",
        ),
    ],
)
def test_two_keys_of_one_tensor_are_refused(key: str, name: str, run: Path, tmp_path: Path) -> None:
    """One of them is a layer of a stacked key; or both are a state of one weight."""
    with pytest.raises(errors.InconsistentCheckpoint, match=f"two keys hold {name}$"):
        copied(run / ITERATION, tmp_path / "new", **{key: torch.zeros(8)})


@pytest.mark.filterwarnings("ignore")
def test_wrong_masters_are_named(run: Path, tmp_path: Path, zckpt: Callable[..., Any]) -> None:
    key = "optimizer.state.param.decoder.layers.mlp.linear_fc2.weight"
    wrong = torch.zeros(2, 8, 6)
    copied(run / ITERATION, tmp_path / "new", **{key: wrong})
    ended = zckpt("convert", tmp_path / "new", tmp_path / "out", "--json")
    assert ended.document["error"] == "InconsistentCheckpoint"
    assert ended.document["message"].startswith("2 weights of ")
    assert "--masters-from-weights" in ended.document["hint"]
    assert "decoder.layers.0.mlp.linear_fc2.weight" in ended.document["message"]
    assert not (tmp_path / "out").exists()
    assert zckpt("verify", tmp_path / "new").code == 3
    assert zckpt("convert", tmp_path / "new", tmp_path / "out", "--weights-only").code == 0
    accepted = zckpt("convert", tmp_path / "new", tmp_path / "both", "--accept-weights", "--json")
    assert "2 weights of" in accepted.document["warnings"][0]["message"]
    assert (
        package.load(tmp_path / "both", "decoder.layers.0.mlp.linear_fc2.weight/master").eq(0).all()
    )
    option = "--masters-from-weights"
    ended = zckpt("convert", tmp_path / "new", tmp_path / "rebuilt", option, "--json")
    assert "the masters of 2 do not round" in ended.document["warnings"][0]["message"]
    kept, lost = "decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc2.weight"
    manifest = package.read(tmp_path / "rebuilt")
    assert {(kept, "master"), (kept, "exp_avg"), (lost, "param")} <= manifest.entries.keys()
    assert not {(lost, "master"), (lost, "exp_avg")} & manifest.entries.keys()
    assert manifest.parameters[lost].step == 3
    ended = zckpt("convert", tmp_path / "rebuilt", tmp_path / "other", option, "--json")
    assert ended.document["error"] == "WrongOption"
    _assert_resumable(zckpt, tmp_path / "new", tmp_path / "again", option)
    _assert_resumable(zckpt, tmp_path / "rebuilt", tmp_path / "later")


def _assert_resumable(zckpt: Callable[..., Any], source: Path, target: Path, *option: str) -> None:
    """Megatron-Core gets masters that are the widened weights, and zeros for moments."""
    ended = zckpt("reshard", source, target, *option, "--json")
    assert ended.code == 0, ended.err
    lost = "decoder.layers.0.mlp.linear_fc2.weight"
    assert any("are zeros" in line for line in texts(ended.document["warnings"]))
    state = {
        slot: package.load(target, f"{lost}/{slot}")
        for slot in ("param", "master", "exp_avg", "exp_avg_sq")
    }
    assert state["param"].ne(0).any()
    assert torch.equal(state["master"], state["param"].float())
    assert state["exp_avg"].eq(0).all()
    assert state["exp_avg_sq"].eq(0).all()
    kept = package.read(target).parameters["decoder.layers.0.mlp.linear_fc1.weight"]
    assert kept.step == 3
    assert package.verify(target)["equal"]


@pytest.mark.parametrize("kind", ["fully_sharded_bucket_space", "fsdp_dtensor"])
def test_other_types_are_refused(run: Path, kind: str) -> None:
    common = torch.load(run / ITERATION / "common.pt", weights_only=False)
    common["optimizer"]["param_state_sharding_type"] = kind
    torch.save(common, run / ITERATION / "common.pt")
    with pytest.raises(errors.UnsupportedCheckpoint, match=kind):
        package.read(run)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("optimizer", "dist_muon", "states of Muon"),
        ("use_layer_wise_distributed_optimizer", True, "states of Muon"),
        ("num_query_groups", 1, "1 query group"),
    ],
)
def test_other_models_are_refused(run: Path, argument: str, value: Any, message: str) -> None:
    common = torch.load(run / ITERATION / "common.pt", weights_only=False)
    setattr(common["args"], argument, value)
    torch.save(common, run / ITERATION / "common.pt")
    with pytest.raises(errors.UnsupportedCheckpoint, match=message):
        package.read(run)


def test_keys_of_every_expert_are_refused(run: Path) -> None:
    common = torch.load(run / ITERATION / "common.pt", weights_only=False)
    common["content_metadata"]["singleton_local_shards"] = True
    torch.save(common, run / ITERATION / "common.pt")
    with pytest.raises(errors.UnsupportedCheckpoint, match="singleton_local_shards"):
        package.read(run)


def test_other_kinds_are_refused(run: Path) -> None:
    marker = run / ITERATION / "metadata.json"
    marker.write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))
    with pytest.raises(errors.UnsupportedCheckpoint, match="zarr"):
        package.read(run)


def test_items_without_their_marker(run: Path) -> None:
    """They are not taken for a state dict of another program."""
    (run / ITERATION / "metadata.json").unlink()
    for path in (run, run / ITERATION):
        with pytest.raises(errors.IncompleteCheckpoint, match=r"no readable metadata\.json"):
            package.read(path)


def test_lost_files_are_refused(run: Path) -> None:
    (run / ITERATION / "common.pt").unlink()
    with pytest.raises(errors.IncompleteCheckpoint, match=r"common\.pt"):
        package.read(run)


@pytest.mark.parametrize(
    ("key", "place", "name"),
    [
        ("decoder.final_layernorm.weight", (), "decoder.final_layernorm.weight"),
        ("decoder.layers.mlp.linear_fc2.weight", (3,), "decoder.layers.3.mlp.linear_fc2.weight"),
        ("decoder.layers.7.mlp.router.weight", (), "decoder.layers.7.mlp.router.weight"),
        (
            "decoder.layers.self_attention.linear_qkv.layer_norm_bias",
            (0,),
            "decoder.layers.0.input_layernorm.bias",
        ),
        (
            "decoder.layers.mlp.experts.experts.linear_fc1.weight",
            (2, 5),
            "decoder.layers.2.mlp.experts.local_experts.5.linear_fc1.weight",
        ),
        (
            "decoder.layers.4.mlp.experts.experts.linear_fc1.weight",
            (1,),
            "decoder.layers.4.mlp.experts.local_experts.1.linear_fc1.weight",
        ),
    ],
)
def test_names(key: str, place: tuple[int, ...], name: str) -> None:
    assert axes_of(key) == len(place)
    assert named(key, place) == name


def test_groups_without_an_answer() -> None:
    groups = [{"wd_mult": 1.0, "lr_mult": 1.0}, {"wd_mult": 1.0, "lr_mult": 0.1}]
    assert members(groups, {"a.weight": (2, 2)}, {}) is None
    assert members(groups[:1], {"a.weight": (2, 2)}, {}) == {"a.weight": 0}


def test_groups_by_the_options_of_megatron() -> None:
    """Norms of q and k that are decayed; a rate of its own for embedding and output layer."""
    groups = [
        {"wd_mult": 1.0, "default_config": True, "max_lr": 0.01},
        {"wd_mult": 0.0, "default_config": True, "max_lr": 0.01},
        {"wd_mult": 1.0, "default_config": False, "max_lr": 0.003},
    ]
    inside = "decoder.layers.0.self_attention."
    shapes: dict[str, tuple[int, ...]] = {
        "output_layer.weight": (8, 4),
        f"{inside}linear_proj.weight": (4, 4),
        f"{inside}q_layernorm.weight": (4,),
    }
    args = {"decoupled_lr": 0.003}
    assert list((members(groups, shapes, args) or {}).values()) == [2, 0, 1]
    args["apply_wd_to_qk_layernorm"] = True
    assert list((members(groups, shapes, args) or {}).values()) == [2, 0, 0]
    assert members(groups, shapes, {}) is None
    before = [{**group, "is_decoupled_lr": group["max_lr"] == 0.003} for group in groups]
    for group in before:  # 0.15 and older
        del group["default_config"], group["max_lr"]
    assert list((members(before, shapes, args) or {}).values()) == [2, 0, 0]


@pytest.mark.parametrize("to", ["dcp", "gathered", "onnxruntime"])
def test_what_only_its_files_hold_has_their_names(run: Path, to: str, tmp_path: Path) -> None:
    """Not the name of a format: a user knows the keys of the common state."""
    options = {"dp": 1} if to == "onnxruntime" else {}
    report = package.convert(run, tmp_path / "out", to=to, **options)
    (line,) = (line for line in texts(report["left_out"]) if "opt_param_scheduler" in line)
    assert "args, checkpoint_version, iteration" in line
    assert "_extra_state, rng_state" in line
    assert "optimizer" not in line.replace("opt_param", "")
    assert "megatron:" not in line.replace("of megatron alone:", "")
    assert not line.endswith("megatron")


def test_the_common_state_of_another_iteration(
    run: Path, tmp_path: Path, zckpt: Callable[..., Any]
) -> None:
    """It has the optimizer's step. Folders are renamed at times, so this is no error."""
    for words in (("convert", run, tmp_path / "out"), ("verify", run)):
        assert "states iteration" not in zckpt(*words).err
    common = run / ITERATION / "common.pt"
    value = torch.load(common, weights_only=False)
    value["iteration"] = 4
    torch.save(value, common)
    for words in (("convert", run, tmp_path / "other"), ("verify", run)):
        ended = zckpt(*words)
        assert ended.code == 0
        assert f"Warning: {common} states iteration 4, but its folder is {ITERATION}" in ended.err
    (run / ITERATION).rename(run / "release")
    (run / "latest_checkpointed_iteration.txt").write_text("release")
    assert "states iteration" not in zckpt("verify", run).err
