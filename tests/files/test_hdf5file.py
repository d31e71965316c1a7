"""HDF5 files: where tensors lie, values, hostile files, and files without their tensors."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zckpt import errors
from zckpt.files import hdf5file, hdf5shell

from ..conftest import imported

h5py = imported("h5py")

WEIGHT = np.arange(12, dtype="f4").reshape(3, 4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with tensors below `tensors`, and values beside them."""
    path = tmp_path / "file"
    with h5py.File(path, "w") as file:
        file["tensors/a"] = WEIGHT
        file["tensors/deep/half"] = np.ones(5, "f2")
        file["tensors/scalar"] = np.float32(3)
        file["tensors/empty"] = np.ones((0, 3), "i8")
        file["size"] = 3
        file["list"] = [1, 2]
        file["text"] = "some words"
        file["flag"] = True
    return path


def read(path: Path) -> hdf5file.HDF5Contents:
    return hdf5file.read(str(path), lambda name: name.startswith("tensors/"))


def bytes_of(dataset: hdf5file.Dataset) -> bytes:
    extent = dataset.extent
    return Path(extent.file).read_bytes()[extent.offset : extent.offset + extent.length]


class TestReading:
    def test_tensors_are_located(self, path: Path) -> None:
        tensors = read(path).tensors
        assert {name: (item.dtype, item.shape) for name, item in tensors.items()} == {
            "tensors/a": ("F32", (3, 4)),
            "tensors/deep/half": ("F16", (5,)),
            "tensors/scalar": ("F32", ()),
            "tensors/empty": ("I64", (0, 3)),
        }
        assert bytes_of(tensors["tensors/a"]) == WEIGHT.tobytes()
        assert bytes_of(tensors["tensors/deep/half"]) == np.ones(5, "f2").tobytes()
        assert bytes_of(tensors["tensors/scalar"]) == struct.pack("<f", 3)
        assert tensors["tensors/empty"].extent.length == 0

    def test_values_are_read(self, path: Path) -> None:
        values = read(path).values
        assert values == {"size": 3, "list": [1, 2], "text": "some words", "flag": True}

    @pytest.mark.parametrize("version", ["earliest", "latest"])
    def test_root_names(self, version: str, tmp_path: Path) -> None:
        with h5py.File(tmp_path / "file", "w", libver=version) as file:
            file["one/two"] = 1
            file["three"] = 1
        names = hdf5file.root_names(str(tmp_path / "file"))
        assert names >= {b"one", b"three"}
        assert b"two" not in names

    def test_other_files_have_no_root_names(self, tmp_path: Path) -> None:
        for data in (b"", b"hello", hdf5file.MAGIC, hdf5file.MAGIC + bytes(200)):
            (tmp_path / "file").write_bytes(data)
            assert hdf5file.root_names(str(tmp_path / "file")) == set()

    def test_a_file_that_cannot_be_read_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(FileNotFoundError):
            hdf5file.root_names(str(tmp_path / "absent"))
        path = str(tmp_path / "file")
        with h5py.File(path, "w") as file:
            file["x"] = [1.0]

        def fail(*_: Any, **_options: Any) -> Any:
            text = "Can't read data (file read failed: errno = 5, error message = 'I/O error')"
            raise OSError(text)

        monkeypatch.setattr(h5py, "File", fail)
        with pytest.raises(OSError, match="Input/output error") as caught:
            hdf5file.read(path, lambda name: True)
        assert caught.value.filename == path


def add(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        with h5py.File(path, "a") as file:
            change(file)

    return edit


def add_compact(file: Any) -> None:
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.COMPACT)
    space = h5py.h5s.create_simple((2,))
    h5py.h5d.create(file["tensors"].id, b"new", h5py.h5t.NATIVE_FLOAT, space, properties)


UNSUPPORTED = {
    "compressed": (
        lambda file: file.create_dataset("tensors/new", data=WEIGHT, compression="gzip"),
        "one run of bytes",
    ),
    "chunked": (
        lambda file: file.create_dataset("tensors/new", data=WEIGHT, chunks=(1, 4)),
        "one run of bytes",
    ),
    "compact": (add_compact, "one run of bytes"),
    "in another file": (
        lambda file: file.create_dataset("tensors/new", (4,), "f4", external="/etc/passwd"),
        "one run of bytes",
    ),
    "null": (
        lambda file: file.create_dataset("tensors/new", data=h5py.Empty("f4")),
        "one run of bytes",
    ),
    "big-endian": (
        lambda file: file.create_dataset("tensors/new", data=WEIGHT.astype(">f4")),
        "elements of type",
    ),
    "complex": (
        lambda file: file.create_dataset("tensors/new", data=np.ones(2, "c8")),
        "elements of type",
    ),
    "large value": (
        lambda file: file.create_dataset("new", data=np.zeros(hdf5file.MAX_ELEMENTS + 1)),
        "has shape",
    ),
    "list of text": (
        lambda file: file.create_dataset("new", data=["a", "b"], dtype=h5py.string_dtype()),
        "has shape",
    ),
    "value of a compound type": (
        lambda file: file.create_dataset("new", data=np.zeros(1, [("x", "f4")])),
        "neither number nor text",
    ),
    "named type": (
        lambda file: file.__setitem__("new", np.dtype("f4")),
        "neither group nor dataset",
    ),
    "link to another file": (
        lambda file: file.__setitem__("tensors/new", h5py.ExternalLink("/etc/passwd", "/x")),
        "link",
    ),
    "soft link": (
        lambda file: file.__setitem__("tensors/new", h5py.SoftLink("/tensors/a")),
        "link",
    ),
}


