"""Writes DeepSpeed's own universal checkpoints.

This module makes shells (files without their tensors' bytes). The model files are those of a run
without pipelines and tensor parallelism.

Rejected alternatives: one copy of the model file for each model rank, as DeepSpeed's converter
writes. The loader reads no weights from these files, and one file with the full model serves any
grid (0.19.8). Also rejected: the copies of frozen weights and buffers that DeepSpeed puts below
zero/ as fp32.pt; nothing reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from msgspec.structs import replace

from ...core.checkpoint.facts import FlatBufferEngine
from ...core.checkpoint.manifest import Manifest, slot_key
from ...core.passes.layout import Layout, Shell
from ...core.storage.filenames import is_tag
from ...errors import (
    InconsistentCheckpoint,
    Notice,
    UnsupportedCheckpoint,
    WrongOption,
    listed,
    literal,
    warning,
)
from ...files.torchshell import Storages, shell
from ...training.faults import UNIVERSAL_STAGE_3
from ...training.options import Options
from .. import zero
from ..deepspeed_states import reports
from ..deepspeed_states.experts import refuse_experts
from ..deepspeed_states.hyper import check_states
from ..deepspeed_states.model_files import model_files
from ..deepspeed_states.optimizer_values import (
    base_state,
    clipping,
    loss_scaling,
    own_statements,
    stage_enum,
    typed_step,
)
from ..deepspeed_states.states import version_numbers
from ..deepspeed_states.target import DeepSpeedTarget, TargetBuffer
from ..vocabulary import omitted_rows, resized
from .files import COMMON, CUTS, MASTER, OURS, POINTER, ZERO, SliceInfo, is_name
from .slicing import keeps_padding, slice_info, used_rows

ADAM = {"exp_avg", "exp_avg_sq"}  # the only states that the loader of stage 3 reads

SliceInfos = Mapping[str, SliceInfo | None]


def lay_out(source: Manifest, options: Options) -> Layout:
    """Lays out a directory that DeepSpeed loads on any numbers of ranks (tp, pp, dp).

    Warnings name the exceptions. Raises before anything is written: the errors of
    deepspeed/write.py, and UnsupportedCheckpoint for experts, for states that the engine's
    universal loader cannot load, and for names that cannot be names of folders.
    """
    refuse_experts(source)
    rows = used_rows(source)
    model = resized(source, rows)
    target = DeepSpeedTarget(_as_one_rank(model), options)
    if target.engine.stage == 0:
        raise WrongOption(
            "target-unsupported",
            "DeepSpeed loads its universal checkpoints only with ZeRO, but this one has stage 0",
            hint="choose a stage: --stage 1, 2 or 3; or write --to deepspeed",
        )
    warnings = reports.of_config(target)
    if not options.weights_only:
        check_states(target.engine, source, target.states)
        warnings += reports.of_assumed(target)
    warnings += reports.of_weights(target)
    # the target does not state how many ranks share a sequence
    warnings += reports.of_batch(target, source, source.run.origin.sequence_ranks(target.dp))
    _check_names(target)
    infos = {name: slice_info(target, name) for name in target.trainable}
    if not options.weights_only:
        _check_loader(target)
    warnings += [*_warnings_of_loading(target), *_warnings_of_layout(target, infos)]
    warnings += _warnings_of_grid(source, target)
    target.omitted += omitted_rows(source, rows)

    def shells() -> Iterator[Shell]:
        yield Shell.of(POINTER, target.tag.encode())
        # the loader skips the modules' weights, so only weights of the source are written
        yield from model_files(target, derives=False)
        yield _common_file(target, f"{target.tag}/{ZERO}/{COMMON}")
        for buffer in target.buffers:
            for name in buffer.names:
                yield from _parameter_files(target, name, buffer.slots, infos[name])

    about = f"a universal checkpoint in DeepSpeed's format, ZeRO stage {target.engine.stage}"
    only = ", load_module_only=True" if options.weights_only else ""

    def loading(path: str) -> str:
        call = f"model_engine.load_checkpoint({literal(path)}, tag={literal(target.tag)}{only})"
        return call + ', with {"checkpoint": {"load_universal": true}} in the ds_config'

    siblings = target.take_siblings()
    return Layout(
        shells,
        siblings,
        target.omitted,
        warnings,
        about=about,
        loading=loading,
        source=model,
    )


def _as_one_rank(source: Manifest) -> Manifest:
    """Removes the grid sizes (tp, pp, sp) of the training run: the target's model is full."""
    engine = source.run.engine
    if isinstance(engine, FlatBufferEngine) and _is_auto(engine.config):
        config = dict(engine.config or {})
        config["tensor_parallel"] = {**config["tensor_parallel"], "autotp_size": 1}
        engine = replace(engine, config=config)
    origin = replace(source.run.origin, tp=None, pp=None, sp=None)
    return source.replace(origin=origin, engine=engine)


