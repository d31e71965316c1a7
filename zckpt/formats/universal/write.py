"""Writes a universal checkpoint: full tensors as safetensors, everything else as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from shlex import quote
from typing import Any

from msgspec.json import encode as encode_json
from msgspec.json import format as format_json
from msgspec.structs import replace

from ...core.checkpoint.dtypes import FLOATS, SIZES
from ...core.checkpoint.entries import Entry, Key, name_of
from ...core.checkpoint.facts import FlatBufferEngine
from ...core.checkpoint.inert import plain_group
from ...core.checkpoint.manifest import Manifest, parameters_to_json, steps_to_json
from ...core.checkpoint.mended import CODE, Mended, to_json
from ...core.checkpoint.optimizer_states import NO_STATES
from ...core.checkpoint.siblings import LINKED
from ...core.passes import description
from ...core.passes.layout import Layout, Shell
from ...core.storage import sources
from ...core.storage.checksum import crc32
from ...core.storage.fileio import write_all
from ...core.storage.folder import Folder
from ...core.storage.sources import pread
from ...errors import MissingData, Notice, UnsupportedCheckpoint, literal, note
from ...files import safefile
from ...training.hyperparameters import are_inferred, given_groups
from ...training.options import FAMILY, GROUP_DEFAULTS, Options
from ...training.trainers import files_to_load_by
from .agreement import checksum
from .files import AROUND, MANIFEST, MAX_MANIFEST, SIBLINGS, VERSION
from .read import shells_of


def select(source: Manifest, options: Options) -> Manifest:
    """Selects what to write: the source's manifest with the tensors and types that options choose.

    Raises MissingData with `--weights-only` for a source without weights.
    """
    entries: dict[Key, Entry] = {}
    for key, entry in source.entries.items():
        if entry.slot == "param":
            entries[key] = _with_dtype(source, entry, options)
        elif not options.weights_only:
            entries[key] = entry
        if entry.slot == "master" and (options.weights_only or options.module_dtype):
            weight = replace(entry, slot="param", digest=None)
            entries.setdefault(weight.key, _with_dtype(source, weight, options))
    if options.weights_only:
        if not entries:
            raise MissingData("weights-missing", f"{source.root} has no weights", file=source.root)
        kept = ("module", "module_metadata", "module_extra")
        entries |= {
            key: entry
            for key, entry in source.entries.items()
            if entry.slot == "state" and entry.parameter.startswith("module_extra.")
        }
        return source.replace(
            entries=entries,
            parameters={
                name: replace(parameter, step=None) for name, parameter in source.parameters.items()
            },
            groups=None,
            step_place=None,
            pipeline=None,
            tensor_parallel=None,
            state={key: value for key, value in source.state.items() if key in kept},
            states=NO_STATES,
        )
    engine = source.run.engine
    if options.module_dtype and engine is not None:
        engine = replace(engine, dtype=options.module_dtype)
    states = source.states.without_form("unsupported")
    return source.replace(entries=entries, engine=engine, states=states)


def _with_dtype(source: Manifest, entry: Entry, options: Options) -> Entry:
    is_weight = entry.parameter in source.parameters and entry.dtype in FLOATS
    if not options.module_dtype or not is_weight or entry.dtype == options.module_dtype:
        return entry
    return replace(entry, dtype=options.module_dtype, digest=None)


def lay_out(source: Manifest, options: Options) -> Layout:
    """Lays out the target's files; `seal` adds the tensors' checksums to manifest.json later."""
    chosen = with_defaults(select(source, options), options)
    siblings = [(f"{SIBLINGS}/{item.name}", item) for item in source.files.siblings]
    siblings += [(f"{AROUND}/{item.name}", item) for item in source.files.around]
    omitted = list(source.notices.omitted)
    if options.weights_only:
        loaded = files_to_load_by(
            source.files.siblings
        )  # beside the weights, where from_pretrained looks for them
        siblings = [(item.name, item) for item in loaded]
        kept = {item.path for item in loaded}
        beside = (*source.files.siblings, *source.files.around)
        other_files = [item for item in beside if item.path not in kept]
        if other_files:
            names = ", ".join(item.name for item in other_files)
            message = f"{names}: not needed to load the weights"
            omitted.append(note("file-omitted", message, file=other_files[0].path))
    shells = list(_shells(chosen, options))
    files = [shell.name for shell in shells if shell.name != MANIFEST]
    # with --family the target is for another program than the source's engine
    has_ranks = source.run.origin.format != "gathered" and options[FAMILY] is None

    def loading(path: str) -> str:
        if not options.weights_only and has_ranks:
            return f"zckpt reshard {quote(path)} NEW --dp RANKS"
        if not options.weights_only:
            return f"zckpt convert {quote(path)} NEW --to FORMAT"
        if len(files) == 1:
            return f"safetensors.torch.load_file({literal(os.path.join(path, files[0]))})"
        parts = literal(os.path.join(path, "*.safetensors"))
        return f"[safetensors.torch.load_file(file) for file in sorted(glob.glob({parts}))]"

    return Layout(
        lambda: iter(shells),
        siblings,
        omitted,
        source.notices.warnings,
        about="weights as safetensors" if options.weights_only else "a universal checkpoint",
        loading=loading,
        read_back=lambda path: shells_of(path, chosen),
        has_digests=True,
    )


def with_defaults(source: Manifest, options: Options) -> Manifest:
    """Adds the values of `--group-defaults` if the source stores no hyper-parameters.

    For example, DeepSpeed's elastic files store no hyper-parameters.
    """
    inferred = are_inferred(source)
    if not (source.groups is None or inferred) or not options[GROUP_DEFAULTS]:
        return source
    parameters = {
        name: replace(parameter, group=(parameter.group or 0) if parameter.trainable else None)
        for name, parameter in source.parameters.items()
    }
    engine = source.run.engine
    if isinstance(engine, FlatBufferEngine) and inferred:
        engine = replace(engine, given=True)
    groups = tuple(given_groups(source, options))
    return source.replace(parameters=parameters, groups=groups, engine=engine)


DIGEST = len(', "crc32": "00000000"')  # for the checksum of one tensor
FILE = len('\n  "": {"size": 8589934592, "crc32": "00000000"},')
"""Bytes that `seal` adds to the manifest for one file, without the file's name."""
CHECKSUM = ',\n "crc32": "00000000"'
"""The text of the last item in manifest.json.

Until the copy is complete, there are spaces in its place.
"""


