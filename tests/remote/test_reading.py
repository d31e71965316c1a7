"""A checkpoint in a store is read as the same one on this machine, by ranges."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from tests.conftest import EXAMPLE, fork
from zckpt import api
from zckpt.core.storage import byte_sources
from zckpt.errors import SourceChanged, StoreError, UnsupportedCheckpoint, WrongOption
from zckpt.remote import failures, mirror, stores, urls
from zckpt.remote.url_arguments import local

from .memory import Memory

KEY = "runs/seven"


@pytest.fixture
def store() -> Memory:
    return Memory.of(EXAMPLE, KEY)


@pytest.fixture
def at(store: Memory) -> zckpt.At:
    return zckpt.At(store, KEY)


def comparable(report: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in report.items() if key not in ("seconds", "path", "source")}


def test_the_same_bytes_are_written(at: zckpt.At, tmp_path: Path) -> None:
    zckpt.convert(at, tmp_path / "theirs")
    zckpt.convert(EXAMPLE, tmp_path / "own")
    for path in (tmp_path / "own").iterdir():
        other = tmp_path / "theirs" / path.name
        assert other.read_bytes() == path.read_bytes(), path.name


def test_the_same_is_reported(at: zckpt.At) -> None:
    assert comparable(zckpt.verify(at)) == comparable(zckpt.verify(EXAMPLE))
    assert comparable(zckpt.stats(at)) == comparable(zckpt.stats(EXAMPLE))
    assert zckpt.diff(at, EXAMPLE)["equal"]
    assert zckpt.inspect(zckpt.read(at))["path"] == f"store://Memory/{KEY}/global_step7"
    loaded = zckpt.load(at, "fc1.weight/master")
    assert loaded.equal(zckpt.load(EXAMPLE, "fc1.weight/master"))


def test_nothing_stays(at: zckpt.At) -> None:
    before = {*os.listdir(mirror.top())}
    zckpt.verify(at)
    assert {*os.listdir(mirror.top())} == before


def test_a_fork_removes_no_mirror(at: zckpt.At) -> None:
    with local(at) as path:
        if not (child := fork()):
            mirror._remove(mirror.top(), os.getppid())
            os._exit(0)
        os.waitpid(child, 0)
        assert zckpt.verify(path)["equal"]


def test_inspect_asks_for_the_ends_of_large_files_alone(tmp_path: Path) -> None:
    """Of the tensors between them nothing is read, nor their headers in the zip."""
    path, store = tmp_path / "model.pt", Memory()
    torch.save({f"w{n}": torch.randn(700, 700) for n in range(9)}, path)
    store.write("model.pt", path.read_bytes())
    manifest = zckpt.read(zckpt.At(store, "model.pt"))
    assert len(manifest.parameters) == 9
    (_, first, stop), (_, start, last) = store.asked
    assert (first, last) == (0, path.stat().st_size)
    assert max(stop - first, last - start) < 700 * 700 * 4  # one tensor


def test_each_byte_of_a_conversion_is_asked_for_once(tmp_path: Path) -> None:
    torch.save({f"w{n}": torch.randn(900, 1500) for n in range(6)}, path := tmp_path / "model.pt")
    store = Memory()
    store.write("model.pt", path.read_bytes())
    zckpt.convert(zckpt.At(store, "model.pt"), tmp_path / "universal")
    asked = sum(stop - start for _, start, stop in store.asked)
    assert asked < 1.05 * path.stat().st_size


def test_no_file_of_a_mirror_is_opened_by_itself(at: zckpt.At, tmp_path: Path) -> None:
    """Who opened one without `sources` would read zeros."""
    strange: list[str] = []
    watching = [True]

    def look(event: str, words: tuple[Any, ...]) -> None:
        if event != "open" or not watching[0] or not isinstance(words[0], str):
            return
        path = os.path.realpath(words[0])
        who: Any = sys._getframe(1)
        may = who.f_code.co_filename.endswith(("core/storage/sources.py", "remote/mirror.py"))
        if path.startswith(mirror.top()) and os.path.isfile(path) and not may:
            strange.append(f"{path}: {who.f_code.co_filename}")

    sys.addaudithook(look)  # it cannot be removed
    try:
        zckpt.convert(at, tmp_path / "universal")
        zckpt.report(at)
    finally:
        watching[0] = False
    assert strange == []


def test_an_answer_that_breaks_off_is_asked_again(
    store: Memory, at: zckpt.At, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "PAUSE", 0.0)
    cut = iter([True, True] + 1000 * [False])
    store.answer = lambda key, data: data[: len(data) // 2] if next(cut) else data
    assert zckpt.verify(at)["equal"]
    store.answer = lambda key, data: data[: len(data) // 2]
    with pytest.raises(StoreError, match=f"store://Memory/{KEY}.* bytes instead of"):
        zckpt.read(at)


def test_an_object_that_changes_ends_the_run(store: Memory, tmp_path: Path) -> None:
    class Strict(stores.Filesystem):
        def read(
            self, stored_object: stores.StoredObject, start: int, stop: int
        ) -> bytes | memoryview:
            now = self.head(stored_object.key)
            assert now is not None
            if now.etag != stored_object.etag:
                raise type("PreconditionError", (Exception,), {})()
            return super().read(stored_object, start, stop)

    url = urls.parse(zckpt.At(store, KEY))
    folder = mirror.mirrored(url)
    for file in folder.files.values():
        file.store = Strict(store)
    manifest = api.read(folder.path)
    for key in [*store.objects]:
        store.write(key, store.objects[key])
    with pytest.raises(SourceChanged, match="ETag"):
        zckpt.convert(folder.path, tmp_path / "universal")
    assert not (tmp_path / "universal").exists()
    assert manifest.parameters
    folder.remove()


def test_bytes_are_not_those_of_a_later_file(at: zckpt.At, tmp_path: Path) -> None:
    """A file that gets the inode of a removed mirror has its own bytes."""
    with local(at) as path:
        name = next(Path(path).rglob("mp_rank_00_model_states.pt"))
        with name.open("rb") as hole:
            assert byte_sources.of(hole.fileno()) is not None
        status = name.stat()
    (tmp_path / "own").write_bytes(bytes(status.st_size))
    os.utime(tmp_path / "own", ns=(status.st_mtime_ns, status.st_mtime_ns))
    with (tmp_path / "own").open("rb") as file:
        assert byte_sources.of(file.fileno()) is None


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("../etc/passwd", "part '..'"),
        ("a//b", "part ''"),
        ("./a", "part '.'"),
        ("a\0b", "zero byte"),
        ("n" * 256, "255 bytes"),
    ],
)
def test_strange_keys_are_refused(key: str, reason: str, store: Memory) -> None:
    store.write(f"{KEY}/{key}", b"")
    with pytest.raises(UnsupportedCheckpoint, match="cannot be the name of a file") as raised:
        zckpt.read(zckpt.At(store, KEY))
    assert reason in raised.value.message


def test_an_object_with_others_below_it_is_refused(store: Memory) -> None:
    store.write(f"{KEY}/global_step7", b"x")
    with pytest.raises(UnsupportedCheckpoint, match="is both an object and a folder"):
        zckpt.read(zckpt.At(store, KEY))


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("s3://bucket/a/b/", ("s3", "bucket", "a/b")),
        ("s3://bucket", ("s3", "bucket", "")),
        ("gs://bucket/ä b/c%2e", ("gs", "bucket", "ä b/c%2e")),
        ("hf://org/name@main/sub", ("hf", "org/name@main", "sub")),
        ("hf://datasets/org/name", ("hf", "datasets/org/name", "")),
        ("https://host:8000/x/model.pt", ("https", "host:8000", "x/model.pt")),
    ],
)
def test_the_parts_of_a_url(url: str, parts: tuple[str, str, str]) -> None:
    parsed = urls.parse(url)
    assert (parsed.scheme, parsed.root, parsed.key) == parts
    assert str(parsed) == url.rstrip("/")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3:///key", "names no bucket"),
        ("s3://bucket/a/../b", "the part '..'"),
        ("https://user:secret@host/x", "credentials in front of @"),
        ("https://host/x?token=secret", "a query"),
        ("https://huggingface.co/a/b/tree/main", "is a page"),
        ("hf://name", "names no repository"),
    ],
)
def test_urls_that_are_refused(url: str, said: str) -> None:
    with pytest.raises(WrongOption, match=said) as raised:
        urls.parse(url)
    assert "secret" not in raised.value.message + raised.value.hint


def test_paths_of_this_machine_are_no_urls(tmp_path: Path) -> None:
    for path in (tmp_path, str(tmp_path), "file:///x", "ftp://x/y", "a://b", None, 3):
        assert not urls.is_url(path)


def test_a_store_that_is_none_is_refused() -> None:
    with pytest.raises(WrongOption, match="neither an obstore store nor an fsspec filesystem"):
        zckpt.read(zckpt.At(object(), "run"))


def test_a_packages_name_is_in_the_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "find_spec", lambda name: None)
    with pytest.raises(zckpt.ZckptError, match="needs the package obstore") as raised:
        zckpt.read("s3://bucket/run")
    assert raised.value.hint == "pip install 'zckpt[remote]'"


def test_reports_are_json(at: zckpt.At) -> None:
    assert json.loads(json.dumps(zckpt.verify(at)))["path"] == f"store://Memory/{KEY}"
