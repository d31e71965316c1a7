"""The manifest of a DeepSpeed checkpoint: parameters and their tensors, and all the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ...core.dtypes import SIZES
from ...core.inert import TensorName, inside, map_values
from ...core.manifest import Entry, Fragments, Manifest, Parameter, Runs, Sighting, Slices
from ...errors import CorruptCheckpoint, InconsistentCheckpoint
from ...files.torchfile import Tensor, TorchFile
from ...training import steps
from .. import zero
from .directories import listed, siblings
from .flats import Flat
from .states import COUNTERS, Ranks, comparable, nested

# keys of the model states that the engine itself writes; all others are the user's client_state
ENGINE_KEYS = frozenset(
    (
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_config",
        "ds_version",
        "num_experts",
        "sparse_tensor_module_names",
        "csr_tensor_module_names",
        "ds_autoep_layers",
    )
)


INFERRED = "zckpt_inferred"
"""Beside the optimizer's state: parameters whose names no file of zckpt's source stated."""


def manifest(ranks: Ranks, buffers: Sequence[Flat], format: str) -> Manifest:
    """The manifest of opened files and of the flat buffers that were found in them."""
    place = ranks.place
    tensors = _Tensors(ranks)
    for flat in buffers:
        tensors.add_trainable(flat)
    lost = tensors.add_frozen()
    differing = tensors.add_buffers()
    tensors.add_aliases()
    groups = _groups(ranks, tensors)
    slots = {slot.name for flat in buffers for slot in flat.slots} - {"master"}
    scalars = {name for flat in buffers for name in flat.scalars}
    stated = nested(ranks.config, "optimizer", "type")
    if not isinstance(stated, str):
        stated = steps.infer_optimizer(slots | scalars, groups[0] if groups else None)
    told = [line for flat in buffers for line in flat.sightings]
    state = _state(ranks, buffers, tensors)
    return Manifest(
        root=place.directory,
        format=format,
        source={
            "format": format,
            "version": ranks.version,
            "zero_stage": ranks.stage,
            "dp": ranks.dp,
            "tag": place.tag,
        },
        groups=groups,
        optimizer=stated,
        state=state,
        replicas=tuple(tensors.replicas),
        entries=tensors.entries,
        parameters=tensors.parameters,
        buffers=tensors.buffer_names,
        steps=(*dict.fromkeys(told), *_counters(ranks)),
        records=tuple(
            record
            for file in (*ranks.models, *ranks.optimizers)
            for record in file.records.values()
        ),
        files=tuple(file.path for file in (*ranks.models, *ranks.optimizers)),
        siblings=siblings(place),
        left_out=tuple(
            [what for flat in buffers for what in flat.left_out] + _own_client_state(ranks)
        ),
        warnings=tuple(
            [warning for flat in buffers for warning in flat.warnings]
            + _frozen_warnings(ranks, lost)
            + _buffer_warnings(differing)
            + _elastic_warnings(ranks, groups)
            + _config_warnings(ranks)
        ),
        inferred=tuple(ranks.optimizers[0].value.get(INFERRED) or ()),
    )


class _Tensors:
    """Parameters and entries as they are found."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.module: Mapping[str, Any] = ranks.model["module"]
        self.entries: dict[str, Entry] = {}
        self.replicas: list[Entry] = []
        self.parameters: dict[str, Parameter] = {}
        self.buffer_names = tuple(
            name
            for name in ranks.model.get("buffer_names") or ()
            if isinstance(self.module.get(name), Tensor)
        )

    def enter(self, name: str, dtype: str, shape: tuple[int, ...], fragments: Fragments) -> None:
        self.entries[name] = Entry(name, dtype, shape, fragments)

    def add_trainable(self, flat: Flat) -> None:
        """The parameters of one flat buffer, in the user's order."""
        names = list(flat.shapes)
        if self.ranks.round_robin:
            order = zero.undo_round_robin(len(names), self.ranks.dp)
            names = [names[place] for place in order]
        for name in names:
            if name in self.parameters:
                raise CorruptCheckpoint(f"{self.ranks.models[0].path} lists {name!r} twice")
            shape = flat.shapes[name]
            self.parameters[name] = Parameter(
                shape, True, flat.group, flat.step, dict(flat.scalars)
            )
            if not self.ranks.partitioned:  # stage 3 leaves placeholders, of one element before 0.6
                self._add_weight(name, shape)
            for slot in flat.slots:
                self.enter(f"{name}/{slot.name}", slot.dtype, shape, slot.fragments[name])
        for slot in flat.slots:
            for name, fragments in slot.copies:
                self.replicas.append(
                    replace(self.entries[f"{name}/{slot.name}"], fragments=fragments)
                )

    def _add_weight(self, name: str, shape: tuple[int, ...]) -> None:
        """Slot `param`: what the module holds."""
        held = self.module.get(name)
        if not isinstance(held, Tensor):
            return
        if held.shape != shape:
            raise InconsistentCheckpoint(
                f"{self.ranks.models[0].path}: {name} has shape {held.shape} in the module and "
                f"{shape} where shapes are listed"
            )
        self.enter(f"{name}/param", held.dtype, shape, self.ranks.models[0].fragments(held))

    def add_frozen(self) -> list[str]:
        """Parameters that the optimizer does not own; gives the names of those whose data are lost.

        Stage 1 (and stage 2 before 0.9.1) keeps them in the module alone; stage 3 in fragments,
        one per rank, and before 0.9.1 nowhere.
        """
        shapes = self.ranks.model.get("frozen_param_shapes") or {}
        fragments = [file.value.get("frozen_param_fragments") or {} for file in self.ranks.models]
        apart = {*self.parameters, *self.buffer_names, *self._owners()}
        lost = []
        for name, held in self.module.items():
            if name in apart or not isinstance(held, Tensor) or is_extra(name, held):
                continue
            shape = tuple(shapes.get(name, held.shape))
            tensors = [rank.get(name) for rank in fragments]
            if self.ranks.partitioned and not all(isinstance(each, Tensor) for each in tensors):
                lost.append(name)
                continue
            self.parameters[name] = Parameter(shape, trainable=False)
            if self.ranks.partitioned:
                self._add_frozen_slices(name, shape, tensors)
            else:
                self._add_weight(name, shape)
        return lost

    def _add_frozen_slices(self, name: str, shape: tuple[int, ...], tensors: Sequence[Any]) -> None:
        """One slice per rank; a parameter that stage 3 does not manage is whole on every rank."""
        if tensors[0].shape == shape and tensors[0].numel != -(-prod(shape) // self.ranks.dp):
            self.enter(
                f"{name}/param", tensors[0].dtype, shape, self.ranks.models[0].fragments(tensors[0])
            )
            for file, tensor in zip(self.ranks.models[1:], tensors[1:], strict=True):
                self._add_replica(f"{name}/param", tensor, file)
            return
        numel, size = prod(shape), SIZES[tensors[0].dtype]
        if any(tensor.numel * self.ranks.dp < numel for tensor in tensors):
            raise CorruptCheckpoint(
                f"{self.ranks.place.directory}: the fragments of {name} are too short"
            )
        pairs = zip(self.ranks.models, tensors, strict=True)
        flats = tuple(file.extent(tensor) for file, tensor in pairs)
        fragments = Slices(flats, 0, numel, size) if numel else Runs([])
        self.enter(f"{name}/param", tensors[0].dtype, shape, fragments)

    def add_buffers(self) -> list[str]:
        """Persistent buffers, from rank 0; gives the names of those that ranks hold differently."""
        differing = []
        for name in self.buffer_names:
            self._add_weight(name, self.module[name].shape)
            told = {self.ranks.models[0].crc(self.module[name])}
            for file in self.ranks.models[1:]:
                held = file.value["module"].get(name)
                if isinstance(held, Tensor):
                    told.add(file.crc(held))
                    self._add_replica(f"{name}/param", held, file)
            if len(told) > 1:
                differing.append(name)
        return differing

    def _add_replica(self, name: str, held: Tensor, file: TorchFile) -> None:
        entry = self.entries[name]
        if (entry.dtype, entry.shape) == (held.dtype, held.shape):
            self.replicas.append(replace(entry, fragments=file.fragments(held)))

    def add_state_replicas(self, values: Mapping[str, Any], files: Sequence[TorchFile]) -> None:
        """Other ranks' copies, equally pickled, of what `kept` has entered for rank 0."""

        def walk(value: Any, path: str) -> Any:
            if isinstance(value, Tensor) and f"{path}/state" in self.entries:
                for file in files:
                    self._add_replica(f"{path}/state", value, file)
            return map_values(value, lambda held, key: walk(held, inside(path, key)))

        for path, value in values.items():
            walk(value, path)

    def _owners(self) -> dict[str, str]:
        """Second names of tied weights: as stated (since 0.9.0), or by their common memory."""
        stated = self.ranks.model.get("shared_params") or {}
        owners = {name: owner for name, owner in stated.items() if name not in self.parameters}
        seen: dict[Any, str] = {}
        for name, held in self.module.items():
            # stage 3's placeholders are empty, but a tied weight's two names share one
            telling = isinstance(held, Tensor) and (held.numel or self.ranks.partitioned)
            if telling and name not in owners:
                first = seen.setdefault((held.place, held.shape, held.strides), name)
                if first != name and name not in self.parameters:
                    owners[name] = first
        return owners

    def add_aliases(self) -> None:
        for alias, owner in self._owners().items():
            if owner in self.parameters:
                held = self.parameters[owner]
                self.parameters[owner] = replace(held, aliases=(*held.aliases, alias))
                self._add_own_copy(alias, owner)

    def _add_own_copy(self, alias: str, owner: str) -> None:
        """A tied weight's second name may have been saved with memory of its own."""
        held, first = self.module.get(alias), self.module.get(owner)
        known = f"{owner}/param" in self.entries
        if not (known and isinstance(held, Tensor) and isinstance(first, Tensor) and held.numel):
            return
        if held.place != first.place:
            self._add_replica(f"{owner}/param", held, self.ranks.models[0])

    def kept(self, value: Any, path: str, file: TorchFile) -> Any:
        """`value` with its tensors as entries of slot `state`; 0-d ones by value."""
        if isinstance(value, Tensor):
            if not value.shape and value.dtype != "C64":
                return file.scalar(value)
            self.enter(f"{path}/state", value.dtype, value.shape, file.fragments(value))
            return TensorName(path)
        return map_values(value, lambda held, key: self.kept(held, inside(path, key), file))


def is_extra(name: str, held: Any) -> bool:
    """What a module's get_extra_state gave, which is neither parameter nor buffer."""
    return not isinstance(held, Tensor) or name.endswith("_extra_state")


# -- what is not a tensor

# arguments in a ds_config that choose the optimizer's class and are no hyper-parameters of groups
CONSTRUCTION = frozenset({"torch_adam", "adam_w_mode", "fp32_optimizer_states"})


def _groups(ranks: Ranks, tensors: _Tensors) -> tuple[dict[str, Any], ...] | None:
    """Hyper-parameters per group, without `params` and `step`."""
    groups = ranks.base_state(ranks.first).get("param_groups")
    if groups is None:
        return _elastic_groups(ranks, tensors)
    return tuple(
        {
            key: tensors.kept(value, f"param_groups.{place}.{key}", ranks.optimizers[0])
            for key, value in group.items()
            if key not in ("params", "step")
        }
        for place, group in enumerate(groups)
    )


def _elastic_groups(ranks: Ranks, tensors: _Tensors) -> tuple[dict[str, Any], ...] | None:
    """What config and scheduler still say, where the files hold no hyper-parameters."""
    count = len(ranks.param_shapes())
    params = nested(ranks.config, "optimizer", "params")
    stated = {
        key: value
        for key, value in (params.items() if isinstance(params, dict) else ())
        if value != "auto" and key not in CONSTRUCTION
    }
    groups = [dict(stated) for _ in range(count)]
    scheduler = ranks.model.get("lr_scheduler")
    if isinstance(scheduler, dict):
        for key, name in (("base_lrs", "initial_lr"), ("_last_lr", "lr")):
            values = scheduler.get(key)
            if isinstance(values, list) and len(values) == count:
                for group, value in zip(groups, values, strict=True):
                    group[name] = tensors.kept(value, f"lr_scheduler.{key}", ranks.models[0])
    return tuple(groups) if any(groups) else None


def _counters(ranks: Ranks) -> list[Sighting]:
    """Engine counters and schedulers: never true (skipped fp16 steps, warm starts)."""
    told = {f"engine, {key}": ranks.model.get(key) for key in ("global_steps", "skipped_steps")}
    scheduler = ranks.model.get("lr_scheduler")
    if isinstance(scheduler, dict):
        for key in ("last_epoch", "_step_count", "last_batch_iteration"):
            told[f"lr_scheduler, {key}"] = scheduler.get(key)
    found = [(where, steps.step_of(value)) for where, value in told.items()]
    return [Sighting(where, step, False) for where, step in found if step is not None]


def _state(ranks: Ranks, buffers: Sequence[Flat], tensors: _Tensors) -> dict[str, Any]:
    """Everything else, so that an engine's files can be made again."""
    of_engine = {
        "name": "deepspeed",
        "version": ranks.version,
        "class": ranks.engine_class,
        "dtype": ranks.dtype,
        "elastic": ranks.elastic,
        "excludes_frozen": ranks.excludes_frozen,
        "config": ranks.effective_config(),
    }
    optimizer = {
        key.removeprefix("optimizer."): tensors.kept(value, key, ranks.optimizers[0])
        for key, value in _optimizer_values(ranks.first).items()
    }
    kept = [flat.step_kept for flat in buffers if flat.step_kept]
    stale = None
    if kept and kept[0]["in"] == "state":
        stale = ranks.groups(0)[0].get("step", ranks.first.get("base_optimizer_state_step"))
    of_model = {
        key: tensors.kept(value, key, ranks.models[0])
        for key, value in _model_values(ranks.model).items()
    }
    for files in _alike(ranks.optimizers[1:]):
        state = files[0].value["optimizer_state_dict"]
        tensors.add_state_replicas(_optimizer_values(state), files)
    for files in _alike(ranks.models[1:]):
        tensors.add_state_replicas(_model_values(files[0].value), files)
    return {
        "engine": of_engine,
        "counters": {key: ranks.model.get(key) for key in COUNTERS},
        "module": list(tensors.module),
        **of_model,
        "optimizer": {**optimizer, "step": kept[0] if kept else None, "group_step": stale},
    }


def _alike(files: Sequence[TorchFile]) -> list[list[TorchFile]]:
    """Files by what they hold: equal pickles were parsed once."""
    found: dict[int, list[TorchFile]] = {}
    for file in files:
        found.setdefault(id(file.value), []).append(file)
    return list(found.values())


def _optimizer_values(state: Mapping[str, Any]) -> dict[str, Any]:
    """What an optimizer file holds beside tensors and hyper-parameters."""
    scaling = ("clip_grad", "loss_scaler", "dynamic_loss_scale", "overflow")
    return {f"optimizer.{key}": state[key] for key in scaling if key in state}


def _model_values(model: Mapping[str, Any]) -> dict[str, Any]:
    """What a model file holds beside weights and counters."""
    module = model["module"]
    return {
        "lr_scheduler": model.get("lr_scheduler"),
        "module_metadata": getattr(module, "_metadata", None),
        "module_extra": {name: held for name, held in module.items() if is_extra(name, held)},
        "data_sampler": model.get("data_sampler"),
        "random_ltd": model.get("random_ltd"),
        "client_state": _client_state(model),
    }


def _client_state(model: Mapping[str, Any]) -> dict[Any, Any]:
    return {key: value for key, value in model.items() if key not in ENGINE_KEYS}


def _own_client_state(ranks: Ranks) -> list[str]:
    """What stage-3 ranks hold of their own; rank 0's is what is kept."""
    first = _client_state(ranks.model)
    own: set[str] = set()
    for file in ranks.models[1:]:
        if file.value is not ranks.model:
            other = _client_state(file.value)
            own |= {
                str(key)
                for key in first.keys() | other.keys()
                if comparable(first.get(key)) != comparable(other.get(key))
            }
    return [f"client_state {key!r} of ranks other than 0" for key in sorted(own)]


# -- warnings


def _frozen_warnings(ranks: Ranks, lost: Sequence[str]) -> list[str]:
    found = []
    if lost:
        found.append(
            f"the weights {listed(lost)} are not in this checkpoint: DeepSpeed before 0.9.1 did "
            "not save frozen weights in stage 3"
        )
    if ranks.excludes_frozen:
        found.append("saved with exclude_frozen_parameters: frozen weights, if any, are not here")
    return found


def _buffer_warnings(differing: Sequence[str]) -> list[str]:
    if not differing:
        return []
    return [f"the buffers {listed(differing)} differ between ranks; rank 0's are taken"]


def _config_warnings(ranks: Ranks) -> list[str]:
    if ranks.config_path is None:
        return []
    return [
        f"the save names its ds_config ({ranks.config_path}) without what it says: give it with "
        "--ds-config where you write for DeepSpeed"
    ]


def _elastic_warnings(ranks: Ranks, groups: Sequence[dict[str, Any]] | None) -> list[str]:
    if not ranks.elastic:
        return []
    if groups is None:
        return ["an elastic checkpoint: it holds no hyper-parameters"]
    return [
        "an elastic checkpoint: its hyper-parameters are what ds_config and the scheduler say; "
        "settings of single groups were never saved"
    ]
