"""Which files are one checkpoint of ONNX Runtime, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import zckpt
from zckpt import errors
from zckpt.formats.onnxruntime import files as onnxruntime_files
from zckpt.formats.onnxruntime import hdf5

from ...engines import onnxruntime_files as files
from ...engines.onnxruntime_files import make
from .samples import (
    DATA,
    REAL,
    assert_reads,
)


class TestFound:
    def test_three_in_one_folder_are_listed(self) -> None:
        with pytest.raises(errors.AmbiguousCheckpoint) as caught:
            zckpt.read(REAL)
        for name in ("checkpoint.ortcp", "checkpoint_weights_only.ortcp", "ORT_checkpoint.ort.pt"):
            assert name in caught.value.message
        assert "give one file of a checkpoint" in caught.value.hint

    def test_of_any_name(self, tmp_path: Path) -> None:
        shutil.copy(REAL / "checkpoint.ortcp", tmp_path / "model")
        shutil.copy(REAL / "ORT_checkpoint.ort.pt", tmp_path / "another")
        assert zckpt.read(tmp_path / "model").source["dialect"] == "hdf5"
        assert zckpt.read(tmp_path / "another").source["dialect"] == "l2"

    @pytest.mark.parametrize("ending", [".txt", ".log", ".npy", ".out", ".rank"])
    def test_of_any_ending(
        self, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By content, though only some of many files of one ending are opened."""
        for number, path in enumerate((DATA / "hdf5__fp32__adam__dp2").glob("*.ortcp")):
            shutil.copy(path, tmp_path / f"sample_100_{number}{ending}")
        assert zckpt.read(tmp_path).dp == 2
        for number in range(200):
            (tmp_path / f"sample_{number:03}{ending}").write_text("no HDF5")
        assert zckpt.read(tmp_path).dp == 2  # in the middle: all are opened at last
        opened = []
        monkeypatch.setattr(hdf5, "is_one", opened.append)
        assert onnxruntime_files.detect(str(tmp_path)) == []
        assert len(opened) == 2 * onnxruntime_files.MOST_OPENED

    def test_one_rank_of_several_stands_for_all(self, tmp_path: Path) -> None:
        state = make("fp16")
        for dialect in ("l2", "hdf5"):
            files.write(state, tmp_path / dialect, 3, dialect)
            for path in (tmp_path / dialect).iterdir():
                assert zckpt.read(path).source["dp"] == 3

    def test_other_files_do_not_disturb(self, tmp_path: Path) -> None:
        state = make()
        files.write(state, tmp_path / "source", 3, "hdf5", name="rank_{}")
        (tmp_path / "source" / "notes.txt").write_text("hello")
        with h5py.File(tmp_path / "source" / "tf_model.h5", "w") as file:
            file["dense/kernel"] = np.ones(3)
        (tmp_path / "source" / "folder").mkdir()
        assert_reads(tmp_path / "source", state.expected(), tmp_path)


class TestRefused:
    """Each with a named reason and exit code 1."""

    @pytest.mark.parametrize("rank", [0, 1, 3])
    @pytest.mark.parametrize(
        ("dialect", "name"),
        [("hdf5", "checkpoint.rank{}.ortcp"), ("l2", "ORT_checkpoint.ZeRO.{}.3.ort.pt")],
    )
    def test_missing_rank(
        self, dialect: str, name: str, rank: int, refused: Any, tmp_path: Path
    ) -> None:
        files.write(make("fp16"), tmp_path / "source", 4, dialect)
        (tmp_path / "source" / name.format(rank)).unlink()
        lost = f"the file of rank {rank}" if dialect == "hdf5" else name.format(rank)
        refused("IncompleteCheckpoint", f"lacks {lost}", "3 of 4")

    def test_missing_rank_of_a_sample(self, refused: Any) -> None:
        refused("IncompleteCheckpoint", "rank 1", path=DATA / "bad__hdf5__missing-middle-rank")

    def test_duplicate_rank(self, refused: Any, tmp_path: Path) -> None:
        folder = files.write(make("fp16"), tmp_path / "source", 3, "hdf5")
        shutil.copy(folder / "checkpoint.rank1.ortcp", folder / "copy.ortcp")
        refused("InconsistentCheckpoint", "rank 1", "copy.ortcp", "checkpoint.rank1.ortcp")

    def test_duplicate_rank_in_a_missing_ones_place(self, refused: Any, tmp_path: Path) -> None:
        folder = files.write(make("fp16"), tmp_path / "source", 3, "hdf5")
        shutil.copy(folder / "checkpoint.rank1.ortcp", folder / "checkpoint.rank2.ortcp")
        refused("InconsistentCheckpoint", "rank 1", "both")

    def test_duplicate_legacy_rank(self, refused: Any, tmp_path: Path) -> None:
        folder = files.write(make("fp16"), tmp_path / "source", 3, "l2")
        name = "ORT_checkpoint.ZeRO.{}.2.ort.pt"
        shutil.copy(folder / name.format("1"), folder / name.format("01"))
        refused("InconsistentCheckpoint", "rank 1", "both")

    def test_two_saves_in_one_folder(self, refused: Any, tmp_path: Path) -> None:
        files.write(make("fp16"), tmp_path / "source", 2, "l2")
        files.write(make("fp16"), tmp_path / "source", 2, "l2", prefix="ORT_checkpoint2")
        refused("AmbiguousCheckpoint", "ORT_checkpoint2", "give one file of a checkpoint")
        manifest = zckpt.read(tmp_path / "source" / "ORT_checkpoint2.ZeRO.1.1.ort.pt")
        assert all("ORT_checkpoint2." in path for path in manifest.files.paths)

    def test_more_ranks_than_there_can_be(self, refused: Any, tmp_path: Path) -> None:
        folder = files.write(make("fp16"), tmp_path / "source", 2, "hdf5")
        with h5py.File(folder / "checkpoint.rank0.ortcp", "a") as file:
            file["trainer_options/world_size"][...] = 1 << 50
        refused("CorruptCheckpoint", "trainer_options", "world_size")
        path = tmp_path / "other" / "x.ZeRO.0.99999999999999.ort.pt"
        path.parent.mkdir()
        shutil.copy(REAL / "ORT_checkpoint.ort.pt", path)
        refused("CorruptCheckpoint", "ranks", path=path)

    def test_no_format_of_another_engine_is_disturbed(self, tmp_path: Path) -> None:
        torch.save({"model": {"w": torch.ones(3)}}, tmp_path / "model.pt")
        with h5py.File(tmp_path / "weights.h5", "w") as file:
            file["model/kernel"] = np.ones(3)
        for path in (tmp_path, tmp_path / "model.pt", tmp_path / "weights.h5"):
            with pytest.raises(errors.NotACheckpoint):
                zckpt.read(path, format="onnxruntime")
