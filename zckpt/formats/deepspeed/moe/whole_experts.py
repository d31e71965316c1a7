"""What the optimizers of all ep ranks without ZeRO (stage 0) hold together.

    expp_rank_0_mp_rank_00_optim_states.pt     experts 0, 1, and all dense parameters
    expp_rank_1_mp_rank_00_optim_states.pt     experts 2, 3, and a copy of the dense parameters
    mp_rank_00_model_states.pt                 a copy of ep rank 0's, which the engine does not load

Every rank keeps a whole optimizer of what it has. The first of the ranks with the same experts
saves it. If layers have several expert-parallel sizes, files count the ranks of the largest one,
and several of them have the experts of the other layers. DeepSpeed 0.19.8, engine.py
`_save_moe_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from msgspec.structs import replace

from ....core import agreement, compare
from ....core.facts import ExpertLayer
from ....core.inert import inside
from ....core.manifest import Entry, Manifest, Unread
from ....core.states import unread
from ....errors import (
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    MissingData,
    UnsupportedCheckpoint,
    counted,
    listed,
)
from ....files.torchfile import TorchFile
from ...deepspeed_states.directories import TagDirectory, refuse
from ...deepspeed_states.experts import ExpertLayers, ExpertRanks, size_in
from ...deepspeed_states.manifest import manifest_of, with_files
from ...deepspeed_states.of_files import strangers_of
from ...deepspeed_states.states import EngineStates, FlatBuffer, dictionary, open_files
from ...reading import Reading
from ..files import RankFiles
from ..model_ranks.copies import matches_of
from ..stage_0 import whole_states
from ..stage_0.whole import WholeOptimizer, states_with
from .auto_ep import READ, layers_in
from .expert_files import LayerFiles, check_order, check_ranks, layers_of, named_of, spread_over
from .experts import Experts
from .whole_names import (
    check_rounding,
    named_whole,
    refuse_swapped,
    second_names,
    weights_of,
    with_members,
)


def manifest_of_experts(directory: TagDirectory, files: RankFiles, reading: Reading) -> Manifest:
    """The manifest of one model rank with experts in stage 0.

    Raises IncompleteCheckpoint (an ep rank or an expert is missing), InconsistentCheckpoint (files
    of different saves, or swapped), MissingData (nothing shows the names of parameters) and
    UnsupportedCheckpoint (sizes of layers that nothing shows).
    """
    (file, *_) = open_files(files.models, files.parsed)
    model = dictionary(file, file.value)
    opened = open_files(files.of_ep, files.parsed)
    optimizers = [dictionary(each, each.value).get("optimizer") for each in opened]
    if not isinstance(model.get("num_experts"), list):
        refuse(directory, "mixture-of-experts layers of an old release")
    if layers_in(model):
        refuse(directory, "AutoEP in ZeRO stage 0", READ)
    ranks = [
        states_with(directory, file, model, beside, optimizer)
        for beside, optimizer in zip(opened, optimizers, strict=True)
    ]
    layers_files = layers_of(ranks[0], files)
    check_order(ranks[0], layers_files)
    model = {**model, "shared_params": second_names(ranks[0], layers_files)}
    ranks = [replace(each, model=model) for each in ranks]
    layers = _layers(ranks[0], layers_files, reading)
    _check_files(ranks, layers)
    places = ExpertRanks.of_config(ranks[0].dp, ranks[0].config)
    wholes = _named(ranks, layers_files, layers, places, reading)
    model_copy = model.get("optimizer")
    if isinstance(model_copy, dict) and model_copy:
        states = states_with(directory, file, model, file, model_copy)
        first = wholes[0]
        shapes = first.states.model["param_shapes"]
        states = replace(states, model={**model, "param_shapes": shapes})
        wholes.append(replace(first, states=states))
    return _joined(wholes, layers_files, layers, places, len(ranks), reading.step_policy)


# -- the sizes of layers


def _layers(ranks: EngineStates, files: Sequence[LayerFiles], reading: Reading) -> ExpertLayers:
    """Over how many ranks each layer is spread."""
    named = [*(reading.param_names or ())]
    if ranks.model.get("param_shapes"):
        named += named_of(ranks)
    if named:
        return ExpertLayers({each.name: spread_over(ranks, each, named) for each in files})
    sizes = {*filter(None, map(size_in, ranks.bases[0]["param_groups"]))}
    if len(sizes) > 1:
        raise MissingData(
            f"{ranks.directory.path}: layers of experts have the expert-parallel sizes "
            f"{listed([*map(str, sorted(sizes))])}, and without ZeRO no file says which layer has "
            "which",
            hint="name the parameters of rank 0 with --param-names names.txt, in the order of "
            "optimizer.param_groups",
        )
    if not sizes:
        refuse(ranks.directory, "experts without ZeRO in groups that are not named ep_size_N")
    ep = sizes.pop()
    layers = {}
    for each in files:
        check_ranks(ranks, each.name, ep)
        if len(each.files) % ep:
            raise InconsistentCheckpoint(
                f"{ranks.directory.path}: {ep} ranks cannot share the {len(each.files)} experts of "
                f"{each.name}",
                hint="model and expert files of different saves seem to be mixed",
            )
        layers[each.name] = ExpertLayer(each.name, len(each.files), ep)
    return ExpertLayers(layers)


def _check_files(ranks: Sequence[EngineStates], layers: ExpertLayers) -> None:
    """There is one optimizer for each rank of the largest size, and all have the same groups."""
    path, largest = ranks[0].directory.path, max(layers.sizes)
    if len(ranks) < largest:
        raise IncompleteCheckpoint(
            f"{path} holds the optimizers of {len(ranks)} of {largest} ep ranks",
            hint=f"expected expp_rank_{len(ranks)}_mp_rank_00_optim_states.pt",
        )
    if len(ranks) > largest:
        raise InconsistentCheckpoint(
            f"{ranks[largest].optimizers[0].path} is one file too many: the expert-parallel size "
            f"is {largest}",
            hint="files of another save may lie between them; keep those of one save",
        )
    if odd := [size for size in layers.sizes if largest % size]:
        raise UnsupportedCheckpoint(
            f"{path} has layers of experts of the expert-parallel sizes {odd[0]} and {largest}: "
            "without ZeRO, DeepSpeed saves one optimizer for each rank of the largest size, which "
            "does not have all experts of the other",
            hint="train with ZeRO stage 1, or with sizes that divide each other",
        )
    kinds = [_kinds(each) for each in ranks]
    for each, kind in zip(ranks, kinds, strict=True):
        if kind == kinds[0]:
            continue
        if sorted(map(str, kind)) == sorted(map(str, kinds[0])):
            raise UnsupportedCheckpoint(
                f"{each.optimizers[0].path} lists its groups in another order than ep rank 0's",
                hint="sort the groups in the training program, or set PYTHONHASHSEED, and save "
                "again",
            )
        raise InconsistentCheckpoint(
            f"{each.optimizers[0].path} has other groups or settings than ep rank 0's file",
            hint="files of different saves seem to be mixed",
        )


def _kinds(ranks: EngineStates) -> list[object]:
    """What every group states, and how many parameters it has."""
    return [
        (
            group.get("name"),
            len(group["params"]),
            sorted(
                (key, repr(value))
                for key, value in group.items()
                if key not in ("params", "step") and isinstance(value, (int, float, str, tuple))
            ),
        )
        for group in ranks.bases[0]["param_groups"]
    ]


def _named(
    ranks: Sequence[EngineStates],
    files: Sequence[LayerFiles],
    layers: ExpertLayers,
    places: ExpertRanks,
    reading: Reading,
) -> list[WholeOptimizer]:
    """The optimizers with the names of their parameters, which are those of the first one."""
    weights = [
        weights_of(each, files, layers, places.in_layers(layers, number))
        for number, each in enumerate(ranks)
    ]
    try:
        first = named_whole(ranks[0], weights[0], reading)
    except MissingData as error:
        refuse_swapped(ranks[0], weights[1:], error)
    is_stated = bool(ranks[0].model.get("param_shapes"))
    wholes = [first]
    for each, own in zip(ranks[1:], weights[1:], strict=True):
        wholes.append(with_members(each, first.members, (), own))
    if not is_stated:  # those of zckpt's may be empty still
        for whole, own in zip(wholes[1:], weights[1:], strict=True):
            check_rounding(whole, own)
    return wholes


def compare_ranks(manifest: Manifest, replicas: str | None) -> list[str]:
    """Compares the copies that ep ranks keep of dense parameters; gives warnings.

    Raises InconsistentCheckpoint if they differ, unless `replicas` says that rank 0's are taken.
    """
    results = compare.compare(matches_of(manifest), manifest, manifest).results
    differing = list(dict.fromkeys(r.match.a.name for r in results if r.differs))
    if differing and replicas != "rank0":
        raise InconsistentCheckpoint(
            f"{manifest.root}: ep ranks hold different copies of {listed(differing, 4)}",
            hint="files of different saves may be mixed: copy all files again; if the copies "
            "drifted in training, take those of ep rank 0 with --replicas rank0",
        )
    return [f"the ep ranks' copies of {name} differ; rank 0's is taken" for name in differing]


# -- the manifest


OF_EXPERTS = "in stage 0, zckpt reads states of other shapes than the parameters of ep rank 0 alone"


def _joined(
    wholes: Sequence[WholeOptimizer],
    files: Sequence[LayerFiles],
    layers: ExpertLayers,
    places: ExpertRanks,
    count: int,
    step_policy: str | None,
) -> Manifest:
    """The whole model; its replicas are the copies that several files have.

    The optimizers are those of `count` ep ranks, then a copy of the first's.
    """
    known: dict[str, FlatBuffer] = {}
    replicas: list[Entry] = []
    other: dict[str, dict[str, object]] = {}
    others: list[Unread] = []
    inferred: dict[str, None] = {}
    for number, whole in enumerate(wholes):
        states, units = whole_states.with_states(whole)
        of_layer = places.in_layers(layers, number % count)
        named = partial(layers.named_in, of_layer=of_layer)
        inferred |= dict.fromkeys(map(named, wholes[0].inferred))
        for buffer in whole_states.buffers(states, units, step_policy):
            renamed = _renamed(buffer, named)
            owner = next(iter(renamed.shapes), "")
            if owner in known:
                replicas += _copies(known[owner], renamed, whole.file)
            else:
                known[owner] = renamed if not number else replace(renamed, sightings=())
        for name, values in (states.first.get("other") or {}).items():
            owner = named(name)
            if not number:
                other[owner] = values
            elif owner not in other:
                path = f"optimizer.{number}.{owner}"
                for key, value in values.items():
                    tensors: dict[str, Entry] = {}
                    own = whole.file.kept(value, inside(path, key), tensors)
                    others.append(unread(key, [owner], OF_EXPERTS, own, tensors.values()))
        if number:
            others += strangers_of(states)[1]
    ranks = wholes[0].states
    ranks = replace(ranks, states=[ranks.first | ({"other": other} if other else {})])
    experts = Experts(ranks, files, layers, places)
    manifest = manifest_of(
        ranks, [*known.values()], "deepspeed", ranks.config, experts.module_dtype
    )
    manifest = experts.complete(manifest)
    state, warnings = manifest.state, [*manifest.warnings]
    members = whole_states.members_in(state["module"], wholes[0].members)
    if inferred:
        warnings.append(
            f"the optimizers know their {counted(len(inferred), 'parameter')} by number: the "
            f"names of {listed([*inferred], 4)} are inferred from the order of the module"
        )
    return replace(
        with_files(manifest, (whole.file for whole in wholes)),
        replicas=(*manifest.replicas, *replicas),
        inferred=tuple(inferred),
        unread=(*manifest.unread, *others),
        warnings=tuple(warnings),
        state={**state, "optimizer": {**state["optimizer"], **members}},
        zero_padding=True,
    )


def _copies(first: FlatBuffer, copy: FlatBuffer, file: TorchFile) -> Iterator[Entry]:
    """The entries of a copy in another file; raises InconsistentCheckpoint for another step."""
    owner = next(iter(first.shapes))
    stated = [
        (f"{owner}, {where}", each.step)
        for where, each in (("ep rank 0", first), (file.path, copy))
        if each.step is not None
    ]
    agreement.agree(stated, None)
    kinds = [sorted((slot.name, slot.dtype) for slot in each.slots) for each in (first, copy)]
    if first.shapes != copy.shapes or kinds[0] != kinds[1]:
        raise InconsistentCheckpoint(
            f"{file.path}: its copy of {owner} has other states or shapes than ep rank 0's",
            hint="files of different saves seem to be mixed",
        )
    for slot in copy.slots:
        for name, fragments in slot.fragments.items():
            yield Entry(f"{name}/{slot.name}", slot.dtype, copy.shapes[name], fragments)


def _renamed(buffer: FlatBuffer, named: Callable[[str], str]) -> FlatBuffer:
    """A buffer with the names of the whole model."""
    return replace(
        buffer,
        shapes={named(name): shape for name, shape in buffer.shapes.items()},
        slots=[
            replace(slot, fragments={named(n): runs for n, runs in slot.fragments.items()})
            for slot in buffer.slots
        ],
    )
