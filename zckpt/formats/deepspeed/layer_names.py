"""Which layer of a pipeline has a tensor, and which stage may have a layer, as names say it?

    3.fc.weight                     of layer 3
    tied_modules.embed.weight       of the tied layer `embed`, wherever it is used

In files of layers both have the rest of the name alone. A stage has the layers whose numbers are in
its names, and some of those up to the next stages' numbers: tied ones, functions and frozen ones.
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

Uses = Mapping[str, set[int]]  # numbers of the layers at which a tied layer is used, by its key


class LayerName(Struct, frozen=True):
    """A name: the `number` of a layer, or the `key` of a tied one, and what follows."""

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
    """What precedes the names in the file of a layer; `tied` are the keys of tied ones."""
    return f"{TIED}{tied[number]}." if number in tied else f"{number}."


def tied_key(name: str) -> str | None:
    """The key of a tied layer's tensor; None for one of another layer."""
    return LayerName.of(name).key


def untied_layers(names: Iterable[str]) -> list[int]:
    """The layer of each tensor that is of no tied one."""
    numbers = (LayerName.of(name).number for name in names)
    return [number for number in numbers if number is not None]


def of_tied(values: Mapping[str, Value]) -> dict[str, dict[str, Value]]:
    """What is said of the tensors of tied layers, by key and by the name in the file."""
    parts = ((LayerName.of(name), value) for name, value in values.items())
    own = by_key((part.key, (part.inner, value)) for part, value in parts if part.key is not None)
    return {key: dict(each) for key, each in own.items()}


def layers_with(name: str, uses: Uses) -> Sequence[int]:
    """The layers that have a parameter."""
    key = tied_key(name)
    return untied_layers([name]) if key is None else sorted(uses.get(key, ()))


# -- the stages of a pipeline


def uses_of_files(pipeline: Pipeline) -> dict[str, set[int]]:
    """The layers at which tied ones have files, by key."""
    keys = (tied_key(name) for names in pipeline.parameters for name in names)
    of_files = by_key((key, number) for number, key in pipeline.tied.items())
    return {key: {*of_files.get(key, ())} for key in keys if key is not None}


def spans(pipeline: Pipeline, count: int) -> list[range]:
    """The layers, of so many, that each stage may have: others show theirs by numbers."""
    shown = [untied_layers(names) for names in pipeline.parameters]
    own = []
    for stage in range(len(shown)):
        before = chain.from_iterable(shown[:stage])
        after = chain.from_iterable(shown[stage + 1 :])
        own.append(range(max(before, default=-1) + 1, min(after, default=count)))
    return own


def spans_with(pipeline: Pipeline, key: str, count: int) -> list[range]:
    """The same of the stages that have a copy of a tied layer."""
    stages = zip(pipeline.parameters, spans(pipeline, count), strict=True)
    return [span for names, span in stages if key in map(tied_key, names)]
