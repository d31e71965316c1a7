"""Converts a manifest to the names and tensors in files of `save_pretrained`; reads no tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ...core.checkpoint.dtypes import SIZES
from ...core.checkpoint.entries import Entry, Key
from ...core.checkpoint.manifest import Manifest, Parameter
from ...core.checkpoint.weights import WEIGHTS
from ...core.grouping import by_key
from ...errors import InconsistentCheckpoint, UnsupportedCheckpoint, WrongOption, listed
from ..names import names_of
from ..views import View, view_of
from .rules import NameMatch, SavingRule, SavingRules, rules_of
from .steps import converted


def as_saved(manifest: Manifest, config: Mapping[str, Any]) -> Manifest:
    """Converts a manifest to the names and tensors that `save_pretrained` would write.

    `config` is the model's configuration. A manifest that already has such names is returned as it
    is. Otherwise, replicas are dropped. An optimizer state of another shape than its parameter is
    not cut or joined, and keeps its name.

    Raises UnsupportedCheckpoint for tensors that do not fit, and InconsistentCheckpoint if two
    tensors would get one name.
    """
    rules, names = rules_of(config), names_of(manifest)
    if rules is None or any(f".{mark}." in f".{n}." for mark in rules.marks for n in names):
        return manifest
    groups = _groups(rules, names)
    if all(group.rule is None and name in group.names.values() for name, group in groups.items()):
        return manifest
    return _Translation(manifest, rules, groups).manifest()


class NameGroup(Struct, eq=False):
    """The names of tensors that one rule converts together, such as those of gate and up.

    `names` maps the index of the rule's source pattern to the name that matches this pattern. If
    `rule` is None, there is only one name (at 0), and its tensor is not changed.
    """

    rule: SavingRule | None
    match: NameMatch | None
    names: dict[int, str] = field(default_factory=dict)


def _groups(rules: SavingRules, names: Sequence[str]) -> dict[str, NameGroup]:
    """Groups the names of tensors that are converted together.

    A group's key is the new name of its tensors, or the first one if there are several.
    """
    groups: dict[str, NameGroup] = {}
    for name in names:
        rule, match = rules.converter(name) or (None, None)
        if rule is None or match is None:
            key, number = rules.renamed(name), 0
        else:
            key, number = match.with_target(rule.targets[0]), match.number
        group = groups.setdefault(key, NameGroup(rule, match))
        if number in group.names:
            raise InconsistentCheckpoint(
                "names-collide",
                f"{group.names[number]} and {name} would both become {key}",
                hint="the names may be of two models: see `zckpt inspect PATH --tensors '*'`",
                subject=name,
            )
        group.names[number] = name
    return groups


class _Translation(Struct, eq=False, dict=True):
    source: Manifest
    rules: SavingRules
    groups: Mapping[str, NameGroup]
    entries: dict[Key, Entry] = field(default_factory=dict)
    parameters: dict[str, Parameter] = field(default_factory=dict)
    buffers: list[str] = field(default_factory=list)
    owners: dict[str, str] = field(default_factory=dict)  # the source's parameters by new names
    new: dict[str, list[str]] = field(default_factory=dict)  # by a name of the source

    def __post_init__(self) -> None:
        entries = self.source.entries.values()
        self.of = by_key((e.parameter if e.slot != "state" else "", e) for e in entries)

    def manifest(self) -> Manifest:
        """Builds the manifest with the new names and tensors."""
        source = self.source
        for key, group in self.groups.items():
            if group.rule is None:
                self._rename(group.names[0], key)
            else:
                self._convert(group, group.rule)
        for entry in self.of.get("", ()):
            self._enter(entry)
        order = source.state.get("module") or ()
        state = {
            **source.state,
            "module": [new for name in order for new in self.new.get(name, [name])],
        }
        return source.replace(
            entries=self.entries,
            parameters=self.parameters,
            buffers=tuple(self.buffers),
            replicas=(),
            inferred=tuple(new for name in source.notices.inferred for new in self.new[name]),
            state=state if order else source.state,
            states=source.states.with_numbers_of(self.owners),
        )

    def _enter(self, entry: Entry) -> None:
        if self.entries.setdefault(entry.key, entry) is not entry:
            raise InconsistentCheckpoint(
                "names-collide", f"two tensors would become {entry.name}", subject=entry.name
            )

    def _rename(self, old: str, new: str) -> None:
        self.new[old] = [new]
        if old in self.source.parameters:
            about = self.source.parameters[old]
            aliases = tuple(map(self.rules.renamed, about.aliases))
            self.parameters[new] = replace(about, aliases=aliases)
            self.owners[new] = old
        elif old in self.source.buffers:
            self.buffers.append(new)
        for entry in self.of.get(old, ()):
            self._enter(replace(entry, parameter=new))

    def _convert(self, group: NameGroup, rule: SavingRule) -> None:
        """Adds the converted tensors of a group: weights, masters, and each optimizer state."""
        by_slot = by_key(
            (entry.slot, (number, entry))
            for number, name in group.names.items()
            for entry in self.of.get(name, ())
        )
        for slot, parts in ((slot, dict(own)) for slot, own in by_slot.items()):
            if self._is_whole(group, parts):
                self._enter_converted(group, rule, slot, parts)
            elif slot in WEIGHTS:
                raise UnsupportedCheckpoint(
                    "type-unsupported",
                    f"save_pretrained joins {listed([*group.names.values()], 3)} into one tensor, "
                    "but their weights have several types, or one of them has only a master",
                    hint="`zckpt convert --weights-only` writes these weights under their names in "
                    "the module",
                )
            else:
                for entry in parts.values():
                    self._enter(entry)

    def _is_whole(self, group: NameGroup, parts: Mapping[int, Entry]) -> bool:
        """Whether the tensors of one slot (such as `exp_avg`) in a group can be converted.

        This needs a tensor for each weight of the group, of the same shape, and all of one type.
        """
        parameters = self.source.parameters
        fits = all(
            entry.parameter not in parameters or entry.shape == parameters[entry.parameter].shape
            for entry in parts.values()
        )
        return fits and parts.keys() == group.names.keys() and len(_types(parts)) == 1

    def _enter_converted(
        self, group: NameGroup, rule: SavingRule, slot: str, parts: Mapping[int, Entry]
    ) -> None:
        (dtype,) = _types(parts)
        names = dict.fromkeys(group.names.values())
        for name, view in self._views(group, rule, parts).items():
            self._enter(Entry(name, slot, dtype, view.shape, view.fragments))
            owner = next(iter(names))
            first = self.source.parameters.get(owner)
            if first is None:
                self.buffers += [name] * (name not in self.buffers)
            else:
                self.parameters[name] = replace(first, shape=view.shape, aliases=())
                self.owners[name] = owner
            for old in names:
                new = self.new.setdefault(old, [])
                new += [name] * (name not in new)

    def _views(
        self, group: NameGroup, rule: SavingRule, parts: Mapping[int, Entry]
    ) -> dict[str, View]:
        """Applies `rule` to tensors of one slot, such as `exp_avg`; returns them by new names.

        `parts` maps the index of a source pattern of the rule to the tensor. Raises WrongOption for
        means of replicas, and UnsupportedCheckpoint if config.json does not fit.
        """
        if any(entry.mean for entry in parts.values()):
            raise WrongOption(
                "options-conflict",
                "--replicas mean does not work here: the target has tensors that save_pretrained "
                "cuts or joins, and zckpt computes the mean of complete tensors only",
                hint="choose the replica of one rank with --replicas rank0, or convert with "
                "--replicas mean first, and then convert the result",
            )
        views = {
            number: view_of(entry.fragments, entry.shape, SIZES[entry.dtype])
            for number, entry in parts.items()
        }
        assert group.match is not None
        try:
            tensors = converted(views, rule.targets, rule.steps, self.rules.size)
        except (ValueError, IndexError) as error:
            raise UnsupportedCheckpoint(
                "model-config-wrong",
                f"config.json says that {listed([*group.names.values()], 3)} become "
                f"{listed(rule.targets, 3)}, but that is not possible: {error}",
                hint="give the configuration of this model: --config config.json",
            ) from None
        return {
            self.rules.renamed(group.match.with_target(target)): view
            for target, view in tensors.items()
        }


def _types(parts: Mapping[int, Entry]) -> set[str]:
    return {entry.dtype for entry in parts.values()}
