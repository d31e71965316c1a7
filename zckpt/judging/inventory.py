"""Lists the files of a checkpoint, the purpose of each, and its state.

The engine's files are recognized by its format's table of roles, those beside them by the table of
the trainers' programs. The engine's reader has opened the engine's files, and raises for problems.
A program's files are examined here. If that reader has failed, the list is made from names and its
error.
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
"""The role of a file whose name matches no other role."""
MOST_FILES = 20_000
"""The most files of a damaged checkpoint that are examined."""
ALL_ROLES = tuple(role for format in formats.FORMATS for role in format.roles)
_NAMES = any_of(needs.ROLES)
STATES: Mapping[str, State] = {
    "file-cut-short": "cut",
    "mixed-saves": "foreign",
    "swapped-files": "foreign",
    "file-copied-over": "foreign",
    "world-size-disagrees": "unexpected",
}
"""Maps the code of a problem to the state of its file; any other damage is `unreadable`."""


def inventory(manifest: Manifest, required: Mapping[str, needs.Need]) -> list[Row]:
    """The rows of a checkpoint that was read: the engine's files, then those beside them.

    `required` maps roles to what the program needs. Of the files beside the engine's, small ones
    are read completely, and large ones at both ends; files behind links out of the folder are not
    read. A needed file that is missing has a row, unless the checkpoint has only weights.
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
    """Whether the files have any state of an optimizer, even without names of parameters."""
    return (
        manifest.groups is not None
        or bool(manifest.roots)
        or any(is_optimizers(entry.slot) for own in manifest.each for entry in own.entries.values())
        or has_groups(manifest.state.get("client_state"), depth=3)
    )


def stand_in(lost: str, paths: Iterable[str]) -> str | None:
    """The file with the lost file's role and the nearest rank, in any format; None without one."""
    return nearest(ALL_ROLES, lost, paths)


def needs_of(manifest: Manifest) -> list[needs.Need]:
    """The files that the checkpoint's program needs to resume.

    Empty for a neutral format, because no program resumes from it.
    """
    format = formats.of(manifest)
    return [] if format is None or format.is_neutral else needs.of_program(manifest)


def of_engine(manifest: Manifest) -> list[Row]:
    """The rows of the engine's own files."""
    format = formats.of(manifest)
    roles = () if format is None else format.roles
    fingerprints = manifest.files.fingerprints
    return [
        _row(
            roles,
            _below(path, manifest.root),
            path,
            fingerprints[path].size if path in fingerprints else None,
        )
        for path in manifest.files.paths
    ]


def _below(path: str, root: str) -> str:
    return os.path.basename(path) if path == root else os.path.relpath(path, root)


def _row(roles: Iterable[Role], name: str, path: str, size: int | None, state: State = "ok") -> Row:
    return _row_of(known(roles, name), name, path, size, state)


def _row_of(own: Known | None, name: str, path: str, size: int | None, state: State) -> Row:
    return Row(own.role.name if own else OTHER, name, path, own.rank if own else (), state, size)


# a checkpoint that cannot be read


def of_folder(folder: str, wrong: Mapping[str, State]) -> list[Row]:
    """The rows of the files in a folder, or of one file, for a checkpoint that could not be read.

    The names of files show their roles. `wrong` has the states of files by path, as an error
    reports them; it may name files that are missing.
    """
    engines = list[Role]()
    with suppress(ZckptError, OSError):
        engines += formats.recognize(folder).roles
    roles = (*engines, *needs.ROLES, *(() if engines else ALL_ROLES))
    sizes: dict[str, int | None] = dict.fromkeys(wrong)
    with suppress(OSError):  # this user may not list the folder
        for path in files_below(folder):
            with suppress(FileNotFoundError):  # it was removed meanwhile
                sizes[path] = os.path.getsize(path)
    return [
        _row(roles, _below(path, folder), path, size, wrong.get(path, "ok" if size else "empty"))
        for path, size in sizes.items()
    ]


def states_in(error: ZckptError | OSError) -> dict[str, State]:
    """Maps the paths of the files that an error names to their states, such as `missing`.

    Folders are left out, and files that the error does not call wrong.
    """
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
    """The files below a path, up to MOST_FILES."""
    if not os.path.isdir(path):
        yield path
        return
    files = (entry.path for entry in sources.walk(path) if entry.is_file())
    yield from islice(files, MOST_FILES)


# -- files beside the engine's


def _beside(manifest: Manifest, required: Mapping[str, needs.Need]) -> Iterable[Row]:
    """Yields the rows of files beside the engine's, with the state of each as its bytes show it.

    A file that this user may not open is examined only if resuming needs it. A file without a role
    counts as `ok` without being examined, since its ending may not tell what it contains.
    """
    roles_read = {role for role, need in required.items() if need.damaged in needs.LOST}
    files = manifest.files
    for item in chain(files.siblings, files.around, files.omitted_files):
        known_role = _known(item.name)
        is_asked = known_role is not None and (
            known_role.role.name in roles_read or not sources.is_denied(item.path)
        )
        state: State = "ok"
        if is_asked:
            state = state_of(item)
            if (state, item.name) == ("ok", STATE) and counter(os.path.dirname(item.path)) is None:
                state = "unreadable"  # it is JSON, but not of the Trainer
        yield _row_of(known_role, item.name, item.path, item.size, state)


def roles_beside(folder: str) -> set[str]:
    """The roles of a program's files in a folder, by their names alone."""
    is_listed = sources.is_folder(folder) and not sources.is_denied(folder)
    names = os.listdir(folder) if is_listed else ()
    return {file_role.role.name for name in names if (file_role := _known(name)) is not None}


def _known(name: str) -> Known | None:
    """Parses the name of a program's file; None for other names, of which there may be 50,000."""
    return known(needs.ROLES, name) if "/" in name or _NAMES.fullmatch(name) else None


def folder_of(manifest: Manifest) -> str:
    """The folder in which the trainer's own files lie; the root if there are none.

    Files in its subfolders are not considered.
    """
    paths = (item.path for item in manifest.files.siblings if os.sep not in item.name)
    return os.path.dirname(next(paths, os.path.join(manifest.root, "")))
