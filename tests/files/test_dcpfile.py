"""Metadata of torch.distributed.checkpoint: torch reads ours, and we read what torch wrote."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from zckpt import errors
from zckpt.core.storage import sources
from zckpt.files.dcpfile import read_table
from zckpt.files.dcpitems import ItemFiles, require_same
from zckpt.files.dcpshell import metadata
from zckpt.files.dcptable import ItemBox, ItemLocation, TensorItem
from zckpt.files.pickling import dumps
from zckpt.files.torchfile import Tensor

from ..conftest import ROOT

DATA = ROOT / "tests" / "data" / "fsdp2-2.13.0-w2"
STATE = {"w": torch.arange(12.0).view(4, 3), "half": torch.ones(2).half(), "note": {"epoch": 3}}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    dcp.save(STATE, checkpoint_id=tmp_path / "run")
    return tmp_path / "run"


def assert_same_as_torch(folder: Path) -> None:
    table, theirs = read_table(str(folder)), FileSystemReader(folder).read_metadata()
    assert list(table.items) == list(theirs.state_dict_metadata)
    for key, item in theirs.state_dict_metadata.items():
        ours = table.items[key]
        if not isinstance(item, TensorStorageMetadata):
            assert ours is None
            continue
        assert ours is not None
        assert f"torch.{ours.torch_dtype}" == str(item.properties.dtype)
        assert ours.shape == tuple(item.size)
        boxes = [ItemBox(tuple(box.offsets), tuple(box.sizes)) for box in item.chunks]
        assert list(ours.boxes) == boxes
        for box in boxes:
            info = theirs.storage_data[MetadataIndex(key, box.offsets)]
            path = str(folder / info.relative_path)
            assert table.location(key, box) == ItemLocation(path, info.offset, info.length)
    assert table.others["planner_data"] == theirs.planner_data


@pytest.mark.parametrize("folder", [DATA, None])
def test_the_table_is_torchs(folder: Path | None, saved: Path) -> None:
    assert_same_as_torch(folder or saved)


def test_torch_reads_the_metadata_that_we_write(tmp_path: Path) -> None:
    box = ItemBox((2, 0), (2, 3))
    items = {"m.w": TensorItem("bfloat16", (4, 3), (ItemBox((0, 0), (2, 3)), box)), "note": None}
    locations = [
        (("m.w", (0, 0)), ItemLocation("__0_0.distcp", 0, 700)),
        (("m.w", (2, 0)), ItemLocation("__1_0.distcp", 0, 700)),
        (("note", None), ItemLocation("__0_0.distcp", 704, 600)),
    ]
    paths = {"m.w": ("m", "w"), "note": ("note",)}
    text = dumps(metadata(items, paths, locations, ours={"a": 1}), lambda _: None)
    (tmp_path / ".metadata").write_bytes(text)
    assert_same_as_torch(tmp_path)
    assert read_table(str(tmp_path)).others["ours"] == {"a": 1}
    theirs = pickle.load(io.BytesIO(text))
    assert theirs.state_dict_metadata["m.w"].properties.dtype == torch.bfloat16
    assert theirs.storage_data[MetadataIndex("note")].length == 600


def test_an_item_is_a_file_of_torch_save(saved: Path) -> None:
    table, files = read_table(str(saved)), ItemFiles()
    item = table.items["w"]
    assert item is not None
    (box,) = item.boxes
    location = table.location("w", box)
    assert files.stored(location, "w") is None  # no safetensors file
    tensor = files.torch_file(location).value
    assert isinstance(tensor, Tensor)
    require_same(location, "w", (tensor.dtype, tensor.shape), (item.dtype, box.sizes))
    with pytest.raises(errors.InconsistentCheckpoint, match=r"F32 .4, 4. of w"):
        require_same(location, "w", (tensor.dtype, tensor.shape), ("F32", (4, 4)))
    assert files.torch_file(table.location("note.epoch")).value == 3
    assert list(files.sizes) == [str(saved / "__0_0.distcp")]


@pytest.mark.parametrize("may_stay_open", [True, False])
def test_a_file_of_many_items_is_opened_once(
    may_stay_open: bool, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each opening takes a while on a network filesystem; descriptors are few."""
    opened: list[int] = []
    open_file = sources.open_file

    def count(path: str, *rest: Any) -> int:
        opened.append(open_file(path, *rest))
        return opened[-1]

    table, files = read_table(str(saved)), ItemFiles(keeps_open=may_stay_open)
    monkeypatch.setattr(sources, "open_file", count)
    place = table.location("w", ItemBox((0, 0), (4, 3)))
    for _ in range(3):
        assert files.stored(place, "w") is None
        assert files.torch_file(place).value.shape == (4, 3)
        assert files.torch_file(table.location("note.epoch")).value == 3
    assert len(opened) == (1 if may_stay_open else 9)
    del files
    for descriptor in {*opened}:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_a_file_that_takes_the_place_of_an_open_one(saved: Path) -> None:
    table, files = read_table(str(saved)), ItemFiles()
    place = table.location("note.epoch")
    assert files.torch_file(place).value == 3
    path = saved / "__0_0.distcp"
    (saved / "other").write_bytes(bytes(path.stat().st_size))
    (saved / "other").rename(path)
    with pytest.raises(errors.CorruptCheckpoint, match="is not a file of torch"):
        files.torch_file(place)


Change = Callable[[Metadata], Any]


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (
            lambda m: m.storage_data.pop(MetadataIndex("w", (0, 0))),
            errors.IncompleteCheckpoint,
            "in which file w at .0, 0. is",
        ),
        (
            lambda m: setattr(m.storage_data[MetadataIndex("w", (0, 0))], "relative_path", "../a"),
            errors.CorruptCheckpoint,
            "outside",
        ),
        (
            lambda m: setattr(m.state_dict_metadata["w"].properties, "dtype", "float32"),
            errors.CorruptCheckpoint,
            "w has a str instead of a dtype",
        ),
        (lambda m: m.__dict__.pop("storage_data"), errors.CorruptCheckpoint, "is not metadata"),
        (lambda m: m.__dict__.update(state_dict_metadata={"w": 5}), errors.CorruptCheckpoint, ""),
    ],
)
def test_damaged_metadata(change: Change, error: type[Exception], said: str, saved: Path) -> None:
    content = FileSystemReader(saved).read_metadata()
    change(content)
    (saved / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(error, match=said):
        read_table(str(saved)).location("w", ItemBox((0, 0), (4, 3)))


def test_a_type_that_zckpt_lacks(tmp_path: Path) -> None:
    with pytest.raises(errors.UnsupportedCheckpoint, match=r"type torch\.quint4x2"):
        _ = TensorItem("quint4x2", (1,), ()).dtype
