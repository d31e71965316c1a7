"""Statistics of numbers that arrive in blocks: what one pass over a tensor's bytes tells of it.

A block that stays in the processor's cache is widened to float64, summed, and squared; where the
mean is most of the squares (weights far from zero), distances from it are squared instead. Blocks
are merged as Chan, Golub and LeVeque merge them. That is exact to the last digits where sums of
squares would cancel, and where sums in the tensor's own type would overflow (float16). Integers
past 2**53 lose digits, but in min and max.

Everything is told of the finite numbers; NaN and infinities are counted beside them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.cast import numpy_type, widen
from ..core.dtypes import FLOATS

BLOCK = 1 << 17  # elements: 1 MiB as float64, in a core's L2; threads meet at each block's edges
ROW = 1 << 13  # elements; of more than 10,000 OpenBLAS makes a dot product with all processors
CANCELLED = 0.05
"""Part of the squares that must be left of them without the mean's, to be exact to 14 digits."""
EXPONENTS = 2048  # of a float64, which hold those of every narrower type
BIAS = 1023


@dataclass(slots=True)
class Statistics:
    """Of `finite` numbers, of which `negative`, `zero` and `positive` are counts, and of others.

    `spread` is the square root of the summed squared distances from the mean, `norm` that of the
    summed squares. `histogram[e]` counts magnitudes by the exponent of a float64, where asked for.
    """

    finite: int = 0
    nan: int = 0
    positive_inf: int = 0
    negative_inf: int = 0
    negative: int = 0
    zero: int = 0
    positive: int = 0
    min: float | int = math.inf
    max: float | int = -math.inf
    mean: float = 0.0
    spread: float = 0.0
    norm: float = 0.0
    histogram: Any = field(default=None, repr=False)

    def add(self, other: Statistics) -> None:
        """Those of further numbers."""
        if other.finite:
            count = self.finite + other.finite
            half = other.mean / 2 - self.mean / 2  # the whole may overflow
            mean = (self.mean / 2 + half * (other.finite / count)) * 2
            between = abs(half) * math.sqrt(self.finite / count * other.finite) * 2
            self.spread = math.hypot(self.spread, other.spread, between)
            self.norm = math.hypot(self.norm, other.norm)
            self.mean = mean if self.finite else other.mean
            self.min, self.max = min(self.min, other.min), max(self.max, other.max)
        for key in COUNTS:
            setattr(self, key, getattr(self, key) + getattr(other, key))
        if other.histogram is not None:
            held = self.histogram
            self.histogram = other.histogram if held is None else held + other.histogram

    @property
    def inf(self) -> int:
        return self.positive_inf + self.negative_inf

    @property
    def elements(self) -> int:
        return self.finite + self.nan + self.inf

    @property
    def std(self) -> float | None:
        """The standard deviation with n - 1, as torch.std has it; None of fewer than two."""
        return self.spread / math.sqrt(self.finite - 1) if self.finite > 1 else None

    def report(self) -> dict[str, Any]:
        """As JSON; None (null) where there is no finite number to tell it of."""
        some = self.finite > 0
        return {
            "min": self.min if some else None,
            "max": self.max if some else None,
            "mean": self.mean if some else None,
            "std": None if self.std is None else told(self.std),
            "norm": told(self.norm) if some else None,
            "nan": self.nan,
            "inf": self.inf,
            "negative_inf": self.negative_inf,
            "negative": self.negative,
            "zero": self.zero,
            "positive": self.positive,
        }

    def magnitudes(self) -> dict[str, Any] | None:
        """`counts[i]` numbers have a magnitude in [2**(first + i), 2**(first + i + 1)).

        Zeros are not among them. None where nothing was counted.
        """
        used: Any = [] if self.histogram is None else np.flatnonzero(self.histogram)
        if not len(used):
            return None
        first, last = int(used[0]), int(used[-1])
        return {"first": first - BIAS, "counts": self.histogram[first : last + 1].tolist()}


COUNTS = (
    "finite",
    "nan",
    "positive_inf",
    "negative_inf",
    "negative",
    "zero",
    "positive",
)


def told(number: float) -> float | str:
    """As JSON can hold it: "inf" is text."""
    return number if math.isfinite(number) else str(number)


def measure(view: Any, dtype: str, histogram: bool = False) -> Statistics:
    """Those of the row-major little-endian elements in `view`.

    Raises KeyError for a type that has no numbers here (complex, float8).
    """
    values = np.frombuffer(view, numpy_type(dtype)) if len(view) else np.empty(0)
    found = Statistics()
    wide = np.empty(min(BLOCK, len(values)))
    with np.errstate(invalid="ignore"):  # a signalling NaN
        for start in range(0, len(values), BLOCK):
            block = values[start : start + BLOCK]
            found.add(_measure(block, dtype, wide[: len(block)], histogram))
    return found


def _measure(values: Any, dtype: str, wide: Any, histogram: bool) -> Statistics:
    """Those of a block; `wide` is memory for as many float64."""
    if dtype in ("BF16", "F16"):  # the one is unknown to numpy, the other slow
        values = widen(values) if dtype == "BF16" else values.astype(np.float32)
    np.copyto(wide, values)
    count = len(values)
    found = Statistics()
    low, high = values.min(), values.max()
    if dtype not in FLOATS:
        low, high = int(low), int(high)
    elif not (math.isfinite(low) and math.isfinite(high)):
        found.nan = int(np.count_nonzero(np.isnan(wide)))
        found.positive_inf = int(np.count_nonzero(wide == math.inf))
        found.negative_inf = int(np.count_nonzero(wide == -math.inf))
        wide = values = wide[np.isfinite(wide)]
        count = len(wide)
        if not count:
            return found
        low, high = float(wide.min()), float(wide.max())
    else:
        low, high = float(low), float(high)
    found.finite, found.min, found.max = count, low, high
    found.negative = int(np.count_nonzero(values < 0)) if low < 0 else 0
    found.zero = int(np.count_nonzero(values == 0)) if low <= 0 <= high else 0
    found.positive = count - found.negative - found.zero
    if histogram:
        exponents = wide.view(np.uint64) >> np.uint64(52)
        exponents &= np.uint64(EXPONENTS - 1)
        found.histogram = np.bincount(exponents.view(np.int64), minlength=EXPONENTS)
        found.histogram[0] -= found.zero  # what is left are subnormal float64
    scale = max(abs(low), abs(high))
    if low == high:
        found.mean, found.norm = float(low), abs(float(low)) * math.sqrt(count)
        return found
    factor = 1.0
    if not 1e-140 < scale < 1e140:  # squares would overflow, or vanish
        factor = math.ldexp(1.0, -max(math.frexp(scale)[1], -1000))
        wide = wide * factor
    mean = float(np.add.reduce(wide)) / count
    squares = _squares(wide)
    apart = squares - count * mean * mean
    if apart < squares * CANCELLED:
        wide -= mean
        left = float(np.add.reduce(wide)) / count  # by which a mean of large numbers is rounded
        apart = _squares(wide) - count * left * left
        mean += left
    found.mean = mean / factor
    found.spread = math.sqrt(apart) / factor
    found.norm = math.sqrt(squares) / factor
    return found


def _squares(wide: Any) -> float:
    whole = len(wide) // ROW * ROW
    rows, rest = wide[:whole].reshape(-1, ROW), wide[whole:]
    return float(np.matmul(rows[:, None, :], rows[:, :, None]).sum() + np.dot(rest, rest))
