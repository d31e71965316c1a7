"""DeepSpeed's ZeRO-1, 2 and 3 directories, as engine.save_checkpoint writes them.

    <run>/latest                                              the tag, as text
    <run>/<tag>/mp_rank_00_model_states.pt                    stage 1, 2: weights, buffers, counters
    <run>/<tag>/zero_pp_rank_R_mp_rank_00_model_states.pt     stage 3: one per rank, weights empty
    <run>/<tag>/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   R is the data-parallel rank

Order and shapes of the parameters come from `param_shapes` in the model states alone: the slice
mappings in the optimizer files are wrong under `round_robin_gradients` (seen in 0.19.8). Facts are
of 0.19.8 unless said otherwise; files back to 0.5.10 are read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from .. import steps
from ..dtypes import SIZES
from ..errors import (
    AmbiguousCheckpoint,
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    NotACheckpoint,
    UnsupportedCheckpoint,
)
from ..inert import Foreign, Scalar, TensorName, map_values, to_json
from ..manifest import (
    Entry,
    Extent,
    Fragments,
    Manifest,
    Parameter,
    Record,
    Runs,
    Sibling,
    Sighting,
    Slices,
    slot_name,
)
from ..torchfile import Parsed, Tensor, TorchFile
from . import zero

MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
MODEL_3 = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
# the underscore before `optim` is missing in very old files; DeepSpeed still looks for these
OPTIMIZER = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
PIPELINE = re.compile(r"layer_\d+-.*model_states\.pt")
EXPERT = re.compile(r"(layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+_.*")
RECOVERY = ("zero_to_fp32.py", "zero_to_torch.py", "latest", "latest_universal")

# keys of the model states that the engine itself writes; all others are the user's client_state
ENGINE_KEYS = frozenset(
    """module buffer_names optimizer param_shapes frozen_param_shapes frozen_param_fragments
    shared_params lr_scheduler data_sampler random_ltd skipped_steps global_steps global_samples
    dp_world_size mp_world_size checkpoint_parallel_dimensions ds_config ds_version num_experts
    sparse_tensor_module_names csr_tensor_module_names ds_autoep_layers""".split()
)
# files by which a trainer's directory is known: Hugging Face Trainer, Accelerate
TRAINER = re.compile(r"trainer_state\.json|rng_state(_\d+)?\.pth|random_states_\d+\.pkl|scheduler\.bin")
COUNTERS = ("global_steps", "skipped_steps", "global_samples")


# -- finding the files


@dataclass(frozen=True, slots=True)
class Place:
    """A tag's directory, and the run directory around it where there is one."""

    directory: str
    tag: str
    run: str | None


def detect(path: str) -> list[str]:
    """Tags of the checkpoints at `path`; the tag of a tag directory itself is its name."""
    if not os.path.isdir(path):
        return []
    if _holds_states(path):
        return [os.path.basename(os.path.abspath(path))]
    if os.path.isfile(os.path.join(path, "latest")):
        return [_latest(path)]
    return _tags(path)


def _holds_states(path: str) -> bool:
    with os.scandir(path) as items:
        return any(
            MODEL.fullmatch(item.name)
            or MODEL_3.fullmatch(item.name)
            or OPTIMIZER.fullmatch(item.name)
            for item in items
        )


def _tags(path: str) -> list[str]:
    with os.scandir(path) as items:
        folders = sorted(item.name for item in items if item.is_dir())
    return [name for name in folders if _holds_states(os.path.join(path, name))]


def _latest(path: str) -> str:
    with open(os.path.join(path, "latest"), "rb") as file:
        return file.read(4096).decode("utf-8", "replace").strip()


def _locate(path: str, tag: str | None) -> Place:
    if tag is None and _holds_states(path):
        whole = os.path.abspath(path)
        return Place(path, os.path.basename(whole), None)
    if tag is None:
        found = detect(path)
        if not found:
            raise NotACheckpoint(f"{path} holds no DeepSpeed checkpoint")
        if len(found) > 1:
            raise AmbiguousCheckpoint(
                f"{path} holds {len(found)} tags and no file `latest`: {', '.join(found)}",
                hint=f"choose one with --tag {found[-1]}",
            )
        tag = found[0]
        source = f"{os.path.join(path, 'latest')} names"
    else:
        source = "--tag names"
    if not tag or tag in (".", "..") or re.search(r"[/\\\0]", tag):
        raise NotACheckpoint(
            f"{source} {tag!r}, which is no folder name",
            hint="choose a tag with --tag" + _near(path),
        )
    directory = os.path.join(path, tag)
    if not os.path.isdir(directory):
        raise NotACheckpoint(
            f"{source} {tag!r}, but {path} has no such folder",
            hint="choose a tag with --tag" + _near(path),
        )
    return Place(directory, tag, path)


