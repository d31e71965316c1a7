"""Steps: their places, values, agreement, policies, and warnings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace

from zckpt.core.checkpoint.agreement import KEEP, agree, need_one_save
from zckpt.core.checkpoint.entries import Entry
from zckpt.core.checkpoint.facts import NamedWeightsEngine, StateDictEngine, StepPlace
from zckpt.core.checkpoint.inert import Scalar
from zckpt.core.checkpoint.manifest import Manifest, Parameter, Run, Sighting
from zckpt.core.storage.checksum import crc_of_zeros
from zckpt.core.storage.fragments import Extent, solid
from zckpt.errors import InconsistentCheckpoint, WrongOption
from zckpt.training import steps
from zckpt.training.steps import (
    kind_of,
    never_stepped,
    stalled,
    step_of,
)


@pytest.mark.parametrize(
    ("value", "step", "kind"),
    [
        (7, 7, "int"),
        (7.0, 7, "float"),
        (7.5, 7.5, "float"),
        (0, 0, "int"),
        (Scalar(7.0, "F32"), 7, "F32"),
        (Scalar(7, "I64"), 7, "I64"),
        (True, None, "bool"),
        (Scalar(True, "BOOL"), None, "BOOL"),
        (None, None, "NoneType"),
        ("7", None, "str"),
        ([7], None, "list"),
        (float("nan"), None, "float"),
        (float("inf"), None, "float"),
        (Scalar(float("nan"), "F32"), None, "F32"),
    ],
)
def test_a_step_is_a_number(value: Any, step: float | None, kind: str) -> None:
    number = step_of(value)
    assert (number, type(number)) == (step, type(step))
    assert kind_of(value) == kind


@pytest.mark.parametrize("policy", [None, "max", "min", "5"])
@pytest.mark.parametrize(
    ("places", "step"), [([], None), ([("a", 3)], 3), ([("a", 3), ("b", 3)], 3)]
)
def test_where_all_agree_no_policy_matters(
    places: list[tuple[str, float]], step: int | None, policy: str | None
) -> None:
    assert agree(places, policy) == step


@pytest.mark.parametrize(("policy", "step"), [("max", 9), ("min", 3), ("5", 5), ("0", 0)])
def test_a_policy_decides(policy: str, step: int) -> None:
    assert agree([("a", 3), ("b", 9), ("c", 4)], policy) == step


def test_disagreement_names_places_and_values() -> None:
    places = [("rank 0", 3.0), *((f"rank {rank}", 4) for rank in range(1, 9))]
    with pytest.raises(InconsistentCheckpoint) as caught:
        agree(places, policy=None)
    message = caught.value.message
    assert "3.0 (rank 0)" in message
    assert "4 (rank 1, rank 2, rank 3 and 5 more)" in message
    assert "--step-policy" in caught.value.hint


@pytest.mark.parametrize(("dtype", "kind"), [(torch.bfloat16, "BF16"), (torch.float16, "F16")])
def test_steps_stall_where_torch_stalls(dtype: torch.dtype, kind: str) -> None:
    limit = steps.STALLS[kind]
    assert torch.tensor(limit, dtype=dtype) + 1 == limit
    assert torch.tensor(limit - 1, dtype=dtype) + 1 == limit
    doubt = stalled(limit, kind, "a.weight")
    assert doubt is not None
    assert "a.weight" in doubt.message
    assert stalled(limit - 1, kind, "a.weight") is None
    assert stalled(limit, "F32", "a.weight") is None


def stepped(step: int, *slots: str) -> Manifest:
    entries = {
        ("w", slot): Entry("w", slot, "F32", (5,), solid(5, Extent("a", 0, 20))) for slot in slots
    }
    return Manifest("/", "x", Run(), entries, {"w": Parameter((5,), step=step)})


def test_a_warning_for_an_optimizer_that_was_never_stepped() -> None:
    zero = crc_of_zeros(20)
    own = {("w", "master"): 5, ("w", "exp_avg"): zero, ("w", "exp_avg_sq"): zero}
    digests = {0: own}
    moments = ("master", "exp_avg", "exp_avg_sq")
    doubt = never_stepped(stepped(1, *moments), digests)
    assert doubt is not None
    assert "not been stepped" in doubt.message
    assert never_stepped(stepped(2, *moments), digests) is None
    assert never_stepped(stepped(1, *moments), {0: own | {("w", "exp_avg"): 7}}) is None
    assert never_stepped(stepped(1, "master"), digests) is None


def test_keep_decides_between_parameters_alone() -> None:
    steps.check_policy("keep")
    with pytest.raises(InconsistentCheckpoint, match="rank 1"):
        agree([("rank 0", 3), ("rank 1", 4)], KEEP)


def stated(where: str, **steps_by_owner: Any) -> steps.StatedSteps:
    result = steps.StatedSteps(where)
    for owner, value in steps_by_owner.items():
        result.add(owner, value)
    return result


@pytest.mark.parametrize(
    ("in_states", "in_groups", "where"),
    [
        ({"a": 7, "b": 8}, {"a": 0, "b": 0}, "state"),  # FusedAdam's groups are stale
        ({}, {"a": 7, "b": 7}, "group"),  # Apex
        ({"a": 7}, {}, "state"),
        ({"a": None, "b": float("nan")}, {"a": 3}, "group"),  # neither is a step
    ],
)
def test_a_step_in_the_state_is_true_else_the_groups(
    in_states: dict[str, Any], in_groups: dict[str, Any], where: str
) -> None:
    states, groups = stated("state", **in_states), stated("group", **in_groups)
    assert steps.believed(states, groups).where == where


def test_of_several_kinds_of_groups_the_first_with_a_step_is_true() -> None:
    elastic = stated("group", a=4)
    assert steps.believed(stated("state"), stated("group"), elastic) is elastic


@pytest.mark.parametrize(
    ("in_states", "of_group", "counted"),
    [
        ({"a": 0, "b": 0, "c": 5}, 0, {"a": 5, "b": 5, "c": 5}),
        ({"a": 0, "b": 5}, 0, {"a": 5, "b": 5}),  # c has never had a gradient
        ({"a": 0, "b": 3, "c": 2}, 0, {"a": 2, "b": 2, "c": 2}),  # c was unfrozen later
        ({"a": 5, "b": 5, "c": 6}, 0, {"a": 6, "b": 6, "c": 6}),  # written by another stage
        ({"a": 0, "b": 0, "c": 5}, None, {"a": 0, "b": 0, "c": 5}),  # another optimizer
        ({"a": 0, "b": 0, "c": 5}, 5, {"a": 0, "b": 0, "c": 5}),
        ({"a": 0, "b": 0, "c": 0}, 0, {"a": 0, "b": 0, "c": 0}),
        ({}, 0, {}),
    ],
)
def test_the_last_parameter_counts_for_its_group(
    in_states: dict[str, int], of_group: int | None, counted: dict[str, int]
) -> None:
    """DeepSpeed's FusedAdam without ZeRO in fp32; a step of 0 in the group shows it."""
    in_groups = stated("group", **dict.fromkeys("abc", of_group), other=7)
    states = stated("state", **in_states, other=4)
    groups = [["a", "b", "c"], ["other"]]
    assert steps.counted_by_last(states, in_groups, groups).steps == counted | {"other": 4}


