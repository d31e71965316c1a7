"""Flat buffers of ranks that were cut by hand, in every way that DeepSpeed saves them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.core.checkpoint.entries import name_of
from zckpt.core.checkpoint.facts import StepPlace
from zckpt.core.checkpoint.inert import Scalar
from zckpt.core.checkpoint.manifest import Manifest, Sighting
from zckpt.errors import CorruptCheckpoint, InconsistentCheckpoint, UnsupportedCheckpoint

from ...conftest import texts
from . import made

GROUPS: made.Groups = (
    {"fc.weight": (3, 5), "one": (1,), "none": (0, 4), "fc.bias": (3,)},
    {"norm": (7,)},
)
Cut = Callable[[made.Groups, int], made.States]


def without_padding(groups: made.Groups, dp: int) -> made.States:
    return made.stage_2(groups, dp, saves_padding=False)


CUTS: list[Cut] = [made.stage_2, without_padding, made.stage_3]


@pytest.mark.parametrize("dp", [1, 2, 3, 8])
@pytest.mark.parametrize("cut", CUTS)
def test_what_was_cut_is_whole_again(cut: Cut, dp: int, tmp_path: Path) -> None:
    run = made.saved(tmp_path / "run", cut(GROUPS, dp))
    manifest, expected = zckpt.read(run), made.whole(GROUPS)
    if cut is made.stage_3:  # which saves weights as masters alone
        expected = {name: each for name, each in expected.items() if not name.endswith("/param")}
    assert {*map(name_of, manifest.entries)} == {*expected}
    for name, tensor in expected.items():
        assert torch.equal(zckpt.load(run, name), tensor), name
    assert manifest.step == 3


@pytest.mark.parametrize("cut", CUTS)
def test_a_state_of_one_element_is_a_number(cut: Cut, tmp_path: Path) -> None:
    """Also where the partitions of another group have one element as well."""
    groups = ({"weight": (6,)}, {"one": (1,)})
    model, ranks = cut(groups, 1)
    for each in kept(ranks[0]):
        each["d"] = torch.tensor([0.5])
    manifest = zckpt.read(made.saved(tmp_path / "run", (model, ranks)))
    assert {entry.slot for entry in manifest.entries.values()} - {"param"} == {*made.SLOTS}
    assert [manifest.states.scalars[name]["d"].value for name in ("weight", "one")] == [0.5] * 2


@pytest.mark.parametrize("cut", CUTS)
def test_a_step_per_rank(cut: Cut, tmp_path: Path) -> None:
    model, ranks = cut(GROUPS, 2)
    for each in kept(ranks[1]):
        each["step"] += 1
    run = made.saved(tmp_path / "run", (model, ranks))
    with pytest.raises(InconsistentCheckpoint, match="step"):
        zckpt.read(run)
    assert zckpt.read(run, step_policy="max").step == 4
    assert zckpt.read(run, step_policy="min").step == 3


def lost_state(ranks: list[dict[str, Any]]) -> None:
    del kept(ranks[1])[0]["exp_avg"]


def lost_step(ranks: list[dict[str, Any]]) -> None:
    del kept(ranks[1])[0]["step"]


def another_type(ranks: list[dict[str, Any]]) -> None:
    kept(ranks[1])[0]["exp_avg"] = kept(ranks[1])[0]["exp_avg"].double()


def too_long(ranks: list[dict[str, Any]]) -> None:
    masters(ranks[1])[0] = torch.zeros(len(masters(ranks[1])[0]) + 4)


def one_group_fewer(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        masters(rank).pop()


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lost_state, "only some ranks hold 'exp_avg' of flat group 0"),
        (lost_step, "only some ranks hold a step"),
        (another_type, "ranks keep exp_avg in different types: F32, F64"),
        (too_long, "which does not fit its 4 parameters"),
        (one_group_fewer, "have 1 flat groups, but parameter shapes are listed for 2"),
    ],
)
def test_ranks_that_contradict_each_other(
    cut: Cut, spoil: Callable[[list[dict[str, Any]]], None], message: str, tmp_path: Path
) -> None:
    model, ranks = cut(GROUPS, 2)
    spoil(ranks)
    run = made.saved(tmp_path / "run", (model, ranks))
    with pytest.raises(InconsistentCheckpoint) as caught:
        zckpt.read(run)
    assert message in caught.value.message


def test_optimizer_states_on_nvme(tmp_path: Path) -> None:
    """Stage 3 saves empty buffers where the numbers lie on another disk."""
    model, ranks = made.stage_3(GROUPS, 2)
    for rank in ranks:
        masters(rank)[:] = [torch.zeros(0) for _ in masters(rank)]
    with pytest.raises(UnsupportedCheckpoint, match="NVMe"):
        zckpt.read(made.saved(tmp_path / "run", (model, ranks)))


@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize("is_stored", [False, True])
def test_a_step_that_an_elastic_save_has_cut_off(
    lost: int, is_stored: bool, tmp_path: Path
) -> None:
    """The storage still has it, or another rank; if none has, it is lost."""
    model, ranks = made.stage_2(GROUPS, 2)
    for number, rank in enumerate(ranks):
        state = rank["optimizer_state_dict"]
        states = [*state["base_optimizer_state"]["state"].values()]
        for own in states:
            step = torch.tensor([3.0])
            cut = step[:0] if is_stored else torch.empty(0)
            own["step"] = cut if number < lost else step
        state["base_optimizer_state"] = states
    run = made.saved(tmp_path / "run", (model, ranks))
    if is_stored or lost == 1:
        assert zckpt.read(run).step == 3
    else:
        with pytest.raises(InconsistentCheckpoint, match="the step of flat group 0 is lost"):
            zckpt.read(run)


def empty_on_one(ranks: list[dict[str, Any]]) -> None:
    masters(ranks[1])[0] = torch.zeros(0)


def one_rank_with_a_group_fewer(ranks: list[dict[str, Any]]) -> None:
    masters(ranks[1]).pop()


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (empty_on_one, "elements of flat group 0, which does not fit its 4 parameters"),
        (one_rank_with_a_group_fewer, "flat groups, but parameter shapes are listed for 2"),
    ],
)
def test_one_rank_is_enough_for_a_contradiction(
    cut: Cut, spoil: Callable[[list[dict[str, Any]]], None], message: str, tmp_path: Path
) -> None:
    model, ranks = cut(GROUPS, 2)
    spoil(ranks)
    with pytest.raises(InconsistentCheckpoint, match=message):
        zckpt.read(made.saved(tmp_path / "run", (model, ranks)))


def test_masters_without_elements_in_stage_2(tmp_path: Path) -> None:
    """They are of another run: only stage 3 leaves empty buffers behind."""
    model, ranks = made.stage_2(GROUPS, 2)
    for rank in ranks:
        masters(rank)[:] = [torch.zeros(0) for _ in masters(rank)]
    with pytest.raises(InconsistentCheckpoint, match="hold 0 elements of flat group 0"):
        zckpt.read(made.saved(tmp_path / "run", (model, ranks)))


@pytest.mark.parametrize("cut", CUTS)
def test_a_group_without_elements(cut: Cut, tmp_path: Path) -> None:
    """Its buffers are empty, and nothing lies on another disk."""
    run = made.saved(tmp_path / "run", cut(({"none": (0, 4)}, {"norm": (7,)}), 2))
    assert zckpt.read(run).entries["none", "exp_avg"].shape == (0, 4)
    assert zckpt.load(run, "norm/exp_avg").tolist() == [*range(101, 108)]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", ["none", "text", "one is no tensor"])
def test_masters_that_are_no_list_of_tensors(cut: Cut, kind: str, tmp_path: Path) -> None:
    model, ranks = cut(GROUPS, 2)
    key = "fp32_flat_groups" if cut is made.stage_3 else "single_partition_of_fp32_groups"
    state = ranks[1]["optimizer_state_dict"]
    state[key] = {"none": None, "text": "ab"}.get(kind, [state[key][0], 3])
    with pytest.raises(CorruptCheckpoint, match=f"{key} is not a list of tensors"):
        zckpt.read(made.saved(tmp_path / "run", (model, ranks)))


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_zeros_between_parameters(dp: int, tmp_path: Path) -> None:
    """`parameter_alignment` lays 5 zeros behind the first of two parameters."""
    groups = ({"first": (3,), "gap": (5,), "last": (2, 3)},)
    model, ranks = made.stage_2(groups, dp)
    del model["param_shapes"][0]["gap"], model["module"]["gap"]
    for rank in ranks:
        rank["optimizer_state_dict"]["param_alignment_paddings"] = [[5, 0]]
    run, expected = made.saved(tmp_path / "run", (model, ranks)), made.whole(groups)
    for slot in made.SLOTS:
        for name in ("first", "last"):
            assert torch.equal(zckpt.load(run, f"{name}/{slot}"), expected[f"{name}/{slot}"])


def test_zeros_between_more_parameters_than_there_are(tmp_path: Path) -> None:
    model, ranks = made.stage_2(GROUPS, 2)
    for rank in ranks:
        rank["optimizer_state_dict"]["param_alignment_paddings"] = [[0] * 4, [0, 0]]
    message = "have 2 parameters in flat group 1, but shapes are listed for 1: norm"
    with pytest.raises(InconsistentCheckpoint, match=message):
        zckpt.read(made.saved(tmp_path / "run", (model, ranks)))


def test_sub_groups_of_one_group(tmp_path: Path) -> None:
    """Stage 3 has more flat buffers than groups; their step may be in the group."""
    model, ranks = made.stage_3((*GROUPS, {"head": (2,)}), 2)
    for rank in ranks:
        base = rank["optimizer_state_dict"]["optimizer_state_dict"]
        base["param_groups"] = [
            {"lr": 0.1, "params": [0, 1], "step": 5},
            {"lr": 0.2, "params": [2], "step": 6},
        ]
        for each in kept(rank):
            del each["step"]
    parameters = zckpt.read(made.saved(tmp_path / "run", (model, ranks))).parameters
    assert {name: (each.group, each.step) for name, each in parameters.items()} == {
        **dict.fromkeys(("fc.weight", "one", "none", "fc.bias", "norm"), (0, 5)),
        "head": (1, 6),
    }


# -- states that are no slots, and such that are


def slots(manifest: Manifest) -> set[str]:
    return {entry.slot for entry in manifest.entries.values()} - {"param", "master", "state"}


def of_partitions(manifest: Manifest) -> list[str]:
    """The keys of states that no parameter has a part of."""
    return sorted(str(row.key) for row in manifest.states.of_form("partition"))


def half(part: torch.Tensor) -> torch.Tensor:
    return part[: len(part) // 2].clone()


def two_rows(part: torch.Tensor) -> torch.Tensor:
    return part.view(2, -1).clone()


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("on", [(0, 1), (0,), (1,)])
@pytest.mark.parametrize("spoil", [half, two_rows])
def test_a_state_of_another_form_than_its_partition(
    cut: Cut, on: tuple[int, ...], spoil: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    """If only one rank's has it, nothing is cut from the others either."""
    model, ranks = cut(({"weight": (4, 6)},), 2)
    for rank in on:
        (each,) = kept(ranks[rank])
        each["exp_avg"] = spoil(each["exp_avg"])
    manifest = zckpt.read(made.saved(tmp_path / "run", (model, ranks)))
    assert slots(manifest) == {"exp_avg_sq"}
    assert of_partitions(manifest) == ["exp_avg"]


