"""Finds tensors that are stored next to the optimizer's state dict, in the dictionary around it.

They were stored by the program itself, or by a wrapper around the optimizer: Lookahead with its
slow weights, or a 16-bit wrapper with masters. A conversion to another torch program keeps these
tensors as a part of the program's state; other engines do not read them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from .facts import StateDictEngine
from .inert import Scalar, TensorName
from .manifest import Manifest


def wrapped(manifest: Manifest) -> dict[str, Any]:
    """Finds the values with tensors that are stored next to the optimizer's state dict.

    For example, the slow weights of Lookahead get the key `around.slow`: `around.` and the value's
    name. No state of a parameter has such a key. Random states are left out: they belong to the
    program.
    """
    values = _find(manifest)[1]
    return {
        _name(key): value
        for key, value in values.items()
        if not _is_random(key) and _holds_tensor(value)
    }


def without_wrapped(manifest: Manifest, gone: Collection[str]) -> dict[str, Any]:
    """Returns `manifest.state` without the values whose keys are in `gone`.

    Only values next to the optimizer's state dict are removed. A key is `around.` and the value's
    name, as in `around.slow`.
    """
    path, values = _find(manifest)
    rest = {key: value for key, value in values.items() if _name(key) not in gone}
    if len(rest) == len(values):
        return manifest.state
    return {**manifest.state, "client_state": _with(manifest.state["client_state"], path, rest)}


def _name(key: Any) -> str:
    return f"around.{key}"


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensor, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensor, value))
    return isinstance(value, (TensorName, Scalar))


def _is_random(key: Any) -> bool:
    return "rng" in str(key).lower().split("_")


def _find(manifest: Manifest) -> tuple[tuple[Any, ...], dict[Any, Any]]:
    """Finds the dictionary around the optimizer's state dict: its path, and its other values.

    Both are empty if the dictionary is the program's own: no key of the path names an optimizer, or
    the model lies in the dictionary too.
    """
    engine = manifest.run.engine
    if not isinstance(engine, StateDictEngine) or not engine.optimizer:
        return (), {}
    value: Any = manifest.state.get("client_state")
    is_named = False
    for end, key in enumerate(engine.optimizer[:-1], 1):
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            break
        is_named = is_named or "optim" in str(key).lower()
        path = engine.optimizer[:end]
        if is_named and isinstance(value, Mapping) and engine.model[:end] != path:
            return path, dict(value)
    return (), {}


def _with(value: Any, path: tuple[Any, ...], rest: Any) -> Any:
    """Copies nested dictionaries and lists, with `rest` as the value at `path`."""
    if not path:
        return rest
    inner = _with(value[path[0]], path[1:], rest)
    if isinstance(value, list):
        return [inner if place == path[0] else item for place, item in enumerate(value)]
    return {**value, path[0]: inner}
