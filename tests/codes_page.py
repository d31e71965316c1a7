"""The page docs/codes.md, made of the table of codes.

python -m tests.codes_page > docs/codes.md
"""

from __future__ import annotations

from zckpt.notices import TOPICS

HEAD = """# Codes

Everything that zckpt says has a code: errors, warnings, and what a report lists. A code is stable
and stands for what you do next, while its sentence may become better. It stands behind the sentence
in brackets, on a terminal and in a log: `[missing-rank-file]`. With `--json`, each notice is an
object:

| key | value |
|---|---|
| `code` | a code of this page |
| `severity` | `error` (something is wrong), `warning` (know it), `note` (harmless) |
| `subject` | the parameter, state, group, rank or option that is meant, or null |
| `file` | the file that is meant, or null |
| `message`, `hint` | the sentence, and what to do next |

An error has the same keys beside `error`, the class of its exception in Python. The columns `looks`
and `writes` are the exit codes of an error: of commands that look (`verify`, `check`, `report`),
and of commands that write (`convert`, `reshard`, `export`). Warnings and notes change no exit code.
Two errors are exceptions: an interrupted command ends with 128 plus the signal, and `check` ends
with 3 where a checkpoint does not load as it is. A code without exit codes ends no command.
"""


HEADS = "| code | meaning | how it comes about | what to do | looks | writes |"


def main() -> None:
    print(page(), end="")


def shown(exits: set[int]) -> str:
    """Exit codes for a cell of the table."""
    return " or ".join(map(str, sorted(exits, reverse=True)))


def page() -> str:
    parts = [HEAD]
    for topic, codes in TOPICS.items():
        parts += [
            f"\n## {topic}\n",
            "| code | meaning | how it comes about | what to do | looks | writes |",
        ]
        parts.append("|---|---|---|---|---|---|")
        for code, row in sorted(codes.items()):
            looks, writes = (shown({pair[place] for pair in row.exits}) for place in (0, 1))
            parts.append(
                f"| `{code}` | {row.meaning} | {row.origin} | {row.action} | {looks} | {writes} |"
            )
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
