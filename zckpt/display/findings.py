"""Prints the findings of verify, diff, stats, probe-diff, check and report."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from ..core.checkpoint.entries import key_of
from ..core.checkpoint.inert import PYTHON_NUMBERS
from ..core.checkpoint.layers import places_of
from ..core.grouping import neighbors
from ..errors import counted, listed, safe, short, sized
from .picture import SPARKS, curves, drawn, layers
from .tables import DIGITS, cell, table
from .terminal import (
    RED,
    YELLOW,
    brief,
    checked,
    first_of,
    painted,
    spoken,
    states,
    unchecked,
    warn,
    warned,
)


def verified(report: dict[str, Any], quiet: bool, wide: bool = False) -> None:
    """Prints the report of `verify`."""
    warn(report.get("warnings", ()), quiet)
    findings = [*findings_of(report), *_count(report)]
    path, other = safe(report["path"]), report["against"]
    if not quiet or findings:
        relation = _relation(report, bool(findings))
        print(f"{painted(relation, RED) if findings else relation}: {_about(report)}")
    _differences(report["differences"], wide)
    for line in findings:
        print(line)
    if not quiet:
        if instead := report.get("instead"):
            print(f"next: resume from {safe(instead)}, which is complete according to its metadata")
        if step := report.get("mend") or report.get("rebuild"):
            print(f"next: {step['what']}: {safe(step['command'])}")
        _one_sided(report, path, other)
        _remarks(report)
        unchecked(report)
        if names := report.get("names_of_reader"):
            print(
                "names that no file states (--gather checked only the elements of these tensors): "
                f"{safe(listed(names))}"
            )
        for side, names in report.get("inferred", {}).items():
            if names:
                where = path if side == "a" else safe(other)
                print(f"names inferred in {where}: {safe(listed(names))}")


def verified_in_a_line(report: dict[str, Any], quiet: bool) -> None:
    """Prints the report of `verify` in one line, for one of several paths.

    The line has the first finding, and how many more there are.
    """
    lines = [*findings_of(report), *_count(report)]
    findings = [line for line in lines if not line.startswith("  ")]  # without hints
    if findings:
        print(f"{painted(_relation(report, True), RED)}: {first_of(findings)}")
    elif not quiet:
        print(f"{_relation(report, False)}: {_about(report)}{warned(report['warnings'])}")


def _relation(report: dict[str, Any], is_wrong: bool) -> str:
    """What a line of `verify` says about a path: consistent, equal to another, or what is wrong.

    The other is the checkpoint or proof with which it was compared, if any.
    """
    path, other = safe(report["path"]), report["against"]
    if kinds := _unread(report):
        alone = UNREADABLE.get(kinds[0], "contradicts itself")
        return f"{path} {f'was not compared with {safe(other)}' if other else alone}"
    relation = f"equals {safe(other)}" if other else "is consistent"
    if any(report.get("rounded", {}).values()):
        relation += " up to rounding"
    if is_wrong:
        relation = f"differs from {safe(other)}" if other else _fault(report)
    if is_wrong and not any(report.get(key) for key in DIFFERENCES):
        relation = f"has the same bytes as {safe(other)}, but this proves nothing"
    if report.get("lacking") and not any(report.get(key) for key in DIFFERENCES[1:]):
        relation += f": {_both_have(report)}"
    return f"{path} {relation}{_selection(report)}"


def _fault(report: dict[str, Any]) -> str:
    """A phrase for what is wrong with a checkpoint, such as `is damaged` or `contradicts itself`.

    It says so if all damage is in files that resuming does not read.
    """
    codes = {line["code"] for line in report["problems"]}
    if codes and codes <= {*DAMAGED} and not any(report.get(key) for key in OF_VALUES):
        return "is damaged"
    is_of_files = codes <= {*NOT_WHOLE, UNREAD}
    if not is_of_files or any(report.get(key) for key in OF_VALUES):
        return "contradicts itself"
    return "is not whole" if codes - {UNREAD} else "has damaged files that resuming does not read"


UNREADABLE = {"IncompleteCheckpoint": "is not whole", "CorruptCheckpoint": "is damaged"}
"""What is wrong with a checkpoint that could not be read, by the class of the error."""


def _unread(report: dict[str, Any]) -> list[str]:
    return [line["error"] for line in report.get("problems", ()) if "error" in line]


def _about(report: dict[str, Any]) -> str:
    """A phrase on what `verify` has read: tensors, bytes, step, seconds, checksums, ranks."""
    if _unread(report):
        return "no tensor was read"
    step = "" if report.get("step") is None else f", step {report['step']}"
    about = f"{_tensors(report)}, {sized(report['bytes'])} read{step}"
    about += f", {report['seconds']:.1f} s" + checked(report)
    if report["gathered"]:
        processes = counted(report["world"], "process", "processes")
        about += f", gathered on {report['device']} by {processes}"
    return about


def _selection(report: dict[str, Any]) -> str:
    flags = report.get("selection")
    return f" ({safe(' '.join(flags))})" if flags else ""


def _both_have(report: dict[str, Any]) -> str:
    """A phrase on how many equal tensors both sides have, and how many only one side has.

    It is for reports in which the only differences are optimizer states that one side lacks.
    """
    alone = [
        f"{count:,} {'is' if count == 1 else 'are'} in {safe(_side(report, side))} alone"
        for side in "ab"
        if (count := sum(line["tensors"] for line in report["lacking"] if line["only"] == side))
    ]
    rounded = " up to rounding" if any(report.get("rounded", {}).values()) else ""
    equal = f"the {counted(report['tensors'], 'tensor')} that both have are equal{rounded}"
    return "; ".join([equal, *alone])


def _side(report: dict[str, Any], side: str) -> object:
    """The path of one side of a comparison, whose key differs in reports of `verify` and `diff`."""
    return report.get(side) or report[{"a": "path", "b": "against"}[side]]


def _tensors(report: dict[str, Any]) -> str:
    slots = ", ".join(f"{count:,} {safe(slot)}" for slot, count in report["slots"].items())
    return counted(report["tensors"], "tensor") + (f" ({slots})" if slots else "")


def differing(report: dict[str, Any], quiet: bool, wide: bool = False) -> None:
    """Prints the report of `diff`."""
    tensors = counted(report["tensors"], "tensor")
    findings = [*findings_of(report)]
    if _are_two_models(report):
        most = max(len(report["only_a"]), len(report["only_b"])) + report["tensors"]
        common = f"{report['tensors']:,} of {most:,} names of tensors in common"
        print(f"{painted('these are two models', YELLOW)}: {common}, {report['seconds']:.1f} s")
        _one_sided(report, report["a"], report["b"])
        if not report["tensors"]:
            print(f"no tensor was compared; {counted(len(findings), 'other value')} differ: --json")
            return
    elif report["equal"]:
        if not quiet:
            print(f"nothing differs{_selection(report)}: {tensors}, {report['seconds']:.1f} s")
    else:
        count = f"{len(report['differences']):,} of {tensors}"
        exception = "" if report["differences"] else ", but the two are not equal"
        differ = "differs" if len(report["differences"]) == 1 else "differ"
        print(f"{painted(f'{count} {differ}{exception}', YELLOW)}, {report['seconds']:.1f} s")
    if report["first"]:
        print(f"first: {safe(report['first'])}\nworst: {safe(report['worst'])}")
    _differences(report.get("results", report["differences"]), wide, all_lines=True)
    for line in findings:
        print(line)
    if not quiet or not report["equal"]:
        if not _are_two_models(report):
            _one_sided(report, report["a"], report["b"])
        _remarks(report)


def _are_two_models(report: dict[str, Any]) -> bool:
    only = min(len(report.get(key) or ()) for key in ("only_a", "only_b"))
    return only > int(report["tensors"])


NOT_WHOLE, UNREAD = ("trainer-file-damaged", "unfinished-save"), "unread-file-damaged"
"""Codes of problems with files.

