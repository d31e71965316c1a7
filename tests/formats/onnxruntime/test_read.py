"""ONNX Runtime's checkpoints: genuine and rebuilt sets, every dialect, what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor

import zckpt
from zckpt import errors

from ...conftest import texts
from ...engines import onnxruntime_files as files
from ...engines.onnxruntime_files import FROZEN, make, owned
from ..contract import FormatContract
from ..equality import assert_proven
from .samples import (
    DATA,
    KINDS,
    OPTIMIZERS,
    REAL,
    SETS,
    SIZES,
    assert_is,
    assert_reads,
    edit,
    engines,
    expected_of,
    sizes,
    state_of,
)


@pytest.mark.parametrize("name", SETS)
class TestSamples:
    def test_are_read_exactly(self, name: str, tmp_path: Path) -> None:
        report = assert_reads(DATA / name, expected_of(DATA / name), tmp_path)
        assert (report["warnings"], report["left_out"]) == ([], [])
        if "legacy" in name:
            assert report["records"]["unchecked"] == 0

    def test_records_without_checksums_are_counted(self, name: str) -> None:
        records = zckpt.verify(DATA / name)["records"]
        assert records["unchecked" if "hdf5" in name else "checked"]
        assert not records["checked" if "hdf5" in name else "unchecked"]

    def test_are_what_the_generator_makes(self, name: str, tmp_path: Path) -> None:
        """Its partition, names and types are those of sets that ORT's aggregators have judged."""
        case = json.loads((DATA / name / "case.json").read_text())
        dialect = {"hdf5": "hdf5", "legacy-pre5478": "l1", "legacy-post5478": "l2"}[case["format"]]
        files.write(state_of(DATA / name), tmp_path / "source", case["dp"], dialect)
        sample = tmp_path / "sample"
        sample.mkdir()
        for file in case["files"]:
            shutil.copy(DATA / name / file, sample)
        wrong = files.differences(tmp_path / "source", sample)
        stale = ("head.weight",) if dialect == "l1" else ()  # but for the owners' parts
        assert [
            key for key in wrong if not key.endswith(tuple(f": {name}" for name in stale))
        ] == []


class TestGenuine:
    """Files that onnxruntime-training 1.16.3 wrote on a CPU."""

    @pytest.mark.parametrize("name", ["checkpoint.ortcp", "ORT_checkpoint.ort.pt"])
    def test_is_read_exactly(self, name: str, tmp_path: Path) -> None:
        assert_reads(REAL / name, expected_of(REAL), tmp_path)
        assert zckpt.read(REAL / name).optimizer == "Adam"

    def test_weights_only(self, tmp_path: Path) -> None:
        zckpt.convert(REAL / "checkpoint_weights_only.ortcp", tmp_path / "read")
        expected = {n: t for n, t in expected_of(REAL).items() if n.endswith("/param")}
        assert_is(tmp_path / "read", expected, None)
        assert_proven(REAL / "checkpoint_weights_only.ortcp", tmp_path / "read", harmless=())

    def test_what_is_no_tensor(self) -> None:
        state = zckpt.read(REAL / "checkpoint.ortcp").state
        assert state["train_step_info"] == {"optimization_step": 5, "step": 5}
        assert state["user_dict"].startswith("8004")  # a pickle as text, never opened
        assert state["trainer_options"]["optimizer_name"] == "AdamOptimizer"


