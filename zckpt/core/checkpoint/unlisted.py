"""Finds weights that no optimizer lists.

Most such weights are frozen: the base of an adapter, layers that a fine-tune keeps. But if a
program saved only one rank's share of an optimizer's states, the weights of the other ranks are not
listed either, and their states are lost. One file rarely shows which of these two cases it is.
"""

from __future__ import annotations

from ...errors import IncompleteCheckpoint, Notice, counted, listed, warning
from .facts import FlatBufferEngine, StateDictEngine
from .manifest import Manifest
from .weights import is_optimizers

MANY = 8  # the most names in the warning
LOST = (
    "if ZeroRedundancyOptimizer saved this, the other ranks' states are lost: call "
    "`consolidate_state_dict()` before saving"
)


def unlisted(manifest: Manifest) -> list[Notice]:
    """Warns about weights that are in no param group: a list of one warning with their names.

    The list is empty if there is no optimizer, or if the files state which weights are frozen.
    """
    ranks, engine = manifest.rank_manifests, manifest.run.engine
    # DeepSpeed states which parameters are frozen (0.19.8)
    if isinstance(engine, FlatBufferEngine):
        return []
    if isinstance(engine, StateDictEngine) and not engine.guessed:
        return []
    slots = {entry.slot for rank in ranks for entry in rank.entries.values()}
    if manifest.groups is None and not any(map(is_optimizers, slots)):
        return []
    trained = {name for rank in ranks for name, p in rank.parameters.items() if p.trainable}
    frozen = [
        name
        for name in dict.fromkeys(name for rank in ranks for name in rank.parameters)
        if name not in trained
    ]
    if not frozen:
        return []
    what = "the other one is" if len(frozen) == 1 else f"the other {len(frozen)} are"
    message = (
        f"the optimizer lists {len(trained)} of {counted(len(trained) + len(frozen), 'weight')}: "
        f"{what} taken for frozen ({listed(frozen, MANY)})"
    )
    if _may_be_share(manifest):
        message += f". {LOST[0].upper()}{LOST[1:]}"
    return [warning("frozen-inferred", message, subject=frozen[0])]


def _may_be_share(manifest: Manifest) -> bool:
    """Whether a file may hold only one rank's optimizer states, although it does not say so.

    True if the file is not a part of sharded storage, numbers the optimizer's parameters, and does
    not state several data-parallel ranks.
    """
    engine = manifest.run.engine
    is_whole = isinstance(engine, StateDictEngine) and engine.whole
    return is_whole and manifest.notices.is_numbered and manifest.run.origin.dp in (None, 1)


def refuse_share(manifest: Manifest) -> None:
    """Raises IncompleteCheckpoint if the files have the optimizer states of only one rank.

    It is called for targets that continue the training.
    """
    if share := manifest.notices.share:
        raise IncompleteCheckpoint(
            "missing-rank-file",
            f"{manifest.root} has one rank's share of ZeroRedundancyOptimizer: {share}",
            hint="the other ranks' states are lost: call `consolidate_state_dict()` before saving. "
            "--weights-only converts the weights alone. If no state is lost, because all other "
            "weights are frozen, list the trained ones with --param-names FILE",
            file=manifest.root,
        )
