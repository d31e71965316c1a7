"""How do the processes of a launch share one conversion?

Rank 0 reads the source, lays the files of the target, and sends the manifests of both to the
others. Then every process takes portions of the target, the largest first, until a counter in the
store has passed the last one: a slow node takes fewer. In the end rank 0 reads what the others have
noted in their journals, and completes the target as a run that is continued and finds nothing left
to write.

The bytes of a portion are the same whoever writes them, so that it does no harm if a process that
was given up writes the rest of a chunk.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from ..copying import convert
from ..copying.journal import Journal, Region
from ..copying.journals import ProcessJournal, regions_of
from ..copying.sharing import Portion, Work, largest_first
from ..copying.staging import joined
from ..core.fileio import align
from ..core.folder import Folder
from ..core.resources import Copying
from ..core.sources import on_this_node
from ..errors import MALFORMED, Interrupted, ProcessLost, WrongOption, brief, cause
from . import handover
from .group import Group

VISIBLE = 30.0  # seconds in which a network filesystem shows rank 0 what another node has synced


class Leader:
    """Rank 0's side: it begins a conversion and completes it."""

    part = ""
    is_alone = False

    def __init__(self, group: Group) -> None:
        self.group = group

    def begin(self, work: Work) -> None:
        sent = replace(
            work, source=handover.tensors_of(work.source), shells=handover.tensors_of(work.shells)
        )
        self.group.send("work", handover.to_bytes(sent))

    def mine(self, portions: Sequence[Portion]) -> Iterator[Sequence[Portion]]:
        return handed_out(self.group, [item for item in portions if not item.is_complete])

    def check(self) -> None:
        self.group.check()

    def others(self, journal: Journal) -> Iterator[Region]:
        for rank in range(1, self.group.size):
            match self.group.published(f"done/{rank}"):
                case [int(length), int(crc)]:
                    yield from self._of_rank(journal.folder, rank, length, crc)
                case other:
                    raise handover.unreadable(f"{brief(other)} is no length and CRC-32")

    def _of_rank(self, folder: Folder, rank: int, length: int, crc: int) -> list[Region]:
        end = time.monotonic() + VISIBLE
        while (regions := regions_of(folder, part_of(rank), length, crc)) is None:
            self.group.check()
            if time.monotonic() > end:
                raise ProcessLost(
                    f"{folder.path} has not the journal that rank {rank} wrote there",
                    hint="all nodes must see the same files: check the mounts of both nodes; then "
                    "repeat the command with --resume",
                )
            time.sleep(0.1)
        return regions

    def end(self, error: BaseException | None) -> None:
        """After a failure, others must not write into what is then removed."""
        if error is not None:
            self.group.fail(error)
            if not isinstance(error, (KeyboardInterrupt, ProcessLost)):
                self.group.wait_for_stops()


class Member:
    """The side of every other process: it writes portions, and notes them in its journal."""

    is_alone = False

    def __init__(self, group: Group, work: Work, journal: ProcessJournal) -> None:
        self.group = group
        self.part = part_of(group.rank)
        self._work = work
        self._journal = journal

    def begin(self, work: Work) -> None:
        raise AssertionError("rank 0 begins")

    def mine(self, portions: Sequence[Portion]) -> Iterator[Sequence[Portion]]:
        done = self._work.complete
        left = [item for item in portions if (item.file, item.start) not in done]
        for group in handed_out(self.group, left):
            if not self._journal.is_there():
                raise ProcessLost(f"{self._work.folder} belongs to another run by now")
            yield group

    def check(self) -> None:
        self.group.check()

    def others(self, journal: Journal) -> None:
        return None

    def end(self, error: BaseException | None) -> None:
        if error is None:
            self.group.publish(f"done/{self.group.rank}", self._journal.end())
        else:
            self.group.fail(error)
            self.group.stop()


def take_part(group: Group, source: str, target: str, copying: Copying) -> None:
    """What all processes but rank 0 do: they write portions of the target if rank 0 wants that.

    Returns when rank 0 has ended. Raises ProcessFailed if another process has failed, and what a
    conversion raises.
    """
    try:
        if group.comes("work"):
            work = handover.from_bytes(group.received("work"))
            if not isinstance(work, Work):
                raise handover.unreadable("it is no conversion")
            _refuse_other_folder(work, target, group.rank)
            handover.check(work, [source])
            with joined(target) as (folder, root):
                _check_files(work, root)
                _write(group, work, folder, root, copying)
            group.wait_for_end()
    except KeyboardInterrupt as error:  # rank 0 may have begun the target
        raise Interrupted(*error.args) from error


def _write(group: Group, work: Work, folder: Folder, root: Folder, copying: Copying) -> None:
    """Writes the portions that this process gets."""
    source = replace(work.source, fingerprints=on_this_node(work.source.fingerprints))
    work = replace(work, source=source)
    journal = ProcessJournal(folder, work.identity, work.chunk, part_of(group.rank))
    try:
        member = Member(group, work, journal)
        convert.take_part(work, root, journal, copying, group.written, member)
    finally:
        journal.close()


def part_of(rank: int) -> str:
    """The name of a rank's journal."""
    return f"{rank:04}"


def handed_out(group: Group, portions: Sequence[Portion]) -> Iterator[Sequence[Portion]]:
    """The portions that this process gets, each one when a thread is ready for it."""
    order = largest_first(portions)
    while (number := group.next("portion")) < len(order):
        yield [order[number]]


def _refuse_other_folder(work: Work, target: str, rank: int) -> None:
    """Raises WrongOption unless this process was started for the same target as rank 0."""
    folder = f"{os.path.abspath(target)}.partial"
    if work.folder != folder:
        raise WrongOption(
            f"rank 0 writes into {work.folder}, but rank {rank} was started for {folder}",
            hint="start all processes in the same folder, with the same arguments",
        )


def _check_files(work: Work, root: Folder) -> None:
    """Raises CorruptCheckpoint unless rank 0 has laid the files that it names, with their sizes.

    A direct write of another process may have just rounded one up.
    """
    try:
        for path in set(handover.files_of(work.shells)):
            size, now = work.identity.files[root.name_of(path)], root.size(path)
            if not size <= now <= align(size):
                raise handover.unreadable(f"{path} has {now} bytes, and not {brief(size)}")
    except MALFORMED as error:
        raise handover.unreadable(cause(error)) from error
