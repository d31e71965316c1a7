"""Finds the files of a torch.save checkpoint, by their names and by their content.

    ckpt.pt, last.ckpt                              one file: {"model": ..., "optimizer": ..., ...}
    model.pt + optim.pt                             complete, under any of the names in WHOLE
    model.safetensors + optimizer.pt                Hugging Face Trainer, Accelerate, without FSDP
    model_1.safetensors + optimizer_1.bin           beside those: Accelerate's second model
    adapter_model.safetensors + optimizer.pt        the same with PEFT
    model_world_size_W_rank_R.pt + optim_...        ranks' shards (FSDP, verl's names)
    pytorch_model_fsdp_0_rankR.bin + optimizer_...  ranks' shards (Accelerate)
    model.pt + optim_rank_R.pt                      ZeroRedundancyOptimizer's local states
    model_R.pt + optimizer_R.pt + ...               torch_checkpointing's files, see items.py

Names distinguish files. Content distinguishes state dicts: see statedict/state_dict_search.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from msgspec import Struct, field

from ...core.checkpoint.inert import Scalar
from ...core.storage import sources
from ...core.storage.filenames import by_counting, counted, number_of, numbered
from ...core.storage.inventory import ParsedName, parse_name, role
from ...errors import (
    AmbiguousCheckpoint,
    InconsistentCheckpoint,
    NotACheckpoint,
    Notice,
    ZckptError,
    listed,
    warning,
)
from ...files.beginning import number_in
from ...files.torchfile import Tensor, TorchFile, is_torch, peek
from ...naming import peft
from ..statedict.state_dict_search import has_groups
from . import items, sharded_tensors

ENDINGS = (".pt", ".pth", ".bin", ".ckpt", ".tar")
ACCELERATES = "optimizer.bin"
WHOLE = {  # names of complete files, the likeliest first
    "model": (
        *("model.pt", "model.pth", "model.bin", "pytorch_model_fsdp.bin", "pytorch_model.bin"),
        *("pytorch_model.bin.index.json", "model.safetensors", "model.safetensors.index.json"),
        *peft.WEIGHTS,
    ),
    "optim": (
        *("optim.pt", "optimizer.pt", "optim.pth", "optimizer.pth", "optim.bin", ACCELERATES),
    ),
    "extra": ("extra.pt",),
}
NUMBERED = (
    *("model.safetensors", "pytorch_model.bin", "pytorch_model_fsdp.bin", ACCELERATES),
    "extra.pt",
)
"""File names to which a second model or optimizer adds a number: `model_1.safetensors`.

Accelerate (1.15) writes all of them but `extra.pt`, which is zckpt's own.
"""
# of other formats: DeepSpeed's ranks, ONNX Runtime's, Megatron-Core's
OTHER_ENDINGS = ("_model_states.pt", "_optim_states.pt", ".ort.pt")
OTHER_NAMES = (
    *("model_optim_rng.pt", "distrib_optim.pt", "training_args.bin"),
    *("scheduler.pt", "scheduler.bin", "scaler.pt", "scaler.bin"),
)
DEPTH = 4
COUNTER = "global_step"
ROLES = (
    *sharded_tensors.OF_RANKS,
    *sharded_tensors.OF_ITEMS,
    role("optimizer", r".*optim[^/]*"),
    role("model", r".*(?:model|weights)[^/]*"),
)
"""The roles of this format's files, as far as their names show them."""


