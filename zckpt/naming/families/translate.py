"""Converts a Hugging Face model's manifest to the Megatron-Core model's manifest, and back.

A parameter's weight, master and moments are all converted, because they have the same shape. No
tensor is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ...core.checkpoint.dtypes import SIZES
from ...core.checkpoint.entries import Entry, Key
from ...core.checkpoint.facts import FlatBufferEngine
from ...core.checkpoint.manifest import Manifest, Parameter
from ...core.checkpoint.optimizer_states import OF_OTHERS
from ...core.grouping import by_key
from ...errors import (
    InconsistentCheckpoint,
    MissingData,
    Notice,
    UnsupportedCheckpoint,
    WrongOption,
    listed,
    note,
)
from ..names import canonical, names_of
from ..views import View, view_of
from .layouts import LAYOUTS, Misfit
from .matching import TensorGroup, groups_of, in_module_order, places_of
from .rules import HUGGING_FACE, OTHER, Family, family_of
from .sizes import parsed, sizes_of


def translated(manifest: Manifest, text: str, config: str | None = None) -> Manifest:
    """Converts a manifest from names and shapes of Hugging Face to Megatron-Core's, or back.

    The source's names determine the direction. `text` is the value of `--family`. `config` is the
    path of config.json, or of its folder; None if the user gives none. Replicas are dropped.

    Raises WrongOption for names or sizes that do not fit, MissingData for an unknown size or a
    missing tensor, InconsistentCheckpoint if tensors that become one differ in type, step or
    hyper-parameters, and UnsupportedCheckpoint for tensors that no rule can convert.
    """
    name, given = parsed(text)
    family = family_of(name)
    manifest = canonical(manifest)
    if any(entry.mean for entry in manifest.entries.values()):
        raise WrongOption(
            "options-conflict",
            "--family does not work with --replicas mean, because it cuts and joins tensors, and "
            "zckpt computes the mean of complete tensors only",
            hint="choose the replica of one rank with --replicas rank0, or convert with "
            "--replicas mean first, and then convert the result with --family",
        )
    if isinstance(manifest.run.engine, FlatBufferEngine) and manifest.run.engine.experts:
        raise UnsupportedCheckpoint(
            "family-does-not-fit",
            f"--family cannot convert {manifest.root}, which has experts in DeepSpeed's MoE layers",
            file=manifest.root,
        )
    return _Translation(manifest, text, family, given, config).manifest()


class _Translation(Struct, eq=False, dict=True):
    source: Manifest
    text: str
    family: Family
    given: Mapping[str, int]
    config: str | None
    omitted: list[Notice] = field(default_factory=list)

    def __post_init__(self) -> None:
        source, family = self.source, self.family
        omitted = re.compile("|".join(family.buffers))
        names = names_of(source)
        self.buffers = [name for name in names if omitted.fullmatch(name)]
        weights = [name for name in names if name not in self.buffers]
        self.side, self.places = places_of(family, self.text, weights)
        if wrong := [name for name in source.buffers if name in self.places]:
            raise UnsupportedCheckpoint(
                "family-does-not-fit",
                f"{listed(wrong, 4)} should be weights, but {source.root} has them as buffers",
                file=source.root,
            )
        self.target = OTHER[self.side]
        self.sizes = sizes_of(source, family, self.given, self.target == HUGGING_FACE, self.config)
        aliases = source.owners
        own_places = {name: at for name, at in self.places.items() if name not in aliases}
        stacked = {
            name: shape[0] for name in own_places if (shape := source.parameters[name].shape)
        }
        self.groups = groups_of(family, self.side, own_places, stacked)
        second = {name: at for name, at in self.places.items() if name in aliases}
        self.second_names = {
            group.sources[0]: group.targets[0]
            for group in groups_of(family, self.side, second, {})
            if len(group.sources) == len(group.targets) == 1
        }
        tensors = (entry for entry in source.entries.values() if entry.slot != "state")
        self.of_parameter = by_key((entry.parameter, entry) for entry in tensors)

    def manifest(self) -> Manifest:
        """Builds the manifest of the target program."""
        source = self.source
        parameters: dict[str, Parameter] = {}
        owners: dict[str, str] = {}
        entries: dict[Key, Entry] = {}
        for group in self.groups:
            shapes, fact = self._shapes(group), self._fact(group)
            for name, shape in zip(group.targets, shapes, strict=True):
                parameters[name] = replace(fact, shape=shape)
                owners[name] = group.sources[0]
            for entry in self._entries(group):
                if entry.key in entries:
                    raise InconsistentCheckpoint(
                        "names-collide",
                        f"two tensors would become {entry.name}",
                        subject=entry.name,
                    )
                entries[entry.key] = entry
        kept = {
            entry.key: entry
            for entry in source.entries.values()
            if entry.slot == "state"
            and not entry.parameter.startswith(("module_extra.", f"{OF_OTHERS}."))
        }
        order = list(parameters)
        if self.target == HUGGING_FACE:
            order = in_module_order(self.family, order)
        order.sort(key=lambda name: not parameters[name].trainable)
        of_name = {name: number for number, name in enumerate(order)}
        listed_entries = sorted(entries.values(), key=lambda entry: of_name[entry.parameter])
        inferred = [
            name
            for group in self.groups
            if not set(source.notices.inferred).isdisjoint(group.sources)
            for name in group.targets
        ]
        state = {k: v for k, v in source.state.items() if k not in MODULE}
        extra = source.state.get("module_extra") or {}
        if other := source.states.other_values:
            message = f"{listed(list(other), 4)}: optimizer states that are not tensors"
            self.omitted.append(note("state-omitted", message, subject=next(iter(other))))
        return source.replace(
            entries={entry.key: entry for entry in listed_entries} | kept,
            parameters={name: parameters[name] for name in order},
            buffers=(),
            replicas=(),
            inferred=tuple(inferred),
            engine=None if source.run.engine is None else replace(source.run.engine, ordered=False),
            state=state,
            states=source.states.without_form("other").with_numbers_of(owners),
            omitted=(*source.notices.omitted, *self._omitted(list(extra))),
        )

    def _omitted(self, extra: Sequence[str]) -> Iterator[Notice]:
        if self.buffers:
            message = f"{listed(self.buffers, 4)}: buffers that {self.target} computes itself"
            yield note("state-omitted", message, subject=self.buffers[0])
        if extra:
            message = f"{listed(extra, 4)}: extra states of {self.side}'s modules"
            yield note("state-omitted", message, subject=extra[0])
        yield from self.omitted

    def _laid_out(self, group: TensorGroup, views: Sequence[View]) -> Sequence[View]:
        return LAYOUTS[group.rule.packing][self.target](views, self.sizes)

    def _shapes(self, group: TensorGroup) -> list[tuple[int, ...]]:
        """The shapes of a group's target tensors.

        Raises WrongOption if the source's shapes do not fit, and MissingData for an unknown size.
        """
        shapes = [self.source.parameters[name].shape for name in group.sources]
        try:
            blank = [View(tuple((length,) for length in shape), (), 1) for shape in shapes]
            result = [view.shape for view in self._laid_out(group, blank)]
        except Misfit as error:
            names = listed(group.sources, 3)
            if error.needs:
                sizes = ",".join(f"{key}=N" for key in error.needs)
                raise MissingData(
                    "option-needed",
                    f"{self.source.root} does not state the number of heads in {names}",
                    hint=f"give the numbers: --family {self.text.partition(':')[0]}:{sizes}",
                    file=self.source.root,
                ) from None
            raise WrongOption(
                "family-does-not-fit",
                f"--family {self.text} does not fit {names}: {error}",
                hint="check the family, and its sizes heads, kv_heads and vocab_size",
            ) from None
        if group.rule.packing == "vocabulary" and result != shapes:
            (before,), (after,) = shapes, result
            if after[0] < before[0]:
                message = (
                    f"{group.sources[0]}: rows {after[0]} to {before[0] - 1}, which only pad the "
                    "vocabulary"
                )
                self.omitted.append(note("state-omitted", message, subject=group.sources[0]))
        return result

    def _fact(self, group: TensorGroup) -> Parameter:
        """The `Parameter` of a group's target tensors: step, optimizer group and second names.

        Raises InconsistentCheckpoint if the group's tensors differ in step, hyper-parameters or
        optimizer states of one number each, or if only some are trained.
        Raises UnsupportedCheckpoint if a tied weight would be fused or split.
        """
        source, names = self.source, group.sources
        parameters = [source.parameters[name] for name in names]
        first = parameters[0]
        groups, scalars = source.groups, source.states.scalars
        for name, other in zip(names, parameters, strict=True):
            for what, a, b in (
                ("is trained:", first.trainable, other.trainable),
                ("has the step", first.step, other.step),
                ("has the numbers", *(scalars.get(each, {}) for each in (names[0], name))),
                ("has the hyper-parameters", _of(groups, first), _of(groups, other)),
            ):
                if a != b:
                    raise InconsistentCheckpoint(
                        "one-value-needed",
                        f"{names[0]} and {name} would become one tensor, but one {what} {a}, the "
                        f"other {b}",
                        hint="a fused tensor can have only one step and one optimizer group",
                        file=names[0],
                        subject=names[0],
                    )
        aliases = [self.second_names.get(alias) for item in parameters for alias in item.aliases]
        if aliases and (None in aliases or len(names) > 1 or len(group.targets) > 1):
            raise UnsupportedCheckpoint(
                "family-does-not-fit",
                f"{names[0]} is tied to {listed(first.aliases)}, so it cannot be fused with others",
                file=names[0],
                subject=names[0],
            )
        return replace(first, aliases=tuple(filter(None, aliases)))

    def _entries(self, group: TensorGroup) -> Iterator[Entry]:
        """Yields the target tensors of a group: weights, masters, and each optimizer state."""
        entries = chain.from_iterable(self.of_parameter.get(name, ()) for name in group.sources)
        for slot, entries_of_slot in by_key((entry.slot, entry) for entry in entries).items():
            having = [entry.parameter for entry in entries_of_slot]
            if lacking := [name for name in group.sources if name not in having]:
                raise MissingData(
                    "state-missing",
                    f"{listed(having, 3)} have a state {slot}, but {listed(lacking, 3)} do not",
                )
            first = entries_of_slot[0]
            if len({entry.dtype for entry in entries_of_slot}) > 1:
                raise InconsistentCheckpoint(
                    "type-unsupported",
                    f"{listed([entry.name for entry in entries_of_slot], 3)} would become one "
                    "tensor, but have "
                    f"the types {listed([entry.dtype for entry in entries_of_slot], 3)}",
                )
            if group.rule.packing == "same":
                yield replace(first, parameter=group.targets[0])
                continue
            if odd := [
                e for e in entries_of_slot if e.shape != self.source.parameters[e.parameter].shape
            ]:
                raise UnsupportedCheckpoint(
                    "state-unsupported",
                    f"{odd[0].name} has the shape {list(odd[0].shape)}, which is not that of its "
                    "weight: --family cannot convert it",
                    hint="--weights-only leaves the optimizer's states out",
                )
            views = [view_of(e.fragments, e.shape, SIZES[e.dtype]) for e in entries_of_slot]
            for name, view in zip(group.targets, self._laid_out(group, views), strict=True):
                if view is views[0]:  # nothing was packed
                    yield replace(first, parameter=name)
                else:
                    yield Entry(name, slot, first.dtype, view.shape, view.fragments)


MODULE = frozenset({"module", "module_extra", "module_metadata"})
"""Keys of `Manifest.state` that describe the source's modules; --family drops them."""


def _of(groups: Any, parameter: Parameter) -> Any:
    """The hyper-parameters of a parameter's group; None without groups."""
    return None if groups is None or parameter.group is None else groups[parameter.group]
