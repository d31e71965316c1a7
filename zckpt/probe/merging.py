"""Merges the records of ranks, to compare runs on different numbers of ranks.

    outputs, inputs     the ranks' rows are concatenated along the batch axis, batch by batch
    their gradients     concatenated too, but divided by the number of ranks, because the loss of
                        a rank is a mean over its rows
    weights             compared once; if ranks disagree, each is compared with the other run
    weights' gradients  the mean over the ranks of the sum over the batches
    single numbers      the mean over the ranks, such as the loss
    equal on all ranks  compared once, such as the embedding of positions

Statistics and CRC-32s of concatenated rows can be computed exactly from those of the parts (see
core/comparison/statistics.py). Of the samples, only those at the same index in both runs are
compared. If the runs have different numbers of batches in a step (gradient accumulation), all
batches of the step are concatenated.

The program decides which rows of a batch a rank gets. Two orders are tried on the inputs of the
model: rank 0 gets the first rows (Accelerate), or ranks get rows in turns (torch's
DistributedSampler). If neither fits, only numbers that do not depend on the order are compared.
Records whose shapes do not fit together are listed and not compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ..core.checkpoint.dtypes import SIZES
from ..core.comparison.statistics import Statistics, json_number
from ..core.grouping import by_key
from ..core.storage.checksum import combine
from ..errors import Notice, note
from .distances import SAME, TOLERANCES, apart
from .runs import OF_WEIGHTS, Run, TensorRecord

Group = tuple[int, str, str, str]
"""The step, batches, kind and key that merged records have in common."""
ALL = "all"
TRIED = 8  # records of inputs that are tried to find which rows a rank takes


class RankRecord(Struct, frozen=True):
    """One rank's record of a tensor, to be merged with the records of other ranks."""

    record: TensorRecord
    rank: int
    batch: int


class Merged(Struct, frozen=True):
    """Two recorded runs, in each of which the records of all ranks were merged.

    Each looks as if it had one rank. `order` tells which rows of a batch each rank got. `unmerged`
    lists records that could not be merged and are not compared.
    """

    a: Run
    b: Run
    order: str
    unmerged: list[Notice]


class Unmerged(Exception):
    """Raised for records of ranks that cannot be merged; the message says why."""


def merge(a: Run, b: Run) -> Merged:
    """Merges the records of all ranks in each run, so that each is like a run on one rank."""
    sides = (a, b)
    labels = _labels(a, b)
    grouped = [_grouped(run, labels) for run in sides]
    order = _order(sides, grouped)
    records: list[list[TensorRecord]] = [[], []]
    unmerged: dict[str, Notice] = {}
    shared: set[tuple[str, str]] = set()
    for group in dict.fromkeys((*grouped[0], *grouped[1])):
        parts = [each.get(group) for each in grouped]
        if parts[0] is None or parts[1] is None:  # `aligned` lists what only one run has
            for records_of_run, parts_of_run in zip(records, parts, strict=True):
                records_of_run += (
                    [replace(parts_of_run[0].record, batch=group[1])] if parts_of_run else []
                )
            continue
        try:
            pair = _merged(group, sides, [parts[0], parts[1]], order, shared)
        except Unmerged as error:
            key = f"{group[2]} {group[3]}"
            unmerged.setdefault(key, note("not-compared", f"{key}: {error}", subject=key))
        else:
            for records_of_run, record in zip(records, pair, strict=True):
                records_of_run.append(replace(record, batch=group[1]))
    one = [
        Run(run.path, run.world, {0: records_of_run}, run.notes, run.headers)
        for run, records_of_run in zip(sides, records, strict=True)
    ]
    return Merged(one[0], one[1], order, [*unmerged.values()])


# -- which records belong together


def _split(batch: str) -> tuple[str, int]:
    """Splits a batch such as `eval 3` into phase and number; the phase of `3` is ""."""
    phase, _, number = batch.rpartition(" ")
    return phase, int(number) if number.isdecimal() else 0


def _labels(a: Run, b: Run) -> set[tuple[int, str]]:
    """The steps and phases (such as "eval") in which both runs have the same number of batches."""
    ours, theirs = (
        by_key(
            ((record.step, phase), number)
            for records in run.ranks.values()
            for record in records
            for phase, number in [_split(record.batch)]
        )
        for run in (a, b)
    )
    return {place for place in ours if place in theirs and max(ours[place]) == max(theirs[place])}


def _grouped(run: Run, labels: set[tuple[int, str]]) -> dict[Group, list[RankRecord]]:
    """Groups the records that become one record; a group is sorted by batch, then by rank.

    Batches of a step and phase (such as "eval") are separate groups if `labels` has these two;
    otherwise they are in one group.
    """
    groups: dict[Group, list[RankRecord]] = {}
    for rank in sorted(run.ranks):  # groups are in the order of the first rank's records
        for record in run.ranks[rank]:
            phase, number = _split(record.batch)
            label = record.batch if (record.step, phase) in labels else f"{phase} {ALL}".strip()
            if record.kind == "parameter":  # recorded once per step, in the first batch
                label = "0"
            group = record.step, label, record.kind, record.key
            groups.setdefault(group, []).append(RankRecord(record, rank, number))
    for parts in groups.values():
        parts.sort(key=lambda part: (part.batch, part.rank))
    return groups


