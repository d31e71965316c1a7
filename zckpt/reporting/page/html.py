"""Renders the document of `zckpt report` as one HTML page that needs no other file."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import MissingExtra, sized
from . import words
from .charts import PALETTE, SIGNS, Chart, chart
from .curves import curves

FOLDER = Path(__file__).parent
MOST_LINES = 2000  # lines of one kind on a page
FEW = 12  # lines that are visible without a click, except faults, which all are
SCRIPTS = ("figures.js", "tables.js", "owners.js", "page.js")
SECTIONS = {
    "run": "checkpoints",
    "numbers": "measures",
    "map": "files",
    "masters": "rows",
    "steps": "",
    "against": "",
}
"""The sections of the page, in order, each with a key.

A section is shown if its value under this key is not empty; for "", if the section itself is not
empty.
"""


def render(document: Mapping[str, Any]) -> str:
    """Renders the document as the HTML of a page, with the sections that the document has.

    Raises MissingExtra without jinja2.
    """
    try:
        from jinja2 import Environment, FileSystemLoader
        from markupsafe import Markup
    except ModuleNotFoundError as error:
        raise MissingExtra(
            "extra-missing",
            "an HTML page needs the package jinja2, which is not installed",
            hint="pip install 'zckpt[html]'",
        ) from error

    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        finalize=words.shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        short=words.short,
        number=words.number,
        sized=words.size,
        cut=words.cut,
        listed=_listed,
        time=words.time,
        alone=words.alone,
        layer=partial(words.layer, document),
    )
    style, script = _text("page.css"), "".join(map(_text, SCRIPTS))
    line, run = document.get("line") or {}, document.get("run") or {"checkpoints": []}
    return environment.get_template("page.html").render(
        document=document,
        line=line,
        name=words.title(document),
        facts=words.facts(document),
        advice=words.advice(document.get("next") or {}),
        verdict=words.verdict(document),
        faults=words.of_this(document),
        of_run=words.of_run(document),
        curves=curves(document["run"]) if document.get("run") else [],
        target=partial(_target, document),
        signs=SIGNS,
        settings={"signs": SIGNS, "palette": PALETTE, "steps": words.run_labels(run)},
        most=MOST_LINES,
        few=FEW,
        sections=[name for name, part in SECTIONS.items() if _has(document.get(name), part)],
        charts=_charts(document),
        tensor=_names(document),
        policy=f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'",
        style=Markup(style),
        script=Markup(script),
        data=Markup(packed(document)),
    )


SHOWN_IN = {
    **dict.fromkeys(("missing", "unreadable", "checksum"), ("map",)),
    **dict.fromkeys(("NaN", "infinite", "dead", "constant", "denormal"), ("numbers",)),
    "impossible": ("numbers", "steps"),
    "stale": ("masters", "numbers"),
    "step": ("steps",),
}
"""The sections that show a fault, by the kind of the fault."""


def _target(document: Mapping[str, Any], fault: Mapping[str, Any]) -> str:
    """The id of the section of the page that shows a fault; "" if there is none."""
    sections = SHOWN_IN.get(fault["kind"], ())
    there = (name for name in sections if _has(document.get(name), SECTIONS[name]))
    return next(there, "")


def _has(section: Mapping[str, Any] | None, part: str) -> bool:
    return section is not None and bool(section if not part else section.get(part))


def packed(document: Mapping[str, Any]) -> str:
    """Packs the document for the page's script: base64 of gzip of JSON."""
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), 4, mtime=0)).decode()


def _text(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """The hash of a style or script for the page's Content-Security-Policy."""
    import hashlib

    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _listed(value: Any) -> str:
    """Formats the value of a hyper-parameter; a float is rounded to twelve digits."""
    if isinstance(value, float):
        return f"{value:.12g}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else str(value)


def _names(document: Mapping[str, Any]) -> Any:
    """Returns a function that maps the index of a tensor to its name, and None to a dash."""
    names = (document.get("tensors") or {}).get("name") or []
    return lambda index: (
        names[index] if isinstance(index, int) and index < len(names) else words.NONE
    )


def _charts(document: Mapping[str, Any]) -> dict[str, Chart]:
    charts: dict[str, Chart] = {}
    if run := document.get("run"):
        points = run["checkpoints"]
        charts["run"] = chart(
            words.run_labels(run),
            [point["bytes"] or 0 for point in points],
            [
                f"{point['name']}: step {words.short(point['step'])}, {words.size(point['bytes'])}"
                + (", whole" if point["whole"] else f", not whole: {point.get('why') or 'unknown'}")
                for point in points
            ],
            signs=[not point["whole"] or bool(point.get("faults")) for point in points],
            ticks=("0", sized(max((point["bytes"] or 0 for point in points), default=0))),
            linear=True,
        )
    against = document.get("against") or {}
    layers = against.get("layers") or []
    if any(row["relative"] for row in layers):
        charts["layers"] = chart(
            [words.cut(words.shown(words.layer(document, row["layer"])), 12) for row in layers],
            [row["relative"] for row in layers],
            [
                f"{words.layer(document, row['layer'])}: {words.short(row['relative'])} "
                "of the weights' RMS"
                for row in layers
            ],
        )
    return charts
