"""What does the optimizer of stage 0 keep, as it is read and as a target has it?

It has a record for each flat group, or for each parameter. The model file keeps it; with experts
there is a file for each ep rank: see moe/ep_optimizers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, count
from math import prod
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ....core.dtypes import NUMBERS
from ....core.fragments import Fragments, solid
from ....core.grouping import by_key
from ....core.inert import PYTHON_NUMBERS, Scalar
from ....core.layout import Shell
from ....core.manifest import Manifest, slot_key, slot_name
from ....core.states import OTHER
from ....errors import InconsistentCheckpoint, counted, listed
from ....files.torchfile import Tensor, TorchFile
from ....files.torchshell import Storages, shell
from ....training import steps
from ...deepspeed_states.hyper import FLAT
from ...deepspeed_states.manifest import manifest_of
from ...deepspeed_states.model_files import model_files
from ...deepspeed_states.optimizer_values import (
    base_state,
    clipping,
    own_statements,
    whole_scaling,
)
from ...deepspeed_states.optimizer_values import (
    numbers as scalars_of,
)
from ...deepspeed_states.reports import usual_norm
from ...deepspeed_states.states import (
    FLAT_MASTERS,
    WHOLE_MASTERS,
    BufferSlot,
    EngineStates,
    FlatBuffer,
    ParameterShapes,
)
from ...deepspeed_states.target import DeepSpeedTarget, TargetBuffer
from .optimizer import FROZEN, Members, WholeOptimizer


class Unit(Struct, frozen=True):
    """What the base optimizer knows by one number: one parameter, or all of a flat group.

    `shape` is that of its tensors. `master` is None if the optimizer updates the weight itself.
    """

    group: int
    names: tuple[str, ...]
    shapes: ParameterShapes
    shape: tuple[int, ...]
    state: Mapping[str, Any]
    master: Tensor | None

    @property
    def owner(self) -> str:
        """What messages call it."""
        return self.names[0] if len(self.names) == 1 else f"group {self.group}"

    def slot(self, file: TorchFile, name: str, tensor: Tensor) -> BufferSlot:
        """A tensor of this unit as a slot of its parameters."""
        if len(self.names) == 1 and tensor.shape == self.shapes[self.names[0]]:
            return BufferSlot(name, tensor.dtype, {self.names[0]: file.fragments(tensor)})
        fragments: dict[str, Fragments] = {}
        start = 0
        for parameter, shape in self.shapes.items():
            stop = start + prod(shape)
            fragments[parameter] = solid(stop - start, file.extent(tensor.part(start, stop)))
            start = stop
        return BufferSlot(name, tensor.dtype, fragments)


def _units(whole: WholeOptimizer) -> Iterator[Unit]:
    """Group by group; raises InconsistentCheckpoint if groups and masters do not fit."""
    states, path = whole.states, whole.file.path
    optimizer, base = states.first, states.bases[0]
    kept = base.get("state") or {}
    shapes = states.param_shapes()
    if not whole.named:
        yield Unit(0, tuple(shapes[0]), shapes[0], (), {}, None)
        return
    for group, own in enumerate(whole.members):
        numbers = list(base["param_groups"][group]["params"])
        names = [name for name in own if name is not None]
        if FLAT_MASTERS in optimizer:
            master = optimizer[FLAT_MASTERS][group]
            numel = sum(prod(shape) for shape in shapes[group].values())
            if len(numbers) != 1 or master.numel != numel:
                raise _misfit(path, group, counted(numel, "element"), master.numel)
            state = kept.get(numbers[0]) or {}
            yield Unit(group, tuple(names), shapes[group], master.shape, state, master)
            continue
        masters = optimizer[WHOLE_MASTERS][group] if WHOLE_MASTERS in optimizer else None
        if len(numbers) != len(own) or (masters is not None and len(masters) != len(own)):
            raise _misfit(path, group, counted(len(own), "parameter"), len(numbers))
        for place, (number, name) in enumerate(zip(numbers, own, strict=True)):
            if name is None:
                continue
            shape = shapes[group][name]
            master = None if masters is None else masters[place]
            if master is not None and master.shape != shape:
                raise _misfit(path, group, f"{name} of shape {list(shape)}", list(master.shape))
            yield Unit(group, (name,), {name: shape}, shape, kept.get(number) or {}, master)


def _misfit(path: str, group: int, expected: str, actual: object) -> InconsistentCheckpoint:
    return InconsistentCheckpoint(
        f"{path}: group {group} of the optimizer should have {expected}, but it has {actual}",
        hint="the file was edited, or --param-names does not fit; use another copy",
    )


def kept(whole: WholeOptimizer, step_policy: str | None) -> tuple[EngineStates, list[FlatBuffer]]:
    """What the optimizer knows by each number, as the record of a flat buffer.

    The engine's states have as `other` what is neither a number nor of a parameter's shape, by the
    parameter's name. What is called a step and is none is a state like any other.
    """
    states, file, units = whole.states, whole.file, list(_units(whole))
    in_states, in_groups = steps.StatedSteps("state"), steps.StatedSteps("group")
    for unit in units:
        for stated, value in (
            (in_states, unit.state.get("step")),
            (in_groups, states.groups(unit.group)[0].get("step")),
        ):
            shape = value.shape if isinstance(value, (Scalar, Tensor)) else ()
            stated.add(unit.owner, states.number(0, value), shape)
    groups = by_key((unit.group, unit.owner) for unit in units)
    counted = steps.counted_by_last(in_states, in_groups, groups.values())
    believed = steps.believed(counted, in_groups)
    completed, place = believed.settled(step_policy), believed.place()
    if place is not None and counted.steps != in_states.steps:
        place = replace(place, last_only=True)
    numbers, other, buffers = _number_keys(units), dict[str, dict[str, Any]](), []
    for unit in units:
        slots = [] if unit.master is None else [unit.slot(file, "master", unit.master)]
        scalars: dict[str, Scalar] = {}
        for key, value in unit.state.items():
            if key == "step" and steps.step_of(states.number(0, value)) is not None:
                continue
            if key in numbers and _is_number(value):
                number = states.scalar([value])
                assert number is not None
                scalars[key] = number
            elif _is_slot(unit, key, value):
                slots.append(unit.slot(file, slot_name(key), value))
            else:
                other.setdefault(unit.names[0], {})[key] = value
        step = completed.get(unit.owner)
        buffers.append(FlatBuffer(unit.group, unit.shapes, slots, step, place, scalars, (), ()))
    if buffers:
        every = (in_states, in_groups)
        seen = [line for each in every for line in steps.sightings_of(each, believed)]
        warnings = [warning for _, warning in seen if warning]
        sightings = [sighting for sighting, _ in seen]
        buffers[0] = replace(buffers[0], sightings=sightings, warnings=warnings)
    more = {OTHER: other} if other else {}
    return replace(states, states=[states.first | more]), buffers


def _number_keys(units: Sequence[Unit]) -> set[str]:
    """States of one number, like NAdam's `mu_product`: Python's, or a tensor of one element.

    They are numbers for a parameter of the same shape too.
    """
    return {
        key
        for unit in units
        for key, value in unit.state.items()
        if isinstance(key, str) and _is_number(value) and not _is_slot(unit, key, value)
    }


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel == 1 and value.dtype in NUMBERS
    return type(value) in PYTHON_NUMBERS.values()


def _is_slot(unit: Unit, key: Any, value: Any) -> bool:
    return isinstance(key, str) and isinstance(value, Tensor) and value.shape == unit.shape


def manifest_of_whole(whole: WholeOptimizer, step_policy: str | None) -> Manifest:
    """The manifest; its warnings name the parameters whose names only an order shows."""
    states, buffers = kept(whole, step_policy)
    manifest = manifest_of(states, buffers, "deepspeed", states.config, states.module_dtype)
    warnings = list(manifest.warnings)
    if whole.inferred:
        warnings.append(
            "the optimizer knows its parameters by number: the names of "
            f"{listed(whole.inferred, 4)} are inferred from the order of the module"
        )
    manifest = replace(
        manifest,
        state={**manifest.state, "module": list(whole.module)},
        inferred=tuple(whole.inferred),
        warnings=tuple(warnings),
        zero_padding=True,
    )
    return with_members(manifest, whole.members)


def with_members(manifest: Manifest, members: Members) -> Manifest:
    """The manifest with `members`, if the optimizer lists frozen parameters, which torch's may.

    They are what it lists by group, by places in the module; None is a frozen parameter.
    """
    if all(None not in own for own in members):
        return manifest
    places = {name: place for place, name in enumerate(manifest.state["module"])}
    listed_in = [[None if n is None else places[n] for n in own] for own in members]
    optimizer = {**manifest.state["optimizer"], "members": listed_in}
    return replace(manifest, state={**manifest.state, "optimizer": optimizer})


# -- the optimizer of a target, in the form that the class around it has: see optimizer.py


def model_shells(target: DeepSpeedTarget) -> Iterator[Shell]:
    """The model file, and with experts the optimizers of all ep ranks."""
    if not target.experts:
        yield from model_files(target, True, optimizer)
        return
    yield from model_files(target, True)
    for rank in range(max(target.experts.sizes)):
        own = target.expert_ranks.in_layers(target.experts, rank)
        named = partial(target.experts.named_in, of_layer=own)
        value = {"optimizer": optimizer(target, storages := Storages(), named)}
        name = f"expp_rank_{rank}_{target.mp_rank}_optim_states.pt"
        yield shell(f"{target.tag}/{name}", value, storages)


def optimizer(
    target: DeepSpeedTarget, storages: Storages, named: Callable[[str], str] = str
) -> dict[str, Any]:
    """The value of `optimizer`; `named` gives the name in the whole model of rank 0's names."""
    groups, following = _members(target), count()
    numbers = [[next(following) for _ in group] for group in groups]
    every = dict(zip(chain.from_iterable(numbers), chain.from_iterable(groups), strict=True))
    states = {n: _state(target, own, storages, named) for n, own in every.items() if own}
    frozen = [number for number, own in every.items() if own is None]
    base = base_state(target, states, storages, numbers=numbers)
    own = {**own_statements(target), **({FROZEN: frozen} if frozen else {})}
    if target.wrapper is None:
        return {**base, **own}
    masters = [
        [_tensor(target, buffer, buffer.master, storages) for buffer in group if buffer]
        for group in groups
    ]
    if target.wrapper != FLAT:
        return {
            **whole_scaling(target),
            "optimizer_state_dict": base,
            WHOLE_MASTERS: masters,
            **own,
        }
    return {
        **(whole_scaling(target) if target.engine.dtype == "F16" else {}),
        "optimizer_state_dict": base,
        FLAT_MASTERS: [flat for (flat,) in masters],
        "clip_grad": usual_norm(target),
        **clipping(target),
        **own,
    }


