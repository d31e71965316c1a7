"""Which tensors stand around an optimizer's state dict, and what is left without them."""

from __future__ import annotations

from typing import Any

import pytest

from zckpt.core.checkpoint.facts import FlatBufferEngine, StateDictEngine
from zckpt.core.checkpoint.inert import Scalar, TensorName
from zckpt.core.checkpoint.manifest import Manifest, Run
from zckpt.core.checkpoint.origin import Origin
from zckpt.core.checkpoint.wrapper import without_wrapped, wrapped

SLOW = TensorName("slow")
ONE = Scalar(1.0, "F32")


def manifest(client_state: Any, *optimizer: Any, model: tuple[Any, ...] = ("model",)) -> Manifest:
    """What a program of torch saved, with the optimizer's state dict under these keys."""
    engine = StateDictEngine(
        "torch", None, model, optimizer or None, None, None, None, guessed=False, adapter=False
    )
    state = {"client_state": client_state, "engine": {}}
    return Manifest("", "x", Run(Origin(), engine=engine), {}, {}, state=state)


@pytest.mark.parametrize(
    ("client_state", "optimizer"),
    [
        ({"optimizer": {"slow": SLOW}}, ("optimizer", "inner")),
        ({"run": {"Optim": {"slow": SLOW}}}, ("run", "Optim", "inner")),
        ({"optimizer": {"slow": SLOW, "base": {"k": 1}}}, ("optimizer", "base", "inner")),
        ({"optimizers": [None, {"slow": SLOW}]}, ("optimizers", 1, "inner")),
        ({"optimizers": [{"a": {}}, {"slow": SLOW}]}, ("optimizers", 1, "a", "inner")),
    ],
)
def test_tensors_stand_in_the_first_dictionary_of_an_optimizer(
    client_state: Any, optimizer: tuple[Any, ...]
) -> None:
    assert wrapped(manifest(client_state, *optimizer)) == {"around.slow": SLOW}


@pytest.mark.parametrize(
    ("client_state", "optimizer"),
    [
        ({"run": {"state": SLOW}}, ("run", "inner")),
        ({"optimizer": {"slow": SLOW}}, ("optimizer",)),
        ({"optimizer": {"slow": SLOW}}, ()),
        ({"slow": SLOW}, ("optimizer", "inner")),
        ({"optimizers": []}, ("optimizers", 0, "inner")),
        ({"optimizers": [[["slow", SLOW]]]}, ("optimizers", 0, "inner")),
        ({"optimizers": 7}, ("optimizers", 0, "inner")),
        (None, ("optimizer", "inner")),
    ],
)
def test_no_dictionary_of_an_optimizer_is_around_it(
    client_state: Any, optimizer: tuple[Any, ...]
) -> None:
    without = manifest(client_state, *optimizer)
    assert wrapped(without) == {}
    assert without_wrapped(without, ["around.slow"]) is without.state


@pytest.mark.parametrize(
    ("model", "found"),
    [(("optim_run", "model"), {}), (("optimizer", "model"), {"around.slow": SLOW})],
)
def test_what_has_the_model_too_is_the_programs(
    model: tuple[Any, ...], found: dict[str, Any]
) -> None:
    states = {"optim_run": {"slow": SLOW}}
    assert wrapped(manifest(states, "optim_run", "inner", model=model)) == found


def test_other_engines_have_nothing_around_an_optimizer() -> None:
    engine = FlatBufferEngine("flats", None, None, None, False, None, {})
    state = {"client_state": {"optimizer": {"slow": SLOW}}}
    assert wrapped(Manifest("", "x", Run(Origin(), engine=engine), {}, {}, state=state)) == {}


@pytest.mark.parametrize(
    ("key", "value", "is_shown"),
    [
        ("slow", [1, SLOW], True),
        ("slow", (ONE, 1), True),
        ("slow", {"a": 1, "b": {"c": SLOW}}, True),
        ("slow", ONE, True),
        (0, SLOW, True),
        ("slow", {"a": 1}, False),
        ("slow", [1, "a"], False),
        ("slow", 0.5, False),
        ("torch_rng_state", SLOW, False),
        ("RNG", [SLOW], False),
        ("string", SLOW, True),
    ],
)
def test_only_values_with_tensors_that_are_no_random_states(
    key: Any, value: Any, is_shown: bool
) -> None:
    found = wrapped(manifest({"optimizer": {key: value, "k": 5}}, "optimizer", "inner"))
    assert found == ({f"around.{key}": value} if is_shown else {})


@pytest.mark.parametrize(
    ("client_state", "optimizer", "rest"),
    [
        (
            {"optimizer": {"slow": SLOW, "k": 5}, "epoch": 1},
            ("optimizer", "inner"),
            {"optimizer": {"k": 5}, "epoch": 1},
        ),
        (
            {"optimizers": [{"slow": ONE}, {"slow": SLOW, "fast": SLOW}], "epoch": 1},
            ("optimizers", 1, "inner"),
            {"optimizers": [{"slow": ONE}, {"fast": SLOW}], "epoch": 1},
        ),
        (
            {"run": [[7, {"optimizers": [8, {"slow": SLOW}]}], 9]},
            ("run", 0, 1, "optimizers", 1, "inner"),
            {"run": [[7, {"optimizers": [8, {}]}], 9]},
        ),
    ],
)
def test_the_program_keeps_all_else(
    client_state: Any, optimizer: tuple[Any, ...], rest: Any
) -> None:
    left = without_wrapped(manifest(client_state, *optimizer), ["around.slow", "slow"])
    assert left == {"client_state": rest, "engine": {}}
