"""Which tensors of two checkpoints a proof compares, and which should be there."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from zckpt.core.checkpoint.entries import Entry, key_of
from zckpt.core.checkpoint.manifest import Manifest, Parameter, Run
from zckpt.core.checkpoint.optimizer_states import StateRow, States
from zckpt.core.checkpoint.origin import Origin
from zckpt.core.passes.plan import Match
from zckpt.core.storage.fragments import Extent, solid
from zckpt.errors import WrongOption
from zckpt.proof import pairs, unsupported

from ..conftest import texts

NUMBERS = count()


def entry(name: str, dtype: str = "F32", shape: tuple[int, ...] = (4,)) -> Entry:
    """A tensor that is no other one, even if it has the same name."""
    return Entry(*key_of(name), dtype, shape, solid(4, Extent(f"file {next(NUMBERS)}", 0, 32)))


def manifest(*entries: Entry, **fields: Any) -> Manifest:
    parameters = fields.pop("parameters", {item.parameter: Parameter((4,)) for item in entries})
    origin = fields.pop("origin", Origin())
    return Manifest(
        "/", "x", Run(origin), {item.key: item for item in entries}, parameters
    ).replace(**fields)


PARAM, MASTER, MOMENT = entry("w/param", "BF16"), entry("w/master"), entry("w/exp_avg")
RANDOM, BUFFER = entry("rng/state", "U8"), entry("b/param")


def test_each_tensor_of_one_checkpoint_is_read_once() -> None:
    """A weight with the master that it was rounded from, then the others, then copies."""
    copies = entry("w/param", "BF16"), entry("rng/state", "U8"), entry("gone/param")
    state = entry("?/thing")
    whole = manifest(
        PARAM, MASTER, MOMENT, RANDOM,
        replicas=copies,
        states=States((StateRow("thing", "unsupported", ("w",), "", tensors=(state,)),)),
    )  # fmt: skip
    assert pairs.own_matches(whole) == [
        Match(MASTER, PARAM, "rounded"),
        *(Match(MOMENT), Match(RANDOM), Match(state)),
        Match(copies[0], PARAM, copy=True),
    ]


def test_copies_of_either_side_are_compared_with_the_other_side() -> None:
    ours, theirs = entry("w/exp_avg"), entry("w/exp_avg")
    one, other = entry("w/exp_avg", shape=(2, 2)), entry("w/exp_avg", shape=(1, 4))
    matches, only_a, only_b = pairs.mutual_matches(
        manifest(ours, MASTER, replicas=(one,)),
        manifest(theirs, PARAM, replicas=(other,), origin=Origin(dp=2)),
    )
    assert matches == [
        Match(ours, theirs),
        Match(MASTER, PARAM, "rounded"),
        Match(one, theirs, copy=True),
        Match(ours, other, copy=True),
    ]
    assert (only_a, only_b) == ([], [])


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_rank_has_random_states_and_buffers_of_its_own(ranks: int) -> None:
    """Those of the same rank are compared, if the files are of the same ranks."""
    own = (entry("rng/state", "U8"), entry("b/param"), entry("w/exp_avg", shape=(1, 4)))
    its = (entry("b/param", shape=(2, 2)), *[entry("rng/state", "U8")] * ranks)
    matches, _, _ = pairs.mutual_matches(
        manifest(RANDOM, BUFFER, MOMENT, replicas=own, buffers=("b",)),
        manifest(RANDOM, BUFFER, MOMENT, replicas=its, buffers=("b",)),
    )
    assert matches == [
        *(Match(RANDOM, RANDOM), Match(BUFFER, BUFFER), Match(MOMENT, MOMENT)),
        Match(own[2], MOMENT, copy=True),
        *([Match(own[0], its[1], copy=True)] if ranks == 1 else []),
        Match(own[1], its[0], "shapes", copy=True),
    ]


def test_random_states_of_other_ranks_are_not_compared() -> None:
    copies = entry("rng/state", "U8"), entry("rng/state", "U8")
    sides = (
        manifest(RANDOM, replicas=copies[:1], origin=Origin(dp=2)),
        manifest(RANDOM, replicas=copies[1:], origin=Origin(dp=4)),
    )
    assert pairs.mutual_matches(*sides)[0] == [Match(RANDOM, RANDOM)]


def test_random_states_that_one_side_alone_has() -> None:
    state, copy = entry("own/state", "U8"), entry("own/state", "U8")
    sides = manifest(RANDOM, state, replicas=(copy,)), manifest(RANDOM)
    assert pairs.mutual_matches(*sides) == ([Match(RANDOM, RANDOM)], [("own", "state")], [])


def test_copies_of_another_type_are_not_compared() -> None:
    ours, theirs = entry("w/exp_avg"), entry("w/exp_avg", "BF16")
    sides = manifest(ours, replicas=(entry("w/exp_avg"),)), manifest(theirs)
    assert pairs.mutual_matches(*sides)[0] == [Match(ours, theirs, "values")]


def test_a_parameter_is_no_buffer_of_a_rank() -> None:
    copies = entry("b/param", shape=(2, 2)), entry("b/param", shape=(1, 4))
    sides = (
        manifest(BUFFER, replicas=copies[:1], buffers=("b",)),
        manifest(BUFFER, replicas=copies[1:]),
    )
    matches, _, _ = pairs.mutual_matches(*sides)
    assert matches == [
        Match(BUFFER, BUFFER),
        Match(copies[0], BUFFER, copy=True),
        Match(BUFFER, copies[1], copy=True),
    ]


def test_tensors_are_selected_by_their_names() -> None:
    matches = [Match(PARAM), Match(MOMENT)]
    assert pairs.selected(iter(matches), None) == matches
    assert pairs.selected(iter(matches), "*/exp*") == matches[1:]
    with pytest.raises(WrongOption):
        pairs.selected(matches, "v/*")


@pytest.mark.parametrize(
    ("match", "of_a", "of_b", "names"),
    [
        (Match(MASTER, PARAM, "rounded"), [MASTER], [PARAM], {"a": [], "b": ["w"]}),
        (Match(PARAM, MASTER, "rounded"), [PARAM], [MASTER], {"a": ["w"], "b": []}),
        # that side has the exact values too
        (Match(MASTER, PARAM, "rounded"), [MASTER], [PARAM, MASTER], {"a": [], "b": []}),
        (Match(MASTER, PARAM, "rounded", copy=True), [MASTER], [PARAM], {"a": [], "b": []}),
        (Match(MASTER, PARAM, "values"), [MASTER], [PARAM], {"a": [], "b": []}),
        (Match(PARAM, MASTER, "values"), [PARAM], [MASTER], {"a": [], "b": []}),
        (Match(MASTER, PARAM, "rounded"), [MASTER], [], {"a": [], "b": []}),
    ],
)
def test_weights_of_which_one_side_has_rounded_values_alone(
    match: Match, of_a: list[Entry], of_b: list[Entry], names: dict[str, list[str]]
) -> None:
    a, b = manifest(*of_a), manifest(*of_b)
    if not of_b:  # a buffer is no parameter
        b = manifest(PARAM, parameters={})
    assert pairs.only_rounded([Match(MOMENT), match], a, b) == names


@pytest.mark.parametrize(
    ("name", "has", "is_missing"),
    [
        ("w/exp_avg", [entry("v/exp_avg")], True),
        ("w/exp_avg", [entry("v/param")], False),
        ("w/master", [entry("v/param")], True),
        ("w/param", [entry("v/master")], True),
        ("w/param", [entry("v/exp_avg")], False),
        ("frozen/param", [entry("v/master")], False),
        ("frozen/param", [entry("v/param")], True),
        ("buffer/param", [entry("v/master")], False),
        ("w/state", [entry("v/state")], False),
    ],
)
def test_what_should_be_there(name: str, has: list[Entry], is_missing: bool) -> None:
    owner = manifest(parameters={"w": Parameter((4,)), "frozen": Parameter((4,), trainable=False)})
    assert pairs.missing([key_of(name)], owner, manifest(*has)) == (
        [key_of(name)] if is_missing else []
    )


def state(
    content: str, *tensors: Entry, key: str = "q", owners: tuple[str, ...] = ("w",)
) -> StateRow:
    return StateRow(key, "unsupported", owners, content, "why", tensors=tensors)


@pytest.mark.parametrize(
    ("ours", "theirs", "compared", "line"),
    [
        (state("1"), state("1"), True, None),
        (state("1"), state("2"), True, {"key": "q of w", "a": "1", "b": "2"}),
        (state("1", PARAM), state("1", PARAM), True, None),
        (state("1", PARAM), state("1", MASTER), True,
         {"key": "q of w", "a": "1 BF16 [4]", "b": "1 F32 [4]"}),
        (state("1", PARAM), state("1", entry("w/q", "BF16", (2, 2))), True,
         {"key": "q of w", "a": "1 BF16 [4]", "b": "1 BF16 [2, 2]"}),
        (state("1"), state("1", key="p"), False, None),
        (state("1"), state("1", owners=("v",)), False, None),
        (state(""), state("1"), False, None),
        (state("1"), state(""), False, None),
    ],
)  # fmt: skip
def test_states_that_are_not_read_are_compared_as_they_are(
    ours: StateRow, theirs: StateRow, compared: bool, line: dict[str, str] | None
) -> None:
    a, b = manifest(states=States((ours,))), manifest(states=States((theirs,)))
    is_equal = compared and line is None
    assert unsupported.pairs(a, b) == [
        Match(*both) for both in zip(ours.tensors, theirs.tensors, strict=True) if is_equal
    ]
    *rest, lines, notes = unsupported.rest(a, b)
    assert [side.states.rows for side in rest] == ([(), ()] if compared else [(ours,), (theirs,)])
    assert lines == ([] if line is None else [line])
    assert texts(notes) == (
        ["q of w: zckpt does not support this state; only its bytes were compared"]
        if is_equal
        else []
    )