def test_what_the_last_parameter_counts_keeps_its_type_and_shape() -> None:
    states = steps.StatedSteps("state")
    for owner, value in {"a": 0, "b": 5}.items():
        states.add(owner, Scalar(value, "I64"), (1,))
    counted = steps.counted_by_last(states, stated("group", a=0, b=0), [["a", "b"]])
    assert counted == replace(states, steps={"a": 5, "b": 5})


@pytest.mark.parametrize(
    ("policy", "settled"),
    [
        (None, {"a": 7, "b": 8}),
        (KEEP, {"a": 7, "b": 8}),
        ("max", {"a": 8, "b": 8}),
        ("min", {"a": 7, "b": 7}),
        ("5", {"a": 5, "b": 5}),
    ],
)
def test_a_policy_makes_one_step_of_several(policy: str | None, settled: dict[str, int]) -> None:
    assert stated("state", a=7, b=8).settled(policy) == settled
    assert stated("state").settled(policy) == {}


@pytest.mark.parametrize("policy", [None, "keep", "3"])
def test_a_step_that_is_no_number_of_updates(policy: str | None) -> None:
    stated = steps.StatedSteps("state", {"a": 2, "b": 1.75})
    if policy:
        assert set(stated.settled(policy).values()) <= {1.75, 2, 3}
        return
    with pytest.raises(InconsistentCheckpoint, match=r"step is 1\.75, .* state of b") as refused:
        stated.settled(policy)
    assert "--step-policy keep" in str(refused.value.hint)
    with pytest.raises(InconsistentCheckpoint, match=r"step is 1\.75, .* rank 1"):
        agree([("rank 0", 1.75), ("rank 1", 1.75)][::-1], policy=None)


