"""One manifest of several ranks: what contradicts is named, what is a rank's own is listed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from zckpt.core.checkpoint.entries import Entry, key_of, name_of
from zckpt.core.checkpoint.grid import Grid as Axes
from zckpt.core.checkpoint.grid import GridPlace
from zckpt.core.checkpoint.inert import Scalar, TensorName
from zckpt.core.checkpoint.manifest import Files, Manifest, Parameter, Run
from zckpt.core.checkpoint.optimizer_states import StateRow, States, states_in
from zckpt.core.checkpoint.placement import Replicated, Sliced, Sum, Table
from zckpt.core.checkpoint.slicing import replicated
from zckpt.core.checkpoint.states import BESIDE_STATE, NO_PARAMETER, REASONS
from zckpt.core.ranks.merge import agreed_steps, in_order, merge, numbered_alike
from zckpt.core.storage.fragments import Extent, Record, Runs
from zckpt.errors import InconsistentCheckpoint, UnsupportedCheckpoint, note, warning

from ..conftest import texts
from .grids import Grid, Placed, cut_up, grid, numbers

STAGES = Table("stage")


@pytest.fixture
def made() -> Grid:
    """Two ranks: `a` is cut into 1 and 3 rows, both have `b`."""
    copied = Placed("b", (2,), None, [np.arange(2)] * 2)
    return grid([cut_up("a", (4,), 0, [[1, 3]]), copied], ("param", "exp_avg"))


def with_entry(rank: Manifest, name: str, **fields: Any) -> Manifest:
    own = replace(rank.entries[key_of(name)], **fields)
    return replace(rank, entries={**rank.entries, key_of(name): own})


def without_entry(rank: Manifest, name: str) -> Manifest:
    return replace(rank, entries={n: e for n, e in rank.entries.items() if n != key_of(name)})


def with_parameter(rank: Manifest, name: str, **fields: Any) -> Manifest:
    own = replace(rank.parameters[name], **fields)
    return replace(rank, parameters={**rank.parameters, name: own})


def with_state(rank: Manifest, **state: Any) -> Manifest:
    states = states_in(state.get("optimizer", {}))
    changed = {**rank.state, **state}
    return replace(rank, state=changed, states=states).with_state(changed)


FAULTS: dict[str, tuple[Any, str]] = {
    "a slice is missing": (
        lambda rank: without_entry(rank, "a/param"),
        "run: rank 1 lacks a/param, or its slice has a wrong size",
    ),
    "a slice of another size": (
        lambda rank: with_entry(rank, "a/exp_avg", shape=(2,)),
        "run: rank 1 lacks a/exp_avg, or its slice has a wrong size",
    ),
    "another type": (
        lambda rank: with_entry(rank, "a/param", dtype="F32"),
        "run: ranks keep a/param in different types: F32, I32",
    ),
    "another shape of a copy": (
        lambda rank: with_entry(rank, "b/param", shape=(2, 1)),
        "run: the replicas of b/param have different shapes",
    ),
    "another shape where shapes are listed": (
        lambda rank: with_parameter(rank, "b", shape=(3,)),
        "run: ranks disagree on b: its shape, param group, step or a one-number state differs",
    ),
    "another group": (
        lambda rank: with_parameter(rank, "a", group=1),
        "run: ranks disagree on a: its shape, param group, step or a one-number state differs",
    ),
    "other numbers": (
        lambda rank: replace(
            rank, states=States((StateRow("d", "number", ("a",), Scalar(2.0, "F32")),))
        ),
        "run: ranks disagree on a: its shape, param group, step or a one-number state differs",
    ),
    "a frozen one": (
        lambda rank: with_parameter(rank, "a", trainable=False),
        "run: ranks disagree on a: its shape, param group, step or a one-number state differs",
    ),
    "no step": (
        lambda rank: with_parameter(rank, "a", step=None),
        "run: ranks disagree on a: its shape, param group, step or a one-number state differs",
    ),
    "another step": (
        lambda rank: with_parameter(rank, "a", step=9),
        r"the optimizer's step differs: 3 \(a, run\), 9 \(a, run\)",
    ),
    "no whole number of updates": (
        lambda rank: with_parameter(rank, "a", step=2.5),
        "the optimizer's step is 2.5, not a whole number of updates: a, run",
    ),
    "counters of another save": (
        lambda rank: with_state(rank, counters={"global_steps": 4}),
        "run/1-model_states.pt differs from run/0-model_states.pt in its counters",
    ),
    "a loss scale of another save": (
        lambda rank: with_state(rank, optimizer={"scale": 4}),
        "differs from .* in its loss scale",
    ),
    "settings of another save": (
        lambda rank: replace(rank, groups=({"lr": 1.0}, {"lr": 9.0})),
        "differ from those of other model ranks",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_contradicts_is_named(fault: str, made: Grid) -> None:
    change, message = FAULTS[fault]
    first, second = made.ranks
    if "save" in fault and "settings" not in fault:
        first, second = (
            rank.replace(stated_in=f"run/{n}-model_states.pt") for n, rank in enumerate(made.ranks)
        )
    merge([first, second], made.table)
    with pytest.raises(InconsistentCheckpoint, match=message) as caught:
        merge([first, change(second)], made.table)
    assert caught.value.hint == InconsistentCheckpoint.usual_hint or "--step-policy" in (
        caught.value.hint or ""
    )


def test_copies_that_ranks_have_by_themselves(made: Grid) -> None:
    """Copies of slices are one of the whole, if each rank has as many."""
    ranks = [replace(rank, replicas=(rank.entries["a", "param"],)) for rank in made.ranks]
    copy, _ = (copy for copy in merge(ranks, made.table).replicas if copy.slot == "param")
    assert numbers(made.files, copy) == numbers(made.files, made.whole.entries["a", "param"])
    one = merge([ranks[0], made.ranks[1]], made.table).replicas
    assert [copy.name for copy in one] == ["b/param", "b/exp_avg"]


def test_a_parameter_without_elements(made: Grid) -> None:
    """It is no empty slice: an optimizer may own it."""
    empty = grid([cut_up("e", (0, 2), 0, [[0, 0]])])
    assert empty.ranks[0].parameters["e"].trainable
    assert merge(empty.ranks, empty.table).parameters == empty.whole.parameters


@pytest.mark.parametrize("widths", [[4, 0], [0, 4]])
def test_an_empty_slice_needs_no_tensor(widths: list[int]) -> None:
    """No optimizer owns it."""
    made = grid([cut_up("a", (4,), 0, [widths])], ("param", "exp_avg"))
    ranks = [without_entry(r, "a/param") if 0 in r.parameters["a"].shape else r for r in made.ranks]
    assert sorted(len(rank.entries) for rank in ranks) == [0, 2]
    whole = merge(ranks, made.table)
    assert whole.parameters == made.whole.parameters
    for name, entry in made.whole.entries.items():
        assert numbers(made.files, whole.entries[name]) == numbers(made.files, entry)


def test_parts_of_a_sum_are_no_copies() -> None:
    """Each rank's weight is another one; their moments are copies."""
    cut = Sliced((2,), replicated((2,), 3), Sum())
    made = grid([Placed("b", (2,), cut, [np.arange(2)] * 3)], ("param", "exp_avg"))
    whole = merge(made.ranks, made.table)
    assert [copy.name for copy in whole.replicas] == ["b/exp_avg"] * 2


