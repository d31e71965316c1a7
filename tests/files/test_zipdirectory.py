"""Directories of zips: whole, damaged, and with names that contradict each other."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import pytest

from tests.safety.targets import zip_of
from zckpt.core.storage.fragments import Extent
from zckpt.errors import CorruptCheckpoint, ZckptError
from zckpt.files import zipdirectory
from zckpt.files.zipdirectory import Directories, ZipMember, read_directory


def of_rank(rank: int, pickle: bytes = b"N.", folder: str = "a") -> bytes:
    """A file of one rank: empty storages, as ZeRO-3 leaves them, and two with bytes."""
    empty = {f"data/{key}": b"" for key in range(40)}
    data = {"data/40": bytes([rank]) * 8, "data/41": bytes([rank]) * 400}
    inside = {"data.pkl": pickle, **empty, **data, "byteorder": b"little"}
    return zip_of({f"{folder}/{name}": data for name, data in inside.items()})


def members(path: Path, text: bytes, known: Directories | None = None) -> dict[str, ZipMember]:
    path.write_bytes(text)
    file = os.open(path, os.O_RDONLY)
    try:
        return read_directory(file, Extent(str(path), 0, len(text)), known)
    finally:
        os.close(file)


def outcome(path: Path, text: bytes, known: Directories | None = None) -> object:
    """The members, or the class of the error."""
    try:
        return members(path, text, known)
    except ZckptError as error:
        return type(error)


def directory_of(text: bytes) -> range:
    """The offsets of the directory's bytes."""
    end = text.rindex(b"PK\5\6")
    start = int.from_bytes(text[end + 16 : end + 20], "little")
    return range(start, end + 22)


def test_what_is_known_of_another_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that differs in its folder alone is taken from another rank's; no other is."""
    monkeypatch.setattr(zipdirectory, "MANY", 2)
    known: Directories = {}
    members(tmp_path / "file", of_rank(1, folder="rank1"), known)
    (first,) = known.values()
    text = of_rank(1, folder="rank2")
    monkeypatch.setattr(zipdirectory, "_entries", pytest.fail)
    assert next(iter(members(tmp_path / "file", text, known))) == "rank2/data.pkl"
    monkeypatch.undo()
    monkeypatch.setattr(zipdirectory, "MANY", 2)
    for place in range(0, len(text), 7):
        damaged = bytearray(text)
        damaged[place] ^= 1
        alone = outcome(tmp_path / "file", bytes(damaged))
        assert outcome(tmp_path / "file", bytes(damaged), {**known}) == alone
    assert [*known.values()] == [first]


@pytest.mark.parametrize("bits", [0xFF, 1])
def test_a_damaged_directory(bits: int, tmp_path: Path) -> None:
    """It is refused, or a name, a CRC-32 or a field that nobody needs has changed."""
    text = of_rank(2)
    whole = members(tmp_path / "file", text)
    places = {(item.offset, item.length) for item in whole.values()}
    refused = 0
    for place in directory_of(text)[::3]:
        damaged = bytearray(text)
        damaged[place] ^= bits
        found = outcome(tmp_path / "file", bytes(damaged))
        refused += isinstance(found, type)
        if isinstance(found, dict):
            assert {(item.offset, item.length) for item in found.values()} <= places
    assert refused > 300


def renamed(text: bytes, name: bytes, other: bytes) -> bytes:
    assert len(name) == len(other)
    return text.replace(name, other)


def test_two_members_of_one_name(tmp_path: Path) -> None:
    text = renamed(of_rank(1, folder="r1"), b"r1/data/7", b"r1/data/8")
    assert outcome(tmp_path / "file", text) is CorruptCheckpoint


def test_names_that_are_one_once_they_are_text(tmp_path: Path) -> None:
    """In the second file, the byte before the members' own names begins a character."""
    first = zip_of({"aa/": b"1", "aa/+": b"2"}).replace(b"+", b"\x82")
    assert len(members(tmp_path / "file", first)) == 2
    assert outcome(tmp_path / "file", first.replace(b"aa/", b"aa\xe2")) is CorruptCheckpoint


