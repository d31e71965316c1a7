"""Where two recorded runs first differ much, and what that place says about the cause.

Records are aligned by step, batch, kind and key, in the order of the first run. Equal checksums are
equal bytes. Otherwise the distance is the largest change of samples, extremes, mean and std,
divided by the root mean square of the tensor, or by the number itself if that is larger. So neither
the scale of a tensor nor its extremes influence what a distance means.

A difference is big if it exceeds the tolerance of its type. If two runs of the original were
recorded, it is big if it exceeds four times the noise between them. While these two runs are equal
bit for bit, every difference is big.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.dtypes import FLOATS
from ..errors import MissingData, counted, listed
from . import runs
from .runs import Run, TensorRecord

TOLERANCES = {"F64": 1e-10, "F32": 1e-5, "F16": 4e-3, "BF16": 3e-2}
"""A few times the effect of another order of sums on one layer's output. Other types: 0."""
NOISE = 4  # times the noise between one pair of runs

Report = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Event:
    """One record of both runs: their distance, and the distance that is tolerated."""

    rank: int
    number: int
    a: TensorRecord
    b: TensorRecord
    distance: float
    tolerated: float
    what: str

    @property
    def is_big(self) -> bool:
        return self.distance > self.tolerated


def compare(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    noise: str | os.PathLike[str] | None = None,
) -> Report:
    """The report of `zckpt probe-diff --json`. `noise` is a second run of the program of `a`.

    Raises MissingData if the runs share no record.
    """
    first, second = runs.read(a), runs.read(b)
    third = None if noise is None else runs.read(noise)
    return report(first, second, third)


def report(a: Run, b: Run, noise: Run | None) -> Report:
    events, only_a, only_b = aligned(a, b)
    if not events:
        raise MissingData(
            f"{a.path} and {b.path} share no record",
            hint=f"steps {_range(a.steps)} and {_range(b.steps)}; keys such as "
            f"{_example(a)} and {_example(b)}",
        )
    floor = 0.0
    if noise is not None:
        events, floor = above_noise(events, a, noise)
    differing = [event for event in events if event.distance > 0]
    big = next((event for event in events if event.is_big), None)
    steps = sorted({event.a.step for event in events})
    notes = [*a.notes, *b.notes, *(noise.notes if noise else ())]
    if a.world != b.world:
        notes.append(
            f"{counted(a.world, 'process', 'processes')} against {b.world}: sums have another "
            "order, so equality can only be up to a tolerance"
        )
    if differing and not big and noise is None:
        notes.append("to see whether this is noise, record the original again: --noise RUN")
    blind = [event.a for event in events if not _has_numbers(event.a) or not _has_numbers(event.b)]
    if blind:
        notes.append(
            f"without numbers, {counted(len(blind), 'record')}, such as {_name(blind[0])}: only "
            "shapes were compared"
        )
    one_sided = sorted(set(a.ranks) ^ set(b.ranks))
    if one_sided:
        notes.append(f"only one run recorded rank {listed(list(map(str, one_sided)))}")
    return {
        "zckpt": 1,
        "command": "probe-diff",
        "a": a.path,
        "b": b.path,
        "noise": None if noise is None else noise.path,
        "noise_floor": number(floor) if noise else None,
        "equal": not differing and not only_a and not only_b,
        "records": len(events),
        "differing": len(differing),
        "steps": steps,
        "ranks": sorted({event.rank for event in events}),
        "first": _described(differing[0], steps) if differing else None,
        "big": _described(big, steps) if big else None,
        "only_a": only_a,
        "only_b": only_b,
        "notes": list(dict.fromkeys(notes)),
        "map": heat(events, steps),
    }


