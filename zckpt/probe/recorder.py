"""Writes a record, one line, for each tensor of a running model.

Gradients are recorded by hooks on tensors. ONNX Runtime uses an identity autograd function instead.
The output of such a function is a view that must not be changed in place, so `relu_(linear(x))`
would fail or train on other values. A hook on a tensor gets the gradient of the value before later
changes in place, adds no node to the graph, and cannot change a value. (If an output is a view and
is changed in place later, torch keeps no gradient, so none is recorded.)
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from ..core.comparison.statistics import json_number
from . import metrics
from .clock import Clock
from .statistics import Measurer, holds_bytes
from .subscribers import (
    ROOT,
    Place,
    Subscriber,
    in_backward,
    is_below,
    modules,
    tensors_in,
    used_by,
)


class Output:
    """Measures tensors and writes their records (one line each) to a file."""

    def __init__(self, file: Any, measurer: Measurer) -> None:
        self.file, self.measurer = file, measurer

    def write(self, about: dict[str, Any]) -> None:
        print(json.dumps(about), file=self.file)


class Recorder(Subscriber):
    """Records the tensors of all forward and backward passes inside a `with record(...)` block."""

    def __init__(
        self,
        output: Output | None,
        clock: Clock,
        bounds: tuple[int | None, int | None],
        *,
        parameters: bool,
        gradients: bool,
    ) -> None:
        self.written = 0
        self.called = False
        self.has_loss = False
        """Whether the model has returned a loss in this batch."""
        self._output = output
        self._clock = clock
        self._bounds = bounds
        self._parameters = parameters
        self._gradients = gradients
        self._step: int | None = None
        self._batch = "0"
        self._batches = Counter[bool]()
        self._counts = Counter[tuple[Any, ...]]()
        self._inspected = Counter[str]()
        self._inspected_again = Counter[str]()
        self._paths: set[str] = set()  # of modules that were called
        self._inputs: dict[str, list[str | None]] = {}
        self._of_leaves: list[Any] = []
        self._recording = False

    def next_step(self) -> None:
        """Counts a completed update: later records belong to the next step."""
        self._clock.advance()

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after an optimizer's update: records the learning rates, and counts the step."""
        metrics.rates([group.get("lr") for group in optimizer.param_groups], self.metric)
        if not callable(self._clock.source):
            self._clock.advance()

    def metric(self, name: str, value: float | Tensor) -> None:
        """Records a number, such as a loss, under the step and batch of the last forward pass."""
        if self._recording and self._output is not None:
            number = json_number(float(value))
            self._output.write(self._about("metric", name) | {"value": number})

    def only_outside(self, header: dict[str, Any]) -> list[str]:
        """The paths of compiled modules in which nothing was recorded, although they were called.

        Their own inputs and outputs are recorded, but not those of modules inside them. `header` is
        the header of the recording.
        """
        return [
            path
            for path in header["compiled"]
            if path in self._paths and not any(is_below(each, path) for each in self._paths)
        ]

    def close(self) -> None:
        """Ends the recording; later gradients are not recorded."""
        self._release()
        self._output = None
        self._recording = False

    def _release(self) -> None:
        while self._of_leaves:
            self._of_leaves.pop().remove()

    def _begin(self) -> None:
        self._release()
        self.called = True
        step, evaluating = self._clock(), not torch.is_grad_enabled()
        if step != self._step:
            self._step = step
            self._batches.clear()
            self._counts.clear()
        number = self._batches[evaluating]
        self._batch = f"eval {number}" if evaluating else str(number)
        self._batches[evaluating] += 1
        self._inspected.clear()
        self._inspected_again.clear()
        self._inputs.clear()
        self.has_loss = False
        start, end = self._bounds
        self._recording = (start is None or start <= step) and (end is None or step < end)

    def pre_forward_module(
        self, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if place.is_root and not place.call and not place.recomputed:
            self._begin()
        self._paths.add(place.path)
        self._take_parameters(place, released=False)
        if self._recording and not place.recomputed:
            self._take_inputs(place, args, kwargs)
        return args, kwargs

    def _take_inputs(self, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Records the inputs of the root module, and keeps a CRC-32 of every module's inputs."""
        inputs = self._inputs[place.key] = []
        for path, tensor in (*tensors_in(args, "in"), *tensors_in(kwargs, "in")):
            if place.is_root:
                self._write("input", f"{place.key}/{path}", tensor)
            if self._output is not None and not _is_traced():
                inputs.append(self._output.measurer.fingerprint(tensor))

    def post_forward_module(self, place: Place, args: tuple[Any, ...], output: Any) -> Any:
        self._take_parameters(place, released=True)
        if place.is_root:  # parameters of modules that were not called
            for path, module in modules(place.module).items():
                self._take_own(place, "" if path == ROOT else path, module, released=False)
        return output

    def _take_parameters(self, place: Place, released: bool) -> None:
        """Records a module's parameters once per step, before its forward pass.

        If an engine wrapped the module after the recording began, the engine all-gathers the
        parameters only after zckpt's hook. Then they are recorded after the forward pass.
        """
        for below, module in used_by(place.module):
            path = ".".join(filter(None, ("" if place.is_root else place.path, below)))
            self._take_own(place, path, module, released and not below)

    def _take_own(self, place: Place, path: str, module: nn.Module, released: bool) -> None:
        if not (self._parameters and self._recording) or place.recomputed:
            return
        for name, parameter in module.named_parameters(recurse=False):
            whole = f"{path}.{name}" if path else name
            is_local = not hasattr(parameter, "to_local") and holds_bytes(parameter)
            if (is_local and parameter.numel()) or released:
                if not self._counts[self._step, "parameter", whole]:
                    self._write("parameter", whole, parameter)
                if self._gradients and is_local and parameter.requires_grad and not released:
                    self._take_weight_gradient(whole, parameter)

    def _take_weight_gradient(self, name: str, parameter: Tensor) -> None:
        """Arranges that a weight's gradient is recorded, once per batch.

        It is the sum over all calls of the module in this batch.
        """
        hooked = (self._step, self._batch, "hook", name)
        if torch.is_grad_enabled() and not self._counts[hooked]:
            self._counts[hooked] += 1
            self._of_leaves.append(self._hook("gradient", name, parameter))

    def post_forward_tensor(self, place: Place, path: str, tensor: Tensor) -> Tensor:
        is_first = place.is_root and not place.recomputed and not self.has_loss
        if is_first and metrics.is_loss(path, tensor):
            self.metric("loss", tensor.detach())
            self.has_loss = True
        inputs = self._inputs.get(place.key)
        self._take(f"{place.key}/{path}", tensor, place.recomputed, inputs)
        return tensor

    def inspect(self, name: str, tensor: Tensor) -> None:
        """Records a tensor that the program hands over, under `name`."""
        recomputed = in_backward()
        if recomputed:
            self._inspected_again[name] += 1
            call = max(0, self._inspected[name] - self._inspected_again[name])
        else:
            call = self._inspected[name]
            self._inspected[name] += 1
        self._take(f"{name}#{call}", tensor, recomputed)

    def _take(
        self, key: str, tensor: Tensor, recomputed: bool, inputs: list[str | None] | None = None
    ) -> None:
        if not self._recording:
            return
        if not recomputed:
            self._write("forward", key, tensor, inputs=inputs)
        # activation checkpointing computes an output twice, and only one of both gets a gradient:
        # the recomputed one if the first ran without gradients (reentrant), otherwise the first
        if self._gradients and tensor.requires_grad and torch.is_grad_enabled():
            self._take_gradient(key, tensor)

    def _take_gradient(self, key: str, tensor: Tensor) -> None:
        """Registers a hook that records the gradient of an output."""
        handle = self._hook("backward", key, tensor)
        if tensor.is_leaf:  # hooks of other tensors are freed with the graph
            self._of_leaves.append(handle)

    def _hook(self, kind: str, key: str, tensor: Tensor) -> Any:
        """Records a tensor's gradient as soon as it is computed; returns the handle of the hook."""
        step, batch = self._step, self._batch

        def hook(gradient: Tensor) -> None:
            self._write(kind, key, gradient, (step, batch))

        return tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _write(
        self,
        kind: str,
        key: str,
        tensor: Tensor,
        at: tuple[int | None, str] | None = None,
        inputs: list[str | None] | None = None,
    ) -> None:
        if self._output is None or _is_traced():
            return
        about = self._about(kind, key, at) | self._output.measurer.describe(tensor)
        self._output.write(about | {"inputs": inputs} if inputs else about)

    def _about(
        self, kind: str, key: str, at: tuple[int | None, str] | None = None
    ) -> dict[str, Any]:
        step, batch = at or (self._step, self._batch)
        place = (step, kind, key) if kind == "parameter" else (step, batch, kind, key)
        self._counts[place] += 1
        if self._counts[place] > 1:  # a second backward through the same graph
            key += f"~{self._counts[place] - 1}"
        self.written += 1
        order = self.written - 1
        return {"step": step, "batch": batch, "order": order, "kind": kind, "key": key}


def _is_traced() -> bool:
    """Whether TorchScript traces the forward pass; tensor sizes are then tensors, not integers."""
    return torch._C._get_tracing_state() is not None