def _is_auto(config: Mapping[str, Any] | None) -> bool:
    return isinstance((config or {}).get("tensor_parallel"), Mapping)


# -- checks and warnings


def _check_names(target: DeepSpeedTarget) -> None:
    keys = {slot_key(slot) for slot in target.states}
    for what, names, reserved in (
        ("tag", [target.tag], (POINTER,)),
        ("parameter", list(target.trainable), (COMMON,)),
        ("optimizer state", sorted(keys), (MASTER, "step")),
    ):
        for name in names:
            can_be = is_tag if what == "tag" else is_name
            if not can_be(name) or name in reserved:
                raise UnsupportedCheckpoint(
                    "name-unsupported",
                    f"the {what} {name!r} cannot be the name of a folder or file here",
                    hint="write another format: --to deepspeed, --to universal",
                    subject=name,
                )


def _check_loader(target: DeepSpeedTarget) -> None:
    numbers = sorted({key for buffer in target.buffers for key in buffer.scalars})
    if numbers:
        raise UnsupportedCheckpoint(
            "state-unsupported",
            f"the optimizer keeps one number per parameter ({listed(numbers)}), which DeepSpeed's "
            "universal loader cannot load",
            hint="write --to deepspeed, which stores such numbers too",
        )
    if not target.engine.partitioned:
        if any(map(target.keeps_whole_momenta, target.buffers)):
            raise UnsupportedCheckpoint(
                "optimizer-unsupported",
                "without offload, Muon needs the momenta of complete parameters, but DeepSpeed's "
                "universal loader cuts them",
                hint="write --to deepspeed, or set offload_optimizer in the ds_config",
            )
        return
    for buffer in target.buffers:
        if set(buffer.slots) != ADAM or buffer.step is None:
            slots = listed(sorted(buffer.slots)) or "none"
            raise UnsupportedCheckpoint(
                "state-unsupported",
                "DeepSpeed's universal loader of stage 3 needs exp_avg, exp_avg_sq and a step, "
                f"but the source has {slots}" + ("" if buffer.step is not None else " and no step"),
                hint="write --stage 2, or --to deepspeed",
            )
    steps = sorted({buffer.step for buffer in target.buffers if buffer.step is not None})
    if len(steps) > 1:
        raise InconsistentCheckpoint(
            "one-value-needed",
            f"DeepSpeed's universal loader of stage 3 needs one step for all parameters, but the "
            f"source has {listed(steps)}",
            hint="write --stage 2, or --to deepspeed",
        )


def _warnings_of_loading(target: DeepSpeedTarget) -> list[Notice]:
    warnings = []
    frozen = [name for name in target.frozen if (name, "param") in target.source.entries]
    for what, names in (("frozen weights", frozen), ("buffers", target.source.buffers)):
        if names:
            message = (
                f"DeepSpeed's universal loader does not load {what}, which stay as the model "
                f"initializes them: {listed(names)} (--to deepspeed has no such loss)"
            )
            warnings.append(warning("program-must-set", message, subject=names[0]))
    if target.engine.partitioned and any(group != target.groups[0] for group in target.groups):
        message = (
            "DeepSpeed's universal loader of stage 3 gives all groups the hyper-parameters of "
            "group 0: set those of the others after loading"
        )
        warnings.append(warning("program-must-set", message, subject="param_groups"))
    if target.engine.partitioned:
        # engine.py _load_checkpoint reads an ordinary checkpoint there without using it
        message = (
            "at stage 3 load_checkpoint(DIR, load_optimizer_states=False) fails because there is "
            "no file `latest` (DeepSpeed 0.19.8). To load only the weights, call "
            "load_checkpoint(DIR, load_module_only=True), or write --to deepspeed, for which "
            "the first call works"
        )
        warnings.append(warning("engine-fault", message, subject="load_optimizer_states"))
    if target.engine.partitioned and version_numbers(target.version) < (0, 18):
        # 0.14.5 to 0.17.6, zero/stage3.py: the loader reads only param_shapes[0], and cuts by local
        # rank
        message = (
            f"the source was written by DeepSpeed {target.version}: {UNIVERSAL_STAGE_3.message}: "
            f"{UNIVERSAL_STAGE_3.hint}"
        )
        warnings.append(warning("engine-fault", message))
    return warnings


