"""A mended copy has the bytes of the original, or there is none."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zckpt as package
from zckpt.core.checkpoint.mended import MENDED
from zckpt.core.storage.fragments import Extent
from zckpt.errors import CorruptCheckpoint, IncompleteCheckpoint, MissingData, ZckptError
from zckpt.files.zipdirectory import ZipMember
from zckpt.mending import explaining
from zckpt.mending.containers import members_of

from ..conftest import EXAMPLE, ROOT, Result
from .damaging import contents, flip, put

DATA = ROOT / "tests" / "data"
OPTIMIZER = "global_step7/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = "global_step7/mp_rank_00_model_states.pt"
MASTER = 9000, 3
"""A byte of a master's element in OPTIMIZER, and a bit that does not change the 16-bit weight."""


def records(path: Path, file: str) -> list[Any]:
    """The records of a file that have tensors, the longest last."""
    manifest = package.read(path, nameless=True, opens_items=True)
    own = [each for each in manifest.files.records if each.extent.file.endswith(file)]
    return sorted(own, key=lambda each: each.extent.length)


def test_a_flipped_bit(example: Path, tmp_path: Path, zckpt: Callable[..., Result]) -> None:
    """It is said before the copy, the copy has the original's bytes, and the source stays."""
    flip(example / OPTIMIZER, *MASTER)
    before = contents(example)
    told = zckpt("mend", example, tmp_path / "mended", "--dry-run")
    assert told.code == 3
    assert "can be restored exactly:\n  bit 3 of byte 9000 of " in told.out
    assert "element 103 of fc1.weight/master: 0.13640043" in told.out
    assert "1 of 284,360 cases" in told.out
    assert not (tmp_path / "mended").exists()
    ended = zckpt("mend", example, tmp_path / "mended")
    assert (ended.code, ended.err) == (0, "")
    assert told.out in ended.out
    assert "a mended copy of" in ended.out
    assert contents(tmp_path / "mended") == contents(EXAMPLE)
    assert contents(example) == before
    (line,) = json.loads((tmp_path / "mended" / "global_step7" / MENDED).read_text())["mended"]
    assert line["file"] == OPTIMIZER
    assert (line["offset"], line["bit"], line["bytes"], line["by"]) == (*MASTER, 1, "checksum")
    assert (line["tensor"], line["element"]) == ("fc1.weight/master", 103)


def test_the_report(example: Path, tmp_path: Path, zckpt: Callable[..., Result]) -> None:
    flip(example / OPTIMIZER, *MASTER)
    report = zckpt("mend", example, tmp_path / "mended", "--json").document
    assert report == {**report, "written": True, "dry_run": False, "problems": []}
    (place,) = report["places"]
    assert (place["code"], place["state"], place["by"]) == ("mended", "restored", "checksum")
    assert place["chance"] == pytest.approx(8 * place["record"]["length"] / 2**32)
    assert set(report["files"]) == {*contents(EXAMPLE), f"global_step7/{MENDED}"}
    twin = package.mend(example, tmp_path / "again")
    assert twin["places"] == report["places"]


def test_it_stays_visible(example: Path, tmp_path: Path, zckpt: Callable[..., Result]) -> None:
    """Every command warns, and so do targets of targets."""
    flip(example / OPTIMIZER, *MASTER)
    package.mend(example, tmp_path / "mended")
    package.convert(tmp_path / "mended", tmp_path / "universal")
    package.convert(tmp_path / "universal", tmp_path / "dcp", to="dcp")
    package.reshard(tmp_path / "universal", tmp_path / "resharded", dp=2)
    for name in ("mended", "universal", "dcp", "resharded"):
        for command, key in (("inspect", "problems"), ("verify", "warnings")):
            said = zckpt(command, tmp_path / name, "--json").document[key]
            (line,) = [each for each in said if each["code"] == "mended"]
            assert line["subject"] == "fc1.weight/master", (name, command)
    assert not list((tmp_path / "universal").glob(f"**/{MENDED}"))
    assert list((tmp_path / "resharded").glob(f"*/{MENDED}"))


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "MENDED"),
        ("verify", "MENDED"),
        ("verify", EXAMPLE, "--against", "MENDED"),
        ("diff", EXAMPLE, "MENDED"),
        ("stats", "MENDED"),
        ("check", "MENDED"),
        ("list", "MENDED"),
        ("auto-resume", "MENDED", "--dp", 4),
        ("report", "MENDED", "--json"),
        ("mend", "MENDED", "OUT", "--dry-run"),
        ("reshard", "MENDED", "OUT", "--dp", 2),
        ("convert", "MENDED", "OUT", "--weights-only"),
    ],
)
def test_commands_warn(
    words: tuple[Any, ...], example: Path, tmp_path: Path, zckpt: Callable[..., Result]
) -> None:
    flip(example / OPTIMIZER, *MASTER)
    package.mend(example, tmp_path / "mended")
    paths = {"MENDED": tmp_path / "mended", "OUT": tmp_path / "out"}
    ended = zckpt(*(paths.get(word, word) for word in words))
    said = ended.out + ended.err
    assert said.count("zckpt mend has restored 1 record of") == 1
    assert ended.code == 0


