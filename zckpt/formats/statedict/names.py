"""Finds the model's name for each parameter that an optimizer lists, by name or by number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InconsistentCheckpoint, MissingData, WrongOption, listed, warning
from ...files.torchtensors import class_of, shape_of_record
from ...naming import peft
from ...naming.names import matched
from .equal_tensors import is_complex, is_float
from .matching import keeps_order, match
from .state_dict_search import NamedModel, OptimizerState
from .tree import Leaf, SavedTree

ELEMENTWISE = frozenset(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg")
)
"""States with one element per element of the parameter, in every optimizer that keeps them.

As of torch 2.13.
"""


def names_of(
    saved: SavedTree,
    model: NamedModel,
    optimizer: OptimizerState,
    param_names: Sequence[str] | None,
) -> dict[Any, str]:
    """Finds the model's name of each parameter in an optimizer's groups.

    The keys of the result are the groups' names or numbers. Inferred names are added to
    `model.inferred`, with a warning. Raises MissingData or WrongOption if names cannot be found,
    and InconsistentCheckpoint if optimizer states have the shapes of other weights.
    """
    if optimizer.is_numbered:
        return _names_of_numbers(saved, model, optimizer, param_names)
    trained = [name for members in optimizer.members for name in members]
    if all(name in model.weights for name in trained):
        return {name: name for name in trained}
    bare = {peft.bare_name(name): name for name in model.weights} if model.has_adapter else {}
    if all(name in bare for name in trained):
        model.bare = saved.layout.storage is not None
        return {name: bare[name] for name in trained}
    weights = [name for name, leaf in model.weights.items() if isinstance(leaf, Leaf)]
    return dict(matched(trained, weights))


def refuse_twice(saved: SavedTree, members: Sequence[str]) -> None:
    """Raises InconsistentCheckpoint if the optimizer's groups list a parameter more than once."""
    if twice := [name for name, count in Counter(members).items() if count > 1]:
        raise InconsistentCheckpoint(
            "file-damaged",
            f"{saved.root}: the optimizer's groups list {listed(twice)} more than once",
            hint="torch lists each parameter only once, so the file was changed after the save: "
            "take another copy",
            file=saved.root,
        )


def _names_of_numbers(
    saved: SavedTree,
    model: NamedModel,
    optimizer: OptimizerState,
    param_names: Sequence[str] | None,
) -> dict[int, str]:
    """Maps each parameter number in an optimizer's groups to the parameter's name.

    Files may state the names: zckpt writes them beside its state dicts, and groups have
    `param_names` since torch 2.6. Otherwise `match` finds them.
    """
    numbers = [number for members in optimizer.members for number in members]
    if model.facts is not None and len(model.facts.get("numbers", ())) == len(numbers):
        return dict(zip(numbers, model.facts["numbers"], strict=True))
    weights = model.weights
    in_groups = [name for group in optimizer.groups for name in group.get("param_names") or ()]
    if len(in_groups) == len(numbers) and not set(in_groups) <= weights.keys():
        in_groups = without_wrappers(in_groups, weights) or []
    if len(in_groups) == len(numbers):
        shapes_of_states = [shape_of(optimizer.state.get(number, {})) for number in numbers]
        _refuse_mixed(saved, shapes_of_states, in_groups, weights)
        return dict(zip(numbers, in_groups, strict=True))
    if param_names is not None and not set(param_names) <= weights.keys():
        param_names = list(matched(param_names, list(weights)).values())
    orders = saved.orders or optimizer.members
    shapes = {number: shape_of(optimizer.state.get(number, {})) for number in numbers}
    names, inferred = match(
        [[shapes[number] for number in order] for order in orders],
        [(name, weights[name].shape) for name in _candidates(weights, optimizer, param_names)],
        saved.layout.in_order and keeps_order([str(name) for name in weights]),
        param_names,
    )
    model.inferred += [name for name in inferred if name not in model.inferred]
    if param_names is not None:
        message = "the optimizer lists its parameters by number: --param-names gave their names"
        model.warnings.append(warning("names-inferred", message, subject="--param-names"))
    elif inferred:
        message = (
            "the optimizer lists its parameters by number, not by name: the names "
            f"{listed(inferred, 4)} are inferred from the order of the model's state dict"
        )
        model.warnings.append(warning("names-inferred", message, subject=inferred[0]))
    return {
        number: name
        for order, names_of_order in zip(orders, names, strict=True)
        for number, name in zip(order, names_of_order, strict=True)
    }


def _candidates(
    model: Mapping[str, Any], optimizer: OptimizerState, param_names: Sequence[str] | None
) -> list[str]:
    """Lists the weights that an optimizer may contain; a tied weight only once.

    A complex tensor is a buffer, such as rotary frequencies. It is listed only if `param_names`
    lists it, or if the optimizer has complex moments.
    """
    states = [leaf for state in optimizer.state.values() for leaf in state.values()]
    complex_moments = any(map(is_complex, states))
    owners: dict[Any, str] = {}
    return [
        name
        for name, leaf in model.items()
        if is_float(leaf) or (is_complex(leaf) and (complex_moments or name in (param_names or ())))
        if owners.setdefault(leaf.memory or name, name) == name
    ]


def without_wrappers(names: Sequence[str], model: Mapping[Any, Any]) -> list[str] | None:
    """Translates an optimizer's parameter names into the model's names, in the same order.

    The names may have another prefix, or words that wrappers insert, such as `_orig_mod`. Returns
    None if no single rule translates all of them.
    """
    weights = [str(name) for name, leaf in model.items() if isinstance(leaf, Leaf)]
    try:
        return list(matched(names, weights).values())
    except (MissingData, WrongOption):
        return None


def _refuse_mixed(
    saved: SavedTree,
    shapes: Sequence[tuple[int, ...] | None],
    names: Sequence[str],
    model: Mapping[str, Any],
) -> None:
    """Raises InconsistentCheckpoint if weights and states have the same shapes in different orders.

    `shapes` are those of the optimizer states for `names`; None for a weight without states.
    """
    pairs = [
        (name, model[name].shape, shape)
        for name, shape in zip(names, shapes, strict=True)
        if shape is not None
    ]
    # states of other shapes are no error: some optimizers keep such states
    if Counter(weight for _, weight, _ in pairs) == Counter(state for _, _, state in pairs):
        for name, weight, state in pairs:
            if state != weight:
                raise InconsistentCheckpoint(
                    "mixed-saves",
                    f"{saved.root}: {name} has the shape {list(weight)}, but the optimizer state "
                    f"that the groups' param_names assign to it has the shape {list(state)}",
                    hint="param_names and the states list the parameters in different orders: take "
                    "another copy of the file",
                    file=saved.root,
                    subject=name,
                )


def shape_of(state: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Infers a parameter's shape from its optimizer states; None if they do not show it.

    Adafactor keeps rows and columns, and 8-bit optimizers keep scales: these do not show the shape.
    SPAM keeps only some elements of its moments, but its mask has the parameter's shape.
    """
    tensors = {key: leaf for key, leaf in state.items() if isinstance(leaf, Leaf) and key != "step"}
    shapes = {leaf.shape for leaf in tensors.values() if leaf.dtype == "BOOL"}
    shapes = shapes or {leaf.shape for key, leaf in tensors.items() if key in ELEMENTWISE}
    records = [shape_of_record(value) for value in state.values() if class_of(value)]
    shapes = shapes or {shape for shape in records if shape is not None}
    shapes = shapes or {leaf.shape for leaf in tensors.values()}
    return shapes.pop() if len(shapes) == 1 else None
