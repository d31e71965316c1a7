"""Prepares the upload of a target to a URL: its local folder, and whether the URL is free.

The target is first written to the local folder. Then `sending.py` sends it.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from shlex import quote
from typing import Any

from ..core.storage.checksum import crc32
from ..core.storage.sources import walk
from ..core.storage.unfinished import Note
from ..core.version import __version__
from ..errors import NotEnoughSpace, TargetExists, UnsupportedCheckpoint, WrongOption
from . import failures
from .mirror import UNFINISHED, note_at, spell
from .stores import Store, StoredObject, store_of
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
"""Names of files without which no program recognizes a checkpoint; the decisive one first."""
REMOVING = {"s3": "aws s3 rm --recursive {}", "gs": "gcloud storage rm --recursive {}"}
OF_RUNNING = {
    *("begin", "tell", "copying", "resume", "begins_anew", "gives_way", "dry_run"),
    *("read_back", "target"),
}
"""Arguments of a conversion that do not affect the contents of its target."""


def order(name: str) -> tuple[int, str]:
    """A sort key for file names, in the order of sending: names in `LASTS` come last.

    Of two files of the same name, the one in a deeper folder is sent first.
    """
    base = os.path.basename(name)
    if base not in LASTS:
        return 0, name
    return 1 + (len(LASTS) - LASTS.index(base)) * 100 - name.count("/"), name


def folder_for(url: Url) -> str:
    """The folder in TMPDIR in which the target for this URL is written before it is sent."""
    name = f"zckpt-to-{url.scheme}-{crc32(str(url).encode()):08x}-{os.getuid()}"
    folder = os.path.join(tempfile.gettempdir(), name)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    now = os.lstat(folder)
    if not stat.S_ISDIR(now.st_mode) or now.st_uid != os.getuid():
        raise TargetExists(
            "target-unsafe",
            f"{folder} belongs to another user",
            hint="set TMPDIR to a folder of yours",
            file=folder,
        )
    return folder


def mark_of(command: str, words: Mapping[str, Any], sources: Sequence[str]) -> str:
    """A checksum that identifies a run, from its command, options and source files, as text.

    It is stored with the objects that the run sends.
    """
    said = {
        name: word
        for name, word in words.items()
        if name not in OF_RUNNING and not callable(word) and name not in sources
    }
    files = []
    for path in (os.fspath(words[name]) for name in sources if words.get(name) is not None):
        inside = [item.path for item in walk(path)] if os.path.isdir(path) else [path]
        for file in filter(os.path.isfile, inside):
            seen = os.stat(file)
            files.append((os.path.relpath(file, path), seen.st_size, seen.st_mtime_ns))
    text = json.dumps([__version__, command, said, files], default=repr, sort_keys=True)
    return f"{crc32(text.encode('utf-8', 'surrogatepass')):08x}"


@contextmanager
def outgoing(url: Url, words: Mapping[str, Any], run: str) -> Iterator[tuple[str, bool]]:
    """Yields the local path for a target, and whether the target at the URL is already complete.

    `words` are the arguments of the conversion. `run` is the text that is stored with its objects:
    a run that is continued recognizes them by this text. Raises TargetExists if other objects are
    at the URL, and WrongOption if zckpt cannot write there or several processes share the
    conversion.
    """
    if url.scheme in ("https", "http", "hf"):
        raise WrongOption(
            "store-unsupported",
            f"{url}: zckpt reads from {url.scheme}://, but does not write there",
            hint="write to a folder, and upload the folder",
        )
    if words.get("sharing") is not None:
        raise WrongOption(
            "options-conflict",
            f"{url}: several processes can share a target on a filesystem, but not in a store",
            hint="give a folder of a shared filesystem, or --single",
        )
    if not url.key:
        raise WrongOption("option-invalid", f"{url} is a bucket", hint=f"give {url}/NAME")
    resume = bool(words.get("resume"))
    is_done = is_complete(url, run if resume else "", resume)
    folder = folder_for(url)
    path = os.path.join(folder, os.path.basename(url.key))
    spell(path, str(url))
    if not resume and not words.get("dry_run"):
        # it may be complete, from a run that could not send it
        shutil.rmtree(path, ignore_errors=True)
    try:
        yield path, is_done
    except NotEnoughSpace as error:
        raise NotEnoughSpace(
            "not-enough-space",
            error.message,
            hint=f"set TMPDIR to a folder with space: {url} is written there first",
        ) from error
    finally:
        if not os.listdir(folder):
            os.rmdir(folder)


def refuse_inside(source: Url, target: Url) -> None:
    """Raises WrongOption if the target is the source, or would become a part of it."""
    is_same_store = (source.scheme, source.root) == (target.scheme, target.root)
    if is_same_store and f"{target.key}/".startswith(f"{source.key}/"):
        raise WrongOption(
            "target-in-source",
            f"{target} is the source itself"
            if target.key == source.key
            else f"{target} is inside of {source}",
            hint="choose a target beside the source",
        )


def is_complete(url: Url, run: str, resume: bool) -> bool:
    """Whether this conversion has already completed the target at the URL.

    `run` is the text that is stored with all objects of this conversion. Raises TargetExists if
    other objects are at the URL. With `resume`, an unfinished target is no error.
    """
    there = names_at(url)
    if not there:
        return False
    if UNFINISHED not in there:
        last = min(there, key=lambda name: (-order(name)[0], name))
        if run and failures.asked(lambda: store_of(url).mark(there[last]), url) == run:
            return True
        raise TargetExists(
            "target-exists",
            f"{url} exists",
            hint="choose another name, or remove it first",
            file=str(url),
        )
    if not resume:
        raise TargetExists(
            "target-unfinished",
            f"{url} exists: a run was stopped there",
            hint=f"add --resume to continue it, or remove it: zckpt clean-up {url}",
            file=str(url),
        )
    failures.asked(lambda: note_of(url, store_of(url), there[UNFINISHED]), url)
    return False


def note_of(url: Url, store: Store, stored_object: StoredObject) -> Note:
    """Reads a file zckpt-unfinished.json, the note of an unfinished target.

    Raises UnsupportedCheckpoint if it is invalid.
    """
    if (note := note_at(store, stored_object)) is None:
        raise UnsupportedCheckpoint(
            "version-unsupported",
            f"this zckpt cannot parse {url}/{UNFINISHED}: nothing was changed",
            hint="a newer zckpt may have written it; if you do not need the files of this target, "
            f"remove them with the store's client{_client_line(url)}",
            file=str(url),
        )
    return note


def _client_line(url: Url) -> str:
    """The end of a hint: the store client's command that removes everything below a URL.

    It begins with ": ". It is "" for a store whose client zckpt does not know.
    """
    command = REMOVING.get(url.scheme)
    return f": {command.format(quote(str(url)))}" if command else ""


def names_at(url: Url) -> dict[str, StoredObject]:
    """Maps names relative to a URL to its objects; an object at the URL itself has the name ""."""

    def ask() -> dict[str, StoredObject]:
        store = store_of(url)
        below = {each.key[len(url.key) :].strip("/"): each for each in store.below(url.key)}
        object_at_url = store.head(url.key)
        return below if object_at_url is None else {**below, "": object_at_url}

    return failures.asked(ask, url, "list")
