"""Parts of `.metadata` that contradict each other, and what writers may leave out."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)

from zckpt import errors
from zckpt.files.dcpfile import read_table
from zckpt.files.dcpitems import ItemFiles

# torch 2.6 has no `no_dist`, which would say that one process is meant
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
STATE = {
    "m": {"w": torch.arange(12.0).view(4, 3), "v": torch.ones(4, 3), "none": torch.empty(0, 3)},
    "note": {"epoch": 3},
}
W, V = MetadataIndex("m.w", (0, 0)), MetadataIndex("m.v", (0, 0))
Change = Callable[[Metadata], Any]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    dcp.save(STATE, checkpoint_id=tmp_path / "run")
    return tmp_path / "run"


def change(folder: Path, changed: Change) -> None:
    content = FileSystemReader(folder).read_metadata()
    changed(content)
    (folder / ".metadata").write_bytes(pickle.dumps(content))


def renamed(content: Metadata, old: str, new: str) -> None:
    items = content.state_dict_metadata
    content.state_dict_metadata = {new if k == old else k: item for k, item in items.items()}


CONTRADICTIONS: dict[str, tuple[Change, type[Exception], str]] = {
    "a damaged key in a path": (
        lambda m: m.planner_data.update({"m.w": ("m", "u")}),
        errors.CorruptCheckpoint,
        r"the state dict path of m\.w is that of another item",
    ),
    "a damaged key of an item": (
        lambda m: renamed(m, "m.w", "m.u"),
        errors.CorruptCheckpoint,
        r"no state dict path is stated for m\.u",
    ),
    "an item without a path": (
        lambda m: m.planner_data.pop("m.w"),
        errors.CorruptCheckpoint,
        r"no state dict path is stated for m\.w",
    ),
    "a path of no kind": (
        lambda m: m.planner_data.update({"m.w": ("m", 2.5)}),
        errors.CorruptCheckpoint,
        r"the path of m\.w is not a list",
    ),
    "a location of no item": (
        lambda m: m.state_dict_metadata.pop("m.w"),
        errors.CorruptCheckpoint,
        r"the data of m\.w lie, but does not describe all of these data",
    ),
    "a value without a location": (
        lambda m: m.storage_data.pop(MetadataIndex("note.epoch")),
        errors.IncompleteCheckpoint,
        r"in which file note\.epoch is",
    ),
    "a tensor that became a value": (
        lambda m: m.state_dict_metadata.update({"m.w": BytesStorageMetadata()}),
        errors.IncompleteCheckpoint,
        r"in which file m\.w is",
    ),
    "a piece outside of its tensor": (
        lambda m: setattr(m.state_dict_metadata["m.w"], "size", torch.Size((3, 3))),
        errors.InconsistentCheckpoint,
        r"chunk of m\.w of shape \[4, 3\] at \[0, 0\] exceeds the tensor's shape \[3, 3\]",
    ),
    "a piece of other axes": (
        lambda m: setattr(m.state_dict_metadata["m.w"], "size", torch.Size((12,))),
        errors.CorruptCheckpoint,
        r"another number of axes",
    ),
    "a negative size": (
        lambda m: setattr(
            m.state_dict_metadata["m.w"], "chunks", [ChunkStorageMetadata((0, 0), (-4, 3))]
        ),
        errors.CorruptCheckpoint,
        r"the sizes or offsets of m\.w",
    ),
    "two items that share bytes": (
        lambda m: m.storage_data.update(
            {W: replace(m.storage_data[V], offset=m.storage_data[V].offset + 1)}
        ),
        errors.InconsistentCheckpoint,
        r"two items share byte",
    ),
    "no field of paths": (
        lambda m: m.__dict__.pop("planner_data"),
        errors.CorruptCheckpoint,
        r"no planner_data",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_an_error(name: str, saved: Path) -> None:
    changed, error, said = CONTRADICTIONS[name]
    change(saved, changed)
    with pytest.raises(error, match=said) as raised:
        read_table(str(saved))
    assert str(saved) in str(raised.value)


def test_two_items_that_begin_at_one_byte(saved: Path) -> None:
    change(saved, lambda m: m.storage_data.update({W: m.storage_data[V]}))
    table = read_table(str(saved))
    item = table.items["m.w"]
    assert item is not None
    with pytest.raises(errors.InconsistentCheckpoint, match="two items begin at byte"):
        ItemFiles().torch_file(table.location("m.w", item.boxes[0]))


@pytest.mark.parametrize("paths", [None, {}, {"of a planner's own": 3}])
def test_writers_may_keep_no_paths(paths: Any, saved: Path) -> None:
    change(saved, lambda m: setattr(m, "planner_data", paths))
    table = read_table(str(saved))
    assert table.paths == {}
    assert set(table.items) == {"m.w", "m.v", "m.none", "note.epoch"}


def test_a_path_may_have_no_item(saved: Path) -> None:
    """Before torch 2.4, values of ranks other than the first were not saved."""
    change(saved, lambda m: m.planner_data.update({"rng.1": ("rng", "1")}))
    assert read_table(str(saved)).unsaved == ["rng.1"]


def test_tensors_of_a_safetensors_file_begin_at_one_byte(tmp_path: Path) -> None:
    if not hasattr(filesystem, "SerializationFormat"):
        pytest.skip("this torch writes no safetensors")
    form = filesystem.SerializationFormat.SAFETENSORS
    writer = FileSystemWriter(tmp_path / "run", serialization_format=form)
    dcp.save(STATE, storage_writer=writer, no_dist=True)
    table, files = read_table(str(tmp_path / "run")), ItemFiles()
    item = table.items["m.w"]
    assert item is not None
    location = table.location("m.w", item.boxes[0])
    assert location.shared
    assert files.stored(location, "m.w") is not None
    assert files.unused(table) == []
