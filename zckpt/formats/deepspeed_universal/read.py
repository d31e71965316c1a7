"""The manifest of one of DeepSpeed's own universal checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...core.manifest import Manifest
from ...core.staging import Layout
from ...errors import (
    not_understood,
)
from ...training.options import Options
from ..deepspeed_states.directories import (
    Place,
)
from ..deepspeed_states.manifest import manifest
from .files import detect, locate
from .folders import Folders
from .merged import Merged

__all__ = ["detect", "lay_out", "read", "seal"]


def read(path: str, tag: str | None = None, step_policy: str | None = None) -> Manifest:
    """The manifest of a universal directory, or of the run directory whose latest it is.

    Parameters whose steps differ keep them, unless `step_policy` makes one of them. Raises
    NotACheckpoint, IncompleteCheckpoint (no zero/, no fp32.pt of a parameter),
    InconsistentCheckpoint (shapes that differ), CorruptCheckpoint, UnsupportedCheckpoint (MoE).
    """
    place = locate(path, tag)
    try:
        return _manifest(place, step_policy)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise not_understood(place.directory, error) from error


def _manifest(place: Place, step_policy: str | None) -> Manifest:
    merged = Merged(place)
    folders = Folders(merged)
    found = manifest(merged, folders.flats(step_policy), "deepspeed-universal")
    state = found.state
    if folders.about or not merged.whole:
        cut = {"model_parallel": len(merged.tops), "files": folders.about}
        state = {**state, "universal": cut}
    files = [*merged.others, *folders.files]
    return replace(
        found,
        state=state,
        files=(*found.files, *(file.path for file in files)),
        records=(*found.records, *(held for file in files for held in file.records.values())),
        left_out=(*found.left_out, *merged.left_out, *folders.left_out),
        warnings=(*found.warnings, *merged.warnings(), *_lost_steps(found)),
    )


def _lost_steps(found: Manifest) -> list[str]:
    """Converters before 0.14.1 wrote the step only of optimizers that keep it in the group."""
    moved = {entry.parameter for entry in found.slots.get("exp_avg_sq", ())}
    if not any(not found.parameters[name].step for name in moved):
        return []
    return [
        "there are moments without a step: the converter did not write it (DeepSpeed before "
        "0.14.1); take it from the run's own directory"
    ]


def lay_out(source: Manifest, options: Options) -> Layout:
    """The files of a target; see write.py."""
    from . import write

    return write.lay_out(source, options)


def seal(root: str, manifest: Manifest, outcome: Any) -> None:
    """The records' checksums; see write.py."""
    from . import write

    write.seal(root, manifest, outcome)
