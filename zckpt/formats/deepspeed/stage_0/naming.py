"""Which weight does each parameter of a stage-0 optimizer belong to? Its state has no names.

    stated    by a file of zckpt's: its `param_shapes`; by torch's own optimizer: `param_names`
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
from itertools import accumulate, chain
from math import prod
from typing import Any

from ....core.dtypes import FLOATS, SIZES
from ....core.fragments import row_major
from ....core.grouping import by_key
from ....errors import InconsistentCheckpoint, MissingData, WrongOption, listed
from ....files.torchfile import Tensor, TorchFile
from ...deepspeed_states.manifest import INFERRED
from ...deepspeed_states.states import (
    FLAT_MASTERS,
    EngineStates,
    wrapper_of,
)
from ...deepspeed_states.tensors import is_extra
from ...statedict.matching import HINT, MatchedNames, match
from .numbers import Groups, Shape, numbers_of
from .samples import TensorInFile, labels

Weights = Mapping[str, TensorInFile]
Members = Sequence[Sequence[str | None]]
"""The names of each group's parameters, in the optimizer's order; None for a frozen one."""
TRAINED = """\
name the trained parameters with --param-names names.txt, group by group. Two lines in the training \
program, before deepspeed.initialize, write that file:
    names = {p: name for name, p in model.named_parameters()}
    open("names.txt", "w").write("\\n".join(names[p] for g in optimizer.param_groups for p in g["params"] if p.requires_grad))"""  # noqa: E501
"""The hint where the optimizer has masters: frozen parameters have none."""


def members_of(
    every: Sequence[EngineStates], weights: Weights, param_names: Sequence[str] | None
) -> list[tuple[Members, Sequence[str]]]:
    """The names of each optimizer's parameters by group, and those of them that are inferred.

    The user's `param_names` are those of all optimizers, one after another. Raises MissingData if
    nothing shows names, WrongOption for names of the user that do not fit, InconsistentCheckpoint
    if a file states names that are not among `weights`.
    """
    of_each = [numbers_of(states) for states in every]
    is_flat = any(FLAT_MASTERS in states.first for states in every)
    are_stated = any(states.listed_shapes for states in every)
    if param_names is not None and not are_stated:
        given = iter(given_to(of_each, weights, param_names, is_flat))
        return [([next(given) for _ in groups], []) for groups in of_each]
    named: list[tuple[Members, Sequence[str]]] = []
    for states, groups in zip(every, of_each, strict=True):
        stated = states.listed_shapes
        if not stated:
            named.append(by_files(states, groups, weights))
            continue
        members = [*map(list, stated)] if is_flat else _with_frozen(groups, stated)
        if weights:  # or this is a stage whose layers are not there yet
            _check_known(states, members, weights)
        named.append((members, list(states.first.get(INFERRED) or ())))
    return named


def by_files(
    states: EngineStates, groups: Groups, weights: Weights
) -> tuple[Members, Sequence[str]]:
    """The names of these groups of an optimizer, as the files show them; raises as `members_of`."""
    path = states.optimizers[0].path
    masters = [[number.master for number in own if number.master] for own in groups]
    if FLAT_MASTERS in states.first:
        flats = [*chain.from_iterable(masters)]
        if are_apart(flats[0], weights):
            return by_pieces(flats, weights)
        if names := by_place(flats, weights):
            return names, []
        raise MissingData(
            "names-needed",
            f"{path}: the optimizer's state has no names, and the module's weights no longer lie "
            "in its groups' buffers, which show them",
            hint=TRAINED,
            file=path,
        )
    if wrapper_of(states.first) is not None:
        return by_bytes(masters, weights)
    trained = [[number for number in own if not number.is_frozen] for own in groups]
    if all(number.name for own in groups for number in own):
        members = _with_frozen(groups, [[number.name for number in own] for own in trained])
        _check_known(states, members, weights)
        return members, []
    shapes = [[number.shape for number in own] for own in trained]
    names, inferred = _named(path, shapes, shapes_of(weights), "shape")
    return _with_frozen(groups, names), inferred


def _with_frozen(groups: Groups, trained: Iterable[Iterable[str | None]]) -> Members:
    """The names of what is trained, with None in the places of frozen parameters."""
    return [
        [None if number.is_frozen else next(names, None) for number in group]
        for group, names in zip(groups, map(iter, trained), strict=True)
    ]


def _check_known(states: EngineStates, members: Members, weights: Weights) -> None:
    if unknown := [name for own in members for name in own if name and name not in weights]:
        path = states.optimizers[0].path
        raise InconsistentCheckpoint(
            "mixed-saves", f"{path}: the module has no weights {listed(unknown)}", file=path
        )


# -- by place, bytes or shape


def by_place(flats: Sequence[TensorInFile], weights: Weights) -> list[list[str]] | None:
    """The names of each flat master's parameters, in the order in which they lie.

    The engine lays a group's 16-bit weights out as one buffer, as long as the flat master, and
    saves them as views of it. None if the file has no such buffer for a group: another program
    saved it again.
    """
    tensors = {name: weight.tensor for name, weight in weights.items()}
    in_order = sorted(tensors, key=lambda name: (tensors[name].offset, tensors[name].numel))
    views = by_key((tensors[name].storage.key, name) for name in in_order)
    filled = [(_filled([tensors[n] for n in names]), names) for names in views.values()]
    buffers = [(TensorInFile(flats[0].file, each), names) for each, names in filled if each]
    of_buffers, of_flats = labels([buffer for buffer, _ in buffers], flats)
    members = by_key((label, names) for label, (_, names) in zip(of_buffers, buffers, strict=True))
    shown = [label for own in of_flats for label in own if len(own) == len(members[label]) == 1]
    if len({*shown}) < len(flats):
        return None
    return [members[label][0] for label in shown]


def _filled(views: Sequence[Tensor]) -> Tensor | None:
    """The buffer that views fill, one behind the other; None if there are gaps."""
    storage, dtype = views[0].storage, views[0].dtype
    *starts, total = accumulate((view.numel for view in views), initial=0)
    are_next = all(v.contiguous and v.offset == n for v, n in zip(views, starts, strict=True))
    is_full = are_next and total * SIZES[dtype] == storage.length
    return Tensor(storage, dtype, 0, (total,), (1,)) if is_full else None


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
                    "names-needed",
                    f"{flat.file.path}: the optimizer's state has no names, and a piece of its "
                    "masters rounds to no weight, or to weights of several shapes",
                    hint=TRAINED,
                    file=flat.file.path,
                )
            orders[-1] += found
            start += found[0].tensor.numel
    return by_bytes(orders, weights)


def _piece(flat: TensorInFile, start: int, shape: Shape) -> TensorInFile:
    """The elements of a flat tensor from `start` on, as a tensor of this shape."""
    whole = flat.tensor
    piece = Tensor(whole.storage, whole.dtype, whole.offset + start, shape, row_major(shape))
    return TensorInFile(flat.file, piece)


def by_bytes(orders: Sequence[Sequence[TensorInFile]], weights: Weights) -> MatchedNames:
    """The names of whole masters: each has the bytes of its weight once it is rounded.

    Raises MissingData with the names of the weights that cannot be told apart.
    """
    masters = [*chain.from_iterable(orders)]
    of_weights, of_masters = labels([*weights.values()], masters)
    for number, (master, own) in enumerate(zip(masters, of_masters, strict=True)):
        if len(own) != 1:
            which = "weights of several types" if own else "no weight"
            raise MissingData(
                "names-needed",
                f"{master.file.path}: master {number} of the optimizer, of shape "
                f"{list(master.tensor.shape)}, rounds to {which} of the module",
                hint=TRAINED,
                file=master.file.path,
            )
    remaining = iter(own[0] for own in of_masters)
    labelled = [[next(remaining) for _ in order] for order in orders]
    path = masters[0].file.path if masters else ""
    return _named(path, labelled, dict(zip(weights, of_weights, strict=True)), "bytes")


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


def shapes_of(weights: Weights) -> dict[str, Shape]:
    return {name: weight.tensor.shape for name, weight in weights.items()}


def _named(
    path: str, orders: Sequence[Sequence[Any]], labelled: Mapping[str, Any], what: str
) -> MatchedNames:
    """The names of all parameters, if there is one way; `what` equal labels mean.

    `labelled` are the labels of weights by their names, in the module's order. A group all of whose
    labels are unique may be in any order, and a whole group that has another must be in the
    module's. Raises MissingData with the names of the weights that cannot be told apart.
    """
    numbers = Counter(chain.from_iterable(orders))
    owners = by_key((label, name) for name, label in labelled.items())
    unique = {n: own[0] for n, own in owners.items() if numbers[n] == len(own) == 1}
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
        others = [n for n in dict.fromkeys(chain.from_iterable(unclear)) if n not in unique]
        alike = [name for label in others for name in owners.get(label, ())]
        why = f"does not show the {what} of every parameter"
        if alike:
            order = "which the order of the module does not tell apart"
            why = f"{listed(alike, 6)} have equal {what}, {order}"
        said = f"{path}: the optimizer's state has no names, and {why}"
        raise MissingData(
            "names-needed", said, hint=HINT if what == "shape" else TRAINED
        ) from error
    remaining = iter(matched.names)
    chosen = [certain[n] if n in certain else next(remaining) for n in range(len(orders))]
    return MatchedNames(chosen, matched.inferred)


def given_to(
    every: Sequence[Groups], weights: Weights, param_names: Sequence[str], is_flat: bool
) -> Members:
    """The user's names by group, those of all optimizers one after another; raises WrongOption."""
    numbers = [*chain.from_iterable(every)]
    masters = [number.master for own in numbers for number in own if number.master]
    if is_flat:
        return cut(masters, weights, param_names)
    counts = [sum(map(len, groups)) for groups in every]
    if counts[1:] and sum(counts) != len(param_names):
        raise WrongOption(
            "names-do-not-fit",
            f"--param-names names {len(param_names)} parameters, and the optimizers of the stages "
            f"have {' + '.join(map(str, counts))}",
        )
    shapes, rest, names = [*shapes_of(weights).items()], param_names, list[list[str]]()
    for groups, count in zip(every, counts, strict=True):  # several may have one tied weight
        orders = [[number.shape for number in own] for own in groups]
        names += match(orders, shapes, True, rest[:count] if counts[1:] else rest).names
        rest = rest[count:]
    if masters:
        check_rounding(masters, param_names, weights, strict=False)
    return [
        [None if number.is_frozen else name for number, name in zip(own, called, strict=True)]
        for own, called in zip(numbers, names, strict=True)
    ]


