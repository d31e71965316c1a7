"""Compares the values of two checkpoints that are not tensors: steps, scalars, optimizer groups."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from msgspec.structs import replace

from ..core.checkpoint.entries import name_of
from ..core.checkpoint.facts import (
    FlatBufferEngine,
    NamedWeightsEngine,
    StateDictEngine,
    StepPlace,
    layers_of,
)
from ..core.checkpoint.inert import Scalar, alike, plain_group, to_json
from ..core.checkpoint.manifest import Manifest, Parameter
from ..core.checkpoint.states import State, harmless, missing_in, untouched, with_frozen
from ..core.passes.description import Report
from ..errors import Notice, counted, joined, listed, note
from .states import by_keys, engine_name


def shared_parameters(a: Manifest, b: Manifest) -> Iterator[tuple[str, Parameter, Parameter]]:
    """Yields each parameter that both checkpoints have: its name in `a`, and its record in each.

    A tied weight may have another name in `b`.
    """
    for owner, name in shared_names(a, b):
        yield owner, a.parameters[owner], b.parameters[name]


def shared_names(a: Manifest, b: Manifest) -> Iterator[tuple[str, str]]:
    """Yields each parameter that both checkpoints have: its name in `a` and its name in `b`."""
    theirs = {name: name for name in b.parameters} | b.owners
    for owner, parameter in a.parameters.items():
        if name := next(filter(theirs.__contains__, (owner, *parameter.aliases)), None):
            yield owner, theirs[name]


def steps(a: Manifest, b: Manifest) -> list[Report]:
    """Report lines about parameters that have different steps in the two checkpoints.

    There is one line for each pair of steps (such as 5 and 6), with the number of parameters. If
    one checkpoint has no steps at all, there are no lines.
    """
    have_steps = [
        any(parameter.step is not None for parameter in side.parameters.values()) for side in (a, b)
    ]
    if not all(have_steps):
        return []
    lines: dict[tuple[Any, Any], Report] = {}
    for name, ours, theirs in shared_parameters(a, b):
        pair = ours.step, theirs.step
        if pair[0] == pair[1]:
            continue
        line = lines.setdefault(
            pair, {"parameter": name, "parameters": 0, "a": pair[0], "b": pair[1]}
        )
        line["parameters"] += 1
    return list(lines.values())


def step_places(a: Manifest, b: Manifest) -> tuple[list[Report], list[Notice]]:
    """Compares where and in which type two checkpoints store the optimizer's step.

    Returns report lines and notices. A different place or type gives a report line, or a notice if
    a configuration or the user names the optimizer of one side. Types are compared only if the
    class of both optimizers is unknown.
    """
    # an optimizer looks in one place (state or group), and counts from 1 if it finds no step there
    ours, theirs = step_place(a), step_place(b)
    if ours is None or theirs is None:
        return [], []
    is_typed = a.optimizer is None and b.optimizer is None
    types = [(place.kind, place.shape) if is_typed else None for place in (ours, theirs)]
    if ours.where == theirs.where and types[0] == types[1]:
        if ours.kind != theirs.kind or ours.last_only == theirs.last_only or not _are_alike(a, b):
            return [], []
        states = ("the state of each parameter", "only the state of a group's last parameter")
        counted = {side: states[each.last_only] for side, each in (("a", ours), ("b", theirs))}
        return [counted], []
    line = {"a": f"{ours.where}, {ours.kind}", "b": f"{theirs.where}, {theirs.kind}"}
    named = theirs.optimizer or ours.optimizer
    if named is None:
        return [line], []
    places = f"{line['a']} in {a.root}; {line['b']} in {b.root}"
    return [], [
        note(
            "form-differs",
            f"place of the optimizer's step: {places}: one of them is where {named} looks for it",
        )
    ]


def _are_alike(a: Manifest, b: Manifest) -> bool:
    stages = [(side.format, side.run.origin.zero_stage) for side in (a, b)]
    return stages[0] == stages[1]


def step_place(manifest: Manifest) -> StepPlace | None:
    """Where the optimizer stores its step (in states or in groups), and in which type.

    None if no step is stored, or if the engine has its own optimizers (Megatron, ONNX Runtime).
    """
    has_steps = any(parameter.step is not None for parameter in manifest.parameters.values())
    if not has_steps or isinstance(manifest.run.engine, NamedWeightsEngine):
        return None
    usual = StepPlace("state", "F32") if isinstance(manifest.run.engine, StateDictEngine) else None
    return manifest.run.step_place or usual


def scalars(a: Manifest, b: Manifest) -> list[Report]:
    """Report lines about optimizer states of one number that differ, such as NAdam's `mu_product`.

    If types or shapes differ, the line states them as `a_type`, `a_shape` and so on. A state that
    only one checkpoint has gets no line here, because `missing_states` reports it.
    """
    keys = [{row.key for row in side.states.of_form("number")} for side in (a, b)]
    lines = []
    for name, other_name in shared_names(a, b):
        ours, theirs = a.states.scalars.get(name, {}), b.states.scalars.get(other_name, {})
        for key in sorted(keys[0] & keys[1] & {*ours, *theirs}):
            one, other = ours.get(key), theirs.get(key)
            values = [None if each is None else to_json(each.value) for each in (one, other)]
            line = {"parameter": name, "scalar": key, "a": values[0], "b": values[1]}
            kinds = _kinds(one, other)
            if kinds or not alike(*values):
                lines.append({**line, **kinds})
    return lines


def missing_states(
    a: Manifest, b: Manifest, reported: Collection[str]
) -> tuple[list[Report], list[Notice]]:
    """Reports optimizer states, and steps, that only one of two checkpoints has.

    Returns report lines, and notices about states that a checkpoint may lack without harm.
    `reported` has the names of tensors that the report lists already: these are left out.
    """
    lines, notes = [], []
    for only, owner, other in (("a", a, b), ("b", b, a)):
        for state in _missing(owner, other, reported):
            if reason := harmless(state, owner):
                owners = counted(state.count, "parameter")
                message = f"{state.key} of {owners}: only in {owner.root}; {reason}"
                notes.append(note("not-compared", message, subject=state.key))
                continue
            line = {
                "state": state.key,
                "only": only,
                "parameters": state.count,
                "parameter": next(iter(state.tensors)),
                "tensors": len({key for keys in state.tensors.values() for key in keys}),
            }
            lines.append(line | ({"reason": state.reason} if state.form == "unsupported" else {}))
    return lines, notes


def _missing(owner: Manifest, other: Manifest, reported: Collection[str]) -> Iterator[State]:
    for state in missing_in(owner, other):
        tensors = {
            name: tensors_of_name
            for name, tensors_of_name in state.tensors.items()
            if not tensors_of_name or {*map(name_of, tensors_of_name)} - {*reported}
        }
        if tensors:
            yield replace(state, tensors=tensors)
    stepped = [name for name, each in owner.parameters.items() if each.step is not None]
    if stepped and all(each.step is None for each in other.parameters.values()):
        yield State("step", dict.fromkeys(stepped, ()))


def unsupported_states(manifest: Manifest) -> list[Notice]:
    """A notice for each optimizer state in the files that zckpt does not read."""
    return [
        note(
            "state-unsupported",
            f"not read: {row.key} of {listed(row.parameters, 4)}: {row.reason}",
            subject=row.key,
        )
        for row in manifest.states.of_form("unsupported")
    ]


def _kinds(a: Scalar | None, b: Scalar | None) -> Report:
    """The keys `a_type`, `b_type`, `a_shape` and `b_shape` for a report line about two numbers.

    Empty if types and shapes are equal, or if a number is None.
    """
    if a is None or b is None or (a.dtype, a.shape) == (b.dtype, b.shape):
        return {}
    return {
        "a_type": a.dtype,
        "b_type": b.dtype,
        "a_shape": list(a.shape),
        "b_shape": list(b.shape),
    }


def trainable(a: Manifest, b: Manifest) -> list[Report]:
    """A report line for each parameter that is trained in only one of the checkpoints."""
    return [
        {"group": None, "key": f"trainable of {name}", "a": ours.trainable, "b": theirs.trainable}
        for name, ours, theirs in shared_parameters(a, b)
        if ours.trainable != theirs.trainable
    ]


def with_trained_alike(a: Manifest, b: Manifest) -> tuple[Manifest, Manifest]:
    """Marks parameters as frozen in both manifests if they count as trained in only one.

    This is done only for a torch state dict that has no optimizer state of the parameter: such a
    file does not tell whether it is frozen. Files of DeepSpeed tell it, because groups lack frozen
    parameters.
    """
    sides = [side for side in (a, b) if isinstance(side.run.engine, StateDictEngine)]
    untouched_of = {name for side in sides for name in untouched(side)}
    frozen = {
        name
        for name, ours, theirs in shared_parameters(a, b)
        if name in untouched_of and ours.trainable != theirs.trainable
    }
    return with_frozen(a, frozen), with_frozen(b, frozen)


def forms(a: Manifest, b: Manifest) -> list[Report]:
    """A report line if only one of two checkpoints was saved without its frozen weights.

    Only DeepSpeed's files tell this; for other engines the list is empty.
    """
    # if `frozen_param_fragments` is None, the engine loads no frozen weights; otherwise it stops if
    # one is missing
    statements = [
        side.run.engine.excludes_frozen if isinstance(side.run.engine, FlatBufferEngine) else None
        for side in (a, b)
    ]
    if None in statements or statements[0] == statements[1]:
        return []
    one, other = (
        "None (saved without frozen parameters)" if excludes else "all frozen parameters"
        for excludes in statements
    )
    return [{"key": "frozen_param_fragments", "a": one, "b": other}]


def groups(a: Manifest, b: Manifest) -> list[Report]:
    """Report lines about parameter groups: other hyper-parameters, or other members.

    A hyper-parameter that one checkpoint has in no group is not compared.
    """
    if a.groups is None or b.groups is None:
        return []
    if layers_of(a.run.engine) != layers_of(b.run.engine):
        return _groups_of_experts(a, b)
    lines: list[Report] = []
    if len(a.groups) != len(b.groups):
        lines.append({"group": None, "key": "groups", "a": len(a.groups), "b": len(b.groups)})
    plain = [[_by_keys(_hyper(group)) for group in side] for side in (a.groups, b.groups)]
    keys = [{key for group in side for key in group} for side in plain]
    for place, (one, other) in enumerate(zip(*plain, strict=False)):
        lines += [
            {"group": place, "key": key, "a": one.get(key), "b": other.get(key)}
            for key in {**one, **other}
            # a key that one side has in no group belongs to another engine
            if key in keys[0] & keys[1] and not alike(one.get(key), other.get(key))
        ]
    lines += [
        {"group": None, "key": f"group of {name}", "a": ours.group, "b": theirs.group}
        for name, ours, theirs in shared_parameters(a, b)
        if ours.group != theirs.group
    ]
    return lines


def without_empty_groups(a: Manifest, b: Manifest) -> tuple[Manifest, Manifest, list[Notice]]:
    """Removes groups without parameters if only one of the two checkpoints can store them.

    Returns both manifests and notices. DeepSpeed removes such groups from the optimizer. Flat keys
    (`param_groups.fc1.weight.lr`) contain a parameter's name, so they cannot store such a group
    either.
    """
    has_empty = [
        isinstance(side.run.engine, StateDictEngine) and side.run.engine.layout != "flat"
        for side in (a, b)
    ]
    if a.groups is None or b.groups is None or len(a.groups) == len(b.groups):
        return a, b, []
    if all(has_empty) or not any(has_empty):
        return a, b, []
    sides, notes = [], []
    for side, groups in ((a, a.groups), (b, b.groups)):
        used = sorted({each.group for each in side.parameters.values() if each.group is not None})
        empty = [str(place) for place in range(len(groups)) if place not in used]
        if empty:
            message = (
                f"hyper-parameters of the optimizer's group {joined(empty)}, which has no "
                f"parameters: only in {side.root}"
            )
            notes.append(note("not-compared", message))
        parameters = {
            name: parameter
            if parameter.group is None
            else replace(parameter, group=used.index(parameter.group))
            for name, parameter in side.parameters.items()
        }
        kept = tuple(groups[place] for place in used)
        sides.append(replace(side, groups=kept, parameters=parameters))
    return sides[0], sides[1], notes


def hypers_of_one_side(a: Manifest, b: Manifest) -> list[Notice]:
    """Notices about hyper-parameters, such as `foreach`, that only one of two checkpoints has.

    They are no differences, because versions of an optimizer have different hyper-parameters. If
    the checkpoints are of different engines and one names its optimizer, there are no notices.
    """
    is_named = a.optimizer is not None or b.optimizer is not None
    if a.groups is None or b.groups is None or (is_named and engine_name(a) != engine_name(b)):
        return []
    keys = [{key for group in side for key in plain_group(group)} for side in (a.groups, b.groups)]
    alone = (a, sorted(keys[0] - keys[1])), (b, sorted(keys[1] - keys[0]))
    return [
        note(
            "not-compared",
            f"{listed(keys_of_side, 4)} of the optimizer's groups: only in {side.root}",
            subject=keys_of_side[0],
        )
        for side, keys_of_side in alone
        if keys_of_side
    ]


def _groups_of_experts(a: Manifest, b: Manifest) -> list[Report]:
    """Compares the parameter groups of two checkpoints with different expert-parallel sizes.

    A group of `a` is compared with each group of `b` that has a parameter in common with it. Names
    of groups with experts are not compared.
    """
    assert a.groups is not None
    assert b.groups is not None
    lines: dict[tuple[Any, ...], Report] = {}
    counterparts: dict[int, int] = {}
    inverse: dict[int, int] = {}
    for name, ours, theirs in shared_parameters(a, b):
        if ours.group is None or theirs.group is None:
            continue
        one, other = _hyper(a.groups[ours.group]), _hyper(b.groups[theirs.group])
        # names contain the size, and the engine splits a group that is too large on a rank
        if one.get("moe") and other.get("moe"):
            one, other = ({**side, "name": None} for side in (one, other))
        elif (
            counterparts.setdefault(ours.group, theirs.group) != theirs.group
            or inverse.setdefault(theirs.group, ours.group) != ours.group
        ):
            line = {"group": None, "key": f"group of {name}", "a": ours.group, "b": theirs.group}
            lines[name,] = line
        for key in one.keys() & other.keys():
            if not alike(one[key], other[key]):
                line = {"group": ours.group, "key": key, "a": one[key], "b": other[key]}
                lines[ours.group, theirs.group, key] = line
    return list(lines.values())


def _hyper(group: dict[str, Any]) -> Report:
    """A group's hyper-parameters as JSON.

    A 0-d tensor, such as the lr of a capturable optimizer, is converted to a number.
    """
    return plain_group(
        {key: item.value if isinstance(item, Scalar) else item for key, item in group.items()}
    )


def _by_keys(value: Any) -> Any:
    """Converts dictionaries that the manifest stores as lists of pairs to JSON objects."""
    if isinstance(value, dict) and value.keys() == {"$dict"}:
        value = by_keys(value["$dict"])
    if isinstance(value, dict):
        return {key: _by_keys(item) for key, item in value.items()}
    return [_by_keys(item) for item in value] if isinstance(value, list) else value
