"""What a user is told who typed a word that zckpt does not know, or a path that is no folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import zckpt as package
from zckpt import errors
from zckpt.copying import targets
from zckpt.errors import meant, sized

from ..conftest import EXAMPLE, Result

Program = Callable[..., Result]


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("ddp", "the format gathered"),
        ("huggingface", "zckpt export SRC DST"),
        ("FSDP2", "the format dcp"),
        ("mcore", "the format megatron"),
        ("zero3", "the format deepspeed"),
        ("gguf", "convert_hf_to_gguf.py"),
        ("deepsped", "Did you mean deepspeed?"),
        ("gatherd", "Did you mean gathered?"),
        ("qqq", "choose one of deepspeed,"),
    ],
)
def test_words_that_are_no_format(word: str, hint: str, tmp_path: Path, zckpt: Program) -> None:
    for words in (("--to", word), ("--from", word)):
        refused = zckpt("convert", EXAMPLE, tmp_path / "out", *words)
        assert refused.code == 2
        assert hint in refused.err.splitlines()[1], refused.err


@pytest.mark.parametrize(
    ("command", "flag", "hint"),
    [
        ("reshard", "--pd", "Did you mean --dp?"),
        ("reshard", "--stge", "Did you mean --stage"),
        ("reshard", "--to", "reshard keeps the format of SRC: zckpt convert SRC DST"),
        ("verify", "--agianst", "Did you mean --against?"),
        ("inspect", "--qqqq", "`zckpt inspect --help` lists the options"),
    ],
)
def test_options_that_are_none(command: str, flag: str, hint: str, zckpt: Program) -> None:
    refused = zckpt(command, EXAMPLE, "out", flag, "3")
    assert refused.code == 2
    assert refused.err.startswith(f"Error: No such option '{flag}'. [usage-error]\nHint: {hint}")


def test_swapped_letters_come_first() -> None:
    assert meant("--pd", ["--ep", "--pp", "--tp", "--dp"]) == "Did you mean --dp?"
    assert meant("--xyz", ["--ep"]) == ""


@pytest.mark.parametrize(
    ("path", "said", "hint"),
    [
        ("file:///data/run", "is a URL", "give the path alone: /data/run"),
        ("ftp://x/y", "is a URL", "give a path of this machine, or s3://"),
        ("~/run", "begins with ~", '"$HOME/run"'),
    ],
)
def test_sources_that_are_elsewhere(path: str, said: str, hint: str, zckpt: Program) -> None:
    refused = zckpt("inspect", path)
    assert refused.code == 1
    assert said in refused.err
    assert hint in refused.err


@pytest.mark.parametrize(
    ("name", "said", "hint"),
    [
        ("run.tar", "a packed file", "tar -xf "),
        ("run.tar.gz", "a packed file", "tar -xf "),
        ("run.zip", "a packed file", "unzip "),
        ("model.gguf", "a GGUF file", "that the training program saved"),
    ],
)
def test_files_that_are_no_checkpoints(
    name: str, said: str, hint: str, tmp_path: Path, zckpt: Program
) -> None:
    (tmp_path / name).write_bytes(b"something")
    refused = zckpt("inspect", tmp_path / name)
    assert refused.code == 1
    assert said in refused.err
    assert hint in refused.err


def test_a_torch_file_may_have_any_name(tmp_path: Path) -> None:
    """Programs of torch call them model.pth.tar; they are no archives."""
    model = torch.nn.Linear(3, 2)
    torch.save({"state_dict": model.state_dict()}, tmp_path / "model.pth.tar")
    assert package.read(tmp_path / "model.pth.tar").parameters


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("out.tar", "tar -cf DIR.tar DIR"),
        ("out.tar.gz", "tar -cf DIR.tar DIR"),
        ("out.zip", "tar -cf DIR.tar DIR"),
        ("out.gguf", "convert_hf_to_gguf.py"),
        ("ftp://x/y", "give a path of this machine, or s3://"),
        ("~/out", '"$HOME/out"'),
    ],
)
def test_targets_that_would_be_no_folders_there(
    target: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zckpt: Program
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = zckpt("convert", EXAMPLE, target)
    assert refused.code == 2
    assert hint in refused.err
    assert list(tmp_path.iterdir()) == []


def test_options_of_a_target_that_no_one_typed(tmp_path: Path, zckpt: Program) -> None:
    refused = zckpt("convert", EXAMPLE, tmp_path / "out", "--dp", "2")
    assert refused.code == 2
    assert "--dp does not apply to a universal checkpoint (convert without --to)" in refused.err
    refused = zckpt("convert", EXAMPLE, tmp_path / "out", "--to", "dcp", "--stage", "2")
    assert "--stage does not apply to --to dcp" in refused.err


def test_a_tag_where_there_is_none(tmp_path: Path, zckpt: Program) -> None:
    (tmp_path / "latest").write_text("global_step7")
    for words in ((), ("--tag", "global_step9")):
        refused = zckpt("inspect", tmp_path, "--from", "deepspeed", *words)
        assert refused.code == 1
        assert "choose a tag" not in refused.err
        assert "no tag's folder at all" in refused.err
    refused = zckpt("inspect", EXAMPLE, "--tag", "global_step9")
    assert f"choose a tag with --tag: {EXAMPLE} has global_step7" in refused.err


def test_a_dry_run_of_many_ranks_is_short(tmp_path: Path, zckpt: Program) -> None:
    done = zckpt("reshard", EXAMPLE, tmp_path / "out", "--dp", "1000", "--dry-run")
    assert done.code == 0
    lines = done.out.splitlines()
    assert "in 1,002 files:" in lines[1]
    assert sum(line.startswith("  ") for line in lines) == 11
    assert "  and 992 other files; --json lists all" in lines
    words = ("reshard", EXAMPLE, tmp_path / "out", "--dp", "1000", "--dry-run", "--json")
    assert len(zckpt(*words).document["files"]) == 1002


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (48_900, "48.9 kB"),
        (999_700, "1 MB"),
        (1_490_000_000, "1.49 GB"),
        (5_000_000_000_000_000, "5,000 TB"),
    ],
)
def test_sizes_are_never_rounded_to_nothing(size: int, text: str) -> None:
    assert sized(size) == text


def test_a_small_target_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "free_space", lambda _: 10)
    with pytest.raises(errors.NotEnoughSpace, match=r"needs 48\.9 kB, but only 10 B are free"):
        package.convert(EXAMPLE, tmp_path / "out")
