"""Makes a checkpoint in an object store readable as a local folder (a mirror).

    TOP/0/s3:/bucket/runs/7/global_step10/...     empty files with names, sizes and times

The objects below the URL, and those beside it, are listed. The metadata of a file are read in
blocks, which are cached. At the first read, the metadata of the neighboring files are requested in
parallel too, because a request takes as long as the transfer of many bytes. Long reads of tensors
are requested directly, without the cache.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import re
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from msgspec import Struct, field

from ..core.storage import byte_sources, unfinished
from ..core.storage.checksum import crc32
from ..core.storage.unfinished import UNFINISHED as UNFINISHED
from ..core.storage.unfinished import Note
from ..errors import IncompleteCheckpoint
from . import failures
from .stores import Store, StoredObject, store_of
from .urls import Url, strange

T = TypeVar("T")
META, DATA = 32 << 10, 16 << 10  # bytes of a block of metadata, and of a block of small tensors
# bytes; from this size on, bytes are requested directly; the most blocks that are read ahead
WHOLE, AHEAD = 128 << 10, 64
HEAD, TAIL = 2 * META, 66 << 10  # bytes at both ends of a file, which readers need first
KEPT = 16 << 20  # bytes of cached blocks
NEIGHBORS, AT_ONCE = 64, 32  # files whose ends are read ahead, and parallel requests for them
NAMED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "model.safetensors",
    "adapter_config.json",
    "adapter_model.safetensors",
    "pytorch_model.bin",
)
"""Files that zckpt looks for in a folder on a web server, which cannot list its folders.

Index files there (`LISTS`) name further files.
"""
LISTS = {
    "manifest.json": "files",
    "model.safetensors.index.json": "weight_map",
    "pytorch_model.bin.index.json": "weight_map",
}


class Blocks:
    """A cache of blocks: the byte ranges of stored objects that were read most recently.

    It keeps at most `most` bytes. The key of a block is (number of the file, block size, index).
    """

    def __init__(self, most: int = KEPT) -> None:
        self._most, self._bytes = most, 0
        self._blocks: OrderedDict[tuple[int, int, int], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[int, int, int]) -> bytes | None:
        with self._lock:
            if key in self._blocks:
                self._blocks.move_to_end(key)
            return self._blocks.get(key)

    def put(self, key: tuple[int, int, int], data: bytes) -> None:
        with self._lock:
            if key not in self._blocks:
                self._bytes += len(data)
            self._blocks[key] = data
            while self._bytes > self._most:
                self._bytes -= len(self._blocks.popitem(last=False)[1])


_blocks = Blocks()
_numbers = itertools.count()


class File(Struct, eq=False, dict=True):
    """An object of a store. An empty local file stands for it, whose reads go to the object."""

    url: Url
    store: Store
    stored_object: StoredObject
    mirror: Mirror

    def __post_init__(self) -> None:
        self._filling, self._ahead = threading.Lock(), 0
        self._number = next(_numbers)  # unique, while an id may be reused

    def fetch(self, start: int, stop: int) -> bytes | memoryview:
        """Requests bytes [start, stop) from the store; retries if the answer ends too early."""

        def ask() -> bytes | memoryview:
            data = self.store.read(self.stored_object, start, stop)
            if len(data) == stop - start:
                return data
            raise failures.BrokenOff(
                "store-refused",
                f"{self.url} gave {len(data)} bytes instead of {stop - start}",
                hint="a proxy may have cut the answer: start again, or copy the checkpoint first",
            )

        return failures.asked(ask, self.url)

    def pread(self, length: int, offset: int) -> bytes:
        stop = min(offset + length, self.stored_object.size)
        if stop <= offset:
            return b""
        if stop - offset > KEPT // 8:
            return bytes(self.fetch(offset, stop))
        if self.stored_object.key not in self.mirror.read_already:
            self.mirror.read_ahead(self)
        return self._blocks_of(META, offset, stop)

    def read_into(self, view: memoryview, offset: int) -> int:
        stop = min(offset + len(view), self.stored_object.size)
        if stop <= offset:
            return 0
        whole = stop - offset >= WHOLE
        view[: stop - offset] = (
            self.fetch(offset, stop) if whole else self._blocks_of(DATA, offset, stop)
        )
        return stop - offset

    def _blocks_of(self, size: int, start: int, stop: int) -> bytes:
        """Reads bytes [start, stop) of an object of `size` bytes through the cache.

        Consecutive blocks that are not in the cache are requested together.
        """
        with self._filling:  # another thread may be requesting the same blocks
            numbers, got = range(start // size, -(-stop // size)), dict[int, bytes]()
            for number in numbers:
                if (block := _blocks.get((self._number, size, number))) is not None:
                    got[number] = block
            for first, last in _runs(number for number in numbers if number not in got):
                if size == DATA:
                    last = self._extended(first, last)
                begin, end = first * size, min((last + 1) * size, self.stored_object.size)
                data = bytes(self.fetch(begin, end))
                for number in range(first, last + 1):
                    got[number] = data[number * size - begin :][:size]
                    _blocks.put((self._number, size, number), got[number])
        data = b"".join(got[number] for number in sorted(got))
        begin = start // size * size
        return data[start - begin : stop - begin]

    def _extended(self, first: int, last: int) -> int:
        """The last block to request, if blocks `first` to `last` are needed.

        It is a later one than `last` if the file is read in sequence: each request then reads more
        blocks ahead, up to AHEAD.
        """
        follows = _blocks.get((self._number, DATA, first - 1)) is not None
        self._ahead = min(2 * self._ahead + 1, AHEAD) if follows else 0
        return min(last + self._ahead, (self.stored_object.size - 1) // DATA)

    def read_ends(self) -> None:
        """Reads the blocks at both ends of the file, in one request if they are close."""
        size = self.stored_object.size
        ends = [(0, min(HEAD, size)), (max(0, size - TAIL), size)]
        if ends[1][0] <= ends[0][1] + META:
            ends = [(0, size)]
        for start, stop in ends:
            if start < stop:
                self._blocks_of(META, start, stop)


def _runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yields the first and the last number of each sequence of consecutive numbers."""
    for _, run in itertools.groupby(enumerate(numbers), lambda item: item[1] - item[0]):
        consecutive = [number for _, number in run]
        yield consecutive[0], consecutive[-1]


