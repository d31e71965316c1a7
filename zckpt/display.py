"""How results look: tables, progress bars and JSON. The only module that knows rich.

Data go to stdout, everything else to stderr. On a terminal rich draws tables and bars. Without one,
tables are plain columns that grep and awk can read, there are no bars, and rich is not imported.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .core.inert import PYTHON_NUMBERS
from .core.manifest import Entry, Manifest
from .core.patterns import matching
from .errors import WrongOption, listed

BAR = 48  # characters
RANKS = "0123456789abcdefghijklmnopqrstuvwxyz"


def document(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2 if sys.stdout.isatty() else None, allow_nan=False))


def safe(text: object) -> str:
    """`text` without control characters: names in a checkpoint are not trusted."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Rows on stdout, numbers to the right: a table on a terminal, else columns for grep and awk.

    The names in `heads` are empty for a list of facts.
    """
    cells = [[_cell(value) for value in row] for row in rows]
    right = [any(isinstance(row[i], (int, float)) for row in rows) for i in range(len(heads))]
    if sys.stdout.isatty():
        _drawn_table(heads, cells, right)
    else:
        _plain_columns([heads, *cells] if any(heads) else cells, right)


def _drawn_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]
) -> None:
    """A table as wide as the terminal at most; longer cells continue on the next line."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, show_header=any(heads), show_edge=False)
    for head, to_right in zip(heads, right, strict=True):
        drawn.add_column(Text(head), justify="right" if to_right else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*map(Text, row))
    Console(highlight=False).print(drawn)


