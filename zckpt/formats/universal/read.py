"""Read a universal checkpoint: manifest.json, and where the safetensors files hold each tensor."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from math import prod
from typing import Any

from ...core import sources
from ...core.dtypes import SIZES
from ...core.expected import path_inside
from ...core.facts import facts_of
from ...core.fragments import Extent, Fragment, Fragments, Record, Runs, solid
from ...core.inert import from_json
from ...core.manifest import Entry, Manifest, Sighting, parameters_from_json
from ...core.siblings import SiblingList, leads_out
from ...errors import CorruptCheckpoint, IncompleteCheckpoint, UnsupportedCheckpoint
from ...files import safefile
from ...training.trainers import LOADED
from .agreement import checksum, contradictions
from .files import MANIFEST, SIBLINGS, VERSION


def read(path: str, tag: str | None = None, step_policy: str | None = None) -> Manifest:
    """The manifest of a universal checkpoint; `tag` and `step_policy` are not used.

    Raises IncompleteCheckpoint (no manifest), UnsupportedCheckpoint (a newer version) and
    CorruptCheckpoint (a manifest that is damaged or contradicts itself).
    """
    name = os.path.join(path, MANIFEST)
    if not sources.is_file(name):
        raise IncompleteCheckpoint(
            f"{path} lacks {MANIFEST}, which says what its tensors are",
            hint="copy it from where the other files came from",
        )
    with sources.opened(name) as file:
        text = file.read()
    try:
        document = json.loads(text.decode("utf-8", "surrogatepass"))
        version = document["zckpt"]
        if version != VERSION:
            raise UnsupportedCheckpoint(
                f"{name} has version {version!r}; this zckpt reads version {VERSION}",
                hint="install a newer zckpt",
            )
        manifest = _manifest(path, document)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{name} is malformed: {error!r}") from error
    for sentence in contradictions(manifest):
        raise CorruptCheckpoint(
            f"{name} contradicts itself: {sentence}",
            hint="it was changed after zckpt wrote it; convert again",
        )
    return manifest


def _manifest(path: str, document: Mapping[str, Any]) -> Manifest:
    warnings = list(document.get("warnings", ()))
    if "crc32" not in document:
        warnings.append(
            f"{MANIFEST} has no checksum (zckpt 0.1 wrote none): damage to it may go unseen"
        )
    elif document["crc32"] != checksum(document):
        raise CorruptCheckpoint(
            f"{os.path.join(path, MANIFEST)} is damaged: its contents do not have the CRC-32 that "
            "it states",
            hint="copy it again, or convert again",
        )
    _check_source(path, document)
    stored, files = _stored(path, document.get("files") or ())
    entries = {}
    for name, item in document["entries"].items():
        shape = tuple(item["shape"])
        if "fragments" in item:
            fragments: Fragments = _listed(path, name, item)
        elif name in stored:
            tensor = stored[name]
            if (tensor.dtype, tensor.shape) != (item["dtype"], shape):
                raise CorruptCheckpoint(
                    f"{tensor.extent.file} holds {name} as {tensor.dtype} {list(tensor.shape)}, "
                    f"the manifest states {item['dtype']} {list(shape)}"
                )
            numel = tensor.extent.length // SIZES[tensor.dtype]
            fragments = solid(numel, tensor.extent)
        else:
            raise CorruptCheckpoint(
                f"{path} lacks {name}, which its manifest lists",
                hint="a file of the checkpoint is missing",
            )
        digest = int(item["crc32"], 16) if "crc32" in item else None
        entries[name] = Entry(name, item["dtype"], shape, fragments, digest)
    records = []
    for name, stated in document.get("files", {}).items():
        full = path_inside(path, name, MANIFEST)
        if not sources.is_file(full) or sources.size(full) != stated["size"]:
            raise CorruptCheckpoint(
                f"{full} does not have the {stated['size']} bytes that the manifest states",
                hint="the file is missing or was cut short",
            )
        if "crc32" in stated:
            records.append(Record(Extent(full, 0, stated["size"]), int(stated["crc32"], 16)))
    state, engine, step_place = facts_of(from_json(document["state"]))
    tuples = set(document.get("tuples", ()))
    groups = document["groups"]
    siblings = _siblings(path)
    return Manifest(
        root=path,
        format="universal",
        source=document["source"],
        entries=entries,
        parameters=parameters_from_json(document["parameters"]),
        buffers=tuple(document["buffers"]),
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
        optimizer=document.get("optimizer"),
        engine=engine,
        step_place=step_place,
        state=state,
        steps=tuple(
            Sighting(line["where"], line["step"], line["truth"])
            for line in document.get("steps", ())
        ),
        records=tuple(records),
        files=(os.path.join(path, MANIFEST), *files),
        siblings=tuple(siblings.files),
        left_out=(*document.get("left_out", ()), *siblings.left_out),
        warnings=tuple(warnings),
        inferred=tuple(document.get("inferred", ())),
    )


def _check_source(path: str, document: Mapping[str, Any]) -> None:
    """Raises CorruptCheckpoint for values that names of folders and ranks cannot be built from."""
    source = document["source"]
    dp, stage, tag = (source.get(key) for key in ("dp", "zero_stage", "tag"))
    groups = document["groups"]
    count = len(groups) if groups is not None else None
    members = [item["group"] for item in document["parameters"].values()]
    valid = (
        (dp is None or (type(dp) is int and dp > 0))
        and stage in (None, 0, 1, 2, 3)
        and (tag is None or (isinstance(tag, str) and not re.search(r"[/\\\0]|^\.*$", tag)))
        and all(
            group is None
            or (type(group) is int and group >= 0 and (count is None or group < count))
            for group in members
        )
    )
    if not valid:
        raise CorruptCheckpoint(
            f"{os.path.join(path, MANIFEST)} states a dp, stage, tag or group that is not possible"
        )


def _stored(path: str, listed: Collection[str]) -> tuple[dict[str, safefile.Stored], list[str]]:
    """Every tensor of every listed safetensors file by entry name, and the files.

    A manifest that is being written lists no files yet; then all files are read.
    """
    tensors: dict[str, safefile.Stored] = {}
    files = []
    for name in sorted(os.listdir(path)):
        if not name.endswith(".safetensors") or (listed and name not in listed):
            continue
        full = os.path.join(path, name)
        files.append(full)
        stem = name.removesuffix(".safetensors").split("-")[0]
        slot = "param" if stem == "model" else stem
        for stored in safefile.read(full):
            tensors[f"{stored.name}/{slot}"] = stored
    return tensors, files


def _listed(path: str, name: str, entry: Mapping[str, Any]) -> Runs:
    """Fragments as the manifest lists them; raises unless they cover the tensor exactly once."""
    fragments, end, size = [], 0, SIZES[entry["dtype"]]
    for item in sorted(entry["fragments"], key=lambda item: item["start"]):
        start, stop = item["start"], item["stop"]
        extent = Extent(path_inside(path, item["file"], MANIFEST), item["offset"], item["length"])
        room = sources.size(extent.file) if sources.is_file(extent.file) else -1
        if start != end or extent.offset < 0 or extent.length != (stop - start) * size:
            break
        if extent.offset + extent.length > room:
            break
        fragments.append(Fragment(start, stop, extent))
        end = stop
    if end != prod(entry["shape"]) or len(fragments) != len(entry["fragments"]):
        raise CorruptCheckpoint(f"{path}: the fragments of {name} do not cover it exactly once")
    return Runs(fragments)


def _siblings(path: str) -> SiblingList:
    root = os.path.join(path, SIBLINGS)
    siblings = SiblingList(path)
    if sources.is_folder(root):
        if leads_out(root, path):
            siblings.add(SIBLINGS, root)
        else:
            siblings.add_below(root)
    if not siblings.files:  # beside weights that were written alone
        for name in sorted(filter(LOADED.fullmatch, os.listdir(path))):
            siblings.add(name, os.path.join(path, name))
    return siblings
