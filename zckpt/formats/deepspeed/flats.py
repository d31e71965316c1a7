"""Where the ranks keep their flat buffers: fp32 masters and optimizer states.

One buffer per parameter group in stage 1 and 2, one per sub-group in stage 3. Padding differs:
stage 1 and 2 save masters without it and states with it, BF16_Optimizer saves both with it,
stage 3 pads every parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from ...core import agreement
from ...core.dtypes import SIZES
from ...core.facts import StepPlace
from ...core.fragments import Extent, Fragments, Runs, Slices, solid
from ...core.inert import Scalar
from ...core.manifest import Sighting, slot_name
from ...errors import CorruptCheckpoint, InconsistentCheckpoint, listed
from ...files.torchfile import Tensor
from ...training import steps
from .. import zero
from ..deepspeed_states.directories import refuse
from ..deepspeed_states.states import (
    BufferSlot,
    EngineStates,
    FlatBuffer,
    ParameterShapes,
    in_user_order,
)

Sharing = Callable[[int, ParameterShapes], Sequence[tuple[EngineStates, ParameterShapes]]]
"""The flat buffers of a group: the ranks that share each of them, and the parameters in it."""


def flat_buffers(
    ranks: EngineStates, step_policy: str | None, sharing: Sharing | None = None
) -> Iterator[FlatBuffer]:
    """Every flat buffer of the checkpoint; without `sharing` all ranks share all of them."""
    shapes = ranks.param_shapes()
    key = "fp32_flat_groups" if ranks.partitioned else "single_partition_of_fp32_groups"
    masters = [_tensors(ranks, state, key) for state in ranks.states]
    if any(len(tensors) != len(shapes) for tensors in masters):
        raise InconsistentCheckpoint(
            f"{ranks.directory.path}: the optimizer files have {len(masters[0])} flat groups, but "
            f"shapes are listed for {len(shapes)}",
            hint="model and optimizer files of different saves seem to be mixed",
        )
    alignment = ranks.first.get("param_alignment_paddings") or [None] * len(shapes)
    groups = ranks.bases[0].get("param_groups") or []
    group_of = {sub: place for place, group in enumerate(groups) for sub in group["params"]}
    buffers = []
    for place, names in enumerate(shapes):
        paddings = alignment[place] or [0] * len(names)
        if len(paddings) != len(names):
            raise InconsistentCheckpoint(
                f"{ranks.directory.path}: the optimizer files have {len(paddings)} parameters in "
                f"flat group {place}, but shapes are listed for {len(names)}: "
                f"{listed(list(names), 4)}",
                hint="model and optimizer files of different ranks or saves seem to be mixed",
            )
        for sharers, own_names in [(ranks, names)] if sharing is None else sharing(place, names):
            partitions = [masters[number][place] for number in sharers.numbers or range(ranks.dp)]
            buffers.append(_RankedBuffer(sharers, place, own_names, paddings, partitions))
    numbers = {key for buffer in buffers for key in buffer.numbers()}
    for buffer in buffers:
        place = buffer.place
        group = group_of.get(place, place) if ranks.partitioned else place
        yield buffer.read(group, numbers, step_policy)


def _tensors(ranks: EngineStates, state: Mapping[str, Any], key: str) -> list[Tensor]:
    tensors = state.get(key)
    if not isinstance(tensors, list) or not all(isinstance(value, Tensor) for value in tensors):
        raise CorruptCheckpoint(f"{ranks.directory.path}: {key} is not a list of tensors")
    return tensors


class _RankedBuffer:
    """Flat buffer number `place`; every rank has one partition of it, one of `masters`."""

    def __init__(
        self,
        ranks: EngineStates,
        place: int,
        shapes: ParameterShapes,
        paddings: Sequence[int],
        masters: Sequence[Tensor],
    ) -> None:
        self.ranks = ranks
        self.place = place
        self.shapes = shapes
        self.masters = masters
        numels = [prod(shape) for shape in shapes.values()]
        parts = ranks.dp if ranks.partitioned else 1
        *starts, self.total = zero.offsets([-(-numel // parts) for numel in numels], paddings)
        self.spans = dict(zip(shapes, zip(starts, numels, strict=True), strict=True))
        self.lengths = self._lengths()

    def _lengths(self) -> set[int]:
        """Elements that a rank's tensor may have; raises if the masters do not fit."""
        numels = [master.numel for master in self.masters]
        if self.ranks.partitioned:
            if self.total and not any(numels):
                refuse(self.ranks.directory, "optimizer states offloaded to NVMe")
            fits, lengths = set(numels) == {self.total}, {self.total}
        else:
            fits = zero.fits(self.total, sum(numels), self.ranks.dp)
            lengths = zero.partition_sizes(self.total, self.ranks.dp)
        if not fits:
            raise InconsistentCheckpoint(
                f"{self.ranks.directory.path}: the ranks hold {sum(numels)} elements of flat group "
                f"{self.place}, which does not fit its {len(self.shapes)} parameters",
                hint="rank files of different runs or world sizes seem to be mixed",
            )
        return lengths

    def numbers(self) -> Iterator[str]:
        """States that are one number and not a partition: tensors of one element, if that shows.

        A partition may have one element as well; then another buffer shows it.
        """
        partitions = {self.masters[0].numel, *self.lengths}
        for key, state in self.ranks.flat_states(self.place)[0].items():
            value = _stored(state) if self.ranks.elastic else state
            single = isinstance(value, Tensor) and value.numel == 1
            if single and not (value.shape and 1 in partitions):
                yield key

    def read(self, group: int, numbers: Collection[str], step_policy: str | None) -> FlatBuffer:
        """All that the ranks keep of this buffer; `numbers` are states of one number."""
        slots = [self._cut("master", self.masters)]
        scalars: dict[str, Scalar] = {}
        own: dict[Any, Sequence[Any]] = {}
        states = self.ranks.flat_states(self.place)
        for key in dict.fromkeys(key for state in states for key in state):
            values = [state.get(key) for state in states]
            if key == "step" and self._are_steps(values):
                continue
            if key in numbers:
                values = self._uncut(values)
            if not isinstance(key, str):  # a number as a key is no name of a slot
                own[key] = values
                continue
            slot = None if key in numbers else self._slot(key, values)
            if slot is not None:
                slots.append(slot)
            elif (scalar := self.ranks.scalar(values)) is not None:
                scalars[key] = scalar
            elif any(value is not None for value in values):
                own[key] = values
        sightings, place, warnings = self._steps(group, states, step_policy)
        step = next((line.step for line in sightings if line.truth), None)
        shapes = in_user_order(self.shapes, self.ranks)
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
            own,
            starts,
            self.ranks.optimizers,
        )

    def _are_steps(self, values: list[Any]) -> bool:
        """Whether what ranks call a step is one; else it is a state like any other."""
        numbers = [self.ranks.number(n, each) for n, each in enumerate(self._uncut(values))]
        return all(number is None or steps.step_of(number) is not None for number in numbers)

    # -- tensors

    def _slot(self, key: str, values: Sequence[Any]) -> BufferSlot | None:
        """A state that is a slot: every rank's tensor is as long as its partition.

        With or without padding: masters are saved without it, states with it.
        """
        tensors = [value for value in values if isinstance(value, Tensor) and value.shape]
        if len(tensors) == self.ranks.dp and all(
            len(tensor.shape) == 1 and tensor.numel in {master.numel, *self.lengths}
            for tensor, master in zip(tensors, self.masters, strict=True)
        ):
            return self._cut(slot_name(key), tensors)
        if tensors and not self.ranks.partitioned and (slot := self._whole(key, values)):
            return slot
        if tensors and any(value is None for value in values):
            raise InconsistentCheckpoint(
                f"{self.ranks.directory.path}: only some ranks hold {key!r} of flat group "
                f"{self.place}",
                hint="rank files of different saves seem to be mixed",
            )
        return None

    def _extents(self, tensors: Sequence[Tensor]) -> tuple[Extent, ...]:
        pairs = zip(self.ranks.optimizers, tensors, strict=True)
        return tuple(file.extent(tensor) for file, tensor in pairs)

    def _cut(self, name: str, tensors: Sequence[Tensor]) -> BufferSlot:
        """Every parameter's part of the ranks' partitions."""
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1:
            raise InconsistentCheckpoint(
                f"{self.ranks.directory.path}: ranks keep {name} in different types: "
                f"{', '.join(sorted(dtypes))}"
            )
        dtype = dtypes.pop()
        size, extents = SIZES[dtype], self._extents(tensors)
        group = zero.FlatGroup(extents, size)
        fragments: dict[str, Fragments] = {}
        for parameter, (start, numel) in self.spans.items():
            if not numel:
                fragments[parameter] = Runs([])
            elif self.ranks.partitioned:
                fragments[parameter] = Slices(extents, start, numel, size)
            else:
                fragments[parameter] = group.cut(start, start + numel)
        return BufferSlot(name, dtype, fragments)

    def _whole(self, key: str, values: Sequence[Any]) -> BufferSlot | None:
        """A state that is kept whole on every rank whose partition the parameter reaches into.

        Muon's `momentum_buffer` in stage 1 and 2 without offload, since it orthogonalizes whole
        matrices: a rank's parameters follow each other. The first rank's copy is taken.
        """
        group = zero.FlatGroup(self._extents(self.masters), SIZES[self.masters[0].dtype])
        fragments: dict[str, Fragments] = {}
        copies: list[tuple[str, Fragments]] = []
        dtypes = set()
        for rank, (file, value) in enumerate(zip(self.ranks.optimizers, values, strict=True)):
            numels = {
                parameter: numel
                for parameter, (start, numel) in self.spans.items()
                if group.owns(rank, start, start + numel)
            }
            tensor = value if isinstance(value, Tensor) else None
            if (tensor.numel if tensor else 0) != sum(numels.values()):
                return None
            start = 0
            for parameter, numel in numels.items():
                assert tensor is not None
                extent = file.extent(tensor.part(start, start + numel))
                if parameter in fragments:
                    copies.append((parameter, solid(numel, extent)))
                else:
                    fragments[parameter] = solid(numel, extent)
                dtypes.add(tensor.dtype)
                start += numel
        complete = len(fragments) == len(self.spans) and len(dtypes) == 1
        return BufferSlot(slot_name(key), dtypes.pop(), fragments, copies) if complete else None

    def _uncut(self, values: list[Any]) -> list[Any]:
        """A number of every rank, restored if the engine's elastic save has cut it to nothing.

        That save takes a partition's padding off every tensor that is not 0-d, numbers too
        (0.19.8). The storage still has the element; if not, another rank's number stands for it.
        """
        if not self.ranks.elastic or not any(map(_is_empty, values)):
            return values
        numbers = [self.ranks.number(rank, _stored(value)) for rank, value in enumerate(values)]
        whole = [number for number in numbers if not _is_empty(number)]
        return [whole[0] if whole and _is_empty(number) else number for number in numbers]

    # -- steps

    def _steps(
        self, group: int, states: Sequence[Mapping[str, Any]], policy: str | None
    ) -> tuple[list[Sighting], StepPlace | None, list[str]]:
        """Every place that states this buffer's step, on which all ranks must agree."""
        kept = self._uncut([state.get("step") for state in states])
        if any(map(_is_empty, kept)):
            raise InconsistentCheckpoint(
                f"{self.ranks.directory.path}: the step of flat group {self.place} is lost: "
                "DeepSpeed's elastic save cut it off with the padding",
                hint="take an earlier save",
            )
        beside = "base_optimizer_state_step"
        places = (
            ("state", f"state of flat group {self.place}", kept),
            ("group", f"param_groups[{group}]", [g.get("step") for g in self.ranks.groups(group)]),
            ("group", beside, [state.get(beside) for state in self.ranks.states]),
        )
        stated = {what: self._stated(where, what, values) for where, what, values in places}
        truth = steps.believed(*stated.values())
        sightings: list[Sighting] = []
        warnings: list[str] = []
        for what, item in stated.items():
            is_true = item is truth
            step = agreement.agree(list(item.steps.items()), policy if is_true else "max")
            if step is None:
                continue
            sightings.append(Sighting(what, step, is_true))
            kind = next(iter(item.kinds.values()))
            if is_true and (warning := steps.stalled(step, kind, what)):
                warnings.append(warning)
        return sightings, truth.place(), warnings

    def _stated(self, where: str, what: str, values: Sequence[Any]) -> steps.StatedSteps:
        """What the ranks state in one place; raises if only some of them state a step."""
        stated = steps.StatedSteps(where)
        for rank, value in enumerate(values):
            shape = value.shape if isinstance(value, (Scalar, Tensor)) else ()
            stated.add(f"{self.ranks.name_of(rank)}: {what}", self.ranks.number(rank, value), shape)
        if 0 < len(stated.steps) < self.ranks.dp:
            raise InconsistentCheckpoint(
                f"{self.ranks.directory.path}: only some ranks hold a step: {what}"
            )
        return stated


def _is_empty(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.numel


def _stored(value: Any) -> Any:
    """The one element in the storage of an empty tensor; any other value as it is."""
    if not _is_empty(value) or value.storage.length != SIZES[value.dtype]:
        return value
    return Tensor(value.storage, value.dtype, 0, (1,), (1,))
