"""At which layers stages begin: what the options say, and what DeepSpeed's rules make of it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from zckpt.core.checkpoint.facts import Pipeline
from zckpt.core.checkpoint.manifest import Manifest, Parameter, Run
from zckpt.errors import WrongOption
from zckpt.formats.deepspeed.model_ranks.stage_bounds import (
    assumed,
    balanced,
    bounds_of,
    is_cut,
    layers_alike,
    ranges,
    refuse_without_stages,
    uniform,
)
from zckpt.formats.options import options_of

from ....conftest import texts

# an embedding, three layers alike of which a function follows the first, and an output layer
SHAPES = {
    "0.weight": (8, 2),
    "1.fc.weight": (2, 2),
    "3.fc.weight": (2, 2),
    "4.fc.weight": (2, 2),
    "5.weight": (3, 2),
}


def made(stages: int = 1, **more: tuple[int, ...]) -> tuple[Manifest, Pipeline]:
    """A model in so many stages of three layers each."""
    parameters = {n: Parameter(shape, group=0) for n, shape in {**SHAPES, **more}.items()}
    names = [
        [name for name in SHAPES if stages == 1 or int(name[0]) // 3 == stage]
        for stage in range(stages)
    ]
    layers = [int(name[0]) for name in SHAPES]
    return Manifest("run", "deepspeed", Run(), {}, parameters), Pipeline(names, [[]], layers)


@pytest.mark.parametrize(
    ("options", "bounds"),
    [
        ({"pp": 1}, (0, 6)),
        ({"pp_bounds": (0, 2, 9)}, (0, 2, 9)),
        ({"pp": 2, "pp_bounds": (0, 5, 6)}, (0, 5, 6)),
        ({"pp": 2, "pp_partition": "uniform"}, (0, 3, 6)),
        ({"pp": 3, "pp_partition": "uniform:8"}, (0, 3, 6, 8)),
        ({"pp": 2, "pp_partition": "uniform:6"}, (0, 3, 6)),
        ({"pp_partition": "uniform"}, (0, 6)),  # as many stages as the source
        ({"pp": 2, "pp_partition": "parameters"}, (0, 1, 6)),
        ({"pp": 3, "pp_partition": "type:block"}, (0, 3, 4, 6)),
    ],
)
def test_bounds(options: dict[str, Any], bounds: tuple[int, ...]) -> None:
    assert bounds_of(*made(), options_of(options)) == bounds


@pytest.mark.parametrize(
    ("options", "said", "hint"),
    [
        ({"pp": 3}, r"--pp 3 needs .* of the layers 0, 1, 3 to 5$", "such as --pp-bounds 0,2,4,6;"),
        ({"pp": 9}, "--pp 9 needs", "such as --pp-bounds 0,1,2,3,4,5,6;"),
        ({"pp_bounds": (0, 2, 5)}, "--pp-bounds 0,2,5 end before layer 5", "the last bound is"),
        (
            {"pp": 3, "pp_bounds": (0, 2, 6)},
            "define 2 stages, but --pp asks for 3",
            "at the end",
        ),
        ({"pp_bounds": (0, 6), "pp_partition": "uniform"}, "both say where", "leave one out"),
        ({"pp": 2, "pp_partition": "uniform:5"}, "uniform:5: run has files", "counts all layers"),
        ({"pp": 4, "pp_partition": "type:block"}, "does not have 4 layers", "with --pp-bounds"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], said: str, hint: str) -> None:
    with pytest.raises(WrongOption, match=said) as raised:
        bounds_of(*made(), options_of(options))
    assert hint in (raised.value.hint or "")


def test_a_class_that_the_stages_of_the_source_contradict() -> None:
    """By the layers alike they would begin at 0 and 4."""
    with pytest.raises(
        WrongOption, match=r"layers 1, 3, 4, which .* would begin at layers 0,4, but they do not"
    ):
        bounds_of(*made(2), options_of({"pp": 2, "pp_partition": "type:block"}))


def test_a_class_that_the_stages_of_the_source_fit() -> None:
    """They begin at 0 and 4 if the layers 1, 3 and 4 count; a stage without a number fits any."""
    model, pipeline = made()
    names, by_class = [*SHAPES], options_of({"pp": 3, "pp_partition": "type:block"})
    fitting = Pipeline([names[:3], names[3:]], [[]], pipeline.layers)
    assert bounds_of(model, fitting, by_class) == (0, 3, 4, 6)
    unnumbered = Pipeline([names[:3], ["tied_modules.e.weight"]], [[]], pipeline.layers)
    assert bounds_of(model, unnumbered, by_class) == (0, 3, 4, 6)
    assert bounds_of(model, Pipeline([names[:3], ["4.fc.weight"]], [[]], pipeline.layers), by_class)
    for cut in (2, 4):
        other = Pipeline([names[:cut], names[cut:]], [[]], pipeline.layers)
        with pytest.raises(WrongOption, match="would begin at layers 0,4, but they do not"):
            bounds_of(model, other, by_class)


def test_frozen_parameters_do_not_count() -> None:
    model, pipeline = made()
    frozen = {**model.parameters, "0.weight": Parameter((8, 2), trainable=False)}
    options = options_of({"pp": 2, "pp_partition": "parameters"})
    assert bounds_of(replace(model, parameters=frozen), pipeline, options) == (0, 4, 6)


def test_uses_of_a_tied_layer_count_each() -> None:
    """They must be in files: a stage's own use by a function is not known."""
    model, pipeline = made(**{"tied_modules.e.weight": (3, 2)})  # type: ignore[arg-type]
    options = options_of({"pp": 2, "pp_partition": "parameters"})
    tied = [[*pipeline.parameters[0], "tied_modules.e.weight"]]
    for files in ({}, {2: "e"}):
        hidden = Pipeline(tied, [[]], pipeline.layers, files)
        with pytest.raises(WrongOption, match="counts the tied layer e wherever it is used"):
            bounds_of(model, hidden, options)
    shown = Pipeline(tied, [[]], [*pipeline.layers, 6, 7], {6: "e", 7: "e"})
    assert bounds_of(model, shown, options) == (0, 4, 8)


