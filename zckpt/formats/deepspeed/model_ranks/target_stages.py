"""Assigns parameters to the stages of a pipeline that is cut at other bounds.

    layers     0 | 1  2  3  4 | 5  6  7  8        bounds 0,5,9; every layer has a number,
    new        0  1  2 | 3  4  5 | 6  7  8        bounds 0,3,6,9; functions too

What DeepSpeed 0.19.8 does (`PipelineModule._build`): a stage has the layers from its bound to the
next bound, and a copy of every tied layer that one of these layers uses. The tied layers come
first, in the order of their first use, then the other layers by number. A param group without a
parameter in the stage is dropped. Files of layers do not change, because they belong to no stage.

With experts there are no files of layers. The module of a stage is in the stage's model file, and
the numbers of layers are in names. So no file shows where tied layers are used.

A tied layer that is used through a function of its own has no file at that use. The source's stages
show in which stage this use is, because each stage that uses a tied layer has its own copy. If the
source has a single stage, zckpt assumes that the use is at the last layer without a file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import chain

from msgspec import Struct
from msgspec.structs import replace

from ....core.checkpoint.facts import FlatBufferEngine, Pipeline
from ....core.checkpoint.grid import Grid, GridPlace
from ....core.checkpoint.manifest import Manifest
from ....core.checkpoint.placement import Row
from ....core.ranks.split import names_in, part
from ....errors import Notice, UnsupportedCheckpoint, WrongOption, warning
from ....training.megatron_arguments import STAGES, with_sizes
from ....training.options import Options
from ...groups import without_empty_groups
from ..layer_names import LayerName, Uses, layers_with, spans, spans_with, tied_key, uses_of_files
from .stage_bounds import LAST, assumed, bounds_of, is_cut, refuse_without_stages


def recut(
    whole: Manifest, models: Sequence[Manifest], pipeline: Pipeline, grid: Grid, options: Options
) -> tuple[Grid, tuple[Manifest, ...], list[Notice]]:
    """Cuts every tensor rank's model into the pipeline stages that `options` ask for.

    `models` has one model per tensor rank; `whole` has the parameters of all of them. Returns the
    new grid, one manifest per model rank, and warnings about what zckpt inferred. Raises as
    `cut_again`.
    """
    inferred: list[Notice] = []
    if is_cut(len(pipeline.parameters), options):
        pipeline, inferred = cut_again(whole, pipeline, grid.staged, options)
    grid, ranks = replace(grid, pp=len(pipeline.parameters)), list[Manifest]()
    for names, buffers in zip(pipeline.parameters, pipeline.buffers, strict=True):
        row = Row(names, has_weights=not grid.staged)  # the weights are in files of layers
        for model in models:
            part_of_model = _part(model, row, grid.pp)
            ranks.append(replace(part_of_model, place=GridPlace(len(ranks), grid, tuple(buffers))))
    return grid, tuple(ranks), inferred


def layers_of_names(model: Manifest, options: Options) -> list[int]:
    """The sorted layer numbers in the names of a pipeline's parameters: 3 for "3.fc.weight".

    Used with experts, where no layer files exist. Raises WrongOption if the user gives a pipeline
    option, but the names have no such numbers.
    """
    names = [LayerName.of(name) for name in (*model.parameters, *model.buffers)]
    numbers = {name.number for name in names if name.number is not None}
    if not numbers or any(name.number is None and name.key is None for name in names):
        refuse_without_stages(model.root, options)
    return sorted(numbers)


def cut_again(
    model: Manifest, pipeline: Pipeline, has_files: bool, options: Options
) -> tuple[Pipeline, list[Notice]]:
    """The pipeline with new stages, as `options` ask for; and warnings about what zckpt inferred.

    With layer files (`has_files`), a stage lists only its trained parameters, otherwise all
    tensors. Raises WrongOption (the bounds do not fit) and UnsupportedCheckpoint (the parameters
    are not in the order of the layers).
    """
    bounds = bounds_of(model, pipeline, options)
    uses, inferred = _uses(model.root, pipeline, bounds)
    inferred += assumed(model, bounds, options)
    for names, span in zip(pipeline.parameters, spans(pipeline, bounds[-1]), strict=True):
        _Stage(model, span, uses).check_order(names)
    stages = [_Stage(model, span, uses) for span in map(range, bounds, bounds[1:])]
    buffers_of_source = dict.fromkeys(chain.from_iterable(pipeline.buffers))
    parameters = [stage.trained() for stage in stages]
    if not has_files:
        parameters = [stage.having(names_in(model)) for stage in stages]
    buffers = [stage.having(buffers_of_source) for stage in stages]
    return replace(pipeline, parameters=parameters, buffers=buffers), inferred


# -- uses of tied layers


def _uses(
    root: str, pipeline: Pipeline, bounds: Sequence[int]
) -> tuple[dict[str, set[int]], list[Notice]]:
    """Maps each tied layer's key to the numbers of the layers that use it: {"embed": {0, 8}}.

    Also returns warnings about assumed uses, which no file shows. `bounds` are the first layers of
    the new stages, then the number of all layers.
    """
    uses, inferred = uses_of_files(pipeline), list[Notice]()
    if len(bounds) == 2:  # a single stage has all layers
        return {key: places or {0} for key, places in uses.items()}, inferred
    for key, places in uses.items():
        is_shown = bool(places)
        holders = spans_with(pipeline, key, bounds[-1])
        for span in holders:
            # a use through a function has no file: assumed at the stage's last layer without one
            shown = places.intersection(span) if is_shown else set[int]()
            free = [layer for layer in span if layer not in pipeline.layers]
            if len(shown) > 1 or (shown and (len(holders) > 1 or not free)):
                continue
            if not free:
                raise WrongOption(
                    "stages-do-not-fit",
                    f"a stage of {root} uses the tied layer {key} at an unknown layer. By the "
                    f"bounds, it is one of the layers {span.start} to {span.stop - 1}, but each of "
                    f"them has {'a file' if is_shown else 'parameter names'} of its own",
                    hint=LAST,
                )
            if is_shown and len({_stage_of(at, bounds) for at in (*shown, *free)}) > 1:
                message = (
                    f"zckpt assumes that the tied layer {key} is used again at layer {free[-1]}, "
                    f"which has no file, so stage {_stage_of(free[-1], bounds)} gets a copy of it"
                )
                inferred.append(warning("place-inferred", message, subject=key))
            # with experts no use has a file: assumed at the first stage's first layer without names
            is_first = not places
            if is_first:
                places.add(free[0])
            if not is_first or len(holders) == 1:
                places.add(free[-1])
        if not is_shown:
            numbers = " and ".join(map(str, sorted(places)))
            message = (
                f"zckpt assumes that the tied layer {key} is used at the layers {numbers}, which "
                "no parameter's name shows: the stages with these layers get a copy of it"
            )
            inferred.append(warning("place-inferred", message, subject=key))
    return uses, inferred


def _stage_of(layer: int, bounds: Sequence[int]) -> int:
    return bisect_right(bounds, layer) - 1


# -- stages


class _Stage(Struct, frozen=True):
    """A pipeline stage with the layers `span` of `model`; also sorts the stage's parameters.

    `uses` maps each tied layer's key to the layers that use it: {"embed": {0, 8}}.
    """

    model: Manifest
    span: range
    uses: Uses

    def place(self, name: str) -> tuple[int, int] | None:
        """A sort key of the stage's parameters: (0, layer of first use) if tied, else (1, layer).

        None if the parameter belongs to another stage.
        """
        layer = next((n for n in layers_with(name, self.uses) if n in self.span), None)
        return None if layer is None else (int(tied_key(name) is None), layer)

    def having(self, names: Iterable[str]) -> list[str]:
        """Selects the names that belong to layers of this stage."""
        return [name for name in names if self.place(name)]

    def trained(self) -> list[str]:
        """The stage's trained parameters in the optimizer's order; raises if there are none."""
        parameters = self.model.parameters.items()
        names = self.having(name for name, own in parameters if own.trainable)
        if not names:
            raise WrongOption(
                "stages-do-not-fit",
                f"the layers {self.span.start} to {self.span.stop - 1} of {self.model.root} have "
                "no trained parameter, but every stage needs one",
                hint="choose other bounds with --pp-bounds",
            )
        return sorted(names, key=self._by_group_and_layer)

    def check_order(self, names: Iterable[str]) -> None:
        """Raises UnsupportedCheckpoint unless the parameters of each group are in layer order."""
        trained = [name for name in names if self.model.parameters[name].trainable]
        if sorted(trained, key=self._group) != sorted(trained, key=self._by_group_and_layer):
            raise UnsupportedCheckpoint(
                "target-unsupported",
                f"{self.model.root}: the parameters of a group are not in the order of the layers, "
                "so their order in other stages is unknown",
                hint="keep the number of stages, or build the optimizer with the parameters in the "
                "order of model.parameters()",
                file=self.model.root,
            )

    def _group(self, name: str) -> int:
        return self.model.parameters[name].group or 0

    def _by_group_and_layer(self, name: str) -> tuple[int, tuple[int, int]]:
        # a tied layer whose use here is unknown comes after the other tied layers
        return self._group(name), self.place(name) or (0, self.span.stop)


def _part(model: Manifest, row: Row, pp: int) -> Manifest:
    """The manifest of one of `pp` stages: the parameters that `row` names, and their groups.

    Also keeps only the stage's layers of experts, and writes `pp` into the program's saved
    arguments.
    """
    stage = part(model, row)
    assert isinstance(stage.run.engine, FlatBufferEngine)
    layers = tuple(
        layer
        for layer in stage.run.engine.experts
        if any(name.startswith(f"{layer.name}.") for name in row.names)
    )
    state = dict(stage.state)
    state["client_state"] = with_sizes(state.get("client_state") or {}, {STAGES: pp})
    if extra := state.get("module_extra"):
        state["module_extra"] = {n: value for n, value in extra.items() if n in row.names}
    return without_empty_groups(
        stage.replace(
            origin=replace(stage.run.origin, ep=max((layer.ep for layer in layers), default=None)),
            engine=replace(stage.run.engine, experts=layers),
            state=state,
        )
    )
