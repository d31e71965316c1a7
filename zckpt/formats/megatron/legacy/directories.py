"""Reads the older kind of Megatron's directories: one folder for each model-parallel rank.

    mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt    model, groups, arguments, counters of one rank
    mp_rank_TT[_PPP][_EEE]/distrib_optim.pt      the flat buffers of the distributed optimizer

A rank of an interleaved pipeline has several model chunks, `model0`, `model1`, ... The model's
layers are first those in the first chunks of all stages, then those in the second chunks, and so
on. Every chunk numbers its layers from 0, and every rank has its own slices of tensors. The order
of a state dict is the order of the parameters, so no rule about the architecture is needed to find
them.

Experts that are spread over ranks (EEE) are numbered from 0 on every rank, and have a separate
optimizer. Then both files contain lists, whose last item belongs to the experts. Every folder of a
stage has everything else, except flat buffers: these are only in the folder of the first expert
rank (megatron-core 0.16.1: ChainedOptimizer.save_parameter_state).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, product
from typing import Any

from ....core.checkpoint.entries import Entry
from ....core.checkpoint.manifest import Manifest
from ....core.checkpoint.placement import Sliced
from ....core.grouping import by_key
from ....core.storage import sources
from ....core.storage.inventory import missing_file
from ....errors import (
    CorruptCheckpoint,
    InconsistentCheckpoint,
    UnsupportedCheckpoint,
    listed,
    note,
)
from ....files.torchfile import Parsed, Tensor, TorchFile
from ....naming.tensor_rules import rules_of
from ...statedict.tree import piece_of
from ..buffers.flats import buffers_of, local_part, param_groups, read_bytes, slot_of
from ..buffers.order import LAYER, is_before, predicts
from ..buffers.placing import places
from ..buffers.stages import require_one
from ..common_state import DISTRIBUTED, NOT_DISTRIBUTED, WEIGHTS_ONLY, arguments, with_groups
from ..files import LEGACY
from ..groups import agreed_step, members
from ..manifest import BUFFERS, TIED, Content, manifest_of, require_states_by_parameter
from ..names import EMBEDDING, OF_MODULE, OF_OUTPUT, OUTPUT, KeysOfGpt, with_plain_norms
from ..optimizers import EXPERTS, SPREAD
from .cuts import cuts_of
from .ranks import OF_GROUPED, STATES_FILE, RankDirectory, extra_states, ranks_of, with_own_experts

LOCAL_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)")


class LegacyReader:
    """Reads all `mp_rank_*` folders of one iteration; `content` has what the manifest needs.

    `given` is the value of --tp-rules, whose rules come before zckpt's. Raises
    UnsupportedCheckpoint for models that are not Megatron-Core's, and MissingData if several tensor
    ranks have a module that no rule covers.
    """

    def __init__(self, folder: str, given: str | None) -> None:
        self.folder = folder
        self.given = None if given is None else rules_of(given)
        self.parsed = Parsed()
        self.ranks = ranks_of(folder, self.parsed)
        self.tp = 1 + max(rank.tp for rank in self.ranks)
        self.pp = 1 + max(rank.pp for rank in self.ranks)
        self.ep = 1 + max(rank.ep for rank in self.ranks)
        self.common: dict[Any, Any] = self.ranks[0].file.value
        self.args = arguments(self.common)
        self.content = Content(folder, self.ranks[0].file, self.common, self.args)
        self.shapes = self.content.shapes
        self.cuts: dict[str, Sliced] = {}
        self.modules: dict[str, tuple[RankDirectory, Any]] = {}  # the modules' own states, by name
        self.frozen: set[str] = set()
        for rank in self.ranks:
            self._add(rank.file)

    def manifest(self, step_policy: str | None, weights_only: bool) -> Manifest:
        content = self.content
        iterations = [(rank.file.path, rank.file.value.get("iteration")) for rank in self.ranks]
        agreed_step(self.folder, iterations, step_policy)
        self._number_layers()
        self._weights()
        self._name_items()
        content.common = {
            key: value
            for key, value in self.common.items()
            if key not in ("rng_state", "optimizer")
            and not any(value is model for model in self.ranks[0].models)
        }
        if not weights_only:
            require_states_by_parameter(self.folder, self.args)
            if isinstance(self.common.get("optimizer"), (dict, list)):
                self._states()
        content.omitted = extra_states(self.folder, self.ranks)
        if self.ep > 1 and "rng_state" in self.common:
            message = "rng_state: the random states of the data-parallel ranks"
            content.omitted.append(note("rank-state-omitted", message, subject="rng_state"))
        grouped = filter(OF_GROUPED.fullmatch, self.modules)
        content.omitted += [note("state-unsupported", name, subject=name) for name in grouped]
        return manifest_of(content, step_policy)

    def _add(self, file: TorchFile) -> None:
        if file.path not in self.content.files:
            self.content.files.append(file.path)
            self.content.records += file.records.values()

    # -- weights

    def _number_layers(self) -> None:
        """Gives each rank's weights their names in the full model; collects modules' states too."""
        tied = self.args.get(TIED) is False
        first = 0
        for chunk, stage in product(range(len(self.ranks[0].models)), range(self.pp)):
            layers = 0
            for rank in self.ranks:
                if rank.pp != stage:
                    continue
                rank.chunks.append([])
                model = dict(with_own_experts(rank.models[chunk], bool(self.args.get("fp8"))))
                expert = rank.ep * self._experts(rank, model)
                for local, value in model.items():
                    name, match = local, LAYER.fullmatch(local)
                    if match:
                        layer = int(match["layer"])
                        layers = max(layers, layer + 1)
                        name = f"decoder.layers.{layer + first}.{match['rest']}"
                    if expert:
                        name = LOCAL_EXPERT.sub(lambda m: str(int(m[0]) + expert), name)  # noqa: B023
                    if name == OUTPUT and tied and stage:
                        name = EMBEDDING
                    self._take(rank, with_plain_norms(name), value)
            first += layers
        for rank in self.ranks:
            if "rng_state" in rank.file.value and self.ep == 1:
                key = f"rng_state/shard_{rank.pp}.{rank.tp}_{self.pp}.{self.tp}"
                self._keep(rank, key, [rank.file.value["rng_state"]])

    def _experts(self, rank: RankDirectory, model: Mapping[str, Any]) -> int:
        """The number of experts that a rank has in each layer; 0 if each rank has all of them.

        `model` is one of the rank's state dicts. Raises UnsupportedCheckpoint if a rank has its
        experts in one module.
        """
        names = [name for name in model if EXPERTS in name and not OF_GROUPED.fullmatch(name)]
        names = names if self.ep > 1 else []
        numbers = [LOCAL_EXPERT.search(name) for name in names]
        if None in numbers:
            raise UnsupportedCheckpoint(
                "writer-unsupported",
                f"{rank.file.path} has {names[numbers.index(None)]}: one module for several "
                "experts, which zckpt does not read if experts are spread over ranks",
                hint="save the run with --ckpt-format torch_dist",
                file=rank.file.path,
            )
        return 1 + max((int(match[0]) for match in numbers if match), default=-1)

    def _is_spread(self, name: str) -> bool:
        """Whether a weight belongs to an expert that only one expert-parallel rank has."""
        return self.ep > 1 and EXPERTS in name

    def _take(self, rank: RankDirectory, name: str, value: Any) -> None:
        is_first = rank.tp == 0 and (rank.ep == 0 or self._is_spread(name))
        if isinstance(value, Tensor) and not name.endswith("_extra_state"):
            rank.weights[name] = value
            rank.chunks[-1] += [name] * (not BUFFERS.fullmatch(name))
        elif name.endswith(OF_MODULE) and name != OF_OUTPUT and is_first:
            self.modules[name] = (rank, value)
        elif value is not None and is_first:
            self._keep(rank, name, value)

    def _keep(self, rank: RankDirectory, key: str, value: Any) -> None:
        kept = rank.file.kept(value, f"megatron.objects.{key}", self.content.entries)
        self.content.objects[key] = kept

    def _name_items(self) -> None:
        """Adds the torch_dist keys of all weights and of the modules' extra states to `content`."""
        if any(map(OF_GROUPED.fullmatch, self.modules)):
            return  # torch_dist stores the scales of every expert separately
        raw = (str(name) for rank in self.ranks for model in rank.models for name in model)
        model = KeysOfGpt([*self.shapes, *self.modules], raw, self.args)
        self.content.keys = model.keys()
        for name, key in model.items().items():
            rank, value = self.modules.get(name, (self.ranks[0], None))
            self._keep(rank, key, [value])

    def _weights(self) -> None:
        """Adds every weight to `content`; if several ranks have the same shard, replicas too."""
        parts: list[tuple[int, Entry]] = []
        homes: dict[str, set[tuple[int, int]]] = {}  # stages and expert ranks
        of_stages: dict[int, set[str]] = {}
        for rank in self.ranks:
            of_all = {name for name in rank.weights if not self._is_spread(name)}
            if different := of_all ^ of_stages.setdefault(rank.pp, of_all):
                raise InconsistentCheckpoint(
                    "ranks-disagree",
                    f"{self.folder}: only some rank folders of pipeline stage {rank.pp} have "
                    f"{listed(sorted(different), 4)}, but all of them should",
                    file=self.folder,
                )
            for name, tensor in rank.weights.items():
                home = rank.pp, rank.ep if self._is_spread(name) else 0
                homes.setdefault(name, set()).add(home)
                fragments = rank.file.fragments(tensor)
                entry = Entry(name, "param", tensor.dtype, tensor.shape, fragments)
                parts.append((rank.tp, entry))
                if self.shapes.setdefault(name, tensor.shape) != tensor.shape:
                    raise InconsistentCheckpoint(
                        "ranks-disagree",
                        f"{self.folder}: {name} has different shapes on different ranks",
                        file=self.folder,
                        subject=name,
                    )
        for name, homes_of_name in homes.items():
            may_be = name == EMBEDDING or (is_before(name) and predicts(homes))
            if len(homes_of_name) > 1 and not may_be:
                raise InconsistentCheckpoint(
                    "elements-overlap",
                    f"{self.folder}: two pipeline stages or expert ranks have {name}, but only one "
                    "should have it",
                    file=self.folder,
                    subject=name,
                )
        self.cuts = cuts_of(self.folder, self.shapes, self.tp, self.args, self.given)
        self.shapes |= {name: cut.shape for name, cut in self.cuts.items()}
        self.content.join(parts, self.cuts)

    # -- the optimizer

    def _states(self) -> None:
        """Adds all ranks' masters and moments to `content`, and the groups of each optimizer."""
        content, first = self.content, self.ranks[0].optimizers[0]
        parts: list[tuple[int, Entry]] = []
        names_with_states: list[set[str]] = [set() for _ in range(self.tp)]
        groups_of: dict[bool, list[Any]] = {}
        for rank in self.ranks:
            for number, optimizer in enumerate(rank.optimizers):
                inner = optimizer.get("optimizer", optimizer)
                groups = param_groups(rank.file, inner)
                spread = any(group.get(SPREAD) for group in groups)
                names = [name for name in chain(*rank.chunks) if self._is_spread(name) == spread]
                content.sharding = NOT_DISTRIBUTED if "state" in inner else DISTRIBUTED
                states: Iterable[tuple[str, Iterable[Entry]]] = ()
                if "state" in inner:
                    states = whole_states(rank, names, optimizer, groups, self.args)
                elif rank.ep == 0 or spread:
                    states = self._distributed(rank, number, set(names))
                groups = [without_members(rank.file, group, inner) for group in groups]
                groups_of.setdefault(spread, []).extend(groups)
                content.steps += [(rank.file.path, group.get("step")) for group in groups]
                for name, entries in states:
                    names_with_states[rank.tp].add(name)
                    for entry in entries:
                        parts.append((rank.tp, entry))
        trained = {name for name in self.shapes if not BUFFERS.fullmatch(name)}
        trained -= self.frozen - set[str]().union(*names_with_states)
        for tp, names_of_rank in enumerate(names_with_states):
            if lost := [name for name in self.shapes if name in trained - names_of_rank]:
                raise InconsistentCheckpoint(
                    "partition-does-not-fit",
                    f"{self.folder}: the optimizers of tensor rank {tp} lack {listed(lost, 4)}",
                    hint=WEIGHTS_ONLY,
                    file=self.folder,
                )
        content.join(parts, self.cuts)
        groups = [groups for _, groups in sorted(groups_of.items())]
        beside = {key: first[key] for key in ("grad_scaler",) if key in first}
        content.common = with_groups(content.common, groups, [beside])

    def _distributed(
        self, rank: RankDirectory, number: int, own_names: set[str]
    ) -> Iterator[tuple[str, Iterable[Entry]]]:
        """Yields (name, states) of the parameters `own_names` from a rank's flat buffers.

        `number` is the optimizer's index in the files. Raises IncompleteCheckpoint without
        distrib_optim.pt, InconsistentCheckpoint or CorruptCheckpoint if this file does not fit the
        model's file, and UnsupportedCheckpoint if parameters cannot be located in a buffer.
        """
        path = os.path.join(rank.folder, STATES_FILE)
        if not sources.is_file(path):
            raise missing_file(path, LEGACY, f"the distributed optimizer's states; {WEIGHTS_ONLY}")
        file = TorchFile(path, self.parsed)
        self._add(file)
        value = file.value
        if isinstance(value, list) != isinstance(rank.file.value["optimizer"], list):
            raise InconsistentCheckpoint(
                "mixed-saves",
                f"{path} and {LEGACY} beside it have different numbers of optimizers",
                file=path,
            )
        if isinstance(value, list):
            value = value[number] if number < len(value) else None
        if value is None:
            raise CorruptCheckpoint(
                "file-damaged",
                f"{path} has no buffers of optimizer {number}",
                hint=WEIGHTS_ONLY,
                file=path,
            )
        kinds = (
            by_key((rank.weights[name].dtype, name) for name in chunk if name in own_names)
            for chunk in rank.chunks
        )
        of_types = by_key(item for of_chunk in kinds for item in of_chunk.items())
        for _, flat in sorted(buffers_of(file, value), key=lambda item: item[0]):
            if not of_types.get(flat.dtype):
                raise InconsistentCheckpoint(
                    "mixed-saves",
                    f"{path} has more optimizer buffers than the model has chunks",
                    file=path,
                )
            names = of_types[flat.dtype].pop(0)
            weights = [(name, rank.weights[name]) for name in reversed(names)]
            locals_ = [
                local_part(name, weight.numel, weight.dtype, piece_of(rank.file, weight, ()))
                for name, weight in weights
            ]
            ways = places(locals_, flat, read_bytes)
            ways = ways or places(locals_, flat, read_bytes, may_lack=True)
            require_one(ways, flat, self.folder)
            for local, place in zip(locals_, ways[0], strict=True):
                own_names.discard(local.name)
                if place is None:
                    self.frozen.add(local.name)
                else:
                    shape = rank.weights[local.name].shape
                    yield local.name, flat.entries(local.name, place, shape)
        if own_names:
            raise InconsistentCheckpoint(
                "mixed-saves",
                f"{path} has no optimizer buffer for {min(own_names)}",
                hint=WEIGHTS_ONLY,
                file=path,
            )


