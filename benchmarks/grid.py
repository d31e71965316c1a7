"""Writes DeepSpeed pipelines of tensor ranks at ZeRO-1 (pp x tp x dp), with holes for tensors.

The keys are those of DeepSpeed 0.19.8 and the rules those of Megatron-DeepSpeed. A layer has three
tensors: a matrix cut by rows, one cut by columns, and a norm, of which each tensor rank has a copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from . import zero
from .dcp import BIAS, WEIGHT

OF_LAYER = 3  # tensors
INFO = {
    "universal_checkpoint_version": 0.2,
    "tp_replicated_parameter_patterns": [r".*\.norm\.weight"],
    "parameter_with_row_parallelism_patterns": [r".*\.down\.weight"],
}


def shapes_of(layers: range, tp: int) -> dict[str, tuple[int, ...]]:
    """The shapes of some layers' tensors on each of `tp` tensor ranks."""
    rows, columns = WEIGHT
    of_layer = {
        "up.weight": (rows // tp, columns),
        "down.weight": (rows, columns // tp),
        "norm.weight": BIAS,
    }
    return {f"{layer}.{name}": shape for layer in layers for name, shape in of_layer.items()}


def stages_of(tensors: int, pp: int) -> list[range]:
    """The layers of each stage; raises ValueError if `tensors` do not fill all stages equally."""
    layers, rest = divmod(tensors, OF_LAYER)
    if rest or layers % pp or not layers:
        raise ValueError(f"{tensors} tensors do not fill {pp} stages with layers of {OF_LAYER}")
    width = layers // pp
    return [range(width * stage, width * (stage + 1)) for stage in range(pp)]


def pieces_of(tensors: int, pp: int, tp: int, dp: int) -> int:
    """The number of parts of one slot's tensors that ranks have."""
    return tp * sum(
        (stop - 1) // width - start // width + 1
        for layers in stages_of(tensors, pp)
        for group in zero.groups_of(shapes_of(layers, tp))
        for width in [sum(map(prod, group.values())) // dp]
        for start, stop in _ranges([*map(prod, group.values())])
    )


def _ranges(lengths: list[int]) -> Iterator[tuple[int, int]]:
    start = 0
    for length in lengths:
        yield start, start + length
        start += length


def make(root: Path, tensors: int, pp: int, tp: int, dp: int) -> None:
    """Writes a run with one checkpoint; needs torch and DeepSpeed."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    folder = root / zero.TAG
    folder.mkdir(parents=True)
    (root / "latest").write_text(zero.TAG)
    with FakeTensorMode():
        for stage, layers in enumerate(stages_of(tensors, pp)):
            for layer in layers:
                weights = OrderedDict(
                    (name.partition(".")[2], torch.empty(shape, dtype=torch.bfloat16))
                    for name, shape in shapes_of(range(layer, layer + 1), tp).items()
                )
                holes = zero.Holes(weights, folder)
                for rank in range(tp):
                    holes.write(folder / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")
            shapes = shapes_of(layers, tp)
            of_model = zero.Holes(_model(shapes, pp, tp, dp), folder)
            model_ranks = range(tp * stage, tp * (stage + 1))
            for number in model_ranks:
                of_model.write(folder / f"mp_rank_{number:02d}_model_states.pt")
            for rank, state in enumerate(zero.partitions(shapes, dp)):
                optimizer = zero.Holes(state, folder)
                for number in model_ranks:
                    optimizer.write(folder / zero.OPTIMIZER.format(rank, number))


def _model(shapes: zero.Shapes, pp: int, tp: int, dp: int) -> dict[str, Any]:
    """The model file of a stage's ranks, whose weights are in the files of layers."""
    return zero.model(shapes, dp, 1) | {
        "module": None,
        "mp_world_size": pp * tp,
        "checkpoint_parallel_dimensions": {"pp_degree": pp, "tp_degree": tp},
        "universal_checkpoint_info": INFO,
    }
