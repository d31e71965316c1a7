"""Universal checkpoints that zckpt writes: what README specifies, and that others read them."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import zckpt
from zckpt.errors import UnsupportedCheckpoint
from zckpt.formats.universal import write
from zckpt.training.options import Options

from ...conftest import EXAMPLE, ROOT
from ..equality import load, same_bits
from .conftest import manifest_of


class TestFiles:
    def test_one_file_per_slot(self, universal: Path) -> None:
        assert {path.name for path in universal.iterdir()} == {
            "manifest.json",
            "model.safetensors",
            "master.safetensors",
            "exp_avg.safetensors",
            "exp_avg_sq.safetensors",
        }

    def test_shapes_are_the_real_ones(self, universal: Path) -> None:
        tensors = load(universal)
        for name, parameter in manifest_of(universal)["parameters"].items():
            assert list(tensors[f"{name}/param"].shape) == parameter["shape"]

    def test_parameters_stand_in_optimizer_order(self, universal: Path) -> None:
        with safe_open(universal / "master.safetensors", framework="pt") as file:
            names = list(file.offset_keys())
        assert names == ["embedding.weight", "fc1.weight", "fc2.weight", "fc1.bias", "fc2.bias"]

    def test_data_begin_at_a_page(self, universal: Path) -> None:
        for path in universal.glob("*.safetensors"):
            length = int.from_bytes(path.read_bytes()[:8], "little")
            assert (8 + length) % 4096 == 0

    def test_digests_are_crcs_of_tensors_and_files(self, universal: Path) -> None:
        manifest, tensors = manifest_of(universal), load(universal)
        for name, entry in manifest["entries"].items():
            flat = tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes()
            assert entry["crc32"] == f"{zlib.crc32(flat):08x}", name
        assert len(manifest["files"]) == 4
        for name, facts in manifest["files"].items():
            data = (universal / name).read_bytes()
            assert facts == {"size": len(data), "crc32": f"{zlib.crc32(data):08x}"}

    def test_no_pickle_anywhere(self, universal: Path) -> None:
        for path in universal.rglob("*"):
            assert path.suffix in (".json", ".safetensors")

    def test_tied_weights_are_one_tensor(self, universal: Path) -> None:
        parameters = manifest_of(universal)["parameters"]
        assert parameters["embedding.weight"]["aliases"] == ["head.weight"]
        assert "head.weight/param" not in load(universal)

    def test_the_example_reads_it_without_zckpt(self, universal: Path) -> None:
        script = ROOT / "examples" / "read_without_zckpt.py"
        ended = subprocess.run(
            [sys.executable, "-I", script, universal], capture_output=True, text=True, check=True
        )
        assert "step 7" in ended.stdout
        assert "fc1.weight" in ended.stdout


class TestSplitting:
    def test_large_slots_become_several_files(self, tmp_path: Path) -> None:
        zckpt.convert(EXAMPLE, tmp_path / "whole")
        zckpt.convert(EXAMPLE, tmp_path / "split", max_file_size=3000)
        names = {path.name for path in (tmp_path / "split").iterdir()}
        assert "master-00001-of-00003.safetensors" in names
        index = json.loads((tmp_path / "split" / "model.safetensors.index.json").read_text())
        whole, split = load(tmp_path / "whole"), load(tmp_path / "split")
        weights = {n.removesuffix("/param") for n in split if n.endswith("/param")}
        assert set(index["weight_map"]) == weights
        assert set(index["weight_map"].values()) <= names
        assert sorted(whole) == sorted(split)
        assert all(same_bits(whole[name], split[name]) for name in whole)

    def test_universal_to_universal_is_the_same(self, universal: Path, tmp_path: Path) -> None:
        zckpt.convert(universal, tmp_path / "again")
        for path in universal.iterdir():
            assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


class TestWeightsOnly:
    def test_as_the_module_held_them(self, universal: Path, tmp_path: Path) -> None:
        zckpt.convert(EXAMPLE, tmp_path / "weights", weights_only=True)
        names = {path.name for path in (tmp_path / "weights").iterdir()}
        assert names == {"model.safetensors", "manifest.json"}
        full, weights = load(universal), load(tmp_path / "weights")
        assert sorted(weights) == sorted(name for name in full if name.endswith("/param"))
        assert all(same_bits(weights[name], full[name]) for name in weights)

    @pytest.mark.parametrize(
        ("option", "dtype"),
        [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
    )
    @pytest.mark.parametrize("again", [False, True])
    def test_cast_from_the_masters(
        self, option: str, dtype: torch.dtype, again: bool, universal: Path, tmp_path: Path
    ) -> None:
        source = universal if again else EXAMPLE
        zckpt.convert(source, tmp_path / "weights", weights_only=True, dtype=option)
        full, weights = load(universal), load(tmp_path / "weights")
        for name, weight in weights.items():
            if name == "running_mean/param":  # a buffer keeps its type
                assert same_bits(weight, full[name])
                continue
            master = full.get(name.replace("/param", "/master"), full[name])
            assert same_bits(weight, master.to(dtype)), name

    def test_groups_are_kept_for_an_engine(self, tmp_path: Path) -> None:
        zckpt.convert(EXAMPLE, tmp_path / "weights", weights_only=True)
        run = tmp_path / "run"
        zckpt.reshard(tmp_path / "weights", run, weights_only=True, dp=2)
        groups = [parameter.group for parameter in zckpt.read(EXAMPLE).parameters.values()]
        parameters = zckpt.read(run).parameters.values()
        assert [parameter.group for parameter in parameters] == groups

    def test_records_that_are_read_twice_are_checked(self, tmp_path: Path) -> None:
        """Four threads read a master twice: for itself, and for the weight that is cast from it."""
        for place in range(20):
            report = zckpt.convert(EXAMPLE, tmp_path / str(place), dtype="fp16")
            assert report["records"]["unchecked"] == 0

    def test_dtype_keeps_the_optimizer_too(self, universal: Path, tmp_path: Path) -> None:
        zckpt.convert(EXAMPLE, tmp_path / "half", dtype="fp16")
        full, half = load(universal), load(tmp_path / "half")
        assert sorted(full) == sorted(half)
        assert half["fc1.weight/param"].dtype == torch.float16
        assert same_bits(half["fc1.weight/master"], full["fc1.weight/master"])


class TestOptions:
    @pytest.mark.parametrize("words", [["--dp", "8"], ["--stage", "3"], ["--optimizer", "torch"]])
    def test_options_without_a_meaning(
        self, words: list[str], tmp_path: Path, zckpt: Callable[..., Any]
    ) -> None:
        ended = zckpt("convert", EXAMPLE, tmp_path / "universal", *words)
        assert (ended.code, words[0] in ended.err) == (2, True)


def test_the_shell_of_a_manifest_has_room_for_its_checksum() -> None:
    """A target's size is reported before it is written."""
    source = zckpt.read(EXAMPLE)
    shells = {shell.name: shell for shell in write.lay_out(source, Options()).shells()}
    document = json.loads(shells["manifest.json"].parts[0][1])
    assert "crc32" not in document
    whole = write._formatted({**document, "crc32": "0123abcd"})
    assert shells["manifest.json"].size == len(whole)


def test_a_manifest_that_could_not_be_read_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit counts the checksums that come in the end."""
    zckpt.convert(EXAMPLE, tmp_path / "out")
    size = (tmp_path / "out" / "manifest.json").stat().st_size
    monkeypatch.setattr(write, "MAX_MANIFEST", size - len(write.CHECKSUM) - 100)
    with pytest.raises(UnsupportedCheckpoint, match=r"manifest\.json would have"):
        zckpt.convert(EXAMPLE, tmp_path / "again")
    assert not list(tmp_path.glob("again*"))
