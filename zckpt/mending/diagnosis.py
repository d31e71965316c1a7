"""Finds what is damaged in a checkpoint, and the original bytes.

The readers and `judging/verdict.py` find the damaged files. A comparison of all bytes with their
checksums, as in `verify`, finds the damaged records (byte ranges such as zip members). A file whose
pickle or structure is damaged cannot be read at all. So such files are examined first; then the
checkpoint is read again as if their damaged bytes had been corrected.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain

from msgspec import Struct
from msgspec.structs import replace

from ..core.checkpoint.manifest import Manifest
from ..core.comparison.compare import ComparisonOutcome, compare
from ..core.passes.resources import Begin, Copying
from ..core.storage import sources
from ..core.storage.corrections import Correction, corrected
from ..core.storage.fileio import crc_of
from ..core.storage.fragments import Extent, Record
from ..core.storage.records import Damage
from ..errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    MissingData,
    Notice,
    UnsupportedCheckpoint,
    ZckptError,
)
from ..formats.reading import Reading
from ..formats.universal.flipped import LIMIT
from ..judging import verdict
from ..judging.verdict import Verdict
from ..proof.damage import beside, contents_of
from ..proof.pairs import own_matches
from ..reading import read
from .containers import damage_in, stated_twice
from .explaining import Place, explained
from .stated import place_in
from .witnesses import Contents, Witnesses
from .zips import flipped_in

REFUSED = (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    MissingData,
    UnsupportedCheckpoint,
)
"""Errors that damaged files may cause when they are read; `mend` then looks for the damage."""


class Diagnosis(Struct, frozen=True):
    """What is damaged in a checkpoint.

    places      the damaged records (byte ranges such as zip members), with corrections
    judged      the verdict on the corrected checkpoint; None if it cannot be read
    error       why it cannot be read even when it is corrected, or None
    """

    places: Sequence[Place] = ()
    judged: Verdict | None = None
    error: ZckptError | None = None

    @property
    def manifest(self) -> Manifest | None:
        return self.judged.manifest if self.judged else None

    def is_needed(self, place: Place) -> bool:
        """Whether a training program needs the damaged file of `place` to resume."""
        unread = self.judged.unread if self.judged else ()
        return place.extent.file not in {each.file for each in unread}


def corrections_of(places: Iterable[Place]) -> list[Correction]:
    """The corrections of all these places in one list."""
    return [*chain.from_iterable(place.corrections for place in places)]


def diagnose(
    path: str, reading: Reading, older: Manifest | None, copying: Copying, begin: Begin | None
) -> Diagnosis:
    """Reads all bytes of the checkpoint at `path`, and returns what is damaged in it.

    `older` is an earlier checkpoint of the same run, whose bytes may confirm a correction. An error
    that damage may cause (`REFUSED`) is in the result; other errors are raised.
    UnsupportedCheckpoint is raised unless damage was found.
    """
    with ExitStack() as stack:
        opened = what_opens(path, reading, stack)
        early, judged, manifest = opened.places, opened.judged, opened.manifest
        if isinstance(opened.error, UnsupportedCheckpoint) and not early:
            raise opened.error
        if judged is None or manifest is None:
            return opened
        outcome = compare(
            own_matches(manifest), manifest, manifest, copying, everything=True, begin=begin
        )
        contents = contents_of(manifest, (place.extent for place in early))
        witnesses = Witnesses(manifest, older)
        early = [_again(place, contents[place.extent], witnesses) for place in early]
        places = [*_of_records(manifest, outcome, witnesses)]
        places += map(_in_container, beside(manifest))
        if any(place.is_of_checksum for place in places):  # which the manifest has read
            stack.enter_context(corrected(corrections_of(places)))
            judged = verdict.of(read(path, reading))
        return Diagnosis(sorted([*early, *places], key=_place), judged)


def what_opens(path: str, reading: Reading, stack: ExitStack) -> Diagnosis:
    """Reads the checkpoint at `path`, and repairs, in memory, files that cannot be opened.

    The repairs end when `stack` is closed. Tensors are read only in files that may be damaged. An
    error that damage may cause (`REFUSED`) is in the result; other errors are raised.
    """
    early: list[Place] = []
    while True:
        judged: Verdict | None = None
        error: ZckptError | None = None
        try:
            judged = verdict.of(read(path, reading))
            blamed = [_blamed(judged)]
        except REFUSED as caught:
            error, blamed = caught, [[caught.file or path], _below(caught.file or path)]
        known_extents = {place.extent for place in early}
        found = list[Place]()
        for files in blamed:
            found = found or [
                place
                for file in dict.fromkeys(filter(os.path.isfile, files))
                for place in _in_file(file)
                if place.extent not in known_extents
            ]
        early += found
        corrections = corrections_of(found)
        if not corrections:
            return Diagnosis(early, judged, error)
        stack.enter_context(corrected(corrections))


def _place(place: Place) -> tuple[str, int]:
    return place.extent.file, place.extent.offset


def _blamed(judged: Verdict) -> list[str]:
    manifest = judged.manifest
    lost: tuple[Notice, ...] = manifest.notices.lost if manifest else ()
    return [each.file for each in (*lost, *judged.damaged, *judged.unread) if each.file]


def _below(path: str) -> list[str]:
    folder = path if sources.is_folder(path) else os.path.dirname(path)
    return [entry.path for entry in sources.walk(folder) if entry.is_file(follow_symlinks=False)]


def _in_file(path: str) -> list[Place]:
    return structure_of(path) or [*map(_in_container, damage_in(path))]


def structure_of(path: str, limit: int = LIMIT) -> list[Place]:
    """Finds the damage in the headers of a zip, or in a file with one checksum of its contents.

    Of a zip, tensors are read only if they are next to a damaged header. A file with one checksum
    is read completely. `limit` is the most bytes that are parsed to find a flipped bit of
    manifest.json.
    """
    structure = [*map(_of_structure, flipped_in(path))]
    if (stated := place_in(path, limit)) is not None:
        structure.append(stated)
    return structure


def _of_structure(correction: Correction) -> Place:
    extent = Extent(correction.file, correction.offset, len(correction.before))
    damage = Damage(Record(extent, None), 0)
    return Place(damage, (), 0.0, (), None, (correction,), "witness", TWICE)


TWICE = "the same fact elsewhere in the zip"
"""What confirms that a bit of a zip's headers was flipped, in the words of the report."""


