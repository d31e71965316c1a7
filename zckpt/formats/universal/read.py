"""Reads a universal checkpoint: manifest.json, and byte ranges of tensors in safetensors files."""

import json
import os
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, ValidationError, convert
from msgspec.structs import asdict, replace

from ...core.checkpoint.dtypes import SIZES
from ...core.checkpoint.entries import Entry, Key, key_of, name_of
from ...core.checkpoint.facts import MAX_DP, facts_of
from ...core.checkpoint.inert import from_json
from ...core.checkpoint.manifest import (
    Files,
    Manifest,
    Notices,
    Run,
    Sibling,
    Sighting,
    crc_from_json,
    parameters_from_json,
    sizes_from_json,
    step_from_json,
    texts_from_json,
)
from ...core.checkpoint.mended import from_json as mended_from_json
from ...core.checkpoint.optimizer_states import States
from ...core.checkpoint.origin import Origin
from ...core.checkpoint.siblings import SiblingList
from ...core.checkpoint.states import tensors_in
from ...core.storage import sources
from ...core.storage.fileio import crc_of
from ...core.storage.filenames import is_tag, path_inside
from ...core.storage.fragments import Extent, Fragment, Fragments, Record, Runs, solid
from ...errors import (
    MALFORMED,
    CorruptCheckpoint,
    IncompleteCheckpoint,
    Notice,
    UnsupportedCheckpoint,
    ZckptError,
    brief,
    cause,
    listed,
    warning,
)
from ...files import safefile
from ...training.trainers import LOADED, OPEN_FILES, OPEN_FOLDERS
from ..reading import USUAL, Reading
from ..weights_alone import is_of_files, weights_or_raise
from .agreement import checksum, contradictions
from .files import AROUND, MANIFEST, MAX_MANIFEST, SIBLINGS, VERSION

ENDING = ".safetensors"


def read(path: str, reading: Reading = USUAL) -> Manifest:
    """Reads a universal checkpoint, which is zckpt's own format.

    With `reading.weights_only`, files of the optimizer may be missing or damaged. Raises
    IncompleteCheckpoint without manifest.json, UnsupportedCheckpoint for another version, and
    CorruptCheckpoint if tensors are missing, or if manifest.json is damaged or contradicts itself.
    """
    name = os.path.join(path, MANIFEST)
    if not sources.is_file(name):
        raise IncompleteCheckpoint(
            "missing-file",
            f"{path} lacks {MANIFEST}, which describes its tensors",
            hint=f"copy {MANIFEST} from the checkpoint's original directory",
            file=path,
        )
    try:
        try:
            return _read(path, name)
        except ZckptError as error:
            lost = {_slot_of(notice.file or "") for notice in error.notices}
            if not is_of_files(error, _is_of_optimizer):
                raise
            kept = {"param", "master", "state"} - lost
            rest = partial(_read, path, name, kept)
            return weights_or_raise(error, lambda _: rest(), path, reading, "master" in lost)
    except MALFORMED as error:
        raise CorruptCheckpoint(
            "file-damaged", f"{name} is malformed: {cause(error)}", file=name
        ) from error


def _read(path: str, name: str, kept: Container[str] | None = None) -> Manifest:
    """Reads the manifest in the file `name`, with all tensors or only those of the kinds `kept`.

    `kept` may contain `param`, `master` and `state`. Raises UnsupportedCheckpoint for another
    version of the format, and CorruptCheckpoint if tensors are missing or facts contradict others.
    """
    document = json.loads(_text_of(name))
    version = document["zckpt"]
    if version != VERSION:
        raise UnsupportedCheckpoint(
            "version-unsupported",
            f"{name} has version {brief(version)}; this zckpt reads version {VERSION}",
            hint="install a newer zckpt",
            file=name,
        )
    manifest = _manifest(path, document, kept)
    _require_agreement(manifest, document.get("step", manifest.step))
    return manifest


