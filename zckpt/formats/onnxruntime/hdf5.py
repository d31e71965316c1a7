"""Reads ONNX Runtime's HDF5 files, one per rank (ORTTrainer.save_checkpoint, 1.7 to 1.16).

    model/full_precision/<w>            fp32 run: full tensor, on every rank; mixed precision: only
                                        on its owners, as a flat slice if ranks share it
    optimizer/<w>/Moment_1, Moment_2, Update_Count    for the elements that the rank owns
    optimizer/shared_optimizer_state/Step             Lamb's counter
    partition_info/<w>/original_dim     the shape of a weight that is split on this rank
    trainer_options/...                 rank, sizes, optimizer, precision
    train_step_info/...                 since 1.12
    user_dict                           a pickle as hexadecimal text: never opened

The files may have any name. If a weight's name contains `/`, HDF5 makes nested groups of it; the
weight's name is then the path of its dataset. 16-bit copies are not stored. Builds before the
release of 1.7 wrote no sizes of data and horizontal parallelism, and groups could be empty.

Other programs' HDF5 files may be in the same folder, so the names in the root group are read before
anything else.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Annotated, Any

from msgspec import Meta, Struct, ValidationError, convert

from ...core.checkpoint.facts import MAX_DP
from ...core.storage.fragments import Extent, Record
from ...errors import (
    CorruptCheckpoint,
    InconsistentCheckpoint,
    Notice,
    UnsupportedCheckpoint,
    note,
    warning,
)
from ...files import hdf5file
from .ranks import COUNT, SHARED, SHORT_NAMES, SLOTS, RankStates, RankTensor, Save

FULL = "model/full_precision/"
SHARED_GROUPS = ("shared_optimizer_state",)
Ranks = Annotated[int, Meta(ge=0, le=MAX_DP)]


class TrainerOptions(Struct, frozen=True):
    """The trainer_options in a rank's file; only `world_rank` differs (ORTTrainer 1.7 to 1.16)."""

    world_rank: Ranks = 0
    world_size: Ranks = 1
    data_parallel_size: Ranks | None = None
    horizontal_parallel_size: Annotated[int, Meta(ge=0)] = 1
    zero_stage: Annotated[int, Meta(ge=0, le=3)] = 0
    mixed_precision: bool | None = None
    optimizer_name: str | None = None


OPTIONS = TrainerOptions.__struct_fields__


def is_one(path: str) -> bool:
    """Whether a file is ONNX Runtime's, by the names in its root group; raises MissingExtra."""
    return {b"model", b"trainer_options"} <= hdf5file.root_names(path)


# -- one file


class RankFile(Struct, frozen=True):
    """The contents of one rank's HDF5 file.

    tensors    tensors by their paths in the file
    values     numbers, lists and texts by their paths
    orphans    byte ranges that are not zero, but belong to no dataset
    """

    path: str
    tensors: Mapping[str, RankTensor]
    values: Mapping[str, Any]
    orphans: Sequence[Extent] = ()

    def under(self, group: str) -> dict[str, Any]:
        """The values directly in an HDF5 group, by their names within the group."""
        prefix = f"{group}/"
        return {
            name.removeprefix(prefix): value
            for name, value in self.values.items()
            if name.startswith(prefix) and "/" not in name.removeprefix(prefix)
        }

    @property
    def options(self) -> TrainerOptions:
        """The file's trainer_options; raises CorruptCheckpoint for impossible values."""
        try:
            return convert(self.under("trainer_options"), TrainerOptions)
        except ValidationError as error:
            raise CorruptCheckpoint(
                "file-damaged", f"{self.path}: trainer_options: {error}", file=self.path
            ) from error

    @property
    def is_partition(self) -> bool:
        """Whether the file has only one rank's partition, so other ranks' files are needed."""
        return self.options.zero_stage > 0 and self.options.world_size > 1


def open_file(path: str) -> RankFile:
    """Reads one file; raises CorruptCheckpoint, UnsupportedCheckpoint, MissingExtra."""
    contents = hdf5file.read(path, _is_tensor)
    tensors = {
        name: RankTensor(dataset.dtype, dataset.shape, dataset.extent)
        for name, dataset in contents.tensors.items()
    }
    return RankFile(path, tensors, contents.values, contents.orphans)


TOP = frozenset(
    {"model", "optimizer", "trainer_options", "train_step_info", "user_dict", "partition_info"}
)
"""The names that ONNX Runtime gives to the groups and datasets at the top of a file."""
STEP_INFO = ("optimization_step", "step")


def _is_tensor(name: str) -> bool:
    return name.startswith("model/") or name.rpartition("/")[2] in SLOTS


# -- the files of all ranks


def opened(root: str, files: Sequence[RankFile]) -> Save:
    """Converts the contents of one checkpoint's files, which are given in rank order, to a `Save`.

    Raises InconsistentCheckpoint if ranks state different options or shapes, and
    UnsupportedCheckpoint for horizontal parallelism and unknown optimizers.
    """
    first = files[0]
    for file in files:
        _refuse_unsupported(file)
        for name in OPTIONS:
            own_value, other = getattr(file.options, name), getattr(first.options, name)
            if own_value != other and name != "world_rank":
                raise InconsistentCheckpoint(
                    "ranks-disagree",
                    f"{file.path} states {name} {own_value!r}, but {first.path} states {other!r}",
                    file=file.path,
                    subject=name,
                )
    ranks = [_rank(file) for file in files]
    state: dict[str, Any] = {
        "trainer_options": {
            name: value
            for name, value in first.under("trainer_options").items()
            if name in OPTIONS and name != "world_rank"
        },
        "train_step_info": first.under("train_step_info"),
        "user_dict": first.values.get("user_dict"),
    }
    return Save(
        root,
        "hdf5",
        ranks,
        # ORTTrainer's mixed precision is always fp16; the files state only that it is mixed
        "F16" if first.options.mixed_precision else None,
        SHORT_NAMES.get(str(first.options.optimizer_name)),
        _shapes_of_split_weights(files),
        {key: value for key, value in state.items() if value},
        records=[
            Record(tensor.extent, None)
            for file in files
            for name, tensor in file.tensors.items()
            if _is_known(name)
        ],
        omitted=_notes_on_omitted_values(files),
        warnings=[
            warning(
                "bytes-unknown",
                f"{orphan.file}: {orphan.length:,} bytes at offset {orphan.offset:,} are not zero, "
                "but belong to no dataset: a dataset's address may be damaged, or a dataset was "
                "deleted",
                file=orphan.file,
            )
            for file in files
            for orphan in file.orphans
        ],
    )


