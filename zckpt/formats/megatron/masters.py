"""Finds wrong fp32 masters: rounded to the type of the weights, they do not give the weights.

Megatron-Core 0.14 to 0.19.2 writes wrong masters and moments into `fully_reshardable` files if the
optimizer has several buckets and one has padding at its end: it gathers without the padding, and
then uses offsets that count it. The weights are right. Flat buffers are not affected: zckpt checks
by rounding where their parameters are (buffers/placing.py). This module also compares replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from ...core.checkpoint.dtypes import SIZES
from ...core.checkpoint.entries import Entry
from ...core.checkpoint.facts import NamedWeightsEngine
from ...core.checkpoint.manifest import Manifest
from ...core.checkpoint.weights import is_optimizers
from ...core.comparison.compare import Result
from ...core.comparison.masters import unlike
from ...core.comparison.replicas import Replicas, copies_of
from ...core.storage.fragments import ZEROS, Extent, solid
from ...errors import InconsistentCheckpoint, Notice, counted, listed, warning
from ...training.faults import MIXED_BUCKETS
from ...training.optimizers import MOMENTS
from .common_state import READABLE

LOST = "lost_moments"  # key within a manifest's state of Megatron-Core
OTHERS = (
    "the model may not be a GPTModel, or files of two saves are mixed: add --weights-only to read "
    "the weights without the optimizer. If the program saved other weights than it trained, such "
    "as an average (EMA), add --accept-weights"
)


def copies(manifest: Manifest, replicas: str | None) -> list[Replicas]:
    """Lists the replicas of tensors, which a conversion compares with the tensors that it uses.

    If any differ, the comparison raises InconsistentCheckpoint, which lists their parameters. The
    argument `replicas` (the value of --replicas) is not used.
    """

    def judge(differing: Sequence[Result]) -> list[Notice]:
        if different := dict.fromkeys(result.match.a.parameter for result in differing):
            raise InconsistentCheckpoint(
                "copies-differ",
                f"{manifest.root}: ranks hold replicas of {listed(list(different), 4)} that differ",
                hint="Megatron-Core keeps replicas equal: take an earlier checkpoint, or add "
                "--weights-only to read the weights without the optimizer",
                file=manifest.root,
            )
        return []

    return [Replicas(manifest, [*copies_of(manifest)], judge)]


def way_out(manifest: Manifest) -> str:
    """A hint: what the user can do about fp32 masters that do not round to their weights."""
    if sharding(manifest) != READABLE:
        return OTHERS
    return f"{MIXED_BUCKETS.message}; {MIXED_BUCKETS.hint}"


def rebuilt(manifest: Manifest, elements: str) -> Manifest:
    """Drops fp32 masters that do not round to their weights, and their moments; adds a warning.

    `elements` says what is compared: BEGINNINGS (the first elements of each fragment) or ALL. If
    any master is wrong, those of all 1-d and 0-d parameters are dropped too. Only
    `fully_reshardable` checkpoints are changed.
    """
    wrong = {result.match.a.parameter for _, result in unlike(manifest, elements)}
    if not wrong or sharding(manifest) != READABLE:  # a conversion refuses other shardings
        return manifest
    # norms are often constant, so a wrong master may round to its weight by chance
    vectors = {name for name, item in manifest.parameters.items() if len(item.shape) < 2}
    lost = [name for name in manifest.parameters if name in {*vectors, *wrong}]
    slots = {entry.slot for entry in manifest.entries.values() if is_optimizers(entry.slot)}
    given_up = {(name, slot) for name in lost for slot in ("master", *slots)}
    message = (
        f"zckpt drops the masters and {listed(sorted(slots))} of "
        f"{counted(len(lost), 'parameter')} (out of {len(manifest.parameters)}), and makes new "
        f"masters from the weights: the masters of {len(wrong)} do not round to their weights, and "
        f"the masters of vectors cannot be checked. The parameters are: {', '.join(lost)}"
    )
    mixed_up = warning("moments-lost", message, subject=lost[0])
    kept = {**manifest.state["megatron"], LOST: lost}
    return manifest.replace(
        entries={key: item for key, item in manifest.entries.items() if key not in given_up},
        state={**manifest.state, "megatron": kept},
        warnings=(*manifest.notices.warnings, mixed_up),
    )


def with_zeros(manifest: Manifest) -> Manifest:
    """Adds zeros for the moments that `rebuilt` dropped together with wrong masters.

    A run needs the moments of all trained parameters.
    """
    kept = manifest.state.get("megatron")
    lost = kept.get(LOST) if isinstance(kept, dict) else None
    names = [name for name in lost or () if name in manifest.parameters]
    slots = {e.slot: e.dtype for e in manifest.entries.values() if is_optimizers(e.slot)}
    zeros = {}
    for name, (slot, dtype) in product(names, (slots or dict.fromkeys(MOMENTS, "F32")).items()):
        shape = manifest.parameters[name].shape
        if (name, slot) not in manifest.entries:
            extent = Extent(ZEROS, 0, prod(shape) * SIZES[dtype])
            zeros[name, slot] = Entry(name, slot, dtype, shape, solid(prod(shape), extent))
    if not zeros:
        return manifest
    message = (
        f"the moments of {counted(len(names), 'parameter')} are zeros, because the source's are "
        f"lost: the next updates of {listed(names, 4)} differ from the original run's"
    )
    of_zeros = warning("moments-lost", message, subject=names[0])
    return manifest.replace(
        entries={**manifest.entries, **zeros}, warnings=(*manifest.notices.warnings, of_zeros)
    )


def sharding(manifest: Manifest) -> str | None:
    """How the optimizer's state is sharded, such as "fully_reshardable"; None if unknown."""
    return (
        manifest.run.engine.dialect if isinstance(manifest.run.engine, NamedWeightsEngine) else None
    )
