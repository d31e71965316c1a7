"""Read a universal checkpoint: its manifest as a `Manifest`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from math import prod
from typing import Any

from ...core.dtypes import SIZES
from ...core.inert import from_json
from ...core.manifest import (
    Entry,
    Extent,
    Fragment,
    Fragments,
    Manifest,
    Record,
    Runs,
    Sibling,
    Sighting,
    parameters_from_json,
    solid,
)
from ...core.staging import Layout
from ...errors import CorruptCheckpoint, NotACheckpoint, UnsupportedCheckpoint
from ...files import safefile
from ...training.options import Options
from ...training.trainers import LOADED
from .files import MANIFEST, SIBLINGS, VERSION, detect

__all__ = ["detect", "lay_out", "read", "seal"]


def read(path: str, tag: str | None = None, step_policy: str | None = None) -> Manifest:
    """A universal checkpoint; `tag` and `step_policy` have no meaning here.

    Raises UnsupportedCheckpoint (a version this zckpt does not know) and CorruptCheckpoint.
    """
    name = os.path.join(path, MANIFEST)
    if not os.path.isfile(name):
        raise NotACheckpoint(f"{path} holds no {MANIFEST}")
    with open(name, "rb") as file:
        text = file.read()
    try:
        made = json.loads(text.decode("utf-8", "surrogatepass"))
        version = made["zckpt"]
        if version != VERSION:
            raise UnsupportedCheckpoint(
                f"{name} is of version {version!r}, this zckpt knows {VERSION}",
                hint="install a newer zckpt",
            )
        return _manifest(path, made)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{name} is malformed: {error!r}") from error


def _manifest(path: str, made: Mapping[str, Any]) -> Manifest:
    _check_source(path, made)
    stored, files = _stored(path, made.get("files") or ())
    entries = {}
    for name, item in made["entries"].items():
        shape = tuple(item["shape"])
        if "fragments" in item:
            fragments: Fragments = _listed(path, name, item)
        elif name in stored:
            found = stored[name]
            if (found.dtype, found.shape) != (item["dtype"], shape):
                raise CorruptCheckpoint(
                    f"{found.extent.file} holds {name} as {found.dtype} {list(found.shape)}, the "
                    f"manifest says {item['dtype']} {list(shape)}"
                )
            numel = found.extent.length // SIZES[found.dtype]
            fragments = solid(numel, found.extent)
        else:
            raise CorruptCheckpoint(
                f"{path} lacks {name}, which its manifest lists",
                hint="a file of the checkpoint is missing",
            )
        digest = int(item["crc32"], 16) if "crc32" in item else None
        entries[name] = Entry(name, item["dtype"], shape, fragments, digest)
    records = []
    for name, stated in made.get("files", {}).items():
        full = _inside(path, name)
        if not os.path.isfile(full) or os.path.getsize(full) != stated["size"]:
            raise CorruptCheckpoint(
                f"{full} does not have the {stated['size']} bytes that the manifest states",
                hint="the file is missing or was cut short",
            )
        if "crc32" in stated:
            records.append(Record(Extent(full, 0, stated["size"]), int(stated["crc32"], 16)))
    state = from_json(made["state"])
    tuples = set(made.get("tuples", ()))
    groups = made["groups"]
    return Manifest(
        root=path,
        format="universal",
        source=made["source"],
        entries=entries,
        parameters=parameters_from_json(made["parameters"]),
        buffers=tuple(made["buffers"]),
        groups=None
        if groups is None
        else tuple(
            {
                key: tuple(from_json(value))
                if key in tuples and isinstance(value, list)
                else from_json(value)
                for key, value in group.items()
            }
            for group in groups
        ),
        optimizer=made.get("optimizer"),
        state=state,
        steps=tuple(
            Sighting(line["where"], line["step"], line["truth"]) for line in made.get("steps", ())
        ),
        records=tuple(records),
        files=(os.path.join(path, MANIFEST), *files),
        siblings=_siblings(path),
        left_out=tuple(made.get("left_out", ())),
        warnings=tuple(made.get("warnings", ())),
        inferred=tuple(made.get("inferred", ())),
    )


def _check_source(path: str, made: Mapping[str, Any]) -> None:
    """What names of folders and numbers of ranks are made of."""
    source = made["source"]
    dp, stage, tag = (source.get(key) for key in ("dp", "zero_stage", "tag"))
    groups = made["groups"]
    count = len(groups) if groups is not None else None
    members = [item["group"] for item in made["parameters"].values()]
    fine = (
        (dp is None or (type(dp) is int and dp > 0))
        and stage in (None, 0, 1, 2, 3)
        and (tag is None or (isinstance(tag, str) and not re.search(r"[/\\\0]|^\.*$", tag)))
        and all(
            group is None
            or (type(group) is int and group >= 0 and (count is None or group < count))
            for group in members
        )
    )
    if not fine:
        raise CorruptCheckpoint(
            f"{os.path.join(path, MANIFEST)} states a dp, stage, tag or group that none can be"
        )


def _stored(path: str, listed: Collection[str]) -> tuple[dict[str, safefile.Stored], list[str]]:
    """Every tensor of every listed safetensors file by entry name, and the files.

    A manifest that is being written lists none yet; then all are meant.
    """
    found: dict[str, safefile.Stored] = {}
    files = []
    for name in sorted(os.listdir(path)):
        if not name.endswith(".safetensors") or (listed and name not in listed):
            continue
        full = os.path.join(path, name)
        files.append(full)
        stem = name.removesuffix(".safetensors").split("-")[0]
        slot = "param" if stem == "model" else stem
        for stored in safefile.read(full):
            found[f"{stored.name}/{slot}"] = stored
    return found, files


def _listed(path: str, name: str, entry: Mapping[str, Any]) -> Runs:
    """Fragments as the manifest lists them; raises unless they cover the tensor once."""
    found, here, size = [], 0, SIZES[entry["dtype"]]
    for item in sorted(entry["fragments"], key=lambda item: item["start"]):
        start, stop = item["start"], item["stop"]
        extent = Extent(_inside(path, item["file"]), item["offset"], item["length"])
        room = os.path.getsize(extent.file) if os.path.isfile(extent.file) else -1
        if start != here or extent.offset < 0 or extent.length != (stop - start) * size:
            break
        if extent.offset + extent.length > room:
            break
        found.append(Fragment(start, stop, extent))
        here = stop
    if here != prod(entry["shape"]) or len(found) != len(entry["fragments"]):
        raise CorruptCheckpoint(f"{path}: the fragments of {name} do not cover it once")
    return Runs(found)


def _inside(path: str, name: str) -> str:
    """The full name of a file of the checkpoint; raises CorruptCheckpoint if it is elsewhere."""
    if os.path.isabs(name) or ".." in name.split("/") or "\0" in name:
        raise CorruptCheckpoint(f"{path}: the manifest names a file outside: {name!r}")
    return os.path.join(path, name)


def _siblings(path: str) -> tuple[Sibling, ...]:
    root = os.path.join(path, SIBLINGS)
    found = []
    for folder, folders, names in os.walk(root):
        folders.sort()
        for name in sorted(names):
            full = os.path.join(folder, name)
            found.append(Sibling(os.path.relpath(full, root), full, os.path.getsize(full)))
    if not found:  # weights alone have them beside them
        with os.scandir(path) as items:
            names = sorted(item.name for item in items if LOADED.fullmatch(item.name))
        full_names = [(name, os.path.join(path, name)) for name in names]
        found = [Sibling(name, full, os.path.getsize(full)) for name, full in full_names]
    return tuple(found)


def lay_out(source: Manifest, options: Options) -> Layout:
    """See write.py; `formats.TABLE` names this module."""
    from . import write

    return write.lay_out(source, options)


def seal(root: str, manifest: Manifest, outcome: Any) -> None:
    """See write.py; `formats.TABLE` names this module."""
    from . import write

    write.seal(root, manifest, outcome)
