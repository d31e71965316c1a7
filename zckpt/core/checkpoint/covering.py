"""Checks that the fragments of every tensor contain each of its elements exactly once.

A fragment is a range of a tensor's elements with its byte range in a file. A reader that forgets a
rank's shard leaves a hole. A conversion would fill it with zeros, or with old bytes of the buffer,
and the target's checksums would confirm them. So every manifest is checked once, whichever reader
made it: no hole, no overlap, and as many bytes as the elements need. No file is opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate, chain
from math import prod

from ...errors import UnsupportedCheckpoint, counted, listed
from ..storage.fragments import Box, Fragments, Runs, Slices, boxes_of, tile
from .dtypes import SIZES
from .entries import Entry
from .manifest import Manifest

HINT = (
    "this is a mistake of the reader and not of your files: report it, with the output of "
    "`zckpt inspect PATH --steps`"
)


def refuse_holes(manifest: Manifest, reader: str) -> None:
    """Raises UnsupportedCheckpoint if a reader located some element of a tensor nowhere, or twice.

    Replicas are checked too. `reader` is the name of the format. The error blames zckpt's reader
    and not the files: the reader has already checked that these fit together.
    """
    wrong = [entry.name for entry in uncovered(_tensors(manifest))]
    if wrong:
        raise UnsupportedCheckpoint(
            "internal-error",
            f"{manifest.root}: zckpt's {reader} reader finds elements of "
            f"{counted(len(wrong), 'tensor')} nowhere or twice: {listed(wrong, 4)}",
            hint=HINT,
            file=manifest.root,
        )


def _tensors(manifest: Manifest) -> Iterator[Entry]:
    for part in (manifest, *manifest.ranks, *manifest.models):
        yield from part.entries.values()
        yield from part.replicas
        yield from part.files.sibling_weights
        yield from chain.from_iterable(row.tensors for row in part.states)


def uncovered(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Yields the tensors with an element that is in no fragment, or in two.

    A fragment is a range of elements with its byte range in a file.
    """
    # for n ranks, the shortest of the first n flat buffers: measured once for all tensors, by the
    # identity of the flat buffers
    shortest: dict[int, list[int]] = {}
    for entry in entries:
        fragments = entry.fragments
        if isinstance(fragments, Slices):
            flats = fragments.flats
            if id(flats) not in shortest:
                shortest[id(flats)] = [*accumulate((flat.length for flat in flats), min)]
            is_covered = _is_sliced(entry, fragments, shortest[id(flats)])
        elif isinstance(fragments, Runs):
            is_covered = _is_run_through(entry, fragments)
        else:
            is_covered = _is_tiled(entry, fragments)
        if not is_covered:
            yield entry


def _is_sliced(entry: Entry, slices: Slices, shortest: list[int]) -> bool:
    """Whether all flat buffers of ZeRO-3 are long enough for the slices of this tensor.

    `shortest[n]` is the length in bytes of the shortest flat buffer of ranks 0 to n.
    """
    size, filled = SIZES[entry.dtype], len(slices)
    if slices.numel != entry.numel or slices.size != size:
        return False
    if not filled:
        return True
    needed = (slices.offset + slices.width) * size
    padding = filled * slices.width - slices.numel  # after the last slice; it may be missing
    is_whole = filled == 1 or shortest[filled - 2] >= needed
    return is_whole and slices.flats[filled - 1].length >= needed - padding * size


def _is_run_through(entry: Entry, runs: Runs) -> bool:
    """Whether the fragments follow each other without a gap, and contain all elements."""
    size, reached = SIZES[entry.dtype], 0
    for run in runs.listed:
        if run.start != reached or run.extent.length != (run.stop - reached) * size:
            return False
        reached = run.stop
    return reached == entry.numel


def _is_tiled(entry: Entry, fragments: Fragments) -> bool:
    """Whether the boxes fit into their byte ranges and together hold each element exactly once.

    A box is a block of a tensor, given by its offset and size along every axis. The tensor may have
    been reshaped before it was cut into boxes.
    """
    parts, size = boxes_of(fragments), SIZES[entry.dtype]
    # a view of the entry's shape, which must be the same for all boxes
    wholes = {part.whole for part in parts}
    if len(wholes) != 1 or prod(parts[0].whole) != entry.numel:
        return not wholes and not entry.numel
    return all(_has_its_bytes(part, size) for part in parts) and tile(
        parts[0].whole, [(part.offsets, part.sizes) for part in parts]
    )


def _has_its_bytes(box: Box, size: int) -> bool:
    end = box.extent.offset + box.extent.length
    return box.size == size and box.reach.offset + box.reach.length <= end
