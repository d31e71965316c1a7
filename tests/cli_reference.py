"""The page docs/cli.md, made of what the commands themselves say with --help.

python -m tests.cli_reference > docs/cli.md
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click

from zckpt.cli import cli

SHOWS_ALL = "zckpt.shows_all"
"""With this key in a context, the help has the rare options too."""
HEAD = """# Commands

You find every command here, with its options and their defaults. It is the text of
`zckpt COMMAND --help`.

| command | what it does |
|---|---|
"""
TAIL = """## Terminal and logs

A table breaks no number and no name. On a narrow terminal numbers get fewer digits, then columns
are left out, which the line below names (`--wide` shows all), and at last each row is a block of
lines. In a pipe or a file rows have all columns and digits. Damage and differences are red or
yellow on a terminal, unless NO_COLOR is set, and always in words too.

Without a terminal a command says on stderr what it does and where, after ten seconds, and then a
line a minute, such as `12 of 98 GB, 210 MB/s, 7 min left`; of several processes rank 0 alone
does. `-q` leaves this out. `--progress` prints the first line at once, and lines on a terminal
too. With `--json` there are none, and with `--json --progress` each one is a JSON document on
stderr (`zckpt schema progress`), while stdout has exactly one.

## In CI

`verify`, `check` and `list` print GitHub's annotations with `--format github`, so that a job shows
each finding with its code, and with `--format junit` the XML that Jenkins, GitLab and others show,
with a test case per checkpoint: a failure has findings, and an error could not be looked at.
`verify --json --brief` leaves out `held` and `digests`, which have an entry per tensor and rank.

## Exit codes

| code | means |
|---|---|
| 0 | done, or equal |
| 1 | the command failed, and has written no target |
| 2 | wrong usage |
| 3 | `verify`, `diff`, `probe-diff` or `list` found something; `check`: it does not load as it is |
| 130, 143 | interrupted: there is no target, and the hint says whether `--resume` can continue |
"""


class Markdown(click.HelpFormatter):
    """Takes the help of a command, and writes it as Markdown instead of wrapping its lines."""

    def __init__(self) -> None:
        super().__init__(width=10_000, max_width=10_000)
        self.lines: list[str] = []
        self.is_example = False

    def write(self, string: str) -> None:
        """Lines that a command formats itself, such as examples; those in a row are one block."""
        lines = [line.strip() for line in string.splitlines() if line.strip()]
        if self.is_example:
            self.lines[-2:] = [*lines, "```", ""]
        elif lines:
            self.lines += ["```text", *lines, "```", ""]
        self.is_example = True

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        self.lines += ["```", f"{prog} {args}".strip(), "```", ""]

    def write_heading(self, heading: str) -> None:
        self.lines += [f"**{heading}**", ""]
        self.is_example = False

    def write_paragraph(self) -> None:
        pass

    def write_text(self, text: str) -> None:
        """Paragraphs; one that click does not wrap, after a \\b, is shown as it is."""
        for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
            lines = paragraph.strip("\n").splitlines()
            if lines and lines[0].strip() == "\b":
                self.lines += ["```text", *lines[1:], "```", ""]
            elif lines:
                self.lines += [sentence(" ".join(line.strip() for line in lines)), ""]

    def write_dl(
        self, rows: Sequence[tuple[str, str]], col_max: int = 30, col_spacing: int = 2
    ) -> None:
        self.lines += ["| option | what it does |", "|---|---|"]
        for name, text in rows:
            bar = name.replace("|", "\\|")
            self.lines.append(f"| `{bar}` | {sentence(' '.join(text.split()))} |")
        self.lines.append("")

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        self.write_heading(name)
        yield


def sentence(text: str) -> str:
    """A sentence of a help text; options, globs and commands in it become code."""
    code = rf"(?<![\w`*/-])(?:zckpt (?:{'|'.join(cli.commands)})|torchrun) [^`]*$"
    code += r"|(?<![\w`-])--?[a-z][\w-]*(?![\w-])"
    parts = [part.replace("|", "\\|").replace("<", "&lt;") for part in re.split(r"(`[^`]*`)", text)]
    return "".join(
        part if part.startswith("`") else re.sub(code, lambda found: f"`{found[0]}`", part)
        for part in parts
    ).replace("*", "\\*")


def page() -> str:
    """The text of docs/cli.md."""
    above = click.Context(cli, info_name="zckpt", **cli.context_settings)
    rows = []
    sections: list[str] = []
    for name in cli.list_commands(above):
        command = cli.get_command(above, name)
        assert command is not None
        if command.hidden:
            continue
        rows.append(f"| [`{name}`](#{name}) | {sentence(command.get_short_help_str(limit=500))} |")
        sections += [f"## {name}", "", *help_of(command, name, above)]
    return "\n".join([HEAD + "\n".join(rows), "", *sections, TAIL])


def help_of(command: click.Command, name: str, above: click.Context) -> list[str]:
    formatter = Markdown()
    context = click.Context(
        command, info_name=name, parent=above, show_default=True, **command.context_settings
    )
    context.meta[SHOWS_ALL] = True
    command.format_help(context, formatter)
    return formatter.lines


if __name__ == "__main__":
    print(page(), end="")
