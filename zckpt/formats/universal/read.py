"""zckpt's own format: plain safetensors files of whole tensors, and a manifest as JSON.

    OUT/manifest.json             everything that is no tensor (specified in the README)
    OUT/model.safetensors         slot `param`: what the module held, frozen weights, buffers
    OUT/master.safetensors        fp32 master weights
    OUT/exp_avg.safetensors ...   one per optimizer state
    OUT/state.safetensors         tensors inside the rest of the state
    OUT/siblings/                 other files of a trainer's directory

No pickle anywhere. Version 1; keys are only ever added.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ...core.checksum import crc32
from ...core.dtypes import FLOATS, SIZES
from ...core.fragments import Extent, Fragment, Fragments, Record, Runs, solid
from ...core.inert import from_json, plain_group, to_json
from ...core.manifest import (
    Entry,
    Manifest,
    Sibling,
    Sighting,
    parameters_from_json,
    parameters_to_json,
)
from ...core.staging import Layout, Shell
from ...errors import CorruptCheckpoint, MissingData, NotACheckpoint, UnsupportedCheckpoint
from ...files import safefile
from ...training.optimizers import are_inferred, given_groups
from ...training.options import Options
from ...training.trainers import LOADED, files_to_load_by

VERSION = 1
MANIFEST = "manifest.json"
SIBLINGS = "siblings"


def detect(path: str) -> list[str]:
    """One nameless checkpoint where `path` holds a manifest of ours."""
    name = os.path.join(path, MANIFEST)
    if not os.path.isfile(name):
        return []
    with open(name, "rb") as file:
        return [""] if b'"zckpt"' in file.read(4096) else []


# -- writing


def select(source: Manifest, options: Options) -> Manifest:
    """The manifest that is to be written: the source's, with the entries that options ask for."""
    entries: dict[str, Entry] = {}
    for entry in source.entries.values():
        if entry.slot == "param":
            entries[entry.name] = _weight(source, entry, options)
        elif not options.weights_only:
            entries[entry.name] = entry
        if entry.slot == "master" and (options.weights_only or options.module_dtype):
            name = f"{entry.parameter}/param"
            made = replace(entry, name=name, digest=None)
            entries.setdefault(name, _weight(source, made, options))
    if options.weights_only:
        if not entries:
            raise MissingData(f"{source.root} holds no weights")
        kept = ("engine", "module", "module_metadata", "module_extra")
        entries |= {
            name: entry
            for name, entry in source.entries.items()
            if entry.slot == "state" and name.startswith("module_extra.")
        }
        return replace(
            source,
            entries=entries,
            parameters={
                name: replace(held, step=None, scalars={})
                for name, held in source.parameters.items()
            },
            groups=None,
            state={key: value for key, value in source.state.items() if key in kept},
        )
    state = dict(source.state)
    if options.module_dtype and isinstance(state.get("engine"), dict):
        state["engine"] = {**state["engine"], "dtype": options.module_dtype}
    return replace(source, entries=entries, state=state)


def _weight(source: Manifest, entry: Entry, options: Options) -> Entry:
    """A weight in the dtype that is asked for; buffers keep theirs."""
    weight = entry.parameter in source.parameters and entry.dtype in FLOATS
    if not options.module_dtype or not weight or entry.dtype == options.module_dtype:
        return entry
    return replace(entry, dtype=options.module_dtype, digest=None)


def lay_out(source: Manifest, options: Options) -> Layout:
    """The files, without tensors and digests; `seal` adds these."""
    chosen = with_defaults(select(source, options), options)
    siblings = [(f"{SIBLINGS}/{item.name}", item) for item in source.siblings]
    left_out = list(source.left_out)
    if options.weights_only:
        loaded = files_to_load_by(source.siblings)  # beside the weights, as from_pretrained looks
        siblings = [(item.name, item) for item in loaded]
        kept = {item.path for item in loaded}
        others = [item.name for item in source.siblings if item.path not in kept]
        left_out += [f"{', '.join(others)}: not needed to load the weights"] if others else []
    shells = list(_shells(chosen, options))
    about = "weights as safetensors" if options.weights_only else "a universal checkpoint"
    return Layout(lambda: iter(shells), siblings, left_out, source.warnings, about=about)


def with_defaults(source: Manifest, options: Options) -> Manifest:
    """Hyper-parameters that the source never stored (elastic files, other engines)."""
    inferred = are_inferred(source)
    if not options.group_defaults or not (source.groups is None or inferred):
        return source
    parameters = {
        name: replace(held, group=(held.group or 0) if held.trainable else None)
        for name, held in source.parameters.items()
    }
    state = dict(source.state)
    if inferred:
        state["engine"] = {**state["engine"], "hyper_parameters": "given"}
    groups = tuple(given_groups(source, options))
    return replace(source, parameters=parameters, groups=groups, state=state)


