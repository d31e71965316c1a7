"""The table of optimizer states that are not tensors of their parameter's shape: a row for each.

The form of a state is one of

    number       one number of a parameter, other than its step
    other        any other value of a parameter
    partition    a state that each rank keeps for its part of a flat buffer, not for one parameter
    estimate     a hyper-parameter of a group that each rank has estimated separately
    among        a number or string in the optimizer's `state` that belongs to no parameter
    beside       a number or string beside the optimizer's `state`
    unsupported  a state in the files that no target gets: it is only compared

Tensors of a parameter's shape are entries of the manifest; `states.states_of` lists them too. The
step is not in the table: see training/steps.py. docs/format-v1.md says where a universal checkpoint
keeps each form.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from msgspec import Struct, convert

from ..grouping import by_key
from .entries import Entry
from .inert import Scalar, TensorName, inside, map_values, to_json

Form = Literal[
    "number", "other", "partition", "estimate", "among", "beside", "wrapper", "unsupported"
]
"""The form of an optimizer state: the top of this module lists all forms but `wrapper`.

A `wrapper` state has tensors that are stored next to the optimizer's state dict (wrapper.py). No
manifest's table contains this form.
"""
OF_NO_PARAMETER: tuple[Form, ...] = ("among", "beside")
OF_OTHERS = "optimizer.other"
"""The prefix of the names of tensors in optimizer states of the form `other`.

