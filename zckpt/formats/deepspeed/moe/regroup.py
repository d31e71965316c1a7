"""Adapts the optimizer's param groups of experts to another expert-parallel size.

At another expert-parallel size, each rank has other experts, so its param groups of experts have
other members, and another name (`ep_size_2`). DeepSpeed cuts a large group where one rank's
parameters in the group exceed a number of elements, so the cuts change too (0.19.8, moe/utils.py
`split_params_into_different_moe_groups_for_optimizer`). The experts themselves and all dense groups
stay unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import prod
from typing import Any

from msgspec.structs import replace

from ....core.checkpoint.facts import ExpertLayer, FlatBufferEngine, StateDictEngine
from ....core.checkpoint.manifest import Manifest
from ....core.grouping import by_key
from ....errors import (
    InconsistentCheckpoint,
    MissingData,
    Notice,
    WrongOption,
    counted,
    joined,
    listed,
    warning,
)
from ....training.options import DP, EP, Options
from ...deepspeed_states.experts import ExpertLayers, expert_name, parameter_of, size_in
from ...deepspeed_states.target import DeepSpeedTarget
from ...groups import regrouped

GROUP_SIZE = 178_956_971  # elements; the engine's default of `max_group_size`


def over_ranks(source: Manifest, options: Options) -> Manifest:
    """Changes the expert-parallel size to `--ep`, and rebuilds the param groups of experts for it.

    Without `--ep`, the groups stay as they are. Raises WrongOption (the size does not fit),
    MissingData (layers or groups are unknown) and InconsistentCheckpoint (experts are missing, or
    the order of parameters at the new size is unknown).
    """
    ep, layers = options[EP], ExpertLayers.of_manifest(source)
    if unplaced := [n for n in source.parameters if expert_name(n) and layers.is_dense(n)]:
        source = with_named_layers(source, unplaced)
        layers = ExpertLayers.of_manifest(source)
    if not layers:
        if ep not in (None, 1):
            raise WrongOption(
                "option-not-applicable",
                f"--ep {ep}, but {source.root} has no experts",
                hint="leave it out",
            )
        return source
    _check_sizes(layers, ep, options[DP], source.dp)
    if source.groups is None:
        raise MissingData(
            "groups-missing",
            f"{source.root} holds no parameter groups, but DeepSpeed needs groups of experts",
            hint="give the DeepSpeed run, or a universal checkpoint with the optimizer's state",
            file=source.root,
        )
    if ep is None or layers.sizes == [ep]:
        return source
    return _regrouped(source, layers, ep)


def _check_sizes(layers: ExpertLayers, ep: int | None, given: int | None, before: int) -> None:
    """Raises WrongOption unless the target's ranks can share the experts evenly.

    The number of ranks is `given` (the user's --dp); without --dp it is `before` (the source's).
    """
    dp, sizes = given or before, listed(layers.sizes)
    if ep is not None and len(layers.sizes) > 1:
        raise WrongOption(
            "sizes-do-not-fit",
            f"--ep {ep}, but layers of experts have the expert-parallel sizes {sizes}",
            hint="leave it out: every layer keeps its own size",
        )
    for layer in layers.layers.values():
        size = ep or layer.ep
        if layer.experts % size or dp % size:
            fitting = [n for n in range(1, dp + 1) if not (layer.experts % n or dp % n)]
            other = "choose another size" if given else "give --dp N, or choose another size"
            raise WrongOption(
                "sizes-do-not-fit",
                f"{counted(dp, 'rank')} cannot share the {layer.experts} experts of {layer.name} "
                f"by an expert-parallel size of {size}",
                hint=f"{other}: --ep {' or '.join(map(str, fitting))}",
            )


def check_target(target: DeepSpeedTarget) -> None:
    """Raises WrongOption if the target's stage or settings do not support its experts."""
    if not target.experts:
        return
    engine, sizes = target.engine, target.experts.sizes
    is_auto = any(parameter_of(name) != name for name in target.trainable)
    auto = "AutoEP's experts in ZeRO stage 0, nor with round_robin_gradients or parameter_alignment"
    is_other = is_auto and (engine.whole or engine.round_robin or engine.aligned)
    is_3, is_grid = engine.stage == 3, engine.whole and target.source.place is not None
    for is_meant, what, hint in (
        (is_3, "layers of experts in ZeRO stage 3", "choose --stage 0, --stage 1 or --stage 2"),
        (is_other, auto, "choose --stage 1 or --stage 2, without these settings in the ds_config"),
        (is_grid, "experts in ZeRO stage 0 on several model ranks", "choose --stage 1"),
    ):
        if is_meant:
            raise WrongOption("target-unsupported", f"zckpt does not write {what}", hint=hint)
    if engine.whole and any(sizes[-1] % size for size in sizes):
        raise WrongOption(
            "sizes-do-not-fit",
            f"layers of experts have the expert-parallel sizes {listed(sizes)}: in ZeRO stage 0 "
            "all sizes must divide the largest one",
            hint="choose --stage 1 or --stage 2",
        )


