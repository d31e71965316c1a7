"""Damage of the files of a checkpoint, and whether a mended copy is what was there before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zckpt.core.checkpoint.mended import MENDED

MANIFEST = "manifest.json"


def flip(path: Path, byte: int, bit: int) -> None:
    """Flips one bit of a file."""
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


def put(path: Path, offset: int, data: bytes) -> None:
    """Writes bytes over those of a file."""
    before = path.read_bytes()
    path.write_bytes(before[:offset] + data + before[offset + len(data) :])


def contents(root: Path) -> dict[str, Any]:
    """Every file by its name; of a universal checkpoint what the manifest says."""
    return dict(_contents(root))


def _contents(root: Path) -> Iterator[tuple[str, Any]]:
    for path in sorted(root.rglob("*")):
        if path.is_dir() or path.name == MENDED:
            continue
        value: Any = path.read_bytes()
        if path.name == MANIFEST:
            value = json.loads(value)
            for key in ("mended", "crc32"):
                value.pop(key, None)
        yield str(path.relative_to(root)), value
