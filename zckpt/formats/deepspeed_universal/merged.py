"""Reads the model files and optimizer_state.pt of a DeepSpeed universal directory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from ...core.checkpoint.inert import nested
from ...core.storage import sources
from ...core.storage.inventory import missing_file, parse_name
from ...errors import (
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    Notice,
    UnsupportedCheckpoint,
    listed,
    note,
    warning,
)
from ...files.torchfile import Parsed, Tensor, TorchFile
from ...naming.patterns import INFO, check_patterns
from .. import zero
from ..deepspeed_states.agreement import check_models, check_names
from ..deepspeed_states.directories import MODEL_3, TagDirectory, refuse
from ..deepspeed_states.states import (
    EngineStates,
    ModuleOverrides,
    ParameterShapes,
    dictionary,
    in_user_order,
    item,
    open_files,
    shapes_of_groups,
    version_of,
)
from .files import COMMON, OURS, ZERO, model_files
from .slicing import info_of_patterns


class MergedStates:
    """The contents of the model files and of optimizer_state.pt, as an `EngineStates` (`states`).

    With tensor or pipeline parallelism, each model file has only a part of the module. Then
    `is_whole` is False, and only the module's tensors that are equal on all ranks are read.
    """

    def __init__(self, directory: TagDirectory) -> None:
        common = os.path.join(directory.path, ZERO, COMMON)
        if not sources.is_file(common):
            raise missing_file(
                common, hint="the conversion did not finish, or the folder zero/ was not copied"
            )
        paths = model_files(directory)
        partitioned = parse_name((MODEL_3,), paths[0][0]) is not None
        parsed = Parsed()
        models, *other_ranks = [open_files(ranked, parsed) for ranked in paths]
        self.other_models = [file for files in other_ranks for file in files]
        self.notes = check_names([*models, *self.other_models])
        for files in (models, *other_ranks):
            check_models(files)
        # one per model-parallel rank
        self._first_models = [models[0], *(files[0] for files in other_ranks)]
        self.tops = [dictionary(file, file.value) for file in self._first_models]
        optimizer = TorchFile(common)
        state = dictionary(optimizer, optimizer.value)
        version = version_of(self.tops[0], state)
        self.patterns, self.unclear = _patterns(self.tops[0])
        self.is_whole = len(self.tops) == 1 and isinstance(self.tops[0].get("module"), dict)
        model = self.tops[0]
        self.states = EngineStates(
            directory,
            models,
            [optimizer],
            model,
            [state],
            [_base(state)],
            version,
            _dp(directory, model, len(models), partitioned and self.is_whole),
            partitioned,
            overrides=ModuleOverrides() if self.is_whole else self._of_all_ranks(),
        )
        for top in self.tops:
            experts = top.get("num_experts")
            if isinstance(experts, list) and any(experts):
                refuse(directory, "mixture-of-experts layers")

    def _of_all_ranks(self) -> ModuleOverrides:
        """What replaces the module of the first model file, which has only a part of the model.

        The replacement has the tensors that are equal on all ranks, and the second names of tied
        weights from all files.
        """
        aliases = [top.get("shared_params") or {} for top in self.tops]
        owners = {alias: owner for pairs in aliases for alias, owner in pairs.items()}
        return ModuleOverrides(
            module=self._equal_on_all_ranks(), second_names=owners, frozen_shapes={}
        )

    def _equal_on_all_ranks(self) -> dict[str, Any]:
        """The buffers and uncut frozen weights that are equal on all model ranks, by name."""
        modules = [m for top in self.tops if isinstance(m := top.get("module"), dict)]
        if len(modules) < max(len(self.tops), 2):
            return {}
        shapes = [top.get("param_shapes") or () for top in self.tops]
        trained = {name for groups in shapes for group in groups for name in group}
        trained |= {alias for top in self.tops for alias in top.get("shared_params") or {}}
        buffers = set(self.tops[0].get("buffer_names") or ())
        alike = {}
        for name, value in modules[0].items():
            copies = [t for module in modules if isinstance(t := module.get(name), Tensor)]
            if name in trained or len(copies) < len(modules):
                continue
            if name not in buffers and info_of_patterns(self.patterns, name, value.shape):
                continue
            pairs = zip(self._first_models, copies, strict=True)
            contents = {(tensor.shape, *file.crc(tensor)) for file, tensor in pairs}
            if len(contents) == 1 and contents.pop()[-1] is not None and value.numel:
                alike[name] = value
        return alike

    @property
    def module_dtype(self) -> str:
        """The type of the module's weights, such as "BF16".

        It is read from the model file. If each model file has only a part of the module, the type
        is taken from the ds_config: F32 unless the ds_config enables bf16 or fp16.
        """
        if self.is_whole:
            return self.states.module_dtype
        for key, dtype in (("bf16", "BF16"), ("bfloat16", "BF16"), ("fp16", "F16")):
            if nested(self.states.config, key, "enabled") is True:
                return dtype
        return "F32"

    @property
    def omitted(self) -> list[Notice]:
        if self.is_whole or not any(top.get("module") for top in self.tops):
            return []
        message = (
            f"the module weights of {len(self.tops)} model-parallel ranks, and frozen weights and "
            "buffers that differ between ranks: only masters are stored as complete tensors"
        )
        return [note("state-unsupported", message)]

    # -- the parameters

    def _listed_shapes(self) -> Iterator[list[ParameterShapes]]:
        """Yields each model rank's parameter shapes: one dictionary per group, in buffer order."""
        for top, file in zip(self.tops, self._first_models, strict=True):
            yield shapes_of_groups(top.get("param_shapes"), file)

    def shapes(self) -> list[ParameterShapes]:
        """The shapes of all ranks' parameters in the user's order: one dictionary per group.

        In stage 3, there is one dictionary per sub-group. If the model was cut for tensor
        parallelism, they are the shapes of the ranks' slices.
        """
        merged: list[ParameterShapes] = []
        for groups in self._listed_shapes():
            for place, shapes in enumerate(groups):
                if place == len(merged):
                    merged.append({})
                merged[place].update(in_user_order(shapes, self.states))
        return merged

    def group_of(self, place: int) -> int:
        """The number of the param group that contains sub-group `place` of stage 3.

        In stages 1 and 2, `place` already is the group's number.
        """
        if self.states.partitioned:
            groups = self.states.bases[0]["param_groups"]
            for group in range(len(groups) if isinstance(groups, list) else 0):
                if place in (item(groups, group).get("params") or ()):
                    return group
        return place

    def warnings(self) -> list[Notice]:
        """A warning that the converter may have misplaced the parameters of round-robin groups.

        DeepSpeed's converter reads such groups as if they were in plain order (0.19.8). It uses the
        real order only for a group with alignment padding. The converted files do not show the
        mistake.
        """
        states = self.states
        if OURS in states.first or not states.round_robin:
            return []
        aligned = states.first.get("param_alignment_paddings") or []
        permuted = [
            place
            for place, shapes in enumerate(next(self._listed_shapes()))
            if zero.round_robin(len(shapes), states.dp) != list(range(len(shapes)))
            and not (place < len(aligned) and any(aligned[place]))
        ]
        if not permuted:
            return []
        message = (
            "saved with round_robin_gradients and converted by DeepSpeed, which mixes up the "
            f"parameters then (0.19.8): masters and states of group {listed(permuted)} are those "
            "of other parameters; convert the run's own directory instead"
        )
        return [warning("engine-fault", message, subject="round_robin_gradients")]


