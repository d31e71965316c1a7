"""How does a manifest get from one process to another?

As a pickle of a closed table: only the records of this package that a manifest is made of can be in
it. A pickle keeps what JSON would lose: the flat buffers that 50,000 tensors share stay one object.
The store of a launch asks nobody who he is, so nothing else may ever be made of its bytes. A source
must be one that this process was started for, and sizes have limits.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from itertools import chain
from typing import Any

from msgspec.structs import replace

from ..copying.sharing import Work
from ..core.fragments import ZEROS, Box, Boxes, Extent, Slices
from ..core.manifest import Entry, Manifest
from ..errors import MALFORMED, CorruptCheckpoint, UnsupportedCheckpoint, brief, cause, listed

ANY_SIZE = 16 << 20  # bytes that every message may have
MAX_RATIO = 64  # of the bytes of a longer one to those that are sent; manifests have up to 13
MAX_SIZE = 2 << 30  # bytes of a message, and of what is sent of it
MAX_CHUNK = 4 << 30  # bytes that a thread copies at a time, for 16,384 ranks

CLASSES = {
    "builtins": {"frozenset"},
    "zckpt.core.compare": {"ComparisonWork", "Partial"},
    "zckpt.core.difference": {"Difference"},
    "zckpt.core.fragments": {"Box", "Boxes", "Extent", "Fragment", "Record", "Runs", "Slices"},
    "zckpt.core.inert": {"Scalar"},
    "zckpt.copying.journal": {"Identity"},
    "zckpt.core.manifest": {"Entry", "Manifest", "Parameter"},
    "zckpt.core.plan": {"Match"},
    "zckpt.copying.sharing": {"Work"},
    "zckpt.core.sources": {"Fingerprint"},
    "zckpt.proof.health": {"MeasuringWork", "Partial"},
    "zckpt.core.statistics": {"Statistics"},
}
"""The classes that may be made, by module. A module is imported when the first one is made."""


class _Table(pickle.Unpickler):
    """Makes objects of the table's classes, and of no others."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is not part of a manifest")
        return getattr(import_module(module), name)


def tensors_of(manifest: Manifest) -> Manifest:
    """The part of a manifest that moves bytes: where tensors lie, and which weights are tied."""
    nothing: dict[str, Any] = {"engine": None, "step_place": None, "groups": None, "state": {}}
    return replace(
        manifest,
        **nothing,
        steps=(),
        of_ranks={},
        layout={},
        left_out=(),
        warnings=(),
        inferred=(),
        siblings=(),
        sibling_weights=(),
        objects=frozenset(),
        source={"dp": manifest.dp},
        fingerprints=dict(manifest.fingerprints),
    )


def with_manifests(work: Any, change: Callable[[Manifest], Manifest]) -> Any:
    """A pass whose manifests are changed; two sides that were one stay one."""
    changed = {id(manifest): change(manifest) for manifest in work.manifests}
    return replace(work, manifests=tuple(changed[id(manifest)] for manifest in work.manifests))


def to_bytes(value: object) -> bytes:
    """The bytes of a value whose classes are all in the table."""
    text = pickle.dumps(value, protocol=5)
    if len(text) > MAX_SIZE:
        raise UnsupportedCheckpoint(
            f"the description of this checkpoint has {len(text)} bytes: processes share {MAX_SIZE}",
            hint="use --part K/N instead of a launcher, or one process with --single",
        )
    return zlib.compress(text, 1)


def from_bytes(data: bytes) -> Any:
    """The inverse of `to_bytes`; raises CorruptCheckpoint for what it cannot have written."""
    most = min(max(ANY_SIZE, MAX_RATIO * len(data)), MAX_SIZE)
    packed = zlib.decompressobj()
    try:
        text = packed.decompress(data, most)
        if not packed.eof:
            raise unreadable(f"it is cut short, or longer than {most} bytes")
        return _Table(io.BytesIO(text)).load()
    except CorruptCheckpoint:
        raise
    except Exception as error:
        raise unreadable(cause(error)) from error


def unreadable(reason: str) -> CorruptCheckpoint:
    """The error of a message that no process of this launch has sent."""
    return CorruptCheckpoint(
        f"a message of another process cannot be read: {reason}",
        hint="start all processes with the same version of zckpt, in the same folder and with the "
        "same arguments; another program may use their store: choose another MASTER_PORT",
    )


def parsed(data: bytes) -> Any:
    """A JSON value that a process has left; raises CorruptCheckpoint."""
    try:
        return json.loads(data)
    except MALFORMED as error:
        raise unreadable("it is no JSON") from error


def check(work: Any, paths: Sequence[str]) -> None:
    """Raises CorruptCheckpoint unless a conversion or a pass reads the checkpoints at `paths`."""
    folders = [_folder(path) for path in paths]
    try:
        if type(work.chunk) is not int or not 0 < work.chunk <= MAX_CHUNK:
            raise unreadable(f"{brief(work.chunk)} bytes cannot be copied at a time")
        for file in set(_files_read(work)) - {ZEROS}:
            if not os.path.abspath(file).startswith(tuple(folders)):
                raise unreadable(f"{listed([file])} is not in {listed(folders)}")
    except MALFORMED as error:
        raise unreadable(cause(error)) from error


def _files_read(work: Any) -> Iterator[str]:
    """The files that a conversion or a pass reads, some of them many times."""
    if isinstance(work, Work):
        yield from files_of(work.source)
        return
    for manifest in work.manifests:
        yield from files_of(manifest)
    pairs = [(match.a, match.b) for match in getattr(work, "matches", ())]
    entries = chain(getattr(work, "entries", ()), *pairs)
    yield from _files_in(entry for entry in entries if entry is not None)


def _folder(path: str) -> str:
    """The directory that has all files of a checkpoint; the path may be that of one file."""
    path = os.path.abspath(path)
    return os.path.join(path if os.path.isdir(path) else os.path.dirname(path), "")


def files_of(manifest: Manifest) -> Iterator[str]:
    """The files in which tensors of a manifest lie, some of them many times."""
    yield from _files_in(chain(manifest.entries.values(), manifest.replicas))
    yield from (record.extent.file for record in manifest.records)


def _files_in(entries: Iterable[Entry]) -> Iterator[str]:
    flats: dict[int, Sequence[Extent]] = {}
    for first in entries:
        for entry in (first, *first.mean):
            match entry.fragments:
                case Slices() as slices:
                    flats[id(slices.flats)] = slices.flats
                case Boxes() as boxes:
                    yield from (box.extent.file for box in boxes.parts)
                case Box() as box:
                    yield box.extent.file
                case runs:
                    yield from (run.extent.file for run in runs)
    yield from (extent.file for same in flats.values() for extent in same)
