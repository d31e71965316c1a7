"""The rows of a vocabulary: a target may have more or fewer of them than its source.

Tensor ranks share padded rows, and their number depends on that of the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from msgspec.structs import replace

from ...core.dtypes import SIZES
from ...core.fragments import Fragment, Runs
from ...core.manifest import Entry, Manifest


def resized(source: Manifest, rows: Mapping[str, int]) -> Manifest:
    """The model with so many rows; bytes of rows that the source lacks are in no file."""

    def shape(name: str, own: tuple[int, ...]) -> tuple[int, ...]:
        is_resized = name in rows and own == source.parameters[name].shape
        return (rows[name], *own[1:]) if is_resized else own

    return replace(
        source,
        parameters={
            name: replace(parameter, shape=shape(name, parameter.shape))
            for name, parameter in source.parameters.items()
        },
        entries={
            name: entry
            if entry.slot == "state"
            else replace(entry, shape=shape(entry.parameter, entry.shape), digest=None)
            for name, entry in source.entries.items()
        },
    )


def shared(manifest: Manifest, rows: Mapping[str, int]) -> Manifest:
    """The manifest with at most so many rows of each vocabulary: those that both sides have.

    The other rows of a target are holes in its files: zeros.
    """

    def own(entry: Entry) -> Entry:
        few = rows.get(entry.parameter)
        is_whole = few is not None and entry.shape == manifest.parameters[entry.parameter].shape
        return _first_rows(entry, few) if few is not None and is_whole else entry

    return replace(
        manifest,
        entries={name: own(entry) for name, entry in manifest.entries.items()},
        replicas=tuple(map(own, manifest.replicas)),  # stages have copies of a tied embedding
    )


def lost_rows(source: Manifest, rows: Mapping[str, int]) -> list[str]:
    """The rows that a target with so many lacks, as the report lists them."""
    return [
        f"rows of {name} that fill up the vocabulary, from {count}"
        for name, count in rows.items()
        if count < source.parameters[name].shape[0]
    ]


def _first_rows(entry: Entry, rows: int) -> Entry:
    if rows >= entry.shape[0]:
        return entry
    stop, size = rows * prod(entry.shape[1:]), SIZES[entry.dtype]
    runs = [
        Fragment(run.start, end, run.extent.part(0, (end - run.start) * size))
        for fragment in entry.fragments.overlapping(0, stop)
        for run in fragment.runs(0, stop)
        if run.start < (end := min(run.stop, stop))
    ]
    return replace(
        entry,
        shape=(rows, *entry.shape[1:]),
        fragments=Runs(sorted(runs, key=lambda run: run.start)),
        digest=None,
        mean=tuple(_first_rows(each, rows) for each in entry.mean),
    )
