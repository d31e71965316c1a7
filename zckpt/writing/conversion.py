"""Reads the source of a conversion, and writes the target."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from msgspec import Struct
from msgspec.structs import replace

from .. import formats
from ..copying import convert, staging, targets, without_locks
from ..copying.journal import Identity
from ..copying.sharing import ended
from ..copying.staging import Staging
from ..core.checkpoint import mended, states
from ..core.checkpoint.facts import layers_of
from ..core.checkpoint.manifest import Manifest
from ..core.checkpoint.unlisted import refuse_share
from ..core.comparison import replicas
from ..core.passes import description
from ..core.passes.description import Report, said
from ..core.passes.full_checks import FullCheck
from ..core.passes.layout import CopyOutcome, Layout
from ..core.storage.fileio import write_all
from ..core.storage.folder import Folder
from ..core.storage.records import mark_of
from ..core.storage.sources import files_seen
from ..core.version import __version__
from ..errors import Notice, TargetExists, WrongOption
from ..formats.deepspeed_states import estimates
from ..formats.format import Format
from ..formats.paths import strange_target
from ..formats.reading import Reading
from ..judging import verdict
from ..judging.contents import check_tensors, full_checks
from ..naming.names import about_words, former, names_of, plain_names, unwrapped, without_words
from ..naming.ties import with_ties
from ..reading import read
from ..training import needs, steps
from ..training.lightning import refuse_averages
from ..training.options import (
    ACCEPT_WEIGHTS,
    BUFFERS,
    DP,
    DROP_STATE,
    PARAM_NAMES,
    RENAME,
    TIE,
    Options,
    refuse,
)
from . import effects, models, next_groups
from .names_only import names_only
from .report import report_on
from .run_options import Running
from .state_loss import Keeping, dropped_states, unable_to_step
from .target import has_plain_names, laid_out, named_for

COMPARED_LATE = (
    "if several processes share a conversion, --masters-from-weights finds wrong masters by their "
    "first elements: convert in one process, without --part (--single in a launcher), or take the "
    "weights alone with --weights-only"
)
FEW = 16
"""The number of ranks that `try_out` uses in place of a larger one, to save time."""


def read_for(
    target: str | os.PathLike[str],
    source: str | os.PathLike[str],
    reading: Reading,
    options: Options,
    running: Running,
) -> Manifest:
    """Reads the source of a conversion, after checking that the target may be written.

    Raises TargetExists if the target exists. If the run continues an earlier one, a target may
    exist; it is checked after the source is read.
    """
    if strange := strange_target(os.fspath(target)):
        raise WrongOption("option-invalid", *strange)
    targets.refuse_inside(os.fspath(source), os.fspath(target))
    if not running.continues:
        targets.refuse_existing(os.fspath(target))
    elif not (running.sharing.rank or running.begins_anew or targets.is_taken(os.fspath(target))):
        without_locks.refuse(os.fspath(target), running.sharing.part)
    return read_source(source, reading, options)


def read_source(source: str | os.PathLike[str], reading: Reading, options: Options) -> Manifest:
    """Reads the source as the user's options say, and as the target's options require."""
    names, weights_only = options[PARAM_NAMES], options.weights_only
    if names is not None and options[RENAME]:  # the user gives the names as they are after renaming
        about = reading.format, reading.tag, reading.root
        if formats.find(os.fspath(source), *about).format.numbers:
            manifest = read(source, replace(reading, weights_only=True))
            names = former(manifest, options[RENAME], names)
        else:
            names = None  # the files state them
    return read(source, replace(reading, param_names=names, weights_only=weights_only))


class Decision(Struct, frozen=True):
    """What a conversion is going to write, before any file is made.

    manifest     what was read, without dropped states
    named        `manifest` under the target's names
    grouped      `named` in the param groups of the next run
    source       the manifest whose tensors fill the target's files
    layout       the target's files
    is_loaded    False if the source lacks files or values that resuming needs: no program can then
                 load the target
    """

    manifest: Manifest
    named: Manifest
    grouped: Manifest
    source: Manifest
    layout: Layout
    format: Format
    options: Options
    dropped: Sequence[Report]
    has_models: bool
    is_loaded: bool

    def keeping(self, report: Report) -> Keeping:
        manifests = self.manifest, self.named, self.grouped, self.source
        return Keeping(*manifests, self.format, self.options, report)


def decide(
    command: str,
    manifest: Manifest,
    target: str,
    to: str,
    reading: Reading,
    options: Options,
    best_in: str | None = None,
) -> Decision:
    """Decides what a conversion will write; raises all errors that can be found without tensors.

    The arguments are those of `write`.
    """
    format = formats.named(to)
    if format.options is None:
        raise WrongOption("target-unsupported", f"zckpt can read {to}, but not write it yet")
    resumes = format.is_resumed and not options.weights_only
    verdict_of_source = verdict.of(manifest)
    manifest = manifest.replace(
        warnings=(*manifest.notices.warnings, *verdict_of_source.warnings(resumes))
    )
    if options.weights_only and format.family == "torch":  # other formats write a fresh optimizer
        manifest = needs.for_weights_alone(manifest)
    if manifest.notices.buffers_named:  # when it was read
        options = _without_buffers(options, format)
    refuse(options, _called(command, to), format.options, format.reasons or {})
    verdict.refuse_widened(manifest, options.module_dtype)
    if resumes:
        verdict.refuse_lost(manifest)
        refuse_share(manifest)
    parts = models.parts_of(format, manifest, reading, options)
    if not parts:
        models.need_one(format, manifest, options)
    if not format.keeps_estimates and not options.weights_only:
        estimates.need_same_ranks(manifest)
    dropped = dropped_states(manifest, options)
    manifest = states.without(manifest, options[DROP_STATE])
    parts = [states.without(part, options[DROP_STATE]) for part in parts]
    named = with_ties(manifest, options[TIE]) if parts else named_for(format, manifest, options)
    if parts and has_plain_names(format, manifest, options):
        named, parts = unwrapped(named), [*map(unwrapped, parts)]
    grouped, of_others = next_groups.as_asked(format, named, options)
    dropped = [*dropped, *of_others]
    source, layout = laid_out(format, manifest, grouped, parts, target, options, best_in)
    if format.is_resumed and not (format.is_neutral or layout.in_one_file or options.weights_only):
        refuse_averages(source)
    effects.refuse_unread(options)
    is_loaded = format.is_neutral or not (resumes and verdict_of_source.problems)
    about = format, options, dropped, bool(parts), is_loaded
    return Decision(manifest, named, grouped, source, layout, *about)


def try_out(manifest: Manifest, to: str, reading: Reading, options: Options) -> Decision:
    """Plans a conversion that will not run, to see whether it is possible; raises like `decide`.

    Only if it is necessary, target files without tensor data are made in a temporary folder, to see
    whether they can store all states of the optimizer.
    """
    command = "reshard" if to == manifest.run.origin.format else "convert"
    target = os.path.abspath("DST")
    decision = decide(command, manifest, target, to, reading, options)
    if not decision.keeping({}).is_known:
        report: Report = {"left_out": [], "warnings": [], "computed_afresh": []}
        tried = decide(command, manifest, target, to, reading, _for_few(manifest, options))
        keeping = tried.keeping(report)
        keeping.try_out(replace(tried.layout, read_back=keeping.read_back(tried.layout)))
    return decision


def shells_of(decision: Decision) -> Callable[[str], Manifest]:
    """Returns a function that reads and checks a target's files before they have tensor data.

    The function's argument is their directory. It raises the errors of `write`.
    """
    report: Report = {"left_out": [], "warnings": [], "computed_afresh": []}
    return decision.keeping(report).read_back(decision.layout)


def check_beforehand(decision: Decision, reading: Reading) -> list[Notice]:
    """Runs the checks of a conversion that read tensors; returns warnings.

    `write` makes some of these checks while it copies. Raises the errors of `write`.
    """
    accepted = decision.options[ACCEPT_WEIGHTS]
    warnings = check_tensors(decision.manifest, reading.replicas, accepted)
    of_layout = (check.compare_all() for check in decision.layout.checks)
    return [*warnings, *chain.from_iterable(of_layout)]


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
    """Writes a checkpoint (`manifest`, read with `reading`) as the directory `target`.

    `to` is the target's format. `best_in` is the directory that will contain the Trainer's best
    checkpoint, for its path in trainer_state.json; None if that is not written too. Returns the
    command's report.
    """
    started = time.monotonic()
    decision = decide(command, manifest, target, to, reading, options, best_in)
    format, options, source = decision.format, decision.options, decision.source
    layout, note = decision.layout, running.names
    if note is not None:
        layout = names_only(layout, format, source, note)
    files = convert.files_of(layout)
    size = sum(files.values())
    report = report_on(command, source, target, format, layout, files, options)
    if not decision.is_loaded:
        report["next"] = ""
    report["dropped"] = decision.dropped if format.is_resumed else []
    manifest = decision.manifest
    if has_plain_names(format, manifest, options):
        change = without_words if options[RENAME] or decision.has_models else plain_names
        report["warnings"] += said(about_words(change(names_of(manifest))))
    report["warnings"] += said(unable_to_step(manifest, options))
    keeping = decision.keeping(report)
    whole = replace(decision.layout, read_back=keeping.read_back(decision.layout))
    layout = whole if note is None else layout
    told = {line["subject"] for line in report["warnings"]}
    report["warnings"] += said(
        each for each in effects.unread(manifest, options) if each.subject not in told
    )
    run = _identity(layout.source or manifest, to, reading, options, files)
    if note is not None:
        run = replace(run, options={**run.options, "names": note.decode()})
    (sharing := running.sharing).agree_on(run, target)
    checks = [] if note is not None else _full_checks(manifest, reading, options, layout)
    if sharing.rank:
        read_shells = layout.read_back or format.read_shells
        about = layout.source or source, target, run, layout, read_shells
        convert.take_part(*about, running.copying, sharing, checks, _has_digests(layout))
        return report | {"rank": sharing.rank, "seconds": _since(started)}
    with ended(sharing):
        if running.continues and (there := _there(target, run, running.gives_way)):
            return report | {there: True, "seconds": _since(started)}
        if running.tell:
            running.tell(report["warnings"])
        if running.dry_run:
            if running.resume and (not running.begins_anew or targets.has_locks_at(target)):
                targets.refuse_other_begun(target, run)
            keeping.try_out(whole)
            memory = convert.memory_of(source, running.copying)
            free = targets.free_for(target, running.resume)
            report["warnings"] += said(replicas.not_compared(manifest))
            return report | {"dry_run": True, "memory": memory, "free": free}
        targets.need_space(target, size, running.continues)
        if note is None:  # else whoever loads them asks for that
            unchecked = _without_copied(manifest, layout, layout.source or source)
            findings = check_tensors(unchecked, reading.replicas, options[ACCEPT_WEIGHTS], checks)
            report["warnings"] += said(findings)
        chunk, before = convert.chunk_size_of(source, running.copying), running.before_rename
        arguments = running.continues, before, sharing, running.above, running.begins_anew
        stage = staging.Staging(target, run, chunk, *arguments)
        lines = report["warnings"]
        try:
            outcome = _filled(stage, format, source, layout, size, running, lines, checks)
        except (OSError, TargetExists):
            takes_another = sharing.part or running.begins_anew
            if not takes_another or not _there(target, run, running.gives_way):
                raise
            outcome = None  # another part or run has completed the target meanwhile
        report["warnings"] += said(stage.warnings)
        if sharing.part:
            report["part"] = str(sharing)
        if outcome is None:
            there = _there(target, run, running.gives_way) or "waits_for_parts"
            return report | {there: True, "seconds": _since(started)}
        report |= description.advice(source, outcome.counts.bare)
        return report | {
            "tensors": outcome.tensors,
            "records": outcome.counts.report(),
            "seconds": _since(started),
            **({"resumed": stage.resumed} if running.continues else {}),
        }


def _without_copied(manifest: Manifest, layout: Layout, source: Manifest) -> Manifest:
    """Drops the checksums of files that are copied unchanged, since the copy compares them."""
    copied = {sibling.path for _, sibling in layout.siblings}
    copied_extents = {
        record.extent for record in source.files.records if record.extent.file in copied
    }
    kept = (record for record in manifest.files.records if record.extent not in copied_extents)
    return manifest.replace(records=tuple(kept)) if copied_extents else manifest


def _full_checks(
    manifest: Manifest, reading: Reading, options: Options, layout: Layout
) -> list[FullCheck]:
    """Lists the comparisons of complete tensors that the conversion makes while it copies.

    All processes that share the conversion get the same list.
    """
    hint = COMPARED_LATE if reading.masters_from_weights and reading.is_shared else None
    of_source = full_checks(manifest, reading.replicas, options[ACCEPT_WEIGHTS], hint)
    return [*of_source, *layout.checks]


def _for_few(manifest: Manifest, options: Options) -> Options:
    """Replaces a large `--dp` by FEW, so that a target can be tried out with few files.

    The options are returned unchanged if the number of files may matter for the optimizer's states:
    if `--dp` is the source's number of ranks, or if there are layers with experts.
    """
    dp = options[DP]
    if dp is None or dp <= FEW or dp == manifest.dp or layers_of(manifest.run.engine):
        return options
    pairs = ((option, FEW if option.name == DP.name else value) for option, value in options.given)
    return Options(tuple(pairs))


def _there(target: str, run: Identity, gives_way: bool) -> str:
    """The report's key for a target that exists already; "" if there is none.

    "already_complete" means that the same conversion wrote the target. For any other target, raises
    TargetExists, or returns "is_of_another" if this run `gives_way`.
    """
    try:
        return "already_complete" if targets.is_complete(target, run) else ""
    except TargetExists:
        if not gives_way:
            raise
        return "is_of_another"


def _without_buffers(options: Options, format: Format) -> Options:
    """Drops the option --buffers, which was applied when the source was read.

    It stays if the target's format has an option --buffers too.
    """
    if BUFFERS.name in {known.name for known in format.options or ()}:
        return options
    return Options(tuple(pair for pair in options.given if pair[0].name != BUFFERS.name))


def _called(command: str, to: str) -> str:
    """Names the target's format for errors: `--to FORMAT`, or words if --to was not needed."""
    if command == "reshard":
        return f"{to} (reshard does not change the format)"
    if to == "universal":
        return "a universal checkpoint (convert without --to)"
    return f"--to {to}"


