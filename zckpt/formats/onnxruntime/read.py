"""Builds the manifest of an ONNX Runtime checkpoint, with every weight from the ranks that own it.

Other ranks' copies of a weight are not used if they may be stale (see legacy.py). They must be
equal if ONNX Runtime keeps them current on every rank: the weights of fp32 runs, frozen weights,
16-bit copies. `read` compares the checksums that the files state. A conversion compares the bytes
of tensors without checksums (`copies`). Because the engine casts each 16-bit copy from its master
after each update, a conversion also compares all elements of masters and 16-bit copies
(`Format.compares`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from ...core.checkpoint import agreement
from ...core.checkpoint.entries import Entry, Key
from ...core.checkpoint.facts import NamedWeightsEngine
from ...core.checkpoint.manifest import Files, Manifest, Notices, Parameter, Run, Sighting
from ...core.checkpoint.origin import Origin
from ...core.comparison.compare import Result
from ...core.comparison.masters import first_difference, refuse_damage
from ...core.comparison.replicas import Replicas, copies_of
from ...core.passes.plan import Match
from ...core.storage.fragments import Fragment, Runs, solid
from ...errors import (
    MALFORMED,
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    MissingData,
    Notice,
    not_understood,
)
from ...training import steps
from ..reading import USUAL, Reading
from .files import opened
from .partition import WRONG_FILE, Owned, Shapes, by_name, owners_of, weights_apart
from .ranks import COUNT, SHARED, SLOTS, RankStates, RankTensor, Save


def read(path: str, reading: Reading = USUAL) -> Manifest:
    """Reads a directory of ranks' files, or one file; there are no tags.

    Raises NotACheckpoint, AmbiguousCheckpoint, CorruptCheckpoint, and:
        IncompleteCheckpoint      a rank's file or slice is missing
        InconsistentCheckpoint    ranks contradict each other or the partition rule
        MissingData               split weights were not saved
        UnsupportedCheckpoint     the run has horizontal parallelism
        MissingExtra              h5py is not installed
    """
    try:
        return manifest(opened(path), reading.step_policy)
    except MALFORMED as error:
        raise not_understood(path, error) from error


def copies(manifest: Manifest, replicas: str | None) -> list[Replicas]:
    """Lists the comparisons of ranks' replicas that `read` could not make by checksums.

    A conversion makes these comparisons; `inspect` does not, because it reads no tensor. If
    replicas differ, the comparison raises InconsistentCheckpoint, or CorruptCheckpoint if a damaged
    file is the cause.
    """

    def judge(differing: Sequence[Result]) -> list[Notice]:
        if differing:
            places = first_difference(differing[0])
            refuse_damage(manifest, places)
            parameter = differing[0].match.a.parameter
            raise different_copies(parameter, *(place.file for place in places))
        return []

    return [Replicas(manifest, [*_replicas_without_checksums(manifest)], judge)]


def _replicas_without_checksums(manifest: Manifest) -> Iterator[Match]:
    """Yields pairs of an entry and its replica that `read` could not compare by CRC-32."""
    crc_by_extent = {record.extent: record.crc for record in manifest.files.records}
    for match in copies_of(manifest):
        copy, entry = match.a, manifest.entries[match.a.key]
        crcs = {crc_by_extent.get(part.extent) for part in (*entry.fragments, *copy.fragments)}
        if len(crcs) > 1 or None in crcs:
            yield Match(entry, copy, copy=True)


def manifest(save: Save, step_policy: str | None) -> Manifest:
    """Builds the manifest from the contents of all ranks' files."""
    shapes = _shapes(save)
    apart = weights_apart(save)
    owned, trainable = owners_of(save, shapes, apart)
    collected = _Entries(save, shapes, owned)
    names = [*by_name(trainable), *by_name(set(shapes) - trainable)]
    for name in names:
        add = collected.add_sharded if name in apart else collected.add_whole
        add(name)
    collected.refuse_missing()
    sightings = list(_sightings(save, owned)) if save.has_moments else []
    # ORTTrainer's own counters, which drive its schedule of learning rates
    counted = save.state.get("train_step_info") or {}
    counters = steps.counter_sightings("train_step_info", counted, counted)
    moments = {entry.dtype for entry in collected.entries.values() if entry.slot == "exp_avg"}
    step_of = _steps(sightings, owned, step_policy)
    return Manifest(
        root=save.root,
        format="onnxruntime",
        entries={**collected.entries, **save.kept},
        parameters={
            name: Parameter(shapes[name], name in trainable, step=step_of.get(name))
            for name in names
        },
        optimizer=save.optimizer,
        state=save.state,
        replicas=(*collected.replicas, *save.copies),
        run=Run(
            origin=Origin(  # the files state no version
                "onnxruntime", zero_stage=int(save.dp > 1), dp=save.dp, dialect=save.dialect
            ),
            engine=NamedWeightsEngine(
                "onnxruntime", None, save.dialect, save.mixed or "F32", min(moments, default=None)
            ),
            steps=(*(line for _, _, line in sightings), *counters),
        ),
        files=Files(records=tuple(save.records), paths=tuple(rank.path for rank in save.ranks)),
        notices=Notices(
            omitted=tuple(save.omitted),
            warnings=tuple(save.warnings),
            notes=tuple(save.notes),
            states_inferred=False,
        ),
    )


