"""What DeepSpeed's ranks would all-gather, by the rule of the engine and not of our reader.

Names and shapes stand in the order in which the engine flattened them (`param_shapes`). Stages 1
and 2 (stage_1_and_2.py, bf16_optimizer.py) cut the flattened group; stage 3 (stage3.py) cuts every
parameter, pads it, and lays a rank's slices one behind the other. DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from ...manifest import Extent, slot_name
from ...partition import Member, Partition, Partitioned, Whole
from ...torchfile import Tensor, TorchFile
from .directory import locate, rank_files
from .ranks import Ranks
from .reading import is_extra

Shapes = Mapping[str, tuple[int, ...]]


def partitions(path: str) -> list[Partition]:
    """Everything that the engine holds beside its state: weights, masters and moments."""
    place = locate(path, None)
    ranks = Ranks(place, rank_files(place))
    found: list[Partition] = []
    for number, shapes in enumerate(ranks.param_shapes()):
        found += _flat_group(ranks, number, shapes)
    return [*found, *_frozen(ranks), *_module(ranks)]


def _flat_group(ranks: Ranks, number: int, shapes: Shapes) -> Iterator[Partition]:
    """Masters and optimizer states of one flattened group (stage 3: of one sub-group)."""
    key = "fp32_flat_groups" if ranks.partitioned else "single_partition_of_fp32_groups"
    masters = [state[key][number] for state in ranks.states]
    firsts = _firsts(ranks, number, shapes)
    kept = ranks.flat_states(number)
    states = {name: [held.get(name) for held in kept] for held in kept for name in held}
    for name, tensors in {"master": masters, **states}.items():
        held = [tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.shape]
        if name == "step" or not held:
            continue
        slot = name if name == "master" else slot_name(name)
        if len(held) == ranks.dp and _is_partition(held, masters):
            members = [
                Member(f"{parameter}/{slot}", shape, firsts[parameter])
                for parameter, shape in shapes.items()
            ]
            yield Partitioned(
                held[0].dtype, _extents(ranks, held), members, interleaved=ranks.partitioned
            )
        else:
            yield from _whole_momenta(ranks, slot, tensors, masters, firsts, shapes)


def _firsts(ranks: Ranks, number: int, shapes: Shapes) -> dict[str, int]:
    """Where each parameter begins: in the flattened group, or in every rank's part of it."""
    paddings = (ranks.first.get("param_alignment_paddings") or {number: None})[number]
    firsts, here = {}, 0
    for place, (name, shape) in enumerate(shapes.items()):
        firsts[name] = here
        here += -(-prod(shape) // ranks.dp) if ranks.partitioned else prod(shape)
        here += paddings[place] if paddings else 0
    return firsts


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


def _extents(ranks: Ranks, tensors: Sequence[Tensor]) -> tuple[Extent, ...]:
    pairs = zip(ranks.optimizers, tensors, strict=True)
    return tuple(file.extent(tensor) for file, tensor in pairs)


def _whole_momenta(
    ranks: Ranks,
    slot: str,
    tensors: Sequence[Any],
    masters: Sequence[Tensor],
    firsts: Mapping[str, int],
    shapes: Shapes,
) -> Iterator[Whole]:
    """Muon in stages 1 and 2: every rank has all of each parameter that reaches into its part."""
    start = 0
    for file, tensor, master in zip(ranks.optimizers, tensors, masters, strict=True):
        stop, here = start + master.numel, 0
        for name, shape in shapes.items():
            first, numel = firsts[name], prod(shape)
            if first < stop and first + numel > start and numel:
                extent = file.extent(tensor.part(here, here + numel))
                yield Whole(f"{name}/{slot}", tensor.dtype, shape, extent)
                here += numel
        start = stop


def _frozen(ranks: Ranks) -> Iterator[Partition]:
    """Stage 3 cuts frozen parameters too, each by itself."""
    if not ranks.partitioned:
        return
    shapes = ranks.model.get("frozen_param_shapes") or {}
    held = [file.value.get("frozen_param_fragments") or {} for file in ranks.models]
    for name, size in shapes.items():
        shape = tuple(size)
        tensors = [tensor for each in held if isinstance(tensor := each.get(name), Tensor)]
        if len(tensors) != ranks.dp:
            continue
        pairs = list(zip(ranks.models, tensors, strict=True))
        width = -(-prod(shape) // ranks.dp)
        if any(tensor.numel != width for tensor in tensors):  # not managed by the engine
            for file, tensor in pairs:
                yield _whole(f"{name}/param", file, tensor)
            continue
        extents = tuple(file.extent(tensor) for file, tensor in pairs)
        member = Member(f"{name}/param", shape, 0)
        yield Partitioned(tensors[0].dtype, extents, [member], interleaved=True)


def _module(ranks: Ranks) -> Iterator[Whole]:
    """What the module itself holds: all of it, but in stage 3 buffers alone."""
    buffers = ranks.model.get("buffer_names") or ()
    seen = set()
    for name, held in ranks.model["module"].items():
        if is_extra(name, held) or not held.numel or held.place in seen:
            continue
        if name in buffers or not ranks.partitioned:
            seen.add(held.place)  # a tied weight has two names
            yield _whole(f"{name}/param", ranks.models[0], held)


def _whole(name: str, file: TorchFile, tensor: Tensor) -> Whole:
    if tensor.contiguous:
        return Whole(name, tensor.dtype, tensor.shape, file.extent(tensor))
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.strides, strict=True))
    flat = Tensor(tensor.storage, tensor.dtype, tensor.offset, (last + 1,), (1,))
    return Whole(name, tensor.dtype, tensor.shape, file.extent(flat), tensor.strides)
