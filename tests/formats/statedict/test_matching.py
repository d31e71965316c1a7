"""Names by number: against all assignments, and for models of real sizes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zckpt import errors
from zckpt.formats.statedict import matching
from zckpt.formats.statedict.matching import keeps_order, match

A, B, C = (2,), (3,), (2, 3)
shapes = st.sampled_from([A, B, C])
LAYER = {
    "q": (64, 64),
    "k": (64, 64),
    "v": (64, 64),
    "o": (64, 64),
    "up": (256, 64),
    "up.bias": (256,),
    "down": (64, 256),
    "down.bias": (64,),
    "norm1": (64,),
    "norm2": (64,),
}


def model(layers: int) -> list[tuple[str, tuple[int, ...]]]:
    inner = [(f"{n}.{name}", shape) for n in range(layers) for name, shape in LAYER.items()]
    return [("embedding", (1000, 64)), *inner, ("head", (1000, 64))]


def every_way(
    orders: Sequence[Sequence[Any]], names: Sequence[tuple[str, Any]]
) -> Iterator[list[list[str]]]:
    """All matches, by trying."""
    if not names:
        if not any(orders):
            yield [[] for _ in orders]
        return
    (name, shape), rest = names[0], names[1:]
    yield from every_way(orders, rest)
    for place, order in enumerate(orders):
        if order and order[0] in (None, shape):
            taken = [each[1:] if at == place else each for at, each in enumerate(orders)]
            for way in every_way(taken, rest):
                yield [[name, *each] if at == place else each for at, each in enumerate(way)]


def every_assignment(
    orders: Sequence[Sequence[Any]], names: Sequence[tuple[str, Any]]
) -> Iterator[list[list[str]]]:
    """All assignments of names to numbers with equal shapes, in whatever order, by trying."""
    wanted = [shape for order in orders for shape in order]
    for chosen in itertools.permutations(names, len(wanted)):
        if all(shape in (None, own) for shape, (_, own) in zip(wanted, chosen, strict=True)):
            left = iter(name for name, _ in chosen)
            yield [list(itertools.islice(left, len(order))) for order in orders]


orders_of_shapes = st.lists(st.lists(st.one_of(st.none(), shapes), max_size=4), max_size=3)


@given(orders_of_shapes, st.lists(shapes, max_size=6))
@example([[A, A], [A]], [A, A, A])
@example([[None, B]], [A, B, B])
@example([[None, B]], [A, B])
@example([[None, None]], [A, B])
def test_names_in_the_modules_order_fit_in_one_way(
    orders: list[list[Any]], shapes_of_names: list[Any]
) -> None:
    names = [(f"w{place}", shape) for place, shape in enumerate(shapes_of_names)]
    ways = list(every_way(orders, names))
    forced = list(itertools.islice(every_assignment(orders, names), 2))
    if len(forced) == 1 and any(orders):
        assert match(orders, names, in_order=False) == (forced[0], [])
        assert match(orders, names, in_order=True) == (forced[0], [])
    elif any(orders):
        with pytest.raises(errors.MissingData, match="does not show the module's order") as raised:
            match(orders, names, in_order=False)
        assert "names.txt" in raised.value.hint
        refused = ""
        try:
            matched = match(orders, names, in_order=True)
        except errors.MissingData as error:
            refused = error.message
        if refused:
            assert not ways or "in several ways" in refused
            # a few groups that are interwoven have one way alone, and need names nevertheless
            assert len(ways) != 1 or sum(map(bool, orders)) > 1
        else:
            assert [matched.names] == ways
            assert matched.inferred


@pytest.mark.parametrize(
    ("orders", "shapes_of_names", "found"),
    [
        ([[A, A], [None, A]], [A, A, B, A], ["01", "23"]),
        ([[A, B], [B, A]], [B, A, B, A], ["12", "03"]),
        ([[A, C], [A, B]], [B, A, A, B, C], None),
    ],
)
def test_groups_narrow_each_other(
    orders: list[list[Any]], shapes_of_names: list[Any], found: list[str] | None
) -> None:
    names = [(str(place), shape) for place, shape in enumerate(shapes_of_names)]
    ways = list(every_way(orders, names))
    if found is None:
        with pytest.raises(errors.MissingData, match="in several ways"):
            match(orders, names, in_order=True)
        assert len(ways) > 1
    else:
        assert [match(orders, names, in_order=True).names] == [[[*own] for own in found]] == ways


def test_a_group_in_another_order_leaves_the_others_unclear() -> None:
    """Its shapes occur once, and show that the groups are not in the module's order."""
    names = [("a", A), ("b", B), ("c", C), ("d", A)]
    with pytest.raises(errors.MissingData):
        match([[C, B], [A, A]], names, in_order=True)


def test_inferred_are_those_that_another_could_be() -> None:
    names = [("a", A), ("b", C), ("c", A)]
    assert match([[A, C, A]], names, in_order=True) == ([["a", "b", "c"]], ["a", "c"])


