"""Which model ranks does a directory have, and which place in the grid does each one have?

A directory is as many ZeRO checkpoints as there are model ranks: `mp_rank_MM` is stage MM // tp of
the pipeline and tensor rank MM % tp (DeepSpeed 0.19.8, `PipeModelDataParallelTopology`). The sizes
are found in two ways, which must agree:

    names       files of layers exist for pipelines alone, and state the tensor rank
                (`layer_03-model_01-model_states.pt`, or `layer_03-model_states.pt` for one). A
                pipeline with experts has none: its stages are known by their parameters
    contents    `checkpoint_parallel_dimensions` (since 0.19.7) and `mp_world_size` of each model
                file; before 0.19.7 the parameters: tensor ranks have the same names, stages others

DeepSpeed's own guess counts the names that begin with `layer_01`, and fails if that layer is a
plain function (`get_model_3d_descriptor_from_metadata`). It is not copied here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ....core.grid import Grid
from ....core.inert import Foreign
from ....core.missing_ranks import refuse_other_writers
from ....errors import IncompleteCheckpoint, InconsistentCheckpoint, brief, listed
from ....files.torchfile import Parsed
from ...deepspeed_states.directories import (
    EXPERT,
    LAYER,
    MODEL,
    MODEL_3,
    OPTIMIZER,
    TagDirectory,
    refuse,
)
from ...deepspeed_states.states import EngineStates, dictionary, open_files, shapes_of_groups
from ..files import Found, RankFiles, files_in, need_files, rank_files
from ..moe.auto_ep import refuse_folded
from .layer_names import tied_key, untied_layers

SOME_STAGES = "mixture-of-experts layers in some stages of a pipeline alone"


class GridFiles(Struct, frozen=True):
    """The files of every model rank, in order, and those of layers by layer and tensor rank."""

    ranks: Sequence[RankFiles]
    layers: Mapping[tuple[int, ...], str]
    grid: Grid

    @property
    def is_plain(self) -> bool:
        """Whether there is one model rank, and no pipeline."""
        return len(self.ranks) == 1 and not self.grid.staged

    @property
    def parsed(self) -> Parsed:
        """What was opened of all files."""
        return self.ranks[0].parsed

    @property
    def paths(self) -> list[str]:
        """Those of all files."""
        return [*(path for rank in self.ranks for path in rank.paths), *self.layers.values()]

    def layers_of(self, tp: int) -> dict[int, str]:
        """The paths of one tensor rank's layers, in the order of the model."""
        return {layer: path for (layer, rank), path in sorted(self.layers.items()) if rank == tp}


def grid_files(directory: TagDirectory) -> GridFiles:
    """The files of all ranks. Raises IncompleteCheckpoint if one is missing, as far as names show.

    Raises UnsupportedCheckpoint for what is not read yet: NVMe offload, AutoEP beside AutoTP, a
    pipeline in which only some stages have experts.
    """
    found = files_in(directory, os.listdir(directory.path))
    of_experts, layers = found[EXPERT], found[LAYER]
    of_ranks = (*found[MODEL], *found[MODEL_3], *found[OPTIMIZER])
    if of_experts and any(place[-1] for place in of_ranks):
        _refuse_folded(directory, [*found[MODEL].values()])
    ranks = rank_files(directory, found, Parsed())
    if of_experts and layers:
        refuse(directory, SOME_STAGES)
    if of_experts and len(ranks) > 1:
        pp, tp = _sizes_with_experts(ranks)
    else:
        pp, tp = _sizes(directory, len(ranks), found)
    return GridFiles(ranks, layers, Grid(pp, tp, bool(layers)))


def _refuse_folded(directory: TagDirectory, models: Sequence[str]) -> None:
    """Raises UnsupportedCheckpoint for AutoEP beside AutoTP, before a file seems to be missing.

    It spreads the experts over the ranks of all model ranks together.
    """
    for file in open_files(models[:1], Parsed()):
        refuse_folded(directory, dictionary(file, file.value))


def _sizes(directory: TagDirectory, ranks: int, found: Found) -> tuple[int, int]:
    """The sizes pp and tp, as the names show them; there is a file of each layer for each of tp."""
    layers = found[LAYER]
    if not layers:
        return 1, ranks
    tp, numbers = 1 + max(tp for _, tp in layers), sorted({layer for layer, _ in layers})
    places = ((layer, rank) for layer in numbers for rank in range(tp))
    need_files(directory, LAYER, found, places)
    if ranks % tp:
        raise IncompleteCheckpoint(
            f"{directory.path} has layers of {tp} tensor ranks, but files of {ranks} model ranks",
            hint=f"expected a multiple of {tp}: copy all files again",
        )
    return ranks // tp, tp


