"""The manifest of an ONNX Runtime checkpoint: every weight from the ranks that own it.

What else the files hold of a weight is left alone where it may be stale (see legacy.py), and has to
be equal where ONNX Runtime keeps it on every rank: the weights of fp32 runs, frozen ones, 16-bit
copies. Equal by the checksums of the files, here; what has none is compared by its bytes, and
masters with their 16-bit copies, when a writer is about to copy them (checking.py).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from ...core.manifest import Entry, Fragment, Manifest, Parameter, Runs, Sighting, solid
from ...errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    MissingData,
    not_understood,
)
from ...training import steps
from .files import opened
from .legacy import VIEW
from .partition import Share, by_name, shares
from .ranks import COUNT, SHARED, SLOTS, Held, Rank, Save

Shapes = dict[str, tuple[int, ...]]
Owned = Mapping[str, Sequence[Share]]
MIXED = "is a file here twice, or of another model or number of ranks?"


def read(path: str, tag: str | None = None, step_policy: str | None = None) -> Manifest:
    """The manifest of a directory of rank files, or of one file; `tag` has no meaning here.

    Raises NotACheckpoint, AmbiguousCheckpoint, IncompleteCheckpoint (a rank, or what it owned, is
    missing), InconsistentCheckpoint (ranks contradict each other or the partition rule),
    MissingData (split weights were not saved), CorruptCheckpoint, UnsupportedCheckpoint
    (horizontal parallelism), MissingExtra (h5py).
    """
    try:
        return manifest(opened(path), step_policy)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise not_understood(path, error) from error


def manifest(save: Save, step_policy: str | None) -> Manifest:
    """The manifest of opened files."""
    shapes = _shapes(save)
    apart = _apart(save)
    owned, trainable = _owners(save, shapes, apart)
    tensors = _Tensors(save, shapes, owned)
    for name in [*by_name(trainable), *by_name(set(shapes) - trainable)]:
        if name in apart:
            tensors.add_sharded(name)
        else:
            tensors.add_whole(name)
    tensors.refuse_lost()
    sightings = list(_sightings(save, owned)) if save.has_moments else []
    step_of = _steps(sightings, owned, step_policy)
    return Manifest(
        root=save.root,
        format="onnxruntime",
        source={
            "format": "onnxruntime",
            "version": None,  # the files state none
            "zero_stage": int(save.dp > 1),
            "dp": save.dp,
            "tag": None,
            "dialect": save.dialect,
        },
        entries={**tensors.entries, **save.kept},
        parameters={
            name: Parameter(shapes[name], name in trainable, step=step_of.get(name))
            for name in tensors.names
        },
        optimizer=save.optimizer,
        state=_state(save, tensors),
        steps=(*(line for _, line in sightings), *_counters(save)),
        records=tuple(save.records),
        replicas=(*tensors.replicas, *save.copies),
        files=tuple(rank.path for rank in save.ranks),
        left_out=tuple(save.left_out),
    )


def _shapes(save: Save) -> Shapes:
    """Every weight's shape, as all files tell it."""
    found: Shapes = dict(save.shapes)
    for rank in save.ranks:
        for held in (rank.weights, rank.halves):
            for name, tensor in held.items():
                if found.setdefault(name, tensor.shape) != tensor.shape:
                    raise InconsistentCheckpoint(
                        f"{rank.path} holds {name} as {list(tensor.shape)}, another file says "
                        f"{list(found[name])}"
                    )
    for rank in save.ranks:
        for name in (*rank.pieces, *rank.moments, *rank.counts):
            if name not in found:
                raise IncompleteCheckpoint(
                    f"{rank.path} holds a piece or a state of {name}, but no file holds the weight "
                    "or tells its shape"
                )
    if not found:
        raise CorruptCheckpoint(f"{save.root} holds no weights")
    return found


def _apart(save: Save) -> set[str]:
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


