"""What older DeepSpeed versions wrote for the same training: the same tensors under older keys.

`rewrite` takes a directory of DeepSpeed 0.19.8 and lays it out as a version from 0.4.4 to 0.16.4
did. Every fact below was read in the source of the tagged versions: `_save_checkpoint`,
`_save_zero_checkpoint` and `_get_zero_param_shapes` of runtime/engine.py, `state_dict` of
zero/stage2.py (stage_1_and_2.py since 0.5.9), zero/stage3.py and bf16_optimizer.py.

              0.4.4 ...... 0.5.10 ... 0.6.0 ... 0.6.2 ... 0.7.0 ... 0.16.4
    base      list of groups | torch's own dict
    shapes    in the optimizer files   | in the model files
    padding   cut by the rest to dp ..................... | to 2 dp ... | on each rank

Not laid out: a stage 1 before 0.5.9 (another class); frozen parameters that the user had handed to
the optimizer, which were part of the flat groups before 0.6.1 (stage 3: 0.8.0, bf16: 0.9.1); the
additional step with zero gradients before 0.13.2, which made `step` one more than the number of
updates; buffers cast to the module's type (0.16.4 still did); the recovery script of that version.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Each of these wrote something else than the one before it, or is a version often met.
VERSIONS = [
    *("0.4.5", "0.5.1", "0.5.3", "0.5.4", "0.5.9", "0.5.10", "0.6.0", "0.6.2", "0.6.5", "0.7.0"),
    *("0.7.3", "0.7.4", "0.8.0", "0.8.2", "0.9.0", "0.9.1", "0.9.2", "0.9.3", "0.10.1", "0.11.0"),
    *("0.13.0", "0.13.1", "0.14.5", "0.16.4"),
]

Version = tuple[int, ...]
State = dict[str, Any]
FIRST: Version = (0, 4, 4)  # 0.4.0 to 0.4.3 shuffled the parameters and did not record the order


class Key(NamedTuple):
    """A key of a saved dict and the versions that wrote it: from `since` to before `until`."""

    name: str
    since: Version = FIRST
    until: Version = (0, 17)


MODEL_KEYS = [
    Key("module"),
    Key("buffer_names"),
    Key("optimizer"),
    Key("param_shapes", since=(0, 6, 0)),
    Key("frozen_param_shapes", since=(0, 9, 1)),
    Key("shared_params", since=(0, 9, 2)),
    Key("frozen_param_fragments", since=(0, 9, 1)),
    Key("lr_scheduler"),
    Key("data_sampler", since=(0, 8, 0)),
    Key("random_ltd", since=(0, 8, 0)),
    Key("csr_tensor_module_names", until=(0, 5, 5)),
    Key("sparse_tensor_module_names", since=(0, 5, 5)),
    Key("skipped_steps"),
    Key("global_steps"),
    Key("global_samples"),
    Key("dp_world_size"),
    Key("mp_world_size"),
    Key("num_experts"),
    Key("ds_config"),
    Key("ds_version"),
]
# With experts no version up to 0.16.4 wrote these: the shapes are then nowhere (before 0.6.0: in
# the optimizer files).
ABSENT_WITH_EXPERTS = {
    *("buffer_names", "optimizer", "param_shapes", "shared_params", "ds_config", "ds_version"),
    *("frozen_param_shapes", "frozen_param_fragments"),
}
NEW_MODEL_KEYS = {"checkpoint_parallel_dimensions", "ds_autoep_layers", "autoep_layers"}

FLAT_GROUPS_KEYS = [
    Key("loss_scaler"),
    Key("dynamic_loss_scale"),
    Key("overflow"),
    Key("clip_grad", since=(0, 6, 2)),
    Key("base_optimizer_state"),
    Key("base_optimizer_state_step", since=(0, 11, 0)),
    Key("single_partition_of_fp32_groups"),
    Key("zero_stage"),
    Key("group_paddings", since=(0, 7, 0)),
    Key("partition_count"),
    Key("ds_version"),
    Key("param_slice_mappings", since=(0, 7, 4)),
]
BF16_KEYS = [
    Key("clip_grad"),
    Key("base_optimizer_state"),
    Key("single_partition_of_fp32_groups"),
    Key("groups_padding", until=(0, 7, 0)),
    Key("group_paddings", since=(0, 7, 0)),
    Key("partition_count"),
    Key("ds_version"),
    Key("param_slice_mappings", since=(0, 7, 0)),
]
PARTITIONED_KEYS = [
    Key("zero_stage"),
    Key("loss_scaler"),
    Key("dynamic_loss_scale"),
    Key("overflow"),
    Key("partition_count"),
    Key("optimizer_state_dict"),
    Key("fp32_flat_groups"),
]
LOSS_SCALER_ATTRIBUTES = [
    Key("cur_scale"),
    Key("cur_iter"),
    Key("last_overflow_iter"),
    Key("scale_factor"),
    Key("scale_window"),
    Key("min_scale"),
    Key("delayed_shift"),
    Key("cur_hysteresis"),
    Key("consecutive_hysteresis"),
    Key("raise_error_at_min_scale", since=(0, 6, 5)),
    Key("dynamic", since=(0, 8, 2)),
    Key("dtype", since=(0, 8, 3)),
]
# torch 1.11 to 2.8 added these to the groups of Adam and others; DeepSpeed 0.6 is of torch 1.11.
NEW_GROUP_KEYS = {
    *("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"),
}


@dataclasses.dataclass(frozen=True)
class Era:
    """What decides how a directory is written."""

    version: Version
    int_step: bool  # torch before 1.12 counted Adam's steps with Python integers
    container: str  # "zip", or "legacy": torch before 1.6
    location: str  # "cpu", or "cuda": storages are marked as saved from GPU number <rank>

    @property
    def name(self) -> str:
        return ".".join(map(str, self.version))

    def select(self, keys: Sequence[Key], state: Mapping[str, Any]) -> State:
        """The part of `state` which this version wrote, in the order of `keys`."""
        return {
            key.name: state[key.name]
            for key in keys
            if key.since <= self.version < key.until and key.name in state
        }


def rewrite(
    run: Path,
    target: Path,
    version: str,
    *,
    container: str = "zip",
    location: str = "cpu",
    int_step: bool | None = None,
) -> Path:
    """Lays out the checkpoint in `run` at `target` as DeepSpeed `version` did; returns `target`.

    `int_step` is by default true before 0.7.0 (July 2022, the month after torch 1.12).
    Raises ValueError for a checkpoint that this version could not have written.
    """
    numbers = tuple(map(int, version.split(".")))
    if not FIRST <= numbers < (0, 17):
        raise ValueError(f"the layout of DeepSpeed {version} is not known here")
    steps = numbers < (0, 7, 0) if int_step is None else int_step
    era = Era(numbers, steps, container, location)
    tag = (run / "latest").read_text()
    (target / tag).mkdir(parents=True)
    (target / "latest").write_text(tag)

    states = {path.name: load(path) for path in sorted((run / tag).glob("*.pt"))}
    models = {name: state for name, state in states.items() if MODEL_FILE.fullmatch(name)}
    optimizers = {name: state for name, state in states.items() if OPTIMIZER_FILE.fullmatch(name)}
    others = {name: states[name] for name in states.keys() - models.keys() - optimizers.keys()}
    saved = {
        **{
            name: old_model(state, uses_bf16_optimizer(optimizers), era)
            for name, state in models.items()
        },
        **old_optimizers(optimizers, models, era),
        **old_others(others, era),
    }
    for name, state in saved.items():
        save(state, target / tag / name, era)
    return target


MODEL_FILE = re.compile(r"(zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
OPTIMIZER_FILE = re.compile(
    r"(bf16_)?(?P<rest>zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt)"
)
EXPERT_FILE = re.compile(r"layer_(?P<layer>\d+)_(?P<rest>expert_(?P<expert>\d+)_mp_rank_.*)")


def uses_bf16_optimizer(optimizers: Mapping[str, State]) -> bool:
    return any("zero_stage" not in state["optimizer_state_dict"] for state in optimizers.values())


# The model files.


def old_model(state: State, bf16_optimizer: bool, era: Era) -> State:
    known = {key.name for key in MODEL_KEYS} | NEW_MODEL_KEYS
    client_state = {key: value for key, value in state.items() if key not in known}
    older = {
        **state,
        "module": old_module(state, era),
        "csr_tensor_module_names": set(),
        "sparse_tensor_module_names": set(),
        "ds_config": old_config(state["ds_config"], bf16_optimizer, era)
        if "ds_config" in state
        else None,
        "ds_version": era.name,
    }
    if "shared_params" in state and era.version < (0, 10, 1) and not is_partitioned(state):
        older["shared_params"] = {}  # aliases were looked for among stage 3's parameters only
    keys = [
        key
        for key in MODEL_KEYS
        if "num_experts" not in state or key.name not in ABSENT_WITH_EXPERTS
    ]
    return {**era.select(keys, older), **client_state}


def is_partitioned(state: State) -> bool:
    """Stage 3: the module holds placeholders instead of parameters."""
    names = [name for group in state.get("param_shapes") or [] for name in group]
    return bool(names) and state["module"] is not None and state["module"][names[0]].numel() == 0


def old_module(state: State, era: Era) -> Any:
    """Before 0.6.0 stage 3 left one element, 1.0, in the place of a parameter; since then none."""
    module = state["module"]
    if not is_partitioned(state):
        return module
    if era.version < (0, 6, 0):
        parameters = {name for name in module if name not in state["buffer_names"]}
        module = OrderedDict(
            (name, torch.ones(1, dtype=value.dtype) if name in parameters else value)
            for name, value in module.items()
        )
    # a tied weight is one placeholder under two names; torch.load parts them when they are empty
    return module | {alias: module[owner] for alias, owner in state["shared_params"].items()}


def old_config(config: Any, bf16_optimizer: bool, era: Era) -> Any:
    """Before 0.11.1 BF16_Optimizer was for stage 0: with stage 1 it could not save."""
    if not bf16_optimizer or era.version >= (0, 11, 1):
        return config
    return {**config, "zero_optimization": {**config["zero_optimization"], "stage": 0}}


def old_others(states: Mapping[str, State], era: Era) -> dict[str, State]:
    """Experts: one file for all layers before 0.6.0, storages of whole groups before 0.7.4."""
    older: dict[str, State] = {}
    for name, state in states.items():
        match = EXPERT_FILE.fullmatch(name)
        if match and era.version < (0, 7, 4):
            state = share_storage(state)
        if match and era.version < (0, 6, 0):
            older.setdefault(match["rest"], {}).update(state)
        else:
            older[name] = state
    return older


def share_storage(state: Mapping[str, Tensor]) -> State:
    """The same tensors as views of one flat tensor that holds more than them."""
    margin = torch.full((64,), 7.0, dtype=next(iter(state.values())).dtype)
    flat = torch.cat([margin, *(value.reshape(-1) for value in state.values()), margin])
    starts = [64]
    for value in state.values():
        starts.append(starts[-1] + value.numel())
    return {
        name: flat[start : start + value.numel()].view(value.shape)
        for start, (name, value) in zip(starts, state.items(), strict=False)
    }


# The optimizer files.


def old_optimizers(
    states: Mapping[str, State], models: Mapping[str, State], era: Era
) -> dict[str, State]:
    """All optimizer files under their older names: `bf16_` since 0.6.2 only."""
    older = {}
    for name, state in states.items():
        match = OPTIMIZER_FILE.fullmatch(name)
        assert match
        rank, model_parallel = int(match["dp"]), match["mp"]
        peers = {
            int(peer["dp"]): states[peer.string]["optimizer_state_dict"]
            for peer in map(OPTIMIZER_FILE.fullmatch, states)
            if peer and peer["mp"] == model_parallel
        }
        model = models.get(f"mp_rank_{model_parallel}_model_states.pt") or models.get(
            f"zero_pp_rank_{rank}_mp_rank_{model_parallel}_model_states.pt"
        )
        assert model
        shapes = [
            OrderedDict((key, torch.Size(shape)) for key, shape in group.items())
            for group in model["param_shapes"]
        ]
        older[name if era.version >= (0, 6, 2) else match["rest"]] = {
            "optimizer_state_dict": old_optimizer(peers, rank, shapes, era),
            **({"param_shapes": old_shapes(shapes, era)} if era.version < (0, 6, 0) else {}),
            "ds_config": old_config(state["ds_config"], uses_bf16_optimizer(states), era),
            "ds_version": era.name,
        }
    return older


def old_shapes(shapes: list[OrderedDict[str, torch.Size]], era: Era) -> Any:
    """One dict for all groups before 0.5.4, then a dict per group."""
    if era.version >= (0, 5, 4):
        return shapes
    return OrderedDict((name, shape) for group in shapes for name, shape in group.items())


def old_optimizer(
    peers: Mapping[int, State], rank: int, shapes: list[OrderedDict[str, torch.Size]], era: Era
) -> State:
    state = peers[rank]
    if "fp32_flat_groups" in state:
        return old_partitioned_parameters(state, era)
    if any(padding for group in state.get("param_alignment_paddings", []) for padding in group):
        raise ValueError("parameter_alignment did not exist in older versions")
    bf16_optimizer = "zero_stage" not in state
    if bf16_optimizer and era.version < (0, 6, 2):
        raise ValueError("BF16_Optimizer came with DeepSpeed 0.6.2")
    if not bf16_optimizer and state["zero_stage"] == 1 and era.version < (0, 5, 9):
        raise ValueError("stage 1 had a class and keys of its own before DeepSpeed 0.5.9")
    cuts = [
        cut_group(peers, rank, group, sum(shape.numel() for shape in shapes[group].values()), era)
        for group in range(len(shapes))
    ]
    paddings = [cut.padding for cut in cuts]
    masters = [cut.master if bf16_optimizer else cut.master[: cut.lean] for cut in cuts]
    older = {
        **state,
        "base_optimizer_state": old_base(state["base_optimizer_state"], cuts, era),
        "single_partition_of_fp32_groups": [each.detach().requires_grad_() for each in masters],
        "groups_padding": paddings,
        "group_paddings": paddings,
        "ds_version": era.name,
        "param_slice_mappings": [
            OrderedDict((name, old_fragment(place, era)) for name, place in group.items())
            for group in state["param_slice_mappings"]
        ],
    }
    if bf16_optimizer:
        return era.select(BF16_KEYS, older)
    older["loss_scaler"] = old_loss_scaler(state["loss_scaler"], era)
    older["zero_stage"] = old_stage(state["zero_stage"], era)
    if era.version < (0, 5, 0):
        older["partition_count"] = state["partition_count"][0]
    return era.select(FLAT_GROUPS_KEYS, older)


class Cut(NamedTuple):
    """One rank's partition of one group, with the padding at its end."""

    master: Tensor
    slots: State  # tensors of the optimizer's state and the rest of it, such as step
    padding: int  # as this version counted it

    @property
    def lean(self) -> int:
        """Where the slice without padding ends; negative if padding exceeds the partition."""
        return self.master.numel() - self.padding


