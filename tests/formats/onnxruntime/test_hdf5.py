"""HDF5 files of ONNX Runtime: their variants, and what is refused."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest

import zckpt
from zckpt import errors

from ...conftest import EXAMPLE, ROOT, texts
from ...engines import onnxruntime_files as files
from ...engines.onnxruntime_files import make
from .samples import (
    DATA,
    assert_reads,
)


@pytest.fixture
def without_h5py(tmp_path: Path) -> Path:
    """A folder to be searched first, in which h5py cannot be imported."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "h5py.py").write_text("raise ImportError('no h5py here')")
    return hidden


class TestVariants:
    def test_newer_hdf5_files(self, tmp_path: Path) -> None:
        """Rewritten with the superblock of today's HDF5, whose names stand elsewhere."""
        state = make()
        files.write(state, tmp_path / "source", 2, "hdf5")
        (tmp_path / "new").mkdir()
        for path in (tmp_path / "source").iterdir():
            with (
                h5py.File(path) as old,
                h5py.File(tmp_path / "new" / path.name, "w", libver="latest") as new,
            ):
                for name in old:
                    old.copy(name, new)
        assert_reads(tmp_path / "new", state.expected(), tmp_path)

    def test_many_names_move_the_heap(self, tmp_path: Path) -> None:
        files.write(make(), tmp_path / "source", 1, "hdf5")
        with h5py.File(tmp_path / "source" / "checkpoint.ortcp", "a") as file:
            for place in range(200):
                file.create_group(f"{place:050}")
        assert zckpt.read(tmp_path / "source").format == "onnxruntime"


class TestRefused:
    """Each with a named reason and exit code 1."""

    def test_horizontal_parallelism(self, refused: Any, tmp_path: Path) -> None:
        folder = files.write(make("fp16"), tmp_path / "source", 2, "hdf5")
        for path in folder.iterdir():
            with h5py.File(path, "a") as file:
                file["trainer_options/horizontal_parallel_size"][...] = 2
        refused("UnsupportedCheckpoint", "Megatron")

    def test_a_horizontally_cut_weight(self, refused: Any, tmp_path: Path) -> None:
        folder = files.write(make("fp16"), tmp_path / "source", 2, "hdf5")
        with h5py.File(folder / "checkpoint.rank0.ortcp", "a") as file:
            name = next(iter(file["partition_info"]))
            file[f"partition_info/{name}/megatron_row_partition"][...] = 1
        refused("UnsupportedCheckpoint", "Megatron")

    @pytest.mark.parametrize("name", ["zero_stage", "world_rank", "data_parallel_size"])
    def test_an_option_that_damage_made_huge(self, name: str, refused: Any, tmp_path: Path) -> None:
        folder = files.write(make("fp32"), tmp_path / "source", 1, "hdf5")
        with h5py.File(folder / "checkpoint.ortcp", "a") as file:
            file[f"trainer_options/{name}"][...] = 1 << 43
        refused("CorruptCheckpoint", "trainer_options", name)

    def test_ranks_of_two_runs(self, refused: Any, tmp_path: Path) -> None:
        folder = files.write(make("fp16"), tmp_path / "source", 2, "hdf5")
        with h5py.File(folder / "checkpoint.rank1.ortcp", "a") as file:
            file["trainer_options/mixed_precision"][...] = False
        refused("InconsistentCheckpoint", "mixed_precision")

    def test_compressed_datasets(self, refused: Any, tmp_path: Path) -> None:
        folder = files.write(make("fp32"), tmp_path / "source", 1, "hdf5")
        with h5py.File(folder / "checkpoint.ortcp", "a") as file:
            weight = file["model/full_precision/Emb.weight"][()]
            del file["model/full_precision/Emb.weight"]
            file.create_dataset("model/full_precision/Emb.weight", data=weight, compression="gzip")
        refused("UnsupportedCheckpoint", "Emb.weight", "h5repack")

    def test_links_to_elsewhere(self, refused: Any, tmp_path: Path) -> None:
        folder = files.write(make("fp32"), tmp_path / "source", 1, "hdf5")
        with h5py.File(folder / "checkpoint.ortcp", "a") as file:
            file["model/full_precision/other"] = h5py.ExternalLink("/etc/passwd", "/x")
        refused("UnsupportedCheckpoint", "link")

    def test_groups_in_circles(self, refused: Any, tmp_path: Path) -> None:
        folder = files.write(make("fp32"), tmp_path / "source", 1, "hdf5")
        with h5py.File(folder / "checkpoint.ortcp", "a") as file:
            file["model/full_precision/circle"] = file["model"]
        refused("CorruptCheckpoint", "has two paths")

    def test_without_h5py(
        self, zckpt_without: Callable[..., Any], without_h5py: Path, tmp_path: Path
    ) -> None:
        folder = DATA / "hdf5__fp32__adam__dp2"
        for source in (folder, folder / "checkpoint.rank0.ortcp"):
            ended = subprocess.run(
                [sys.executable, "-m", "zckpt", "inspect", source],
                env={"PYTHONPATH": f"{without_h5py}:{ROOT}"},
                capture_output=True,
                text=True,
            )
            assert ended.returncode == 1
            assert "HDF5 files need the package h5py" in ended.stderr
            assert "pip install h5py" in ended.stderr
        legacy = DATA / "legacy-post5478__fp16__adam__dp3"
        assert zckpt_without(("h5py", "numpy"), "inspect", legacy).code == 0

    def test_a_file_of_another_program_without_h5py(
        self, without_h5py: Path, tmp_path: Path
    ) -> None:
        """A folder is known by its other files, as if that one were not there."""
        zckpt.convert(EXAMPLE, tmp_path / "weights", weights_only=True, to="gathered")
        for source, name in ((EXAMPLE, "model.h5"), (tmp_path / "weights", "tf_model.h5")):
            folder = Path(shutil.copytree(source, tmp_path / name))
            shutil.copy(DATA / "hdf5__fp32__adam__dp2" / "checkpoint.rank0.ortcp", folder / name)
            ended = subprocess.run(
                [sys.executable, "-m", "zckpt", "inspect", folder],
                env={"PYTHONPATH": f"{without_h5py}:{ROOT}"},
                capture_output=True,
            )
            assert ended.returncode == 0


