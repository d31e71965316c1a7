"""The proof file that `verify --save-proof` writes: checksums of all tensors, without the data.

Another checkpoint can be compared with it later.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, convert, field

from ..core.checkpoint import keys
from ..core.checkpoint.dtypes import Dtype
from ..core.checkpoint.entries import Entry, Key, key_of
from ..core.checkpoint.facts import facts_of
from ..core.checkpoint.inert import from_json, plain_group
from ..core.checkpoint.manifest import (
    Files,
    Hex,
    Manifest,
    Notices,
    Parameter,
    Run,
    Sizes,
    parameters_from_json,
    parameters_to_json,
)
from ..core.checkpoint.optimizer_states import StateRow, States, of_parameters
from ..core.checkpoint.origin import Origin
from ..core.checkpoint.states import Selection, State, states_of, with_updates
from ..core.comparison import compare
from ..core.comparison.compare import Result
from ..core.grouping import by_key
from ..core.passes import description
from ..core.passes.description import Report
from ..core.passes.plan import Match, match
from ..core.passes.resources import Begin, Copying
from ..core.storage import sources
from ..core.storage.fragments import Runs
from ..errors import (
    MALFORMED,
    CorruptCheckpoint,
    MissingData,
    Notice,
    UnsupportedCheckpoint,
    cause,
    listed,
    note,
)
from . import unsupported
from .file_digest import digest
from .pairs import only_rounded, selected
from .report import difference, findings
from .roots import of_root, refuse_several
from .states import plain_facts
from .verify import inferences, needs_weights, nothing_found, with_values

MAX_PROOF = 1 << 29  # a proof has 100 to 200 bytes for each tensor and each parameter
"""The size in bytes of the largest file of `--save-proof` that zckpt reads."""


class _Digest(Struct):
    """A tensor in the file of `--save-proof`; `a` is the CRC-32 of its row-major bytes."""

    dtype: Dtype
    shape: Sizes
    a: Hex | None = None


class _Unsupported(Struct):
    """An optimizer state, in the file of `--save-proof`, that zckpt compares but cannot convert.

    `tensors` are the names of its tensors.
    """

    key: str
    parameters: tuple[str, ...]
    reason: str
    content: str
    tensors: tuple[str, ...]


class _ProofContents(Struct):
    """What the file of `--save-proof` has besides checksums; older files lack some keys."""

    parameters: dict[str, Any]
    buffers: tuple[str, ...]
    groups: tuple[dict[str, Any], ...] | None
    format: str = "proof"
    source: dict[str, Any] | None = None
    states: dict[str, tuple[str, ...]] | None = None
    state: dict[str, Any] = field(default_factory=dict)
    optimizer: str | None = None
    contents: str = ""
    of_ranks: dict[str, dict[str, Any]] = field(default_factory=dict)
    layout: dict[str, dict[str, Any]] = field(default_factory=dict)
    unsupported: tuple[_Unsupported, ...] = field(default=(), name="unread")


def about(manifest: Manifest) -> Report:
    """Describes a checkpoint for a file of `--save-proof`, without the checksums of tensors."""
    groups = manifest.groups
    return {
        "step": manifest.step,
        "warnings": description.said(manifest.notices.warnings),
        "held": {
            "parameters": parameters_to_json(manifest.parameters, manifest.states),
            "buffers": list(manifest.buffers),
            "groups": None if groups is None else [plain_group(group) for group in groups],
            "format": manifest.format,
            "source": plain_facts(manifest.run.origin),
            "states": {
                state.key: state.parameters
                for state in _other_states(manifest)
                if state.form != "unsupported"
            },
            "optimizer": manifest.optimizer,
            "state": description.state(manifest),
            "of_ranks": manifest.files.of_ranks,
            "layout": manifest.files.layout,
            "unread": [
                {
                    "key": row.key,
                    "parameters": row.parameters,
                    "reason": row.reason,
                    "content": row.value,
                    "tensors": [entry.name for entry in row.tensors],
                }
                for row in manifest.states.of_form("unsupported")
            ],
            **({"contents": digest(manifest)} if manifest.notices.inferred else {}),
        },
    }


def _other_states(manifest: Manifest) -> list[State]:
    return [s for s in states_of(manifest).values() if s.form not in ("slot", "number", "none")]


def is_proof(path: str) -> bool:
    """Whether `path` is a file that `--save-proof` wrote, not a checkpoint."""
    if not sources.is_file(path):
        return False
    with sources.opened(path) as file:
        head = file.read(256)
    return head.lstrip()[:1] == b"{" and b'"command": "verify"' in head


def verify_proof(
    manifest: Manifest,
    proven: Manifest,
    contents: str,
    selection: Selection,
    copying: Copying,
    begin: Begin | None,
    root: str,
) -> Report:
    """Reports whether all tensors of a checkpoint have the CRC-32s in a proof file.

    `proven` is the manifest in the proof. `contents` is the checksum over the checkpoint's files,
    as the proof states it. If the proof is of several models, `root` names the one to compare.
    """
    if root:
        proven = of_root(proven, root, manifest)
    else:
        refuse_several(proven, manifest)
    whole, (manifest, proven) = manifest, keys.matched(*selection.of(manifest, proven))
    pattern = selection.tensors
    mutual, only_a, only_b = match(manifest, proven)
    mutual = selected([*mutual, *unsupported.pairs(manifest, proven)], pattern)
    _refuse_other_types(mutual, manifest, proven)
    comparable = [item for item in mutual if item.how in ("bits", "shapes", "types")]
    matches = selected(comparable, pattern)
    if pattern is None:
        needs_weights(matches, manifest, proven)
    alone = [Match(item.a) for item in matches]
    outcome = compare.compare(alone, manifest, manifest, copying, begin=begin)
    report = findings(outcome, manifest, manifest)
    report |= inferences(matches, manifest, proven, lambda: digest(whole) == contents)
    for item, result in zip(matches, outcome.results, strict=True):
        assert item.b is not None
        assert item.b.digest is not None
        crc = result.digests[0]
        if item.how != "bits":
            line = difference(Result(item, (None, None), None))
        elif crc != item.b.digest:
            line = {"tensor": item.name, "a_crc32": f"{crc:08x}", "b_crc32": f"{item.b.digest:08x}"}
        else:
            continue
        report["differences"].append(line)
    if pattern is None:
        report = with_values(report, manifest, proven, only_a, only_b)
        skipped = [*report["not_compared"], *description.said(_of_first_rank(manifest))]
    else:
        report, skipped = {**report, "equal": nothing_found(report)}, []
    rounded = list(dict.fromkeys(item.name for item in mutual if item.how == "rounded"))
    if rounded:
        message = (
            f"{listed(rounded, 4)}: rounded to another type than in the proof, which has "
            "checksums alone"
        )
        skipped += description.said([note("not-compared", message, subject=rounded[0])])
    return {**report, "not_compared": skipped}


def _of_first_rank(manifest: Manifest) -> list[Notice]:
    """A notice about tensors of which each rank has its own, such as random states.

    Only the first rank's tensor is compared, because a proof has one checksum for each name. The
    list is empty if there are no such tensors.
    """
    names = dict.fromkeys(
        entry.name
        for entry in manifest.replicas
        if entry.slot == "state" or entry.parameter in manifest.buffers
    )
    what = (
        f"{listed(list(names), 4)} of ranks after the first: a proof file has checksums only for "
        "the first rank"
    )
    return [note("not-compared", what)] if names else []


def _refuse_other_types(matches: Sequence[Match], a: Manifest, b: Manifest) -> None:
    """Raises MissingData for tensors of two types, whose checksums cannot be compared.

    A 16-bit weight is no error if its side also has the fp32 master: the master is compared.
    """
    rounded, buffers = only_rounded(matches, a, b), {*a.buffers, *b.buffers}
    other_types = [
        item.a.name
        for item in matches
        if item.how == "values" or (item.how == "rounded" and item.a.parameter in buffers)
    ]
    for names, side, kind, other, what in (
        (rounded["a"], a, "a narrower", b, "rounded weights"),
        (rounded["b"], b, "a narrower", a, "rounded weights"),
        (other_types, a, "another", b, "values of two types"),
    ):
        if names:
            raise MissingData(
                "proof-unsupported",
                f"{side.root} has {listed(names, 4)} in {kind} type than {other.root}: a proof has "
                f"only checksums, which cannot tell whether {what} are equal",
                hint="compare the two checkpoints themselves",
                file=side.root,
            )


def read_proof(path: str, manifest: Manifest) -> tuple[Manifest, str]:
    """Reads a proof file: returns a manifest without tensors' bytes, and a checksum over the files.

    The checksum is "" if the proof has none. `manifest` supplies optimizer states that an older
    proof does not list.

    Raises CorruptCheckpoint if the file is no proof, or reports a difference, and
    UnsupportedCheckpoint if it is too large.
    """
    try:
        with sources.opened(path) as file:
            if file.seek(0, 2) > MAX_PROOF:
                raise UnsupportedCheckpoint(
                    "file-too-large",
                    f"{path} is larger than any proof that zckpt writes",
                    file=path,
                )
            file.seek(0)
            report = json.loads(file.read().decode("utf-8"))
        if report["equal"] is not True:
            raise CorruptCheckpoint(
                "option-invalid",
                f"{path} proves a difference",
                hint="give a file that `zckpt verify --save-proof` wrote when it found nothing",
                file=path,
            )
        held = convert(report["held"], _ProofContents)
        digests = convert(report["digests"], dict[str, _Digest])
        facts = facts_of(_dictionary(held.state))
        if "state" not in report["held"]:  # a proof of an older zckpt
            states_of_manifest = {state.key: state.parameters for state in _other_states(manifest)}
            parameters_by_state = states_of_manifest if held.states is None else held.states
            rows = of_parameters("other", _by_parameter(parameters_by_state))
            facts = facts._replace(states=States(tuple(rows)))
        entries = {
            key: Entry(*key, item.dtype, item.shape, Runs([]), int(item.a, 16))
            for key, item in ((key_of(name), item) for name, item in digests.items())
            if item.a is not None
        }
        parameters, numbers = parameters_from_json(held.parameters)
        rows = [_with_tensors(item, entries) for item in held.unsupported]
        facts = facts._replace(states=States((*numbers, *facts.states, *rows)))
        _check_groups(parameters, held.groups)
        proven = Manifest(
            root=path,
            format=held.format,
            entries=entries,
            parameters=parameters,
            buffers=held.buffers,
            groups=None if held.groups is None else tuple(map(_dictionary, held.groups)),
            optimizer=held.optimizer,
            run=Run(
                origin=Origin.of_json(
                    report["versions"]["a"] if held.source is None else held.source
                )
            ),
            files=Files(of_ranks=held.of_ranks, layout=held.layout),
            notices=Notices(states_inferred=False),
        ).replace(**facts._asdict())
        return with_updates(proven), held.contents
    except MALFORMED as error:
        raise CorruptCheckpoint(
            "option-invalid",
            f"{path} is not a proof: {cause(error)}",
            hint="`zckpt verify PATH --save-proof FILE` writes a proof",
            file=path,
        ) from error


def _check_groups(parameters: Mapping[str, Parameter], groups: Sequence[Any] | None) -> None:
    for name, item in parameters.items():
        if groups is None or item.group is None:
            continue
        if not 0 <= item.group < len(groups):
            raise ValueError(f"{name} is in group {item.group}, and there are {len(groups)} groups")


def _with_tensors(item: _Unsupported, entries: dict[Key, Entry]) -> StateRow:
    """Describes an optimizer state that zckpt cannot convert, with its tensors.

    The tensors are removed from `entries`, so that they do not count as ordinary tensors.
    """
    tensors = tuple(entries.pop(key) for key in map(key_of, item.tensors) if key in entries)
    # if some tensors are missing
    content = item.content if len(tensors) == len(item.tensors) else ""
    parameters, reason = item.parameters, item.reason
    return StateRow(item.key, "unsupported", parameters, content, reason, tensors=tensors)


def _dictionary(document: Mapping[str, Any]) -> dict[str, Any]:
    return convert(from_json(document), dict[str, Any])


def _by_parameter(parameters_by_state: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Any]]:
    """Turns `{state: parameters}` into `{parameter: {state: True}}`.

    True stands for the state's value, which files of older zckpt versions do not contain.
    """
    keys = by_key((name, key) for key, names in parameters_by_state.items() for name in names)
    return {name: dict.fromkeys(own, True) for name, own in keys.items()}
