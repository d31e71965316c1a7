"""Checks that a checkpoint is intact, as far as bytes must be read before tensors are used.

`verify` reads all bytes. These checks are for the functions that give out tensors: `convert`,
`load`, and the loader of torch.distributed.checkpoint.
"""

from __future__ import annotations

import warnings

from .. import formats
from ..core.checkpoint.manifest import Manifest
from ..core.comparison import duplicates, masters
from ..core.storage import sources
from ..errors import Notice, WrongOption
from ..formats.format import Format

OTHER_TIME = "files-of-other-time"
"""The code of a reader's warning that a program which loads tensors gets, too."""


def rounding_of(manifest: Manifest, accept_weights: bool) -> masters.Rounding | None:
    """The comparison of all masters with their weights that a conversion makes while it copies.

    None if the format needs only the beginnings compared, or if its engine changes weights without
    their masters.
    """
    format = formats.named(manifest.format)
    if format.compares != masters.ALL or manifest.run.weights_differ:
        return None
    return masters.Rounding(manifest, _hint(manifest, format), accept_weights)


def _hint(manifest: Manifest, format: Format) -> str:
    way_out = format.functions.way_out
    return way_out(manifest) if way_out else masters.USUAL_HINT


def check_tensors(
    manifest: Manifest,
    replicas: str | None,
    accept_weights: bool,
    rounding: masters.Rounding | None = None,
) -> list[Notice]:
    """Runs the checks that read tensors, before one is loaded or written; returns warnings.

    The checks: whether a file is a copy of another one, whether masters round to their weights, and
    whether replicas of ranks are equal. Of masters that are left to `rounding`, only the beginnings
    are compared. Raises InconsistentCheckpoint if a check fails, and CorruptCheckpoint if damage is
    the cause. With `accept_weights`, masters that do not round are only a warning. If the engine
    changes weights without their masters, they are not compared. `replicas` says which of several
    differing replicas is used.
    """
    format = formats.named(manifest.format)
    functions, lines = format.functions, list[Notice]()
    if not format.is_neutral:  # it states each file's checksum
        lines += duplicates.check_duplicates(manifest)
    if rounding:
        rounding.begin()
    elif format.compares is not None and not manifest.run.weights_differ:
        hint = _hint(manifest, format)
        lines += masters.check(manifest, format.compares, hint, accept_weights)
    if functions.check:
        lines += functions.check(manifest, replicas)
    return lines


def check_to_load(manifest: Manifest, replicas: str | None, accept_weights: bool) -> None:
    """Runs `check_tensors` for a program that loads tensors, and issues Python warnings.

    Unchanged files are checked once, however many tensors are loaded. Raises WrongOption for the
    mean of replicas, which is no tensor of the files.
    """
    if replicas == "mean":
        raise WrongOption(
            "option-not-applicable",
            "no mean of the tensor ranks' copies is loaded",
            hint='give replicas="rank0", or convert with --replicas mean and load the target',
        )
    question = replicas, accept_weights, manifest.run.origin, manifest.files.fingerprints
    if _asked.get(manifest.root) == question:
        return
    with sources.unchanged(manifest.files.fingerprints):
        lines = check_tensors(manifest, replicas, accept_weights)
    timed = (line for line in manifest.notices.warnings if line.code == OTHER_TIME)
    for line in (*timed, *lines):
        warnings.warn(line.message, stacklevel=3)
    _asked.clear()
    _asked[manifest.root] = question


_asked: dict[str, object] = {}
"""Fingerprints of the files of the last checkpoint that was checked, by its path."""
