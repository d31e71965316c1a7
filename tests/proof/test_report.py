"""What a comparison found, as lines: which keys a line has, and which copies only make a note."""

from __future__ import annotations

from typing import Any

import pytest

from zckpt.core.checkpoint.entries import Entry, key_of
from zckpt.core.checkpoint.manifest import Manifest, Run
from zckpt.core.checkpoint.origin import Origin
from zckpt.core.comparison.compare import ComparisonOutcome, Result
from zckpt.core.comparison.difference import ULPS, Difference
from zckpt.core.passes.plan import Match
from zckpt.core.storage.fragments import Extent, Record, Runs, solid
from zckpt.core.storage.records import Damage, RecordCounts
from zckpt.proof.report import changes, difference, digests, findings, versions

from ..conftest import texts


def entry(
    name: str, dtype: str = "F32", file: str = "/r/f", shape: tuple[int, ...] = (2,)
) -> Entry:
    return Entry(*key_of(name), dtype, shape, solid(2, Extent(file, 0, 8)))


def manifest(*entries: Entry, root: str = "/r", **more: Any) -> Manifest:
    return Manifest(root, "x", Run(Origin("y")), {own.key: own for own in entries}, {}).replace(
        **more
    )


ONE = Difference(1, 1, 2.0, 3.0, 1.0, 4)


def outcome(*results: Result, **more: Any) -> ComparisonOutcome:
    return ComparisonOutcome([*results], **more)


# -- a line


def test_what_does_not_differ_has_no_line() -> None:
    a, b = entry("w/param"), entry("w/param")
    assert difference(Result(Match(a), (1, None), ONE)) is None
    assert difference(Result(Match(a, b), (1, 1), None)) is None
    assert difference(Result(Match(a, b), (1, 1), Difference())) is None


def test_elements_that_differ() -> None:
    a, b = entry("w/param"), entry("w/param")
    assert difference(Result(Match(a, b), (1, 2), ONE)) == {
        "tensor": "w/param",
        "elements": 2,
        "count": 1,
        "first": 1,
        "a": 2.0,
        "b": 3.0,
        "max_abs": 1.0,
        "max_ulp": 4,
    }


def test_a_nan_is_called_one() -> None:
    """Not an infinite number, which JSON's readers would take for a large one."""
    measured = Difference(2, 1, 2.0, float("nan"), float("inf"), 1_119_999_327, nans=(0, 2))
    line = difference(Result(Match(entry("w/param"), entry("w/param")), (1, 2), measured))
    assert line is not None
    assert (line["max_abs"], line["max_ulp"], line["b_nan"]) == ("nan", None, 2)
    assert "a_nan" not in line


def test_distances_are_counted_in_bins() -> None:
    bins = [0, 1, *([0] * (len(ULPS) - 2))]
    measured = Difference(1, 1, 2.0, 3.0, 1.0, 1, ulps=bins)
    line = difference(Result(Match(entry("w/param"), entry("w/param")), (1, 2), measured))
    assert line is not None
    assert line["ulps"] == bins


@pytest.mark.parametrize(
    ("match", "keys"),
    [
        (Match(entry("w/param"), entry("w/master"), "bits"), {"b_tensor": "w/master"}),
        (Match(entry("w/master"), entry("w/param"), "rounded"), {"rounded": "w/param"}),
        (Match(entry("w/param"), entry("w/master"), "rounded"), {"rounded": "w/master"}),
        # the line is that of the narrower one
        (Match(entry("w/master"), entry("w/param", "BF16"), "rounded"), {"rounded": "w/master"}),
        (Match(entry("w/param", file="/r/d/g"), entry("w/param"), copy=True), {"copy": "g"}),
    ],
)
def test_a_line_names_what_was_compared(match: Match, keys: dict[str, str]) -> None:
    line = difference(Result(match, (1, 2), ONE))
    assert line is not None
    known = ("a_tensor", "b_tensor", "rounded", "copy")
    assert {key: line[key] for key in known if key in line} == keys


def test_a_copy_without_elements_is_in_no_file() -> None:
    empty = Entry("w", "param", "F32", (0,), Runs([]))
    match = Match(empty, entry("w/param", shape=(3,)), "shapes", copy=True)
    assert difference(Result(match, (None, None), None)) == {
        "tensor": "w/param",
        "copy": None,
        "a_shape": [0],
        "b_shape": [3],
    }


def test_types_that_differ() -> None:
    pair = entry("w/param"), entry("w/param", "I64")
    types = {"a_dtype": "F32", "b_dtype": "I64"}
    line = difference(Result(Match(*pair, "types"), (1, 2), ONE))
    assert line == {"tensor": "w/param", **types}
    line = difference(Result(Match(*pair, "values"), (1, 2), None))
    assert line is not None
    assert line["count"] == 0
    assert types.items() <= line.items()


# -- all lines


def test_values_of_another_type_that_are_equal_are_a_note() -> None:
    a, b = manifest(entry("w/param")), manifest(entry("w/param", "F64"))
    match = Match(a.entries["w", "param"], b.entries["w", "param"], "values")
    report = findings(outcome(Result(match, (1, 2), Difference())), a, b)
    assert (report["differences"], texts(report["notes"])) == (
        [],
        ["stored in different types, but equal by value: w/param"],
    )
    report = findings(outcome(Result(match, (1, 2), ONE)), a, b)
    assert ([line["count"] for line in report["differences"]], report["notes"]) == ([1], [])


