"""Matches the parameters of two checkpoints by their names.

Wrappers of modules insert their own words into names. `_orig_mod` (torch.compile),
`_fsdp_wrapped_module` (FSDP1) and `_checkpoint_wrapped_module` (activation checkpointing) can be
anywhere in a name; torch's state_dict helpers remove them. `module.` (DDP, DeepSpeed),
`_forward_module.` (Lightning) and `model.` are prefixes. PEFT's files omit the adapter's name. For
all other differences the user gives `--rename`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import product

from msgspec import Struct
from msgspec.structs import replace

from ..core.checkpoint.entries import Entry
from ..core.checkpoint.facts import FlatBufferEngine
from ..core.checkpoint.manifest import Manifest
from ..errors import MissingData, Notice, WrongOption, joined, listed, note
from ..training.options import Renames
from .patterns import INFO, under_names
from .peft import saved_name

WORDS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
INSIDE = re.compile(rf"(?:^|(?<=\.))(?:{'|'.join(map(re.escape, WORDS))})")
WRAPPERS = ("module.", "_forward_module.")
PREFIXES = (*WRAPPERS, "model.")
RENAME_HINT = "rename the source's names: --rename REGEX=REPL (rename=[(REGEX, REPL)] in Python)"


def plain(name: str) -> str:
    """The name without the words that wrappers insert anywhere in it, such as `_orig_mod`."""
    return INSIDE.sub("", name)


def without_words(names: Iterable[str]) -> dict[str, str]:
    """Removes wrappers' words (such as `_orig_mod`) from names; returns {old name: new name}.

    Names that would become equal stay unchanged.
    """
    plain_names = {name: plain(name) for name in names}
    counts = Counter(plain_names.values())
    return {name: new if counts[new] == 1 else name for name, new in plain_names.items()}


def respelled(names: Collection[str], other_names: Collection[str]) -> dict[str, str]:
    """Maps each name to the name in `other_names` that is equal except for words of wrappers.

    Such a word is `_orig_mod`. If there is no such name, the name is mapped to itself.
    """
    of_plain = {new: name for name, new in without_words(other_names).items()}
    name_set = {*names}
    same = {name: of_plain.get(new, name) for name, new in without_words(name_set).items()}
    return {name: name if same[name] in name_set else same[name] for name in names}


class PrefixRule(Struct, frozen=True):
    """Renames parameters of one checkpoint as in another: the prefix `drop` becomes `add`.

    For example, `module.` becomes "", so `module.fc.weight` becomes `fc.weight`.
    """

    drop: str
    add: str

    def apply(self, name: str) -> str | None:
        """The name in the other checkpoint; None if `name` does not begin with `drop`."""
        return self.add + name[len(self.drop) :] if name.startswith(self.drop) else None

    @property
    def inverse(self) -> PrefixRule:
        """The rule for the opposite direction: the prefix `add` becomes `drop`."""
        return PrefixRule(self.add, self.drop)


Spelling = Callable[[str], str]
"""A function that removes words from names before they are compared.