class TestRefused:
    @pytest.mark.parametrize("case", UNSUPPORTED)
    def test_what_is_not_plain(self, case: str, path: Path) -> None:
        change, message = UNSUPPORTED[case]
        add(change)(path)
        with pytest.raises(errors.UnsupportedCheckpoint, match=message) as caught:
            read(path)
        assert "new" in caught.value.message
        if message == "one run of bytes":
            assert "h5repack" in caught.value.hint

    def test_a_dataset_with_two_names(self, path: Path) -> None:
        add(lambda file: file.__setitem__("tensors/again", file["tensors/a"]))(path)
        with pytest.raises(errors.CorruptCheckpoint, match="has two paths"):
            read(path)

    def test_a_group_inside_itself(self, path: Path) -> None:
        add(lambda file: file.__setitem__("tensors/deep/circle", file["tensors"]))(path)
        with pytest.raises(errors.CorruptCheckpoint, match="has two paths"):
            read(path)

    def test_groups_that_are_too_deep(self, path: Path) -> None:
        add(lambda file: file.create_group("a/" * (hdf5file.MAX_DEPTH + 2)))(path)
        with pytest.raises(errors.CorruptCheckpoint):
            read(path)

    def test_a_user_block(self, tmp_path: Path) -> None:
        with h5py.File(tmp_path / "file", "w", userblock_size=512) as file:
            file["a"] = 1
        with pytest.raises(errors.UnsupportedCheckpoint, match="user block"):
            read(tmp_path / "file")

    def test_short_files(self, path: Path) -> None:
        data = path.read_bytes()
        for length in (0, 7, 100, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:length])
            with pytest.raises(errors.CorruptCheckpoint):
                read(path)

    def test_a_tensor_past_the_end(self, path: Path) -> None:
        offset = read(path).tensors["tensors/a"].extent.offset
        data = bytearray(path.read_bytes())
        place = data.index(struct.pack("<Q", offset))
        data[place : place + 8] = struct.pack("<Q", len(data) - 8)
        path.write_bytes(data)
        with pytest.raises(errors.CorruptCheckpoint):  # h5py notices itself
            read(path)

    def test_text_past_the_end(self, path: Path) -> None:
        data = bytearray(path.read_bytes())
        heap = data.index(b"GCOL")
        place = data.index(struct.pack("<Q", heap))
        data[place : place + 8] = struct.pack("<Q", 1 << 40)
        path.write_bytes(data)
        with pytest.raises(errors.CorruptCheckpoint, match="text of text is missing"):
            read(path)


class TestShells:
    def test_hold_everything_but_the_tensors(self, tmp_path: Path) -> None:
        tree = {
            "tensors": {
                "a": hdf5shell.EmptyDataset("F32", (3, 4)),
                "deep": {"half": hdf5shell.EmptyDataset("F16", (5,))},
                "scalar": hdf5shell.EmptyDataset("F32", ()),
                "empty": hdf5shell.EmptyDataset("I64", (0, 3)),
            },
            "group": {},
            "list": [7],
            "text": "words",
        }
        shell = hdf5shell.shell("file", tree)
        data = bytearray(shell.size)
        for offset, part in shell.parts:
            data[offset : offset + len(part)] = part
        (tmp_path / "file").write_bytes(data)
        contents = read(tmp_path / "file")
        tensors = contents.tensors
        assert contents.values == {"list": [7], "text": "words"}
        assert {name: (item.dtype, item.shape) for name, item in tensors.items()} == {
            "tensors/a": ("F32", (3, 4)),
            "tensors/deep/half": ("F16", (5,)),
            "tensors/scalar": ("F32", ()),
            "tensors/empty": ("I64", (0, 3)),
        }
        inside = [(part, part + len(text)) for part, text in shell.parts]
        for item in tensors.values():
            begin, end = item.extent.offset, item.extent.offset + item.extent.length
            assert begin % hdf5shell.ALIGNMENT == 0
            assert all(end <= start or begin >= stop for start, stop in inside if end > begin)

    def test_take_no_space_for_tensors(self) -> None:
        tree = {"model": {"w": hdf5shell.EmptyDataset("F32", (1 << 33,)), "one": [7]}}
        shell = hdf5shell.shell("large", tree)  # 32 GiB
        assert shell.size > 1 << 35
        assert sum(len(data) for _, data in shell.parts) < 10_000
