"""What is wrong in the files of a checkpoint; faults of real ones are in test_verify.py."""

from __future__ import annotations

import random
import zlib
from typing import Any

import pytest
from msgspec.structs import replace

from zckpt.core.checkpoint.entries import Entry, key_of
from zckpt.core.checkpoint.manifest import Files, Manifest, Run
from zckpt.core.comparison.compare import ComparisonOutcome, Result
from zckpt.core.comparison.difference import Difference
from zckpt.core.passes.plan import Match
from zckpt.core.storage.fragments import Box, Boxes, Extent, Fragment, Record, Runs, solid
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
        entry = Entry(f"w{number}", "x", "U8", (extent.length,), solid(extent.length, extent))
        entries[entry.key] = entry
    chosen.shuffle(records)
    contents = damage.contents_of(Manifest("", "x", Run(), entries, {}), records)
    for record in records:
        assert {entry.name for entry, _ in contents[record]} == {
            entry.name
            for entry in entries.values()
            for piece in [entry.fragments[0].extent]
            if piece.file == record.file
            and max(piece.offset, record.offset)
            < min(piece.offset + piece.length, record.offset + record.length)
        }


class TestOverlaps:
    """States of the optimizer and masters that have bytes of each other."""

    def boxes(self, *boxes: Box) -> list[str]:
        entry = Entry("w", "exp_avg", "F32", (4, 6), Boxes(boxes) if len(boxes) > 1 else boxes[0])
        return damage.overlapping(Manifest("", "dcp", Run(), {entry.key: entry}, {}))

    def columns(self, start: int, stop: int, file: str = "a", at: int = 0, rows: int = 4) -> Box:
        sizes, extent = (rows, stop - start), Extent(file, at, 4 * rows * (stop - start))
        return Box(
            whole=(4, 6),
            offsets=(0, start),
            sizes=sizes,
            strides=(stop - start, 1),
            first=0,
            size=4,
            extent=extent,
        )

    def test_runs_of_the_same_bytes(self) -> None:
        runs = Runs([Fragment(0, 4, Extent("f", 0, 16)), Fragment(4, 6, Extent("f", 12, 8))])
        entry = Entry("w", "exp_avg", "F32", (6,), runs)
        (found,) = damage.overlapping(Manifest("", "x", Run(), {entry.key: entry}, {}))
        assert found.code == "elements-overlap"
        assert found.message == "w/exp_avg and w/exp_avg overlap in f"

    def test_boxes_of_the_same_bytes(self) -> None:
        first = self.columns(0, 2)
        (found,) = self.boxes(first, self.columns(2, 6, "a", at=28))
        assert (found.code, found.file) == ("elements-overlap", "a")
        assert self.boxes(first, self.columns(2, 6, "a", at=32)) == []

    @pytest.mark.parametrize(
        ("slot", "count"), [("param", 0), ("state", 0), ("master", 1), ("exp_avg", 1)]
    )
    def test_only_states_of_the_optimizer_share_no_memory(self, slot: str, count: int) -> None:
        entries = {
            key_of(name): Entry(*key_of(name), "F32", (6,), solid(6, Extent("f", 0, 24)))
            for name in (f"w/{slot}", f"v/{slot}")
        }
        assert len(damage.overlapping(Manifest("", "x", Run(), entries, {}))) == count

    def test_boxes_that_lie_between_each_other(self) -> None:
        """Two views of one storage share no byte."""
        extent = Extent("a", 0, 96)
        left = Box(
            whole=(4, 6),
            offsets=(0, 0),
            sizes=(4, 2),
            strides=(6, 1),
            first=0,
            size=4,
            extent=extent,
        )
        assert (
            self.boxes(
                left,
                Box(
                    whole=(4, 6),
                    offsets=(0, 2),
                    sizes=(4, 4),
                    strides=(6, 1),
                    first=2,
                    size=4,
                    extent=extent,
                ),
            )
            == []
        )

    def test_tensors_in_another_order_than_in_the_file(self) -> None:
        entries = {
            key_of(name): Entry(*key_of(name), "F32", (6,), solid(6, Extent("f", offset, 24)))
            for name, offset in (("c/exp_avg", 48), ("a/exp_avg", 0), ("b/exp_avg", 24))
        }
        assert damage.overlapping(Manifest("", "x", Run(), entries, {})) == []


