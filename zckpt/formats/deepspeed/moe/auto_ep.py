"""Splits AutoEP's stacked parameters, each of which has all experts of a rank, into experts.

    model["ds_autoep_layers"]       module_path, num_experts, ep_size, expert_placement
    model["param_shapes"]           mlp.experts.w1 of shape [2, 20, 16]: 2 experts of ep rank 0
    layer_0_expert_3_...            mlp.experts.w1.3 of shape [20, 16]

A flat buffer has a stacked parameter's experts one after another. So zckpt treats every expert's
slice as a parameter. DeepSpeed 0.19.8, module_inject/auto_ep_layer.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

from msgspec.structs import replace

from ....core.checkpoint.inert import nested
from ....errors import InconsistentCheckpoint
from ....files.torchfile import Tensor
from ...deepspeed_states.directories import refuse
from ...deepspeed_states.experts import AUTO_EP_READ, layers_in, refuse_folded
from ...deepspeed_states.states import EngineStates, ParameterShapes

ROUTER = ".router.gate.weight"
INFO = "universal_checkpoint_info"
OWN_INFO = {"universal_checkpoint_version", "expert_parameter_patterns", "ds_autoep_layers"}


def with_slices(ranks: EngineStates) -> EngineStates:
    """Splits AutoEP's stacked parameters into one parameter per expert.

    Without AutoEP, `ranks` are returned unchanged. Raises UnsupportedCheckpoint (stage 3, AutoTP,
    experts out of order, `round_robin_gradients` or `parameter_alignment`) and
    InconsistentCheckpoint (ranks cannot share the experts evenly).
    """
    model, directory = ranks.model, ranks.directory
    if not (layers := layers_in(model)):
        return ranks
    refuse_folded(directory, model)
    formats = {str(layer.get("checkpoint_format") or "per_expert_files") for layer in layers}
    if ranks.partitioned or formats != {"per_expert_files"}:
        refuse(directory, "AutoEP in ZeRO stage 3", AUTO_EP_READ)
    if ranks.round_robin or any(map(any, ranks.first.get("param_alignment_paddings") or ())):
        refuse(directory, "AutoEP with round_robin_gradients or parameter_alignment", AUTO_EP_READ)
    for layer in layers:
        _check_placement(ranks, layer)
    prefixes = {str(layer["expert_key_prefix"]) for layer in layers}
    shapes = [_sliced(names, prefixes) for names in ranks.param_shapes()]
    info = {k: v for k, v in (model.get(INFO) or {}).items() if k not in OWN_INFO}
    model = {k: v for k, v in model.items() if k != INFO} | ({INFO: info} if info else {})
    overrides = replace(
        ranks.overrides,
        shapes=shapes,
        second_names={**ranks.second_names, **_second_gates(ranks, layers)},
    )
    if frozen := ranks.frozen_shapes:
        sliced = _sliced({n: tuple(s) for n, s in frozen.items()}, prefixes)
        overrides = replace(overrides, frozen_shapes=sliced)
    paddings = {"param_alignment_paddings": [[0] * len(names) for names in shapes]}
    states = [{**state, **paddings} for state in ranks.states]
    return replace(ranks, model=model, states=states, overrides=overrides)


def _second_gates(ranks: EngineStates, layers: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Maps second names of routers' weights to the names that AutoEP lists as parameters.

    A router's weight has a second name if another module of the layer holds the weight too.
    """
    file = ranks.models[0]
    listed_names = {*chain.from_iterable(ranks.param_shapes())}
    listed_names |= {*ranks.buffer_names, *ranks.second_names}
    owners: dict[str, str] = {}
    for path in (layer["module_path"] for layer in layers):
        forms = {
            name: (tensor.dtype, tensor.shape, file.crc(tensor))
            for name, tensor in ranks.module.items()
            if name.startswith(f"{path}.") and isinstance(tensor, Tensor)
        }
        # the weight is saved under both names, with equal bytes
        form = forms.pop(owner := f"{path}{ROUTER}", None)
        if form is not None and form[2][1] is not None:  # saved with checksums
            owners |= {
                n: owner for n, own in forms.items() if own == form and n not in listed_names
            }
    return owners


def _sliced(shapes: ParameterShapes, prefixes: Collection[str]) -> ParameterShapes:
    """Replaces each stacked parameter by one slice per expert: `w1.0`, `w1.1` and so on for `w1`.

    `prefixes` are the names of the modules that have stacked parameters.
    """
    sliced: ParameterShapes = {}
    for name, shape in shapes.items():
        if name.rpartition(".")[0] in prefixes:
            sliced |= {f"{name}.{number}": shape[1:] for number in range(shape[0])}
        else:
            sliced[name] = shape
    return sliced


def _check_placement(ranks: EngineStates, layer: Mapping[str, Any]) -> None:
    """Raises unless ep ranks have a layer's experts in order, the first ones on rank 0."""
    count, ep, path = layer.get("num_experts"), layer.get("ep_size"), layer.get("module_path")
    if not (isinstance(count, int) and isinstance(ep, int) and ep > 0 and not count % ep):
        raise InconsistentCheckpoint(
            "world-size-disagrees",
            f"{ranks.models[0].path}: {ep} ranks cannot share the {count} experts of {path}",
            file=ranks.models[0].path,
        )
    local = count // ep
    placement = nested(layer, "expert_placement", "ranks")
    for entry in placement if isinstance(placement, list) else ():
        first = entry.get("rank") * local
        if entry.get("experts") != [*range(first, first + local)]:
            refuse(ranks.directory, f"AutoEP experts of {path} that are not assigned in order")
