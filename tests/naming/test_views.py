"""Views against numpy: every element is where the operation puts it, whatever the boxes are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import pytest

from zckpt.core.storage.fragments import Box, Extent, Fragment, Fragments, Runs, Slices, solid
from zckpt.naming.views import (
    View,
    cut,
    dealt,
    flattened,
    folded,
    joined,
    parted,
    split,
    swapped,
    unstacked,
    view_of,
    zeros,
)

SIZE = 4
SHAPE = (4, 6, 5)


def whole(file: str, shape: Sequence[int]) -> Fragments:
    return solid(prod(shape), Extent(file, 0, prod(shape) * SIZE))


def over_ranks(file: str, shape: Sequence[int]) -> Fragments:
    """As ZeRO-3 cuts a tensor: somewhere inside of its rows."""
    numel = prod(shape)
    width = -(-numel // 7)
    flats = [Extent(f"{file}{rank}", 0, width * SIZE) for rank in range(7)]
    return Slices(flats, 0, numel, SIZE)


def transposed(file: str, shape: Sequence[int]) -> Fragments:
    """A buffer whose last axis is the slowest."""
    strides = [prod(shape[:axis]) for axis in range(len(shape))]
    extent = Extent(file, 0, prod(shape) * SIZE)
    return Box(
        whole=shape,
        offsets=[0] * len(shape),
        sizes=shape,
        strides=strides,
        first=0,
        size=SIZE,
        extent=extent,
    )


def two_runs(file: str, shape: Sequence[int]) -> Fragments:
    numel = prod(shape)
    first = Fragment(0, 13, Extent(f"{file}a", 8, 13 * SIZE))
    return Runs([first, Fragment(13, numel, Extent(f"{file}b", 0, (numel - 13) * SIZE))])


KINDS = [whole, over_ranks, transposed, two_runs]


def array(fragments: Fragments, shape: Sequence[int]) -> np.ndarray:
    """Of every element its file and its number there; each once."""
    result = np.full(prod(shape), None, object)
    for fragment in fragments:
        for run in fragment.runs(0, prod(shape)):
            for place in range(run.stop - run.start):
                assert result[run.start + place] is None
                result[run.start + place] = (run.extent.file, run.extent.offset // SIZE + place)
    assert not any(each is None for each in result)
    return result.reshape(tuple(shape))


def same(view: View, expected: np.ndarray) -> None:
    assert view.shape == expected.shape
    assert (array(view.fragments, view.shape) == expected).all()


Operation = tuple[Callable[[View], list[View]], Callable[[np.ndarray], Sequence[np.ndarray]]]
OPERATIONS: dict[str, Operation] = {
    "halves of axis 1": (lambda v: cut(v, 1, 3), lambda a: np.split(a, 2, 1)),
    "uneven parts": (lambda v: cut(v, 0, 3), lambda a: [a[:3], a[3:]]),
    "experts": (lambda v: unstacked(v, 0), list),
    "last axis": (lambda v: unstacked(v, 2), lambda a: [a[..., n] for n in range(5)]),
    "gates of experts": (
        lambda v: [x for part in cut(v, 1, 3) for x in unstacked(part, 0)],
        lambda a: [x for part in np.split(a, 2, 1) for x in part],
    ),
    "turned": (lambda v: [swapped(v, 1, 2)], lambda a: [a.transpose(0, 2, 1)]),
    "turned, then cut": (
        lambda v: cut(swapped(v, 0, 2), 0, 2),
        lambda a: np.split(a.transpose(2, 1, 0), [2, 4]),
    ),
    "dealt": (
        lambda v: [dealt(folded(v, 1, (3,)), 1, (1, 0))],
        lambda a: [a.reshape(4, 2, 3, 5).transpose(0, 2, 1, 3).reshape(4, 6, 5)],
    ),
    "joined": (
        lambda v: [joined([v, cut(v, 1, 2)[1]], 1)],
        lambda a: [np.concatenate([a, a[:, 2:4]], 1)],
    ),
    "joined with a folded one": (
        lambda v: [joined([dealt(folded(v, 1, (3, 1)), 1, (0, 2, 1)), v], 1)],
        lambda a: [np.concatenate([a, a], 1)],
    ),
    "rows of planes": (
        lambda v: [flattened(cut(v, 1, 3)[1], 0)],
        lambda a: [a[:, 3:].reshape(12, 5)],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name: str, kind: Callable[[str, Sequence[int]], Fragments]) -> None:
    ours, numpys = OPERATIONS[name]
    fragments = kind("f", SHAPE)
    views = ours(view_of(fragments, SHAPE, SIZE))
    arrays = list(numpys(array(fragments, SHAPE)))
    assert len(views) == len(arrays)
    for view, expected in zip(views, arrays, strict=True):
        same(view, expected)


def test_heads_of_which_halves_are_dealt() -> None:
    """Rotary positions: (heads, 2, half) rows become (heads, half, 2), between two other parts."""
    shape = (12, 5)
    fragments = [over_ranks(name, shape) for name in "qkv"]
    q, k, v = (view_of(each, shape, SIZE) for each in fragments)
    turned = [dealt(folded(each, 0, (2, 3)), 0, (0, 2, 1)) for each in (q, k)]
    a, b, c = (array(each, shape) for each in fragments)
    expected = [each.reshape(2, 2, 3, 5).transpose(0, 2, 1, 3).reshape(12, 5) for each in (a, b)]
    same(joined([*turned, v], 0), np.concatenate([*expected, c]))


def test_rows_of_zeros() -> None:
    shape = (3, 5)
    view = joined([view_of(whole("f", shape), shape, SIZE), zeros((2, 5), SIZE)], 0)
    found = array(view.fragments, (5, 5))
    assert (found[:3] == array(whole("f", shape), shape)).all()
    assert {file for file, _ in found[3:].reshape(-1)} == {""}


def test_experts_over_many_ranks_are_cut_in_one_pass() -> None:
    """A stack of 128 experts in 1,000 pieces has about as many boxes when it is cut."""
    shape = (128, 64, 32)
    numel = prod(shape)
    width = -(-numel // 1000)
    flats = [Extent(f"f{rank}", 0, width * SIZE) for rank in range(1000)]
    view = view_of(Slices(flats, 0, numel, SIZE), shape, SIZE)
    parts = [each for half in cut(view, 1, 32) for each in unstacked(half, 0)]
    assert len(parts) == 256
    assert sum(len(part.boxes) for part in parts) < 2 * len(view.boxes) + 256


def test_shapes_that_do_not_fit() -> None:
    view = view_of(whole("f", SHAPE), SHAPE, SIZE)
    with pytest.raises(ValueError, match="no multiple of 4"):
        folded(view, 1, (4,))
    with pytest.raises(ValueError, match="joined along axis 1, because they differ along another"):
        joined([view, cut(view, 2, 3)[0]], 1)


def test_uneven_parts_and_two_axes_of_one() -> None:
    view = view_of(two_runs("0", SHAPE), SHAPE, SIZE)
    expected = array(view.fragments, SHAPE)
    for part, own in zip(
        parted(view, 1, [1, 0, 2, 3]), np.split(expected, [1, 1, 3], 1), strict=True
    ):
        assert part.shape == own.shape
        assert not own.size or (array(part.fragments, part.shape) == own).all()
    same(split(view, 1, 2), expected.reshape(4, 2, 3, 5))
    same(flattened(split(view, 1, 2), 1), expected)
