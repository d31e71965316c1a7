"""ONNX Runtime's checkpoints: genuine and rebuilt sets, every dialect, what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

import zckpt
from zckpt import errors
from zckpt.core.manifest import Entry, Runs
from zckpt.formats.onnxruntime import partition
from zckpt.formats.onnxruntime.read import _Tensors

from ...conftest import EXAMPLE, ROOT
from ...engines import deepspeed
from ...engines import onnxruntime_files as files
from ...engines.cases import Case
from ...engines.onnxruntime_files import FROZEN, State, make, owned
from ...proof.test_allgather import check_broken_reader
from ..contract import FormatContract
from ..equality import assert_proven, load, plain, same_bits

DATA = ROOT / "tests" / "data" / "onnxruntime"
REAL = DATA / "real-ort-1.16.3__fp32__adam__dp1"
SIZES = (1, 2, 3, 4, 8)
SETS = sorted(path.name for path in DATA.iterdir() if path.name.startswith(("hdf5", "legacy")))
KINDS = [
    ("l1", "fp32"),
    ("l1", "fp16"),
    ("l1", "bf16"),
    ("l2", "fp32"),
    ("l2", "fp16"),
    ("l2", "bf16"),
    ("hdf5", "fp32"),
    ("hdf5", "fp16"),
    ("december", "fp32"),
    ("december", "fp16"),
]
OPTIMIZERS = ("Adam", "Lamb")
LAMB = "exact in state, not in trajectory"


def sizes(*usual: int) -> list[Any]:
    """All data-parallel sizes, some of them in the default run."""
    return [pytest.param(dp, marks=engines(dp in usual)) for dp in SIZES]


def engines(first: bool) -> list[Any]:
    """Marks of the full matrix, of which some cases are of the default run too."""
    return [pytest.mark.engines, *([pytest.mark.first] if first else [])]


def expected_of(folder: Path) -> dict[str, Tensor]:
    """A sample's tensors by `parameter/slot`; an fp32 run's weights are what the module holds."""
    fp32 = "fp32" in folder.name
    renamed = {"master": "param" if fp32 else "master", "model16": "param"}
    found = {}
    for key, tensor in load_file(folder / "expected.safetensors").items():
        slot, _, name = key.partition("/")
        if not (slot == "model16" and "hdf5" in folder.name):  # these store no 16-bit copies
            found[f"{name}/{renamed.get(slot, slot)}"] = tensor
    return found


def assert_is(universal: Path, expected: dict[str, Tensor], step: int | None = 5) -> None:
    held = load(universal)
    assert sorted(held) == sorted(expected)
    assert [name for name in expected if not same_bits(held[name], expected[name])] == []
    assert json.loads((universal / "manifest.json").read_text())["step"] == step


def assert_reads(folder: Path, expected: dict[str, Tensor], tmp_path: Path) -> dict[str, Any]:
    report: dict[str, Any] = zckpt.convert(folder, tmp_path / "read")
    assert_is(tmp_path / "read", expected)
    assert_proven(folder, tmp_path / "read", harmless=())
    shutil.rmtree(tmp_path / "read")
    return report


def state_of(folder: Path) -> State:
    """The state of which a sample was made."""
    told = json.loads((folder / "case.json").read_text())
    held = load_file(folder / "expected.safetensors")

    def slot(name: str) -> dict[str, Tensor]:
        return {key.partition("/")[2]: t for key, t in held.items() if key.startswith(f"{name}/")}

    return State(
        told["precision"],
        told["optimizer"].removesuffix("Optimizer"),
        slot("master"),
        {"Moment_1": slot("exp_avg"), "Moment_2": slot("exp_avg_sq")},
        dict.fromkeys(slot("master"), told["completed_steps"]),
        initial=slot("master"),
    )


# -- the partition rule


@given(st.lists(st.integers(0, 300), min_size=1, max_size=12), st.integers(1, 9))
def test_the_rule_is_that_of_the_generator(numels: list[int], dp: int) -> None:
    weights = {f"w{place}.{numel}": torch.zeros(numel) for place, numel in enumerate(numels)}
    ranks = owned(weights, dp)
    for name, shares in partition.shares({n: w.numel() for n, w in weights.items()}, dp).items():
        told = {share.rank: (share.start, share.stop) for share in shares if share.stop}
        assert told == {rank: held[name] for rank, held in enumerate(ranks) if name in held}
        for share in shares if len(shares) > 1 else ():
            suffix = files.view(name, share.start, share.stop, weights[name].numel())
            assert suffix == f"_view_{share.view}"


@pytest.mark.parametrize(("total", "dp", "width"), [(564, 8, 96), (64, 2, 64), (63, 2, 32)])
def test_a_total_that_fills_its_blocks_gets_another(total: int, dp: int, width: int) -> None:
    assert partition.per_rank(total, dp) == width


def test_names_are_sorted_as_bytes() -> None:
    names = ["layer.2", "layer.10", "head", "Emb", "é", "z"]
    assert partition.by_name(names) == ["Emb", "head", "layer.10", "layer.2", "z", "é"]


# -- reading


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
        told = json.loads((DATA / name / "case.json").read_text())
        dialect = {"hdf5": "hdf5", "legacy-pre5478": "l1", "legacy-post5478": "l2"}[told["format"]]
        files.write(state_of(DATA / name), tmp_path / "made", told["dp"], dialect)
        sample = tmp_path / "sample"
        sample.mkdir()
        for file in told["files"]:
            shutil.copy(DATA / name / file, sample)
        told = files.differences(tmp_path / "made", sample)
        stale = ("head.weight",) if dialect == "l1" else ()  # but for the owners' parts
        assert [key for key in told if not key.endswith(tuple(f": {name}" for name in stale))] == []


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

    def test_three_in_one_folder_are_listed(self) -> None:
        with pytest.raises(errors.AmbiguousCheckpoint) as caught:
            zckpt.read(REAL)
        for name in ("checkpoint.ortcp", "checkpoint_weights_only.ortcp", "ORT_checkpoint.ort.pt"):
            assert name in caught.value.message
        assert "name the file" in caught.value.hint

    def test_what_is_no_tensor(self) -> None:
        state = zckpt.read(REAL / "checkpoint.ortcp").state
        assert state["train_step_info"] == {"optimization_step": 5, "step": 5}
        assert state["user_dict"].startswith("8004")  # a pickle as text, never opened
        assert state["trainer_options"]["optimizer_name"] == "AdamOptimizer"

    def test_of_any_name(self, tmp_path: Path) -> None:
        shutil.copy(REAL / "checkpoint.ortcp", tmp_path / "model")
        shutil.copy(REAL / "ORT_checkpoint.ort.pt", tmp_path / "another")
        assert zckpt.read(tmp_path / "model").source["dialect"] == "hdf5"
        assert zckpt.read(tmp_path / "another").source["dialect"] == "l2"


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
    files.write(state, tmp_path / "made", dp, dialect)
    assert_reads(tmp_path / "made", state.expected(halves=dialect in ("l1", "l2")), tmp_path)


class TestVariants:
    @pytest.mark.parametrize("dp", sizes(1, 3))
    @pytest.mark.parametrize(("dialect", "precision"), [("l1", "fp16"), ("l2", "fp16")])
    def test_old_front_end(self, dialect: str, precision: str, dp: int, tmp_path: Path) -> None:
        """It adds stale weights, even beside the current pieces."""
        state = make(precision, frozen=FROZEN)
        files.write(state, tmp_path / "made", dp, dialect, old_front_end=True)
        assert_reads(tmp_path / "made", state.expected(), tmp_path)

    @pytest.mark.parametrize("dp", sizes(1, 3))
    @pytest.mark.parametrize("dialect", ["l1", "l2", "hdf5"])
    def test_weights_kept_in_fp32(self, dialect: str, dp: int, tmp_path: Path) -> None:
        """All ranks hold them whole, their moments are split; ORT's own reader fails on these."""
        state = make("fp16", kept=["layer.10.weight", "Emb.weight", "scale"], frozen=FROZEN)
        files.write(state, tmp_path / "made", dp, dialect)
        if (dialect, dp) == ("hdf5", 1):  # one file does not tell them from others
            state.kept = frozenset()
        assert_reads(tmp_path / "made", state.expected(halves=dialect != "hdf5"), tmp_path)

    @pytest.mark.parametrize("dialect", ["l1", "l2", "hdf5"])
    @pytest.mark.parametrize("precision", ["fp32", "fp16"])
    def test_weights_only(self, dialect: str, precision: str, tmp_path: Path) -> None:
        state = make(precision, frozen=FROZEN)
        for dp in SIZES:
            made = tmp_path / f"made{dp}"
            if dialect == "hdf5":
                files.write(state, made, dp, dialect, optimizer=False, info=False)
            else:
                files.write(state, made, dp, dialect, without="optimizer")
            zckpt.convert(made, tmp_path / f"read{dp}")
            expected = state.expected(halves=dialect != "hdf5", moments=False)
            if (dialect, precision, dp) == ("hdf5", "fp16", 1):  # which are frozen is not told
                expected = {n.replace("/param", "/master"): t for n, t in expected.items()}
            assert_is(tmp_path / f"read{dp}", expected, None)
            if (dialect, precision) != ("l1", "fp16") or dp == 1:
                assert_proven(made, tmp_path / f"read{dp}", harmless=())

    @pytest.mark.parametrize(
        ("dialect", "old_front_end"),
        [("l1", False), ("l2", False), ("hdf5", False), ("l2", True), ("l1", True)],
    )
    def test_weights_only_with_some_kept_in_fp32(
        self, dialect: str, old_front_end: bool, tmp_path: Path
    ) -> None:
        """Which of the others take part in the partition only the ranks' holdings tell."""
        state = make("fp16", kept=["layer.10.weight", "scale"], frozen={"frozen": (2,)})
        state.weights["frozen"] = state.frozen.pop("frozen")  # as if all took part
        state.moments["Moment_1"]["frozen"] = state.moments["Moment_2"]["frozen"] = torch.ones(2)
        state.steps["frozen"], state.kept = 5, state.kept | {"frozen"}
        state.initial["frozen"] = torch.ones(2)
        options: dict[str, Any] = {"optimizer": False, "info": False}
        if dialect != "hdf5":
            options = {"without": "optimizer", "old_front_end": old_front_end}
        files.write(state, tmp_path / "made", 3, dialect, **options)
        if (dialect, old_front_end) == ("l1", True):  # all ranks hold all, so nothing tells
            with pytest.raises(errors.InconsistentCheckpoint, match="stale"):
                zckpt.convert(tmp_path / "made", tmp_path / "read")
            return
        zckpt.convert(tmp_path / "made", tmp_path / "read")
        expected = state.expected(halves=dialect != "hdf5", moments=False)
        assert_is(tmp_path / "read", expected, None)
        if dialect != "l1" and not old_front_end:
            assert_proven(tmp_path / "made", tmp_path / "read", harmless=())

    @pytest.mark.parametrize("dialect", ["l1", "l2", "hdf5", "december"])
    def test_fp16_moments(self, dialect: str, tmp_path: Path) -> None:
        state = make("fp16", moments=torch.float16)
        files.write(state, tmp_path / "made", 3, dialect)
        halves = dialect in ("l1", "l2")
        assert_reads(tmp_path / "made", state.expected(halves=halves), tmp_path)
        zckpt.reshard(tmp_path / "made", tmp_path / "again", dp=2)
        files.write_hdf5(state, tmp_path / "right", 2, info=dialect == "hdf5")
        told = files.differences(tmp_path / "again", tmp_path / "right")
        assert [key for key in told if "train_step_info" not in key] == []

    @pytest.mark.parametrize("dialect", ["l1", "l2"])
    def test_torch_before_1_6(self, dialect: str, tmp_path: Path) -> None:
        state = make("fp16", frozen=FROZEN)
        files.write(state, tmp_path / "made", 3, dialect, zipped=False, user={"note": "hello"})
        assert not zipfile.is_zipfile(tmp_path / "made" / "ORT_checkpoint.ZeRO.0.2.ort.pt")
        report = assert_reads(tmp_path / "made", state.expected(), tmp_path)
        assert report["records"]["checked"] == 0

    @pytest.mark.parametrize("dialect", ["l1", "l2", "hdf5"])
    def test_slashes_in_names(self, dialect: str, tmp_path: Path) -> None:
        shapes = {"block/0/weight": (9, 11), "block/1": (40,), "a/Moment_1": (7,), "z": (30, 3)}
        state = make("fp16", shapes=shapes, frozen={"fixed/table": (3, 3)})
        files.write(state, tmp_path / "made", 3, dialect)
        assert_reads(tmp_path / "made", state.expected(halves=dialect != "hdf5"), tmp_path)

    @pytest.mark.parametrize(("dialect", "precision"), KINDS)
    def test_names_that_look_like_keys(self, dialect: str, precision: str, tmp_path: Path) -> None:
        """Weights that ORT's own readers take for something else."""
        names = ("x_view_1", "Step_scale", "Moment_1_w", "Update_Count_w", "a_fp16", "b_view_0_c")
        shapes = dict.fromkeys(names, (37,))
        state = make(precision, shapes=shapes)
        files.write(state, tmp_path / "made", 3, dialect)
        halves = dialect in ("l1", "l2")
        assert_reads(tmp_path / "made", state.expected(halves=halves), tmp_path)

    def test_bare_dictionary(self, tmp_path: Path) -> None:
        state = make("fp16")
        files.write(state, tmp_path / "made", 2, "l2", bare=True)
        assert_reads(tmp_path / "made", state.expected(), tmp_path)

    def test_a_dictionary_of_the_user(self, tmp_path: Path) -> None:
        state = make("fp16")
        user = {"epoch": 3, "rng": torch.arange(4), "names": ("a", {"b": 1.5})}
        files.write(state, tmp_path / "made", 2, "l2", user=user)
        held = zckpt.read(tmp_path / "made").state["client_state"]
        assert (held["epoch"], held["names"]) == (3, ("a", {"b": 1.5}))
        zckpt.reshard(tmp_path / "made", tmp_path / "again", dp=3, dialect="l2")
        for path in (tmp_path / "again").iterdir():
            again = torch.load(path, weights_only=True)
            assert (again["epoch"], again["names"]) == (3, ("a", {"b": 1.5}))
            assert again["rng"].tolist() == [0, 1, 2, 3]

    def test_ranks_that_own_nothing(self, tmp_path: Path) -> None:
        state = make("fp16", shapes={"w": (8, 8)})
        assert owned(state.weights, 8)[7] == {}
        for dialect in ("l2", "hdf5"):
            files.write(state, tmp_path / dialect, 8, dialect)
            halves = dialect == "l2"
            assert_reads(tmp_path / dialect, state.expected(halves=halves), tmp_path)

    def test_one_rank_of_several_stands_for_all(self, tmp_path: Path) -> None:
        state = make("fp16")
        for dialect in ("l2", "hdf5"):
            files.write(state, tmp_path / dialect, 3, dialect)
            for path in (tmp_path / dialect).iterdir():
                assert zckpt.read(path).source["dp"] == 3

    def test_other_files_do_not_disturb(self, tmp_path: Path) -> None:
        state = make()
        files.write(state, tmp_path / "made", 3, "hdf5", name="rank_{}")
        (tmp_path / "made" / "notes.txt").write_text("hello")
        with h5py.File(tmp_path / "made" / "tf_model.h5", "w") as file:
            file["dense/kernel"] = np.ones(3)
        (tmp_path / "made" / "folder").mkdir()
        assert_reads(tmp_path / "made", state.expected(), tmp_path)

    def test_newer_hdf5_files(self, tmp_path: Path) -> None:
        """Rewritten with the superblock of today's HDF5, whose names stand elsewhere."""
        state = make()
        files.write(state, tmp_path / "made", 2, "hdf5")
        (tmp_path / "new").mkdir()
        for path in (tmp_path / "made").iterdir():
            with (
                h5py.File(path) as old,
                h5py.File(tmp_path / "new" / path.name, "w", libver="latest") as new,
            ):
                for name in old:
                    old.copy(name, new)
        assert_reads(tmp_path / "new", state.expected(), tmp_path)

    def test_many_names_move_the_heap(self, tmp_path: Path) -> None:
        files.write(make(), tmp_path / "made", 1, "hdf5")
        with h5py.File(tmp_path / "made" / "checkpoint.ortcp", "a") as file:
            for place in range(200):
                file.create_group(f"{place:050}")
        assert zckpt.read(tmp_path / "made").format == "onnxruntime"


