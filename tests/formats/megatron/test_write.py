"""Writing Megatron-Core's directories: keys, common state, experts, refusals, checksums."""

from __future__ import annotations

import io
import json
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch.distributed import checkpoint as dcp

import zckpt as package
from zckpt import errors
from zckpt.core.checkpoint.inert import TensorName
from zckpt.core.checkpoint.manifest import Parameter
from zckpt.formats.megatron import names, optimizers
from zckpt.formats.megatron.vocabulary import for_tensor_ranks
from zckpt.formats.megatron.write import MegatronWriter, _boxes
from zckpt.training.options import EP, LIKE, TP, VOCAB_SIZE, Options

from ...conftest import ROOT, texts

SOURCE = ROOT / "tests" / "data" / "megatron-0.16.1-tp2"
ITERATION = "iter_0000003"
GROUP = {"wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False, "lr": 0.01, "betas": (0.9, 0.95)}


def loaded(folder: Path) -> dict[str, Any]:
    """All items of a directory, as torch's own loader reads them."""
    reader = dcp.FileSystemReader(folder)
    items = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(item.size, dtype=item.properties.dtype) if hasattr(item, "size") else "?"
        for key, item in items.items()
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert "?" not in [value for value in state.values() if isinstance(value, str)]
    return state


@pytest.mark.filterwarnings("ignore")
def test_torch_reads_the_same_items(tmp_path: Path, zckpt: Callable[..., Any]) -> None:
    """By way of a universal checkpoint: every tensor and every object of the source."""
    assert zckpt("convert", SOURCE, tmp_path / "u").code == 0
    ended = zckpt("reshard", tmp_path / "u", tmp_path / "new", "--json", "--max-file-size", "40kB")
    assert ended.code == 0, ended.err
    assert ended.document["left_out"] == ended.document["warnings"] == []
    assert (tmp_path / "new" / "latest_checkpointed_iteration.txt").read_text() == "3"
    folder = tmp_path / "new" / ITERATION
    before, after = loaded(SOURCE / ITERATION), loaded(folder)
    assert before.keys() == after.keys()
    for key, value in before.items():
        same = torch.equal(value, after[key]) if torch.is_tensor(value) else value == after[key]
        assert same, key
    assert len(list(folder.glob("*.distcp"))) > 1
    assert json.loads((folder / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    old = torch.load(SOURCE / ITERATION / "common.pt", weights_only=False)
    new = torch.load(folder / "common.pt", weights_only=False)
    assert new == old
    assert zckpt("verify", SOURCE, "--against", tmp_path / "new").code == 0
    assert zckpt("verify", tmp_path / "new").code == 0


@pytest.mark.filterwarnings("ignore")
def test_a_piece_for_every_layer(tmp_path: Path, zckpt: Callable[..., Any]) -> None:
    """And every record has its checksum: torch's zips are checked by Python's."""
    assert zckpt("reshard", SOURCE, tmp_path / "new").code == 0
    folder = tmp_path / "new" / ITERATION
    metadata = dcp.FileSystemReader(folder).read_metadata()
    item: Any = metadata.state_dict_metadata["decoder.layers.mlp.linear_fc1.weight"]
    assert [tuple(chunk.offsets) for chunk in item.chunks] == [(0, 0, 0), (1, 0, 0)]
    for place in metadata.storage_data.values():
        data = (folder / place.relative_path).read_bytes()[place.offset :][: place.length]
        (tmp_path / "item").write_bytes(data)
        with zipfile.ZipFile(tmp_path / "item") as item_file:
            assert item_file.testzip() is None


@pytest.mark.filterwarnings("ignore")
def test_objects_of_trainers(tmp_path: Path, zckpt: Callable[..., Any]) -> None:
    """What Megatron-LM saves of ranks and modules: arrays, tensors and buffers in objects."""
    rng = {
        "random_rng_state": random.Random(3).getstate(),
        "np_rng_state": np.random.RandomState(3).get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {"model-parallel-rng": torch.arange(16, dtype=torch.uint8)},
    }
    state = loaded(SOURCE / ITERATION)
    state["rng_state/shard_0.0_1.2"] = [rng]
    state["decoder.final_layernorm._extra_state/shard_0_1"] = [io.BytesIO(b"scales")]
    folder = tmp_path / "old" / ITERATION
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, checkpoint_id=folder, planner=planner, no_dist=True)
    shutil.copy(SOURCE / ITERATION / "metadata.json", folder)
    common = torch.load(SOURCE / ITERATION / "common.pt", weights_only=False)
    common["optimizer"]["grad_scaler"] = {"scale": torch.tensor([1024.0]), "growth_tracker": 7}
    common["args"].rank_of_gpu, common["args"].params_dtype = np.int64(3), torch.bfloat16
    torch.save(common, folder / "common.pt")
    assert zckpt("convert", tmp_path / "old", tmp_path / "u").code == 0
    ended = zckpt("reshard", tmp_path / "u", tmp_path / "new", "--json")
    assert ended.document["left_out"] == [], ended.document
    items = loaded(tmp_path / "new" / ITERATION)
    (same,) = items["rng_state/shard_0.0_1.2"]
    assert repr(same) == repr(rng)
    assert (same["np_rng_state"][1] == rng["np_rng_state"][1]).all()
    assert torch.equal(same["torch_rng_state"], rng["torch_rng_state"])
    (buffer,) = items["decoder.final_layernorm._extra_state/shard_0_1"]
    assert buffer.getvalue() == b"scales"
    new = torch.load(tmp_path / "new" / ITERATION / "common.pt", weights_only=False)
    assert new == common
    with zipfile.ZipFile(tmp_path / "new" / ITERATION / "common.pt") as file:
        assert file.testzip() is None


def test_large_tensors_are_cut_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zckpt.formats.megatron.write.LARGEST", 200)
    writer = MegatronWriter(package.read(SOURCE), Options(), types={})
    for tensor in writer.tensors:
        covered = torch.zeros(tensor.shape, dtype=torch.int64)
        for box in _boxes(tensor):
            covered[
                tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
            ] += 1
        assert covered.eq(1).all(), tensor.key
    embedding = next(t for t in writer.tensors if t.key == "embedding.word_embeddings.weight")
    assert len(list(_boxes(embedding))) > 1


def test_weights_alone(tmp_path: Path, zckpt: Callable[..., Any]) -> None:
    options = ["--to", "megatron", "--weights-only", "--dtype", "fp32", "--json"]
    ended = zckpt("convert", SOURCE, tmp_path / "new", *options)
    assert ended.code == 0, ended.err
    assert "rng_state" in ended.document["left_out"][0]["message"]
    manifest = package.read(tmp_path / "new")
    assert {(e.slot, e.dtype) for e in manifest.entries.values()} == {("param", "F32")}
    common = torch.load(tmp_path / "new" / ITERATION / "common.pt", weights_only=False)
    assert "optimizer" not in common
    args = common["args"]
    assert (args.no_save_optim, args.no_save_rng, args.params_dtype) == (True, True, torch.float32)


def test_random_states_of_another_grid_stay_behind() -> None:
    source = package.read(SOURCE)
    kept = source.state["megatron"]
    objects = dict(kept["objects"])
    objects["rng_state/shard_0.0.0_1.2.1"] = objects.pop("rng_state/shard_0.0_1.2")
    del objects["rng_state/shard_0.1_1.2"]
    source = replace(source, state={"megatron": {**kept, "objects": objects}})
    writer = MegatronWriter(source, Options(), types={})
    assert writer.omitted[-1].code == "rank-state-omitted"
    assert "rng_state/shard_0.0.0_1.2.1" in writer.omitted[-1].message
    assert writer.common["args"].state["no_save_rng"] is True
    assert all("_extra_state" in key for key in writer.objects)


def test_tensors_of_the_common_state_move_with_it() -> None:
    """The loss scale of fp16 is a tensor in the state of every optimizer."""
    source = package.read(SOURCE)
    kept = source.state["megatron"]
    old = "megatron.common.optimizer.0.grad_scaler.scale"
    entry = next(iter(source.entries.values()))
    entries = {**source.entries, (old, "state"): replace(entry, parameter=old)}
    dense = {**kept["common"]["optimizer"], "grad_scaler": {"scale": TensorName(old)}}
    groups = [{**group, "is_expert_parallel": True} for group in source.groups or ()]
    spread = {"optimizer": {"param_groups": groups}}
    common = {**kept["common"], "optimizer": {0: dense, 1: spread}}
    state = {"megatron": {**kept, "common": common}}
    writer = MegatronWriter(
        replace(source, state=state, entries=entries), Options(((EP, 1),)), types={}
    )
    scaler = writer.common["optimizer"]["grad_scaler"]
    new = "megatron.common.optimizer.grad_scaler.scale"
    assert scaler["scale"].name == new
    assert writer.moved[new, "state"].fragments is entry.fragments


@pytest.mark.parametrize("place", ["optimizer", "optimizer.optimizer"])
@pytest.mark.parametrize("value", [3, {"mean": torch.ones(2)}], ids=["number", "tensor"])
def test_what_stands_beside_the_groups(place: str, value: Any, tmp_path: Path) -> None:
    """A program may have put it there: it stays, and no other run equals this one."""
    shutil.copytree(SOURCE, tmp_path / "run")
    file = tmp_path / "run" / ITERATION / "common.pt"
    common = torch.load(file, weights_only=False)
    own = common["optimizer"]
    (own if place == "optimizer" else own["optimizer"])["rho"] = value
    torch.save(common, file)
    package.reshard(tmp_path / "run", tmp_path / "new")
    assert package.verify(tmp_path / "new", tmp_path / "run")["equal"]
    assert not package.verify(tmp_path / "new", SOURCE)["equal"]
    own = torch.load(tmp_path / "new" / ITERATION / "common.pt", weights_only=False)["optimizer"]
    assert str((own if place == "optimizer" else own["optimizer"])["rho"]) == str(value)


def test_refusals(tmp_path: Path, zckpt: Callable[..., Any]) -> None:
    ended = zckpt("convert", ROOT / "examples" / "run", tmp_path / "new", "--to", "megatron")
    assert (ended.code, "only from a checkpoint of Megatron-Core" in ended.err) == (1, True)
    ended = zckpt("reshard", SOURCE, tmp_path / "new", "--ep", "2")
    assert (ended.code, "the source has no experts" in ended.err) == (1, True)
    ended = zckpt("reshard", SOURCE, tmp_path / "new", "--rename", "linear_fc1=fc1")
    assert (ended.code, "knows no Megatron-Core key" in ended.err) == (1, True)
    assert not list(tmp_path.iterdir())


def test_layers_that_differ_are_refused() -> None:
    source = package.read(SOURCE)
    frozen = "decoder.layers.1.mlp.linear_fc2.weight"
    lost = {(frozen, slot) for slot in ("master", "exp_avg", "exp_avg_sq")}
    entries = {key: entry for key, entry in source.entries.items() if key not in lost}
    with pytest.raises(errors.UnsupportedCheckpoint, match=r"layers\.1\.mlp\.linear_fc2"):
        MegatronWriter(replace(source, entries=entries), Options(), types={})
    del entries[frozen, "param"]
    with pytest.raises(errors.MissingData, match=r"layers\.1\.mlp\.linear_fc2"):
        MegatronWriter(replace(source, entries=entries), Options(), types={})
    parameters = {name: item for name, item in source.parameters.items() if ".1." not in name}
    first = "decoder.layers.0.mlp.linear_fc2.weight"
    parameters["decoder.layers.2.mlp.linear_fc2.weight"] = parameters[first]
    entries |= {
        ("decoder.layers.2.mlp.linear_fc2.weight", entry.slot): entry
        for entry in source.entries.values()
        if entry.parameter == first
    }
    with pytest.raises(errors.MissingData, match="lacks layers or experts"):
        MegatronWriter(replace(source, parameters=parameters, entries=entries), Options(), types={})


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("decoder.final_layernorm.weight", ()),
        ("decoder.layers.mlp.linear_fc2.weight", (13,)),
        ("decoder.layers.7.mlp.router.weight", ()),
        ("decoder.layers.self_attention.linear_qkv.layer_norm_bias", (0,)),
        ("decoder.layers.mlp.experts.experts.linear_fc1.weight", (12, 5)),
        ("decoder.layers.4.mlp.experts.experts.linear_fc1.weight", (11,)),
    ],
)
def test_names_and_back(key: str, place: tuple[int, ...]) -> None:
    name = names.named(key, place)
    keys = [key, "decoder.layers.3.mlp.router.weight", "decoder.layers.mlp.linear_fc1.weight"]
    assert names.keys_of([name, "a.b"], keys) == ({key: {place: name}}, ["a.b"])


