"""Which parameters has each ep rank's optimizer without ZeRO (stage 0), whose state has no names?

    expp_rank_E_mp_rank_00_optim_states.pt     experts of ep rank E, and a copy of everything else

Names are those of rank 0, as in other stages: its experts are numbered from 0. They stand for the
experts of all ranks, so the optimizers of all ranks have the same names. They come from a file of
zckpt's (`param_shapes`), from the user (--param-names), or from what stage_0/naming.py compares.
The groups of experts have none but experts, and the other groups none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ....core.dtypes import FLOATS
from ....errors import InconsistentCheckpoint, MissingData
from ....files.torchfile import Tensor, TorchFile
from ...deepspeed_states.experts import ExpertLayers, expert_name
from ...deepspeed_states.states import FLAT_MASTERS, WHOLE_MASTERS, EngineStates, wrapper_of
from ...deepspeed_states.tensors import is_extra
from ...reading import USUAL, Reading
from ..stage_0 import naming
from ..stage_0.samples import TensorInFile
from ..stage_0.whole import Members, WholeOptimizer, named_optimizer, with_names
from .expert_files import LayerFiles, gate_of

SWAPPED = (
    "files of two ep ranks seem to be swapped, or one is of another save; copy all files again"
)


def weights_of(
    ranks: EngineStates,
    files: Sequence[LayerFiles],
    layers: ExpertLayers,
    of_layer: Mapping[str, int],
) -> dict[str, TensorInFile]:
    """The weights of one ep rank by their names on it, in the order of the module.

    `of_layer` is the ep rank in each layer. Second names of tied weights are left out.
    """
    buffers, shared = {*(ranks.model.get("buffer_names") or ())}, ranks.model["shared_params"]
    weights: dict[str, TensorInFile] = {}
    behind = {gate_of(layer): layer for layer in files}
    for name, file, tensor in _module(ranks, layers, behind, of_layer):
        if name not in buffers and name not in shared and tensor.dtype in FLOATS:
            weights[name] = TensorInFile(file, tensor)
    return weights


def _module(
    ranks: EngineStates,
    layers: ExpertLayers,
    behind: Mapping[str, LayerFiles],
    of_layer: Mapping[str, int],
) -> Iterator[tuple[str, TorchFile, Tensor]]:
    for name, tensor in ranks.model["module"].items():
        if not is_extra(name, tensor):
            yield name, ranks.models[0], tensor
        if name in behind:
            layer = layers.layers[behind[name].name]
            for local in range(layer.local):
                item = behind[name].files[of_layer[layer.name] * layer.local + local]
                for key, value in item.tensors.items():
                    if parts := expert_name(key):
                        yield parts.numbered(local), item.file, value


def second_names(ranks: EngineStates, files: Sequence[LayerFiles]) -> dict[str, str]:
    """Owners by second name of tied weights, on rank 0: the engine saves both, and states none.

    Both have the same bytes (DeepSpeed 0.19.8 saves copies), or the same memory in a file of
    zckpt's. Weights of one number, or of numbers that are all equal, may be equal by chance.
    """
    stated = bool(ranks.model.get("param_shapes"))
    buffers = {*(ranks.model.get("buffer_names") or ())}
    owners: dict[str, str] = {}
    modules = [(ranks.models[0], ranks.model["module"])]
    modules += [(layer.files[0].file, layer.files[0].tensors) for layer in files]
    for file, module in modules:
        seen: dict[object, str] = {}
        for name, tensor in module.items():
            if name in buffers or is_extra(name, tensor) or tensor.dtype not in FLOATS:
                continue
            keys: list[object] = [(tensor.place, tensor.shape, tensor.strides)]
            if not stated and (crc := file.crc(tensor)[1]) is not None and _varies(file, tensor):
                keys.append((crc, tensor.dtype, tensor.shape))
            owner = next((seen[key] for key in keys if key in seen), None)
            if owner is not None and tensor.numel:
                owners[name] = owner
            for key in keys:
                seen.setdefault(key, name)
    return owners


def _varies(file: TorchFile, tensor: Tensor) -> bool:
    """Whether a tensor of its own storage has numbers that differ."""
    if not tensor.contiguous or tensor.numel < 2 or tensor.offset:
        return False
    head = file.read(tensor.part(0, min(tensor.numel, 64)))
    size = len(head) // min(tensor.numel, 64)
    return head != head[:size] * (len(head) // size)


# -- names


def is_of_experts(group: Mapping[str, Any]) -> bool:
    return group.get("moe") is True


def named_whole(
    ranks: EngineStates, weights: Mapping[str, TensorInFile], reading: Reading
) -> WholeOptimizer:
    """The optimizer of the first ep rank with names; raises MissingData as `named_optimizer`."""
    if ranks.model.get("param_shapes") or reading.param_names is not None:
        whole = named_optimizer(ranks, weights, reading)
        return with_members(ranks, whole.members, whole.inferred, weights)
    groups = ranks.bases[0]["param_groups"]
    members: list[Sequence[str | None]] = [()] * len(groups)
    inferred: list[str] = []
    for of_experts in (False, True):
        places = [n for n, group in enumerate(groups) if is_of_experts(group) == of_experts]
        own = {n: w for n, w in weights.items() if (expert_name(n) is not None) == of_experts}
        if not places:
            continue
        part = _some_groups(ranks, places)
        names: Members
        if FLAT_MASTERS in part.first:
            names = naming.by_order(part.optimizers[0], part.first[FLAT_MASTERS], own)
        else:
            whole = named_optimizer(part, own, USUAL)
            names, inferred = whole.members, [*inferred, *whole.inferred]
        for place, group in zip(places, names, strict=True):
            members[place] = group
    return with_members(ranks, members, inferred, weights)


def with_members(
    ranks: EngineStates,
    members: Members,
    inferred: Sequence[str],
    weights: Mapping[str, TensorInFile],
) -> WholeOptimizer:
    """An ep rank's optimizer, whose parameters have these names."""
    shapes = {name: weight.tensor.shape for name, weight in weights.items()}
    return with_names(ranks, members, inferred, shapes, [*weights])


