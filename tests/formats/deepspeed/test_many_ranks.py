"""Files of many ranks: what is equal in them is parsed once, on one thread or on several."""

from __future__ import annotations

from pathlib import Path

import pytest

import zckpt
from zckpt import api
from zckpt.files import torchfile
from zckpt.formats.deepspeed_states import states

from ...conftest import EXAMPLE

DP = 40


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("many") / "run"
    zckpt.reshard(EXAMPLE, path, dp=DP, stage=3)
    return path


@pytest.mark.parametrize("wait", [float("inf"), -float("inf")], ids=["alone", "threads"])
def test_equal_pickles_are_parsed_once(
    run: Path, wait: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = zckpt.read(run)
    parsed: list[str] = []
    loaded = torchfile._Parser.loaded

    def load(self: torchfile._Parser) -> object:
        parsed.append(self.path)
        return loaded(self)

    monkeypatch.setattr(torchfile._Parser, "loaded", load)
    monkeypatch.setattr(states, "LONG_WAIT", wait)
    manifest = zckpt.read(run)
    assert len(manifest.files.paths) == 2 * DP
    for each in ("records", "paths"):
        assert getattr(manifest.files, each) == getattr(expected.files, each)
    assert manifest.parameters == expected.parameters
    assert api.tensors(manifest, "*", fragments=True) == api.tensors(expected, "*", fragments=True)
    assert len(parsed) < 6
