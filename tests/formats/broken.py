"""Readers broken on purpose: `verify --gather` finds it, comparing through them does not."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import zckpt
from zckpt.core.checkpoint.entries import Entry, Key, key_of
from zckpt.core.storage.fragments import Box, Boxes, Fragment, Fragments, Runs

Entries = dict[Key, Entry]
Change = Callable[[Entries], Entries]
Break = Callable[[pytest.MonkeyPatch], None]


def reading(reader: Any, change: Change) -> Break:
    """Breaks the function `read` of a format's module: `change` makes other entries."""
    module = import_module(".functions", reader.__package__)
    right = module.FUNCTIONS

    def read(*arguments: Any, **options: Any) -> Any:
        manifest = right.read(*arguments, **options)
        return replace(manifest, entries=change(dict(manifest.entries)))

    return lambda patch: patch.setattr(module, "FUNCTIONS", replace(right, read=read))


def swapped(first: str, second: str) -> Change:
    """Two tensors of the same shape, each with the other's bytes."""

    def change(entries: Entries) -> Entries:
        one, other = key_of(first), key_of(second)
        a, b = entries[one], entries[other]
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert _bytes(a) != _bytes(b), "nothing would be wrong"
        swap = {one: replace(a, fragments=b.fragments), other: replace(b, fragments=a.fragments)}
        return {**entries, **swap}

    return change


def shifted(name: str) -> Change:
    """A tensor whose first piece is read one element too far in its file."""

    def change(entries: Entries) -> Entries:
        entry = entries[key_of(name)]
        return {**entries, entry.key: replace(entry, fragments=_shifted(entry.fragments))}

    return change


def without(name: str) -> Change:
    """A reader that knows nothing of a tensor."""
    return lambda entries: {key: entry for key, entry in entries.items() if key != key_of(name)}


def _shifted(fragments: Fragments) -> Fragments:
    if isinstance(fragments, Box | Boxes):
        runs = [run for item in fragments for run in item.runs(0, 1 << 60)]
        return _shifted(Runs(sorted(runs, key=lambda run: run.start)))
    first: Fragment = fragments[0]
    size = first.extent.length // ((first.stop - first.start) * first.count)
    extent = replace(first.extent, offset=first.extent.offset - size)
    return Runs([replace(first, extent=extent), *list(fragments)[1:]])


def _bytes(entry: Entry) -> bytes:
    data = b""
    for fragment in entry.fragments:
        path = Path(fragment.extent.file)
        data += path.read_bytes()[fragment.extent.offset :][: fragment.extent.length]
    return data


def assert_gathers(run: Path, tmp_path: Path, **options: Any) -> list[str]:
    """A right reader is proven; returns the names that the proof takes from the reader."""
    zckpt.convert(run, tmp_path / "right", **options)
    report = zckpt.verify(run, tmp_path / "right", gather=True, device="cpu", **options)
    assert report["equal"], report
    names: list[str] = report["names_of_reader"]
    return names


def found(run: Path, tmp_path: Path, broken: Break, **options: Any) -> tuple[set[str], list[str]]:
    """The tensors that gathering finds different, and its other findings.

    Comparing through the same broken reader finds nothing.
    """
    with pytest.MonkeyPatch.context() as patch:
        broken(patch)
        zckpt.convert(run, tmp_path / "broken", **options)
        through_it = zckpt.verify(run, tmp_path / "broken", **options)
        assert not through_it["differences"] + through_it["problems"], through_it
        report = zckpt.verify(run, tmp_path / "broken", gather=True, device="cpu", **options)
    assert not report["equal"]
    differing = {line["tensor"] for line in report["differences"]}
    return differing, [line["message"] for line in report["problems"]]
