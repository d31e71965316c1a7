"""`zckpt check` and `auto_resume` say the same of a checkpoint; the proposed command works."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zckpt
from zckpt.errors import ZckptError

from ..conftest import EXAMPLE, ROOT, Result
from .conftest import TAGS
from .test_runs import MEGATRON, emptied, laid_out

DATA = ROOT / "tests" / "data"
TRAINER = ROOT / "examples" / "trainer" / "checkpoint-4"
LEGACY = DATA / "megatron-0.16.1-legacy-tp2"
PIPELINE = DATA / "zckpt-0.1-pp2_tp2" / "run"
Run = Callable[..., Result]


def made(report: Any, target: Path, run: Run) -> Result:
    """What the proposed command gives."""
    words = [str(target) if word == "DST" else word for word in shlex.split(report["fix"])]
    return run(*words[1:])


@pytest.mark.parametrize("name", ["trainer_state.json", "latest", f"{TRAINER.name}"])
def test_a_checkpoint_that_is_set_aside_is_not_said_to_load(
    name: str, tmp_path: Path, zckpt: Run
) -> None:
    run = laid_out(tmp_path / "run", TRAINER, "checkpoint-9", "checkpoint-10")
    newest = run / "checkpoint-10"
    if name in ("trainer_state.json", "latest"):
        (newest / name).unlink()
    else:
        emptied(newest / "scheduler.pt")
    ended = zckpt("check", run, "--dp", 2)
    assert ended.code == 3
    assert f"{newest} does not load as it is" in ended.out
    ended = zckpt("auto-resume", run, "--dp", 2)
    assert ended.out == f"{run / 'checkpoint-9'}\n"
    assert "checkpoint-10 is left aside" in ended.err


@pytest.mark.parametrize(
    ("words", "to"),
    [
        (("--for", "universal"), "universal"),
        (("--for", "gathered"), "gathered"),
        (("--for", "dcp", "--stage", 3), "dcp"),
    ],
)
def test_the_command_has_what_its_format_understands(
    words: tuple[object, ...], to: str, run: Path, tmp_path: Path, zckpt: Run
) -> None:
    report = zckpt("check", run, *words, "--json").document
    assert made(report, tmp_path / "dst", zckpt).code == 0
    assert to in report["fix"]


def test_the_command_quotes_a_tag(run: Path, tmp_path: Path, zckpt: Run) -> None:
    tag = "best é 'x'"
    for each in TAGS:
        shutil.rmtree(run / each)
    shutil.copytree(EXAMPLE / TAGS[-1], run / tag)
    (run / "latest").write_text(tag)
    report = zckpt("check", run, "--dp", 3, "--json").document
    assert made(report, tmp_path / "dst", zckpt).code == 0


def test_the_command_for_ranks_of_megatron(tmp_path: Path, zckpt: Run) -> None:
    """Their files do not say how many there are, so that 1 is not what the source has."""
    report = zckpt("check", LEGACY, "--tp", 1, "--json").document
    assert "--tp 1" in report["fix"]
    assert made(report, tmp_path / "dst", zckpt).code == 0
    assert zckpt("check", tmp_path / "dst", "--tp", 1).code == 0


@pytest.mark.parametrize(
    ("source", "words", "refused"),
    [
        (EXAMPLE, ("--pp", 2), "is not a pipeline"),
        (EXAMPLE, ("--tp", 3), "nothing says how 7 parameters are cut"),
        (PIPELINE, ("--tp", 3), "cannot be cut evenly over 3 tensor ranks"),
        (EXAMPLE, ("--for", "megatron"), "only from a checkpoint of Megatron-Core"),
        (EXAMPLE, ("--for", "hf"), "has no config.json"),
    ],
)
def test_what_no_command_makes(
    source: Path, words: tuple[object, ...], refused: str, tmp_path: Path, zckpt: Run
) -> None:
    """The sentence is that of the command, and nothing is written."""
    ended = zckpt("check", source, *words)
    assert ended.code == 3
    assert "nothing makes it fit: " in ended.out
    assert refused in ended.out
    report = zckpt("check", source, *words, "--json").document
    assert (report["fix"], refused in report["refused"]["message"]) == (None, True)


def test_a_run_that_names_no_iteration(tmp_path: Path, zckpt: Run) -> None:
    """Megatron-LM would begin anew, and say nothing."""
    run = Path(shutil.copytree(MEGATRON, tmp_path / "run"))
    tracker = run / "latest_checkpointed_iteration.txt"
    tracker.unlink(missing_ok=True)
    ended = zckpt("check", run)
    assert ended.code == 3
    assert (
        f"{tracker} is missing: Megatron-LM loads iter_0000003 only with --ckpt-step 3" in ended.out
    )
    tracker.write_text("3")
    assert zckpt("check", run).code == 0


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("4", "names iter_0000004: Megatron-LM loads iter_0000003 only with --ckpt-step 3"),
        ("9", "names iter_0000009: Megatron-LM loads iter_0000003 only with --ckpt-step 3"),
        ("abc", "says 'abc': Megatron-LM loads iter_0000003 if it says 3"),
        ("", "says '': Megatron-LM loads iter_0000003 if it says 3"),
        (None, "is missing: Megatron-LM loads iter_0000003 only with --ckpt-step 3"),
        ("3", None),
    ],
)
def test_an_iteration_that_the_run_does_not_name(
    named: str | None, told: str | None, tmp_path: Path, zckpt: Run
) -> None:
    run = Path(shutil.copytree(MEGATRON, tmp_path / "run"))
    shutil.copytree(run / "iter_0000003", run / "iter_0000004")
    broken = run / "iter_0000004" / "__0_0.distcp"
    broken.write_bytes(broken.read_bytes()[:-20])
    tracker = run / "latest_checkpointed_iteration.txt"
    tracker.unlink(missing_ok=True)
    if named is not None:
        tracker.write_text(named)
    ended = zckpt("auto-resume", run)
    assert (ended.code, ended.out) == (0, f"{run}\n")
    assert ("Megatron-LM" in ended.err) == bool(told)
    assert (told or "") in ended.err


def test_a_hint_is_not_lost() -> None:
    with pytest.raises(ZckptError) as raised:
        zckpt.auto_resume(DATA / "accelerate-1.14.0-lora-w2", dp=2)
    assert "adapter_model.safetensors beside it has the whole adapter" in raised.value.hint
