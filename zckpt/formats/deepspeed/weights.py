"""Reads the remaining weights of a run whose optimizer is lost, damaged or too old.

    stage 1, 2   mp_rank_00_model_states.pt has all weights, only masters are in the optimizer files
    stage 3      the weights are in the optimizer files too: without these, nothing is left
    stage 0      the optimizer is in the model file; a file without one is of a run without one

Only runs with one model rank and without experts are read this way, because their model file has
all weights.
"""

from __future__ import annotations

import os

from msgspec.structs import replace

from ...core.checkpoint.manifest import Manifest
from ...core.storage.inventory import parse_name
from ...errors import InconsistentCheckpoint, ZckptError
from ...files.torchfile import Parsed, TorchFile
from ..deepspeed_states.agreement import check_names
from ..deepspeed_states.directories import MODEL, MODEL_3, OPTIMIZER, ROLES, TagDirectory
from ..deepspeed_states.manifest import has_zenflow, manifest_of
from ..deepspeed_states.module_names import as_in_module
from ..deepspeed_states.states import (
    EngineStates,
    FlatBuffer,
    ModuleOverrides,
    dictionary,
    open_files,
    shapes_of_groups,
)
from ..reading import Reading
from ..weights_alone import OF_FILES, weights_or_raise
from .stage_0.naming import shapes_of, weights_in

IN_STAGE_3 = "in stage 3 the optimizer's files hold the weights too: without them nothing is left"


def without_optimizer(
    directory: TagDirectory, path: str, reading: Reading, error: ZckptError
) -> Manifest:
    """Reads only the weights of a checkpoint; `error` was raised when its optimizer was read.

    Raises `error` again if the weights cannot be read either, if something else than the optimizer
    may be damaged, or if the user's command does not accept weights alone.
    """
    roles = {
        name: role_of_file.role
        for name in os.listdir(directory.path)
        if (role_of_file := parse_name(ROLES, name))
    }
    there = [*roles.values()]
    if not _is_of_optimizer(error):
        raise error
    if MODEL_3 in there:
        raise error.with_way(IN_STAGE_3) from error
    if there.count(MODEL) != 1 or not {*there} <= {MODEL, OPTIMIZER}:
        raise error
    file = os.path.join(directory.path, next(name for name, own in roles.items() if own is MODEL))

    def read_weights(_: Reading) -> Manifest:
        return _manifest_of(directory, _opened(file, error))

    def is_all(weights: Manifest) -> bool:
        return OPTIMIZER not in there and bool(weights.run.origin.zero_stage)

    weights = weights_or_raise(error, read_weights, path, reading, has_masters=True, is_all=is_all)
    return weights.replace(lost=()) if _had_no_optimizer(weights) else weights


def _is_of_optimizer(error: ZckptError) -> bool:
    """Whether only the optimizer's files may be wrong, so that the weights can be read.

    If `error` says that files contradict each other, it must name an optimizer file.
    """
    if isinstance(error, OF_FILES):
        return True
    role_of_file = parse_name(ROLES, error.file or "")
    return (
        isinstance(error, InconsistentCheckpoint)
        and role_of_file is not None
        and role_of_file.role is OPTIMIZER
    )


def _opened(path: str, error: ZckptError) -> TorchFile:
    """Opens a model file that has all weights of the model.

    Raises `error` if other model ranks or files of experts have weights too, if the file has stage
    0's optimizer, or if ZenFlow's weights may be transposed.
    """
    (file,) = open_files([path], Parsed())
    file.value = model = as_in_module(dictionary(file, file.value))
    is_alone = model.get("mp_world_size") in (None, 1) and not model.get("num_experts")
    if not (is_alone and isinstance(model.get("module"), dict)):
        raise error
    if model.get("optimizer") or has_zenflow(model.get("ds_config")):
        raise error
    check_names([file])
    return file


def _had_no_optimizer(weights: Manifest) -> bool:
    """Whether the run had no optimizer, so that nothing is lost.

    If it had one, stage 0 would have saved it in the model file. Always False in bf16: before
    0.17.6, stage 0 saved a bf16 optimizer in separate files (BF16_Optimizer's), which may be lost.
    """
    engine = weights.run.engine
    return weights.run.origin.zero_stage == 0 and (engine is None or engine.dtype != "BF16")


def _manifest_of(directory: TagDirectory, file: TorchFile) -> Manifest:
    """The manifest of the weights in one model file.

    If the file does not list the trained parameters, all weights count as trained.
    """
    model, dp = file.value, file.value.get("dp_world_size")
    module = ((name, file, value) for name, value in model["module"].items())
    weights = shapes_of(weights_in(module, {*(model.get("buffer_names") or ())}))
    listed = model.get("param_shapes")  # in the optimizer's files before 0.6.0
    shapes = [weights] if listed is None else shapes_of_groups(listed, file)
    states = EngineStates(
        directory,
        [file],
        [],
        model,
        [],
        [],
        str(model.get("ds_version") or ""),
        dp if isinstance(dp, int) and dp > 0 else 1,
        partitioned=False,
        overrides=ModuleOverrides(shapes=shapes),
    )
    buffers = [FlatBuffer(0, own, (), None, None, {}, (), ()) for own in shapes]
    manifest = manifest_of(states, buffers, "deepspeed", states.config, states.module_dtype)
    members = {name: replace(own, group=None) for name, own in manifest.parameters.items()}
    return manifest.replace(parameters=members, optimizer=None, zero_padding=True)
