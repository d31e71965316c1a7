"""The manifest of a DeepSpeed checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from ...core.facts import layers_of
from ...core.manifest import Manifest
from ...errors import (
    MALFORMED,
    InconsistentCheckpoint,
    MissingData,
    UnsupportedCheckpoint,
    WrongOption,
    not_understood,
)
from ...naming.tensor_rules import rules_of
from ...training.steps import KEEP
from ..deepspeed_states.directories import TagDirectory, refuse
from ..deepspeed_states.saved_names import check_names
from ..deepspeed_states.states import open_files, open_layers
from ..reading import USUAL, Reading
from .files import NAMED, Numbered, locate
from .model_ranks.apart import (
    ModelGrid,
    of_model_rank,
    of_rank,
    open_apart,
    stacked,
    weights_of_layers,
)
from .model_ranks.copies import (
    OWN,
    compare_copies,
    compare_stages,
    refuse_equal_slices,
    refuse_sums,
    with_means,
)
from .model_ranks.grid import SOME_STAGES, GridFiles, check_grid, grid_files
from .model_ranks.pipeline import joined_stages
from .model_ranks.tensor_ranks import joined_slices
from .model_ranks.universal_info import of_json
from .moe.stages import joined_stages_with_experts
from .moe.whole_experts import compare_ranks, manifest_of_experts
from .ranks import open_ranks
from .stage_0.stages import alike, open_stages
from .stage_0.whole import open_whole
from .stage_0.whole_states import manifest_of_whole


def read(path: str, reading: Reading = USUAL) -> Manifest:
    """The manifest of a run directory, a tag directory, or a trainer's directory around one.

    Only stage 0 needs `reading.param_names`. With `reading.ranks_apart` several model ranks are not
    joined, and each name begins with the number of its rank. With `reading.with_slicings` the rules
    are applied to a run of one tensor rank too, which they do not change. Raises
    NotACheckpoint, IncompleteCheckpoint (a rank is missing), InconsistentCheckpoint (ranks
    contradict each other), CorruptCheckpoint, MissingData (nothing says how parameters are cut, or
    what they are called), UnsupportedCheckpoint (AutoEP, NVMe offload, before 0.5.10).
    """
    directory = locate(path, reading.tag)
    try:
        files = grid_files(directory)
        notes = check_names(open_files(files.paths, files.parsed))
        return replace(_manifest(directory, files, reading), notes=tuple(notes))
    except MALFORMED as error:
        raise not_understood(directory.path, error) from error


def _manifest(directory: TagDirectory, files: GridFiles, reading: Reading) -> Manifest:
    numbered = Numbered(reading.param_names, reading.weights_only)
    if reading.ranks_apart and not files.is_plain:
        ranks = _apart(directory, files, reading.step_policy, numbered)
        rules = {"tp_rules": reading.tp_rules} if reading.tp_rules else {}
        return replace(ranks, source={**ranks.source, **rules})
    models = tensor_ranks(directory, files, reading.step_policy, numbered)
    if reading.with_slicings or files.tp > 1:
        return _joined(models, reading.tp_rules, reading.step_policy)
    return models[0]


def _joined(ranks: Sequence[Manifest], tp_rules: str | None, step_policy: str | None) -> Manifest:
    """The model of all tensor ranks."""
    rules = [] if tp_rules is None else [rules_of(tp_rules, of_json)]
    return joined_slices(ranks, rules, step_policy)


def check(manifest: Manifest, replicas: str | None) -> list[str]:
    """Compares the copies that model ranks hold of a tensor; gives warnings.

    Called before a conversion writes anything. Raises InconsistentCheckpoint if copies of tensor
    ranks differ and `replicas` (rank0, mean) does not say what is taken, or if all ranks hold the
    same of a parameter that a rule cuts; UnsupportedCheckpoint for parts of a sum.
    """
    if "model_ranks" in manifest.source:
        return _own_copies(manifest)
    if manifest.source.get("zero_stage") == 0 and layers_of(manifest.engine):
        return compare_ranks(manifest, replicas)
    tp = int(manifest.source.get("tp") or 0)
    if not tp:
        return []
    refuse_sums(manifest.root, (manifest.state.get("tensor_parallel") or {}).get("rules") or {})
    check_slices(manifest)
    return compare_copies(manifest, tp, replicas)


def _own_copies(manifest: Manifest) -> list[str]:
    """Warnings of copies that differ, if anything says which tensors are copies.

    Each model rank keeps its own: nothing else has to be known of slices.
    """
    tp = int(manifest.source.get("tp") or 1)
    stages = compare_stages(manifest, tp)
    if tp == 1:
        return stages
    directory = locate(manifest.root, None)
    weights = Numbered(weights_only=True)
    try:
        ranks = tensor_ranks(directory, grid_files(directory), KEEP, weights)
        model = _joined(ranks, manifest.source.get("tp_rules"), KEEP)
    except (InconsistentCheckpoint, MissingData, UnsupportedCheckpoint, WrongOption):
        return stages  # stage 0 may need the user's names too
    return [*stages, *compare_copies(model, tp, OWN)]


def averaged(manifest: Manifest) -> Manifest:
    """With the mean of the tensor ranks' copies of each parameter, for --replicas mean."""
    tp = int(manifest.source.get("tp") or 0)
    if tp < 2 or "model_ranks" in manifest.source:  # each keeps its own copy
        return manifest
    return with_means(manifest, tp)


