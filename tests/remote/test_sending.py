"""A target is in a store whole or not at all, and its last file is the last one to arrive."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import zckpt
from tests.conftest import EXAMPLE, ROOT
from zckpt import display
from zckpt.dcp import StorageReader
from zckpt.errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    NotACheckpoint,
    StoreError,
    TargetExists,
    UnsupportedCheckpoint,
    WrongOption,
)
from zckpt.remote import upload
from zckpt.remote.cleanup import clean_up
from zckpt.remote.mirror import UNFINISHED
from zckpt.remote.stores import etag_of, part_size

from ..conftest import texts
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
    assert sorted(names, key=upload.order) == [
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
    assert {*arrived}.isdisjoint(store.put), "files that have arrived are not sent again"


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
        (lambda data: data[:-1], "the store has [0-9]+ bytes instead of"),
        (lambda data: data[:-1] + b"?", "the store has other bytes"),
    ],
)
def test_what_does_not_arrive_is_noticed(change: Any, said: str, store: Memory) -> None:
    store.arrive = lambda key, data: change(data) if key.endswith("model.safetensors") else data
    with pytest.raises(CorruptCheckpoint, match=f"did not arrive intact: {said}"):
        written(store)
    assert f"{KEY}/manifest.json" not in store.objects


def test_reading_back_can_be_left_out(store: Memory, own: dict[str, bytes]) -> None:
    report = written(store, read_back=False)
    assert report["read_back"] == 0
    assert [line for line in texts(report["warnings"]) if "states no MD5" in line]
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
        ("https://host/x", "does not write there"),
        ("hf://org/name", "does not write there"),
        ("s3://bucket", "is a bucket"),
    ],
)
def test_targets_that_are_refused(target: str, said: str) -> None:
    with pytest.raises(WrongOption, match=said):
        zckpt.convert(EXAMPLE, target)


def test_processes_do_not_share_a_target(store: Memory) -> None:
    with pytest.raises(WrongOption, match="several processes can share a target on a filesystem"):
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
    with pytest.raises(NotACheckpoint, match="has no files of an unfinished run"):
        clean_up(at)


@pytest.mark.parametrize(
    ("path", "said"),
    [("s3://bucket", "is a bucket"), ("out/run", "no URL"), ("ftp://x/y", "no URL")],
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


NOTES = {
    "no JSON": b'{"files": {"model.safet',
    "a list": b"[1]",
    "nothing": b"",
    "other keys": b'{"zckpt": "0.1.0", "version": 2}',
    "no files": b'{"files": {}, "last": "manifest.json"}',
    "other sizes": b'{"files": {"manifest.json": "1"}, "last": "manifest.json"}',
    "a newer zckpt": b'{"zckpt": "99.1", "files": {"manifest.json": 1}, "last": "manifest.json"}',
    "names outside": b'{"files": {"../mine": 1, "manifest.json": 1}, "last": "manifest.json"}',
    "an absolute name": b'{"files": {"/mine": 1}, "last": "manifest.json"}',
    "a last file outside": b'{"files": {"manifest.json": 1}, "last": "x/../../mine"}',
    "itself": b'{"files": {"zckpt-unfinished.json": 1}, "last": "manifest.json"}',
}


@pytest.mark.parametrize("note", NOTES.values(), ids=NOTES)
def test_a_note_that_cannot_be_understood_means_unfinished(note: bytes, store: Memory) -> None:
    """All doors leave it as it is: to read, to remove what is there, to continue, to write."""
    written(store)
    store.write(NOTE, note)
    store.write("out/mine", b"1")
    before, at = dict(store.objects), zckpt.At(store, KEY)
    for path in (at, zckpt.At(store, f"{KEY}/exp_avg.safetensors")):
        with pytest.raises(IncompleteCheckpoint, match="a target that is not complete"):
            zckpt.read(path)
    with pytest.raises(NotACheckpoint):
        zckpt.read(zckpt.At(store, "out"))
    for call in (clean_up, lambda at: written(store, resume=True)):
        with pytest.raises(UnsupportedCheckpoint, match="this zckpt cannot parse"):
            call(at)
    assert store.objects == before


@pytest.mark.parametrize("change", ["lost", "cut"])
def test_the_last_file_alone_does_not_complete_a_target(change: str, store: Memory) -> None:
    written(store)
    sizes = {name: len(data) for name, data in files(store).items()}
    about = {"last": "manifest.json", "files": sizes, "sent": {}}
    store.write(NOTE, json.dumps(about).encode())
    at, key = zckpt.At(store, KEY), f"{KEY}/exp_avg.safetensors"
    assert zckpt.verify(at)["problems"] == []
    if change == "cut":
        store.write(key, store.objects[key][:-1])
    else:
        del store.objects[key]
        with pytest.raises(TargetExists, match=r"but not .*: nothing was removed"):
            clean_up(at)
    with pytest.raises(IncompleteCheckpoint, match="a target that is not complete"):
        zckpt.read(at)


def test_a_note_far_above_is_seen(store: Memory) -> None:
    """A target of several checkpoints, of which one is read alone."""
    written(store)
    for key in list(store.objects):
        store.write(key.replace(KEY, "to/run/checkpoint-1/universal"), store.objects.pop(key))
    at = zckpt.At(store, "to/run/checkpoint-1/universal")
    store.write(f"to/run/{UNFINISHED}", b'{"files": {"a": 1}, "last": "a"}')
    with pytest.raises(IncompleteCheckpoint) as raised:
        zckpt.read(at)
    assert raised.value.hint.endswith("clean-up store://Memory/to/run")
    store.write("to/run/a", b"1")
    assert zckpt.read(at).step == 7


def test_a_run_that_writes_meanwhile_is_noticed(
    store: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note stays, so that nobody takes the rest for a target."""
    fail_at(store, "manifest.json", ConnectionError("reset"))
    with pytest.raises(StoreError):
        written(store)
    remove = store.rm_file

    def commit(key: str) -> None:
        store.write(f"{KEY}/manifest.json", b"{}")
        remove(key)

    monkeypatch.setattr(store, "rm_file", commit)
    with pytest.raises(TargetExists, match=r"a run has written .*\.json meanwhile"):
        clean_up(zckpt.At(store, KEY))
    assert {*files(store)} == {"manifest.json", UNFINISHED}
    with pytest.raises(IncompleteCheckpoint):
        zckpt.read(zckpt.At(store, KEY))


