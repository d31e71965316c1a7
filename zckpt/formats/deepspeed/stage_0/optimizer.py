"""Reads the optimizer of stage 0, and writes the optimizer of a target.

    model["optimizer"]          masters                            base optimizer
    torch's own, fp32           the module's weights               state, param_groups
    FP16_Optimizer              fp32_groups_flat, one per group    optimizer_state_dict
    FP16_UnfusedOptimizer       fp32_groups, one per parameter     optimizer_state_dict

Every rank has the same optimizer, and rank 0 saves it in the model file. With experts there is a
file for each ep rank: see ../ep_optimizers.py. Both wrappers make one update with zero gradients
when they are built, and their steps count it: 4 after 3 updates (0.19.8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain, count, pairwise
from math import prod
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ....core.checkpoint.inert import Scalar, is_number
from ....core.checkpoint.manifest import Manifest, slot_key, slot_name
from ....core.grouping import by_key
from ....core.passes.layout import Shell
from ....core.storage.fragments import Fragments, solid
from ....errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    MissingData,
    counted,
    listed,
    warning,
)
from ....files.torchfile import Tensor, TorchFile
from ....files.torchshell import Storages, shell
from ....training import steps
from ...deepspeed_states import optimizer_values
from ...deepspeed_states.directories import TagDirectory, refuse
from ...deepspeed_states.hyper import FLAT
from ...deepspeed_states.manifest import manifest_of
from ...deepspeed_states.model_files import model_files
from ...deepspeed_states.reports import usual_norm
from ...deepspeed_states.states import (
    FLAT_MASTERS,
    WHOLE_MASTERS,
    BufferSlot,
    EngineStates,
    FlatBuffer,
    ModuleOverrides,
    dictionary,
    open_files,
    stated_config,
    version_of,
    wrapper_of,
)
from ...deepspeed_states.target import DeepSpeedTarget, TargetBuffer
from ...reading import Reading
from ..files import RankFiles
from ..ranks import check_kind, without_optimizer
from .naming import Members, Named, Weights, names_of, shapes_of, weights_in
from .numbers import FROZEN, Number, Shape, misfit, numbers_of


class WholeOptimizer(Struct, frozen=True):
    """The opened model file, and the names of its optimizer's parameters.

    members    each group's names in the optimizer's order, None for a frozen parameter:
               [["fc.weight", None], ["fc.bias"]]. Empty if nothing shows the names, and only the
               weights are read
    inferred   the names that follow only from the order of the module's weights
    module     the names of the module's tensors
    """

    states: EngineStates
    members: Members
    inferred: Sequence[str]
    module: Sequence[str]

    @property
    def file(self) -> TorchFile:
        return self.states.optimizers[0]


def open_whole(directory: TagDirectory, files: RankFiles, reading: Reading) -> WholeOptimizer:
    """Opens the model file with its optimizer, and names the optimizer's parameters.

    Raises IncompleteCheckpoint without an optimizer, and MissingData if nothing shows the names.
    With `reading.weights_only`, only an optimizer with fp32 masters needs names.
    """
    states = states_of(directory, files)
    module = ((name, states.models[0], own) for name, own in states.module.items())
    weights = weights_in(module, {*states.buffer_names})
    try:
        (whole,) = named_optimizers([states], weights, reading.param_names)
    except MissingData:
        if not reading.weights_only or wrapper_of(states.first) is not None:  # masters are weights
            raise
        whole = with_names(states, Named([[*weights]], []), shapes_of(weights))
        return replace(whole, members=())
    return whole


def states_of(directory: TagDirectory, files: RankFiles, *, is_stage: bool = False) -> EngineStates:
    """Opens a model file that also has the optimizer (stage 0).

    With `is_stage` (of a pipeline), the file may have no module: the weights are in files of
    layers. Raises IncompleteCheckpoint if the file has no optimizer, CorruptCheckpoint if the
    optimizer has no state.
    """
    (file, *_) = open_files(files.models, files.parsed)
    model = dictionary(file, file.value)
    overrides = ModuleOverrides(module={} if is_stage and model.get("module") is None else None)
    if files.of_ep:
        refuse(directory, "mixture-of-experts layers in ZeRO stage 0 on several model ranks")
    if files.experts or model.get("num_experts"):
        raise IncompleteCheckpoint(
            "missing-rank-file",
            f"{directory.path} has experts, but the optimizer files of all ep ranks are missing",
            hint="expected expp_rank_0_mp_rank_00_optim_states.pt and one per further rank (stage "
            "0), or zero_pp_rank_0_mp_rank_00_optim_states.pt and one per further rank",
            file=directory.path,
        )
    return states_with(directory, file, model, file, model.get("optimizer"), overrides)


def states_with(
    directory: TagDirectory,
    file: TorchFile,
    model: dict[str, Any],
    beside: TorchFile,
    optimizer: Any,
    overrides: ModuleOverrides,
) -> EngineStates:
    """Checks and combines a model file and its `optimizer`, which may be in another file.

        file        the model file; `model` is its content
        beside      the file with `optimizer`: the model file, or an ep rank's file
        overrides   values that replace the model file's

    Raises the same errors as `states_of`.
    """
    if not isinstance(optimizer, dict) or not optimizer:
        raise without_optimizer(directory)
    version = version_of(model)
    check_kind(directory, version, overrides.module_of(model), stated_config(model, model))
    wrapper = wrapper_of(optimizer)
    base = optimizer if wrapper is None else optimizer.get("optimizer_state_dict")
    if not isinstance(base, dict) or not isinstance(base.get("param_groups"), list):
        raise CorruptCheckpoint(
            "file-damaged", f"{beside.path} holds no state of a torch optimizer", file=beside.path
        )
    stated_size = model.get("dp_world_size")
    dp = stated_size if isinstance(stated_size, int) and stated_size > 0 else 1
    return EngineStates(
        directory,
        [file],
        [beside],
        model,
        [optimizer],
        [base],
        version,
        dp,
        partitioned=False,
        whole=True,
        overrides=overrides,
    )


def named_optimizers(
    every: Sequence[EngineStates], weights: Weights, param_names: Sequence[str] | None
) -> list[WholeOptimizer]:
    """Names the parameters of each optimizer; raises the same errors as `names_of`."""
    wholes: list[WholeOptimizer] = []
    for states, named in zip(every, names_of(every, weights, param_names), strict=True):
        shapes = shapes_of(weights)
        if not weights:  # a stage whose layers are not written yet
            shapes = dict(chain(*(group.items() for group in states.param_shapes())))
        whole = with_names(states, named, shapes)
        wholes.append(replace(whole, module=[*(states.module or shapes)]))
    return wholes


def with_names(states: EngineStates, named: Named, shapes: Mapping[str, Shape]) -> WholeOptimizer:
    """Adds each group's names and shapes to the states: the engine saves none in stage 0."""
    shapes_by_group = [
        {name: shapes[name] for name in group if name is not None} for group in named.members
    ]
    named_states = replace(states, overrides=replace(states.overrides, shapes=shapes_by_group))
    return WholeOptimizer(named_states, *named, [*shapes])