def _warnings_of_layout(target: DeepSpeedTarget, infos: SliceInfos) -> list[Notice]:
    """Warnings about layouts with which the engine's loader fails, or misplaces tensors."""
    warnings = []
    if target.engine.round_robin and not target.engine.aligned:
        message = (
            "with round_robin_gradients, the engine gives parameters the values of others when it "
            "loads a universal checkpoint (0.19.8): switch it off in the ds_config of the new run"
        )
        warnings.append(warning("engine-fault", message, subject="round_robin_gradients"))
    padded = [name for name in target.trainable if keeps_padding(target, name, infos[name])]
    if padded:
        message = (
            f"{listed(padded)} has more rows than original_vocab_size: an engine whose padded "
            "vocabulary has fewer rows refuses this tensor (DeepSpeed's converter removes padding "
            "rows)"
        )
        warnings.append(warning("program-must-set", message, subject=padded[0]))
    if target.engine.partitioned:
        return warnings
    for number, buffer in enumerate(target.buffers):
        total = buffer.starts[-1]
        if total <= (target.dp - 1) * zero.partition_size(total, target.dp):
            message = (
                f"group {number} has {total} elements, so that some of {target.dp} ranks hold "
                "none: there DeepSpeed's universal loader fails (IndexError, 0.19.8)"
            )
            warnings.append(warning("engine-fault", message))
    return warnings


def _warnings_of_grid(source: Manifest, target: DeepSpeedTarget) -> list[Notice]:
    warnings = []
    pp, tp = source.run.origin.pp or 1, source.run.origin.tp or 1
    if pp > 1 and any(group != target.groups[0] for group in target.groups):
        message = (
            "DeepSpeed's universal loader matches param groups by number: a pipeline stage without "
            "parameters of one group gets wrong hyper-parameters for its other groups"
        )
        warnings.append(warning("engine-fault", message, subject="param_groups"))
    if tp > 1 and target.engine.partitioned and not _is_auto(target.engine.config):
        message = (
            "at stage 3 DeepSpeed's universal loader cuts tensors only for AutoTP: other programs "
            "can load this only with one tensor rank; for more, write --stage 2"
        )
        warnings.append(warning("engine-fault", message))
    return warnings


# -- files below zero/


def _common_file(target: DeepSpeedTarget, name: str) -> Shell:
    """Lays out zero/optimizer_state.pt: groups and loss scale; in stage 3 also the steps."""
    storages = Storages()
    value: dict[str, Any] = {OURS: 1, **own_statements(target), "ds_version": target.version}
    if not target.engine.wraps_bf16:
        value |= {"zero_stage": stage_enum(target), **loss_scaling(target, storages)}
    states = {}
    if target.engine.partitioned:
        value["partition_count"] = target.dp
        states = {
            number: step
            for number, buffer in enumerate(target.buffers)
            if (step := _step(target, buffer, storages))
        }
    else:
        value |= clipping(target)
    if (facts := target.source.run.tensor_parallel) is not None:
        value[CUTS] = facts.to_state()
    # the loader ignores all keys other than groups and states
    groups = value["param_groups"] = base_state(target, states, storages)["param_groups"]
    if target.engine.partitioned:
        value["optimizer_state_dict"] = {"state": states, "param_groups": groups}
    return shell(name, value, storages)


def _step(target: DeepSpeedTarget, buffer: TargetBuffer, storages: Storages) -> dict[str, Any]:
    """{"step": ...} for the state of a sub-group in stage 3; empty if the step is unknown.

    Stage 3 reads the step from there, whatever the optimizer.
    """
    return {} if buffer.step is None else {"step": typed_step(target, buffer.step, storages)}


def _parameter_files(
    target: DeepSpeedTarget, name: str, slots: Mapping[str, str], info: SliceInfo | None
) -> Iterator[Shell]:
    """Yields a parameter's files: fp32.pt, its states, and in stages 1 and 2 also step.pt."""
    folder = f"{target.tag}/{ZERO}/{name}"
    tensors = {MASTER: target.master_dtype(name)}
    tensors |= {slot_key(slot): dtype for slot, dtype in slots.items()}
    for key, dtype in tensors.items():
        storages = Storages()
        shape = target.trainable[name].shape
        value: Any = storages.tensor(dtype, (prod(shape),) if info is None else shape)
        if info is not None:
            value = {**target.thawed(info, storages), "param": value}
        yield shell(f"{folder}/{key}.pt", value, storages)
    step = target.trainable[name].step
    if target.engine.partitioned or target.options.weights_only or step is None:
        return
    if target.step_place.where == "state":
        storages = Storages()
        yield shell(f"{folder}/step.pt", typed_step(target, step, storages), storages)
