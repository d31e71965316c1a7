"""Which elements of two checkpoints differ, whose bytes were read, and what records say of them."""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from zckpt.core.checkpoint.dtypes import TORCH_NAMES, encode
from zckpt.core.checkpoint.entries import Entry, key_of
from zckpt.core.checkpoint.manifest import Files, Manifest, Run
from zckpt.core.comparison import compare
from zckpt.core.passes.plan import Match
from zckpt.core.passes.resources import Copying, Progress
from zckpt.core.storage.byte_sources import Fingerprint
from zckpt.core.storage.fragments import Extent, Record, solid
from zckpt.errors import SourceChanged

CHUNK = 1 << 20  # bytes that are compared at a time: the least
COPYING = Copying(jobs=1, memory=2 << 20)

Store = Callable[..., Entry]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Writes numbers as a file of their own, which is one tensor."""

    def write(name: str, values: Iterable[float], dtype: str = "F32") -> Entry:
        numbers = list(values)
        data = array("f", numbers).tobytes()
        if dtype != "F32":
            data = b"".join(encode(dtype, value) for value in numbers)
        path = tmp_path / f"{len([*tmp_path.iterdir()])}"
        path.write_bytes(data)
        extent = Extent(str(path), 0, len(data))
        return Entry(*key_of(name), dtype, (len(numbers),), solid(len(numbers), extent))

    return write


def record_of(entry: Entry, crc: int | None = None) -> Record:
    extent = entry.fragments[0].extent
    return Record(extent, crc_of(entry) if crc is None else crc)


def crc_of(entry: Entry) -> int:
    return zlib.crc32(Path(entry.fragments[0].extent.file).read_bytes())


def manifest(*records: Record) -> Manifest:
    return Manifest("/", "x", Run(), {}, {}, files=Files(records=records))


def compared(*matches: Match, sides: Any = None, **options: Any) -> compare.ComparisonOutcome:
    a, b = sides or (manifest(), manifest())
    return compare.compare(matches, a, b, COPYING, **options)


def test_equal_tensors(store: Store) -> None:
    ours, theirs = store("w/param", [1, 2, 3]), store("w/param", [1, 2, 3])
    outcome = compared(Match(ours, theirs))
    (result,) = outcome.results
    assert (result.difference, result.differs) == (None, False)
    assert result.digests == (crc_of(ours), crc_of(ours))
    assert outcome.bytes == 24


def test_tensors_that_differ_have_checksums_of_their_own(store: Store) -> None:
    ours, theirs = store("w/param", [1, 2, 3, 4]), store("w/param", [1, 2, 5, 5])
    (result,) = compared(Match(ours, theirs)).results
    assert result.differs
    assert result.difference is not None
    assert (result.difference.count, result.difference.first) == (2, 2)
    assert (result.difference.a, result.difference.b, result.difference.max_abs) == (3, 5, 2)
    assert result.digests == (crc_of(ours), crc_of(theirs))


@pytest.mark.parametrize("turned", [False, True])
def test_the_wider_side_is_rounded(turned: bool, store: Store) -> None:
    wide, narrow = store("w/master", [1, 1 + 2**-20, 3]), store("w/param", [1, 1, 4], "BF16")
    pair = (narrow, wide) if turned else (wide, narrow)
    (result,) = compared(Match(*pair, "rounded")).results
    assert result.difference is not None
    assert (result.difference.count, result.difference.first) == (1, 2)
    assert {result.difference.a, result.difference.b} == {3, 4}
    assert result.digests == tuple(map(crc_of, pair))


def test_numbers_of_two_types_are_all_looked_at(store: Store) -> None:
    ours, theirs = store("w/param", [1, 2], "F16"), store("w/param", [1, 2], "BF16")
    (result,) = compared(Match(ours, theirs, "values")).results
    assert result.difference is not None
    assert (result.differs, result.difference.cosine) == (False, pytest.approx(1))
    assert result.digests == (crc_of(ours), crc_of(theirs))


@pytest.mark.parametrize("how", ["shapes", "types"])
def test_what_cannot_be_compared_is_not_read(how: str, store: Store) -> None:
    ours, theirs = store("w/param", [1, 2]), store("w/param", [1, 2, 3])
    after = store("v/param", [4])
    outcome = compared(Match(ours, theirs, how), Match(after, after))
    assert [result.digests for result in outcome.results] == [(None, None), (crc_of(after),) * 2]
    assert outcome.bytes == 8


def test_a_tensor_alone_is_only_read(store: Store) -> None:
    ours = store("w/param", [1, 2])
    outcome = compared(Match(ours))
    assert outcome.results[0].digests == (crc_of(ours), None)
    assert (outcome.bytes, outcome.results[0].difference) == (8, None)


def test_results_stand_in_the_order_of_the_matches(store: Store) -> None:
    names = ["a/param", "a/exp_avg", "b/param", "b/exp_avg"]
    entries = [store(name, [number, 0]) for number, name in enumerate(names)]
    others = [store(name, [number, number == 2]) for number, name in enumerate(names)]
    outcome = compared(*map(Match, entries, others))
    assert [result.match.name for result in outcome.results] == names
    assert [result.differs for result in outcome.results] == [False, False, True, False]
    assert [result.digests[0] for result in outcome.results] == list(map(crc_of, entries))


PLACES = [5, 270_000, 270_001, 299_999]  # the last ones are behind the first chunk of F32


@pytest.mark.parametrize(
    ("measure", "count", "sums"),
    [("first", 1, 262_144), ("differing", 4, 300_000), ("all", 4, 300_000)],
)
def test_tensors_of_several_chunks(measure: str, count: int, sums: float, store: Store) -> None:
    """Behind a small tensor, so that the chunks begin inside of the large one."""
    changed = [1.0] * 300_000
    for place in PLACES:
        changed[place] = 2
    small, ours = store("a/param", [7] * 10), store("w/param", [1] * 300_000)
    outcome = compared(Match(small, small), Match(ours, store("w/param", changed)), measure=measure)
    first, second = outcome.results
    assert (first.differs, first.difference is None) == (False, measure != "all")
    assert second.difference is not None
    assert (second.difference.count, second.difference.first) == (count, 5)
    assert second.difference.aa == pytest.approx(sums, abs=10)
    assert second.digests == (crc_of(ours), crc_of(second.match.b or ours))
    assert outcome.bytes == 80 + 2 * 1_200_000


def test_only_parts_that_differ_are_measured(store: Store) -> None:
    ours, theirs = store("w/param", [1] * 300_000), store("w/param", [1] * 299_999 + [3])
    for measure, aa in (("differing", 300_000 - (1 << 18)), ("all", 300_000)):
        (result,) = compared(Match(ours, theirs), measure=measure).results
        assert result.difference is not None
        assert result.difference.aa == pytest.approx(aa)


def test_tensors_behind_the_end_of_a_large_one(store: Store) -> None:
    """All are in its second chunk."""
    large, same = store("a/param", [1] * 300_000), store("a/param", [1] * 300_000)
    ours = [store(f"{name}/param", [5, 5]) for name in "bc"]
    theirs = [store("b/param", [5, 6]), store("c/param", [5, 5])]
    results = compared(Match(large, same), *map(Match, ours, theirs)).results
    assert [result.differs for result in results] == [False, True, False]
    assert [result.digests[1] for result in results] == [*map(crc_of, [same, *theirs])]


def test_each_tensor_that_differs_is_found(store: Store) -> None:
    """Also behind one of which the first part is enough."""
    changed = [1.0] * 300_000
    changed[5] = changed[270_000] = 2
    large, small = store("a/param", [1] * 300_000), store("b/param", [5])
    matches = Match(large, store("a/param", changed)), Match(small, store("b/param", [6]))
    results = compared(*matches, measure="first").results
    assert [result.difference and result.difference.count for result in results] == [1, 1]


def test_chunks_have_room_for_the_wider_side(store: Store) -> None:
    narrow, wide = store("w/param", [1] * 300_000, "BF16"), store("w/master", [1] * 300_000)
    (result,) = compared(Match(narrow, wide, "rounded")).results
    assert (result.differs, result.digests) == (False, (crc_of(narrow), crc_of(wide)))


def test_what_is_read_in_a_later_match_alone(store: Store) -> None:
    ours, theirs = store("w/param", [1, 2]), store("w/param", [1, 2, 3])
    outcome = compared(Match(ours, theirs, "shapes"), Match(ours))
    assert [result.digests for result in outcome.results] == [(None, None), (crc_of(ours), None)]


def test_a_tensor_in_several_matches_counts_once(store: Store) -> None:
    """Although chunks cut it at other places then."""
    large, other, copy = (store("a/param", [n] * 300_000) for n in (1, 1, 2))
    small, last = store("b/param", [3]), store("c/param", [4])
    whole = manifest(*map(record_of, (large, other, copy, small, last)))
    outcome = compared(
        *(Match(large, other), Match(small, small), Match(large, copy, copy=True)),
        Match(last, small),
        sides=(whole, whole),
    )
    assert [result.differs for result in outcome.results] == [False, False, True, True]
    assert [result.digests[0] for result in outcome.results] == [
        crc_of(entry) for entry in (large, small, large, last)
    ]
    assert outcome.results[2].digests[1] == crc_of(copy)
    assert (outcome.records.checked, outcome.records.unchecked) == (5, 0)


def test_whole_numbers_are_compared_by_their_bits(store: Store) -> None:
    ours, theirs = store("a/state", [1, 2], "I64"), store("a/state", [1, 2], "I64")
    assert compared(Match(ours, theirs)).results[0].difference is None


def test_equal_bytes_of_two_types_are_other_numbers(store: Store) -> None:
    ours = store("w/param", [1, 2], "F16")
    (result,) = compared(Match(ours, replace(ours, dtype="BF16"), "values")).results
    assert result.differs


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_few_numbers_are_rounded_without_numpy(
    dtype: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of all matches count, and the result is the same."""
    wide = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, -0.0, 1e-7, 3e38, -math.inf]
    numbers = [struct.unpack("<f", struct.pack("<f", value))[0] for value in wide]
    narrow = [*torch.tensor(numbers).to(getattr(torch, TORCH_NAMES[dtype])).tolist()]
    pairs = [
        Match(store(f"{n}/master", numbers), store(f"{n}/param", values, dtype), "rounded")
        for n, values in enumerate((narrow, [2.0, *narrow[1:]]))
    ]
    casts: list[str] = []
    with_numpy = compare.cast
    monkeypatch.setattr(compare, "cast", lambda *args: casts.append("") or with_numpy(*args))
    for few, is_asked in ((16, False), (15, True)):
        monkeypatch.setattr(compare, "FEW", few)
        outcome = compared(*pairs)
        assert [result.differs for result in outcome.results] == [False, True]
        assert bool(casts) == is_asked


