"""Which values of a checkpoint were restored by `zckpt mend`, and what speaks for each?

    zckpt-mended.json    {"zckpt": 1, "mended": [{"file": ..., "tensor": ..., "by": ...}]}

It lies in the folder of the engine's files. A universal checkpoint has the list in its manifest.
Whatever is made of a mended checkpoint has the list, too.
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
MOST = 16 << 20  # bytes of the file
Size = Annotated[int, Meta(ge=0)]
By = Literal["checksum", "witness", "chance", "made-up"]
"""What speaks for the restored bytes: the checksum of a small record; other bytes of the checkpoint
or of an older one; the checksum of a large record, which the user has accepted. Nothing speaks for
bytes that are made up, as the user has typed."""
HOW = {
    "": "restored {} exactly",
    "chance": "restored {} on trust in a checksum alone (--accept-chance)",
    "made-up": "made up {} in place of lost values (--rebuild)",
}
"""What every command says of records, by what speaks for them."""
Value = float | int | bool | str | None


class Mended(Struct, frozen=True):
    """Bytes of one record that were restored.

    `file` is a path below the checkpoint, `offset` the first restored byte in it, and `bytes` how
    many were restored. `bit` is that of a single flipped bit. `before` and `after` are the values
    of the `element` of the `tensor`, if it is one. Damage of many bits looks like this one by
    `chance`. `witness` says who confirms it, or what bytes that are made up were taken from.
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


def to_json(mended: Iterable[Mended]) -> list[dict[str, Any]]:
    """As a manifest and the file have them."""
    lines: list[dict[str, Any]] = to_builtins(list(mended))
    return lines


def from_json(value: Any) -> tuple[Mended, ...]:
    """The inverse of `to_json`; raises ValueError."""
    return convert(value, tuple[Mended, ...])


def text_of(mended: Iterable[Mended]) -> bytes:
    """The contents of the file."""
    document = {"zckpt": 1, "mended": to_json(mended)}
    return json.dumps(document, indent=1).encode() + b"\n"


def path_beside(root: str) -> str:
    """Where the file is of a checkpoint, by the path of its directory or of its one file."""
    return os.path.join(root if sources.is_folder(root) else os.path.dirname(root), MENDED)


def beside(root: str) -> tuple[Mended, ...]:
    """What the file says beside a checkpoint; nothing if there is none.

    Raises CorruptCheckpoint for one that cannot be read.
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
            hint="copy it again; it says which values of the checkpoint were restored",
            file=path,
        ) from error


def warnings(mended: Iterable[Mended], where: str) -> list[Notice]:
    """What every command says of a mended checkpoint."""
    kinds: Mapping[str, list[Mended]] = {"": [], "chance": [], "made-up": []}
    for each in mended:
        kinds[each.by if each.by in kinds else ""].append(each)
    lines = []
    for kind, own in kinds.items():
        if own:
            names = [*dict.fromkeys(each.tensor or each.file for each in own)]
            count = counted(len(own), "record")
            message = (
                f"zckpt mend has {HOW[kind].format(f'{count} of {where}')}: {listed(names, 4)}"
            )
            lines.append(warning(CODE, message, subject=names[0], file=where))
    return lines
