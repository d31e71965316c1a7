"""Prints what a checkpoint contains (`inspect`), and what a conversion wrote."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from ..core.checkpoint.entries import Entry
from ..core.checkpoint.manifest import Manifest, slot_key
from ..core.passes.description import matching
from ..errors import counted, listed, safe, sized
from .tables import GAP, cell, facts, table
from .terminal import brief, checked, spoken, states, unchecked, warn, warned

BAR, SHORT_BAR, WHERE = 48, 23, 24  # characters
MOST_NAMES = 10  # file names that --dry-run prints
RUN_CODE = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth", ".py")
"""Extensions of files that may run code when a program loads them: pickles, and Python."""
RANKS = "0123456789abcdefghijklmnopqrstuvwxyz"


def summary(report: dict[str, Any], quiet: bool, wide: bool = False) -> None:
    """Prints the report of `inspect`."""
    stage, tp = report.get("zero_stage"), report.get("tp")
    program, version = PROGRAMS.get(report["written_by"]), report.get("version")
    roots = (report.get("roots") or {}).items()
    lines = [
        ("checkpoint", report["path"]),
        ("format", f"{report['format']}" + (f", ZeRO stage {stage}" if stage is not None else "")),
        ("written by", program and (program if version is None else f"{program} {version}")),
        ("dialect", report.get("dialect")),
        ("data-parallel size", str(report.get("dp") or "-")),
        ("sequence-parallel size", report.get("sp") and str(report["sp"])),
        ("tensor-parallel size", tp and str(tp)),
        ("pipeline stages", tp and str(report.get("pp") or "-")),
        ("experts", _experts(report.get("experts") or ())),
        ("tag", report.get("tag")),
        ("step", cell(report["step"])),
        ("optimizer", report["optimizer"] or _unnamed(report)),
        ("models", listed([f"{name} ({', '.join(own)})" if own else name for name, own in roots])),
        ("parameters", f"{report['parameters']:,} ({report['elements']:,} elements)"),
        ("files", f"{report['files']:,} ({sized(report['bytes'])})"),
        ("items not opened", _unopened(report.get("unopened"))),
        ("objects of", listed(report["objects"], 20)),
    ]
    facts([(name, value or "-") for name, value in lines if value or name not in OF_SOME])
    print()
    table(
        ("slot", "dtype", "tensors", "elements", "bytes"),
        [
            (safe(slot_key(slot)), s["dtype"], s["tensors"], s["elements"], s["bytes"])
            for slot, s in report["slots"].items()
        ],
        spare=(("elements",), ("tensors",)),
        wide=wide,
    )
    for names, line in states(report["states"], "form"):
        print(f"\nstates {names}: {safe(line['form'])}")
    for place, group in enumerate(report["groups"] or ()):
        values = ", ".join(
            f"{key} {brief(value)}" for key, value in group.items() if value is not None
        )
        print(f"\ngroup {place}: {safe(values)}")
    if report["groups"] is None:
        print("\nno hyper-parameters are stored")
    warn(report["problems"], quiet)


def _unopened(count: int | None) -> str:
    return (
        f"{count:,}: assumed to be laid out like opened items; `zckpt verify` opens all"
        if count
        else ""
    )


def summary_in_a_line(report: dict[str, Any], quiet: bool) -> None:
    """Prints the report of `inspect` in one line, for one of several PATHs."""
    names = {"zero_stage": "ZeRO stage", **{axis: axis for axis in ("dp", "sp", "tp", "pp", "ep")}}
    sizes = [f"{word} {report[name]}" for name, word in names.items() if report.get(name)]
    step = [] if report["step"] is None else [f"step {cell(report['step'])}"]
    parameters = counted(report["parameters"], "parameter")
    files = f"{sized(report['bytes'])} in {counted(report['files'], 'file')}"
    about = ", ".join([report["format"], *sizes, *step, parameters, files])
    print(f"{safe(report['path'])}: {about}{warned([] if quiet else report['problems'])}")


def _unnamed(report: dict[str, Any]) -> str | None:
    states = report["slots"].keys() - {"param", "master", "state"}
    if {"exp_avg", "exp_avg_sq"} <= states:
        return "Adam-like (not named)"
    return "not named" if states else None


def _experts(layers: Sequence[dict[str, Any]]) -> str:
    kinds = Counter((layer["experts"], layer["ep"]) for layer in layers)
    return ", ".join(
        f"{counted(count, 'layer')} of {experts}, expert-parallel size {ep}"
        for (experts, ep), count in kinds.items()
    )


PROGRAMS = {
    "deepspeed": "deepspeed",
    "dcp": "torch.distributed.checkpoint",
    "onnxruntime": "ONNX Runtime Training",
}
"""The writer's name for formats that only one program writes."""
OF_SOME = frozenset({
    "written by", "dialect", "sequence-parallel size", "tensor-parallel size", "pipeline stages",
    "experts", "models", "objects of", "items not opened",
})  # fmt: skip
"""Rows of the summary that are omitted if they have no value."""


