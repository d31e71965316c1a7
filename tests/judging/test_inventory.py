"""What the names of files say, which one stands in for a lost one, and the rows of a checkpoint."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import zckpt
from zckpt.core.checkpoint.manifest import Sibling
from zckpt.errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    ZckptError,
)
from zckpt.judging.file_state import state_of
from zckpt.judging.inventory import inventory, of_folder, stand_in, states_in
from zckpt.resume.runs import Candidate, judged

from ..conftest import ROOT

TRAINER = ROOT / "examples" / "trainer" / "checkpoint-4"
OPTIM = "run/t/zero_pp_rank_{}_mp_rank_{:02d}_optim_states.pt"
MODEL = "run/t/zero_pp_rank_{}_mp_rank_{:02d}_model_states.pt"


@pytest.mark.parametrize(
    ("lost", "there", "found"),
    [
        (OPTIM.format(2, 0), [OPTIM.format(n, 0) for n in (0, 1, 3)], OPTIM.format(1, 0)),
        (OPTIM.format(0, 0), [OPTIM.format(n, 0) for n in (2, 3)], OPTIM.format(2, 0)),
        (OPTIM.format(1, 0), [MODEL.format(0, 0)], None),
        # of another data rank of the same model rank, before that of another model rank
        (OPTIM.format(1, 1), [OPTIM.format(1, 0), OPTIM.format(9, 1)], OPTIM.format(9, 1)),
        (OPTIM.format(1, 1), [OPTIM.format(0, 0)], None),
        (OPTIM.format(1, 0), ["other/t/zero_pp_rank_0_mp_rank_00_optim_states.pt"], None),
        ("t/layer_03-model_00-model_states.pt", ["t/layer_02-model_00-model_states.pt"], None),
        ("t/__1_0.distcp", ["t/__0_0.distcp", "t/.metadata"], "t/__0_0.distcp"),
        ("i/mp_rank_01/distrib_optim.pt", ["i/mp_rank_00/distrib_optim.pt"],
         "i/mp_rank_00/distrib_optim.pt"),
        ("a/model_world_size_4_rank_3.pt", ["a/optim_world_size_4_rank_2.pt"], None),
        ("a/model_world_size_4_rank_3.pt", ["a/model_world_size_4_rank_2.pt"],
         "a/model_world_size_4_rank_2.pt"),
        ("notes-1.txt", ["notes-2.txt"], None),
    ],
)  # fmt: skip
def test_the_same_role_and_the_next_rank(lost: str, there: list[str], found: str | None) -> None:
    assert stand_in(lost, there) == found


def test_rows() -> None:
    rows = {row.name: row for row in inventory(zckpt.read(TRAINER), {})}
    assert {row.state for row in rows.values()} == {"ok"}
    assert rows["mp_rank_00_model_states.pt"].rank == (("mp", 0),)
    optimizer = rows["bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"]
    assert (optimizer.role, optimizer.rank) == ("optimizer", (("dp", 1), ("mp", 0)))
    assert rows["rng_state_1.pth"].role == "random state"
    assert rows["tokenizer_config.json"].role == "tokenizer"


def test_rows_of_a_checkpoint_that_cannot_be_read(tmp_path: Path) -> None:
    """By the names in the folder, and what the error says of files."""
    run = Path(shutil.copytree(TRAINER, tmp_path / "checkpoint-4"))
    lost = next(run.rglob("*zero_pp_rank_1_*optim_states.pt"))
    lost.unlink()
    own = judged(Candidate(str(run), run.name, str(run)), {})
    assert own.missing
    assert own.error is not None
    rows = {row.path: row for row in of_folder(str(run), states_in(own.error))}
    assert (rows[str(lost)].state, rows[str(lost)].size) == ("missing", None)
    assert (rows[str(lost)].role, dict(rows[str(lost)].rank)) == ("optimizer", {"dp": 1, "mp": 0})
    other = run / lost.parent.name / lost.name.replace("rank_1_", "rank_0_")
    assert (rows[str(other)].state, rows[str(other)].size) == ("ok", other.stat().st_size)
    assert rows[str(run / "trainer_state.json")].role == "trainer state"


@pytest.mark.parametrize(
    ("code", "kind", "state"),
    [
        ("mixed-saves", InconsistentCheckpoint, "foreign"),
        ("world-size-disagrees", InconsistentCheckpoint, "unexpected"),
        ("file-cut-short", IncompleteCheckpoint, "cut"),
        ("file-damaged", CorruptCheckpoint, "unreadable"),
        ("steps-disagree", InconsistentCheckpoint, None),
    ],
)
def test_what_an_error_says_of_a_file(
    code: str, kind: Callable[..., ZckptError], state: str | None
) -> None:
    assert states_in(kind(code, "a", file="/run/a.pt")) == ({"/run/a.pt": state} if state else {})
    lost = IncompleteCheckpoint("missing-rank-file", "a", paths=["/run/a.pt"], file="/run")
    assert states_in(lost) == {"/run/a.pt": "missing"}


def saved(path: Path) -> None:
    value = {"a": torch.arange(1000.0), "b": "text"}
    if path.suffix == ".safetensors":
        save_file({"a": value["a"]}, path)  # type: ignore[dict-item]
    elif path.suffix == ".json":
        path.write_text('{"a": [1, 2, 3]}')
    else:
        torch.save(value, path, _use_new_zipfile_serialization=path.suffix != ".pkl")


DAMAGE = {
    "ok": lambda data: data,
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
    "cut": lambda data: data[: len(data) // 2],
    "head": lambda data: b"XX" + data[2:],
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["a.pt", "a.json", "a.safetensors"])
def test_states(name: str, damage: str, tmp_path: Path) -> None:
    path = tmp_path / name
    saved(path)
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    cut = "unreadable" if name == "a.json" else "cut"
    wanted = {"cut": cut, "head": "unreadable"}.get(damage, damage)
    if (name, damage) == ("a.safetensors", "head"):
        wanted = "cut"  # the length of the header is larger than the file
    assert state_of(Sibling(name, str(path), path.stat().st_size)) == wanted


@pytest.mark.parametrize("name", ["a.txt", "vocab.model", "merges.bpe"])
def test_what_has_no_form_is_not_judged(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"")
    assert state_of(Sibling(name, str(tmp_path / name), 0)) == "ok"


def test_files_before_torch_1_6(tmp_path: Path) -> None:
    """They are pickles one behind the other, then bytes."""
    path = tmp_path / "old.pkl"
    saved(path)
    assert state_of(Sibling("old.pkl", str(path), path.stat().st_size)) == "ok"


def test_a_flipped_bit_of_a_small_file(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    saved(path)
    data = bytearray(path.read_bytes())
    data[data.index(torch.arange(1000.0).numpy().tobytes()) + 100] ^= 1
    path.write_bytes(data)
    assert state_of(Sibling("a.pt", str(path), len(data))) == "unreadable"


def test_a_flipped_bit_anywhere_is_a_state(tmp_path: Path) -> None:
    """Also in the zip's directory, where Python's own reader fails in many ways."""
    path = tmp_path / "a.pt"
    torch.save({"a": torch.arange(4)}, path)
    data = path.read_bytes()
    found = Counter[str]()
    for bit in range(0, 8 * len(data), 3):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        found[state_of(Sibling("a.pt", str(path), len(data)))] += 1
    assert {*found} <= {"ok", "cut", "unreadable"}
    assert found["unreadable"] + found["cut"] > found["ok"] / 3
