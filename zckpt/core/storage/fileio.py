"""Reads and writes bytes of files: buffers, reads, and direct or buffered writes.

Writes bypass the page cache (O_DIRECT). For 1.5 GB, that took 0.4 to 0.9 of the time of buffered
writes, whatever the state of the machine's memory. Small files, and filesystems that refuse
O_DIRECT, get buffered writes in blocks of 256 KiB. For larger blocks, ext4 takes large pages of
memory, which a virtual machine may have given back to its host. Each such page then causes a page
fault in the host, and a write takes three times as long. `--io` overrides the choice.

macOS lacks O_DIRECT, posix_fadvise, fdatasync, fallocate and /proc. There every write is buffered,
and fsync replaces fdatasync.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import closing, suppress
from threading import Lock
from types import TracebackType

from msgspec import Struct, field

from ...errors import CorruptCheckpoint
from .checksum import crc32
from .folder import Folder
from .fragments import ZEROS, Extent
from .sources import Fingerprints, close, named, naming, open_file, read_into

CRC_BLOCK = 1 << 20  # bytes

ALIGNMENT = 4096
BUFFERED_WRITE = 256 << 10  # bytes
# bytes; a file up to this size is written through the page cache, and not preallocated
SMALL_FILE = 1 << 20
HUGE_PAGE = 2 << 20  # bytes
# the filesystem refuses O_DIRECT, or wants a stricter alignment than 4096; nothing is broken
REFUSALS = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


def align(size: int, alignment: int = ALIGNMENT) -> int:
    """Rounds `size` up to a multiple of `alignment`."""
    return -(-size // alignment) * alignment


def in_pages(size: int) -> int:
    """The number of bytes that `memory_of(size)` allocates: `size`, rounded up to full pages."""
    return align(size, HUGE_PAGE) if size >= HUGE_PAGE else align(max(size, 1))


def memory_of(size: int) -> mmap.mmap:
    """Allocates at least `size` bytes of zeros.

    The memory is in huge pages if `size` is large and the system has such pages. A read into new
    pages of 4 KiB takes three times as long as a read into new huge pages.
    """
    memory = mmap.mmap(-1, in_pages(size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class Buffer:
    """Allocates `size` bytes of page-aligned memory; a writable memoryview."""

    def __init__(self, size: int) -> None:
        self._memory = memory_of(size)
        self.view = memoryview(self._memory)[: align(max(size, 1))]


class Reader(Struct, eq=False):
    """Reads byte ranges of files for one thread, and keeps at most `keep` files open.

    Raises SourceChanged if a file differs from its fingerprint in `fingerprints`.
    """

    keep: int = 64
    fingerprints: Fingerprints | None = None
    _open: OrderedDict[str, int] = field(default_factory=OrderedDict)

    def read(self, extent: Extent, into: memoryview) -> None:
        """Reads the byte range `extent` into `into`, which has the same length.

        Raises CorruptCheckpoint if the file ends too early. An OSError names the file.
        """
        if extent.file == ZEROS:
            into[: extent.length] = bytes(extent.length)
        else:
            self.read_from(self._file(extent.file), extent, into)

    def read_from(self, file: int, extent: Extent, into: memoryview) -> None:
        """Reads a byte range like `read`, but from an open descriptor of its file."""
        path, length, done = extent.file, extent.length, 0
        while done < length:
            part = into[done:length] if done or len(into) > length else into
            try:
                count = read_into(file, part, extent.offset + done)
            except OSError as error:
                raise named(error, path) from None
            if not count:
                raise CorruptCheckpoint(
                    "file-cut-short",
                    f"{path} ends at byte {extent.offset + done}, inside a tensor",
                    file=path,
                )
            done += count

    def _file(self, path: str) -> int:
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        if len(self._open) >= self.keep:
            close(self._open.popitem(last=False)[1])
        self._open[path] = open_file(path, self.fingerprints)
        return self._open[path]

    def close(self) -> None:
        while self._open:
            close(self._open.popitem()[1])


def crc_of(extents: Iterable[Extent], crc: int = 0) -> int:
    """The CRC-32 of byte ranges, one after another; reads them in blocks.

    `crc` is the CRC-32 of the preceding bytes. Raises CorruptCheckpoint if a file ends too early.
    """
    block = Buffer(CRC_BLOCK).view
    with closing(Reader()) as reader:
        for extent in extents:
            for start in range(0, extent.length, CRC_BLOCK):
                part = extent.part(start, min(start + CRC_BLOCK, extent.length))
                reader.read(part, block)
                crc = crc32(block[: part.length], crc)
    return crc


def files_per_thread(threads: int) -> int:
    """The number of files that each of several threads may keep open.

    Some of the process's limit of open files is left for other files. The soft limit is raised
    first, up to 8192.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < min(hard, 8192):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
        soft = min(hard, 8192)
    return max(1, (soft - 64) // (threads + 1))


def is_small(size: int) -> bool:
    """Whether a file of `size` bytes is so small that its writes are buffered."""
    return size <= SMALL_FILE


class Writer:
    """Writes at given offsets into one existing file of `size` bytes below `folder`.

    `mode` is `direct` (OSError if the filesystem refuses), `buffered`, or `auto`: direct, unless
    the file is small or the filesystem refuses. Offsets and lengths of writes must be multiples of
    4096, except the length of the file's last write.
    """

    def __init__(self, folder: Folder, path: str, size: int, mode: str) -> None:
        self.folder = folder
        self.path = path
        self.mode = mode
        self.file = folder.open(path, os.O_RDWR)  # for buffered writes
        self._direct = -1
        self._is_open = True
        # several buffered writes into one file at a time would wait by spinning
        self._in_turn = Lock()
        self._closing = Lock()
        try:
            if mode == "direct" or (mode == "auto" and not is_small(size)):
                self._direct = self._open_direct()
            self._is_direct = self._direct >= 0
            if not is_small(size):
                with naming(path):
                    _allocate(self.file, size)
        except OSError:
            self._close()
            raise

    def _open_direct(self) -> int:
        try:
            if not hasattr(os, "O_DIRECT"):
                raise OSError(errno.ENOTSUP, "this system has no direct writes", self.path)
            return self.folder.open(self.path, os.O_WRONLY | os.O_DIRECT)
        except OSError as error:
            if self.mode == "direct" or error.errno not in REFUSALS:
                raise
            return -1

    def write(self, buffer: memoryview, length: int, offset: int) -> None:
        """Writes the first `length` bytes of a page-aligned buffer at `offset` of the file."""
        done = 0
        with naming(self.path):
            if self._is_direct:
                # the direct write of an incomplete block would pad the block and make the file
                # longer, while another process may be reading the file
                whole = length - length % ALIGNMENT
                try:
                    write_all(self._direct, buffer[:whole], offset, len(buffer))
                    done = whole
                except OSError as error:
                    if self.mode == "direct" or error.errno not in REFUSALS:
                        raise
                    self._is_direct = False
            if done == length:
                return
            with self._in_turn:
                write_all(self.file, buffer[done:length], offset + done, BUFFERED_WRITE)
            # starts the writeback of dirty pages (and drops clean ones); otherwise the kernel would
            # collect gigabytes and then stop the writer
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self.file, offset, length, os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        """Returns when all written bytes are on the disk; does nothing if the file is closed."""
        with self._closing, naming(self.path):
            if self._is_open:
                sync_data(self.file)

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: object, _trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with naming(self.path):
                    os.fsync(self.file)
        finally:
            self._close()

    def _close(self) -> None:
        with self._closing, naming(self.path):
            self._is_open = False
            os.close(self.file)
            if self._direct >= 0:
                os.close(self._direct)


def sync_data(file: int) -> None:
    """Syncs an open file: returns when its bytes are on the disk."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(file)
    else:
        os.fsync(file)


def write_all(file: int, data: memoryview, offset: int, most: int = BUFFERED_WRITE) -> None:
    """Writes all of `data` at `offset`, at most `most` bytes per system call."""
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done : done + most], offset + done)


def _allocate(file: int, size: int) -> None:
    """Allocates the blocks of a file: a full disk shows immediately, and the blocks are contiguous.

    It calls fallocate(2) directly: the C library's posix_fallocate would write into every block if
    the filesystem refuses fallocate.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "fallocate64"):  # macOS, musl
        return
    offset, length = ctypes.c_int64(0), ctypes.c_int64(size)
    if libc.fallocate64(file, 0, offset, length):
        code = ctypes.get_errno()
        if code not in (*REFUSALS, errno.ENOSYS):
            raise OSError(code, os.strerror(code))


def save(path: str, data: bytes) -> None:
    """Writes a file completely or not at all; replaces a link at its path, without following it."""
    partial = f"{path}.{os.urandom(4).hex()}.partial"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(partial, flags, 0o666), "wb") as file:
        try:
            with naming(path):
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise
    sync_folder(os.path.dirname(os.path.abspath(path)))


def sync_folder(path: str) -> None:
    """Syncs a directory: returns when the names in it are on the disk."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with naming(path):
            os.fsync(file)
    finally:
        close(file)