@pytest.mark.parametrize("cut", CUTS)
def test_what_is_no_number_of_all_ranks(cut: Cut, tmp_path: Path) -> None:
    """Numbers that differ, or that only some ranks have, are the ranks' own; None is nothing."""
    model, ranks = cut(({"weight": (4, 6)},), 2)
    (first,), (second,) = map(kept, ranks)
    first |= {"d": torch.tensor(0.5), "only": torch.tensor(2.0), "nothing": None, 7: 1.0}
    second |= {"d": torch.tensor(0.25), "late": torch.tensor(2.0), "nothing": None, 7: 1.0}
    manifest = zckpt.read(made.saved(tmp_path / "run", (model, ranks)))
    assert manifest.states.scalars == {}
    assert slots(manifest) == {"exp_avg", "exp_avg_sq"}
    assert of_partitions(manifest) == ["7", "d", "late", "only"]


MUON = ({"a": (3,), "b": (1, 5), "c": (2, 2)},)


def with_momenta(dp: int, cut: Cut) -> made.States:
    """What Muon keeps of each parameter a rank has a part of: all of it; 12 elements are cut."""
    owned = {1: ["abc"], 2: ["ab", "bc"], 3: ["ab", "b", "c"], 4: ["ab", "b", "c", ""]}
    owned |= {6: ["a", "ab", "b", "b", "c", "c"], 7: ["a", "ab", "b", "b", "c", "c", ""]}
    model, ranks = cut(MUON, dp)
    tensors = made.whole(MUON)
    for number, (rank, names) in enumerate(zip(ranks, owned[dp], strict=True)):
        (each,) = kept(rank)
        del each["exp_avg"], each["exp_avg_sq"]
        if names:  # each rank's copy is told apart
            own = [tensors[f"{name}/exp_avg"].flatten() + 1000 * number for name in names]
            each["momentum_buffer"] = torch.cat(own)
    return model, ranks


