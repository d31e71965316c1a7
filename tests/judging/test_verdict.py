"""What is judged beside single files: roles of a run, weights alone, programs of other names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import zckpt as package
from zckpt.judging import verdict

from ..conftest import ROOT, Result, texts

Run = Callable[..., Result]
TRAINER = ROOT / "examples" / "trainer" / "checkpoint-4"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Five checkpoints of a Trainer."""
    for number in (2, 4, 6, 8, 10):
        shutil.copytree(TRAINER, tmp_path / "out" / f"checkpoint-{number}")
    return tmp_path / "out"


def trained(folder: Path, **files: Any) -> Path:
    """What a program of torch saves under its own names."""
    folder.mkdir()
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    values = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    for name, what in files.items():
        torch.save(values.get(what, {"last_epoch": 1}), folder / name.replace("__", "."))
    return folder


def test_a_role_that_all_others_have(run: Path, zckpt: Run) -> None:
    for name in ("rng_state_0.pth", "rng_state_1.pth"):
        (run / "checkpoint-10" / name).unlink()
    said = "has no file for the random state, which all other checkpoints of the run have"
    ended = zckpt("auto-resume", run, "--dp", 2)
    assert ended.out == f"{run / 'checkpoint-10'}\n"
    assert said in ended.err
    assert said in zckpt("check", run, "--dp", 2).err
    assert said in zckpt("list", run).err
    for number in (2, 4, 6, 8):
        (run / f"checkpoint-{number}" / "rng_state_0.pth").unlink()
        (run / f"checkpoint-{number}" / "rng_state_1.pth").unlink()
    assert said not in zckpt("auto-resume", run, "--dp", 2).err


def test_a_rank_without_its_random_state(run: Path, zckpt: Run) -> None:
    (run / "checkpoint-10" / "rng_state_0.pth").unlink()
    said = "checkpoint-10 has no random state of rank 0"
    for command in (("verify",), ("check", "--dp", 2)):
        ended = zckpt(command[0], run / "checkpoint-10", *command[1:])
        assert (ended.code, said in ended.err) == (0, True)
    assert zckpt("auto-resume", run, "--dp", 2).out == f"{run / 'checkpoint-10'}\n"


def test_a_run_with_folders_that_are_none(run: Path, zckpt: Run, tmp_path: Path) -> None:
    shutil.rmtree(run / "checkpoint-10")
    (run / "checkpoint-10").mkdir()
    shutil.rmtree(run / "checkpoint-8")
    (run / "checkpoint-8").mkdir()
    (run / "checkpoint-8" / "notes.txt").write_text("of another program")
    page = tmp_path / "page.md"
    assert zckpt("report", run, "--md", "--output", page).code == 3
    assert "checkpoint-10 is not a checkpoint: it is empty" in page.read_text()
    assert zckpt("auto-resume", run, "--dp", 2).out == f"{run / 'checkpoint-6'}\n"
    assert "resumes from" in zckpt("check", run, "--dp", 2).out