@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        (["layers.10.w", "layers.2.w"], False),  # as text: safetensors
        (["layers.2.w", "layers.10.w"], False),  # by number: says as little
        (["k_proj.weight", "o_proj.weight", "q_proj.weight", "v_proj.weight"], False),
        (["q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"], True),
        (["0.weight", "0.bias", "1.weight", "1.bias"], True),
        (["0.weight", "1.weight"], False),
        (["w"], False),
        ([], False),
    ],
)
def test_sorted_keys_do_not_show_the_modules_order(keys: list[str], shown: bool) -> None:
    assert keeps_order(keys) is shown


@given(st.data(), st.lists(shapes, min_size=1, max_size=6))
def test_as_many_names_as_numbers_are_the_order(data: Any, shapes_of_names: list[Any]) -> None:
    names = [(f"w{place}", shape) for place, shape in enumerate(shapes_of_names)]
    order = data.draw(st.permutations(names))
    cut = data.draw(st.integers(0, len(order)))
    groups = [order[:cut], order[cut:]]
    matched = match(
        [[shape for _, shape in group] for group in groups],
        names,
        in_order=False,
        param_names=[name for name, _ in order],
    )
    assert matched == ([[name for name, _ in group] for group in groups], [])


def test_names_in_the_modules_order_are_refused() -> None:
    """Also if only one way fits: the list has one meaning."""
    names = [("a", A), ("b", C), ("c", B)]
    with pytest.raises(errors.WrongOption, match=r"a of shape .2. as number 0, but .* .2, 3."):
        match([[C], [A, B]], names, False, param_names=["a", "b", "c"])
    with pytest.raises(errors.WrongOption, match="lists 3 parameters, but the optimizer has 2"):
        match([[C], [A]], names, True, param_names=["b", "a", "c"])


def test_names_of_the_optimizer_alone() -> None:
    names = [("a", A), ("frozen", A), ("b", A), ("c", C)]
    with pytest.raises(errors.MissingData, match="in several ways"):
        match([[A, A], [C]], names, True)
    matched = match([[A, A], [C]], names, True, param_names=["a", "b", "c"])
    assert matched == ([["a", "b"], ["c"]], [])
    with pytest.raises(errors.WrongOption, match="as number 2"):
        match([[A, A], [C]], names, True, param_names=["a", "frozen", "b"])


@pytest.mark.parametrize("shown", [(), (2, 1)])
def test_states_of_no_parameters_shape_fit_any_name(shown: tuple[int, ...]) -> None:
    """Amos keeps numbers, Nero one number per row. Shapes that weights have are proof still."""
    names = [("a", C), ("b", (2, 2)), ("one", (2, 1)), ("c", A), ("d", B), ("scale", ())]
    stated = ["b", "d", "a", "c"]
    orders = [[shown, B], [shown, A]]
    assert match(orders, names, True, param_names=stated).names == [["b", "d"], ["a", "c"]]
    with pytest.raises(errors.WrongOption, match=r"b of shape .2, 2. as number 1, but .* .3."):
        match(orders, names, True, param_names=["d", "b", "a", "c"])
    with pytest.raises(
        errors.MissingData, match=r"states .* (not fit|none of .* another shape)"
    ) as raised:
        match(orders, names, True)
    assert "--param-names" in raised.value.hint


@pytest.mark.parametrize(
    ("stated", "said"), [(["a", "x"], "lists x, which"), (["a", "a"], "lists a twice")]
)
def test_names_that_cannot_be_are_refused(stated: list[str], said: str) -> None:
    with pytest.raises(errors.WrongOption, match=said):
        match([[A]], [("a", A)], True, param_names=stated)


@pytest.mark.parametrize(
    ("orders", "said"),
    [
        ([[A, A]], "parameter 1, whose states have the shape .2., matches none"),
        ([[C]], "parameter 0, whose states have the shape .2, 3."),
        ([[None] * 3], "lists 3 parameters"),
        ([[A, B, A]], "lists 3 parameters by number, but the model has 2"),
    ],
)
def test_what_does_not_fit_is_named(orders: list[list[Any]], said: str) -> None:
    with pytest.raises(errors.MissingData, match=said):
        match(orders, [("a", A), ("b", B)], True)


def test_running_statistics_are_no_parameters() -> None:
    names = [("n.weight", A), ("n.bias", A), ("n.running_mean", A), ("n.running_var", A)]
    assert match([[A, A]], names, True).names == [["n.weight", "n.bias"]]
    assert matching.candidates([("running_mean", A)]) == [("running_mean", A)]  # alone: a weight


def test_large_models_take_milliseconds() -> None:
    names = model(200)
    outer = [shape for _, shape in names if shape[0] == 1000]
    matrices = [shape for _, shape in names if len(shape) == 2 and shape[0] != 1000]
    vectors = [shape for _, shape in names if len(shape) == 1]
    started = time.process_time()
    matched = match([matrices, vectors, outer], names, True).names
    assert time.process_time() - started < 1
    assert sorted(name for each in matched for name in each) == sorted(name for name, _ in names)
    assert matched[2] == ["embedding", "head"]


def test_groups_of_many_equal_layers_take_no_time() -> None:
    names = model(200)
    shapes = [shape for _, shape in names]
    started = time.process_time()
    with pytest.raises(errors.MissingData, match="in several ways"):
        match([shapes[:1000], shapes[1000:1500], shapes[1500:]], names, True)
    assert time.process_time() - started < 10
