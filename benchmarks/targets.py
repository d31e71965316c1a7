"""The targets of all rows, as the table of README.md.

python -m benchmarks.targets
"""

from __future__ import annotations

import re

from .rows import ROWS


def table() -> str:
    """The table in Markdown: a row for each name and goal.

    Rows that differ only by stage and size are one.
    """
    lines: dict[str, None] = {}
    for row in ROWS:
        name = re.sub(r"to ZeRO-\d, dp \d+", "to any stage and size", row.name)
        for goal in row.goals:
            aim = "at least" if goal.more else "at most"
            cells = f"| {name} | {goal.name} | {aim} {goal.target:g} | {goal.stretch:g} |"
            lines.setdefault(cells)
    return "\n".join(("| row | figure | target | stretch |", "|---|---|---|---|", *lines)) + "\n"


if __name__ == "__main__":
    print(table(), end="")
