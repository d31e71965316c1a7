"""Validates the facts that zckpt stated beside state dicts.

State dicts do not state which names are aliases, buffers, frozen or inferred (see write.py), so
zckpt writes these facts beside them. Another program may have changed them since.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, ValidationError, convert

from ...errors import CorruptCheckpoint


class Stated(Struct):
    """What zckpt writes beside state dicts, under the key `zckpt`: facts that they cannot state.

    The first versions of zckpt wrote only the first four fields.
    """

    aliases: dict[str, str]
    buffers: list[str]
    frozen: list[str]
    names: dict[str, list[str]]
    inferred: list[str] = []
    numbers: list[str] = []
    optimizer: str = ""


def checked(record: Any, where: str) -> dict[str, Any] | None:
    """What zckpt wrote beside the state dicts in the file `where`; None if it wrote nothing.

    Raises CorruptCheckpoint if it does not have the fields of `Stated`.
    """
    if not isinstance(record, dict):
        return None
    try:
        convert(record, Stated)
    except ValidationError as error:
        what = f"{where}: zckpt's own record in it is damaged: {error}"
        raise CorruptCheckpoint("file-damaged", what) from error
    return record


def joined(records: Mapping[str, dict[str, Any] | None]) -> dict[str, Any] | None:
    """Joins what zckpt wrote beside several models into one record.

    Each model's names get its prefix. None if zckpt wrote nothing beside one of the models.
    """
    whole: dict[str, Any] = {"aliases": {}, "buffers": [], "frozen": []}
    for prefix, record in records.items():
        if record is None:
            return None
        whole["aliases"] |= {prefix + a: prefix + name for a, name in record["aliases"].items()}
        for key in ("buffers", "frozen"):
            whole[key] += [prefix + name for name in record[key]]
    return whole
