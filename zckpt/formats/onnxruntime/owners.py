"""Which rank owns what of each weight, and whether the files agree with the partition rule."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod

from ...errors import IncompleteCheckpoint, InconsistentCheckpoint, MissingData
from .legacy import VIEW
from .partition import Share, by_name, shares
from .ranks import SLOTS, Save

Shapes = dict[str, tuple[int, ...]]
Owned = Mapping[str, Sequence[Share]]
MIXED = "is a file here twice, or of another model or number of ranks?"


def weights_apart(save: Save) -> set[str]:
    """Weights whose fp32 values only their owners hold."""
    halves = {name for rank in save.ranks for name in rank.halves}
    everywhere = set.intersection(*(set(rank.weights) for rank in save.ranks))
    held = {name for rank in save.ranks for name in (*rank.weights, *rank.pieces)}
    trained = {name for rank in save.ranks for name in rank.moments}
    if save.dialect != "hdf5":
        rest = held - everywhere
        if save.mixed or not rest or not rest >= trained:
            return halves
        # a mixed-precision run whose 16-bit copies were left out
        pieces = by_name(name for name in rest if VIEW.fullmatch(name))
        if pieces:
            raise MissingData(
                f"{save.root} holds pieces of weights ({', '.join(pieces[:4])}) without the 16-bit "
                "copies, which alone tell the shapes",
                hint="take a checkpoint that was saved whole",
            )
        save.mixed = "F16"
        return rest
    if not save.mixed:
        return set()
    if save.dp == 1:
        return held & trained if trained else held
    return held - everywhere


def owners_of(save: Save, shapes: Shapes, apart: Collection[str]) -> tuple[Owned, set[str]]:
    """What each rank owns, by the partition rule, and which weights are trained."""
    numels = {name: prod(shape) for name, shape in shapes.items()}
    trained = {name for rank in save.ranks for name in rank.moments}
    if trained:
        for name in by_name(set(apart) - trained):
            raise IncompleteCheckpoint(f"{save.root}: no rank holds the moments of {name}")
        owned = shares({name: numels[name] for name in trained}, save.dp)
        _check_moments(save, owned)
        return owned, trained
    # without moments it does not show which of the others are frozen; where the weights lie does
    for guess in (set(apart), set(shapes)):
        owned = shares({name: numels[name] for name in guess}, save.dp)
        if all(_fits(save, name, owned[name]) for name in apart):
            return owned, set(shapes)
    _refuse_torch_names(save, apart)
    return shares({name: numels[name] for name in apart}, save.dp), set(shapes)


def _fits(save: Save, name: str, owned: Sequence[Share]) -> bool:
    """Whether the ranks hold what they should own of a weight, and no piece more."""
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
    """The moments of each rank are those of what it owns: neither more, nor fewer, nor others."""
    expected: list[dict[str, Share]] = [{} for _ in save.ranks]
    for name, parts in owned.items():
        for share in parts:
            if share.stop > share.start or len(parts) == 1:
                expected[share.rank][name] = share
    for place, (rank, wanted) in enumerate(zip(save.ranks, expected, strict=True)):
        for name, moments in rank.moments.items():
            mine = wanted.get(name)
            width = 0 if mine is None else mine.stop - mine.start
            for slot, held in moments.items():
                if mine is None or held.numel != width:
                    raise InconsistentCheckpoint(
                        f"{rank.path} holds {held.numel} elements of the {slot} of {name}, where "
                        f"ONNX Runtime's partition over {save.dp} ranks gives rank {place} {width}",
                        hint=MIXED,
                    )
        for name in wanted:
            for moment, slot in SLOTS.items():
                if slot not in rank.moments.get(name, {}):
                    raise IncompleteCheckpoint(
                        f"{rank.path} lacks the {moment} of {name}, of which rank {place} owns a "
                        "part"
                    )


def _refuse_torch_names(save: Save, apart: Collection[str]) -> None:
    """Weights without any 16-bit copy, whole on their owners: the split ones are in no file."""
    if save.dialect == "hdf5" or any(rank.halves for rank in save.ranks):
        return
    own = [by_name(set(rank.weights) & set(apart)) for rank in save.ranks]
    gaps = []
    for place in range(save.dp - 1):
        before = next((names[-1] for names in reversed(own[: place + 1]) if names), "the first")
        after = next((names[0] for names in own[place + 1 :] if names), "the last")
        gaps.append(f"at the end of rank {place}, between {before} and {after}")
    raise MissingData(
        f"{save.root} was saved from a mixed-precision run with torch's names alone: the weights "
        f"that ranks share are in no file ({'; '.join(gaps[:4])})",
        hint="they cannot be restored from these files; take a checkpoint with optimizer state",
    )
