"""Confirms or contradicts a correction of damaged bytes by related tensors, such as masters.

rounding       compares a 16-bit weight with its master: the wider value must round to the narrower
substitution   puts other bytes in place of the damaged ones: a copy on another rank, the rounded
               master of a 16-bit weight, or the same tensor of an older checkpoint. The record
               (byte range with a checksum) must then have the CRC-32 that its file states
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from msgspec import Struct

from ..core.checkpoint.cast import are_rounded, cast
from ..core.checkpoint.dtypes import SIZES
from ..core.checkpoint.entries import Entry, Key
from ..core.checkpoint.manifest import Manifest
from ..core.checkpoint.weights import is_rounded
from ..core.comparison.masters import with_masters
from ..core.grouping import by_key
from ..core.passes.pieces import ElementReader, ReadRequest
from ..core.passes.plan import Match
from ..core.passes.streaming import reading
from ..core.storage.corrections import Correction, corrected
from ..core.storage.fileio import Buffer, crc_of
from ..core.storage.fragments import Fragment
from ..core.storage.records import Damage, RecordChecker

BLOCK = 1 << 20  # bytes that are compared at once
SCRATCH = 8 << 20  # bytes of working memory for small pieces of many ranks
MOST = 8 << 20  # bytes that are put in place of damaged ones
AROUND = 64  # elements on each side that must round too, or rounding says nothing here
MOST_RUNS = 1 << 16  # of a slice that is compared with another one
GAP = 16  # equal bytes between two different ones that are kept together


Contents = Sequence[tuple[Entry, Fragment]]
"""The content of a record (a byte range with a checksum): pairs of a tensor and a part of it.

