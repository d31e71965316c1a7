"""What is wrong in the files of a checkpoint, and whose bytes they are.

A wrong CRC-32 tells which bit was flipped, if it was one; what lies there tells whether it matters.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from ..core.checksum import flipped_bit
from ..core.compare import Outcome, Result
from ..core.dtypes import SIZES
from ..core.fragments import Extent, Runs, Slices
from ..core.manifest import Entry, Manifest
from ..core.pieces import Damage
from ..errors import listed

Report = dict[str, Any]
PADDING = ", in padding: harmless, no tensor lies there"
SURE = 4 << 20  # bytes; in more, damage of many bits looks like one bit more often than 1 in 100


Held = list[tuple[Entry, Extent, int]]
"""Entries with bytes in a record: each piece's own extent and first element."""


def holders(manifest: Manifest, extents: Iterable[Extent]) -> dict[Extent, Held]:
    """What lies in each of the extents, which are records: none overlaps another.

    In one pass over all fragments: at a large dp these are millions.
    """
    found: dict[Extent, Held] = {extent: [] for extent in extents}
    by_file: dict[str, list[Extent]] = {}
    for extent in sorted(found, key=lambda extent: extent.offset):
        by_file.setdefault(extent.file, []).append(extent)
    starts = {file: [extent.offset for extent in held] for file, held in by_file.items()}
    for entry in (*manifest.entries.values(), *manifest.replicas) if found else ():
        for fragment in entry.fragments:
            piece = fragment.extent
            if piece.file not in by_file:
                continue
            place = bisect_left(starts[piece.file], piece.offset + piece.length) - 1
            while place >= 0:
                record = by_file[piece.file][place]
                if record.offset + record.length <= piece.offset:
                    break
                found[record].append((entry, piece, fragment.start))
                place -= 1
    return found


def meaning(manifest: Manifest, found: Damage, held: Held) -> Report:
    """What a record's wrong CRC-32 means: the flipped bit, if it is one, and whose it is."""
    extent, stated = found.record.extent, found.record.crc
    assert stated is not None
    about: Report = {
        "file": extent.file,
        "offset": extent.offset,
        "length": extent.length,
        "stated": f"{stated:08x}",
        "found": f"{found.found:08x}",
        "tensors": list(dict.fromkeys(entry.name for entry, _, _ in held)),
        "harmless": False,
    }
    what = f"{os.path.relpath(extent.file, manifest.root)} is damaged"
    flipped = flipped_bit(stated, found.found, extent.length)
    if flipped is None:
        names = listed(about["tensors"]) or "no tensor"
        return about | {
            "message": f"{what}: the CRC-32 of {extent.length} bytes at {extent.offset}, which "
            f"hold {names}, is not the one that the file states"
        }
    place, bit = extent.offset + flipped[0], flipped[1]
    about["flipped"] = {"byte": place, "bit": bit}
    what += f", as if bit {bit} of byte {place} were flipped"
    for entry, piece, start in held:
        if piece.offset <= place < piece.offset + piece.length:
            element = start + (place - piece.offset) // SIZES[entry.dtype]
            if extent.length <= SURE:
                about |= {"tensors": [entry.name], "element": element}
            else:
                what += " (if one alone is)"
            return about | {"message": f"{what}, in element {element} of {entry.name}"}
    padding = bool(held) and extent.offset > 0  # a whole file's record begins at 0
    about |= {"tensors": [], "harmless": padding}
    return about | {"message": what + (PADDING if padding else ", outside every tensor")}


def not_zero(outcome: Outcome, manifest: Manifest) -> list[str]:
    """Padding that is not zero, of DeepSpeed's stages 1 and 2: elsewhere it may hold anything.

    Stage 3 leaves there what was in memory; ONNX Runtime has stale parts of weights instead.
    """
    if manifest.source.get("zero_stage") == 3 or manifest.format != "deepspeed":
        return []
    told = {found.record.extent for found in outcome.damage}
    return [
        f"{os.path.relpath(extent.file, manifest.root)}: the {extent.length} bytes of padding at "
        f"{extent.offset} are not all zero: harmless, no tensor lies there"
        for record, extent in outcome.beside
        if record.extent not in told
    ]


