"""Which files has a checkpoint, what is each for, and in which state is it?

The engine's files are told by its format's table of roles, and those beside them by that of the
trainers' programs. The engine's were opened by their reader, which raises for what is wrong; those
of a program are looked at here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import chain
from typing import Any

from .. import formats
from ..core.inventory import Role, Row, role_of
from ..core.manifest import Manifest
from ..core.weights import is_optimizers
from ..training import needs
from ..training.trainers import without_folder
from .file_state import state_of

ENGINE = "engine"
"""The role of an engine's file whose name says nothing more."""


def inventory(manifest: Manifest) -> list[Row]:
    """The rows of a checkpoint that was read: the engine's files, then those beside them.

    Small files beside them are read, and the ends of large ones. What a program needs and is not
    there has a row of its own, unless there are weights alone.
    """
    rows = [*of_engine(manifest), *_beside(manifest)]
    there = {row.role for row in rows}
    required = needs_of(manifest) if has_optimizer(manifest) else []
    lost = (need for need in required if need.missing in needs.LOST)
    return rows + [_missing(manifest, need) for need in lost if need.role.name not in there]


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


def needs_of(manifest: Manifest) -> list[needs.Need]:
    """What the program that goes on from these files needs; none goes on from a neutral format."""
    return [] if formats.named(manifest.format).is_neutral else needs.of_program(manifest)


def of_engine(manifest: Manifest) -> list[Row]:
    """The rows of the engine's own files."""
    roles = formats.named(manifest.format).roles
    return [
        row_of(roles, path, os.path.relpath(path, manifest.root), size=_size(manifest, path))
        for path in manifest.files
    ]


def row_of(roles: Iterable[Role], path: str, name: str, size: int | None = None) -> Row:
    """The row of an engine's file, by its name below the checkpoint."""
    known = role_of(roles, name.replace(os.sep, "/"))
    role, rank = (ENGINE, ()) if known is None else (known[0].name, known[1])
    return Row(role, name, path, rank, size)


def _size(manifest: Manifest, path: str) -> int | None:
    own = manifest.fingerprints.get(path)
    return None if own is None else own.size


def _beside(manifest: Manifest) -> Iterable[Row]:
    for item in chain(manifest.siblings, manifest.omitted_files):
        known = role_of(needs.ROLES, without_folder(item.name))
        role, rank = (needs.OTHER, ()) if known is None else (known[0].name, known[1])
        yield Row(role, item.name, item.path, rank, item.size, state_of(item))


def _missing(manifest: Manifest, need: needs.Need) -> Row:
    path = os.path.join(folder_of(manifest), need.name)
    return Row(need.role.name, need.name, path, state="missing")


def folder_of(manifest: Manifest) -> str:
    """The folder in which a program's files lie; that of the engine's if there are none."""
    own = (item.path for item in manifest.siblings if os.sep not in item.name)
    return os.path.dirname(next(own, os.path.join(manifest.root, "")))