def test_the_place_of_stated_steps_has_their_type_and_shape() -> None:
    states = steps.StatedSteps("state")
    assert states.place() is None
    states.add("a", Scalar(3.0, "I64"), (1,))
    assert states.place() == StepPlace("state", "I64", (1,))
    assert stated("group", a=3).place() == StepPlace("group", "int")


def test_onnx_runtime_counts_from_one() -> None:
    assert steps.COUNTED.number(0) == Scalar(1, "I64", (1,))
    assert steps.COUNTED.completed(8) == 7


def test_torch_keeps_its_step_where_the_table_says() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    state = optimizer.state_dict()
    place = steps.WRITTEN["torch"]
    step = state["state"][0]["step"]
    assert (step.dtype, tuple(step.shape)) == (torch.float32, place.shape)
    assert place.number(1) == Scalar(step.item(), "F32", place.shape)
    assert "step" not in state["param_groups"][0]
    assert place.stale is None


def test_counters_are_never_true() -> None:
    counters = {"last_epoch": 7, "_step_count": 8.0, "other": 9, "lost": None}
    assert steps.counter_sightings(
        "lr_scheduler", counters, ("last_epoch", "_step_count", "lost", "gone")
    ) == [
        Sighting("lr_scheduler, last_epoch", 7, False),
        Sighting("lr_scheduler, _step_count", 8, False),
    ]


@pytest.mark.parametrize(
    ("stated", "policy", "message"),
    [
        ([], None, None),
        ([("run/a", 6), ("run/b", 6), ("run/a", 6)], None, None),
        ([("run/a", 6), ("run/a", 5)], None, None),
        ([("run/a", 6), ("run/a", 5), ("run/b", 5)], None, None),
        ([("run/a", 6), ("run/b", 5)], "keep", None),
        ([("run/a", 6), ("run/b", 5)], "7", None),
        ([("run/a", 6), ("run/b", 5), ("run/a", 6)], None, "run: .*: 5 (b), 6 (a)"),
        ([("run/x/a", 6), ("run/y/a", 5)], None, "run: .*: 5 (y/a), 6 (x/a)"),
        ([("b", 6), ("a", 5), ("c", 6)], None, r".: .*: 5 (a), 6 (b, c)"),
    ],
)
def test_files_of_two_saves(
    stated: list[tuple[str, float]], policy: str | None, message: str | None
) -> None:
    """A file that states several steps is of a run that has several."""
    if message is None:
        need_one_save(stated, policy)
        return
    begin, _, end = message.partition(".*")
    with pytest.raises(InconsistentCheckpoint) as raised:
        need_one_save(stated, policy)
    assert raised.value.message.startswith(begin)
    assert raised.value.message.endswith(end)
    assert "--step-policy keep" in raised.value.hint


def of_engine(
    place: StepPlace | None, engine: Any = None, optimizer: str | None = None, **fields: Any
) -> Manifest:
    run = Run(step_place=place, engine=engine)
    return Manifest("/", "x", run, {}, {}, optimizer=optimizer).replace(**fields)


TORCH, APEX = steps.WRITTEN["torch"], steps.WRITTEN["apex-fused-adam"]
CPU_ADAM = steps.WRITTEN["deepspeed-cpu-adam"]
NAMED_WEIGHTS = NamedWeightsEngine("x", None, None, None, None)
STATE_DICT = StateDictEngine("x", None, (), None, None, None, None, False, False)


@pytest.mark.parametrize(
    ("place", "engine", "kept"),
    [
        (None, None, TORCH),
        (APEX, None, APEX),
        (APEX, NAMED_WEIGHTS, TORCH),
        (APEX, STATE_DICT, APEX),
    ],
)
def test_a_step_stays_where_it_stood(place: StepPlace | None, engine: Any, kept: StepPlace) -> None:
    assert steps.kept_place(of_engine(place, engine)) == kept


@pytest.mark.parametrize(
    ("place", "engine", "optimizer", "named", "expected"),
    [
        (APEX, None, "FusedAdam", None, APEX),
        (APEX, None, "FusedAdam", "torch", TORCH),
        (CPU_ADAM, None, "SomeLion", None, CPU_ADAM),
        # torch's own turn the number of a state into a tensor
        (CPU_ADAM, None, "AdamW", None, TORCH),
        (APEX, None, "AdamW", None, APEX),
        (CPU_ADAM, STATE_DICT, "AdamW", None, CPU_ADAM),
        # an optimizer of a configuration is one of its engine; that which the user named is not
        (replace(CPU_ADAM, optimizer="onebitadam"), None, "X", None, TORCH),
        (replace(CPU_ADAM, optimizer="deepspeed-cpu-adam"), None, "X", None,
         replace(CPU_ADAM, optimizer="deepspeed-cpu-adam")),
        (None, None, None, None, TORCH),
    ],
)  # fmt: skip
def test_where_a_program_of_torch_keeps_the_step(
    place: StepPlace | None,
    engine: Any,
    optimizer: str | None,
    named: str | None,
    expected: StepPlace,
) -> None:
    assert steps.torch_place(of_engine(place, engine, optimizer), named) == expected


