"""The one rule for what stands for a weight, as tables of cases."""

from __future__ import annotations

import pytest

from zckpt.core.checkpoint.entries import Entry
from zckpt.core.checkpoint.weights import (
    Weight,
    agreement,
    counterpart,
    is_optimizers,
    is_rounded,
    is_widened,
    states_by_weight,
    weight_of,
)
from zckpt.core.storage.fragments import Extent, solid
from zckpt.errors import MissingData


def weight(param: str | None = None, master: str | None = None) -> Weight:
    """A weight whose entries have these types."""
    entries = {
        ("w", slot): entry(slot, dtype)
        for slot, dtype in (("param", param), ("master", master))
        if dtype is not None
    }
    return weight_of(entries, "w")


def entry(slot: str, dtype: str, shape: tuple[int, ...] = (2, 3)) -> Entry:
    return Entry("w", slot, dtype, shape, solid(6, Extent("a", 0, 48)))


@pytest.mark.parametrize(
    ("source", "slot", "dtype", "from_masters", "chosen"),
    [
        (weight("BF16", "F32"), "param", "BF16", False, "param"),
        (weight("BF16", "F32"), "param", "BF16", True, "master"),
        (weight("BF16", "F32"), "param", "F16", False, "master"),
        (weight("BF16", "F32"), "param", "F32", False, "master"),
        (weight("F32", "F32"), "param", "F32", False, "param"),
        (weight("F32", "F32"), "master", "F32", False, "master"),
        (weight("BF16", "F32"), "master", "F32", False, "master"),
        (weight("BF16", "F32"), "master", "F64", False, "master"),
        (weight("BF16"), "param", "BF16", True, "param"),
        (weight("BF16"), "param", "F16", False, "param"),
        (weight("BF16"), "master", "F32", False, "param"),
        (weight(None, "F32"), "param", "BF16", False, "master"),
        (weight(None, "F32"), "master", "F32", False, "master"),
    ],
)
def test_supply(source: Weight, slot: str, dtype: str, from_masters: bool, chosen: str) -> None:
    assert source.supply(slot, dtype, from_masters).slot == chosen
    assert from_masters or source.supply(slot, dtype).slot == chosen


@pytest.mark.parametrize(
    ("source", "trained", "stored"),
    [
        (weight("BF16", "F32"), "master", "param"),
        (weight("BF16"), "param", "param"),
        (weight(None, "F32"), "master", "master"),
    ],
)
def test_trained_and_stored(source: Weight, trained: str, stored: str) -> None:
    assert (source.trained.slot, source.stored.slot) == (trained, stored)


def test_a_weight_without_entries_is_refused() -> None:
    lacking = weight_of({("w", "exp_avg"): entry("exp_avg", "F32")}, "w")
    for choice in (
        lambda: lacking.supply("param", "F32"),
        lambda: lacking.supply("master", "F32"),
        lambda: lacking.trained,
        lambda: lacking.stored,
    ):
        with pytest.raises(MissingData, match="no weight w"):
            choice()


@pytest.mark.parametrize(
    ("master", "param", "how"),
    [
        ("F32", "BF16", "rounded"),
        ("F32", "F16", "rounded"),
        ("F64", "F32", "rounded"),
        ("F32", "F8_E4M3", None),
        ("F32", "F32", "bits"),
        ("BF16", "BF16", "bits"),
        ("BF16", "F16", None),  # a master of 16 bits is not what other 16 bits were rounded from
        ("BF16", "F32", None),
        ("F32", "I64", None),
    ],
)
def test_agreement(master: str, param: str, how: str | None) -> None:
    assert agreement(entry("master", master), entry("param", param)) == how
    assert agreement(entry("master", master), entry("param", param, (6,))) is None


@pytest.mark.parametrize(
    ("narrow", "wide", "lost"),
    [
        ("BF16", "F32", True),
        ("F16", "F64", True),
        ("F32", "F64", False),
        ("F32", "F32", False),
        ("BF16", "F16", False),
        ("I32", "F32", False),
        ("BF16", None, False),
    ],
)
def test_widened(narrow: str, wide: str | None, lost: bool) -> None:
    assert is_widened(narrow, wide) is lost


@pytest.mark.parametrize(
    ("slot", "dtype", "own", "others", "expected"),
    [
        ("param", "BF16", weight("BF16"), weight("F16", "F32"), ("master", "rounded")),
        ("param", "F32", weight("F32"), weight("BF16", "F32"), ("master", "bits")),
        ("param", "BF16", weight("BF16"), weight("F32"), ("param", "rounded")),
        ("param", "F32", weight("F32"), weight("BF16"), ("param", "rounded")),
        # beside a master, a wide `param` is not what the other's was rounded from
        ("param", "F32", weight("F32", "F32"), weight("BF16"), None),
        ("master", "F32", weight("F32", "F32"), weight("BF16"), ("param", "rounded")),
        ("master", "F32", weight(None, "F32"), weight("F32"), ("param", "bits")),
        ("master", "F32", weight(None, "F32"), weight(None, "F64"), None),
        ("master", "F32", weight("F32", "F32"), weight("F64"), ("param", "rounded")),
        ("master", "F64", weight(None, "F64"), weight("F32"), None),
        ("param", "F16", weight("F16"), weight("BF16"), None),
        ("param", "F16", weight("F16"), weight(), None),
    ],
)
def test_counterpart(
    slot: str, dtype: str, own: Weight, others: Weight, expected: tuple[str, str] | None
) -> None:
    known = counterpart(entry(slot, dtype), others, own)
    assert (known and (known[0].slot, known[1])) == expected


def test_states_of_the_optimizer() -> None:
    slots = ["param", "master", "state", "exp_avg", "momentum_buffer"]
    assert list(filter(is_optimizers, slots)) == ["exp_avg", "momentum_buffer"]


def test_the_optimizers_states_of_each_weight() -> None:
    slots = ("param", "exp_avg", "master", "state", "exp_avg_sq")
    entries = [
        *(entry(slot, "F32") for slot in slots),
        Entry("b", "param", "F32", (), solid(1, Extent("a", 0, 4))),
    ]
    assert states_by_weight(entries) == {"w": {"exp_avg", "exp_avg_sq"}}


def test_no_number_is_rounded_to_its_own_type() -> None:
    assert is_rounded("F64", "F32")
    assert not is_rounded("F32", "F32")
