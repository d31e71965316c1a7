"""What is in a directory without weights of a model: masters that stand for them, or what else?

A save of the optimizer alone has masters under the keys of weights. So they tell the names, the
shapes and the values of weights. Flat buffers are not read without weights, which prove their
layout (buffers/placing.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ...errors import MissingData, UnsupportedCheckpoint, listed
from ...files.dcpfile import Items, TensorItem
from .common import FLAT, MODEL_SPACE

OF_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<slot>[^.]+)\.(?P<key>.+)")
MASTERS = ("param", "fp32_param")
WITH_MODEL = "load the run in Megatron-Core, and save it with its model"


def trained_keys(items: Items) -> set[str]:
    """The keys of weights that have a state of the optimizer."""
    matches = (OF_OPTIMIZER.fullmatch(key) for key, item in items.items() if item)
    return {match["key"] for match in matches if match}


def masters_of(items: Items) -> dict[str, tuple[str, TensorItem]]:
    """The masters of a directory by the keys of their weights, with their own keys."""
    masters = {}
    for key, item in items.items():
        match = OF_OPTIMIZER.fullmatch(key)
        if match and item is not None and match["slot"] in MASTERS:
            masters[match["key"]] = (key, item)
    return masters


def require_masters(folder: str, items: Items, sharding: str) -> None:
    """Raises for a directory without weights whose masters do not stand for them.

    UnsupportedCheckpoint for flat buffers, MissingData if it has no masters.
    """
    if sharding in (*FLAT, MODEL_SPACE):
        raise UnsupportedCheckpoint(
            f"{folder} has no weights of a model, and the optimizer's states are in flat buffers "
            f"({sharding}), which zckpt reads beside weights alone",
            hint=WITH_MODEL,
        )
    if not masters_of(items):
        states = {match["slot"] for key in items if (match := OF_OPTIMIZER.fullmatch(key))}
        firsts = (re.split(r"[./]", key)[0] for key in items)
        raise without_weights(folder, states, (first for first in firsts if first != "optimizer"))


def without_weights(folder: str, states: Iterable[str], others: Iterable[str]) -> MissingData:
    """The error for a directory without weights and masters; it says what there is.

    `states` are the optimizer's, `others` are the first words of other keys.
    """
    what = [*(f"{state} of an optimizer" for state in sorted(states)), *dict.fromkeys(others)]
    return MissingData(
        f"{folder} has neither weights of a model nor masters"
        + (f", only {listed(what)}" if what else ""),
        hint=f"the weights may be in another directory; if not, {WITH_MODEL}",
    )
