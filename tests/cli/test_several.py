"""`verify`, `check` and `inspect` of several PATHs: a line each, one document, one exit code."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zckpt.processes.launcher import LAUNCHERS

from ..conftest import EXAMPLE, ROOT, Result
from ..resume.conftest import flip

Zckpt = Callable[..., Result]
TRAINER = ROOT / "examples" / "trainer" / "checkpoint-4"
OPTIM = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (name for names in LAUNCHERS.values() for name in names):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A flipped bit in a moment: only `verify` sees it."""
    run = Path(shutil.copytree(EXAMPLE, tmp_path / "damaged"))
    flip(run / "global_step7" / OPTIM)
    return run


def without_time(report: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in report.items() if key != "seconds"}


@pytest.mark.parametrize("command", ["verify", "inspect", "check"])
def test_the_document_has_those_of_one_path(
    command: str, damaged: Path, tmp_path: Path, zckpt: Zckpt
) -> None:
    paths = [EXAMPLE, tmp_path / "nothing", damaged, TRAINER]
    together = zckpt(command, *paths, "--json").document
    alone = [zckpt(command, path, "--json") for path in paths]
    assert together.keys() == {"zckpt", "command", "reports"}
    assert (together["zckpt"], together["command"]) == (2, command)
    reports = [*map(without_time, together["reports"])]
    assert reports[1].pop("path") == str(paths[1])
    assert reports == [without_time(each.document) for each in alone]


@pytest.mark.parametrize("command", ["verify", "inspect", "check"])
def test_one_path_has_the_document_of_today(command: str, zckpt: Zckpt) -> None:
    report = zckpt(command, EXAMPLE, "--json").document
    assert "reports" not in report
    assert report["command"] == command


@pytest.mark.parametrize(
    ("command", "names", "code"),
    [
        ("verify", ("sound", "trainer"), 0),
        ("verify", ("sound", "nothing", "trainer"), 1),
        ("verify", ("nothing", "damaged", "sound"), 3),
        ("inspect", ("damaged", "sound"), 0),
        ("inspect", ("nothing", "sound"), 1),
        ("check", ("sound", "trainer"), 3),  # the other one was saved by 2 ranks
        ("check", ("sound", "nothing"), 1),
    ],
)
def test_the_exit_code_is_the_highest(
    command: str,
    names: tuple[str, ...],
    code: int,
    damaged: Path,
    tmp_path: Path,
    zckpt: Zckpt,
) -> None:
    places = {"sound": EXAMPLE, "trainer": TRAINER, "damaged": damaged}
    paths = [places.get(name, tmp_path / name) for name in names]
    words = ("--dp", 4) if command == "check" else ()
    for more in ((), ("--json",), ("-q",)):
        assert zckpt(command, *paths, *words, *more).code == code


@pytest.mark.parametrize("command", ["verify", "inspect", "check"])
def test_a_line_each(command: str, damaged: Path, tmp_path: Path, zckpt: Zckpt) -> None:
    ended = zckpt(command, EXAMPLE, tmp_path / "nothing", damaged, TRAINER)
    lines = ended.out.splitlines()
    for line, path in zip(lines, (EXAMPLE, damaged, TRAINER), strict=True):
        assert line.startswith(str(path))
    assert ended.err.startswith(f"Error: {tmp_path / 'nothing'} ")
    assert "\nHint: " in ended.err


def test_a_line_of_verify_has_the_first_finding(damaged: Path, zckpt: Zckpt) -> None:
    alone = zckpt("verify", damaged)
    ended = zckpt("verify", EXAMPLE, damaged)
    sound, wrong = ended.out.splitlines()
    assert sound.startswith(f"{EXAMPLE} is consistent: 23 tensors (")
    assert wrong == f"{damaged} is damaged: {alone.out.splitlines()[1]}"
    quiet = zckpt("verify", EXAMPLE, damaged, "-q")
    assert (quiet.out, quiet.err) == (f"{wrong}\n", "")


def test_two_paths_are_not_compared(zckpt: Zckpt) -> None:
    """`zckpt diff A B` compares two, and somebody may think that `verify A B` does."""
    assert "each path is checked by itself" in zckpt("verify", EXAMPLE, TRAINER).err
    assert zckpt("verify", EXAMPLE, TRAINER, EXAMPLE).err == ""
    assert zckpt("verify", EXAMPLE, EXAMPLE, "--against", EXAMPLE).err == ""


@pytest.mark.parametrize("command", ["verify", "inspect", "check", "stats"])
def test_the_schema_has_both_documents(command: str, zckpt: Zckpt) -> None:
    schema = json.loads(zckpt("schema", command).out)
    kinds = [kind["$ref"].rpartition("/")[2] for kind in schema["anyOf"]]
    if command == "stats":
        assert "Reports" not in kinds
        return
    own, error, reports = kinds
    items = schema["$defs"][reports]["properties"]["reports"]["items"]
    assert items == {"anyOf": [{"$ref": f"#/$defs/{kind}"} for kind in (own, error)]}


