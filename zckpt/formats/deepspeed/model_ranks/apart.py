"""The model ranks of a directory apart: one manifest in which every name begins with its rank.

    2:4.norm.weight/exp_avg      of model rank 2

To write a run for another data-parallel size at the same grid, nothing has to be joined. Each model
rank keeps its own copies, drifted or not, and nothing has to be known about how tensors were cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

from msgspec import Struct
from msgspec.structs import replace

from ....core import sources
from ....core.facts import FlatBufferEngine
from ....core.manifest import Entry, Manifest, Sibling
from ....core.unread import as_unread
from ...deepspeed_states.directories import TagDirectory
from ...deepspeed_states.manifest import manifest_of
from ...deepspeed_states.states import EngineStates
from ..files import NAMED, Numbered, RankFiles
from ..flats import flat_buffers
from ..moe.experts import with_experts
from ..ranks import open_ranks
from ..stage_0.stages import open_model_ranks
from ..stage_0.whole_states import manifest_of_whole
from .grid import GridFiles
from .together import check_equal, common

OF_MODEL_RANKS = (
    "of several model ranks, zckpt does not read a state of the ranks' parts of flat buffers"
)


def of_rank(ranks: EngineStates, files: RankFiles, step_policy: str | None) -> Manifest:
    """The manifest of one model rank by itself."""
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


def of_model_rank(ranks: EngineStates, files: RankFiles, step_policy: str | None) -> Manifest:
    """The same of one among several model ranks, whose parts of flat buffers are not joined."""
    return as_unread(of_rank(ranks, files, step_policy), OF_MODEL_RANKS)


class ModelGrid(Struct, frozen=True):
    """The sizes of a run's model axes, and the type `dtype` of its module's weights.

    `staged` says that it is a pipeline: weights are in files of layers, so that the other files of
    a model rank do not show their type.
    """

    pp: int
    tp: int
    staged: bool
    dtype: str | None

    @classmethod
    def of(cls, files: GridFiles, manifest: Manifest) -> ModelGrid:
        """The grid of these files; `manifest` is of any tensor rank's whole model."""
        assert isinstance(manifest.engine, FlatBufferEngine)
        return cls(files.pp, files.tp, bool(files.layers), manifest.engine.dtype)


class ModelRank(Struct, frozen=True):
    """Which model rank a manifest is of; `buffers` are the names that its model file states."""

    number: int
    grid: ModelGrid
    buffers: tuple[str, ...]


def open_apart(
    directory: TagDirectory,
    files: Sequence[RankFiles],
    grid: ModelGrid,
    step_policy: str | None,
    numbered: Numbered = NAMED,
    layers: GridFiles | None = None,
) -> list[Manifest]:
    """The manifest of each model rank; its `source` has a ModelRank, under `model_rank`.

    `layers` has the files of a pipeline's layers, unless they are not written yet.

    Raises InconsistentCheckpoint if they are of different saves.
    """
    of_layers = [{} if layers is None else layers.layers_of(tp) for tp in range(grid.tp)]
    if files[0].optimizers:
        staged = [each if grid.staged else None for each in of_layers]
        opened = [
            open_ranks(directory, each, staged[number % grid.tp])
            for number, each in enumerate(files)
        ]
        pairs = [
            (ranks, of_model_rank(ranks, each, step_policy))
            for ranks, each in zip(opened, files, strict=True)
        ]
    else:
        wholes = open_model_ranks(directory, files, of_layers if grid.staged else None, numbered)
        pairs = [(whole.states, manifest_of_whole(whole, step_policy)) for whole in wholes]
    manifests = []
    for number, (ranks, manifest) in enumerate(pairs):
        buffers = tuple(ranks.model.get("buffer_names") or ())
        rank = ModelRank(number, grid, buffers)
        assert isinstance(manifest.engine, FlatBufferEngine)
        engine = replace(manifest.engine, dtype=grid.dtype)
        source = {**manifest.source, "model_rank": rank}
        manifests.append(replace(manifest, source=source, engine=engine))
    check_equal(manifests)
    return manifests


def stacked(manifests: Sequence[Manifest]) -> Manifest:
    """All model ranks in one manifest, under names that begin with the rank's number."""
    first, together = manifests[0], common(manifests)
    numbered = list(enumerate(manifests))
    entries = (_prefixed(number, entry) for number, m in numbered for entry in m.entries.values())
    rank: ModelRank = first.source["model_rank"]
    source = {key: value for key, value in first.source.items() if key != "model_rank"}
    return replace(
        first,
        source={**source, "tp": rank.grid.tp, "pp": rank.grid.pp, "model_ranks": len(manifests)},
        entries={entry.name: entry for entry in entries},
        parameters={
            f"{number}:{name}": replace(
                item, aliases=tuple(f"{number}:{alias}" for alias in item.aliases)
            )
            for number, m in numbered
            for name, item in m.parameters.items()
        },
        buffers=tuple(f"{number}:{name}" for number, m in numbered for name in m.buffers),
        replicas=tuple(_prefixed(number, e) for number, m in numbered for e in m.replicas),
        records=together.records,
        files=together.files,
        steps=together.steps,
        of_ranks=together.of_ranks,
        layout=together.layout,
        left_out=tuple(dict.fromkeys(chain.from_iterable(m.left_out for m in manifests))),
        warnings=together.warnings,
        inferred=together.inferred,
        unread=together.unread,
    )


def weights_of_layers(ranks: Sequence[Manifest], models: Sequence[Manifest]) -> Iterator[Entry]:
    """The weights in files of layers, under the names that `stacked` gives to their masters.

    `models` are the whole models of the tensor ranks. No file says of which stage the copies of a
    tied weight are, so that each stage gets all of them. If there are fewer copies than stages,
    only the first one gets them: a stage that uses the layer by a function saves no weight.
    """
    for place, model in enumerate(models):
        copies: dict[str, list[Entry]] = {}
        for entry in chain(model.entries.values(), model.replicas):
            if entry.slot == "param":
                copies.setdefault(entry.parameter, []).append(entry)
        stages = list(enumerate(ranks))[place :: len(models)]
        uses = Counter(name for _, rank in stages for name in rank.parameters)
        seen: set[str] = set()
        for number, rank in stages:
            names = [name for name in rank.parameters if f"{name}/param" not in rank.entries]
            for name in names:
                if name not in seen or len(copies.get(name, ())) >= uses[name]:
                    yield from (_prefixed(number, entry) for entry in copies.get(name, ()))
            seen.update(names)


def _prefixed(number: int, entry: Entry) -> Entry:
    return replace(entry, name=f"{number}:{entry.name}")


def layer_siblings(files: GridFiles, tag: str) -> list[tuple[str, Sibling]]:
    """The files of layers: no data rank has a part in them, so they are copied as they are."""
    siblings = []
    for _, path in sorted(files.layers.items()):
        name = f"{tag}/{path.rpartition('/')[2]}"
        siblings.append((name, Sibling(name, path, sources.size(path))))
    return siblings
