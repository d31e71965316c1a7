"""Finds the parameters of each flat buffer, and the positions where they begin.

A model-parallel rank has the layers of its pipeline stage: one range of layers for each model
chunk. It has a flat buffer for each chunk and weight type. The first chunk of the first stage also
has the embedding. The last chunk of the last stage also has the last norm and the output layer. No
file states the ranges of layers. zckpt accepts a range if its parameters fill the buffer exactly,
and if the masters round to the weights (placing.py).
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

    `experts` are the numbers of the experts in these buffers, if experts are spread over ranks.
    """

    tp: int
    pp: int
    flats: tuple[Flat, ...]
    experts: range | None = None

    def own_parts(self, parts: Mapping[str, Local]) -> Mapping[str, Local]:
        """The shards that this rank's buffers may contain; `parts` are its tensor rank's shards.

        If experts are spread over ranks, the result has only the shards of this rank's experts.
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
    """Finds each parameter's flat buffer, and its position in this buffer.

    `parts` has each tensor rank's shards by name; the result has their buffers and positions. A
    frozen parameter has no position, an embedding may have two. `where` begins error messages.

    Raises UnsupportedCheckpoint unless every buffer can be filled in exactly one way. Raises
    InconsistentCheckpoint if only some tensor ranks' buffers have a parameter, or if a parameter
    that is not an embedding has two positions.
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
                # no range of complete layers fits: some parameters may be frozen
                ways = ways or _ways(flat, locals_of_rank, ends, read_bytes, may_lack=True)
                require_one(ways, flat, where)
                for name, place in ways[0]:
                    result[rank.tp].setdefault(name, []).append((flat, place))
    for tp, places_by_name in enumerate(result):
        elsewhere = {*chain(*result)} - {*places_by_name}
        if lost := [name for name in parts[tp] if name in elsewhere]:
            raise InconsistentCheckpoint(
                "partition-does-not-fit",
                f"{where}: the optimizer buffers of tensor rank {tp} lack {listed(lost, 4)}, "
                "which other tensor ranks have",
                hint=WEIGHTS_ONLY,
            )
        # the last stage may have replicas of the embedding's parameters
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
                f"{where}: two optimizer buffers of tensor rank {tp} have {listed(twice, 4)}",
                hint=WEIGHTS_ONLY,
            )
    return result


Way = tuple[tuple[str, tuple[int, int]], ...]
Ends = tuple[bool, bool]
"""Whether a model chunk is the first one of the model, and whether it is the last one."""


def require_one(ways: Sequence[object], flat: Flat, where: str) -> None:
    """Raises UnsupportedCheckpoint unless `ways` has exactly one item.

    A way says where each parameter begins in the buffer `flat`. With several ways, zckpt cannot
    know which one is true. `where` begins the error message.
    """
    if not ways:
        raise UnsupportedCheckpoint(
            "layout-unknown",
            f"{where}: zckpt cannot tell which layers are in {flat.name} of "
            f"{sum(flat.sizes)} elements: no range of layers has the weights to which the masters "
            "round",
            hint=f"zckpt knows only the parameter order of a GPTModel; {WEIGHTS_ONLY}",
        )
    if len(ways) > 1:
        raise UnsupportedCheckpoint(
            "layout-unknown",
            f"{where}: zckpt cannot tell where parameters begin in {flat.name}: several positions "
            "fit, because some weights are equal",
            hint=WEIGHTS_ONLY,
        )


def _ways(
    flat: Flat,
    parts: Mapping[str, Local],
    ends: Ends,
    read_bytes: ReadBytes,
    may_lack: bool = False,
) -> list[Way]:
    """All ways in which the parameters of some range of layers fill a buffer exactly.

    With `may_lack`, the buffer may lack parameters that are frozen or on other ranks: the
    parameters of all layers are tried at once, and any of them may be missing.
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
    """The candidate parameters of a buffer: those whose weights have its type.

    `ends` says whether the buffer is of the model's first chunk, and of its last. A last chunk may
    have two sets of candidates: the second has also the replica of a tied embedding.
    """
    of_type = {name: part for name, part in parts.items() if part.dtype == flat.dtype}
    if ends == (False, True) and OUTPUT not in parts and EMBEDDING in of_type:
        return [of_type, {**of_type, OUTPUT: of_type[EMBEDDING]}]
    return [of_type]


def _ranges(
    order: Sequence[str], parts: Mapping[str, Local], flat: Flat, ends: Ends, may_lack: bool
) -> Iterator[list[str]]:
    """Yields the parameter names of every range of layers whose size could fill a buffer.

    With `may_lack`, yields the parameters of all layers once.
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
