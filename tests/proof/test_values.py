"""What two checkpoints say that is no tensor."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from zckpt.core.checkpoint.entries import Entry, key_of
from zckpt.core.checkpoint.facts import (
    Engine,
    ExpertLayer,
    FlatBufferEngine,
    NamedWeightsEngine,
    StepPlace,
)
from zckpt.core.checkpoint.inert import Scalar
from zckpt.core.checkpoint.manifest import Manifest, Parameter, Run
from zckpt.core.checkpoint.optimizer_states import StateRow, States, of_parameters
from zckpt.core.checkpoint.states import FACTORING, with_updates
from zckpt.core.storage.fragments import Runs
from zckpt.formats.statedict.keys import keys_of
from zckpt.proof import values

from ..conftest import texts

NAN = float("nan")
EPS = {"eps": 2.0}


def manifest(**fields: object) -> Manifest:
    plain = Manifest(
        "", "x", Run(), {}, {"w": Parameter((2,), group=0, step=7), "v": Parameter((2,))}
    )
    return plain.replace(**fields)  # type: ignore[arg-type]


def test_steps_that_both_tell() -> None:
    other = manifest(parameters={"w": Parameter((2,), group=0, step=8), "v": Parameter((2,))})
    assert values.steps(manifest(), manifest()) == []
    assert values.steps(manifest(), other) == [{"parameter": "w", "parameters": 1, "a": 7, "b": 8}]
    silent = manifest(parameters={"w": Parameter((2,), group=0)})
    assert values.steps(manifest(), silent) == []
    assert values.steps(silent, manifest()) == []


def test_a_step_that_one_parameter_of_several_lacks() -> None:
    late = manifest(parameters={"w": Parameter((2,), step=7), "v": Parameter((2,), step=7)})
    (line,) = values.steps(late, manifest())
    assert line == {"parameter": "v", "parameters": 1, "a": 7, "b": None}
    (line,) = values.steps(manifest(), late)
    assert line == {"parameter": "v", "parameters": 1, "a": None, "b": 7}
    later = manifest(parameters={"w": Parameter((2,), step=9), "v": Parameter((2,), step=9)})
    (line,) = values.steps(late, later)
    assert line == {"parameter": "w", "parameters": 2, "a": 7, "b": 9}


def test_a_parameter_by_its_other_name() -> None:
    other = manifest(parameters={"head": Parameter((2,), group=0, step=9, aliases=("w",))})
    assert values.steps(manifest(), other)[0]["b"] == 9
    tied = manifest(parameters={"w": Parameter((2,), group=0, step=7, aliases=("head",))})
    alone = manifest(parameters={"head": Parameter((2,), group=0, step=9)})
    assert values.steps(tied, alone)[0]["b"] == 9


def numbers(**of: dict[str, Scalar]) -> States:
    return States(tuple(of_parameters("number", of)))


def test_scalars() -> None:
    manifests = [
        manifest(
            parameters={"w": Parameter((2,))},
            states=numbers(w={"mu_product": Scalar(value, "F32")}),
        )
        for value in (0.5, 0.25)
    ]
    assert values.scalars(manifests[0], manifests[0]) == []
    (line,) = values.scalars(*manifests)
    assert line == {"parameter": "w", "scalar": "mu_product", "a": 0.5, "b": 0.25}


def test_a_scalar_that_one_parameter_of_several_lacks() -> None:
    both, one = (
        manifest(
            parameters={name: Parameter((2,)) for name, _ in items}, states=numbers(**dict(items))
        )
        for known in ({"mu": Scalar(3, "F32")},)
        for items in ([("w", known), ("v", known)], [("w", known), ("v", {})])
    )
    assert values.scalars(both, one) == [{"parameter": "v", "scalar": "mu", "a": 3, "b": None}]
    assert values.scalars(one, both) == [{"parameter": "v", "scalar": "mu", "a": None, "b": 3}]


def test_scalars_of_a_parameter_are_in_the_order_of_their_names() -> None:
    names = [f"beta{number}" for number in range(9)]
    sides = (
        manifest(
            parameters={"w": Parameter((2,))},
            states=numbers(w=dict.fromkeys(names, Scalar(n, "F32"))),
        )
        for n in (1, 2)
    )
    assert [line["scalar"] for line in values.scalars(*sides)] == names


def test_a_scalar_that_one_side_has_of_no_parameter() -> None:
    own = manifest(parameters={"w": Parameter((2,))}, states=numbers(w={"mu": Scalar(3, "F32")}))
    assert values.scalars(own, manifest()) == []
    assert values.scalars(manifest(), own) == []


def test_what_one_side_trains() -> None:
    frozen = manifest(parameters={"w": Parameter((2,), trainable=False), "v": Parameter((2,))})
    assert values.trainable(manifest(), manifest()) == []
    assert values.trainable(manifest(), frozen) == [
        {"group": None, "key": "trainable of w", "a": True, "b": False}
    ]


@pytest.mark.parametrize("swapped", [False, True])
def test_untouched_parameters_are_frozen_where_the_other_side_has_them_so(swapped: bool) -> None:
    """A state dict does not say of a parameter without a state whether it is frozen."""
    trained = {"w": Parameter((2,), group=0, step=7)}
    plain = manifest(
        parameters={**trained, "v": Parameter((2,), group=0), "u": Parameter((2,), group=0)},
        engine=keys_of(None),
    )
    plain = with_updates(plain)
    frozen = Parameter((2,), trainable=False)
    flats = with_updates(
        manifest(parameters={**trained, "v": frozen, "u": Parameter((2,), group=0)})
    )
    a, b = values.with_trained_alike(*((flats, plain) if swapped else (plain, flats)))
    assert a.parameters == b.parameters == flats.parameters
    assert values.with_trained_alike(plain, plain) == (plain, plain)
    says = plain.replace(engine=FLATS)  # this engine would have frozen it
    assert values.with_trained_alike(says, flats) == (says, flats)


@pytest.mark.parametrize(
    ("other", "kinds"),
    [
        (Scalar(3, "I64"), ["F32", "I64", [], []]),
        (Scalar(3, "int"), ["F32", "int", [], []]),
        (Scalar(3, "F32", (1,)), ["F32", "F32", [], [1]]),
    ],
)
def test_scalars_of_another_kind(other: Scalar, kinds: list[object]) -> None:
    sides = [
        manifest(parameters={"w": Parameter((2,))}, states=numbers(w={"count": scalar}))
        for scalar in (Scalar(3, "F32"), other)
    ]
    keys = ("a_type", "b_type", "a_shape", "b_shape")
    assert values.scalars(*sides) == [
        {"parameter": "w", "scalar": "count", "a": 3, "b": 3, **dict(zip(keys, kinds, strict=True))}
    ]


def test_weights_that_were_left_out() -> None:
    omitted, kept, silent = (
        manifest(engine=FlatBufferEngine("flats", None, None, None, False, excludes, {}))
        for excludes in (True, False, None)
    )
    (line,) = values.forms(omitted, kept)
    assert line["key"] == "frozen_param_fragments"
    assert "None" in line["a"]
    assert "all" in line["b"]
    assert values.forms(omitted, omitted) == values.forms(kept, silent) == []
    assert values.forms(manifest(), omitted) == []


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ({"lr": 1.0, "betas": (0.9, 0.95)}, {"lr": 1.0, "betas": [0.9, 0.95], "fused": None}, []),
        ({"lr": 1.0}, {"lr": 1.0, "fused": True}, []),
        ({"lr": 1.0}, {"lr": 2.0}, [{"group": 0, "key": "lr", "a": 1.0, "b": 2.0}]),
        ({"lr": Scalar(1.0, "F32")}, {"lr": 1.0}, []),
        ({"lr": NAN}, {"lr": NAN}, []),
        ({"lr": NAN}, {"lr": 1.0}, [{"group": 0, "key": "lr", "a": {"$float": "nan"}, "b": 1.0}]),
        ({"a": (1, 2)}, {"a": [1, 2]}, []),
        ({"a": [1, 2]}, {"a": (1, 3)}, [{"group": 0, "key": "a", "a": [1, 2], "b": [1, 3]}]),
        ({"a": [1]}, {"a": [1, 2]}, [{"group": 0, "key": "a", "a": [1], "b": [1, 2]}]),
        ({"a": [1]}, {"a": 1}, [{"group": 0, "key": "a", "a": [1], "b": 1}]),
        ({"a": 1}, {"a": [1]}, [{"group": 0, "key": "a", "a": 1, "b": [1]}]),
        ({"a": {1: 2, 3: 4}}, {"a": {3: 4, 1: 2}}, []),
        ({"a": [{1: 2, 3: 4}]}, {"a": [{3: 4, 1: 2}]}, []),
    ],
)
def test_groups(ours: dict[str, object], theirs: dict[str, object], expected: object) -> None:
    lines = values.groups(manifest(groups=(ours,)), manifest(groups=(theirs,)))
    assert lines == expected


def test_groups_of_other_number_and_members() -> None:
    a = manifest(groups=({"lr": 1.0},))
    b = manifest(
        groups=({"lr": 1.0}, {"lr": 1.0}), parameters={"w": Parameter((2,), group=1, step=7)}
    )
    sides = {line["key"]: (line["a"], line["b"]) for line in values.groups(a, b)}
    assert sides == {"groups": (1, 2), "group of w": (0, 1)}
    assert values.groups(manifest(), b) == values.groups(b, manifest()) == []


def test_a_hyper_parameter_that_one_group_of_several_lacks() -> None:
    full, lacks = (manifest(groups=({"lr": 1.0, "eps": 1.0}, group)) for group in (EPS, {}))
    assert values.groups(full, lacks) == [{"group": 1, "key": "eps", "a": 2.0, "b": None}]
    assert values.groups(lacks, full) == [{"group": 1, "key": "eps", "a": None, "b": 2.0}]


def spread(ep: int, *groups: dict[str, object], **of: int | None) -> Manifest:
    """A model whose experts are spread over `ep` ranks; `of` has the group of each parameter."""
    layer = ExpertLayer("moe", 4, ep)
    engine = FlatBufferEngine("flats", None, None, None, False, None, {}, experts=(layer,))
    parameters = {name: Parameter((2,), group=group) for name, group in of.items()}
    return manifest(engine=engine, groups=groups, parameters=parameters)


PLAIN = {"lr": 1.0, "name": "dense"}


def experts(ep: int, lr: float = 0.5, **more: object) -> dict[str, object]:
    return {"lr": lr, "moe": True, "name": f"ep_size_{ep}", **more}


def test_groups_of_experts_over_other_ranks() -> None:
    """They have other names, and a group of one side may be cut into several on the other."""
    one = spread(2, PLAIN, experts(2), w=0, v=0, e=1, f=1)
    two = spread(1, PLAIN, experts(1), experts(1), w=0, v=0, e=1, f=2)
    assert values.groups(one, two) == values.groups(two, one) == []
    silent = spread(1, PLAIN, w=0, v=None)
    assert values.groups(one, silent) == values.groups(silent, one) == []


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (
            spread(1, PLAIN, experts(1, 0.25), w=0, v=0, e=1, f=1),
            [{"group": 1, "key": "lr", "a": 0.5, "b": 0.25}],
        ),
        (
            spread(1, {"lr": 2.0, "name": "other"}, experts(1), w=0, v=0, e=1, f=1),
            [
                {"group": 0, "key": "lr", "a": 1.0, "b": 2.0},
                {"group": 0, "key": "name", "a": "dense", "b": "other"},
            ],
        ),
        (
            spread(1, PLAIN, PLAIN, experts(1), w=0, v=1, e=2, f=2),
            [{"group": None, "key": "group of v", "a": 0, "b": 1}],
        ),
        (  # experts among the others
            spread(1, PLAIN, experts(1), w=0, v=0, e=1, f=0),
            [
                {"group": None, "key": "group of f", "a": 1, "b": 0},
                {"group": 1, "key": "lr", "a": 0.5, "b": 1.0},
                {"group": 1, "key": "name", "a": "ep_size_2", "b": "dense"},
            ],
        ),
    ],
)
def test_groups_of_experts_that_differ(other: Manifest, expected: object) -> None:
    one = spread(2, PLAIN, experts(2), w=0, v=0, e=1, f=1)
    assert sorted(values.groups(one, other), key=str) == sorted(expected, key=str)  # type: ignore[call-overload]
    swapped = values.groups(other, one)
    assert {line["key"] for line in swapped} == {line["key"] for line in values.groups(one, other)}


def test_two_groups_that_are_one_on_the_other_side() -> None:
    apart = spread(2, PLAIN, PLAIN, w=0, v=1)
    together = spread(1, PLAIN, w=0, v=0)
    assert [line["key"] for line in values.groups(apart, together)] == ["group of v"]
    assert [line["key"] for line in values.groups(together, apart)] == ["group of v"]


FLATS = FlatBufferEngine("flats", None, None, None, False, None, {})
STATE_DICTS = keys_of(None)
GRAPH = NamedWeightsEngine("graph", None, None, None, None)
IN_GROUP, IN_STATE = StepPlace("group", "int"), StepPlace("state", "F32")


def placed(place: StepPlace | None, engine: Engine = FLATS, name: str | None = None) -> Manifest:
    return manifest(engine=engine, step_place=place, optimizer=name)


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (placed(IN_STATE), placed(IN_GROUP), ("state, F32", "group, int")),
        (placed(IN_GROUP, STATE_DICTS), placed(IN_STATE), ("group, int", "state, F32")),
        # None is where torch's own look, if a program of torch has saved
        (placed(None, STATE_DICTS), placed(IN_GROUP), ("state, F32", "group, int")),
        (
            placed(IN_STATE, name="Adam"),
            placed(IN_GROUP, name="Adam"),
            ("state, F32", "group, int"),
        ),
        # nothing names the class, so nothing says that it takes another type
        (placed(IN_STATE), placed(StepPlace("state", "int")), ("state, F32", "state, int")),
    ],
)
def test_another_place_of_the_step_is_a_difference(
    a: Manifest, b: Manifest, said: tuple[str, str]
) -> None:
    assert values.step_places(a, b) == ([{"a": said[0], "b": said[1]}], [])
    assert values.step_places(a, a) == values.step_places(b, b) == ([], [])


@pytest.mark.parametrize("place", [IN_STATE, StepPlace("state", "int", stale=0)])
def test_a_named_optimizer_may_look_elsewhere(place: StepPlace) -> None:
    named = replace(place, optimizer="AdamW")
    for sides in ((placed(IN_GROUP), placed(named)), (placed(named), placed(IN_GROUP))):
        lines, (note,) = values.step_places(*sides)
        assert lines == []
        assert "group, int" in note.message
        assert "where AdamW looks for it" in note.message


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (placed(IN_GROUP), placed(None)),  # an engine whose files show no place
        (placed(IN_GROUP, GRAPH), placed(IN_STATE)),  # an engine that has its own optimizers
        # each engine's class takes its own type
        (placed(IN_STATE, name="Adam"), placed(StepPlace("state", "int"), name="Adam")),
        # a side that names none does not say that its type is another optimizer's
        (placed(IN_STATE), placed(StepPlace("state", "int"), name="Adam")),
        (placed(IN_STATE, name="Adam"), placed(StepPlace("state", "int"))),
        (placed(IN_GROUP), replace(placed(IN_STATE), parameters={"w": Parameter((2,))})),
    ],
)
def test_places_that_say_nothing(a: Manifest, b: Manifest) -> None:
    assert values.step_places(a, b) == ([], [])


# -- what one side has


def with_groups(engine: Engine, *groups: dict[str, object], **of: int | None) -> Manifest:
    parameters = {name: Parameter((2,), group=group) for name, group in of.items()}
    return manifest(engine=engine, groups=groups, parameters=parameters, root=engine.name)


EMPTY, FIRST, LAST = {"lr": 9.0}, {"lr": 1.0}, {"lr": 2.0}


@pytest.mark.parametrize("swapped", [False, True])
def test_groups_without_parameters_that_an_engine_removes(swapped: bool) -> None:
    plain = with_groups(STATE_DICTS, EMPTY, FIRST, EMPTY, LAST, v=3, w=1, frozen=None)
    flats = with_groups(FLATS, FIRST, LAST, v=1, w=0, frozen=None)
    a, b, notes = values.without_empty_groups(*((flats, plain) if swapped else (plain, flats)))
    assert a.groups == b.groups == (FIRST, LAST)
    assert a.parameters == b.parameters == flats.parameters
    assert (a.root, b.root) == ((flats.root, plain.root) if swapped else (plain.root, flats.root))
    assert texts(notes) == [
        "hyper-parameters of the optimizer's group 0 and 2, which has no parameters: only in "
        f"{plain.root}"
    ]


def test_groups_of_many_keep_their_order() -> None:
    """Here the second and the ninth have parameters."""
    groups = [EMPTY, FIRST, *[EMPTY] * 6, LAST]
    plain = with_groups(STATE_DICTS, *groups, v=8, w=1)
    flats = with_groups(FLATS, FIRST, LAST, v=1, w=0)
    a, b, _ = values.without_empty_groups(plain, flats)
    assert a.groups == b.groups == (FIRST, LAST)
    assert a.parameters == b.parameters == flats.parameters


def test_flat_keys_stand_below_parameters() -> None:
    plain = with_groups(STATE_DICTS, EMPTY, FIRST, w=1)
    flat = with_groups(replace(STATE_DICTS, layout="flat"), FIRST, w=0)
    a, b, notes = values.without_empty_groups(plain, flat)
    assert a.groups == b.groups == (FIRST,)
    assert len(notes) == 1


def test_groups_that_are_left_as_they_are() -> None:
    """Where both engines keep empty groups, or both remove them, or none is empty."""
    plain = with_groups(STATE_DICTS, EMPTY, FIRST, w=1)
    flats = with_groups(FLATS, FIRST, w=0)
    for pair in (
        (plain, with_groups(STATE_DICTS, FIRST, w=0)),
        (flats, with_groups(FLATS, FIRST, EMPTY, w=0)),
        (plain, with_groups(FLATS, FIRST, EMPTY, w=0)),
        (plain, replace(flats, groups=None)),
        (replace(plain, groups=None), flats),
    ):
        assert values.without_empty_groups(*pair) == (*pair, [])


def test_hyper_parameters_of_one_side() -> None:
    """Those of any group. The optimizers of another engine have others by nature."""
    a = with_groups(FLATS, {"lr": 1.0, "b": 2, "a": 1}, {"lr": 1.0, "both": 1}, w=0)
    b = with_groups(FLATS, {"lr": 1.0, "both": 2}, w=0)
    b = replace(b, root="b")
    said = [f"a, b of the optimizer's groups: only in {a.root}"]
    assert values.hypers_of_one_side(a, b) == values.hypers_of_one_side(b, a)
    assert texts(values.hypers_of_one_side(a, b)) == said
    assert values.hypers_of_one_side(a, a) == []
    assert values.hypers_of_one_side(a, replace(b, groups=None)) == []
    assert values.hypers_of_one_side(replace(a, groups=None), b) == []
    other = b.replace(engine=STATE_DICTS)
    assert texts(values.hypers_of_one_side(a, other)) == said
    for pair in (
        (replace(a, optimizer="Adam"), other),
        (a, replace(other, optimizer="Adam")),
    ):
        assert values.hypers_of_one_side(*pair) == []
    assert texts(values.hypers_of_one_side(replace(a, optimizer="Adam"), b)) == said


def moments(*names: str, step: int | None = None, **fields: object) -> Manifest:
    """Parameters `w` and `v`, of which some have a moment."""
    entries = {
        key_of(key): Entry(*key_of(key), "F32", (2,), Runs([]))
        for name in names
        for key in [f"{name}/exp_avg"]
    }
    parameters = {name: Parameter((2,), step=step) for name in ("w", "v")}
    return manifest(entries=entries, parameters=parameters, **fields)


def test_states_that_one_side_lacks() -> None:
    both, one, none = moments("w", "v"), moments("w"), moments()
    assert values.missing_states(both, both, ()) == ([], [])
    line = {"state": "exp_avg", "only": "a", "parameters": 1, "parameter": "v", "tensors": 1}
    assert values.missing_states(both, one, ()) == ([line], [])
    assert values.missing_states(one, both, ()) == ([{**line, "only": "b"}], [])
    of_all = {**line, "parameters": 2, "parameter": "w", "tensors": 2}
    assert values.missing_states(both, none, ()) == ([of_all], [])


def test_states_whose_tensors_are_listed_one_by_one() -> None:
    both, none = moments("w", "v"), moments()
    assert values.missing_states(both, none, ("w/exp_avg", "v/exp_avg")) == ([], [])
    (line,), _ = values.missing_states(both, none, ("w/exp_avg",))
    assert (line["parameter"], line["tensors"]) == ("v", 1)


def test_a_step_that_one_side_has_of_no_parameter() -> None:
    (line,), _ = values.missing_states(moments(step=3), moments(), ())
    assert (line["state"], line["only"], line["parameters"]) == ("step", "a", 2)
    assert values.missing_states(moments(step=3), moments(step=4), ()) == ([], [])


def test_states_that_were_not_read_say_why() -> None:
    unsupported = StateRow(
        "shards", "unsupported", ("w",), "", "a kind of tensor that zckpt does not read"
    )
    (line,), _ = values.missing_states(manifest(states=States((unsupported,))), manifest(), ())
    assert (line["state"], line["reason"]) == ("shards", unsupported.reason)


def test_a_state_that_is_computed_afresh_is_a_note() -> None:
    own = {name: Parameter((2,)) for name in ("w", "v")}
    states = numbers(**{name: {"RMS": Scalar(1.0, "F32")} for name in own})
    a = manifest(parameters=own, states=states, groups=({next(iter(FACTORING)): True},), root="a")
    b = manifest(groups=a.groups, parameters=moments().parameters)
    said = "RMS of 2 parameters: only in a; the optimizer computes it afresh"
    lines, notes = values.missing_states(a, b, ())
    assert (lines, texts(notes)) == ([], [said])
    assert values.missing_states(b, a, ()) == (lines, notes)
    lines, notes = values.missing_states(replace(a, groups=()), b, ())
    assert ([line["state"] for line in lines], notes) == (["RMS"], [])
