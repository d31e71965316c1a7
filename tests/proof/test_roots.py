"""Of several models that were proven, one is compared as if it were alone."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from zckpt.core.checkpoint.entries import Entry, Key, key_of
from zckpt.core.checkpoint.inert import TensorName, inside
from zckpt.core.checkpoint.manifest import Manifest, Parameter, Run
from zckpt.core.checkpoint.optimizer_states import OF_OTHERS, StateRow, States
from zckpt.core.checkpoint.origin import Origin
from zckpt.core.checkpoint.states import NO_PARAMETER
from zckpt.core.storage.fragments import Runs
from zckpt.errors import AmbiguousCheckpoint, WrongOption
from zckpt.proof.roots import of_root, refuse_several


def entries(*names: str) -> dict[Key, Entry]:
    return {key_of(name): Entry(*key_of(name), "F32", (2,), Runs([])) for name in names}


def alone(**more: Any) -> Manifest:
    """The actor, as a checkpoint of its own has it."""
    fields: dict[str, Any] = {
        "parameters": {"w": Parameter((2,), group=0, aliases=("tied",)), "v": Parameter((3,))},
        "optimizer": "AdamW",
        **more,
    }
    return Manifest("own", "x", Run(), entries("w/param", "v/param"), {}).replace(**fields)


@pytest.fixture
def proven() -> Manifest:
    """An actor, whose groups are the second and the third, and a critic."""
    parameters = {
        "critic.w": Parameter((2,), group=0),
        "actor.w": Parameter((2,), group=2, aliases=("actor.tied",)),
        "actor.v": Parameter((3,), group=1),
        "actor.frozen": Parameter((4,), trainable=False),
    }
    state = {
        "module": ["critic.w", "actor.w", "actor.v"],
        "module_extra": {"actor.extra": 1, "critic.extra": 2},
        "optimizer": {"scale": 4},
        "random": "of all",
        "client_state": {"other": {"critic.w": 5}},
    }
    return Manifest(
        "proof",
        "x",
        Run(Origin.of_json({"format": "y"})),
        entries("critic.w/param", "actor.w/param", "actor.w/exp_avg", "actor.b/param", "rng/state"),
        parameters,
        buffers=("critic.b", "actor.b"),
        groups=({"lr": 0.0}, {"lr": 1.0}, {"lr": 2.0}),
        optimizer="SGD, AdamW",
        state=state,
        states=States(
            (
                StateRow("k", "other", ("actor.w",), 1),
                StateRow("k", "other", ("critic.w",), 2),
                StateRow("a", "unsupported", ("actor.w",), "", "of the actor"),
                StateRow("b", "unsupported", ("actor.w", "critic.w"), "", "of both"),
                StateRow("c", "unsupported", (NO_PARAMETER,), "", "of none"),
            )
        ),
    )


def test_the_chosen_model_stands_alone(proven: Manifest) -> None:
    own = of_root(proven, "actor", alone())
    assert own.source == {"format": "y", "root": "actor"}
    assert [*own.entries] == [("w", "param"), ("w", "exp_avg"), ("b", "param"), ("rng", "state")]
    assert all(key == entry.key for key, entry in own.entries.items())
    assert own.parameters == {
        "w": Parameter((2,), group=1, aliases=("tied",)),
        "v": Parameter((3,), group=0),
        "frozen": Parameter((4,), trainable=False),
    }
    assert (own.buffers, own.groups) == (("b",), ({"lr": 1.0}, {"lr": 2.0}))
    assert own.state == {
        "module": ["w", "v"],
        "module_extra": {"extra": 1},
        "optimizer": {"scale": 4},
        "random": "of all",
        "client_state": {"other": {"critic.w": 5}},  # the program's own
    }
    assert [(item.key, item.parameters) for item in own.states] == [
        ("k", ("w",)),
        ("a", ("w",)),
        ("c", (NO_PARAMETER,)),
    ]


def test_groups_of_many_keep_their_order(proven: Manifest) -> None:
    """Here the second and the ninth are of the chosen model."""
    groups = tuple({"lr": float(number)} for number in range(9))
    parameters = {"actor.w": Parameter((2,), group=8), "actor.v": Parameter((3,), group=1)}
    own = of_root(replace(proven, groups=groups, parameters=parameters), "actor", alone())
    assert own.groups == ({"lr": 1.0}, {"lr": 8.0})
    assert {name: each.group for name, each in own.parameters.items()} == {"w": 1, "v": 0}


def test_weights_alone_may_state_groups_of_parameters(proven: Manifest) -> None:
    """Without the hyper-parameters of any group."""
    own = of_root(replace(proven, groups=None), "actor", alone())
    assert own.groups is None
    assert {name: each.group for name, each in own.parameters.items()} == {
        "w": 1,
        "v": 0,
        "frozen": None,
    }


def test_the_optimizer_is_that_of_the_model_if_several_are_named(proven: Manifest) -> None:
    assert of_root(proven, "actor", alone()).optimizer == "AdamW"
    only = replace(proven, optimizer="SGD")
    assert of_root(only, "actor", alone()).optimizer == "SGD"
    none = replace(proven, optimizer=None, groups=None, state={"optimizer": {"scale": 4}})
    own = of_root(replace(none, parameters={"actor.w": Parameter((2,))}), "actor", alone())
    assert (own.optimizer, own.groups, own.state) == (None, None, {"optimizer": {"scale": 4}})
    assert of_root(replace(proven, state={"optimizer": None}), "actor", alone()).state == {
        "optimizer": None
    }


def test_a_proof_of_the_chosen_model_alone_is_compared_as_it_is() -> None:
    own, chosen = alone(), alone().replace(origin=Origin(root="actor"))
    assert of_root(own, "actor", chosen) is own
    with pytest.raises(WrongOption, match="has a model that is called critic"):
        of_root(own, "critic", chosen)


def test_one_of_several_models_must_be_chosen(proven: Manifest) -> None:
    """Those are named that have the parameters of the checkpoint, in their shapes."""
    both = {"w": Parameter((2,))}
    with pytest.raises(AmbiguousCheckpoint, match="may be any of these: critic, actor") as caught:
        refuse_several(proven, alone(parameters=both))
    assert caught.value.hint == "choose one with --root critic or --root actor"
    with pytest.raises(AmbiguousCheckpoint, match=r"may be any of these: actor$"):
        refuse_several(proven, alone())
    refuse_several(proven, alone(parameters={"w": Parameter((9,))}))
    refuse_several(proven, alone(parameters={}))
    refuse_several(alone(), alone(parameters={"w": Parameter((9,))}))
    with_part = alone(parameters={"w": Parameter((2,)), "part.w": Parameter((2,))})
    refuse_several(with_part, alone(parameters=both))  # one model, a part of which looks like it


def test_tensors_in_states_have_the_model_s_own_names(proven: Manifest) -> None:
    """So that they are compared; those of another model are left out."""
    tensors = {name: f"{inside(OF_OTHERS, name)}.row" for name in ("actor.w", "critic.w")}
    rows = [
        StateRow("row", "other", (name,), TensorName(tensor)) for name, tensor in tensors.items()
    ]
    states = entries(*(f"{tensor}/state" for tensor in tensors.values()))
    own = of_root(
        replace(proven, states=States(tuple(rows)), entries={**proven.entries, **states}),
        "actor",
        alone(),
    )
    name = f"{inside(OF_OTHERS, 'w')}.row"
    assert own.states == States((StateRow("row", "other", ("w",), TensorName(name)),))
    of_states = [key for key in own.entries if key[1] == "state"]
    assert of_states == [("rng", "state"), (name, "state")]