def _shells(chosen: Manifest, options: Options) -> Iterator[Shell]:
    room = DIGEST * len(chosen.entries)  # bytes that `seal` adds to the manifest
    weights: dict[str, str] = {}
    for slot, entries_of_slot in chosen.slots.items():
        # large elements first, so that all tensors are aligned
        entries = sorted(entries_of_slot, key=lambda entry: -SIZES[entry.dtype])
        stem = "model" if slot == "param" else slot
        for name, part in safefile.split(
            stem, entries, lambda entry: entry.length, options.file_size
        ):
            room += FILE + len(name)
            yield safefile.shell(name, [(each.parameter, each.dtype, each.shape) for each in part])
            weights |= {entry.parameter: name for entry in part if slot == "param"}
    if len({*weights.values()}) > 1:
        total = sum(entry.length for entry in chosen.slots["param"])
        index = {"metadata": {"total_size": total}, "weight_map": weights}
        yield Shell.of("model.safetensors.index.json", _formatted(index))
    text = _formatted(describe(chosen, lambda key: chosen.entries[key].digest))
    size = len(text) + len(CHECKSUM)
    if size + room > MAX_MANIFEST:
        raise UnsupportedCheckpoint(
            "file-too-large",
            f"{MANIFEST} would have {size + room} bytes; zckpt reads up to {MAX_MANIFEST}",
            hint="save the checkpoint with fewer values that are neither tensors nor numbers",
        )
    yield Shell(MANIFEST, size, ((0, text.ljust(size)),))


def seal(root: Folder, manifest: Manifest, outcome: Any) -> None:
    """Writes manifest.json again, with the CRC-32 of every tensor and file.

    These checksums are known only after the copy. `lay_out` has written a manifest without them,
    because readers recognize the files as a checkpoint by the manifest, and because the report
    counts its bytes.
    """
    document = describe(manifest, outcome.digests.get(0, {}).get)
    files = dict(outcome.files)
    siblings = [item.path for item in manifest.files.siblings]
    for path in (*manifest.files.paths, *siblings):
        # nothing was copied into a file with empty tensors only, or without tensors
        if os.path.basename(path) != MANIFEST and path not in files:
            with root.opened(path) as file:
                text = pread(file, root.size(path), 0)
            files[path] = len(text), crc32(text)
    document["files"] = {
        root.name_of(path): {"size": size, "crc32": f"{crc:08x}"}
        for path, (size, crc) in sorted(files.items())
    }
    with root.opened(os.path.join(root.path, MANIFEST), os.O_RDWR) as file:
        os.ftruncate(file, 0)
        write_all(file, memoryview(_formatted({**document, "crc32": checksum(document)})), 0)


