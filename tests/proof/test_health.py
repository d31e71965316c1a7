"""Which numbers are dead or impossible, and statistics whose parts come in any order."""

from __future__ import annotations

import math
import random
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from zckpt.core.checkpoint.dtypes import SIZES, TORCH_NAMES
from zckpt.core.checkpoint.entries import Entry, key_of
from zckpt.core.checkpoint.manifest import Files, Manifest, Parameter, Run
from zckpt.core.comparison.statistics import Statistics, exponents, magnitudes, measure
from zckpt.core.passes.description import Report
from zckpt.core.passes.resources import DEFAULT_COPYING, Begin, Copying, Progress
from zckpt.core.storage.fragments import Extent, Record, solid
from zckpt.core.storage.sources import Fingerprint
from zckpt.errors import SourceChanged
from zckpt.proof import health
from zckpt.proof.health import Total

NAN, INF = math.nan, math.inf
Tensors = dict[str, tuple[str, list[Any]]]


def measure_all(
    own: Manifest,
    pattern: str | None = None,
    copying: Copying = DEFAULT_COPYING,
    begin: Begin | None = None,
) -> Report:
    return health.measure_all(own, pattern, copying, begin)


def statistics_of(dtype: str, numbers: list[Any]) -> Statistics:
    tensor = torch.tensor(numbers).to(getattr(torch, TORCH_NAMES[dtype])).view(-1)
    view = memoryview(tensor.view(torch.uint8).numpy()) if len(tensor) else memoryview(b"")
    return measure(view.cast("B"), dtype)


def problems_of(tensors: Tensors, step: int | None = 3, of_all: int | None = None) -> list[str]:
    """What is wrong with tensors `w/slot`, each of a type and numbers; "kind: message"."""
    entries, statistics = {}, {}
    for name, (dtype, numbers) in tensors.items():
        shape = tuple(torch.tensor(numbers).shape)
        entries[key_of(name)] = Entry(*key_of(name), dtype, shape, solid(0, Extent("f", 0, 0)))
        statistics[name] = statistics_of(dtype, numbers)
    parameters = {"w": Parameter((), step=step)}
    if of_all is not None:
        parameters["other"] = Parameter((), step=of_all)
    manifest = Manifest("root", "x", Run(), entries, parameters)
    found = health.problems(manifest, [*entries.values()], statistics)
    return [f"{line['kind']}: {line['message']}" for line in found]


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"w/param": ("F32", [NAN, 1.0, NAN])}, ["NaN: w/param has 2 NaN of 3 elements"]),
        (
            {"w/param": ("F32", [INF, 1.0, -INF])},
            ["infinite: w/param has 2 infinities of 3 elements"],
        ),
        (
            {"w/exp_avg_sq": ("F32", [-1.0, -INF, -2.0, 1.0])},
            [
                "infinite: w/exp_avg_sq has 1 infinities of 4 elements",
                "impossible: w/exp_avg_sq has 3 negative elements, which sums of squares never "
                "have",
            ],
        ),
        (
            {"w/exp_avg_sq": ("F32", [-INF, 1.0])},
            [
                "infinite: w/exp_avg_sq has 1 infinities of 2 elements",
                "impossible: w/exp_avg_sq has 1 negative elements, which sums of squares never "
                "have",
            ],
        ),
        (
            {"w/exp_avg_sq": ("F32", [0.0, 0.0])},
            ["dead: w/exp_avg_sq is all zero after step 3: no gradient has reached w"],
        ),
        ({"w/exp_avg_sq": ("F32", [])}, []),
        ({"w/exp_avg": ("F32", [0.0, -1.0])}, []),
        ({"w/param": ("F32", [[0.0, 0.0], [0.0, 0.0]])}, ["dead: w/param is all zero"]),
        ({"w/master": ("F32", [[2.5, 2.5]] * 2)}, ["constant: w/master is 2.5 everywhere"]),
        ({"w/param": ("F32", [[2.5, 2.5], [2.5, 3.0]])}, []),
        ({"w/param": ("F32", [[1.0, 1.0], [NAN, 1.0]])}, ["NaN: w/param has 1 NaN of 4 elements"]),
        ({"w/param": ("F32", [[1.0, 1.0, 1.0]])}, []),  # as a norm's weights are
        ({"w/param": ("F32", [[NAN, NAN], [NAN, NAN]])}, ["NaN: w/param has 4 NaN of 4 elements"]),
        ({"w/state": ("F32", [NAN])}, []),
    ],
)
def test_problems_are_said(tensors: Tensors, said: list[str]) -> None:
    assert problems_of(tensors) == said


