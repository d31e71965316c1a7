"""Which states an optimizer keeps, which of them a target lacks, and what is left without them."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from zckpt.core.checkpoint.entries import Entry, key_of
from zckpt.core.checkpoint.facts import FlatBufferEngine, StateDictEngine
from zckpt.core.checkpoint.inert import Scalar, TensorName
from zckpt.core.checkpoint.manifest import Manifest, Parameter, Run, Sibling, Sighting, StepPlace
from zckpt.core.checkpoint.optimizer_states import (
    AMONG,
    BESIDE,
    BY_RANK,
    OTHER,
    PARTITIONS,
    StateRow,
    States,
    states_in,
    unsupported,
)
from zckpt.core.checkpoint.origin import Origin
from zckpt.core.checkpoint.states import (
    BOUND,
    FACTORING,
    NO_PARAMETER,
    OF_NUMBERS,
    OF_VECTORS,
    OF_WRAPPER,
    Selection,
    State,
    as_unsupported,
    harmless,
    in_words,
    missing_in,
    of_numbers,
    of_vectors,
    require_known,
    states_of,
    tensors_in,
    untouched,
    with_frozen,
    with_updates,
    without,
)
from zckpt.core.storage.fragments import Runs
from zckpt.errors import MALFORMED, WrongOption

FLATS = FlatBufferEngine("flats", None, None, None, False, None, {})
DCP = Origin("dcp")


def manifest(*entries: str, state: Any = None, **fields: Any) -> Manifest:
    """Parameters `w` and `v`, and tensors of these names."""
    known = {key_of(name): Entry(*key_of(name), "F32", (2, 3), Runs([])) for name in entries}
    parameters = {name: Parameter((2, 3), group=0, step=1) for name in "wv"}
    state = state or {}
    states = fields.pop("states", states_in(state.get("optimizer") or {}))
    plain = Manifest("", "x", Run(), known, parameters, state=state, states=states)
    return plain.with_state(state).replace(**fields)


def other(**of: Any) -> dict[str, Any]:
    """The state of an optimizer that keeps these values, by parameter and key."""
    return {"optimizer": {OTHER: of, "scale": 1}}


def part(*parameters: str, **states: Any) -> dict[str, Any]:
    return {"parameters": list(parameters), "dp": 2, "states": states}


# -- which states


FORMS = {
    "exp_avg": State("exp_avg", {"w": (("w", "exp_avg"),), "v": (("v", "exp_avg"),)}, "slot"),
    "Odd-Key": State("Odd-Key", {"w": (("w", "esc__4fdd_2d_4bey"),)}, "slot"),
    "mu": State("mu", {"v": ()}, "number"),
    "list": State("list", {"w": (("a", "state"), ("b", "state"))}, "other"),
    "none": State("none", {"w": (), "v": ()}, "none"),
    "7": State("7", {"w": ()}, "other"),
    "kept": State("kept", {"w": (("p", "state"),), "v": ()}, "partition", BOUND),
    "lost": State("lost", {"v": ()}, "unsupported", "why"),
}


@pytest.fixture
def every() -> Manifest:
    """A state of each form, but of a wrapper."""
    a, b = TensorName("a"), TensorName("b")
    state = other(w={"list": [a, {"x": b}, a], "none": None, 7: "text"}, v={"none": None})
    state["optimizer"][PARTITIONS] = [part("w", "v", kept=[TensorName("p"), 1])]
    mu = StateRow("mu", "number", ("v",), Scalar(1.0, "F32"))
    entries = ("w/param", "w/master", "w/exp_avg", "v/exp_avg", "w/esc__4fdd_2d_4bey", "a/state")
    whole = manifest(*entries, state=state)
    return replace(
        whole,
        states=States((mu, *whole.states, StateRow("lost", "unsupported", ("v",), "", "why"))),
    )


def test_states_of_all_forms(every: Manifest) -> None:
    assert states_of(every) == FORMS


def test_a_state_of_several_forms_has_that_of_the_last(every: Manifest) -> None:
    """With the tensors of all, but None is of no form where others have one."""
    state = other(w={"exp_avg": [TensorName("x")], "mu": None, "none": 3}, v={"none": None})
    mixed = replace(every, states=States((every.states.rows[0], *manifest(state=state).states)))
    assert states_of(mixed) == {
        "exp_avg": State(
            "exp_avg", {"w": (("w", "exp_avg"), ("x", "state")), "v": (("v", "exp_avg"),)}, "other"
        ),
        "Odd-Key": FORMS["Odd-Key"],
        "mu": FORMS["mu"],
        "none": State("none", {"w": ()}, "other"),
    }
    late = manifest(state=other(w={"none": None}, v={"none": 3}))
    assert states_of(late) == {"none": State("none", {"v": ()}, "other")}


def test_states_around_the_optimizers_own() -> None:
    engine = StateDictEngine("p", None, ("m",), ("optimizer", "state"), *[None] * 3, False, False)
    around = {"slow": [TensorName("s")], "rng": TensorName("r"), "count": 3}
    whole = manifest(engine=engine, state={"client_state": {"optimizer": around}})
    own = {NO_PARAMETER: (("s", "state"),)}
    assert states_of(whole) == {"around.slow": State("around.slow", own, "wrapper", OF_WRAPPER)}
    assert states_of(whole)["around.slow"].count == 0
    assert states_of(without(whole, ["around.slow"])) == {}


def test_model_ranks_are_united() -> None:
    """What is None on some has the tensors of the others alone, and their form."""
    ranks = (
        manifest("w/a", "w/b", state=other(w={"none": None, "c": None}, v={"a": None})),
        manifest("w/a", state=other(v={"b": 1, "c": 2}, w={"none": None})),
    )
    for order in (ranks, ranks[::-1]):
        assert states_of(manifest(ranks=order)) == {
            "a": State("a", {"w": (("w", "a"),)}, "slot"),
            "b": State("b", {"w": (("w", "b"),), "v": ()}, "other"),
            "c": State("c", {"v": ()}, "other"),
            "none": State("none", {"w": ()}, "none"),
        }


def test_ranks_that_are_alike_have_the_states_of_one(every: Manifest) -> None:
    """Of any form; here of all but a wrapper, and of one."""
    assert states_of(manifest(ranks=(every, every))) == FORMS
    engine = StateDictEngine("p", None, ("m",), ("optimizer", "state"), *[None] * 3, False, False)
    around = manifest(
        engine=engine, state={"client_state": {"optimizer": {"slow": [TensorName("s")]}}}
    )
    assert {state.form for state in states_of(around).values()} == {"wrapper"}
    assert states_of(manifest(ranks=(around, around))) == states_of(around)


GOOD = part("w", k=[1, 2])


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (None, 0),
        ([GOOD, GOOD], 2),
        ((GOOD,), 1),
        ([part("w", k=(1, 2), l=[3, 4])], 2),
        ([part("w")], 0),
    ],
)
def test_what_is_a_partition(value: Any, count: int) -> None:
    assert len(states_in({PARTITIONS: value}).rows) == count


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((OTHER, value) for value in ([1], 3, {"w": 3}, {"w": [1]})),
        (PARTITIONS, {"k": GOOD}),
        (PARTITIONS, [3, GOOD]),
        (PARTITIONS, [part("w", k=[1])]),  # one rank of two
        (PARTITIONS, [part("w", k=[1, 2], l=[1])]),
        (PARTITIONS, [part("w", k=3)]),
        (PARTITIONS, [part("w", k=[1, 2], l=3)]),
        *((PARTITIONS, [{**GOOD, "states": value}]) for value in ([1, 2], {"k": 3})),
        *((PARTITIONS, [{**GOOD, "parameters": value}]) for value in ("w", [1], [[1]], [None])),
        *((PARTITIONS, [{**GOOD, "starts": value}]) for value in ("ab", [[1]], 3)),
        *((PARTITIONS, [{**GOOD, "stage": value}]) for value in ([], {}, "2")),
        *((PARTITIONS, [{**GOOD, "dp": value}]) for value in (None, "2", 3)),
        *((BESIDE, value) for value in (3, [1])),
        *((BY_RANK, value) for value in (3, {}, [1])),
    ],
)
def test_what_has_another_form_is_refused(key: str, value: Any) -> None:
    """The JSON of a manifest may state anything, and nothing is lost without a word."""
    with pytest.raises(MALFORMED):
        states_in({key: value})


def test_numbers_of_no_parameter() -> None:
    states = states_in({BESIDE: {"k": 1}, AMONG: {"l": 2}, OTHER: None})
    assert (states.numbers("beside"), states.numbers("among")) == ({"k": 1}, {"l": 2})


def test_tensors_are_named_once() -> None:
    a, b = TensorName("a"), TensorName("b")
    assert tensors_in({"x": [b, (a, {"y": b})], "z": 1}) == ["b", "a"]


# -- what may be lost


def test_parameters_that_were_never_updated() -> None:
    parameters = {
        "updated": Parameter((2,), step=1),
        "unused": Parameter((2,)),
        "frozen": Parameter((2,), trainable=False),
        "kept": Parameter((2,)),
    }
    whole = manifest("kept/exp_avg", parameters=parameters)
    assert untouched(with_updates(whole)) == ["unused"]
    assert untouched(with_updates(manifest(ranks=(whole,))).ranks[0]) == ["unused"]
    dropped = without(with_updates(whole), ["exp_avg"])  # it was updated all the same
    assert untouched(dropped) == ["unused"]
    counted = {**parameters, "updated": Parameter((2,))}
    uncounted = replace(whole, parameters=counted)
    assert untouched(with_updates(uncounted)) == []  # no step is counted at all


def test_states_that_are_no_loss() -> None:
    group = {"lr": 1.0, next(iter(FACTORING)): 1}
    assert harmless(State("k", form="none"), manifest()) == "it is None"
    rms, factored = State("RMS", form="number"), manifest(groups=({"lr": 1.0}, group))
    assert harmless(rms, factored) == "the optimizer computes it afresh"
    assert harmless(rms, manifest(groups=({"lr": 1.0},))) == harmless(rms, manifest()) == ""
    assert harmless(State("RMSE", form="number"), factored) == ""


def lost_of(source: Manifest, target: Manifest) -> dict[str, list[str]]:
    return {state.key: state.parameters for state in missing_in(source, target)}


def test_what_a_target_lacks() -> None:
    both, one, none = manifest("w/a", "v/a"), manifest("w/a"), manifest()
    assert lost_of(both, both) == lost_of(one, both) == {}
    assert lost_of(both, one) == {"a": ["v"]}
    assert lost_of(both, none) == {"a": ["w", "v"]}
    (state,) = missing_in(both, one)
    assert state.tensors == {"v": (("v", "a"),)}
    row = StateRow("a", "unsupported", ("w", "v"), "", "why")
    unknown = manifest(states=States((row,)))
    assert lost_of(both, unknown) == {"a": ["w", "v"]}


def test_a_parameter_of_another_name_in_the_target() -> None:
    """It has the state by its first name, or nobody has it there."""
    source = manifest("w/a")
    tied = manifest("head/a", parameters={"head": Parameter((2,), aliases=("w",))})
    assert lost_of(source, tied) == {}
    lacks = manifest("v/a", parameters={**tied.parameters, "v": Parameter((2,))})
    assert lost_of(source, lacks) == {"a": ["w"]}
    joined = manifest("all/a", parameters={"all": Parameter((4,))})
    assert lost_of(source, joined) == {}
    assert lost_of(source, replace(joined, entries={})) == {"a": ["w"]}


def test_model_ranks_are_looked_at_one_by_one() -> None:
    full, lacks = manifest("w/a", "v/a"), manifest("w/a")
    source, target = manifest(ranks=(full, full)), manifest(ranks=(full, lacks))
    assert lost_of(source, target) == {"a": ["v"]}
    other_names = manifest("u/a", parameters={"u": Parameter((2,))})
    assert lost_of(source, manifest(ranks=(full, other_names))) == {}
    assert lost_of(manifest("w/a"), manifest(ranks=(full,))) == {}
    two = manifest(ranks=(full, manifest("w/b")))
    assert lost_of(two, manifest(ranks=(full,))) == {"b": ["w"]}


def test_matrices_that_were_trained_as_vectors() -> None:
    """Adafactor of flat buffers keeps no rows and columns."""
    group = {next(iter(FACTORING)): 1}
    parameters = {
        "w": Parameter((2, 3), group=0),
        "v": Parameter((6,), group=0),
        "u": Parameter((2, 3), group=1),
        "frozen": Parameter((2, 3), trainable=False),
    }
    keys = ("exp_avg", "exp_avg_sq")
    flat = manifest(
        *(f"{name}/{key}" for name in parameters for key in keys),
        parameters=parameters,
        groups=(group, {"lr": 1.0}),
        engine=FLATS,
        origin=Origin(zero_stage=1),
        state=other(w={"k": 1}),
    )
    plain = manifest()
    found = of_vectors(flat, plain)
    assert [(s.key, s.tensors, s.reason) for s in found] == [
        ("exp_avg_sq", {"w": (("w", "exp_avg_sq"),)}, OF_VECTORS)
    ]
    assert of_vectors(flat, flat) == of_vectors(plain, plain) == []
    assert of_vectors(flat.replace(origin=Origin(zero_stage=0)), plain) == []
    assert of_vectors(flat.replace(engine=None), plain) == []
    assert of_vectors(replace(flat, groups=None), plain) == []
    stage_0 = flat.replace(origin=Origin(zero_stage=0))
    assert of_vectors(flat, stage_0) == found


def test_keys_that_were_numbers_or_texts() -> None:
    state = other(w={"doubt": {"1": 2}, "fine": {"x": 1}, "both": [{"x": 1}, {"2": 3}]})
    source = manifest(state=state, origin=DCP)
    found = of_numbers(source, manifest())
    assert [(s.key, s.reason) for s in found] == [("doubt", OF_NUMBERS), ("both", OF_NUMBERS)]
    assert of_numbers(source, source) == []
    assert of_numbers(source.replace(origin=Origin()), manifest()) == []


def test_parameters_that_the_optimizer_does_not_own() -> None:
    whole = manifest()
    changed = with_frozen(whole, {"w"}).parameters
    assert changed["w"] == Parameter((2, 3), trainable=False, step=1)
    assert changed["v"] == whole.parameters["v"]


# -- fewer states


def test_without_a_state(every: Manifest) -> None:
    """Of any form; what no state has is ignored."""
    for key in FORMS:
        less = without(every, [key, "no state"])
        rest = {name: own for name, own in FORMS.items() if name != key}
        assert states_of(less) == rest
        tensors = {name for names in FORMS[key].tensors.values() for name in names}
        assert less.entries.keys() == every.entries.keys() - tensors
        assert less.state["optimizer"]["scale"] == 1
    assert without(every, []) is every
    copies = replace(every, replicas=tuple(every.entries.values()))
    assert [copy.slot for copy in without(copies, ["exp_avg"]).replicas].count("exp_avg") == 0
    assert len(without(copies, ["exp_avg"]).replicas) == len(copies.replicas) - 2


def test_nothing_is_left_of_an_optimizer_without_states(every: Manifest) -> None:
    less = without(every, list(FORMS))
    assert less.state == {"optimizer": {"scale": 1}}
    assert without(manifest("w/a"), ["a"]).state == {}
    ranks = manifest(ranks=(manifest("w/a", "w/b"),))
    assert [*states_of(without(ranks, ["a"]))] == ["b"]


def test_a_state_that_nobody_has(every: Manifest) -> None:
    require_known([], [manifest()])
    require_known(["exp_avg", "7"], [manifest(), every])
    with pytest.raises(WrongOption, match="--drop-state x: the optimizer has no state") as caught:
        require_known(["exp_avg", "x"], [manifest(), every])
    assert (caught.value.hint or "").startswith("its states are exp_avg, ")
    with pytest.raises(WrongOption) as caught:
        require_known(["x"], [manifest()])
    assert caught.value.hint == "leave it out"


def test_a_selection_has_its_options() -> None:
    own = Selection("a b/*", drop_state=("x y", "z"))
    assert own.flags == ["--tensors 'a b/*'", "--drop-state 'x y'", "--drop-state z"]
    assert Selection(weights_only=True).flags == ["--weights-only"]
    assert Selection().flags == []
    with pytest.raises(WrongOption, match="does not apply"):
        Selection(weights_only=True, drop_state=("x",))


def test_weights_alone_are_compared_alone(every: Manifest) -> None:
    place = StepPlace("state", "F32")
    beside = (Sibling("x", "/x", 1),)
    every = every.replace(
        replicas=(every.entries["w", "param"], every.entries["w", "exp_avg"]),
        groups=({"lr": 1.0},),
        step_place=place,
        steps=(Sighting("x", 1, True),),
        siblings=beside,
        omitted_files=beside,
        buffers=("b",),
    )
    a, b = Selection(weights_only=True).of(every, manifest("w/a"))
    assert b.entries == {}
    assert [*a.entries] == [("w", "param"), ("w", "master")]
    assert [copy.name for copy in a.replicas] == ["w/param"]
    assert {*map(str, a.parameters.values())} == {str(Parameter((2, 3)))}
    assert (a.groups, a.run.step_place, a.state, a.run.steps, a.states) == (
        None,
        None,
        {},
        (),
        States(),
    )
    assert (a.files.siblings, a.files.omitted_files, a.buffers) == ((), (), ("b",))
    a, b = Selection(drop_state=("a",)).of(every, manifest("w/a"))
    assert (a.entries, b.entries) == (every.entries, {})


# -- states that are only compared


def test_states_that_no_form_keeps_are_listed(every: Manifest) -> None:
    copies = replace(every, replicas=(every.entries["a", "state"], every.entries["w", "exp_avg"]))
    whole = as_unsupported(copies, "why not")
    listed = whole.states.of_form("unsupported")
    assert [(item.key, item.parameters, item.reason) for item in listed] == [
        ("lost", ("v",), "why"),
        ("list", ("w",), "why not"),
        ("7", ("w",), "why not"),
        ("kept", ("w", "v"), "why not"),
    ]
    assert whole.state == {"optimizer": {"scale": 1}}
    assert [copy.name for copy in whole.replicas] == ["w/exp_avg"]
    assert ("a", "state") not in whole.entries
    assert [item.value for item in listed] == [
        "",
        "",
        '["text"]',
        "",
    ]  # b, p are missing
    plain = manifest("w/exp_avg")
    assert as_unsupported(plain, "why not") is plain


def test_states_are_listed_with_their_tensors() -> None:
    names = [TensorName("a"), TensorName("b")]
    whole = manifest("a/state", "b/state", state=other(w={"k": names[0]}, v={"k": names[1]}))
    (item,) = as_unsupported(whole, "why").states
    assert [entry.name for entry in item.tensors] == ["a/state", "b/state"]
    assert item.value
    only = manifest(state={"optimizer": {PARTITIONS: [part("w", k=[1, 2])]}})
    (item,) = as_unsupported(only, "why").states
    assert (item.key, item.value) == ("k", "[[1, 2]]")


def test_the_order_of_keys_is_no_difference() -> None:
    one, two = (
        unsupported(1, ("w",), "why", value, ()) for value in ({"a": 1, "b": 2}, {"b": 2, "a": 1})
    )
    assert one == two
    assert one.key == "1"


def test_other_names_of_parameters(every: Manifest) -> None:
    """Tensors in a state are named by their place."""
    own, alien = TensorName("optimizer.other.w.k"), TensorName("elsewhere")
    state = other(w={"k": [own, alien, 1]}, v={"k": 2})
    state["optimizer"][PARTITIONS] = [part("w", "v", k=[1, 2])]
    states, tensors = manifest(state=state).states.renamed({"w": "new"})
    assert [*states.other_values] == ["new", "v"]
    assert states.other_values["new"]["k"] == [TensorName("optimizer.other.new.k"), alien, 1]
    assert tensors == {"optimizer.other.w.k": "optimizer.other.new.k"}
    assert [row.parameters for row in states.of_form("partition")] == [("new", "v")]
    assert States().renamed({"w": "new"}) == (States(), {})


def test_states_in_a_sentence() -> None:
    of = dict.fromkeys("abcdef", ())
    states = [State("k", of), State("l", of), State("m", {"w": ()})]
    assert in_words(states) == "k and l of a, b, c, d and 2 more; m of w"
    assert in_words([]) == ""
