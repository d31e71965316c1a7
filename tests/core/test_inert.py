"""Inert values through JSON and back: equal in value and type, hostile ones refused."""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zckpt.core.inert import (
    MAX_DEPTH,
    Foreign,
    Global,
    Scalar,
    Size,
    TensorName,
    from_json,
    inside,
    map_values,
    plain_group,
    to_json,
)
from zckpt.errors import CorruptCheckpoint


def there_and_back(value: Any) -> Any:
    return from_json(json.loads(json.dumps(to_json(value), allow_nan=False)))


def same(left: Any, right: Any) -> bool:
    """Equal in type as well, NaN and the sign of zero included."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Foreign):
        parts = ("function", "arguments", "state", "how", "keywords", "appended", "items")
        return all(same(getattr(left, part), getattr(right, part)) for part in parts)
    if isinstance(left, Scalar):
        return left.dtype == right.dtype and same(left.value, right.value)
    if isinstance(left, float):
        if math.isnan(left) or math.isnan(right):
            return math.isnan(left) and math.isnan(right)
        return left == right and math.copysign(1, left) == math.copysign(1, right)
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same(list(left), list(right)) and same(list(left.values()), list(right.values()))
    return bool(left == right)


texts = st.text(st.characters(exclude_categories=())) | st.sampled_from(
    ["$", "$tuple", "$dict", "$object", "$float"]
)
dotted = st.from_regex(r"[a-zé_]{1,3}(\.[A-Z_é]{1,3}){1,3}", fullmatch=True)
simple = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(2**4090, 2**4100), texts, st.binary()
)
keys = st.one_of(
    simple, st.tuples(simple), st.frozensets(simple, max_size=2), st.builds(Global, dotted)
)
values = st.recursive(
    st.one_of(
        keys,
        st.floats(),
        st.complex_numbers(),
        st.binary().map(bytearray),
        st.sets(keys, max_size=3),
        st.lists(st.integers(0), max_size=4).map(Size),
        st.builds(Scalar, st.floats() | st.integers() | st.booleans(), st.sampled_from(["F32"])),
        st.builds(TensorName, texts),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(texts, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.builds(
            Foreign,
            st.builds(Global, dotted),
            st.lists(inner, max_size=2).map(tuple),
            inner,
            st.sampled_from(["call", "new"]),
            st.dictionaries(texts, inner, max_size=2),
            st.lists(inner, max_size=2),
            st.lists(st.tuples(keys, inner), max_size=2),
        ),
    ),
    max_leaves=8,
)


@given(values)
def test_any_value_survives_json(value: Any) -> None:
    assert same(there_and_back(value), value)


@given(values)
def test_the_same_value_gives_the_same_text(value: Any) -> None:
    assert json.dumps(to_json(value)) == json.dumps(to_json(there_and_back(value)))


def test_a_set_gives_the_same_text_in_any_order() -> None:
    first, second = {8, 0, "x", (1,)}, {"x", (1,), 0, 8}
    objects = [Foreign(Global("a.b"), (place,)) for place in range(5)]
    assert json.dumps(to_json(first)) == json.dumps(to_json(second))
    assert json.dumps(to_json(set(objects))) == json.dumps(to_json({*objects[::-1]}))


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        -0.0,
        {1: "a", "1": "b"},
        {True: 1, None: 2, 1.5: 3, (1, (2,)): 4},
        {"$tuple": [1]},
        {"$": 1},
        {"a": 1, "$b": 2},
        {"$object": {"function": 1}},
        {"$unknown": 1},
        (({(): [{}]},),),
        Foreign(Foreign(Global("m.a"), (1,)), ()),
        10**1000,
        -(2**5000),
        "\ud800",
        b"\0\xff",
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_json_has_not_survives(value: Any) -> None:
    assert same(there_and_back(value), value)


NESTED = {
    "list": lambda value: [value],
    "tuple": lambda value: (value,),
    "dict": lambda value: {"a": value},
    "dict of numbers": lambda value: {1: value},
    "ordered": lambda value: OrderedDict(a=value),
    "object": lambda value: Foreign(Global("m.a"), (value,)),
    "state": lambda value: Foreign(Global("m.a"), (), value),
    "keywords": lambda value: Foreign(Global("m.a"), (), None, "new", {"a": value}),
    "appended": lambda value: Foreign(Global("m.a"), appended=[value]),
    "items": lambda value: Foreign(Global("m.a"), items=[(1, value)]),
    "function": lambda value: Foreign(Foreign(Global("m.a")) if value is None else value),
}


@pytest.mark.parametrize("kind", NESTED)
def test_as_deep_as_it_is_written_it_is_read(kind: str) -> None:
    value, depth = None, 0
    while depth < 2 * MAX_DEPTH:
        value, depth = NESTED[kind](value), depth + 1
        try:
            document = to_json(value)
        except CorruptCheckpoint:
            break
        assert to_json(from_json(json.loads(json.dumps(document)))) == document
    assert MAX_DEPTH // 4 < depth <= MAX_DEPTH + 2


@pytest.mark.parametrize("kind", NESTED)
def test_what_holds_itself_is_refused(kind: str) -> None:
    inner: list[Any] = []
    inner.append(NESTED[kind](inner) if kind != "function" else Foreign(Global("m.a"), (inner,)))
    with pytest.raises(CorruptCheckpoint, match="refers to itself"):
        to_json(inner)


@pytest.mark.parametrize(
    "value", [object(), range(3), int, slice(1)], ids=lambda it: type(it).__name__
)
def test_what_no_pickle_holds_is_refused(value: Any) -> None:
    with pytest.raises(CorruptCheckpoint, match=type(value).__name__):
        to_json([value])


@pytest.mark.parametrize("tag", ["$", "$unknown", "$Tuple", "$eval"])
def test_an_unknown_tag_is_refused(tag: str) -> None:
    with pytest.raises(CorruptCheckpoint, match="unknown tag"):
        from_json([{tag: [1]}])


def test_hyper_parameters_read_as_people_expect() -> None:
    group = {"lr": 0.1, "betas": (0.9, 0.95), "eps": float("inf"), "fused": None}
    assert plain_group(group) == {
        "lr": 0.1,
        "betas": [0.9, 0.95],
        "eps": {"$float": "inf"},
        "fused": None,
    }
    json.dumps(plain_group({"betas": (float("nan"), (1, 2))}), allow_nan=False)


def test_the_name_of_what_a_call_returned_is_that_of_the_call() -> None:
    assert Foreign(Foreign(Global("a.b")), ()).name == "a.b"


@given(values)
def test_mapping_nothing_changes_nothing(value: Any) -> None:
    assert same(map_values(value, lambda item, _: item), value)


def test_mapping_reaches_every_part() -> None:
    def nested(item: Scalar) -> Any:
        parts = Foreign(Global("m.f"), (item,), item, "new", {"k": item}, [item], [(1, item)])
        return [(item,), {"a": item}, OrderedDict(b=item), parts, "text", 5, None]

    def add(item: Any, _: Any) -> Any:
        return second if item == first else map_values(item, add)

    first, second = Scalar(1, "F32"), Scalar(2, "F32")
    value, expected = nested(first), nested(second)
    assert same(map_values(value, add), expected)


def test_a_plain_key_is_one_of_a_regular_expression() -> None:
    letters = ("", "a", "Z", "_", "-", "1", "\u00e9", "\u0663", "\u00b2", " ", ".", "\n", "$")
    for key in map("".join, product(letters, repeat=3)):
        plain = re.fullmatch(r"[^\W\d][\w-]*", key)
        assert inside("a", key) == f"a.{key if plain else repr(key)}"
