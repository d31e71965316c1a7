"""The global batch size of a run, and how to keep it on another number of ranks."""

from __future__ import annotations

from typing import Any

from ..core.checkpoint.facts import FlatBufferEngine
from ..core.checkpoint.manifest import Manifest
from ..errors import Notice, warning
from .megatron_arguments import arguments
from .trainers import TRANSFORMERS, program_of

MOST_SAMPLES = 1 << 40  # in a batch
CHANGES = "batch-size-changes"


def global_batch(manifest: Manifest) -> int | None:
    """The number of samples per update; None if it is not stated.

    It is read from Megatron's saved arguments, or else from the engine's configuration.
    """
    engine, origin = manifest.run.engine, manifest.run.origin
    total: Any = arguments(manifest.state.get("client_state")).get("global_batch_size")
    if isinstance(engine, FlatBufferEngine):
        config = engine.config
        micro = config.get("train_micro_batch_size_per_gpu")
        accumulation = config.get("gradient_accumulation_steps", 1)
        total = total or config.get("train_batch_size")
        if not is_count(total) and is_count(micro) and is_count(accumulation) and origin.dp:
            total = micro * accumulation * (origin.dp // (origin.sp or 1))
    return total if is_count(total) else None


def changes(source: Manifest, ranks: int) -> list[Notice]:
    """A warning about the batch size per rank that keeps the global batch size, on `ranks` ranks.

    The target's files do not state a batch size, so the user must set it. The list is empty if the
    number of ranks stays the same, or if the source states no batch size.
    """
    total = global_batch(source)
    if total is None or ranks == source.dp:
        return []
    of_trainer = program_of(source.files.siblings) == TRANSFORMERS
    word = "per_device_train_batch_size" if of_trainer else "the batch size of each rank"
    product = f"{word} times {'gradient_accumulation_steps' if of_trainer else 'accumulated steps'}"
    batch, rest = divmod(total, ranks)
    message = (
        f"a global batch of {total} cannot be divided among {ranks} ranks: choose another {product}"
        if rest
        else f"set {product} to {batch} to keep a global batch of {total}"
    )
    return [warning(CHANGES, message, subject=word if of_trainer else None)]


def is_count(value: Any) -> bool:
    """Whether a value can be a number of samples: a positive integer."""
    return type(value) is int and 0 < value < MOST_SAMPLES
