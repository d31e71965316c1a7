"""Checks before tensors are used: do fp32 masters round to weights, are replicas equal?

Only the bytes that these checks need are read; `verify` reads all bytes. The checks are for the
functions that give out tensors: `convert`, `load`, and the loader of torch.distributed.checkpoint.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from .. import formats
from ..core.checkpoint.manifest import Manifest
from ..core.comparison import duplicates, masters
from ..core.passes.full_checks import FullCheck
from ..core.storage import sources
from ..errors import Notice, WrongOption
from ..formats.format import Format

OTHER_TIME = "files-of-other-time"
"""The code of the warning that ranks' files were written long before or after other files."""


def full_checks(
    manifest: Manifest, replicas: str | None, accept_weights: bool, hint: str | None = None
) -> list[FullCheck]:
    """Lists the comparisons that must succeed before a tensor is returned or written.

    They compare ranks' replicas with each other, and fp32 masters with their weights.

        replicas          the value to use if replicas differ: "rank0", "mean" or None (an error)
        accept_weights    masters that do not round to their weights are only a warning
        hint              replaces the format's hint for such masters
    """
    format, checks = formats.named(manifest.format), list[FullCheck]()
    # for BEGINNINGS, `check_tensors` compares the first elements. Masters are not compared if the
    # engine changes weights without changing their masters (`weights_differ`)
    if format.compares == masters.ALL and not manifest.run.weights_differ:
        hint = hint or _hint(manifest, format)
        checks.append(masters.Rounding(manifest, hint, accept_weights))
    if format.functions.copies:
        checks += format.functions.copies(manifest, replicas)
    return checks


def _hint(manifest: Manifest, format: Format) -> str:
    way_out = format.functions.way_out
    return way_out(manifest) if way_out else masters.USUAL_HINT


def check_tensors(
    manifest: Manifest,
    replicas: str | None,
    accept_weights: bool,
    shared: Sequence[FullCheck] | None = None,
) -> list[Notice]:
    """Runs the checks that read tensors, before a tensor is loaded or written; returns warnings.

    `shared` lists comparisons that a conversion makes while it copies: of their tensors, only the
    first elements are compared here. `full_checks` explains the other arguments. Raises
    InconsistentCheckpoint if a check fails, and CorruptCheckpoint if damage is the cause.
    """
    format = formats.named(manifest.format)
    functions, lines = format.functions, list[Notice]()
    if not format.is_neutral:  # it states each file's checksum
        lines += duplicates.check_duplicates(manifest)
    if format.compares == masters.BEGINNINGS and not manifest.run.weights_differ:
        hint = _hint(manifest, format)
        lines += masters.check(manifest, format.compares, hint, accept_weights)
    if functions.check:
        lines += functions.check(manifest)
    for check in shared or ():
        check.begin()
    if shared is None:
        for check in full_checks(manifest, replicas, accept_weights):
            lines += check.compare_all()
    return lines


def check_to_load(manifest: Manifest, replicas: str | None, accept_weights: bool) -> None:
    """Runs `check_tensors` for a program that loads tensors; its warnings are Python warnings.

    Unchanged files are checked only once, however many tensors are loaded. Raises WrongOption if
    `replicas` is "mean", because no file contains the mean.
    """
    if replicas == "mean":
        raise WrongOption(
            "option-not-applicable",
            "the mean of the tensor-parallel ranks' replicas cannot be loaded",
            hint='give replicas="rank0", or convert with --replicas mean and load the target',
        )
    question = replicas, accept_weights, manifest.run.origin, manifest.files.fingerprints
    if _asked.get(manifest.root) == question:
        return
    with sources.unchanged(manifest.files.fingerprints):
        lines = check_tensors(manifest, replicas, accept_weights)
    # the manifest has this warning, which a program that loads tensors would not see
    timed = (line for line in manifest.notices.warnings if line.code == OTHER_TIME)
    for line in (*timed, *lines):
        warnings.warn(line.message, stacklevel=3)
    _asked.clear()
    _asked[manifest.root] = question


_asked: dict[str, object] = {}
"""Fingerprints of the files of the last checkpoint that was checked, by its path."""
