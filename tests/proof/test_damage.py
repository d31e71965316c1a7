"""What is wrong in the files of a checkpoint; faults of real ones are in test_verify.py."""

from __future__ import annotations

import random

import pytest

from zckpt.core.fragments import Extent, Fragment, Runs, Slices, solid
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
    found = damage.contents_of(Manifest("", "x", {}, entries, {}), records)
    for record in records:
        assert {entry.name for entry, _, _ in found[record]} == {
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
            made = Manifest("", "deepspeed", {}, {entry.name: entry}, {})
            assert (damage.uncovered(made) == []) == fine
