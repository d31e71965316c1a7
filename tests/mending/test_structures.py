"""A flipped bit of what files say of their contents: restored if it is told exactly, else named."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

import zckpt as package
from zckpt.errors import ZckptError
from zckpt.formats.universal.flipped import flipped
from zckpt.mending.containers import members_of
from zckpt.mending.zips import flipped_in

from ..conftest import EXAMPLE, ROOT
from .damaging import contents, flip

DATA = ROOT / "tests" / "data"
MODEL = "global_step7/mp_rank_00_model_states.pt"
FILES = {
    "torch": EXAMPLE / MODEL,
    "empty-storages": DATA
    / "deepspeed-0.11.0-z3_dp2_sub_groups/run/global_step3"
    / "zero_pp_rank_1_mp_rank_00_model_states.pt",
    "items": DATA / "torch_checkpointing-0.1.1-w2/items/model_1.pt",
    "zckpt": None,
}


def file_of(name: str, tmp_path: Path) -> Path:
    """A copy of a genuine file, or one of zckpt."""
    path, source = tmp_path / "file.pt", FILES[name]
    if source is None:
        package.convert(EXAMPLE, tmp_path / "universal")
        package.convert(tmp_path / "universal", tmp_path / "run", to="deepspeed", stage=2, dp=2)
        (source,) = (tmp_path / "run").rglob("mp_rank_00_model_states.pt")
    return Path(shutil.copyfile(source, path))


def is_read(path: Path) -> bool:
    try:
        return bool([*members_of(str(path))])
    except ZckptError:
        return False


def flips(path: Path, tries: int, seed: int) -> Counter[str]:
    """Flips bits of a zip outside of its data; a correction never gives other bytes."""
    whole, chosen, counts = path.read_bytes(), random.Random(seed), Counter[str]()
    data = {
        place
        for member in members_of(str(path))
        for place in range(member.header + 30 + len(member.name), member.offset + member.length)
    }
    places = [place for place in range(len(whole)) if place not in data]
    for _ in range(tries):
        place, bit = chosen.choice(places), chosen.randrange(8)
        flip(path, place, bit)
        corrections = flipped_in(str(path))
        for correction in corrections:
            assert correction.offset == place
            assert correction.after == whole[place : place + 1]
        counts["told" if corrections else "unread" if is_read(path) else "refused"] += 1
        flip(path, place, bit)
    return counts


@pytest.mark.parametrize("name", ["torch", "zckpt"])
def test_a_zip(name: str, tmp_path: Path) -> None:
    counts = flips(file_of(name, tmp_path), 20, seed=1)
    assert counts["told"] > 10
    assert not counts["refused"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FILES)
def test_many_flips_of_a_zip(name: str, tmp_path: Path) -> None:
    counts = flips(file_of(name, tmp_path), 300, seed=2)
    print(f"{name}: {dict(counts)}")
    assert not counts["refused"]


def test_two_flips_of_a_zip_are_not_told(tmp_path: Path) -> None:
    path = file_of("torch", tmp_path)
    first, *_, last = members_of(str(path))
    flip(path, first.entry + 46, 1)
    flip(path, last.entry + 46, 1)
    assert flipped_in(str(path)) == []


@pytest.mark.parametrize("is_local", [True, False])
def test_a_name(is_local: bool, tmp_path: Path) -> None:
    """Two names contradict each other: torch numbers storages, so that one of both is right."""
    source = shutil.copytree(EXAMPLE, tmp_path / "source")
    member = next(each for each in members_of(str(source / MODEL)) if each.name.endswith("data/3"))
    last = (member.header + 30 if is_local else member.entry + 46) + len(member.name) - 1
    flip(source / MODEL, last, 2)  # data/7, which is there as well
    (place,) = package.mend(source, tmp_path / "mended")["places"]
    assert contents(tmp_path / "mended") == contents(EXAMPLE)
    assert (place["by"], place["witness"]) == ("witness", "the same fact elsewhere in the zip")
    assert (place["offset"], place["bit"]) == (last, 2)


@pytest.fixture
def universal(tmp_path: Path) -> Path:
    package.convert(EXAMPLE, tmp_path / "universal")
    return tmp_path / "universal"


def test_a_header_of_safetensors(universal: Path, tmp_path: Path) -> None:
    """manifest.json has the CRC-32 of the file; the padding of the header is no lost sector."""
    whole = contents(universal)
    for place in (0, 60, 3000):
        flip(universal / "master.safetensors", place, 1)
        (line,) = package.mend(universal, tmp_path / "mended")["places"]
        assert contents(tmp_path / "mended") == whole
        assert (line["offset"], line["state"]) == (place, "restored")
        shutil.rmtree(tmp_path / "mended")
        flip(universal / "master.safetensors", place, 1)


def test_a_header_without_a_manifest(universal: Path, tmp_path: Path) -> None:
    (source := tmp_path / "source").mkdir()
    shutil.copy(universal / "model.safetensors", source)
    flip(source / "model.safetensors", 60, 1)
    with pytest.raises(ZckptError, match="header is malformed"):
        package.mend(source, tmp_path / "mended")
    assert not (tmp_path / "mended").exists()


@pytest.mark.parametrize(
    "text",
    [
        b'"step": 7',  # a value
        b'"shape": [',  # a key that others have
        b'"optimizer": "',  # a key that occurs once
        b'": {"dtype"',  # no JSON any more
    ],
)
def test_a_manifest(text: bytes, universal: Path, tmp_path: Path) -> None:
    path, whole = universal / "manifest.json", contents(universal)
    data = path.read_bytes()
    start = data.rindex(text)
    for place, bit in ((start, 0), (start + len(text) - 1, 0), (start + 2, 1)):
        flip(path, place, bit)
        assert flipped(path.read_bytes()) == [(place, bit)]
        flip(path, place, bit)
    flip(path, start + 2, 1)
    (line,) = package.mend(universal, tmp_path / "mended")["places"]
    assert contents(tmp_path / "mended") == whole
    assert (line["file"], line["offset"]) == (str(path), start + 2)


def test_the_checksum_of_a_manifest(universal: Path, tmp_path: Path) -> None:
    path, whole = universal / "manifest.json", contents(universal)
    place = path.read_bytes().rindex(b'"crc32": "') + 12
    flip(path, place, 0)
    assert flipped(path.read_bytes()) == [(place, 0)]
    package.mend(universal, tmp_path / "mended")
    assert contents(tmp_path / "mended") == whole
    assert package.verify(tmp_path / "mended")["equal"]


def test_two_flips_of_a_manifest(universal: Path, tmp_path: Path) -> None:
    path = universal / "manifest.json"
    flip(path, path.read_bytes().index(b"shape"), 0)
    flip(path, path.read_bytes().index(b"dtype"), 0)
    with pytest.raises(ZckptError, match=r"manifest\.json"):
        package.mend(universal, tmp_path / "mended")
    assert not (tmp_path / "mended").exists()


def test_metadata(tmp_path: Path) -> None:
    """zckpt writes a CRC-32 behind it; torch does not, and then it is refused by name."""
    package.convert(EXAMPLE, tmp_path / "dcp", to="dcp")
    whole = contents(tmp_path / "dcp")
    for place in (0, 700):
        flip(tmp_path / "dcp" / ".metadata", place, 5)
        (line,) = package.mend(tmp_path / "dcp", tmp_path / "mended")["places"]
        assert contents(tmp_path / "mended") == whole
        assert (line["offset"], line["bit"]) == (place, 5)
        shutil.rmtree(tmp_path / "mended")
        flip(tmp_path / "dcp" / ".metadata", place, 5)
    source = shutil.copytree(DATA / "fsdp2-2.13.0-w2", tmp_path / "source")
    flip(source / ".metadata", 0, 5)
    with pytest.raises(ZckptError, match=r"\.metadata"):
        package.mend(source, tmp_path / "mended")
    assert not (tmp_path / "mended").exists()


@pytest.mark.exhaustive
def test_many_flips_of_a_manifest(universal: Path) -> None:
    text, chosen, counts = (universal / "manifest.json").read_bytes(), random.Random(3), Counter()
    for _ in range(300):
        place, bit = chosen.randrange(len(text)), chosen.randrange(8)
        changed = bytearray(text)
        changed[place] ^= 1 << bit
        found = flipped(bytes(changed))
        for byte, each in found:
            again = bytearray(changed)
            again[byte] ^= 1 << each
            assert json.loads(bytes(again)) == json.loads(text)
        counts[len(found)] += 1
    print(dict(counts))
    assert counts[1] > 200
