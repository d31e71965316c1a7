"""Which stage of a pipeline has which parameters, if the layers are cut at other bounds?

    layers     0 | 1  2  3  4 | 5  6  7  8        bounds 0,5,9; every layer has a number,
    new        0  1  2 | 3  4  5 | 6  7  8        bounds 0,3,6,9; functions too

What DeepSpeed 0.19.8 does (`PipelineModule._build`): a stage has the layers from its bound to the
next one, and a copy of every tied layer that is used there. Its tied layers come first, in the
order of their first use, then the others by number. A group of which it has no parameter is
dropped. Files of layers do not change: they have no stage.

With experts there are no files of layers: the module of a stage is in its model file, and the
numbers of layers are in names. So no file shows where tied layers are used.

A use of a tied layer by a function of its own has no file. The source's stages show where it is, as
each has its own copy. A source of one stage does not: then the last layer without a file is taken.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from itertools import chain

from msgspec.structs import replace

from ....core.facts import FlatBufferEngine
from ....core.grid import Grid, Place
from ....core.manifest import Manifest
from ....core.placement import Row
from ....core.split import names_in, part
from ....errors import UnsupportedCheckpoint, WrongOption
from ....training.megatron_arguments import STAGE_SIZES, with_sizes
from ....training.options import Options
from ...deepspeed_states.options import PP_PARTITION
from ...groups import without_empty_groups
from .layer_names import LayerName, Uses, layers_with, tied_key
from .stage_bounds import (
    Pipeline,
    bounds_of,
    is_cut,
    layers_alike,
    ranges,
    refuse_without_stages,
)


def recut(
    whole: Manifest,
    models: Sequence[Manifest],
    pipeline: Pipeline,
    grid: Grid,
    options: Options,
) -> tuple[Grid, list[Manifest], list[str]]:
    """The target's grid and model ranks, at the bounds that `options` give; and what was inferred.

    `models` are the pipelines of tensor ranks that are cut, and `whole` has their parameters.
    Raises as `cut_again`.
    """
    inferred: list[str] = []
    if is_cut(len(pipeline.parameters), options):
        pipeline, inferred = cut_again(whole, pipeline, grid.staged, options)
    grid, ranks = replace(grid, pp=len(pipeline.parameters)), list[Manifest]()
    for names, buffers in zip(pipeline.parameters, pipeline.buffers, strict=True):
        row = Row(names, has_weights=not grid.staged)  # they are in files of layers
        for model in models:
            own = _part(model, row, grid.pp)
            ranks.append(replace(own, place=Place(len(ranks), grid, tuple(buffers))))
    return grid, ranks, inferred


def layers_of_names(model: Manifest, options: Options) -> list[int]:
    """The layers of a pipeline with experts, whose names begin with their numbers."""
    names = [LayerName.of(name) for name in (*model.parameters, *model.buffers)]
    numbers = {name.number for name in names if name.number is not None}
    if not numbers or any(name.number is None and name.key is None for name in names):
        refuse_without_stages(model.root, options)
    return sorted(numbers)


def cut_again(
    model: Manifest, pipeline: Pipeline, has_files: bool, options: Options
) -> tuple[Pipeline, list[str]]:
    """The pipeline with the stages that `options` give, and what had to be inferred.

    Without files of layers a stage has all of its module's names. Raises WrongOption for bounds
    that do not fit, UnsupportedCheckpoint for an order of parameters that is not the layers'.
    """
    bounds = bounds_of(model, pipeline, options)
    uses, inferred = _uses(model.root, pipeline, bounds)
    if (method := options[PP_PARTITION]) is not None:
        line = (
            f"--pp-partition {method}: the stages' bounds are {','.join(map(str, bounds))}, if the "
            f"program has {bounds[-1]} layers, functions included"
        )
        if alike := layers_alike(model) if method.startswith("type:") else []:
            line += (
                f", and {method} matches the layers {ranges(alike)}, which have parameters alike"
            )
        inferred.append(line)
    for names, span in pipeline.spans(bounds):
        _check_order(model, names, uses, span)
    stated = dict.fromkeys(chain.from_iterable(pipeline.buffers))
    parameters, buffers = [], []
    for span in map(range, bounds, bounds[1:]):
        has = partial(_first_use, uses=uses, span=span)
        trained = _parameters(model, uses, span)
        parameters.append(trained if has_files else [*filter(has, names_in(model))])
        buffers.append([*filter(has, stated)])
    return replace(pipeline, parameters=parameters, buffers=buffers), inferred


# -- uses of tied layers


def _uses(
    root: str, pipeline: Pipeline, bounds: Sequence[int]
) -> tuple[dict[str, set[int]], list[str]]:
    """The layers at which tied ones are used, by key; and sentences about what no file shows.

    If no file shows any use of a layer, it is taken to be used at the first layer without names of
    the first stage that has it, and at the last one of the others.
    """
    uses, inferred = pipeline.uses, list[str]()
    if len(bounds) == 2:  # one stage has all
        return {key: places or {0} for key, places in uses.items()}, inferred
    for key, places in uses.items():
        is_shown = bool(places)
        holders = [span for names, span in pipeline.spans(bounds) if key in map(tied_key, names)]
        for span in holders:
            known = places.intersection(span) if is_shown else set[int]()
            free = sorted({*span}.difference(pipeline.layers))
            if len(known) > 1 or (known and (len(holders) > 1 or not free)):
                continue
            if not free:
                raise WrongOption(
                    f"{root} has a stage that uses the tied layer {key}, but --pp-bounds leave no "
                    f"layer without {'a file' if is_shown else 'names'} between {span.start} "
                    f"and {span.stop - 1} for that",
                    hint="the last bound is the number of all layers, functions included",
                )
            if is_shown and len({_stage_of(at, bounds) for at in (*known, *free)}) > 1:
                inferred.append(
                    f"the tied layer {key} is taken to be used again at layer {free[-1]}, which "
                    f"has no file, so stage {_stage_of(free[-1], bounds)} gets a copy of it"
                )
            is_first = not places
            places.add(free[0] if is_first else free[-1])
            if is_first and len(holders) == 1:
                places.add(free[-1])
        if not is_shown:
            numbers = " and ".join(map(str, sorted(places)))
            inferred.append(
                f"the tied layer {key} is taken to be used at the layers {numbers}, which have no "
                "names of their own; the stages that have these get a copy of it"
            )
    return uses, inferred


def _stage_of(layer: int, bounds: Sequence[int]) -> int:
    return bisect_right(bounds, layer) - 1


def _first_use(name: str, uses: Uses, span: range) -> tuple[int, int] | None:
    """What sorts a parameter within the stage with these layers; None if it is not there."""
    place = next((number for number in layers_with(name, uses) if number in span), None)
    return None if place is None else (int(tied_key(name) is None), place)


# -- stages


def _check_order(model: Manifest, stage: Sequence[str], uses: Uses, span: range) -> None:
    """Raises UnsupportedCheckpoint unless a group's parameters stand as their layers do."""
    trained = [name for name in stage if model.parameters[name].trainable]
    trained.sort(key=lambda name: model.parameters[name].group or 0)
    if trained != _sorted(model, trained, uses, span):
        raise UnsupportedCheckpoint(
            f"{model.root}: the parameters of a group are not in the order of the layers, which "
            "does not show how they stand in other stages",
            hint="keep the number of stages, or build the optimizer with the parameters in the "
            "order of model.parameters()",
        )


