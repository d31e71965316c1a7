"""The manifest of files of torch.save, whole ones or one per rank."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any

from ...core.manifest import Manifest, solid
from ...errors import (
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    MissingData,
    NotACheckpoint,
    listed,
    not_understood,
)
from ...files import safefile
from ...files.torchfile import Parsed, Tensor, TorchFile
from ...training import steps
from ...training.trainers import beside
from ..statedict.read import manifest
from ..statedict.tree import Found, Leaf, leaves, number_of
from . import ranked, zro
from .files import Files, detect, detect_weak, find

if TYPE_CHECKING:
    from ...core.staging import Layout
    from ...training.options import Options

__all__ = ["detect", "detect_weak", "lay_out", "read", "read_shells", "seal"]


def read(
    path: str,
    tag: str | None = None,
    step_policy: str | None = None,
    param_names: tuple[str, ...] | None = None,
    weights_only: bool = False,
) -> Manifest:
    """The manifest of files of torch.save; `tag` is the name of one of a folder's files.

    Raises NotACheckpoint, AmbiguousCheckpoint, IncompleteCheckpoint (a rank or a part is missing),
    InconsistentCheckpoint (ranks contradict each other), MissingData (numbers without names),
    CorruptCheckpoint, UnsupportedCheckpoint (flat parameters).
    """
    if tag:
        path = os.path.join(path, tag)
    try:
        reading = _Reading(path, find(path), step_policy, param_names)
        made = manifest(reading.found, step_policy, param_names, weights_only)
        if reading.is_local:
            _refuse_lost(made, param_names)
        if reading.found.orders is not None:
            made = _in_order(made, param_names)
        # of these files numbers are the rule: that says nothing of a directory of DCP
        engine = {**made.state["engine"], "layout": None, "dialect": reading.dialect}
        return replace(made, state={**made.state, "engine": engine})
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise not_understood(path, error) from error


def _refuse_lost(made: Manifest, names: Sequence[str] | None) -> None:
    """Raises IncompleteCheckpoint where the last ranks may be missing, which no file tells."""
    trained = [name for name, held in made.parameters.items() if held.trainable]
    if names is not None and len(names) != len(trained):
        raise IncompleteCheckpoint(
            f"--param-names names {len(names)} parameters, the ranks hold {len(trained)} of them",
            hint="put all ranks' files into one directory",
        )
    lost = [name for name in made.parameters if name not in trained]
    if names is None and lost:
        raise IncompleteCheckpoint(
            f"no rank holds a state of {listed(lost, 4)}: the last ranks' files may be missing",
            hint="if these weights are frozen, name the others with --param-names FILE (one per "
            "line, group by group)",
        )


def _in_order(made: Manifest, names: Sequence[str] | None) -> Manifest:
    """Every group's parameters in the model's order, where ranks had sorted them by size."""
    places = {name: place for place, name in enumerate(names or made.state["module"])}
    order = sorted(
        made.parameters,
        key=lambda name: (
            not (held := made.parameters[name]).trainable,
            held.group or 0,
            places.get(name, len(places)),
        ),
    )
    return replace(made, parameters={name: made.parameters[name] for name in order})


class _Reading:
    """The tree of all files."""

    def __init__(
        self,
        path: str,
        files: Files,
        step_policy: str | None,
        param_names: Sequence[str] | None,
    ) -> None:
        self.path = path
        self.files = files
        self.step_policy = step_policy
        self.param_names = param_names
        self.parsed: Parsed = {}
        source = {"format": "gathered", "version": None, "dp": files.world, "tag": None}
        self.found = Found(path, source, {})
        self.names: Mapping[str, list[str]] = {}
        self.is_local = False
        extra = self._extra(files.whole)
        trees = {key: self._whole(name) for key, name in files.whole.items() if key != "extra"}
        trees |= extra
        self.found.tree = dict(trees)  # what the local states are matched with
        trees |= {key: self._ranks(paths) for key, paths in files.ranks.items()}
        self.found.tree = self._tree(trees)
        weights = os.path.basename(files.whole.get("model") or files.whole.get(None, ""))
        self.dialect = _dialect_of(weights)
        self.found.in_order = self.dialect != "safetensors"
        if os.path.isdir(path):
            siblings, left_out = beside(path, set(self.found.files))
            self.found.siblings += siblings
            self.found.left_out += left_out

    def _tree(self, trees: dict[str | None, Any]) -> dict[Any, Any]:
        """All trees as one; what is beside model and optimizer keeps its keys."""
        extra = trees.pop("extra", {})
        alone = trees.pop(None, {})
        if not isinstance(alone, dict) or not isinstance(extra, dict):
            raise NotACheckpoint(
                f"{self.path} is no dictionary of state dicts",
                hint="save model.state_dict(), alone or under a key",
            )
        model = trees.get("model")
        if self.found.known and isinstance(model, dict):
            known = self.found.known
            for alias, owner in known["aliases"].items():  # safetensors hold tied weights once
                if alias not in model and owner in model:
                    model[alias] = model[owner]
            if not model.keys() >= {*known["aliases"], *known["buffers"], *known["frozen"]}:
                self.found.known = None  # other files have taken the place of those it was told of
        return {**extra, **alone, **trees}

    def _extra(self, whole: Mapping[str | None, str]) -> dict[str | None, Any]:
        """What is beside model and optimizer; of our own writer's also what it knew of them."""
        if "extra" not in whole:
            return {}
        file = TorchFile(whole["extra"], self.parsed)
        if not isinstance(file.value, dict):  # of the program's own, which is carried as it is
            return {}
        self._open(file.path)
        value = dict(file.value)
        known = value.pop("zckpt", None)
        if isinstance(known, dict):
            self.found.known = known
            self.found.inferred = list(known.get("inferred", ()))
            self.names = known["names"]
        names = iter(self.names.get(os.path.basename(file.path), ()))
        return {"extra": leaves(file, value, names)}

    def _open(self, path: str) -> TorchFile:
        file = TorchFile(path, self.parsed)
        self.found.files.append(path)
        self.found.records += file.records.values()
        return file

    def _whole(self, path: str) -> Any:
        if path.endswith(".json"):
            return {name: held for part in self._parts(path) for name, held in part.items()}
        if path.endswith(".safetensors"):
            return self._weights(path)
        file = self._open(path)
        if next(ranked.sharded_in(file.value), None) is not None:
            return self._merge({0: file})
        ranked.refuse_flat(file)
        return leaves(file, file.value, iter(self.names.get(os.path.basename(path), ())))

    def _parts(self, path: str) -> Iterator[dict[str, Any]]:
        """The files that an index of Hugging Face names."""
        with open(path, "rb") as file:
            named = sorted(set(json.load(file)["weight_map"].values()))
        self.found.files.append(path)
        for name in named:
            full = os.path.join(os.path.dirname(path), os.path.basename(name))
            if not os.path.isfile(full):
                raise IncompleteCheckpoint(f"{full} is missing, which {path} names")
            yield self._whole(full)

    def _weights(self, path: str) -> dict[str, Leaf]:
        self.found.files.append(path)
        return {stored.name: _stored(stored) for stored in safefile.read(path)}

    def _ranks(self, paths: Mapping[int, str]) -> Any:
        files = {rank: self._open(paths[rank]) for rank in sorted(paths)}
        world = self.files.world or max(files) + 1
        ranked.refuse_missing(files, world)
        self.found.source["dp"] = max(world, self.found.source["dp"] or 1)
        if "model" in self.files.whole and _is_local(files):
            return self._local(files)
        return self._merge(files)

    def _merge(self, files: dict[int, TorchFile]) -> Any:
        merged = ranked.merge(files, self.step_policy)
        self.found.left_out += merged.left_out
        return merged.tree

    # -- ZeroRedundancyOptimizer

    def _local(self, files: dict[int, TorchFile]) -> dict[Any, Any]:
        """One optimizer's state of the local ones, in which every rank counts anew."""
        self.is_local = True
        self._check_alike(files)
        groups = [file.value["param_groups"] for file in files.values()]
        dealt = self._named(files) or self._dealt(files)
        state: dict[int, Any] = {}
        made: list[dict[str, Any]] = []
        for place, order in enumerate(dealt):
            first = len(state)
            for rank, position in order:
                held = files[rank].value["state"].get(groups[rank][place]["params"][position], {})
                state[len(state)] = leaves(files[rank], held)
            numbers = list(range(first, len(state)))
            made.append({**leaves(files[0], groups[0][place]), "params": numbers})
        return {"state": state, "param_groups": made}

    def _named(self, files: Mapping[int, TorchFile]) -> list[list[zro.Place]] | None:
        """Where every group's parameters are, in the program's order, if all their names are told.

        Their sizes are then the model's, and no state is needed to tell them.
        """
        counts = [
            [len(group["params"]) for group in f.value["param_groups"]] for f in files.values()
        ]
        names = list(self.param_names or ())
        shapes = next((s for s in _shapes(self.found.tree) if s.keys() >= set(names)), {})
        if len(names) != sum(map(sum, counts)) or not shapes or len(set(map(len, counts))) > 1:
            return None
        sizes = [sum(each) for each in zip(*counts, strict=True)]
        of_group = [
            names[stop - size : stop] for size, stop in zip(sizes, accumulate(sizes), strict=True)
        ]
        numels = [[prod(shapes[name]) for name in each] for each in of_group]
        found = [[zro.Place(0, 0)] * size for size in sizes]
        for rank, parts in enumerate(zro.partition(numels, len(files))):
            for group, part in enumerate(parts):
                if len(part) != counts[rank][group]:
                    raise InconsistentCheckpoint(
                        f"{files[rank].path} holds {counts[rank][group]} parameters of group "
                        f"{group}, where ZeroRedundancyOptimizer gives rank {rank} {len(part)} of "
                        "those that --param-names names",
                        hint="their order is that of the optimizer's groups, one behind the other",
                    )
                for position, place in enumerate(part):
                    found[group][place] = zro.Place(rank, position)
        return found

    def _dealt(self, files: Mapping[int, TorchFile]) -> list[list[zro.Place]]:
        """Where every group's parameters are, the largest first; equal ones in their order."""
        numels = [
            [
                [self._numel(file, number) for number in group["params"]]
                for group in file.value["param_groups"]
            ]
            for file in files.values()
        ]
        try:
            dealt = zro.dealt(numels)
        except InconsistentCheckpoint as error:
            raise InconsistentCheckpoint(f"{self.path}: {error.message}", error.hint) from error
        self.found.orders = orders = []
        first = 0
        for place, order in enumerate(dealt):
            sizes = [numels[rank][place][position] for rank, position in order]
            for start, stop in zro.runs(sizes):
                orders.append(list(range(first + start, first + stop)))
            first += len(order)
        return dealt

    def _numel(self, file: TorchFile, number: int) -> int:
        numel = _numel(file.value["state"].get(number, {}))
        if numel is None:
            raise MissingData(
                f"{file.path} holds no state of its parameter {number}, whose size nothing else "
                "tells: ZeroRedundancyOptimizer deals parameters to ranks by size",
                hint="name the optimizer's parameters with --param-names FILE (one per line, group "
                "by group), or save after consolidate_state_dict()",
            )
        return numel

    def _check_alike(self, files: Mapping[int, TorchFile]) -> None:
        """Ranks agree on hyper-parameters and on how often they were stepped."""
        told = {}
        for rank, file in files.items():
            groups = [
                {key: value for key, value in group.items() if key != "params"}
                for group in file.value["param_groups"]
            ]
            told[rank] = ranked.text(groups, file)
            if told[rank] != told[0]:
                raise InconsistentCheckpoint(
                    f"{file.path} and {files[0].path} have different hyper-parameters",
                )
        last = [(file.path, step) for file in files.values() if (step := _last_step(file))]
        if self.step_policy != steps.KEEP:
            steps.agree(last, self.step_policy)


