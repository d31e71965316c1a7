"""HDF5 files of any name, one per rank (ORTTrainer.save_checkpoint, ONNX Runtime 1.7 to 1.16).

    model/full_precision/<w>            of an fp32 run whole on every rank; of a mixed one on its
                                        owners alone, as a flat piece where ranks share it
    optimizer/<w>/Moment_1, Moment_2, Update_Count    of what the rank owns
    optimizer/shared_optimizer_state/Step             Lamb's
    partition_info/<w>/original_dim     the shape of a weight that is split on this rank
    trainer_options/...                 rank, sizes, optimizer, precision
    train_step_info/...                 since 1.12
    user_dict                           a pickle as hexadecimal text: never opened

A `/` in a name makes groups, which its path undoes. The 16-bit copies are not stored. Before the
release of 1.7 the sizes of data and horizontal parallelism were missing, and groups could be empty.

Where a file's bytes lie is asked of h5py, with one exception: whether a file is one of these at all
is read from its first group's names, because other programs' HDF5 files may lie beside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ...core.manifest import Record
from ...errors import (
    CorruptCheckpoint,
    InconsistentCheckpoint,
    MissingExtra,
    UnsupportedCheckpoint,
)
from ...files import hdf5file
from .ranks import COUNT, OPTIMIZERS, SHARED, SLOTS, Held, Rank, Save

FULL = "model/full_precision/"
SHARED_GROUPS = ("shared_optimizer_state",)
TOLD_ALIKE = (
    "mixed_precision",
    "zero_stage",
    "world_size",
    "data_parallel_size",
    "horizontal_parallel_size",
    "optimizer_name",
)


def require_h5py() -> None:
    """Raises MissingExtra, with the name of the extra that these files need."""
    try:
        hdf5file.import_h5py()
    except MissingExtra as error:
        raise MissingExtra(
            "ONNX Runtime's HDF5 checkpoints need the package h5py, which is not installed",
            hint="pip install 'zckpt[onnxruntime]'",
        ) from error


def is_one(path: str) -> bool:
    """By the names in its root group, without h5py."""
    return {b"model", b"trainer_options"} <= hdf5file.root_names(path)


# -- what a file holds


@dataclass(frozen=True, slots=True)
class File:
    """One file: `tensors` and `values` (numbers, lists, text) by their paths inside it."""

    path: str
    tensors: Mapping[str, Held]
    values: Mapping[str, Any]

    def under(self, group: str) -> dict[str, Any]:
        """The values directly inside a group."""
        prefix = f"{group}/"
        return {
            name.removeprefix(prefix): value
            for name, value in self.values.items()
            if name.startswith(prefix) and "/" not in name.removeprefix(prefix)
        }

    @property
    def options(self) -> dict[str, Any]:
        return self.under("trainer_options")

    def size(self, name: str, default: int) -> int:
        """A number of the trainer's options; raises CorruptCheckpoint."""
        value = self.options.get(name, default)
        if type(value) is not int or value < 0:
            raise CorruptCheckpoint(f"{self.path}: trainer_options/{name} is {value!r}")
        return value

    @property
    def is_partition(self) -> bool:
        """Whether it is one rank of several, not a checkpoint by itself."""
        return self.size("zero_stage", 0) > 0 and self.size("world_size", 1) > 1


def open_file(path: str) -> File:
    """What a file holds; raises CorruptCheckpoint, UnsupportedCheckpoint, MissingExtra."""
    require_h5py()
    datasets, values = hdf5file.read(path, _is_tensor)
    tensors = {name: Held(item.dtype, item.shape, item.extent) for name, item in datasets.items()}
    return File(path, tensors, values)


def _is_tensor(name: str) -> bool:
    return name.startswith("model/") or name.rpartition("/")[2] in SLOTS


# -- what all ranks' files hold