def cut(
    flats: Sequence[TensorInFile], weights: Weights, param_names: Sequence[str]
) -> list[Sequence[str]]:
    """The user's names, cut into the groups of flat masters; raises WrongOption.

    They are those of the trained parameters, in the order of the groups. No piece of a master may
    round to the weight of another name.
    """
    if unknown := [name for name in param_names if name not in weights]:
        raise WrongOption(
            "names-do-not-fit",
            f"--param-names names {listed(unknown, 4)}, which the model's state does not have",
        )
    groups: list[Sequence[str]] = []
    pieces: list[TensorInFile] = []
    fits = True
    for flat in flats:
        first, start = len(pieces), 0
        while start < flat.tensor.numel and len(pieces) < len(param_names):
            tensor = weights[param_names[len(pieces)]].tensor
            pieces.append(_piece(flat, start, tensor.shape))
            start += tensor.numel
        groups.append(param_names[first : len(pieces)])
        fits = fits and start == flat.tensor.numel
    if not fits or len(pieces) < len(param_names):
        raise WrongOption(
            "names-do-not-fit",
            f"--param-names: these weights do not fill the groups of {flats[0].file.path}, which "
            f"have {listed([flat.tensor.numel for flat in flats])} elements",
            hint="name the trained parameters alone, group by group, in the optimizer's order",
        )
    check_rounding(pieces, param_names, weights, strict=are_apart(flats[0], weights))
    return groups


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
                "names-do-not-fit",
                f"--param-names: the master at the place of {name} in {master.file.path} is that "
                f"of {others[0] if others else 'no weight'}, as the weights show",
                hint="name the trained parameters in the optimizer's order, group by group",
            )