class Mirror(Struct, eq=False):
    """A local folder of empty files through which zckpt reads the objects at a URL.

    Reads of an empty file fetch the bytes of its object. `path` is the URL's place in the folder.
    """

    path: str
    top: str
    files: dict[str, File] = field(default_factory=dict)
    registered: list[byte_sources.Fingerprint] = field(default_factory=list)
    read_already: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def read_ahead(self, file: File) -> None:
        """Requests both ends of a file, and of the next files in its folder with its extension.

        Each file's ends are requested only once.
        """
        key = file.stored_object.key
        with self.lock:
            if key in self.read_already:
                return
            folder, ending = os.path.dirname(key), os.path.splitext(key)[1]
            beside = [
                other
                for name, other in self.files.items()
                if name >= key
                and name not in self.read_already
                and os.path.dirname(name) == folder
                and os.path.splitext(name)[1] == ending
            ][:NEIGHBORS]
            self.read_already.update(each.stored_object.key for each in beside)
            with ThreadPoolExecutor(AT_ONCE) as pool:
                for done in [pool.submit(each.read_ends) for each in beside]:
                    done.result()

    def remove(self) -> None:
        """Removes the local folder; its empty files no longer stand for objects of the store."""
        for fingerprint in self.registered:
            byte_sources.forget(fingerprint)
        self.registered.clear()
        shutil.rmtree(self.top, ignore_errors=True)


_top: list[str] = []


def top() -> str:
    """The temporary folder in which this process creates its mirrors.

    A mirror is a local folder of empty files, which stand for objects of a store. The temporary
    folder is removed when the process ends.
    """
    if not _top or not os.path.isdir(_top[0]):
        _top[:] = [tempfile.mkdtemp(prefix="zckpt-")]
        atexit.register(_remove, _top[0], os.getpid())
    return _top[0]


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:  # not in a fork of the process
        shutil.rmtree(folder, ignore_errors=True)


_written: dict[str, str] = {}
"""The URLs of targets, by the paths at which they are written first."""


