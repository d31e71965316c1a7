"""A model's experts in the files of all ranks: their flat buffers, weights and global names.

The model file lists the parameters of rank 0, whose experts are numbered from 0. These names stand
for the experts of every ep rank. So a flat group of experts is as many flat buffers as there are ep
ranks, and each is cut over the ranks that have the same experts:

    dp 4, ep 2         rank 0     rank 1     rank 2     rank 3
    dense group          1/4        2/4        3/4        4/4
    experts 0, 1         1/2                   2/2
    experts 2, 3                    1/2                   2/2

DeepSpeed 0.19.8, stage_1_and_2.py `_configure_moe_settings`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ....core import agreement
from ....core.facts import FlatBufferEngine
from ....core.grouping import by_key
from ....core.manifest import Entry, Manifest, Parameter
from ....errors import InconsistentCheckpoint, listed
from ....files.torchfile import Tensor, TorchFile
from ...deepspeed_states.directories import refuse
from ...deepspeed_states.experts import ExpertLayers, ExpertRanks, size_in
from ...deepspeed_states.manifest import manifest_of, with_files
from ...deepspeed_states.states import EngineStates, FlatBuffer, ParameterShapes
from ..files import RankFiles
from ..flats import flat_buffers
from .auto_ep import with_slices
from .expert_files import (
    LayerFiles,
    check_order,
    gate_of,
    layers_of,
    named_of,
    places_of,
    spread_over,
)

SPREAD = "mixture-of-experts layers whose experts are spread over tensor ranks"


class Experts(Struct, frozen=True):
    """The experts in the files of all ranks."""

    ranks: EngineStates
    files: Sequence[LayerFiles]
    layers: ExpertLayers
    places: ExpertRanks

    # -- flat buffers

    def sharing(
        self, group: int, shapes: ParameterShapes
    ) -> list[tuple[EngineStates, ParameterShapes]]:
        """The flat buffers of a group: the ranks that share each, and what lies in it.

        Raises InconsistentCheckpoint if the files contradict each other about a group of experts.
        """
        layers = [self.layers.layer_of(name) for name in shapes]
        eps = {1 if layer is None else layer.ep for layer in layers}
        if len(eps) > 1:
            raise InconsistentCheckpoint(
                f"{self.ranks.directory.path}: flat group {group} has parameters that "
                f"{listed([*map(str, sorted(eps))])} expert-parallel ranks share",
                hint="files of different saves seem to be mixed",
            )
        ep = eps.pop() if eps else 1
        self._check_group(group, ep, any(layers))
        if ep == 1:
            return [(self.ranks, shapes)]
        return [
            (
                self._of_ranks(self.places.alike(ep_rank, ep)),
                {self.layers.global_name(name, ep_rank): shapes[name] for name in shapes},
            )
            for ep_rank in range(ep)
        ]

    def _check_group(self, group: int, ep: int, of_experts: bool) -> None:
        """The group's own statements: its name, and over how many ranks it is cut."""
        where = f"{self.ranks.directory.path}: flat group {group}"
        counts = self.ranks.first.get("partition_count")
        count = counts[group] if isinstance(counts, list) and group < len(counts) else None
        if count not in (None, self.ranks.dp // ep):
            raise InconsistentCheckpoint(
                f"{where} is cut over {count} ranks, but {self.ranks.dp} ranks with an "
                f"expert-parallel size of {ep} would cut it over {self.ranks.dp // ep}",
                hint="files of different saves seem to be mixed",
            )
        stated = self.ranks.groups(group)[0]
        name = stated.get("name")
        if of_experts and stated.get("moe") and name != f"ep_size_{ep}":
            raise InconsistentCheckpoint(
                f"{where} is named {name!r}, but the names of its experts show an "
                f"expert-parallel size of {ep}",
                hint="model and optimizer files of different saves seem to be mixed",
            )

    def _of_ranks(self, numbers: Sequence[int]) -> EngineStates:
        """What some of the ranks say, as if they were all."""
        ranks = self.ranks
        return replace(
            ranks,
            optimizers=[ranks.optimizers[number] for number in numbers],
            states=[ranks.states[number] for number in numbers],
            bases=[ranks.bases[number] for number in numbers],
            dp=len(numbers),
            numbers=tuple(numbers),
            everyone=ranks,
        )

    # -- the manifest

    @property
    def module_dtype(self) -> str:
        """The type of the module's trainable weights, if no dense weight shows it."""
        module = {**self._stored, **self.ranks.model["module"]}
        return replace(self.ranks, model={**self.ranks.model, "module": module}).module_dtype

    @property
    def _stored(self) -> dict[str, Tensor]:
        """Every tensor of every expert, by its name in the whole model."""
        return {
            name: tensor
            for layer in self.files
            for item in layer.files
            for name, tensor in item.tensors.items()
        }

    def complete(self, manifest: Manifest) -> Manifest:
        """The manifest with the experts' weights and buffers, and with all experts in order.

        Without them it has the experts' masters and states alone, one ep rank after the other.
        """
        order = self._order(manifest)
        buffers = self._everywhere(self.ranks.model.get("buffer_names") or ())
        known, aliases = set(buffers), self._aliases()
        own = by_key((owner, alias) for alias, owner in aliases.items())
        parameters = {
            name: replace(about, aliases=tuple(own[name])) if name in own else about
            for name, about in ((name, manifest.parameters[name]) for name in order)
        }
        entries: dict[str, Entry] = {}
        replicas = list(manifest.replicas)
        for layer in self.files:
            for item in layer.files:
                for name, tensor in item.tensors.items():
                    owner = aliases.get(name, name)
                    fragments = item.file.fragments(tensor)
                    entry = Entry(f"{owner}/param", tensor.dtype, tensor.shape, fragments)
                    if owner not in parameters and owner not in known:
                        parameters[owner] = Parameter(tensor.shape, trainable=False)
                    _check_shape(item.file, name, tensor, parameters.get(owner))
                    first = entries.setdefault(entry.name, entry)
                    if first is not entry and first.fragments != entry.fragments:
                        replicas.append(entry)
        assert isinstance(manifest.engine, FlatBufferEngine)
        frozen = [name for name, about in parameters.items() if not about.trainable]
        parameters |= {name: parameters.pop(name) for name in frozen}
        self._check_complete(parameters, entries)
        warnings = list(manifest.warnings)
        if unsaved := [n for n in parameters if f"{n}/param" not in manifest.entries | entries]:
            warnings.append(
                f"DeepSpeed did not save the weights of {listed(unsaved, 4)}, as the name of their "
                "MoE layer has `expert` in it: their masters stand for them"
            )
        return replace(
            with_files(manifest, (item.file for layer in self.files for item in layer.files)),
            warnings=tuple(warnings),
            source={**manifest.source, "ep": max(self.layers.sizes)},
            entries=_in_order(parameters, buffers, {**manifest.entries, **entries}),
            parameters=parameters,
            buffers=tuple(buffers),
            replicas=tuple(replicas),
            engine=replace(manifest.engine, experts=self.layers.listed),
            state=self._state(manifest),
        )

    def _order(self, manifest: Manifest) -> list[str]:
        """All parameters, in every group as they lie; experts of all ranks between each other."""
        groups = by_key(
            (about.group if about.trainable else None, name)
            for name, about in manifest.parameters.items()
        )
        frozen = groups.pop(None, [])
        order = []
        for names in groups.values():
            first = [name for name in names if self.layers.is_on_first(name)]
            order += self.layers.everywhere(first)
        return [*order, *frozen]

    def _everywhere(self, names: Sequence[str]) -> list[str]:
        """Names of rank 0, with the same of all other ranks' experts."""
        module = self.ranks.model["module"]
        kept = [
            name
            for name in names
            if self.layers.layer_of(name) is not None or isinstance(module.get(name), Tensor)
        ]
        return self.layers.everywhere(kept)

    def _aliases(self) -> dict[str, str]:
        """Second names of tied weights inside of experts, on all ranks."""
        shared = self.ranks.model.get("shared_params") or {}
        names: dict[str, str] = {}
        for alias, owner in shared.items():
            layer, other = self.layers.layer_of(alias), self.layers.layer_of(owner)
            if layer is not None and layer == other:
                for ep_rank in range(layer.ep):
                    name = self.layers.global_name(alias, ep_rank)
                    names[name] = self.layers.global_name(owner, ep_rank)
        return names

    def _state(self, manifest: Manifest) -> dict[str, Any]:
        """The state, with the experts where they stand in the module."""
        behind = {gate_of(layer): layer for layer in self.files}
        module: list[str] = []
        for name in manifest.state["module"]:
            module.append(name)
            if name in behind:
                module += [key for item in behind[name].files for key in item.tensors]
        known = set(module)
        module += [key for key in self._stored if key not in known]
        return {**manifest.state, "module": [*module, *self._unsaved(manifest, {*module})]}

    def _unsaved(self, manifest: Manifest, module: set[str]) -> list[str]:
        """Trained parameters without a weight in any file.

        DeepSpeed drops what has `expert` in the name of its MoE layer, and saves only what is below
        `deepspeed_experts` apart: not a residual MLP (0.19.8, `_get_non_moe_state_dict`).
        """
        known = {*module, *manifest.owners}
        return [name for name in manifest.parameters if name not in known]

    def _check_complete(
        self, parameters: Mapping[str, Parameter], entries: Mapping[str, Entry]
    ) -> None:
        """Every expert that the optimizer knows must have a weight in its file."""
        lost = [
            name
            for name in parameters
            if self.layers.layer_of(name) is not None and f"{name}/param" not in entries
        ]
        if lost:
            raise InconsistentCheckpoint(
                f"{self.ranks.directory.path}: the optimizer has {listed(lost, 3)}, and the files "
                "of the experts do not",
                hint="files of different saves seem to be mixed",
            )


def open_experts(ranks: EngineStates, rank_files: RankFiles) -> Experts:
    """The experts of a checkpoint.

    Raises UnsupportedCheckpoint (AutoEP, elastic files, experts that are spread over tensor ranks,
    an order of ranks that nothing shows), IncompleteCheckpoint and InconsistentCheckpoint.
    """
    ranks = with_slices(ranks)
    directory, model = ranks.directory, ranks.model
    counts = model.get("num_experts")
    if not isinstance(counts, list):
        refuse(directory, "mixture-of-experts layers of an old release")
    if ranks.partitioned or ranks.elastic:
        refuse(directory, "mixture-of-experts layers in stage 3 or in elastic files")
    if _are_spread_over_tensor_ranks(ranks):
        refuse(
            directory,
            SPREAD,
            "build the MoE layers with enable_expert_tensor_parallelism=True: then each tensor "
            "rank has a slice of every expert, which zckpt reads",
        )
    files = layers_of(ranks, rank_files)
    check_order(ranks, files)
    layers = ExpertLayers(
        {layer.name: spread_over(ranks, layer, named_of(ranks)) for layer in files}
    )
    return Experts(ranks, files, layers, places_of(ranks, files, layers))


def _are_spread_over_tensor_ranks(ranks: EngineStates) -> bool:
    """Whether a group of experts is cut over more ranks than there are data ranks.

    Without `enable_expert_tensor_parallelism` tensor ranks have other experts each.
    """
    counts = ranks.first.get("partition_count")
    for number, count in enumerate(counts if isinstance(counts, list) else ()):
        ep = size_in(ranks.groups(number)[0])
        if ep and isinstance(count, int) and count * ep > ranks.dp:
            return int(ranks.model.get("mp_world_size") or 1) > 1
    return False


def with_experts(ranks: EngineStates, files: RankFiles, step_policy: str | None) -> Manifest:
    """The manifest of one model rank with experts."""
    experts = open_experts(ranks, files)
    config = ranks.effective_config(ranks.round_robin)
    if experts.places.data_first:  # which a ds_config that is saved by its name does not say
        config = {**config, "use_data_before_expert_parallelism": True}
    ranks = experts.ranks
    buffers = list(flat_buffers(ranks, step_policy, experts.sharing))
    buffers = _with_one_step(buffers, step_policy)
    manifest = manifest_of(ranks, buffers, "deepspeed", config, experts.module_dtype)
    # stages 1 and 2 fill up with zeros
    return replace(experts.complete(manifest), zero_padding=not ranks.partitioned)


def _with_one_step(buffers: Sequence[FlatBuffer], policy: str | None) -> list[FlatBuffer]:
    """The flat buffers of all ep ranks, whose groups have one step each; raises if they differ."""
    of_group = {
        group: agreement.agree(
            [
                (f"flat group {group}, {next(iter(other.shapes))}", other.step)
                for other in same
                if other.step is not None and other.shapes
            ],
            policy,
        )
        for group, same in by_key((buffer.group, buffer) for buffer in buffers).items()
    }
    return [replace(buffer, step=of_group[buffer.group]) for buffer in buffers]


def _check_shape(file: TorchFile, name: str, tensor: Tensor, parameter: Parameter | None) -> None:
    if parameter is not None and parameter.shape != tensor.shape:
        raise InconsistentCheckpoint(
            f"{file.path}: {name} has shape {tensor.shape}, and {parameter.shape} where shapes are "
            "listed"
        )


def _in_order(
    parameters: Mapping[str, Parameter], buffers: Sequence[str], entries: Mapping[str, Entry]
) -> dict[str, Entry]:
    """Entries in the order of their parameters, weights first; then buffers, then all others."""
    own = by_key(
        ("" if entry.slot == "state" else entry.parameter, entry) for entry in entries.values()
    )
    others = own.pop("", [])
    ordered = [
        entry
        for name in (*parameters, *buffers)
        for entry in sorted(own.get(name, ()), key=lambda entry: entry.slot != "param")
    ]
    return {entry.name: entry for entry in (*ordered, *others)}
