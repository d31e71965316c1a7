"""The types of elements: what torch says of them, and numbers as bytes and back."""

from __future__ import annotations

import pytest
import torch

from zckpt.core.checkpoint.dtypes import (
    FLOATS,
    FROM_TORCH,
    NUMBERS,
    SIZES,
    STORAGES,
    TORCH_NAMES,
    decode,
    encode,
)


def kind(dtype: str) -> torch.dtype:
    found = getattr(torch, TORCH_NAMES[dtype])
    assert isinstance(found, torch.dtype)
    return found


@pytest.mark.parametrize("dtype", SIZES)
def test_sizes_and_kinds_are_those_of_torch(dtype: str) -> None:
    assert FROM_TORCH[str(kind(dtype)).removeprefix("torch.")] == dtype
    assert kind(dtype).itemsize == SIZES[dtype]
    assert kind(dtype).is_floating_point == (dtype in FLOATS)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("name", STORAGES)
def test_storages_have_the_types_that_torch_gives_them(name: str) -> None:
    own = torch.uint8 if name == "UntypedStorage" else getattr(torch, name).dtype
    assert kind(STORAGES[name]) == own


@pytest.mark.parametrize("dtype", sorted(NUMBERS))
def test_a_number_has_the_bytes_that_torch_gives_it(dtype: str) -> None:
    for number in (0, 1) if dtype == "BOOL" else (0, 3, 100):
        data = bytes(torch.tensor([number], dtype=kind(dtype)).view(torch.uint8).tolist())
        assert encode(dtype, number) == data
        assert decode(dtype, data) == number
