"""Records a run: statistics of activations, gradients and parameters, one line per tensor.

    run_a/rank_00000/records.jsonl    a header, then a line for each tensor, in the order of events

    kind         a tensor
    input        the inputs of the model
    forward      the outputs of every module
    backward     the gradients of these outputs
    parameter    with `parameters`: weights, once per step
    gradient     with `parameters` and `gradients`: the weights' gradients, of this rank's batch
    metric       no tensor: a number such as the loss

A record's identity is its step (completed updates before it, as the checkpoint counts), its batch
(forwards of the root within the step) and its key: path of the module, number of its call, path of
the tensor in the output: `encoder.2.attn#0/out[0]`. The records of outputs have the CRC-32s of the
module's inputs: if these are equal in two runs and the output is not, the module differs.

Gradients come from hooks of tensors. ONNX Runtime uses an identity autograd function: its output is
a view that must not be changed in place, so `relu_(linear(x))` would fail or train on other values.
A tensor's hook gets the gradient of the value before later changes in place, adds no node to the
graph, and cannot change a value. (If an output is a view and is changed in place later, torch
keeps no gradient, and there is no record of one.)
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import TargetExists, WrongOption
from ..proof.stats import json_number
from . import metrics
from .clock import Clock, clock_of, is_engine, watched
from .environment import environment
from .runs import RECORDS, VERSION, rank_folder
from .statistics import Measurer, holds_bytes
from .subscribers import ROOT, Place, Subscriber, in_backward, mapped, modules, subscribe, used_by

_active: list[Recorder] = []


@contextmanager
def record(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    step: int | Callable[[], int] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    ranks: Collection[int] | None = None,
    start_step: int | None = None,
    end_step: int | None = None,
    parameters: bool = False,
    gradients: bool = True,
    samples: int = 32,
    bucket: int = 1 << 22,
    device: str | None = None,
    overwrite: bool = False,
    subscribers: Collection[Subscriber] = (),
) -> Iterator[Recorder]:
    """Records every forward and backward of `model` into `directory`, until the block ends.

    `step` is the number of completed updates when the block begins, or a function that returns the
    current number. If it is a number, `optimizer` (a torch optimizer that steps once per update)
    increases it. If your optimizer is not a `torch.optim.Optimizer`, call `recorder.next_step()`
    after each update. A DeepSpeed engine needs neither: it has the number itself. For the trainers
    of Hugging Face and Lightning there are callbacks: `TrainerCallback`, `LightningCallback`.

    Only `ranks` record (None: all), for steps in [start_step, end_step). With `parameters`, the
    modules' parameters are recorded once per step, and with `gradients` their gradients too.
    `samples` elements of each tensor are kept. A tensor on a GPU is measured there, `bucket`
    elements at a time, without a CRC-32. With `device="cpu"` it is copied to the CPU and measured
    there, with a CRC-32. `subscribers` run outside this recorder. Values and gradients do not
    change, bit for bit.

    Raises TargetExists if this rank has recorded into `directory` before, unless `overwrite`, and
    WrongOption if `device` is another one.
    """
    if device is not None and torch.device(device).type != "cpu":
        raise WrongOption(
            f"tensors are measured where they are, or on the CPU, but not on {device}",
            hint='leave device out, or give device="cpu"',
        )
    rank, world = _rank_and_world()
    if ranks is not None and rank not in ranks:
        yield Recorder(None, Clock(0), (None, None), parameters=False, gradients=False)
        return
    with ExitStack() as stack:
        clock = clock_of(model, step)
        measurer = Measurer(bucket, samples, torch.get_num_threads(), on_cpu=device is not None)
        stack.callback(measurer.close)
        file = stack.enter_context(_opened(os.fspath(directory), rank, overwrite))
        header = {
            "zckpt_probe": VERSION,
            "world": world,
            "rank": rank,
            "step": clock(),
            "model": type(model).__name__,
            "parameters": parameters,
            "gradients": gradients,
            "samples": samples,
            **environment(model),
        }
        print(json.dumps(header), file=file)
        bounds = (start_step, end_step)
        recorder = Recorder(
            _Output(file, measurer), clock, bounds, parameters=parameters, gradients=gradients
        )
        stack.callback(recorder.close)
        is_counted = callable(clock.source)
        if optimizer is not None and not (is_counted and not isinstance(optimizer, Optimizer)):
            stack.enter_context(watched(optimizer, recorder.stepped))
        if is_engine(model) and hasattr(model, "backward"):
            stack.enter_context(
                metrics.of_engine(model, recorder.metric, lambda: recorder.has_loss)
            )
        _active.append(recorder)
        stack.callback(_active.remove, recorder)
        stack.enter_context(subscribe(model, *subscribers, recorder))
        yield recorder
        print(json.dumps({"closed": recorder.written}), file=file)
        if not recorder.called:
            warnings.warn(
                f"nothing was recorded in {directory}: the model itself was not called; record the "
                "module that your program calls",
                stacklevel=3,
            )


def inspect(name: str, tensor: Tensor) -> Tensor:
    """Records a tensor inside a forward under `name`, and returns it unchanged.

    Records its gradient too, if it has one. Does nothing without an active recorder, and in code
    that torch.compile compiles.
    """
    if not torch.compiler.is_compiling():
        for recorder in _active:
            recorder.inspect(name, tensor)
    return tensor


def _rank_and_world() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


@contextmanager
def _opened(directory: str, rank: int, overwrite: bool) -> Iterator[Any]:
    """This rank's file, flushed line by line, so that the file of a run that dies is readable."""
    folder = os.path.join(directory, rank_folder(rank))
    if overwrite:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        os.makedirs(folder)
    except FileExistsError as error:
        raise TargetExists(
            f"{folder} exists already", hint="record into another directory, or overwrite=True"
        ) from error
    with open(os.path.join(folder, RECORDS), "x", buffering=1, encoding="utf-8") as file:
        yield file