def test_what_another_program_may_have_sent_stays(store: Memory) -> None:
    """The store says of no object who has sent it: the last file is no proof of a target."""
    store.arrive = lambda key, data: data[::-1] if key.endswith("manifest.json") else data
    with pytest.raises(CorruptCheckpoint, match="the store has other bytes"):
        written(store)
    assert f"{KEY}/manifest.json" in store.objects
    with pytest.raises(IncompleteCheckpoint):
        zckpt.read(zckpt.At(store, KEY))


def local_copy(store: Memory, folder: Path) -> Path:
    """What `aws s3 sync` makes of the objects below the target's key."""
    for name, data in files(store).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("name", ["manifest.json", "latest", ".metadata"])
def test_a_copy_of_an_unfinished_upload(name: str, store: Memory, tmp_path: Path) -> None:
    """On this machine: neither the folder is a checkpoint, nor one in it, nor a file of it."""
    to = {"manifest.json": "universal", "latest": "deepspeed", ".metadata": "dcp"}[name]
    fail_at(store, "/" + name, ConnectionError("reset"))
    with pytest.raises(StoreError):
        written(store, to=to)
    copied = local_copy(store, tmp_path / "copy")
    (tmp_path / "link").symlink_to(copied)
    inside = [path for path in copied.rglob("*") if path.name != UNFINISHED]
    for path in (copied, tmp_path / "link", *inside):
        with pytest.raises(IncompleteCheckpoint, match="a target that is not complete"):
            zckpt.read(path)
    with pytest.raises(IncompleteCheckpoint):
        zckpt.convert(copied, tmp_path / "to")
    with pytest.raises(IncompleteCheckpoint):
        zckpt.auto_resume(copied)


@pytest.mark.parametrize("change", ["none", "lost", "cut", "unreadable"])
def test_a_copy_with_a_note(change: str, store: Memory, tmp_path: Path) -> None:
    """It is complete if every file of the note is there with its size; the note is not copied."""
    written(store)
    sizes = {name: len(data) for name, data in files(store).items()}
    store.write(NOTE, json.dumps({"last": "manifest.json", "files": sizes, "sent": {}}).encode())
    copied = local_copy(store, tmp_path / "copy")
    if change == "none":
        zckpt.convert(copied, tmp_path / "to", to="deepspeed")
        assert not [*(tmp_path / "to").rglob(UNFINISHED)]
        assert zckpt.verify(tmp_path / "to", copied)["equal"]
        return
    if change == "lost":
        (copied / "exp_avg.safetensors").unlink()
    elif change == "cut":
        (copied / "exp_avg.safetensors").write_bytes(b"")
    else:
        (copied / UNFINISHED).write_text("{")
    with pytest.raises(IncompleteCheckpoint, match="a target that is not complete") as raised:
        zckpt.read(copied, weights_only=True)
    assert str(copied / UNFINISHED) in raised.value.hint


