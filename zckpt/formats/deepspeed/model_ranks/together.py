"""What do the manifests of several model ranks have in common, and where do they contradict?

Each model rank is read as a checkpoint by itself. Their groups, steps, counters and loss scales
must be those of one save; what a program keeps per rank is the first one's, and the rest is listed.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ....core.inert import alike, to_json
from ....core.manifest import Entry, Manifest, Parameter
from ....core.states import (
    BESIDE,
    NO_PARAMETER,
    OTHER,
    PARTITIONS,
    others_of,
    partitions_of,
    tensors_in,
)
from ....core.states import beside as beside_of
from ....errors import InconsistentCheckpoint, UnsupportedCheckpoint
from ....training import steps
from ...strangers import BESIDE_STATE, unread

Groups = tuple[dict[str, Any], ...] | None
OF_RANKS = ("lr_scheduler", "data_sampler", "random_ltd", "client_state", "module_extra")
OF_ONE_RANK = ("members", OTHER, BESIDE)  # of the optimizer
MIXED = "files of different saves seem to be mixed; take those of one tag"


def merged(manifests: Sequence[Manifest]) -> Manifest:
    """The first model rank, with what all of them have together, whatever the axis.

    Its entries and parameters are its own still, and the replicas are those of its `state`, which
    lacks numbers that ranks have of their own: these are not read. Raises InconsistentCheckpoint
    for mixed saves.
    """
    first = manifests[0]
    for other in manifests[1:]:
        for what, key in (("its counters", "counters"), ("its loss scale", "optimizer")):
            if _of_all(other.state.get(key)) != _of_all(first.state.get(key)):
                raise InconsistentCheckpoint(
                    f"{_file_of(other)} differs from {_file_of(first)} in {what}", hint=MIXED
                )
    state_copies = [
        entry
        for other in manifests[1:]
        for entry in other.entries.values()
        if entry.slot == "state" and (own := first.entries.get(entry.name)) is not None
        if (own.dtype, own.shape) == (entry.dtype, entry.shape)
    ]
    once = {
        field: tuple(dict.fromkeys(item for each in manifests for item in getattr(each, field)))
        for field in ("steps", "left_out", "warnings", "inferred")
    }
    once["left_out"] = tuple(dict.fromkeys([*once["left_out"], *_own_values(manifests)]))
    numbers = _own_numbers(manifests)
    return replace(
        first,
        state=_without_numbers(first, numbers),
        replicas=tuple(state_copies),
        records=tuple(record for each in manifests for record in each.records),
        files=tuple(file for each in manifests for file in each.files),
        of_ranks=_of_ranks(manifests),
        layout={name: values for each in manifests for name, values in each.layout.items()},
        unread=(
            *(
                replace(item, tensors=tuple(_of_rank(number, entry) for entry in item.tensors))
                for number, each in enumerate(manifests)
                for item in each.unread
            ),
            *(unread(k, (NO_PARAMETER,), BESIDE_STATE, own, ()) for k, own in numbers.items()),
        ),
        **once,
    )


def _of_rank(number: int, entry: Entry) -> Entry:
    """An entry with a name that no other model rank's has."""
    return replace(entry, name=f"{number}:{entry.name}")


def _of_all(values: Mapping[str, Any] | None) -> object:
    """Without what is of single parameters, of which each stage has others, or of no parameter."""
    return to_json({k: v for k, v in (values or {}).items() if k not in OF_ONE_RANK})


def _own_numbers(manifests: Sequence[Manifest]) -> dict[str, list[Any]]:
    """By key, the values of all ranks beside the optimizer's states, if they are not alike."""
    beside = [beside_of(manifest) for manifest in manifests]
    values = {key: [own.get(key) for own in beside] for each in beside for key in each}
    return {k: own for k, own in values.items() if not all(alike(each, own[0]) for each in own)}


def _without_numbers(manifest: Manifest, gone: Collection[str]) -> dict[str, Any]:
    """Its state without what stands under these keys beside the optimizer's states."""
    if not gone:
        return manifest.state
    rest = {key: value for key, value in beside_of(manifest).items() if key not in gone}
    optimizer = {k: v for k, v in manifest.state["optimizer"].items() if k != BESIDE}
    return {**manifest.state, "optimizer": optimizer | ({BESIDE: rest} if rest else {})}


def _file_of(manifest: Manifest) -> str:
    return next((file for file in manifest.files if "model_states" in file), manifest.root)


