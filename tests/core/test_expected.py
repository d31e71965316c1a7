"""Names that lead out of a folder, and the sentences about what is missing."""

from __future__ import annotations

import os
import re

import pytest

from zckpt.core.expected import RANK, missing_file, missing_ranks, path_inside, refuse_other_rank
from zckpt.errors import CorruptCheckpoint, IncompleteCheckpoint, InconsistentCheckpoint, listed
from zckpt.formats.onnxruntime import files as onnxruntime


@pytest.mark.parametrize("name", ["a.pt", "a/b.pt", "..a", "a..", "a/...b"])
def test_names_inside(name: str) -> None:
    assert path_inside("/run", name, ".metadata") == os.path.join("/run", name)


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "..", "../a", "a/../../b", "a/..", "", ".", "a\0b"]
)
def test_names_outside(name: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"/run: \.metadata names a file outside of it"):
        path_inside("/run", name, ".metadata")


def test_a_missing_file() -> None:
    error = missing_file("/run/a.pt", "index.json", "copy it")
    assert isinstance(error, IncompleteCheckpoint)
    assert error.message == "/run/a.pt is missing, which index.json names"
    assert error.hint == "copy it"
    assert missing_file("/run/a.pt").message == "/run/a.pt is missing"


def test_missing_ranks() -> None:
    error = missing_ranks("/run", [1, 3], "model", "it has 2 of 4", "expected a_1.pt")
    assert isinstance(error, IncompleteCheckpoint)
    assert error.message == "/run: the model file of rank 1, 3 is missing (it has 2 of 4)"
    assert error.hint == "expected a_1.pt"
    assert missing_ranks("/run", [1]).message == "/run: the file of rank 1 is missing"


@pytest.mark.parametrize(
    ("rank", "name", "saved_as"),
    [
        (
            RANK,
            "zero_pp_rank_1_mp_rank_00_optim_states.pt",
            "zero_pp_rank_2_mp_rank_00_optim_states",
        ),
        (RANK, "model_world_size_2_rank_0.pt", "model_world_size_2_rank_1"),
        (RANK, "pytorch_model_fsdp_0_rank0.bin", "pytorch_model_fsdp_0_rank10"),
        (onnxruntime.RANK, "a.ZeRO.0.2.ort.pt", "a.ZeRO.1.2.ort"),
    ],
)
def test_the_file_of_another_rank(rank: re.Pattern[str], name: str, saved_as: str) -> None:
    with pytest.raises(InconsistentCheckpoint, match="was saved as") as error:
        refuse_other_rank(f"/run/{name}", saved_as, rank)
    assert saved_as + os.path.splitext(name)[1] in error.value.hint


@pytest.mark.parametrize(
    ("name", "saved_as"),
    [
        ("rank_1.pt", "rank_1"),
        ("rank_1.pt", "rank_01"),
        ("rank_1.pt", "archive"),
        ("rank_1.pt", None),
        ("rank_1.pt", "tmp_rank_2"),
        ("zero_pp_rank_1_mp_rank_00_optim_states.pt", "zero_pp_rank_1_mp_rank_01_optim_states"),
        (
            "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
            "zero_pp_rank_1_mp_rank_00_optim_states",
        ),
        ("step_7_rank_0.pt", "step_6_rank_0"),
        ("model_2.pt", "model_1"),
    ],
)
def test_a_name_that_says_nothing_of_another_rank(name: str, saved_as: str | None) -> None:
    refuse_other_rank(f"/run/{name}", saved_as)


def test_long_lists_are_cut() -> None:
    assert listed(range(3)) == "0, 1, 2"
    assert listed(range(10)) == "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
    assert listed(["a", "b", "c"], 2) == "a, b and 1 more"


def test_a_name_is_no_line_of_its_own() -> None:
    assert listed(["a\nHint: b"]) == r"a\nHint: b"
