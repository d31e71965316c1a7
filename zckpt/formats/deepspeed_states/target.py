"""A DeepSpeed directory for any data-parallel size and stage, from any manifest, as shells.

What the unmodified engine demands when it loads (0.19.8): a model file whose `module` is strict,
`dp_world_size` equal to its own, `base_optimizer_state` of as many groups (stage 3: sub-groups)
as it has, flat tensors of the length that its own partitioning gives. So the partitioning is done
here as the engine does it, with the options of the ds_config that it will run with.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ...core.dtypes import FLOATS, SIZES
from ...core.inert import PYTHON_NUMBERS, Foreign, Global, Scalar, Size
from ...core.manifest import Manifest, Parameter, Sibling, slot_key
from ...core.staging import Shell
from ...errors import InconsistentCheckpoint, MissingData, listed
from ...files.torchfile import Tensor
from ...files.torchshell import Storages, shell, thawed
from ...training import peft, steps
from ...training.optimizers import are_inferred
from ...training.options import Options
from ...training.trainers import ACCELERATE, TRANSFORMERS, program_of
from .. import zero
from .engine import Engine
from .hyper import NEEDED_NUMBERS, adam_class, check_states, complete_groups, optimizer_name
from .manifest import ENGINE_KEYS, INFERRED
from .states import COUNTERS

UNDERSTOOD = ("dp", "stage", "dtype", "config", "optimizer", "group_defaults")
VERSION = "0.19.8"  # of the layout that is written
# files of one rank beside a trainer's checkpoint: Hugging Face Trainer, Accelerate
PER_RANK = re.compile(r"rng_state_\d+\.pth|random_states_\d+\.pkl")


@dataclass(frozen=True, slots=True)
class _Flat:
    """One flat buffer of the target: parameters in the order in which they lie."""

    group: int
    names: Sequence[str]
    numels: Sequence[int]
    paddings: Sequence[int]
    starts: Sequence[int]  # of each, then the buffer's length (stage 1 and 2)
    step: steps.Step | None
    scalars: Mapping[str, Scalar]
    slots: Mapping[str, str]  # optimizer states and their dtypes
    master: str  # the masters' dtype


class Target:
    """What is decided before the first byte is written."""

    derives = True  # module weights that the source lacks are made of the masters
    may_be_elastic = True

    def __init__(self, source: Manifest, options: Options) -> None:
        self.source = source
        self.options = options
        self.left_out: list[str] = list(source.left_out)
        self.warnings: list[str] = list(source.warnings)
        self.engine = Engine(source, options)
        if not self.engine.known:
            self.warnings.append("no ds_config is known: DeepSpeed's defaults are assumed")
        self.dp = self.engine.dp
        self.kept: dict[str, Any] = source.state.get("optimizer") or {}
        self.states = [s for s in source.slots if s not in ("param", "master", "state")]
        self.trainable = {name: held for name, held in source.parameters.items() if held.trainable}
        self.frozen = {name: held for name, held in source.parameters.items() if not held.trainable}
        self.aliases = {
            alias: name for name, held in source.parameters.items() for alias in held.aliases
        }
        self.groups, assumed = complete_groups(self.engine, source)
        self.differing: dict[str, list[str]] = {}  # numbers that parameters of one buffer differ in
        self.flats = list(self._flats())
        self._name_left_out()
        self.client_state = self._client_state()
        self.elastic = self._is_elastic()
        if not options.weights_only:
            check_states(self.engine, source, {s: 0 for flat in self.flats for s in flat.slots})
            self._warn_of_hyper_parameters(assumed)
        self._warn_of_guessed()
        self._warn_of_masters()
        self._warn_of_batch()

    def _warn_of_guessed(self) -> None:
        """State dicts do not tell buffers from frozen weights; stage 3 keeps these in other places.

        DeepSpeed then refuses to load what is a buffer (its size in the module's state differs).
        """
        guessed = (self.source.state.get("engine") or {}).get("guessed")
        if guessed and self.engine.partitioned and self.frozen and not self.options.param_names:
            self.warnings.append(
                f"{listed(list(self.frozen), 4)}: taken for frozen parameters; if any is a buffer, "
                "name all parameters with --param-names FILE"
            )

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
        if self.engine.partitioned:
            widths = [-(-numel // self.dp) for numel in numels]
            return zero.sub_groups(widths, self.engine.sub_group_size)
        if self.engine.round_robin:
            return [zero.round_robin(len(names), self.dp)]
        return [list(range(len(names)))]

    def _flat(self, group: int, names: Sequence[str], numels: Sequence[int]) -> _Flat:
        paddings = [0] * len(names)
        if self.engine.aligned:
            paddings = zero.alignment_paddings(numels, SIZES[self.engine.dtype])
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
            zero.offsets(numels, paddings),
            self._shared("step", names, [item.step for item in held]),
            self._shared_scalars(names, held),
            slots,
            masters.pop() if len(masters) == 1 else "F32",
        )

    def _states(self, name: str) -> tuple[tuple[str, str], ...]:
        """Optimizer states of a parameter with their dtypes, as wide as its master."""
        if self.options.weights_only:
            return ()
        entries, prefix = self.source.entries, f"{name}/"
        made = f"{name}/master" not in entries  # of a weight, and so are its states
        return tuple(
            (slot, "F32" if made and dtype in ("BF16", "F16") else dtype)
            for slot in self.states
            if prefix + slot in entries
            for dtype in [entries[prefix + slot].dtype]
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
        return values[0] if values else None

    def _shared_scalars(
        self, names: Sequence[str], parameters: Sequence[Parameter]
    ) -> dict[str, Scalar]:
        """States of one number that all parameters of a flat buffer have alike.

        Others are left out, but for those that the optimizer cannot lack.
        """
        if self.options.weights_only:
            return {}
        shared: dict[str, Scalar] = {}
        needed = NEEDED_NUMBERS.get(optimizer_name(self.engine, self.source), ())
        for key in dict.fromkeys(key for parameter in parameters for key in parameter.scalars):
            values = [parameter.scalars.get(key) for parameter in parameters]
            if key in needed:
                shared[key] = self._shared(key, names, values)
            elif values[0] is not None and all(repr(value) == repr(values[0]) for value in values):
                shared[key] = values[0]
            else:
                own = [name for name, value in zip(names, values, strict=True) if value is not None]
                self.differing.setdefault(key, []).extend(own)
        return shared

    def _name_left_out(self) -> None:
        """States that no flat buffer can hold."""
        if self.options.weights_only:
            return
        shapeless: dict[str, list[str]] = {}
        for name, states in (self.kept.get("other") or {}).items():
            for key in states:
                shapeless.setdefault(key, []).append(name)
        for lost, why in (
            (self.differing, "DeepSpeed keeps one value for all parameters of a flat buffer"),
            (shapeless, "neither a number nor a tensor of the parameter's shape"),
        ):
            self.left_out += [
                f"optimizer state {key!r} of {listed(names)}: {why}" for key, names in lost.items()
            ]

    def _client_state(self) -> dict[Any, Any]:
        """The user's keys, but for those that DeepSpeed gives a meaning of its own."""
        told = self.source.state.get("client_state") or {}
        self.left_out += [
            f"client_state {key!r}: DeepSpeed's files use this key"
            for key in told
            if key in ENGINE_KEYS
        ]
        return {key: value for key, value in told.items() if key not in ENGINE_KEYS}

    def _is_elastic(self) -> bool:
        """Whether the target's files are elastic: states alone, for an engine with its own groups.

        Elastic files hold no hyper-parameters, so that the engine keeps those that it was built
        with; other files would need a guess. They are written where the engine resumes from them
        exactly (DeepSpeed 0.19.8, stage_1_and_2.py `_restore_base_optimizer_state`):

        * Stage 1 or 2, and not BF16_Optimizer. All groups have the same states: the loader goes by
          the keys of the first. No Muon, which keeps whole momenta: the loader gives every rank
          those of rank 0. Moments in fp32: the loader makes all of them so.
        * Numbers are Python's. One that is a tensor, such as the step of torch's Adam, is filled up
          with the partition's padding, unless there is none or the engine is elastic itself.
        """
        if not (self.may_be_elastic and are_inferred(self.source)) or self.options.group_defaults:
            return False
        if "hyper_parameters" in self.engine.before or self.options.weights_only:
            return False
        if self.engine.partitioned or self.engine.wraps_bf16:
            return False
        where, _, _ = self._step_kept()
        keys = {(*sorted(flat.slots), *sorted(flat.scalars)) for flat in self.flats}
        types = {dtype for flat in self.flats for dtype in flat.slots.values()}
        if len(keys) > 1 or types - {"F32"} or any(map(self.keeps_whole, self.flats)):
            return False
        if where == "group" and len({flat.step for flat in self.flats}) > 1:
            return False
        paddings = any(-flat.starts[-1] % (2 * self.dp) for flat in self.flats)
        return self.engine.elastic or not (paddings and self._tensors_of_one())

    def _tensors_of_one(self) -> bool:
        """Whether any number beside the moments, such as the step, is a tensor."""
        where, kind, _ = self._step_kept()
        kinds = {number.dtype for flat in self.flats for number in flat.scalars.values()}
        if where == "state" and any(flat.step is not None for flat in self.flats):
            kinds.add(kind)
        return bool(kinds - PYTHON_NUMBERS.keys())

    # -- reports

    def _warn_of_hyper_parameters(self, assumed: Mapping[str, Any]) -> None:
        if self.elastic:
            self.warnings.append(
                "the source holds no hyper-parameters, and neither does the target: the engine "
                "keeps those that it is built with (--group-defaults lr=... writes others)"
            )
            if self.source.state.get("lr_scheduler") is not None:
                self.warnings.append(
                    "the engine's first update uses the learning rate that it is built with: "
                    "elastic files hold none, and its scheduler sets one after that update"
                )
            self._warn_of_the_next_save()
        elif assumed:
            told = ", ".join(
                f"{key}={value}" for key, value in assumed.items() if value is not None
            )
            name = optimizer_name(self.engine, self.source)
            self.warnings.append(
                f"hyper-parameters that the source does not hold are {name}'s defaults: {told}"
            )

    def _warn_of_the_next_save(self) -> None:
        """The engine's own elastic save takes the padding of a partition off its step as well.

        Where the loader has made a tensor of one element of it (0.19.8). All ranks load rank 0's.
        """
        firsts = [_Partition(flat, self.dp, 0) for flat in self.flats]
        cut = [place for place, part in enumerate(firsts) if part.owned < part.size]
        if cut and self._tensors_of_one():
            self.warnings.append(
                "DeepSpeed (0.19.8) resumes from this, but will not from its own next save: its "
                f"elastic save cuts the step of group {listed([*map(str, cut)])} off with the "
                "padding of rank 0; zckpt reads that save"
            )

    def _warn_of_masters(self) -> None:
        entries = self.source.entries
        lacking = [name for name in self.trainable if f"{name}/master" not in entries]
        kinds = {entries[f"{name}/param"].dtype for name in lacking} - {"F32"}
        if kinds:
            self.warnings.append(
                f"the source holds no fp32 masters: they are made of {', '.join(sorted(kinds))}"
            )

    def _warn_of_batch(self) -> None:
        """Batch sizes that no longer fit are for the user to choose, in the program's own words."""
        config = self.engine.config
        total = config.get("train_batch_size")
        micro = config.get("train_micro_batch_size_per_gpu")
        accumulation = config.get("gradient_accumulation_steps", 1)
        of_trainer = program_of(self.source.siblings) == TRANSFORMERS
        if type(accumulation) is not int or accumulation < 1:
            return
        if total is None and type(micro) is int and of_trainer:
            total = micro * accumulation * self.source.dp
        if type(total) is not int:
            return
        word = "per_device_train_batch_size" if of_trainer else "train_micro_batch_size_per_gpu"
        fitting, rest = divmod(total, accumulation * self.dp)
        if type(micro) is int and fitting == micro and not rest:
            return
        if fitting and not rest and (type(micro) is int or of_trainer):
            self.warnings.append(f"set {word}={fitting} to keep a global batch of {total}")
        elif total % self.dp:
            self.warnings.append(
                f"a global batch of {total} cannot be divided among {self.dp} ranks: choose "
                f"another with {word} and gradient_accumulation_steps"
            )
        elif rest:
            self.warnings.append(
                f"a global batch of {total} is not {accumulation} accumulation steps of {self.dp} "
                f"ranks: choose {word} and gradient_accumulation_steps anew"
            )

    def drops(self, sibling: Sibling) -> bool:
        """Files of single ranks have no meaning at another data-parallel size."""
        own = bool(PER_RANK.fullmatch(sibling.name)) and self.dp != self.source.dp
        if own:
            self.left_out.append(f"{sibling.name}: random state of one of {self.source.dp} ranks")
        return own

    # -- files

    @property
    def description(self) -> str:
        ranks = "1 rank" if self.dp == 1 else f"{self.dp} ranks"
        return f"a DeepSpeed run of {ranks}, ZeRO stage {self.engine.stage}, tag {self.tag}"

    @property
    def tag(self) -> str:
        stated = self.source.source.get("tag")
        if stated is None and program_of(self.source.siblings) == ACCELERATE:
            stated = "pytorch_model"  # which Accelerator.load_state asks for
        return str(stated or f"global_step{self._counters()['global_steps']}")

    def shells(self) -> Iterator[Shell]:
        """Every file, one at a time; equal ones are made once."""
        yield Shell("latest", len(self.tag.encode()), ((0, self.tag.encode()),))
        prefix = "bf16_" if self.engine.dtype == "BF16" else ""
        made: Shell | None = None
        for rank in range(self.dp):
            name = f"{self.tag}/{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            if made is not None and self.engine.partitioned:  # all ranks' are alike
                yield Shell(name, made.size, made.parts)
            else:
                made = self._optimizer_file(name, rank)
                yield made
        yield from self.model_files()

    def model_files(self) -> Iterator[Shell]:
        """One in stage 1 and 2, in stage 3 one per rank."""
        made: Shell | None = None
        if not self.engine.partitioned:
            yield self._model_file(f"{self.tag}/mp_rank_00_model_states.pt", 0)
            return
        for rank in range(self.dp):
            name = f"{self.tag}/zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
            if rank < 2:  # rank 0's alone has the aliases
                made = self._model_file(name, rank)
            assert made is not None
            yield Shell(name, made.size, made.parts)

    def _thawed(self, value: Any, storages: Storages) -> Any:
        return thawed(value, self.source.entries, storages)

    def _counters(self) -> dict[str, Any]:
        kept = self.source.state.get("counters") or {}
        fresh = {"global_steps": int(self.source.step or 0), "skipped_steps": 0}
        found = {key: kept.get(key) for key in COUNTERS}
        return {key: fresh.get(key, 0) if value is None else value for key, value in found.items()}

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
            "ds_config": self.engine.config,
            "ds_version": self.engine.before.get("version", VERSION),
            **self._thawed(self.client_state, storages),
        }
        return shell(name, value, storages)

    def _weights(self, storages: Storages) -> dict[str, Tensor]:
        """What the module holds: in stage 3, placeholders for parameters."""
        held: dict[str, Tensor] = {}
        for name, parameter in self.source.parameters.items():
            shape = (0,) if self.engine.partitioned else parameter.shape
            entry = self.source.entries.get(f"{name}/param")
            dtype = self.engine.dtype
            made = self.engine.partitioned or (self.derives and name in self.trainable)
            if entry is None and (name in self.frozen or not made):
                continue
            if entry is not None and name in self.frozen:
                dtype = self._weight_dtype(entry.dtype)
            held[name] = storages.tensor(dtype, shape)
        for name in self.source.buffers:
            entry = self.source.entries[f"{name}/param"]
            held[name] = storages.tensor(entry.dtype, entry.shape)
        return held

    def _weight_dtype(self, dtype: str) -> str:
        """A frozen weight changes its type with the module's."""
        changes = self.engine.dtype != self.engine.before.get("dtype", dtype)
        return self.engine.dtype if changes and dtype in FLOATS else dtype

    def _frozen(self, weights: Mapping[str, Tensor], storages: Storages) -> tuple[Any, Any]:
        """frozen_param_shapes and frozen_param_fragments; stage 1 writes neither.

        Neither where frozen weights were left out, or may have been: of an empty dictionary the
        engine concludes that the model has none, and stops at each that it has (0.19.8, engine.py
        `load_module_state_dict`). Of an adapter the base model was left out.
        """
        if self.engine.stage == 1 or peft.is_adapter_alone(self.source.parameters):
            return None, None
        names = [name for name in self.frozen if name in weights]
        has_none = self.engine.before.get("excludes_frozen") is False
        if not (names or has_none):
            return None, None
        shapes = OrderedDict((name, Size(self.frozen[name].shape)) for name in names)
        if not self.engine.partitioned:
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
        make = self._partitioned_state if self.engine.partitioned else self._flat_state
        value = {
            "optimizer_state_dict": make(rank, storages),
            "ds_config": self.engine.config,
            "ds_version": self.engine.before.get("version", VERSION),
            **self._inferred(),
        }
        return shell(name, value, storages)

    def _inferred(self) -> dict[str, Any]:
        """Names that no file of the source states, in a key that the engine does not read."""
        return {INFERRED: list(self.source.inferred)} if self.source.inferred else {}

    def _flat_state(self, rank: int, storages: Storages) -> dict[str, Any]:
        """Stage 1 and 2: one partition per group."""
        parts = [_Partition(flat, self.dp, rank) for flat in self.flats]
        wrapped = self.engine.wraps_bf16
        state = {
            place: self._numbers(flat, storages)
            | {
                slot_key(slot): storages.tensor(dtype, (self._length(part, flat, slot),))
                for slot, dtype in flat.slots.items()
                if self._length(part, flat, slot) or slot != "momentum_buffer" or self.elastic
            }
            for place, (flat, part) in enumerate(zip(self.flats, parts, strict=True))
        }
        common = {
            **self._clipping(),
            **self._base_and_step(state, storages),
            "single_partition_of_fp32_groups": [
                storages.tensor(flat.master, (part.size if wrapped else part.owned,))
                for flat, part in zip(self.flats, parts, strict=True)
            ],
            "group_paddings": [part.size - part.owned for part in parts],
            "partition_count": [self.dp] * len(self.flats),
            "ds_version": self.engine.before.get("version", VERSION),
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

    def _clipping(self) -> dict[str, Any]:
        """The source's; without one the engine keeps its own (1.0 unless its config says else)."""
        clipping = self.kept.get("clip_grad", self.engine.option("gradient_clipping"))
        return {} if clipping is None else {"clip_grad": clipping}

    def _length(self, part: _Partition, flat: _Flat, slot: str) -> int:
        """Elements of a rank's state; Muon keeps the momentum of whole parameters (flats.py)."""
        whole = slot == "momentum_buffer" and self.keeps_whole(flat)
        return part.whole() if whole else part.owned if self.elastic else part.size

    def keeps_whole(self, flat: _Flat) -> bool:
        """Whether Muon keeps the momentum of whole parameters."""
        return (
            self.groups[flat.group].get("use_muon") is True
            and not self.engine.wraps_bf16
            and not self.engine.offloads
        )

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
        return Foreign(Global("deepspeed.runtime.zero.config.ZeroStageEnum"), (self.engine.stage,))

    def _base(self, state: Mapping[int, Any], storages: Storages) -> dict[str, Any]:
        """The base optimizer's state_dict; states that are empty (plain SGD) are not listed."""
        groups = []
        for place, group in enumerate(self.groups):
            members = [number for number, flat in enumerate(self.flats) if flat.group == place]
            stepped = self._group_step(members, storages)
            groups.append(self._thawed(group, storages) | stepped | {"params": members})
        return {
            "state": {place: held for place, held in state.items() if held},
            "param_groups": groups,
        }

    def _base_and_step(self, state: Mapping[int, Any], storages: Storages) -> dict[str, Any]:
        """The base optimizer's state_dict; of elastic files the states alone, in a list.

        Beside these the engine wants the step of the groups, whether its optimizer goes by it or
        not (0.19.8: it stops without, also where it has written none itself).
        """
        if not self.elastic:
            return {"base_optimizer_state": self._base(state, storages)}
        step = self._group_step(range(len(self.flats)), storages)
        return {
            "base_optimizer_state": list(state.values()),
            "base_optimizer_state_step": step.get("step", self.flats[0].step),
        }

    # -- steps, where the target's optimizer looks for them

    def _step_kept(self) -> tuple[str, str, Any]:
        """(in the state or group, its type, the stale step of groups) for this optimizer."""
        made = adam_class(self.engine, self.source)
        if made:
            return {
                "torch": ("state", "F32", None),
                "deepspeed-cpu-adam": ("state", "int", None),
                "deepspeed-fused-adam": ("state", "int", 0),
                "apex-fused-adam": ("group", "int", None),
            }[made]
        step = self.kept.get("step") or {}
        return step.get("in", "state"), step.get("type", "F32"), self.kept.get("group_step")

    def _numbers(self, flat: _Flat, storages: Storages) -> dict[str, Any]:
        """Step and other 0-d states of one flat buffer."""
        where, kind, _ = self._step_kept()
        found: dict[str, Any] = {}
        if flat.step is not None and where == "state":
            found["step"] = self._typed_step(flat.step, kind, storages)
        for key, scalar in flat.scalars.items():
            found[key] = _thawed_number(scalar, storages)
        return found

    def _typed_step(self, step: steps.Step, kind: str, storages: Storages) -> Any:
        """In the type, and as a tensor in the shape, that the source kept it in."""
        made = adam_class(self.engine, self.source)
        shape = () if made else (self.kept.get("step") or {}).get("shape", ())
        return _thawed_number(Scalar(step, kind, tuple(shape)), storages)

    def _group_step(self, members: Sequence[int], storages: Storages) -> dict[str, Any]:
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
            return {"step": self._typed_step(told.pop(), kind, storages)}
        return {} if stale is None else {"step": stale}

    # -- loss scale

    def _scaling(self, storages: Storages) -> dict[str, Any]:
        """The source's loss scaler where the type stays, else one as the engine makes it."""
        same = self.engine.same_dtype
        if same and isinstance(self.kept.get("loss_scaler"), Foreign):
            return {
                "loss_scaler": self._thawed(self.kept["loss_scaler"], storages),
                "dynamic_loss_scale": self.kept.get("dynamic_loss_scale", False),
                "overflow": self.kept.get("overflow", False),
            }
        scaler, dynamic = self._fresh_scaler()
        return {"loss_scaler": scaler, "dynamic_loss_scale": dynamic, "overflow": False}

    def _fresh_scaler(self) -> tuple[Foreign, bool]:
        """As the engine makes it (0.19.8, fp16/loss_scaler.py)."""
        module = "deepspeed.runtime.fp16.loss_scaler"
        engine = self.engine
        static = engine.number(0.0, "fp16", "loss_scale") if engine.dtype == "F16" else 1.0
        if static:
            state: dict[str, Any] = {"cur_scale": float(static), "dynamic": False}
            return Foreign(Global(f"{module}.LossScaler"), (), state, "new"), False
        shift = engine.number(2, "fp16", "hysteresis")
        state = {
            "cur_scale": 2.0 ** engine.number(16, "fp16", "initial_scale_power"),
            "dynamic": True,
            "cur_iter": 0,
            "last_overflow_iter": -1,
            "scale_factor": 2.0,
            "scale_window": engine.number(1000, "fp16", "loss_scale_window"),
            "min_scale": engine.number(1, "fp16", "min_loss_scale"),
            "delayed_shift": shift,
            "cur_hysteresis": shift,
            "consecutive_hysteresis": bool(engine.option("fp16", "consecutive_hysteresis")),
            "raise_error_at_min_scale": True,
            "dtype": Global("torch.float16"),
        }
        return Foreign(Global(f"{module}.DynamicLossScaler"), (), state, "new"), True


def _thawed_number(number: Scalar, storages: Storages) -> Any:
    """A tensor, or a number of Python's."""
    value = number.unwrapped()
    return storages.scalar(value) if isinstance(value, Scalar) else value


class _Partition:
    """Rank `rank`'s share of a flat buffer in stage 1 and 2."""

    def __init__(self, flat: _Flat, dp: int, rank: int) -> None:
        self.flat = flat
        self.total = flat.starts[-1]
        self.size = zero.partition_size(self.total, dp)
        self.start = rank * self.size
        self.owned = max(0, min(self.size, self.total - self.start))

    def _inside(self) -> Iterator[tuple[str, int, int, int]]:
        """Name, elements, and the part [start, stop) of the partition, of what reaches into it."""
        flat = self.flat
        for place in range(max(0, bisect_right(flat.starts, self.start) - 1), len(flat.names)):
            if flat.starts[place] >= self.start + self.size:
                return
            begin, numel = flat.starts[place] - self.start, flat.numels[place]
            first, stop = max(begin, 0), min(begin + numel, self.size)
            if first < stop:
                yield flat.names[place], numel, first, stop

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