def _of_ranks(manifests: Sequence[Manifest]) -> dict[str, Mapping[str, Any]]:
    """What the files of further ranks state otherwise than those of the first model rank."""
    differing = {name: values for each in manifests for name, values in each.of_ranks.items()}
    first = manifests[0].state
    for other in manifests[1:]:
        own = {
            key: to_json(other.state.get(key))
            for key in OF_RANKS
            if to_json(other.state.get(key)) != to_json(first.get(key))
        }
        if own:
            name = os.path.basename(_file_of(other))
            differing[name] = {**own, **differing.get(name, {})}
    return differing


def _own_values(manifests: Sequence[Manifest]) -> list[str]:
    """What other model ranks keep in another form than the first: it is left out, and named.

    A tensor in the client state is left out too: it may be a rank's own random state.
    """
    first, lines = manifests[0].state, set()
    for other in manifests[1:]:
        state = other.state
        ours, theirs = first.get("client_state") or {}, state.get("client_state") or {}
        tensors = [entry.parameter for entry in other.entries.values() if entry.slot == "state"]
        for key in ours.keys() | theirs.keys():
            inside = f"client_state.{key}"
            has_tensors = any(
                name == inside or name.startswith((f"{inside}.", f"{inside}[")) for name in tensors
            )
            if has_tensors or to_json(ours.get(key)) != to_json(theirs.get(key)):
                lines.add(f"client_state {key!r} of model ranks other than 0")
        for key in ("lr_scheduler", "data_sampler", "random_ltd"):
            if to_json(first.get(key)) != to_json(state.get(key)):
                lines.add(f"{key} of model ranks other than 0")
    return sorted(lines)


def require_alike(root: str, name: str, first: Parameter, copy: Parameter, stage: int) -> None:
    """Raises InconsistentCheckpoint if a stage has a tied parameter otherwise than the first."""
    if (first.shape, first.group) != (copy.shape, copy.group):
        raise InconsistentCheckpoint(
            f"{root}: {name} has the shape {list(first.shape)} in one stage of the pipeline, and "
            f"{list(copy.shape)} in stage {stage}, or another group"
        )


# -- states that are not read


def as_unread(manifest: Manifest, reason: str) -> Manifest:
    """The manifest whose states that are neither slots nor numbers are listed as not read."""
    others, parts = others_of(manifest), partitions_of(manifest)
    if not others and not parts:
        return manifest
    names: dict[str, dict[str, None]] = {}
    values: dict[str, list[Any]] = {}
    for name, own in others.items():
        for key, value in own.items():
            if value is not None:
                names.setdefault(str(key), {})[name] = None
                values.setdefault(str(key), []).append(value)
    for part in parts:
        for key, value in part["states"].items():
            names.setdefault(str(key), {}).update(dict.fromkeys(part["parameters"]))
            values.setdefault(str(key), []).append(value)
    entries = dict(manifest.entries)
    states = []
    for key, value in values.items():
        tensors = [entries.pop(f"{name}/state", None) for name in tensors_in(value)]
        known = [entry for entry in tensors if entry is not None]
        is_whole = len(known) == len(tensors)  # a stage of a pipeline lacks those of others
        state = unread(key, names[key], reason, value, known)
        states.append(state if is_whole else replace(state, content="", tensors=()))
    optimizer = {
        key: value
        for key, value in manifest.state["optimizer"].items()
        if key not in (OTHER, PARTITIONS)
    }
    gone = manifest.entries.keys() - entries.keys()
    return replace(
        manifest,
        entries=entries,
        replicas=tuple(entry for entry in manifest.replicas if entry.name not in gone),
        state={**manifest.state, "optimizer": optimizer},
        unread=(*manifest.unread, *states),
    )


# -- groups