@pytest.mark.parametrize("slot", ["exp_avg_sq", "square_avg", "sum", "max_exp_avg_sq"])
def test_sums_of_squares_are_never_negative(slot: str) -> None:
    """Those of Adam, RMSprop, Adagrad and AMSGrad."""
    (said,) = problems_of({f"w/{slot}": ("F32", [-1.0, 1.0])})
    assert said.startswith(f"impossible: w/{slot} has 1 negative elements")
    (said,) = problems_of({f"w/{slot}": ("F32", [0.0, 0.0])})
    assert said.startswith(f"dead: w/{slot} is all zero")


def test_the_step_is_that_of_the_parameter_before_that_of_all() -> None:
    """Zero moments are right before the first step."""
    zeros: Tensors = {"w/exp_avg_sq": ("F32", [0.0])}
    assert problems_of(zeros, step=0, of_all=7) == []
    assert "after step 2" in problems_of(zeros, step=2, of_all=7)[0]
    assert "after step 7" in problems_of(zeros, step=None, of_all=7)[0]
    assert "after step 7" in problems_of({"v/exp_avg_sq": ("F32", [0.0])}, None, 7)[0]


@pytest.mark.parametrize(
    ("maximum", "now", "is_below"),
    [
        ([1.0, 2.0], [1.0, 2.0], False),
        ([1.5, 2.0], [1.0, 2.0], False),
        ([0.5, 2.0, 2.0], [1.0, 1.0, 1.0], True),  # the least
        ([1.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0, 3.0], True),  # the largest
        ([0.0, 1.0, 1.0, 4.0], [0.0, 2.0, 2.0, 4.0], True),  # the mean
        ([0.0, 2.0, 2.0, 4.0], [0.0, 0.0, 4.0, 4.0], True),  # the norm alone
        ([0.0, 0.0, 0.45, 0.6], [0.0, 0.3, 0.3, 0.6], True),  # the same below one
        ([0.0, 0.3, 0.3, 0.6], [0.0, 0.0, 0.6, 0.6], True),
        ([0.0, 0.0], [0.0, 0.0], False),
        ([1.0, NAN], [2.0, 2.0], False),
        ([1.0, INF], [2.0, 2.0], False),
        ([1.0, 1.0], [2.0, NAN], False),
        ([1.0, 1.0], [2.0, INF], False),
    ],
)
def test_a_maximum_is_nowhere_below(maximum: list[float], now: list[float], is_below: bool) -> None:
    """Numbers that are not finite say nothing about the others."""
    said = problems_of({"w/max_exp_avg_sq": ("F64", maximum), "w/exp_avg_sq": ("F64", now)})
    assert any("its maximum over time" in line for line in said) is is_below


@pytest.mark.parametrize("key", ["mean", "norm"])
def test_rounding_makes_no_maximum_too_small(key: str) -> None:
    now = statistics_of("F64", [1.0, 3.0])
    rounded = replace(now, **{key: getattr(now, key) * (1 - 1e-12)})
    below = replace(now, **{key: getattr(now, key) * (1 - 1e-6)})
    assert (health._is_below(rounded, now), health._is_below(below, now)) == (False, True)


# -- parts


NUMBERS = [0.5, -3.0, 1e-3, 4.0, 0.0, 7.0, 1e9, -0.25]


def parts() -> list[tuple[int, int, Statistics]]:
    tensor = torch.tensor(NUMBERS)
    bounds = [(0, 1), (1, 4), (4, 6), (6, 8)]
    return [
        (start, stop, measure(memoryview(tensor[start:stop].numpy()).cast("B"), "F32", True))
        for start, stop in bounds
    ]


def whole_histogram() -> dict[int, int]:
    view = memoryview(torch.tensor(NUMBERS).numpy()).cast("B")
    return exponents(measure(view, "F32", True).histogram)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
def test_parts_in_any_order_give_the_same_digits(order: tuple[int, ...]) -> None:
    """A histogram is kept whole only until all elements are counted."""
    expected, total = Statistics(), Total(len(NUMBERS))
    for _, _, part in parts():
        expected.add(replace(part, histogram=None))
    came = parts()
    for place in order:
        assert not total.counts
        start, stop, part = came[place]
        total.count(part)
        total.add(start, stop, part)
    assert total.statistics.report() == expected.report()
    assert dict(total.counts) == whole_histogram()
    assert total.statistics.histogram is None


