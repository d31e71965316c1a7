"""Whose is a file, by its name and that under which it was saved, and which are missing?"""

from __future__ import annotations

import os

import pytest

from zckpt.core.storage import sources
from zckpt.core.storage.inventory import (
    Numbers,
    Row,
    every,
    gaps,
    missing_file,
    nameless,
    refuse_gaps,
    refuse_others,
    role,
    saved_names,
)
from zckpt.errors import IncompleteCheckpoint, InconsistentCheckpoint, listed
from zckpt.formats.deepspeed_states import directories as deepspeed
from zckpt.formats.gathered import sharded_tensors as gathered
from zckpt.formats.onnxruntime import legacy as onnxruntime

from ..conftest import texts

ROLES = {
    "deepspeed": deepspeed.ROLES,
    "gathered": gathered.OF_RANKS,
    "onnxruntime": (onnxruntime.OF_RANK,),
}
OF_LAYERS = (
    role("layer", r"layer-(\d+)(?:-(\d+))?\.pt", "layer", "part"),
    role("expert", r"(?P<stem>expert)-(\d+)\.pt", "layer"),
    role("file", r"None\.pt"),
)


@pytest.mark.parametrize(
    ("kind", "name", "saved_as"),
    [
        ("deepspeed", "mp_rank_00_model_states.pt", "mp_rank_01_model_states"),
        ("deepspeed", "mp_rank_10_model_states.pt", "mp_rank_1_model_states"),
        *(
            ("deepspeed", f"{name}_states.pt", f"{saved_as}_states")
            for name, saved_as in (
                ("zero_pp_rank_1_mp_rank_00_optim", "zero_pp_rank_2_mp_rank_00_optim"),
                ("zero_pp_rank_1_mp_rank_00_optim", "zero_pp_rank_1_mp_rank_01_optim"),
                ("zero_pp_rank_1_mp_rank_00_optim", "bf16_zero_pp_rank_0_mp_rank_00_optim"),
                ("bf16_zero_pp_rank_1_mp_rank_00_optim", "zero_pp_rank_0_mp_rank_00optim"),
                ("zero_pp_rank_1_mp_rank_00_model", "zero_pp_rank_0_mp_rank_00_model"),
                ("zero_pp_rank_1_mp_rank_00_model", "zero_pp_rank_1_mp_rank_01_model"),
                ("layer_03-model", "layer_04-model"),
                ("layer_03-model_00-model", "layer_03-model_01-model"),
                ("layer_03-model_01-model", "layer_03-model"),
                ("layer_0_expert_1_mp_rank_00_model", "layer_1_expert_1_mp_rank_00_model"),
                ("layer_0_expert_1_mp_rank_00_model", "layer_0_expert_2_mp_rank_00_model"),
                ("layer_0_expert_1_mp_rank_00_model", "layer_0_expert_1_mp_rank_01_model"),
                ("expp_rank_1_mp_rank_00_optim", "expp_rank_0_mp_rank_00_optim"),
                ("expp_rank_1_mp_rank_00_optim", "expp_rank_1_mp_rank_01_optim"),
            )
        ),
        ("gathered", "model_world_size_2_rank_0.pt", "model_world_size_2_rank_1"),
        ("gathered", "model_world_size_2_rank_0.pt", "model_world_size_4_rank_0"),
        ("gathered", "pytorch_model_fsdp_0_rank0.bin", "pytorch_model_fsdp_0_rank10"),
        ("onnxruntime", "a.ZeRO.0.2.ort.pt", "a.ZeRO.1.2.ort"),
        ("onnxruntime", "a.ZeRO.0.2.ort.pt", "a.ZeRO.0.3.ort"),
    ],
)
def test_the_file_of_another_rank(kind: str, name: str, saved_as: str) -> None:
    names = saved_names(ROLES[kind], {f"/run/{name}": saved_as})
    assert texts(nameless(names)) == []
    with pytest.raises(InconsistentCheckpoint, match=f"/run/{name} was saved as") as error:
        refuse_others(names)
    assert saved_as + os.path.splitext(name)[1] in error.value.hint


