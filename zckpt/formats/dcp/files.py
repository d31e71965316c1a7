"""Which files make a checkpoint of torch.distributed.checkpoint, in which folders."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from ...errors import UnsupportedCheckpoint
from ...files.dcpfile import ITEMS, METADATA
from . import hf

STEP = re.compile(r"step-(\d+)")  # torchtitan's folders
PARTS = re.compile(r"(pytorch_model_fsdp|optimizer)_(\d+)")  # Accelerate's, Hugging Face Trainer's


def detect(path: str) -> list[str]:
    """One empty tag for a checkpoint; torchtitan's `step-N` of a folder of several."""
    if not os.path.isdir(path):
        return []
    if folders(path):
        return [""]
    with os.scandir(path) as items:
        steps = [item.name for item in items if STEP.fullmatch(item.name)]
    found = [name for name in steps if is_dcp(os.path.join(path, name))]
    return sorted(found, key=lambda name: int(name.removeprefix("step-")))


def detect_weak(path: str) -> list[str]:
    """Hugging Face's storage: weights alone, which are looked for where nothing else is found."""
    return [""] if os.path.isdir(path) and hf.files(path) else []


def is_dcp(path: str) -> bool:
    """Whether a folder holds such files, though the save be unfinished."""
    if not os.path.isdir(path):
        return False
    with os.scandir(path) as items:
        return any(item.name == METADATA or item.name.endswith(ITEMS) for item in items)


def folders(path: str) -> list[str]:
    """The folders that are one checkpoint: itself, or Accelerate's for model and optimizer."""
    if is_dcp(path):
        return [path]
    with os.scandir(path) as items:
        named = sorted(item.path for item in items if PARTS.fullmatch(item.name))
    return [folder for folder in named if is_dcp(folder)]


def located(path: str, tag: str | None = None) -> tuple[str, list[str]]:
    """The checkpoint's directory, and its folders with a `.metadata`.

    Raises UnsupportedCheckpoint for several models, and for Megatron-Core.
    """
    root = os.path.join(path, tag) if tag else path
    parts = folders(root) if os.path.isdir(root) else []
    steps = detect(path) if os.path.isdir(path) and not tag else []
    if not parts and len(steps) == 1 and steps[0]:
        root = os.path.join(path, steps[0])
        parts = folders(root)
    _refuse_several(root, parts)
    for folder in parts:
        _refuse_megatron(folder)
    return root, parts


def _refuse_several(root: str, parts: list[str]) -> None:
    """Accelerate numbers the models and optimizers of one program; names may be the same in all."""
    names = [os.path.basename(folder) for folder in parts if folder != root]
    if any(not name.endswith("_0") for name in names):
        raise UnsupportedCheckpoint(
            f"{root} holds several models or optimizers: {', '.join(names)}",
            hint="give the folder of one model: its weights are read without the optimizer",
        )


def _refuse_megatron(folder: str) -> None:
    if os.path.exists(os.path.join(folder, "metadata.json")):
        raise UnsupportedCheckpoint(f"{folder} is of Megatron-Core, which zckpt does not read yet")


def own_files(root: str, parts: list[str]) -> Iterator[str]:
    """The checkpoint's own files in its directory, finished or not."""
    if root in parts:
        with os.scandir(root) as items:
            for item in items:
                if item.name.startswith(METADATA) or item.name.endswith((ITEMS, ".tmp", METADATA)):
                    yield item.path
