"""A server of S3 on this machine, with a bucket for each test, and a faulty proxy before it."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ..conftest import needs
from .proxy import Fault, Play, Proxy

KEY_ID, SECRET = "AKIAZCKPTKEYIDOFTEST", "zckptSecretOfATest/7bZ0pQ9kLmN2xV4w"
AWS = ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker("stores")


@pytest.fixture(scope="session")
def server() -> Iterator[tuple[str, int]]:
    """moto's server: its host and its port."""
    needs("obstore", "moto", "boto3", "fsspec")
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it tells every request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield server.get_host_and_port()
    server.stop()


@dataclass(frozen=True)
class Bucket:
    """A bucket of one test, looked at without zckpt."""

    name: str
    client: Any

    def url(self, key: str = "") -> str:
        return f"s3://{self.name}/{key}"

    def upload(self, source: Path, key: str) -> str:
        """Puts a file, or all files of a folder, below a key; gives the URL."""
        for path in [source] if source.is_file() else sorted(source.rglob("*")):
            if path.is_file():
                name = path.relative_to(source).as_posix() if path != source else ""
                self.put(f"{key}/{name}".rstrip("/"), path.read_bytes())
        return self.url(key)

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=data)

    def get(self, key: str) -> bytes:
        data: bytes = self.client.get_object(Bucket=self.name, Key=key)["Body"].read()
        return data

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=self.name, Key=key)

    def keys(self, prefix: str = "") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2")
        return [
            item["Key"]
            for page in pages.paginate(Bucket=self.name, Prefix=prefix)
            for item in page.get("Contents", ())
        ]

    def files(self, key: str) -> dict[str, bytes]:
        """The bytes of every object below a key, by name."""
        return {each[len(key) + 1 :]: self.get(each) for each in self.keys(f"{key}/")}

    def uploads(self) -> list[str]:
        """The keys of unfinished multipart uploads."""
        listed = self.client.list_multipart_uploads(Bucket=self.name)
        return [each["Key"] for each in listed.get("Uploads", ())]


@pytest.fixture
def bucket(server: tuple[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bucket:
    """An empty bucket, and the environment with which zckpt finds it."""
    import boto3

    endpoint = "http://{}:{}".format(*server)
    for name in AWS:
        monkeypatch.delenv(name, raising=False)
    environment = {
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
        "TMPDIR": str(tmp_path / "tmp"),
    }
    (tmp_path / "tmp").mkdir()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", None)
    client = boto3.client("s3", region_name="us-east-1")
    name = f"zckpt-test-{secrets.token_hex(6)}"
    client.create_bucket(Bucket=name)
    return Bucket(name, client)


@pytest.fixture
def proxy(
    bucket: Bucket, server: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Proxy]:
    """The faulty proxy, which zckpt takes for the store; `bucket` looks behind it."""
    proxy = Proxy(server)
    thread = threading.Thread(target=partial(proxy.serve_forever, 0.02), daemon=True)
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    yield proxy
    proxy.shutdown()
    proxy.server_close()


@pytest.fixture
def fault(proxy: Proxy) -> Callable[..., Fault]:
    """Adds a fault to the list; its `played` says how often it was played."""

    def add(method: str, path: str, play: Play, times: int = 1, after: int = 0) -> Fault:
        proxy.faults.append(Fault(method, path, play, times, after))
        return proxy.faults[-1]

    return add


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library tries twice, and not for three minutes."""
    from obstore import store

    retries = {
        "max_retries": 2,
        "backoff": {
            "init_backoff": timedelta(milliseconds=10),
            "max_backoff": timedelta(milliseconds=50),
            "base": 2,
        },
        "retry_timeout": timedelta(seconds=20),
    }
    monkeypatch.setattr(store, "S3Store", partial(store.S3Store, retry_config=retries))
    monkeypatch.setattr("zckpt.remote.failures.PAUSE", 0.01)
