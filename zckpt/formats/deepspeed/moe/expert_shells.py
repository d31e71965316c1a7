"""The files of experts of a target: one for each expert of each layer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from ....core.layout import Shell
from ....files.torchshell import Storages, shell
from ...deepspeed_states.experts import expert_name
from ...deepspeed_states.model_files import module_weights
from ...deepspeed_states.target import DeepSpeedTarget
from .expert_files import file_name


def expert_files(target: DeepSpeedTarget) -> Iterator[Shell]:
    """One file for each expert of each layer of the target."""
    members = _members(target)
    for number, layer in enumerate(target.experts.layers.values()):
        for expert in range(layer.experts):
            names = members.get((layer.name, expert), ())
            storages = Storages()
            weights = module_weights(target, True, storages, names)
            value = OrderedDict(
                (name, weights[owner])
                for name in names
                if (owner := target.aliases.get(name, name)) in weights
            )
            name = file_name(number, expert, target.mp_rank)
            yield shell(f"{target.tag}/{name}", value, storages)


def _members(target: DeepSpeedTarget) -> dict[tuple[str, int], list[str]]:
    """The names of each expert's tensors, in the order of its module, by layer and number."""
    source = target.source
    names = source.state.get("module") or [
        *source.parameters, *source.buffers, *target.aliases
    ]  # fmt: skip
    members: dict[tuple[str, int], list[str]] = {}
    for name in names:
        parts = expert_name(name)
        if parts is not None:
            members.setdefault((parts.layer, parts.number), []).append(name)
    return members
