"""Rows of `.metadata` mean what the unpickler's records mean, instruction by instruction."""

from __future__ import annotations

import pickle
import random
import struct
from itertools import product
from pathlib import Path

import pytest
import torch
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
from zckpt.files import dcpfile, dcpshell, dcptable
from zckpt.files.dcprows import Rows, Run, Unusual
from zckpt.files.pickling import dumps
from zckpt.files.unpickle import Unpickler

from ..conftest import ROOT

SAMPLES = sorted(
    path
    for folder in ("fsdp2*", "megatron*", "automodel*")
    for path in (ROOT / "tests" / "data").glob(f"{folder}/**/.metadata")
)
Outcome = dcpfile.ItemTable | str


def outcome(text: bytes, rows: Rows | None) -> Outcome:
    """The table of a pickle; the kind of error for one that is refused."""
    try:
        content = Unpickler(text, rows=rows).load()
        table = dcpfile._table("/run", (), content, rows or Rows(text))
        dcpfile.need_agreement(table, "/run/.metadata")
    except errors.ZckptError as error:
        return type(error).__name__
    return table


def same(a: Outcome, b: Outcome) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    fields = (a.items, a.locations, a.paths), (b.items, b.locations, b.paths)
    return fields[0] == fields[1] and list(a.items) == list(b.items)


def with_rows(text: bytes) -> Outcome:
    try:
        return outcome(text, Rows(text))
    except Unusual:
        return outcome(text, None)


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.parent.name)
def test_genuine_metadata(path: Path) -> None:
    text = path.read_bytes()
    rows = Rows(text)
    found = outcome(text, rows)
    assert isinstance(found, dcpfile.ItemTable)
    assert same(found, outcome(text, None))
    boxes = sum(len(item.boxes) for item in found.items.values() if item)
    assert len(rows.box_sizes) > boxes - 4  # the first of each form is no row
    # a file's first item, and the last before a frame's end
    assert len(rows.offsets) > 0.9 * len(found.locations) - 12


@pytest.mark.parametrize("path", SAMPLES[:3], ids=lambda path: path.parent.name)
def test_a_changed_byte_means_the_same(path: Path) -> None:
    text, generator = path.read_bytes(), random.Random(5)
    for _ in range(250):
        changed, place = bytearray(text), generator.randrange(len(text))
        changed[place] ^= 1 << generator.randrange(8)
        assert same(with_rows(bytes(changed)), outcome(bytes(changed), None)), place
    for _ in range(60):  # an instruction that is left out, or that comes twice
        place = generator.randrange(len(text))
        for changed in (
            bytearray(text[:place] + text[place + 1 :]),
            bytearray(text[:place] + text[place : place + 1] + text[place:]),
        ):
            assert same(with_rows(bytes(changed)), outcome(bytes(changed), None)), place


@pytest.mark.parametrize("protocol", [0, 1, 2, 3])
def test_other_protocols_mean_the_same(protocol: int) -> None:
    text = pickle.dumps(pickle.loads(metadata(20)), protocol)
    found = with_rows(text)
    assert isinstance(found, dcpfile.ItemTable)
    assert same(found, outcome(text, None))


def test_what_zckpt_writes_has_rows(tmp_path: Path) -> None:
    source = ROOT / "tests" / "data" / "fsdp2-2.13.0-w2"
    zckpt.convert(source, tmp_path / "out", to="dcp", dp=3)
    text = (tmp_path / "out" / ".metadata").read_bytes()
    rows = Rows(text)
    found = outcome(text, rows)
    assert isinstance(found, dcpfile.ItemTable)
    assert same(found, outcome(text, None))
    assert len(rows.offsets) > 0.9 * len(found.locations) - 4
    generator = random.Random(6)
    for _ in range(150):
        changed, place = bytearray(text), generator.randrange(len(text))
        changed[place] ^= 1 << generator.randrange(8)
        assert same(with_rows(bytes(changed)), outcome(bytes(changed), None)), place


def written(tensors: int, boxes: int, stored: int) -> bytes:
    """What zckpt writes for equal tensors, of which only the first `stored` have locations."""
    cut = tuple(dcptable.ItemBox((number, 0), (1, 5)) for number in range(boxes))
    keys = [f"w.{number}" for number in range(tensors)]
    items = {key: dcptable.TensorItem("float32", (boxes, 5), cut) for key in keys}
    locations = [
        ((key, box.offsets), dcptable.ItemLocation("__0_0.distcp", 1000 * number, 1000))
        for number, (key, box) in enumerate(product(keys[:stored], cut))
    ]
    paths = {key: tuple(key.split(".")) for key in keys}
    return dumps(dcpshell.metadata(items, paths, locations), lambda _: None)


@pytest.mark.parametrize("boxes", [1, 3, 16])
def test_equal_tensors_are_described_by_one_object(boxes: int) -> None:
    text = written(30, boxes, 30)
    described = Unpickler(text, rows=Rows(text)).load().state["state_dict_metadata"]
    assert len({id(record) for record in described.values()}) == 2  # the first one names its words
    assert same(with_rows(text), outcome(text, None))


def test_many_tensors_with_one_long_description() -> None:
    """Each has as many boxes as the description: more than there are locations."""
    text = written(400, 16, 5)
    rows = Rows(text)
    content = Unpickler(text, rows=rows).load()
    with pytest.raises(errors.CorruptCheckpoint, match="outnumber the stored items"):
        dcpfile._table("/run", (), content, rows)