class StateDictFiles(Struct, eq=False):
    """The files of one checkpoint, sorted by kind: `model`, `optim`, `model_1` for a second model.

    In the merged tree, a file's content gets its kind as the key. The kind None is for files that
    have the full tree.

        whole    complete files: {kind: path}
        ranks    files of single ranks: {kind: {rank: path}}
        world    the number of ranks, if the files' names state it
        items    whether the files are torch_checkpointing's (items.py)
    """

    whole: dict[str | None, str] = field(default_factory=dict)
    ranks: dict[str | None, dict[int, str]] = field(default_factory=dict)
    world: int | None = None
    items: bool = False

    @property
    def models(self) -> list[str]:
        """The kinds of the models' files, ["model", "model_1"]; [] if there is only one model."""
        keys = [key for key in self.whole if key and key.startswith("model")]
        return keys if len(keys) > 1 else []

    @property
    def missing(self) -> list[Notice]:
        """Warnings about gaps in the numbers of Accelerate's files (`optimizer_1.bin` is lost)."""
        warnings: list[Notice] = []
        for kind in ("model", "optim"):
            paths = [path for key, path in self.whole.items() if key and key.startswith(kind)]
            by_number = {number_of(os.path.basename(path)): path for path in paths}
            last = by_number[max(by_number)] if by_number else ""
            first = _without_number(os.path.basename(last))
            missing = {*range(max(by_number))} - {*by_number} if first in NUMBERED else ()
            for name in (numbered(first, number) for number in sorted(missing)):
                message = f"{last} exists, but {name} does not: it may be lost"
                file = os.path.join(os.path.dirname(last), name)
                warnings.append(warning("missing-file", message, file=file))
        return warnings

    def is_of_optimizer(self, path: str) -> bool:
        """Whether a file is named like an optimizer's.

        Always False for a checkpoint without a model.
        """
        has_model = any(_is_of_kind("model", key) for key in (*self.whole, *self.ranks))
        return has_model and _is_of_kind("optim", os.path.basename(path))

    def without_optimizers(self) -> StateDictFiles:
        """The same files without those of optimizers."""
        whole = {key: path for key, path in self.whole.items() if not _is_of_kind("optim", key)}
        ranks = {key: paths for key, paths in self.ranks.items() if not _is_of_kind("optim", key)}
        return StateDictFiles(whole, ranks, self.world, self.items)

    @property
    def of_torch(self) -> list[str]:
        """The paths of all torch.save files among these files."""
        paths = [*self.whole.values(), *chain(*(paths.values() for paths in self.ranks.values()))]
        return [path for path in paths if not path.endswith((".json", ".safetensors"))]


def _is_of_kind(kind: str, key: str | None) -> bool:
    return key is not None and _model_or_optim(key) == kind


def detect(path: str) -> list[str]:
    """[""] (a checkpoint without tags) if `path` has a model and its optimizer; else [].

    The model and the optimizer may be in one file or in several.
    """
    if sources.is_file(path):
        return [""] if _has_state_dicts(path) else []
    names = _names_if_readable(path)
    whole = _complete_files(names)
    if "optim" in whole and "model" in whole:
        return [""]
    return (
        [""]
        if any(_is_file_of_rank(path, name) for name in names) or items.parts(path, names)
        else []
    )


def detect_weak(path: str) -> list[str]:
    """Finds weights without an optimizer, or several files that are each a complete checkpoint.

    Returns the names of several such files, [""] for one checkpoint without tags, [] for nothing.
    """
    if sources.is_file(path):
        return [""] if path.endswith(".safetensors") else []
    names = _names_if_readable(path)
    if "model" in _complete_files(names) or len(_safetensors(names)) == 1 or slices(path):
        return [""]
    single = _single_files(path, names)
    return single if len(single) > 1 and not _are_of_ranks(single) else [""] * bool(single)


def _are_of_ranks(names: Sequence[str]) -> bool:
    """Whether all names are of ranks' files, with one stem and one number of ranks.

    For example, model_world_size_2_rank_0.pt and model_world_size_2_rank_1.pt.
    """
    places = [own and (own.stem, own.at("world")) for own in map(_parsed_rank_name, names)]
    return None not in places and len({*places}) == 1


def counter(path: str) -> int | None:
    """The `global_step` in a file of Lightning or of another program; None without this key."""
    return number_in(path, (COUNTER,)) if sources.is_file(path) else None


