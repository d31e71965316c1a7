"""Which files make a DeepSpeed checkpoint: its tag, and the files of its ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from msgspec import Struct, field

from ...core import sources
from ...core.filenames import file_names, numbers_of
from ...core.missing_ranks import expecting, missing_ranks
from ...errors import IncompleteCheckpoint, InconsistentCheckpoint
from ...files.torchfile import Parsed
from ..deepspeed_states.directories import (
    BF16,
    EXPERT,
    MODEL,
    MODEL_3,
    OF_EP,
    OF_MODELS,
    OPTIMIZER,
    SCRIPTS,
    TagDirectory,
    TagKind,
    file_of_rank,
    holds_states,
    is_foreign,
    pointed,
    refuse,
    refuse_foreign,
    tags_of,
)

Place = TypeVar("Place", bound=tuple[int, ...])

KIND = TagKind("DeepSpeed checkpoint", "latest", holds_states, tags_of)
OLD_EXPERT = file_names(r"expert_(\d+)_mp_rank_(\d+)_model_states\.pt")


class RankFiles(Struct, frozen=True):
    """Paths in rank order; stage 1 and 2 have one model file, stage 3 one per rank.

    Files of experts are by the number of the layer in its model rank, and of the expert in it.
    `of_ep` are the optimizers of all ep ranks, in order, in a run with experts in stage 0. `parsed`
    is what was opened of these files, and of those of other model ranks.
    """

    models: Sequence[str]
    optimizers: Sequence[str]
    experts: Mapping[tuple[int, ...], str] = field(default_factory=dict)
    of_ep: Sequence[str] = ()
    parsed: Parsed = field(default_factory=Parsed)

    @property
    def paths(self) -> list[str]:
        """Those of all files."""
        return [*self.models, *self.optimizers, *self.experts.values(), *self.of_ep]


def detect(path: str) -> list[str]:
    """Tags of the checkpoints at `path`; a tag directory's own is its name.

    A single file counts only to be refused by name.
    """
    return KIND.detect(path) or ([""] if is_foreign(path) else [])


def tags(path: str) -> list[str]:
    """All tags of a run; none if they are those of several models of one save (Accelerate)."""
    if not sources.is_folder(path) or holds_states(path):
        return []
    names = tags_of(path)
    return [] if any(map(OF_MODELS.fullmatch, names)) else names


def pointer(path: str) -> str | None:
    """The tag that `latest` names, which the engine writes when all ranks have saved."""
    return pointed(path, KIND.pointer)


def locate(path: str, tag: str | None) -> TagDirectory:
    """The tag that is meant; raises NotACheckpoint and AmbiguousCheckpoint.

    Raises UnsupportedCheckpoint for files that torch.save did not write.
    """
    if is_foreign(path):
        folder, name = os.path.split(path)
        refuse_foreign(folder, [name])
    directory = KIND.locate(path, tag)
    refuse_foreign(directory.path, os.listdir(directory.path))
    return directory


def rank_files(
    directory: TagDirectory, names: Sequence[str], parsed: Parsed, model_rank: int = 0
) -> RankFiles:
    """The files of all data ranks of one model rank, among the names of the directory.

    Raises IncompleteCheckpoint if a rank is missing, UnsupportedCheckpoint if the names show
    experts of an old release, or NVMe offload.
    """
    if any(map(OLD_EXPERT.fullmatch, names)):
        refuse(directory, "mixture-of-experts layers of an old release")
    if "offloaded_tensors" in names:
        refuse(directory, "optimizer states offloaded to NVMe")

    found: dict[re.Pattern[str], dict[tuple[int, ...], str]]
    found = {kind: {} for kind in (MODEL, MODEL_3, OPTIMIZER, EXPERT, OF_EP)}
    are_bf16 = set()
    for name in names:
        for kind, files in found.items():
            if not (numbers := numbers_of(kind, name)) or numbers[-1] != model_rank:
                continue
            is_bf16, place = name.startswith(BF16), numbers[:-1]
            is_second = kind is not OPTIMIZER or is_bf16 in are_bf16
            add_file(files, place, os.path.join(directory.path, name), is_second=is_second)
            if kind is OPTIMIZER:
                are_bf16.add(is_bf16)
    whole, of_stage_3, optimizers, experts, of_ep = found.values()
    for kinds, is_mixed in {
        "one of bf16, one of another type": len(are_bf16) > 1,
        "one of stage 3, one of stage 1 or 2": whole and of_stage_3,
        "one of stage 0 with experts (expp_rank_0), one of another stage": optimizers and of_ep,
    }.items():
        if is_mixed:
            raise InconsistentCheckpoint(
                f"{directory.path} has files of two runs: {kinds}",
                hint="keep only the files of one save",
            )
    models = whole or of_stage_3
    if not models:
        raise IncompleteCheckpoint(
            f"{directory.path} holds no model states"
            + (f" of model rank {model_rank}" if model_rank else ""),
            hint=f"expected mp_rank_{model_rank:02d}_model_states.pt (stage 1, 2) or one per rank "
            "(stage 3)",
        )
    _all_ranks(directory, optimizers, "optimizer")
    if missing := _missing(of_ep):
        expected = f"expp_rank_{missing[0]}_mp_rank_{model_rank:02d}_optim_states.pt"
        raise IncompleteCheckpoint(
            f"{directory.path} lacks the optimizer of ep rank {missing[0]}",
            hint=expecting(expected),
            paths=[os.path.join(directory.path, expected)],
        )
    _all_ranks(directory, of_stage_3, "model")
    if of_stage_3 and optimizers and len(models) != len(optimizers):
        rest = (
            file_of_rank(of_kind[min(of_kind)], rank)
            for of_kind, other in ((of_stage_3, optimizers), (optimizers, of_stage_3))
            for (rank,) in sorted(other.keys() - of_kind.keys())
        )
        raise IncompleteCheckpoint(
            f"{directory.path} has {len(models)} model files, but {len(optimizers)} optimizer "
            "files",
            hint="copy all files again: stage 3 writes one of each per rank",
            paths=[os.path.join(directory.path, name) for name in rest],
        )
    return RankFiles(
        [path for _, path in sorted(models.items())],
        [path for _, path in sorted(optimizers.items())],
        experts,
        [path for _, path in sorted(of_ep.items())],
        parsed,
    )


def add_file(files: dict[Place, str], place: Place, path: str, *, is_second: bool = True) -> None:
    """Adds the file of a place; raises InconsistentCheckpoint if `is_second` and it has one.

    Names such as mp_rank_01 and mp_rank_001 have the same number.
    """
    if is_second and place in files:
        raise InconsistentCheckpoint(
            f"{path} has the same number as {os.path.basename(files[place])}",
            hint="remove the one that DeepSpeed did not write: it writes mp_rank_01 and layer_08",
        )
    files[place] = path


def model_rank_of(name: str) -> int | None:
    """The model rank (`mp_rank`) whose file this is; None for any other name."""
    for kind in (MODEL, MODEL_3, OPTIMIZER):
        if numbers := numbers_of(kind, name):
            return numbers[-1]
    return None


def _missing(files: Mapping[tuple[int, ...], str]) -> list[int]:
    """The ranks without a file, though a later one has one."""
    ranks = {rank for (rank,) in files}
    return sorted(set(range(max(ranks, default=-1) + 1)) - ranks)


def _all_ranks(directory: TagDirectory, files: Mapping[tuple[int, ...], str], what: str) -> None:
    """Ranks are sorted as numbers: rank_10 comes after rank_9."""
    if missing := _missing(files):
        expected = file_of_rank(files[max(files)], missing[0])
        raise missing_ranks(directory.path, missing, what, expected=expected)


def recovery_scripts(tag: str) -> list[str]:
    """What is left out where DeepSpeed's scripts lie in the run directory around a tag's."""
    run = os.path.dirname(os.path.abspath(tag))
    names = [name for name in SCRIPTS if sources.is_file(os.path.join(run, name))]
    if not names:
        return []
    return [f"{' and '.join(names)}: `zckpt convert --weights-only --dtype fp32` does their work"]
