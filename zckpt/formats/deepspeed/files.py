"""Finds the files of a DeepSpeed checkpoint: its tag, and the files of each model rank.

A directory contains one ZeRO checkpoint per model rank: `mp_rank_MM` is stage MM // tp of the
pipeline and tensor rank MM % tp (DeepSpeed 0.19.8, `PipeModelDataParallelTopology`). File names
show the sizes, and ranks.py compares what files state. Only pipelines have files of layers, with
the tensor rank in their names (`layer_03-model_01-model_states.pt`, or `layer_03-model_states.pt`
for one tensor rank). A pipeline with experts has no files of layers: its stages are known by their
parameters.

DeepSpeed guesses the number of tensor ranks from the file names that begin with `layer_01`, and
fails if that layer is a plain function (`get_model_3d_descriptor_from_metadata`). zckpt does not do
the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from msgspec import Struct, field

from ...core.checkpoint.grid import Grid
from ...core.grouping import by_key
from ...core.storage import sources
from ...core.storage.inventory import Numbers, Role, gaps, parse_name, refuse_gaps, role
from ...errors import (
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    Notice,
    ZckptError,
    literal,
    note,
    warning,
)
from ...files.beginning import number_in
from ...files.torchfile import Parsed, TorchFile
from ..deepspeed_states.directories import (
    BF16,
    EXPERT,
    LAYER,
    MODEL,
    MODEL_3,
    OF_EP,
    OF_MODELS,
    OPTIMIZER,
    ROLES,
    SCRIPTS,
    TagDirectory,
    TagKind,
    holds_states,
    is_foreign,
    is_of_trainer,
    pointed,
    refuse,
    refuse_foreign,
    tags_of,
)
from ..deepspeed_states.experts import refuse_folded
from ..deepspeed_states.states import dictionary, open_files, shapes_of_groups
from ..paths import pointing
from . import sequence_ranks
from .sequence_ranks import FilesByRole

COUNTERS = "global_steps", "global_samples"
"""Two neighboring keys of a model file; `global_steps` counts updates (DeepSpeed 0.19.8)."""
KIND = TagKind("DeepSpeed checkpoint", "latest", holds_states, tags_of)
OLD_EXPERT = role("expert", r"expert_(\d+)_mp_rank_(\d+)_model_states\.pt", "expert", "mp")
SOME_STAGES = "mixture-of-experts layers in only some stages of a pipeline"


class RankFiles(Struct, frozen=True):
    """The paths of the files that belong to one model rank, each list sorted by rank.

    models        the model file; in stage 3 one per data-parallel rank
    optimizers    one per data-parallel rank; empty in stage 0
    experts       (layer of experts, expert) -> path; layers are counted in this model rank
    of_ep         one optimizer file per ep rank, in stage 0 with experts
    parsed        a cache of equal pickles, which all model ranks share
    number        the model rank
    sp            the number of sequence-parallel ranks that file names count as model ranks; else 1
    """

    models: Sequence[str]
    optimizers: Sequence[str]
    experts: Mapping[tuple[int, ...], str] = field(default_factory=dict)
    of_ep: Sequence[str] = ()
    parsed: Parsed = field(default_factory=Parsed)
    number: int = 0
    sp: int = 1

    @property
    def paths(self) -> list[str]:
        return [*self.models, *self.optimizers, *self.experts.values(), *self.of_ep]


class GridFiles(Struct, frozen=True):
    """All files of a checkpoint, sorted by model rank and pipeline layer.

    ranks    one item per model rank
    layers   (layer, tensor rank) -> path of the layer file; empty without a pipeline
    grid     the numbers of pipeline stages and tensor ranks
    """

    ranks: Sequence[RankFiles]
    layers: Mapping[tuple[int, ...], str]
    grid: Grid

    @property
    def is_plain(self) -> bool:
        """Whether there is one model rank and no pipeline."""
        return len(self.ranks) == 1 and not self.grid.staged

    @property
    def parsed(self) -> Parsed:
        return self.ranks[0].parsed

    @property
    def paths(self) -> list[str]:
        return [*(path for rank in self.ranks for path in rank.paths), *self.layers.values()]

    def layers_of(self, tp: int) -> dict[int, TorchFile]:
        """The opened layer files of tensor rank `tp`, by the layer's number in ascending order."""
        paths = {layer: path for (layer, rank), path in sorted(self.layers.items()) if rank == tp}
        return dict(zip(paths, open_files([*paths.values()], self.parsed), strict=True))


def detect(path: str) -> list[str]:
    """The tags of the checkpoints at `path`; if `path` is a tag's directory, its own name.

    If `path` is a single file that DataStates-LLM or FastPersist wrote, the tag is "". zckpt does
    not read such a file: `locate` raises an error that names the writer.
    """
    return KIND.detect(path) or ([""] if is_foreign(path) else [])


def tags(path: str) -> list[str]:
    """The tags of all checkpoints in a run directory.

    Empty for a directory in which Accelerate saved several models side by side: these are not
    several saves of one model.
    """
    if not sources.is_folder(path) or holds_states(path):
        return []
    names = tags_of(path)
    return [] if any(map(OF_MODELS.fullmatch, names)) else names