def test_groups_of_the_next_run(tmp_path: Path, zckpt: Callable[..., Any]) -> None:
    """--group-defaults replaces values by which Megatron-Core 0.19 finds groups."""
    given = ["--group-defaults", "max_lr=0.003,min_lr=0.0001", "--group-defaults", "1:lr=0.5"]
    assert zckpt("reshard", SOURCE, tmp_path / "new", *given).code == 0
    groups = [dict(group) for group in package.read(tmp_path / "new").groups or ()]
    assert [(g["max_lr"], g["min_lr"], g["lr"]) for g in groups] == [
        (0.003, 0.0001, 0.01),
        (0.003, 0.0001, 0.5),
    ]
    before = package.read(SOURCE).groups or ()
    replaced = {"max_lr", "min_lr", "lr"}
    for old, new in zip(before, groups, strict=True):
        assert {k: v for k, v in old.items() if k not in replaced} == {
            k: v for k, v in new.items() if k not in replaced
        }
    ended = zckpt("reshard", SOURCE, tmp_path / "other", "--group-defaults", "max_rl=1")
    assert ended.code == 2
    assert "max_rl" in ended.err
    assert "max_lr" in ended.err
    ended = zckpt("reshard", SOURCE, tmp_path / "other", "--weights-only", *given)
    assert ended.code == 2


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        (["--tp", "2"], 16),  # nothing states more
        (["--tp", "3"], 12),  # of the 11 rows that are used
        (["--tp", "4", "--vocab-size", "17"], 20),
        (["--vocab-size", "12"], 12),
    ],
)
def test_rows_of_a_padded_vocabulary(
    tmp_path: Path, zckpt: Callable[..., Any], options: list[str], rows: int
) -> None:
    ended = zckpt("reshard", SOURCE, tmp_path / "new", *options)
    assert ended.code == 0, ended.err
    key = "embedding.word_embeddings.weight"
    before, after = loaded(SOURCE / ITERATION), loaded(tmp_path / "new" / ITERATION)
    for prefix in (
        "",
        *(f"optimizer.state.{slot}." for slot in ("param", "exp_avg", "exp_avg_sq")),
    ):
        old, new = before[prefix + key], after[prefix + key]
        both = min(len(old), rows)
        assert len(new) == rows
        assert torch.equal(new[:both], old[:both])
        assert new[both:].eq(0).all()
    common = torch.load(tmp_path / "new" / ITERATION / "common.pt", weights_only=False)
    assert common["args"].padded_vocab_size == rows
    assert package.verify(tmp_path / "new")["equal"]