@pytest.mark.parametrize("few", [0, 1 << 17])
def test_any_two_nans_are_equal_once_one_side_was_rounded(
    few: int, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "FEW", few)
    wide, other, narrow = (store("w/x", [math.nan], dtype) for dtype in ("F32", "F32", "BF16"))
    Path(other.fragments[0].extent.file).write_bytes(b"\x01\x00\xff\xff")
    Path(narrow.fragments[0].extent.file).write_bytes(b"\xff\xff")
    rounded, bits = compared(Match(wide, narrow, "rounded"), Match(wide, other)).results
    assert (rounded.differs, bits.differs) == (False, True)


def test_nothing_to_compare() -> None:
    assert compared().results == []


def test_a_source_that_has_changed_ends_the_comparison(store: Store) -> None:
    ours = store("w/param", [1, 2])
    path = ours.fragments[0].extent.file
    seen = {path: Fingerprint.of(os.stat(path))}
    side = manifest(record_of(ours)).replace(fingerprints=seen)
    assert compared(Match(ours), sides=(side, side)).results[0].digests[0] == crc_of(ours)
    os.utime(path, ns=(1, 1))
    with pytest.raises(SourceChanged):
        compared(Match(ours), sides=(side, side))


def test_progress_counts_all_bytes(store: Store) -> None:
    """Also those of a copy that is read again."""
    wide, narrow = store("w/master", [1] * 300_000), store("w/param", [1] * 300_000, "BF16")
    told: list[int] = []
    shown: list[str] = []

    class Shown:
        def __call__(self, count: int) -> None:
            told.append(count)

        def describe(self, text: str) -> None:
            shown.append(text)

    def begin(total: int) -> Shown:
        told.append(-total)
        return Shown()

    matches = [
        *(Match(wide, narrow, "rounded"), Match(wide, wide, copy=True), Match(narrow)),
        Match(wide, narrow, "shapes"),
    ]
    outcome = compared(*matches, begin=begin)
    assert told[0] == -(3 * 1_200_000 + 2 * 600_000)
    assert sum(told) == 0
    assert outcome.bytes == -told[0]
    assert {*shown} == {"comparing w/master", "checking w/param"}


