"""Saves of real ranks: whole, as DTensors, and as plain slices; see slices_rank.py."""

from __future__ import annotations

from pathlib import Path

from .deepspeed import submit


def saved(engine: str, ranks: int, root: Path) -> Path:
    """A folder with what ranks of `engine` (fsdp2, fsdp1, ddp, zero) have saved, by variant."""
    submit("slices_rank", engine, ranks, (ranks, root.resolve()), root)
    return root
