"""Numbered folders around one checkpoint: each command takes them, and gives them back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import zckpt
from zckpt import formats
from zckpt.errors import NotACheckpoint
from zckpt.resume.runs import candidates

from ..conftest import ROOT, Result, texts
from .gathered import torch_ranks
from .gathered.test_verl import rows_folder

DATA = ROOT / "tests" / "data"
Make = Callable[[Path], None]


def around(folder: Path, *names: str) -> None:
    """Other files of a numbered folder, each with its own name as its content."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def of_olmo(folder: Path) -> None:
    shutil.copytree(DATA / "fsdp2-2.13.0-tiny", folder / "model_and_optim")
    around(folder, ".metadata.json", "config.json", "train/rank0.pt", "train/rank1.pt")


def of_verl(folder: Path, *models: str) -> None:
    torch.manual_seed(3)
    for model in models or ("actor",):
        rows_folder(folder / model, torch_ranks.dtensors([2], [0]))
    torch.save({"rng": torch.get_rng_state()}, folder / "data.pt")  # it has a tensor


def of_lerobot(folder: Path) -> None:
    """The optimizer has a form of its own."""
    inside = folder / "pretrained_model"
    around(inside, "train_config.json")
    save_file({"weight": torch.ones(2, 3)}, inside / "model.safetensors")
    names = ("optimizer_param_groups.json", "training_step.json", "rng_state.safetensors")
    around(folder / "training_state", *names, "optimizer_state.safetensors")


def of_prime_rl(folder: Path) -> None:
    shutil.copytree(DATA / "fsdp2-2.13.0-tiny", folder / "trainer")
    around(folder, "orchestrator/progress.pt", "trainer/dataloader/rank_0.pt")


def deeper(folder: Path) -> None:
    """As verl keeps Megatron-Core's."""
    source = DATA / "megatron-0.16.1-tp2" / "iter_0000003"
    shutil.copytree(source, folder / "actor" / "dist_ckpt")
    around(folder, "data.pt", "actor/huggingface/config.json")


LAYOUTS: dict[str, tuple[str, str, Make]] = {
    "OLMo-core": ("step3 step12", "model_and_optim", of_olmo),
    "verl": ("global_step_3 global_step_12", "actor", of_verl),
    "lerobot": ("000300 001200", "pretrained_model", of_lerobot),
    "prime-rl": ("step_3 step_12", "trainer", of_prime_rl),
    "verl, Megatron": ("global_step_3 global_step_12", "actor/dist_ckpt", deeper),
}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[list[Path], str]:
    """The numbered folders of a run, the oldest first, and the folder inside of each."""
    names, inside, make = LAYOUTS[request.param]
    folders = [tmp_path / "run" / "checkpoints" / name for name in names.split()]
    for folder in folders:
        make(folder)
    return folders, inside