def _is_of_optimizer(file: str) -> bool:
    return file.endswith(ENDING) and _slot_of(file) not in ("param", "state")


def _slot_of(file: str) -> str:
    """The kind of tensors in a safetensors file: `param` for model.safetensors, else its stem."""
    stem = os.path.basename(file).removesuffix(ENDING).split("-")[0]
    return "param" if stem == "model" else stem


def shells_of(path: str, chosen: Manifest) -> Manifest:
    """Finds the byte ranges into which a conversion copies tensors, in files laid out for `chosen`.

    The files' headers state the ranges; the rest of the result is from `chosen`. Raises
    CorruptCheckpoint if the result contradicts itself, or has an impossible value, such as a number
    of ranks below 1.
    """
    stored, files = _stored(path, ())
    entries = {}
    for key, entry in chosen.entries.items():
        tensor = _stored_as(path, key, entry.dtype, [*entry.shape], stored)
        fragments = solid(entry.numel, tensor.extent)
        entries[key] = Entry(*key, entry.dtype, entry.shape, fragments, entry.digest)
    members = [item.group for item in chosen.parameters.values()]
    _origin(path, chosen.source, chosen.groups, members)
    told = chosen.notices
    shells = Manifest(
        path,
        "universal",
        replace(chosen.run, weights_differ=False, zero_padding=False),
        entries,
        chosen.parameters,
        chosen.buffers,
        chosen.groups,
        chosen.optimizer,
        chosen.states,
        chosen.state,
        files=Files(
            (os.path.join(path, MANIFEST), *files), siblings=_changed_siblings(path, chosen)
        ),
        notices=Notices(
            told.warnings, omitted=told.omitted, inferred=told.inferred, mended=told.mended
        ),
    )
    _require_agreement(shells, chosen.step)
    return shells


def _changed_siblings(path: str, chosen: Manifest) -> tuple[Sibling, ...]:
    """The trainer's files that zckpt has not copied, but written with new content."""
    changed = [item.name for item in chosen.files.siblings if item.content is not None]
    paths = {name: os.path.join(path, SIBLINGS, name) for name in changed}
    return tuple(Sibling(name, file, sources.size(file)) for name, file in paths.items())


def _require_agreement(manifest: Manifest, step: Any) -> None:
    for sentence in contradictions(manifest, step):
        raise CorruptCheckpoint(
            "file-damaged",
            f"{os.path.join(manifest.root, MANIFEST)} contradicts itself: {sentence}",
            hint="it was changed after zckpt wrote it; convert again",
            file=os.path.join(manifest.root, MANIFEST),
        )


def _text_of(name: str) -> str:
    with sources.opened(name) as file:
        if os.fstat(file.fileno()).st_size > MAX_MANIFEST:
            raise UnsupportedCheckpoint(
                "file-too-large",
                f"{name} has {os.fstat(file.fileno()).st_size} bytes; zckpt reads up to "
                f"{MAX_MANIFEST}",
                hint="zckpt never writes such a large manifest: convert again",
                file=name,
            )
        text: str = file.read().decode("utf-8", "surrogatepass")
        return text