# -- states of the optimizer


def whole_states(
    rank: RankDirectory,
    order: Sequence[str],
    optimizer: dict[Any, Any],
    groups: list[Any],
    args: Mapping[str, Any],
) -> Iterator[tuple[str, Iterable[Entry]]]:
    """Yields the states of an optimizer that is not distributed, parameter by parameter.

    `order` has the parameters' names in the order of the model. Raises UnsupportedCheckpoint if it
    is unknown which parameters a group has, and InconsistentCheckpoint if groups or states do not
    fit the model.
    """
    file, weights = rank.file, rank.weights
    member = members(groups, {name: weights[name].shape for name in order}, args)
    masters = optimizer.get("fp32_from_fp16_params", [])
    states = optimizer.get("optimizer", optimizer).get("state")
    if member is None or not isinstance(states, dict) or not isinstance(masters, list):
        raise UnsupportedCheckpoint(
            "layout-unknown",
            f"{file.path} does not list the parameters of each group, and zckpt cannot infer them: "
            "by Megatron-Core's rule (no weight decay for biases and 1-d tensors), a parameter "
            "fits no group, or several",
            hint=WEIGHTS_ONLY,
            file=file.path,
        )
    for number, group in enumerate(groups):
        # the optimizer numbers parameters group by group, and in a group in the order of the model
        names = [name for name in order if member[name] == number]
        halves = iter(masters[number] if number < len(masters) else ())
        numbers = group.get("params")
        if not isinstance(numbers, list) or len(numbers) != len(names):
            raise InconsistentCheckpoint(
                "mixed-saves",
                f"{file.path}: parameter group {number} should have {len(names)} parameters, as "
                "the model has",
                hint=WEIGHTS_ONLY,
                file=file.path,
            )
        for name, key in zip(names, numbers, strict=True):
            weight = weights[name]
            state = {**states.get(key, {})}
            if weight.dtype != "F32":
                state["param"] = next(halves, None)
            entries = []
            for slot, tensor in state.items():
                if slot == "step":
                    continue
                if (
                    not isinstance(tensor, Tensor)
                    or tensor.shape != weight.shape
                    or tensor.dtype != "F32"
                    or not tensor.contiguous
                ):
                    raise InconsistentCheckpoint(
                        "ranks-disagree",
                        f"{file.path}: optimizer state {slot} of parameter number {key} does not "
                        f"fit {name} of shape {list(weight.shape)}",
                        hint=WEIGHTS_ONLY,
                        file=file.path,
                        subject=name,
                    )
                fragments = file.fragments(tensor)
                entries.append(Entry(name, slot_of(slot), "F32", weight.shape, fragments))
            yield name, entries


def without_members(file: TorchFile, group: dict[str, Any], inner: dict[Any, Any]) -> Any:
    """The hyper-parameters and the step of a group, without the list of its parameters' numbers.

    `inner` is the optimizer's state dict. If the group has no step, the step of its parameters in
    this state dict is used. Raises InconsistentCheckpoint if these parameters' steps differ.
    """
    numbers = group.get("params", ())
    result = {key: value for key, value in group.items() if key != "params"}
    state = inner.get("state", {})
    steps = [state[key].get("step") for key in numbers if key in state]
    if steps and "step" not in result and steps[0] is not None:
        values = [*map(file.number, steps)]
        if any(value != values[0] for value in values):
            raise InconsistentCheckpoint(
                "steps-disagree",
                f"{file.path}: parameters of one group have different steps",
                file=file.path,
            )
        result["step"] = values[0]
    return result