def _some_groups(ranks: EngineStates, places: Sequence[int]) -> EngineStates:
    """An ep rank's optimizer with some of its groups alone."""
    optimizer, base = ranks.first, ranks.bases[0]
    base = {**base, "param_groups": [base["param_groups"][place] for place in places]}
    kept = {
        key: [optimizer[key][place] for place in places]
        for key in (FLAT_MASTERS, WHOLE_MASTERS)
        if key in optimizer
    }
    optimizer = {**optimizer, **kept, "optimizer_state_dict": base} if kept else base
    return replace(ranks, states=[optimizer], bases=[base])


def check_rounding(whole: WholeOptimizer, weights: Mapping[str, TensorInFile]) -> None:
    """Raises InconsistentCheckpoint unless the masters of experts round to their weights.

    In fp32 there are none, and nothing shows which rank an optimizer is of.
    """
    optimizer, file = whole.states.first, whole.file
    if wrapper_of(optimizer) is None:
        return
    for group, own in enumerate(whole.members):
        names = [name for name in own if name is not None]
        if not names or expert_name(names[0]) is None:
            continue
        if FLAT_MASTERS in optimizer:
            masters = naming.pieces(optimizer[FLAT_MASTERS][group], names, weights)
        else:
            masters = optimizer[WHOLE_MASTERS][group]
        for name, master in zip(names, masters, strict=True):
            if not naming.rounds(TensorInFile(file, master), weights[name]):
                raise InconsistentCheckpoint(
                    f"{file.path}: the master of {name} does not round to the weight in "
                    f"{weights[name].file.path}",
                    hint=SWAPPED,
                )


def refuse_swapped(
    ranks: EngineStates, others: Sequence[Mapping[str, TensorInFile]], error: MissingData
) -> None:
    """Raises InconsistentCheckpoint if the masters are those of another ep rank, else `error`."""
    for weights in others:
        try:
            named_whole(ranks, weights, USUAL)
        except MissingData:
            continue
        raise InconsistentCheckpoint(
            f"{ranks.optimizers[0].path} has the experts of another ep rank", hint=SWAPPED
        ) from error
    raise error
