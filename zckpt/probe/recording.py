"""Records a run: statistics of activations, gradients and parameters, one line per tensor.

    run_a/rank_00000/records.jsonl    a header, then a line for each tensor, in the order of events

A record's identity is its step (completed updates before it, as the checkpoint counts), its batch
(forwards of the root within the step) and its key: path of the module, number of its call, path of
the tensor in the output: `encoder.2.attn#0/out[0]`.

Gradients come from hooks of tensors. ONNX Runtime uses an identity autograd function: its output is
a view that must not be changed in place, so `relu_(linear(x))` would fail or train on other values.
A tensor's hook gets the gradient of the value before later changes in place, adds no node to the
graph, and cannot change a value. (If an output is a view and is changed in place later, torch
keeps no gradient, and there is no record of one.)
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import TargetExists, WrongOption
from ..version import __version__
from .runs import RECORDS, VERSION, rank_folder
from .statistics import Measurer, holds_bytes
from .subscribers import ROOT, Place, Subscriber, in_backward, modules, subscribe, used_by

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
    device: str = "cpu",
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
    modules' parameters are recorded once per step. `samples` elements of each tensor are kept. The
    CRC-32 is computed on the CPU: other tensors are copied there, `bucket` elements at a time, so
    a full GPU needs no further memory. `subscribers` run outside this recorder. Values and
    gradients do not change, bit for bit.

    Raises TargetExists if this rank has recorded into `directory` before, unless `overwrite`, and
    WrongOption if `device` is not the CPU.
    """
    if torch.device(device).type != "cpu":
        raise WrongOption(f"statistics are computed on the CPU, not on {device}")
    rank, world = _rank_and_world()
    if ranks is not None and rank not in ranks:
        yield Recorder(None, lambda: 0, (None, None), parameters=False, gradients=False)
        return
    with ExitStack() as stack:
        clock = _Clock(_steps_of(model, step))
        if optimizer is not None and not callable(clock.source):
            stack.enter_context(_counted(optimizer, clock))
        measurer = Measurer(bucket, samples, torch.get_num_threads())
        stack.callback(measurer.close)
        file = stack.enter_context(_opened(os.fspath(directory), rank, overwrite))
        header = {
            "zckpt_probe": VERSION,
            "versions": {
                "zckpt": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "world": world,
            "rank": rank,
            "step": clock(),
            "model": type(model).__name__,
            "parameters": parameters,
            "gradients": gradients,
        }
        print(json.dumps(header), file=file)
        bounds = (start_step, end_step)
        recorder = Recorder(
            _Output(file, measurer), clock, bounds, parameters=parameters, gradients=gradients
        )
        stack.callback(recorder.close)
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


class _Clock:
    """Completed updates: from a function, or a number that increases."""

    def __init__(self, source: int | Callable[[], int]) -> None:
        self.source = source

    def __call__(self) -> int:
        return int(self.source()) if callable(self.source) else self.source

    def advance(self) -> None:
        if callable(self.source):
            raise WrongOption(
                "step= is a function that counts updates itself: do not call next_step()"
            )
        self.source += 1


def _steps_of(model: nn.Module, step: int | Callable[[], int] | None) -> int | Callable[[], int]:
    if step is not None:
        return step
    if isinstance(getattr(model, "global_steps", None), int):  # a DeepSpeed engine
        engine: Any = model
        return lambda: engine.global_steps - getattr(engine, "skipped_steps", 0)
    raise WrongOption(
        "the step at which the recording begins is not known",
        hint="give step=, the number of completed updates: the checkpoint's step, or 0",
    )


@contextmanager
def _counted(optimizer: Any, clock: _Clock) -> Iterator[None]:
    """Counts the optimizer's steps; those of Accelerate's wrapper are its inner optimizer's.

    DeepSpeed's optimizers wrap one too, but step it once for each group.
    """
    wrapped = type(optimizer).__module__.startswith("accelerate.")
    inner = optimizer.optimizer if wrapped else optimizer
    if not isinstance(inner, torch.optim.Optimizer):
        raise WrongOption(
            f"{type(optimizer).__name__} is not a torch.optim.Optimizer, so its steps cannot be "
            "counted",
            hint="give step=lambda: ..., which returns the number of completed updates",
        )
    handle = inner.register_step_post_hook(lambda *about: clock.advance())
    try:
        yield
    finally:
        handle.remove()


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

    def write(self, about: dict[str, Any], tensor: Tensor) -> None:
        print(json.dumps(about | self.measurer.describe(tensor)), file=self.file)


class Recorder(Subscriber):
    """The recorder of a block of `record`."""

    def __init__(
        self,
        output: _Output | None,
        clock: Callable[[], int],
        bounds: tuple[int | None, int | None],
        *,
        parameters: bool,
        gradients: bool,
    ) -> None:
        self.written = 0
        self.called = False
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
        self._of_leaves: list[Any] = []
        self._recording = False

    def next_step(self) -> None:
        """Call after an update: later records belong to the next step."""
        if isinstance(self._clock, _Clock):
            self._clock.advance()

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
        start, end = self._bounds
        self._recording = (start is None or start <= step) and (end is None or step < end)

    def pre_forward_module(
        self, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if place.is_root and not place.call and not place.recomputed:
            self._begin()
        self._take_parameters(place, released=False)
        return args, kwargs

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
            if ((is_local and parameter.numel()) or released) and not self._seen[
                self._step, "parameter", whole
            ]:
                self._write("parameter", whole, parameter)

    def post_forward_tensor(self, place: Place, path: str, tensor: Tensor) -> Tensor:
        self._take(f"{place.key}/{path}", tensor, place.recomputed)
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

    def _take(self, key: str, tensor: Tensor, recomputed: bool) -> None:
        if not self._recording:
            return
        if not recomputed:
            self._write("forward", key, tensor)
        if self._gradients and tensor.requires_grad and torch.is_grad_enabled():
            self._take_gradient(key, tensor)

    def _take_gradient(self, key: str, tensor: Tensor) -> None:
        """Also for a recomputed tensor. If the first forward ran without gradients (reentrant
        checkpointing), only the recomputed one gets a gradient; otherwise it never gets one."""
        step, batch = self._step, self._batch

        def hook(gradient: Tensor) -> None:
            self._write("backward", key, gradient, step, batch)

        handle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        if tensor.is_leaf:  # hooks of other tensors are freed with the graph
            self._of_leaves.append(handle)

    def _write(
        self,
        kind: str,
        key: str,
        tensor: Tensor,
        step: int | None = None,
        batch: str | None = None,
    ) -> None:
        if self._output is None or torch._C._get_tracing_state():  # TorchScript: sizes are tensors
            return
        step, batch = self._step if step is None else step, self._batch if batch is None else batch
        place = (step, kind, key) if kind == "parameter" else (step, batch, kind, key)
        self._seen[place] += 1
        if self._seen[place] > 1:  # a second backward through the same graph
            key += f"~{self._seen[place] - 1}"
        about = {"step": step, "batch": batch, "order": self.written, "kind": kind, "key": key}
        self._output.write(about, tensor)
        self.written += 1
