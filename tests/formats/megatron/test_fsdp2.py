"""Megatron-Core with torch's FSDP2: rows of gated layers are those of the module.

The engine's own ranks say what they held, and which of their files they load.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.core.checkpoint.entries import key_of
from zckpt.core.checkpoint.inert import Foreign
from zckpt.core.passes import loading
from zckpt.core.storage.fragments import Extent
from zckpt.errors import UnsupportedCheckpoint
from zckpt.formats.megatron import fsdp2
from zckpt.formats.statedict.tree import TensorPiece

from ...conftest import ROOT, Result, texts
from ...engines import megatron

COMMON: dict[str, Any] = {"fsdp2": True, "tied": False, "adam": "torch"}
ONE, TWO = (megatron.case(f"on_{n}", world=n, bf16=False, **COMMON) for n in (1, 2))
CASES = [
    ONE,
    TWO,
    megatron.case("bf16", world=2, **COMMON),
    megatron.case("tp2", world=4, tp=2, bf16=False, **COMMON),
    megatron.case("without_gate", world=2, gated=False, bf16=False, **COMMON),
]
BY_COLUMNS = ("linear_fc2.weight", "linear_proj.weight")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fsdp2")
    megatron.train(CASES, root)
    return root


def held(run: Path) -> dict[str, torch.Tensor]:
    """What all ranks held, their slices joined as Megatron-Core cuts layers."""
    ranks = [torch.load(file, weights_only=True) for file in sorted(run.glob("oracle-*.pt"))]
    whole = {}
    for name, first in ranks[0].items():
        slices = [rank[name] for rank in ranks]
        if len(slices) > 1 and "linear_fc1" in name:
            halves = [part.chunk(2) for part in slices]
            slices = [half[side] for side in (0, 1) for half in halves]
        elif all(torch.equal(part, first) for part in slices):
            slices = [first]
        axis = int(name.rpartition("/")[0].endswith(BY_COLUMNS))
        whole[name] = torch.cat(slices, axis)
    return whole


@pytest.mark.engines
@pytest.mark.parametrize("name", [case["name"] for case in CASES])
def test_rows_are_those_of_the_module(runs: Path, tmp_path: Path, name: str) -> None:
    manifest = zckpt.read(runs / name)
    expected = held(runs / name)
    different = [
        key
        for key, tensor in expected.items()
        if not torch.equal(
            loading.as_torch(manifest.entries[key_of(key)], manifest.files.records), tensor
        )
    ]
    assert different == []
    interleaved = name not in ("on_1", "without_gate")
    assert any("interleaves" in line for line in texts(manifest.notices.warnings)) == interleaved
    zckpt.convert(runs / name, tmp_path / "dcp", to="dcp")
    report = zckpt.verify(runs / name, tmp_path / "dcp", gather=True, device="cpu")
    assert report["equal"], report["differences"][:2]


@pytest.mark.engines
def test_runs_of_one_and_of_two_ranks_are_equal(runs: Path) -> None:
    one, two = held(runs / "on_1"), held(runs / "on_2")
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    assert zckpt.verify(runs / "on_1", runs / "on_2")["equal"]


@pytest.mark.engines
def test_the_engine_loads_it_rightly_at_the_same_size_alone(runs: Path, tmp_path: Path) -> None:
    loads = [{**case, "load": str(runs / "on_2")} for case in (ONE, TWO)]
    megatron.train(loads, tmp_path)
    expected = held(runs / "on_2")
    wrong = {}
    for case in loads:
        loaded = held(tmp_path / case["name"])
        wrong[case["name"]] = {
            name.split("/")[0] for name in expected if not torch.equal(loaded[name], expected[name])
        }
    layers = range(TWO["sizes"][0])
    gated = {f"decoder.layers.{layer}.mlp.linear_fc1.weight" for layer in layers}
    assert wrong == {"on_1": gated, "on_2": set()}


@pytest.mark.engines
def test_another_size_is_refused(runs: Path, tmp_path: Path, zckpt: Any) -> None:
    run, universal = runs / "on_2", tmp_path / "universal"
    assert zckpt("check", run, "--dp", "2").code == 0
    for options in (("--dp", "4"), ("--dp", "2", "--tp", "2")):
        assert zckpt("check", run, *options).code == 3
        ended: Result = zckpt("auto-resume", run, *options)
        assert (ended.code, "torch's FSDP2" in ended.err) == (1, True)
    assert zckpt("auto-resume", run, "--dp", "2").code == 0
    assert zckpt("convert", run, universal).code == 0
    for words in (
        ("reshard", run, tmp_path / "out", "--dp", "1"),
        ("reshard", run, tmp_path / "out", "--weights-only"),
        ("reshard", universal, tmp_path / "out"),
        ("convert", universal, tmp_path / "out", "--to", "megatron"),
    ):
        ended = zckpt(*words)
        assert (ended.code, "torch's FSDP2" in ended.err) == (1, True), words
    plain = tmp_path / "plain"
    assert zckpt("reshard", runs / "without_gate", plain, "--dp", "4").code == 0


# -- without the engine


def pieces(tp: int, dp: int) -> list[TensorPiece]:
    """The pieces of a layer of 2 rows for each, in the order of the file's rows."""
    extent = Extent("file", 0, 8)
    return [
        TensorPiece((2 * number, 0), (2, 1), (1, 1), number, extent)
        for number in range(2 * tp * dp)
    ]


