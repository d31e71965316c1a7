"""What `verify` and `verify --gather` prove of ONNX Runtime's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import pytest
from msgspec.structs import replace

import zckpt
from zckpt import errors
from zckpt.core.checkpoint.entries import Entry
from zckpt.core.storage.fragments import Runs
from zckpt.formats.onnxruntime.read import _Entries

from ...engines import onnxruntime_files as files
from ...engines.onnxruntime_files import make, owned
from ...proof.test_allgather import check_broken_reader
from .samples import (
    DATA,
    edit,
)


def shift(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that is wrong by one element in the first piece of every moment that is cut."""
    right = _Entries._enter

    def wrong(self: Any, entry: Entry) -> None:
        first, *others = entry.fragments
        if entry.slot == "exp_avg" and others:
            extent = replace(first.extent, offset=first.extent.offset + 4)
            moved = replace(first, extent=extent)
            entry = replace(entry, fragments=Runs([moved, *others]))
        right(self, entry)

    monkeypatch.setattr(_Entries, "_enter", wrong)


class TestProof:
    """`verify` of samples and generated sets is in `assert_reads`."""

    @pytest.mark.parametrize("dialect", ["l1", "l2", "hdf5"])
    def test_a_broken_reader_is_found(self, dialect: str, tmp_path: Path) -> None:
        state = make("fp16")
        cut = next(n for n in owned(state.weights, 3)[0] if n in owned(state.weights, 3)[1])
        check_broken_reader(
            files.write(state, tmp_path / "source", 3, dialect), tmp_path, shift, cut
        )

    def test_what_the_engine_cannot_tell(self, tmp_path: Path) -> None:
        """Before 1.7 its reader needs the moments' lengths: without them it takes stale parts."""
        folder = files.write(make("fp16"), tmp_path / "source", 3, "l1", without="optimizer")
        zckpt.convert(folder, tmp_path / "read")
        assert zckpt.verify(folder, tmp_path / "read")["equal"]
        with pytest.raises(errors.UnsupportedCheckpoint, match="no optimizer state"):
            zckpt.verify(folder, tmp_path / "read", gather=True, device="cpu")

    @pytest.mark.parametrize("dialect", ["l1", "l2"])
    @pytest.mark.parametrize("precision", ["fp16", "bf16"])
    def test_a_stale_weight(self, dialect: str, precision: str, tmp_path: Path) -> None:
        state = make(precision)
        files.write(state, tmp_path / "right", 3, dialect)
        zckpt.convert(tmp_path / "right", tmp_path / "read")
        half = state.half("layer.2.bias")
        state.weights["layer.2.bias"] += 0.25
        folder = files.write(state, tmp_path / "source", 3, dialect)
        for path in folder.iterdir():  # the 16-bit copies are those of before
            edit(path, lambda model: model[f"layer.2.bias_{precision}"].copy_(half))
        for report in (
            zckpt.verify(folder),
            zckpt.verify(folder, tmp_path / "read"),
            zckpt.verify(folder, tmp_path / "read", gather=True, device="cpu"),
        ):
            (difference,) = report["differences"]
            assert difference["tensor"].startswith("layer.2.bias/")
            assert difference["count"] == 12

    def test_ranks_of_an_fp32_run_that_differ(self, tmp_path: Path) -> None:
        folder = files.write(make("fp32"), tmp_path / "source", 3, "hdf5")
        with h5py.File(folder / "checkpoint.rank2.ortcp", "a") as file:
            file["model/full_precision/head.weight"][11, 2] += 1
        (difference,) = zckpt.verify(folder)["differences"]
        assert (difference["tensor"], difference["count"]) == ("head.weight/param", 1)

    @pytest.mark.parametrize("dialect", ["l2", "hdf5"])
    def test_another_size_is_the_same(self, dialect: str, tmp_path: Path) -> None:
        source = DATA / "hdf5__fp16__adam__dp3"
        zckpt.reshard(source, tmp_path / "target", dp=8, dialect=dialect)
        report = zckpt.verify(tmp_path / "target", source, gather=True, device="cpu")
        assert report["equal"], report
        copies = [name for name in report["only_a"] if not name.endswith("/param")]
        assert copies == report["only_b"] == []  # HDF5 files hold no 16-bit copies
