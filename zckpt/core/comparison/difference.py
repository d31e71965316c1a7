"""Measures by how much the elements of two tensors differ.

Bytes are compared by memcmp(3). numpy is imported only to compare elements as numbers.
"""

import ctypes
import math
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct, field

from ..checkpoint.cast import CAST_BLOCK, array, numbers, ordered
from ..checkpoint.dtypes import FLOATS, SIZES

LOWEST = -1074  # the exponent of the smallest float64
ULPS = ("0", "1", "2", *(f"{2**n + 1}-{2 ** (n + 1)}" for n in range(1, 10)), ">1024")
"""The bins of distances in units in the last place."""


class Difference(Struct, eq=False):
    """By how much two tensors differ.

        first, a, b    the row-major number of the first differing element, and its two values
        max_abs        the largest distance; None if no numbers differ
        max_ulp        the same in units in the last place; None unless floats of one type differ
        dot, aa, bb    sums over all elements that were compared as numbers
        squares        the sum of squared finite distances
        changes        the number of finite distances by power of two
        ulps           the distances of differing elements, as counts in the bins ULPS
        nans           the number of differing elements that are NaN in `a`, and in `b`

    The distance of a NaN from any number is infinite.
    """

    count: int = 0
    first: int | None = None
    a: float | int | None = None
    b: float | int | None = None
    max_abs: float | None = None
    max_ulp: int | None = None
    dot: float = 0.0
    aa: float = 0.0
    bb: float = 0.0
    squares: float = 0.0
    changes: dict[int, int] = field(default_factory=dict)
    ulps: list[int] = field(default_factory=lambda: [0] * len(ULPS))
    nans: tuple[int, int] = (0, 0)

    def add(self, other: "Difference") -> None:
        """Adds the difference of further elements of the same two tensors."""
        self.count += other.count
        if other.first is not None and (self.first is None or other.first < self.first):
            self.first, self.a, self.b = other.first, other.a, other.b
        for key in ("max_abs", "max_ulp"):
            ours, theirs = getattr(self, key), getattr(other, key)
            if theirs is not None:
                setattr(self, key, theirs if ours is None else max(ours, theirs))
        self.dot += other.dot
        self.aa += other.aa
        self.bb += other.bb
        self.squares += other.squares
        for power, count in other.changes.items():
            own_power = int(power)  # JSON has text keys
            self.changes[own_power] = self.changes.get(own_power, 0) + count
        self.ulps = [ours + theirs for ours, theirs in zip(self.ulps, other.ulps, strict=True)]
        self.nans = (self.nans[0] + other.nans[0], self.nans[1] + other.nans[1])

    @property
    def cosine(self) -> float | None:
        """The cosine of the angle between both tensors (as vectors); None if it is undefined.

        It is undefined if a tensor is all zero, or if a sum is not finite.
        """
        length = math.sqrt(self.aa) * math.sqrt(self.bb)
        if not 0 < length < math.inf:
            return None
        return max(-1.0, min(1.0, self.dot / length))


_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def same(a: memoryview, b: memoryview) -> bool:
    """Whether all bytes are equal, by memcmp; twelve times faster than `==` of memoryviews."""
    if a.nbytes != b.nbytes or not a.nbytes:  # the length of a view counts its elements
        return a.nbytes == b.nbytes
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in (a, b)]
    return not _libc.memcmp(*addresses, a.nbytes)


def measure_difference(
    a: memoryview, a_dtype: str, b: memoryview, b_dtype: str, start: int, rounded: bool
) -> Difference:
    """Measures the difference of two ranges of elements that begin at element `start` of a tensor.

    Elements of one type are compared by their bits, so 0.0 and -0.0 differ. Elements of two types
    are compared by their values; both must be numbers. Any two NaNs are equal if the types differ,
    or if one side was `rounded`.
    """
    difference = Difference()
    sizes, block = (SIZES[a_dtype], SIZES[b_dtype]), CAST_BLOCK
    for first in range(0, len(a) // sizes[0], block):
        views = [
            view[first * size : (first + block) * size]
            for view, size in zip((a, b), sizes, strict=True)
        ]
        difference.add(_measure(views, (a_dtype, b_dtype), start + first, rounded))
    return difference


def _measure(
    views: Sequence[memoryview], dtypes: tuple[str, str], start: int, rounded: bool
) -> Difference:
    import numpy as np

    difference = Difference()
    values = [numbers(view, dtype) for view, dtype in zip(views, dtypes, strict=True)]
    are_numbers = all(side is not None for side in values)
    if dtypes[0] == dtypes[1]:
        bits: list[Any] = [np.frombuffer(view, f"u{SIZES[dtypes[0]]}") for view in views]
        unequal = bits[0] != bits[1]
        if rounded and are_numbers:
            unequal &= ~(np.isnan(values[0]) & np.isnan(values[1]))
    else:
        assert are_numbers, f"{dtypes} have no values to compare"
        unequal = (values[0] != values[1]) & ~(np.isnan(values[0]) & np.isnan(values[1]))
    places = np.flatnonzero(unequal)
    with np.errstate(invalid="ignore", over="ignore"):
        if are_numbers:
            difference.dot = float(np.dot(values[0], values[1]))
            difference.aa, difference.bb = (float(np.dot(side, side)) for side in values)
        if not len(places):
            return difference
        difference.count, difference.first = len(places), start + int(places[0])
        if are_numbers:
            ours, theirs = (side[places] for side in values)
            difference.a, difference.b = float(ours[0]), float(theirs[0])
            # integers are exact beyond 2**53 too
            if dtypes[0] == dtypes[1] and dtypes[0] not in FLOATS:
                integers = [array(view, dtypes[0]) for view in views]
                difference.a, difference.b = (int(side[places[0]]) for side in integers)
            difference.nans = (int(np.isnan(ours).sum()), int(np.isnan(theirs).sum()))
            distance = np.abs(ours - theirs)
            distance[np.isnan(distance)] = np.inf
            difference.max_abs = float(distance.max())
            finite = distance[np.isfinite(distance) & (distance > 0)]
            difference.squares = float(np.dot(finite, finite))
            counts = np.bincount(np.frexp(finite)[1] - LOWEST)
            difference.changes = {
                int(place) + LOWEST - 1: int(counts[place]) for place in np.flatnonzero(counts)
            }
        if dtypes[0] == dtypes[1] and dtypes[0] in FLOATS:
            ranks = [ordered(side[places], dtypes[0]) for side in bits]
            difference.max_ulp = max(abs(one - other) for one, other in _extremes(*ranks))
            apart = np.abs(ranks[0].astype("f8") - ranks[1].astype("f8"))
            bins = np.ceil(np.log2(np.maximum(apart, 0.5))).astype("i8") + 1
            bins = np.bincount(np.minimum(bins, len(ULPS) - 1), minlength=len(ULPS))
            difference.ulps = bins.tolist()
    return difference


def _extremes(a: Any, b: Any) -> Iterator[tuple[int, int]]:
    """The pairs of elements with the smallest and the largest a - b, as Python integers.

    numpy cannot subtract exactly: the difference of two 64-bit integers may not fit into 64 bits.
    """
    distance = a.astype("f8") - b.astype("f8")
    for place in {int(distance.argmin()), int(distance.argmax())}:
        yield int(a[place]), int(b[place])
