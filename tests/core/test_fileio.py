"""Positioned reads and writes: ends of files, refused O_DIRECT, exact sizes."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from zckpt.core.storage import fileio
from zckpt.core.storage.fileio import Buffer, Reader, Writer, align
from zckpt.core.storage.folder import Folder
from zckpt.core.storage.fragments import ZEROS, Extent
from zckpt.errors import CorruptCheckpoint


@pytest.mark.parametrize(("size", "aligned"), [(0, 0), (1, 4096), (4096, 4096), (4097, 8192)])
def test_sizes_are_rounded_up(size: int, aligned: int) -> None:
    assert align(size) == aligned


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 10_000, 2_100_000])
def test_buffers_are_aligned_zeros(size: int) -> None:
    view = Buffer(size).view
    assert len(view) == max(4096, align(size))
    assert not any(view)


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The length and the advice of each memory of which advice is given."""
    given: list[tuple[int, int]] = []

    class Memory(mmap.mmap):
        def __new__(cls, file: int, length: int, flags: int = mmap.MAP_SHARED) -> Memory:
            assert flags & mmap.MAP_PRIVATE, "shared memory has no huge pages"
            return super().__new__(cls, file, length, flags=flags)

        def madvise(self, option: int, *_: int) -> None:
            given.append((len(self), option))

    monkeypatch.setattr(mmap, "mmap", Memory)
    return given


@pytest.mark.parametrize(
    ("size", "taken"),
    [(0, 4096), (4097, 8192), ((2 << 20) - 1, 2 << 20), (2 << 20, 2 << 20), (5 << 20, 6 << 20)],
)
def test_much_memory_is_of_huge_pages(
    size: int, taken: int, advised: list[tuple[int, int]]
) -> None:
    assert fileio.in_pages(size) == taken
    assert len(fileio.memory_of(size)) == taken
    assert advised == ([(taken, mmap.MADV_HUGEPAGE)] if size >= 2 << 20 else [])


def test_a_system_without_huge_pages(
    advised: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert len(fileio.memory_of(3 << 20)) == 4 << 20
    assert not advised


def numbered(path: Path, count: int = 1) -> list[str]:
    paths = [str(path / str(place)) for place in range(count)]
    for place, name in enumerate(paths):
        Path(name).write_bytes(bytes([place]) * 100)
    return paths


def read(reader: Reader, extent: Extent) -> bytes:
    into = bytearray(extent.length)
    reader.read(extent, memoryview(into))
    return bytes(into)


def opened(path: Path) -> int:
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum(os.path.exists(link) and os.readlink(link).startswith(f"{path}/") for link in links)


@pytest.mark.parametrize(("offset", "length"), [(0, 101), (100, 1), (50, 51), (1000, 1)])
def test_a_read_past_the_end_is_refused(tmp_path: Path, offset: int, length: int) -> None:
    (name,) = numbered(tmp_path)
    with pytest.raises(CorruptCheckpoint, match=f"{name} ends at byte"):
        read(Reader(), Extent(name, offset, length))


def test_short_reads_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(range(100)))
    real = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda file, buffers, offset: real(file, [buffers[0][:7]], offset)
    )
    assert read(Reader(), Extent(str(path), 10, 80)) == bytes(range(10, 90))


def test_a_bounded_number_of_files_is_open(tmp_path: Path) -> None:
    names = numbered(tmp_path, 10)
    reader = Reader(keep=3)
    for place in [0, 1, 2, 3, 0, 9, 8, 7, 0, 1, 9, 9]:
        assert read(reader, Extent(names[place], 5, 3)) == bytes([place]) * 3
        assert opened(tmp_path) <= 3
    reader.close()
    assert opened(tmp_path) == 0
    assert read(reader, Extent(names[2], 0, 1)) == b"\2", "a closed reader opens again"
    reader.close()


def test_the_latest_files_are_kept(tmp_path: Path) -> None:
    names = numbered(tmp_path, 3)
    reader = Reader(keep=2)
    for place in (0, 1, 0, 2):
        read(reader, Extent(names[place], 0, 1))
    os.remove(names[0])
    assert read(reader, Extent(names[0], 0, 1)) == b"\0"
    os.remove(names[1])
    with pytest.raises(FileNotFoundError):
        read(reader, Extent(names[1], 0, 1))
    reader.close()