def describe(manifest: Manifest, digest_of: Callable[[Key], int | None]) -> dict[str, Any]:
    """Makes the contents of manifest.json, as a dictionary.

    `digest_of` returns the CRC-32 of an entry's tensor, or None if it is unknown.
    """
    groups = manifest.groups or ()
    tuples = {key for group in groups for key, value in group.items() if type(value) is tuple}
    # a link is a fact of this machine; restored tensors have a list of their own
    warnings = [each for each in manifest.notices.warnings if each.code not in (LINKED, CODE)]
    restored = manifest.notices.mended
    return {
        "zckpt": VERSION,
        "source": manifest.source,
        "step": manifest.step,
        "optimizer": manifest.optimizer,
        "groups": None if manifest.groups is None else [plain_group(group) for group in groups],
        "tuples": sorted(tuples),  # hyper-parameters that were tuples, such as betas
        "parameters": parameters_to_json(manifest.parameters, manifest.states),
        "buffers": list(manifest.buffers),
        "entries": {
            name_of(key): _entry_as_json(entry, digest_of(key))
            for key, entry in manifest.entries.items()
        },
        "files": {},
        # the target has the trainer's files, whose counters are found there again
        "steps": steps_to_json(each for each in manifest.run.steps if not each.counter),
        "left_out": [notice.message for notice in manifest.notices.omitted],
        "warnings": [notice.message for notice in warnings],
        "notices": {
            "left_out": list(map(_notice_as_json, manifest.notices.omitted)),
            "warnings": list(map(_notice_as_json, warnings)),
        },
        "inferred": list(manifest.notices.inferred),
        **({"mended": to_json(restored)} if restored else {}),
        "state": description.state(manifest),
    }


def with_mended(path: str, mended: Sequence[Mended]) -> tuple[str, bytes]:
    """Makes new bytes of manifest.json with a list of what `zckpt mend` restored.

    Returns the file's name and these bytes.
    """
    with sources.opened(os.path.join(path, MANIFEST)) as file:
        document = json.loads(file.read())
    document.pop("crc32", None)
    document["mended"] = to_json(mended)
    return MANIFEST, _formatted({**document, "crc32": checksum(document)})


def _notice_as_json(notice: Notice) -> dict[str, Any]:
    """Converts a notice to JSON, without its text (stored elsewhere) and without its path.

    The path is valid on this machine only.
    """
    fields = {"code": notice.code, "severity": notice.severity, "subject": notice.subject}
    return {**fields, "hint": notice.hint}


def _entry_as_json(entry: Entry, digest: int | None) -> dict[str, Any]:
    described = {"dtype": entry.dtype, "shape": entry.shape}
    return described if digest is None else {**described, "crc32": f"{digest:08x}"}


def _formatted(document: Mapping[str, Any]) -> bytes:
    """Formats manifest.json: one line per key, and one per item of a dictionary under a key.

    So people can read it and `diff` can compare it; json's own indent would put every number of a
    shape on a separate line.
    """
    text = bytearray()
    for piece in _pieces(document):
        text += piece.encode("utf-8", "surrogatepass")
    return bytes(text)


def _pieces(document: Mapping[str, Any]) -> Iterator[str]:
    before = "{"
    for key, value in document.items():
        yield f"{before}{_line(key)}: "
        if isinstance(value, dict) and value:
            line: Callable[[Any], str] = LINES.get(key, _line)
            before = "{\n  "
            for name, item in value.items():
                yield f"{before}{_line(name)}: {line(item)}"
                before = ",\n  "
            yield "\n }"
        else:
            yield _line(value)
        before = ",\n "
    yield "}\n"


def _entry_line(entry: Mapping[str, Any]) -> str:
    """Formats an entry as one line of JSON: the same text as from `_line`, in a third of the time.

    It works because entries have only ASCII texts and integers.
    """
    return format_json(encode_json(entry), indent=0).decode()


def _parameter_line(parameter: Mapping[str, Any]) -> str:
    """Formats a parameter as one line of JSON.

    Most parameters are written by `_entry_line`. `_line` writes a parameter that has aliases,
    states of one number, or a step that is no integer.
    """
    is_plain = type(parameter["step"]) in (int, type(None))
    is_plain = is_plain and not (parameter["scalars"] or parameter["aliases"])
    return (_entry_line if is_plain else _line)(parameter)


LINES: dict[str, Callable[[Any], str]] = {
    "entries": _entry_line,
    "parameters": _parameter_line,
}
"""Functions that format one item below a key as a line of JSON; `_line` for other keys."""

_line = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
