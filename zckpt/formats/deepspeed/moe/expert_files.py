"""The files of experts: one for each expert of each layer, with its 16-bit weights and buffers.

    layer_M_expert_N_mp_rank_00_model_states.pt     M counts the layers, N the experts of the layer

The keys are names in the whole model, with the number N. Each model rank counts its own layers; its
number stands last. The model file lists how many experts each layer has (`num_experts`).
DeepSpeed 0.19.8, engine.py `_save_moe_checkpoint`.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from msgspec import Struct

from ....core.facts import ExpertLayer
from ....core.grouping import by_key
from ....core.layout import Shell
from ....errors import CorruptCheckpoint, InconsistentCheckpoint, listed
from ....files.torchfile import Tensor, TorchFile
from ....files.torchshell import Storages, shell
from ...deepspeed_states.directories import refuse
from ...deepspeed_states.experts import expert_name
from ...deepspeed_states.model_files import module_weights
from ...deepspeed_states.states import EngineStates, dictionary, open_files
from ...deepspeed_states.target import DeepSpeedTarget
from ..files import MOST, RankFiles, lacking
from .auto_ep import ROUTER

SWAPPED = "files of experts seem to be swapped"


def file_name(layer: int, expert: int, mp_rank: str) -> str:
    """The name of an expert's file."""
    return f"layer_{layer}_expert_{expert}_{mp_rank}_model_states.pt"


class LayerFiles(Struct, frozen=True):
    """The opened files of all experts of one layer, whose name all keys begin with.

    Each has tensors by their names in the whole model.
    """

    name: str
    files: Sequence[TorchFile]


def layers_of(ranks: EngineStates, files: RankFiles) -> list[LayerFiles]:
    """The files of all layers, in the engine's order.

    Raises IncompleteCheckpoint (a file is missing) and InconsistentCheckpoint (a file too many, or
    one with another expert than its name says, or one of another shape).
    """
    directory, counts = ranks.directory.path, ranks.model.get("num_experts")
    if not isinstance(counts, list):
        refuse(ranks.directory, "mixture-of-experts layers of an old release")
    paths = files.experts
    if not all(type(count) is int and count > 0 for count in counts):
        raise CorruptCheckpoint(f"{directory}: the model states list {counts!r} experts by layer")
    # a damaged number may be huge: only the first missing files are listed
    missing = list(islice((place for place in _places(counts) if place not in paths), MOST))
    if missing:
        mp_rank = f"mp_rank_{files.number:02d}"
        raise lacking(ranks.directory, [file_name(*place, mp_rank) for place in missing])
    wanted = list(_places(counts))
    if surplus := sorted(paths.keys() - set(wanted)):
        raise InconsistentCheckpoint(
            f"{paths[surplus[0]]} is one file too many: the model states list "
            f"{listed([*map(str, counts)])} experts by layer",
            hint="files of another save may lie between them; keep those of one save",
        )
    opened = iter(open_files([paths[place] for place in wanted], files.parsed))
    layers = [_layer(list(islice(opened, count))) for count in counts]
    module = {name: place for place, name in enumerate(ranks.model["module"])}
    last = -1
    for layer in layers:  # which the engine numbers in the module's order
        before, last = last, module.get(gate_of(layer), -1)
        if last <= before:
            raise InconsistentCheckpoint(
                f"{layer.files[0].path} has an expert of {layer.name}, which is not the next layer "
                f"of experts in {ranks.models[0].path}",
                hint=f"{SWAPPED}, or of another save; copy all files again",
            )
    return layers


def _places(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The numbers of all experts: of the layer, and in the layer."""
    return ((layer, number) for layer, count in enumerate(counts) for number in range(count))


def _layer(files: Sequence[TorchFile]) -> LayerFiles:
    """The files of one layer, each of which has the tensors of its own expert, and all alike."""
    layer, first = "", list[object]()
    for number, file in enumerate(files):
        forms = list[object]()
        for key, tensor in dictionary(file, file.value).items():
            name = expert_name(key) if isinstance(key, str) else None
            if name is None or not isinstance(tensor, Tensor):
                raise CorruptCheckpoint(f"{file.path} is not a file of one expert: it has {key!r}")
            layer = layer or name.layer
            if (name.layer, name.number) != (layer, number):
                raise InconsistentCheckpoint(
                    f"{file.path} holds expert {name.number} of {name.layer}, in the place of "
                    f"expert {number} of {layer}",
                    hint=f"{SWAPPED}; copy all files again",
                )
            forms.append((name.inner, tensor.dtype, tensor.shape))
        first = first or forms
        if forms != first or not forms:
            raise InconsistentCheckpoint(
                f"{file.path} holds other tensors than {os.path.basename(files[0].path)}",
                hint=f"all experts of {layer} have tensors of the same names and shapes",
            )
    return LayerFiles(layer, files)


# -- the files of a target


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
    named = ((name, expert_name(name)) for name in target.module_names)
    return by_key(((parts.layer, parts.number), name) for name, parts in named if parts)


# -- over how many ranks each layer is spread, and the order of layers


GATE = ".deepspeed_moe.gate.wg.weight"


def gate_of(layer: LayerFiles) -> str:
    """What stands before the experts in the module of a layer."""
    parts = expert_name(next(iter(layer.files[0].value)))
    return layer.name + (ROUTER if parts is not None and parts.is_slice else GATE)


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
    parts = [part for part in map(expert_name, named) if part and part.layer == layer.name]
    local, experts = len({part.number for part in parts}), len(layer.files)
    if not local:
        refuse(ranks.directory, f"experts of {layer.name}, none of which is trained")
    if {part.number for part in parts} != set(range(local)) or experts % local:
        raise InconsistentCheckpoint(
            f"{ranks.directory.path}: rank 0 has {local} of the {experts} experts of {layer.name}, "
            "which is no equal share",
            hint="model and expert files of different saves seem to be mixed",
        )
    return shared(ranks, layer, experts // local)


def shared(ranks: EngineStates, layer: LayerFiles, ep: int) -> ExpertLayer:
    """A layer over `ep` ranks; raises InconsistentCheckpoint unless these can share it."""
    experts = len(layer.files)
    if ranks.dp % ep or experts % ep:
        raise InconsistentCheckpoint(
            f"{ranks.directory.path}: {ranks.dp} ranks cannot share the {experts} experts of "
            f"{layer.name} by an expert-parallel size of {ep}",
            hint="model and optimizer files of different saves seem to be mixed",
        )
    return ExpertLayer(layer.name, experts, ep)
