"""Names of parameters across engines: which of one checkpoint's are which of another's.

Wrappers put their own words into names. `_orig_mod` (torch.compile), `_fsdp_wrapped_module` (FSDP1)
and `_checkpoint_wrapped_module` (activation checkpointing) may stand anywhere, and torch's own
state_dict helpers take them out. `module.` (DDP, DeepSpeed), `_forward_module.` (Lightning) and
`model.` stand in front. PEFT's files leave the name of its adapter out. Anything else is for the
user to say, with `--rename`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from .errors import MissingData, WrongOption, listed
from .manifest import Entry, Manifest
from .peft import saved_name

INSIDE = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
WRAPPERS = ("module.", "_forward_module.")
PREFIXES = (*WRAPPERS, "model.")
RENAME = "rename the source's: --rename REGEX=REPL (rename=[(REGEX, REPL)] in Python)"

Renames = Sequence[tuple[str, str]]


def plain(name: str) -> str:
    """The name without what wrappers put anywhere into it."""
    return INSIDE.sub("", name)


class Rule(NamedTuple):
    """How all names of one side become those of the other: without `drop`, with `add` in front."""

    drop: str
    add: str

    def there(self, name: str) -> str | None:
        """What the other side calls it; None where the rule does not fit."""
        return self.add + name[len(self.drop) :] if name.startswith(self.drop) else None

    @property
    def back(self) -> Rule:
        return Rule(self.add, self.drop)


Spelling = Callable[[str], str]
"""What is left out of every name before names are compared."""


def without_adapter(name: str) -> str:
    """The name without wrappers' words, and without the name of PEFT's adapter (see peft.py)."""
    return saved_name(plain(name))


class Correspondence(NamedTuple):
    """How the names of two sides belong together: both spelled alike, then by one rule."""

    spelling: Spelling
    rule: Rule
    names: dict[str, str]


def matched(wanted: Collection[str], held: Collection[str]) -> dict[str, str]:
    """The held name of every wanted one: the same, or by one rule of prefixes for all of them.

    Raises MissingData, which lists what is left over on both sides.
    """
    return correspondence(wanted, held).names


def correspondence(wanted: Collection[str], held: Collection[str]) -> Correspondence:
    """How wanted names are found among held ones; raises MissingData as `matched`."""
    if set(wanted) <= set(held):
        return Correspondence(plain, Rule("", ""), {name: name for name in wanted})
    try:
        return _by_rule(wanted, held, plain)
    except MissingData as error:
        if not any(saved_name(name) != name for name in (*wanted, *held)):
            raise
        try:
            return _by_rule(wanted, held, without_adapter)
        except (MissingData, WrongOption):
            raise error from None


def _by_rule(wanted: Collection[str], held: Collection[str], spelling: Spelling) -> Correspondence:
    theirs = by_plain_name(held, spelling)
    ours = [spelling(name) for name in wanted]
    candidates = [Rule(*pair) for pair in product(_prefixes(ours, all), _prefixes(theirs, any))]
    best: dict[str, str] = {}
    for rule in sorted(candidates, key=lambda rule: len(rule.drop) + len(rule.add)):
        found = {
            name: theirs[there]
            for name, own in zip(wanted, ours, strict=True)
            if (there := rule.there(own)) in theirs
        }
        if len(found) == len(wanted) == len(set(found.values())):
            return Correspondence(spelling, rule, found)
        if len(found) > len(best):
            best = found
    lost = [name for name in wanted if name not in best]
    used = set(best.values())
    unused = [name for name in held if name not in used]
    raise MissingData(left_over(lost, unused), hint=RENAME)


def left_over(wanted: Sequence[str], unused: Sequence[str]) -> str:
    """The names of both sides that no rule brings together, in one sentence."""
    there = f"; nothing asks for its {listed(unused)}" if unused else ""
    what = listed(wanted) if wanted else "several names become one"
    return f"names that the source does not hold: {what}{there}"


def by_plain_name(names: Iterable[str], spelling: Spelling = plain) -> dict[str, str]:
    """Names by themselves without wrappers; raises WrongOption where two are then the same."""
    found: dict[str, str] = {}
    for name in names:
        other = found.setdefault(spelling(name), name)
        if other != name:
            raise WrongOption(
                f"{other} and {name} differ in nothing but wrappers' names",
                hint="tell them apart with --rename REGEX=REPL",
            )
    return found


def _prefixes(
    names: Collection[str], which: Callable[[Iterable[bool]], bool], known: Sequence[str] = PREFIXES
) -> list[str]:
    """The chains of known prefixes with which all (or any) of the names begin, the empty first."""
    found = [""]
    for chain in found:  # grows while it is walked
        for prefix in known:
            longer = chain + prefix
            if names and which(n.startswith(longer) for n in names):
                found.append(longer)
    return found


def leading(names: Collection[str]) -> list[str]:
    """What may stand in front of a held name where the wanted one has nothing."""
    return _prefixes(names, any)


# -- a manifest under other names


def renamed(manifest: Manifest, rules: Renames) -> Manifest:
    """The manifest with every name rewritten by `re.sub`, one rule after the other.

    Raises WrongOption for a rule that matches no name, and where two names become one.
    """
    if not rules:
        return manifest
    patterns = [(_compiled(regex), replacement) for regex, replacement in rules]
    used: set[int] = set()

    def rewrite(name: str) -> str:
        for place, (pattern, replacement) in enumerate(patterns):
            try:
                name, count = pattern.subn(replacement, name)
            except (re.error, IndexError) as error:
                raise WrongOption(f"--rename: {replacement!r} is no replacement: {error}") from None
            if count:
                used.add(place)
        return name

    names = _names(manifest)
    changed = dict(zip(names, map(rewrite, names), strict=True))
    for place, (regex, _) in enumerate(rules):
        if place not in used:
            raise WrongOption(
                f"--rename: {regex!r} matches no name", hint=f"the names are {listed(names)}"
            )
    return _under(manifest, rewrite, changed)


def before(manifest: Manifest, rules: Renames, names: Iterable[str]) -> tuple[str, ...]:
    """What the manifest calls those that the rules give these names; others stay as they are."""
    held = [*manifest.parameters, *manifest.buffers]
    renamed_names = held
    for regex, replacement in rules:
        pattern = _compiled(regex)
        try:
            renamed_names = [pattern.sub(replacement, name) for name in renamed_names]
        except (re.error, IndexError):
            return tuple(names)  # `renamed` says what is wrong
    former = dict(zip(renamed_names, held, strict=True))
    return tuple(former.get(name, name) for name in names)


def canonical(manifest: Manifest) -> Manifest:
    """Without wrappers' names: `module.` and `_forward_module.` where every name begins so.

    `model.` is part of a Hugging Face name and stays.
    """
    names = _names(manifest)
    front = max(_prefixes([plain(name) for name in names], all, WRAPPERS), key=len)

    def rewrite(name: str) -> str:
        return plain(name).removeprefix(front)

    changed = dict(zip(names, map(rewrite, names), strict=True))
    return _under(manifest, rewrite, changed)


def called_as(manifest: Manifest, wanted: Collection[str]) -> Manifest:
    """The manifest under the names that another side has for them, where one rule tells how.

    The same manifest where it holds one of the wanted names already, or where no rule fits.
    """
    names = _names(manifest)
    if not wanted or not set(wanted).isdisjoint(names):
        return manifest
    try:
        spelling, there, _ = correspondence(wanted, names)
        rule = there.back
    except (MissingData, WrongOption):
        try:  # the other side may know more names
            spelling, rule, _ = correspondence(names, wanted)
        except (MissingData, WrongOption):
            return manifest
    exact = by_plain_name(wanted, spelling)

    def rewrite(name: str) -> str:
        there = rule.there(spelling(name))
        return name if there is None else exact.get(there, there)

    return _under(manifest, rewrite, {name: rewrite(name) for name in names})


def _compiled(regex: str) -> re.Pattern[str]:
    try:
        return re.compile(regex)
    except re.error as error:
        raise WrongOption(f"--rename: {regex!r} is no regular expression: {error}") from None


def _names(manifest: Manifest) -> list[str]:
    """Parameters, second names of tied ones, buffers and extra states, each once."""
    aliases = (alias for held in manifest.parameters.values() for alias in held.aliases)
    extra = manifest.state.get("module_extra") or {}
    return list(dict.fromkeys((*manifest.parameters, *aliases, *manifest.buffers, *extra)))


def names_of(manifest: Manifest) -> list[str]:
    """Every name that a module's state_dict may have: parameters, tied ones' others, buffers."""
    extra = manifest.state.get("module_extra") or {}
    return [name for name in _names(manifest) if name not in extra]


def _under(manifest: Manifest, rewrite: Callable[[str], str], names: dict[str, str]) -> Manifest:
    """The manifest with `names` changed; `rewrite` also tells the prefixes of modules."""
    if all(old == new for old, new in names.items()):
        return manifest
    for new, count in Counter(names.values()).items():
        if not new:
            raise WrongOption("a name without a letter is left", hint="see --rename")
        if count > 1:
            both = [old for old, name in names.items() if name == new]
            raise WrongOption(f"{listed(both)} would become one name: {new}")

    def entry(held: Entry) -> Entry:
        if held.slot == "state":
            return held
        return replace(held, name=f"{names.get(held.parameter, held.parameter)}/{held.slot}")

    def module(path: str) -> str:
        return rewrite(f"{path}.").removesuffix(".") if path else path

    state = dict(manifest.state)
    if isinstance(kept := state.get("module"), list):
        state["module"] = [names.get(name, name) for name in kept]
    for key, change in (("module_extra", lambda name: names[name]), ("module_metadata", module)):
        if isinstance(kept := state.get(key), dict):
            state[key] = type(kept)((change(name), value) for name, value in kept.items())
    return replace(
        manifest,
        entries={made.name: made for made in map(entry, manifest.entries.values())},
        replicas=tuple(map(entry, manifest.replicas)),
        parameters={
            names[name]: replace(held, aliases=tuple(names[alias] for alias in held.aliases))
            for name, held in manifest.parameters.items()
        },
        buffers=tuple(names[name] for name in manifest.buffers),
        inferred=tuple(names[name] for name in manifest.inferred),
        state=state,
    )
