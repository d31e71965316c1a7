"""The CRC-32 behind the pickle of a `.metadata`."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader

import zckpt
from zckpt import errors
from zckpt.files.dcpfile import check_seal, sealed

from ..conftest import EXAMPLE


@pytest.fixture
def run(tmp_path: Path) -> Path:
    zckpt.convert(EXAMPLE, tmp_path / "run", to="dcp")
    return tmp_path / "run"


def test_torch_loads_a_sealed_file(run: Path) -> None:
    text = (run / ".metadata").read_bytes()
    assert text == sealed(text[: text.rindex(b"\n", 0, -1)])
    loaded = FileSystemReader(run).read_metadata()
    assert loaded.state_dict_metadata == pickle.loads(text).state_dict_metadata


def test_a_letter_has_changed(run: Path) -> None:
    text = (run / ".metadata").read_bytes()
    key = b"state_dict_metadata"
    (run / ".metadata").write_bytes(text.replace(key, key.upper()))
    with pytest.raises(errors.CorruptCheckpoint, match="CRC-32"):
        zckpt.read(run)


def test_a_file_without_a_seal() -> None:
    check_seal(b"")
    check_seal(pickle.dumps({}))
    check_seal(sealed(b"abc"))
    with pytest.raises(errors.CorruptCheckpoint):
        check_seal(sealed(b"abc").replace(b"a", b"b", 1))
