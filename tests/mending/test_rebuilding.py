"""What is made up is what the user typed, all else is the original's, and the engine goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import zckpt as package
from zckpt.core.checkpoint.mended import MENDED
from zckpt.errors import CorruptCheckpoint, IncompleteCheckpoint, MissingData, WrongOption

from ..conftest import ROOT, Result
from ..engines.cases import Case
from ..faults import read_element_bytes
from .damaging import contents, flip
from .test_losses import OPTIMIZER, remove, told

CASES = [
    Case("z1_dp4_rebuilt", "mending", 1, 4, steps=6),
    Case("z2_dp3_rebuilt", "mending", 2, 3, steps=6),
]
LOST = f"bf16_{OPTIMIZER}"
BOTH = ("masters", "moments=zero")


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Case, Path]:
    from ..engines import deepspeed

    root = tmp_path_factory.mktemp("rebuilding")
    return request.param, deepspeed.train(request.param, root, losses=3)


def elements(path: Path) -> dict[str, np.ndarray]:
    """All tensors in fp32, by their names."""
    manifest = package.read(path)
    values = {}
    for entry in manifest.entries.values():
        data = read_element_bytes(entry)
        if entry.dtype == "BF16":
            values[entry.name] = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
        elif entry.dtype == "F32":
            values[entry.name] = np.frombuffer(data, "<f4")
    return values


def made_up(run: Path, lost: str) -> dict[str, np.ndarray]:
    """By tensor, which elements a file of a whole checkpoint has."""
    masks = {}
    for entry in package.read(run).entries.values():
        mask = np.zeros(entry.numel, bool)
        for fragment in entry.fragments.runs(0, entry.numel, 4):
            if Path(fragment.extent.file).name == lost:
                mask[fragment.start : fragment.stop] = True
        if mask.any():
            masks[entry.name] = mask
    return masks


@pytest.mark.parametrize("moments", ["zero", "older"])
@pytest.mark.parametrize("rank", [0, 1, -1])
def test_the_values(rank: int, moments: str, trained: tuple[Case, Path], tmp_path: Path) -> None:
    """Masters are widened weights, moments zeros or older ones; no other element has changed."""
    case, whole = trained
    lost = LOST.replace("rank_1", f"rank_{rank % case.dp}")
    run = shutil.copytree(whole, tmp_path / "run")
    remove(run, lost)
    older = shutil.copytree(whole, tmp_path / "older")
    (path,) = older.rglob(lost)
    state = torch.load(path, weights_only=False)
    for values in state["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        values["exp_avg"] += 1
    torch.save(state, path)
    report = package.mend(
        run, tmp_path / "mended", rebuild=("masters", f"moments={moments}"), older=older
    )
    before, after, masks = elements(whole), elements(tmp_path / "mended"), made_up(whole, lost)
    assert masks
    for name, own in before.items():
        mask = masks.get(name, np.zeros(len(own), bool))
        expected = own.copy()
        parameter, _, slot = name.rpartition("/")
        if slot == "master":
            expected[mask] = before[f"{parameter}/param"][mask]
        elif moments == "zero":
            expected[mask] = 0
        elif slot == "exp_avg":
            expected[mask] += 1
        assert np.array_equal(after[name], expected), name
    same = contents(tmp_path / "mended")
    same.pop(f"{next(iter(whole.glob('global*'))).name}/{lost}")
    assert same.items() <= contents(whole).items()
    listed = json.loads(next((tmp_path / "mended").rglob(MENDED)).read_text())["mended"]
    assert {each["tensor"] for each in listed} == masks.keys()
    assert {each["by"] for each in listed} == {"made-up"}
    assert sum(each["bytes"] for each in listed) == 4 * sum(map(np.sum, masks.values()))
    assert {line["state"] for line in report["lost"]} == {"elsewhere", "rebuilt"}
    (said,) = package.verify(tmp_path / "mended")["warnings"]
    assert said["code"] == "mended"
    assert "made up" in said["message"]


@pytest.mark.parametrize("moments", ["zero", "older"])
def test_the_engine_goes_on(moments: str, trained: tuple[Case, Path], tmp_path: Path) -> None:
    """It holds what the copy has; the first loss is that of the weights, which were not lost."""
    from ..engines import deepspeed

    case, whole = trained
    run = shutil.copytree(whole, tmp_path / "run")
    remove(run, LOST)
    package.mend(run, tmp_path / "mended", rebuild=("masters", f"moments={moments}"), older=whole)
    resumed = deepspeed.resume(case, tmp_path / "mended", tmp_path / "resumed", losses=3)
    oracle = torch.load(whole.parent / "oracle.pt", weights_only=False)
    assert resumed["losses"][0] == oracle["losses"][0]
    assert resumed["losses"] != oracle["losses"]
    assert resumed["losses"] == pytest.approx(oracle["losses"], rel=0.05)
    again = tmp_path / "again"
    deepspeed.save_again(case, tmp_path / "mended", again)
    assert package.verify(again)["equal"]


def test_before_it_is_typed(example: Path, tmp_path: Path, zckpt: Callable[..., Result]) -> None:
    """The error names what is not typed yet, and nothing is written."""
    remove(example, LOST)
    for typed, lacking in (
        ((), "--rebuild masters --rebuild moments=zero"),
        (("--rebuild", "masters"), "--rebuild moments=zero"),
        (("--rebuild", "moments=zero"), "--rebuild masters"),
    ):
        refused = zckpt("mend", example, tmp_path / "mended", *typed)
        assert refused.code == 1
        assert f"`{lacking}` writes made-up values" in refused.err
        assert not (tmp_path / "mended").exists()
    both = ("--rebuild", "masters", "--rebuild", "moments=zero")
    shown = zckpt("mend", example, tmp_path / "mended", *both, "--dry-run")
    assert (shown.code, shown.err) == (3, "")
    assert (
        "was in lost files, and is made up: other values take its "
        "place (--rebuild):\n  masters of embedding" in shown.out
    )
    assert not (tmp_path / "mended").exists()
    ended = zckpt("mend", example, tmp_path / "mended", *both)
    assert (ended.code, ended.err) == (0, "")
    assert shown.out in ended.out
    last = ended.out.splitlines()[-1]
    assert last.startswith("made up (--rebuild): values in ")
    assert " tensors, in place of lost ones: embedding" in last


def test_verify_and_report_name_it(example: Path, zckpt: Callable[..., Result]) -> None:
    """With what it gives; nothing is named for stage 3, where no option makes it up."""
    command = f"zckpt mend {example} DST --rebuild masters --rebuild moments=zero"
    gives = (
        "make up what is lost, with other values in its place ("
        "masters made from the 16-bit weights and zeros as moments)"
    )
    assert "next:" not in zckpt("verify", example).out
    remove(example, LOST)
    verified = zckpt("verify", example)
    assert verified.code == 3
    assert f"next: {gives}: {command}\n" in verified.out
    document = zckpt("report", example, "--json").document
    command = command.replace(str(example), str(example / "global_step7"))
    assert {"what": gives, "command": command, "makes_up": True} in document["next"]["do"]


def test_nothing_is_named_for_stage_3(tmp_path: Path, zckpt: Callable[..., Result]) -> None:
    run = shutil.copytree(ROOT / "tests/data/zckpt-0.1-z3_dp3", tmp_path / "run")
    remove(run, OPTIMIZER)
    shown = zckpt("verify", run)
    assert shown.code == 3
    assert "--rebuild" not in shown.out + shown.err


def test_two_lost_files(example: Path, tmp_path: Path) -> None:
    remove(example, LOST, LOST.replace("rank_1", "rank_2"))
    package.mend(example, tmp_path / "mended", rebuild=BOTH)
    assert package.verify(tmp_path / "mended")["equal"]
    package.convert(tmp_path / "mended", tmp_path / "universal")
    (said,) = package.verify(tmp_path / "universal")["warnings"]
    assert "made up" in said["message"]


def test_of_stage_3(tmp_path: Path) -> None:
    """Masters are the weights: no option makes them up."""
    run = shutil.copytree(ROOT / "tests/data/zckpt-0.1-z3_dp3", tmp_path / "run")
    remove(run, OPTIMIZER)
    with pytest.raises(IncompleteCheckpoint, match="lacks zero_pp_rank_1"):
        package.mend(run, tmp_path / "mended", rebuild=BOTH)
    assert set(told(package.mend(run, tmp_path / "m", rebuild=BOTH, dry_run=True)).values()) == {
        "gone"
    }
    assert not (tmp_path / "mended").exists()


def test_wrong_words(example: Path, tmp_path: Path) -> None:
    for typed in (("moments=zero", "moments=older"), ("moments=older",), ("weights",)):
        with pytest.raises(WrongOption, match="--rebuild"):
            package.mend(example, tmp_path / "mended", rebuild=typed)


def test_an_older_one_of_another_model(example: Path, tmp_path: Path) -> None:
    remove(example, LOST)
    other = ROOT / "tests/data/deepspeed-0.9.3-z2_dp3_fused_adam/run"
    with pytest.raises(MissingData, match=r"has no .* of the same type and shape"):
        package.mend(
            example, tmp_path / "mended", rebuild=("masters", "moments=older"), older=other
        )
    assert not (tmp_path / "mended").exists()


@pytest.mark.parametrize("byte", [4370, 3000])
def test_beside_a_flipped_bit(byte: int, example: Path, tmp_path: Path) -> None:
    """Masters would be made of a wrong weight, and agree with it."""
    remove(example, LOST)
    flip(example / "global_step7" / "mp_rank_00_model_states.pt", byte, 5)
    with pytest.raises(CorruptCheckpoint, match="cannot be mended") as caught:
        package.mend(example, tmp_path / "mended", rebuild=BOTH)
    assert caught.value.code == "not-mendable"
    assert not (tmp_path / "mended").exists()


def test_links(example: Path, tmp_path: Path) -> None:
    """The copy is made from links: others would be followed that nobody has asked for."""
    remove(example, LOST)
    (tmp_path / "secret").write_text("secret")
    (example / "global_step7" / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(IncompleteCheckpoint) as caught:
        package.mend(example, tmp_path / "mended", rebuild=BOTH)
    assert "--follow-links" in caught.value.hint
    assert not (tmp_path / "mended").exists()


def test_nothing_is_lost(example: Path, tmp_path: Path) -> None:
    report = package.mend(example, tmp_path / "mended", rebuild=BOTH, dry_run=True)
    (line,) = report["warnings"]
    assert (line["code"], line["subject"]) == ("option-without-effect", "--rebuild")


Z3 = ROOT / "tests/data/zckpt-0.1-z3_dp3"
FROZEN = "zero_pp_rank_1_mp_rank_00_model_states.pt"


@pytest.fixture
def frozen(tmp_path: Path) -> Path:
    """A run of stage 3 that lost a model file, in which a part of the frozen weights was."""
    run = shutil.copytree(Z3, tmp_path / "run")
    remove(run, FROZEN)
    return run


def test_frozen_weights_of_an_older_one(frozen: Path, tmp_path: Path) -> None:
    """They are the same, and all other ranks have the same buffers: everything is exact."""
    with pytest.raises(IncompleteCheckpoint):
        package.mend(frozen, tmp_path / "mended")
    report = package.mend(frozen, tmp_path / "mended", older=Z3)
    assert {line["state"] for line in report["lost"]} == {"elsewhere"}
    compared = package.verify(tmp_path / "mended", Z3)
    assert compared["equal"]
    assert not compared["notes"]
    listed = json.loads(next((tmp_path / "mended").rglob(MENDED)).read_text())["mended"]
    assert {each["by"] for each in listed} == {"witness"}
    assert {each["tensor"] for each in listed} > {"bottleneck.weight/param"}
    (said,) = package.verify(tmp_path / "mended")["warnings"]
    assert "exactly" in said["message"]


def test_a_damaged_older_one(frozen: Path, tmp_path: Path) -> None:
    older = shutil.copytree(Z3, tmp_path / "older")
    entry = package.read(older).entries["bottleneck.weight", "param"]
    extent = next(own.extent for own in entry.fragments if own.extent.file.endswith(FROZEN))
    flip(Path(extent.file), extent.offset + 1, 3)
    with pytest.raises(CorruptCheckpoint, match="do not have the CRC-32"):
        package.mend(frozen, tmp_path / "mended", older=older)
    assert not (tmp_path / "mended").exists()


def test_buffers_that_differ_between_ranks(frozen: Path, tmp_path: Path) -> None:
    """Nobody knows what the lost rank had."""
    (path,) = frozen.rglob(FROZEN.replace("rank_1", "rank_2"))
    state = torch.load(path, weights_only=False)
    state["module"]["center.mean"] += 1
    torch.save(state, path)
    with pytest.raises(IncompleteCheckpoint) as caught:
        package.mend(frozen, tmp_path / "mended", older=Z3)
    assert "the values of center.mean/param in the lost file are unknown" in caught.value.hint
    assert not (tmp_path / "mended").exists()


def test_frozen_weights_beside_a_flipped_bit(frozen: Path, tmp_path: Path) -> None:
    (path,) = frozen.rglob(FROZEN.replace("rank_1", "rank_0"))
    entry = package.read(Z3).entries["center.mean", "param"]
    flip(path, next(iter(entry.fragments)).extent.offset, 3)
    with pytest.raises((CorruptCheckpoint, IncompleteCheckpoint)):
        package.mend(frozen, tmp_path / "mended", older=Z3)
    assert not (tmp_path / "mended").exists()
