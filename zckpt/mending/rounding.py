"""Judges what can replace lost tensors: rounded masters, or replicas on other pipeline stages.

A program may save other weights than it trains, such as those of an EMA. Then the rounded
masters differ from the lost weights. And the engine may let the replicas of a tied layer's masters
and optimizer states drift apart. Then another stage's replica may differ from the lost one.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..core.checkpoint.entries import Entry, Key
from ..core.checkpoint.manifest import Manifest
from ..core.comparison import masters
from ..core.comparison.replicas import AXES
from ..core.grouping import by_key
from ..judging.damaged_source import kept


def masters_round(manifest: Manifest, lost: Mapping[str, str], older: Manifest | None) -> bool:
    """Whether lost weights can be restored by rounding their fp32 masters.

    False if a weight that still exists differs from its rounded master; only first elements are
    compared. `lost` maps the paths of lost files to their state. If a file of an older checkpoint
    replaces a lost one, `older` is this checkpoint; its weights are compared too.
    """
    weights = [entry for entry in manifest.entries.values() if entry.slot == "param"]
    if all(is_whole(entry, lost) for entry in weights):
        return True
    entries = {key: each for key, each in manifest.entries.items() if is_whole(each, lost)}
    for weight in weights:
        rest, ranges = kept(weight, lost)
        master = entries.get((weight.parameter, "master"))
        if rest is not weight and master is not None and master.shape == weight.shape:
            entries[weight.key], entries[master.key] = rest, masters.part_of(master, ranges)
    replicas = tuple(
        entry
        for entry in manifest.replicas
        if is_whole(entry, lost) and entries.get(entry.key) is manifest.entries.get(entry.key)
    )
    left = manifest.replace(entries=entries, replicas=replicas)
    sources = [left] if older is None else [left, older]
    return not any(masters.unlike(source, masters.BEGINNINGS) for source in sources)


def may_drift(copy: Entry) -> bool:
    """Whether the engine lets this replica of a master or optimizer state differ from the others.

    Each pipeline stage updates its own replicas for a tied layer.
    """
    return copy.slot != "param" and copy.axis in AXES and AXES[copy.axis].drift


def copies_of_stages(manifest: Manifest, lost: Mapping[str, str]) -> dict[Key, Entry]:
    """Finds replicas on other pipeline stages for a tied layer's masters and optimizer states.

    Returns them by key. They are in no lost file, but may have other values than the lost replicas.
    """
    # with these replicas all stages go on alike; with zeros, stages would update a tied weight
    # differently
    groups = by_key((copy.key, copy) for copy in manifest.replicas if copy.slot != "param")
    return {
        key: whole
        for key, copies in groups.items()
        if any(map(may_drift, copies))
        for whole in [each for each in (manifest.entries[key], *copies) if is_whole(each, lost)][:1]
    }


def is_whole(entry: Entry, lost: Mapping[str, str]) -> bool:
    """Whether no element of a tensor is in a lost file."""
    return not any(fragment.extent.file in lost for fragment in entry.fragments)
