"""Finds the flipped bit that prevents a file from being opened, if a CRC-32 of the file is known.

    .metadata                the CRC-32 that zckpt writes behind its pickle
    a header of safetensors  the CRC-32 of the whole file, in manifest.json of the same folder
    manifest.json            the CRC-32 of its contents, in itself

Other `.metadata` and safetensors files stay damaged: torch writes no checksum into `.metadata`, and
a safetensors file has none of its own.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any

from ..core.checkpoint.mended import By
from ..core.storage import sources
from ..core.storage.corrections import corrected
from ..core.storage.fileio import crc_of
from ..core.storage.fragments import Extent, Record
from ..core.storage.records import Damage
from ..errors import MALFORMED, ZckptError
from ..files import safefile
from ..files.dcpfile import SEAL
from ..files.dcptable import METADATA
from ..formats.universal import flipped
from ..formats.universal.agreement import checksum
from ..formats.universal.files import MANIFEST
from ..formats.universal.flipped import LIMIT
from .explaining import BELIEVED, Place, chance_of, doubt, explained, flipped_back
from .witnesses import Witnesses

SEALED = 32  # bytes at the end of `.metadata` in which the CRC-32 stands
MOST = 1 << 30  # bytes of a file that is read whole


def place_in(path: str, limit: int = LIMIT) -> Place | None:
    """Finds the damage in a `.metadata`, manifest.json or safetensors file, and how to undo it.

    None if the file is undamaged, or if no file states its CRC-32. To find a flipped bit of
    manifest.json, its text is parsed once for each bit that is tried: `limit` is the most bytes
    that are parsed in all.
    """
    with suppress(ZckptError, OSError, *MALFORMED):
        if os.path.basename(path) == MANIFEST:
            return _in_manifest(path, limit)
        record = _sealed(path) or _listed(path)
        if record is not None and (crc := crc_of([record.extent])) != record.crc:
            place = explained(Damage(record, crc), (), Witnesses(None))
            return _with_header(place) if path.endswith(".safetensors") else place
    return None


def _text(path: str) -> bytes:
    if sources.size(path) > MOST:
        raise ValueError("the file is too long")
    with sources.opened(path) as file:
        return file.read()


def _sealed(path: str) -> Record | None:
    """The pickle in `.metadata`, as a byte range with the CRC-32 that zckpt has written behind it.

    None if there is no such CRC-32.
    """
    if not path.endswith(METADATA):
        return None
    text = _text(path)
    match = SEAL.search(text, max(0, len(text) - SEALED))
    return match and Record(Extent(path, 0, match.start()), int(match[1], 16))


def _listed(path: str) -> Record | None:
    """The whole file as a byte range, if an undamaged manifest.json beside it states its CRC-32."""
    folder, name = os.path.split(path)
    manifest = os.path.join(folder, MANIFEST)
    if not sources.is_file(manifest):
        return None
    document: Any = json.loads(_text(manifest))
    if not isinstance(document, dict) or document.get("crc32") != checksum(document):
        return None
    stated = document.get("files", {}).get(name, {})
    if stated.get("size") != sources.size(path) or "crc32" not in stated:
        return None
    return Record(Extent(path, 0, stated["size"]), int(stated["crc32"], 16))


def _with_header(place: Place) -> Place:
    """Chooses the one flipped bit with which a damaged safetensors header becomes readable.

    Returns the place unchanged if the header can be read, or if not exactly one of the bits makes
    it readable.
    """
    extent = place.extent
    with suppress(ZckptError):
        safefile.read(extent.file)
        return place  # the header is not what is damaged
    fits = []
    for byte, bit in place.bits:
        correction = flipped_back(extent, byte, bit)
        with suppress(ZckptError), corrected([correction]):
            safefile.read(extent.file)
            fits.append(correction)
    if len(fits) != 1 or place.by == "checksum":
        return place
    about = place.damage, place.contents, place.chance, place.bits, place.burst
    witness = "the header, which is readable with this bit flipped back,"
    return Place(*about, (fits[0],), "witness", witness)


def _in_manifest(path: str, limit: int) -> Place | None:
    text = _text(path)
    with suppress(ValueError, RecursionError):
        document = json.loads(text)
        if not isinstance(document, dict) or document.get("crc32") in (None, checksum(document)):
            return None
    extent = Extent(path, 0, len(text))
    bits = flipped.flipped(text, limit)
    chance, damage = chance_of(len(text)), Damage(Record(extent, None), 0)
    if len(bits) != 1:
        why = "none of the single bits that were tried explains the wrong checksum"
        return Place(damage, (), chance, bits, why=why)
    by: By = "checksum" if len(text) <= BELIEVED else "chance"
    correction = flipped_back(extent, *bits[0])
    why = doubt(len(text))
    return Place(damage, (), chance, bits, None, (correction,), by, why=why)