@pytest.mark.parametrize("dp", [1, 2, 3, 4, 6, 7])
@pytest.mark.parametrize("cut", [made.stage_2, without_padding])
def test_momenta_that_are_whole_on_every_rank(cut: Cut, dp: int, tmp_path: Path) -> None:
    """The first copy of each is taken, and the others are replicas."""
    run = made.saved(tmp_path / "run", with_momenta(dp, cut))
    manifest, expected = zckpt.read(run), made.whole(MUON)
    first = {"b": int(dp >= 6), "c": {1: 0, 2: 1, 3: 2, 4: 2}.get(dp, 4)}
    for name, shape in MUON[0].items():
        found = zckpt.load(run, f"{name}/momentum_buffer")
        assert found.shape == shape
        assert torch.equal(found, expected[f"{name}/exp_avg"] + 1000 * first.get(name, 0)), name
        entry = manifest.entries[name, "momentum_buffer"]
        assert sum(each.extent.length for each in entry.fragments) == entry.length
    copies = {1: [], 2: ["b"], 3: ["b"], 4: ["b"]}.get(dp, ["a", "b", "b", "c"])
    found_copies = [each.parameter for each in manifest.replicas]
    assert sorted(found_copies) == copies
    assert of_partitions(manifest) == []


def longer(each: dict[str, Any]) -> None:
    each["momentum_buffer"] = torch.zeros(len(each["momentum_buffer"]) + 1)