def cut_group(peers: Mapping[int, State], rank: int, group: int, total: int, era: Era) -> Cut:
    """Joins a group of `total` elements over its ranks and cuts it as this version did.

    Experts of one expert rank are cut over every `replicas`-th rank.
    """
    world = peers[rank]["partition_count"][group]
    replicas = len(peers) // world
    owners = [peers[other] for other in range(rank % replicas, len(peers), replicas)]
    position = rank // replicas
    # 0.5.2 aligned the partitions to 4 bytes of fp16.
    alignment = world if era.version < (0, 5, 2) else 2 * world
    size = math.ceil(total / alignment) * alignment // world

    def cut(parts: list[Tensor]) -> Tensor:
        flat = torch.zeros(size * world, dtype=parts[0].dtype)
        flat[:total] = torch.cat([part.detach() for part in parts])[:total]
        return flat[position * size : (position + 1) * size].clone()

    states = [group_state(owner["base_optimizer_state"], group) for owner in owners]
    slots = {
        slot: cut([state[slot] for state in states])
        if torch.is_tensor(value) and value.ndim
        else value
        for slot, value in group_state(peers[rank]["base_optimizer_state"], group).items()
    }
    master = cut([owner["single_partition_of_fp32_groups"][group] for owner in owners])
    bf16_optimizer = "zero_stage" not in peers[rank]
    padding = padding_on(position, size, world, total, bf16_optimizer, era)
    return Cut(master, slots, padding)


