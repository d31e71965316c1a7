"""Directories of one form are parsed once, and each is checked as if it were the only one."""

from __future__ import annotations

import os
import random
import struct
import zlib
from pathlib import Path

import pytest

from tests.safety.targets import zip_of
from zckpt.core.fragments import Extent
from zckpt.errors import CorruptCheckpoint, ZckptError
from zckpt.files import zipdirectory
from zckpt.files.zipdirectory import Directories, ZipMember, read_directory


def of_rank(rank: int, pickle: bytes = b"N.", folder: str = "a") -> bytes:
    """A file of one rank: empty storages, as ZeRO-3 leaves them, and two with bytes."""
    empty = {f"data/{key}": b"" for key in range(40)}
    data = {"data/40": bytes([rank]) * 8, "data/41": bytes([rank]) * 400}
    inside = {"data.pkl": pickle, **empty, **data, "byteorder": b"little"}
    return zip_of({f"{folder}/{name}": data for name, data in inside.items()})


def members(directories: Directories, path: Path, text: bytes) -> dict[str, ZipMember]:
    path.write_bytes(text)
    file = os.open(path, os.O_RDONLY)
    try:
        return directories.members(file, Extent(str(path), 0, len(text)))
    finally:
        os.close(file)


def outcome(directories: Directories, path: Path, text: bytes) -> object:
    """The members, or the class of the error."""
    try:
        return members(directories, path, text)
    except ZckptError as error:
        return type(error)


def after(first: bytes, path: Path) -> Directories:
    directories = Directories()
    members(directories, path, first)
    return directories