def _shapes(save: Save) -> Shapes:
    """Maps weights to shapes; raises InconsistentCheckpoint if files state different shapes."""
    shapes: Shapes = dict(save.shapes)
    for rank in save.ranks:
        for tensors in (rank.weights, rank.halves):
            for name, tensor in tensors.items():
                if shapes.setdefault(name, tensor.shape) != tensor.shape:
                    raise InconsistentCheckpoint(
                        "ranks-disagree",
                        f"{rank.path} has {name} with the shape {list(tensor.shape)}, but another "
                        f"file states {list(shapes[name])}",
                        file=rank.path,
                        subject=name,
                    )
    for rank in save.ranks:
        for name in (*rank.pieces, *rank.moments, *rank.counts):
            if name not in shapes:
                raise IncompleteCheckpoint(
                    "elements-missing",
                    f"{rank.path} has a slice or an optimizer state of {name}, but no file has the "
                    "weight or states its shape",
                    file=rank.path,
                    subject=name,
                )
    if not shapes:
        raise CorruptCheckpoint("weights-missing", f"{save.root} has no weights", file=save.root)
    return shapes


# -- tensors


class _Entries:
    """Collects the manifest's entries (tensors) and their replicas, one weight after another."""

    def __init__(self, save: Save, shapes: Shapes, owned: Owned) -> None:
        self.save = save
        self.shapes = shapes
        self.owned = owned
        self.entries: dict[Key, Entry] = {}
        self.replicas: list[Entry] = []
        self.lost: list[str] = []

    def add_sharded(self, name: str) -> None:
        """Adds a mixed-precision weight: its owners have the master, all ranks a 16-bit copy.

        If an owner has no slice of the weight, the weight's name is added to `lost` instead. Raises
        InconsistentCheckpoint if a slice's length contradicts the partition rule.
        """
        fragments = []
        is_cut = any(name in rank.pieces for rank in self.save.ranks)
        for share in self.owned[name]:
            rank = self.save.ranks[share.rank]
            tensor = (rank.pieces if is_cut else rank.weights).get(name)
            if tensor is None:
                self.lost.append(name)
                return
            _check_dtype(rank, name, tensor, ("F32",))
            if is_cut and tensor.numel != share.stop - share.start:
                raise InconsistentCheckpoint(
                    "partition-does-not-fit",
                    f"{rank.path} has {tensor.numel} elements of {name}, but ONNX Runtime's "
                    f"partition over {self.save.dp} ranks gives {share.stop - share.start} to rank "
                    f"{share.rank}",
                    hint=WRONG_FILE,
                    file=rank.path,
                    subject=name,
                )
            extent = tensor.extent
            if not is_cut:  # the weight is complete, but only the owner's part is current
                extent = extent.part(4 * share.start, 4 * share.stop)
            fragments.append(Fragment(share.start, share.stop, extent))
        shape = self.shapes[name]
        self._enter(Entry(name, "master", "F32", shape, Runs(fragments)))
        copies = [(rank, half) for rank in self.save.ranks if (half := rank.halves.get(name))]
        self._add_copies(name, copies)
        self._add_moments(name)

    def add_whole(self, name: str) -> None:
        """Adds a weight that every rank stores completely: a frozen one, or one trained in fp32.

        Raises IncompleteCheckpoint if a rank lacks it.
        """
        copies = []
        for rank in self.save.ranks:
            tensor = rank.weights.get(name)
            if tensor is None:
                raise IncompleteCheckpoint(
                    "elements-missing",
                    f"{rank.path} lacks {name}, which every rank of an fp32 run stores"
                    if not self.save.mixed
                    else f"{rank.path} lacks {name}, which every rank stores, because it is frozen "
                    "or kept in fp32",
                    hint="the file may belong to another save or another model: copy the files of "
                    "one save",
                    file=rank.path,
                    subject=name,
                )
            copies.append((rank, tensor))
        if name in self.owned:  # the owner's copy comes first
            first = self.owned[name][0].rank
            copies = [copies[first], *copies[:first], *copies[first + 1 :]]
        self._add_copies(name, copies)
        self._add_moments(name)

    def _add_copies(self, name: str, copies: Sequence[tuple[RankStates, RankTensor]]) -> None:
        """Adds a weight that several ranks store: one copy as an entry, the others as replicas.

        Raises InconsistentCheckpoint if the checksums in the files differ.
        """
        if not copies:
            return
        first, tensor = copies[0]
        fragments = solid(tensor.numel, tensor.extent)
        self._enter(Entry(name, "param", tensor.dtype, tensor.shape, fragments))
        for rank, other in copies[1:]:
            have_crcs = tensor.crc is not None and other.crc is not None
            if other.dtype != tensor.dtype or (have_crcs and tensor.crc != other.crc):
                raise different_copies(name, first.path, rank.path)
            self.replicas.append(
                Entry(name, "param", other.dtype, other.shape, solid(other.numel, other.extent))
            )

    def _add_moments(self, name: str) -> None:
        if not self.save.has_moments or name not in self.owned:
            return
        for slot in SLOTS.values():
            parts = [
                (share, self.save.ranks[share.rank].moments[name][slot])
                for share in self.owned[name]
            ]
            for share, tensor in parts:
                _check_dtype(self.save.ranks[share.rank], name, tensor, (parts[0][1].dtype,))
                _check_dtype(self.save.ranks[share.rank], name, tensor, ("F32", "F16", "BF16"))
            fragments = Runs([Fragment(s.start, s.stop, tensor.extent) for s, tensor in parts])
            self._enter(Entry(name, slot, parts[0][1].dtype, self.shapes[name], fragments))

    def _enter(self, entry: Entry) -> None:
        self.entries[entry.key] = entry

    def refuse_missing(self) -> None:
        """Raises an error if an owner of a weight has stored no slice of it.

        It is IncompleteCheckpoint for HDF5 files. It is MissingData for torch.save files, because a
        program can save them without the weights that ranks share.
        """
        names = ", ".join(self.lost[:8]) + (" ..." if len(self.lost) > 8 else "")
        if self.lost and self.save.dialect == "hdf5":
            raise IncompleteCheckpoint(
                "elements-missing", f"{self.save.root} lacks slices of {names}", file=self.save.root
            )
        if self.lost:
            raise MissingData(
                "weights-missing",
                f"{self.save.root} lacks the fp32 slices of {names}: it was saved with only the "
                "names of the torch model, but weights that are split over ranks have other names "
                "(NAME_view_K)",
                hint="these weights cannot be restored: take another checkpoint",
                file=self.save.root,
            )


