"""The steps of a rule that turns a module's tensors into the tensors that transformers saves.

The steps of a rule are applied one after the other:

    cut       cuts into equal parts along an axis: one per target, or as many as a size states
    join      concatenates along an axis
    unstack   makes one tensor for each index along an axis, such as for experts
    unmix     cuts and unstacks; the experts of all sources are numbered together
    swap      exchanges two axes
    deal      interleaves the rows of two halves
    rope      interleaves within each head, for rotary embeddings without complex numbers
    pad       adds rows of zeros up to the vocabulary size
    queries   splits (layers, 4, ...) into queries 0 and 3, and queries 1 and 2, of all layers

They are the operations of transformers 5.24, in reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..views import View, cut, dealt, flattened, folded, joined, swapped, unstacked, zeros

Tensors = dict[str, View]
"""The tensors that a rule converts together. A key is a part of the new name, or a number.

A number ("0", "1") is the index of the rule's pattern that matches the tensor's old name. An
operation such as `cut` replaces the numbers by parts of new names.
"""


def converted(
    views: Mapping[int, View],
    targets: Sequence[str],
    steps: Sequence[Sequence[Any]],
    size: Callable[[str], int],
) -> Tensors:
    """Applies the steps of a rule to the tensors that it converts together; returns new tensors.

    views      tensors, by the index of the rule's pattern that matches the old name
    targets    parts of new names, which become the keys; numbers replace each `*` in them
    steps      operations (listed in the module's docstring) with arguments, such as ["cut", 0]
    size       returns a number of the model's configuration, given its key

    Raises ValueError or IndexError if sizes do not fit.
    """
    tensors = {str(number): view for number, view in sorted(views.items())}
    for name, *arguments in steps:
        tensors = STEPS[name](tensors, targets, arguments, size)
    if len(tensors) == len(targets) == 1:
        return {targets[0]: next(iter(tensors.values()))}
    return tensors


Size = Callable[[str], int]


def _cut(tensors: Tensors, targets: Sequence[str], arguments: Any, size: Size) -> Tensors:
    (view,), (axis, *named) = tensors.values(), arguments
    count = size(named[0]) if named else len(targets)
    parts = cut(view, axis, max(1, -(-view.shape[axis] // count)))
    if named:
        return {targets[0].replace("*", str(number)): part for number, part in enumerate(parts)}
    return dict(zip(targets, parts, strict=False))


def _join(tensors: Tensors, targets: Sequence[str], arguments: Any, _: Size) -> Tensors:
    return {targets[0]: joined([*tensors.values()], arguments[0])}


def _unstack(tensors: Tensors, targets: Sequence[str], arguments: Any, _: Size) -> Tensors:
    result: Tensors = {}
    for name, view in tensors.items():
        target = targets[0] if len(tensors) == 1 else name
        for number, part in enumerate(unstacked(view, arguments[0])):
            result[target.replace("*", str(number))] = part
    return result


def _unmix(tensors: Tensors, targets: Sequence[str], arguments: Any, _: Size) -> Tensors:
    along, stack = arguments
    result: Tensors = {}
    halves = [cut(view, along, -(-view.shape[along] // len(targets))) for view in tensors.values()]
    for place, target in enumerate(targets):
        experts = (part for each in halves for part in unstacked(each[place], stack))
        for number, part in enumerate(experts):
            result[target.replace("*", str(number))] = part
    return result


def _swap(tensors: Tensors, _: Sequence[str], arguments: Any, __: Size) -> Tensors:
    return {name: swapped(view, *arguments) for name, view in tensors.items()}


def _deal(tensors: Tensors, _: Sequence[str], arguments: Any, __: Size) -> Tensors:
    (axis,) = arguments
    return {
        name: dealt(folded(view, axis, (view.shape[axis] // 2,)), axis, (1, 0))
        for name, view in tensors.items()
    }


def _rope(tensors: Tensors, _: Sequence[str], arguments: Any, size: Size) -> Tensors:
    heads, places = size("num_attention_heads"), {str(place) for place in arguments[0]}
    result = dict(tensors)
    for name, view in tensors.items():
        if name in places:
            half = view.shape[0] // heads // 2
            if heads * 2 * half != view.shape[0]:
                raise ValueError(f"{view.shape[0]} rows cannot be paired within {heads} heads")
            result[name] = dealt(folded(view, 0, (2, half)), 0, (0, 2, 1))
    return result


def _pad(tensors: Tensors, _: Sequence[str], __: Any, size: Size) -> Tensors:
    result = {}
    for name, view in tensors.items():
        more = size("vocab_size") - view.shape[0]
        rows = zeros((more, *view.shape[1:]), view.size)
        result[name] = joined([view, rows], 0) if more > 0 else view
    return result


def _queries(tensors: Tensors, targets: Sequence[str], _: Any, __: Size) -> Tensors:
    (view,) = tensors.values()
    query, key, value, mlp = cut(view, 1, 1)
    pairs = joined([query, mlp], 1), joined([key, value], 1)
    return {name: flattened(pair, 0) for name, pair in zip(targets, pairs, strict=True)}


STEPS: Mapping[str, Callable[[Tensors, Sequence[str], Any, Size], Tensors]] = {
    "cut": _cut,
    "join": _join,
    "unstack": _unstack,
    "unmix": _unmix,
    "swap": _swap,
    "deal": _deal,
    "rope": _rope,
    "pad": _pad,
    "queries": _queries,
}
