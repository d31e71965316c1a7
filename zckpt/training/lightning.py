"""Is Lightning's state in a checkpoint, and where does Lightning look for it?

    lightning    x.ckpt                {"state_dict": {...}, "optimizer_states": [{...}], ...}
                 .metadata, meta.pt    items of `state_dict` and `optimizer_0`; the rest in meta.pt
                 checkpoint/, latest   DeepSpeed's, with the rest as the client's state

Programs that store files of their own beside an engine's are found by these: see trainers.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ..core.checkpoint.facts import StateDictEngine
from ..core.checkpoint.manifest import Manifest
from ..errors import AmbiguousCheckpoint, literal
from . import trainers

NUMBER = re.compile(r"(?<![0-9])[0-9]{1,3}$")
META = "meta.pt"
"""What Lightning and Fabric save beside items: all that is no state dict (2.6)."""


class Keys(Struct, frozen=True):
    """The keys of the state dicts, and the `file` that has them, or the rest beside them."""

    model: tuple[Any, ...]
    optimizer: tuple[Any, ...]
    file: str

    def numbered_as(self, optimizer: tuple[Any, ...] | None) -> Keys:
        """The same for the optimizer whose number is in these keys: one of several keeps it."""
        number = NUMBER.search(str(optimizer[-1])) if optimizer else None
        if number is None:
            return self
        *before, last = self.optimizer
        own = int(number[0]) if type(last) is int else NUMBER.sub(number[0], last)
        return replace(self, optimizer=(*before, own))


NAME = "Lightning"
LIGHTNING = "pytorch-lightning_version"
"""A key of its whole state, which it loads from one path: of all optimizers, by their places."""
WHOLE = Keys(("state_dict",), ("optimizer_states", 0), "last.ckpt")
"""Where its state dicts are in one file."""
SHARDED = Keys(("state_dict",), ("optimizer_0",), META)
"""And in a directory of items."""
TAG = "checkpoint"
"""The only one of DeepSpeed's that it looks for."""
TRAINED, AVERAGING = "current_model_state", "averaging_state"
"""Where it saves averages of the weights in the place of the model's (WeightAveraging): the weights
that the optimizer updates, and what belongs to the averages. It loads both from one file only."""


def place_of(state: Collection[Any], model: tuple[Any, ...]) -> tuple[Any, ...]:
    """Where a target has a model: the weights that Lightning trains take the averages' place."""
    return WHOLE.model if LIGHTNING in state and model == (TRAINED,) else model


def is_in(source: Manifest) -> bool:
    """Whether Lightning's state is beside the state dicts."""
    return LIGHTNING in (source.state.get("client_state") or {})


def resuming(
    source: Manifest, otherwise: Callable[[str], str], file: str = ""
) -> Callable[[str], str]:
    """Gives the line with which the program of a checkpoint resumes from a directory.

    `file` is what Lightning is given there. `otherwise` is for no program, and for the state of an
    optimizer that is not Lightning's first.
    """
    if not is_in(source):
        return trainers.resuming(source.files.siblings, otherwise)
    engine = source.run.engine if isinstance(source.run.engine, StateDictEngine) else None
    if engine and WHOLE.numbered_as(engine.optimizer) != WHOLE:
        return otherwise
    return lambda path: (
        f"trainer.fit(module, ckpt_path={literal(os.path.join(path, file) if file else path)})"
    )


def refuse_averages(source: Manifest) -> None:
    """Raises AmbiguousCheckpoint if averages of the weights would be trained on.

    A target with everything in one file keeps both the averages and the weights that are trained.
    """
    is_chosen = source.run.origin.root is not None or not isinstance(
        source.run.engine, StateDictEngine
    )
    if not is_in(source) or is_chosen or TRAINED not in source.state["client_state"]:
        return
    model = WHOLE.model[0]
    raise AmbiguousCheckpoint(
        "several-models",
        f"{source.root} has averages of the weights in {model}, and the weights that the "
        f"optimizer updates in {TRAINED}: {NAME} loads both from one file only",
        hint=f"convert the file that {NAME} saved, with --root {TRAINED}, or with --root {model}",
        file=source.root,
    )
