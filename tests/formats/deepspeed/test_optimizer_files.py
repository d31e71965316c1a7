"""Which elements of a flat buffer a rank's optimizer file has."""

from __future__ import annotations

from itertools import accumulate

import pytest

from zckpt.formats.deepspeed.optimizer_files import _RankPartition
from zckpt.formats.deepspeed_states.target import TargetBuffer


def buffer(sizes: dict[str, int], padding: int = 0) -> TargetBuffer:
    numels, paddings = [*sizes.values()], [padding] * len(sizes)
    starts = [*accumulate((numel + padding for numel in numels), initial=0)]
    return TargetBuffer(0, [*sizes], numels, paddings, starts, 3, {}, {}, "F32")


def partitions(own: TargetBuffer, dp: int) -> list[_RankPartition]:
    return [_RankPartition(own, dp, rank) for rank in range(dp)]


@pytest.mark.parametrize("dp", [1, 2, 3, 5])
@pytest.mark.parametrize("padding", [0, 2])
def test_ranks_have_every_element_once(dp: int, padding: int) -> None:
    sizes = {"a": 5, "b": 1, "c": 9, "d": 4}
    own = buffer(sizes, padding)
    held = [
        (name, rank * part.size + place - own.starts[own.names.index(name)])
        for rank, part in enumerate(partitions(own, dp))
        for name, _, start, stop in part.overlaps()
        for place in range(start, stop)
    ]
    assert held == [(name, place) for name, numel in sizes.items() for place in range(numel)]
    assert sum(part.owned for part in partitions(own, dp)) == own.starts[-1]


def test_the_last_ranks_may_have_padding_alone() -> None:
    """The buffer has 2 elements, and a partition 2: DeepSpeed fills up to a multiple of 2 * dp."""
    first, *others = partitions(buffer({"a": 2}), 3)
    assert (first.size, first.owned, [part.owned for part in others]) == (2, 2, [0, 0])
    assert [[*part.mapping()] for part in (first, *others)] == [["a"], [], []]


def test_slices_of_one_parameter_are_one_address() -> None:
    """As AutoEP stacks experts: the engine knows the whole by one name."""
    first, second = partitions(buffer({"moe.experts.w1.0": 3, "moe.experts.w1.1": 3, "z": 2}), 2)
    addresses = [
        {name: address.state for name, address in part.mapping().items()}
        for part in (first, second)
    ]
    assert addresses == [
        {"moe.experts.w1": {"numel": 4, "start": 0}},
        {"moe.experts.w1": {"numel": 2, "start": 0}, "z": {"numel": 2, "start": 2}},
    ]