def other_padding(a: Manifest, b: Manifest, outcome: Outcome) -> list[str]:
    """Records of equal files that state different CRCs although all tensors in them are equal."""
    known = {
        (os.path.relpath(record.extent.file, b.root), record.extent.offset, record.extent.length):
        record.crc
        for record in b.records
    }  # fmt: skip
    equal = {
        result.match.a.name
        for result in outcome.results
        if result.match.how == "bits" and result.difference is None
    }
    names = {}
    for record in a.records:
        name = os.path.relpath(record.extent.file, a.root)
        crc = known.get((name, record.extent.offset, record.extent.length))
        if None not in (crc, record.crc) and crc != record.crc:
            names[record.extent] = name
    return [
        f"{names[extent]}: the {extent.length} bytes at {extent.offset} differ in padding alone: "
        "harmless, no tensor lies there"
        for extent, held in holders(a, names).items()
        if held and {entry.name for entry, _, _ in held} <= equal
    ]


def uncovered(manifest: Manifest) -> list[str]:
    """Tensors whose fragments do not cover every element exactly once, or lie in each other."""
    found = []
    taken: dict[str, list[tuple[int, int, str]]] = {}
    for entry in manifest.entries.values():
        if not _covers(entry):
            found.append(f"the fragments of {entry.name} do not cover its {entry.numel} elements")
        if entry.slot in ("param", "state"):  # buffers may share memory
            continue
        for fragment in entry.fragments if isinstance(entry.fragments, Runs) else ():
            extent = fragment.extent
            place = extent.offset, extent.offset + extent.length, entry.name
            taken.setdefault(extent.file, []).append(place)
    for file, places in taken.items():
        places.sort()
        for (_, stop, name), (start, _, other) in pairwise(places):
            if start < stop:
                found.append(f"{name} and {other} overlap in {file}")
    return found


def _covers(entry: Entry) -> bool:
    fragments, size = entry.fragments, SIZES[entry.dtype]
    if isinstance(fragments, Slices):
        needed = (fragments.offset + fragments.width) * size
        last = fragments.numel - (len(fragments) - 1) * fragments.width
        return fragments.numel == entry.numel and all(
            flat.length
            >= needed - ((fragments.width - last) * size if rank + 1 == len(fragments) else 0)
            for rank, flat in enumerate(fragments.flats[: len(fragments)])
        )
    if isinstance(fragments, Runs):
        here = 0
        for fragment in fragments:
            if fragment.start != here or fragment.extent.length != (fragment.stop - here) * size:
                return False
            here = fragment.stop
        return here == entry.numel
    return True  # the lines of a strided tensor are its shape's by construction


def digest(result: Result, manifest: Manifest) -> list[Report]:
    """Tensors whose CRC-32 is not what the manifest states."""
    found = []
    for entry, crc in zip((result.match.a, result.match.b), result.digests, strict=True):
        stated = manifest.entries.get(entry.name) if entry else None
        if entry is None or entry is not stated or entry.digest is None or crc is None:
            continue
        if crc == entry.digest:
            continue
        about: Report = {
            "tensor": entry.name,
            "stated": f"{entry.digest:08x}",
            "found": f"{crc:08x}",
        }
        what = f"{entry.name} is damaged: its CRC-32 is not the one that the manifest states"
        flipped = flipped_bit(entry.digest, crc, entry.length) if entry.length <= SURE else None
        if flipped:
            about["element"] = flipped[0] // SIZES[entry.dtype]
            what = (
                f"{entry.name} is damaged, as if a bit of element {about['element']} were flipped"
            )
        found.append({**about, "message": what})
    return found