def _filled(
    stage: Staging,
    format: Format,
    source: Manifest,
    layout: Layout,
    size: int,
    running: Running,
    warnings: list[Report],
    checks: Sequence[FullCheck],
) -> CopyOutcome | None:
    """Writes the target; returns None if another process of --part K/N will complete it.

    `size` is the bytes of all files. Warnings about tensors' values are added to `warnings`. Raises
    UnsupportedState if the files cannot store a state of the source.
    """

    def seal(root: Folder, shells: Manifest, outcome: CopyOutcome) -> None:
        for check, differing in zip(checks, outcome.differing, strict=True):
            warnings.extend(said(check.conclude(differing)))
        if warning := steps.never_stepped(shells, outcome.digests):
            warnings.extend(said([warning]))
            shells = shells.replace(warnings=(*shells.notices.warnings, warning))
        if source.notices.mended and not format.is_neutral:  # a neutral format's manifest lists it
            path = mended.path_beside(shells.root)
            with root.opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
                write_all(file, memoryview(mended.text_of(source.notices.mended)), 0)
        if format.functions.seal is not None:
            with root.inner(os.path.join(root.path, layout.inside)) as folder:
                format.functions.seal(folder, shells, outcome)

    return convert.convert(
        layout.source or source,
        stage,
        layout,
        size,
        layout.read_back or format.read_shells,
        seal,
        running.copying,
        running.begin,
        checks,
        _has_digests(layout),
    )


