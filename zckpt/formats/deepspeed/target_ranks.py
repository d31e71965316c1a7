"""The model ranks of a target, and the part of the source that each one gets.

There are three cases:
    same ranks      Only the data-parallel size changes. Model ranks are not joined.
    other stages    The pipeline of each tensor rank is cut at other layers. Files of layers stay
                    the same.
    other slices    The full model is cut over tensor ranks by the source's own rules, and each
                    tensor rank over pipeline stages. Each layer of a tensor rank gets a new file.

No code here computes byte offsets: once the empty files are laid out, the reader finds the places
of tensors in them. Without a pipeline there are no files of layers, and each tensor rank is one
model rank.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain

from msgspec import Struct
from msgspec.structs import replace

from ...core.checkpoint.facts import Pipeline, layers_of
from ...core.checkpoint.grid import Grid, GridPlace
from ...core.checkpoint.manifest import Manifest, Sibling
from ...core.checkpoint.placement import Table
from ...core.comparison.replicas import Replicas, replicas_of
from ...core.passes.layout import Shell
from ...core.ranks.merge import merge
from ...core.storage import sources
from ...core.storage.inventory import parse_name
from ...errors import Notice, UnsupportedCheckpoint, WrongOption
from ...files.torchshell import Storages, shell
from ...training.options import (
    ALLOW_OBJECT,
    DP,
    DROP_STATE,
    DTYPE,
    EP,
    PARAM_NAMES,
    RENAME,
    SET_GROUP,
    TP,
    WEIGHTS_ONLY,
    Options,
)
from ..deepspeed_states.directories import LAYER, TagDirectory
from ..deepspeed_states.model_files import module_weights
from ..deepspeed_states.options import CONFIG, STAGE
from ..deepspeed_states.target import DeepSpeedTarget
from ..vocabulary import omitted_rows, resized
from .files import grid_files, locate
from .layer_names import prefix_of
from .model_ranks.stage_bounds import STAGES, is_cut, refuse_without_stages
from .model_ranks.target_slices import rows_of, sized, slices_of
from .model_ranks.target_stages import layers_of_names, recut
from .model_ranks.tensor_ranks import IF_COPIES_DIFFER
from .read import of_model_ranks, of_tensor_ranks, stacked

# names of options: some options are declared by several formats
OF_LAYERS = [each.name for each in (STAGE, DTYPE, RENAME)]  # these also change files of layers
OF_RANKS = [
    each.name for each in (DP, EP, *STAGES, ALLOW_OBJECT, PARAM_NAMES, DROP_STATE, SET_GROUP)
]


class TargetRanks(Struct, frozen=True, kw_only=True):
    """The model ranks of a target, each of which is written like a separate checkpoint.

    source   the manifest that has the tensors for the ranks' files
    ranks    one manifest per model rank, in order
    grid     the numbers of stages and tensor ranks; None for one model rank without a pipeline
    """

    source: Manifest
    ranks: Sequence[Manifest]
    grid: Grid | None = None
    wholes: Sequence[Manifest] = ()
    """The model of each tensor rank before it is cut into stages.

    Empty if the source's stages are kept.
    """
    copies: Sequence[Manifest] = ()
    """Manifests of models in which ranks may have several copies of a tensor.

    The target gets one copy.
    """
    layers: Sequence[Manifest] = ()
    """Models whose pipeline layer files are copied unchanged; empty if new layer files are written.

    The records of `source` have the checksums of these files, for a comparison during the copy.
    """
    pipeline: Pipeline | None = None
    """The pipeline whose layer files are written; None if there are none, or if they are copied."""
    table: Table | None = None
    """How a full model is cut over the target's tensor ranks; None if no model is cut."""
    inferred: Sequence[Notice] = ()
    omitted: Sequence[Notice] = ()

    def read_back(self, path: str, tag: str) -> Manifest:
        """Reads the target's new files, in which the tensors' bytes are still missing.

        Layer files that will be copied unchanged do not exist yet.
        """
        directory = TagDirectory(locate(path, tag).path, tag, None)
        if self.table is not None:
            tied = self.pipeline.tied if self.pipeline else None
            ranks = of_tensor_ranks(directory, grid_files(directory), tied=tied)
            return merge(ranks, self.table)
        return stacked(of_model_ranks(directory, grid_files(directory, self.grid)))

    @property
    def copied(self) -> list[str]:
        """The layer files that are copied unchanged, sorted by layer and tensor rank."""
        paths = [path for model in self.layers for path in model.files.paths]
        names = {path: parse_name((LAYER,), path) for path in paths}
        return [path for _, path in sorted((own.rank, path) for path, own in names.items() if own)]

    def layer_siblings(self, tag: str) -> list[tuple[str, Sibling]]:
        """The layer files that are copied unchanged, each with its name in the target."""
        names = {path: f"{tag}/{path.rpartition('/')[2]}" for path in self.copied}
        return [(name, Sibling(name, path, sources.size(path))) for path, name in names.items()]

    def checks(self) -> list[Replicas]:
        """Which copies of a tensor must be equal, because the target gets only one of several."""
        return [replicas_of(model, None, IF_COPIES_DIFFER) for model in self.copies]