@pytest.mark.parametrize(
    ("kind", "name", "saved_as"),
    [
        ("gathered", "rank_1.pt", "rank_1"),
        ("gathered", "rank_1.pt", "rank_01"),
        ("onnxruntime", "a.ZeRO.0.2.ort.pt", "a.ZeRO.0.2.ort"),
        *(
            ("deepspeed", f"{name}_states.pt", f"{saved_as}_states")
            for name, saved_as in (
                ("mp_rank_00_model", "mp_rank_00_model"),
                ("mp_rank_00_model", "mp_rank_0_model"),
                ("zero_pp_rank_1_mp_rank_00_optim", "zero_pp_rank_1_mp_rank_00optim"),
                ("zero_pp_rank_1_mp_rank_00_optim", "bf16_zero_pp_rank_1_mp_rank_00_optim"),
                ("layer_03-model", "layer_3-model_00-model"),
            )
        ),
    ],
)
def test_a_name_of_the_same_rank(kind: str, name: str, saved_as: str) -> None:
    names = saved_names(ROLES[kind], {f"/run/{name}": saved_as})
    refuse_others(names)
    assert texts(nameless(names)) == []


@pytest.mark.parametrize(
    ("kind", "name", "saved_as"),
    [
        ("gathered", "rank_1.pt", None),
        ("gathered", "rank_1.pt", "archive"),
        ("gathered", "rank_1.pt", "tmp_rank_2"),
        ("gathered", "step_7_rank_0.pt", "step_6_rank_1"),
        ("onnxruntime", "a.ZeRO.0.2.ort.pt", "b.ZeRO.1.2.ort"),
        ("deepspeed", "mp_rank_00_model_states.pt", "archive"),
        ("deepspeed", "mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"),
        ("deepspeed", "mp_rank_00_model_states.pt", "tmp.mp_rank_01_model_states"),
    ],
)
def test_a_name_that_says_nothing(kind: str, name: str, saved_as: str | None) -> None:
    own = {f"/run/{name}": saved_as, f"/other/{name}": os.path.splitext(name)[0]}
    names = saved_names(ROLES[kind], own)
    refuse_others(names)
    assert texts(nameless(names)) == [
        "1 of 2 rank files do not state the name under which they were saved: zckpt cannot see "
        "whether these were swapped or copied over each other"
    ]


def test_files_of_no_rank_are_not_counted() -> None:
    assert saved_names(ROLES["gathered"], {"/run/model_2.pt": "model_1", "/run/a.pt": None}) == []


def test_the_name_of_another_file() -> None:
    """A name of another form counts if a file beside it has this name."""
    own = {f"/run/layer_0{layer}-model_states.pt": f"layer_0{layer}-model_states" for layer in "12"}
    optimizer = "zero_pp_rank_0_mp_rank_00_optim_states"
    lost = own | {"/run/layer_02-model_states.pt": optimizer}
    refuse_others(saved_names(deepspeed.ROLES, lost))
    copied = lost | {f"/run/{optimizer}.pt": optimizer}
    with pytest.raises(InconsistentCheckpoint, match=f"layer_02.* was saved as {optimizer}.pt"):
        refuse_others(saved_names(deepspeed.ROLES, copied))


@pytest.mark.parametrize(
    ("name", "saved_as", "is_other"),
    [
        ("layer-1.pt", "layer-1-2", False),
        ("layer-1-2.pt", "layer-1", False),
        ("layer-1-2.pt", "layer-1-3", True),
        ("layer-1-2.pt", "layer-2", True),
        ("layer-1.pt", "expert-1", True),
    ],
)
def test_forms_and_the_numbers_that_both_names_have_are_compared(
    name: str, saved_as: str, is_other: bool
) -> None:
    found = saved_names(OF_LAYERS, {f"/run/{name}": saved_as}, [f"{saved_as}.pt"])
    assert [own.is_other for own in found] == [is_other]


