"""Flat buffers and fragments: `dp_zero_gather_scatter`, 0.13, and the older kind of directories."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zckpt as package
from zckpt import errors
from zckpt.core.storage.fragments import Extent, Fragment, Runs
from zckpt.formats.megatron.buffers.flats import read_bytes
from zckpt.formats.megatron.buffers.order import expert_of, orders
from zckpt.formats.megatron.buffers.placing import Flat, Local, places
from zckpt.formats.megatron.buffers.stages import ModelRank, placed

from ...conftest import ROOT

DATA = ROOT / "tests" / "data"
EXPECTED = DATA / "megatron-0.16.1-tp2" / "expected.safetensors"
ITERATION = "iter_0000003"
RANKS = ("mp_rank_00", "mp_rank_01")
Change = Callable[[dict[Any, Any]], object]


@pytest.fixture
def legacy(tmp_path: Path) -> Path:
    shutil.copytree(DATA / "megatron-0.16.1-legacy-tp2" / ITERATION, tmp_path / "run" / ITERATION)
    return tmp_path / "run" / ITERATION


def _changed(folder: Path, change: Change, file: str = "model_optim_rng.pt") -> None:
    """Writes a file of every rank again."""
    for rank in RANKS:
        value = torch.load(folder / rank / file, weights_only=False)
        change(value)
        torch.save(value, folder / rank / file)


@pytest.mark.parametrize("kind", ["0.16.1-legacy", "0.16.1-buffers", "0.13.1"])
def test_tensors_are_the_optimizers(tmp_path: Path, zckpt: Callable[..., Any], kind: str) -> None:
    """The same training as that of the other directory, saved in other forms."""
    source = DATA / f"megatron-{kind}-tp2" / ITERATION
    assert zckpt("convert", source, tmp_path / "out").code == 0
    expected = load_file(EXPECTED)
    files = {"param": "model", "master": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    read = {
        f"{name}/{slot}": tensor
        for slot, file in files.items()
        for name, tensor in load_file(tmp_path / "out" / f"{file}.safetensors").items()
    }
    assert read.keys() == expected.keys()
    assert [name for name in read if not torch.equal(read[name], expected[name])] == []
    manifest = package.read(source)
    assert manifest.step == 3
    assert manifest.groups is not None
    assert [group["wd_mult"] for group in manifest.groups] == [1.0, 0.0]
    assert "rng_state/shard_0.1_1.2" in manifest.state["megatron"]["objects"]
    assert zckpt("verify", source).code == 0


def _in_chunks(value: dict[Any, Any]) -> None:
    """The second layer comes into a chunk of its own, where its number is 0, with what follows."""
    chunks: list[dict[str, Any]] = [{}, {}]
    for name, tensor in value.pop("model").items():
        behind = ".layers.1." in name or "final" in name or name.startswith("output_layer")
        chunks[behind][name.replace(".layers.1.", ".layers.0.")] = tensor
    value["model0"], value["model1"] = chunks


def _old_rows(value: dict[Any, Any]) -> None:
    value["checkpoint_version"] = 1.0


def _shared_groups(value: dict[Any, Any]) -> None:
    value["args"].num_query_groups = 1


def _of_muon(value: dict[Any, Any]) -> None:
    value["args"].use_layer_wise_distributed_optimizer = True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_old_rows, "order of rows"),
        (_of_muon, "states of Muon"),
        (_shared_groups, "1 query group on 2 tensor ranks"),
    ],
)
def test_other_models_are_refused(legacy: Path, change: Change, message: str) -> None:
    _changed(legacy, change)
    with pytest.raises(errors.UnsupportedCheckpoint, match=message):
        package.read(legacy)


def test_layers_go_through_the_chunks(legacy: Path, tmp_path: Path) -> None:
    """Weights alone: Megatron-Core would have a buffer for each chunk."""
    package.convert(legacy, tmp_path / "one", weights_only=True)
    _changed(legacy, _in_chunks)
    package.convert(legacy, tmp_path / "two", weights_only=True)
    assert package.verify(tmp_path / "two", tmp_path / "one")["equal"]
    with pytest.raises(errors.UnsupportedCheckpoint, match="which layers are in buffer 0"):
        package.read(legacy)


def test_ranks_with_other_chunks(legacy: Path) -> None:
    first, *_ = sorted(legacy.rglob("model_optim_rng.pt"))
    value = torch.load(first, weights_only=False)
    _in_chunks(value)
    torch.save(value, first)
    with pytest.raises(errors.InconsistentCheckpoint, match="has 1 model chunk, but"):
        package.read(legacy)


def test_names_of_transformer_engine(legacy: Path, zckpt: Callable[..., Any]) -> None:
    """Its linear modules have the norms, which are called as those of other directories."""

    def change(value: dict[Any, Any]) -> None:
        fused = {
            "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
            "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
        }
        for plain, other in fused.items():
            value["model"] = {
                key.replace(plain, other): item for key, item in value["model"].items()
            }

    _changed(legacy, change)
    other = DATA / "megatron-0.16.1-tp2" / ITERATION
    assert zckpt("verify", legacy, "--against", other, "--tensors", "*").code == 0


def _without_items(value: dict[Any, Any]) -> None:
    for name in [name for name in value["model"] if name.endswith("_extra_state")]:
        del value["model"][name]


def _with_format(value: dict[Any, Any]) -> None:
    value["args"].ckpt_format = "torch"


@pytest.mark.parametrize("change", [_with_format, _without_items])
def test_keys_are_those_of_the_other_kind(
    legacy: Path, zckpt: Callable[..., Any], tmp_path: Path, change: Change
) -> None:
    """Megatron-Core saved the same training as torch_dist, with all items that its runs need."""
    _changed(legacy, change)
    other = DATA / "megatron-0.16.1-tp2" / ITERATION
    assert zckpt("reshard", legacy, tmp_path / "out").code == 0
    assert zckpt("verify", other, "--against", tmp_path / "out").code == 0
    written = package.read(tmp_path / "out").state["megatron"]
    expected = package.read(other).state["megatron"]
    assert written["keys"] == expected["keys"]
    assert written["objects"] == expected["objects"]
    args = written["common"]["args"].state
    assert args.get("ckpt_format", "torch_dist") == "torch_dist"
    assert zckpt("convert", legacy, tmp_path / "universal").code == 0
    assert zckpt("reshard", tmp_path / "universal", tmp_path / "again").code == 0
    assert package.read(tmp_path / "again").state["megatron"]["objects"] == expected["objects"]


def _with_another_norm(value: dict[Any, Any]) -> None:
    value["model"]["decoder.layers.0.mlp.own_layernorm.weight"] = torch.zeros(4)


def _with_uneven_layers(value: dict[Any, Any]) -> None:
    value["model"]["decoder.layers.0.mlp.linear_fc2.bias"] = torch.zeros(8)


def _fused_without_items(value: dict[Any, Any]) -> None:
    _without_items(value)
    model = value["model"]
    for name in [name for name in model if ".input_layernorm." in name]:
        fused = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        model[fused] = model.pop(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_with_another_norm, "no Megatron-Core key for decoder.layers.0.mlp.own_layernorm.weight"),
        (_with_uneven_layers, "no Megatron-Core key for decoder.layers.0.mlp.linear_fc2.bias"),
        (_fused_without_items, "source's modules have no _extra_state"),
    ],
)
def test_models_without_keys_of_the_other_kind(
    legacy: Path, tmp_path: Path, change: Change, message: str
) -> None:
    _changed(legacy, change)
    with pytest.raises(errors.MissingData, match=message):
        package.convert(legacy, tmp_path / "out", to="megatron", weights_only=True)


def test_one_group_of_a_model_without_groups(legacy: Path) -> None:
    """Megatron's own default, which says nothing about the model."""

    def change(value: dict[Any, Any]) -> None:
        value["args"].num_query_groups, value["args"].group_query_attention = 1, False

    _changed(legacy, change)
    assert package.read(legacy).step == 3