def group_state(base: Any, group: int) -> State:
    """A list if elastic, otherwise torch's dict; plain SGD has no state."""
    state: State = base[group] if isinstance(base, list) else base["state"].get(group, {})
    return state


def padding_on(
    position: int, size: int, world: int, total: int, bf16_optimizer: bool, era: Era
) -> int:
    """What a version took for padding at the end of a partition.

    0.4.4 to 0.6.7: on the last rank, the rest to dp although the buffer was aligned to 2 dp, so
    that up to dp zeros stay in the files. 0.7.0 to 0.16.3: on the last rank, all of it, even if
    that is more than the partition. 0.16.4: on each rank its own part. BF16_Optimizer: always as
    in 0.7.0, and it does not cut the padding off.
    """
    if era.version >= (0, 16, 4) and not bf16_optimizer:
        return max(0, min(size, (position + 1) * size - total))
    if position != world - 1:
        return 0
    if era.version < (0, 7, 0) and not bf16_optimizer:
        return -total % world
    return size * world - total


def old_base(base: Any, cuts: list[Cut], era: Era) -> Any:
    """`base_optimizer_state`: before 0.5.10 elastic by default, which saved no groups."""
    if isinstance(base, list) or era.version < (0, 5, 10):
        groups = [{}] * len(cuts) if isinstance(base, list) else base["param_groups"]
        return [
            {
                slot: value[: cut.lean] if torch.is_tensor(value) and value.ndim else value
                for slot, value in old_slots(cut.slots, group, era).items()
            }
            for cut, group in zip(cuts, groups, strict=True)
        ]
    state = {number: cut.slots for number, cut in enumerate(cuts) if number in base["state"]}
    return old_torch({**base, "state": state}, era)


