"""What a run without ZeRO (stage 0) saved: the whole optimizer, in the model file.

    model["optimizer"]          masters                            base optimizer
    torch's own, fp32           the module's weights               state, param_groups
    FP16_Optimizer              fp32_groups_flat, one per group    optimizer_state_dict
    FP16_UnfusedOptimizer       fp32_groups, one per parameter     optimizer_state_dict

Every rank has the same, and rank 0 saves it. Both wrappers make one update with zero gradients when
they are built, which their steps count: 4 after 3 updates (0.19.8).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ....core.dtypes import FLOATS
from ....errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    MissingData,
    listed,
)
from ....files.torchfile import Tensor, TorchFile
from ...deepspeed_states.directories import TagDirectory, refuse
from ...deepspeed_states.manifest import INFERRED
from ...deepspeed_states.states import (
    FLAT_MASTERS,
    WHOLE_MASTERS,
    EngineStates,
    dictionary,
    open_files,
    stated_config,
    version_of,
    wrapper_of,
)
from ...deepspeed_states.tensors import is_extra
from ...reading import Reading
from ...statedict.names import ELEMENTWISE
from ..files import RankFiles
from ..ranks import check_kind, without_optimizer
from . import naming
from .naming import Weights, shapes_of
from .samples import TensorInFile

Shape = tuple[int, ...]
Members = Sequence[Sequence[str | None]]
FROZEN = "zckpt_frozen"
"""Beside the optimizer's state, in a file of zckpt's: numbers of parameters that are frozen."""


class WholeOptimizer(Struct, frozen=True):
    """The opened model file, and the names of the optimizer's parameters.

    `members` are those of each group in the optimizer's order; None is a parameter without a state,
    which is frozen. `inferred` are names that only an order shows, `module` are those of all
    weights. Without `named`, nothing shows the names, and only the weights are read.
    """

    states: EngineStates
    members: Members
    inferred: Sequence[str]
    module: Sequence[str]
    named: bool = True

    @property
    def file(self) -> TorchFile:
        """The file with the optimizer."""
        return self.states.optimizers[0]


def open_whole(directory: TagDirectory, files: RankFiles, reading: Reading) -> WholeOptimizer:
    """The model file with its optimizer, whose parameters have names.

    Raises IncompleteCheckpoint if there is no optimizer, and MissingData if nothing shows the names
    of its parameters; for the weights alone not where the weights need none.
    """
    states = states_of(directory, files)
    return named_optimizer(states, _weights(states), reading)


def states_of(directory: TagDirectory, files: RankFiles, *, is_stage: bool = False) -> EngineStates:
    """What the model file says; that of a stage has no weights.

    Raises IncompleteCheckpoint if it has no optimizer, CorruptCheckpoint if that has no state.
    """
    (file, *_) = open_files(files.models, files.parsed)
    model = dictionary(file, file.value)
    if is_stage and model.get("module") is None:
        model = {**model, "module": {}}
    if (files.experts or model.get("num_experts")) and not files.of_ep:
        raise IncompleteCheckpoint(
            f"{directory.path} has experts, and lacks the optimizers of all ep ranks",
            hint="expected expp_rank_0_mp_rank_00_optim_states.pt and one per further rank (stage "
            "0), or zero_pp_rank_0_mp_rank_00_optim_states.pt and one per further rank",
        )
    if files.experts or files.of_ep or model.get("num_experts"):
        refuse(directory, "mixture-of-experts layers in ZeRO stage 0 on several model ranks")
    return states_with(directory, file, model, file, model.get("optimizer"))


def states_with(
    directory: TagDirectory,
    file: TorchFile,
    model: dict[str, Any],
    beside: TorchFile,
    optimizer: Any,
) -> EngineStates:
    """What a model file says, with an `optimizer` that lies in the file `beside`, or in it.

    Raises as `states_of`.
    """
    if not isinstance(optimizer, dict) or not optimizer:
        raise without_optimizer(directory)
    version = version_of(model)
    check_kind(directory, version, model, stated_config(model, model))
    wrapper = wrapper_of(optimizer)
    base = optimizer if wrapper is None else optimizer.get("optimizer_state_dict")
    if not isinstance(base, dict) or not isinstance(base.get("param_groups"), list):
        raise CorruptCheckpoint(f"{beside.path} holds no state of a torch optimizer")
    dp = model.get("dp_world_size")
    return EngineStates(
        directory,
        [file],
        [beside],
        model,
        [optimizer],
        [base],
        version,
        dp if isinstance(dp, int) and dp > 0 else 1,
        partitioned=False,
        whole=True,
    )


def named_optimizer(states: EngineStates, weights: Weights, reading: Reading) -> WholeOptimizer:
    """The optimizer with names of its parameters, which are among `weights`.

    Raises MissingData as `open_whole`.
    """
    path, shapes = states.optimizers[0].path, shapes_of(weights)
    if states.model.get("param_shapes") and not weights:  # a stage whose layers are not there yet
        shapes = {name: shape for group in states.param_shapes() for name, shape in group.items()}
    try:
        members, inferred = _members(states, weights, reading.param_names)
    except MissingData:
        if not reading.weights_only or wrapper_of(states.first) is not None:  # masters are weights
            raise
        return unnamed(states, weights)
    if unknown := [name for own in members for name in own if name and name not in shapes]:
        raise InconsistentCheckpoint(f"{path}: the module has no weights {listed(unknown)}")
    named = with_names(states, members, inferred, shapes)
    return replace(named, module=[*(states.model["module"] or shapes)])


def unnamed(states: EngineStates, weights: Weights) -> WholeOptimizer:
    """The model file with these weights alone."""
    named = with_names(states, [[*weights]], [], shapes_of(weights))
    return replace(named, members=[], named=False)


def with_names(
    states: EngineStates,
    members: Members,
    inferred: Sequence[str],
    shapes: Mapping[str, Shape],
) -> WholeOptimizer:
    """The optimizer with names and shapes by group, which the engine does not save in stage 0.

    `shapes` are those of all weights.
    """
    own = [{name: shapes[name] for name in group if name is not None} for group in members]
    named = replace(states, model={**states.model, "param_shapes": own})
    return WholeOptimizer(named, members, inferred, [*shapes])


def _weights(states: EngineStates) -> dict[str, TensorInFile]:
    """The module's weights by their first names: no buffers, and each place in memory once."""
    buffers = {*(states.model.get("buffer_names") or ())}
    places: dict[object, str] = {}
    weights = {}
    for name, value in states.model["module"].items():
        if name in buffers or is_extra(name, value) or value.dtype not in FLOATS:
            continue
        place = (value.place, value.shape, value.strides) if value.numel else name
        if places.setdefault(place, name) == name:
            weights[name] = TensorInFile(states.models[0], value)
    return weights