def _members(target: DeepSpeedTarget) -> list[list[TargetBuffer | None]]:
    """By group, what the optimizer has a number for; None for a frozen parameter."""
    groups: list[list[TargetBuffer | None]] = [[] for _ in target.groups]
    for buffer in target.buffers:
        groups[buffer.group].append(buffer)
    if not target.lists_frozen:
        return groups
    remaining = [iter(group) for group in groups]
    return [
        [None if name is None else next(own) for name in names]
        for names, own in zip(target.listed_names(), remaining, strict=True)
    ]


def _state(
    target: DeepSpeedTarget,
    buffer: TargetBuffer,
    storages: Storages,
    named: Callable[[str], str],
) -> dict[str, Any]:
    """The state of one number."""
    return {
        **scalars_of(target, buffer, storages),
        **{
            slot_key(slot): _tensor(target, buffer, dtype, storages)
            for slot, dtype in buffer.slots.items()
        },
        **target.thawed(target.others.get(named(buffer.names[0])) or {}, storages),
    }


def _tensor(target: DeepSpeedTarget, buffer: TargetBuffer, dtype: str, storages: Storages) -> Any:
    """A tensor like the master: flat, or of the parameter's shape."""
    if target.wrapper == FLAT:
        return storages.tensor(dtype, (buffer.starts[-1],))
    return storages.tensor(dtype, target.trainable[buffer.names[0]].shape)