def test_rows_by_the_arguments() -> None:
    """As Megatron-LM rounds up: to --make-vocab-size-divisible-by times the tensor ranks."""
    source = package.read(SOURCE)
    kept = source.state["megatron"]
    args = kept["common"]["args"]
    stated = replace(args, state={**args.state, "make_vocab_size_divisible_by": 8})
    common = {**kept["common"], "args": stated}
    source = replace(source, state={"megatron": {**kept, "common": common}})
    for tp, rows in ((1, 16), (2, 16), (3, 24)):
        wanted = for_tensor_ranks(source, Options(((TP, tp),)))
        assert wanted.parameters["embedding.word_embeddings.weight"].shape[0] == rows
    vocabulary = {**kept, "vocabulary": {"rows": 16, "used": None}}
    with pytest.raises(
        errors.MissingData, match="cannot be divided evenly among 3 tensor ranks"
    ) as caught:
        for_tensor_ranks(replace(source, state={"megatron": vocabulary}), Options(((TP, 3),)))
    assert "--vocab-size" in (caught.value.hint or "")
    with pytest.raises(errors.WrongOption, match="less than the 11 rows"):
        for_tensor_ranks(source, Options(((VOCAB_SIZE, 10),)))
    with pytest.raises(errors.WrongOption, match="--like decides how many rows"):
        for_tensor_ranks(source, Options(((VOCAB_SIZE, 12), (LIKE, "run"))))


