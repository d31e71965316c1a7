"""The files of DeepSpeed's own universal checkpoints, which its converter makes.

    <run>/latest_universal                       the tag, as text
    <run>/<tag>/mp_rank_MM_model_states.pt       the run's model files as they were; MM counts
                                                 tensor- and pipeline-parallel ranks
    <run>/<tag>/zero_pp_rank_R_mp_rank_MM_...    in stage 3 also one per data-parallel rank
    <run>/<tag>/zero/optimizer_state.pt          all groups' hyper-parameters, the loss scale
    <run>/<tag>/zero/<parameter>/fp32.pt         its master; exp_avg.pt ... its states
    <run>/<tag>/zero/<parameter>/step.pt         stage 1 and 2; stage 3: in optimizer_state.pt

`load_universal` loads them. In stages 1 and 2 a tensor's file is a dictionary {param, cat_dim,
...}, in stage 3 only the flat tensor. Keys such as `cat_dim` tell the engine how to cut the full
tensor for tensor parallelism.

The model files are the same as in a run's directory. DeepSpeed also puts copies of frozen weights
and buffers below zero/ as fp32.pt; nothing reads them.
"""

from __future__ import annotations

import os
from typing import Any

from ...core.grouping import by_key
from ...core.storage.inventory import Numbers, Role, every, gaps, parse_name, refuse_gaps, role
from ...errors import IncompleteCheckpoint, InconsistentCheckpoint
from ..deepspeed_states.directories import (
    MODEL,
    MODEL_3,
    TagDirectory,
    TagKind,
    holds_universal,
    universal_tags,
)
from ..deepspeed_states.directories import ROLES as OF_RUN

POINTER = "latest_universal"
KIND = TagKind("universal checkpoint of DeepSpeed", POINTER, holds_universal, universal_tags)
ZERO = "zero"
COMMON = "optimizer_state.pt"
OURS = "zckpt"  # key in optimizer_state.pt: zckpt wrote these files, not the converter
CUTS = "zckpt_tensor_parallel"  # key there too: rules that joined the source's tensor ranks
MASTER = "fp32"
VIEW = "sub_param_shape"  # key beside a tensor: a view of several parts, maybe of more dimensions

ROLES = (*OF_RUN, role("optimizer", r"zero/.+"))
"""Roles of files by their names: those of a run's files, and `optimizer` for files below zero/."""

SliceInfo = dict[str, Any]
"""The keys beside the tensor in a parameter's file, which say how the engine cuts it."""


def is_name(name: str) -> bool:
    """Whether a file system accepts this name for a file or folder."""
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        return False
    return 0 < length <= 255 and name not in (".", "..") and {*name}.isdisjoint("/\0")


def model_files(directory: TagDirectory) -> list[list[str]]:
    """The paths of the model files: a list per model-parallel rank, sorted by data-parallel rank.

    In stages 1 and 2 each list has one file. Raises IncompleteCheckpoint if files are missing, and
    InconsistentCheckpoint if files of stage 3 are mixed with files of stage 1 or 2.
    """
    by_role: dict[Role, dict[Numbers, str]] = {}
    for name in os.listdir(directory.path):
        if (recognized := parse_name((MODEL, MODEL_3), name)) is not None:
            by_role.setdefault(recognized.role, {})[recognized.numbers] = os.path.join(
                directory.path, name
            )
    if len(by_role) > 1:
        raise InconsistentCheckpoint(
            "mixed-saves",
            f"{directory.path} holds model files of stage 3 and of stage 1 or 2",
            hint="keep only the files of one save",
            file=directory.path,
        )
    if not by_role:
        raise IncompleteCheckpoint(
            "missing-file",
            f"{directory.path} holds no model states",
            hint="copy them from the checkpoint that was converted: mp_rank_00_model_states.pt and "
            "the like",
            file=directory.path,
        )
    (role, there), *_ = by_role.items()
    wanted = every(*(range(1 + max(own)) for own in zip(*there, strict=True)))
    hint = "the converter copies the files of all ranks"
    refuse_gaps(directory.path, gaps(role, there, wanted), hint=hint)
    by_rank = by_key((numbers[-1], path) for numbers, path in sorted(there.items()))
    return [by_rank[rank] for rank in sorted(by_rank)]
