"""Finds the parameters of each flat buffer, and their places.

A model-parallel rank has the layers of its stage: one range of them for each model chunk. It has a
buffer for each chunk and type of weights. The first chunk of the first stage also has the
embedding. The last chunk of the last stage also has the last norm and the output layer. No file
states the ranges. A range belongs to a buffer if its parameters fill the buffer, and if the bytes
agree (placing.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from msgspec import Struct

from ....core.grouping import by_key
from ....errors import InconsistentCheckpoint, UnsupportedCheckpoint, listed
from ..common_state import WEIGHTS_ONLY
from ..names import EMBEDDING, OUTPUT
from .order import expert_of, is_before, layer_of, orders, predicts
from .placing import ALIGNMENT, Flat, Local, ReadBytes, places

BufferPlace = tuple[Flat, tuple[int, int]]
"""A buffer, and the place of a parameter in it: (bucket, element)."""


class ModelRank(Struct, frozen=True, eq=False):
    """The flat buffers of one model-parallel rank, in the order of its model chunks.

    `experts` are the numbers of the experts in them, if experts are spread over ranks.
    """

    tp: int
    pp: int
    flats: tuple[Flat, ...]
    experts: range | None = None

    def own_parts(self, parts: Mapping[str, Local]) -> Mapping[str, Local]:
        """The parameters in `parts` (the tensor rank's) that this rank's buffers may contain.

        All of them; if experts are spread over ranks, those of this rank's experts.
        """
        if self.experts is None:
            return parts
        return {name: part for name, part in parts.items() if expert_of(name) in self.experts}


def placed(
    ranks: Sequence[ModelRank],
    parts: Sequence[Mapping[str, Local]],
    read_bytes: ReadBytes,
    where: str,
) -> list[dict[str, list[BufferPlace]]]:
    """Finds each parameter's buffer and its place in it.

    `parts` has, for each tensor rank, its parts of the parameters; the result has their places, by
    tensor rank and name. A tied embedding has a second place, for the last stage's copy. Frozen
    parameters have none: if no range of layers fills a buffer, single parameters may be missing.
    Raises UnsupportedCheckpoint if no parameters fit into a buffer, or several ways do. Raises
    InconsistentCheckpoint for a parameter in two buffers, or not in the buffers of all tensor
    ranks.
    """
    last = max(rank.pp for rank in ranks)
    result: list[dict[str, list[BufferPlace]]] = [{} for _ in parts]
    copies = predicts(parts[0])
    for rank in ranks:
        for flats in by_key((flat.dtype, flat) for flat in rank.flats).values():
            for number, flat in enumerate(flats):
                ends = rank.pp == number == 0, rank.pp == last and number == len(flats) - 1
                locals_of_rank = rank.own_parts(parts[rank.tp])
                ways = _ways(flat, locals_of_rank, ends, read_bytes)
                ways = ways or _ways(flat, locals_of_rank, ends, read_bytes, may_lack=True)
                require_one(ways, flat, where)
                for name, place in ways[0]:
                    result[rank.tp].setdefault(name, []).append((flat, place))
    for tp, places_by_name in enumerate(result):
        elsewhere = {*chain(*result)} - {*places_by_name}
        if lost := [name for name in parts[tp] if name in elsewhere]:
            raise InconsistentCheckpoint(
                "partition-does-not-fit",
                f"{where}: no buffer of tensor rank {tp} has {listed(lost, 4)}",
                hint=WEIGHTS_ONLY,
            )
        twice = [
            name
            for name in places_by_name
            if len(places_by_name[name]) > 1
            and name != EMBEDDING
            and not (is_before(name) and copies)
        ]
        if twice:
            raise InconsistentCheckpoint(
                "partition-does-not-fit",
                f"{where}: two buffers of tensor rank {tp} have {listed(twice, 4)}",
                hint=WEIGHTS_ONLY,
            )
    return result


Way = tuple[tuple[str, tuple[int, int]], ...]
Ends = tuple[bool, bool]
"""Whether a model chunk is the first one of the model, and whether it is the last one."""


def require_one(ways: Sequence[object], flat: Flat, where: str) -> None:
    """Raises UnsupportedCheckpoint unless there is exactly one way to fill a buffer."""
    if not ways:
        raise UnsupportedCheckpoint(
            "layout-unknown",
            f"{where}: the parameters of no range of layers fill {flat.name} of "
            f"{sum(flat.sizes)} elements with masters that round to the weights",
            hint=f"zckpt knows the order of a GPTModel's parameters; {WEIGHTS_ONLY}",
        )
    if len(ways) > 1:
        raise UnsupportedCheckpoint(
            "layout-unknown",
            f"{where}: parameters fill {flat.name} in several ways, and the weights do not tell "
            "which one is right",
            hint=f"several weights are equal; {WEIGHTS_ONLY}",
        )


def _ways(
    flat: Flat,
    parts: Mapping[str, Local],
    ends: Ends,
    read_bytes: ReadBytes,
    may_lack: bool = False,
) -> list[Way]:
    """All ways in which the parameters of some range of layers fill a buffer.

    If the buffer `may_lack` parameters, all layers are tried, and each may be missing: parameters
    can be frozen, or on other ranks.
    """
    ways: list[Way] = []
    for locals_by_name in _kinds(flat, parts, ends):
        for order in orders(locals_by_name):
            for names in _ranges(order, locals_by_name, flat, ends, may_lack):
                locals_ = [locals_by_name[name] for name in reversed(names)]
                for starts in places(locals_, flat, read_bytes, may_lack):
                    pairs = zip(locals_, starts, strict=True)
                    way = tuple((own.name, place) for own, place in pairs if place is not None)
                    if way not in ways:
                        ways.append(way)
    return ways


def _kinds(flat: Flat, parts: Mapping[str, Local], ends: Ends) -> list[Mapping[str, Local]]:
    """The parameters that may be in a buffer, because their weights have its type.

    For the end of a model with a tied embedding there is a second set, which adds the copy of the
    embedding as output layer.
    """
    of_type = {name: part for name, part in parts.items() if part.dtype == flat.dtype}
    if ends == (False, True) and OUTPUT not in parts and EMBEDDING in of_type:
        return [of_type, {**of_type, OUTPUT: of_type[EMBEDDING]}]
    return [of_type]


def _ranges(
    order: Sequence[str], parts: Mapping[str, Local], flat: Flat, ends: Ends, may_lack: bool
) -> Iterator[list[str]]:
    """Yields the parameters of every range of layers whose sizes could fill a buffer.

    If the buffer `may_lack` parameters, yields those of all layers once.
    """
    is_first, is_last = ends
    layers = by_key((layer, name) for name in order if (layer := layer_of(name)) is not None)
    outside = [name for name in order if layer_of(name) is None]
    has_embedding = is_first or (is_last and predicts(order))
    before = [name for name in outside if has_embedding and is_before(name)]
    behind = [name for name in outside if is_last and not is_before(name)]
    if may_lack:
        yield [*before, *chain(*layers.values()), *behind]
        return
    count = max(layers, default=-1) + 1
    of_layers = [layers.get(layer, []) for layer in range(count)]
    numels = [sum(parts[name].numel for name in names) for names in of_layers]
    total = sum(flat.sizes) - sum(parts[name].numel for name in (*before, *behind))
    for start in [0] if is_first else range(count + 1):
        for stop in [count] if is_last else range(start, count + 1):
            numel = sum(numels[start:stop])
            if numel > total:
                break
            names = [*before, *chain(*of_layers[start:stop]), *behind]
            if names and total < numel + (len(names) + len(flat.sizes)) * ALIGNMENT:
                yield names
