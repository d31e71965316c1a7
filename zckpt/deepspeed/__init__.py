"""Loads any checkpoint into a DeepSpeed engine with any number of ranks, without writing a copy.

    zckpt.deepspeed.load_checkpoint(engine, "checkpoint-500")

    loading.py    load_checkpoint; for engines that it refuses, it can write a resharded copy

`zckpt/loading/` does the work. `undo` reverts the changes that `zckpt.auto_resume(RUN, copy=False)`
made to DeepSpeed's functions.
"""

from __future__ import annotations

from ..errors import MissingExtra

try:
    from ..loading.hook import undo
    from .loading import load_checkpoint
except ImportError as error:
    raise MissingExtra(
        "extra-missing",
        "zckpt.deepspeed needs torch, which is not installed",
        hint="pip install 'zckpt[torch]'",
    ) from error

__all__ = ["load_checkpoint", "undo"]
