"""Writes any manifest as a DeepSpeed directory, for any number of ranks and any stage.

The files are first laid out as shells (files without their tensors' bytes). The files of
each model rank (a rank of pipeline or tensor parallelism) are laid out independently, like those of
a checkpoint without model parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ...core.checkpoint.manifest import Manifest
from ...core.passes.layout import Layout, Shell
from ...errors import Notice, UnsupportedCheckpoint, WrongOption, counted, listed, literal
from ...naming.order import need_order
from ...training import lightning
from ...training.options import Options
from ..deepspeed_states import reports
from ..deepspeed_states.hyper import check_states
from ..deepspeed_states.model_files import model_files
from ..deepspeed_states.target import DeepSpeedTarget
from .files import recovery_scripts
from .moe import regroup
from .moe.experts import expert_files
from .optimizer_files import is_elastic, optimizer_files, warnings_of_elastic
from .run_template import as_in_run
from .stage_0.optimizer import model_shells
from .target_ranks import TargetRanks, layer_files, target_ranks


def lay_out(source: Manifest, options: Options, trained: Manifest | None = None) -> Layout:
    """Lays out the target's files (without their tensors' bytes), and lists what they cannot store.

    A warning says how to keep the global batch of `trained` (default: `source`). Raises
    WrongOption, MissingData, InconsistentCheckpoint (different steps in one flat buffer) and
    UnsupportedCheckpoint before anything is written.
    """
    need_order(source)
    ranks = target_ranks(source, options)
    targets = _targets(ranks, options)
    first, grid = targets[0], ranks.grid
    of_layers = [DeepSpeedTarget(each, options) for each in ranks.wholes] if ranks.pipeline else []

    def shells() -> Iterator[Shell]:
        yield Shell.of("latest", first.tag.encode())
        for target in targets:
            yield from _files_of_model_rank(target)
        if ranks.pipeline is not None:
            yield from layer_files(ranks.pipeline, of_layers)

    siblings = first.take_siblings()
    omitted = dict.fromkeys(line for target in targets for line in target.omitted)
    scripts = recovery_scripts(source.root) if source.format == "deepspeed" else []
    about = counted(first.dp, "rank" if grid is None else "data-parallel rank")
    about += "" if grid is None else f", pp {grid.pp}, tp {grid.tp}"
    about += f", sequence-parallel size {first.engine.sp}" if first.engine.sp > 1 else ""
    about += f", ZeRO stage {first.engine.stage}"
    if sizes := listed([*map(str, first.experts.sizes)]):
        about += f", expert-parallel size {sizes}"
    # without ZeRO, load_optimizer_states=False leaves the masters as the model initializes them
    alone = "load_module_only=True" if first.engine.whole else "load_optimizer_states=False"
    only = f", {alone}" if options.weights_only else ""

    def loading(path: str) -> str:
        return f"model_engine.load_checkpoint({literal(path)}{only})"

    return Layout(
        shells,
        [*siblings, *ranks.layer_siblings(first.tag)],
        [*omitted, *ranks.omitted, *scripts],
        list(dict.fromkeys(_warnings(ranks, first, trained or source))),
        about=f"a DeepSpeed run of {about}, tag {first.tag}",
        loading=loading if options.weights_only else lightning.resuming(source, loading),
        read_back=None if grid is None else partial(ranks.read_back, tag=first.tag),
        source=ranks.source,
        checks=ranks.checks(),
    )


def lay_out_like(source: Manifest, run: Manifest, options: Options) -> Layout:
    """Lays out the source's files for the ranks and param groups of another run (`--like`).

    Raises the errors of `lay_out` and of `as_in_run` (run_template.py).
    """
    return lay_out(as_in_run(source, run, options), options, trained=source)


def _files_of_model_rank(target: DeepSpeedTarget) -> Iterator[Shell]:
    """Yields the shells of one model rank's files; a shell is a file without its tensors' bytes."""
    if target.engine.whole:
        yield from model_shells(target)
    else:
        yield from optimizer_files(target, is_elastic(target))
        yield from model_files(target, derives=True)
    yield from expert_files(target)


def _targets(ranks: TargetRanks, options: Options) -> list[DeepSpeedTarget]:
    """Decides the files of each model rank; raises if the source lacks what they need."""
    targets: list[DeepSpeedTarget] = []
    for manifest in ranks.ranks:
        targets.append(DeepSpeedTarget(regroup.over_ranks(manifest, options), options))
        regroup.check_target(targets[-1])
    if ranks.grid is not None:
        _refuse(ranks, targets)
    if not options.weights_only:
        for target in targets:
            check_states(target.engine, target.source, target.states)
    return targets


def _refuse(ranks: TargetRanks, targets: list[DeepSpeedTarget]) -> None:
    """Raises for settings that DeepSpeed or zckpt does not support for this target's ranks.

    Some settings do not work with pipelines, and some not with tensor parallelism either.
    """
    engine, is_pipeline = targets[0].engine, ranks.pipeline is not None
    if is_pipeline and engine.stage > 1:
        raise WrongOption(
            "options-conflict",
            f"--stage {engine.stage} does not go with a pipeline",
            hint="DeepSpeed trains pipelines at ZeRO stage 1 and 0: choose --stage 1",
        )
    if is_pipeline and engine.stage == 0 and engine.dtype == "BF16":
        raise WrongOption(
            "options-conflict",
            "--stage 0 does not go with a pipeline in bf16: DeepSpeed does not load its files "
            "(0.19.8)",
            hint="choose --stage 1, and grad_accum_dtype fp32 in the ds_config",
        )
    if any(map(is_elastic, targets)):
        raise UnsupportedCheckpoint(
            "target-unsupported",
            f"{ranks.source.root}: zckpt writes elastic files only without a pipeline and without "
            "tensor parallelism",
            file=ranks.source.root,
        )


def _warnings(ranks: TargetRanks, first: DeepSpeedTarget, trained: Manifest) -> Iterator[Notice]:
    yield from ranks.source.notices.warnings
    yield from reports.of_config(first)
    if not first.options.weights_only:
        is_written = is_elastic(first)
        yield from warnings_of_elastic(first) if is_written else reports.of_assumed(first)
    yield from reports.of_stage_0(first, ranks.wholes)
    yield from reports.of_sequences(first)
    yield from reports.of_weights(first)
    yield from reports.of_batch(first, trained, first.engine.sp)
    yield from ranks.inferred
    yield from regroup.warnings(first, ranks.ranks[0])
