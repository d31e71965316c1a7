"""Checks and renames the name patterns in DeepSpeed's dictionary `universal_checkpoint_info`.

DeepSpeed's files have it in the client state. Its patterns are regular expressions that say how
tensor-parallel ranks slice parameters. A hostile file may contain any pattern, so all are checked
before one is used. If parameters are renamed, the patterns must be changed too, because DeepSpeed
uses them (ds_to_universal.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from ..errors import MALFORMED, InconsistentCheckpoint, UnsupportedCheckpoint, brief, cause

INFO = "universal_checkpoint_info"
PARTS, WIDTHS = "parameter_with_sub_params", "sub_param_shard_widths"
REPETITIONS = 4  # `*`, `+` and `{}` in one pattern


def check_patterns(info: Mapping[str, Any]) -> None:
    """Raises an error if a pattern in `info` is no regular expression, or may run for hours.

    `info` is DeepSpeed's `universal_checkpoint_info`.
    """
    for pattern in _all_patterns(info):
        _check_pattern(pattern)


def under_names(info: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Rewrites the patterns of a `universal_checkpoint_info` to match parameters under new names.

    `names` maps old names to new ones. A pattern that would match other parameters than before is
    replaced by a list of new names. Raises InconsistentCheckpoint for an unknown structure.
    """
    try:
        return dict(_renamed(info, names))
    except MALFORMED as error:
        raise InconsistentCheckpoint(
            "tp-rule-wrong",
            f"universal_checkpoint_info has a structure that zckpt does not know: {cause(error)}",
            hint="without --rename, zckpt copies it unchanged",
        ) from error


def _renamed(info: Mapping[str, Any], names: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    def changed(pattern: str) -> list[str]:
        _check_pattern(pattern)
        held = [bool(re.match(pattern, name)) for name in names]
        if held == [bool(re.match(pattern, name)) for name in names.values()]:
            return [pattern]
        pairs = zip(names.values(), held, strict=True)
        return [f"^{re.escape(name)}$" for name, is_held in pairs if is_held]

    def by_pattern(values: Mapping[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for old, value in values.items():
            for new in changed(old):
                result.setdefault(new, value)  # the first one counts
        return result

    def of_view(item: Any) -> Any:
        fields = fields_of(item)
        changed_fields = {
            **fields,
            "patterns": [new for old in fields["patterns"] for new in changed(old)],
        }
        return changed_fields if isinstance(item, Mapping) else replace(item, state=changed_fields)

    for key, value in info.items():
        if not value:
            yield key, value
        elif _has_patterns(key):
            yield key, [new for old in value for new in changed(old)]
        elif key == PARTS:
            yield key, [of_view(stated) for stated in value]
        elif key == WIDTHS:
            yield key, by_pattern(value)
        elif key == "affine_map":
            yield key, {**value, "params": by_pattern(value.get("params") or {})}
        else:
            yield key, value


def fields_of(item: Any) -> Mapping[str, Any]:
    """The fields of an item in DeepSpeed's list `parameter_with_sub_params`.

    The item is a dictionary, or a pickled object.
    """
    value = getattr(item, "state", item)
    if not isinstance(value, Mapping):
        raise InconsistentCheckpoint(
            "tp-rule-wrong",
            f"universal_checkpoint_info: parameter_with_sub_params has {brief(item)}, but zckpt "
            "expected a dictionary",
            hint="give rules with --tp-rules FILE",
        )
    return value


def _all_patterns(info: Mapping[str, Any]) -> Iterator[Any]:
    for key, value in info.items():
        if _has_patterns(key):
            yield from value or ()
        elif key == PARTS:
            for item in value or ():
                yield from fields_of(item)["patterns"]
    yield from (info.get("affine_map") or {}).get("params") or ()


def _has_patterns(key: str) -> bool:
    return key.endswith("_patterns") or key == "parameter_with_2_sub_params_cat_dim_0"


def _check_pattern(pattern: Any) -> None:
    """Raises an error for a pattern that is no regular expression, or may run for hours.

    A pattern may run for hours if it repeats a group, as in `(a*)*`, or has many repetitions.
    """
    text = re.sub(r"\\.|\[\^?\]?[^\]]*\]", "a", pattern) if isinstance(pattern, str) else ")*"
    if len(re.findall(r"[*+{]", text)) > REPETITIONS or re.search(r"\)[*+{]", text):
        raise UnsupportedCheckpoint(
            "tp-rule-wrong",
            f"universal_checkpoint_info has the pattern {brief(pattern)}, which may run for hours",
            hint="give rules with --tp-rules FILE",
        )
    try:
        re.compile(pattern)
    except re.error as error:
        raise InconsistentCheckpoint(
            "tp-rule-wrong",
            f"universal_checkpoint_info has the pattern {brief(pattern)}, which is no regular "
            "expression",
            hint="give rules with --tp-rules FILE",
        ) from error
