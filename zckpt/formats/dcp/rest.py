"""The file `meta.pt` beside .distcp files, which contains everything outside the state dicts.

Lightning and Fabric store loops, callbacks and other state there, and read it from nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from ...core.checkpoint.inert import TensorName, map_values
from ...core.checkpoint.manifest import Manifest
from ...core.passes.layout import Shell
from ...core.storage import sources
from ...core.storage.folder import Folder
from ...errors import note
from ...files.torchfile import TorchFile, is_torch
from ...files.torchshell import Storages, seal_records, shell, thawed
from ...training import lightning
from ...training.options import DIALECT, Options
from ..statedict.tree import SavedTree, leaves
from ..statedict.write import StateDicts


def rest_of(folder: str) -> str | None:
    """The path of the file `meta.pt` in a folder; None if there is no such file."""
    path = os.path.join(folder, lightning.META)
    return path if sources.is_file(path) and is_torch(path) else None


def read_rest(folder: str, saved: SavedTree) -> list[str]:
    """Adds the values in `meta.pt` to the checkpoint's tree of state dicts.

    Returns a list with the file's path, or an empty list without the file.
    """
    path = rest_of(folder)
    file = TorchFile(path) if path is not None else None
    if file is None or not isinstance(file.value, dict):
        return []
    name = os.path.basename(file.path)
    names = saved.facts.get(None, {}).get("names", {})
    values = leaves(file, file.value, iter(names.get(name, ())))
    saved.omitted += [
        note(
            "state-omitted",
            f"{name}: {key}, because the other files have this key too",
            subject=str(key),
            file=file.path,
        )
        for key in values
        if key in saved.tree
    ]
    saved.tree = {**values, **saved.tree}
    saved.files.records += file.records.values()
    saved.files.paths.append(file.path)
    saved.layout.file = name
    return [file.path]


def rest_for(source: Manifest, options: Options, dicts: StateDicts) -> str | None:
    """Returns "meta.pt" if the target needs this file; else None.

    Lightning and Fabric read it, so it is needed if they saved the source. If Lightning saved the
    source in another format, `dicts` gets the keys that Lightning uses with .distcp files.
    """
    keys = dicts.keys
    if options[DIALECT] is not None or options.weights_only:
        return None
    if keys.file is not None and not keys.whole:
        return keys.file
    if not lightning.is_in(source) or source.format == "dcp":
        return None
    keys_of_lightning = lightning.SHARDED.numbered_as(keys.optimizer)
    dicts.model, dicts.optimizer = keys_of_lightning.model, keys_of_lightning.optimizer
    return keys_of_lightning.file


def rest_shell(name: str, source: Manifest, dicts: StateDicts) -> Shell:
    """Lays out the target's `meta.pt`, without its tensors' bytes."""
    storages = Storages()
    return shell(name, thawed(rest_values(source, dicts), source.entries, storages), storages)


def rest_values(source: Manifest, dicts: StateDicts) -> dict[Any, Any]:
    """The content of the target's `meta.pt`: the program's own state and the scheduler's state."""
    scheduler = source.state.get("lr_scheduler")
    return {
        **({} if scheduler is None else {dicts.scheduler: scheduler}),
        **(source.state.get("client_state") or {}),
    }


def tensor_names(value: Any) -> Iterator[str]:
    """Yields the names that a nested value's tensors have in the manifest, in the value's order."""
    if isinstance(value, TensorName):
        yield value.name
    names: list[str] = []
    map_values(value, lambda item, _: names.extend(tensor_names(item)))
    yield from names


def seal_rest(root: Folder, manifest: Manifest, outcome: Any) -> None:
    """Writes the CRC-32 of every zip member into the target's `meta.pt`.

    `outcome` has the checksums that were computed while the bytes were copied.
    """
    path = rest_of(root.path)
    records = tuple(each for each in manifest.files.records if each.extent.file == path)
    seal_records(root, manifest.replace(records=records), outcome)
