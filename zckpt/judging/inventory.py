"""Lists the files of a checkpoint, the purpose of each, and its state.

A file's purpose (its role) follows from its name: for the engine's files by a table of the format,
for other files by a table of the trainers' programs. The format's reader has already checked the
engine's files; files of trainers are checked here. If the reader has failed, the list is made from
the names of the files and the reader's error.
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
from ..core.storage.inventory import ParsedName, Role, Row, State, any_of, nearest, parse_name
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
    """Lists the files of a checkpoint: first the engine's files, then the files beside them.

    `required` maps roles, such as `scheduler`, to files that the program needs. A missing one is
    listed too, unless the checkpoint has only weights. Known files beside the engine's are opened,
    to find damage.
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
    """Whether the files contain an optimizer's state, even if no names of parameters are known."""
    return (
        manifest.groups is not None
        or bool(manifest.roots)
        or any(
            is_optimizers(entry.slot)
            for rank_manifest in manifest.rank_manifests
            for entry in rank_manifest.entries.values()
        )
        or has_groups(manifest.state.get("client_state"), depth=3)
    )


def stand_in(lost: str, paths: Iterable[str]) -> str | None:
    """Finds a file that can replace a lost one: of the same kind, of the nearest rank; or None."""
    return nearest(ALL_ROLES, lost, paths)


def needs_of(manifest: Manifest) -> list[needs.Need]:
    """The files that the checkpoint's program needs to resume.

    The list is empty for a format such as universal, from which no program resumes.
    """
    format = formats.of(manifest)
    return [] if format is None or format.is_neutral else needs.of_program(manifest)


def of_engine(manifest: Manifest) -> list[Row]:
    """Lists the engine's own files, each with its purpose, rank and state."""
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
    return _row_of(parse_name(roles, name), name, path, size, state)


def _row_of(own: ParsedName | None, name: str, path: str, size: int | None, state: State) -> Row:
    return Row(own.role.name if own else OTHER, name, path, own.rank if own else (), state, size)


# a checkpoint that cannot be read


def of_folder(folder: str, wrong: Mapping[str, State]) -> list[Row]:
    """Lists the files in a folder, or one file, of a checkpoint that could not be read.

    The names of files show their purposes. `wrong` maps paths to the states that an error reports,
    such as `missing`; missing files are listed too.
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

    Folders are left out, and so are files that the error mentions but does not call wrong.
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
    """Yields the paths of at most MOST_FILES files below a folder, or the path of one file."""
    if not os.path.isdir(path):
        yield path
        return
    files = (entry.path for entry in sources.walk(path) if entry.is_file())
    yield from islice(files, MOST_FILES)


# -- files beside the engine's


def _beside(manifest: Manifest, required: Mapping[str, needs.Need]) -> Iterable[Row]:
    """Lists the files beside the engine's, with the state that their bytes show.

    A file that this user may not open is examined only if resuming needs it. A file of unknown
    purpose counts as `ok` and is not examined, because its content is unknown.
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
    """The purposes of a trainer's files in a folder, such as `scheduler`, by their names alone."""
    is_listed = sources.is_folder(folder) and not sources.is_denied(folder)
    names = os.listdir(folder) if is_listed else ()
    return {file_role.role.name for name in names if (file_role := _known(name)) is not None}


def _known(name: str) -> ParsedName | None:
    """Parses the name of a trainer's file to its purpose and rank; None for any other name.

    This is fast for other names, because a folder may have 50,000 of them.
    """
    return parse_name(needs.ROLES, name) if "/" in name or _NAMES.fullmatch(name) else None


def folder_of(manifest: Manifest) -> str:
    """The folder with the trainer's own files, or the checkpoint's root if there are none.

    Files in subfolders are not considered.
    """
    paths = (item.path for item in manifest.files.siblings if os.sep not in item.name)
    return os.path.dirname(next(paths, os.path.join(manifest.root, "")))
