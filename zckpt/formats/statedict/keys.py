"""Under which keys does a program of torch save its state dicts?"""

from __future__ import annotations

from typing import Any

from ...core.facts import Engine, StateDictEngine
from .tree import Path

OPTIMIZER: Path = ("optim",)
"""The key of an optimizer's state dict, as in torch's own examples."""


def is_optimizers_key(key: Any) -> bool:
    """Whether a key of a dictionary with an optimizer's state dict is one of this state dict."""
    return isinstance(key, str) and key.partition(".")[0] in ("state", "param_groups")


def keys_of(engine: Engine | None) -> StateDictEngine:
    """The keys of the program that wrote a source, or the usual ones for another engine."""
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