def test_lost_folders_and_files(legacy: Path) -> None:
    (legacy / RANKS[1] / "distrib_optim.pt").unlink()
    with pytest.raises(errors.IncompleteCheckpoint, match=r"distrib_optim\.pt"):
        package.read(legacy)
    assert package.read(legacy, weights_only=True).step is None
    shutil.rmtree(legacy / RANKS[1])
    with pytest.raises(errors.IncompleteCheckpoint, match=r"lacks mp_rank_01"):
        package.read(legacy)


def test_wrong_masters(legacy: Path, zckpt: Callable[..., Any], tmp_path: Path) -> None:
    """One late element: reading places parameters by their first ones, and `verify` has them all.

    The position embeddings are the last but one in the buffer, before 64 elements.
    """

    def change(value: dict[Any, Any], element: int = -65) -> None:
        (tensors,) = value[0].values()
        tensors["param"][element] += 1

    _changed(legacy, change, "distrib_optim.pt")
    assert package.read(legacy).step == 3
    assert zckpt("verify", legacy).code == 3
    ended = zckpt("convert", legacy, tmp_path / "out", "--masters-from-weights", "--json")
    assert ended.document["error"] == "InconsistentCheckpoint"
    assert "embedding.position_embeddings.weight" in ended.document["message"]
    _changed(legacy, lambda value: change(value, 0), "distrib_optim.pt")
    with pytest.raises(errors.UnsupportedCheckpoint, match="no range of layers has"):
        package.read(legacy)