def _manifest(path: str, document: Mapping[str, Any], kept: Container[str] | None) -> Manifest:
    warnings = (*_notices(document, "warnings"), *_check_checksum(path, document))
    members = [item["group"] for item in document["parameters"].values()]
    origin = _origin(path, document["source"], document["groups"], members)
    listed_files, tensors = document.get("files") or {}, document["entries"]
    if kept is not None:
        listed_files = {name: own for name, own in listed_files.items() if _slot_of(name) in kept}
        tensors = {name: own for name, own in tensors.items() if key_of(name)[1] in kept}
    stored, files = _stored(path, listed_files)
    entries = _entries(path, tensors, stored)
    _require_room(path, entries, [*files, *_listed_files(entries)])
    records = _records(path, listed_files)
    facts = facts_of(from_json(document["state"]))
    values = [facts.state, *(row.value for row in facts.states)]
    if lost := [name for name in tensors_in(values) if (name, "state") not in entries]:
        raise ValueError(f"its `state` names tensors that `entries` lacks: {listed(lost, 4)}")
    for key in ("client_state", "counters", "megatron"):
        if not isinstance(facts.state.get(key) or {}, dict):
            raise ValueError(f"its `state.{key}` is no object")
    siblings, around = _siblings(path), _files_in(path, AROUND)
    parameters, numbers = parameters_from_json(document["parameters"])
    facts = facts._replace(states=States((*numbers, *facts.states)))
    return Manifest(
        root=path,
        format="universal",
        entries=entries,
        parameters=parameters,
        buffers=texts_from_json(document["buffers"]),
        groups=_groups(document),
        optimizer=convert(document.get("optimizer"), str | None),
        run=Run(
            origin=origin,
            steps=tuple(
                Sighting(str(line["where"]), step_from_json(line["step"]) or 0, bool(line["truth"]))
                for line in document.get("steps", ())
            ),
        ),
        files=Files(
            records=records,
            paths=(os.path.join(path, MANIFEST), *files),
            siblings=tuple(siblings.files),
            around=tuple(around.files),
        ),
        notices=Notices(
            omitted=(*_notices(document, "left_out"), *siblings.omitted, *around.omitted),
            warnings=warnings,
            inferred=texts_from_json(document.get("inferred", [])),
            mended=mended_from_json(document.get("mended", [])),
        ),
    ).replace(**facts._asdict())


class _FactsOfNotice(Struct, frozen=True):
    """The facts about one notice in a manifest: all but its text, which is listed elsewhere."""

    code: Annotated[str, Meta(pattern=r"\A[a-z]+(-[a-z]+)*\Z", max_length=40)]
    severity: Literal["warning", "note"]
    subject: str | None = None
    hint: str = ""


def _notices(document: Mapping[str, Any], key: str) -> tuple[Notice, ...]:
    """Reads the notices under a key of the manifest: their texts, with their codes.

    If the codes are missing, or are not as many as the texts, all texts get the code
    `said-by-source`.
    """
    texts = texts_from_json(document.get(key, []))
    try:
        facts_of_notices = convert(document["notices"][key], list[_FactsOfNotice])
    except (LookupError, TypeError, ValueError):
        facts_of_notices = []
    if len(facts_of_notices) != len(texts):
        unstated = _FactsOfNotice("said-by-source", "note" if key == "left_out" else "warning")
        facts_of_notices = [unstated] * len(texts)
    pairs = zip(facts_of_notices, texts, strict=True)
    return tuple(Notice(**asdict(about), message=text) for about, text in pairs)


def _check_checksum(path: str, document: Mapping[str, Any]) -> list[Notice]:
    """Raises CorruptCheckpoint for a damaged manifest; returns a warning if it has no checksum."""
    if "crc32" not in document:
        message = (
            f"{MANIFEST} has no checksum (an older zckpt wrote none): damage to it cannot be "
            "detected"
        )
        return [warning("checksum-missing", message, file=os.path.join(path, MANIFEST))]
    if document["crc32"] != checksum(document):
        raise CorruptCheckpoint(
            "record-damaged",
            f"{os.path.join(path, MANIFEST)} is damaged: its contents do not have the CRC-32 that "
            "it states",
            hint="copy it again, or convert again",
            file=os.path.join(path, MANIFEST),
        )
    return []


def _entries(
    path: str, listed: dict[str, Any], stored: Mapping[Key, safefile.SavedTensor]
) -> dict[Key, Entry]:
    """Makes the entries that the manifest lists, with the byte ranges of the `stored` tensors.

    Removes the items from `listed` to reuse their memory for the entries.
    """
    entries = {}
    for name in [*listed]:
        item, key = listed.pop(name), key_of(name)
        if "fragments" in item:
            shape = sizes_from_json(item["shape"])
            fragments: Fragments = _listed_ranges(path, name, item)
        else:
            tensor = _stored_as(path, key, item["dtype"], item["shape"], stored)
            shape, fragments = tensor.shape, solid(prod(tensor.shape), tensor.extent)
        digest = crc_from_json(item["crc32"]) if "crc32" in item else None
        entries[key] = Entry(*key, item["dtype"], shape, fragments, digest)
    return entries


