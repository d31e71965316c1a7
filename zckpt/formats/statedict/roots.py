"""Pairs models with their optimizers in a checkpoint with several of them.

    {"generator": {...}, "discriminator": {...}, "optimizer_g": {...}, "optimizer_d": {...}}
    {"generator": {"model": {...}, "optimizer": {...}}, "discriminator": {...}}
    {"model": {...}, "model_1": {...}, "optim": {...}, "optim_1": {...}}

A root is a model with its optimizers (`--root` selects one). An optimizer belongs to a model if
that is the only one with the optimizer's names or shapes. If several models fit, the words of the
keys decide: `optimizer_g` has one word, `g`, beside the usual ones, and `generator` begins with it.
If words do not decide, nothing is guessed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ...errors import AmbiguousCheckpoint, Notice, WrongOption, listed, meant, note, warning
from .equal_tensors import is_float
from .names import shape_of, without_wrappers
from .state_dict_search import OptimizerState
from .tree import Leaf, SavedTree, TreePath, dotted

WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
USUAL = {
    *("model", "models", "module", "modules", "net", "network", "weights", "state", "states"),
    *("dict", "sd", "optim", "optims", "optimizer", "optimizers", "opt", "opts"),
    *("app", "pytorch", "fsdp"),
}
"""Words in keys that say nothing about which model it is, such as `model` or `optimizer`."""
SOLE = "model"
"""The name of a model without a key: the whole file is the model's state dict."""


class Root(Struct, frozen=True):
    """A model of a checkpoint, and the optimizers that train it.

    name        the model's key, such as "generator"
    model       the path of its state dict
    optimizers  the paths of its optimizers' state dicts
    prefix      the start of its parameter names if several models are read: "generator."
    by_words    whether only words in the keys show which optimizer trains it
    likely      for a model without an optimizer: dotted paths of optimizers that would fit
    """

    name: str
    model: TreePath
    optimizers: tuple[TreePath, ...] = ()
    prefix: str = ""
    by_words: bool = False
    likely: tuple[str, ...] = ()

    def __str__(self) -> str:
        own = ", ".join(map(dotted, self.optimizers))
        return f"{self.name} ({own})" if own else self.name


class Roots(Struct, frozen=True):
    """All models of a checkpoint, each with its optimizers.

    `path` is the checkpoint's path. `fitting` maps each optimizer's path to the paths of all models
    that have its parameter names or shapes.
    """

    path: str
    roots: tuple[Root, ...]
    fitting: Mapping[TreePath, Sequence[TreePath]]

    def and_weights(
        self,
        weights: Mapping[TreePath, Mapping[Any, Any]],
        optimizers: Mapping[TreePath, OptimizerState],
    ) -> Roots:
        """Adds a model for each dictionary of weights that no optimizer trains, such as an EMA.

        `weights` has these dictionaries by path; `optimizers` has all optimizers by path.
        """
        roots_of_weights = (Root(dotted(path), path) for path in weights)
        fitting = {
            place: [
                *self.fitting[place],
                *(p for p, each in weights.items() if fits(optimizer, each)),
            ]
            for place, optimizer in optimizers.items()
        }
        return replace(self, roots=(*self.roots, *roots_of_weights), fitting=fitting)

    @property
    def unclear(self) -> Mapping[TreePath, Sequence[TreePath]]:
        """The optimizers that could not be assigned to one model, each with the models it fits.

        All are given by their paths.
        """
        owned = {path for root in self.roots for path in root.optimizers}
        return {path: models for path, models in self.fitting.items() if path not in owned}

    @property
    def doubts(self) -> list[Notice]:
        """Warnings about optimizers that were matched to a model by words in their keys only.

        There is a warning if the optimizer also fits another model, which has no optimizer.
        """
        without = [root for root in self.roots if not root.optimizers]
        return [
            warning(
                "root-inferred",
                f"{dotted(place)} is read as the optimizer of {root.name}, because of its name, "
                f"but it also fits {other.name}, which has no optimizer; if it belongs there, add "
                f"--root {other.name}={dotted(place)}",
                subject=dotted(place),
            )
            for root in self.roots
            if root.by_words
            for place in root.optimizers
            for other in without
            if other.model in self.fitting[place]
        ]

    @property
    def paths(self) -> set[TreePath]:
        """The paths of the state dicts of all models and optimizers."""
        paths_of_roots = {path for root in self.roots for path in (root.model, *root.optimizers)}
        return paths_of_roots | {*self.unclear}

    def asked(self, request: str, weights_only: bool) -> Root:
        """Selects the model of a `--root` request: "MODEL" or "MODEL=OPTIMIZER".

        The result has at most one optimizer. Raises WrongOption for an unknown name, and
        AmbiguousCheckpoint if no file shows which optimizer trains the model.
        """
        name, _, wanted = request.partition("=")
        root = next((root for root in self.roots if name in (root.name, dotted(root.model))), None)
        if root is None:
            raise _unknown("model", name, [root.name for root in self.roots], self.path)
        own_optimizers = list(root.optimizers)
        if wanted:
            every = [*(path for root in self.roots for path in root.optimizers), *self.unclear]
            by_name = {dotted(path): path for path in every}
            if wanted not in by_name:
                raise _unknown("optimizer", wanted, list(by_name), self.path)
            own_optimizers = [by_name[wanted]]
        elif weights_only:
            own_optimizers = []
        elif len(own_optimizers) != 1 and (own_optimizers or self.unclear):
            likely = [
                *own_optimizers,
                *(path for path, fit in self.unclear.items() if root.model in fit),
            ]
            names = [dotted(path) for path in likely or self.unclear]
            way = f"choose it: --root {root.name}={names[0]}; or " if likely else ""
            raise AmbiguousCheckpoint(
                "several-models",
                f"{self.path}: nothing shows which optimizer to read with {root.name}; the "
                f"checkpoint has {listed(names)}",
                hint=f"{way}add --weights-only",
                file=self.path,
            )
        by_words = root.by_words and not wanted and bool(own_optimizers)
        places = (place for place, models in self.fitting.items() if root.model in models)
        would_fit = () if weights_only or own_optimizers else tuple(map(dotted, places))
        optimizers = tuple(own_optimizers)
        return Root(root.name, root.model, optimizers, by_words=by_words, likely=would_fit)

    def omitted(self, chosen: Root) -> list[Notice]:
        """A note that lists the state dicts which `--root` leaves out.

        `chosen` is the model that `--root` selects, with its optimizers.
        """
        other_paths = [root.model for root in self.roots if root.model != chosen.model]
        other_paths += [path for root in self.roots for path in root.optimizers]
        other_paths += self.unclear
        names = [dotted(path) for path in other_paths if path not in chosen.optimizers]
        message = f"{listed(names)}: --root selects {chosen}"
        return [note("weights-omitted", message, subject=names[0])] if names else []


