"""Hugging Face's storage of torch.distributed.checkpoint: safetensors that ranks wrote.

    shard-RRRRR-model-FFFFF-of-NNNNN.safetensors    R is the rank from 1 on, F and N the file

A header's `DCP_SHARDING_INFO` says where each tensor begins in the whole one, whose shape is where
the last one ends (torch 2.13, hf_storage.py). There are weights alone, and no index.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from itertools import product

from ...errors import IncompleteCheckpoint
from ...files.safefile import Stored, read_with_metadata
from ..statedict.tree import Found, Leaf, assembled, number_of, solid_piece

NAME = re.compile(r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors")
INFO = "DCP_SHARDING_INFO"


def files(folder: str) -> list[str]:
    """The ranks' files."""
    with os.scandir(folder) as items:
        return sorted(item.path for item in items if NAME.fullmatch(item.name))


def read(paths: Sequence[str], found: Found) -> None:
    """Puts every tensor into the tree; raises IncompleteCheckpoint, InconsistentCheckpoint."""
    held: dict[str, list[tuple[Stored, tuple[int, ...]]]] = {}
    for path in _complete(paths):
        listed, metadata = read_with_metadata(path)
        info = json.loads(metadata.get(INFO, "{}"))
        for stored in listed:
            offsets = info.get(stored.name, {}).get("saved_offsets")
            where = tuple(offsets) if offsets is not None else (0,) * len(stored.shape)
            held.setdefault(stored.name, []).append((stored, where))
    for name, parts in held.items():
        ends = [[o + s for o, s in zip(where, part.shape, strict=True)] for part, where in parts]
        shape = tuple(map(max, zip(*ends, strict=True)))
        dtype = parts[0][0].dtype
        # a rank without rows wrote an empty one, so that the count tells
        fragments = assembled(name, dtype, shape, [solid_piece(*part) for part in parts])
        number = number_of(parts[0][0])
        found.tree[name] = Leaf(dtype, shape, fragments, number, sharded=len(parts) > 1)
    found.files += paths


def _complete(paths: Sequence[str]) -> Sequence[str]:
    """The paths; raises where a rank or a file of one is missing: pieces of shapes would be too."""
    told = {tuple(map(int, match.groups())) for path in paths if (match := _match(path))}
    most = [max((each[place] for each in told), default=0) for place in (0, 2)]
    for rank, file in product(range(1, most[0] + 1), range(1, most[1] + 1)):
        if (rank, file, most[1]) not in told:
            lost = f"shard-{rank:05d}-model-{file:05d}-of-{most[1]:05d}.safetensors"
            raise IncompleteCheckpoint(f"{os.path.dirname(paths[0])} lacks {lost}")
    return paths


def _match(path: str) -> re.Match[str] | None:
    return NAME.fullmatch(os.path.basename(path))
