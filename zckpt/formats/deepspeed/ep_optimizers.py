"""Joins the optimizers of all expert-parallel ranks in a run without ZeRO (stage 0).

    expp_rank_0_mp_rank_00_optim_states.pt     experts 0, 1, and all dense parameters
    expp_rank_1_mp_rank_00_optim_states.pt     experts 2, 3, and a copy of the dense parameters
    mp_rank_00_model_states.pt                 a copy of ep rank 0's optimizer; it is never loaded

Every rank keeps a complete optimizer of its parameters. Of several ranks with the same experts,
only the first one saves its optimizer. If MoE layers have different expert-parallel sizes, there is
one file per rank of the largest size, so experts of layers with a smaller size are in several
files. DeepSpeed 0.19.8, engine.py `_save_moe_checkpoint`.

stage_0/naming.py finds the names of the parameters in ep rank 0's optimizer. The optimizers of the
other ranks list the same parameters with other experts. A group has either experts only or dense
parameters only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from msgspec.structs import replace

from ...core.checkpoint.dtypes import FLOATS
from ...core.checkpoint.manifest import Manifest
from ...core.checkpoint.optimizer_states import States
from ...core.checkpoint.placement import EP_RANK, Table
from ...core.ranks.merge import merge
from ...errors import (
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    MissingData,
    UnsupportedCheckpoint,
    counted,
    listed,
    warning,
)
from ...files.torchfile import Tensor, TorchFile
from ...training.faults import HASHED_GROUPS
from ..deepspeed_states.agreement import check_facts
from ..deepspeed_states.directories import TagDirectory, refuse
from ..deepspeed_states.experts import (
    AUTO_EP_READ,
    ExpertLayers,
    ExpertRanks,
    expert_name,
    layers_in,
    size_in,
)
from ..deepspeed_states.manifest import manifest_of
from ..deepspeed_states.of_files import extra_states_of
from ..deepspeed_states.states import EngineStates, ModuleOverrides, dictionary, open_files
from ..deepspeed_states.tensors import ManifestTensors, is_extra
from ..reading import Reading
from .files import RankFiles
from .moe.experts import Experts, LayerFiles, files_by_layer, named_of, spread_over, with_tensors
from .ranks import hyper_parameters
from .stage_0.naming import Named, Nameless, Weights, named, names_of, shapes_of, weights_in
from .stage_0.optimizer import WholeOptimizer, kept, states_with, with_members, with_names


def manifest_of_experts(directory: TagDirectory, files: RankFiles, reading: Reading) -> Manifest:
    """Reads a MoE checkpoint of ZeRO stage 0 that has one model rank; returns its manifest.

    Raises IncompleteCheckpoint (an ep rank or an expert is missing), InconsistentCheckpoint (files
    of different saves, or swapped), MissingData (unknown names of parameters) and
    UnsupportedCheckpoint (AutoEP, expert-parallel sizes that are unknown or do not divide each
    other).
    """
    (file, *_) = open_files(files.models, files.parsed)
    model = dictionary(file, file.value)
    if layers_in(model):
        refuse(directory, "AutoEP in ZeRO stage 0", AUTO_EP_READ)
    opened = open_files(files.of_ep, files.parsed)
    optimizers = [(each, dictionary(each, each.value).get("optimizer")) for each in opened]
    ranks = [states_with(directory, file, model, *each, ModuleOverrides()) for each in optimizers]
    of_layers = files_by_layer(ranks[0], files)
    first = replace(
        ranks[0], overrides=ModuleOverrides(second_names=_second_names(ranks[0], of_layers))
    )
    layers = _layers(first, of_layers, reading)
    _check_files(ranks, layers)
    whole = with_tensors(first, of_layers, layers)
    experts = Experts(first, whole, layers, ExpertRanks.of_config(first.dp, first.config))
    named_experts = replace(whole.overrides, module={})  # no rank has the module alone
    ranks = [replace(each, overrides=named_experts, apart=whole.apart) for each in ranks]
    wholes = _named(ranks, experts, reading)
    dense_optimizer = model.get("optimizer")
    if isinstance(dense_optimizer, dict) and dense_optimizer:
        states = states_with(
            directory, file, model, file, dense_optimizer, wholes[0].states.overrides
        )
        wholes.append(replace(wholes[0], states=states))
    return _joined(wholes, experts, reading.step_policy)


def _layers(ranks: EngineStates, files: Sequence[LayerFiles], reading: Reading) -> ExpertLayers:
    """Finds the expert-parallel size of each layer of experts."""
    named = [*(reading.param_names or ())]
    if ranks.listed_shapes:
        named += named_of(ranks)
    if named:
        return spread_over(ranks, files, named)
    sizes = {*filter(None, map(size_in, ranks.bases[0]["param_groups"]))}
    if len(sizes) > 1:
        raise MissingData(
            "names-needed",
            f"{ranks.directory.path}: layers of experts have the expert-parallel sizes "
            f"{listed(sorted(sizes))}, and in stage 0 no file says which layer has which size",
            hint="name the parameters of rank 0 with --param-names names.txt, in the order of "
            "optimizer.param_groups",
            file=ranks.directory.path,
        )
    if not sizes:
        refuse(ranks.directory, "experts in stage 0 whose groups are not named ep_size_N")
    return spread_over(ranks, files, (), sizes.pop())


def _check_files(ranks: Sequence[EngineStates], layers: ExpertLayers) -> None:
    """Raises unless there are as many optimizer files as the largest expert-parallel size.

    Also raises if a smaller size does not divide the largest one, or if the files' param groups
    differ.
    """
    path, largest = ranks[0].directory.path, max(layers.sizes)
    if len(ranks) < largest:
        raise IncompleteCheckpoint(
            "missing-rank-file",
            f"{path} holds the optimizers of {len(ranks)} of {largest} ep ranks",
            hint=f"expected expp_rank_{len(ranks)}_mp_rank_00_optim_states.pt",
            file=path,
        )
    if len(ranks) > largest:
        raise InconsistentCheckpoint(
            "mixed-saves",
            f"{ranks[largest].optimizers[0].path} is one file too many: the expert-parallel size "
            f"is {largest}",
            hint="files of another save may be among them: keep only the files of one save",
            file=ranks[largest].optimizers[0].path,
        )
    if odd := [size for size in layers.sizes if largest % size]:
        raise UnsupportedCheckpoint(
            "grid-unsupported",
            f"{path} has layers of experts of the expert-parallel sizes {odd[0]} and {largest}: in "
            f"stage 0, DeepSpeed saves the optimizers of {largest} ranks only, which lack some "
            f"experts of the layers of size {odd[0]}",
            hint="train with ZeRO stage 1, or with sizes that divide each other",
            file=path,
        )
    groups = [[str(group.get("name")) for group in each.bases[0]["param_groups"]] for each in ranks]
    for states_of_rank, names in zip(ranks, groups, strict=True):
        if names != groups[0] and sorted(names) == sorted(groups[0]):
            raise UnsupportedCheckpoint(
                "engine-fault",
                f"{states_of_rank.optimizers[0].path} {HASHED_GROUPS.message}",
                hint=HASHED_GROUPS.hint,
                file=states_of_rank.optimizers[0].path,
            )
    optimizers = [each.optimizers[0] for each in ranks]
    check_facts(optimizers, [each.bases[0] for each in ranks], hyper_parameters)


def _named(
    ranks: Sequence[EngineStates], experts: Experts, reading: Reading
) -> list[WholeOptimizer]:
    """Names the parameters in every ep rank's optimizer; the names are those in the full model.

    A rank's expert 0 may be expert 2 of the full model.
    """
    whole, layers = experts.whole, experts.layers
    every = ((name, whole.file_of(name), own) for name, own in whole.module.items())
    hidden = {*whole.buffer_names, *whole.second_names}
    weights = weights_in(every, hidden)
    wholes: list[WholeOptimizer] = []
    for number, rank in enumerate(ranks):
        of_layer = experts.places.in_layers(layers, number)
        weights_of_rank = {
            name: weight for name, weight in weights.items() if layers.is_held(name, of_layer)
        }
        if not wholes:
            first, shown = _names_on_first_rank(rank, weights_of_rank, reading.param_names)
        called = partial(layers.named_in, of_layer=of_layer)
        members = [[None if n is None else called(n) for n in group] for group in first]
        names = Named(members, [*map(called, shown)])
        wholes.append(with_names(rank, names, shapes_of(weights_of_rank)))
    return wholes


def _second_names(ranks: EngineStates, files: Sequence[LayerFiles]) -> dict[str, str]:
    """Maps the second names of rank 0's tied weights to the first names.

    Tied weights share a storage or, in files that DeepSpeed saved, have equal bytes.
    """
    lists_shapes = bool(ranks.listed_shapes)
    buffers = {*ranks.buffer_names}
    owners: dict[str, str] = {}
    experts = [(layer.files[0], layer.files[0].value) for layer in files]
    for file, module in [(ranks.models[0], ranks.module), *experts]:
        seen: dict[object, str] = {}
        for name, tensor in module.items():
            if name in buffers or is_extra(name, tensor) or tensor.dtype not in FLOATS:
                continue
            keys: list[object] = [(tensor.place, tensor.shape, tensor.strides)]
            # DeepSpeed 0.19.8 saves copies; constant weights may be equal without being tied
            if (
                not lists_shapes
                and (crc := file.crc(tensor)[1]) is not None
                and _varies(file, tensor)
            ):
                keys.append((crc, tensor.dtype, tensor.shape))
            owner = next((seen[key] for key in keys if key in seen), None)
            if owner is not None and tensor.numel:
                owners[name] = owner
            for key in keys:
                seen.setdefault(key, name)
    return owners


def _varies(file: TorchFile, tensor: Tensor) -> bool:
    """Whether the first elements of a tensor (at most 64) differ from one another.

    False for a tensor that is not contiguous or does not begin at the start of its storage.
    """
    if not tensor.contiguous or tensor.numel < 2 or tensor.offset:
        return False
    head = file.read(tensor.part(0, min(tensor.numel, 64)))
    size = len(head) // min(tensor.numel, 64)
    return head != head[:size] * (len(head) // size)


def _names_on_first_rank(
    ranks: EngineStates, weights: Weights, param_names: Sequence[str] | None
) -> Named:
    """The names of ep rank 0's optimizer parameters: stated, or found by matching weights.

    If neither files nor the user state names, dense parameters and experts are matched separately,
    by bytes or shape. Raises the errors of `names_of`, such as MissingData.
    """
    if ranks.listed_shapes or param_names is not None:
        return names_of([ranks], weights, param_names)[0]
    asked = Nameless.of(ranks, weights)
    kinds = [group.get("moe") is True for group in ranks.bases[0]["param_groups"]]
    members: dict[int, Sequence[str | None]] = {}
    inferred: list[str] = []
    for of_experts in sorted({*kinds}):
        places = [place for place, kind in enumerate(kinds) if kind == of_experts]
        weights_of_kind = {
            n: w for n, w in weights.items() if (expert_name(n) is not None) == of_experts
        }
        groups = [asked.groups[place] for place in places]
        names_of_kind = named(replace(asked, groups=groups, weights=weights_of_kind))
        members |= zip(places, names_of_kind.members, strict=True)
        inferred += names_of_kind.inferred
    return Named([members[place] for place in range(len(kinds))], inferred)


# -- the manifest


def _joined(
    wholes: Sequence[WholeOptimizer], experts: Experts, step_policy: str | None
) -> Manifest:
    """Joins the optimizers of all ep ranks into the manifest of the full model.

    `wholes` has one optimizer per ep rank. The model file's copy of rank 0's optimizer may follow.
    """
    first, *other_ranks = wholes
    states, slots = first.states, kept(first, step_policy)
    with_shapes = replace(experts.whole.overrides, shapes=states.overrides.shapes)
    whole = replace(experts.whole, overrides=with_shapes)
    whole_manifest = manifest_of(states, slots, "deepspeed", states.config, whole.module_dtype)
    whole_manifest = whole_manifest.replace(inferred=tuple(first.inferred), zero_padding=True)
    ranks = [
        whole_manifest,
        *(_of_further_rank(whole_manifest, each, step_policy) for each in other_ranks),
    ]
    trained = {name for rank in ranks for name in rank.parameters}
    beside = _of_untrained(whole_manifest, whole, trained)
    # `merge` keeps the copies of a dense parameter's tensors as replicas of rank 0's
    manifest = experts.complete(merge(ranks, Table(EP_RANK), step_policy, beside))
    manifest, inferred = with_members(manifest, first.members), manifest.notices.inferred
    if not inferred:
        return manifest
    message = (
        f"the optimizers' states have only numbers for {counted(len(inferred), 'parameter')}: the "
        f"names of {listed(inferred, 4)} are inferred from the order of the module"
    )
    by_order = warning("names-inferred", message, subject=inferred[0])
    return manifest.replace(warnings=(*manifest.notices.warnings, by_order))


def _of_untrained(first: Manifest, whole: EngineStates, trained: Collection[str]) -> Manifest:
    """A manifest of all weights and buffers of the module, with only frozen weights as parameters.

    Facts about the run are copied from `first`, the manifest of ep rank 0. `trained` has the names
    of trained parameters.
    """
    tensors = ManifestTensors(whole)
    tensors.add_frozen()
    tensors.add_buffers()
    tensors.add_aliases()
    # like the manifest of one more rank, so `merge` can join the result
    return first.replace(
        entries=tensors.entries,
        parameters={n: own for n, own in tensors.parameters.items() if n not in trained},
        buffers=tensors.buffer_names,
        replicas=tuple(tensors.replicas),
        state={"module": list(tensors.module)},
        paths=(),
        records=(),
    )


def _of_further_rank(first: Manifest, whole: WholeOptimizer, step_policy: str | None) -> Manifest:
    """The manifest of the optimizer of one further ep rank, with ep rank 0's param groups.

    `first` is ep rank 0's manifest, `whole` the other rank's optimizer. Raises
    InconsistentCheckpoint if only one of the two optimizers has some state of a dense parameter.
    """
    states, slots = whole.states, kept(whole, step_policy)
    tensors = ManifestTensors(states)
    for buffer in slots:
        tensors.add_trainable(buffer)
    tensors.add_aliases()
    both = first.parameters.keys() & tensors.parameters.keys()
    of_first, theirs = (
        {(entry.parameter, entry.slot) for entry in entries.values() if entry.parameter in both}
        for entries in (first.entries, tensors.entries)
    )
    if odd := sorted(of_first ^ theirs):
        raise InconsistentCheckpoint(
            "mixed-saves",
            f"{whole.file.path}: {odd[0][0]} has other optimizer states here than on ep rank 0",
            hint="files of different saves seem to be mixed",
            file=whole.file.path,
        )
    other_states = tensors.other_rows(slots)
    return first.replace(
        entries=tensors.entries,
        parameters=tensors.parameters,
        stated_in=whole.file.path,
        paths=(whole.file.path,),
        records=tuple(whole.file.records.values()),
        inferred=tuple(whole.inferred),
        states=first.states.without_form("number", "other", "unsupported")
        + tensors.numbers
        + other_states
        + States(tuple(extra_states_of(states))).of_form("unsupported"),
    )
