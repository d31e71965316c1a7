"""How do the processes of a launch share a pass over tensors that only reads: verify, diff, stats?

Rank 0 reads the checkpoints and sends their manifests. Then every process takes blocks of tasks by
a counter in the store, and sends what it has found: CRC-32s of parts, differences, statistics. That
is small beside the tensors. Rank 0 adds it to its own, and reports.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from ..core.pooling import Claim
from ..core.resources import Copying
from ..core.sources import on_this_node
from ..core.values import replace
from . import handover
from .group import Group


class LeaderPool:
    """Rank 0's side of the passes of one command, which follow each other."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._passes = 0

    def begin(self, work: Any) -> Claim:
        number = self._passes
        self._passes += 1
        sent = handover.with_manifests(work, handover.tensors_of)
        self.group.send(f"pass/{number}", handover.to_bytes(sent))
        return partial(self.group.next, f"block/{number}")

    def others(self) -> Iterator[Any]:
        number = self._passes - 1
        for rank in range(1, self.group.size):
            yield handover.from_bytes(self.group.received(f"result/{number}/{rank}"))


def take_part(group: Group, copying: Copying) -> None:
    """What all processes but rank 0 do, until rank 0 has ended; raises as the command itself."""
    number = 0
    while True:
        if not group.comes(f"pass/{number}"):
            return
        work = handover.from_bytes(group.received(f"pass/{number}"))
        work = handover.with_manifests(work, _on_this_node)
        result = work.partial(partial(group.next, f"block/{number}"), copying, group.written)
        group.send(f"result/{number}/{group.rank}", handover.to_bytes(result))
        number += 1


def _on_this_node(manifest: Any) -> Any:
    return replace(manifest, fingerprints=on_this_node(manifest.fingerprints))
