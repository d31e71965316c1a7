"""Records the tensors of a running model, compares two runs, and streams weights from checkpoints.

    with probe.record(model, "run_a", step=7, optimizer=optimizer): train()
    with probe.stream(model, "checkpoint"): model(batch)
    Trainer(..., callbacks=[probe.TrainerCallback("run_a")])  # or LightningCallback

    subscribers.py  backward.py  compiled.py     hooks at every forward and backward of every module
    recording.py    recorder.py  clock.py        writes the records of a run, with their steps
    statistics.py   metrics.py   environment.py  measures tensors, a run, and the program
    spans.py        huggingface.py  lightning.py callbacks for trainers
    runs.py         merging.py                   reads recordings; merges the records of ranks
    comparing.py    distances.py                 finds where two runs differ, and how much
    explaining.py   summaries.py                 the likely cause; texts to compare line by line
    streaming.py    prefetch.py                  reads weights from files while the model runs

Recording and streaming need torch (`pip install torch safetensors`); reading and comparing runs do
not. No engine is imported: models of DeepSpeed and FSDP2 are ordinary modules with hooks.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import MissingExtra

if TYPE_CHECKING:
    from .comparing import compare as compare
    from .huggingface import TrainerCallback as TrainerCallback
    from .lightning import LightningCallback as LightningCallback
    from .recorder import Recorder as Recorder
    from .recording import inspect as inspect
    from .recording import record as record
    from .streaming import stream as stream
    from .subscribers import Place as Place
    from .subscribers import Subscriber as Subscriber
    from .subscribers import subscribe as subscribe

_PUBLIC = {
    "compare": "comparing",
    "LightningCallback": "lightning",
    "Recorder": "recorder",
    "inspect": "recording",
    "record": "recording",
    "stream": "streaming",
    "Place": "subscribers",
    "Subscriber": "subscribers",
    "subscribe": "subscribers",
    "TrainerCallback": "huggingface",
}
_PACKAGES = {  # the packages to install for modules that may be missing
    "torch": "torch safetensors",
    "transformers": "transformers",
    "lightning": "lightning",
}
__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    # imported on use, because only some of them need torch, or a trainer
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _PACKAGES:
            raise
        raise MissingExtra(
            "extra-missing",
            f"probe.{name} needs {package}, which is not installed",
            hint=f"pip install {_PACKAGES[package]}",
        ) from error
