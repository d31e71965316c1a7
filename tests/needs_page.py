"""The page of files that programs need to resume, from the table that zckpt asks.

python -m tests.needs_page > docs/resume-files.md
"""

from __future__ import annotations

from zckpt.training.needs import NEEDS, VERSIONS, Need

HEAD = """# Files that a program needs to resume

Beside the files of an engine, a program that trains has files of its own. This table says which of
them it reads when it resumes, and what it does without one, or with a damaged one. `verify`,
`report`, `check`, `list` and `auto-resume` ask this table, and
[Four questions](prove.md#four-questions) says what each makes of it.

| word | what the program does |
|---|---|
| ends | it ends with an error |
| anew | it says nothing, and begins the optimizer or the learning-rate schedule anew |
| goes on | it goes on, with other random numbers or without a convenience |
| unread | it does not read the file |

A file that is missing under `ends` or `anew` sets a checkpoint aside, and so does a damaged one. A
file that some programs never save is needed by nobody: if all other checkpoints of a run have it,
you get a warning. The engine's own files are all needed.
"""


def row(need: Need) -> str:
    engine = need.engine or "any"
    if need.scheduler_of:
        engine += f", the scheduler is the {need.scheduler_of}'s"
    if need.beside:
        engine += f", beside `{need.beside}`"
    return f"| `{need.name}` | {need.role.name} | {engine} | {need.missing} | {need.damaged} |"


def page() -> str:
    """The text of docs/resume-files.md."""
    parts = [HEAD]
    for program, rows in NEEDS.items():
        parts += [
            f"## {VERSIONS[program]}\n",
            "| file | role | engine | missing | damaged |\n|---|---|---|---|---|\n"
            + "".join(f"{row(need)}\n" for need in rows),
        ]
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
