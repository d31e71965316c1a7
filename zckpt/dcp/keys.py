"""Finds the meaning of a key in a program's state dict: a weight, a state or a hyper-parameter.

    model.fc1.weight                        a weight; the program chose the prefix
    app.optim.state.fc1.weight.exp_avg      an optimizer's state for it
    optim.param_groups.0.lr                 a hyper-parameter of one of the program's groups
    optim.param_groups.fc1.weight.lr        the same, flattened

The program chooses the prefix of a weight's name, wrappers add prefixes, and an optimizer may
number its parameters. So this module splits a key, and looks up the rest among the source's names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, product
from typing import Any

from msgspec import Struct, field

from ..core.checkpoint.entries import Entry
from ..core.checkpoint.inert import TensorName
from ..core.checkpoint.manifest import Manifest, slot_name
from ..formats.statedict.keys import OPTIMIZER, in_folder, keys_of
from ..formats.statedict.tree import dotted
from ..formats.statedict.write import flattened
from ..naming.names import PrefixRule, by_plain_name, leading, names_of, plain

SECTION = re.compile(r"(?:^|\.)(state|param_groups)\.")
NUMBERED = re.compile(r"(?:^|\.)state\.\d+\.[^.]+$")


class KeyMeaning(Struct, frozen=True):
    """What a key of a program's state dict stands for in the source.

    kind   "weight", "state", "group" (a hyper-parameter) or "extra" (an extra state)
    name   the source's name of the parameter, buffer or extra state; "" for a numbered group
    slot   the optimizer state or the hyper-parameter, such as "exp_avg" or "lr"; else ""
    front  the key up to the parameter's name, or up to the dot after the group's number; "" for
           weights and extra states
    rule   how the prefix was changed: for example, "module." was removed

    For "optim.param_groups.0.lr", `front` is "optim.param_groups.0.".
    """

    kind: str
    name: str
    slot: str
    front: str
    rule: PrefixRule


class KeyNames(Struct, eq=False, dict=True):
    """Finds out what the keys of a program's state dict mean, from the names in a checkpoint.

    numbers  the names of the program's parameters in the order in which its optimizer numbers them
    words    the first words of the checkpoint's keys: "app" of "app.model.fc.weight"
    weights  maps the checkpoint's keys of weights to the weights' names

    If "app" is one of the `words`, a program's key that begins with "app." is found only if the
    checkpoint's complete prefix is there: "app.model." for weights.
    """

    manifest: Manifest
    numbers: Sequence[str]
    words: Collection[str] = ()
    weights: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        manifest = self.manifest
        roots = keys_of(manifest.run.engine)
        optimizer_path = OPTIMIZER if roots.optimizer is None else roots.optimizer
        self.model, self.optimizer = _root(in_folder(roots.model)), _root(in_folder(optimizer_path))
        self.rules = {  # of the source's own keys: what precedes a name, and the name's rule
            "weight": ("", PrefixRule(self.model, "")),
            "state": (f"{self.optimizer}state.", PrefixRule("", "")),
        }
        extra = manifest.state.get("module_extra") or {}
        self.extra: dict[str, Any] = {
            dotted(path): value
            for name, state in extra.items()
            for path, value in flattened((name,), state)
        }
        self._names = by_plain_name([*names_of(manifest), *self.extra])
        self._leading = leading(self._names)
        self._owners = manifest.owners
        self._rules: dict[PrefixRule, None] = {}  # rules that found earlier weights
        self._parameters: dict[str, tuple[str, PrefixRule] | None] = {}
        self._meanings: dict[str, KeyMeaning | None] = {}

    def meaning(self, key: str) -> KeyMeaning | None:
        if key not in self._meanings:
            self._meanings[key] = self._in_optimizer(key) or self._in_module(key)
        return self._meanings[key]

    def _in_optimizer(self, key: str) -> KeyMeaning | None:
        """Looks a key up as an optimizer's state or hyper-parameter; None if it is neither.

        This is tried before the look-up as a weight or buffer, because a buffer may be named
        `step`.
        """
        if key in self.weights:
            return None
        has_prefix = key.partition(".")[0] in self.words
        for match in SECTION.finditer(key):
            front, rest = key[: match.end()], key[match.end() :]
            if has_prefix and front != f"{self.optimizer}{match[1]}.":
                continue
            name, _, slot = rest.rpartition(".")
            if match[1] == "param_groups" and name.isdecimal():
                return KeyMeaning("group", "", slot, f"{front}{name}.", PrefixRule("", ""))
            owner = self.parameter(name)
            if owner is not None and owner[0] in self.manifest.parameters:
                kind = "state" if match[1] == "state" else "group"
                return KeyMeaning(kind, owner[0], slot, front, owner[1])
        return None

    def _in_module(self, key: str) -> KeyMeaning | None:
        """Looks a key up as a weight, a buffer or an extra state; None if it is none of these."""
        _, own_rule = self.rules["weight"]
        if key in self.weights:
            return KeyMeaning("weight", self.weights[key], "", "", own_rule)
        word = plain(key)
        if key.partition(".")[0] in self.words:  # only the words of wrappers may differ
            drops = leading([word.removeprefix(self.model)])
            pairs = product(drops, self._leading)
            rules: Iterable[PrefixRule] = (
                PrefixRule(self.model + drop, add) for drop, add in pairs
            )
        else:
            cuts = ["", *(word[: match.end()] for match in re.finditer(r"\.", word))]
            rules = (PrefixRule(*rule) for rule in product(cuts, self._leading))
            rules = chain(tuple(self._rules), rules)
        result = self._lookup(word, rules)
        if result is None:
            return None
        name, rule = result
        self._rules[rule] = None
        return KeyMeaning("extra" if name in self.extra else "weight", name, "", "", rule)

    def parameter(self, name: str | int) -> tuple[str, PrefixRule] | None:
        """Finds the source's name of the parameter that a program's optimizer calls `name`.

        Also returns how the prefix of the name was changed: for example, "module." was removed.
        None if the source has no such parameter.
        """
        if isinstance(name, int) or (name.isdecimal() and name not in self._names):
            number = int(name)
            if number >= len(self.numbers):
                return None
            name = self.numbers[number]
        if name not in self._parameters:  # looked up for a dozen hyper-parameters each
            word = plain(name)
            rules = product(leading([word]), self._leading)
            self._parameters[name] = self._lookup(word, (PrefixRule(*rule) for rule in rules))
        return self._parameters[name]

    def _lookup(self, name: str, rules: Iterable[PrefixRule]) -> tuple[str, PrefixRule] | None:
        """Applies prefix rules to a name until one gives a name that the source has.

        Returns the source's name and this rule, or None. A tied weight gets the name under which
        the source stores it.
        """
        for rule in rules:
            changed = rule.apply(name)
            source = None if changed is None else self._names.get(changed)
            if source is not None:
                return self._owners.get(source, source), rule
        return None

    def entries(self, meaning: KeyMeaning) -> list[Entry]:
        """The tensors of the source from which a key of the program's state dict can be loaded.

        For a weight, these are its value and its master, as far as the source has them. Empty for
        a hyper-parameter, and for an extra state that is no tensor.
        """
        name, slots = meaning.name, ["param", "master"]
        if meaning.kind == "state":
            slots = [slot_name(meaning.slot)]
        elif meaning.kind == "extra" and isinstance(value := self.extra[name], TensorName):
            name, slots = value.name, ["state"]
        elif meaning.kind != "weight":
            return []
        entries = (self.manifest.entries.get((name, slot)) for slot in slots)
        return [entry for entry in entries if entry is not None]

    def unused(self, meanings: Iterable[KeyMeaning]) -> list[str]:
        """The names in the source that no key of the state dict asks for."""
        used = {meaning.name for meaning in meanings}
        names = (*self.manifest.parameters, *self.manifest.buffers)
        return [name for name in names if name not in used]


def _root(path: Sequence[Any]) -> str:
    """The prefix of all keys below a path, such as "model."; "" for an empty path."""
    return f"{dotted(tuple(path))}." if path else ""
