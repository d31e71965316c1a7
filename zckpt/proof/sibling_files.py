"""Compares the files beside two checkpoints: a trainer's state, schedulers, a configuration.

They are compared byte by byte. If one side lacks a file, this is usually only a notice, because
another program or another number of ranks has other files. It is a difference if both sides are of
the same program, and the program needs the file to resume.
"""

from __future__ import annotations

import json
import re
from typing import Any

from ..core.checkpoint.manifest import Manifest, Sibling
from ..core.passes.description import Report
from ..core.storage import sources
from ..errors import Notice, listed, note

MAX_JSON = 16 << 20  # bytes
OF_RUN = re.compile(  # a number stands for a second model or object
    r"trainer_state\.json|scheduler\.pt|scaler\.pt|(?:scheduler|sampler|dl_state_dict)(?:_\d+)?\.bin"
    r"|custom_checkpoint_\d+\.pkl"
)
"""Matches names of files that a trainer's program needs to resume, whatever the number of ranks."""
OF_TENSORS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".pkl", ".distcp")
"""Endings of files that may contain tensors."""
PATHS = {"trainer_state.json": "best_model_checkpoint"}
"""Maps the name of a JSON file to a key whose value is a path.

The path is not compared, since a conversion changes it.
"""


def siblings(a: Manifest, b: Manifest) -> tuple[list[Report], list[Notice]]:
    """Compares the trainers' files beside two checkpoints.

    Returns report lines about differences, and notices about files that only one side has. A file
    that a run needs to resume (`OF_RUN`) is a difference if the side without it has another such
    file. If neither side has an optimizer, only files that may contain tensors are compared.
    """
    has_run = a.groups is not None or b.groups is not None
    ours, theirs = (
        {
            item.name: item
            for item in (*side.files.around, *side.files.siblings, *side.files.omitted_files)
            if has_run or item.name.endswith(OF_TENSORS)
        }
        for side in (a, b)
    )
    lines: list[Report] = [
        {"key": name, **_sizes(item.size, theirs[name].size)}
        for name, item in ours.items()
        if name in theirs and not _equal(item, theirs[name])
    ]
    notes = []
    for side, root, own_files, other_files in (
        ("a", a.root, ours, theirs),
        ("b", b.root, theirs, ours),
    ):
        alone = [name for name in own_files if name not in other_files]
        goes_on = any(map(OF_RUN.fullmatch, other_files))
        lost = {name for name in alone if goes_on and OF_RUN.fullmatch(name)}
        lines += [{"key": name, "only": side} for name in sorted(lost)]
        if rest := [name for name in alone if name not in lost]:
            message = f"{listed(rest, 4)}: only beside {root}"
            notes.append(note("not-compared", message, file=own_files[rest[0]].path))
    return lines, notes


def _sizes(a: int, b: int) -> dict[str, str]:
    return {"a": f"{a} bytes", "b": f"{b} other bytes" if a == b else f"{b} bytes"}


def _equal(a: Sibling, b: Sibling) -> bool:
    if a.path == b.path:
        return True
    key = PATHS.get(a.name)
    if key is not None and max(a.size, b.size) <= MAX_JSON:
        return bool(_document(a, key) == _document(b, key))
    return a.size == b.size and sources.same_bytes(a.path, b.path)


def _document(item: Sibling, without: str) -> Any:
    with sources.opened(item.path) as file:
        data = file.read()
    try:
        document = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        return data
    if isinstance(document, dict):
        document.pop(without, None)
    return document