def test_layers_alike() -> None:
    assert layers_alike(made()[0]) == [1, 3, 4]
    model, _ = made(**{"6.weight": (3, 2), "7.weight": (3, 2)})  # type: ignore[arg-type]
    assert layers_alike(model) == []  # as many of another kind
    biases = {f"{number}.bias": (3,) for number in (5, 6, 7)}
    model, _ = made(**{"6.weight": (3, 2), "7.weight": (3, 2), **biases})  # type: ignore[arg-type]
    assert layers_alike(model) == [5, 6, 7]  # with more parameters
    model, _ = made(**{f"tied_modules.{key}.weight": (2, 2) for key in "abcde"})  # type: ignore[arg-type]
    assert layers_alike(model) == [1, 3, 4]  # a tied one has no number
    model, _ = made(**{"6.weight": (3, 2), "1.fc.bias": (2,)})  # type: ignore[arg-type]
    assert layers_alike(model) == []


def test_what_a_rule_takes_for_granted() -> None:
    model, _ = made()
    assert assumed(model, (0, 6), options_of({"pp": 1})) == []
    (line,) = texts(assumed(model, (0, 3, 6), options_of({"pp": 2, "pp_partition": "type:block"})))
    assert "are 0,3,6, if the program has 6 layers" in line
    assert "type:block names the class of the layers 1, 3, 4" in line
    (line,) = texts(assumed(model, (0, 3, 6), options_of({"pp": 2, "pp_partition": "uniform"})))
    assert "matches" not in line


@pytest.mark.parametrize(
    ("options", "cut"),
    [
        ({}, False),
        ({"pp": 2}, False),
        ({"pp": 1}, True),
        ({"pp_bounds": (0, 6)}, True),
        ({"pp_partition": "uniform"}, True),
        ({"pp": 2, "pp_partition": "uniform"}, True),
    ],
)
def test_whether_stages_change(options: dict[str, Any], cut: bool) -> None:
    assert is_cut(2, options_of(options)) == cut
    if options:
        with pytest.raises(WrongOption, match="does not apply to run, which is not a pipeline"):
            refuse_without_stages("run", options_of(options))
    else:
        refuse_without_stages("run", options_of(options))


def test_deepspeeds_rules() -> None:
    """test_recut.py compares them with the engine's own functions."""
    assert uniform(7, 3) == (0, 3, 5, 7)
    assert uniform(2, 4) == (0, 1, 2, 2, 2)
    assert balanced([1, 1, 1, 9], 2) == (0, 3, 4)
    assert balanced([0, 1, 0, 1], 2) == (0, 3, 4)  # of equal ones, the last
    assert balanced([5, 5], 3) == (0, 1, 2, 2)
    assert balanced([5, 0], 2) == balanced([0, 0], 2) == (0, 1, 2)
    assert balanced([7, 0, 7, 0], 3) == (0, 2, 3, 4)  # no stage is empty
    assert balanced([3, 8, 7, 3, 8, 0], 4) == (0, 1, 2, 4, 6)  # the largest sum so far counts


def test_layers_in_words() -> None:
    assert ranges([0, 1, 3, 4, 5, 7, 9, 10]) == "0, 1, 3 to 5, 7, 9, 10"
