"""DeepSpeed's engine loads any checkpoint at any size, and nothing is written.

    zckpt.deepspeed.load_checkpoint(engine, "checkpoint-500")

    loading.py    load_checkpoint: what all ranks do, and how an error ends it in all of them
    filled.py     a file of the target that is in no filesystem: torch.load reads it
    agreeing.py   have all ranks together read what the source's checksums state?
    names.py      the temporary directory in which the engine finds the names of its files

The target is laid out as `reshard` does: shells, read back by the format's own reader, and joined
with the source. `reshard` then writes all files. Here a rank fills those that its engine asks for,
in the memory of the tensors that torch.load makes.
"""

from __future__ import annotations

from ..errors import MissingExtra

try:
    from .loading import load_checkpoint
except ImportError as error:
    raise MissingExtra(
        "extra-missing",
        "zckpt.deepspeed needs torch, which is not installed",
        hint="pip install 'zckpt[torch]'",
    ) from error

__all__ = ["load_checkpoint"]