def _named_numbers(whole: WholeOptimizer) -> Iterator[Number]:
    """Yields what the optimizer's state has for each trained parameter, or for each flat group.

    Each item has names and shapes, which `numbers_of` cannot know. Raises InconsistentCheckpoint if
    the names do not fit the groups and masters.
    """
    states, shapes = whole.states, whole.states.param_shapes()
    if not whole.members:
        yield Number(0, {}, shapes=shapes[0])
        return
    listed_in = zip(whole.members, numbers_of(states), strict=True)
    for group, (names, numbers) in enumerate(listed_in):
        where, shapes_of_group = f"{whole.file.path}: group {group} of the optimizer", shapes[group]
        if FLAT_MASTERS in states.first:
            (flat,), numel = numbers, sum(map(prod, shapes_of_group.values()))
            if flat.shape != (numel,):
                raise misfit(where, counted(numel, "element"), prod(flat.shape or ()))
            yield replace(flat, shapes=shapes_of_group)
            continue
        if len(numbers) != len(names):
            raise misfit(where, counted(len(names), "parameter"), len(numbers))
        for number, name in zip(numbers, names, strict=True):
            if name is None:
                continue
            shape = shapes_of_group[name]
            if number.master and number.shape != shape:
                raise misfit(where, f"{name} of shape {[*shape]}", [*(number.shape or ())])
            yield replace(number, shapes={name: shape})


