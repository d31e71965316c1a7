"""What does the engine gather of experts without ZeRO, by its own rule?

A rank loads the model file, its own experts' files and the optimizer of its ep rank, whose numbers
stand in the order of its own groups (DeepSpeed 0.19.8, engine.py `load_moe_state_dict`). Dense
parameters are taken from the first optimizer. Names are in zckpt's files alone.

This states again where everything lies, so that a proof does not repeat a mistake of the reader.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ....core.partition import Partition
from ....errors import MissingData
from ....files.torchfile import Parsed, TorchFile
from ..stage_0 import gather_whole

OF_RANK = re.compile(r"expp_rank_(\d+)_mp_rank_0+_optim_states\.pt")
LOCAL = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..*)")
LISTS = ("fp32_groups_flat", "fp32_groups")


def partitions(directory: str, model: TorchFile) -> Iterator[Partition]:
    """The optimizers of all ep ranks, each copy of a parameter once."""
    paths = {int(m[1]): name for name in os.listdir(directory) if (m := OF_RANK.fullmatch(name))}
    parsed = Parsed()
    files = [TorchFile(os.path.join(directory, paths[rank]), parsed) for rank in sorted(paths)]
    config = model.value.get("ds_config")
    data_first = isinstance(config, dict) and config.get("use_data_before_expert_parallelism")
    shapes = [{n: tuple(s) for n, s in own.items()} for own in model.value["param_shapes"] or ()]
    local = _local_counts(shapes)
    for rank, file in enumerate(files):
        optimizer = file.value["optimizer"]
        base = optimizer.get("optimizer_state_dict", optimizer)
        if LISTS[0] in optimizer and not shapes:
            raise MissingData(
                f"{file.path}: the engine's rule cannot name the flat tensors of the optimizer",
                hint="verify without --gather",
            )
        kept, listed = [], []
        for place, group in enumerate(base["param_groups"]):
            ep = int(group["name"].removeprefix("ep_size_")) if group.get("moe") else 1
            alike = len(files) // ep  # that have the same experts
            own, again = divmod(rank, alike) if data_first else (rank % ep, rank // ep)
            if again:
                continue
            kept.append(place)
            if shapes:
                listed.append({_name(n, own, local): s for n, s in shapes[place].items()})
        yield from gather_whole.of_optimizer(file, _with_groups(optimizer, kept), listed)


def _local_counts(shapes: list[dict[str, tuple[int, ...]]]) -> Mapping[str, int]:
    """How many experts a rank has of each layer."""
    numbers: dict[str, set[str]] = {}
    for match in (LOCAL.fullmatch(name) for own in shapes for name in own):
        if match:
            numbers.setdefault(match[1], set()).add(match[2])
    return {layer: len(own) for layer, own in numbers.items()}


def _name(name: str, rank: int, local: Mapping[str, int]) -> str:
    """The name in the whole model; dense parameters have no number."""
    if (match := LOCAL.fullmatch(name)) is None:
        return name
    return f"{match[1]}{rank * local[match[1]] + int(match[2])}{match[3]}"


def _with_groups(optimizer: Mapping[str, Any], places: list[int]) -> dict[str, Any]:
    """The optimizer with some of its groups alone."""
    base = optimizer.get("optimizer_state_dict", optimizer)
    base = {**base, "param_groups": [base["param_groups"][place] for place in places]}
    lists = {key: [optimizer[key][place] for place in places] for key in LISTS if key in optimizer}
    return {**lists, "optimizer_state_dict": base, "zckpt_frozen": optimizer.get("zckpt_frozen")}
