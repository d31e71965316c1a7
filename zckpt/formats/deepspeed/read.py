"""The manifest of a DeepSpeed checkpoint."""

from __future__ import annotations

from dataclasses import replace

from ...core.manifest import Manifest
from ...errors import MALFORMED, not_understood
from ..deepspeed_states.manifest import manifest_of
from .files import locate, rank_files
from .flats import flat_buffers
from .ranks import open_ranks


def read(path: str, tag: str | None = None, step_policy: str | None = None) -> Manifest:
    """The manifest of a run directory, a tag directory, or a trainer's directory around one.

    Raises NotACheckpoint, IncompleteCheckpoint (a rank is missing), InconsistentCheckpoint (ranks
    contradict each other), CorruptCheckpoint, UnsupportedCheckpoint (stage 0, TP, PP, MoE, NVMe
    offload, before 0.5.10).
    """
    directory = locate(path, tag)
    try:
        ranks = open_ranks(directory, rank_files(directory))
        manifest = manifest_of(
            ranks,
            list(flat_buffers(ranks, step_policy)),
            "deepspeed",
            ranks.effective_config(ranks.round_robin),
            ranks.module_dtype,
        )
        # stages 1 and 2 fill up with zeros; stage 3 leaves what was in memory (0.19.8)
        return replace(manifest, zero_padding=not ranks.partitioned)
    except MALFORMED as error:
        raise not_understood(directory.path, error) from error
