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
    """The parts of a tensor's name in a pipeline: its layer, and the name within the layer.

    "3.fc.weight" has `number` 3 and `inner` "fc.weight". "tied_modules.embed.weight" has `key`
    "embed", the key of a tied layer, and `inner` "weight".
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
    """The beginning of a tensor's full name, which its name in the layer's file lacks.

    It is "3." for layer 3, and "tied_modules.embed." for the tied layer `embed`. `tied` maps the
    numbers of tied layers to their keys: {0: "embed"}.
    """
    return f"{TIED}{tied[number]}." if number in tied else f"{number}."


def tied_key(name: str) -> str | None:
    """The key of a tied layer's tensor ("embed" of "tied_modules.embed.weight"); else None."""
    return LayerName.of(name).key


def untied_layers(names: Iterable[str]) -> list[int]:
    """The layer numbers in the given names; names of tied layers' tensors are skipped."""
    numbers = (LayerName.of(name).number for name in names)
    return [number for number in numbers if number is not None]


def of_tied(values: Mapping[str, Value]) -> dict[str, dict[str, Value]]:
    """Groups the tensors of tied layers by the layer's key, then by the name within the layer.

    {"tied_modules.embed.weight": x, "3.fc.weight": y} becomes {"embed": {"weight": x}}.
    """
    parts = ((LayerName.of(name), value) for name, value in values.items())
    inner_names = by_key(
        (part.key, (part.inner, value)) for part, value in parts if part.key is not None
    )
    return {key: dict(each) for key, each in inner_names.items()}


def layers_with(name: str, uses: Uses) -> Sequence[int]:
    """The numbers of the layers that contain the parameter `name`; several for a tied layer.

    `uses` maps each tied layer's key to the numbers of the layers that use it: {"embed": {0, 8}}.
    """
    key = tied_key(name)
    return untied_layers([name]) if key is None else sorted(uses.get(key, ()))


# -- the stages of a pipeline


def uses_of_files(pipeline: Pipeline) -> dict[str, set[int]]:
    """Maps each tied layer's key to the numbers of its layer files: {"embed": {0, 8}}."""
    keys = (tied_key(name) for names in pipeline.parameters for name in names)
    of_files = by_key((key, number) for number, key in pipeline.tied.items())
    return {key: {*of_files.get(key, ())} for key in keys if key is not None}


def spans(pipeline: Pipeline, count: int) -> list[range]:
    """For each stage, the range of layers that the stage may have.

    `count` is the number of all layers. Parameter names show some layers of each stage. The range
    begins after the last layer shown in an earlier stage, and ends before the first layer shown in
    a later one.
    """
    shown = [untied_layers(names) for names in pipeline.parameters]
    layers_of_stages = []
    for stage in range(len(shown)):
        before = chain.from_iterable(shown[:stage])
        after = chain.from_iterable(shown[stage + 1 :])
        layers_of_stages.append(range(max(before, default=-1) + 1, min(after, default=count)))
    return layers_of_stages


def spans_with(pipeline: Pipeline, key: str, count: int) -> list[range]:
    """For each stage with a copy of the tied layer `key`, the range of layers it may have.

    `spans` computes these ranges. `count` is the number of all layers.
    """
    stages = zip(pipeline.parameters, spans(pipeline, count), strict=True)
    return [span for names, span in stages if key in map(tied_key, names)]
