"""Records the metrics of a run: loss, loss scale, gradient norm, learning rate.

loss          the scalar that the model returns, or with which `backward` of DeepSpeed is called
loss_scale, grad_norm, lr     of DeepSpeed's engine, after an update
lr            of the torch optimizer that `record` was given, after an update
trainer.NAME  a number that a trainer logs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

LOSSES = ("out", "out.loss", "out[0]")
"""The places of the loss in the output of a model, if the tensor there is 0-dimensional."""
OF_WHOLE = ("runtime", "per_second", "epoch", "flos", "num_input_tokens_seen", "train_loss")
"""Endings of names that trainers log and that are not metrics of a single step."""

Metric = Callable[[str, Any], None]


def is_loss(path: str, tensor: Tensor) -> bool:
    """Whether a tensor in the model's output is the loss, by its `path`, such as `out.loss`."""
    return path in LOSSES and not tensor.dim() and tensor.is_floating_point()


def is_number(value: Any) -> bool:
    """Whether a value can be a metric: a number, or a tensor of one element."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and value.device.type != "meta"
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@contextmanager
def of_engine(engine: Any, metric: Metric, has_loss: Callable[[], bool]) -> Iterator[None]:
    """Records the metrics of a DeepSpeed engine, such as the loss, until the `with` block ends.

    `metric` is called with each. The loss is the argument of `engine.backward`, unless the model
    itself has returned a loss (`has_loss()`).
    """
    backward, step = engine.backward, engine.step

    def watched_backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
        if is_number(loss) and not has_loss():
            metric("loss", loss)
        return backward(loss, *args, **kwargs)

    def watched_step(*args: Any, **kwargs: Any) -> Any:
        steps = engine.global_steps
        result = step(*args, **kwargs)
        if engine.global_steps != steps:  # not within gradient accumulation
            optimizer = engine.optimizer
            scale = getattr(optimizer, "loss_scale", None) or getattr(optimizer, "cur_scale", None)
            metrics_of_engine = {"loss_scale": scale, "grad_norm": engine.get_global_grad_norm()}
            for name, value in metrics_of_engine.items():
                if is_number(value):
                    metric(name, value)
            rates(engine.get_lr(), metric)
        return result

    engine.backward, engine.step = watched_backward, watched_step
    try:
        yield
    finally:
        del engine.backward, engine.step  # makes the methods of the class visible again


def rates(values: Any, metric: Metric) -> None:
    """Records learning rates: `lr` for one group, otherwise `lr.0`, `lr.1`, ... by group."""
    values = list(values or ())
    for number, value in enumerate(values):
        if is_number(value):
            metric("lr" if len(values) == 1 else f"lr.{number}", value)


def logged(logs: Mapping[str, Any], metric: Metric) -> None:
    """Records numbers that a trainer logs, by calling `metric`.

    Leaves out times, counters and means.
    """
    for name, value in logs.items():
        if is_number(value) and not name.endswith(OF_WHOLE):
            metric(f"trainer.{name}", value)
