"""What opened model and optimizer files state about a run, whichever layout they are in."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from msgspec import Struct, field

from ...core.checkpoint import agreement
from ...core.checkpoint.entries import Entry, Key
from ...core.checkpoint.facts import StepPlace
from ...core.checkpoint.inert import Foreign, Scalar, inside, map_values, nested, to_json
from ...core.checkpoint.manifest import Sighting
from ...core.checkpoint.optimizer_states import Part, StateRow, unsupported
from ...core.storage.fragments import Fragments
from ...errors import CorruptCheckpoint, Notice, UnsupportedCheckpoint
from ...files.torchfile import Parsed, Tensor, TorchFile
from .. import zero
from .directories import TagDirectory

FIRST = 16  # files that are opened one after another
LONG_WAIT = 1e-3  # seconds of waiting per file, beyond the work of parsing it
COUNTERS = ("global_steps", "skipped_steps", "global_samples")

ParameterShapes = dict[str, tuple[int, ...]]


class ModuleOverrides(Struct, frozen=True):
    """Values that replace the model file's values; None keeps the file's value.

    What is replaced depends on the kind of checkpoint:

        with experts            tensors in the experts' files, names of all experts
        with AutoEP             a tensor for each expert, instead of stacked ones
        pipelines               tensors in layer files, shapes if the file lists none
        stage 0                 the optimizer's parameters, as zckpt found them
        universal directories   tensors that are equal on all model ranks
    """

    module: dict[str, Any] | None = None
    buffer_names: Sequence[str] | None = None
    second_names: Mapping[str, str] | None = None
    frozen_shapes: Mapping[str, Any] | None = None
    shapes: Sequence[ParameterShapes] | None = None
    """Names and shapes of every flat buffer."""

    def module_of(self, model: Mapping[str, Any]) -> Any:
        """The module's state dict that counts: this object's if it has one, else the model file's.

        None if neither has one.
        """
        return model.get("module") if self.module is None else self.module


class EngineStates(Struct, frozen=True):
    """The opened files of one checkpoint: those of all ranks, or of a universal directory.

    models       model files; `model` is the content of the first one
    optimizers   optimizer files; empty if the optimizer is not read
    states       per optimizer file: the state of DeepSpeed's optimizer class
    bases        per optimizer file: the base optimizer's {"state": ..., "param_groups": ...}
    dp           the number of data ranks
    overrides    values that replace those in `model`
    """

    directory: TagDirectory
    models: Sequence[TorchFile]
    optimizers: Sequence[TorchFile]
    model: dict[str, Any]
    states: Sequence[dict[str, Any]]
    bases: Sequence[dict[str, Any]]
    version: str
    dp: int
    partitioned: bool
    """Stage 3: every parameter is partitioned separately."""
    whole: bool = False
    """Stage 0: the model file has the full optimizer."""
    numbers: tuple[int, ...] = ()
    """The ranks whose files these are; empty for all ranks."""
    everyone: EngineStates | None = None
    """The states of all ranks of the run, if this object has those of some ranks only."""
    apart: Mapping[str, TorchFile] = field(default_factory=dict)
    """Maps names of module tensors to the file they are in, if that is not the model file."""
    overrides: ModuleOverrides = ModuleOverrides()

    @property
    def module(self) -> dict[str, Any]:
        """The module's state dict; it also has values that are no tensors (`get_extra_state`)."""
        module_in_file: dict[str, Any] = self.model.get("module", {})
        return module_in_file if self.overrides.module is None else self.overrides.module

    @property
    def buffer_names(self) -> Sequence[str]:
        """The names of the module's buffers."""
        names = self.overrides.buffer_names
        return self.model.get("buffer_names") or () if names is None else names

    @property
    def second_names(self) -> Mapping[str, str]:
        """Maps second names of tied weights to first names (stated since DeepSpeed 0.9.0)."""
        owners = self.overrides.second_names
        return self.model.get("shared_params") or {} if owners is None else owners

    @property
    def frozen_shapes(self) -> Mapping[str, Any] | None:
        """The shapes of frozen parameters; None if none are stated."""
        shapes = self.overrides.frozen_shapes
        return self.model.get("frozen_param_shapes") if shapes is None else shapes

    @property
    def listed_shapes(self) -> Any:
        """Names and shapes of the parameters in every flat buffer, as stated; None if not stated.

        They come from `overrides`, else from the model file.
        """
        return (
            self.model.get("param_shapes")
            if self.overrides.shapes is None
            else self.overrides.shapes
        )

    def file_of(self, name: str) -> TorchFile:
        """The file that contains the module's tensor `name`."""
        return self.apart.get(name, self.models[0])

    @property
    def first(self) -> dict[str, Any]:
        return self.states[0] if self.states else {}

    @property
    def config(self) -> dict[str, Any]:
        """The ds_config; empty if the run saved only the name of its file."""
        config = self._stated_config
        return config if isinstance(config, dict) else {}

    @property
    def config_path(self) -> str | None:
        """The name of the ds_config's file, if the run saved only this name; else None."""
        path = self._stated_config
        return path if isinstance(path, str) else None

    @property
    def _stated_config(self) -> Any:
        return stated_config(self.model, self.optimizers[0].value if self.optimizers else {})

    @property
    def stage(self) -> int | None:
        """The ZeRO stage of the optimizer files.

        Without such files, it is the ds_config's stage, or None if the ds_config states none.
        """
        if self.whole:
            return 0
        if not self.optimizers:
            configured = nested(self.config, "zero_optimization", "stage")
            return configured if isinstance(configured, int) else None
        number = stated_stage(self.first)
        if isinstance(number, int):
            configured = nested(self.config, "zero_optimization", "stage")
            before_0_7 = version_numbers(self.version) < (0, 7)
            # before 0.7.0 a stage-1 run states 2
            return 1 if number == 2 and configured == 1 and before_0_7 else number
        return 3 if self.partitioned else 1  # BF16_Optimizer states none and is used for stage 1

    @property
    def engine_class(self) -> str | None:
        """The engine's class that wrapped the optimizer, such as BF16_Optimizer.

        None if torch's own optimizer was not wrapped, or if there are no optimizer files.
        """
        if self.whole:
            return wrapper_of(self.first)
        if not self.optimizers:
            return None
        if self.partitioned:
            return "DeepSpeedZeroOptimizer_Stage3"
        return "DeepSpeedZeroOptimizer" if "zero_stage" in self.first else "BF16_Optimizer"

    @property
    def elastic(self) -> bool:
        """Whether the run saved elastic files (`elastic_checkpoint`).

        Such files have no padding and no hyper-parameters.
        """
        return isinstance(self.first.get("base_optimizer_state"), list)

    @property
    def excludes_frozen(self) -> bool | None:
        """Whether `save_checkpoint(exclude_frozen_parameters=True)` left frozen weights out.

        None if the files do not show it: in stages 0 and 1, and in DeepSpeed before 0.9.1. For such
        a source, zckpt writes `frozen_param_shapes` as an empty dictionary and
        `frozen_param_fragments` as None (model_files.py).
        """
        if (self.stage or 0) < 2 or "frozen_param_fragments" not in self.model:
            return None
        omitted = self.model["frozen_param_fragments"] is None
        return None if omitted and self.frozen_shapes is not None else omitted

    @property
    def round_robin(self) -> bool:
        """Whether `param_shapes` lists the parameters of a group in round-robin order (zero.py).

        A run that was started with `--deepspeed_config FILE` saves only the file's name, not the
        setting. Then the answer is found by comparing `param_shapes` with the order of the module's
        own names.
        """
        if self.everyone is not None:
            return self.everyone.round_robin
        if self.engine_class != "DeepSpeedZeroOptimizer":
            return False
        if self.config:
            return bool(nested(self.config, "zero_optimization", "round_robin_gradients"))
        order = {name: place for place, name in enumerate(self.module)}
        groups = [list(names) for names in self.param_shapes()]
        groups = [names for names in groups if order.keys() >= set(names)]  # not of experts
        for names in groups:
            plain = sorted(names, key=lambda name: order.get(name, 0))
            laid_out = [plain[place] for place in zero.round_robin(len(plain), self.dp)]
            if names != laid_out:
                return False
        return any(len(names) > self.dp > 1 for names in groups)

    def effective_config(self, round_robin: bool) -> dict[str, Any]:
        """The ds_config; if the run saved only its file name, one inferred from the files.

        `round_robin` is the value for `round_robin_gradients` in that case.
        """
        if self.config:
            return self.config
        paddings = self.first.get("param_alignment_paddings") or ()
        shown: dict[str, Any] = {
            "zero_optimization": {
                "stage": self.stage,
                "round_robin_gradients": round_robin,
                "parameter_alignment": any(map(any, paddings)),
            }
        }
        if self.engine_class == "BF16_Optimizer":
            shown["data_types"] = {"grad_accum_dtype": "fp32"}
        return shown

    @property
    def module_dtype(self) -> str:
        """The type of the module's trainable weights; F32 if there are no such weights.

        In stage 3, the module has only placeholders for these weights, but of the same type.
        """
        for names in self.param_shapes():
            for name in names:
                weight = self.module.get(name)
                if isinstance(weight, Tensor):
                    return weight.dtype
        return "F32"

    def param_shapes(self) -> list[ParameterShapes]:
        """Names and shapes of the parameters in every flat buffer, in the order of the buffer.

        Only this list is always in that order. Raises CorruptCheckpoint if no file has it.
        """
        shapes = self.listed_shapes
        # slice mappings are no substitute: they are wrong under `round_robin_gradients`
        if shapes is None:  # before 0.6.0 the list is in the optimizer files
            shapes = self.first.get("param_shapes", self.optimizers[0].value.get("param_shapes"))
        return shapes_of_groups(shapes, self.models[0])

    def flat_states(self, place: int) -> list[dict[str, Any]]:
        """Per rank, the base optimizer's state of flat buffer number `place`: {"exp_avg": ...}.

        A rank without a state for the buffer has an empty dictionary.
        """
        return [item(base.get("state"), place) for base in self.bases]

    def groups(self, place: int) -> list[dict[str, Any]]:
        """One param group as every rank's optimizer file has it; `place` is the group's number.

        Files of `elastic_checkpoint` have no param groups, so all dictionaries are empty.
        """
        return [item(base.get("param_groups"), place) for base in self.bases]

    def name_of(self, place: int) -> str:
        """The rank and the name of the optimizer file at index `place`, for errors."""
        rank = self.numbers[place] if self.numbers else place
        return f"rank {rank}, {os.path.basename(self.optimizers[place].path)}"

    def number(self, rank: int, value: Any) -> Any:
        """Reads the number in `value`, if it is a tensor of one element in a rank's optimizer file.

        Any other value is returned unchanged.
        """
        return self.optimizers[rank].number(value)

    def scalar(self, values: Sequence[Any]) -> Scalar | None:
        """The number that all ranks state; None if their values differ, or if a value is no number.

        A Python number's `dtype` is the name of its Python type, such as "int".
        """
        numbers: dict[str, Scalar | None] = {}  # keyed by text, so that a NaN equals itself
        for rank, value in enumerate(values):
            number = self.number(rank, value)
            if isinstance(number, (bool, int, float)):
                number = Scalar(number, type(number).__name__)
            numbers[repr(number)] = number if isinstance(number, Scalar) else None
        return next(iter(numbers.values())) if len(numbers) == 1 else None


