"""Which threads may compute now, if a copy has more of them than there are processors?

It has more, because some wait for the disk. The others want Python's lock all the time, and each
thread more that wants it makes handing it over dearer: on two processors, four threads that filled
files of 64 ranks spent a fifth of their CPU time on that. So only as many compute as there are
processors, or two, and a thread that waits for the disk lets another one compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Semaphore

from .fileio import Reader
from .resources import processors

FEWEST = 2  # threads that compute: one of them may be reading into memory, which takes no lock


class Turns:
    """The turns of `jobs` threads."""

    def __init__(self, jobs: int) -> None:
        most = max(FEWEST, processors())
        self._free = Semaphore(most) if most < jobs else None

    @contextmanager
    def computing(self, reader: Reader) -> Iterator[None]:
        """Within the block, a thread computes; it has no turn while its reader waits."""
        if self._free is None:
            yield
            return
        with self._free:
            reader.waiting = self._waiting
            try:
                yield
            finally:
                reader.waiting = None

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        assert self._free is not None
        self._free.release()
        try:
            yield
        finally:
            self._free.acquire()
