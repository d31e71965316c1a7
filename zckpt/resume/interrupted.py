"""Reports an interrupted save: which files are complete, and which tensors an older save also has.

`judging/verdict.py` tells which checkpoint is complete, and `judging/inventory.py` which of its
files exist. If a rank's file is lost, another rank's file is read instead, because it has the names
and shapes of the same tensors.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

from .. import api, formats
from ..core.checkpoint.manifest import Manifest
from ..core.passes.description import Report
from ..core.storage.inventory import State
from ..errors import ZckptError
from ..judging.damaged_source import Found, what_is_there
from ..judging.inventory import of_folder, states_in
from ..judging.verdict import Verdict
from .runs import Candidate, candidates, judged, others


def interrupted(
    path: str, tag: str | None = None, reading: Mapping[str, Any] | None = None
) -> Report | None:
    """Reports on a run's newest checkpoint if its save was interrupted; None otherwise.

    `path` is a run, or a checkpoint of a run; `tag` chooses a checkpoint. Keys of the report:

        files      the files of this checkpoint, each with its state
        older      the path of the newest complete checkpoint, or None
        tensors    the number of tensors in the interrupted checkpoint; None if unknown
        alike      how many of these have the same type and shape in `older`; None if unknown
        frozen     the names of the frozen weights that `alike` counts
    """
    reading = reading or {}
    with suppress(ZckptError, OSError):
        found = candidates(path)
        order = [standing.path for standing in formats.by_age(each.where for each in found)]
        for candidate in sorted(found, key=lambda each: order.index(each.where), reverse=True):
            if tag is not None and tag not in (candidate.tag, candidate.name):
                continue
            verdict = judged(candidate, reading)
            if not verdict.whole:
                break
            return _report(candidate, verdict, others(path, candidate.tag), reading)
    return None


def _report(
    candidate: Candidate, verdict: Verdict, older_ones: list[Candidate], reading: Mapping[str, Any]
) -> Report:
    wrong = dict[str, State](states_in(verdict.error) if verdict.error else {})
    with ExitStack() as stack:
        found = Found(candidate.path)
        with suppress(ZckptError, OSError):
            source = {"tag": candidate.tag, **reading}
            found = stack.enter_context(what_is_there(candidate.path, source, api.read))
        lost = {found.real(path) for path in found.lost}
        wrong |= {path: wrong.get(path, "unreadable") for path in lost if os.path.exists(path)}
        wrong |= dict.fromkeys((path for path in lost if not os.path.exists(path)), "missing")
        rows = verdict.rows if verdict.manifest else of_folder(candidate.where, wrong)
        older = _newest_whole(older_ones, reading)
        return {
            "name": candidate.name,
            "path": candidate.where,
            "files": [
                {"file": row.name, "role": row.role, "state": row.state, "size": row.size}
                for row in rows
            ],
            "older": older[0].where if older else None,
            **_fitting(found.manifest, older[1] if older else None),
        }


def _newest_whole(
    older_ones: list[Candidate], reading: Mapping[str, Any]
) -> tuple[Candidate, Manifest] | None:
    for candidate in older_ones:
        with suppress(ZckptError, OSError):
            verdict = judged(candidate, reading)
            if verdict.manifest is not None and not verdict.obstacles:
                return candidate, verdict.manifest
    return None


def _fitting(manifest: Manifest | None, older: Manifest | None) -> Report:
    """Counts the tensors with the same name, type and shape in an older checkpoint.

    Returns the keys `tensors`, `alike` and `frozen` of the report.
    """
    if manifest is None or older is None:
        return {"tensors": None, "alike": None, "frozen": []}
    alike = [
        entry
        for key, entry in manifest.entries.items()
        if (other := older.entries.get(key)) is not None
        and (other.dtype, other.shape) == (entry.dtype, entry.shape)
    ]
    frozen = [
        entry.parameter
        for entry in alike
        if entry.slot == "param"
        and (parameter := manifest.parameters.get(entry.parameter)) is not None
        and not parameter.trainable
    ]
    return {"tensors": len(manifest.entries), "alike": len(alike), "frozen": frozen}
