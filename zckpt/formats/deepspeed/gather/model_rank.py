"""The files of one model rank, and the tensors that its data ranks all-gather, at any ZeRO stage.

Stages 1, 2 and 3: `param_shapes` lists names and shapes in the order in which the engine flattened
the parameters. Stages 1 and 2 (stage_1_and_2.py, bf16_optimizer.py) cut the flattened group. Stage
3 (stage3.py) cuts every parameter, pads it, and concatenates a rank's slices. A group of experts
(`_configure_moe_settings` in stage_1_and_2.py) is cut over the ranks with the same experts
(utils/groups.py).

Stage 0: nothing is partitioned. Rank 0 saves the module, and the optimizer's state with numbers in
place of names. The engine loads these numbers in the order of its own groups, so a tensor of the
state has no name in the file (`Nameless`), with two exceptions. A file that zckpt wrote lists the
names of each group. A flat tensor of FP16_Optimizer has its parameters in the same order as the
group's 16-bit buffer, and the module's weights are views of that buffer
(runtime/fp16/fused_optimizer.py and unfused_optimizer.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from math import prod
from typing import Any

from ....core.checkpoint.dtypes import SIZES
from ....core.checkpoint.entries import Key
from ....core.checkpoint.manifest import slot_name
from ....core.grouping import by_key
from ....core.ranks.partition import UNNAMED, FlatMember, Nameless, Partition, Partitioned, Whole
from ....errors import MissingData
from ....files.torchfile import Parsed, Tensor, TorchFile
from ...deepspeed_states.module_names import as_in_module
from ..stage_0.samples import TensorInFile, labels

Shapes = Mapping[str, tuple[int, ...]]
"""The parameters of a group and their shapes, in the order of the flat buffer."""

OF_DATA_RANK = r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<number>\d+)_?"
OPTIMIZER = re.compile(OF_DATA_RANK + r"optim_states\.pt")
MODEL = re.compile(OF_DATA_RANK + r"model_states\.pt")
EXPERT = re.compile(r"layer_\d+_expert_\d+_mp_rank_(?P<number>\d+)_model_states\.pt")
OF_EP_RANK = re.compile(r"expp_rank_(?P<rank>\d+)_mp_rank_(?P<number>\d+)_optim_states\.pt")
LOCAL = re.compile(
    r"(?<=\.deepspeed_moe\.experts\.deepspeed_experts\.)\d+(?=\.)|(?<=\.experts\.w[123]\.)\d+$"
)
"""Matches the number of an expert in a parameter's name."""

KEYS = {
    False: ("single_partition_of_fp32_groups", "base_optimizer_state"),
    True: ("fp32_flat_groups", "optimizer_state_dict"),
}
"""Keys of the masters and of the base optimizer; True is stage 3, which cuts each parameter."""
FLATS = "fp32_groups_flat"
"""The key of FP16_Optimizer's masters in stage 0, which flattens each group."""


