"""Decides whether a program can load a checkpoint unchanged: its ranks, engine and model must fit.

Each format provides functions that compare these: `Functions.obstacles`, `missing`, `unlike`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import formats
from ..core.checkpoint.facts import FlatBufferEngine
from ..core.checkpoint.manifest import Manifest
from ..core.grouping import by_key
from ..errors import Notice, counted, listed, problem, warning
from ..formats.options import Keywords, options_of
from ..training import batches

WAY_TO_GROUPS = "reshard --groups-from RUN writes the program's groups and hyper-parameters"
OF_TARGETS = Keywords.__annotations__


def of_target(words: Mapping[str, Any]) -> dict[str, Any]:
    """Selects the options that describe the target; the others say how the source is read."""
    return {name: value for name, value in words.items() if name in OF_TARGETS}


def obstacles(manifest: Manifest, words: Mapping[str, Any]) -> list[Notice]:
    """The reasons why the checkpoint's engine cannot load it on the requested number of ranks.

    `words` are options, among them the sizes (such as `dp`). Empty if the engine can load it.
    """
    find = formats.named(manifest.format).functions.obstacles
    return find(manifest, options_of(of_target(words))) if find else []


def missing_of(manifest: Manifest, to: str, words: Mapping[str, Any]) -> list[Notice]:
    """Lists values that a program of the format `to` needs, and that the checkpoint lacks.

    A conversion to that format, with the options `words`, cannot add them.
    """
    find = formats.named(to).functions.missing
    return find(manifest, options_of(of_target(words))) if find else []


def batch_changes(
    manifest: Manifest, words: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]
) -> list[Notice]:
    """A warning that says how to keep the global batch, if the number of ranks changes.

    The list is empty if one of `lines`, the report's notices so far, warns of this already.
    """
    ranks, origin, engine = words["dp"], manifest.run.origin, manifest.run.engine
    config = engine.config if isinstance(engine, FlatBufferEngine) else None
    of_zero = config is not None or manifest.format == "onnxruntime"  # others state no size
    is_told = any(line["code"] == batches.CHANGES for line in lines)
    if not of_zero or origin.dp is None or is_told:
        return []
    config = config if words.get("config") is None else words["config"]
    sp = words.get("sp") or origin.sequence_ranks(ranks)
    return batches.of_next_run(manifest, ranks, config, sp)


def unlike(manifest: Manifest, other: Manifest, by_place: bool) -> list[Notice]:
    """Compares a checkpoint's names, shapes and param groups with those of a run (`other`).

    Different groups are a problem if the loader matches parameters by their position in the groups
    (`by_place`), and only a warning otherwise.
    """
    # types are not compared, because loaders cast tensors
    own_shapes, wanted = _shapes(manifest), _shapes(other)
    own_names, in_model = (
        {*side, *m.owners} for side, m in ((own_shapes, manifest), (wanted, other))
    )
    lines = []
    for names, side, what in (
        (own_shapes, in_model, "that the model lacks"),
        (wanted, own_names, "that only the model has"),
    ):
        if alone := [name for name in names if name not in side]:
            message = f"parameters {what}: {listed(alone, 4)}"
            lines.append(problem("parameters-differ", message, subject=alone[0]))
    differing = [name for name in own_shapes if name in wanted and own_shapes[name] != wanted[name]]
    lines += [
        problem(
            "parameters-differ",
            f"{name} has the shape {list(own_shapes[name])}, but the model's is "
            f"{list(wanted[name])}",
            subject=name,
        )
        for name in differing[:4]
    ]
    if lines or manifest.groups is None:
        return lines
    if other.groups is None:
        message = f"{other.root} does not state which parameters its optimizer's groups contain"
        return [warning("not-compared", message, subject="param_groups", file=other.root)]
    differences = _other_groups(_members(manifest, other), _members(other, other))
    if differences and not by_place:
        name, message = differences[0]
        message += (
            "; states are loaded by name, but a parameter may get another group's "
            "hyper-parameters: "
            f"{WAY_TO_GROUPS}"
        )
        return [warning("groups-differ", message, subject=name)]
    hint = f"{WAY_TO_GROUPS}; or give the program's optimizer the groups of the checkpoint"
    return [problem("groups-differ", text, subject=name, hint=hint) for name, text in differences]


def engine_differences(
    manifest: Manifest, other: Manifest, to: str, words: Mapping[str, Any]
) -> list[Notice]:
    """Lists settings of the engine, such as the ZeRO stage, that differ in the run `other`.

    Only settings that change files count, and a scheduler that only the run has. The list is empty
    if `words` have a ds_config, or if `to` or a checkpoint's format is not DeepSpeed.
    """
    find = formats.named(to).functions.unlike
    if find is None or not to == manifest.format == other.run.origin.format:
        return []
    return find(manifest, other, options_of(of_target(words)))


def _shapes(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    shapes = {name: parameter.shape for name, parameter in manifest.parameters.items()}
    entries = {name: manifest.entries.get((name, "param")) for name in manifest.buffers}
    return shapes | {name: entry.shape for name, entry in entries.items() if entry}


def _members(manifest: Manifest, other: Manifest) -> list[list[str]]:
    """Lists, for each param group, its trained parameters under the names that `other` uses.

    Groups without trained parameters are left out.
    """
    groups = by_key(
        (parameter.group or 0, name if name in other.parameters else other.owners.get(name, name))
        for name, parameter in manifest.parameters.items()
        if parameter.trainable
    )
    return [groups[number] for number in sorted(groups)]


def _other_groups(
    own_groups: Sequence[Sequence[str]], wanted: Sequence[Sequence[str]]
) -> list[tuple[str, str]]:
    """Lists how two divisions of parameters into param groups differ, as (parameter, sentence).

    `own_groups` are the checkpoint's groups and `wanted` the program's: lists of names. If one of
    them has parameters that the other one lacks, only this is listed.
    """
    places, new = (
        {n: i for i, names in enumerate(side) for n in names} for side in (own_groups, wanted)
    )
    only = [
        (names[0], f"{trains} {listed(names, 4)}, and {does_not} does not")
        for names, trains, does_not in (
            ([name for name in places if name not in new], "the checkpoint trains", "the program"),
            ([name for name in new if name not in places], "the program trains", "the checkpoint"),
        )
        if names
    ]
    if only:
        return only
    moved = [name for name in places if places[name] != new[name]]
    if moved:
        first, more = moved[0], counted(len(moved) - 1, "more parameter")
        message = f"{first} is in group {places[first]}, but in the program in group {new[first]}"
        return [(first, message + (f" ({more} like it)" if len(moved) > 1 else ""))]
    for number, (names, wanted_names) in enumerate(zip(own_groups, wanted, strict=True)):
        for place, (name, another) in enumerate(zip(names, wanted_names, strict=True)):
            if name != another:
                text = f"parameter {place} of group {number} is {name}, in the program {another}"
                return [(name, text)]
    return []
