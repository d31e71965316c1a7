"""The layers of experts that the names of a source show, if it does not state them.

State dicts of a whole model, such as those that zckpt wrote from a DeepSpeed run, have all experts
by their numbers. The groups of their optimizer still have DeepSpeed's names:

    sparse.deepspeed_moe.experts.deepspeed_experts.3.out.bias      expert 3 of layer `sparse`
    {"name": "ep_size_2", "moe": True, ...}                        two ranks share each layer
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec.structs import replace

from ....core.facts import ExpertLayer, StateDictEngine
from ....core.manifest import Manifest
from ....errors import InconsistentCheckpoint, MissingData, listed
from ...deepspeed_states.experts import expert_name

EP_SIZE = re.compile(r"ep_size_(\d+)")


def with_named_layers(source: Manifest, strangers: Sequence[str]) -> Manifest:
    """A manifest that states its layers; `strangers` are experts' tensors of unknown layers.

    Raises InconsistentCheckpoint (experts are missing) and MissingData (the engine cannot be one
    whose names show layers; or the optimizer has no groups of experts).
    """
    engine = source.engine
    if not isinstance(engine, StateDictEngine):
        raise MissingData(
            f"{source.root} has experts ({listed(strangers, 1)}) and does not state their layers",
            hint="take the DeepSpeed run, or the universal checkpoint that was made of it",
        )
    sizes = _sizes(source)
    numbers: dict[str, set[int]] = {}
    for name in (*(source.state.get("module") or ()), *source.parameters):
        if parts := expert_name(name):
            numbers.setdefault(parts.layer, set()).add(parts.number)
    layers = []
    for layer, known in numbers.items():
        missing = sorted(set(range(max(known) + 1)) - known)
        if missing:
            raise InconsistentCheckpoint(
                f"{source.root} has expert {max(known)} of {layer}, but not expert {missing[0]}"
            )
        layers.append(ExpertLayer(layer, len(known), sizes.get(layer, 1)))
    return replace(source, engine=replace(engine, experts=tuple(layers)))


def _sizes(source: Manifest) -> dict[str, int]:
    """The expert-parallel size of each layer, by the names of the optimizer's groups."""
    sizes: dict[str, int] = {}
    for name, parameter in source.parameters.items():
        if not parameter.trainable or source.groups is None:
            continue
        number = parameter.group or 0
        group, parts = source.groups[number], expert_name(name)
        match = EP_SIZE.fullmatch(str(group.get("name"))) if group.get("moe") else None
        if (parts is None) != (match is None):
            raise MissingData(
                f"{source.root}: {name} is in group {number}, and DeepSpeed needs groups of "
                "experts alone, which it names ep_size_N",
                hint="take the DeepSpeed run, or a checkpoint that zckpt made of it",
            )
        if parts is not None and match is not None:
            size = int(match[1])
            if sizes.setdefault(parts.layer, size) != size:
                raise InconsistentCheckpoint(
                    f"{source.root} has parameters of {parts.layer} in groups of the "
                    f"expert-parallel sizes {sizes[parts.layer]} and {size}"
                )
    return sizes