def updates(path: str) -> float | None:
    """The largest step of any parameter in the optimizer's state; None if there is none.

    `path` is a file, or the folder of a model's and an optimizer's files. Only the steps are read.
    """
    files = [path]
    if sources.is_folder(path):
        whole = _complete_files(_names_if_readable(path))
        kinds = [kind for kind in whole if "model" in whole and kind.startswith("optim")]
        files = [os.path.join(path, whole[kind]) for kind in kinds]
    numbers = (number for file in files if is_torch(file) for number in _steps_in_file(file))
    return max(numbers, default=None)


def _steps_in_file(path: str) -> Iterator[float]:
    """Yields the step of each parameter in the optimizers' states of one file."""
    file = TorchFile(path)
    for step in _steps(file.value):
        number = file.number(step)
        value = number.value if isinstance(number, Scalar) else number
        if type(value) in (int, float):
            yield float(value)


def _steps(value: Any, depth: int = 3) -> Iterator[Any]:
    """Yields the stored step of each parameter from the optimizers' state dicts in `value`."""
    if isinstance(value, dict) and "param_groups" in value:
        states = value.get("state")
        states = states.values() if isinstance(states, dict) else ()
        yield from (
            state["step"] for state in states if isinstance(state, dict) and "step" in state
        )
    elif depth and isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _steps(inner, depth - 1)


def _names(folder: str) -> list[str]:
    """The names of everything in a folder except subfolders.

    Pipes and broken links are among the names; opening these fails.
    """
    with os.scandir(folder) as entries:
        return sorted(
            entry.name
            for entry in entries
            if not (sources.is_folder(entry.path) if entry.is_symlink() else entry.is_dir())
        )


def _names_if_readable(folder: str) -> list[str]:
    """The names of the files in a folder; [] if the user may not list it, or if it is no folder.

    An example of a folder that may not be listed is `lost+found`.
    """
    may_be_listed = sources.is_folder(folder) and not sources.is_denied(folder)
    return _names(folder) if may_be_listed else []


def _complete_files(names: Sequence[str]) -> dict[str, str]:
    """Finds the complete file of each kind: {"model": "model.pt", "optim": "optim.pt"}.

    The kinds of Accelerate's second and later models and optimizers have a number: `model_1`.
    """
    present = set(names)
    whole = {
        kind: name
        for kind, likely in WHOLE.items()
        if (name := next((name for name in likely if name in present), None))
    }
    if whole.get("optim", ACCELERATES) != ACCELERATES:
        return whole
    # the first optimizer's file may be lost while further ones exist
    first = {"optim": ACCELERATES, **whole} if "model" in whole else whole
    for kind, name in [(kind, name) for kind, name in first.items() if name in NUMBERED]:
        alike = [other for other in names if other.startswith(name.partition(".")[0])]
        further = [other for other in alike if other != name and _without_number(other) == name]
        by_number = {number_of(other): other for other in further}
        if 0 not in by_number:  # otherwise the numbers are those of ranks
            whole |= {f"{kind}_{number}": by_number[number] for number in sorted(by_number)}
    return whole


def _without_number(name: str) -> str:
    """Removes the number from a file's name: `optimizer_1.bin` becomes `optimizer.bin`."""
    stem, dot, ending = name.partition(".")
    stem_and_number = counted(stem, "")
    return f"{stem_and_number[0] if stem_and_number else stem}{dot}{ending}"


def _safetensors(names: Sequence[str]) -> list[str]:
    return [name for name in names if name.endswith(".safetensors")]


def _single_files(folder: str, names: Sequence[str]) -> list[str]:
    """The names of files that each have all state dicts of a checkpoint.

    Only files with usual endings, such as `.pt` and `.ckpt`, are considered.
    """
    return by_counting(
        name
        for name in names
        if name.endswith(ENDINGS) and _has_state_dicts(os.path.join(folder, name))
    )


def _is_of_others(name: str) -> bool:
    """Whether a file with this name is known to belong to another format, or to a trainer."""
    is_random_state = name.startswith(("rng_state", "rng_global_rank"))  # AutoModel's is the last
    is_part = "_states.pt-" in name  # a part of DeepSpeed's file that FastPersist wrote
    return name.endswith(OTHER_ENDINGS) or name in OTHER_NAMES or is_random_state or is_part


