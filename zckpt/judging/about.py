"""Reads facts about the model and the training from files that a trainer saved beside a checkpoint.

    config.json, adapter_config.json    the model's name and class
    trainer_state.json                  loss, learning rate, epoch; the losses of the run so far

No other result depends on these files: a file that is missing, damaged or too large is ignored.
The epoch may also come from Lightning's state, and the batch size from the engine's configuration.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from shlex import quote
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from .. import formats
from ..core.checkpoint.inert import plain_group
from ..core.checkpoint.manifest import Manifest, Sibling
from ..core.storage import sources
from ..errors import ZckptError, literal
from ..training import lightning
from ..training.batches import MOST_SAMPLES, global_batch
from ..training.trainers import STATE, config_of

LONGEST = 200  # characters of a name
MOST_POINTS = 500  # the most losses that are kept
LARGEST = 1e300  # larger numbers are ignored
TAGGED = "deepspeed"  # loads one of a run by its tag
Name = str | None
Point = tuple[float, float | None]
"""A step, and the loss there: None if it is not finite."""


class About(Struct, frozen=True):
    """Facts about the model and the training, from the files beside a checkpoint.

    A fact that no file states is None. `planned` is the total number of updates after which the
    training is to end.
    """

    model: str | None = None
    model_class: str | None = None
    loss: float | str | None = None  # "nan", "inf" or "-inf" if it is not finite
    loss_step: int | float | None = None
    evaluation_loss: float | str | None = None
    learning_rate: float | None = None
    epoch: float | None = None
    planned: int | None = None
    global_batch: int | None = None
    """The samples of one update, over all ranks."""
    losses: tuple[Point, ...] = ()


def about(manifest: Manifest) -> About:
    """Reads facts about the model and the training from a checkpoint and the files beside it."""
    stated_about = _of_files(manifest.files.siblings)
    state = manifest.state.get("client_state")
    if stated_about.epoch is None and isinstance(state, Mapping) and lightning.is_in(manifest):
        stated_about = replace(stated_about, epoch=number(state.get("epoch")))
    if stated_about.learning_rate is None:
        rates = {number(plain_group(group).get("lr")) for group in manifest.groups or ()}
        if len(rates) == 1:
            stated_about = replace(stated_about, learning_rate=rates.pop())
    return replace(stated_about, global_batch=global_batch(manifest))


def about_folder(folder: str) -> About:
    """Reads facts about the model and the training from a folder with an unreadable checkpoint.

    Only the files of trainers are read, such as config.json and trainer_state.json. Facts that need
    the manifest are None.
    """
    siblings = []
    for name in ("config.json", "adapter_config.json", STATE):
        path = os.path.join(folder, name)
        with suppress(ZckptError, OSError):
            if sources.is_file(path):
                siblings.append(Sibling(name, path, sources.size(path)))
    return _of_files(siblings)


def _of_files(siblings: Sequence[Sibling]) -> About:
    name, kind = model_of(_read(siblings, "config.json"), _read(siblings, "adapter_config.json"))
    return About(model=name, model_class=kind, **of_log(_read(siblings, STATE)))


def resuming(manifest: Manifest, root: str, path: str) -> str | None:
    """The line of code with which the program resumes from `path`; None if it is unknown.

    `root` is the engine's own folder; `path` may be the trainer's folder around it.
    """

    def of_engine(path: str) -> str:
        tag = manifest.run.origin.tag
        if manifest.format != TAGGED or not tag:
            return ""
        folder = root.removesuffix(os.sep + tag) or "."
        return f"model_engine.load_checkpoint({literal(folder)}, tag={literal(tag)})"

    return lightning.resuming(manifest, of_engine)(path) or None


def at_another_size(manifest: Manifest, path: str) -> str | None:
    """The command that makes the checkpoint usable on another number of ranks.

    It reshards the checkpoint, or writes it in an engine's format. None if the engine itself loads
    the checkpoint on any number of ranks.
    """
    format = formats.of(manifest)
    if format is None or format.is_neutral:
        return f"zckpt convert {quote(path)} NEW --to FORMAT"
    return f"zckpt reshard {quote(path)} NEW --dp N" if format.functions.obstacles else None


def _read(siblings: Iterable[Sibling], name: str) -> Mapping[str, Any]:
    try:
        return config_of(siblings, name) or {}
    except (ZckptError, OSError):
        return {}


# one function for each file


def model_of(config: Mapping[str, Any], adapter: Mapping[str, Any]) -> tuple[Name, Name]:
    """The model's name and class from config.json and adapter_config.json; None if not stated."""
    classes = config.get("architectures")
    kind = classes[0] if isinstance(classes, list) and classes else config.get("model_type")
    name, base = config.get("_name_or_path"), text(adapter.get("base_model_name_or_path"))
    if base is not None:
        kind = adapter.get("peft_type")
        return f"adapter of {base}", text(kind)
    return text(name), text(kind)


def of_log(state: Mapping[str, Any]) -> dict[str, Any]:
    """Reads losses, learning rate, epoch and planned updates from trainer_state.json.

    `state` is the content of the file (transformers 5.24).
    """
    log = state.get("log_history")
    lines = [line for line in log if isinstance(line, dict)] if isinstance(log, list) else []
    losses = [
        (step, loss)
        for line in lines
        if (loss := unbounded(line.get("loss"))) is not None
        and (step := number(line.get("step"))) is not None
    ]
    losses.sort(key=lambda point: point[0])
    planned = state.get("max_steps")
    return {
        "loss": losses[-1][1] if losses else None,
        "loss_step": losses[-1][0] if losses else None,
        "evaluation_loss": _last(lines, "eval_loss", unbounded),
        "learning_rate": _last(lines, "learning_rate", number),
        "epoch": number(state.get("epoch")),
        "planned": planned if type(planned) is int and 0 < planned < MOST_SAMPLES else None,
        "losses": thinned([(step, loss if type(loss) is float else None) for step, loss in losses]),
    }


def _last(lines: Sequence[Mapping[str, Any]], key: str, as_number: Callable[[Any], Any]) -> Any:
    found = (as_number(line.get(key)) for line in reversed(lines))
    return next((value for value in found if value is not None), None)


def text(value: Any) -> str | None:
    """Cuts a string to LONGEST characters; None for an empty string or any other value."""
    return value[:LONGEST] if isinstance(value, str) and value.strip() else None


def number(value: Any) -> Any:
    """Returns a number that a chart can show; None for any other value."""
    return value if type(value) in (int, float) and abs(value) < LARGEST else None


def unbounded(value: Any) -> float | str | None:
    """Returns a loss as a number, or as "nan", "inf" or "-inf"; None for any other value."""
    if type(value) is float and not math.isfinite(value):
        return str(value)
    number_or_none = number(value)
    return None if number_or_none is None else float(number_or_none)


def thinned(points: Sequence[Point]) -> tuple[Point, ...]:
    """Reduces a curve to about MOST_POINTS points without losing its peaks.

    Of each group of neighbors, only the lowest and the highest point are kept.
    """
    if len(points) <= MOST_POINTS:
        return tuple(points)
    width = -(-2 * len(points) // MOST_POINTS)
    kept: dict[int, Point] = {0: points[0], len(points) - 1: points[-1]}
    for start in range(0, len(points), width):
        part = range(start, min(start + width, len(points)))
        order = sorted(part, key=lambda place: points[place][1] or math.inf)
        kept |= {place: points[place] for place in (order[0], order[-1])}
    return tuple(kept[place] for place in sorted(kept))
