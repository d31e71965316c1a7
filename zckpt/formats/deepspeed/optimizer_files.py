"""Writes the optimizer files of a ZeRO target: ranks' partitions of masters and states."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from ...core.checkpoint.inert import PYTHON_NUMBERS, Foreign
from ...core.checkpoint.manifest import slot_key
from ...core.passes.layout import Shell
from ...errors import Notice, listed, warning
from ...files.torchshell import Contents, Storages
from ...training.hyperparameters import are_given, are_inferred
from ...training.options import GROUP_DEFAULTS
from .. import zero
from ..deepspeed_states.experts import parameter_of
from ..deepspeed_states.optimizer_values import (
    base_state,
    clipping,
    group_step,
    loss_scaling,
    numbers,
    own_statements,
    stage_enum,
)
from ..deepspeed_states.target import DeepSpeedTarget, TargetBuffer


def optimizer_files(target: DeepSpeedTarget, is_elastic: bool) -> Iterator[Shell]:
    """Yields the shell (the file without tensors' bytes) of each rank's optimizer file.

    In stage 3 all ranks' files have the same pickle, unless the source has optimizer states or
    learning rate estimates (Prodigy) that belong to single ranks.
    """
    differs = target.source.states.of_form("partition", "estimate")
    alike = target.engine.partitioned and not differs
    prefix = "bf16_" if target.engine.dtype == "BF16" else ""
    for rank in range(target.dp):
        if rank == 0 or not alike:
            contents = _RankFile(target, rank, is_elastic).contents()
        name = f"{prefix}zero_pp_rank_{rank}_{target.mp_rank_of(rank)}_optim_states.pt"
        yield contents.shell(f"{target.tag}/{name}")


class _RankFile:
    def __init__(self, target: DeepSpeedTarget, rank: int, is_elastic: bool) -> None:
        self.target, self.rank, self.is_elastic = target, rank, is_elastic
        self.storages = Storages()

    def contents(self) -> Contents:
        target = self.target
        state = self._partitioned() if target.engine.partitioned else self._flat()
        value = {
            "optimizer_state_dict": state,
            "ds_config": target.engine.config,
            "ds_version": target.version,
            **own_statements(target),
        }
        return Contents(value, self.storages)

    # -- stage 1 and 2: one partition per group

    def _flat(self) -> dict[str, Any]:
        target, wrapped = self.target, self.target.engine.wraps_bf16
        parts: list[_RankPartition] = []
        for buffer in target.buffers:  # experts are cut over the ranks that have the same experts
            _, place = target.expert_ranks.place(self.rank, buffer.ep)
            parts.append(_RankPartition(buffer, target.dp // buffer.ep, place))
        common = {
            **clipping(target),
            **self._base_and_step(dict(enumerate(map(self._states, parts)))),
            "single_partition_of_fp32_groups": [
                self.storages.tensor(part.buffer.master, (part.size if wrapped else part.owned,))
                for part in parts
            ],
            "group_paddings": [part.size - part.owned for part in parts],
            "partition_count": [part.dp for part in parts],
            "ds_version": target.version,
            "param_slice_mappings": [part.mapping() for part in parts],
        }
        if wrapped:
            common["group_paddings"] = [
                part.size * part.dp - part.total if part.rank == part.dp - 1 else 0
                for part in parts
            ]
            return common
        return {
            **loss_scaling(target, self.storages),
            **common,
            "zero_stage": stage_enum(target),
            "param_alignment_paddings": [_paddings(buffer) for buffer in target.buffers],
        }

    def _states(self, partition: _RankPartition) -> dict[str, Any]:
        """The optimizer states of one flat buffer as the rank's file stores them, by key.

        Each state has the length of the rank's partition, except Muon's momentum, which is complete
        for each parameter in the partition.
        """
        target, buffer = self.target, partition.buffer
        states = numbers(target, buffer, self.storages)
        for slot, dtype in buffer.slots.items():
            length = partition.owned if self.is_elastic else partition.size
            if slot == "momentum_buffer" and target.keeps_whole_momenta(buffer):
                length = sum(numel for _, numel, _, _ in partition.overlaps())
            if length or slot != "momentum_buffer" or self.is_elastic:
                states[slot_key(slot)] = self.storages.tensor(dtype, (length,))
        partition_states = {} if self.is_elastic else target.of_partitions(buffer, partition.rank)
        return {**states, **target.thawed(partition_states, self.storages)}

    def _base_and_step(self, states: Mapping[int, Any]) -> dict[str, Any]:
        """The items of an optimizer file that have the base optimizer's state.

        `states` are the states of each flat buffer, by the buffer's number. Elastic files get a
        list of `states` and one step, other files get the optimizer's state dict.
        """
        target = self.target
        if not self.is_elastic:
            return {"base_optimizer_state": base_state(target, states, self.storages, self.rank)}
        step = group_step(target, target.buffers, self.storages)
        # 0.19.8 cannot load elastic files without a step, even if the optimizer keeps it elsewhere
        return {
            "base_optimizer_state": list(states.values()),
            "base_optimizer_state_step": step.get("step", target.buffers[0].step),
        }

    # -- stage 3: a rank's slices of all parameters follow each other

    def _partitioned(self) -> dict[str, Any]:
        target, tensor = self.target, self.storages.tensor
        widths = [sum(-(-numel // target.dp) for numel in each.numels) for each in target.buffers]
        pairs = list(zip(target.buffers, widths, strict=True))
        states = {
            number: numbers(target, buffer, self.storages)
            | {slot_key(slot): tensor(dtype, (width,)) for slot, dtype in buffer.slots.items()}
            | target.thawed(target.of_partitions(buffer, self.rank), self.storages)
            for number, (buffer, width) in enumerate(pairs)
        }
        return {
            "zero_stage": stage_enum(target),
            **loss_scaling(target, self.storages),
            "partition_count": target.dp,
            "optimizer_state_dict": base_state(target, states, self.storages, self.rank),
            "fp32_flat_groups": [tensor(buffer.master, (width,)) for buffer, width in pairs],
        }


def _paddings(buffer: TargetBuffer) -> list[int]:
    """The padding after each parameter, in elements; all zeros if AutoEP has stacked experts."""
    parameters = dict.fromkeys(map(parameter_of, buffer.names))
    return list(buffer.paddings) if len(parameters) == len(buffer.names) else [0] * len(parameters)


class _RankPartition:
    """A rank's partition of a flat buffer that `dp` ranks share in stages 1 and 2.

    All lengths are in elements: `size` is the partition's length with padding, `owned` without
    padding, and `total` is the length of all partitions without padding.
    """

    def __init__(self, buffer: TargetBuffer, dp: int, rank: int) -> None:
        self.buffer, self.dp, self.rank = buffer, dp, rank
        self.total = buffer.starts[-1]
        self.size = zero.partition_size(self.total, dp)
        self.start = rank * self.size
        self.owned = max(0, min(self.size, self.total - self.start))

    def overlaps(self) -> Iterator[tuple[str, int, int, int]]:
        """Yields the parameters that lie in this partition, at least partly.

        An item has the name, the number of elements, and the range [start, stop) in the partition.
        """
        starts = self.buffer.starts
        for number in range(max(0, bisect_right(starts, self.start) - 1), len(starts) - 1):
            begin, numel = starts[number] - self.start, self.buffer.numels[number]
            start, stop = max(begin, 0), min(begin + numel, self.size)
            if begin >= self.size:
                return
            if start < stop:
                yield self.buffer.names[number], numel, start, stop

    def mapping(self) -> OrderedDict[str, Foreign]:
        """Maps each parameter to a record of its start and length in this partition, in elements.

        The engine's files have this mapping (`param_slice_mappings`) for DeepSpeed's own converter.
        With AutoEP, a parameter is the stack of a rank's experts.
        """
        address = "deepspeed.utils.tensor_fragment.fragment_address"
        places: dict[str, tuple[int, int]] = {}
        for name, _, start, stop in self.overlaps():
            first, _ = places.get(parameter_of(name), (start, stop))
            places[parameter_of(name)] = first, stop
        return OrderedDict(
            (name, Foreign.instance(address, numel=stop - start, start=start))
            for name, (start, stop) in places.items()
        )


# -- elastic files


def is_elastic(target: DeepSpeedTarget) -> bool:
    """Whether to write elastic files: if hyper-parameters are unknown, and elastic files suffice.

    Elastic files contain no hyper-parameters: the engine keeps the values that it was built with
    (0.19.8). In other files, zckpt would have to guess the values.
    """
    engine, buffers, options = target.engine, target.buffers, target.options
    is_unknown = are_inferred(target.source) and not are_given(target.source)
    keys = {(*sorted(buffer.slots), *sorted(buffer.scalars)) for buffer in buffers}
    types = {dtype for buffer in buffers for dtype in buffer.slots.values()}
    steps = {buffer.step for buffer in buffers}
    paddings = any(-buffer.starts[-1] % (2 * target.dp) for buffer in buffers)
    # what the loader does: DeepSpeed 0.19.8, stage_1_and_2.py `_restore_base_optimizer_state`
    return (
        (is_unknown and not options[GROUP_DEFAULTS] and not options.weights_only)
        # it uses the keys of the first group for all groups, and casts moments to fp32
        and (engine.cuts_groups and len(keys) <= 1 and types <= {"F32"})
        # it gives rank 0's momenta of complete parameters (Muon) to every rank
        and not any(map(target.keeps_whole_momenta, buffers))
        # it gives all groups the same step
        and not (target.step_place.where == "group" and len(steps) > 1)
        # unless the engine is elastic, it pads a tensor of one number like a partition
        and (engine.elastic or not (paddings and _keeps_numbers_as_tensors(target)))
    )


def _keeps_numbers_as_tensors(target: DeepSpeedTarget) -> bool:
    buffers, place = target.buffers, target.step_place
    types = {number.dtype for buffer in buffers for number in buffer.scalars.values()}
    if place.where == "state" and any(buffer.step is not None for buffer in buffers):
        types.add(place.kind)
    return bool(types - PYTHON_NUMBERS.keys())


def warnings_of_elastic(target: DeepSpeedTarget) -> Iterator[Notice]:
    """Yields warnings about elastic files: no hyper-parameters, and no rate for the first update.

    A warning also says if the engine's next elastic save will lose the step (0.19.8).
    """
    message = (
        "the source holds no hyper-parameters, and neither does the target: the engine "
        "keeps those that it is built with (--group-defaults lr=... writes others)"
    )
    yield warning("hyperparameter-missing", message, subject=GROUP_DEFAULTS.flag)
    if target.scheduler.state is not None:
        message = (
            "the engine's first update uses the learning rate with which your program builds the "
            "engine: elastic files hold no learning rate, and the scheduler first sets it after "
            "that update"
        )
        yield warning("program-must-set", message, subject="lr")
    lengths = enumerate(buffer.starts[-1] for buffer in target.buffers)
    padded = [str(n) for n, length in lengths if length < zero.partition_size(length, target.dp)]
    if padded and _keeps_numbers_as_tensors(target):
        # all ranks load rank 0's states, in which the step is a tensor of one element
        message = (
            "DeepSpeed (0.19.8) resumes from these files, but cannot resume from the elastic "
            "checkpoint that it saves next. That save removes the padding of rank 0's partition "
            f"from every tensor of group {listed(padded)}, even from the `step` tensor with its "
            "single number, which becomes empty. zckpt can read that checkpoint"
        )
        yield warning("engine-fault", message)