def test_a_mended_copy_is_mended_again(example: Path, tmp_path: Path) -> None:
    """The list has both places."""
    flip(example / OPTIMIZER, *MASTER)
    package.mend(example, tmp_path / "first")
    flip(tmp_path / "first" / OPTIMIZER, 3268, 1)
    package.mend(tmp_path / "first", tmp_path / "second")
    assert contents(tmp_path / "second") == contents(EXAMPLE)
    listed = json.loads((tmp_path / "second" / "global_step7" / MENDED).read_text())["mended"]
    assert [line["offset"] for line in listed] == [MASTER[0], 3268]


def test_nothing_is_damaged(example: Path, tmp_path: Path, zckpt: Callable[..., Result]) -> None:
    ended = zckpt("mend", example, tmp_path / "mended", "--dry-run")
    assert (ended.code, ended.out) == (0, f"nothing is damaged in {example}\n")
    refused = zckpt("mend", example, tmp_path / "mended")
    assert refused.code == 1
    assert "nothing to mend" in refused.err
    assert not (tmp_path / "mended").exists()


def test_damage_of_many_bits(example: Path, tmp_path: Path, zckpt: Callable[..., Result]) -> None:
    """Nothing explains it, so it is refused by name, also beside a flipped bit."""
    record = records(example, OPTIMIZER)[-1].extent
    put(example / OPTIMIZER, record.offset + 100, b"\1\2\3\4\5\6")
    flip(example / MODEL, 4370, 5)
    for more in ((), ("--accept-chance",)):
        refused = zckpt("mend", example, tmp_path / "mended", *more)
        assert refused.code == 1
        assert "no single flipped bit explains the wrong checksum" in refused.err
        assert "--older" in refused.err
        assert "is lost:" in refused.out
        assert "can be restored exactly:" in refused.out
    assert not (tmp_path / "mended").exists()
    document = zckpt("mend", example, tmp_path / "mended", "--json").document
    assert (document["code"], document["file"]) == ("not-mendable", str(example / OPTIMIZER))


def test_an_older_checkpoint_witnesses(example: Path, tmp_path: Path) -> None:
    """What has not changed since is taken from it, if the checksum is right then."""
    older = shutil.copytree(EXAMPLE, tmp_path / "older")
    record = records(example, OPTIMIZER)[-1].extent
    put(example / OPTIMIZER, record.offset + 100, bytes(600))
    with pytest.raises(CorruptCheckpoint, match="cannot be mended"):
        package.mend(example, tmp_path / "mended")
    report = package.mend(example, tmp_path / "mended", older=older)
    assert contents(tmp_path / "mended") == contents(EXAMPLE)
    (place,) = report["places"]
    assert (place["state"], place["by"]) == ("restored", "witness")
    assert place["witness"] == f"the older checkpoint {older / 'global_step7'}"
    # bytes of a state that has changed since do not give the checksum
    changed = shutil.copytree(EXAMPLE, tmp_path / "changed")
    flip(changed / OPTIMIZER, record.offset + 700, 2)
    with pytest.raises(CorruptCheckpoint, match="cannot be mended"):
        package.mend(example, tmp_path / "again", older=changed)


def test_a_copy_on_another_rank_witnesses(tmp_path: Path) -> None:
    source = shutil.copytree(DATA / "fsdp2-2.13.0-w2", tmp_path / "source")
    manifest = package.read(source, opens_items=True)
    (copy,) = manifest.replicas
    extent = next(iter(copy.fragments)).extent
    put(Path(extent.file), extent.offset + 64, bytes(extent.length - 100))
    report = package.mend(source, tmp_path / "mended")
    assert contents(tmp_path / "mended") == contents(DATA / "fsdp2-2.13.0-w2")
    (place,) = report["places"]
    assert (place["by"], place["witness"]) == ("witness", "a copy on another rank")
    assert place["tensor"] == copy.name