def test_one_rank_is_the_whole() -> None:
    made = grid([cut_up("a", (4,), 0, [[4]])])
    optimizer = {"scale": 8, "beside": {"own": 1}}
    whole = merge([with_state(made.ranks[0], optimizer=optimizer)], made.table)
    assert whole.parameters == made.whole.parameters
    assert whole.states == States((StateRow("own", "beside", value=1),))
    assert whole.state["optimizer"] == {"scale": 8}


def test_parameters_of_no_group(made: Grid) -> None:
    """All of them, if no optimizer was read."""
    ranks = [with_parameter(rank, "b", group=None) for rank in made.ranks]
    assert [item.group for item in merge(ranks, made.table).parameters.values()] == [0, None]
    without = [replace(with_parameter(rank, "a", group=None), groups=None) for rank in ranks]
    whole = merge(without, made.table)
    assert whole.groups is None
    assert [(name, item.shape) for name, item in whole.parameters.items()] == [
        ("a", (4,)),
        ("b", (2,)),
    ]


def test_states_stand_behind_parameters_and_buffers(made: Grid) -> None:
    entry = Entry("client_state.rng", "state", "I32", (2,), Runs(()))
    own = replace(made.whole, entries={entry.key: entry, **made.whole.entries})
    assert [*in_order(own).entries] == [*in_order(made.whole).entries, entry.key]