def test_damage_is_listed_once_for_each_record(store: Store) -> None:
    """A tensor that is in several matches counts once, also if both sides are one checkpoint."""
    ours, theirs = store("w/param", [1, 2]), store("w/param", [1, 2])
    wrong = record_of(ours, 5)
    right = record_of(theirs)
    matches = [Match(ours, theirs), Match(ours, theirs, copy=True)]
    outcome = compared(*matches, sides=(manifest(wrong), manifest(right)))
    assert [(item.record, item.crc) for item in outcome.damage] == [(wrong, crc_of(ours))]
    assert (outcome.records.checked, outcome.records.unchecked) == (2, 0)
    whole = manifest(wrong, right)
    outcome = compared(*matches, sides=(whole, whole))
    assert [(item.record, item.crc) for item in outcome.damage] == [(wrong, crc_of(ours))]
    assert (outcome.records.checked, outcome.records.unchecked) == (2, 0)


def test_records_that_no_tensor_needs_are_read_if_asked(store: Store) -> None:
    ours, other = store("w/param", [1, 2]), store("v/param", [3])
    sides = (manifest(record_of(ours), record_of(other, 5)),) * 2
    assert compared(Match(ours), sides=sides).damage == []
    (damage,) = compared(Match(ours), sides=sides, everything=True).damage
    assert damage.record == record_of(other, 5)


