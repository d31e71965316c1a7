"""What the optimizer of stage 0 keeps: a record for each flat group, or for each parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ....core.dtypes import NUMBERS
from ....core.fragments import Fragments, solid
from ....core.grouping import by_key
from ....core.inert import PYTHON_NUMBERS, Scalar
from ....core.manifest import Manifest, Sighting, slot_name
from ....errors import InconsistentCheckpoint, counted, listed
from ....files.torchfile import Tensor, TorchFile
from ....training import steps
from ...deepspeed_states.manifest import manifest_of
from ...deepspeed_states.states import (
    FLAT_MASTERS,
    WHOLE_MASTERS,
    BufferSlot,
    EngineStates,
    FlatBuffer,
    ParameterShapes,
)
from .whole import Members, WholeOptimizer

States = dict[str, dict[str, Any]]


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


def with_states(whole: WholeOptimizer) -> tuple[EngineStates, list[Unit]]:
    """The engine's states with two more values of the optimizer, and what it knows by number.

    `members` are as `members_in` gives them, `other` are states that are neither a number nor of a
    parameter's shape, by its name.
    """
    units = list(_units(whole))
    numbers = _number_keys(units)
    other: States = {}
    for unit in units:
        for key, value in unit.state.items():
            if _kind(whole.states, unit, numbers, key, value) == "other":
                other.setdefault(unit.names[0], {})[key] = value
    optimizer = whole.states.first | members_in(whole.module, whole.members)
    optimizer |= {"other": other} if other else {}
    return replace(whole.states, states=[optimizer]), units


def members_in(module: Sequence[str], members: Members) -> dict[str, list[list[int | None]]]:
    """`members`, if the optimizer lists frozen parameters: what it lists by places in the module.

    They are by group; None is a frozen parameter, which torch's own optimizer may have.
    """
    if all(None not in own for own in members):
        return {}
    places = {name: place for place, name in enumerate(module)}
    return {"members": [[None if n is None else places[n] for n in own] for own in members]}


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


def buffers(
    states: EngineStates, units: Sequence[Unit], step_policy: str | None
) -> Iterator[FlatBuffer]:
    """Every unit as the record of a flat buffer; the first of a group has its sightings."""
    file, numbers = states.optimizers[0], _number_keys(units)
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
    completed = believed.settled(step_policy)
    step_place = believed.place()
    if step_place is not None and counted.steps != in_states.steps:
        step_place = replace(step_place, last_only=True)
    sightings, warnings = [], []
    for stated in (in_states, in_groups):
        for sighting, warning in _sight(stated, believed):
            sightings.append(sighting)
            warnings += [warning] if warning else []
    for place, unit in enumerate(units):
        slots = [] if unit.master is None else [unit.slot(file, "master", unit.master)]
        scalars: dict[str, Scalar] = {}
        for key, value in unit.state.items():
            kind = _kind(states, unit, numbers, key, value)
            if kind == "number":
                number = states.scalar([value])
                assert number is not None
                scalars[key] = number
            elif kind == "slot":
                slots.append(unit.slot(file, slot_name(key), value))
        yield FlatBuffer(
            unit.group,
            unit.shapes,
            slots,
            completed.get(unit.owner),
            step_place,
            scalars,
            sightings if not place else (),
            warnings if not place else (),
        )


def _kind(states: EngineStates, unit: Unit, numbers: set[str], key: Any, value: Any) -> str:
    """What a state is: the `step`, a `number`, a `slot`, or an `other` one.

    What is called a step and is none is a state like any other.
    """
    if key == "step" and steps.step_of(states.number(0, value)) is not None:
        return "step"
    if key in numbers and _is_number(value):
        return "number"
    return "slot" if _is_slot(unit, key, value) else "other"


def _sight(
    stated: steps.StatedSteps, believed: steps.StatedSteps
) -> Iterator[tuple[Sighting, str | None]]:
    """One line for each different step, not one for each parameter."""
    is_true = stated.where == believed.where
    owners = by_key(
        ((step, stated.kinds[owner], is_true and believed.steps[owner] == step), owner)
        for owner, step in stated.steps.items()
    )
    for (step, kind, truth), names in owners.items():
        where = f"{stated.where} of {listed(names, 1)}"
        yield Sighting(where, step, truth), steps.stalled(step, kind, where) if truth else None


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
    states, units = with_states(whole)
    slots = list(buffers(states, units, step_policy))
    manifest = manifest_of(states, slots, "deepspeed", states.config, states.module_dtype)
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