It is `plain` or `without_adapter`.
"""


def without_adapter(name: str) -> str:
    """Removes wrappers' words (such as `_orig_mod`) and the name of PEFT's adapter from a name."""
    return saved_name(plain(name))


class Correspondence(Struct, frozen=True, eq=False):
    """How the parameter names of two checkpoints match.

    spelling    the function that was applied to all names first, such as `plain`
    rule        the prefix that was then replaced in the first checkpoint's names
    names       maps each name of the first checkpoint to a name of the second
    """

    spelling: Spelling
    rule: PrefixRule
    names: dict[str, str]


def matched(wanted: Collection[str], available: Collection[str]) -> dict[str, str]:
    """Maps every wanted name to an available one.

    The names are equal, or one prefix rule (`module.` becomes "") makes all of them equal. Raises
    MissingData, which lists the names of both checkpoints that do not match.
    """
    return correspondence(wanted, available).names


def correspondence(wanted: Collection[str], available: Collection[str]) -> Correspondence:
    """Finds how wanted names match available ones: which name to which, and by which prefix rule.

    Raises MissingData, which lists the names of both checkpoints that do not match.
    """
    if set(wanted) <= set(available):
        return Correspondence(plain, PrefixRule("", ""), {name: name for name in wanted})
    try:
        return _by_rule(wanted, available, plain)
    except MissingData as error:
        if not any(saved_name(name) != name for name in (*wanted, *available)):
            raise
        try:
            return _by_rule(wanted, available, without_adapter)
        except (MissingData, WrongOption):
            raise error from None


def _by_rule(
    wanted: Collection[str], available: Collection[str], spelling: Spelling
) -> Correspondence:
    theirs = by_plain_name(available, spelling)
    ours = [spelling(name) for name in wanted]
    candidates = [
        PrefixRule(*pair) for pair in product(_prefixes(ours, all), _prefixes(theirs, any))
    ]
    best: dict[str, str] = {}
    for rule in sorted(candidates, key=lambda rule: len(rule.drop) + len(rule.add)):
        matches = {
            name: theirs[other]
            for name, spelled_name in zip(wanted, ours, strict=True)
            if (other := rule.apply(spelled_name)) in theirs
        }
        if len(matches) == len(wanted) == len(set(matches.values())):
            return Correspondence(spelling, rule, matches)
        if len(matches) > len(best):
            best = matches
    lost = [name for name in wanted if name not in best]
    used = set(best.values())
    unused = [name for name in available if name not in used]
    raise MissingData("names-do-not-fit", left_over(lost, unused), hint=RENAME_HINT)


def left_over(wanted: Sequence[str], unused: Sequence[str]) -> str:
    """Part of an error message: which wanted names are missing, and which names are not used."""
    unused_part = f"; unused names of the source: {listed(unused)}" if unused else ""
    if not wanted:
        return f"several names become one{unused_part}"
    return f"the source does not have these names: {listed(wanted)}{unused_part}"


def by_plain_name(names: Iterable[str], spelling: Spelling = plain) -> dict[str, str]:
    """Maps names without wrappers' words (such as `_orig_mod`) to the original names.

    `spelling` is the function that removes the words. Raises WrongOption if two names become equal.
    """
    originals: dict[str, str] = {}
    for name in names:
        other = originals.setdefault(spelling(name), name)
        if other != name:
            raise WrongOption(
                "names-collide",
                f"{other} and {name} differ only in the names of wrappers (such as module.)",
                hint="make them differ with --rename REGEX=REPL",
            )
    return originals


def _prefixes(
    names: Collection[str],
    which: Callable[[Iterable[bool]], bool],
    prefixes: Sequence[str] = PREFIXES,
) -> list[str]:
    """Finds combinations of known prefixes, such as `module.model.`, with which names begin.

    The empty combination "" comes first. `which` is `all` (every name must begin with a
    combination) or `any` (one name is enough).
    """
    chains = [""]
    for chain in chains:  # the loop appends to the list
        for prefix in prefixes:
            longer = chain + prefix
            if names and which(n.startswith(longer) for n in names):
                chains.append(longer)
    return chains


def leading(names: Collection[str]) -> list[str]:
    """Lists known prefixes, such as `module.` or `module.model.`, with which some names begin.

    The list begins with "" (no prefix).
    """
    return _prefixes(names, any)


# -- a manifest under other names


def names_in(names: Sequence[str] | None, prefix: str) -> Sequence[str] | None:
    """Selects the names of one of several models, and removes the model's `prefix` from them.

    If no name has the prefix, all names are returned unchanged.
    """
    without_prefix = [name.removeprefix(prefix) for name in names or () if name.startswith(prefix)]
    return without_prefix if prefix and without_prefix else names


def renamed(manifest: Manifest, rules: Renames) -> Manifest:
    """The manifest with every name rewritten by `re.sub`, rule by rule in the given order.

    Raises WrongOption if a rule matches no name, or if two names become equal.
    """
    if not rules:
        return manifest
    patterns = [(_compiled(regex), replacement) for regex, replacement in rules]
    used: set[int] = set()

    def rewrite(name: str) -> str:
        for number, (pattern, replacement) in enumerate(patterns):
            try:
                name, count = pattern.subn(replacement, name)
            except (re.error, IndexError) as error:
                raise WrongOption(
                    "option-invalid",
                    f"--rename: {replacement!r} is not a valid replacement: {error}",
                ) from None
            if count:
                used.add(number)
        return name

    names = _all_names(manifest)
    changed = {name: rewrite(name) for name in names}
    for number, (regex, _) in enumerate(rules):
        if number not in used:
            raise WrongOption(
                "option-names-nothing",
                f"--rename: {regex!r} matches no name",
                hint=f"the names are {listed(names)}",
            )
    return _with_names(manifest, rewrite, changed)


def former(manifest: Manifest, rules: Renames, names: Iterable[str]) -> tuple[str, ...]:
    """Undoes the user's `--rename`: returns the original name for each of `names`.

    `rules` are the option's pairs of a regular expression and its replacement. A name that no
    parameter or buffer got by the rules stays unchanged.
    """
    own_names = [n for own in manifest.with_models for n in (*own.parameters, *own.buffers)]
    new_names = own_names
    for regex, replacement in rules:
        pattern = _compiled(regex)
        try:
            new_names = [pattern.sub(replacement, name) for name in new_names]
        except (re.error, IndexError):
            return tuple(names)  # `renamed` reports the error
    by_new_name = dict(zip(new_names, own_names, strict=True))
    return tuple(by_new_name.get(name, name) for name in names)


def unwrapped(manifest: Manifest) -> Manifest:
    """Removes wrappers' words, such as `_orig_mod`, from all names in a manifest.

    Names that would become equal stay unchanged.
    """
    manifest = with_plain_modules(manifest)
    return _with_names(manifest, plain, without_words(_all_names(manifest)))


def canonical(manifest: Manifest, among: Sequence[str] = ()) -> Manifest:
    """Removes wrappers' words (`_orig_mod`) and prefixes (`module.`) from a manifest's names.

    A prefix is removed if all names have it. `among` are names of another manifest: they must all
    have the prefix too.
    """
    every = (*_all_names(manifest), *among)
    front, names = _longest_common_prefix(without_words(every).values()), plain_names(every)
    manifest = with_plain_modules(manifest)
    plain_by_name = {name: names[name] for name in _all_names(manifest)}
    return _with_names(manifest, lambda name: plain(name).removeprefix(front), plain_by_name)


def with_plain_modules(manifest: Manifest) -> Manifest:
    """Removes wrappers' words, such as `_orig_mod`, from the paths of modules in a manifest.

    With torch's checkpoint_wrapper, a state dict has `_checkpoint_wrapped_module` in the paths of
    modules (its `_metadata`), but not in the names of weights (torch 2.13).
    """
    manifest = manifest.map_ranks(with_plain_modules)
    paths = manifest.state.get("module_metadata")
    if not isinstance(paths, dict):
        return manifest
    short = type(paths)((_plain_path(path), value) for path, value in paths.items())
    if short.keys() == paths.keys():
        return manifest
    return replace(manifest, state={**manifest.state, "module_metadata": short})


def _plain_path(path: str) -> str:
    return plain(f"{path}.").removesuffix(".") if path else path


def plain_names(names: Collection[str]) -> dict[str, str]:
    """Maps each name to its form without wrappers' words, such as `_orig_mod`.

    A prefix `module.` or `_forward_module.` is removed if all names have it. `model.` is not
    removed, because names of Hugging Face have it.
    """
    short = without_words(names)
    front = _longest_common_prefix(short.values())
    return {name: new.removeprefix(front) for name, new in short.items()}


def _longest_common_prefix(names: Collection[str], prefixes: Sequence[str] = WRAPPERS) -> str:
    return max(_prefixes(names, all, prefixes), key=len)


def without_front(manifest: Manifest) -> Manifest:
    """Removes wrappers' prefixes (such as `module.`) with which all names begin.

    Wrappers' words inside of names are not removed.
    """
    names = _all_names(manifest)
    front = _longest_common_prefix(names, (*WRAPPERS, *WORDS))

    def rewrite(name: str) -> str:
        return name.removeprefix(front)

    return _with_names(manifest, rewrite, {name: rewrite(name) for name in names})


def about_words(names: Mapping[str, str]) -> list[Notice]:
    """Returns one notice that lists wrappers' words, such as `_orig_mod`, removed from names.

    `names` maps old names to new ones. If no name changed, the list is empty.
    """
    changed = {old: new for old, new in names.items() if old != new}
    words: Counter[str] = Counter()
    for old, new in changed.items():
        words |= Counter(old.split(".")) - Counter(new.split("."))
    if not changed:
        return []
    message = (
        f"names are without {joined(sorted(words))}, which wrappers add: {listed([*changed], 3)}"
    )
    return [note("name-changed", message, subject=next(iter(changed)))]


def about_other_words(first: Manifest, other: Manifest) -> list[Notice]:
    """Returns one notice if names of two checkpoints differ in wrappers' words (`_orig_mod`).

    Otherwise the list is empty.
    """
    ours, theirs = _all_names(first), _all_names(other)
    alone = {*ours} ^ {*theirs}
    roots = {_longest_common_prefix(without_words(names).values()) for names in (ours, theirs)}
    if len(roots) == 1 and not any(plain(name) != name for name in alone):
        return []
    names = plain_names(ours) | plain_names(theirs)
    return about_words({old: new for old, new in names.items() if old in alone})


def called_as(manifest: Manifest, wanted: Collection[str]) -> Manifest:
    """Renames the manifest's parameters to the `wanted` names.

    If the manifest has none of the wanted names, one rule that replaces a prefix is applied to all
    names. If it has some of them, or if no such rule fits, only wrappers' words (such as
    `_orig_mod`) are removed or added, name by name.
    """
    names = _all_names(manifest)
    if not wanted:
        return manifest
    same = respelled(names, wanted)
    if not set(wanted).isdisjoint(names):
        return _with_names(manifest, plain, same)
    try:
        correspondence_found = correspondence(wanted, names)
        rule = correspondence_found.rule.inverse
    except (MissingData, WrongOption):
        try:  # the other side may have more names
            correspondence_found = correspondence(names, wanted)
            rule = correspondence_found.rule
        except (MissingData, WrongOption):
            return _with_names(manifest, plain, same)
    exact = by_plain_name(wanted, correspondence_found.spelling)

    def rewrite(name: str) -> str:
        new = rule.apply(correspondence_found.spelling(name))
        return name if new is None else exact.get(new, new)

    return _with_names(manifest, rewrite, {name: rewrite(name) for name in names})


def _compiled(regex: str) -> re.Pattern[str]:
    try:
        return re.compile(regex)
    except re.error as error:
        raise WrongOption(
            "option-invalid", f"--rename: {regex!r} is not a regular expression: {error}"
        ) from None


def _all_names(manifest: Manifest) -> list[str]:
    """All names in a manifest: parameters, second names of tied weights, buffers, extra states."""
    all_names: list[str] = []
    for model in manifest.with_models:
        extra = model.state.get("module_extra") or {}
        all_names += [*model.parameters, *model.owners, *model.buffers, *extra]
    return list(dict.fromkeys(all_names))


def names_of(manifest: Manifest) -> list[str]:
    """All names that a module's state_dict may have: parameters, second names of ties, buffers."""
    extra = manifest.state.get("module_extra") or {}
    return [name for name in _all_names(manifest) if name not in extra]


