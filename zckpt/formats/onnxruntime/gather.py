"""How ONNX Runtime's own aggregators join the ranks' files: the rule behind `verify --gather`.

They join the slices of a weight, and the slices of each moment, in the order of the ranks. The
shape of the result comes from a full tensor of the weight (such as its 16-bit copy) or, in HDF5
files, from partition_info. A weight that is not divided comes from the first rank. Before 1.7, each
rank that owns a part of a weight stores the full weight, of which only this part is current. The
lengths of the slices of the first moment show where each part is. This module does not use the
partition rule, on which the reader relies: so `verify --gather` checks the reader.

1.3 to 1.6: CombineZeroCheckpoint (checkpointing_utils.py); 1.7 to 1.16: training/checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from ...core.checkpoint.dtypes import SIZES
from ...core.checkpoint.entries import Key, name_of
from ...core.ranks.partition import FlatMember, Partition, Partitioned, Whole
from ...core.storage.fragments import Extent
from ...core.storage.inventory import parse_name
from ...errors import InconsistentCheckpoint, UnsupportedCheckpoint
from . import hdf5, legacy
from .files import locate
from .legacy import OF_RANK
from .ranks import SLOTS, RankStates, RankTensor, Save

Shape = tuple[int, ...]


def partitions(path: str, _tp_rules: str | None = None) -> list[Partition]:
    """Joins the ranks' slices of all tensors: fp32 weights, their 16-bit copies, their moments.

    Raises InconsistentCheckpoint if the slices of a tensor have more or fewer elements than its
    shape. Raises UnsupportedCheckpoint if no file shows which rank's copy of a weight is current.
    """
    save = _opened(path)
    names = {name for rank in save.ranks for name in (*rank.weights, *rank.pieces, *rank.halves)}
    return [part for name in sorted(names) for part in _tensors_of(save, name)]


def _opened(path: str) -> Save:
    """Reads the files of all ranks, in the order of the ranks.

    The ranks are in the names of torch.save files, and in the `trainer_options` of HDF5 files.
    """
    checkpoint = locate(path)
    if checkpoint.parsed:
        files = sorted(checkpoint.parsed, key=lambda file: file.options.world_rank)
        return hdf5.opened(path, files)
    return legacy.opened(path, sorted((file for _, file in checkpoint.files), key=_rank_in_name))


def _rank_in_name(path: str) -> int:
    """The rank R in the name `PREFIX.ZeRO.R.L.ort.pt`; 0 for the other names, of single files."""
    recognized = parse_name((OF_RANK,), path)
    return recognized.numbers[0] if recognized else 0


def _tensors_of(save: Save, name: str) -> Iterator[Partition]:
    """Yields the tensors of one weight: its fp32 values, its 16-bit copy and its moments."""
    whole = [rank.weights[name] for rank in save.ranks if name in rank.weights]
    halves = [rank.halves[name] for rank in save.ranks if name in rank.halves]
    pieces = [rank.pieces[name] for rank in save.ranks if name in rank.pieces]
    owners = [rank for rank in save.ranks if name in rank.moments]
    shape = next((tensor.shape for tensor in (*halves, *whole)), save.shapes.get(name, ()))
    if halves:
        yield from _joined((name, "param"), shape, halves[:1])
    if pieces:
        yield from _joined((name, "master"), shape, pieces)
    elif not _is_apart(save, name):
        yield from _joined((name, "param"), shape, whole[:1])
    elif owners:
        yield from _joined((name, "master"), shape, _current_slices(name, owners))
    else:  # without moments, ONNX Runtime itself cannot tell which copy has the latest values
        if len({tensor.crc for tensor in whole}) > 1 or (len(whole) > 1 and whole[0].crc is None):
            raise UnsupportedCheckpoint(
                "proof-unsupported",
                f"{save.root} has {name} several times and no optimizer state: ONNX Runtime itself "
                "cannot tell which one is current",
                hint="verify without --gather",
                file=save.root,
                subject=name,
            )
        yield from _joined((name, "master"), shape, whole[:1])
    for slot in SLOTS.values() if owners else ():
        yield from _joined((name, slot), shape, [rank.moments[name][slot] for rank in owners])


def _is_apart(save: Save, name: str) -> bool:
    """Whether only the owners of a weight store its fp32 values, as in mixed-precision runs."""
    if save.dialect == "hdf5" and save.dp == 1:  # there are no 16-bit copies, and nothing is cut
        trained = save.ranks[0].moments
        return save.mixed is not None and (name in trained or not trained)
    if any(name in rank.halves for rank in save.ranks):
        return True
    return not all(name in rank.weights for rank in save.ranks)


def _current_slices(name: str, owners: Sequence[RankStates]) -> list[RankTensor]:
    """Selects from each owner's copy of a weight the slice that this owner updates.

    Only for files of ONNX Runtime before 1.7, in which each owner stores the full weight.
    """
    # a slice is as long as the owner's slice of the first moment, and begins after the previous one
    parts, start = [], 0
    for rank in owners:
        weight, numel = rank.weights[name], rank.moments[name]["exp_avg"].numel
        size = SIZES[weight.dtype]
        extent = weight.extent.part(start * size, (start + numel) * size)
        parts.append(RankTensor(weight.dtype, (numel,), extent))
        start += numel
    return parts


def _joined(key: Key, shape: Shape, pieces: Sequence[RankTensor]) -> Iterator[Partition]:
    """Joins the ranks' slices of one tensor, in the order of the ranks; yields the one result."""
    numel = sum(piece.numel for piece in pieces)
    if numel != prod(shape):
        raise InconsistentCheckpoint(
            "elements-missing",
            f"the ranks' slices of {name_of(key)} have {numel} elements together, but its shape is "
            f"{list(shape)}",
            subject=name_of(key),
        )
    if len(pieces) == 1:
        yield Whole(key, pieces[0].dtype, shape, pieces[0].extent)
        return
    extents: tuple[Extent, ...] = tuple(piece.extent for piece in pieces)
    yield Partitioned(pieces[0].dtype, extents, [FlatMember(key, shape, 0)])