# -- proof


def shift(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that is wrong by one element in the first piece of every moment that is cut."""
    right = _Tensors._enter

    def wrong(self: Any, entry: Entry) -> None:
        first, *others = entry.fragments
        if entry.slot == "exp_avg" and others:
            extent = dataclasses.replace(first.extent, offset=first.extent.offset + 4)
            moved = dataclasses.replace(first, extent=extent)
            entry = dataclasses.replace(entry, fragments=Runs([moved, *others]))
        right(self, entry)

    monkeypatch.setattr(_Tensors, "_enter", wrong)


class TestProof:
    """`verify` of samples and generated sets is in `assert_reads`."""

    @pytest.mark.parametrize("dialect", ["l1", "l2", "hdf5"])
    def test_a_broken_reader_is_found(self, dialect: str, tmp_path: Path) -> None:
        state = make("fp16")
        cut = next(n for n in owned(state.weights, 3)[0] if n in owned(state.weights, 3)[1])
        check_broken_reader(files.write(state, tmp_path / "made", 3, dialect), tmp_path, shift, cut)

    def test_what_the_engine_cannot_tell(self, tmp_path: Path) -> None:
        """Before 1.7 its reader needs the moments' lengths: without them it takes stale parts."""
        made = files.write(make("fp16"), tmp_path / "made", 3, "l1", without="optimizer")
        zckpt.convert(made, tmp_path / "read")
        assert zckpt.verify(made, tmp_path / "read")["equal"]
        with pytest.raises(errors.UnsupportedCheckpoint, match="no optimizer state"):
            zckpt.verify(made, tmp_path / "read", gather=True, device="cpu")

    @pytest.mark.parametrize("dialect", ["l1", "l2"])
    @pytest.mark.parametrize("precision", ["fp16", "bf16"])
    def test_a_stale_weight(self, dialect: str, precision: str, tmp_path: Path) -> None:
        state = make(precision)
        files.write(state, tmp_path / "right", 3, dialect)
        zckpt.convert(tmp_path / "right", tmp_path / "read")
        half = state.half("layer.2.bias")
        state.weights["layer.2.bias"] += 0.25
        made = files.write(state, tmp_path / "made", 3, dialect)
        for path in made.iterdir():  # the 16-bit copies are those of before
            edit(path, lambda model: model[f"layer.2.bias_{precision}"].copy_(half))
        for report in (
            zckpt.verify(made),
            zckpt.verify(made, tmp_path / "read"),
            zckpt.verify(made, tmp_path / "read", gather=True, device="cpu"),
        ):
            (found,) = report["differences"]
            assert found["tensor"].startswith("layer.2.bias/")
            assert found["count"] == 12

    def test_ranks_of_an_fp32_run_that_differ(self, tmp_path: Path) -> None:
        made = files.write(make("fp32"), tmp_path / "made", 3, "hdf5")
        with h5py.File(made / "checkpoint.rank2.ortcp", "a") as file:
            file["model/full_precision/head.weight"][11, 2] += 1
        (found,) = zckpt.verify(made)["differences"]
        assert (found["tensor"], found["count"]) == ("head.weight/param", 1)

    @pytest.mark.parametrize("dialect", ["l2", "hdf5"])
    def test_another_size_is_the_same(self, dialect: str, tmp_path: Path) -> None:
        source = DATA / "hdf5__fp16__adam__dp3"
        zckpt.reshard(source, tmp_path / "target", dp=8, dialect=dialect)
        report = zckpt.verify(tmp_path / "target", source, gather=True, device="cpu")
        assert report["equal"], report
        copies = [name for name in report["only_a"] if not name.endswith("/param")]
        assert copies == report["only_b"] == []  # HDF5 files hold no 16-bit copies


# -- what is refused


def edit(path: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    held = torch.load(path, weights_only=True)
    change(held["model"])
    torch.save(held, path)


class TestRefused:
    """Each with a named reason and exit code 1."""

    @pytest.fixture
    def refused(self, zckpt: Callable[..., Any], tmp_path: Path) -> Callable[..., None]:
        def check(kind: str, *told: str, path: Path | None = None) -> None:
            source = path or tmp_path / "made"
            ended = zckpt("convert", source, tmp_path / "target", "--json")
            assert ended.code == 1
            assert ended.document["error"] == kind, ended.document
            for words in told:
                assert words in ended.document["message"] + ended.document["hint"]
            assert not (tmp_path / "target").exists()
            assert not (tmp_path / "target.partial").exists()

        return check

    @pytest.mark.parametrize("rank", [0, 1, 3])
    @pytest.mark.parametrize(
        ("dialect", "name"),
        [("hdf5", "checkpoint.rank{}.ortcp"), ("l2", "ORT_checkpoint.ZeRO.{}.3.ort.pt")],
    )
    def test_missing_rank(
        self, dialect: str, name: str, rank: int, refused: Any, tmp_path: Path
    ) -> None:
        files.write(make("fp16"), tmp_path / "made", 4, dialect)
        (tmp_path / "made" / name.format(rank)).unlink()
        refused("IncompleteCheckpoint", f"rank {rank}", "3 of 4")

    def test_missing_rank_of_a_sample(self, refused: Any) -> None:
        refused("IncompleteCheckpoint", "rank 1", path=DATA / "bad__hdf5__missing-middle-rank")

    def test_duplicate_rank(self, refused: Any, tmp_path: Path) -> None:
        made = files.write(make("fp16"), tmp_path / "made", 3, "hdf5")
        shutil.copy(made / "checkpoint.rank1.ortcp", made / "copy.ortcp")
        refused("InconsistentCheckpoint", "rank 1", "copy.ortcp", "checkpoint.rank1.ortcp")

    def test_duplicate_rank_in_a_missing_ones_place(self, refused: Any, tmp_path: Path) -> None:
        made = files.write(make("fp16"), tmp_path / "made", 3, "hdf5")
        shutil.copy(made / "checkpoint.rank1.ortcp", made / "checkpoint.rank2.ortcp")
        refused("InconsistentCheckpoint", "rank 1", "both")

    def test_duplicate_legacy_rank(self, refused: Any, tmp_path: Path) -> None:
        made = files.write(make("fp16"), tmp_path / "made", 3, "l2")
        name = "ORT_checkpoint.ZeRO.{}.2.ort.pt"
        shutil.copy(made / name.format("1"), made / name.format("01"))
        refused("InconsistentCheckpoint", "rank 1", "both")

    def test_a_renamed_rank(self, refused: Any, tmp_path: Path) -> None:
        """A copy of rank 1 in the place of rank 2 does not hold what rank 2 owns."""
        made = files.write(make("fp32"), tmp_path / "made", 3, "l2")
        name = "ORT_checkpoint.ZeRO.{}.2.ort.pt"
        shutil.copy(made / name.format(1), made / name.format(2))
        refused("InconsistentCheckpoint", "partition over 3 ranks", "twice")

    def test_ranks_renamed_to_fewer(self, refused: Any, tmp_path: Path) -> None:
        made = files.write(make("fp32"), tmp_path / "made", 3, "l2")
        for rank in (0, 1):
            (made / f"ORT_checkpoint.ZeRO.{rank}.2.ort.pt").rename(
                made / f"ORT_checkpoint.ZeRO.{rank}.1.ort.pt"
            )
        (made / "ORT_checkpoint.ZeRO.2.2.ort.pt").unlink()
        refused("InconsistentCheckpoint", "partition over 2 ranks")

    def test_two_saves_in_one_folder(self, refused: Any, tmp_path: Path) -> None:
        files.write(make("fp16"), tmp_path / "made", 2, "l2")
        files.write(make("fp16"), tmp_path / "made", 2, "l2", prefix="ORT_checkpoint2")
        refused("AmbiguousCheckpoint", "ORT_checkpoint2", "name the file")
        held = zckpt.read(tmp_path / "made" / "ORT_checkpoint2.ZeRO.1.1.ort.pt")
        assert all("ORT_checkpoint2." in path for path in held.files)

    @pytest.mark.parametrize("dialect", ["l1", "l2", "hdf5"])
    def test_counters_differ_across_weights(
        self, dialect: str, refused: Any, tmp_path: Path
    ) -> None:
        state = make("fp16")
        state.steps["scale"] = 4
        files.write(state, tmp_path / "made", 2, dialect)
        refused("InconsistentCheckpoint", "Update_Count of scale", "--step-policy")
        for policy, step in (("max", 5), ("min", 4), ("9", 9)):
            assert zckpt.read(tmp_path / "made", step_policy=policy).step == step
        kept = zckpt.read(tmp_path / "made", step_policy="keep").parameters
        assert (kept["scale"].step, kept["Emb.weight"].step) == (4, 5)

    @pytest.mark.parametrize("policy", [None, "keep"])
    def test_counters_of_one_weight_differ_across_ranks(
        self, policy: str | None, tmp_path: Path
    ) -> None:
        made = files.write(make("fp16"), tmp_path / "made", 2, "l2")
        split = next(n for n in owned(make().weights, 2)[0] if n in owned(make().weights, 2)[1])

        def change(model: dict[str, Tensor]) -> None:
            model[f"Update_Count_{split}_view_1"] += 1

        edit(made / "ORT_checkpoint.ZeRO.1.1.ort.pt", change)
        with pytest.raises(errors.InconsistentCheckpoint, match="rank 1"):
            zckpt.read(made, step_policy=policy)

    def test_lambs_step_differs(self, refused: Any, tmp_path: Path) -> None:
        refused("InconsistentCheckpoint", "5", "6", path=DATA / "bad__legacy-post5478__step-skew")
        made = files.write(make("fp16", "Lamb"), tmp_path / "made", 3, "hdf5")
        with h5py.File(made / "checkpoint.rank2.ortcp", "a") as file:
            file["optimizer/shared_optimizer_state/Step"][...] = 7
        refused("InconsistentCheckpoint", "Step, rank 2")

    @pytest.mark.parametrize("zipped", [True, False])
    def test_weights_differ_between_ranks(self, zipped: bool, refused: Any, tmp_path: Path) -> None:
        made = files.write(make("fp32", frozen=FROZEN), tmp_path / "made", 3, "l2", zipped=zipped)
        path = made / "ORT_checkpoint.ZeRO.2.2.ort.pt"
        held = torch.load(path, weights_only=True)
        held["model"]["frozen.weight"][4, 6] += 1
        torch.save(held, path, _use_new_zipfile_serialization=zipped)
        refused("InconsistentCheckpoint", "frozen.weight", "ZeRO.2.2")

    def test_weights_differ_between_hdf5_ranks(self, refused: Any, tmp_path: Path) -> None:
        made = files.write(make("fp32"), tmp_path / "made", 3, "hdf5")
        with h5py.File(made / "checkpoint.rank1.ortcp", "a") as file:
            file["model/full_precision/head.weight"][11, 2] += 1
        refused("InconsistentCheckpoint", "head.weight", "rank1")

    def test_16_bit_copies_differ_between_ranks(self, refused: Any, tmp_path: Path) -> None:
        made = files.write(make("fp16"), tmp_path / "made", 3, "l2")
        path = made / "ORT_checkpoint.ZeRO.1.2.ort.pt"
        edit(path, lambda model: model["head.weight_fp16"].mul_(2))
        refused("InconsistentCheckpoint", "head.weight")

    @pytest.mark.parametrize("precision", ["fp16", "bf16"])
    def test_a_stale_master(self, precision: str, refused: Any, tmp_path: Path) -> None:
        state = make(precision)
        made = files.write(state, tmp_path / "made", 3, "l1")
        rank = next(r for r, held in enumerate(owned(state.weights, 3)) if "layer.2.bias" in held)

        def change(model: dict[str, Tensor]) -> None:
            model["layer.2.bias"] += 0.25

        edit(made / f"ORT_checkpoint.ZeRO.{rank}.2.ort.pt", change)
        refused("InconsistentCheckpoint", "layer.2.bias", "stale")

    @pytest.mark.parametrize("precision", ["fp32", "fp16"])
    def test_a_flipped_bit_is_said_to_be_one(
        self, precision: str, refused: Any, tmp_path: Path
    ) -> None:
        state = make(precision)
        made = files.write(state, tmp_path / "made", 2, "l2")
        path = made / "ORT_checkpoint.ZeRO.0.1.ort.pt"
        data = bytearray(path.read_bytes())
        data[data.index(state.weights["conv.weight"].numpy().tobytes()) + 3] ^= 1
        path.write_bytes(data)
        refused("CorruptCheckpoint", "CRC-32")

    def test_nan_and_infinity_are_no_stale_masters(self, tmp_path: Path) -> None:
        state = make("fp16")
        state.weights["head.weight"][0] = torch.tensor([torch.nan, torch.inf, 1e6])
        files.write(state, tmp_path / "made", 3, "l2")
        zckpt.convert(tmp_path / "made", tmp_path / "read")

    def test_torch_names_alone(self, refused: Any, tmp_path: Path) -> None:
        state = make("fp16")
        files.write(state, tmp_path / "made", 2, "l2", without="torch names")
        refused("MissingData", "torch's names alone", "conv.weight", "layer.10.bias")

    def test_pieces_left_out(self, refused: Any, tmp_path: Path) -> None:
        state = make("fp16")
        made = files.write(state, tmp_path / "made", 2, "l2", without="optimizer")
        lost = next(n for n in owned(state.weights, 2)[0] if n in owned(state.weights, 2)[1])
        edit(made / "ORT_checkpoint.ZeRO.1.1.ort.pt", lambda model: model.pop(f"{lost}_view_1"))
        refused("MissingData", lost, "torch's names alone")

    def test_torch_names_of_a_set_without_split_weights(self, tmp_path: Path) -> None:
        state = make("fp16", shapes={"a": (64,), "b": (30,)})
        files.write(state, tmp_path / "made", 2, "l2", without="torch names")
        zckpt.convert(tmp_path / "made", tmp_path / "read")
        expected = state.expected(halves=False, moments=False)
        assert_is(tmp_path / "read", expected, None)
        assert_proven(tmp_path / "made", tmp_path / "read", harmless=())

    def test_16_bit_copies_left_out(self, refused: Any, tmp_path: Path) -> None:
        made = files.write(make("fp16"), tmp_path / "made", 2, "l2")
        for path in made.iterdir():
            edit(path, lambda m: [m.pop(key) for key in list(m) if key.endswith("_fp16")])
        refused("MissingData", "16-bit copies", "view")

    def test_horizontal_parallelism(self, refused: Any, tmp_path: Path) -> None:
        made = files.write(make("fp16"), tmp_path / "made", 2, "hdf5")
        for path in made.iterdir():
            with h5py.File(path, "a") as file:
                file["trainer_options/horizontal_parallel_size"][...] = 2
        refused("UnsupportedCheckpoint", "Megatron")

    def test_a_horizontally_cut_weight(self, refused: Any, tmp_path: Path) -> None:
        made = files.write(make("fp16"), tmp_path / "made", 2, "hdf5")
        with h5py.File(made / "checkpoint.rank0.ortcp", "a") as file:
            name = next(iter(file["partition_info"]))
            file[f"partition_info/{name}/megatron_row_partition"][...] = 1
        refused("UnsupportedCheckpoint", "Megatron")

    def test_horizontal_parallelism_of_legacy_files(self, refused: Any, tmp_path: Path) -> None:
        shapes = {"fc1.weight_column_rank_0": (8, 8), "fc2.weight_row_rank_0": (8, 8)}
        files.write(make("fp16", shapes=shapes), tmp_path / "made", 2, "l2")
        refused("UnsupportedCheckpoint", "Megatron")

    def test_a_lost_weight(self, refused: Any, tmp_path: Path) -> None:
        made = files.write(make("fp32"), tmp_path / "made", 2, "l2")
        edit(made / "ORT_checkpoint.ZeRO.1.1.ort.pt", lambda model: model.pop("Emb.weight"))
        refused("IncompleteCheckpoint", "Emb.weight")

    def test_lost_moments(self, refused: Any, tmp_path: Path) -> None:
        made = files.write(make("fp16"), tmp_path / "made", 2, "hdf5")
        with h5py.File(made / "checkpoint.rank0.ortcp", "a") as file:
            del file["optimizer/Emb.weight/Moment_2"]
        refused("IncompleteCheckpoint", "Moment_2 of Emb.weight", "rank 0")

    def test_lost_counters(self, refused: Any, tmp_path: Path) -> None:
        made = files.write(make("fp16"), tmp_path / "made", 2, "hdf5")
        with h5py.File(made / "checkpoint.rank0.ortcp", "a") as file:
            del file["optimizer/Emb.weight/Update_Count"]
        refused("IncompleteCheckpoint", "Update_Count of Emb.weight")

    def test_ranks_of_two_runs(self, refused: Any, tmp_path: Path) -> None:
        made = files.write(make("fp16"), tmp_path / "made", 2, "hdf5")
        with h5py.File(made / "checkpoint.rank1.ortcp", "a") as file:
            file["trainer_options/mixed_precision"][...] = False
        refused("InconsistentCheckpoint", "mixed_precision")

    def test_compressed_datasets(self, refused: Any, tmp_path: Path) -> None:
        made = files.write(make("fp32"), tmp_path / "made", 1, "hdf5")
        with h5py.File(made / "checkpoint.ortcp", "a") as file:
            weight = file["model/full_precision/Emb.weight"][()]
            del file["model/full_precision/Emb.weight"]
            file.create_dataset("model/full_precision/Emb.weight", data=weight, compression="gzip")
        refused("UnsupportedCheckpoint", "Emb.weight", "h5repack")

    def test_links_to_elsewhere(self, refused: Any, tmp_path: Path) -> None:
        made = files.write(make("fp32"), tmp_path / "made", 1, "hdf5")
        with h5py.File(made / "checkpoint.ortcp", "a") as file:
            file["model/full_precision/other"] = h5py.ExternalLink("/etc/passwd", "/x")
        refused("UnsupportedCheckpoint", "link")

    def test_groups_in_circles(self, refused: Any, tmp_path: Path) -> None:
        made = files.write(make("fp32"), tmp_path / "made", 1, "hdf5")
        with h5py.File(made / "checkpoint.ortcp", "a") as file:
            file["model/full_precision/circle"] = file["model"]
        refused("CorruptCheckpoint", "two places")

    def test_more_ranks_than_there_can_be(self, refused: Any, tmp_path: Path) -> None:
        made = files.write(make("fp16"), tmp_path / "made", 2, "hdf5")
        with h5py.File(made / "checkpoint.rank0.ortcp", "a") as file:
            file["trainer_options/world_size"][...] = 1 << 50
        refused("CorruptCheckpoint", "ranks")
        path = tmp_path / "other" / "x.ZeRO.0.99999999999999.ort.pt"
        path.parent.mkdir()
        shutil.copy(REAL / "ORT_checkpoint.ort.pt", path)
        refused("CorruptCheckpoint", "ranks", path=path)

    @pytest.mark.parametrize("dialect", ["l2", "hdf5"])
    def test_short_files(self, dialect: str, zckpt: Callable[..., Any], tmp_path: Path) -> None:
        made = files.write(make("fp16"), tmp_path / "made", 2, dialect)
        path = sorted(made.iterdir())[1]
        data = path.read_bytes()
        for length in (0, 7, 100, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:length])
            ended = zckpt("convert", made, tmp_path / "target", "--json")
            assert ended.code == 1, length
            assert ended.document["error"] in (
                "CorruptCheckpoint",
                "IncompleteCheckpoint",
            ), ended.document

    @pytest.mark.parametrize("dialect", ["l1", "l2", "hdf5"])
    def test_flipped_bytes_are_never_an_internal_error(self, dialect: str, tmp_path: Path) -> None:
        made = files.write(make("fp16"), tmp_path / "made", 2, dialect)
        path = sorted(made.iterdir())[0]
        data = path.read_bytes()
        draw = np.random.default_rng(5)
        for _ in range(30):
            damaged = bytearray(data)
            for place in draw.integers(0, min(len(data), 20000), 3):
                damaged[place] ^= 1 << int(draw.integers(8))
            path.write_bytes(damaged)
            try:
                zckpt.convert(made, tmp_path / "target")
            except errors.ZckptError:
                continue
            shutil.rmtree(tmp_path / "target")

    def test_without_h5py(self, zckpt_without: Callable[..., Any], tmp_path: Path) -> None:
        hidden = tmp_path / "hidden"
        hidden.mkdir()
        (hidden / "h5py.py").write_text("raise ImportError('no h5py here')")
        command = [sys.executable, "-m", "zckpt", "inspect", DATA / "hdf5__fp32__adam__dp2"]
        ended = subprocess.run(
            command, env={"PYTHONPATH": f"{hidden}:{ROOT}"}, capture_output=True, text=True
        )
        assert ended.returncode == 1
        assert "h5py" in ended.stderr
        assert "pip install 'zckpt[onnxruntime]'" in ended.stderr
        legacy = DATA / "legacy-post5478__fp16__adam__dp3"
        assert zckpt_without(("h5py", "numpy"), "inspect", legacy).code == 0

    def test_no_format_of_another_engine_is_disturbed(self, tmp_path: Path) -> None:
        torch.save({"model": {"w": torch.ones(3)}}, tmp_path / "model.pt")
        with h5py.File(tmp_path / "weights.h5", "w") as file:
            file["model/kernel"] = np.ones(3)
        for path in (tmp_path, tmp_path / "model.pt", tmp_path / "weights.h5"):
            with pytest.raises(errors.NotACheckpoint):
                zckpt.read(path, format="onnxruntime")


# -- steps


class TestSteps:
    def test_stored_counters_are_one_more(self) -> None:
        manifest = zckpt.read(DATA / "hdf5__fp16__adam__dp3")
        assert manifest.step == 5
        true = [line for line in manifest.steps if line.truth]
        assert len(true) == 8  # six weights, two of which two ranks share
        assert {line.step for line in true} == {5}

    def test_the_trainers_own_are_listed(self) -> None:
        manifest = zckpt.read(REAL / "checkpoint.ortcp")
        told = {line.where: line.step for line in manifest.steps if not line.truth}
        assert told == {"train_step_info, optimization_step": 5, "train_step_info, step": 5}

    def test_before_the_first_update(self, tmp_path: Path) -> None:
        state = make("fp16", step=0)
        files.write(state, tmp_path / "made", 2, "l2")
        assert zckpt.read(tmp_path / "made").step == 0
        zckpt.reshard(tmp_path / "made", tmp_path / "again", dp=2, dialect="l2")
        assert files.differences(tmp_path / "again", tmp_path / "made") == []

    def test_weights_may_keep_their_own(self, tmp_path: Path) -> None:
        state = make("fp32")
        state.steps["scale"] = 2
        files.write(state, tmp_path / "made", 2, "hdf5", info=False)
        zckpt.convert(tmp_path / "made", tmp_path / "universal", step_policy="keep")
        for dialect in ("hdf5", "l2"):
            target = tmp_path / dialect
            report = zckpt.reshard(tmp_path / "universal", target, dp=3, dialect=dialect)
            assert any("--step-policy keep" in warning for warning in report["warnings"])
            files.write(state, tmp_path / f"right {dialect}", 3, dialect)
            assert files.differences(target, tmp_path / f"right {dialect}") == []

    def test_lamb_has_one_for_all(self, tmp_path: Path) -> None:
        state = make("fp32")
        state.steps["scale"] = 2
        files.write(state, tmp_path / "made", 2, "hdf5")
        zckpt.convert(tmp_path / "made", tmp_path / "universal", step_policy="keep")
        path = tmp_path / "universal" / "manifest.json"
        path.write_text(path.read_text().replace('"optimizer": "Adam"', '"optimizer": "Lamb"'))
        with pytest.raises(errors.InconsistentCheckpoint, match="one step for all"):
            zckpt.reshard(tmp_path / "universal", tmp_path / "target")


# -- writing


def pairs() -> list[Any]:
    """Every dp to every dp, of every dialect, precision and optimizer; a few of each by default."""
    found = []
    for place, (kind, optimizer) in enumerate(product(KINDS, OPTIMIZERS)):
        usual = (2, 3) if place % 4 in (0, 3) else (0, 0)
        for before, after in product(SIZES, SIZES):
            name = "-".join(map(str, (*kind, optimizer, before, after)))
            marks = engines((before, after) == usual)
            found.append(pytest.param(kind, optimizer, before, after, id=name, marks=marks))
    return found


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
        assert any(LAMB in warning for warning in report["warnings"]) == lamb
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
        here = source
        for place, (dp, dialect) in enumerate(((8, "l2"), (1, "hdf5"), (2, "l2"), (3, "hdf5"))):
            zckpt.reshard(here, tmp_path / str(place), dp=dp, dialect=dialect)
            here = tmp_path / str(place)
        (tmp_path / "right").mkdir()
        for path in source.glob("*.ortcp"):
            shutil.copy(path, tmp_path / "right")
        assert files.differences(here, tmp_path / "right") == []


# -- to and from an engine that lives


@dataclass(frozen=True)
class Way:
    """A real DeepSpeed run, through ONNX Runtime's files, into a real engine again."""

    name: str
    case: Case
    dialect: str
    dp: int  # of ONNX Runtime's files
    to: str = "deepspeed"
    stage: int = 2
    dtype: str | None = None
    universal: bool = False  # between the two


def one_group(dtype: str, **more: Any) -> Case:
    name = f"onnxruntime_{dtype}" + "".join(f"_{value}" for value in more.values())
    return Case(name, "onnxruntime", 2, 2, dtype, optimizer="adam", groups=1, **more)


PLAIN = one_group("fp32", model="plain")
WAYS = [
    Way("fp32 hdf5", PLAIN, "hdf5", 3),
    Way("fp32 l2 universal", PLAIN, "l2", 4, universal=True),
    Way("fp32 stage 3", PLAIN, "hdf5", 1, stage=3),
    Way("bf16 l2", one_group("bf16", model="plain"), "l2", 3),
    Way(
        "bf16 universal stage 1", one_group("bf16", model="plain"), "l2", 2, stage=1, universal=True
    ),
    Way("fp32 to bf16", PLAIN, "hdf5", 8, dtype="bf16"),
    Way("deepspeed-universal", PLAIN, "hdf5", 2, to="deepspeed-universal"),
    Way(
        "deepspeed-universal through ours", PLAIN, "l2", 2, to="deepspeed-universal", universal=True
    ),
]


def of_engine(way: Way) -> dict[str, Any]:
    """A ds_config of the engine that resumes, as far as it shapes the files."""
    dtype = way.dtype or way.case.dtype
    config: dict[str, Any] = {"zero_optimization": {"stage": way.stage}}
    return config if dtype == "fp32" else {**config, dtype: {"enabled": True}}


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, id=way.name.replace(" ", "-"), marks=engines(place in (0, 6)))
        for place, way in enumerate(WAYS)
    ],
)
def test_deepspeed_goes_on(way: Way, trained: Callable[[Case], Path], tmp_path: Path) -> None:
    run = trained(way.case)
    before = torch.load(run / "oracle.pt", weights_only=False)
    (group,) = before["groups"]
    zckpt.convert(run / "run", tmp_path / "ort", to="onnxruntime", dp=way.dp, dialect=way.dialect)
    assert zckpt.read(tmp_path / "ort").step == 3
    defaults = {key: plain(group[key]) for key in ("lr", "betas", "weight_decay")}
    defaults["betas"] = tuple(defaults["betas"])
    source, options = tmp_path / "ort", {"group_defaults": defaults}
    names = tuple(group["params"])
    if way.universal:
        zckpt.convert(source, tmp_path / "universal", **options, param_names=names)
        source, options = tmp_path / "universal", {}
    elif way.to == "deepspeed":
        options["param_names"] = names
    report = zckpt.convert(
        source, tmp_path / "run", to=way.to, dp=2, config=of_engine(way), **options
    )
    assumed = [line for line in report["warnings"] if "hyper-parameters" in line]
    assert len(assumed) == 1  # what was not given is named
    assert "eps=1e-08" in assumed[0]
    assert "lr=" not in assumed[0]
    config = {"checkpoint": {"load_universal": True}} if way.to != "deepspeed" else {}
    case = dataclasses.replace(way.case, dtype=way.dtype or way.case.dtype)
    after = deepspeed.resume(case, tmp_path / "run", tmp_path, dp=2, stage=way.stage, config=config)
    for name, tensor in before["tensors"].items():
        if not (way.dtype and name.endswith("/param")):
            assert same_bits(tensor, after["tensors"][name]), name
    assert after["steps"] == before["steps"]
    # the program makes its Adam: the files have the key of every class that it may be of
    assert after["groups"][0] == {"bias_correction": True, **group}
    if way.to == "deepspeed":
        for name, tensor in before["buffers"].items():
            assert same_bits(tensor, after["buffers"][name]), name
        if not way.dtype and way.stage == 2:
            assert after["losses"] == before["losses"]
        tolerance = 0.05 if way.dtype else 1e-6
        assert after["losses"][0] == pytest.approx(before["losses"][0], rel=0, abs=tolerance)