# -- one group


def _merged(
    group: Group,
    sides: Sequence[Run],
    parts: Sequence[list[RankRecord]],
    order: str,
    shared: set[tuple[str, str]],
) -> list[TensorRecord]:
    """Merges the records of all ranks in one group, for each of the two runs.

    Raises Unmerged if the records cannot be merged.
    """
    kind, key = group[2:]
    records = [[part.record for part in own] for own in parts]
    shapes = {record.shape for own in records for record in own}
    if len({record.dtype for own in records for record in own}) > 1:
        return [own[0] for own in records]  # the comparison reports that the types differ
    if kind == "parameter" and len(shapes) == 1:
        return list(max(_pairs(*records), key=lambda pair: _distance(*pair)))
    if kind in ("input", "forward") and len(shapes) == 1 and all(map(_have_equal_bytes, records)):
        shared.add((kind, key))
        return [own[0] for own in records]
    for side, parts_of_run in zip(sides, parts, strict=True):
        _check_complete(side, parts_of_run)
    if kind == "metric":
        return [_mean(own, len(own)) for own in records]
    of_shared = kind == "backward" and ("forward", key) in shared
    if shapes == {()} or kind == "gradient" or of_shared:
        return _summed(kind, shapes, sides, records)
    axis = _axis(shapes)
    rows = [sum(record.shape[axis] for record in own) for own in records]
    if rows[0] != rows[1]:
        raise Unmerged(f"{rows[0]} rows of all ranks against {rows[1]}: the global batches differ")
    placed = [dict(_placed(side, own, axis, order)) for side, own in zip(sides, parts, strict=True)]
    common = sorted(placed[0].keys() & placed[1].keys())
    return [
        _joined(side, records_of_run, axis, order, [values[place] for place in common])
        for side, records_of_run, values in zip(sides, records, placed, strict=True)
    ]


def _distance(a: TensorRecord, b: TensorRecord) -> float:
    return apart(a, b, is_merged=True)[0]


def _pairs(
    ours: Sequence[TensorRecord], theirs: Sequence[TensorRecord]
) -> Iterator[tuple[TensorRecord, TensorRecord]]:
    """Yields pairs of records, one of each run, to find out whether any rank differs.

    The first rank's record of each run is paired with the records of all ranks of the other run.
    """
    yield from ((ours[0], other) for other in theirs)
    yield from ((own, theirs[0]) for own in ours[1:])


def _have_equal_bytes(records: Sequence[TensorRecord]) -> bool:
    crcs = {record.numbers.get("crc32") for record in records}
    return len(crcs) == 1 and None not in crcs


def _check_complete(side: Run, parts: Sequence[RankRecord]) -> None:
    places = {(part.rank, part.batch) for part in parts}
    batches = {part.batch for part in parts}
    for rank in range(side.world):
        if any((rank, batch) not in places for batch in batches):
            raise Unmerged(f"{side.path} has no record of rank {rank}")


def _axis(shapes: set[tuple[int, ...]]) -> int:
    """The axis along which the ranks' rows are concatenated: the only one in which shapes differ.

    If shapes do not show it, the first axis.
    """
    if len({len(shape) for shape in shapes}) > 1:
        raise Unmerged("the numbers of dimensions differ")
    axes = [axis for axis, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]
    if len(axes) > 1:
        raise Unmerged("shapes differ in more than one axis")
    return axes[0] if axes else 0


# -- numbers that are added up


def _summed(
    kind: str,
    shapes: set[tuple[int, ...]],
    sides: Sequence[Run],
    records: Sequence[Sequence[TensorRecord]],
) -> list[TensorRecord]:
    """Merges a tensor's records in each run: the sum over batches, and the mean over ranks.

    Outputs (`kind` "forward") get the mean over batches too, unless the sums of the two runs are
    closer to each other than the means. Raises Unmerged for integers and different shapes.
    """
    if len(shapes) > 1:
        raise Unmerged("the shapes differ between ranks")
    if any(record.dtype[0] in "IUB" and record.dtype != "BF16" for record in records[0]):
        raise Unmerged("integers that differ between ranks cannot be averaged")
    sums = [_mean(own, side.world) for side, own in zip(sides, records, strict=True)]
    means = [_mean(own, len(own)) for own in records]
    if kind != "forward" or _distance(*sums) < _distance(*means):
        return sums
    # programs differ in what a batch's loss is: the full mean, or its share of the step's loss
    return means


