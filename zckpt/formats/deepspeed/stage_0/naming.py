"""Finds the parameter names of a stage-0 optimizer, whose state has only numbers for parameters.

The first way in this table that applies decides:

    stated    the file was written by zckpt, and lists names: `param_shapes`
    given     the user gives the names: --param-names
    views     FP16_Optimizer: the module's weights are views of one buffer per group
    bytes     a master, or a piece of a flat master, rounds to exactly one of the module's weights
    listed    torch's own optimizer has names: `param_names`
    shapes    torch's own optimizer: exactly one weight has the shape of the states

If several weights have the same bytes or shape, the order of the module decides: the parameters of
a group are listed in that order. If several assignments keep that order, the optimizer is refused.

DeepSpeed 0.19.8, runtime/fp16/fused_optimizer.py and unfused_optimizer.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, chain, islice, pairwise
from math import prod
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from ....core.checkpoint.dtypes import FLOATS, SIZES
from ....core.grouping import by_key
from ....core.storage.fragments import row_major
from ....errors import InconsistentCheckpoint, MissingData, WrongOption, listed
from ....files.torchfile import Tensor, TorchFile
from ...deepspeed_states.manifest import INFERRED
from ...deepspeed_states.states import FLAT_MASTERS, EngineStates
from ...deepspeed_states.tensors import is_extra
from ...statedict.matching import HINT, match
from ..layer_names import LayerName, untied_layers
from .numbers import Groups, Shape, numbers_of
from .samples import TensorInFile, alike, labels

Weights = Mapping[str, TensorInFile]
Members = Sequence[Sequence[str | None]]
"""The names of each group's parameters, in the optimizer's order; None for a frozen one."""
TRAINED = """\
name the trained parameters with --param-names names.txt, group by group. Two lines in the training \
program, before deepspeed.initialize, write that file:
    names = {p: name for name, p in model.named_parameters()}
    open("names.txt", "w").write("\\n".join(names[p] for g in optimizer.param_groups for p in g["params"] if p.requires_grad))"""  # noqa: E501
"""A hint: how to name an optimizer's parameters, without frozen ones, which have no masters."""


class Named(NamedTuple):
    """The names that were found: `members` has each group's names in the optimizer's order.

    Names in `inferred` are less certain: only the order of the module's weights shows which
    parameter has which name.
    """

    members: Members
    inferred: Sequence[str]


class Nameless(Struct, frozen=True):
    """An optimizer whose state has numbers in place of names, and what may show the names.

    groups         what the state has under each number, by group
    weights        weights that may be the optimizer's parameters, by name
    is_flat        whether each group has one flat master (FP16_Optimizer)
    stated_names   each group's names, if zckpt wrote the file
    inferred       the stated names that zckpt had only inferred
    given          the user's names: a list per group if masters are flat, else one list
    """

    path: str
    groups: Groups
    weights: Weights
    is_flat: bool = False
    stated_names: Sequence[Iterable[str]] | None = None
    inferred: Sequence[str] = ()
    given: Sequence[Sequence[str]] | None = None

    @classmethod
    def of(cls, states: EngineStates, weights: Weights) -> Nameless:
        first, groups = states.first, numbers_of(states)
        inferred, is_flat = first.get(INFERRED) or (), FLAT_MASTERS in first
        path = states.optimizers[0].path
        return cls(path, groups, weights, is_flat, states.listed_shapes, inferred)

    @property
    def masters(self) -> list[list[TensorInFile]]:
        """The masters of each group."""
        return [[number.master for number in own if number.master] for own in self.groups]

    @property
    def flats(self) -> list[TensorInFile]:
        return [*chain.from_iterable(self.masters)]

    @property
    def is_apart(self) -> bool:
        """Whether any weight is in another file than the masters: a layer's or an expert's file."""
        return any(weight.file is not self.flats[0].file for weight in self.weights.values())

    def missing(self, why: str) -> MissingData:
        said = f"{self.path}: the optimizer's state has no names, and {why}"
        return MissingData("names-needed", said, hint=TRAINED, file=self.path)