def spell(path: str, url: str) -> None:
    """Registers that the local path of a target stands for a URL; `spelled` then shows the URL."""
    _written[path] = url


def spelled(text: str) -> str:
    """Replaces local paths that stand for URLs by the URLs, in a text such as a message."""
    for path, url in _written.items():
        # an unfinished target has only a path
        text = re.sub(re.escape(path) + r"(?![\w.-])", lambda _, url=url: url, text)  # type: ignore[misc]
    if not _top or _top[0] not in text:
        return text
    return re.sub(re.escape(_top[0]) + r"/[0-9a-f]+/(\w+):/", r"\1://", text)


def mirrored(url: Url) -> Mirror:
    """Creates the mirror of a URL: a local folder in which an empty file stands for each object.

    Reads of a file then fetch the object's bytes. Raises IncompleteCheckpoint if the URL belongs to
    an unfinished target, and StoreError and other errors of stores.
    """
    own_folder = os.path.join(top(), os.urandom(4).hex())
    base = os.path.join(own_folder, f"{url.scheme}:", *url.root.split("/"))
    mirror = Mirror(os.path.join(base, *url.key.split("/")) if url.key else base, own_folder)
    os.makedirs(base)
    try:
        store = failures.asked(lambda: store_of(url), url, "list")
        listed = failures.asked(lambda: _listed(store, url), url, "list")
        finished = failures.asked(lambda: _finished(store, url, listed), url)
        for key, stored_object in finished.items():
            _lay(mirror, base, File(url.beside(key), store, stored_object, mirror))
        if not store.has_listing:
            _lay_named(mirror, base, url, store)
    except BaseException:
        mirror.remove()
        raise
    return mirror


def _listed(store: Store, url: Url) -> dict[str, StoredObject]:
    """Lists the objects below the URL and beside it, by their keys.

    If the URL is that of one object, the result has this object instead of objects below the URL.
    """
    inside = [*store.below(url.key)]
    if url.key and not inside and (alone := store.head(url.key)) is not None:
        inside = [alone]
    objects = {each.key: each for each in (*inside, *(_beside(store, url) if url.key else ()))}
    folders = {parent for key in objects for parent in _folders_above(key)}
    # tools that show a store as folders put an empty object for each folder
    return {key: each for key, each in objects.items() if each.size or key not in folders}


def _beside(store: Store, url: Url) -> list[StoredObject]:
    """Lists the objects in the folder that contains the URL, if their keys can be paths of files.

    The list is empty if this user may not list the folder. An object whose key is also that of a
    folder is left out.
    """
    beside = _seen(lambda: store.directly_in(url.key.rpartition("/")[0])) or []
    keys = {each.key for each in beside}
    return [
        object_beside
        for object_beside in beside
        if not strange(object_beside.key.rstrip("/"))
        and (object_beside.key == url.key or f"{object_beside.key}/" not in keys)
    ]


def _seen(look: Callable[[], T]) -> T | None:
    """Returns the result of `look`, a request for objects outside of the checkpoint.

    None if this user has no permission for the request, or if a key cannot be a path.
    """
    try:
        return look()
    except Exception as error:
        if isinstance(error, PermissionError) or type(error).__name__ == "InvalidPathError":
            return None
        raise


def _folders_above(key: str) -> Iterator[str]:
    while key := key.rpartition("/")[0]:
        yield key


def _finished(
    store: Store, url: Url, objects: Mapping[str, StoredObject]
) -> dict[str, StoredObject]:
    """Drops the objects of unfinished zckpt targets below the URL, and notes of finished targets.

    A target is unfinished if its note (zckpt-unfinished.json) is invalid, or lists a file that is
    missing or damaged. Raises IncompleteCheckpoint if the URL itself is in an unfinished target.
    """
    kept = dict(objects)
    below = [each for key, each in objects.items() if os.path.basename(key) == UNFINISHED]
    for at in (*below, *_notes_above(store, url)):
        folder = os.path.dirname(at.key)
        if url.key and not folder:
            continue  # no target is a complete bucket
        is_listed = f"{folder}/".startswith(f"{url.key}/".lstrip("/")) or not store.has_listing
        there = objects if is_listed else {each.key: each for each in store.below(folder)}
        note = note_at(store, at)
        if note is not None and not note.missing(partial(_size, store, there, folder)):
            kept.pop(at.key, None)
            continue
        if f"{url.key}/".startswith(f"{folder}/"):
            raise IncompleteCheckpoint(
                "unfinished-target",
                f"{url} belongs to a target that is not complete",
                hint="wait for the run that sends it, repeat that run with --resume, or remove it: "
                f"zckpt clean-up {url.beside(folder)}",
                file=str(url),
            )
        kept = {key: each for key, each in kept.items() if not key.startswith(f"{folder}/")}
    return kept