def _mean(records: Sequence[TensorRecord], count: int) -> TensorRecord:
    """The record of the sum of several tensors, divided by `count`.

    It has only samples, mean, the numbers of NaN and infinite elements, and an upper bound as
    `norm`.
    """
    first = records[0]
    numbers: dict[str, Any] = {}
    columns = [record.numbers.get("samples", ()) for record in records]
    if len({len(column) for column in columns}) == 1:
        numbers["samples"] = [
            math.fsum(map(float, values)) / count for values in zip(*columns, strict=True)
        ]
    means = [record.numbers.get("mean") for record in records]
    if None not in means:
        numbers["mean"] = math.fsum(float(mean) for mean in means if mean is not None) / count
    norms = [float(record.numbers.get("norm") or 0.0) for record in records]
    # an upper bound, by which differences are divided: if addends cancel each other, the sum is
    # small, but its rounding errors are not
    numbers["norm"] = max(norms) * len(records) / count
    numbers["nan"] = sum(record.numbers.get("nan", 0) for record in records)
    numbers["inf"] = sum(record.numbers.get("inf", 0) for record in records)
    return replace(first, numbers=numbers)


# -- rows that are joined


def _joined(
    side: Run, records: Sequence[TensorRecord], axis: int, order: str, samples: list[Any]
) -> TensorRecord:
    """Makes the record of all ranks' tensors, concatenated along `axis` into one.

    `samples` are elements of the concatenated tensor. Gradients of outputs (kind "backward") are
    divided by the number of ranks.
    """
    first = records[0]
    scale = 1 / side.world if first.kind == "backward" else 1.0
    shape = list(first.shape)
    shape[axis] = sum(record.shape[axis] for record in records)
    numbers: dict[str, Any] = {}
    if all("mean" in record.numbers for record in records):
        statistics = Statistics()
        for record in records:
            statistics.add(_statistics(record))
        numbers = statistics.report()
        for key in ("min", "max", "mean", "std", "norm"):
            if numbers[key] is not None:
                numbers[key] = json_number(float(numbers[key]) * scale)
    crcs = [record.numbers.get("crc32") for record in records]
    whole = axis == 0 and scale == 1 and order == "first" and first.dtype in SIZES
    if whole and None not in crcs:
        crc = 0
        for record, record_crc in zip(records, crcs, strict=True):
            crc = combine(
                crc, int(str(record_crc), 16), math.prod(record.shape) * SIZES[first.dtype]
            )
        numbers["crc32"] = f"{crc:08x}"
    numbers["samples"] = [float(value) * scale for value in samples]
    return replace(first, shape=tuple(shape), numbers=numbers)


def _statistics(record: TensorRecord) -> Statistics:
    numbers = record.numbers
    nan, inf, lower = (int(numbers.get(key, 0)) for key in ("nan", "inf", "negative_inf"))
    statistics = Statistics(nan=nan, positive_inf=inf - lower, negative_inf=lower)
    if finite := math.prod(record.shape) - nan - inf:
        statistics.finite = finite
        statistics.spread = float(numbers["std"] or 0.0) * math.sqrt(finite - 1)
        for key in ("min", "max", "mean", "norm"):
            setattr(statistics, key, float(numbers[key]))
        for key in ("negative", "zero", "positive"):
            setattr(statistics, key, int(numbers[key]))
    return statistics


ORDERS = ("first", "in turns", "unknown")
"""Which rows ranks take: rank 0 the first rows; one row each in turns; unknown."""


def _placed(
    side: Run, parts: Sequence[RankRecord], axis: int, order: str
) -> Iterator[tuple[int, Any]]:
    """Yields each recorded element (sample) of the ranks' tensors, with its index.

    The index is row-major in all ranks' tensors, concatenated along `axis` in the `order`. Yields
    nothing for the order "unknown".
    """
    if order == "unknown" or not side.samples:
        return
    total = sum(part.record.shape[axis] for part in parts)
    inner = math.prod(parts[0].record.shape[axis + 1 :])
    before = begun = 0  # rows of earlier parts, and rows of earlier batches
    batch = parts[0].batch
    for part in parts:
        if part.batch != batch:
            batch, begun = part.batch, before
        rows, count = part.record.shape[axis], math.prod(part.record.shape)
        stride = -(-count // side.samples)
        for number, value in enumerate(part.record.numbers.get("samples", ())):
            outer, rest = divmod(number * stride, rows * inner)
            row, column = divmod(rest, inner)
            row = before + row if order == "first" else begun + row * side.world + part.rank
            yield (outer * total + row) * inner + column, value
        before += rows


def _order(sides: Sequence[Run], grouped: Sequence[dict[Group, list[RankRecord]]]) -> str:
    """Finds out which of ORDERS tells how the rows of a batch were given to ranks.

    An order fits if the first inputs of the model, merged in this order, are equal in both runs
    within the tolerance. Without inputs, outputs are compared. If none fits, it is "first".
    """
    shared = [group for group in grouped[0] if group in grouped[1] and group[2] not in OF_WEIGHTS]
    inputs = [group for group in shared if group[2] == "input"]
    outputs = [group for group in shared if group[2] == "forward"]
    for order in ORDERS:
        tried = agreed = 0
        for group in (inputs or outputs)[:TRIED]:
            parts = [each[group] for each in grouped]
            if any(not part.record.shape for own in parts for part in own):
                continue
            try:
                a, b = _merged(group, sides, parts, order, set())
            except Unmerged:
                continue
            tried += 1
            agreed += _distance(a, b) <= max(SAME, TOLERANCES.get(a.dtype, 0.0))
        if tried and agreed == tried:
            return order
    return ORDERS[0]
