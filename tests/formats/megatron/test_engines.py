"""Megatron-Core as the judge, at every layout: what zckpt reads, and what it writes.

What zckpt reads is what the optimizers held, bit for bit. From what zckpt writes, optimizers of
other sizes get the same state, and the next update makes the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp

import zckpt as package
from zckpt import errors

from ...conftest import texts
from ...engines import megatron
from ...engines.deepspeed import submit

Resumed = tuple[str, dict[str, Any], dict[str, Any]]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("megatron")
    megatron.train([*megatron.TRAINED, megatron.CORRUPT, megatron.CORRUPT_COPY], root)
    return root


@pytest.mark.engines
@pytest.mark.parametrize("name", [case["name"] for case in megatron.TRAINED])
def test_state_is_the_optimizers(
    runs: Path, tmp_path: Path, zckpt: Callable[..., Any], name: str
) -> None:
    compare(runs, tmp_path, zckpt, name)


def compare(runs: Path, tmp_path: Path, zckpt: Callable[..., Any], name: str) -> None:
    expected, steps = megatron.expected(runs / name)
    target = tmp_path / "universal"
    ended = zckpt("convert", runs / name, target, "--json")
    assert ended.code == 0, ended.err
    assert zckpt("verify", runs / name, "--against", target).code == 0
    if name in megatron.WITHOUT_RULE:
        with pytest.raises(errors.UnsupportedCheckpoint, match="--gather has no rule"):
            package.verify(runs / name, target, gather=True, device="cpu")
    else:
        report = package.verify(runs / name, target, gather=True, device="cpu")
        assert report["equal"], report["differences"][:3]
    assert steps == {ended.document["step"]} == {3}
    read = {}
    for slot in ("model", "master", "exp_avg", "exp_avg_sq"):
        file = target / f"{slot}.safetensors"
        if file.exists():
            entry = "param" if slot == "model" else slot
            read |= {f"{key}/{entry}": tensor for key, tensor in load_file(file).items()}
    if name.endswith("not_distributed_fp32"):  # the weights are the masters
        assert not any(key.endswith("/master") for key in read)
        read |= {f"{key[:-6]}/master": read[key] for key in list(read) if key.endswith("/param")}
    assert read.keys() == expected.keys()
    different = [key for key in expected if not _same(expected[key], read[key])]
    assert different == []


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


@pytest.mark.engines
def test_corruption_is_found(runs: Path, tmp_path: Path, zckpt: Callable[..., Any]) -> None:
    """Megatron-Core's file of several buckets has other masters than its optimizer had."""
    source, target = runs / "corrupt", tmp_path / "target"
    ended = zckpt("convert", source, target, "--json")
    assert ended.code == 1
    assert ended.document["error"] == "InconsistentCheckpoint"
    assert ended.document["message"].startswith("32 weights of ")
    assert "decoder.layers.0.mlp.linear_fc2.weight" in ended.document["message"]
    assert not target.exists()
    ended = zckpt("verify", source, "--json")
    assert ended.code == 3
    assert len(ended.document["differences"]) == 32
    assert zckpt("convert", source, target, "--weights-only").code == 0
    expected, _ = megatron.expected(source)
    weights = load_file(target / "model.safetensors")
    assert all(_same(expected[f"{name}/param"], tensor) for name, tensor in weights.items())
    assert len(weights) == 36


@pytest.mark.engines
def test_corruption_without_overlap_is_found(
    runs: Path, tmp_path: Path, zckpt: Callable[..., Any]
) -> None:
    """One copy of a tied embedding suffices: its bucket has padding at its end."""
    ended = zckpt("verify", runs / "corrupt_copy", "--json")
    assert ended.code == 3
    wrong = {item["tensor"].rpartition("/")[0] for item in ended.document["differences"]}
    of_stage = {
        name
        for name in package.read(runs / "corrupt_copy").parameters
        if name.startswith(("decoder.layers.2.", "decoder.layers.3.", "decoder.final"))
    }
    assert wrong <= of_stage
    assert len(wrong) > len(of_stage) // 2
    assert zckpt("reshard", runs / "corrupt_copy", tmp_path / "target").code == 1


