"""The older kind of Megatron's directories: one folder for each model-parallel rank.

    mp_rank_TT[_PPP]/model_optim_rng.pt    model, groups, arguments, counters of one rank
    mp_rank_TT[_PPP]/distrib_optim.pt      the flat buffers of the distributed optimizer

A rank of an interleaved pipeline has several model chunks, `model0`, `model1`, ... The layers go
through the first chunks of all stages, then through the second ones.
Every chunk has its own layers, numbered from 0, and every rank its own slices. The order of a state
dict is that of the parameters, so no rule about the architecture is needed to place them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import count, product, takewhile
from typing import Any

from ...core import sources
from ...core.dtypes import SIZES
from ...core.expected import missing_file
from ...core.fragments import Record
from ...core.manifest import Entry, Manifest
from ...core.slicing import Slicing, joined
from ...core.values import field, mutable
from ...errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    UnsupportedCheckpoint,
    counted,
)
from ...files.torchfile import Parsed, Tensor, TorchFile
from .common import NOT_DISTRIBUTED, arguments, kept, with_groups
from .contents import BUFFERS, TIED, Content, manifest_of, require_groups, size_of
from .cuts import cut_of, whole_shape
from .files import LEGACY, OF_RANK
from .flats import buffers_of, param_groups, read_bytes, states
from .keys import OF_MODULE, OF_OUTPUT, items_of_modules, keys_of_gpt
from .legacy_states import local_part, whole_states, without_members
from .names import NORMS, with_plain_norms
from .order import LAYER
from .placing import places
from .stages import EMBEDDING, HINT, OUTPUT, Place, require_one

STATES = "distrib_optim.pt"
OLDEST = 2.0  # of checkpoint_version; before it the rows of linear_qkv have another order
DISTRIBUTED = "distrib_optim"
OF_CHUNK = re.compile(r"model\d*")


@mutable
class _Rank:
    """One model-parallel rank: its file, its weights under their names in the whole model."""

    tp: int
    pp: int
    folder: str
    file: TorchFile
    weights: dict[str, Tensor] = field(default_factory=dict)
    chunks: list[list[str]] = field(default_factory=list)  # parameters of each model chunk

    @property
    def order(self) -> list[str]:
        return [name for names in self.chunks for name in names]

    @property
    def models(self) -> list[Any]:
        """The state dicts of its model chunks, of which interleaved pipelines have several."""
        if "model0" not in self.value:
            return [self.value.get("model")]
        keys = takewhile(self.value.__contains__, (f"model{number}" for number in count()))
        return [self.value[key] for key in keys]

    @property
    def value(self) -> dict[Any, Any]:
        value: dict[Any, Any] = self.file.value
        return value


def read_legacy(folder: str, step_policy: str | None, weights_only: bool) -> Manifest:
    """The manifest of a directory with `mp_rank_*` folders.

    Raises UnsupportedCheckpoint for experts that are spread over ranks, models that are not of
    Megatron-Core, and unknown modules on several tensor ranks.
    """
    return _LegacyReader(folder).manifest(step_policy, weights_only)


class _LegacyReader:
    """All folders of one iteration."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.parsed = Parsed()
        self.ranks = self._ranks()
        self.tp = 1 + max(rank.tp for rank in self.ranks)
        self.pp = 1 + max(rank.pp for rank in self.ranks)
        self.common = self.ranks[0].value
        self.args = arguments(self.common)
        self._require_known()
        self.records: list[Record] = [
            record for rank in self.ranks for record in rank.file.records.values()
        ]
        self.files = [rank.file.path for rank in self.ranks]
        self.entries: dict[str, Entry] = {}
        self.replicas: list[Entry] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.slicings: dict[str, Slicing] = {}
        self.modules: dict[str, tuple[_Rank, Any]] = {}  # their own states, by name
        self.objects: dict[str, Any] = {}
        self.keys: dict[str, int] = {}  # of torch_dist

    def manifest(self, step_policy: str | None, weights_only: bool) -> Manifest:
        self._number_layers()
        self._weights()
        self._name_items()
        models = OF_CHUNK.fullmatch
        common = {key: value for key, value in self.common.items() if not models(str(key))}
        common.pop("rng_state", None)
        slots: set[str] = set()
        has_states = not weights_only and isinstance(common.get("optimizer"), (dict, list))
        sharding = NOT_DISTRIBUTED if has_states else None
        optimizer = common.pop("optimizer", None)
        if has_states:
            if isinstance(optimizer, dict) and "grad_scaler" in optimizer:
                common["optimizer"] = {"grad_scaler": optimizer["grad_scaler"]}
            distributed, listed = self._states(slots)
            sharding = DISTRIBUTED if distributed else NOT_DISTRIBUTED
            common = with_groups(common, [[group for groups in listed for group in groups]])
        content = Content(
            folder=self.folder,
            file=self.ranks[0].file,
            common=common,
            entries=self.entries,
            shapes=self.shapes,
            frozen=set(),
            slots=slots,
            sharding=sharding,
            files=self.files,
            records=self.records,
            replicas=self.replicas,
            keys=self.keys,
            objects=self.objects,
            left_out=[f"{name}, a file of the directory" for name in self._strangers()],
        )
        return manifest_of(content, step_policy)

    # -- the folders

    def _ranks(self) -> list[_Rank]:
        """Every rank's file, by stage and then by tensor rank; raises IncompleteCheckpoint."""
        places: dict[tuple[int, int], str] = {}
        for name in sorted(os.listdir(self.folder)):
            if not OF_RANK.fullmatch(name):
                continue
            numbers = [int(number) for number in name.split("_")[2:]]
            if len(numbers) > 2:
                raise _spread(self.folder)
            tp, pp = (*numbers, 0)[:2]
            places[pp, tp] = name
        grid = [
            (pp, tp)
            for pp in range(1 + max(pp for pp, _ in places))
            for tp in range(1 + max(tp for _, tp in places))
        ]
        for place in grid:
            if place not in places:
                raise IncompleteCheckpoint(
                    f"{self.folder} has no folder of tensor rank {place[1]} in stage {place[0]}",
                    hint="every model-parallel rank writes one: copy the whole directory",
                )
        ranks = []
        for pp, tp in grid:
            folder = os.path.join(self.folder, places[pp, tp])
            path = os.path.join(folder, LEGACY)
            if not sources.is_file(path):
                raise missing_file(path, self.folder, "every model-parallel rank writes one")
            file = TorchFile(path, self.parsed)
            if not isinstance(file.value, dict):
                raise CorruptCheckpoint(f"{path} is not a dictionary")
            ranks.append(_Rank(tp, pp, folder, file))
        return ranks

    def _require_known(self) -> None:
        """Raises UnsupportedCheckpoint for kinds of models and layouts that are not read."""
        stated = size_of(self.args, "tensor_model_parallel_size") or self.tp
        stages = size_of(self.args, "pipeline_model_parallel_size") or self.pp
        if (size_of(self.args, "expert_model_parallel_size") or 1) > 1:
            raise _spread(self.folder)
        if (stated, stages) != (self.tp, self.pp):
            raise IncompleteCheckpoint(
                f"{self.folder} has folders of {self.tp} tensor ranks and {self.pp} stages, but "
                f"the run had {stated} and {stages}",
                hint="every model-parallel rank writes one: copy the whole directory",
            )
        version = self.common.get("checkpoint_version", 0)
        if not isinstance(version, (int, float)) or version < OLDEST:
            raise UnsupportedCheckpoint(
                f"{self.folder} has the checkpoint_version {version!s:.20}: its linear_qkv has "
                "another order of rows",
                hint="load it in Megatron-LM, which reorders the rows, and save it again",
            )
        require_groups(self.folder, self.args, self.tp)
        for rank in self.ranks:
            own, first = len(rank.models), len(self.ranks[0].models)
            if own != first:
                raise InconsistentCheckpoint(
                    f"{rank.file.path} has {counted(own, 'model chunk')}, but "
                    f"{self.ranks[0].file.path} has {first}"
                )
            known = (
                isinstance(each, dict) and "language_model" not in each for each in rank.models
            )
            if not all(known):
                raise UnsupportedCheckpoint(
                    f"{rank.file.path} has no state dict of a Megatron-Core model"
                )

    def _strangers(self) -> list[str]:
        own = {os.path.basename(rank.folder) for rank in self.ranks}
        inside = [
            f"{os.path.basename(rank.folder)}/{name}"
            for rank in self.ranks
            for name in os.listdir(rank.folder)
            if name not in (LEGACY, STATES)
        ]
        return sorted([name for name in os.listdir(self.folder) if name not in own] + inside)

    # -- weights

    def _number_layers(self) -> None:
        """Gives each rank its weights under their names in the whole model, and keeps objects."""
        tied = self.args.get(TIED) is False
        first = 0
        for chunk, stage in product(range(len(self.ranks[0].models)), range(self.pp)):
            layers = 0
            for rank in self.ranks:
                if rank.pp != stage:
                    continue
                rank.chunks.append([])
                for local, value in rank.models[chunk].items():
                    name, match = str(local), LAYER.fullmatch(str(local))
                    if match:
                        layer = int(match["layer"])
                        layers = max(layers, layer + 1)
                        name = f"decoder.layers.{layer + first}.{match['rest']}"
                    if name == OUTPUT and tied and stage:
                        name = EMBEDDING
                    self._take(rank, with_plain_norms(name), value)
            first += layers
        for rank in self.ranks:
            if "rng_state" in rank.value:
                key = f"rng_state/shard_{rank.pp}.{rank.tp}_{self.pp}.{self.tp}"
                self._keep(rank, key, [rank.value["rng_state"]])

    def _take(self, rank: _Rank, name: str, value: Any) -> None:
        if isinstance(value, Tensor) and not name.endswith("_extra_state"):
            rank.weights[name] = value
            rank.chunks[-1] += [name] * (not BUFFERS.fullmatch(name))
        elif name.endswith(OF_MODULE) and name != OF_OUTPUT and rank.tp == 0:
            self.modules[name] = (rank, value)
        elif value is not None and rank.tp == 0:
            self._keep(rank, name, value)

    def _keep(self, rank: _Rank, key: str, value: Any) -> None:
        self.objects[key] = kept(rank.file, value, f"megatron.objects.{key}", self.entries)

    def _name_items(self) -> None:
        """Keeps the states of modules, and the keys of all weights, as torch_dist has them."""
        raw = (str(name) for rank in self.ranks for model in rank.models for name in model)
        fused = any(norm in name for name in raw for norm in NORMS)
        items = items_of_modules([*self.shapes, *self.modules], fused)
        if items:
            self.keys = keys_of_gpt(self.shapes, fused, self.args)
        for name, key in items.items():
            rank, value = self.modules.get(name, (self.ranks[0], None))
            self._keep(rank, key, [value])

    def _weights(self) -> None:
        """Enters every weight; copies that further ranks have become replicas."""
        for stage in range(self.pp):
            ranks = [rank for rank in self.ranks if rank.pp == stage]
            shapes = {name: tensor.shape for name, tensor in ranks[0].weights.items()}
            for name, tensor in ranks[0].weights.items():
                kinds = {
                    (known.dtype, known.shape) if (known := rank.weights.get(name)) else None
                    for rank in ranks
                }
                if kinds != {(tensor.dtype, tensor.shape)}:
                    raise InconsistentCheckpoint(
                        f"{self.folder}: tensor ranks have {name} in several shapes or types, or "
                        "not at all"
                    )
                slicing = cut_of(name, shapes, self.tp)
                slices = [rank.file.fragments(rank.weights[name]) for rank in ranks]
                whole = whole_shape(name, tensor.shape, self.tp)
                is_copy = name in self.shapes
                if is_copy and (name != EMBEDDING or self.shapes[name] != whole):
                    raise InconsistentCheckpoint(f"{self.folder}: two stages have {name}")
                self.shapes[name], self.slicings[name] = whole, slicing
                for copy in range(slicing.copies):
                    bytes_ = joined(slicing, slices, SIZES[tensor.dtype], copy)
                    entry = Entry(f"{name}/param", tensor.dtype, whole, bytes_)
                    if is_copy or copy:
                        self.replicas.append(entry)
                    else:
                        self.entries[entry.name] = entry

    # -- the optimizer

    def _states(self, slots: set[str]) -> tuple[bool, list[list[Any]]]:
        """Enters masters and moments; whether they are distributed, and the groups of all ranks."""
        placed: list[dict[str, list[Place]]] = [{} for _ in range(self.tp)]
        listed: list[list[Any]] = []
        distributed = False
        for rank in self.ranks:
            optimizer = rank.value.get("optimizer")
            if not isinstance(optimizer, dict):
                raise _spread(self.folder)
            inner = optimizer.get("optimizer", optimizer)
            groups = param_groups(rank.file, inner)
            distributed = "state" not in inner
            found = (
                self._distributed(rank)
                if distributed
                else whole_states(rank.file, rank.order, rank.weights, optimizer, groups)
            )
            listed.append([without_members(rank.file, group, inner) for group in groups])
            for name, place in found:
                placed[rank.tp].setdefault(name, []).append(place)
        names = [name for name in self.shapes if not BUFFERS.fullmatch(name)]
        for entry, is_copy in states(names, self.shapes, self.slicings, placed):
            if is_copy:
                self.replicas.append(entry)
                continue
            self.entries[entry.name] = entry
            if entry.slot != "master":
                slots.add(entry.slot)
        return distributed, listed

    def _distributed(self, rank: _Rank) -> Iterator[tuple[str, Place]]:
        """The places of a rank's parameters in its flat buffers."""
        path = os.path.join(rank.folder, STATES)
        if not sources.is_file(path):
            raise missing_file(path, LEGACY, f"the distributed optimizer's states; {HINT}")
        file = TorchFile(path, self.parsed)
        self.files.append(path)
        self.records += file.records.values()
        if isinstance(file.value, list):
            raise _spread(self.folder)
        left = set(rank.order)
        of_types: dict[str, list[list[str]]] = {}
        for chunk in rank.chunks:
            kinds: dict[str, list[str]] = {}
            for name in chunk:
                kinds.setdefault(rank.weights[name].dtype, []).append(name)
            for dtype, names in kinds.items():
                of_types.setdefault(dtype, []).append(names)
        for _, flat in sorted(buffers_of(file, file.value), key=lambda item: item[0]):
            if not of_types.get(flat.dtype):
                raise InconsistentCheckpoint(f"{path} has more buffers than model chunks")
            names = of_types[flat.dtype].pop(0)
            locals_ = [local_part(name, rank.weights[name], rank.file) for name in reversed(names)]
            ways = places(locals_, flat, read_bytes)
            require_one(ways, flat, self.folder)
            for local, place in zip(locals_, ways[0], strict=True):
                left.discard(local.name)
                yield local.name, (flat, place)
        if left:
            raise InconsistentCheckpoint(f"{path} has no buffer for {min(left)}", hint=HINT)


def _spread(folder: str) -> UnsupportedCheckpoint:
    return UnsupportedCheckpoint(
        f"{folder} has experts that are spread over ranks in mp_rank_* folders",
        hint="zckpt reads them from --ckpt-format torch_dist with "
        "--dist-ckpt-optim-fully-reshardable",
    )