def _dialect_of(weights: str) -> str | None:
    """The `--dialect` that has files of such names."""
    if weights == "pytorch_model_fsdp.bin":
        return "accelerate"
    return "safetensors" if ".safetensors" in weights else None


def _stored(stored: safefile.Stored) -> Leaf:
    fragments = solid(prod(stored.shape), stored.extent)
    return Leaf(stored.dtype, stored.shape, fragments, number_of(stored))


def _is_local(files: Mapping[int, TorchFile]) -> bool:
    """Whether the ranks' optimizers count parameters of their own: whole ones, but not the same."""
    values = [file.value for file in files.values()]
    if not all(isinstance(v, dict) and "param_groups" in v and "state" in v for v in values):
        return False
    if any(next(ranked.sharded_in(value), None) is not None for value in values):
        return False
    members = [[m for group in value["param_groups"] for m in group["params"]] for value in values]
    if not all(type(member) is int for each in members for member in each):
        return False
    if len(values) == 1:  # sorted by size, or by chance: that says less of the order
        return all(_is_sorted(values[0]["state"], group) for group in values[0]["param_groups"])
    shapes = [[_numel(held) for held in value["state"].values()] for value in values]
    if any((m, s) != (members[0], shapes[0]) for m, s in zip(members, shapes, strict=True)):
        return True
    # as many of the same sizes on every rank: copies of one state, or parts by chance
    texts = {ranked.text(file.value["state"], file) for file in files.values()}
    return len(texts) > 1