def joined_groups(manifests: Sequence[Manifest]) -> tuple[list[Manifest], Groups]:
    """The manifests with one numbering of groups, and these groups.

    A stage drops groups of which it has no parameter (DeepSpeed 0.19.8), so its groups are some of
    all groups, in the same order, and known by their hyper-parameters. Raises UnsupportedCheckpoint
    if these do not tell which ones.
    """
    groups: list[dict[str, Any]] = max((list(m.groups or ()) for m in manifests), key=len)
    every = [to_json(group) for group in groups]
    if any(manifest.groups is None for manifest in manifests):
        return list(manifests), None
    renumbered = []
    for manifest in manifests:
        own = [to_json(group) for group in manifest.groups or ()]
        places = _places(own, every)
        if places is None:
            raise InconsistentCheckpoint(
                f"{_file_of(manifest)} has groups with other hyper-parameters than other model "
                "ranks",
                hint=MIXED,
            )
        if places != _places(own[::-1], every[::-1], len(every) - 1):
            raise UnsupportedCheckpoint(
                f"{manifest.root}: a stage of the pipeline has {len(manifest.groups or ())} of "
                f"{len(groups)} groups, and their hyper-parameters do not tell which",
                hint="give each group of the optimizer other hyper-parameters, such as a name",
            )
        numbers = dict(enumerate(places))
        parameters = {
            name: replace(item, group=None if item.group is None else numbers[item.group])
            for name, item in manifest.parameters.items()
        }
        renumbered.append(replace(manifest, parameters=parameters))
    return renumbered, tuple(groups)


def _places(
    some: Sequence[Any], groups: Sequence[Any], last: int | None = None
) -> list[int] | None:
    """The first places that groups can have among all groups, in order; None if they have none.

    With `last`, the number of the last group, both are reversed: then these are the last places.
    """
    places: list[int] = []
    at = 0
    for group in some:
        while at < len(groups) and groups[at] != group:
            at += 1
        if at == len(groups):
            return None
        places.append(at)
        at += 1
    return places if last is None else [last - place for place in reversed(places)]


# -- steps


def with_agreed_steps(manifest: Manifest, policy: str | None) -> Manifest:
    """All parameters of a group share a step, as one optimizer updates them together.

    Stages keep it by themselves. Raises InconsistentCheckpoint if they differ and no policy
    decides; `keep` keeps them.
    """
    if policy == steps.KEEP:
        return manifest
    places: dict[int | None, list[tuple[str, Any]]] = {}
    for name, parameter in manifest.parameters.items():
        if parameter.step is not None:
            places.setdefault(parameter.group, []).append((name, parameter.step))
    agreed = {group: steps.agree(items, policy) for group, items in places.items()}
    return replace(
        manifest,
        parameters={
            name: item if item.step is None else replace(item, step=agreed[item.group])
            for name, item in manifest.parameters.items()
        },
    )


def check_equal(manifests: Sequence[Manifest]) -> None:
    """All model ranks of one save have the same groups and steps.

    A parameter has one step wherever it is. So has a group, unless a rank counts each parameter by
    itself (stage 0). Raises InconsistentCheckpoint.
    """
    renumbered, groups = joined_groups(manifests)
    if groups is None:
        return
    places: dict[str | int, dict[Any, str]] = {}
    counts_each: set[int] = set()
    for manifest in renumbered:
        of_rank: dict[int, set[Any]] = {}
        for name, parameter in manifest.parameters.items():
            if parameter.step is None or parameter.group is None:
                continue
            of_rank.setdefault(parameter.group, set()).add(parameter.step)
            for key in (name, parameter.group):
                places.setdefault(key, {}).setdefault(parameter.step, _file_of(manifest))
        counts_each |= {group for group, values in of_rank.items() if len(values) > 1}
    for key, of_step in places.items():
        if len(of_step) > 1 and key not in counts_each:
            (one, first), (other, second) = sorted(of_step.items())[:2]
            raise InconsistentCheckpoint(
                f"the optimizer's step is {one} in the model rank of {first}, and {other} in that "
                f"of {second}",
                hint=MIXED,
            )


def same_parameter(name: str, copies: Mapping[str, Parameter], policy: str | None) -> Parameter:
    """What model ranks say of one parameter, beside its shape; `copies` are by where they are."""
    first = next(iter(copies.values()))
    places = [(f"{name}, {where}", each.step) for where, each in copies.items()]
    known = [(where, step) for where, step in places if step is not None]
    if 0 < len(known) < len(places):
        raise InconsistentCheckpoint(f"only some tensor ranks hold a step of {name}", hint=MIXED)
    for each in copies.values():
        ours, theirs = (
            (item.trainable, item.group, item.scalars, item.aliases) for item in (first, each)
        )
        if ours != theirs:
            raise InconsistentCheckpoint(
                f"tensor ranks differ in the group or the numbers of {name}", hint=MIXED
            )
    policy = None if policy == steps.KEEP else policy
    return replace(first, step=steps.agree(known, policy))
