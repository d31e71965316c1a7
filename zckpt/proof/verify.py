"""Checks one checkpoint for contradictions, or compares it with another one.

Within one checkpoint, everything that is stored twice must agree: bytes and their CRC-32s, replicas
on several ranks, a module's weight and the master from which it was rounded. Two checkpoints of any
formats must be equal, bit for bit, in everything that both of them have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..core.checkpoint import keys
from ..core.checkpoint.entries import Key, name_of
from ..core.checkpoint.manifest import Manifest
from ..core.checkpoint.missing_states import missing_states
from ..core.checkpoint.states import Selection
from ..core.checkpoint.weights import WEIGHTS, is_optimizers
from ..core.comparison import compare
from ..core.comparison.compare import Result
from ..core.comparison.statistics import extent
from ..core.passes.description import Report, line_of, said
from ..core.passes.plan import Match
from ..core.passes.resources import Begin, Copying
from ..errors import MissingData, counted, listed, note, problem
from . import damage, unsupported, values
from .file_digest import same_files
from .pairs import missing, mutual_matches, only_rounded, own_matches, selected
from .report import changes, difference, findings, versions
from .sibling_files import siblings
from .states import states

FINDINGS = (
    *("differences", "problems", "steps", "step_place", "scalars", "groups", "lacking"),
    *("states", "unproven"),
)


def verify_alone(
    manifest: Manifest,
    pattern: str | None,
    copying: Copying,
    begin: Begin | None,
) -> Report:
    """Checks whether the files of one checkpoint contradict each other.

    Returns keys for the report.
    """
    matches = selected(own_matches(manifest), pattern)
    everything = pattern is None
    outcome = compare.compare(
        matches, manifest, manifest, copying, everything=everything, begin=begin
    )
    report = findings(outcome, manifest, manifest)
    lost, stateless = missing_states(manifest)
    problems = [
        *said(damage.overlapping(manifest)),
        *damage.unused(manifest),
        *(damage.meaning(manifest, wrong, []) for wrong in damage.beside(manifest)),
        *said(lost),
        *report["problems"],
    ]
    return {
        **report,
        "equal": not (problems or report["differences"]),
        "problems": problems,
        "notes": [
            *report["notes"],
            *said(
                (
                    # with a glob, other tensors lie beside the chosen ones, not padding
                    *(damage.not_zero(outcome, manifest) if everything else ()),
                    *stateless,
                    *values.unsupported_states(manifest),
                    *manifest.notices.notes,
                )
            ),
        ],
        "inferred": {"a": list(manifest.notices.inferred)},
        "versions": versions(manifest, None),
    }


def verify_against(
    a: Manifest,
    b: Manifest,
    selection: Selection,
    copying: Copying,
    begin: Begin | None,
) -> Report:
    """Compares two checkpoints of any formats; returns keys for the report of `verify`.

    Raises MissingData if the checkpoints share no weights, because then nothing would be proven.
    """
    whole, pattern = (a, b), selection.tensors
    a, b = values.with_trained_alike(*keys.matched(*selection.of(a, b)))
    matches, only_a, only_b = mutual_matches(a, b)
    matches = selected(matches, pattern)
    if pattern is None:
        needs_weights(matches, a, b)
    outcome = compare.compare(matches, a, b, copying, begin=begin)
    report = findings(outcome, a, b)
    report["notes"] += said(
        (
            *damage.other_padding(a, b, outcome),
            *(
                note(
                    "form-differs",
                    f"{line['key']}: {line['a']} in {a.root}, {line['b']} in {b.root}",
                )
                for line in values.forms(a, b)
            ),
        )
    )
    report |= inferences(matches, a, b, lambda: same_files(*whole))
    report |= roundings(report, outcome.results, a, b)
    if pattern is None:
        return with_values(report, a, b, only_a, only_b)
    return {**report, "equal": nothing_found(report)}


def diff(
    a: Manifest,
    b: Manifest,
    selection: Selection,
    copying: Copying,
    begin: Begin | None,
) -> Report:
    """Makes the report of `diff`: all differences of two checkpoints, in the model's order."""
    whole, pattern = (a, b), selection.tensors
    a, b = values.with_trained_alike(*keys.matched(*selection.of(a, b)))
    matches, only_a, only_b = mutual_matches(a, b)
    matches = selected([match for match in matches if not match.copy], pattern)
    outcome = compare.compare(matches, a, b, copying, measure="first", begin=begin)
    unequal = [result.match for result in outcome.results if result.difference]
    measured = compare.compare(unequal, a, b, copying, measure="all").results
    by_match = {id(result.match): result for result in measured}
    outcome.results = [by_match.get(id(result.match), result) for result in outcome.results]
    tensors = findings(outcome, a, b)
    tensors |= inferences(matches, a, b, lambda: same_files(*whole))
    tensors |= roundings(tensors, outcome.results, a, b)
    lines = []
    for result in outcome.results:
        line = difference(result) or {"tensor": result.match.name, "count": 0}
        if result.difference is not None:
            line |= {"elements": result.match.a.numel, "cosine": result.difference.cosine}
            line |= changes(result.difference, result.match.a.numel)
        lines.append(line)
    differing = [line for line in lines if line.get("count") != 0 or "a_dtype" in line]
    worst = max(differing, key=lambda line: extent(line.get("max_abs")), default=None)
    report = {
        **with_values({**tensors, "problems": []}, a, b, only_a, only_b),
        "problems": tensors["problems"],
        "differences": differing,
        "first": differing[0]["tensor"] if differing else None,
        "worst": worst["tensor"] if worst else None,
    }
    report["states"] += values.forms(a, b)
    if pattern is not None:  # only the tensors
        of_tensors = (
            *("differences", "problems", "first", "worst", "tensors", "bytes", "digests"),
            *("inferred", "unproven", "rounded", "notes"),
        )
        report = {key: report[key] for key in of_tensors} | {"results": lines}
    one_sided = any(report.get(key) for key in ("only_a", "only_b"))
    rounded = report["rounded"]
    lost = _is_missing_masters(a, b, rounded["a"]) or _is_missing_masters(b, a, rounded["b"])
    return {**report, "equal": nothing_found(report) and not one_sided and not lost}


