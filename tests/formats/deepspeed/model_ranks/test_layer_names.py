"""Names of a pipeline's tensors say the layer, or the key of a tied one."""

from __future__ import annotations

import pytest

from zckpt.core.checkpoint.facts import Pipeline
from zckpt.formats.deepspeed import layer_names
from zckpt.formats.deepspeed.layer_names import (
    LayerName,
    layers_with,
    of_tied,
    prefix_of,
    tied_key,
    untied_layers,
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("3.fc.weight", LayerName(3, None, "fc.weight")),
        ("12.bias", LayerName(12, None, "bias")),
        ("tied_modules.embed.weight", LayerName(None, "embed", "weight")),
        ("tied_modules.7.a.b", LayerName(None, "7", "a.b")),
        ("head.weight", LayerName(None, None, "weight")),
        ("tied_modules_of_mine.weight", LayerName(None, None, "weight")),
        ("-1.weight", LayerName(None, None, "weight")),
    ],
)
def test_parts_of_a_name(name: str, expected: LayerName) -> None:
    assert LayerName.of(name) == expected
    assert tied_key(name) == expected.key


def test_a_prefix_and_the_rest_are_the_name() -> None:
    for number, tied in ((3, {}), (3, {3: "embed"}), (0, {3: "embed"})):
        own = LayerName.of(prefix_of(number, tied) + "fc.weight")
        assert own == LayerName(None if number in tied else number, tied.get(number), "fc.weight")


def test_layers_of_names() -> None:
    names = ["3.a", "tied_modules.embed.a", "0.b", "3.c", "norm.weight"]
    assert untied_layers(names) == [3, 0, 3]


def test_what_is_said_of_tied_layers() -> None:
    said = {"tied_modules.e.w": 1, "3.w": 2, "tied_modules.e.b": 3, "tied_modules.f.w": 4}
    assert of_tied(said) == {"e": {"w": 1, "b": 3}, "f": {"w": 4}}


EMBED = "tied_modules.embed.weight"


@pytest.mark.parametrize(
    ("stages", "spans"),
    [
        (["1 2", "4", "7"], [range(4), range(3, 7), range(5, 9)]),
        (["e 1", "e", "e 5"], [range(5), range(2, 5), range(2, 9)]),  # the second is tied alone
        (["2"], [range(9)]),
    ],
)
def test_layers_that_a_stage_may_have(stages: list[str], spans: list[range]) -> None:
    """Up to those that the neighbors show."""
    names = [
        [EMBED if each == "e" else f"{each}.weight" for each in stage.split()] for stage in stages
    ]
    pipeline = Pipeline(names, [], [])
    assert layer_names.spans(pipeline, 9) == spans
    having = [span for span, stage in zip(spans, names, strict=True) if EMBED in stage]
    assert layer_names.spans_with(pipeline, "embed", 9) == having


def test_layers_of_a_tied_one_are_those_of_its_files() -> None:
    pipeline = Pipeline([[EMBED, "1.a"], ["2.a", "tied_modules.norm.b"]], [], [], {5: "embed"})
    assert layer_names.uses_of_files(pipeline) == {"embed": {5}, "norm": set()}
    uses = {"embed": {5, 0}}
    assert [[*layers_with(name, uses)] for name in (EMBED, "3.a", "tied_modules.norm.b", "a")] == [
        [0, 5], [3], [], [],
    ]  # fmt: skip