@pytest.fixture
def limit() -> Iterator[Callable[[int], None]]:
    """Sets how many files this process may open; afterwards it is as before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda files: resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("threads", [1, 4, 10, 64])
def test_the_files_of_all_threads_stay_within_the_limit(
    threads: int, limit: Callable[[int], None]
) -> None:
    limit(256)
    each = fileio.files_per_thread(threads)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == min(hard, 8192), "raised as far as is useful"
    spare = soft - 64 - (threads + 1) * each  # the main thread reads too; 64 are for the rest
    assert 0 <= spare <= threads
    limit(min(hard, 9000))
    assert fileio.files_per_thread(threads) >= each
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 9000), "never lowered"


def test_every_of_many_threads_may_keep_a_file() -> None:
    assert fileio.files_per_thread(100_000) == 1


# -- writing

SIZES = [1, 4095, 4096, 4097, 10_000, 12_288]


def written(path: Path, size: int, mode: str, chunk: int = 8192) -> bytes:
    data = bytes(place * 31 % 251 for place in range(size))
    path.write_bytes(bytes(size))
    buffer = Buffer(chunk)
    with Folder.at(str(path.parent)) as folder, Writer(folder, str(path), size, mode) as writer:
        for start in range(0, size, chunk):
            length = min(chunk, size - start)
            buffer.view[:] = b"\xee" * chunk  # what lies behind must not stay
            buffer.view[:length] = data[start : start + length]
            writer.write(buffer.view, length, start)
            assert path.stat().st_size == size, "another process may be reading it"
    assert path.read_bytes() == data
    assert opened(path.parent) == 0
    return data


@pytest.fixture(autouse=True)
def no_file_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fileio, "SMALL_FILE", 0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", ["auto", "buffered"])
def test_files_have_their_exact_size(tmp_path: Path, size: int, mode: str) -> None:
    written(tmp_path / "a", size, mode)


def test_buffered_writes_are_small_and_started_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked to be buffered is never written directly."""
    direct = Direct(monkeypatch, errno.EINVAL)
    lengths: list[int] = []
    started: list[tuple[int, ...]] = []
    write, advise = os.pwrite, os.posix_fadvise

    def writes(file: int, data: Any, offset: int) -> int:
        lengths.append(len(data))
        return write(file, data, offset)

    def advises(file: int, *how: int) -> None:
        started.append(how)
        advise(file, *how)

    monkeypatch.setattr(os, "pwrite", writes)
    monkeypatch.setattr(os, "posix_fadvise", advises)
    written(tmp_path / "a", 900_000, "buffered", 602_112)
    assert not direct.files
    assert lengths == [262_144, 262_144, 77_824, 262_144, 35_744]
    ends = (0, 602_112), (602_112, 297_888)
    assert started == [(*end, os.POSIX_FADV_DONTNEED) for end in ends]


def test_a_system_without_direct_writes_and_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    monkeypatch.delattr(os, "posix_fadvise")
    written(tmp_path / "a", 10_000, "auto")
    with pytest.raises(OSError, match="this system has no direct writes") as caught:
        written(tmp_path / "a", 10_000, "direct")
    assert caught.value.filename == str(tmp_path / "a")
    assert opened(tmp_path) == 0


def refuse_opening(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)