# -- what a wrong checksum means


def run(data: bytes, *places: tuple[str, int, int], root: str = "/r", **more: Any) -> Manifest:
    """A file whose record is [8, 8 + len(data)); a tensor of U16 has [offset, stop) of the file."""
    extent = Extent(f"{root}/f", 8, len(data))
    entries = {}
    for name, offset, stop in places:
        numel = (stop - offset) // 2
        own = solid(numel, Extent(extent.file, offset, stop - offset))
        entries[name, "x"] = Entry(name, "x", "U16", (numel,), own)
    record = Record(extent, zlib.crc32(data))
    return Manifest(root, "x", Run(), entries, {}, files=Files(records=(record,))).replace(**more)


DATA = bytes(range(40))


def meant(manifest: Manifest, *flips: int) -> dict[str, Any]:
    """What is said if bit 2 of these bytes of the record is flipped."""
    data = bytearray(DATA)
    for place in flips:
        data[place] ^= 4
    found = damage.Damage(manifest.files.records[0], zlib.crc32(data))
    (contents,) = damage.contents_of(manifest, [manifest.files.records[0].extent]).values()
    return damage.meaning(manifest, found, contents)


def test_a_flipped_bit_is_of_an_element() -> None:
    manifest = run(DATA, ("a", 8, 20), ("b", 24, 48))
    line = meant(manifest, 19)  # byte 27 of the file
    assert line["message"] == (
        "f is damaged, as if bit 2 of byte 27 were flipped, in element 1 of b/x"
    )
    assert (line["tensors"], line["element"], line["harmless"]) == (["b/x"], 1, False)
    assert line["flipped"] == {"byte": 27, "bit": 2}
    assert meant(manifest, 0)["element"] == 0
    assert meant(manifest, 11)["tensors"] == ["a/x"]


def test_a_flipped_bit_in_columns_is_of_their_element() -> None:
    """The runs of a slice lie together in the file, and apart in the tensor."""
    extent = Extent("/r/f", 8, 40)
    own = Box(
        whole=(5, 6), offsets=(0, 2), sizes=(5, 4), strides=(4, 1), first=0, size=2, extent=extent
    )
    entry = Entry("a", "x", "U16", (5, 6), own)
    manifest = run(DATA).replace(entries={entry.key: entry})
    for byte, element in ((0, 2), (7, 5), (8, 8), (33, 26), (39, 29)):
        assert meant(manifest, byte)["element"] == element


def test_a_flipped_bit_beside_tensors_is_harmless() -> None:
    manifest = run(DATA, ("a", 8, 20), ("b", 24, 48))
    line = meant(manifest, 12)
    assert line["message"].endswith(
        "byte 20 were flipped, in padding: harmless, no tensor lies there"
    )
    assert (line["tensors"], line["harmless"]) == ([], True)
    line = meant(run(DATA), 12)
    assert line["message"].endswith("byte 20 were flipped, outside every tensor")
    assert not line["harmless"]


@pytest.mark.parametrize(("offset", "harmless"), [(0, False), (1, True)])
def test_a_record_of_a_whole_file_has_no_padding(offset: int, harmless: bool) -> None:
    """It begins where the file does."""
    manifest = run(DATA, ("a", 8, 20))
    record = replace(manifest.files.records[0], extent=Extent("/r/f", offset, len(DATA)))
    line = meant(manifest.replace(records=(record,)), 30)
    assert line["harmless"] is harmless


def test_damage_of_several_bits_is_of_all_tensors() -> None:
    line = meant(run(DATA, ("a", 8, 20), ("b", 24, 48)), 1, 2, 3)
    assert line["message"] == (
        "f is damaged: the 40 bytes at 8, which contain a/x, b/x, do not have the CRC-32 that the "
        "file states"
    )
    assert "which contain no tensor, do not" in meant(run(DATA), 1, 2, 3)["message"]


