"""Reads the ranks' flat buffers of fp32 masters and optimizer states.

Stages 1 and 2 have one buffer per parameter group, stage 3 has one per sub-group. Stages 1 and 2
save masters without the padding of the last partition, and states with it. BF16_Optimizer saves
both with padding. Stage 3 pads every parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from math import prod
from typing import Any

from msgspec import Struct

from ...core.checkpoint import agreement
from ...core.checkpoint.dtypes import SIZES
from ...core.checkpoint.facts import StepPlace
from ...core.checkpoint.inert import Scalar
from ...core.checkpoint.manifest import Sighting, slot_name
from ...core.storage import sources
from ...core.storage.fragments import Fragments, Slices, solid
from ...errors import CorruptCheckpoint, InconsistentCheckpoint, Notice, listed
from ...files.torchfile import Tensor
from ...training import steps
from ...training.faults import SHARED_FILES
from .. import zero
from ..deepspeed_states.directories import refuse
from ..deepspeed_states.states import (
    BufferSlot,
    EngineStates,
    FlatBuffer,
    ParameterShapes,
    in_user_order,
)

MOST_IN_SEQUENCE = 64  # largest factor to try when the files may be of some of the ranks only
GROUP_STEP = "base_optimizer_state_step"  # elastic files have this key instead of groups
Sharing = Callable[[int, ParameterShapes], Sequence[tuple[EngineStates, ParameterShapes]]]
"""A function that returns the flat buffers of a param group.

