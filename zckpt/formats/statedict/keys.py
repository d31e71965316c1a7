"""The keys under which a torch program saves its state dicts."""

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
    """The key that zckpt gives, in the tree, to a folder that is one state dict.

    It ends with /, unlike the keys of programs.
    """
    return f"{os.path.basename(folder)}/"


def in_folder(path: TreePath) -> TreePath:
    """The path of a value within its folder: without the first key if that names the folder."""
    return path[1:] if path and str(path[0]).endswith("/") else path


def trainers_dialect(engine: Engine | None) -> str | None:
    """The `--dialect` that writes files with the names of the source's; None if none does."""
    keys = keys_of(engine)
    is_fsdp = any(name.startswith("pytorch_model_fsdp") for name in keys.folders or ())
    return "accelerate" if is_fsdp else keys.dialect


def is_optimizers_key(key: Any) -> bool:
    """Whether a key is an optimizer's, in a dictionary that mixes model and optimizer."""
    return isinstance(key, str) and key.partition(".")[0] in ("state", "param_groups")


def keys_of(engine: Engine | None) -> StateDictEngine:
    """The keys and files of the program that wrote a source; usual ones for other engines."""
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