def _stored_as(
    path: str, key: Key, dtype: Any, shape: Any, stored: Mapping[Key, safefile.SavedTensor]
) -> safefile.SavedTensor:
    """Looks up the tensor `key`; raises CorruptCheckpoint unless it has this type and shape."""
    tensor = stored.get(key)
    if tensor is None:
        raise CorruptCheckpoint(
            "missing-file",
            f"{path} lacks {brief(name_of(key))}, which its manifest lists",
            hint="a file of the checkpoint is missing: copy all files again",
            file=os.path.join(path, f"{key[1]}{ENDING}"),
        )
    if tensor.dtype != dtype or [*tensor.shape] != shape:
        name = name_of(key)
        raise CorruptCheckpoint(
            "file-damaged",
            f"{tensor.extent.file} has {name} as {tensor.dtype} {list(tensor.shape)}, but the "
            f"manifest states {brief(dtype)} {brief(shape)}",
            file=tensor.extent.file,
            subject=name,
        )
    return tensor


def _records(path: str, listed: Mapping[str, Any]) -> tuple[Record, ...]:
    """The byte range and CRC-32 of each listed file that has a checksum in the manifest.

    Raises CorruptCheckpoint if a listed file is missing or has another size.
    """
    records = []
    for name, facts in listed.items():
        full = path_inside(path, name, MANIFEST)
        if not sources.is_file(full) or sources.size(full) != facts["size"]:
            raise CorruptCheckpoint(
                "file-cut-short",
                f"{full} does not have the {brief(facts['size'])} bytes that the manifest states",
                hint="copy the file again: it is missing, or was cut short",
            )
        if "crc32" in facts:
            records.append(Record(Extent(full, 0, facts["size"]), crc_from_json(facts["crc32"])))
    return tuple(records)


def _groups(document: Mapping[str, Any]) -> tuple[dict[str, Any], ...] | None:
    """The hyper-parameters of the groups; None if the manifest has no groups.

    JSON has lists where the groups had tuples, such as betas; these become tuples again.
    """
    groups = document["groups"]
    if not all(isinstance(group, dict) for group in groups or ()):
        raise TypeError("groups are not dictionaries")
    tuples = set(texts_from_json(document.get("tuples", [])))

    def value_of(key: str, value: Any) -> Any:
        is_tuple = key in tuples and isinstance(value, list)
        return tuple(from_json(value)) if is_tuple else from_json(value)

    if groups is None:
        return None
    return tuple({key: value_of(key, value) for key, value in group.items()} for group in groups)


def _listed_files(entries: Mapping[Key, Entry]) -> set[str]:
    """The files that contain bytes of tensors, by the manifest's key `fragments`."""
    return {
        fragment.extent.file
        for entry in entries.values()
        if isinstance(entry.fragments, Runs)
        for fragment in entry.fragments
    }


def _require_room(path: str, entries: Mapping[Key, Entry], files: Collection[str]) -> None:
    """Raises CorruptCheckpoint if the tensors have more bytes than the files that contain them.

    In such a checkpoint, some tensors share bytes. A small manifest could list the same bytes as a
    million tensors, and reading would never end.
    """
    stated_bytes = sum([entry.length for entry in entries.values()])
    room = sum([sources.size(file) for file in {*files}])
    if stated_bytes > room:
        raise CorruptCheckpoint(
            "file-damaged",
            f"{os.path.join(path, MANIFEST)} lists tensors of {stated_bytes} bytes, but its files "
            f"have only {room}",
            file=os.path.join(path, MANIFEST),
        )


