"""Which engines can load a checkpoint that zckpt makes in memory? Refuses all others beforehand."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

from ..errors import WrongOption, literal

TESTED = ("0.19.8",)
"""Versions of DeepSpeed for which tests show which files they load, and in which order."""
STATES = "_states.pt"
"""The endings of the names of all files that an engine's ranks load."""
PLAIN = re.compile(r"((bf16_)?zero_pp_rank_\d+_)?mp_rank_00_(model|optim)_states\.pt")
"""File names of an engine without pipeline, tensor and expert parallelism."""
UNSUPPORTED = "load-unsupported"
"""The code of the error for an engine or files that zckpt cannot load without a copy on disk."""


def refuse_version(source: str) -> None:
    """Raises WrongOption for a version of DeepSpeed that was not tested.

    `source` is the path of the checkpoint, for the error's hint.
    """
    import deepspeed

    version = deepspeed.__version__
    if version.partition("+")[0] not in TESTED:
        raise unsupported(source, f"DeepSpeed {version} was not tested: {', '.join(TESTED)} was")


def refuse_engine(engine: Any, source: str, load_optimizer_states: bool) -> None:
    """Raises WrongOption for an engine that cannot load files that zckpt makes in memory.

    These are engines with pipeline, tensor, sequence or expert parallelism, with the optimizer on
    NVMe, or with unusual loading options.
    """
    refuse_version(source)
    stage, zero = engine.zero_optimization_stage(), engine._config.zero_config
    reasons = {
        "it uses pipeline parallelism": hasattr(engine, "is_pipe_parallel"),
        "it uses tensor parallelism": engine.mp_world_size > 1,
        "it has MoE layers": engine.has_moe_layers,
        "it uses sequence parallelism": engine.sequence_parallel_size > 1,
        "it offloads the optimizer to NVMe": engine.zero_nvme_offload_optimizer(),
        "its ds_config asks for a universal checkpoint": engine.load_universal_checkpoint(),
        "its ds_config asks for elastic files": bool(stage) and engine.zero_elastic_checkpoint(),
        "its ds_config sets pipeline_loading_checkpoint": zero.pipeline_loading_checkpoint,
        "stage 3 loads no optimizer": stage == 3 and not load_optimizer_states,
    }
    for reason, applies in reasons.items():
        if applies:
            what = f"zckpt cannot load a checkpoint into this engine without a copy: {reason}"
            raise unsupported(source, what)


def unsupported(source: str, message: str) -> WrongOption:
    """Makes the error for an engine that cannot load files from memory; `message` says why.

    Its hint is to let `auto_resume` write a copy of the checkpoint at `source` first.
    """
    lines = (
        f"path = zckpt.auto_resume({literal(source)})",
        'engine.load_checkpoint(path.report["load_dir"], tag=path.tag)',
    )
    return WrongOption(UNSUPPORTED, message, hint=f"write a copy first: {'; '.join(lines)}")


def refuse_files(source: str, paths: Iterable[str]) -> None:
    """Raises WrongOption if files come from pipeline, expert or tensor parallelism.

    They are files of single layers, of experts, or of tensor-parallel ranks. An engine without
    model parallelism does not load them.
    """
    for name in map(os.path.basename, paths):
        if name.endswith(STATES) and not PLAIN.fullmatch(name):
            what = f"{source} was saved with tensor, pipeline or expert parallelism"
            raise unsupported(source, f"{what}: this engine does not load the file {name}")
