"""Where two checkpoints say different things that are no tensors: steps, groups, states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .inert import Scalar, plain_group, to_json
from .manifest import Manifest, Parameter

Report = dict[str, Any]


def _parameters(a: Manifest, b: Manifest) -> Iterator[tuple[str, Parameter, Parameter]]:
    """What both hold, by the name in `a`; a tied weight may have another name in `b`."""
    theirs = {
        name: held
        for held_name, held in b.parameters.items()
        for name in (held_name, *held.aliases)
    }
    for name, held in a.parameters.items():
        for known in (name, *held.aliases):
            if known in theirs:
                yield name, held, theirs[known]
                break


def steps(a: Manifest, b: Manifest) -> list[Report]:
    """Steps that both tell, and differently: one line per pair of steps."""
    found: dict[tuple[Any, Any], Report] = {}
    for name, ours, theirs in _parameters(a, b):
        pair = ours.step, theirs.step
        if None in pair or pair[0] == pair[1]:
            continue
        line = found.setdefault(
            pair, {"parameter": name, "parameters": 0, "a": pair[0], "b": pair[1]}
        )
        line["parameters"] += 1
    return list(found.values())


def scalars(a: Manifest, b: Manifest) -> list[Report]:
    """0-d states, as NAdam's `mu_product`, that both hold."""
    return [
        {"parameter": name, "scalar": key, "a": scalar.value, "b": theirs.scalars[key].value}
        for name, ours, theirs in _parameters(a, b)
        for key, scalar in ours.scalars.items()
        if key in theirs.scalars and not alike(scalar.value, theirs.scalars[key].value)
    ]


def groups(a: Manifest, b: Manifest) -> list[Report]:
    """Hyper-parameters that both hold, and which parameters belong to which group."""
    if a.groups is None or b.groups is None:
        return []
    found: list[Report] = []
    if len(a.groups) != len(b.groups):
        found.append({"group": None, "key": "groups", "a": len(a.groups), "b": len(b.groups)})
    for place, (ours, theirs) in enumerate(zip(a.groups, b.groups, strict=False)):
        one, other = _hyper(ours), _hyper(theirs)
        found += [
            {"group": place, "key": key, "a": value, "b": other[key]}
            for key, value in one.items()
            if key in other and not alike(value, other[key])
        ]
    found += [
        {"group": None, "key": f"group of {name}", "a": ours.group, "b": theirs.group}
        for name, ours, theirs in _parameters(a, b)
        if ours.group != theirs.group
    ]
    return found


def _hyper(group: dict[str, Any]) -> Report:
    """Hyper-parameters as JSON, 0-d tensors (a capturable optimizer's lr) by value."""
    return plain_group(
        {key: held.value if isinstance(held, Scalar) else held for key, held in group.items()}
    )


def states(a: Manifest, b: Manifest) -> list[Report]:
    """Counters, schedulers, loss scalers and client states that both hold.

    What they say of their engine (version, stage, size) is left out: that may differ.
    """
    found: list[Report] = []
    for key in ("counters", "lr_scheduler", "optimizer", "client_state"):
        if a.state.get(key) is not None and b.state.get(key) is not None:
            found += _states(to_json(a.state[key]), to_json(b.state[key]), key)
    return found


def _states(a: Any, b: Any, path: str) -> Iterator[Report]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in a:
            if key in b:
                yield from _states(a[key], b[key], f"{path}.{key}")
            else:
                yield {"key": f"{path}.{key}", "a": a[key], "b": None}
        for key in b:
            if key not in a:
                yield {"key": f"{path}.{key}", "a": None, "b": b[key]}
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for place, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from _states(one, other, f"{path}.{place}")
    elif not alike(a, b):
        yield {"key": path, "a": a, "b": b}


def alike(a: Any, b: Any) -> bool:
    """Equal; a NaN equals itself, and a tuple the list that JSON makes of it."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b) or (a != a and b != b)