def _shells(chosen: Manifest, options: Options) -> Iterator[Shell]:
    for name, entries in _files(chosen, options):
        tensors = [(entry.parameter, entry.dtype, entry.shape) for entry in entries]
        head, size = safefile.header(tensors)
        yield Shell(name, size, ((0, head),))
    weights = _split("model", _in_slot(chosen, "param"), options.file_size)
    if len(weights) > 1:
        text = _index(weights)
        yield Shell("model.safetensors.index.json", len(text), ((0, text),))
    text = _text(describe(chosen))
    yield Shell(MANIFEST, len(text), ((0, text),))


def seal(root: str, manifest: Manifest, outcome: Any) -> None:
    """Rewrites the manifest with the CRC-32 of every tensor and file."""
    entries = {
        name: replace(entry, digest=outcome.digests[name])
        for name, entry in manifest.entries.items()
    }
    made = describe(replace(manifest, entries=entries))
    files = dict(outcome.files)
    for path in manifest.files:
        if (
            path.endswith(".safetensors") and path not in files
        ):  # its tensors are empty, all of them
            with open(path, "rb") as file:
                text = file.read()
            files[path] = len(text), crc32(text)
    made["files"] = {
        os.path.relpath(path, root): {"size": size, "crc32": f"{crc:08x}"}
        for path, (size, crc) in sorted(files.items())
    }
    with open(os.path.join(root, MANIFEST), "wb") as file:
        file.write(_text(made))


def describe(manifest: Manifest) -> dict[str, Any]:
    """manifest.json as a dictionary."""
    groups = manifest.groups or ()
    tuples = {key for group in groups for key, value in group.items() if type(value) is tuple}
    return {
        "zckpt": VERSION,
        "source": manifest.source,
        "step": manifest.step,
        "optimizer": manifest.optimizer,
        "groups": None if manifest.groups is None else [plain_group(group) for group in groups],
        "tuples": sorted(tuples),  # hyper-parameters that were tuples, as betas
        "parameters": parameters_to_json(manifest.parameters),
        "buffers": list(manifest.buffers),
        "entries": {
            name: {"dtype": entry.dtype, "shape": list(entry.shape)}
            | ({} if entry.digest is None else {"crc32": f"{entry.digest:08x}"})
            for name, entry in manifest.entries.items()
        },
        "files": {},
        "steps": [
            {"where": line.where, "step": line.step, "truth": line.truth} for line in manifest.steps
        ],
        "left_out": list(manifest.left_out),
        "warnings": list(manifest.warnings),
        "inferred": list(manifest.inferred),
        "state": to_json(manifest.state),
    }


def _text(made: Mapping[str, Any]) -> bytes:
    """JSON with a line per key, and within `parameters` and the like a line per item.

    For people and `diff`; json's own indent would give every number of a shape its own line.
    """

    def line(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)

    lines = []
    for key, value in made.items():
        if isinstance(value, dict) and value:
            items = ",\n  ".join(f"{line(name)}: {line(item)}" for name, item in value.items())
            lines.append(f"{line(key)}: {{\n  {items}\n }}")
        else:
            lines.append(f"{line(key)}: {line(value)}")
    return ("{" + ",\n ".join(lines) + "}\n").encode("utf-8", "surrogatepass")


def _in_slot(manifest: Manifest, slot: str) -> list[Entry]:
    """A slot's entries as they lie in its files: large elements first, so that all are aligned."""
    held = [entry for entry in manifest.entries.values() if entry.slot == slot]
    return sorted(held, key=lambda entry: -SIZES[entry.dtype])


def _files(manifest: Manifest, options: Options) -> Iterator[tuple[str, list[Entry]]]:
    for slot in manifest.slots:
        stem = "model" if slot == "param" else slot
        yield from _split(stem, _in_slot(manifest, slot), options.file_size)


def _split(stem: str, entries: Sequence[Entry], most: int) -> list[tuple[str, list[Entry]]]:
    """Files of at most `most` bytes of tensors each (a larger tensor has one to itself)."""
    parts: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if parts[-1] and size + entry.length > most:
            parts.append([])
            size = 0
        parts[-1].append(entry)
        size += entry.length
    if len(parts) == 1:
        return [(f"{stem}.safetensors", parts[0])]
    count = len(parts)
    return [
        (f"{stem}-{place:05d}-of-{count:05d}.safetensors", part)
        for place, part in enumerate(parts, 1)
    ]


def _index(files: Sequence[tuple[str, Sequence[Entry]]]) -> bytes:
    """Hugging Face's index of a model in several files."""
    total = sum(entry.length for _, entries in files for entry in entries)
    weights = {entry.parameter: name for name, entries in files for entry in entries}
    return _text({"metadata": {"total_size": total}, "weight_map": weights})


# -- reading


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
