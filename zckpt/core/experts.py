"""Which layers of a model have experts, and over how many ranks are they spread?"""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field


class ExpertLayer(Struct, frozen=True):
    """A layer with `experts` experts over `ep` ranks; `name` is the path of its module."""

    name: str = field(name="layer")
    experts: int
    ep: int

    @property
    def local(self) -> int:
        """How many experts each rank has."""
        return self.experts // self.ep


def layers_of(engine: Any) -> tuple[ExpertLayer, ...]:
    """The layers that the facts of an engine state; none for other engines."""
    layers: tuple[ExpertLayer, ...] = getattr(engine, "experts", ())
    return layers
