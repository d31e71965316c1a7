"""README, pages and pictures show the figures of benchmarks/figures.json, and no others."""

from __future__ import annotations

import re

import pytest

from benchmarks import figures, targets

from .conftest import ROOT

FIGURES = figures.read()
NUMBERS = re.compile(
    r"(\d[\d.,]*) (?:MiB|times faster|times less)|(\d\.\d\d) (?:of it|of the time|times as long)"
)
NO_FIGURES = {"256 MiB"}  # a limit that `--memory` has


def shown(name: str, source: str, goal: str = "memory") -> str:
    """A figure as pages write it: the median of a goal, or memory in MiB."""
    row = FIGURES[name, source]
    value = row._asdict()[goal] if goal in ("memory", "rival") else row.values[goal][0]
    return f"{value:,.0f}" if value >= 10 else f"{value:g}" if value < 2 else f"{value:.2g}"


def ranged(name: str, source: str, goal: str) -> str:
    middle, least, most = FIGURES[name, source].values[goal]
    return f"{middle:.2f} of it ({least:.2f} to {most:.2f})"


def cost(command: str, source: str) -> str:
    return f"{FIGURES[command, source].values['CPU s'][0]} s, {shown(command, source)} MiB"


CP = ("convert / cp + sync", "z3")
UNIVERSAL = ("ds_to_universal / convert", "z3")
FP32 = ("zero_to_fp32 / fp32 export", "z3")
GATHERED = ("dcp_to_torch_save / --to gathered", "dcp")
RESUME = ("first step, universal / auto_resume", "z3")
VERIFY = "verify / reading once"
PARTS = "two parts / two threads"
PIECES = ("inspect", "DCP, 1.1 million pieces")
FASTER = "times faster"
README = (
    f"took {shown(*CP, 'wall')} of the time of `cp` and `sync` and {shown(*CP)} MiB of memory,",
    f"was {shown(*UNIVERSAL, FASTER)} times faster than DeepSpeed's `ds_to_universal`",
    f"was {shown(*FP32, FASTER)} times faster than `zero_to_fp32`",
)
PERFORMANCE = (
    f"| {ranged(*CP, 'wall')} | {shown(*CP)} MiB |",
    f"| {shown(*UNIVERSAL, FASTER)} times faster | {shown(*UNIVERSAL)} MiB |",
    f"| {shown(*FP32, FASTER)} times faster | {shown(*FP32)} MiB; "
    f"`zero_to_fp32`: {shown(*FP32, 'rival')} MiB |",
    f"| {shown(*RESUME, FASTER)} times faster, {shown(*RESUME, 'seconds')} s |",
    f"| {shown(VERIFY, 'z3', 'wall')} of it | {shown(VERIFY, 'z3')} MiB |",
    f"`verify` of ZeRO-2 takes {shown(VERIFY, 'z2', 'wall')} times as long",
    f"ds_to_universal takes {shown(*UNIVERSAL, FASTER)}, zero_to_fp32 {shown(*FP32, FASTER)}, "
    f"dcp_to_torch_save {shown(*GATHERED, FASTER)}]",
    f"10 MB of optimizer files need {shown('convert', '10 MB')} MiB, "
    f"and 1 GB needs {shown('convert', '1 GB')}.",
    f"({shown(PARTS, 'z3', 'wall')} to {shown(PARTS, 'z3-355M', 'wall')} of the time)",
    f"`torchrun` alone needs {shown('torchrun alone', 'two processes', 'seconds')} s",
    f"take `inspect` {shown(*PIECES, 'seconds')} s and {shown(*PIECES)} MiB; torch's "
    f"`read_metadata` alone takes {shown(*PIECES, 'read_metadata seconds')} s and "
    f"{shown(*PIECES, 'rival')} MiB",
    *(
        f"| {source.replace(' tensors x dp ', ' | ')} | {cost('inspect', source)} | "
        f"{cost('convert', source)} |"
        for name, source in FIGURES
        if name == "inspect" and " x dp " in source
    ),
)
SENTENCES = {"README.md": README, "docs/performance.md": PERFORMANCE}


@pytest.mark.parametrize(
    ("page", "text"), [(page, text) for page, texts in SENTENCES.items() for text in texts]
)
def test_a_page_shows_the_measured_figure(page: str, text: str) -> None:
    assert text in (ROOT / page).read_text()


@pytest.mark.parametrize("page", SENTENCES)
def test_a_page_shows_no_other_figure(page: str) -> None:
    for match in NUMBERS.finditer((ROOT / page).read_text()):
        if match[0] not in NO_FIGURES:
            assert any(match[0] in text for text in SENTENCES[page]), match[0]


def test_every_figure_says_where_it_is_from() -> None:
    for row in FIGURES.values():
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row.date)
        assert row.machine
        assert row.command.startswith("python -m benchmarks")


def test_the_targets_of_the_page_are_those_of_the_rows() -> None:
    assert targets.table() in (ROOT / "benchmarks" / "README.md").read_text(), (
        "put the output of `python -m benchmarks.targets` into benchmarks/README.md"
    )
