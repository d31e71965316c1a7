"""How the engine cuts a whole tensor for tensor parallelism: what stands beside it in its file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...core.inert import Foreign, Global
from ...errors import InconsistentCheckpoint
from ..deepspeed_states.target import DeepSpeedTarget
from .files import VIEW, SliceInfo


def slice_info(target: DeepSpeedTarget, name: str) -> SliceInfo | None:
    """What a parameter's files say beside the tensor: what they said, or what DeepSpeed makes.

    DeepSpeed makes it from the `universal_checkpoint_info` in the client state. None for the flat
    tensor alone, as stage 3 has it if nothing is cut. Raises InconsistentCheckpoint.
    """
    kept = target.source.state.get("universal")
    if isinstance(kept, dict):
        alone = target.engine.partitioned and kept.get("model_parallel") == 1
        default = None if alone else {"cat_dim": 0}
        info: SliceInfo | None = (kept.get("files") or {}).get(name, default)
        return info
    if target.engine.partitioned:
        return None
    try:
        return _by_patterns(_patterns(target), name, target.trainable[name].shape)
    except (ArithmeticError, AttributeError, LookupError, TypeError, re.error) as error:
        raise InconsistentCheckpoint(
            f"universal_checkpoint_info in the client state does not fit {name}: {error!r}",
            hint="it says how parameters are cut for tensor parallelism; correct it",
        ) from error


def keeps_padding(target: DeepSpeedTarget, name: str, info: SliceInfo | None) -> bool:
    """Whether a vocabulary has more rows than `original_vocab_size`."""
    rows = target.trainable[name].shape[:1]
    stated = _patterns(target).get("original_vocab_size")
    vocabulary = (info or {}).get("vocab_tensor")
    return bool(vocabulary and rows and isinstance(stated, int) and rows[0] > stated)


def _patterns(target: DeepSpeedTarget) -> Mapping[str, Any]:
    """What the user's program says to DeepSpeed's converter."""
    client_state = target.source.state.get("client_state") or {}
    info = client_state.get("universal_checkpoint_info")
    return info if isinstance(info, dict) else {}


def _by_patterns(patterns: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> SliceInfo:
    """How a parameter is cut, by the patterns that its name matches."""

    def matches(expressions: Any) -> bool:
        return any(re.match(expression, name) for expression in expressions or ())

    info: SliceInfo = {"cat_dim": 0}
    parted = patterns.get("parameter_with_sub_params") or ()
    parts = next((parts for parts in parted if matches(parts["patterns"])), None)
    if matches(patterns.get("tp_replicated_parameter_patterns")) or matches(
        patterns.get("parameter_to_average_patterns")
    ):
        info = {}
    elif matches(patterns.get("parameter_with_2_sub_params_cat_dim_0")):
        info["param_n_sub_params"] = 2
    elif parts is not None:
        info = {VIEW: _sub_param_shape(patterns, parts, shape)}
    elif matches(patterns.get("parameter_with_row_parallelism_patterns")):
        info["cat_dim"] = 1
    if matches(patterns.get("vocabulary_parameter_patterns")):
        info["vocab_tensor"] = True
    return info


def _sub_param_shape(
    patterns: Mapping[str, Any], parts: Mapping[str, Any], shape: tuple[int, ...]
) -> Foreign:
    """A SubparamShape; before version 0.4 a plain number was how many equal parts there are."""
    sizes, axis = list(parts["shape"]), parts["partition_dim"]
    if isinstance(sizes[axis], int) and (patterns.get("universal_checkpoint_version") or 0.0) < 0.4:
        sizes[axis] = (shape[axis] // sizes[axis],) * sizes[axis]
    state = {"patterns": parts["patterns"], "shape": tuple(sizes), "partition_dim": axis}
    named = Global("deepspeed.checkpoint.universal_checkpoint.SubparamShape")
    return Foreign(named, (), state, "new")