def test_a_part_without_finite_numbers_has_no_magnitudes() -> None:
    total = Total(4)
    for start, numbers in ((0, [1.0]), (1, [NAN, INF]), (3, [-2.5])):
        view = memoryview(torch.tensor(numbers).numpy()).cast("B")
        part = measure(view, "F32", histogram=True)
        total.count(part)
        total.add(start, start + len(numbers), part)
    assert dict(total.counts) == {0: 1, 1: 1}
    assert (total.statistics.finite, total.statistics.nan, total.statistics.inf) == (2, 1, 1)


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """Tensors of which one has no numbers, in one file with a checksum each."""
    chosen, entries, records, data = random.Random(3), {}, [], b""
    for name, dtype, numel in (
        ("a/param", "F32", 9000),
        ("a/exp_avg", "BF16", 9000),
        ("b/param", "C64", 100),
        ("c/param", "I64", 5),
        ("d/param", "F32", 10),
        ("random/state", "U8", 10),
    ):
        length = numel * SIZES[dtype]
        extent = Extent(str(tmp_path / "f"), len(data), length)
        own = chosen.randbytes(length)
        entries[key_of(name)] = Entry(*key_of(name), dtype, (numel,), solid(numel, extent))
        records.append(Record(extent, zlib.crc32(own)))
        data += own
    (tmp_path / "f").write_bytes(data)
    return Manifest(str(tmp_path), "x", Run(), entries, {}, files=Files(records=tuple(records)))


def test_all_but_random_states_are_measured(manifest: Manifest) -> None:
    seen: list[int] = []

    def begin(total: int) -> Progress:
        seen.append(-total)
        return seen.append

    report = measure_all(manifest, begin=begin)
    assert [line["tensor"] for line in report["tensors"]] == [
        "a/param",
        "a/exp_avg",
        "c/param",
        "d/param",
    ]
    assert [line["tensor"] for line in report["not_computed"]] == ["b/param"]
    assert report["bytes"] == -seen[0] == 9000 * 6 + 40 + 40
    assert sum(seen) == 0
    (line,) = measure_all(manifest, "random/*")["tensors"]
    assert line["elements"] == 10


def test_magnitudes_are_counted_by_powers_of_two(tmp_path: Path) -> None:
    numbers = torch.tensor([0.5, -0.75, 4.0])
    (tmp_path / "f").write_bytes(numbers.numpy().tobytes())
    extent = Extent(str(tmp_path / "f"), 0, 12)
    own = {("w", "param"): Entry("w", "param", "F32", (3,), solid(3, extent))}
    (line,) = measure_all(Manifest("", "x", Run(), own, {}))["tensors"]
    assert line["histogram"] == magnitudes(Counter({-1: 2, 2: 1}))


class Shown:
    """A progress function that shows what is done."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, count: int) -> None:
        pass

    def describe(self, text: str) -> None:
        self.texts.append(text)


def test_progress_names_what_is_measured(manifest: Manifest) -> None:
    shown = Shown()
    alone = replace(manifest, entries={("a", "param"): manifest.entries["a", "param"]})
    measure_all(alone, begin=lambda total: shown)
    assert {*shown.texts} == {"measuring a/param"}


def test_damage_is_a_problem_unless_it_is_in_padding(manifest: Manifest) -> None:
    """Here of bytes between tensors; and a file that has changed ends the pass."""
    path = Path(manifest.root) / "f"
    record = Record(Extent(str(path), 4, 36_040), zlib.crc32(path.read_bytes()[4:36_044]))
    kept = {name: own for name, own in manifest.entries.items() if name == ("a", "param")}
    extent = kept["a", "param"].fragments[0].extent.part(8, 36_000)
    own = {
        ("a", "param"): replace(kept["a", "param"], shape=(8998,), fragments=solid(8998, extent))
    }
    padded = manifest.replace(entries=own, records=(record,))
    data = bytearray(path.read_bytes())

    def found(place: int) -> list[str]:
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        problems = measure_all(padded)["problems"]
        return [line["tensor"] for line in problems if line["kind"] == "checksum"]

    assert (found(6), found(36_010), found(100)) == ([], [], ["a/param"])
    with pytest.raises(SourceChanged):
        measure_all(padded.replace(fingerprints={str(path): Fingerprint(1, 2, 3, 4)}))
