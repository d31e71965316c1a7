"""Few weights, and what their masters are rounded to, without numpy."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zckpt.core.rounding import are_rounded, rounded_number, rounds_to


def memory(tensor: torch.Tensor) -> memoryview:
    return memoryview(bytes(tensor.view(torch.uint8).numpy()))


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20), st.integers(0, 19), st.integers(0, 15))
def test_rounding_of_few_is_that_of_torch(bits: list[int], place: int, bit: int) -> None:
    kept = [number for number in bits if number & 0x7FFFFFFF <= 0x7F800000]
    wide = torch.tensor(kept, dtype=torch.uint32).view(torch.float32)
    narrow = wide.to(torch.bfloat16)
    assert rounds_to(memory(wide), memory(narrow))
    if place < len(kept):
        narrow.view(torch.int16)[place] ^= 1 << bit if bit < 15 else -(1 << 15)
        assert not rounds_to(memory(wide), memory(narrow))


def test_a_nan_is_left_to_the_cast() -> None:
    for bits, half in ((0x7FFFFFFF, 0x8000), (0x7FC00000, 0x7FC0), (0xFFFFFFFF, 0x0000)):
        wide = torch.tensor([bits], dtype=torch.uint32)
        assert not rounds_to(memory(wide), memory(torch.tensor([half], dtype=torch.uint16)))


@pytest.mark.parametrize(("dtype", "name"), [("BF16", "bfloat16"), ("F16", "float16")])
def test_weights_of_masters(dtype: str, name: str) -> None:
    masters = torch.randn(100, generator=torch.Generator().manual_seed(1))
    weights = masters.to(getattr(torch, name))
    wide, narrow = (bytes(part.view(torch.uint8).numpy()) for part in (masters, weights))
    assert are_rounded(wide, "F32", narrow, dtype) is True
    assert are_rounded(wide, "F32", narrow[:-2] + b"\0\0", dtype) is False
    assert are_rounded(wide, "F32", narrow[:-2], dtype) is False
    assert rounded_number(wide[:4], dtype) == narrow[:2]
    assert rounded_number(wide[:4], "F32") == wide[:4]


def test_a_master_beyond_the_range_of_float16() -> None:
    assert are_rounded(struct.pack("<f", 1e6), "F32", struct.pack("<e", 1.0), "F16") is False
    assert rounded_number(struct.pack("<f", 1e6), "F16") == b""


def test_weights_of_the_same_type() -> None:
    assert are_rounded(b"abcd", "F32", b"abcd", "F32") is True
    assert are_rounded(b"abcd", "F32", b"abce", "F32") is False


def test_types_that_no_engine_rounds_to() -> None:
    assert are_rounded(bytes(8), "F64", bytes(4), "F32") is None
