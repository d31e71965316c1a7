"""The command-line options of all target formats, merged into one list."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from .. import formats
from ..errors import joined
from ..training import options as shared
from ..training.options import EVERYWHERE, Option, Options
from .dcp import options as dcp
from .deepspeed_states import options as deepspeed
from .format import Format
from .hf import options as hf

OF_CONVERSIONS = frozenset(
    (
        *("weights_only", "dtype", "optimizer", "max_file_size", "like"),
        *("groups_from", "set_group"),
        *("rename", "tie", "family", "dcp_layout", "dialect"),
    )
)
"""Options of a conversion that change more of a run than its numbers of ranks."""
MOST_NAMED = 3
"""The largest number of formats that a help text lists as not supporting an option.

The help then fits on one screen.
"""


class Keywords(
    shared.Keywords,
    deepspeed.Keywords,
    dcp.Keywords,
    hf.Keywords,
    total=False,
):
    """The options of a conversion as keyword arguments, for type checkers and editors.

    Options that a `Format` lists are accepted even if their types are not declared here.
    """


def declared(targets: Iterable[Format]) -> list[Option[Any]]:
    """Lists the options of all formats that zckpt writes, each once, in the order of `--help`.

    The order agrees with each format's own order. An option accepts the values of all formats that
    have it. Its help names the formats that support it, or the formats that do not if these are
    fewer.
    """
    lists = {i.name: [*i.options, *EVERYWHERE] for i in targets if i.options is not None}
    queues = [[option.name for option in options] for options in lists.values()]
    names: list[str] = []
    while any(queues):
        heads = [queue[0] for queue in queues if queue]
        first = next((name for name in heads if not any(name in q[1:] for q in queues)), heads[0])
        names.append(first)
        queues = [[name for name in queue if name != first] for queue in queues]
    return [
        _merged(
            {target: o for target, options in lists.items() for o in options if o.name == name},
            list(lists),
        )
        for name in names
    ]


def _merged(variants: Mapping[str, Option[Any]], targets: Sequence[str]) -> Option[Any]:
    """Merges one option's declarations into one; `variants` maps target formats to declarations.

    The help then names the formats that support the option, or those that do not.
    """
    first = next(iter(variants.values()))
    if any(option.choices != first.choices for option in variants.values()):
        values = ", ".join(f"{to} has {_choices_text(option)}" for to, option in variants.items())
        choices = dict.fromkeys(value for o in variants.values() for value in o.choices)
        return replace(first, choices=tuple(choices), usual="", help=f"{first.help}: {values}")
    other_targets = [name for name in targets if name not in variants]
    if len(variants) < len(other_targets):
        text = first.help[0].lower() + first.help[1:]
        return replace(first, help=f"For {joined([*variants])}: {text}")
    if other_targets:
        excluded = joined(other_targets) if len(other_targets) <= MOST_NAMED else "every format"
        return replace(first, help=f"{first.help}. Not for {excluded}")
    return first


def _choices_text(option: Option[Any]) -> str:
    return " or ".join(
        f"{value} (default)" if value == option.usual else str(value) for value in option.choices
    )


def without_use(to: str, keywords: Mapping[str, Any]) -> dict[str, str]:
    """Finds options that the user gave, but that a target of format `to` does not support.

    Maps each option's flag to the reason: {"--stage": "..."}.
    """
    format = formats.named(to)
    known_options = {option.name for option in (*(format.options or ()), *EVERYWHERE)}
    reasons = format.reasons or {}
    return {
        option.flag: reasons.get(option.name) or option.reason or f"{to} has no use for it"
        for option in declared(formats.FORMATS)
        if option.name not in known_options
        and keywords.get(option.name) not in (None, option.default)
    }


def options_of(keywords: Mapping[str, Any]) -> Options:
    """Makes an `Options` record from the user's keyword arguments.

    Raises TypeError for a name that no format declares, and WrongOption for an invalid value.
    """
    known_options = {option.name: option for option in declared(formats.FORMATS)}
    if unknown := sorted(keywords.keys() - known_options.keys()):
        raise TypeError(f"there is no option {unknown[0]!r}; there are {', '.join(known_options)}")
    return Options(
        tuple(
            (option, keywords[name])
            for name, option in known_options.items()
            if name in keywords and keywords[name] != option.default
        )
    )
