"""Are the weights of a checkpoint what its masters are rounded to?

The import of numpy takes longer than rounding FEW numbers without it. For more, it is imported in a
thread of its own, while others read.
"""

from __future__ import annotations

import struct
import threading
from contextlib import suppress

from .dtypes import SIZES
from .fileio import Buffer

FEW = 1 << 17  # elements


def rounds_to(wide: memoryview, narrow: memoryview) -> bool:
    """Whether float32 numbers round to these bfloat16 numbers, to nearest, ties to even.

    This is for few numbers: it saves the import of numpy. It is False if one is a NaN, whose
    rounding `cast` knows.
    """
    pairs = zip(wide.cast("I"), narrow.cast("H"), strict=True)
    return all(
        (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 == half and bits & 0x7FFFFFFF <= 0x7F800000
        for bits, half in pairs
    )


def are_rounded(wide: bytes, wide_dtype: str, narrow: bytes, narrow_dtype: str) -> bool | None:
    """Whether few weights are, bit for bit, what as many masters are rounded to.

    None for pairs of types that are not known: equal types, F32 to BF16 and F32 to F16 are. False
    if a master is a NaN, or is beyond the largest F16.
    """
    if wide_dtype == narrow_dtype:
        return wide == narrow
    if len(wide) // SIZES[wide_dtype] != len(narrow) // SIZES[narrow_dtype]:
        return False
    if (wide_dtype, narrow_dtype) == ("F32", "BF16"):
        return rounds_to(memoryview(wide), memoryview(narrow))
    if (wide_dtype, narrow_dtype) == ("F32", "F16"):
        values = struct.unpack(f"<{len(wide) // 4}f", wide)
        try:
            return struct.pack(f"<{len(values)}e", *values) == narrow
        except OverflowError:  # Python has no rounding to infinity
            return False
    return None


def rounded_number(wide: bytes, narrow_dtype: str) -> bytes:
    """One float32 number in another type; empty for other types, and beyond the largest F16."""
    if narrow_dtype == "F32":
        return wide
    if narrow_dtype == "BF16":
        bits = int.from_bytes(wide, "little")
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF).to_bytes(2, "little")
    if narrow_dtype == "F16":
        with suppress(OverflowError):  # Python has no rounding to infinity
            return struct.pack("<e", *struct.unpack("<f", wide))
    return b""


def import_numpy() -> None:
    """Begins to import what rounds many numbers, and returns at once."""
    with suppress(RuntimeError):  # a limit of memory or of processes
        threading.Thread(target=_import_numpy).start()


def _import_numpy() -> None:
    from . import cast  # noqa: F401


class Rounding:
    """One thread's roundings of buffers of up to `size` bytes.

    With `few` numbers, `surely_agree` does without numpy.
    """

    def __init__(self, size: int, few: bool) -> None:
        self._size = size
        self._few = few
        self._result: Buffer | None = None

    def surely_agree(
        self, wide: memoryview, wide_dtype: str, narrow: memoryview, narrow_dtype: str
    ) -> bool:
        """True if every number rounds to its counterpart of fewer bits.

        False can also mean that this was not decided (a NaN, other types): then compare `rounded`.
        """
        if (wide_dtype, narrow_dtype) != ("F32", "BF16"):
            return False
        if self._few:
            return rounds_to(wide, narrow)
        from .cast import rounds_to_bfloat16

        return rounds_to_bfloat16(wide, narrow)

    def rounded(self, wide: memoryview, wide_dtype: str, narrow_dtype: str) -> memoryview:
        """All numbers in the type `narrow_dtype`, until the next call."""
        from .cast import cast

        self._result = self._result or Buffer(self._size)
        result = self._result.view[: len(wide) // SIZES[wide_dtype] * SIZES[narrow_dtype]]
        cast(wide, wide_dtype, result, narrow_dtype)
        return result
