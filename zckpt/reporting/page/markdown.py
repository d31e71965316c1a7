"""Renders the document of `zckpt report` as about 20 lines of Markdown, and a picture.

This is for sites that do not show HTML pages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import escape

from ...core.grouping import neighbors
from . import words
from .charts import DECADES, PALETTE, SIGNS

LINES = 3  # lines for faults; the HTML page has all faults
ROWS, COLUMNS = 64, 40  # cells of the picture; if there are more, neighbors are joined
TALL, WIDE = 20, 26  # pixels: height and width of a cell
LEVELS = 16  # colors
TEXT = "font-family='ui-sans-serif,-apple-system,Segoe UI,Arial,sans-serif'"
LEFT_OUT = ("weights", "versions", "optimizer")  # facts for which the table has no room
SHARED = {
    "training": ("loss", "learning rate", "epoch", "global batch"),
    "written by": ("ranks",),
    "saved": ("size",),
    "checksums": ("digest",),
}
"""Lines of the table, with the facts that are appended to each."""


def render_markdown(document: Mapping[str, Any], picture: str = "report.svg") -> tuple[str, str]:
    """The Markdown text, and the SVG picture to which it links, for light and dark pages."""
    path = _plain(document["path"])
    name = " of ".join(filter(None, words.title(document)))
    faults = sorted(document.get("faults") or [], key=lambda fault: bool(fault.get("checkpoint")))
    advice = words.advice(document.get("next") or {})
    state, judged = words.verdict(document)
    facts = _facts(document)
    listed = [
        f"{_sign(fault)} **{kind}**: {_plain(words.alone(fault['message'], kind))}"
        for fault in faults
        for kind in [fault["kind"]]
    ]
    if len(listed) > LINES:
        listed[LINES - 1 :] = [f"and {len(listed) - LINES + 1:,} more lines"]
    return "\n".join(
        [
            f"# {_plain(name)}",
            "",
            f"{MARKS[state]} {judged}, by `zckpt {document['command']}` of {path}"
            + f". {_plain(advice, 1000)}" * bool(advice),
            "",
            "| what | value |",
            "|---|---|",
            *(f"| {_plain(key)} | {_plain(value)} |" for key, value in facts),
            "",
            f"![Numbers of {_plain(name)}]({quote(picture)})",
            *([""] if listed else []),
            *(f"* {text}" for text in listed),
            "",
        ]
    ), "\n".join([*_picture(document, name), ""])


def _facts(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = dict(words.facts(document))
    rows: dict[str, str] = {}
    owner = {key: line for line, others in SHARED.items() for key in (line, *others)}
    for key, value in facts.items():
        line = owner.get(key, key)
        text = value if line == key else f"{key} {value}"
        rows[line] = f"{rows[line]}, {text}" if line in rows else text
    return [(key, value) for key, value in rows.items() if key not in LEFT_OUT]


MARKS = {"bad": "✕", "odd": "!", "good": "✓"}


def _sign(fault: Mapping[str, Any]) -> str:
    return SIGNS.get(fault["kind"], "!")


def _plain(text: str, most: int = 200) -> str:
    """Escapes Markdown's special characters, and cuts the text to `most` characters."""
    text = words.cut(words.shown(text), most)
    return re.sub(r"[\\`*\[\]<>|~&$@]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\\g<0>", text)


def _xml(text: str, most: int = 34) -> str:
    return escape(words.cut(words.shown(text), most))


