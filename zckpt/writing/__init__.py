"""How a manifest becomes a checkpoint of another format or size, and the report about it.

The target gets the source's tensors under the names and in the groups that its engine needs; what
the target's format lays out is then written by `copying.convert`.

    names.py      the names of the parameters, and their order
    keeping.py    whether the target has every state of the source's optimizer
    several.py    several checkpoints of a trainer's run as one target
    models.py     several models of one program as one target
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from .. import formats
from ..copying.sharing import ALONE, Sharing
from ..core import states
from ..core.manifest import Manifest
from ..core.resources import DEFAULT_COPYING, Begin, Copying, Tell
from ..core.values import replace, valueclass
from ..errors import TargetExists, WrongOption, counted
from ..formats.deepspeed_states import estimates
from ..formats.paths import strange_target
from ..formats.reading import Reading
from ..reading import read
from ..training import objects, steps, ties
from ..training.names import former
from ..training.optimizers import unused_defaults
from ..training.options import (
    ACCEPT_WEIGHTS,
    ALLOW_OBJECT,
    DP,
    DROP_STATE,
    LIKE,
    PARAM_NAMES,
    RENAME,
    Options,
)
from ..version import __version__
from . import models
from .keeping import Keeping, dropped_states
from .names import named_for

if TYPE_CHECKING:
    from ..copying.copy import CopyOutcome
    from ..copying.journal import Identity
    from ..copying.staging import Staging
    from ..core.folder import Folder
    from ..core.layout import Layout, Shell
    from ..formats.format import Format

Report = dict[str, Any]


@valueclass
class Running:
    """How a conversion runs, and whom it informs.

    A `dry_run` reports what would be written, and writes nothing. With `resume` a run continues
    what an earlier one left. `before_rename` is called when all but the last check is done.
    `sharing` says which portions of the target this process writes.
    """

    copying: Copying = DEFAULT_COPYING
    dry_run: bool = False
    begin: Begin | None = None
    tell: Tell | None = None
    resume: bool = False
    before_rename: Callable[[], None] | None = None
    sharing: Sharing = ALONE
    above: Folder | None = None

    @property
    def continues(self) -> bool:
        """Whether what is there already may belong to this run, as other parts do."""
        return self.resume or bool(self.sharing.part)


def read_for(
    target: str | os.PathLike[str],
    source: str | os.PathLike[str],
    reading: Reading,
    options: Options,
    running: Running,
) -> Manifest:
    """The source of a conversion; raises TargetExists before a large source is read.

    If the run continues, there may be a target: whether it fits is known once the source is read.
    """
    from ..copying.targets import refuse_existing, refuse_inside

    if strange := strange_target(os.fspath(target)):
        raise WrongOption(*strange)
    refuse_inside(os.fspath(source), os.fspath(target))
    if not running.continues:
        refuse_existing(os.fspath(target))
    names, weights_only = options[PARAM_NAMES], options.weights_only
    if names is not None and options[RENAME]:  # the user gives the names after renaming
        manifest = read(source, replace(reading, weights_only=True))
        if not formats.named(manifest.format).numbers:  # its reader needs no names
            return manifest
        names = former(manifest, options[RENAME], names)
    return read(source, replace(reading, param_names=names, weights_only=weights_only))


def write(
    command: str,
    manifest: Manifest,
    target: str,
    to: str,
    reading: Reading,
    options: Options,
    running: Running,
    best_in: str | None = None,
) -> Report:
    """Writes `manifest`, which was read as `reading` says, as the directory `target`.

    `to` is the target's format. `best_in` is the directory in which a Trainer's best checkpoint
    will lie. Gives the command's report.
    """
    from ..copying import convert, staging, targets
    from ..core import description, duplicates

    started = time.monotonic()
    format = formats.named(to)
    if not format.writes:
        raise WrongOption(f"zckpt can read {to}, but not write it yet")
    format.refuse(options, _called(command, to))
    parts = models.parts_of(format, manifest, reading, options)
    if not parts:
        models.need_one(format, manifest, options)
    if not format.keeps_estimates and not options.weights_only:
        estimates.need_same_ranks(manifest)
    dropped = dropped_states(manifest, options)
    manifest = states.without(manifest, options[DROP_STATE])
    parts = [states.without(part, options[DROP_STATE]) for part in parts]
    named = models.named(manifest, options) if parts else named_for(format, manifest, options)
    source, layout = _laid_out(format, manifest, named, parts, target, options, best_in)
    files = convert.files_of(layout)
    size = sum(files.values())
    report = _report(command, source, target, format, layout, files, options)
    report["dropped"] = dropped if format.is_resumed else []
    keeping = Keeping(manifest, named, source, format, options, report)
    layout = replace(layout, read_back=keeping.read_back(layout))
    report["warnings"] += steps.unused_policy(manifest, reading.step_policy)
    run = identity(layout.source or manifest, to, reading, options, files)
    if running.continues and targets.is_complete(target, run):
        return report | {"already_complete": True, "seconds": _since(started)}
    if running.tell:
        running.tell(report["warnings"])
    if running.dry_run:
        keeping.try_out(layout)
        memory = convert.memory_of(source, running.copying)
        return report | {"dry_run": True, "memory": memory, "free": targets.free_space(target)}
    targets.need_space(target, size, running.continues)
    origin, accepted = formats.named(manifest.format), options[ACCEPT_WEIGHTS]
    if not origin.is_neutral:  # its manifest states the checksum of each file
        report["warnings"] += duplicates.check_duplicates(manifest)
    report["warnings"] += origin.check(manifest, reading.replicas, accepted)
    if layout.check is not None:
        report["warnings"] += layout.check()
    chunk, before = convert.chunk_size_of(source, running.copying), running.before_rename
    stage = staging.Staging(
        target, run, chunk, running.continues, before, running.sharing, running.above
    )
    try:
        outcome = _filled(stage, format, source, layout, size, running, report["warnings"])
    except (OSError, TargetExists):
        if not running.sharing.part or not targets.is_complete(target, run):
            raise
        outcome = None  # another part has completed the target meanwhile
    report["warnings"] += stage.warnings
    if running.sharing.part:
        report["part"] = str(running.sharing)
    if outcome is None:
        key = "already_complete" if targets.is_complete(target, run) else "waits_for_parts"
        return report | {key: True, "seconds": _since(started)}
    report |= description.advice(source, outcome.bare)
    return report | {
        "tensors": len(outcome.digests),
        "records": {
            "checked": outcome.checked,
            "unchecked": outcome.unchecked,
            "without_checksum": outcome.bare,
        },
        "seconds": _since(started),
        **({"resumed": stage.resumed} if running.continues else {}),
    }


def _called(command: str, to: str) -> str:
    """What the error about an option calls the target, of which the user may have typed nothing."""
    if command == "reshard":
        return f"{to}, the format that reshard keeps"
    if to == "universal":
        return "a universal checkpoint, which convert writes without --to"
    return f"--to {to}"


def _laid_out(
    format: Format,
    manifest: Manifest,
    named: Manifest,
    parts: Sequence[Manifest],
    target: str,
    options: Options,
    best_in: str | None,
) -> tuple[Manifest, Layout]:
    """The source as the target's engine needs it, and the files of the target.

    `named` is the manifest under the target's names; `parts` are its models, if there are several.

    Raises the ZckptError that says why the target cannot be written; no file is written here.
    """
    from ..core.layout import remembered

    def allowed(manifest: Manifest) -> Manifest:
        if format.objects is None:
            return manifest
        return objects.without_others(manifest, formats.engine_objects(), options[ALLOW_OBJECT])

    admitted = allowed(named)
    if parts:
        source, layout = admitted, models.lay_out(format, admitted, [*map(allowed, parts)], options)
    else:
        source, files = format.prepare(admitted)
        layout = _with_files(format.lay_out(source, options), files)
    if format.is_resumed and not format.is_neutral:
        layout = _pointing_to_the_best(layout, source, format.name, target, best_in)
    known = (*manifest.left_out, *layout.left_out)
    own = [line for line in admitted.left_out if line not in known]
    layout = replace(
        layout,
        shells=remembered(layout.shells),
        left_out=[*layout.left_out, *own],
        from_masters=layout.from_masters or options.module_dtype is not None,
    )
    return source, layout


def _filled(
    stage: Staging,
    format: Format,
    source: Manifest,
    layout: Layout,
    size: int,
    running: Running,
    warnings: list[str],
) -> CopyOutcome | None:
    """Writes the files and fills them, `size` bytes in all; `warnings` gets what the bytes show.

    None if another process, or another part, will complete the target. Raises UnsupportedState if
    the files have no place for a state of the source.
    """
    from ..copying import convert

    def seal(root: Folder, shells: Manifest, outcome: CopyOutcome) -> None:
        if warning := steps.never_stepped(shells, outcome.digests):
            warnings.append(warning)
            shells = replace(shells, warnings=(*shells.warnings, warning))
        format.seal(root, shells, outcome)

    return convert.convert(
        layout.source or source,
        stage,
        layout,
        size,
        layout.read_back or format.read_shells,
        seal,
        running.copying,
        running.begin,
    )


def _since(started: float) -> float:
    """Seconds, for a report."""
    return round(time.monotonic() - started, 3)


def identity(
    manifest: Manifest, to: str, reading: Reading, options: Options, files: Mapping[str, int]
) -> Identity:
    """Which conversion this is: another one may not continue what it leaves unfinished."""
    from ..copying.journal import Identity
    from ..core.checksum import crc32

    crc = 0
    for record in manifest.records:
        place = record.extent
        crc = crc32(b"%d %d %d;" % (place.offset, place.length, record.crc or 0), crc)
    source: dict[str, Any] = {"records": f"{crc:08x}"}
    for file, seen in manifest.fingerprints.items():
        source[os.path.relpath(file, manifest.root)] = [seen.size, seen.mtime]
    flags = {option.flag: value for option, value in options.given}
    flags |= {
        "--to": to,
        "--from": reading.format,
        "--tag": reading.tag,
        "--root": reading.root,
        "--step-policy": reading.step_policy,
        "--replicas": reading.replicas,
        "--masters-from-weights": reading.masters_from_weights or None,
        "--tp-rules": reading.tp_rules,
    }
    stated = {flag: value for flag, value in flags.items() if value is not None}
    return Identity(__version__, source, json.loads(json.dumps(stated, default=repr)), dict(files))


def _report(
    command: str,
    manifest: Manifest,
    target: str,
    format: Format,
    layout: Layout,
    files: dict[str, int],
    options: Options,
) -> Report:
    """What can be said before the first byte is written."""
    warnings = list(layout.warnings)
    if not format.overrides_groups or options[LIKE] is not None:
        warnings += unused_defaults(manifest, options)
    warnings += [
        f"the source has no output layer: if the model ties {alias} to {owner}, add --tie "
        f"{alias}={owner}"
        for alias, owner in ([] if format.is_neutral else ties.likely(manifest))
    ]
    takes_dp = DP in format.options and not format.fits_any_dp
    if command == "reshard" and not options.given and takes_dp:
        ranks = counted(manifest.dp, "rank")
        warnings.append(f"no --dp was given: the target is for {ranks}, as the source")
    return {
        "zckpt": 1,
        "command": command,
        "dropped": [],
        "computed_afresh": [],
        "source": {**manifest.source, "path": manifest.root},
        "format": format.name,
        "target": target,
        "about": layout.about,
        "next": layout.loading(target),
        "step": manifest.step,
        "files": list(files),
        "bytes": sum(files.values()),
        "copied": [name for name, _ in layout.siblings],
        "left_out": list(layout.left_out),
        "warnings": warnings,
        "inferred": list(manifest.inferred),
    }


# -- files in the place of siblings


def _with_files(layout: Layout, files: Sequence[Shell]) -> Layout:
    """The layout with these files in place of the siblings of the same names."""
    if not files:
        return layout
    unchanged, names = layout.shells, {file.name for file in files}
    return replace(
        layout,
        shells=lambda: chain(unchanged(), files),
        siblings=[pair for pair in layout.siblings if pair[0] not in names],
    )


def _pointing_to_the_best(
    layout: Layout, manifest: Manifest, to: str, target: str, best_in: str | None
) -> Layout:
    """The layout whose trainer_state.json names the best checkpoint where it will be.

    If the best checkpoint is another one, which is not written too, the layout gets a warning.
    """
    from ..training import best

    path = best.best_of(manifest.siblings)
    if path is None:
        return layout
    if best_in:
        path_of_best = os.path.join(os.path.abspath(best_in), os.path.basename(path))
    elif best.is_best(manifest.siblings):
        path_of_best = os.path.abspath(target)
    else:
        keeps_format = manifest.source.get("format") == to
        line = best.warning(path, manifest.siblings, keeps_format)
        return replace(layout, warnings=[*layout.warnings, line])
    return _with_files(layout, [best.pointing_to(manifest.siblings, path_of_best)])