def _origin(
    path: str, source_facts: Any, groups: Sequence[Any] | None, members: Iterable[Any]
) -> Origin:
    """Reads the facts about the original checkpoint: the manifest's key `source`.

    Raises CorruptCheckpoint for values that are impossible as names of folders or numbers of ranks.
    """
    try:
        origin = Origin.of_json(source_facts)
    except ValidationError as error:
        raise CorruptCheckpoint(
            "file-damaged",
            f"{os.path.join(path, MANIFEST)} has an invalid value in `source`: {error}",
            file=os.path.join(path, MANIFEST),
        ) from error
    stage, tag = origin.zero_stage, origin.tag
    count = len(groups) if groups is not None else None
    valid = (
        all(size is None or 0 < size <= MAX_DP for size in (origin.dp, origin.ep, origin.sp))
        and (stage is None or 0 <= stage <= 3)
        and (tag is None or is_tag(tag))
        and all(
            group is None
            or (type(group) is int and group >= 0 and (count is None or group < count))
            for group in members
        )
    )
    if not valid:
        raise CorruptCheckpoint(
            "file-damaged",
            f"{os.path.join(path, MANIFEST)} has an invalid dp, ep, sp, stage, tag or group",
            file=os.path.join(path, MANIFEST),
        )
    return origin


def _stored(
    path: str, listed: Collection[str]
) -> tuple[dict[Key, safefile.SavedTensor], list[str]]:
    """Reads the headers of safetensors files: tensors by (parameter, kind), and the files' paths.

    A kind is `param`, `master`, `exp_avg` or another state. If `listed` is empty, all safetensors
    files in the folder are read.
    """
    tensors: dict[Key, safefile.SavedTensor] = {}
    files = []
    # while files are being written, none are listed
    for name in sorted(os.listdir(path)):
        if not name.endswith(ENDING) or (listed and name not in listed):
            continue
        full = os.path.join(path, name)
        files.append(full)
        slot = _slot_of(name)
        for stored in safefile.read(full):
            tensors[stored.name, slot] = stored
    return tensors, files


def _listed_ranges(path: str, name: str, entry: Mapping[str, Any]) -> Runs:
    """The byte ranges that the manifest lists for a tensor.

    Raises CorruptCheckpoint unless they cover the tensor exactly once.
    """
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
        raise CorruptCheckpoint(
            "file-damaged",
            f"{path}: the byte ranges that the manifest lists for {name} do not cover it exactly "
            "once",
            file=path,
            subject=name,
        )
    return Runs(fragments)


def check(manifest: Manifest) -> list[Notice]:
    """Checks the files beside the checkpoint's tensors, which a conversion copies unchanged.

    Raises CorruptCheckpoint if a file does not have the CRC-32 that the manifest states.
    """
    beside = (*manifest.files.siblings, *manifest.files.around)
    siblings = {sibling.path for sibling in beside}
    for record in manifest.files.records:
        if record.extent.file in siblings and crc_of([record.extent]) != record.crc:
            raise CorruptCheckpoint(
                "record-damaged",
                f"{record.extent.file} is damaged: its bytes do not have the CRC-32 that "
                f"{MANIFEST} states",
                file=record.extent.file,
            )
    return []


def _files_in(path: str, folder: str) -> SiblingList:
    """The files in a subfolder such as `siblings/`, which a conversion copies unchanged."""
    root = os.path.join(path, folder)
    files = SiblingList(path, OPEN_FOLDERS | OPEN_FILES)
    if sources.is_folder(root):
        if files.is_out(root):
            files.add(folder, root)
        else:
            files.add_below(root)
    return files


def _siblings(path: str) -> SiblingList:
    siblings = _files_in(path, SIBLINGS)
    if not siblings.files:  # beside weights that were written alone
        for name in sorted(filter(LOADED.fullmatch, os.listdir(path))):
            siblings.add(name, os.path.join(path, name))
    return siblings
