"""Is one file of a checkpoint a copy of another one?

Files of `torch.distributed.checkpoint` do not say whose they are. But no two files of a save hold
the same states of an optimizer. So if they do, one was copied over the other.
"""

from __future__ import annotations

from ..errors import InconsistentCheckpoint
from . import sources
from .annotations import TYPE_CHECKING
from .dtypes import SIZES
from .weights import is_optimizers

if TYPE_CHECKING:
    from collections.abc import Collection

    from .fragments import Extent
    from .manifest import Manifest

SAMPLE = 1 << 16  # bytes of a state; in a run that has begun, two of its elements differ


def refuse_duplicates(manifest: Manifest) -> None:
    """Raises InconsistentCheckpoint if two files that state checksums have equal ones throughout.

    Weights may be equal, as those of experts that were made of one layer, and so may states that
    are all zero. So both files must hold a state of the optimizer whose elements differ.
    """
    pairs = _pairs(manifest)
    states = _states(manifest, {file for pair in pairs for file in pair})
    for first, second in pairs:
        if first in states and second in states and _differs(*states[first]):
            raise InconsistentCheckpoint(
                f"{second} holds the same bytes as {first}, although it should hold other parts of "
                "the model",
                hint="one was copied over the other: copy all files again",
            )


def _pairs(manifest: Manifest) -> list[tuple[str, str]]:
    """Pairs of files whose records have equal places, lengths and checksums."""
    records: dict[str, list[tuple[int, int, int | None]]] = {}
    for record in manifest.records:
        place = record.extent
        records.setdefault(place.file, []).append((place.offset, place.length, record.crc))
    first: dict[tuple[tuple[int, int, int | None], ...], str] = {}
    pairs = []
    for file, of_file in records.items():
        if all(crc is not None for _, _, crc in of_file):
            other = first.setdefault(tuple(sorted(of_file)), file)
            pairs += [(other, file)] if other != file else []
    return pairs


def _states(manifest: Manifest, files: Collection[str]) -> dict[str, tuple[Extent, int]]:
    """A state of the optimizer in each of these files, and the size of its elements.

    The largest one: a state of one element says nothing. Copies of tensors do not count.
    """
    states: dict[str, tuple[Extent, int]] = {}
    for entry in manifest.entries.values() if files else ():
        if not is_optimizers(entry.slot):
            continue
        for fragment in entry.fragments:
            extent = fragment.extent
            if extent.file in files:
                before = states.get(extent.file)
                if before is None or before[0].length < extent.length:
                    states[extent.file] = extent, SIZES[entry.dtype]
    return states


def _differs(extent: Extent, size: int) -> bool:
    """Whether two of the first elements of `size` bytes differ."""
    with sources.opened(extent.file) as file:
        data = sources.pread(file.fileno(), min(extent.length, SAMPLE), extent.offset)
    return data[size:] != data[:-size]
