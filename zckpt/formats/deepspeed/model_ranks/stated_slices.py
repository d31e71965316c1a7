"""The parameters of a stage whose model file lists none.

DeepSpeed 0.19.8 saves a bf16 pipeline without ZeRO (stage 0) with BF16_Optimizer's files, but with
`param_shapes: None`. The optimizer files state the name, the place and the number of elements of
each slice (`param_slice_mappings`), in the order in which parameters lie. The files of layers have
the shapes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ....core.inert import Foreign
from ....errors import InconsistentCheckpoint, UnsupportedCheckpoint
from ....files.torchfile import Tensor, TorchFile
from ...deepspeed_states.states import dictionary
from .grid import TIED

Shapes = dict[str, tuple[int, ...]]


def shapes_of_stage(
    states: Sequence[Mapping[str, Any]], layers: Mapping[int, TorchFile]
) -> list[Shapes] | None:
    """Names and shapes of each flat buffer, in their order; None if no slices are stated.

    `states` are the optimizer's of all data ranks, `layers` the files of the tensor rank's layers.
    Raises InconsistentCheckpoint if no layer has a parameter of the stated size,
    UnsupportedCheckpoint if several tied layers may have it.
    """
    mappings = [state.get("param_slice_mappings") for state in states]
    if not all(isinstance(groups, list) for groups in mappings):
        return None
    numels: list[dict[str, int]] = [{} for _ in mappings[0] or ()]
    for groups in mappings:
        for own, mapping in zip(numels, groups or (), strict=True):
            for name, slice_ in mapping.items():
                own[name] = own.get(name, 0) + _numel(slice_)
    tensors = {number: dictionary(file, file.value) for number, file in layers.items()}
    untied = {name.partition(".")[0] for own in numels for name in own}
    return [
        {name: _shape(name, numel, tensors, untied) for name, numel in own.items()}
        for own in numels
    ]


def _numel(slice_: Any) -> int:
    """The elements of a `fragment_address`."""
    state = slice_.state if isinstance(slice_, Foreign) else slice_
    return int(state["numel"])


def _shape(
    name: str, numel: int, layers: Mapping[int, Mapping[str, Any]], untied: Collection[str]
) -> tuple[int, ...]:
    """The shape of a parameter; no file says which layer is a tied one."""
    if name.startswith(TIED):
        inner = name.removeprefix(TIED).partition(".")[2]
        places = [number for number in layers if str(number) not in untied]
    else:
        number, _, inner = name.partition(".")
        places = [int(number)] if number.isdecimal() and int(number) in layers else []
    shapes = {
        tensor.shape
        for place in places
        if isinstance(tensor := layers[place].get(inner), Tensor) and tensor.numel == numel
    }
    if len(shapes) == 1:
        return tuple(shapes.pop())
    if shapes:
        raise UnsupportedCheckpoint(
            f"several layers may be the tied one of {name}, whose shapes are "
            f"{' and '.join(str(list(shape)) for shape in sorted(shapes))}",
            hint="no file says which one it is",
        )
    raise InconsistentCheckpoint(
        f"no file of a layer has {name} with the {numel} elements that the optimizer's files state",
        hint="files of another save may lie between them; keep those of one save",
    )
