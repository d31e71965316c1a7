"""HDF5 files whose parts do not agree."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from zckpt import errors
from zckpt.files import hdf5file

from ..conftest import imported

h5py = imported("h5py")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    with h5py.File(path, "w") as file:
        for number in range(3):
            file[f"optimizer/weight{number}"] = number
    return path


def names(path: Path) -> list[str]:
    return sorted(hdf5file.read(str(path), lambda _: False).values)


def test_every_link_is_named(path: Path) -> None:
    assert names(path) == [f"optimizer/weight{number}" for number in range(3)]


def test_a_group_that_a_flipped_bit_empties(path: Path) -> None:
    """The library lists no link then, and reports no error."""
    data = bytearray(path.read_bytes())
    tree = data.rindex(b"TREE")
    assert data[tree + 6] == 1  # entries of the B-tree's only node
    data[tree + 6] = 0
    path.write_bytes(data)
    with h5py.File(path) as file:
        assert not len(file) or not len(file["optimizer"])
    with pytest.raises(errors.CorruptCheckpoint, match="do not match the names in its heap"):
        names(path)


def test_links_that_were_removed(path: Path) -> None:
    """Long names leave a free block in the heap; short ones stay there, as after a flipped bit."""
    long = "weight of a long name"
    with h5py.File(path, "r+") as file:
        file[f"optimizer/{long}"] = 4
        del file[f"optimizer/{long}"]
    assert names(path) == [f"optimizer/weight{number}" for number in range(3)]
    with h5py.File(path, "r+") as file:
        del file["optimizer/weight1"]
    with pytest.raises(errors.CorruptCheckpoint) as raised:
        names(path)
    assert "h5repack" in raised.value.hint


def move(path: Path, name: str, to: int) -> None:
    """Changes the address of a dataset."""
    with h5py.File(path) as file:
        offset = file[name].id.get_offset()
    data = path.read_bytes()
    assert data.count(struct.pack("<Q", offset)) == 1
    path.write_bytes(data.replace(struct.pack("<Q", offset), struct.pack("<Q", to)))


@pytest.mark.parametrize("mark", [b"TREE", b"SNOD", b"HEAP", b"GCOL", b"other"])
def test_a_dataset_where_something_else_lies(mark: bytes, path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["text"] = "words"
        file["bytes"] = np.frombuffer(b"other...", np.int64)
    assert names(path)
    move(path, "optimizer/weight1", path.read_bytes().rindex(mark))
    with pytest.raises(errors.CorruptCheckpoint, match="share bytes"):
        names(path)


def test_a_dataset_where_nothing_lies(path: Path) -> None:
    """What it had is then no part of anything."""
    data = path.read_bytes()
    with h5py.File(path) as file:
        offset = file["optimizer/weight1"].id.get_offset()
        last = file["optimizer/weight2"].id.get_offset() + 8
    assert not any(data[last : last + 64])
    move(path, "optimizer/weight1", last + 32)
    contents = hdf5file.read(str(path), lambda _: False)
    assert contents.values["optimizer/weight1"] == 0
    (orphan,) = contents.orphans
    assert orphan.offset <= offset < orphan.offset + orphan.length


def test_bytes_that_are_not_stored(path: Path) -> None:
    """A shape with fewer elements than were saved."""
    with h5py.File(path, "r+") as file:
        file["list"] = np.arange(1001, 1008)
    data = path.read_bytes()
    shape = struct.pack("<Q", 7)
    assert data.count(shape) == 2  # the most that it may have is stated too
    path.write_bytes(data.replace(shape, struct.pack("<Q", 6)))
    with pytest.raises(errors.CorruptCheckpoint, match="by its shape"):
        names(path)


@pytest.mark.parametrize("version", ["earliest", "latest"])
def test_large_groups(version: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    with h5py.File(path, "w", libver=version) as file:
        for number in range(3000):
            file[f"group/{number:0{16 + number % 40}}"] = number
        for number in range(0, 3000, 3):
            del file[f"group/{number:0{16 + number % 40}}"]
    assert len(names(path)) == 2000
