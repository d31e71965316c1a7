"""A DeepSpeed directory of several model ranks, for another data-parallel size or other stages.

Each model rank is written as a checkpoint by itself. Files of layers are copied unchanged. At the
same stages nothing is joined. For other stages of a pipeline the whole pipeline is cut again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from msgspec.structs import replace

from ....core.facts import layers_of
from ....core.layout import Layout, Shell
from ....core.manifest import Manifest
from ....core.states import without
from ....errors import UnsupportedCheckpoint, WrongOption, counted, literal
from ....files.torchfile import Parsed
from ....training.options import ALLOW_OBJECT, DP, DROP_STATE, DTYPE, EP, PARAM_NAMES, PP, Options
from ...deepspeed_states import reports
from ...deepspeed_states.hyper import check_states
from ...deepspeed_states.options import MAX_GROUP_SIZE, PP_BOUNDS, PP_PARTITION, STAGE
from ...deepspeed_states.target import DeepSpeedTarget
from ...reading import USUAL
from ..files import locate, rank_files, recovery_scripts
from ..moe import regroup
from ..optimizer_files import is_elastic, run_shells
from . import write_pipeline
from .apart import (
    ModelGrid,
    as_rank,
    in_grid,
    layer_siblings,
    manifests_of,
    opened_ranks,
    stacked,
)
from .copies import compare_copies
from .recut import ModelRanks, layers_of_names, recut, under_names_of
from .stage_bounds import STAGES, refuse_without_stages
from .write_tensor_ranks import target_of

OF_WEIGHTS = frozenset({STAGE.name, DTYPE.name})  # they change files of layers too
TAKEN = frozenset(
    option.name
    for option in (DP, EP, MAX_GROUP_SIZE, *STAGES, ALLOW_OBJECT, PARAM_NAMES, DROP_STATE)
)


def lay_out(source: Manifest, options: Options) -> Layout:
    """The files of the target; `source` has the names of `apart.stacked`.

    Raises WrongOption for options that do not apply to several model ranks, and what
    `write.lay_out` raises.
    """
    tag = str(source.source["tag"])
    before: ModelGrid = source.ranks[0].source["model_rank"].grid
    _refuse_options(source.root, before, options)
    if before.tp == 1 and any(option.name in OF_WEIGHTS for option, _ in options.given):
        return _as_pipeline(source, options)
    ranks = _ranks_of(source, before, options)
    targets, schedulers = _targets_of(source.root, ranks, options)
    first, grid, models = targets[0], ranks.grid, ranks.models

    def shells() -> Iterator[Shell]:
        yield from run_shells(tag, targets)
        yield from schedulers

    def read_back(path: str) -> Manifest:
        """Files of layers are not there yet."""
        directory = locate(path, tag)
        names, parsed = sorted(os.listdir(directory.path)), Parsed()
        written = [rank_files(directory, names, parsed, number) for number in range(len(targets))]
        layers = [dict[int, str]()] * grid.tp if grid.staged else None
        opened = opened_ranks(directory, written, layers, USUAL)
        shells = stacked(in_grid(opened, manifests_of(opened, written, None), grid))
        return under_names_of(source, shells, grid.tp) if models else shells

    def check() -> list[str]:
        return [line for model in models for line in compare_copies(model, None)]

    replaced = {item.name for item in schedulers}
    siblings = [pair for pair in first.take_siblings() if pair[0] not in replaced]
    left_out = dict.fromkeys(line for target in targets for line in target.left_out)
    return Layout(
        shells,
        [*siblings, *layer_siblings(source.models, tag)],
        [*left_out, *recovery_scripts(source.root)],
        list(dict.fromkeys([*source.warnings, *_warnings(ranks, first)])),
        about=f"a DeepSpeed run of {counted(first.dp, 'data-parallel rank')}, pp {grid.pp}, tp "
        f"{grid.tp}, ZeRO stage {first.engine.stage}, tag {tag}",
        loading=lambda path: f"model_engine.load_checkpoint({literal(path)})",
        read_back=read_back,
        check=check if models else None,
    )


def _ranks_of(source: Manifest, grid: ModelGrid, options: Options) -> ModelRanks:
    """The source's model ranks, or those of other stages, if the options ask for some.

    Raises WrongOption if a stage would have no layer of experts and another one has some.
    """
    ranks = ModelRanks(grid, source.ranks)
    if _cuts_again(source, grid, options):
        ranks = recut(ranks, source.models, options)
    with_experts = [bool(layers_of(manifest.engine)) for manifest in ranks.ranks]
    if any(with_experts) and not all(with_experts):
        raise WrongOption(
            f"a stage of the target would have none of the layers of experts of {source.root}, and "
            "DeepSpeed trains no such pipeline",
            hint="choose other bounds with --pp-bounds: every stage needs a layer of experts",
        )
    return ranks


def _targets_of(
    root: str, ranks: ModelRanks, options: Options
) -> tuple[list[DeepSpeedTarget], list[Shell]]:
    """A target for each model rank, and the files of schedulers beside them.

    Raises UnsupportedCheckpoint for elastic files, and for states that the engine does not load.
    """
    targets: list[DeepSpeedTarget] = []
    schedulers: list[Shell] = []
    for manifest in ranks.ranks:
        spread, schedulers = regroup.over_ranks(manifest, options)
        targets.append(target_of(without(spread, options[DROP_STATE]), options))
        regroup.check_target(targets[-1])
    if any(map(is_elastic, targets)):
        raise UnsupportedCheckpoint(f"{root}: zckpt writes elastic files for one model rank alone")
    for target in targets:
        check_states(target.engine, target.source, target.states)
    return targets, schedulers


def _warnings(ranks: ModelRanks, first: DeepSpeedTarget) -> Iterator[str]:
    """What the target's ranks lack or had to infer; `first` is the target of the first one."""
    if not ranks.grid.staged or not first.engine.whole:  # files of layers have the weights alone
        yield from reports.of_weights(first)
    yield from ranks.inferred
    yield from regroup.warnings(first, ranks.ranks[0])
    parameters = (about for model in ranks.models for about in model.parameters.values())
    has_frozen = any(not about.trainable for about in parameters)  # which stage lists them is lost
    if has_frozen and first.engine.whole and first.wrapper is None:
        yield reports.TRAINED_ALONE