def test_a_copy_is_refused_by_a_storage_reader(store: Memory, tmp_path: Path) -> None:
    """Also one that has all names, of which a file is cut."""
    written(store, to="dcp")
    sizes = {name: len(data) for name, data in files(store).items()}
    store.write(NOTE, json.dumps({"last": ".metadata", "files": sizes, "sent": {}}).encode())
    copied = local_copy(store, tmp_path / "copy")
    assert StorageReader(copied).read_metadata().state_dict_metadata
    next(copied.glob("*.distcp")).write_bytes(b"")
    with pytest.raises(IncompleteCheckpoint, match="a target that is not complete"):
        StorageReader(copied).read_metadata()


def test_a_copy_into_a_run_does_not_hide_its_checkpoints(store: Memory, tmp_path: Path) -> None:
    """The copy is left aside, and what lies beside its files is read."""
    for name in ("checkpoint-1", "checkpoint-2"):
        shutil.copytree(EXAMPLE, tmp_path / name)
    about = b'{"files": {"checkpoint-2/latest": 11, "latest": 1}, "last": "latest"}'
    (tmp_path / UNFINISHED).write_bytes(about)
    assert zckpt.read(tmp_path / "checkpoint-1").step == 7
    with pytest.raises(IncompleteCheckpoint):
        zckpt.read(tmp_path / "checkpoint-2")
    path = zckpt.auto_resume(tmp_path, dp=4, tell=lambda lines: None)
    assert path == str(tmp_path / "checkpoint-1")


def test_a_run_is_known_by_its_sources_files(tmp_path: Path) -> None:
    """Also if the source is one file: a complete target of another one is not this run's."""
    (one := tmp_path / "one.pt").write_bytes(b"1")
    (two := tmp_path / "two.pt").write_bytes(b"22")

    def mark(source: Path, **words: Any) -> str:
        return upload.mark_of("convert", {"source": source, **words}, ["source"])

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
    assert capsys.readouterr().out.endswith("has uploaded what an earlier run had written\n")


def test_parts_of_an_upload() -> None:
    assert part_size(0) == part_size(100 << 20) == 16 << 20
    size = 5 << 40  # S3's limit
    assert -(-size // part_size(size)) <= 10_000
    assert etag_of([b"\1" * 16]) == "01" * 16
    assert etag_of([b"\1" * 16, b"\2" * 16]).endswith("-2")


def of_newer_torch(path: Path) -> Path:
    """A directory of which zckpt says that it does not know the version, and names the file."""
    shutil.copytree(ROOT / "tests" / "data" / "fsdp2-2.13.0-tiny", path)
    metadata = (path / ".metadata").read_bytes()
    assert metadata.count(b"1.0.0") == 1
    (path / ".metadata").write_bytes(metadata.replace(b"1.0.0", b"1.0.1"))
    return path


@pytest.mark.parametrize("way", ["from", "to", "both"])
def test_warnings_are_told_with_urls(
    way: str, store: Memory, tmp_path: Path, scratch: Path
) -> None:
    """Before the first byte is written, as the records that the report has."""
    source: Any = of_newer_torch(tmp_path / "run")
    target: Any = tmp_path / "new"
    name = str(source)
    if way != "to":
        source, name = zckpt.At(Memory.of(source, "runs/a"), "runs/a"), "store://Memory/runs/a"
    if way != "from":
        target = zckpt.At(store, KEY)
    told: list[Any] = []
    report = zckpt.convert(source, target, to="universal", tell=told.append)
    (lines,) = told
    (line,) = [line for line in lines if line["code"] == "version-unsupported"]
    assert line["file"] == f"{name}/.metadata"
    assert line["message"].startswith(f"{name}/.metadata has the version '1.0.1'")
    assert report["warnings"][: len(lines)] == lines
    assert str(scratch) not in json.dumps([told, report])


def test_every_field_of_an_error_names_urls(tmp_path: Path, scratch: Path) -> None:
    """Also the missing files of one that knows several, which `report` shows."""
    shutil.copytree(EXAMPLE, tmp_path / "run")
    for path in (tmp_path / "run" / "global_step7").glob("*_rank_[12]_*optim_states.pt"):
        path.unlink()
    at = zckpt.At(Memory.of(tmp_path / "run", "runs/a"), "runs/a")
    with pytest.raises(IncompleteCheckpoint) as raised:
        zckpt.convert(at, tmp_path / "new")
    error, folder = raised.value, "store://Memory/runs/a/global_step7"
    assert len(error.paths) == 2
    assert all(path.startswith(f"{folder}/") for path in error.paths)
    assert [notice.file for notice in error.notices] == [*error.paths]
    assert (error.file or folder).startswith(folder)
    assert str(error) == error.message
    assert str(scratch) not in repr((vars(error), error.notices, error.args))
