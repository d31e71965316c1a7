"""Which files make a universal checkpoint: safetensors files of whole tensors, and a manifest.

    OUT/manifest.json             everything but tensors, as JSON (specified in the README)
    OUT/model.safetensors         slot `param`: the module's weights and buffers
    OUT/master.safetensors        fp32 master weights
    OUT/exp_avg.safetensors ...   one per optimizer state
    OUT/state.safetensors         tensors inside the rest of the state
    OUT/siblings/                 other files of a trainer's directory

There is no pickle in it. The version of the format is 1; keys are added, never changed.
"""

from __future__ import annotations

import os

VERSION = 1
MANIFEST = "manifest.json"
SIBLINGS = "siblings"


def detect(path: str) -> list[str]:
    """One empty tag if `path` holds a manifest that zckpt wrote."""
    name = os.path.join(path, MANIFEST)
    if not os.path.isfile(name):
        return []
    with open(name, "rb") as file:
        return [""] if b'"zckpt"' in file.read(4096) else []