def _unknown(what: str, name: str, names: Sequence[str], path: str) -> WrongOption:
    return WrongOption(
        "option-names-nothing",
        f"{path} has no {what} {name}",
        hint=meant(name, names) or f"its {what}s are {listed(names)}",
    )


def roots_of(
    saved: SavedTree,
    models: Mapping[TreePath, Mapping[Any, Any]],
    optimizers: Mapping[TreePath, OptimizerState],
) -> Roots:
    """Finds out which optimizers train which model, by names, shapes and words in the keys."""
    optimizers_of_model: dict[TreePath, list[TreePath]] = {path: [] for path in models}
    by_words: set[TreePath] = set()
    every: dict[TreePath, Sequence[TreePath]] = {}
    for place, optimizer in optimizers.items():
        fitting = [path for path, model in models.items() if fits(optimizer, model)]
        fitting = [path for path in fitting if _has_shapes(models[path], optimizer)] or fitting
        chosen = fitting if len(fitting) == 1 else _by_words(place, fitting)
        # FSDP's optimizers use names, and Accelerate gives each one the number of its model
        is_sure = bool(saved.layout.models) and not optimizer.is_numbered and len(chosen) == 1
        every[place] = chosen if is_sure else fitting
        if len(chosen) != 1:
            continue
        optimizers_of_model[chosen[0]].append(place)
        if chosen != every[place]:
            by_words.add(chosen[0])
    names = _names(list(models))
    prefixed = len(models) > 1
    roots = tuple(
        Root(
            names[path],
            path,
            tuple(optimizers_of_model[path]),
            f"{names[path]}." if prefixed else "",
            path in by_words,
        )
        for path in models
    )
    return Roots(saved.root, roots, every)


def _names(models: Sequence[TreePath]) -> dict[TreePath, str]:
    """Names models by their dotted paths, without a last key that all paths share.

    For example, `generator.model` and `discriminator.model` become `generator` and `discriminator`.
    """
    alike = all(len(a) > 1 and len(b) > 1 and a[-1] == b[-1] for a, b in pairwise(models))
    if len(models) > 1 and alike:
        return {path: dotted(path[:-1]) for path in models}
    return {path: dotted(path) or SOLE for path in models}


def fits(optimizer: OptimizerState, model: Mapping[Any, Any]) -> bool:
    """Whether a model has every parameter that an optimizer lists, by name or else by shape."""
    members = [member for members in optimizer.members for member in members]
    names_in_groups = [
        name for group in optimizer.groups for name in group.get("param_names") or ()
    ]
    if not optimizer.is_numbered or len(names_in_groups) == len(members):
        return (
            without_wrappers([str(name) for name in names_in_groups or members], model) is not None
        )
    shapes = [shape_of(optimizer.state.get(member, {})) for member in members]
    floats = Counter(leaf.shape for leaf in model.values() if is_float(leaf))
    known_shapes = Counter(shape for shape in shapes if shape is not None)
    return len(shapes) <= floats.total() and known_shapes <= floats


def _has_shapes(model: Mapping[Any, Any], optimizer: OptimizerState) -> bool:
    """Whether a parameter's optimizer states always have the shape of the weight of its name."""
    named = (
        (model.get(name), shape_of(optimizer.state.get(member, {})))
        for members, group in zip(optimizer.members, optimizer.groups, strict=False)
        for member, name in zip(members, group.get("param_names") or members, strict=False)
    )
    return all(shape in (None, leaf.shape) for leaf, shape in named if isinstance(leaf, Leaf))


def _by_words(optimizer: TreePath, models: Sequence[TreePath]) -> list[TreePath]:
    """The models whose keys have the same words as an optimizer's key.

    If there is none, the models whose words abbreviate the optimizer's words, or the reverse: `g`
    of `optimizer_g` abbreviates `generator`.
    """
    words = _words(optimizer)
    equal = [path for path in models if _words(path) == words]
    return equal or [path for path in models if _are_alike(_words(path), words)]


def _words(path: TreePath) -> list[str]:
    words = [word.lower() for key in path for word in WORD.findall(str(key))]
    return [word for word in words if word not in USUAL]


def _are_alike(a: Sequence[str], b: Sequence[str]) -> bool:
    """Whether each word of `a` begins with the word of `b` at the same place, or the reverse.

    For example `["gen"]` and `["generator"]`.
    """
    pairs = list(zip(a, b, strict=False))
    alike = all(one.startswith(other) or other.startswith(one) for one, other in pairs)
    return bool(pairs) and len(a) == len(b) and alike
