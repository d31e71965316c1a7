"""Lays out a run's line charts: computes the positions of lines and points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from . import words
from .charts import DECADES

LEFT, RIGHT, TOP, BOTTOM = 58, 14, 14, 24
WIDTH, HEIGHT = 350, 138  # pixels of the whole chart
TITLES = {
    "norms": "Norm of weights",
    "updates": "RMS of Adam's update",
    "moments": "RMS of exp_avg",
    "seconds": "Root of the mean of exp_avg_sq",
}
"""The titles of the charts that follow the loss, by measure, in their order."""
Point = tuple[float, float | None]
"""A point of a curve: its place on the axis of steps, and its value (None if not finite)."""


class Dot(Struct, frozen=True):
    """The point of one checkpoint in a chart; `x` and `y` in pixels."""

    x: float
    y: float
    says: str
    sign: bool  # something is wrong with it
    row: int  # in the table


class Curve(Struct, frozen=True):
    """One line chart. `lines` are the `points` attributes of its SVG polylines."""

    title: str
    width: int
    height: int
    lines: list[str]
    dots: list[Dot]
    marks: list[float]  # x of checkpoints with faults
    ticks: list[tuple[float, str]]  # y and its value
    labels: list[tuple[float, str]]  # x and the step or name
    powers: bool  # the axis is one of powers of ten
    lost: list[tuple[float, str]]  # x of values that are not finite, and what they are


def curves(run: Mapping[str, Any]) -> list[Curve]:
    """Lays out the line charts of a run: loss, weights, updates and moments.

    A chart is left out if fewer than two checkpoints have a value for it.
    """
    points, labels = run["checkpoints"], words.run_labels(run)
    by_step = words.is_by_step(run)
    places = [float(point["step"]) if by_step else float(n) for n, point in enumerate(points)]
    losses = [_finite(point.get("loss")) for point in points]
    between = [(step, loss) for step, loss in run.get("losses") or ()] if by_step else []
    ends = [*places, *(step for step, _ in between)]
    axis = Axis(labels, places, min(ends), max(ends))
    all_curves = [_curve("Loss", points, axis, losses, between)]
    for key, title in TITLES.items():
        values = [(point.get("totals") or {}).get(key) for point in points]
        all_curves.append(_curve(title, points, axis, values, ()))
    return [curve for curve in all_curves if curve is not None]


class Axis(Struct, frozen=True):
    """The horizontal axis, which all charts share."""

    labels: Sequence[str]
    places: Sequence[float]
    first: float
    last: float

    def across(self, at: float) -> float:
        """The x coordinate in pixels of a value on the axis, such as a step."""
        part = (at - self.first) / (self.last - self.first) if self.last > self.first else 0.5
        return round(LEFT + (WIDTH - LEFT - RIGHT) * part, 2)


def _curve(
    title: str,
    points: Sequence[Mapping[str, Any]],
    axis: Axis,
    values: Sequence[float | None],
    between: Sequence[Point],
) -> Curve | None:
    places, across = axis.places, axis.across
    own_points = [*zip(places, values, strict=True)]
    line = between or own_points
    present = [value for _, value in (*line, *own_points) if value is not None]
    if len(present) < 2:
        return None
    low, high = min(present), max(present)
    powers = low > 0 and high > DECADES * low
    bottom, top = (math.log10(low), math.log10(high)) if powers else (low, high)
    if top - bottom <= abs(top) * 1e-9:
        bottom, top = bottom - (abs(bottom) or 1), top + (abs(top) or 1)

    def up(value: float) -> float:
        part = ((math.log10(value) if powers else value) - bottom) / (top - bottom)
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(max(part, 0.0), 1.0), 2)

    dots = [
        Dot(across(at), up(value), f"{point['name']}: {words.short(value)}", _is_bad(point), row)
        for row, (point, at, value) in enumerate(zip(points, places, values, strict=True))
        if value is not None
    ]
    return Curve(
        title=title,
        width=WIDTH,
        height=HEIGHT,
        lines=[" ".join(f"{across(x)},{up(y)}" for x, y in part) for part in _parts(line)],
        dots=dots,
        marks=[across(at) for at, point in zip(places, points, strict=True) if _is_bad(point)],
        ticks=[(up(low), f"{low:.3g}"), (up(high), f"{high:.3g}")],
        labels=[
            *_apart((across(at), label) for at, label in zip(places, axis.labels, strict=True))
        ],
        powers=powers,
        lost=[(across(at), f"no finite value at {words.short(at)}") for at, y in line if y is None],
    )


def _is_bad(point: Mapping[str, Any]) -> bool:
    return not point["whole"] or bool(point.get("faults"))


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _parts(line: Iterable[Point]) -> list[list[tuple[float, float]]]:
    """Splits a line where a value is NaN or infinite."""
    parts: list[list[tuple[float, float]]] = [[]]
    for x, y in line:
        if y is None:
            parts.append([])
        else:
            parts[-1].append((x, y))
    return [part for part in parts if len(part) > 1]


def _apart(labels: Iterable[tuple[float, str]]) -> Iterable[tuple[float, str]]:
    """Yields labels with their positions; a label that would overlap the one before is dropped."""
    free = -math.inf
    for x, label in labels:
        half = 3.4 * len(label)
        if x - half > free:
            free = x + half + 8
            yield x, label