class TestContractLegacy(FormatContract):
    format = "onnxruntime"

    @pytest.fixture(
        params=["legacy-pre5478__fp16__adam__dp2", "legacy-post5478__fp32__adam__dp2", "lamb"]
    )
    def checkpoint(self, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
        if request.param == "lamb":
            state = make("bf16", "Lamb", frozen=FROZEN, kept=["scale", "layer.10.weight"])
            return files.write(state, tmp_path / "lamb", 3, "l2", user={"epoch": 3})
        return Path(shutil.copytree(DATA / request.param, tmp_path / "checkpoint"))


class TestContractHdf5(FormatContract):
    format = "onnxruntime"

    @pytest.fixture(params=["hdf5__fp16__lamb__dp2", "hdf5__fp32__adam__dp2"])
    def checkpoint(self, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
        return Path(shutil.copytree(DATA / request.param, tmp_path / "checkpoint"))

    def test_inspect_needs_neither_torch_nor_numpy(
        self, checkpoint: Path, zckpt_without: Callable[..., Any]
    ) -> None:
        ended = zckpt_without(("torch", "deepspeed", "safetensors"), "inspect", checkpoint)
        assert (ended.code, ended.err) == (0, "")  # h5py itself needs numpy


@pytest.mark.parametrize(
    ("kind", "optimizer", "dp"),
    [
        pytest.param(kind, optimizer, dp, marks=engines(dp == 3), id=f"{kind}-{optimizer}-{dp}")
        for kind, optimizer, dp in product(KINDS, OPTIMIZERS, SIZES)
    ],
)
def test_every_dialect_is_read_exactly(
    kind: tuple[str, str], optimizer: str, dp: int, tmp_path: Path
) -> None:
    dialect, precision = kind
    state = make(precision, optimizer, frozen=FROZEN)
    files.write(state, tmp_path / "source", dp, dialect)
    assert_reads(tmp_path / "source", state.expected(halves=dialect in ("l1", "l2")), tmp_path)


class TestVariants:
    @pytest.mark.parametrize("dp", sizes(1, 3))
    @pytest.mark.parametrize("dialect", ["l1", "l2", "hdf5"])
    def test_weights_kept_in_fp32(self, dialect: str, dp: int, tmp_path: Path) -> None:
        """All ranks hold them whole, their moments are split; ORT's own reader fails on these."""
        state = make("fp16", kept=["layer.10.weight", "Emb.weight", "scale"], frozen=FROZEN)
        files.write(state, tmp_path / "source", dp, dialect)
        if (dialect, dp) == ("hdf5", 1):  # one file does not distinguish them from others
            state.kept = frozenset()
        assert_reads(tmp_path / "source", state.expected(halves=dialect != "hdf5"), tmp_path)

    @pytest.mark.parametrize("dialect", ["l1", "l2", "hdf5"])
    @pytest.mark.parametrize("precision", ["fp32", "fp16"])
    def test_weights_only(self, dialect: str, precision: str, tmp_path: Path) -> None:
        state = make(precision, frozen=FROZEN)
        for dp in SIZES:
            folder = tmp_path / f"source{dp}"
            if dialect == "hdf5":
                files.write(state, folder, dp, dialect, optimizer=False, info=False)
            else:
                files.write(state, folder, dp, dialect, without="optimizer")
            zckpt.convert(folder, tmp_path / f"read{dp}")
            expected = state.expected(halves=dialect != "hdf5", moments=False)
            if (dialect, precision, dp) == ("hdf5", "fp16", 1):  # nothing states which are frozen
                expected = {n.replace("/param", "/master"): t for n, t in expected.items()}
            assert_is(tmp_path / f"read{dp}", expected, None)
            if (dialect, precision) != ("l1", "fp16") or dp == 1:
                assert_proven(folder, tmp_path / f"read{dp}", harmless=())

    @pytest.mark.parametrize(
        ("dialect", "old_front_end"),
        [("l1", False), ("l2", False), ("hdf5", False), ("l2", True), ("l1", True)],
    )
    def test_weights_only_with_some_kept_in_fp32(
        self, dialect: str, old_front_end: bool, tmp_path: Path
    ) -> None:
        """What the ranks hold shows which of the other weights take part in the partition."""
        state = make("fp16", kept=["layer.10.weight", "scale"], frozen={"frozen": (2,)})
        state.weights["frozen"] = state.frozen.pop("frozen")  # as if all took part
        state.moments["Moment_1"]["frozen"] = state.moments["Moment_2"]["frozen"] = torch.ones(2)
        state.steps["frozen"], state.kept = 5, state.kept | {"frozen"}
        state.initial["frozen"] = torch.ones(2)
        options: dict[str, Any] = {"optimizer": False, "info": False}
        if dialect != "hdf5":
            options = {"without": "optimizer", "old_front_end": old_front_end}
        files.write(state, tmp_path / "source", 3, dialect, **options)
        if (dialect, old_front_end) == ("l1", True):  # all ranks hold all: nothing shows it
            with pytest.raises(errors.InconsistentCheckpoint, match="rounded masters"):
                zckpt.convert(tmp_path / "source", tmp_path / "read")
            return
        zckpt.convert(tmp_path / "source", tmp_path / "read")
        expected = state.expected(halves=dialect != "hdf5", moments=False)
        assert_is(tmp_path / "read", expected, None)
        if dialect != "l1" and not old_front_end:
            assert_proven(tmp_path / "source", tmp_path / "read", harmless=())

    @pytest.mark.parametrize("dialect", ["l1", "l2", "hdf5", "december"])
    def test_fp16_moments(self, dialect: str, tmp_path: Path) -> None:
        state = make("fp16", moments=torch.float16)
        files.write(state, tmp_path / "source", 3, dialect)
        halves = dialect in ("l1", "l2")
        assert_reads(tmp_path / "source", state.expected(halves=halves), tmp_path)
        zckpt.reshard(tmp_path / "source", tmp_path / "again", dp=2)
        files.write_hdf5(state, tmp_path / "right", 2, info=dialect == "hdf5")
        wrong = files.differences(tmp_path / "again", tmp_path / "right")
        assert [key for key in wrong if "train_step_info" not in key] == []

    @pytest.mark.parametrize("dialect", ["l1", "l2", "hdf5"])
    def test_slashes_in_names(self, dialect: str, tmp_path: Path) -> None:
        shapes = {"block/0/weight": (9, 11), "block/1": (40,), "a/Moment_1": (7,), "z": (30, 3)}
        state = make("fp16", shapes=shapes, frozen={"fixed/table": (3, 3)})
        files.write(state, tmp_path / "source", 3, dialect)
        assert_reads(tmp_path / "source", state.expected(halves=dialect != "hdf5"), tmp_path)

    @pytest.mark.parametrize(("dialect", "precision"), KINDS)
    def test_names_that_look_like_keys(self, dialect: str, precision: str, tmp_path: Path) -> None:
        """Weights that ORT's own readers take for something else."""
        names = ("x_view_1", "Step_scale", "Moment_1_w", "Update_Count_w", "a_fp16", "b_view_0_c")
        shapes = dict.fromkeys(names, (37,))
        state = make(precision, shapes=shapes)
        files.write(state, tmp_path / "source", 3, dialect)
        halves = dialect in ("l1", "l2")
        assert_reads(tmp_path / "source", state.expected(halves=halves), tmp_path)

    def test_ranks_that_own_nothing(self, tmp_path: Path) -> None:
        state = make("fp16", shapes={"w": (8, 8)})
        assert owned(state.weights, 8)[7] == {}
        for dialect in ("l2", "hdf5"):
            files.write(state, tmp_path / dialect, 8, dialect)
            halves = dialect == "l2"
            assert_reads(tmp_path / dialect, state.expected(halves=halves), tmp_path)


class TestRefused:
    """Each with a named reason and exit code 1."""

    def test_a_renamed_rank(self, refused: Any, tmp_path: Path) -> None:
        """A copy of rank 1, named as rank 2, does not hold what rank 2 owns."""
        folder = files.write(make("fp32"), tmp_path / "source", 3, "l2")
        name = "ORT_checkpoint.ZeRO.{}.2.ort.pt"
        shutil.copy(folder / name.format(1), folder / name.format(2))
        refused("InconsistentCheckpoint", "2.2.ort.pt was saved as ORT_checkpoint.ZeRO.1.2.ort.pt")
        files.write(make("fp32"), folder, 3, "l2", zipped=False)  # says nothing of names
        shutil.copy(folder / name.format(1), folder / name.format(2))
        refused("InconsistentCheckpoint", "partition over 3 ranks", "twice")

    @pytest.mark.parametrize(
        ("zipped", "said"),
        [(True, "was saved as ORT_checkpoint.ZeRO.0.2.ort.pt"), (False, "partition over 2 ranks")],
    )
    def test_ranks_renamed_to_fewer(
        self, zipped: bool, said: str, refused: Any, tmp_path: Path
    ) -> None:
        folder = files.write(make("fp32"), tmp_path / "source", 3, "l2", zipped=zipped)
        for rank in (0, 1):
            (folder / f"ORT_checkpoint.ZeRO.{rank}.2.ort.pt").rename(
                folder / f"ORT_checkpoint.ZeRO.{rank}.1.ort.pt"
            )
        (folder / "ORT_checkpoint.ZeRO.2.2.ort.pt").unlink()
        refused("InconsistentCheckpoint", said)

    @pytest.mark.parametrize("dialect", ["l1", "l2", "hdf5"])
    def test_counters_differ_across_weights(
        self, dialect: str, refused: Any, tmp_path: Path
    ) -> None:
        state = make("fp16")
        state.steps["scale"] = 4
        files.write(state, tmp_path / "source", 2, dialect)
        refused("InconsistentCheckpoint", "Update_Count of scale", "--step-policy")
        for policy, step in (("max", 5), ("min", 4), ("9", 9)):
            assert zckpt.read(tmp_path / "source", step_policy=policy).step == step
        kept = zckpt.read(tmp_path / "source", step_policy="keep").parameters
        assert (kept["scale"].step, kept["Emb.weight"].step) == (4, 5)

    @pytest.mark.parametrize("policy", [None, "keep"])
    def test_counters_of_one_weight_differ_across_ranks(
        self, policy: str | None, tmp_path: Path
    ) -> None:
        folder = files.write(make("fp16"), tmp_path / "source", 2, "l2")
        split = next(n for n in owned(make().weights, 2)[0] if n in owned(make().weights, 2)[1])

        def change(model: dict[str, Tensor]) -> None:
            model[f"Update_Count_{split}_view_1"] += 1

        edit(folder / "ORT_checkpoint.ZeRO.1.1.ort.pt", change)
        with pytest.raises(errors.InconsistentCheckpoint, match="rank 1"):
            zckpt.read(folder, step_policy=policy)

    def test_lambs_step_differs(self, refused: Any, tmp_path: Path) -> None:
        refused("InconsistentCheckpoint", "5", "6", path=DATA / "bad__legacy-post5478__step-skew")
        folder = files.write(make("fp16", "Lamb"), tmp_path / "source", 3, "hdf5")
        with h5py.File(folder / "checkpoint.rank2.ortcp", "a") as file:
            file["optimizer/shared_optimizer_state/Step"][...] = 7
        refused("InconsistentCheckpoint", "6 (checkpoint.rank2.ortcp: Step, rank 2)")

    @pytest.mark.parametrize("zipped", [True, False])
    def test_weights_differ_between_ranks(self, zipped: bool, refused: Any, tmp_path: Path) -> None:
        folder = files.write(
            make("fp32", frozen=FROZEN), tmp_path / "source", 3, "l2", zipped=zipped
        )
        path = folder / "ORT_checkpoint.ZeRO.2.2.ort.pt"
        contents = torch.load(path, weights_only=True)
        contents["model"]["frozen.weight"][4, 6] += 1
        torch.save(contents, path, _use_new_zipfile_serialization=zipped)
        refused("InconsistentCheckpoint", "frozen.weight", "ZeRO.2.2")

    def test_weights_differ_between_hdf5_ranks(self, refused: Any, tmp_path: Path) -> None:
        folder = files.write(make("fp32"), tmp_path / "source", 3, "hdf5")
        with h5py.File(folder / "checkpoint.rank1.ortcp", "a") as file:
            file["model/full_precision/head.weight"][11, 2] += 1
        refused("InconsistentCheckpoint", "head.weight", "rank1")

    def test_16_bit_copies_differ_between_ranks(self, refused: Any, tmp_path: Path) -> None:
        folder = files.write(make("fp16"), tmp_path / "source", 3, "l2")
        path = folder / "ORT_checkpoint.ZeRO.1.2.ort.pt"
        edit(path, lambda model: model["head.weight_fp16"].mul_(2))
        refused("InconsistentCheckpoint", "head.weight")

    @pytest.mark.parametrize("precision", ["fp16", "bf16"])
    def test_a_stale_master(self, precision: str, refused: Any, tmp_path: Path) -> None:
        state = make(precision)
        folder = files.write(state, tmp_path / "source", 3, "l1")
        rank = next(r for r, names in enumerate(owned(state.weights, 3)) if "layer.2.bias" in names)

        def change(model: dict[str, Tensor]) -> None:
            model["layer.2.bias"] += 0.25

        edit(folder / f"ORT_checkpoint.ZeRO.{rank}.2.ort.pt", change)
        refused("InconsistentCheckpoint", "layer.2.bias", "is not its rounded master")
        report = zckpt.convert(folder, tmp_path / "accepted", accept_weights=True)
        assert ["rounded master" in line for line in texts(report["warnings"])] == [True]

    @pytest.mark.parametrize("precision", ["fp32", "fp16"])
    def test_a_flipped_bit_is_said_to_be_one(
        self, precision: str, refused: Any, tmp_path: Path
    ) -> None:
        state = make(precision)
        folder = files.write(state, tmp_path / "source", 2, "l2")
        path = folder / "ORT_checkpoint.ZeRO.0.1.ort.pt"
        data = bytearray(path.read_bytes())
        data[data.index(state.weights["conv.weight"].numpy().tobytes()) + 3] ^= 1
        path.write_bytes(data)
        refused("CorruptCheckpoint", "CRC-32")

    def test_nan_and_infinity_are_no_stale_masters(self, tmp_path: Path) -> None:
        state = make("fp16")
        state.weights["head.weight"][0] = torch.tensor([torch.nan, torch.inf, 1e6])
        files.write(state, tmp_path / "source", 3, "l2")
        zckpt.convert(tmp_path / "source", tmp_path / "read")

    def test_a_lost_weight(self, refused: Any, tmp_path: Path) -> None:
        folder = files.write(make("fp32"), tmp_path / "source", 2, "l2")
        edit(folder / "ORT_checkpoint.ZeRO.1.1.ort.pt", lambda model: model.pop("Emb.weight"))
        refused("IncompleteCheckpoint", "Emb.weight")

    def test_lost_moments(self, refused: Any, tmp_path: Path) -> None:
        folder = files.write(make("fp16"), tmp_path / "source", 2, "hdf5")
        with h5py.File(folder / "checkpoint.rank0.ortcp", "a") as file:
            del file["optimizer/Emb.weight/Moment_2"]
        refused("IncompleteCheckpoint", "Moment_2 of Emb.weight", "rank 0")

    def test_lost_counters(self, refused: Any, tmp_path: Path) -> None:
        folder = files.write(make("fp16"), tmp_path / "source", 2, "hdf5")
        with h5py.File(folder / "checkpoint.rank0.ortcp", "a") as file:
            del file["optimizer/Emb.weight/Update_Count"]
        refused("IncompleteCheckpoint", "Update_Count of Emb.weight")

    @pytest.mark.parametrize("dialect", ["l2", "hdf5"])
    def test_short_files(self, dialect: str, zckpt: Callable[..., Any], tmp_path: Path) -> None:
        folder = files.write(make("fp16"), tmp_path / "source", 2, dialect)
        path = sorted(folder.iterdir())[1]
        data = path.read_bytes()
        for length in (0, 7, 100, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:length])
            ended = zckpt("convert", folder, tmp_path / "target", "--json")
            assert ended.code == 1, length
            assert ended.document["error"] in (
                "CorruptCheckpoint",
                "IncompleteCheckpoint",
            ), ended.document

    @pytest.mark.parametrize("dialect", ["l1", "l2", "hdf5"])
    def test_flipped_bytes_are_never_an_internal_error(self, dialect: str, tmp_path: Path) -> None:
        folder = files.write(make("fp16"), tmp_path / "source", 2, dialect)
        path = sorted(folder.iterdir())[0]
        data = path.read_bytes()
        draw = np.random.default_rng(5)
        for _ in range(30):
            damaged = bytearray(data)
            for place in draw.integers(0, min(len(data), 20000), 3):
                damaged[place] ^= 1 << int(draw.integers(8))
            path.write_bytes(damaged)
            try:
                zckpt.convert(folder, tmp_path / "target")
            except errors.ZckptError:
                continue
            shutil.rmtree(tmp_path / "target")


class TestSteps:
    def test_stored_counters_are_one_more(self) -> None:
        manifest = zckpt.read(DATA / "hdf5__fp16__adam__dp3")
        assert manifest.step == 5
        true = [line for line in manifest.run.steps if line.truth]
        assert len(true) == 8  # six weights, two of which two ranks share
        assert {line.step for line in true} == {5}

    def test_the_trainers_own_are_listed(self) -> None:
        manifest = zckpt.read(REAL / "checkpoint.ortcp")
        counters = {line.where: line.step for line in manifest.run.steps if not line.truth}
        assert counters == {"train_step_info, optimization_step": 5, "train_step_info, step": 5}