@pytest.mark.parametrize(("tp", "dp"), itertools.product((1, 2, 3), (1, 2, 3, 4)))
def test_order_of_pieces(tp: int, dp: int) -> None:
    """By the way of the rows: tensor ranks cut both halves, FSDP2 cuts that, the writer halves."""
    blocks = list(range(2 * tp * dp))  # of the module's [gate; up]
    firsts, seconds = [], []
    for rank in range(tp):
        of_gate, of_up = (blocks[(half * tp + rank) * dp :][:dp] for half in (0, 1))
        rows = of_gate + of_up
        for data_rank in range(dp):
            first, second = rows[2 * data_rank : 2 * data_rank + 2]
            firsts.append(first)
            seconds.append(second)
    args = {
        "use_torch_fsdp2": True,
        "swiglu": True,
        "tensor_model_parallel_size": tp,
        "data_parallel_size": dp,
    }
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    ordered = fsdp2.in_order("run", name, pieces(tp, dp), args)
    if dp == 1:
        assert ordered == pieces(tp, dp)  # as without FSDP2
    assert [piece.offsets[0] // 2 for piece in ordered] == firsts + seconds
    assert fsdp2.in_order("run", name, pieces(tp, dp), {**args, "swiglu": False}) == pieces(tp, dp)
    other = "decoder.layers.0.mlp.linear_fc2.weight"
    assert fsdp2.in_order("run", other, pieces(tp, dp), args) == pieces(tp, dp)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("decoder.layers.0.mlp.linear_fc1.weight", pieces(1, 3)),
        ("decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight", pieces(1, 2)),
    ],
)
def test_pieces_that_are_not_understood_are_refused(name: str, parts: list[TensorPiece]) -> None:
    args = {"use_torch_fsdp2": True, "swiglu": True, "data_parallel_size": 2}
    with pytest.raises(
        UnsupportedCheckpoint, match=r"in . shards: Megatron-Core with torch's FSDP2"
    ):
        fsdp2.in_order("run", name, parts, args)


def test_a_universal_checkpoint_of_such_a_run_is_not_written_for_megatron() -> None:
    manifest = zckpt.read(ROOT / "tests" / "data" / "megatron-0.16.1-tp2")
    common = manifest.state["megatron"]["common"]
    args = common["args"]
    assert isinstance(args, Foreign)
    assert isinstance(args.state, dict)
    assert not fsdp2.is_interleaved(args.state)
    fsdp2.refuse_target("run", args.state)
    with pytest.raises(
        UnsupportedCheckpoint, match="zckpt cannot write run as Megatron-Core files"
    ):
        fsdp2.refuse_target("run", {**args.state, "use_torch_fsdp2": True, "swiglu": True})
