"""Draws heat maps and curves: differences of two recorded runs, and the layers of a model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from ..core.checkpoint.layers import Places
from ..core.grouping import neighbors
from ..errors import safe, short

SHADES = " .:-=+*#%@"  # one character per power of ten
FAINTEST, STRONGEST = -9, -1  # powers of ten
ROWS, COLUMNS = 40, 64
SPARKS = "▁▂▃▄▅▆▇█"
CURVES = 6  # metrics that are drawn on a terminal: the loss, and metrics that differ

Cell = float | None


def shade(distance: Cell) -> int:
    """The number of a shade: 0 for equal tensors, up to 9; -1 if nothing was recorded."""
    if distance is None:
        return -1
    if not distance:
        return 0
    power = STRONGEST if math.isinf(distance) else math.floor(math.log10(distance))
    return 1 + min(max(power, FAINTEST), STRONGEST) - FAINTEST


def drawn(heat: dict[str, Any], columns: int | None) -> Iterator[str]:
    """Yields a heat map for a terminal: a line per module, and a column per step.

    Modules are in the order of the forward pass. Names are cut to make lines of at most `columns`
    characters, if possible.
    """
    names, rows, steps = _fitting(heat)
    if columns is not None:
        names = [_cut(name, max(16, columns - len(rows[0]) - 3)) for name in names]
    width = max(map(len, names), default=0)
    for name, row in zip(names, rows, strict=True):
        cells = "".join("_" if (place := shade(cell)) < 0 else SHADES[place] for cell in row)
        yield f"{name.ljust(width)} |{cells}|"
    yield f"{''.ljust(width)}  step {steps[0]} to {steps[-1]}; {_legend()}"


def layers(places: Places, cells: Mapping[str, float], columns: int) -> Iterator[str]:
    """Yields a picture for a terminal: a line per kind of parameter, and a column per layer.

    `places` states the layer and the kind of each parameter, and `cells` its magnitude. The height
    of a block character shows the power of two. `0` stands for zero, and `!` for NaN or infinity.
    """
    exponents = [math.log2(cell) for cell in cells.values() if 0 < cell < math.inf]
    if not exponents:
        return
    low, high = math.floor(min(exponents)), math.floor(max(exponents)) + 1
    rows: dict[int, dict[int, float]] = {}
    layers_per_column = -(-len(places.rows) // COLUMNS)
    for name, cell in cells.items():
        layer, kind = places.of[name]
        row = rows.setdefault(kind, {})
        row[layer // layers_per_column] = max(cell, row.get(layer // layers_per_column, 0.0))
    count = -(-len(places.rows) // layers_per_column)
    names = [_cut(safe(places.columns[kind]), max(16, columns - count - 3)) for kind in rows]
    width = max(map(len, names))
    for name, row in list(zip(names, rows.values(), strict=True))[:ROWS]:
        blocks = "".join(_block(row.get(place), low, high) for place in range(count)).rstrip()
        yield f"{name.ljust(width)}  {blocks}"
    if len(names) > ROWS:
        yield f"and {len(names) - ROWS:,} more kinds"
    first, last = (_cut(safe(places.rows[place]), 24) for place in (0, -1))
    yield f"{''.ljust(width)}  {first} to {last}; {SPARKS[0]} 2^{low} to {SPARKS[-1]} 2^{high}"


def _block(cell: Cell, low: int, high: int) -> str:
    if cell is None:
        return " "
    if not cell or not math.isfinite(cell):
        return "!" if cell else "0"
    return _spark((math.log2(cell) - low) / (high - low))


def _spark(height: float) -> str:
    return SPARKS[min(max(int(height * len(SPARKS)), 0), len(SPARKS) - 1)]


def _cut(name: str, most: int) -> str:
    return name if len(name) <= most else f"...{name[3 - most :]}"


def _legend() -> str:
    return f"equal '{SHADES[0]}', 1e{FAINTEST} '{SHADES[1]}' to 1e{STRONGEST} '{SHADES[-1]}'"


def _fitting(heat: dict[str, Any]) -> tuple[list[str], list[list[Cell]], list[int]]:
    """Reduces a heat map to at most ROWS lines and COLUMNS columns.

    Neighboring cells are joined, and get the largest of their distances. Returns the names of the
    lines, the cells of each line, and the steps.
    """
    narrow = [
        [_worst([_cell(value) for value in some]) for some in neighbors(row, COLUMNS)]
        for row in heat["distances"]
    ]
    rows = [
        [_worst(column) for column in zip(*some, strict=True)] for some in neighbors(narrow, ROWS)
    ]
    names = [
        some[0] if len(some) == 1 else f"{some[0]} ... {some[-1]}"
        for some in neighbors(heat["modules"], ROWS)
    ]
    return names, rows, list(heat["steps"])


def _cell(value: Any) -> Cell:
    return None if value is None else float(value)


def _worst(cells: Sequence[Cell]) -> Cell:
    return max((cell for cell in cells if cell is not None), default=None)


def curves(metrics: dict[str, Any]) -> Iterator[str]:
    """Yields curves for a terminal: two lines per metric, one for each run, on the same scale."""
    chosen = [
        name
        for name, curve in metrics.items()
        if len(curve["steps"]) > 1 and (name == "loss" or curve["a"] != curve["b"])
    ][:CURVES]
    width = max(map(len, chosen), default=0)
    for name in chosen:
        sides, low, high = _scaled(metrics[name])
        for side, values in sides.items():
            label = name if side == "a" else ""
            ends = f"{short(values[0])} to {short(values[-1])}"
            yield f"{label.ljust(width)}  {side} {_sparks(values, low, high)} {ends}"


def _scaled(curve: dict[str, Any]) -> tuple[dict[str, list[float]], float, float]:
    """A curve for each run, and the smallest and the largest finite value in both."""
    sides = {side: [float(value) for value in curve[side]] for side in "ab"}
    finite = [value for values in sides.values() for value in values if math.isfinite(value)]
    return sides, min(finite, default=0.0), max(finite, default=0.0)


def _sparks(values: Sequence[float], low: float, high: float) -> str:
    """Draws values as at most COLUMNS block characters, each for the mean of several neighbors.

    The lowest character stands for `low`, and the highest for `high`. `!` stands for NaN or
    infinity.
    """
    drawn = []
    for some in neighbors(values, COLUMNS):
        if not all(map(math.isfinite, some)):
            drawn.append("!")
            continue
        height = (math.fsum(some) / len(some) - low) / (high - low) if high > low else 0.0
        drawn.append(_spark(height))
    return "".join(drawn)


COLORS = (
    "#f4f4f4", "#ffffd9", "#edf8b1", "#fee391", "#fec44f",
    "#fe9929", "#ec7014", "#cc4c02", "#993404", "#662506",
)  # fmt: skip


CELL = 14  # pixels: the width of a step


def svg(report: dict[str, Any]) -> str:
    """The heat map as an SVG file; a cell's tooltip has its module, step and distance."""
    heat, size, left, top = report["map"], CELL, 320, 40
    names, steps = heat["modules"], heat["steps"]
    width = left + size * len(steps) + 20
    height = top + size * len(names) + 30 + (PLOT + GAP) * len(report["metrics"])
    big = report["big"]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="monospace" font-size="10">',
        f'<text x="4" y="14">{_shown(report["a"])} against {_shown(report["b"])}</text>',
        f'<text x="4" y="28">steps {steps[0]} to {steps[-1]}; {escape(_legend())}</text>',
    ]
    for line, (name, row) in enumerate(zip(names, heat["distances"], strict=True)):
        y = top + size * line
        parts.append(
            f'<text x="{left - 6}" y="{y + 10}" text-anchor="end">{_shown(_cut(name, 50))}</text>'
        )
        for column, value in enumerate(row):
            if value is None:
                continue
            first = big and (name, steps[column]) == (big["module"], big["step"])
            stroke = ' stroke="#000" stroke-width="2"' if first else ""
            parts.append(
                f'<rect x="{left + size * column}" y="{y}" width="{size - 1}" height="{size - 1}" '
                f'fill="{COLORS[shade(_cell(value))]}"{stroke}>'
                f"<title>{_shown(name)}, step {steps[column]}: {value}</title></rect>"
            )
    parts += _plots(report["metrics"], top + size * len(names) + 20, left)
    return "\n".join([*parts, "</svg>", ""])


PLOT, GAP = 60, 24  # pixels: the height of a curve, and the space between two curves
LINES = {"a": "#1f77b4", "b": "#d62728"}


def _plots(metrics: dict[str, Any], top: int, left: int) -> Iterator[str]:
    """Yields the SVG of a plot for each metric, with a line for each run.

    `top` and `left` are pixels.
    """
    for place, (name, curve) in enumerate(metrics.items()):
        sides, low, high = _scaled(curve)
        y = top + (PLOT + GAP) * place
        text = f"{_shown(name)}: {short(low)} to {short(high)}"
        yield f'<text x="4" y="{y + PLOT // 2}">{text}</text>'
        for side, values in sides.items():
            points = " ".join(
                f"{left + CELL * column},{y + PLOT * (1 - (value - low) / ((high - low) or 1)):.1f}"
                for column, value in enumerate(values)
                if math.isfinite(value)
            )
            yield f'<polyline points="{points}" fill="none" stroke="{LINES[side]}"/>'


def _shown(name: str) -> str:
    return escape(safe(name))
