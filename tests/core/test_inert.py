"""Inert values through JSON and back: equal in value and type, hostile ones refused."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import OrderedDict
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zckpt.core.checkpoint import inert
from zckpt.core.checkpoint.inert import (
    ITSELF,
    MAX_DEPTH,
    MAX_EQUAL_HASHES,
    MAX_NESTING,
    MAX_PATH,
    Foreign,
    Global,
    Scalar,
    Size,
    TensorName,
    alike,
    by_value,
    from_json,
    inside,
    is_dotted,
    map_values,
    plain_group,
    require_spread,
    require_tree,
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
        1 - 2j,
        pytest.param({2, "a"}, id="set of two types"),  # whose order differs by process
        frozenset({1}),
        Size((3, 4)),
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


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a.b", True), ("_a.b.C1", True), ("a", False), ("a.1", False), ("a..b", False), (5, False)],
)
def test_dotted_names(name: Any, expected: bool) -> None:
    assert is_dotted(name) == expected


@pytest.mark.parametrize("name", ["torch", "os.system\n.", "a.b c", ""])
def test_a_global_has_a_dotted_name(name: str) -> None:
    with pytest.raises(CorruptCheckpoint, match="is not the name of a class or function"):
        Global(name)


def test_an_instance_has_its_attributes_as_state() -> None:
    made = Foreign.instance("m.A", x=1)
    assert (made.name, made.arguments, made.state, made.how) == ("m.A", (), {"x": 1}, "new")
    assert Foreign.instance("m.A").state is None


@pytest.mark.parametrize(
    ("scalar", "number"),
    [(Scalar(2.0, "int"), 2), (Scalar(2, "float"), 2.0), (Scalar(1, "bool"), True)],
)
def test_a_python_number_is_taken_out(scalar: Scalar, number: float) -> None:
    assert same(scalar.unwrapped(), number)


def test_the_number_of_a_tensor_keeps_its_type() -> None:
    scalar = Scalar(2, "F32", (1,))
    assert scalar.unwrapped() is scalar


@pytest.mark.parametrize("kind", [list, tuple, Size])
def test_plain_items_are_not_mapped(kind: type) -> None:
    asked = []
    plain = [None, True, 1, 1.5, 2j, "c", b"d", bytearray(b"e")]
    value = kind([1, TensorName("a/b"), *plain])
    changed = map_values(value, lambda item, key: asked.append((item, key)) or 5)
    assert same(changed, kind([1, 5, *plain]))
    assert asked == [(TensorName("a/b"), 1)]


def test_a_long_path_ends_with_a_hash() -> None:
    front = "a" * (MAX_PATH - 2)
    assert inside(front, "b") == f"{front}.b"
    full = f"{front}.bc"
    digest = hashlib.sha256(full.encode()).hexdigest()
    assert inside(front, "bc") == f"{'a' * (MAX_PATH // 2)}...{digest[:32]}"


# -- how much work a value is


def shared() -> list[Any]:
    inner: list[Any] = []
    return [[inner], inner]


def of_module() -> OrderedDict[str, Any]:
    state = OrderedDict(a=1)
    state._metadata = OrderedDict()  # type: ignore[attr-defined]
    return state


def holding_itself(kind: type) -> Foreign:
    """An object of OmegaConf: its state refers to it."""
    made = Foreign(Global("m.a"))
    made.state = {1: made} if kind is dict else [made]
    return made


SIZES: dict[str, tuple[Callable[[], Any], int, int, int]] = {
    "numbers": (lambda: [1] * 6, 3, 1, 1),
    "all kinds of numbers": (lambda: [None, True, 1, 1.5], 2, 1, 1),
    "tuple": (lambda: (1, 2), 2, 1, 1),
    "texts": (lambda: ["a", "b"], 2, 1, 1),
    "long texts": (lambda: ["a" * 100, "b" * 28], 4, 1, 1),
    "long bytes": (lambda: [b"a" * 64, bytearray(64)], 4, 1, 1),
    "long key": (lambda: {"a" * 64: 1}, 3, 1, 1),
    "dict": (lambda: {1: 2}, 2, 1, 1),
    "tuple as key": (lambda: {(1,): 2}, 3, 2, 2),
    "ordered": (lambda: OrderedDict({1: 0, "a": 0}), 3, 1, 1),
    "ordered by classes": (lambda: OrderedDict({Global("m.a"): 0, "a": 0}), 3, 1, 1),
    "nested": (lambda: [[], [[], []], [1, 1]], 6, 6, 3),
    "tuples": (lambda: [(1, 2), (3.5, "a"), (4,)], 8, 4, 2),
    "sets and sizes": (lambda: [{1, 2}, frozenset((3, 4)), Size((5, 6))], 9, 4, 2),
    "shared": (shared, 3, 4, 3),
    "of a module": (of_module, 3, 2, 2),
    "object": (lambda: Foreign(Global("m.a"), keywords={"k": 1}), 4, 1, 1),
    "object in its dict": (lambda: holding_itself(dict), 4, 2, 2),
    "object in its list": (lambda: holding_itself(list), 3, 2, 2),
}
"""How many values and containers, and how deep they are nested."""


@pytest.mark.parametrize("kind", SIZES)
def test_how_much_work_a_value_is(kind: str) -> None:
    make, values, containers, depth = SIZES[kind]
    require_tree(make(), values, containers, depth)
    with pytest.raises(CorruptCheckpoint, match=f"more than {values - 1} values"):
        require_tree(make(), values - 1, containers, depth)
    if containers > 1:
        with pytest.raises(CorruptCheckpoint, match=f"more than {containers - 1} lists and dict"):
            require_tree(make(), values, containers - 1, depth)
        with pytest.raises(CorruptCheckpoint, match=f"more than {depth - 1} levels deep"):
            require_tree(make(), values, containers, depth - 1)


def test_a_number_is_no_work() -> None:
    require_tree(5, 0, 0, 0)


def test_a_list_of_numbers_ends_at_twice_the_values() -> None:
    require_tree([1] * 8, 4, 1)
    with pytest.raises(CorruptCheckpoint, match="more than 4 values"):
        require_tree([1] * 9, 4, 1)


@pytest.mark.parametrize("outer", [0, 1])
def test_too_many_containers_are_not_entered(outer: int) -> None:
    loop: list[Any] = []
    loop.append(loop)
    value = [loop, []] if outer else [loop, [], []]
    for _ in range(outer):
        value = [value]
    with pytest.raises(CorruptCheckpoint, match="more than 2 lists and dictionaries"):
        require_tree(value, 100, 2)


@pytest.mark.parametrize("kind", [dict, list])
def test_an_object_alone_is_replaced_where_it_holds_itself(kind: type) -> None:
    made, other = holding_itself(kind), Foreign(Global("m.b"))
    if kind is dict:
        made.state["other"] = other
    else:
        made.state.append(other)
    require_tree(made, 100, 100)
    assert made.state == ({1: ITSELF, "other": other} if kind is dict else [ITSELF, other])


# -- keys that are chosen to be slow


PRIME = 2**61 - 1  # its multiples have the hash 0
CHOSEN = [number * PRIME for number in range(MAX_EQUAL_HASHES + 1)]


@pytest.mark.parametrize(
    "keys",
    [CHOSEN, [*CHOSEN, 1, "a"], [(number,) for number in CHOSEN]],
    ids=["numbers", "some", "tuples"],
)
def test_keys_of_one_hash_are_refused(keys: list[Any]) -> None:
    require_spread(keys[1:])
    with pytest.raises(CorruptCheckpoint, match="keys with the same hash"):
        require_spread(keys)


@pytest.mark.parametrize("tag", ["$set", "$frozenset", "$dict", "$ordered"])
def test_json_has_no_keys_of_one_hash(tag: str) -> None:
    keys = CHOSEN if tag.endswith("set") else [[key, 1] for key in CHOSEN]
    with pytest.raises(CorruptCheckpoint, match="keys with the same hash"):
        from_json({tag: keys})


# -- as JSON


@pytest.mark.parametrize(
    ("value", "document"),
    [
        ({}, {}),
        ({"a": 1, "b$": 2}, {"a": 1, "b$": 2}),
        ({"a": 1, "$b": 2}, {"$dict": [["a", 1], ["$b", 2]]}),
        ({"a": 1, 2: 2}, {"$dict": [["a", 1], [2, 2]]}),
    ],
)
def test_keys_that_json_lacks_make_pairs(value: Any, document: Any) -> None:
    assert to_json(value) == document


def test_json_of_too_many_levels_is_refused() -> None:
    document: list[Any] = []
    for _ in range(MAX_NESTING - 1):
        document = [document]
    assert same(from_json(document), document)
    with pytest.raises(CorruptCheckpoint, match=f"more than {MAX_NESTING} levels deep"):
        from_json([document])


def test_json_of_too_many_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inert, "MAX_VALUES", 2)
    assert from_json(["a"] * 6) == ["a"] * 6
    with pytest.raises(CorruptCheckpoint, match="more than 6 values"):
        from_json(["a"] * 7)
    with pytest.raises(CorruptCheckpoint, match="more than 2 lists and dictionaries"):
        from_json([[], []])


def test_an_integer_is_hexadecimal_from_its_4097th_bit() -> None:
    assert to_json(2**4096 - 1) == 2**4096 - 1
    assert to_json(2**4096) == {"$int": f"0x1{'0' * 1024}"}
    assert to_json(-(2**4096)) == {"$int": f"-0x1{'0' * 1024}"}


def test_an_integer_has_a_longest_text() -> None:
    assert from_json({"$int": f"-0x{'f' * 2048}"}) == 1 - 2**8192
    with pytest.raises(CorruptCheckpoint, match="a value of a wrong type"):
        from_json({"$int": f"0x{'f' * 2050}"})


def test_a_scalar_has_a_shape_in_json_if_it_has_one() -> None:
    assert to_json(Scalar(1, "F32")) == {"$scalar": [1, "F32"]}
    assert to_json(Scalar(1, "F32", (1, 1))) == {"$scalar": [1, "F32", [1, 1]]}
    assert same(there_and_back([Scalar(2, "int")]), [Scalar(2, "int")])
    assert from_json({"$scalar": [1, "F32", [1, 1]]}).shape == (1, 1)


OBJECT = {"function": {"$global": "m.a"}, "arguments": [], "state": None, "how": "new"}


@pytest.mark.parametrize(
    "value",
    [
        {"$scalar": [1, "F31"]},
        {"$scalar": [1, 5]},
        {"$scalar": ["1", "F32"]},
        {"$scalar": [1, "F32", [1], [1]]},
        {"$scalar": [1, "F32", [2]]},
        {"$scalar": [1, "F32", 1]},
        {"$scalar": "1F"},
        {"$tensor": 5},
        {"$tuple": "ab"},
        {"$size": {"a": 1}},
        {"$set": "ab"},
        {"$dict": {"ab": 1}},
        {"$bytes": "a"},
        {"$bytes": "!AAAA"},
        {"$complex": 1},
        {"$object": {**OBJECT, "arguments": "ab"}},
        {"$object": {**OBJECT, "appended": {"a": 1}}},
        {"$object": {**OBJECT, "items": [1]}},
        {"$object": []},
    ],
    ids=repr,
)
def test_a_tag_with_another_value_is_refused(value: Any) -> None:
    with pytest.raises(CorruptCheckpoint, match="saved state has a value of a wrong type"):
        from_json([value])


@pytest.mark.parametrize("change", [{"function": "m.a"}, {"how": "reduce"}, {"function": None}])
def test_an_object_has_a_class_and_a_way_to_make_it(change: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpoint, match="an object without a class"):
        from_json({"$object": {**OBJECT, **change}})


@pytest.mark.parametrize("keywords", [["k"], {"$dict": [[1, 2]]}])
def test_keywords_are_texts(keywords: Any) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"a malformed object of m\.a"):
        from_json({"$object": {**OBJECT, "keywords": keywords}})


def test_an_object_has_in_json_what_is_not_empty() -> None:
    assert to_json(Foreign(Global("m.a"), how="new")) == {"$object": OBJECT}
    full = Foreign(Global("m.a"), (), None, "new", {"k": 1}, [2], [(3, 4)])
    parts = {"keywords": {"k": 1}, "appended": [2], "items": [[3, 4]]}
    assert to_json(full) == {"$object": {**OBJECT, **parts}}
    assert same(from_json({"$object": OBJECT}), Foreign(Global("m.a"), how="new"))


def test_a_key_of_another_type_is_shown_in_a_group() -> None:
    assert plain_group({5: 1, "a": (1, (2,))}) == {"5": 1, "a": [1, {"$tuple": [2]}]}


# -- equality


def test_scalars_are_compared_by_value() -> None:
    assert by_value([Scalar(1, "F32"), {"a": (Scalar(2, "F16"), 3)}]) == (1, {"a": (2, 3)})


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (float("nan"), float("nan"), True),
        (float("nan"), 1.0, False),
        (1.0, float("nan"), False),
        ((1, [float("nan")]), [1, (float("nan"),)], True),
        ([1, 2], [1], False),
        ([1, 2], [1, 3], False),
        ([1], 1, False),
        (1, (1,), False),
        ("a", "a", True),
    ],
)
def test_alike(a: Any, b: Any, expected: bool) -> None:
    assert alike(a, b) is expected
