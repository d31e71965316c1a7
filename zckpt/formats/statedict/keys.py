"""The keys under which a PyTorch program saves its state dicts."""

from __future__ import annotations

import os
from typing import Any

from ...core.checkpoint.facts import Engine, StateDictEngine
from .tree import TreePath

OPTIMIZER: TreePath = ("optim",)
"""The key of an optimizer's state dict, as in torch's own examples."""
RANKS, ADAPTER = "ranks", "adapter"
"""Values of `StateDictEngine.storage`: a safetensors file of each rank, or PEFT's adapter files."""


def own_key(folder: str) -> str:
    """Invents the key for a folder that is one state dict: "optim/" for the folder `optim`.

    No program's key ends with "/", so the two cannot be confused.
    """
    return f"{os.path.basename(folder)}/"


def in_folder(path: TreePath) -> TreePath:
    """Removes a first key such as "optim/", which stands for a folder, from a value's path."""
    return path[1:] if path and str(path[0]).endswith("/") else path


def trainers_dialect(engine: Engine | None) -> str | None:
    """Chooses the `--dialect` that gives the target's files the same names as the source's.

    None if no dialect does this.
    """
    keys = keys_of(engine)
    is_fsdp = any(name.startswith("pytorch_model_fsdp") for name in keys.folders or ())
    return "accelerate" if is_fsdp else keys.dialect


def is_optimizers_key(key: Any) -> bool:
    """Whether a key is an optimizer's, in a dictionary that mixes the keys of model and optimizer.

    Such keys begin with `state` or `param_groups`.
    """
    return isinstance(key, str) and key.partition(".")[0] in ("state", "param_groups")


def keys_of(engine: Engine | None) -> StateDictEngine:
    """Tells under which keys and file names a torch program saved its state dicts.

    For any other engine, these are torch's usual keys, `model` and `optim`.
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
