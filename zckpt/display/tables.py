"""Prints tables that fit on the terminal, without breaking a number or a name over two lines.

On a narrow terminal, numbers first get fewer digits. If that is not enough, the least important
columns are left out; if even that is not enough, each row becomes a block of lines. In a pipe or a
file, and with `--wide`, rows have every column and digit, so that grep and awk can read them. The
package rich would break texts in cells, so it is not used for this.
"""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence

from ..errors import safe

DIGITS = (6, 5, 4, 3)
"""Digits of floats: a table uses the largest number of digits that fits."""
GAP = 2  # characters between two columns
PROSE = 24  # characters that a column of sentences should have
EVERYTHING = 1_000_000  # characters: a width without a limit
Spare = Sequence[tuple[str, ...]]
"""Columns to omit on a narrow terminal, in this order; the columns of a tuple go together."""
Style = Callable[[str, object], str]
"""A function that maps the column and value of a cell to a style of rich."""


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    prose: bool = False,
    spare: Spare = (),
    style: Style | None = None,
    right: Sequence[str] = (),
    wide: bool = False,
) -> None:
    """Prints a table to stdout, with numbers and the columns `right` aligned to the right.

    With `prose`, the last column may be broken between words. `spare` are the columns that may be
    left out on a narrow terminal, the least important first.
    """
    whole = [[cell(value, DIGITS[0]) for value in row] for row in rows]
    to_right = [
        head in right or any(isinstance(row[i], (int, float)) for row in rows)
        for i, head in enumerate(heads)
    ]
    if not sys.stdout.isatty():
        plain_columns([heads, *whole], to_right)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    width = EVERYTHING if wide else Console().width
    kept, cells, widths = _fitting(heads, rows, width, prose, spare)
    if not kept:
        blocks(heads, whole, width)
        return
    if prose:  # the last column gets the rest of the width
        widths[-1] = width - sum(widths[i] + GAP for i in kept[:-1])
        cells = [[*row[:-1], "\n".join(_folded(row[-1], widths[-1]))] for row in cells]
    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for i in kept:
        drawn.add_column(Text(heads[i]), justify="right" if to_right[i] else "left", no_wrap=True)
    for values, row in zip(rows, cells, strict=True):
        look = [style(heads[i], values[i]) if style else "" for i in kept]
        drawn.add_row(*(Text(row[i], own) for i, own in zip(kept, look, strict=True)))
    Console(highlight=False, width=width).print(drawn)
    _print_left_out(heads, whole, kept, width)


def _fitting(
    heads: Sequence[str], rows: Sequence[Sequence[object]], width: int, prose: bool, spare: Spare
) -> tuple[list[int], list[list[str]], list[int]]:
    """Chooses columns and digits that fit into `width` characters.

    Returns the indexes of the columns, the text of all cells, and the widths of the columns; three
    empty lists if even the smallest table does not fit.
    """
    from rich.cells import cell_len

    shown = {n: [[cell(value, n) for value in row] for row in rows] for n in DIGITS}
    widths: dict[int, list[int]] = {}
    for n, cells in shown.items():
        columns = [[head, *(row[i] for row in cells)] for i, head in enumerate(heads)]
        widths[n] = [max(map(cell_len, column)) for column in columns]
        if prose:
            words = [cell_len(word) for text in columns[-1] for word in text.split()]
            widths[n][-1] = min(widths[n][-1], max([PROSE, *words]))
    for number in range(len(spare) + 1):
        gone = {head for heads in spare[:number] for head in heads}
        kept = [i for i, head in enumerate(heads) if head not in gone]
        for n in DIGITS:
            if sum(widths[n][i] + GAP for i in kept) - GAP <= width:
                return kept, shown[n], widths[n]
    return [], [], []


def _print_left_out(
    heads: Sequence[str], rows: Sequence[Sequence[str]], kept: Sequence[int], width: int
) -> None:
    """Prints the columns that were left out of a table, because the terminal is too narrow.

    If a column has the same value in all rows, this value is printed, or else only the column's
    name.
    """
    several = []
    for i, head in enumerate(heads):
        if i not in kept:
            values = {row[i] for row in rows} - {"-"}
            if len(values) == 1:
                print(f"{head}: {values.pop()}")
            else:
                several.append(head)
    if several:
        text = f"left out: {', '.join(several)}; --wide shows all columns"
        print(textwrap.fill(text, width, break_on_hyphens=False))


def facts(rows: Sequence[tuple[str, str]]) -> None:
    """Prints a line for each name and value. Paths are not broken, so that users can copy them."""
    cells = [[safe(text) for text in row] for row in rows]
    if not sys.stdout.isatty():
        plain_columns(cells, [False, False])
        return
    label = max(len(name) for name, _ in cells) + GAP
    width = max(shutil.get_terminal_size().columns - label, PROSE)
    for name, text in cells:
        lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
        print(name.ljust(label) + f"\n{'':{label}}".join(lines))


def blocks(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> None:
    """Prints a line per cell, for a table that does not fit on the terminal."""
    label = max(map(len, heads)) + GAP
    for row in rows:
        for head, text in zip(heads, row, strict=True):
            lines = _folded(text, max(width - label, 1))
            print((head.ljust(label) + f"\n{'':{label}}".join(lines)).rstrip())
        print()


PARTS = re.compile(r"[^/.:-]*[/.:-]*(?:(?<=[/.:-])(?=\d)[^/.:-]*[/.:-]*)*")
"""The parts of a name, each with its separator; a version or a fraction is one part."""


def _folded(text: str, width: int) -> list[str]:
    from rich.cells import cell_len

    lines = [""]
    for word in text.split():
        parts = [word] if cell_len(word) <= width else filter(None, PARTS.findall(word))
        for place, part in enumerate(parts):
            longer = f"{lines[-1]}{'' if place else ' '}{part}".lstrip()
            if lines[-1] and cell_len(longer) > width:
                lines.append(part)
            else:
                lines[-1] = longer
    return lines


def plain_columns(lines: Sequence[Sequence[str]], right: Sequence[bool]) -> None:
    """Prints columns, each as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(line, widths, right, strict=True)
        ]
        print("  ".join(cells).rstrip())


def cell(value: object, digits: int | None = None) -> str:
    """The text of a value in a cell; a float gets `digits` digits, or all if `digits` is None."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and digits is not None:
        return f"{value:.{digits}g}"
    return f"{value:,}" if isinstance(value, int) else safe(value)
