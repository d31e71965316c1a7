"""Finds the folders of a torch.distributed.checkpoint checkpoint.

    <dir>                                         one folder with `.metadata` and .distcp files
    <dir>/step-N                                  torchtitan's; the tag chooses one of several
    <dir>/pytorch_model_fsdp_0, optimizer_0       two folders of one checkpoint: Accelerate's and
                                                  Hugging Face Trainer's; _1 for a second model
    <dir>/model, optim (or optimizer)             two folders as NeMo AutoModel and others name them
    <dir>/meta.pt                                 all that is outside of state dicts (Lightning)
    <dir>/shard-R-model-F-of-N.safetensors        Hugging Face's storage (see hf.py): weights only

The folder `model` of such a pair may have Hugging Face's storage, or PEFT's adapter_model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from typing import Any

from ...core.grouping import by_key
from ...core.storage import sources
from ...core.storage.filenames import by_counting
from ...core.storage.inventory import role
from ...errors import Notice, UnsupportedCheckpoint, warning
from ...files.beginning import number_in
from ...files.dcpfile import ITEMS, names_any
from ...files.dcpnumbers import numbers_in
from ...files.dcptable import METADATA
from ...naming import peft
from ...training.lightning import META
from . import hf

STEP = re.compile(r"step-\d+")
MAX_MARKER = 1 << 16  # bytes
PARTS = re.compile(r"(pytorch_model_fsdp|optimizer)_(\d+)", re.ASCII)
MEGATRON_FSDP = (b"optimizer.param_to_group_meta.", b"rng_state.(")  # of 0.16.1
MEGATRON = (b"_extra_state/shard_", b"common_state/shard_", b"rng_state/shard_")
COUNTER = "global_step"
GROUPS, STATE, STEP_OF = "param_groups", "state.", ".step"
MODEL, OPTIMIZERS = "model", ("optim", "optimizer")
ROLES = (
    role("items", r"__(\d+)_(\d+)\.distcp", "dp", "part"),
    hf.SHARD,
    role("metadata", r"\.metadata", is_last=True),
)
"""The kinds of files in this format: how their names look, and what the numbers in them mean."""
ADAPTER = peft.WEIGHTS[0]


def detect(path: str) -> list[str]:
    """Finds the checkpoints at `path`: [""] for `path` itself, or torchtitan's ["step-10", ...].

    The result is [] if there is no checkpoint, or if Megatron-Core wrote it.
    """
    if not sources.is_folder(path) or _is_megatrons(path):
        return []
    return [""] if folders(path) else steps(path)


def steps(path: str) -> list[str]:
    """The names of a run's torchtitan step folders (`step-N`), sorted by N."""
    if not sources.is_folder(path) or folders(path):
        return []
    names = filter(STEP.fullmatch, sources.names(path))
    return by_counting(name for name in names if folders(os.path.join(path, name)))


def counter(path: str) -> int | None:
    """The `global_step` in the file meta.pt that Lightning (2.6) writes; None without it."""
    file = os.path.join(path, META)
    return number_in(file, (COUNTER,)) if sources.is_file(file) else None


def updates(path: str) -> float | None:
    """The largest step of any parameter in the optimizers' states; None if no step is stored.

    Only the values of steps are read.
    """
    parts = locate(path)[1] if len(detect(path)) == 1 else ()
    numbers = (number for part in parts for number in numbers_in(part, _steps_of_parameters))
    return max(numbers, default=None)


def _steps_of_parameters(keys: Collection[str]) -> list[str]:
    """Selects the keys of parameters' steps, such as "optimizer.state.fc.weight.step".

    A state dict is an optimizer's if it has `param_groups` beside `state`.
    """
    optimizers = {key.partition(GROUPS)[0] for key in keys if GROUPS in key}
    states = tuple(optimizer + STATE for optimizer in optimizers)
    return [key for key in keys if key.startswith(states) and key.endswith(STEP_OF)]


def detect_weak(path: str) -> list[str]:
    """[""] for a folder of torch's HuggingFaceStorageWriter (safetensors per rank); else [].

    Such a folder is read as this format only if no other format is detected.
    """
    return [""] if sources.is_folder(path) and hf.files(path) else []


def has_items(path: str) -> bool:
    """Whether a folder contains `.metadata` or .distcp files, even of an unfinished save."""
    names = sources.names(path) if sources.is_folder(path) else ()
    return any(name == METADATA or name.endswith(ITEMS) for name in names)


def folders(path: str) -> list[str]:
    """The folders that make up the checkpoint at `path`; [] if there is no checkpoint.

    This is `path` itself, or the folders in it that have models and optimizers.
    """
    if not sources.is_folder(path):
        return []
    if has_items(path):
        return [path]
    parts = sorted(filter(PARTS.fullmatch, sources.names(path)))
    parts = [os.path.join(path, name) for name in parts]
    return [folder for folder in parts if has_items(folder)] or _model_and_optimizers(path)


def _model_and_optimizers(path: str) -> list[str]:
    """The folder `model` in `path`, and the folders `optim` and `optimizer` beside it.

    The result is [] unless there are both weights and an optimizer.
    """
    model = os.path.join(path, MODEL)
    optimizers = [os.path.join(path, name) for name in OPTIMIZERS]
    beside = [folder for folder in optimizers if has_items(folder)]
    return [model, *beside] if beside and has_weights(model) else []


