"""Which elements of each weight each rank owns, and whether the files agree with that."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod

from ...errors import IncompleteCheckpoint, InconsistentCheckpoint, MissingData
from .legacy import VIEW
from .partition import Share, by_name, shares
from .ranks import SLOTS, Save

Shapes = dict[str, tuple[int, ...]]
Owned = Mapping[str, Sequence[Share]]
WRONG_FILE = (
    "keep the files of one save: one may be there twice, or be of another model or number of ranks"
)


def weights_apart(save: Save) -> set[str]:
    """Weights whose fp32 values only their owners hold: those of a mixed-precision run.

    Sets `save.mixed` for a mixed-precision run that was saved without its 16-bit copies.
    """
    halves = {name for rank in save.ranks for name in rank.halves}
    everywhere = set.intersection(*(set(rank.weights) for rank in save.ranks))
    stored = {name for rank in save.ranks for name in (*rank.weights, *rank.pieces)}
    trained = {name for rank in save.ranks for name in rank.moments}
    if save.dialect != "hdf5":
        rest = stored - everywhere
        if save.mixed or not rest or not rest >= trained:
            return halves
        # a mixed-precision run whose 16-bit copies were left out
        pieces = by_name(name for name in rest if VIEW.fullmatch(name))
        if pieces:
            raise MissingData(
                f"{save.root} holds pieces of weights ({', '.join(pieces[:4])}) without the 16-bit "
                "copies, and no other tensor has the shapes",
                hint="take a checkpoint that was saved with them",
            )
        save.mixed = "F16"
        return rest
    if not save.mixed:
        return set()
    if save.dp == 1:
        return stored & trained if trained else stored
    return stored - everywhere


def owners_of(save: Save, shapes: Shapes, apart: Collection[str]) -> tuple[Owned, set[str]]:
    """What each rank owns, by the partition rule, and which weights are trained.

    `apart` is what `weights_apart` gives.
    """
    numels = {name: prod(shape) for name, shape in shapes.items()}
    trained = {name for rank in save.ranks for name in rank.moments}
    if trained:
        for name in by_name(set(apart) - trained):
            raise IncompleteCheckpoint(f"{save.root}: no rank holds the moments of {name}")
        owned = shares({name: numels[name] for name in trained}, save.dp)
        _check_moments(save, owned)
        return owned, trained
    # without moments, nothing states which weights are frozen; which ranks hold what shows it
    for guess in (set(apart), set(shapes)):
        owned = shares({name: numels[name] for name in guess}, save.dp)
        if all(_fits(save, name, owned[name]) for name in apart):
            return owned, set(shapes)
    _refuse_torch_names(save, apart)
    return shares({name: numels[name] for name in apart}, save.dp), set(shapes)


def _fits(save: Save, name: str, owned: Sequence[Share]) -> bool:
    """Whether the ranks hold just the pieces of a weight that `owned` gives them."""
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
    """Raises unless each rank holds the moments of what it owns, and no others."""
    expected: list[dict[str, Share]] = [{} for _ in save.ranks]
    for name, parts in owned.items():
        for share in parts:
            if share.stop > share.start or len(parts) == 1:
                expected[share.rank][name] = share
    for place, (rank, expected_shares) in enumerate(zip(save.ranks, expected, strict=True)):
        for name, moments in rank.moments.items():
            own = expected_shares.get(name)
            width = 0 if own is None else own.stop - own.start
            for slot, tensor in moments.items():
                if own is None or tensor.numel != width:
                    raise InconsistentCheckpoint(
                        f"{rank.path} has {tensor.numel} elements of the {slot} of {name}, but "
                        f"ONNX Runtime's partition over {save.dp} ranks gives {width} to "
                        f"rank {place}",
                        hint=WRONG_FILE,
                    )
        for name in expected_shares:
            for moment, slot in SLOTS.items():
                if slot not in rank.moments.get(name, {}):
                    raise IncompleteCheckpoint(
                        f"{rank.path} lacks the {moment} of {name}, which rank {place} owns or "
                        "shares"
                    )


def _refuse_torch_names(save: Save, apart: Collection[str]) -> None:
    """Raises MissingData if the files hold only what torch names: split weights are in no file."""
    if save.dialect == "hdf5" or any(rank.halves for rank in save.ranks):
        return
    own = [by_name(set(rank.weights) & set(apart)) for rank in save.ranks]
    gaps = []
    for place in range(save.dp - 1):
        before = next((names[-1] for names in reversed(own[: place + 1]) if names), "the first")
        after = next((names[0] for names in own[place + 1 :] if names), "the last")
        gaps.append(f"at the end of rank {place}, between {before} and {after}")
    raise MissingData(
        f"{save.root} was saved from a mixed-precision run with torch's names alone: no file holds "
        f"the weights that ranks share ({'; '.join(gaps[:4])})",
        hint="these files cannot restore them; take a checkpoint with optimizer state",
    )
