"""Float casts bit for bit as torch makes them."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zckpt
from zckpt.core.checkpoint import cast as module
from zckpt.core.checkpoint.cast import (
    are_rounded,
    cast,
    numbers,
    numpy_type,
    put_mean,
    refuse_overflow,
    rounded,
)
from zckpt.core.checkpoint.dtypes import SIZES, TORCH_NAMES
from zckpt.errors import UnsupportedCheckpoint

FLOATS = ("F64", "F32", "F16", "BF16")
PAIRS = [(source, target) for source in FLOATS for target in FLOATS]


def torch_type(dtype: str) -> torch.dtype:
    dtype_of_torch = getattr(torch, TORCH_NAMES[dtype])
    assert isinstance(dtype_of_torch, torch.dtype)
    return dtype_of_torch


def check(tensor: torch.Tensor, source: str, target: str) -> None:
    """Casts the tensor's bytes and compares with torch's own."""
    result = bytearray(tensor.numel() * SIZES[target])
    data = bytearray(bytes(tensor.view(torch.uint8).numpy()))
    cast(memoryview(data), source, memoryview(result), target)
    mine = torch.frombuffer(result, dtype=torch_type(target))
    theirs = tensor.to(torch_type(target))
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[SIZES[target]]
    different = (mine.view(bits) != theirs.view(bits)) & ~(mine.isnan() & theirs.isnan())
    first = different.nonzero().flatten().tolist()[:3]
    assert not first, [(tensor[i].item(), mine[i].item(), theirs[i].item()) for i in first]


def around(values: list[float]) -> torch.Tensor:
    """The values, their neighbors in float64, and all of these negated."""
    numbers = np.array(values)
    near = np.concatenate([numbers, np.nextafter(numbers, np.inf), np.nextafter(numbers, -np.inf)])
    return torch.from_numpy(np.concatenate([near, -near]))


EDGES = around(
    [
        0.0,
        float("inf"),
        65504.0,  # largest float16
        65519.99,
        65520.0,  # halfway to what would be the next: infinite
        65536.0,
        2.0**-14,  # smallest normal float16
        2.0**-24,  # smallest denormal float16
        2.0**-25,
        3 * 2.0**-25,
        2.0**-126,
        2.0**-149,
        2.0**-150,
        3.3895313892515355e38,  # largest bfloat16
        3.3961775292304957e38,  # halfway to what would be the next
        3.4028234663852886e38,
        3.4028235677973366e38,
        1e300,
        5e-324,
        1 + 2.0**-8,  # ties of bfloat16
        1 + 3 * 2.0**-8,
        1 + 2.0**-11,  # ties of float16
        1 + 3 * 2.0**-11,
        1 + 2.0**-24,  # ties of float32
        1 + 3 * 2.0**-24,
        1 + 2.0**-8 + 2.0**-30,  # a tie only after a first rounding to float32
        1 + 2.0**-11 + 2.0**-30,
        1 + 2.0**-11 - 2.0**-30,
    ]
)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_edges_are_rounded_as_torch_rounds(source: str, target: str) -> None:
    check(EDGES.to(torch_type(source)), source, target)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_random_bits_are_rounded_as_torch_rounds(source: str, target: str) -> None:
    torch.manual_seed(0)
    data = torch.randint(0, 256, (SIZES[source] * 50_000,), dtype=torch.uint8)
    check(data.view(torch_type(source)), source, target)


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", ["F16", "BF16"])
def test_every_number_of_16_bits(source: str, target: str) -> None:
    check(torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch_type(source)), source, target)


@given(st.floats(width=64), st.sampled_from(PAIRS))
def test_any_number(value: float, pair: tuple[str, str]) -> None:
    check(torch.tensor([value], dtype=torch.float64).to(torch_type(pair[0])), *pair)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_not_a_number_stays_one(source: str, target: str) -> None:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[SIZES[source]]
    infinite = torch.tensor([float("inf")], dtype=torch_type(source)).view(bits)
    patterns = (infinite + torch.tensor([1, 2**5, -1 - infinite.item()])).to(bits)
    values = patterns.view(torch_type(source))
    assert values.isnan().all()
    result = bytearray(3 * SIZES[target])
    data = bytearray(bytes(values.view(torch.uint8).numpy()))
    cast(memoryview(data), source, memoryview(result), target)
    assert torch.frombuffer(result, dtype=torch_type(target)).isnan().all()


def memory(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.view(torch.uint8).numpy())


@pytest.mark.parametrize("target", ["BF16", "F16", "F32"])
def test_few_numbers_are_rounded_as_torch_rounds(target: str) -> None:
    """Edges, ties among them; without numpy."""
    ties = (torch.arange(2**16) << 16 | 0x8000).to(torch.int32).view(torch.float32)
    for wide in (EDGES.float(), ties[~ties.isnan()], torch.empty(0)):
        assert rounded(memory(wide), target) == memory(wide.to(torch_type(target)))
    for bits in (0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000):  # they are next to infinity or zero
        wide = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
        got = bytearray(rounded(memory(wide), target) or b"")
        assert torch.frombuffer(got, dtype=torch_type(target)).isnan().all()


def test_few_numbers_of_other_types() -> None:
    assert rounded(bytes(8), "F64") is None
    assert are_rounded(bytes(8), "F64", bytes(4), "F32") is None
    assert are_rounded(b"abcd", "F32", b"abcd", "F32") is True
    assert are_rounded(b"abcd", "F32", b"abce", "F32") is False


@pytest.mark.parametrize("wide", [0x7F800001, 0x7FC00001, 0xFFFFFFFF])
def test_there_is_one_bfloat16_that_is_no_number(wide: int) -> None:
    """torch has the same one for all of float32's."""
    assert rounded(struct.pack("<I", wide), "BF16") == b"\xc0\x7f"


