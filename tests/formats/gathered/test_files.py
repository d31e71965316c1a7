"""Which files make a checkpoint of torch.save."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import zckpt
from zckpt import errors, formats
from zckpt.formats.gathered import files

from ...conftest import EXAMPLE, Result
from .plain_torch import (
    assert_same_run,
    names_by_group,
    resumed_pair,
    save,
    trained_pair,
)

Zckpt = Callable[..., Result]


@pytest.mark.parametrize(
    ("model", "optim"),
    [
        ("model.pt", "optim.pt"),
        ("pytorch_model_fsdp.bin", "optimizer.bin"),
        ("model.safetensors", "optimizer.pt"),
        ("pytorch_model.bin", "optimizer.pt"),
    ],
)
def test_usual_names(model: str, optim: str, tmp_path: Path) -> None:
    pair = trained_pair()
    folder = save(tmp_path / "run", pair, model, optim)
    torch.save({"last_epoch": 3}, folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text("{}")
    torch.save({"cpu": torch.get_rng_state()}, folder / "rng_state_0.pth")
    names = names_by_group(pair)
    manifest = zckpt.read(folder, param_names=names)
    assert (manifest.format, manifest.step, len(manifest.parameters)) == ("gathered", 3, 8)
    statistics = ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var"]
    assert sorted(manifest.buffers) == statistics
    carried = sorted(sibling.name for sibling in manifest.files.siblings)
    assert carried == ["rng_state_0.pth", "scheduler.pt", "trainer_state.json"]
    zckpt.convert(folder, tmp_path / "target", to="gathered", param_names=names)
    assert (tmp_path / "target" / "trainer_state.json").read_text() == "{}"


@pytest.mark.parametrize("optim", ["optimizer.pt", None])
def test_tensors_in_safetensors_count_as_unchecked(
    optim: str | None, tmp_path: Path, zckpt: Zckpt
) -> None:
    pair = trained_pair()
    folder = save(tmp_path / "run", pair, "model.safetensors", optim or "optimizer.pt")
    (tmp_path / "names").write_text("\n".join(names_by_group(pair)))
    words: list[object] = ["--param-names", tmp_path / "names"]
    if optim is None:
        (folder / "optimizer.pt").unlink()
        words = []
    tensors = len(load_file(folder / "model.safetensors"))
    which = "some files" if optim else "the files"
    for command in (("verify", folder, *words), ("convert", folder, tmp_path / "target", *words)):
        printed = zckpt(*command)
        assert f"{tensors} parts of files without a checksum: not checked" in printed.out
        assert f"note: {which} of {folder} " in printed.out
        assert ("(model.safetensors)" in printed.out) == (optim is not None)
        shutil.rmtree(tmp_path / "target", ignore_errors=True)
        records = zckpt(*command, "--json").document["records"]
        assert records["unchecked"] == tensors
        assert (records["checked"] > 0) == (optim is not None)
    printed = zckpt("verify", tmp_path / "target", "--against", folder, *words)
    assert printed.code == 0
    assert f"{tensors} parts of files without a checksum: not checked" in printed.out
    printed = zckpt("verify", tmp_path / "target")
    assert "not checked" not in printed.out
    assert "note:" not in printed.out


def test_verls_folder(tmp_path: Path, zckpt: Zckpt) -> None:
    """Files of ranks, whose names are verl's, and a folder `huggingface` beside them."""
    folder, pair = tmp_path / "actor", trained_pair()
    folder.mkdir()
    for rank in range(2):
        rest = f"world_size_2_rank_{rank}.pt"
        torch.save(pair[0].state_dict(), folder / f"model_{rest}")
        torch.save(pair[1].state_dict(), folder / f"optim_{rest}")
        torch.save({"lr_scheduler": {"last_epoch": 3}, "rng": rank}, folder / f"extra_state_{rest}")
    (folder / "huggingface").mkdir()
    (folder / "huggingface" / "config.json").write_text("{}")
    (folder / "rollouts").mkdir()
    (folder / "rollouts" / "big.bin").touch()
    refused = zckpt("reshard", folder, tmp_path / "out", "--dp", "4")
    assert refused.code == 2
    assert "zckpt can only write it as complete files" in refused.err
    assert "any number of ranks" in refused.err
    done = zckpt("reshard", folder, tmp_path / "out")
    assert done.code == 0
    assert "written: full state dicts" in done.out
    assert "model.pt and optim.pt" in done.out
    assert "left out: rollouts/: a folder" in done.out
    assert (tmp_path / "out" / "huggingface" / "config.json").read_text() == "{}"
    assert_same_run(resumed_pair(tmp_path / "out"), pair)


