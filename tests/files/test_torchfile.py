"""Files of torch.save: the same values as with torch.load; hostile files are refused."""

from __future__ import annotations

import io
import os
import pickle
import re
import struct
import subprocess
import sys
import traceback
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from zckpt.core.checkpoint.dtypes import SIZES, TORCH_NAMES
from zckpt.core.checkpoint.inert import Foreign, Global, Scalar, Size
from zckpt.errors import CorruptCheckpoint, NotACheckpoint, UnsupportedCheckpoint, ZckptError
from zckpt.files.torchfile import Parsed, Tensor, TorchFile, is_torch, peek

MAGIC = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2)


def save(path: Path, value: Any, legacy: bool = False, **options: Any) -> str:
    torch.save(value, path, _use_new_zipfile_serialization=not legacy, **options)
    return str(path)


def gathered(file: TorchFile, tensor: Tensor) -> bytes:
    """The row-major bytes of a tensor, by its fragments."""
    size, fragments = SIZES[tensor.dtype], file.fragments(tensor)
    whole = bytearray(tensor.numel * size)
    filled = bytearray(tensor.numel)
    with open(file.path, "rb") as opened:
        for fragment in fragments:
            count = fragment.stop - fragment.start
            assert fragment.extent.length == count * fragment.count * size
            data = os.pread(opened.fileno(), fragment.extent.length, fragment.extent.offset)
            for run in range(fragment.count):
                start = fragment.start + run * fragment.stride
                whole[start * size : (start + count) * size] = data[
                    run * count * size : (run + 1) * count * size
                ]
                assert not any(filled[start : start + count]), "an element stands in two fragments"
                filled[start : start + count] = b"\1" * count
    assert all(filled), "an element stands in no fragment"
    return bytes(whole)


def expected(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def random(dtype: str, *shape: int) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    most = 2 if dtype == "BOOL" else 256
    data = torch.randint(0, most, (numel * SIZES[dtype],), dtype=torch.uint8)
    return data.view(getattr(torch, TORCH_NAMES[dtype])).reshape(shape)


def same(path: str, name: str | None = None) -> TorchFile:
    """The file, after all of its tensors were compared with what torch loads."""
    file = TorchFile(path)
    loaded = torch.load(path, weights_only=False)
    pairs = zip(file.value, loaded, strict=True) if isinstance(loaded, list) else None
    for mine, theirs in pairs or ((file.value, loaded),):
        assert (mine.shape, TORCH_NAMES[mine.dtype]) == (
            tuple(theirs.shape),
            str(theirs.dtype).removeprefix("torch."),
        )
        assert gathered(file, mine) == expected(theirs)
        assert mine.contiguous == (theirs.is_contiguous() or not theirs.numel())
    return file


both = pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])


NO_STORAGE = {"F8_E4M3", "F8_E5M2", "U64", "U32", "U16"}  # torch writes no legacy file of these
LEGACY_DTYPES = [(dtype, True) for dtype in SIZES if dtype not in NO_STORAGE]


@pytest.mark.parametrize(
    ("dtype", "legacy"), [*((dtype, False) for dtype in SIZES), *LEGACY_DTYPES]
)
def test_every_dtype(tmp_path: Path, dtype: str, legacy: bool) -> None:
    file = same(save(tmp_path / "a.pt", [random(dtype, 3, 5), random(dtype)], legacy))
    if not legacy:
        with open(file.path, "rb") as opened:
            for record in file.records.values():
                data = os.pread(opened.fileno(), record.extent.length, record.extent.offset)
                assert zlib.crc32(data) == record.crc


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@both
def test_every_protocol(tmp_path: Path, protocol: int, legacy: bool) -> None:
    path = save(tmp_path / "a.pt", [torch.arange(5)], legacy, pickle_protocol=protocol)
    same(path)
    assert is_torch(path)


