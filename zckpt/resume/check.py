"""The report of `zckpt check`: whether an engine loads a checkpoint, or which command is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from .. import api, formats
from ..core.checkpoint.facts import FlatBufferEngine
from ..core.checkpoint.manifest import Manifest
from ..core.comparison.replicas import not_compared
from ..core.passes.description import VERSION, line_of, said, unopened
from ..errors import NotACheckpoint, Notice, WrongOption, ZckptError, listed, problem, warning
from ..judging.loads import batch_changes, engine_differences, missing_of, obstacles, unlike
from ..judging.verdict import CONTRADICTIONS, Verdict, step_of
from .fitting import (
    CURED,
    MUST_SET,
    REGROUPED,
    Asked,
    Conversion,
    Words,
    conversion,
    sizes_of,
    to_load,
)
from .runs import Candidate, alone, candidates, judged, no_checkpoint

CHANGES = "batch-size-changes"
SAID_WITH_FIX = (MUST_SET, CHANGES, "begins-afresh", "begins-late", "state-dropped")
"""The codes of warnings that are printed with the proposed command."""


class Question(Struct, frozen=True):
    """What the user asks `zckpt check`.

    asked    the sizes of the next run
    like     the path given with `--like`: a checkpoint saved by the program of the next run
    other    the manifest of that checkpoint
    files    maps an option to the file that has its value, for the proposed command
    """

    asked: Asked
    engine: str | None
    like: str | None
    other: Manifest | None
    reading: Mapping[str, Any]
    files: Mapping[str, str]


@api.takes_urls("path", "like")
def check(
    path: str,
    asked: Asked,
    engine: str | None = None,
    like: str | None = None,
    reading: Mapping[str, Any] = {},
    files: Mapping[str, str] = {},
    tag: str | None = None,
) -> Words:
    """Makes the report of `zckpt check`: whether `engine` loads a checkpoint as it is.

    `path` is a checkpoint, or a run: then `tag` chooses a checkpoint, by default the newest.
    Missing or damaged files, and files of different saves, are listed as `obstacles`. If no program
    can resume from it, the key `goes_on_from` is the report on the checkpoint that `auto_resume`
    would take. Raises NotACheckpoint, or another ZckptError.
    """
    checkpoints, older = candidates(path), list[Candidate]()
    first = alone(path)  # weights, maybe
    if tag is not None:
        first = chosen(checkpoints, tag, path)
    elif checkpoints:
        first, *older = checkpoints
    given = {k: v for k, v in reading.items() if v not in (None, (), False)}
    verdict = judged(first, given)
    if isinstance(verdict.error, NotACheckpoint) and not checkpoints:
        raise no_checkpoint(path, verdict.error)
    other = None if like is None else api.read(like, nameless=True)
    question = Question(asked, engine, like, other, given, files)
    pairs = ((each, judged(each, given)) for each in older if verdict.obstacles)
    before = next((pair for pair in pairs if not pair[1].obstacles), None)
    if (
        verdict.error is not None
        and before is None
        and not isinstance(verdict.error, CONTRADICTIONS)
    ):
        raise verdict.error
    goes_on_from = None if before is None else _report(*before, question)
    return {**_report(first, verdict, question), "goes_on_from": goes_on_from}


def chosen(checkpoints: Sequence[Candidate], tag: str, run: str) -> Candidate:
    """Finds the checkpoint of a run by its tag or name; raises WrongOption if there is none."""
    for candidate in checkpoints:
        if tag in (candidate.tag, candidate.name):
            return candidate
    raise WrongOption(
        "option-names-nothing",
        f"{run} has no checkpoint {tag}",
        hint=f"it has {listed([each.name for each in checkpoints])}",
    )


def _report(candidate: Candidate, verdict: Verdict, question: Question) -> Words:
    """The report on one checkpoint; most keys are empty if it cannot be read."""
    report: Words = {
        "zckpt": VERSION,
        "command": "check",
        "path": candidate.where,
        **dict.fromkeys(("format", "engine", "step")),
        "sizes": {},
        "loads": False,
        "obstacles": said(verdict.problems),
        **dict.fromkeys(("fix", "refused")),
        "warnings": said(candidate.notes),
    }
    manifest, other = verdict.manifest, question.other
    if manifest is None:
        return report
    to = formats.named(question.engine).name if question.engine else manifest.format
    words = _as_in(other, manifest, question.asked.of(manifest), to)
    reasons, notes = _reasons(manifest, other, words, to)
    fixed: Words = {}
    if reasons and not verdict.obstacles:  # no conversion finds what is lost
        fixed = _fix(candidate, manifest, to, words, reasons, question)
    if to == manifest.format and (unnamed := to_load(candidate, manifest)):
        reasons.append(problem(MUST_SET, unnamed))
    reasons = [*verdict.obstacles, *reasons]
    own_notes = [each for each in manifest.notices.warnings if each.code == "unfinished-save"]
    own_notes += [*verdict.remarks, *notes, *question.asked.unused(to)]
    if to == manifest.format and (not reasons or "fix" in fixed):
        own_notes += batch_changes(manifest, _as_next_run(words, other), ())
    lines = [*candidate.notes, *not_compared(manifest), *own_notes]
    return {
        **report,
        "format": manifest.format,
        "engine": to,
        "step": step_of(manifest),
        "sizes": sizes_of(words),
        **unopened(manifest),
        "loads": not reasons,
        "obstacles": said(reasons),
        **fixed,
        "warnings": [*said(lines), *fixed.get("warnings", ())],
    }


def _reasons(
    manifest: Manifest, other: Manifest | None, words: Words, to: str
) -> tuple[list[Notice], list[Notice]]:
    """Finds out why a program does not load a complete checkpoint.

    Returns two lists of notices: the reasons, and warnings.
    """
    if to == manifest.format:
        try:
            reasons = [*obstacles(manifest, words), *missing_of(manifest, to, words)]
        except ZckptError as error:
            reasons = [*error.notices]
    else:
        message = f"saved in the format {manifest.format}, but the program loads {to}"
        reasons = [problem("format-differs", message, subject=to)]
    if other is None:
        return reasons, []
    differences = unlike(manifest, other, formats.named(to).loads_by_place)
    differences += engine_differences(manifest, other, to, words)
    return (
        [*reasons, *(each for each in differences if each.severity == "error")],
        [each for each in differences if each.severity != "error"],
    )


def _as_in(other: Manifest | None, manifest: Manifest, words: Words, to: str) -> Words:
    """Adds the ZeRO stage of the run given by `--like` (`other`) to the options `words`.

    The stage is added only if `words` has none, and if it differs from the checkpoint's stage.
    """
    if other is None or not to == manifest.format == other.run.origin.format:
        return words
    stage = other.run.origin.zero_stage
    is_stated = "stage" in words or stage in (None, manifest.run.origin.zero_stage)
    return words if is_stated else {**words, "stage": stage}


def _as_next_run(words: Words, other: Manifest | None) -> Words:
    """Adds options of the DeepSpeed run given by `--like` (`other`), if `words` has none.

    The options are `config` (its ds_config) and `sp` (the sequence-parallel size).
    """
    if other is None or not isinstance(engine := other.run.engine, FlatBufferEngine):
        return words
    given = {name: value for name, value in words.items() if value is not None}
    return {"config": engine.config, "sp": other.run.origin.sequence_ranks(words["dp"]), **given}


def _fix(
    source: Candidate,
    manifest: Manifest,
    to: str,
    words: Words,
    reasons: Sequence[Notice],
    question: Question,
) -> Words:
    """The keys `fix` (a command that removes all `reasons`) and `refused` (why there is none).

    The command is not run: `api.try_out` tells what it would write or refuse.
    """
    other, reading = question.other, question.reading
    regrouped = any(each.code == REGROUPED for each in reasons)
    runs = ["like", *(["groups_from"] if regrouped else [])] if question.like else []
    cure = conversion(manifest, to, words | dict.fromkeys(runs, question.like))
    kept = to == manifest.format  # then the conversion changes no names
    if kept and (lasting := [each for each in reasons if each.code not in (*CURED, MUST_SET)]):
        return {"refused": line_of(lasting[0])}
    if source.tag:
        cure = replace(cure, words={**cure.words, "tag": source.tag})
    try:
        decision = _tried(source, manifest, cure, reading)
        if (dialect := _dialect_of(decision)) is not None:
            cure = replace(cure, words={**cure.words, "dialect": dialect})
            decision = _tried(source, manifest, cure, reading)
    except ZckptError as error:
        return {"refused": line_of(error.notice)}
    if not kept:
        by_place, is_made_like = formats.named(to).loads_by_place, "like" in cure.words
        lasting = unlike(decision.source, other, by_place) if other and not is_made_like else []
        missing = missing_of(decision.source, to, words)
        if missing and other and is_made_like:  # the scheduler may also come from `other`
            missing = missing_of(other, to, words)
        lasting += missing
        if lasting := [each for each in lasting if each.severity == "error"]:
            return {"refused": line_of(lasting[0])}
    codes = {*SAID_WITH_FIX} - ({CHANGES} if kept else set())
    notes = [each for each in decision.layout.warnings if each.code in codes]
    if "groups_from" in cure.words:
        message = "the command also uses the hyper-parameters of RUN, such as its learning rate"
        notes.append(warning(REGROUPED, message, subject="param_groups"))
    return {"fix": cure.command(source.path, reading, question.files), "warnings": said(notes)}


def _tried(
    source: Candidate, manifest: Manifest, cure: Conversion, reading: Mapping[str, Any]
) -> api.Decision:
    """Plans the conversion `cure` without running it; raises the errors that it would raise.

    The source is read again only if the conversion reads it differently: with --param-names for an
    optimizer without names, or without joining model-parallel ranks.
    """
    is_in_doubt = manifest.groups is None or manifest.run.origin.pp or manifest.run.origin.tp
    is_read_alike = not (is_in_doubt or cure.words.get("tp"))
    more: Words = {**cure.words, **reading}
    return api.try_out(source.path, manifest if is_read_alike else None, to=cure.to, **more)


def _dialect_of(decision: api.Decision) -> str | None:
    """The `--dialect` with which the trainer finds the target's files; None if none is needed.

    A dialect is a variant of the target's format, for example with other file names.
    """
    options = decision.format.options or ()
    dialects = {choice for each in options if each.name == "dialect" for choice in each.choices}
    musts = (each.subject for each in decision.layout.warnings if each.code == MUST_SET)
    return next((subject for subject in musts if subject in dialects), None)
