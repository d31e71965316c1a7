"""Names, steps and model ranks of a manifest; parameters as JSON; slots."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from zckpt.core.checkpoint.entries import Entry
from zckpt.core.checkpoint.grid import Grid, GridPlace
from zckpt.core.checkpoint.inert import Scalar
from zckpt.core.checkpoint.manifest import (
    RESERVED_SLOTS,
    Manifest,
    Parameter,
    Run,
    crc_from_json,
    fitting_roots,
    parameters_from_json,
    parameters_to_json,
    sizes_from_json,
    slot_key,
    slot_name,
    step_from_json,
)
from zckpt.core.checkpoint.optimizer_states import States, of_parameters
from zckpt.core.checkpoint.origin import Origin
from zckpt.core.storage.fragments import Extent, solid


def test_a_name_is_parameter_and_slot() -> None:
    entry = Entry("a/b.weight", "exp_avg", "BF16", (2, 3), solid(6, Extent("a", 0, 12)))
    assert (entry.parameter, entry.slot) == ("a/b.weight", "exp_avg")
    assert (entry.numel, entry.length) == (6, 12)


@pytest.mark.parametrize(
    ("steps", "shared"), [([], None), ([3, 3], 3), ([3, None], 3), ([3, 4], None), ([None], None)]
)
def test_a_manifest_has_a_step_where_all_share_one(
    steps: list[int | None], shared: int | None
) -> None:
    parameters = {str(i): Parameter((1,), step=step) for i, step in enumerate(steps)}
    assert Manifest("/", "x", Run(), {}, parameters).step == shared


@pytest.mark.parametrize(("source", "dp"), [({}, 1), ({"dp": None}, 1), ({"dp": 4}, 4)])
def test_a_source_without_ranks_has_one(source: dict[str, int], dp: int) -> None:
    assert Manifest("/", "x", Run(Origin.of_json(source)), {}, {}).dp == dp


# -- model ranks


def manifest(root: str) -> Manifest:
    return Manifest(root, "x", Run(), {}, {})


WHOLE, RANK, MODEL = manifest("whole"), manifest("rank"), manifest("model")


def moved(part: Manifest) -> Manifest:
    return replace(part, root="new " + part.root)


def test_a_joined_manifest_is_its_only_rank() -> None:
    joined = replace(WHOLE, models=(MODEL,))
    assert joined.rank_manifests == (joined,)
    assert joined.with_models == (joined,)
    assert joined.map_ranks(moved) is joined


def test_ranks_that_are_not_joined_change_with_their_models() -> None:
    apart = replace(WHOLE, ranks=(RANK, RANK), models=(MODEL,))
    assert apart.rank_manifests == (RANK, RANK)
    assert apart.with_models == (RANK, RANK, MODEL)
    changed = replace(WHOLE, ranks=(moved(RANK), moved(RANK)), models=(moved(MODEL),))
    assert apart.map_ranks(moved) == changed


def test_a_title_has_the_words_of_the_model_rank() -> None:
    assert WHOLE.titled("w") == "w"
    assert replace(WHOLE, place=GridPlace(1, Grid(pp=2))).titled("w") == "pipeline stage 1: w"


# -- several models


@pytest.mark.parametrize(
    ("model", "roots"),
    [
        ({"w": (2,), "b": (1,)}, ["a"]),
        ({"w": (2,)}, ["a", "b"]),
        ({"b": (9,)}, ["c"]),
        ({"other": (2,)}, []),
    ],
)
def test_a_root_fits_that_has_all_names_and_shapes(
    model: dict[str, tuple[int, ...]], roots: list[str]
) -> None:
    shapes = {"a.w": (2,), "a.b": (1,), "b.w": (2,), "c.w": (3,), "c.b": (9,)}
    known = {name: Parameter(shape) for name, shape in shapes.items()}
    own = {name: Parameter(shape) for name, shape in model.items()}
    assert fitting_roots("abc", known, own) == roots


# -- JSON


@pytest.mark.parametrize("step", [None, 0, 3, 2.5, -1, 2**63 - 1, 1 - 2**63])
def test_a_step_is_a_number_or_none(step: float | int | None) -> None:
    assert step_from_json(step) == step


@pytest.mark.parametrize("step", ["3", True, [3], 2**63, -(2**63), float("inf"), float("nan")])
def test_other_steps_are_refused(step: Any) -> None:
    with pytest.raises(TypeError, match="steps are not numbers"):
        step_from_json(step)


@pytest.mark.parametrize("sizes", [[], [0], [3, 0, 2]])
def test_a_shape_has_sizes(sizes: list[int]) -> None:
    assert sizes_from_json(sizes) == tuple(sizes)


@pytest.mark.parametrize("sizes", [[-1], [2, -3], [1.5], ["2"], [True], 3, None])
def test_other_shapes_are_refused(sizes: Any) -> None:
    with pytest.raises(ValueError, match="Expected"):
        sizes_from_json(sizes)


def test_a_checksum_has_eight_digits() -> None:
    assert crc_from_json("000000ff") == 255
    for text in ("ff", "000000fF", "000000fg", "000000ff0", "000000ff\n", "0x0000ff", 255, None):
        with pytest.raises(ValueError, match="Expected"):
            crc_from_json(text)


def test_a_parameter_of_fewer_keys_is_read() -> None:
    """Before zckpt kept numbers and second names."""
    document = {"w": {"shape": [2], "trainable": True, "group": 0, "step": 3}}
    assert parameters_from_json(document) == ({"w": Parameter((2,), True, 0, 3, ())}, [])


def test_scalars_have_their_type_in_json_and_their_shape_if_they_have_one() -> None:
    scalars = {"k": Scalar(3, "int"), "d": Scalar(0.5, "F32"), "one": Scalar(2, "I64", (1, 1))}
    parameters = {"w": Parameter((2,), group=0, step=3)}
    numbers = of_parameters("number", {"w": scalars})
    document = parameters_to_json(parameters, States(tuple(numbers)))
    assert document["w"]["scalars"] == {
        "k": {"value": 3, "dtype": "int"},
        "d": {"value": 0.5, "dtype": "F32"},
        "one": {"value": 2, "dtype": "I64", "shape": [1, 1]},
    }
    assert parameters_from_json(document) == (parameters, numbers)


@pytest.mark.parametrize(
    ("scalar", "message"),
    [
        ({"dtype": "complex"}, "a number has the unknown type .*complex"),
        ({"dtype": "F8_E4M3"}, "a number has the unknown type .*F8_E4M3"),
        ({"dtype": "F32", "shape": [2]}, r"a number has the shape \[2\]"),
        ({"dtype": "F32", "shape": [1, 0]}, r"a number has the shape \[1, 0\]"),
    ],
)
def test_scalars_of_other_types_and_shapes_are_refused(
    scalar: dict[str, Any], message: str
) -> None:
    document = parameters_to_json({"w": Parameter((2,))}, States())
    document["w"]["scalars"] = {"d": {"value": 1, **scalar}}
    with pytest.raises(ValueError, match=message):
        parameters_from_json(document)


# -- slots


def test_usual_slots_keep_their_names() -> None:
    for name in ("exp_avg", "exp_avg_sq", "momentum_buffer", "sum", "k1", "k_ab"):
        assert slot_name(name) == name
        assert slot_key(name) == name  # also where `_ab` would be an escape
    assert slot_name("Exp-Avg") == "esc__45xp_2d_41vg"


@pytest.mark.parametrize("key", ["model", "param", "master", "state", "manifest"])
def test_no_state_of_an_optimizer_takes_the_name_of_another_tensor_or_file(key: str) -> None:
    """`param`, `master` and `state` are slots of their own; files of format v1 have the others."""
    assert (slot_name(key), slot_key(f"esc_{key}")) == (f"esc_{key}", key)


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
