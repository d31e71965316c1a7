"""What a reader finds of one flat buffer: its parameters, their tensors, what all of them share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...core.annotations import Any
from ...core.facts import StepPlace
from ...core.fragments import Fragments
from ...core.inert import Scalar
from ...core.manifest import Sighting
from ...core.values import field, valueclass
from ...training import steps


@valueclass
class BufferSlot:
    """One kind of tensor for all parameters of a flat buffer; `copies` are further ones."""

    name: str
    dtype: str
    fragments: Mapping[str, Fragments]
    copies: Sequence[tuple[str, Fragments]] = ()


@valueclass
class FlatBuffer:
    """One flat buffer: its parameters in the user's order, and what all of them share.

    `step_place` is where the true step stands; `sightings` are all places that state one. `own` are
    states that have no part for each parameter, by key, with the value of every rank; `starts` say
    where the parameters lie, by their names in that order.
    """

    group: int
    shapes: Mapping[str, tuple[int, ...]]
    slots: Sequence[BufferSlot]
    step: steps.Step | None
    step_place: StepPlace | None
    scalars: Mapping[str, Scalar]
    sightings: Sequence[Sighting]
    warnings: Sequence[str]
    own: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    starts: Mapping[str, int] = field(default_factory=dict)
