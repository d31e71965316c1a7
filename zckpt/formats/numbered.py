"""Which folder inside of a numbered one is the checkpoint, and which files lie around it?

    step3/model_and_optim        around it: train/rank0.pt, .metadata.json     OLMo-core 3.0
    global_step_3/actor          around it: data.pt; critic/ of PPO            verl 0.7
    005000/pretrained_model      around it: training_state/                    lerobot 0.4
    step_10/trainer              around it: orchestrator/progress.pt           prime-rl

No program is known here. A folder whose name ends with a number, and that holds exactly one
checkpoint, is this checkpoint: its program looks for the folder of that number. A checkpoint with a
number in its own name needs none around it, and weights alone are one only if an optimizer of the
program's own lies around them.
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
"""How deep a checkpoint lies in its numbered folder: verl keeps Megatron's in `actor/dist_ckpt`."""
MOST_FILES = 10_000
"""So many files are looked at for an optimizer of the program's own."""


def is_numbered(path: str) -> bool:
    """Whether the name of a folder ends with a number."""
    return NUMBER.search(os.path.basename(os.path.abspath(path))) is not None


def may_be_inside(name: str) -> bool:
    """Whether a folder of this name may lead to the checkpoint of a numbered one."""
    return DIGIT.search(name) is None and not name.startswith(".")


def name_of(manifest: Manifest) -> str:
    """The name of the numbered folder around a checkpoint; empty if there is none."""
    folder = manifest.files.numbered
    return os.path.basename(os.path.abspath(folder)) if folder else ""


def has_optimizer(folder: str, inside: str) -> bool:
    """Whether a file around weights is called an optimizer's: zckpt does not read its form."""
    own = os.path.join(folder, inside)
    files = sources.walk(folder, lambda path: path != own and not sources.is_denied(path))
    return any(is_optimizers(entry.name) for entry in islice(files, MOST_FILES))


def is_optimizers(name: str) -> bool:
    """Whether a file is called an optimizer's."""
    return "optim" in os.path.basename(name)


def with_files_around(
    manifest: Manifest, folder: str, inside: str, others: Collection[str]
) -> Manifest:
    """The checkpoint in the folder `inside`, with the other files of the numbered `folder`.

    `others` are further checkpoints in it, which are left out and named.
    """
    files = SiblingList(folder, OPEN_FOLDERS | OPEN_FILES)
    own = {inside, *others}
    files.add_below(folder, lambda name, _: name in own)
    files.refuse([f"{name}/" for name in others], f"--root takes {inside}")
    origin = manifest.run.origin
    return manifest.replace(
        origin=replace(origin, inside=inside) if origin.format == manifest.format else origin,
        around=(*manifest.files.around, *files.files),
        numbered=folder,
        omitted=(*manifest.notices.omitted, *files.omitted),
    )