def test_a_name_may_have_slashes() -> None:
    """The slot stands behind the last one."""
    made = grid([cut_up("of/a", (4,), 0, [[1, 3]])])
    whole = merge(made.ranks, made.table)
    assert numbers(made.files, whole.entries["of/a", "param"]) == [0, 1, 2, 3]


def test_a_copy_has_the_bytes_of_its_rank() -> None:
    made = grid([Placed("b", (2,), None, [np.arange(2)] * 3)])
    table = Table("rank", {"b": Sliced((2,), replicated((2,), 3), Replicated())})
    whole = merge(made.ranks, table)
    holders = (whole.entries["b", "param"], *whole.replicas)
    files = [fragment.extent.file for entry in holders for fragment in entry.fragments]
    assert files == ["0:b/param", "1:b/param", "2:b/param"]


# -- steps


@pytest.mark.parametrize(("policy", "steps"), [("max", (6, 9)), ("min", (3, 4)), ("7", (7, 7))])
def test_a_policy_decides(policy: str, steps: tuple[int, int], made: Grid) -> None:
    """Of a group, on all ranks: `a` has the step 3 and 6, `b` 4 and 9."""
    second = with_parameter(with_parameter(made.ranks[1], "a", step=6), "b", step=9)
    whole = merge([made.ranks[0], second], made.table, policy)
    assert tuple(item.step for item in whole.parameters.values()) == steps


def counted(name: str, *steps: int) -> Manifest:
    """A rank with one group, whose parameters have these steps."""
    parameters = {f"{name}.{n}": Parameter((2,), True, 0, step) for n, step in enumerate(steps)}
    return Manifest("run", "x", Run(), {}, parameters, groups=({"lr": 1.0},))


def test_ranks_of_one_save_have_one_step() -> None:
    assert agreed_steps([counted("0", 3, 3), counted("1", 3)], policy=None) == {
        "0.0": 3,
        "0.1": 3,
        "1.0": 3,
    }
    agreed_steps(
        [counted("0", 3, 2), counted("1", 3)], policy=None
    )  # the first counts each by itself
    agreed_steps([counted("0", 3, 2), counted("0", 3, 2)], policy=None)
    for other in (counted("1", 4), counted("0", 4, 4)):
        with pytest.raises(InconsistentCheckpoint, match=r"step differs: 3 .*, 4 "):
            agreed_steps([counted("0", 3, 3), other], policy=None)
        assert {*agreed_steps([counted("0", 3, 3), other], "max").values()} == {4}
    with pytest.raises(InconsistentCheckpoint, match=r"step differs: 2 .*, 3 "):
        agreed_steps([counted("0", 3, 2), counted("0", 3, 3)], policy=None)


def test_keep_keeps_steps_of_single_parameters_alone() -> None:
    assert agreed_steps([counted("0", 3), counted("1", 4)], "keep") == {"0.0": 3, "1.0": 4}
    with pytest.raises(InconsistentCheckpoint, match="step differs"):
        agreed_steps([counted("0", 3), counted("0", 4)], "keep")


# -- groups


def stage(name: str, *rates: float) -> Manifest:
    """A stage with one parameter in each of its groups, which have these learning rates."""
    parameters = {f"{name}.{n}": Parameter((2,), True, n) for n in range(len(rates))}
    groups = tuple({"lr": rate, "betas": (0.9, 0.95)} for rate in rates)
    return Manifest(
        "run",
        "x",
        Run(),
        {},
        parameters,
        groups=groups,
        state={"module": []},
        files=Files(rank_keys=("lr_scheduler", "sampler")),
    )


