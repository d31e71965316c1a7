"""The experts of a model: their names, their ranks and their order in flat buffers.

A layer of experts (`deepspeed.moe.layer.MoE`) spreads them over `ep` ranks. Every rank numbers its
experts from 0, and names them by these local numbers. Manifests have the numbers in the full layer:

    ep rank          0      0      1      1
    local number     0      1      0      1
    number           0      1      2      3

AutoEP (`expert_parallel` in a ds_config) keeps a layer's experts stacked in three parameters. Files
of experts have their slices, whose names end with the number. Manifests use these names too:

    mlp.experts.w1   of shape [2, 20, 16]      ->      mlp.experts.w1.0, mlp.experts.w1.1

So the names on ep rank 0 are also names of the full model. The ep rank of a data rank depends on
the ds_config (`use_data_before_expert_parallelism`). DeepSpeed 0.19.8.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ...core.checkpoint.facts import ExpertLayer, layers_of
from ...core.checkpoint.inert import nested
from ...core.checkpoint.manifest import Manifest
from ...errors import UnsupportedCheckpoint, listed
from .directories import TagDirectory, refuse

INSIDE = ".deepspeed_moe.experts.deepspeed_experts."
NAME = re.compile(rf"(.+){re.escape(INSIDE)}(\d+)\.(.+)")
EP_SIZE = re.compile(r"ep_size_(\d+)")
STACKED = re.compile(r"(.+)\.experts\.(w[123])\.(\d+)")


class ExpertName(Struct, frozen=True):
    """The parts of an expert's tensor name: its layer, its number, and the name within the expert.

    With `is_slice`, the run used AutoEP: the tensor is one expert's slice of a parameter in which a
    rank stacks all its experts.
    """

    layer: str
    number: int
    inner: str
    is_slice: bool = False

    @property
    def parameter(self) -> str:
        """The name of the stacked parameter (AutoEP) that contains this slice."""
        return f"{self.layer}.experts.{self.inner}"

    def numbered(self, number: int) -> str:
        """The name of the same tensor in expert number `number`."""
        if self.is_slice:
            return f"{self.parameter}.{number}"
        return f"{self.layer}{INSIDE}{number}.{self.inner}"


def expert_name(name: str) -> ExpertName | None:
    """Parses the name of an expert's tensor; None if the tensor does not belong to an expert."""
    if match := STACKED.fullmatch(name):
        return ExpertName(match[1], int(match[3]), match[2], is_slice=True)
    match = NAME.fullmatch(name)
    return ExpertName(match[1], int(match[2]), match[3]) if match else None


def size_in(group: Mapping[str, Any]) -> int | None:
    """The expert-parallel size in the name of a param group: 2 for "ep_size_2"; else None."""
    match = EP_SIZE.fullmatch(str(group.get("name"))) if group.get("moe") else None
    return int(match[1]) if match else None


def parameter_of(name: str) -> str:
    """The engine's name of the parameter that contains a tensor of a manifest.

    AutoEP stacks experts, so an expert's slice `experts.w1.3` belongs to the parameter
    `experts.w1`. All other names stay unchanged.
    """
    parts = expert_name(name)
    return parts.parameter if parts is not None and parts.is_slice else name


