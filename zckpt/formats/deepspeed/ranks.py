"""Opens the files of all ranks, and checks that they are one complete save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

from msgspec.structs import replace

from ...core.checkpoint.inert import Foreign, nested
from ...core.grouping import by_key
from ...core.storage.inventory import gaps, refuse_gaps
from ...errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    UnsupportedCheckpoint,
    listed,
)
from ...files.torchfile import Tensor, TorchFile
from ...training.faults import TRANSPOSED
from ...training.megatron_arguments import arguments
from ..deepspeed_states.agreement import check_facts, check_models, for_each
from ..deepspeed_states.directories import OPTIMIZER, ROLES, TagDirectory, refuse
from ..deepspeed_states.estimates import KEYS as ESTIMATES
from ..deepspeed_states.module_names import as_in_module
from ..deepspeed_states.states import (
    EngineStates,
    ModuleOverrides,
    dictionary,
    open_files,
    stated_config,
    stated_stage,
    version_numbers,
    version_of,
)
from ..ranks import gaps_along, refuse_other_writers
from . import sequence_ranks
from .files import GridFiles, RankFiles
from .layer_names import LayerName, untied_layers

# all ranks state the same for these keys, once groups of experts are in one order
OF_OPTIMIZERS = ("partition_count", "param_alignment_paddings", "overflow", "ds_version")


def open_ranks(
    directory: TagDirectory, files: RankFiles, layers: Mapping[int, TorchFile] | None
) -> EngineStates:
    """Opens and checks the files of all data ranks of one model rank.

    `layers` are a pipeline's layer files by number, which have the module's tensors; None without a
    pipeline. Raises if the files are not one complete ZeRO checkpoint, or if zckpt does not read
    this kind of file.
    """
    models = open_files(files.models, files.parsed)
    for file in models:
        file.value = as_in_module(dictionary(file, file.value))
    model = models[0].value
    overrides = ModuleOverrides(
        module={} if layers is not None and model.get("module") is None else None
    )
    optimizers = open_files(files.optimizers, files.parsed)
    tops = [dictionary(file, file.value) for file in optimizers]
    pairs = zip(optimizers, tops, strict=True)
    states = [dictionary(file, top.get("optimizer_state_dict")) for file, top in pairs]
    if layers and model.get("param_shapes") is None:
        overrides = replace(overrides, shapes=shapes_of_stage(states, layers))
    version = version_of(model, tops[0], states[0])
    check_kind(directory, version, overrides.module_of(model), stated_config(model, tops[0]))
    _check_world(directory, model, states[0], files)
    partitioned = "fp32_flat_groups" in states[0]
    bases = for_each(states, lambda state: _base(directory, state, partitioned))
    if model.get("num_experts"):
        first = _names_of_groups(bases[0])
        ordered = [_in_order_of_first_rank(*own, first) for own in zip(states, bases, strict=True)]
        states, bases = [state for state, _ in ordered], [base for _, base in ordered]
    ranks = EngineStates(
        directory,
        models,
        optimizers,
        model,
        states,
        bases,
        version,
        len(states),
        partitioned,
        overrides=overrides,
    )
    check_models(models)
    check_facts(optimizers, states, _facts_of_optimizer)
    check_facts(optimizers, bases, hyper_parameters)
    return ranks


def _base(directory: TagDirectory, state: Mapping[str, Any], partitioned: bool) -> dict[str, Any]:
    """The base optimizer's state dict in one rank's optimizer state.

    Elastic files have only a list of states. The result is then {"state": {0: ..., 1: ...}}, by the
    number of the flat buffer.
    """
    base = state.get("optimizer_state_dict" if partitioned else "base_optimizer_state")
    if isinstance(base, list):
        return {"state": dict(enumerate(base))}
    if not isinstance(base, dict):
        raise CorruptCheckpoint(
            "file-damaged", f"{directory.path} holds no base optimizer state", file=directory.path
        )
    return base


def without_optimizer(directory: TagDirectory) -> IncompleteCheckpoint:
    """The error for a checkpoint without an optimizer: no file of it has an optimizer's state."""
    return IncompleteCheckpoint(
        "missing-file",
        f"{directory.path} holds no optimizer files",
        hint="expected [bf16_]zero_pp_rank_0_mp_rank_00_optim_states.pt and one per further rank",
        file=directory.path,
    )


