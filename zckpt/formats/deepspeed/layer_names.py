"""Parses names of pipeline tensors: the layer of a tensor, and the layers that a stage may have.

    3.fc.weight                     of layer 3
    tied_modules.embed.weight       of the tied layer `embed`, wherever it is used

In files of layers, these tensors are named `fc.weight` and `weight`. A pipeline stage has the
layers whose numbers are in its parameter names. It may also have tied layers, functions and frozen
layers, which these names do not show. Such layers lie between the last number of the previous stage
and the first number of the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

from msgspec import Struct

from ...core.checkpoint.facts import Pipeline
from ...core.grouping import by_key

TIED = "tied_modules."
Value = TypeVar("Value")

Uses = Mapping[str, set[int]]  # for each tied layer's key, the numbers of the layers that use it


class LayerName(Struct, frozen=True):
    """The parts of a tensor's name in a pipeline: its layer, and the rest of the name.

    The layer is a `number`, or the `key` of a tied layer.
    """

    number: int | None
    key: str | None
    inner: str

    @classmethod
    def of(cls, name: str) -> LayerName:
        head, _, inner = name.removeprefix(TIED).partition(".")
        if name.startswith(TIED):
            return cls(None, head, inner)
        return cls(int(head) if head.isdecimal() else None, None, inner)


def prefix_of(number: int, tied: Mapping[int, str]) -> str:
    """The part of a full name that comes before a tensor's name in a layer's file.

    It contains the layer's number or, for a tied layer, its key. `tied` maps the numbers of tied
    layers to their keys.
    """
    return f"{TIED}{tied[number]}." if number in tied else f"{number}."


def tied_key(name: str) -> str | None:
    """The key of the tied layer that a tensor belongs to; None for a tensor of another layer."""
    return LayerName.of(name).key


def untied_layers(names: Iterable[str]) -> list[int]:
    """The layer numbers in the given names; names of tied layers' tensors are skipped."""
    numbers = (LayerName.of(name).number for name in names)
    return [number for number in numbers if number is not None]


def of_tied(values: Mapping[str, Value]) -> dict[str, dict[str, Value]]:
    """Selects the tensors of tied layers: a dictionary by the layer's key, then by the inner name.

    The inner name is the tensor's name without the layer.
    """
    parts = ((LayerName.of(name), value) for name, value in values.items())
    inner_names = by_key(
        (part.key, (part.inner, value)) for part, value in parts if part.key is not None
    )
    return {key: dict(each) for key, each in inner_names.items()}


def layers_with(name: str, uses: Uses) -> Sequence[int]:
    """The numbers of the layers that contain the parameter `name`; several for a tied layer.

    `uses` maps the keys of tied layers to the layers at which they are used.
    """
    key = tied_key(name)
    return untied_layers([name]) if key is None else sorted(uses.get(key, ()))


# -- the stages of a pipeline


def uses_of_files(pipeline: Pipeline) -> dict[str, set[int]]:
    """Maps each tied layer's key to the numbers of the layer files with the layer's tensors."""
    keys = (tied_key(name) for names in pipeline.parameters for name in names)
    of_files = by_key((key, number) for number, key in pipeline.tied.items())
    return {key: {*of_files.get(key, ())} for key in keys if key is not None}


def spans(pipeline: Pipeline, count: int) -> list[range]:
    """For each stage, the range of layers that it can have, if there are `count` layers.

    The range begins after the last layer that is known to be in an earlier stage, and ends before
    the first layer that is known to be in a later one. Parameter names show these layers.
    """
    shown = [untied_layers(names) for names in pipeline.parameters]
    layers_of_stages = []
    for stage in range(len(shown)):
        before = chain.from_iterable(shown[:stage])
        after = chain.from_iterable(shown[stage + 1 :])
        layers_of_stages.append(range(max(before, default=-1) + 1, min(after, default=count)))
    return layers_of_stages


def spans_with(pipeline: Pipeline, key: str, count: int) -> list[range]:
    """The layer ranges of the stages that have a copy of the tied layer `key`."""
    stages = zip(pipeline.parameters, spans(pipeline, count), strict=True)
    return [span for names, span in stages if key in map(tied_key, names)]