def test_weights_in_several_files(tmp_path: Path) -> None:
    pair = trained_pair()
    folder = save(tmp_path / "run", pair)
    (folder / "model.pt").unlink()
    state = list(pair[0].state_dict().items())
    parts = {"model-1.safetensors": dict(state[:4]), "model-2.safetensors": dict(state[4:])}
    for name, tensors in parts.items():
        save_file(tensors, folder / name)
    index = {"weight_map": {key: name for name, tensors in parts.items() for key in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(errors.MissingData, match="does not show the module's order"):
        zckpt.read(folder)
    names = names_by_group(pair)
    zckpt.convert(folder, tmp_path / "target", to="gathered", param_names=names)
    torch.save(load_file(tmp_path / "target" / "model.safetensors"), tmp_path / "target/model.pt")
    assert_same_run(resumed_pair(tmp_path / "target"), pair)
    for name in ("../model-2.safetensors", str(folder / "model-2.safetensors")):
        outside = json.dumps({"weight_map": {"a": name}})
        (folder / "model.safetensors.index.json").write_text(outside)
        with pytest.raises(errors.CorruptCheckpoint, match=r"index\.json names a file outside of"):
            zckpt.read(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(errors.IncompleteCheckpoint, match=r"model-2\.safetensors is missing"):
        zckpt.read(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "pytorch_model.bin"])
def test_weights_alone(name: str, tmp_path: Path) -> None:
    pair = trained_pair()
    (save(tmp_path / "run", pair, model=name) / "optim.pt").unlink()
    for path in (tmp_path / "run", tmp_path / "run" / name):
        manifest = zckpt.read(path)
        assert manifest.format == "gathered"
        assert manifest.groups is None
        assert [e.name for e in manifest.entries.values()] == [
            f"{name}/param" for name in (*manifest.parameters, *manifest.buffers)
        ]


@pytest.mark.parametrize(
    "name",
    [
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "mp_rank_00_model_states.pt",
        "checkpoint.ort.pt",
        "training_args.bin",
        "rng_state_0.pth",
        "__0_0.distcp",
    ],
)
def test_files_of_others_are_left_to_them(name: str, tmp_path: Path) -> None:
    torch.save(trained_pair()[0].state_dict(), tmp_path / name)
    assert files.detect(str(tmp_path)) == files.detect(str(tmp_path / name)) == []


def test_a_folder_of_files(tmp_path: Path) -> None:
    model, optimizer = trained_pair(named=True)
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(states, tmp_path / "a.pt")
    (tmp_path / "log.txt").write_text("")
    assert zckpt.read(tmp_path).step == 3
    torch.save(states, tmp_path / "b.pt")
    assert zckpt.read(tmp_path, tag="b.pt").step == 3
    with pytest.raises(
        errors.AmbiguousCheckpoint, match=r"2 checkpoints .*: a\.pt, b\.pt"
    ) as raised:
        zckpt.read(tmp_path)
    assert raised.value.hint == "choose with --tag b.pt"


@pytest.mark.parametrize("name", ["a.pt", "model_rank_0.pt", "noise_rank_0.pt"])
def test_detection_and_reading_parse_a_file_once(
    name: str, tmp_path: Path, parses: list[str]
) -> None:
    model, optimizer = trained_pair(named=True)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / name)
    for path in (tmp_path / name, tmp_path):
        parses.clear()
        assert zckpt.read(path).step == 3
        assert parses == [str(tmp_path / name)]


@pytest.mark.parametrize(
    ("name", "holds"),
    [
        ("model_rank_0.pt", "model"),
        ("pytorch_model_fsdp_0_rank0.bin", "model"),
        ("ckpt.rank_0.pth", "both"),
        ("rank0.pt", "both"),
        ("noise_rank_0.pt", "neither"),
    ],
)
def test_names_of_ranks_files(name: str, holds: str, tmp_path: Path) -> None:
    model, optimizer = trained_pair(named=True)
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    value = {"both": states, "model": states["model"], "neither": {"rng": torch.get_rng_state()}}
    torch.save(value[holds], tmp_path / name)
    assert files.detect(str(tmp_path)) == ([] if holds == "neither" else [""])
    if holds != "neither":
        for path in (tmp_path, tmp_path / name):
            assert len(zckpt.read(path).parameters) == 8
            assert (zckpt.read(path).groups is not None) == (holds == "both")


def test_accelerates_ranks(tmp_path: Path) -> None:
    pair = trained_pair(named=True)
    for rank in range(2):
        torch.save(pair[0].state_dict(), tmp_path / f"pytorch_model_fsdp_0_rank{rank}.bin")
        torch.save(pair[1].state_dict(), tmp_path / f"optimizer_0_rank{rank}.bin")
    torch.save({"last_epoch": 1}, tmp_path / "scheduler.bin")
    manifest = zckpt.read(tmp_path)
    assert (manifest.step, len(manifest.files.paths), manifest.notices.omitted) == (3, 4, ())
    assert [sibling.name for sibling in manifest.files.siblings] == ["scheduler.bin"]


def test_no_format_takes_the_files_of_another(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", trained_pair())
    for path in (folder, folder / "model.pt", EXAMPLE):
        known = [item.name for item in formats.FORMATS if item.detect(str(path))]
        assert known == ["deepspeed" if path == EXAMPLE else "gathered"]


def test_two_files_of_an_index_with_one_name(tmp_path: Path, zckpt: Zckpt) -> None:
    """A file that was copied over another one of the same model."""
    folder = tmp_path / "model"
    folder.mkdir()
    names = [f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    for name, key in zip(names, "ab", strict=True):
        save_file({key: torch.randn(3)}, folder / name)
    index = {"metadata": {}, "weight_map": dict(zip("ab", names, strict=True))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert zckpt("verify", folder).code == 0
    shutil.copy(folder / names[0], folder / names[1])
    for words, code in ((("convert", folder, tmp_path / "out"), 1), (("verify", folder), 3)):
        ended = zckpt(*words)
        assert ended.code == code
        text = ended.err + ended.out
        assert all(name in text for name in names)
        assert "both have a" in text


@pytest.mark.parametrize(
    ("one", "other"), [("model", "optim"), ("optim", "model"), ("scheduler", "optim")]
)
def test_a_file_of_another_kind(one: str, other: str, tmp_path: Path) -> None:
    """A copied model would be kept beside the model, as if it were the program's own state."""
    folder = save(tmp_path / "run", trained_pair(), "model.pt", "optim.pt")
    torch.save({"last_epoch": 3}, folder / "scheduler.pt")
    shutil.copy(folder / f"{one}.pt", folder / f"{other}.pt")
    said = f"{other}.pt was saved as {one}.pt: files of two kinds are swapped"
    with pytest.raises(errors.InconsistentCheckpoint, match=said):
        zckpt.convert(folder, tmp_path / "target")
    (problem,) = zckpt.verify(folder)["problems"]
    assert said in problem["message"]


def test_the_name_of_no_file_says_nothing(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", trained_pair(), "model.pt", "optim.pt")
    (folder / "model.pt").rename(folder / "pytorch_model.bin")
    assert zckpt.verify(folder, param_names=names_by_group(trained_pair()))["equal"]


def test_names_for_an_optimizer_that_is_not_there(tmp_path: Path) -> None:
    """Its file was lost: `convert` takes the names for those of the target, which has others."""
    folder = save(tmp_path / "run", trained_pair(), "model.pt", "optim.pt")
    names = names_by_group(trained_pair())
    assert zckpt.verify(folder, param_names=names)["notes"] == []
    (folder / "optim.pt").unlink()
    (note,) = zckpt.verify(folder, param_names=names)["notes"]
    assert note["message"] == "--param-names is not used, because the checkpoint has no optimizer"
    assert zckpt.verify(folder)["notes"] == []