def check_kind(directory: TagDirectory, version: str, module: Any, config: Any) -> None:
    """Raises UnsupportedCheckpoint for old versions and for features that zckpt does not read.

    `module` is the module's state dict, `config` the ds_config. Raises IncompleteCheckpoint if
    `module` is missing.
    """
    numbers, settings = version_numbers(version), nested(config, "zero_optimization")
    zenflow, stage = nested(settings, "zenflow"), nested(settings, "stage")
    transposed = TRANSPOSED.message
    # ZenFlow's files state the shapes that transposed matrices have without the transposition.
    # Stages 1 and 2 save transposed matrices before 0.19.7 (runtime/zenflow/zenflow_utils.py
    # `_flatten_dense_tensors`), stage 3 in all versions (engine_stage3.py)
    refused = {
        f"DeepSpeed {version}, before 0.5.10": numbers < (0, 5, 10),
        "optimizer states offloaded to NVMe": nested(settings, "offload_optimizer", "device")
        == "nvme",
        f"ZenFlow in ZeRO stage 3, {transposed}": zenflow and stage == 3,
        f"ZenFlow of DeepSpeed {version}, {transposed}": zenflow and numbers < (0, 19, 7),
    }
    for what, is_there in refused.items():
        if is_there:
            refuse(directory, what)
    if not isinstance(module, dict):
        raise IncompleteCheckpoint(
            "missing-file",
            f"{directory.path} has a pipeline's stages, but no file of a layer",
            hint="expected layer_00-model_states.pt, or layer_00-model_00-model_states.pt, and one "
            "for each further layer",
            file=directory.path,
        )


def _check_world(
    directory: TagDirectory, model: Mapping[str, Any], state: Mapping[str, Any], files: RankFiles
) -> None:
    dp = len(files.optimizers)
    _check_count(directory, "dp", files.optimizers, model, files.sp)
    count = state.get("partition_count")
    counts = {number for number in (count if isinstance(count, list) else [count]) if number}
    if counts - {dp} and not model.get("num_experts"):  # experts.py handles those of experts
        sizes = ", ".join(map(str, counts))
        refuse(directory, f"partitions over {sizes} of {dp} ranks (MiCS)")


def _check_count(
    directory: TagDirectory,
    axis: str,
    files: Sequence[str],
    model: Mapping[str, Any],
    sp: int = 1,
) -> None:
    """Raises unless there are as many `files` as ranks that the model file states.

    `axis` is "dp" (one file per data-parallel rank) or "mp" (one per model rank). `sp` is the
    number of sequence-parallel ranks if file names count them as model ranks; else 1.
    """
    count, ranks = len(files), {"dp": "data ranks", "mp": "model ranks"}[axis]
    stated_count = model.get(f"{axis}_world_size")
    if not isinstance(stated_count, int) or stated_count == count:
        return
    if stated_count < count:
        raise InconsistentCheckpoint(
            "world-size-disagrees",
            f"{directory.path} holds files of {count} {ranks}, but its model files say there were "
            f"{stated_count} (they state {sequence_ranks.stated_sizes(model)})",
            hint="files of another save may be among them: keep only the files of one save",
            file=files[stated_count] if stated_count >= 0 else directory.path,
        )
    rows = gaps_along(axis, ROLES, dict(enumerate(files)), stated_count)
    if sp > 1:
        sp = sequence_ranks.at(stated_count, sp)
        numbers = ((rank, rank % sp) for rank in range(count, stated_count))
        rows = gaps(OPTIMIZER, {(0, 0): files[0]}, numbers)
    refuse_gaps(directory.path, rows, f"it has {count} of {stated_count} {ranks}")


