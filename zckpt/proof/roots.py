"""Selects one of several models from a proof file, which has checksums of all their tensors."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ..core.checkpoint.manifest import Manifest, fitting_roots
from ..core.checkpoint.states import entries_in
from ..errors import AmbiguousCheckpoint, WrongOption, listed


def of_root(proven: Manifest, name: str, manifest: Manifest) -> Manifest:
    """Reduces the manifest `proven`, which is about several models, to the model `name`.

    `proven` is from a file of `verify --save-proof`, `manifest` is the compared checkpoint's. The
    model's prefix is removed from the names of its parameters. A proof of one model is returned
    unchanged. Raises WrongOption if neither manifest has a model of this name.
    """
    front = f"{name}."
    every = (*proven.parameters, *proven.buffers)
    short_names = {each: each.removeprefix(front) for each in every if each.startswith(front)}
    if not short_names:
        if manifest.run.origin.root != name:
            raise WrongOption(
                "option-names-nothing",
                f"neither {manifest.root} nor {proven.root} has a model that is called {name}",
                hint="leave out --root",
            )
        return proven
    other_names = {*every} - short_names.keys()
    parameters = {
        short_names[key]: item for key, item in proven.parameters.items() if key in short_names
    }
    used = sorted({item.group for item in parameters.values() if item.group is not None})
    places = {group: place for place, group in enumerate(used)}
    # a checkpoint of weights may state the groups of parameters without hyper-parameters
    groups = tuple(proven.groups[group] for group in used) if proven.groups else ()
    states = proven.states.where(lambda row: not other_names.intersection(row.parameters))
    of_others = [row.value for row in proven.states if other_names.intersection(row.parameters)]
    gone = {*entries_in(of_others)}
    states, tensors = states.renamed(short_names)
    return proven.replace(
        origin=replace(proven.run.origin, root=name),
        entries={
            new.key: new
            for entry in proven.entries.values()
            if entry.parameter not in other_names and entry.key not in gone
            for name in [tensors.get(entry.parameter, entry.parameter.removeprefix(front))]
            for new in [replace(entry, parameter=name)]
        },
        parameters={
            key: replace(
                item,
                group=None if item.group is None else places[item.group],
                aliases=tuple(alias.removeprefix(front) for alias in item.aliases),
            )
            for key, item in parameters.items()
        },
        buffers=tuple(short_names[key] for key in proven.buffers if key in short_names),
        groups=groups or None,
        optimizer=manifest.optimizer if "," in (proven.optimizer or "") else proven.optimizer,
        state={key: _own_part(key, value, front) for key, value in proven.state.items()},
        states=states,
    )


def refuse_several(proven: Manifest, manifest: Manifest) -> None:
    """Raises AmbiguousCheckpoint if a proof file is about several models, and one must be chosen.

    This is so if the compared checkpoint seems to be one of these models. `proven` is the manifest
    in the proof file, and `manifest` is the manifest of the checkpoint.
    """
    parameters, names = proven.parameters, [*manifest.parameters]
    if not names or not parameters.keys().isdisjoint(names):
        return
    last = f".{names[0]}"
    fronts = (key.removesuffix(last) for key in parameters if key.endswith(last))
    if fitting := fitting_roots(fronts, parameters, manifest.parameters):
        raise AmbiguousCheckpoint(
            "several-models",
            f"{proven.root} is about several models, and {manifest.root} may be any of these: "
            f"{listed(fitting)}",
            hint=f"choose one with --root {' or --root '.join(fitting)}",
            file=proven.root,
        )


def _own_part(key: str, value: Any, front: str) -> Any:
    """Keeps the part of a proof file's value that is about the model with the prefix `front`.

    Only the values of `module` and `module_extra` contain names: the prefix is removed from names
    that have it, and other names are left out. All other values are kept whole.
    """
    if key == "module":
        return [name.removeprefix(front) for name in value if name.startswith(front)]
    if key == "module_extra":
        return _of_names(value, front)
    return value


def _of_names(values: dict[str, Any], front: str) -> dict[str, Any]:
    return {
        name.removeprefix(front): value for name, value in values.items() if name.startswith(front)
    }