def aligned(a: Run, b: Run) -> tuple[list[Event], list[str], list[str]]:
    """Events of both runs, by step and then in the order of `a`, and the records of their common
    steps that only one run has."""
    events: list[Event] = []
    only_a, only_b = dict[str, None](), dict[str, None]()
    steps = set(a.steps) & set(b.steps)
    for rank in sorted(set(a.ranks) & set(b.ranks)):
        theirs = {record.place: record for record in b.ranks[rank]}
        ours = {record.place for record in a.ranks[rank]}
        for number, record in enumerate(a.ranks[rank]):
            other = theirs.get(record.place)
            if other is not None:
                distance, what = apart(record, other)
                tolerated = TOLERANCES.get(record.dtype, 0.0)
                events.append(Event(rank, number, record, other, distance, tolerated, what))
            elif record.step in steps:
                only_a[_name(record)] = None
        for record in b.ranks[rank]:
            if record.place not in ours and record.step in steps:
                only_b[_name(record)] = None
    events.sort(key=lambda event: (event.a.step, event.number, event.rank))
    return events, list(only_a), list(only_b)


def above_noise(events: Sequence[Event], a: Run, noise: Run) -> tuple[list[Event], float]:
    """The events with the tolerance that follows from the noise, and the largest noise."""
    measured = {
        (event.rank, event.a.place): event.distance for event in aligned(a, noise)[0]
    }  # fmt: skip
    reached: dict[tuple[int, str, str], float] = {}
    judged, floor = [], 0.0
    for event in events:
        distance = measured.get((event.rank, event.a.place))
        key = event.rank, event.a.kind, event.a.key
        reached[key] = max(reached.get(key, 0.0), distance or 0.0)
        floor = max(floor, distance or 0.0)
        tolerated = NOISE * reached[key]
        if floor > 0 or distance is None:  # the two tensors may be equal by chance
            tolerated = max(tolerated, TOLERANCES.get(event.a.dtype, 0.0))
        judged.append(
            Event(
                event.rank,
                event.number,
                event.a,
                event.b,
                event.distance,
                tolerated,
                event.what,
            )
        )
    return judged, floor


SMALLEST = 5e-324
"""The distance of tensors with different bytes but equal recorded numbers."""


def apart(a: TensorRecord, b: TensorRecord) -> tuple[float, str]:
    """The distance of two tensors, and the number that shows it."""
    if a.shape != b.shape:
        return math.inf, f"shape {list(a.shape)} against {list(b.shape)}"
    if a.dtype != b.dtype:
        return math.inf, f"type {a.dtype} against {b.dtype}"
    ours, theirs = a.numbers, b.numbers
    known = "crc32" in ours and "crc32" in theirs
    if known and ours["crc32"] == theirs["crc32"]:
        return 0.0, ""
    for key in ("nan", "inf", "negative_inf"):
        if ours.get(key) != theirs.get(key):
            return math.inf, f"{key} {ours.get(key)} against {theirs.get(key)}"
    scale = max(_scale(a), _scale(b))
    worst, what = 0.0, ""
    for name, one, other in _pairs(ours, theirs):
        distance = _apart(one, other, scale)
        if distance > worst:
            worst, what = distance, f"{name} {one:.9g} against {other:.9g}"
    if known and not worst:
        return SMALLEST, "bytes beside the samples"
    return worst, what


def _pairs(a: Any, b: Any) -> Iterator[tuple[str, float, float]]:
    for key in ("mean", "std", "min", "max"):
        if a.get(key) is not None and b.get(key) is not None:
            yield key, float(a[key]), float(b[key])
    for place, (one, other) in enumerate(
        zip(a.get("samples", ()), b.get("samples", ()), strict=False)
    ):
        yield f"sample {place}", float(one), float(other)


def _apart(one: float, other: float, scale: float) -> float:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    distance = abs(one - other)
    scale = max(scale, min(abs(one), abs(other)))
    return distance / scale if scale and math.isfinite(distance) else math.inf