BASE = torch.arange(2 * 3 * 4 * 5, dtype=torch.int32)
VIEWS = {
    "0-d": BASE[7],
    "zero-size": BASE[:0],
    "zero-size inside": torch.zeros(3, 0),
    "zero-size first": torch.zeros(0, 3),
    "zero-size, transposed": torch.zeros(0, 3, 2).transpose(0, 2),
    "offset": BASE[10:20],
    "row": BASE.view(24, 5)[3],
    "rows": BASE.view(24, 5)[3:7],
    "column": BASE.view(24, 5)[:, 3],
    "columns": BASE.view(24, 5)[:, 1:3],
    "transposed": BASE.view(24, 5).t(),
    "transposed part": BASE.view(24, 5).t()[1:3, 2:9],
    "permuted": BASE.view(2, 3, 4, 5).permute(2, 0, 3, 1),
    "channels last": BASE.view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "every other": BASE[::2],
    "every other of two axes": BASE.view(24, 5)[::3, ::2],
    "expanded": BASE[:4].expand(3, 4),
    "expanded scalar": BASE[5].expand(2, 3),
    "expanded inside": BASE[:6].view(3, 1, 2).expand(3, 2, 2),
    "overlapping": BASE[:8].unfold(0, 4, 1),
    "one element of another stride": BASE.as_strided((1, 1), (7, 9), 3),
    "one column of another stride": BASE.as_strided((3, 1), (1, 5), 3),
    "diagonal": BASE.view(24, 5)[:5].diagonal(),
}


@both
@pytest.mark.parametrize("name", VIEWS)
def test_every_view(tmp_path: Path, name: str, legacy: bool) -> None:
    same(save(tmp_path / "a.pt", VIEWS[name], legacy))


@both
def test_views_share_one_storage(tmp_path: Path, legacy: bool) -> None:
    file = same(save(tmp_path / "a.pt", list(VIEWS.values()), legacy))
    offset, rows = file.value[list(VIEWS).index("offset")], file.value[list(VIEWS).index("rows")]
    assert file.extent(rows).offset - file.extent(offset).offset == (15 - 10) * 4
    assert offset.storage.key == rows.storage.key


@both
def test_tied_tensors_have_one_place(tmp_path: Path, legacy: bool) -> None:
    whole = torch.arange(6.0)
    file = TorchFile(save(tmp_path / "a.pt", [whole, whole, whole[2:], whole.clone()], legacy))
    first, second, part, other = file.value
    assert first.place == second.place
    assert len({tensor.place for tensor in (first, part, other)}) == 3


@both
def test_a_part_of_a_tensor_is_flat(tmp_path: Path, legacy: bool) -> None:
    file = TorchFile(save(tmp_path / "a.pt", torch.arange(12).view(3, 4)[1:], legacy))
    assert struct.unpack("<3q", file.read(file.value.part(2, 5))) == (6, 7, 8)


@both
def test_scalars_are_read_by_value(tmp_path: Path, legacy: bool) -> None:
    tensors = [
        torch.tensor(7.0),
        torch.tensor([3]),
        torch.tensor(True),
        torch.tensor(0.5).bfloat16(),
    ]
    file = TorchFile(save(tmp_path / "a.pt", tensors, legacy))
    assert [file.scalar(tensor) for tensor in file.value] == [
        Scalar(7.0, "F32"),
        Scalar(3, "I64", (1,)),
        Scalar(True, "BOOL"),
        Scalar(0.5, "BF16"),
    ]


@pytest.mark.parametrize("dtype", ["F8_E4M3", "C64"])
def test_a_scalar_that_is_no_number_of_python_is_refused(tmp_path: Path, dtype: str) -> None:
    file = TorchFile(save(tmp_path / "a.pt", random(dtype)))
    with pytest.raises(UnsupportedCheckpoint, match=r"a\.pt"):
        file.scalar(file.value)


