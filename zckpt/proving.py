"""Reads checkpoints and makes the report of `verify` about one of them, or about two."""

from __future__ import annotations

import os
import time
from shlex import quote

from msgspec.structs import replace

from . import formats
from .core.checkpoint import mended
from .core.checkpoint.states import Selection
from .core.comparison import duplicates
from .core.passes.description import VERSION, Report, line_of, said
from .core.passes.pooling import Pool
from .core.passes.resources import Begin, Copying, own_rank
from .core.storage import sources
from .errors import Notice, WrongOption
from .formats.reading import Reading
from .judging import verdict
from .judging.contents import OTHER_TIME
from .proof import saved
from .proof.verify import verify_against, verify_alone
from .reading import alike, read, read_both, read_other

Path = str | os.PathLike[str]


def prove(
    path: Path,
    against: Path | None,
    gather: bool,
    reading: Reading,
    selection: Selection,
    begin: Begin | None,
    *,
    device: str | None,
    jobs: int,
    memory: int,
    pool: Pool,
) -> Report:
    """The report of `verify`; see `zckpt.verify`."""
    if gather and reading.rename:
        raise WrongOption(
            "options-conflict", "--rename does not work with --gather", hint="leave one of them out"
        )
    if gather and reading.root is not None:
        raise WrongOption(
            "options-conflict", "--root does not work with --gather", hint="leave one of them out"
        )
    if reading.family is not None and (gather or against is None):
        raise WrongOption(
            "option-needed",
            "--family is only for a comparison: it translates the names of Hugging Face to those "
            "of Megatron-Core, or the names of Megatron-Core to those of Hugging Face",
            hint="add --against PATH" if not gather else "leave out --gather",
        )
    if gather and against is None:
        raise WrongOption(
            "option-needed",
            "--gather needs a checkpoint to compare with",
            hint="add --against PATH",
        )
    if device is not None and not gather:
        raise WrongOption(
            "option-needed", "--device is only for --gather", hint="add --gather --against PATH"
        )
    if against is None and (selection.weights_only or selection.drop_state):
        flag = "--weights-only" if selection.weights_only else "--drop-state"
        raise WrongOption(
            "option-needed",
            f"{flag} applies only to a comparison",
            hint="add --against PATH, or leave out the option",
        )
    started = time.monotonic()
    report: Report = {
        "zckpt": VERSION,
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
        "rank": own_rank() if gather else pool.rank,
    }
    reading = replace(reading, opens_items=True)  # all bytes are read
    try:
        if gather:
            assert against is not None
            findings = _gather(path, against, reading, selection, device, jobs, memory, begin)
        else:
            copying = Copying(jobs, memory, pool=pool)
            findings = _verify(path, against, reading, selection, copying, begin)
    except verdict.CONTRADICTIONS as error:
        if gather and report["rank"]:  # rank 0 reports its own, which may differ
            raise
        pool.agree_on_problem(error.message)
        kind = type(error).__name__
        problems = [line_of(notice, error=kind) for notice in error.notices]
        findings = {"problems": problems, "differences": []}
    return report | findings | {"seconds": round(time.monotonic() - started, 3)}


def _verify(
    path: Path,
    against: Path | None,
    reading: Reading,
    selection: Selection,
    copying: Copying,
    begin: Begin | None,
) -> Report:
    """Makes the report of `verify` on one checkpoint, or on two that are compared."""
    contents, lines = None, list[Notice]()
    if against is None:
        manifest = other = read(path, replace(reading, nameless=True))
    elif saved.is_proof(os.fspath(against)):
        manifest = read(path, replace(reading, nameless=True), alone=False)
        other, contents = saved.read_proof(os.fspath(against), manifest)
        if manifest.groups is None and other.groups is not None:
            # the error says why its states have no names
            manifest = read(path, reading, alone=False)
        manifest, other, lines = alike(manifest, other)
    else:
        manifest, other, lines = read_both(path, against, reading)
    about = saved.about(manifest)
    with sources.unchanged(manifest.files.fingerprints):
        if against is None:
            format = formats.named(manifest.format)
            if not format.is_neutral:  # its manifest states the checksum of each file
                about["warnings"] += said(duplicates.check_duplicates(manifest))
            if check_slices := format.functions.check_slices:
                check_slices(manifest)
            verdict_of_path = verdict.of(manifest)
            about["warnings"] += said(verdict_of_path.doubts)
            findings = verify_alone(manifest, selection.tensors, copying, begin)
            damaged = [_with_next_step(line, path) for line in findings["problems"]]
            problems = [*said((*verdict_of_path.problems, *verdict_of_path.unread)), *damaged]
            is_equal = findings["equal"] and not problems
            return about | findings | {"problems": problems, "equal": is_equal}
        if contents is not None:
            root = (reading.root or "").partition("=")[0]
            findings = saved.verify_proof(
                manifest, other, contents, selection, copying, begin, root
            )
            return about | findings | {"notes": [*said(lines), *findings["notes"]]}
        with sources.unchanged(other.files.fingerprints):
            about["warnings"] += said(
                each for each in other.notices.warnings if each.code in (OTHER_TIME, mended.CODE)
            )
            findings = verify_against(manifest, other, selection, copying, begin)
            return about | findings | {"notes": [*said(lines), *findings["notes"]]}


def _with_next_step(line: Report, path: Path) -> Report:
    """Adds to a report's line about damaged bytes the `zckpt mend` command to run next.

    The command restores the bytes, or lists what can be restored.
    """
    if line["code"] != "record-damaged":
        return line
    command = f"zckpt mend {quote(os.fspath(path))}"
    if "flipped" in line or "element" in line:
        return line | {"hint": f"to restore this bit: {command} DST"}
    return line | {"hint": f"to see what can be restored: {command} --dry-run"}


def _gather(
    path: Path,
    against: Path,
    reading: Reading,
    selection: Selection,
    device: str | None,
    jobs: int,
    memory: int,
    begin: Begin | None,
) -> Report:
    """Makes the report of `verify --gather`: tensors are joined as the engine joins them."""
    from .proof.allgather import verify_gathered  # which imports torch

    manifest = read(path, reading, alone=False)
    verdict.refuse_lost(manifest)
    if saved.is_proof(os.fspath(against)):
        raise WrongOption(
            "options-conflict",
            "--gather needs a checkpoint to compare with, not a proof file",
            hint="leave out --gather",
        )
    manifest, other, lines = read_other(against, manifest, reading)
    about = saved.about(manifest)
    # the reader has ignored or refused rules of a checkpoint without tensor ranks
    has_ranks = (manifest.run.origin.tp or 1) > 1
    rules = reading.tp_rules if has_ranks else None
    with sources.unchanged(manifest.files.fingerprints, other.files.fingerprints):
        partitions = formats.named(manifest.format).functions.partitions
        parts = partitions(manifest.root, rules) if partitions else None
        about["warnings"] += said(
            line for line in other.notices.warnings if line.code in (OTHER_TIME, mended.CODE)
        )
        findings = verify_gathered(manifest, parts, other, selection, device, jobs, memory, begin)
        return about | findings | {"notes": [*said(lines), *findings["notes"]]}
