"""Is `az://` read and written as a folder is? Run by hand: `npm install azurite`, then

PATH=$PWD/node_modules/.bin:$PATH pytest -m stores tests/stores/test_azure.py
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path

import pytest

import zckpt
from zckpt.errors import TargetExists
from zckpt.remote import stores
from zckpt.remote.mirror import UNFINISHED

from ..conftest import EXAMPLE, Result, needs
from ..test_resume import files

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""azurite's own, which everyone knows."""
Run = Callable[..., Result]


def test_what_azure_asks_for() -> None:
    assert stores.MARK.isidentifier(), "or it is no name of metadata"
    assert stores._quoted("0x8D") == stores._quoted('"0x8D"') == '"0x8D"'
    assert stores._quoted('W/"0x8D"') == 'W/"0x8D"'
    assert stores._quoted(None) is None


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    if shutil.which("azurite-blob") is None:
        pytest.skip("needs azurite of npm")
    needs("obstore")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["azurite-blob", "--blobPort", str(port), "--inMemoryPersistence", "--loose"]
    command += ["--skipApiVersionCheck", "--silent"]
    with subprocess.Popen(command) as process:
        for _ in range(200):
            with socket.socket() as trial:
                if trial.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/{ACCOUNT}"
        process.terminate()


@pytest.fixture
def container(address: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new container, and the environment with which zckpt finds it."""
    name = f"box{time.time_ns()}"
    date, version = formatdate(usegmt=True), "2021-08-06"
    said = f"PUT{12 * chr(10)}x-ms-date:{date}\nx-ms-version:{version}\n"
    said += f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    signed = hmac.new(base64.b64decode(KEY), said.encode(), hashlib.sha256).digest()
    headers = {
        "x-ms-date": date,
        "x-ms-version": version,
        "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(signed).decode()}",
        "Content-Length": "0",
    }
    request = urllib.request.Request(
        f"{address}/{name}?restype=container", method="PUT", headers=headers
    )
    urllib.request.urlopen(request).close()
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", address)
    return name


def uploaded(container: str, source: Path, key: str) -> str:
    import obstore
    from obstore.store import AzureStore

    store = AzureStore(container, client_options={"allow_http": True})
    for path in source.rglob("*"):
        if path.is_file():
            obstore.put(store, f"{key}/{path.relative_to(source).as_posix()}", path.read_bytes())
    return f"az://{container}/{key}"


def objects(container: str, key: str) -> dict[str, bytes]:
    import obstore
    from obstore.store import AzureStore

    store = AzureStore(container, client_options={"allow_http": True})
    return {
        each["path"][len(key) + 1 :]: bytes(obstore.get(store, each["path"]).bytes())
        for batch in obstore.list(store, key)
        for each in batch
    }


def test_a_container_is_read_and_written(container: str, tmp_path: Path) -> None:
    url = uploaded(container, EXAMPLE, "runs/run")
    target = f"az://{container}/to/run"
    zckpt.convert(EXAMPLE, tmp_path / "expected")
    expected = files(tmp_path / "expected")
    zckpt.convert(url, tmp_path / "here")
    assert files(tmp_path / "here") == expected
    zckpt.convert(url, target)
    assert objects(container, "to/run") == expected
    assert zckpt.verify(target, url)["equal"]
    with pytest.raises(TargetExists):
        zckpt.convert(EXAMPLE, target)


def test_a_large_file_is_sent_in_blocks(
    container: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(stores, "PART", 5 << 20)
    (tmp_path / "run").mkdir()
    torch.save({"w": torch.arange(3 << 20, dtype=torch.float32)}, tmp_path / "run" / "ckpt.pt")
    target = f"az://{container}/to/run"
    report = zckpt.convert(tmp_path / "run", target, weights_only=True)
    assert report["read_back"] == len(report["files"]), "its ETags are no MD5"
    assert zckpt.verify(target, tmp_path / "run")["equal"]


def test_remains_are_removed(container: str, tmp_path: Path, zckpt: Run) -> None:
    (tmp_path / UNFINISHED).write_text('{"files": {"a": 1}, "last": "b", "sent": {}}')
    (tmp_path / "a").write_text("1")
    url = uploaded(container, tmp_path, "to/run")
    assert "not complete" in zckpt("inspect", url).err
    assert zckpt("clean-up", url).code == 0
    assert objects(container, "to/run") == {}


@pytest.mark.parametrize(
    ("url", "key", "message"),
    [
        ("az://no{}/run", KEY, "does not exist"),
        ("az://{}/none", KEY, "does not exist"),
        ("az://{}/run", base64.b64encode(b"x" * 64).decode(), "no permission to list"),
    ],
)
def test_what_is_refused(
    url: str,
    key: str,
    message: str,
    container: str,
    monkeypatch: pytest.MonkeyPatch,
    zckpt: Run,
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", key)
    monkeypatch.setenv("ZCKPT_TRACEBACK", "1")
    result = zckpt("inspect", url.format(container))
    assert message in result.err
    assert "Hint: " in result.err
    assert KEY not in result.out + result.err
    assert key not in result.out + result.err
