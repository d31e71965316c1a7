"""How are a document's numbers and names written for a reader?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...errors import sized

UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)
"""Controls, characters without a width, those that turn the direction of text, half surrogates."""
NONE = "\N{EN DASH}"


def shown(value: Any) -> Any:
    """A text in which nothing is hidden: what a reader could not see is written as its number."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", value)
    return value


def cut(name: str, most: int) -> str:
    """A name of at most so many characters: its beginning and its end."""
    if len(name) <= most:
        return name
    tail = (most - 1) // 2
    return f"{name[: most - 1 - tail]}…{name[len(name) - tail :]}"


def short(value: Any) -> str:
    """A number with the digits that tell something; what is no number stays."""
    if value is None:
        return NONE
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    return f"{value:.4g}"


def number(value: int | None) -> str:
    """An integer: 2,345."""
    return f"{value:,}" if isinstance(value, int) else NONE


def size(value: int | None) -> str:
    """Bytes: 1.49 GB."""
    return sized(value) if isinstance(value, int) else NONE


def rounded(value: int) -> str:
    """A count for a headline: 6.74 billion; its digits if they are few."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if value >= size:
            return f"{value / size:.3g} {word}"
    return f"{value:,}"


def sizes(line: Mapping[str, Any]) -> str:
    """The sizes of the grid: dp 2, tp 4; those of one rank are left out if others are larger."""
    known = line.get("sizes") or {}
    larger = {key: value for key, value in known.items() if value != 1} or known
    return ", ".join(f"{key} {value}" for key, value in larger.items())


def facts(line: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the first section says: name and value; what is not known is left out."""
    versions = ", ".join(f"{key} {value}" for key, value in (line.get("versions") or {}).items())
    parameters, trainable = line.get("parameters"), line.get("trainable")
    of_them = "" if trainable in (None, parameters) else f", {rounded(trainable)} trained"
    files = line.get("files")
    rows = [
        ("step", line.get("steps") or line.get("step")),
        ("written by", line.get("engine") or line.get("format")),
        ("ranks", sizes(line)),
        ("parameters", None if parameters is None else f"{rounded(parameters)}{of_them}"),
        ("weights", line.get("dtype")),
        ("optimizer", line.get("optimizer")),
        ("size", line.get("bytes") and size(line["bytes"]) + f" in {files} files" * bool(files)),
        ("checksums", line.get("checked")),
        ("digest", line.get("digest")),
        ("versions", versions),
    ]
    return [(name, str(value)) for name, value in rows if value not in (None, "")]


def verdict(document: Mapping[str, Any]) -> tuple[str, str]:
    """Whether a fault is shown: `bad`, `odd` or `good`, and a few words."""
    faults = document.get("faults") or []
    wrong = sum(bool(fault["fault"]) for fault in faults)
    if wrong:
        return "bad", f"{wrong:,} fault{'s' * (wrong != 1)}"
    if faults:
        return "odd", f"no fault, {len(faults):,} to look at"
    if (equal := (document.get("against") or {}).get("equal")) is not None:  # diff, probe-diff
        return ("good", "no difference found") if equal else ("odd", "the two differ")
    if (document.get("line") or {}).get("checked") == "not read":
        return "good", "nothing wrong; no tensor was read"
    return "good", "no fault found"