@pytest.mark.parametrize(
    ("wide_dtype", "narrow_dtype"), [("F64", "F32"), ("F64", "BF16"), ("F32", "F64")]
)
def test_pairs_of_types_that_are_not_known(wide_dtype: str, narrow_dtype: str) -> None:
    """Their values are not compared, but their numbers of elements."""
    wide, narrow = bytes(3 * SIZES[wide_dtype]), bytes(3 * SIZES[narrow_dtype])
    assert are_rounded(wide, wide_dtype, narrow, narrow_dtype) is None
    longer = narrow + bytes(SIZES[narrow_dtype])
    assert are_rounded(wide, wide_dtype, longer, narrow_dtype) is False


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "C64"])
def test_types_without_numbers(dtype: str) -> None:
    with pytest.raises(KeyError, match=dtype):
        numpy_type(dtype)
    assert numbers(memoryview(bytes(8)), dtype) is None


def test_many_numbers_are_cast_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CAST_BLOCK", 4)
    check(torch.arange(11, dtype=torch.float32), "F32", "F64")


SIGNALLING = memoryview(bytearray(struct.pack("<I", 0x7F800001)))
HUGE = memoryview(bytearray(struct.pack("<d", 1e300)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: cast(HUGE, "F64", memoryview(bytearray(4)), "F32"),
        lambda: cast(SIGNALLING, "F32", memoryview(bytearray(8)), "F64"),
        lambda: numbers(SIGNALLING, "F32"),
    ],
    ids=["to infinity", "no number", "no number, as float64"],
)
def test_numpy_prints_no_warning(make: Callable[[], object]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make()


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_weights_of_masters(dtype: str) -> None:
    masters = torch.randn(100, generator=torch.Generator().manual_seed(1))
    wide, narrow = memory(masters), memory(masters.to(torch_type(dtype)))
    assert are_rounded(wide, "F32", narrow, dtype) is True
    assert are_rounded(wide, "F32", narrow[:-2] + b"\0\0", dtype) is False
    assert are_rounded(wide, "F32", narrow[:-2], dtype) is False


@pytest.mark.parametrize(
    "pair", [("I64", "F32"), ("F32", "I32"), ("F8_E4M3", "F32"), ("F32", "C64")]
)
def test_what_is_no_plain_float_is_refused(pair: tuple[str, str]) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=f"{pair[0]}.*{pair[1]}"):
        cast(memoryview(bytearray(8)), pair[0], memoryview(bytearray(8)), pair[1])


