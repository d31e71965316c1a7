"""Does any changed input make a parser hang, fill the memory, or raise another error than its own?

By default some hundred inputs for each parser. `-m exhaustive` runs 10,000; millions are run by
hand: see fuzz.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .fuzz import Finds, fuzz
from .targets import BUILDERS

SLOW = {"deepspeed", "gathered", "dcp-metadata", "onnxruntime", "manifest", "hdf5"}


def check(name: str, runs: int, folder: Path) -> None:
    finds = Finds()
    fuzz(name, runs, 0, folder, finds)
    assert {kind: text[-800:] for kind, (_, text) in finds.kinds.items()} == {}


@pytest.mark.parametrize("name", BUILDERS)
def test_a_few_changed_inputs(name: str, tmp_path: Path) -> None:
    check(name, 100 if name in SLOW else 300, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", BUILDERS)
def test_many_changed_inputs(name: str, tmp_path: Path) -> None:
    check(name, 10_000, tmp_path)


def test_a_find_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fuzzer sees an error that no parser may raise."""
    from zckpt.files import safefile

    def read(path: str) -> None:
        if b"shape" not in Path(path).read_bytes():
            raise KeyError("shape")

    monkeypatch.setattr(safefile, "read_with_metadata", read)
    finds = Finds()
    fuzz("safetensors", 300, 0, tmp_path, finds)
    assert any(kind.startswith("KeyError") for kind in finds.kinds)