def names_of(
    every: Sequence[EngineStates], weights: Weights, param_names: Sequence[str] | None
) -> list[Named]:
    """The names of each optimizer's parameters; `every` has one item per optimizer.

    `param_names` are the user's names, one optimizer after another. Raises MissingData (nothing
    shows the names), WrongOption (the user's names do not fit) and InconsistentCheckpoint (a file
    states names that are not among `weights`).
    """
    asked = [Nameless.of(states, weights) for states in every]
    if param_names is not None and not any(each.stated_names for each in asked):
        shares = shared_out(asked, param_names)
        asked = [replace(each, given=own) for each, own in zip(asked, shares, strict=True)]
    try:
        return [*map(named, asked)]
    except MissingData:
        if param_names is not None or (names_of_all := of_stages(asked)) is None:
            raise
        return names_of_all


def named(asked: Nameless) -> Named:
    """The names of an optimizer's parameters; raises the same errors as `names_of`."""
    return next(found for way in WAYS if (found := way(asked)) is not None)


# -- names that a file or the user states


def by_file(asked: Nameless) -> Named | None:
    """The parameter names that zckpt wrote into the optimizer's file; None without such names."""
    if not asked.stated_names:
        return None
    members: Members = [[*own] for own in asked.stated_names]
    if not asked.is_flat:
        members = _with_frozen(asked.groups, asked.stated_names)
    if asked.weights:  # no weights: this is a stage whose layers are not written yet
        _check_known(asked, members)
    return Named(members, [*asked.inferred])


def by_user(asked: Nameless) -> Named | None:
    """The names that the user gives with --param-names; None without that option.

    Raises WrongOption if a master rounds to the weight of another name.
    """
    if asked.given is None:
        return None
    shapes, names = shapes_of(asked.weights), [*chain.from_iterable(asked.given)]
    if asked.is_flat:
        pieces: list[TensorInFile] = []
        for flat, names_of_group in zip(asked.flats, asked.given, strict=True):
            starts = accumulate((prod(shapes[name]) for name in names_of_group), initial=0)
            pieces += [
                _piece(flat, n, shapes[name])
                for name, n in zip(names_of_group, starts, strict=False)
            ]
        check_rounding(pieces, names, asked.weights, strict=asked.is_apart)
        return Named(asked.given, [])
    orders = [[number.shape for number in own] for own in asked.groups]
    matched = match(orders, [*shapes.items()], True, names)
    if asked.flats:
        check_rounding(asked.flats, names, asked.weights, strict=False)
    return Named(_without_frozen(asked.groups, matched.names), [])


def by_torch(asked: Nameless) -> Named | None:
    """The names in torch's own optimizer's state; None unless all trained parameters have one."""
    trained = [[number.name for number in own if not number.is_frozen] for own in asked.groups]
    if not all(chain.from_iterable(trained)):
        return None
    members = _with_frozen(asked.groups, trained)
    _check_known(asked, members)
    return Named(members, [])


def _with_frozen(groups: Groups, trained: Iterable[Iterable[str | None]]) -> Members:
    """Inserts None into each group's names where the optimizer lists a frozen parameter.

    `trained` has the names of each group's trained parameters only.
    """
    return [
        [None if number.is_frozen else next(names, None) for number in group]
        for group, names in zip(groups, map(iter, trained), strict=True)
    ]


def _without_frozen(groups: Groups, names: Sequence[Sequence[str]]) -> Members:
    """Replaces the names of frozen parameters by None; `names` has names of all parameters."""
    return [
        [None if number.is_frozen else name for number, name in zip(group, numbers, strict=True)]
        for group, numbers in zip(groups, names, strict=True)
    ]


def _check_known(asked: Nameless, members: Members) -> None:
    if unknown := [n for own in members for n in own if n and n not in asked.weights]:
        raise InconsistentCheckpoint(
            "mixed-saves",
            f"{asked.path}: the optimizer has {listed(unknown)}, but the module does not",
            file=asked.path,
        )


