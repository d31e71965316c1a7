"""Items of torch.distributed.checkpoint that are planned by the form of others, and not opened."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import zckpt
from zckpt import errors
from zckpt.cli import cli
from zckpt.core.passes import loading
from zckpt.files.dcpfile import read_table
from zckpt.files.dcpitems import ItemFiles, described
from zckpt.files.dcptable import ItemBox, ItemLocation
from zckpt.files.torchfile import TorchFile

from ..conftest import ROOT

LAYERS = 12
GENUINE = ("fsdp2-2.13.0-w2", "fsdp2-2.13.0-tiny", "megatron-0.13.1-tp2", "megatron-0.16.1-tp2")
State = dict[str, torch.Tensor]


def layers(turned: int = -1) -> State:
    """Weights of equal layers; that of one may be stored column by column."""
    weights = {}
    for number in range(LAYERS):
        weight = torch.arange(12.0).view(4, 3) + number
        weights[f"layers.{number}.weight"] = weight.t() if number == turned else weight
        weights[f"layers.{number}.bias"] = torch.ones(4 if number != turned else 3) * number
    return weights


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[ItemLocation]:
    """The items that were opened."""
    items: list[ItemLocation] = []
    ways: dict[str, Any] = {name: getattr(ItemFiles, name) for name in ("torch_file", "reopened")}

    def noting(name: str) -> Callable[..., Any]:
        def opened(files: ItemFiles, location: ItemLocation, *rest: Any) -> Any:
            items.append(location)
            return ways[name](files, location, *rest)

        return opened

    for name in ways:
        monkeypatch.setattr(ItemFiles, name, noting(name))
    return items


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    dcp.save({"model": layers()}, checkpoint_id=tmp_path / "run")
    return tmp_path / "run"


def place_of(folder: Path, key: str) -> ItemLocation:
    table = read_table(str(folder))
    item = table.items[key]
    assert item is not None
    return table.location(key, item.boxes[0])


def changed(folder: Path, key: str, change: Callable[[bytes], bytes]) -> None:
    """Changes the bytes of an item, not their number."""
    location = place_of(folder, key)
    with open(location.file, "r+b") as file:
        data = os.pread(file.fileno(), location.length, location.offset)
        new = change(data)
        assert len(new) == len(data)
        assert new != data
        os.pwrite(file.fileno(), new, location.offset)


@pytest.mark.parametrize("name", GENUINE)
def test_data_begin_where_they_are_planned(name: str) -> None:
    """In all genuine files: an item that is planned by others is where it is said to be."""
    folder = ROOT / "tests" / "data" / name
    folders = [each.parent for each in folder.rglob(".metadata")]
    planned = 0
    for each in folders:
        table, files = read_table(str(each)), ItemFiles(plans=True)
        for key, item in table.items.items():
            for box in item.boxes if item else ():
                location = table.location(key, box)
                if item is None or box.is_empty or location.shared:
                    continue
                record = files.planned(location, key, item.dtype, box.sizes)
                planned += record is not None
                if record is None:
                    file = files.tensor_file(location, key, item.dtype, box.sizes)
                    assert described(file) == (item.dtype, box.sizes)
                    (record,) = file.records.values()
                assert record.crc == files.open(location).crc(files.open(location).value)[1]
                assert record.extent.offset - location.offset == 704
    assert planned > 4


def cut(folder: Path, cuts: dict[str, list[ItemBox]]) -> State:
    """Equal layers of a tensor of shape (6, 4), each in boxes, as ranks save it."""
    folder.mkdir()
    described: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    tensors = {name: torch.randn(6, 4) for name in cuts}
    with open(folder / "__0_0.distcp", "wb") as file:
        for name, boxes in cuts.items():
            chunks = []
            for box in boxes:
                ends = map(sum, zip(box.offsets, box.sizes, strict=True))
                own = tensors[name][tuple(map(slice, box.offsets, ends))].clone()
                start, offsets = file.tell(), torch.Size(box.offsets)
                chunks.append(ChunkStorageMetadata(offsets, torch.Size(box.sizes)))
                if own.numel():
                    torch.save(own, file)
                    info = _StorageInfo("__0_0.distcp", start, file.tell() - start)
                    places[MetadataIndex(f"model.{name}", offsets)] = info
            properties = TensorProperties(dtype=torch.float32)
            described[f"model.{name}"] = TensorStorageMetadata(
                properties, torch.Size((6, 4)), chunks
            )
    paths = {f"model.{name}": ("model", name) for name in cuts}
    text = pickle.dumps(Metadata(described, paths, places), protocol=4)
    (folder / ".metadata").write_bytes(text)
    return tensors


def box(*ranges: tuple[int, int]) -> ItemBox:
    return ItemBox(tuple(start for start, _ in ranges), tuple(stop - a for a, stop in ranges))


CUTS = {
    "rows": [box((0, 2), (0, 4)), box((2, 4), (0, 4)), box((4, 6), (0, 4)), box((6, 6), (0, 4))],
    "columns": [box((0, 6), (0, 1)), box((0, 6), (1, 3)), box((0, 6), (3, 4))],
    "both": [box((a, a + 3), (b, b + 2)) for a in (0, 3) for b in (0, 2)],
}


@pytest.mark.parametrize("name", CUTS)
def test_boxes_of_planned_items_are_those_of_opened_ones(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = cut(tmp_path / "run", {f"layers.{n}.weight": CUTS[name] for n in range(4)})
    planned = zckpt.read(tmp_path / "run")
    boxes = sum(not box.is_empty for box in CUTS[name])
    assert zckpt.inspect(planned)["unopened"] >= 3 * boxes
    for way in ("planned", "planned_boxes"):
        monkeypatch.setattr(ItemFiles, way, lambda *_: None)
    opened = zckpt.read(tmp_path / "run")
    assert "unopened" not in zckpt.inspect(opened)
    assert [record.crc for record in planned.files.records] == [
        record.crc for record in opened.files.records
    ]
    assert "unopened" not in zckpt.inspect(planned)
    for key, entry in planned.entries.items():
        other = opened.entries[key]
        assert [*entry.fragments] == [*other.fragments]
        for start in range(24):
            for stop in range(start + 1, 25):
                assert [*entry.fragments.runs(start, stop, 4)] == [
                    *other.fragments.runs(start, stop, 4)
                ]
        loaded = loading.as_torch(entry, planned.files.records)
        assert torch.equal(loaded, tensors[entry.parameter])


def test_boxes_that_overlap_are_no_tensor(tmp_path: Path) -> None:
    wrong = [box((0, 6), (0, 2)), box((0, 6), (1, 3))]
    cuts = {f"layers.{n}.weight": CUTS["columns"] if n < 3 else wrong for n in range(4)}
    cut(tmp_path / "run", cuts)
    with pytest.raises(errors.InconsistentCheckpoint, match="overlap"):
        zckpt.read(tmp_path / "run")


def test_a_few_items_are_opened_and_the_report_says_it(
    saved: Path, opened: list[ItemLocation]
) -> None:
    manifest = zckpt.read(saved)
    assert len(opened) == 2  # a weight, the first of its file, and a bias
    report = zckpt.inspect(manifest)
    assert report["unopened"] == 2 * LAYERS - 2


def test_check_says_it(saved: Path) -> None:
    ended = CliRunner().invoke(cli, ["check", str(saved), "--dp", "2", "--json"])
    assert json.loads(ended.stdout)["unopened"] == 2 * LAYERS - 2


def test_a_conversion_opens_the_rest(
    saved: Path, opened: list[ItemLocation], tmp_path: Path
) -> None:
    zckpt.convert(saved, tmp_path / "out")
    assert {each.offset for each in opened} == {
        place_of(saved, f"model.{key}").offset for key in layers()
    }
    for name, value in layers().items():
        assert torch.equal(zckpt.load(tmp_path / "out", f"{name}/param"), value)


def test_verify_opens_all(saved: Path, opened: list[ItemLocation]) -> None:
    changed(saved, "model.layers.7.weight", lambda data: data.replace(b"PK\1\2", b"PK\1\3", 1))
    (found,) = zckpt.verify(saved)["problems"]
    assert "zip directory" in found["message"]


@pytest.mark.parametrize("what", ["directory", "type", "data"])
def test_what_an_item_says_is_compared_when_it_is_read(
    what: str, saved: Path, tmp_path: Path
) -> None:
    key = "model.layers.7.weight"
    ways: dict[str, Callable[[bytes], bytes]] = {
        "directory": lambda data: data.replace(b"PK\1\2", b"PK\1\3", 1),
        "type": lambda data: data.replace(b"FloatStorage", b"IntStorage__"),
        "data": lambda data: data[:704] + b"\1" + data[705:],
    }
    changed(saved, key, ways[what])
    zckpt.read(saved)
    with pytest.raises(errors.ZckptError):
        zckpt.convert(saved, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_directory_may_not_lead_elsewhere(saved: Path, tmp_path: Path) -> None:
    """The head is right, and torch would read the bytes that the directory names."""
    key, other = "model.layers.7.weight", b"archive/data/0"

    def moved(data: bytes) -> bytes:
        entry = data.rfind(b"PK\1\2", 0, data.rfind(other))
        header = data.rfind(b"PK\3\4", 0, 704)
        assert int.from_bytes(data[entry + 42 : entry + 46], "little") == header
        # a second local header, in the data of the first: both are well-formed
        inner = data[header : header + 30 + len(other)]
        inner = inner[:28] + b"\0\0" + inner[30:]
        place = 704
        data = data[:place] + inner + data[place + len(inner) :]
        return data[: entry + 42] + place.to_bytes(4, "little") + data[entry + 46 :]

    changed(saved, key, moved)
    with pytest.raises(errors.ZckptError):
        zckpt.convert(saved, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_kind_with_another_order_is_opened(tmp_path: Path, opened: list[ItemLocation]) -> None:
    state = layers(turned=0)
    dcp.save({"model": state}, checkpoint_id=tmp_path / "run")
    zckpt.convert(tmp_path / "run", tmp_path / "out")
    for name, value in state.items():
        assert torch.equal(zckpt.load(tmp_path / "out", f"{name}/param"), value)


def test_another_order_within_a_kind(tmp_path: Path) -> None:
    """Whoever reads tensors opens all items then, through every door."""
    state = layers(turned=7)
    dcp.save({"model": state}, checkpoint_id=tmp_path / "run")
    manifest = zckpt.read(tmp_path / "run")
    with pytest.raises(errors.UnsupportedCheckpoint, match="not stored like the similar items"):
        _ = [record.crc for record in manifest.files.records]
    zckpt.convert(tmp_path / "run", tmp_path / "out")
    for name, value in state.items():
        assert torch.equal(zckpt.load(tmp_path / "out", f"{name}/param"), value)
    assert zckpt.verify(tmp_path / "run", against=tmp_path / "out")["equal"]
    assert zckpt.diff(tmp_path / "run", tmp_path / "out")["equal"]
    assert len(zckpt.stats(tmp_path / "run")["tensors"]) == len(state)
    for name, value in state.items():
        assert torch.equal(zckpt.load(tmp_path / "run", f"{name}/param"), value)
    assert zckpt.verify(tmp_path / "out", against=tmp_path / "run")["equal"]
    assert zckpt.diff(tmp_path / "out", tmp_path / "run")["equal"]
    assert not zckpt.report(tmp_path / "run")["faults"]
    for number in (1, 2):
        zckpt.convert(tmp_path / "run", tmp_path / "parts", sharing=zckpt.Part(number, 2))
    assert zckpt.verify(tmp_path / "parts", against=tmp_path / "run")["equal"]
    loaded = {"model": {name: torch.zeros_like(value) for name, value in state.items()}}
    dcp.load(loaded, storage_reader=zckpt.dcp.StorageReader(tmp_path / "run"))
    assert all(torch.equal(loaded["model"][name], value) for name, value in state.items())


def test_a_file_that_is_cut_is_named_unopened(saved: Path) -> None:
    location = place_of(saved, "model.layers.7.weight")
    os.truncate(location.file, location.offset + 8)
    with pytest.raises(errors.IncompleteCheckpoint) as caught:
        zckpt.read(saved)
    assert caught.value.code == "file-cut-short"


@pytest.mark.parametrize("large", [False, True])
def test_an_item_with_another_s_bytes_is_not_parsed(
    large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checksum is that of its own directory; one other byte, and it is opened as any file."""
    shape = (100, 50) if large else (4, 3)
    state = {f"layers.{number}.weight": torch.randn(shape) for number in range(6)}
    dcp.save({"model": state}, checkpoint_id=tmp_path / "run")
    manifest, parsed = zckpt.read(tmp_path / "run"), list[ItemLocation]()
    known = ItemFiles.open

    def noting(files: ItemFiles, location: ItemLocation) -> TorchFile:
        parsed.append(location)
        return known(files, location)

    monkeypatch.setattr(ItemFiles, "open", noting)
    records = [record for record in manifest.files.records if record.is_unopened]
    for record in records:
        with open(record.extent.file, "rb") as file:
            data = os.pread(file.fileno(), record.extent.length, record.extent.offset)
        assert record.crc == zlib.crc32(data)
    assert len(records) == 5
    assert not parsed
    places = [place_of(tmp_path / "run", f"model.{key}") for key in state]
    own = next(place for place in places if place.offset)
    with open(own.file, "r+b") as changed_file:
        for place in (*range(0, 704, 11), *range(704 + 4 * math.prod(shape), own.length, 7)):
            files = ItemFiles(plans=True)
            files.tensor_file(places[0], "model.layers.0.weight", "F32", shape)
            planned = files.planned(own, "model.layers.1.weight", "F32", shape)
            assert planned is not None
            (byte,) = os.pread(changed_file.fileno(), 1, own.offset + place)
            os.pwrite(changed_file.fileno(), bytes([byte ^ 16]), own.offset + place)
            parsed.clear()
            try:
                crc: Any = planned.crc
            except errors.ZckptError as error:
                crc = type(error)
            opened = ItemFiles()
            try:
                file_crc: Any = known(opened, own).crc(known(opened, own).value)[1]
            except errors.ZckptError as error:
                file_crc = type(error)
            assert crc == file_crc, place
            os.pwrite(changed_file.fileno(), bytes([byte]), own.offset + place)


def test_a_planned_item_is_opened_once(saved: Path, opened: list[ItemLocation]) -> None:
    manifest = zckpt.read(saved)
    record = next(each for each in manifest.files.records if each.is_unopened)
    opened.clear()
    assert record.crc == record.crc
    assert len(opened) == 1
    assert not record.is_unopened


def test_the_box_of_a_planned_item_is_that_of_the_metadata(saved: Path) -> None:
    files, location = ItemFiles(plans=True), place_of(saved, "model.layers.7.weight")
    first = place_of(saved, "model.layers.0.weight")
    assert files.planned(first, "model.layers.0.weight", "F32", (4, 3)) is None
    files.tensor_file(first, "model.layers.0.weight", "F32", (4, 3))
    box = ItemBox((0, 0), (6, 2))  # as many elements
    record = files.planned(location, "model.layers.7.weight", "F32", box.sizes)
    assert record is not None
    with pytest.raises(errors.InconsistentCheckpoint, match="something else is there"):
        _ = record.crc
    shutil.rmtree(saved)
