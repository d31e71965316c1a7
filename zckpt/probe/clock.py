"""Counts the completed updates of a running program.

The step of a record is the number of updates completed before it, as in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from msgspec import Struct
from torch import nn

from ..errors import WrongOption


class Clock(Struct, eq=False):
    """Counts completed updates, or calls a function of the user that returns their number.

    `source` is the current number, or this function.
    """

    source: int | Callable[[], int]

    def __call__(self) -> int:
        return int(self.source()) if callable(self.source) else self.source

    def advance(self) -> None:
        """Counts one more update. Raises WrongOption if the user's own function counts updates."""
        if callable(self.source):
            raise WrongOption(
                "options-conflict",
                "step= is a function that counts updates itself: do not call next_step()",
            )
        self.source += 1


def is_engine(model: nn.Module) -> bool:
    """Whether the module is DeepSpeed's engine, which counts its updates."""
    return isinstance(getattr(model, "global_steps", None), int)


def clock_of(model: nn.Module, step: int | Callable[[], int] | None) -> Clock:
    """Makes the counter of completed updates for `record(model, step=step)`.

    Raises WrongOption if neither the engine nor `step` tells the number of completed updates.
    """
    if step is not None:
        return Clock(step)
    if is_engine(model):
        engine: Any = model
        return Clock(lambda: engine.global_steps - getattr(engine, "skipped_steps", 0))
    raise WrongOption(
        "option-needed",
        "the step at which the recording begins is not known",
        hint="give step=, the number of completed updates: the checkpoint's step, or 0",
    )


@contextmanager
def watched(optimizer: Any, after_step: Callable[[Any], None]) -> Iterator[None]:
    """Calls `after_step(optimizer)` after each step of a torch optimizer, until the block ends.

    If the optimizer is in Accelerate's wrapper, the wrapped one is watched. Raises WrongOption for
    other optimizers, such as DeepSpeed's, which wrap a torch optimizer but step it once for each
    group.
    """
    wrapped = type(optimizer).__module__.startswith("accelerate.")
    inner = optimizer.optimizer if wrapped else optimizer
    if not isinstance(inner, torch.optim.Optimizer):
        raise WrongOption(
            "option-invalid",
            f"{type(optimizer).__name__} is not a torch.optim.Optimizer, so its steps cannot be "
            "counted",
            hint="give step=lambda: ..., which returns the number of completed updates",
        )
    handle = inner.register_step_post_hook(lambda stepped, *about: after_step(stepped))
    try:
        yield
    finally:
        handle.remove()
