"""Which files has a checkpoint, what is each for, and in which state is it?

The engine's files are told by its format's table of roles, and those beside them by that of the
trainers' programs. The engine's were opened by their reader, which raises for what is wrong; those
of a program are looked at here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from .. import formats
from ..core import sources
from ..core.inventory import Role, Row, State, known, nearest
from ..core.manifest import Manifest
from ..core.weights import is_optimizers
from ..training import needs
from ..training.trainers import STATE, counter
from .file_state import state_of

OTHER = "other"
"""The role of a file whose name says nothing."""


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
        or _has_groups(manifest.state.get("client_state"))
    )


def _has_groups(value: Any, depth: int = 3) -> bool:
    if not isinstance(value, dict) or not depth:
        return False
    return "param_groups" in value or any(_has_groups(item, depth - 1) for item in value.values())


def stand_in(lost: str, paths: Iterable[str]) -> str | None:
    """The file of the same role and of the next rank, among those of a checkpoint of any format."""
    return nearest([role for format in formats.FORMATS for role in format.roles], lost, paths)


def needs_of(manifest: Manifest) -> list[needs.Need]:
    """What the program that goes on from these files needs; none goes on from a neutral format."""
    format = formats.of(manifest)
    return [] if format is None or format.is_neutral else needs.of_program(manifest)


def of_engine(manifest: Manifest) -> list[Row]:
    """The rows of the engine's own files."""
    format = formats.of(manifest)
    roles = () if format is None else format.roles
    return [_row(roles, os.path.relpath(path, manifest.root), path) for path in manifest.files]


def _row(roles: Iterable[Role], name: str, path: str, state: State = "ok") -> Row:
    own = known(roles, name)
    return Row(own.role.name if own else OTHER, name, path, own.rank if own else (), state)


def _beside(manifest: Manifest, required: Mapping[str, needs.Need]) -> Iterable[Row]:
    """Files beside the engine's; one that this user may not open is asked only if it is needed.

    A file without a role may have another form than its ending says.
    """
    read = {role for role, need in required.items() if need.damaged in needs.LOST}
    for item in chain(manifest.siblings, manifest.omitted_files):
        own = known(needs.ROLES, item.name)
        is_asked = own is not None and (own.role.name in read or not sources.is_denied(item.path))
        state: State = "ok"
        if is_asked:
            state = state_of(item)
            if (state, item.name) == ("ok", STATE) and counter(os.path.dirname(item.path)) is None:
                state = "unreadable"  # JSON, and not the Trainer's
        yield _row(needs.ROLES, item.name, item.path, state)


def roles_beside(folder: str) -> set[str]:
    """The roles of the files in a folder that are a program's, by their names alone."""
    is_listed = sources.is_folder(folder) and not sources.is_denied(folder)
    names = os.listdir(folder) if is_listed else ()
    return {own.role.name for name in names if (own := known(needs.ROLES, name)) is not None}


def folder_of(manifest: Manifest) -> str:
    """The folder in which a program's files lie; that of the engine's if there are none."""
    own = (item.path for item in manifest.siblings if os.sep not in item.name)
    return os.path.dirname(next(own, os.path.join(manifest.root, "")))
