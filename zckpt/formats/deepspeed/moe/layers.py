"""Over how many ranks is each layer of experts spread, and in which order do layers stand?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ....core.facts import ExpertLayer
from ....errors import InconsistentCheckpoint, listed
from ...deepspeed_states.directories import refuse
from ...deepspeed_states.experts import expert_name
from ...deepspeed_states.states import EngineStates
from .auto_ep import ROUTER
from .expert_files import LayerFiles

GATE = ".deepspeed_moe.gate.wg.weight"


def gate_of(layer: LayerFiles) -> str:
    """What stands before the experts in the module of a layer."""
    parts = expert_name(next(iter(layer.files[0].tensors)))
    return layer.name + (ROUTER if parts is not None and parts.is_slice else GATE)


def check_order(ranks: EngineStates, layers: Sequence[LayerFiles]) -> None:
    """The numbers of layers in names of files, and the module's own order, must agree."""
    behind = {gate_of(layer): layer.name for layer in layers}
    names = [layer.name for layer in layers]
    gates = [behind[key] for key in ranks.model["module"] if key in behind]
    if set(gates) == set(names) and gates != names:
        raise InconsistentCheckpoint(
            f"{ranks.directory.path}: by the names of the expert files the layers are "
            f"{listed(names)}, in the model they are {listed(gates)}",
            hint="expert files of two layers seem to be swapped; copy all files again",
        )


def named_of(ranks: EngineStates) -> tuple[str, ...]:
    """The names on rank 0, by its own numbers, as far as the files list any."""
    return (
        *(name for names in ranks.param_shapes() for name in names),
        *(ranks.model.get("frozen_param_shapes") or ()),
        *(ranks.model.get("buffer_names") or ()),
    )


def spread_over(ranks: EngineStates, layer: LayerFiles, named: Iterable[str]) -> ExpertLayer:
    """Over how many ranks the experts of a layer are spread: by how many rank 0 has.

    `named` are names on rank 0. Raises InconsistentCheckpoint, and UnsupportedCheckpoint if none of
    them is in the layer.
    """
    model = ranks.model
    parts = [part for part in map(expert_name, named) if part and part.layer == layer.name]
    local, experts = len({part.number for part in parts}), len(layer.files)
    if gate_of(layer) not in model["module"]:
        raise InconsistentCheckpoint(
            f"{layer.files[0].file.path} has an expert of {layer.name}, a layer that "
            f"{ranks.models[0].path} does not have",
            hint="expert files of two stages or saves seem to be mixed; copy all files again",
        )
    if not local:
        refuse(ranks.directory, f"experts of {layer.name}, none of which is trained")
    ep = experts // local
    if {part.number for part in parts} != set(range(local)) or ep * local != experts:
        raise InconsistentCheckpoint(
            f"{ranks.directory.path}: rank 0 has {local} of the {experts} experts of {layer.name}, "
            "which is no equal share",
            hint="model and expert files of different saves seem to be mixed",
        )
    check_ranks(ranks, layer.name, ep)
    return ExpertLayer(layer.name, experts, ep)


def check_ranks(ranks: EngineStates, layer: str, ep: int) -> None:
    """Raises InconsistentCheckpoint unless the ranks can share a layer by this size."""
    if ranks.dp % ep:
        raise InconsistentCheckpoint(
            f"{ranks.directory.path}: {ranks.dp} ranks cannot share {layer} by an "
            f"expert-parallel size of {ep}",
            hint="model and optimizer files of different saves seem to be mixed",
        )
