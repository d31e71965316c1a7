"""Builds the manifest of a DeepSpeed checkpoint, with model ranks joined or kept separate.

The manifests that are built, one from the other:

    of a model rank     the files of one mp_rank, with its pipeline stage and tensor rank
    of a tensor rank    all its pipeline stages joined, with the weights from its layer files
    of the full model   the slices of all tensor ranks joined

If only the data-parallel size changes, model ranks are not joined. Each model rank then keeps its
own copies of replicated tensors, even if these have drifted apart, and zckpt need not know how
tensors are cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

from msgspec.structs import replace

from ...core.checkpoint.entries import Entry
from ...core.checkpoint.facts import FlatBufferEngine
from ...core.checkpoint.grid import GridPlace
from ...core.checkpoint.manifest import Manifest
from ...core.checkpoint.states import as_unsupported
from ...core.grouping import by_key
from ...core.ranks.merge import agreed_steps, numbered_alike, united, with_steps
from ...errors import MALFORMED, ZckptError, not_understood
from ..deepspeed_states.agreement import check_names
from ..deepspeed_states.directories import TagDirectory, refuse
from ..deepspeed_states.manifest import manifest_of
from ..deepspeed_states.options import OLDER_NAMES
from ..deepspeed_states.states import EngineStates, open_files
from ..reading import USUAL, Reading
from .ep_optimizers import manifest_of_experts
from .files import SOME_STAGES, GridFiles, RankFiles, grid_files, locate, without_pointer
from .flats import flat_buffers
from .model_ranks.pipeline import joined_stages, joined_stages_with_experts
from .model_ranks.tensor_ranks import joined_slices
from .moe.experts import with_experts
from .ranks import check_grid, open_ranks
from .stage_0.optimizer import manifest_of_whole, open_whole
from .stage_0.stages import open_stages
from .weights import without_optimizer

Keys = Mapping[int, str] | None
"""Maps the numbers of layer files to the keys of tied layers: {0: "embed"}.

