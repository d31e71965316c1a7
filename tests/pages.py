"""What is on a page of the documentation: blocks of code, commands with their output, links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .conftest import ROOT

FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LAUNCHERS = ("torchrun", "srun", "mpirun")
LINK = re.compile(r"\[(?:[^][]|\[[^]]*\])*\]\(([^)\s]+)(?: \"[^\"]*\")?\)")


@dataclass(frozen=True)
class Block:
    """One fenced block; `line` is where its first line is on the page."""

    kind: str
    text: str
    line: int


@dataclass(frozen=True)
class Command:
    """A command of a console block; `output` are the lines below it, none if nothing is shown."""

    text: str
    output: tuple[str, ...]


def documents() -> list[Path]:
    """The pages whose code is tested."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    listed = []
    for match in FENCE.finditer(text):
        indent = len(match[1])
        lines = [line[indent:] for line in match[3].splitlines()]
        listed.append(Block(match[2], "\n".join(lines), text.count("\n", 0, match.start()) + 2))
    return listed


def prose(page: Path) -> str:
    """A page without its blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def whole_lines(text: str) -> list[str]:
    """The lines of a text; one that ends with a backslash goes on in the next."""
    return re.sub(r"\\\n\s*", "", text).splitlines()


def commands(block: Block) -> list[Command]:
    """The commands of a console block, which begin with `$ `. Raises ValueError for other text."""
    listed: list[Command] = []
    for line in whole_lines(block.text):
        if line.startswith("$ "):
            listed.append(Command(line[2:].strip(), ()))
        elif listed:
            listed[-1] = Command(listed[-1].text, (*listed[-1].output, line))
        elif line.strip():
            raise ValueError(f"line {block.line}: no command before {line!r}")
    return [Command(each.text, trimmed(each.output)) for each in listed]


def trimmed(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Lines without empty ones at both ends."""
    full = [number for number, line in enumerate(lines) if line.strip()]
    return lines[full[0] : full[-1] + 1] if full else ()


def matches(shown: tuple[str, ...], printed: str) -> bool:
    """Whether a command printed what its page shows.

    A line `...` stands for any lines, `...` within a line for any text. Only the number of spaces
    between columns may differ: a time of another length moves them.
    """
    pattern = "".join(
        r"(?:[^\n]*\n)*?" if line.strip() == "..." else _line(line) + r"\n" for line in shown
    )
    text = "".join(f"{_spaced(line)}\n" for line in trimmed(tuple(printed.splitlines())))
    return re.fullmatch(pattern, text) is not None


def _line(line: str) -> str:
    return r"[^\n]*".join(map(re.escape, _spaced(line).split("...")))


def _spaced(line: str) -> str:
    return re.sub(r" {2,}", " ", line.strip())


def zckpt_commands(text: str) -> Iterator[list[str]]:
    """The words after `zckpt` of every line of a shell block that runs it."""
    for line in whole_lines(text):
        for part in re.split(r"&&|\|", line.removeprefix("$ ")):
            words = shlex.split(part, comments=True) if re.search(r"\bzckpt\b", part) else []
            if words and words[0] in LAUNCHERS and "zckpt" in words:
                yield words[words.index("zckpt") + 1 :]
            elif words and words[0].rpartition("/")[2] == "zckpt":
                yield words[1:]


def needs_a_shell(command: str) -> bool:
    """Whether a command line is more than one of zckpt."""
    return re.search(r"[|&;<>$`]|^(?!zckpt )", command) is not None


def inline_code(page: Path) -> list[str]:
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(page))


def links(page: Path) -> list[str]:
    """The targets of all links that lead to no other site."""
    text = re.sub(r"`[^`\n]*`", "", prose(page))
    return [link for link in LINK.findall(text) if not re.match(r"[a-z]+:", link)]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and our site make them, and those it sets."""
    listed = dict.fromkeys(re.findall(r'<a id="([^"]+)"></a>', prose(page)), 0)
    for heading in re.findall(r"^#+ +(.+?)\s*$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        repeated = f"{slug}-{listed[slug]}" if slug in listed else slug
        listed[slug] = listed.get(slug, 0) + 1
        listed.setdefault(repeated, 1)
    return set(listed)