@pytest.mark.parametrize("buffers_of", ["a", "b", ""])
@pytest.mark.parametrize("copies_of", ["a", "b", "ab", ""])
@pytest.mark.parametrize("is_copy", [True, False])
def test_buffers_of_ranks(buffers_of: str, copies_of: str, is_copy: bool) -> None:
    """A rank's copy that differs from what another rank has is a note; from its own, a fault."""
    own = {side: entry("w/param") for side in "ab"}
    a, b = (
        manifest(
            entry("w/param"),
            buffers=("w",) if side in buffers_of else (),
            replicas=(own[side],) if side in copies_of else (),
        )
        for side in "ab"
    )
    match = Match(own["a"], own["b"], copy=is_copy)
    report = findings(outcome(Result(match, (1, 2), ONE), Result(match, (1, 2), ONE)), a, b)
    is_note = is_copy and bool(buffers_of) and copies_of != "ab"
    assert len(report["differences"]) == (0 if is_note else 2)
    assert len(report["notes"]) == is_note


def test_one_checkpoint_or_two_are_counted() -> None:
    """A pair counts once; of one checkpoint, each tensor that was read."""
    a = manifest(entry("w/param"), entry("w/master"))
    b = manifest(entry("w/param"))
    pair = Match(a.entries["w", "master"], a.entries["w", "param"], "rounded")
    copy = Match(entry("w/param"), a.entries["w", "param"], copy=True)
    results = [Result(pair, (1, 2), None), Result(copy, (3, 2), None)]
    alone = findings(outcome(*results, records=RecordCounts(1, 2, 3)), a, a)
    assert (alone["tensors"], alone["slots"]) == (2, {"master": 1, "param": 1})
    assert "advice" in alone
    two = findings(outcome(*results, records=RecordCounts(1, 2, 3)), a, b)
    assert two["tensors"] == 1
    assert "advice" not in two


def test_damage_is_said_of_the_side_that_has_it() -> None:
    """Once, also if both sides are the same checkpoint."""
    pair = [Damage(Record(Extent(f"/{root}/f", 0, 8), 1), 2) for root in "rs"]
    sides = [
        manifest(entry("w/param", file=own.record.extent.file), records=(own.record,))
        for own in pair
    ]
    both = findings(outcome(damage=pair), *sides)
    assert [line["file"] for line in both["problems"]] == ["/r/f", "/s/f"]
    alone = findings(outcome(damage=pair[:1]), sides[0], sides[0])
    assert [line["file"] for line in alone["problems"]] == ["/r/f"]


# -- checksums


def test_digests_of_two_sides() -> None:
    same = Result(Match(entry("w/param"), entry("w/param")), (1, 2), None)
    other = Result(Match(entry("v/param"), entry("v/master")), (3, 4), None)
    rounded = Result(Match(entry("u/master"), entry("u/param", "BF16"), "rounded"), (5, 6), None)
    read = Result(Match(entry("t/param")), (7, None), None)
    copy = Result(Match(entry("w/param"), entry("w/param"), copy=True), (8, 9), None)
    tied = Result(Match(entry("head/param"), entry("w/param"), copy=True), (8, 9), None)
    unsupported = Result(Match(entry("s/param"), entry("s/param"), "shapes"), (None, None), None)
    about = {"dtype": "F32", "shape": [2]}
    assert digests([same, copy, tied, other, rounded, read, unsupported], alone=False) == {
        "w/param": {**about, "a": "00000001", "b": "00000002"},
        "v/param": {**about, "a": "00000003", "b": "00000004", "b_tensor": "v/master"},
        "u/master": {**about, "a": "00000005"},
        "u/param": {"dtype": "BF16", "shape": [2], "b": "00000006"},
        "t/param": {**about, "a": "00000007"},
    }


def test_digests_of_one_checkpoint() -> None:
    """A tensor that is compared with two others counts once, by its first checksum."""
    first = Result(Match(entry("w/master"), entry("w/param")), (1, 2), None)
    again = Result(Match(entry("v/param"), entry("w/param")), (3, 4), None)
    about = {"dtype": "F32", "shape": [2]}
    assert digests([first, again], alone=True) == {
        "w/master": {**about, "a": "00000001"},
        "w/param": {**about, "a": "00000002"},
        "v/param": {**about, "a": "00000003"},
    }


# -- the rest


def test_changes_are_roots_of_means() -> None:
    measured = Difference(2, squares=12.0, aa=48.0, changes={0: 1, 2: 1})
    assert changes(measured, 3) == {
        "rms": 2.0,
        "relative": 0.5,
        "histogram": {"first": 0, "counts": [1, 0, 1]},
    }
    half = changes(Difference(1, squares=0.25, aa=0.25), 1)
    assert (half["rms"], half["relative"]) == (0.5, 1.0)
    assert changes(Difference(), 0) == {"rms": 0.0, "relative": None, "histogram": None}


def test_versions_are_those_of_both_sides() -> None:
    a, b = manifest(), manifest()
    assert versions(a, None).keys() == {"zckpt", "a"}
    assert versions(a, b)["b"]["format"] == "y"