In these states, tensors have another shape than the parameter, or lie in lists or the like.
"""


class Part(Struct, frozen=True):
    """How the data-parallel ranks cut one flat buffer: into `dp` parts.

    `starts` has the index, in the buffer, of each parameter's first element.
    """

    stage: int | None
    dp: int
    starts: tuple[int, ...]


class StateRow(Struct, frozen=True):
    """One optimizer state that is not a tensor of its parameter's shape.

    key           the key in the optimizer's state, such as `mu_product`
    form          the kind of state; the top of this module lists the forms
    parameters    the parameters with the state; exactly one for the forms `number` and `other`
    value         plain data; a list of all ranks' values for the forms `partition` and `estimate`;
                  JSON text or "" for the form `unsupported`
    reason        form `unsupported`: why no target gets the state
    group         form `estimate`: the number of the param group
    part          form `partition`: how ranks cut the flat buffer
    tensors       form `unsupported`: the tensors in the state
    """

    key: Any
    form: Form
    parameters: tuple[str, ...] = ()
    value: Any = None
    reason: str = ""
    group: int | None = None
    part: Part | None = None
    tensors: tuple[Entry, ...] = ()


class States(Struct, frozen=True, dict=True):
    """A manifest's table of the optimizer states that are not tensors of a parameter's shape.

    Each row is one state. Rows with the same form (kind of value) and parameter are adjacent.
    """

    rows: tuple[StateRow, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.rows)

    def __add__(self, rows: Iterable[StateRow]) -> "States":
        return States((*self.rows, *rows))

    def __iter__(self) -> Iterator[StateRow]:
        return iter(self.rows)

    def of_form(self, *forms: Form) -> list[StateRow]:
        return [row for form in forms for row in self._by_form.get(form, ())]

    def where(self, test: Callable[[StateRow], object]) -> "States":
        return States(tuple(filter(test, self.rows)))

    def without_form(self, *forms: Form) -> "States":
        return self.where(lambda row: row.form not in forms)

    def numbers(self, form: Form) -> dict[Any, Any]:
        """Maps keys to values that belong to the optimizer, and to no single parameter.

        `form` is `among` for values inside the optimizer's dictionary `state`, `beside` for values
        next to this dictionary.
        """
        return {row.key: row.value for row in self.of_form(form)}

    @cached_property
    def scalars(self) -> dict[str, dict[str, Scalar]]:
        """Maps each parameter to its one-number states, such as `{"mu_product": Scalar(...)}`."""
        return self._by_parameter("number")

    @cached_property
    def other_values(self) -> dict[str, dict[Any, Any]]:
        """Maps each parameter to its states that are neither tensors of its shape nor numbers."""
        return self._by_parameter("other")

    def by_rank(self, groups: int) -> list[dict[Any, Any]]:
        """Lists the hyper-parameters that ranks have estimated, such as Prodigy's `d`.

        Item i maps the hyper-parameters of param group i to the values of all ranks. The list is
        empty if there are none; otherwise it has at least `groups` items.
        """
        rows = self.of_form("estimate")
        last = max((row.group or 0 for row in rows), default=-1)
        values: list[dict[Any, Any]] = [{} for _ in range(max(groups, last + 1) if rows else 0)]
        for row in rows:
            values[row.group or 0][row.key] = row.value
        return values

    @cached_property
    def _by_form(self) -> dict[Form, list[StateRow]]:
        return by_key((row.form, row) for row in self.rows)

    def _by_parameter(self, form: Form) -> dict[str, dict[Any, Any]]:
        values: dict[str, dict[Any, Any]] = {}
        for row in self.of_form(form):
            values.setdefault(row.parameters[0], {})[row.key] = row.value
        return values

    def without(self, keys: Collection[str]) -> "States":
        """Drops the states whose keys are in `keys`.

        States that belong to no parameter stay. So do hyper-parameters that each rank estimates
        while it trains, such as Prodigy's `d`.
        """
        stay = (*OF_NO_PARAMETER, "estimate")
        return self.where(lambda row: row.form in stay or str(row.key) not in keys)

    def with_numbers_of(self, owners: Mapping[str, str]) -> "States":
        """Replaces the one-number states of parameters, such as their counters.

        `owners` maps a parameter to the parameter whose one-number states it gets. A parameter that
        is not in `owners` loses its one-number states.
        """
        numbers = {name: self.scalars.get(owner, {}) for name, owner in owners.items()}
        return States((*of_parameters("number", numbers), *self.without_form("number")))

    def renamed(self, names: Mapping[str, str]) -> "tuple[States, dict[str, str]]":
        """Renames parameters, and tensors inside their states.

        Returns the new states, and a dictionary from old to new names of these tensors.
        """
        tensors: dict[str, str] = {}

        def moved(value: Any, old: str, new: str) -> Any:
            if isinstance(value, TensorName) and value.name.startswith(old):
                tensors[value.name] = new + value.name[len(old) :]
                return TensorName(tensors[value.name])
            return map_values(value, lambda item, _: moved(item, old, new))

        rows = []
        for row in self.rows:
            owners, value = tuple(names.get(name, name) for name in row.parameters), row.value
            if row.form == "other":
                old, new = (inside(OF_OTHERS, own) for own in (row.parameters[0], owners[0]))
                value = moved(value, old, new)
            rows.append(_replaced(row, owners, value))
        return States(tuple(rows)), tensors


def _replaced(row: StateRow, parameters: tuple[str, ...], value: Any) -> StateRow:
    if parameters == row.parameters and value is row.value:
        return row
    return StateRow(
        row.key, row.form, parameters, value, row.reason, row.group, row.part, row.tensors
    )


NO_STATES = States()


def of_parameters(form: Form, values: Mapping[str, Mapping[Any, Any]]) -> list[StateRow]:
    """Makes rows of the given `form`; `values[parameter][key]` is the value of a state."""
    return [
        StateRow(key, form, (name,), value)
        for name, states_of_parameter in values.items()
        for key, value in states_of_parameter.items()
    ]


def unsupported(
    key: Any, parameters: Iterable[str], reason: str, value: Any, tensors: Iterable[Entry]
) -> StateRow:
    """Makes a row for a state that `verify` compares, but that no conversion can write.

    `reason` says why. `tensors` are the tensors inside `value`.
    """
    content = json.dumps(to_json(value), sort_keys=True)
    names = tuple(parameters)
    return StateRow(str(key), "unsupported", names, content, reason, tensors=tuple(tensors))


def estimates(groups: Sequence[Mapping[Any, Any]]) -> list[StateRow]:
    """Makes a row for each hyper-parameter that ranks estimate for themselves, as Prodigy does.

    `groups` has a dictionary for each param group, which maps a hyper-parameter to the values of
    all ranks.
    """
    return [
        StateRow(key, "estimate", value=value, group=number)
        for number, group in enumerate(groups)
        for key, value in group.items()
    ]


# the JSON in a universal checkpoint and a proof

OTHER, PARTITIONS, AMONG, BESIDE, BY_RANK = "other", "partitions", "among", "beside", "by_rank"
KEYS = (OTHER, PARTITIONS, AMONG, BESIDE, BY_RANK)
"""The keys of `state.optimizer` that contain states: see docs/format-v1.md."""


def with_states(state: Mapping[str, Any], states: States, groups: int) -> dict[str, Any]:
    """Adds optimizer states to the JSON `state` of a manifest, under its key `optimizer`.

    `groups` is the number of the manifest's param groups.
    """
    parts: dict[tuple[Part | None, tuple[str, ...]], dict[Any, Any]] = {}
    for row in states.of_form("partition"):
        parts.setdefault((row.part, row.parameters), {})[row.key] = row.value
    partitions = [
        {
            "stage": part.stage,
            "dp": part.dp,
            "parameters": list(parameters),
            "starts": list(part.starts),
            "states": states_of_part,
        }
        for (part, parameters), states_of_part in parts.items()
        if part is not None
    ]
    values = {
        OTHER: states.other_values,
        PARTITIONS: partitions,
        AMONG: states.numbers("among"),
        BESIDE: states.numbers("beside"),
        BY_RANK: states.by_rank(groups),
    }
    if not any(values.values()):
        return {**state}
    kept = dict(state.get("optimizer") or {})
    members = {"members": kept.pop("members")} if "members" in kept else {}
    filled = {key: value for key, value in values.items() if value}
    return {**state, "optimizer": {**kept, **filled, **members}}


class _PartJson(Struct):
    """The JSON form of states that ranks keep for their parts of a flat buffer."""

    states: dict[Any, list[Any]]
    parameters: tuple[str, ...]
    dp: int
    stage: int | None = None
    starts: tuple[int, ...] = ()


class _StatesJson(Struct):
    other: dict[str, dict[Any, Any]] = {}
    partitions: list[_PartJson] = []
    among: dict[Any, Any] = {}
    beside: dict[Any, Any] = {}
    by_rank: list[dict[Any, Any]] = []


def states_in(optimizer: Mapping[Any, Any]) -> States:
    """Parses the optimizer states in `state.optimizer`, as `with_states` writes them.

    Raises ValueError if they are malformed.
    """
    with_values = {key: optimizer[key] for key in KEYS if optimizer.get(key) is not None}
    record = convert(with_values, _StatesJson)
    rows = of_parameters("other", record.other)
    for part in record.partitions:
        rows += _of_part(part)
    rows += [StateRow(key, "among", value=value) for key, value in record.among.items()]
    rows += [StateRow(key, "beside", value=value) for key, value in record.beside.items()]
    rows += estimates(record.by_rank)
    return States(tuple(rows))


def _of_part(part: _PartJson) -> Iterator[StateRow]:
    if any(len(own) != part.dp for own in part.states.values()):
        raise ValueError(f"optimizer.{PARTITIONS} lacks the values of some ranks")
    of_ranks = Part(part.stage, part.dp, part.starts)
    for key, values in part.states.items():
        yield StateRow(key, "partition", part.parameters, values, part=of_ranks)
