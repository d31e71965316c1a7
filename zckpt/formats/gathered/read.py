"""Reads torch.save files, complete or one per rank, as one tree, and builds the manifest."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from ...core.checkpoint.facts import StateDictEngine
from ...core.checkpoint.inert import nested
from ...core.checkpoint.manifest import Manifest
from ...core.checkpoint.origin import Origin
from ...core.storage import sources
from ...core.storage.filenames import number_of, numbered
from ...core.storage.inventory import ANY, nameless, refuse_others, saved_names
from ...errors import (
    MALFORMED,
    IncompleteCheckpoint,
    MissingData,
    NotACheckpoint,
    ZckptError,
    listed,
    not_understood,
    note,
    warning,
)
from ...files.torchfile import Parsed, TorchFile
from ...training.trainers import beside
from ..reading import USUAL, Reading
from ..statedict.keys import keys_of
from ..statedict.own_facts import checked
from ..statedict.read import manifest
from ..statedict.tree import SavedTree, TreePath, leaf, leaves
from ..statedict.weights import tensors_of_index, weights_of, zero_scalars
from ..weights_alone import is_of_files, weights_or_raise
from . import averages, rank_trees, sharded_tensors, zero_redundancy
from .files import StateDictFiles, locate, slices, whole_of
from .items import METADATA, refusal, said_of

CONFIG = "fsdp_config.json"
"""verl's file beside files of ranks: the version of FSDP and the number of ranks."""
STATED = "zckpt"
"""The key under which zckpt writes its own facts into a program's file."""


def read(path: str, reading: Reading = USUAL) -> Manifest:
    """Reads a checkpoint of torch.save files; raises the errors of `read_tree`."""
    return read_tree(path, reading)[0]


def with_copies(path: str) -> Manifest:
    """Reads ranks' files that zckpt has just laid out, before their tensors are filled.

    If every rank stores a full tensor, such as a buffer, the manifest has the first rank's bytes as
    the entry. Here, unlike in `read`, the other ranks' bytes are listed in `replicas`, so that the
    copy fills them too.
    """
    manifest, copies = read_tree(path, USUAL)
    entries = {id(entry.fragments): entry for entry in manifest.entries.values()}
    replicas = [
        replace(entries[id(first.fragments)], fragments=leaf(*part).fragments)
        for first, parts in copies
        if id(first.fragments) in entries
        for part in parts
    ]
    return replace(manifest, replicas=(*manifest.replicas, *replicas))


def read_tree(path: str, reading: Reading) -> tuple[Manifest, Sequence[rank_trees.Copies]]:
    """Reads torch.save files: the manifest, and the tensors of which several ranks have replicas.

    `reading.tag` is the name of one file in the folder `path`. Raises NotACheckpoint,
    AmbiguousCheckpoint, IncompleteCheckpoint, InconsistentCheckpoint (ranks contradict each other),
    MissingData (no file names an optimizer's numbered parameters), CorruptCheckpoint and
    UnsupportedCheckpoint.
    """
    whole = path
    if reading.tag:
        path = os.path.join(path, reading.tag)
    try:
        files = _slices(path, reading)
        located = locate(files[0] if files and sources.is_folder(path) else path)
        try:
            return _read_located(path, located, files, reading)
        except ZckptError as error:
            if not is_of_files(error, located.is_of_optimizer):
                raise
            rest = partial(_read_located, path, located.without_optimizers(), files)
            return weights_or_raise(error, lambda own: rest(own)[0], whole, reading), ()
    except MALFORMED as error:
        raise not_understood(path, error) from error


def _read_located(
    path: str, located: StateDictFiles, files: Sequence[str], reading: Reading
) -> tuple[Manifest, Sequence[rank_trees.Copies]]:
    """Reads the files `located`: the manifest, and the tensors of which ranks have replicas.

    If `files` lists ranks' safetensors slices, the manifest warns that it shows only the first.
    """
    reader = _TreeReader(path, located, reading)
    if files:
        reader.saved.origin = replace(reader.saved.origin, slices=len(files))
        message = f"{said_of(files)}; only {os.path.basename(files[0])} is shown"
        reader.saved.warnings.append(warning("rank-slices", message, file=files[0]))
    try:
        result = manifest(reader.saved, reading)
    except MissingData as error:
        if whole := whole_of(path):
            hint = f"give {whole}, which has the model and the optimizer"
            raise error.again(code="other-folder-needed", hint=hint) from error
        raise
    if (mesh := reader.rows_mesh(result)) is not None:
        result = result.replace(origin=replace(result.run.origin, mesh=mesh))
    if reader.has_local_states:
        _refuse_missing(result, reading.param_names)
    if reader.saved.orders is not None:
        result = _in_order(result, reading.param_names)
    engine = replace(keys_of(result.run.engine), whole=True, dialect=reader.dialect)
    if not is_kept(engine):
        engine = replace(engine, layout=None, file=None)
    result = result.replace(engine=engine, notes=(*result.notices.notes, *reader.notes))
    return result, reader.copies


