"""The manifest of a DeepSpeed checkpoint."""

from __future__ import annotations

from ...core.manifest import Manifest
from ...errors import not_understood
from ..deepspeed_states.manifest import manifest
from ..deepspeed_states.states import Ranks
from .files import locate, rank_files
from .flats import flats


def read(path: str, tag: str | None = None, step_policy: str | None = None) -> Manifest:
    """The manifest of a run directory, a tag directory, or a trainer's directory around one.

    Raises NotACheckpoint, IncompleteCheckpoint (a rank is missing), InconsistentCheckpoint (ranks
    contradict each other), CorruptCheckpoint, UnsupportedCheckpoint (stage 0, TP, PP, MoE, NVMe
    offload, before 0.5.10).
    """
    place = locate(path, tag)
    try:
        ranks = Ranks(place, rank_files(place))
        return manifest(ranks, list(flats(ranks, step_policy)), "deepspeed")
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise not_understood(place.directory, error) from error
