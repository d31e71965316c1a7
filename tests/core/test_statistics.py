"""Statistics of checkpoints against torch's in float64; what is dead or impossible is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zckpt
from zckpt.core.checkpoint.dtypes import NUMBERS, TORCH_NAMES
from zckpt.core.checkpoint.entries import Entry, key_of
from zckpt.core.checkpoint.manifest import Manifest, Parameter, Run
from zckpt.core.comparison import statistics
from zckpt.core.comparison.statistics import measure
from zckpt.core.passes.resources import Copying
from zckpt.core.storage.fragments import Extent, solid
from zckpt.errors import warning
from zckpt.proof import health

from .. import faults
from ..conftest import EXAMPLE, Result
from ..proof.test_health import measure_all

Zckpt = Callable[..., Result]


def memory(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()).cast("B")


def random_numbers(dtype: str, count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(count, generator=generator, dtype=torch.float64) * 3
    if dtype[0] in "UB":
        numbers = numbers.abs()
    return numbers.to(getattr(torch, TORCH_NAMES[dtype]))


def assert_right(measured: statistics.Statistics, tensor: torch.Tensor) -> None:
    """As torch has it, of the finite numbers as float64."""
    every = tensor.double().view(-1)
    finite = every[every.isfinite()]
    assert measured.elements == len(every)
    assert measured.finite == len(finite)
    assert measured.nan == int(every.isnan().sum())
    assert measured.positive_inf == int((every == math.inf).sum())
    assert measured.negative_inf == int((every == -math.inf).sum())
    assert measured.negative == int((finite < 0).sum())
    assert measured.zero == int((finite == 0).sum())
    assert measured.positive == int((finite > 0).sum())
    if len(finite):
        assert (measured.min, measured.max) == (finite.min().item(), finite.max().item())
        scale = finite.abs().max().item()
        assert measured.mean == pytest.approx(finite.mean().item(), rel=1e-12, abs=1e-13 * scale)
        assert measured.norm == pytest.approx(finite.norm().item(), rel=1e-11)
    if len(finite) > 1:
        assert measured.std == pytest.approx(finite.std().item(), rel=1e-10, abs=1e-13 * scale)
    else:
        assert measured.std is None


def magnitudes_of(measured: statistics.Statistics) -> Any:
    return statistics.magnitudes(statistics.exponents(measured.histogram))


@pytest.mark.parametrize("dtype", sorted(NUMBERS))
@pytest.mark.parametrize("count", [1, 2, 1000, 70_000])
def test_numbers_are_those_of_torch(dtype: str, count: int) -> None:
    tensor = random_numbers(dtype, count)
    measured = measure(memory(tensor), dtype, histogram=True)
    assert_right(measured, tensor)
    magnitudes = magnitudes_of(measured)
    assert sum(magnitudes["counts"] if magnitudes else ()) == measured.finite - measured.zero


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_what_is_not_finite_is_counted_apart(dtype: str) -> None:
    tensor = random_numbers(dtype, 3000)
    tensor[7], tensor[8], tensor[2999] = math.nan, math.inf, math.inf
    tensor[100], tensor[200], tensor[300] = -math.inf, 0.0, -0.0
    assert_right(measure(memory(tensor), dtype, histogram=True), tensor)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nothing_finite(value: float) -> None:
    measured = measure(memory(torch.full((5,), value)), "F32", histogram=True)
    report = measured.report()
    assert [report[key] for key in ("min", "max", "mean", "std", "norm")] == [None] * 5
    assert (report["nan"], report["inf"]) == ((5, 0) if math.isnan(value) else (0, 5))
    assert magnitudes_of(measured) is None


def test_no_elements() -> None:
    report = measure(memoryview(b""), "F32", histogram=True).report()
    assert report["mean"] is None
    assert report["zero"] == report["nan"] == 0


def test_one_element() -> None:
    report = measure(memory(torch.tensor(-2.5)), "F32").report()
    assert [report[key] for key in ("min", "mean", "norm", "std")] == [-2.5, -2.5, 2.5, None]
    assert report["rms"] == 2.5


@pytest.mark.filterwarnings("error")
def test_a_signalling_nan() -> None:
    measured = measure(memory(torch.tensor([0x7F800001, 0], dtype=torch.int32)), "F32")
    assert (measured.nan, measured.zero, measured.finite) == (1, 1, 1)


def test_sums_that_overflow_in_their_own_type() -> None:
    tensor = torch.full((70_000,), 60_000.0, dtype=torch.float16)
    tensor[::2] = -50_000.0
    assert_right(measure(memory(tensor), "F16"), tensor)


def test_a_spread_that_cancels_in_sums_of_squares() -> None:
    tensor = 1e8 + torch.arange(200_000, dtype=torch.float64) % 7
    measured = measure(memory(tensor), "F64")
    assert measured.std == pytest.approx((tensor - 1e8).std().item(), rel=1e-9)


@pytest.mark.parametrize("scale", [1e300, 1.5e308, 1e-300, 5e-324])
def test_squares_that_float64_cannot_hold(scale: float) -> None:
    tensor = torch.tensor([1.0, -1.0, 1.0, 0.0], dtype=torch.float64) * scale
    measured = measure(memory(tensor), "F64")
    assert measured.norm == pytest.approx(math.sqrt(3) * scale, rel=1e-12) or scale == 5e-324
    assert measured.mean == pytest.approx(scale / 4, rel=1e-12, abs=5e-324)
    report = measured.report()
    assert report["norm"] == "inf" if math.sqrt(3) * scale == math.inf else report["norm"] > 0


def test_numbers_whose_sums_float64_cannot_hold() -> None:
    tensor = torch.full((400_000,), 1.7e308, dtype=torch.float64)
    constant = measure(memory(tensor), "F64").report()
    assert [constant[key] for key in ("mean", "std", "norm")] == [1.7e308, 0.0, "inf"]
    tensor[:200_000] *= -1
    measured = measure(memory(tensor), "F64").report()
    assert [measured[key] for key in ("mean", "std", "norm")] == [
        pytest.approx(0, abs=1e295),
        "inf",
        "inf",
    ]


@pytest.mark.parametrize("value", [0.1, 1e8 + 0.1])
def test_constants_have_no_spread(value: float) -> None:
    measured = measure(memory(torch.full((600_000,), value, dtype=torch.float64)), "F64")
    assert (measured.std, measured.mean) == (0.0, value)


def test_a_spread_of_a_few_units_in_the_last_place() -> None:
    tensor = 1e15 + torch.arange(20_000, dtype=torch.float64) % 7 / 8
    measured = measure(memory(tensor), "F64")
    assert measured.std == pytest.approx((tensor - 1e15).std().item(), rel=1e-9)


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_denormal_numbers_are_counted(dtype: str) -> None:
    """Of both signs; the smallest normal number and zeros are none."""
    kind = getattr(torch, TORCH_NAMES[dtype])
    normal = torch.finfo(kind).smallest_normal
    least = torch.finfo(kind).smallest_normal * torch.finfo(kind).eps
    for sign in (1, -1):
        numbers = [sign * normal, sign * normal / 2, sign * least, 0.0, -0.0, sign * 2 * normal]
        measured = measure(memory(torch.tensor(numbers, dtype=torch.float64).to(kind)), dtype)
        assert (measured.denormal, measured.zero) == (2, 2)
    measured = measure(memory(torch.tensor([-1.0, 1.0, normal, -normal]).to(kind)), dtype)
    assert measured.denormal == 0


def test_the_smallest_number_is_its_own_mean() -> None:
    measured = measure(memory(torch.full((3,), 5e-324, dtype=torch.float64)), "F64")
    assert (measured.mean, measured.std) == (5e-324, 0.0)


def test_a_mean_that_their_sum_would_round() -> None:
    tensor = 1e15 + 4 * torch.arange(100, dtype=torch.float64)
    assert float(tensor.sum()) / 100 != 1e15 + 198
    assert measure(memory(tensor), "F64").mean == 1e15 + 198


def test_magnitudes_are_counted_if_they_are_asked_for() -> None:
    assert measure(memory(torch.ones(3)), "F32").histogram is None


def test_a_report_has_both_ends() -> None:
    report = measure(memory(torch.tensor([-2.0, 5.0, 1.0])), "F32").report()
    assert (report["min"], report["max"]) == (-2.0, 5.0)


@pytest.mark.parametrize("numbers", [[1.0, 1e200], [1e200, 1.0], [-1e200, 1.0], [-1.0, 1e200]])
def test_one_number_whose_square_is_too_large(numbers: list[float]) -> None:
    measured = measure(memory(torch.tensor(numbers, dtype=torch.float64)), "F64")
    assert measured.norm == pytest.approx(1e200, rel=1e-12)
    assert measured.std == pytest.approx(1e200 / math.sqrt(2), rel=1e-12)


def test_integers_past_two_to_the_53() -> None:
    tensor = torch.tensor([2**62 + 1, -(2**62) - 1])
    measured = measure(memory(tensor), "I64")
    assert (measured.min, measured.max) == (-(2**62) - 1, 2**62 + 1)


@given(st.lists(st.integers(0, 400), max_size=6), st.integers(1, 50))
def test_parts_add_up(cuts: list[int], block: int) -> None:
    numbers = random_numbers("F32", 400, seed=block) + 1000
    whole, parts = statistics.Statistics(), memory(numbers)
    edges = [0, *sorted(cuts), 400]
    for start, stop in pairwise(edges):
        whole.add(measure(parts[4 * start : 4 * stop], "F32", histogram=True))
    assert_right(whole, numbers)
    assert magnitudes_of(whole) == magnitudes_of(measure(parts, "F32", histogram=True))


def test_magnitudes_are_counted_by_powers_of_two() -> None:
    tensor = torch.tensor([0.0, 1.0, -1.5, 2.0, 0.25, -0.25, 1e-45])
    assert magnitudes_of(measure(memory(tensor), "F32", histogram=True)) == {
        "first": -149,
        "counts": [1, *[0] * 146, 2, 0, 2, 1],
    }


def test_magnitudes_of_parts_add_up() -> None:
    """Those that nothing has are left out at both ends."""
    whole = statistics.Statistics()
    for number in (2.0**90, 2.0**-3):
        whole.add(measure(memory(torch.tensor([number, 0.0])), "F32", histogram=True))
    assert statistics.exponents(whole.histogram) == {-3: 1, 90: 1}
    counts = {-4: 0, -3: 1, -1: 2, 3: 0}
    assert statistics.magnitudes(counts) == {"first": -3, "counts": [1, 0, 2]}
    assert statistics.magnitudes({2: 0}) is None


# -- of checkpoints


def manifest_of(folder: Path, tensors: dict[str, torch.Tensor], **known: Any) -> Manifest:
    """One raw file that holds these tensors."""
    path, entries, offset = str(folder / "raw"), {}, 0
    names = {kind: name for name, kind in TORCH_NAMES.items()}
    with open(path, "wb") as file:
        for name, tensor in tensors.items():
            data = memory(tensor) if tensor.numel() else memoryview(b"")
            file.write(data)
            kind = names[str(tensor.dtype).removeprefix("torch.")]
            fragments = solid(tensor.numel(), Extent(path, offset, len(data)))
            entries[key_of(name)] = Entry(*key_of(name), kind, tuple(tensor.shape), fragments)
            offset += len(data)
    shapes = {entry.parameter: entry.shape for entry in entries.values()}
    parameters = {name: Parameter(shape, step=3) for name, shape in shapes.items()}
    return Manifest(str(folder), "raw", Run(), entries, parameters).replace(**known)


def messages(manifest: Manifest) -> list[str]:
    return [line["message"] for line in measure_all(manifest)["problems"]]


def test_every_tensor_in_every_part(tmp_path: Path) -> None:
    tensors = {
        f"{dtype}/param": random_numbers(dtype, 900_001).view(-1, 1) for dtype in ("F32", "BF16")
    }
    tensors |= {"empty/param": torch.empty(0, 3), "scalar/param": torch.tensor(4.0)}
    manifest = manifest_of(tmp_path, tensors)
    reports = [
        measure_all(manifest, copying=Copying(jobs, memory))
        for jobs, memory in ((1, 2 << 20), (4, 64 << 20), (4, 64 << 20))
    ]
    for report in reports:
        assert [line["tensor"] for line in report["tensors"]] == list(tensors)
        for line, tensor in zip(report["tensors"], tensors.values(), strict=True):
            assert line["elements"] == tensor.numel()
            if tensor.numel() > 1:
                assert line["std"] == pytest.approx(tensor.double().std().item(), rel=1e-11)
    assert reports[1] == reports[2]  # whichever thread was first


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2])
def test_what_is_not_computed_is_named(dtype: torch.dtype, tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, {"a/param": torch.ones(3).to(dtype), "b/param": torch.ones(3)})
    report = measure_all(manifest)
    assert [line["tensor"] for line in report["not_computed"]] == ["a/param"]
    assert [line["tensor"] for line in report["tensors"]] == ["b/param"]


@pytest.mark.parametrize("slot", sorted(health.SECOND_MOMENTS))
def test_dead_and_impossible_second_moments(slot: str, tmp_path: Path) -> None:
    tensors = {f"dead/{slot}": torch.zeros(4), f"wrong/{slot}": torch.tensor([1.0, -2.0, 0.0])}
    dead, wrong = messages(manifest_of(tmp_path, tensors))
    assert "no gradient has reached dead" in dead
    assert "after step 3" in dead
    assert "wrong" in wrong
    assert "1 negative" in wrong


def test_zero_moments_before_the_first_step_are_right(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, {"a/exp_avg_sq": torch.zeros(4)})
    manifest.parameters["a"] = Parameter((4,), step=0)
    assert messages(manifest) == []


def test_a_maximum_below_what_it_is_the_maximum_of(tmp_path: Path) -> None:
    now = torch.rand(100)
    right = {"a/exp_avg_sq": now, "a/max_exp_avg_sq": now * 1.5}
    assert messages(manifest_of(tmp_path, right)) == []
    wrong = {"a/exp_avg_sq": now, "a/max_exp_avg_sq": now * 0.9}
    (line,) = messages(manifest_of(tmp_path, wrong))
    assert line.startswith("a/max_exp_avg_sq is below exp_avg_sq")


def test_weights_that_are_constant(tmp_path: Path) -> None:
    tensors = {
        "zero/param": torch.zeros(3, 3),
        "one/master": torch.ones(3, 3),
        "bias/param": torch.zeros(3),
        "norm/param": torch.ones(1, 9),
    }
    assert messages(manifest_of(tmp_path, tensors)) == [
        "zero/param is all zero",
        "one/master is 1 everywhere",
    ]


def test_nan_and_infinities_are_named(tmp_path: Path) -> None:
    tensors = {"a/exp_avg": torch.tensor([math.nan, 1.0]), "b/param": torch.tensor([math.inf, 1.0])}
    assert messages(manifest_of(tmp_path, tensors)) == [
        "a/exp_avg has 1 NaN of 2 elements",
        "b/param has 1 infinities of 2 elements",
    ]


def test_a_stalled_step_is_told(tmp_path: Path) -> None:
    said = warning("step-doubtful", "the step is 256 in ...")
    manifest = manifest_of(tmp_path, {"a/param": torch.ones(3)}, warnings=(said,))
    assert messages(manifest) == ["the step is 256 in ..."]


def test_a_real_checkpoint_is_healthy_in_every_format(tmp_path: Path) -> None:
    zckpt.convert(EXAMPLE, tmp_path / "universal")
    zckpt.reshard(EXAMPLE, tmp_path / "z3", dp=3, stage=3)
    reports = [zckpt.stats(path) for path in (EXAMPLE, tmp_path / "universal", tmp_path / "z3")]
    assert [report["problems"] for report in reports] == [[], [], []]
    lines = [{line["tensor"]: line for line in report["tensors"]} for report in reports]
    assert lines[0] == lines[1]
    for name, line in lines[2].items():
        assert line == lines[0][name]
    assert reports[0]["records"]["checked"] > 0


def test_planted_faults_are_named(example: Path) -> None:
    faults.change(example, "fc1.weight/exp_avg_sq", lambda data: bytes(len(data)))
    faults.change(example, "fc2.weight/master", faults.flip(17, 4, 31), mended=False)
    problems = {line["tensor"]: line["message"] for line in zckpt.stats(example)["problems"]}
    assert "all zero after step 7" in problems["fc1.weight/exp_avg_sq"]
    assert "bit" in problems["fc2.weight/master"]  # its record's CRC-32 tells


def test_json_holds_what_it_says(zckpt: Zckpt, example: Path) -> None:
    nan = np.full(551, np.nan, "f4").tobytes()
    faults.change(example, "fc1.weight/exp_avg", lambda data: nan)
    report = zckpt("stats", example, "--json", "--tensors", "fc1.*").document
    assert (report["zckpt"], report["command"], report["step"]) == (2, "stats", 7)
    lines = {line["tensor"]: line for line in report["tensors"]}
    assert (lines["fc1.weight/exp_avg"]["nan"], lines["fc1.weight/exp_avg"]["mean"]) == (551, None)
    assert all(line["tensor"].startswith("fc1.") for line in report["problems"])


def test_the_terminal_shows_them(zckpt: Zckpt) -> None:
    ended = zckpt("stats", EXAMPLE, "--tensors", "fc1.weight/*")
    assert (ended.code, ended.err) == (0, "")
    heads, *lines = ended.out.splitlines()
    assert heads.split()[:5] == ["tensor", "dtype", "shape", "min", "max"]
    assert len(lines) == 5
    assert "█" in lines[0]


def test_no_tensor_of_that_name(zckpt: Zckpt) -> None:
    assert zckpt("stats", EXAMPLE, "--tensors", "nothing").code == 2


def test_torch_is_not_needed(zckpt_without: Callable[..., Result]) -> None:
    ended = zckpt_without(("torch",), "stats", EXAMPLE)
    assert (ended.code, ended.err) == (0, "")


def test_a_manifest_without_tensors(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, {})
    assert measure_all(manifest)["tensors"] == []
