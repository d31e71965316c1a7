"""Which tensors stand around the state dict of the optimizer whose states are read?

A program has put another optimizer around it (a Lookahead's slow weights, the masters of a 16-bit
wrapper), or has put them there itself. Programs of torch keep them as their own state; no other
engine reads them there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from .facts import StateDictEngine
from .inert import Scalar, TensorName
from .manifest import Manifest


def wrapped(manifest: Manifest) -> dict[str, Any]:
    """The values with tensors in them, by keys that no state of a parameter has: `around.slow`.

    Random states are the program's own: no optimizer needs them.
    """
    values = _find(manifest)[1]
    return {
        _name(key): value
        for key, value in values.items()
        if not _is_random(key) and _holds_tensor(value)
    }


def without_wrapped(manifest: Manifest, gone: Collection[str]) -> dict[str, Any]:
    """The manifest's state without those of these keys."""
    path, values = _find(manifest)
    rest = {key: value for key, value in values.items() if _name(key) not in gone}
    if len(rest) == len(values):
        return manifest.state
    return {**manifest.state, "client_state": _with(manifest.state["client_state"], path, rest)}


def _name(key: Any) -> str:
    return f"around.{key}"


def _holds_tensor(value: Any) -> bool:
    """Whether a value is a tensor, or has one in it; those of one number are `Scalar`s."""
    if isinstance(value, Mapping):
        return any(map(_holds_tensor, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensor, value))
    return isinstance(value, (TensorName, Scalar))


def _is_random(key: Any) -> bool:
    """Whether it is `rng`, `torch_rng_state`."""
    return "rng" in str(key).lower().split("_")


def _find(manifest: Manifest) -> tuple[tuple[Any, ...], dict[Any, Any]]:
    """The keys in the program's state that lead to the dictionary, and what is in it.

    One of them names an optimizer, and the model is not there: else it is the program's.
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
    """A value with `rest` at a path in it."""
    if not path:
        return rest
    inner = _with(value[path[0]], path[1:], rest)
    if isinstance(value, list):
        return [inner if place == path[0] else item for place, item in enumerate(value)]
    return {**value, path[0]: inner}