def _parsed_rank_name(name: str) -> ParsedName | None:
    """Parses the name of a rank's file: its stem, its rank, perhaps the world size; else None."""
    if "rank" not in name or _is_of_others(name):
        return None
    return parse_name(sharded_tensors.OF_RANKS, name)


def _is_file_of_rank(folder: str, name: str) -> bool:
    """Whether a file has one rank's shards of a model or of an optimizer.

    The name of such a file has a rank, and `model` or `optim`. If it has neither of these words,
    the content must have a DTensor, a ShardedTensor or an optimizer's groups.
    """
    rank_name = _parsed_rank_name(name)
    if rank_name is None or not is_torch(path := os.path.join(folder, name)):
        return False
    if _model_or_optim(rank_name.stem):
        return True
    try:
        value = peek(path)
    except ZckptError:
        return False
    return next(sharded_tensors.distributed_in(value), None) is not None or has_groups(value)


def _has_state_dicts(path: str) -> bool:
    """Whether a single file has state dicts of this format: dictionaries of named tensors."""
    name = os.path.basename(path)
    if _is_of_others(name) or name.endswith(".distcp") or not is_torch(path):
        return False
    try:
        value = peek(path)
    except ZckptError:
        return name.endswith(ENDINGS)  # reading it will report the error
    return (
        not isinstance(value, list)
        and _has_tensors(value)
        and not any(
            isinstance(key, str) and key.startswith(("Moment_1_", "Update_Count"))  # ONNX Runtime's
            for key in (value.get("model", value) if isinstance(value, dict) else ())
        )
    )


def _has_tensors(value: Any, depth: int = DEPTH) -> bool:
    if isinstance(value, dict) and depth:
        return any(_has_tensors(item, depth - 1) for item in value.values())
    if isinstance(value, list) and depth:  # of models
        return any(_has_tensors(item, depth - 1) for item in value if isinstance(item, dict))
    return isinstance(value, Tensor) or sharded_tensors.is_distributed(value)


def whole_of(path: str) -> str | None:
    """The folder of the checkpoint, if `path` is a file that is not enough alone; else None.

    An optimizer's file beside a model is not enough, and neither is one rank's file of
    torch_checkpointing.
    """
    if not sources.is_file(path):
        return None
    folder, name = os.path.split(path)
    names = _names_if_readable(folder or ".")
    whole = _complete_files(names)
    kind = next((kind for kind, own in whole.items() if own == name), None)
    of_item = counted(name, ".pt") is not None and items.parts(folder or ".", names)
    of_optimizer = kind is not None and kind.startswith("optim") and "model" in whole
    return (folder or ".") if of_optimizer or of_item else None


def slices(path: str) -> list[str]:
    """The safetensors files that are ranks' slices of one model, in the order of ranks; else [].

    `path` is one slice, or the folder of all slices.
    """
    is_folder = sources.is_folder(path)
    names = _names(path) if is_folder else [os.path.basename(path)]
    if not any(counted(name, ".safetensors") for name in names) or "model" in _complete_files(
        names
    ):
        return []
    if is_folder:
        return items.slices(path, names)
    folder = os.path.dirname(path)
    return items.slices(folder, [*names, *_names_if_readable(folder or ".")], names[0])