def _is_sorted(state: Mapping[int, Any], group: Mapping[str, Any]) -> bool:
    numels = [_numel(state.get(number, {})) or 0 for number in group["params"]]
    return numels == sorted(numels, reverse=True)


def _numel(held: Mapping[str, Any]) -> int | None:
    """Of a parameter, as its states tell it; None without any."""
    tensors = [t for key, t in held.items() if isinstance(t, Tensor) and key != "step"]
    return max((tensor.numel for tensor in tensors), default=None)


def _shapes(tree: Any) -> Iterator[dict[str, tuple[int, ...]]]:
    """The tensors by name of every dictionary in a tree."""
    if isinstance(tree, dict):
        yield {key: held.shape for key, held in tree.items() if isinstance(held, Leaf)}
        for held in tree.values():
            yield from _shapes(held)


def _last_step(file: TorchFile) -> steps.Step | None:
    """The step of what an optimizer has stepped most often."""
    held = [state.get("step") for state in file.value["state"].values()]
    told = [file.scalar(step) if isinstance(step, Tensor) else step for step in held]
    return max((s for s in map(steps.step_of, told) if s is not None), default=None)


# -- writing


def lay_out(source: Manifest, options: Options) -> Layout:
    """The files of a target; see gathered_writing.py, which reading has no need of."""
    from . import write as gathered_writing

    return gathered_writing.lay_out(source, options)


def read_shells(path: str) -> Manifest:
    """What was laid out, in which every parameter has its own step."""
    return read(path, step_policy=steps.KEEP)


def seal(root: str, manifest: Manifest, outcome: Any) -> None:
    """What is known only when all tensors are there: the records' checksums."""
    from ...files.torchshell import seal_records

    seal_records(manifest, outcome)
