"""The section `next` of a report: what the user can do with a checkpoint now.

complete   the line of code that resumes from it, and the command for another number of ranks
damaged    what is lost, what is left, and what to do, such as to resume from an older checkpoint
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from shlex import quote
from typing import Any

from msgspec import Struct, field

from .. import api
from ..core.checkpoint.entries import Entry
from ..core.passes.description import Report
from ..errors import ZckptError, joined, listed
from ..judging import about
from ..judging.damaged_source import Found, kept
from ..resume.runs import Candidate, candidates, folder_of, instead_of, judged

DAMAGED = ("checksum", "NaN", "infinite")
"""The kinds of faults that mean that values of a tensor are wrong."""
WEIGHTS, MASTERS, STATE = "weights", "masters", "optimizer state"
MOST = 3  # names in a sentence


class Harm(Struct):
    """What is lost of one kind of tensor, such as masters: which layers, and how many elements.

    `lost` is the number of lost elements, and `total` that of all elements of this kind.
    """

    layers: dict[str, None] = field(default_factory=dict)
    lost: int = 0
    of: int = 0  # elements of the tensors that lost some
    total: int = 0


def section(checkpoint: Found, candidate: Candidate, faults: Sequence[Report]) -> Report:
    """Makes the section `next`: what the user can do, as sentences and commands.

    Its key `older` is None here; `with_older` sets it to an older checkpoint from which to resume.
    """
    path = folder_of(candidate)
    report: Report = {
        "resumes": False,
        **dict.fromkeys(("resume", "other_size", "left", "older")),
        "lost": [],
        "do": [],
    }
    manifest = checkpoint.manifest
    if manifest is None:
        older = instead_of(path)
        lost = ["nothing could be read but the names of files"]
        return report | {"lost": lost, "do": [*filter(None, [mending(path, None, older)])]}
    wrong = any(line["fault"] for line in faults)
    if not wrong and not checkpoint.judged.obstacles:
        return report | {
            "resumes": True,
            "resume": about.resuming(manifest, checkpoint.root, path),
            "other_size": about.at_another_size(manifest, path),
        }
    lost, left = [*_lost(checkpoint, faults)], _left(checkpoint, faults)
    steps = []
    if left == COMPLETE:
        stale = any(line["kind"] == "stale" for line in faults)  # masters of other weights
        more = " --accept-weights" if stale else ""
        command = f"zckpt convert {quote(path)} DST --weights-only{more}"
        steps.append(_step("export the weights", command))
    if any(line["kind"] == "checksum" for line in faults):
        command = f"zckpt mend {quote(path)} --dry-run"
        steps.append(_step("see what can be restored", command))
    missing = [os.path.basename(checkpoint.real(each)) for each in checkpoint.lost]
    if missing:
        steps.append(_step(f"copy {listed(missing, MOST)} back, if you have another copy", None))
    if (step := mending(path, None, instead_of(path))) is not None:
        steps.append(step)
    if not wrong and checkpoint.judged.alone:
        left = ALONE
    return report | {"lost": lost, "left": left, "do": steps}


def mending(path: str, tag: str | None = None, older: str | None = None) -> Report | None:
    """Advises to run `zckpt mend`, with the command; None if it would not help.

    `older` is an earlier complete checkpoint of the run, from which `mend` may take values.
    """
    with suppress(ZckptError, OSError):
        return api.mend_step(path, older=older, tag=tag)
    return None


COMPLETE, ALONE = "weights complete", "weights without an optimizer: no run resumes from them"


def with_older(report: Report, older: Iterable[Candidate]) -> Report:
    """Adds the older checkpoint from which the user can resume to the section `next` of a report.

    It is the first complete one in `older`, which are checkpoints of the same run, the newest
    first. If none is complete, the section (`report`) is returned unchanged.
    """
    for candidate in older:
        with suppress(ZckptError, OSError):
            verdict = judged(candidate, {})
            if verdict.manifest is None or verdict.obstacles:
                continue
            root, path = verdict.manifest.root, folder_of(candidate)
            line = about.resuming(verdict.manifest, root, path)
            step = _step(f"go on from {os.path.basename(path)}", line)
            return report | {"older": path, "do": [step, *report["do"]]}
    return report


def older_than(candidate: Candidate) -> list[Candidate]:
    """The older checkpoints of the same run, the newest first; empty if there is no run."""
    folder = os.path.abspath(folder_of(candidate))
    run = candidate.path if candidate.tag else os.path.dirname(folder)
    try:
        checkpoints = candidates(run)
    except (ZckptError, OSError):
        return []
    places = [os.path.abspath(folder_of(each)) for each in checkpoints]
    return checkpoints[places.index(folder) + 1 :] if folder in places else []


def _step(what: str, command: str | None) -> Report:
    return {"what": what, "command": command}


# -- what is lost


def _lost(checkpoint: Found, faults: Sequence[Report]) -> Iterator[str]:
    """Says in a phrase what is lost or damaged, for each kind of tensor such as masters."""
    if _has_weights_alone(checkpoint) and any(
        line["kind"] in ("missing", "unreadable") for line in faults
    ):
        yield f"all {STATE} lost"
    by_layers: dict[tuple[str, ...], list[str]] = {}
    harms = _harms(checkpoint)
    for kind, harm in harms.items():
        by_layers.setdefault(tuple(harm.layers), []).append(kind)
    for layers, kinds in by_layers.items():
        lost, of = (sum(getattr(harms[kind], key) for kind in kinds) for key in ("lost", "of"))
        part = "" if lost == of else f" ({max(lost / of, 0.001):.1%} of their elements)"
        yield f"{joined(kinds)} of {_named(checkpoint, layers)} lost{part}"
    for kind, damaged in _damaged(checkpoint, faults).items():
        yield f"{kind} of {_named(checkpoint, [*damaged])} damaged"


def _left(checkpoint: Found, faults: Sequence[Report]) -> str | None:
    harm = _harms(checkpoint).get(WEIGHTS)
    if harm is not None:
        return f"{1 - harm.lost / harm.total:.0%} of the weights left"
    return None if WEIGHTS in _damaged(checkpoint, faults) else COMPLETE


def _has_weights_alone(found: Found) -> bool:
    return all(_kind(found, entry) == WEIGHTS for entry in found.entries)


def _kind(checkpoint: Found, entry: Entry) -> str:
    """Whether a tensor counts as weights, masters, or other optimizer state.

    If a parameter has no 16-bit weight, its fp32 master counts as weights.
    """
    if entry.slot == "param" or (
        entry.slot == "master" and (entry.parameter, "param") not in checkpoint.known.entries
    ):
        return WEIGHTS
    return MASTERS if entry.slot == "master" else STATE


def _harms(checkpoint: Found) -> Mapping[str, Harm]:
    """What lost files contained, by kind of tensor: the layers and the number of elements."""
    harms: dict[str, Harm] = {}
    for entry in checkpoint.entries if checkpoint.lost else ():
        rest, _ = kept(entry, checkpoint.lost)
        kind = _kind(checkpoint, entry)
        harm = harms.setdefault(kind, Harm())
        harm.total += entry.numel
        if rest is not entry:
            harm.of += entry.numel
            harm.lost += entry.numel - rest.numel
            harm.layers[checkpoint.places.name(entry.parameter)] = None
    return {kind: harm for kind, harm in harms.items() if harm.layers}


def _damaged(checkpoint: Found, faults: Sequence[Report]) -> Mapping[str, dict[str, Any]]:
    """Which layers have damaged values, by kind of tensor (weights, masters, other state)."""
    kinds: dict[str, dict[str, Any]] = {}
    for line in faults:
        if line["kind"] in DAMAGED and line["tensor"] in checkpoint.numbers:
            entry = checkpoint.entries[checkpoint.numbers[line["tensor"]]]
            layers = kinds.setdefault(_kind(checkpoint, entry), {})
            layers[checkpoint.places.name(entry.parameter)] = None
    return kinds


def _named(checkpoint: Found, layers: Sequence[str]) -> str:
    if len(layers) > 1 and len(layers) == len(set(checkpoint.places.names)):
        return "all layers"
    return joined([*layers]) if len(layers) <= MOST else listed(layers, MOST)
