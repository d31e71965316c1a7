"""The manifest of one of DeepSpeed's own universal checkpoints."""

from __future__ import annotations

from msgspec.structs import replace

from ...core.manifest import Manifest
from ...errors import MALFORMED, not_understood
from ..deepspeed_states.directories import TagDirectory
from ..deepspeed_states.manifest import manifest_of, with_files
from ..reading import USUAL, Reading
from .files import CUTS, locate
from .folders import ParameterFolders
from .merged import MergedStates
from .slicing import facts_of


def read(path: str, reading: Reading = USUAL) -> Manifest:
    """The manifest of a universal directory, or of the run directory whose latest it is.

    Parameters whose steps differ keep them, unless `reading.step_policy` makes one of them. Raises
    NotACheckpoint, IncompleteCheckpoint (no zero/, no fp32.pt of a parameter),
    InconsistentCheckpoint (shapes that differ), CorruptCheckpoint, UnsupportedCheckpoint (MoE).
    """
    directory = locate(path, reading.tag)
    try:
        return _manifest(directory, reading.step_policy)
    except MALFORMED as error:
        raise not_understood(directory.path, error) from error


def _manifest(directory: TagDirectory, step_policy: str | None) -> Manifest:
    merged = MergedStates(directory)
    folders = ParameterFolders(merged)
    manifest = manifest_of(
        merged.states,
        folders.buffers(step_policy),
        "deepspeed-universal",
        merged.states.effective_config(round_robin=False),
        merged.module_dtype,
    )
    state = manifest.state
    if folders.infos or not merged.is_whole:
        slicing = {"model_parallel": len(merged.tops), "files": folders.infos}
        state = {**state, "universal": slicing}
    shapes = {name: parameter.shape for name, parameter in manifest.parameters.items()}
    facts = facts_of(merged.states.first.get(CUTS), merged.patterns, shapes)
    if facts is not None:
        state = {**state, "tensor_parallel": facts}
    if not merged.is_whole:
        state = {**state, "module": []}  # names of a rank's shard
    return replace(
        with_files(manifest, [*merged.other_models, *folders.files]),
        state=state,
        layout={**manifest.layout, **folders.layout},
        left_out=(*manifest.left_out, *merged.left_out, *folders.left_out),
        warnings=(
            *manifest.warnings, *merged.warnings(), *merged.unclear, *_lost_steps(manifest)
        ),
        notes=tuple(merged.notes),
    )  # fmt: skip


def _lost_steps(manifest: Manifest) -> list[str]:
    """Converters before 0.14.1 wrote the step only of optimizers that keep it in the group."""
    names = {entry.parameter for entry in manifest.slots.get("exp_avg_sq", ())}
    if not any(not manifest.parameters[name].step for name in names):
        return []
    return [
        "there are moments without a step: the converter did not write it (DeepSpeed before "
        "0.14.1); take it from the run's own directory"
    ]