def old_torch(saved: State, era: Era) -> State:
    """`state_dict` of a torch optimizer."""
    owners = {number: group for group in saved["param_groups"] for number in group["params"]}
    return {
        "state": {
            number: old_slots(slots, owners[number], era)
            for number, slots in saved["state"].items()
        },
        "param_groups": [
            old_group(group, [saved["state"].get(number, {}) for number in group["params"]], era)
            for group in saved["param_groups"]
        ],
    }


def old_slots(slots: State, group: State, era: Era) -> State:
    """FusedAdam, which has `step` in its groups, counted nowhere else before 0.6.5."""
    if era.version < (0, 6, 5) and "step" in group:
        return {slot: value for slot, value in slots.items() if slot != "step"}
    if era.int_step and torch.is_tensor(slots.get("step")):
        return {**slots, "step": int(slots["step"])}
    return dict(slots)


def old_group(group: State, states: list[State], era: Era) -> State:
    older = {
        key: value
        for key, value in group.items()
        if era.version >= (0, 7, 0) or key not in NEW_GROUP_KEYS
    }
    counted = [state["step"] for state in states if "step" in state]
    if era.version < (0, 6, 5) and "step" in group and counted:
        older["step"] = int(counted[-1])
    return older


def old_stage(stage: int, era: Era) -> Any:
    """A plain integer before 0.7.0, and then 2 for stage 1 as well."""
    if era.version >= (0, 7, 0):
        return stage
    return max(2, int(stage))


