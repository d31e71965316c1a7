"""How Hugging Face's storage for torch.distributed.checkpoint is read: safetensors of every rank.

    shard-RRRRR-model-FFFFF-of-NNNNN.safetensors    rank R from 1 on, file F of N

A header's `DCP_SHARDING_INFO` says at which offsets each piece begins in the whole tensor. No file
states the whole shape: it ends where the last piece ends (torch 2.13, hf_storage.py). The files
have weights alone, and no index.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from itertools import product

from ...core.expected import missing_file
from ...core.fragments import Record
from ...files.safefile import Stored, read_with_metadata
from ..statedict.tree import Leaf, SavedTree, assembled, number_of, solid_piece

NAME = re.compile(r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors")
INFO = "DCP_SHARDING_INFO"


def files(folder: str) -> list[str]:
    """The ranks' files."""
    with os.scandir(folder) as entries:
        return sorted(entry.path for entry in entries if NAME.fullmatch(entry.name))


def read(paths: Sequence[str], saved: SavedTree) -> None:
    """Puts every tensor into the tree; raises IncompleteCheckpoint, InconsistentCheckpoint."""
    _require_complete(paths)
    pieces: dict[str, list[tuple[Stored, tuple[int, ...]]]] = {}
    for path in paths:
        tensors, metadata = read_with_metadata(path)
        saved.records += [Record(stored.extent, None) for stored in tensors]
        info = json.loads(metadata.get(INFO, "{}"))
        for stored in tensors:
            offsets = info.get(stored.name, {}).get("saved_offsets")
            begin = tuple(offsets) if offsets is not None else (0,) * len(stored.shape)
            pieces.setdefault(stored.name, []).append((stored, begin))
    for name, parts in pieces.items():
        ends = [
            [o + s for o, s in zip(begin, stored.shape, strict=True)] for stored, begin in parts
        ]
        shape = tuple(map(max, zip(*ends, strict=True)))
        dtype = parts[0][0].dtype
        # a rank without rows wrote an empty piece, so the number of pieces is the number of ranks
        fragments = assembled(name, dtype, shape, [solid_piece(*part) for part in parts])
        number = number_of(parts[0][0])
        saved.tree[name] = Leaf(dtype, shape, fragments, number, sharded=len(parts) > 1)
    saved.files += paths


def _require_complete(paths: Sequence[str]) -> None:
    """Raises IncompleteCheckpoint if a file is missing: without it, shapes would seem smaller."""
    matches = (NAME.fullmatch(os.path.basename(path)) for path in paths)
    numbers = {tuple(map(int, match.groups())) for match in matches if match}
    ranks, count = (max((each[place] for each in numbers), default=0) for place in (0, 2))
    for rank, file in product(range(1, ranks + 1), range(1, count + 1)):
        if (rank, file, count) not in numbers:
            missing = f"shard-{rank:05d}-model-{file:05d}-of-{count:05d}.safetensors"
            raise missing_file(os.path.join(os.path.dirname(paths[0]), missing))