def _slot(number: Number, file: TorchFile, name: str, tensor: Tensor) -> BufferSlot:
    """Splits one tensor of the optimizer's state by parameter; `name` is the state's name.

    A flat tensor has several parameters, any other tensor only one.
    """
    if [*number.shapes.values()] == [tensor.shape]:
        return BufferSlot(name, tensor.dtype, {number.first: file.fragments(tensor)})
    ends = pairwise(accumulate(map(prod, number.shapes.values()), initial=0))
    fragments: dict[str, Fragments] = {}
    for parameter, (start, stop) in zip(number.shapes, ends, strict=True):
        fragments[parameter] = solid(stop - start, file.extent(tensor.part(start, stop)))
    return BufferSlot(name, tensor.dtype, fragments)


def kept(whole: WholeOptimizer, step_policy: str | None) -> list[FlatBuffer]:
    """The optimizer's state as `FlatBuffer`s: one per parameter, or one per group (FP16_Optimizer).

    With `step_policy` "max", "min" or a number such as "7", all get this one step. With "keep" or
    None, each keeps its own.
    """
    states, file, numbers = whole.states, whole.file, list(_named_numbers(whole))
    in_states, in_groups = steps.StatedSteps("state"), steps.StatedSteps("group")
    for number in numbers:
        of_group = states.groups(number.group)[0]
        for statement, values in ((in_states, number.state), (in_groups, of_group)):
            value = values.get("step")
            shape = value.shape if isinstance(value, (Scalar, Tensor)) else ()
            statement.add(number.owner, states.number(0, value), shape)
    groups = by_key((number.group, number.owner) for number in numbers)
    by_last = steps.counted_by_last(in_states, in_groups, groups.values())
    believed = steps.believed(by_last, in_groups)
    completed, place = believed.settled(step_policy), believed.place()
    if place is not None and by_last.steps != in_states.steps:
        place = replace(place, last_only=True)
    # numeric states, like NAdam's `mu_product`, even if the parameter has the same shape
    keys = {
        key
        for number in numbers
        for key, value in number.state.items()
        if isinstance(key, str) and is_number(value, Tensor) and not _is_slot(number, key, value)
    }
    buffers: list[FlatBuffer] = []
    for number in numbers:
        slots = [_slot(number, file, "master", number.master.tensor)] if number.master else []
        scalars: dict[str, Scalar] = {}
        other: dict[Any, Any] = {}
        for key, value in number.state.items():
            if key == "step" and steps.step_of(states.number(0, value)) is not None:
                continue  # any other `step` is a state like others
            scalar = states.scalar([value]) if key in keys and is_number(value, Tensor) else None
            if scalar is not None:
                scalars[key] = scalar
            elif _is_slot(number, key, value):
                slots.append(_slot(number, file, slot_name(key), value))
            else:
                other[key] = value
        shown = (slots, completed.get(number.owner), place, scalars)
        buffers.append(FlatBuffer(number.group, number.shapes, *shown, (), (), other=other))
    if buffers:
        seen = [*chain(*(steps.sightings_of(each, believed) for each in (in_states, in_groups)))]
        sightings, warnings = [line for line, _ in seen], [line for _, line in seen if line]
        buffers[0] = replace(buffers[0], sightings=sightings, warnings=warnings)
    return buffers


def _is_slot(number: Number, key: Any, value: Any) -> bool:
    return isinstance(key, str) and isinstance(value, Tensor) and value.shape == number.shape


def manifest_of_whole(whole: WholeOptimizer, step_policy: str | None) -> Manifest:
    """Builds the manifest of a model file that also has the optimizer.

    `kept` explains `step_policy`. A warning lists names that were inferred only from the order of
    the module's weights.
    """
    states, buffers = whole.states, kept(whole, step_policy)
    manifest = manifest_of(states, buffers, "deepspeed", states.config, states.module_dtype)
    warnings = manifest.notices.warnings
    if whole.inferred:
        message = (
            "the optimizer's state has only numbers for its parameters: the names of "
            f"{listed(whole.inferred, 4)} are inferred from the order of the module"
        )
        warnings += (warning("names-inferred", message, subject=whole.inferred[0]),)
    manifest = manifest.replace(
        state={**manifest.state, "module": list(whole.module)},
        inferred=tuple(whole.inferred),
        warnings=warnings,
        zero_padding=True,
    )
    return with_members(manifest, whole.members)


