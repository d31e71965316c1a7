"""Finds the directory of a Megatron-Core checkpoint.

    RUN/latest_checkpointed_iteration.txt     "6", or "release"
    RUN/iter_0000006/, RUN/release/           one checkpoint each
    NAME/weights/                             one checkpoint of NeMo; RUN/NAME/weights/ in its run
        metadata.json                         {"sharded_backend": "torch_dist", ...}
        .metadata, __R_I.distcp               tensors, saved by torch.distributed.checkpoint
        common.pt                             what all ranks share; since 0.19 under a key instead
        mp_rank_TT[_PPP][_EEE]/               the older kind: a folder for each model-parallel rank

Megatron-FSDP writes only `.metadata` and `__R_I.distcp`; the keys identify its directories.
"""

from __future__ import annotations

import json
import os
from typing import Any

from ...core.storage import sources
from ...core.storage.filenames import by_counting
from ...core.storage.inventory import parse_name, role
from ...errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    NotACheckpoint,
    UnsupportedCheckpoint,
    listed,
)
from ...files.beginning import number_in
from ...files.dcpfile import names_any
from .saving_program import WEIGHTS, small_file

MARKER = "metadata.json"
LATEST = "latest_checkpointed_iteration.txt"
LEGACY = "model_optim_rng.pt"
COMMON, COUNTERS = "common.pt", ("iteration", "global_step")
BACKEND = "torch_dist"
OF_RANKS, OF_FSDP, UNMARKED = "mp_rank_*", "Megatron-FSDP's keys", f"no {MARKER}"
"""Kinds of directories that no `metadata.json` names: recognized by folders or keys."""
KEYS_OF_FSDP = (b"optimizer.param_to_group_meta.", b"rng_state.(")  # in keys; see fsdp.py
KEYS_OF_ITEMS = (b"_extra_state/shard_", b"common_state/shard_", b"rng_state/shard_")  # in keys
OF_RANK = r"mp_rank_(\d\d)(?:_(\d{3}))?(?:_(\d{3}))?"
MODEL = role("model", rf"{OF_RANK}/model_optim_rng\.pt", "tp", "pp", "ep")
ROLES = (
    role("items", r"__(\d+)_(\d+)\.distcp", "dp", "part"),
    MODEL,
    role("optimizer", rf"{OF_RANK}/distrib_optim\.pt", "tp", "pp", "ep"),
    role("common state", r"common\.pt"),
    role("marker", r"metadata\.json"),
    role("metadata", r"\.metadata", is_last=True),
)
"""The roles of this format's files."""


def detect(path: str) -> list[str]:
    """Finds the checkpoints at `path`: [""] for `path` itself, or ["iter_0000006"] in a run.

    In a run's directory, the only tag is the folder of the latest iteration. If no file names the
    latest, the folders of all iterations are tags. The result is [] if there is no checkpoint.
    """
    if not sources.is_folder(path):
        return []
    if kind_of(path) or kind_of(os.path.join(path, WEIGHTS)):
        return [""]
    tags, newest = iterations(path), latest(path)
    return [newest] if tags and newest is not None else tags


def iterations(path: str) -> list[str]:
    """The folders of a run that contain a checkpoint, oldest first."""
    if not sources.is_folder(path) or kind_of(path):
        return []
    inside = sources.names_but_of_files(path)
    names = (name for name in inside if not name.startswith("."))
    return by_counting(name for name in names if _is_one_of_run(path, name))


def counter(path: str) -> int | None:
    """The iteration that a checkpoint states in `common.pt`, or in its first rank's file.

    In NeMo's checkpoints the iteration is Lightning's `global_step`. None if no such file exists:
    since 0.19 only the folder's name states the iteration.
    """
    for folder in (path, os.path.join(path, WEIGHTS)):
        if sources.is_folder(folder):
            ranks = sorted(filter(is_of_rank, os.listdir(folder)))
            names = [COMMON, *(os.path.join(rank, LEGACY) for rank in ranks[:1])]
            files = filter(sources.is_file, (os.path.join(folder, name) for name in names))
            if (file := next(files, None)) is not None:
                return number_in(file, COUNTERS)
    return None


def is_iteration(name: str) -> bool:
    """Whether a folder's name is that of an iteration: `iter_0000006` or `release`."""
    digits = name.removeprefix("iter_")
    return name == "release" or (digits != name and len(digits) >= 7 and digits.isdecimal())


def is_of_rank(name: str) -> bool:
    """Whether a folder's name is that of a rank in older directories: mp_rank_TT_PPP_EEE."""
    return name.startswith("mp_rank_") and parse_name((MODEL,), f"{name}/{LEGACY}") is not None


def _is_one_of_run(run: str, name: str) -> bool:
    """Whether the folder `name` of a run contains a checkpoint, even a damaged one.

    False for a folder that the user may not open.
    """
    if sources.is_denied(os.path.join(run, name)):
        return False
    try:
        if is_iteration(name):
            return kind_of(os.path.join(run, name)) is not None
        return "sharded_backend" in _marker(os.path.join(run, name, WEIGHTS))
    except CorruptCheckpoint:  # the code that reads this checkpoint reports why
        return True