def has_weights(folder: str) -> bool:
    """Whether a folder has weights: .distcp files, safetensors shards or PEFT's adapter file."""
    if not sources.is_folder(folder):
        return False
    return has_items(folder) or bool(hf.files(folder)) or sources.is_file(adapter_of(folder))


def adapter_of(folder: str) -> str:
    """The path of PEFT's adapter weights in a folder; the file may be missing."""
    return os.path.join(folder, ADAPTER)


def is_of_optimizer(folder: str) -> bool:
    """Whether a folder is an optimizer's by its name, such as `optim` or `optimizer_0`."""
    name = os.path.basename(folder)
    match = PARTS.fullmatch(name)
    return name in OPTIMIZERS or (match is not None and match[1] in OPTIMIZERS)


def whole_of(folder: str) -> str | None:
    """The checkpoint's directory, if `folder` is only one of its several folders; else None."""
    above = os.path.dirname(os.path.abspath(folder))
    sibling_folders = folders(above)
    is_part = os.path.basename(os.path.abspath(folder)) in map(os.path.basename, sibling_folders)
    return os.path.dirname(folder.rstrip(os.sep)) or "." if is_part else None


def missing(folders: Sequence[str]) -> list[Notice]:
    """Warnings about missing numbers among Accelerate's folders: `_1` exists, but not `_0`."""
    matches = filter(None, (PARTS.fullmatch(os.path.basename(folder)) for folder in folders))
    numbers = by_key((match[1], int(match[2])) for match in matches)
    return [
        warning(
            "missing-file",
            f"{stem}_{max(numbers_of_stem)} exists, but {stem}_{number} does not: it may be lost",
            subject=f"{stem}_{number}",
        )
        for stem, numbers_of_stem in numbers.items()
        for number in sorted({*range(max(numbers_of_stem))}.difference(numbers_of_stem))
    ]


def is_pair(names: Sequence[str] | None) -> bool:
    """Whether a checkpoint's two folders are named `model` and `optim` (or `optimizer`).

    `names` are the folders' names; None for a checkpoint in a single folder. False for
    Accelerate's folders, such as `pytorch_model_fsdp_0`.
    """
    return MODEL in (names or ())


def locate(path: str, tag: str | None = None) -> tuple[str, list[str]]:
    """Returns the checkpoint's directory, and its folders with .distcp files.

    `tag` chooses a step folder in `path`. Raises UnsupportedCheckpoint for a checkpoint of
    Megatron-Core.
    """
    root = os.path.join(path, tag) if tag else path
    parts = folders(root) if sources.is_folder(root) else []
    steps = detect(path) if sources.is_folder(path) and not tag else []
    if not parts and len(steps) == 1 and steps[0]:
        root = os.path.join(path, steps[0])
        parts = folders(root)
    for folder in filter(_is_megatrons, parts):
        raise UnsupportedCheckpoint(
            "option-needed",
            f"{folder} was written by Megatron-Core",
            hint="read it with --from megatron",
            file=folder,
        )
    return root, parts


def place_in(folder: str, path: tuple[Any, ...]) -> tuple[Any, ...]:
    """Converts the path of a value in one folder to its path in the joined tree of all folders.

    A path is a tuple of keys. In Accelerate's folder number 1, ("model", ...) becomes ("model_1",
    ...).
    """
    ending = _number_ending(folder)
    return (f"{path[0]}{ending}", *path[1:]) if ending else path


@lru_cache
def _number_ending(folder: str) -> str:
    match = PARTS.fullmatch(os.path.basename(folder))
    return "" if match is None or match[2] == "0" else f"_{match[2]}"


def refuse_several(root: str, parts: list[str]) -> None:
    """Raises UnsupportedCheckpoint if the folders contain several models or several optimizers.

    `parts` are the folders of the checkpoint at `root`. zckpt does not read several models as
    one, because they have parameters of the same names.
    """
    names = [os.path.basename(folder) for folder in parts if folder != root]
    numbered = any(not name.endswith("_0") for name in names if PARTS.fullmatch(name))
    if numbered or {*OPTIMIZERS} <= {*names}:
        raise UnsupportedCheckpoint(
            "several-models",
            f"{root} has several models or optimizers: {', '.join(names)}",
            hint="give the folder of one model: zckpt reads its weights without the optimizer",
            file=root,
        )


def _is_megatrons(folder: str) -> bool:
    """Whether Megatron-Core wrote a folder.

    Megatron-Core (0.16.1) recognizes its folders by `metadata.json`. Megatron-FSDP writes no such
    file, and the file may be lost. In these cases the keys in `.metadata` decide.
    """
    path = os.path.join(folder, "metadata.json")
    if sources.is_file(path):
        with sources.opened(path) as file:
            if b'"sharded_backend"' in file.read(MAX_MARKER):
                return True
    return names_any(folder, (*MEGATRON_FSDP, *MEGATRON))


def own_files(root: str, parts: list[str]) -> Iterator[str]:
    """Yields the paths of the files `.metadata` and *.distcp directly in the directory `root`.

    Temporary files of an unfinished save are included. `parts` are the checkpoint's folders.
    Nothing is yielded if all of them are subfolders of `root`.
    """
    for name in os.listdir(root) if root in parts else ():
        if name.startswith(METADATA) or name.endswith((ITEMS, ".tmp", METADATA)):
            yield os.path.join(root, name)
