"""A DeepSpeed engine loads any checkpoint at any size, without one being written for that size.

    zckpt.deepspeed.load_checkpoint(engine, "checkpoint-500")

    loading.py    load_checkpoint; where it is refused, the copy that `auto_resume` writes

`zckpt/loading/` does the work. `undo` takes back what `zckpt.auto_resume(RUN, copy=False)` has
changed of DeepSpeed.
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
