"""Are the files whole that a trainer has written beside its engine's?

The engine's own are checked by their format. These are looked at as what they are: a program that
resumes loads them too, and ends if one was cut.
"""

from __future__ import annotations

import json
import os
import zipfile

from ..core.manifest import Manifest, Sibling
from .runs import FILE, Candidate

META = "meta.pt"
OF_TORCH = (".pt", ".pth", ".bin", ".pkl")
MOST = 64 << 20  # bytes of a file that is read


def unfinished(candidate: Candidate, manifest: Manifest) -> str:
    """What is missing or cut of a save that was interrupted; empty if nothing is."""

    def has(name: str) -> bool:
        return os.path.exists(os.path.join(candidate.path, name))

    if candidate.tag is None and has("training_args.bin") and not has("trainer_state.json"):
        return "the Trainer's trainer_state.json is missing, which it writes last"
    if manifest.format == "dcp" and candidate.name.endswith(FILE) and not has(META):
        return f"Lightning's {META} is missing, which it writes last"
    return next((f"{item.path} is damaged" for item in manifest.siblings if _is_damaged(item)), "")


def _is_damaged(item: Sibling) -> bool:
    """Whether a file is empty, or not what its name says; larger ones are only asked for a size."""
    if item.size == 0:
        return item.name.endswith((*OF_TORCH, ".json"))
    if item.size > MOST:
        return False
    try:
        if item.name.endswith(".json"):
            with open(item.path, "rb") as file:
                json.load(file)
        elif item.name.endswith(OF_TORCH):
            _read_zip(item.path)
    except (ValueError, zipfile.BadZipFile, EOFError):
        return True
    return False


def _read_zip(path: str) -> None:
    """Raises BadZipFile if a file of torch.save was cut, or has not its own checksums."""
    with open(path, "rb") as file:
        if file.read(4) != b"PK\3\4":  # of an older torch, or a pickle
            return
    with zipfile.ZipFile(path) as parts:
        for part in parts.infolist():
            if part.CRC:  # a program may save without
                with parts.open(part) as content:
                    while content.read(1 << 20):
                        pass
