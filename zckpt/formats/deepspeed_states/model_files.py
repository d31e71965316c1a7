"""Writes the model files of a target: weights, buffers, frozen weights, the engine's counters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from ...core.checkpoint.dtypes import FLOATS
from ...core.checkpoint.facts import ExpertLayer
from ...core.checkpoint.grid import Grid, GridPlace
from ...core.checkpoint.inert import Size
from ...core.passes.layout import Shell
from ...core.storage.fragments import row_major
from ...files.torchfile import Tensor
from ...files.torchshell import Contents, Storages
from ...naming import peft
from ...naming.patterns import INFO
from .experts import ExpertLayers, expert_name, stacked
from .of_files import RANK_KEYS
from .target import DeepSpeedTarget

Optimizer = Callable[[DeepSpeedTarget, Storages], dict[str, Any]]


def model_files(
    target: DeepSpeedTarget, derives: bool, optimizer: Optimizer | None = None
) -> Iterator[Shell]:
    """Yields the shells of the model files: one in stages 0, 1 and 2, one per rank in stage 3.

    A shell is a file without its tensors' bytes. With `derives`, weights that the source lacks are
    cast from masters; otherwise they are left out. In stage 0, `optimizer` makes the optimizer's
    state.
    """
    for rank in range(target.dp if target.engine.partitioned else 1):
        first = 1 if rank and target.aliases else 0  # only rank 0's file has second names
        if first not in target.model_contents:
            target.model_contents[first] = _contents(target, derives, rank, optimizer)
        name = f"{target.mp_rank_of(rank)}_model_states.pt"
        if target.engine.partitioned:
            name = f"zero_pp_rank_{rank}_{name}"
        yield target.model_contents[first].shell(f"{target.tag}/{name}")


def _contents(
    target: DeepSpeedTarget, derives: bool, rank: int, optimizer: Optimizer | None = None
) -> Contents:
    storages, state = Storages(), target.source.state
    place = target.source.place or GridPlace(0, Grid())
    pp, tp = place.grid.pp, place.grid.tp
    is_dense, is_on_first = target.experts.is_dense, target.experts.is_on_first
    buffers, staged = list(filter(is_on_first, target.source.buffers)), False
    if place.grid.staged:  # the weights are in files of layers
        buffers, staged = list(place.buffers), True
    dense_names = [*filter(is_dense, (*target.source.parameters, *target.source.buffers))]
    weights = {} if staged else module_weights(target, derives, storages, dense_names)
    module: OrderedDict[str, Any] = OrderedDict()
    extra = state.get("module_extra") or {}
    for key in filter(is_dense, target.module_names):
        if key in extra:
            module[key] = target.thawed(extra[key], storages)
        elif (weight := weights.get(target.aliases.get(key, key))) is not None:
            module[key] = weight
    metadata = state.get("module_metadata")
    if metadata is not None:
        module._metadata = metadata  # type: ignore[attr-defined]
    frozen_shapes, frozen_fragments = _frozen(target, weights, storages)
    state = {**state, "lr_scheduler": target.scheduler.state}
    value = {
        "module": None if staged else module,
        "buffer_names": buffers,
        "optimizer": None if optimizer is None else optimizer(target, storages),
        "param_shapes": [
            OrderedDict((name, Size(shape)) for name, shape in stacked(shapes).items())
            for names in _listed(target)
            for shapes in [{name: target.trainable[name].shape for name in names}]
        ],
        "frozen_param_shapes": frozen_shapes,
        "shared_params": _shared(target, rank),
        "frozen_param_fragments": frozen_fragments,
        **{key: target.thawed(state.get(key), storages) for key in RANK_KEYS},
        **target.counters,
        "dp_world_size": target.dp,
        "mp_world_size": pp * tp,
        # the mpu of sequence parallelism reports its ranks as tensor ranks
        "checkpoint_parallel_dimensions": {"pp_degree": pp, "tp_degree": tp * target.engine.sp},
        "ds_config": target.engine.config,
        "ds_version": target.version,
        **target.thawed(target.client_state, storages),
        **_of_experts(target),
    }
    return Contents(value, storages)


def _listed(target: DeepSpeedTarget) -> Sequence[Sequence[str]]:
    """The parameter names to write as `param_shapes`: per flat buffer, or per group in stage 0.

    In stage 0 the engine neither writes nor reads such a list. zckpt writes it, because the
    optimizer's state has only numbers for parameters.
    """
    if target.engine.whole:
        return target.trained_names
    return [buffer.names for buffer in target.buffers]


def _shared(target: DeepSpeedTarget, rank: int) -> dict[str, str] | None:
    """The value of `shared_params`: second names of tied weights, mapped to the first names.

    Only rank 0's file has these names; the dictionary is empty in other files. None in stage 0,
    where the engine writes no such value.
    """
    if target.engine.whole:
        return None
    names = target.aliases.items() if rank == 0 else ()
    return {alias: name for alias, name in names if target.experts.is_on_first(name)}


def _of_experts(target: DeepSpeedTarget) -> dict[str, Any]:
    if not target.experts:
        return {}
    counts = [layer.experts for layer in target.experts.listed]
    shapes = {name: own.shape for name, own in target.source.parameters.items()}
    layers = _auto_ep_layers(target.experts, shapes, target.dp)
    info = target.client_state.get(INFO) or {}
    return {
        "num_experts": counts,
        "ds_autoep_layers": layers or None,
        **({INFO: {**info, **_auto_ep_info(layers)}} if layers else {}),
    }


def module_weights(
    target: DeepSpeedTarget, derives: bool, storages: Storages, names: Iterable[str]
) -> dict[str, Tensor]:
    """Makes tensors without values for the module's tensors with these `names`.

    In stage 3, parameters get empty placeholders. With `derives`, a weight that the source lacks is
    cast from its master; otherwise it is left out. `storages` collects the tensors' storages.
    """
    source, engine = target.source, target.engine
    weights: dict[str, Tensor] = {}
    for name in names:
        entry = source.entries.get((name, "param"))
        if name not in source.parameters:
            if entry is not None:  # a buffer, not a second name
                weights[name] = storages.tensor(entry.dtype, entry.shape)
            continue
        shape = (0,) if engine.partitioned else source.parameters[name].shape
        dtype = engine.dtype
        derived = engine.partitioned or (derives and name in target.trainable)
        if entry is None and (name in target.frozen or not derived):
            continue
        if entry is not None and name in target.frozen:
            dtype = _frozen_dtype(target, entry.dtype)
        weights[name] = storages.tensor(dtype, shape)
    return weights


def _frozen_dtype(target: DeepSpeedTarget, dtype: str) -> str:
    """The type of a frozen weight in the target; `dtype` is its type in the source.

    It changes to the target's weight type only if that differs from the type of the source's
    weights.
    """
    before = target.engine.before
    changes = target.engine.dtype != (dtype if before is None else before.dtype)
    return target.engine.dtype if changes and dtype in FLOATS else dtype


def _frozen(
    target: DeepSpeedTarget, weights: Mapping[str, Tensor], storages: Storages
) -> tuple[Any, Any]:
    """The values of `frozen_param_shapes` and `frozen_param_fragments` in a model file.

    Both are None in stages 0 and 1, and if frozen weights were left out of the save. If nothing
    shows whether some were left out, the shapes are empty and the fragments None.
    """
    # a base weight may have a tied weight's name, or count as a buffer if it is quantized
    known_names = {*target.source.parameters, *target.aliases, *target.source.buffers}
    if target.engine.stage < 2 or peft.is_adapter_alone(known_names):
        return None, None
    if any(not target.experts.is_dense(name) for name in target.frozen):
        return {}, None  # the engine would give rank 0's experts to all ranks (0.19.8)
    names = [name for name in target.frozen if name in weights]
    before = target.engine.before
    excludes = before.excludes_frozen if before is not None else None
    # with empty fragments, the engine would look for each frozen weight of its model in them, and
    # fail (0.19.8, engine.py `load_module_state_dict`)
    if not names and excludes is not False:
        return (None if excludes else {}), None
    shapes = OrderedDict((name, Size(target.frozen[name].shape)) for name in names)
    if not target.engine.partitioned:
        return shapes, OrderedDict((name, weights[name]) for name in names)
    widths = {name: -(-prod(target.frozen[name].shape) // target.dp) for name in names}
    fragments = OrderedDict(
        (name, storages.tensor(weights[name].dtype, (widths[name],))) for name in names
    )
    return shapes, fragments


# -- layers whose experts AutoEP spreads over ranks


def _auto_ep_layers(
    experts: ExpertLayers, shapes: Mapping[str, tuple[int, ...]], dp: int
) -> list[dict[str, Any]]:
    """AutoEP's layers, as rank 0's model file describes them; empty for other layers of experts.

    `shapes` has the shapes of all parameters, with a slice for each expert in place of a stacked
    parameter. DeepSpeed 0.19.8, engine.py `_save_moe_checkpoint`.
    """
    slices: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        part = expert_name(name)
        if part is not None and part.is_slice:
            slices.setdefault(part.layer, {})[part.parameter] = shape
    layers = []
    for number, layer in enumerate(experts.listed):
        if layer.name not in slices:
            continue
        maps = {name: _affine_map(layer, own) for name, own in slices[layer.name].items()}
        ranks = [
            {"rank": rank, "experts": [*range(rank * layer.local, (rank + 1) * layer.local)]}
            for rank in range(layer.ep)
        ]
        layers.append(
            {
                "moe_layer_id": number,
                "module_path": layer.name,
                "num_experts": layer.experts,
                "num_local_experts": layer.local,
                "ep_size": layer.ep,
                "expert_placement": {
                    "version": 1,
                    "num_experts": layer.experts,
                    "ep_size": layer.ep,
                    "ranks": ranks,
                },
                "affine_maps": {"version": 1, "params": maps},
                "expert_key_prefix": f"{layer.name}.experts",
                "checkpoint_format": "per_expert_files",
                "checkpoint_format_version": None,
                "ep_group_name": f"ep_size_{layer.ep}",
                "ep_rank": 0,
                "expert_data_parallel_rank": 0,
                "expert_data_parallel_world_size": dp // layer.ep,
                "global_expert_start": 0,
                "global_expert_end": layer.local,
            }
        )
    return layers


def _affine_map(layer: ExpertLayer, shape: tuple[int, ...]) -> dict[str, Any]:
    """The affine map of a stacked parameter of AutoEP: which elements each ep rank has.

    `shape` is the shape of one expert. Each ep rank has one block of the full parameter (0.19.8,
    checkpoint/autoep_affine.py and affine.py).
    """
    shard = (layer.local, *shape)
    steps, elements = [*row_major(shard)], prod(shard)
    return {
        "logical_shape": [layer.experts, *shape],
        "ranks": {
            rank: {
                "shard_shape": [*shard],
                "pieces": [
                    {
                        "shape": [*shard],
                        "source": [rank * elements, [*steps]],
                        "dest": [0, [*steps]],
                        "locations": [rank],
                    }
                ],
            }
            for rank in range(layer.ep)
        },
    }


def _auto_ep_info(layers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "universal_checkpoint_version": 0.4,
        "expert_parameter_patterns": [r".*\.experts\.w[123]$"],
        "ds_autoep_layers": list(layers),
    }
