"""Does what zckpt stated beside state dicts have the form that zckpt writes?

State dicts do not say which names are aliases, buffers, frozen or inferred (see write.py), so zckpt
writes it beside them. Another program may have changed it since.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import CorruptCheckpoint, listed

LISTS = ("buffers", "frozen", "inferred", "numbers")
NEEDED = {"aliases", "buffers", "frozen", "names"}  # the first versions wrote these alone


def checked(stated: Any, where: str) -> dict[str, Any] | None:
    """The record of zckpt in the file `where`; None if there is none. Raises CorruptCheckpoint."""
    if not isinstance(stated, dict):
        return None
    wrong = [key for key in LISTS if key in stated and not _are_texts(stated[key])]
    aliases, names = stated.get("aliases", {}), stated.get("names", {})
    if not isinstance(aliases, dict) or not _are_texts([*aliases, *aliases.values()]):
        wrong.append("aliases")
    if not isinstance(names, dict) or not all(map(_are_texts, names.values())):
        wrong.append("names")
    if not isinstance(stated.get("optimizer", ""), str):
        wrong.append("optimizer")
    wrong += sorted(NEEDED - stated.keys())
    if wrong:
        raise CorruptCheckpoint(f"{where}: zckpt's own record in it is damaged: {listed(wrong)}")
    return stated


def joined(records: Mapping[str, dict[str, Any] | None]) -> dict[str, Any] | None:
    """One record of several models, by what precedes their names; None if a model has none."""
    whole: dict[str, Any] = {"aliases": {}, "buffers": [], "frozen": []}
    for prefix, stated in records.items():
        if stated is None:
            return None
        whole["aliases"] |= {prefix + a: prefix + name for a, name in stated["aliases"].items()}
        for key in ("buffers", "frozen"):
            whole[key] += [prefix + name for name in stated[key]]
    return whole


def _are_texts(values: Any) -> bool:
    return isinstance(values, (list, tuple)) and all(isinstance(each, str) for each in values)