def test_a_large_record_needs_a_word(tmp_path: Path, zckpt: Callable[..., Result]) -> None:
    """320 kB: many bits look like one in 1 of 1,678 cases."""
    import torch

    source = tmp_path / "source"
    source.mkdir()
    torch.manual_seed(1)
    torch.save({"weight": torch.randn(80_000)}, source / "model.pt")
    whole = contents(source)
    flip(source / "model.pt", 100_000, 6)
    refused = zckpt("mend", source, tmp_path / "mended")
    assert refused.code == 1
    assert "type --accept-chance" in refused.err
    assert "1 of 1,678 cases" in refused.out
    assert zckpt("mend", source, tmp_path / "mended", "--dry-run").code == 3
    assert zckpt("mend", source, tmp_path / "mended", "--json").document["code"] == "consent-needed"
    assert not (tmp_path / "mended").exists()
    ended = zckpt("mend", source, tmp_path / "mended", "--accept-chance")
    assert ended.code == 0
    assert "only the checksum is evidence (--accept-chance):\n  bit 6 of" in ended.out
    assert contents(tmp_path / "mended") == whole
    assert "on trust in a checksum alone" in zckpt("inspect", tmp_path / "mended").err


def test_rounding_witnesses(example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The 16-bit weight depends on the upper bits of its master, and not on the lower ones."""
    monkeypatch.setattr(explaining, "BELIEVED", 16)
    flip(example / OPTIMIZER, MASTER[0], MASTER[1])
    with pytest.raises(CorruptCheckpoint, match="was not mended"):
        package.mend(example, tmp_path / "mended")
    flip(example / OPTIMIZER, MASTER[0], MASTER[1])
    flip(example / OPTIMIZER, MASTER[0] + 2, 5)
    (place,) = package.mend(example, tmp_path / "mended")["places"]
    assert contents(tmp_path / "mended") == contents(EXAMPLE)
    assert (place["by"], place["witness"]) == ("witness", "fc1.weight/param")


def test_pickles_and_headers(example: Path, tmp_path: Path) -> None:
    """A pickle has a checksum as well. What a reader refuses otherwise stays refused."""
    flip(example / OPTIMIZER, 238, 1)
    (place,) = package.mend(example, tmp_path / "mended")["places"]
    assert contents(tmp_path / "mended") == contents(EXAMPLE)
    assert (place["tensor"], place["element"], place["tensors"]) == (None, None, [])
    flip(example / OPTIMIZER, (example / OPTIMIZER).stat().st_size - 20, 2)
    flip(example / OPTIMIZER, (example / OPTIMIZER).stat().st_size - 19, 2)
    with pytest.raises(ZckptError) as refused:
        package.mend(example, tmp_path / "again")
    assert refused.value.code in ("file-damaged", "file-cut-short")
    assert not (tmp_path / "again").exists()


def test_the_checksum_itself(example: Path, tmp_path: Path) -> None:
    """A zip states it twice: the bytes agree with the other one."""
    record = records(example, OPTIMIZER)[-1].extent
    (member,) = [m for m in members_of(record.file) if m.offset == record.offset]
    flip(example / OPTIMIZER, member.entry + 17, 4)
    (place,) = package.mend(example, tmp_path / "mended")["places"]
    assert contents(tmp_path / "mended") == contents(EXAMPLE)
    assert (place["by"], place["witness"]) == ("witness", "the checksum beside the data")
    assert place["offset"] == member.entry + 16


@pytest.mark.parametrize("source", [EXAMPLE, DATA / "fsdp2-2.13.0-w2"], ids=["zero-2", "dcp"])
def test_a_part_that_no_reader_needs(source: Path, tmp_path: Path) -> None:
    """A zip's version and its random id: torch.load refuses some of their values."""
    damaged = shutil.copytree(source, tmp_path / "damaged")
    path = max(damaged.rglob("*.distcp"), default=damaged / OPTIMIZER)
    members = [each for each in members_of(str(path)) if "/data" not in each.name]
    for name in ("version", ".format_version", ".data/serialization_id"):
        own = [each for each in members if each.name.partition("/")[2] == name]
        for member in {own[0].offset: own[0], own[-1].offset: own[-1]}.values():
            flip(path, member.offset, 2)
            report = package.verify(damaged)
            assert not report["equal"]
            (line,) = report["problems"]
            assert line["flipped"] == {"byte": member.offset, "bit": 2}
            package.mend(damaged, tmp_path / "mended")
            assert contents(tmp_path / "mended") == contents(source)
            shutil.rmtree(tmp_path / "mended")
            flip(path, member.offset, 2)
    assert package.verify(damaged)["equal"]


def test_a_lost_file(example: Path, tmp_path: Path, zckpt: Callable[..., Result]) -> None:
    (example / OPTIMIZER).unlink()
    with pytest.raises(IncompleteCheckpoint):
        package.mend(example, tmp_path / "mended")
    told = zckpt("mend", example, tmp_path / "mended", "--dry-run")
    assert told.code == 3
    assert "cannot be restored: " in told.out
    assert Path(OPTIMIZER).name in told.out


def test_other_checkpoints_of_the_run_stay(example: Path, tmp_path: Path) -> None:
    shutil.copytree(example / "global_step7", example / "global_step3")
    flip(example / "global_step3" / Path(OPTIMIZER).name, *MASTER)
    with pytest.raises(MissingData):
        package.mend(example, tmp_path / "mended")
    report = package.mend(example, tmp_path / "mended", tag="global_step3")
    (line,) = [each for each in report["warnings"] if each["code"] == "pointer-dangling"]
    assert "global_step7" in line["message"]
    copied = contents(tmp_path / "mended")
    assert {Path(name).parts[0] for name in copied} == {"latest", "global_step3"}
    assert contents(tmp_path / "mended" / "global_step3") == contents(EXAMPLE / "global_step7")


def test_a_trainers_directory(tmp_path: Path) -> None:
    """With all that lies beside the engine's files; a damaged file of the trainer is mended too."""
    original = ROOT / "examples" / "trainer" / "checkpoint-4"
    source = shutil.copytree(original, tmp_path / "checkpoint-4")
    flip(source / "global_step4" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", 13466, 6)
    flip(source / "scheduler.pt", 100, 2)
    package.mend(source, tmp_path / "mended" / "checkpoint-4")
    assert contents(tmp_path / "mended" / "checkpoint-4") == contents(original)


def test_a_file_that_no_program_reads(tmp_path: Path) -> None:
    """If it stays damaged, it is copied as it is, and the report says so."""
    original = ROOT / "examples" / "trainer" / "checkpoint-4"
    source = shutil.copytree(original, tmp_path / "checkpoint-4")
    put(source / "training_args.bin", 300, b"many bits")
    with pytest.raises(MissingData, match="nothing to mend"):
        package.mend(source, tmp_path / "mended")
    flip(source / "global_step4" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", 13466, 6)
    report = package.mend(source, tmp_path / "mended")
    assert [place["state"] for place in report["places"]] == ["restored", "lost"]
    assert "unread-file-damaged" in [line["code"] for line in report["warnings"]]
    same = contents(original) | {"training_args.bin": contents(source)["training_args.bin"]}
    assert contents(tmp_path / "mended") == same


def test_a_reader_that_needs_the_damaged_masters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read with the correction first, and then its weights are asked."""
    original = DATA / "megatron-0.16.1-legacy-tp2"
    source = shutil.copytree(original, tmp_path / "source")
    flip(source / "iter_0000003" / "mp_rank_00" / "distrib_optim.pt", 5418, 2)
    (place,) = package.mend(source, tmp_path / "mended")["places"]
    assert (place["by"], place["element"]) == ("checksum", 50)
    monkeypatch.setattr(explaining, "BELIEVED", 16)
    (place,) = package.mend(source, tmp_path / "again")["places"]
    assert place["by"] == "witness"
    assert contents(tmp_path / "again") == contents(original)


def test_links(example: Path, tmp_path: Path) -> None:
    """The engine's files are taken wherever they lie, and those beside them as `convert` does."""
    (elsewhere := tmp_path / "elsewhere").mkdir()
    flip(example / OPTIMIZER, *MASTER)
    for name in (OPTIMIZER, MODEL):
        (example / name).rename(elsewhere / Path(name).name)
        (example / name).symlink_to(elsewhere / Path(name).name)
    (elsewhere / "notes.txt").write_text("of another place")
    (example / "notes.txt").symlink_to(elsewhere / "notes.txt")
    report = package.mend(example, tmp_path / "mended")
    assert contents(tmp_path / "mended") == contents(EXAMPLE)
    assert not (tmp_path / "mended" / OPTIMIZER).is_symlink()
    (line,) = [each for each in report["left_out"] if each["code"] == "file-omitted"]
    assert "notes.txt" in line["message"]
    package.mend(example, tmp_path / "followed", follow_links=True)
    assert (tmp_path / "followed" / "notes.txt").read_text() == "of another place"


@pytest.mark.parametrize("path", ["run", "./run", "run/", "run/global_step7/.."])
def test_paths(path: str, example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every record is checked again while it is copied, however the user spells the path."""
    monkeypatch.chdir(tmp_path)
    flip(example / OPTIMIZER, *MASTER)
    report = package.mend(path, "mended")
    assert contents(tmp_path / "mended") == contents(EXAMPLE)
    assert report["records"] == {"checked": 37, "unchecked": 0, "without_checksum": 0}


def test_a_tag_alone(example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(example / OPTIMIZER, *MASTER)
    monkeypatch.chdir(example / "global_step7")
    package.mend(".", tmp_path / "mended")
    assert contents(tmp_path / "mended") == contents(EXAMPLE / "global_step7")


def test_a_universal_checkpoint(tmp_path: Path) -> None:
    """Its manifest has a checksum of each tensor and file, and lists what was restored."""
    package.convert(ROOT / "examples" / "trainer" / "checkpoint-4", tmp_path / "whole")
    source = shutil.copytree(tmp_path / "whole", tmp_path / "source")
    size = (source / "exp_avg.safetensors").stat().st_size
    flip(source / "exp_avg.safetensors", size - 900, 6)
    flip(source / "siblings" / "rng_state_1.pth", 352, 6)
    report = package.mend(source, tmp_path / "mended")
    assert contents(tmp_path / "mended") == contents(tmp_path / "whole")
    assert [place["state"] for place in report["places"]] == ["restored"] * 2
    listed = json.loads((tmp_path / "mended" / "manifest.json").read_text())["mended"]
    assert [line["file"] for line in listed] == [
        "exp_avg.safetensors",
        "siblings/rng_state_1.pth",
    ]
    report = package.verify(tmp_path / "mended", tmp_path / "whole")
    assert report["equal"]


def test_a_run_that_was_killed_goes_on(example: Path, tmp_path: Path) -> None:
    """As conversions do: `.partial` and its journal stay, and --resume continues."""
    flip(example / OPTIMIZER, *MASTER)
    program = (
        "import os, signal, sys, zckpt\n"
        "kill = lambda: os.kill(os.getpid(), signal.SIGKILL)\n"
        "zckpt.mend(sys.argv[1], sys.argv[2], before_rename=kill)"
    )
    target = tmp_path / "mended"
    ended = subprocess.run([sys.executable, "-c", program, example, target], check=False, cwd=ROOT)
    assert ended.returncode == -9
    assert not target.exists()
    with pytest.raises(ZckptError, match="a run was stopped there"):
        package.mend(example, target)
    report = package.mend(example, target, resume=True)
    assert report["resumed"] > 0
    assert contents(target) == contents(EXAMPLE)
    assert package.mend(example, target, resume=True)["already_complete"]
    with pytest.raises(ZckptError, match="was written with other options"):
        package.mend(example, target, resume=True, accept_chance=True)


SAMPLES = {
    "zero-2": EXAMPLE,
    "zero-1": DATA / "deepspeed-0.13.1-z1_dp2_bf16_optimizer" / "run",
    "zero-3": DATA / "deepspeed-0.11.0-z3_dp2_sub_groups" / "run",
    "trainer": ROOT / "examples" / "trainer" / "checkpoint-4",
    "fsdp": DATA / "torch_checkpointing-0.1.1-w2" / "items",
    "dcp": DATA / "fsdp2-2.13.0-w2",
    "megatron": DATA / "megatron-0.16.1-tp2",
    "megatron-legacy": DATA / "megatron-0.16.1-legacy-tp2",
    "universal": None,
}


def sample_of(name: str, tmp_path: Path) -> Path:
    """The intact checkpoint."""
    path = SAMPLES[name]
    if path is None:
        path = tmp_path / "whole"
        package.convert(EXAMPLE, path)
    return path


def outcome(source: Path, target: Path, whole: dict[str, Any], **words: Any) -> str:
    """What became of a damaged checkpoint; a copy never has other bytes than the original."""
    try:
        package.mend(source, target, **words)
    except ZckptError as error:
        assert not target.exists()
        return "not seen" if error.code == "nothing-to-mend" else "refused"
    assert contents(target) == whole
    shutil.rmtree(target)
    return "mended"


def flips(name: str, tmp_path: Path, tries: int, seed: int) -> Counter[str]:
    """Flips single bits at random places of all files."""
    original = sample_of(name, tmp_path)
    source = shutil.copytree(original, tmp_path / "source")
    whole, chosen, counts = contents(original), random.Random(seed), Counter[str]()
    files = sorted(path for path in source.rglob("*") if path.is_file())
    sizes = [path.stat().st_size for path in files]
    for _ in range(tries):
        (path,) = chosen.choices(files, sizes)
        place = chosen.randrange(path.stat().st_size), chosen.randrange(8)
        flip(path, *place)
        counts[outcome(source, tmp_path / "mended", whole)] += 1
        flip(path, *place)
    return counts


@pytest.mark.parametrize("name", SAMPLES)
def test_flips_anywhere(name: str, tmp_path: Path) -> None:
    """In data, names, headers and pickles: mended to the original's bytes, refused, or not seen."""
    counts = flips(name, tmp_path, 12, seed=1)
    assert counts["mended"] > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SAMPLES)
def test_many_flips_anywhere(name: str, tmp_path: Path) -> None:
    counts = flips(name, tmp_path, 300, seed=2)
    print(f"{name}: {dict(counts)}")
    assert counts["mended"] > 10


@pytest.mark.parametrize("name", SAMPLES)
def test_flips_in_data_are_mended(name: str, tmp_path: Path) -> None:
    flips_in_data(name, tmp_path, 8, seed=3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SAMPLES)
def test_many_flips_in_data_are_mended(name: str, tmp_path: Path) -> None:
    flips_in_data(name, tmp_path, 100, seed=5)


def flips_in_data(name: str, tmp_path: Path, tries: int, seed: int) -> None:
    """All records here are small; those with a block of one repeated value are left out."""
    original = sample_of(name, tmp_path)
    source = shutil.copytree(original, tmp_path / "source")
    whole, chosen = contents(original), random.Random(seed)
    every = [
        each.extent
        for each in package.read(source, nameless=True, opens_items=True).files.records
        if each.crc is not None and explaining.burst_in(each.extent) is None
    ]
    if name == "universal":  # whose files are records
        every = [
            fragment.extent
            for entry in package.read(source).entries.values()
            for fragment in entry.fragments
            if explaining.burst_in(fragment.extent) is None
        ]
    assert every
    for _ in range(tries):
        (extent,) = chosen.choices(every, [each.length for each in every])
        place = extent.offset + chosen.randrange(extent.length), chosen.randrange(8)
        flip(Path(extent.file), *place)
        assert outcome(source, tmp_path / "mended", whole) == "mended", (extent, place)
        flip(Path(extent.file), *place)


def damage_at_random(path: Path, chosen: random.Random) -> None:
    """What disks and copies do to a file, beside flipping one bit."""
    size = path.stat().st_size
    start = chosen.randrange(size) // 512 * 512
    length = min(512, size - start)
    kind = chosen.choice(["zeros", "ones", "garbage", "cut", "swapped", "flips"])
    if kind == "cut":
        path.write_bytes(path.read_bytes()[:start])
    elif kind == "flips":
        for _ in range(chosen.randrange(2, 5)):
            flip(path, chosen.randrange(size), chosen.randrange(8))
    elif kind == "swapped":
        put(path, start, path.read_bytes()[:length])
    else:
        put(
            path,
            start,
            {"zeros": bytes(length), "ones": b"\xff" * length}.get(kind, chosen.randbytes(length)),
        )


def other_damage(name: str, tmp_path: Path, tries: int, seed: int) -> Counter[str]:
    """One to three files are damaged, and an older checkpoint witnesses, or none."""
    original = sample_of(name, tmp_path)
    whole, chosen, counts = contents(original), random.Random(seed), Counter[str]()
    for number in range(tries):
        source = shutil.copytree(original, tmp_path / f"source{number}")
        files = sorted(path for path in source.rglob("*") if path.is_file() and path.stat().st_size)
        for path in chosen.sample(files, min(len(files), chosen.randrange(1, 4))):
            damage_at_random(path, chosen)
        older = {"older": original} if chosen.random() < 0.5 else {}
        counts[outcome_of_many(source, tmp_path / "mended", whole, **older)] += 1
        shutil.rmtree(source)
    return counts


def outcome_of_many(source: Path, target: Path, whole: dict[str, Any], **words: Any) -> str:
    """As `outcome`; what no checksum covers is copied as it is."""
    damaged = contents_or_bytes(source)
    try:
        report = package.mend(source, target, **words)
    except ZckptError as error:
        assert not target.exists()
        return "not seen" if error.code == "nothing-to-mend" else "refused"
    for file, data in contents(target).items():
        if isinstance(data, dict):  # a manifest
            assert data == whole[file]
            continue
        for own in pieces(target, file):
            assert data[own] in (whole[file][own], damaged[file][own]), (file, own)
    for place in (each for each in report["places"] if each["state"] == "restored"):
        file, record = os.path.relpath(place["file"], source), place["record"]
        own = slice(record["offset"], record["offset"] + record["length"])
        assert (target / file).read_bytes()[own] == whole[file][own], (file, own)
    shutil.rmtree(target)
    return "mended"


def pieces(root: Path, file: str) -> list[slice]:
    """The records of a file, each of which is restored as a whole; or all of its bytes."""
    manifest = package.read(root, nameless=True, opens_items=True)
    extents = [
        *(each.extent for each in manifest.files.records if each.extent.length),
        *(own.extent for entry in manifest.entries.values() for own in entry.fragments),
        *(Extent(str(root / file), each.offset, each.length) for each in members(root / file)),
    ]
    if manifest.format == "universal":  # whose whole files are records
        extents = [each for each in extents if each.offset]
    own = [each for each in extents if each.file == str(root / file)]
    return [slice(each.offset, each.offset + each.length) for each in own] or [slice(None)]


def members(path: Path) -> list[ZipMember]:
    """Those of a zip; none of a file whose directory is damaged, which no program reads."""
    try:
        return list(members_of(str(path)))
    except ZckptError:
        return []


def contents_or_bytes(root: Path) -> dict[str, Any]:
    """As `contents`, of files of which one may be no JSON any more."""
    try:
        return contents(root)
    except ValueError:
        return {}


@pytest.mark.parametrize("name", ["zero-2", "dcp", "universal", "trainer"])
def test_other_damage(name: str, tmp_path: Path) -> None:
    """Nothing but the original's bytes is written into a record."""
    assert other_damage(name, tmp_path, 12, seed=1)["refused"] > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SAMPLES)
def test_much_other_damage(name: str, tmp_path: Path) -> None:
    print(f"{name}: {dict(other_damage(name, tmp_path, 200, seed=2))}")


def test_two_flips_in_a_record_are_no_flip(tmp_path: Path) -> None:
    """CRC-32 has a Hamming distance of 4 up to 11 kB: two flips never look like one.

    So they are refused, except in a weight, whose whole master shows what was there.
    """
    source = shutil.copytree(EXAMPLE, tmp_path / "source")
    whole, chosen, manifest = contents(EXAMPLE), random.Random(4), package.read(source)
    every = [each.extent for each in manifest.files.records if each.crc is not None]
    assert max(extent.length for extent in every) < 11_000
    weights = {
        (fragment.extent.file, byte)
        for parameter in manifest.parameters
        if (parameter, "master") in manifest.entries
        for fragment in manifest.entries[parameter, "param"].fragments
        for byte in range(fragment.extent.offset, fragment.extent.offset + fragment.extent.length)
    }
    counts = Counter[str]()
    for _ in range(20):
        (extent,) = chosen.choices(every, [each.length for each in every])
        places = chosen.sample(range(extent.length * 8), 2)
        for place in places:
            flip(Path(extent.file), extent.offset + place // 8, place % 8)
        bytes_flipped = [(extent.file, extent.offset + place // 8) for place in places]
        expected = "mended" if weights.issuperset(bytes_flipped) else "refused"
        assert outcome(source, tmp_path / "mended", whole, accept_chance=True) == expected
        counts[expected] += 1
        name = Path(extent.file).relative_to(source)
        shutil.copyfile(EXAMPLE / name, source / name)
    assert counts.keys() == {"mended", "refused"}
