"""Splits one manifest into the manifests of the ranks of one axis: the inverse of `merge`.

A manifest made here says which slices a rank has, and not yet where their bytes are.
"""

from __future__ import annotations

from itertools import chain

from msgspec.structs import replace

from ..checkpoint.entries import Entry
from ..checkpoint.manifest import Manifest, Parameter
from ..checkpoint.placement import Row, Table
from ..storage.fragments import Runs


def split(whole: Manifest, table: Table) -> list[Manifest]:
    """Makes a manifest for each rank (row) of the table, with all param groups and the state."""
    return [part(whole, row) for row in table.rows]


def names_in(whole: Manifest) -> list[str]:
    """All names in a model's manifest: parameters, buffers, then other module state."""
    module = whole.state.get("module") or ()
    return list(dict.fromkeys(chain(whole.parameters, whole.buffers, module)))


def part(whole: Manifest, row: Row) -> Manifest:
    """Makes the manifest of one rank, with its parameters in the order of the row.

    A parameter of which this rank has no elements stays, but becomes frozen, since the rank's
    optimizer does not train it.
    """
    names, shapes = {*row.names}, row.shapes
    parameters = {
        name: replace(item, shape=shapes.get(name, item.shape))
        for name in row.names
        if (item := whole.parameters.get(name)) is not None
    }
    empty = [
        name
        for name, item in parameters.items()
        if 0 in item.shape and 0 not in whole.parameters[name].shape
    ]
    parameters |= {n: Parameter(parameters[n].shape, trainable=False) for n in empty}
    trained = {name: name for name in parameters if name not in empty}

    def as_held(entry: Entry) -> Entry:
        if entry.slot == "state" or (shape := shapes.get(entry.parameter)) is None:
            return entry
        of_module = None if whole.run.engine is None else whole.run.engine.dtype
        dtype = of_module or entry.dtype if entry.parameter in empty else entry.dtype
        return replace(entry, dtype=dtype, shape=shape, fragments=Runs(()), digest=None, mean=())

    def has(entry: Entry) -> bool:
        if entry.slot == "state" or entry.parameter not in names:
            return entry.slot == "state"
        if entry.slot != "param":
            return entry.parameter not in empty
        return row.has_weights or (entry.parameter, "master") not in whole.entries

    return replace(
        whole,
        entries={key: as_held(entry) for key, entry in whole.entries.items() if has(entry)},
        parameters=parameters,
        states=whole.states.with_numbers_of(trained),
        buffers=tuple(name for name in whole.buffers if name in names),
        replicas=(),
        state={**whole.state, "module": [n for n in whole.state.get("module") or () if n in names]},
    )
