"""What is wrong in the files of a checkpoint; faults of real ones are in test_verify.py."""

from __future__ import annotations

import random

import pytest

from zckpt.core.fragments import Box, Boxes, Extent, Fragment, Runs, Slices, solid
from zckpt.core.manifest import Entry, Manifest
from zckpt.proof import damage


@pytest.mark.parametrize("seed", range(20))
def test_what_lies_in_records(seed: int) -> None:
    chosen = random.Random(seed)
    edges = sorted(chosen.sample(range(200), 8))
    records = [
        Extent(file, start, stop - start)
        for file in ("f", "g")
        for start, stop in zip(edges[::2], edges[1::2], strict=True)
    ]
    entries = {}
    for number in range(12):
        extent = Extent(chosen.choice("fgh"), chosen.randrange(200), chosen.randrange(1, 40))
        entry = Entry(f"w{number}/x", "U8", (extent.length,), solid(extent.length, extent))
        entries[entry.name] = entry
    contents = damage.contents_of(Manifest("", "x", {}, entries, {}), records)
    for record in records:
        assert {entry.name for entry, _, _ in contents[record]} == {
            entry.name
            for entry in entries.values()
            for piece in [entry.fragments[0].extent]
            if piece.file == record.file
            and max(piece.offset, record.offset)
            < min(piece.offset + piece.length, record.offset + record.length)
        }


class TestCoverage:
    """What a reader could get wrong without any byte being wrong."""

    def manifest(self, *fragments: Fragment, numel: int = 6) -> Manifest:
        entry = Entry("w/exp_avg", "F32", (numel,), Runs(fragments))
        return Manifest("", "universal", {}, {entry.name: entry}, {})

    def test_a_gap_and_an_overlap(self) -> None:
        whole = [Fragment(0, 4, Extent("f", 0, 16)), Fragment(4, 6, Extent("f", 16, 8))]
        assert damage.uncovered(self.manifest(*whole)) == []
        assert damage.uncovered(self.manifest(whole[0]))
        assert damage.uncovered(self.manifest(whole[0], Fragment(3, 6, Extent("f", 16, 12))))
        overlapping = self.manifest(whole[0], Fragment(4, 6, Extent("f", 12, 8)))
        assert "overlap" in damage.uncovered(overlapping)[0]

    def test_slices_within_their_flats(self) -> None:
        flats = (Extent("a", 0, 12), Extent("b", 0, 12))
        for numel, fine in ((6, True), (5, True), (7, False)):
            entry = Entry("w/exp_avg", "F32", (numel,), Slices(flats, 0, numel, 4))
            manifest = Manifest("", "deepspeed", {}, {entry.name: entry}, {})
            assert (damage.uncovered(manifest) == []) == fine

    def boxes(self, *boxes: Box) -> list[str]:
        entry = Entry("w/exp_avg", "F32", (4, 6), Boxes(boxes) if len(boxes) > 1 else boxes[0])
        return damage.uncovered(Manifest("", "dcp", {}, {entry.name: entry}, {}))

    def columns(self, start: int, stop: int, file: str = "a", at: int = 0, rows: int = 4) -> Box:
        sizes, extent = (rows, stop - start), Extent(file, at, 4 * rows * (stop - start))
        return Box((4, 6), (0, start), sizes, (stop - start, 1), 0, 4, extent)

    def test_boxes_that_leave_a_gap_or_have_elements_twice(self) -> None:
        first, second = self.columns(0, 2), self.columns(2, 6, "b")
        assert self.boxes(first, second) == self.boxes(second, first) == []
        assert "do not cover" in self.boxes(first)[0]
        assert "do not cover" in self.boxes(first, self.columns(3, 6, "b"))[0]
        assert "do not cover" in self.boxes(first, self.columns(1, 5, "b"))[0]
        assert "do not cover" in self.boxes(first, self.columns(2, 6, "b", rows=3))[0]
        assert "do not cover" in self.boxes(self.columns(1, 7), self.columns(0, 0))[0]

    def test_boxes_with_too_few_bytes(self) -> None:
        second = self.columns(2, 6, "b")
        short = Box((4, 6), (0, 0), (4, 2), (2, 1), 1, 4, Extent("a", 0, 32))
        assert "do not cover" in self.boxes(short, second)[0]
        turned = Box((4, 6), (0, 0), (4, 6), (1, 5), 0, 4, Extent("a", 0, 4 * 24))
        assert "do not cover" in self.boxes(turned)[0]
        assert self.boxes(Box((4, 6), (0, 0), (4, 6), (1, 4), 0, 4, Extent("a", 0, 96))) == []

    def test_boxes_of_the_same_bytes(self) -> None:
        first = self.columns(0, 2)
        assert "overlap in a" in self.boxes(first, self.columns(2, 6, "a", at=28))[0]
        assert self.boxes(first, self.columns(2, 6, "a", at=32)) == []

    def test_boxes_that_lie_between_each_other(self) -> None:
        """Two views of one storage share no byte."""
        extent = Extent("a", 0, 96)
        left = Box((4, 6), (0, 0), (4, 2), (6, 1), 0, 4, extent)
        assert self.boxes(left, Box((4, 6), (0, 2), (4, 4), (6, 1), 2, 4, extent)) == []