def target_ranks(source: Manifest, options: Options) -> TargetRanks:
    """Decides the target's model ranks (its pipeline stages and tensor ranks).

    If the source's model ranks were not joined (`source.ranks`), the target keeps their tensor
    ranks, and their stages unless the options ask for others. Raises WrongOption (options do not
    fit), MissingData (nothing shows how a parameter is cut) and UnsupportedCheckpoint.
    """
    if source.ranks:
        place = source.ranks[0].place
        assert place is not None
        _refuse_options(source, place.grid, options)
        if not place.grid.staged or not any(own.name in OF_LAYERS for own, _ in options.given):
            return _of_stages(source, place.grid, options)
        files_of_run = {
            "fingerprints": source.files.fingerprints,
            "siblings": source.files.siblings,
        }
        model = source.models[0].replace(**files_of_run)
        return replace(_of_slices(model, 1, options), copies=[model])
    if _has_stages_of_experts(source, options):
        layers_of_names(source, options)
        grid = Grid()
        _refuse_options(source, grid, options)
        apart = stacked([replace(source, place=GridPlace(0, grid, source.buffers))])
        return _of_stages(replace(apart, models=(source,)), grid, options)
    tp = options[TP] or source.run.origin.tp
    if source.run.pipeline is not None:
        return _of_slices(source, int(tp or 1), options)
    if (source.run.origin.pp or 1) == 1:  # other pipelines are refused by name
        refuse_without_stages(source.root, options)
    if tp is None:
        return TargetRanks(source=source, ranks=[source])
    return _of_slices(source, tp, options)


def _refuse_options(source: Manifest, grid: Grid, options: Options) -> None:
    """Raises WrongOption for options that need joined model ranks.

    Here, pipeline stages and tensor ranks are written one by one.
    """
    # files of layers are copied unchanged; with one tensor rank, `OF_LAYERS` may write new ones
    for option, _ in options.given:
        is_known = option.name in OF_LAYERS
        fits = grid.tp == 1 if grid.staged else grid.tp > 1 or option.name == RENAME.name
        if option.name not in OF_RANKS and not (is_known and fits):
            raise WrongOption(
                "option-not-applicable",
                f"{option.flag} does not apply to {source.root}: its tensor ranks and pipeline "
                "stages are written without joining them",
                hint=f"give --tp {grid.tp} too: then files of layers are written anew"
                if is_known and grid.staged
                else "`zckpt convert --to universal` joins the ranks: give the checkpoint that it "
                "writes",
            )


def _has_stages_of_experts(source: Manifest, options: Options) -> bool:
    """Whether the options turn a run of one model rank with experts into a pipeline."""
    is_one = not source.run.origin.pp and bool(source.run.origin.zero_stage)
    asks = any(options[option] is not None for option in STAGES)
    return asks and source.format == "deepspeed" and is_one and bool(layers_of(source.run.engine))


def _of_stages(source: Manifest, grid: Grid, options: Options) -> TargetRanks:
    """The model ranks of a target that keeps the source's tensor ranks.

    Its pipeline stages are the source's, or other ones if the options ask for them.
    """
    models, ranks, inferred = source.models, source.ranks, list[Notice]()
    wholes: Sequence[Manifest] = ()
    if not grid.staged and not layers_of(source.run.engine):
        refuse_without_stages(source.root, options)
    elif is_cut(grid.pp, options):
        pipeline = models[0].run.pipeline
        if pipeline is None:  # a pipeline with experts
            parameters_of_stages = [tuple(stage.parameters) for stage in ranks[:: grid.tp]]
            pipeline = Pipeline(
                parameters_of_stages, [models[0].buffers], layers_of_names(models[0], options)
            )
        grid, ranks, inferred = recut(models[0], models, pipeline, grid, options)
        wholes = models
    with_experts = [bool(layers_of(manifest.run.engine)) for manifest in ranks]
    if any(with_experts) and not all(with_experts):
        raise WrongOption(
            "stages-do-not-fit",
            f"a stage of the target would have none of the layers of experts of {source.root}, but "
            "DeepSpeed cannot train such a pipeline",
            hint="choose other bounds with --pp-bounds: every stage needs a layer of experts",
        )
    target = TargetRanks(
        source=replace(source, ranks=ranks),
        ranks=ranks,
        grid=grid,
        wholes=wholes,
        copies=wholes,
        layers=models,
        inferred=inferred,
    )
    files, records = {*target.copied}, chain(*(model.files.records for model in models))
    of_layers = [record for record in records if record.extent.file in files]
    checked = target.source.replace(records=(*source.files.records, *of_layers))
    return replace(target, source=checked)


