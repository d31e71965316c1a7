"""Parts of tensors that ranks have: from an entry, from a place in a file, from a tied weight."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from zckpt.core.checkpoint.entries import Entry, key_of, name_of
from zckpt.core.checkpoint.manifest import Manifest, Parameter, Run
from zckpt.core.ranks.partition import (
    UNNAMED,
    BoxPart,
    FlatMember,
    Joined,
    Nameless,
    Partitioned,
    Whole,
)
from zckpt.core.storage.fragments import Box, Boxes, Extent, Fragment, Fragments, Runs, solid
from zckpt.proof.allgather.parts import alone, by_name, cut_over, first_extent, strided, with_names

EMPTY = Runs(())


def entry(name: str, shape: tuple[int, ...], fragments: Fragments, dtype: str = "F32") -> Entry:
    return Entry(*key_of(name), dtype, shape, fragments)


def at(offset: int, numel: int = 4) -> Extent:
    return Extent("optim.pt", offset, 4 * numel)


def checkpoint(*entries: Entry, replicas: Sequence[Entry] = ()) -> Manifest:
    known = {each.key: each for each in entries}
    return Manifest("run", "deepspeed", Run(), known, {}, replicas=tuple(replicas))


# -- a tensor as the only part there is of it


def test_a_transposed_tensor_is_whole() -> None:
    """Its first element is the fifth of the extent, its last one is 5 elements behind."""
    extent = Extent("model.bin", 100, 400)
    box = Box(
        whole=(2, 3), offsets=(0, 0), sizes=(2, 3), strides=(1, 2), first=4, size=4, extent=extent
    )
    part = alone(entry("w/param", (2, 3), box))
    assert part == Whole(("w", "param"), "F32", (2, 3), Extent("model.bin", 116, 24), (1, 2))


def test_columns_of_two_boxes_take_turns() -> None:
    """The box that is listed first has columns 1 to 3, the other one column 0."""
    boxes = [
        Box(
            whole=(2, 4),
            offsets=(0, 1),
            sizes=(2, 3),
            strides=(3, 1),
            first=0,
            size=4,
            extent=Extent("b", 0, 24),
        ),
        Box(
            whole=(2, 4),
            offsets=(0, 0),
            sizes=(2, 1),
            strides=(1, 1),
            first=0,
            size=4,
            extent=Extent("a", 0, 8),
        ),
    ]
    part = alone(entry("w/param", (2, 4), Boxes(boxes)))
    expected = Extent("a", 0, 4), Extent("b", 0, 12), Extent("a", 4, 4), Extent("b", 12, 12)
    assert part == Partitioned("F32", expected, [FlatMember(("w", "param"), (2, 4), 0)])


# -- names by place


def nameless(offset: int, shape: tuple[int, ...] = (4,)) -> Nameless:
    return Nameless("exp_avg", Whole(UNNAMED, "F32", shape, at(offset, 4)))


def test_a_nameless_tensor_has_the_name_of_its_place() -> None:
    """The first element alone decides: of an entry, of a copy, of boxes in any order."""
    columns = [
        Box(
            whole=(4, 2),
            offsets=(0, column),
            sizes=(4, 1),
            strides=(1, 1),
            first=0,
            size=4,
            extent=at(offset),
        )
        for column, offset in ((1, 100), (0, 116))
    ]
    manifest = checkpoint(
        entry("w/exp_avg", (4,), solid(4, at(0))),
        entry("one/exp_avg", (1,), solid(1, at(16, 1))),
        entry("matrix/exp_avg", (4, 2), Boxes(columns)),
        replicas=[entry("copy/exp_avg", (4,), solid(4, at(32)))],
    )
    named = Whole(("known", "exp_avg"), "F32", (4,), at(64))
    unknown = [nameless(0), nameless(32), nameless(16, (1,)), nameless(116, (4, 2))]
    parts, of_reader, unsupported = with_names([named, *unknown], manifest)
    names = ["w/exp_avg", "copy/exp_avg", "one/exp_avg", "matrix/exp_avg"]
    pairs = zip(unknown, map(key_of, names), strict=True)
    tensors = [replace(part.tensor, key=key) for part, key in pairs]
    assert parts == [named, *tensors]
    assert of_reader == names
    assert unsupported == []


def test_empty_tensors_have_a_name_each() -> None:
    """They have no place; those of one shape take the names in turn."""
    manifest = checkpoint(*(entry(f"{name}/exp_avg", (0, 4), EMPTY) for name in "ab"))
    parts, of_reader, unsupported = with_names([nameless(0, (0, 4)), nameless(8, (0, 4))], manifest)
    assert [name_of(part.key) for part in parts if isinstance(part, Whole)] == of_reader
    assert of_reader == ["a/exp_avg", "b/exp_avg"]
    assert unsupported == []


def test_a_name_is_given_once() -> None:
    """Two numbers of one optimizer at one place: the second has no name left, and needs none."""
    manifest = checkpoint(entry("w/exp_avg", (1,), solid(1, at(0, 1))))
    parts, of_reader, _ = with_names([nameless(0, (1,)), nameless(0, (1,))], manifest)
    assert (len(parts), of_reader) == (1, ["w/exp_avg"])


@pytest.mark.parametrize(
    ("shape", "is_unread"), [((4,), True), ((2,), True), ((1,), False), ((), False), ((0,), False)]
)
def test_what_the_reader_does_not_read(shape: tuple[int, ...], is_unread: bool) -> None:
    """A number may be left out of the manifest, a tensor may not."""
    manifest = checkpoint(entry("w/exp_avg", (9,), solid(9, at(64, 9))))
    parts, of_reader, unsupported = with_names([nameless(0, shape)], manifest)
    assert (parts, of_reader) == ([], [])
    assert unsupported == ([nameless(0, shape)] if is_unread else [])


@pytest.mark.parametrize(
    "there",
    [
        entry("w/exp_avg_sq", (4,), solid(4, at(0))),
        entry("w/exp_avg", (4,), solid(4, at(0)), "I32"),
        entry("w/exp_avg", (2, 2), solid(4, at(0))),
    ],
    ids=["slot", "dtype", "shape"],
)
def test_a_place_alone_gives_no_name(there: Entry) -> None:
    parts, _, unsupported = with_names([nameless(0)], checkpoint(there))
    assert (parts, unsupported) == ([], [nameless(0)])


def test_tensors_of_the_state_are_read() -> None:
    """The reader has them under another name, beside what else begins there."""
    state = entry("step/state", (4,), solid(4, at(0)))
    both = state, entry("w/exp_avg_sq", (4,), solid(4, at(0)))
    for there in ([state], both):
        assert with_names([nameless(0)], checkpoint(*there)).unsupported == []


def test_a_tensor_whose_first_element_is_in_no_file_has_no_name() -> None:
    """Neither the rule nor the reader knows where it begins, so that no place is common."""
    without_first = Runs([Fragment(1, 4, at(4, 3))])
    part = Nameless("exp_avg", Joined(UNNAMED, "F32", (4,), (BoxPart((0,), (4,), at(4, 3), 1),)))
    result = with_names([part], checkpoint(entry("w/exp_avg", (4,), without_first)))
    assert result == ([], [], [part])


def test_the_first_element_lies_in_any_part() -> None:
    """Before it are listed a range that is empty, one that begins later, and another column."""
    box = BoxPart((0, 0), (2, 2), at(64, 1))
    parts = (
        replace(box, extent=at(0, 0)),
        replace(box, extent=at(16, 3), first=1),
        BoxPart((0, 2), (2, 2), at(32)),
        box,
    )
    joined = Joined(("w", "exp_avg"), "F32", (2, 4), parts)
    assert first_extent(joined) == at(64, 1)
    assert first_extent(replace(joined, parts=parts[:3])) is None
    assert first_extent(Whole(("w", "exp_avg"), "F32", (4,), at(8))) == at(8)


# -- keys of parts


def test_copies_have_keys_of_their_own() -> None:
    """The same tensor on two ranks, and under the name of a weight that is tied to it."""
    manifest = replace(checkpoint(), parameters={"w": Parameter((4,), aliases=("head",))})
    flat = Partitioned("F32", (at(0, 3),), [FlatMember(("flat", "param"), (3,), 0)])
    whole = [
        Whole(key_of(name), "F32", (4,), at(n)) for n, name in enumerate(("w/m", "w/m", "head/m"))
    ]
    parts, entries, copies = by_name([flat, *whole], manifest)
    keys = ("w", "m"), ("w", "m#0"), ("w", "m#1")
    assert parts == [
        flat,
        *(replace(part, key=key) for part, key in zip(whole, keys, strict=True)),
    ]
    assert [(name_of(key), each.name) for key, each in entries.items()] == [
        ("flat/param", "flat/param"),
        ("w/m", "w/m"),
    ]
    assert [(name_of(key), each.name) for key, each in copies.items()] == [
        ("w/m#0", "w/m"),
        ("w/m#1", "w/m"),
    ]
    assert list(entries["w", "m"].fragments) == [Fragment(0, 4, at(0))]
    assert list(copies["w", "m#1"].fragments) == [Fragment(0, 4, at(2))]


def test_a_tensor_without_its_first_element_has_no_file() -> None:
    joined = Joined(("w", "m"), "F32", (4,), (BoxPart((0,), (4,), at(4, 3), 1),))
    _, entries, _ = by_name([joined], checkpoint())
    assert list(entries["w", "m"].fragments) == []


# -- what is compared in buckets, and what on its own


def test_boxes_that_are_not_row_major_are_on_their_own() -> None:
    rows = BoxPart((0, 0), (2, 3), at(0, 6))
    turned = BoxPart((2, 0), (2, 3), at(24, 6), strides=(1, 2))
    joined = Joined(("w", "param"), "F32", (4, 3), (rows, turned))
    assert list(cut_over(joined, 2)) == [replace(joined, parts=(rows,))]
    assert list(strided(joined)) == [replace(joined, parts=(turned,))]


def test_a_whole_tensor_that_is_not_row_major_is_one_box() -> None:
    whole = Whole(("w", "param"), "F32", (2, 3), at(8, 6), (1, 2))
    assert list(cut_over(whole, 2)) == []
    box = BoxPart((0, 0), (2, 3), at(8, 6), strides=(1, 2))
    assert list(strided(whole)) == [Joined(("w", "param"), "F32", (2, 3), (box,))]
    straight = replace(whole, strides=None)
    assert list(strided(straight)) == []
    (cut,) = cut_over(straight, 2)
    assert cut.ranks == (at(8, 3), at(20, 3))
