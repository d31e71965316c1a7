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

from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct
from msgspec.structs import replace

from ....core.facts import FlatBufferEngine
from ....core.grid import Grid, Place
from ....core.grouping import by_key
from ....core.manifest import Manifest
from ....core.placement import Row
from ....core.split import names_in, part
from ....errors import UnsupportedCheckpoint, WrongOption
from ....training.options import PP, Options
from ...deepspeed_states.options import PP_BOUNDS, PP_PARTITION
from ...groups import without_empty_groups
from .grid import STAGE_SIZES, with_sizes
from .layer_names import LayerName, Uses, layers_with, stage_spans, tied_key
from .stage_bounds import bounds_of, layers_alike, ranges, refuse_without_stages


class Pipeline(Struct, frozen=True):
    """What a model keeps of the pipeline that it was read from, as `state.pipeline` has it.

    Each stage has its `parameters` in their order, and `buffers`. `layers` are those with files, or
    with names if there are no such files, and `tied` has the keys of tied ones among the files.
    """

    parameters: Sequence[Sequence[str]]
    buffers: Sequence[Sequence[str]]
    layers: Sequence[int]
    tied: Sequence[tuple[int, str]] = ()

    @property
    def uses(self) -> dict[str, set[int]]:
        """The layers at which tied ones have files, by key."""
        keys = (tied_key(name) for names in self.parameters for name in names)
        of_files = by_key((key, number) for number, key in self.tied)
        return {key: {*of_files.get(key, ())} for key in keys if key is not None}

    def stages(
        self, model: Manifest, uses: dict[str, set[int]], options: Options
    ) -> tuple[list[Stage], list[str]]:
        """The target's stages, and what had to be inferred: the source's, unless options say.

        Raises WrongOption for bounds that do not fit, UnsupportedCheckpoint for an order of
        parameters that is not the layers'. `uses` gets those that have no file.
        """
        is_given = options[PP_BOUNDS] is not None or options[PP_PARTITION] is not None
        if not is_given and options[PP] in (None, len(self.parameters)):
            pairs = zip(self.parameters, self.buffers, strict=True)
            return [Stage(tuple(names), tuple(buffers)) for names, buffers in pairs], []
        buffers = [name for names in self.buffers for name in names]
        return new_stages(model, self.parameters, buffers, self.layers, uses, options)


def recut(
    whole: Manifest,
    models: Sequence[Manifest],
    pipeline: Pipeline,
    grid: Grid,
    options: Options,
) -> tuple[Grid, list[Manifest], list[str]]:
    """The target's grid and model ranks, at the bounds that `options` give; and what was inferred.

    `models` are the pipelines of tensor ranks that are cut, and `whole` has their parameters.
    Raises as `Pipeline.stages`.
    """
    uses = pipeline.uses
    stages, inferred = pipeline.stages(whole, uses, options)
    grid, ranks = replace(grid, pp=len(stages)), list[Manifest]()
    for stage in stages:
        for model in models:
            row = Row(stage.parameters, has_weights=False)  # they are in files of layers
            if not grid.staged:
                row = Row([name for name in names_in(model) if stage.has(name, uses)])
            own = _part(model, row, len(stages))
            ranks.append(replace(own, place=Place(len(ranks), grid, stage.buffers)))
    return grid, ranks, inferred


def layers_of_names(model: Manifest, options: Options) -> list[int]:
    """The layers of a pipeline with experts, whose names begin with their numbers."""
    names = [LayerName.of(name) for name in (*model.parameters, *model.buffers)]
    numbers = {name.number for name in names if name.number is not None}
    if not numbers or any(name.number is None and name.key is None for name in names):
        refuse_without_stages(model.root, options)
    return sorted(numbers)


class Stage(Struct, frozen=True):
    """The trained parameters of a stage, in the order of its groups, and its buffers.

    It has the layers from `start` to `stop`, if they are known.
    """

    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    start: int = 0
    stop: int = 0

    def has(self, name: str, uses: Uses) -> bool:
        """Whether a tensor of the whole model is in this stage."""
        return _first_use(name, uses, self.start, self.stop) is not None


def new_stages(
    model: Manifest,
    stages: Sequence[Sequence[str]],
    buffers: Sequence[str],
    layers: Sequence[int],
    uses: dict[str, set[int]],
    options: Options,
) -> tuple[list[Stage], list[str]]:
    """The target's stages, at the bounds that `options` give, and what had to be inferred.

    `stages` are the parameters of each stage of the source, in their order, `layers` the numbers of
    layers that have files, and `uses` those at which tied layers have files. Raises as `recut`.
    """
    bounds = bounds_of(model, layers, uses, stages, options)
    inferred = _uses_without_files(uses, model.root, stages, layers, bounds)
    if (method := options[PP_PARTITION]) is not None:
        alike = ranges(layers_alike(model)) if method.startswith("type:") else ""
        inferred.append(
            f"--pp-partition {method}: the stages' bounds are {','.join(map(str, bounds))}, if the "
            f"program has {bounds[-1]} layers, functions included"
            + (
                f", and {method} matches the layers {alike}, which have parameters alike"
                * bool(alike)
            )
        )
    for stage, span in zip(stages, stage_spans(stages, bounds[-1]), strict=True):
        _check_order(model, stage, uses, *span)
    new = []
    for start, stop in pairwise(bounds):
        own = [name for name in buffers if _first_use(name, uses, start, stop)]
        parameters = _parameters(model, uses, start, stop)
        new.append(Stage(parameters, tuple(dict.fromkeys(own)), start, stop))
    return new, inferred


