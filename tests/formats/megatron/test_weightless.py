"""Directories of torch_dist without weights, or without an iteration: read, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zckpt as package
from zckpt import errors

from ...conftest import Result, texts
from ...engines import megatron
from .test_read import DATA, ITERATION, copied

Program = Callable[..., Result]
WEIGHTS = r"(decoder|embedding|output_layer)\..*"
MASTERS = r"optimizer\.state\.param\..*"
SAVED = [
    megatron.case("states_dp2", world=2, saved="states"),
    megatron.case("states_tp2", world=2, tp=2, saved="states", distributed=False),
    megatron.case("states_fp32", saved="states", distributed=False, bf16=False, adam="torch"),
    megatron.case("states_buckets", world=2, saved="states", sharding=megatron.BUCKETS),
    megatron.case("counters", saved="counters"),
    megatron.case("library", saved="library"),
    megatron.case("like"),
]

pytestmark = pytest.mark.filterwarnings("ignore")


def test_an_optimizer_alone_is_read_by_its_masters(tmp_path: Path, zckpt: Program) -> None:
    source = tmp_path / "states"
    manifest = copied(DATA / ITERATION, source, WEIGHTS)
    assert any("fp32 masters as its weights" in line for line in texts(manifest.notices.warnings))
    whole = package.read(DATA)
    known = {name: each.shape for name, each in whole.parameters.items()}
    assert {name: each.shape for name, each in manifest.parameters.items()} == known
    assert (manifest.step, manifest.groups) == (3, whole.groups)
    expected = load_file(DATA / "expected.safetensors")
    for entry in manifest.entries.values():
        if entry.slot != "state":
            name = entry.name
            assert torch.equal(package.load(source, name), expected[name]), name
    assert {entry.slot for entry in manifest.entries.values()} >= {"master", "exp_avg"}
    assert zckpt("verify", source, "--against", DATA, "--tensors", "*/master").code == 0
    assert zckpt("convert", source, tmp_path / "weights", "--weights-only").code == 0
    weights = load_file(tmp_path / "weights" / "model.safetensors")
    assert weights.keys() == {name.rpartition("/")[0] for name in expected}
    assert all(torch.equal(weights[name], expected[f"{name}/master"]) for name in weights)
    refused = zckpt("reshard", source, tmp_path / "new")
    assert (refused.code, "--like RUN" in refused.err) == (1, True)


@pytest.mark.parametrize(
    ("without", "what"),
    [
        (f"{WEIGHTS}|{MASTERS}", r"only exp_avg of an optimizer, exp_avg_sq of an optimizer, d"),
        (f"{WEIGHTS}|optimizer.*", "neither the weights of a model nor fp32 masters, only"),
    ],
)
def test_what_is_there_instead_is_said(without: str, what: str, tmp_path: Path) -> None:
    """Nothing is damaged: another copy would not help."""
    with pytest.raises(errors.MissingData, match=what) as caught:
        copied(DATA / ITERATION, tmp_path / "states", without)
    assert "another copy" not in caught.value.hint


def test_the_user_states_an_iteration(tmp_path: Path, zckpt: Program) -> None:
    """A program of its own saved the items with the library: no counter, another folder's name."""
    source = tmp_path / "saved"
    copied(DATA / ITERATION, source, "iteration")
    refused = zckpt("reshard", source, tmp_path / "new")
    assert refused.code == 1
    assert "does not state its iteration" in refused.err
    assert "--step-policy N" in refused.err
    done = zckpt("reshard", source, tmp_path / "new", "--step-policy", "5", "--json")
    assert (done.code, done.document["warnings"], done.document["step"]) == (0, [], 3)
    assert (tmp_path / "new" / "latest_checkpointed_iteration.txt").read_text() == "5"
    common = torch.load(tmp_path / "new" / "iter_0000005" / "common.pt", weights_only=False)
    assert common["iteration"] == 5
    again = zckpt("reshard", tmp_path / "new", tmp_path / "other", "--step-policy", "7", "--json")
    assert "--step-policy 7 is not used: all stored steps are 3" in texts(
        again.document["warnings"]
    )
    assert (tmp_path / "other" / "iter_0000005").is_dir()


# -- the engine's own


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weightless")
    megatron.train(SAVED, root)
    return root


def resumed(source: dict[str, Any], saved: Path, target: Path, root: Path) -> list[str]:
    """The tensors that a run on two tensor ranks, which loads `target`, holds otherwise."""
    root.mkdir()
    model = {key: source[key] for key in megatron.MODEL}
    case = megatron.case("loaded", **{**model, "world": 2, "tp": 2, "load": str(target)})
    megatron.train([case], root)
    before, _ = megatron.expected(saved / source["name"])
    after, steps = megatron.expected(root / "loaded")
    assert (steps, after.keys()) == ({3}, before.keys())
    return [name for name, tensor in before.items() if not torch.equal(after[name], tensor)]


@pytest.mark.engines
@pytest.mark.parametrize("source", SAVED[:2], ids=lambda case: str(case["name"]))
def test_megatron_resumes_from_an_optimizer_alone(
    source: dict[str, Any], saved: Path, tmp_path: Path
) -> None:
    run, universal = saved / source["name"], tmp_path / "universal"
    package.convert(run, tmp_path / "new", to="megatron", like=saved / "like")
    assert resumed(source, saved, tmp_path / "new", tmp_path / "loaded") == []
    package.convert(run, universal)
    assert package.verify(run, universal, gather=True, device="cpu")["equal"]


@pytest.mark.engines
@pytest.mark.parametrize(
    ("name", "error", "what"),
    [
        ("states_fp32", errors.MissingData, "only exp_avg of an optimizer, exp_avg_sq of"),
        ("states_buckets", errors.UnsupportedCheckpoint, "flat buffers"),
        ("counters", errors.MissingData, "nor fp32 masters, only rng_state"),
    ],
)
def test_other_saves_without_weights(
    name: str, error: type[errors.ZckptError], what: str, saved: Path
) -> None:
    with pytest.raises(error, match=what):
        package.read(saved / name)
    with pytest.raises(error, match=what):
        package.read(saved / name, weights_only=True)


@pytest.mark.engines
def test_megatron_resumes_from_a_save_of_the_library(saved: Path, tmp_path: Path) -> None:
    (case,) = (each for each in SAVED if each["name"] == "library")
    source = (saved / "library" / "iter_0000003").rename(saved / "library" / "saved")
    package.reshard(source, tmp_path / "new", step_policy="5")
    assert resumed(case, saved, tmp_path / "new", tmp_path / "loaded") == []
