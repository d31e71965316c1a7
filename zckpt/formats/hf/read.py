"""Reads the folder for `from_pretrained` that zckpt has laid out: weights only."""

from __future__ import annotations

import os

from ...core.checkpoint.manifest import Manifest
from ...core.checkpoint.origin import Origin
from ...core.storage import sources
from ...naming import peft
from ...training.trainers import beside
from ..reading import USUAL, Reading
from ..statedict.read import manifest
from ..statedict.tree import ReadFiles, SavedTree
from ..statedict.weights import files_of_index, weights_of

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
"""One file of weights, or the index of model-00001-of-00003.safetensors and so on."""


def read(path: str, reading: Reading = USUAL) -> Manifest:
    """Reads a folder that zckpt has just laid out: its tensors are not filled in yet.

    Folders of other programs are read by the format `gathered`.
    """
    paths = [os.path.join(path, name) for name in (WEIGHTS, INDEX, peft.WEIGHTS[0])]
    weights = next(file for file in paths if sources.is_file(file))
    files = files_of_index(weights) if weights.endswith(INDEX) else [weights]
    saved = SavedTree(
        path,
        Origin("gathered"),
        {"model": {name: leaf for file in files for name, leaf in weights_of(file)[0].items()}},
        ReadFiles(paths=[weights, *files] if weights.endswith(INDEX) else files),
    )
    siblings, omitted = beside(path, set(saved.files.paths))
    saved.files.siblings += siblings
    saved.omitted += omitted
    return manifest(saved)