class _Output:
    """Measures tensors and writes their records to a file."""

    def __init__(self, file: Any, measurer: Measurer) -> None:
        self.file, self.measurer = file, measurer

    def write(self, about: dict[str, Any]) -> None:
        print(json.dumps(about), file=self.file)


class Recorder(Subscriber):
    """The recorder of a block of `record`."""

    def __init__(
        self,
        output: _Output | None,
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
        self._seen = Counter[tuple[Any, ...]]()
        self._inspected = Counter[str]()
        self._inspected_again = Counter[str]()
        self._inputs: dict[str, list[str | None]] = {}
        self._of_leaves: list[Any] = []
        self._recording = False

    def next_step(self) -> None:
        """Call after an update: later records belong to the next step."""
        self._clock.advance()

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has made an update."""
        metrics.of_optimizer(optimizer, self.metric)
        if not callable(self._clock.source):
            self._clock.advance()

    def metric(self, name: str, value: float | Tensor) -> None:
        """Records a number of the step and batch of the last forward, such as a loss or a norm."""
        if self._recording and self._output is not None:
            number = json_number(float(value))
            self._output.write(self._about("metric", name) | {"value": number})

    def close(self) -> None:
        """Ends the recording; later gradients are not recorded."""
        self._release()
        self._output = None
        self._recording = False

    def _release(self) -> None:
        while self._of_leaves:
            self._of_leaves.pop().remove()

    def _begin(self) -> None:
        """Begins a forward of the root: a new batch, of this step or the next."""
        self._release()
        self.called = True
        step, evaluating = self._clock(), not torch.is_grad_enabled()
        if step != self._step:
            self._step = step
            self._batches.clear()
            self._seen.clear()
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
        self._take_parameters(place, released=False)
        if self._recording and not place.recomputed:
            self._take_inputs(place, args, kwargs)
        return args, kwargs

    def _take_inputs(self, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Records the inputs of the root, and keeps the CRC-32s of the inputs of every module."""
        inputs = self._inputs[place.key] = []

        def take(path: str, tensor: Tensor) -> Tensor:
            if place.is_root:
                self._write("input", f"{place.key}/{path}", tensor)
            if self._output is not None and not _is_traced():
                inputs.append(self._output.measurer.fingerprint(tensor))
            return tensor

        mapped(args, "in", take)
        mapped(kwargs, "in", take)

    def post_forward_module(self, place: Place, args: tuple[Any, ...], output: Any) -> Any:
        self._take_parameters(place, released=True)
        if place.is_root:
            self._take_others(place)
        return output

    def _take_parameters(self, place: Place, released: bool) -> None:
        """Records parameters once per step, before the forward. If an engine wrapped the module
        after the recording began, it all-gathers them later: they are recorded after the forward.
        """
        for below, module in used_by(place.module):
            path = ".".join(filter(None, ("" if place.is_root else place.path, below)))
            self._take_own(place, path, module, released and not below)

    def _take_others(self, root: Place) -> None:
        """Records, once per step, parameters of modules that were not called."""
        for path, module in modules(root.module).items():
            self._take_own(root, "" if path == ROOT else path, module, released=False)

    def _take_own(self, place: Place, path: str, module: nn.Module, released: bool) -> None:
        if not (self._parameters and self._recording) or place.recomputed:
            return
        for name, parameter in module.named_parameters(recurse=False):
            whole = f"{path}.{name}" if path else name
            is_local = not hasattr(parameter, "to_local") and holds_bytes(parameter)
            if (is_local and parameter.numel()) or released:
                if not self._seen[self._step, "parameter", whole]:
                    self._write("parameter", whole, parameter)
                if self._gradients and is_local and parameter.requires_grad and not released:
                    self._take_weight_gradient(whole, parameter)

    def _take_weight_gradient(self, name: str, parameter: Tensor) -> None:
        """Once per batch, however often the module is called: the engine adds up the calls."""
        hooked = (self._step, self._batch, "hook", name)
        if torch.is_grad_enabled() and not self._seen[hooked]:
            self._seen[hooked] += 1
            self._of_leaves.append(self._hook("gradient", name, parameter))

    def post_forward_tensor(self, place: Place, path: str, tensor: Tensor) -> Tensor:
        if place.is_root and not place.recomputed and metrics.is_loss(path, tensor):
            self.metric("loss", tensor.detach())
            self.has_loss = True
        inputs = self._inputs.get(place.key)
        self._take(f"{place.key}/{path}", tensor, place.recomputed, inputs)
        return tensor

    def inspect(self, name: str, tensor: Tensor) -> None:
        """Records a tensor under `name`."""
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
        if self._gradients and tensor.requires_grad and torch.is_grad_enabled():
            self._take_gradient(key, tensor)

    def _take_gradient(self, key: str, tensor: Tensor) -> None:
        """Also for a recomputed tensor. If the first forward ran without gradients (reentrant
        checkpointing), only the recomputed one gets a gradient; otherwise it never gets one."""
        handle = self._hook("backward", key, tensor)
        if tensor.is_leaf:  # hooks of other tensors are freed with the graph
            self._of_leaves.append(handle)

    def _hook(self, kind: str, key: str, tensor: Tensor) -> Any:
        """Records the gradient of a tensor when it is computed; gives the handle of the hook."""
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
        described = self._output.measurer.describe(tensor)
        about = self._about(kind, key, at) | described
        self._output.write(about | {"inputs": inputs} if inputs else about)
        if kind in ("input", "forward"):
            self._output.measurer.remember(tensor, described)

    def _about(
        self, kind: str, key: str, at: tuple[int | None, str] | None = None
    ) -> dict[str, Any]:
        """The identity of the next record, at a step and batch."""
        step, batch = at or (self._step, self._batch)
        place = (step, kind, key) if kind == "parameter" else (step, batch, kind, key)
        self._seen[place] += 1
        if self._seen[place] > 1:  # a second backward through the same graph
            key += f"~{self._seen[place] - 1}"
        self.written += 1
        order = self.written - 1
        return {"step": step, "batch": batch, "order": order, "kind": kind, "key": key}


def _is_traced() -> bool:
    """Whether TorchScript traces the forward: sizes are then tensors."""
    return torch._C._get_tracing_state() is not None
