"""Runs of different numbers of ranks: healthy ones agree, and each fault is found at its place."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zckpt
from zckpt import probe

from ..conftest import Once, texts
from ..engines import deepspeed
from ..engines.cases import CASES, Case
from .test_engines import FAULTS, FSDP_PLACES, PLACES, STEP

Trained = Callable[[Case], Path]
Recorded = Callable[[int, int, int], Path]
WORLDS = [(2, 3), (2, 4), (4, 1)]
FIRST = {(3, (4, 1))}


@pytest.fixture(scope="session")
def recorded(trained: Trained, once: Once) -> Recorded:
    """Recordings of a stage: `original` at the first number of ranks, `resharded` and every fault
    at the second one."""

    def record(stage: int, dp: int, new_dp: int) -> Path:
        def train(root: Path) -> Path:
            case = dataclasses.replace(CASES[f"z{stage}_dp2_fp32"], name=f"z{stage}_{dp}", dp=dp)
            original = trained(case) / "run"
            runs: list[tuple[Path, Path]] = []
            for name in ("resharded", *FAULTS):
                copy = root / "checkpoints" / f"{name}_{dp}"
                shutil.copytree(original, copy)
                FAULTS.get(name, lambda copy: None)(copy)
                target = root / "checkpoints" / name
                zckpt.reshard(copy, target, dp=new_dp, accept_weights=name == "stale")
                runs.append((target, root / name))
            submit(case, [(original, root / "original")], root)
            submit(dataclasses.replace(case, dp=new_dp), runs, root)
            return root

        return once("recorded", f"stage{stage}_{dp}_{new_dp}", train)

    return record


def submit(case: Case, runs: list[tuple[Path, Path]], root: Path) -> None:
    arguments = (case, runs, root / f"losses{case.dp}.pt")
    deepspeed.submit("rank", "recorded", case.dp, arguments, root, case.extension)


STAGES = [
    pytest.param(
        stage,
        *worlds,
        marks=[pytest.mark.engines, *([pytest.mark.first] if (stage, worlds) in FIRST else [])],
    )
    for worlds in WORLDS
    for stage in (1, 2, 3)
]


def report_of(root: Path, name: str) -> dict[str, Any]:
    return probe.compare(root / "original", root / name)


@pytest.mark.parametrize(("stage", "dp", "new_dp"), STAGES)
def test_a_resharded_run_goes_on_as_the_original(
    stage: int, dp: int, new_dp: int, recorded: Recorded
) -> None:
    report = report_of(recorded(stage, dp, new_dp), "resharded")
    assert report["big"] is None
    assert report["worlds"] == [dp, new_dp]
    assert (report["only_a"], report["only_b"], report["unmerged"]) == ([], [], [])
    assert report["steps"] == [STEP, STEP + 1, STEP + 2]
    assert report["differing"] > 10  # sums have another order: they are compared
    assert report["first"]["distance"] < 1e-6
    assert report["first"]["meaning"].startswith("sums in another order")


@pytest.mark.parametrize("fault", [*PLACES, "stale"])
@pytest.mark.parametrize(("stage", "dp", "new_dp"), STAGES)
def test_a_fault_is_found_at_its_place(
    stage: int, dp: int, new_dp: int, fault: str, recorded: Recorded
) -> None:
    big = report_of(recorded(stage, dp, new_dp), fault)["big"]
    later, key, meaning = PLACES.get(fault) or (stage < 3, "trunk.2.weight", "")
    assert (big["step"], big["key"]) == (STEP + later, key)
    assert big["meaning"].startswith(meaning)


# -- FSDP2, whose ranks take rows in turns


@pytest.fixture(scope="session")
def fsdp(once: Once) -> Callable[[int, int], Path]:
    def record(dp: int, new_dp: int) -> Path:
        def train(root: Path) -> Path:
            deepspeed.submit("rank", "recorded_fsdp", dp, (dp, root), root)
            again = (new_dp, root, root / "resumed")
            deepspeed.submit("rank", "recorded_fsdp_again", new_dp, again, root)
            return root

        return once("recorded", f"fsdp_{dp}_{new_dp}", train)

    return record


FSDP = [pytest.param(*worlds, marks=pytest.mark.engines) for worlds in WORLDS]


@pytest.mark.parametrize(("dp", "new_dp"), FSDP)
def test_fsdp_goes_on_as_the_original(
    dp: int, new_dp: int, fsdp: Callable[[int, int], Path]
) -> None:
    root = fsdp(dp, new_dp)
    report = probe.compare(root / "original", root / "resumed" / "original")
    assert report["big"] is None
    assert (report["only_a"], report["only_b"], report["unmerged"]) == ([], [], [])
    assert any("in turns" in note for note in texts(report["notes"]))
    assert report["first"]["distance"] < 1e-6


@pytest.mark.parametrize(("fault", "step", "key"), FSDP_PLACES)
@pytest.mark.parametrize(("dp", "new_dp"), FSDP)
def test_fsdp_faults_are_found_at_their_place(
    dp: int, new_dp: int, fault: str, step: int, key: str, fsdp: Callable[[int, int], Path]
) -> None:
    root = fsdp(dp, new_dp)
    big = probe.compare(root / "original", root / "resumed" / fault)["big"]
    assert (big["step"], big["key"]) == (step, key)
