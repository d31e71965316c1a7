"""Selects the rules by which transformers saves a model, and applies them to parameter names.

A model may contain other models, such as the text model of LLaVA, as its configuration says. An
inner model may have rules of its own, which are found by its class or, if there are none, by its
`model_type`. They apply to the names of its parameters only. This follows
`get_model_conversion_mapping` and `revert_weight_conversion` of transformers 5.24.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pkgutil import get_data
from typing import Any

from msgspec import Struct

from ...core.checkpoint.inert import nested
from ...errors import MissingData

Step = Sequence[Any]


class NameMatch(Struct, frozen=True):
    """A match of a rule in a name: the text before `matched_text`, that text, and the text after.

    A rule has several patterns: `number` is the index of the one that matches, and `group` the text
    of its first regex group.
    """

    before: str
    matched_text: str
    after: str
    number: int
    group: str | None

    def with_target(self, target: str, add: int = 0) -> str:
        r"""The name with `target` in place of the matched text; `\1` in it stands for the group.

        `add` is added to the group, which is then a number, such as a layer's.
        """
        group = str(int(self.group or 0) + add) if add else self.group or ""
        return self.before + target.replace(r"\1", group) + self.after


class SavingRule(Struct, frozen=True):
    """A rule that turns names and tensors in memory into names and tensors in files.

    pattern    matches names; its alternatives are the named groups g0, g1, ...
    targets    replacements of the matched text, such as "mlp.experts"
    steps      operations on tensors, such as ["cut", 0]; empty if the rule only renames
    add        is added to the number in the matched text, such as a layer's
    scope      path of the inner model that the rule is for; None for the full model
    prefix     the full model's `base_model_prefix`, which may stand before `scope`
    """

    pattern: re.Pattern[str]
    targets: Sequence[str]
    steps: Sequence[Step]
    add: int
    scope: str | None
    prefix: str

    def match(self, name: str) -> NameMatch | None:
        """Where the rule matches in a name.

        None if no pattern matches, or if the name is outside of the rule's scope.
        """
        front = ""
        if self.scope is not None:
            scope = f"{self.scope}." if self.scope else ""
            prefix = f"{self.prefix}." if self.prefix else ""
            if name.startswith(prefix + scope):
                front = prefix + scope
            elif name.startswith(scope):
                front = scope
            else:
                return None
        rest = name.removeprefix(front)
        match = self.pattern.search(rest)
        if match is None:
            return None
        source = next(key for key, text in match.groupdict().items() if text is not None)
        place = self.pattern.groupindex[source]
        group = match[place + 1] if self.pattern.groups > place else None
        before, matched_text, after = rest.partition(match[0])
        return NameMatch(front + before, matched_text, after, int(source[1:]), group)

    def renamed(self, name: str) -> str:
        """The new name by a rule that only renames; `name` itself if the rule does not match."""
        match = self.match(name)
        if match is None:
            return name
        target = self.targets[match.number if len(self.targets) > 1 else 0]
        return match.with_target(target, self.add)


class SavingRules(Struct, frozen=True):
    """The rules of a model, in the order in which they are applied.

    renames       rules that only rename tensors
    converters    rules that also cut, join or reorder tensors
    marks         parts of names that only files have: a manifest with one is not converted
    sizes         numbers of the model's configuration, for the converters
    """

    renames: Sequence[SavingRule]
    converters: Sequence[SavingRule]
    marks: Sequence[str]
    sizes: Mapping[str, Any]

    def renamed(self, name: str) -> str:
        """The name after all renames, applied one after the other."""
        for rule in self.renames:
            name = rule.renamed(name)
        return name

    def converter(self, name: str) -> tuple[SavingRule, NameMatch] | None:
        """The first of `converters` that matches a name, and its match; None if there is none."""
        for rule in self.converters:
            if match := rule.match(name):
                return rule, match
        return None

    def size(self, key: str) -> int:
        """The number `key` of the configuration; raises MissingData if it is missing."""
        value = self.sizes.get(key)
        if type(value) is not int or value < 1:
            raise MissingData(
                "model-config-wrong",
                f"config.json has no number {key}, which is needed to convert tensors",
                hint="give the model's own file: --config config.json",
            )
        return value


def rules_of(config: Mapping[str, Any]) -> SavingRules | None:
    """The saving rules of the model that config.json describes.

    None if transformers saves this model under the names of its modules.
    """
    classes, kind = config.get("architectures"), config.get("model_type")
    name = str(classes[0]) if isinstance(classes, list) and classes else ""
    about = _models().get(name) or {"type": kind, "prefix": "", "modules": []}
    rules: list[SavingRule] = []
    models = [("", name, str(kind or about["type"])), *_inside(about, config)]
    for path, key in claimed(models, _table()["rules"]):
        scope = None
        if path:
            scope = path.removeprefix(about["prefix"]).removeprefix(".")
        # the rules of inner models come first
        rules = [*(_rule(item, scope, about["prefix"]) for item in rules_for(key)), *rules]
    if not rules:
        return None
    sizes = {}
    for key, (*path, default) in about.get("sizes", {}).items():
        stated_size = nested(config, *path)
        sizes[key] = default if stated_size is None else stated_size
    return SavingRules(
        [rule for rule in rules if not rule.steps],
        [rule for rule in rules if rule.steps],
        about.get("saved", ()),
        sizes,
    )


Inner = tuple[str, str, str]
"""An inner model: its path in the full model, its class and its type."""


def _inside(
    about: Mapping[str, Any], config: Mapping[str, Any], above: str = ""
) -> Iterator[Inner]:
    """Yields the inner models of a model, such as its language model, at all depths.

    `about` is the outer model's entry in table.json, and `config` its configuration. `above` is its
    path in the full model.
    """
    outer_paths: list[str] = []
    for path, name, kind, where, chooser in about["modules"]:
        if any(path.startswith(f"{other}.") for other in outer_paths):
            continue
        inner = nested(config, *filter(None, where.split(".")))
        model_type = inner.get("model_type") if isinstance(inner, Mapping) else None
        model_type = model_type if isinstance(model_type, str) else None
        full = f"{above}.{path}" if above else path
        if model_type is None or model_type == kind or chooser is None or not where:
            yield full, name, kind
            continue
        outer_paths.append(path)
        chosen = _table()["classes"][chooser].get(model_type, "")
        yield full, chosen, model_type
        if chosen in _models():
            yield from _inside(_models()[chosen], inner, full)


def claimed(models: Sequence[Inner], rules: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields each model that has rules: its path, and its key in the table of rules.

    The key is the model's class or type. A model is skipped if a model that contains it has the
    same rules.
    """
    seen: dict[str, list[str]] = {}

    def is_claimed(key: str, path: str) -> bool:
        return any(not above or path.startswith(f"{above}.") for above in seen.get(key, ()))

    for path, name, kind in models:
        if is_claimed(name, path):
            continue
        if name in rules:
            key = name
        elif kind in rules and not is_claimed(kind, path):
            key = kind
            seen.setdefault(kind, []).append(path)
        else:
            continue
        seen.setdefault(name, []).append(path)
        yield path, key


def rules_for(key: str) -> list[dict[str, Any]]:
    """The rules in the table for a model's class or type; empty if there are none."""
    rules = _table()["rules"].get(key, [])
    return rules_for(rules) if isinstance(rules, str) else list(rules)


def _rule(item: Mapping[str, Any], scope: str | None, prefix: str) -> SavingRule:
    return SavingRule(
        _compiled(tuple(item["from"])),
        item["to"],
        item.get("do", ()),
        item.get("add", 0),
        scope,
        prefix,
    )


@cache
def _compiled(sources: tuple[str, ...]) -> re.Pattern[str]:
    """One regular expression that matches any of the patterns, with a named group for each.

    Longer patterns are tried first.
    """
    numbered = sorted(enumerate(sources), key=lambda item: -len(item[1]))
    return re.compile("|".join(f"(?P<g{number}>{source})" for number, source in numbered))


@cache
def _table() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(get_data(__package__, "table.json") or b"")
    return document


@cache
def _models() -> dict[str, dict[str, Any]]:
    """The entries of `models` in table.json, by each class name that they list."""
    return {name: item for item in _table()["models"] for name in item["classes"]}