def test_a_description_that_gets_another_state_is_read_without_rows() -> None:
    """Other tensors have the same description."""
    text = written(30, 1, 30)
    key = b"X" + struct.pack("<I", 4) + b"w.20"
    changed = text.replace(key, b"Nb" + key)
    assert len(changed) == len(text) + 2
    with pytest.raises(Unusual):
        Unpickler(changed, rows=Rows(changed)).load()
    content = Unpickler(changed).load().state["state_dict_metadata"]
    assert [key for key, record in content.items() if record.state is None] == ["w.19"]


def pickled(after: bytes = b"", layout: bytes | None = b"torch.strided") -> bytes:
    """A list of two equal descriptions of a tensor, and the instructions `after` the second one.

    `layout` is the text that the function of the layout gets; None: a list, which may change.
    """
    module = "torch.distributed.checkpoint.metadata"
    names = (
        f"{module}\nTensorStorageMetadata", f"{module}\nTensorProperties",
        f"{module}\nChunkStorageMetadata", "torch\nSize", "torch\nfloat32",
        "torch.serialization\n_get_layout", f"{module}\n_MEM_FORMAT_ENCODING",
    )  # fmt: skip
    words = (b"properties", b"size", b"chunks", b"offsets", b"sizes")
    values = [b"c" + name.encode() + b"\n" for name in names]
    values += [b"X" + struct.pack("<I", len(word)) + word for word in words]
    values.append(b"]" if layout is None else b"X" + struct.pack("<I", len(layout)) + layout)
    head = b"".join(value + b"q%c0" % number for number, value in enumerate(values))
    properties = b"h\x01)\x81(h\x04h\x05h\x0c\x85R\x89h\x06K\x00\x85R\x89tb"
    chunk = b"h\x02)\x81}(h\x0ah\x03K\x00\x85\x85Rh\x0bh\x03K\x04\x85\x85Rub"
    tensor = b"h\x00)\x81}(h\x07" + properties + b"h\x08h\x03K\x04\x85\x85Rh\x09]("
    tensor += chunk + b"eub"
    return b"\x80\x02" + head + b"(" + tensor + tensor + after + b"l."


def test_equal_descriptions_are_one_object() -> None:
    text = pickled()
    first, second = Unpickler(text, rows=Rows(text)).load()
    assert first is second


@pytest.mark.parametrize("more", [b"(K\x01K\x02u", b"(K\x01K\x02e", b"K\x01K\x02s", b"K\x01a"])
def test_a_description_that_gets_more_values_is_read_without_rows(more: bytes) -> None:
    """Other tensors may have the same description."""
    text = pickled(more)
    with pytest.raises(Unusual):
        Unpickler(text, rows=Rows(text)).load()
    first, second = Unpickler(text).load()
    assert not first.items
    assert not first.appended
    assert second.items or second.appended


def test_a_description_whose_values_may_change_is_read_each_time() -> None:
    text = pickled(layout=None)
    first, second = Unpickler(text, rows=Rows(text)).load()
    assert first is not second


def metadata(boxes: int, axes: int = 2, shift: int = 0) -> bytes:
    size = torch.Size((1, *(2 for _ in range(axes - 1))))
    chunks, stored, names = [], {}, [f"__{rank}_0.distcp" for rank in range(3)]
    for number in range(boxes):
        offsets = torch.Size((number, *(0 for _ in range(axes - 1))))
        chunks.append(ChunkStorageMetadata(offsets, size))
        stored[MetadataIndex("w", offsets, number)] = _StorageInfo(
            names[number % 3], (number << shift) * 2000, 2000
        )
    item = TensorStorageMetadata(
        TensorProperties(dtype=torch.float32), torch.Size((boxes, *size[1:])), chunks
    )
    return pickle.dumps(Metadata({"w": item}, {"w": ("w",)}, stored), 4)


@pytest.mark.parametrize("axes", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shift", [0, 12, 30, 40])
def test_any_number_of_axes_and_any_size_of_numbers(axes: int, shift: int) -> None:
    text = metadata(50, axes, shift)
    rows = Rows(text)
    found = outcome(text, rows)
    assert isinstance(found, dcpfile.ItemTable)
    assert same(found, outcome(text, None))
    assert len(rows.box_sizes) >= 48
    assert len(rows.offsets) >= 45


def test_rows_take_little_memory() -> None:
    text = metadata(4000)
    rows = Rows(text)
    value = Unpickler(text, rows=rows).load()
    chunks = value.state["state_dict_metadata"]["w"].state["chunks"]
    assert len(chunks) < 20
    assert sum(each.stop - each.start for each in chunks if type(each) is Run) > 3900
    columns = (
        rows.box_offsets, rows.box_sizes, rows.place_keys, rows.place_offsets, rows.place_files,
        rows.offsets, rows.lengths,
    )  # fmt: skip
    assert sum(column.itemsize for column in columns) <= 40


def test_a_pickle_that_numbers_values_itself_is_read_without_rows() -> None:
    text = pickle.dumps(pickle.loads(metadata(20)), 2).replace(b"q\x03", b"q\x13", 1)
    with pytest.raises(Unusual):
        Unpickler(text, rows=Rows(text)).load()
    assert same(with_rows(text), outcome(text, None))


def test_a_reference_to_a_part_of_a_row_is_read_without_rows() -> None:
    """Such as one to the dictionary of a box, which no row keeps."""
    text = metadata(20)
    rows = Rows(text)
    Unpickler(text, rows=rows).load()
    with pytest.raises(Unusual):
        rows.recall(rows._box_numbers[5] + 1)
    assert isinstance(rows.recall(rows._box_numbers[5]), Run)
