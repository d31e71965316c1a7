"""The pictures of the pages, drawn from what they show: `python docs/pictures.py` writes them.

ranks.svg       a real checkpoint of 2 ranks, its whole tensors, and the same for 4 ranks
engines.svg     what is read and written
logo.svg        two files, whole tensors, four files
grid.svg        one fragment of a grid of pp 2, tp 2, dp 4, in the whole tensor and in another grid
session.svg     commands and what they print
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

import zckpt
from zckpt import formats

HERE = Path(__file__).parent
ROOT = HERE.parent
RUN = ROOT / "examples" / "run"
COLORS = ("#0072b2", "#b34700", "#00795a")
"""Near those of Okabe and Ito, which the colour-blind tell apart; each also has its name."""
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.small { font-size: 11px; fill: #59636e }
.on { fill: #fff }
.box { fill: none; stroke: #818b98 }
.faint { fill: #d1d9e0 }
.line { stroke: #818b98; stroke-width: 1.5; fill: none }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .small { fill: #9198a1 } .faint { fill: #3d444d }
}
"""
COMMANDS = (
    "zckpt inspect examples/run",
    "zckpt reshard examples/run run3 --dp 3 --stage 3",
    "zckpt verify run3 --against examples/run",
)


def picture(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """An SVG of these elements; a screen reader says the title."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'role="img">\n<title>{escape(title)}</title>\n<style>{STYLE}</style>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def box(x: float, y: float, width: float, height: float, look: str) -> str:
    """A rectangle; `look` is a colour or the name of a class."""
    how = f'fill="{look}"' if look.startswith("#") else f'class="{look}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" {how}/>'


def text(x: float, y: float, words: str, look: str = "", anchor: str = "middle") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} class="{look}">{escape(words)}</text>'


def arrow(x: float, y: float, length: float) -> str:
    """Downwards."""
    end = y + length
    return (
        f'<path class="line" d="M{x:.1f} {y:.1f}V{end:.1f}'
        f'M{x - 4:.1f} {end - 5:.1f}L{x:.1f} {end:.1f}L{x + 4:.1f} {end - 5:.1f}"/>'
    )


# -- ranks of ZeRO


def ranks() -> str:
    """Two ranks' files, the tensors in them, and the files of four ranks."""
    with tempfile.TemporaryDirectory() as folder:
        two = Path(folder) / "run"
        zckpt.reshard(RUN, two, dp=2)
        sides = [pieces(zckpt.read(path)) for path in (two, RUN)]
    sizes = {name: max(stop for _, own, _, stop in sides[1] if own == name) for name in SHOWN}
    scale, left, gap = 640 / sum(sizes.values()), 20.0, 10.0
    starts: dict[str, float] = {}
    parts = [text(left, 18, "2 ranks saved these files", "small", "start")]
    x = left
    for name, size in sizes.items():
        starts[name] = x
        parts += [box(x, 130, size * scale, 36, SHOWN[name])]
        parts += [text(x + size * scale / 2, 153, name, "on")]
        x += size * scale + gap
    parts += [text(left, 122, "whole tensors, which no file has", "small", "start")]
    rows = ((40.0, 34.0, (76.0, 130.0)), (220.0, 270.0, (220.0, 166.0)))
    for side, row in zip(sides, rows, strict=True):
        parts += list(files(side, starts, scale, *row))
    parts += [text(left, 290, "4 ranks load these", "small", "start")]
    return picture(700, 300, "Files of 2 ranks, whole tensors, files of 4 ranks", parts)


SHOWN = dict(zip(("embedding.weight", "fc1.weight", "fc2.weight"), COLORS, strict=False))


def pieces(manifest: zckpt.Manifest) -> list[tuple[str, str, int, int]]:
    """The file of each run of elements of the masters, the parameter, and where it lies in it."""
    return [
        (fragment.extent.file, entry.parameter, fragment.start, fragment.stop)
        for entry in manifest.entries.values()
        if entry.slot == "master" and entry.parameter in SHOWN
        for fragment in entry.fragments
    ]


def files(
    side: Sequence[tuple[str, str, int, int]],
    starts: Mapping[str, float],
    scale: float,
    y: float,
    label: float,
    bands: tuple[float, float],
) -> Iterator[str]:
    """The files of one side in a row at `y`, and bands to the tensors between two heights."""
    near, far = bands
    names = sorted({file for file, *_ in side})
    total = sum(stop - start for *_, start, stop in side)
    gap = (660 - total * scale) / (len(names) - 1)
    x = 20.0
    for rank, file in enumerate(names):
        begin = x
        for _, name, start, stop in [each for each in side if each[0] == file]:
            width, at = (stop - start) * scale, starts[name] + start * scale
            yield (
                f'<path d="M{x:.1f} {near}L{at:.1f} {far}h{width:.1f}L{x + width:.1f} {near}Z" '
                f'fill="{SHOWN[name]}" opacity="0.18"/>'
            )
            yield box(x, y, width, 36, SHOWN[name])
            x += width
        yield text((begin + x) / 2, label, f"rank {rank}", "small")
        x += gap


# -- engines


def engines() -> str:
    """What is read on the left, what is written on the right."""
    kinds = [each for each in formats.FORMATS if each.name != "universal"]
    parts = [box(270, 60, 160, 36 * len(kinds) - 12, "box")]
    middle = 60 + (36 * len(kinds) - 12) / 2
    parts += [
        text(350, middle - 4, "zckpt"),
        text(350, middle + 14, "whole tensors, one step", "small"),
    ]
    for number, each in enumerate(kinds):
        y = 60 + 36 * number
        for x, there in ((20, each.reads), (480, each.writes)):
            if there:
                parts += [box(x, y, 200, 24, "box"), text(x + 100, y + 16, each.name)]
        if each.reads:
            parts += [f'<path class="line" d="M220 {y + 12}H266m-5 -4l5 4l-5 4"/>']
        if each.writes:
            parts += [f'<path class="line" d="M430 {y + 12}H476m-5 -4l5 4l-5 4"/>']
    parts += [text(120, 40, "read"), text(580, 40, "written, for any number of ranks")]
    return picture(700, 72 + 36 * len(kinds), "Formats that zckpt reads and writes", parts)


# -- a grid


def grid() -> str:
    """Where the fragment of one rank lies in the whole weight, and in a grid of tp 4."""
    parts = [text(20, 20, "pp 2, tp 2, dp 4: 16 ranks", "", "start")]
    for stage in range(2):
        for tensor in range(2):
            x, y = 20.0 + 130 * tensor, 44.0 + 92 * stage
            parts += [text(x, y - 6, f"stage {stage}, tensor rank {tensor}", "small", "start")]
            for rank in range(4):
                this = (stage, tensor, rank) == (1, 1, 2)
                parts += [box(x + 28 * rank, y, 24, 52, COLORS[0] if this else "faint")]
                parts += [text(x + 28 * rank + 12, y + 30, str(rank), "on" if this else "")]
    parts += [text(20, 216, "rank 2 of 4 has 1/4 of the flat buffer", "small", "start")]
    for x, cut, title in ((320.0, 2, "3.fc.weight, 8 x 6"), (540.0, 4, "the same for tp 4")):
        parts += [text(x, 20, title, "", "start")]
        for row in range(8):
            for column in range(6):
                parts += [
                    box(x + 22 * column, 38 + 20 * row, 20, 18, COLORS[0] if row == 6 else "faint")
                ]
        for rank in range(cut):
            top, height = 36 + 160 / cut * rank, 160 / cut - 2
            parts += [f'<rect class="box" x="{x - 3}" y="{top}" width="138" height="{height}"/>']
            parts += [text(x + 142, top + height / 2 + 4, f"{rank}", "small", "start")]
    parts += [text(320, 216, "row 2 of tensor rank 1", "small", "start")]
    parts += [text(540, 216, "row 0 of tensor rank 3", "small", "start")]
    return picture(
        700, 232, "One fragment of a grid in the whole tensor and in another grid", parts
    )


# -- time


TIMES = (
    ("convert", "ds_to_universal", "ds_to_universal / convert", "z3"),
    ("convert --weights-only", "zero_to_fp32", "zero_to_fp32 / fp32 export", "z3"),
    ("convert --to gathered", "dcp_to_torch_save", "dcp_to_torch_save / --to gathered", "dcp"),
    (
        "auto_resume, until loaded",
        "ds_to_universal, load_universal",
        "first step, universal / auto_resume",
        "z3",
    ),
    ("convert", "cp and sync", "convert / cp + sync", "z3"),
)
"""A command, another program, and the row of benchmarks/figures.json that compares them."""


def times(name: str, source: str) -> float:
    """How many times as long the other program takes."""
    rows = json.loads((ROOT / "benchmarks" / "figures.json").read_text())
    (values,) = (row["values"] for row in rows if (row["name"], row["source"]) == (name, source))
    return values["times faster"][0] if "times faster" in values else 1 / values["wall"][0]


def speed() -> str:
    """A bar for each program, as long as its time; zckpt's own is 1."""
    parts: list[str] = []
    for number, (command, other, *row) in enumerate(TIMES):
        y = 20.0 + 46 * number
        for place, (name, length) in enumerate(((f"zckpt {command}", 1.0), (other, times(*row)))):
            top = y + 18 * place
            parts += [text(240, top + 12, name, "small" if place else "", "end")]
            parts += [box(248, top, 22 * length, 14, "faint" if place else COLORS[0])]
            parts += [text(254 + 22 * length, top + 12, f"{length:.2g}", "small", "start")]
    return picture(700, 30 + 46 * len(TIMES), "Times of other programs, where zckpt takes 1", parts)


# -- the logo


def logo() -> str:
    """Two ranks' files above, four below, and the tensors between them that no rank has whole."""
    parts = [f'<rect x="{x}" y="6" width="25" height="12" rx="3" fill="#fff"/>' for x in (5, 34)]
    widths, x = (17, 21, 12), 5
    for width in widths:
        parts += [f'<rect x="{x}" y="26" width="{width}" height="12" rx="3" fill="#ffb340"/>']
        x += width + 2
    parts += [
        f'<rect x="{5 + 14 * place}" y="46" width="12" height="12" rx="3" fill="#fff"/>'
        for place in range(4)
    ]
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 64 64" role="img">\n'
        '<title>zckpt</title>\n<rect width="64" height="64" rx="10" fill="#303f9f"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


# -- a session


def session() -> str:
    """The commands in a terminal of 100 columns; times are left out, since each run has others."""
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    environment = {**os.environ, "COLUMNS": "100", "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        for command in COMMANDS:
            words = [sys.executable, "-m", *shlex.split(command)]
            ended = subprocess.run(
                words, cwd=folder, env=environment, check=True, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            console.print(Text(f"$ {command}", "bold green"))
            for line in ended.stdout.splitlines():
                console.print(Text(line if " s, " not in line else TIME.sub("... s", line)))
    plain = FONT.sub("", CONSOLE_SVG_FORMAT)
    return console.export_svg(title="zckpt", theme=MONOKAI, code_format=plain, unique_id="session")


FONT = re.compile(r"@font-face \{\{.*?\}\}", re.DOTALL)  # of another site
TIME = re.compile(r"[\d.]+ s\b")
PICTURES = {
    "ranks": ranks,
    "engines": engines,
    "grid": grid,
    "speed": speed,
    "logo": logo,
    "session": session,
}


def main() -> None:
    for name, draw in PICTURES.items():
        (HERE / "pictures" / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
