"""The state that the ranks would all-gather, rebuilt the engine's way, and compared where it lies.

Every process reads some ranks' parts of the flat buffers, torch.distributed gathers them, and
parameters are cut out by the engine's own rule (`core/partition.py`), not by our manifest: of the
copying, this shares nothing but the parser of files. The other side is read through its manifest.

A bucket is as many columns of a (rank x element) matrix as memory allows, of as many buffers as
fit: one coalesced all-gather into a flat buffer that is there already, and tensors are compared as
views of it. Two buckets are in flight: threads read the next into pinned memory while this one is
moved, gathered and compared. What a process compares is a share of the gathered whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...core.checksum import Cover
from ...core.compare import Difference, Outcome, Result
from ...core.dtypes import SIZES
from ...core.manifest import Entry, Manifest
from ...core.partition import (
    Partition,
    Partitioned,
    Whole,
)
from ...core.plan import Match, match
from ...core.resources import Begin
from ...errors import MissingExtra
from .. import verify as proof

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise MissingExtra(
        "--gather needs torch, which is not installed", hint="pip install 'zckpt[torch]'"
    ) from error
from .gathering import Gathering
from .parts import alone, by_kind, is_flat, named, spread
from .world import Means, World, join_world, together_with_others

Report = dict[str, Any]


def verify_gathered(
    manifest: Manifest,
    parts: Sequence[Partition] | None,
    other: Manifest,
    pattern: str | None,
    means: Means,
    begin: Begin | None,
) -> Report:
    """Whether what the ranks of `manifest` would gather is what `other` holds.

    `parts` are those of the ranks by the engine's rule, or None if no engine gathers this format.
    Every process of the world gives the same report, with its own `rank`. Raises WrongOption,
    MissingData where no weights are shared.
    """
    world = join_world(means.device)
    try:
        if parts is None:
            parts = [alone(entry) for entry in manifest.entries.values() if entry.slot != "state"]
        return _verify(world, manifest, parts, other, pattern, means, begin)
    finally:
        world.close()


def _verify(
    world: World,
    manifest: Manifest,
    parts: Sequence[Partition],
    other: Manifest,
    pattern: str | None,
    means: Means,
    begin: Begin | None,
) -> Report:
    parts, held, copies = named(parts, manifest)
    known = [name for name in manifest.entries if name in held]  # in the order of the model
    ours = replace(manifest, entries={name: held[name] for name in (*known, *held)}, replicas=())
    found, only_a, only_b = match(ours, other)
    matches = [(item.a.name, item) for item in found if item.a.slot != "state"]
    matches += [
        (key, Match(entry, item.b, "bits" if _alike(entry, item.b) else "shapes", copy=True))
        for key, entry in copies.items()
        for item in found
        if item.a.name == entry.name and item.how == "bits" and item.b and not item.copy
    ]
    chosen = {id(item) for item in proof.chosen([item for _, item in matches], pattern)}
    matches = [(key, item) for key, item in matches if id(item) in chosen]
    if pattern is None:
        proof.needs_weights([item for _, item in matches], manifest.root, other.root)
    total = sum(2 * item.b.length for _, item in matches if item.b) // world.size
    progress = begin(total) if begin and not world.rank else None
    gathering = Gathering(world, matches, means.jobs, progress)
    try:
        flat = [part for part in parts if isinstance(part, Partitioned)]
        flat += [spread(part, world.size) for part in parts if is_flat(part)]
        flat = [
            part for part in flat if any(member.name in gathering.places for member in part.members)
        ]
        gathering.run(by_kind(flat), means.memory)
        strided = [part for part in parts if isinstance(part, Whole) and part.strides]
        for part in strided[world.rank :: world.size]:
            gathering.look_at(part)
    finally:
        gathering.readers.close()
    outcome = _together(world, gathering)
    told = proof.findings(outcome, manifest, other)
    told |= proof.inferences([item for _, item in matches], manifest, other)
    told["problems"] += _uncovered(outcome)
    told["records"] = None  # CRCs of records are for the reading that is not gathered
    if pattern is None:
        told["problems"] += _forgotten(manifest, held)
        only = [
            [name for name in names if not name.endswith("/state")] for names in (only_a, only_b)
        ]
        told = proof.with_values(told, ours, other, *only)
    versions = {**proof.versions(manifest, other), "torch": torch.__version__}
    return {
        **told,
        "equal": proof.nothing_found(told),
        "device": str(world.device.type),
        "world": world.size,
        "rank": world.rank,
        "versions": versions,
    }


def _alike(a: Entry, b: Entry | None) -> bool:
    return b is not None and (a.dtype, a.shape) == (b.dtype, b.shape)


def _uncovered(outcome: Outcome) -> list[Report]:
    """Tensors of which some elements were not brought by any bucket."""
    return [
        {
            "tensor": result.match.name,
            "message": f"{result.match.name}: what the ranks hold does not cover its "
            f"{result.match.a.numel} elements",
        }
        for result in outcome.results
        if result.match.is_read and result.digests[1] is None
    ]


def _forgotten(manifest: Manifest, held: Mapping[str, Entry]) -> list[Report]:
    """Tensors that our reader knows, and the engine's rule does not."""
    return [
        {"tensor": name, "message": f"{name} is not what the engine would gather"}
        for name in manifest.entries
        if name not in held and not name.endswith("/state")
    ]


def _together(world: World, own: Gathering) -> Outcome:
    """What all processes found, as each of them then knows it."""
    mine = (own.found, own.crcs, own.bytes)
    everyone: list[Any] = [mine]
    if world.size > 1:
        everyone = [None] * world.size
        with together_with_others():
            dist.all_gather_object(everyone, mine)
    found: dict[int, Difference] = {}
    covers: dict[tuple[int, int], Cover] = {}
    for differences, crcs, _ in everyone:
        for place, difference in differences.items():
            found.setdefault(place, Difference()).add(difference)
        for (place, side), ranges in crcs.items():
            item = own.matches[place]
            entry = item.b if side else item.a
            assert entry is not None
            cover = covers.setdefault((place, side), Cover(entry.length))
            for start, stop, crc in ranges:
                cover.add(start * SIZES[entry.dtype], stop * SIZES[entry.dtype], crc)
    results = []
    for place, item in enumerate(own.matches):
        sides = [covers.get((place, side)) for side in (0, 1)]
        digests = [0 if not item.a.numel else cover.crc if cover else None for cover in sides]
        results.append(Result(item, (digests[0], digests[1]), found.get(place)))
    return Outcome(results, bytes=sum(size for _, _, size in everyone))
