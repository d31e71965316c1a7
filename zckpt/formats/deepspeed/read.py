"""The manifest of a DeepSpeed checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from ...core.agreement import KEEP
from ...core.facts import layers_of
from ...core.manifest import Manifest
from ...core.merge import agreed_steps, numbered_alike, with_steps
from ...errors import (
    MALFORMED,
    InconsistentCheckpoint,
    MissingData,
    UnsupportedCheckpoint,
    WrongOption,
    not_understood,
)
from ...naming.tensor_rules import rules_of
from ..deepspeed_states.agreement import check_names
from ..deepspeed_states.directories import TagDirectory, refuse
from ..deepspeed_states.states import open_files, open_layers
from ..reading import USUAL, Reading
from .files import locate
from .model_ranks.apart import (
    ModelGrid,
    OpenedRank,
    in_grid,
    manifests_of,
    opened_ranks,
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
from .model_ranks.pipeline import joined_stages, joined_stages_with_experts
from .model_ranks.tensor_ranks import joined_slices
from .model_ranks.universal_info import of_json
from .moe.ep_optimizers import compare_ranks, manifest_of_experts


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
    if reading.ranks_apart and not files.is_plain:
        ranks = _apart(directory, files, reading)
        rules = {"tp_rules": reading.tp_rules} if reading.tp_rules else {}
        return replace(ranks, source={**ranks.source, **rules})
    models = tensor_ranks(directory, files, reading)
    if reading.with_slicings or files.tp > 1:
        return _joined(models, reading.tp_rules, reading.step_policy)
    return models[0]


def _joined(ranks: Sequence[Manifest], tp_rules: str | None, step_policy: str | None) -> Manifest:
    """The model of all tensor ranks."""
    rules = [] if tp_rules is None else [rules_of(tp_rules, of_json)]
    return replace(joined_slices(ranks, rules, step_policy), models=tuple(ranks))


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
    return compare_copies(manifest, replicas)


def _own_copies(manifest: Manifest) -> list[str]:
    """Warnings of copies that differ, if anything says which tensors are copies.

    Each model rank keeps its own: nothing else has to be known of slices.
    """
    stages = compare_stages(manifest)
    if len(manifest.models) == 1:
        return stages
    try:
        model = _joined(manifest.models, manifest.source.get("tp_rules"), KEEP)
    except (InconsistentCheckpoint, MissingData, UnsupportedCheckpoint, WrongOption):
        return stages
    return [*stages, *compare_copies(model, OWN)]


def averaged(manifest: Manifest) -> Manifest:
    """With the mean of the tensor ranks' copies of each parameter, for --replicas mean."""
    tp = int(manifest.source.get("tp") or 0)
    if tp < 2 or "model_ranks" in manifest.source:  # each keeps its own copy
        return manifest
    return with_means(manifest)


def check_slices(manifest: Manifest) -> None:
    """Raises InconsistentCheckpoint if all tensor ranks hold the same of what a rule cuts."""
    if int(manifest.source.get("tp") or 0) > 1:
        rules = manifest.state["tensor_parallel"]["rules"]
        refuse_equal_slices(manifest.root, manifest.models, rules)


def _apart(directory: TagDirectory, files: GridFiles, reading: Reading) -> Manifest:
    """The model ranks apart, whose contents show the same grid."""
    opened, manifests = _model_ranks(directory, files, reading)
    steps = agreed_steps(numbered_alike(manifests)[0], reading.step_policy)
    manifests = [with_steps(manifest, steps) for manifest in manifests]
    models = _models(files, opened, manifests, reading.step_policy)
    apart = in_grid(opened, manifests, ModelGrid.of(files, models[0]))
    ranks = stacked(apart)
    warnings = [*ranks.warnings, *(line for model in models for line in model.warnings)]
    return replace(
        ranks,
        models=tuple(models),
        sibling_weights=tuple(weights_of_layers(apart, models)),
        warnings=tuple(dict.fromkeys(warnings)),
    )


def tensor_ranks(
    directory: TagDirectory,
    files: GridFiles,
    reading: Reading = USUAL,
    tied: Mapping[int, str] | None = None,
) -> list[Manifest]:
    """The model of each tensor rank by itself: its slices of all stages of the pipeline.

    `tied` gives the keys of tied layers by the numbers of their files, for files without bytes.
    """
    first = files.ranks[0]
    if files.is_plain and first.of_ep and not first.optimizers:
        return [manifest_of_experts(directory, first, reading)]
    opened, manifests = _model_ranks(directory, files, reading, tied)
    return manifests if files.is_plain else _models(files, opened, manifests, reading.step_policy)


def _model_ranks(
    directory: TagDirectory,
    files: GridFiles,
    reading: Reading,
    tied: Mapping[int, str] | None = None,
) -> tuple[list[OpenedRank], list[Manifest]]:
    """What the files of each model rank say, and its manifest."""
    layers = [files.layers_of(tp) for tp in range(files.tp)] if files.layers else None
    opened = opened_ranks(directory, files.ranks, layers, reading, tied)
    states = [each.states for each in opened]
    check_grid(directory, files, states)
    with_experts = [bool(each.model.get("num_experts")) for each in states]
    if any(with_experts) and not all(with_experts):
        refuse(directory, SOME_STAGES)
    if files.is_plain:
        return opened, [opened[0].manifest(reading.step_policy)]
    return opened, manifests_of(opened, files.ranks, reading.step_policy)


def _models(
    files: GridFiles,
    opened: Sequence[OpenedRank],
    manifests: Sequence[Manifest],
    step_policy: str | None,
) -> list[Manifest]:
    """The model of each tensor rank, from its stages."""
    sizes, models = {"tp": files.tp, "pp": files.pp}, []
    manifests = [replace(each, source={**each.source, **sizes}) for each in manifests]
    for tp in range(files.tp):
        stages, own = manifests[tp :: files.tp], opened[tp :: files.tp]
        if files.layers:
            layers = open_layers(files.layers_of(tp), files.parsed)
            states = [each.states for each in own]
            models.append(joined_stages(stages, layers, states, step_policy, own[0].tied))
        elif files.pp == 1:
            models += stages
        else:
            models.append(joined_stages_with_experts(stages, step_policy))
    return models
