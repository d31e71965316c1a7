"""Decides which training step is true if several files or ranks state a step."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from ...errors import InconsistentCheckpoint, listed

Step = float | int

KEEP = "keep"
"""The policy that keeps each parameter's own step, in formats that store a step per parameter."""


def agree(places: Sequence[tuple[str, Step]], policy: str | None) -> Step | None:
    """Returns the step that all places state, or the one that `policy` chooses if they differ.

    `places` are pairs of a file or rank, for messages, and its step. Without places, returns None.
    Raises InconsistentCheckpoint if places differ and `policy` is None or "keep", or if `policy` is
    None and a step is not a whole number.
    """
    if policy is None:
        need_whole(places)
    values = {step for _, step in places}
    if len(values) <= 1:
        return values.pop() if values else None
    if policy in (None, KEEP):  # `keep` is for steps of different parameters
        raise InconsistentCheckpoint(
            "steps-disagree",
            f"the optimizer's step differs: {_by_step(places)}",
            hint="files of different saves may be mixed; if not, choose: --step-policy max|min|N",
            steps=places,
        )
    if policy in ("max", "min"):
        return max(values) if policy == "max" else min(values)
    return int(str(policy))


def need_whole(places: Iterable[tuple[str, Step]]) -> None:
    for place, step in places:
        if step != int(step):
            raise InconsistentCheckpoint(
                "file-damaged",
                f"the optimizer's step is {step:g}, not a whole number of updates: {place}",
                hint="the file may be damaged or come from another save: copy all files again; if "
                "this optimizer counts in fractions, add --step-policy keep",
            )


def need_one_save(steps_in_files: Iterable[tuple[str, Step]], policy: str | None) -> None:
    """Raises InconsistentCheckpoint if files state different steps, so they are of several saves.

    `steps_in_files` yields pairs of a file's path and the step of one parameter in it. No error is
    raised if a single file already has several steps, or if there is a `policy` (--step-policy).
    """
    by_file: dict[str, set[Step]] = {}
    for file, step in steps_in_files:
        by_file.setdefault(file, set()).add(step)
    # parameters were not updated equally often, such as layers unfrozen late: this proves nothing
    several = any(len(steps) > 1 for steps in by_file.values())
    if policy is not None or several or len(set().union(*by_file.values())) <= 1:
        return
    folder = os.path.commonpath([os.path.dirname(file) for file in by_file])
    places = [(os.path.relpath(file, folder), by_file[file].pop()) for file in sorted(by_file)]
    raise InconsistentCheckpoint(
        "steps-disagree",
        f"{folder or '.'}: the files state different steps: {_by_step(places)}",
        hint="files of two saves seem to be mixed: use files of one save only; if layers were "
        "unfrozen late, or ranks are pipeline stages, add --step-policy keep",
        steps=places,
    )


def _by_step(places: Sequence[tuple[str, Step]]) -> str:
    """Formats the conflicting steps for an error: `5 (rank 0, rank 1), 7 (rank 2)`."""
    values = {step for _, step in places}
    lines = [
        f"{step} ({listed([where for where, s in places if s == step], 3)})" for step in values
    ]
    return ", ".join(sorted(lines))
