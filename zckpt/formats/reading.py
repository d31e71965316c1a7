"""The user's options for reading a checkpoint.

Every format's `read` gets all of them, and uses those that apply. A new option of reading is a new
field here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypedDict

from msgspec import Struct

from ..errors import WrongOption
from ..training.options import Renames

REPLICAS = ("rank0", "mean")
"""The values of `--replicas`: how differing replicas on tensor ranks become one."""


class Keywords(TypedDict, total=False):
    """The keyword arguments of all functions that read a checkpoint; `zckpt.read` explains them."""

    format: str | None
    tag: str | None
    root: str | None
    step_policy: str | None
    buffers: Sequence[str]
    follow_links: bool
    tp_rules: str | os.PathLike[str] | None


class NamedKeywords(Keywords, total=False):
    """As `Keywords`, for a checkpoint that is read but not converted."""

    param_names: Sequence[str] | None


class SourceKeywords(Keywords, total=False):
    """As `Keywords`, for the source of a conversion.

    `param_names` is not among them: in a conversion it is an option of the target.
    """

    replicas: str | None


class Reading(Struct, frozen=True):
    """The user's options for reading a checkpoint; see `zckpt.read`.

    A format's `read` uses these options, as far as they apply to the format:
        tag             one of several checkpoints at the path
        root            one of several models, as NAME or NAME=OPTIMIZER
        step_policy     which step to use, if ranks or weights have different steps
        buffers         globs: tensors of the model whose values differ from rank to rank
        param_names     the names of an optimizer's numbered parameters, in its order
        weights_only    the optimizer's state may be left unread, and its parameters need no names
        tp_rules        a model family or a file that states how tensor ranks cut parameters
        ranks_apart     the tensors of tensor and pipeline ranks are not joined: the manifest has
                        each rank's slices, for a target with the same ranks
        with_slicings   the reader finds out how tensor ranks cut parameters, even if the checkpoint
                        has only one tensor rank, because the target may have more
        inspected       the checkpoint is only shown: if a file may be one rank's slice, this file
                        alone is read
        nameless        if an optimizer numbers its parameters and no file has their names, its
                        state is kept as the program's own state
        by_checksums    replicas on ranks are compared only by stated checksums: no tensor is read
        opens_items     every item of torch.distributed.checkpoint is opened, even where zckpt
                        can infer its byte layout from other items
        laid            zckpt has just laid out the files, so they cannot be hostile

    `zckpt.reading.read` applies these options to any format:
        format          the checkpoint's format, if the path has checkpoints of several formats
        rename          pairs of a regular expression and its replacement
        family          the value of `--family`
        replicas        the replica of a tensor to use, if those of tensor ranks differ
        for_target      the checkpoint is the source of a conversion. If reading does not use
                        `buffers`, no warning says so, because the target may use them
        follow_links    files beside the checkpoint may be read through links that lead out of its
                        directory
        masters_from_weights    fp32 masters that do not match their weights are dropped, with their
                        moments, and a target gets the weights as masters; all masters are read
        is_shared       several processes convert the checkpoint: while they read it, they compare
                        only the first elements of masters, and the rest while they copy it
    """

    format: str | None = None
    tag: str | None = None
    step_policy: str | None = None
    param_names: Sequence[str] | None = None
    weights_only: bool = False
    rename: Renames = ()
    family: str | None = None
    root: str | None = None
    tp_rules: str | None = None
    replicas: str | None = None
    ranks_apart: bool = False
    with_slicings: bool = False
    inspected: bool = False
    nameless: bool = False
    by_checksums: bool = False
    opens_items: bool = False
    laid: bool = False
    buffers: tuple[str, ...] = ()
    for_target: bool = False
    follow_links: bool = False
    masters_from_weights: bool = False
    is_shared: bool = False

    def __post_init__(self) -> None:
        if self.replicas not in (None, *REPLICAS):
            raise WrongOption(
                "option-invalid",
                f"--replicas {self.replicas!r} is none of {', '.join(REPLICAS)}",
                hint="leave it out, unless an error says that replicas of tensor ranks differ",
            )


USUAL = Reading()
"""The default options: everything is read as the files state it."""
