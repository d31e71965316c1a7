"""How do the processes of a launch share a pass over tensors that only reads: verify, diff, stats?

Rank 0 reads the checkpoints and sends their manifests. Then every process takes blocks of tasks by
a counter in the store, and sends what it has found: CRC-32s of parts, differences, statistics. That
is small beside the tensors. Rank 0 adds it to its own, and reports.

Each process says how many numbers it got from the counter. If the counter has given more, a block
may be in no result: then the command fails, since tensors that nobody read look like equal ones.
This is a second check: a group lets each rank join once, so that no process should be replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from ..core.resources import Copying
from ..core.sources import on_this_node
from ..errors import ProcessLost, brief
from . import handover
from .group import Group


class Blocks:
    """Gives this process the numbers of its blocks in one pass, and counts them."""

    def __init__(self, group: Group, number: int) -> None:
        self._group = group
        self._key = f"block/{number}"
        self.taken = 0  # by this process

    def __call__(self) -> int:
        number = self._group.next(self._key)
        self.taken += 1
        return number

    def taken_by_all(self) -> int:
        return self._group.how_many(self._key)


class LeaderPool:
    """Rank 0's side of the passes of one command, which follow each other."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._blocks: list[Blocks] = []  # of each pass

    def begin(self, work: Any) -> Blocks:
        number = len(self._blocks)
        sent = handover.with_manifests(work, handover.tensors_of)
        self.group.send(f"pass/{number}", handover.to_bytes(sent))
        self._blocks.append(Blocks(self.group, number))
        return self._blocks[-1]

    def others(self) -> Iterator[Any]:
        """Raises ProcessLost in the end if blocks are missing: a process has been replaced."""
        blocks, number = self._blocks[-1], len(self._blocks) - 1
        known = blocks.taken
        for rank in range(1, self.group.size):
            match handover.from_bytes(self.group.received(f"result/{number}/{rank}")):
                case (int(taken), result):
                    known += taken
                    yield result
                case other:
                    raise handover.unreadable(f"{brief(other)} is no result")
        if (given := blocks.taken_by_all()) != known:
            raise ProcessLost(
                f"{given} blocks were given to processes, but {known} came back: one process was "
                "replaced, or was started twice",
                hint="end all processes, start each rank once, and repeat the command",
            )


def take_part(group: Group, paths: Sequence[str], copying: Copying) -> None:
    """What all processes but rank 0 do, until rank 0 has ended; raises as the command itself.

    `paths` are those of the checkpoints that this process was started for.
    """
    number = 0
    while True:
        if not group.comes(f"pass/{number}"):
            return
        work = handover.from_bytes(group.received(f"pass/{number}"))
        handover.check(work, paths)
        work = handover.with_manifests(work, _on_this_node)
        blocks = Blocks(group, number)
        result = work.partial(blocks, copying, group.written)
        group.send(f"result/{number}/{group.rank}", handover.to_bytes((blocks.taken, result)))
        number += 1


def _on_this_node(manifest: Any) -> Any:
    return replace(manifest, fingerprints=on_this_node(manifest.fingerprints))