def stacked(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Replaces the slices of AutoEP's experts in `shapes` by the engine's parameters.

    Such a parameter stacks one tensor (`w1`) of all experts that a rank has in a layer:
    `experts.w1.0` and `experts.w1.1` of shape (20, 16) become `experts.w1` of shape (2, 20, 16).
    """
    counts = Counter(map(parameter_of, shapes))
    together: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        parameter = parameter_of(name)
        together[parameter] = shape if parameter == name else (counts[parameter], *shape)
    return together


class ExpertLayers(Struct, frozen=True):
    """All layers of experts of a model, in the engine's order, by name; empty for a dense model."""

    layers: Mapping[str, ExpertLayer]

    @classmethod
    def of_manifest(cls, manifest: Manifest) -> ExpertLayers:
        """The layers of experts that a manifest states."""
        return cls({layer.name: layer for layer in layers_of(manifest.run.engine)})

    @property
    def listed(self) -> tuple[ExpertLayer, ...]:
        """The layers of experts in the engine's order."""
        return tuple(self.layers.values())

    def __bool__(self) -> bool:
        return bool(self.layers)

    @property
    def sizes(self) -> list[int]:
        """The expert-parallel sizes of all layers, sorted, each size once."""
        return sorted({layer.ep for layer in self.layers.values()})

    def layer_of(self, name: str) -> ExpertLayer | None:
        """The layer of experts that the tensor `name` belongs to; None for other tensors."""
        parts = expert_name(name)
        return None if parts is None else self.layers.get(parts.layer)

    def ep_of(self, names: Sequence[str]) -> int:
        """The expert-parallel size of the param group with these members; 1 without experts."""
        eps = {1 if layer is None else layer.ep for layer in map(self.layer_of, names)}
        assert len(eps) == 1, names
        return eps.pop()

    def is_dense(self, name: str) -> bool:
        """Whether the tensor `name` does not belong to an expert."""
        return self.layer_of(name) is None

    def is_on_first(self, name: str) -> bool:
        """Whether ep rank 0 has the tensor `name`: it has all, except experts of other ranks."""
        return self.is_held(name, dict.fromkeys(self.layers, 0))

    def is_held(self, name: str, of_layer: Mapping[str, int]) -> bool:
        """Whether a rank has the tensor `name`: every tensor, except experts of other ep ranks.

        `of_layer` maps each layer of experts to the rank's ep rank in this layer.
        """
        parts, layer = expert_name(name), self.layer_of(name)
        return parts is None or layer is None or parts.number // layer.local == of_layer[layer.name]

    def on_first(self, names: Sequence[str]) -> list[str]:
        """Selects the tensors that ep rank 0 has: all but the experts of other ep ranks.

        On that rank, they have the same names as in the full model.
        """
        return [name for name in names if self.is_on_first(name)]

    def global_name(self, name: str, ep_rank: int) -> str:
        """Converts an ep rank's name of a tensor to its name in the full model.

        An ep rank numbers its experts from 0; the full model numbers the experts of all ranks.
        """
        parts, layer = expert_name(name), self.layer_of(name)
        if parts is None or layer is None:
            return name
        return parts.numbered(ep_rank * layer.local + parts.number)

    def named_in(self, name: str, of_layer: Mapping[str, int]) -> str:
        """Converts a rank's name of a tensor to its name in the full model.

        A rank numbers its experts from 0. `of_layer` maps each layer of experts to the rank's ep
        rank in this layer.
        """
        layer = self.layer_of(name)
        return name if layer is None else self.global_name(name, of_layer[layer.name])

    def everywhere(self, local: Sequence[str]) -> list[str]:
        """Adds the experts of all other ranks to one rank's members of a param group.

        `local` has the names of these members on the rank. If they are in one of DeepSpeed's own
        orders, so is the result.
        """
        runs = groupby(local, self.layer_of)  # consecutive names of the same layer
        return [name for layer, run in runs for name in _spread(layer, [*run])]

    def is_regular(self, names: Sequence[str]) -> bool:
        """Whether a group lists its experts' tensors in an order that DeepSpeed itself uses.

        If so, their order at any other expert-parallel size is known too. DeepSpeed lists all
        tensors of one expert together, or one tensor of all experts together; experts ascend or
        descend.
        """
        return all(
            layer is None or _order([*run], layer.experts) is not None
            for layer, run in groupby(names, self.layer_of)
        )

    def with_ep(self, ep: int) -> ExpertLayers:
        """The same layers, with their experts spread over `ep` ranks."""
        return ExpertLayers({name: replace(layer, ep=ep) for name, layer in self.layers.items()})


def refuse_experts(source: Manifest) -> None:
    """Raises UnsupportedCheckpoint if the source has experts.

    DeepSpeed's own converter to universal checkpoints refuses them too (0.19.8).
    """
    names = [name for name in source.parameters if expert_name(name)]
    if names:
        raise UnsupportedCheckpoint(
            "target-unsupported",
            f"{source.root} has experts ({listed(names, 1)}), which DeepSpeed's universal "
            "checkpoints do not hold",
            hint="write --to deepspeed, with --dp and --ep",
            file=source.root,
        )


def _spread(layer: ExpertLayer | None, run: Sequence[str]) -> list[str]:
    """Adds the tensors of all other ranks' experts to one rank's tensors (`run`) of one layer.

    If `run` is in one of DeepSpeed's orders (`_orders`), so is the result. Otherwise each tensor is
    followed by the same tensor of the other ranks.
    """
    if layer is None:
        return list(run)
    parts = [part for part in map(expert_name, run) if part is not None]
    order = _order(run, layer.local)
    if order is None:  # for each tensor of the rank, those of all ranks
        return [
            part.numbered(ep_rank * layer.local + part.number)
            for part in parts
            for ep_rank in range(layer.ep)
        ]
    first = {part.inner: part for part in parts}
    return [first[inner].numbered(n) for n, inner in _orders(first, layer.experts)[order]]


def _orders(inners: Iterable[str], count: int) -> list[list[tuple[int, str]]]:
    """The four orders in which DeepSpeed may list the tensors of `count` experts.

    All tensors of one expert together, or one tensor of all experts together; experts ascending or
    descending. An item of an order is (expert's number, inner name): (3, "fc1.weight").
    """
    inners, ways = [*inners], (range(count), range(count)[::-1])
    return [
        *([(number, inner) for number in numbers for inner in inners] for numbers in ways),
        *([(number, inner) for inner in inners for number in numbers] for numbers in ways),
    ]


def _order(run: Sequence[str], count: int) -> int | None:
    """The index in `_orders` of the order in which `run` lists the tensors of `count` experts.

    None if it is none of these orders.
    """
    parts = [part for part in map(expert_name, run) if part is not None]
    orders = _orders(dict.fromkeys(part.inner for part in parts), count)
    listed = [(part.number, part.inner) for part in parts]
    return orders.index(listed) if listed in orders else None


class ExpertRanks(Struct, frozen=True):
    """Which ranks have which experts. With 4 ranks and an expert-parallel size of 2, for example:

        by default       ranks 0 and 2 have the first half, ranks 1 and 3 the second
        `data_first`     ranks 0 and 1 have the first half, ranks 2 and 3 the second

    DeepSpeed 0.19.8, utils/groups.py `_create_expert_and_data_parallel`.
    """

    dp: int
    data_first: bool

    @classmethod
    def of_config(cls, dp: int, config: Mapping[str, Any]) -> ExpertRanks:
        return cls(dp, nested(config, "use_data_before_expert_parallelism") is True)

    def place(self, rank: int, ep: int) -> tuple[int, int]:
        """The ep rank of a data rank, and its index among the data ranks with the same experts.

        `ep` is the expert-parallel size.
        """
        if self.data_first:
            return divmod(rank, self.dp // ep)
        return rank % ep, rank // ep

    def alike(self, ep_rank: int, ep: int) -> list[int]:
        """The data ranks whose ep rank is `ep_rank`, in order.

        These ranks have the same experts, and share a flat buffer.
        """
        return [rank for rank in range(self.dp) if self.place(rank, ep)[0] == ep_rank]

    def in_layers(self, layers: ExpertLayers, number: int) -> dict[str, int]:
        """The ep rank of one data rank in each layer of experts: {"layers.1.moe": 0}.

        Layers may have different expert-parallel sizes. In the layers with the largest size, the ep
        rank is `number`: the first data rank with this ep rank is chosen. In the other layers, this
        data rank may have another ep rank.
        """
        rank = self.alike(number, max(layers.sizes))[0]
        return {layer.name: self.place(rank, layer.ep)[0] for layer in layers.listed}


# -- AutoEP in model files

LAYERS = ("ds_autoep_layers", "autoep_layers")
AUTO_EP_READ = (
    "zckpt reads AutoEP only in ZeRO stages 1 and 2, without AutoTP, round_robin_gradients and "
    "parameter_alignment"
)


def layers_in(model: Mapping[str, Any]) -> list[dict[str, Any]]:
    """AutoEP's layers as a model file describes them; empty for models without AutoEP."""
    layers = next((model[key] for key in LAYERS if model.get(key)), None)
    return [each for each in layers if isinstance(each, dict)] if isinstance(layers, list) else []


def refuse_folded(directory: TagDirectory, model: Mapping[str, Any]) -> None:
    """Raises UnsupportedCheckpoint if tensor ranks share the experts of AutoEP."""
    if model.get("folding") or (layers_in(model) and int(model.get("mp_world_size") or 1) > 1):
        refuse(directory, "AutoEP beside tensor ranks (AutoTP)", AUTO_EP_READ)
