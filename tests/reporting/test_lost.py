"""Lost ranks are holes: the rest is shown, and their elements are in no number."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import zckpt

from ..conftest import ROOT
from ..faults import optimizer_files, read_element_bytes
from .conftest import Document, faults_of

Make = Callable[..., Document]
DATA = ROOT / "tests" / "data"


def of_rank(run: Path, *ranks: int) -> list[Path]:
    return [path for path in optimizer_files(run) for r in ranks if f"pp_rank_{r}_mp" in path.name]


def has_holes(made: Document, files: list[str], state: str) -> None:
    shown = {file["name"]: file for file in made["map"]["files"]}
    assert [name for name, file in shown.items() if file["state"] == state] == files
    pieces = made["map"]["pieces"]
    held = {list(shown)[number] for number in pieces["file"]}
    assert held >= set(files)


@pytest.mark.parametrize("ranks", [(0,), (1,), (3,), (1, 2), (2, 3)])
def test_lost_ranks(ranks: tuple[int, ...], example: Path, document: Make) -> None:
    whole = document(example)
    moments = zckpt.read(example).entries["fc1.weight", "exp_avg"]
    lost = of_rank(example, *ranks)
    kept = [
        np.frombuffer(read_element_bytes(each), "f4")
        for each in (moments,)
        if not {fragment.extent.file for fragment in each.fragments} & {str(p) for p in lost}
    ]
    parts = [
        (fragment.start, fragment.stop)
        for fragment in moments.fragments
        if Path(fragment.extent.file).name not in {path.name for path in lost}
    ]
    values = np.frombuffer(read_element_bytes(moments), "f4")
    kept = [values[start:stop] for start, stop in parts]
    for path in lost:
        path.unlink()
    made = document(example)
    lines = faults_of(made, "missing")
    assert [line["file"] for line in lines] == [path.name for path in lost]
    assert all(line["fault"] for line in lines)
    assert all(path.name in line["message"] for path, line in zip(lost, lines, strict=True))
    has_holes(made, [path.name for path in lost], "missing")
    assert made["tensors"]["name"] == whole["tensors"]["name"]
    assert made["line"]["step"] == 7
    assert made["line"]["digest"] is None
    assert made["map"]["of_tensor"] == whole["map"]["of_tensor"]
    assert made["map"]["pieces"]["start"] == whole["map"]["pieces"]["start"]
    number = made["tensors"]["name"].index(moments.name)
    rms = made["tensors"]["rms"][number]
    if any(map(len, kept)):
        assert rms == pytest.approx(np.sqrt(np.mean(np.concatenate(kept).astype("f8") ** 2)))
    else:
        assert rms is None
    assert made["tensors"]["rms"][0] == whole["tensors"]["rms"][0], "the weights lie elsewhere"


@pytest.mark.parametrize("left", [0, 3, 5000])
def test_a_file_that_was_cut_short(left: int, example: Path, document: Make) -> None:
    (path,) = of_rank(example, 2)
    path.write_bytes(path.read_bytes()[:left])
    made = document(example)
    (line,) = faults_of(made, "unreadable")
    assert line["file"] == path.name
    assert path.name in line["message"]
    has_holes(made, [path.name], "damaged")


def test_both_files_of_a_rank_of_stage_3(tmp_path: Path, document: Make) -> None:
    run = shutil.copytree(DATA / "deepspeed-0.11.0-z3_dp2_sub_groups" / "run", tmp_path / "run")
    for path in run.rglob("*zero_pp_rank_1_*"):
        path.unlink()
    made = document(run)
    files = [line["file"] for line in faults_of(made, "missing")]
    assert files == [
        "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "zero_pp_rank_1_mp_rank_00_model_states.pt",
    ]
    assert made["numbers"]["measures"]
    assert made["line"]["checked"] == "checksums ok in what can be read"


@pytest.mark.parametrize(
    ("source", "file"),
    [
        ("fsdp2-2.13.0-w2", "__1_0.distcp"),
        ("fsdp2-2.13.0-w2", "__0_0.distcp"),
        ("megatron-0.16.1-tp2/iter_0000003", "__1_0.distcp"),
        ("megatron-0.13.1-tp2/iter_0000003", "__1_1.distcp"),
        ("megatron-0.16.1-fsdp/iter_0000003", "__0_0.distcp"),
        ("megatron-0.16.1-fsdp/iter_0000003", "__2_0.distcp"),
        ("automodel-0.7.0-w2", "optim/__0_0.distcp"),  # its numbers are tensors: steps, and others
    ],
)
def test_a_lost_file_of_items(source: str, file: str, tmp_path: Path, document: Make) -> None:
    run = shutil.copytree(DATA / source, tmp_path / "run")
    (run / file).unlink()
    made = document(run)
    (line,) = faults_of(made, "missing")
    assert line["file"] == file
    has_holes(made, [file], "missing")
    assert any(measure["key"] == "param" for measure in made["numbers"]["measures"])


@pytest.mark.parametrize("name", ["layer_06-model_00", "layer_07-model_01"])
@pytest.mark.parametrize("left", [None, 0])
def test_a_file_of_a_layer(name: str, left: int | None, tmp_path: Path, document: Make) -> None:
    """Another tensor rank's file of this layer stands in, and not that of the next layer."""
    run = shutil.copytree(DATA / "zckpt-0.1-pp2_tp2" / "run", tmp_path / "run")
    path = run / "global_step3" / f"{name}-model_states.pt"
    path.unlink() if left is None else path.write_bytes(b"")
    made = document(run)
    kind, state = ("missing", "missing") if left is None else ("unreadable", "damaged")
    (line,) = [line for line in made["faults"] if line["fault"]]
    assert (line["kind"], line["file"]) == (kind, path.name)
    assert [file["name"] for file in made["map"]["files"] if file["state"] == state] == [path.name]
    assert made["numbers"]["measures"]
    assert made["line"]["checked"] == "checksums ok in what can be read"