@both
def test_parameters_and_tensors_with_attributes(tmp_path: Path, legacy: bool) -> None:
    plain, noted = torch.arange(4.0), torch.arange(5.0)
    noted.ds_id = 3  # type: ignore[attr-defined]
    parameter = torch.nn.Parameter(torch.arange(6.0))
    with_state = torch.nn.Parameter(torch.arange(7.0))
    with_state.ds_id = 4  # type: ignore[attr-defined]
    frozen = torch.nn.Parameter(torch.arange(8), requires_grad=False)
    same(save(tmp_path / "a.pt", [plain, noted, parameter, with_state, frozen], legacy))


def test_a_state_dict_keeps_its_metadata(tmp_path: Path) -> None:
    state = torch.nn.BatchNorm1d(3).state_dict()
    file = TorchFile(save(tmp_path / "a.pt", state))
    assert type(file.value) is OrderedDict
    assert list(file.value) == list(state)
    assert file.value._metadata == state._metadata  # type: ignore[attr-defined]


def test_what_is_no_tensor_is_plain_or_a_record(tmp_path: Path) -> None:
    value = {"size": torch.Size([2]), "dtype": torch.float32, "device": torch.device("cpu")}
    loaded = TorchFile(save(tmp_path / "a.pt", value)).value
    assert (loaded["size"], type(loaded["size"])) == (Size((2,)), Size)
    assert loaded["dtype"] == Global("torch.float32")
    assert (loaded["device"].name, loaded["device"].arguments) == ("torch.device", ("cpu",))


def test_sparse_tensors_are_records(tmp_path: Path) -> None:
    file = TorchFile(save(tmp_path / "a.pt", {"a": torch.eye(3).to_sparse(), "b": torch.ones(2)}))
    assert isinstance(file.value["a"], Foreign)
    assert gathered(file, file.value["b"]) == expected(torch.ones(2))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, dtype=torch.complex128),
        torch.ones(2, dtype=torch.float8_e5m2fnuz),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
    ],
    ids=["complex128", "float8_e5m2fnuz", "conjugated", "negated"],
)
def test_a_tensor_that_is_not_read_is_refused(tmp_path: Path, tensor: torch.Tensor) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"a\.pt"):
        TorchFile(save(tmp_path / "a.pt", tensor))


@contextmanager
def without_crc32() -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def test_records_without_checksums(tmp_path: Path) -> None:
    with without_crc32():
        path = save(tmp_path / "a.pt", [torch.arange(5), torch.rand(1 << 18), torch.zeros(0)])
    assert {record.crc for record in same(path).records.values()} == {None}


def test_a_checksum_that_is_zero_is_checked(tmp_path: Path) -> None:
    data = bytes.fromhex("9d0ad96d")
    assert zlib.crc32(data) == 0
    file = TorchFile(save(tmp_path / "a.pt", torch.frombuffer(bytearray(data), dtype=torch.uint8)))
    assert [record.crc for record in file.records.values()] == [0]


def test_many_members(tmp_path: Path) -> None:
    """The directory is longer than the 64 KiB in which its end is searched."""
    path = save(tmp_path / "a.pt", [torch.tensor([i]) for i in range(1500)])
    with zipfile.ZipFile(path) as file:
        assert os.path.getsize(path) - file.start_dir > 65557
    file = TorchFile(path)
    assert [file.scalar(tensor).value for tensor in file.value] == list(range(1500))


@pytest.mark.parametrize("length", [1, 1000, 65535])
def test_a_zip_with_a_comment(tmp_path: Path, length: int) -> None:
    path = save(tmp_path / "a.pt", torch.arange(5))
    with zipfile.ZipFile(path, "a") as file:
        file.comment = b"c" * length  # torch itself finds no end behind the longest
    assert everything(path) == expected(torch.arange(5))


