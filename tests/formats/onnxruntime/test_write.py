"""ONNX Runtime's files as zckpt writes them: every key, type, shape and byte."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import zckpt
from zckpt import errors

from ...conftest import EXAMPLE, texts
from ...engines import onnxruntime_files as files
from ...engines.onnxruntime_files import FROZEN, make
from ...manifests import changed
from ..equality import load, same_bits
from .samples import (
    DATA,
    KINDS,
    LAMB,
    OPTIMIZERS,
    REAL,
    SIZES,
    engines,
)


def pairs() -> list[Any]:
    """Every dp to every dp, of every dialect, precision and optimizer; a few of each by default."""
    cases = []
    for place, (kind, optimizer) in enumerate(product(KINDS, OPTIMIZERS)):
        usual = (2, 3) if place % 4 in (0, 3) else (0, 0)
        for before, after in product(SIZES, SIZES):
            name = "-".join(map(str, (*kind, optimizer, before, after)))
            marks = engines((before, after) == usual)
            cases.append(pytest.param(kind, optimizer, before, after, id=name, marks=marks))
    return cases


@pytest.mark.parametrize(("kind", "optimizer", "before", "after"), pairs())
def test_what_is_written_is_what_the_rule_says(
    kind: tuple[str, str], optimizer: str, before: int, after: int, tmp_path: Path
) -> None:
    """Every key, type, shape and byte, of both dialects that are written."""
    dialect, precision = kind
    state = make(precision, optimizer, frozen=FROZEN)
    files.write(state, tmp_path / "source", before, dialect)
    source = tmp_path / "source"
    if (before + after) % 2:
        zckpt.convert(source, tmp_path / "universal")
        source = tmp_path / "universal"
    for target in ("hdf5", "l2"):
        if (precision, target, dialect) == ("bf16", "l2", "hdf5"):
            continue
        report = zckpt.reshard(source, tmp_path / target, dp=after, dialect=target)
        files.write(state, tmp_path / f"right {target}", after, target)
        assert files.differences(tmp_path / target, tmp_path / f"right {target}") == []
        lamb = optimizer == "Lamb" and before != after
        assert any(LAMB in warning for warning in texts(report["warnings"])) == lamb
        alone = zckpt.verify(tmp_path / target)
        assert (alone["equal"], alone["notes"]) == (True, [])
        assert zckpt.verify(tmp_path / target, source, gather=True, device="cpu")["equal"]


class TestWriting:
    def test_hdf5_is_the_default(self, tmp_path: Path) -> None:
        source = DATA / "legacy-post5478__fp16__adam__dp3"
        report = zckpt.reshard(source, tmp_path / "target", dp=2)
        assert report["files"] == ["checkpoint.rank0.ortcp", "checkpoint.rank1.ortcp"]
        report = zckpt.reshard(source, tmp_path / "one", dp=1)
        assert report["files"] == ["checkpoint.ortcp"]

    def test_names_of_legacy_files_tell_the_last_rank(self, tmp_path: Path) -> None:
        source = DATA / "hdf5__fp16__adam__dp3"
        report = zckpt.reshard(source, tmp_path / "target", dp=2, dialect="l2")
        names = ["ORT_checkpoint.ZeRO.0.1.ort.pt", "ORT_checkpoint.ZeRO.1.1.ort.pt"]
        assert report["files"] == names
        report = zckpt.reshard(source, tmp_path / "one", dp=1, dialect="l2")
        assert report["files"] == ["ORT_checkpoint.ort.pt"]

    def test_zips_are_whole(self, tmp_path: Path) -> None:
        source = DATA / "legacy-pre5478__fp16__adam__dp2"
        zckpt.reshard(source, tmp_path / "target", dp=3, dialect="l2")
        for path in (tmp_path / "target").iterdir():
            assert zipfile.ZipFile(path).testzip() is None

    @pytest.mark.parametrize("target", ["hdf5", "l2"])
    def test_weights_kept_in_fp32_stay_so(self, target: str, tmp_path: Path) -> None:
        state = make("fp16", kept=["layer.10.weight", "scale"], frozen=FROZEN)
        files.write(state, tmp_path / "source", 3, "l2")
        zckpt.convert(tmp_path / "source", tmp_path / "universal")
        zckpt.reshard(tmp_path / "universal", tmp_path / "target", dp=2, dialect=target)
        files.write(state, tmp_path / "right", 2, target)
        assert files.differences(tmp_path / "target", tmp_path / "right") == []

    @pytest.mark.parametrize("target", ["hdf5", "l2"])
    @pytest.mark.parametrize("precision", ["fp32", "fp16"])
    def test_weights_only(self, precision: str, target: str, tmp_path: Path) -> None:
        state = make(precision)
        files.write(state, tmp_path / "source", 3, "l2")
        zckpt.reshard(
            tmp_path / "source", tmp_path / "target", dp=2, dialect=target, weights_only=True
        )
        options: dict[str, Any] = {"without": "optimizer"}
        if target == "hdf5":
            options = {"optimizer": False, "info": False}
        files.write(state, tmp_path / "right", 2, target, **options)
        assert files.differences(tmp_path / "target", tmp_path / "right") == []

    def test_what_the_trainer_keeps_survives_universal_files(self, tmp_path: Path) -> None:
        zckpt.convert(REAL / "checkpoint.ortcp", tmp_path / "universal")
        zckpt.reshard(tmp_path / "universal", tmp_path / "again")
        (tmp_path / "right").mkdir()
        shutil.copy(REAL / "checkpoint.ortcp", tmp_path / "right")
        assert files.differences(tmp_path / "again", tmp_path / "right") == []

    @pytest.mark.parametrize("target", ["hdf5", "l2"])
    @pytest.mark.parametrize(
        ("before", "after"), [("fp32", "fp16"), ("fp16", "fp32"), ("bf16", "fp16")]
    )
    def test_another_precision(self, before: str, after: str, target: str, tmp_path: Path) -> None:
        state = make(before, frozen=FROZEN)
        files.write(state, tmp_path / "source", 2, "l2")
        zckpt.reshard(tmp_path / "source", tmp_path / "target", dp=3, dialect=target, dtype=after)
        state.precision = after
        files.write(state, tmp_path / "right", 3, target)
        assert files.differences(tmp_path / "target", tmp_path / "right") == []

    def test_offsets_are_aligned(self, tmp_path: Path) -> None:
        shapes = {f"w{place}": (place,) for place in range(1, 40)}
        files.write(make("fp16", shapes=shapes), tmp_path / "source", 2, "l2")
        zckpt.reshard(tmp_path / "source", tmp_path / "target", dp=3)
        manifest = zckpt.read(tmp_path / "target")
        for entry in manifest.entries.values():
            assert all(fragment.extent.offset % 64 == 0 for fragment in entry.fragments)

    @pytest.mark.parametrize(
        "words",
        [
            ["--stage", "2"],
            ["--optimizer", "torch"],
            ["--group-defaults", "lr=1"],
            ["--dialect", "l1"],
        ],
    )
    def test_options_without_a_meaning(
        self, words: list[str], zckpt: Callable[..., Any], tmp_path: Path
    ) -> None:
        source = DATA / "hdf5__fp16__adam__dp3"
        assert zckpt("reshard", source, tmp_path / "target", *words).code == 2

    @pytest.mark.parametrize("to", ["universal", "deepspeed", "deepspeed-universal"])
    def test_the_dialect_is_onnx_runtimes_alone(
        self, to: str, zckpt: Callable[..., Any], tmp_path: Path
    ) -> None:
        source = DATA / "hdf5__fp16__adam__dp3"
        words = ("convert", source, tmp_path / "target", "--to", to, "--dialect", "l2")
        assert zckpt(*words).code == 2

    def test_names_that_hdf5_files_cannot_hold(self, tmp_path: Path) -> None:
        files.write(make("fp16", shapes={"a/b": (70,)}), tmp_path / "source", 2, "l2")
        with pytest.raises(errors.UnsupportedCheckpoint) as caught:
            zckpt.reshard(tmp_path / "source", tmp_path / "target")
        assert "--dialect l2" in caught.value.hint
        zckpt.reshard(tmp_path / "source", tmp_path / "target", dialect="l2")
        assert files.differences(tmp_path / "source", tmp_path / "target") == []

    def test_a_sample_through_every_size_comes_back(self, tmp_path: Path) -> None:
        source = DATA / "hdf5__fp16__adam__dp3"
        latest = source
        for place, (dp, dialect) in enumerate(((8, "l2"), (1, "hdf5"), (2, "l2"), (3, "hdf5"))):
            zckpt.reshard(latest, tmp_path / str(place), dp=dp, dialect=dialect)
            latest = tmp_path / str(place)
        (tmp_path / "right").mkdir()
        for path in source.glob("*.ortcp"):
            shutil.copy(path, tmp_path / "right")
        assert files.differences(latest, tmp_path / "right") == []


class TestSteps:
    def test_before_the_first_update(self, tmp_path: Path) -> None:
        state = make("fp16", step=0)
        files.write(state, tmp_path / "source", 2, "l2")
        assert zckpt.read(tmp_path / "source").step == 0
        zckpt.reshard(tmp_path / "source", tmp_path / "again", dp=2, dialect="l2")
        assert files.differences(tmp_path / "again", tmp_path / "source") == []

    def test_weights_may_keep_their_own(self, tmp_path: Path) -> None:
        state = make("fp32")
        state.steps["scale"] = 2
        files.write(state, tmp_path / "source", 2, "hdf5", info=False)
        zckpt.convert(tmp_path / "source", tmp_path / "universal", step_policy="keep")
        for dialect in ("hdf5", "l2"):
            target = tmp_path / dialect
            report = zckpt.reshard(tmp_path / "universal", target, dp=3, dialect=dialect)
            assert any("--step-policy keep" in warning for warning in texts(report["warnings"]))
            files.write(state, tmp_path / f"right {dialect}", 3, dialect)
            assert files.differences(target, tmp_path / f"right {dialect}") == []

    def test_lamb_has_one_for_all(self, tmp_path: Path) -> None:
        state = make("fp32")
        state.steps["scale"] = 2
        files.write(state, tmp_path / "source", 2, "hdf5")
        zckpt.convert(tmp_path / "source", tmp_path / "universal", step_policy="keep")
        with changed(tmp_path / "universal") as manifest:
            manifest["optimizer"] = "Lamb"
        with pytest.raises(errors.InconsistentCheckpoint, match="one step for all"):
            zckpt.reshard(tmp_path / "universal", tmp_path / "target")


class TestFromOthers:
    def test_what_has_no_place_is_named(self, tmp_path: Path) -> None:
        report = zckpt.convert(EXAMPLE, tmp_path / "ort", to="onnxruntime", dp=3)
        omitted = " ".join(texts(report["left_out"]))
        for word in ("hyper-parameters", "tied", "head.weight"):
            assert word in omitted
        manifest = zckpt.read(tmp_path / "ort")
        assert (manifest.step, manifest.dp, manifest.optimizer) == (7, 3, "Adam")
        zckpt.convert(tmp_path / "ort", tmp_path / "again")
        zckpt.convert(EXAMPLE, tmp_path / "universal")
        one, other = load(tmp_path / "universal"), load(tmp_path / "again")
        for name, tensor in one.items():
            if name.endswith(("/master", "/exp_avg", "/exp_avg_sq")):
                assert same_bits(tensor, other[name]), name

    def test_another_optimizer_is_refused(self, tmp_path: Path) -> None:
        zckpt.convert(EXAMPLE, tmp_path / "universal")
        with changed(tmp_path / "universal") as manifest:
            manifest["optimizer"] = "NAdam"
        with pytest.raises(errors.WrongOption, match="Adam and Lamb"):
            zckpt.convert(tmp_path / "universal", tmp_path / "ort", to="onnxruntime")
        zckpt.convert(tmp_path / "universal", tmp_path / "ort", to="onnxruntime", weights_only=True)
