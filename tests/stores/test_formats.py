"""Do sources and targets in a store have the bytes that they have on this machine?"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import zckpt
from zckpt.core.checkpoint.entries import name_of

from ..conftest import Result
from ..test_resume import files
from .conftest import Bucket
from .sources import SOURCES, local

VARYING = {"seconds", "path", "against", "a", "b", "target", "source", "created"}
"""What a report says of one run and of one place."""


@pytest.fixture(params=SOURCES)
def name(request: pytest.FixtureRequest) -> str:
    given: str = request.param
    return given


@pytest.fixture
def places(name: str, bucket: Bucket, tmp_path: Path) -> tuple[str, str]:
    """One checkpoint twice: its path, and its URL."""
    path, within = local(name, tmp_path), SOURCES[name].within
    url = bucket.upload(path, f"runs/{path.name}")
    return os.path.join(path, within).rstrip("/"), f"{url}/{within}".rstrip("/")


def works(name: str) -> list[tuple[Callable[..., Any], Mapping[str, Any]]]:
    source = SOURCES[name]
    chosen = [
        (zckpt.convert, source.convert),
        (zckpt.reshard, source.reshard),
        (zckpt.export, source.export),
    ]
    return [(function, words) for function, words in chosen if words is not None]


def test_targets_are_those_of_this_machine(
    name: str, places: tuple[str, str], bucket: Bucket, tmp_path: Path
) -> None:
    path, url = places
    for number, (function, words) in enumerate(works(name)):
        function(path, tmp_path / f"there{number}", **words)
        expected = files(tmp_path / f"there{number}")
        assert expected
        function(url, tmp_path / f"here{number}", **words)
        assert files(tmp_path / f"here{number}") == expected, "s3 -> local"
        function(path, bucket.url(f"to/{number}"), **words)
        assert bucket.files(f"to/{number}") == expected, "local -> s3"
        function(url, bucket.url(f"copied/{number}"), **words)
        assert bucket.files(f"copied/{number}") == expected, "s3 -> s3"
    assert not bucket.uploads()
    assert not [*Path(os.environ["TMPDIR"]).glob("zckpt-to-*")]


def plain(value: Any, path: str, url: str) -> Any:
    """A report without what differs between two runs, and with one name for the checkpoint."""
    if isinstance(value, dict):
        return {key: plain(item, path, url) for key, item in value.items() if key not in VARYING}
    if isinstance(value, list | tuple):
        return [plain(item, path, url) for item in value]
    if isinstance(value, str):
        return value.replace(url, "PLACE").replace(path, "PLACE")
    return value


def test_readers_say_the_same(places: tuple[str, str], zckpt: Callable[..., Result]) -> None:
    path, url = places
    for words in (("inspect", "--tensors", "*", "--state"), ("verify",), ("stats",), ("diff", "@")):
        said = []
        for place in places:
            command, *more = (place if word == "@" else word for word in words)
            result = zckpt(command, place, *more, "--json")
            report = json.loads(result.out or "{}")
            said.append((result.code, plain(report, path, url), plain(result.err, path, url)))
        assert said[0] == said[1], words


def test_a_tensor_is_the_same(places: tuple[str, str]) -> None:
    import torch

    path, url = places
    for each in [*map(name_of, zckpt.read(path).entries)][:3]:
        here, there = zckpt.load(path, each), zckpt.load(url, each)
        assert (there.dtype, there.shape) == (here.dtype, here.shape)
        assert torch.equal(there.view(torch.uint8), here.view(torch.uint8)), each
