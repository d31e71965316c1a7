"""A real training is killed at 4 ranks, and goes on at 3, 2, 6 and 1 as if it had not been."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import zckpt
from zckpt.core.checkpoint.entries import name_of
from zckpt.resume.runs import candidates

from .. import faults
from ..conftest import Once, needs, texts
from ..engines import resumed
from ..engines.resumed import KILLED_AT, STEPS, Program, Trained
from .conftest import BESIDE, cut, original, snapshot

RANKS, SAVED_AT = 4, 4
PROGRAMS = {
    program.name: program
    for program in (
        *(Program(f"zero-{stage}", "zero", stage) for stage in (2, 3, 1, 0)),
        *(Program(f"pipeline-{stage}", "pipeline", stage) for stage in (1, 0)),
        *(Program(f"trainer-{stage}", "hf_trainer", stage) for stage in (2, 3)),
        Program("trainer-lora", "hf_trainer", 2, lora=True),
        Program("trainer-fsdp", "hf_trainer"),
        Program("accelerate-fsdp", "accelerate"),
        Program("lightning-fsdp", "lightning"),
        Program("lightning-zero", "lightning", 2),
        Program("torchtitan", "fsdp2"),
    )
}
NEEDS = {"hf_trainer": ("transformers", "accelerate", "peft"), "accelerate": ("accelerate",)}
NEEDS["lightning"] = ("lightning",)


@dataclass(frozen=True)
class Killed:
    """A run whose job was killed, and the losses of one that was not."""

    run: Path
    losses: dict[int, float]


@pytest.fixture
def killed(once: Once, request: pytest.FixtureRequest) -> Killed:
    program: Program = PROGRAMS[request.getfixturevalue("name")]
    needs("deepspeed", *NEEDS.get(program.kind, ()))

    def train(root: Path) -> Killed:
        whole = resumed.start(program, root / "whole" / "run", RANKS)
        dead = resumed.start(program, root / "killed" / "run", RANKS, kill="step")
        assert [*dead.losses] == [*range(KILLED_AT + 1)]
        assert [*whole.losses] == [*range(STEPS)]
        return Killed(root / "killed" / "run", whole.losses)

    return once("killed", program.name, lambda root: train(made(root)))


def made(root: Path) -> Path:
    for name in ("whole", "killed"):
        (root / name).mkdir()
    return root


def cases() -> Iterator[object]:
    """The default run has one; `-m engines` the small sizes, `-m matrix` all."""
    for name in PROGRAMS:
        for ranks in (3, 2, 1, 6):
            if name.startswith("pipeline") and ranks in (3, 1):
                continue
            is_first = (name, ranks) == ("zero-2", 3)
            marks = [pytest.mark.first] if is_first else []
            usual = ranks == 3 or (name, ranks) in (("zero-2", 6), ("zero-3", 1), ("pipeline-1", 2))
            marks.append(pytest.mark.engines if usual else pytest.mark.matrix)
            yield pytest.param(name, ranks, marks=marks)


@pytest.mark.parametrize(("name", "ranks"), [*cases()])
def test_it_goes_on(name: str, ranks: int, killed: Killed, tmp_path: Path) -> None:
    run = Path(shutil.copytree(killed.run, tmp_path / "run"))
    for file in killed.run.parent.glob("names-*"):
        shutil.copy(file, tmp_path)
    before = original(run)
    again: Trained = resumed.start(PROGRAMS[name], run, ranks)
    expected = {step: loss for step, loss in killed.losses.items() if step >= SAVED_AT}
    assert again.losses == pytest.approx(expected, rel=1e-5)
    assert original(run) == before
    assert again.report["left_aside"] == []
    is_written = (run / BESIDE).exists()
    assert again.report["written"] == is_written
    seen = snapshot(run)
    names = [line for file in sorted(tmp_path.glob("names-*")) for line in file.open()]
    told = {"param_names": [*map(str.strip, names)]} if name == "pipeline-0" else {}
    dp = again.report["sizes"]["dp"]
    second = zckpt.auto_resume(run, dp=dp, tell=lambda lines: None, **told)
    assert second is not None
    assert (str(second), second.report["written"]) == (again.path, False)
    assert snapshot(run) == seen


PATTERNS = {
    "zero-3": "zero_pp_rank_2_*_model_states.pt",
    "trainer-2": "*_optim_states.pt",
    "trainer-3": "rng_state_1.pth",  # of the trainer
    "accelerate-fsdp": "*.distcp",
}


@pytest.mark.engines
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("zero-2", "flipped"),
        ("zero-3", "lost"),
        ("trainer-2", "cut"),
        ("trainer-3", "cut"),
        ("torchtitan", "flipped"),
        ("accelerate-fsdp", "lost"),
    ],
)
def test_it_goes_on_from_the_one_before(
    name: str, damage: str, killed: Killed, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(killed.run, tmp_path / "run"))
    newest, before, *_ = (Path(each.where) for each in candidates(str(run)))
    if damage == "flipped":
        moment = next(n for n in map(name_of, zckpt.read(newest).entries) if n.endswith("exp_avg"))
        faults.change(newest, moment, faults.flip(0, 4, 3), mended=False)
    else:
        file = next(newest.rglob(PATTERNS.get(name, "*.*")))
        {"lost": Path.unlink, "cut": cut}[damage](file)
    seen = original(run)
    again = resumed.start(PROGRAMS[name], run, 3)
    assert [each["path"] for each in again.report["left_aside"]] == [str(newest)]
    assert again.report["checkpoint"] == str(before)
    expected = {step: loss for step, loss in killed.losses.items() if step >= 2}
    assert again.losses == pytest.approx(expected, rel=1e-5)
    assert original(run) == seen


@pytest.mark.engines
@pytest.mark.parametrize("name", ["zero-2", "trainer-2"])
def test_a_job_that_dies_while_it_saves(name: str, killed: Killed, tmp_path: Path) -> None:
    run = tmp_path / "run"
    resumed.start(PROGRAMS[name], run, RANKS, kill="save")
    again = resumed.start(PROGRAMS[name], run, 3)
    assert again.report["checkpoint"].endswith(str(SAVED_AT))
    assert any(str(KILLED_AT + 1) in line for line in texts(again.report["warnings"]))
    expected = {step: loss for step, loss in killed.losses.items() if step >= SAVED_AT}
    assert again.losses == pytest.approx(expected, rel=1e-5)
