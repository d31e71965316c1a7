"""Every file states the rank as which it was saved: those that zckpt reads, and those it writes."""

from __future__ import annotations

import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.core.storage.inventory import parse_name
from zckpt.errors import InconsistentCheckpoint
from zckpt.files.torchfile import TorchFile
from zckpt.formats.deepspeed.files import ROLES

from ... import faults
from ...conftest import EXAMPLE, ROOT, texts
from .test_experts import tag_of
from .test_grid import BOTH, RULES, edit, first

DATA = ROOT / "tests" / "data"
FROZEN = DATA / "fsdp2-2.13.0-w2"  # has a frozen layer
BEFORE_3, BEFORE_GRID = DATA / "zckpt-0.1-z3_dp3", DATA / "zckpt-0.1-pp2_tp2"
Trained = Callable[[str], Path]


def rank_files(run: Path) -> list[Path]:
    """All files of ranks, in the order of their names."""
    return sorted(path for path in run.rglob("*.pt") if parse_name(ROLES, path.name))


def one_of_each_kind(run: Path) -> Iterator[tuple[Path, Path]]:
    """Two files of each kind, whose numbers differ in one place: the data rank, the layer..."""
    seen = set()
    for one, other in permutations(rank_files(run), 2):
        own, their = parse_name(ROLES, one.name), parse_name(ROLES, other.name)
        assert own is not None
        assert their is not None
        differing = tuple(a != b for a, b in zip(own.numbers, their.numbers, strict=False))
        kind = own.role.names, differing
        if own.is_like(their) and sum(differing) == 1 and kind not in seen:
            seen.add(kind)
            yield one, other


def assert_refused(run: Path, saved_as: str, **options: Any) -> None:
    with pytest.raises(InconsistentCheckpoint, match=f"was saved as {saved_as}: files of two"):
        zckpt.convert(run, run.parent / "converted", **options)
    assert not (run.parent / "converted").exists()
    report = zckpt.verify(run, **options)
    assert not report["equal"]
    assert re.search(f"was saved as {saved_as}", report["problems"][0]["message"])


def assert_all_refused(run: Path, kinds: int, **options: Any) -> None:
    """One file of each kind, copied over another one and swapped with it."""
    pairs = list(one_of_each_kind(run))
    assert len(pairs) == kinds, [one.name for one, _ in pairs]
    for one, other in pairs:
        before = one.read_bytes(), other.read_bytes()
        faults.copy_file(one, other, renamed=False)
        assert_refused(run, one.name, **options)
        one.write_bytes(before[1])
        assert_refused(run, f"({one.name}|{other.name})", **options)
        one.write_bytes(before[0])
        other.write_bytes(before[1])
    assert zckpt.verify(run, **options)["equal"]


# -- what an engine saved


@pytest.mark.parametrize(
    ("source", "kinds"),
    [
        (EXAMPLE, 1),
        (DATA / "deepspeed-0.13.1-z1_dp2_bf16_optimizer" / "run", 1),
        (DATA / "deepspeed-0.9.3-z2_dp3_fused_adam" / "run", 1),
        (DATA / "deepspeed-0.11.0-z3_dp2_sub_groups" / "run", 2),
    ],
    ids=lambda value: value.parent.name if isinstance(value, Path) else "",
)
def test_ranks_of_each_stage(source: Path, kinds: int, tmp_path: Path) -> None:
    assert_all_refused(Path(shutil.copytree(source, tmp_path / "run")), kinds)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        pytest.param(BOTH, 4, marks=first),  # optimizer, model, layers by layer and by tensor rank
        pytest.param("tensor_tp2_dp2_z3", 4, marks=pytest.mark.engines),
        pytest.param("llama_tp2_dp1_z0", 1, marks=pytest.mark.engines),
    ],
)
def test_model_ranks(name: str, kinds: int, grid_trained: Trained, tmp_path: Path) -> None:
    run = Path(shutil.copytree(grid_trained(name) / "run", tmp_path / "run"))
    if name == "llama_tp2_dp1_z0":  # model rank 0 over 1 is what an earlier zckpt may have written
        faults.swap_files(*rank_files(run), renamed=False)
        assert_refused(run, "mp_rank_01_model_states.pt")
        return
    assert_all_refused(run, kinds)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        pytest.param("dp4_ep2", 3, marks=first),
        pytest.param("dp4_ep2_z0", 3, marks=pytest.mark.engines),
    ],
)
def test_experts(name: str, kinds: int, trained_experts: Trained, tmp_path: Path) -> None:
    """Optimizers, or those of ep ranks, and experts by layer and by number."""
    run = Path(shutil.copytree(trained_experts(name) / "run", tmp_path / "run"))
    assert_all_refused(run, kinds)


@pytest.mark.engines
@pytest.mark.first
def test_swapped_tensor_ranks_are_seen_if_all_their_files_are_swapped(
    grid_trained: Trained, tmp_path: Path
) -> None:
    """Nothing else shows it: slices come in the wrong order."""
    run = Path(shutil.copytree(grid_trained(BOTH) / "run", tmp_path / "run"))
    for pattern in ("*mp_rank_0{}_*", "layer_*-model_0{}-*"):
        pairs = zip(*(sorted(run.rglob(pattern.format(rank))) for rank in (0, 1)), strict=True)
        for one, other in pairs:
            faults.swap_files(one, other, renamed=False)
    assert_refused(run, "mp_rank_01_model_states.pt")


# -- files that state no name


def nameless(path: Path, name: bytes) -> None:
    """A file as if it had been saved under another name of the same length."""
    path.write_bytes(path.read_bytes().replace(path.stem.encode() + b"/", name + b"/"))


