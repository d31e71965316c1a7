"""Groups of HDF5 files whose links and heap do not agree."""

from __future__ import annotations

from pathlib import Path

import h5py
import pytest

from zckpt import errors
from zckpt.files import hdf5file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    with h5py.File(path, "w") as file:
        for number in range(3):
            file[f"optimizer/weight{number}"] = number
    return path


def names(path: Path) -> list[str]:
    return sorted(hdf5file.read(str(path), lambda _: False)[1])


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
    with pytest.raises(errors.CorruptCheckpoint, match="are not those that its heap names"):
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


@pytest.mark.parametrize("version", ["earliest", "latest"])
def test_large_groups(version: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    with h5py.File(path, "w", libver=version) as file:
        for number in range(3000):
            file[f"group/{number:0{16 + number % 40}}"] = number
        for number in range(0, 3000, 3):
            del file[f"group/{number:0{16 + number % 40}}"]
    assert len(names(path)) == 2000
