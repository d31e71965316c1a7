"""The regular expressions of a `universal_checkpoint_info`, before one of them is run.

The info is in the client state, and a file may have any text there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import InconsistentCheckpoint, UnsupportedCheckpoint, brief

INFO = "universal_checkpoint_info"
REPETITIONS = 4  # `*`, `+` and `{}` in one pattern


def check_patterns(info: Mapping[str, Any]) -> None:
    """Raises for patterns that are no regular expressions, or could take hours to match a name."""
    for pattern in _patterns(info):
        _check_pattern(pattern)


def fields_of(stated: Any) -> Mapping[str, Any]:
    """An item of `parameter_with_sub_params`: a dictionary, or an object with the same fields."""
    value = getattr(stated, "state", stated)
    if not isinstance(value, Mapping):
        raise InconsistentCheckpoint(f"parameter_with_sub_params has {brief(stated)}")
    return value


def _patterns(info: Mapping[str, Any]) -> Iterator[Any]:
    """All regular expressions of an info."""
    for key, value in info.items():
        if key.endswith("_patterns") or key == "parameter_with_2_sub_params_cat_dim_0":
            yield from value or ()
        elif key == "parameter_with_sub_params":
            for stated in value or ():
                yield from fields_of(stated)["patterns"]
    yield from (info.get("affine_map") or {}).get("params") or ()


def _check_pattern(pattern: Any) -> None:
    """Refuses a regular expression of a file that could take hours to match a name.

    That takes a repeated group, or many repetitions after each other.
    """
    text = re.sub(r"\\.|\[\^?\]?[^\]]*\]", "a", pattern) if isinstance(pattern, str) else ")*"
    if len(re.findall(r"[*+{]", text)) > REPETITIONS or re.search(r"\)[*+{]", text):
        raise UnsupportedCheckpoint(
            f"universal_checkpoint_info has the pattern {brief(pattern)}, which zckpt does not run",
            hint="give rules with --tp-rules FILE",
        )
    try:
        re.compile(pattern)
    except re.error as error:
        raise InconsistentCheckpoint(
            f"universal_checkpoint_info has the pattern {brief(pattern)}, which is no regular "
            "expression",
            hint="give rules with --tp-rules FILE",
        ) from error
