"""Finds the counters that trainers store beside an engine's checkpoint, and compares them.

    file or name           counter        program
    trainer_state.json     global_step    transformers: updates, including those skipped in fp16
    folder checkpoint-N    N              transformers: the same; it resumes from the largest N
    scheduler.pt, .bin     last_epoch     torch's schedulers; accelerate steps them in each process
    random_states_0.pkl    step           accelerate: batches since an epoch began
    Lightning's state      global_step    Lightning: updates of all its optimizers together

None of them is the optimizer's step. Only DeepSpeed's `global_steps` must equal the Trainer's
`global_step` (accelerate 1.15, transformers 5.24). The others count something else, and are only
listed in reports.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from ..core.checkpoint.facts import FlatBufferEngine
from ..core.checkpoint.manifest import Manifest, Sibling, Sighting, is_step
from ..core.storage import sources
from ..errors import Notice, ZckptError, problem, warning
from . import lightning
from .best import CHECKPOINT
from .trainers import MAX_JSON, STATE, counter, json_of, program_of

Number = Callable[[str, tuple[str]], int | None]
"""A function that returns the integer that a torch.save file has under one of the keys."""

TRAINER, FOLDER, SCHEDULER = "trainer", "folder", "scheduler"
ACCELERATE, LIGHTNING = "accelerate", "lightning"
"""The kinds of counters that trainers store, for the field `Sighting.counter`.

A `Sighting` is a step that zckpt found. For a step of an engine, the field is "".
"""

_COUNTED = (
    (SCHEDULER, re.compile(r"scheduler(?:\.pt|(?:_\d+)?\.bin)"), "last_epoch"),
    (TRAINER, re.compile(re.escape(STATE)), "global_step"),
    (ACCELERATE, re.compile(r"random_states_0\.pkl"), "step"),  # other ranks' have the same
)
"""Trainers' counters: the program, its file's name, and the counter's key in the file."""


def sightings(manifest: Manifest, number_in: Number) -> list[Sighting]:
    """Finds the counters of updates or batches that a trainer has stored for a checkpoint.

    Returns each counter as a `Sighting`: a number and its place. `number_in(path, keys)` reads an
    integer from a torch.save file. A damaged file is skipped. Raises OSError if the filesystem
    fails.
    """
    counters = [*_of_files(manifest, number_in)]
    if lightning.is_in(manifest):
        step = manifest.state["client_state"].get("global_step")
        if is_step(step):
            counters.append(Sighting("Lightning, global_step", step, False, LIGHTNING))
    return counters


def _of_files(manifest: Manifest, number_in: Number) -> Iterator[Sighting]:
    """Yields the counters in the trainer's files, and in the name of the trainer's folder."""
    folder = _folder(manifest) if program_of(manifest.files.siblings) else ""
    name = os.path.basename(os.path.abspath(folder)) if folder else ""
    if match := CHECKPOINT.fullmatch(name):
        yield Sighting(f"name of the folder {name}", int(match[1]), False, FOLDER)
    for item in manifest.files.siblings:
        for kind, pattern, key in _COUNTED:
            if pattern.fullmatch(item.name):
                step = _number(item, key, number_in)
                if step is not None and is_step(step):
                    yield Sighting(f"{item.name}, {key}", step, False, kind)


def _number(item: Sibling, key: str, number_in: Number) -> int | None:
    if sources.is_denied(item.path):
        return None
    if item.name == STATE:
        return counter(os.path.dirname(item.path))
    if item.size > MAX_JSON:
        return None
    with suppress(ZckptError):  # the code that loads the file reports the damage
        return number_in(item.path, (key,))
    return None


def _folder(manifest: Manifest) -> str:
    paths = [item.path for item in manifest.files.siblings if "/" not in item.name]
    return os.path.dirname(paths[0]) if paths else ""


def global_step(manifest: Manifest) -> int | None:
    """The number of updates that transformers' Trainer has counted; None if its file is missing."""
    return _seen(manifest, TRAINER)


def counted_updates(source: Manifest) -> int:
    """The number of updates of a run, for an engine that does not count them.

    It is the Trainer's `global_step`, or else the optimizer's step.
    """
    counted = global_step(source)
    return int(source.step or 0) if counted is None else counted


def _seen(manifest: Manifest, kind: str) -> int | None:
    steps = (int(each.step) for each in manifest.run.steps if each.counter == kind)
    return next(steps, None)


def disagreements(manifest: Manifest) -> list[Notice]:
    """Compares the Trainer's `global_step` with the engine's counter and the folder's name.

    Another number in the folder's name is a warning. Another counter of the engine is a problem:
    the files are from two saves. It is only a warning if an old accelerate may have miscounted.
    """
    counted = global_step(manifest)
    if counted is None:
        return []
    state = next(item.path for item in manifest.files.siblings if item.name == STATE)
    lines = []
    engine = (manifest.state.get("counters") or {}).get("global_steps")
    if type(engine) is int and engine != counted:
        where = f"{manifest.files.stated_in} has" if manifest.files.stated_in else "the engine has"
        message = f"{state} has global_step {counted}, but {where} global_steps {engine}"
        hint = "the files are of two saves: copy all files of one save again"
        make = problem
        # before accelerate 1.8 (its pull request 3630), the Trainer also counted an epoch's last
        # update if too few batches were left to accumulate, and DeepSpeed skipped this update
        if _accumulates(manifest) and 0 < counted - engine <= _epochs(manifest):
            make = warning
            hint = (
                "copy all files of one save again, unless accelerate was older than 1.8: with "
                "gradient_accumulation_steps its counters may differ"
            )
        lines.append(make("steps-disagree", message, subject="global_step", file=state, hint=hint))
    number = _seen(manifest, FOLDER)
    if number is not None and number != counted:
        folder = _folder(manifest)
        lines.append(
            warning(
                "steps-disagree",
                f"{folder} has number {number} in its name, but its {STATE} has global_step "
                f"{counted}: the Trainer resumes from the folder with the largest number",
                subject="global_step",
                file=folder,
                hint=f"if all files are of one save, rename the folder to checkpoint-{counted}",
            )
        )
    return lines


def _epochs(manifest: Manifest) -> float:
    epoch: Any = (json_of(manifest.files.siblings, STATE) or {}).get("epoch")
    return epoch // 1 if is_step(epoch) else 0


def _accumulates(manifest: Manifest) -> bool:
    """Whether the engine may accumulate the gradients of several batches for one update.

    True unless its configuration sets the number of accumulation steps to 1.
    """
    engine = manifest.run.engine
    config = engine.config if isinstance(engine, FlatBufferEngine) else {}
    return config.get("gradient_accumulation_steps") != 1