def with_members(manifest: Manifest, members: Members) -> Manifest:
    """Records each group's parameters in the manifest, if the optimizer lists frozen parameters.

    `members` has each group's names, with None for a frozen parameter. The manifest gets them as
    `optimizer.members`: each name's index in `state["module"]`.
    """
    if all(None not in own for own in members):
        return manifest
    places = {name: place for place, name in enumerate(manifest.state["module"])}
    listed_in = [[None if n is None else places[n] for n in own] for own in members]
    optimizer = {**manifest.state["optimizer"], "members": listed_in}
    return replace(manifest, state={**manifest.state, "optimizer": optimizer})


# -- the optimizer of a target, in the form of the class that wraps it


def model_shells(target: DeepSpeedTarget) -> Iterator[Shell]:
    """Yields the shell (the file without tensors' bytes) of the model file.

    With experts, also yields the shells of all ep ranks' optimizer files.
    """
    yield from model_files(target, True, None if target.experts else optimizer)
    for rank in range(max(target.experts.sizes, default=0)):
        places = target.expert_ranks.in_layers(target.experts, rank)
        named = partial(target.experts.named_in, of_layer=places)
        value = {"optimizer": optimizer(target, storages := Storages(), named)}
        name = f"expp_rank_{rank}_{target.mp_rank}_optim_states.pt"
        yield shell(f"{target.tag}/{name}", value, storages)


def optimizer(
    target: DeepSpeedTarget, storages: Storages, named: Callable[[str], str] = str
) -> dict[str, Any]:
    """The value under the key `optimizer` in a model file of stage 0: masters, states and groups.

    `storages` collects the storages of the tensors in the new file. `named` maps rank 0's names of
    experts to their names in the full model.
    """
    is_flat = target.wrapper == FLAT

    def tensor(buffer: TargetBuffer, dtype: str) -> Tensor:
        shape = (buffer.starts[-1],) if is_flat else target.trainable[buffer.names[0]].shape
        return storages.tensor(dtype, shape)

    def state(buffer: TargetBuffer) -> dict[str, Any]:
        numbers = optimizer_values.numbers(target, buffer, storages)
        slots = {slot_key(slot): tensor(buffer, dtype) for slot, dtype in buffer.slots.items()}
        other_values = target.other_values.get(named(buffer.names[0])) or {}
        return {**numbers, **slots, **target.thawed(other_values, storages)}

    groups, following = _members(target), count()
    numbers = [[next(following) for _ in group] for group in groups]
    every = [*chain.from_iterable(groups)]
    states = {number: state(own) for number, own in enumerate(every) if own}
    frozen = [number for number, own in enumerate(every) if own is None]
    base = optimizer_values.base_state(target, states, storages, numbers=numbers)
    own_values = optimizer_values.own_statements(target) | ({FROZEN: frozen} if frozen else {})
    if target.wrapper is None:
        return {**base, **own_values}
    wholes = [[tensor(each, each.master) for each in group if each] for group in groups]
    masters: dict[str, Any] = {WHOLE_MASTERS: wholes}
    if is_flat:
        masters = {FLAT_MASTERS: [flat for (flat,) in wholes], "clip_grad": usual_norm(target)}
        masters |= optimizer_values.clipping(target)
    is_scaled = not is_flat or target.engine.dtype == "F16"
    scaling = optimizer_values.whole_scaling(target) if is_scaled else {}
    return {**scaling, "optimizer_state_dict": base, **masters, **own_values}


def _members(target: DeepSpeedTarget) -> list[list[TargetBuffer | None]]:
    """For each group, what the optimizer lists: a buffer of the target, or None.

    A buffer stands for a trained parameter or, with FP16_Optimizer, for the whole group. None
    stands for a frozen parameter, which the program has given to its optimizer too.
    """
    of_group = by_key((buffer.group, buffer) for buffer in target.buffers)
    groups = [of_group.get(number, []) for number, _ in enumerate(target.groups)]
    if not target.lists_frozen:
        return [[*group] for group in groups]
    return [
        [None if name is None else next(buffers) for name in names]
        for names, buffers in zip(target.listed_names(), map(iter, groups), strict=True)
    ]