def _near(path: str) -> str:
    tags = _tags(path)
    return f"; here are {', '.join(tags)}" if tags else "; no tag folder is left here"


# -- reading


def read(path: str, tag: str | None = None, step_policy: str | None = None) -> Manifest:
    """The manifest of a run directory, a tag directory, or a trainer's directory around one.

    Raises IncompleteCheckpoint (a rank is missing), InconsistentCheckpoint (ranks contradict each
    other), UnsupportedCheckpoint (stage 0, TP, PP, MoE, NVMe offload, before 0.5.10).
    """
    place = _locate(path, tag)
    models, optimizers = _rank_files(place)
    parsed: Parsed = {}
    optimizer_files = _open(optimizers, parsed)
    model_files = _open(models, parsed)
    return _Reader(place, model_files, optimizer_files, step_policy).manifest()


def _rank_files(place: Place) -> tuple[list[str], list[str]]:
    """Paths of model and optimizer files in rank order; refuses what is not one plain ZeRO run."""
    names = sorted(os.listdir(place.directory))
    if any(PIPELINE.fullmatch(name) for name in names):
        _refuse(place, "pipeline parallelism")
    if any(EXPERT.fullmatch(name) for name in names):
        _refuse(place, "mixture-of-experts layers")
    if "offloaded_tensors" in names:
        _refuse(place, "optimizer states offloaded to NVMe")

    models, models_3, optimizers = {}, {}, {}
    tensor_ranks = set()
    prefixes = set()
    for name in names:
        full = os.path.join(place.directory, name)
        if found := MODEL.fullmatch(name):
            models[0] = full
            tensor_ranks.add(int(found[1]))
        elif found := MODEL_3.fullmatch(name):
            models_3[int(found[1])] = full
            tensor_ranks.add(int(found[2]))
        elif found := OPTIMIZER.fullmatch(name):
            optimizers[int(found[2])] = full
            tensor_ranks.add(int(found[3]))
            prefixes.add(found[1])
    if tensor_ranks - {0}:
        _refuse(place, f"tensor or pipeline parallelism (mp_rank {max(tensor_ranks)})")
    if len(prefixes) > 1:
        raise InconsistentCheckpoint(
            f"{place.directory} holds optimizer files of a bf16 run and of another one",
            hint="keep only the files of one save",
        )
    if not optimizers:
        _refuse_without_optimizer(place, models or models_3)
    if models and models_3:
        raise InconsistentCheckpoint(
            f"{place.directory} holds model files of stage 1/2 and of stage 3",
            hint="keep only the files of one save",
        )
    if not models and not models_3:
        raise IncompleteCheckpoint(
            f"{place.directory} holds no model states",
            hint="expected mp_rank_00_model_states.pt (stage 1, 2) or one per rank (stage 3)",
        )
    _all_ranks(place, optimizers, "optimizer")
    if models_3:
        _all_ranks(place, models_3, "model")
        if len(models_3) != len(optimizers):
            raise IncompleteCheckpoint(
                f"{place.directory} holds {len(models_3)} model and {len(optimizers)} optimizer "
                "files",
                hint="stage 3 writes one of each per rank",
            )
    found_models = models or models_3
    return (
        [found_models[rank] for rank in sorted(found_models)],
        [optimizers[rank] for rank in sorted(optimizers)],
    )


def _refuse(place: Place, what: str) -> None:
    raise UnsupportedCheckpoint(
        f"{place.directory} was saved with {what}, which zckpt does not read yet",
        hint="what is read: stage 1, 2 and 3 with data parallelism alone; see `zckpt formats`",
    )


def _refuse_without_optimizer(place: Place, models: Mapping[int, str]) -> None:
    if models:
        first = TorchFile(models[min(models)]).value
        if isinstance(first, dict) and first.get("optimizer"):
            _refuse(place, "ZeRO stage 0")
    raise IncompleteCheckpoint(
        f"{place.directory} holds no optimizer files",
        hint="expected [bf16_]zero_pp_rank_0_mp_rank_00_optim_states.pt and one per further rank",
    )


def _all_ranks(place: Place, files: Mapping[int, str], what: str) -> None:
    missing = sorted(set(range(max(files) + 1)) - set(files))
    if missing:
        example = os.path.basename(files[max(files)])
        name = re.sub(r"zero_pp_rank_\d+", f"zero_pp_rank_{missing[0]}", example)
        raise IncompleteCheckpoint(
            f"{place.directory} lacks {what} files of rank {_listed(missing)}",
            hint=f"expected {name}",
        )


def _listed(items: Sequence[Any]) -> str:
    shown = ", ".join(map(str, items[:5]))
    return shown + (f" and {len(items) - 5} more" if len(items) > 5 else "")