def locate(path: str) -> StateDictFiles:
    """Finds the files of the one checkpoint at `path`, a folder or a file.

    For the file of one rank, these are the files of all ranks. Raises NotACheckpoint (no model's
    state dict), AmbiguousCheckpoint (several checkpoints) and InconsistentCheckpoint (two files of
    one rank).
    """
    if not sources.is_folder(path):
        folder, name = os.path.split(path)
        if _parsed_rank_name(name):
            names = [other for other in _names(folder or ".") if _are_of_ranks([name, other])]
            return _of_ranks(folder or ".", names, {})
        of_item = counted(name, ".pt") is not None
        paths = (
            items.parts(folder, [name, *_names_if_readable(folder or ".")], name)
            if of_item
            else None
        )
        return StateDictFiles(ranks=paths, items=True) if paths else StateDictFiles({None: path})
    names = _names(path)
    whole: dict[str | None, str] = {}
    whole |= {kind: os.path.join(path, name) for kind, name in _complete_files(names).items()}
    of_ranks = [name for name in names if _parsed_rank_name(name)]
    if of_ranks:
        return _of_ranks(path, of_ranks, whole)
    is_whole = "model" in whole and "optim" in whole
    if not is_whole and (of_items := items.parts(path, names)):
        kinds = {_model_or_optim(str(item)) for item in of_items}
        rest = {kind: path for kind, path in whole.items() if kind not in kinds}
        return StateDictFiles(rest, of_items, items=True)
    if "model" in whole:
        return StateDictFiles(whole)
    if len(alone := _safetensors(names)) == 1:
        return StateDictFiles({**whole, "model": os.path.join(path, alone[0])})
    single = _single_files(path, names)
    if len(single) > 1:
        raise AmbiguousCheckpoint(
            "several-checkpoints",
            f"{path} has {len(single)} checkpoints: {listed(single)}",
            hint=f"give one of the files, such as {os.path.join(path, single[-1])}",
            file=path,
        )
    if not single:
        raise NotACheckpoint(
            "not-a-checkpoint", f"{path} has no file with a model's state dict", file=path
        )
    return StateDictFiles({None: os.path.join(path, single[0])})


def _of_ranks(folder: str, names: Sequence[str], whole: Mapping[str | None, str]) -> StateDictFiles:
    """Sorts the files of all ranks by kind and rank, and adds complete files of other kinds.

    Raises InconsistentCheckpoint (two files of one rank) and AmbiguousCheckpoint (several numbers
    of ranks, or several checkpoints).
    """
    by_stem: dict[str, dict[int, str]] = {}
    worlds: set[int] = set()
    for rank_name, name in (
        (rank_name, name) for name in names if (rank_name := _parsed_rank_name(name))
    ):
        if (world := rank_name.at("world")) is not None:
            worlds.add(world)
        rank, paths = rank_name.numbers[-1], by_stem.setdefault(rank_name.stem, {})
        if rank in paths and world is None:
            raise InconsistentCheckpoint(
                "mixed-saves",
                f"{paths[rank]} and {os.path.join(folder, name)} both belong to rank {rank}",
                hint="files of two saves seem to be mixed: put each save into its own directory",
                file=paths[rank],
            )
        paths[rank] = os.path.join(folder, name)
    if len(worlds) > 1:
        raise AmbiguousCheckpoint(
            "mixed-saves",
            f"{folder} has files of several saves, by {' and '.join(map(str, sorted(worlds)))} "
            "ranks",
            hint="put each save into its own directory",
            file=folder,
        )
    files = StateDictFiles(world=worlds.pop() if worlds else None)
    if len(by_stem) == 1 and not {"model", "optim"} & whole.keys():
        files.ranks[None] = next(iter(by_stem.values()))
        return files
    kinds = {stem: _model_or_optim(stem) for stem in by_stem}
    stems = [stem for stem, kind in kinds.items() if kind is None]
    if len(stems) == len(by_stem):
        raise AmbiguousCheckpoint(
            "several-checkpoints",
            f"{folder} has ranks' files of {len(by_stem)} checkpoints: {listed(stems)}",
            hint=f"give one of the files, such as {by_stem[stems[0]][min(by_stem[stems[0]])]}",
            file=folder,
        )
    for stem, paths in by_stem.items():
        kind = kinds[stem]
        # several files of one kind keep their stems as kinds
        alone = kind and list(kinds.values()).count(kind) == 1
        files.ranks[kind if alone else stem] = paths
    files.whole = {kind: path for kind, path in whole.items() if kind not in files.ranks}
    return files


def _model_or_optim(stem: str) -> str | None:
    if "optim" in stem:
        return "optim"
    is_model = "model" in stem or "weights" in stem
    return "model" if is_model and "rng" not in stem else None