def of_another_type(each: dict[str, Any]) -> None:
    each["momentum_buffer"] = each["momentum_buffer"].double()


def test_an_empty_momentum_has_no_type(tmp_path: Path) -> None:
    """Of a rank that has a part of no parameter."""
    model, ranks = with_momenta(4, made.stage_2)
    for rank in ranks[:3]:
        (each,) = kept(rank)
        each["momentum_buffer"] = each["momentum_buffer"].bfloat16()
    kept(ranks[3])[0]["momentum_buffer"] = torch.zeros(0)
    manifest = zckpt.read(made.saved(tmp_path / "run", (model, ranks)))
    assert manifest.entries["c", "momentum_buffer"].dtype == "BF16"
    assert of_partitions(manifest) == []


def test_no_rank_has_the_momentum_of_an_empty_parameter(tmp_path: Path) -> None:
    """So it is not known which ones are whole."""
    model, ranks = with_momenta(2, made.stage_2)
    model["module"]["none"] = torch.zeros(0, 4).bfloat16()
    model["param_shapes"][0]["none"] = torch.Size((0, 4))
    for rank in ranks:
        rank["optimizer_state_dict"]["param_alignment_paddings"][0].append(0)
    manifest = zckpt.read(made.saved(tmp_path / "run", (model, ranks)))
    assert slots(manifest) == set()
    assert of_partitions(manifest) == ["momentum_buffer"]