# -- owners


def _owners(save: Save, shapes: Shapes, apart: Collection[str]) -> tuple[Owned, set[str]]:
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


# -- tensors


class _Tensors:
    """Entries as they are found, and further copies of them."""

    def __init__(self, save: Save, shapes: Shapes, owned: Owned) -> None:
        self.save = save
        self.shapes = shapes
        self.owned = owned
        self.names: list[str] = []
        self.entries: dict[str, Entry] = {}
        self.replicas: list[Entry] = []
        self.lost: list[str] = []

    def add_sharded(self, name: str) -> None:
        """A weight of a mixed-precision run: its master in parts, its 16-bit copy everywhere."""
        self.names.append(name)
        fragments = []
        is_cut = any(name in rank.pieces for rank in self.save.ranks)
        for share in self.owned[name]:
            rank = self.save.ranks[share.rank]
            held = (rank.pieces if is_cut else rank.weights).get(name)
            if held is None:
                self.lost.append(name)
                return
            _check_dtype(rank, name, held, ("F32",))
            if is_cut and held.numel != share.stop - share.start:
                raise InconsistentCheckpoint(
                    f"{rank.path} holds {held.numel} elements of {name}, where ONNX Runtime's "
                    f"partition over {self.save.dp} ranks gives rank {share.rank} "
                    f"{share.stop - share.start}",
                    hint=MIXED,
                )
            extent = held.extent
            if not is_cut:  # of a whole weight the owner's part alone is current
                extent = extent.part(4 * share.start, 4 * share.stop)
            fragments.append(Fragment(share.start, share.stop, extent))
        shape = self.shapes[name]
        self._enter(Entry(f"{name}/master", "F32", shape, Runs(fragments)))
        copies = [(rank, held) for rank in self.save.ranks if (held := rank.halves.get(name))]
        self._add_copies(f"{name}/param", copies)
        self._add_moments(name)

    def add_whole(self, name: str) -> None:
        """A weight that every rank holds: of an fp32 run, kept in fp32, or frozen."""
        self.names.append(name)
        copies = []
        for rank in self.save.ranks:
            held = rank.weights.get(name)
            if held is None:
                raise IncompleteCheckpoint(
                    f"{rank.path} lacks {name}, which every rank of an fp32 run holds"
                    if not self.save.mixed
                    else f"{rank.path} lacks {name}, which is frozen or kept in fp32",
                    hint="is it a file of another save, or of another model?",
                )
            copies.append((rank, held))
        if name in self.owned:  # the owner's first
            first = self.owned[name][0].rank
            copies = [copies[first], *copies[:first], *copies[first + 1 :]]
        self._add_copies(f"{name}/param", copies)
        self._add_moments(name)

    def _add_copies(self, name: str, copies: Sequence[tuple[Rank, Held]]) -> None:
        """The first as the entry, the others as its replicas; raises where these differ."""
        if not copies:
            return
        first, held = copies[0]
        self._enter(Entry(name, held.dtype, held.shape, solid(held.numel, held.extent)))
        for rank, other in copies[1:]:
            told = held.crc is not None and other.crc is not None
            if other.dtype != held.dtype or (told and held.crc != other.crc):
                raise differing(name, first.path, rank.path)
            self.replicas.append(
                Entry(name, other.dtype, other.shape, solid(other.numel, other.extent))
            )

    def _add_moments(self, name: str) -> None:
        if not self.save.has_moments or name not in self.owned:
            return
        for slot in SLOTS.values():
            parts = [
                (share, self.save.ranks[share.rank].moments[name][slot])
                for share in self.owned[name]
            ]
            for share, held in parts:
                _check_dtype(self.save.ranks[share.rank], name, held, (parts[0][1].dtype,))
                _check_dtype(self.save.ranks[share.rank], name, held, ("F32", "F16", "BF16"))
            fragments = Runs([Fragment(s.start, s.stop, held.extent) for s, held in parts])
            self._enter(Entry(f"{name}/{slot}", parts[0][1].dtype, self.shapes[name], fragments))

    def _enter(self, entry: Entry) -> None:
        self.entries[entry.name] = entry

    def refuse_lost(self) -> None:
        """Raises for weights of which an owner holds nothing."""
        told = ", ".join(self.lost[:8]) + (" ..." if len(self.lost) > 8 else "")
        if self.lost and self.save.dialect == "hdf5":
            raise IncompleteCheckpoint(f"{self.save.root} lacks pieces of {told}")
        if self.lost:
            raise MissingData(
                f"{self.save.root} lacks the fp32 pieces of {told}: it was saved with torch's "
                "names alone, which leaves out weights that ranks share",
                hint="they cannot be restored from these files; take another checkpoint",
            )