def _notes_above(store: Store, url: Url) -> list[StoredObject]:
    """Finds the files zckpt-unfinished.json in folders above the URL.

    The URL may be a part of the target that such a file lists.
    """
    above = [url.key, *_folders_above(url.key)][2 if store.has_listing else 0 :]

    def look(folder: str) -> StoredObject | None:
        return _seen(lambda: store.head(f"{folder}/{UNFINISHED}"))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [*filter(None, pool.map(look, filter(None, above)))]


def _size(store: Store, there: Mapping[str, StoredObject], folder: str, name: str) -> int | None:
    key = f"{folder}/{name}".lstrip("/")
    stored_object = there.get(key) if store.has_listing else store.head(key)
    return stored_object.size if stored_object else None


def note_at(store: Store, stored_object: StoredObject) -> Note | None:
    """Reads zckpt-unfinished.json, the note of an unfinished target; None if it is invalid."""
    if stored_object.size > unfinished.MOST:
        return None
    return unfinished.understood(bytes(store.read(stored_object, 0, stored_object.size)))


def _lay(mirror: Mirror, base: str, file: File) -> None:
    """Creates the empty local file for an object, or the local folder for a folder."""
    stored_object = file.stored_object
    is_folder = stored_object.key.endswith("/") and not stored_object.size
    if reason := strange(stored_object.key.rstrip("/") if is_folder else stored_object.key):
        raise failures.unsafe(file.url, f"{file.url} {reason}: it cannot be the name of a file")
    path = os.path.join(base, *stored_object.key.split("/"))
    if os.path.isfile(path) and not is_folder:
        return  # the object was listed twice
    try:
        os.makedirs(path if is_folder else os.path.dirname(path), exist_ok=True)
        if is_folder:
            return
        with open(path, "xb") as hole:
            hole.truncate(stored_object.size)
    except (FileExistsError, NotADirectoryError) as error:
        message = f"{file.url}: the same key is both an object and a folder of objects"
        raise failures.unsafe(file.url, message) from error
    # the nanoseconds distinguish this file from later ones with its inode; a run that is continued
    # finds the same times
    checksum = crc32(
        f"{file.url} {stored_object.etag} {stored_object.size}".encode("utf-8", "surrogateescape")
    )
    stamp = stored_object.time // 10**9 * 10**9 + checksum % 10**9
    os.utime(path, ns=(stamp, stamp))
    mirror.files[stored_object.key] = file
    mirror.registered.append(byte_sources.register(path, file))


def _lay_named(mirror: Mirror, base: str, url: Url, store: Store) -> None:
    """Creates the empty local files for a folder on a web server that cannot list it.

    It tries the usual file names (`NAMED`), and the names that index files list.
    """
    if url.key in mirror.files:
        return

    def lay(names: Iterable[str]) -> list[str]:
        keys = [f"{url.key}/{name}" if url.key else name for name in names if not strange(name)]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            heads = [*pool.map(store.head, keys)]
        for stored_object in filter(None, heads):
            _lay(mirror, base, File(url.beside(stored_object.key), store, stored_object, mirror))
        return [found.key for found in heads if found]

    try:
        for key in lay((*LISTS, *NAMED)):
            name = key.rpartition("/")[2]
            if name in LISTS:
                file = mirror.files[key]
                document = json.loads(file.pread(file.stored_object.size, 0))
                names_in_list = document[LISTS[name]]
                lay(
                    sorted(
                        {*(names_in_list if name == "manifest.json" else names_in_list.values())}
                    )
                )
    except (ValueError, KeyError, TypeError, AttributeError):
        return  # the reader will report the problem
    except Exception as error:
        raise failures.explained(error, url) from error
