"""Finds lost files that can be copied from another rank, because all other ranks have the same.

In stage 3 each rank has a file of the model without its weights. If at least two other ranks still
have this file, and all of these files are equal, the lost file was equal too. Only one thing
differs: torch.save derives a folder name in the zip from the file's name. A lost file cannot be
copied if it was the only one with an element of some tensor: equal files of other ranks do not tell
the value of this element.
"""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Iterator, Mapping

from msgspec import Struct

from ..core.checkpoint.mended import Mended
from ..core.storage import sources
from ..core.storage.corrections import Correction, corrected
from ..core.storage.inventory import parse_name
from ..errors import ZckptError
from ..judging.damaged_source import Found, kept
from ..judging.inventory import ALL_ROLES, files_below

AXIS = "dp"
FEWEST = 2  # other ranks that must have the same
BLOCK = 1 << 20
HEADER, ENTRY = 30, 46  # bytes in front of a name, in a member's header and in the directory


class Alike(Struct, frozen=True):
    """A lost file that can be restored as a copy of another rank's file.

    name        the path of the lost file below the checkpoint
    other       the path of the file to copy
    renaming    changes that put the lost file's name into the copy
    ranks       the number of other ranks, which all have the same file
    """

    name: str
    other: str
    renaming: tuple[Correction, ...]  # torch.save puts a file's name into the zip
    ranks: int

    def write(self, path: str) -> None:
        """Writes the lost file to `path`: a copy of the file `other`, with the same times.

        Raises OSError.
        """
        os.unlink(path)  # the link to what stands in
        with (
            corrected(self.renaming),
            sources.opened(self.other) as source,
            open(path, "xb") as target,
        ):
            while block := source.read(BLOCK):
                target.write(block)
        now = os.stat(self.other)
        os.utime(path, ns=(now.st_atime_ns, now.st_mtime_ns))

    @property
    def mended(self) -> Mended:
        """Describes this file for zckpt-mended.json, which lists what was restored in the copy.

        All bytes are copied from `other`.
        """
        size = sources.size(self.other)
        return Mended(self.name, 0, size, "witness", 0.0, witness=self.witness)

    @property
    def witness(self) -> str:
        return f"the same file of all {self.ranks} other ranks"


def alike(found: Found) -> dict[str, Alike]:
    """Finds the lost files that can be restored by copying another rank's file, by their paths."""
    if found.manifest is None:
        return {}
    return {path: own for path in found.lost if (own := _alike(found, path)) is not None}


def has_links(found: Found) -> bool:
    """Whether the checkpoint's folder contains symbolic links.

    To restore lost files, zckpt makes a temporary folder of links to the files that still exist.
    There, the user's own links could not be distinguished from zckpt's.
    """
    return os.path.isdir(found.path) and any(
        entry.is_symlink() for entry in sources.walk(found.path)
    )


def remade(found: Found, copyable: Mapping[str, Alike]) -> str:
    """Restores lost files as copies of other ranks' files, in a temporary folder; returns its path.

    The folder, `found.shadow`, has links to the checkpoint's files. `copyable` maps the path that
    each lost file has in this folder to the file to copy.
    """
    for path, copied in copyable.items():
        copied.write(path)
    assert found.shadow is not None
    return found.shadow


def _alike(found: Found, path: str) -> Alike | None:
    real = found.real(path)
    lost = parse_name(ALL_ROLES, real)
    if lost is None or AXIS not in lost.axes or _has_parts(found, path):
        return None
    gone = {*map(found.real, found.lost)}
    other_files = [
        other
        for other in sorted(files_below(found.path))
        if other not in gone
        and (its := parse_name(ALL_ROLES, other)) is not None
        and its.is_like(lost)
        and its.numbers == lost.numbers_with(AXIS, its.at(AXIS) or 0)
    ]
    if len(other_files) < FEWEST:
        return None
    try:
        renamings = {other: [*_renaming(other, real)] for other in other_files}
        with corrected(each for renaming in renamings.values() for each in renaming):
            first, *rest = other_files
            if not all(sources.same_bytes(first, other) for other in rest):
                return None
    except (ZckptError, OSError, ValueError, struct.error, zipfile.BadZipFile):
        return None
    return Alike(
        os.path.relpath(real, found.path), first, tuple(renamings[first]), len(other_files)
    )


def _has_parts(found: Found, path: str) -> bool:
    """Whether the lost file had values that no other rank's file has.

    These are a part of a tensor whose rest is in other files, or a whole tensor without a replica.
    Whole buffers do not count.
    """
    for manifest in found.known.rank_manifests:
        copied = {copy.key for copy in manifest.replicas if kept(copy, found.lost)[0] is copy}
        for entry in manifest.entries.values():
            rest, _ = kept(entry, {path: ""})
            is_shared = entry.parameter in manifest.buffers or entry.key in copied
            if rest is not entry and (rest.numel or not is_shared):
                return True
    return False


def _renaming(other: str, lost: str) -> Iterator[Correction]:
    """Yields the changes that replace the file's name inside the zip `other` by that of `lost`.

    Raises BadZipFile if `other` is no zip. Raises ValueError if the members' names do not begin
    with the file's name, or if the two names differ in length.
    """
    # torch.save prefixes the names of all members with the file's name without its ending
    before, after = (
        f"{os.path.splitext(os.path.basename(path))[0]}/".encode() for path in (other, lost)
    )
    with sources.opened(other) as file, zipfile.ZipFile(file) as parts:
        place = parts.start_dir
        for part in parts.infolist():
            file.seek(place)
            name, *lengths = struct.unpack("<HHH", file.read(ENTRY)[28:34])
            for start in (part.header_offset + HEADER, place + ENTRY):
                file.seek(start)
                if len(before) != len(after) or file.read(len(before)) != before:
                    raise ValueError("the zip's members do not begin with the name of the file")
                yield Correction(other, start, before, after)
            place += ENTRY + name + sum(lengths)
