"""Which tensor of a stage-0 file is which `parameter/slot`, by the engine's own rule?

Nothing is partitioned: rank 0 saves the module, and the optimizer's state by number. The engine
loads numbers in the order of its own groups, so a tensor has no name in the file (`Nameless`). Two
kinds have one. A file of zckpt's lists the names of each group. FP16_Optimizer's flat tensors have
the parameters where the module's weights, which are views, lie in the group's 16-bit buffer.
DeepSpeed 0.19.8, runtime/fp16/fused_optimizer.py and unfused_optimizer.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from ....core.dtypes import SIZES
from ....core.grouping import by_key
from ....core.manifest import slot_name
from ....core.partition import FlatMember, Nameless, Partition, Partitioned, Whole
from ....errors import MissingData
from ....files.torchfile import Parsed, Tensor, TorchFile
from ..stage_0.samples import TensorInFile, labels

Shapes = Mapping[str, tuple[int, ...]]
FLATS = "fp32_groups_flat"
OF_RANK = re.compile(r"expp_rank_(\d+)_mp_rank_0+_optim_states\.pt")
LOCAL = re.compile(
    r"(?<=\.deepspeed_moe\.experts\.deepspeed_experts\.)\d+(?=\.)|(?<=\.experts\.w[123]\.)\d+$"
)


def stored(name: str, file: TorchFile, tensor: Tensor) -> Whole:
    """A tensor as it lies in its storage."""
    return Whole(name, tensor.dtype, tensor.shape, *file.reach(tensor))


def optimizers(directory: str, model: TorchFile) -> Iterator[Partition]:
    """The tensors of the optimizer in the model file; with experts of those of all ep ranks.

    Each copy of a parameter comes once. An ep rank loads the model file, its own experts' files and
    the optimizer of its ep rank, whose numbers stand in the order of its own groups (DeepSpeed
    0.19.8, engine.py `load_moe_state_dict`). Dense parameters are taken from the first optimizer.
    Names are in zckpt's files, or shown by views.
    """
    paths = {int(m[1]): name for name in os.listdir(directory) if (m := OF_RANK.fullmatch(name))}
    parsed = Parsed()
    files = [TorchFile(os.path.join(directory, paths[rank]), parsed) for rank in sorted(paths)]
    files = files or [model]
    stated = model.value["param_shapes"] or ()
    shapes: list[Shapes] = [{name: tuple(s) for name, s in own.items()} for own in stated]
    if not shapes and FLATS in (optimizer := files[0].value["optimizer"]):
        shapes = _views(model, files[0], optimizer[FLATS])
    named = of_ep_ranks(name for own in shapes for name in own)
    for rank, file in enumerate(files):
        optimizer = file.value["optimizer"]
        base = optimizer.get("optimizer_state_dict", optimizer)
        for place, group in enumerate(base["param_groups"]):
            firsts = [ranks[0] for ranks in sharing(model.value, len(files), group)]
            if rank in firsts:
                own = firsts.index(rank)
                known = shapes[place] if shapes else {}
                listed = {named(name, own): shape for name, shape in known.items()}
                yield from _group(file, optimizer, place, group["params"], listed)


def _group(
    file: TorchFile,
    optimizer: Mapping[str, Any],
    place: int,
    numbers: Sequence[Any],
    listed: Shapes,
) -> Iterator[Partition]:
    """The tensors of one group; `listed` are the names and shapes of its parameters, if known."""
    states = optimizer.get("optimizer_state_dict", optimizer)["state"]
    if FLATS in optimizer:
        (number,) = numbers
        state = {"master": optimizer[FLATS][place], **states.get(number, {})}
        yield from _flat(file, listed, state)
        return
    masters, frozen = optimizer.get("fp32_groups"), {*(optimizer.get("zckpt_frozen") or ())}
    numbers = [number for number in numbers if number not in frozen]  # these have no names
    names: list[str | None] = [*listed] or [None] * len(numbers)
    for position, (number, name) in enumerate(zip(numbers, names, strict=True)):
        state = dict(states.get(number) or {})
        if masters is not None:
            state["master"] = masters[place][position]
        for key, tensor in state.items():
            if isinstance(tensor, Tensor) and key != "step":
                yield _of_parameter(file, name, key, tensor)


def _of_parameter(file: TorchFile, name: str | None, key: str, tensor: Tensor) -> Partition:
    slot = key if key == "master" else slot_name(key)
    if name is None or tensor.numel < 2:  # a number is no tensor of the parameter
        return Nameless(slot, stored(slot, file, tensor))
    return stored(f"{name}/{slot}", file, tensor)


def _flat(file: TorchFile, shapes: Shapes, state: Mapping[str, Any]) -> Iterator[Partition]:
    """The flat tensors of one group, whose parameters follow each other without padding."""
    for key, tensor in state.items():
        if not isinstance(tensor, Tensor) or tensor.numel != state["master"].numel:
            continue
        slot = key if key == "master" else slot_name(key)
        members, first = [], 0
        for name, shape in shapes.items():
            members.append(FlatMember(f"{name}/{slot}", shape, first))
            first += prod(shape)
        yield Partitioned(tensor.dtype, (file.extent(tensor),), members)


def _views(model: TorchFile, file: TorchFile, flats: Sequence[Tensor]) -> list[Shapes]:
    """Names and shapes of every group, from the 16-bit buffer that has the bytes of its master."""
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
            f"{file.path}: the module's weights no longer lie in the buffers of the optimizer's "
            "groups, so the engine's rule cannot name the flat tensors",
            hint="verify without --gather",
        )
    return [shapes[of_buffers.index(own[0])] for own in of_flats]


# -- experts


def sharing(model: Mapping[str, Any], dp: int, group: Mapping[str, Any]) -> list[range]:
    """By ep rank, the data ranks that have the parameters of a group: all, or those of experts."""
    ep = int(group["name"].removeprefix("ep_size_")) if group.get("moe") else 1
    config, edp = model.get("ds_config"), dp // ep
    if isinstance(config, dict) and config.get("use_data_before_expert_parallelism"):
        return [range(rank * edp, (rank + 1) * edp) for rank in range(ep)]
    return [range(rank, dp, ep) for rank in range(ep)]


def of_ep_ranks(names: Iterable[str]) -> Callable[[str, int], str]:
    """Gives a parameter's name in the whole model; dense parameters have no number.

    The experts of ep rank e are those that follow e times as many as rank 0 has of a layer.
    """
    local = by_key((n[: match.start()], match[0]) for n in names if (match := LOCAL.search(n)))

    def named(name: str, rank: int) -> str:
        if (match := LOCAL.search(name)) is None:
            return name
        layer = name[: match.start()]
        number = rank * len({*local[layer]}) + int(match[0])
        return f"{layer}{number}{name[match.end() :]}"

    return named