def test_steps_of_groups() -> None:
    parameters = {
        "a": Parameter((1,), group=0, step=3),
        "b": Parameter((1,), group=1, step=4),
        "c": Parameter((1,), group=1, step=5),
        "frozen": Parameter((1,), trainable=False, group=1, step=6),
        "never": Parameter((1,), group=1),
        "none": Parameter((1,), step=7),  # the files have no groups
        "beyond": Parameter((1,), group=2, step=8),
    }
    assert steps.steps_of_groups(of_engine(None, parameters=parameters), 2) == [{3, 7}, {4, 5}]


@pytest.mark.parametrize(
    ("in_states", "in_groups", "named", "place"),
    [
        ({"a": 7, "b": 7}, {}, None, StepPlace("state", "int")),
        ({"a": 7}, {"a": 0}, None, StepPlace("state", "int", stale=0)),
        ({"a": 7, "b": 7}, {"a": 0, "b": 5}, None, StepPlace("state", "int")),
        ({}, {"a": 7}, None, StepPlace("group", "int")),
        ({"a": Scalar(7.0, "F32")}, {}, None, None),  # as torch's own
        ({"a": 7, "b": 7.0}, {}, None, None),
        ({}, {}, None, None),
        (
            {"a": 7},
            {},
            "deepspeed-cpu-adam",
            StepPlace("state", "int", optimizer="deepspeed-cpu-adam"),
        ),
        ({}, {}, "torch", replace(TORCH, optimizer="torch")),
    ],
)
def test_where_an_optimizer_keeps_its_step(
    in_states: dict[str, Any], in_groups: dict[str, Any], named: str | None, place: StepPlace | None
) -> None:
    states, groups = stated("state", **in_states), stated("group", **in_groups)
    assert steps.place_of(steps.believed(states, groups), groups, named) == place


def test_a_line_for_each_different_step() -> None:
    states = steps.StatedSteps("state")
    for owner, value in {"a": 5, "b": 5, "c": 6, "d": 256}.items():
        states.add(owner, Scalar(value, "BF16"))
    groups = stated("group", a=5, b=9)
    lines = list(steps.sightings_of(states, states))
    assert [sighting for sighting, _ in lines] == [
        Sighting("state of a and 1 more", 5, True),
        Sighting("state of c", 6, True),
        Sighting("state of d", 256, True),
    ]
    assert [warning is not None for _, warning in lines] == [False, False, True]
    assert list(steps.sightings_of(groups, states)) == [
        (Sighting("group of a", 5, False), None),
        (Sighting("group of b", 9, False), None),
    ]
    stale = steps.StatedSteps("group")
    stale.add("a", Scalar(256, "BF16"))
    assert list(steps.sightings_of(stale, states)) == [(Sighting("group of a", 256, False), None)]
    settled = replace(states, steps={"a": 5, "b": 6, "c": 6, "d": 6})
    truths = [sighting.truth for sighting, _ in steps.sightings_of(states, settled)]
    assert truths == [True, False, True, False]


@pytest.mark.parametrize(
    ("step", "policy", "where", "warned"),
    [
        (3, "5", "rank 0", True),
        (3, "3", "rank 0", False),
        (3, "max", "rank 0", False),
        (3, None, "rank 0", False),
        (None, "5", "rank 0", True),  # of an optimizer that keeps none
        (3, "5", "--step-policy 5", False),
    ],
)
def test_a_policy_that_decided_nothing(
    step: int | None, policy: str | None, where: str, warned: bool
) -> None:
    parameters = {"w": Parameter((1,), step=step)}
    places = Sighting("rank 1", 3, True), Sighting(where, 3, True)
    manifest = of_engine(None, parameters=parameters, steps=places)
    assert bool(steps.unused_policy(manifest, policy)) is warned


@pytest.mark.parametrize("policy", ["", "most", "-1", "1.5"])
def test_a_policy_that_does_not_exist(policy: str) -> None:
    with pytest.raises(WrongOption, match="none of max, min, keep or a number"):
        steps.check_policy(policy)
    for known in (None, "max", "min", "12"):
        steps.check_policy(known)