def _open(paths: Sequence[str], parsed: Parsed) -> list[TorchFile]:
    if len(paths) < 32:
        return [TorchFile(path, parsed) for path in paths]
    # parsing holds the interpreter, but waiting for a cold or remote filesystem does not
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda path: TorchFile(path, parsed), paths))


@dataclass(frozen=True, slots=True)
class Slot:
    """One kind of tensor for all parameters of a flat group: where the ranks keep it."""

    name: str
    dtype: str
    partitions: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class Flat:
    """One flat buffer: a group (stage 1, 2) or a sub-group (stage 3).

    `shapes` in the order in which parameters lie; `paddings` follow each of them.
    """

    group: int
    shapes: Mapping[str, tuple[int, ...]]
    paddings: Sequence[int]
    slots: Sequence[Slot]
    step: steps.Step | None
    scalars: Mapping[str, Scalar]


class _Reader:
    """One checkpoint on the way from its files to a manifest."""

    def __init__(
        self,
        place: Place,
        models: Sequence[TorchFile],
        optimizers: Sequence[TorchFile],
        step_policy: str | None,
    ) -> None:
        self.place = place
        self.models = models
        self.optimizers = optimizers
        self.step_policy = step_policy
        self.dp = len(optimizers)
        self.model = _dictionary(models[0], models[0].value)
        self.states = [
            _dictionary(file, _dictionary(file, file.value).get("optimizer_state_dict"))
            for file in optimizers
        ]
        self.first = self.states[0]
        self.version = _version(self.model, optimizers[0].value, self.first)
        self.config: dict[str, Any] = (
            self.model.get("ds_config") or optimizers[0].value.get("ds_config") or {}
        )
        self.entries: dict[str, Entry] = {}
        self.parameters: dict[str, Parameter] = {}
        self.warnings: list[str] = []
        self.left_out: list[str] = []
        self.steps: list[Sighting] = []
        self.step_kept: dict[str, str] | None = None
        self.check()

    # -- what the files say of themselves

    def check(self) -> None:
        """Raises when the files cannot be the whole of one ZeRO checkpoint."""
        if tuple(map(int, re.findall(r"\d+", self.version)[:3])) < (0, 5, 10):
            _refuse(self.place, f"DeepSpeed {self.version}, before 0.5.10")
        if int(self.model.get("mp_world_size") or 1) > 1:
            _refuse(self.place, "tensor parallelism")
        if self.model.get("num_experts") and any(self.model["num_experts"]):
            _refuse(self.place, "mixture-of-experts layers")
        if self.model.get("module") is None:
            _refuse(self.place, "pipeline parallelism")
        stated = self.model.get("dp_world_size")
        if isinstance(stated, int) and stated != self.dp:
            if stated > self.dp:
                raise IncompleteCheckpoint(
                    f"{self.place.directory} holds optimizer files of {self.dp} of {stated} ranks",
                    hint=f"expected {self.file_name(stated - 1)}",
                )
            raise InconsistentCheckpoint(
                f"{self.place.directory} holds optimizer files of {self.dp} ranks, but its model "
                f"states say there were {stated}",
                hint="files of another save may lie between them; keep those of one save",
            )
        count = self.first.get("partition_count")
        counts = set(count) if isinstance(count, list) else {count}
        if isinstance(count, (int, list)) and counts - {self.dp}:
            _refuse(self.place, f"partitions over {sorted(counts)} of {self.dp} ranks (MiCS, MoE)")
        device = _nested(self.config, "zero_optimization", "offload_optimizer", "device")
        if device == "nvme":
            _refuse(self.place, "optimizer states offloaded to NVMe")
        self.same_everywhere()

    def file_name(self, rank: int) -> str:
        name = os.path.basename(self.optimizers[0].path)
        return name.replace("zero_pp_rank_0", f"zero_pp_rank_{rank}")

    def same_everywhere(self) -> None:
        """Raises unless all ranks tell of the same run and the same save."""
        for what, files, told in (
            ("its counters", self.models, [self._counters(file.value) for file in self.models]),
            ("param_groups", self.optimizers, [self._groups(state) for state in self.states]),
            ("loss scale", self.optimizers, [self._scale(state) for state in self.states]),
        ):
            for file, here in zip(files, told, strict=True):
                if here is not told[0] and here != told[0]:
                    raise InconsistentCheckpoint(
                        f"{file.path} differs from {os.path.basename(files[0].path)} in {what}",
                        hint="files of different saves seem to be mixed; take those of one tag",
                    )

    def _counters(self, model: Any) -> Any:
        return [model.get(key) for key in (*COUNTERS, "dp_world_size", "ds_version")]

    def _groups(self, state: Mapping[str, Any]) -> Any:
        """Hyper-parameters as comparable values; None for elastic files, which hold none."""
        groups = self.base_state(state).get("param_groups")
        plain = [{k: v for k, v in group.items() if k != "step"} for group in groups or ()]
        return _comparable(plain) if groups else None

    def _scale(self, state: Mapping[str, Any]) -> Any:
        scaler = state.get("loss_scaler")
        told = (state.get("overflow"), scaler.state if isinstance(scaler, Foreign) else scaler)
        return _comparable(told)

    @property
    def stage_3(self) -> bool:
        return "fp32_flat_groups" in self.first

    @property
    def stage(self) -> int:
        stated = self.first.get("zero_stage")
        if isinstance(stated, Foreign):  # ZeroStageEnum, by value
            stated = stated.arguments[0] if stated.arguments else None
        if isinstance(stated, int):
            return stated
        return 3 if self.stage_3 else 1  # BF16_Optimizer states none and is used for stage 1

    @property
    def engine_class(self) -> str:
        if self.stage_3:
            return "DeepSpeedZeroOptimizer_Stage3"
        return "DeepSpeedZeroOptimizer" if "zero_stage" in self.first else "BF16_Optimizer"

    @property
    def elastic(self) -> bool:
        return isinstance(self.first.get("base_optimizer_state"), list)

    @property
    def dtype(self) -> str:
        """What the module's trainable weights are kept in; stage 3 leaves typed placeholders."""
        for names in self.param_shapes():
            for name in names:
                held = self.model["module"].get(name)
                if isinstance(held, Tensor):
                    return held.dtype
        return "F32"

    def base_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The base optimizer's {state, param_groups}; elastic files list the states alone."""
        held = state.get("optimizer_state_dict" if self.stage_3 else "base_optimizer_state")
        if isinstance(held, list):
            return {"state": dict(enumerate(held))}
        if not isinstance(held, dict):
            raise CorruptCheckpoint(f"{self.place.directory} holds no base optimizer state")
        return held

    def param_shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """Names and shapes of every flat buffer, in the order in which they lie.

        In the optimizer files before 0.6.0; one dictionary instead of a list before 0.5.4.
        """
        shapes = self.model.get("param_shapes")
        if shapes is None:
            shapes = self.first.get("param_shapes", self.optimizers[0].value.get("param_shapes"))
        if isinstance(shapes, dict):
            shapes = [shapes]
        if not isinstance(shapes, list):
            raise CorruptCheckpoint(f"{self.models[0].path} states no param_shapes")
        return [{name: tuple(shape) for name, shape in group.items()} for group in shapes]

    # -- the manifest

    def manifest(self) -> Manifest:
        flats = list(self.partitioned_flats() if self.stage_3 else self.flats())
        for flat in flats:
            self.trainable(flat)
        self.frozen()
        buffers = self.buffers()
        self.aliases()
        self.engine_steps()
        groups = self.groups()
        state = self.state()
        keys = {slot.name for flat in flats for slot in flat.slots} - {"master"}
        scalars = {name for flat in flats for name in flat.scalars}
        named = _nested(self.config, "optimizer", "type")
        return Manifest(
            root=self.place.directory,
            format="deepspeed",
            source={
                "format": "deepspeed",
                "version": self.version,
                "zero_stage": self.stage,
                "dp": self.dp,
                "tag": self.place.tag,
            },
            entries=self.entries,
            parameters=self.parameters,
            buffers=buffers,
            groups=groups,
            optimizer=named
            if isinstance(named, str)
            else steps.infer_optimizer(keys | scalars, groups[0] if groups else None),
            state=state,
            steps=tuple(self.steps),
            records=tuple(
                record
                for file in (*self.models, *self.optimizers)
                for record in file.records.values()
            ),
            files=tuple(file.path for file in (*self.models, *self.optimizers)),
            siblings=_siblings(self.place),
            left_out=tuple(self.left_out),
            warnings=tuple(self.warnings),
        )

    # -- flat groups

    def flats(self) -> Iterator[Flat]:
        """Stage 1 and 2: one flat buffer per group, cut into one partition per rank."""
        shapes = self.param_shapes()
        masters = [self.listed(state, "single_partition_of_fp32_groups") for state in self.states]
        if any(len(held) != len(shapes) for held in masters):
            raise InconsistentCheckpoint(
                f"{self.place.directory}: {len(masters[0])} flat groups, but shapes of {len(shapes)}",
                hint="model and optimizer files of different saves seem to be mixed",
            )
        alignment = self.first.get("param_alignment_paddings") or [None] * len(shapes)
        for group, names in enumerate(shapes):
            paddings = alignment[group] or [0] * len(names)
            numels = [prod(shape) for shape in names.values()]
            total = zero.offsets(numels, paddings)[-1]
            yield self.flat(
                group,
                group,
                names,
                paddings,
                [held[group] for held in masters],
                lambda tensors, total=total: zero.fits(
                    total, sum(tensor.numel for tensor in tensors), self.dp
                ),
            )

    def partitioned_flats(self) -> Iterator[Flat]:
        """Stage 3: one flat buffer per sub-group, in which every parameter is cut by itself."""
        shapes = self.param_shapes()
        masters = [self.listed(state, "fp32_flat_groups") for state in self.states]
        if any(len(held) != len(shapes) for held in masters):
            raise InconsistentCheckpoint(
                f"{self.place.directory}: {len(masters[0])} sub-groups, but shapes of {len(shapes)}",
                hint="model and optimizer files of different saves seem to be mixed",
            )
        groups = self.base_state(self.first).get("param_groups") or []
        group_of = {sub: place for place, group in enumerate(groups) for sub in group["params"]}
        for sub, names in enumerate(shapes):
            width = sum(-(-prod(shape) // self.dp) for shape in names.values())
            if all(tensor.numel == 0 for tensor in (held[sub] for held in masters)) and width:
                _refuse(self.place, "optimizer states offloaded to NVMe")
            yield self.flat(
                group_of.get(sub, sub),
                sub,
                names,
                [0] * len(names),
                [held[sub] for held in masters],
                lambda tensors, width=width: all(tensor.numel == width for tensor in tensors),
            )

    def listed(self, state: Mapping[str, Any], key: str) -> list[Tensor]:
        held = state.get(key)
        if not isinstance(held, list) or not all(isinstance(item, Tensor) for item in held):
            raise CorruptCheckpoint(f"{self.place.directory}: {key} is no list of tensors")
        return held

    def flat(
        self,
        group: int,
        place: int,
        names: Mapping[str, tuple[int, ...]],
        paddings: Sequence[int],
        masters: Sequence[Tensor],
        fits: Callable[[Sequence[Tensor]], bool],
    ) -> Flat:
        """Masters and every optimizer state of flat buffer `place`, from all ranks."""
        if not fits(masters):
            raise InconsistentCheckpoint(
                f"{self.place.directory}: the ranks hold "
                f"{sum(tensor.numel for tensor in masters)} elements of flat group {place}, which "
                f"does not fit its {len(names)} parameters",
                hint="rank files of different runs or world sizes seem to be mixed",
            )
        slots = [self.slot("master", masters)]
        held = [_at(self.base_state(state).get("state"), place) for state in self.states]
        keys = list(dict.fromkeys(key for state in held for key in state))
        scalars: dict[str, Scalar] = {}
        for key in keys:
            values = [state.get(key) for state in held]
            if key == "step":
                continue
            if any(value is None for value in values):
                if any(value is not None for value in values):
                    raise InconsistentCheckpoint(
                        f"{self.place.directory}: only some ranks hold {key!r} of group {place}",
                        hint="rank files of different saves seem to be mixed",
                    )
                continue
            tensors = [value for value in values if isinstance(value, Tensor) and value.shape]
            if len(tensors) == self.dp and fits(tensors):
                slots.append(self.slot(slot_name(str(key)), tensors))
            elif (scalar := self.scalar(values)) is not None:
                scalars[str(key)] = scalar
            else:
                self.left_out.append(f"optimizer state {key!r} of flat group {place}")
        step = self.step(group, place, held)
        return Flat(group, names, paddings, slots, step, scalars)

    def slot(self, name: str, tensors: Sequence[Tensor]) -> Slot:
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1:
            raise InconsistentCheckpoint(
                f"{self.place.directory}: ranks keep {name} in different types: {sorted(dtypes)}"
            )
        pairs = zip(self.optimizers, tensors, strict=True)
        return Slot(name, dtypes.pop(), tuple(file.extent(tensor) for file, tensor in pairs))

    def scalar(self, values: Sequence[Any]) -> Scalar | None:
        """A 0-d state that all ranks hold alike; a plain number keeps its Python type's name."""
        found = set()
        for file, value in zip(self.optimizers, values, strict=True):
            if isinstance(value, Tensor) and value.numel == 1:
                found.add(file.scalar(value))
            elif isinstance(value, (bool, int, float)):
                found.add(Scalar(value, type(value).__name__))
        return found.pop() if len(found) == 1 else None

    def step(
        self, group: int, place: int, held: Sequence[Mapping[str, Any]]
    ) -> steps.Step | None:
        """The step of flat buffer `place`: from the state, else from the group (see steps.py)."""
        groups = [_at(self.base_state(state).get("param_groups"), group) for state in self.states]
        elastic = [state.get("base_optimizer_state_step") for state in self.states]
        found = None
        for kept, where, values in (
            ("state", f"state of flat group {place}", [state.get("step") for state in held]),
            ("group", f"param_groups[{group}]", [item.get("step") for item in groups]),
            ("group", "base_optimizer_state_step", elastic),
        ):
            told = self.told(where, values)
            if told is None:
                continue
            step, kind = told
            sighting = Sighting(where, step, truth=found is None)
            if sighting not in self.steps:
                self.steps.append(sighting)
            if found is None:
                found = step
                self.step_kept = self.step_kept or {"in": kept, "type": kind}
                if warning := steps.stalled(step, kind, where):
                    self.warnings.append(warning)
        return found

    def told(self, where: str, values: Sequence[Any]) -> tuple[steps.Step, str] | None:
        """The step that all ranks tell and its type; raises when they disagree."""
        places, kinds = [], []
        for rank, (file, value) in enumerate(zip(self.optimizers, values, strict=True)):
            if isinstance(value, Tensor) and value.numel == 1:
                value = file.scalar(value)
            step = steps.step_of(value)
            if step is not None:
                places.append((f"rank {rank}, {where}", step))
                kinds.append(steps.kind_of(value))
        step = steps.agree(places, self.step_policy)
        return None if step is None else (step, kinds[0])

    # -- parameters and their entries

    def trainable(self, flat: Flat) -> None:
        """The parameters of one flat buffer, in the user's order, with an entry per slot."""
        names = list(flat.shapes)
        numels = [prod(shape) for shape in flat.shapes.values()]
        if self.stage_3:
            starts = zero.offsets([-(-numel // self.dp) for numel in numels], flat.paddings)
        else:
            starts = zero.offsets(numels, flat.paddings)
        fragments: dict[str, list[Fragments]] = {name: [] for name in names}
        for slot in flat.slots:
            size = SIZES[slot.dtype]
            group = zero.FlatGroup(slot.partitions, size)
            for name, start, numel in zip(names, starts, numels, strict=False):
                if self.stage_3:
                    cut: Fragments = Slices(slot.partitions, start, numel, size)
                else:
                    cut = group.cut(start, start + numel)
                fragments[name].append(cut if numel else Runs([]))

        order = range(len(names))
        if not self.stage_3 and _nested(self.config, "zero_optimization", "round_robin_gradients"):
            order = zero.undo_round_robin(len(names), self.dp)
        for name in (names[place] for place in order):
            shape = flat.shapes[name]
            if name in self.parameters:
                raise CorruptCheckpoint(f"{self.models[0].path} lists {name!r} twice")
            self.parameters[name] = Parameter(
                shape, True, flat.group, flat.step, dict(flat.scalars)
            )
            self.module_entry(name, shape)
            for slot, cut in zip(flat.slots, fragments[name], strict=True):
                self.enter(f"{name}/{slot.name}", slot.dtype, shape, cut)

    def enter(
        self, name: str, dtype: str, shape: tuple[int, ...], fragments: Fragments
    ) -> None:
        self.entries[name] = Entry(name, dtype, shape, fragments)

    def module_entry(self, name: str, shape: tuple[int, ...] | None = None) -> None:
        """Slot `param`: what the module holds; stage 3 leaves empty placeholders, no entry."""
        held = self.model["module"].get(name)
        if not isinstance(held, Tensor) or (self.stage_3 and held.shape == (0,) != shape):
            return
        if shape is not None and held.shape != shape:
            raise InconsistentCheckpoint(
                f"{self.models[0].path}: {name} has shape {held.shape} in the module and {shape} "
                "in param_shapes"
            )
        self.enter(f"{name}/param", held.dtype, held.shape, self.models[0].fragments(held))

    def frozen(self) -> None:
        """Parameters that the optimizer does not own.

        Stage 1 (and stage 2 before 0.9.1) keeps them in `module` alone; stage 3 in fragments, one
        per rank, and before 0.9.1 nowhere.
        """
        shapes = self.model.get("frozen_param_shapes") or {}
        fragments = [file.value.get("frozen_param_fragments") or {} for file in self.models]
        buffers = self.model.get("buffer_names") or ()
        aliases = self.alias_owners()
        lost = []
        for name, held in self.model["module"].items():
            if name in self.parameters or name in buffers or name in aliases:
                continue
            if not isinstance(held, Tensor) or name.endswith("_extra_state"):
                continue  # what a module's get_extra_state gave: kept in the state
            shape = tuple(shapes.get(name, held.shape))
            if not self.stage_3 or held.shape == shape:
                self.parameters[name] = Parameter(held.shape, trainable=False)
                self.module_entry(name, shape)
            elif all(isinstance(rank.get(name), Tensor) for rank in fragments):
                self.parameters[name] = Parameter(shape, trainable=False)
                self.frozen_slices(name, shape, [rank[name] for rank in fragments])
            else:
                lost.append(name)
        if lost:
            self.warnings.append(
                f"the frozen weights {_listed(lost)} are not in this checkpoint: DeepSpeed before "
                "0.9.1 did not save them in stage 3"
            )
        stated = self.model.get("frozen_param_shapes", {})
        if stated is None and self.stage > 1:
            self.warnings.append(
                "saved with exclude_frozen_parameters: frozen weights, if any, are not here"
            )

    def frozen_slices(
        self, name: str, shape: tuple[int, ...], tensors: Sequence[Tensor]
    ) -> None:
        numel, size = prod(shape), SIZES[tensors[0].dtype]
        if any(tensor.numel * self.dp < numel for tensor in tensors):
            raise CorruptCheckpoint(f"{self.place.directory}: fragments of {name} are too short")
        flats = tuple(
            file.extent(tensor) for file, tensor in zip(self.models, tensors, strict=True)
        )
        cut = Slices(flats, 0, numel, size) if numel else Runs([])
        self.enter(f"{name}/param", tensors[0].dtype, shape, cut)

    def alias_owners(self) -> dict[str, str]:
        """Second names of tied weights: as stated (since 0.9.0), or as module names of one memory."""
        owners = {
            alias: owner
            for alias, owner in (self.model.get("shared_params") or {}).items()
            if alias not in self.parameters
        }
        seen: dict[Any, str] = {}
        for name, held in self.model["module"].items():
            if isinstance(held, Tensor) and held.numel and name not in owners:
                first = seen.setdefault((held.place, held.shape, held.strides), name)
                if first != name and name not in self.parameters:
                    owners[name] = first
        return owners

    def aliases(self) -> None:
        for alias, owner in self.alias_owners().items():
            if owner in self.parameters:
                held = self.parameters[owner]
                self.parameters[owner] = replace(held, aliases=(*held.aliases, alias))

    def buffers(self) -> tuple[str, ...]:
        """Persistent buffers, from rank 0; names those that other ranks hold differently."""
        names = [
            name
            for name in self.model.get("buffer_names") or ()
            if isinstance(self.model["module"].get(name), Tensor)
        ]
        differing = []
        for name in names:
            self.module_entry(name)
            told = {
                file.crc(file.value["module"][name])
                for file in self.models
                if isinstance(file.value["module"].get(name), Tensor)
            }
            if len(told) > 1:
                differing.append(name)
        if differing:
            self.warnings.append(
                f"the buffers {_listed(differing)} differ between ranks; rank 0's are taken"
            )
        return tuple(names)

    # -- what is not a tensor

    def groups(self) -> tuple[dict[str, Any], ...] | None:
        """Hyper-parameters per group, without `params` and `step`."""
        groups = self.base_state(self.first).get("param_groups")
        if groups is None:
            return self.elastic_groups()
        return tuple(
            {
                key: self.kept(value, f"param_groups.{place}.{key}", self.optimizers[0])
                for key, value in group.items()
                if key not in ("params", "step")
            }
            for place, group in enumerate(groups)
        )

    def elastic_groups(self) -> tuple[dict[str, Any], ...] | None:
        """What config and scheduler still say, where the files hold no hyper-parameters."""
        count = len(self.param_shapes())
        params = _nested(self.config, "optimizer", "params")
        groups = [dict(params) if isinstance(params, dict) else {} for _ in range(count)]
        scheduler = self.model.get("lr_scheduler")
        if isinstance(scheduler, dict):
            for key, name in (("base_lrs", "initial_lr"), ("_last_lr", "lr")):
                values = scheduler.get(key)
                if isinstance(values, list) and len(values) == count:
                    for group, value in zip(groups, values, strict=True):
                        group[name] = self.kept(value, name, self.models[0])
        if not any(groups):
            self.warnings.append("an elastic checkpoint: it holds no hyper-parameters")
            return None
        self.warnings.append(
            "an elastic checkpoint: its hyper-parameters are what ds_config and the scheduler "
            "say; settings of single groups were never saved"
        )
        return tuple(groups)

    def engine_steps(self) -> None:
        """Counters and schedulers: listed, never true (skipped fp16 steps, warm starts)."""
        scheduler = self.model.get("lr_scheduler")
        told = {f"engine, {key}": self.model.get(key) for key in COUNTERS[:2]}
        if isinstance(scheduler, dict):
            for key in ("last_epoch", "_step_count", "last_batch_iteration"):
                told[f"lr_scheduler, {key}"] = scheduler.get(key)
        for where, value in told.items():
            step = steps.step_of(value)
            if step is not None:
                self.steps.append(Sighting(where, step, False))

    def state(self) -> dict[str, Any]:
        """Everything else, so that an engine's files can be made again."""
        module = self.model["module"]
        engine = {
            "name": "deepspeed",
            "version": self.version,
            "class": self.engine_class,
            "dtype": self.dtype,
            "elastic": self.elastic,
            "config": self.config,
        }
        optimizer = {
            key: self.kept(self.first[key], f"optimizer.{key}", self.optimizers[0])
            for key in ("clip_grad", "loss_scaler", "dynamic_loss_scale", "overflow")
            if key in self.first
        }
        optimizer["step"] = self.step_kept
        extra = {
            name: held
            for name, held in module.items()
            if not isinstance(held, Tensor) or name.endswith("_extra_state")
        }
        state = {
            "engine": engine,
            "counters": {key: self.model.get(key) for key in COUNTERS},
            "lr_scheduler": self.model.get("lr_scheduler"),
            "optimizer": optimizer,
            "module": list(module),
            "module_metadata": getattr(module, "_metadata", None),
            "module_extra": extra,
            "data_sampler": self.model.get("data_sampler"),
            "random_ltd": self.model.get("random_ltd"),
            "client_state": _client_state(self.model),
        }
        self.differing_client_state()
        return {key: self.kept(value, key, self.models[0]) for key, value in state.items()}

    def differing_client_state(self) -> None:
        """Names what ranks of stage 3 hold of their own (rank 0's is what is kept)."""
        first = _client_state(self.model)
        own = set()
        for file in self.models[1:]:
            if file.value is not self.model:
                other = _client_state(file.value)
                for key in first.keys() | other.keys():
                    if _comparable(first.get(key)) != _comparable(other.get(key)):
                        own.add(key)
        self.left_out += [f"client_state {key!r} of ranks other than 0" for key in sorted(own)]

    def kept(self, value: Any, path: str, file: TorchFile) -> Any:
        """`value` with its tensors as entries of slot `state`; 0-d ones by value."""
        if isinstance(value, Tensor):
            if not value.shape and value.dtype != "C64":
                return file.scalar(value)
            self.enter(f"{path}/state", value.dtype, value.shape, file.fragments(value))
            return TensorName(path)
        return map_values(value, lambda item, key: self.kept(item, f"{path}.{key}", file))


def _siblings(place: Place) -> tuple[Sibling, ...]:
    """Files of a trainer's directory around the tag; none for a plain run directory."""
    if place.run is None or not any(map(TRAINER.fullmatch, os.listdir(place.run))):
        return ()
    apart = {place.tag, *_tags(place.run)}
    found = []
    for folder, folders, names in os.walk(place.run):
        inside = os.path.relpath(folder, place.run)
        if inside == ".":
            folders[:] = [name for name in folders if name not in apart]
            names = [name for name in names if name not in RECOVERY]
        folders.sort()
        for name in sorted(names):
            full = os.path.join(folder, name)
            if os.path.isfile(full) and not os.path.islink(full):
                relative = os.path.normpath(os.path.join(inside, name))
                found.append(Sibling(relative, full, os.path.getsize(full)))
    return tuple(found)


def _dictionary(file: TorchFile, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CorruptCheckpoint(
            f"{file.path} is no file of a ZeRO checkpoint: it lacks the engine's dictionary"
        )
    return value


def _version(*places: Mapping[str, Any]) -> str:
    for place in places:
        version = place.get("ds_version")
        if isinstance(version, str) and re.match(r"\d+\.\d+", version):
            return version
    raise UnsupportedCheckpoint(
        "the files state no DeepSpeed version",
        hint="DeepSpeed writes it since 0.4.0; zckpt reads files since 0.5.10",
    )


def _client_state(model: Mapping[str, Any]) -> dict[Any, Any]:
    return {key: value for key, value in model.items() if key not in ENGINE_KEYS}


def _nested(config: Any, *keys: str) -> Any:
    for key in keys:
        config = config.get(key) if isinstance(config, dict) else None
    return config


def _at(held: Any, place: int) -> dict[str, Any]:
    """Item `place` of a list or dictionary of dictionaries; empty where there is none."""
    if isinstance(held, list):
        found = held[place] if place < len(held) else {}
    else:
        found = held.get(place, {}) if isinstance(held, dict) else {}
    return found if isinstance(found, dict) else {}


def _comparable(value: Any) -> Any:
    """`value` as JSON, its tensors by kind alone (bytes are compared by `verify`)."""

    def plain(item: Any, _key: Any) -> Any:
        if isinstance(item, Tensor):
            return f"{item.dtype} {item.shape}"
        return map_values(item, plain)

    return to_json(plain(value, None))
