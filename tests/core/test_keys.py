"""Which keys may be texts of numbers, and both sides of a comparison with texts for all keys."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest

from zckpt.core.checkpoint.entries import Entry
from zckpt.core.checkpoint.inert import TensorName
from zckpt.core.checkpoint.keys import has_texts_alone, in_doubt, matched, with_texts
from zckpt.core.checkpoint.manifest import Manifest, Run
from zckpt.core.checkpoint.origin import Origin
from zckpt.core.storage.fragments import Runs

NOWHERE = Runs([])


def entry(name: str, axis: str = "") -> Entry:
    return Entry(name, "state", "F32", (2,), NOWHERE, axis=axis)


def manifest(state: Any = None, *entries: str, form: str = "x", **fields: Any) -> Manifest:
    """A manifest with this state, and tensors of these names in it."""
    known = {(name, "state"): entry(name) for name in entries}
    return Manifest("", form, Run(Origin(form)), known, {}, state=state or {}).replace(**fields)


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        ({"1": "a", "-2": "b"}, ["p"]),
        (OrderedDict([("0.9", 1)]), ["p"]),
        ({"1e+16": 1, "inf": 2}, ["p"]),
        ({"1": 0, "a": 0}, []),
        ({"01": 0}, []),
        ({"0.90": 0}, []),
        ({" 1": 0}, []),
        ({1: 0}, []),
        ({0.9: 0}, []),
        ({}, []),
        (["1", "2"], []),
        ({"a": {"7": 0}, "b": [{"8": {"9": [0]}}]}, ["p.a", "p.b.0", "p.b.0.'8'"]),
        ({"9" * 99: 0}, ["p"]),
        ({"9" * 100: 0}, []),
        ({"9" * 101: 0}, []),
        ({"9" * 5000: 0}, []),
    ],
)
def test_dictionaries_whose_keys_all_are_texts_of_numbers(value: Any, paths: list[str]) -> None:
    assert list(in_doubt(value, "p")) == paths


@pytest.mark.parametrize(("a", "b"), [("dcp", "x"), ("x", "dcp"), ("dcp", "dcp")])
def test_both_sides_have_texts_if_one_has_no_others(a: str, b: str) -> None:
    both = matched(manifest({"a": {1: 2}}, form=a), manifest({"a": {3: 4}}, form=b))
    assert [side.state for side in both] == [{"a": {"1": 2}}, {"a": {"3": 4}}]


def test_numbers_stay_if_both_sides_can_have_them() -> None:
    a, b = manifest({"a": {1: 2}}), manifest({"a": {"1": 2}})
    assert not has_texts_alone(a)
    assert matched(a, b) == (a, b)


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        ({1: "a", 0.5: "b", None: "c"}, {"1": "a", "0.5": "b", "None": "c"}),
        ({"a": [{1: ({2: 3},)}]}, {"a": [{"1": ({"2": 3},)}]}),
        ({1: {2: [3]}}, {"1": {"2": [3]}}),
        (OrderedDict([(2, 0), (1, 0)]), OrderedDict([("2", 0), ("1", 0)])),
        ({1: {2: 0}, "1": {3: 0}}, {1: {"2": 0}, "1": {"3": 0}}),
        ([1, "a"], [1, "a"]),
        (7, 7),
    ],
)
def test_keys_become_texts_as_far_as_these_differ(value: Any, texts: Any) -> None:
    changed = with_texts(manifest({"s": value})).state["s"]
    assert changed == texts
    assert type(changed) is type(value)


@pytest.mark.parametrize(
    ("value", "before", "after"),
    [
        ({1: TensorName("s.1")}, "s.1", "s.'1'"),
        ({"1": TensorName("s.'1'")}, "s.'1'", "s.'1'"),
        ({0.5: {"a": [TensorName("old")]}}, "old", "s.'0.5'.a.0"),
        ({"a": TensorName("old")}, "old", "old"),
        ([TensorName("old")], "old", "old"),
        ({None: TensorName("old")}, "old", "old"),
    ],
)
def test_a_tensor_under_a_number_has_the_name_of_its_text(
    value: Any, before: str, after: str
) -> None:
    changed = with_texts(manifest({"s": value}, before))
    assert changed.entries == {(after, "state"): entry(after)}
    assert f"TensorName(name={after!r})" in str(changed.state)


def test_a_tensor_that_stands_twice_has_one_name() -> None:
    twice = {1: TensorName("old"), 2: TensorName("old")}
    changed = with_texts(manifest({"s": twice}, "old"))
    assert changed.state == {"s": {"1": TensorName("s.'1'"), "2": TensorName("s.'1'")}}
    assert [*changed.entries] == [("s.'1'", "state")]


def test_keys_of_groups_become_texts() -> None:
    changed = with_texts(manifest(groups=({"lr": 1, "by": {0: TensorName("old")}},)))
    assert changed.groups == ({"lr": 1, "by": {"0": TensorName("groups.0.by.'0'")}},)


@pytest.mark.parametrize("groups", [(), None])
def test_no_groups_stay_none(groups: Any) -> None:
    assert with_texts(manifest(groups=groups)).groups == groups


def test_copies_get_the_names_of_their_tensors() -> None:
    copies = (entry("s.1", "stage"), entry("t", "stage"))
    state = {"s": {1: TensorName("s.1")}, "t": TensorName("t")}
    changed = with_texts(manifest(state, "s.1", "t", replicas=copies))
    assert [*changed.entries.values()] == [entry("s.'1'"), entry("t")]
    assert changed.replicas == (entry("s.'1'", "stage"), entry("t", "stage"))