def opened(root: str, files: Sequence[File]) -> Save:
    """What files in rank order hold; raises InconsistentCheckpoint and its like."""
    first = files[0]
    for file in files:
        _check_kind(file)
        for name in TOLD_ALIKE:
            if file.options.get(name) != first.options.get(name):
                raise InconsistentCheckpoint(
                    f"{file.path} says {name} {file.options.get(name)!r}, {first.path} says "
                    f"{first.options.get(name)!r}"
                )
    ranks = [_rank(file) for file in files]
    optimizer = first.options.get("optimizer_name")
    state: dict[str, Any] = {
        "trainer_options": {k: v for k, v in first.options.items() if k != "world_rank"},
        "train_step_info": first.under("train_step_info"),
        "user_dict": first.values.get("user_dict"),
    }
    left_out = []
    for what, told in (
        ("user_dict", [file.values.get("user_dict") for file in files]),
        ("train_step_info", [file.under("train_step_info") for file in files]),
    ):
        if any(each != told[0] for each in told):
            left_out.append(f"{what} of ranks other than 0")
    others = {name for file in files for name in file.tensors if not _is_known(name)}
    return Save(
        root,
        "hdf5",
        ranks,
        # ORTTrainer mixes fp16 alone, and says no more than this
        "F16" if first.options.get("mixed_precision") else None,
        OPTIMIZERS.get(str(optimizer)),
        _shapes(files),
        {key: value for key, value in state.items() if value},
        records=[
            Record(held.extent, None)
            for file in files
            for name, held in file.tensors.items()
            if _is_known(name)
        ],
        left_out=[*left_out, *sorted(others)],
    )


def _is_known(name: str) -> bool:
    return name.startswith((FULL, "optimizer/"))


def _check_kind(file: File) -> None:
    horizontal = file.size("horizontal_parallel_size", 1)
    cut = any(
        name.rpartition("/")[2] == "megatron_row_partition" and value not in ([-1], -1)
        for name, value in file.values.items()
    )
    if horizontal > 1 or cut:
        raise UnsupportedCheckpoint(
            f"{file.path} was saved with horizontal (Megatron) parallelism of {horizontal}, which "
            "zckpt does not read",
            hint="what is read: ZeRO with data parallelism alone",
        )
    name = file.options.get("optimizer_name")
    if name is not None and name not in OPTIMIZERS:
        raise UnsupportedCheckpoint(f"{file.path} is of an optimizer {name!r}")


def _shapes(files: Sequence[File]) -> dict[str, tuple[int, ...]]:
    """Shapes of split weights, which every one of their owners states."""
    found: dict[str, tuple[int, ...]] = {}
    for file in files:
        for name, shape in _split(file).items():
            if found.setdefault(name, shape) != shape:
                raise InconsistentCheckpoint(
                    f"{file.path} says that {name} has shape {shape}, another rank {found[name]}"
                )
    return found


def _split(file: File) -> dict[str, tuple[int, ...]]:
    """Weights that are split on this rank, with their shapes."""
    end, prefix = "/original_dim", "partition_info/"
    found = {}
    for name, value in file.values.items():
        if name.startswith(prefix) and name.endswith(end):
            if not isinstance(value, list) or not all(type(d) is int and d >= 0 for d in value):
                raise CorruptCheckpoint(f"{file.path}: {name} is {value!r}, no shape")
            found[name.removeprefix(prefix).removesuffix(end)] = tuple(value)
    return found


def _rank(file: File) -> Rank:
    rank = Rank(file.path)
    split = _split(file)
    for name, held in file.tensors.items():
        if name.startswith(FULL):
            weight = name.removeprefix(FULL)
            # a weight that stays fp32 in a mixed run is whole, though its moments are split
            whole = weight not in split or held.numel == prod(split[weight])
            (rank.weights if whole else rank.pieces)[weight] = held
        elif name.startswith("optimizer/"):
            weight, _, moment = name.removeprefix("optimizer/").rpartition("/")
            rank.moments.setdefault(weight, {})[SLOTS[moment]] = held
    for name, value in file.values.items():
        group, _, last = name.removeprefix("optimizer/").rpartition("/")
        if not name.startswith("optimizer/"):
            continue
        number = value[0] if isinstance(value, list) and len(value) == 1 else value
        if type(number) is not int or number < 1:
            raise CorruptCheckpoint(f"{file.path}: {name} is {value!r}, no counter from 1")
        if group in SHARED_GROUPS and last.lower() == SHARED.lower():
            rank.shared = number
        elif last == COUNT:
            rank.counts[group] = number
        else:
            raise UnsupportedCheckpoint(f"{file.path} holds {name}, of an optimizer unknown here")
    return rank
