"""What ONNX Runtime puts together of its ranks, by the way of its aggregators.

They join the pieces of a weight, and those of each moment, in the order of the ranks, and give them
the shape that another file tells; what is not cut they take from the first rank. Files before 1.7
hold a shared weight whole on each of its owners: there the lengths of its first moment's pieces
tell which part of it is current. Which rank owns what by the partition rule is not asked, so that
`verify --gather` proves the reader, which asks nothing else.

1.3 to 1.6: CombineZeroCheckpoint (checkpointing_utils.py); 1.7 to 1.16: training/checkpoint.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from math import prod

from ...core.dtypes import SIZES
from ...core.fragments import Extent
from ...core.partition import FlatMember, Partition, Partitioned, Whole
from ...errors import InconsistentCheckpoint, UnsupportedCheckpoint
from . import hdf5, legacy
from .files import find
from .ranks import SLOTS, Held, Rank, Save

Shape = tuple[int, ...]


def partitions(path: str) -> list[Partition]:
    """Everything that is a weight's: itself, its 16-bit copy, its moments.

    Raises InconsistentCheckpoint where pieces are more or fewer than the whole, and
    UnsupportedCheckpoint where the engine itself could not tell what is current.
    """
    save = _opened(path)
    names = {name for rank in save.ranks for name in (*rank.weights, *rank.pieces, *rank.halves)}
    return [part for name in sorted(names) for part in _weight(save, name)]


def _opened(path: str) -> Save:
    """The ranks' files, in the order of the numbers that their names or options state."""
    found = find(path)
    if found.parsed:
        files = sorted(found.parsed, key=lambda file: file.size("world_rank", 0))
        return hdf5.opened(path, files)
    return legacy.opened(path, sorted((file for _, file in found.files), key=_number))


def _number(path: str) -> int:
    """R of `PREFIX.ZeRO.R.L.ort.pt`; a file of another name is alone."""
    told = legacy.SHARDED.fullmatch(os.path.basename(path))
    return int(told[2]) if told else 0


def _weight(save: Save, name: str) -> Iterator[Partition]:
    """What there is of one weight."""
    whole = [rank.weights[name] for rank in save.ranks if name in rank.weights]
    halves = [rank.halves[name] for rank in save.ranks if name in rank.halves]
    pieces = [rank.pieces[name] for rank in save.ranks if name in rank.pieces]
    owners = [rank for rank in save.ranks if name in rank.moments]
    shape = next((held.shape for held in (*halves, *whole)), save.shapes.get(name, ()))
    if halves:
        yield from _joined(f"{name}/param", shape, halves[:1])
    if pieces:
        yield from _joined(f"{name}/master", shape, pieces)
    elif not _is_apart(save, name):
        yield from _joined(f"{name}/param", shape, whole[:1])
    elif owners:
        yield from _joined(f"{name}/master", shape, _current(name, owners))
    else:
        if len({held.crc for held in whole}) > 1 or (len(whole) > 1 and whole[0].crc is None):
            raise UnsupportedCheckpoint(
                f"{save.root} holds {name} several times, and no optimizer state: ONNX Runtime "
                "itself cannot tell which of them are current",
                hint="compare it without --gather",
            )
        yield from _joined(f"{name}/master", shape, whole[:1])
    for slot in SLOTS.values() if owners else ():
        yield from _joined(f"{name}/{slot}", shape, [rank.moments[name][slot] for rank in owners])


def _is_apart(save: Save, name: str) -> bool:
    """Whether its fp32 values are those of its owners alone: a mixed-precision run's master."""
    if save.dialect == "hdf5" and save.dp == 1:  # no 16-bit copies, and nothing is cut
        trained = save.ranks[0].moments
        return save.mixed is not None and (name in trained or not trained)
    if any(name in rank.halves for rank in save.ranks):
        return True
    return not all(name in rank.weights for rank in save.ranks)


def _current(name: str, owners: Sequence[Rank]) -> list[Held]:
    """Of every owner's whole weight its own part, as long as its piece of the first moment."""
    found, here = [], 0
    for rank in owners:
        held, numel = rank.weights[name], rank.moments[name]["exp_avg"].numel
        size = SIZES[held.dtype]
        extent = held.extent.part(here * size, (here + numel) * size)
        found.append(Held(held.dtype, (numel,), extent))
        here += numel
    return found


def _joined(name: str, shape: Shape, pieces: Sequence[Held]) -> Iterator[Partition]:
    """One behind the other in the order of the ranks."""
    numel = sum(held.numel for held in pieces)
    if numel != prod(shape):
        raise InconsistentCheckpoint(
            f"the ranks' pieces of {name} are {numel} elements together, its shape {list(shape)}"
        )
    if len(pieces) == 1:
        yield Whole(name, pieces[0].dtype, shape, pieces[0].extent)
        return
    extents: tuple[Extent, ...] = tuple(held.extent for held in pieces)
    yield Partitioned(pieces[0].dtype, extents, [FlatMember(name, shape, 0)])