def _scale(record: TensorRecord) -> float:
    """The root mean square; that of the samples if there is no norm, or it exceeds float64."""
    numbers = record.numbers
    norm = float(numbers.get("norm") or 0.0)
    if norm and math.isfinite(norm):
        return norm / math.sqrt(math.prod(record.shape) - numbers["nan"] - numbers["inf"])
    samples = [float(value) for value in numbers.get("samples", ())]
    finite = [value for value in samples if math.isfinite(value)]
    if any(finite):
        return math.hypot(*finite) / math.sqrt(len(finite))
    extremes = (numbers.get("min"), numbers.get("max"))
    return max((abs(float(value)) for value in extremes if value is not None), default=0.0)


# -- the meaning of a difference


def meaning(event: Event, steps: Sequence[int]) -> str:
    """What the first difference says about the two runs, if it is this event."""
    record = event.a
    position = steps.index(record.step)
    if not math.isfinite(event.distance) and event.what.startswith(("shape", "type")):
        ours, theirs = record.shape, event.b.shape
        of_batch = len(ours) == len(theirs) > 0 and ours[1:] == theirs[1:]
        if event.what.startswith("shape") and of_batch and record.kind != "parameter":
            return "the batches on each rank have other sizes: only parameters can be compared"
        return "the models or their precisions differ"
    if record.dtype not in FLOATS and record.kind == "forward":
        return "other integers: the data differ"
    later_batch = record.batch not in ("0", "eval 0")
    if position == 0 and not later_batch:
        if record.kind == "parameter":
            return "this weight differs before the first update: it was not restored"
        if record.kind == "forward":
            return (
                "the first forward: weights, buffers or the first batch of data differ; "
                "`zckpt diff` of the two checkpoints names the tensors"
            )
        return "forwards are equal, the first backward is not: loss scale, masks or dropout"
    if position == 0:
        return (
            "the first batch is equal, a later one of the same step is not: order of the data, or "
            "random state"
        )
    if position == 1 and steps[1] - steps[0] == 1 and not later_batch:
        if record.kind == "backward":
            return "the second forward is equal, its backward is not: loss scale or random state"
        return (
            "equal until the first update: moments, masters, step count or learning rate of the "
            "weights in this module differ; `zckpt diff` of the two checkpoints names them"
        )
    return (
        "equal over updates: order of the data, random state, a schedule, or sums in another order"
    )


def heat(events: Sequence[Event], steps: Sequence[int]) -> Report:
    """The largest distance of each module in each step; None if it was not recorded."""
    columns = {step: column for column, step in enumerate(steps)}
    rows: dict[str, list[float | None]] = {}
    for event in events:
        row = rows.setdefault(event.a.module, [None] * len(steps))
        column = columns[event.a.step]
        row[column] = max(row[column] or 0.0, event.distance)
    return {
        "steps": list(steps),
        "modules": list(rows),
        "distances": [
            [None if value is None else number(value) for value in row] for row in rows.values()
        ],
    }


def number(value: float) -> float | str:
    """The number in a form that JSON can represent."""
    return value if math.isfinite(value) else "inf"


def _described(event: Event, steps: Sequence[int]) -> Report:
    return {
        "rank": event.rank,
        "step": event.a.step,
        "batch": event.a.batch,
        "kind": event.a.kind,
        "key": event.a.key,
        "module": event.a.module,
        "dtype": event.a.dtype,
        "shape": list(event.a.shape),
        "what": event.what,
        "distance": number(event.distance),
        "tolerated": number(event.tolerated),
        "meaning": meaning(event, steps),
    }


def _has_numbers(record: TensorRecord) -> bool:
    """False for tensors on meta, sparse ones, and those that an engine has released."""
    return not math.prod(record.shape) or not {"crc32", "mean"}.isdisjoint(record.numbers)


def _name(record: TensorRecord) -> str:
    return f"step {record.step}, batch {record.batch}, {record.kind} {record.key}"


def _range(steps: Sequence[int]) -> str:
    return f"{steps[0]} to {steps[-1]}" if steps else "none"


def _example(run: Run) -> str:
    for records in run.ranks.values():
        if records:
            return records[0].key
    return "none"
