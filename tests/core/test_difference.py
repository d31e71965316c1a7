"""Numbers of a difference, against torch's own; how parts of a tensor add up."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zckpt.core.checkpoint.cast import CAST_BLOCK
from zckpt.core.checkpoint.dtypes import SIZES, TORCH_NAMES
from zckpt.core.comparison.difference import ULPS, Difference, measure_difference, same

FLOATS = ("F64", "F32", "F16", "BF16")


def memory(tensor: torch.Tensor) -> memoryview:
    return memoryview(bytearray(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()))


def measured(a: torch.Tensor, b: torch.Tensor, dtype: str, start: int = 0) -> Difference:
    return measure_difference(memory(a), dtype, memory(b), dtype, start, rounded=False)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("seed", range(3))
def test_numbers_are_those_of_torch(dtype: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, TORCH_NAMES[dtype])
    a = torch.randn(1000, generator=generator, dtype=torch.float64).to(kind)
    b = a.clone()
    places = torch.randperm(1000, generator=generator)[: 10 * seed + 1]
    b[places] += torch.ones((), dtype=kind)
    places = (a != b).nonzero().view(-1)
    difference = measured(a, b, dtype, start=50)
    distance = (a.double() - b.double()).abs()
    assert difference.count == len(places)
    assert difference.first == 50 + int(places.min())
    assert (difference.a, difference.b) == (a[places[0]].item(), b[places[0]].item())
    assert difference.max_abs == distance.max().item()
    expected = torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0).item()
    assert difference.cosine == pytest.approx(expected, rel=1e-12)
    json.dumps([difference.first, difference.a, difference.max_ulp])  # no numbers of numpy


@pytest.mark.parametrize("dtype", FLOATS)
def test_ulps_are_steps_to_the_next_number(dtype: str) -> None:
    kind = getattr(torch, TORCH_NAMES[dtype])
    a = torch.tensor([1.0, -1.0, 0.0, -2.0], dtype=kind)
    b = a.clone()
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[SIZES[dtype]]
    b.view(bits)[1] += 3
    assert measured(a, b, dtype).max_ulp == 3
    below, above = torch.zeros(1, dtype=kind), torch.zeros(1, dtype=kind)
    below.view(bits)[0] = torch.iinfo(bits).min + 1  # the first number below zero
    above.view(bits)[0] = 1
    assert measured(below, above, dtype).max_ulp == 2


def test_zeros_of_both_signs_differ_by_no_step() -> None:
    difference = measured(torch.tensor([0.0]), torch.tensor([-0.0]), "F32")
    assert (difference.count, difference.max_abs, difference.max_ulp) == (1, 0.0, 0)


def test_nans_and_infinities() -> None:
    nan, inf = math.nan, math.inf
    a = torch.tensor([nan, inf, nan, 1.0, inf])
    b = torch.tensor([nan, inf, 1.0, 1.0, -inf])
    difference = measured(a, b, "F32")
    assert (difference.count, difference.first, difference.max_abs) == (2, 2, inf)
    assert difference.cosine is None


def test_what_rounding_makes_of_a_nan_is_no_difference() -> None:
    a = torch.tensor([0x7FC0, 0x7FC1, 0x3F80], dtype=torch.int16)
    b = torch.tensor([0x7FC0, 0x7FC0, 0x3F80], dtype=torch.int16)
    assert measure_difference(memory(a), "BF16", memory(b), "BF16", 0, rounded=False).count == 1
    assert measure_difference(memory(a), "BF16", memory(b), "BF16", 0, rounded=True).count == 0


def test_other_types_are_compared_by_value() -> None:
    values = torch.tensor([0.0, 1.5, -3.0, math.nan])
    narrow = values.to(torch.bfloat16)
    assert (
        measure_difference(memory(values), "F32", memory(narrow), "BF16", 0, rounded=False).count
        == 0
    )
    values[1] = 1.5000001
    difference = measure_difference(memory(values), "F32", memory(narrow), "BF16", 7, rounded=False)
    assert (difference.count, difference.first, difference.max_ulp) == (1, 8, None)
    whole = torch.tensor([0, 2, -3, 4])
    difference = measure_difference(memory(whole), "I64", memory(values), "F32", 0, rounded=False)
    assert (difference.count, difference.a, difference.b) == (2, 2, values[1].item())


def test_a_nan_on_one_side_alone_differs() -> None:
    """In two types, in one, and in one to which a side was rounded."""
    number, nan = torch.tensor([1.5, 2.0]), torch.tensor([1.5, math.nan])
    for a, b in ((number, nan), (nan, number)):
        narrow = b.to(torch.bfloat16)
        for difference in (
            measure_difference(memory(a), "F32", memory(narrow), "BF16", 3, rounded=False),
            measure_difference(memory(a), "F32", memory(b), "F32", 3, rounded=False),
            measure_difference(memory(a), "F32", memory(b), "F32", 3, rounded=True),
        ):
            assert (difference.count, difference.first) == (1, 4)
            assert (str(difference.a), str(difference.b)) == (str(a[1].item()), str(b[1].item()))
            assert (difference.max_abs, difference.cosine) == (math.inf, None)
            assert difference.nans == ((0, 1) if b is nan else (1, 0))


@pytest.mark.parametrize("dtype", ["F8_E4M3", "C64"])
def test_what_is_no_number_is_compared_by_its_bytes(dtype: str) -> None:
    a, b = bytearray(range(16)), bytearray(range(16))
    b[9] ^= 1
    for rounded in (False, True):
        difference = measure_difference(memoryview(a), dtype, memoryview(b), dtype, 0, rounded)
        assert (difference.count, difference.first) == (1, 9 // SIZES[dtype])
        assert (difference.a, difference.b, difference.max_abs) == (None, None, None)
    with pytest.raises(AssertionError, match="no values"):
        measure_difference(memoryview(a), dtype, memoryview(b), "U8", 0, rounded=False)


@given(st.lists(st.tuples(st.booleans(), st.floats(-4, 4, width=32)), min_size=2), st.data())
def test_parts_add_up_to_the_whole(items: list[tuple[bool, float]], data: st.DataObject) -> None:
    a = torch.tensor([value for _, value in items])
    b = torch.tensor([value + differs for differs, value in items])
    cut = data.draw(st.integers(1, len(items) - 1))
    parts = [measured(a[cut:], b[cut:], "F32", cut), measured(a[:cut], b[:cut], "F32")]
    whole = measured(a, b, "F32")
    for order in (parts, parts[::-1]):
        joined = Difference()
        for part in order:
            joined.add(part)
        for key in ("count", "first", "a", "b", "max_abs", "max_ulp"):
            assert getattr(joined, key) == getattr(whole, key)
        for key in ("dot", "aa", "bb"):
            assert getattr(joined, key) == pytest.approx(getattr(whole, key))


@pytest.mark.parametrize(("dtype", "other"), [("BF16", "F32"), ("F32", "BF16"), ("F32", "F32")])
def test_the_last_of_many_elements(dtype: str, other: str) -> None:
    count = 2 * CAST_BLOCK + 3
    a = torch.ones(count, dtype=getattr(torch, TORCH_NAMES[dtype]))
    b = torch.ones(count, dtype=getattr(torch, TORCH_NAMES[other]))
    b[-1] = 2
    difference = measure_difference(memory(a), dtype, memory(b), other, 5, rounded=False)
    assert (difference.count, difference.first) == (1, 5 + count - 1)
    assert (difference.a, difference.b, difference.dot) == (1, 2, count + 1)


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_same_is_equality_of_bytes(a: bytes, b: bytes) -> None:
    assert same(memoryview(bytearray(a)), memoryview(bytearray(b))) == (a == b)
    assert same(memoryview(bytearray(a)), memoryview(bytearray(a)))


@pytest.mark.parametrize("size", "BHIQ")
def test_same_looks_at_every_byte(size: str) -> None:
    """The length of a view counts its elements: a difference in the last one is behind it."""
    a = memoryview(bytearray(80))
    for place in (0, 79):
        b = memoryview(bytearray(80))
        b[place] = 1
        assert not same(a.cast(size), b.cast(size))
    assert same(a.cast(size), memoryview(bytearray(80)).cast(size))


def test_integers_past_the_digits_of_a_float() -> None:
    a, b = torch.tensor([2**60 + 1]), torch.tensor([2**60])
    difference = measured(a, b, "I64")
    assert (difference.count, difference.a, difference.b) == (1, 2**60 + 1, 2**60)
    assert difference.max_ulp is None


def test_truth_against_numbers() -> None:
    a, b = memoryview(bytearray([1, 0, 1])), memoryview(bytearray([1, 1, 1]))
    assert measure_difference(a, "BOOL", b, "U8", 0, rounded=False).count == 1
    assert measure_difference(b, "BOOL", b, "U8", 0, rounded=False).count == 0
    difference = measure_difference(a, "BOOL", b, "BOOL", 0, rounded=False)
    assert (difference.count, difference.first, difference.a, difference.b) == (1, 1, 0, 1)


def test_vectors_without_an_angle() -> None:
    huge = torch.tensor([[1e160, 0], [0, 1e160]], dtype=torch.float64)
    assert measured(huge[0], huge[1], "F64").cosine is None
    assert measured(torch.zeros(2), torch.ones(2), "F32").cosine is None
    assert measured(torch.full((1,), 1e-9), torch.ones(1), "F32").cosine == 1


def test_no_cosine_is_larger_than_one() -> None:
    vectors = [torch.full((count,), 0.3) for count in range(1, 40)]
    differences = [measured(vector, vector, "F32") for vector in vectors]
    assert any(each.dot > math.sqrt(each.aa) * math.sqrt(each.bb) for each in differences)
    assert max(each.cosine or 0 for each in differences) == 1
    assert min(measured(vector, -vector, "F32").cosine or 0 for vector in vectors) == -1


def test_changes_are_counted_by_their_size() -> None:
    """By powers of two, and by steps to the next number; parts add up, also from JSON."""
    a = torch.tensor([0.0, 1.0, 4.0, 7.0, 2.0, math.nan, 0.0])
    b = torch.tensor([1.0, 4.0, 4.25, 7.0, 0.0, 1.0, -0.0])
    whole = measured(a, b, "F32")
    assert whole.changes == {0: 1, 1: 2, -2: 1}
    assert whole.squares == 1 + 9 + 0.0625 + 4
    assert sum(whole.ulps) == whole.count == 6
    assert whole.ulps[0] == 1  # zeros of two signs
    added = Difference()
    for start, stop in ((4, 7), (0, 2), (2, 4)):
        part = measured(a[start:stop], b[start:stop], "F32", start)
        part.changes = {str(power): count for power, count in part.changes.items()}
        added.add(part)
    for key in ("count", "first", "max_abs", "max_ulp", "squares", "changes", "ulps", "nans"):
        assert getattr(added, key) == getattr(whole, key), key


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_distance_on_either_side(sign: int) -> None:
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])
    a[0] = torch.nextafter(a[0], torch.tensor(sign * -9.0))
    for _ in range(5):
        a[1] = torch.nextafter(a[1], torch.tensor(sign * 9.0))
    assert measured(a, b, "F32").max_ulp == 5


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([math.inf, 0.0], [0.0, math.inf]),
        ([1.7e308, 1.0], [-1.7e308, 1.0]),
        ([1e200, 1.0], [1e200, 2.0]),
    ],
)
def test_numbers_that_float64_cannot_hold(a: list[float], b: list[float]) -> None:
    """Products of zero and infinity, and sums and distances that overflow: numpy warns of them."""
    sides = [torch.tensor(side, dtype=torch.float64) for side in (a, b)]
    difference = measured(sides[0], sides[1], "F64")
    assert difference.count == sum(one != other for one, other in zip(a, b, strict=True))
    assert difference.max_abs == max(abs(one - other) for one, other in zip(a, b, strict=True))
    assert difference.cosine is None


def test_steps_are_counted_in_bins() -> None:
    """Of 0, 1 and 2 steps, then of each power of two up to 1024."""
    steps = [1, 2, 3, 4, 5, 512, 513, 1024, 1025, 1 << 20]
    a = torch.ones(len(steps))
    b = (a.view(torch.int32) + torch.tensor(steps, dtype=torch.int32)).view(torch.float32)
    for difference in (measured(a, b, "F32"), measured(-b, -a, "F32")):
        counted = {name: n for name, n in zip(ULPS, difference.ulps, strict=True) if n}
        expected = {"1": 1, "2": 1, "3-4": 2, "5-8": 1, "257-512": 1, "513-1024": 2, ">1024": 2}
        assert counted == expected
