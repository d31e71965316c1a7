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
    """The keyword arguments for a checkpoint that is read but not converted."""

    param_names: Sequence[str] | None


class SourceKeywords(Keywords, total=False):
    """The keyword arguments for the source of a conversion.

    `param_names` is not among them: in a conversion it is an option of the target.
    """

    replicas: str | None


class Reading(Struct, frozen=True):
    """The user's options for reading a checkpoint; see `zckpt.read`.

    A format's `read` uses these options, as far as they apply to the format:
        tag             one of several checkpoints at the path
        root            one of several models: NAME or NAME=OPTIMIZER
        step_policy     the step to use if ranks or weights differ
        buffers         globs of model tensors that differ between ranks
        param_names     names of an optimizer's numbered parameters, in its order
        weights_only    the optimizer's state may be left unread
        tp_rules        a model family or a file: how tensor ranks cut parameters
        ranks_apart     slices of tensor and pipeline ranks are not joined
        with_slicings   the reader finds out how tensor ranks cut parameters, even for one rank
        inspected       the checkpoint is only shown: a file that may be a slice is read alone
        nameless        optimizer states without names are kept uninterpreted
        by_checksums    replicas are compared only by checksums: no tensor is read
        opens_items     every item of torch.distributed.checkpoint is opened
        laid            zckpt has just created these files, without the tensors' bytes

    `zckpt.reading.read` applies these options to any format:
        format          the format, if the path has checkpoints of several
        rename          pairs of a regular expression and its replacement
        family          the value of `--family`
        replicas        the value to use if replicas of tensor ranks differ
        for_target      the checkpoint is the source of a conversion
        follow_links    links may lead out of the checkpoint's directory
        masters_from_weights    fp32 masters that do not match their weights are dropped
        is_shared       several processes convert the checkpoint together
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
    ranks_apart: bool = False  # for a target with the same ranks
    with_slicings: bool = False  # a target may have more tensor ranks than the checkpoint
    inspected: bool = False
    nameless: bool = False
    by_checksums: bool = False
    opens_items: bool = False  # else zckpt may infer an item's byte layout from other items
    laid: bool = False  # so they cannot be hostile
    buffers: tuple[str, ...] = ()
    for_target: bool = False  # no warning about unused `buffers`: the target may use them
    follow_links: bool = False
    masters_from_weights: bool = False  # reads all masters; their moments are dropped too
    is_shared: bool = False  # only the first elements of masters are compared while reading

    def __post_init__(self) -> None:
        if self.replicas not in (None, *REPLICAS):
            raise WrongOption(
                "option-invalid",
                f"--replicas {self.replicas!r} is none of {', '.join(REPLICAS)}",
                hint="leave it out, unless an error says that replicas of tensor ranks differ",
            )


USUAL = Reading()
"""The default options: everything is read as the files state it."""