def different_copies(name: str, first: str, other: str) -> InconsistentCheckpoint:
    """Makes the error for a tensor whose replicas differ in two files."""
    return InconsistentCheckpoint(
        "copies-differ",
        f"{os.path.basename(first)} and {os.path.basename(other)} hold different values of "
        f"{name}, which must be the same on every rank",
    )


def _check_dtype(rank: RankStates, name: str, tensor: RankTensor, allowed: Sequence[str]) -> None:
    if tensor.dtype not in allowed:
        raise InconsistentCheckpoint(
            "ranks-disagree",
            f"{rank.path} has {name} or an optimizer state of it as {tensor.dtype}, but zckpt "
            f"expected {allowed[0]}",
            file=rank.path,
            subject=name,
        )


# -- steps


def _sightings(save: Save, owned: Owned) -> Iterator[tuple[str, str, Sighting]]:
    """Yields (weight, file, step) for every counter in the files.

    The step is the number of completed updates. Lamb has one counter for all weights; then the
    weight is "".
    """
    shared = any(rank.shared is not None for rank in save.ranks)
    if not shared and not any(rank.counts for rank in save.ranks):
        raise IncompleteCheckpoint(
            "state-missing",
            f"{save.root} has moments, but no counter of updates: neither {COUNT} nor {SHARED}",
            file=save.root,
        )
    if shared:
        for place, rank in enumerate(save.ranks):
            if rank.shared is None:
                raise IncompleteCheckpoint(
                    "state-missing",
                    f"{rank.path} lacks {SHARED}, which every rank stores",
                    file=rank.path,
                )
            step = steps.COUNTED.completed(rank.shared)
            yield "", rank.path, Sighting(f"{SHARED}, rank {place}", step, True)
        return
    for name in by_name(owned):
        for share in owned[name]:
            rank = save.ranks[share.rank]
            if name not in rank.counts:
                raise IncompleteCheckpoint(
                    "state-missing",
                    f"{rank.path} lacks the {COUNT} of {name}",
                    file=rank.path,
                    subject=name,
                )
            where = f"{COUNT} of {name}, rank {share.rank}"
            step = steps.COUNTED.completed(rank.counts[name])
            yield name, rank.path, Sighting(where, step, True)


def _steps(
    sightings: Sequence[tuple[str, str, Sighting]], owned: Owned, policy: str | None
) -> dict[str, agreement.Step | None]:
    """Maps each weight to its number of completed updates.

    The number is the same for all weights, unless `policy` is `keep`.
    """
    steps_by_weight: dict[str, list[tuple[str, agreement.Step]]] = {}
    for name, file, line in sightings:
        weight = name if policy == agreement.KEEP else ""
        place = f"{os.path.basename(file)}: {line.where}"
        steps_by_weight.setdefault(weight, []).append((place, line.step))
    agreed = {name: agreement.agree(places, policy) for name, places in steps_by_weight.items()}
    return {name: agreed.get(name, agreed.get("")) for name in owned} if agreed else {}
