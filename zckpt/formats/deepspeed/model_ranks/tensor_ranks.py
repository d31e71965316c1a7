"""How the slices of tensor ranks become whole tensors, as boxes: no byte is read.

Each tensor rank has been read as a model by itself. The rules of naming/tensor_rules.py say how
its parameters are cut. What all ranks have is taken from the first one, and the others are copies
that must be equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from msgspec.structs import replace

from ....core import slicing
from ....core.dtypes import SIZES
from ....core.fragments import Fragments
from ....core.inert import to_json
from ....core.manifest import Entry, Manifest
from ....core.weights import WEIGHTS
from ....errors import InconsistentCheckpoint, listed
from ....naming.tensor_families import DOUBTS
from ....naming.tensor_rules import RuleFile, Shapes, Sliced, TensorRules, decide
from ...deepspeed_states.patterns import INFO
from .together import MIXED, as_unread, merged, same_parameter
from .universal_info import UniversalInfo

SLICES_ALONE = "of several tensor ranks, zckpt joins slices of the parameters' shapes, and numbers"


def joined_slices(
    ranks: Sequence[Manifest], given: Sequence[TensorRules], step_policy: str | None
) -> Manifest:
    """The model of all tensor ranks. `given` are the user's rules, the first ones that count.

    Raises MissingData that lists parameters of which nothing says how they are cut, and
    InconsistentCheckpoint or WrongOption for rules that do not fit the ranks' shapes.
    """
    if len(ranks) > 1:
        ranks = [as_unread(rank, SLICES_ALONE) for rank in ranks]
    first = ranks[0]
    if any(to_json(rank.groups) != to_json(first.groups) for rank in ranks[1:]):
        raise InconsistentCheckpoint(
            f"{first.root}: tensor ranks differ in the hyper-parameters of groups", hint=MIXED
        )
    names = _all_names(ranks, "parameters")
    shapes: dict[str, Shapes] = {
        name: [rank.parameters[name].shape if name in rank.parameters else None for rank in ranks]
        for name in names
    }
    cut = decide(first.root, shapes, [*given, *_stated(ranks)], len(ranks))
    buffers = _buffers(ranks, given)
    by_rank = [_by_name(rank.entries) for rank in ranks]
    entries: dict[str, Entry] = {}
    replicas: list[Entry] = []
    for name, sliced in {**cut, **buffers}.items():
        for slot in dict.fromkeys(slot for each in by_rank for slot in each.get(name, {})):
            slices = [each.get(name, {}).get(slot) for each in by_rank]
            whole = _whole(f"{name}/{slot}", sliced, slices, first.root)
            entries[whole[0].name] = whole[0]
            if not (sliced.is_sum and slot in WEIGHTS):  # other parts are no copies
                replicas += whole[1:]
    replicas += _joined_replicas(ranks, {**cut, **buffers}, first.root)
    entries |= {name: e for name, e in first.entries.items() if e.slot == "state"}
    together = merged(ranks)
    parameters = {}
    for name, sliced in cut.items():
        # AutoTP leaves ranks past the last head an empty slice, which no optimizer owns
        copies = {
            f"tensor rank {number}": rank.parameters[name]
            for number, rank in enumerate(ranks)
            if name in rank.parameters
            and (0 not in rank.parameters[name].shape or 0 in sliced.shape)
        }
        parameters[name] = replace(same_parameter(name, copies, step_policy), shape=sliced.shape)
    return replace(
        together,
        entries=_in_order(entries, parameters, tuple(buffers)),
        parameters=parameters,
        buffers=tuple(buffers),
        replicas=(*together.replicas, *replicas),
        warnings=(*together.warnings, *_doubts(given, cut)),
        state={**together.state, "tensor_parallel": _facts(cut)},
    )


def _doubts(given: Sequence[TensorRules], cut: Mapping[str, Sliced]) -> Iterator[str]:
    """What the whole lacks by the user's rules, and what no file shows of them."""
    if sums := [name for name, sliced in cut.items() if sliced.is_sum]:
        yield (
            f"each tensor rank has a part of {listed(sums, 4)}: what is shown is the part of "
            "tensor rank 0, not the sum"
        )
    for rules in given:
        if isinstance(rules, RuleFile) and rules.source in DOUBTS:
            pattern, sentence = DOUBTS[rules.source]
            if names := [name for name in cut if re.fullmatch(pattern, name)]:
                yield sentence.format(names=listed(names, 4))


def _facts(cut: Mapping[str, Sliced]) -> dict[str, Any]:
    """How each parameter was cut; and of vocabularies, which rows are padding."""
    return {
        "rules": {name: sliced.rule for name, sliced in cut.items()},
        "vocabulary": {
            name: {"rows": sliced.shape[0], "used": sliced.vocabulary}
            for name, sliced in cut.items()
            if sliced.vocabulary is not None
        },
    }


