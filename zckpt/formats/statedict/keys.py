"""The keys under which a PyTorch program saves its state dicts."""

from __future__ import annotations

import os
from typing import Any

from ...core.checkpoint.facts import Engine, StateDictEngine
from .tree import TreePath

OPTIMIZER: TreePath = ("optim",)
"""The key of an optimizer's state dict, as in torch's own examples."""
RANKS, ADAPTER = "ranks", "adapter"
"""How weights are kept if not as items: see `StateDictEngine.storage`."""


def own_key(folder: str) -> str:
    """The tree's key for a folder that is itself one state dict: the folder's name and "/".

    The keys of programs do not end with "/".
    """
    return f"{os.path.basename(folder)}/"


def in_folder(path: TreePath) -> TreePath:
    """The path of a value within its folder: `path` without a first key that is a folder."""
    return path[1:] if path and str(path[0]).endswith("/") else path


def trainers_dialect(engine: Engine | None) -> str | None:
    """The value of `--dialect` that gives the target's files the same names as the source's.

    None if no value does this.
    """
    keys = keys_of(engine)
    is_fsdp = any(name.startswith("pytorch_model_fsdp") for name in keys.folders or ())
    return "accelerate" if is_fsdp else keys.dialect


def is_optimizers_key(key: Any) -> bool:
    """Whether a key belongs to the optimizer, in a dictionary that mixes model and optimizer."""
    return isinstance(key, str) and key.partition(".")[0] in ("state", "param_groups")


def keys_of(engine: Engine | None) -> StateDictEngine:
    """The keys and files of the program that wrote a source; usual keys for other sources.

    Other sources are those whose files are not state dicts of a torch program.
    """
    if isinstance(engine, StateDictEngine):
        return engine
    dtype = engine.dtype if engine else None
    return StateDictEngine(
        "torch",
        dtype,
        model=("model",),
        optimizer=OPTIMIZER,
        layout=None,
        scheduler=None,
        folders=None,
        guessed=False,
        adapter=False,
    )
