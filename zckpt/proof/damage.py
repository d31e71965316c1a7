"""Describes damage in the files of a checkpoint, and finds the tensors that it affects.

If only one bit was flipped, a wrong CRC-32 shows which one. Where the bit lies (in a tensor, in
padding) shows whether it matters.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import pairwise
from math import prod

from ..core.checkpoint.dtypes import SIZES
from ..core.checkpoint.entries import Entry
from ..core.checkpoint.manifest import Manifest
from ..core.comparison.compare import ComparisonOutcome, Result
from ..core.grouping import by_key
from ..core.passes.description import Report, line_of
from ..core.storage.checksum import flipped_bit
from ..core.storage.fileio import Reader
from ..core.storage.fragments import Extent, Fragment, Fragments, Runs, boxes_of
from ..core.storage.records import Damage, RecordChecker
from ..errors import RESTORABLE, Notice, listed, note, problem

PADDING = ", in padding: harmless, no tensor lies there"
OF_TENSOR = (
    "use another copy of the checkpoint, or see what can be restored: zckpt mend SRC --dry-run"
)
"""The hint for a tensor whose bytes do not have the CRC-32 that the manifest states."""
# bytes; in longer records, damage of many bits looks like one bit more often than 1 in 100
SURE = 4 << 20


Contents = list[tuple[Entry, Fragment]]
"""The tensors in a byte range of a file, each with one of its contiguous pieces there."""


def contents_of(manifest: Manifest, extents: Iterable[Extent]) -> dict[Extent, Contents]:
    """Maps each byte range in `extents` to the tensors that have elements in it.

    The ranges do not overlap. All tensors' fragments (contiguous pieces in files) are visited in
    one pass, since there are millions of them at a large data-parallel size.
    """
    contents: dict[Extent, Contents] = {extent: [] for extent in extents}
    in_order = sorted(contents, key=lambda extent: extent.offset)
    by_file = by_key((extent.file, extent) for extent in in_order)
    starts = {file: [extent.offset for extent in records] for file, records in by_file.items()}
    for entry in (*manifest.entries.values(), *manifest.replicas) if contents else ():
        for fragment in entry.fragments:
            piece = fragment.extent
            if piece.file not in by_file:
                continue
            place = bisect_left(starts[piece.file], piece.offset + piece.length) - 1
            while place >= 0:
                record = by_file[piece.file][place]
                if record.offset + record.length <= piece.offset:
                    break
                contents[record].append((entry, fragment))
                place -= 1
    return contents


def meaning(manifest: Manifest, damage: Damage, contents: Contents) -> Report:
    """A report line about a byte range (record) whose CRC-32 is wrong.

    It names the tensors in the range, and the flipped bit if a single one explains the CRC-32.
    Damage in padding is reported as harmless. `contents` are the tensors in the range, each with
    its byte ranges in files.
    """
    extent, stated_crc = damage.record.extent, damage.record.crc
    assert stated_crc is not None
    line: Report = {
        "file": extent.file,
        "offset": extent.offset,
        "length": extent.length,
        "stated": f"{stated_crc:08x}",
        "found": f"{damage.crc:08x}",
        "tensors": list(dict.fromkeys(entry.name for entry, _ in contents)),
        "harmless": False,
    }
    what = f"{os.path.relpath(extent.file, manifest.root)} is damaged"

    def said(message: str) -> Report:
        harmless, tensors = line["harmless"], line["tensors"]
        notice = Notice(
            code="padding-differs" if harmless else "record-damaged",
            severity="note" if harmless else "error",
            subject=tensors[0] if len(tensors) == 1 else None,
            file=extent.file,
            message=message,
            hint="" if harmless else RESTORABLE,
        )
        return line_of(notice, **line)

    flipped = flipped_bit(stated_crc, damage.crc, extent.length)
    if flipped is None:
        names = listed(line["tensors"]) or "no tensor"
        return said(
            f"{what}: the {extent.length} bytes at {extent.offset}, which contain {names}, do not "
            "have the CRC-32 that the file states"
        )
    place, bit = extent.offset + flipped[0], flipped[1]
    line["flipped"] = {"byte": place, "bit": bit}
    what += f", as if bit {bit} of byte {place} were flipped"
    for entry, fragment in contents:
        if fragment.extent.offset <= place < fragment.extent.offset + fragment.extent.length:
            element = fragment.element_at(place, SIZES[entry.dtype])
            if extent.length <= SURE:
                line |= {"tensors": [entry.name], "element": element}
            else:
                what += " (if only one bit is)"
            return said(f"{what}, in element {element} of {entry.name}")
    padding = bool(contents) and extent.offset > 0  # the record of a complete file begins at 0
    line |= {"tensors": [], "harmless": padding}
    return said(what + (PADDING if padding else ", outside every tensor"))


def beside(manifest: Manifest) -> list[Damage]:
    """Finds damage in zip members that zckpt does not need, such as version numbers or a random id.

    They belong to no tensor, but torch.load (2.13) refuses a file if certain bits of them are
    flipped.
    """
    checker = RecordChecker(manifest.files.beside, collect=True)
    with closing(Reader()) as reader:
        checker.finish(reader, everything=True)
    return [*checker.damage.values()]


def not_zero(outcome: ComparisonOutcome, manifest: Manifest) -> list[Notice]:
    """Notices about padding that is not zero, although the engine fills it with zeros.

    Other engines' padding may contain anything, such as old memory; there are no notices about it.
    """
    if not manifest.run.zero_padding:
        return []
    damaged = {damage.record.extent for damage in outcome.damage}
    return [
        note(
            "padding-differs",
            f"{os.path.relpath(extent.file, manifest.root)}: the {extent.length} bytes of padding "
            f"at {extent.offset} are not all zero: harmless, no tensor lies there",
            file=extent.file,
        )
        for record, extent in outcome.beside
        if record.extent not in damaged
    ]


def other_padding(a: Manifest, b: Manifest, outcome: ComparisonOutcome) -> list[Notice]:
    """Notices about byte ranges of `a` that differ from those of `b` only in padding.

    Their checksums differ, but their tensors are equal. Only ranges with the same file name,
    offset, length and tensors are compared.
    """
    records_of_b = {
        (os.path.relpath(record.extent.file, b.root), record.extent.offset, record.extent.length):
        record
        for record in b.files.records
    }  # fmt: skip
    equal = {
        result.match.a.name
        for result in outcome.results
        if result.match.how == "bits" and result.difference is None
    }
    names, other_extents = {}, {}
    for record in a.files.records:
        name = os.path.relpath(record.extent.file, a.root)
        other = records_of_b.get((name, record.extent.offset, record.extent.length))
        if other is not None and None not in (other.crc, record.crc) and other.crc != record.crc:
            names[record.extent], other_extents[record.extent] = name, other.extent
    theirs = contents_of(b, other_extents.values())
    return [
        note(
            "padding-differs",
            f"{names[extent]}: the {extent.length} bytes at {extent.offset} differ only in "
            "padding: harmless, no tensor lies there",
            file=extent.file,
        )
        for extent, contents in contents_of(a, names).items()
        if contents
        and {entry.name for entry, _ in contents} <= equal
        and _places(contents) == _places(theirs[other_extents[extent]])
    ]


def _places(contents: Contents) -> set[tuple[str, int, int]]:
    """Where the tensors of a byte range lie, to be compared with another byte range.

    An item is a tensor's name, the file offset of its bytes, and its first element there.
    """
    return {(entry.name, each.extent.offset, each.start) for entry, each in contents}


def overlapping(manifest: Manifest) -> list[Notice]:
    """Notices about optimizer states or fp32 masters that share bytes of a file with each other."""
    problems = []
    taken: dict[str, list[tuple[int, int, str]]] = {}
    for entry in manifest.entries.values():
        if entry.slot in ("param", "state"):  # buffers may share memory
            continue
        for extent in _solid_extents(entry.fragments):
            place = extent.offset, extent.offset + extent.length, entry.name
            taken.setdefault(extent.file, []).append(place)
    for file, places in taken.items():
        places.sort()
        for (_, stop, name), (start, _, other) in pairwise(places):
            if start < stop:
                message = f"{name} and {other} overlap in {file}"
                problems.append(problem("elements-overlap", message, subject=name, file=file))
    return problems


def unused(manifest: Manifest) -> list[Report]:
    """Report lines about bytes of files that nothing in the checkpoint describes."""
    return [
        line_of(
            problem(
                "bytes-unknown",
                f"{os.path.relpath(extent.file, manifest.root)}: no item covers the "
                f"{extent.length} bytes at {extent.offset}",
                hint="an item was lost, or the file is of another save",
                file=extent.file,
            ),
            offset=extent.offset,
            length=extent.length,
        )
        for extent in manifest.files.unused
    ]


def _solid_extents(fragments: Fragments) -> Iterator[Extent]:
    """Yields the byte ranges of a tensor in which no other tensor can have bytes.

    Slices with gaps in the file are left out, because other tensors may lie in the gaps.
    """
    if isinstance(fragments, Runs):
        yield from (fragment.extent for fragment in fragments)
    for box in boxes_of(fragments):
        if box.reach.length == prod(box.sizes) * box.size:
            yield box.reach


def digest(result: Result, manifest: Manifest) -> list[Report]:
    """Report lines about tensors whose CRC-32 is not the one that the manifest states."""
    problems = []
    for entry, crc in zip((result.match.a, result.match.b), result.digests, strict=True):
        stated_entry = manifest.entries.get(entry.key) if entry else None
        if entry is None or entry is not stated_entry or entry.digest is None or crc is None:
            continue
        if crc == entry.digest:
            continue
        line: Report = {
            "tensor": entry.name,
            "stated": f"{entry.digest:08x}",
            "found": f"{crc:08x}",
        }
        what = f"{entry.name} is damaged: its CRC-32 is not the one that the manifest states"
        flipped = flipped_bit(entry.digest, crc, entry.length) if entry.length <= SURE else None
        if flipped:
            line["element"] = flipped[0] // SIZES[entry.dtype]
            what = f"{entry.name} is damaged, as if a bit of element {line['element']} were flipped"
        damaged = problem("record-damaged", what, subject=entry.name, hint=OF_TENSOR)
        problems.append(line_of(damaged, **line))
    return problems