The part is a byte range of the tensor that overlaps the record.
"""


class Said(Struct, frozen=True):
    """What other bytes say about a flipped bit: they confirm it, contradict it, or neither.

    `who` names the tensor with these bytes.
    """

    confirms: bool = False
    contradicts: bool = False
    who: str = ""


class Substituted(Struct, frozen=True):
    """Corrections that copy the bytes of another tensor (`who`) over damaged ones."""

    corrections: tuple[Correction, ...]
    who: str


class Witnesses:
    """Finds bytes that confirm a correction, in a checkpoint and in an `older` one of its run."""

    def __init__(self, manifest: Manifest | None, older: Manifest | None = None) -> None:
        self._pairs: dict[int, Match] = {}
        self._copies: dict[Key, list[Entry]] = {}
        self._older = older
        if manifest is None:
            return
        if not manifest.run.weights_differ:
            for match in with_masters(manifest.entries):
                if match.b is not None and match.how in ("rounded", "bits"):
                    self._pairs[id(match.a)] = self._pairs[id(match.b)] = match
        self._copies = by_key((entry.key, entry) for entry in manifest.replicas)
        for key, copies in self._copies.items():
            if key in manifest.entries:
                copies.insert(0, manifest.entries[key])

    def says(self, contents: Contents, offset: int, bit: int) -> Said:
        """Compares a weight with its fp32 master: do they agree with a bit flipped, or unchanged?

        The bit is in the byte at `offset` of the file. The result is neither if no weight or master
        contains this byte, or if neighboring elements do not agree either.
        """
        for entry, fragment in contents:
            match, extent = self._pairs.get(id(entry)), fragment.extent
            if not extent.offset <= offset < extent.offset + extent.length or match is None:
                continue
            partner = match.b if match.a is entry else match.a
            assert partner is not None
            size = SIZES[entry.dtype]
            number, place = fragment.element_at(offset, size), (offset - extent.offset) % size
            first = max(0, number - AROUND)
            stop = min(entry.numel, number + AROUND + 1)
            ours, theirs = (_elements(each, first, stop) for each in (entry, partner))
            now, other = ours.pop(number - first), theirs.pop(number - first)
            if not all(map(partial(_are_rounded, entry, partner), ours, theirs)):
                continue  # as they are in engines that misplace masters, or the damage is here
            before = bytearray(now)
            before[place] ^= 1 << bit
            fits = _are_rounded(entry, partner, now, other)
            fitted = _are_rounded(entry, partner, bytes(before), other)
            if fits != fitted:
                return Said(bool(fitted), bool(fits), partner.name)
        return Said()

    def substituted(self, damage: Damage, contents: Contents) -> Substituted | None:
        """Finds another tensor whose bytes, in place of the damaged ones, give the stated CRC-32.

        None if there is no such tensor.
        """
        extent = damage.record.extent
        for who, references in self._sets(contents):
            corrections = _differences(contents, references)
            if not corrections:
                continue
            with corrected(corrections):
                if crc_of([extent]) == damage.record.crc:
                    return Substituted(tuple(corrections), who)
        return None

    def _sets(self, contents: Contents) -> Iterator[tuple[str, dict[int, Entry]]]:
        """Yields sets of tensors whose bytes could replace those of the tensors in `contents`.

        A set is a pair: a description for the report, and a dictionary that maps the Python `id` of
        a tensor's entry to the entry that could replace it.
        """
        copies = {
            id(entry): [own for own in self._copies.get(entry.key, ()) if own is not entry]
            for entry, _ in contents
        }
        for number in range(max(map(len, copies.values()), default=0)):
            references = {key: own[number] for key, own in copies.items() if number < len(own)}
            yield "a copy on another rank", references
        pairs = ((entry, self._pairs.get(id(entry))) for entry, _ in contents)
        partners = (
            (entry, match.b if match.a is entry else match.a) for entry, match in pairs if match
        )
        if masters := {
            id(entry): partner
            for entry, partner in partners
            if partner is not None
            and (partner.dtype == entry.dtype or is_rounded(partner.dtype, entry.dtype))
        }:
            is_master = any(partner.slot == "master" for partner in masters.values())
            yield (
                "the rounded masters" if is_master else "the weights that equal the masters",
                masters,
            )
        if self._older is not None:
            entries = self._older.entries
            references = {
                id(entry): other
                for entry, _ in contents
                if (other := entries.get(entry.key)) is not None
                and (other.dtype, other.shape) == (entry.dtype, entry.shape)
            }
            yield f"the older checkpoint {self._older.where}", references


def _differences(contents: Contents, references: dict[int, Entry]) -> list[Correction]:
    """Makes the corrections that copy elements of other tensors over damaged ones.

    `references` maps the `id` of a damaged tensor's entry to the entry to copy from. Elements of a
    wider type are rounded. The list is empty if more than 8 MiB differ.
    """
    corrections, count = list[Correction](), 0
    ours, theirs = Buffer(BLOCK).view, Buffer(BLOCK).view
    with reading([RecordChecker(())], SCRATCH) as (reader,):
        for entry, fragment in contents:
            other, size = references.get(id(entry)), SIZES[entry.dtype]
            if other is None or fragment.count > MOST_RUNS:
                continue
            for run in fragment.runs(0, entry.numel):
                for start in range(run.start, run.stop, BLOCK // size):
                    stop = min(run.stop, start + BLOCK // size)
                    part = run.extent.part((start - run.start) * size, (stop - run.start) * size)
                    damaged, other_bytes = ours[: part.length], theirs[: part.length]
                    reader.reader.read(part, damaged)
                    _fill_as(entry.dtype, reader, other, start, stop, other_bytes)
                    for begin, end in _runs(damaged, other_bytes) if damaged != other_bytes else ():
                        before, after = bytes(damaged[begin:end]), bytes(other_bytes[begin:end])
                        offset = part.offset + begin
                        corrections.append(Correction(part.file, offset, before, after))
                        count += end - begin
                    if count > MOST:
                        return []
    return corrections


def _runs(a: memoryview, b: memoryview) -> Iterator[tuple[int, int]]:
    """Yields each range [begin, end) of bytes in which two buffers differ.

    Ranges with at most 16 equal bytes between them are joined.
    """
    import numpy

    places = numpy.flatnonzero(numpy.frombuffer(a, "u1") != numpy.frombuffer(b, "u1"))
    cuts = numpy.flatnonzero(numpy.diff(places) > GAP)
    begins = places[numpy.concatenate(([0], cuts + 1))]
    ends = places[numpy.concatenate((cuts, [len(places) - 1]))] + 1
    yield from zip(begins.tolist(), ends.tolist(), strict=True)


def _elements(entry: Entry, start: int, stop: int) -> list[bytes]:
    size = SIZES[entry.dtype]
    data = bytearray((stop - start) * size)
    with reading([RecordChecker(())], SCRATCH) as (reader,):
        _fill(reader, entry, start, stop, memoryview(data))
    return [bytes(data[place : place + size]) for place in range(0, len(data), size)]


def _fill(reader: ElementReader, entry: Entry, start: int, stop: int, view: memoryview) -> None:
    reader.read([ReadRequest(entry, start, stop, 0)], view)


def _fill_as(
    dtype: str, reader: ElementReader, entry: Entry, start: int, stop: int, view: memoryview
) -> None:
    if entry.dtype == dtype:
        _fill(reader, entry, start, stop, view)
    else:
        wide = memoryview(bytearray((stop - start) * SIZES[entry.dtype]))
        _fill(reader, entry, start, stop, wide)
        cast(wide, entry.dtype, view, dtype)


def _are_rounded(entry: Entry, partner: Entry, value: bytes, other: bytes) -> bool | None:
    """Whether the wider of two values rounds to the narrower one; None if that is unknown.

    `value` belongs to the tensor `entry`, and `other` to `partner`.
    """
    if SIZES[entry.dtype] < SIZES[partner.dtype]:
        entry, partner, value, other = partner, entry, other, value
    return are_rounded(value, entry.dtype, other, partner.dtype)
