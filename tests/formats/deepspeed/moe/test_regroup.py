"""Experts on another number of ranks: their groups have other names and other cuts."""

from __future__ import annotations

import pytest

from zckpt.core.checkpoint.facts import ExpertLayer, StateDictEngine
from zckpt.core.checkpoint.manifest import Manifest, Parameter, Run
from zckpt.core.checkpoint.origin import Origin
from zckpt.errors import InconsistentCheckpoint, MissingData, WrongOption
from zckpt.formats.deepspeed.moe import regroup
from zckpt.formats.deepspeed.moe.regroup import over_ranks
from zckpt.training.options import DP, EP, Options

LAYER = "0.deepspeed_moe"
ENGINE = StateDictEngine("torch", "F32", (), (), "nested", None, None, False, False)
EXPERTS = (ExpertLayer("0", 4, 1),)
DENSE, OF_EXPERTS = {"lr": 0.1}, {"lr": 0.1, "moe": True, "name": "ep_size_1"}


def expert(number: int, inner: str) -> str:
    return f"{LAYER}.experts.deepspeed_experts.{number}.{inner}"


def manifest(sizes: list[int], cuts: list[int], *, experts: int = 4) -> Manifest:
    """A dense weight, then `experts` with weights of these sizes, in groups of these lengths."""
    parameters = {"dense": Parameter((5,), group=0)}
    names = [f"w{place}" for place in range(len(sizes))]
    start = 0
    for group, count in enumerate(cuts, 1):
        for number in range(experts):
            for name, size in zip(names[start : start + count], sizes[start:], strict=False):
                parameters[expert(number, name)] = Parameter((size,), group=group)
        start += count
    return Manifest(
        root="run",
        format="dcp",
        entries={},
        parameters=parameters,
        groups=(DENSE, *(OF_EXPERTS for _ in cuts)),
        run=Run(origin=Origin(format="dcp", dp=4), engine=ENGINE),
    )


def options(ep: int | None, dp: int | None = 4) -> Options:
    given = ((EP, ep), (DP, dp))
    return Options(tuple((option, value) for option, value in given if value is not None))


def groups_of(result: Manifest) -> list[list[str]]:
    """The names of each group, those of experts without their layer."""
    assert result.groups is not None
    found: list[list[str]] = [[] for _ in result.groups]
    for name, about in result.parameters.items():
        assert about.group is not None
        found[about.group].append(name.removeprefix(f"{LAYER}.experts.deepspeed_experts."))
    return found


def test_experts_of_one_rank_are_one_group() -> None:
    result = over_ranks(manifest([3, 2], [2]), options(2))
    assert result.groups == (DENSE, {**OF_EXPERTS, "name": "ep_size_2"})
    assert groups_of(result)[0] == ["dense"]
    assert sorted(groups_of(result)[1]) == sorted(f"{n}.w{p}" for n in range(4) for p in (0, 1))
    assert result.source["ep"] == 2


@pytest.mark.parametrize(
    ("ep", "limit", "expected"),
    [
        (2, 100, [4]),  # a rank has two experts of 3 + 2 elements
        (2, 10, [4]),
        (2, 9, [3, 1]),
        (2, 5, [2, 2]),
        (2, 1, [1, 1, 1, 1]),
        (4, 5, [2]),
        (4, 4, [1, 1]),
    ],
)
def test_a_group_is_cut_where_it_has_too_many_elements(
    ep: int, limit: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The elements of one rank count; every rank's parts are in the same group."""
    monkeypatch.setattr(regroup, "GROUP_SIZE", limit)
    result = over_ranks(manifest([3, 2], [2]), options(ep))
    assert [len(names) // ep for names in groups_of(result)[1:]] == expected


def test_cuts_become_one_group_again(monkeypatch: pytest.MonkeyPatch) -> None:
    source = manifest([30, 20], [1, 1])  # 4 experts of 30 are a group, 4 of 20 the next
    with pytest.raises(WrongOption, match="they may be parts of one group") as caught:
        over_ranks(source, options(2))
    assert "--ep 1" in (caught.value.hint or "")
    monkeypatch.setattr(regroup, "GROUP_SIZE", 120)
    result = over_ranks(source, options(2))
    assert [len(names) for names in groups_of(result)] == [1, 8]


def test_the_same_size_changes_nothing() -> None:
    source = manifest([3], [1])
    result = over_ranks(source, options(None))
    assert result.parameters == source.parameters
    assert isinstance(result.run.engine, StateDictEngine)
    assert result.run.engine.experts == EXPERTS


@pytest.mark.parametrize(
    ("ep", "dp", "said", "hint"),
    [
        (3, 6, "6 ranks cannot share the 4 experts", "--ep 1 or 2"),
        (2, 3, "3 ranks cannot share the 4 experts", "--ep 1"),
        (8, 8, "8 ranks cannot share the 4 experts", "--ep 1 or 2 or 4"),
    ],
)
def test_sizes_that_do_not_fit(ep: int, dp: int, said: str, hint: str) -> None:
    with pytest.raises(WrongOption, match=said) as caught:
        over_ranks(manifest([3], [1]), options(ep, dp))
    assert caught.value.hint is not None
    assert caught.value.hint.endswith(hint)


def test_a_size_without_experts() -> None:
    source = manifest([], [])
    assert over_ranks(source, options(1)) == source
    with pytest.raises(WrongOption, match="has no experts"):
        over_ranks(source, options(2))


def test_a_lost_expert() -> None:
    source = manifest([3], [1])
    del source.parameters[expert(1, "w0")]
    with pytest.raises(InconsistentCheckpoint, match="but not expert 1"):
        over_ranks(source, options(2))


def test_experts_in_a_dense_group() -> None:
    source = manifest([3], [1])
    source.parameters[expert(2, "w0")] = Parameter((3,), group=0)
    with pytest.raises(MissingData, match="DeepSpeed needs separate groups for experts"):
        over_ranks(source, options(2))