def _parameters(model: Manifest, uses: Uses, span: range) -> list[str]:
    """The trained parameters of a stage, in their order."""
    trained = [
        name
        for name, parameter in model.parameters.items()
        if parameter.trainable and _first_use(name, uses, span)
    ]
    if not trained:
        raise WrongOption(
            f"the layers {span.start} to {span.stop - 1} of {model.root} have no trained "
            "parameter, and every stage needs one",
            hint="choose other bounds with --pp-bounds",
        )
    return _sorted(model, trained, uses, span)


def _sorted(model: Manifest, names: Sequence[str], uses: Uses, span: range) -> list[str]:
    """Parameters by group, and there as a stage with these layers has them.

    A use of a tied layer that is not known has no file, and is taken for the last one.
    """

    def place(name: str) -> tuple[int, tuple[int, int]]:
        return model.parameters[name].group or 0, _first_use(name, uses, span) or (0, span.stop)

    return sorted(names, key=place)


def _part(model: Manifest, row: Row, pp: int) -> Manifest:
    """One of `pp` stages of a whole pipeline: its parameters, groups and layers of experts."""
    own = part(model, row)
    assert isinstance(own.engine, FlatBufferEngine)
    layers = tuple(
        layer
        for layer in own.engine.experts
        if any(name.startswith(f"{layer.name}.") for name in row.names)
    )
    facts = {key: value for key, value in own.source.items() if key != "ep"}
    client = with_sizes(own.state.get("client_state") or {}, dict.fromkeys(STAGE_SIZES, pp))
    state, extra = {**own.state, "client_state": client}, own.state.get("module_extra") or {}
    if extra:
        state["module_extra"] = {n: value for n, value in extra.items() if n in row.names}
    return without_empty_groups(
        replace(
            own,
            source=facts | ({"ep": max(layer.ep for layer in layers)} if layers else {}),
            engine=replace(own.engine, experts=layers),
            state=state,
        )
    )[0]
