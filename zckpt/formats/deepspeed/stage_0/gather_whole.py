"""Which tensor of a stage-0 file is which `parameter/slot`, by the engine's own rule?

Nothing is partitioned: rank 0 saves the module, and the optimizer's state by number. The engine
loads numbers in the order of its own groups, so a tensor has no name in the file (`Nameless`). Two
kinds have one. A file of zckpt's lists the names of each group. FP16_Optimizer's flat tensors have
the parameters where the module's weights, which are views, lie in the group's 16-bit buffer.
DeepSpeed 0.19.8, runtime/fp16/fused_optimizer.py and unfused_optimizer.py.

This states again where everything lies, so that a proof does not repeat a mistake of the reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from ....core.dtypes import SIZES
from ....core.manifest import slot_name
from ....core.partition import FlatMember, Nameless, Partition, Partitioned, Whole
from ....errors import MissingData
from ....files.torchfile import Tensor, TorchFile
from .samples import TensorInFile, labels

Shapes = Mapping[str, tuple[int, ...]]
FLATS = "fp32_groups_flat"


def whole(name: str, file: TorchFile, tensor: Tensor) -> Whole:
    """A tensor as it lies in its storage."""
    if tensor.contiguous:
        return Whole(name, tensor.dtype, tensor.shape, file.extent(tensor))
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.strides, strict=True))
    flat = Tensor(tensor.storage, tensor.dtype, tensor.offset, (last + 1,), (1,))
    return Whole(name, tensor.dtype, tensor.shape, file.extent(flat), tensor.strides)


def partitions(file: TorchFile) -> Iterator[Partition]:
    """The module's tensors, each memory once, and then the optimizer's."""
    model, optimizer = file.value, file.value["optimizer"]
    yield from module(file)
    stated = model.get("param_shapes")
    shapes: list[Shapes] = [{n: tuple(s) for n, s in own.items()} for own in stated or ()]
    if FLATS in optimizer and not shapes:
        shapes = _views(file, optimizer[FLATS])
    yield from of_optimizer(file, optimizer, shapes)


def module(file: TorchFile) -> Iterator[Whole]:
    """The tensors of the module in a model file, each memory once."""
    seen = set()
    for name, tensor in file.value["module"].items():
        if isinstance(tensor, Tensor) and not name.endswith("_extra_state"):
            if tensor.numel == 0 or tensor.place not in seen:
                yield whole(f"{name}/param", file, tensor)
            seen.add(tensor.place)


def of_optimizer(
    file: TorchFile, optimizer: Mapping[str, Any], listed: Sequence[Shapes]
) -> Iterator[Partition]:
    """The tensors of an optimizer; `listed` are names and shapes of its groups, if known."""
    base = optimizer.get("optimizer_state_dict", optimizer)
    groups = [group["params"] for group in base["param_groups"]]
    if FLATS in optimizer:
        flats = optimizer[FLATS]
        for (number,), master, members in zip(groups, flats, listed, strict=True):
            yield from _flat(file, members, {"master": master, **base["state"].get(number, {})})
        return
    masters, frozen = optimizer.get("fp32_groups"), {*(optimizer.get("zckpt_frozen") or ())}
    for place, group in enumerate(groups):
        numbers = [number for number in group if number not in frozen]  # these have no names
        names = list(listed[place]) if listed else [None] * len(numbers)
        for position, (number, name) in enumerate(zip(numbers, names, strict=True)):
            state = dict(base["state"].get(number) or {})
            if masters is not None:
                state["master"] = masters[place][position]
            for key, tensor in state.items():
                if isinstance(tensor, Tensor) and key != "step":
                    yield _of_parameter(file, name, key, tensor)


def _of_parameter(file: TorchFile, name: str | None, key: str, tensor: Tensor) -> Partition:
    slot = key if key == "master" else slot_name(key)
    if name is None or tensor.numel < 2:  # a number is no tensor of the parameter
        return Nameless(slot, whole(slot, file, tensor))
    return whole(f"{name}/{slot}", file, tensor)


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


def _views(file: TorchFile, flats: Sequence[Tensor]) -> list[Shapes]:
    """Names and shapes of every group, from the 16-bit buffer that has the bytes of its master."""
    buffers: dict[str, dict[int, tuple[str, Tensor]]] = {}
    for name, tensor in file.value["module"].items():
        if isinstance(tensor, Tensor) and tensor.numel:
            buffers.setdefault(tensor.storage.key, {}).setdefault(tensor.offset, (name, tensor))
    shapes, candidates = [], []
    for members in buffers.values():
        ordered = [members[offset] for offset in sorted(members)]
        first = ordered[0][1]
        numel = first.storage.length // SIZES[first.dtype]
        shapes.append({name: tensor.shape for name, tensor in ordered})
        candidates.append(Tensor(first.storage, first.dtype, 0, (numel,), (1,)))
    own = [[TensorInFile(file, tensor) for tensor in tensors] for tensors in (candidates, flats)]
    of_buffers, of_flats = labels(*own)
    if any(len(own) != 1 for own in of_flats):
        raise MissingData(
            f"{file.path}: the module's weights no longer lie in the buffers of the optimizer's "
            "groups, so the engine's rule cannot name the flat tensors",
            hint="verify without --gather",
        )
    return [shapes[of_buffers.index(own[0])] for own in of_flats]
