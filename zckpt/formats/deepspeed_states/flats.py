"""What a reader finds of one flat buffer: its parameters, their tensors, what all of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ...core.annotations import Any
from ...core.facts import StepPlace
from ...core.fragments import Fragments
from ...core.inert import Scalar, inside
from ...core.manifest import Sighting, Unread
from ...core.values import field, valueclass
from ...files.torchfile import TorchFile
from ...training import steps
from .states import EngineStates


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
    own: Mapping[Any, Sequence[Any]] = field(default_factory=dict)
    starts: Mapping[str, int] = field(default_factory=dict)


def states_of_partitions(
    ranks: EngineStates,
    buffers: Sequence[FlatBuffer],
    kept: Callable[[Any, str, TorchFile], Any],
) -> tuple[list[dict[str, Any]], list[Unread]]:
    """States of the ranks' parts of flat buffers that no parameter has a part of.

    SOAP's matrices, and 8-bit optimizers' scales of 256 elements. An elastic save cuts its padding
    off them, and ranks that share experts have parts of other buffers each: these are not read.
    `kept` enters the tensors of a value in a file, under a path.
    """
    partitions: list[dict[str, Any]] = []
    unread = []
    for buffer in buffers:
        if ranks.elastic or ranks.model.get("num_experts"):
            kind = "an elastic save" if ranks.elastic else "a run with experts"
            reason = f"in {kind}, zckpt does not read a state of the ranks' parts of flat buffers"
            unread += [Unread(str(key), tuple(buffer.starts), reason) for key in buffer.own]
            continue
        path = f"optimizer.partitions.{len(partitions)}"
        states = {
            key: [
                kept(value, inside(f"{path}.{rank}", key), ranks.optimizers[rank])
                for rank, value in enumerate(values)
            ]
            for key, values in buffer.own.items()
        }
        if states:
            partitions.append(
                {
                    "stage": ranks.stage,
                    "dp": ranks.dp,
                    "parameters": list(buffer.starts),
                    "starts": list(buffer.starts.values()),
                    "states": states,
                }
            )
    return partitions, unread
