"""The manifest of a DeepSpeed checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...core.manifest import Manifest
from ...errors import MALFORMED, listed, not_understood
from ..deepspeed_states.directories import TagDirectory
from ..deepspeed_states.manifest import manifest_of
from . import whole_states
from .files import RankFiles, locate, rank_files
from .flats import flat_buffers
from .ranks import open_ranks
from .whole import open_whole


def read(
    path: str,
    tag: str | None = None,
    step_policy: str | None = None,
    param_names: Sequence[str] | None = None,
    weights_only: bool = False,
) -> Manifest:
    """The manifest of a run directory, a tag directory, or a trainer's directory around one.

    `param_names` name the optimizer's parameters where no file does: in stage 0.

    Raises NotACheckpoint, IncompleteCheckpoint (a rank is missing), InconsistentCheckpoint (ranks
    contradict each other), CorruptCheckpoint, UnsupportedCheckpoint (TP, PP, MoE, NVMe offload,
    before 0.5.10), MissingData (names of parameters that nothing shows).
    """
    directory = locate(path, tag)
    try:
        files = rank_files(directory)
        if not files.optimizers:  # not the ds_config: bf16 before 0.17.6 has some in stage 0 too
            return _read_whole(directory, files, step_policy, param_names, weights_only)
        ranks = open_ranks(directory, files)
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


def _read_whole(
    directory: TagDirectory,
    files: RankFiles,
    step_policy: str | None,
    param_names: Sequence[str] | None,
    weights_only: bool,
) -> Manifest:
    """The manifest of stage 0: the model file has the optimizer too."""
    whole = open_whole(directory, files, param_names, weights_only)
    states, units = whole_states.with_states(whole)
    buffers = list(whole_states.buffers(states, units, step_policy))
    manifest = manifest_of(states, buffers, "deepspeed", states.config, states.module_dtype)
    warnings = list(manifest.warnings)
    if whole.inferred:
        warnings.append(
            "the optimizer knows its parameters by number: the names of "
            f"{listed(whole.inferred, 4)} are inferred from the order of the module"
        )
    return replace(
        manifest, inferred=tuple(whole.inferred), warnings=tuple(warnings), zero_padding=True
    )
