"""`--like RUN`: puts a source's values under the names and groups of an existing run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from ..core.checkpoint.entries import Entry, Key
from ..core.checkpoint.inert import by_value
from ..core.checkpoint.manifest import Manifest, Parameter
from ..core.checkpoint.optimizer_states import States
from ..core.checkpoint.weights import states_by_weight
from ..core.grouping import by_key
from ..errors import InconsistentCheckpoint, MissingData, Notice, WrongOption, listed
from ..training.hyperparameters import given_groups
from ..training.optimizers import keep_other_states
from ..training.options import GROUPS_FROM, Options

Group = dict[str, Any]


class Template:
    """An existing run (`--like RUN`) filled with a source's weights, states, steps and groups.

    Run and source must have the same parameters with the same shapes. Only a vocabulary may have
    more rows in the run, as padding: `rows` has the number of rows without padding, by the weight's
    name. `spelled` turns a name of the source into the run's spelling.
    """

    way_to_groups = "give a run whose groups have the same parameters as the source's groups"
    """The hint for an error about groups that do not fit the run."""

    def __init__(
        self,
        source: Manifest,
        run: Manifest,
        options: Options,
        rows: Mapping[str, int],
        spelled: Callable[[str], str] = str,
    ) -> None:
        self.source = source
        self.run = run
        self.options = options
        self.rows = rows
        self.warnings: list[Notice] = []
        self.owners = self._owners(spelled)

    def _owners(self, spelled: Callable[[str], str]) -> dict[str, str]:
        """Maps every weight and buffer of the run to its name in the source.

        Raises MissingData if one of the two lacks a parameter of the other, or has it in another
        shape.
        """
        source, run = self.source, self.run
        names_in_source = {spelled(name): name for name in (*source.parameters, *source.buffers)}
        tied, second = source.owners, by_key((name, alias) for alias, name in run.owners.items())
        wanted = (*run.parameters, *run.buffers)
        owners: dict[str, str] = {}
        for name in wanted:
            names = (name, *second.get(name, ()))
            owners_of_name = [
                every[each] for every in (names_in_source, tied) for each in names if each in every
            ]
            owners |= {name: owners_of_name[0]} if owners_of_name else {}
        lost = [name for name in wanted if name not in owners]
        extra_states = sorted({*names_in_source.values()}.difference(owners.values()))
        if lost or extra_states:
            sides = {"only the source has": extra_states, "only --like has": lost}
            text = "; ".join(f"{what} {listed(names, 4)}" for what, names in sides.items() if names)
            raise MissingData(
                "like-does-not-fit",
                f"{source.root} and --like {run.root} have different parameters: {text}",
                hint="give a run of the same model; if only the names differ: --rename "
                "REGEX=REPL, or --family for those of Hugging Face",
                file=source.root,
            )
        wrong = [
            f"{name} ({list(shape)} and {list(self.shape(name))})"
            for name, owner in owners.items()
            if not self.fits(name, shape := source.shape_of(owner))
        ]
        if wrong:
            raise MissingData(
                "like-does-not-fit",
                f"some tensors have other shapes in {source.root} than in --like {run.root}: "
                f"{listed(wrong, 4)}",
                hint="give a run of the same model; if the source has q, k, v or gate, up as "
                "separate weights: --family packs them for a run of Megatron-Core",
                file=source.root,
            )
        return owners

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a weight or a buffer in the run of `--like`."""
        return self.run.shape_of(name)

    def fits(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a source's shape fits the run's weight `name`.

        Shapes fit if they are equal, or if the run has more rows that only pad the vocabulary.
        """
        wanted = self.shape(name)
        if shape == wanted or name not in self.rows or shape[1:] != wanted[1:]:
            return shape == wanted
        return self.rows[name] <= shape[0] < wanted[0]

    def entries(self) -> dict[Key, Entry]:
        """The source's tensors of model and optimizer, with the names of the `--like` run."""
        names = by_key((owner, name) for name, owner in self.owners.items())
        renamed = [
            replace(entry, parameter=name)
            for entry in self.source.entries.values()
            if entry.slot != "state"
            for name in names.get(entry.parameter, ())
        ]
        return {entry.key: entry for entry in renamed}

    def parameters(self) -> dict[str, Parameter]:
        """The run's parameters with the source's steps and shapes."""
        parameters = {}
        for name, like in self.run.parameters.items():
            owner = self.owners[name]
            # files of full tensors do not distinguish buffers from frozen weights
            parameter = self.source.parameters.get(owner) or Parameter(self.source.shape_of(owner))
            parameters[name] = replace(
                parameter, trainable=like.trainable, group=like.group, aliases=like.aliases
            )
        return parameters

    @property
    def own_states(self) -> States:
        """The source's optimizer states that are not tensors of a parameter's shape.

        States of one number, such as NAdam's `mu_product`, get the run's parameter names. Tensors
        of a parameter's shape are in `entries`.
        """
        return self.source.states.with_numbers_of(
            {name: self.owners[name] for name in self.run.parameters}
        )

    def check_states(self, entries: Mapping[Key, Entry]) -> None:
        """Raises unless source and run train the same weights and have the same optimizer states.

        WrongOption is raised if the optimizers differ. MissingData names a weight whose states
        differ. With `--groups-from`, a parameter that was never updated may lack its states.
        """
        source, run = self.source, self.run
        if keep_other_states(source.optimizer, run.optimizer):
            raise WrongOption(
                "like-does-not-fit",
                f"the optimizer of {source.root} is {source.optimizer}, but that of --like is "
                f"{run.optimizer}",
                hint="give a run with the optimizer of the source, or add --weights-only",
            )
        states_of_source, wanted = (
            states_by_weight(each.values()) for each in (entries, run.entries)
        )
        for name, parameter in run.parameters.items():
            of_source = states_of_source.get(name, set())
            of_run = wanted.get(name, of_source if parameter.trainable else set())
            owner = source.parameters.get(self.owners[name])
            begins = owner is not None and not owner.updated and self.options[GROUPS_FROM]
            if of_source != of_run and not begins:
                raise MissingData(
                    "like-does-not-fit",
                    f"{name} has the states {_listed(of_source)} in {source.root}, but "
                    f"{_listed(of_run)} in --like {run.root}",
                    hint="both must have the same optimizer and train the same weights; if they "
                    f"do not train the same: {self.way_to_groups}; or add --weights-only",
                    file=source.root,
                    subject=name,
                )

    def own_groups(self, keys: Callable[[int], Iterable[str]]) -> dict[int, tuple[str, Group]]:
        """Finds, for each group of the run, the source's group with the same parameters.

        Returns {number of the run's group: (name of its first parameter, source's group)}.
        `keys(number)` names the hyper-parameters to compare. Raises InconsistentCheckpoint if the
        source has different values of these for parameters of one group.
        """
        groups = given_groups(self.source, self.options)
        chosen: dict[int, tuple[str, Group]] = {}
        for name, item in self.run.parameters.items():
            parameter = self.source.parameters.get(self.owners[name])
            if item.group is None or not item.trainable or parameter is None:
                continue
            other = groups[parameter.group or 0]
            first, group = chosen.setdefault(item.group, (name, other))
            wrong = [
                key
                for key in keys(item.group)
                if by_value(group.get(key)) != by_value(other.get(key))
            ]
            if wrong:
                raise InconsistentCheckpoint(
                    "like-does-not-fit",
                    f"{first} and {name} are in one group of the --like run, but the source has "
                    f"different values of {listed(wrong)} for them",
                    hint=self.way_to_groups,
                    subject=name,
                )
        return chosen


def _listed(slots: set[str]) -> str:
    return listed(sorted(slots)) if slots else "none"
