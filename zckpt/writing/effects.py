"""Finds options of a conversion that change nothing in its target.

Writers read the options that they need. If the user gave an option that was not read when all files
are laid out, it changes nothing, and a warning says so. It is an error if the target would then
differ from what the user asked for. So no writer has to list the options that it ignores; this
module has only the texts of the messages.
"""

from __future__ import annotations

from typing import Any

from .. import formats
from ..core.checkpoint.manifest import Manifest
from ..errors import Notice, WrongOption, listed, warning
from ..formats.dcp.options import LAYOUT
from ..training.options import (
    ACCEPT_WEIGHTS,
    ALLOW_OBJECT,
    GROUP_DEFAULTS,
    OPTIMIZER,
    VOCAB_SIZE,
    Option,
    Options,
)

ASKS_FOR_MORE: dict[str, tuple[str, str]] = {
    VOCAB_SIZE.name: (
        "this conversion does not change the padding of the vocabulary",
        "add --tp N, or leave out --vocab-size",
    ),
}
"""Maps options that must change the target, by name, to the reason and the hint of an error.

The error is raised if no writer reads the option's value.
"""
OF_STATES = "no state of the optimizer is written"
REASONS = {GROUP_DEFAULTS.name: OF_STATES, ALLOW_OBJECT.name: OF_STATES}
"""Options that --weights-only makes useless, and why."""
ABOUT_STATES: tuple[Option[Any], ...] = (OPTIMIZER, LAYOUT)
"""Options that concern only optimizer states.

With --weights-only they get a warning, even if a writer has read their values.
"""
TOLERANT = frozenset({ACCEPT_WEIGHTS.name})
"""Options that only prevent an error. They never get the warning that they change nothing."""


def refuse_unread(options: Options) -> None:
    """Raises WrongOption if the user gave an option that must change the target, but does not.

    `ASKS_FOR_MORE` lists the options that must change the target. An option changes nothing if no
    writer has read its value.
    """
    for option in options.unread:
        if option.name in ASKS_FOR_MORE:
            why, way = ASKS_FOR_MORE[option.name]
            message = f"{option.flag} changes nothing here: {why}"
            raise WrongOption("option-needed", message, hint=way)


def unread(manifest: Manifest, options: Options) -> list[Notice]:
    """Warns about options that change nothing, after the target's files are laid out."""
    unused = {option.name: option for option in options.unread if option.name not in TOLERANT}
    reasons = {}
    if options.weights_only:
        unused |= {option.name: option for option in ABOUT_STATES if options[option] is not None}
        reasons = REASONS | {option.name: OF_STATES for option in ABOUT_STATES}
    lines = [_line(option, reasons.get(name, "")) for name, option in unused.items()]
    named = options[ALLOW_OBJECT]
    if other := sorted({*named} - {*formats.other_objects(manifest)}):
        lines.append(_line(ALLOW_OBJECT, f"no pickle of {manifest.root} has {listed(other)}"))
    return lines


def _line(option: Option[Any], why: str = "") -> Notice:
    reason = why or "nothing in the target depends on it"
    message = f"{option.flag} changes nothing here: {reason}"
    return warning("option-without-effect", message, subject=option.flag)