def _patterns(model: dict[str, Any]) -> tuple[Mapping[str, Any], list[Notice]]:
    """The run's `universal_checkpoint_info`; if it is invalid, an empty dictionary and a warning.

    It states how the run's tensors were cut over tensor ranks. Tensors in this directory are full,
    so it matters only for a target with several tensor ranks.
    """
    info = model.get(INFO)
    if not isinstance(info, dict):
        return {}, []
    try:
        check_patterns(info)
    except (InconsistentCheckpoint, UnsupportedCheckpoint) as error:
        message = f"{error.message}: so nothing says how the parameters are cut for --tp"
        return {}, [warning("cuts-unknown", message, subject=error.subject, file=error.file)]
    return info, []


def _base(state: dict[str, Any]) -> dict[str, Any]:
    """The base optimizer's state dict: its groups, and in stage 3 also its state."""
    base = state.get("optimizer_state_dict")
    optimizer = base if isinstance(base, dict) else {"state": {}}
    return {**optimizer, "param_groups": state.get("param_groups")}


def _dp(directory: TagDirectory, model: dict[str, Any], count: int, cuts_frozen: bool) -> int:
    """The run's data-parallel size as the model file states it, else the number of model files.

    In stage 3, each rank's file has a slice of the frozen weights. If such files are missing,
    raises IncompleteCheckpoint.
    """
    stated_size = model.get("dp_world_size")
    dp = stated_size if isinstance(stated_size, int) and stated_size > 0 else count
    if cuts_frozen and model.get("frozen_param_shapes") and dp != count:
        raise IncompleteCheckpoint(
            "missing-rank-file",
            f"{directory.path} holds frozen weights in {count} of {dp} model files",
            hint="copy zero_pp_rank_R_mp_rank_00_model_states.pt of all ranks",
            file=directory.path,
        )
    return dp