class TestExperts:
    """The list of optimizers that a run with another `--ep` expects."""

    DENSE = ({**GROUP, "is_expert_parallel": False}, {**GROUP, "wd_mult": 0.0})

    def _optimizers(self, optimizer: Any, ep: int | None, *, grouped: bool = True) -> Any:
        shape = (2, 2)
        parameters = {
            name: Parameter(shape, group=number if grouped else None, step=3)
            for number, name in enumerate(["mlp.experts.local_experts.0.weight", "a.bias"])
        }
        source = replace(package.read(SOURCE), parameters=parameters)
        given = Options(() if ep is None else ((EP, ep),))
        return optimizers.optimizers(source, {"optimizer": optimizer}, given)

    def _plain(self) -> dict[str, Any]:
        return {"optimizer": {"param_groups": [dict(group) for group in self.DENSE]}}

    def test_spread_and_joined(self) -> None:
        spread = self._optimizers(self._plain(), 4)
        assert list(spread) == [0, 1]
        assert spread[0]["optimizer"]["param_groups"] == [{**g, "step": 3} for g in self.DENSE]
        expected = [{**GROUP, "is_expert_parallel": True, "step": 3}]
        assert spread[1]["optimizer"]["param_groups"] == expected
        assert self._optimizers(spread, None) == spread
        joined = self._optimizers(spread, 1)
        assert joined == self._optimizers(self._plain(), None)
        assert joined["param_state_sharding_type"] == "fully_reshardable"

    def test_groups_without_members_are_not_spread(self) -> None:
        with pytest.raises(errors.UnsupportedCheckpoint, match="in which group the experts are"):
            self._optimizers(self._plain(), 2, grouped=False)

    def test_experts_beside_a_decoupled_rate(self) -> None:
        """Since 0.16 only `max_lr` tells the groups of --decoupled-lr from the others."""
        spread = self._optimizers(self._plain(), 2)
        groups = spread[0]["optimizer"]["param_groups"]
        groups.append({**groups[0], "max_lr": 0.003})
        joined = self._optimizers(spread, 1)
        assert joined["optimizer"]["param_groups"] == groups

    def test_experts_of_another_learning_rate_are_not_joined(self) -> None:
        spread = self._optimizers(self._plain(), 2)
        spread[1]["optimizer"]["param_groups"][0]["lr"] = 0.5
        with pytest.raises(errors.InconsistentCheckpoint, match="hyper-parameters differ: lr"):
            self._optimizers(spread, 1)


