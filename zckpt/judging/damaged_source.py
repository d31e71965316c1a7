"""Reads a checkpoint in which files are missing or cannot be read.

In place of a lost file, the file of the same kind of the nearest rank is read. A temporary folder
of links has this other file under the lost file's name, and is read like any checkpoint. So the
reader tells which elements the lost file had. They are recognized by the lost file's path, and
excluded from all statistics. If no rank has such a file, the caller may name a file of an older
checkpoint.

If files state different steps, the step that occurs most often is used. If the optimizer's state
cannot be read for another reason, only the weights are read.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from tempfile import TemporaryDirectory
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ..core.checkpoint.dtypes import SIZES
from ..core.checkpoint.entries import Entry
from ..core.checkpoint.layers import Places, places_of
from ..core.checkpoint.manifest import Manifest
from ..core.grouping import by_key
from ..core.passes.description import Report, line_of
from ..core.storage import sources
from ..core.storage.fragments import Fragment, Runs
from ..core.storage.inventory import MOST
from ..core.storage.sources import standing_in
from ..errors import (
    AmbiguousCheckpoint,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    MissingExtra,
    NotACheckpoint,
    SourceChanged,
    WrongOption,
    ZckptError,
    notice_of,
    warning,
)
from . import verdict
from .inventory import files_below, stand_in, states_in
from .verdict import Verdict

NOTHING_TO_SHOW = (NotACheckpoint, AmbiguousCheckpoint)
NO_FAULT = (WrongOption, MissingExtra, SourceChanged)
"""Errors that are not due to the checkpoint, such as a wrong option."""
OF_OTHERS = ("foreign", "unexpected")
SMALL = 4096  # bytes; a file up to this size is copied into the folder of links


class Found(Struct, eq=False, dict=True):
    """What could be read of a damaged checkpoint at `path`, and what is wrong with it (`faults`).

    lost        {path of a lost file in the manifest: "missing" or "unreadable"}
    borrowed    {path of a lost file: an older checkpoint's file, which is read instead}
    shadow      a temporary folder of links, in which other files replace lost ones
    stated      if files state different steps: (place, step) for each
    """

    path: str
    manifest: Manifest | None = None
    faults: list[Report] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    borrowed: dict[str, str] = field(default_factory=dict)
    stated: tuple[tuple[str, float | int], ...] = ()
    shadow: str | None = None  # None if no file is lost
    tag: str | None = None

    @property
    def known(self) -> Manifest:
        """The manifest of a checkpoint that could be read; if it is None, an assertion fails."""
        assert self.manifest is not None
        return self.manifest

    @cached_property
    def entries(self) -> list[Entry]:
        """All tensors, in the order of the report's table."""
        return [*self.known.entries.values()]

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The position of each tensor in the report's table, by its name."""
        return {entry.name: number for number, entry in enumerate(self.entries)}

    @cached_property
    def places(self) -> Places:
        """The layer and the kind of each tensor, as rows and columns of a table."""
        return places_of(entry.parameter for entry in self.entries)

    @cached_property
    def judged(self) -> Verdict:
        """The verdict on whether the checkpoint is complete, and from one save."""
        return verdict.of(self.known)

    @property
    def root(self) -> str:
        """The real folder or file of the checkpoint, even if a folder of links was read instead."""
        if self.manifest is not None:
            return self.real(self.manifest.root)
        return os.path.join(self.path, self.tag) if self.tag else self.path

    def real(self, text: str) -> str:
        """Replaces paths in the temporary folder of links by the real paths, in any text."""
        return text if self.shadow is None else text.replace(self.shadow, self.path)

    def name(self, path: str) -> str:
        """The path of a file, relative to the checkpoint's folder."""
        path, root = self.real(path), self.root
        return os.path.basename(path) if path == root else os.path.relpath(path, root)


@contextmanager
def what_is_there(
    path: str,
    source: Mapping[str, Any],
    read: Callable[..., Manifest],
    older: Callable[[str], str | None] = lambda _: None,
) -> Iterator[Found]:
    """Reads as much as possible of a damaged checkpoint; its problems are listed in `faults`.

    `source` are arguments of `read`, as in `zckpt.read`. `older(path)` is called for a lost file
    that no other rank's file can replace: it returns an older checkpoint's file, or None. Raises
    only errors that are not damage, such as NotACheckpoint, AmbiguousCheckpoint or WrongOption.
    """
    found, source, weights_only = Found(path, tag=source.get("tag")), dict(source), False
    with TemporaryDirectory(prefix="zckpt-") as temporary:
        while True:
            try:
                with standing_in(found.lost):
                    where, words = found.shadow or path, {"weights_only": weights_only, **source}
                    found.manifest = read(where, nameless=True, opens_items=True, **words)
                break
            except NO_FAULT:
                raise
            except (ZckptError, OSError) as error:
                if isinstance(error, NOTHING_TO_SHOW) and not found.faults:
                    raise
                if isinstance(error, InconsistentCheckpoint) and error.steps and not found.stated:
                    source["step_policy"] = _most_stated(found, error)
                elif not _stand_in(found, error, temporary, older):
                    kind, paths = _missing_in(found, error)
                    if not paths and isinstance(error, IncompleteCheckpoint):
                        kind = "missing"
                    if found.lost and not paths:  # the file that replaces it does not fit
                        found.faults.append(_omitted(_message_of(found, error)))
                    named: list[str | None] = [*paths] or [None] * (not found.lost)
                    found.faults += (_fault(found, error, kind, path) for path in named)
                    if weights_only:
                        break
                    weights_only = True
        yield found


def _fault(found: Found, error: ZckptError | OSError, kind: str, file: str | None) -> Report:
    notice = notice_of(error)
    message = _message_of(found, error)
    if file is not None and kind == "missing":
        name, paths = os.path.basename(file), getattr(error, "paths", ())
        if len(paths) > 1 or name not in message:  # the message is about another file
            message = f"{name} is missing: {message}"
    return line_of(replace(notice, file=file, message=message), kind=kind, fault=True)


def _message_of(found: Found, error: ZckptError | OSError) -> str:
    return found.real(notice_of(error).message)


def _omitted(error: str) -> Report:
    """A report line that reading stopped, because files that replace missing ones do not fit.

    `error` says what does not fit. The line does not count as a fault.
    """
    message = f"the rest was not read, because of the missing files above: {error}"
    left = warning("not-compared", message)
    return line_of(left, kind="warning", fault=False)


def kept(entry: Entry, lost: Mapping[str, str]) -> tuple[Entry, tuple[tuple[int, int], ...]]:
    """The part of a tensor that is not in lost files, and its element ranges [start, stop).

    `lost` maps the paths of lost files to their state. If no element is lost, the first result is
    `entry` itself.
    """
    size, parts = SIZES[entry.dtype], []
    if not any(fragment.extent.file in lost for fragment in entry.fragments):
        return entry, ((0, entry.numel),)
    runs = sorted(
        (run for run in entry.fragments.runs(0, entry.numel, size) if run.extent.file not in lost),
        key=lambda run: run.start,
    )
    ranges: list[tuple[int, int]] = []
    first = 0
    for run in runs:
        parts.append(Fragment(first, first + run.stop - run.start, run.extent))
        first += run.stop - run.start
        if ranges and ranges[-1][1] == run.start:
            ranges[-1] = ranges[-1][0], run.stop
        else:
            ranges.append((run.start, run.stop))
    return replace(entry, shape=(first,), fragments=Runs(parts)), tuple(ranges)


# -- steps that differ


def _most_stated(found: Found, error: InconsistentCheckpoint) -> str:
    """The step that is stated most often, as a value of --step-policy.

    Adds faults to `found`: one for each file that states another step. A file with several other
    steps gets a fault for each of them.
    """
    found.stated = error.steps
    (most, _), *_ = Counter(step for _, step in error.steps).most_common()
    odd = by_key(
        ((file_in(where, found.path), step), where) for where, step in error.steps if step != most
    )
    for (file, _), places in odd.items():
        found.faults.append(_fault(found, error, "step", file) | {"subject": places[0]})
    return f"{most:.0f}"


def file_in(where: str, folder: str) -> str | None:
    """Extracts the path of a file from a description such as `model.pt, step of fc1`.

    Only files below `folder` are considered. None if the description names no file.
    """
    words = {os.path.basename(word.strip()) for word in re.split(r"[,:]\s", f"{where} ")}
    named = (path for path in files_below(folder) if os.path.basename(path) in words)
    return next(named, None) if any("." in word for word in words) else None


# -- files that are lost


def _stand_in(
    found: Found,
    error: ZckptError | OSError,
    temporary: str,
    older: Callable[[str], str | None],
) -> bool:
    """Puts links to similar files in place of the files that an error names.

    Adds the lost files to the faults in `found`. Returns False if no other file can replace any of
    them.
    """
    kind, paths = _missing_in(found, error)
    gone = {*paths, *map(found.real, found.lost)}
    there = [path for path in files_below(found.path) if path not in gone]
    replacements = {path: other for path in paths if (other := stand_in(path, there)) is not None}
    borrowed = {
        path: other for path in paths if path not in replacements and (other := older(path))
    }
    replacements |= borrowed
    if not replacements or len(found.lost) + len(replacements) > max(MOST, len(there)):
        return False  # a damaged number of ranks may be huge
    for path in replacements:
        found.faults.append(_fault(found, error, kind, path))
    found.shadow = found.shadow or os.path.join(
        temporary, os.path.basename(os.path.abspath(found.path))
    )
    for path, other in replacements.items():
        inside = os.path.relpath(path, found.path)
        _link(found.path, found.shadow, inside, os.path.realpath(other))
        found.lost[os.path.join(found.shadow, inside)] = kind
        if path in borrowed:
            found.borrowed[os.path.join(found.shadow, inside)] = other
    return True


def _missing_in(found: Found, error: ZckptError | OSError) -> tuple[str, list[str]]:
    """Returns `missing` or `unreadable`, and the paths of the files that the error is about.

    The paths are real ones. Files that are already known to be lost are left out.
    """
    states = {found.real(path): state for path, state in states_in(error).items()}
    known = {*map(found.real, found.lost)}
    kind = "missing" if "missing" in states.values() else "unreadable"
    return kind, [p for p, state in states.items() if state not in OF_OTHERS and p not in known]


def _copy(path: str, target: str) -> None:
    """Copies a small file and its times."""
    # not shutil.copy: the file may be a placeholder without data (core/storage/byte_sources.py)
    with sources.opened(path) as source, open(target, "xb") as file:
        file.write(source.read())
    shutil.copystat(path, target)


def _link(real: str, shadow: str, inside: str, other: str) -> None:
    """Creates the folder `shadow` with links to all files in `real`, one of them replaced.

    The link at the path `inside` (relative to `real`) leads to `other`. Small files are copied
    instead of linked.
    """
    name, _, below = inside.partition(os.sep)
    if not os.path.isdir(shadow):
        os.mkdir(shadow)
        # links to files such as `latest` are not followed
        for item in os.scandir(real) if os.path.isdir(real) else ():
            if item.is_file() and item.stat().st_size <= SMALL:
                _copy(item.path, os.path.join(shadow, item.name))
            else:
                os.symlink(os.path.abspath(item.path), os.path.join(shadow, item.name))
    place = os.path.join(shadow, name)
    if os.path.isfile(place) or os.path.islink(place):
        os.unlink(place)
    if below:
        _link(os.path.join(real, name), place, below, other)
    else:
        os.symlink(other, place)
