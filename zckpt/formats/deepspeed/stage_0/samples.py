"""Finds the 16-bit weights that fp32 masters round to, by the bytes of a few elements.

Weights and masters get labels. A master with the label of a weight may be the weight's master.

A label stands for a shape and the bits of a few elements. If the weights of a label differ in other
elements, some of these elements are added, until only weights of equal bytes share a label. So a
large weight is read completely only if another one has the same bits in the compared elements. No
weight is kept in memory as a whole.

This module reads numbers without numpy, because `inspect` may not import it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TypeVar

from msgspec import Struct, field

from ....core.checkpoint import cast
from ....core.checkpoint.dtypes import SIZES
from ....core.grouping import by_key
from ....core.storage import sources
from ....files.torchfile import Tensor, TorchFile

SAMPLE = 64  # elements, from the middle of a tensor: its beginning may be padding
CHUNK = 1 << 20  # bytes that are compared at a time
NAN = -1  # the bits of every NaN: rounding may change them

K = TypeVar("K")
Label = tuple[object, ...]
_Set = tuple[list[int], list[int]]
_UNSIGNED = {1: "B", 2: "H", 4: "I", 8: "Q"}
_INFINITY = {"F32": 0x7F800000, "BF16": 0x7F80, "F16": 0x7C00}


class TensorInFile(Struct, frozen=True):
    """A tensor, together with the file that contains it."""

    file: TorchFile
    tensor: Tensor


def labels(
    weights: Sequence[TensorInFile], masters: Sequence[TensorInFile]
) -> tuple[list[Label], list[list[Label]]]:
    """Labels tensors, so that a master shares a label with the weights to which it may round.

    Returns one label per weight, and a list of labels per master: at most one for each type that
    weights of its shape have. A label stands for a shape, a type and the bits of some elements.
    """
    typed = by_key(((w.tensor.shape, w.tensor.dtype), place) for place, w in enumerate(weights))
    shaped = by_key((m.tensor.shape, place) for place, m in enumerate(masters))
    of_weights: list[Label] = [()] * len(weights)
    of_masters: list[list[Label]] = [[] for _ in masters]
    with ExitStack() as opened:
        sampler = _Sampler(opened, weights, masters)
        for (shape, dtype), places in typed.items():
            sets = sampler.split(places, shaped.get(shape, []), dtype)
            for number, (alike, rounded) in enumerate(sets):
                label = (*shape, dtype, number)
                for place in alike:
                    of_weights[place] = label
                for place in rounded:
                    of_masters[place].append(label)
    return of_weights, of_masters


def alike(tensors: Mapping[K, Mapping[str, TensorInFile]]) -> list[list[K]]:
    """Groups the keys whose tensors are equal: the same names, and equal bytes for each name."""
    places = [(key, name) for key, own in tensors.items() for name in own]
    every = [tensors[key][name] for key, name in places]
    named = zip(places, labels(every, every)[0], strict=True)
    contents = by_key((key, (name, label)) for (key, name), label in named)
    return [*by_key((tuple(own), key) for key, own in contents.items()).values()]


class _Sampler(Struct, frozen=True):
    """Reads elements of weights and masters; keeps their files open until `opened` is closed."""

    opened: ExitStack
    weights: Sequence[TensorInFile]
    masters: Sequence[TensorInFile]
    descriptors: dict[str, int] = field(default_factory=dict)

    def split(self, weights: Sequence[int], theirs: Sequence[int], dtype: str) -> Iterator[_Set]:
        """Divides weights into sets; yields each set with the masters that may round to it.

        Arguments and results are indices of weights (of type `dtype`) and masters (`theirs`), all
        of one shape. Weights of a set are equal if the set has masters.
        """
        # only 16-bit weights have masters of another type
        kinds = (dtype, "F32") if dtype in ("BF16", "F16") else (dtype,)
        theirs = [place for place in theirs if self.masters[place].tensor.dtype in kinds]
        numel = self.weights[weights[0]].tensor.numel
        if not theirs or not numel:
            yield [*weights], theirs
            return
        middle = max(0, (numel - SAMPLE) // 2)
        undecided = [([*weights], theirs, middle, min(numel, middle + SAMPLE))]
        while undecided:  # masters are compared only in elements `start` to `stop`
            alike, rounded, start, stop = undecided.pop()
            parts: dict[tuple[int, ...], _Set] = {}
            for place in alike:
                key = tuple(self._bits(self.weights[place], dtype, start, stop))
                parts.setdefault(key, ([], []))[0].append(place)
            for place in rounded:
                key = tuple(self._bits(self.masters[place], dtype, start, stop))
                if key in parts:
                    parts[key][1].append(place)
            for group, candidates in parts.values():
                differing = self._first_difference(group) if candidates else None
                if differing is None:
                    yield group, candidates
                else:
                    undecided.append((group, candidates, differing, differing + 1))

    def _first_difference(self, places: Sequence[int]) -> int | None:
        """The index of the first element in which these weights differ; None if all are equal.

        `places` are indices in `self.weights`. NaNs count as equal.
        """
        first, *other_weights = (self.weights[place] for place in places)
        numel, dtype = first.tensor.numel, first.tensor.dtype
        step = CHUNK // SIZES[dtype]
        for start in range(0, numel if other_weights else 0, step):
            stop = min(numel, start + step)
            expected = self._bytes(first, start, stop)
            for other in other_weights:
                if self._bytes(other, start, stop) == expected:
                    continue
                bits = (self._bits(each, dtype, start, stop) for each in (first, other))
                for number, (first_bits, theirs) in enumerate(zip(*bits, strict=True), start):
                    if first_bits != theirs:  # they differ in more than NaNs
                        return number
        return None

    def _bytes(self, stored: TensorInFile, start: int, stop: int) -> bytes:
        file, tensor = stored.file, stored.tensor
        if tensor.contiguous:
            parts = [file.extent(tensor.part(start, stop))]
        else:
            parts = [file.extent(_element(tensor, number)) for number in range(start, stop)]
        if file.path not in self.descriptors:
            opened = self.opened.enter_context(sources.opened(file.path))
            self.descriptors[file.path] = opened.fileno()
        descriptor = self.descriptors[file.path]
        return b"".join(sources.pread(descriptor, part.length, part.offset) for part in parts)

    def _bits(self, stored: TensorInFile, dtype: str, start: int, stop: int) -> list[int]:
        """The bits of row-major elements [start, stop) as unsigned integers.

        Every NaN is given as the same integer. Elements of a master are rounded to `dtype`, as
        torch rounds.
        """
        data = self._bytes(stored, start, stop)
        if stored.tensor.dtype != dtype:
            data = cast.rounded(data, dtype) or b""
        size, infinity = SIZES[dtype], _INFINITY.get(dtype)
        bits = struct.unpack(f"<{len(data) // size}{_UNSIGNED[size]}", data)
        sign = 1 << (8 * size - 1)
        return [NAN if infinity and item & ~sign > infinity else item for item in bits]


def _element(tensor: Tensor, number: int) -> Tensor:
    """One element of a tensor, by its row-major index; the tensor need not be contiguous."""
    offset = tensor.offset
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        number, coordinate = divmod(number, size)
        offset += coordinate * stride
    return Tensor(tensor.storage, tensor.dtype, offset, (1,), (1,))
