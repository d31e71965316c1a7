"""Whether a run's weights are its rounded masters, as far as damaged files show.

A program may save other weights than it trains, such as those of an EMA. Then the masters that are
left show no weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from ..core.checkpoint.dtypes import SIZES
from ..core.checkpoint.entries import Entry
from ..core.checkpoint.manifest import Manifest
from ..core.comparison import masters
from ..core.comparison.replicas import AXES
from ..core.storage.fragments import Fragment, Runs
from ..judging.damaged_source import kept


def masters_round(manifest: Manifest, lost: Mapping[str, str], older: Manifest | None) -> bool:
    """Whether no weights that are left show that the run saved others than its rounded masters.

    These are the weights that are in no `lost` file, and those of `older`, if a file of it stands
    in. Beginnings are compared, and nothing if no weight is lost.
    """
    weights = [entry for entry in manifest.entries.values() if entry.slot == "param"]
    if all(is_whole(entry, lost) for entry in weights):
        return True
    entries = {key: each for key, each in manifest.entries.items() if is_whole(each, lost)}
    for weight in weights:
        rest, ranges = kept(weight, lost)
        master = entries.get((weight.parameter, "master"))
        if rest is not weight and master is not None and master.shape == weight.shape:
            entries[weight.key], entries[master.key] = rest, _part(master, ranges)
    replicas = tuple(
        each
        for each in manifest.replicas
        if is_whole(each, lost) and entries.get(each.key) is manifest.entries.get(each.key)
    )
    left = manifest.replace(entries=entries, replicas=replicas)
    sources = [left] if older is None else [left, older]
    return not any(masters.unlike(source, masters.BEGINNINGS) for source in sources)


def has_drifted(copy: Entry) -> bool:
    """Whether the engine lets a copy of a master or of an optimizer state differ from the others.

    A tied layer's gradients are summed over the stages of a pipeline, but not all of them are.
    """
    return copy.slot != "param" and copy.axis in AXES and AXES[copy.axis].drift


def copy_of_stage(manifest: Manifest, entry: Entry, lost: Mapping[str, str]) -> Entry | None:
    """Another stage's whole copy of a master or optimizer state; None if there is none.

    It may have other values than the lost ones. But with it, both stages go on alike. With zeros,
    the tied weight would get another update in each of them.
    """
    copies = [copy for copy in manifest.replicas if copy.key == entry.key]
    if not any(map(has_drifted, copies)):
        return None
    same = (manifest.entries[entry.key], *copies)
    return next((copy for copy in same if is_whole(copy, lost)), None)


def is_whole(entry: Entry, lost: Mapping[str, str]) -> bool:
    """Whether no element of an entry is in a lost file."""
    return not any(fragment.extent.file in lost for fragment in entry.fragments)


def _part(entry: Entry, ranges: Iterable[tuple[int, int]]) -> Entry:
    """A flat tensor of the elements in these ranges of another one."""
    parts, first = list[Fragment](), 0
    for start, stop in ranges:
        for run in entry.fragments.part(start, stop, SIZES[entry.dtype]):
            parts.append(Fragment(first + run.start, first + run.stop, run.extent))
        first += stop - start
    return replace(entry, shape=(first,), fragments=Runs(parts))
