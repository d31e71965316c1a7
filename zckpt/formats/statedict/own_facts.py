"""Validates the facts that zckpt stated beside state dicts.

State dicts do not state which names are aliases, buffers, frozen or inferred (see write.py), so
zckpt writes these facts beside them. Another program may have changed them since.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, ValidationError, convert

from ...errors import CorruptCheckpoint


class Stated(Struct):
    """The form of zckpt's record. Its first versions had only the first four fields."""

    aliases: dict[str, str]
    buffers: list[str]
    frozen: list[str]
    names: dict[str, list[str]]
    inferred: list[str] = []
    numbers: list[str] = []
    optimizer: str = ""


def checked(record: Any, where: str) -> dict[str, Any] | None:
    """The record of zckpt in the file `where`; None without one. Raises CorruptCheckpoint."""
    if not isinstance(record, dict):
        return None
    try:
        convert(record, Stated)
    except ValidationError as error:
        what = f"{where}: zckpt's own record in it is damaged: {error}"
        raise CorruptCheckpoint("file-damaged", what) from error
    return record


def joined(records: Mapping[str, dict[str, Any] | None]) -> dict[str, Any] | None:
    """Joins the records of several models into one, with each model's prefix before its names.

    None if a model has no record.
    """
    whole: dict[str, Any] = {"aliases": {}, "buffers": [], "frozen": []}
    for prefix, record in records.items():
        if record is None:
            return None
        whole["aliases"] |= {prefix + a: prefix + name for a, name in record["aliases"].items()}
        for key in ("buffers", "frozen"):
            whole[key] += [prefix + name for name in record[key]]
    return whole
