"""Finds files of a checkpoint that are copies of other files.

Files of `torch.distributed.checkpoint` do not state the rank that wrote them. But ranks hold
different values. So if two files are equal byte by byte, one was copied over the other. A few equal
tensors prove nothing:

    constants     moments before the first update, norms before the first change
    moments       parameters with equal gradients, such as two biases that are added
    weights       experts that were initialized from one layer, layers of a model that was deepened

Some checkpoints have a file for each state of a parameter (DeepSpeed's universal directories). Two
parameters with equal gradients have equal moments of every kind. So a warning is given if two
parameters are equal in one state, but not in another. A weight and a moment, or two kinds of
moments, are never equal, unless they are zero.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain

from ...errors import InconsistentCheckpoint, Notice, warning
from ..checkpoint.dtypes import SIZES
from ..checkpoint.manifest import Manifest
from ..checkpoint.weights import WEIGHTS, WIDE, is_optimizers, states_by_weight
from ..grouping import by_key
from ..storage import sources
from ..storage.fragments import Extent

KINDS = {
    **dict.fromkeys(("param", "master"), "weight"),
    **dict.fromkeys(("exp_avg", "momentum_buffer"), "mean"),
    **dict.fromkeys(("exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg"), "mean of squares"),
}
"""The kind of value in each slot (what a tensor is for its parameter, such as `exp_avg`).

Tensors of two kinds are never equal, unless they are zeros.
"""
# bytes read of each piece; if all elements in them are equal, the tensor counts as constant
SAMPLE = 1 << 12


def check_duplicates(manifest: Manifest) -> list[Notice]:
    """Warns about files with equal bytes that should differ, because one was copied over the other.

    Raises InconsistentCheckpoint if two equal files hold weights and optimizer states, or states of
    several parameters. Constant tensors do not count. Files without checksums are not compared.
    """
    pairs = _pairs(manifest)
    values = _values(manifest, {file for pair in pairs for file in pair}) if pairs else {}
    warnings = []
    for first, second in pairs:
        shared = values.get(first, set()), values.get(second, set())
        if min(map(len, shared)) < 2:  # `_of_single_states` compares files of one tensor
            continue
        if "state" in {kind for own in shared for _, kind in own}:
            raise InconsistentCheckpoint(
                "file-copied-over",
                f"{second} holds the same bytes as {first}, although it should hold other parts of "
                "the model",
                hint="one was copied over the other: copy all files again",
                file=second,
            )
        warnings.append(
            warning(
                "file-copied-over",
                f"{second} holds the same weights as {first}: if these parts of the model should "
                "differ, one was copied over the other",
                file=second,
            )
        )
    return warnings + _of_single_states(manifest, pairs)


def _of_single_states(manifest: Manifest, pairs: Collection[tuple[str, str]]) -> list[Notice]:
    """Warns about equal files that hold one tensor each, if these two tensors should differ.

    `pairs` has the paths of equal files.
    """
    tensors = by_key(
        (file, entry)
        for rank in (manifest.rank_manifests if pairs else ())
        for entry in rank.entries.values()
        for file in {fragment.extent.file for fragment in entry.fragments}
    )
    alone = {file: one for file, (one, *others) in tensors.items() if not others}
    states = states_by_weight(alone.values())
    places = by_key((record.extent.file, record.extent) for record in manifest.files.records)

    equal: dict[tuple[str, str], dict[str, tuple[str, str]]] = {}
    copies = []
    for first, second in pairs:
        if first not in alone or second not in alone:
            continue
        one, other = alone[first], alone[second]
        # rounded weights of two parameters may be equal
        if one.slot == other.slot and (is_optimizers(one.slot) or other.dtype in WIDE):
            equal.setdefault((one.parameter, other.parameter), {})[one.slot] = first, second
        # a weight and a moment, or two kinds of moments
        elif {one.slot, other.slot} <= KINDS.keys() and KINDS[one.slot] != KINDS[other.slot]:
            copies.append(
                (first, second, f"{other.slot} and {one.slot} of a trained model always differ")
            )
    # tensors of one slot should differ if the parameters differ in another optimizer state
    for (parameter, another), of_both in equal.items():
        if not (states.get(parameter, set()) & states.get(another, set())) <= of_both.keys():
            reason = f"optimizer states of {another} and {parameter} in other files differ"
            copies += [(first, second, reason) for first, second in of_both.values()]

    def has_values(first: str, second: str) -> bool:
        # constant weights, such as those of norms, and moments of zeros prove nothing
        size = SIZES[alone[second].dtype]
        if {alone[first].slot, alone[second].slot} <= WEIGHTS:
            return any(is_varied(place, size) for place in places[second])
        return any(any(_sample(place)) for place in places[second])

    return [
        warning(
            "file-copied-over",
            f"{second} holds the same bytes as {first}, but {reason}: one of the files may have "
            "been copied over the other",
            file=second,
        )
        for first, second, reason in copies
        if has_values(first, second)
    ]


def _pairs(manifest: Manifest) -> list[tuple[str, str]]:
    """Pairs of files that state the same offsets, lengths and CRC-32s of their zip members."""
    records = by_key(
        (record.extent.file, (record.extent.offset, record.extent.length, record.crc))
        for record in manifest.files.records
    )
    first: dict[tuple[tuple[int, int, int | None], ...], str] = {}
    pairs = []
    for file, of_file in records.items():
        if all(crc is not None for _, _, crc in of_file):
            other = first.setdefault(tuple(sorted(of_file)), file)
            pairs += [(other, file)] if other != file else []
    return pairs


def _values(manifest: Manifest, files: Collection[str]) -> dict[str, set[tuple[str, str]]]:
    """Maps each file to the tensors in it, as pairs: (`fc1.weight`, `weight` or `state`).

    Constant tensors are left out, because equal constants prove nothing.
    """
    values: dict[str, set[tuple[str, str]]] = {}
    for entry in chain.from_iterable(own.entries.values() for own in manifest.rank_manifests):
        value = entry.parameter, "state" if is_optimizers(entry.slot) else "weight"
        for fragment in entry.fragments if entry.slot != "state" else ():
            extent = fragment.extent
            if extent.file not in files or value in values.get(extent.file, ()):
                continue
            if is_varied(extent, SIZES[entry.dtype]):
                values.setdefault(extent.file, set()).add(value)
    return values


def is_varied(extent: Extent, size: int) -> bool:
    """Whether the first elements of a tensor are not all equal; `size` is bytes per element.

    Two files may have the same constants without being copies.
    """
    data = _sample(extent)
    return data[size:] != data[:-size]


def _sample(extent: Extent) -> bytes:
    with sources.opened(extent.file) as file:
        return sources.pread(file.fileno(), min(extent.length, SAMPLE), extent.offset)