def test_none_has_an_optimizer(run: Path, zckpt: Run) -> None:
    for folder in run.iterdir():
        shutil.rmtree(folder / "global_step4")
        for name in ("latest", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"):
            (folder / name).unlink()
    ended = zckpt("auto-resume", run, "--dp", 2)
    assert (ended.code, ended.out) == (1, "")
    assert "has 5 checkpoints, but none has an optimizer" in ended.err
    command = ended.err.split("`")[1].replace("MODEL", str(run.parent / "model"))
    assert zckpt(*command.split()[1:]).code == 0
    ended = zckpt("check", run / "checkpoint-4", "--dp", 2)
    assert (ended.code, "has weights and no optimizer" in ended.out) == (3, True)
    assert zckpt("verify", run / "checkpoint-4").code == 0


@pytest.mark.parametrize("to", ["dcp", "gathered"])
def test_weights_alone_continue_no_run(to: str, tmp_path: Path, zckpt: Run) -> None:
    target = tmp_path / "weights"
    report = package.convert(TRAINER, target, to=to, weights_only=True)
    assert not (target / "scheduler.pt").exists()
    assert (target / "tokenizer.json").exists()
    assert any("scheduler.pt" in line for line in texts(report["left_out"]))
    assert zckpt("verify", target).code == 0


def test_a_conversion_says_what_its_program_cannot_load(tmp_path: Path, zckpt: Run) -> None:
    source = Path(shutil.copytree(TRAINER, tmp_path / "checkpoint-4"))
    assert "next: trainer.train(" in zckpt("reshard", source, tmp_path / "a", "--dp", 1).out
    (source / "scheduler.pt").write_bytes(b"")
    ended = zckpt("reshard", source, tmp_path / "b", "--dp", 1)
    assert ended.code == 0
    assert "scheduler.pt is empty" in ended.err
    assert "next:" not in ended.out


@pytest.mark.parametrize(
    "files",
    [
        {"model__pt": "model", "optim__pt": "optim", "scheduler__pt": "", "rng_state__pth": ""},
        {"model__pt": "model", "my_opt__pt": "optim", "scheduler__pt": ""},
        {"model__pt": "model", "optim__pt": "optim", "step_scheduler__pt": ""},
        {"model__pt": "model", "optim__pt": "optim", "rng_state_0__pth": ""},
    ],
)
def test_names_of_a_program_of_its_own(files: dict[str, str], tmp_path: Path) -> None:
    """They are those of no program that the table knows."""
    own = verdict.of(package.read(trained(tmp_path / "ckpt", **files), nameless=True))
    assert texts(own.obstacles) == []


def test_files_without_a_role_are_not_judged(tmp_path: Path, zckpt: Run) -> None:
    folder = Path(shutil.copytree(TRAINER, tmp_path / "checkpoint-4"))
    (folder / "train.bin").write_bytes(bytes(range(256)))
    (folder / "log.json").write_text('{"a": 1}\n{"a": 2}\n')
    (folder / "done.json").write_text("")
    assert zckpt("verify", folder).code == 0


@pytest.mark.parametrize("state", ["[]", "null", "{}", '{"global_step": "4"}'])
def test_json_that_is_no_state(state: str, tmp_path: Path, zckpt: Run) -> None:
    folder = Path(shutil.copytree(TRAINER, tmp_path / "checkpoint-4"))
    (folder / "trainer_state.json").write_text(state)
    assert zckpt("verify", folder).code == 3
    assert zckpt("check", folder, "--dp", 2).code == 3


@pytest.mark.parametrize("kind", ["folder", "dangling"])
def test_what_is_no_file_is_missing(kind: str, tmp_path: Path, zckpt: Run) -> None:
    folder = Path(shutil.copytree(TRAINER, tmp_path / "checkpoint-4"))
    path = folder / "scheduler.pt"
    path.unlink()
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("nowhere")
    ended = zckpt("verify", folder)
    assert (ended.code, "scheduler.pt is missing" in ended.out) == (3, True)


def test_a_full_state_of_fsdp_is_not_the_model_beside(tmp_path: Path) -> None:
    """The Trainer loads pytorch_model_fsdp.bin, and not model.safetensors."""
    folder = trained(tmp_path / "checkpoint-1", optimizer__bin="optim", scheduler__pt="")
    weights = torch.nn.Linear(3, 2).state_dict()
    save_file(weights, folder / "model.safetensors")
    state = {"global_step": 1, "epoch": 1.0}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    own = verdict.of(package.read(folder, nameless=True))
    assert ["pytorch_model_fsdp.bin is missing" in line for line in texts(own.problems)] == [True]
    torch.save(weights, folder / "pytorch_model_fsdp.bin")
    assert verdict.of(package.read(folder, nameless=True)).problems == ()


def test_automodel_becomes_plain_torch(tmp_path: Path) -> None:
    source = ROOT / "tests" / "data" / "automodel-0.7.0-w2"
    package.convert(source, tmp_path / "plain", to="gathered")
    assert verdict.of(package.read(tmp_path / "plain")).problems == ()


def test_a_trainers_folder_is_no_run_of_tags(tmp_path: Path, zckpt: Run) -> None:
    """Also if `latest` names nothing: its engine's folder is no other checkpoint."""
    folder = Path(shutil.copytree(TRAINER, tmp_path / "checkpoint-4"))
    (folder / "latest").write_text("global_step9")
    ended = zckpt("check", folder, "--dp", 2)
    assert ended.code == 3
    assert "names 'global_step9'" in ended.out
    assert zckpt("auto-resume", folder, "--dp", 2).code == 1
