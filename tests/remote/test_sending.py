"""A target is in a store whole or not at all, and its last file is the last one to arrive."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import zckpt
from tests.conftest import EXAMPLE
from zckpt import display
from zckpt.errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    NotACheckpoint,
    StoreError,
    TargetExists,
    WrongOption,
)
from zckpt.remote import outgoing
from zckpt.remote.mirror import UNFINISHED
from zckpt.remote.remains import clean_up
from zckpt.remote.stores import etag_of, part_size

from .memory import Memory

KEY = "out/universal"
NOTE = f"{KEY}/{UNFINISHED}"


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A TMPDIR of its own: what is left there shows."""
    (folder := tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.fixture
def store() -> Memory:
    return Memory()


def written(store: Memory, **words: Any) -> dict[str, Any]:
    return zckpt.convert(EXAMPLE, zckpt.At(store, KEY), **words)


def files(store: Memory) -> dict[str, bytes]:
    return {key.removeprefix(f"{KEY}/"): data for key, data in store.objects.items()}


@pytest.fixture
def own(tmp_path: Path) -> dict[str, bytes]:
    """The same target in a folder."""
    zckpt.convert(EXAMPLE, tmp_path / "own")
    return {path.name: path.read_bytes() for path in (tmp_path / "own").iterdir()}


def without_mark(found: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in found.items() if not name.startswith(".zckpt")}


def fail_at(store: Memory, name: str, error: Exception) -> None:
    def arrive(key: str, data: bytes) -> bytes:
        if key.endswith(name):
            raise error
        return data

    store.arrive = arrive


def test_the_target_is_that_of_a_folder(
    store: Memory, own: dict[str, bytes], scratch: Path
) -> None:
    report = written(store)
    assert files(store) == own
    assert report["target"] == f"store://Memory/{KEY}"
    assert report["sent"] == report["read_back"] == len(own)
    assert [path for path in scratch.iterdir() if path.name.startswith("zckpt-to")] == []


def test_the_manifest_is_the_last_file(store: Memory) -> None:
    written(store)
    assert store.put[0] == NOTE
    assert store.put[-1] == f"{KEY}/manifest.json"


def test_order_of_files_of_a_run() -> None:
    names = [
        "latest",
        "global_step7/mp_rank_00_model_states.pt",
        "global_step7/zero_0.pt",
        "x.json",
    ]
    assert sorted(names, key=outgoing.order) == [
        "global_step7/zero_0.pt",
        "x.json",
        "global_step7/mp_rank_00_model_states.pt",
        "latest",
    ]


def test_what_is_there_is_not_replaced(store: Memory) -> None:
    store.write(f"{KEY}/something", b"of others")
    with pytest.raises(TargetExists, match=f"^store://Memory/{KEY} exists$"):
        written(store)
    assert files(store) == {"something": b"of others"}


@pytest.mark.parametrize("name", ["model.safetensors", "exp_avg.safetensors", "manifest.json"])
def test_a_run_that_fails_is_continued(
    name: str, store: Memory, own: dict[str, bytes], tmp_path: Path
) -> None:
    fail_at(store, name, ConnectionError("reset"))
    with pytest.raises(StoreError, match="does not answer"):
        written(store)
    with pytest.raises(IncompleteCheckpoint, match="a target that is not complete"):
        zckpt.read(zckpt.At(store, KEY))
    with pytest.raises(TargetExists, match="a run was stopped there") as raised:
        written(store)
    assert "--resume" in raised.value.hint
    arrived = [key for key in store.put if key != NOTE and key in store.objects]
    store.put.clear()
    store.arrive = lambda key, data: data
    written(store, resume=True)
    assert files(store) == own
    assert {*arrived}.isdisjoint(store.put), "what has arrived is not sent again"


def test_a_run_goes_on_on_another_machine(
    store: Memory, own: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the first run is on this machine: it converts again, and sends the rest."""
    fail_at(store, "manifest.json", ConnectionError("reset"))
    with pytest.raises(StoreError):
        written(store)
    (other := tmp_path / "other").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(other))
    store.put.clear()
    store.arrive = lambda key, data: data
    written(store, resume=True)
    assert files(store) == own
    assert {*store.put} == {NOTE, f"{KEY}/manifest.json"}


def test_a_second_writer_does_not_replace_the_first(store: Memory) -> None:
    def arrive(key: str, data: bytes) -> bytes:
        if key.endswith("model.safetensors"):
            store.write(f"{KEY}/manifest.json", b"of the other")
        return data

    store.arrive = arrive
    with pytest.raises(TargetExists, match="by another program meanwhile"):
        written(store)
    assert store.objects[f"{KEY}/manifest.json"] == b"of the other"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data[:-1], "the store has [0-9]+ bytes of"),
        (lambda data: data[:-1] + b"?", "the store has other bytes"),
    ],
)
def test_what_does_not_arrive_is_noticed(change: Any, said: str, store: Memory) -> None:
    store.arrive = lambda key, data: change(data) if key.endswith("model.safetensors") else data
    with pytest.raises(CorruptCheckpoint, match=f"did not arrive: {said}"):
        written(store)
    assert f"{KEY}/manifest.json" not in store.objects


def test_reading_back_can_be_left_out(store: Memory, own: dict[str, bytes]) -> None:
    report = written(store, read_back=False)
    assert report["read_back"] == 0
    assert [line for line in report["warnings"] if "gives no MD5" in line]
    assert not [key for key, *_ in store.asked if not key.endswith(".json")]


def test_a_dry_run_writes_nothing(store: Memory, scratch: Path) -> None:
    assert written(store, dry_run=True)["dry_run"]
    assert store.objects == {}
    assert [*scratch.glob("zckpt-to*")] == []


def test_a_target_inside_of_its_source_is_refused(store: Memory) -> None:
    for name, data in ((p.name, p.read_bytes()) for p in (EXAMPLE / "global_step7").iterdir()):
        store.write(f"run/global_step7/{name}", data)
    for target, said in (("run", "the source itself"), ("run/new", "is inside of")):
        with pytest.raises(WrongOption, match=said):
            zckpt.convert(zckpt.At(store, "run"), zckpt.At(store, target))


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("https://host/x", "does not write it"),
        ("hf://org/name", "does not write it"),
        ("s3://bucket", "a whole bucket"),
    ],
)
def test_targets_that_are_refused(target: str, said: str) -> None:
    with pytest.raises(WrongOption, match=said):
        zckpt.convert(EXAMPLE, target)


def test_processes_do_not_share_a_target(store: Memory) -> None:
    with pytest.raises(WrongOption, match="several processes share a target in a folder"):
        written(store, sharing=zckpt.Part(1, 2))


def test_remains_are_removed_and_nothing_else(store: Memory) -> None:
    fail_at(store, "manifest.json", ConnectionError("reset"))
    with pytest.raises(StoreError):
        written(store)
    store.write(f"{KEY}/mine.txt", b"of the user")
    at = zckpt.At(store, KEY)
    begun = {*files(store)} - {"mine.txt"}
    assert {*clean_up(at, dry_run=True)["files"]} == begun
    assert {*files(store)} == begun | {"mine.txt"}
    assert {*clean_up(at)["files"]} == begun
    assert files(store) == {"mine.txt": b"of the user"}
    with pytest.raises(NotACheckpoint, match="has no remains"):
        clean_up(at)


@pytest.mark.parametrize(
    ("path", "said"),
    [("s3://bucket", "a whole bucket"), ("out/run", "no URL"), ("ftp://x/y", "no URL")],
)
def test_what_is_no_target_is_not_cleaned_up(path: str, said: str) -> None:
    with pytest.raises(WrongOption, match=said):
        clean_up(path)


def test_a_complete_target_is_never_removed(store: Memory) -> None:
    written(store)
    before = files(store)
    with pytest.raises(WrongOption, match="is complete"):
        clean_up(zckpt.At(store, KEY))
    # a run that was killed after its last file
    about = {"last": "manifest.json", "files": dict.fromkeys(before, 1), "sent": {}}
    store.write(NOTE, json.dumps(about).encode())
    assert clean_up(zckpt.At(store, KEY))["files"] == [UNFINISHED]
    assert files(store) == before


def test_a_run_is_known_by_its_sources_files(tmp_path: Path) -> None:
    """Also if the source is one file: a complete target of another one is not this run's."""
    (one := tmp_path / "one.pt").write_bytes(b"1")
    (two := tmp_path / "two.pt").write_bytes(b"22")

    def mark(source: Path, **words: Any) -> str:
        return outgoing.mark_of("convert", {"source": source, **words}, ["source"])

    assert mark(one) == mark(one, resume=True)
    assert len({mark(one), mark(two), mark(tmp_path), mark(one, dtype="bf16")}) == 4
    two.write_bytes(b"333")
    assert mark(two) != mark(one)


def test_what_was_written_before_is_said_to_be_sent(
    store: Memory, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_at(store, "manifest.json", ConnectionError("reset"))
    with pytest.raises(StoreError):
        written(store)
    store.arrive = lambda key, data: data
    report = written(store, resume=True)
    assert (report["already_complete"], report["sent"]) == (True, 5)
    display.converted(report, quiet=False)
    assert capsys.readouterr().out.endswith("had written what was sent now\n")


def test_parts_of_an_upload() -> None:
    assert part_size(0) == part_size(100 << 20) == 16 << 20
    size = 5 << 40  # S3's limit
    assert -(-size // part_size(size)) <= 10_000
    assert etag_of([b"\1" * 16]) == "01" * 16
    assert etag_of([b"\1" * 16, b"\2" * 16]).endswith("-2")