def differing(name: str, first: str, other: str) -> InconsistentCheckpoint:
    """The error for copies of one tensor that are not the same."""
    return InconsistentCheckpoint(
        f"{os.path.basename(first)} and {os.path.basename(other)} hold different values of "
        f"{name.rpartition('/')[0]}, which every rank has alike"
    )


def _check_dtype(rank: Rank, name: str, held: Held, allowed: Sequence[str]) -> None:
    if held.dtype not in allowed:
        raise InconsistentCheckpoint(
            f"{rank.path} holds {name} or a state of it as {held.dtype}, not {allowed[0]}"
        )


# -- steps


def _sightings(save: Save, owned: Owned) -> Iterator[tuple[str, Sighting]]:
    """Completed updates by weight: one less than what is stored, which begins with 1."""
    shared = any(rank.shared is not None for rank in save.ranks)
    if not shared and not any(rank.counts for rank in save.ranks):
        raise IncompleteCheckpoint(f"{save.root} holds moments, but no {COUNT} or {SHARED}")
    if shared:
        for place, rank in enumerate(save.ranks):
            if rank.shared is None:
                raise IncompleteCheckpoint(f"{rank.path} lacks {SHARED}, which every rank has")
            yield "", Sighting(f"{SHARED}, rank {place}", rank.shared - 1, True)
        return
    for name in by_name(owned):
        for share in owned[name]:
            rank = save.ranks[share.rank]
            if name not in rank.counts:
                raise IncompleteCheckpoint(f"{rank.path} lacks the {COUNT} of {name}")
            where = f"{COUNT} of {name}, rank {share.rank}"
            yield name, Sighting(where, rank.counts[name] - 1, True)


def _steps(
    sightings: Sequence[tuple[str, Sighting]], owned: Owned, policy: str | None
) -> dict[str, steps.Step | None]:
    """Completed updates of every weight; they differ only where the policy is to keep that."""
    places: dict[str, list[tuple[str, steps.Step]]] = {}
    for name, line in sightings:
        of = name if policy == steps.KEEP else ""
        places.setdefault(of, []).append((line.where, line.step))
    agreed = {name: steps.agree(told, policy) for name, told in places.items()}
    return {name: agreed.get(name, agreed.get("")) for name in owned} if agreed else {}


def _counters(save: Save) -> list[Sighting]:
    """ORTTrainer's own, which drive its schedule of learning rates."""
    counters = save.state.get("train_step_info") or {}
    return steps.counter_sightings("train_step_info", counters, counters)


def _state(save: Save, tensors: _Tensors) -> dict[str, Any]:
    """Everything else, so that the files can be made again."""
    moments = {entry.dtype for entry in tensors.entries.values() if entry.slot == "exp_avg"}
    return {
        "engine": {
            "name": "onnxruntime",
            "version": None,
            "dialect": save.dialect,
            "dtype": save.mixed or "F32",
            "moments": min(moments, default=None),
            # the order of the module's parameters is nowhere: weights are sorted by name
            "ordered": False,
        },
        **save.state,
    }
