"""Manifests as bytes: nothing is lost, and nothing else can come out of them."""

from __future__ import annotations

import os
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zckpt
from zckpt.core.fragments import Slices
from zckpt.core.manifest import Manifest
from zckpt.core.plan import match
from zckpt.core.sources import Fingerprint, on_this_node
from zckpt.errors import CorruptCheckpoint
from zckpt.nodes import handover

from ..conftest import ROOT

SOURCES = [
    "examples/run",
    "tests/data/deepspeed-0.11.0-z3_dp2_sub_groups/run",
    "tests/data/fsdp2-2.13.0-tiny",
    "tests/data/onnxruntime/hdf5__fp16__adam__dp3",
]


def sent(value: Any) -> Any:
    return handover.from_bytes(handover.to_bytes(value))


@pytest.mark.parametrize("name", SOURCES)
def test_where_tensors_lie_is_kept(name: str) -> None:
    manifest = zckpt.read(ROOT / name)
    copy = sent(handover.tensors_of(manifest))
    assert list(copy.entries) == list(manifest.entries)
    for key, entry in manifest.entries.items():
        assert list(copy.entries[key].fragments) == list(entry.fragments)
        assert (copy.entries[key].dtype, copy.entries[key].digest) == (entry.dtype, entry.digest)
    assert copy.records == manifest.records
    assert copy.fingerprints == manifest.fingerprints
    assert copy.dp == manifest.dp


def test_what_tensors_share_stays_one() -> None:
    """The slices of ZeRO-3 have one list of flat buffers, by whose identity they are read."""
    manifest: Manifest = sent(handover.tensors_of(zckpt.read(ROOT / SOURCES[1])))
    slices = [e.fragments for e in manifest.entries.values() if isinstance(e.fragments, Slices)]
    assert len({id(item.flats) for item in slices}) < len(slices)
    work = sent((match(manifest, manifest)[0], manifest))
    assert work[0][0].a is work[1].entries[work[0][0].a.name]


class Call:
    """An object whose pickle calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    "value",
    [
        Call(os.system, "touch broken"),
        Call(eval, "open('broken', 'w')"),
        Call(getattr, "", "join"),
        Path("x"),
        zckpt.Part(1, 2),
    ],
)
def test_other_classes_are_refused(
    value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CorruptCheckpoint, match="not part of a manifest"):
        handover.from_bytes(zlib.compress(pickle.dumps(value)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("data", [b"", b"x", zlib.compress(b"x"), zlib.compress(b"")])
def test_bytes_that_are_no_manifest(data: bytes) -> None:
    with pytest.raises(CorruptCheckpoint):
        handover.from_bytes(data)


def test_devices_of_another_node(tmp_path: Path) -> None:
    """The same mount has another number there; inode, size and time must be the same."""
    path = tmp_path / "a"
    path.write_text("x")
    own = Fingerprint.of(path.stat())
    there = Fingerprint(own.device + 7, own.inode, own.size, own.mtime)
    assert on_this_node({str(path): there}) == {str(path): own}
