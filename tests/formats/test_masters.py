"""Masters that do not round to their weights end every command that writes, unless accepted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt as package
from zckpt.core.storage.fragments import Fragment
from zckpt.errors import InconsistentCheckpoint, TargetExists

from ..conftest import EXAMPLE, ROOT, Result, texts
from .equality import same_bits

Zckpt = Callable[..., Result]
TRAINER = ROOT / "examples" / "trainer" / "checkpoint-4"
NAME = "model.embed_tokens.weight"
COMMANDS = ["convert", "convert --weights-only", "reshard --dp 3", "export"]


def edit(path: Path, change: Callable[[Any], object]) -> None:
    value = torch.load(path, weights_only=False)
    change(value)
    torch.save(value, path)


def swap_in_average(run: Path) -> None:
    """The weights of a DeepSpeed run are others than it trained, as those of an EMA."""
    (path,) = run.rglob("mp_rank_00_model_states.pt")
    edit(path, lambda model: [weight.mul_(0.5) for weight in model["module"].values()])


@pytest.fixture
def averaged(tmp_path: Path) -> Path:
    run = Path(shutil.copytree(TRAINER, tmp_path / "checkpoint-4"))
    swap_in_average(run)
    return run


def fragments_of(path: Path, run: Path) -> list[Fragment]:
    """The fragments of masters in a rank's file."""
    masters = (item for item in package.read(run).entries.values() if item.slot == "master")
    return [f for item in masters for f in item.fragments if f.extent.file == str(path)]


def test_a_partition_that_begins_no_weight(tmp_path: Path) -> None:
    """A large weight reaches over the partitions of several ranks."""
    run = tmp_path / "run"
    package.reshard(EXAMPLE, run, dp=16)
    files = sorted(run.rglob("*optim_states.pt"))
    inside = [path for path in files if all(f.start for f in fragments_of(path, run))]
    assert 8 < len(inside) < len(files)
    for number in (0, len(inside) // 2, -1):
        path = inside[number]
        before = path.read_bytes()

        def change(states: Any) -> None:
            for master in states["optimizer_state_dict"]["single_partition_of_fp32_groups"]:
                master.add_(1)

        edit(path, change)
        with pytest.raises(InconsistentCheckpoint, match=f"masters are in {path.name},"):
            package.convert(run, tmp_path / "out")
        path.write_bytes(before)
    assert package.convert(run, tmp_path / "out")["warnings"] == []


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_that_writes_ends(
    words: str, averaged: Path, tmp_path: Path, zckpt: Zckpt
) -> None:
    command, *options = words.split()
    target = tmp_path / "out"
    ended = zckpt(command, averaged, target, *options, "--json", "-q")
    assert ended.code == 1
    assert ended.document["error"] == "InconsistentCheckpoint"
    assert "20 weights of" in ended.document["message"]
    assert "--accept-weights" in ended.document["hint"]
    assert "--masters-from-weights" not in ended.document["hint"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]
    ended = zckpt(command, averaged, target, *options, "--accept-weights", "--json")
    assert ended.code == 0
    (warning,) = [line for line in texts(ended.document["warnings"]) if "rounded masters" in line]
    assert "20 weights of" in warning


def test_weights_that_are_accepted_are_kept(averaged: Path, tmp_path: Path) -> None:
    """And so are the masters."""
    package.convert(averaged, tmp_path / "u", accept_weights=True)
    package.reshard(averaged, tmp_path / "run", dp=3, accept_weights=True)
    package.export(averaged, tmp_path / "hf", accept_weights=True)
    averages = package.load(averaged, f"{NAME}/param", accept_weights=True)
    for target in ("u", "run", "hf"):
        weight = package.load(tmp_path / target, f"{NAME}/param", accept_weights=True)
        assert same_bits(weight, averages)
    for target in ("u", "run"):
        master = package.load(tmp_path / target, f"{NAME}/master", accept_weights=True)
        assert same_bits(master, package.load(TRAINER, f"{NAME}/master"))
        assert package.verify(averaged, tmp_path / target)["equal"]
    assert len(package.verify(averaged)["differences"]) == 20


def test_deepspeeds_own_universal_checkpoints(tmp_path: Path) -> None:
    merged = tmp_path / "merged"
    package.convert(EXAMPLE, merged, to="deepspeed-universal")
    assert package.convert(merged, tmp_path / "before")["warnings"] == []
    swap_in_average(merged)
    with pytest.raises(InconsistentCheckpoint, match=r"5 weights of .* zero/.*/fp32.pt"):
        package.convert(merged, tmp_path / "out")
    report = package.convert(merged, tmp_path / "out", accept_weights=True)
    assert ["rounded masters" in line for line in texts(report["warnings"])] == [True]


def test_a_universal_checkpoint_is_of_one_save(averaged: Path, tmp_path: Path) -> None:
    """Its manifest has the checksum of every file, so that nobody is asked twice."""
    package.convert(averaged, tmp_path / "u", accept_weights=True)
    package.convert(tmp_path / "u", tmp_path / "run", to="deepspeed", dp=2, stage=2)
    assert package.verify(averaged, tmp_path / "run")["equal"]


def test_another_choice_is_another_conversion(averaged: Path, tmp_path: Path) -> None:
    package.convert(TRAINER, tmp_path / "out", accept_weights=True, resume=True)
    with pytest.raises(TargetExists, match="with other options"):
        package.convert(TRAINER, tmp_path / "out", resume=True)


QUANTIZED: dict[str, dict[str, Any]] = {
    "up to 0.6": {"quantize_training": {"enabled": True}},
    "since 0.7": {
        "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}
    },
}
IN_FORWARD = {"enabled": True, "quantize_weight_in_forward": True}


@pytest.mark.parametrize("name", QUANTIZED)
def test_weights_that_the_engine_quantized(name: str, averaged: Path, tmp_path: Path) -> None:
    """MoQ of DeepSpeed up to 0.19.6: by its sources, since the tests' release has none."""
    state_config(averaged, QUANTIZED[name])
    report = package.convert(averaged, tmp_path / "out")
    assert ["MoQ" in line for line in texts(report["warnings"])] == [True]


def test_weights_that_are_quantized_in_the_forward(averaged: Path, tmp_path: Path) -> None:
    state_config(
        averaged,
        {"compression_training": {"weight_quantization": {"shared_parameters": IN_FORWARD}}},
    )
    with pytest.raises(InconsistentCheckpoint, match="rounded masters"):
        package.convert(averaged, tmp_path / "out")


def state_config(run: Path, changes: dict[str, Any]) -> None:
    for path in run.rglob("*_states.pt"):
        edit(path, lambda states: states["ds_config"].update(changes))
