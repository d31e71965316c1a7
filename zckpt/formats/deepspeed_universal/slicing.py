"""The keys beside a full tensor in its file, by which the engine cuts it for tensor parallelism.

    how it is cut                    keys (DeepSpeed 0.19.8, ds_to_universal.py `merge_tp_slices`)

    replicated                       none
    along axis 0 or 1                cat_dim
    each of 2 equal parts (0:2x)     cat_dim, param_n_sub_params
    parts of sizes (0:64,16,16)      sub_param_shape
    a vocabulary                     vocab_tensor too; the tensor lacks the padding rows

The loader of AutoTP's engines has its own map of the cuts, and ignores these keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import convert

from ...core.checkpoint.facts import UNCUT, TensorParallel, Vocabulary
from ...core.checkpoint.inert import Foreign
from ...core.checkpoint.manifest import Manifest
from ...core.checkpoint.placement import Boxes, Cut, Placement, Replicated
from ...errors import InconsistentCheckpoint, MissingData, UnsupportedCheckpoint
from ...naming.patterns import INFO, fields_of
from ..deepspeed_states.target import DeepSpeedTarget
from .files import VIEW, SliceInfo

VOCABULARY = "vocab_tensor"

Shape = tuple[int, ...]


def slice_info(target: DeepSpeedTarget, name: str) -> SliceInfo | None:
    """The keys to write beside a parameter's tensor, such as {"cat_dim": 0}.

    They tell the engine how to cut the full tensor for tensor parallelism. None if the file gets
    only the flat tensor (in stage 3). Raises InconsistentCheckpoint (`universal_checkpoint_info`
    does not fit), MissingData (no rule states the cut) and UnsupportedCheckpoint (no keys describe
    the cut).
    """
    kept = target.source.state.get("universal")
    if isinstance(kept, dict):  # the keys in a universal source's files
        alone = target.engine.partitioned and kept.get("model_parallel") == 1
        default = None if alone else {"cat_dim": 0}
        info: SliceInfo | None = (kept.get("files") or {}).get(name, default)
        return info
    info = info_of_patterns(stated_patterns(target.source), name, target.trainable[name].shape)
    if (facts := target.source.run.tensor_parallel) is not None:
        return _info_of_rule(target, facts, name, info)
    return None if target.engine.partitioned else info


def keeps_padding(target: DeepSpeedTarget, name: str, info: SliceInfo | None) -> bool:
    """Whether a vocabulary has more rows than `original_vocab_size`, so padding is written too."""
    rows = target.trainable[name].shape[:1]
    original_size = stated_patterns(target.source).get("original_vocab_size")
    vocabulary = (info or {}).get(VOCABULARY)
    return bool(vocabulary and rows and isinstance(original_size, int) and rows[0] > original_size)


def stated_patterns(source: Manifest) -> Mapping[str, Any]:
    """The `universal_checkpoint_info` in the client state; empty if there is none."""
    client_state = source.state.get("client_state") or {}
    info = client_state.get(INFO)
    return info if isinstance(info, dict) else {}


def used_rows(source: Manifest) -> dict[str, int]:
    """The number of used rows of each vocabulary with padding rows: {"embed.weight": 50257}."""
    facts = source.run.tensor_parallel or UNCUT
    return {
        name: about.used
        for name, about in facts.vocabularies.items()
        if name in source.parameters and about.used < source.parameters[name].shape[0]
    }


# -- by patterns


def info_of_patterns(patterns: Mapping[str, Any], name: str, shape: Shape) -> SliceInfo:
    """The keys for a parameter, such as {"cat_dim": 0}, from the `patterns` that match its name.

    `patterns` is `universal_checkpoint_info`. If no pattern matches, the parameter is cut by rows.
    Raises InconsistentCheckpoint if the patterns do not fit the parameter's shape or are malformed.
    """
    try:
        return _by_patterns(patterns, name, shape)
    except (ArithmeticError, AttributeError, LookupError, TypeError, re.error) as error:
        raise InconsistentCheckpoint(
            "tp-rule-wrong",
            f"universal_checkpoint_info in the client state does not fit {name}: {error!r}",
            hint="correct universal_checkpoint_info: its patterns state how tensor-parallel ranks "
            "cut the parameters",
            subject=name,
        ) from error


def _by_patterns(patterns: Mapping[str, Any], name: str, shape: Shape) -> SliceInfo:
    def matches(expressions: Any) -> bool:
        return any(re.match(expression, name) for expression in expressions or ())

    info: SliceInfo = {"cat_dim": 0}
    parted = [fields_of(stated) for stated in patterns.get("parameter_with_sub_params") or ()]
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
        info[VOCABULARY] = True
    return info


def _sub_param_shape(
    patterns: Mapping[str, Any], parts: Mapping[str, Any], shape: Shape
) -> Foreign:
    """DeepSpeed's `SubparamShape` of a fused tensor: one axis lists the sizes of sub-parameters.

    `parts` is the item of `patterns` that states them, `shape` the full shape.
    """
    sizes, axis = list(parts["shape"]), parts["partition_dim"]
    # before version 0.4, patterns state only the number of sub-parameters, which have equal sizes
    if isinstance(sizes[axis], int) and (patterns.get("universal_checkpoint_version") or 0.0) < 0.4:
        sizes[axis] = (shape[axis] // sizes[axis],) * sizes[axis]
    return _view(parts["patterns"], sizes, axis)


def _view(patterns: Iterable[str], sizes: Iterable[Any], axis: int) -> Foreign:
    return Foreign.instance(
        "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
        patterns=[*patterns],
        shape=tuple(sizes),
        partition_dim=axis,
    )


# -- by rules


def _info_of_rule(
    target: DeepSpeedTarget, facts: TensorParallel, name: str, stated_info: SliceInfo
) -> SliceInfo:
    """The keys that make DeepSpeed cut a parameter as the rule in `facts` says.

    They are `stated_info`, the source's own keys, if these describe the same cut. Raises
    MissingData (no rule) and UnsupportedCheckpoint (no keys describe the cut).
    """
    placement = facts.placements.get(name)
    shape = target.trainable[name].shape
    if placement is None:
        raise MissingData(
            "cuts-unknown",
            f"no rule says how {name} of {target.source.root} is cut over tensor ranks",
            hint="convert without --rename: the rules use the parameters' names in the run",
            file=target.source.root,
            subject=name,
        )
    patterns = stated_patterns(target.source)
    is_same = placement.plain == placement_of(stated_info, shape) or (
        isinstance(placement, Boxes) and _cuts_alike(patterns, name, stated_info)
    )
    info = stated_info if patterns and is_same else _info_by(placement, name, shape)
    if info is None:
        raise UnsupportedCheckpoint(
            "target-unsupported",
            f"{name} of {target.source.root} is cut in pieces (rule `{placement.text}`) "
            "that no file of a universal directory can describe",
            hint="give a rule for this parameter with --tp-rules FILE, or write --to universal",
            file=target.source.root,
            subject=name,
        )
    info = {key: value for key, value in info.items() if key != VOCABULARY}
    return {**info, VOCABULARY: True} if name in facts.vocabularies else info


def _info_by(placement: Placement, name: str, shape: Shape) -> SliceInfo | None:
    """The keys that make DeepSpeed cut a parameter as `placement` does; {} if it is not cut.

    None if no keys of DeepSpeed describe such a cut (parts of a sum, rectangular blocks).
    """
    cut = placement.plain
    if not isinstance(cut, Cut):
        return {} if cut.is_replicated else None
    if cut.parts:
        sizes: list[Any] = list(shape)
        sizes[cut.axis] = cut.parts
        return {VIEW: _view([f"{re.escape(name)}$"], sizes, cut.axis)}
    return {"cat_dim": cut.axis} | ({"param_n_sub_params": cut.equal} if cut.equal > 1 else {})


def placement_of(info: SliceInfo, shape: Shape) -> Placement:
    """How a parameter is cut over tensor ranks, as the keys beside its tensor (`info`) say."""
    view = info.get(VIEW)
    if view is not None:
        fields = fields_of(view)
        axis, sizes = fields["partition_dim"], fields["shape"]
        widths = sizes[axis] if isinstance(sizes[axis], (tuple, list)) else (sizes[axis],)
        before = [sum(size) if isinstance(size, (tuple, list)) else size for size in sizes[:axis]]
        is_axis = axis < len(shape) and shape[axis] == sum(widths)
        is_row = (
            is_axis
            and len(sizes) == len(shape)
            and all(size in (-1, own) for size, own in zip(before, shape, strict=False))
        )
        return Cut(axis, tuple(widths)) if is_row else Boxes("view")
    if "cat_dim" not in info:
        return Replicated()
    parts = info.get("param_n_sub_params", 1)
    return Cut(info["cat_dim"], equal=parts if parts > 1 else 0)


def _cuts_alike(patterns: Mapping[str, Any], name: str, info: SliceInfo) -> bool:
    """Whether `info` cuts a parameter along the axis of its shards in `patterns["affine_map"]`.

    Always True if `info` has a `sub_param_shape`. Otherwise, False if `affine_map` lacks the
    parameter.
    """
    maps = (patterns.get("affine_map") or {}).get("params") or {}
    mapped = next((maps[pattern] for pattern in maps if re.match(pattern, name)), None)
    if mapped is None or VIEW in info:
        return VIEW in info
    whole = mapped["logical_shape"]
    slices = [each["shard_shape"] for each in mapped["ranks"].values()]
    cut = {axis for own in slices for axis, size in enumerate(own) if size != whole[axis]}
    return cut == {info.get("cat_dim")}


# -- what a directory states


def cuts_of(
    rules: Any, patterns: Mapping[str, Any], shapes: Mapping[str, Shape]
) -> TensorParallel | None:
    """How the parameters of a directory are cut over tensor ranks; None if no file states it.

    `rules` are rules that zckpt wrote into the directory. Without them, the training program's
    `patterns` decide (`universal_checkpoint_info`).
    """
    if rules is not None:
        return TensorParallel.of_state(convert(rules, dict[str, Any]))
    # the tensors' own files are not enough: an AutoTP run's do not state the dimension of the cut
    if not any(key.endswith("_patterns") or key.startswith("parameter_") for key in patterns):
        return None
    infos = {name: info_of_patterns(patterns, name, shape) for name, shape in shapes.items()}
    padded = patterns.get("padded_vocab_size")
    used = {name: shapes[name][0] for name, info in infos.items() if info.get(VOCABULARY)}
    rows = padded if isinstance(padded, int) else 0
    return TensorParallel(
        {name: placement_of(info, shapes[name]) for name, info in infos.items()},
        {name: Vocabulary(max(rows, own), own) for name, own in used.items()},
    )