None for a source: the reader then finds the keys by comparing the files' bytes. A target's tensors
are not written yet, so there the keys are given.
"""
OF_MODEL_RANKS = (
    "zckpt does not read a state that belongs to a rank's partition as a whole, if the run has "
    "pipeline stages or tensor parallelism"
)


def read(path: str, reading: Reading = USUAL) -> Manifest:
    """Reads a run directory, a tag directory, or a trainer's directory around one of these.

    If the optimizer cannot be read, a command that needs only weights gets them. So does every
    command if no optimizer file is left. The manifest's `lost` then states this. Raises
    NotACheckpoint, IncompleteCheckpoint, InconsistentCheckpoint, CorruptCheckpoint, MissingData
    (parameters' names or cuts are unknown) and UnsupportedCheckpoint.
    """
    directory = locate(path, reading.tag)
    try:
        manifest = _read(directory, reading)
    except ZckptError as error:
        manifest = without_optimizer(directory, path, reading, error)
    return manifest.replace(warnings=(*manifest.notices.warnings, *without_pointer(directory)))


def _read(directory: TagDirectory, reading: Reading) -> Manifest:
    try:
        files = grid_files(directory)
        notes = tuple(check_names(open_files(files.paths, files.parsed)))
        if reading.ranks_apart and not files.is_plain:
            return _ranks_apart(directory, files, reading).replace(notes=notes)
        models = of_tensor_ranks(directory, files, reading)
        if reading.with_slicings or files.grid.tp > 1:
            models = [joined_slices(models, reading.tp_rules, reading.step_policy)]
        return models[0].replace(notes=notes)
    except MALFORMED as error:
        raise not_understood(directory.path, error) from error


# -- the common model


def of_tensor_ranks(
    directory: TagDirectory, files: GridFiles, reading: Reading = USUAL, tied: Keys = None
) -> list[Manifest]:
    """Reads one manifest per tensor rank, in which all its pipeline stages are joined.

    `tied` maps layer files' numbers to keys of tied layers, if these are already known.
    """
    first = files.ranks[0]
    if files.is_plain and first.of_ep and not first.optimizers:
        return [manifest_of_experts(directory, first, reading)]
    return _models(files, of_model_ranks(directory, files, reading, tied), reading.step_policy)


def _models(files: GridFiles, ranks: Sequence[Manifest], step_policy: str | None) -> list[Manifest]:
    """Joins the stages of each tensor rank into one model; returns one manifest per tensor rank."""
    pp, tp, models = files.grid.pp, files.grid.tp, []
    for number in range(tp):
        stages = ranks[number::tp]
        if not files.is_plain:
            stages = [
                each.replace(origin=replace(each.run.origin, tp=tp, pp=pp)) for each in stages
            ]
        if files.layers:
            models.append(joined_stages(stages, files.layers_of(number), step_policy))
        elif pp == 1:
            models += [replace(each, place=None) for each in stages]
        else:
            models.append(joined_stages_with_experts(stages, step_policy))
    return models


# -- one manifest for each model rank


def of_model_ranks(
    directory: TagDirectory, files: GridFiles, reading: Reading = USUAL, tied: Keys = None
) -> list[Manifest]:
    """Reads one manifest per model rank; each states its pipeline stage and tensor rank.

    `tied` maps layer files' numbers to keys of tied layers, if these are already known.
    """
    opened = [*_opened(directory, files, reading, tied)]
    states = [own for own, _, _ in opened]
    sp = check_grid(directory, files, states)
    have_experts = [bool(own.model.get("num_experts")) for own in states]
    if any(have_experts) and not all(have_experts):
        refuse(directory, SOME_STAGES)
    if any(have_experts) and sp > 1:
        refuse(directory, "mixture-of-experts layers beside sequence parallelism")
    manifests = []
    for number, (engine_states, manifest, keys) in enumerate(opened):
        place = GridPlace(number, files.grid, tuple(engine_states.buffer_names), keys)
        rank_manifest = replace(manifest(reading.step_policy), place=place)
        if sp > 1:
            dialect = OLDER_NAMES if files.ranks[0].sp > 1 else None
            rank_manifest = rank_manifest.replace(
                origin=replace(rank_manifest.run.origin, sp=sp, dialect=dialect)
            )
        manifests.append(rank_manifest)
    if files.ranks[0].optimizers and not files.is_plain:  # stage 0 has no flat buffers of ranks
        manifests = [as_unsupported(each, OF_MODEL_RANKS) for each in manifests]
    return manifests


def _opened(
    directory: TagDirectory, files: GridFiles, reading: Reading, tied: Keys
) -> Iterator[tuple[EngineStates, Callable[[str | None], Manifest], Keys]]:
    """Opens each model rank's files; yields the files, a function, and the keys of tied layers.

    The function takes a value of `--step-policy`, or None, and makes the model rank's manifest.
    """
    ranks, tp, is_staged = files.ranks, files.grid.tp, files.grid.staged
    if ranks[0].optimizers:
        for number, rank_files in enumerate(ranks):
            layers = files.layers_of(number % tp) if is_staged else None
            states = open_ranks(directory, rank_files, layers)
            yield states, partial(_of_rank, states, rank_files), tied
        return
    if not is_staged:
        wholes = [(open_whole(directory, own, reading), tied) for own in ranks]
    else:
        stages = [
            open_stages(directory, ranks[rank::tp], files.layers_of(rank), reading, tied)
            for rank in range(tp)
        ]
        wholes = [(each.wholes[n], each.tied) for n in range(files.grid.pp) for each in stages]
    for whole, keys in wholes:
        yield whole.states, partial(manifest_of_whole, whole), keys


def _of_rank(ranks: EngineStates, files: RankFiles, step_policy: str | None) -> Manifest:
    if files.experts or ranks.model.get("num_experts"):
        return with_experts(ranks, files, step_policy)
    buffers, config = [*flat_buffers(ranks, step_policy)], ranks.effective_config(ranks.round_robin)
    manifest = manifest_of(ranks, buffers, "deepspeed", config, ranks.module_dtype)
    # stages 1 and 2 pad with zeros; stage 3 leaves what was in memory (0.19.8)
    return manifest.replace(zero_padding=not ranks.partitioned)


# -- model ranks apart


def _ranks_apart(directory: TagDirectory, files: GridFiles, reading: Reading) -> Manifest:
    ranks = of_model_ranks(directory, files, reading)
    steps = agreed_steps(numbered_alike(ranks)[0], reading.step_policy)
    ranks = [with_steps(rank, steps) for rank in ranks]
    models = _models(files, ranks, reading.step_policy)
    apart = stacked([*_with_weights_of_layers(ranks, models)])
    warnings = [
        *apart.notices.warnings,
        *(line for model in models for line in model.notices.warnings),
    ]
    return apart.replace(
        origin=replace(apart.run.origin, tp_rules=reading.tp_rules or None),
        models=tuple(models),
        warnings=tuple(dict.fromkeys(warnings)),
    )


def stacked(manifests: Sequence[Manifest]) -> Manifest:
    """Puts the manifests of all model ranks into one; each rank's tensors stay separate."""
    whole = united(manifests)
    assert manifests[0].place is not None
    grid = manifests[0].place.grid
    return whole.replace(
        ranks=tuple(manifests),
        origin=replace(whole.run.origin, tp=grid.tp, pp=grid.pp, model_ranks=len(manifests)),
        entries={},
        parameters={},
        buffers=(),
        replicas=(),
        states=whole.states.without_form("number", "unsupported"),
        omitted=tuple(dict.fromkeys(chain.from_iterable(m.notices.omitted for m in manifests))),
    )


def _with_weights_of_layers(
    ranks: Sequence[Manifest], models: Sequence[Manifest]
) -> Iterator[Manifest]:
    """Adds to each model rank's manifest the weights that only files of layers contain.

    `ranks` has one manifest per model rank, `models` one per tensor rank.
    """
    tp = len(models)
    tensors = (chain(model.entries.values(), model.replicas) for model in models)
    weights = [by_key((e.parameter, e) for e in own if e.slot == "param") for own in tensors]
    uses = [Counter(chain.from_iterable(m.parameters for m in ranks[n::tp])) for n in range(tp)]
    seen: list[set[str]] = [set() for _ in models]
    for number, rank in enumerate(ranks):
        n, weights_of_rank = number % tp, list[Entry]()
        names = [name for name in rank.parameters if (name, "param") not in rank.entries]
        for name in names:
            # no file states a copy's stage, so each stage gets all copies of a tied weight. A stage
            # that uses the tied layer through a function saves no weight: if there are fewer copies
            # than stages, only the first of these stages gets them
            copies = weights[n].get(name, [])
            if name not in seen[n] or len(copies) >= uses[n][name]:
                weights_of_rank += copies
        seen[n].update(names)
        assert isinstance(rank.run.engine, FlatBufferEngine)
        assert isinstance(models[0].run.engine, FlatBufferEngine)
        engine = replace(rank.run.engine, dtype=models[0].run.engine.dtype)
        yield rank.replace(engine=engine, sibling_weights=tuple(weights_of_rank))
