"""Casts numbers from one float type to another, as torch does: to nearest, ties to even.

`cast` converts many numbers with numpy, and with the bfloat16 of ml_dtypes. `rounded` converts a
few numbers without these packages. So two commands need not import them: `inspect`, and a
conversion that compares only the first elements of masters with their weights.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import copysign, inf
from typing import TYPE_CHECKING, Any

from ...errors import UnsupportedCheckpoint
from .dtypes import NUMBERS, SIZES, TORCH_NAMES

if TYPE_CHECKING:
    import numpy as np

CAST_BLOCK = 1 << 18  # elements that are cast at a time: they fit into the processor's cache
CASTABLE = ("F64", "F32", "F16", "BF16")
_INFINITE = 0x7F800000  # the bits of a float32; those of a NaN are larger


def rounded(wide: bytes, dtype: str) -> bytes | None:
    """Rounds little-endian float32 numbers to F32, BF16 or F16; None for another type."""
    if dtype == "F32":
        return wide
    if dtype == "BF16":
        bits = struct.unpack(f"<{len(wide) // 4}I", wide)
        return struct.pack(f"<{len(bits)}H", *map(_bfloat16, bits))
    if dtype == "F16":
        values = struct.unpack(f"<{len(wide) // 4}f", wide)
        return b"".join(map(_float16, values))
    return None


def _bfloat16(bits: int) -> int:
    if bits & 0x7FFFFFFF > _INFINITE:
        return 0x7FC0
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def _float16(value: float) -> bytes:
    try:
        return struct.pack("<e", value)
    except OverflowError:  # Python does not round to infinity
        return struct.pack("<e", copysign(inf, value))


def are_rounded(wide: bytes, wide_dtype: str, narrow: bytes, narrow_dtype: str) -> bool | None:
    """Whether 16-bit weights (`narrow`) equal their fp32 masters (`wide`), rounded to 16 bits.

    Both are compared bit for bit; nothing is rounded if both have the same type. Returns None for
    types that zckpt cannot round: it rounds only F32 to BF16 or F16.
    """
    if wide_dtype == narrow_dtype:
        return wide == narrow
    if len(wide) // SIZES[wide_dtype] != len(narrow) // SIZES[narrow_dtype]:
        return False
    if wide_dtype != "F32" or narrow_dtype not in ("BF16", "F16"):
        return None
    return rounded(wide, narrow_dtype) == narrow


def numpy_type(dtype: str) -> np.dtype[Any]:
    """numpy's type for a dtype such as `BF16`; raises KeyError for dtypes that numpy lacks."""
    import ml_dtypes
    import numpy as np

    if dtype not in NUMBERS:
        raise KeyError(dtype)
    numpy_types: Any = {"BF16": ml_dtypes.bfloat16, "BOOL": np.uint8}
    result: np.dtype[Any] = np.dtype(numpy_types.get(dtype, TORCH_NAMES[dtype]))
    return result


def array(view: memoryview | bytes, dtype: str) -> np.ndarray[Any, Any]:
    """Views bytes as a numpy array of this dtype; raises KeyError as `numpy_type` does."""
    import numpy as np

    return np.frombuffer(view, numpy_type(dtype))


def cast(source: memoryview, source_dtype: str, target: memoryview, target_dtype: str) -> None:
    """Fills `target` with the elements of `source`, converted to the target's float type.

    Raises UnsupportedCheckpoint for types that are not floats.
    """
    if source_dtype not in CASTABLE or target_dtype not in CASTABLE:
        raise UnsupportedCheckpoint(
            "type-unsupported", f"cannot cast {source_dtype} to {target_dtype}"
        )
    _cast(array(source, source_dtype), array(target, target_dtype))


def _cast(values: np.ndarray[Any, Any], result: np.ndarray[Any, Any]) -> None:
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(values), CAST_BLOCK):
            block = values[start : start + CAST_BLOCK]
            if block.itemsize == 8 and result.itemsize == 2:  # torch rounds twice
                block = block.astype(np.float32)
            result[start : start + CAST_BLOCK] = block


def refuse_overflow(
    name: str, source: memoryview, source_dtype: str, target: memoryview, target_dtype: str
) -> None:
    """Raises UnsupportedCheckpoint if `cast` has made a finite number of tensor `name` infinite.

    The largest finite F16 is 65,504, and models that were trained in BF16 may have larger weights.
    A BF16 target needs no check, because BF16 has the range of F32.
    """
    import numpy as np

    if target_dtype not in ("F16", "F32") or source_dtype in ("F16", target_dtype):
        return
    result = array(target, target_dtype)
    if np.isfinite(result).all():
        return
    values = array(source, source_dtype)
    lost = values[np.isinf(result) & np.isfinite(values)]
    if len(lost):
        raise UnsupportedCheckpoint(
            "value-out-of-range",
            f"{name} has numbers that {TORCH_NAMES[target_dtype]} cannot hold, such as "
            f"{float(lost[0]):g}",
            hint="choose a type with a larger range: --dtype bf16 or --dtype fp32",
            subject=name,
        )


def put_mean(
    copies: Sequence[tuple[memoryview, str]], target: memoryview, target_dtype: str
) -> None:
    """Fills `target` with the mean of all `copies`, element by element.

    Each copy is a buffer with the name of its dtype. The mean is computed in float64, and then
    rounded as `cast` rounds. The mean of equal numbers is that number. Raises UnsupportedCheckpoint
    for types that are not floats.
    """
    import numpy as np

    if any(dtype not in CASTABLE for dtype in (target_dtype, *(own for _, own in copies))):
        raise UnsupportedCheckpoint(
            "type-unsupported", f"cannot average {copies[0][1]} as {target_dtype}"
        )
    total: Any = 0.0
    for view, dtype in copies:
        total = total + array(view, dtype).astype(np.float64)
    _cast(total / len(copies), array(target, target_dtype))


def numbers(view: memoryview, dtype: str) -> Any:
    """Converts elements to a float64 array; integers beyond 2**53 lose digits.

    None for a dtype whose elements numpy cannot convert to numbers.
    """
    import numpy as np

    if dtype not in NUMBERS:
        return None
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return array(view, dtype).astype(np.float64)


def ordered(bits: Any, dtype: str) -> Any:
    """Maps floats to integers in the same order; neighboring floats become neighboring integers.

    The difference of two results is a distance in units in the last place. `bits` has the floats'
    bits as unsigned integers. 0.0 and -0.0 both become 0.
    """
    import numpy as np

    wide = bits.astype(np.int64)
    sign = np.int64(1) << np.int64(8 * SIZES[dtype] - 1)
    return np.where(wide & sign != 0, -(wide & ~sign), wide)