def steps(manifest: Manifest) -> None:
    """Prints every place in the files that stores a step, and whether zckpt uses that step."""
    rows = [
        (cell(line.step), "true" if line.truth else "not used", line.where)
        for line in manifest.run.steps
    ]
    table(("step", "", "where"), rows, prose=True, right=("step",))
    if not manifest.run.steps:
        print("this checkpoint stores no step")


def tensors(listed: Sequence[dict[str, Any]], wide: bool) -> None:
    """Prints a table of tensors, with a line for each."""
    table(
        ("tensor", "dtype", "shape", "elements", "fragments"),
        [
            (
                t["tensor"],
                t["dtype"],
                "x".join(map(str, t["shape"])) or "scalar",
                t["elements"],
                t["count"],
            )
            for t in listed
        ],
        spare=(("fragments",), ("elements",)),
        wide=wide,
    )


def layout(manifest: Manifest, pattern: str, spelled: Callable[[str], str]) -> None:
    """Draws for each tensor which file stores which of its elements.

    `pattern` is a glob for the names of tensors. `spelled` maps a local path to the name to print,
    such as a URL.
    """
    chosen = matching(manifest.entries.values(), pattern)
    used = {fragment.extent.file for entry in chosen for fragment in entry.fragments}
    files = [file for file in manifest.files.paths if file in used]
    marks = {file: RANKS[place % len(RANKS)] for place, file in enumerate(files)}
    for file, mark in marks.items():
        print(f"{mark} = {safe(spelled(file))}")
    print()
    bar = BAR
    if sys.stdout.isatty():  # leaves room for the other columns
        names = max([len(entry.name) for entry in chosen], default=0)
        left = shutil.get_terminal_size().columns - names - WHERE - 2 * GAP
        bar = min(max(left, SHORT_BAR), BAR)
    rows = [(entry.name, _bar(entry, marks, bar), _ranges(entry, marks)) for entry in chosen]
    table(("tensor", "elements, first to last", "where"), rows, prose=True)


def _bar(entry: Entry, marks: dict[str, str], width: int) -> str:
    width = min(width, entry.numel)
    firsts = (place * entry.numel // width for place in range(width))
    fragments = (next(entry.fragments.overlapping(first, first + 1), None) for first in firsts)
    return "".join(marks[fragment.extent.file] if fragment else "?" for fragment in fragments)


def _ranges(entry: Entry, marks: dict[str, str]) -> str:
    shown = [f"{marks[f.extent.file]}:{f.start}-{f.stop}" for f in islice(entry.fragments, 4)]
    more = len(entry.fragments) - len(shown)
    return " ".join([*shown, *([f"and {more} more"] if more else [])])


def converted(report: dict[str, Any], quiet: bool, shown: Sequence[dict[str, Any]] = ()) -> None:
    """Prints the report of a conversion. `shown` are warnings that were already printed."""
    warn([line for line in report["warnings"] if line not in shown], quiet)
    if quiet:
        return
    where = safe(report["target"])
    for key, word in (("dropped", "dropped"), ("computed_afresh", "not written")):
        for lost, line in states(report[key], "reason"):
            print(f"{word}: {lost} ({safe(line['reason'])})")
    if report.get("already_complete") and "sent" in report:
        print(f"{where} is complete: this run has uploaded what an earlier run had written")
        return
    if report.get("already_complete"):
        print(f"{where} is complete already; nothing was written")
        return
    if report.get("waits_for_parts"):
        print(f"part {report['part']} is written; {where} appears when all parts are written")
        return
    if report.get("dry_run"):
        print(f"{where} would be {safe(report['about'])}")
        print(f"{sized(report['bytes'])} in {counted(len(report['files']), 'file')}:")
        names = list(report["files"])
        for name in names[:MOST_NAMES]:
            print(f"  {safe(name)}")
        if len(names) > MOST_NAMES:
            print(f"  and {counted(len(names) - MOST_NAMES, 'other file')}; --json lists all")
        _copied(report["copied"])
        print(f"memory {sized(report['memory'])}, free space {sized(report['free'])}")
        return
    step = "" if report["step"] is None else f", step {report['step']}"
    print(
        f"{where}: {counted(report['tensors'], 'tensor')}, {sized(report['bytes'])}{step}, "
        f"{report['seconds']:.1f} s" + checked(report)
    )
    print(f"written: {safe(report['about'])}")
    if report.get("resumed"):
        print(f"continued: an earlier run had written {sized(report['resumed'])}")
    _copied(report["copied"])
    for line in report["left_out"]:
        print(f"left out: {spoken(line)}")
    unchecked(report)
    if report["next"]:
        print(f"next: {safe(report['next'])}")


def _copied(names: Sequence[str]) -> None:
    if not names:
        return
    files = f"copied unchanged: {counted(len(names), 'file')}"
    risky = [name for name in names if name.lower().endswith(RUN_CODE)]
    if risky := sorted(risky, key=lambda name: not name.endswith(".py")):
        them = "it" if len(risky) == 1 else "them"
        files += f"; {safe(listed(risky, 4))} may run code in the program that loads {them}"
    print(files)
