"""How the stages of a pipeline with experts become one model: names are global.

Each stage with experts keeps its module in its own model file, as a run without a pipeline does.
There are no files of layers (DeepSpeed 0.19.8, engine.py `_save_moe_checkpoint`). Files of experts
count the layers of their stage alone:

    layer_0_expert_3_mp_rank_00_model_states.pt     1.moe of stage 0
    layer_0_expert_3_mp_rank_01_model_states.pt     4.moe of stage 1
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from ....core.facts import FlatBufferEngine
from ....core.manifest import Entry, Manifest, Parameter
from ....errors import InconsistentCheckpoint
from ...deepspeed_states.experts import ExpertLayers
from ..model_ranks.together import common, joined_groups, with_agreed_steps


def joined_stages_with_experts(stages: Sequence[Manifest], step_policy: str | None) -> Manifest:
    """The whole model of one tensor rank, from its stages.

    Raises InconsistentCheckpoint if stages contradict each other in a tied layer.
    """
    stages, groups = joined_groups(stages)
    parameters = _parameters(stages)
    entries: dict[str, Entry] = {}
    copies: list[Entry] = []
    for number, stage in enumerate(stages):
        for entry in stage.entries.values():
            if entry.slot == "state" and number:
                continue  # `common` has these
            first = entries.setdefault(entry.name, entry)
            if (first.dtype, first.shape) != (entry.dtype, entry.shape):
                raise InconsistentCheckpoint(
                    f"{stage.root}: the copies of {entry.name} have other types or shapes"
                )
            if first is not entry:
                copies.append(entry)
    together = common(stages)
    layers = {layer.name: layer for m in stages for layer in ExpertLayers.of_manifest(m).listed}
    engine = stages[0].engine
    assert isinstance(engine, FlatBufferEngine)
    module = dict.fromkeys(name for stage in stages for name in stage.state["module"])
    buffers = dict.fromkeys(name for stage in stages for name in stage.buffers)
    manifest = replace(
        stages[0],
        source={**stages[0].source, "ep": max(stage.source["ep"] for stage in stages)},
        entries=entries,
        parameters=parameters,
        buffers=tuple(buffers),
        groups=groups,
        engine=replace(engine, experts=tuple(layers.values())),
        state={**stages[0].state, "module": list(module)},
        replicas=(*together.replicas, *copies, *(e for stage in stages for e in stage.replicas)),
        files=together.files,
        records=together.records,
        steps=together.steps,
        of_ranks=together.of_ranks,
        layout=together.layout,
        left_out=together.left_out,
        warnings=together.warnings,
        inferred=together.inferred,
        unread=together.unread,
    )
    return with_agreed_steps(manifest, step_policy)


def _parameters(stages: Sequence[Manifest]) -> dict[str, Parameter]:
    """All parameters: the trained ones by group, then the frozen ones."""
    parameters: dict[str, Parameter] = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.parameters.items():
            first = parameters.setdefault(name, parameter)
            if (first.shape, first.group) != (parameter.shape, parameter.group):
                raise InconsistentCheckpoint(
                    f"{stage.root}: {name} has the shape {list(first.shape)} in one stage of the "
                    f"pipeline, and {list(parameter.shape)} in stage {number}, or another group"
                )
    last = max((each.group or 0 for each in parameters.values()), default=0) + 1
    return dict(
        sorted(
            parameters.items(),
            key=lambda item: (item[1].group or 0) if item[1].trainable else last,
        )
    )