def old_loss_scaler(scaler: Any, era: Era) -> Any:
    older = copy.copy(scaler)
    older.__dict__.clear()
    older.__dict__.update(era.select(LOSS_SCALER_ATTRIBUTES, vars(scaler)))
    return older


@dataclasses.dataclass
class OldFragmentAddress:
    """`fragment_address` as it was found in bf16_optimizer.py before 0.7.3."""

    numel: int
    start: int


OldFragmentAddress.__module__ = "deepspeed.runtime.bf16_optimizer"
OldFragmentAddress.__name__ = OldFragmentAddress.__qualname__ = "fragment_address"


def old_fragment(place: Any, era: Era) -> Any:
    return place if era.version >= (0, 7, 3) else OldFragmentAddress(place.numel, place.start)


def old_partitioned_parameters(state: State, era: Era) -> State:
    """Stage 3: the same keys in all versions; only since 0.13.0 the masters have `ds_id`."""
    masters = state["fp32_flat_groups"]
    if era.version < (0, 13, 0):
        masters = [master.detach().requires_grad_() for master in masters]
    return era.select(
        PARTITIONED_KEYS,
        {
            **state,
            "zero_stage": old_stage(state["zero_stage"], era),
            "loss_scaler": old_loss_scaler(state["loss_scaler"], era),
            "optimizer_state_dict": old_torch(state["optimizer_state_dict"], era),
            "fp32_flat_groups": masters,
        },
    )


# Files.


def load(path: Path) -> State:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed  # noqa: F401  its classes are in the pickles

    state: State = torch.load(path, map_location="cpu", weights_only=False)
    return state


def save(state: State, path: Path, era: Era) -> None:
    rank = re.search(r"zero_pp_rank_(\d+)", path.name)
    device = "cpu" if era.location == "cpu" else f"{era.location}:{rank[1] if rank else 0}"
    with old_names(era), storages_on(device):
        torch.save(state, path, _use_new_zipfile_serialization=era.container == "zip")


@contextlib.contextmanager
def old_names(era: Era) -> Iterator[None]:
    """Lets pickle find a class of ours under its old global name."""
    module = sys.modules[OldFragmentAddress.__module__]
    present = module.fragment_address
    if era.version < (0, 7, 3):
        module.fragment_address = OldFragmentAddress  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.fragment_address = present  # type: ignore[attr-defined]


@contextlib.contextmanager
def storages_on(device: str) -> Iterator[None]:
    """Marks storages as saved from `device`, which every real training on GPUs does."""
    original = torch.serialization.location_tag
    torch.serialization.location_tag = lambda storage: device
    try:
        yield
    finally:
        torch.serialization.location_tag = original
