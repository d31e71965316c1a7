"""zckpt's own format: plain safetensors files of whole tensors, and a manifest as JSON.

    OUT/manifest.json             everything that is no tensor (specified in the README)
    OUT/model.safetensors         slot `param`: what the module held, frozen weights, buffers
    OUT/master.safetensors        fp32 master weights
    OUT/exp_avg.safetensors ...   one per optimizer state
    OUT/state.safetensors         tensors inside the rest of the state
    OUT/siblings/                 other files of a trainer's directory

No pickle anywhere. Version 1; keys are only ever added.
"""

from __future__ import annotations

import os

VERSION = 1
MANIFEST = "manifest.json"
SIBLINGS = "siblings"


def detect(path: str) -> list[str]:
    """One nameless checkpoint where `path` holds a manifest of ours."""
    name = os.path.join(path, MANIFEST)
    if not os.path.isfile(name):
        return []
    with open(name, "rb") as file:
        return [""] if b'"zckpt"' in file.read(4096) else []
