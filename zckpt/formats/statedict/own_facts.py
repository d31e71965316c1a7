"""Validates the facts that zckpt wrote beside state dicts.

State dicts do not state which names are aliases, buffers, frozen or inferred (see write.py), so
zckpt writes these facts beside them. Another program may have changed them since.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, ValidationError, convert

from ...errors import CorruptCheckpoint


class Stated(Struct):
    """The facts that zckpt writes beside state dicts under the key `zckpt`: state dicts lack them.

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
    """The facts that zckpt wrote beside state dicts, after a check; None if it wrote none.

    `where` is the path of the file. Raises CorruptCheckpoint if `record` lacks fields of `Stated`.
    """
    if not isinstance(record, dict):
        return None
    try:
        convert(record, Stated)
    except ValidationError as error:
        what = f"{where}: the facts that zckpt wrote under the key zckpt are damaged: {error}"
        raise CorruptCheckpoint("file-damaged", what) from error
    return record


def joined(records: Mapping[str, dict[str, Any] | None]) -> dict[str, Any] | None:
    """Joins the facts that zckpt wrote beside several models; each model's names get its prefix.

    `records` has the facts by prefix. None if zckpt wrote nothing beside one of the models.
    """
    whole: dict[str, Any] = {"aliases": {}, "buffers": [], "frozen": []}
    for prefix, record in records.items():
        if record is None:
            return None
        whole["aliases"] |= {prefix + a: prefix + name for a, name in record["aliases"].items()}
        for key in ("buffers", "frozen"):
            whole[key] += [prefix + name for name in record[key]]
    return whole
