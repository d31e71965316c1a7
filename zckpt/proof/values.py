"""Differences between two checkpoints that are not tensors: steps, groups, states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import permutations
from typing import Any

from ..core.experts import layers_of
from ..core.facts import FlatBufferEngine, GraphEngine, StateDictEngine, StepPlace, with_facts
from ..core.inert import PLAIN, Foreign, Scalar, inside, plain_group, to_json, types_in
from ..core.manifest import Manifest, Parameter
from ..errors import listed

Report = dict[str, Any]


def _parameters(a: Manifest, b: Manifest) -> Iterator[tuple[str, Parameter, Parameter]]:
    """Parameters of both, by the name in `a`; a tied weight may have another name in `b`."""
    theirs = {
        name: parameter
        for owner, parameter in b.parameters.items()
        for name in (owner, *parameter.aliases)
    }
    for owner, parameter in a.parameters.items():
        for name in (owner, *parameter.aliases):
            if name in theirs:
                yield owner, parameter, theirs[name]
                break


def steps(a: Manifest, b: Manifest) -> list[Report]:
    """Steps that differ, one line per pair of steps.

    A step of one side alone is a difference only if the other side has steps of other parameters.
    """
    have_steps = [
        any(parameter.step is not None for parameter in side.parameters.values()) for side in (a, b)
    ]
    lines: dict[tuple[Any, Any], Report] = {}
    for name, ours, theirs in _parameters(a, b):
        pair = ours.step, theirs.step
        unknown = any(step is None and not has for step, has in zip(pair, have_steps, strict=True))
        if unknown or pair[0] == pair[1]:
            continue
        line = lines.setdefault(
            pair, {"parameter": name, "parameters": 0, "a": pair[0], "b": pair[1]}
        )
        line["parameters"] += 1
    return list(lines.values())


def step_places(a: Manifest, b: Manifest) -> tuple[list[Report], list[str]]:
    """The place of the step if it differs, as a line; or as a note if an optimizer was named.

    An optimizer looks for its step in one place, and begins at 1 if it finds none there. One that
    is named may look elsewhere. The type is compared if neither side names its optimizer: the
    optimizers of each engine take a number in their own type.
    """
    ours, theirs = step_place(a), step_place(b)
    if ours is None or theirs is None:
        return [], []
    is_typed = a.optimizer is None and b.optimizer is None
    types = [(place.kind, place.shape) if is_typed else None for place in (ours, theirs)]
    if ours.where == theirs.where and types[0] == types[1]:
        return [], []
    line = {"a": f"{ours.where}, {ours.kind}", "b": f"{theirs.where}, {theirs.kind}"}
    named = theirs.optimizer or ours.optimizer
    if named is None:
        return [line], []
    return [], [
        f"place of the step: {line['a']} in {a.root}; {line['b']} in {b.root}: {named} looks there"
    ]


def step_place(manifest: Manifest) -> StepPlace | None:
    """Where the optimizer keeps its step; None if it has none, or if the engine has its own."""
    has_steps = any(parameter.step is not None for parameter in manifest.parameters.values())
    if not has_steps or isinstance(manifest.engine, GraphEngine):
        return None
    usual = StepPlace("state", "F32") if isinstance(manifest.engine, StateDictEngine) else None
    return manifest.step_place or usual


def scalars(a: Manifest, b: Manifest) -> list[Report]:
    """States of one number, as NAdam's `mu_product`, that differ in value, type or shape.

    A line has `a_type`, `a_shape` and so on if these differ. A state that one side has for no
    parameter at all is not a difference.
    """
    keys = [
        {key for parameter in side.parameters.values() for key in parameter.scalars}
        for side in (a, b)
    ]
    lines = []
    for name, ours, theirs in _parameters(a, b):
        for key in sorted(keys[0] & keys[1] & {*ours.scalars, *theirs.scalars}):
            one, other = ours.scalars.get(key), theirs.scalars.get(key)
            values = [None if each is None else to_json(each.value) for each in (one, other)]
            line = {"parameter": name, "scalar": key, "a": values[0], "b": values[1]}
            kinds = _kinds(one, other)
            if kinds or not alike(*values):
                lines.append({**line, **kinds})
    return lines


def _kinds(a: Scalar | None, b: Scalar | None) -> Report:
    """Types and shapes, if they differ."""
    if a is None or b is None or (a.dtype, a.shape) == (b.dtype, b.shape):
        return {}
    return {
        "a_type": a.dtype,
        "b_type": b.dtype,
        "a_shape": list(a.shape),
        "b_shape": list(b.shape),
    }


def trainable(a: Manifest, b: Manifest) -> list[Report]:
    """Parameters that only one side trains."""
    return [
        {"group": None, "key": f"trainable of {name}", "a": ours.trainable, "b": theirs.trainable}
        for name, ours, theirs in _parameters(a, b)
        if ours.trainable != theirs.trainable
    ]


def forms(a: Manifest, b: Manifest) -> list[Report]:
    """Whether frozen weights were left out, if both state it and differ.

    DeepSpeed's `frozen_param_fragments` is None in a save without frozen parameters. An empty
    dictionary in its place says that the model has none, and an engine whose model has some stops.
    No value differs: both engines load what is there.
    """
    statements = [
        side.engine.excludes_frozen if isinstance(side.engine, FlatBufferEngine) else None
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
    """Hyper-parameters that both have, and which parameters belong to which group."""
    if a.groups is None or b.groups is None:
        return []
    if layers_of(a.engine) != layers_of(b.engine):
        return _groups_of_experts(a, b)
    lines: list[Report] = []
    if len(a.groups) != len(b.groups):
        lines.append({"group": None, "key": "groups", "a": len(a.groups), "b": len(b.groups)})
    keys = [{key for group in side for key in group} for side in (a.groups, b.groups)]
    for place, (ours, theirs) in enumerate(zip(a.groups, b.groups, strict=False)):
        one, other = _hyper(ours), _hyper(theirs)
        lines += [
            {"group": place, "key": key, "a": one.get(key), "b": other.get(key)}
            for key in {**one, **other}
            # a key that one side has in no group belongs to another engine
            if key in keys[0] & keys[1] and not alike(one.get(key), other.get(key))
        ]
    lines += [
        {"group": None, "key": f"group of {name}", "a": ours.group, "b": theirs.group}
        for name, ours, theirs in _parameters(a, b)
        if ours.group != theirs.group
    ]
    return lines


def _groups_of_experts(a: Manifest, b: Manifest) -> list[Report]:
    """The same of two checkpoints whose experts are spread over different numbers of ranks.

    Groups of experts have that number in their names, and are cut where one rank has too many
    elements. So groups are compared that have a parameter in common.
    """
    assert a.groups is not None
    assert b.groups is not None
    lines: dict[tuple[Any, ...], Report] = {}
    counterparts: dict[int, int] = {}
    inverse: dict[int, int] = {}
    for name, ours, theirs in _parameters(a, b):
        if ours.group is None or theirs.group is None:
            continue
        one, other = _hyper(a.groups[ours.group]), _hyper(b.groups[theirs.group])
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
    """Hyper-parameters as JSON, 0-d tensors (a capturable optimizer's lr) by value."""
    return plain_group(
        {key: item.value if isinstance(item, Scalar) else item for key, item in group.items()}
    )


def states(a: Manifest, b: Manifest) -> list[Report]:
    """Counters, schedulers, loss scalers and client states, of the kinds that both have.

    Facts about the engine (version, stage, size) are left out: they may differ.
    """
    lines: list[Report] = []
    ours, theirs = (with_facts(side.state, side.engine, None) for side in (a, b))
    for key in ("counters", "lr_scheduler", "optimizer", "client_state"):
        if ours.get(key) is not None and theirs.get(key) is not None:
            lines += _states(to_json(ours[key]), to_json(theirs[key]), key)
    return lines


def _states(a: Any, b: Any, path: str) -> Iterator[Report]:
    if a == b:  # at once, since both may be very large
        return
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in a:
            if key in b:
                yield from _states(a[key], b[key], f"{path}.{key}")
            elif path != "optimizer":  # the keys there depend on the stage
                yield {"key": f"{path}.{key}", "only": "a"}
        for key in b:
            if key not in a and path != "optimizer":
                yield {"key": f"{path}.{key}", "only": "b"}
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for place, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from _states(one, other, f"{path}.{place}")
    elif not alike(a, b):
        yield {"key": path, "a": a, "b": b}


def own_state(a: Manifest, b: Manifest) -> list[str]:
    """Notes on values of the program's own state that only one of two whole checkpoints has."""
    if a.groups is None or b.groups is None:
        return []
    states = [side.state.get("client_state") or {} for side in (a, b)]
    notes = []
    for (owner, ours), (other, theirs) in permutations(zip((a, b), states, strict=True)):
        if names := list(_only(ours, theirs, "client_state")):
            notes.append(
                f"{other.root} lacks {listed(names, 4)} of the program's own state, which "
                f"{owner.root} has"
            )
    return notes


def _only(ours: Any, theirs: Any, path: str) -> Iterator[str]:
    """The paths of what `theirs` lacks; an object's attributes are in its state."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for key, value in ours.items():
            if key not in theirs:
                yield inside(path, key)
            elif type(value) not in PLAIN:
                yield from _only(value, theirs[key], inside(path, key))
    elif isinstance(ours, Foreign) and isinstance(theirs, Foreign):
        yield from _only(ours.state, theirs.state, path)
    elif isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        if types_in(ours) <= PLAIN or len(ours) != len(theirs):
            return
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from _only(one, other, inside(path, place))


def alike(a: Any, b: Any) -> bool:
    """Whether two values are equal; NaN equals NaN, and a tuple equals the list in JSON."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b) or (a != a and b != b)