def _notes_on_omitted_values(files: Sequence[RankFile]) -> list[Notice]:
    omitted = []
    for name, by_rank in (
        ("user_dict", [file.values.get("user_dict") for file in files]),
        ("train_step_info", [file.under("train_step_info") for file in files]),
    ):
        if any(value != by_rank[0] for value in by_rank):
            message = f"{name} of all ranks but rank 0"
            omitted.append(note("rank-state-omitted", message, subject=name))
    unknown = {name for file in files for name in file.tensors if not _is_known(name)}
    unknown |= {name for file in files for name in file.values if name.partition("/")[0] not in TOP}
    for group, known_names in (("trainer_options", OPTIONS), ("train_step_info", STEP_INFO)):
        inside = {name for file in files for name in file.under(group)} - {*known_names}
        unknown |= {f"{group}/{name}" for name in inside}
    return [*omitted, *(note("state-unsupported", name, subject=name) for name in sorted(unknown))]


def _is_known(name: str) -> bool:
    return name.startswith((FULL, "optimizer/"))


def _refuse_unsupported(file: RankFile) -> None:
    """Raises UnsupportedCheckpoint for tensor parallelism and for unknown optimizers.

    ONNX Runtime calls tensor parallelism horizontal, or Megatron, parallelism.
    """
    horizontal = file.options.horizontal_parallel_size
    cut = any(
        name.rpartition("/")[2] == "megatron_row_partition" and value not in ([-1], -1)
        for name, value in file.values.items()
    )
    if horizontal > 1 or cut:
        raise UnsupportedCheckpoint(
            "grid-unsupported",
            f"{file.path} was saved with horizontal (Megatron) parallelism of {horizontal}, which "
            "zckpt does not read",
            hint="zckpt reads only ZeRO checkpoints of data-parallel runs",
            file=file.path,
        )
    optimizer = file.options.optimizer_name
    if optimizer is not None and optimizer not in SHORT_NAMES:
        raise UnsupportedCheckpoint(
            "optimizer-unsupported",
            f"{file.path} states the optimizer {optimizer!r}, which zckpt does not know",
            file=file.path,
        )


def _shapes_of_split_weights(files: Sequence[RankFile]) -> dict[str, tuple[int, ...]]:
    """The full shapes of weights that are split over ranks, by name; each owner states them.

    Raises InconsistentCheckpoint if owners state different shapes.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        for name, shape in _split_weights(file).items():
            if shapes.setdefault(name, shape) != shape:
                raise InconsistentCheckpoint(
                    "ranks-disagree",
                    f"{file.path} states the shape {list(shape)} of {name}, but another rank "
                    f"states {list(shapes[name])}",
                    file=file.path,
                    subject=name,
                )
    return shapes


def _split_weights(file: RankFile) -> dict[str, tuple[int, ...]]:
    """Maps each weight of which this rank has only a slice to its full shape."""
    end, prefix = "/original_dim", "partition_info/"
    shapes = {}
    for name, value in file.values.items():
        if name.startswith(prefix) and name.endswith(end):
            if not isinstance(value, list) or not all(type(d) is int and d >= 0 for d in value):
                raise CorruptCheckpoint(
                    "file-damaged",
                    f"{file.path}: {name} is {value!r}, not a shape",
                    file=file.path,
                    subject=name,
                )
            shapes[name.removeprefix(prefix).removesuffix(end)] = tuple(value)
    return shapes


def _rank(file: RankFile) -> RankStates:
    rank = RankStates(file.path)
    split = _split_weights(file)
    for name, tensor in file.tensors.items():
        if name.startswith(FULL):
            weight = name.removeprefix(FULL)
            # a mixed run may keep a weight in fp32: it is complete, though its moments are split
            whole = weight not in split or tensor.numel == prod(split[weight])
            (rank.weights if whole else rank.pieces)[weight] = tensor
        elif name.startswith("optimizer/"):
            weight, _, moment = name.removeprefix("optimizer/").rpartition("/")
            rank.moments.setdefault(weight, {})[SLOTS[moment]] = tensor
    for name, value in file.values.items():
        group, _, last = name.removeprefix("optimizer/").rpartition("/")
        if not name.startswith("optimizer/"):
            continue
        number = value[0] if isinstance(value, list) and len(value) == 1 else value
        if type(number) is not int or number < 1:
            raise CorruptCheckpoint(
                "file-damaged",
                f"{file.path}: {name} is {value!r}, not a counter (ONNX Runtime counts from 1)",
                file=file.path,
                subject=name,
            )
        if group in SHARED_GROUPS and last.lower() == SHARED.lower():
            rank.shared = number
        elif last == COUNT:
            rank.counts[group] = number
        else:
            raise UnsupportedCheckpoint(
                "optimizer-unsupported",
                f"{file.path} has {name}, which is not a state of Adam or Lamb",
                file=file.path,
                subject=name,
            )
    return rank