def test_in_many_bytes_one_bit_is_only_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = run(DATA, ("a", 8, 20), ("b", 24, 48))
    monkeypatch.setattr(damage, "SURE", 40)
    assert meant(manifest, 19)["tensors"] == ["b/x"]
    monkeypatch.setattr(damage, "SURE", 39)
    line = meant(manifest, 19)
    assert line["tensors"] == ["a/x", "b/x"]
    assert "element" not in line
    assert "were flipped (if only one bit is), in element 1 of b/x" in line["message"]


def test_padding_that_is_not_zero_is_a_note_where_the_engine_has_zeros() -> None:
    manifest = run(DATA, zero_padding=True)
    (record,) = manifest.files.records
    outcome = ComparisonOutcome(beside=[(record, record.extent.part(4, 10))])
    (note,) = damage.not_zero(outcome, manifest)
    assert note.message.startswith("f: the 6 bytes of padding at 12 are not all zero")
    assert damage.not_zero(outcome, manifest.replace(zero_padding=False)) == []
    assert damage.not_zero(outcome, run(DATA)) == [], "of other engines nothing is known"
    outcome.damage = [damage.Damage(record, 1)]
    assert damage.not_zero(outcome, manifest) == []


def test_records_that_differ_in_padding_alone() -> None:
    a = run(DATA, ("a", 8, 20))
    other = {"root": "/s"}
    b = run(DATA[:-1] + b"x", ("a", 8, 20), **other)

    def noted(a: Manifest, b: Manifest, how: str = "bits", difference: Any = None) -> int:
        pair = Match(a.entries["a", "x"], b.entries["a", "x"], how)
        outcome = ComparisonOutcome([Result(pair, (1, 1), difference)])
        return len(damage.other_padding(a, b, outcome))

    assert noted(a, b) == 1
    assert noted(a, run(DATA, ("a", 8, 20), **other)) == 0  # the same bytes
    assert noted(a, b, difference=Difference(1)) == 0
    assert noted(a, b, how="values") == 0
    assert noted(a, run(DATA[:-1] + b"x", ("a", 10, 22), **other)) == 0  # it lies elsewhere
    assert noted(run(DATA, ("a", 8, 20), ("c", 20, 24)), b) == 0  # what is not compared
    for side in (a, b):
        unknown = side.replace(records=(replace(side.files.records[0], stated_crc=None),))
        assert noted(*((unknown, b) if side is a else (a, unknown))) == 0
    assert noted(a, b.replace(records=())) == 0
    nothing = run(DATA, ("a", 60, 70)), run(DATA[:-1] + b"x", ("a", 60, 70), **other)
    assert noted(*nothing) == 0


def test_tensors_whose_checksum_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    data, other = bytearray(DATA), zlib.crc32(b"other bytes")
    data[5] ^= 1
    stated = Entry("w", "x", "U16", (20,), Runs([]), zlib.crc32(DATA))
    manifest = Manifest("/r", "x", Run(), {("w", "x"): stated}, {})
    flipped = zlib.crc32(data)

    def found(crc: int | None, a: Entry = stated, b: Entry | None = None) -> list[dict[str, Any]]:
        return damage.digest(Result(Match(a, b), (crc, crc), None), manifest)

    (line,) = found(flipped)
    assert line["message"] == "w/x is damaged, as if a bit of element 2 were flipped"
    assert line["element"] == 2
    (line,) = found(other)
    assert "its CRC-32 is not the one that the manifest states" in line["message"]
    assert "element" not in line
    assert found(stated.digest) == found(None) == []
    assert found(flipped, replace(stated)) == []  # a copy, of which nothing is stated
    assert len(found(flipped, replace(stated), stated)) == 1
    monkeypatch.setattr(damage, "SURE", 40)
    assert found(flipped)[0]["element"] == 2
    monkeypatch.setattr(damage, "SURE", 39)
    assert "element" not in found(flipped)[0]