def _facts_of_optimizer(state: Mapping[str, Any]) -> dict[str, Any]:
    scaler = state.get("loss_scaler")
    return {
        **{key: state.get(key) for key in OF_OPTIMIZERS},
        "zero_stage": stated_stage(state),
        "loss_scaler": scaler.state if isinstance(scaler, Foreign) else scaler,
    }


def hyper_parameters(base: Mapping[str, Any]) -> dict[str, Any]:
    """The values in one rank's param groups that must be equal on all ranks.

    `base` is the state dict of the rank's base optimizer. The step is left out, and so are
    estimates: hyper-parameters that each rank's optimizer computes itself, such as Prodigy's `d`
    (`ESTIMATES`).
    """
    groups, own_keys = base.get("param_groups") or (), {"step", *ESTIMATES}
    return {
        "param_groups": [{k: v for k, v in each.items() if k not in own_keys} for each in groups]
    }


# -- the parameters of a stage whose model file lists none


def shapes_of_stage(
    states: Sequence[Mapping[str, Any]], layers: Mapping[int, TorchFile]
) -> list[dict[str, tuple[int, ...]]] | None:
    """The shapes of the parameters in each flat buffer, for a model file that does not list them.

    `states` are the optimizer states of all data ranks, `layers` the layer files of one tensor
    rank. None if `states` list no parameters either. Raises InconsistentCheckpoint (no layer has a
    stated parameter) and UnsupportedCheckpoint (several tied layers may have it).
    """
    # DeepSpeed 0.19.8 saves a bf16 pipeline without ZeRO (stage 0) with BF16_Optimizer's files, but
    # with `param_shapes: None`. Only layer files have shapes; the mappings state sizes
    mappings: list[Any] = [state.get("param_slice_mappings") for state in states]
    if not all(isinstance(groups, list) for groups in mappings):
        return None
    numels = [Counter[str]() for _ in mappings[0]]
    for groups in mappings:
        for numels_of_buffer, mapping in zip(numels, groups, strict=True):
            for name, address in mapping.items():  # a `fragment_address`
                numels_of_buffer[name] += int(getattr(address, "state", address)["numel"])
    tensors = {number: dictionary(file, file.value) for number, file in layers.items()}
    untied = {number for own in numels for number in untied_layers(own)}
    return [
        {name: _shape(name, numel, tensors, untied) for name, numel in numels_of_buffer.items()}
        for numels_of_buffer in numels
    ]


def _shape(
    name: str, numel: int, layers: Mapping[int, Mapping[str, Any]], untied: Collection[int]
) -> tuple[int, ...]:
    """The shape of a parameter with `numel` elements; `layers` has each layer file's tensors.

    Raises UnsupportedCheckpoint if several shapes fit, InconsistentCheckpoint if none fits.
    """
    layer_name = LayerName.of(name)
    # no file states the key of a tied layer: it may be any layer except the `untied` ones
    shapes = {
        tensor.shape
        for number, tensors in layers.items()
        if (number == layer_name.number if layer_name.key is None else number not in untied)
        and isinstance(tensor := tensors.get(layer_name.inner), Tensor)
        and tensor.numel == numel
    }
    if len(shapes) == 1:
        return tuple(shapes.pop())
    if shapes:
        raise UnsupportedCheckpoint(
            "grid-unsupported",
            f"several layers may be the tied layer of {name}: in their files the tensor has the "
            f"shapes {' and '.join(str(list(shape)) for shape in sorted(shapes))}",
            hint="no file says which of these layers is the tied layer",
            subject=name,
        )
    raise InconsistentCheckpoint(
        "mixed-saves",
        f"no file of a layer has {name} with the {numel} elements that the optimizer's files state",
        hint="files of another save may be among them: keep only the files of one save",
        subject=name,
    )


# -- the grid of model ranks