def _stated(ranks: Sequence[Manifest]) -> Iterator[TensorRules]:
    """The rules that the checkpoint states; all ranks must state the same."""
    stated = [(rank.state.get("client_state") or {}).get(INFO) for rank in ranks]
    if any(to_json(info) != to_json(stated[0]) for info in stated[1:]):
        raise InconsistentCheckpoint(f"{ranks[0].root}: tensor ranks differ in {INFO}", hint=MIXED)
    if isinstance(stated[0], Mapping):
        yield UniversalInfo(stated[0])


def _all_names(ranks: Sequence[Manifest], field: str) -> list[str]:
    """Names of any rank, in the order of the first one; AutoTP may leave a rank nothing."""
    return list(dict.fromkeys(name for rank in ranks for name in getattr(rank, field)))


def _buffers(ranks: Sequence[Manifest], given: Sequence[TensorRules]) -> dict[str, Sliced]:
    """Buffers are whole on all ranks, unless the user's rules or their shapes say otherwise."""
    decided: dict[str, Sliced] = {}
    undecided: dict[str, Shapes] = {}
    for name in _all_names(ranks, "buffers"):
        shapes = [
            rank.entries[f"{name}/param"].shape if f"{name}/param" in rank.entries else None
            for rank in ranks
        ]
        own = (rules.sliced(name, shapes) for rules in given if isinstance(rules, RuleFile))
        sliced = next((each for each in own if each is not None), None)
        shape = shapes[0]
        if sliced is None and shape is not None and len(set(shapes)) == 1:
            sliced = Sliced(shape, slicing.replicated(shape, len(ranks)), "replicated")
        if sliced is None:
            undecided[name] = shapes
        else:
            decided[name] = sliced
    return decided | decide(ranks[0].root, undecided, given, len(ranks))


def _by_name(entries: Mapping[str, Entry]) -> dict[str, dict[str, Entry]]:
    slots: dict[str, dict[str, Entry]] = {}
    for entry in entries.values():
        if entry.slot != "state":
            slots.setdefault(entry.parameter, {})[entry.slot] = entry
    return slots


def _whole(name: str, sliced: Sliced, slices: Sequence[Entry | None], root: str) -> list[Entry]:
    """The whole tensor; then one more for each further copy that ranks hold."""
    known = [entry for entry in slices if entry is not None]
    dtypes = {entry.dtype for entry in known}
    if len(dtypes) > 1:
        raise InconsistentCheckpoint(
            f"{root}: tensor ranks keep {name} in different types: {listed(sorted(dtypes))}"
        )
    for rank, (entry, shape) in enumerate(zip(slices, sliced.slicing.slices, strict=True)):
        if (0 if entry is None else entry.numel) != prod(shape):
            raise InconsistentCheckpoint(
                f"{root}: tensor rank {rank} lacks {name}, or has it in another size", hint=MIXED
            )
    size = SIZES[known[0].dtype]
    fragments: list[Fragments | None] = [None if e is None else e.fragments for e in slices]
    return [
        Entry(
            name,
            known[0].dtype,
            sliced.shape,
            slicing.joined(sliced.slicing, fragments, size, copy),
        )
        for copy in range(sliced.slicing.copies)
    ]


def _joined_replicas(
    ranks: Sequence[Manifest], cut: Mapping[str, Sliced], root: str
) -> Iterator[Entry]:
    """Further copies that each tensor rank has of its slices, such as those of tied layers."""
    by_name: list[dict[str, list[Entry]]] = [{} for _ in ranks]
    for own, rank in zip(by_name, ranks, strict=True):
        for entry in rank.replicas:
            if entry.slot != "state":
                own.setdefault(entry.name, []).append(entry)
    for name in dict.fromkeys(name for own in by_name for name in own):
        sliced = cut.get(name.rpartition("/")[0])
        if sliced is None:
            continue
        if sliced.is_sum and name.rpartition("/")[2] in WEIGHTS:
            continue
        if sliced.is_replicated or sliced.is_sum:
            for own in by_name:
                yield from own.get(name, ())
            continue
        for slices in zip(*(own.get(name, ()) for own in by_name), strict=False):
            yield from _whole(name, sliced, slices, root)[:1]


def _in_order(
    entries: Mapping[str, Entry], parameters: Mapping[str, Any], buffers: Sequence[str]
) -> dict[str, Entry]:
    """Entries in the order of parameters and buffers; states last."""
    place = {name: number for number, name in enumerate((*parameters, *buffers))}
    last = len(place)
    return dict(
        sorted(
            entries.items(),
            key=lambda item: last if item[1].slot == "state" else place[item[1].parameter],
        )
    )
