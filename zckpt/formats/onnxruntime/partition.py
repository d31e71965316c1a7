"""The partition rule: the elements of each weight that every rank of ONNX Runtime's ZeRO-1 owns.

    sorted by name   [ a a a a a a | b b | c c c c c . . . ]      dots are padding
    rank                   0     |      1      |     2

The trainable weights are sorted by name, as bytes, and follow each other without gaps. Frozen
weights are not partitioned. The padding at the end is never stored. A weight with one owner keeps
its shape. If a weight has several owners, each one stores a flat slice. ONNX Runtime 1.3 to 1.16,
zero_optimizer_graph_builder.cc. This module opens no file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod

from msgspec import Struct

from ...errors import IncompleteCheckpoint, InconsistentCheckpoint, MissingData
from .legacy import VIEW
from .ranks import SLOTS, Save

ALIGNMENT = 32  # elements per rank


class Share(Struct, frozen=True):
    """The elements [start, stop) of a weight that one rank owns.

    `view` is the K in the name `_view_K` of a stored slice: 0 for a weight's first slice, 1 for all
    later ones. None if the weight has one owner.
    """

    rank: int
    start: int
    stop: int
    view: int | None = None


def by_name(names: Iterable[str]) -> list[str]:
    """Sorts names as ONNX Runtime does, as bytes: `Emb` < `head` and `layer.10` < `layer.2`."""
    return sorted(names, key=lambda name: name.encode("utf-8", "surrogatepass"))


def per_rank(total: int, dp: int) -> int:
    """The number of elements in each rank's partition, padding included.

    The number is a multiple of ALIGNMENT. There is always padding: if `total` is a multiple of
    ALIGNMENT * dp already, ALIGNMENT * dp elements are added.
    """
    block = ALIGNMENT * dp
    return (total + block - total % block) // dp


def shares(numels: Mapping[str, int], dp: int) -> dict[str, list[Share]]:
    """Computes which elements of each weight every rank owns, by ONNX Runtime's rule.

    The module's docstring states the rule. `numels` has the trainable weights' element counts.
    """
    width = per_rank(sum(numels.values()), dp) if dp > 1 else sum(numels.values()) + 1
    owned: dict[str, list[Share]] = {}
    begin = 0
    for name in by_name(numels):
        numel = numels[name]
        end = begin + numel
        first, last = begin // width, max(begin, end - 1) // width
        if first == last:
            owned[name] = [Share(first, 0, numel)]
        else:
            owned[name] = [
                Share(
                    rank,
                    max(0, rank * width - begin),
                    min(numel, (rank + 1) * width - begin),
                    int(rank > first),
                )
                for rank in range(first, last + 1)
            ]
        begin = end
    return owned


def share_of(owned: Iterable[Share], rank: int) -> Share | None:
    """The share of `rank` among the shares of one weight; None if it owns no elements of it."""
    return next((share for share in owned if share.rank == rank), None)


# -- whether the files agree with the partition rule


Shapes = dict[str, tuple[int, ...]]
Owned = Mapping[str, Sequence[Share]]
WRONG_FILE = (
    "keep the files of one save only: a file may be there twice, or belong to another model or "
    "another number of ranks"
)


def weights_apart(save: Save) -> set[str]:
    """Finds the weights whose fp32 values are stored only by the ranks that own them.

    These are the trained weights of a mixed-precision run. Sets `save.mixed` to "F16" if the run's
    torch.save files have no 16-bit copies. Raises MissingData if nothing states the full shapes of
    sliced weights.
    """
    halves = {name for rank in save.ranks for name in rank.halves}
    everywhere = set.intersection(*(set(rank.weights) for rank in save.ranks))
    stored = {name for rank in save.ranks for name in (*rank.weights, *rank.pieces)}
    trained = {name for rank in save.ranks for name in rank.moments}
    if save.dialect != "hdf5":
        rest = stored - everywhere
        if save.mixed or not rest or not rest >= trained:
            return halves
        # some ranks lack the trained weights: a mixed-precision run without its 16-bit copies
        pieces = by_name(name for name in rest if VIEW.fullmatch(name))
        if pieces:
            raise MissingData(
                "layout-unknown",
                f"{save.root} has slices of weights ({', '.join(pieces[:4])}), but not the 16-bit "
                "copies of these weights, which alone show their shapes",
                hint="take a checkpoint with 16-bit copies of the weights (NAME_fp16 or NAME_bf16)",
                file=save.root,
            )
        save.mixed = "F16"
        return rest
    if not save.mixed:
        return set()
    if save.dp == 1:
        return stored & trained if trained else stored
    return stored - everywhere


def owners_of(save: Save, shapes: Shapes, apart: Collection[str]) -> tuple[Owned, set[str]]:
    """Finds the ranks' shares of weights, and the names of the trained weights.

    `apart` has the weights whose fp32 values only the owners store. Without moments, all weights
    count as trained. Raises IncompleteCheckpoint if some moments are missing,
    InconsistentCheckpoint if moments contradict the partition rule, and MissingData if no file has
    the weights that several ranks share.
    """
    numels = {name: prod(shape) for name, shape in shapes.items()}
    trained = {name for rank in save.ranks for name in rank.moments}
    if trained:
        for name in by_name(set(apart) - trained):
            raise IncompleteCheckpoint(
                "elements-missing",
                f"{save.root}: no rank's file has the moments of {name}",
                file=save.root,
                subject=name,
            )
        owned = shares({name: numels[name] for name in trained}, save.dp)
        _check_moments(save, owned)
        return owned, trained
    # without moments, no file states which weights are frozen: the rule is tried with the weights
    # in `apart`, then with all weights, until the ranks' slices fit
    for guess in (set(apart), set(shapes)):
        owned = shares({name: numels[name] for name in guess}, save.dp)
        if all(_has_slices_of(save, name, owned[name]) for name in apart):
            return owned, set(shapes)
    _refuse_torch_names(save)
    return shares({name: numels[name] for name in apart}, save.dp), set(shapes)


def _has_slices_of(save: Save, name: str, owned: Sequence[Share]) -> bool:
    """Whether the ranks' files have exactly the slices of a weight that `owned` assigns to them."""
    ranks = {share.rank for share in owned}
    pieces = {place for place, rank in enumerate(save.ranks) if name in rank.pieces}
    if not pieces <= ranks:
        return False
    for share in owned:
        rank = save.ranks[share.rank]
        piece = rank.pieces.get(name)
        if piece is None and name not in rank.weights:
            return False
        if piece is not None and piece.numel != share.stop - share.start:
            return False
    return True


