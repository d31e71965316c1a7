"""The time of reading and of laying out grows with the number of tensors, not with its square.

SECURITY.md promises that a file below 10 MB is read within 5 seconds, of whatever small tensors it
consists. The CPU time of four times the tensors is compared, since a machine may be slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.core.checkpoint.manifest import Manifest

from . import many_tensors

FEW, MANY = 2000, 8000
GROWTH = 6  # of the time, at four times the tensors
NOISE = 0.2  # seconds
MEGABYTES = 1e6
PROMISED = 5.0  # seconds of a core that counts to ten million in 0.3 seconds
COUNTING = 0.3


def seconds(action: Callable[[], Any]) -> float:
    start = time.process_time()
    action()
    return time.process_time() - start


def read(path: Path) -> Manifest:
    manifest = zckpt.read(path)
    zckpt.inspect(manifest)
    return manifest


def assert_linear(actions: list[Callable[[], Any]]) -> None:
    """The action on few tensors, and on four times as many."""
    few, many = actions
    few()  # modules are imported
    least = min(seconds(few) for _ in range(3))
    most = GROWTH * least + NOISE
    taken = min(seconds(many) for _ in range(2)) if least < 1 else seconds(many)
    print(f"{least:.2f} s, {taken:.2f} s: {taken / least:.1f} times")
    assert taken < most


def assert_reading_is_linear(
    write: Callable[[Path, int], None], folder: Path, few: int = FEW, many: int = MANY
) -> list[Path]:
    paths = [folder / f"{count} tensors" for count in (few, many)]
    for path, count in zip(paths, (few, many), strict=True):
        write(path, count)
    assert_linear([lambda path=path: read(path) for path in paths])
    return paths


def in_folder(write: Callable[[Path, int], None], name: str) -> Callable[[Path, int], None]:
    """Makes a directory with the file."""

    def written(path: Path, count: int) -> None:
        path.mkdir()
        write(path / name, count)

    return written


# -- weights, groups, states


def test_safetensors(tmp_path: Path) -> None:
    """Types were counted once for each weight."""
    assert_reading_is_linear(in_folder(many_tensors.safetensors, "model.safetensors"), tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", many_tensors.TORCH)
def test_files_of_torch(kind: str, tmp_path: Path) -> None:
    def write(path: Path, count: int) -> None:
        many_tensors.torch_file(path, count, kind)

    assert_reading_is_linear(in_folder(write, "a.pt"), tmp_path)


# -- formats


@pytest.mark.parametrize("name", many_tensors.DIRECTORIES)
def test_formats(name: str, tmp_path: Path) -> None:
    """Few tensors, of which each parameter has three."""
    both(name, tmp_path, 50, 200)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", many_tensors.DIRECTORIES)
def test_formats_of_many_tensors(name: str, tmp_path: Path) -> None:
    """With the places of all gaps to look at, HDF5 took 19 seconds for 2,000 weights."""
    both(name, tmp_path, FEW // 3, MANY // 3)


def both(name: str, folder: Path, few: int, many: int) -> None:
    """Reading the format, and laying it out."""
    paths = assert_reading_is_linear(many_tensors.DIRECTORIES[name], folder, few, many)
    words = many_tensors.WRITTEN.get(name, {"to": "megatron"})
    sources = paths if name == "Megatron-Core" else [Path(f"{path}.pt") for path in paths]
    target = folder / "target"
    assert_linear(
        [lambda s=source: zckpt.convert(s, target, dry_run=True, **words) for source in sources]
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", many_tensors.WRITTEN)
def test_groups_of_their_own(name: str, tmp_path: Path) -> None:
    """As many groups as parameters."""

    def write(path: Path, count: int) -> None:
        words = many_tensors.WRITTEN[name]
        many_tensors.written(path, count, words, many_tensors.own_group)

    assert_reading_is_linear(write, tmp_path, FEW // 3, MANY // 3)


@pytest.mark.exhaustive
def test_megatron_fsdp(tmp_path: Path) -> None:
    """The group of each weight was looked for among all groups."""
    assert_reading_is_linear(many_tensors.megatron_fsdp, tmp_path, FEW // 4, MANY // 4)


# -- the promise


def slowness() -> float:
    """How much slower this machine is than the one that SECURITY.md names; 1 if it is faster."""

    def count() -> None:
        number = 0
        while number < 10_000_000:
            number += 1

    return max(1.0, seconds(count) / COUNTING)


def views(path: Path, count: int) -> None:
    """Weights that share one record."""
    elements = torch.zeros(count)
    torch.save({f"w{number}": elements[number : number + 1] for number in range(count)}, path)


def size_of(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


TEN_MEGABYTES: dict[str, tuple[Callable[[Path, int], None], int]] = {
    "torch file of weights": (lambda path, n: many_tensors.torch_file(path, n, "weights"), 32_000),
    "torch file of views": (views, 100_000),
    "safetensors": (many_tensors.safetensors, 110_000),
    "universal": (many_tensors.DIRECTORIES["universal"], 14_000),
    "DCP": (many_tensors.DIRECTORIES["DCP"], 1_800),
    "HDF5": (many_tensors.DIRECTORIES["ONNX Runtime, HDF5"], 2_900),
}
"""What is written, and of how many tensors or parameters."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TEN_MEGABYTES)
def test_ten_megabytes(name: str, tmp_path: Path) -> None:
    """The promise of SECURITY.md, with as many tensors as fit."""
    write, count = TEN_MEGABYTES[name]
    suffix = {"torch file": ".pt", "safetensors": ".safetensors"}.get(name.partition(" of")[0], "")
    path = tmp_path / f"made{suffix}"
    write(path, count)
    size = size_of(path)
    print(f"{size / MEGABYTES:.1f} MB")
    taken, slower = seconds(lambda: read(path)), slowness()
    print(f"{taken:.2f} s, on a machine that is {slower:.1f} times as slow")
    assert 5 * MEGABYTES < size < 10 * MEGABYTES
    assert taken < PROMISED * slower
