"""Which files has a checkpoint, what is each for, and in which state is it?

The engine's files are told by its format's table of roles, and those beside them by that of the
trainers' programs. The engine's were opened by their reader, which raises for what is wrong; those
of a program are looked at here. If that reader has failed, names and its error say what is there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, islice

from .. import formats
from ..core.checkpoint.manifest import Manifest
from ..core.checkpoint.weights import is_optimizers
from ..core.storage import sources
from ..core.storage.inventory import Known, Role, Row, State, any_of, known, nearest
from ..errors import CorruptCheckpoint, IncompleteCheckpoint, ZckptError
from ..formats.statedict.state_dict_search import has_groups
from ..training import needs
from ..training.trainers import STATE, counter
from .file_state import state_of

OTHER = "other"
"""The role of a file whose name says nothing."""
MOST_FILES = 20_000
"""So many files of a damaged checkpoint are looked at."""
ALL_ROLES = tuple(role for format in formats.FORMATS for role in format.roles)
_NAMES = any_of(needs.ROLES)
STATES: Mapping[str, State] = {
    "file-cut-short": "cut",
    "mixed-saves": "foreign",
    "swapped-files": "foreign",
    "file-copied-over": "foreign",
    "world-size-disagrees": "unexpected",
}
"""What a problem with this code says of its file; any other damage is `unreadable`."""


def inventory(manifest: Manifest, required: Mapping[str, needs.Need]) -> list[Row]:
    """The rows of a checkpoint that was read: the engine's files, then those beside them.

    `required` are the program's needs by role. Small files beside the engine's are read, and the
    ends of large ones; not those behind links that lead out of the folder. What is needed and is
    not there has a row of its own, unless there are weights alone.
    """
    rows = [*of_engine(manifest), *_beside(manifest, required)]
    there, folder = {row.role for row in rows}, folder_of(manifest)
    lost = [
        need
        for need in required.values()
        if need.missing in needs.LOST
        and need.role.name not in there
        and not os.path.isfile(os.path.join(folder, need.name))
    ]
    if not lost or not has_optimizer(manifest):
        return rows
    missing: State = "missing"
    paths = [(need, os.path.join(folder, need.name)) for need in lost]
    return rows + [Row(need.role.name, need.name, path, state=missing) for need, path in paths]


def has_optimizer(manifest: Manifest) -> bool:
    """Whether an optimizer's state was saved, under names, or under numbers that have none."""
    return (
        manifest.groups is not None
        or bool(manifest.roots)
        or any(is_optimizers(entry.slot) for own in manifest.each for entry in own.entries.values())
        or has_groups(manifest.state.get("client_state"), depth=3)
    )


def stand_in(lost: str, paths: Iterable[str]) -> str | None:
    """The file of the same role and of the next rank, among those of a checkpoint of any format."""
    return nearest(ALL_ROLES, lost, paths)


def needs_of(manifest: Manifest) -> list[needs.Need]:
    """What the program that goes on from these files needs; none goes on from a neutral format."""
    format = formats.of(manifest)
    return [] if format is None or format.is_neutral else needs.of_program(manifest)


def of_engine(manifest: Manifest) -> list[Row]:
    """The rows of the engine's own files."""
    format = formats.of(manifest)
    roles = () if format is None else format.roles
    read = manifest.files.fingerprints
    return [
        _row(roles, _below(path, manifest.root), path, read[path].size if path in read else None)
        for path in manifest.files.paths
    ]


def _below(path: str, root: str) -> str:
    return os.path.basename(path) if path == root else os.path.relpath(path, root)


def _row(roles: Iterable[Role], name: str, path: str, size: int | None, state: State = "ok") -> Row:
    return _row_of(known(roles, name), name, path, size, state)


def _row_of(own: Known | None, name: str, path: str, size: int | None, state: State) -> Row:
    return Row(own.role.name if own else OTHER, name, path, own.rank if own else (), state, size)


# -- of a checkpoint that cannot be read


def of_folder(folder: str, wrong: Mapping[str, State]) -> list[Row]:
    """The rows of what lies in a folder, or of one file, and of files that are missing there.

    Names say what they are; `wrong` are the states of files by path, as an error says them.
    """
    engines = list[Role]()
    with suppress(ZckptError, OSError):
        engines += formats.recognize(folder).roles
    roles = (*engines, *needs.ROLES, *(() if engines else ALL_ROLES))
    sizes: dict[str, int | None] = dict.fromkeys(wrong)
    with suppress(OSError):  # of a folder that this user may not list
        for path in files_below(folder):
            with suppress(FileNotFoundError):  # it has gone meanwhile
                sizes[path] = os.path.getsize(path)
    return [
        _row(roles, _below(path, folder), path, size, wrong.get(path, "ok" if size else "empty"))
        for path, size in sizes.items()
    ]


def states_in(error: ZckptError | OSError) -> dict[str, State]:
    """The states of the files that an error names, by path."""
    if isinstance(error, IncompleteCheckpoint) and error.paths:
        return dict.fromkeys(error.paths, "missing")
    files = {os.fspath(error.filename): ""} if isinstance(error, OSError) and error.filename else {}
    if isinstance(error, ZckptError):
        files = {each.file: each.code for each in error.notices if each.file is not None}
    is_wrong = isinstance(error, (OSError, CorruptCheckpoint, IncompleteCheckpoint))
    states = {
        path: STATES.get(code, "unreadable")
        for path, code in files.items()
        if is_wrong or code in STATES
    }
    return {path: state for path, state in states.items() if not os.path.isdir(path)}


def files_below(path: str) -> Iterator[str]:
    """The files below a path, as far as they are looked at."""
    if not os.path.isdir(path):
        yield path
        return
    files = (entry.path for entry in sources.walk(path) if entry.is_file())
    yield from islice(files, MOST_FILES)


# -- files beside the engine's


def _beside(manifest: Manifest, required: Mapping[str, needs.Need]) -> Iterable[Row]:
    """Files beside the engine's; one that this user may not open is asked only if it is needed.

    A file without a role may have another form than its ending says.
    """
    read = {role for role, need in required.items() if need.damaged in needs.LOST}
    files = manifest.files
    for item in chain(files.siblings, files.around, files.omitted_files):
        own = _known(item.name)
        is_asked = own is not None and (own.role.name in read or not sources.is_denied(item.path))
        state: State = "ok"
        if is_asked:
            state = state_of(item)
            if (state, item.name) == ("ok", STATE) and counter(os.path.dirname(item.path)) is None:
                state = "unreadable"  # JSON, and not the Trainer's
        yield _row_of(own, item.name, item.path, item.size, state)


def roles_beside(folder: str) -> set[str]:
    """The roles of the files in a folder that are a program's, by their names alone."""
    is_listed = sources.is_folder(folder) and not sources.is_denied(folder)
    names = os.listdir(folder) if is_listed else ()
    return {own.role.name for name in names if (own := _known(name)) is not None}


def _known(name: str) -> Known | None:
    """What the name says of a program's file; there may be 50,000 others."""
    return known(needs.ROLES, name) if "/" in name or _NAMES.fullmatch(name) else None


def folder_of(manifest: Manifest) -> str:
    """The folder in which a program's files lie; that of the engine's if there are none."""
    own = (item.path for item in manifest.files.siblings if os.sep not in item.name)
    return os.path.dirname(next(own, os.path.join(manifest.root, "")))