def _sizes_with_experts(ranks: Sequence[RankFiles]) -> tuple[int, int]:
    """The sizes pp and tp, if no file of a layer can be there: stages have other parameters."""
    members = []
    for file in open_files([files.models[0] for files in ranks], ranks[0].parsed):
        shapes = dictionary(file, file.value).get("param_shapes")
        members.append({name for group in shapes_of_groups(shapes, file) for name in group})
    tp = sum(names == members[0] for names in members)
    return (1, len(ranks)) if len(ranks) % tp else (len(ranks) // tp, tp)


def check_grid(directory: TagDirectory, files: GridFiles, ranks: Sequence[EngineStates]) -> None:
    """Raises InconsistentCheckpoint unless the contents show the grid that the names show."""
    for number, rank in enumerate(ranks):
        path = rank.models[0].path
        if files.layers and rank.model.get("module"):
            raise InconsistentCheckpoint(
                f"{path} has the weights of a run without a pipeline, but there are files of "
                "layers, which only pipelines have",
                hint="keep only the files of one save",
            )
        world = rank.model.get("mp_world_size")
        if isinstance(world, int) and world > len(ranks):
            raise IncompleteCheckpoint(
                f"{directory.path} holds files of {len(ranks)} of {world} model ranks",
                hint=f"expected mp_rank_{len(ranks):02d}_model_states.pt",
            )
        if isinstance(world, int) and world < len(ranks):
            raise InconsistentCheckpoint(
                f"{directory.path} holds files of {len(ranks)} model ranks, but {path} says there "
                f"were {world}",
                hint="files of another save may lie between them; keep those of one save",
            )
        stated = rank.model.get("checkpoint_parallel_dimensions")
        if isinstance(stated, dict):
            sizes = stated.get("pp_degree"), stated.get("tp_degree")
            if sizes != (files.grid.pp, files.grid.tp):
                raise InconsistentCheckpoint(
                    f"{directory.path} has the files of pp {files.grid.pp} x tp {files.grid.tp}, "
                    f"but {path} says that it was pp {brief(sizes[0])} x tp {brief(sizes[1])}",
                    hint="files of layers may be missing, or of another save: copy all files again",
                )
        else:
            _check_names(directory, files, ranks, number)
    # Megatron-DeepSpeed's arguments
    refuse_other_writers(directory.path, [arguments(rank.model).get("rank") for rank in ranks])
    if files.layers:
        _check_stages(directory, files, ranks)


def _check_stages(directory: TagDirectory, files: GridFiles, ranks: Sequence[EngineStates]) -> None:
    """The layers of a stage come after those of the stage before it; tied ones have no number."""
    before: tuple[int, int] | None = None  # the last layer so far, and its model rank
    for number in range(0, len(ranks), files.grid.tp):
        layers = sorted(untied_layers(_names(ranks[number])))
        if layers and before is not None and layers[0] <= before[0]:
            raise InconsistentCheckpoint(
                f"{directory.path}: model rank {number} has layer {layers[0]}, but model rank "
                f"{before[1]} has layer {before[0]}",
                hint="the files of two stages may be swapped: copy all files again",
            )
        if layers:
            before = layers[-1], number


def _check_names(
    directory: TagDirectory, files: GridFiles, ranks: Sequence[EngineStates], number: int
) -> None:
    """Older files state no sizes: tensor ranks have the same parameters, stages have others."""
    stage, tensor_rank = divmod(number, files.grid.tp)
    ours = _names(ranks[number])
    if tensor_rank and ours != _names(ranks[stage * files.grid.tp]):
        odd = listed(sorted(ours ^ _names(ranks[stage * files.grid.tp])), 4)
        first = f"model rank {stage * files.grid.tp}"
        if files.layers:
            raise InconsistentCheckpoint(
                f"{directory.path}: model rank {number} must have the parameters of {first}, as "
                f"both are of stage {stage}, but they differ in {odd}",
                hint="files of two ranks may be swapped, or of another save: copy all files again",
            )
        raise InconsistentCheckpoint(
            f"{directory.path} has no files of layers, so model rank {number} must be a tensor "
            f"rank, but it has other parameters than {first}: {odd}",
            hint="the files of a pipeline's layers may be missing: layer_NN-model_states.pt",
        )
    if stage and not tensor_rank:
        before = set().union(*map(_names, ranks[: stage * files.grid.tp]))
        twice = sorted(name for name in ours & before if tied_key(name) is None)
        if twice:
            raise InconsistentCheckpoint(
                f"{directory.path} has {listed(twice, 4)} in two stages of the pipeline",
                hint="files of layers of another save may lie there; keep those of one save",
            )


def _names(rank: EngineStates) -> set[str]:
    return {name for group in rank.param_shapes() for name in group}


# -- the arguments that Megatron's programs save


ARGS = "args"
TENSOR_SIZES = ("tensor_model_parallel_size", "model_parallel_size")
STAGE_SIZES = ("pipeline_model_parallel_size",)
VOCABULARY_SIZES = ("padded_vocab_size",)
"""When they load, Megatron's programs compare their arguments with these, and stop if they differ.
So a target for another grid has other numbers in them. They are in the client state under `args`:

    Megatron-DeepSpeed   an object: tensor_model_parallel_size (below version 3
                         model_parallel_size), pipeline_model_parallel_size, padded_vocab_size
    GPT-NeoX             a dictionary: model_parallel_size, padded_vocab_size

Both have `make_vocab_size_divisible_by` too (checkpointing.py of both, `check_checkpoint_args`).
"""


def arguments(client_state: Mapping[Any, Any] | None) -> Mapping[Any, Any]:
    """The saved arguments; none if the program saved none."""
    args = (client_state or {}).get(ARGS)
    values = args.state if isinstance(args, Foreign) else args
    return values if isinstance(values, Mapping) else {}


def with_sizes(client_state: Mapping[Any, Any], sizes: Mapping[str, int]) -> dict[Any, Any]:
    """The client state with other sizes in its arguments, where it has arguments of these names."""
    values = arguments(client_state)
    changed = {**values, **{name: size for name, size in sizes.items() if name in values}}
    if changed == values:
        return dict(client_state)
    args = client_state[ARGS]
    return {
        **client_state,
        ARGS: replace(args, state=changed) if isinstance(args, Foreign) else changed,
    }