def test_groups_of_stages_are_known_by_their_settings() -> None:
    stages, groups = numbered_alike([stage("0", 1.0, 3.0), stage("1", 1.0, 2.0, 3.0)])
    assert [group["lr"] for group in groups or ()] == [1.0, 2.0, 3.0]
    assert [p.group for each in stages for p in each.parameters.values()] == [0, 2, 0, 1, 2]
    with pytest.raises(InconsistentCheckpoint, match="the hyper-parameters of groups in"):
        numbered_alike([stage("0", 4.0), stage("1", 1.0, 2.0)])
    assert numbered_alike([stage("0", 1.0), replace(stage("1", 2.0), groups=None)])[1] is None
    message = r"run: .* 1 of 2 optimizer groups, and their hyper-parameters do not show which ones$"
    with pytest.raises(UnsupportedCheckpoint, match=message) as caught:
        numbered_alike([stage("0", 1.0), stage("1", 1.0, 1.0)])
    assert (caught.value.hint or "").startswith(
        "give each optimizer group a different hyper-parameter"
    )


def test_parameters_stand_by_group_and_the_scheduler_is_that_of_all_groups() -> None:
    """A stage without a parameter of a group has dropped it, and its rate from the scheduler."""
    first = with_state(stage("0", 3.0), lr_scheduler={"_last_lr": [3.0]})
    second = with_state(stage("1", 1.0, 3.0), lr_scheduler={"_last_lr": [1.0, 3.0]})
    whole = merge([first, second], STAGES)
    assert [*whole.parameters] == ["1.0", "0.0", "1.1"]
    assert (whole.groups, whole.state["lr_scheduler"]) == (second.groups, {"_last_lr": [1.0, 3.0]})
    assert texts(whole.notices.omitted) == ["lr_scheduler of model ranks other than 0"]


# -- what ranks have of their own


def test_tensors_beside_all_ranks_come_first(made: Grid) -> None:
    """Weights in files of layers: the ranks have the states, and frozen ones are in no rank."""
    source = grid([Placed(name, (2,), None, [np.arange(2)] * 2) for name in "bc"], ("param", "m"))
    stages = [without_entry(rank, "b/param") for rank in source.ranks]
    stages = [replace(rank, parameters={"b": rank.parameters["b"]}) for rank in stages]
    stages = [without_entry(without_entry(rank, "c/param"), "c/m") for rank in stages]
    entries = {name: source.whole.entries[name] for name in (("c", "param"), ("b", "param"))}
    beside = stages[0].replace(
        entries=entries,
        parameters={"c": Parameter((2,), False)},
        paths=("layer",),
        records=(Record(Extent("layer", 0, 8), 7),),
        state={"module": ["c", "b"]},
    )
    whole = merge(stages, STAGES, None, beside)
    assert [*whole.entries] == [("c", "param"), ("b", "param"), ("b", "m")]
    assert numbers(source.files, whole.entries["c", "param"]) == [2000, 2001]
    assert [copy.name for copy in whole.replicas] == ["b/m"]
    assert [*whole.parameters] == ["b", "c"]
    assert (whole.state["module"], whole.files.paths) == (["c", "b"], ("layer",))
    assert whole.files.records == beside.files.records


def test_own_values_are_left_out_and_listed(made: Grid) -> None:
    """The first rank's count; of another rank's file the report has them."""
    states = ({"own": [1], "same": [2]}, {"own": [5], "same": [2]})
    ranks = [
        with_state(rank, client_state=own).replace(stated_in=f"run/{n}-model_states.pt")
        for n, (rank, own) in enumerate(zip(made.ranks, states, strict=True))
    ]
    whole = merge(ranks, made.table)
    assert whole.state["client_state"] == states[0]
    assert texts(whole.notices.omitted) == ["client_state 'own' of model ranks other than 0"]
    assert whole.files.of_ranks == {"1-model_states.pt": {"client_state": states[1]}}
    stated = {"1-model_states.pt": {"loss": 3}}
    again = merge([ranks[0], ranks[1].replace(of_ranks=stated)], made.table).files.of_ranks
    assert again == {"1-model_states.pt": {"client_state": states[1], "loss": 3}}


