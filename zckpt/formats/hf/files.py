"""Which files `from_pretrained` loads weights from.

model.safetensors, adapter_model.safetensors    one file
model.safetensors.index.json                    the index of model-00001-of-00003.safetensors ...
"""

from __future__ import annotations

import os

from ...core import sources
from ...naming import peft

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def locate(folder: str) -> str:
    """The file of weights, or their index, that zckpt has written to a folder."""
    names = (WEIGHTS, INDEX, peft.WEIGHTS[0])
    paths = [os.path.join(folder, name) for name in names]
    return next(path for path in paths if sources.is_file(path))