def pointer(path: str) -> str | None:
    """The tag in the file `latest`, which the engine writes after all ranks have saved.

    None if there is no such file.
    """
    return pointed(path, KIND.pointer)


def counter(path: str) -> int | None:
    """The `global_steps` in the first model file; None unless `path` has exactly one checkpoint."""
    try:
        folder = KIND.locate(path, None).path
    except ZckptError:
        return None
    names = [name for name in os.listdir(folder) if parse_name((MODEL, MODEL_3), name)]
    return number_in(os.path.join(folder, min(names)), COUNTERS[:1], COUNTERS) if names else None


def locate(path: str, tag: str | None) -> TagDirectory:
    """Finds the directory of `tag`; without `tag`, of the tag that the file `latest` names.

    Raises NotACheckpoint (no such tag), AmbiguousCheckpoint (several tags and no file `latest`),
    IncompleteCheckpoint (the tag in `latest` does not exist) and UnsupportedCheckpoint (files of
    another writer than torch.save, or a link `latest` that leads elsewhere).
    """
    if is_foreign(path):
        folder, name = os.path.split(path)
        refuse_foreign(folder, [name])
    directory = KIND.locate(path, tag)
    refuse_foreign(directory.path, os.listdir(directory.path))
    return directory


def grid_files(directory: TagDirectory, written: Grid | None = None) -> GridFiles:
    """Finds the files of all model ranks, and the layer files of a pipeline.

    `written` is the grid of a target that is still being written, and has no layer files yet.
    Raises as `files_in` and `rank_files`, and UnsupportedCheckpoint for AutoEP with AutoTP, and for
    a pipeline in which only some stages have experts.
    """
    files = files_in(directory, os.listdir(directory.path))
    layers, has_experts = files[LAYER], bool(files[EXPERT])
    of_ranks = (*files[MODEL], *files[MODEL_3], *files[OPTIMIZER])
    if has_experts and any(place[-1] for place in of_ranks):
        # AutoEP beside AutoTP spreads experts over all model ranks, so no expert file is missing
        for file in open_files([*files[MODEL].values()][:1], Parsed()):
            refuse_folded(directory, dictionary(file, file.value))
    ranks = rank_files(directory, files, Parsed())
    if written is not None:
        return GridFiles(ranks, {}, written)
    if has_experts and layers:
        refuse(directory, SOME_STAGES)
    tp = len(ranks)
    if layers:
        numbers, tp = sorted({layer for layer, _ in layers}), 1 + max(tp for _, tp in layers)
        need_files(directory, LAYER, files, ((each, n) for each in numbers for n in range(tp)))
    elif has_experts and tp > 1:  # pipeline stages have different parameters
        names = _parameters(ranks)
        alike = names.count(names[0])
        tp = tp if tp % alike else alike
    if len(ranks) % tp:
        raise IncompleteCheckpoint(
            "missing-rank-file",
            f"{directory.path} has layer files of {tp} tensor ranks, but files of {len(ranks)} "
            "model ranks",
            hint=f"the number of model ranks must be a multiple of {tp}: copy all files again",
            file=directory.path,
        )
    return GridFiles(ranks, layers, Grid(len(ranks) // tp, tp, bool(layers)))


def _parameters(ranks: Sequence[RankFiles]) -> list[set[str]]:
    """The parameter names that each model rank's first model file lists in `param_shapes`."""
    files = open_files([own.models[0] for own in ranks], ranks[0].parsed)
    shapes = [shapes_of_groups(dictionary(f, f.value).get("param_shapes"), f) for f in files]
    return [{*chain.from_iterable(own)} for own in shapes]


def files_in(directory: TagDirectory, names: Iterable[str]) -> FilesByRole:
    """Sorts the names in a directory by kind of file; returns the paths of the checkpoint's files.

    The result maps a kind (role), and then the numbers in a name, to the path: OPTIMIZER, (3, 0) to
    .../zero_pp_rank_3_mp_rank_00_optim_states.pt. Raises InconsistentCheckpoint (files of two runs)
    and UnsupportedCheckpoint (NVMe offload, experts of an old release).
    """
    names = sorted(names)
    if any(map(OLD_EXPERT.names.fullmatch, names)):
        refuse(directory, "mixture-of-experts layers of an old release")
    if "offloaded_tensors" in names:
        refuse(directory, "optimizer states offloaded to NVMe")
    files: dict[Role, dict[Numbers, str]] = {role: {} for role in ROLES}
    for name in names:
        if (recognized := parse_name(ROLES, name)) is None:
            continue
        path = os.path.join(directory.path, name)
        # mp_rank_01 and mp_rank_001 have the same number
        if (other := files[recognized.role].setdefault(recognized.numbers, path)) != path:
            raise InconsistentCheckpoint(
                "mixed-saves",
                f"{path} has the same numbers in its name as {os.path.basename(other)}",
                hint="remove the one that DeepSpeed did not write: it writes mp_rank_01 and "
                "layer_08",
                file=path,
            )
    are_bf16 = {os.path.basename(path).startswith(BF16) for path in files[OPTIMIZER].values()}
    with_experts = "stage 0 with experts (expp_rank_0)"
    for one, other, is_mixed in (
        ("bf16", "another type", len(are_bf16) > 1),
        ("stage 3", "stage 1 or 2", files[MODEL] and files[MODEL_3]),
        (with_experts, "another stage", files[OPTIMIZER] and files[OF_EP]),
    ):
        if is_mixed:
            raise InconsistentCheckpoint(
                "mixed-saves",
                f"{directory.path} has files of two runs: one of {one}, one of {other}",
                hint="keep only the files of one save",
                file=directory.path,
            )
    return files


def rank_files(directory: TagDirectory, by_role: FilesByRole, parsed: Parsed) -> list[RankFiles]:
    """The files of each model rank; raises IncompleteCheckpoint if the names show a missing file.

    If names count sequence-parallel ranks as model ranks (up to DeepSpeed 0.19.5), the result has
    one model rank, and these ranks are data-parallel ranks. `parsed` is a cache of equal pickles.
    """
    if not (by_role[MODEL] or by_role[MODEL_3]):
        raise IncompleteCheckpoint(
            "missing-file",
            f"{directory.path} holds no model states",
            "expected mp_rank_00_model_states.pt (stage 1, 2) or one per rank (stage 3)",
            [os.path.join(directory.path, "mp_rank_00_model_states.pt")],
            file=directory.path,
        )
    of_data_ranks = (*by_role[MODEL_3], *by_role[OPTIMIZER])
    data_ranks = range(1 + max((rank for rank, _ in of_data_ranks), default=0))
    if (sp := sequence_ranks.of_names(by_role)) > 1:
        for kind in (MODEL_3, OPTIMIZER):
            need_files(directory, kind, by_role, ((n, n % sp) for n in data_ranks))
        by_role = sequence_ranks.as_data_ranks(by_role)
    of_data_ranks = (*by_role[MODEL_3], *by_role[OPTIMIZER])
    model_ranks = range(1 + max(place[-1] for place in (*by_role[MODEL], *of_data_ranks)))
    ep_ranks = range(1 + max((rank for rank, _ in by_role[OF_EP]), default=0))
    need_files(directory, MODEL, by_role, ((number,) for number in model_ranks))
    for kind, ranks in ((MODEL_3, data_ranks), (OPTIMIZER, data_ranks), (OF_EP, ep_ranks)):
        need_files(directory, kind, by_role, ((n, number) for number in model_ranks for n in ranks))
    by_rank = {
        kind: by_key((place[-1], (place[:-1], path)) for place, path in sorted(files.items()))
        for kind, files in by_role.items()
    }

    def paths(number: int, *kinds: Role) -> list[str]:
        return [path for kind in kinds for _, path in by_rank[kind].get(number, ())]

    return [
        RankFiles(
            paths(n, MODEL, MODEL_3), paths(n, OPTIMIZER), experts, paths(n, OF_EP), parsed, n, sp
        )
        for n in model_ranks
        for experts in [dict(by_rank[EXPERT].get(n, ()))]
    ]


def need_files(
    directory: TagDirectory, role: Role, files: FilesByRole, wanted: Iterable[Numbers]
) -> None:
    """If any file of a kind exists, raises IncompleteCheckpoint unless all `wanted` ones exist.

    `wanted` has the numbers in the names of all files that must exist: (3, 0) for
    `zero_pp_rank_3_mp_rank_00_optim_states.pt`.
    """
    if files[role]:
        refuse_gaps(directory.path, gaps(role, files[role], wanted))


def without_pointer(directory: TagDirectory) -> list[Notice]:
    """A warning if a run directory has no file `latest`, so that the engine would load nothing.

    Trainers find their checkpoints by other rules, so their directories get no warning here.
    """
    run, tag = directory.run, directory.tag
    if run is None or pointer(run) is not None:
        return []
    # the rules of trainers are in judging/verdict.py
    if OF_MODELS.fullmatch(tag) or is_of_trainer(run) or run.endswith(".ckpt"):
        return []
    message = (  # it only logs this, and returns (None, None); the program continues (0.19.8)
        f"{run} has no file `latest`: without tag={literal(tag)}, load_checkpoint loads nothing "
        "from it"
    )
    hint = f"this writes the file: {pointing(run, tag)}"
    return [warning("unfinished-save", message, file=run, hint=hint)]


def recovery_scripts(tag: str) -> list[Notice]:
    """A note that the target does not get the source's scripts, such as zero_to_fp32.py.

    DeepSpeed puts the scripts beside the tag directory, whose path is `tag`. Returns [] if there
    are no scripts.
    """
    run = os.path.dirname(os.path.abspath(tag))
    names = [name for name in SCRIPTS if sources.is_file(os.path.join(run, name))]
    if not names:
        return []
    message = f"{' and '.join(names)}: use `zckpt convert --weights-only --dtype fp32` instead"
    return [note("file-omitted", message, file=os.path.join(run, names[0]))]
