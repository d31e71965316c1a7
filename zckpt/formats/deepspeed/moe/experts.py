"""Reads and writes experts: their own files, flat buffers, and names in the full model.

    layer_M_expert_N_mp_rank_00_model_states.pt     M counts the layers, N the experts of the layer

Each file has the 16-bit weights and buffers of one expert, by their names in the full model, which
contain the number N. M counts the layers of experts of one model rank. The model file lists the
number of experts of each layer (`num_experts`), and rank 0's parameters, with its experts numbered
from 0. Other ep ranks have their own experts under the same names. So a param group of experts has
one flat buffer per ep rank, and each buffer is cut over the ranks with the same experts:

    dp 4, ep 2         rank 0     rank 1     rank 2     rank 3
    dense group          1/4        2/4        3/4        4/4
    experts 0, 1         1/2                   2/2
    experts 2, 3                    1/2                   2/2

DeepSpeed 0.19.8, engine.py `_save_moe_checkpoint`, stage_1_and_2.py `_configure_moe_settings`.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, pairwise
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ....core.checkpoint import agreement
from ....core.checkpoint.facts import ExpertLayer, FlatBufferEngine
from ....core.checkpoint.manifest import Manifest
from ....core.comparison.masters import begins_as
from ....core.grouping import by_key
from ....core.passes.layout import Shell
from ....core.ranks.merge import in_order
from ....core.storage.inventory import gaps, refuse_gaps
from ....errors import (
    CorruptCheckpoint,
    InconsistentCheckpoint,
    UnsupportedCheckpoint,
    listed,
    warning,
)
from ....files.torchfile import Tensor, TorchFile
from ....files.torchshell import Storages, shell
from ...deepspeed_states.directories import EXPERT, refuse
from ...deepspeed_states.experts import ExpertLayers, ExpertRanks, expert_name, size_in
from ...deepspeed_states.manifest import manifest_of
from ...deepspeed_states.model_files import module_weights
from ...deepspeed_states.states import (
    EngineStates,
    FlatBuffer,
    ParameterShapes,
    dictionary,
    open_files,
)
from ...deepspeed_states.target import DeepSpeedTarget
from ...deepspeed_states.tensors import ManifestTensors
from ..files import RankFiles
from ..flats import flat_buffers
from .auto_ep import ROUTER, with_slices

UNKNOWN = (
    "mixture-of-experts layers whose experts no file assigns to ranks (of the ds_config, only the "
    "file name was saved)"
)
ELEMENTS = 64  # compared elements of a parameter
PARAMETERS = 8  # compared parameters of a flat buffer
GATE = ".deepspeed_moe.gate.wg.weight"
SWAPPED = "files of experts seem to be swapped"
MIXED = "model and optimizer files of different saves seem to be mixed"


def file_name(layer: int, expert: int, mp_rank: str) -> str:
    return f"layer_{layer}_expert_{expert}_{mp_rank}_model_states.pt"


class LayerFiles(Struct, frozen=True):
    """The opened files of all experts of one layer, in the order of the experts.

    `name` is the layer's name, with which the names of all its tensors begin. Each file contains
    the tensors of one expert, under their names in the full model.
    """

    name: str
    files: Sequence[TorchFile]

    @property
    def gate(self) -> str:
        """The name of the weight of the layer's gate (AutoEP: router).

        In the module's order, this weight comes directly before the experts.
        """
        parts = expert_name(next(iter(self.files[0].value)))
        return self.name + (ROUTER if parts is not None and parts.is_slice else GATE)


def files_by_layer(ranks: EngineStates, files: RankFiles) -> list[LayerFiles]:
    """The opened files of experts, one `LayerFiles` per layer, in the engine's order.

    Raises IncompleteCheckpoint (a file is missing) and InconsistentCheckpoint (an extra file, a
    file with another expert than its name states, or a file with other shapes).
    """
    path, counts, paths = ranks.directory.path, ranks.model.get("num_experts"), files.experts
    if not isinstance(counts, list):
        refuse(ranks.directory, "mixture-of-experts layers of an old release")
    if not all(type(count) is int and count > 0 for count in counts):
        raise CorruptCheckpoint(
            "file-damaged",
            f"{path}: num_experts in the model file must be a list of positive numbers, but it is "
            f"{counts!r}",
            file=path,
        )
    number = files.number
    wanted = ((layer, own, number) for layer, count in enumerate(counts) for own in range(count))
    there = {(*place, number): own for place, own in paths.items()}
    example = os.path.join(path, file_name(0, 0, f"mp_rank_{number:02d}"))
    refuse_gaps(path, gaps(EXPERT, there, wanted, example))
    places = sorted(paths)
    if surplus := [(n, e) for n, e in places if n >= len(counts) or e >= counts[n]]:
        raise InconsistentCheckpoint(
            "mixed-saves",
            f"{paths[surplus[0]]} is one file too many: the model file states the number of "
            f"experts in each layer of experts: {listed(counts)}",
            hint="files of another save may be among them: keep only the files of one save",
        )
    opened = iter(open_files([paths[place] for place in places], files.parsed))
    layers = [_layer(list(islice(opened, count))) for count in counts]
    module = {name: place for place, name in enumerate(ranks.module)}
    gates = [-1, *(module.get(layer.gate, -1) for layer in layers)]
    for layer, (before, gate) in zip(layers, pairwise(gates), strict=True):
        if gate <= before:  # the engine numbers layers in the module's order
            raise InconsistentCheckpoint(
                "swapped-files",
                f"{layer.files[0].path} has an expert of {layer.name}, but in "
                f"{ranks.models[0].path} this file's layer number belongs to another layer",
                hint=f"{SWAPPED}, or of another save; copy all files again",
                file=layer.files[0].path,
                subject=layer.name,
            )
    return layers


def _layer(files: Sequence[TorchFile]) -> LayerFiles:
    """The files of one layer of experts.

    Raises unless each file has the tensors of the expert in its name, and all files have tensors of
    the same names, types and shapes.
    """
    layer, first = "", list[object]()
    for number, file in enumerate(files):
        forms: list[object] = []
        for key, tensor in dictionary(file, file.value).items():
            name = expert_name(key) if isinstance(key, str) else None
            if name is not None and name.inner.endswith("_extra_state"):
                raise UnsupportedCheckpoint(
                    "state-unsupported",
                    f"{file.path} has {key!r}: zckpt does not read extra states of experts "
                    "(get_extra_state)",
                    file=file.path,
                )
            if name is None or not isinstance(tensor, Tensor):
                raise CorruptCheckpoint(
                    "file-damaged",
                    f"{file.path} is not a file of one expert: it has {key!r}",
                    file=file.path,
                )
            layer = layer or name.layer
            if (name.layer, name.number) != (layer, number):
                raise InconsistentCheckpoint(
                    "swapped-files",
                    f"{file.path} holds expert {name.number} of {name.layer}, but its name is that "
                    f"of expert {number} of {layer}",
                    hint=f"{SWAPPED}; copy all files again",
                    file=file.path,
                )
            forms.append((name.inner, tensor.dtype, tensor.shape))
        first = first or forms
        if forms != first or not forms:
            raise InconsistentCheckpoint(
                "ranks-disagree",
                f"{file.path} holds other tensors than {os.path.basename(files[0].path)}",
                hint=f"all experts of {layer} must have tensors of the same names and shapes",
                file=file.path,
            )
    return LayerFiles(layer, files)


def named_of(ranks: EngineStates) -> tuple[str, ...]:
    """All names in rank 0's files: parameters, frozen parameters and buffers.

    Rank 0's experts are numbered from 0.
    """
    return tuple(chain(*ranks.param_shapes(), ranks.frozen_shapes or (), ranks.buffer_names))


def spread_over(
    ranks: EngineStates, files: Sequence[LayerFiles], named: Iterable[str], ep: int | None = None
) -> ExpertLayers:
    """Finds the expert-parallel size of each layer: over how many ranks its experts are spread.

    The size is `ep`. If `ep` is None, it is a layer's number of experts divided by rank 0's, which
    are counted in `named`, rank 0's tensor names. Raises InconsistentCheckpoint (ranks cannot share
    the experts evenly) and UnsupportedCheckpoint (`named` lacks a layer).
    """
    path, layers = ranks.directory.path, dict[str, ExpertLayer]()
    numbers = by_key((part.layer, part.number) for part in map(expert_name, named) if part)
    for layer in files:
        experts, numbers_on_rank_0 = len(layer.files), {*numbers.get(layer.name, ())}
        if ep is None and not numbers_on_rank_0:
            refuse(ranks.directory, f"experts of {layer.name} that are all frozen")
        if ep is None and (
            numbers_on_rank_0 != set(range(len(numbers_on_rank_0)))
            or experts % len(numbers_on_rank_0)
        ):
            raise InconsistentCheckpoint(
                "mixed-saves",
                f"{path}: rank 0 has {len(numbers_on_rank_0)} of the {experts} experts of "
                f"{layer.name}, which is not an equal share",
                hint="model and expert files of different saves seem to be mixed",
                file=path,
                subject=layer.name,
            )
        size = ep or experts // len(numbers_on_rank_0)
        if ranks.dp % size or experts % size:
            raise InconsistentCheckpoint(
                "mixed-saves",
                f"{path}: {ranks.dp} ranks cannot share the {experts} experts of {layer.name} by "
                f"an expert-parallel size of {size}",
                hint=MIXED,
                file=path,
                subject=layer.name,
            )
        layers[layer.name] = ExpertLayer(layer.name, experts, size)
    return ExpertLayers(layers)


def with_tensors(
    ranks: EngineStates, files: Sequence[LayerFiles], layers: ExpertLayers
) -> EngineStates:
    """Adds the tensors in the experts' files to the module, directly after their layer's gate.

    Also adds the experts of other ranks to the names of buffers and of tied weights: the model file
    has only rank 0's.
    """
    behind = {layer.gate: layer for layer in files}
    module: dict[str, Any] = {}
    apart: dict[str, TorchFile] = {}
    for name, tensor in ranks.module.items():
        module[name] = tensor
        for file in behind[name].files if name in behind else ():
            module |= file.value
            apart |= dict.fromkeys(file.value, file)
    shared: dict[str, str] = {}
    for pair in ranks.second_names.items():
        alias, owner = map(layers.layer_of, pair)
        every = (layers.everywhere([name]) if alias == owner else [name] for name in pair)
        shared |= zip(*every, strict=True)
    buffers = layers.everywhere(ranks.buffer_names)
    overrides = replace(ranks.overrides, module=module, buffer_names=buffers, second_names=shared)
    return replace(ranks, overrides=overrides, apart=apart)


class Experts(Struct, frozen=True):
    """The experts of one model rank: their files, their layers, and the data ranks that have them.

    ranks    the opened files as saved, with rank 0's experts
    whole    the same files, with the tensors of all experts
    layers   each layer of experts, with its expert-parallel size
    places   which data rank has which experts
    """

    ranks: EngineStates
    whole: EngineStates
    layers: ExpertLayers
    places: ExpertRanks

    def sharing(
        self, group: int, shapes: ParameterShapes
    ) -> list[tuple[EngineStates, ParameterShapes]]:
        """The flat buffers of a param group: one for a dense group, one per ep rank for experts.

        `shapes` are rank 0's parameters of the group `group`. Returns pairs: the opened files of
        the ranks that share a buffer, and its parameters by their names in the full model. Raises
        InconsistentCheckpoint if the files contradict each other.
        """
        layers = [self.layers.layer_of(name) for name in shapes]
        eps = {1 if layer is None else layer.ep for layer in layers}
        ep, ranks, group_on_rank_0 = max(eps, default=1), self.ranks, self.ranks.groups(group)[0]
        counts = ranks.first.get("partition_count")
        count = counts[group] if isinstance(counts, list) and group < len(counts) else None
        is_named = (
            not (any(layers) and group_on_rank_0.get("moe")) or size_in(group_on_rank_0) == ep
        )
        if len(eps) > 1 or count not in (None, ranks.dp // ep) or not is_named:
            raise InconsistentCheckpoint(
                "mixed-saves",
                f"{ranks.directory.path}: param group {group} is named "
                f"{group_on_rank_0.get('name')!r} and is cut over {count} of {ranks.dp} ranks, but "
                f"its parameters have the expert-parallel size {listed(sorted(eps))}",
                hint=MIXED,
                file=ranks.directory.path,
            )
        if ep == 1:
            return [(ranks, shapes)]
        shared: list[tuple[EngineStates, ParameterShapes]] = []
        for ep_rank in range(ep):
            numbers = self.places.alike(ep_rank, ep)
            sharers = replace(
                ranks,
                optimizers=[ranks.optimizers[number] for number in numbers],
                states=[ranks.states[number] for number in numbers],
                bases=[ranks.bases[number] for number in numbers],
                dp=len(numbers),
                numbers=tuple(numbers),
                everyone=ranks,
            )
            named = {self.layers.global_name(name, ep_rank): shapes[name] for name in shapes}
            shared.append((sharers, named))
        return shared

    @property
    def fit(self) -> bool:
        """Whether the experts' masters round to the experts' weights: a test of `places`.

        `places` is an assumption about which rank has which experts. False means that the
        assumption is wrong. Only the first masters in each flat buffer of experts are compared.
        """
        tensors, names = ManifestTensors(self.whole), list[str]()
        try:
            for buffer in flat_buffers(self.ranks, "max", self.sharing):
                tensors.add_trainable(buffer)
                of_experts = (name for name in buffer.shapes if name in self.whole.apart)
                names += islice(of_experts, PARAMETERS)
        except InconsistentCheckpoint:  # the partitions have other lengths
            return False
        entries = tensors.entries
        pairs = ((entries[name, "param"], entries[name, "master"]) for name in names)
        return all(begins_as(weight, m, min(ELEMENTS, m.numel)) for weight, m in pairs)

    def complete(self, manifest: Manifest) -> Manifest:
        """Adds the layers of experts to the manifest, and sorts its parameters.

        Raises InconsistentCheckpoint if an expert's weight is in no file. For any other missing
        weight, the master is used, with a warning.
        """
        unsaved = [name for name in manifest.parameters if (name, "param") not in manifest.entries]
        if lost := [name for name in unsaved if not self.layers.is_dense(name)]:
            raise InconsistentCheckpoint(
                "mixed-saves",
                f"{self.ranks.directory.path}: the optimizer has {listed(lost, 3)}, but the files "
                "of the experts do not",
                hint="files of different saves seem to be mixed",
                file=self.ranks.directory.path,
            )
        warnings = manifest.notices.warnings
        if unsaved:  # such as the MLP of a residual MoE layer whose name contains `expert`
            # 0.19.8, `_get_non_moe_state_dict` drops all names with `expert` below MoE layers,
            # except gates; only those below `deepspeed_experts` are saved separately
            message = (
                f"DeepSpeed did not save the weights {listed(unsaved, 4)}, because the name of "
                "their MoE layer contains `expert`: their masters are used instead"
            )
            warnings += (warning("engine-fault", message, subject=unsaved[0]),)
        module = [*self.whole.module, *unsaved]
        assert isinstance(manifest.run.engine, FlatBufferEngine)
        manifest = manifest.replace(
            warnings=warnings,
            origin=replace(manifest.run.origin, ep=max(self.layers.sizes)),
            parameters={name: manifest.parameters[name] for name in self._names_in_order(manifest)},
            engine=replace(manifest.run.engine, experts=self.layers.listed),
            state={**manifest.state, "module": list(dict.fromkeys(module))},
        )
        return in_order(manifest)

    def _names_in_order(self, manifest: Manifest) -> list[str]:
        """All parameters of the full model, group by group, in the order of the flat buffers.

        The experts of all ranks stand where rank 0's experts are in the group. Frozen parameters
        come last.
        """
        groups = by_key(
            (about.group if about.trainable else None, name)
            for name, about in manifest.parameters.items()
        )
        frozen = {*groups.pop(None, [])}
        module = [name for name in self.whole.module if name in frozen]
        locals_of = [[*filter(self.layers.is_on_first, names)] for names in groups.values()]
        trained = chain.from_iterable(map(self.layers.everywhere, locals_of))
        return [*trained, *sorted(module, key=lambda name: not self.layers.is_dense(name))]


def with_experts(ranks: EngineStates, rank_files: RankFiles, step_policy: str | None) -> Manifest:
    """Reads one model rank of a run with experts; returns its manifest.

    If ranks state different steps, `step_policy` chooses one: "max", "min" or a number such as "7".
    Raises UnsupportedCheckpoint (in stage 3, for example, or if nothing assigns experts to ranks),
    IncompleteCheckpoint and InconsistentCheckpoint.
    """
    ranks = with_slices(ranks)
    if ranks.partitioned or ranks.elastic:
        refuse(ranks.directory, "mixture-of-experts layers in stage 3 or in elastic files")
    if _are_spread_over_tensor_ranks(ranks):
        refuse(
            ranks.directory,
            "mixture-of-experts layers whose experts are spread over tensor ranks",
            "build the MoE layers with enable_expert_tensor_parallelism=True: then each tensor "
            "rank has a slice of every expert, which zckpt reads",
        )
    files = files_by_layer(ranks, rank_files)
    layers = spread_over(ranks, files, named_of(ranks))
    whole = with_tensors(ranks, files, layers)
    experts = Experts(ranks, whole, layers, _places(ranks, whole, layers))
    config = ranks.effective_config(ranks.round_robin)
    if experts.places.data_first:  # a ds_config that is saved by its name does not state it
        config = {**config, "use_data_before_expert_parallelism": True}
    buffers = _with_one_step([*flat_buffers(ranks, step_policy, experts.sharing)], step_policy)
    manifest = manifest_of(whole, buffers, "deepspeed", config, whole.module_dtype)
    # stages 1 and 2 pad with zeros
    return experts.complete(manifest).replace(zero_padding=True)


def _places(ranks: EngineStates, whole: EngineStates, layers: ExpertLayers) -> ExpertRanks:
    """Finds which rank has which experts: from the ds_config, or by comparing bytes.

    Raises UnsupportedCheckpoint if nothing shows the ranks, InconsistentCheckpoint if masters do
    not round to the experts' weights.
    """
    if ranks.config_path is None or all(ep in (1, ranks.dp) for ep in layers.sizes):
        return ExpertRanks.of_config(ranks.dp, ranks.config)
    # the run saved only the file name of its ds_config
    every = ([*names] for names in ranks.param_shapes())
    are_regular = all(layers.is_regular(layers.everywhere(names)) for names in every)
    if not are_regular and not ranks.round_robin:  # perhaps round robin: nothing shows it
        refuse(ranks.directory, UNKNOWN)
    # no file states `use_data_before_expert_parallelism`: try both values
    orders = [ExpertRanks(ranks.dp, data_first) for data_first in (False, True)]
    fitting = [order for order in orders if Experts(ranks, whole, layers, order).fit]
    if not fitting:
        raise InconsistentCheckpoint(
            "mixed-saves",
            f"{ranks.directory.path}: the ranks' masters do not round to the experts' weights",
            hint="files of different saves seem to be mixed; copy all files again",
            file=ranks.directory.path,
        )
    if len(fitting) > 1:
        refuse(ranks.directory, UNKNOWN)
    return fitting[0]


def _are_spread_over_tensor_ranks(ranks: EngineStates) -> bool:
    """Whether tensor ranks have different experts, not slices of the same experts."""
    counts = ranks.first.get("partition_count")
    sizes = (
        (count, size_in(ranks.groups(number)[0]))
        for number, count in enumerate(counts if isinstance(counts, list) else ())
    )
    # without `enable_expert_tensor_parallelism`, a group's experts are cut over more ranks than
    # there are data ranks
    is_over = any(ep and isinstance(count, int) and count * ep > ranks.dp for count, ep in sizes)
    return is_over and int(ranks.model.get("mp_world_size") or 1) > 1


def _with_one_step(buffers: Sequence[FlatBuffer], policy: str | None) -> list[FlatBuffer]:
    """Makes all flat buffers of a param group, one per ep rank, have the same step.

    Raises if their steps differ, and `policy` does not choose one.
    """
    steps_by_group = by_key(
        (buffer.group, (f"flat group {buffer.group}, {next(iter(buffer.shapes))}", buffer.step))
        for buffer in buffers
        if buffer.step is not None and buffer.shapes
    )
    of_group = {group: agreement.agree(own, policy) for group, own in steps_by_group.items()}
    return [replace(buffer, step=of_group.get(buffer.group)) for buffer in buffers]


def expert_files(target: DeepSpeedTarget) -> Iterator[Shell]:
    """Yields the shell (the file without tensors' bytes) of each expert's file."""
    named = ((name, expert_name(name)) for name in target.module_names)
    members = by_key(((parts.layer, parts.number), name) for name, parts in named if parts)
    for number, layer in enumerate(target.experts.listed):
        for expert in range(layer.experts):
            names, storages = members.get((layer.name, expert), ()), Storages()
            weights = module_weights(target, True, storages, names)
            owners = ((name, target.aliases.get(name, name)) for name in names)
            value = OrderedDict((n, weights[owner]) for n, owner in owners if owner in weights)
            name = file_name(number, expert, target.mp_rank)
            yield shell(f"{target.tag}/{name}", value, storages)