def _slices(path: str, reading: Reading) -> list[str]:
    """The safetensors slices of all ranks, if `inspect` reads one of them or their folder; else [].

    Raises UnsupportedCheckpoint for slices if any other command reads them. `--from gathered`
    declares that a file which looks like a slice is a full model.
    """
    if reading.format == "gathered" and sources.is_file(path):
        return []
    files = slices(path)
    if files and not reading.inspected:
        raise refusal(path, files)
    return files


def _refuse_missing(manifest: Manifest, names: Sequence[str] | None) -> None:
    """Raises IncompleteCheckpoint if a weight has no optimizer state in any rank's file.

    In ZeroRedundancyOptimizer's local states, no file shows how many ranks there were, so the last
    ranks' files may be missing.
    """
    trained = [name for name, parameter in manifest.parameters.items() if parameter.trainable]
    if names is not None and len(names) != len(trained):
        raise IncompleteCheckpoint(
            "missing-rank-file",
            f"--param-names lists {len(names)} parameters, but the ranks' files have states of "
            f"only {len(trained)}",
            hint="put all ranks' files into one directory",
        )
    lost = [name for name in manifest.parameters if name not in trained]
    if names is None and lost:
        raise IncompleteCheckpoint(
            "missing-rank-file",
            f"no rank's file has an optimizer state of {listed(lost, 4)}: the files of the last "
            "ranks of ZeroRedundancyOptimizer may be missing",
            hint="add --weights-only to read the weights without the optimizer. If the parameters "
            "without a state are frozen, list all others with --param-names FILE (one per line, "
            "group by group)",
        )


def _in_order(manifest: Manifest, names: Sequence[str] | None) -> Manifest:
    """Sorts the parameters of every group into the model's order, or the order of `names`.

    Before this, they are in the order of their sizes, as ZeroRedundancyOptimizer assigns parameters
    to ranks.
    """
    places = {name: place for place, name in enumerate(names or manifest.state["module"])}

    def key(name: str) -> tuple[bool, int, int]:
        parameter = manifest.parameters[name]
        return not parameter.trainable, parameter.group or 0, places.get(name, len(places))

    order = sorted(manifest.parameters, key=key)
    return replace(manifest, parameters={name: manifest.parameters[name] for name in order})


