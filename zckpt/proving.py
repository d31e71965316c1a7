"""How paths become the report of `verify`: whether a checkpoint is whole, or equals another one."""

from __future__ import annotations

import os
import time
from typing import Any

from . import formats
from .core import duplicates, sources
from .core.resources import Begin, Copying, Means
from .core.states import Selection
from .errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    WrongOption,
)
from .formats.reading import Reading
from .reading import oddly_timed, read, read_other

Path = str | os.PathLike[str]
Report = dict[str, Any]
CONTRADICTIONS = (CorruptCheckpoint, IncompleteCheckpoint, InconsistentCheckpoint)
"""What a checkpoint's files say about themselves: findings of `verify`, not failures."""


def prove(
    path: Path,
    against: Path | None,
    gather: bool,
    reading: Reading,
    selection: Selection,
    means: Means,
    begin: Begin | None,
) -> Report:
    """The report of `verify`; see `zckpt.verify`."""
    if gather and reading.rename:
        raise WrongOption("--rename does not work with --gather", hint="leave one of them out")
    if gather and reading.root is not None:
        raise WrongOption("--root does not work with --gather", hint="leave one of them out")
    if reading.family is not None and (gather or against is None):
        raise WrongOption(
            "--family is only for a comparison: it gives the names of Megatron-Core to a "
            "checkpoint of Hugging Face, or the way back",
            hint="add --against PATH" if not gather else "leave out --gather",
        )
    if gather and against is None:
        raise WrongOption("--gather needs a checkpoint to compare with", hint="add --against PATH")
    if means.device is not None and not gather:
        raise WrongOption("--device is only for --gather", hint="add --gather --against PATH")
    if against is None and (selection.weights_only or selection.drop_state):
        flag = "--weights-only" if selection.weights_only else "--drop-state"
        raise WrongOption(
            f"{flag} says what a comparison leaves out", hint="add --against PATH, or leave it out"
        )
    started = time.monotonic()
    report: Report = {
        "zckpt": 1,
        "command": "verify",
        "path": os.fspath(path),
        "against": None if against is None else os.fspath(against),
        "equal": False,
        "tensors": 0,
        "slots": {},
        "bytes": 0,
        "device": "cpu",
        "gathered": gather,
        "selection": selection.flags,
        "world": 1,
        "rank": own_rank(),
    }
    try:
        if gather:
            assert against is not None
            findings = _gather(path, against, reading, selection, means, begin)
        else:
            copying = Copying(means.jobs, means.memory, pool=means.pool)
            findings = _verify(path, against, reading, selection, copying, begin)
    except CONTRADICTIONS as error:
        if report["rank"]:  # rank 0 reports its own, which may differ
            raise
        problem = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
        findings = {"problems": [problem], "differences": []}
    return report | findings | {"seconds": round(time.monotonic() - started, 3)}


def own_rank() -> int:
    """This process's number among those that torchrun started; 0 without torchrun.

    RANK alone proves nothing: in many clusters every shell has one.
    """
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0


def _verify(
    path: Path,
    against: Path | None,
    reading: Reading,
    selection: Selection,
    copying: Copying,
    begin: Begin | None,
) -> Report:
    """The findings of a verification through the manifests of both sides."""
    from .proof import saved
    from .proof.verify import verify_against, verify_alone

    is_proof = against is not None and saved.is_proof(os.fspath(against))
    manifest = read(path, reading, alone=against is None or is_proof)
    about = saved.about(manifest)
    with sources.unchanged(manifest):
        if against is None:
            format = formats.named(manifest.format)
            if not format.is_neutral:  # its manifest states the checksum of each file
                about["warnings"] += duplicates.check_duplicates(manifest)
            format.check_slices(manifest)
            return about | verify_alone(manifest, selection.tensors, copying, begin)
        if is_proof:
            return about | saved.verify_proof(
                manifest, os.fspath(against), selection, copying, begin
            )
        other = read_other(against, manifest, reading)
        with sources.unchanged(other):
            about["warnings"] += oddly_timed(other)
            return about | verify_against(manifest, other, selection, copying, begin)


def _gather(
    path: Path,
    against: Path,
    reading: Reading,
    selection: Selection,
    means: Means,
    begin: Begin | None,
) -> Report:
    """The findings of a verification that all-gathers the parts that the engine's rule gives."""
    from .proof import saved

    manifest = read(path, reading, alone=False)
    if saved.is_proof(os.fspath(against)):
        raise WrongOption("--gather cannot compare with a proof", hint="leave out --gather")
    other = read_other(against, manifest, reading)
    from .proof.allgather import verify_gathered

    about = saved.about(manifest)
    # the reader has ignored or refused rules of a checkpoint without tensor ranks
    has_ranks = int(manifest.source.get("tp") or 0) > 1
    rules = reading.tp_rules if has_ranks else None
    with sources.unchanged(manifest, other):
        parts = formats.named(manifest.format).partitions(manifest.root, rules)
        about["warnings"] += oddly_timed(other)
        return about | verify_gathered(manifest, parts, other, selection, means, begin)
