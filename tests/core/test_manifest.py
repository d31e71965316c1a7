"""Names and steps of a manifest: entries, sources without ranks, slots."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zckpt.core.fragments import Extent, solid
from zckpt.core.manifest import RESERVED_SLOTS, Entry, Manifest, Parameter, slot_key, slot_name
from zckpt.core.origin import Origin


def test_a_name_is_parameter_and_slot() -> None:
    entry = Entry("a/b.weight/exp_avg", "BF16", (2, 3), solid(6, Extent("a", 0, 12)))
    assert (entry.parameter, entry.slot) == ("a/b.weight", "exp_avg")
    assert (entry.numel, entry.length) == (6, 12)


@pytest.mark.parametrize(
    ("steps", "shared"), [([], None), ([3, 3], 3), ([3, None], 3), ([3, 4], None), ([None], None)]
)
def test_a_manifest_has_a_step_where_all_share_one(
    steps: list[int | None], shared: int | None
) -> None:
    parameters = {str(i): Parameter((1,), step=step) for i, step in enumerate(steps)}
    assert Manifest("/", "x", Origin(), {}, parameters).step == shared


@pytest.mark.parametrize(("source", "dp"), [({}, 1), ({"dp": None}, 1), ({"dp": 4}, 4)])
def test_a_source_without_ranks_has_one(source: dict[str, int], dp: int) -> None:
    assert Manifest("/", "x", Origin.of_json(source), {}, {}).dp == dp


# -- slots


def test_usual_slots_keep_their_names() -> None:
    for name in ("exp_avg", "exp_avg_sq", "momentum_buffer", "sum", "k1"):
        assert slot_name(name) == name
    assert slot_name("Exp-Avg") == "esc__45xp_2d_41vg"


@given(
    st.text(st.characters(exclude_categories=()))
    | st.sampled_from([*RESERVED_SLOTS, "esc_", "esc_a", "a\n", "é/.."])
)
def test_any_key_is_a_slot_and_comes_back(key: str) -> None:
    slot = slot_name(key)
    assert re.fullmatch("[a-z0-9_]+", slot)
    assert slot not in RESERVED_SLOTS
    assert slot_key(slot) == key


@given(st.text(), st.text())
def test_different_keys_are_different_slots(first: str, second: str) -> None:
    assert (slot_name(first) == slot_name(second)) == (first == second)