def shared_out(asked: Sequence[Nameless], param_names: Sequence[str]) -> list[list[Sequence[str]]]:
    """Distributes the user's names over the optimizers, and over the groups if masters are flat.

    Raises WrongOption if there are too few or too many names, or if the named weights are not of
    the masters' sizes.
    """
    weights = asked[0].weights
    if not asked[0].is_flat:
        *counts, last = [sum(map(len, each.groups)) for each in asked]
        if counts and sum(counts) + last != len(param_names):
            raise WrongOption(
                "names-do-not-fit",
                f"--param-names names {len(param_names)} parameters, and the optimizers of the "
                f"stages have {' + '.join(map(str, [*counts, last]))}",
            )
        ends = [*accumulate(counts, initial=0), len(param_names)]
        return [[param_names[start:stop]] for start, stop in pairwise(ends)]
    if unknown := [name for name in param_names if name not in weights]:
        raise WrongOption(
            "names-do-not-fit",
            f"--param-names names {listed(unknown, 4)}, which the model's state does not have",
        )
    lengths = [flat.tensor.numel for each in asked for flat in each.flats]
    starts = [*accumulate((weights[name].tensor.numel for name in param_names), initial=0)]
    ends = [*accumulate(lengths, initial=0)]
    groups = [
        [name for name, place in zip(param_names, starts, strict=False) if start <= place < stop]
        for start, stop in pairwise(ends)
    ]
    if not {*starts} >= {*ends} or sum(map(len, groups)) < len(param_names):
        raise WrongOption(
            "names-do-not-fit",
            f"--param-names: these weights do not fill the groups of {asked[0].path}, which "
            f"have {listed(lengths)} elements",
            hint="name only the trained parameters, group by group, in the optimizer's order",
        )
    of_flats = iter(groups)
    return [[*islice(of_flats, len(each.flats))] for each in asked]


def check_rounding(
    masters: Sequence[TensorInFile], names: Sequence[str], weights: Weights, *, strict: bool
) -> None:
    """Raises WrongOption if the user gives a master the name of a weight it does not round to.

    A program may have changed its weights after the last update, so a master that rounds to no
    weight at all is accepted, except with `strict`.
    """
    of_weights, of_masters = labels([*weights.values()], masters)
    labels_by_name = dict(zip(weights, of_weights, strict=True))
    for master, name, fitting in zip(masters, names, of_masters, strict=True):
        fitting_names = [other for other, label in labels_by_name.items() if label in fitting]
        if (fitting_names or strict) and name not in fitting_names:
            raise WrongOption(
                "names-do-not-fit",
                f"--param-names gives the name {name} to a master in {master.file.path}, but the "
                "master rounds to the weight "
                f"{fitting_names[0] if fitting_names else 'of no parameter'}",
                hint="name the trained parameters in the optimizer's order, group by group",
            )


# -- by bytes


def by_views(asked: Nameless) -> Named | None:
    """Finds the names of the parameters in flat masters, by the order of weights in shared buffers.

    FP16_Optimizer saves a group's 16-bit weights as views of one buffer. None if masters are not
    flat, or if weights are in other files. Raises MissingData if the weights no longer share
    buffers.
    """
    if not asked.is_flat or asked.is_apart:
        return None
    tensors = {name: weight.tensor for name, weight in asked.weights.items()}
    in_order = sorted(tensors, key=lambda name: (tensors[name].offset, tensors[name].numel))
    views = by_key((tensors[name].storage.key, name) for name in in_order)
    filled = [(_filled([tensors[n] for n in names]), names) for names in views.values()]
    file = asked.flats[0].file
    buffers = [(TensorInFile(file, buffer), names) for buffer, names in filled if buffer]
    # a buffer has the bytes of the rounded flat master, and thus the parameters in the same order
    of_buffers, of_flats = labels([buffer for buffer, _ in buffers], asked.flats)
    members = by_key((label, names) for label, (_, names) in zip(of_buffers, buffers, strict=True))
    shown = [label for own in of_flats for label in own if len(own) == len(members[label]) == 1]
    if len({*shown}) < len(asked.flats):  # another program has saved the file again
        raise asked.missing(
            "the module's weights do not show the names: they are no longer views of the groups' "
            "flat buffers"
        )
    return Named([members[label][0] for label in shown], [])


