"""The manifest of one model rank in stage 0: the model file has the optimizer too."""

from __future__ import annotations

from msgspec.structs import replace

from ....core.manifest import Manifest
from ....errors import listed
from ...deepspeed_states.manifest import manifest_of
from . import whole_states
from .whole import WholeOptimizer


def manifest_of_whole(whole: WholeOptimizer, step_policy: str | None) -> Manifest:
    """The manifest; its warnings name the parameters whose names only an order shows."""
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
        manifest,
        state={**manifest.state, "module": list(whole.module)},
        inferred=tuple(whole.inferred),
        warnings=tuple(warnings),
        zero_padding=True,
    )
