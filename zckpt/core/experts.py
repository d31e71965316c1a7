"""Which layers of a model have experts, and over how many ranks are they spread?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct


class ExpertLayer(Struct, frozen=True):
    """A layer with `experts` experts over `ep` ranks; `name` is the path of its module."""

    name: str
    experts: int
    ep: int

    @property
    def local(self) -> int:
        """How many experts each rank has."""
        return self.experts // self.ep


def layers_to_json(layers: Sequence[ExpertLayer]) -> list[dict[str, Any]]:
    """Layers as JSON, as a universal manifest and `inspect` write them."""
    return [{"layer": each.name, "experts": each.experts, "ep": each.ep} for each in layers]


def layers_from_json(value: Any) -> tuple[ExpertLayer, ...]:
    """The inverse of `layers_to_json`; raises TypeError and KeyError for other documents."""
    if not isinstance(value, list):
        raise TypeError(f"experts is {value!r}, which is not a list of layers")
    layers = []
    for item in value:
        name, experts, ep = item["layer"], item["experts"], item["ep"]
        counts = type(experts) is int and type(ep) is int and 0 < ep <= experts
        if not isinstance(name, str) or not counts or experts % ep:
            raise TypeError(f"{item!r} is not a layer of experts")
        layers.append(ExpertLayer(name, experts, ep))
    return tuple(layers)


def layers_of(engine: Any) -> tuple[ExpertLayer, ...]:
    """The layers that the facts of an engine state; none for other engines."""
    layers: tuple[ExpertLayer, ...] = getattr(engine, "experts", ())
    return layers