def _filled(views: Sequence[Tensor]) -> Tensor | None:
    """The buffer whose elements the views cover without gaps; None if there are gaps."""
    storage, dtype = views[0].storage, views[0].dtype
    *starts, total = accumulate((view.numel for view in views), initial=0)
    are_next = all(v.contiguous and v.offset == n for v, n in zip(views, starts, strict=True))
    is_full = are_next and total * SIZES[dtype] == storage.length
    return Tensor(storage, dtype, 0, (total,), (1,)) if is_full else None


def by_bytes(asked: Nameless) -> Named | None:
    """Finds names by bytes: a master, rounded, has the bytes of its weight.

    None if the optimizer has no masters. Raises MissingData for a master that rounds to no weight,
    or to weights of several types.
    """
    orders = asked.masters
    if asked.is_flat:
        orders = [cut(asked, flat) for flat in asked.flats]
    if not (masters := [*chain.from_iterable(orders)]):
        return None
    of_weights, of_masters = labels([*asked.weights.values()], masters)
    for number, (master, possible_labels) in enumerate(zip(masters, of_masters, strict=True)):
        if len(possible_labels) != 1:
            which = "weights of several types" if possible_labels else "no weight"
            raise MissingData(
                "names-needed",
                f"{asked.path}: master {number} of the optimizer, of shape "
                f"{list(master.tensor.shape)}, rounds to {which} of the module",
                hint=TRAINED,
                file=asked.path,
            )
    remaining = iter(own[0] for own in of_masters)
    labelled = [[next(remaining) for _ in order] for order in orders]
    return _matched(asked, labelled, dict(zip(asked.weights, of_weights, strict=True)), "bytes")


def cut(asked: Nameless, flat: TensorInFile) -> list[TensorInFile]:
    """Cuts a flat master into the masters of its parameters.

    The parameters lie one after another. To find where the next one ends, the shapes of all weights
    are tried: for exactly one shape, the next elements must round to a weight. Raises MissingData
    otherwise.
    """
    weights = [*asked.weights.values()]
    shapes = dict.fromkeys(stored.tensor.shape for stored in weights)
    pieces: list[TensorInFile] = []
    start = 0
    while left := flat.tensor.numel - start:
        near = [_piece(flat, start, shape) for shape in shapes if 0 < prod(shape) <= left]
        _, rounded = labels(weights, near)
        fitting = [piece for piece, own in zip(near, rounded, strict=True) if own]
        if len(fitting) != 1:
            raise asked.missing(
                "a part of a flat master rounds to no weight of the module, or to weights of "
                "several shapes"
            )
        pieces += fitting
        start += fitting[0].tensor.numel
    return pieces


def _piece(flat: TensorInFile, start: int, shape: Shape) -> TensorInFile:
    whole = flat.tensor
    piece = Tensor(whole.storage, whole.dtype, whole.offset + start, shape, row_major(shape))
    return TensorInFile(flat.file, piece)


# -- by shapes and the order of the module


def by_shapes(asked: Nameless) -> Named:
    """Finds names by shape: an optimizer state has the shape of exactly one weight.

    For torch's own optimizer, which has no masters.
    """
    trained = [[number.shape for number in own if not number.is_frozen] for own in asked.groups]
    matched = _matched(asked, trained, shapes_of(asked.weights), "shape")
    return Named(_with_frozen(asked.groups, matched.members), matched.inferred)


WAYS = (by_file, by_user, by_views, by_bytes, by_torch, by_shapes)


