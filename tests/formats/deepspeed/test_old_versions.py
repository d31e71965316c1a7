"""Checkpoints in the layouts of DeepSpeed 0.5.10 to 0.16.4, and what came before."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt import errors, formats

from ...conftest import texts
from ...engines.cases import CASES, Case
from ...engines.old_deepspeed import VERSIONS, rewrite
from ..equality import assert_is_what_the_engine_held, assert_proven

Trained = Callable[[Case], Path]
READ = VERSIONS[VERSIONS.index("0.5.10") :]
FIRST = ("0.5.10", "0.6.2", "0.9.0", "0.13.1")
RUNS = ("z1_dp2_bf16", "z2_dp3_bf16", "z3_dp2_bf16", "z2_dp2_fp16_dynamic", "z3_dp3_sub_groups")


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def every_pair() -> list[Any]:
    pairs = [(version, run) for version in READ for run in RUNS]
    pairs += [(version, "z2_dp3_fused_adam") for version in ("0.6.2", "0.6.5")]
    pairs += [(v, "z1_dp2_bf16_optimizer") for v in ("0.6.2", "0.7.0", "0.11.0", "0.16.4")]
    pairs += [(v, "z1_dp4_only_padding") for v in ("0.5.10", "0.7.0", "0.14.5", "0.16.4")]
    pairs += [(v, "z2_dp3_round_robin") for v in ("0.5.10", "0.9.3")]
    rows = []
    for version, run in pairs:
        first = version in FIRST and run in ("z1_dp2_bf16", "z3_dp2_bf16", "z2_dp3_fused_adam")
        marks = [pytest.mark.engines, *([pytest.mark.first] if first else [])]
        rows.append(pytest.param(version, run, id=f"{version}-{run}", marks=marks))
    return rows


REAL = sorted((Path(__file__).parents[2] / "data").glob("deepspeed-*"))


@pytest.mark.parametrize("root", REAL, ids=lambda root: root.name)
def test_what_an_old_version_really_wrote(root: Path, tmp_path: Path) -> None:
    oracle = torch.load(root / "oracle.pt", weights_only=False)
    zckpt.convert(root / "run", tmp_path / "universal")
    assert_is_what_the_engine_held(tmp_path / "universal", oracle, older_torch=True)
    assert_proven(root / "run", tmp_path / "universal")


def test_there_are_real_old_files() -> None:
    """`zckpt formats` names their versions, and the one that the tests train with."""
    versions = {root.name.split("-")[1] for root in REAL} | {metadata.version("deepspeed")}
    assert len(versions) == 6
    listed = ", ".join(sorted(versions, key=number))
    assert formats.named("deepspeed").about.endswith(f"(tested with real files of {listed})")


@pytest.mark.parametrize(("version", "run"), every_pair())
def test_an_old_layout(version: str, run: str, trained: Trained, tmp_path: Path) -> None:
    root = trained(CASES[run])
    oracle = torch.load(root / "oracle.pt", weights_only=False)
    rewrite(root / "run", tmp_path / "run", version)
    report = zckpt.convert(tmp_path / "run", tmp_path / "universal")
    assert_is_what_the_engine_held(tmp_path / "universal", oracle, older_torch=True)
    assert_proven(tmp_path / "run", tmp_path / "universal")
    assert report["source"]["version"] == version
    expected = CASES[run].stage
    assert report["source"]["zero_stage"] == expected
    lost = expected == 3 and number(version) < (0, 9, 1) and oracle["frozen"]
    assert any("before 0.9.1" in warning for warning in texts(report["warnings"])) == bool(lost)


@pytest.mark.engines
@pytest.mark.first
class TestOtherContainers:
    @pytest.mark.parametrize("run", ["z2_dp2_bf16", "z3_dp2_bf16"])
    def test_torch_before_1_6(self, run: str, trained: Trained, tmp_path: Path) -> None:
        root = trained(CASES[run])
        rewrite(root / "run", tmp_path / "run", "0.9.3", container="legacy")
        report = zckpt.convert(tmp_path / "run", tmp_path / "universal")
        oracle = torch.load(root / "oracle.pt", weights_only=False)
        assert_is_what_the_engine_held(tmp_path / "universal", oracle)
        assert_proven(
            tmp_path / "run", tmp_path / "universal", ("padding", "do not state the name")
        )
        count = len([*(tmp_path / "run").rglob("*_states.pt")])
        notes = zckpt.verify(tmp_path / "run")["notes"]
        assert any(
            f"{count} of {count} rank files do not state the name" in note for note in texts(notes)
        )
        assert report["records"]["checked"] == 0, "that container has no checksums"

    def test_saved_on_gpus(self, trained: Trained, tmp_path: Path) -> None:
        root = trained(CASES["z2_dp2_bf16"])
        rewrite(root / "run", tmp_path / "run", "0.10.1", location="cuda")
        zckpt.convert(tmp_path / "run", tmp_path / "universal")
        oracle = torch.load(root / "oracle.pt", weights_only=False)
        assert_is_what_the_engine_held(tmp_path / "universal", oracle)
        assert_proven(tmp_path / "run", tmp_path / "universal")

    def test_a_python_int_as_step(self, trained: Trained, tmp_path: Path) -> None:
        root = trained(CASES["z2_dp2_bf16"])
        rewrite(root / "run", tmp_path / "run", "0.8.2", int_step=True)
        manifest = zckpt.read(tmp_path / "run")
        assert manifest.step == 3
        assert manifest.run.step_place is not None
        assert manifest.run.step_place.to_state() == {"in": "state", "type": "int"}


@pytest.mark.engines
@pytest.mark.first
@pytest.mark.parametrize("version", ["0.4.5", "0.5.9"])
def test_before_0_5_10_is_refused_by_name(version: str, trained: Trained, tmp_path: Path) -> None:
    rewrite(trained(CASES["z2_dp2_bf16"]) / "run", tmp_path / "run", version)
    with pytest.raises(errors.UnsupportedCheckpoint, match=version):
        zckpt.read(tmp_path / "run")
