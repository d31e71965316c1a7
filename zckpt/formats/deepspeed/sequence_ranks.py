"""The number of ranks that share each sequence (Ulysses, ALST).

Sequence parallelism cuts no weight: `sp` ranks share each sequence, and ZeRO cuts over all ranks.
But the `mpu` object that DeepSpeed uses for it (parallel_state_sp.py) returns a rank's index in its
sequence as the model rank. So this index appears in files like a tensor rank:

    to 0.19.5     zero_pp_rank_{r}_mp_rank_{r % sp}_...; in stages 1 and 2 mp_rank_00 is the one
                  model file
    since 0.19.5  `tp_degree` is sp, and `mp_world_size` is 1
    since 0.19.6  zero_pp_rank_{r}_mp_rank_00_..., as without sequence parallelism

With `mesh_param` ZeRO cuts over the data ranks alone. All ranks that share a sequence then write
the same files, which do not show how many ranks share it (0.19.8).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.checkpoint.grid import Grid
from ...core.storage.inventory import Numbers, Role
from ...errors import InconsistentCheckpoint, UnsupportedCheckpoint, brief
from ..deepspeed_states.directories import EXPERT, LAYER, MODEL, MODEL_3, OPTIMIZER

FilesByRole = Mapping[Role, Mapping[Numbers, str]]
"""The paths of files, by their role and then by the numbers in their names."""
DIMENSIONS, PP, TP = "checkpoint_parallel_dimensions", "pp_degree", "tp_degree"
WORLDS = ("dp_world_size", "mp_world_size")


def of_names(files: FilesByRole) -> int:
    """The number of ranks that share each sequence, if the file names show it; else 1.

    Names show it up to DeepSpeed 0.19.5: there, `mp_rank_NN` counts the ranks that share a
    sequence.
    """
    places = {*files[MODEL_3], *files[OPTIMIZER]}
    sp = 1 + max((model for _, model in places), default=0)
    is_grid = files[LAYER] or files[EXPERT] or any(number for (number,) in files[MODEL])
    # with real model ranks, each data rank has files of every model rank
    return 1 if is_grid or any(model != rank % sp for rank, model in places) else sp


def as_data_ranks(by_role: FilesByRole) -> FilesByRole:
    """Changes (data rank, model rank) of files to (data rank, 0).

    This is for names whose model rank is only an index in a sequence: zckpt then reads the files
    like files of a run with one model rank.
    """
    of_ranks = (MODEL_3, OPTIMIZER)
    return {
        role: {(rank, 0): path for (rank, _), path in files.items()} if role in of_ranks else files
        for role, files in by_role.items()
    }


def at(dp: int, sp: int) -> int:
    """The smallest sequence-parallel size that is at least `sp` and divides `dp`.

    Used if files are missing: the names of the remaining files show only that the size is at least
    `sp`. Sizes from 2 * sp on are not tried; if no smaller size divides `dp`, `sp` is returned.
    """
    return next((size for size in range(sp, 2 * sp) if dp % size == 0), sp)


def stated_sizes(model: Mapping[str, Any]) -> str:
    """All sizes of the run that a model file states, such as "dp_world_size 2, mp_world_size 1"."""
    dimensions = model.get(DIMENSIONS)
    sizes = {key: model[key] for key in WORLDS if key in model}
    sizes |= dimensions if isinstance(dimensions, dict) else {}
    return ", ".join(f"{key} {brief(size)}" for key, size in sizes.items())


def of_model(model: Mapping[str, Any], path: str, grid: Grid, dp: int, named: int) -> int:
    """The number of ranks that share each sequence, as a model file states it.

    grid     the pipeline stages and tensor ranks that file names show
    dp       the number of data ranks
    named    the number of ranks for each sequence that file names show

    If the file states no sizes (before 0.19.5), the result is `named`. Raises UnsupportedCheckpoint
    (unknown sizes) and InconsistentCheckpoint (sizes and names do not match).
    """
    dimensions = model.get(DIMENSIONS)
    if not isinstance(dimensions, dict):  # before 0.19.5
        return named
    unknown = {key: size for key, size in dimensions.items() if key not in (PP, TP) and size != 1}
    if unknown:
        axes = ", ".join(f"{key} {brief(size)}" for key, size in unknown.items())
        raise UnsupportedCheckpoint(
            "grid-unsupported",
            f"{path} states axes that this version of zckpt does not know: {axes} (it states "
            f"{stated_sizes(model)})",
            hint="ranks along these axes may share the model in a way that zckpt does not read: "
            "try a newer version of zckpt, or save from a run without these axes",
            file=path,
        )
    pp, tp = dimensions.get(PP), dimensions.get(TP)
    ranks = model.get("mp_world_size")
    is_plain = grid.pp * grid.tp == 1 and ranks in (1, None)
    if (pp, tp) == (grid.pp, grid.tp) and named == 1:
        return 1
    if is_plain and pp == 1 and type(tp) is int and 1 < tp <= dp and dp % tp == 0:
        if named in (1, tp):
            return tp
    elif named == 1 and type(pp) is type(tp) is type(ranks) is int and ranks != pp * tp:
        raise UnsupportedCheckpoint(
            "grid-unsupported",
            f"{path} states a combination of sizes that this version of zckpt does not know: "
            f"{stated_sizes(model)}; by their names, its files are those of dp {dp}, "
            f"pp {grid.pp} x tp {grid.tp}",
            hint="the run may have used a parallelism that zckpt does not know: try a newer "
            "version, or save without it",
            file=path,
        )
    of_sequence = f" with {named} ranks for each sequence" if named > 1 else ""
    raise InconsistentCheckpoint(
        "world-size-disagrees",
        f"the file names are those of a run with pp {grid.pp} x tp {grid.tp}{of_sequence}, but "
        f"{path} says pp {brief(pp)} x tp {brief(tp)} (it states {stated_sizes(model)})",
        hint="files of layers may be missing, or of another save: copy all files again",
        file=path,
    )
