"""As many threads compute as there are processors, or two; one that waits for the disk does not."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from zckpt.core import turns
from zckpt.core.fileio import Buffer, Reader
from zckpt.core.fragments import Extent
from zckpt.core.turns import Turns

from ..processes.conftest import until

JOBS = 4


class Counter:
    """How many threads are in a block at once, and how many have been."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._lock = threading.Lock()

    @contextmanager
    def inside(self) -> Iterator[None]:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        yield
        with self._lock:
            self.now -= 1


@pytest.fixture
def two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "processors", lambda: 2)


def run(work: object, count: int = JOBS) -> list[threading.Thread]:
    threads = [threading.Thread(target=work) for _ in range(count)]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    return threads


def most_at_once(shared: Turns) -> int:
    """How many threads compute at once, if none of them waits for the disk."""
    counter, go = Counter(), threading.Event()

    def work() -> None:
        with shared.computing(Reader()), counter.inside():
            go.wait(10)

    threads = run(work)
    until(lambda: counter.now >= 2)
    time.sleep(0.1)  # others would come now
    go.set()
    for thread in threads:
        thread.join()
    return counter.most


@pytest.mark.usefixtures("two_processors")
def test_as_many_threads_compute_as_there_are_processors() -> None:
    assert most_at_once(Turns(JOBS)) == 2


@pytest.mark.usefixtures("two_processors")
def test_a_thread_that_waits_for_the_disk_lets_another_compute(tmp_path: Path) -> None:
    """All four read at once, although only two may compute; in the end both turns are free."""
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    shared, counter, go = Turns(JOBS), Counter(), threading.Event()

    class Slow(Reader):
        def _pread(self, file: int, into: memoryview, offset: int) -> int:
            assert self.waiting is not None
            with self.waiting(), counter.inside():
                go.wait(10)
                return os.preadv(file, (into,), offset)

    def work() -> None:
        reader = Slow()
        with shared.computing(reader):
            reader.read(Extent(str(path), 0, 4096), Buffer(4096).view)
        assert reader.waiting is None
        reader.close()

    threads = run(work)
    until(lambda: counter.now == JOBS)
    go.set()
    for thread in threads:
        thread.join()
    assert most_at_once(shared) == 2


@pytest.mark.usefixtures("two_processors")
def test_a_turn_ends_with_an_error() -> None:
    shared = Turns(JOBS)
    for _ in range(JOBS):
        with pytest.raises(ValueError, match="x"), shared.computing(Reader()):
            raise ValueError("x")


def test_few_threads_take_no_turns() -> None:
    reader = Reader()
    with Turns(1).computing(reader):
        assert reader.waiting is None


@pytest.mark.parametrize("is_cached", [True, False])
def test_what_the_page_cache_lacks_is_waited_for(tmp_path: Path, is_cached: bool) -> None:
    """The same bytes arrive, whether or not they are in the page cache."""
    data = bytes(range(256)) * 4096
    path = tmp_path / "file"
    path.write_bytes(data)
    waits: list[int] = []

    @contextmanager
    def waiting() -> Iterator[None]:
        waits.append(1)
        yield

    reader = Reader()
    reader.waiting = waiting
    if not is_cached and hasattr(os, "posix_fadvise"):
        os.sync()
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
    view = Buffer(len(data)).view
    reader.read(Extent(str(path), 0, len(data)), view)
    reader.close()
    assert view[: len(data)] == data
    assert len(waits) <= 1 or not is_cached


@pytest.mark.parametrize("answer", ["refuses", "ends"])
def test_a_filesystem_without_reads_that_do_not_wait(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every read is one that may wait: NFS refuses the flag, and Linux 5.10 says that files end."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    waits: list[int] = []

    @contextmanager
    def waiting() -> Iterator[None]:
        waits.append(1)
        yield

    plain = os.preadv

    def read(file: int, buffers: object, offset: int, flags: int = 0) -> int:
        if flags and answer == "ends":
            return 0
        if flags:
            raise OSError(95, "Operation not supported")
        return plain(file, buffers, offset)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", read)
    reader = Reader()
    reader.waiting = waiting
    view = Buffer(100).view
    reader.read(Extent(str(path), 0, 100), view)
    reader.close()
    assert bytes(view[:100]) == b"x" * 100
    assert waits == [1]
