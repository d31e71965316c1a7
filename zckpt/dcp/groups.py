"""Finds a checkpoint's hyper-parameters for the param groups of a running program's optimizer.

The program's groups may have another order than the checkpoint's, or be parts of these. So a group
of the program gets its value from the checkpoint's groups that contain its parameters, not from the
group with the same number. The values of these groups must be equal. The members of the program's
groups do not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from msgspec import Struct, field

from ..core.checkpoint.inert import alike
from ..core.grouping import by_key
from ..errors import InconsistentCheckpoint
from ..training import steps
from ..training.trainers import number
from .keys import KeyMeaning, KeyNames


class Groups(Struct, frozen=True, eq=False, dict=True):
    """Looks up hyper-parameters in a checkpoint for the parameter groups of a running program.

    state    the program's flattened state dict
    keys     maps its keys of hyper-parameters to their meanings
    members  the names of the parameters in each group of the program's optimizer, if it was given
    """

    names: KeyNames
    members: Sequence[Sequence[str]]
    state: Mapping[str, Any]
    keys: Mapping[str, KeyMeaning]
    _sources: dict[str, dict[int, str]] = field(default_factory=dict)

    def values(self, meaning: KeyMeaning) -> list[Any]:
        """Finds the source's value of a hyper-parameter for a group of the program.

        Returns a list with this value, or an empty list if the source has none (the value itself
        may be None). Raises InconsistentCheckpoint if the parameters of the program's group have
        different values in the source.
        """
        groups = self._groups
        values = [
            (name, groups[place][meaning.slot])
            for place, name in self.sources(meaning).items()
            if place < len(groups) and meaning.slot in groups[place]
        ]
        for name, value in values[1:]:
            if not alike(number(values[0][1]), number(value)):
                raise InconsistentCheckpoint(
                    "program-does-not-fit", self._difference(meaning, values[0], (name, value))
                )
        return [value for _, value in values[:1]]

    @cached_property
    def _groups(self) -> Sequence[Mapping[str, Any]]:
        """The source's parameter groups.

        They include the step if the source's optimizer keeps it there.
        """
        manifest = self.names.manifest
        groups, place = manifest.groups or (), steps.torch_place(manifest)
        if place.where != "group":
            return groups
        return [
            {**group, "step": place.number(steps_of_group.pop()).unwrapped()}
            if len(steps_of_group) == 1
            else group
            for group, steps_of_group in zip(
                groups, steps.steps_of_groups(manifest, len(groups)), strict=True
            )
        ]

    def _difference(self, meaning: KeyMeaning, a: tuple[str, Any], b: tuple[str, Any]) -> str:
        group = f"one group of the state dict contains {a[0]} and {b[0]}"
        way_out = "build the optimizer with the source's groups"
        if meaning.name:
            group = f"the frozen {meaning.name} may be in the group of {a[0]} or of {b[0]}"
            way_out = "leave it out of the optimizer, or pass model= and optimizer="
        return (
            f"{group}, but their {meaning.slot} differs in the source ({number(a[1])} and "
            f"{number(b[1])}): {way_out}"
        )

    def sources(self, meaning: KeyMeaning) -> dict[int, str]:
        """Finds the source's groups that contain parameters of one group of the program.

        Maps the number of each such group to the name of one of these parameters. `meaning` tells
        which group of the program: it is the `KeyMeaning` of any hyper-parameter of the group.
        """
        parameters = self.names.manifest.parameters
        parameter = parameters.get(meaning.name)
        if parameter is not None and parameter.group is not None:
            return {parameter.group: meaning.name}
        name_or_front = meaning.name or meaning.front
        if name_or_front not in self._sources:
            groups = (
                (parameters[name].group, name)
                for name in self._companions(meaning)
                if name in parameters
            )
            self._sources[name_or_front] = {n: name for n, name in groups if n is not None}
        return self._sources[name_or_front]

    def _companions(self, meaning: KeyMeaning) -> Sequence[str]:
        """The source's names of all parameters in one parameter group of the program.

        `meaning` is that of any hyper-parameter in the group. If the program's groups are unknown,
        parameters with equal hyper-parameters count as one group.
        """
        if not meaning.name:  # a numbered group
            listed = self.state.get(f"{meaning.front}params")
            return self._source_names(listed if isinstance(listed, (list, tuple)) else ())
        # torch takes a group's values from the group's first parameter. That may be frozen, and no
        # file states the group of a frozen parameter
        for group in map(self._source_names, self.members):
            if meaning.name in group:
                return group
        return next(group for group in self._equal_groups if meaning.name in group)

    def _source_names(self, listed: Iterable[str | int]) -> list[str]:
        return [pair[0] for pair in map(self.names.parameter, listed) if pair is not None]

    @cached_property
    def _equal_groups(self) -> list[list[str]]:
        """Groups the parameters of a flattened state dict by equal hyper-parameters.

        Returns their names.
        """
        values: dict[str, dict[str, str]] = {}
        for key, meaning in self.keys.items():
            if meaning.name:
                values.setdefault(meaning.name, {})[meaning.slot] = repr(self.state.get(key))
        groups = by_key((tuple(sorted(hyper.items())), name) for name, hyper in values.items())
        return list(groups.values())
