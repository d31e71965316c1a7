"""How are numbers cast from one float type to another? As torch does: to nearest, ties to even.

numpy is enough, without torch: bfloat16 is the upper half of a float32, rounded by its bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import UnsupportedCheckpoint
from .dtypes import NUMBERS, SIZES, TORCH_NAMES
from .pieces import CAST_BLOCK

NEAR_BLOCK = 1 << 16  # elements that are compared at a time: they stay in the processor's cache

_NUMPY = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def cast(source: memoryview, source_dtype: str, target: memoryview, target_dtype: str) -> None:
    """Fills `target` with the elements of `source`, block by block.

    Raises UnsupportedCheckpoint for types that are not floats.
    """
    if source_dtype not in _NUMPY or target_dtype not in _NUMPY:
        raise UnsupportedCheckpoint(f"cannot turn {source_dtype} into {target_dtype}")
    values = np.frombuffer(source, dtype=_NUMPY[source_dtype])
    result = np.frombuffer(target, dtype=_NUMPY[target_dtype])
    for start in range(0, len(values), CAST_BLOCK):
        block = slice(start, start + CAST_BLOCK)
        _cast(values[block], source_dtype, result[block], target_dtype)


def refuse_overflow(
    name: str, source: memoryview, source_dtype: str, target: memoryview, target_dtype: str
) -> None:
    """Raises UnsupportedCheckpoint if `cast` has made a finite number of tensor `name` infinite.

    F16 ends at 65,504, and models that were trained in BF16 may have larger weights. BF16 has the
    range of F32, and is not searched.
    """
    if target_dtype not in ("F16", "F32") or source_dtype in ("F16", target_dtype):
        return
    result = np.frombuffer(target, dtype=_NUMPY[target_dtype])
    if np.isfinite(result).all():
        return
    values = np.frombuffer(source, dtype=_NUMPY[source_dtype])
    values = widen(values) if source_dtype == "BF16" else values
    lost = values[np.isinf(result) & np.isfinite(values)]
    if len(lost):
        raise UnsupportedCheckpoint(
            f"{name} has numbers that {TORCH_NAMES[target_dtype]} cannot hold, such as {lost[0]:g}",
            hint="choose a type with a larger range: --dtype bf16 or --dtype fp32",
        )


def put_mean(
    copies: Sequence[tuple[memoryview, str]], target: memoryview, target_dtype: str
) -> None:
    """Fills `target` with the mean of floats, given with their types, element by element.

    It is computed in float64, and then rounded as `cast` rounds. The mean of equal numbers is that
    number. Raises UnsupportedCheckpoint for types that are not floats.
    """
    if any(dtype not in _NUMPY for dtype in (target_dtype, *(own for _, own in copies))):
        raise UnsupportedCheckpoint(f"cannot average {copies[0][1]} as {target_dtype}")
    total: Any = None
    for view, dtype in copies:
        values = np.frombuffer(view, dtype=_NUMPY[dtype])
        values = (widen(values) if dtype == "BF16" else values).astype(np.float64)
        total = values if total is None else np.add(total, values, out=total)
    total /= len(copies)
    _cast(total, "F64", np.frombuffer(target, dtype=_NUMPY[target_dtype]), target_dtype)


def _cast(values: Any, source_dtype: str, result: Any, target_dtype: str) -> None:
    if source_dtype == "BF16":
        values = widen(values)
    if (source_dtype, target_dtype) == ("F64", "F16"):  # torch rounds twice
        with np.errstate(over="ignore", invalid="ignore"):
            values = values.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        result[:] = _bfloat16(values) if target_dtype == "BF16" else values.astype(result.dtype)


def _bfloat16(values: Any) -> Any:
    """The rounded upper halves as uint32; computed in place, since each new array costs a pass."""
    bits = values.astype(np.float32, copy=False).view(np.uint32)
    rounded = bits & np.uint32(1 << 16)
    rounded >>= np.uint32(16)
    rounded += bits
    rounded += np.uint32(0x7FFF)
    rounded >>= np.uint32(16)
    if np.isnan(values.max(initial=0)):  # a maximum is NaN if any number is
        rounded[np.isnan(values)] = 0x7FC0  # rounding its bits could make one infinite
    return rounded


def rounds_to_bfloat16(wide: memoryview, narrow: memoryview) -> bool:
    """Whether float32 numbers round to these bfloat16 numbers, bit for bit; False if one is a NaN.

    Seen as integers, a float32 and its rounded value differ by less than 0x8000, or by exactly
    0x8000 in a tie. To compare distances takes half the time of rounding; only numbers that are at
    least 0x8000 away are rounded.
    """
    values, halves = np.frombuffer(wide, np.float32), np.frombuffer(narrow, np.uint16)
    memory = np.empty(min(len(values), NEAR_BLOCK), np.uint32)
    for start in range(0, len(values), NEAR_BLOCK):
        block, rounded = values[start : start + NEAR_BLOCK], halves[start : start + NEAR_BLOCK]
        bits = memory[: len(block)]
        np.copyto(bits, rounded)
        bits <<= np.uint32(16)
        distance = np.subtract(block.view(np.uint32), bits, out=bits).view(np.int32)
        if distance.max() >= 0x8000 or distance.min() <= -0x8000:
            far = np.flatnonzero((distance >= 0x8000) | (distance <= -0x8000))
            if (_bfloat16(block[far]) != rounded[far]).any():
                return False
        if np.isnan(block.max()):  # a maximum is NaN if any number is
            return False
    return True


def widen(halves: Any) -> Any:
    """bfloat16 numbers, given as uint16, as float32."""
    bits = halves.astype(np.uint32)
    bits <<= np.uint32(16)
    return bits.view(np.float32)


def numpy_type(dtype: str) -> Any:
    """numpy's type for a dtype, uint16 for BF16; raises KeyError for types that are not numbers."""
    if dtype == "BOOL":
        return np.uint8
    return f"{dtype[0].lower()}{SIZES[dtype]}" if dtype[0] in "IU" else _NUMPY[dtype]


def numbers(view: memoryview, dtype: str) -> Any:
    """The elements as float64; integers past 2**53 lose digits. None for types without numbers."""
    if dtype not in NUMBERS:
        return None
    values = np.frombuffer(view, numpy_type(dtype))
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return (widen(values) if dtype == "BF16" else values).astype(np.float64)


def ordered(bits: Any, dtype: str) -> Any:
    """Floats, given as unsigned integers, as integers in the same order; neighbors differ by one.

    Zero of either sign is 0.
    """
    wide = bits.astype(np.int64)
    sign = np.int64(1) << np.int64(8 * SIZES[dtype] - 1)
    return np.where(wide & sign != 0, -(wide & ~sign), wide)
