"""The section `masters` of a report: how far 16-bit weights are from their fp32 masters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..core.checkpoint.entries import key_of
from ..core.comparison.difference import ULPS
from ..core.passes.description import Report, line_of
from ..errors import counted, problem
from ..judging.damaged_source import Found
from .measuring import Distance, original, place_of


def section(checkpoint: Found, distances: Mapping[str, Distance]) -> Report | None:
    """Makes the section `masters`: how far weights are from their fp32 masters, by layer.

    Distances are in ULP (units in the last place). None if no weight has a master.
    """
    places = checkpoint.places
    rows: dict[int, Report] = {}
    for name, (elements, difference) in distances.items():
        layer = places.row(key_of(name)[0])
        row = rows.setdefault(
            layer,
            {"layer": places.rows[layer], "counts": [0] * len(ULPS), "worst": -1, "tensor": None},
        )
        row["counts"][0] += elements - difference.count
        row["counts"] = [a + b for a, b in zip(row["counts"], difference.ulps, strict=True)]
        worst = difference.max_ulp or 0
        if worst > row["worst"]:
            row |= {"worst": worst, "tensor": checkpoint.numbers.get(name)}
    if not rows:
        return None
    return {
        "bins": list(ULPS),
        "rows": [rows[layer] for layer in sorted(rows)],
        "elements": sum(elements for elements, _ in distances.values()),
        "differ": sum(difference.count for _, difference in distances.values()),
    }


def faults(
    checkpoint: Found,
    distances: Mapping[str, Distance],
    ranges: Mapping[str, Sequence[tuple[int, int]]],
) -> Iterator[Report]:
    """Yields a fault for each fp32 master that does not round to its weight.

    `distances` are those of masters, by name. `ranges` has the element ranges that were read, for
    tensors that were not read completely.
    """
    for name, (elements, difference) in distances.items():
        if not difference.count:
            continue
        entry = checkpoint.known.entries[key_of(name)]
        first = original(difference.first or 0, ranges.get(name))
        file, offset = place_of(entry, first) or (None, None)
        stale = problem(
            "master-differs",
            f"{name} is stale: {difference.count:,} of {counted(elements, 'element')} do not "
            f"round to {entry.parameter}/param, by up to {difference.max_ulp:,} ULP; the first is "
            f"element {first}",
            subject=name,
            file=file,
        )
        yield line_of(stale, kind="stale", fault=True, tensor=name, offset=offset)
