"""Describes the contents of a checkpoint as JSON, for `zckpt inspect`. Reads no tensor."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import to_builtins

from ...errors import Notice, WrongOption, listed, meant, note
from ..checkpoint.entries import Entry
from ..checkpoint.facts import layers_of, with_facts
from ..checkpoint.inert import plain_group, to_json
from ..checkpoint.manifest import Manifest, steps_to_json
from ..checkpoint.states import states_of

if TYPE_CHECKING:
    from .plan import Match

Report = dict[str, Any]
"""The result of a command, as `--json` prints it."""
VERSION = 2
"""The version of reports: of their keys, and of the meaning of these."""
T = TypeVar("T", bound="Entry | Match")


def line_of(notice: Notice, **more: Any) -> Report:
    """Converts a notice (warning or error) to JSON for a report; `more` are further keys."""
    return {**to_builtins(notice), **more}


def said(notices: Iterable[Notice]) -> list[Report]:
    """Converts notices (warnings and errors) to JSON objects for a report, without duplicates."""
    lines: list[Report] = to_builtins([*dict.fromkeys(notices)])
    return lines


def proof_of(report: Report) -> Report:
    """Converts the report of `verify` to the form of `--save-proof`, in which warnings are strings.

    This is version 1 of the form.
    """
    texts: Report = {
        key: [line["message"] for line in report[key]]
        for key in ("warnings", "notes", "not_compared")
        if key in report
    }
    advice = {"advice": report["advice"]["message"]} if "advice" in report else {}
    notices = {
        key: [{k: v for k, v in line.items() if k != "message"} for line in report[key]]
        for key in texts
    }
    return {**report, "zckpt": 1, **texts, **advice, "notices": notices}


def inspect(manifest: Manifest, objects: Sequence[str]) -> Report:
    """Describes the contents of a checkpoint as JSON, as `zckpt inspect --json` prints it.

    `objects` are the names of classes and functions in its pickles that no engine needs.
    """
    return {
        "zckpt": VERSION,
        "command": "inspect",
        **manifest.source,
        "format": manifest.format,
        "written_by": manifest.run.origin.format,
        "path": manifest.where,
        "step": manifest.step,
        # an incomplete checkpoint cannot be read, except for slices that are only inspected
        "complete": manifest.run.origin.slices is None,
        "optimizer": manifest.optimizer,
        **({"roots": dict(manifest.roots)} if manifest.roots else {}),
        "parameters": len(manifest.parameters),
        "elements": sum(prod(parameter.shape) for parameter in manifest.parameters.values()),
        "slots": {
            slot: {
                "tensors": len(entries),
                "dtype": ", ".join(sorted({entry.dtype for entry in entries})),
                "elements": sum(entry.numel for entry in entries),
                "bytes": sum(entry.length for entry in entries),
            }
            for slot, entries in manifest.slots.items()
        },
        "states": [
            {
                "state": state.key,
                "parameters": state.count,
                "form": FORMS[state.form]
                + (f": {state.reason}" if state.form == "unsupported" else ""),
            }
            for state in states_of(manifest).values()
            if state.form in FORMS
        ],
        **(
            {"experts": to_builtins(list(layers))}
            if (layers := layers_of(manifest.run.engine))
            else {}
        ),
        "groups": None
        if manifest.groups is None
        else [plain_group(group) for group in manifest.groups],
        "steps": steps_to_json(manifest.run.steps),
        "files": len(manifest.files.paths),
        "bytes": sum(os.path.getsize(file) for file in manifest.files.paths),
        **unopened(manifest),
        "problems": said(manifest.notices.warnings),
        "left_out": said(manifest.notices.omitted),
        "inferred": list(manifest.notices.inferred),
        "objects": list(objects),
    }


FORMS = {
    "none": "None",
    "other": "of other shapes than the parameters, or no tensors",
    "partition": "of the ranks' parts of flat buffers",
    "wrapper": "next to the optimizer's state dict",
    "unsupported": "not read",
}
"""How `inspect` describes the form of an optimizer state (see checkpoint/states.py).

