"""The manifest of a DeepSpeed checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from ...core.agreement import KEEP
from ...core.facts import FlatBufferEngine, layers_of
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
from ..deepspeed_states.directories import TagDirectory
from ..deepspeed_states.states import open_files, open_layers
from ..reading import USUAL, Reading
from .files import locate
from .model_ranks.copies import (
    OWN,
    compare_copies,
    compare_stages,
    refuse_equal_slices,
    refuse_sums,
    with_means,
)
from .model_ranks.grid import GridFiles, grid_files
from .model_ranks.pipeline import joined_stages, joined_stages_with_experts
from .model_ranks.rank_manifests import model_ranks, stacked, with_weights_of_layers
from .model_ranks.tensor_ranks import joined_slices
from .model_ranks.universal_info import of_json
from .moe.ep_optimizers import manifest_of_experts


def read(path: str, reading: Reading = USUAL) -> Manifest:
    """The manifest of a run directory, a tag directory, or a trainer's directory around one.

    Only stage 0 needs `reading.param_names`. With `reading.ranks_apart` several model ranks are not
    joined: the manifest has them apart. With `reading.with_slicings` the rules
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
    if reading.with_slicings or files.grid.tp > 1:
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
    if manifest.ranks:
        return _own_copies(manifest)
    if manifest.source.get("zero_stage") == 0 and layers_of(manifest.engine):
        return compare_copies(manifest, replicas if replicas == "rank0" else None)
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
    if tp < 2 or manifest.ranks:  # each keeps its own copy
        return manifest
    return with_means(manifest)


def check_slices(manifest: Manifest) -> None:
    """Raises InconsistentCheckpoint if all tensor ranks hold the same of what a rule cuts."""
    if int(manifest.source.get("tp") or 0) > 1:
        rules = manifest.state["tensor_parallel"]["rules"]
        refuse_equal_slices(manifest.root, manifest.models, rules)


def _apart(directory: TagDirectory, files: GridFiles, reading: Reading) -> Manifest:
    """The model ranks apart, whose contents show the same grid."""
    ranks, tied = model_ranks(directory, files, reading)
    steps = agreed_steps(numbered_alike(ranks)[0], reading.step_policy)
    ranks = [with_steps(rank, steps) for rank in ranks]
    models = _models(files, ranks, tied, reading.step_policy)
    ranks = [_typed_as(rank, models[0]) for rank in ranks]
    apart = stacked([*with_weights_of_layers(ranks, models)])
    warnings = [*apart.warnings, *(line for model in models for line in model.warnings)]
    return replace(
        apart,
        models=tuple(models),
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _typed_as(rank: Manifest, model: Manifest) -> Manifest:
    """A rank whose weights may be in files of layers, which show their type."""
    own, whole = rank.engine, model.engine
    assert isinstance(own, FlatBufferEngine)
    assert isinstance(whole, FlatBufferEngine)
    return replace(rank, engine=replace(own, dtype=whole.dtype))


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
    ranks, keys = model_ranks(directory, files, reading, tied)
    if files.is_plain:
        return [replace(ranks[0], place=None)]
    return _models(files, ranks, keys, reading.step_policy)


def _models(
    files: GridFiles,
    ranks: Sequence[Manifest],
    tied: Sequence[Mapping[int, str] | None],
    step_policy: str | None,
) -> list[Manifest]:
    """The model of each tensor rank, from its stages."""
    pp, tp, models = files.grid.pp, files.grid.tp, []
    for number in range(tp):
        stages = [
            replace(each, source={**each.source, "tp": tp, "pp": pp}) for each in ranks[number::tp]
        ]
        if files.layers:
            layers = open_layers(files.layers_of(number), files.parsed)
            models.append(joined_stages(stages, layers, step_policy, tied[number]))
        elif pp == 1:
            models += [replace(each, place=None) for each in stages]
        else:
            models.append(joined_stages_with_experts(stages, step_policy))
    return models