def _is_missing_masters(narrow: Manifest, wide: Manifest, names: Iterable[str]) -> bool:
    """Whether `narrow` lacks fp32 masters of weights that are trained in `wide`.

    `names` are weights of which `narrow` has only rounded values. Weights that no optimizer updates
    have no master.
    """
    shared, rounded = values.shared_parameters(narrow, wide), {*names}
    return any(theirs.trainable for name, _, theirs in shared if name in rounded)


# what a proof needs and adds


def needs_weights(matches: Iterable[Match], a: Manifest, b: Manifest) -> None:
    """Raises MissingData unless a weight is compared, because other tensors alone prove nothing.

    A weight without elements does not count, unless all weights of both checkpoints are empty.
    """
    shared = [match.a for match in matches if match.a.slot in WEIGHTS]
    entries = (*a.entries.values(), *b.entries.values())
    are_empty = not any(entry.numel for entry in entries if entry.slot in WEIGHTS)
    if not any(entry.numel or are_empty for entry in shared):
        raise MissingData(
            "nothing-to-compare",
            f"{a.root} and {b.root} share no weights, so nothing can be compared",
            hint="`zckpt inspect PATH --tensors '*'` lists the tensors of a checkpoint",
            file=a.root,
        )


def roundings(report: Report, results: Iterable[Result], a: Manifest, b: Manifest) -> Report:
    """Reports weights that one side has only in a narrower type, such as bf16 instead of fp32.

    Returns the keys `rounded` (the names of these weights for each side) and `notes` (the report's
    notes, and one for each side with such weights).
    """
    equal = (item.match for item in results if not item.differs)
    rounded = only_rounded(equal, a, b)
    notes = [
        note(
            "form-differs",
            f"{narrow.root} has the rounded values of {counted(len(names), 'weight')} of "
            f"{wide.root}, in a narrower type: {listed(names, 4)}",
            subject=names[0],
        )
        for side, narrow, wide in (("a", a, b), ("b", b, a))
        if (names := rounded[side])
    ]
    return {"rounded": rounded, "notes": [*report["notes"], *said(notes)]}


def inferences(
    matches: Iterable[Match], a: Manifest, b: Manifest, are_copies: Callable[[], bool]
) -> Report:
    """Reports the parameters whose names zckpt inferred: the keys `inferred` and `unproven`.

    Equal optimizer states do not prove a name that is inferred in both checkpoints: such parameters
    are unproven. If `are_copies()` is True, one checkpoint's files are copies of the other's, and
    no parameter is unproven.
    """
    compared = {match.a.parameter for match in matches if is_optimizers(match.a.slot)}
    theirs = set(b.notices.inferred if b.notices.states_inferred else a.notices.inferred)
    shared = [name for name in a.notices.inferred if name in compared and name in theirs]
    if shared and are_copies():
        shared = []
    inferred = {"a": list(a.notices.inferred), "b": list(b.notices.inferred)}
    if not shared:
        return {"inferred": inferred, "unproven": []}
    unproven = problem(
        "unproven",
        f"the names of {listed(shared, 4)} are inferred in both checkpoints: their optimizer "
        "states are equal whether or not the names are right",
        hint="name the optimizer's parameters with --param-names FILE",
        subject=shared[0],
    )
    return {
        "inferred": inferred,
        "unproven": [line_of(unproven, parameters=shared)],
    }


def with_values(
    report: Report, a: Manifest, b: Manifest, only_a: Sequence[Key], only_b: Sequence[Key]
) -> Report:
    """Adds to a report what differs besides tensors' elements: steps, groups and other values.

    Also adds the tensors that one side lacks. `only_a` and `only_b` are keys of tensors that only
    one side has.
    """
    lost = [
        line_of(
            problem(
                "tensor-missing",
                f"{other.root} lacks {name}, which {owner.root} has",
                subject=name,
            ),
            tensor=name,
        )
        for keys, owner, other in ((only_a, a, b), (only_b, b, a))
        for name in map(name_of, missing(keys, owner, other))
    ]
    lines, not_compared = states(a, b)
    of_files, one_sided = siblings(a, b)
    a, b, unsupported_states, as_they_are = unsupported.rest(a, b)
    a, b, of_empty = values.without_empty_groups(a, b)
    lacking, afresh = values.missing_states(a, b, {line["tensor"] for line in lost})
    step_place, moved = values.step_places(a, b)
    report = {
        **report,
        "problems": report["problems"] + lost,
        "notes": [*report.get("notes", ()), *said((*as_they_are, *afresh, *moved))],
        "lacking": lacking,
        "steps": values.steps(a, b),
        "step_place": step_place,
        "scalars": values.scalars(a, b),
        "groups": values.groups(a, b) + values.trainable(a, b),
        "states": lines + unsupported_states + of_files,
        "not_compared": said(
            (*not_compared, *of_empty, *values.hypers_of_one_side(a, b), *one_sided)
        ),
        "only_a": [*map(name_of, only_a)],
        "only_b": [*map(name_of, only_b)],
        "versions": versions(a, b),
    }
    return {**report, "equal": nothing_found(report)}


def nothing_found(report: Report) -> bool:
    """Whether a report has no findings."""
    return not any(report.get(key) for key in FINDINGS)
