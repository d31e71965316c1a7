"""Which program's state is in a checkpoint, and where does this program look for it?

    lightning    x.ckpt                {"state_dict": {...}, "optimizer_states": [{...}], ...}
                 .metadata, meta.pt    items of `state_dict` and `optimizer_0`; the rest in meta.pt
                 checkpoint/, latest   DeepSpeed's, with the rest as the client's state

A program that stores files of its own beside an engine's is found by these: see trainers.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ..core.facts import StateDictEngine
from ..core.manifest import Manifest
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


class Program(Struct, frozen=True):
    """A program that loads its whole state from one path; `mark` is a key of this state.

    It loads the states of all optimizers, by their places.

    If it saves averages of the weights in the place of the model's, `trained` is the key of the
    weights that the optimizer updates, and `averaging` that of what belongs to the averages. It
    loads both from one file only.

    `whole` is one file, `sharded` a directory of items; `tag` is the only one of DeepSpeed's that
    it looks for. `resuming` is the line with which it goes on, around the path.
    """

    name: str
    mark: str
    whole: Keys
    sharded: Keys
    tag: str
    resuming: tuple[str, str]
    trained: str
    averaging: str


PROGRAMS = (
    Program(
        "Lightning",
        "pytorch-lightning_version",
        Keys(("state_dict",), ("optimizer_states", 0), "last.ckpt"),
        Keys(("state_dict",), ("optimizer_0",), META),
        "checkpoint",
        ("trainer.fit(module, ckpt_path=", ")"),
        "current_model_state",  # by the callback WeightAveraging, as averaging_state
        "averaging_state",
    ),
)


def program_of(state: Collection[Any]) -> Program | None:
    """The program that saves such keys, if it is one of these."""
    return next((program for program in PROGRAMS if program.mark in state), None)


def place_of(state: Collection[Any], model: tuple[Any, ...]) -> tuple[Any, ...]:
    """Where a target has a model: the weights that a program trains take the averages' place."""
    program = program_of(state)
    return program.whole.model if program and model == (program.trained,) else model


def program_in(source: Manifest) -> Program | None:
    """The program whose state is beside the state dicts."""
    return program_of(source.state.get("client_state") or {})


def resuming(
    source: Manifest, otherwise: Callable[[str], str], file: str = ""
) -> Callable[[str], str]:
    """Gives the line with which the program of a checkpoint resumes from a directory.

    `file` is what it is given there. `otherwise` is for no program, and for the state of an
    optimizer that is not the program's first.
    """
    program = program_in(source)
    if program is None:
        return trainers.resuming(source.siblings, otherwise)
    engine = source.engine if isinstance(source.engine, StateDictEngine) else None
    if engine and program.whole.numbered_as(engine.optimizer) != program.whole:
        return otherwise
    before, after = program.resuming
    return lambda path: f"{before}{literal(os.path.join(path, file) if file else path)}{after}"


def refuse_averages(source: Manifest) -> None:
    """Raises AmbiguousCheckpoint if averages of the weights would be trained on.

    A target with everything in one file keeps both the averages and the weights that are trained.
    """
    program = program_in(source)
    is_chosen = "root" in source.source or not isinstance(source.engine, StateDictEngine)
    if program is None or is_chosen or program.trained not in source.state["client_state"]:
        return
    model = program.whole.model[0]
    raise AmbiguousCheckpoint(
        f"{source.root} has averages of the weights in {model}, and the weights that the "
        f"optimizer updates in {program.trained}: {program.name} loads both from one file only",
        hint=f"convert the file that {program.name} saved, with --root {program.trained}, or "
        f"with --root {model}",
    )