@pytest.mark.parametrize("key", ["lr_scheduler", "sampler"])
def test_any_rank_may_have_values_of_its_own(key: str) -> None:
    """Not the last one alone; and what the first lacks is one."""
    first, second, third = (stage(name, 1.0) for name in "012")
    second = with_state(second, **{key: 1}, client_state={"late": 1})
    whole = merge([first, second, third], STAGES)
    assert texts(whole.notices.omitted) == [
        f"{what} of model ranks other than 0" for what in ("client_state 'late'", key)
    ]


@pytest.mark.parametrize("key", ["sampler", "client_state", "module_extra"])
def test_what_the_file_of_a_further_rank_states_is_compared(key: str, made: Grid) -> None:
    ranks = (rank.replace(rank_keys=("sampler",)) for rank in made.ranks)
    first, second = (with_state(rank, **{key: {"n": 1}}) for rank in ranks)
    assert merge([first, second], made.table).files.of_ranks == {}
    second = with_state(second.replace(stated_in="run/1-model_states.pt"), **{key: {"n": 2}})
    whole = merge([first, second], made.table)
    assert whole.files.of_ranks == {"1-model_states.pt": {key: {"n": 2}}}


def test_what_ranks_have_of_one_file_is_no_ranks_own(made: Grid) -> None:
    """A random state that all of them read there."""
    shared = {f"rng {n}": TensorName(f"client_state.rng {n}") for n in range(20)}
    ranks = [with_state(r, client_state=shared | {"own": [n]}) for n, r in enumerate(made.ranks)]
    ranks = [replace(rank, place=GridPlace(n, Axes(tp=2))) for n, rank in enumerate(ranks)]
    whole = merge(ranks, made.table)
    assert texts(whole.notices.omitted) == ["client_state 'own' of model ranks other than 0"]
    assert whole.place is None


def test_what_files_state_is_that_of_all_ranks(made: Grid) -> None:
    """A state that is not read has tensors of each rank, whose names differ by its number."""
    ranks = []
    for number, rank in enumerate(made.ranks):
        file = f"run/{number}-model_states.pt"
        lines = {
            "omitted": (note("state-omitted", f"omitted {number}"),),
            "warnings": (warning("state-missing", f"warnings {number}"),),
            "inferred": (f"inferred {number}",),
        }
        ranks.append(
            with_state(rank, client_state={"rng": TensorName("client_state.rng")}).replace(
                paths=(file,),
                records=(Record(Extent(file, 0, 4), number),),
                layout={file: {"rank": number}},
                of_ranks={f"{number}-model_states.pt": {"loss": number}},
                states=States(
                    (
                        StateRow(
                            "q",
                            "unsupported",
                            ("a",),
                            "",
                            "why",
                            tensors=(rank.entries["a", "param"],),
                        ),
                    )
                ),
                **lines,
            )
        )
    whole = merge(ranks, made.table)
    assert whole.files.paths == tuple(file for rank in ranks for file in rank.files.paths)
    assert [record.crc for record in whole.files.records] == [0, 1]
    assert [*whole.files.layout.values()] == [{"rank": 0}, {"rank": 1}]
    assert [*whole.files.of_ranks.values()] == [{"loss": 0}, {"loss": 1}]
    assert texts(whole.notices.warnings) == ["warnings 0", "warnings 1"]
    assert whole.notices.inferred == ("inferred 0", "inferred 1")
    own = "client_state 'rng' of model ranks other than 0"  # a random state, whatever its numbers
    assert texts(whole.notices.omitted) == ["omitted 0", "omitted 1", own]
    tensors = [tensor for item in whole.states for tensor in item.tensors]
    assert [tensor.name for tensor in tensors] == ["rank 0: a/param", "rank 1: a/param"]


