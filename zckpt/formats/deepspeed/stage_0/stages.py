"""Opens the optimizers of a pipeline's stages without ZeRO; each is in its stage's model file.

    mp_rank_00_model_states.pt      masters and states of stage 0, by number
    layer_03-model_states.pt        weights of layer 3, without the layer in their names

In 16 bits the masters round to the weights of their layers, which shows the names. No file states
the key of a tied layer (`tied_modules.embed.weight`). If a tied layer's master rounds to a weight
in several stages, the user must give the names of all stages, one stage after another. In fp32,
shapes and the order of the layers show names, if no two layers have the same weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, product

from msgspec import Struct

from ....errors import MissingData, UnsupportedCheckpoint, WrongOption, listed
from ....files.torchfile import Tensor, TorchFile
from ...deepspeed_states.directories import TagDirectory
from ...deepspeed_states.states import FLAT_MASTERS, EngineStates, dictionary, wrapper_of
from ...reading import Reading
from ...statedict.matching import HINT
from ..files import RankFiles
from ..layer_names import of_tied, prefix_of, tied_key, untied_layers
from . import naming
from .naming import Weights
from .numbers import Shape, numbers_of
from .optimizer import WholeOptimizer, named_optimizers, states_of
from .samples import TensorInFile, alike

JOIN = ". Do it on one rank of each stage, and join the files in the order of the stages"


class WholeStages(Struct, frozen=True):
    """The opened optimizers of all stages, and which layer files belong to a tied layer.

    `tied` maps the number of such a file to the layer's key: {0: "embed", 8: "embed"}.
    """

    wholes: Sequence[WholeOptimizer]
    tied: Mapping[int, str]


def open_stages(
    directory: TagDirectory,
    files: Sequence[RankFiles],
    layers: Mapping[int, TorchFile],
    reading: Reading,
    tied: Mapping[int, str] | None,
) -> WholeStages:
    """Opens the optimizers of one tensor rank's pipeline stages.

    `layers` are the rank's layer files. `tied` maps their numbers to keys of tied layers; None if
    these are unknown. Raises MissingData (nothing shows the parameters' names), WrongOption (the
    user's names do not fit) and UnsupportedCheckpoint (several layers may be a tied one).
    """
    states = [states_of(directory, each, is_stage=True) for each in files]
    has_masters = any(wrapper_of(each.first) is not None for each in states)
    buffers = {name for each in states for name in each.buffer_names}
    hint = (naming.TRAINED if has_masters else HINT) + JOIN
    failures: list[WrongOption] = []
    fitting: list[WholeStages] = []
    names = _stated_shapes(states, reading.param_names)
    for ties in _ties(names, layers) if tied is None else [tied]:
        weights = _weights(layers, buffers, ties)
        try:
            wholes = named_optimizers(states, weights, reading.param_names)
        except WrongOption as error:
            failures.append(error)
        except MissingData as error:
            raise MissingData("names-needed", str(error), hint=hint) from error
        else:
            fitting.append(WholeStages(wholes, ties))
    if not fitting:
        raise WrongOption("names-do-not-fit", str(failures[0]), hint=hint) from failures[0]
    stages = fitting[0]
    if len(fitting) > 1:
        numbers = sorted({*chain(*(each.tied for each in fitting))})
        said = f"each of the layers {listed(numbers)} may be the tied layer"
        raise UnsupportedCheckpoint("names-needed", said, hint="no file says which layer it is")
    counts = Counter(n for each in stages.wholes for own in each.members for n in own if n)
    again = [name for name, count in counts.items() if count > 1 and tied_key(name) is None]
    if again:
        raise MissingData(
            "names-needed",
            f"{directory.path}: several stages have masters of {listed(again, 4)}: these belong to "
            "a tied layer, and no file states its key",
            hint=hint,
            file=directory.path,
        )
    return stages


def _stated_shapes(
    states: Sequence[EngineStates], param_names: Sequence[str] | None
) -> dict[str, Shape | None]:
    """The parameter names from the user or from a file that zckpt wrote, with shapes.

    A shape is None if nothing shows it.
    """
    if all(each.listed_shapes for each in states):
        return dict(chain(*(own.items() for each in states for own in each.param_shapes())))
    names = param_names or ()
    if any(FLAT_MASTERS in each.first for each in states):
        return dict.fromkeys(names)
    numbers = chain.from_iterable(chain.from_iterable(map(numbers_of, states)))
    return dict.fromkeys(names) | {n: own.shape for n, own in zip(names, numbers, strict=False)}


def _weights(
    layers: Mapping[int, TorchFile], buffers: set[str], tied: Mapping[int, str]
) -> Weights:
    """All layer files' weights, by their names in the full model; a tied weight occurs once."""
    named = (
        (prefix_of(number, tied) + inner, file, value)
        for number, file in layers.items()
        for inner, value in dictionary(file, file.value).items()
    )
    return naming.weights_in(named, buffers)


def _ties(
    shapes: Mapping[str, Shape | None], layers: Mapping[int, TorchFile]
) -> list[dict[int, str]]:
    """All possible ways to assign layer files to tied layers, each as {file's number: key}.

    `shapes` has the names and shapes of all parameters. All files that a way assigns to one tied
    layer have equal tensors.
    """
    named = {*untied_layers(shapes)}
    choices: list[list[dict[int, str]]] = []
    for key, wanted in of_tied(shapes).items():
        fitting = {
            number: {inner: TensorInFile(file, file.value[inner]) for inner in wanted}
            for number, file in layers.items()
            if number not in named
            and all(
                isinstance(tensor := dictionary(file, file.value).get(inner), Tensor)
                and shape in (None, tensor.shape)
                for inner, shape in wanted.items()
            )
        }
        choices.append([dict.fromkeys(numbers, key) for numbers in alike(fitting)] or [{}])
    return [
        {number: key for each in chosen for number, key in each.items()}
        for chosen in product(*choices)
    ]