def _of_slices(source: Manifest, tp: int, options: Options) -> TargetRanks:
    """Cuts the full model into the model ranks of a target with `tp` tensor ranks."""
    pipeline = _pipeline_of(source)
    rows = rows_of(source, tp, options)
    model, lost = resized(source, rows), omitted_rows(source, rows)
    if pipeline is None and tp == 1:
        with_cuts = model if model.run.tensor_parallel is None else sized(model, 1)
        return TargetRanks(source=model, ranks=[with_cuts], omitted=lost)
    for option in (WEIGHTS_ONLY, CONFIG):
        if options[option]:
            raise WrongOption(
                "option-not-applicable",
                f"{option.flag} cannot be used with a pipeline or tensor parallelism",
                hint="leave it out",
            )
    if layers_of(source.run.engine):
        raise UnsupportedCheckpoint(
            "target-unsupported",
            f"{source.root}: zckpt writes experts only for a single tensor rank",
            hint="leave out --tp",
            file=source.root,
        )
    table, slices, inferred = slices_of(model, tp)
    more: Sequence[Notice] = ()
    grid = Grid(1, tp, staged=pipeline is not None)
    if pipeline is None:
        places = (GridPlace(number, grid, source.buffers) for number in range(tp))
        pairs = zip(slices, places, strict=True)
        ranks: Sequence[Manifest] = [replace(own, place=place) for own, place in pairs]
    else:
        grid, ranks, more = recut(model, slices, pipeline, grid, options)
    return TargetRanks(
        source=model,
        ranks=ranks,
        grid=grid,
        wholes=() if pipeline is None else slices,
        pipeline=pipeline,
        table=table,
        inferred=[*inferred, *more],
        omitted=lost,
    )


def _pipeline_of(source: Manifest) -> Pipeline | None:
    """The source's pipeline; None if the source is not one.

    Raises UnsupportedCheckpoint if its parameters were renamed, so that names do not show layers.
    """
    if (pipeline := source.run.pipeline) is None:
        return None
    names_in_layers = {
        n for layer in pipeline.layers for n in _names_in(layer, pipeline, source).values()
    }
    trained = {name for name, item in source.parameters.items() if item.trainable}
    of_stages = {name for stage in pipeline.parameters for name in stage}
    if of_stages != trained or names_in_layers != {*source.parameters, *source.buffers}:
        raise UnsupportedCheckpoint(
            "target-unsupported",
            f"{source.root} was saved by a pipeline, but its tensors no longer have the names of "
            "its layers",
            hint="give --rename rules that keep the beginning of each name: the layer's number, "
            "or `tied_modules.` and the tied layer's key",
            file=source.root,
        )
    return pipeline


def _names_in(layer: int, pipeline: Pipeline, model: Manifest) -> dict[str, str]:
    """Maps the names in a layer's file to names in the full model: {"fc.weight": "3.fc.weight"}."""
    prefix = prefix_of(layer, pipeline.tied)
    names = model.state.get("module") or ()
    return {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}


def layer_files(pipeline: Pipeline, targets: Sequence[DeepSpeedTarget]) -> Iterator[Shell]:
    """Yields the shell (the file without tensors' bytes) of each layer's file on each tensor rank.

    `targets` has one item per tensor rank.
    """
    for layer in pipeline.layers:
        for rank, target in enumerate(targets):
            storages, names = Storages(), _names_in(layer, pipeline, target.source)
            weights = module_weights(target, True, storages, names.values())
            value = OrderedDict((own, weights[n]) for own, n in names.items() if n in weights)
            model = f"-model_{rank:02d}" if len(targets) > 1 else ""
            name = f"{target.tag}/layer_{layer:02d}{model}-model_states.pt"
            yield shell(name, value, storages)