Arguments: the group's number, and its parameters' shapes on rank 0. Each result: the files of the
ranks that share a buffer, and the shapes of the parameters in the buffer.
"""


def flat_buffers(
    ranks: EngineStates, step_policy: str | None, sharing: Sharing | None = None
) -> Iterator[FlatBuffer]:
    """Yields every flat buffer of the checkpoint: masters and optimizer states from all ranks.

    All ranks share one buffer per param group (in stage 3, per sub-group). A group of experts has
    one buffer per ep rank, so with experts `sharing` returns the buffers of a group. `step_policy`
    chooses a step if ranks differ: "max", "min" or a number such as "7".
    """
    shapes = ranks.param_shapes()
    masters = [_masters(ranks, state) for state in ranks.states]
    if odd := [len(tensors) for tensors in masters if len(tensors) != len(shapes)]:
        raise _contradiction(
            ranks,
            f"the optimizer files have {odd[0]} flat groups, but parameter shapes are listed for "
            f"{len(shapes)}",
            "model and optimizer files of different saves seem to be mixed",
        )
    alignment = ranks.first.get("param_alignment_paddings") or [None] * len(shapes)
    buffers = []
    for place, names in enumerate(shapes):
        paddings = alignment[place] or [0] * len(names)
        if len(paddings) != len(names):
            raise _contradiction(
                ranks,
                f"the optimizer files have {len(paddings)} parameters in flat group {place}, but "
                f"shapes are listed for {len(names)}: {listed(list(names), 4)}",
                "model and optimizer files of different ranks or saves seem to be mixed",
            )
        for sharers, own_names in [(ranks, names)] if sharing is None else sharing(place, names):
            partitions = [masters[number][place] for number in sharers.numbers or range(ranks.dp)]
            buffers.append(_RankedBuffer(sharers, place, own_names, paddings, partitions))
    numbers = {key for buffer in buffers for key in buffer.numbers()}
    groups = ranks.bases[0].get("param_groups") or []
    group_of = {sub: place for place, group in enumerate(groups) for sub in group["params"]}
    for buffer in buffers:
        place = buffer.place
        group = group_of.get(place, place) if ranks.partitioned else place
        yield buffer.read(group, numbers, step_policy)


def _masters(ranks: EngineStates, state: Mapping[str, Any]) -> list[Tensor]:
    """A rank's partitions of masters, one for each flat buffer.

    `state` is the rank's optimizer state. Raises CorruptCheckpoint if it has no such partitions.
    """
    key = "fp32_flat_groups" if ranks.partitioned else "single_partition_of_fp32_groups"
    tensors = state.get(key)
    if not isinstance(tensors, list) or not all(isinstance(value, Tensor) for value in tensors):
        raise CorruptCheckpoint(
            "file-damaged",
            f"{ranks.directory.path}: {key} is not a list of tensors",
            file=ranks.directory.path,
        )
    return tensors


def _contradiction(ranks: EngineStates, what: str, hint: str = "") -> InconsistentCheckpoint:
    return InconsistentCheckpoint(
        "partition-does-not-fit", f"{ranks.directory.path}: {what}", hint, file=ranks.directory.path
    )


class _RankedBuffer(Struct, dict=True):
    """One flat buffer, of which each rank's optimizer file has a partition.

    ranks       the opened files of the ranks that share the buffer
    place       the number of its param group; in stage 3, of its sub-group
    paddings    elements of padding after each parameter
    masters     each rank's partition of the fp32 masters
    """

    ranks: EngineStates
    place: int
    shapes: ParameterShapes
    paddings: Sequence[int]
    masters: Sequence[Tensor]

    def __post_init__(self) -> None:
        dp, partitioned = self.ranks.dp, self.ranks.partitioned
        self.states = self.ranks.flat_states(self.place)
        numels, parts = [*map(prod, self.shapes.values())], dp if partitioned else 1
        *starts, total = zero.offsets([-(-numel // parts) for numel in numels], self.paddings)
        if not partitioned:
            self.masters = self._as_lost(total)
        held = [own.numel for own in self.masters]
        self.spans = dict(zip(self.shapes, zip(starts, numels, strict=True), strict=True))
        if partitioned and total and not any(held):
            refuse(self.ranks.directory, "optimizer states offloaded to NVMe")
        # the number of elements that a rank's tensor may have
        self.lengths = {total} if partitioned else zero.partition_sizes(total, dp)
        if not ({*held} == {total} if partitioned else zero.fits(total, sum(held), dp)):
            if partitioned and self._is_of_more_ranks(numels, held):
                raise _contradiction(self.ranks, SHARED_FILES.message, SHARED_FILES.hint)
            raise _contradiction(
                self.ranks,
                f"the ranks hold {sum(held)} elements of flat group {self.place}, which does not "
                f"fit its {len(self.shapes)} parameters",
                "rank files of different runs or world sizes seem to be mixed",
            )

    def _as_lost(self, total: int) -> Sequence[Tensor]:
        """Cuts masters that were read in place of lost ones to the lost ones' lengths.

        `total` is the number of elements in all partitions, without padding.
        """
        # `zckpt mend` reads another rank's file in place of a lost one; their lengths may differ,
        # because the last rank's partition is saved without padding
        files, dp = self.ranks.optimizers, self.ranks.dp
        lost = {rank for rank in range(dp) if sources.is_stand_in(files[rank].path)}
        lengths = [own.numel for own in self.masters]
        if not lost or zero.fits(total, sum(lengths), dp):
            return self.masters
        for size in zero.partition_sizes(total, dp):
            owned = [min(max(total - rank * size, 0), size) for rank in range(dp)]
            if all(owned[rank] == lengths[rank] for rank in range(dp) if rank not in lost):
                return [
                    own.part(0, owned[rank]) if rank in lost else own
                    for rank, own in enumerate(self.masters)
                ]
        return self.masters

    def _is_of_more_ranks(self, numels: Sequence[int], held: Sequence[int]) -> bool:
        """Whether stage 3's partitions are so short that several ranks wrote the same file.

        `numels` are the parameters' numbers of elements, `held` the lengths of the partitions.
        """
        # ranks that share a sequence may write to one file, one after the other: it then has the
        # last rank's partition, as short as in a run with several times as many ranks
        worlds = range(2 * self.ranks.dp, MOST_IN_SEQUENCE * self.ranks.dp + 1, self.ranks.dp)
        lengths = (sum(-(-numel // world) for numel in numels) for world in worlds)
        return len({*held}) == 1 and held[0] in lengths

    def numbers(self) -> Iterator[str]:
        """Yields the keys of states that are one number, such as `step`, and not a partition.

        Only tensors of one element are yielded, no Python numbers. If some rank's partition has one
        element too, shape [1] is ambiguous, and only 0-d tensors are taken for numbers.
        """
        partitions = {self.masters[0].numel, *self.lengths}
        for key, state in self.states[0].items():
            value = _restored(state) if self.ranks.elastic else state
            single = isinstance(value, Tensor) and value.numel == 1
            if single and not (value.shape and 1 in partitions):
                yield key

    def read(self, group: int, numbers: Collection[str], step_policy: str | None) -> FlatBuffer:
        """Reads the masters, states and steps of this buffer from all ranks' files.

        `group` is the number of the param group. `numbers` are the names of states that are a
        single number, not a partition.
        """
        slots = [self._cut("master", self.masters)]
        scalars: dict[str, Scalar] = {}
        partition_values: dict[Any, Sequence[Any]] = {}
        kept = self._values("step", is_number=True)
        counted = [self.ranks.number(rank, each) for rank, each in enumerate(kept)]
        is_step = all(each is None or steps.step_of(each) is not None for each in counted)
        for key in dict.fromkeys(chain.from_iterable(self.states)):
            if key == "step" and is_step:  # otherwise it is a state like any other
                continue
            values = self._values(key, is_number=key in numbers)
            if not isinstance(key, str):  # a key that is a number cannot name a slot
                partition_values[key] = values
            elif key not in numbers and (slot := self._slot(key, values)):
                slots.append(slot)
            elif (scalar := self.ranks.scalar(values)) is not None:
                scalars[key] = scalar
            elif any(value is not None for value in values):
                partition_values[key] = values
        sightings, place, warnings = self._steps(group, kept, step_policy)
        step = next((line.step for line in sightings if line.truth), None)
        shapes, files = in_user_order(self.shapes, self.ranks), self.ranks.optimizers
        starts = {name: start for name, (start, _) in self.spans.items()}
        return FlatBuffer(
            group,
            shapes,
            slots,
            step,
            place,
            scalars,
            sightings,
            warnings,
            partition_values,
            starts,
            files,
        )

    def _values(self, key: Any, is_number: bool) -> list[Any]:
        """The value of the optimizer state `key` on every rank; None for a rank without the state.

        A number that DeepSpeed's elastic save removed from its tensor is restored.
        """
        # DeepSpeed's elastic save removes a partition's padding from every tensor that is not 0-d,
        # even from a single number (0.19.8)
        values = [state.get(key) for state in self.states]
        if not (is_number and self.ranks.elastic and any(map(_is_empty, values))):
            return values
        values = [self.ranks.number(rank, _restored(value)) for rank, value in enumerate(values)]
        # if a tensor's storage has lost the number, another rank's number is used
        whole = [value for value in values if not _is_empty(value)]
        return [whole[0] if whole and _is_empty(value) else value for value in values]

    # -- tensors

    def _slot(self, key: str, values: Sequence[Any]) -> BufferSlot | None:
        """Divides the optimizer state `key` among the buffer's parameters; None if impossible.

        `values` has one value per rank. Raises InconsistentCheckpoint if only some ranks have the
        state.
        """
        tensors = [value for value in values if isinstance(value, Tensor) and value.shape]
        # as long as the rank's partition, with or without padding
        if len(tensors) == self.ranks.dp and all(
            len(tensor.shape) == 1 and tensor.numel in {master.numel, *self.lengths}
            for tensor, master in zip(tensors, self.masters, strict=True)
        ):
            return self._cut(slot_name(key), tensors)
        if tensors and not self.ranks.partitioned and (slot := self._whole(key, values)):
            return slot
        if tensors and any(value is None for value in values):
            what = f"only some ranks hold {key!r} of flat group {self.place}"
            raise _contradiction(self.ranks, what, "rank files of different saves seem to be mixed")
        return None

    def _group(self, tensors: Sequence[Tensor]) -> zero.FlatGroup:
        pairs = zip(self.ranks.optimizers, tensors, strict=True)
        extents = tuple(file.extent(tensor) for file, tensor in pairs)
        return zero.FlatGroup(extents, SIZES[tensors[0].dtype])

    def _cut(self, name: str, tensors: Sequence[Tensor]) -> BufferSlot:
        dtypes = sorted({tensor.dtype for tensor in tensors})
        if len(dtypes) > 1:
            what = f"ranks keep {name} in different types: {', '.join(dtypes)}"
            raise _contradiction(self.ranks, what)
        group = self._group(tensors)

        def part(start: int, numel: int) -> Fragments:
            if numel and self.ranks.partitioned:
                return Slices(group.partitions, start, numel, group.size)
            return group.cut(start, start + numel)

        return BufferSlot(name, dtypes[0], {own: part(*span) for own, span in self.spans.items()})

    def _whole(self, key: str, values: Sequence[Any]) -> BufferSlot | None:
        """Reads a state that ranks keep complete for each parameter in their partition.

        Example: Muon's `momentum_buffer` in stages 1 and 2 without offload. Returns None if the
        tensors' lengths or types do not fit.
        """
        # Muon orthogonalizes full matrices; a rank's tensor has its states one after another
        group = self._group(self.masters)
        dtypes = {value.dtype for value in values if isinstance(value, Tensor) and value.numel}
        fragments: dict[str, Fragments] = {}
        copies: list[tuple[str, Fragments]] = []
        for rank, (file, value) in enumerate(zip(self.ranks.optimizers, values, strict=True)):
            spans = self.spans.items()
            numels = {name: n for name, (start, n) in spans if group.owns(rank, start, start + n)}
            *starts, numel = accumulate(numels.values(), initial=0)
            if numel != (value.numel if isinstance(value, Tensor) else 0):
                return None
            for (name, count), start in zip(numels.items(), starts, strict=True):
                part = solid(count, file.extent(value.part(start, start + count)))
                if fragments.setdefault(name, part) is not part:
                    copies.append((name, part))
        complete = len(fragments) == len(self.spans) and len(dtypes) == 1
        return BufferSlot(slot_name(key), dtypes.pop(), fragments, copies) if complete else None

    # -- steps

    def _steps(
        self, group: int, kept: Sequence[Any], policy: str | None
    ) -> tuple[list[Sighting], StepPlace | None, list[Notice]]:
        """Compares the ranks' steps in the optimizer state (`kept`) and in the param group.

        Returns a `Sighting` for each place that states a step, the place that the optimizer reads
        (None without any step), and warnings. Raises if a step is lost or only some ranks state
        one, or if steps differ and `policy` chooses none.
        """
        if any(map(_is_empty, kept)):
            what = f"the step of flat group {self.place} is lost: DeepSpeed's elastic save took it "
            raise _contradiction(
                self.ranks, what + "for padding and removed it", "take an earlier save"
            )
        places = {
            f"state of flat group {self.place}": ("state", kept),
            f"param_groups[{group}]": ("group", [g.get("step") for g in self.ranks.groups(group)]),
            GROUP_STEP: ("group", [state.get(GROUP_STEP) for state in self.ranks.states]),
        }
        statements = {what: self._stated(what, *about) for what, about in places.items()}
        truth = steps.believed(*statements.values())
        sightings: list[Sighting] = []
        for what, item in statements.items():
            step = agreement.agree([*item.steps.items()], policy if item is truth else "max")
            if step is not None:
                sightings.append(Sighting(what, step, item is truth))
        place = truth.place()
        warnings = [
            stalled
            for line in sightings
            if line.truth and place
            if (stalled := steps.stalled(line.step, place.kind, line.where))
        ]
        return sightings, place, warnings

    def _stated(self, what: str, where: str, values: Sequence[Any]) -> steps.StatedSteps:
        """The ranks' steps in one place of their files; raises if only some ranks state a step.

        `values` has each rank's value in this place. `what` names the place in errors:
        "param_groups[0]". `where` is "state" for the optimizer's state, "group" for a param group.
        """
        statement = steps.StatedSteps(where)
        for rank, value in enumerate(values):
            shape = value.shape if isinstance(value, (Scalar, Tensor)) else ()
            statement.add(
                f"{self.ranks.name_of(rank)}: {what}", self.ranks.number(rank, value), shape
            )
        if 0 < len(statement.steps) < self.ranks.dp:
            raise _contradiction(self.ranks, f"only some ranks hold a step: {what}")
        return statement


def _is_empty(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.numel


def _restored(value: Any) -> Any:
    """Restores a number (a step) that DeepSpeed's elastic save removed from its tensor.

    Returns a tensor of shape [1], or `value` itself if there is nothing to restore.
    """
    # the save takes the one element for padding; the tensor's storage may still have it
    if not _is_empty(value) or value.storage.length != SIZES[value.dtype]:
        return value
    return Tensor(value.storage, value.dtype, 0, (1,), (1,))
