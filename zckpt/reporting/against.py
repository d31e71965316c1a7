"""The section `against` of a report: how a checkpoint differs from another one.

It is made from the report of `zckpt diff`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..core.checkpoint.entries import Entry, key_of
from ..core.comparison.statistics import extent, magnitudes
from ..core.grouping import by_key
from ..core.passes.description import Report, line_of
from ..errors import brief, counted, note
from ..judging.damaged_source import Found
from .numbers import finite

OTHERS = {
    "steps": "steps",
    "step_place": "where the optimizer's step is stored",
    "scalars": "optimizer states that are one number",
    "groups": "groups",
    "states": "values that are not tensors",
    "lacking": "states of the optimizer that both should have",
}
"""The keys of `diff`'s report that are compared by value, not bit for bit, with their names."""


def section(checkpoint: Found, report: Report, other: str, step: Any) -> Report:
    """Makes the section `against`: how a checkpoint differs from another one.

    `report` is the report of `zckpt diff`. `other` and `step` are the path and the step of the
    other checkpoint. The key `proof` lists what was compared, and the results.
    """
    lines = [line for line in report["differences"] if line.get("count")]
    by_name = {line["tensor"]: line for line in lines}
    layers, histograms = _layers(checkpoint, by_name)
    every = Counter[int]()
    for counts in histograms:
        every.update(counts)
    worst = max(lines, key=lambda line: extent(line.get("max_abs")), default=None)
    return {
        "path": other,
        "step": step,
        "layers": layers,
        "histogram": magnitudes(every),
        "histograms": [magnitudes(counts) for counts in histograms],
        "first": _place(checkpoint, lines[0]) if lines else None,
        "worst": _place(checkpoint, worst) if worst else None,
        "proof": [*_proof(report, lines)],
        "not_compared": [*_not_compared(report)],
        "differences": [*_differences(report)],
    }


def _layers(
    checkpoint: Found, lines: Mapping[str, Report]
) -> tuple[list[Report], list[Counter[int]]]:
    """Computes how much each layer's weights changed, and a histogram of the changes per layer.

    If a parameter has an fp32 master, the changes of the master are used. `lines` are those of
    `diff`, by tensor.
    """
    masters = {entry.parameter for entry in checkpoint.entries if entry.slot == "master"}
    by_layer = by_key(
        (checkpoint.places.row(entry.parameter), (number, entry))
        for number, entry in enumerate(checkpoint.entries)
        if entry.slot == ("master" if entry.parameter in masters else "param")
    )
    rows, histograms = [], []
    for layer, weights in sorted(by_layer.items()):
        rows.append(_layer(checkpoint.places.rows[layer], weights, lines))
        counts = Counter[int]()
        for _, entry in weights:
            if histogram := lines.get(entry.name, {}).get("histogram"):
                counts.update(dict(enumerate(histogram["counts"], histogram["first"])))
        histograms.append(counts)
    return rows, histograms


def _layer(name: str, weights: Sequence[tuple[int, Entry]], lines: Mapping[str, Report]) -> Report:
    """Computes how much the weights of one layer changed, as keys for the report.

    `weights` are pairs: the index of a tensor in the report's table of tensors, and the tensor.
    `lines` are those of `diff`, by tensor; they contain only tensors that differ.
    """
    elements = sum(entry.numel for _, entry in weights)
    changed = [(each, entry, lines[entry.name]) for each, entry in weights if entry.name in lines]
    squares = first = 0.0
    for _, entry, line in changed:
        rms, relative = finite(line.get("rms")), finite(line.get("relative"))
        if rms is not None:
            squares += rms * rms * entry.numel
            first += (rms / relative) ** 2 * entry.numel if relative else 0.0
    worst = max(changed, key=lambda each: extent(each[2].get("max_abs")), default=None)
    return {
        # over all weights; `relative` is only over the tensors that differ
        "rms": math.sqrt(squares / elements) if elements else None,
        "relative": math.sqrt(squares / first) if first else None if squares else 0.0,
        "tensor": None if worst is None else worst[0],
        "largest": 0 if worst is None else worst[2].get("max_abs") or 0.0,
        "elements": elements,
        "changed": sum(line["count"] for _, _, line in changed),
        "layer": name,
    }


def _place(checkpoint: Found, line: Report) -> Report:
    """Report keys: a tensor's first differing element, its two values, the largest difference."""
    return {
        "tensor": checkpoint.numbers.get(line["tensor"]),
        "name": line["tensor"],
        "element": line.get("first"),
        "a": line.get("a"),
        "b": line.get("b"),
        "largest": line.get("max_abs"),
    }


def _proof(report: Report, lines: Iterable[Report]) -> Iterator[Report]:
    """Yields a line with the result for each kind of things compared, such as masters or steps.

    Tensors are compared bit by bit, everything else by value.
    """
    unequal = Counter({line["tensor"]: key_of(line["tensor"])[1] for line in lines}.values())
    for slot, count in report["slots"].items():
        differing = unequal[slot]
        verb = "differs" if differing == 1 else "differ"
        result = f"{counted(differing, 'tensor')} {verb}" if differing else "equal"
        yield {"what": f"{counted(count, 'tensor')} of {slot}", "by": "bits", "result": result}
    for key, what in OTHERS.items():
        count = len(report[key])
        result = counted(count, "difference") if count else "equal"
        yield {"what": what, "by": "value", "result": result}


def _not_compared(report: Report) -> Iterator[Report]:
    yield from report["not_compared"]
    for side in ("a", "b"):
        for name in report[f"only_{side}"]:
            message = f"only in {report[side]}: {name}"
            yield line_of(note("not-compared", message, subject=name))
    yield from report["unproven"]


def _differences(report: Report) -> Iterator[Report]:
    """Yields differences in values that are no tensors, and values that one checkpoint lacks."""
    for key in OTHERS:
        for line in report[key]:
            if "only" in line:
                alone = {"a": None, "b": None, line["only"]: "has it"}
                yield {"what": line.get("key") or line.get("state"), **alone}
                continue
            yield {"what": _what(key, line), "a": _plain(line["a"]), "b": _plain(line["b"])}


def _what(key: str, line: Report) -> str:
    if key == "steps":
        return f"step of {counted(line['parameters'], 'parameter')}"
    if key == "step_place":
        return "where the optimizer's step is stored"
    if key == "scalars":
        return f"{line['scalar']} of {line['parameter']}"
    group = line.get("group")
    return str(line["key"]) if group is None else f"{line['key']} of group {group}"


def _plain(value: Any) -> Any:
    return (
        value if value is None or type(value) in (bool, int, str) else finite(value) or brief(value)
    )