@pytest.mark.parametrize(
    ("padding", "is_told"),
    [
        (b"\0" * 16, False),
        (b"\0" * 15 + b"x", True),
        (b"x" * compare.PADDING, True),
        (b"x" * (compare.PADDING + 4), False),
    ],
)
def test_padding_that_is_not_zero(padding: bytes, is_told: bool, store: Store) -> None:
    ours = store("w/param", [1] * 100_000)
    path = Path(ours.fragments[0].extent.file)
    path.write_bytes(path.read_bytes() + padding)
    record = Record(Extent(str(path), 0, 400_000 + len(padding)), crc_of(ours))
    outcome = compared(Match(ours), sides=(manifest(record),) * 2)
    beside = [(record, Extent(str(path), 400_000, len(padding)))]
    assert outcome.beside == (beside if is_told else [])


def test_threads_share_the_parts(store: Store) -> None:
    changed = [1.0] * 300_000
    for place in PLACES:
        changed[place] = 2
    ours, theirs = store("w/param", [1] * 300_000), store("w/param", changed)
    outcome = compare.compare([Match(ours, theirs)], manifest(), manifest(), Copying(3, 6 << 20))
    (result,) = outcome.results
    assert result.difference is not None
    assert (result.difference.count, result.difference.first) == (4, 5)
    assert result.digests == (crc_of(ours), crc_of(theirs))
    assert outcome.bytes == 2 * 1_200_000


class Two:
    """Two processes that share a pass. The first one carries out the first block alone."""

    rank = 0

    def carry_out(self, make: Callable[[int], Any], chunk: int) -> Any:
        one, other = make(chunk), make(chunk)
        assert json.dumps(one.tasks_by_name()) == json.dumps(other.tasks_by_name())
        one.run(iter([0, 99]).__next__)
        other.run(iter(range(1, 99)).__next__)
        one.take(json.loads(json.dumps(other.findings())))
        return one

    def agree_on_problem(self, message: str) -> None:
        raise AssertionError(message)


def test_processes_share_what_they_have_found(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than the first one would read again to complete a record."""
    monkeypatch.setattr("zckpt.core.passes.pooling.BLOCK", CHUNK)
    changed = [1.0] * 900_000
    for place in PLACES[1:]:
        changed[place] = 2
    ours, theirs = store("w/param", [1] * 900_000), store("w/param", changed)
    alone = store("v/param", [1])
    sides = manifest(record_of(ours)), manifest(record_of(theirs, 5))
    pooled: Any = replace(COPYING, pool=Two())
    told: list[int] = []

    def begin(total: int) -> Progress:
        told.append(-2 * total)  # the processes of this test share one function
        return told.append

    matches = [Match(ours, theirs), Match(alone)]
    outcome = compare.compare(matches, *sides, pooled, begin=begin)
    assert sum(told) == 0
    result, last = outcome.results
    assert result.difference is not None
    assert (result.difference.count, result.difference.first) == (3, 270_000)
    assert result.digests == (crc_of(ours), crc_of(theirs))
    assert last.digests == (crc_of(alone), None)
    assert outcome.bytes == 2 * 3_600_000 + 4
    assert [damage.record for damage in outcome.damage] == [record_of(theirs, 5)]
    assert (outcome.records.checked, outcome.records.unchecked) == (2, 0)