def check_grid(directory: TagDirectory, files: GridFiles, ranks: Sequence[EngineStates]) -> int:
    """Checks that files state the pipeline and tensor ranks that their names show.

    Returns the sequence-parallel size: the number of ranks that share a sequence. Raises
    InconsistentCheckpoint if contents and names do not match, UnsupportedCheckpoint for unknown
    parallel axes.
    """
    pp, tp = files.grid.pp, files.grid.tp
    named = files.ranks[0].sp if files.ranks else 1
    sp = named
    for number, rank in enumerate(ranks):
        path = rank.models[0].path
        if files.layers and rank.module:
            raise InconsistentCheckpoint(
                "mixed-saves",
                f"{path} has the weights of a run without a pipeline, but there are files of "
                "layers, which only pipelines have",
                hint="keep only the files of one save",
                file=path,
            )
        models = [each.models[0].path for each in ranks]
        _check_count(directory, "mp", models, rank.model)
        sp = sequence_ranks.of_model(rank.model, path, files.grid, rank.dp, named)
        if isinstance(rank.model.get(sequence_ranks.DIMENSIONS), dict):
            continue
        # older files state no sizes: all tensor ranks of a stage must have the same parameters
        first = number - number % tp
        if odd := sorted(_parameters(rank) ^ _parameters(ranks[first])):
            raise InconsistentCheckpoint(
                "swapped-files",
                f"{directory.path}: model rank {number} must have the parameters of model rank "
                f"{first}, as both are of stage {number // tp}, but they differ in "
                f"{listed(odd, 4)}",
                hint="files of two ranks may be swapped, or of another save: copy all files again; "
                "or the layer files of a pipeline are missing (layer_NN-model_states.pt)",
                file=directory.path,
            )
    refuse_other_writers(directory.path, [arguments(rank.model).get("rank") for rank in ranks])
    stages = range(0, len(ranks), tp) if pp > 1 else ()
    layers = [(number, sorted(untied_layers(_parameters(ranks[number])))) for number in stages]
    for (first, before), (number, own_layers) in pairwise([stage for stage in layers if stage[1]]):
        if own_layers[0] <= before[-1]:
            raise InconsistentCheckpoint(
                "swapped-files",
                f"{directory.path}: model rank {number} has layer {own_layers[0]}, but the earlier "
                f"stage of model rank {first} has layer {before[-1]}",
                hint="the files of two stages may be swapped, or of another save: copy all files "
                "again",
                file=directory.path,
            )
    return sp


def _parameters(rank: EngineStates) -> set[str]:
    return {*chain.from_iterable(rank.param_shapes())}


# -- groups of experts in one order


LISTS = (
    "single_partition_of_fp32_groups",
    "group_paddings",
    "partition_count",
    "param_alignment_paddings",
)
"""Keys of a rank's optimizer state that zckpt reads, and whose values have an item per group."""


def _in_order_of_first_rank(
    state: dict[str, Any], base: dict[str, Any], first: Sequence[tuple[str, bool]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sorts one rank's param groups in `state` and `base` into the order of rank 0's.

    `base` is the base optimizer's state; `first` is rank 0's `_names_of_groups`. Both are returned
    unchanged if the rank's groups have other names.
    """
    # DeepSpeed iterates over a set of names, so every process may list its groups of experts in
    # another order, if these have several expert-parallel sizes (0.19.8, moe/utils.py)
    names = _names_of_groups(base)
    if names == first or sorted(names) != sorted(first):
        return state, base  # other names are refused later
    places = by_key((name, place) for place, name in enumerate(names))
    order = [places[name].pop(0) for name in first]  # equal names keep their order
    flats, groups = base["state"], base["param_groups"]  # a group has one flat tensor
    base = {
        **base,
        "state": {new: flats[old] for new, old in enumerate(order) if old in flats},
        "param_groups": [{**groups[old], "params": [new]} for new, old in enumerate(order)],
    }
    lists = {key: [state[key][old] for old in order] for key in LISTS if key in state}
    return {**state, **lists, "base_optimizer_state": base}, base


def _names_of_groups(base: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """For each param group: its name, and whether it is a group of experts."""
    groups = base.get("param_groups") or ()
    return [(str(group.get("name")), group.get("moe") is True) for group in groups]