def _as_pipeline(source: Manifest, options: Options) -> Layout:
    """The files of a pipeline whose layers change too; one tensor rank needs no rules for that."""
    model = without(source.models[0], options[DROP_STATE])
    model = replace(model, fingerprints=source.fingerprints, siblings=source.siblings)
    layout = write_pipeline.lay_out(model, options)
    return replace(layout, check=lambda: compare_copies(model, None))


def _refuse_options(root: str, grid: ModelGrid, options: Options) -> None:
    """Raises WrongOption for what needs files of layers to change, or the whole model."""
    for option, _ in options.given:
        is_known = option.name in OF_WEIGHTS
        if option.name in TAKEN or (is_known and (not grid.staged or grid.tp == 1)):
            continue
        raise WrongOption(
            f"{option.flag} does not apply to {root}, which was saved by several model ranks",
            hint=f"give --tp {grid.tp} too: then files of layers are written anew"
            if is_known
            else "`zckpt convert --to universal` takes the whole model",
        )


def _cuts_again(source: Manifest, grid: ModelGrid, options: Options) -> bool:
    """Whether the target has other stages; raises WrongOption if the source has no pipeline."""
    if all(options[option] is None for option in STAGES):
        return False
    if not grid.staged and not layers_of(source.engine):
        refuse_without_stages(source.root, options)
    is_given = options[PP_BOUNDS] is not None or options[PP_PARTITION] is not None
    return is_given or options[PP] != grid.pp


def with_stages(source: Manifest, options: Options) -> Manifest:
    """A run of one model rank with experts under the names of `apart.stacked`, if --pp asks."""
    if source.format != "deepspeed" or not layers_of(source.engine):
        return source
    if all(options[option] is None for option in STAGES):
        return source
    if source.source.get("pp") or not source.source["zero_stage"]:
        return source
    layers_of_names(source, options)
    rank = as_rank(source, 0, ModelGrid(1, 1, False, None), source.buffers)
    return replace(stacked([rank]), models=(source,))