def files(folder: Path, without: str) -> dict[str, bytes]:
    """The bytes of the files around a checkpoint, by name."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {n: path.read_bytes() for n, path in found.items() if not n.startswith(f"{without}/")}


def are_equal(a: Path, b: Path) -> bool:
    """Whether nothing differs; names of parameters may be inferred on both sides."""
    report = zckpt.verify(a, against=b)
    return not any(report[key] for key in ("differences", "problems", "states", "groups"))


def flip_first_tensor(path: Path) -> None:
    """torch aligns it to 64 bytes behind its name."""
    data = bytearray(path.read_bytes())
    data[(data.index(b"/data/0") + 75) // 64 * 64] ^= 4
    path.write_bytes(data)


def test_each_command_takes_it(
    layout: tuple[list[Path], str], zckpt: Callable[..., Result]
) -> None:
    (first, last), inside = layout
    run = last.parent.parent
    for folder in (first, last):
        assert json.loads(zckpt("inspect", folder, "--json").out)["path"] == str(folder)
        assert zckpt("auto-resume", folder).out.strip() == str(folder)
        rows = json.loads(zckpt("list", folder, "--json").out)["checkpoints"]
        assert [row["path"] for row in rows] == [str(folder)]
    rows = json.loads(zckpt("list", run, "--json").out)["checkpoints"]
    assert [(row["path"], row["whole"]) for row in rows] == [(str(first), True), (str(last), True)]
    assert zckpt("auto-resume", run).out.strip() == str(last)
    assert json.loads(zckpt("check", run, "--json").out)["path"] == str(last)
    assert json.loads(zckpt("check", first, "--json").out)["loads"]
    assert are_equal(first, last)
    refused = zckpt("inspect", run).err
    assert f"such as {last} (its files are in {last / inside})" in refused


def test_a_target_has_its_form(layout: tuple[list[Path], str], tmp_path: Path) -> None:
    """Also by way of a universal checkpoint, and under a name without a number."""
    (first, _), inside = layout
    universal, again = tmp_path / "universal", tmp_path / "again"
    zckpt.convert(first, universal)
    targets = {tmp_path / "out" / first.name: first, again: universal}
    (tmp_path / "out").mkdir()
    for target, source in targets.items():
        report = zckpt.reshard(source, target)
        assert {*files(first, inside)} <= {*report["copied"]}
        assert are_equal(target, first)
        if report["format"] == "megatron":  # whose own folder of an iteration is a numbered one
            assert (target / "iter_0000003").is_dir()
            continue
        assert formats.inside_numbered(str(target)) == [inside]
        assert files(target, inside) == files(first, inside)
        unnamed = [each for each in texts(report["warnings"]) if "has no number at the end" in each]
        assert bool(unnamed) == (target == again)


def test_another_programs_target_has_the_files_too(tmp_path: Path) -> None:
    of_olmo(tmp_path / "step3")
    around(tmp_path / "step3", "model.pt")
    report = zckpt.convert(tmp_path / "step3", tmp_path / "out", to="gathered")
    assert {"train/rank0.pt", "config.json", ".metadata.json"} <= {*report["copied"]}
    assert "model.pt: the target has its own" in texts(report["left_out"])
    assert zckpt.verify(tmp_path / "out", against=tmp_path / "step3")["equal"]
    report = zckpt.convert(tmp_path / "step3", tmp_path / "w", to="gathered", weights_only=True)
    assert (report["copied"], report["files"]) == ([], ["model.pt"])
    assert any("train/rank0.pt" in line for line in texts(report["left_out"]))


def test_links_and_secrets_around_it_stay_there(tmp_path: Path) -> None:
    of_olmo(tmp_path / "step3")
    (tmp_path / "secret").write_text("SECRET")
    (tmp_path / "step3" / "train" / "linked").symlink_to(tmp_path / "secret")
    around(tmp_path / "step3", ".env", ".zckpt/step3-dp2/x")
    report = zckpt.reshard(tmp_path / "step3", tmp_path / "step4")
    assert not {"train/linked", ".env"} & {*report["copied"]}
    assert {"train/linked: a link out of the directory", ".env: hidden"} <= {
        *texts(report["left_out"])
    }
    assert not (tmp_path / "step4" / ".zckpt").exists()


def test_two_models_of_one_step(tmp_path: Path, zckpt: Callable[..., Result]) -> None:
    """Both are named, and one may be chosen."""
    step = tmp_path / "run" / "global_step_5"
    of_verl(step, "actor", "critic")
    commands = ("inspect", step), ("auto-resume", step.parent), ("check", step.parent)
    for words in commands:
        result = zckpt(*words)
        assert result.code != 0
        assert f"{step} holds 2 checkpoints: actor, critic" in result.err
        assert f"--root actor, or give {step / 'actor'}" in result.err
        assert zckpt(*words, "--root", "critic").code == 0
    target = tmp_path / "out_5"
    report = json.loads(zckpt("reshard", step, target, "--root", "critic", "--json").out)
    assert sorted(path.name for path in target.iterdir()) == ["critic", "data.pt"]
    assert "actor/: --root takes critic" in texts(report["left_out"])
    assert are_equal(target, step / "critic")


def test_the_form_decides(tmp_path: Path) -> None:
    """A number at the end of the name, and one checkpoint that has none in its own."""
    for name, is_one in (("step3", True), ("step3-tmp", False), ("step", False)):
        of_olmo(tmp_path / "a" / name)
        assert bool(formats.inside_numbered(str(tmp_path / "a" / name))) == is_one
    run = tmp_path / "run2"
    shutil.copytree(DATA / "fsdp2-2.13.0-tiny", run / "checkpoints" / "epoch_3")
    assert formats.inside_numbered(str(run)) == []
    assert [each.name for each in candidates(str(run))] == ["epoch_3"]
    weights = tmp_path / "model7" / "best"  # from which nothing goes on
    weights.mkdir(parents=True)
    save_file({"weight": torch.ones(3)}, weights / "model.safetensors")
    with pytest.raises(NotACheckpoint, match="model7 is not a checkpoint"):
        zckpt.read(weights.parent)


@pytest.mark.parametrize("number", ["3", "12", "x", "", "3" * 100])
def test_the_run_names_its_last_one(number: str, tmp_path: Path) -> None:
    """verl writes the file when a save has ended; lerobot has a link."""
    for step in (3, 12):
        of_verl(tmp_path / f"global_step_{step}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(number)
    names = [each.name for each in candidates(str(tmp_path))]
    assert names[0] == ("global_step_3" if number == "3" else "global_step_12")
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    (tmp_path / "last").symlink_to("global_step_3")
    assert candidates(str(tmp_path))[0].name == "global_step_3"


def test_auto_resume_writes_a_folder_of_the_same_name(tmp_path: Path) -> None:
    """verl takes the number from the end of the path: `global_step_3-dp3` has another one."""
    run = tmp_path / "run"
    of_verl(run / "global_step_3")
    path = zckpt.auto_resume(run, dp=3)
    assert path == str(run / ".zckpt" / "global_step_3-dp3" / "global_step_3")
    assert path.report["load_dir"] == path
    assert (Path(path) / "data.pt").read_bytes() == (run / "global_step_3/data.pt").read_bytes()
    again = zckpt.auto_resume(run, dp=3)
    assert (again, again and again.report["written"]) == (path, False)
    flip_first_tensor(Path(path) / "actor" / "model_world_size_3_rank_1.pt")
    mended = zckpt.auto_resume(run, dp=3)
    assert (mended, mended and mended.report["written"]) == (path, True)
    assert are_equal(Path(path), run / "global_step_3")
