"""The arithmetic of benchmarks, without a measurement."""

from __future__ import annotations

from math import prod

import pytest

from benchmarks import gather, layer


@pytest.mark.parametrize("elements", [50_000, 9_834_560, 9_834_561])
def test_a_layer_has_the_elements_that_are_asked_for(elements: int) -> None:
    shapes = layer.shapes_of(elements)
    width, inner = shapes["contract.weight"]
    assert sum(map(prod, shapes.values())) == elements
    assert width % layer.HEAD == 0
    assert 3 * width <= inner  # a block, and not one long vector
    assert prod(shapes.get("rest", (0,))) <= 2 * width


def test_a_layer_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 49984 elements"):
        layer.shapes_of(1000)


def test_the_limit_is_reading_and_then_gathering() -> None:
    """Reading passes over more bytes than are compared: metadata, and padding."""
    verify = gather.Pass(bytes=100, seconds=9.0, cpu=9.0)
    limit = gather.limit_of(verify, gather.Pass(200, 4.0, 6.0), gather.Pass(50, 3.0, 5.0))
    assert limit == gather.Pass(bytes=100, seconds=5.0, cpu=8.0)