class TestDamage:
    """HDF5 files have no checksums: what they say of themselves must agree."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return Path(shutil.copytree(DATA / "hdf5__fp32__adam__dp2", tmp_path / "run"))

    def change(self, folder: Path, old: bytes, new: bytes) -> None:
        path = folder / "checkpoint.rank0.ortcp"
        data = path.read_bytes()
        assert data.count(old) == 1
        path.write_bytes(data.replace(old, new))

    def test_an_option_that_no_trainer_has(self, folder: Path, tmp_path: Path) -> None:
        self.change(folder, b"world_rank", b"world_bank")
        report = zckpt.convert(folder, tmp_path / "out")
        assert "trainer_options/world_bank" in texts(report["left_out"])

    @pytest.mark.parametrize(
        ("old", "new", "said"),
        [
            (b"train_step_info\0", b"train_step_infn\0", "train_step_infn/"),
            (b"optimization_step\0", b"optimizatioo_step\0", "train_step_info/optimizatioo_step"),
        ],
    )
    def test_a_name_that_no_trainer_writes(
        self, old: bytes, new: bytes, said: str, folder: Path, tmp_path: Path
    ) -> None:
        self.change(folder, old, new)
        report = zckpt.convert(folder, tmp_path / "out")
        assert any(line.startswith(said) for line in texts(report["left_out"]))

    def test_a_name_that_is_no_text(self, folder: Path) -> None:
        """One flipped bit in the name of a weight."""
        path = folder / "checkpoint.rank0.ortcp"
        data = bytearray(path.read_bytes())
        with h5py.File(path) as file:
            name = next(iter(file["model/full_precision"]))
        place = data.index(name.encode() + b"\0")
        data[place] ^= 0x80
        path.write_bytes(data)
        with pytest.raises(errors.ZckptError) as raised:
            zckpt.convert(folder, folder / ".." / "target")
        assert raised.value.hint

    def test_an_option_of_another_type(self, folder: Path) -> None:
        path = folder / "checkpoint.rank0.ortcp"
        with h5py.File(path, "r+") as file:
            del file["trainer_options/mixed_precision"]
            file["trainer_options/mixed_precision"] = 0
        with pytest.raises(errors.CorruptCheckpoint, match=r"trainer_options: .*mixed_precision"):
            zckpt.read(folder)

    def test_tensors_that_share_bytes(self, folder: Path) -> None:
        tensors = zckpt.read(folder).entries
        offsets = sorted(
            fragment.extent.offset
            for entry in tensors.values()
            for fragment in entry.fragments
            if fragment.extent.file.endswith("rank0.ortcp")
        )
        self.change(folder, struct.pack("<Q", offsets[1]), struct.pack("<Q", offsets[1] - 4))
        with pytest.raises(errors.CorruptCheckpoint, match="share bytes"):
            zckpt.read(folder)