@pytest.mark.engines
def test_rebuilt_masters_resume(runs: Path, tmp_path: Path) -> None:
    """Megatron-Core loads widened weights for masters, and zeros for the moments beside them."""
    package.reshard(runs / "corrupt", tmp_path / "new", masters_from_weights=True)
    resumed: Resumed = ("corrupt", {}, {"world": 2})
    (tmp_path / "loaded").mkdir()
    megatron.train([megatron.loading(resumed, tmp_path / "new")], tmp_path / "loaded")
    before, _ = megatron.expected(runs / "corrupt")
    after, steps = megatron.expected(tmp_path / "loaded" / megatron.name_of(resumed))
    assert steps == {3}
    assert after.keys() == before.keys()
    names = [key.rpartition("/")[0] for key in before if key.endswith("/param")]
    lost = [name for name in names if after[f"{name}/exp_avg"].eq(0).all()]
    assert len(lost) == 34
    for name in names:
        if name in lost:
            assert torch.equal(after[f"{name}/master"], before[f"{name}/param"].float())
            assert after[f"{name}/exp_avg_sq"].eq(0).all()
        else:
            keys = [key for key in before if key.startswith(f"{name}/")]
            assert [key for key in keys if not _same(before[key], after[key])] == []


@pytest.mark.engines
def test_corrupt_masters_are_rebuilt(runs: Path, tmp_path: Path, zckpt: Callable[..., Any]) -> None:
    """What is left of the states is the optimizer's, and the other masters are the weights."""
    source, target = runs / "corrupt", tmp_path / "target"
    ended = zckpt("convert", source, target, "--masters-from-weights", "--json")
    assert ended.code == 0, ended.err
    expected, _ = megatron.expected(source)
    moments = load_file(target / "exp_avg.safetensors")
    assert len(moments) == 2
    lost = {name.rpartition("/")[0] for name in expected} - moments.keys()
    named = next(line for line in texts(ended.document["warnings"]) if "makes new masters" in line)
    assert all(name in named for name in lost)
    assert not any(name in named for name in moments)
    for slot in ("exp_avg", "exp_avg_sq", "master"):
        read = load_file(target / f"{slot}.safetensors")
        assert read.keys() == moments.keys()
        assert all(_same(expected[f"{name}/{slot}"], read[name]) for name in read)
    whole = tmp_path / "whole"
    assert zckpt("convert", target, whole, "--to", "dcp", "--dtype", "fp32").code == 0
    tensors = {f"model.{name}": expected[f"{name}/param"].float() for name in lost}
    into = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    dcp.load(into, checkpoint_id=whole, no_dist=True)
    assert all(torch.equal(into[key], tensors[key]) for key in tensors)


@pytest.mark.engines
@pytest.mark.parametrize("name", ["tp2_pp2", "buckets_moe_ep2_dp4", "legacy_tp2_pp2"])
def test_fsdp2_loads_it(runs: Path, tmp_path: Path, name: str) -> None:
    """A program of FSDP2 on two ranks reads what Megatron-Core saved, optimizer included."""
    expected, _ = megatron.expected(runs / name)
    parameters = package.read(runs / name).parameters
    names = [(key, each.shape, each.group) for key, each in parameters.items()]
    submit("grid_fsdp", "load", 2, (runs / name, None, names, tmp_path / "held.pt"), tmp_path)
    loaded = torch.load(tmp_path / "held.pt", weights_only=False)
    assert {*loaded["rates"]} == {0.01}
    states = loaded["tensors"]
    steps = [states.pop(key) for key in [*states] if key.endswith("/step")]
    assert {float(step) for step in steps} == {3}
    assert states.keys() == {key for key in expected if not key.endswith("/param")}
    assert [key for key in states if not _same(states[key], expected[key])] == []


def resume(cases: list[Resumed], runs: Path, root: Path, version: str = megatron.VERSION) -> Path:
    """Writes and loads every case; returns the folder of the runs that loaded."""
    (root / "loaded").mkdir()
    loading = []
    for resumed in cases:
        source, options, _ = resumed
        target = root / megatron.name_of((source, options, {}))
        if not target.exists():
            package.convert(runs / source, target, to="megatron", **options)
        loading.append(megatron.loading(resumed, target))
    megatron.train(loading, root / "loaded", version)
    return root / "loaded"


