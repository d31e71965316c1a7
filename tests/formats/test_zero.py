"""The arithmetic of ZeRO partitions against DeepSpeed's own functions."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from hypothesis import given
from hypothesis import strategies as st

from zckpt.core.storage.fragments import Extent
from zckpt.formats import zero

counts = st.lists(st.integers(1, 40), min_size=1, max_size=12)
ranks = st.integers(1, 9)
STANDIN: Any = SimpleNamespace(flatten=lambda tensors: torch.cat([t.flatten() for t in tensors]))


def flattened(numels: list[int], alignment: int, paddings: list[int] | None = None) -> torch.Tensor:
    """DeepSpeed's flat group of tensors that count from one, its padding zeros."""
    whole = torch.arange(1, sum(numels) + 1)
    flat = DeepSpeedZeroOptimizer.flatten_dense_tensors_aligned(
        STANDIN, list(whole.split(numels)), alignment, param_padding=paddings
    )
    assert isinstance(flat, torch.Tensor)
    return flat


@given(st.integers(0, 40), ranks)
def test_round_robin_is_that_of_deepspeed(count: int, dp: int) -> None:
    order, places = DeepSpeedZeroOptimizer._round_robin_reorder(STANDIN, list(range(count)), dp)
    assert zero.round_robin(count, dp) == order
    assert zero.undo_round_robin(count, dp) == [places[place] for place in range(count)]


@given(counts, ranks)
def test_partitions_have_the_length_of_deepspeed(numels: list[int], dp: int) -> None:
    flat = flattened(numels, 2 * dp)
    assert zero.partition_size(sum(numels), dp) * dp == flat.numel()
    assert zero.partition_size(sum(numels), dp) in zero.partition_sizes(sum(numels), dp)
    assert flattened(numels, dp).numel() // dp in zero.partition_sizes(sum(numels), dp)


@given(counts, ranks)
def test_only_lengths_with_less_than_an_alignment_fit(numels: list[int], dp: int) -> None:
    total = sum(numels)
    held = flattened(numels, 2 * dp).numel()
    assert zero.fits(total, total, dp)
    assert zero.fits(total, held, dp)
    assert zero.fits(total, flattened(numels, dp).numel(), dp)
    assert not zero.fits(total, total - 1, dp)
    assert not zero.fits(total, total + 2 * dp, dp)


@given(counts, ranks, st.sampled_from([1, 2, 4]))
def test_elements_are_where_deepspeed_puts_them(numels: list[int], dp: int, size: int) -> None:
    paddings = zero.alignment_paddings(numels, size)
    flat = flattened(numels, 2 * dp, paddings)
    width = flat.numel() // dp
    group = zero.FlatGroup([Extent(f"{rank}", 8, width * 4) for rank in range(dp)], 4)
    starts = zero.offsets(numels, paddings)
    assert group.numel == flat.numel()
    first = 1
    for start, numel in zip(starts, numels, strict=False):
        found = {}
        for fragment in group.cut(start, start + numel):
            assert fragment.extent.length == 4 * (fragment.stop - fragment.start)
            place = int(fragment.extent.file) * width + (fragment.extent.offset - 8) // 4
            for element in range(fragment.start, fragment.stop):
                found[element] = int(flat[place + element - fragment.start])
        assert found == {element: first + element for element in range(numel)}
        first += numel


@given(counts, ranks, st.sampled_from([1, 2, 4]))
def test_ranks_own_what_deepspeed_says(numels: list[int], dp: int, size: int) -> None:
    paddings = zero.alignment_paddings(numels, size)
    width = flattened(numels, 2 * dp, paddings).numel() // dp
    group = zero.FlatGroup([Extent(f"{rank}", 0, width * 4) for rank in range(dp)], 4)
    starts = zero.offsets(numels, paddings)
    tensors = [torch.zeros(numel) for numel in numels]
    for rank in range(dp):
        inside, outside, first = DeepSpeedZeroOptimizer.get_partition_info(
            STANDIN, tensors, width, rank, paddings
        )
        owned = [
            tensor
            for tensor, start, numel in zip(tensors, starts, numels, strict=False)
            if group.owns(rank, start, start + numel)
        ]
        assert [id(tensor) for tensor in owned] == [id(tensor) for tensor in inside]
        assert len(outside) == len(tensors) - len(owned)
        if first:
            begins = [start for start in starts[:-1] if start < rank * width]
            assert first == rank * width - begins[-1]


@given(counts, st.sampled_from([1, 2, 4, 8, 16]))
def test_alignment_begins_parameters_at_16_bytes(numels: list[int], size: int) -> None:
    paddings = zero.alignment_paddings(numels, size)
    assert all(start * size % 16 == 0 for start in zero.offsets(numels, paddings)[:-1])
    assert all(0 <= padding * size < 16 for padding in paddings)
    assert paddings[-1] == 0


@given(counts, st.integers(1, 200))
def test_sub_groups_are_those_of_deepspeed(widths: list[int], limit: int) -> None:
    parameters = [
        SimpleNamespace(partition_numel=lambda width=width: width, place=place)
        for place, width in enumerate(widths)
    ]
    made = DeepSpeedZeroOptimizer_Stage3._create_fp16_sub_groups(
        SimpleNamespace(sub_group_size=limit), parameters
    )
    assert zero.sub_groups(widths, limit) == [[item.place for item in group] for group in made]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.data())
def test_any_range_of_uneven_partitions_is_cut(widths: list[int], data: st.DataObject) -> None:
    """Ranks of stripped files may hold less than others, or nothing; in any order of asking."""
    starts = list(accumulate(widths, initial=0))
    group = zero.FlatGroup([Extent(f"{i}", 100, 2 * w) for i, w in enumerate(widths)], 2)
    for _ in range(4):
        start = data.draw(st.integers(0, group.numel))
        stop = data.draw(st.integers(start, group.numel))
        found = {
            element: (int(f.extent.file), (f.extent.offset - 100) // 2 + element - f.start)
            for f in group.cut(start, stop)
            for element in range(f.start, f.stop)
        }
        expected = {
            first + place - start: (rank, place)
            for rank, (first, width) in enumerate(zip(starts, widths, strict=False))
            for place in range(width)
            if start <= first + place < stop
        }
        assert found == expected


@pytest.mark.parametrize(
    ("numels", "paddings", "places"),
    [([], [], [0]), ([3], [0], [0, 3]), ([3, 4], [5, 0], [0, 8, 12])],
)
def test_offsets_count_paddings(numels: list[int], paddings: list[int], places: list[int]) -> None:
    assert zero.offsets(numels, paddings) == places
