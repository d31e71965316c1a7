"""Finds the files of a universal checkpoint: safetensors files of full tensors, and a manifest.

    OUT/manifest.json             everything but tensors, as JSON (specified in docs/format-v1.md)
    OUT/model.safetensors         the module's weights and buffers
    OUT/master.safetensors        fp32 master weights
    OUT/exp_avg.safetensors ...   one file per optimizer state
    OUT/state.safetensors         tensors among other saved values, such as a program's own state
    OUT/siblings/                 other files of a trainer's directory
    OUT/around/                   other files of the numbered folder (such as step3/) that contained
                                  the checkpoint's folder

None of zckpt's own files is a pickle. The version of the format is 1; keys are added, but never
changed.
"""

from __future__ import annotations

import os
import re

from ...core.storage import sources
from ...core.storage.inventory import role

ROLES = (
    role("metadata", r"manifest\.json", is_last=True),
    role("model", r"model[^/]*\.safetensors"),
    role("optimizer", r"[^/]*\.safetensors"),
)
"""The roles of this format's files."""
VERSION = 1
MANIFEST = "manifest.json"
SIBLINGS, AROUND = "siblings", "around"
# Bytes. A tensor needs 150 to 300, and its parameter as many: 100 MB for the 50,000 parameters of a
# large model with three states each. The rest is for values that a program saved beside them.
MAX_MANIFEST = 1 << 29


OF_OPTIMIZERS = re.compile(r"(master|exp_avg|momentum_buffer)(-\d+-of-\d+)?\.safetensors")
"""Names of files that show that a folder is a universal checkpoint, if its manifest was lost."""
KEYS = (b'"zckpt"', b'"source"', b'"step"', b'"optimizer"')
"""The first keys of a manifest; two of them identify it, even if it is damaged."""


def detect(path: str) -> list[str]:
    """[""] (a checkpoint without tags) if `path` is a universal checkpoint; else [].

    A universal checkpoint has a manifest that zckpt wrote. If the manifest was lost, it is
    recognized by a file such as exp_avg.safetensors (`OF_OPTIMIZERS`).
    """
    name = os.path.join(path, MANIFEST)
    if sources.is_file(name):
        with sources.opened(name) as file:
            head = file.read(4096)
        if sum(key in head for key in KEYS) > 1:
            return [""]
    names = sources.names(path) if sources.is_folder(path) else ()
    return [""] if any(map(OF_OPTIMIZERS.fullmatch, names)) else []
