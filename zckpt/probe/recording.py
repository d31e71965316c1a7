"""Records a run: statistics of activations, gradients and parameters, one line per tensor.

    run_a/rank_00000/records.jsonl    a header, then a line for each tensor, in the order of events

    kind         a tensor
    input        the inputs of the model
    forward      the outputs of every module
    backward     the gradients of these outputs
    parameter    with `parameters`: weights, once per step
    gradient     with `parameters` and `gradients`: the weights' gradients, of this rank's batch
    metric       no tensor: a number such as the loss

A record is identified by its step (completed updates before it, as in a checkpoint), its batch (the
number of the root module's forward pass within the step), its kind, and its key. The key has the
module's path, the number of its call, and the tensor's path in the output:
`encoder.2.attn#0/out[0]`. Records of outputs also have the CRC-32s of the module's inputs: if these
are equal in two runs and the output is not, the module itself differs.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import TargetExists, WrongOption
from . import metrics
from .clock import Clock, clock_of, is_engine, watched
from .environment import environment
from .recorder import Output, Recorder
from .runs import RECORDS, VERSION, rank_folder
from .statistics import Measurer
from .subscribers import Subscriber, subscribe

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
    """Records every forward and backward pass of `model` into `directory`, until the block ends.

        step            the number of completed updates when the block begins, or a function that
                        returns the current number
        optimizer       a torch optimizer: each of its steps counts as an update, unless `step` is a
                        function
        ranks           the ranks that record; None: all
        start_step, end_step    records only steps in [start_step, end_step)
        parameters      record parameters, once per step
        gradients       record gradients of outputs and, with `parameters`, of parameters
        samples         how many elements of each tensor are kept
        bucket          how many elements of a tensor on a GPU are measured at a time
        device          "cpu": copy tensors to the CPU and measure them there, with a CRC-32 that
                        tensors on a GPU do not get otherwise
        overwrite       replace what this rank has recorded in `directory` before
        subscribers     further `Subscriber` objects, called before the recorder when a module's
                        forward pass begins, and after the recorder when the pass ends

    A DeepSpeed engine counts its updates, and needs neither `step` nor `optimizer`. With an
    optimizer that is no `torch.optim.Optimizer`, call `recorder.next_step()` after each update. For
    trainers of Hugging Face and Lightning, use `TrainerCallback` and `LightningCallback`. Values
    and gradients of the run stay the same, bit for bit.

    Raises TargetExists if this rank has recorded into `directory` before, unless `overwrite`, and
    WrongOption if `device` is neither None nor "cpu", or if the step is not known.
    """
    if device is not None and torch.device(device).type != "cpu":
        raise WrongOption(
            "option-invalid",
            f"tensors are measured on their own device, or on the CPU, but not on {device}",
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
            Output(file, measurer), clock, bounds, parameters=parameters, gradients=gradients
        )
        stack.callback(recorder.close)
        is_watched = isinstance(optimizer, Optimizer) or not callable(clock.source)
        if optimizer is not None and is_watched:
            stack.enter_context(watched(optimizer, recorder.stepped))
        if is_engine(model) and hasattr(model, "backward"):
            stack.enter_context(
                metrics.of_engine(model, recorder.metric, lambda: recorder.has_loss)
            )
        _active.append(recorder)
        stack.callback(_active.remove, recorder)
        stack.enter_context(subscribe(model, *subscribers, recorder))
        yield recorder
        closed = {"closed": recorder.written, "only_outside": recorder.only_outside(header)}
        print(json.dumps(closed), file=file)
        if not recorder.called:
            warnings.warn(
                f"nothing was recorded in {directory}: the model itself was not called; record the "
                "module that your program calls",
                stacklevel=3,
            )


def inspect(name: str, tensor: Tensor) -> Tensor:
    """Records a tensor under `name` during a forward pass, and returns it unchanged.

    If the tensor gets a gradient, this is recorded too. Nothing is recorded without an active
    recorder, and in code that torch.compile compiles.
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
    """Opens this rank's file, flushed line by line: it stays readable if the run dies."""
    folder = os.path.join(directory, rank_folder(rank))
    if overwrite:
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, RECORDS))
    try:
        os.makedirs(folder, exist_ok=overwrite)
    except FileExistsError as error:
        raise TargetExists(
            "target-exists",
            f"{folder} exists already",
            hint="record into another directory, or overwrite=True",
            file=folder,
        ) from error
    with open(os.path.join(folder, RECORDS), "x", buffering=1, encoding="utf-8") as file:
        yield file