def _check_moments(save: Save, owned: Owned) -> None:
    """Compares the moments in each rank's file with the elements that the rank owns.

    Raises InconsistentCheckpoint if a rank has moments of elements that it does not own, and
    IncompleteCheckpoint if a moment is missing.
    """
    expected: list[dict[str, Share]] = [{} for _ in save.ranks]
    for name, parts in owned.items():
        for share in parts:
            if share.stop > share.start or len(parts) == 1:
                expected[share.rank][name] = share
    for place, (rank, expected_shares) in enumerate(zip(save.ranks, expected, strict=True)):
        for name, moments in rank.moments.items():
            own_share = expected_shares.get(name)
            width = 0 if own_share is None else own_share.stop - own_share.start
            for slot, tensor in moments.items():
                if own_share is None or tensor.numel != width:
                    raise InconsistentCheckpoint(
                        "partition-does-not-fit",
                        f"{rank.path} has {tensor.numel} elements of the {slot} of {name}, but "
                        f"ONNX Runtime's partition over {save.dp} ranks gives {width} to "
                        f"rank {place}",
                        hint=WRONG_FILE,
                        file=rank.path,
                        subject=name,
                    )
        for name in expected_shares:
            for moment, slot in SLOTS.items():
                if slot not in rank.moments.get(name, {}):
                    raise IncompleteCheckpoint(
                        "elements-missing",
                        f"{rank.path} lacks the {moment} of {name}, of which rank {place} owns "
                        "elements",
                        file=rank.path,
                        subject=name,
                    )


def _refuse_torch_names(save: Save) -> None:
    """Raises MissingData for a mixed-precision run that was saved with only the torch model's keys.

    Called if the ranks' slices do not fit the partition rule. Does nothing for HDF5 files and for
    files with 16-bit copies.
    """
    # slices of weights have other keys than the torch model (`NAME_view_K`)
    if save.dialect == "hdf5" or any(rank.halves for rank in save.ranks):
        return
    raise MissingData(
        "weights-missing",
        f"{save.root} was saved from a mixed-precision run, but with only the names of the torch "
        "model: weights that are split over ranks have other names (NAME_view_K), so no file has "
        "them",
        hint="these weights cannot be restored: take a checkpoint with optimizer state",
        file=save.root,
    )
