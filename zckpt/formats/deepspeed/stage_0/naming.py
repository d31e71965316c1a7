"""Which weight does each parameter of a stage-0 optimizer belong to? Its state has no names.

    stated    by a file of zckpt's: its `param_shapes`
    given     by the user, with --param-names
    place     FP16_Optimizer: the module's weights are views of one buffer per group
    bytes     FP16_UnfusedOptimizer: a master rounds to the module's weight, and to no other
    pieces    FP16_Optimizer of a pipeline or with experts: so does each piece of a flat master
    shape     torch's own optimizer: no other weight has the shape of the states

Where bytes or shapes leave several weights, the order of the module decides: the parameters of a
group are in that order, and only one way to keep it may fit. Otherwise nothing is read.

DeepSpeed 0.19.8, runtime/fp16/fused_optimizer.py and unfused_optimizer.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from typing import Any

from ....core.dtypes import FLOATS, SIZES
from ....core.grouping import by_key
from ....errors import MissingData, WrongOption, listed
from ....files.torchfile import Tensor, TorchFile
from ...deepspeed_states.tensors import is_extra
from ...statedict.matching import HINT, MatchedNames, match
from .samples import TensorInFile, labels

Weights = Mapping[str, TensorInFile]
TRAINED = """\
name the trained parameters with --param-names names.txt, group by group. Two lines in the training \
program, before deepspeed.initialize, write that file:
    names = {p: name for name, p in model.named_parameters()}
    open("names.txt", "w").write("\\n".join(names[p] for g in optimizer.param_groups for p in g["params"] if p.requires_grad))"""  # noqa: E501
"""The hint where the optimizer has masters: frozen parameters have none."""


def by_place(flats: Sequence[TensorInFile], weights: Weights) -> list[list[str]] | None:
    """The names of each flat master's parameters, in the order in which they lie.

    The engine lays a group's 16-bit weights out as one buffer, as long as the flat master, and
    saves them as views of it. None if the file has no such buffer for a group: another program
    saved it again.
    """
    views = by_key((each.tensor.storage.key, name) for name, each in weights.items())
    buffers: list[tuple[list[str], TensorInFile]] = []
    for own in views.values():
        names = sorted(own, key=lambda n: (weights[n].tensor.offset, weights[n].tensor.numel))
        if buffer := _filled([weights[name].tensor for name in names]):
            buffers.append((names, TensorInFile(flats[0].file, buffer)))
    of_buffers, of_flats = labels([buffer for _, buffer in buffers], flats)
    members = by_key((label, names) for label, (names, _) in zip(of_buffers, buffers, strict=True))
    shown = [label for own in of_flats for label in own if len(own) == len(members[label]) == 1]
    if len({*shown}) < len(flats):
        return None
    return [members[label][0] for label in shown]


def _filled(views: Sequence[Tensor]) -> Tensor | None:
    """The buffer that views fill, one behind the other; None if there are gaps."""
    first, total = views[0], 0
    for view in views:
        if not view.contiguous or view.offset != total:
            return None
        total += view.numel
    if total * SIZES[first.dtype] != first.storage.length:
        return None
    return Tensor(first.storage, first.dtype, 0, (total,), (1,))


def by_pieces(flats: Sequence[TensorInFile], weights: Weights) -> MatchedNames:
    """The names of flat masters whose weights are no views: their pieces are whole masters.

    The next elements of a flat master must round to weights of one shape, and to none of another.
    Raises MissingData if they do not, and as `by_bytes`.
    """
    shapes = dict.fromkeys(stored.tensor.shape for stored in weights.values())
    orders: list[list[TensorInFile]] = []
    for flat in flats:
        orders.append([])
        start = 0
        while left := flat.tensor.numel - start:
            near = [_piece(flat, start, shape) for shape in shapes if 0 < prod(shape) <= left]
            _, rounded = labels([*weights.values()], near)
            found = [piece for piece, own in zip(near, rounded, strict=True) if own]
            if len(found) != 1:
                raise MissingData(
                    f"{flat.file.path}: the optimizer's state has no names, and a piece of its "
                    "masters rounds to no weight, or to weights of several shapes",
                    hint=TRAINED,
                )
            orders[-1] += found
            start += found[0].tensor.numel
    return by_bytes(orders, weights)


def _piece(flat: TensorInFile, start: int, shape: tuple[int, ...]) -> TensorInFile:
    """The elements of a flat tensor from `start` on, as a tensor of this shape."""
    whole = flat.tensor
    strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    piece = Tensor(whole.storage, whole.dtype, whole.offset + start, shape, strides)
    return TensorInFile(flat.file, piece)


def by_bytes(orders: Sequence[Sequence[TensorInFile]], weights: Weights) -> MatchedNames:
    """The names of whole masters: each has the bytes of its weight once it is rounded.

    Raises MissingData with the names of the weights that cannot be told apart.
    """
    masters = [master for order in orders for master in order]
    of_weights, of_masters = labels(list(weights.values()), masters)
    for number, (master, own) in enumerate(zip(masters, of_masters, strict=True)):
        if len(own) != 1:
            raise MissingData(
                f"{master.file.path}: master {number} of the optimizer, of shape "
                f"{list(master.tensor.shape)}, "
                + ("rounds to no weight" if not own else "rounds to weights of several types")
                + " of the module",
                hint=TRAINED,
            )
    remaining = iter(own[0] for own in of_masters)
    labelled = [[next(remaining) for _ in order] for order in orders]
    path = masters[0].file.path if masters else ""
    return _named(path, labelled, list(zip(weights, of_weights, strict=True)), "bytes")


def by_shape(
    path: str, orders: Sequence[Sequence[tuple[int, ...] | None]], weights: Weights
) -> MatchedNames:
    """The names of parameters of which only shapes are known; None for one without state.

    Raises MissingData as `by_bytes`.
    """
    return _named(path, orders, [*shapes_of(weights).items()], "shape")


def weights_in(
    module: Iterable[tuple[str, TorchFile, Any]], hidden: Collection[str]
) -> dict[str, TensorInFile]:
    """What an optimizer may have of a module: weights, each place in memory once, none `hidden`.

    These are names of buffers, and second names.
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