@pytest.mark.parametrize("target", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("source", ["F32", "BF16", "F16"])
def test_means_are_rounded_once(source: str, target: str) -> None:
    """As torch computes them in float64; equal numbers stay as they are."""
    generator = torch.Generator().manual_seed(3)
    dtypes = [getattr(torch, TORCH_NAMES[name]) for name in (source, target)]
    copies = [torch.randn(1000, generator=generator).to(dtypes[0]) for _ in range(3)]
    for parts in (copies, [copies[0]] * 3):
        got = torch.empty(1000, dtype=dtypes[1])
        views = [memoryview(part.view(torch.uint8).numpy()) for part in parts]
        put_mean(
            [(view, source) for view in views], memoryview(got.view(torch.uint8).numpy()), target
        )
        wide = torch.stack([part.double() for part in parts]).sum(0) / 3
        assert torch.equal(got, (parts[0] if parts[0] is parts[1] else wide).to(dtypes[1]))


def test_the_mean_of_integers_is_refused() -> None:
    with pytest.raises(UnsupportedCheckpoint, match="cannot average I64"):
        put_mean([(memoryview(bytes(8)), "I64")], memoryview(bytearray(8)), "I64")


@pytest.mark.parametrize("types", [("I64", "F32"), ("F32", "I64")])
def test_a_mean_of_which_a_part_is_no_float_is_refused(types: tuple[str, str]) -> None:
    copies = [(memoryview(bytes(SIZES[dtype])), dtype) for dtype in types]
    with pytest.raises(UnsupportedCheckpoint, match=f"cannot average {types[0]} as F32"):
        put_mean(copies, memoryview(bytearray(4)), "F32")


def turn(value: float, source: str, target: str) -> None:
    """Casts one number, and refuses it if only that has made it infinite."""
    wide = torch.tensor([value], dtype=torch_type(source))
    before = memoryview(bytearray(memory(wide)))
    after = memoryview(bytearray(SIZES[target]))
    cast(before, source, after, target)
    refuse_overflow("w", before, source, after, target)


@pytest.mark.parametrize(
    ("value", "source", "target", "name"),
    [
        (1e300, "F64", "F32", "float32"),
        (-1e300, "F64", "F16", "float16"),
        (1e5, "F32", "F16", "float16"),
        (2.0**17, "BF16", "F16", "float16"),
    ],
)
def test_a_number_past_the_range_is_named(
    value: float, source: str, target: str, name: str
) -> None:
    said = f"w has numbers that {name} cannot hold, such as {value:g}"
    with pytest.raises(UnsupportedCheckpoint) as refused:
        turn(value, source, target)
    assert refused.value.message == said


@pytest.mark.parametrize(
    ("value", "source", "target"),
    [(3.4e38, "F32", "BF16"), (float("inf"), "F64", "F32"), (float("nan"), "F32", "F16")],
)
def test_what_is_not_refused(value: float, source: str, target: str) -> None:
    """The largest of float32 are rounded to infinity in bfloat16, which is not searched."""
    turn(value, source, target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_finite_number_does_not_become_infinite(dtype: torch.dtype, tmp_path: Path) -> None:
    """float16 ends at 65,504; what was infinite or no number before stays so."""
    weights = torch.tensor([1.0, float("inf"), float("nan"), 64000.0]).to(dtype)
    for name, last in (("small", 1.0), ("large", -1e5)):
        tensors = {"a": weights, "b": torch.full((3, 5), last, dtype=dtype)}
        torch.save({"model": tensors}, tmp_path / f"{name}.pt")
    zckpt.convert(tmp_path / "small.pt", tmp_path / "small", dtype="fp16", weights_only=True)
    assert torch.equal(zckpt.load(tmp_path / "small", "b/param"), torch.ones(3, 5).half())
    with pytest.raises(UnsupportedCheckpoint, match=r"b/param .* float16 cannot hold, such as -"):
        zckpt.convert(tmp_path / "large.pt", tmp_path / "large", dtype="fp16", weights_only=True)
    assert not (tmp_path / "large").exists()
    zckpt.convert(tmp_path / "large.pt", tmp_path / "large", dtype="bf16", weights_only=True)
