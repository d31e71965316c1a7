"""Which tensor is which, by the keys of state dicts: the rule that proves the reader."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest

from zckpt.core.checkpoint.entries import name_of
from zckpt.core.ranks.partition import Joined, Nameless, Partition, Whole
from zckpt.core.storage.fragments import Extent
from zckpt.formats.statedict.gather import partitions

from ...conftest import ROOT
from ...test_house import imports, modules


def tensor(*shape: int) -> Whole:
    return Whole(("", ""), "F32", shape, Extent("a", 0, 4 * prod(shape)))


def names(parts: list[Partition]) -> list[str]:
    """The name of every part; of a nameless one its slot in brackets."""
    return [
        f"({part.slot})" if isinstance(part, Nameless) else name_of(part.key)
        for part in parts
        if isinstance(part, (Nameless, Joined, Whole))
    ]


MODEL = {"a.b": tensor(3), "a.b.c": tensor(2, 2), "one": tensor(1), "mean": tensor(7)}
STATES: dict[str, dict[str, Any]] = {
    "a.b": {"step": tensor(), "m": tensor(3), "rows": tensor(2), "mu": tensor()},
    "a.b.c": {"step": tensor(), "m": tensor(2, 2), "mu": tensor()},
    "one": {"step": tensor(1), "m": tensor(1), "mu": tensor(1)},
}
WEIGHTS = ["a.b/param", "a.b.c/param", "one/param", "mean/param"]
TRAINED = [*WEIGHTS, "a.b/m", "a.b.c/m", "one/m"]
UNNAMED = [*WEIGHTS, "(m)", "(rows)", "(mu)", "(m)", "(mu)", "(m)", "(mu)"]
NUMBERED = dict(enumerate(STATES.values()))
AS_TEXT = {str(number): state for number, state in NUMBERED.items()}


def optimizer(state: Any, params: Any, **group: Any) -> dict[str, Any]:
    return {"state": state, "param_groups": [{"params": params, **group}]}


FLAT = {f"state.{n}.{key}": value for n, state in STATES.items() for key, value in state.items()}
FLAT |= {f"param_groups.{name}.lr": 0.1 for name in STATES}
PLACES = {"state": STATES, "param_groups": {0: {"params": {0: "a.b", 1: "a.b.c", 2: "one"}}}}


@pytest.mark.parametrize(
    ("state_dict", "expected"),
    [
        (optimizer(STATES, [*STATES]), TRAINED),
        (FLAT, TRAINED),
        (PLACES, TRAINED),
        (optimizer(NUMBERED, [0, 1, 2], param_names=[*STATES]), TRAINED),
        (optimizer(AS_TEXT, [0, 1, 2], param_names=[*STATES]), TRAINED),
        (optimizer(NUMBERED, [0, 1, 2]), UNNAMED),
        (optimizer(NUMBERED, [0, 1, 2], param_names=["a.b"]), UNNAMED),
        (optimizer({f"x.{n}": s for n, s in STATES.items()}, [f"x.{n}" for n in STATES]), UNNAMED),
        (optimizer(STATES, ["a.b"]), [*WEIGHTS, "a.b/m"]),
    ],
    ids=["nested", "flat", "places", "names", "text", "numbers", "some", "others", "strangers"],
)
def test_states(state_dict: dict[Any, Any], expected: list[str]) -> None:
    assert names(partitions({"model": MODEL, "optim": state_dict})) == expected


def test_names_of_numbers_that_are_stated_elsewhere() -> None:
    tree = {"model": MODEL, "optim": optimizer(NUMBERED, [0, 1, 2])}
    assert names(partitions(tree, ["a.b", "a.b.c", "one"])) == TRAINED


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"w": tensor(2)}, ["w/param"]),
        ({"net": {"w": tensor(2)}, "step": 3}, ["w/param"]),
        ({"model": {"w": tensor(2)}, "rng": {"cpu": tensor(9)}}, ["w/param"]),
        ({"x": {"w": tensor(2)}, "y": {"w": tensor(2)}}, ["(param)", "(param)"]),
        (
            {
                "x": {"w": tensor(2)},
                "y": {"v": tensor(2)},
                "o": optimizer({"v": {"m": tensor(2)}}, ["v"]),
            },
            ["v/param", "v/m"],
        ),
        ({"model": {"base_model.w": tensor(2)}}, ["(param)"]),
        (
            {"model": {"base_model.w": tensor(2)}, "o": optimizer({}, ["base_model.w"])},
            ["base_model.w/param"],
        ),
    ],
)
def test_which_state_dict_is_the_models(tree: dict[str, Any], expected: list[str]) -> None:
    assert names(partitions(tree)) == expected


def test_the_rules_share_nothing_with_the_readers() -> None:
    """They may share which files there are, and containers below the formats."""
    rules = {"dcp", "gathered", "statedict"}
    seen = set()
    for path, name in modules():
        if name[:2] == ("zckpt", "formats") and name[3:] == ("gather",) and name[2] in rules:
            seen.add(name[2])
            for imported in imports(Path(path), name):
                if imported[:2] != ("zckpt", "formats"):
                    assert imported[1] in ("core", "errors", "files"), imported
                else:
                    assert {"gather", "files"} & {*imported[3:]}, f"{path.relative_to(ROOT)}"
    assert seen == rules