class _TreeReader:
    """Reads all files of a checkpoint into one tree of nested dictionaries (`saved`)."""

    def __init__(self, path: str, files: StateDictFiles, reading: Reading) -> None:
        self.path = path
        self.files = files
        self.step_policy = reading.step_policy
        self.param_names = reading.param_names
        self.by_checksums = reading.by_checksums
        self.weights_only = reading.weights_only
        self.parsed = Parsed()
        self.saved = SavedTree(path, Origin("gathered", dp=files.world), {})
        self.saved.layout.models = files.models
        self.saved.warnings += files.missing
        self.names: dict[str, list[str]] = {}
        self.is_one = reading.root is not None or not files.models
        self.has_local_states = False
        self.copies: list[rank_trees.Copies] = []
        self.opened = {path: TorchFile(path, self.parsed) for path in files.of_torch}
        folders = {path: file.saved_as for path, file in self.opened.items()}
        beside_them = os.listdir(path) if sources.is_folder(path) else ()
        names = saved_names((*sharded_tensors.OF_RANKS, ANY), folders, beside_them)
        refuse_others(names, "ranks" if files.ranks else "kinds")
        self.notes = nameless([name for name in names if name.parsed_name.rank])
        extra = {key: self._extra(path) for key, path in files.whole.items() if is_extra(key)}
        trees = {key: self._whole(name) for key, name in files.whole.items() if key not in extra}
        if None in files.whole:
            self.saved.layout.file = os.path.basename(files.whole[None])
        trees |= {key: value for key, value in extra.items() if value is not None}
        self.saved.tree = dict(trees)  # local states are matched with these weights
        trees |= {key: self._ranks(key, paths) for key, paths in files.ranks.items()}
        self.saved.tree = self._tree(trees)
        if self.files.ranks:
            self._join_averages()
        weights = os.path.basename(files.whole.get("model") or files.whole.get(None, ""))
        self.dialect = _dialect_of(weights)
        self.saved.layout.in_order = self.dialect != "safetensors"
        if sources.is_folder(path):
            known_files = set(self.saved.files.paths)
            if files.items and sources.is_file(of_ranks := os.path.join(path, METADATA)):
                known_files.add(of_ranks)
                message = f"{METADATA}: the offsets of the source's shards"
                self.saved.omitted.append(note("file-omitted", message, subject=METADATA))
            if files.world is not None and sources.is_file(config := os.path.join(path, CONFIG)):
                known_files.add(config)
                message = f"{CONFIG}: the number of the source's ranks"
                self.saved.omitted.append(note("file-omitted", message, subject=CONFIG))
            siblings, omitted = beside(path, known_files)
            self.saved.files.siblings += siblings
            self.saved.omitted += omitted

    def _tree(self, trees: dict[str | None, Any]) -> dict[Any, Any]:
        """Joins the trees of all files into one.

        A file of a model or optimizer is put under its kind (`model`, `optim`). The values of other
        files keep their own keys.
        """
        extras = [trees.pop(key) for key in [*trees] if is_extra(key)]
        extra = {key: value for each in extras for key, value in each.items()}
        alone = trees.pop(None, {})
        if not isinstance(alone, dict):
            raise NotACheckpoint(
                "not-a-checkpoint",
                f"{self.path} is not a dictionary of state dicts",
                hint="save model.state_dict(), alone or under a key",
                file=self.path,
            )
        tree = {**extra, **alone, **trees}
        for path, record in [*self.saved.facts.items()]:
            model = None if path is None else nested(tree, *path)
            if not isinstance(model, dict):
                continue
            for alias, owner in record["aliases"].items():  # safetensors store tied weights once
                if alias not in model and owner in model:
                    model[alias] = model[owner]
            if not model.keys() >= {*record["aliases"], *record["buffers"], *record["frozen"]}:
                del self.saved.facts[path]  # another program saved the model again
        return tree

    def _extra(self, path: str) -> dict[Any, Any] | None:
        """Reads extra.pt, zckpt's file for everything except model and optimizer.

        None if the program itself wrote a file of this name. zckpt's own facts in the file are
        moved to `saved.facts`.
        """
        file = self.opened[path]
        if not isinstance(file.value, dict):  # the program's own file, which is copied unread
            return None
        self._add(file)
        model = numbered("model", number_of(os.path.basename(path)))
        extra: dict[Any, Any] = self._leaves(file, self._without_stated(file, (model,)))
        return extra

    def _without_stated(self, file: TorchFile, model: TreePath) -> dict[Any, Any]:
        """Removes zckpt's own facts (the key `zckpt`) from a file's values, and returns the rest.

        These facts are moved to `saved.facts`, under the path of the model that they describe.
        `model` is this path if the facts do not state it.
        """
        value = dict(file.value)
        record = checked(value.pop(STATED, None), file.path)
        if record is not None:
            self.saved.facts[tuple(record.get("model", model))] = record
            if self.is_one:  # the names belong to one model
                self.names |= record["names"]
        return value

    def _leaves(self, file: TorchFile, value: Any) -> Any:
        return leaves(file, value, iter(self.names.get(os.path.basename(file.path), ())))

    def _open(self, path: str) -> TorchFile:
        # files of a Hugging Face index are opened one by one
        file = self.opened.get(path) or TorchFile(path, self.parsed)
        self._add(file)
        return file

    def _add(self, file: TorchFile) -> None:
        self.saved.files.paths.append(file.path)
        self.saved.files.records += file.records.values()

    def _whole(self, path: str) -> Any:
        if path.endswith(".json"):
            self.saved.files.paths.append(path)
            return tensors_of_index(path, self._whole)
        if path.endswith(".safetensors"):
            self.saved.files.paths.append(path)
            tensors, records = weights_of(path)
            self.saved.files.records += records
            self.saved.warnings += zero_scalars(path, tensors)
            return tensors
        file = self._open(path)
        if next(sharded_tensors.distributed_in(file.value), None) is not None:
            rank_trees.refuse_part(file)
            return self._merge({0: file}).tree
        is_one = path == self.files.whole.get(None) and isinstance(file.value, dict)
        return self._leaves(file, self._without_stated(file, ()) if is_one else file.value)

    def _ranks(self, key: str | None, paths: Mapping[int, str]) -> Any:
        files = {rank: self._open(paths[rank]) for rank in sorted(paths)}
        world = self.files.world or max(files) + 1
        # torch_checkpointing may save a state dict without shards in one rank's file only
        if not self.files.items:
            is_beside = key == "optim" and "model" in self.files.whole  # beside the full model
            are_shares = is_beside and len(files) < world and zero_redundancy.is_local(files)
            try:
                rank_trees.refuse_missing(files, world, are_shares)
            except IncompleteCheckpoint as error:
                if not is_beside or not self.weights_only:
                    raise
                said = replace(error.notice, severity="note", subject=key, hint="")
                self.saved.omitted.append(said)
                return {}
        self.saved.origin = replace(self.saved.origin, dp=max(world, self.saved.origin.dp or 1))
        if "model" in self.files.whole and zero_redundancy.is_local(files):
            # a single file may be complete; a notice names the weights that it lists
            self.has_local_states = len(files) > 1
            return zero_redundancy.merge(self.saved, files, self.step_policy, self.param_names)
        merged = self._merge(files, () if key is None else (key,))
        self.saved.ranks.steps += merged.steps
        self.copies += merged.copies
        return merged.tree

    def rows_mesh(self, manifest: Manifest) -> tuple[str, str | None] | None:
        """The device mesh, if FSDP2 cut every parameter into rows; else None.

        It is given as a pair: the device type, and the name of the mesh's one axis or None.
        """
        model = self.files.ranks.get("model")
        if model is None or self.files.world is None or self.files.whole:
            return None
        values = {key: self.opened[paths[0]].value for key, paths in self.files.ranks.items()}
        cut = {
            name for name, each in values["model"].items() if sharded_tensors.is_distributed(each)
        }
        if cut != {n for name, p in manifest.parameters.items() for n in (name, *p.aliases)}:
            return None
        tensors = sharded_tensors.distributed_in([*values.values()])
        meshes = {sharded_tensors.rows_mesh(tensor) for tensor in tensors}
        return meshes.pop() if len(meshes) == 1 else None

    def _merge(self, files: dict[int, TorchFile], place: TreePath = ()) -> rank_trees.MergedRanks:
        merged = rank_trees.merge(files, self.step_policy, place, self.by_checksums)
        self.saved.ranks.different += merged.different
        self.saved.ranks.uncompared += merged.uncompared
        self.saved.ranks.of_ranks |= merged.of_ranks
        return merged

    def _join_averages(self) -> None:
        ranks = [
            averages.RankFiles(() if key is None else (key,), by_rank)
            for key, paths in self.files.ranks.items()
            if (by_rank := {rank: self.opened[path] for rank, path in sorted(paths.items())})
        ]
        tree, lines, settled = averages.joined(self.saved.tree, ranks, self.saved.ranks.different)
        self.saved.tree = tree
        self.saved.warnings += lines
        self.saved.ranks.different = [
            item for item in self.saved.ranks.different if not settled(item.path)
        ]


def is_extra(key: str | None) -> bool:
    """Whether `key` is that of zckpt's extra.pt: `extra` or, for a further model, `extra_1`.

    This file has the values outside of the state dicts. Other keys belong to files of a model or an
    optimizer, and the key None to a single file with everything.
    """
    return key is not None and key == numbered("extra", number_of(key))


def is_kept(engine: StateDictEngine) -> bool:
    """Whether a source is a single file that zckpt can write as a single file again.

    For this, the model and the optimizer must have separate keys in it, and the optimizer's groups
    must be a list.
    """
    return (
        engine.file is not None
        and engine.layout != "flat"
        and () not in (engine.model, engine.optimizer)
    )


def _dialect_of(weights: str) -> str | None:
    """The `--dialect` that writes a weights file with this name; None for other names."""
    if weights == "pytorch_model_fsdp.bin":
        return "accelerate"
    return "safetensors" if ".safetensors" in weights else None
