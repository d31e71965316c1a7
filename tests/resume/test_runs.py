"""Which checkpoints a run has, and in which order they are tried."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import zckpt
from zckpt.errors import (
    AmbiguousCheckpoint,
    IncompleteCheckpoint,
    NotACheckpoint,
    UnsupportedCheckpoint,
)
from zckpt.resume.runs import candidates

from ..conftest import EXAMPLE, ROOT
from .conftest import BESIDE, DAMAGE, OPTIMIZER, TAGS, cut, original

DATA = ROOT / "tests" / "data"
FSDP2 = DATA / "fsdp2-2.13.0-tiny"
MEGATRON = DATA / "megatron-0.16.1-tp2"


def flip_in_tensor(path: Path) -> None:
    data = path.read_bytes()
    place = data.index(b"/data/0") + 200
    path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def zeroed(path: Path) -> None:
    """As a power loss leaves a file: it has its size, and no byte of it was written."""
    path.write_bytes(bytes(path.stat().st_size))


def zeroed_behind(path: Path) -> None:
    """Its first page alone was written."""
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: min(4096, size // 2)].ljust(size, b"\0"))


def names(run: Path) -> list[str]:
    return [each.name for each in candidates(str(run))]


def laid_out(run: Path, source: Path, *folders: str) -> Path:
    for folder in folders:
        shutil.copytree(source, run / folder)
    return run


def test_tags_of_deepspeed(run: Path) -> None:
    assert names(run) == [*reversed(TAGS)]
    first, second, _ = candidates(str(run))
    assert (first.loaded, second.loaded) == (str(run), str(run / TAGS[1]))


def test_the_tag_that_latest_names_comes_first(run: Path) -> None:
    (run / "latest").write_text(TAGS[1])
    assert names(run) == [TAGS[1], TAGS[2], TAGS[0]]
    with pytest.warns(UserWarning, match="global_step6 as its last checkpoint, which is used"):
        path = zckpt.auto_resume(run, dp=4)
    assert path == str(run)


@pytest.mark.parametrize(
    ("folders", "newest"),
    [
        (("checkpoint-9", "checkpoint-10"), "checkpoint-10"),
        (("checkpoints/checkpoint_2", "checkpoints/checkpoint_11"), "checkpoint_11"),
    ],
)
def test_folders_of_trainers(folders: tuple[str, ...], newest: str, tmp_path: Path) -> None:
    run = laid_out(tmp_path / "run", EXAMPLE, *folders)
    assert names(run)[0] == newest
    path = zckpt.auto_resume(run, dp=4)
    assert path is not None
    assert os.path.basename(path) == newest
    assert path.step == 7


def test_steps_of_torchtitan(tmp_path: Path) -> None:
    run = laid_out(tmp_path / "run", FSDP2, "checkpoint/step-10", "checkpoint/step-200")
    for each in (run, run / "checkpoint"):
        assert zckpt.auto_resume(each, dp=5) == str(run / "checkpoint" / "step-200")


def test_iterations_of_megatron(tmp_path: Path) -> None:
    run = Path(shutil.copytree(MEGATRON, tmp_path / "run"))
    shutil.copytree(run / "iter_0000003", run / "iter_0000012")
    (run / "latest_checkpointed_iteration.txt").write_text("12")
    path = zckpt.auto_resume(run, dp=3)
    assert path is not None
    assert (path, path.step, path.tag) == (str(run), 12, "iter_0000012")


def test_lightning_has_a_last_one_beside_the_best(tmp_path: Path) -> None:
    run = tmp_path / "lightning_logs" / "version_0" / "checkpoints"
    for name, step in (("epoch=0-step=3.ckpt", 3), ("last.ckpt", 5)):
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([parameter])
        for _ in range(step):
            parameter.grad = torch.ones(3)
            optimizer.step()
        run.mkdir(parents=True, exist_ok=True)
        state = {"state_dict": {"w": parameter.data}, "optimizer_states": [optimizer.state_dict()]}
        torch.save({**state, "global_step": step, "pytorch-lightning_version": "2.6"}, run / name)
    assert names(tmp_path) == ["last.ckpt", "epoch=0-step=3.ckpt"]
    assert zckpt.auto_resume(tmp_path, dp=2) == str(run / "last.ckpt")
    (run / "last.ckpt").write_bytes((run / "last.ckpt").read_bytes()[:-300])
    with pytest.warns(UserWarning, match=r"last\.ckpt is skipped: .*step=3\.ckpt is used"):
        assert zckpt.auto_resume(tmp_path, dp=2) == str(run / "epoch=0-step=3.ckpt")


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("verify", ["records", "files"])
def test_a_broken_newest_one(damage: str, verify: str, run: Path) -> None:
    """A flipped bit shows only where all bytes are read."""
    DAMAGE[damage](run / TAGS[-1])
    before = original(run)
    if (damage, verify) == ("flipped", "files"):
        assert zckpt.auto_resume(run, dp=4, verify="files") == str(run)
        return
    with pytest.warns(UserWarning, match=f"{TAGS[2]} is skipped: .*; .*{TAGS[1]} is used"):
        path = zckpt.auto_resume(run, dp=4, verify=verify)  # type: ignore[arg-type]
    assert path is not None
    assert (path, path.tag) == (str(run / TAGS[1]), TAGS[1])
    assert [each["path"] for each in path.report["left_aside"]] == [str(run / TAGS[2])]
    assert original(run) == before


def test_a_broken_newest_one_at_another_size(run: Path) -> None:
    DAMAGE["flipped"](run / TAGS[-1])
    with pytest.warns(UserWarning, match="is skipped"):
        path = zckpt.auto_resume(run, dp=3)
    assert path == str(run / BESIDE / f"{TAGS[1]}-dp3")


def test_none_is_whole(run: Path) -> None:
    for tag in TAGS:
        DAMAGE["lost"](run / tag)
    with pytest.raises(
        IncompleteCheckpoint, match=r"has 3 checkpoints, but none is complete: .*step7"
    ):
        zckpt.auto_resume(run, dp=4)


def test_the_trainer_writes_its_state_last(tmp_path: Path) -> None:
    run = laid_out(tmp_path / "run", EXAMPLE, "checkpoint-9", "checkpoint-10")
    for folder in run.iterdir():
        (folder / "training_args.bin").write_bytes(b"pickle")
    (run / "checkpoint-9" / "trainer_state.json").write_text('{"global_step": 7}')
    with pytest.warns(
        UserWarning, match="trainer_state.json is missing, without which the program cannot resume"
    ):
        assert zckpt.auto_resume(run, dp=4) == str(run / "checkpoint-9")


@pytest.mark.parametrize(
    ("name", "damage", "what"),
    [
        ("rng_state_0.pth", flip_in_tensor, "is damaged"),
        ("rng_state_1.pth", cut, "ends too early"),
        ("scheduler.pt", cut, "ends too early"),
        ("trainer_state.json", cut, "is damaged"),
        ("trainer_state.json", emptied, "is empty"),
        ("scheduler.pt", zeroed, "has zeros alone"),
        ("rng_state_1.pth", zeroed, "has zeros alone"),
        ("trainer_state.json", zeroed, "has zeros alone"),
        ("rng_state_0.pth", zeroed_behind, "ends too early"),
    ],
)
def test_a_file_of_the_trainer(
    name: str, damage: Callable[[Path], None], what: str, tmp_path: Path
) -> None:
    """The Trainer ends if it cannot load one of these."""
    source = ROOT / "examples" / "trainer" / "checkpoint-4"
    run = laid_out(tmp_path / "run", source, "checkpoint-9", "checkpoint-10")
    damage(run / "checkpoint-10" / name)
    with pytest.warns(UserWarning, match=f"{name} {what}, with which the program cannot resume"):
        assert zckpt.auto_resume(run, dp=2) == str(run / "checkpoint-9")


def test_two_runs_below_one_folder(tmp_path: Path) -> None:
    """Starts that Lightning numbers are one run."""
    source = ROOT / "examples" / "trainer" / "checkpoint-4"
    run = laid_out(tmp_path / "two", source, "x/checkpoint-4", "y/checkpoint-6")
    with pytest.raises(AmbiguousCheckpoint, match=r"two holds several runs: .*/x, .*/y"):
        zckpt.auto_resume(run, dp=2)
    folders = [f"version_{number}/checkpoints/step={number}.ckpt" for number in range(2)]
    run = laid_out(tmp_path / "logs", FSDP2, *folders)
    assert names(run) == ["step=1.ckpt", "step=0.ckpt"]


def seem_compressed(tag: Path) -> None:
    """Flips a bit of a zip directory."""
    path = tag / OPTIMIZER
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\1\2") + 10] ^= 8
    path.write_bytes(data)


def test_what_seems_unsupported(run: Path) -> None:
    """An older one is taken; if there is none, the error is that of the newest."""
    seem_compressed(run / TAGS[2])
    with pytest.warns(UserWarning, match=f"{TAGS[2]} is skipped: .* is compressed or encrypted"):
        assert zckpt.auto_resume(run, dp=4) == str(run / TAGS[1])
    for tag in TAGS[:2]:
        seem_compressed(run / tag)
    with pytest.raises(UnsupportedCheckpoint, match="is compressed or encrypted"):
        zckpt.auto_resume(run, dp=4)


@pytest.mark.parametrize("word", ["", "x"])
def test_latest_that_names_nothing(word: str, run: Path) -> None:
    (run / "latest").write_text(word)
    with pytest.warns(UserWarning, match=f"is skipped: {run}/latest names '{word}'"):
        assert zckpt.auto_resume(run, dp=4) == str(run / TAGS[2])


def test_what_has_no_checksum_is_counted(tmp_path: Path) -> None:
    """Weights in safetensors, as a Trainer without ZeRO saves them; it counts the steps itself."""
    run = tmp_path / "run" / "checkpoint-4"
    run.mkdir(parents=True)
    weights = {name: torch.nn.Parameter(torch.ones(3)) for name in "ab"}
    optimizer = torch.optim.AdamW(weights.values())
    sum(weights.values()).sum().backward()  # type: ignore[union-attr]
    optimizer.step()
    torch.save(optimizer.state_dict(), run / "optimizer.pt")
    save_file({name: each.data for name, each in weights.items()}, run / "model.safetensors")
    (run / "trainer_state.json").write_text(json.dumps({"global_step": 4}))
    torch.save({"last_epoch": 4}, run / "scheduler.pt")
    path = zckpt.auto_resume(run.parent)
    assert path is not None
    assert path.report["records"]["unchecked"] == len(weights)
    assert path.step == 4
    files = zckpt.auto_resume(run.parent, verify="files")
    assert files is not None
    assert files.report["records"] is None


def test_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty" / "runs").mkdir(parents=True)
    assert zckpt.auto_resume(tmp_path / "empty") is None
    with pytest.warns(UserWarning, match="nothing does not exist"):
        assert zckpt.auto_resume(tmp_path / "nothing") is None
    (tmp_path / "file").write_text("a log")
    with pytest.raises(NotACheckpoint, match="is a file, not the folder of a run"):
        zckpt.auto_resume(tmp_path / "file")


@pytest.mark.parametrize(
    "source",
    [EXAMPLE, EXAMPLE / TAGS[-1], FSDP2, MEGATRON, MEGATRON / "iter_0000003"],
    ids=lambda path: path.name,
)
def test_readers_pass_over_what_lies_beside(source: Path, tmp_path: Path) -> None:
    """Also in a trainer's directory, whose other files are copied along."""
    run = Path(shutil.copytree(source, tmp_path / "run"))
    (run / "trainer_state.json").write_text("{}")
    before = zckpt.inspect(zckpt.read(run))
    shutil.copytree(EXAMPLE, run / BESIDE / "global_step3-dp2")
    (run / BESIDE / "lock").touch()
    after = zckpt.inspect(zckpt.read(run))
    assert after == before
    assert BESIDE not in str(after)