def warnings(target: DeepSpeedTarget, source: Manifest) -> list[Notice]:
    """A warning that names the program's setting to change, if the expert-parallel size changes."""
    sizes = target.experts.sizes
    if ExpertLayers.of_manifest(source).sizes == sizes:
        return []
    if any(parameter_of(name) != name for name in source.parameters):
        message = f"set autoep_size to {sizes[0]} in expert_parallel of the ds_config"
        return [warning("program-must-set", message, subject="autoep_size")]
    message = f"build the model with ep_size={sizes[0]} in its MoE layers"
    return [warning("program-must-set", message, subject="ep_size")]


def _regrouped(source: Manifest, layers: ExpertLayers, ep: int) -> Manifest:
    """Replaces the param groups of experts by those for `ep` ranks; updates AutoEP's ds_config.

    Raises InconsistentCheckpoint if the experts' parameters are in an order from which the order at
    another size cannot be derived.
    """
    assert source.groups is not None
    assert isinstance(source.run.engine, FlatBufferEngine | StateDictEngine)
    spread = layers.with_ep(ep)
    groups: list[dict[str, Any]] = []
    members: dict[str, int] = {}
    origins: list[int] = []
    for number, uncut in _with_cuts_undone(source, layers):
        about, of_experts = source.groups[number], not all(map(layers.is_dense, uncut))
        names = layers.everywhere(uncut)
        if not layers.is_regular(names):
            raise InconsistentCheckpoint(
                "target-unsupported",
                f"{source.root}: the experts' parameters of group {number} are in an unusual "
                "order, so their order at another expert-parallel size is unknown",
                hint=f"keep --ep {layers.sizes[0]}",
                file=source.root,
            )
        local = spread.on_first(names)
        for cut in _cuts(source, local) if of_experts else [local]:
            members |= dict.fromkeys(spread.everywhere(cut), len(groups))
            groups.append({**about, "name": f"ep_size_{ep}"} if of_experts else about)
            origins.append(number)
    engine = replace(source.run.engine, experts=spread.listed)
    config = engine.config if isinstance(engine, FlatBufferEngine) else {}
    if isinstance(engine, FlatBufferEngine) and isinstance(config.get("expert_parallel"), dict):
        auto_ep = {**config["expert_parallel"], "autoep_size": ep}
        engine = replace(engine, config={**config, "expert_parallel": auto_ep})
    order = [*members, *(name for name in source.parameters if name not in members)]
    parameters = {name: source.parameters[name] for name in order}
    origin = replace(source.run.origin, ep=ep)
    source = source.replace(origin=origin, parameters=parameters, engine=engine)
    return regrouped(source, tuple(groups), members, origins)


