"""The command `report`, and how its page is saved. HTML needs jinja2."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from typing import Any

import click

from .. import display
from ..errors import MissingExtra, WrongOption, safe
from .help import ExplainedCommand
from .options import by_rank_0, common, given, grouped, moving
from .parameters import PATH

MARKDOWN = ".md"
OF_EACH_RUN = re.compile(r"(?i)(?:checkpoint|ckpt|epoch|iter|step|version)[-_=]*[0-9]")
"""Names of checkpoints that are the same in many runs, such as `checkpoint-500`."""
STARTS = b"<!DOCTYPE html>", b"# ", b"<svg "


def name_for(path: str) -> str:
    """The default name of the page that `report` writes for a checkpoint, without an extension.

    It is the last part of `path`. If many runs have a folder of that name, the parent's name comes
    before it: `run5-checkpoint-500`.
    """
    above, name = os.path.split(os.path.abspath(path))
    run = os.path.basename(above)
    return f"{run}-{name}" if run and OF_EACH_RUN.search(name) else name


def check(path: str | None) -> None:
    """Raises an error if a page could not be saved at `path`, before a command does its work.

    Raises MissingExtra for an HTML page without jinja2. Raises WrongOption if `path` cannot be
    written, or if a file is there that is not a page of zckpt. A `path` of None raises nothing.
    """
    if not path:
        return
    if find_spec("jinja2") is None and not path.endswith(MARKDOWN):
        raise MissingExtra(
            "extra-missing",
            "an HTML page needs the package jinja2, which is not installed",
            hint="pip install 'zckpt[html]', or write Markdown: --md",
        )
    for file in (path, *_pictures(path)):
        display.can_save(file)
        if os.path.exists(file) and not _is_page(file):
            raise WrongOption(
                "output-not-writable",
                f"{file} exists and is not a page of zckpt, so it is not replaced",
                hint="name another file",
            )


def _pictures(path: str) -> list[str]:
    return [f"{path.removesuffix(MARKDOWN)}.svg"] if path.endswith(MARKDOWN) else []


def _is_page(path: str) -> bool:
    """Whether `path` is a file that `report` may replace: an earlier page or picture, or empty."""
    with open(path, "rb") as file:
        start = file.read(max(map(len, STARTS)))
    return not start or start.startswith(STARTS)


def save(path: str | None, document: dict[str, Any], quiet: bool = True) -> None:
    """Writes a report as an HTML page, or as Markdown and a picture, and prints their paths.

    With `quiet` the paths are not printed. Without a `path` nothing is written.
    """
    if not path:
        return
    from ..reporting.page import render, render_markdown

    if path.endswith(MARKDOWN):
        (picture,) = _pictures(path)
        text, svg = render_markdown(document, os.path.basename(picture))
        files = {picture: svg, path: text}
    else:
        files = {path: render(document)}
    for name, text in files.items():
        replaced = ", in the place of an earlier file" if os.path.lexists(name) else ""
        display.save_text(name, text)
        if not quiet:
            print(f"written: {safe(name)}{replaced}")


@click.command(
    cls=ExplainedCommand,
    examples=(
        "zckpt report run/checkpoint-500",
        "zckpt report run/checkpoint-500 --against run/checkpoint-400 --output change.html",
        "zckpt report run/checkpoint-500 --md --output checkpoint.md",
    ),
)
@click.argument("path", type=PATH)
@grouped(
    "Comparison",
    "--against",
    type=PATH,
    metavar="PATH",
    help="Also show what differs from this checkpoint (any format).",
)
@grouped(
    "Comparison",
    "--since",
    type=float,
    metavar="STEP",
    help="If PATH is a run: read only checkpoints of this step or later.",
)
@grouped(
    "Output",
    "--output",
    type=PATH,
    metavar="FILE",
    help="The file to write.  [default: RUN-NAME.html here, such as run5-checkpoint-500.html]",
)
@grouped("Output", "--md", is_flag=True, help="Write Markdown, and a picture (.svg) beside it.")
@moving
@by_rank_0
@common
def report(
    path: str,
    against: str | None,
    since: float | None,
    output: str | None,
    md: bool,
    asked: bool,
    as_json: bool,
    quiet: bool,
    **words: Any,
) -> int:
    """Show a checkpoint on one page: a file that a browser opens without a network.

    The page shows what the checkpoint is, statistics of layers, which file stores which elements,
    masters against weights, steps, every fault, and what to do next. If a rank is lost or bytes are
    damaged, the page shows the rest.

    If PATH is a run with several checkpoints, the page shows the run over time, with the losses
    that the trainer logged, and below it the newest checkpoint. --json prints the data of the page,
    and writes a page only with --output.

    Exit code 3: the page shows a fault.
    """
    from ..reporting.document import report as make

    if output is None and not as_json:
        output = f"{name_for(path)}{MARKDOWN if md else '.html'}"
    if md and output is not None and not output.endswith(MARKDOWN):
        raise click.UsageError("--md writes a file whose name ends with .md")
    check(output)
    with display.progress("report", path, quiet, as_json=as_json, asked=asked) as begin:
        document = make(path, against=against, since=since, begin=begin, **given(words))
    save(output, document, quiet or as_json)
    display.answer(document, as_json, quiet, display.reported)
    return 3 if any(line["fault"] for line in document["faults"]) else 0
