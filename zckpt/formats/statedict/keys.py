"""Under which keys does a program of torch save its state dicts?"""

from __future__ import annotations

from ...core.facts import Engine, StateDictEngine
from .tree import Path

OPTIMIZER: Path = ("optim",)
"""The key of an optimizer's state dict, as in torch's own examples."""
RANKS, ADAPTER = "ranks", "adapter"
"""How sharded storage may keep the weights: see `StateDictEngine.storage`."""


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
