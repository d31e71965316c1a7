"""Detects a checkpoint of PyTorch Lightning, and tells under which keys Lightning loads its state.

    lightning    x.ckpt                {"state_dict": {...}, "optimizer_states": [{...}], ...}
                 .metadata, meta.pt    items of `state_dict` and `optimizer_0`; the rest in meta.pt
                 checkpoint/, latest   DeepSpeed's, with the rest as the client's state

Trainers that store their own files beside the engine's are detected by these files: trainers.py.
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
"""The file of a sharded checkpoint in which Lightning 2.6 stores all except the state dicts.

Fabric stores this file too.
"""


class Keys(Struct, frozen=True):
    """The keys under which Lightning stores the state dicts of model and optimizer.

    `file` is the name of a checkpoint that is one file. In a directory of
    torch.distributed.checkpoint, `file` has everything but these state dicts.
    """

    model: tuple[Any, ...]
    optimizer: tuple[Any, ...]
    file: str

    def numbered_as(self, optimizer: tuple[Any, ...] | None) -> Keys:
        """Replaces the optimizer's number in the keys: `optimizer_0` becomes `optimizer_1`.

        The number is taken from the end of `optimizer`, the keys of the source's optimizer. If
        `optimizer` is None or has no number, the keys are returned unchanged.
        """
        number = NUMBER.search(str(optimizer[-1])) if optimizer else None
        if number is None:
            return self
        *before, last = self.optimizer
        own_key = int(number[0]) if type(last) is int else NUMBER.sub(number[0], last)
        return replace(self, optimizer=(*before, own_key))


NAME = "Lightning"
LIGHTNING = "pytorch-lightning_version"
"""A key that a checkpoint has if Lightning saved its full state, from which it resumes."""
# Lightning loads the states of all optimizers by their places in a list
WHOLE = Keys(("state_dict",), ("optimizer_states", 0), "last.ckpt")
"""Where Lightning's state dicts are in a single file."""
SHARDED = Keys(("state_dict",), ("optimizer_0",), META)
"""Where Lightning's state dicts are in a directory of torch.distributed.checkpoint."""
TAG = "checkpoint"
"""The only DeepSpeed tag that Lightning looks for."""
TRAINED, AVERAGING = "current_model_state", "averaging_state"
"""Keys of Lightning's file if its `state_dict` has averages of the weights (WeightAveraging).

The first has the weights that the optimizer updates, the second the state of the averages.
Lightning loads them only from a single file.
"""


def place_of(state: Collection[Any], model: tuple[Any, ...]) -> tuple[Any, ...]:
    """Chooses the keys under which a target stores a model, such as ("state_dict",).

    `model` are the keys of the model in the source, and usually the result. `state` has the top
    keys of the checkpoint.
    """
    # Lightning loads a model only from "state_dict", also the trained weights beside averages
    return WHOLE.model if LIGHTNING in state and model == (TRAINED,) else model


def is_in(source: Manifest) -> bool:
    """Whether the source has Lightning's own state (loops, callbacks): Lightning saved it."""
    return LIGHTNING in (source.state.get("client_state") or {})


def resuming(
    source: Manifest, otherwise: Callable[[str], str], file: str = ""
) -> Callable[[str], str]:
    """Returns a function that makes, from a path, the line of code that resumes from there.

    `file` is the file that Lightning loads if the path is a directory. If no known program saved
    the source, the function `otherwise` is returned.
    """
    if not is_in(source):
        return trainers.resuming(source.files.siblings, otherwise)
    engine = source.run.engine if isinstance(source.run.engine, StateDictEngine) else None
    # of several optimizers, zckpt has read another one than the first
    if engine and WHOLE.numbered_as(engine.optimizer) != WHOLE:
        return otherwise
    return lambda path: (
        f"trainer.fit(module, ckpt_path={literal(os.path.join(path, file) if file else path)})"
    )


def refuse_averages(source: Manifest) -> None:
    """Raises AmbiguousCheckpoint if a program would continue to train averages of the weights.

    A target that is a single file keeps both the averages and the trained weights. For other
    targets, the user chooses one of the two by `--root`; then there is no error.
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