def test_a_file_without_a_zip_states_no_place() -> None:
    """`None.pt` is a name as any other."""
    assert [name.saved_name for name in saved_names(OF_LAYERS, {"/run/None.pt": None})] == [None]


def test_a_file_that_stands_in_for_a_lost_one_states_no_place() -> None:
    own = {"/run/layer-1.pt": "layer-2", "/run/layer-2.pt": "layer-2"}
    with sources.standing_in(["/run/layer-1.pt"]):
        found = saved_names(OF_LAYERS, own)
    assert [name.saved_name and name.saved_name.rank for name in found] == [
        None,
        (("layer", 2),),
    ]
    refuse_others(found)


def test_a_missing_file() -> None:
    error = missing_file("/run/a.pt", "index.json", "copy it")
    assert isinstance(error, IncompleteCheckpoint)
    assert error.message == "/run/a.pt is missing, although index.json lists it"
    assert error.hint == "copy it"
    assert missing_file("/run/a.pt").message == "/run/a.pt is missing"


PART = role("part", r"a_(\d+)(?:_of_(\d+))?\.pt", "dp", "of", fixed="of")


def test_gaps_have_names_like_those_that_are_there() -> None:
    there: dict[Numbers, str] = {(0, 4): "/run/a_00_of_4.pt", (2, 4): "/run/a_02_of_4.pt"}
    rows = gaps(PART, there, every(range(4), range(4, 5)))
    assert rows == [
        Row("part", f"a_0{n}_of_4.pt", f"/run/a_0{n}_of_4.pt", (("dp", n), ("of", 4)), "missing")
        for n in (1, 3)
    ]
    with pytest.raises(IncompleteCheckpoint) as caught:
        refuse_gaps("/run", rows, "it has 2 of 4", "take the other copy")
    error = caught.value
    assert error.message == "/run lacks a_01_of_4.pt, a_03_of_4.pt (it has 2 of 4)"
    assert error.hint.startswith("copy them again, or take an earlier")
    assert error.hint.endswith("; take the other copy")
    assert error.paths == ("/run/a_01_of_4.pt", "/run/a_03_of_4.pt")
    (row,) = gaps(PART, {}, [(1,)], "/run/a_0.pt")
    assert (row.path, row.rank) == ("/run/a_1.pt", (("dp", 1),))


def test_nothing_is_missing() -> None:
    refuse_gaps("/run", gaps(PART, {(0,): "/run/a_0.pt"}, every(range(1))))


def test_a_huge_number_names_the_first_files() -> None:
    rows = gaps(PART, {(0, 1): "/run/a_0_of_1.pt"}, every(range(10**18), range(10**18)))
    assert len(rows) == 64


def test_a_missing_file_with_a_name_of_the_programs_own() -> None:
    rows = [Row("", "", "/run", (("dp", rank),), "missing") for rank in (1, 3)]
    with pytest.raises(IncompleteCheckpoint, match="/run lacks the file of rank 1, ") as caught:
        refuse_gaps("/run", rows, hint="its rank is in it")
    assert (caught.value.hint, caught.value.paths) == ("its rank is in it", ())


def test_long_lists_are_cut() -> None:
    assert listed(range(3)) == "0, 1, 2"
    assert listed(range(10)) == "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
    assert listed(["a", "b", "c"], 2) == "a, b and 1 more"


def test_a_name_is_no_line_of_its_own() -> None:
    assert listed(["a\nHint: b"]) == r"a\nHint: b"


@pytest.mark.parametrize("folder", ["layer_" + "1" * 60_000, "optim" * 12_000, "1" * 5_000])
@pytest.mark.parametrize("kind", ["deepspeed", "gathered"])
def test_a_name_that_no_file_can_have_states_nothing(kind: str, folder: str) -> None:
    """Nor is it parsed, which would take minutes."""
    name = {"deepspeed": "layer_03-model_states.pt", "gathered": "model_world_size_2_rank_0.pt"}[
        kind
    ]
    (found,) = saved_names(ROLES[kind], {f"/run/{name}": folder})
    assert found.saved_name is None