def test_group_defaults_that_are_taken_are_not_called_unused(
    tmp_path: Path, zckpt: Callable[..., Any]
) -> None:
    words = ("--group-defaults", "max_lr=0.003", "--json")
    ended = zckpt("reshard", SOURCE, tmp_path / "new", *words)
    assert not any("is not used" in line for line in texts(ended.document["warnings"]))
    common = torch.load(tmp_path / "new" / ITERATION / "common.pt", weights_only=False)
    assert {group["max_lr"] for group in common["optimizer"]["optimizer"]["param_groups"]} == {
        0.003
    }


def test_sizes_of_the_run_stand_in_its_arguments(tmp_path: Path, zckpt: Callable[..., Any]) -> None:
    """Tensors are the same at any sizes; Megatron-LM can take the sizes from the checkpoint."""
    old, new = SOURCE, tmp_path / "new"
    ended = zckpt("reshard", old, new, "--dp", "3", "--pp", "2", "--tp", "1", "--json")
    assert "run of other sizes" in str(ended.document["left_out"])  # random states
    args, before = (
        vars(torch.load(run / ITERATION / "common.pt", weights_only=False)["args"])
        for run in (new, old)
    )
    sizes = {
        "data_parallel_size": 3,
        "pipeline_model_parallel_size": 2,
        "tensor_model_parallel_size": 1,
        "no_save_rng": True,
    }
    assert args == before | sizes
    assert zckpt("verify", new, "--against", old).code == 0
    assert zckpt("inspect", new, "--json").document["dp"] == 3
