"""Renames parameters: from names in files of `save_pretrained` to names in the model's modules.

The result can be compared with a manifest of the model. transformers' rules convert only from
modules to files. To reverse them, they are first applied to an artificial manifest, in which every
tensor of a module is a file of its own. The result shows which of these tensors each element of the
real files belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ...core.checkpoint.dtypes import SIZES
from ...core.checkpoint.entries import Entry, Key
from ...core.checkpoint.manifest import Manifest, Parameter, Run
from ...core.grouping import by_key
from ...core.storage.fragments import ZEROS, Extent, Fragment, Runs, solid
from ...errors import ZckptError
from ...training.trainers import json_of
from ..names import names_of
from ..ties import CONFIG
from .rules import rules_of
from .translate import as_saved

BYTE = "U8"


def spelled_as(other: Manifest, first: Manifest) -> Manifest:
    """Gives the tensors of `other` the names and shapes that they have in `first`.

    One of the two may have names of the model's modules, and the other names of `save_pretrained`.
    Returns `other` unchanged if both have the same kind of names, or if no config.json beside them
    fits.
    """
    theirs, own_names = {*names_of(first)}, {*names_of(other)}
    for siblings in (first.files.siblings, other.files.siblings) if theirs != own_names else ():
        config = json_of(siblings, CONFIG)
        if config is None or rules_of(config) is None:
            continue
        try:
            if theirs & own_names < theirs.intersection(names_of(saved := as_saved(other, config))):
                return saved
            if theirs & own_names < own_names.intersection(names_of(as_saved(first, config))):
                return as_modules(other, first, config)
        except ZckptError:  # the config is of another model
            continue
    return other


class ModuleSpan(Struct, frozen=True):
    """A part of a module's tensor, and the place of its elements in a file's tensor.

    at             the index of the part's first element in the module's tensor
    name           the tensor in a file that has the part
    start, stop    the part's elements in the file's tensor: [start, stop)
    """

    at: int
    name: str
    start: int
    stop: int


def as_modules(saved: Manifest, model: Manifest, config: Mapping[str, Any]) -> Manifest:
    """Converts a manifest of files to the names and tensors of the module.

    `model` is a manifest of the same model with the module's names. Tensors without a counterpart
    in `model` keep their names.
    """
    blank = _blank(model)
    places = by_key(
        (run.extent.file, ModuleSpan(run.extent.offset, entry.parameter, run.start, run.stop))
        for entry in as_saved(blank, config).entries.values()
        for run in entry.fragments.runs(0, entry.numel, SIZES[entry.dtype])
    )
    places.pop(ZEROS, None)
    parameters: dict[str, Parameter] = {}
    owners: dict[str, str] = {}
    buffers: list[str] = []
    entries: dict[Key, Entry] = {}
    taken, moved = set[str](), set[Key]()
    saved_names = {*saved.parameters, *saved.buffers}
    spelled = {own[0].name: name for name, own in places.items()}
    for name, spans_of_name in places.items():
        files = {place.name for place in spans_of_name}
        if not files <= saved_names:
            continue
        shape = blank.parameters[name].shape
        about = saved.parameters.get(spans_of_name[0].name)
        if about is None:
            buffers.append(name)
        else:
            aliases = tuple(spelled.get(alias, alias) for alias in about.aliases)
            parameters[name] = replace(about, shape=shape, aliases=aliases)
            owners[name] = spans_of_name[0].name
        for slot in saved.slots:
            keys = [(place.name, slot) for place in spans_of_name]
            parts = [saved.entries[key] for key in keys if key in saved.entries]
            whole = _joined((name, slot), shape, spans_of_name, parts)
            if whole is not None:
                entries[whole.key] = whole
                moved |= {*keys}
        taken |= files
    rest = {name: about for name, about in saved.parameters.items() if name not in taken}
    other_entries = {key: entry for key, entry in saved.entries.items() if key not in moved}
    return saved.replace(
        entries=entries | other_entries,
        parameters=parameters | rest,
        states=saved.states.with_numbers_of(owners | {name: name for name in rest}),
        buffers=(*buffers, *(name for name in saved.buffers if name not in taken)),
        replicas=(),
        inferred=(),
        state={key: value for key, value in saved.state.items() if key != "module"},
    )


def _blank(model: Manifest) -> Manifest:
    """An artificial manifest in which each tensor of the module is a file with the tensor's name.

    Every element is one byte, so that the byte offset in such a file is the element's index.
    """
    owners = model.owners
    parameters: dict[str, Parameter] = {}
    entries: dict[Key, Entry] = {}
    for name in names_of(model):
        owner = owners.get(name, name)
        shape = model.shape_of(owner)
        parameters[name] = Parameter(shape)
        count = prod(shape)
        fragments = solid(count, Extent(name, 0, count))
        entries[name, "param"] = Entry(name, "param", BYTE, shape, fragments)
    return Manifest("", "", Run(), entries, parameters)


def _joined(
    key: Key, shape: tuple[int, ...], places: Sequence[ModuleSpan], parts: Sequence[Entry]
) -> Entry | None:
    """The module's tensor with this key and shape, joined from tensors in files (`parts`).

    `places` says, for each of the `parts`, which of its elements belong to the module's tensor, and
    where. None if types or sizes do not fit.
    """
    if len(parts) < len(places) or len({entry.dtype for entry in parts}) > 1:
        return None
    first = parts[0]
    if any(place.stop > entry.numel for place, entry in zip(places, parts, strict=True)):
        return None
    if len(parts) == 1 and first.shape == shape:
        return replace(first, parameter=key[0])
    runs = [
        Fragment(run.start + shift, run.stop + shift, run.extent)
        for place, entry in zip(places, parts, strict=True)
        for shift in [place.at - place.start]
        for run in entry.fragments.runs(place.start, place.stop, SIZES[entry.dtype])
    ]
    runs.sort(key=lambda run: run.start)
    return Entry(*key, first.dtype, shape, Runs(runs))