def test_equal_pickles_are_parsed_once(tmp_path: Path) -> None:
    parsed = Parsed()
    files = [
        TorchFile(
            save(tmp_path / str(place) / "a.pt", {"a": torch.full((3,), float(place))}), parsed
        )
        for place in range(2)
        if not (tmp_path / str(place)).mkdir()
    ]
    other = TorchFile(save(tmp_path / "b.pt", {"b": torch.ones(3)}), parsed)
    assert files[0].value is files[1].value
    assert files[0].value is not other.value
    assert [file.read(file.value["a"]) for file in files] == [
        expected(torch.zeros(3)),
        expected(torch.ones(3)),
    ]


def test_an_equal_pickle_under_another_checksum_is_damaged(tmp_path: Path) -> None:
    """Although it is compared with the one before, whose CRC-32 was right."""
    parsed = Parsed()
    first = save(tmp_path / "a.pt", {"a": torch.ones(3)})
    second = tmp_path / "b.pt"
    with zipfile.ZipFile(first) as file:
        entry = file.getinfo("a/data.pkl")
    stated = entry.CRC.to_bytes(4, "little")
    data = Path(first).read_bytes()
    second.write_bytes(data.replace(stated, (entry.CRC ^ 1).to_bytes(4, "little")))
    TorchFile(first, parsed)
    with pytest.raises(CorruptCheckpoint, match=r"data\.pkl is damaged"):
        TorchFile(str(second), parsed)


def test_a_file_that_formats_looked_at_is_parsed_once(tmp_path: Path, parses: list[str]) -> None:
    path = save(tmp_path / "a.pt", {"a": torch.ones(3)})
    value = peek(path)
    assert peek(path) is value
    assert TorchFile(path).value is value
    assert parses == [path]
    assert TorchFile(path).value is not value  # nothing was kept
    assert parses == [path] * 2