def _in_container(damage: Damage, contents: Contents = ()) -> Place:
    """Finds the original bytes of a damaged zip member from its checksum alone.

    If that fails, it checks whether the CRC-32 in the zip's directory is damaged instead.
    """
    place = explained(damage, contents, Witnesses(None))
    return place if place.by else _with_directory(place)


def _again(place: Place, contents: Contents, witnesses: Witnesses) -> Place:
    """Looks for the original bytes again, with the tensors around them (`contents`) known.

    Now other bytes, the `witnesses`, can confirm or contradict a correction. Corrections stay if
    the checksum alone or a witness has already shown that they are right.
    """
    if not contents or place.by in ("checksum", "witness"):
        return replace(place, contents=contents)
    with corrected(each.undone for each in place.corrections):
        return explained(place.damage, contents, witnesses)


def _with_directory(place: Place) -> Place:
    """Corrects the CRC-32 in the zip's directory, if this is damaged and the data are right."""
    correction = stated_twice(place.damage)
    if correction is None:
        return place
    about = {"corrections": (correction,), "by": "witness", "why": ""}
    return replace(place, **about, witness="the checksum beside the data")


def _of_records(
    manifest: Manifest, outcome: ComparisonOutcome, witnesses: Witnesses
) -> Iterator[Place]:
    """Yields the damaged records (byte ranges with a stated CRC-32), with their original bytes.

    In a universal checkpoint, tensors and files are records. Damaged tensors come first. Their
    files follow only if these have further damage.
    """
    tensors = [*_of_tensors(manifest, outcome, witnesses)]
    yield from tensors
    corrections = corrections_of(tensors)
    files = {place.extent.file for place in tensors}
    damaged = {damage.record.extent: damage for damage in outcome.damage}
    contents = contents_of(manifest, damaged)
    for extent, damage in damaged.items():
        if extent.file in files:
            with corrected(each for each in corrections if each.file == extent.file):
                damage = Damage(damage.record, crc_of([extent]))
                are_lost = any(not each.by for each in tensors if each.extent.file == extent.file)
                if damage.crc == damage.record.crc or are_lost:
                    continue
                yield explained(damage, contents[extent], witnesses)
        else:
            place = explained(damage, contents[extent], witnesses)
            yield place if place.by else _with_directory(place)


def _of_tensors(
    manifest: Manifest, outcome: ComparisonOutcome, witnesses: Witnesses
) -> Iterator[Place]:
    """Yields the tensors that do not match their own checksums, with corrections if possible.

    Replicas are left out, and so are tensors whose bytes are not contiguous in one file.
    """
    for result in outcome.results:
        for entry, crc in zip((result.match.a, result.match.b), result.digests, strict=True):
            stated_crc = entry.digest if entry is not None else None
            if entry is None or crc in (None, stated_crc) or stated_crc is None:
                continue
            assert crc is not None
            pieces = [*entry.fragments]
            if entry is manifest.entries.get(entry.key) and len(pieces) == 1:
                damage = Damage(Record(pieces[0].extent, stated_crc), crc)
                yield explained(damage, [(entry, pieces[0])], witnesses)
