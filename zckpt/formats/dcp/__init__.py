"""Directories of torch.distributed.checkpoint, as FSDP1, FSDP2 and plain torch save them.

    files.py    which folders make the checkpoint
    read.py     the state dicts in them, and their manifest
    items.py    the same by key: an item is read when a program asks for it
    hf.py       Hugging Face's storage of the same: safetensors without an index
    write.py    a directory that any number of ranks loads
    gather.py   how torch's planner joins boxes: the rule behind verify --gather

Facts in this package are of torch 2.13.0 unless said otherwise.
"""

from __future__ import annotations

from typing import TypedDict

from ...core.values import replace
from ...training.options import (
    ALLOW_OBJECT,
    DIALECT,
    DP,
    DTYPE,
    GROUP_DEFAULTS,
    MAX_FILE_SIZE,
    WEIGHTS_ONLY,
    Option,
)
from ..format import Format

LAYOUT: Option[str | None] = Option(
    "dcp_layout",
    "--dcp-layout",
    None,
    "The form of the keys",
    choices=("nested", "flat"),
    usual="the source's, or nested",
    rare=True,
)


class Keywords(TypedDict, total=False):
    """The options of this module as keyword arguments, for type checkers and editors."""

    dcp_layout: str | None


FORMAT = Format(
    name="dcp",
    folder="dcp",
    about="torch.distributed.checkpoint of FSDP1, FSDP2, plain torch",
    family="torch",
    options=(
        DP,
        WEIGHTS_ONLY,
        DTYPE,
        LAYOUT,
        replace(DIALECT, choices=("accelerate",)),
        GROUP_DEFAULTS,
        MAX_FILE_SIZE,
        ALLOW_OBJECT,
    ),
    weak=True,
    numbers=True,
    gathers=True,
    groups="with_trainers_groups",
    objects=frozenset(),
)