def test_a_changed_file_is_parsed_again(tmp_path: Path, parses: list[str]) -> None:
    """Even if its size and its time are those of the first one."""
    path = save(tmp_path / "a.pt", {"a": 1})
    stat = os.stat(path)
    peek(path)
    with open(path, "r+b") as file:
        file.write(Path(save(tmp_path / "b.pt", {"a": 2})).read_bytes().replace(b"b/", b"a/"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (os.stat(path).st_size, os.stat(path).st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert (peek(path), TorchFile(path).value) == ({"a": 2}, {"a": 2})
    assert len(parses) == 2


def test_only_one_pickle_is_kept(tmp_path: Path, parses: list[str]) -> None:
    paths = [save(tmp_path / f"{name}.pt", {name: 1}) for name in "ab"]
    values = [peek(path) for path in paths]
    assert TorchFile(paths[0]).value is not values[0]
    assert TorchFile(paths[1]).value is values[1]
    assert len(parses) == 3


# -- zips of these tests


def zipped(members: list[tuple[str, bytes]], **options: Any) -> bytes:
    """A zip as torch writes it, but of any members; a later option changes one of its fields."""
    body, directory, count = bytearray(), bytearray(), 0
    for name, data in members:
        count += 1
        header, crc = len(body), zlib.crc32(data)
        text = name.encode()
        field = options.get(name, {})
        offset = field.get("offset", header)
        length = field.get("length", len(data))
        packed = field.get("packed", length)
        extra = b""
        if field.get("zip64"):
            extra = struct.pack("<HHQQQ", 1, 24, length, packed, offset)
            length = packed = offset = 0xFFFFFFFF
        method, flags = field.get("method", 0), field.get("flags", 0)
        sizes = struct.pack("<III", field.get("crc", crc), packed & 0xFFFFFFFF, length & 0xFFFFFFFF)
        body += b"PK\3\4" + struct.pack("<HHHHH", 20, flags, method, 0, 0) + sizes
        body += struct.pack("<HH", len(text) + field.get("shift", 0), 0) + text + data
        directory += b"PK\1\2" + struct.pack("<HHHHHH", 20, 20, flags, method, 0, 0) + sizes
        directory += struct.pack("<HHHHHII", len(text), len(extra), 0, 0, 0, 0, offset & 0xFFFFFFFF)
        directory += text + extra
    start, length = len(body), len(directory)
    end = {"count": count, "length": length, "start": start, "place": start + length} | options
    whole = bytes(body + directory)
    if options.get("zip64", True):
        whole += b"PK\6\6" + struct.pack("<QHHII", 44, 45, 45, 0, 0)
        whole += struct.pack("<QQQQ", count, end["count"], end["length"], end["start"])
        whole += b"PK\6\7" + struct.pack("<IQI", 0, end["place"], 1)
    small = [end[key] & most for key, most in (("length", 0xFFFFFFFF), ("start", 0xFFFFFFFF))]
    return whole + b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, count, count & 0xFFFF, *small, 0)


class Storages(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.identity if isinstance(value, Identity) else None


class Identity:
    """Stands for a storage of `numel` elements in a pickle of these tests."""

    def __init__(
        self, numel: int = 6, key: Any = "0", kind: Any = "storage", view: Any = ()
    ) -> None:
        self.identity = (kind, torch.FloatStorage, key, "cpu", numel, *view)


class Call:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> Any:
        return self.reduced


def rebuilt(offset: Any = 0, shape: Any = (2, 3), strides: Any = (3, 1), **identity: Any) -> bytes:
    text = io.BytesIO()
    Storages(text, 2).dump(
        Call(
            torch._utils._rebuild_tensor_v2,
            Identity(**identity),
            offset,
            shape,
            strides,
            False,
            OrderedDict(),
        )
    )
    return text.getvalue()


DATA = struct.pack("<6f", *range(6))


def archive(path: Path, text: bytes | None = None, data: bytes = DATA, **options: Any) -> str:
    pickled = rebuilt() if text is None else text
    members = [("a/data.pkl", pickled), ("a/byteorder", b"little"), ("a/data/0", data)]
    members.append(("a/version", b"3\n"))
    path.write_bytes(zipped(members + options.pop("more", []), **options))
    return str(path)


def everything(path: str) -> bytes:
    """The bytes of the tensor that is the file's value."""
    file = TorchFile(path)
    if not isinstance(file.value, Tensor):
        raise CorruptCheckpoint("file-damaged", "another value")
    return gathered(file, file.value)


@pytest.mark.parametrize("zip64", [True, False])
def test_zips_made_here_are_as_those_of_torch(tmp_path: Path, zip64: bool) -> None:
    path = archive(tmp_path / "a.pt", zip64=zip64)
    assert everything(path) == DATA
    assert expected(torch.load(path)) == DATA


def test_sizes_of_64_bits(tmp_path: Path) -> None:
    path = archive(
        tmp_path / "a.pt", **{"a/data/0": {"zip64": True}, "a/data.pkl": {"zip64": True}}
    )
    assert everything(path) == DATA
    assert expected(torch.load(path)) == DATA


HUGE = (2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)
CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "compressed": {"a/data/0": {"method": 8}},
    "packed": {"a/data/0": {"packed": 7}},
    "encrypted": {"a/data/0": {"flags": 1}},
    "overlap": {"a/data/0": {"offset": 0}},
    "overlap by a byte": {"more": [("a/data/1", b"x" * 64)], "a/data/0": {"length": 25 + 38}},
    "data in the directory": {"a/data/0": {"shift": 60}},
    "duplicate": {"more": [("a/data/0", b"12345678")]},
    "duplicate pickle": {"more": [("a/data.pkl", b"N.")]},
    "two pickles": {"more": [("b/data.pkl", b"N.")]},
    "no local header": {"a/data/0": {"offset": 1}},
    "length of a member": {"a/data/0": {"length": 10_000}},
    "wrong CRC of the pickle": {"a/data.pkl": {"crc": 1}},
    "too many members": {"count": 5},
    "length of the directory": {"length": 1_000},
    "start of the directory": {"start": 1},
    "end of the directory": {"place": 1},
    "missing zip64 field": {"a/data/0": {"length": 0xFFFFFFFF}},
    **{f"count {huge}": {"count": huge} for huge in HUGE},
    **{f"length {huge}": {"length": huge} for huge in HUGE},
    **{f"start {huge}": {"start": huge} for huge in HUGE},
    **{f"place {huge}": {"place": huge} for huge in HUGE},
    **{f"member at {huge}": {"a/data/0": {"offset": huge, "zip64": True}} for huge in HUGE},
    **{f"member of {huge}": {"a/data/0": {"length": huge, "zip64": True}} for huge in HUGE},
    **{f"pickle of {huge}": {"a/data.pkl": {"length": huge, "zip64": True}} for huge in HUGE},
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_zip_that_contradicts_itself_is_refused(tmp_path: Path, name: str) -> None:
    path = archive(tmp_path / "a.pt", **CONTRADICTIONS[name])
    with pytest.raises((CorruptCheckpoint, UnsupportedCheckpoint), match=r"a\.pt"):
        everything(path)


TENSORS: dict[str, dict[str, Any]] = {
    "past its storage": {"shape": (2, 4), "strides": (4, 1)},
    "past its storage by the offset": {"offset": 1},
    "past its storage by a stride": {"strides": (4, 1)},
    "a negative offset": {"offset": -1},
    "a huge offset": {"offset": 2**70},
    "a negative stride": {"offset": 3, "strides": (-3, 1)},
    "a negative size": {"shape": (-1, 3)},
    "two negative sizes": {"shape": (-2, -3)},
    "a huge size": {"shape": (2**62, 3)},
    "a huge stride": {"strides": (2**62, 1)},
    "sizes and strides of other lengths": {"shape": (2, 3), "strides": (1,)},
    "a size that is text": {"shape": ("2", 3)},
    "a size that is a fraction": {"shape": (2.0, 3)},
    "a size that is nothing": {"shape": (None, 3)},
    "a size that is a list": {"shape": ([2], 3)},
    "sizes that are text": {"shape": "23"},
    "sizes that are a number": {"shape": 6, "strides": 1},
    "a stride that is text": {"strides": ("3", 1)},
    "a stride that is a fraction": {"strides": (3.5, 1)},
    "an offset that is text": {"offset": "0"},
    "an offset that is a fraction": {"offset": 0.5},
    "an offset that is nothing": {"offset": None},
    "another storage": {"key": "7"},
    "a storage whose key is a number": {"key": 0},
    "no storage": {"kind": "other"},
    "a view before its storage": {"view": (("1", -6, 6),)},
    "a view past its storage": {"view": (("1", 1, 6),)},
    "a view that is text": {"view": ("xyz",)},
    "a storage of text": {"numel": "x"},
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_that_does_not_fit_is_refused(tmp_path: Path, name: str) -> None:
    path = archive(tmp_path / "a.pt", rebuilt(**TENSORS[name]))
    with pytest.raises((CorruptCheckpoint, UnsupportedCheckpoint), match=r"a\.pt"):
        everything(path)


ATTACKS: dict[str, Callable[[Path], str]] = {
    "a tensor as a key, of a deep shape": lambda path: archive(
        path,
        b"\x80\x02}"
        + rebuilt(shape=(7,), strides=(1,))[2:-1].replace(b"K\x07\x85", b"N" + b"\x85" * 200_000)
        + b"Ns.",
    ),
    "an expanded tensor of 2**60 elements": lambda path: archive(
        path, rebuilt(shape=(2**30, 2**30), strides=(0, 0))
    ),
    "every other element of 2**40": lambda path: archive(
        path, rebuilt(shape=(2**40, 2), strides=(0, 2))
    ),
    "dimensions without end": lambda path: archive(
        path, rebuilt(shape=(1,) * 100_000, strides=(1,) * 100_000)
    ),
    "a list of tensors with a long shape": lambda path: archive(
        path,
        b"\x80\x02(" + rebuilt(shape=(1,) * 10_000, strides=(1,) * 10_000)[2:-1] + b"q\xff0"
        b"ctorch._utils\n_rebuild_tensor_v2\nq\xfe("
        b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000X\3\0\0\0cpuK\6tQK\0("
        + b"K\1" * 10_000
        + b"tq\xfdh\xfdtq\xfc0"
        + b"h\xfeh\xfcR" * 10_000
        + b"l.",
    ),
}
LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (10, 10))
from itertools import islice
from zckpt.errors import ZckptError
from zckpt.files.torchfile import Tensor, TorchFile
try:
    file = TorchFile(sys.argv[1])
    if isinstance(file.value, Tensor):
        for fragment in islice(file.fragments(file.value), 1000):
            assert 0 <= fragment.extent.offset < file.size
except ZckptError as error:
    print("refused" if sys.argv[1] in error.message else error.message)
"""


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_costs_little_memory(tmp_path: Path, name: str) -> None:
    path = ATTACKS[name](tmp_path / "a.pt")
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, path], capture_output=True, timeout=60, text=True
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-400:]}"
    assert done.stdout.strip() in ("", "refused")


# -- damage


def small(path: Path, legacy: bool) -> tuple[str, bytes]:
    value = {"w": torch.arange(6.0).view(2, 3), "s": torch.tensor(3), "t": (1, "x", None)}
    file = save(path, value, legacy)
    return file, Path(file).read_bytes()


def summary(path: str) -> Any:
    file = TorchFile(path)
    value = file.value
    return (
        value["t"],
        [(value[key].dtype, value[key].shape, gathered(file, value[key])) for key in "ws"],
        file.scalar(value["s"]),
    )


def attempt(path: str) -> tuple[Any, str | None]:
    """The values of `summary`, or the message of its error."""
    try:
        return summary(path), None
    except ZckptError as error:
        return None, error.message


@both
def test_a_truncated_file_is_refused(tmp_path: Path, legacy: bool) -> None:
    path, whole = small(tmp_path / "a.pt", legacy)
    summary(path)
    for length in {*range(0, len(whole), 25), len(whole) - 1}:
        Path(path).write_bytes(whole[:length])
        with pytest.raises(ZckptError, match=r"a\.pt"):
            summary(path)


def flipped(path: str, whole: bytes, places: range) -> Iterator[int]:
    for place in places:
        for bit in range(8):
            changed = bytearray(whole)
            changed[place] ^= 1 << bit
            with open(path, "r+b") as file:
                os.pwrite(file.fileno(), changed, 0)
            yield place


def test_a_flipped_bit_is_refused_or_means_nothing(tmp_path: Path) -> None:
    """For every bit of the pickle and of the directory."""
    path, whole = small(tmp_path / "a.pt", False)
    right = summary(path)
    with zipfile.ZipFile(path) as file:
        start = file.start_dir
        pickled = file.getinfo("a/data.pkl")
    begin = whole.index(b"\x80\x02")
    refused = 0
    for places in (range(begin, begin + pickled.file_size), range(start, len(whole))):
        for place in flipped(path, whole, places):
            values, refusal = attempt(path)
            assert values == right or (refusal and "a.pt" in refusal), f"byte {place}"
            assert refusal or place >= start, "a flipped bit of the pickle"
            refused += bool(refusal)
    assert refused > 8 * pickled.file_size


def test_a_flipped_bit_of_a_small_tensor_is_refused(tmp_path: Path) -> None:
    """`read` and `scalar` read a step, for example: no later copy checks its record."""
    path, whole = small(tmp_path / "a.pt", False)
    file = TorchFile(path)
    start = file.extent(file.value["s"]).offset
    for _ in flipped(path, whole, range(start, start + 8)):
        with pytest.raises(CorruptCheckpoint, match=r"a\.pt"):
            TorchFile(path).scalar(file.value["s"])


def test_a_flipped_bit_of_a_local_header_is_found_or_means_nothing(tmp_path: Path) -> None:
    path, whole = small(tmp_path / "a.pt", False)
    right = summary(path)
    headers = [match.start() for match in re.finditer(b"PK\3\4", whole)]
    assert len(headers) > 3
    for header in headers:
        for place in flipped(path, whole, range(header, header + 30)):
            values, refusal = attempt(path)
            harmless = values == right or (refusal and "a.pt" in refusal)
            assert harmless or not checked(path), f"byte {place - header}"


def checked(path: str) -> bool:
    """Whether every record has the CRC-32 that the directory states."""
    for record in TorchFile(path).records.values():
        with open(path, "rb") as file:
            data = os.pread(file.fileno(), record.extent.length, record.extent.offset)
        if zlib.crc32(data) != record.crc:
            return False
    return True


def test_a_flipped_bit_of_a_legacy_file_ends_in_our_errors(tmp_path: Path) -> None:
    """This container has no checksums: a flip may change the value, nothing worse."""
    path, whole = small(tmp_path / "a.pt", True)
    for place in flipped(path, whole, range(len(whole))):
        try:
            refusal = attempt(path)[1]
        except (KeyError, AttributeError, TypeError) as error:
            # another value than the one that was saved: `summary` finds no tensor in it
            inside = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
            refusal = None if inside[-1] == __file__ else repr(error)
        assert refusal is None or "a.pt" in refusal, f"byte {place}"


OTHER_FILES = {
    "empty": (b"", CorruptCheckpoint),
    "a byte": (b"P", CorruptCheckpoint),
    "the start of a zip": (b"PK\3\4", CorruptCheckpoint),
    "text": (b"hello, world\n" * 50, CorruptCheckpoint),
    "a plain pickle": (pickle.dumps({"a": 1}, 2), NotACheckpoint),
    "a plain pickle of protocol 4": (pickle.dumps({"a": 1}, 4), NotACheckpoint),
    "a pickle of an object": (pickle.dumps(Call(os.getcwd), 2), NotACheckpoint),
    "the start of a pickle": (b"\x80\x02", CorruptCheckpoint),
    "an empty zip": (b"PK\5\6" + bytes(18), CorruptCheckpoint),
    "a directory of no members": (zipped([]), CorruptCheckpoint),
    "another zip": (zipped([("a/b", b"1")]), CorruptCheckpoint),
    "a pickle that is not in a folder": (zipped([("data.pkl", b"N.")]), CorruptCheckpoint),
    "a big-endian machine": (
        zipped([("a/data.pkl", b"N."), ("a/byteorder", b"big")]),
        UnsupportedCheckpoint,
    ),
    "a big-endian machine, legacy": (
        MAGIC + pickle.dumps({"little_endian": False}, 2) + b"N.]." + bytes(8),
        UnsupportedCheckpoint,
    ),
    "an old protocol": (
        pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1000, 2),
        UnsupportedCheckpoint,
    ),
    **{
        f"legacy with keys {name}": (MAGIC + pickle.dumps({}, 2) + b"N." + keys, CorruptCheckpoint)
        for name, keys in {
            "None": b"N.",
            "a number": b"K\x05.",
            "a list of lists": b"](]e.",
            "unused": b"](X\x01\0\0\x000e." + bytes(8),
            "missing": b"",
        }.items()
    },
    **{
        f"legacy with {numel} elements": (
            MAGIC
            + pickle.dumps({"little_endian": True}, 2)
            + rebuilt()
            + b"](X\x01\0\0\x000e."
            + struct.pack("<q", numel)
            + DATA,
            CorruptCheckpoint,
        )
        for numel in (-1, 5, 7, 2**62, 2**63 - 1, -(2**63))
    },
}


@pytest.mark.parametrize("name", OTHER_FILES)
def test_other_files_are_refused(tmp_path: Path, name: str) -> None:
    data, error = OTHER_FILES[name]
    path = tmp_path / "a.pt"
    path.write_bytes(data)
    with pytest.raises(error, match=r"a\.pt"):
        everything(str(path))
