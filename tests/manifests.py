"""Changes to the manifest.json of a universal checkpoint, with a checksum that fits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zckpt.formats.universal.agreement import checksum


@contextmanager
def changed(universal: Path) -> Iterator[dict[str, Any]]:
    """The manifest, to be changed in place; it is written again at the end of the block."""
    path = universal / "manifest.json"
    document = json.loads(path.read_text())
    yield document
    path.write_text(json.dumps({**document, "crc32": checksum(document)}))
