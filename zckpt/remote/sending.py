"""How does a target get into a store whole or not at all?

It is written on this machine first, in a folder of TMPDIR that has the name of its URL, and a run
that was stopped continues there. Then its files are sent in order:

    URL/zckpt-unfinished.json   first: what this run is going to write, for --resume and clean-up
    all other files             each one's size is asked for, and its bytes are compared
    the last file               manifest.json, .metadata, latest, ...: only if it is not there yet

The last file is the one without which no reader takes the rest for a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from msgspec import Struct, field

from ..core.checksum import crc32
from ..core.resources import Begin
from ..core.sources import walk
from ..core.version import __version__
from ..errors import CorruptCheckpoint, NotEnoughSpace, TargetExists, WrongOption, ZckptError
from . import failures
from .mirror import UNFINISHED, spell
from .stores import Found, Store, etag_of, store_of
from .urls import Url

LASTS = (
    "manifest.json",
    ".metadata",
    "latest",
    "latest_checkpointed_iteration.txt",
    "model.safetensors.index.json",
    "model.safetensors",
    "mp_rank_00_model_states.pt",
)
"""The files that make a folder a checkpoint, the decisive one first."""
SMALL = 64 << 20  # bytes: a last file up to this size is put on condition that there is none
BLOCK = 8 << 20  # bytes that are read back at a time
OF_RUNNING = {"begin", "tell", "copying", "resume", "dry_run", "read_back", "target"}
"""Words of a conversion that do not say what its target is."""


class Sums(Struct):
    """What a file's bytes are while they pass: their CRC-32, and the MD5 of each part."""

    crc: int = 0
    size: int = 0
    digests: list[bytes] = field(default_factory=list)

    def add(self, data: bytes) -> None:
        self.crc = crc32(data, self.crc)
        self.size += len(data)
        self.digests.append(hashlib.md5(data, usedforsecurity=False).digest())


def folder_for(url: Url) -> str:
    """The folder of TMPDIR in which the target of this URL is written first."""
    name = f"zckpt-to-{url.scheme}-{crc32(str(url).encode()):08x}"
    user = f"-{os.getuid()}" if hasattr(os, "getuid") else ""
    folder = os.path.join(tempfile.gettempdir(), name + user)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if os.stat(folder).st_uid != os.getuid() or os.path.islink(folder):
        raise TargetExists(
            f"{folder} belongs to another user", hint="set TMPDIR to a folder of yours"
        )
    return folder


def path_for(url: Url) -> str:
    """The path on this machine at which the target of a URL is written first."""
    path = os.path.join(folder_for(url), os.path.basename(url.key))
    spell(path, str(url))
    return path


def mark_of(command: str, words: Mapping[str, Any], sources: Sequence[str]) -> str:
    """What tells a run from all others: its command, its options, and the files of its sources."""
    said = {
        name: word
        for name, word in words.items()
        if name not in OF_RUNNING and not callable(word) and name not in sources
    }
    files = [
        (os.path.relpath(each.path, path), each.stat().st_size, each.stat().st_mtime_ns)
        for path in (words[name] for name in sources if words.get(name) is not None)
        for each in (walk(os.fspath(path)) if os.path.isdir(path) else ())
        if each.is_file()
    ]
    text = json.dumps([__version__, command, said, files], default=repr, sort_keys=True)
    return f"{crc32(text.encode('utf-8', 'surrogatepass')):08x}"


@contextmanager
def outgoing(url: Url, words: Mapping[str, Any], run: str) -> Iterator[tuple[str, bool]]:
    """The path on this machine at which the target of a URL is to be written first.

    True stands beside it if the run with the mark `run` has completed the target. Raises
    TargetExists if there is another one, and WrongOption for processes that share a target.
    """
    if url.scheme in ("https", "http", "hf"):
        raise WrongOption(
            f"{url}: zckpt reads {url.scheme}:// and does not write it",
            hint="write a folder, and send it then",
        )
    if words.get("sharing") is not None:
        raise WrongOption(
            f"{url}: several processes share a target in a folder of all, and not in a store",
            hint="give a folder of a shared filesystem, or --single",
        )
    if not url.key:
        raise WrongOption(f"{url} is a whole bucket", hint=f"give {url}/NAME")
    resume = bool(words.get("resume"))
    is_done = is_complete(url, run if resume else "", resume)
    path = path_for(url)
    folder = os.path.dirname(path)
    if not resume and not words.get("dry_run"):
        shutil.rmtree(path, ignore_errors=True)  # a complete one, of a run that could not send it
    try:
        yield path, is_done
    except NotEnoughSpace as error:
        raise NotEnoughSpace(
            error.message, hint=f"set TMPDIR to a folder with space: {url} is written there first"
        ) from error
    finally:
        if not os.listdir(folder):
            os.rmdir(folder)