def _plain_columns(lines: Sequence[Sequence[str]], right: Sequence[bool]) -> None:
    """Columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(line, widths, right, strict=True)
        ]
        print("  ".join(cells).rstrip())


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else safe(value)


def size(count: int) -> str:
    """Bytes for people: 1.49 GB."""
    number = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}" if unit != "B" else f"{count} B"
        number /= 1000
    return f"{number:.3f} TB"


def warn(lines: Sequence[str], quiet: bool) -> None:
    if not quiet and sys.stderr is not None:
        for line in lines:
            print(f"Warning: {safe(line)}", file=sys.stderr)


def summary(report: dict[str, Any], quiet: bool) -> None:
    """The first page of `inspect`."""
    stage = report.get("zero_stage")
    facts = [
        ("checkpoint", report["path"]),
        ("format", f"{report['format']}" + (f", ZeRO stage {stage}" if stage else "")),
        ("written by", f"{report['written_by']} {report.get('version') or ''}"),
        *([("dialect", report["dialect"])] if report.get("dialect") else []),
        ("data-parallel size", str(report.get("dp") or "-")),
        ("tag", report.get("tag")),
        ("step", _cell(report["step"])),
        ("optimizer", report["optimizer"]),
        ("parameters", f"{report['parameters']:,} ({report['elements']:,} elements)"),
        ("files", f"{report['files']:,} ({size(report['bytes'])})"),
    ]
    table(("", ""), facts)
    print()
    table(
        ("slot", "dtype", "tensors", "elements", "bytes"),
        [
            (slot, s["dtype"], s["tensors"], s["elements"], s["bytes"])
            for slot, s in report["slots"].items()
        ],
    )
    for place, group in enumerate(report["groups"] or ()):
        told = ", ".join(
            f"{key} {_brief(value)}" for key, value in group.items() if value is not None
        )
        print(f"\ngroup {place}: {safe(told)}")
    if report["groups"] is None:
        print("\nno hyper-parameters are stored")
    warn(report["problems"], quiet)


def _brief(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def steps(manifest: Manifest) -> None:
    """The step ledger."""
    rows = [
        (line.step, "true" if line.truth else "not used", line.where) for line in manifest.steps
    ]
    table(("step", "", "where"), rows)
    if not manifest.steps:
        print("no place in this checkpoint holds a step")


def tensors(listed: Sequence[dict[str, Any]]) -> None:
    """One line per tensor."""
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
    )


def layout(manifest: Manifest, pattern: str) -> None:
    """A bar per tensor: which file holds which of its elements."""
    chosen = matching(manifest.entries.values(), pattern)
    used = {fragment.extent.file for entry in chosen for fragment in entry.fragments}
    files = [file for file in manifest.files if file in used]
    marks = {file: RANKS[place % len(RANKS)] for place, file in enumerate(files)}
    for file, mark in marks.items():
        print(f"{mark} = {safe(file)}")
    print()
    rows = [(entry.name, _bar(entry, marks), _ranges(entry, marks)) for entry in chosen]
    table(("tensor", "elements, first to last", "where"), rows)


def _bar(entry: Entry, marks: dict[str, str]) -> str:
    width = min(BAR, entry.numel)
    bar = ""
    for place in range(width):
        first = place * entry.numel // width
        here = next(iter(entry.fragments.overlapping(first, first + 1)), None)
        bar += marks[here.extent.file] if here else "?"
    return bar


def _ranges(entry: Entry, marks: dict[str, str]) -> str:
    shown = []
    for place, fragment in enumerate(entry.fragments):
        if place == 4:
            shown.append(f"and {len(entry.fragments) - 4} more")
            break
        shown.append(f"{marks[fragment.extent.file]}:{fragment.start}-{fragment.stop}")
    return " ".join(shown)


def converted(report: dict[str, Any], quiet: bool, told: Sequence[str] = ()) -> None:
    """What `convert` did, or would do; `told` are warnings that stand there already."""
    warn([line for line in report["warnings"] if line not in told], quiet)
    if quiet:
        return
    where = safe(report["target"])
    if report.get("dry_run"):
        print(f"{where} would be {safe(report['about'])}")
        print(f"{size(report['bytes'])} in {len(report['files'])} files:")
        for name in report["files"]:
            print(f"  {safe(name)}")
        print(f"memory {size(report['memory'])}, free space {size(report['free'])}")
        return
    step = "" if report["step"] is None else f", step {report['step']}"
    print(
        f"{where}: {report['tensors']:,} tensors, {size(report['bytes'])}{step}, "
        f"{report['seconds']:.1f} s" + _checked(report["records"])
    )
    print(f"written: {safe(report['about'])}")
    for line in report["left_out"]:
        print(f"left out: {safe(line)}")
    if report["records"]["unchecked"]:
        print(f"{report['records']['unchecked']:,} source records could not be checked (no CRC-32)")


def _checked(records: dict[str, int] | None) -> str:
    return f", {records['checked']:,} records checked" if records and records["checked"] else ""


def can_save(path: str) -> None:
    """Raises WrongOption where no report could be written, before the work is done."""
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise WrongOption(f"{path} cannot be written", hint="name a file in a folder that is there")


def save(path: str, report: dict[str, Any]) -> None:
    """A report as a file, whole or not at all."""
    save_text(path, json.dumps(report, indent=1, allow_nan=False) + "\n")


def save_text(path: str, text: str) -> None:
    """A text as a file, whole or not at all."""
    partial = f"{path}.{os.getpid()}.partial"
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        if os.path.lexists(partial):
            os.unlink(partial)


def verified(report: dict[str, Any], quiet: bool) -> None:
    """What `verify` found."""
    found = [*_findings(report)]
    path, other = safe(report["path"]), report["against"]
    if not quiet or found:
        step = "" if report.get("step") is None else f", step {report['step']}"
        about = f"{report['tensors']:,} tensors, {size(report['bytes'])} read{step}"
        about += f", {report['seconds']:.1f} s" + _checked(report.get("records"))
        if report["gathered"]:
            about += f", gathered on {report['device']} by {report['world']} processes"
        relation = f"equals {safe(other)}" if other else "is consistent"
        if found:
            relation = f"differs from {safe(other)}" if other else "contradicts itself"
        if found and not any(report.get(key) for key in DIFFERENCES):
            relation = f"has the same bytes as {safe(other)}, but this proves nothing"
        print(f"{path} {relation}: {about}")
    _differences(report["differences"])
    for line in found:
        print(line)
    if not quiet:
        _one_sided(report, path, other)
        for line in report.get("notes", ()):
            print(f"note: {safe(line)}")
        for side, names in report.get("inferred", {}).items():
            if names:
                where = path if side == "a" else safe(other)
                print(f"names inferred in {where}: {safe(listed(names))}")


def differing(report: dict[str, Any], quiet: bool) -> None:
    """What `diff` found."""
    if report["equal"]:
        if not quiet:
            print(f"nothing differs: {report['tensors']:,} tensors, {report['seconds']:.1f} s")
    else:
        count = len(report["differences"])
        print(f"{count:,} of {report['tensors']:,} tensors differ, {report['seconds']:.1f} s")
    if report["first"]:
        print(f"first: {safe(report['first'])}\nworst: {safe(report['worst'])}")
    _differences(report.get("results", report["differences"]), all_lines=True)
    for line in _findings(report):
        print(line)
    if not quiet:
        _one_sided(report, report["a"], report["b"])


DIFFERENCES = ("differences", "problems", "steps", "scalars", "groups", "states")


def _findings(report: dict[str, Any]) -> Iterator[str]:
    """Everything that was found beside differences of tensors."""
    for line in (*report.get("problems", ()), *report.get("unproven", ())):
        yield safe(line["message"])
        if line.get("hint"):
            yield f"  {safe(line['hint'])}"
    for line in report.get("steps", ()):
        yield f"step {line['a']} against {line['b']} of {line['parameters']:,} parameters"
    for line in report.get("scalars", ()):
        where = f"{line['parameter']}, {line['scalar']}"
        a, b = (_number_as_kept(line, side) for side in "ab")
        yield f"{safe(where)}: {a} against {b}"
    for line in report.get("groups", ()):
        where = line["key"] if line["group"] is None else f"group {line['group']}, {line['key']}"
        yield f"{safe(where)}: {_brief(line['a'])} against {_brief(line['b'])}"
    for line in report.get("states", ()):
        if "only" in line:
            yield safe(f"{line['key']}: only in {report[line['only']]}")
            continue
        yield safe(f"{line['key']}: {_brief(line['a'])} against {_brief(line['b'])}")
    if report["differences"]:
        names = {line["tensor"] for line in report["differences"]}
        yield f"{len(names):,} tensors differ"


def _number_as_kept(line: dict[str, Any], side: str) -> str:
    """A number of a finding; with its type and shape, where the two sides differ in these."""
    kind = line.get(f"{side}_type")
    if kind is None:
        return str(line[side])
    tensor = "" if kind in PYTHON_NUMBERS else f" tensor of shape {line[f'{side}_shape']}"
    return f"{line[side]} ({safe(kind)}{tensor})"


def _one_sided(report: dict[str, Any], a: object, b: object) -> None:
    for where, names in ((a, report.get("only_a")), (b, report.get("only_b"))):
        if names:
            slots = ", ".join(dict.fromkeys(name.rpartition("/")[2] for name in names))
            told = f"{len(names):,} tensors ({safe(slots)}), as {safe(names[0])}"
            print(f"only {safe(where)} holds {told}")


def _differences(lines: Sequence[dict[str, Any]], all_lines: bool = False) -> None:
    """One line per tensor; the first dozen, unless all are asked for."""
    shown = lines if all_lines else lines[:12]
    cosine = any("cosine" in line for line in shown)
    rows = [
        (_named(line), *(_measured(line, key) for key in MEASURES), _measured(line, "cosine"))
        for line in shown
        if "count" in line
    ]
    if rows:
        heads = ("tensor", "differing", "first", "a", "b", "max abs", "max ulp", "cosine")
        keep = len(heads) if cosine else len(heads) - 1
        table(heads[:keep], [row[:keep] for row in rows])
    for line in shown:
        for key, word in (("shape", "shape"), ("dtype", "type"), ("crc32", "CRC-32")):
            if f"a_{key}" in line:
                told = f"{word} {line[f'a_{key}']} against {line.get(f'b_{key}')}"
                print(f"{safe(line['tensor'])}: {told}")
    if len(shown) < len(lines):
        print(f"and {len(lines) - len(shown):,} more: --json lists them")


def _named(line: dict[str, Any]) -> str:
    return f"{line['tensor']} in {line['copy']}" if line.get("copy") else str(line["tensor"])


MEASURES = ("count", "first", "a", "b", "max_abs", "max_ulp")


def _measured(line: dict[str, Any], key: str) -> object:
    value = line.get(key)
    if key == "count" and value == 0:
        return "equal"
    return f"{value:.6g}" if isinstance(value, float) else value


def statistics(report: dict[str, Any], quiet: bool) -> None:
    """What `stats` found: a line per tensor."""
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
                *(_measured(line, key) for key in shown),
                _magnitudes(line["histogram"]),
            )
            for line in lines
        ],
    )
    for line in report["not_computed"]:
        print(f"{safe(line['tensor'])}: not computed of {line['dtype']}")
    if not quiet:
        step = "" if report["step"] is None else f", step {report['step']}"
        print(
            f"{len(lines):,} tensors, {size(report['bytes'])}{step}, {report['seconds']:.1f} s"
            + _checked(report["records"])
        )
    warn([line["message"] for line in report["problems"]], quiet)


def probed(report: dict[str, Any], quiet: bool) -> None:
    """What `probe-diff` found."""
    first, big, steps = report["first"], report["big"], report["steps"]
    where = f"{report['records']:,} records of steps {steps[0]} to {steps[-1]}"
    if len(report["ranks"]) > 1:
        where += f" and {len(report['ranks'])} ranks"
    if big:
        print(f"first big difference: {_event(big)}")
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
                f"{_short(report['noise_floor'])}"
            )
        for side in ("a", "b"):
            if names := report[f"only_{side}"]:
                told = f"{len(names):,} records, as {safe(names[0])}"
                print(f"only {safe(report[side])} has {told}")
        for line in report["notes"]:
            print(f"note: {safe(line)}")
        if first:
            from .probe.picture import drawn

            print()
            columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
            for line in drawn(report["map"], columns):
                print(safe(line))


def _event(event: dict[str, Any]) -> str:
    rank = f", rank {event['rank']}" if event["rank"] else ""
    return safe(
        f"step {event['step']}, batch {event['batch']}{rank}, {event['kind']} of {event['key']}: "
        f"{event['what']} (distance {_short(event['distance'])}, "
        f"tolerated {_short(event['tolerated'])})"
    )


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


SPARKS = "▁▂▃▄▅▆▇█"


def _magnitudes(histogram: dict[str, Any] | None, width: int = 16) -> str | None:
    """A sparkline of how many numbers have which magnitude, between its powers of two."""
    if histogram is None:
        return None
    counts = histogram["counts"]
    first, last = histogram["first"], histogram["first"] + len(counts)
    each = -(-len(counts) // width)
    sums = [sum(counts[place : place + each]) for place in range(0, len(counts), each)]
    most = max(sums)
    sparks = (SPARKS[-(-count * len(SPARKS) // most) - 1] if count else " " for count in sums)
    return f"2^{first} {''.join(sparks)} 2^{last}"


@contextmanager
def progress(hidden: bool) -> Iterator[Callable[[int], Callable[[int], None]] | None]:
    """A bar on stderr while bytes move, if that is a terminal."""
    if hidden or sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from rich import progress as rich_progress
    from rich.console import Console

    bar = rich_progress.Progress(
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(),
        rich_progress.TransferSpeedColumn(),
        rich_progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:

        def begin(total: int) -> Callable[[int], None]:
            task = bar.add_task("", total=total)
            return lambda count: bar.advance(task, count)

        yield begin
