"""What a run without ZeRO (stage 0) saved: the whole optimizer, in the model file.

    model["optimizer"]          masters                            base optimizer
    torch's own, fp32           the module's weights               state, param_groups
    FP16_Optimizer              fp32_groups_flat, one per group    optimizer_state_dict
    FP16_UnfusedOptimizer       fp32_groups, one per parameter     optimizer_state_dict

Every rank has the same, and rank 0 saves it. Both wrappers make one update with zero gradients when
they are built, which their steps count: 4 after 3 updates (0.19.8).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ....errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    MissingData,
    WrongOption,
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
from ...reading import Reading
from ...statedict.matching import match
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
    module = ((name, states.models[0], own) for name, own in states.model["module"].items())
    weights = naming.weights_in(module, {*(states.model.get("buffer_names") or ())})
    (whole,) = named_optimizers([states], weights, reading)
    return whole


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


def named_optimizers(
    every: Sequence[EngineStates], weights: Weights, reading: Reading
) -> list[WholeOptimizer]:
    """Optimizers with names of their parameters, which are among `weights`.

    The user's names are those of all optimizers, one after another. Raises MissingData as
    `open_whole`, and WrongOption for names that do not fit.
    """
    are_stated = any(states.model.get("param_shapes") for states in every)
    given = None if are_stated else reading.param_names
    groups = None if given is None else iter(_given(every, weights, given))
    return [_named(states, weights, reading, groups) for states in every]


def _named(
    states: EngineStates, weights: Weights, reading: Reading, groups: Iterator[Sequence[str]] | None
) -> WholeOptimizer:
    """One optimizer; `groups` are the user's names of its groups, if there are any."""
    path, shapes = states.optimizers[0].path, shapes_of(weights)
    if states.model.get("param_shapes") and not weights:  # a stage whose layers are not there yet
        shapes = {name: shape for group in states.param_shapes() for name, shape in group.items()}
    try:
        members, inferred = _members(states, weights, groups)
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


# -- names


def _given(
    every: Sequence[EngineStates], weights: Weights, param_names: Sequence[str]
) -> list[Sequence[str]]:
    """The user's names by group; those of flat masters are without frozen ones."""
    flats = [flat for states in every for flat in _masters(states, FLAT_MASTERS)]
    if flats:
        return naming.cut(flats, weights, param_names)
    shapes = [shapes_by_group(states) for states in every]
    counts = [sum(map(len, own)) for own in shapes]
    if counts[1:] and sum(counts) != len(param_names):
        raise WrongOption(
            f"--param-names names {len(param_names)} parameters, and the optimizers of the stages "
            f"have {' + '.join(map(str, counts))}"
        )
    groups: list[Sequence[str]] = []
    start = 0
    for own, count in zip(shapes, counts, strict=True):  # several may have one tied weight
        names = param_names[start : start + count] if counts[1:] else param_names
        groups += match(own, [*shapes_of(weights).items()], True, names).names
        start += count
    masters = [own for states in every for own in _masters(states, WHOLE_MASTERS)]
    if masters:
        naming.check_rounding(masters, param_names, weights, strict=False)
    return groups


def _members(
    states: EngineStates, weights: Weights, given: Iterator[Sequence[str]] | None
) -> tuple[Members, Sequence[str]]:
    """The names of each group's parameters, and those of them that are inferred."""
    optimizer, base = states.first, states.bases[0]
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
    groups = None if given is None else [next(given) for _ in numbers]
    if wrapper_of(optimizer) is None:
        return _of_torch(states, numbers, weights, groups)
    if groups is not None:
        return groups, []
    if FLAT_MASTERS in optimizer:
        return _of_flats(_masters(states, FLAT_MASTERS), weights)
    masters = iter(_masters(states, WHOLE_MASTERS))
    return naming.by_bytes([[next(masters) for _ in own] for own in numbers], weights)


def _masters(states: EngineStates, key: str) -> list[TensorInFile]:
    """All masters of a wrapper, flat or whole; none if it has others."""
    file, stated = states.optimizers[0], states.first.get(key) or []
    groups = [stated] if key == FLAT_MASTERS else stated
    return [TensorInFile(file, tensor) for group in groups for tensor in _tensors(file, group)]


def _of_flats(flats: Sequence[TensorInFile], weights: Weights) -> tuple[Members, Sequence[str]]:
    """The names of flat masters, as views or bytes show them."""
    if naming.are_apart(flats[0], weights):
        return naming.by_pieces(flats, weights)
    if (names := naming.by_place(flats, weights)) is None:
        raise MissingData(
            f"{flats[0].file.path}: the optimizer's state has no names, and the module's weights "
            "no longer lie in its groups' buffers, which show them",
            hint=naming.TRAINED,
        )
    return names, []


def _of_torch(
    states: EngineStates,
    numbers: Sequence[Sequence[Any]],
    weights: Weights,
    given: Sequence[Sequence[str]] | None,
) -> tuple[Members, Sequence[str]]:
    """The names of what torch's own optimizer updates: the module's weights themselves.

    The engine gives every weight that is trained a gradient, so that one without a state is frozen.
    If none has a state, as with plain SGD, nothing shows which are frozen.
    """
    path, state = states.optimizers[0].path, states.bases[0].get("state") or {}
    groups = states.bases[0]["param_groups"]
    is_frozen = [[bool(state) and not state.get(number) for number in own] for own in numbers]
    stated = [list(group.get("param_names") or ()) for group in groups]  # torch >= 2.6
    inferred: list[str] = []
    if given is not None:
        every = given
    elif [len(own) for own in stated] == [len(own) for own in numbers]:
        every = stated
    else:
        trained = [
            [shape for shape, frozen in zip(own, flags, strict=True) if not frozen]
            for own, flags in zip(shapes_by_group(states), is_frozen, strict=True)
        ]
        names, inferred = naming.by_shape(path, trained, weights)
        remaining = iter(chain.from_iterable(names))
        every = [["" if frozen else next(remaining) for frozen in flags] for flags in is_frozen]
    return [
        [None if frozen else name for name, frozen in zip(own, flags, strict=True)]
        for own, flags in zip(every, is_frozen, strict=True)
    ], inferred


def shapes_by_group(states: EngineStates) -> list[list[Shape | None]]:
    """The shapes of an optimizer's whole masters, or of the states of torch's own; None if unknown.

    They stand group by group.
    """
    if WHOLE_MASTERS in states.first:
        return [[master.shape for master in group] for group in states.first[WHOLE_MASTERS]]
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
