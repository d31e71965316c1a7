"""Records runs of Hugging Face's Trainer and of TRL's trainers, by a callback.

trainer = Trainer(..., callbacks=[zckpt.probe.TrainerCallback("run_a")])
"""

from __future__ import annotations

import os
from typing import Any

import transformers

from .metrics import logged
from .spans import Span


class TrainerCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Records a Trainer's run into `directory`, from the first update to the last one.

    `options` are those of `zckpt.probe.record`, except `step` and `optimizer`: the step is the
    trainer's `global_step`, which continues after `resume_from_checkpoint`. Raises TypeError for an
    unknown option. The errors of `record` are raised when training begins.
    """

    def __init__(self, directory: str | os.PathLike[str], **options: Any) -> None:
        self._span = Span(directory, options)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **ignored: Any
    ) -> None:
        """Begins to record."""
        self._span.begin(model, lambda: state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **ignored: Any) -> None:
        """Records the numbers that the trainer logs; `loss` becomes `trainer.loss`, for example."""
        if self._span.recorder is not None:
            logged(logs or {}, self._span.recorder.metric)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Ends the recording."""
        self._span.end()
