"""The text of `--help`: examples, then options in groups. `--help-all` shows rare options too.

It is click's own help with other sections. rich-click would import rich for every command.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from .. import formats
from ..training.options import SIZES

WIDTH = 100  # characters, if the terminal is wide enough
OPTION_WIDTH = 32
GROUPS = (
    "What to show",
    "Engine",
    SIZES,
    "Weights",
    "Comparison",
    "Optimizer and steps",
    "Names",
    "Source",
    "Files",
    "Copying",
    "Output",
)
SHOWS_ALL = "zckpt.shows_all"


class GroupedOption(click.Option):
    """An option in a section of `--help`. Only `--help-all` shows a rare option."""

    def __init__(self, *words: Any, group: str, rare: bool = False, **more: Any) -> None:
        super().__init__(*words, **more)
        self.group = group
        self.rare = rare


class ExplainedCommand(click.Command):
    """A command whose help has examples, and options in groups."""

    def __init__(self, *words: Any, examples: Sequence[str] = (), **more: Any) -> None:
        super().__init__(*words, **more)
        self.examples = examples

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        params = super().get_params(ctx)
        if self._rare():
            params.append(HELP_ALL)
        return params

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples:
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")
        for group, options in self._groups(bool(ctx.meta.get(SHOWS_ALL))):
            records = [record for option in options if (record := option.get_help_record(ctx))]
            with formatter.section(group):
                formatter.write_dl(records, col_max=OPTION_WIDTH)
        if (rare := self._rare()) and not ctx.meta.get(SHOWS_ALL):
            formatter.write_paragraph()
            formatter.write(f"--help-all shows {len(rare)} more.\n")

    def _groups(self, is_all: bool) -> Iterator[tuple[str, list[GroupedOption]]]:
        options = [item for item in self.params if isinstance(item, GroupedOption)]
        shown = [option for option in options if is_all or not option.rare]
        for group in GROUPS:
            if members := [option for option in shown if option.group == group]:
                yield group, members

    def _rare(self) -> list[GroupedOption]:
        return [item for item in self.params if isinstance(item, GroupedOption) and item.rare]


class Commands(click.Group):
    """The group of all commands: it lists them in the order of use, with uncut summaries."""

    command_class = ExplainedCommand

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["--help"])

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        summaries = [
            (name, (command.help or "").partition("\n")[0])
            for name, command in self.commands.items()
        ]
        with formatter.section("Commands"):
            formatter.write_dl(summaries)


def format_names(targets: bool) -> dict[str, Any]:
    """The arguments of `click.option` for an option whose value is the name of a format.

    The shell completes the names of formats that zckpt writes if `targets`, otherwise of those that
    it reads. An unknown name is refused later, when the command runs.
    """

    def completed(
        _context: click.Context, _option: click.Parameter, begin: str
    ) -> list[CompletionItem]:
        return [
            CompletionItem(item.name, help=item.about)
            for item in formats.FORMATS
            if (item.writes if targets else item.reads) and item.name.startswith(begin)
        ]

    return {"metavar": "FORMAT", "shell_complete": completed}


def show_all(ctx: click.Context, _option: click.Parameter, value: bool) -> None:
    """Prints a command's help with all options, and exits."""
    if value and not ctx.resilient_parsing:
        ctx.meta[SHOWS_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


HELP_ALL = click.Option(
    ["--help-all"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=show_all,
    help="Show all options and exit.",
)
