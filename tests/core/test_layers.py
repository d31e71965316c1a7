"""Rows and columns of the names that models have."""

from __future__ import annotations

import pytest

from zckpt.core.checkpoint.layers import places_of


@pytest.mark.parametrize(
    ("names", "rows", "columns"),
    [
        (
            [
                "model.embed_tokens.weight", "model.layers.0.mlp.up.weight",
                "model.layers.10.mlp.up.weight", "model.layers.2.mlp.up.weight",
                "model.norm.weight", "lm_head.weight", "model.layers.2.norm.weight",
            ],
            ["embed_tokens", "0", "2", "10", "norm", "lm_head"],
            ["weight", "mlp.up.weight", "norm.weight"],
        ),
        (
            ["encoder.0.w", "encoder.1.w", "decoder.0.w"],
            ["encoder.0", "encoder.1", "decoder.0"],
            ["w"],
        ),
        (["0.weight", "0.bias", "2.weight"], ["0", "2"], ["weight", "bias"]),
        (["scale", "fc1.weight"], ["scale", "fc1"], ["scale", "weight"]),
        (["blocks.3.experts.1.w", "blocks.3.experts.0.w"], ["3"], ["experts.1.w", "experts.0.w"]),
        (["a.w", "b.w", "0.w", "c.w"], ["a", "b", "0", "c"], ["w"]),
        ([".w", "w.b"], ["", "w"], ["w", "b"]),
        ([], [], []),
    ],
)  # fmt: skip
def test_rows_and_columns(names: list[str], rows: list[str], columns: list[str]) -> None:
    places = places_of(names)
    assert list(places.rows) == rows
    assert list(places.columns) == columns
    assert places.of.keys() == set(names)
    assert len(set(places.of.values())) == len(names), "no cell has two parameters"


def test_the_place_of_one_parameter() -> None:
    places = places_of(["embed.scale", "layers.7.fc.weight", "layers.7.fc.bias", "norm.weight"])
    assert [places.row(name) for name in places.of] == [0, 1, 1, 2]
    assert [places.layer(name) for name in places.of] == ["embed", "7", "7", "norm"]


@pytest.mark.parametrize(
    ("names", "called"),
    [
        (["transformer.wte.weight", "transformer.h.0.w", "transformer.h.11.w"], "wte h.0 h.11"),
        (["h.0.w", "h.1.w", "ln_f.w"], "h.0 h.1 ln_f"),
        (["encoder.0.w", "decoder.0.w"], "encoder.0 decoder.0"),
        (["0.w", "2.w"], "0 2"),
    ],
)
def test_layers_are_called_as_people_call_them(names: list[str], called: str) -> None:
    places = places_of(names)
    assert list(places.names) == called.split()
    assert [places.name(name) for name in names] == called.split()
