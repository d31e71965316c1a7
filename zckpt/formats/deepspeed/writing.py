"""A DeepSpeed directory for any data-parallel size and stage, from any manifest, as shells.

What the unmodified engine demands when it loads (0.19.8): a model file whose `module` is strict,
`dp_world_size` equal to its own, `base_optimizer_state` of as many groups (stage 3: sub-groups)
as it has, flat tensors of the length that its own partitioning gives. So the partitioning is done
here as the engine does it, with the options of the ds_config that it will run with.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ... import steps
from ...checksum import crc_of_zeros
from ...dtypes import FLOATS, SIZES
from ...errors import InconsistentCheckpoint, MissingData, WrongOption
from ...inert import Foreign, Global, Scalar, Size, TensorName, map_values
from ...manifest import Manifest, Parameter, Sibling, slot_key
from ...options import Options
from ...staging import Layout, Shell
from ...torchfile import Tensor
from ...torchshell import Storages, shell, state_checksums
from .. import zero
from .ranks import COUNTERS, nested

VERSION = "0.19.8"  # of the layout that is written
SUB_GROUP_SIZE = 10**9  # elements, the engine's default
FLOAT_NAMES = {"fp32": "F32", "float32": "F32", "float": "F32", "bf16": "BF16", "bfloat16": "BF16"}
# files of one rank beside a trainer's checkpoint: Hugging Face Trainer, Accelerate
PER_RANK = re.compile(r"rng_state_\d+\.pth|random_states_\d+\.pkl")
SIBLINGS = ""  # a trainer's files lie beside the tag, as the trainer looks for them

# hyper-parameters that an optimizer needs in every group, with its own defaults (torch 2.13,
# DeepSpeed 0.19.8); what a source never stored is taken from here, with a warning
ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
TORCH = {"maximize": False, "foreach": None, "capturable": False, "differentiable": False}
DEFAULTS: dict[str, dict[str, Any]] = {
    "adam": {**ADAM, "amsgrad": False, **TORCH, "fused": None, "decoupled_weight_decay": False},
    "adamw": {
        **ADAM,
        "weight_decay": 1e-2,
        "amsgrad": False,
        **TORCH,
        "fused": None,
        "decoupled_weight_decay": True,
    },
    "nadam": {
        **ADAM,
        "lr": 2e-3,
        "momentum_decay": 4e-3,
        "decoupled_weight_decay": False,
        **TORCH,
    },
    "rmsprop": {
        "lr": 1e-2,
        "momentum": 0,
        "alpha": 0.99,
        "eps": 1e-8,
        "centered": False,
        "weight_decay": 0,
        "capturable": False,
        "foreach": None,
        "maximize": False,
        "differentiable": False,
    },
    "adagrad": {
        "lr": 1e-2,
        "lr_decay": 0,
        "eps": 1e-10,
        "weight_decay": 0,
        "initial_accumulator_value": 0,
        "foreach": None,
        "maximize": False,
        "differentiable": False,
        "fused": None,
    },
    "sgd": {
        "lr": 1e-3,
        "momentum": 0,
        "dampening": 0,
        "weight_decay": 0,
        "nesterov": False,
        "maximize": False,
        "foreach": None,
        "differentiable": False,
        "fused": None,
    },
    "lion": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0},
}
# what groups hold beside ADAM's, by the class that `--optimizer` asks for
CLASSES: dict[str, dict[str, Any]] = {
    "torch": {"amsgrad": False, **TORCH, "fused": None},
    "deepspeed-cpu-adam": {"bias_correction": True, "amsgrad": False},
    "deepspeed-fused-adam": {"bias_correction": True},
    "apex-fused-adam": {"bias_correction": True},
}
NEEDED = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
    "nadam": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "adagrad": ("sum",),
    "rmsprop": ("square_avg",),
}


def lay_out(source: Manifest, options: Options) -> Layout:
    """The files of the target, and what it cannot take along.

    Raises before anything is written: WrongOption (options or a ds_config that contradict each
    other or the source), MissingData (states that the target needs), InconsistentCheckpoint
    (parameters of one flat buffer whose steps differ).
    """
    target = _Target(source, options)
    siblings = [(item.name, item) for item in source.siblings if not target.drops(item)]
    return Layout(target.shells, siblings, target.left_out, target.warnings)


def seal(root: str, manifest: Manifest, outcome: Any) -> None:
    """Writes the CRC-32 of every record into the files' zip directories."""
    by_file: dict[str, dict[int, int]] = {}
    for record in manifest.records:
        extent = record.extent
        found = outcome.records.get(extent)
        if found is None:  # a file that got no tensor: what it does not know is padding
            found = record.crc or crc_of_zeros(extent.length)
        by_file.setdefault(extent.file, {})[extent.offset] = found
    for file, crcs in by_file.items():
        state_checksums(file, crcs)