def _picture(document: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yields the lines of the SVG: a card with the name, the verdict, and the heat map."""
    numbers = document.get("numbers") or {}
    measures = numbers.get("measures") or [{"title": "", "cells": []}]
    marked = _marked(document)
    measure = max(measures, key=lambda one: sum(cell[3] in marked for cell in one["cells"]))
    rows, columns, cells = _fitting(document, measure["cells"], marked)
    left, slant = 24 + _long(rows, 6.6), 14 + _long(columns, 4.9)
    top = 84 + slant
    width = max(left + WIDE * len(columns) + slant, 560)
    height = top + TALL * len(rows) + 58 if rows else 90
    yield (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' "
        f"viewBox='0 0 {width} {height}' role='img' {TEXT} font-size='12'>"
    )
    yield from _head(document, name, width, height)
    for place, row in enumerate(rows):
        y = top + TALL * place + 14
        yield f"<text x='{left - 8}' y='{y}' text-anchor='end'>{_xml(row)}</text>"
    for place, column in enumerate(columns):
        x = left + WIDE * place + 15
        yield f"<text transform='translate({x} {top - 8}) rotate(-45)'>{_xml(column)}</text>"
    values = [value for value, _ in cells.values() if value]
    low, high = min(values, default=0), max(values, default=0)
    powers = low > 0 and high > DECADES * low
    for (row_index, column_index), (value, sign) in cells.items():
        x, y = left + WIDE * column_index, top + TALL * row_index
        part = _part(value, low, high, powers) if value else 0.0
        level = f"l{min(int(part * LEVELS), LEVELS - 1)}" if value else "none"
        says = f"{rows[row_index]}, {columns[column_index]}: {words.short(value)}"
        yield (
            f"<g><title>{_xml(says, 200)}</title><rect class='{level}{' hurt' if sign else ''}' "
            f"x='{x + 1}' y='{y + 1}' width='{WIDE - 2}' height='{TALL - 2}'/>"
            + (f"<text class='sign' x='{x + WIDE / 2}' y='{y + 15}'>{sign}</text>" if sign else "")
            + "</g>"
        )
    if values:
        yield from _scale(measure["title"], low, high, powers, top + TALL * len(rows) + 24)
    yield "</svg>"


def _head(document: Mapping[str, Any], name: str, width: int, height: int) -> Iterator[str]:
    """Yields the beginning of the SVG: the card, its style, and its first two lines of text."""
    kind, judged = words.verdict(document)
    facts_by_name = dict(words.facts(document))
    said = (
        f"step {facts_by_name['step']}" if "step" in facts_by_name else "",
        *(facts_by_name.get(key, "") for key in ("written by", "ranks")),
        f"{facts_by_name['parameters']} parameters" if "parameters" in facts_by_name else "",
    )
    facts = " · ".join(filter(None, said))
    yield f"<title>{_xml(name, 200)}: {_xml(judged, 200)}</title>"
    yield f"<style>{_style()}</style>"
    yield f"<rect class='card' x='.5' y='.5' width='{width - 1}' height='{height - 1}' rx='10'/>"
    yield f"<text class='ink title' x='20' y='34'>{_xml(name, 50)}</text>"
    yield f"<text class='{kind} end' x='{width - 20}' y='34'>{MARKS[kind]} {_xml(judged)}</text>"
    yield f"<text x='20' y='58'>{_xml(facts, (width - 40) // 6)}</text>"


def _scale(title: str, low: float, high: float, powers: bool, y: int) -> Iterator[str]:
    """Yields the legend of the heat map's colors, at height `y` of the SVG.

    With `powers`, the colors are spaced by powers of ten.
    """
    start = 86 + 6 * len(words.cut(title, 34))
    yield f"<text x='20' y='{y + 10}'>{_xml(title)}</text>"
    yield f"<text x='{start - 6}' y='{y + 10}' text-anchor='end'>{words.short(low)}</text>"
    for level in range(LEVELS):
        x = start + 8 * level
        yield f"<rect class='l{level}' x='{x}' y='{y}' width='8' height='12'/>"
    by = ", by powers of ten" if powers else ""
    yield f"<text x='{start + 8 * LEVELS + 6}' y='{y + 10}'>{words.short(high)}{by}</text>"


def _long(names: list[str], each: float) -> int:
    return round(each * max((len(words.cut(name, 34)) for name in names), default=0))


def _part(value: float, low: float, high: float, powers: bool) -> float:
    if high <= low:
        return 0.5
    if powers:  # quotients of the numbers themselves may be infinite
        return (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))
    return (value - low) / (high - low)


def _marked(document: Mapping[str, Any]) -> dict[int, str]:
    """Maps the index of each tensor with a fault to the sign of the fault, such as `N` for NaN.

    The picture shows the sign (one of `SIGNS`) in the tensor's cell of the heat map. If a tensor
    has several faults, the sign is that of the first one in the document.
    """
    names = (document.get("tensors") or {}).get("name") or []
    signs = {fault["tensor"]: _sign(fault) for fault in reversed(document.get("faults") or [])}
    return {place: signs[name] for place, name in enumerate(names) if name in signs}


def _fitting(
    document: Mapping[str, Any], cells: list[list[Any]], marked: Mapping[int, str]
) -> tuple[list[str], list[str], dict[tuple[int, int], tuple[float | None, str]]]:
    """Joins neighboring cells until the heat map fits into ROWS rows and COLUMNS columns.

    Returns the names of rows and of columns, and for each cell the largest value and the sign of a
    fault in it ("" if none).
    """
    numbers = document.get("numbers") or {}
    names = [words.layer(document, row) for row in numbers.get("rows") or []]
    tall, rows = _merged(names, ROWS)
    wide, columns = _merged(numbers.get("columns") or [], COLUMNS)
    cells_by_place: dict[tuple[int, int], tuple[float | None, str]] = {}
    for row, column, value, tensor in cells:
        key = row // tall, column // wide
        before, sign = cells_by_place.get(key, (None, ""))
        finite_values = [item for item in (value, before) if item is not None]
        cells_by_place[key] = max(finite_values, default=None), sign or marked.get(tensor, "")
    return rows, columns, cells_by_place


def _merged(names: list[str], most: int) -> tuple[int, list[str]]:
    """Joins neighboring rows, or columns, until at most `most` remain.

    `names` are their names. Returns how many are joined each time, and the new names.
    """
    parts = neighbors(names, most)
    size = len(parts[0]) if parts else 1
    return size, [part[0] if len(part) == 1 else f"{part[0]} … {part[-1]}" for part in parts]


def _style() -> str:
    themes = {
        "": ("#fff", "#dfe3e2", "#16191d", "#565e66", "#b3123f", "#12663f", "#7a5200", "#f0f2f1"),
        "dark": (
            *("#171b1f", "#2c343b", "#e7eaec", "#a0abb4"),
            *("#ff7d92", "#6fd3a2", "#e8bd5f", "#1e2429"),
        ),
    }
    text = ""
    for theme, (card, rule, ink, muted, bad, good, odd, hollow) in themes.items():
        rules = (
            f".card{{fill:{card};stroke:{rule}}}text{{fill:{muted}}}.ink{{fill:{ink}}}"
            f".bad,.sign{{fill:{bad}}}.good{{fill:{good}}}.odd{{fill:{odd}}}"
            ".title{font-size:18px}.title,.end{font-weight:600}.end{text-anchor:end}"
            f".none{{fill:{hollow}}}.hurt{{stroke:{bad};stroke-width:2}}"
            f".sign{{stroke:{card};stroke-width:3;paint-order:stroke;text-anchor:middle;"
            "font-weight:700}"
        )
        for level in range(LEVELS):
            part = level / (LEVELS - 1)
            rules += f".l{level}{{fill:rgb{_color(0.08 + 0.92 * part if theme else 1 - part)}}}"
        text += f"@media(prefers-color-scheme:dark){{{rules}}}" if theme else rules
    return text


def _color(place: float) -> tuple[int, ...]:
    """The color of a number from 0 to 1 in the palette: red, green and blue."""
    below = min(int(place * (len(PALETTE) - 1)), len(PALETTE) - 2)
    part = place * (len(PALETTE) - 1) - below
    pairs = zip(PALETTE[below], PALETTE[below + 1], strict=True)
    return tuple(round(low + (high - low) * part) for low, high in pairs)