# -- names


def _members(
    states: EngineStates, weights: Weights, param_names: Sequence[str] | None
) -> tuple[Members, Sequence[str]]:
    """The names of each group's parameters, and those of them that are inferred."""
    file, optimizer, base = states.optimizers[0], states.first, states.bases[0]
    numbers = [list(group["params"]) for group in base["param_groups"]]
    if stated := states.model.get("param_shapes"):
        frozen = set(optimizer.get(FROZEN) or ())
        own = [iter(group) for group in stated]
        flat = FLAT_MASTERS in optimizer
        members = [
            list(group) if flat else [None if n in frozen else next(names, None) for n in known]
            for group, names, known in zip(stated, own, numbers, strict=True)
        ]
        return members, list(optimizer.get(INFERRED) or ())
    if FLAT_MASTERS in optimizer:
        flats = _tensors(file, optimizer[FLAT_MASTERS])
        return _of_flats(file, flats, weights, param_names), []
    if WHOLE_MASTERS in optimizer:
        masters = [_tensors(file, group) for group in optimizer[WHOLE_MASTERS]]
        if param_names is not None:
            return naming.of_masters(file, masters, weights, param_names), []
        return naming.by_bytes(file, masters, weights)
    return _of_torch(states, numbers, weights, param_names)


def _of_flats(
    file: TorchFile,
    flats: Sequence[Tensor],
    weights: Weights,
    param_names: Sequence[str] | None,
) -> Members:
    """The names of flat masters; the user's are in the order of the groups, without frozen ones."""
    if param_names is not None:
        return naming.cut(file, flats, weights, param_names)
    apart = naming.are_apart(file, weights)
    names = (naming.in_sequence if apart else naming.by_place)(file, flats, weights)
    if names is None:
        raise MissingData(
            f"{file.path}: the optimizer's state has no names, and "
            + (
                "a piece of its masters rounds to no weight of a layer, or to several"
                if apart
                else "the module's weights no longer lie in its groups' buffers, which show them"
            ),
            hint=naming.TRAINED,
        )
    return names


def _of_torch(
    states: EngineStates,
    numbers: Sequence[Sequence[Any]],
    weights: Weights,
    param_names: Sequence[str] | None,
) -> tuple[Members, Sequence[str]]:
    """The names of what torch's own optimizer updates: the module's weights themselves.

    The engine gives every weight that is trained a gradient, so that one without a state is frozen.
    If none has a state, as with plain SGD, nothing shows which are frozen.
    """
    path, state = states.optimizers[0].path, states.bases[0].get("state") or {}
    groups = states.bases[0]["param_groups"]
    shapes = shapes_by_group(states)
    is_frozen = [[bool(state) and not state.get(number) for number in own] for own in numbers]
    stated = [list(group.get("param_names") or ()) for group in groups]  # torch >= 2.6
    inferred: list[str] = []
    if param_names is not None:
        every = naming.by_param_names(path, shapes, weights, param_names)
    elif [len(own) for own in stated] == [len(own) for own in numbers]:
        every = stated
    else:
        trained = [
            [shape for shape, frozen in zip(own, flags, strict=True) if not frozen]
            for own, flags in zip(shapes, is_frozen, strict=True)
        ]
        names, inferred = naming.by_shape(path, trained, weights)
        remaining = iter(chain.from_iterable(names))
        every = [["" if frozen else next(remaining) for frozen in flags] for flags in is_frozen]
    return [
        [None if frozen else name for name, frozen in zip(own, flags, strict=True)]
        for own, flags in zip(every, is_frozen, strict=True)
    ], inferred


def shapes_by_group(states: EngineStates) -> list[list[Shape | None]]:
    """The shapes of what torch's own optimizer has, group by group; None if not known."""
    state = states.bases[0].get("state") or {}
    groups = states.bases[0]["param_groups"]
    return [[shape_of(state.get(number)) for number in group["params"]] for group in groups]


def shape_of(state: Any) -> Shape | None:
    """The shape of a parameter, as its states show it; None if they do not.

    Adafactor keeps rows and columns: no shape is taken from those. ASGD keeps numbers beside its
    average, as tensors without dimensions.
    """
    tensors = {k: v for k, v in (state or {}).items() if isinstance(v, Tensor) and k != "step"}
    shapes = {tensor.shape for key, tensor in tensors.items() if key in ELEMENTWISE}
    shapes = shapes or {tensor.shape for tensor in tensors.values()}
    shapes = shapes - {()} or shapes
    return shapes.pop() if len(shapes) == 1 else None


def _tensors(file: TorchFile, value: Any) -> list[Tensor]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, Tensor) for v in value):
        raise CorruptCheckpoint(f"{file.path}: the masters are not a list of tensors")
    return list(value)
