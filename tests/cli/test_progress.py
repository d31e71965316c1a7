"""What a command says on stderr while it works: a bar, or lines for a log."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from zckpt import api
from zckpt.cli import launched
from zckpt.cli.documents import Progress
from zckpt.core.passes import pace

from ..conftest import EXAMPLE, ROOT, Result

Zckpt = Callable[..., Result]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute is short, and `stats` takes several."""
    monkeypatch.setattr(pace, "FIRST", 0.05)
    monkeypatch.setattr(pace, "EVERY", 0.05)
    stats = api.stats

    def slowly(path: str, begin: Any, **words: Any) -> Any:
        report = stats(path, **words)
        if begin:
            begin(10**9)(10**6)
        time.sleep(0.5)
        return report

    monkeypatch.setattr(api, "stats", slowly)


@pytest.mark.usefixtures("slow")
def test_a_log_shows_life(zckpt: Zckpt) -> None:
    ended = zckpt("stats", EXAMPLE)
    first, *lines = ended.err.splitlines()
    assert first.startswith(f"zckpt: stats {EXAMPLE}, on ")
    assert any(line.startswith("zckpt: 1 MB of 1 GB, ") for line in lines)
    assert "zckpt:" not in ended.out


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("words", [("-q",), ("--json",), ("-q", "--json", "--progress")])
def test_silence(words: tuple[str, ...], zckpt: Zckpt) -> None:
    assert zckpt("stats", EXAMPLE, *words).err == ""


@pytest.mark.usefixtures("slow")
def test_documents(zckpt: Zckpt) -> None:
    ended = zckpt("stats", EXAMPLE, "--json", "--progress")
    assert ended.document["command"] == "stats"  # stdout has exactly one document
    lines = [json.loads(line) for line in ended.err.splitlines()]
    assert [line["event"] for line in lines[:2]] == ["begin", "progress"]
    assert {line["command"] for line in lines} == {"stats"}
    assert (lines[-1]["done"], lines[-1]["total"]) == (10**6, 10**9)
    for line in lines:
        msgspec.convert(line, Progress)
        assert line.keys() == {*Progress.__struct_fields__}
    schema = json.loads(zckpt("schema", "progress").out)
    assert {*schema["$defs"]["Progress"]["properties"]} == {*lines[0]}


@pytest.mark.parametrize(
    "words",
    [
        ("verify", EXAMPLE),
        ("diff", EXAMPLE, EXAMPLE),
        ("stats", EXAMPLE),
        ("report", EXAMPLE, "--output", "page.html"),
        ("list", ROOT / "examples"),
        ("convert", EXAMPLE, "universal"),
        ("auto-resume", ROOT / "examples" / "run", "--dp", 4),
    ],
    ids=lambda words: words[0],
)
def test_every_long_command_says_what_it_does(
    words: tuple[Any, ...], zckpt: Zckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "zckpt:" not in zckpt(*words).err  # it ends soon
    target = ("again",) if "universal" in words else ()
    ended = zckpt(*words[: len(words) - len(target)], *target, "--progress")
    first = ended.err.splitlines()[0]
    assert first.startswith(f"zckpt: {words[0]} {words[1]}"), ended.err


def test_rank_0_alone_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched.speaks(single=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        assert launched.speaks(single=False) is (rank == 0)
        assert launched.speaks(single=True)
