"""Which bytes go where: sources of entries, pieces of files, chunks of pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from zckpt.core.checkpoint.dtypes import SIZES
from zckpt.core.checkpoint.entries import Entry, key_of
from zckpt.core.checkpoint.manifest import Manifest, Parameter, Run
from zckpt.core.passes import plan
from zckpt.core.passes.plan import Match, Pair, TargetPiece
from zckpt.core.storage.fragments import Box, Extent, Fragment, Runs, Slices, solid
from zckpt.errors import MissingData, UnsupportedCheckpoint


def entry(name: str, dtype: str = "F32", shape: tuple[int, ...] = (2, 3)) -> Entry:
    return Entry(*key_of(name), dtype, shape, solid(6, Extent("a", 0, 6 * SIZES[dtype])))


def manifest(*entries: Entry) -> Manifest:
    return Manifest("/", "x", Run(), {item.key: item for item in entries}, {})


PARAM, MASTER, MOMENT = entry("w/param", "BF16"), entry("w/master"), entry("w/exp_avg")


@pytest.mark.parametrize(
    ("source", "target", "from_masters", "origin"),
    [
        ([PARAM, MASTER, MOMENT], PARAM, False, "w/param"),
        ([PARAM, MASTER, MOMENT], entry("w/param", "F16"), False, "w/master"),
        ([PARAM, MASTER, MOMENT], MASTER, False, "w/master"),
        ([PARAM, MASTER, MOMENT], MOMENT, False, "w/exp_avg"),
        ([PARAM, MASTER], PARAM, True, "w/master"),
        ([PARAM], PARAM, True, "w/param"),
        ([PARAM], entry("w/param", "F16"), False, "w/param"),
        ([MASTER], PARAM, False, "w/master"),
        ([entry("w/param")], MASTER, False, "w/param"),
    ],
)
def test_every_entry_finds_its_source(
    source: list[Entry], target: Entry, from_masters: bool, origin: str
) -> None:
    (pair,) = plan.join(manifest(*source), manifest(target), from_masters)
    assert (pair.source.name, pair.target) == (origin, target)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ([], MOMENT),
        ([PARAM, MASTER], MOMENT),
        ([MOMENT], PARAM),
        ([entry("w/exp_avg", shape=(3, 2))], MOMENT),
        ([entry("w/exp_avg", shape=(6,))], MOMENT),
        ([entry("v/exp_avg")], MOMENT),
    ],
    ids=["nothing", "no moment", "no weight", "transposed", "flat", "other"],
)
def test_what_the_source_lacks_is_missing(source: list[Entry], target: Entry) -> None:
    with pytest.raises(MissingData, match="w"):
        plan.join(manifest(*source), manifest(target), from_masters=False)


def test_ranks_that_are_not_joined_supply_their_own() -> None:
    whole = replace(manifest(), ranks=(manifest(MOMENT), manifest(MASTER, PARAM)))
    pairs = plan.join(whole, whole, from_masters=False)
    assert [(pair.rank, pair.source) for pair in pairs] == [(0, MOMENT), (1, MASTER), (1, PARAM)]


@pytest.mark.parametrize(("dtype", "wanted"), [("I64", "F32"), ("F32", "U8"), ("I64", "I32")])
def test_only_floats_change_their_type(dtype: str, wanted: str) -> None:
    source, target = entry("w/exp_avg", dtype), entry("w/exp_avg", wanted)
    with pytest.raises(UnsupportedCheckpoint, match=f"type {dtype}, .* {wanted}"):
        plan.join(manifest(source), manifest(target), from_masters=False)
    assert plan.join(manifest(source), manifest(source), from_masters=False) == [
        Pair(source, source)
    ]


def test_files_list_their_pieces_in_order() -> None:
    first = Entry(
        "a",
        "param",
        "F32",
        (10,),
        Runs([Fragment(0, 4, Extent("y", 100, 16)), Fragment(4, 10, Extent("x", 40, 24))]),
    )
    second = Entry("b", "param", "F32", (5,), solid(5, Extent("y", 20, 20)))
    pairs = [Pair(item, item) for item in (first, second)]
    names, pieces_of = plan.files(pairs)
    assert {name: pieces_of(name) for name in names} == {
        "y": [TargetPiece(20, 0, 5, pairs[1]), TargetPiece(100, 0, 4, pairs[0])],
        "x": [TargetPiece(40, 4, 10, pairs[0])],
    }


@given(st.lists(st.integers(0, 12), max_size=5), st.integers(1, 5))
def test_slices_give_each_rank_its_pieces(numels: list[int], dp: int) -> None:
    flats = tuple(Extent(f"rank {rank}", 8, 1000) for rank in range(dp))
    pairs, offset = [], 0
    for place, numel in enumerate(numels):
        item = Entry(str(place), "param", "F32", (numel,), Slices(flats, offset, numel, 4))
        offset += -(-numel // dp)
        pairs.append(Pair(item, item))
    names, pieces_of = plan.files(pairs)
    listed = [
        (file, piece.pair.target.name, element, piece.offset + (element - piece.start) * 4)
        for file in names
        for piece in pieces_of(file)
        for element in range(piece.start, piece.stop)
    ]
    expected = [
        (f.extent.file, pair.target.name, element, f.extent.offset + (element - f.start) * 4)
        for pair in pairs
        for f in pair.target.fragments
        for element in range(f.start, f.stop)
    ]
    assert sorted(listed) == sorted(expected)


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 40), st.sampled_from(["F32", "BF16", "U8"])),
        max_size=12,
    ),
    st.integers(0, 9),
    st.sampled_from([8, 16, 64, 1024]),
)
def test_chunks_hold_every_byte_of_every_piece_once(
    sizes: list[tuple[int, int, str]], tail: int, chunk: int
) -> None:
    pieces, end_of_pieces = [], 0
    for gap, numel, dtype in sizes:
        size = SIZES[dtype]
        end_of_pieces = -(-(end_of_pieces + gap) // size) * size
        item = Entry(
            str(end_of_pieces),
            "param",
            dtype,
            (numel,),
            solid(numel, Extent("a", end_of_pieces, numel * size)),
        )
        pieces.append(TargetPiece(end_of_pieces, 0, numel, Pair(item, item)))
        end_of_pieces += numel * size
    elements: dict[int, tuple[str, int]] = {}
    end = 0
    for part in plan.chunks("a", (0, end_of_pieces + tail), pieces, chunk):
        assert (part.file, part.offset) == ("a", end)
        assert part.length == min(chunk, end_of_pieces + tail - end)
        end += part.length
        for piece in part.pieces:
            assert part.offset <= piece.offset < piece.end <= end
            whole = [
                each for each in pieces if (each.offset, each.end) == (piece.offset, piece.end)
            ]
            assert piece.is_cut or [piece] == whole
            assert not (piece.is_cut and whole)
            size = SIZES[piece.pair.target.dtype]
            for element in range(piece.start, piece.stop):
                place = piece.offset + (element - piece.start) * size
                assert place not in elements
                elements[place] = piece.pair.target.name, element
    assert end == end_of_pieces + tail
    assert elements == {
        piece.offset + element * SIZES[piece.pair.target.dtype]: (piece.pair.target.name, element)
        for piece in pieces
        for element in range(piece.stop)
    }


@given(
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(0, 4),
    st.integers(0, 9),
    st.sampled_from(["F32", "U8"]),
    st.sampled_from([8, 16, 64]),
)
def test_chunks_cut_runs_at_a_stride(
    length: int, count: int, gap: int, skipped: int, dtype: str, chunk: int
) -> None:
    """A column of `length` elements in each row, which begins `skipped` elements into the file."""
    size, width = SIZES[dtype], length + gap
    extent = Extent("a", skipped * size, length * count * size)
    column = Box(
        whole=(count, width),
        offsets=(0, gap),
        sizes=(count, length),
        strides=(length, 1),
        first=0,
        size=size,
        extent=extent,
    )
    whole = Entry("w", "param", dtype, (count, width), column)
    (name,), pieces_of = plan.files([Pair(whole, whole)])
    pieces = pieces_of(name)
    elements = {}
    for part in plan.chunks("a", (0, extent.offset + extent.length), pieces, chunk):
        end = part.offset
        assert len(part.pieces) <= 3, "whole runs are one piece"
        for piece in part.pieces:
            assert end <= piece.offset < piece.end <= part.offset + part.length
            end = piece.end
            for number, run in enumerate(piece.runs()):
                assert run.start == piece.start + number * piece.stride
                for element in range(run.start, run.stop):
                    byte = run.offset + (element - run.start) * size
                    assert byte not in elements
                    elements[byte] = element
    assert elements == {
        extent.offset + (row * length + place) * size: row * width + gap + place
        for row in range(count)
        for place in range(length)
    }


HALF = entry("w/param", "F16")
WIDE = entry("w/param")


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([PARAM, MASTER], [PARAM, MASTER], [("w/param", "w/param", "bits"),
                                            ("w/master", "w/master", "bits")]),
        ([PARAM, MASTER], [MASTER], [("w/param", "w/master", "rounded"),
                                     ("w/master", "w/master", "bits")]),
        ([MASTER], [PARAM, MASTER], [("w/master", "w/master", "bits"),
                                     ("w/master", "w/param", "rounded")]),
        ([PARAM, MASTER], [HALF, MASTER], [("w/param", "w/master", "rounded"),
                                           ("w/master", "w/master", "bits"),
                                           ("w/master", "w/param", "rounded")]),
        ([PARAM, MASTER], [MASTER, HALF], [("w/param", "w/master", "rounded"),
                                           ("w/master", "w/master", "bits"),
                                           ("w/master", "w/param", "rounded")]),
        ([PARAM, MASTER], [HALF], [("w/master", "w/param", "rounded")]),
        ([PARAM, MASTER], [WIDE], [("w/param", "w/param", "rounded"),
                                   ("w/master", "w/param", "bits")]),
        ([WIDE], [MASTER], [("w/param", "w/master", "bits")]),
        ([MASTER], [WIDE], [("w/master", "w/param", "bits")]),
        ([WIDE], [PARAM], [("w/param", "w/param", "rounded")]),
        ([WIDE], [PARAM, MASTER], [("w/param", "w/master", "bits"),
                                   ("w/param", "w/param", "rounded")]),
        ([PARAM], [HALF], [("w/param", "w/param", "values")]),
        ([entry("w/master", "BF16")], [PARAM], [("w/master", "w/param", "bits")]),
        ([entry("w/exp_avg", "BF16")], [MOMENT], [("w/exp_avg", "w/exp_avg", "values")]),
        ([MASTER, entry("w/exp_avg", "BF16")], [MASTER, MOMENT],
         [("w/master", "w/master", "bits"), ("w/exp_avg", "w/exp_avg", "values")]),
        ([entry("w/exp_avg", "C64")], [MOMENT], [("w/exp_avg", "w/exp_avg", "types")]),
        ([entry("w/exp_avg", "F16", (3, 2))], [MOMENT], [("w/exp_avg", "w/exp_avg", "shapes")]),
        ([entry("w/param", shape=(3, 2))], [WIDE], [("w/param", "w/param", "shapes")]),
    ],
)  # fmt: skip
def test_what_is_the_same_in_two_checkpoints(
    ours: list[Entry], theirs: list[Entry], expected: list[tuple[str, str, str]]
) -> None:
    matches, only_a, only_b = plan.match(manifest(*ours), manifest(*theirs))
    assert [(item.a.name, item.b and item.b.name, item.how) for item in matches] == expected
    assert only_a == only_b == []


def test_weights_beside_masters_of_16_bits_are_compared_as_numbers() -> None:
    ours, theirs = entry("w/master", "BF16"), entry("w/master", "F16")
    weights, masters = Match(PARAM, HALF, "values"), Match(ours, theirs, "values")
    assert plan.match(manifest(PARAM, ours), manifest(HALF)) == ([weights], [("w", "master")], [])
    assert plan.match(manifest(PARAM, ours), manifest(HALF, theirs)) == ([weights, masters], [], [])


@pytest.mark.parametrize(
    ("match", "is_read", "rounds_a", "name"),
    [
        (Match(MASTER), True, False, "w/master"),
        (Match(WIDE, MASTER), True, False, "w/param"),
        (Match(MASTER, WIDE), True, False, "w/master"),
        (Match(MASTER, PARAM, "rounded"), True, True, "w/param"),
        (Match(PARAM, MASTER, "rounded"), True, False, "w/param"),
        (Match(MASTER, PARAM, "values"), True, False, "w/master"),
        (Match(MASTER, PARAM, "types"), False, False, "w/master"),
        (Match(MASTER, PARAM, "shapes"), False, False, "w/master"),
    ],
)
def test_how_a_match_is_read_and_named(
    match: Match, is_read: bool, rounds_a: bool, name: str
) -> None:
    assert (match.is_read, match.rounds_a, match.name) == (is_read, rounds_a, name)


def test_what_only_one_side_holds() -> None:
    matches, only_a, only_b = plan.match(
        manifest(MASTER, MOMENT), manifest(MASTER, entry("v/param"))
    )
    assert len(matches) == 1
    assert (only_a, only_b) == ([("w", "exp_avg")], [("v", "param")])


def test_a_tied_weight_may_have_its_other_name() -> None:
    ours = replace(manifest(MASTER), parameters={"w": Parameter((2, 3), aliases=("head",))})
    theirs = replace(
        manifest(entry("head/master")), parameters={"head": Parameter((2, 3), aliases=("w",))}
    )
    matches, only_a, only_b = plan.match(ours, theirs)
    assert [(item.a.name, item.b and item.b.name) for item in matches] == [
        ("w/master", "head/master")
    ]
    assert only_a == only_b == []


def tied(*entries: Entry, names: tuple[str, ...] = ("w",)) -> Manifest:
    """The weight `w`, which is also called `head`."""
    parameters = {name: Parameter((2, 3)) for name in names}
    return replace(
        manifest(*entries), parameters={**parameters, "w": Parameter((2, 3), aliases=("head",))}
    )


@pytest.mark.parametrize(("shape", "how"), [((2, 3), "bits"), ((3, 2), "shapes")])
def test_a_tied_weight_that_one_side_stores_twice(shape: tuple[int, ...], how: str) -> None:
    head = entry("head/master", shape=shape)
    other = entry("w/master")
    twice, once = tied(MASTER, head), tied(other)
    assert plan.match(twice, once) == (
        [Match(MASTER, other), Match(head, other, how, copy=True)], [], [],
    )  # fmt: skip
    assert plan.match(once, twice) == (
        [Match(other, MASTER), Match(other, head, how, copy=True)], [], [],
    )  # fmt: skip


def test_a_tied_weight_that_one_side_has_under_its_second_names() -> None:
    """Alone, or each, or beside the first; nothing says there that these are one."""
    weight, first, second = entry("w/master"), entry("head/master"), entry("out/master")
    names = {"w": Parameter((2, 3), aliases=("head", "out"))}
    own = replace(manifest(MASTER), parameters=names)
    for others, matches in (
        ((first,), [Match(first, MASTER)]),
        ((second,), [Match(second, MASTER)]),
        ((first, second), [Match(first, MASTER), Match(second, MASTER, copy=True)]),
        ((weight, first), [Match(weight, MASTER), Match(first, MASTER, copy=True)]),
    ):
        known = {item.parameter: Parameter((2, 3)) for item in others}
        other = replace(manifest(*others), parameters=known)
        assert plan.match(other, own) == (matches, [], [])
        turned = [replace(item, a=item.b, b=item.a) for item in matches if item.b is not None]
        assert plan.match(own, other) == (turned, [], [])
    stored = replace(manifest(MASTER, first), parameters=names)
    other = replace(manifest(first), parameters={"head": Parameter((2, 3))})
    assert plan.match(other, stored) == (
        [Match(first, first), Match(first, MASTER, copy=True)], [], [],
    )  # fmt: skip


def test_a_name_that_both_sides_have_stays() -> None:
    head = entry("head/master")
    ours = tied(MASTER, head, names=("w", "head"))
    assert plan.match(ours, manifest(head)) == ([Match(head, head)], [("w", "master")], [])