def test_a_line_of_verify_says_how_many_findings_follow(damaged: Path, zckpt: Zckpt) -> None:
    os.truncate(damaged / "global_step7" / OPTIM, 100)
    flip(damaged / "global_step7" / OPTIM.replace("rank_1", "rank_2"))
    wrong = zckpt("verify", damaged, damaged).out.splitlines()[0]
    found = zckpt("verify", damaged, "--json").document["problems"]
    more = len(found) - 1
    first = f"{found[0]['message']} [{found[0]['code']}]"
    assert wrong.endswith(f", and {more} more: --json lists all" if more else first)


def test_each_is_compared_with_the_other_checkpoint(damaged: Path, zckpt: Zckpt) -> None:
    ended = zckpt("verify", EXAMPLE, damaged, "--against", EXAMPLE)
    assert ended.code == 3
    sound, wrong = ended.out.splitlines()
    assert sound.startswith(f"{EXAMPLE} equals {EXAMPLE}: ")
    assert wrong.startswith(f"{damaged} differs from {EXAMPLE}: {OPTIM} is damaged")
    reports = zckpt("verify", EXAMPLE, damaged, "--against", EXAMPLE, "--json").document["reports"]
    assert [report["against"] for report in reports] == [str(EXAMPLE)] * 2


def test_a_line_of_check_has_the_reasons(zckpt: Zckpt) -> None:
    assert zckpt("check", EXAMPLE, TRAINER, "--dp", 4).out.splitlines() == [
        f"{EXAMPLE / 'global_step7'} loads as it is (deepspeed, dp 4)",
        f"{TRAINER} does not load as it is (deepspeed, dp 4): saved by 2 data-parallel ranks; "
        "4 are asked for [size-differs]; 1 warning",
    ]


def test_a_line_of_inspect(zckpt: Zckpt) -> None:
    ended = zckpt("inspect", EXAMPLE, TRAINER)
    tag = EXAMPLE / "global_step7"
    size = sum(file.stat().st_size for file in tag.iterdir()) / 1000
    assert ended.out.splitlines()[0] == (
        f"{tag}: deepspeed, ZeRO stage 2, dp 4, step 7, 7 parameters, {size:.1f} kB in 5 files"
    )


@pytest.mark.parametrize("view", [("--steps",), ("--layout",), ("--tensors", "*/master")])
def test_a_view_of_each(view: tuple[str, ...], tmp_path: Path, zckpt: Zckpt) -> None:
    alone = [zckpt("inspect", path, *view).out for path in (EXAMPLE, TRAINER)]
    ended = zckpt("inspect", EXAMPLE, tmp_path / "nothing", TRAINER, *view)
    assert ended.out == f"{EXAMPLE}:\n{alone[0]}\n{TRAINER}:\n{alone[1]}\n"
    assert ended.code == 1


def test_the_document_has_what_was_asked_for(zckpt: Zckpt) -> None:
    words = ("--tensors", "*/master", "--state", "--json")
    reports = zckpt("inspect", EXAMPLE, TRAINER, *words).document["reports"]
    assert [len(report["tensors"]) for report in reports] == [5, 20]
    assert all("engine" in report["state"] for report in reports)


@pytest.mark.parametrize(
    ("words", "way"),
    [
        (("verify", "--save-proof", "file.json"), "leave out --save-proof"),
        (("inspect", "--state"), "add --json"),
    ],
)
def test_options_for_one_path(
    words: tuple[str, ...], way: str, tmp_path: Path, zckpt: Zckpt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command, *flags = words
    ended = zckpt(command, EXAMPLE, TRAINER, *flags)
    assert ended.code == 2
    assert ended.err.startswith(
        f"Error: {flags[0]} works with one PATH only, but there are 2 [options-conflict]\n"
        f"Hint: {way}"
    )
    assert [*tmp_path.iterdir()] == []
    assert zckpt(command, EXAMPLE, *flags).code == 0


def test_processes_of_a_launch_share_one_path(
    zckpt: Zckpt, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    ended = zckpt("verify", EXAMPLE, TRAINER)
    assert (ended.code, "add --single" in ended.err) == (2, True)
    assert zckpt("verify", EXAMPLE, TRAINER, "--single").code == 0


def test_what_cannot_be_read_keeps_nothing_away(tmp_path: Path, zckpt: Zckpt) -> None:
    """A folder, an empty file, a text, and a name with a control character."""
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("no checkpoint")
    (tmp_path / "a\x1b[31m").mkdir()
    strange = sorted(tmp_path.iterdir())
    for command in ("verify", "inspect", "check"):
        ended = zckpt(command, *strange, EXAMPLE)
        assert ended.out.startswith(str(EXAMPLE))
        assert ended.err.count("Error: ") == len(strange)
        assert "\x1b" not in ended.err
        reports = zckpt(command, *strange, EXAMPLE, "--json").document["reports"]
        assert [report.get("path") for report in reports[:-1]] == [*map(str, strange)]
        assert "error" not in reports[-1]


def test_a_wrong_option_is_no_path_that_fails(zckpt: Zckpt, tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text("[]")
    ended = zckpt("check", EXAMPLE, TRAINER, "--ds-config", config)
    assert (ended.code, ended.err.count("Error: ")) == (2, 1)
