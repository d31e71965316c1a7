"""Which ranks have which experts, where no ds_config says it: the masters' bytes do.

A run that was started with the file of a ds_config saves only its name. Then neighbors may have
different experts, or the same (`use_data_before_expert_parallelism`). Every rank's masters round to
the weights of its own experts, so that only one of the two fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from ....core.cast import are_rounded
from ....errors import InconsistentCheckpoint
from ....files.torchfile import Tensor, TorchFile
from ... import zero
from ...deepspeed_states.directories import refuse
from ...deepspeed_states.experts import ExpertLayers, ExpertRanks
from ...deepspeed_states.states import EngineStates, ParameterShapes

UNKNOWN = "mixture-of-experts layers, and with the name of its ds_config alone"
MASTERS = "single_partition_of_fp32_groups"
ELEMENTS = 64  # that are compared of a parameter
PARAMETERS = 8  # that are compared of a partition

Stored = Mapping[str, tuple[TorchFile, Tensor]]
"""The tensors of experts by their names in the whole model, with their files."""


def places_by_bytes(ranks: EngineStates, layers: ExpertLayers, stored: Stored) -> ExpertRanks:
    """Which ranks have which experts.

    Raises UnsupportedCheckpoint if both orders fit, and InconsistentCheckpoint if none does.
    """
    orders = [ExpertRanks(ranks.dp, data_first) for data_first in (False, True)]
    fitting = [order for order in orders if all(_fits(ranks, layers, stored, order))]
    if not fitting:
        raise InconsistentCheckpoint(
            f"{ranks.directory.path}: the ranks' masters are not those of the experts' weights",
            hint="files of different saves seem to be mixed; copy all files again",
        )
    if len(fitting) > 1:
        refuse(ranks.directory, UNKNOWN)
    return fitting[0]


def _fits(
    ranks: EngineStates, layers: ExpertLayers, stored: Stored, order: ExpertRanks
) -> Iterator[bool]:
    """Whether masters of each rank round to the weights that they would have in this order."""
    alignment = ranks.first.get("param_alignment_paddings")
    for group, shapes in enumerate(ranks.param_shapes()):
        layer = next(filter(None, map(layers.layer_of, shapes)), None)
        if layer is None or not 1 < layer.ep < ranks.dp:
            continue
        paddings = alignment[group] if alignment else [0] * len(shapes)
        starts = zero.offsets([prod(shape) for shape in shapes.values()], paddings)
        for ep_rank in range(layer.ep):
            begin = 0
            for rank in order.alike(ep_rank, layer.ep):
                master = ranks.states[rank][MASTERS][group]
                parts = _parts(shapes, starts, begin, begin + master.numel)
                for name, start, stop, first in parts:
                    file, weight = stored[layers.global_name(name, ep_rank)]
                    wide = master.part(first, first + stop - start)
                    narrow = weight.part(start, stop)
                    yield _rounds(ranks.optimizers[rank], wide, file, narrow)
                begin += master.numel


def _parts(
    shapes: ParameterShapes, starts: list[int], begin: int, end: int
) -> Iterator[tuple[str, int, int, int]]:
    """Some elements of the first parameters in a partition: name, start, stop, and their place."""
    count = 0
    for (name, shape), start in zip(shapes.items(), starts, strict=False):
        low, high = max(start, begin), min(start + prod(shape), end)
        if low < high and count < PARAMETERS:
            count += 1
            yield name, low - start, min(high, low + ELEMENTS) - start, low - begin


def _rounds(wide_file: TorchFile, wide: Tensor, narrow_file: TorchFile, narrow: Tensor) -> bool:
    a, b = wide_file.read(wide), narrow_file.read(narrow)
    return are_rounded(a, wide.dtype, b, narrow.dtype) is not False