@dataclass(frozen=True, slots=True)
class _Flat:
    """One flat buffer of the target: parameters in the order in which they lie."""

    group: int
    names: Sequence[str]
    numels: Sequence[int]
    paddings: Sequence[int]
    step: steps.Step | None
    scalars: Mapping[str, Scalar]
    slots: Mapping[str, str]  # optimizer states and their dtypes
    master: str  # the masters' dtype


class _Target:
    """What is decided before the first byte is written."""

    def __init__(self, source: Manifest, options: Options) -> None:
        self.source = source
        self.options = options
        self.left_out: list[str] = list(source.left_out)
        self.warnings: list[str] = list(source.warnings)
        self.engine: dict[str, Any] = source.state.get("engine") or {}
        if self.engine.get("name") != "deepspeed":
            self.engine = {}
        given = options.config if options.config is not None else self.engine.get("config")
        if given is None:
            self.warnings.append("no ds_config is known: DeepSpeed's defaults are assumed")
        self.dp = options.dp or source.dp
        self.stage = self._stage(given or {})
        self.dtype = self._dtype(given or {})
        self.config = self._config(given or {})
        self.kind = self._kind()
        self.trainable = {name: held for name, held in source.parameters.items() if held.trainable}
        self.frozen = {name: held for name, held in source.parameters.items() if not held.trainable}
        self.aliases = {
            alias: name for name, held in source.parameters.items() for alias in held.aliases
        }
        self.groups = self._groups()
        self.flats = list(self._flats())
        self._check_states()
        self._check_batch()
        self.left_out.append(
            "DeepSpeed's recovery scripts zero_to_fp32.py and zero_to_torch.py: "
            "`zckpt convert --weights-only --dtype fp32` does their work"
        )

    # -- what engine it is for

    @property
    def partitioned(self) -> bool:
        return self.stage == 3

    def _stage(self, config: Mapping[str, Any]) -> int:
        stated = nested(config, "zero_optimization", "stage")
        asked = self.options.stage
        if stated == 0 and asked is None:
            raise WrongOption("the ds_config says stage 0, which has no partitions to write")
        if self.options.config is not None and None not in (asked, stated) and asked != stated:
            raise WrongOption(f"--stage {asked}, but the ds_config says stage {stated}")
        stage = asked or stated or self.source.source.get("zero_stage") or 2
        if stage not in (1, 2, 3):
            raise WrongOption(f"stage {stage} is none of 1, 2, 3")
        return int(stage)

    def _dtype(self, config: Mapping[str, Any]) -> str:
        enabled = [
            dtype
            for dtype, keys in (("BF16", ("bf16", "bfloat16")), ("F16", ("fp16",)))
            if any(nested(config, key, "enabled") is True for key in keys)
        ]
        if len(enabled) > 1:
            raise WrongOption("the ds_config enables both bf16 and fp16")
        stated = enabled[0] if enabled else "F32"
        if self.options.dtype and self.options.config is not None and stated != self.options.dtype:
            raise WrongOption(
                f"--dtype asks for {self.options.dtype}, but the ds_config says {stated}"
            )
        if self.options.dtype:
            return self.options.dtype
        if self.options.config is not None:
            return stated
        if self.engine:
            return str(self.engine["dtype"])
        held = [e.dtype for e in self.source.entries.values() if e.slot == "param"]
        return next((dtype for dtype in held if dtype in ("BF16", "F16")), "F32")

    def _config(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The ds_config with the target's stage and type, as the files will state it."""
        config = dict(given)
        config["zero_optimization"] = {**(given.get("zero_optimization") or {})}
        config["zero_optimization"]["stage"] = self.stage
        for key, dtype in (("bf16", "BF16"), ("fp16", "F16")):
            if isinstance(given.get(key), dict) or self.dtype == dtype:
                config[key] = {**(given.get(key) or {}), "enabled": self.dtype == dtype}
        if "bfloat16" in config:  # an alias
            config["bfloat16"] = {**config["bfloat16"], "enabled": self.dtype == "BF16"}
        return config

    def _kind(self) -> str:
        """The engine's optimizer wrapper (0.19.8, engine.py `_do_optimizer_sanity_check`)."""
        if self.partitioned:
            return "DeepSpeedZeRO3"
        grad = FLOAT_NAMES.get(str(nested(self.config, "data_types", "grad_accum_dtype")))
        if self.stage == 1 and self.dtype == "BF16" and grad == "F32" and not self.offloads:
            return "BF16_Optimizer"
        return "DeepSpeedZeroOptimizer"

    @property
    def offloads(self) -> bool:
        device = nested(self.config, "zero_optimization", "offload_optimizer", "device")
        return device == "cpu" or nested(self.config, "zero_optimization", "cpu_offload") is True

    def _option(self, name: str) -> Any:
        return nested(self.config, "zero_optimization", name)

    # -- groups

    def _groups(self) -> list[dict[str, Any]]:
        """Hyper-parameters of every group, complete for the optimizer that will take them."""
        count = 1 + max((held.group or 0 for held in self.trainable.values()), default=0)
        known = self.source.groups
        groups = [dict(group) for group in known] if known else [{} for _ in range(count)]
        name = self._optimizer_name()
        needed = dict(DEFAULTS.get(name, {}))
        if self.options.optimizer:
            adam = {key: needed.get(key, value) for key, value in ADAM.items()}
            needed = {**adam, **CLASSES[self.options.optimizer]}
            if self.options.optimizer == "torch":
                needed["decoupled_weight_decay"] = name == "adamw"
        elastic = bool(self.engine.get("elastic"))
        assumed: dict[str, Any] = {}
        for group in groups:
            for key, value in self.options.group_defaults.items():
                if key not in group or not known or elastic:
                    group[key] = value
            if known and not elastic and not self.options.optimizer:
                continue  # complete, as the engine wrote them
            for key, value in needed.items():
                if key not in group:
                    group[key] = value
                    if key in ADAM or not known:
                        assumed[key] = value
        if assumed and not self.options.weights_only:
            told = ", ".join(
                f"{key}={value}" for key, value in assumed.items() if value is not None
            )
            self.warnings.append(
                f"hyper-parameters that the source does not hold are {name}'s defaults: {told}"
            )
        return groups

    def _optimizer_name(self) -> str:
        stated = nested(self.config, "optimizer", "type") or self.source.optimizer or "AdamW"
        return re.sub(r"^(fused|cpu|onebit|deepspeedcpu)", "", str(stated).lower())

    # -- flat buffers

    def _flats(self) -> Iterator[_Flat]:
        if not self.trainable:
            raise MissingData("the source has no trainable parameter")
        for group in range(len(self.groups)):
            names = [name for name, held in self.trainable.items() if (held.group or 0) == group]
            numels = [prod(self.trainable[name].shape) for name in names]
            for places in self._buffers(names, numels):
                yield self._flat(group, [names[p] for p in places], [numels[p] for p in places])

    def _buffers(self, names: Sequence[str], numels: Sequence[int]) -> list[list[int]]:
        """Places of a group's parameters in its flat buffers, in the order in which they lie."""
        if self.partitioned:
            limit = int(self._option("sub_group_size") or SUB_GROUP_SIZE)
            return zero.sub_groups([-(-numel // self.dp) for numel in numels], limit)
        if self.kind == "DeepSpeedZeroOptimizer" and self._option("round_robin_gradients"):
            return [zero.round_robin(len(names), self.dp)]
        return [list(range(len(names)))]

    def _flat(self, group: int, names: Sequence[str], numels: Sequence[int]) -> _Flat:
        aligned = self.kind == "DeepSpeedZeroOptimizer" and self._option("parameter_alignment")
        paddings = (
            zero.alignment_paddings(numels, SIZES[self.dtype]) if aligned else [0] * len(names)
        )
        held = [self.trainable[name] for name in names]
        slots = dict(pair for name in names for pair in self._states(name))
        for name in names:
            missing = set(slots) - {slot for slot, _ in self._states(name)}
            if missing:
                raise MissingData(
                    f"the source holds no {sorted(missing)[0]} of {name}, but of its neighbours"
                )
        masters = {self._master(name) for name in names}
        return _Flat(
            group,
            names,
            numels,
            paddings,
            self._shared("step", names, [item.step for item in held]),
            self._shared_scalars(names, held),
            slots,
            masters.pop() if len(masters) == 1 else "F32",
        )

    def _states(self, name: str) -> tuple[tuple[str, str], ...]:
        """Optimizer states of a parameter with their dtypes."""
        if self.options.weights_only:
            return ()
        prefix = f"{name}/"
        return tuple(
            (slot, self.source.entries[prefix + slot].dtype)
            for slot in self.source.slots
            if slot not in ("param", "master", "state") and prefix + slot in self.source.entries
        )

    def _master(self, name: str) -> str:
        entry = self.source.entries.get(f"{name}/master")
        if entry is None and f"{name}/param" not in self.source.entries:
            raise MissingData(f"the source holds no weights of {name}")
        return entry.dtype if entry else "F32"

    def _shared(self, what: str, names: Sequence[str], values: Sequence[Any]) -> Any:
        """The one value of a flat buffer's parameters; DeepSpeed keeps no more."""
        if self.options.weights_only:
            return None
        if any(value != values[0] for value in values):
            other = next(p for p, value in enumerate(values) if value != values[0])
            raise InconsistentCheckpoint(
                f"DeepSpeed keeps one {what} for {names[0]} ({values[0]}) and {names[other]} "
                f"({values[other]})",
                hint="parameters with different steps must stand in different groups",
            )
        return values[0]

    def _shared_scalars(self, names: Sequence[str], held: Sequence[Parameter]) -> dict[str, Scalar]:
        keys = dict.fromkeys(key for item in held for key in item.scalars)
        return {
            key: self._shared(key, names, [item.scalars.get(key) for item in held]) for key in keys
        }

    # -- checks and reports

    def _check_states(self) -> None:
        if self.options.weights_only:
            return
        held = {slot for flat in self.flats for slot in flat.slots}
        if not held and self.source.groups is None:
            raise MissingData(
                f"{self.source.root} holds no optimizer state", hint="write --weights-only"
            )
        stated = nested(self.config, "optimizer", "type")
        name = self._optimizer_name()
        missing = [slot for slot in NEEDED.get(name, ()) if slot not in held]
        stepped = any(flat.step for flat in self.flats) or held
        if missing and stepped and (stated or self.options.optimizer):
            raise WrongOption(
                f"the ds_config's optimizer {stated or name} keeps {', '.join(missing)}, which the "
                f"source does not hold (it holds {', '.join(sorted(held)) or 'none'})",
                hint="use the optimizer of the source, or --weights-only",
            )
        if self.options.optimizer and not {"exp_avg", "exp_avg_sq"} <= held:
            raise WrongOption(
                f"--optimizer {self.options.optimizer} is an Adam; the source holds "
                f"{', '.join(sorted(held)) or 'no states'}"
            )
        if any(f"{name}/master" not in self.source.entries for name in self.trainable):
            kinds = {
                self.source.entries[f"{name}/param"].dtype
                for name in self.trainable
                if f"{name}/master" not in self.source.entries
            }
            if kinds - {"F32"}:
                self.warnings.append(
                    f"the source holds no fp32 masters: they are made of {', '.join(sorted(kinds))}"
                )

    def _check_batch(self) -> None:
        """Batch sizes that no longer fit are for the user to choose."""
        total = self.config.get("train_batch_size")
        micro = self.config.get("train_micro_batch_size_per_gpu")
        steps = self.config.get("gradient_accumulation_steps", 1)
        if all(isinstance(size, int) for size in (total, micro, steps)):
            if total != micro * steps * self.dp:
                self.warnings.append(
                    f"train_batch_size {total} is not micro batch {micro} x accumulation {steps} x "
                    f"{self.dp} ranks: choose new ones in the ds_config that you run with"
                )
        elif isinstance(total, int) and total % self.dp:
            self.warnings.append(
                f"train_batch_size {total} cannot be divided among {self.dp} ranks: choose another"
            )

    def drops(self, sibling: Sibling) -> bool:
        """Files of single ranks have no meaning at another data-parallel size."""
        own = bool(PER_RANK.fullmatch(sibling.name)) and self.dp != self.source.dp
        if own:
            self.left_out.append(f"{sibling.name}: random state of one of {self.source.dp} ranks")
        return own

    # -- files

    @property
    def tag(self) -> str:
        return str(
            self.source.source.get("tag") or f"global_step{self._counters()['global_steps']}"
        )

    def shells(self) -> Iterator[Shell]:
        """Every file, one at a time; equal ones are made once."""
        yield Shell("latest", len(self.tag.encode()), ((0, self.tag.encode()),))
        prefix = "bf16_" if self.dtype == "BF16" else ""
        made: Shell | None = None
        for rank in range(self.dp):
            name = f"{self.tag}/{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            if made is not None and self.partitioned:  # all ranks' are alike
                yield Shell(name, made.size, made.parts)
            else:
                made = self._optimizer_file(name, rank)
                yield made
        if not self.partitioned:
            yield self._model_file(f"{self.tag}/mp_rank_00_model_states.pt", 0)
            return
        for rank in range(self.dp):
            name = f"{self.tag}/zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
            if rank < 2:  # rank 0's alone has the aliases
                made = self._model_file(name, rank)
            assert made is not None
            yield Shell(name, made.size, made.parts)

    def _thawed(self, value: Any, storages: Storages) -> Any:
        """`value` with tensors in the place of their names and values."""
        if isinstance(value, Scalar):
            return storages.scalar(value)
        if isinstance(value, TensorName):
            entry = self.source.entries[f"{value.name}/state"]
            return storages.tensor(entry.dtype, entry.shape)
        return map_values(value, lambda item, _: self._thawed(item, storages))

    def _counters(self) -> dict[str, Any]:
        kept = self.source.state.get("counters") or {}
        fresh = {"global_steps": int(self.source.step or 0), "skipped_steps": 0}
        return {key: kept.get(key, fresh.get(key, 0)) for key in COUNTERS}

    # -- the model file

    def _model_file(self, name: str, rank: int) -> Shell:
        storages, state = Storages(), self.source.state
        weights = self._weights(storages)
        module: OrderedDict[str, Any] = OrderedDict()
        extra = state.get("module_extra") or {}
        names = state.get("module") or [
            *self.source.parameters, *self.source.buffers, *self.aliases
        ]  # fmt: skip
        for key in names:
            if key in extra:
                module[key] = self._thawed(extra[key], storages)
            elif (held := weights.get(self.aliases.get(key, key))) is not None:
                module[key] = held
        metadata = state.get("module_metadata")
        if metadata is not None:
            module._metadata = metadata  # type: ignore[attr-defined]
        frozen, fragments = self._frozen(weights, storages)
        value = {
            "module": module,
            "buffer_names": list(self.source.buffers),
            "optimizer": None,
            "param_shapes": [
                OrderedDict((name, Size(self.trainable[name].shape)) for name in flat.names)
                for flat in self.flats
            ],
            "frozen_param_shapes": frozen,
            "shared_params": dict(self.aliases) if rank == 0 else {},
            "frozen_param_fragments": fragments,
            **{
                key: self._thawed(state.get(key), storages)
                for key in ("lr_scheduler", "data_sampler", "random_ltd")
            },
            **self._counters(),
            "dp_world_size": self.dp,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": self.config,
            "ds_version": self.engine.get("version", VERSION),
            **self._thawed(state.get("client_state") or {}, storages),
        }
        return shell(name, value, storages)

    def _weights(self, storages: Storages) -> dict[str, Tensor]:
        """What the module holds: in stage 3, placeholders for parameters."""
        held: dict[str, Tensor] = {}
        for name, parameter in self.source.parameters.items():
            shape = (0,) if self.partitioned else parameter.shape
            entry = self.source.entries.get(f"{name}/param")
            dtype = self.dtype
            if name in self.frozen:
                if entry is None:
                    continue
                dtype = self._weight_dtype(entry.dtype)
            held[name] = storages.tensor(dtype, shape)
        for name in self.source.buffers:
            entry = self.source.entries[f"{name}/param"]
            held[name] = storages.tensor(entry.dtype, entry.shape)
        return held

    def _weight_dtype(self, dtype: str) -> str:
        """A frozen weight changes its type with the module's."""
        changes = self.dtype != self.engine.get("dtype", dtype)
        return self.dtype if changes and dtype in FLOATS else dtype

    def _frozen(self, weights: Mapping[str, Tensor], storages: Storages) -> tuple[Any, Any]:
        """frozen_param_shapes and frozen_param_fragments; stage 1 writes neither."""
        if self.stage == 1:
            return None, None
        names = [name for name in self.frozen if name in weights]
        shapes = OrderedDict((name, Size(self.frozen[name].shape)) for name in names)
        if not self.partitioned:
            return shapes, OrderedDict((name, weights[name]) for name in names)
        fragments = OrderedDict(
            (
                name,
                storages.tensor(
                    weights[name].dtype, (-(-prod(self.frozen[name].shape) // self.dp),)
                ),
            )
            for name in names
        )
        return shapes, fragments

    # -- the optimizer files

    def _optimizer_file(self, name: str, rank: int) -> Shell:
        storages = Storages()
        make = self._partitioned_state if self.partitioned else self._flat_state
        value = {
            "optimizer_state_dict": make(rank, storages),
            "ds_config": self.config,
            "ds_version": self.engine.get("version", VERSION),
        }
        return shell(name, value, storages)

    def _flat_state(self, rank: int, storages: Storages) -> dict[str, Any]:
        """Stage 1 and 2: one partition per group."""
        kept = self.source.state.get("optimizer") or {}
        parts = [_Partition(flat, self.dp, rank) for flat in self.flats]
        wrapped = self.kind == "BF16_Optimizer"
        state = {
            place: self._numbers(flat, storages)
            | {
                slot_key(slot): storages.tensor(dtype, (self._length(part, flat, slot),))
                for slot, dtype in flat.slots.items()
                if self._length(part, flat, slot) or slot != "momentum_buffer"
            }
            for place, (flat, part) in enumerate(zip(self.flats, parts, strict=True))
        }
        common = {
            "clip_grad": kept.get("clip_grad", float(self.config.get("gradient_clipping") or 0.0)),
            "base_optimizer_state": self._base(state, storages),
            "single_partition_of_fp32_groups": [
                storages.tensor(flat.master, (part.size if wrapped else part.owned,))
                for flat, part in zip(self.flats, parts, strict=True)
            ],
            "group_paddings": [part.size - part.owned for part in parts],
            "partition_count": [self.dp] * len(self.flats),
            "ds_version": self.engine.get("version", VERSION),
            "param_slice_mappings": [part.mapping() for part in parts],
        }
        if wrapped:
            last = rank == self.dp - 1
            common["group_paddings"] = [
                part.size * self.dp - part.total if last else 0 for part in parts
            ]
            return common
        return {
            **self._scaling(storages),
            **common,
            "zero_stage": self._stage_enum(),
            "param_alignment_paddings": [list(flat.paddings) for flat in self.flats],
        }

    def _length(self, part: _Partition, flat: _Flat, slot: str) -> int:
        """Elements of a rank's state; Muon keeps the momentum of whole parameters (flats.py)."""
        whole = (
            slot == "momentum_buffer"
            and self.groups[flat.group].get("use_muon") is True
            and self.kind == "DeepSpeedZeroOptimizer"
            and not self.offloads
        )
        return part.whole() if whole else part.size

    def _partitioned_state(self, rank: int, storages: Storages) -> dict[str, Any]:
        """Stage 3: a rank's slices of every parameter, one behind the other."""
        widths = [sum(-(-numel // self.dp) for numel in flat.numels) for flat in self.flats]
        state = {
            place: self._numbers(flat, storages)
            | {
                slot_key(slot): storages.tensor(dtype, (width,))
                for slot, dtype in flat.slots.items()
            }
            for place, (flat, width) in enumerate(zip(self.flats, widths, strict=True))
        }
        return {
            "zero_stage": self._stage_enum(),
            **self._scaling(storages),
            "partition_count": self.dp,
            "optimizer_state_dict": self._base(state, storages),
            "fp32_flat_groups": [
                storages.tensor(flat.master, (width,))
                for flat, width in zip(self.flats, widths, strict=True)
            ],
        }

    def _stage_enum(self) -> Foreign:
        return Foreign(Global("deepspeed.runtime.zero.config.ZeroStageEnum"), (self.stage,))

    def _base(self, state: Mapping[int, Any], storages: Storages) -> dict[str, Any]:
        """The base optimizer's state_dict; states that are empty (plain SGD) are not listed."""
        groups = []
        for place, group in enumerate(self.groups):
            members = [number for number, flat in enumerate(self.flats) if flat.group == place]
            stepped = self._group_step(members)
            groups.append(self._thawed(group, storages) | stepped | {"params": members})
        return {
            "state": {place: held for place, held in state.items() if held},
            "param_groups": groups,
        }

    # -- steps, where the target's optimizer looks for them

    def _step_kept(self) -> tuple[str, str, Any]:
        """(in the state or group, its type, the stale step of groups) for this optimizer."""
        asked = self.options.optimizer
        if asked:
            return {
                "torch": ("state", "F32", None),
                "deepspeed-cpu-adam": ("state", "int", None),
                "deepspeed-fused-adam": ("state", "int", 0),
                "apex-fused-adam": ("group", "int", None),
            }[asked]
        kept = self.source.state.get("optimizer") or {}
        step = kept.get("step") or {}
        return step.get("in", "state"), step.get("type", "F32"), kept.get("group_step")

    def _numbers(self, flat: _Flat, storages: Storages) -> dict[str, Any]:
        """Step and other 0-d states of one flat buffer."""
        where, kind, _ = self._step_kept()
        found: dict[str, Any] = {}
        if flat.step is not None and where == "state":
            found["step"] = _typed(flat.step, kind, storages)
        for key, scalar in flat.scalars.items():
            found[key] = _typed(scalar.value, scalar.dtype, storages)
        return found

    def _group_step(self, members: Sequence[int]) -> dict[str, Any]:
        where, kind, stale = self._step_kept()
        if self.options.weights_only:
            return {}
        if where == "group":
            told = {step for place in members if (step := self.flats[place].step) is not None}
            if len(told) > 1:
                raise InconsistentCheckpoint(
                    f"the optimizer keeps one step per group, the source has {sorted(told)}"
                )
            if not told:
                return {}
            value = told.pop()
            return {"step": int(value) if kind == "int" else float(value)}
        return {} if stale is None else {"step": stale}

    # -- loss scale

    def _scaling(self, storages: Storages) -> dict[str, Any]:
        """The source's loss scaler where the type stays, else one as the engine makes it."""
        kept = self.source.state.get("optimizer") or {}
        same = self.dtype == self.engine.get("dtype")
        if same and isinstance(kept.get("loss_scaler"), Foreign):
            return {
                "loss_scaler": self._thawed(kept["loss_scaler"], storages),
                "dynamic_loss_scale": kept.get("dynamic_loss_scale", False),
                "overflow": kept.get("overflow", False),
            }
        scaler, dynamic = self._fresh_scaler()
        return {"loss_scaler": scaler, "dynamic_loss_scale": dynamic, "overflow": False}

    def _fresh_scaler(self) -> tuple[Foreign, bool]:
        module = "deepspeed.runtime.fp16.loss_scaler"
        fp16 = self.config.get("fp16") or {}
        if self.dtype != "F16" or fp16.get("loss_scale"):
            scale = float(fp16.get("loss_scale") or 1.0) if self.dtype == "F16" else 1.0
            state: dict[str, Any] = {"cur_scale": scale, "dynamic": False}
            return Foreign(Global(f"{module}.LossScaler"), (), state, "new"), False
        shift = fp16.get("hysteresis", 2)
        state = {
            "cur_scale": 2.0 ** fp16.get("initial_scale_power", 16),
            "dynamic": True,
            "cur_iter": 0,
            "last_overflow_iter": -1,
            "scale_factor": 2.0,
            "scale_window": fp16.get("loss_scale_window", 1000),
            "min_scale": fp16.get("min_loss_scale", 1),
            "delayed_shift": shift,
            "cur_hysteresis": shift,
            "consecutive_hysteresis": fp16.get("consecutive_hysteresis", False),
            "raise_error_at_min_scale": True,
            "dtype": Global("torch.float16"),
        }
        return Foreign(Global(f"{module}.DynamicLossScaler"), (), state, "new"), True


def _typed(value: Any, kind: str, storages: Storages) -> Any:
    """A number as a 0-d tensor of that dtype, or as a Python number."""
    if kind in SIZES:
        return storages.scalar(Scalar(value, kind))
    return {"int": int, "float": float, "bool": bool}.get(kind, lambda same: same)(value)


class _Partition:
    """Rank `rank`'s share of a flat buffer in stage 1 and 2."""

    def __init__(self, flat: _Flat, dp: int, rank: int) -> None:
        self.flat = flat
        *self.starts, self.total = zero.offsets(flat.numels, flat.paddings)
        self.size = zero.partition_size(self.total, dp)
        self.start = rank * self.size
        self.owned = max(0, min(self.size, self.total - self.start))

    def _inside(self) -> Iterator[tuple[str, int, int, int]]:
        """Name, elements, and the part [start, stop) of the partition, of what reaches into it."""
        for name, start, numel in zip(self.flat.names, self.starts, self.flat.numels, strict=True):
            first = max(start, self.start) - self.start
            stop = min(start + numel, self.start + self.size) - self.start
            if first < stop:
                yield name, numel, first, stop

    def mapping(self) -> OrderedDict[str, Foreign]:
        """Where parameters lie in this partition, as DeepSpeed's own converter reads it."""
        address = Global("deepspeed.utils.tensor_fragment.fragment_address")
        return OrderedDict(
            (name, Foreign(address, (), {"numel": stop - first, "start": first}, "new"))
            for name, _, first, stop in self._inside()
        )

    def whole(self) -> int:
        """Elements of all parameters that reach into this partition."""
        return sum(numel for _, numel, _, _ in self._inside())
