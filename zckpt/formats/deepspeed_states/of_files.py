"""Scheduler state, client state and other values in rank files, and how they differ by rank."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any

from ...core.checkpoint.entries import Entry, Key
from ...core.checkpoint.inert import Foreign, alike, to_json
from ...core.checkpoint.optimizer_states import StateRow
from ...core.checkpoint.states import BESIDE_STATE, OF_NO_GROUP
from ...core.storage.checksum import crc32
from ...errors import Notice, note
from ...naming.names import plain
from ..extra_states import ExtraState, is_plain, sorted_out
from .states import FLAT_MASTERS, WHOLE_MASTERS, EngineStates, comparable, wrapper_of
from .tensors import is_extra

RANK_KEYS = ("lr_scheduler", "data_sampler", "random_ltd")
"""Keys of a model file and of a manifest's `state`, whose values may differ between model ranks."""
# keys of model states that the engine itself writes; all others are the user's client_state
ENGINE_KEYS = frozenset(
    (
        *("module", "buffer_names", "optimizer", "shared_params", "num_experts"),
        *("param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
        *RANK_KEYS,
        *("skipped_steps", "global_steps", "global_samples"),
        *("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions"),
        *("ds_config", "ds_version", "ds_autoep_layers"),
        *("sparse_tensor_module_names", "csr_tensor_module_names"),
    )
)


# the reader also adds `members` and `other`: see deepspeed/stage_0/optimizer.py
SCALING = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
"""The numbers of a loss scale in stage 0, which has no loss scaler object (0.19.8)."""

OF_SIZES = ("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions")
OF_PARTITIONS = ("group_paddings", "partition_count", "zero_stage")
SLICES = "param_slice_mappings"
CLIENT = "client_state."


def optimizer_values(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer file's clipping norm, loss scaler and the like: {"optimizer.clip_grad": 1.0}."""
    scaling = ("clip_grad", "loss_scaler", "dynamic_loss_scale", "overflow")
    keys = (*scaling, *SCALING)
    return {f"optimizer.{key}": state[key] for key in keys if key in state}


def model_values(model: Mapping[str, Any], module: Mapping[str, Any]) -> dict[str, Any]:
    """A model file's scheduler state, client state and the like; no weights and no counters.

    `module` is the state dict in the file, whose extra states are included.
    """
    return {
        "lr_scheduler": model.get("lr_scheduler"),
        "module_metadata": getattr(module, "_metadata", None),
        "module_extra": {name: value for name, value in module.items() if is_extra(name, value)},
        "data_sampler": model.get("data_sampler"),
        "random_ltd": model.get("random_ltd"),
        "client_state": {key: own for key, own in model.items() if key not in ENGINE_KEYS},
    }


def of_ranks(ranks: EngineStates) -> dict[str, dict[str, Any]]:
    """For each rank's file: the values in which it differs from rank 0's file of the same kind.

    Optimizer files are compared with rank 0's optimizer file, model files with rank 0's model file.
    Keyed by file name; files without differences are left out.
    """
    differing: dict[str, dict[str, Any]] = {}
    for files, values_of in (
        (ranks.optimizers, lambda value: optimizer_values(value["optimizer_state_dict"])),
        (ranks.models, _values_by_key),
    ):
        other_files = [file for file in files[1:] if file.value is not files[0].value]
        first = files[0].summary(values_of(files[0].value)) if other_files else {}
        for file in other_files:
            summary = file.summary(values_of(file.value))
            if summary != first:
                differing[os.path.basename(file.path)] = {
                    key: summary.get(key)
                    for key in {**first, **summary}
                    if summary.get(key) != first.get(key)
                }
    return differing


def layout(ranks: EngineStates) -> dict[str, dict[str, Any]]:
    """What each file states about the run's sizes and partitions, by file name.

    The manifest keeps this only to compare checkpoints: the reader computes the facts itself.
    """
    statements: dict[str, dict[str, Any]] = {}
    for file in ranks.models:
        statement = {key: to_json(file.value[key]) for key in OF_SIZES if key in file.value}
        statements[os.path.basename(file.path)] = statement
    for file, state in zip(ranks.optimizers, ranks.states, strict=True):
        statement = statements.setdefault(os.path.basename(file.path), {})
        statement |= {key: comparable(state[key]) for key in OF_PARTITIONS if key in state}
        # under round robin, DeepSpeed's mappings do not match its flat buffers, but zckpt's do
        if SLICES in state and not ranks.round_robin:
            statement[SLICES] = f"{_crc_of_slices(state[SLICES]):08x}"
    return statements


def _crc_of_slices(groups: Any) -> int:
    """One checksum for the starts and lengths of all parameters in a rank's partitions.

    It does not depend on the order of groups, because ranks may list groups of experts in different
    orders, nor on words that wrappers such as torch.compile insert into names.
    """
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        return crc32(repr(comparable(groups)).encode())
    places = [
        (plain(str(name)), _numbers(address)) for group in groups for name, address in group.items()
    ]
    return crc32(repr(sorted(places, key=itemgetter(0))).encode())


def _numbers(address: Any) -> Any:
    known = isinstance(address, Foreign) and isinstance(address.state, Mapping)
    return tuple(address.state.values()) if known else comparable(address)


def _values_by_key(model: Mapping[str, Any]) -> dict[str, Any]:
    values = model_values(model, model["module"])
    client_state = values.pop("client_state")
    return {**values, **{f"{CLIENT}{key}": value for key, value in client_state.items()}}


def own_client_state(differing: Mapping[str, Iterable[str]]) -> list[Notice]:
    """Notes on the items of client state that differ between ranks: only rank 0's are kept.

    `differing` maps a file's name to the names of the values in which the file differs from rank
    0's: {"zero_pp_rank_1_mp_rank_00_model_states.pt": ["client_state.seed"]}.
    """
    keys = {key for values in differing.values() for key in values}
    client_keys = sorted(key.removeprefix(CLIENT) for key in keys if key.startswith(CLIENT))
    return [
        note(
            "rank-state-omitted", f"client_state {key!r}: only rank 0's value is kept", subject=key
        )
        for key in client_keys
    ]


# -- values in optimizer files that the engine does not write: from the program, or from an
# optimizer whose `state_dict` has more than torch's


OF_BASE = frozenset(("state", "param_groups"))
"""The keys of a torch optimizer's state dict."""
OF_ENGINE = OF_BASE | {
    *("base_optimizer_state", "base_optimizer_state_step", "optimizer_state_dict"),
    *("single_partition_of_fp32_groups", "fp32_flat_groups", FLAT_MASTERS, WHOLE_MASTERS),
    *("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad"),
    *SCALING,
    *("zero_stage", "partition_count", "group_paddings", "groups_padding"),
    *("param_alignment_paddings", "param_slice_mappings", "ds_zero_partition_groups"),
    "universal_checkpoint_info",
    *("param_shapes", "ds_config", "ds_version"),
}
"""Keys that the engine's optimizer wrappers, or DeepSpeed's converter, write (0.5.10 to 0.19.8)."""


def extra_states_of(ranks: EngineStates) -> list[StateRow]:
    """Optimizer states that belong to no parameter, as records for the manifest's `states`.

    A number or text that is equal on all ranks is written into targets. All other states are only
    compared: their records have the values of all ranks.
    """

    def keep(values: Any, path: str, tensors: dict[Key, Entry]) -> Any:
        files = ranks.optimizers
        by_rank = [values] * len(files) if is_plain(values) else values
        return [
            file.kept(value, f"{path}.{rank}", tensors)
            for rank, (value, file) in enumerate(zip(by_rank, files, strict=True))
        ]

    return sorted_out(_extra_states(ranks), keep)


def _extra_states(ranks: EngineStates) -> Iterator[ExtraState]:
    if not ranks.optimizers:
        return
    numbers_in_groups = set(range(len(ranks.param_shapes())))
    for group in ranks.bases[0].get("param_groups") or ():
        numbers_in_groups |= {*(group.get("params") or ())}
    states = [
        expected if isinstance(expected := base.get("state"), dict) else {} for base in ranks.bases
    ]
    is_wrapped = not ranks.whole or wrapper_of(ranks.first) is not None
    files = [file.value for file in ranks.optimizers]
    has_files = not ranks.whole and files[0] is not ranks.first  # the files are separate
    for dictionaries, expected, reason in (
        (states, numbers_in_groups, OF_NO_GROUP),
        (ranks.bases if is_wrapped else (), OF_BASE, BESIDE_STATE),
        (ranks.states, OF_ENGINE, BESIDE_STATE),
        (files if has_files else (), OF_ENGINE, BESIDE_STATE),
    ):
        for key in dict.fromkeys(key for each in dictionaries for key in each):
            if key in expected or str(key).startswith("zckpt"):  # zckpt wrote these keys
                continue
            values = [each.get(key) for each in dictionaries]
            is_one = all(is_plain(value) and alike(value, values[0]) for value in values)
            yield ExtraState(key, values[0] if is_one else values, reason)
