"""`--format github` and `--format junit`, and `verify --json --brief`."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import zckpt as package
from zckpt.display.annotations import MOST, annotated

from ..conftest import EXAMPLE, ROOT, Result
from ..resume.conftest import flip

Zckpt = Callable[..., Result]
OPTIM = "global_step7/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
TRAINER = ROOT / "examples" / "trainer" / "checkpoint-4"
ANNOTATION = re.compile(r"::(error|warning) title=([^:,]*)(?:,file=([^:,]*))?::(.*)")


def suite(text: str) -> ElementTree.Element:
    """The only suite of a document of JUnit, whose counts are right."""
    root = ElementTree.fromstring(text)
    (suite,) = root
    for element in (root, suite):
        assert element.get("tests") == str(len(suite))
        for kind, count in (("failure", "failures"), ("error", "errors")):
            assert element.get(count) == str(len(suite.findall(f"testcase/{kind}")))
    return suite


@pytest.fixture
def damaged(example: Path) -> Path:
    flip(example / OPTIM)
    return example


def test_github(damaged: Path, tmp_path: Path, zckpt: Zckpt) -> None:
    ended = zckpt("verify", EXAMPLE, damaged, tmp_path / "none", "--format", "github")
    assert (ended.code, ended.err) == (3, "")
    sound, wrong, nothing = ended.out.splitlines()
    assert sound == f"{EXAMPLE}: ok"
    found = ANNOTATION.fullmatch(wrong)
    assert found
    assert found[1] == "error"
    assert found[2] == "zckpt verify%3A record-damaged"
    assert found[3] == str(damaged / OPTIM)
    assert found[4].startswith(f"{damaged}: {Path(OPTIM).name} is damaged")
    assert "no-such-path" in nothing


def test_junit(damaged: Path, tmp_path: Path, zckpt: Zckpt) -> None:
    ended = zckpt("verify", EXAMPLE, damaged, tmp_path / "none", "--format", "junit")
    assert (ended.code, ended.err) == (3, "")
    sound, wrong, nothing = suite(ended.out)
    assert (sound.get("name"), len(sound)) == (str(EXAMPLE), 0)
    failure = wrong.find("failure")
    assert failure is not None
    assert failure.get("type") == "record-damaged"
    assert "is damaged" in str(failure.text)
    assert nothing.find("error") is not None


def test_differences(damaged: Path, zckpt: Zckpt) -> None:
    ended = zckpt("verify", damaged, "--against", EXAMPLE, "--format", "github")
    assert ended.code == 3
    assert "tensor-differs" in ended.out
    assert "embedding.weight/exp_avg_sq differs in 1 element" in ended.out


def test_check(zckpt: Zckpt) -> None:
    ended = zckpt("check", TRAINER, EXAMPLE, "--dp", 4, "--format", "junit")
    assert ended.code == 3
    wrong, sound = suite(ended.out)
    failure = wrong.find("failure")
    assert failure is not None
    assert failure.get("message") == "saved by 2 data-parallel ranks; 4 are asked for"
    assert f"zckpt reshard {TRAINER}" in str(failure.text)
    assert len(sound) == 0


def test_list(tmp_path: Path, zckpt: Zckpt) -> None:
    """What fails in the document is what the exit code says: not loading at a size is none."""
    for name in ("checkpoint-3", "checkpoint-4"):
        shutil.copytree(TRAINER, tmp_path / "out" / name)
    ended = zckpt("list", tmp_path / "out", "--dp", 4, "--format", "junit")
    assert ended.code == 0
    first, second = suite(ended.out)
    for case in (first, second):
        assert [part.tag for part in case] == ["system-out"]
        assert "saved by 2 data-parallel ranks; 4 are asked for" in str(case[0].text)
    (tmp_path / "out" / "checkpoint-3" / "scheduler.pt").write_bytes(b"")
    ended = zckpt("list", tmp_path / "out", "--format", "junit")
    assert ended.code == 3
    first, second = suite(ended.out)
    assert (first.find("failure") is None) is (second.find("failure") is not None)


def report(message: str, count: int = 1) -> dict[str, Any]:
    line = {"code": "file-damaged", "message": message, "hint": "", "file": "a:b,c"}
    problems = [line] * count
    return {"path": "out", "against": None, "problems": problems, "differences": [], "seconds": 1}


def test_hostile_texts(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = '50% <b>&"\x1b[2J\n::error::no\x00\ufffe'
    annotated("verify", [report(hostile)], "github")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("::error title=zckpt verify%3A file-damaged,file=a%3Ab%2Cc::out: 50%25 ")
    assert "\x1b" not in line
    annotated("verify", [report(hostile)], "junit")
    case = suite(capsys.readouterr().out)[0]
    assert "<b>" in str(case[0].get("message"))


def test_github_gets_no_more_than_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    annotated("verify", [report("wrong", 30)], "github")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == MOST + 1
    assert lines[-1].endswith(f"and {30 - MOST} more")


def test_two_forms_at_a_time(zckpt: Zckpt) -> None:
    for words in (("verify", EXAMPLE), ("check", EXAMPLE), ("list", EXAMPLE)):
        ended = zckpt(*words, "--json", "--format", "github")
        assert (ended.code, ended.document["code"]) == (2, "options-conflict")


def test_brief(tmp_path: Path, zckpt: Zckpt) -> None:
    whole = zckpt("verify", EXAMPLE, "--json").document
    proof = tmp_path / "proof.json"
    brief = zckpt("verify", EXAMPLE, "--json", "--brief", "--save-proof", proof).document
    assert whole.keys() - brief.keys() == {"held", "digests"}
    assert package.verify(EXAMPLE, proof)["equal"]  # it has all
    reports = zckpt("verify", EXAMPLE, TRAINER, "--json", "--brief").document["reports"]
    assert all({"held", "digests"}.isdisjoint(each) for each in reports)
    assert "--brief changes nothing here" in zckpt("verify", EXAMPLE, "--brief").err
    saved = zckpt("verify", EXAMPLE, "--format", "junit", "--save-proof", tmp_path / "other")
    assert (saved.code, (tmp_path / "other").exists()) == (0, True)


def test_help_of_a_command(zckpt: Zckpt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert zckpt("help", "convert").out == zckpt("convert", "--help").out
    assert zckpt("help").out == zckpt("--help").out
    ended = zckpt("help", "conver")
    assert ended.code == 2
    assert "Hint: Did you mean convert?" in ended.err
    text = zckpt("--help").out
    for shell in ("bash", "zsh", "fish"):
        assert f"{shell}_source" in text
