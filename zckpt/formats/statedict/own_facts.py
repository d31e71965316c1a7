"""Validates the facts that zckpt wrote beside state dicts under the key `zckpt`.

State dicts do not state which names are aliases, buffers, frozen or inferred. So zckpt writes these
facts into the files too. Another program may have changed the files since.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, ValidationError, convert

from ...errors import CorruptCheckpoint


class Stated(Struct):
    """The facts that zckpt writes beside state dicts, under the key `zckpt`.

    aliases    {second name of a tied weight: its first name}
    buffers    the names of buffers
    frozen     the names of weights that no optimizer trains
    names      {a file, or a key in DCP's files: the manifest's names of its tensors, in order}
    inferred   names that no file of the source stated
    numbers    names of the parameters that the optimizer numbers, in order
    optimizer  the class given with `--optimizer`

    Files of the first versions of zckpt have only the first four fields.
    """

    aliases: dict[str, str]
    buffers: list[str]
    frozen: list[str]
    names: dict[str, list[str]]  # of the program's own state; "" for a weight or a moment
    inferred: list[str] = []
    numbers: list[str] = []
    optimizer: str = ""


def checked(record: Any, where: str) -> dict[str, Any] | None:
    """Validates the facts that zckpt wrote beside state dicts, and returns them.

    Returns None if the file `where` has none. Raises CorruptCheckpoint if fields of `Stated` are
    missing or have other types.
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
    """Joins the facts that zckpt wrote beside several models; names get their model's prefix.

    `records` has the facts by prefix, such as "generator.". None if one of the models has no facts.
    """
    whole: dict[str, Any] = {"aliases": {}, "buffers": [], "frozen": []}
    for prefix, record in records.items():
        if record is None:
            return None
        whole["aliases"] |= {prefix + a: prefix + name for a, name in record["aliases"].items()}
        for key in ("buffers", "frozen"):
            whole[key] += [prefix + name for name in record[key]]
    return whole
