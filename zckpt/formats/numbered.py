"""Finds the checkpoint inside of a numbered folder such as step3/, and the files around it.

    step3/model_and_optim        around it: train/rank0.pt, .metadata.json     OLMo-core 3.0
    global_step_3/actor          around it: data.pt; critic/ of PPO            verl 0.7
    005000/pretrained_model      around it: training_state/                    lerobot 0.4
    step_10/trainer              around it: orchestrator/progress.pt           prime-rl

The rule is the same for all programs. If a folder's name ends with a number, and it contains
exactly one checkpoint, the folder counts as that checkpoint, because the training program looks for
the numbered folder. A subfolder whose own name has a digit never counts as the checkpoint inside.
Weights without an optimizer count only if a file around them has an optimizer's name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from itertools import islice

from msgspec.structs import replace

from ..core.checkpoint.manifest import Manifest
from ..core.checkpoint.siblings import SiblingList
from ..core.storage import sources
from ..training.trainers import OPEN_FILES, OPEN_FOLDERS

NUMBER, DIGIT = re.compile(r"[0-9]\Z"), re.compile(r"[0-9]")
DEPTH = 2
"""The depth of a checkpoint in its numbered folder: verl keeps Megatron's in `actor/dist_ckpt`."""
MOST_FILES = 10_000
"""The most files of a numbered folder whose names are checked for an optimizer's name."""


def is_numbered(path: str) -> bool:
    """Whether the name of a folder ends with a number."""
    return NUMBER.search(os.path.basename(os.path.abspath(path))) is not None


def may_be_inside(name: str) -> bool:
    """Whether a numbered folder may keep its checkpoint in a subfolder of this name.

    False if the name has a digit, or begins with a dot.
    """
    return DIGIT.search(name) is None and not name.startswith(".")


def name_of(manifest: Manifest) -> str:
    """The name of the numbered folder, such as step3, around a checkpoint; "" if there is none."""
    folder = manifest.files.numbered
    return os.path.basename(os.path.abspath(folder)) if folder else ""


def has_optimizer(folder: str, inside: str) -> bool:
    """Whether a numbered folder has a file, outside of `inside`, with an optimizer's name.

    `inside` is a subfolder with weights alone. The optimizer's file is not read.
    """
    weights_path = os.path.join(folder, inside)
    files = sources.walk(folder, lambda path: path != weights_path and not sources.is_denied(path))
    return any(is_optimizers(entry.name) for entry in islice(files, MOST_FILES))


def is_optimizers(name: str) -> bool:
    """Whether a file's name contains "optim"."""
    return "optim" in os.path.basename(name)


def with_files_around(
    manifest: Manifest, folder: str, inside: str, other_checkpoints: Collection[str]
) -> Manifest:
    """Adds the other files of a numbered folder to the manifest of the checkpoint in it.

    The checkpoint is in the subfolder `inside` of `folder`. Subfolders in `other_checkpoints` are
    not added: notes in the manifest say that they are left out.
    """
    files = SiblingList(folder, OPEN_FOLDERS | OPEN_FILES)
    checkpoints = {inside, *other_checkpoints}
    files.add_below(folder, lambda name, _: name in checkpoints)
    files.refuse([f"{name}/" for name in other_checkpoints], f"--root takes {inside}")
    origin = manifest.run.origin
    return manifest.replace(
        origin=replace(origin, inside=inside) if origin.format == manifest.format else origin,
        around=(*manifest.files.around, *files.files),
        numbered=folder,
        omitted=(*manifest.notices.omitted, *files.omitted),
    )