def test_a_tensor_of_the_state_is_a_copy_unless_it_is_of_another_shape(made: Grid) -> None:
    def rank_with(number: int, shape: tuple[int, ...]) -> Manifest:
        entry = Entry("client_state.rng", "state", "I32", shape, Runs(()))
        last = Entry("client_state.seed", "state", "I32", (2,), Runs(()))
        entries = {each.key: each for each in (entry, last)}
        return replace(made.ranks[number], entries={**made.ranks[number].entries, **entries})

    def copies(shape: tuple[int, ...]) -> list[str]:
        whole = merge([rank_with(0, (2,)), rank_with(1, shape)], made.table)
        assert ("client_state.rng", "state") in whole.entries
        return [copy.name for copy in whole.replicas if copy.slot == "state"]

    assert copies((2,)) == ["client_state.rng/state", "client_state.seed/state"]
    assert copies((1, 2)) == ["client_state.seed/state"]
    late = merge([made.ranks[0], rank_with(1, (2,))], made.table)  # the first has none
    assert late.entries.keys() == made.whole.entries.keys()


def test_numbers_of_no_parameter_that_differ_are_not_read(made: Grid) -> None:
    """Those that are alike stay in the state."""
    ranks = [
        with_state(rank, optimizer={"members": [number], "beside": {"own": number, "same": 3}})
        for number, rank in enumerate(made.ranks)
    ]
    whole = merge(ranks, made.table)
    assert whole.state["optimizer"] == {"members": [0]}
    assert whole.states.numbers("beside") == {"same": 3}
    (unsupported,) = whole.states.of_form("unsupported")
    assert (unsupported.key, unsupported.parameters, unsupported.reason, unsupported.value) == (
        "own", (NO_PARAMETER,), BESIDE_STATE, "[0, 1]",
    )  # fmt: skip
    alone = [with_state(rank, optimizer={"beside": {"own": n}}) for n, rank in enumerate(ranks)]
    alone = [with_state(rank, client_state={"of": n}) for n, rank in enumerate(alone)]
    state = merge(alone, made.table).state
    assert (state["optimizer"], state["client_state"]) == ({}, {"of": 0})
    twice = [
        with_state(rank, optimizer={place: {"own": n} for place in REASONS})
        for n, rank in enumerate(ranks)
    ]
    assert len(merge(twice, made.table).states.rows) == len(REASONS) == 2


def test_no_optimizer_is_added(made: Grid) -> None:
    ranks = [replace(rank, state={"module": rank.state["module"]}) for rank in made.ranks]
    assert merge(ranks, made.table).state == {"module": made.whole.state["module"]}


def test_other_values_of_parameters_are_united() -> None:
    """Each stage has those of its own parameters."""
    ranks = [
        with_state(stage(name, 1.0), optimizer={"other": {f"{name}.0": {"step": None}}})
        for name in "01"
    ]
    names = [f"optimizer.other.{name}.0.step/state" for name in "01"]
    entries = [Entry(*key_of(name), "I32", (2,), Runs(())) for name in names]
    ranks = [replace(r, entries={e.key: e}) for r, e in zip(ranks, entries, strict=True)]
    whole = merge(ranks, STAGES)
    assert whole.states.other_values == {"0.0": {"step": None}, "1.0": {"step": None}}
    assert [*map(name_of, whole.entries)] == names


def test_a_copy_says_along_which_axis_it_is_one() -> None:
    """Of two stages that both have a tensor, on two tensor ranks: four copies in all."""
    ranks = [grid([Placed("b", (2,), None, [np.arange(2)] * 2)]).ranks for _ in range(2)]
    models = [merge(stages, STAGES) for stages in ranks]
    cuts = {"b": Sliced((2,), replicated((2,), 2), Replicated())}
    for table in (Table("tensor rank"), Table("tensor rank", cuts)):
        whole = merge(models, table)
        assert whole.entries["b", "param"].axis == ""
        assert [copy.axis for copy in whole.replicas] == ["tensor rank", "stage", "stage"]


def test_ranks_that_share_a_file(made: Grid) -> None:
    """What the one file says is said once; a tensor of its client state is of no rank alone."""
    state = {**made.ranks[0].state, "client_state": {"rng": TensorName("client_state.rng")}}
    record = Record(Extent("shared", 0, 4), 1)
    ranks = [r.replace(state=state, paths=("shared",), records=(record,)) for r in made.ranks]
    whole = merge(ranks, made.table)
    assert (whole.files.paths, whole.files.records, whole.notices.omitted) == (
        ("shared",),
        (record,),
        (),
    )
