"""Finds the first big difference of two recorded runs, and its likely cause.

A record is a line about one tensor. Records of both runs are paired by step, batch, kind and key,
in the order of the first run. distances.py measures the distance of two records.

A difference is big if it exceeds the tolerance for the tensor's type. If a second run of the
original program was recorded, a difference must also exceed four times the noise between these two
runs. If the two are equal bit for bit, every difference is big.

Runs with different numbers of ranks are merged first (merging.py). They compute sums in different
orders. The rounding error of a sum over W ranks grows with the square root of W, and every update
adds an error to the weights. So the tolerance is multiplied by the square root of the larger W, and
by the number of updates since the first step.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ..core.comparison.statistics import json_number
from ..core.passes.description import VERSION, Report, said
from ..errors import MissingData, Notice, WrongOption, counted, listed, note
from . import runs
from .distances import SAME, TOLERANCES, apart, has_numbers, tolerance
from .explaining import Surroundings, circumstances, meaning
from .merging import merge
from .runs import Run, TensorRecord

NOISE = 4  # times the noise between one pair of runs


class Event(Struct, frozen=True):
    """Two runs' records of one tensor, the distance between them, and the tolerated distance.

    `what` is a text from `distances.apart`: the two numbers that differ most, or what else differs,
    such as "shape [2] against [3]".
    """

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
    """Compares the recorded runs `a` and `b`; returns the report of `zckpt probe-diff --json`.

    `noise` is a second run of the program of `a`. It shows how much equal programs differ.

    Raises MissingData if `a` and `b` share no record, and WrongOption if `noise` has another number
    of ranks than `a`.
    """
    first, second = runs.read(a), runs.read(b)
    third = None if noise is None else runs.read(noise)
    return report(first, second, third)


def report(a: Run, b: Run, noise: Run | None) -> Report:
    if noise is not None and noise.world != a.world:
        raise WrongOption(
            "nothing-to-compare",
            f"{noise.path} is a run of {noise.world} ranks, and {a.path} of {a.world}",
            hint="give --noise a second run of the first run's program, on as many ranks",
        )
    notes = [*a.notes, *b.notes, *(noise.notes if noise else ())]
    worlds, unmerged = (a.world, b.world), list[Notice]()
    original = a
    if is_merged := a.world != b.world:
        merged = merge(a, b)
        a, b, unmerged = merged.a, merged.b, merged.unmerged
        notes.append(_about_merging(worlds, merged.order))
    events, only_a, only_b = aligned(a, b)
    if not events:
        raise MissingData(
            "nothing-to-compare",
            f"no record of {a.path} has the same step, batch and key as one of {b.path}",
            hint=f"steps {_range(a.steps)} and {_range(b.steps)}; keys such as "
            f"{_example(a)} and {_example(b)}",
            file=a.path,
        )
    floor = 0.0
    if noise is not None:
        events, floor = above_noise(events, original, noise, is_merged)
    differing = [event for event in events if event.distance > 0]
    big = next((event for event in events if event.is_big), None)
    steps = sorted({event.a.step for event in events})
    about = Surroundings(steps, a.header, b.header, _equal_weights(events, is_merged))

    def described(event: Event) -> Report:
        if is_merged and not event.is_big:
            return _described(event, "sums in another order can cause a difference of this size")
        return _described(
            event, meaning(event.a, event.b, event.what, event.rank, about, is_merged)
        )

    if differing and not big and noise is None:
        again = "to see whether this is noise, record the original again: --noise RUN"
        notes.append(note("not-compared", again))
    notes += _not_compared(events, a, b)
    return {
        "zckpt": VERSION,
        "command": "probe-diff",
        "a": a.path,
        "b": b.path,
        "noise": None if noise is None else noise.path,
        "noise_floor": json_number(floor) if noise else None,
        "equal": not differing and not only_a and not only_b,
        "records": len(events),
        "differing": len(differing),
        "steps": steps,
        "ranks": sorted({event.rank for event in events}),
        "circumstances": list(circumstances(a.header, b.header)),
        "first": described(differing[0]) if differing else None,
        "big": described(big) if big else None,
        "only_a": only_a,
        "only_b": only_b,
        "worlds": list(worlds),
        "unmerged": said(unmerged),
        "notes": said(notes),
        "metrics": metrics(events),
        "map": heat([event for event in events if event.a.kind not in ("metric", "input")], steps),
    }


def _equal_weights(events: Sequence[Event], is_merged: bool) -> dict[tuple[int, int, str], bool]:
    """Maps rank, step and name of each recorded parameter to whether it is equal in both runs.

    If the ranks' records were merged (`is_merged`), a difference within the tolerance is equal.
    """
    return {
        (event.rank, event.a.step, event.a.key): not (event.is_big if is_merged else event.distance)
        for event in events
        if event.a.kind == "parameter"
    }


def _not_compared(events: Sequence[Event], a: Run, b: Run) -> Iterator[Notice]:
    """Yields notes about records without statistics, and about ranks that only one run has."""
    blind = [event.a for event in events if not has_numbers(event.a) or not has_numbers(event.b)]
    if blind:
        yield note(
            "not-compared",
            f"{counted(len(blind), 'record')} without statistics, such as {_name(blind[0])}: only "
            "shapes were compared",
        )
    if one_sided := sorted(set(a.ranks) ^ set(b.ranks)):
        ranks = listed(list(map(str, one_sided)))
        yield note("not-compared", f"only one run recorded rank {ranks}")


def _about_merging(worlds: tuple[int, int], order: str) -> Notice:
    rows = {
        "first": "the rows of all ranks are joined, those of rank 0 first",
        "in turns": "the rows of all ranks are joined, one row of each rank in turns",
        "unknown": "ranks get other rows, so what depends on the order of rows is not compared",
    }[order]
    return note(
        "not-exact",
        f"{counted(worlds[0], 'process', 'processes')} against {worlds[1]}: {rows}; sums have "
        "another order, so equality can only be up to a tolerance",
    )


def aligned(a: Run, b: Run) -> tuple[list[Event], list[str], list[str]]:
    """Pairs the records of two runs that are about the same tensor in the same step and batch.

    Pairs are sorted by step, and within a step in the order of run `a`. Also returns the names of
    records of `a` and of `b` without a partner, for steps that both runs have.
    """
    events: list[Event] = []
    only_a, only_b = dict[str, None](), dict[str, None]()
    steps = sorted(set(a.steps) & set(b.steps))
    worlds = {a.world, b.world}
    narrowest = max(
        (TOLERANCES.get(record.dtype, 0.0) for records in a.ranks.values() for record in records),
        default=0.0,
    )
    for rank in sorted(set(a.ranks) & set(b.ranks)):
        theirs = {record.place: record for record in b.ranks[rank]}
        ours = {record.place for record in a.ranks[rank]}
        for number, record in enumerate(a.ranks[rank]):
            other = theirs.get(record.place)
            if other is not None:
                distance, what = apart(record, other, len(worlds) > 1)
                tolerated = tolerance(record, narrowest)
                if len(worlds) > 1:
                    addends = math.sqrt(max(worlds)) * (1 + record.step - steps[0])
                    tolerated = max(SAME, tolerated * addends)
                events.append(Event(rank, number, record, other, distance, tolerated, what))
            elif record.step in steps:
                only_a[_name(record)] = None
        for record in b.ranks[rank]:
            if record.place not in ours and record.step in steps:
                only_b[_name(record)] = None
    events.sort(key=lambda event: (event.a.step, event.number, event.rank))
    return events, list(only_a), list(only_b)


def above_noise(
    events: Sequence[Event], a: Run, noise: Run, is_merged: bool
) -> tuple[list[Event], float]:
    """Raises the tolerance of each pair of records to four times the noise of its tensor.

    `a` and `noise` are two runs of one program. The noise is the distance between them: for each
    tensor, the largest so far. Before the first noise, tolerances are 0, unless runs were merged.
    Also returns the largest noise of all tensors.
    """
    measured: dict[tuple[Any, ...], float] = {}
    for event in aligned(a, noise)[0]:
        place = _place_of_noise(event, is_merged)  # for merged records: of all ranks and batches
        measured[place] = max(measured.get(place, 0.0), event.distance)
    reached: dict[tuple[int, str, str], float] = {}
    judged, floor = [], 0.0
    for event in events:
        distance = measured.get(_place_of_noise(event, is_merged))
        key = event.rank, event.a.kind, event.a.key
        reached[key] = max(reached.get(key, 0.0), distance or 0.0)
        floor = max(floor, distance or 0.0)
        tolerated = NOISE * reached[key]
        # merged runs add in another order, and a tensor without noise may be equal by chance
        if is_merged or floor > 0 or distance is None:
            tolerated = max(tolerated, event.tolerated)
        judged.append(replace(event, tolerated=tolerated))
    return judged, floor


def _place_of_noise(event: Event, is_merged: bool) -> tuple[Any, ...]:
    record = event.a
    return (record.step, record.kind, record.key) if is_merged else (event.rank, *record.place)


# -- the report


def metrics(events: Sequence[Event]) -> Report:
    """The metrics that both runs have, such as the loss: a mean per step for each run."""
    values: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for event in events:
        if event.a.kind == "metric":
            pair = float(event.a.numbers["samples"][0]), float(event.b.numbers["samples"][0])
            values.setdefault(event.a.key, {}).setdefault(event.a.step, []).append(pair)
    return {
        name: {
            "steps": list(by_step),
            "a": [_mean([one for one, _ in pairs]) for pairs in by_step.values()],
            "b": [_mean([other for _, other in pairs]) for pairs in by_step.values()],
        }
        for name, by_step in values.items()
    }


def _mean(values: Sequence[float]) -> Any:
    finite = all(map(math.isfinite, values))
    return json_number(math.fsum(values) / len(values) if finite else sum(values))


def heat(events: Sequence[Event], steps: Sequence[int]) -> Report:
    """Data for a heat map: the largest distance of each module (rows) in each step (columns).

    It is None where nothing was recorded.
    """
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
            [None if value is None else json_number(value) for value in row]
            for row in rows.values()
        ],
    }


def _described(event: Event, explained: str) -> Report:
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
        "distance": json_number(event.distance),
        "tolerated": json_number(event.tolerated),
        "meaning": explained,
    }


def _name(record: TensorRecord) -> str:
    return f"step {record.step}, batch {record.batch}, {record.kind} {record.key}"


def _range(steps: Sequence[int]) -> str:
    return f"{steps[0]} to {steps[-1]}" if steps else "none"


def _example(run: Run) -> str:
    return next((records[0].key for records in run.ranks.values() if records), "none")
