"""Computes the distance between two records of a tensor, and how large a distance is tolerated.

If the checksums are equal, the distance is 0. Otherwise it is the largest relative change of the
samples, min, max, mean and std: the change divided by the root mean square of the tensor, or by the
number itself if that is larger. So distances can be compared between tensors of any scale.

An optimizer may turn the rounding error of a tiny gradient into a full update of one element. So
for the samples of merged runs, the distance is the root mean square of all changes, not the largest
change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from .runs import TensorRecord

# a few times the effect of another order of sums on the output of one layer
TOLERANCES = {"F64": 1e-10, "F32": 1e-5, "F16": 4e-3, "BF16": 3e-2}
"""The tolerated distance of two records, by the type of their tensor; 0 for other types."""
EXACT = frozenset({"lr", "loss_scale"})
"""Metrics that do not depend on the order of sums."""
SAME = 1e-12
"""The distance of numbers that differ only in the last digits of float64."""
SMALLEST = 5e-324
"""The distance of tensors with different bytes but equal recorded numbers."""


def tolerance(record: TensorRecord, narrowest: float) -> float:
    """The distance up to which two records count as equal; it depends on the tensor's type.

    For metrics it is `narrowest`, the tolerance of the narrowest type in the runs. Metrics that do
    not depend on the order of sums (`EXACT`) may differ only in the last digits.
    """
    if record.kind == "metric":
        return SAME if record.key.partition(".")[0] in EXACT else narrowest
    return TOLERANCES.get(record.dtype, 0.0)


def apart(a: TensorRecord, b: TensorRecord, is_merged: bool) -> tuple[float, str]:
    """The distance of two records, and a string with the two numbers that differ most.

    If something else differs, such as the shape, the string tells that instead.
    """
    if a.shape != b.shape:
        return math.inf, f"shape {list(a.shape)} against {list(b.shape)}"
    if a.dtype != b.dtype:
        return math.inf, f"type {a.dtype} against {b.dtype}"
    ours, theirs = a.numbers, b.numbers
    have_crcs = "crc32" in ours and "crc32" in theirs
    if have_crcs and ours["crc32"] == theirs["crc32"]:
        return 0.0, ""
    for key in ("nan", "inf", "negative_inf"):
        if ours.get(key) != theirs.get(key):
            return math.inf, f"{key} {ours.get(key)} against {theirs.get(key)}"
    scale = max(_scale(a), _scale(b))
    worst, what = 0.0, ""
    squares, sampled = 0.0, ("", 0.0)
    for name, one, other in _pairs(ours, theirs):
        distance = _apart(one, other, scale)
        label = "" if a.kind == "metric" else f"{name} "
        text = f"{label}{one:.9g} against {other:.9g}" if distance else ""
        if is_merged and name.startswith("sample"):
            squares += distance * distance
            sampled = max(sampled, (text, distance), key=lambda each: each[1])
        elif distance > worst:
            worst, what = distance, text
    count = min(len(ours.get("samples", ())), len(theirs.get("samples", ())))
    if squares and math.sqrt(squares / count) > worst:
        worst, what = math.sqrt(squares / count), sampled[0]
    if have_crcs and not worst:
        return SMALLEST, "checksums differ, recorded numbers do not"
    return worst, what


def _pairs(a: Any, b: Any) -> Iterator[tuple[str, float, float]]:
    for key in ("mean", "std", "min", "max"):
        if a.get(key) is not None and b.get(key) is not None:
            yield key, float(a[key]), float(b[key])
    samples = zip(a.get("samples", ()), b.get("samples", ()), strict=False)
    for place, (one, other) in enumerate(samples):
        yield f"sample {place}", float(one), float(other)


def _apart(one: float, other: float, scale: float) -> float:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    distance = abs(one - other)
    scale = max(scale, min(abs(one), abs(other)))
    return distance / scale if scale and math.isfinite(distance) else math.inf


def _scale(record: TensorRecord) -> float:
    """The root mean square of a tensor, or of its samples if the norm is missing or infinite."""
    numbers = record.numbers
    norm = float(numbers.get("norm") or 0.0)
    if norm and math.isfinite(norm):
        return norm / math.sqrt(math.prod(record.shape) - numbers["nan"] - numbers["inf"])
    samples = [float(value) for value in numbers.get("samples", ())]
    finite = [value for value in samples if math.isfinite(value)]
    if any(finite):
        return math.hypot(*finite) / math.sqrt(len(finite))
    extremes = (numbers.get("min"), numbers.get("max"))
    return max((abs(float(value)) for value in extremes if value is not None), default=0.0)


def has_numbers(record: TensorRecord) -> bool:
    """Whether a record has statistics such as the mean.

    Tensors that are on `meta`, sparse or released by an engine have none.
    """
    measures = {"crc32", "mean"} if record.kind != "metric" else {"samples"}
    return not math.prod(record.shape) or not measures.isdisjoint(record.numbers)
