"""Do all ranks state the same facts of their run, and every file the rank that its name says?"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

from ...core.filenames import numbers_of
from ...core.saved_names import Place, nameless, refuse_others, saved_names
from ...errors import InconsistentCheckpoint, brief
from ...files.torchfile import Tensor, TorchFile
from .directories import EXPERT, LAYER, MODEL, MODEL_3, OF_EP, OPTIMIZER
from .states import COUNTERS, comparable

MIXED = "files of different saves seem to be mixed; take those of one tag"
OF_MODELS = (
    *COUNTERS,
    *("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_version"),
    *("param_shapes", "frozen_param_shapes", "buffer_names", "num_experts"),
)


def check_models(files: Sequence[TorchFile]) -> None:
    """Raises InconsistentCheckpoint if a model file states another fact than the first one."""
    values = [file.value for file in files]
    check_facts(files, values, lambda model: {key: model.get(key) for key in OF_MODELS})


def check_facts(
    files: Sequence[TorchFile],
    states: Sequence[dict[str, Any]],
    facts: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    """Raises InconsistentCheckpoint if the `facts` of a state are others than the first one's.

    `states` are in the files, one in each.
    """
    values = for_each(states, facts)
    _check_tensors(files, values)
    for file, value in zip(files, values, strict=True):
        if (difference := _difference(value, values[0])) is not None:
            fact, own, first = difference
            raise InconsistentCheckpoint(
                f"{file.path} states {fact} {brief(own)}, and {os.path.basename(files[0].path)} "
                f"{brief(first)}",
                hint=MIXED,
            )


def _check_tensors(files: Sequence[TorchFile], values: Sequence[dict[str, Any]]) -> None:
    """The same of the tensors in facts: files with equal pickles may have other bytes in them."""
    for key, first in values[0].items():
        if not any(_tensors(first)):
            continue
        for file, value in zip(files[1:], values[1:], strict=True):
            one, other = files[0].summary(first), file.summary(value.get(key))
            if comparable(first) == comparable(value.get(key)) and one != other:
                named = os.path.basename(files[0].path)
                raise InconsistentCheckpoint(
                    f"{file.path} has other tensors in {key} than {named}", hint=MIXED
                )


def _tensors(value: Any) -> Iterator[bool]:
    """One item for each tensor in dictionaries and lists."""
    if isinstance(value, Tensor):
        yield True
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def for_each(states: Sequence[dict[str, Any]], of: Callable[[dict[str, Any]], Any]) -> list[Any]:
    """`of` each rank's state, asked once for ranks whose equal pickles were parsed once."""
    values: dict[int, Any] = {}
    for state in states:
        if id(state) not in values:
            values[id(state)] = of(state)
    return [values[id(state)] for state in states]


def _difference(own: Any, first: Any, fact: str = "") -> tuple[str, Any, Any] | None:
    """The first difference inside of two values, and what it is of; None if they are equal."""
    if own is first or own == first:
        return None
    pairs: list[tuple[str, Any, Any]] = []
    if isinstance(own, dict) and isinstance(first, dict):
        pairs = [(f"{fact}.{key}", own.get(key), first.get(key)) for key in {**first, **own}]
    elif isinstance(own, list) and isinstance(first, list):
        pairs = [(f"{fact}[{n}]", *both) for n, both in enumerate(zip_longest(own, first))]
    for inside, a, b in pairs:
        if (difference := _difference(a, b, inside.removeprefix("."))) is not None:
            return difference
    # tensors and objects of two pickles, or another order
    return None if comparable(own) == comparable(first) else (fact, own, first)


# -- whether every file states the rank that its name says


KINDS = (MODEL, MODEL_3, OPTIMIZER, EXPERT, OF_EP, LAYER)


def check_names(files: Iterable[TorchFile]) -> list[str]:
    """Notes on files whose names prove nothing; `files` are all of a directory.

    All numbers in a name count: of the data rank, the model rank, a layer, an expert. Raises
    InconsistentCheckpoint if the file of one rank was saved as that of another one.
    """
    names = saved_names({file.path: file.saved_as for file in files}, place_of)
    refuse_others(names)
    return nameless(names)


def place_of(name: str) -> Place | None:
    """The kind of a rank's file, and the numbers in its name; None for any other file."""
    for kind in KINDS:
        if numbers := numbers_of(kind, name):
            # without a second number, a layer is of the only tensor rank
            return kind, (*numbers, 0)[:2] if kind is LAYER else numbers
    return None