@pytest.mark.parametrize("spoil", [longer, of_another_type])
def test_momenta_that_are_not_whole(
    spoil: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    model, ranks = with_momenta(2, made.stage_2)
    spoil(kept(ranks[1])[0])
    manifest = zckpt.read(made.saved(tmp_path / "run", (model, ranks)))
    assert slots(manifest) == set()
    assert of_partitions(manifest) == ["momentum_buffer"]


def test_momenta_of_some_ranks(tmp_path: Path) -> None:
    model, ranks = with_momenta(2, made.stage_2)
    del kept(ranks[1])[0]["momentum_buffer"]
    with pytest.raises(InconsistentCheckpoint, match="only some ranks hold 'momentum_buffer'"):
        zckpt.read(made.saved(tmp_path / "run", (model, ranks)))


def test_stage_3_has_no_whole_momenta(tmp_path: Path) -> None:
    """It cuts every parameter: what is as long as stage 2's would be is something else."""
    model, ranks = with_momenta(2, made.stage_3)
    manifest = zckpt.read(made.saved(tmp_path / "run", (model, ranks)))
    assert slots(manifest) == set()
    assert of_partitions(manifest) == ["momentum_buffer"]


def test_stage_3_takes_no_tensor_for_a_whole_one(tmp_path: Path) -> None:
    model, ranks = made.stage_3(({"a": (4,)},), 2)
    for rank in ranks:
        kept(rank)[0]["momentum_buffer"] = torch.arange(4.0)
    manifest = zckpt.read(made.saved(tmp_path / "run", (model, ranks)))
    assert slots(manifest) == {"exp_avg", "exp_avg_sq"}
    assert of_partitions(manifest) == ["momentum_buffer"]


# -- what an elastic save has cut off


def elastic(ranks: list[dict[str, Any]]) -> None:
    """Lists of states instead of groups."""
    for rank in ranks:
        state = rank["optimizer_state_dict"]
        state["base_optimizer_state"] = kept(rank)


@pytest.mark.parametrize(
    ("numbers", "is_stored", "expected"),
    [
        ((0.5, 0.5, None), False, 0.5),
        ((None, 0.5, 0.5), True, 0.5),
        ((0.5, 0.25, None), False, None),
        ((0.5, None, 0.25), False, None),
    ],
)
def test_a_number_that_an_elastic_save_has_cut_off(
    numbers: tuple[float | None, ...], is_stored: bool, expected: float | None, tmp_path: Path
) -> None:
    """Other ranks have it, unless they differ; a partition without elements is not one."""
    model, ranks = without_padding(({"weight": (7,)},), 3)  # the last rank has padding alone
    for rank, number, numel in zip(ranks, numbers, (4, 3, 0), strict=True):
        (each,) = kept(rank)
        stored = torch.tensor([0.5])
        cut = stored[:0] if is_stored else torch.empty(0)
        each["d"] = cut if number is None else torch.tensor([number])
        each |= {slot: each[slot][:numel].clone() for slot in ("exp_avg", "exp_avg_sq")}
    elastic(ranks)
    run = made.saved(tmp_path / "run", (model, ranks))
    manifest = zckpt.read(run)
    scalars = {key: each.value for key, each in manifest.states.scalars.get("weight", {}).items()}
    assert scalars == ({} if expected is None else {"d": expected})
    assert zckpt.load(run, "weight/exp_avg").tolist() == [*range(101, 108)]


def test_numbers_that_an_elastic_save_keeps(tmp_path: Path) -> None:
    """Python's have no element that could be cut off, and a 0-d tensor loses none."""
    model, ranks = without_padding(({"weight": (8,)},), 2)
    for rank in ranks:
        kept(rank)[0] |= {"a": 0.5, "b": torch.tensor(0.25)}
    elastic(ranks)
    scalars = zckpt.read(made.saved(tmp_path / "run", (model, ranks))).states.scalars["weight"]
    assert scalars == {"a": Scalar(0.5, "float"), "b": Scalar(0.25, "F32")}


def test_a_step_that_is_empty_without_an_elastic_save(tmp_path: Path) -> None:
    """No other rank's stands for it."""
    model, ranks = made.stage_2(GROUPS, 2)
    kept(ranks[1])[0]["step"] = torch.empty(0)
    with pytest.raises(InconsistentCheckpoint, match="the step of flat group 0 is lost"):
        zckpt.read(made.saved(tmp_path / "run", (model, ranks)))


# -- steps


@pytest.mark.parametrize("cut", CUTS)
def test_a_step_of_one_element(cut: Cut, tmp_path: Path) -> None:
    """It stays as it stood, and is no number beside the step."""
    model, ranks = cut(GROUPS, 2)
    for rank in ranks:
        for each in kept(rank):
            each["step"] = torch.tensor([3.0])
    manifest = zckpt.read(made.saved(tmp_path / "run", (model, ranks)))
    assert manifest.run.step_place == StepPlace("state", "F32", (1,))
    assert manifest.states.scalars == {}
    assert (manifest.step, of_partitions(manifest)) == (3, [])


@pytest.mark.parametrize("cut", CUTS)
def test_a_state_that_is_called_step(cut: Cut, tmp_path: Path) -> None:
    """A vector is no step, but a state like any other: the group's step is true."""
    model, ranks = cut(({"weight": (4, 6)},), 2)
    for rank in ranks:
        (each,) = kept(rank)
        each["step"] = each["exp_avg"].clone()
        groups_of(rank)[0]["step"] = 9
    run = made.saved(tmp_path / "run", (model, ranks))
    manifest = zckpt.read(run)
    assert slots(manifest) == {"exp_avg", "exp_avg_sq", "step"}
    assert torch.equal(zckpt.load(run, "weight/step"), zckpt.load(run, "weight/exp_avg"))
    assert (manifest.step, manifest.run.step_place) == (9, StepPlace("group", "int"))


@pytest.mark.parametrize("cut", CUTS)
def test_a_state_that_is_called_step_on_one_rank(cut: Cut, tmp_path: Path) -> None:
    model, ranks = cut(({"weight": (4, 6)},), 2)
    kept(ranks[0])[0]["step"] = torch.zeros(5)
    del kept(ranks[1])[0]["step"]
    with pytest.raises(InconsistentCheckpoint, match="only some ranks hold 'step' of flat group 0"):
        zckpt.read(made.saved(tmp_path / "run", (model, ranks)))


@pytest.mark.parametrize("cut", CUTS)
def test_a_step_of_one_rank_in_a_partition_of_one_element(cut: Cut, tmp_path: Path) -> None:
    """It is a step nevertheless."""
    model, ranks = cut(({"one": (1,)},), 2)
    kept(ranks[0])[0]["step"] = torch.tensor([3.0])
    del kept(ranks[1])[0]["step"]
    with pytest.raises(InconsistentCheckpoint, match="only some ranks hold a step: state of flat"):
        zckpt.read(made.saved(tmp_path / "run", (model, ranks)))


@pytest.mark.parametrize("cut", CUTS)
def test_stale_steps_of_groups_may_differ(cut: Cut, tmp_path: Path) -> None:
    """No policy is needed for what no optimizer looks at; the highest is shown."""
    model, ranks = cut(({"weight": (4, 6)},), 2)
    for number, rank in enumerate(ranks):
        groups_of(rank)[0]["step"] = number
    manifest = zckpt.read(made.saved(tmp_path / "run", (model, ranks)))
    assert [
        each for each in manifest.run.steps if "flat" in each.where or "groups" in each.where
    ] == [
        Sighting("state of flat group 0", 3, True),
        Sighting("param_groups[0]", 1, False),
    ]
    assert manifest.step == 3
    assert all(each.step is not None for each in manifest.run.steps)


@pytest.mark.parametrize(
    ("in_state", "in_group", "stalls"), [(256, 0, True), (255, 256, False), (3, 256, False)]
)
def test_a_step_that_grows_no_more(
    in_state: int, in_group: int, stalls: bool, tmp_path: Path
) -> None:
    """The true one in bfloat16: another place has its own type."""
    model, ranks = made.stage_2(({"weight": (4, 6)},), 2)
    for rank in ranks:
        kept(rank)[0]["step"] = torch.tensor(in_state, dtype=torch.bfloat16)
        groups_of(rank)[0]["step"] = in_group
    warnings = zckpt.read(made.saved(tmp_path / "run", (model, ranks))).notices.warnings
    found = texts(line for line in warnings if line.code == "step-doubtful")
    assert len(found) == stalls
    assert all("the step of state of flat group 0 is 256 in BF16" in line for line in found)


def groups_of(rank: dict[str, Any]) -> list[dict[str, Any]]:
    """A rank's param_groups."""
    state = rank["optimizer_state_dict"]
    groups: list[dict[str, Any]] = (
        state.get("base_optimizer_state") or state["optimizer_state_dict"]
    )["param_groups"]
    return groups


def kept(rank: dict[str, Any]) -> list[dict[str, Any]]:
    """What a rank's optimizer keeps of each flat group."""
    state = rank["optimizer_state_dict"]
    base = state.get("base_optimizer_state") or state["optimizer_state_dict"]
    return [*base["state"].values()]


def masters(rank: dict[str, Any]) -> list[torch.Tensor]:
    state = rank["optimizer_state_dict"]
    tensors: list[torch.Tensor] = (
        state.get("single_partition_of_fp32_groups") or state["fp32_flat_groups"]
    )
    return tensors