class ModelRank:
    """The opened files of one model rank, and the tensors in these files (`partitions`).

    `number` is the model rank in the file names. None opens the files of all numbers as one model
    rank: up to DeepSpeed 0.19.5, the numbers count the ranks that share a sequence (Ulysses).
    """

    def __init__(self, directory: str, number: int | None = 0) -> None:
        names, parsed = os.listdir(directory), Parsed()

        def opened(pattern: re.Pattern[str]) -> list[TorchFile]:
            matches = [m for name in names if (m := pattern.fullmatch(name))]
            matching = [m for m in matches if number in (None, int(m["number"]))]
            matching.sort(key=lambda m: (int(m.groupdict().get("rank", 0)), m[0]))
            return [TorchFile(os.path.join(directory, m[0]), parsed) for m in matching]

        self.optimizers, self.models = opened(OPTIMIZER), opened(MODEL)
        if not self.models:  # except in stage 3, one file for all data ranks
            path = os.path.join(directory, f"mp_rank_{number or 0:02d}_model_states.pt")
            self.models = [TorchFile(path, parsed)]
        self.experts, self.of_ep_ranks = opened(EXPERT), opened(OF_EP_RANK)
        self.states = [file.value["optimizer_state_dict"] for file in self.optimizers]
        for file in self.models:
            file.value = as_in_module(file.value)
        self.model: dict[str, Any] = self.models[0].value
        self.dp = len(self.optimizers)
        self.cuts_each_parameter = "fp32_flat_groups" in (self.states or [{}])[0]  # stage 3
        self.masters, self.base = KEYS[self.cuts_each_parameter]
        self.kept = [self._tensors_of_rank(state) for state in self.states]
        self.numbers = {"step"}  # one-number states, also where a rank has one element
        for group in chain.from_iterable(self.kept[:1]):
            self.numbers |= {
                k for k, own in group.items() if own.numel == 1 < group["master"].numel
            }

    def partitions(self) -> Iterator[Partition]:
        """All tensors of this model rank, except those in files of pipeline layers."""
        groups = self.param_shapes() if self.optimizers else []
        named = _in_whole_model(chain.from_iterable(groups))
        for number, shapes in enumerate(groups):
            about = next(iter(_groups(self.states[0])[number:]), {})
            for ep_rank, ranks in enumerate(_ranks_that_share(self.model, self.dp, about)):
                named_shapes = {named(name, ep_rank): shape for name, shape in shapes.items()}
                yield from self._flat_group(number, named_shapes, ranks)
        yield from self._frozen()
        yield from self._module()
        for file in self.experts:  # each one has the expert's number in the full layer
            yield from (_stored((name, "param"), file, each) for name, each in file.value.items())
        if not self.optimizers:
            yield from _whole_optimizers(self.models[0], self.of_ep_ranks or self.models)

    def param_shapes(self) -> list[Shapes]:
        """Names and shapes of the parameters in each flat buffer: [{"fc.weight": (4, 8)}, ...].

        Raises MissingData if no file lists them.
        """
        if (groups := self._stated()) is None:  # a bf16 pipeline without ZeRO (0.19.8)
            raise MissingData(
                "proof-unsupported",
                f"{self.models[0].path} and the other model files list no parameters, so --gather "
                "cannot name the gathered tensors",
                hint="verify without --gather",
                file=self.models[0].path,
            )
        return groups

    def _stated(self) -> list[Shapes] | None:
        """Names and shapes of the parameters in each flat buffer; None if no file lists them."""
        # before 0.6.0, the optimizer files have the list; in stage 0, only zckpt writes one
        places = (self.model, *self.states[:1], *(file.value for file in self.optimizers[:1]))
        lists = (place["param_shapes"] for place in places if place.get("param_shapes"))
        if (shapes := next(lists, None)) is None:
            return None
        # before 0.5.4, one dictionary lists the parameters of all groups
        groups = [shapes] if isinstance(shapes, dict) else shapes
        return [_sliced(_tuples(group), self.model) for group in groups]

    # -- flat buffers

    def _tensors_of_rank(self, state: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        """For each flat group, a rank's tensors: {"master": ..., "exp_avg": ...}.

        Groups are in rank 0's order, because each rank may list groups of experts in another order.
        Elastic files have a list of states instead of the base optimizer's state dict.
        """
        base, masters = state[self.base], state[self.masters]
        states = base
        if not isinstance(base, list):
            states = [base["state"].get(number) or {} for number in range(len(masters))]
        pairs = zip(masters, states, strict=True)
        kept = [{"master": master, **_tensors(own)} for master, own in pairs]
        first, names = (
            [group.get("name") for group in _groups(file_state)[: len(kept)]]
            for file_state in (self.states[0], state)
        )
        places = by_key((name, place) for place, name in enumerate(names))
        return [kept[places[name].pop(0)] for name in first] if first and names else kept

    def _flat_group(self, number: int, shapes: Shapes, ranks: range) -> Iterator[Partition]:
        """Yields the masters and optimizer states of flat group `number` (stage 3: sub-group).

        `ranks` are the data ranks that share the group.
        """
        files = [self.optimizers[rank] for rank in ranks]
        kept = [self.kept[rank][number] for rank in ranks]
        masters = [own["master"] for own in kept]
        paddings = (self.states[0].get("param_alignment_paddings") or {number: None})[number] or ()
        dp = self.dp if self.cuts_each_parameter else 1
        for slot in dict.fromkeys(chain.from_iterable(kept)):
            tensors = [own.get(slot) for own in kept]
            partitions = [tensor for tensor in tensors if tensor is not None and tensor.shape]
            if slot in self.numbers or not partitions:
                continue
            members = _behind_each_other(slot, shapes, paddings, dp)
            if len(partitions) == len(ranks) and _is_partition(partitions, masters):
                yield _partitioned(files, partitions, members, self.cuts_each_parameter)
            else:
                yield from _whole_momenta(files, tensors, masters, members)

    # -- what is in model files

    def _frozen(self) -> Iterator[Partition]:
        """Yields the frozen parameters of stage 3, in which every rank has a part of each.

        Yields nothing in other stages, where frozen parameters are complete in the module.
        """
        if not self.cuts_each_parameter:
            return
        fragments = [file.value.get("frozen_param_fragments") or {} for file in self.models]
        for name, shape in _tuples(self.model.get("frozen_param_shapes") or {}).items():
            tensors = [tensor for rank in fragments if isinstance(tensor := rank.get(name), Tensor)]
            if len(tensors) != self.dp:
                continue
            width = -(-prod(shape) // self.dp)
            if all(tensor.numel == width for tensor in tensors):
                member = FlatMember((name, "param"), shape, 0)
                yield _partitioned(self.models, tensors, [member], interleaved=True)
            else:  # not managed by the engine
                yield from map(partial(_stored, (name, "param")), self.models, tensors)

    def _module(self) -> Iterator[Whole]:
        """Yields the module's own tensors: in stage 3 only the buffers, in other stages all.

        If `exclude_frozen_parameters` left out a frozen weight, the module may still have it under
        the second name of a tied weight (`shared_params`). Such a tensor is skipped.
        """
        buffers = self.model.get("buffer_names") or ()
        seen: set[object] = set()
        module = self.model["module"] or {}  # None in a pipeline
        saved = {*module, *chain.from_iterable(self._stated() or ())}
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
                yield _stored((name, "param"), self.models[0], tensor)


def _stored(key: Key, file: TorchFile, tensor: Tensor) -> Whole:
    return Whole(key, tensor.dtype, tensor.shape, *file.reach(tensor))


def _groups(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    base = state.get("base_optimizer_state")
    return base["param_groups"] if isinstance(base, dict) else []


def _tuples(shapes: Mapping[str, Sequence[int]]) -> Shapes:
    return {name: tuple(shape) for name, shape in shapes.items()}


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {slot_name(key): each for key, each in state.items() if isinstance(each, Tensor)}


def _partitioned(
    files: Sequence[TorchFile],
    tensors: Sequence[Tensor],
    members: Sequence[FlatMember],
    interleaved: bool = False,
) -> Partitioned:
    """A flat buffer that is cut into `tensors`, one in each of `files`.

    `members` are the places of the parameters in the buffer. With `interleaved`, every parameter is
    cut over all ranks (stage 3).
    """
    extents = tuple(file.extent(own) for file, own in zip(files, tensors, strict=True))
    return Partitioned(tensors[0].dtype, extents, members, interleaved)


def _behind_each_other(
    slot: str, shapes: Shapes, paddings: Sequence[int] = (), dp: int = 1
) -> list[FlatMember]:
    """Places parameters one after another in a flat buffer, each followed by its padding.

    `paddings` are in elements. If `dp` is more than 1 (stage 3), the buffer is one rank's
    partition: of every parameter it has one `dp`-th, rounded up.
    """
    if len(paddings) < len(shapes):  # none; AutoEP's stacks are never aligned
        paddings = [0] * len(shapes)
    members, first = [], 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=False):
        members.append(FlatMember((name, slot), shape, first))
        first += -(-prod(shape) // dp) + padding
    return members


def _sliced(shapes: Shapes, model: Mapping[str, Any]) -> Shapes:
    """Replaces each AutoEP parameter that stacks a rank's experts by one slice per expert.

    A slice is named after the stacked parameter and the number of the expert, as in the files of
    experts (auto_ep_layer.py, `load_moe_state_dict` of engine.py).
    """
    layers = model.get("ds_autoep_layers") or ()
    stacks = {f"{each['expert_key_prefix']}.{w}" for each in layers for w in ("w1", "w2", "w3")}
    sliced: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if name in stacks:
            sliced |= {f"{name}.{number}": shape[1:] for number in range(shape[0])}
        else:
            sliced[name] = shape
    return sliced


def _is_partition(tensors: Sequence[Tensor], masters: Sequence[Tensor]) -> bool:
    """Whether an optimizer state is as long as the masters on every rank, except for end padding.

    `tensors` and `masters` have one tensor per rank. Masters may be saved without the padding.
    """
    # the engine aligns a group to twice its number of ranks
    more = [own.numel - master.numel for own, master in zip(tensors, masters, strict=True)]
    alike = len({tensor.numel for tensor in tensors}) == 1
    return not sum(more) or (min(more) >= 0 and alike and sum(more) < 2 * len(masters))


def _whole_momenta(
    files: Sequence[TorchFile],
    tensors: Sequence[Tensor | None],
    masters: Sequence[Tensor],
    members: Sequence[FlatMember],
) -> Iterator[Whole]:
    """Yields the full momenta that Muon keeps, one per parameter, in stages 1 and 2.

    Yields nothing if a tensor's length does not fit the parameters in the rank's partition.
    """
    parts = []
    stop = 0
    for file, master, tensor in zip(files, masters, tensors, strict=True):
        start, stop, at = stop, stop + master.numel, 0
        # the rank has the momentum of every parameter that lies at least partly in its partition
        for member in members:
            if member.numel and member.first < stop and member.first + member.numel > start:
                parts.append((member, file, tensor, at))
                at += member.numel
        if at != (0 if tensor is None else tensor.numel):
            return
    for member, file, tensor, at in parts:
        assert tensor is not None
        extent = file.extent(tensor.part(at, at + member.numel))
        yield Whole(member.key, tensor.dtype, member.shape, extent)


# -- stage 0


def _whole_optimizers(model: TorchFile, files: Sequence[TorchFile]) -> Iterator[Partition]:
    """Yields the tensors of an optimizer that is not partitioned (stage 0), each one once.

    `files` are the files with an optimizer: the model file, or with experts one file per ep rank. A
    dense parameter's tensors are the first ep rank's.
    """
    first = files[0].value["optimizer"]
    shapes = [_tuples(own) for own in model.value["param_shapes"] or ()]
    if not shapes and FLATS in first:
        shapes = _views(model, files[0], first[FLATS])
    named = _in_whole_model(chain.from_iterable(shapes))
    for rank, file in enumerate(files):
        optimizer = file.value["optimizer"]
        # its state is numbered in the order of its groups (engine.py `load_moe_state_dict`)
        base = optimizer.get("optimizer_state_dict", optimizer)
        for place, group in enumerate(base["param_groups"]):
            firsts = [ranks[0] for ranks in _ranks_that_share(model.value, len(files), group)]
            if rank in firsts:
                shapes_of_group = shapes[place].items() if shapes else ()
                listed = {named(name, firsts.index(rank)): shape for name, shape in shapes_of_group}
                yield from _group(file, optimizer, place, group["params"], listed)


def _group(
    file: TorchFile,
    optimizer: Mapping[str, Any],
    place: int,
    numbers: Sequence[Any],
    shapes: Shapes,
) -> Iterator[Partition]:
    """Yields the optimizer's tensors of group number `place`.

    `numbers` are the group's numbers in the optimizer's state. `shapes` has the names and shapes of
    its parameters. If `shapes` is empty, the tensors are yielded without names (`Nameless`).
    """
    states = optimizer.get("optimizer_state_dict", optimizer)["state"]
    if FLATS in optimizer:
        (number,) = numbers
        tensors = {"master": optimizer[FLATS][place], **_tensors(states.get(number, {}))}
        for slot, tensor in tensors.items():
            if tensor.numel == tensors["master"].numel:
                yield _partitioned([file], [tensor], _behind_each_other(slot, shapes))
        return
    frozen = {*(optimizer.get("zckpt_frozen") or ())}  # these have no names
    numbers = [number for number in numbers if number not in frozen]
    names: list[str | None] = [*shapes] or [None] * len(numbers)
    masters = optimizer.get("fp32_groups")
    for position, (number, name) in enumerate(zip(numbers, names, strict=True)):
        tensors = _tensors(states.get(number) or {})
        if masters is not None:
            tensors["master"] = masters[place][position]
        for slot, tensor in tensors.items():
            if slot == "step":
                continue
            # numbers, and factors such as Adafactor's rows and columns, do not have its shape
            if name is None or tensor.numel < 2 or tensor.shape != shapes[name]:
                yield Nameless(slot, _stored(UNNAMED, file, tensor))
            else:
                yield _stored((name, slot), file, tensor)


def _views(model: TorchFile, file: TorchFile, flats: Sequence[Tensor]) -> list[Shapes]:
    """The names and shapes of the parameters in each flat master of FP16_Optimizer.

    The module's weights are views of one 16-bit buffer per group, and the buffer's bytes equal the
    rounded flat master. Raises MissingData if a master has no such buffer.
    """
    buffers: dict[str, dict[int, tuple[str, Tensor]]] = {}
    for name, tensor in model.value["module"].items():
        if isinstance(tensor, Tensor) and tensor.numel:
            buffers.setdefault(tensor.storage.key, {}).setdefault(tensor.offset, (name, tensor))
    shapes, candidates = [], []
    for members in buffers.values():
        ordered = [members[offset] for offset in sorted(members)]
        first = ordered[0][1]
        numel = first.storage.length // SIZES[first.dtype]
        shapes.append({name: tensor.shape for name, tensor in ordered})
        candidates.append(Tensor(first.storage, first.dtype, 0, (numel,), (1,)))
    of_buffers, of_flats = labels(
        [TensorInFile(model, buffer) for buffer in candidates],
        [TensorInFile(file, flat) for flat in flats],
    )
    if any(len(own) != 1 for own in of_flats):
        raise MissingData(
            "proof-unsupported",
            f"{file.path}: the module's weights are no longer views of the flat buffers of the "
            "optimizer's groups, so --gather cannot name the flat tensors",
            hint="verify without --gather",
            file=file.path,
        )
    return [shapes[of_buffers.index(own[0])] for own in of_flats]


# -- experts


def _ranks_that_share(model: Mapping[str, Any], dp: int, group: Mapping[str, Any]) -> list[range]:
    """For each ep rank, the data ranks that share the parameters of a group.

    A dense group has a single range: all data ranks.
    """
    ep = int(group["name"].removeprefix("ep_size_")) if group.get("moe") else 1
    config, edp = model.get("ds_config"), dp // ep
    if isinstance(config, dict) and config.get("use_data_before_expert_parallelism"):
        return [range(rank * edp, (rank + 1) * edp) for rank in range(ep)]
    return [range(rank, dp, ep) for rank in range(ep)]


def _in_whole_model(names: Iterable[str]) -> Callable[[str, int], str]:
    """Returns a function that maps (name, ep rank) to the parameter's name in the full model.

    `names` are rank 0's parameters. With 2 experts per rank, rank 1's expert 0 is expert 2 of the
    full model.
    """
    # all ranks have the same number of a layer's experts, and number them from 0
    local = by_key((n[: match.start()], match[0]) for n in names if (match := LOCAL.search(n)))

    def named(name: str, rank: int) -> str:
        if (match := LOCAL.search(name)) is None:
            return name
        layer = name[: match.start()]
        number = rank * len({*local[layer]}) + int(match[0])
        return f"{layer}{number}{name[match.end() :]}"

    return named