FLAT_MASTERS, WHOLE_MASTERS = "fp32_groups_flat", "fp32_groups"
WRAPPERS = {"FP16_Optimizer": FLAT_MASTERS, "FP16_UnfusedOptimizer": WHOLE_MASTERS}
"""The engine's wrappers around an optimizer in stage 0, with the keys of their masters (0.19.8)."""


def wrapper_of(optimizer: Mapping[str, Any]) -> str | None:
    """The DeepSpeed class that wrote an optimizer's state; None if torch's optimizer did.

    `WRAPPERS` lists these classes.
    """
    return next((name for name, key in WRAPPERS.items() if key in optimizer), None)


def stated_stage(optimizer: Mapping[str, Any]) -> Any:
    """The ZeRO stage that an optimizer's state contains; None if it contains none."""
    stage = optimizer.get("zero_stage")
    if isinstance(stage, Foreign) and stage.arguments:  # ZeroStageEnum(2), since 0.7
        return stage.arguments[0]
    return stage


def stated_config(model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> Any:
    """The ds_config that the files state, or only the name of the ds_config's file."""
    return model.get("ds_config") or optimizer.get("ds_config")


def shapes_of_groups(shapes: Any, file: TorchFile) -> list[ParameterShapes]:
    """The `param_shapes` of a file as one dictionary per flat buffer, with shapes as tuples.

    Raises CorruptCheckpoint if `shapes` is neither a list nor a dictionary.
    """
    groups = [shapes] if isinstance(shapes, dict) else shapes  # before 0.5.4 one for all buffers
    if not isinstance(groups, list):
        raise CorruptCheckpoint(
            "file-damaged", f"{file.path} states no param_shapes", file=file.path
        )
    return [{name: tuple(shape) for name, shape in group.items()} for group in groups]


def in_user_order(shapes: ParameterShapes, states: EngineStates) -> ParameterShapes:
    """The parameters of one flat buffer in the user's order: the engine's round robin is undone."""
    if not states.round_robin:
        return shapes
    names = list(shapes)
    order = zero.undo_round_robin(len(names), states.dp)
    return {names[place]: shapes[names[place]] for place in order}


def open_files(paths: Sequence[str], parsed: Parsed) -> list[TorchFile]:
    """Opens files of torch.save, each path once; files with equal pickles share a parsed value."""
    new = _opened([path for path in paths if path not in parsed.files], parsed)
    parsed.files.update((file.path, file) for file in new)
    return [parsed.files[path] for path in paths]


def _opened(paths: Sequence[str], parsed: Parsed) -> list[TorchFile]:
    """Opens files one after another, or in threads if the first files show slow storage.

    On cold or remote storage, several threads can wait for data at the same time. On fast storage,
    threads would only compete for Python's interpreter lock.
    """
    began, busy = time.perf_counter(), time.thread_time()
    files = [TorchFile(path, parsed) for path in paths[:FIRST]]
    waited = time.perf_counter() - began - (time.thread_time() - busy)
    rest = paths[FIRST:]
    if not rest or waited < LONG_WAIT * len(files):
        return files + [TorchFile(path, parsed) for path in rest]
    with ThreadPoolExecutor(16) as pool:
        return files + list(pool.map(lambda path: TorchFile(path, parsed), rest))


def dictionary(file: TorchFile, value: Any) -> dict[str, Any]:
    """Returns `value` if it is a dictionary; raises CorruptCheckpoint otherwise."""
    if not isinstance(value, dict):
        raise CorruptCheckpoint(
            "file-damaged",
            f"{file.path} is not a file of a ZeRO checkpoint: it lacks the engine's dictionary",
            file=file.path,
        )
    return value


def version_of(*places: Mapping[str, Any]) -> str:
    """The version of DeepSpeed, from the first of the given dictionaries that states a version.

    Raises UnsupportedCheckpoint if no dictionary states a version.
    """
    for place in places:
        version = place.get("ds_version")
        if isinstance(version, str) and re.match(r"\d+\.\d", version):
            return version
    raise UnsupportedCheckpoint(
        "version-unsupported",
        "the files state no DeepSpeed version",
        hint="DeepSpeed has stated its version since 0.4.0; zckpt reads files since 0.5.10",
    )


def version_numbers(version: str) -> tuple[int, ...]:
    """A version as a tuple of numbers, which can be compared.

    0.0.0, the version of a source tree that was never installed, counts as newest.
    """
    words = "".join(c if c.isdecimal() else " " for c in version).split()
    numbers = tuple(map(int, words[:3]))
    return numbers if any(numbers) else (999,)


def item(items: Any, place: int) -> dict[str, Any]:
    """The dictionary at `place` in a list or dictionary of dictionaries; empty if it is missing."""
    if isinstance(items, list):
        value = items[place] if place < len(items) else {}
    else:
        value = items.get(place, {}) if isinstance(items, dict) else {}
    return value if isinstance(value, dict) else {}


def comparable(value: Any) -> Any:
    """`value` as JSON, in which a tensor is only its type and shape, such as "F32 (4, 8)"."""

    def plain(value: Any, _key: Any) -> Any:
        if isinstance(value, Tensor):
            return f"{value.dtype} {value.shape}"
        return map_values(value, plain)

    return to_json(plain(value, None))


# -- what a reader extracts from one flat buffer


class BufferSlot(Struct, frozen=True):
    """One kind of tensor (masters, or one optimizer state) of all parameters in a flat buffer.

    name        "master", "exp_avg" and so on
    fragments   where each parameter's elements are in files
    copies      further copies on other ranks: (parameter, where in files)
    """

    name: str
    dtype: str
    fragments: Mapping[str, Fragments]
    copies: Sequence[tuple[str, Fragments]] = ()


class FlatBuffer(Struct, frozen=True):
    """One flat buffer of the source, read from all ranks.

    group              the number of the param group
    shapes             names and shapes of parameters, in the user's order
    slots              masters, and states of the parameters' shapes
    step, step_place   the optimizer's step, and where files keep it
    scalars            states that are a single number
    sightings          all places in files that state a step
    warnings           about these steps
    partition_values   states that cannot be divided by parameter: ranks' values
    starts             each parameter's first element in the buffer
    files              the rank files that `partition_values` are from
    other              all other states (stage 0), listed under the first parameter
    """

    group: int
    shapes: Mapping[str, tuple[int, ...]]
    slots: Sequence[BufferSlot]
    step: agreement.Step | None
    step_place: StepPlace | None
    scalars: Mapping[str, Scalar]
    sightings: Sequence[Sighting]
    warnings: Sequence[Notice]
    partition_values: Mapping[Any, Sequence[Any]] = field(default_factory=dict)
    starts: Mapping[str, int] = field(default_factory=dict)
    files: Sequence[TorchFile] = ()
    other: Mapping[Any, Any] = field(default_factory=dict)


def states_of_partitions(
    ranks: EngineStates, buffers: Sequence[FlatBuffer], entries: dict[Key, Entry]
) -> list[StateRow]:
    """The manifest's records of optimizer states that cannot be divided among parameters.

    Examples are SOAP's matrices, and the scales of 8-bit optimizers. Their tensors are added to
    `entries`. For elastic files and runs with experts, the records only say that zckpt does not
    read such states.
    """
    rows: list[StateRow] = []
    parts = 0
    # elastic saves cut padding off these tensors too, and with experts the ranks have partitions of
    # different buffers
    kind = "a run with experts" if ranks.model.get("num_experts") else ""
    kind = "an elastic save" if ranks.elastic else kind
    reason = f"in {kind}, zckpt does not read states that belong to a rank's partition"
    for number, buffer in enumerate(buffers):
        path = f"optimizer.partitions.{number if kind else parts}"
        parts += bool(buffer.partition_values)
        of_ranks = Part(ranks.stage, ranks.dp, tuple(buffer.starts.values()))
        for key, values in buffer.partition_values.items():
            tensors: dict[Key, Entry] = {}
            kept_values = [
                file.kept(value, inside(f"{path}.{rank}", key), tensors)
                for rank, (value, file) in enumerate(zip(values, buffer.files, strict=True))
            ]
            if kind:
                rows.append(unsupported(key, buffer.starts, reason, kept_values, tensors.values()))
            else:
                entries |= tensors
                rows.append(
                    StateRow(key, "partition", (*buffer.starts,), kept_values, part=of_ranks)
                )
    return rows
