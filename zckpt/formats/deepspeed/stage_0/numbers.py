"""What a stage-0 optimizer stores for each parameter number: its state, its master and its shape.

The state of an optimizer has numbers in place of parameter names. In torch's own optimizer and in
FP16_UnfusedOptimizer a number stands for one parameter, in FP16_Optimizer for one flat group.
naming.py finds the names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from ....errors import CorruptCheckpoint, InconsistentCheckpoint, listed
from ....files.torchfile import Tensor
from ...deepspeed_states.states import (
    FLAT_MASTERS,
    WRAPPERS,
    EngineStates,
    ParameterShapes,
    wrapper_of,
)
from ...statedict.names import ELEMENTWISE
from .samples import TensorInFile

Shape = tuple[int, ...]
Groups = Sequence[Sequence["Number"]]
FROZEN = "zckpt_frozen"
"""The key beside the optimizer's state under which zckpt lists the numbers of frozen parameters."""


class Number(Struct, frozen=True):
    """What the optimizer's state has under one number: for one parameter, or for a flat group.

    group    the number of the param group
    state    the optimizer states by key, such as exp_avg
    master   the fp32 master; None if the optimizer updates the weight itself
    name     the parameter's name, if torch states it (since 2.6)
    shapes   names and shapes of the parameters, once naming.py has found them
    """

    group: int
    state: Mapping[str, Any]
    master: TensorInFile | None = None
    name: str | None = None
    is_frozen: bool = False
    shapes: ParameterShapes = field(default_factory=dict)

    @property
    def shape(self) -> Shape | None:
        """The shape of the parameter, or of the flat group; None if nothing shows it."""
        if self.master is not None:
            return self.master.tensor.shape
        return next(iter(self.shapes.values())) if self.shapes else shape_of(self.state)

    @property
    def first(self) -> str:
        """The name of the first parameter that this number stands for."""
        return next(iter(self.shapes))

    @property
    def owner(self) -> str:
        """What this number stands for, in messages: a parameter's name, or `group N`."""
        return self.first if len(self.shapes) == 1 else f"group {self.group}"


def numbers_of(states: EngineStates) -> Groups:
    """What the optimizer's state has under each parameter number, as one list per param group.

    Raises CorruptCheckpoint if the masters are damaged, and InconsistentCheckpoint if a group has
    more or fewer masters than numbers.
    """
    optimizer, base, file = states.first, states.bases[0], states.optimizers[0]
    kept, wrapper = base.get("state") or {}, wrapper_of(optimizer)
    numbers = [list(group["params"]) for group in base["param_groups"]]
    masters: list[list[Any]] = [[None] * len(own) for own in numbers]
    # the engine gives every trained weight a gradient, so torch's own optimizer has a state for it:
    # a parameter without one is frozen. If none has a state (plain SGD), nothing shows this
    frozen = {number for own in numbers for number in own if kept and not kept.get(number)}
    if wrapper is not None:
        stored, frozen = optimizer[WRAPPERS[wrapper]], set()
        masters = [[own] for own in stored] if FLAT_MASTERS in optimizer else stored
        if not all(isinstance(own, (list, tuple)) and all(map(_is_tensor, own)) for own in masters):
            raise CorruptCheckpoint(
                "file-damaged",
                f"{file.path}: the masters are not a list of tensors",
                file=file.path,
            )
        counts, expected = [*map(len, masters)], [*map(len, numbers)]
        if counts != expected:
            masters_of = f"masters of {listed(expected)} parameters in its groups"
            raise misfit(f"{file.path}: the optimizer", masters_of, listed(counts) or "none")
    if states.listed_shapes:
        frozen = {*(optimizer.get(FROZEN) or ())}
    groups: list[list[Number]] = [[] for _ in numbers]
    for place, numbers_of_group in enumerate(numbers):
        names = list(base["param_groups"][place].get("param_names") or ())
        names = names if len(names) == len(numbers_of_group) else [None] * len(numbers_of_group)
        for number, tensor, name in zip(numbers_of_group, masters[place], names, strict=True):
            master = None if tensor is None else TensorInFile(file, tensor)
            state = kept.get(number) or {}
            groups[place].append(Number(place, state, master, name, number in frozen))
    return groups


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def misfit(where: str, expected: str, actual: object) -> InconsistentCheckpoint:
    """The error for a group with an unexpected number of parameters or elements.

    `where` names the group and its file.
    """
    return InconsistentCheckpoint(
        "partition-does-not-fit",
        f"{where} should have {expected}, but it has {actual}",
        hint="the file was edited, or --param-names does not fit; use another copy",
    )


def shape_of(state: Any) -> Shape | None:
    """The shape of a parameter, as its optimizer states show it; None if they show none.

    Adafactor's states, one for rows and one for columns, do not show it. 0-d tensors are ignored:
    ASGD keeps some beside its average.
    """
    tensors = {k: v for k, v in (state or {}).items() if isinstance(v, Tensor) and k != "step"}
    shapes = {tensor.shape for key, tensor in tensors.items() if key in ELEMENTWISE}
    shapes = shapes or {tensor.shape for tensor in tensors.values()}
    shapes = shapes - {()} or shapes
    return shapes.pop() if len(shapes) == 1 else None
