"""Which program saved a directory, and what that program looks for when it resumes.

    transformers    trainer_state.json, scheduler.pt, rng_state*.pth: its Trainer, and TRL's
    accelerate      random_states_R.pkl, scheduler.bin: Accelerator.save_state

They put these files beside an engine's own, as siblings, and wrap every engine in the same way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from .inert import Scalar
from .manifest import Sibling

TRANSFORMERS, ACCELERATE = "transformers", "accelerate"
SCHEDULERS = ("scheduler.pt", "scheduler.bin")
MAX_JSON = 16 << 20  # bytes of a sibling that is read
_MARKS = (
    (TRANSFORMERS, re.compile(r"trainer_state\.json|training_args\.bin")),
    (ACCELERATE, re.compile(r"random_states_\d+\.pkl|scheduler\.bin|sampler\.bin")),
)


def program_of(siblings: Iterable[Sibling]) -> str | None:
    """The program that saved a checkpoint, by the files beside it."""
    names = [item.name for item in siblings]
    for program, mark in _MARKS:
        if any(map(mark.fullmatch, names)):
            return program
    return None


def json_of(siblings: Iterable[Sibling], name: str) -> dict[str, Any] | None:
    """A JSON object among the siblings; None where there is none that can be read."""
    item = next((each for each in siblings if each.name == name and each.size <= MAX_JSON), None)
    if item is None:
        return None
    try:
        with open(item.path, encoding="utf-8") as file:
            made = json.load(file)
    except (OSError, ValueError, RecursionError):
        return None
    return made if isinstance(made, dict) else None


def fresh_scheduler(step: int, groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state of a torch LambdaLR after `step` updates, which is what transformers makes."""
    rates = [number(group.get("lr")) for group in groups]
    return {
        "base_lrs": [number(group.get("initial_lr", group.get("lr"))) for group in groups],
        "last_epoch": step,
        "_step_count": step + 1,
        "_get_lr_called_within_step": False,
        "_last_lr": rates,
        "lr_lambdas": [None] * len(groups),
    }


def number(value: Any) -> Any:
    """A 0-d tensor, as of a capturable optimizer's learning rate, by value."""
    return value.value if isinstance(value, Scalar) else value
