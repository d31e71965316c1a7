"""A recording that a trainer's callback begins and ends.

The recording begins when training begins, and ends when training ends or fails. Before that, the
callback has no open file and no hook.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import nn

from .recorder import Recorder
from .recording import record


class Span:
    """A recording into `directory` that begins and ends with a training.

    `options` are those of `record`.

    Raises TypeError if `record` does not accept these options.
    """

    def __init__(self, directory: str | os.PathLike[str], options: Mapping[str, Any]) -> None:
        for name in ("step", "optimizer"):
            if name in options:
                raise TypeError(f"{name}= is not needed: the trainer counts its updates itself")
        inspect.signature(record).bind(None, directory, **options)
        self.directory = directory
        self.options = dict(options)
        self.recorder: Recorder | None = None
        """The active recorder, or None."""
        self._open: ExitStack | None = None

    def begin(self, model: nn.Module, step: Callable[[], int]) -> None:
        """Begins to record. If training begins twice, the records of the first part are dropped."""
        options = self.options
        if self._open is not None:  # transformers: `auto_find_batch_size` tries a smaller batch
            self.end()
            options = {**options, "overwrite": True}
        stack = ExitStack()
        self.recorder = stack.enter_context(record(model, self.directory, step=step, **options))
        self._open = stack

    def end(self, error: BaseException | None = None) -> None:
        """Ends the recording; does nothing if none has begun.

        `error` is the exception that ended training, or None.
        """
        stack, self._open, self.recorder = self._open, None, None
        if stack is not None:
            stack.__exit__(type(error) if error else None, error, None)