class TestToDeepSpeed:
    def test_the_order_of_parameters_has_to_be_given(self, tmp_path: Path) -> None:
        source = DATA / "hdf5__fp16__adam__dp3"
        with pytest.raises(errors.MissingData) as caught:
            zckpt.convert(source, tmp_path / "run", to="deepspeed")
        assert "--param-names" in caught.value.hint
        assert "deepspeed-universal" in caught.value.hint
        zckpt.convert(source, tmp_path / "universal")
        with pytest.raises(errors.MissingData):
            zckpt.convert(tmp_path / "universal", tmp_path / "run", to="deepspeed")

    def test_defaults_are_named(self, tmp_path: Path) -> None:
        report = zckpt.convert(
            DATA / "hdf5__fp16__adam__dp3", tmp_path / "run", to="deepspeed-universal"
        )
        told = next(line for line in report["warnings"] if "hyper-parameters" in line)
        for word in ("adam's defaults", "lr=0.001", "betas=(0.9, 0.999)", "weight_decay=0.0"):
            assert word in told

    @pytest.mark.parametrize(
        ("names", "told"),
        [
            (["Emb.weight"], "does not name"),
            (["other"], "other, which the source does not hold"),
            (["scale", "scale"], "scale twice"),
        ],
    )
    def test_names_that_are_not_the_modules(
        self, names: list[str], told: str, zckpt: Callable[..., Any], tmp_path: Path
    ) -> None:
        state = make(shapes={"Emb.weight": (8, 8), "scale": (1,)})
        files.write(state, tmp_path / "made", 2, "hdf5")
        listed = ["Emb.weight", "scale", *names] if told != "does not name" else names
        (tmp_path / "names").write_text("\n".join(listed))
        ended = zckpt(
            "convert", tmp_path / "made", tmp_path / "u", "--param-names", tmp_path / "names"
        )
        assert ended.code == 2
        assert told in ended.err

    def test_parameters_stand_in_the_given_order(
        self, zckpt: Callable[..., Any], tmp_path: Path
    ) -> None:
        state = make(shapes={"b": (8, 8), "a": (1,), "c": (3,)}, frozen={"d": (2,), "e": (2,)})
        files.write(state, tmp_path / "made", 2, "hdf5")
        (tmp_path / "names").write_text('["c", "a", "d", "b"]')
        zckpt("convert", tmp_path / "made", tmp_path / "u", "--param-names", tmp_path / "names")
        manifest = json.loads((tmp_path / "u" / "manifest.json").read_text())
        assert list(manifest["parameters"]) == ["c", "a", "b", "d"]
        assert manifest["buffers"] == ["e"]

    def test_lamb_is_no_optimizer_of_deepspeed(self, tmp_path: Path) -> None:
        source = DATA / "hdf5__fp16__lamb__dp2"
        with pytest.raises(errors.WrongOption, match="Lamb"):
            zckpt.convert(source, tmp_path / "run", to="deepspeed-universal")
        zckpt.convert(source, tmp_path / "run", to="deepspeed-universal", optimizer="torch")


