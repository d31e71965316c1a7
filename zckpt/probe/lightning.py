"""Records runs of Lightning's Trainer, by a callback.

trainer = Trainer(..., callbacks=[zckpt.probe.LightningCallback("run_a")])
"""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from ..errors import WrongOption
from .metrics import logged
from .spans import Span

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError as error:
    try:
        from pytorch_lightning import Callback
    except ModuleNotFoundError:
        raise error from None


class LightningCallback(Callback):  # type: ignore[misc]
    """Records a run of Lightning's Trainer into `directory`, from the first update to the last one.

    module     name of the module that `training_step` calls: "network" for `self.network(batch)`.
               Default: the LightningModule if it has a `forward`, or else its only child with
               parameters
    options    those of `zckpt.probe.record`, except `step` and `optimizer`

    The step is the trainer's `global_step`, which counts the updates of every optimizer. Raises
    TypeError for an unknown option. When training begins, the errors of `record` are raised, and
    WrongOption if it is not clear which module is called.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, module: str | None = None, **options: Any
    ) -> None:
        self._span = Span(directory, options)
        self._module = module

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins to record."""
        model = called_module(pl_module, self._module)
        self._span.begin(model, lambda: trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *about: Any) -> None:
        """Records the numbers that the module logs; `loss` becomes `trainer.loss`, for example."""
        if self._span.recorder is not None:
            logged(trainer.callback_metrics, self._span.recorder.metric)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Ends the recording."""
        self._span.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Ends the recording of a training that failed."""
        self._span.end(exception)


def called_module(pl_module: nn.Module, name: str | None) -> nn.Module:
    """The module that a LightningModule's `training_step` calls; `name` is the user's choice."""
    if name is not None:
        try:
            return pl_module.get_submodule(name)
        except AttributeError:
            raise WrongOption(
                "option-names-nothing",
                f"{type(pl_module).__name__} has no module {name!r}",
                hint=_choice(pl_module),
            ) from None
    if _defines_forward(type(pl_module)):
        return pl_module
    children = [child for child in pl_module.children() if [*child.parameters()]]
    if len(children) == 1:
        return children[0]
    raise WrongOption(
        "option-needed",
        f"{type(pl_module).__name__} has no forward() and {len(children)} modules with parameters: "
        "it is not known which one training_step calls",
        hint=_choice(pl_module),
    )


def _defines_forward(kind: type) -> bool:
    """Whether the class defines `forward`, or inherits it from the user's own base class."""
    owner = next(each for each in kind.__mro__ if "forward" in vars(each))
    return owner.__module__.partition(".")[0] not in ("lightning", "pytorch_lightning", "torch")


def _choice(pl_module: nn.Module) -> str:
    names = ", ".join(repr(name) for name, _ in pl_module.named_children())
    return f"give module= of LightningCallback, one of: {names}"
