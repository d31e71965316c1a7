"""What a reader finds of one flat buffer: its parameters, their tensors, what all of them share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from ...core.facts import StepPlace
from ...core.fragments import Fragments
from ...core.inert import Scalar, inside
from ...core.manifest import Entry, Sighting, Unread
from ...core.unread import unread
from ...files.torchfile import TorchFile
from ...training import steps
from .states import EngineStates, kept


class BufferSlot(Struct, frozen=True):
    """One kind of tensor for all parameters of a flat buffer; `copies` are further ones."""

    name: str
    dtype: str
    fragments: Mapping[str, Fragments]
    copies: Sequence[tuple[str, Fragments]] = ()


class FlatBuffer(Struct, frozen=True):
    """One flat buffer: its parameters in the user's order, and what all of them share.

    `step_place` is where the true step stands; `sightings` are all places that state one. `own` are
    states that have no part for each parameter, by key, with the value of every rank, which lies in
    its one of the `files`; `starts` say where the parameters lie, by their names in that order.
    """

    group: int
    shapes: Mapping[str, tuple[int, ...]]
    slots: Sequence[BufferSlot]
    step: steps.Step | None
    step_place: StepPlace | None
    scalars: Mapping[str, Scalar]
    sightings: Sequence[Sighting]
    warnings: Sequence[str]
    own: Mapping[Any, Sequence[Any]] = field(default_factory=dict)
    starts: Mapping[str, int] = field(default_factory=dict)
    files: Sequence[TorchFile] = ()


def states_of_partitions(
    ranks: EngineStates, buffers: Sequence[FlatBuffer], entries: dict[str, Entry]
) -> tuple[list[dict[str, Any]], list[Unread]]:
    """States of the ranks' parts of flat buffers that no parameter has a part of.

    SOAP's matrices, and 8-bit optimizers' scales of 256 elements. An elastic save cuts its padding
    off them, and ranks that share experts have parts of other buffers each: these are not read.
    `entries` gets the tensors of the others.
    """
    partitions: list[dict[str, Any]] = []
    others: list[Unread] = []
    kind = "a run with experts" if ranks.model.get("num_experts") else ""
    kind = "an elastic save" if ranks.elastic else kind
    reason = f"in {kind}, zckpt does not read a state of the ranks' parts of flat buffers"
    for number, buffer in enumerate(buffers):
        path = f"optimizer.partitions.{number if kind else len(partitions)}"
        states = {}
        for key, values in buffer.own.items():
            tensors: dict[str, Entry] = {}
            states[key] = [
                kept(value, inside(f"{path}.{rank}", key), file, tensors)
                for rank, (value, file) in enumerate(zip(values, buffer.files, strict=True))
            ]
            if kind:
                others.append(unread(key, buffer.starts, reason, states[key], tensors.values()))
            else:
                entries |= tensors
        if states and not kind:
            partitions.append(
                {
                    "stage": ranks.stage,
                    "dp": ranks.dp,
                    "parameters": list(buffer.starts),
                    "starts": list(buffer.starts.values()),
                    "states": states,
                }
            )
    return partitions, others