NOT_WHOLE is for damaged or missing files that resuming needs, UNREAD for damaged files that
resuming does not read.
"""
DIFFERENCES = (
    "lacking", "differences", "problems", "steps", "step_place", "scalars", "groups", "states"
)  # fmt: skip
OF_VALUES = tuple(key for key in DIFFERENCES if key != "problems")
DAMAGED = ("record-damaged", "file-damaged", "file-cut-short")
"""Codes for bytes that changed after they were saved."""


def findings_of(report: dict[str, Any]) -> Iterator[str]:
    """Yields lines about everything in a report that differs or is wrong.

    Tensors that differ are left out: a table lists them.
    """
    lines = (*report.get("problems", ()), *report.get("unproven", ()))
    # a sentence that several files have is printed once
    for line in {(line["message"], line.get("hint")): line for line in lines}.values():
        yield spoken(line)
        if line.get("hint"):
            yield f"  {safe(line['hint'])}"
    for names, line in states(report.get("lacking", ()), "only", "reason"):
        reason = f", and not read: {safe(line['reason'])}" if line.get("reason") else ""
        yield f"{names}: only in {safe(_side(report, line['only']))}{reason}"
    for line in report.get("steps", ()):
        yield f"step {line['a']} against {line['b']}, of {counted(line['parameters'], 'parameter')}"
    for line in report.get("step_place", ()):
        yield f"place of the step: {line['a']} against {line['b']}"
    for line in report.get("scalars", ()):
        where = f"{line['parameter']}, {line['scalar']}"
        a, b = (_number_text(line, side) for side in "ab")
        yield f"{safe(where)}: {a} against {b}"
    for line in report.get("groups", ()):
        where = line["key"] if line["group"] is None else f"group {line['group']}, {line['key']}"
        yield f"{safe(where)}: {brief(line['a'])} against {brief(line['b'])}"
    for line in report.get("states", ()):
        if "only" in line:
            yield safe(f"{line['key']}: only in {_side(report, line['only'])}")
            continue
        yield safe(f"{line['key']}: {brief(line['a'])} against {brief(line['b'])}")


def _count(report: dict[str, Any]) -> Iterator[str]:
    if names := {line["tensor"] for line in report["differences"]}:
        yield f"{counted(len(names), 'tensor')} {'differs' if len(names) == 1 else 'differ'}"


def _number_text(line: dict[str, Any], side: str) -> str:
    """The number that one side has, as a string, in a report line about a number that differs.

    If types or shapes differ between the sides, the string has them too.
    """
    kind = line.get(f"{side}_type")
    if kind is None:
        return str(line[side])
    tensor = "" if kind in PYTHON_NUMBERS else f" tensor of shape {line[f'{side}_shape']}"
    return f"{line[side]} ({safe(kind)}{tensor})"


def _one_sided(report: dict[str, Any], a: object, b: object) -> None:
    for where, names in ((a, report.get("only_a")), (b, report.get("only_b"))):
        if names:
            slots = ", ".join(dict.fromkeys(key_of(name)[1] for name in names))
            example = f"{':' if len(names) == 1 else ', such as'} {safe(names[0])}"
            tensors = f"{counted(len(names), 'tensor')} ({safe(slots)}){example}"
            print(f"only {safe(where)} has {tensors}")


def _remarks(report: dict[str, Any]) -> None:
    for word, key in (("not compared", "not_compared"), ("note", "notes")):
        for line in report.get(key, ()):
            print(f"{word}: {spoken(line)}")


def _differences(lines: Sequence[dict[str, Any]], wide: bool, all_lines: bool = False) -> None:
    """Prints one line per tensor that differs; without `all_lines`, only the first dozen."""
    shown = lines if all_lines else lines[:12]
    cosine = any("cosine" in line for line in shown)
    rows = [
        (
            _named(line),
            *(measured(line, key) for key in ("count", "first")),
            *_distinct_texts(line.get("a"), line.get("b"), wide),
            *_farthest(line),
            _cosine(line),
        )
        for line in shown
        if "count" in line
    ]
    if rows:
        heads = ("tensor", "differing", "first", "a", "b", "max abs", "max ulp", "cosine")
        keep = len(heads) if cosine else len(heads) - 1
        table(
            heads[:keep],
            [row[:keep] for row in rows],
            spare=(("max ulp",), ("first",), ("a", "b"), ("cosine",)),
            style=_differs,
            right=("a", "b", "max abs", "cosine"),
            wide=wide,
        )
    for line in shown:
        for key, word in (("shape", "shape"), ("dtype", "type"), ("crc32", "CRC-32")):
            if f"a_{key}" in line:
                values = f"{word} {line[f'a_{key}']} against {line.get(f'b_{key}')}"
                print(f"{safe(line['tensor'])}: {values}")
    if len(shown) < len(lines):
        print(f"and {len(lines) - len(shown):,} more: --json lists them")


def _named(line: dict[str, Any]) -> str:
    return f"{line['tensor']} in {line['copy']}" if line.get("copy") else str(line["tensor"])


ALL_DIGITS = 17
"""Digits that tell any two float64 apart."""


def measured(line: dict[str, Any], key: str) -> object:
    value = line.get(key)
    if key == "count" and value == 0:
        return "equal"
    return value


def _distinct_texts(a: object, b: object, wide: bool) -> tuple[str, str]:
    """Two numbers as strings with enough digits to see that they differ."""
    few = 4 if sys.stdout.isatty() and not wide else DIGITS[0]
    shown = [(cell(a, digits), cell(b, digits)) for digits in range(few, ALL_DIGITS + 1)]
    return next((pair for pair in shown if pair[0] != pair[1]), shown[-1] if a != b else shown[0])


def _farthest(line: dict[str, Any]) -> tuple[object, object]:
    """Two table cells: the largest absolute distance of two elements, and the largest in ULP.

    If a side has NaN, the first cell says which side, and the second is empty.
    """
    sides = [side for side in "ab" if line.get(f"{side}_nan")]
    if sides:
        return f"NaN in {' and '.join(sides)}", None
    return measured(line, "max_abs"), measured(line, "max_ulp")


def _cosine(line: dict[str, Any]) -> str:
    """The cosine between a tensor's elements in both checkpoints, as a string.

    It has six digits even in a narrow table, because 0.9996 must not become 1.
    """
    value = line.get("cosine")
    return cell(value, DIGITS[0])


def _differs(head: str, value: object) -> str:
    return "yellow" if head == "differing" and value != "equal" else ""


def statistics(report: dict[str, Any], quiet: bool, wide: bool = False) -> None:
    """Prints the report of `stats`: a line per tensor."""
    lines = report["tensors"]
    rare = [key for key in ("nan", "inf") if any(line[key] for line in lines)]
    shown = ("min", "max", "mean", "std", "norm", *rare, "negative", "zero", "positive")
    table(
        ("tensor", "dtype", "shape", *shown, "magnitudes"),
        [
            (
                line["tensor"],
                line["dtype"],
                "x".join(map(str, line["shape"])) or "scalar",
                *(measured(line, key) for key in shown),
                _magnitudes(line["histogram"]),
            )
            for line in lines
        ],
        spare=[*zip(UNUSUAL)],
        style=lambda head, value: "bold red" if head in rare and value else "",
        wide=wide,
    )
    for line in report["not_computed"]:
        print(f"{safe(line['tensor'])}: no statistics for type {line['dtype']}")
    if not quiet:
        step = "" if report["step"] is None else f", step {report['step']}"
        tensors, bytes_read = counted(len(lines), "tensor"), sized(report["bytes"])
        records = checked(report)
        print(f"{tensors}, {bytes_read}{step}, {report['seconds']:.1f} s{records}")
        if sys.stdout.isatty():
            _layers(report)
    warn(report["problems"], quiet)


def _layers(report: dict[str, Any]) -> None:
    """Prints a heat map of the weights, layer by layer.

    It shows the module's weights where they are stored, and the fp32 masters elsewhere.
    """
    cells: dict[str, float] = {}
    for slot in ("master", "param"):
        for line in report["tensors"]:
            name, slot_of_line = key_of(line["tensor"])
            if slot_of_line == slot and line["rms"] is not None:
                cells[name] = float(line["rms"])
    drawn = layers(places_of(cells), cells, shutil.get_terminal_size().columns)
    for number, text in enumerate(drawn):
        print(text if number else f"\nRMS of weights, by kinds and layers:\n{text}")


def reported(document: dict[str, Any], quiet: bool) -> None:
    """Prints in a few lines what the page of `report` shows: the checkpoint and its faults."""
    line = document["line"]
    if not quiet:
        steps = line["steps"] if line["step"] is None else f"step {line['steps']}"
        about = [line["engine"], steps, sized(line["bytes"]), line["checked"]]
        print(f"{safe(document['path'])}: {safe(', '.join(filter(None, about)))}")
    for fault in document["faults"]:
        if fault["fault"]:  # without the kind, as other commands print it
            alone = {**fault, "message": fault["message"].removeprefix(f"{fault['kind']}: ")}
            print(painted(spoken(alone), RED))
        elif not quiet:
            print(spoken(fault))


def probed(report: dict[str, Any], quiet: bool) -> None:
    """Prints the report of `probe-diff`."""
    first, big, steps = report["first"], report["big"], report["steps"]
    where = f"{counted(report['records'], 'record')} of steps {steps[0]} to {steps[-1]}"
    one, other = report["worlds"]
    if one != other:
        where += f", joined from {one} and {other} ranks"
    elif len(report["ranks"]) > 1:
        where += f" and {len(report['ranks'])} ranks"
    if report["circumstances"] and not quiet:
        print(f"the runs differ in: {safe('; '.join(report['circumstances']))}")
    if big:
        print(f"{painted('first big difference', YELLOW)}: {_event(big)}")
        print(f"  {big['meaning']}")
    elif first:
        print(f"no big difference in {where}")
    elif not quiet:
        print(f"no difference in {where}")
    if first and first != big:
        print(f"first difference: {_event(first)}\n  {first['meaning']}")
    if not quiet:
        if first:
            print(f"{report['differing']:,} of {where} differ")
        if report["noise"]:
            print(
                f"noise between {safe(report['a'])} and {safe(report['noise'])}: up to "
                f"{short(report['noise_floor'], 3)}"
            )
        for side in ("a", "b"):
            if names := report[f"only_{side}"]:
                records = counted(len(names), "record")
                print(f"only {safe(report[side])} has {records}, such as {safe(names[0])}")
        if lines := report["unmerged"]:
            print(
                f"not compared: {counted(len(lines), 'tensor')} that cannot be joined, such as "
                f"{spoken(lines[0])}"
            )
        for line in report["notes"]:
            print(f"note: {spoken(line)}")
        if advice := report.get("advice"):
            print(f"note: {spoken(advice)}")
        if first:
            for line in curves(report["metrics"]):
                print(safe(line))
            print()
            columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
            for line in drawn(report["map"], columns):
                print(safe(line))


def _event(event: dict[str, Any]) -> str:
    rank = f", rank {event['rank']}" if event["rank"] else ""
    return safe(
        f"step {event['step']}, batch {event['batch']}{rank}, {event['kind']} of {event['key']}: "
        f"{event['what']} (distance {short(event['distance'], 3)}, "
        f"tolerated {short(event['tolerated'], 3)})"
    )


UNUSUAL = ("positive", "negative", "magnitudes", "shape", "dtype", "norm", "zero", "std")
"""Columns that are omitted on a narrow terminal, in this order."""
WIDTH = 16  # characters of a sparkline


def _magnitudes(histogram: dict[str, Any] | None) -> str | None:
    """Draws a histogram as block characters; the height of each shows a count.

    The line begins with the smallest power of two and ends with the largest. None without a
    histogram.
    """
    if histogram is None:
        return None
    counts = histogram["counts"]
    first, last = histogram["first"], histogram["first"] + len(counts)
    sums = [*map(sum, neighbors(counts, WIDTH))]
    most = max(sums)
    sparks = (SPARKS[-(-count * len(SPARKS) // most) - 1] if count else " " for count in sums)
    return f"2^{first} {''.join(sparks)} 2^{last}"


def fitting(report: dict[str, Any], quiet: bool) -> None:
    """Prints the report of `check`: whether the engine loads the checkpoint, or why not."""
    warn(report["warnings"], quiet)
    reasons = report["obstacles"]
    if report.get("unopened") and not quiet:
        print(f"{counted(report['unopened'], 'item')} not opened: `zckpt verify` opens all")
    if not reasons:  # check reads no tensor, so that it finds no damage in one
        print(f"{_whether_it_loads(report)}; no tensor was read")
        return
    print(f"{_whether_it_loads(report)}: {counted(len(reasons), 'reason')}")
    for reason in reasons:
        print(f"    {spoken(reason)}")
        if reason["hint"] and not quiet:
            print(f"      {safe(reason['hint'])}")
    if report["refused"]:
        print(f"no command makes it fit: {spoken(report['refused'])}")
        if report["refused"]["hint"] and not quiet:
            for line in report["refused"]["hint"].splitlines():
                print(f"    {safe(line)}")
    if report["fix"] and not quiet:
        print(f"this command makes it fit: {safe(report['fix'])}")
    if before := report.get("goes_on_from"):
        path = safe(before["path"])
        how = "which loads as it is" if before["loads"] else "which it first reshards"
        how = how if before["loads"] or not before["refused"] else "which does not load as it is"
        print(f"auto-resume resumes from {path}, {how}, unless it finds damaged bytes in it")


def fitting_in_a_line(report: dict[str, Any], quiet: bool) -> None:
    """Prints the report of `check` in one line, for one of several PATHs."""
    reasons = [spoken(reason) for reason in report["obstacles"]]
    why = f": {first_of(reasons)}" if reasons else ""
    print(f"{_whether_it_loads(report)}{why}{warned([] if quiet else report['warnings'])}")


def _whether_it_loads(report: dict[str, Any]) -> str:
    sizes = ", ".join(f"{name} {size}" for name, size in report["sizes"].items())
    no = painted("does not load as it is", YELLOW)
    relation = "loads as it is" if report["loads"] else no
    about = f" ({report['engine']}, {sizes})" if report["engine"] else ""
    return f"{safe(report['path'])} {relation}{about}"