def shapes_of(weights: Weights) -> dict[str, tuple[int, ...]]:
    """The shapes of weights, by their names."""
    return {name: weight.tensor.shape for name, weight in weights.items()}


def _named(
    path: str, orders: Sequence[Sequence[Any]], names: Sequence[tuple[str, Any]], what: str
) -> MatchedNames:
    """The names of all parameters, if there is one way; `what` equal labels mean.

    A group all of whose labels are unique may be in any order, and a whole group that has another
    must be in the module's. Raises MissingData with the names of the weights that cannot be told
    apart.
    """
    numbers = Counter(label for order in orders for label in order)
    owners = by_key((label, name) for name, label in names)
    certain = {
        place: [owners[label][0] for label in order]
        for place, order in enumerate(orders)
        if all(
            label is not None and numbers[label] == len(owners.get(label, ())) == 1
            for label in order
        )
    }
    taken = {name for own in certain.values() for name in own}
    unclear = [order for place, order in enumerate(orders) if place not in certain]
    try:
        matched = match(unclear, [named for named in names if named[0] not in taken], True)
    except MissingData as error:
        hint = HINT if what == "shape" else TRAINED
        alike = [
            name
            for label in dict.fromkeys(label for order in unclear for label in order)
            if label is not None and max(numbers[label], len(owners.get(label, ()))) > 1
            for name in owners.get(label, ())
        ]
        why = f"does not show the {what} of every parameter"
        if alike:
            why = f"{listed(alike, 6)} have equal {what}, which the order of the module does not "
            why += "tell apart"
        raise MissingData(
            f"{path}: the optimizer's state has no names, and {why}", hint=hint
        ) from error
    others = iter(matched.names)
    chosen = [certain[n] if n in certain else next(others) for n in range(len(orders))]
    return MatchedNames(chosen, matched.inferred)


def cut(
    flats: Sequence[TensorInFile], weights: Weights, param_names: Sequence[str]
) -> list[Sequence[str]]:
    """The user's names, cut into the groups of flat masters; raises WrongOption.

    They are those of the trained parameters, in the order of the groups. No piece of a master may
    round to the weight of another name.
    """
    if unknown := [name for name in param_names if name not in weights]:
        raise WrongOption(
            f"--param-names names {listed(unknown, 4)}, which the model's state does not have"
        )
    groups: list[Sequence[str]] = []
    masters: list[TensorInFile] = []
    rest = param_names
    for flat in flats:
        start = count = 0
        while start < flat.tensor.numel and count < len(rest):
            tensor = weights[rest[count]].tensor
            masters.append(_piece(flat, start, tensor.shape))
            start, count = start + tensor.numel, count + 1
        groups.append(rest[:count])
        rest = rest[count:]
        if start != flat.tensor.numel:
            break
    else:
        if not rest:
            check_rounding(masters, param_names, weights, strict=are_apart(flats[0], weights))
            return groups
    raise WrongOption(
        f"--param-names: these weights do not fill the groups of {flats[0].file.path}, which have "
        f"{listed([flat.tensor.numel for flat in flats])} elements",
        hint="name the trained parameters alone, group by group, in the optimizer's order",
    )


def are_apart(master: TensorInFile, weights: Weights) -> bool:
    """Whether weights are in other files than the masters, as those of a pipeline's layers are."""
    return any(weight.file is not master.file for weight in weights.values())


def check_rounding(
    masters: Sequence[TensorInFile], names: Sequence[str], weights: Weights, *, strict: bool
) -> None:
    """Raises WrongOption if the user gives a master's name to another one.

    Unless `strict`, a master that rounds to no weight is taken: a program may have changed the
    weights since.
    """
    of_weights, of_masters = labels([*weights.values()], masters)
    known = dict(zip(weights, of_weights, strict=True))
    for master, name, fitting in zip(masters, names, of_masters, strict=True):
        others = [other for other, label in known.items() if label in fitting]
        if (others or strict) and name not in others:
            raise WrongOption(
                f"--param-names: the master at the place of {name} in {master.file.path} is that "
                f"of {others[0] if others else 'no weight'}, as the weights show",
                hint="name the trained parameters in the optimizer's order, group by group",
            )
