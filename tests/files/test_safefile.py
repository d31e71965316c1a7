"""safetensors files: the safetensors package reads what we write, and we refuse what it refuses."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save_file

from zckpt.core.checkpoint.dtypes import SIZES, TORCH_NAMES
from zckpt.errors import CorruptCheckpoint
from zckpt.files import safefile

Described = tuple[str, str, tuple[int, ...]]


def write(path: Path, tensors: list[Described]) -> bytes:
    """A file of random bytes (zeros and ones, which every dtype understands)."""
    head, size = safefile.header(tensors)
    data = np.random.default_rng(0).integers(0, 2, size - len(head), dtype=np.uint8).tobytes()
    path.write_bytes(head + data)
    return data


def agree(path: Path, tensors: list[Described]) -> None:
    data = write(path, tensors)
    opened = safe_open(str(path), "pt")
    assert opened.metadata() == {"format": "pt"}
    assert set(opened.keys()) == {name for name, _, _ in tensors}
    start = 0
    for name, dtype, shape in tensors:
        length = prod(shape) * SIZES[dtype]
        tensor = opened.get_tensor(name)
        assert (tensor.dtype, tuple(tensor.shape)) == (getattr(torch, TORCH_NAMES[dtype]), shape)
        if length:
            assert (
                bytes(tensor.reshape(-1).view(torch.uint8).numpy()) == data[start : start + length]
            )
        start += length
    stored = {item.name: item for item in safefile.read(str(path))}
    begin = path.stat().st_size - len(data)
    assert begin % 4096 == 0
    start = begin
    for name, dtype, shape in tensors:
        item = stored.pop(name)
        assert (item.dtype, item.shape, item.extent.offset) == (dtype, shape, start)
        start += item.extent.length
    assert not stored


@pytest.mark.parametrize("dtype", SIZES)
def test_every_dtype_is_read_by_the_package(tmp_path: Path, dtype: str) -> None:
    agree(
        tmp_path / "a.safetensors", [("a", dtype, (3, 5)), ("b", dtype, ()), ("c", dtype, (0, 2))]
    )


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [("a", "F32", (0,))],
        [("a", "F32", (0,)), ("b", "F32", (0,)), ("c", "F32", (1,))],
        [("é\u4e2d\U0001f600", "I64", (2,)), ("", "U8", (1,)), ('"\\\n\t\0', "U8", (3,))],
        [(f"layers.{place}.weight", "BF16", (place,)) for place in range(500)],
    ],
    ids=["none", "empty", "empty and not", "names", "many"],
)
def test_any_file_is_read_by_the_package(tmp_path: Path, tensors: list[Described]) -> None:
    agree(tmp_path / "a.safetensors", tensors)


@given(names=st.lists(st.text(max_size=5), unique=True, max_size=6), data=st.data())
def test_random_headers_are_read_by_the_package(names: list[str], data: st.DataObject) -> None:
    shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
    dtypes = st.sampled_from(list(SIZES))
    tensors = [
        (name, data.draw(dtypes), data.draw(shapes)) for name in names if name != "__metadata__"
    ]
    tensors.sort(key=lambda item: -SIZES[item[1]])
    head, size = safefile.header(tensors)
    read = load(head + bytes(size - len(head)))
    assert {name: tuple(tensor.shape) for name, tensor in read.items()} == {
        name: shape for name, _, shape in tensors
    }


def test_files_of_the_package_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {"b": torch.arange(6.0).view(2, 3), "a": torch.ones(3, dtype=torch.bfloat16)}
    save_file(tensors, path, metadata={"any": "thing"})
    data = path.read_bytes()
    for item in safefile.read(str(path)):
        tensor = tensors.pop(item.name)
        stored = data[item.extent.offset : item.extent.offset + item.extent.length]
        assert stored == bytes(tensor.reshape(-1).view(torch.uint8).numpy())
    assert not tensors


# -- refusals


def item(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


def raw(text: str | bytes, data: bytes = bytes(8), length: int | None = None) -> bytes:
    head = text.encode() if isinstance(text, str) else text
    return (len(head) if length is None else length).to_bytes(8, "little") + head + data


def file(data: bytes = bytes(8), /, **tensors: Any) -> bytes:
    return raw(json.dumps(tensors), data)


REFUSED = {
    "empty": b"",
    "seven bytes": bytes(7),
    "no header": bytes(8),
    "header past the end": raw("{}", b"", 3),
    "a header of 2**64 - 1 bytes": raw("{}", b"", 2**64 - 1),
    "a header of 2**63 bytes": raw("{}", b"", 2**63),
    "a header over the limit": raw("{}", b"", 100_000_001),
    "no JSON": raw("hello"),
    "no UTF-8": raw(b"\xff\xfe"),
    "a list": raw("[]", b""),
    "a number": raw("1", b""),
    "null": raw("null", b""),
    "deep JSON": raw("[" * 100_000, b""),
    "deep objects": raw('{"a":' * 100_000, b""),
    "a long number": raw('{"a":' + "9" * 10_000 + "}", b""),
    "UTF-16": raw(json.dumps({"a": item()}).encode("utf-16-le")),
    "a tensor that is a list": file(a=[1]),
    "a tensor that is null": file(a=None),
    "without a dtype": file(a={"shape": [2], "data_offsets": [0, 8]}),
    "without a shape": file(a={"dtype": "F32", "data_offsets": [0, 8]}),
    "without offsets": file(a={"dtype": "F32", "shape": [2]}),
    "a name twice": raw(
        '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        '"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    ),
    "an unknown dtype": file(a=item(dtype="F99")),
    "an unknown dtype, empty": file(b"", a=item(dtype="F99", shape=[0], data_offsets=[0, 0])),
    "a dtype that is a number": file(a=item(dtype=4)),
    "a dtype that is a list": file(a=item(dtype=["F32"])),
    "another dtype": file(a=item(dtype="F64")),
    "another shape": file(a=item(shape=[3])),
    "a negative shape": file(a=item(shape=[-2])),
    "two negative shapes": file(a=item(shape=[-1, -2])),
    "a shape that is a fraction": file(a=item(shape=[2.0])),
    "a shape that is text": file(a=item(shape="2")),
    "a shape that is empty text": file(bytes(4), a=item(shape="", data_offsets=[0, 4])),
    "a shape that is a number": file(a=item(shape=2)),
    "a shape of truths": file(bytes(4), a=item(shape=[True], data_offsets=[0, 4])),
    "a huge shape": file(a=item(shape=[2**62, 2**62])),
    "negative offsets": file(a=item(data_offsets=[-8, 0])),
    "offsets that go back": file(a=item(data_offsets=[8, 0])),
    "offsets that are fractions": file(a=item(data_offsets=[0.0, 8.0])),
    "offsets that are infinite": file(a=item(data_offsets=[0, float("inf")])),
    "offsets that are no numbers": file(a=item(data_offsets=[0, float("nan")])),
    "offsets that are text": file(a=item(data_offsets=["0", "8"])),
    "three offsets": file(a=item(data_offsets=[0, 8, 16])),
    "one offset": file(a=item(data_offsets=[0])),
    "offsets past the end": file(a=item(shape=[3], data_offsets=[0, 12])),
    "data behind the last tensor": file(bytes(9), a=item()),
    "data without tensors": file(bytes(9)),
    "a hole": file(bytes(20), a=item(), b=item(data_offsets=[12, 20])),
    "a hole at the start": file(bytes(12), a=item(data_offsets=[4, 12])),
    "overlap": file(bytes(12), a=item(), b=item(data_offsets=[4, 12])),
    "the same bytes twice": file(a=item(), b=item()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_malformed_file_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(REFUSED[name])
    with pytest.raises(CorruptCheckpoint, match=r"a\.safetensors"):
        safefile.read(str(path))
    if name != "a name twice":  # the package takes the last
        with pytest.raises(SafetensorError):
            load(REFUSED[name])


def test_colons_in_names_hide_no_second_one(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(file(**{"0:a:b": item()}))
    assert [stored.name for stored in safefile.read(str(path))] == ["0:a:b"]
    about = json.dumps(item())
    again = about.replace('":', '" :')
    text = f'{{"0:a": {about}, "0:a" : {again}}}'.encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(CorruptCheckpoint, match="malformed"):
        safefile.read(str(path))


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    whole = file(a=item(), b=item(data_offsets=[8, 16])) + bytes(8)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptCheckpoint, match=r"a\.safetensors"):
            safefile.read(str(path))
    path.write_bytes(whole)
    assert [stored.name for stored in safefile.read(str(path))] == ["a", "b"]