def refuse_inside(source: Url, target: Url) -> None:
    """Raises WrongOption if the target is the source, or would become a part of it."""
    is_same_store = (source.scheme, source.root) == (target.scheme, target.root)
    if is_same_store and f"{target.key}/".startswith(f"{source.key}/"):
        raise WrongOption(
            f"{target} is the source itself"
            if target.key == source.key
            else f"{target} is inside of {source}",
            hint="choose a target beside the source",
        )


def is_complete(url: Url, run: str, resume: bool) -> bool:
    """Whether the run of this mark has completed the target.

    Raises TargetExists if there is anything else at the URL, but for what `resume` continues.
    """
    there = names_at(url)
    if not there:
        return False
    if UNFINISHED not in there:
        last = min(there, key=lambda name: (-_order(name)[0], name))
        if run and failures.asked(lambda: store_of(url).mark(there[last]), url) == run:
            return True
        raise TargetExists(f"{url} exists", hint="choose another name, or remove it first")
    if not resume:
        raise TargetExists(
            f"{url} exists: a run was stopped there",
            hint=f"add --resume to continue it, or remove it: zckpt clean-up {url}",
        )
    return False


def names_at(url: Url) -> dict[str, Found]:
    """What is below a URL, by name; the object at the URL itself has the name ""."""
    try:
        store = store_of(url)
        below = {each.key[len(url.key) :].strip("/"): each for each in store.below(url.key)}
        if (own := store.head(url.key)) is not None:
            below[""] = own
    except Exception as error:
        raise failures.explained(error, url, "list") from error
    return below


def send(path: str, url: Url, run: str, words: Mapping[str, Any]) -> dict[str, Any]:
    """Sends a complete target, and removes it here; gives what the report says of that.

    Files that an earlier run has sent are not sent again. Raises StoreError, TargetExists if
    another program has written there meanwhile, and CorruptCheckpoint for bytes that came to the
    store as others.
    """
    sizes = {
        os.path.relpath(each.path, path): each.stat().st_size
        for each in walk(path)
        if each.is_file(follow_symlinks=False)
    }
    *first, last = sorted(sizes, key=_order)
    sending = _Sending(store_of(url), url, path, run, words.get("read_back", True))
    begin: Begin | None = words.get("begin")
    progress = begin(sum(sizes.values())) if begin else None
    try:
        done = sending.begin(sizes, last)
        for name in first:
            if name not in done:
                sending.put(name)
                sending.note(name)
            if progress:
                progress(sizes[name])
        if before := words.get("before_rename"):
            before()
        sending.commit(last, sizes[last])
    except Exception as error:
        if isinstance(error, ZckptError):
            raise
        raise failures.explained(error, url, "write") from error
    if progress:
        progress(sizes[last])
    shutil.rmtree(path)
    return {"sent": len(sizes), "read_back": sending.again, "store_notes": sending.notes}


def _order(name: str) -> tuple[int, str]:
    """Files in order, those of `LASTS` at the end; a deeper one is less decisive."""
    base = os.path.basename(name)
    if base not in LASTS:
        return 0, name
    return 1 + (len(LASTS) - LASTS.index(base)) * 100 - name.count("/"), name


