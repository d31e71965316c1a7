"""The values of a checkpoint that `zckpt mend` restored, and the evidence for each.

    zckpt-mended.json    {"zckpt": 1, "mended": [{"file": ..., "tensor": ..., "by": ...}]}

The file lies in the folder of the engine's files. A universal checkpoint has the list in its
manifest. Every checkpoint that is made from a mended one has the list too.
"""

import json
import os
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, convert, to_builtins

from ...errors import CorruptCheckpoint, Notice, cause, counted, listed, warning
from ..storage import sources

MENDED = "zckpt-mended.json"
CODE = "mended"
"""The code of the warning about a mended checkpoint."""
MOST = 16 << 20  # the largest size of the file, in bytes
Size = Annotated[int, Meta(ge=0)]
By = Literal["checksum", "witness", "chance", "made-up"]
"""The evidence for the restored bytes.

checksum   the checksum of a small record (byte range)
witness    other bytes of the checkpoint or of an older one
chance     only a checksum, which other damage could give too; the user has accepted this risk
made-up    none: the user asked for made-up bytes
"""
HOW = {
    "": "restored {} exactly",
    "chance": "restored {} on trust in a checksum alone (--accept-chance)",
    "made-up": "made up {} in place of lost values (--rebuild)",
}
"""Sentences about restored records, by the evidence for them; every command prints them."""
Value = float | int | bool | str | None


class Mended(Struct, frozen=True):
    """One repair by `zckpt mend`: a range of restored bytes, or one restored value.

    file               the path below the checkpoint
    offset, bytes      the first restored byte, and the number of restored bytes
    bit                the flipped bit, if only one had flipped
    tensor, element    the repaired tensor, and its element if only one was repaired
    before, after      the values of this element
    chance             the probability that damage to many bits would look the same
    witness            the bytes that confirm the repair, or the source of made-up bytes
    value              a value that is no tensor, such as `global_steps`; `after` is its new value
                       if that is a number or a text, else None
    """

    file: str
    offset: Size
    bytes: Size
    by: By
    chance: float
    bit: Size | None = None
    tensor: str | None = None
    element: Size | None = None
    before: Value = None
    after: Value = None
    witness: str = ""
    value: str | None = None


class MadeValue(Struct, frozen=True):
    """A value that is no tensor and replaces a lost one, such as a step.

    `how` is the phrase by which a report says where the value comes from.
    """

    name: str
    value: Value
    how: str


def to_json(mended: Iterable[Mended]) -> list[dict[str, Any]]:
    """Converts a list of repairs to JSON, for manifests and zckpt-mended.json."""
    lines: list[dict[str, Any]] = to_builtins(list(mended))
    return lines


def from_json(value: Any) -> tuple[Mended, ...]:
    """Parses the JSON list of repairs; raises ValueError for other documents."""
    return convert(value, tuple[Mended, ...])


def text_of(mended: Iterable[Mended]) -> bytes:
    """Makes the contents of the file zckpt-mended.json, which lists the repairs in `mended`."""
    document = {"zckpt": 1, "mended": to_json(mended)}
    return json.dumps(document, indent=1).encode() + b"\n"


def path_beside(root: str) -> str:
    """The path of zckpt-mended.json for a checkpoint; `root` is its directory or its only file."""
    return os.path.join(root if sources.is_folder(root) else os.path.dirname(root), MENDED)


def beside(root: str) -> tuple[Mended, ...]:
    """Reads the list of repairs by `zckpt mend` from zckpt-mended.json beside a checkpoint.

    Empty if there is no such file. Raises CorruptCheckpoint if the file is damaged.
    """
    path = path_beside(root)
    if not sources.is_file(path):
        return ()
    with sources.opened(path) as file:
        text = file.read(MOST + 1)
    try:
        if len(text) > MOST:
            raise ValueError("it is too long")
        return from_json(msgspec.json.decode(text, type=dict[str, Any])["mended"])
    except (LookupError, ValueError) as error:
        raise CorruptCheckpoint(
            "file-damaged",
            f"{path} is damaged: {cause(error)}",
            hint="copy this file again: it lists the values that zckpt mend has restored",
            file=path,
        ) from error


def warnings(mended: Iterable[Mended], where: str) -> list[Notice]:
    """Makes the warnings about repairs, which every command prints for a mended checkpoint."""
    kinds: Mapping[str, list[Mended]] = {"": [], "chance": [], "made-up": []}
    for record in mended:
        kinds[record.by if record.by in kinds else ""].append(record)
    lines = []
    for kind, records in kinds.items():
        if records:
            names = [*dict.fromkeys(each.tensor or each.value or each.file for each in records)]
            count = counted(len(records), "record")
            message = (
                f"zckpt mend has {HOW[kind].format(f'{count} of {where}')}: {listed(names, 4)}"
            )
            lines.append(warning(CODE, message, subject=names[0], file=where))
    return lines
