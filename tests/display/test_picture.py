"""Layers of a model as blocks on a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from zckpt.core.checkpoint.layers import places_of
from zckpt.display import findings
from zckpt.display.picture import COLUMNS, layers

from ..conftest import EXAMPLE, Result


def test_layers_are_columns_and_kinds_are_rows() -> None:
    cells = {f"model.layers.{n}.q.weight": 2.0 ** (n - 4) for n in range(5)}
    cells |= {"model.layers.1.k.weight": 0.0, "model.layers.2.k.weight": math.inf}
    lines = list(layers(places_of(cells), cells, 80))
    assert lines == [
        "q.weight  ▁▂▄▅▇",
        "k.weight   0!",
        "          0 to 4; ▁ 2^-4 to █ 2^1",
    ]


def test_many_layers_and_long_names_fit() -> None:
    cells = {f"layers.{n}.{'very.' * 30}weight": 1.0 for n in range(500)}
    for width in (40, 100):
        lines = list(layers(places_of(cells), cells, width))
        assert len(lines) == 2
        assert lines[0].startswith("...")
        assert len(lines[0]) <= max(width, COLUMNS + 18)
    assert list(layers(places_of([]), {}, 80)) == []


def test_names_without_control_characters() -> None:
    cells = {"layers.0.\x1b[31mred": 1.0, "layers.1.\x1b[31mred": 2.0}
    assert "\x1b" not in "".join(layers(places_of(cells), cells, 80))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_stats_draws_them_on_a_terminal(
    is_terminal: bool, zckpt: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zckpt.display.terminal.sys.stdout.isatty", lambda: is_terminal)
    assert findings.sys.stdout.isatty() is is_terminal
    out = zckpt("stats", EXAMPLE).out
    assert ("RMS of weights, by kinds and layers:" in out) is is_terminal
    assert ("▇" in out.partition("RMS of weights")[2]) is is_terminal
