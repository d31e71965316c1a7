"""Finds the best checkpoint of a Trainer's run, and rewrites references to it.

Every checkpoint's `trainer_state.json` has the path of the best one. With `load_best_model_at_end`
the Trainer loads that path when training ends. A converted run has another path, so the path must
be rewritten (transformers 5.23).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable

from ..core.checkpoint.manifest import Sibling
from ..core.checkpoint.siblings import SiblingList
from ..core.passes.layout import Shell
from ..core.storage import sources
from ..errors import NotACheckpoint, Notice, warning
from .trainers import STATE, json_of

KEY = "best_model_checkpoint"
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
CHOICES = ("all", "best-and-last")


def best_of(siblings: Iterable[Sibling]) -> str | None:
    """The path of the run's best checkpoint, which every checkpoint's trainer_state.json states.

    None if there is no such file, or if the Trainer has not chosen a best checkpoint.
    """
    path = (json_of(siblings, STATE) or {}).get(KEY)
    return path if isinstance(path, str) and path else None


def is_best(siblings: Iterable[Sibling]) -> bool:
    """Whether a checkpoint is the best one of its run, by the path in its trainer_state.json.

    `siblings` are the files beside it.
    """
    state = json_of(siblings, STATE) or {}
    match = CHECKPOINT.fullmatch(os.path.basename(os.path.normpath(str(state.get(KEY)))))
    return match is not None and int(match[1]) == state.get("global_step")


def pointing_to(siblings: Iterable[Sibling], path: str) -> Shell:
    """Makes a trainer_state.json that names `path` as the best checkpoint.

    It is formatted as the Trainer formats it.
    """
    state = {**(json_of(siblings, STATE) or {}), KEY: path}
    text = (json.dumps(state, indent=2, sort_keys=True) + "\n").encode()
    return Shell.of(STATE, text)


def not_written(best: str, siblings: Iterable[Sibling], keeps_format: bool) -> Notice:
    """Warns that the run's best checkpoint (`best`, its path) is not converted.

    If the best checkpoint is in the run's folder and the target has the same format
    (`keeps_format`), the warning proposes `--checkpoints`, which converts both.
    """
    text = (
        f"{STATE} names the best checkpoint {best}, which is not written: with "
        "load_best_model_at_end the Trainer loads it at the end"
    )
    state = next((item.path for item in siblings if item.name == STATE), "")
    run = os.path.dirname(os.path.dirname(state))
    name = os.path.basename(os.path.normpath(best))
    is_there = keeps_format and CHECKPOINT.fullmatch(name)
    if is_there and sources.is_folder(os.path.join(run, name)):
        command = f"zckpt reshard {run or '.'} DST --checkpoints best-and-last"
        text += f". To convert both: {command}"
    return warning("best-elsewhere", text, file=best)


def chosen(
    run: str, which: str, oldest_first: Callable[[str, Iterable[str]], list[str]]
) -> list[str]:
    """The paths of the checkpoints in a Trainer's output directory that `--checkpoints` selects.

    `which` is the option's value: "all", or else the best and the last one. `oldest_first` sorts
    their names. Raises NotACheckpoint if the directory has no checkpoints, or if the best one is
    missing.
    """
    with os.scandir(run) as items:
        checkpoint_names = [
            item.name for item in items if item.is_dir() and CHECKPOINT.fullmatch(item.name)
        ]
    names = oldest_first(run, checkpoint_names)
    if not names:
        raise NotACheckpoint(
            "not-a-checkpoint",
            f"{run} contains no checkpoint-N folder",
            hint="--checkpoints needs a Trainer's output directory as the source",
            file=run,
        )
    if which == "all":
        return names
    last = os.path.join(run, names[-1], STATE)
    state = SiblingList(run)
    if sources.is_file(last):
        state.add(STATE, last)
    best = best_of(state.files)
    if best is None:
        return names[-1:]
    name = os.path.basename(os.path.normpath(best))
    if name not in names:
        raise NotACheckpoint(
            "pointer-dangling",
            f"{last} names the best checkpoint {best}, but {run} has no {name}",
            hint="copy the best checkpoint into the Trainer's output directory, or convert one "
            "checkpoint alone",
            file=run,
        )
    return list(dict.fromkeys((name, names[-1])))
