"""A DeepSpeed directory for any data-parallel size and stage, from any manifest, as shells."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from ...core.layout import Layout, Shell
from ...core.manifest import Manifest
from ...errors import counted, listed, literal
from ...naming.order import need_order
from ...training import program_states
from ...training.options import TP, Options
from ..deepspeed_states import reports
from ..deepspeed_states.hyper import check_states
from ..deepspeed_states.target import DeepSpeedTarget
from ..vocabulary import lost_rows, resized
from .files import recovery_scripts
from .like import as_in_run
from .model_ranks import stage_bounds, write_grid, write_pipeline, write_tensor_ranks
from .moe import regroup
from .optimizer_files import is_elastic, run_shells, warnings_of_elastic


def lay_out(source: Manifest, options: Options) -> Layout:
    """The files of the target, and what it cannot take along.

    Raises before anything is written: WrongOption (options or a ds_config that contradict each
    other or the source), MissingData (states that the target needs), InconsistentCheckpoint
    (parameters of one flat buffer whose steps differ). MissingData too if the order of the
    parameters in the flat buffers is not known.
    """
    if "model_ranks" in source.source:
        return write_grid.lay_out(source, options)
    if (apart := write_grid.with_stages(source, options)) is not source:
        return replace(write_grid.lay_out(apart, options), source=apart)
    tp = options[TP] or source.source.get("tp")
    if source.state.get("pipeline") or (tp is not None and tp > 1):
        return write_pipeline.lay_out(source, options)
    if tp is not None:
        rows = write_tensor_ranks.rows_of(source, 1, options)
        model = resized(source, rows)
        layout = _lay_out(write_tensor_ranks.as_one_rank(model), options)
        return replace(layout, source=model, left_out=[*layout.left_out, *lost_rows(source, rows)])
    return _lay_out(source, options)


def lay_out_like(source: Manifest, run: Manifest, options: Options) -> Layout:
    """The same, with the ranks and the groups of a run; raises as `as_in_run` too."""
    alike = as_in_run(source, run, options)
    layout = lay_out(alike, options)
    return replace(layout, source=layout.source or alike)


def _lay_out(source: Manifest, options: Options) -> Layout:
    """The files of one model rank."""
    if not source.source.get("pp"):  # others are refused by name
        stage_bounds.refuse_without_stages(source.root, options)
    need_order(source)
    spread, schedulers = regroup.over_ranks(source, options)
    target = DeepSpeedTarget(spread, options)
    regroup.check_target(target)
    warnings = reports.of_config(target)
    if not options.weights_only:
        check_states(target.engine, source, target.states)
        warnings += (
            warnings_of_elastic(target) if is_elastic(target) else reports.of_assumed(target)
        )
    warnings += [*reports.of_stage_0(target), *reports.of_weights(target)]
    warnings += regroup.warnings(target, source)
    replaced = {item.name for item in schedulers}
    siblings = [pair for pair in target.take_siblings() if pair[0] not in replaced]
    if source.format == "deepspeed":
        target.left_out += recovery_scripts(source.root)

    def shells() -> Iterator[Shell]:
        yield from run_shells(target.tag, [target])
        yield from schedulers

    ranks = counted(target.dp, "rank")
    sizes = listed([*map(str, target.experts.sizes)])
    experts = f", expert-parallel size {sizes}" if sizes else ""
    stage = target.engine.stage
    about = f"a DeepSpeed run of {ranks}, ZeRO stage {stage}{experts}, tag {target.tag}"
    # without ZeRO, load_optimizer_states=False leaves the masters as the model initializes them
    alone = "load_module_only=True" if target.engine.whole else "load_optimizer_states=False"
    only = f", {alone}" if options.weights_only else ""

    def loading(path: str) -> str:
        return f"model_engine.load_checkpoint({literal(path)}{only})"

    line = loading if options.weights_only else program_states.resuming(source, loading)
    return Layout(shells, siblings, target.left_out, warnings, about=about, loading=line)
