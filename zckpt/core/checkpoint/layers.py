"""Finds the layer of a parameter from its name, and its kind within the layer.

`model.layers.3.mlp.weight` is in layer `layers.3`, and its kind is `mlp.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from msgspec import Struct

LAYER = re.compile(r"(?:(?P<stack>.*?)\.)?(?P<number>\d+)\.(?P<kind>.+)")


class Places(Struct, frozen=True):
    """Arranges parameters as a table: a row for each layer, a column for each kind of parameter.

    A kind is the rest of the name after the layer's number, such as `mlp.weight`. `of` maps a
    parameter to the indices of its row and its column. Rows and columns are in the order of the
    model.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    of: Mapping[str, tuple[int, int]]
    names: tuple[str, ...] = ()
    """The rows' names in reports: layer `0` is `h.0` if `h` is the model's only list of layers."""

    def row(self, parameter: str) -> int:
        return self.of[parameter][0]

    def name(self, parameter: str) -> str:
        """The name of the parameter's layer in reports, such as `layers.3`."""
        return self.names[self.of[parameter][0]]

    def layer(self, parameter: str) -> str:
        return self.rows[self.of[parameter][0]]


def places_of(parameters: Iterable[str]) -> Places:
    """Arranges parameters as a table: a row for each layer, a column for each kind of parameter.

    `parameters` are in the order of the model. A row is named by the layer's number, or by
    `encoder.3` if the model has several lists of layers. A parameter outside of layers has a row
    named by the first part of its name: `norm` for `norm.weight`.
    """
    matches = {name: LAYER.fullmatch(name) for name in dict.fromkeys(parameters)}
    # lists of numbered layers, such as `model.layers`
    stacks = list(dict.fromkeys(match["stack"] or "" for match in matches.values() if match))
    # modules around the only list are left out: `model.norm.weight` is in the row `norm`
    outer = stacks[0].rpartition(".")[0] if len(stacks) == 1 else ""
    # all layers are consecutive rows, in the place of the first one, by list and number
    first = next((place for place, match in enumerate(matches.values()) if match), 0)
    kinds: dict[str, tuple[str, str]] = {}
    order: dict[str, tuple[int, ...]] = {}
    for place, (name, match) in enumerate(matches.items()):
        if match:
            stack, number = match["stack"] or "", match["number"]
            row = number if len(stacks) == 1 else f"{stack}.{number}".lstrip(".")
            kinds[name] = row, match["kind"]
            order[row] = first, stacks.index(stack), int(number)
        else:
            row, _, kind = (name.removeprefix(f"{outer}.") if outer else name).partition(".")
            kinds[name] = row, kind or row
            order.setdefault(row, (place,))
    rows = {row: place for place, row in enumerate(sorted(order, key=order.__getitem__))}
    columns = dict.fromkeys(kind for _, kind in kinds.values())
    numbers = {kind: place for place, kind in enumerate(columns)}
    of = {name: (rows[row], numbers[kind]) for name, (row, kind) in kinds.items()}
    stack = stacks[0].rpartition(".")[2] if len(stacks) == 1 else ""
    numbered = {row for row, place in order.items() if len(place) > 1} if stack else ()
    names = (f"{stack}.{row}" if row in numbered else row for row in rows)
    return Places(tuple(rows), tuple(columns), of, tuple(names))