# -- uses of tied layers


def _uses_without_files(
    uses: dict[str, set[int]],
    root: str,
    stages: Sequence[Sequence[str]],
    layers: Sequence[int],
    bounds: Sequence[int],
) -> list[str]:
    """Adds to `uses` those that have no file; gives sentences about what no file shows.

    If no file shows any use of a layer, it is taken to be used at the first layer without names of
    the first stage that has it, and at the last one of the others.
    """
    inferred: list[str] = []
    is_one = len(bounds) == 2  # one stage has all
    for key, places in uses.items():
        is_shown, holders = bool(places), _holders(key, stages, bounds)
        for start, stop in () if is_one and is_shown else holders:
            known = sorted(at for at in places if start <= at < stop) if is_shown else []
            free = sorted(set(range(start, stop)).difference(layers))
            is_known = len(known) > 1 or (known and (len(holders) > 1 or not free))
            if is_known or (is_one and not free):
                continue
            if not free:
                raise WrongOption(
                    f"{root} has a stage that uses the tied layer {key}, but --pp-bounds leave no "
                    f"layer without {'a file' if is_shown else 'names'} between {start} and "
                    f"{stop - 1} for that",
                    hint="the last bound is the number of all layers, functions included",
                )
            is_first = not places
            places |= {free[0]} if is_first else {free[-1]}
            if is_first and len(holders) == 1:
                places.add(free[-1])
            certain = {_stage_of(at, bounds) for at in known}
            possible = {_stage_of(at, bounds) for at in free}
            if is_shown and not possible <= certain and (known or len(possible) > 1):
                inferred.append(
                    f"the tied layer {key} is taken to be used again at layer {free[-1]}, which "
                    f"has no file, so stage {_stage_of(free[-1], bounds)} gets a copy of it"
                )
        if not is_shown and not is_one:
            numbers = " and ".join(map(str, sorted(places)))
            inferred.append(
                f"the tied layer {key} is taken to be used at the layers {numbers}, which have no "
                "names of their own; the stages that have these get a copy of it"
            )
        places |= places or {0}
    return inferred


def _holders(
    key: str, stages: Sequence[Sequence[str]], bounds: Sequence[int]
) -> list[tuple[int, int]]:
    """The layers of each stage that has a tied layer."""
    spans = zip(stages, stage_spans(stages, bounds[-1]), strict=True)
    return [span for stage, span in spans if key in map(tied_key, stage)]


def _stage_of(layer: int, bounds: Sequence[int]) -> int:
    return next(number for number, stop in enumerate(bounds[1:]) if layer < stop)


def _first_use(name: str, uses: Uses, start: int, stop: int) -> tuple[int, int] | None:
    """What sorts a parameter within the stage [start, stop); None if it is not there."""
    place = next((number for number in layers_with(name, uses) if start <= number < stop), None)
    return None if place is None else (int(tied_key(name) is None), place)


# -- stages


def _check_order(model: Manifest, stage: Sequence[str], uses: Uses, start: int, stop: int) -> None:
    """Raises UnsupportedCheckpoint unless a group's parameters stand as their layers do.

    A use of a tied layer that is not known has no file, and is taken for the last one.
    """
    groups: dict[int | None, list[tuple[int, int]]] = {}
    for name in filter(lambda name: model.parameters[name].trainable, stage):
        place = _first_use(name, uses, start, stop) or (0, stop)
        groups.setdefault(model.parameters[name].group, []).append(place)
    for places in groups.values():
        if places != sorted(places):
            raise UnsupportedCheckpoint(
                f"{model.root}: the parameters of a group are not in the order of the layers, "
                "which does not show how they stand in other stages",
                hint="keep the number of stages, or build the optimizer with the parameters in the "
                "order of model.parameters()",
            )


def _parameters(model: Manifest, uses: Uses, start: int, stop: int) -> tuple[str, ...]:
    """The trained parameters of a stage, in their order."""
    places = {
        name: place
        for name, parameter in model.parameters.items()
        if parameter.trainable and (place := _first_use(name, uses, start, stop)) is not None
    }
    if not places:
        raise WrongOption(
            f"the layers {start} to {stop - 1} of {model.root} have no trained parameter, and "
            "every stage needs one",
            hint="choose other bounds with --pp-bounds",
        )
    return tuple(sorted(places, key=lambda name: (model.parameters[name].group or 0, places[name])))


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
