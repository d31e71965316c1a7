"""Finds a family's rule for a parameter's name, which is Hugging Face's or Megatron's."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct

from ...errors import MissingData, WrongOption, listed
from ..names import RENAME_HINT
from .rules import HUGGING_FACE, MEGATRON, OTHER, Family, FamilyRule

NUMBER = re.compile(r"\\\{(layer|expert)\\\}")


class NamePlace(Struct, frozen=True):
    """Which rule matches a parameter name, and as which tensor of the rule.

    `rule` and `part` are indices: of the rule in the family, and of the tensor in the rule (such as
    0 for q). `layer` and `expert` are the numbers in the name, or None.
    """

    rule: int
    part: int
    layer: int | None
    expert: int | None


class TensorGroup(Struct, frozen=True):
    """The names of source tensors that are converted together, and of the tensors they become.

    `sources` are names of the program that saved the source (Hugging Face or Megatron), `targets`
    those of the other program.
    """

    rule: FamilyRule
    sources: tuple[str, ...]
    targets: tuple[str, ...]


class FamilyNames:
    """Finds the rule of a model family that matches a parameter name.

    `side` is the program that uses the name: Hugging Face or Megatron.
    """

    def __init__(self, family: Family, side: str) -> None:
        self.patterns = [
            (_pattern(template), number, part)
            for number, rule in enumerate(family.rules)
            if rule.only in (None, side)
            for part, template in enumerate(rule.names(side))
        ]

    def place(self, name: str) -> NamePlace | None:
        for pattern, rule, part in self.patterns:
            if match := pattern.fullmatch(name):
                numbers = match.groupdict()
                layer, expert = (
                    None if (number := numbers.get(axis)) is None else int(number)
                    for axis in ("layer", "expert")
                )
                return NamePlace(rule, part, layer, expert)
        return None


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(NUMBER.sub(r"(?P<\1>0|[1-9]\\d{0,5})", re.escape(template)))


def places_of(
    family: Family, text: str, names: Collection[str]
) -> tuple[str, dict[str, NamePlace]]:
    """Tells whether names are Hugging Face's or Megatron's, and which rule matches each name.

    Raises WrongOption if no rule matches a name, or if some names are Hugging Face's and others
    Megatron's. `text` is the value of `--family`, for the message.
    """
    by_side: dict[str, dict[str, NamePlace]] = {}
    for side in (HUGGING_FACE, MEGATRON):
        spelled = FamilyNames(family, side)
        by_side[side] = {name: at for name in names if (at := spelled.place(name)) is not None}
    sides = [side for side, places in by_side.items() if places]
    if len(sides) > 1:
        examples = " and ".join(f"{next(iter(by_side[side]))} of {side}" for side in sides)
        raise WrongOption(
            "family-does-not-fit",
            f"--family {text}: the source has names of Hugging Face and of Megatron: {examples}",
            hint=RENAME_HINT,
        )
    side = sides[0] if sides else HUGGING_FACE
    if unknown := [name for name in names if name not in by_side[side]]:
        raise WrongOption(
            "family-does-not-fit",
            f"--family {text} does not know these names: {listed(unknown)}",
            hint=f"choose the family of the model, or {RENAME_HINT}",
        )
    return side, by_side[side]


def groups_of(
    family: Family, side: str, places: Mapping[str, NamePlace], experts: Mapping[str, int]
) -> list[TensorGroup]:
    """Sorts the source's tensors into groups that are converted together.

    side       the program that saved the source
    places     maps the source's names to their rules
    experts    maps the name of a tensor that stacks experts to their number

    Raises MissingData if a group lacks a tensor, such as v beside q and k.
    """
    together: dict[tuple[int, int | None, int | None], dict[tuple[int, int], str]] = {}
    for name, at in places.items():
        rule = family.rules[at.rule]
        joins_experts = rule.packing == "experts" and side == MEGATRON
        key = at.rule, at.layer, None if joins_experts else at.expert
        part = at.expert if joins_experts and at.expert is not None else at.part
        together.setdefault(key, {})[part, at.part] = name
    groups = []
    for rule_number, layer, expert in sorted(together, key=lambda at: _place_of(family, *at)):
        rule, parts = family.rules[rule_number], together[rule_number, layer, expert]
        sources = tuple(parts[key] for key in sorted(parts))
        wanted = list(_spelled(rule.names(side), layer, _numbers(rule, side, expert, len(parts))))
        if lacking := [name for name in wanted if name not in sources]:
            raise MissingData(
                "family-does-not-fit",
                f"the source has {listed(sources, 2)}, but not {listed(lacking, 4)}",
                hint="all tensors that are fused into one are needed, such as q, k and v",
            )
        target = OTHER[side]
        count = experts.get(sources[0], 0)
        numbers = _numbers(rule, target, expert, count)
        groups.append(
            TensorGroup(rule, sources, tuple(_spelled(rule.names(target), layer, numbers)))
        )
    return groups


def _numbers(rule: FamilyRule, side: str, expert: int | None, count: int) -> Sequence[int | None]:
    """The numbers of the experts in the names of a group, in the program `side`.

    In Megatron, a group has all `count` experts of a layer if Hugging Face stacks them in one
    tensor. Otherwise it has only `expert` (None if the names have no expert's number).
    """
    return range(count) if rule.packing == "experts" and side == MEGATRON else [expert]


def _spelled(
    templates: Iterable[str], layer: int | None, experts: Sequence[int | None]
) -> Iterable[str]:
    for expert in experts:
        for template in templates:
            yield template.replace("{layer}", str(layer)).replace("{expert}", str(expert))


def in_module_order(family: Family, names: Iterable[str]) -> list[str]:
    """Sorts names of Hugging Face as `named_parameters()` lists them: a bias follows its weight."""
    spelled = FamilyNames(family, HUGGING_FACE)
    modules: dict[str, int] = {}
    for rule in family.rules:
        for template in rule.hugging_face:
            modules.setdefault(template.rpartition(".")[0], len(modules))

    def key(name: str) -> tuple[int, int, int, int, int]:
        at = spelled.place(name)
        assert at is not None, name
        stage, layer, rule, expert = _place_of(family, at.rule, at.layer, at.expert)
        module, _, kind = family.rules[at.rule].hugging_face[at.part].rpartition(".")
        inside = modules[module] if at.layer is not None else rule
        return stage, layer, inside, expert, kind == "bias"

    return sorted(names, key=key)


def _place_of(
    family: Family, rule: int, layer: int | None, expert: int | None
) -> tuple[int, int, int, int]:
    """A sort key for the order of the module's parameters.

    Parameters before the layers come first, then the parameters of each layer, then those after the
    layers. `rule` is the index of a rule in the family.
    """
    if layer is not None:
        return 1, layer, rule, expert or 0
    inside = [n for n, item in enumerate(family.rules) if "{layer}" in item.hugging_face[0]]
    return (0 if rule < inside[0] else 2), 0, rule, 0
