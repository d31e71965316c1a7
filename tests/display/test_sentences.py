"""Sentences that a tired person read as their opposite."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from zckpt.cli.run import after_interrupt
from zckpt.display.terminal import checked
from zckpt.formats.reading import Reading
from zckpt.reading import read
from zckpt.reporting.steps import agreeing

from ..conftest import EXAMPLE, ROOT, Result
from ..resume.conftest import flip

Zckpt = Callable[..., Result]
TRAINER = ROOT / "examples" / "trainer" / "checkpoint-4"
OPTIM = "global_step7/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize(
    ("right", "wrong", "none", "said"),
    [
        (32, 0, 0, ", checksums ok"),
        (4, 28, 28, ", 4 checksums ok, 28 parts have none"),
        (1, 1, 1, ", 1 checksum ok, 1 part has none"),
        (4, 28, 20, ", 4 checksums ok, 20 parts have none, 8 not checked"),
        (4, 8, 0, ", 4 checksums ok, 8 not checked"),
        (0, 8, 8, ""),
    ],
)
def test_parts_without_a_checksum_are_not_wrong(
    right: int, wrong: int, none: int, said: str
) -> None:
    """`4 of 32 checksums ok`: 28 have none."""
    records = {"checked": right, "unchecked": wrong, "without_checksum": none}
    assert checked({"records": records}) == said


def test_a_damaged_file_has_no_good_checksums(example: Path, zckpt: Zckpt) -> None:
    flip(example / OPTIM)
    for command in ("stats", "verify"):
        assert "checksums ok" not in zckpt(command, example).out
    assert "checksums ok" in zckpt("stats", EXAMPLE).out


def test_other_tensors_are_no_padding(zckpt: Zckpt) -> None:
    """`harmless, no tensor lies there`: the tensors lie there that --tensors left out."""
    ended = zckpt("verify", EXAMPLE, "--tensors", "fc1*")
    assert "padding" not in ended.out
    assert "checksums ok" in ended.out


def test_what_was_not_read_contradicts_nothing(example: Path, zckpt: Zckpt) -> None:
    (example / OPTIM).unlink()
    ended = zckpt("verify", example)
    assert ended.code == 3
    assert ended.out.startswith(f"{example} is not whole: no tensor was read\n")
    ended = zckpt("verify", example, "--against", EXAMPLE)
    assert ended.code == 3
    assert ended.out.startswith(f"{example} was not compared with {EXAMPLE}: no tensor was read\n")
    assert "differs" not in ended.out


def test_two_files_of_one_size(tmp_path: Path, zckpt: Zckpt) -> None:
    """`1465 bytes against 1465 bytes`"""
    copy = Path(shutil.copytree(TRAINER, tmp_path / "checkpoint-4"))
    size = (copy / "scheduler.pt").stat().st_size
    flip(copy / "scheduler.pt", 0.6)
    ended = zckpt("verify", copy, "--against", TRAINER)
    assert f"scheduler.pt: {size} bytes against {size} other bytes\n" in ended.out


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ((7,), "7 in the one place"),
        ((7, 7), "7 in both places"),
        ((7, 7, 7), "7 in all 3 places"),
        ((7, 8, 7), "7 in 2 places, 8 in 1 place"),
        ((1234567, 1234567.0), "1234567 in both places"),
    ],
)
def test_places_of_a_step(steps: tuple[float, ...], said: str) -> None:
    stated = tuple((f"rank {rank}", step) for rank, step in enumerate(steps))
    assert agreeing(read(str(EXAMPLE), Reading()), stated) == said


def test_an_interrupt_denies_only_what_there_would_be() -> None:
    cause = KeyboardInterrupt()
    assert after_interrupt(["convert", "a", "b"], cause) == "no target was written"
    assert after_interrupt(["verify", "a"], cause) == "nothing was changed"


def test_one_tensor_differs(example: Path, zckpt: Zckpt) -> None:
    flip(example / OPTIM)
    out = zckpt("diff", example, EXAMPLE).out
    assert re.match(r"1 of 23 tensors differs, ", out)


def test_a_checkpoint_that_loads_may_be_damaged(example: Path, zckpt: Zckpt) -> None:
    flip(example / OPTIM)
    assert zckpt("check", example, "--dp", 4).out.endswith("; no tensor was read\n")


def of_step_nine(tag: Path) -> None:
    """The optimizer of one rank has another step than the others."""
    path = tag / Path(OPTIM).name
    saved = torch.load(path, weights_only=False)
    for state in saved["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        state["step"] = torch.tensor(9.0)
    torch.save(saved, path)


FAULTS: dict[str, Callable[[Path], None]] = {
    "a lost file": lambda tag: (tag / Path(OPTIM).name).unlink(),
    "a cut file": lambda tag: os.truncate(tag / Path(OPTIM).name, 2000),
    "mixed saves": of_step_nine,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_has_one_sentence(fault: str, example: Path, zckpt: Zckpt) -> None:
    """Of every command, with its code, and with a hint that does not repeat it."""
    FAULTS[fault](example / "global_step7")
    wrong = zckpt("inspect", example, "--json").document
    sentence = f"{wrong['message']} [{wrong['code']}]"
    for words in (
        ("inspect", example),
        ("verify", example),
        ("check", example, "--dp", 4),
        ("check", example / "global_step7", "--dp", 4),
        ("list", example),
        ("stats", example),
        ("convert", example, example.parent / "out"),
        ("report", example, "--output", example.parent / "page.html"),
    ):
        ended = zckpt(*words)
        assert sentence in ended.out + ended.err, words
    words = wrong["hint"].split()
    parts = [" ".join(words[place : place + 4]) for place in range(len(words) - 3)]
    assert parts
    assert not [part for part in parts if part in wrong["message"]]


@pytest.mark.parametrize("damage", [*FAULTS.values(), lambda tag: flip(tag / Path(OPTIM).name)])
def test_damage_exits_with_one_code(
    damage: Callable[[Path], None], example: Path, zckpt: Zckpt
) -> None:
    """`check` of a path and of its run, as `verify`; what is not there is another thing."""
    damage(example / "global_step7")
    codes = {zckpt("check", path, "--dp", 4).code for path in (example, example / "global_step7")}
    is_seen_without_reading = zckpt("list", example).code == 3
    assert codes == {3 if is_seen_without_reading else 0}
    assert zckpt("verify", example).code == 3
    assert zckpt("check", example / "nothing", "--dp", 4).code == 1
    assert zckpt("check", example.parent, "--tag", "none", "--dp", 4).code in (1, 2)


def test_damage_names_what_to_do(example: Path, zckpt: Zckpt) -> None:
    shutil.copytree(example / "global_step7", example / "global_step5")
    shutil.copytree(example / "global_step7", example / "global_step6")
    (example / "global_step6" / Path(OPTIM).name).unlink()  # neither is that
    flip(example / OPTIM)
    for path in (example, example / "global_step7"):
        out = zckpt("verify", path).out
        assert "[record-damaged]\n  to restore this bit: zckpt mend " in out
        older = example / "global_step5"
        assert f"next: resume from {older}, which is complete according to its metadata\n" in out
    assert zckpt("verify", example, "--json").document["instead"] == str(older)
    shutil.rmtree(older)
    assert "next:" not in zckpt("verify", example).out


def test_a_nan_is_not_infinite(example: Path, zckpt: Zckpt) -> None:
    path = example / OPTIM
    saved = torch.load(path, weights_only=False)
    for state in saved["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        state["exp_avg"][3] = math.nan
    torch.save(saved, path)
    for words in (("diff", EXAMPLE, example), ("verify", EXAMPLE, "--against", example)):
        out = zckpt(*words).out
        assert re.search(r"^fc1\.bias/exp_avg +1 .*nan +NaN in b +-", out, re.MULTILINE)
        assert not re.search(r"\binf\b", out)
        line = zckpt(*words, "--json").document["differences"][0]
        assert (line["max_abs"], line["max_ulp"], line["b_nan"]) == ("nan", None, 1)


def test_two_models_are_said_first(zckpt: Zckpt) -> None:
    ended = zckpt("diff", EXAMPLE, TRAINER)
    assert ended.code == 3
    first, *more = ended.out.splitlines()
    assert first.startswith("these are two models: 0 of 80 names of tensors in common, ")
    assert len(more) == 3
    assert "these are two models" not in zckpt("diff", EXAMPLE, EXAMPLE).out


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("fc1.weight", "Did you mean 'fc1.weight/*'?"),
        ("fc1.wieght*", "Did you mean fc1.weight?"),
        ("fc1.wieght/exp_avg", "Did you mean fc1.weight?"),
        ("nothing*", "names are parameter/slot, such as "),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "stats", "verify"])
def test_a_glob_that_matches_nothing(command: str, pattern: str, hint: str, zckpt: Zckpt) -> None:
    ended = zckpt(command, EXAMPLE, "--tensors", pattern)
    assert ended.code == 2
    assert f"no tensor matches {pattern!r}" in ended.err
    assert f"Hint: {hint}" in ended.err


def test_codes_are_said_without_a_terminal(example: Path, zckpt: Zckpt) -> None:
    (example / "latest").unlink()
    for words in (("inspect", example), ("verify", example)):
        assert re.search(r"^Warning: .* \[[a-z-]+\]$", zckpt(*words).err, re.MULTILINE)