@pytest.mark.parametrize("left", [0.0, 0.5, 0.999])
@pytest.mark.parametrize(
    ("source", "file"),
    [
        ("fsdp2-2.13.0-w2", "__1_0.distcp"),
        ("automodel-0.7.0-lora-w2", "optim/__1_0.distcp"),
        ("megatron-0.16.1-tp2/iter_0000003", "__0_1.distcp"),
    ],
)
def test_a_file_of_items_that_was_cut_short(
    source: str, file: str, left: float, tmp_path: Path, document: Make
) -> None:
    run = shutil.copytree(DATA / source, tmp_path / "run")
    held = (run / file).read_bytes()
    (run / file).write_bytes(held[: int(left * len(held))])
    made = document(run)
    (line,) = faults_of(made, "unreadable")
    assert line["file"] == file
    assert "but .metadata needs at least" in line["message"]
    assert not faults_of(made, "missing"), "the file is there"
    has_holes(made, [file], "damaged")
    assert any(measure["key"] == "param" for measure in made["numbers"]["measures"])


@pytest.mark.parametrize("file", ["distrib_optim.pt", "model_optim_rng.pt"])
@pytest.mark.parametrize("rank", ["mp_rank_00", "mp_rank_01"])
def test_a_lost_file_in_a_folder_of_its_rank(
    rank: str, file: str, tmp_path: Path, document: Make
) -> None:
    source = DATA / "megatron-0.16.1-legacy-tp2" / "iter_0000003"
    run = shutil.copytree(source, tmp_path / "run")
    (run / rank / file).unlink()
    made = document(run)
    (line,) = [line for line in made["faults"] if line["fault"]]
    assert (line["kind"], line["file"]) == ("missing", f"{rank}/{file}")
    states = {each["name"]: each["state"] for each in made["map"]["files"]}
    assert states[f"{rank}/model_optim_rng.pt"] == ("missing" if file[0] == "m" else "ok")
    assert any(measure["key"] == "param" for measure in made["numbers"]["measures"])


@pytest.mark.parametrize("name", ["legacy-tp2", "legacy-ep2"])
def test_a_lost_folder_of_a_rank(name: str, tmp_path: Path, document: Make) -> None:
    run = shutil.copytree(DATA / f"megatron-0.16.1-{name}" / "iter_0000003", tmp_path / "run")
    folder = sorted(run.glob("mp_rank_01*"))[-1]
    shutil.rmtree(folder)
    made = document(run)
    files = [f"{folder.name}/model_optim_rng.pt", f"{folder.name}/distrib_optim.pt"]
    assert [line["file"] for line in faults_of(made, "missing")] == files
    assert {f["name"] for f in made["map"]["files"] if f["state"] == "missing"} == {*files}
    assert made["numbers"]["measures"]


def test_a_lost_file_that_no_other_stands_in_for(tmp_path: Path, document: Make) -> None:
    """The map has it among the files that are there, each with its rank."""
    source = DATA / "torch_checkpointing-0.1.1-w2" / "items"
    run = shutil.copytree(source, tmp_path / "run")
    (run / "optimizer_1.pt").unlink()
    made = document(run)
    shown = {file["name"]: file for file in made["map"]["files"]}
    assert (shown["optimizer_1.pt"]["state"], shown["optimizer_1.pt"]["bytes"]) == ("missing", None)
    assert (shown["model_1.pt"]["state"], shown["model_1.pt"]["rank"]) == ("ok", {"dp": 1})


def test_all_files_of_a_kind(example: Path, document: Make) -> None:
    for path in optimizer_files(example):
        path.unlink()
    made = document(example)
    (line,) = faults_of(made, "missing")
    assert "holds no optimizer files" in line["message"]
    assert [file["name"] for file in made["map"]["files"]] == ["mp_rank_00_model_states.pt"]
    assert made["line"]["name"] == "global_step7"


def test_a_damaged_number_of_ranks_comes_to_an_end(example: Path, document: Make) -> None:
    """So many files are lost that none can stand in for all of them."""
    first, *_ = optimizer_files(example)
    shutil.copy(first, first.with_name(first.name.replace("rank_0_", f"rank_{10**20}_")))
    made = document(example)
    assert 0 < len([fault for fault in made["faults"] if fault["kind"] == "missing"]) < 200
