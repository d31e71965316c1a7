"""Tables fit on a terminal, and no number and no name is broken."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from zckpt import api
from zckpt.display.tables import DIGITS, blocks, facts, table

from ..conftest import EXAMPLE, Result
from ..formats.test_masters import edit

Zckpt = Callable[..., Result]
WIDTHS = (60, 80, 100, 140)
OPTIM = "global_step7/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
LONG = "model.layers.{}.self_attn.q_proj.weight/exp_avg_sq"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets stdout be a terminal so many characters wide, without colours."""

    def of(width: int) -> None:
        monkeypatch.setattr("zckpt.display.terminal.sys.stdout.isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("NO_COLOR", "1")

    return of


@pytest.fixture
def changed(example: Path, tmp_path: Path) -> Path:
    """The example with other numbers on one rank."""

    def change(states: Any) -> None:
        for state in states["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            state["exp_avg"].data[3:9] *= torch.tensor(1.001)

    edit(example / OPTIM, change)
    return example


def plain(text: str) -> str:
    return re.sub("\x1b\\[[01]m", "", text)  # bold, and its end


def drawn(text: str) -> list[dict[str, str]]:
    """The rows of a table by the names of its columns, or of blocks of lines."""
    text = re.sub(r"2\^-?\d+ .* 2\^-?\d+", "2^...", plain(text))
    lines = text.splitlines()
    rules = [number for number, line in enumerate(lines) if line.startswith("\u2500")]
    if not rules:
        parts = text.split("\n\n")
        return [
            dict(re.split(r" {2,}", line, maxsplit=1) for line in part.splitlines())
            for part in parts
        ]
    heads = re.split(r" {2,}", lines[rules[0] - 1].strip())
    rows = []
    for line in lines[rules[0] + 1 :]:
        cells = re.split(r" {2,}", line.strip())
        if len(cells) != len(heads):
            break
        rows.append(dict(zip(heads, cells, strict=True)))
    return rows


def shows(text: str, value: object) -> bool:
    """Whether a cell is a value: a float with as many digits as there may be."""
    if isinstance(value, float):
        return text in {f"{value:.{n}g}" for n in DIGITS}
    return text == (f"{value:,}" if isinstance(value, int) else str(value))


@pytest.mark.parametrize("width", WIDTHS)
def test_stats(width: int, terminal: Callable[[int], None], zckpt: Zckpt) -> None:
    report = api.stats(EXAMPLE)
    terminal(width)
    out = zckpt("stats", EXAMPLE, "-q").out
    assert all(len(line) <= width for line in plain(out).splitlines())
    rows = drawn(out)
    assert len(rows) == len(report["tensors"])
    assert {"tensor", "min", "max", "mean"} <= rows[0].keys()
    for row, line in zip(rows, report["tensors"], strict=True):
        for head in row.keys() - {"shape", "magnitudes"}:
            assert shows(row[head], line[head]), (head, row[head], line[head])
    gone = [head for head in ("dtype", "norm", "zero", "positive") if head not in rows[0]]
    assert gone == {
        60: ["dtype", "norm", "zero", "positive"],
        80: ["dtype", "norm", "positive"],
    }.get(width, ["positive"])
    said = re.search(r"left out: (.*); --wide shows all columns $", out.replace("\n", " "))
    assert said
    assert "positive" in said[1].split(", ")


@pytest.mark.parametrize("width", WIDTHS)
def test_diff(width: int, changed: Path, terminal: Callable[[int], None], zckpt: Zckpt) -> None:
    report = api.diff(EXAMPLE, changed)
    assert report["differences"]
    terminal(width)
    ended = zckpt("diff", EXAMPLE, changed)
    assert ended.code == 3
    assert all(len(line) <= width for line in plain(ended.out).splitlines())
    keys = {"differing": "count", "max abs": "max_abs", "max ulp": "max_ulp"}
    rows = drawn(ended.out)
    assert len(rows) == len(report["differences"])
    for row, line in zip(rows, report["differences"], strict=True):
        assert {"tensor", "differing", "max abs"} <= row.keys()
        assert ("a" in row) is ("b" in row)
        for head, text in row.items():
            assert shows(text, line[keys.get(head, head)]), (head, text)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "words",
    [
        ("inspect", EXAMPLE, "--tensors", "*"),
        ("inspect", EXAMPLE, "--layout", "--tensors", "fc*"),
        ("inspect", EXAMPLE, "--steps"),
        ("formats",),
        ("list", EXAMPLE.parent),
    ],
    ids=["tensors", "layout", "steps", "formats", "list"],
)
def test_words_of_other_tables(
    words: tuple[object, ...], width: int, terminal: Callable[[int], None], zckpt: Zckpt
) -> None:
    """A word of a narrow table is one of the wide one, except for bars, which may be shorter."""
    wide = {bar.sub("BAR", word) for word in zckpt(*words).out.split()}
    terminal(width)
    out = plain(zckpt(*words).out)
    lines = [
        line
        for line in out.splitlines()
        if not re.search(r"_states\.pt$|^complete according", line)
    ]
    assert all(len(line) <= width for line in lines)
    words_shown = {bar.sub("BAR", word) for line in lines for word in line.split()}
    new = words_shown - wide - {"left", "out:", "--wide", "shows", "all", "columns"}
    assert {word.rstrip(",;:") for word in new} <= {word.rstrip(",;:") for word in wide} | {
        "\u2500" * len(line) for line in lines
    }


bar = re.compile(r"^[0-9a-z?]{20,}$")


@pytest.mark.parametrize("width", WIDTHS)
def test_wide_shows_all_with_all_digits(
    width: int, terminal: Callable[[int], None], zckpt: Zckpt
) -> None:
    terminal(width)
    for line, row in zip(
        api.stats(EXAMPLE)["tensors"], drawn(zckpt("stats", EXAMPLE, "--wide").out), strict=True
    ):
        assert {"dtype", "shape", "norm", "negative", "zero", "positive", "magnitudes"} <= {*row}
        assert row["min"] == f"{line['min']:.6g}"


def long(count: int) -> list[tuple[object, ...]]:
    return [(LONG.format(i), "F32", 1.0 / (i + 3), -1234.5678 * i, i) for i in range(count)]


@pytest.mark.parametrize(("width", "is_table"), [(60, False), (80, True), (100, True), (140, True)])
def test_a_row_becomes_a_block(
    width: int,
    is_table: bool,
    terminal: Callable[[int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminal(width)
    table(("tensor", "dtype", "min", "max", "zero"), long(3), spare=(("dtype",), ("zero",)))
    out = capsys.readouterr().out
    assert all(len(line) <= width for line in plain(out).splitlines())
    assert ("\u2500" in out) is is_table
    for name, _, low, high, _ in long(3):
        assert name in out
        row = next(row for row in drawn(out.strip()) if row["tensor"] == name)
        assert shows(row["min"], low)
        assert shows(row["max"], high)
    if not is_table:  # nothing is left out of a block
        assert drawn(out.strip())[1]["dtype"] == "F32"


def test_a_column_with_one_value_is_said(
    terminal: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    terminal(72)
    table(("tensor", "dtype", "min", "max", "zero"), long(3), spare=(("dtype",), ("zero",)))
    assert "\ndtype: F32\n" in capsys.readouterr().out


def test_a_name_without_a_place_is_broken_at_its_marks(capsys: pytest.CaptureFixture[str]) -> None:
    blocks(("tensor",), [("model.layers.0.1.self_attn.weight/exp_avg",)], 24)
    assert capsys.readouterr().out.split() == [
        "tensor", "model.", "layers.0.1.", "self_attn.", "weight/exp_avg",
    ]  # fmt: skip


def test_a_path_among_facts_is_whole(
    terminal: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    terminal(60)
    path = f"/scratch/{'run-of-many-words/' * 5}checkpoint-500"
    facts([("checkpoint", path), ("format", "a sentence of words " * 4)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"checkpoint  {path}"
    assert all(len(line) <= 60 for line in lines[1:])


@pytest.mark.parametrize("no_color", [None, "1"])
def test_a_difference_has_a_colour_and_words(
    no_color: str | None,
    changed: Path,
    terminal: Callable[[int], None],
    zckpt: Zckpt,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal(100)
    if no_color is None:
        monkeypatch.delenv("NO_COLOR")
    for words, text, colour in (
        (("diff", EXAMPLE, changed), r"\d of 23 tensors differ", "1;33"),
        (("verify", changed, "--against", EXAMPLE), f"{changed} differs from {EXAMPLE}", "1;31"),
        (("check", EXAMPLE, "--dp", 3), "does not load as it is", "1;33"),
    ):
        ended = zckpt(*words)
        assert ended.code == 3
        found = re.search(rf"\x1b\[{re.escape(colour)}m{text}\x1b\[0m", ended.out)
        assert bool(found) is (no_color is None), words
        assert re.search(text, ended.out)


def test_a_log_has_no_colours(changed: Path, zckpt: Zckpt) -> None:
    assert "\x1b" not in zckpt("diff", EXAMPLE, changed).out
    (changed / OPTIM).unlink()
    ended = zckpt("verify", changed)
    assert ended.code == 3
    assert "\x1b" not in ended.out + ended.err