Numbers, and tensors of the parameter's shape, are not described.
"""


def advice(manifest: Manifest, bare: int) -> Report:
    """Explains that some bytes were not checked, because their file states no checksum.

    It also says what to do. The result is the key `advice` of a report. `bare` is the number of
    records (such as zip members) without checksums that were read. If it is 0, the result is empty.
    """
    if not bare:
        return {}
    files = {record.extent.file for record in manifest.files.records}
    unsafe = {record.extent.file for record in manifest.files.records if record.crc is None}
    path = shlex.quote(manifest.where)
    which = f"the files of {manifest.root} have"
    if unsafe < files:
        names = sorted(os.path.relpath(file, manifest.root) for file in unsafe)
        which = f"some files of {manifest.root} ({listed(names, 3)}) have"
    message = (
        f"{which} no checksums, so damage in them may go unseen; compare them with another copy "
        f"(`zckpt verify {path} --against COPY`); a universal checkpoint has checksums"
    )
    return {"advice": to_builtins(note("checksum-missing", message, file=manifest.root))}


def unopened(manifest: Manifest) -> Report:
    """Counts the items of torch.distributed.checkpoint that were not opened, for a report.

    The reader need not open an item if similar ones show where its data lie. The result is an empty
    dictionary if all items were opened.
    """
    count = sum(record.is_unopened for record in manifest.files.records)
    return {"unopened": count} if count else {}


def matching(tensors: Iterable[T], pattern: str) -> list[T]:
    """Selects the tensors whose name (`parameter/slot`) matches a glob such as '*/exp_avg'.

    Raises WrongOption if no name matches.
    """
    tensors = list(tensors)
    selected = [tensor for tensor in tensors if fnmatchcase(tensor.name, pattern)]
    if not selected:
        raise WrongOption(
            "option-names-nothing",
            f"no tensor matches {pattern!r}",
            hint=_near(pattern, [tensor.name for tensor in tensors]),
        )
    return selected


MOST_COMPARED = 5000
"""The most names that a misspelled one is compared with: each takes a tenth of a millisecond."""


def _near(pattern: str, names: Sequence[str]) -> str:
    """Makes a hint for a glob that matches no name: similar names, or how names are written."""
    owners = list(dict.fromkeys(name.rpartition("/")[0] for name in names))
    if any(fnmatchcase(owner, pattern) for owner in owners):
        return (
            f"Did you mean {pattern + '/*'!r}? Names are parameter/slot; a slot is what the tensor "
            "is for its parameter, such as param or exp_avg"
        )
    word = pattern.rpartition("/")[0] if pattern.count("/") else pattern
    if question := meant(word.strip("*"), owners[:MOST_COMPARED]):
        return (
            f"{question} Names are parameter/slot; a slot is what the tensor is for its parameter, "
            "such as param or exp_avg"
        )
    example = f", such as {names[0]}" if names else ""
    return f"names are parameter/slot{example}; `zckpt inspect PATH --tensors '*'` lists them"


def tensors(manifest: Manifest, pattern: str, fragments: bool = False) -> list[Report]:
    """Describes, as JSON, each tensor whose name (`parameter/slot`) matches the glob.

    With `fragments`, the byte ranges in files are included. Raises WrongOption if no name matches.
    """
    return [_tensor(entry, fragments) for entry in matching(manifest.entries.values(), pattern)]


def _tensor(entry: Entry, fragments: bool) -> Report:
    report: Report = {
        "tensor": entry.name,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "elements": entry.numel,
        "count": len(entry.fragments),
    }
    if entry.digest is not None:
        report["crc32"] = f"{entry.digest:08x}"
    if fragments:
        report["fragments"] = [
            {
                "start": fragment.start,
                "stop": fragment.stop,
                **to_builtins(fragment.extent),
                "count": fragment.count,
                "stride": fragment.stride,
            }
            for fragment in entry.fragments
        ]
    return report


def state(manifest: Manifest) -> Any:
    """Returns everything in the checkpoint that is not a tensor, as tagged JSON (see inert.py)."""
    return to_json(
        with_facts(
            manifest.state,
            manifest.run.engine,
            manifest.run.step_place,
            manifest.run.pipeline,
            manifest.run.tensor_parallel,
            manifest.states,
            len(manifest.groups or ()),
        )
    )
