"""The model ranks of a directory apart: one manifest that has those of all ranks.

To write a run for another data-parallel size at the same grid, nothing has to be joined. Each model
rank keeps its own copies, drifted or not, and nothing has to be known about how tensors were cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

from msgspec import Struct
from msgspec.structs import replace

from ....core import sources
from ....core.filenames import numbers_of
from ....core.grid import Place
from ....core.grouping import by_key
from ....core.manifest import Entry, Manifest, Sibling
from ....core.merge import together
from ....core.records import RecordChecker
from ....core.states import as_unread
from ....core.streaming import finish
from ...deepspeed_states.directories import LAYER, TagDirectory, refuse
from ...deepspeed_states.manifest import manifest_of
from ...deepspeed_states.states import EngineStates, open_layers
from ...reading import USUAL, Reading
from ..files import RankFiles
from ..flats import flat_buffers
from ..moe.experts import with_experts
from ..ranks import open_ranks
from ..stage_0.optimizer import open_whole
from ..stage_0.stages import open_stages
from ..stage_0.states import manifest_of_whole
from .grid import SOME_STAGES, GridFiles, check_grid

OF_MODEL_RANKS = (
    "of several model ranks, zckpt does not read a state of the ranks' parts of flat buffers"
)


class OpenedRank(Struct, frozen=True):
    """What the files of one model rank say, and how they become its manifest at a step policy.

    In stage 0 `tied` are the keys of tied layers by the numbers of their files.
    """

    states: EngineStates
    manifest: Callable[[str | None], Manifest]
    tied: Mapping[int, str] | None = None


def _opened(
    directory: TagDirectory, files: GridFiles, reading: Reading, tied: Mapping[int, str] | None
) -> list[OpenedRank]:
    """What the files of all model ranks say; `tied` are the keys of tied layers, if known."""
    tp, layers = files.grid.tp, None
    if files.grid.staged:
        layers = [files.layers_of(rank) for rank in range(tp)]
    if files.ranks[0].optimizers:
        opened = []
        for number, own in enumerate(files.ranks):
            states = open_ranks(directory, own, None if layers is None else layers[number % tp])
            opened.append(OpenedRank(states, partial(_of_rank, states, own), tied))
        return opened
    if layers is None:
        wholes = [(open_whole(directory, each, reading), tied) for each in files.ranks]
    else:
        stages = [
            open_stages(
                directory, files.ranks[rank::tp], open_layers(own, files.parsed), reading, tied
            )
            for rank, own in enumerate(layers)
        ]
        wholes = [(each.wholes[n], each.tied) for n in range(files.grid.pp) for each in stages]
    return [
        OpenedRank(whole.states, partial(manifest_of_whole, whole), keys) for whole, keys in wholes
    ]


def model_ranks(
    directory: TagDirectory,
    files: GridFiles,
    reading: Reading = USUAL,
    tied: Mapping[int, str] | None = None,
) -> tuple[list[Manifest], list[Mapping[int, str] | None]]:
    """The manifest of each model rank, with its place; and the keys of its tied layers."""
    opened = _opened(directory, files, reading, tied)
    states = [each.states for each in opened]
    check_grid(directory, files, states)
    with_experts = [bool(each.model.get("num_experts")) for each in states]
    if any(with_experts) and not all(with_experts):
        refuse(directory, SOME_STAGES)
    manifests = [each.manifest(reading.step_policy) for each in opened]
    if files.ranks[0].optimizers and not files.is_plain:  # stage 0 has no flat buffers of ranks
        manifests = [as_unread(each, OF_MODEL_RANKS) for each in manifests]
    manifests = [
        replace(each, place=Place(n, files.grid, tuple(own.model.get("buffer_names") or ())))
        for n, (each, own) in enumerate(zip(manifests, states, strict=True))
    ]
    return manifests, [each.tied for each in opened]


def _of_rank(ranks: EngineStates, files: RankFiles, step_policy: str | None) -> Manifest:
    if files.experts or ranks.model.get("num_experts"):
        return with_experts(ranks, files, step_policy)
    manifest = manifest_of(
        ranks,
        list(flat_buffers(ranks, step_policy)),
        "deepspeed",
        ranks.effective_config(ranks.round_robin),
        ranks.module_dtype,
    )
    # stages 1 and 2 fill up with zeros; stage 3 leaves what was in memory (0.19.8)
    return replace(manifest, zero_padding=not ranks.partitioned)


def stacked(manifests: Sequence[Manifest]) -> Manifest:
    """All model ranks in one manifest; each keeps its tensors and parameters."""
    whole = together(manifests)
    assert manifests[0].place is not None
    grid = manifests[0].place.grid
    return replace(
        whole,
        ranks=tuple(manifests),
        source={**whole.source, "tp": grid.tp, "pp": grid.pp, "model_ranks": len(manifests)},
        entries={},
        parameters={},
        buffers=(),
        replicas=(),
        unread=(),
        left_out=tuple(dict.fromkeys(chain.from_iterable(m.left_out for m in manifests))),
    )


def with_weights_of_layers(
    ranks: Sequence[Manifest], models: Sequence[Manifest]
) -> Iterator[Manifest]:
    """The ranks, each with the weights of its masters that are in files of layers.

    `models` are the whole models of the tensor ranks. No file says of which stage the copies of a
    tied weight are, so that each stage gets all of them. If there are fewer copies than stages,
    only the first one gets them: a stage that uses the layer by a function saves no weight.
    """
    tp = len(models)
    tensors = (chain(model.entries.values(), model.replicas) for model in models)
    weights = [by_key((e.parameter, e) for e in own if e.slot == "param") for own in tensors]
    uses = [Counter(chain.from_iterable(m.parameters for m in ranks[n::tp])) for n in range(tp)]
    seen: list[set[str]] = [set() for _ in models]
    for number, rank in enumerate(ranks):
        n, own = number % tp, list[Entry]()
        names = [name for name in rank.parameters if f"{name}/param" not in rank.entries]
        for name in names:
            copies = weights[n].get(name, [])
            if name not in seen[n] or len(copies) >= uses[n][name]:
                own += copies
        seen[n].update(names)
        yield replace(rank, sibling_weights=tuple(own))


def layer_siblings(models: Sequence[Manifest], tag: str) -> list[tuple[str, Sibling]]:
    """The files of layers: no data rank has a part in them, so they are copied as they are."""
    files = {path: path.rpartition("/")[2] for model in models for path in model.files}
    layers = {path: numbers for path, file in files.items() if (numbers := numbers_of(LAYER, file))}
    names = {path: f"{tag}/{files[path]}" for path in sorted(layers, key=layers.__getitem__)}
    return [(name, Sibling(name, path, sources.size(path))) for path, name in names.items()]


def check_layers(source: Manifest, models: Sequence[Manifest]) -> None:
    """Raises CorruptCheckpoint if a file of a layer has other CRC-32s than it states.

    No tensor of them is copied by itself, which would check them.
    """
    files = {sibling.path for _, sibling in layer_siblings(models, "")}
    records = [r for model in models for r in model.records if r.extent.file in files]
    finish([RecordChecker(records, fingerprints=source.fingerprints)], everything=True)
