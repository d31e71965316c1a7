"""What every version of zckpt wrote as format v1 is read by this one: the promise of format-v1.md.

`tests/data/universal` has a folder for each version whose files differ from those of the one before
it, with a checkpoint of each of `SOURCES`. The last one is what is written today.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import zckpt
from zckpt.core.checkpoint.entries import name_of

from ...conftest import EXAMPLE, ROOT
from ..equality import same_bits

DATA = ROOT / "tests" / "data"
SOURCES = {
    "run": EXAMPLE,
    "fsdp": DATA / "fsdp2-2.13.0-tiny",
    "pipeline": DATA / "zckpt-0.1-pp2_tp2" / "run",
    "megatron": DATA / "megatron-0.16.1-legacy-ep2",
    "weights": EXAMPLE,
}
WRITTEN = sorted(path.parent for path in (DATA / "universal").glob("*/*/manifest.json"))
LAST = WRITTEN[-1].parent


@pytest.mark.parametrize("written", WRITTEN, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_a_version_wrote_is_read(written: Path, tmp_path: Path) -> None:
    ours, theirs = zckpt.read(written), zckpt.read(SOURCES[written.name])
    is_whole = written.name != "weights"
    assert list(ours.parameters) == list(theirs.parameters)
    assert ours.buffers == theirs.buffers
    if is_whole:
        assert ours.parameters == theirs.parameters
        assert ours.groups == theirs.groups
        assert (ours.step, ours.optimizer) == (theirs.step, theirs.optimizer)
        assert {*ours.entries} == {*theirs.entries}
    for tensor in map(name_of, ours.entries):
        values = (zckpt.load(path, tensor) for path in (written, SOURCES[written.name]))
        assert same_bits(*values), tensor
    assert zckpt.verify(written)["equal"]
    if is_whole:
        zckpt.reshard(written, tmp_path / "back")
        assert zckpt.verify(tmp_path / "back", against=SOURCES[written.name])["equal"]


@pytest.mark.parametrize("name", SOURCES)
def test_the_last_folder_is_what_is_written_today(name: str, tmp_path: Path) -> None:
    zckpt.convert(SOURCES[name], tmp_path / name, weights_only=name == "weights")
    last, today = ({*_keys(_manifest(path / name))} for path in (LAST, tmp_path))
    assert today == last, "the format has changed: CONTRIBUTING.md says what to add"
    written = {file.name: file.read_bytes() for file in tmp_path.rglob("*.safetensors")}
    assert written == {f.name: f.read_bytes() for f in (LAST / name).glob("*.safetensors")}


def _manifest(path: Path) -> Any:
    return json.loads((path / "manifest.json").read_text())


def _keys(value: Any, above: str = "") -> Iterator[str]:
    """Every key of a document with those above it, and the type of what it has."""
    yield f"{above}: {type(value).__name__}"
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _keys(item, f"{above}.{key}")
    elif isinstance(value, list):
        for item in value:
            yield from _keys(item, f"{above}[]")
