"""Pairs the tensors that `verify` and `diff` compare with each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from ..core.checkpoint.dtypes import SIZES
from ..core.checkpoint.entries import Entry, Key
from ..core.checkpoint.manifest import Manifest
from ..core.checkpoint.weights import WEIGHTS, weight_of
from ..core.comparison.masters import with_masters
from ..core.grouping import by_key
from ..core.passes.description import matching
from ..core.passes.plan import Match, match, of_copies
from . import unsupported
from .states import twins


def own_matches(manifest: Manifest) -> list[Match]:
    """Lists the pairs of tensors to compare within one checkpoint.

    These are each weight with its fp32 master, and each replica with the tensor of which it is a
    copy. All other tensors are listed without a second tensor, because they are only read.
    """
    entries = manifest.entries
    matches = list(with_masters(entries))
    paired = {id(entry) for item in matches for entry in (item.a, item.b)}
    matches += [Match(entry) for entry in entries.values() if id(entry) not in paired]
    matches += [Match(entry) for row in manifest.states for entry in row.tensors]
    return matches + copies(manifest, entries)


def copies(manifest: Manifest, entries: Mapping[Key, Entry]) -> list[Match]:
    """Pairs the replicas in a manifest with the tensors of the same key (name, slot) in `entries`.

    Random states are left out, because each rank has its own.
    """
    return [
        Match(copy, entries[copy.key], copy=True)
        for copy in manifest.replicas
        if copy.slot != "state" and copy.key in entries
    ]


def mutual_matches(a: Manifest, b: Manifest) -> tuple[list[Match], list[Key], list[Key]]:
    """Pairs tensors that both checkpoints have; replicas are paired too.

    Also returns the keys that only `a` has, and those that only `b` has.
    """
    matches, only_a, only_b = match(a, b)
    equals = [(item.a, item.b) for item in matches if item.b is not None and item.how == "bits"]
    paired = _of_same_ranks(a, b) if twins(a, b) else []
    alone = {id(entry) for item in paired for entry in (item.a, item.b)}
    theirs = {ours.key: other for ours, other in equals}
    ours = {other.key: entry for entry, other in equals}
    matches += [item for item in copies(a, theirs) if id(item.a) not in alone]
    matches += [
        replace(item, a=item.b, b=item.a)
        for item in copies(b, ours)
        if item.b is not None and id(item.a) not in alone
    ]
    return [*matches, *paired, *unsupported.pairs(a, b)], only_a, only_b


def _of_same_ranks(a: Manifest, b: Manifest) -> list[Match]:
    """Pairs buffers and random states of ranks with those of the same rank in the other checkpoint.

    They may differ between ranks, so they are not compared across ranks.
    """
    matches: list[Match] = []
    ours, theirs = (by_key((entry.key, entry) for entry in side.replicas) for side in (a, b))
    buffers = {*a.buffers} & {*b.buffers}
    for key, own_copies in ours.items():
        other_copies = theirs.get(key, [])
        is_own = own_copies[0].slot == "state" or own_copies[0].parameter in buffers
        if is_own and len(own_copies) == len(other_copies):
            matches += map(of_copies, own_copies, other_copies)
    return matches


def selected(matches: Iterable[Match], pattern: str | None) -> list[Match]:
    """Keeps the pairs of tensors whose names match a glob; raises WrongOption if none do."""
    return list(matches) if pattern is None else matching(matches, pattern)


def only_rounded(matches: Iterable[Match], a: Manifest, b: Manifest) -> dict[str, list[str]]:
    """Lists weights that one checkpoint has only in a narrower type, such as bf16 instead of fp32.

    They are listed by checkpoint: under "a" and "b".
    """
    names: dict[str, list[str]] = {"a": [], "b": []}
    for item in matches:
        if item.how != "rounded" or item.b is None or item.copy:
            continue
        if item.rounds_a:
            narrow, wide, side, manifest = item.b, item.a, "b", b
        else:
            narrow, wide, side, manifest = item.a, item.b, "a", a
        exact = weight_of(manifest.entries, narrow.parameter).trained
        if narrow.parameter in manifest.parameters and SIZES[exact.dtype] < SIZES[wide.dtype]:
            names[side].append(narrow.parameter)
    return names


def missing(keys: Sequence[Key], owner: Manifest, other: Manifest) -> list[Key]:
    """Selects from `keys`, which only `owner` has, the tensors that `other` should have too.

    If `other` has any tensor of a slot, such as `exp_avg`, it should have all of them. If it has
    any weight, as `param` or as `master`, it should have every trained weight.
    """
    slots = {entry.slot for entry in other.entries.values()} - {"state"}
    lost = []
    for name, slot in keys:
        parameter = owner.parameters.get(name)
        # some formats do not store frozen weights
        weight = slot in WEIGHTS and parameter is not None and parameter.trainable
        if slot in slots or (weight and slots & WEIGHTS):
            lost.append((name, slot))
    return lost
