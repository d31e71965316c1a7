"""Checks that a source has all weights for `from_pretrained`, and finds a prefix of their names.

weights.json lists the weights of 1,651 model classes of transformers (5.24); `python -m
tests.weight_names` makes it. It lists only weights that a class has for all settings of its
configuration. If one is missing, a part of the model would keep random numbers. The source's names
may have a prefix, if the model was an attribute of the trained module (`self.llm =
AutoModelForCausalLM...`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pkgutil import get_data
from typing import Any

from msgspec import Struct

from ..core.checkpoint.manifest import Manifest
from ..core.grouping import by_key
from ..errors import AmbiguousCheckpoint, MissingData, Notice, counted, listed, warning
from . import peft, ties
from .names import names_of, renamed
from .saving.rules import SavingRules, rules_of

NUMBER, OF_PEFT = "#", "base_model."


class Settled(Struct, frozen=True):
    """A source whose parameter names are now those that its model class loads, with warnings.

    `is_asked` is False if the names were not checked, because zckpt's table lacks the class.
    """

    source: Manifest
    is_asked: bool = True
    warnings: tuple[Notice, ...] = ()


def settled(source: Manifest, config: Mapping[str, Any]) -> Settled:
    """Removes a prefix, such as `llm.`, from the source's names if from_pretrained needs that.

    `config` is config.json, which names the model class. Raises MissingData if the source lacks a
    weight of the class, and AmbiguousCheckpoint if it has several models of the class.
    """
    asked = Asked.by(config)
    if asked is None:
        classes = config.get("architectures")
        name = classes[0] if isinstance(classes, list) and classes else None
        message = (
            f"config.json names {name or 'no class'}, whose weights zckpt does not know, so it did "
            "not check whether from_pretrained finds all of them"
        )
        return Settled(source, False, (warning("not-compared", message, subject=name),))
    names = names_of(source)
    prefix = _prefix_of_model(source, names, asked)
    if prefix:
        source = renamed(source, [(f"^{re.escape(prefix)}", "")])
    warnings = [] if not prefix else [_without(prefix, f"{asked.name} finds its weights")]
    inside = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    parameters = {*source.parameters, *source.owners}
    further = [
        n for n in names_of(source) if n in parameters and not (n in inside and asked.has(n))
    ]
    if further:
        message = f"{listed(further, 4)}: {asked.name} has no such weights, and does not load them"
        warnings.append(warning("weights-omitted", message, subject=further[0]))
    return Settled(source, True, tuple(warnings))


def _without(prefix: str, so_that: str) -> Notice:
    message = f"{prefix}: this prefix is removed from the names, so that {so_that}"
    return warning("name-changed", message, subject=prefix)


def settled_adapter(source: Manifest, _config: Mapping[str, Any]) -> Settled:
    """Removes what stands before PEFT's own prefix `base_model.` in an adapter's names (PEFT 0.21).

    Raises MissingData if PEFT would not find the adapter's weights.
    """
    names = [name for name in names_of(source) if peft.is_adapters(name)]
    # VeRA's shared matrices are in the adapter itself, not in the model within it
    fronts = {name.partition(OF_PEFT)[0] if OF_PEFT in name else None for name in names}
    if fronts == {""}:
        return Settled(source)
    if len(fronts) == 1 and (front := fronts.pop()) is not None:
        said = _without(front, "PEFT finds the adapter's weights")
        return Settled(renamed(source, [(f"^{re.escape(front)}", "")]), True, (said,))
    raise MissingData(
        "program-does-not-fit",
        f"{source.root} has adapter weights with different prefixes before {OF_PEFT}, so PEFT "
        f"would not load them: {listed(names, 3)}",
        hint="choose one adapter, and replace the prefix of its names (FRONT) by PEFT's: --rename "
        f"'^FRONT={peft.PREFIX}'",
        file=source.root,
    )


def _prefix_of_model(source: Manifest, names: Collection[str], asked: Asked) -> str:
    """Finds the prefix, such as `llm.`, before the model class's names in the source; "" if none.

    Raises MissingData if the source lacks weights of the class (`asked`), and AmbiguousCheckpoint
    if it has several models of the class.
    """
    prefixes = asked.prefixes(names)
    lacking = {
        (prefix, as_base): asked.missing(_below(names, prefix), as_base)
        for as_base in (False, True)
        for prefix in ("", *prefixes)
    }
    if not lacking["", False]:
        return ""
    whole = [p for p in prefixes if not lacking[p, False]]
    if len(whole) == 1 and all(name.startswith(whole[0]) for name in names):
        return whole[0]
    if not lacking["", True]:
        return ""
    whole = whole or [p for p in prefixes if not lacking[p, True]]
    if len(whole) == 1:
        return whole[0]
    if whole:
        raise AmbiguousCheckpoint(
            "several-models",
            f"{source.root} has several models of the class {asked.name}: {listed(whole)}",
            hint=f"choose one with --rename '^{re.escape(whole[0])}='",
            file=source.root,
        )
    best, _ = min(lacking, key=lambda key: len(lacking[key]))
    missing = lacking[best, True]
    first = f"--rename '^{re.escape(best or 'PREFIX.')}='"
    raise MissingData(
        "program-does-not-fit",
        f"{source.root} lacks {counted(len(missing), 'weight')} of {asked.name}, which "
        f"from_pretrained would initialize at random: {listed(missing, 3)}"
        + (f" (below {best})" if best else ""),
        hint=f"if the source has these weights under other names: {first}, or --rename "
        f"'OLD={missing[0]}'; if a weight is tied to another one: --tie {missing[0]}=OWNER",
        file=source.root,
    )


def _below(names: Collection[str], prefix: str) -> set[str]:
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


class Asked(Struct, frozen=True):
    """The weights that from_pretrained loads for a model class, from zckpt's table of classes.

    base        the class's `base_model_prefix`, which names may lack or have twice
    patterns    names of the weights, with `#` for a layer's number
    ties        maps second names of tied weights, which need not be saved, to first names
    rules       how names in files differ from names in the module
    """

    name: str
    base: str
    patterns: tuple[str, ...]
    ties: Mapping[str, str]
    rules: SavingRules | None

    @classmethod
    def by(cls, config: Mapping[str, Any]) -> Asked | None:
        """Finds what zckpt knows about the model class that config.json names.

        None for an unknown class, and for a model with code of its own (`auto_map`).
        """
        classes = config.get("architectures")
        name = classes[0] if isinstance(classes, list) and classes else None
        about = _table()["models"].get(name) if isinstance(name, str) else None
        if about is None or "auto_map" in config:  # the class has its own code
            return None
        patterns = tuple(_names(about["weights"], _table()["parts"]))
        return cls(str(name), about["prefix"], patterns, ties.of_config(config), rules_of(config))

    def prefixes(self, names: Collection[str]) -> list[str]:
        """Finds prefixes that may stand before the model class's names in the source's `names`.

        For example, if the class has a weight `lm_head.weight`, the prefix in `llm.lm_head.weight`
        is `llm.`.
        """
        ends = [*(p for p in self.patterns if NUMBER not in p), *self.patterns[:1]]
        ends += [pattern.removeprefix(f"{self.base}.") for pattern in ends]
        fronts = {
            name.removesuffix(end)
            for end in (f".{end.replace(NUMBER, '0')}" for end in ends)
            for name in names
            if name.endswith(end)
        }
        return sorted(f"{prefix}." for prefix in fronts)

    def has(self, name: str) -> bool:
        """Whether `name` may be a weight of the model class: it begins with one of its modules.

        Always True if transformers renames the class's weights in files (`rules`).
        """
        tops = {pattern.partition(".")[0] for pattern in self.patterns}
        inside = {
            pattern.removeprefix(f"{self.base}.").partition(".")[0] for pattern in self.patterns
        }
        return name.partition(".")[0] in tops | inside or self.rules is not None

    def missing(self, names: Collection[str], as_base: bool) -> list[str]:
        """The model class's weights that from_pretrained would not find among `names`.

        With `as_base`, a weight is also found if its name in `names` lacks the base model's prefix
        (such as `model.`), or has the prefix once more.
        """
        layers = by_key(self._layers_in(names))
        lacking: list[str] = []
        for pattern in self.patterns:
            before, number, after = pattern.partition(NUMBER)
            if not number:
                lacking += [] if self._is_found_in(names, pattern, as_base) else [pattern]
                continue
            numbers = sorted({*layers.get(before, ())}) or [0]
            full = {n: f"{before}{n}{after}" for n in range(numbers[-1] + 1)}
            absent = [n for n, name in full.items() if not self._is_found_in(names, name, as_base)]
            # a layer of another kind has other weights in the same module
            module = after[1:].partition(".")[0]
            if len(absent) < len(full):
                front = {f"{before}{n}.{module}.": n for n in absent}
                kinds = {n for begin, n in front.items() if self._begins(names, begin, as_base)}
                absent = [n for n in absent if n not in kinds]
            lacking += [full[n] for n in absent]
        return lacking

    def _layers_in(self, names: Collection[str]) -> Iterator[tuple[str, int]]:
        """Yields (text before the number, number) for layers in `names`: ("model.layers.", 3)."""
        fronts = {p.partition(NUMBER)[0] for p in self.patterns if NUMBER in p}
        for name in names:
            for front in fronts:
                for begin in {front, front.removeprefix(f"{self.base}."), f"{self.base}.{front}"}:
                    digits = name.removeprefix(begin).partition(".")[0]
                    if name.startswith(begin) and digits.isdecimal():
                        yield front, int(digits)

    def _is_found_in(self, names: Collection[str], name: str, as_base: bool) -> bool:
        """Whether from_pretrained finds the weight `name` among `names`.

        It also finds a weight under the name that transformers' rules give it in files, or under a
        name that is tied to it. A weight that such a rule converts counts as found.
        """
        tied = [self.ties.get(name), *(a for a, owner in self.ties.items() if owner == name)]
        for spelled in filter(None, (name, *tied)):
            if not self._spellings(spelled, as_base).isdisjoint(names):
                return True
        return self.rules is not None and self.rules.converter(name) is not None

    def _spellings(self, name: str, as_base: bool) -> set[str]:
        """All names under which from_pretrained finds the weight `name`.

        `name` may also be only the beginning of a name.
        """
        names = {name, self.rules.renamed(name) if self.rules else name}
        if not as_base or not self.base:
            return names
        base = f"{self.base}."
        return names | {n.removeprefix(base) for n in names} | {f"{base}{n}" for n in names}

    def _begins(self, names: Collection[str], front: str, as_base: bool) -> bool:
        fronts = tuple(self._spellings(front, as_base))
        return any(name.startswith(fronts) for name in names)


def _names(tree: Any, parts: Sequence[Any], front: str = "") -> Iterator[str]:
    """Yields the names of weights in weights.json's nested dictionaries: the keys joined by dots.

    A number in place of an inner dictionary is an index in `parts`, a list of inner dictionaries
    that several models share.
    """
    for word, inner in (parts[tree] if type(tree) is int else tree).items():
        if inner == {}:
            yield f"{front}{word}"
        else:
            yield from _names(inner, parts, f"{front}{word}.")


@cache
def _table() -> dict[str, Any]:
    """The content of weights.json: {"models": {class name: facts}, "parts": [shared facts]}."""
    document = json.loads(get_data(__package__, "weights.json") or b"")
    models = {name: item for item in document["models"] for name in item["classes"]}
    return {"models": models, "parts": document["parts"]}
