"""The page of known faults, from the table that readers and writers ask.

python -m tests.fault_page > docs/faults.md
"""

from __future__ import annotations

from itertools import groupby

from zckpt.training.faults import FAULTS, Fault

HEAD = """# Known faults of programs that train

Some releases save or load wrong values without an error. You find here each such fault that zckpt
knows, how it shows, and what zckpt does. The names are for links: `faults.md#deepspeed-moq`.

Sources are paths in the program's package. A fault is listed if files, arguments or versions betray
it; what a program says itself, by an error, is on the page of its engine.

If you know another one, [report it](https://zckpt.example/issues) with a small checkpoint that
shows it.
"""


def section(fault: Fault) -> str:
    return "\n".join(
        (
            f"### {fault.name}",
            "",
            fault.wrong,
            "",
            "| | |",
            "|---|---|",
            f"| versions | {fault.versions} |",
            f"| sign | {fault.sign} |",
            f"| source | {fault.source} |",
            f"| zckpt | {fault.action} |",
            "",
        )
    )


def page() -> str:
    """The text of docs/faults.md."""
    parts = [HEAD]
    for program, faults in groupby(FAULTS, key=lambda fault: fault.program):
        parts += [f"## {program}\n", *map(section, faults)]
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