def _with_cuts_undone(source: Manifest, layers: ExpertLayers) -> Iterator[tuple[int, list[str]]]:
    """Undoes the engine's cuts of large groups; yields (group's number, ep rank 0's members).

    Raises WrongOption if neighbor groups have equal settings, but are not cut at the engine's
    default limit: the program may have cut one group at a limit of its own.
    """
    groups, every = source.groups or (), source.parameters.items()
    members = by_key((about.group or 0, name) for name, about in every if about.trainable)
    local = {number: layers.on_first(own) for number, own in sorted(members.items())}

    def settings(number: int) -> object:
        return number if layers.is_dense(local[number][0]) else groups[number]

    for _, run in groupby(local, settings):
        numbers = [*run]
        names = [name for number in numbers for name in local[number]]
        if numbers[1:] and [*_cuts(source, names)] != [local[number] for number in numbers]:
            raise WrongOption(
                "target-unsupported",
                f"groups {joined([*map(str, numbers)])} have the same settings: they may be parts "
                "of one group that the program cut at its own max_group_size",
                hint=f"keep the expert-parallel size, --ep {layers.sizes[0]}: at another size the "
                "program would cut the group elsewhere",
            )
        yield numbers[0], names


def _cuts(source: Manifest, names: Sequence[str]) -> Iterator[list[str]]:
    """Cuts one rank's group of experts into the groups that DeepSpeed makes of it.

    A new group begins where the previous one would exceed GROUP_SIZE elements.
    """
    cut: list[str] = []
    size = 0
    for _, slices in groupby(names, parameter_of):
        expert_slices = list(slices)
        numel = sum(prod(source.parameters[name].shape) for name in expert_slices)
        if cut and size + numel > GROUP_SIZE:
            yield cut
            cut, size = [], 0
        cut += expert_slices
        size += numel
    yield cut


# -- layers that the names of a source show if the source does not state them


def with_named_layers(source: Manifest, unplaced: Sequence[str]) -> Manifest:
    """Adds the layers of experts to the manifest of a full model's state dict.

    The layers are derived from names of tensors and of param groups (`ep_size_2`). `unplaced` are
    names of experts' tensors, for an error message. Raises InconsistentCheckpoint (experts are
    missing) and MissingData (no state dict, or names of groups do not fit).
    """
    engine = source.run.engine
    if not isinstance(engine, StateDictEngine):
        raise MissingData(
            "layout-unknown",
            f"{source.root} has experts ({listed(unplaced, 1)}), but does not state their layers",
            hint="give the DeepSpeed run, or the universal checkpoint that was made of it",
            file=source.root,
        )
    sizes = _sizes(source)  # groups have such names if zckpt made the source from a DeepSpeed run
    names = (*(source.state.get("module") or ()), *source.parameters)
    numbers = by_key((p.layer, p.number) for p in map(expert_name, names) if p)
    layers = []
    for layer, expert_numbers in ((layer, {*own}) for layer, own in numbers.items()):
        missing = sorted(set(range(max(expert_numbers) + 1)) - expert_numbers)
        if missing:
            raise InconsistentCheckpoint(
                "elements-missing",
                f"{source.root} has expert {max(expert_numbers)} of {layer}, but not expert "
                f"{missing[0]}",
                file=source.root,
            )
        layers.append(ExpertLayer(layer, len(expert_numbers), sizes.get(layer, 1)))
    return source.replace(engine=replace(engine, experts=tuple(layers)))


def _sizes(source: Manifest) -> dict[str, int]:
    """The expert-parallel size of each layer, from the names of param groups (`ep_size_2`)."""
    sizes: dict[str, int] = {}
    for name, parameter in source.parameters.items():
        if not parameter.trainable or source.groups is None:
            continue
        number = parameter.group or 0
        parts, size = expert_name(name), size_in(source.groups[number])
        if (parts is None) != (size is None):
            raise MissingData(
                "groups-missing",
                f"{source.root}: {name} is in group {number}, but DeepSpeed needs separate groups "
                "for experts, which it names ep_size_N",
                hint="give the DeepSpeed run, or a checkpoint that zckpt made of it",
                file=source.root,
                subject=name,
            )
        if parts and size and sizes.setdefault(parts.layer, size) != size:
            raise InconsistentCheckpoint(
                "ranks-disagree",
                f"{source.root} has parameters of {parts.layer} in groups of the expert-parallel "
                f"sizes {sizes[parts.layer]} and {size}",
                file=source.root,
            )
    return sizes