def of_stages(asked: Sequence[Nameless]) -> list[Named] | None:
    """The names in the optimizers of a pipeline, found as if its stages were one optimizer.

    None if this is not possible, for example if an optimizer has masters, if shapes are ambiguous,
    or if two layers have equal weights.
    """
    counts = {len(each.groups) for each in asked}
    if len(asked) == 1 or len(counts) > 1 or any(each.flats for each in asked):
        return None
    parts = ((LayerName.of(name), weight) for name, weight in asked[0].weights.items())
    layers = by_key((part.number, (part.inner, weight)) for part, weight in parts)
    if len(alike({number: dict(own) for number, own in layers.items()})) < len(layers):
        return None  # equal layers may be copies of one tied layer
    stages = zip(*(each.groups for each in asked), strict=True)
    whole = replace(asked[0], groups=[[*chain.from_iterable(own)] for own in stages])
    try:
        members, inferred = _by_module_order(whole) or by_shapes(whole)
    except MissingData:
        return None
    remaining = [*map(iter, members)]
    names = [
        [
            [*islice(remaining_names, len(group))]
            for remaining_names, group in zip(remaining, asked_of_stage.groups, strict=True)
        ]
        for asked_of_stage in asked
    ]
    layers_of_stages = [untied_layers(filter(None, chain.from_iterable(own))) for own in names]
    if any(
        max(own) >= min(following) for own, following in pairwise(filter(None, layers_of_stages))
    ):
        return None
    return [Named(own, inferred) for own in names]


def _by_module_order(asked: Nameless) -> Named | None:
    """Finds names by shapes and the module's order; None if several names fit.

    Frozen parameters must have a number in the optimizer's state too, in the same order.
    """
    orders = [[number.shape for number in own] for own in asked.groups]
    try:
        matched = match(orders, [*shapes_of(asked.weights).items()], True)
    except MissingData:
        return None
    return Named(_without_frozen(asked.groups, matched.names), matched.inferred)


def _matched(
    asked: Nameless, orders: Sequence[Sequence[Any]], labelled: Mapping[str, Any], what: str
) -> Named:
    """Finds each parameter's name: that of the weight with the same label.

    `orders` has the labels of each group's parameters, `labelled` those of the weights, in the
    module's order. A label is a shape, or a label of samples.py; `what` describes it in errors.
    Raises MissingData if a name stays unclear.
    """
    numbers = Counter(chain.from_iterable(orders))
    owners = by_key((label, name) for name, label in labelled.items())
    unique = {n: own[0] for n, own in owners.items() if numbers[n] == len(own) == 1}
    # groups with unique labels may be in any order, all others must be in the module's order
    certain = {
        place: [unique[label] for label in order]
        for place, order in enumerate(orders)
        if unique.keys() >= {*order}
    }
    taken = {*chain.from_iterable(certain.values())}
    unclear = [order for place, order in enumerate(orders) if place not in certain]
    try:
        matched = match(unclear, [item for item in labelled.items() if item[0] not in taken], True)
    except MissingData as error:
        unclear_labels = [n for n in dict.fromkeys(chain.from_iterable(unclear)) if n not in unique]
        equal = [name for label in unclear_labels for name in owners.get(label, ())]
        why = f"does not show the {what} of every parameter"
        if equal:
            order = "and the order of the module does not show which is which"
            why = f"{listed(equal, 6)} have equal {what}, {order}"
        said = f"{asked.path}: the optimizer's state has no names, and {why}"
        raise MissingData(
            "names-needed", said, hint=HINT if what == "shape" else TRAINED
        ) from error
    remaining = iter(matched.names)
    chosen = [certain[n] if n in certain else next(remaining) for n in range(len(orders))]
    return Named(chosen, matched.inferred)


# -- the weights of a module


def weights_in(
    module: Iterable[tuple[str, TorchFile, Any]], hidden: Collection[str]
) -> dict[str, TensorInFile]:
    """The weights an optimizer could train: one name per storage, without `hidden` names.

    `module` has (name, file that contains the value, value) for each value in the module's state
    dict. `hidden` are the names of buffers, and second names of tied weights.
    """
    places: dict[object, str] = {}
    weights: dict[str, TensorInFile] = {}
    for name, file, value in module:
        if name in hidden or is_extra(name, value) or value.dtype not in FLOATS:
            continue
        place = (file.path, value.place, value.shape, value.strides) if value.numel else name
        if name not in weights and places.setdefault(place, name) == name:
            weights[name] = TensorInFile(file, value)
    return weights


def shapes_of(weights: Weights) -> dict[str, Shape]:
    return {name: weight.tensor.shape for name, weight in weights.items()}
