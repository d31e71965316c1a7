"""A run of any stages, tensor and data ranks, from the whole model.

    the whole model             names of layers, and which stage had which of them
    slices of a tensor rank     by the rules by which they were cut
    a stage of these slices     masters and moments: the files of one model rank
    a layer of these slices     weights, buffers and frozen weights: a file for each tensor rank

No offset is computed here: the files are read back. Without a pipeline there are no files of
layers, and each tensor rank is one model rank.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from msgspec import convert

from ....core.layout import Layout, Shell
from ....core.manifest import Manifest
from ....core.merge import merge
from ....core.split import split
from ....errors import UnsupportedCheckpoint, WrongOption, counted, literal
from ....files.torchshell import Storages, shell
from ....naming.order import need_order
from ....training.options import TP, WEIGHTS_ONLY, Options
from ...deepspeed_states import reports
from ...deepspeed_states.directories import TagDirectory
from ...deepspeed_states.hyper import check_states
from ...deepspeed_states.model_files import module_weights
from ...deepspeed_states.options import CONFIG
from ...deepspeed_states.target import DeepSpeedTarget
from ...vocabulary import lost_rows, resized
from .. import read
from ..files import locate, recovery_scripts
from ..optimizer_files import is_elastic, run_shells
from .apart import ModelGrid, as_rank
from .grid import TIED, grid_files
from .recut import Pipeline, of_stage
from .stage_bounds import refuse_without_stages
from .write_tensor_ranks import rows_of, sized, table_of, target_of, warnings_of_heads


def lay_out(source: Manifest, options: Options) -> Layout:
    """The files of all model ranks and layers; `source` has the whole model.

    Raises MissingData if nothing says how a parameter is cut, UnsupportedCheckpoint for what cannot
    be cut evenly, for stages that DeepSpeed does not train a pipeline with and for elastic files,
    and WrongOption for bounds of stages that do not fit.
    """
    pipeline = _pipeline_of(source, options)
    if pipeline is None:
        refuse_without_stages(source.root, options)
        for option in (WEIGHTS_ONLY, CONFIG):
            if options[option]:
                text = f"{option.flag} does not go with --tp"
                raise WrongOption(text, hint="leave out one of them")
    tp = options[TP] or int(source.source.get("tp") or 1)
    rows = rows_of(source, tp, options)
    model = resized(source, rows)
    table = table_of(model, tp)
    slices = split(sized(model, tp), table)
    sizes, inferred = f"tp {tp}", list[str]()
    if pipeline is None:
        grid = ModelGrid(1, tp, False, None)
        ranks = [as_rank(each, n, grid, source.buffers) for n, each in enumerate(slices)]
    else:
        stages, inferred = pipeline.stages(model, pipeline.uses, options)
        grid, sizes = ModelGrid(len(stages), tp, True, None), f"pp {len(stages)}, {sizes}"
        places = [(stage, own) for stage in stages for own in slices]
        ranks = [
            as_rank(of_stage(own, stage.parameters, len(stages)), number, grid, stage.buffers)
            for number, (stage, own) in enumerate(places)
        ]
    targets = [target_of(rank, options) for rank in ranks]
    first = targets[0]
    _refuse_target(first, pipeline)
    for target in targets:
        check_states(target.engine, target.source, target.states)
    wholes = [target_of(each, options) for each in slices] if pipeline else []

    def shells() -> Iterator[Shell]:
        yield from run_shells(first.tag, targets)
        if pipeline is not None:
            for number in pipeline.layers:
                for rank, whole in enumerate(wholes):
                    yield _layer_file(whole, pipeline, number, rank, tp)

    def read_back(path: str) -> Manifest:
        directory = TagDirectory(locate(path, first.tag).path, first.tag, None)
        tied = dict(pipeline.tied) if pipeline else None
        ranks = read.tensor_ranks(directory, grid_files(directory), tied=tied)
        return merge(ranks, table)

    left_out = dict.fromkeys(line for target in targets for line in target.left_out)
    return Layout(
        shells,
        list(first.take_siblings()),
        [*left_out, *lost_rows(source, rows), *recovery_scripts(source.root)],
        list(
            dict.fromkeys(
                [
                    *source.warnings,
                    *(line for whole in wholes[:1] for line in reports.of_stage_0(whole)),
                    *reports.of_weights(first),
                    *warnings_of_heads(source, first),
                    *inferred,
                ]
            )
        ),
        about=f"a DeepSpeed run of {counted(first.dp, 'data-parallel rank')}, {sizes}, ZeRO stage "
        f"{first.engine.stage}, tag {first.tag}",
        loading=lambda path: f"model_engine.load_checkpoint({literal(path)})",
        read_back=read_back,
        source=model,
    )


def _pipeline_of(source: Manifest, options: Options) -> Pipeline | None:
    """Raises UnsupportedCheckpoint if names of parameters were changed since it was one."""
    if not source.state.get("pipeline"):
        return None
    for option in (WEIGHTS_ONLY, CONFIG):
        if options[option]:
            raise WrongOption(
                f"{option.flag} does not apply to {source.root}, which is a pipeline",
                hint="leave it out",
            )
    need_order(source)
    pipeline = convert(source.state["pipeline"], Pipeline)
    layers = (_names_in(layer, pipeline, source) for layer in pipeline.layers)
    known = {name for names in layers for name in names.values()}
    trained = {name for name, item in source.parameters.items() if item.trainable}
    of_stages = {name for stage in pipeline.parameters for name in stage}
    if of_stages != trained or known != {*source.parameters, *source.buffers}:
        raise UnsupportedCheckpoint(
            f"{source.root} was a pipeline, and its parameters have other names now",
            hint="convert it without --rename",
        )
    return pipeline


def _names_in(layer: int, pipeline: Pipeline, model: Manifest) -> dict[str, str]:
    """The tensors of a layer: their names in its file, and in the whole model."""
    key = dict(pipeline.tied).get(layer)
    prefix = f"{layer}." if key is None else f"{TIED}{key}."
    names = model.state.get("module") or ()
    return {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}


def _refuse_target(target: DeepSpeedTarget, pipeline: Pipeline | None) -> None:
    """Raises for stages of ZeRO and kinds of files that the engine or zckpt does not have here."""
    if pipeline is None:
        if is_elastic(target) or target.experts:
            raise UnsupportedCheckpoint(
                f"{target.source.root}: zckpt writes elastic files and experts for one tensor rank "
                "alone",
                hint="leave out --tp",
            )
        return
    if target.engine.stage > 1:
        raise WrongOption(
            f"--stage {target.engine.stage} does not go with a pipeline",
            hint="DeepSpeed trains pipelines at ZeRO stage 1 and 0: choose --stage 1",
        )
    if target.engine.stage == 0 and target.engine.dtype == "BF16":
        raise WrongOption(
            "--stage 0 does not go with a pipeline in bf16: DeepSpeed does not load its files "
            "(0.19.8)",
            hint="choose --stage 1, and grad_accum_dtype fp32 in the ds_config",
        )
    if is_elastic(target) or target.experts:
        raise UnsupportedCheckpoint(
            f"{target.source.root}: zckpt writes elastic files and experts without pipelines alone"
        )


def _layer_file(
    target: DeepSpeedTarget, pipeline: Pipeline, layer: int, rank: int, tp: int
) -> Shell:
    """The weights of one layer, as one tensor rank has them."""
    storages, names = Storages(), _names_in(layer, pipeline, target.source)
    weights = module_weights(target, True, storages, names.values())
    value = OrderedDict((inner, weights[name]) for inner, name in names.items() if name in weights)
    model = f"-model_{rank:02d}" if tp > 1 else ""
    name = f"{target.tag}/layer_{layer:02d}{model}-model_states.pt"
    return shell(name, value, storages)
