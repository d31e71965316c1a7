"""Statistics of a tensor in one pass over its bytes, block by block.

A block stays in the processor's cache. It is widened to float64, summed, and squared. If the mean
accounts for most of the sum of squares (weights far from zero), distances from the mean are squared
instead. Blocks are merged by the formula of Chan, Golub and LeVeque. So the result is exact to the
last digits where plain sums of squares would cancel, and where sums in the tensor's type would
overflow (float16). Integers beyond 2**53 lose digits, except in min and max.

All statistics are over the finite numbers; NaN and infinities are only counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from ..checkpoint.cast import array
from ..checkpoint.dtypes import FLOATS

BLOCK = 1 << 17  # elements: 1 MiB as float64, in a core's L2; threads meet at each block's edges
ROW = 1 << 13  # elements; of more than 10,000 OpenBLAS makes a dot product with all processors
CANCELLED = 0.05
"""The smallest part of a sum of squares that may be left after count * mean**2 is subtracted.

If less is left, too many digits were lost, and the distances from the mean are squared instead.
"""
EXPONENTS = 2048  # of a float64; they include those of every narrower type
BIAS = 1023
NORMAL = {"F64": 2.0**-1022, "F32": 2.0**-126, "BF16": 2.0**-126, "F16": 2.0**-14}
"""The smallest positive normal number of each type."""


class Statistics(Struct, eq=False):
    """Counts of a tensor's numbers, and statistics of the finite ones.

    denormal     floats below the smallest normal number of their type, without zeros
    spread       the root of the summed squared distances from the mean
    norm         the root of the summed squares
    histogram    item e counts numbers with the biased float64 exponent e; None if not wanted
    """

    finite: int = 0
    nan: int = 0
    positive_inf: int = 0
    negative_inf: int = 0
    negative: int = 0
    zero: int = 0
    positive: int = 0
    denormal: int = 0
    min: float | int = math.inf
    max: float | int = -math.inf
    mean: float = 0.0
    spread: float = 0.0
    norm: float = 0.0
    histogram: Any = None

    def add(self, other: Statistics) -> None:
        """Adds the statistics of further numbers."""
        if other.finite:
            count = self.finite + other.finite
            half = other.mean / 2 - self.mean / 2  # the complete difference may overflow
            mean = (self.mean / 2 + half * (other.finite / count)) * 2
            between = abs(half) * math.sqrt(self.finite / count * other.finite) * 2
            self.spread = math.hypot(self.spread, other.spread, between)
            self.norm = math.hypot(self.norm, other.norm)
            self.mean = mean if self.finite else other.mean
            self.min, self.max = min(self.min, other.min), max(self.max, other.max)
        for key in COUNTS:
            setattr(self, key, getattr(self, key) + getattr(other, key))
        if other.histogram is not None:
            own_histogram = self.histogram
            self.histogram = (
                other.histogram if own_histogram is None else own_histogram + other.histogram
            )

    @property
    def inf(self) -> int:
        return self.positive_inf + self.negative_inf

    @property
    def elements(self) -> int:
        return self.finite + self.nan + self.inf

    @property
    def rms(self) -> float | None:
        """The root mean square; None if there is no finite number."""
        return self.norm / math.sqrt(self.finite) if self.finite else None

    @property
    def std(self) -> float | None:
        """The standard deviation with n - 1, as in torch.std; None for fewer than two numbers."""
        return self.spread / math.sqrt(self.finite - 1) if self.finite > 1 else None

    def report(self) -> dict[str, Any]:
        """The statistics as JSON; None (null) if there is no finite number."""
        some = self.finite > 0
        return {
            "min": self.min if some else None,
            "max": self.max if some else None,
            "mean": self.mean if some else None,
            "std": json_number(self.std),
            "norm": json_number(self.norm) if some else None,
            "rms": json_number(self.rms),
            "nan": self.nan,
            "inf": self.inf,
            "negative_inf": self.negative_inf,
            "negative": self.negative,
            "zero": self.zero,
            "positive": self.positive,
            "denormal": self.denormal,
        }


def exponents(histogram: Any) -> dict[int, int]:
    """Converts a histogram to a dictionary {power of two: count}, without zero counts."""
    import numpy as np

    return {int(place) - BIAS: int(histogram[place]) for place in np.flatnonzero(histogram)}


def magnitudes(counts: Mapping[int, int]) -> dict[str, Any] | None:
    """Converts a histogram to JSON: `{"first": -3, "counts": [5, 0, 2]}`.

    In the JSON, `counts[i]` numbers have a magnitude in [2**(first + i), 2**(first + i + 1)). The
    argument `counts` maps powers of two to counts; zeros are not counted. None if all counts are 0.
    """
    used = [power for power, count in counts.items() if count]
    if not used:
        return None
    first, last = min(used), max(used)
    return {"first": first, "counts": [counts.get(power, 0) for power in range(first, last + 1)]}


COUNTS = Statistics.__struct_fields__[:8]
"""The names of the fields that count numbers, from `finite` to `denormal`."""


def json_number(number: float | None) -> Any:
    """Converts a number to valid JSON: NaN and infinities become "nan", "inf" and "-inf"."""
    return number if number is None or math.isfinite(number) else str(number)


def extent(number: Any) -> float:
    """A sort key for numbers in reports: the strings "nan" and "inf" sort as the largest."""
    return math.inf if isinstance(number, str) else float(number or 0)


def measure(view: Any, dtype: str, histogram: bool = False) -> Statistics:
    """Computes the statistics of the row-major little-endian elements in `view`.

    Raises KeyError for complex and float8 types.
    """
    import numpy as np

    values = array(view, dtype)
    statistics = Statistics()
    wide = np.empty(min(BLOCK, len(values)))
    with np.errstate(invalid="ignore"):  # a signalling NaN
        for start in range(0, len(values), BLOCK):
            block = values[start : start + BLOCK]
            statistics.add(_measure(block, dtype, wide[: len(block)], histogram))
    return statistics


def _measure(values: Any, dtype: str, wide: Any, histogram: bool) -> Statistics:
    """Computes the statistics of one block; `wide` is working memory for its float64 values."""
    import numpy as np

    if dtype in ("BF16", "F16"):  # numpy is slow with both
        values = values.astype(np.float32)
    np.copyto(wide, values)
    count = len(values)
    statistics = Statistics()
    low, high = values.min(), values.max()
    if dtype not in FLOATS:
        low, high = int(low), int(high)
    elif not (math.isfinite(low) and math.isfinite(high)):
        statistics.nan = int(np.count_nonzero(np.isnan(wide)))
        statistics.positive_inf = int(np.count_nonzero(wide == math.inf))
        statistics.negative_inf = int(np.count_nonzero(wide == -math.inf))
        wide = values = wide[np.isfinite(wide)]
        count = len(wide)
        if not count:
            return statistics
        low, high = float(wide.min()), float(wide.max())
    else:
        low, high = float(low), float(high)
    statistics.finite, statistics.min, statistics.max = count, low, high
    statistics.negative = int(np.count_nonzero(values < 0)) if low < 0 else 0
    statistics.zero = int(np.count_nonzero(values == 0)) if low <= 0 <= high else 0
    statistics.positive = count - statistics.negative - statistics.zero
    if dtype in NORMAL and low < NORMAL[dtype] and high > -NORMAL[dtype]:
        below = int(np.count_nonzero(np.abs(values) < NORMAL[dtype]))
        statistics.denormal = below - statistics.zero
    if histogram:
        exponents = wide.view(np.uint64) >> np.uint64(52)
        exponents &= np.uint64(EXPONENTS - 1)
        statistics.histogram = np.bincount(exponents.view(np.int64), minlength=EXPONENTS)
        statistics.histogram[0] -= statistics.zero  # only subnormal float64 remain
    scale = max(abs(low), abs(high))
    if low == high:
        statistics.mean, statistics.norm = float(low), abs(float(low)) * math.sqrt(count)
        return statistics
    factor = 1.0
    if not 1e-140 < scale < 1e140:  # squares would overflow, or vanish
        factor = math.ldexp(1.0, -max(math.frexp(scale)[1], -1000))
        wide = wide * factor
    mean = float(np.add.reduce(wide)) / count
    squares = sum_of_squares(wide)
    apart = squares - count * mean * mean
    if apart < squares * CANCELLED:  # otherwise `apart` is exact to 14 digits
        wide -= mean
        rest = float(np.add.reduce(wide)) / count  # the rounding error of a mean of large numbers
        apart = sum_of_squares(wide) - count * rest * rest
        mean += rest
    statistics.mean = mean / factor
    statistics.spread = math.sqrt(apart) / factor
    statistics.norm = math.sqrt(squares) / factor
    return statistics


def sum_of_squares(values: Any) -> float:
    """The sum of the squares of a block.

    The squares are summed in the block's type within a row of ROW elements, and in float64 over
    rows.
    """
    import numpy as np

    whole = len(values) // ROW * ROW
    rows, rest = values[:whole].reshape(-1, ROW), values[whole:]
    dots = np.matmul(rows[:, None, :], rows[:, :, None])
    return float(dots.sum(dtype=np.float64)) + float(np.dot(rest, rest))