@pytest.mark.parametrize("folders", [("a", "a"), ("zero_rank_1_states", "zero_rank_2_states")])
@pytest.mark.parametrize("pickle", [b"N.", b"X" * 200, b"Y" * 2], ids=["same", "shifted", "other"])
def test_the_second_rank_is_not_parsed(
    pickle: bytes, folders: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch calls the folder in a zip after its file, so that each rank has another one."""
    second = of_rank(2, pickle, folders[1])
    alone = members(Directories(), tmp_path / "file", second)
    directories = after(of_rank(1, folder=folders[0]), tmp_path / "file")

    def parse(*_: object) -> None:
        pytest.fail("parsed again")

    monkeypatch.setattr(zipdirectory, "_listing", parse)
    assert members(directories, tmp_path / "file", second) == alone
    lengths = [alone[f"{folders[1]}/data/{key}"].length for key in (40, 41)]
    assert lengths == [8, 400]


def directory_of(text: bytes) -> range:
    """The offsets of the directory's bytes."""
    end = text.rindex(b"PK\5\6")
    start = int.from_bytes(text[end + 16 : end + 20], "little")
    return range(start, end + 22)


@pytest.mark.parametrize("folder", ["a", "b"])
@pytest.mark.parametrize("bits", [0xFF, 1])
def test_a_damaged_directory_is_judged_as_if_it_were_alone(
    bits: int, folder: str, tmp_path: Path
) -> None:
    first, second = of_rank(1), of_rank(2, folder=folder)
    refused = 0
    for place in directory_of(second)[::3]:
        damaged = bytearray(second)
        damaged[place] ^= bits
        alone = outcome(Directories(), tmp_path / "file", bytes(damaged))
        assert outcome(after(first, tmp_path / "file"), tmp_path / "file", bytes(damaged)) == alone
        refused += isinstance(alone, type)
    assert refused > 300


def renamed(text: bytes, name: bytes, other: bytes) -> bytes:
    assert len(name) == len(other)
    return text.replace(name, other)


@pytest.mark.parametrize(
    "name", [b"r2/data/7", b"r1/data7/", b"r3/data/7", b"r2data//7", b"\xff\xfe\xfedata/7"]
)
def test_two_names_do_not_become_one(name: bytes, tmp_path: Path) -> None:
    """A member that is not where the others are, or in the folder of another rank."""
    first = renamed(of_rank(1, folder="r1"), b"r1/data/7", name)
    second = renamed(of_rank(2, folder="r2"), b"r2/data/7", name)
    twice = renamed(first, b"r1/data/3", name)
    path = tmp_path / "file"
    for before in (first, of_rank(1, folder="r1"), of_rank(2, folder="r2")):
        for text in (second, twice, first):
            alone = outcome(Directories(), path, text)
            assert outcome(after(before, path), path, text) == alone
    assert outcome(Directories(), path, renamed(first, b"r1/data/8", name)) is CorruptCheckpoint


def test_a_member_in_a_folder_of_its_own(tmp_path: Path) -> None:
    """Both names of the second file are the same; those of the first one are not."""
    path = tmp_path / "file"
    first = zip_of({"a/x": b"1", "a/+": b"2", "+a/": b""}).replace(b"+", b"\xfe")
    second = zip_of({"b/x": b"1", "b/+": b"2", "c/+": b""}).replace(b"+", b"\xfe")
    twice = second.replace(b"c/\xfe", b"b/\xfe")
    assert outcome(Directories(), path, twice) is CorruptCheckpoint
    assert outcome(after(first, path), path, twice) is CorruptCheckpoint
    assert outcome(after(second, path), path, twice) is CorruptCheckpoint


def test_names_that_are_one_once_they_are_text(tmp_path: Path) -> None:
    """In the second file, the byte before the members' own names begins a character."""
    path = tmp_path / "file"
    first = zip_of({"aa/": b"1", "aa/+": b"2"}).replace(b"+", b"\x82")
    second = first.replace(b"aa/", b"aa\xe2")
    assert len(members(Directories(), path, first)) == 2
    assert outcome(Directories(), path, second) is CorruptCheckpoint
    assert outcome(after(first, path), path, second) is CorruptCheckpoint


def test_members_in_the_order_of_their_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As older releases of torch write them: data/0, data/1, data/10, data/100, data/101..."""
    path = tmp_path / "file"
    names = sorted(f"data/{key}" for key in range(2000))
    first, second = (
        zip_of({f"rank_{rank}/{name}": b"" for name in ("data.pkl", *names)}) for rank in (1, 2)
    )
    directories = after(first, path)
    monkeypatch.setattr(zipdirectory, "_listing", lambda *_: pytest.fail("parsed again"))
    assert members(directories, path, second) == {}


def test_folders_with_nothing_in_common(tmp_path: Path) -> None:
    """To change every letter would take longer than to parse the directory."""
    path, parsed = tmp_path / "file", []
    first, second = (
        zip_of({f"{letter * 60}/{'x' * key}": b"1" for key in range(1, 50)}) for letter in "ab"
    )
    directories = after(first, path)
    alone = members(Directories(), path, second)
    original = zipdirectory._listing
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zipdirectory, "_listing", lambda *given: parsed.append(1) or original(*given))
        assert members(directories, path, second) == alone
    assert parsed == [1]


def test_numbers_that_look_like_a_folder(tmp_path: Path) -> None:
    """The CRC-32 of a member has the bytes of the folder's name."""
    path, crc = tmp_path / "file", bytes.fromhex("622f622f")
    first, second = (zip_of({f"{folder}/x": b"1", f"{folder}/y": b"2"}) for folder in ("a", "b"))
    stated = zlib.crc32(b"2").to_bytes(4, "little")
    changed = second.replace(stated, crc)
    assert changed.count(crc) >= 1
    for text in (changed, second):
        alone = outcome(Directories(), path, text)
        assert outcome(after(first, path), path, text) == alone
    assert members(after(first, path), path, changed)["b/y"].crc == int.from_bytes(crc, "little")


def moved(text: bytes, name: bytes, offset: int) -> bytes:
    """A zip whose directory states another offset for the header of a member."""
    place = text.rindex(name) - 4
    return text[:place] + offset.to_bytes(4, "little") + text[place + 4 :]


def test_an_offset_into_another_member_is_refused(tmp_path: Path) -> None:
    first, second = of_rank(1), of_rank(2)
    header = members(Directories(), tmp_path / "file", second)["a/data/40"].header
    damaged = moved(second, b"a/data/3", header + 1)
    with pytest.raises(CorruptCheckpoint, match="overlap"):
        members(after(first, tmp_path / "file"), tmp_path / "file", damaged)
    # the check that was passed last is not taken for this one
    directories = after(first, tmp_path / "file")
    members(directories, tmp_path / "file", second)
    for _ in range(2):
        with pytest.raises(CorruptCheckpoint, match="overlap"):
            members(directories, tmp_path / "file", damaged)


def test_another_count_is_another_form(tmp_path: Path) -> None:
    second = bytearray(of_rank(2))
    end = second.rindex(b"PK\5\6")
    second[end + 8 : end + 12] = (20).to_bytes(2, "little") * 2
    directories = after(of_rank(1), tmp_path / "file")
    assert "a/data/40" not in members(directories, tmp_path / "file", bytes(second))


def test_members_in_any_order(tmp_path: Path) -> None:
    path, text = tmp_path / "file", of_rank(1)
    start = directory_of(text)[0]
    end = text.rindex(b"PK\5\6")
    parts = text[start:end].split(b"PK\1\2")[1:]
    random.Random(0).shuffle(parts)
    shuffled = text[:start] + b"".join(b"PK\1\2" + part for part in parts) + text[end:]
    assert (
        members(Directories(), path, shuffled).keys() == members(Directories(), path, text).keys()
    )


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