def test_copies_that_differ(legacy: Path, zckpt: Callable[..., Any], tmp_path: Path) -> None:
    """Tensor rank 1 has another moment of the last norm, which is the first in the buffer."""
    path = legacy / RANKS[1] / "distrib_optim.pt"
    value = torch.load(path, weights_only=False)
    (tensors,) = value[0].values()
    tensors["exp_avg"][0] += 1
    torch.save(value, path)
    ended = zckpt("convert", legacy, tmp_path / "out", "--json")
    assert ended.document["error"] == "InconsistentCheckpoint"
    assert "replicas of decoder.final_layernorm.bias that differ" in ended.document["message"]


# -- the rule that places parameters


class Written:
    """A file of fp32 masters, in which weights are looked up too."""

    def __init__(self, path: Path) -> None:
        self.path, self.values = path, torch.zeros(0)

    def add(self, values: torch.Tensor) -> Extent:
        start = self.values.numel() * 4
        self.values = torch.cat([self.values, values])
        self.path.write_bytes(self.values.numpy().tobytes())
        return Extent(str(self.path), start, values.numel() * 4)

    def local(self, name: str, values: torch.Tensor) -> Local:
        return Local(name, values.numel(), "F32", self.add(values[:64]))

    def flat(self, *buckets: torch.Tensor, coalesced: bool = False) -> Flat:
        runs = [Runs([Fragment(0, len(b), self.add(b))]) for b in buckets]
        sizes = tuple(len(bucket) for bucket in buckets)
        return Flat("buffer", "F32", sizes, {"master": runs}, coalesced)