class _Sending(Struct, dict=True):
    """One target on its way: `again` counts the files that had to be read back."""

    store: Store
    url: Url
    path: str
    run: str
    read_back: bool
    again: int = 0
    notes: list[str] = field(default_factory=list)

    def key(self, name: str) -> str:
        return f"{self.url.key}/{name}"

    def begin(self, sizes: dict[str, int], last: str) -> set[str]:
        """Says what is going to be sent; gives the names that an earlier run has sent."""
        self.sent: dict[str, int] = {}
        self.about = {"zckpt": __version__, "last": last, "files": sizes}
        there = names_at(self.url)
        if last in there:
            raise self._taken(last)
        if UNFINISHED in there:
            earlier = self._earlier(there[UNFINISHED])
            self.sent = {
                name: crc
                for name, crc in earlier.items()
                if name in there
                and there[name].size == sizes.get(name)
                and crc == _crc_of(os.path.join(self.path, name))
            }
        try:
            self._state(create=UNFINISHED not in there)
        except Exception as error:
            if is_taken(error):
                raise self._taken(UNFINISHED) from error
            raise
        return {*self.sent}

    def _earlier(self, found: Found) -> dict[str, int]:
        try:
            document = json.loads(bytes(self.store.read(found, 0, found.size)))
            return {str(name): int(crc) for name, crc in document["sent"].items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            return {}

    def _taken(self, name: str) -> TargetExists:
        return TargetExists(
            f"{self.url}/{name} was written by another program meanwhile",
            hint=f"look at it first: zckpt inspect {self.url}",
        )

    def _state(self, create: bool = False) -> None:
        """Writes what was sent until now."""
        with tempfile.NamedTemporaryFile() as file:
            file.write(json.dumps({**self.about, "sent": self.sent}).encode())
            file.flush()
            self.store.put(self.key(UNFINISHED), file.name, lambda data: None, create, self.run)

    def note(self, name: str) -> None:
        """A file is there, and compared."""
        self.sent[name] = self.sums.crc
        self._state()

    def put(self, name: str, create: bool = False) -> None:
        """Sends one file, and compares what the store has."""
        self.sums = Sums()
        key, path = self.key(name), os.path.join(self.path, name)
        etag = self.store.put(key, path, self.sums.add, create, self.run)
        found = self.store.head(key)
        if found is None or found.size != self.sums.size:
            there = "nothing" if found is None else f"{found.size} bytes"
            raise self._lost(name, f"the store has {there} of {self.sums.size} bytes")
        if (etag or "").strip('"') == etag_of(self.sums.digests):
            return  # the MD5 that the store itself has computed
        if self.read_back:
            self.again += 1
            crc = 0
            for start in range(0, found.size, BLOCK):
                stop = min(start + BLOCK, found.size)
                crc = crc32(self.store.read(found, start, stop), crc)
            if crc != self.sums.crc:
                raise self._lost(name, "the store has other bytes")
        elif not self.notes:
            self.notes.append(
                f"the store of {self.url} gives no MD5, and --no-read-back leaves out to compare "
                "the bytes that it has"
            )

    def _lost(self, name: str, what: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(
            f"{self.url}/{name} did not arrive: {what}",
            hint="start again with --resume: what has arrived is not sent again",
        )

    def commit(self, name: str, size: int) -> None:
        """Sends the last file, if there is none yet, and removes the note."""
        is_small = size <= SMALL
        if not is_small:
            self._look(name)
        try:
            self.put(name, create=is_small)
        except Exception as error:
            if is_taken(error):
                raise self._taken(name) from error
            if type(error).__name__ not in ("NotImplementedError", "NotSupportedError"):
                raise
            self._look(name)
            self.put(name)
        self.store.delete([self.key(UNFINISHED)])

    def _look(self, name: str) -> None:
        """Raises TargetExists if the file is there: it will be sent without a condition."""
        if self.store.head(self.key(name)) is not None:
            raise self._taken(name)
        self.notes.append(f"{self.url}/{name} was put without a condition: zckpt has looked before")


def is_taken(error: Exception) -> bool:
    """Whether a store says that there is an object already."""
    return type(error).__name__ in ("AlreadyExistsError", "FileExistsError")


def _crc_of(path: str) -> int:
    crc = 0
    with open(path, "rb") as file:
        while data := file.read(BLOCK):
            crc = crc32(data, crc)
    return crc
