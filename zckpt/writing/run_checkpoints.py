"""Writes several checkpoints of a trainer's run as one target, which appears in one step."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from .. import formats
from ..copying import staging, targets, without_locks
from ..copying.journal import Identity
from ..core.passes.description import VERSION, Report, said
from ..core.version import __version__
from ..errors import WrongOption, counted, literal
from ..training import best
from .run_options import Running


def write_run(
    source: str,
    target: str,
    which: str,
    running: Running,
    write_one: Callable[[str, str, Running, str], Report],
) -> Report:
    """Writes several checkpoints of a Trainer's run, which appear at their place together.

    `which` is "all" or "best-and-last". `write_one(source, target, running, best_in)` writes one
    checkpoint; `best_in` is the directory that will contain the best one. Returns the report.
    """
    if not running.sharing.is_alone:
        raise WrongOption(
            "options-conflict",
            "several processes cannot share --checkpoints",
            hint="reshard each checkpoint separately, without --checkpoints, or start one process "
            "with --single",
        )
    if which not in best.CHOICES:
        raise WrongOption(
            "option-invalid", f"--checkpoints {which} is not one of {', '.join(best.CHOICES)}"
        )
    targets.refuse_inside(source, target)
    if not running.resume:
        targets.refuse_existing(target)
    elif not targets.is_taken(target):
        without_locks.refuse(target, "")
    names = best.chosen(source, which, formats.oldest_first)

    def write_all(folder: str, running: Running) -> list[Report]:
        return [
            write_one(os.path.join(source, name), os.path.join(folder, name), running, target)
            for name in names
        ]

    named = dict.fromkeys(names, 0)
    stage = staging.Staging(
        target,
        Identity(__version__, {}, {"--checkpoints": which}, named),
        resume=running.resume,
        before_rename=running.before_rename,
    )
    reports = write_all(stage.path, replace(running, dry_run=True))
    summary = _summary(source, target, names, reports, stage.path)
    if running.resume and targets.is_taken(target):
        reruns = write_all(target, replace(running, dry_run=True))
        lacking = [name for name, r in zip(names, reruns, strict=True) if "dry_run" in r]
        if lacking:
            raise targets.of_another_run(target, f"but it lacks {lacking[0]}")
        return summary | {"already_complete": True, "seconds": 0.0}
    if running.dry_run:
        memory = max(report.get("memory", 0) for report in reports)
        return summary | {"dry_run": True, "memory": memory, "free": targets.free_space(target)}
    targets.need_space(target, summary["bytes"], running.resume)
    with stage:
        inside = replace(running, tell=None, before_rename=None, above=stage.root)
        reports = write_all(stage.path, inside)
    summary["warnings"] += said(stage.warnings)
    # written by this run, not by an earlier one
    written = [report for report in reports if "tensors" in report]
    keys = ("checked", "unchecked", "without_checksum")
    records = {key: sum(r["records"][key] for r in written) for key in keys}
    if running.resume:
        summary["resumed"] = sum(report.get("resumed", report["bytes"]) for report in reports)
    return summary | {
        "tensors": sum(report["tensors"] for report in written),
        "records": records,
        "seconds": round(sum(report["seconds"] for report in written), 3),
    }


def _summary(
    source: str, target: str, names: Sequence[str], reports: Sequence[Report], folder: str
) -> Report:
    """Combines the reports on single checkpoints into the report on all of them."""
    last = "the last one " if len(names) > 1 else ""
    summary: Report = {
        "zckpt": VERSION,
        "command": "reshard",
        "source": {"path": source},
        "format": reports[0]["format"],
        "target": target,
        "about": f"{counted(len(names), 'checkpoint')}, {last}{reports[-1]['about']}",
        "next": reports[-1]["next"].replace(literal(folder)[1:-1], literal(target)[1:-1]),
        "step": reports[-1]["step"],
        **{
            key: [
                os.path.join(name, file)
                for name, report in zip(names, reports, strict=True)
                for file in report[key]
            ]
            for key in ("files", "copied")
        },
        "bytes": sum(report["bytes"] for report in reports),
        "checkpoints": names,
    }
    for key in ("dropped", "computed_afresh"):
        by_state = {line["state"]: line for report in reports for line in report[key]}
        summary[key] = [*by_state.values()]
    for key in ("left_out", "warnings", "inferred"):
        lines = [line for report in reports for line in report[key]]
        summary[key] = [line for place, line in enumerate(lines) if line not in lines[:place]]
    return summary