def kind_of(path: str) -> str | None:
    """The kind of Megatron-Core checkpoint in a folder; None for any other folder.

    A folder with mp_rank_* folders is OF_RANKS. Else the kind is the --ckpt-format in
    `metadata.json`, such as `torch_dist`. Without this file it is OF_FSDP or UNMARKED (torch_dist).
    """
    if not sources.is_folder(path):
        return None
    ranks = filter(is_of_rank, sources.names(path))
    if any(sources.is_file(os.path.join(path, rank, LEGACY)) for rank in ranks):
        return OF_RANKS
    marker = _marker(path)
    if not marker and names_any(path, KEYS_OF_FSDP):
        return OF_FSDP
    if "sharded_backend" in marker:
        return str(marker["sharded_backend"])[:80]
    return UNMARKED if names_any(path, KEYS_OF_ITEMS) else None


def locate(path: str, tag: str | None) -> str:
    """The directory of one checkpoint: `path` itself, or the folder in it that `tag` selects.

    Raises NotACheckpoint if there is no checkpoint of Megatron-Core, IncompleteCheckpoint if
    `metadata.json` is missing, and UnsupportedCheckpoint for --ckpt-format zarr.
    """
    folder = os.path.join(path, tag) if tag else path
    if not kind_of(folder) and not tag and len(tags := detect(path)) == 1:
        folder = os.path.join(path, tags[0])
        if tags[0] == latest(path):
            _require_latest(path, tags[0])
    if not kind_of(folder) and kind_of(os.path.join(folder, WEIGHTS)):
        folder = os.path.join(folder, WEIGHTS)
    kind = kind_of(folder)
    if kind is None:
        raise NotACheckpoint(
            "not-a-checkpoint",
            f"{folder} is not a Megatron-Core checkpoint: it has no {MARKER}",
            file=folder,
        )
    if kind == UNMARKED:
        raise IncompleteCheckpoint(
            "unfinished-save",
            f"{folder} has Megatron-Core's files, but no readable {MARKER}",
            hint="copy the whole directory; rank 0 writes this file last",
            file=folder,
        )
    if kind not in (BACKEND, OF_RANKS, OF_FSDP):
        raise UnsupportedCheckpoint(
            "writer-unsupported",
            f"{folder} was saved with Megatron's --ckpt-format {kind}, which zckpt does not read",
            hint="zckpt reads torch_dist: load the checkpoint in Megatron-Core 0.15, and save it "
            "with --ckpt-format torch_dist",
            file=folder,
        )
    return folder


def _require_latest(run: str, tag: str) -> None:
    """Raises IncompleteCheckpoint if `tag`, which a run's tracker file names, is missing.

    The tracker file is latest_checkpointed_iteration.txt.
    """
    folder = os.path.join(run, tag)
    if {*tag}.isdisjoint("/\\\0") and kind_of(folder):
        return
    saved_iterations = listed(iterations(run))
    raise IncompleteCheckpoint(
        "pointer-dangling",
        f"{os.path.join(run, LATEST)} names {tag[:99]!r}, but {run} has no such checkpoint, or "
        "lacks some of its files",
        hint="copy the whole directory, or choose an iteration with --tag: "
        f"{run} has {saved_iterations}",
        file=os.path.join(run, LATEST),
    )


def _marker(folder: str) -> dict[str, Any]:
    path = os.path.join(folder, MARKER)
    text = small_file(path)
    try:
        value = json.loads(text)
    except ValueError as error:
        if b"sharded_backend" in text:
            raise CorruptCheckpoint(
                "file-damaged", f"{path} is not JSON: {error}", file=path
            ) from error
        return {}
    return value if isinstance(value, dict) else {}


def latest(path: str) -> str | None:
    """The folder that a run's tracker file names as the latest; None without that file.

    The tracker file is latest_checkpointed_iteration.txt.
    """
    tracker = os.path.join(path, LATEST)
    if not sources.is_file(tracker):
        return None
    word = small_file(tracker).decode("utf-8", "replace").strip()
    return f"iter_{int(word):07d}" if word.isdecimal() and len(word) <= 18 else word


def to_load(run: str, tag: str) -> str:
    """A sentence: what the user must do so that Megatron-LM loads the iteration `tag`.

    "" if the run's tracker file names this iteration already.
    """
    named, tracker = latest(run), os.path.join(run, LATEST)
    if named == tag:
        return ""
    step = tag.removeprefix("iter_")
    if not step.isdecimal():
        return f"write {tag} into {tracker}: then Megatron-LM loads it"
    if named is not None and not is_iteration(named):  # Megatron-LM fails on such a tracker file
        return (
            f"{tracker} contains {named[:99]!r}: write {int(step)} into it, and Megatron-LM loads "
            f"{tag}"
        )
    says = "is missing" if named is None else f"names {named}"
    return f"{tracker} {says}: Megatron-LM loads {tag} only with --ckpt-step {int(step)}"
