"""What the data ranks of one model rank all-gather in ZeRO-1, 2 and 3; its files at any stage.

Names and shapes stand in the order in which the engine flattened them (`param_shapes`). Stages 1
and 2 (stage_1_and_2.py, bf16_optimizer.py) cut the flattened group; stage 3 (stage3.py) cuts every
parameter, pads it, and concatenates a rank's slices. A group of experts (`_configure_moe_settings`
in stage_1_and_2.py) is cut over the ranks that have the same experts (utils/groups.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from ....core.manifest import slot_name
from ....core.partition import FlatMember, Partition, Partitioned, Whole
from ....errors import MissingData
from ....files.torchfile import Parsed, Tensor, TorchFile
from . import whole

Shapes = Mapping[str, tuple[int, ...]]
EXPERT = re.compile(r"layer_\d+_expert_\d+_mp_rank_(\d+)_model_states\.pt")
RANK = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?(optim|model)_states\.pt")

KEYS = {
    False: ("single_partition_of_fp32_groups", "base_optimizer_state"),
    True: ("fp32_flat_groups", "optimizer_state_dict"),
}
"""Of masters and of the base optimizer, by whether every parameter is cut by itself (stage 3)."""


class RankFiles:
    """The files of one model rank, as each data rank loads its own."""

    def __init__(self, directory: str, number: int = 0) -> None:
        paths: dict[str, dict[int, str]] = {"optim": {}, "model": {}}
        of_experts = []
        for name in sorted(os.listdir(directory)):
            if (match := EXPERT.fullmatch(name)) and int(match[1]) == number:
                of_experts.append(os.path.join(directory, name))
            if (match := RANK.fullmatch(name)) and int(match[2]) == number:
                paths[match[3]][int(match[1])] = os.path.join(directory, name)
        if not paths["model"]:  # stages 1 and 2: one file for all
            paths["model"][0] = os.path.join(directory, f"mp_rank_{number:02d}_model_states.pt")
        parsed = Parsed()
        self.optimizers, self.models = (
            [TorchFile(path, parsed) for _, path in sorted(paths[kind].items())]
            for kind in ("optim", "model")
        )
        self.expert_files = [TorchFile(path, parsed) for path in of_experts]
        self.states = [file.value["optimizer_state_dict"] for file in self.optimizers]
        self.model: dict[str, Any] = self.models[0].value
        self.dp = len(self.optimizers)
        self.cuts_each_parameter = "fp32_flat_groups" in (self.states or [{}])[0]  # stage 3
        self.masters, self.base = KEYS[self.cuts_each_parameter]
        self.numbers = self._numbers() if self.states else set()

    def partitions(self) -> Iterator[Partition]:
        """All tensors of this model rank, but those of its layers in a pipeline."""
        for number, shapes in enumerate(self.param_shapes()):
            for ranks, renamed in self.process_groups(number, shapes):
                yield from self.flat_group(number, renamed, ranks)
        yield from self.frozen()
        yield from self.module()
        yield from self.experts()

    def param_shapes(self) -> list[Shapes]:
        """Of every flat group; raises MissingData if no file lists them."""
        if (groups := self._stated()) is None:  # a bf16 pipeline without ZeRO (0.19.8)
            raise MissingData(
                f"{self.models[0].path} and the other model files list no parameters: so the "
                "engine's rule cannot name what its ranks gather",
                hint="verify without --gather",
            )
        return groups

    def _stated(self) -> list[Shapes] | None:
        """In the optimizer files before 0.6.0, one dictionary before 0.5.4; None in stage 0."""
        places = (self.model, *self.states[:1], *(file.value for file in self.optimizers[:1]))
        stated = (place["param_shapes"] for place in places if place.get("param_shapes"))
        if (shapes := next(stated, None)) is None:
            return None
        groups = [shapes] if isinstance(shapes, dict) else shapes
        return [_sliced({n: tuple(s) for n, s in group.items()}, self.model) for group in groups]

    def process_groups(self, number: int, shapes: Shapes) -> list[tuple[range, Shapes]]:
        """The ranks that flatten a group together, and the names of what they flatten."""
        about = next(iter(self._groups(0)[number:]), {})
        named = whole.of_ep_ranks(name for group in self.param_shapes() for name in group)
        return [
            (ranks, {named(name, rank): shape for name, shape in shapes.items()})
            for rank, ranks in enumerate(whole.sharing(self.model, self.dp, about))
        ]

    def _groups(self, rank: int) -> list[dict[str, Any]]:
        """What a rank of stage 1 or 2 says of its groups; elastic files say nothing."""
        base = self.states[rank].get("base_optimizer_state")
        return base["param_groups"] if isinstance(base, dict) else []

    def _number_on(self, rank: int, number: int) -> int:
        """Where a rank has group `number` of rank 0: several sizes of experts have no order."""
        first, own = ([g.get("name") for g in self._groups(each)] for each in (0, rank))
        if not (first and own):
            return number
        occurrence = first[:number].count(first[number])
        return [place for place, name in enumerate(own) if name == first[number]][occurrence]

    def flat_group(self, number: int, shapes: Shapes, ranks: range) -> Iterator[Partition]:
        """Masters and optimizer states of one flattened group (stage 3: of one sub-group)."""
        files, kept = [self.optimizers[rank] for rank in ranks], list[dict[str, Any]]()
        for rank in ranks:
            state, own = self.states[rank], self._number_on(rank, number)
            kept.append({"master": state[self.masters][own], **self._kept(state, own)})
        masters = [rank["master"] for rank in kept]
        firsts = self._firsts(number, shapes)
        for name in dict.fromkeys(name for rank in kept for name in rank):
            tensors = [rank.get(name) for rank in kept]
            partitions = [value for value in tensors if isinstance(value, Tensor) and value.shape]
            if name in self.numbers or not partitions:
                continue
            slot = name if name == "master" else slot_name(name)
            if len(partitions) == len(ranks) and _is_partition(partitions, masters):
                members = [
                    FlatMember(f"{parameter}/{slot}", shape, firsts[parameter])
                    for parameter, shape in shapes.items()
                ]
                pairs = zip(files, partitions, strict=True)
                extents = tuple(file.extent(tensor) for file, tensor in pairs)
                yield Partitioned(partitions[0].dtype, extents, members, self.cuts_each_parameter)
            else:
                yield from self._whole_momenta(files, slot, tensors, masters, firsts, shapes)

    def _numbers(self) -> set[str]:
        """States that are one number: the step, and tensors of one element if a rank has more."""
        return {"step"} | {
            name
            for number, master in enumerate(self.states[0][self.masters])
            for name, tensor in self._kept(self.states[0], number).items()
            if isinstance(tensor, Tensor) and tensor.numel == 1 < master.numel
        }

    def _kept(self, state: Mapping[str, Any], number: int) -> dict[str, Any]:
        """What a rank's base optimizer keeps for a flat group; elastic files list it."""
        base = state[self.base]
        states: dict[str, Any] = (
            base[number] if isinstance(base, list) else base["state"].get(number) or {}
        )
        return states

    def _firsts(self, number: int, shapes: Shapes) -> dict[str, int]:
        """Where each parameter begins: in the flattened group, or in every rank's part of it."""
        paddings = (self.states[0].get("param_alignment_paddings") or {number: None})[number]
        if paddings and len(paddings) < len(shapes):  # of AutoEP's stacks, which is never aligned
            paddings = None
        firsts, start = {}, 0
        for place, (name, shape) in enumerate(shapes.items()):
            firsts[name] = start
            start += -(-prod(shape) // self.dp) if self.cuts_each_parameter else prod(shape)
            start += paddings[place] if paddings else 0
        return firsts

    def _whole_momenta(
        self,
        files: Sequence[TorchFile],
        slot: str,
        tensors: Sequence[Any],
        masters: Sequence[Tensor],
        firsts: Mapping[str, int],
        shapes: Shapes,
    ) -> Iterator[Whole]:
        """Muon in stages 1 and 2: a rank has all of each parameter that reaches into its part.

        Yields nothing if the tensors have other lengths.
        """
        parts = []
        stop = 0
        for file, master, tensor in zip(files, masters, tensors, strict=True):
            start, stop, at = stop, stop + master.numel, 0
            for name, shape in shapes.items():
                first, numel = firsts[name], prod(shape)
                if numel and first < stop and first + numel > start:
                    parts.append((f"{name}/{slot}", shape, file, tensor, at))
                    at += numel
            if at != (tensor.numel if isinstance(tensor, Tensor) else 0):
                return
        for name, shape, file, tensor, at in parts:
            extent = file.extent(tensor.part(at, at + prod(shape)))
            yield Whole(name, tensor.dtype, shape, extent)

    def frozen(self) -> Iterator[Partition]:
        """Stage 3 cuts frozen parameters too, each by itself."""
        if not self.cuts_each_parameter:
            return
        shapes = self.model.get("frozen_param_shapes") or {}
        fragments = [file.value.get("frozen_param_fragments") or {} for file in self.models]
        for name, size in shapes.items():
            shape = tuple(size)
            tensors = [tensor for rank in fragments if isinstance(tensor := rank.get(name), Tensor)]
            if len(tensors) != self.dp:
                continue
            pairs = list(zip(self.models, tensors, strict=True))
            width = -(-prod(shape) // self.dp)
            if any(tensor.numel != width for tensor in tensors):  # not managed by the engine
                for file, tensor in pairs:
                    yield whole.stored(f"{name}/param", file, tensor)
                continue
            extents = tuple(file.extent(tensor) for file, tensor in pairs)
            member = FlatMember(f"{name}/param", shape, 0)
            yield Partitioned(tensors[0].dtype, extents, [member], interleaved=True)

    def module(self) -> Iterator[Whole]:
        """The module's own tensors: all of them, in stage 3 only the buffers.

        `exclude_frozen_parameters` leaves out a frozen weight by its first name alone. A second
        name that stays behind (`shared_params`) is not a weight of the checkpoint.
        """
        buffers = self.model.get("buffer_names") or ()
        seen: set[object] = set()
        module = self.model["module"] or {}  # None in a pipeline
        saved = {*module, *(name for group in self._stated() or () for name in group)}
        shared = self.model.get("shared_params") or {}
        for name, tensor in module.items():
            if not isinstance(tensor, Tensor) or name.endswith("_extra_state"):
                continue
            if shared.get(name, name) not in saved:
                continue
            wanted = name in buffers or not self.cuts_each_parameter
            place = tensor.place if tensor.numel else name  # a tied weight has two names
            if wanted and place not in seen:
                seen.add(place)
                yield whole.stored(f"{name}/param", self.models[0], tensor)

    def experts(self) -> Iterator[Whole]:
        """Every expert's own file, in which it has its number in the whole layer."""
        for file in self.expert_files:
            for name, tensor in file.value.items():
                yield whole.stored(f"{name}/param", file, tensor)


def _sliced(shapes: Shapes, model: Mapping[str, Any]) -> Shapes:
    """AutoEP stacks a rank's experts; files of experts have slices, whose names end with a number.

    auto_ep_layer.py, `load_moe_state_dict` of engine.py: slices of a rank in the order of experts.
    """
    stated = model.get("ds_autoep_layers") or ()
    stacks = {f"{each['expert_key_prefix']}.{w}" for each in stated for w in ("w1", "w2", "w3")}
    sliced: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if name in stacks:
            sliced |= {f"{name}.{number}": shape[1:] for number in range(shape[0])}
        else:
            sliced[name] = shape
    return sliced


def _is_partition(tensors: Sequence[Tensor], masters: Sequence[Tensor]) -> bool:
    """As long as the masters, which may have been saved without their padding at the end.

    That is less than two elements a rank (the engine aligns a group to twice its ranks).
    """
    more = sum(tensor.numel for tensor in tensors) - sum(master.numel for master in masters)
    longer = all(
        tensor.numel >= master.numel for tensor, master in zip(tensors, masters, strict=True)
    )
    alike = len({tensor.numel for tensor in tensors}) == 1
    return more == 0 or (longer and alike and more < 2 * len(masters))
