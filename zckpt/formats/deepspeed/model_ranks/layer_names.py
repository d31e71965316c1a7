"""Which layer of a pipeline has a tensor, as its name in the whole model says it?

    3.fc.weight                     of layer 3
    tied_modules.embed.weight       of the tied layer `embed`, wherever it is used

In files of layers both have the rest of the name alone. The numbers in names show which layers a
stage may have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct

from ....core.grouping import by_key

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


def stage_spans(stages: Iterable[Iterable[str]], count: int) -> list[range]:
    """The layers that each stage of the source may have, as others show theirs.

    `stages` are the names of each one's parameters, and `count` is the number of layers.
    """
    shown = [untied_layers(names) for names in stages]
    spans = []
    for number in range(len(shown)):
        before = [layer for each in shown[:number] for layer in each]
        after = [layer for each in shown[number + 1 :] for layer in each]
        spans.append(range(max(before, default=-1) + 1, min(after, default=count)))
    return spans