class Direct:
    """O_DIRECT as it may be: opened, but every such write fails with `code`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int, after: int = 0) -> None:
        self.files: set[int] = set()
        self.tried = 0
        real_open, real_write = os.open, os.pwrite

        def opens(path: Any, flags: int, *rest: Any, **more: Any) -> int:
            file = real_open(path, flags & ~os.O_DIRECT, *rest, **more)
            if flags & os.O_DIRECT:
                self.files.add(file)
            return file

        def writes(file: int, data: Any, offset: int) -> int:
            if file in self.files:
                self.tried += 1
                if self.tried > after:
                    raise OSError(code, os.strerror(code))
            return real_write(file, data, offset)

        monkeypatch.setattr(os, "open", opens)
        monkeypatch.setattr(os, "pwrite", writes)


@pytest.mark.parametrize("code", fileio.REFUSALS)
def test_without_direct_writes_files_are_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    refuse_opening(monkeypatch, code)
    written(tmp_path / "a", 10_000, "auto")
    with pytest.raises(OSError, match=os.strerror(code)):
        written(tmp_path / "a", 10_000, "direct")
    assert opened(tmp_path) == 0


@pytest.mark.parametrize("after", [0, 1, 2])
def test_where_direct_writes_fail_the_rest_is_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    direct = Direct(monkeypatch, errno.EINVAL, after)
    written(tmp_path / "a", 50_000, "auto")
    assert direct.tried == after + 1, "tried again after a refusal"


def test_only_whole_blocks_are_written_directly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct, started = Direct(monkeypatch, errno.EINVAL, 1 << 30), list[int]()
    monkeypatch.setattr(os, "posix_fadvise", lambda _, offset, *__: started.append(offset))
    written(tmp_path / "a", 30_000, "auto")
    assert direct.tried == 4
    assert started == [24_576], "what was written directly is in no cache"


def test_where_direct_is_asked_for_a_refusal_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Direct(monkeypatch, errno.EINVAL)
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        written(tmp_path / "a", 10_000, "direct")
    assert opened(tmp_path) == 0


@pytest.mark.parametrize("mode", ["auto", "direct"])
def test_a_full_disk_is_no_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    Direct(monkeypatch, errno.ENOSPC)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        written(tmp_path / "a", 10_000, mode)
    assert opened(tmp_path) == 0


def test_a_small_file_goes_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fileio, "SMALL_FILE", 50_000)
    direct = Direct(monkeypatch, errno.EINVAL)
    allocated: list[int] = []
    monkeypatch.setattr(fileio, "_allocate", lambda _, size: allocated.append(size))
    written(tmp_path / "a", 50_000, "auto")
    assert not direct.files
    assert not allocated
    written(tmp_path / "a", 50_001, "auto")
    assert direct.tried == 1
    assert allocated == [50_001]


def test_short_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: real(file, data[:4096], offset))
    for mode in ("auto", "buffered"):
        written(tmp_path / "a", 50_000, mode, 16_384)


def test_a_file_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Writer(Folder.at(str(tmp_path)), str(tmp_path / "a"), 10, mode="auto")
    assert opened(tmp_path) == 0


def test_no_room_shows_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_file: int, _size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(fileio, "_allocate", full)
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        Writer(Folder.at(str(tmp_path)), str(tmp_path / "a"), 10, mode="auto")
    assert opened(tmp_path) == 0


class Libc:
    """A C library whose fallocate(2) fails with an error."""

    def __init__(self, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[int, int]] = []
        monkeypatch.setattr(fileio.ctypes, "CDLL", lambda *_, **__: self)
        monkeypatch.setattr(fileio.ctypes, "get_errno", lambda: code)

    def fallocate64(self, file: int, mode: int, offset: Any, length: Any) -> int:
        self.asked.append((offset.value, length.value))
        return -1


@pytest.mark.parametrize("code", [*fileio.REFUSALS, errno.ENOSYS])
def test_a_filesystem_that_allocates_nothing(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Libc(code, monkeypatch)
    (tmp_path / "a").touch()
    with Writer(Folder.at(str(tmp_path)), str(tmp_path / "a"), 2 << 20, "buffered") as writer:
        writer.write(Buffer(4096).view, 4096, 0)
    assert library.asked == [(0, 2 << 20)]


def test_a_system_that_cannot_allocate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fileio.ctypes, "CDLL", lambda *_, **__: object())
    (tmp_path / "a").touch()
    Writer(Folder.at(str(tmp_path)), str(tmp_path / "a"), 2 << 20, "buffered")._close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_no_room_for_the_whole_file(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Libc(code, monkeypatch)
    (tmp_path / "a").touch()
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        Writer(Folder.at(str(tmp_path)), str(tmp_path / "a"), 2 << 20, "buffered")
    assert caught.value.filename == str(tmp_path / "a")
    assert opened(tmp_path) == 0


@pytest.mark.parametrize("mode", ["auto", "direct"])
def test_an_error_of_opening_is_no_refusal(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").touch()
    folder, real = Folder.at(str(tmp_path)), Folder.open

    def failing(self: Folder, path: str, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return real(self, path, flags, mode)

    monkeypatch.setattr(Folder, "open", failing)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        Writer(folder, str(tmp_path / "a"), 2 << 20, mode)
    assert opened(tmp_path) == 0


def test_what_was_written_is_synced_while_the_file_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And before it is closed, with its length."""
    synced: list[str] = []
    for name in ("fdatasync", "fsync"):
        monkeypatch.setattr(os, name, lambda _, name=name: synced.append(name))
    (tmp_path / "a").touch()
    with Writer(Folder.at(str(tmp_path)), str(tmp_path / "a"), 10, mode="auto") as writer:
        writer.sync()
        assert synced == ["fdatasync"]
    assert synced == ["fdatasync", "fsync"]
    writer.sync()
    assert len(synced) == 2
    with (
        pytest.raises(KeyError),
        Writer(Folder.at(str(tmp_path)), str(tmp_path / "a"), 10, mode="auto"),
    ):
        raise KeyError("what was written is of no use")
    assert len(synced) == 2
    monkeypatch.delattr(os, "fdatasync")
    fileio.sync_data(0)
    assert synced[2:] == ["fsync"]


def test_zeros_are_in_no_file() -> None:
    into = bytearray(b"x" * 9)
    Reader().read(Extent(ZEROS, 0, 7), memoryview(into))
    assert into == bytes(7) + b"xx"


@pytest.mark.parametrize("block", [7, 100, 1 << 20])
def test_a_checksum_of_extents(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fileio, "CRC_BLOCK", block)
    path = tmp_path / "a"
    path.write_bytes(bytes(range(100)))
    extents = [Extent(str(path), 50, 50), Extent(str(path), 3, 40), Extent(str(path), 0, 0)]
    data = bytes(range(50, 100)) + bytes(range(3, 43))
    assert fileio.crc_of(extents) == zlib.crc32(data)
    assert fileio.crc_of(extents, 7) == zlib.crc32(data, 7)


def test_a_saved_file_is_on_the_disk_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def noted(file: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        fsync(file)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.chdir(tmp_path)
    fileio.save("report", b"text")
    partial, folder = synced
    assert partial.startswith(f"{tmp_path}/report.")
    assert folder == str(tmp_path)
    assert (tmp_path / "report").read_bytes() == b"text"


def test_no_more_is_read_than_is_asked_for(tmp_path: Path) -> None:
    (name,) = numbered(tmp_path)
    into = bytearray(b"x" * 9)
    Reader().read(Extent(name, 50, 7), memoryview(into))
    assert into == bytes(7) + b"xx"


def test_a_saved_file_is_readable_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        fileio.save(str(tmp_path / "report"), b"text")
    finally:
        os.umask(before)
    assert (tmp_path / "report").stat().st_mode & 0o777 == 0o666