def check_slices(manifest: Manifest) -> None:
    """Raises InconsistentCheckpoint if all tensor ranks hold the same of what a rule cuts."""
    if int(manifest.source.get("tp") or 0) < 2:
        return
    directory = locate(manifest.root, None)
    weights = Numbered(weights_only=True)
    pipeline = manifest.state.get("pipeline") or {"tied": ()}
    tied = {int(number): str(key) for number, key in pipeline["tied"]}
    ranks = tensor_ranks(directory, grid_files(directory), KEEP, weights, tied)
    refuse_equal_slices(manifest.root, ranks, manifest.state["tensor_parallel"]["rules"])


def _apart(
    directory: TagDirectory, files: GridFiles, step_policy: str | None, numbered: Numbered
) -> Manifest:
    """The model ranks apart, once the joined reading has found the same grid in their contents."""
    models = tensor_ranks(directory, files, KEEP, numbered)
    grid = ModelGrid.of(files, models[0])
    apart = open_apart(directory, files.ranks, grid, step_policy, numbered, files)
    ranks = stacked(apart)
    warnings = [*ranks.warnings, *(line for model in models for line in model.warnings)]
    return replace(
        ranks,
        sibling_weights=tuple(weights_of_layers(apart, models)),
        warnings=tuple(dict.fromkeys(warnings)),
    )


def tensor_ranks(
    directory: TagDirectory,
    files: GridFiles,
    step_policy: str | None,
    numbered: Numbered = NAMED,
    tied: Mapping[int, str] | None = None,
) -> list[Manifest]:
    """The model of each tensor rank by itself: its slices of all stages of the pipeline.

    `tied` gives the keys of tied layers by the numbers of their files, for files without bytes.
    """
    staged = bool(files.layers)
    if not files.ranks[0].optimizers:  # not the ds_config: bf16 before 0.17.6 has some in stage 0
        return _without_zero(directory, files, step_policy, numbered, tied)
    layers_of = [files.layers_of(tp) if staged else None for tp in range(files.tp)]
    ranks = [
        open_ranks(directory, each, layers_of[number % files.tp])
        for number, each in enumerate(files.ranks)
    ]
    grid = check_grid(directory, files, ranks)
    with_experts = [bool(each.model.get("num_experts")) for each in ranks]
    if any(with_experts) and not all(with_experts):
        refuse(directory, SOME_STAGES)
    pairs = zip(ranks, files.ranks, strict=True)
    read_one = of_rank if files.is_plain else of_model_rank
    manifests = [read_one(each, own, step_policy) for each, own in pairs]
    if files.is_plain:
        return manifests
    sizes = {"dp": grid.dp, "tp": grid.tp, "pp": grid.pp}
    models = []
    for tp in range(files.tp):
        of_stages = [replace(m, source={**m.source, **sizes}) for m in manifests[tp :: files.tp]]
        if files.pp == 1 and not staged:
            models += of_stages
            continue
        if not staged:
            models.append(joined_stages_with_experts(of_stages, step_policy))
            continue
        opened = open_layers(files.layers_of(tp), files.parsed)
        models.append(joined_stages(of_stages, opened, ranks[tp :: files.tp], step_policy, tied))
    return models


def _without_zero(
    directory: TagDirectory,
    files: GridFiles,
    step_policy: str | None,
    numbered: Numbered,
    tied: Mapping[int, str] | None,
) -> list[Manifest]:
    """The manifest of each tensor rank in stage 0."""
    if files.layers:
        return _pipelines_without_zero(directory, files, step_policy, numbered, tied)
    if files.ranks[0].of_ep and len(files.ranks) == 1:
        return [manifest_of_experts(directory, files.ranks[0], numbered, step_policy)]
    wholes = [open_whole(directory, each, numbered) for each in files.ranks]
    check_grid(directory, files, [whole.states for whole in wholes])
    manifests = [manifest_of_whole(whole, step_policy) for whole in wholes]
    if files.is_plain:
        return manifests
    sizes = {"tp": files.tp, "pp": files.pp}
    return [replace(each, source={**each.source, **sizes}) for each in manifests]


def _pipelines_without_zero(
    directory: TagDirectory,
    files: GridFiles,
    step_policy: str | None,
    numbered: Numbered,
    tied: Mapping[int, str] | None,
) -> list[Manifest]:
    """The pipeline of each tensor rank in stage 0."""
    models, every = [], []
    for tp in range(files.tp):
        opened = open_layers(files.layers_of(tp), files.parsed)
        stages = open_stages(directory, files.ranks[tp :: files.tp], opened, numbered, tied)
        states = [whole.states for whole in stages.wholes]
        every.append(states)
        sizes = {"tp": files.tp, "pp": files.pp}
        manifests = [manifest_of_whole(whole, step_policy) for whole in stages.wholes]
        manifests = [replace(each, source={**each.source, **sizes}) for each in alike(manifests)]
        models.append(joined_stages(manifests, opened, states, step_policy, stages.tied))
    check_grid(directory, files, [states[stage] for stage in range(files.pp) for states in every])
    return models
