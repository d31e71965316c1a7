"""What a universal directory says beside its tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
)
from ...files.torchfile import Parsed, TorchFile
from .. import zero
from ..deepspeed_states.directories import (
    MODEL_3,
    Place,
    listed,
    refuse,
)
from ..deepspeed_states.states import Ranks, dictionary, item, nested, open_files, version_of
from .files import COMMON, MARK, ZERO, model_files

Shapes = dict[str, tuple[int, ...]]


class Merged(Ranks):
    """What a universal directory says beside its tensors, in the place of the ranks' files.

    `first` is optimizer_state.pt; what it does not hold any more was merged. With tensor or
    pipeline parallelism the modules in the model files are shards, and none is looked at.
    """

    def __init__(self, place: Place) -> None:
        common = os.path.join(place.directory, ZERO, COMMON)
        if not os.path.isfile(common):
            raise IncompleteCheckpoint(
                f"{place.directory} lacks {os.path.join(ZERO, COMMON)}",
                hint="the conversion did not finish, or the folder zero/ was not copied",
            )
        found = model_files(place)
        parsed: Parsed = {}
        self.place = place
        self.of_stage_3 = MODEL_3.fullmatch(os.path.basename(found[0][0])) is not None
        self.models, *others = [open_files(paths, parsed) for paths in found]
        self.others = [file for held in others for file in held]
        # one per model-parallel rank
        self.firsts = [held[0] for held in (self.models, *others)]
        self.tops = [dictionary(file, file.value) for file in self.firsts]
        self.optimizers = [TorchFile(common)]
        self.first = dictionary(self.optimizers[0], self.optimizers[0].value)
        self.states = [self.first]
        self.version = version_of(self.tops[0], self.first)
        stated = self.tops[0].get("ds_config")
        self.config_path = stated if isinstance(stated, str) else None
        self.config = stated if isinstance(stated, dict) else {}
        self.whole = len(self.tops) == 1 and isinstance(self.tops[0].get("module"), dict)
        self.model = self.tops[0] if self.whole else self._without_module()
        self.dp = self._dp()
        for top in self.tops:
            experts = top.get("num_experts")
            if isinstance(experts, list) and any(experts):
                refuse(place, "mixture-of-experts layers")

    def _without_module(self) -> dict[str, Any]:
        aliases = [top.get("shared_params") or {} for top in self.tops]
        return {
            **self.tops[0],
            "module": {},
            "shared_params": {alias: owner for held in aliases for alias, owner in held.items()},
            "frozen_param_shapes": {},
        }

    def _dp(self) -> int:
        """That of the run; frozen weights of stage 3 are cut over as many files."""
        stated = self.model.get("dp_world_size")
        dp = stated if isinstance(stated, int) and stated > 0 else len(self.models)
        if self.partitioned and self.model.get("frozen_param_shapes") and dp != len(self.models):
            raise IncompleteCheckpoint(
                f"{self.place.directory} holds frozen weights in {len(self.models)} of {dp} model "
                "files",
                hint="copy zero_pp_rank_R_mp_rank_00_model_states.pt of all ranks",
            )
        return dp

    @property
    def partitioned(self) -> bool:
        return self.of_stage_3

    @property
    def round_robin(self) -> bool:
        return False  # `shapes` are in the user's order

    @property
    def dtype(self) -> str:
        if self.whole:
            return super().dtype
        for key, dtype in (("bf16", "BF16"), ("bfloat16", "BF16"), ("fp16", "F16")):
            if nested(self.config, key, "enabled") is True:
                return dtype
        return "F32"

    @property
    def left_out(self) -> list[str]:
        if self.whole or not any(top.get("module") for top in self.tops):
            return []
        return [
            "the weights, frozen weights and buffers in the modules of "
            f"{len(self.tops)} model-parallel ranks: masters are whole, these are not"
        ]

    def base_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        held = state.get("optimizer_state_dict")
        return {
            "state": held.get("state") if isinstance(held, dict) else {},
            "param_groups": state.get("param_groups"),
        }

    # -- the parameters

    def _listed(self) -> Iterator[list[Shapes]]:
        """Every model-parallel rank's parameters as they lay in its flat buffers."""
        for top, file in zip(self.tops, self.firsts, strict=True):
            shapes = top.get("param_shapes")
            shapes = [shapes] if isinstance(shapes, dict) else shapes
            if not isinstance(shapes, list):
                raise CorruptCheckpoint(f"{file.path} states no param_shapes")
            yield [{name: tuple(shape) for name, shape in held.items()} for held in shapes]

    def shapes(self) -> list[Shapes]:
        """Parameters of every group (stage 3: sub-group) in the user's order, of all ranks.

        Shapes are those of shards where the model was cut for tensor parallelism.
        """
        merged: list[Shapes] = []
        for groups in self._listed():
            for place, held in enumerate(groups):
                if place == len(merged):
                    merged.append({})
                names = list(held)
                if super().round_robin:
                    names = [names[at] for at in zero.undo_round_robin(len(names), self.dp)]
                merged[place].update({name: held[name] for name in names})
        return merged

    def group_of(self, place: int) -> int:
        """The group of a sub-group; in stage 1 and 2 they are the same."""
        if self.partitioned:
            groups = self.base_state(self.first)["param_groups"]
            for group in range(len(groups) if isinstance(groups, list) else 0):
                if place in (item(groups, group).get("params") or ()):
                    return group
        return place

    def warnings(self) -> list[str]:
        """The converter takes round-robin files for plain ones (0.19.8), and nothing shows it.

        Only a group that has alignment padding is mapped as it lies.
        """
        if MARK in self.first or not super().round_robin:
            return []
        aligned = self.first.get("param_alignment_paddings") or []
        permuted = [
            place
            for place, held in enumerate(next(self._listed()))
            if zero.round_robin(len(held), self.dp) != list(range(len(held)))
            and not (place < len(aligned) and any(aligned[place]))
        ]
        if not permuted:
            return []
        return [
            "saved with round_robin_gradients and converted by DeepSpeed, which mixes up the "
            f"parameters then (0.19.8): masters and states of group {listed(permuted)} are those "
            "of other parameters; convert the run's own directory instead"
        ]
