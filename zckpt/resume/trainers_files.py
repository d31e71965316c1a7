"""Is a checkpoint whole, by its metadata and by the files of its trainer?

The engine's own are checked by their format. Those of a trainer are looked at as what they are: a
program that resumes loads them too, and ends if one was cut.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from .. import api, formats
from ..core import sources
from ..core.manifest import Manifest, Sibling
from ..errors import IncompleteCheckpoint
from .runs import FILE, Candidate

META, STATE = "meta.pt", "trainer_state.json"
OF_TORCH = (".pt", ".pth", ".bin", ".pkl")
MOST = 64 << 20  # bytes of a file that is read


def read(candidate: Candidate, reading: Mapping[str, Any]) -> Manifest:
    """The metadata of a checkpoint; raises the ZckptError that says why it is not whole."""
    # without the tag's folder it is the file that names it which is wrong
    tag = candidate.tag if candidate.tag and os.path.isdir(candidate.where) else None
    manifest = api.read(candidate.path, tag=tag, nameless=True, by_checksums=True, **reading)
    if reason := _unfinished(candidate, manifest):
        raise IncompleteCheckpoint("trainer-file-damaged", reason)
    return manifest


def step_of(candidate: Candidate, manifest: Manifest) -> int | float | None:
    """The completed updates, or Megatron-Core's iteration; else what the Trainer has counted."""
    iteration = str(manifest.origin.tag).rpartition("_")[2]
    if formats.named(manifest.format).to_load and iteration.isdecimal():
        return int(iteration)
    step = manifest.step
    if step is None and candidate.tag is None:  # no file says which parameters have which step
        with suppress(FileNotFoundError, NotADirectoryError, ValueError, AttributeError):
            with sources.opened(os.path.join(candidate.path, STATE)) as file:
                counted = json.load(file).get("global_step")
            return counted if type(counted) is int else None
    return step


def _unfinished(candidate: Candidate, manifest: Manifest) -> str:
    """What is missing or cut of a save that was interrupted; empty if nothing is."""

    def has(name: str) -> bool:
        return os.path.exists(os.path.join(candidate.path, name))

    if candidate.tag is None and has("training_args.bin") and not has(STATE):
        return f"{candidate.path} has no {STATE}, which the Trainer writes last"
    if manifest.format == "dcp" and candidate.name.endswith(FILE) and not has(META):
        return f"{candidate.path} has no {META}, which Lightning writes last"
    tag, format = str(manifest.origin.tag), formats.named(manifest.format)
    names_tag = format.pointer if candidate.tag is None and not format.to_load else None
    if names_tag and has(tag) and names_tag(candidate.path) is None:
        return f"{candidate.path} has no file that names {tag}, which a save writes last"
    return next((f"{item.path} is damaged" for item in manifest.siblings if _is_damaged(item)), "")


def _is_damaged(item: Sibling) -> bool:
    """Whether a file is empty or has zeros alone, or is not what its name says.

    Of one that is larger than MOST, only the first two are asked.
    """
    if item.size == 0:
        return item.name.endswith((*OF_TORCH, ".json"))
    if item.name.endswith(OF_TORCH) and _has_zeros_alone(item.path):
        return True
    if item.size > MOST:
        return False
    try:
        if item.name.endswith(".json"):
            with sources.opened(item.path) as file:
                json.load(file)
        elif item.name.endswith(OF_TORCH):
            _read_zip(item.path)
    except (ValueError, zipfile.BadZipFile, EOFError):
        return True
    return False


def _has_zeros_alone(path: str) -> bool:
    """Whether no byte was written, as a power loss leaves a file whose size is known already."""
    with sources.opened(path) as file:
        while content := file.read(1 << 16):
            if content.count(0) < len(content):
                return False
    return True


def _read_zip(path: str) -> None:
    """Raises BadZipFile if a file of torch.save was cut, or has not its own checksums."""
    with sources.opened(path) as file:
        if file.read(4) != b"PK\3\4":  # of an older torch, or a pickle
            return
        with zipfile.ZipFile(file) as parts:
            for part in parts.infolist():
                if part.CRC:  # a program may save without
                    with parts.open(part) as content:
                        while content.read(1 << 20):
                            pass
