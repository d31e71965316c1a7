"""The commands that write pages: `report`, and `probe-diff --html`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ..conftest import EXAMPLE, Result, texts
from ..probe.test_comparing import changed, events, write
from .conftest import Document

Zckpt = Callable[..., Result]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Document]:
    """The documents of which pages were made."""
    documents: list[Document] = []

    def render(document: Document) -> str:
        documents.append(json.loads(json.dumps(document, allow_nan=False)))
        return "<html></html>"

    monkeypatch.setattr("zckpt.reporting.page.render", render)
    return documents


def sections(document: Document) -> set[str]:
    return {key for key, value in document.items() if isinstance(value, (dict, list)) and value}


def test_probe_diff(tmp_path: Path, zckpt: Zckpt, made: list[Document]) -> None:
    write(tmp_path / "a", events())
    write(tmp_path / "b", events()[1:])
    words = ("probe-diff", tmp_path / "a", tmp_path / "b", "--html", tmp_path / "x.html")
    assert zckpt(*words).code == 0
    assert sections(made[0]) == {"line", "against"}
    assert any(line.startswith("only") for line in texts(made[0]["against"]["not_compared"]))


@pytest.mark.parametrize("command", ["inspect", "verify", "diff", "stats"])
def test_report_alone_writes_the_page_of_a_checkpoint(command: str, zckpt: Zckpt) -> None:
    ended = zckpt(command, EXAMPLE, "--html", "x.html")
    assert ended.code == 2
    assert "Hint: zckpt report PATH writes the page of a checkpoint" in ended.err


def test_a_page_needs_no_torch(zckpt_without: Zckpt, tmp_path: Path) -> None:
    page = tmp_path / "x.html"
    ended = zckpt_without(("torch",), "report", EXAMPLE, "--output", page)
    assert (ended.code, page.exists()) == (0, True), ended.err


def test_without_jinja2(zckpt: Zckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zckpt.cli.pages.find_spec", lambda name: None)
    ended = zckpt("report", EXAMPLE, "--output", tmp_path / "x.html")
    assert ended.code == 1
    assert "pip install 'zckpt[html]'" in ended.err
    assert not any(tmp_path.iterdir())


def test_names_of_files(
    example: Path, zckpt: Zckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = zckpt("report", example)
    assert "written: run.html\n" in first.out
    assert "in the place of an earlier file" in zckpt("report", example).out
    assert zckpt("report", example, "--md", "-q").out == ""
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run.html", "run.md", "run.svg"}
    assert zckpt("report", example, "--md", "--output", "x.html").code == 2
    assert zckpt("report", example, "--output", "none/x.html").code == 2
    document = zckpt("report", example, "--json").document
    assert document["command"] == "report"
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run.html", "run.md", "run.svg"}


def test_what_is_no_page_is_not_replaced(example: Path, zckpt: Zckpt, tmp_path: Path) -> None:
    weights = example / "global_step7" / "mp_rank_00_model_states.pt"
    held = weights.read_bytes()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("nothing")
    (tmp_path / "mine.svg").write_text("mine")
    (tmp_path / "empty").touch()
    for path in (weights, tmp_path / "pipe", tmp_path / "link"):
        ended = zckpt("report", example, "--output", path, "-q")
        assert (ended.code, ended.out) == (2, ""), path
        assert str(path) in ended.err
    assert zckpt("report", example, "--output", tmp_path / "mine.md").code == 2, "its picture"
    assert zckpt("verify", example, "--save-proof", tmp_path / "pipe").code == 2
    assert weights.read_bytes() == held
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "mine.svg").read_text() == "mine"
    assert zckpt("report", example, "--output", tmp_path / "empty").code == 0


def verdict_of(page: Path) -> str:
    """What a page says first."""
    (said,) = re.findall(r'<p class="verdict.*?</span> (.*?)</p>', page.read_text())
    return str(said)


def test_what_the_page_of_a_comparison_says_first(tmp_path: Path, zckpt: Zckpt) -> None:
    page, words = tmp_path / "x.html", ("--html", tmp_path / "x.html", "-q")
    write(tmp_path / "a", events())
    changed(tmp_path / "b", 8, "forward", "layers.0#0/out")
    zckpt("probe-diff", tmp_path / "a", tmp_path / "b", *words)
    assert verdict_of(page) == "the two differ"
    assert zckpt("probe-diff", tmp_path / "a", tmp_path / "a", *words).code == 0
    assert verdict_of(page) == "no difference found"


@pytest.mark.parametrize(("small", "large"), [(5e-324, 1.0), (5e-324, 1.7e308), (1e-300, 1e308)])
@pytest.mark.parametrize("ending", [".md", ".html"])
def test_numbers_of_any_size_are_shown(
    small: float, large: float, ending: str, tmp_path: Path, zckpt: Zckpt
) -> None:
    sizes = {"layers.0.w": small, "layers.1.w": large, "layers.2.w": 1.0}
    weights = {name: torch.full((3,), size, dtype=torch.float64) for name, size in sizes.items()}
    torch.save({"model": weights}, tmp_path / "model.pt")
    page = tmp_path / f"page{ending}"
    result = zckpt("report", tmp_path / "model.pt", "--output", page, *["--md"] * (ending == ".md"))
    assert result.code in (0, 3)
    assert page.is_file()
    if ending == ".md":
        assert f": {small:.4g}<" in page.with_suffix(".svg").read_text()