def moved(text: bytes, name: bytes, offset: int) -> bytes:
    """A zip whose directory states another offset for the header of a member."""
    place = text.rindex(name) - 4
    return text[:place] + offset.to_bytes(4, "little") + text[place + 4 :]


def test_an_offset_into_another_member_is_refused(tmp_path: Path) -> None:
    text = of_rank(2)
    header = members(tmp_path / "file", text)["a/data/40"].header
    with pytest.raises(CorruptCheckpoint, match="overlap"):
        members(tmp_path / "file", moved(text, b"a/data/3", header + 1))


def test_entries_that_are_not_counted(tmp_path: Path) -> None:
    text = bytearray(of_rank(2))
    end = text.rindex(b"PK\5\6")
    text[end + 8 : end + 12] = (20).to_bytes(2, "little") * 2
    assert "a/data/40" not in members(tmp_path / "file", bytes(text))


def test_members_in_any_order(tmp_path: Path) -> None:
    path, text = tmp_path / "file", of_rank(1)
    start = directory_of(text)[0]
    end = text.rindex(b"PK\5\6")
    parts = text[start:end].split(b"PK\1\2")[1:]
    random.Random(0).shuffle(parts)
    shuffled = text[:start] + b"".join(b"PK\1\2" + part for part in parts) + text[end:]
    assert members(path, shuffled).keys() == members(path, text).keys()


def test_one_zip_alone(tmp_path: Path) -> None:
    text = of_rank(1)
    (tmp_path / "file").write_bytes(text)
    with open(tmp_path / "file", "rb") as file:
        listed = read_directory(file.fileno(), Extent(file.name, 0, len(text)))
    assert {text[item.offset : item.offset + item.length] for item in listed.values()} == {
        b"N.",
        b"little",
        b"\1" * 8,
        b"\1" * 400,
    }


def commented(text: bytes, count: int, comment: bytes) -> bytes:
    """A zip with a comment, and with a zip64 record that states so many entries."""
    place = text.rindex(b"PK\5\6")
    end = text[place:-2] + len(comment).to_bytes(2, "little") + comment
    length, start = struct.unpack_from("<II", text, place + 12)
    record = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, length, start)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, place, 1)
    return text[:place] + record + locator + end


@pytest.mark.parametrize("length", [0, 4050, 4054, 4055, 4060, 4074, 4075, 65515, 65535])
def test_the_record_of_zip64_counts_wherever_it_lies(length: int, tmp_path: Path) -> None:
    first = zip_of({"a/x": b"1", "a/y": b"2"})
    for count, known in ((1, ["a/x"]), (99, CorruptCheckpoint)):
        text = commented(first, count, b"c" * length)
        for before in (0, 64):
            path = tmp_path / "file"
            path.write_bytes(bytes(before) + text)
            with open(path, "rb") as file:
                try:
                    listed = read_directory(file.fileno(), Extent(str(path), before, len(text)))
                    assert [*listed] == known
                except CorruptCheckpoint:
                    assert known is CorruptCheckpoint


@pytest.mark.parametrize("comment", [b"", b"a" * 60_000], ids=["bare", "comment"])
def test_a_zip_inside_of_a_larger_file(comment: bytes, tmp_path: Path) -> None:
    """Of an item, only a short end is read at first."""
    text = of_rank(1)
    text = text[:-2] + len(comment).to_bytes(2, "little") + comment
    path = tmp_path / "file"
    path.write_bytes(b"." * 100 + text + b"." * 50)
    with open(path, "rb") as file:
        listed = read_directory(file.fileno(), Extent(str(path), 100, len(text)))
    assert listed["a/data/40"].length == 8
    whole = path.read_bytes()
    assert whole[listed["a/data/40"].offset :].startswith(b"\1" * 8)
