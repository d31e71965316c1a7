"""A zip whose bytes lie elsewhere has the members that it has here, without a read of each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import zckpt
from tests.conftest import EXAMPLE
from zckpt.core.storage import byte_sources
from zckpt.core.storage.fragments import Extent
from zckpt.files.zipdirectory import read_directory


class Counting:
    """The bytes of a file, and how many reads they took."""

    def __init__(self, path: Path) -> None:
        self.data, self.reads = path.read_bytes(), 0

    def pread(self, length: int, offset: int) -> bytes:
        self.reads += 1
        return self.data[offset : offset + length]

    def read_into(self, view: memoryview, offset: int) -> int:
        raise AssertionError


def tensors() -> dict[str, torch.Tensor]:
    return {f"w{n}": torch.full((n * 7 + 1, 3), n, dtype=torch.uint8) for n in range(40)}


def by_torch(path: Path) -> None:
    torch.save(tensors(), path)


def without_checksums(path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensors(), path)
    finally:
        torch.serialization.set_crc32_options(True)


def by_zckpt(path: Path) -> None:
    zckpt.reshard(EXAMPLE, path.parent / "run", dp=2)
    (path.parent / "run/global_step7/mp_rank_00_model_states.pt").rename(path)


@pytest.mark.parametrize("save", [by_torch, without_checksums, by_zckpt])
@pytest.mark.parametrize("before", [0, 64])
def test_the_members_are_the_same(save: object, before: int, tmp_path: Path) -> None:
    assert callable(save)
    save(path := tmp_path / "model.pt")
    path.write_bytes(bytes(before) + path.read_bytes())
    within = Extent(str(path), before, path.stat().st_size - before)
    with path.open("rb") as file:
        here = read_directory(file.fileno(), within)
        mark = byte_sources.register(str(path), where := Counting(path))
        there = read_directory(file.fileno(), within)
        byte_sources.forget(mark)
    assert there == here
    assert where.reads <= 3


def test_a_zip_that_no_rule_fits_is_read(tmp_path: Path) -> None:
    import zipfile

    path = tmp_path / "odd.zip"
    with zipfile.ZipFile(path, "w") as parts:
        parts.writestr("a/data.pkl", b"x" * 11)
        parts.writestr("a/b", b"y" * 5)
    with path.open("rb") as file:
        within = Extent(str(path), 0, os.path.getsize(path))
        here = read_directory(file.fileno(), within)
        mark = byte_sources.register(str(path), Counting(path))
        assert read_directory(file.fileno(), within) == here
        byte_sources.forget(mark)
