"""Are the stores of a program, web servers and the Hub read as folders are?"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import zckpt
from zckpt.errors import TargetExists, ZckptError
from zckpt.remote.cleanup import clean_up
from zckpt.remote.mirror import UNFINISHED

from ..conftest import EXAMPLE, Result, needs
from ..test_resume import files
from .sources import DATA, TRAINER
from .web import Hub, Web, served

TOKEN = "hf_tokenOfATestThatNobodyMaySee"


@pytest.fixture(autouse=True)
def packages() -> None:
    needs("obstore", "fsspec", "huggingface_hub")


# -- stores of a program


class Own:
    """A store of one kind, and its files looked at without zckpt."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        if kind == "fsspec":
            import fsspec

            self.store: Any = fsspec.filesystem("memory")
            self.store.store.clear()
        elif kind == "obstore memory":
            from obstore.store import MemoryStore

            self.store = MemoryStore()
        else:
            from obstore.store import LocalStore

            self.store = LocalStore(folder, mkdir=True)

    def put(self, key: str, data: bytes) -> None:
        if self.kind == "fsspec":
            self.store.pipe_file(f"/{key}", data)
        else:
            import obstore

            obstore.put(self.store, key, data)

    def upload(self, source: Path, key: str) -> zckpt.At:
        for path in sorted(source.rglob("*")):
            if path.is_file():
                self.put(f"{key}/{path.relative_to(source).as_posix()}", path.read_bytes())
        return zckpt.At(self.store, key)

    def files(self, key: str) -> dict[str, bytes]:
        if self.kind == "fsspec":
            return {
                path[len(key) + 2 :]: self.store.cat_file(path)
                for path in self.store.find(f"/{key}")
            }
        import obstore

        return {
            each["path"][len(key) + 1 :]: bytes(obstore.get(self.store, each["path"]).bytes())
            for batch in obstore.list(self.store, key)
            for each in batch
        }


@pytest.fixture(params=["fsspec", "obstore memory", "obstore folder"])
def own(request: pytest.FixtureRequest, tmp_path: Path) -> Own:
    return Own(request.param, tmp_path / "own")


def test_a_store_of_a_program_is_read_and_written(own: Own, tmp_path: Path) -> None:
    zckpt.convert(EXAMPLE, tmp_path / "expected")
    expected = files(tmp_path / "expected")
    at = own.upload(EXAMPLE, "runs/run")
    zckpt.convert(at, tmp_path / "here")
    assert files(tmp_path / "here") == expected
    zckpt.convert(at, zckpt.At(own.store, "to/universal"))
    assert own.files("to/universal") == expected
    assert zckpt.verify(zckpt.At(own.store, "to/universal"), at)["equal"]
    with pytest.raises(TargetExists):
        zckpt.convert(EXAMPLE, zckpt.At(own.store, "to/universal"))


def test_remains_in_a_store_of_a_program_are_removed(own: Own) -> None:
    at = zckpt.At(own.store, "to/run")
    own.put(f"to/run/{UNFINISHED}", b'{"files": {"a.bin": 1, "b": 2}, "last": "b", "sent": {}}')
    own.put("to/run/a.bin", b"1")
    own.put("to/run/of-others", b"2")
    with pytest.raises(ZckptError):
        zckpt.read(at)
    assert clean_up(at)["files"] == ["a.bin", UNFINISHED]
    assert own.files("to/run") == {"of-others": b"2"}


# -- web servers


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    zckpt.convert(EXAMPLE, tmp_path / "www" / "universal")
    zckpt.convert(EXAMPLE, tmp_path / "www" / "parts", max_file_size=8000)
    zckpt.export(TRAINER, tmp_path / "www" / "model")
    zckpt.export(TRAINER, tmp_path / "www" / "models", max_shard_size=30_000)
    zckpt.export(TRAINER, tmp_path / "www" / "a b" / "ü%20")
    shutil.copy(DATA / "torchao-0.18.0" / "adamw8bit.pt", tmp_path / "www" / "single.pt")
    shutil.copy(TRAINER / "model.safetensors", tmp_path / "www" / "single.safetensors")
    with served(Web(tmp_path / "www")) as server:
        yield server


@pytest.mark.parametrize(
    "path",
    ["universal", "parts", "model", "models", "a b/ü%20", "single.pt", "single.safetensors"],
)
def test_a_web_server_is_read(path: str, web: Web, tmp_path: Path) -> None:
    url = f"{web.url}/{path}"
    zckpt.convert(tmp_path / "www" / path, tmp_path / "expected")
    zckpt.convert(url, tmp_path / "here")
    assert files(tmp_path / "here") == files(tmp_path / "expected")
    assert {method for method, _, _ in web.seen} <= {"GET", "HEAD"}


def test_what_a_web_server_does_not_have(web: Web, zckpt: Callable[..., Result]) -> None:
    result = zckpt("inspect", f"{web.url}/none")
    assert result.code == 1
    assert f"{web.url}/none" in result.err
    assert "Hint: " in result.err


def test_a_web_server_without_ranges_is_refused(web: Web, zckpt: Callable[..., Result]) -> None:
    web.has_ranges = False
    result = zckpt("inspect", f"{web.url}/universal")
    assert result.code == 1
    assert result.err.count("Error: ") == 1
    assert "cannot send a range of bytes" in result.err


# -- the Hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Hub, Web]]:
    zckpt.convert(EXAMPLE, tmp_path / "repository" / "runs" / "universal")
    zckpt.export(TRAINER, tmp_path / "model")
    shutil.copytree(tmp_path / "model", tmp_path / "repository", dirs_exist_ok=True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with (
        served(Web(tmp_path / "repository")) as cdn,
        served(Hub(tmp_path / "repository", cdn.url)) as hub,
    ):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        yield hub, cdn


@pytest.mark.parametrize("path", ["", "@main", "@v1", f"@{'0123456789abcdef' * 2}01234567"])
def test_a_repository_of_the_hub_is_read(path: str, hub: tuple[Hub, Web], tmp_path: Path) -> None:
    zckpt.convert(tmp_path / "repository", tmp_path / "expected")
    zckpt.convert(f"hf://org/name{path}", tmp_path / "here")
    assert files(tmp_path / "here") == files(tmp_path / "expected")


def test_a_folder_and_a_file_of_the_hub_are_read(hub: tuple[Hub, Web], tmp_path: Path) -> None:
    url = "hf://org/name/runs/universal"
    assert zckpt.verify(url, tmp_path / "repository" / "runs" / "universal")["equal"]
    assert zckpt.verify("hf://org/name/model.safetensors")["tensors"]


def test_the_token_goes_to_the_hub_alone(
    hub: tuple[Hub, Web], zckpt: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZCKPT_TRACEBACK", "1")
    result = zckpt("inspect", "hf://org/name", "--json")
    assert result.code == 0
    assert {token for _, _, token in hub[0].seen} == {f"Bearer {TOKEN}"}
    assert {token for _, _, token in hub[1].seen} == {None}
    failed = zckpt("inspect", "hf://org/nothing")
    assert failed.code == 1
    assert "hf://org/nothing does not exist" in failed.err
    for each in (result, failed):
        assert TOKEN not in each.out + each.err
