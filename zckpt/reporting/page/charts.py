"""Lays out bar charts: computes the positions of bars. Defines the signs and colors of figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from msgspec import Struct

LEFT, TOP, BOTTOM, HEIGHT = 64, 20, 26, 132
"""Pixels: left of, above and below the bars, and the height of the highest bar."""
DECADES = 30  # the axis is logarithmic if the largest value is so many times the smallest

SIGNS = {
    "checksum": "✕",
    "missing": "▨",
    "NaN": "N",
    "infinite": "∞",
    "dead": "0",
    "constant": "=",
    "denormal": "d",
    "stale": "≠",
    "step": "≠",
    "impossible": "!",
    "unreadable": "?",
    "warning": "i",
}
"""The sign of each kind of fault, since color alone must not carry meaning."""
PALETTE = [
    *((46, 30, 59), (65, 61, 123), (55, 101, 158), (52, 143, 167)),
    *((64, 183, 173), (139, 218, 178), (222, 245, 229)),
]
"""The colors of heat maps from dark to light, as (red, green, blue): seaborn's palette "mako".

Color-blind readers can order these colors too. On a light page, large values are dark; on a dark
page, they are light.
"""


class Bar(Struct, frozen=True):
    """One bar of a chart; position and size in pixels."""

    x: float
    y: float
    width: float
    height: float
    label: str  # "" if there is no room for the label
    says: str
    sign: bool  # whether something is wrong with it


class Chart(Struct, frozen=True):
    """A bar chart, laid out: its bars, and the lines across it."""

    width: float
    height: float
    base: float
    bars: list[Bar]
    lines: list[tuple[float, str]]  # y and its value
    powers: bool  # the axis is one of powers of ten


def chart(
    labels: Sequence[str],
    values: Sequence[float | None],
    says: Sequence[str],
    *,
    signs: Sequence[bool] = (),
    ticks: Sequence[str] = (),
    linear: bool = False,
) -> Chart:
    """Lays out a bar chart of `values`; for None, there is no bar.

    `says` are the tooltips of the bars. `signs` says which bars have a fault. The axis is
    logarithmic if the values differ by powers of ten, unless `linear` is True. `ticks` are texts
    for both ends of a linear axis.
    """
    present = [value for value in values if value]
    high, low = max(present, default=1.0), min(present, default=1.0)
    powers = not linear and high > DECADES * low
    bottom = math.floor(math.log10(low)) if powers else 0
    top = max(math.ceil(math.log10(high)), bottom + 1) if powers else high
    long = 6.8 * max(map(len, labels), default=0) + 8  # pixels of the longest label
    step = min(max(1000 / max(len(values), 1), 9), max(72, min(long, 160)))
    base = TOP + HEIGHT

    def tall(value: float) -> float:
        part = (math.log10(value) - bottom) / (top - bottom) if powers else value / top
        return max(HEIGHT * part, 1.5)

    bars = [
        Bar(
            x=round(LEFT + step * place + step * 0.12, 2),
            y=round(base - (tall(value) if value else 0), 2),
            width=round(step * 0.76, 2),
            height=round(tall(value) if value else 0, 2),
            label=label,
            says=text,
            sign=bool(signs) and signs[place],
        )
        for place, (label, value, text) in enumerate(
            zip(_apart(labels, step), values, says, strict=True)
        )
    ]
    if powers:
        jump = max(1, math.ceil((top - bottom) / 4))
        marks = [
            (float(power), power_of_ten(power)) for power in range(int(bottom), int(top) + 1, jump)
        ]
    else:
        marks = [(0.0, ticks[0] if ticks else "0"), (top, ticks[-1] if ticks else f"{high:.3g}")]
    lines = [
        (round(base - HEIGHT * (mark - bottom) / (top - bottom), 2), text) for mark, text in marks
    ]
    width = LEFT + step * len(values) + 8
    return Chart(round(width, 2), base + BOTTOM, base, bars, lines, powers)


def power_of_ten(exponent: int) -> str:
    """A power of ten with superscript digits: 10⁻³."""
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _apart(labels: Sequence[str], step: float) -> Iterator[str]:
    """Yields the labels of a chart; a label that would overlap the one before becomes "".

    `step` is the distance in pixels between the centers of neighboring labels.
    """
    free = -math.inf
    for place, label in enumerate(labels):
        half = 3.4 * len(label)
        center = step * (place + 0.5)
        fits = center - half > free
        free = center + half + 6 if fits else free
        yield label if fits else ""