def _buffer(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Each tensor at a multiple of 64 elements."""
    whole = torch.zeros(0)
    for tensor in tensors:
        whole = torch.cat([whole, torch.full((-len(whole) % 64,), torch.nan), tensor])
    return whole


def test_buckets_without_their_boundaries(tmp_path: Path) -> None:
    """In one tensor, a bucket may begin right behind each parameter: the bytes say where."""
    written = Written(tmp_path / "file")
    tensors = [torch.randn(size) for size in (10, 70, 64, 3)]
    locals_ = [written.local(str(number), tensor) for number, tensor in enumerate(tensors)]
    whole = torch.cat([_buffer(tensors[:2]), _buffer(tensors[2:])])
    flat = written.flat(whole, coalesced=True)
    assert places(locals_, flat, read_bytes) == [((0, 0), (0, 64), (0, 134), (0, 198))]
    apart = written.flat(_buffer(tensors[:2]), _buffer(tensors[2:]))
    assert places(locals_, apart, read_bytes) == [((0, 0), (0, 64), (1, 0), (1, 64))]
    longer = written.flat(torch.cat([whole, torch.zeros(64)]), coalesced=True)
    assert places(locals_, longer, read_bytes) == []


def test_boundaries_that_bytes_do_not_tell(tmp_path: Path) -> None:
    written = Written(tmp_path / "file")
    locals_ = [written.local(str(number), torch.ones(10)) for number in range(2)]
    flat = written.flat(torch.ones(74), coalesced=True)
    assert len(places(locals_, flat, read_bytes)) == 1  # the end is that of the second
    locals_.append(written.local("2", torch.ones(54)))
    assert len(places(locals_, written.flat(torch.ones(128), coalesced=True), read_bytes)) == 2


def _layers(count: int) -> list[str]:
    return [f"decoder.layers.{layer}.mlp.linear_fc2.weight" for layer in range(count)]


@pytest.mark.parametrize("equal", [False, True])
def test_layers_of_stages(tmp_path: Path, equal: bool) -> None:
    """The stages have three layers and one; equal layers may be on either."""
    written = Written(tmp_path / "file")
    tensors = [torch.ones(80) if equal else torch.randn(80) for _ in range(4)]
    parts = {name: written.local(name, t) for name, t in zip(_layers(4), tensors, strict=True)}
    buffers = [written.flat(_buffer(tensors[2::-1])), written.flat(_buffer(tensors[3:]))]
    ranks = [ModelRank(0, stage, (flat,)) for stage, flat in enumerate(buffers)]
    if equal:  # the first stage begins with layer 0, and the last one ends with layer 3
        buffers.insert(1, written.flat(_buffer(tensors[:1])))
        ranks = [ModelRank(0, stage, (flat,)) for stage, flat in enumerate(buffers)]
        with pytest.raises(errors.UnsupportedCheckpoint, match="several positions fit"):
            placed(ranks, [parts], read_bytes, "run")
        return
    (found,) = placed(ranks, [parts], read_bytes, "run")
    starts = [(0, 256), (0, 128), (0, 0), (0, 0)]
    assert found == {
        name: [(buffers[layer // 3], starts[layer])] for layer, name in enumerate(_layers(4))
    }


@pytest.mark.parametrize("coalesced", [False, True])
def test_frozen_parameters(tmp_path: Path, coalesced: bool) -> None:
    """Two stages have two layers each, without the frozen ones 1 and 2."""
    written = Written(tmp_path / "file")
    tensors = [torch.randn(80) for _ in range(5)]
    names = [*_layers(4), "decoder.final_layernorm.weight"]
    parts = {name: written.local(name, t) for name, t in zip(names, tensors, strict=True)}
    first = written.flat(_buffer(tensors[:1]), coalesced=coalesced)
    last = written.flat(_buffer([tensors[4], tensors[3]]), coalesced=coalesced)
    ranks = [ModelRank(0, stage, (flat,)) for stage, flat in enumerate([first, last])]
    (found,) = placed(ranks, [parts], read_bytes, "run")
    assert found == {
        names[0]: [(first, (0, 0))],
        names[4]: [(last, (0, 0))],
        names[3]: [(last, (0, 128))],
    }


def test_frozen_parameters_that_bytes_do_not_tell(tmp_path: Path) -> None:
    """One of three equal layers is frozen: which one is not known."""
    written = Written(tmp_path / "file")
    parts = {name: written.local(name, torch.ones(80)) for name in _layers(3)}
    ranks = [ModelRank(0, 0, (written.flat(_buffer([torch.ones(80)] * 2)),))]
    with pytest.raises(errors.UnsupportedCheckpoint, match="several positions fit"):
        placed(ranks, [parts], read_bytes, "run")


def test_a_changed_weight_is_not_frozen(tmp_path: Path) -> None:
    written = Written(tmp_path / "file")
    tensors = [torch.randn(80) for _ in range(3)]
    parts = {name: written.local(name, t) for name, t in zip(_layers(3), tensors, strict=True)}
    flat = written.flat(_buffer([tensors[2], torch.randn(80), tensors[0]]))
    with pytest.raises(errors.UnsupportedCheckpoint, match="cannot tell which layers"):
        placed([ModelRank(0, 0, (flat,))], [parts], read_bytes, "run")


def test_orders_of_specs() -> None:
    names = [
        "decoder.layers.0.input_layernorm.weight",
        "decoder.layers.0.self_attention.linear_proj.weight",
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight",
        "decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.weight",
        "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight",
    ]
    local, grouped, fused, both = orders(reversed(names))
    assert local == names
    assert grouped == [*names[:4], names[5], names[4]]
    assert fused == [names[1], names[0], *names[2:]]
    assert both == [names[1], names[0], names[2], *grouped[3:]]
    assert list(orders(["decoder.layers.0.mamba.weight"])) == []


def test_order_of_multi_token_prediction() -> None:
    layer = "mtp.layers.0.transformer_layer."
    names = [
        "embedding.word_embeddings.weight",
        "decoder.layers.0.input_layernorm.weight",
        "decoder.final_layernorm.weight",
        "mtp.layers.0.enorm.weight",
        "mtp.layers.0.eh_proj.weight",
        f"{layer}input_layernorm.weight",
        f"{layer}mlp.experts.local_experts.0.linear_fc1.weight",
        "mtp.layers.0.final_layernorm.weight",
        "mtp.layers.1.enorm.weight",
        "output_layer.weight",
    ]
    assert list(orders(reversed(names))) == [names]
    assert expert_of(names[6]) == 0
    assert list(orders([*names, "mtp.layers.0.other.weight"])) == []