def _has_digests(layout: Layout) -> convert.HasDigests:
    """Returns a function that decides whether to compute a CRC-32 of each tensor.

    They are computed if the target's files contain them, or if the optimizer may not have made its
    first step: only the values of its states show whether it has.
    """
    return lambda shells: layout.has_digests or steps.may_be_unstepped(shells)


def _identity(
    manifest: Manifest, to: str, reading: Reading, options: Options, files: Mapping[str, int]
) -> Identity:
    """Describes this conversion, so that no other one continues its unfinished target."""
    mark = f"{mark_of(manifest.files.records):08x}"
    source = {"records": mark, **files_seen(manifest.root, manifest.files.fingerprints)}
    flags = {option.flag: value for option, value in options.given}
    flags |= {
        "--to": to,
        "--from": reading.format,
        "--tag": reading.tag,
        "--root": reading.root,
        "--step-policy": reading.step_policy,
        "--replicas": reading.replicas,
        "--masters-from-weights": _rebuilt_by(reading) if reading.masters_from_weights else None,
        "--buffers": list(reading.buffers) or None,
        "--follow-links": reading.follow_links or None,
        "--tp-rules": reading.tp_rules,
    }
    given_flags = {flag: value for flag, value in flags.items() if value is not None}
    return Identity(
        __version__, source, json.loads(json.dumps(given_flags, default=repr)), dict(files)
    )


def _rebuilt_by(reading: Reading) -> str:
    """Whether "in one process" or "in several processes" wrong masters are searched for.

    One process finds more of them: several compare only the first elements before they write
    (`reading._rebuilt`).
    """
    return "in several processes" if reading.is_shared else "in one process"


def _since(started: float) -> float:
    return round(time.monotonic() - started, 3)