def test_files_without_a_name_of_their_own_are_counted(example: Path) -> None:
    assert zckpt.verify(example)["notes"] == []
    one, other = rank_files(example)[:2]
    nameless(one, f"{'x' * (len(one.stem) - 4)}.tmp".encode())
    value = torch.load(other, weights_only=False)
    with other.open("wb") as file:
        torch.save(value, file)
    assert TorchFile(str(other)).saved_as == "archive"
    report = zckpt.verify(example)
    assert report["equal"]
    assert [
        "2 of 5 rank files do not state the name" in note for note in texts(report["notes"])
    ] == [True]
    assert zckpt.verify(example, EXAMPLE)["equal"]
    assert zckpt.verify(example, EXAMPLE)["notes"] == []


# -- what zckpt writes


def assert_names(run: Path, count: int) -> None:
    """Each file states its own name, is a sound zip, and torch loads it."""
    files = rank_files(run)
    assert len(files) == count
    for path in files:
        assert TorchFile(str(path)).saved_as == path.stem
        assert zipfile.ZipFile(path).testzip() is None
        torch.load(path, weights_only=False)
    assert zckpt.read(run).notices.notes == ()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_written_ranks_state_their_own_names(stage: int, tmp_path: Path) -> None:
    """Of ranks 9 and 10 the names have other lengths, so that members lie at other places."""
    zckpt.convert(FROZEN, tmp_path / "run", to="deepspeed", stage=stage, dp=11)
    assert_names(tmp_path / "run", {0: 1, 3: 22}.get(stage, 12))
    assert zckpt.verify(tmp_path / "run", FROZEN)["equal"]


def test_written_universal_directories_state_their_own_names(tmp_path: Path) -> None:
    zckpt.convert(FROZEN, tmp_path / "run", to="deepspeed-universal", stage=3, dp=4)
    assert_names(tmp_path / "run", 4)


@pytest.mark.parametrize(("options", "count"), [({"dp": 3}, 30), ({"tp": 1}, 11)])
def test_written_model_ranks_state_their_own_names(
    options: dict[str, int], count: int, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.txt"
    rules.write_text(RULES)
    zckpt.reshard(BEFORE_GRID / "run", tmp_path / "run", **options, tp_rules=str(rules))
    assert_names(tmp_path / "run", count)


def test_written_frozen_weights_are_not_taken_from_another_rank(tmp_path: Path) -> None:
    """As in every fine-tune with adapters: in stage 3, model files have the frozen weights."""
    zckpt.convert(FROZEN, tmp_path / "run", to="deepspeed", stage=3, dp=3)
    assert_all_refused(tmp_path / "run", 2)


# -- what zckpt wrote before


def test_stage_3_of_an_earlier_zckpt() -> None:
    report = zckpt.verify(BEFORE_3)
    assert report["equal"]
    others, without = texts(report["notes"][-2:])
    assert "1 of 6 rank files contain the name of another rank's file" in others
    assert "3 of 6 rank files do not state the name under which they were saved" in without
    assert zckpt.verify(BEFORE_3, FROZEN)["equal"]
    assert zckpt.verify(BEFORE_3, FROZEN)["notes"] == []


def test_model_ranks_of_an_earlier_zckpt(tmp_path: Path) -> None:
    report = zckpt.verify(BEFORE_GRID / "run")
    assert report["equal"]
    note = report["notes"][-1]
    assert "6 of 22 rank files contain the name of another rank's file" in note["message"]
    assert note["code"] == "saved-name-unknown"
    assert zckpt.verify(BEFORE_GRID / "run", BEFORE_GRID / "proof.json")["equal"]
    zckpt.reshard(BEFORE_GRID / "run", tmp_path / "run", dp=2)
    assert zckpt.verify(tmp_path / "run")["notes"] == []
    assert zckpt.verify(tmp_path / "run", BEFORE_GRID / "proof.json")["equal"]


@pytest.mark.parametrize(("one", "other"), [(0, 1), (0, 2), (3, 2)])
def test_a_model_rank_of_an_earlier_zckpt_that_was_copied_over_another(
    one: int, other: int, tmp_path: Path
) -> None:
    """Another tensor rank, or another stage. All names are those of an earlier zckpt; the bytes
    show it.
    """
    run = Path(shutil.copytree(BEFORE_GRID / "run", tmp_path / "run"))
    for path in tag_of(run).glob(f"*mp_rank_0{one}_*"):
        shutil.copy(path, path.with_name(path.name.replace(f"rank_0{one}", f"rank_0{other}")))
    first, last = sorted((one, other))
    said = f"model rank {last} has the optimizer of model rank {first}"
    for call in (zckpt.convert, zckpt.reshard):
        with pytest.raises(InconsistentCheckpoint, match=said):
            call(run, tmp_path / "out", **({"dp": 2} if call is zckpt.reshard else {}))
    assert not zckpt.verify(run)["equal"]


def test_names_that_an_earlier_zckpt_did_not_give(tmp_path: Path) -> None:
    """Then another program saved a file, and all names are compared."""
    stage_3 = Path(shutil.copytree(BEFORE_3, tmp_path / "stage_3"))
    first, second, _ = sorted(stage_3.rglob("*model_states.pt"))
    faults.copy_file(first, second, renamed=False)
    assert_refused(stage_3, first.name)
    grid = Path(shutil.copytree(BEFORE_GRID / "run", tmp_path / "grid"))
    edit(tag_of(grid) / "mp_rank_03_model_states.pt", lambda value: value)
    assert_refused(grid, "(bf16_zero_pp_rank_0_)?mp_rank_00_(optim|model)_states.pt")