@pytest.fixture(scope="session")
def loaded(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resume(megatron.RESUMED, runs, tmp_path_factory.mktemp("resumed"))


@pytest.fixture(scope="session")
def more_loaded(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resume(megatron.MORE_RESUMED, runs, tmp_path_factory.mktemp("resumed"))


@pytest.mark.engines
@pytest.mark.parametrize("resumed", megatron.RESUMED, ids=megatron.name_of)
def test_runs_resume(runs: Path, loaded: Path, resumed: Resumed) -> None:
    assert_resumed(runs / resumed[0], loaded, resumed)


@pytest.mark.matrix
@pytest.mark.parametrize("resumed", megatron.MORE_RESUMED, ids=megatron.name_of)
def test_more_runs_resume(runs: Path, more_loaded: Path, resumed: Resumed) -> None:
    assert_resumed(runs / resumed[0], more_loaded, resumed)


@pytest.mark.matrix
def test_folders_of_ranks_do_not_depend_on_dp(runs: Path, tmp_path: Path) -> None:
    """Megatron-Core loads them at another dp as they are: there is nothing to convert."""
    cases = [megatron.loading(each, runs / each[0]) for each in megatron.LEGACY_LOADED]
    megatron.train(cases, tmp_path)
    for each in megatron.LEGACY_LOADED:
        assert_resumed(runs / each[0], tmp_path, each)


def assert_resumed(source: Path, loaded: Path, resumed: Resumed) -> None:
    """All ranks hold the source's state; and after one more update that of the source's ranks."""
    expected, steps = megatron.expected(source)
    state, loaded_steps = megatron.expected(loaded / megatron.name_of(resumed))
    assert loaded_steps == steps == {3}
    assert state.keys() == expected.keys()
    assert [key for key in expected if not _same(expected[key], state[key])] == []
    expected, steps = megatron.expected(source, "next")
    state, loaded_steps = megatron.expected(loaded / megatron.name_of(resumed), "next")
    assert loaded_steps == steps == {4}
    if "adam" in resumed[2]:  # another Adam, which adds in another order
        for key, tensor in expected.items():
            torch.testing.assert_close(state[key], tensor, rtol=1e-2, atol=1e-6)
    else:
        assert [key for key in expected if not _same(expected[key], state[key])] == []


@pytest.mark.matrix
def test_torchs_adam_loads_no_file(runs: Path, tmp_path: Path) -> None:
    """Megatron-Core 0.16.1 does not load its own file either, with torch's Adam."""
    resumed: Resumed = ("tp2_dp2_torch_adam", {}, {"world": 4, "tp": 2})
    with pytest.raises(AssertionError, match="a rank of"):
        megatron.train([megatron.loading(resumed, runs / resumed[0])], tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("rows", [80, 112])
def test_vocabularies_of_other_sizes(runs: Path, tmp_path: Path, rows: int) -> None:
    """Megatron-Core copies the rows that both have, in every slot; the others are zeros."""
    package.convert(runs / "tp2", tmp_path / "target", to="megatron")
    (tmp_path / "loaded").mkdir()
    sizes = [*megatron.SIZES[:-1], rows]
    resumed: Resumed = ("tp2", {}, {"world": 2, "tp": 2, "sizes": sizes})
    megatron.train([megatron.loading(resumed, tmp_path / "target")], tmp_path / "loaded")
    before, _ = megatron.expected(runs / "tp2")
    after, _ = megatron.expected(tmp_path / "loaded" / megatron.name_of(resumed))
    embedding = "embedding.word_embeddings.weight/"
    for key, tensor in before.items():
        shared = min(rows, len(tensor)) if key.startswith(embedding) else len(tensor)
        assert torch.equal(after[key][:shared], tensor[:shared]), key
        assert after[key][shared:].eq(0).all(), key
    assert len(after[f"{embedding}master"]) == rows