def _with_names(
    manifest: Manifest, rewrite: Callable[[str], str], names: dict[str, str]
) -> Manifest:
    """Renames all names in a manifest: `names` maps old to new, `rewrite` renames modules.

    Raises WrongOption if a name would become empty, or two names equal.
    """
    if all(old == new for old, new in names.items()):
        return manifest
    for new, count in Counter(names.values()).items():
        if not new:
            raise WrongOption(
                "option-invalid",
                "a name would become empty",
                hint="change the REPL of --rename, so that no name becomes empty",
            )
        if count > 1:
            both = [old for old, name in names.items() if name == new]
            raise WrongOption(
                "names-collide",
                f"{listed(both)} would become one name: {new}",
                hint="change the REGEX or the REPL of --rename, so that every name stays unique",
            )

    state = dict(manifest.state)
    universal = state.get("universal")
    if isinstance(universal, dict) and isinstance(files := universal.get("files"), dict):
        of_names = {names.get(name, name): info for name, info in files.items()}
        state["universal"] = {**universal, "files": of_names}
    client = state.get("client_state")
    if isinstance(client, dict) and isinstance(info := client.get(INFO), dict):
        state["client_state"] = {**client, INFO: under_names(info, names)}
    states, tensors = manifest.states.renamed(names)

    def under_new_name(entry: Entry) -> Entry:
        if entry.slot == "state":
            new = tensors.get(entry.parameter)
            return entry if new is None else replace(entry, parameter=new)
        return replace(entry, parameter=names.get(entry.parameter, entry.parameter))

    def module(path: str) -> str:
        return rewrite(f"{path}.").removesuffix(".") if path else path

    if isinstance(order := state.get("module"), list):
        state["module"] = [names.get(name, name) for name in order]
    for key, change in (("module_extra", lambda name: names[name]), ("module_metadata", module)):
        if isinstance(values := state.get(key), dict):
            state[key] = type(values)((change(name), value) for name, value in values.items())
    engine, pipeline, slices = (
        manifest.run.engine,
        manifest.run.pipeline,
        manifest.run.tensor_parallel,
    )
    if isinstance(engine, FlatBufferEngine) and engine.experts:
        layers = tuple(replace(layer, name=module(layer.name)) for layer in engine.experts)
        engine = replace(engine, experts=layers)
    entries = map(under_new_name, manifest.entries.values())
    return manifest.map_ranks(lambda own: _with_names(own, rewrite, names)).replace(
        entries={entry.key: entry for entry in entries},
        replicas=tuple(map(under_new_name, manifest.replicas)),
        sibling_weights=tuple(map(under_new_name, manifest.files.sibling_weights)),
        parameters={
            names[name]: replace(
                parameter, aliases=tuple(names[alias] for alias in parameter.aliases)
            )
            for name, parameter in manifest.parameters.items()
        },
        buffers=tuple(names[name] for name in manifest.buffers),
        inferred=tuple(names[name] for name in manifest.notices.inferred),
        engine=engine,
        pipeline=pipeline and pipeline.renamed(names),
        tensor_parallel=slices and slices.renamed(names),
        state=state,
        states=states,
    )