class TestFromOthers:
    def test_what_has_no_place_is_named(self, tmp_path: Path) -> None:
        report = zckpt.convert(EXAMPLE, tmp_path / "ort", to="onnxruntime", dp=3)
        told = " ".join(report["left_out"])
        for word in ("hyper-parameters", "tied", "head.weight"):
            assert word in told
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
        path = tmp_path / "universal" / "manifest.json"
        path.write_text(path.read_text().replace('"optimizer": "AdamW"', '"optimizer": "NAdam"'))
        with pytest.raises(errors.WrongOption, match="Adam and Lamb"):
            zckpt.convert(tmp_path / "universal", tmp_path / "ort", to="onnxruntime")
        zckpt.convert(tmp_path / "universal", tmp_path / "ort", to="onnxruntime", weights_only=True)


def test_torch_goes_on(tmp_path: Path) -> None:
    """A model that ORT 1.16.3 trained, with torch's Adam: ORT's own next three steps."""
    zckpt.convert(REAL / "checkpoint.ortcp", tmp_path / "universal")
    held = load(tmp_path / "universal")
    names = [name.removesuffix("/param") for name in held if name.endswith("/param")]
    weights = {name: held[f"{name}/param"].requires_grad_() for name in names}
    adam = torch.optim.Adam(weights.values(), lr=0.01)  # ORT's own defaults are torch's
    step = torch.tensor(float(zckpt.read(tmp_path / "universal").step or 0))
    for name, weight in weights.items():
        adam.state[weight] = {
            "step": step.clone(),
            "exp_avg": held[f"{name}/exp_avg"],
            "exp_avg_sq": held[f"{name}/exp_avg_sq"],
        }
    batches = load_file(REAL / "batches.safetensors")
    losses = []
    for place in (5, 6, 7):
        hidden = batches[f"x{place}"] @ weights["Emb.weight"]
        for layer in ("layer.2", "layer.10"):
            hidden = hidden @ weights[f"{layer}.weight"] * weights[f"{layer}.bias"]
        loss = (hidden.relu() @ weights["head.weight"]).square().mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    told = json.loads((REAL / "case.json").read_text())["resume_losses"]
    assert losses == pytest.approx(told, rel=1e-5)
    after = load_file(REAL / "after_resume.safetensors")
    for name, weight in weights.items():
        assert torch.allclose(weight, after[f"master/{name}"], rtol=1e-5, atol=1e-6), name
