"""Adam's update and distances of masters are those that torch computes from the raw tensors."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zckpt
from zckpt.proof import health

from ..conftest import EXAMPLE, ROOT, needs
from ..faults import change
from .conftest import Document, faults_of

Make = Callable[..., Document]
TRAINER = ROOT / "examples" / "trainer"


def cells(made: Document, key: str) -> dict[str, Any]:
    """The values of a measure, by parameter."""
    (measure,) = [each for each in made["numbers"]["measures"] if each["key"] == key]
    names = made["tensors"]["parameter"]
    return {names[tensor]: value for _, _, value, tensor in measure["cells"]}


def naive_update(path: Path, name: str) -> float:
    manifest = zckpt.read(path)
    own = manifest.parameters[name]
    assert manifest.groups is not None
    group = manifest.groups[own.group or 0]
    first, second = (
        zckpt.load(path, f"{name}/{slot}").double() for slot in ("exp_avg", "exp_avg_sq")
    )
    one, two = group["betas"]
    first = first / (1 - one**own.step)
    update = first / ((second / (1 - two**own.step)).sqrt() + group["eps"])
    return float(update.square().mean().sqrt())


@pytest.mark.parametrize("path", [EXAMPLE, TRAINER / "checkpoint-4"])
def test_updates(path: Path, document: Make) -> None:
    needs("torch")
    found = cells(document(path), "update")
    manifest = zckpt.read(path)
    assert found.keys() == {name for name, own in manifest.parameters.items() if own.trainable}
    for name, rms in found.items():
        assert rms == pytest.approx(naive_update(path, name), rel=1e-5)


def test_no_update_without_its_hyper_parameters(
    example: Path, document: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from msgspec.structs import replace

    from zckpt import api

    real = api.read

    def without(*words: Any, **more: Any) -> zckpt.Manifest:
        manifest = real(*words, **more)
        (first, second) = manifest.groups or ()
        return replace(manifest, groups=({**first, "eps": None}, second))

    monkeypatch.setattr(api, "read", without)
    found = cells(document(example), "update")
    assert found.keys() == {"fc1.bias", "fc2.bias"}


@pytest.mark.parametrize("chunk", [None, 1 << 20])
def test_distances(chunk: int | None, example: Path, document: Make) -> None:
    """Weights that are up to thousands of units in the last place from their masters."""
    generator = np.random.default_rng(7)

    def moved(data: bytes) -> bytes:
        bits = np.frombuffer(data, "i2").copy()
        bits += (2.0 ** generator.uniform(-2, 11, len(bits))).astype("i2")
        return bits.tobytes()

    change(example, "fc1.weight/param", moved)
    master = (
        zckpt.load(example, "fc1.weight/master", accept_weights=True)
        .bfloat16()
        .view(torch.int16)
        .int()
    )
    weight = zckpt.load(example, "fc1.weight/param", accept_weights=True).view(torch.int16).int()
    ordered = [torch.where(x < 0, -(x & 0x7FFF), x) for x in (master, weight)]
    apart = (ordered[0] - ordered[1]).abs().flatten().tolist()
    expected = Counter(">1024" if n > 1024 else str(n) if n < 3 else _bin(n) for n in apart)
    made = document(example, **({"jobs": 1} if chunk else {}))
    (row,) = [row for row in made["masters"]["rows"] if row["layer"] == "fc1"]
    counts = dict(zip(made["masters"]["bins"], row["counts"], strict=True))
    counts["0"] -= 29  # the bias
    assert {name: n for name, n in counts.items() if n} == dict(expected)
    assert row["worst"] == max(apart)
    assert made["tensors"]["name"][row["tensor"]] == "fc1.weight/master"
    assert made["masters"]["differ"] == sum(n > 0 for n in apart)
    assert made["masters"]["elements"] == 1929


def test_the_order_in_which_threads_end_does_not_show(
    example: Path, document: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which tensor of a layer is named where several are equally far, and stale masters in turn."""
    for name in ("fc1.weight", "fc2.weight"):
        change(example, f"{name}/param", lambda data: bytes(len(data)))
    real = health.passed

    def ended(turn: Callable[[Any], Any]) -> tuple[Any, Any]:
        def passed(*words: Any) -> Any:
            done = real(*words)
            done.distances = dict(turn(sorted(done.distances.items())))
            return done

        monkeypatch.setattr(health, "passed", passed)
        made = document(example)
        return made["masters"]["rows"], [line["tensor"] for line in faults_of(made, "stale")]

    rows, stale = ended(list)
    assert {*stale} == {"fc1.weight/master", "fc2.weight/master"}
    assert (rows, stale) == ended(reversed)


def _bin(distance: int) -> str:
    high = 1 << math.ceil(math.log2(distance))
    return f"{high // 2 + 1}-{high}"


def test_statistics_are_those_of_stats(document: Make) -> None:
    made, stats = document(EXAMPLE), zckpt.stats(EXAMPLE)
    table = made["tensors"]
    for line in stats["tensors"]:
        number = table["name"].index(line["tensor"])
        for key in ("rms", "min", "max", "mean", "std", "nan", "inf", "zero", "denormal"):
            assert table[key][number] == line[key], (line["tensor"], key)


def test_every_byte_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from zckpt.core.storage.fileio import Reader

    read = Counter[tuple[str, int]]()
    real = Reader.read

    def counted(self: Reader, extent: Any, into: Any) -> None:
        begin, end = extent.offset, extent.offset + extent.length
        read.update((extent.file, byte) for byte in range(begin, end))
        real(self, extent, into)

    monkeypatch.setattr(Reader, "read", counted)
    zckpt.report(EXAMPLE)
    assert max(read.values()) == 1
    tensors = zckpt.read(EXAMPLE).entries.values()
    assert len(read) >= sum(entry.length for entry in tensors)


def test_a_digest_is_of_contents(tmp_path: Path, example: Path, document: Make) -> None:
    """The same contents in other files have one digest; another bit gives another one."""
    first = document(example)["line"]["digest"]
    copied = shutil.copytree(example, tmp_path / "copied")
    assert document(copied)["line"]["digest"] == first
    change(copied, "fc1.weight/exp_avg", lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    assert document(copied)["line"]["digest"] != first
