"""The optimizers of a pipeline's stages without ZeRO: each model file has that of its stage.

    mp_rank_00_model_states.pt      masters and states of stage 0, by number
    layer_03-model_states.pt        weights of layer 3, without the layer in their names

In 16 bits the masters round to the weights of their layers. No file states the key of a tied layer
(`tied_modules.embed.weight`): its master rounds to a weight of several stages, and then the user
must give the names. The names of all stages follow one another, those of the first stage first.
In fp32 only the order of the layers shows names, if no two layers have the same weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise, product
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ....core.grouping import by_key
from ....errors import MissingData, UnsupportedCheckpoint, WrongOption, listed
from ....files.torchfile import Tensor, TorchFile
from ....naming.layer_names import of_tied, prefix_of, tied_key, untied_layers
from ...deepspeed_states.directories import TagDirectory
from ...deepspeed_states.states import (
    FLAT_MASTERS,
    EngineStates,
    dictionary,
    wrapper_of,
)
from ...deepspeed_states.tensors import is_extra
from ...reading import Reading
from ...statedict.matching import HINT, MatchedNames, match
from ..files import RankFiles
from . import naming
from .optimizer import WholeOptimizer, named_optimizers, shapes_by_group, states_of, unnamed
from .samples import Label, TensorInFile, labels

Shape = tuple[int, ...]

JOIN = ". Do it on one rank of each stage, and join the files in the order of the stages"


class WholeStages(Struct, frozen=True):
    """The optimizers of all stages, and the keys of tied layers by the numbers of their files."""

    wholes: Sequence[WholeOptimizer]
    tied: Mapping[int, str]


def open_stages(
    directory: TagDirectory,
    files: Sequence[RankFiles],
    layers: Mapping[int, TorchFile],
    reading: Reading,
    tied: Mapping[int, str] | None = None,
) -> WholeStages:
    """The optimizers of the stages of one tensor rank, whose layers have the files `layers`.

    `tied` gives the keys of tied layers by the numbers of their files, if they are known already.
    Then the weights alone need no further names.
    Raises MissingData if nothing shows the names of their parameters, WrongOption for names that do
    not fit, UnsupportedCheckpoint if several layers may be a tied one.
    """
    states = [states_of(directory, each, is_stage=True) for each in files]
    buffers = {name for each in states for name in each.model.get("buffer_names") or ()}
    shapes: dict[str, Shape | None] = {}
    if all(each.model.get("param_shapes") for each in states):  # zckpt wrote them
        every = [group for each in states for group in each.param_shapes()]
        shapes = {name: shape for group in every for name, shape in group.items()}
    elif (names := reading.param_names) is not None:
        is_flat = any(FLAT_MASTERS in each.first for each in states)
        known = [shape for each in states for group in shapes_by_group(each) for shape in group]
        shapes = dict.fromkeys(names) | ({} if is_flat else dict(zip(names, known, strict=False)))
    has_masters = any(wrapper_of(each.first) is not None for each in states)
    if tied is not None and reading.weights_only and not has_masters:
        first, *others = states
        weights = _weights(layers, buffers, tied)
        wholes = [unnamed(first, weights), *(unnamed(each, {}) for each in others)]
        return WholeStages(wholes, tied)
    failures: list[WrongOption] = []
    fitting: list[WholeStages] = []
    for ties in [tied] if tied else _ties(shapes, layers):
        weights = _weights(layers, buffers, ties)
        try:
            fitting.append(WholeStages(_named(states, layers, weights, reading), ties))
        except WrongOption as error:
            failures.append(error)
    if not fitting:
        raise WrongOption(str(failures[0]), hint=_hint(states[0])) from failures[0]
    stages = fitting[0]
    if len(fitting) > 1:
        numbers = sorted({*chain(*(each.tied for each in fitting))})
        raise UnsupportedCheckpoint(
            f"each of the layers {listed([*map(str, numbers)])} may be a tied one",
            hint="no file says which one it is",
        )
    counts = Counter(n for each in stages.wholes for own in each.members for n in own if n)
    again = [name for name, count in counts.items() if count > 1 and tied_key(name) is None]
    if again:
        raise MissingData(
            f"{directory.path}: several stages have the masters of {listed(again, 4)}, so it is a "
            "tied layer, and no file states its key",
            hint=_hint(states[0]),
        )
    return stages


def _named(
    states: Sequence[EngineStates],
    layers: Mapping[int, TorchFile],
    weights: Mapping[str, TensorInFile],
    reading: Reading,
) -> list[WholeOptimizer]:
    """The optimizers of all stages, whose parameters are among the weights of all layers."""
    names = reading.param_names
    try:
        return named_optimizers(states, weights, Reading(param_names=names))
    except MissingData as error:
        matched = _in_order(states, layers, weights) if names is None else None
        if matched is None:
            raise MissingData(str(error), hint=_hint(states[0])) from error
        in_order = Reading(param_names=[*chain.from_iterable(matched.names)])
        wholes = named_optimizers(states, weights, in_order)
        return [replace(each, inferred=matched.inferred) for each in wholes]


def _weights(
    layers: Mapping[int, TorchFile], buffers: set[str], tied: Mapping[int, str]
) -> dict[str, TensorInFile]:
    """The weights of all layers by their names in the whole model, tied ones once."""
    named = (
        (prefix_of(number, tied) + inner, file, value)
        for number, file in layers.items()
        for inner, value in dictionary(file, file.value).items()
    )
    return naming.weights_in(named, buffers)


def _in_order(
    states: Sequence[EngineStates],
    layers: Mapping[int, TorchFile],
    weights: Mapping[str, TensorInFile],
) -> MatchedNames | None:
    """The names of each stage's parameters, which torch's own optimizer has in the layers' order.

    Group by group, the stages' parameters follow each other as the layers do. None if several ways
    fit, or none, and if two layers have equal weights: they may be a tied layer.
    """
    if any(wrapper_of(each.first) is not None for each in states):
        return None
    groups = [shapes_by_group(each) for each in states]
    counts = {len(own) for own in groups}
    if len(counts) > 1 or _has_layers_alike(layers):
        return None
    orders = [[shape for own in groups for shape in own[number]] for number in range(counts.pop())]
    try:
        matched = match(orders, [(n, each.tensor.shape) for n, each in weights.items()], True)
    except MissingData:
        return None
    remaining = [iter(own) for own in matched.names]
    names = [
        [next(remaining[number]) for number, group in enumerate(own) for _ in group]
        for own in groups
    ]
    known = [numbers for own in names if (numbers := untied_layers(own))]
    if any(max(own) >= min(following) for own, following in pairwise(known)):
        return None
    return MatchedNames(names, matched.inferred)


def _has_layers_alike(layers: Mapping[int, TorchFile]) -> bool:
    """Whether two layers have tensors of the same names and bytes."""
    stored = [
        (number, inner, TensorInFile(file, value))
        for number, file in layers.items()
        for inner, value in dictionary(file, file.value).items()
        if not is_extra(inner, value)
    ]
    tensors = [tensor for _, _, tensor in stored]
    pairs = zip(stored, labels(tensors, tensors)[0], strict=True)
    contents = by_key((number, (inner, label)) for (number, inner, _), label in pairs)
    return len({tuple(each) for each in contents.values()}) < len(contents)


def _hint(states: EngineStates) -> str:
    return (HINT if wrapper_of(states.first) is None else naming.TRAINED) + JOIN


def _ties(
    shapes: Mapping[str, Shape | None], layers: Mapping[int, TorchFile]
) -> list[dict[int, str]]:
    """All ways to give files of layers, by their numbers, the keys of tied ones.

    `shapes` are those of all names. Files of one tied layer have the same tensors.
    """
    named = {*untied_layers(shapes)}
    choices: list[list[dict[int, str]]] = []
    for key, wanted in of_tied(shapes).items():
        places = [
            number
            for number, file in layers.items()
            if number not in named and _has(dictionary(file, file.value), wanted)
        ]
        contents: list[list[Label]] = [[] for _ in places]
        for inner in wanted:
            tensors = [TensorInFile(layers[n], layers[n].value[inner]) for n in places]
            for content, label in zip(contents, labels(tensors, tensors)[0], strict=True):
                content.append(label)
        alike = by_key((tuple(c), number) for c, number in zip(contents, places, strict=True))
        choices.append([dict.fromkeys(numbers, key) for numbers in alike.values()] or [{}])
    return [
        {number: key for each in chosen for number, key in each.items()}
        for chosen in product(*choices)
    ]


def _has(tensors: Mapping[str, Any], wanted: Mapping[str, Shape | None]) -> bool:
    """Whether the file of a layer has these tensors."""
    return all(
        isinstance(tensor := tensors.get(inner), Tensor) and shape in (None, tensor.shape)
        for inner, shape in wanted.items()
    )
