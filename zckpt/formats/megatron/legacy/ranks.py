"""Lists the folders of a `mp_rank_*` directory: one for each model-parallel rank.

    mp_rank_TT             tensor rank
    mp_rank_TT_PPP         with several pipeline stages
    mp_rank_TT_EEE         with experts that are spread over ranks
    mp_rank_TT_PPP_EEE     with both

PPP and EEE look alike: the arguments in the files tell which of the two a second number is
(Megatron-LM's get_checkpoint_name). Weights that all expert ranks have are in the folder of each of
these ranks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from ....core.grouping import by_key
from ....core.storage import sources
from ....core.storage.inventory import Numbers, every, gaps, missing_file, parse_name, refuse_gaps
from ....errors import (
    CorruptCheckpoint,
    InconsistentCheckpoint,
    Notice,
    UnsupportedCheckpoint,
    counted,
)
from ....files.torchfile import Parsed, Tensor, TorchFile
from ....training.faults import OLD_QKV
from ...ranks import refuse_other_writers
from ..common_state import arguments
from ..files import LEGACY, MODEL, is_of_rank
from ..manifest import require_groups, size_of, stranger
from ..names import EXPERT, with_own_expert

EVERY_RANK = "every model-parallel rank writes one: copy the whole directory"
OF_GROUPED = re.compile(r"(?P<experts>.*\bmlp\.experts)\.(?P<rest>linear_fc[12]\._extra_state)")
"""The key of the state that grouped experts (Transformer Engine's module) have together."""
OLDEST = 2.0  # checkpoint_version; earlier, linear_qkv had another order of rows
STATES_FILE = "distrib_optim.pt"
OF_CHUNK = re.compile(r"model\d*")


class RankDirectory(Struct, eq=False):
    """One model-parallel rank: its file, and its weights by their names in the full model."""

    tp: int
    pp: int
    ep: int
    folder: str
    file: TorchFile
    weights: dict[str, Tensor] = field(default_factory=dict)
    chunks: list[list[str]] = field(default_factory=list)  # parameters of each model chunk

    @property
    def models(self) -> list[Any]:
        """The state dicts of the rank's model chunks: several in an interleaved pipeline."""
        return [each for key, each in self.file.value.items() if OF_CHUNK.fullmatch(str(key))]

    @property
    def optimizers(self) -> list[dict[Any, Any]]:
        """The state dicts of the rank's optimizers: one, or two with expert parallelism.

        Experts that are spread over ranks have the second optimizer.
        Raises UnsupportedCheckpoint if one of them is not a dictionary.
        """
        state = self.file.value.get("optimizer")
        states = state if isinstance(state, list) else [state]
        optimizers = [each for each in states if isinstance(each, dict)]
        if not optimizers or len(optimizers) < len(states):
            raise UnsupportedCheckpoint(
                "writer-unsupported",
                f"{self.file.path}: an optimizer's state is not a dictionary",
                file=self.file.path,
            )
        return optimizers


def with_own_experts(model: Mapping[Any, Any], is_scaled: bool) -> Iterator[tuple[str, Any]]:
    """Yields a state dict's items with names as if every expert were a separate module.

    Grouped experts (Transformer Engine's module) have a single `_extra_state`; each expert gets it.
    With `is_scaled`, this state has the scales of 8-bit floats, and is yielded once, unchanged.
    """
    items = [(with_own_expert(str(name)), value) for name, value in model.items()]
    matches = (match for name, _ in items if (match := EXPERT.fullmatch(name)))
    numbers = by_key(
        (match["before"].removesuffix(".local_experts."), int(match["number"])) for match in matches
    )
    for name, value in items:
        match = OF_GROUPED.fullmatch(name)
        if match is None or is_scaled:
            yield name, value
            continue
        for number in sorted(set(numbers.get(match["experts"], ()))):
            yield f"{match['experts']}.local_experts.{number}.{match['rest']}", value


def ranks_of(folder: str, parsed: Parsed) -> list[RankDirectory]:
    """All model-parallel ranks of a directory, sorted by stage, expert rank and tensor rank.

    Raises IncompleteCheckpoint (a rank has no folder), InconsistentCheckpoint (the folder of a rank
    that the run did not have), UnsupportedCheckpoint (experts cut over another number of tensor
    ranks than other weights) and CorruptCheckpoint (a damaged file).
    """
    names = sorted(filter(is_of_rank, os.listdir(folder)))
    files = {name: _file(folder, name, parsed) for name in names}
    args = arguments(files[names[0]].value)
    kinds = ("pipeline", "expert", "tensor")
    sizes_in_args = [size_of(args, f"{kind}_model_parallel_size") for kind in kinds]
    spread = (sizes_in_args[1] or 1) > 1
    staged = (sizes_in_args[0] or 1) > 1 or not spread
    if spread and size_of(args, "expert_tensor_parallel_size") not in (None, sizes_in_args[2]):
        raise UnsupportedCheckpoint(
            "grid-unsupported",
            f"{folder}: experts are cut over another number of tensor ranks than the rest of the "
            "model, which zckpt does not read from this kind of directory",
            hint="save the run with --ckpt-format torch_dist",
            file=folder,
        )
    places: dict[tuple[int, int, int], str] = {}
    for name in names:
        name_parts = parse_name((MODEL,), files[name].path)
        assert name_parts is not None
        tp, *numbers = name_parts.numbers
        pp = numbers.pop(0) if numbers and staged else 0
        ep = numbers.pop(0) if numbers and spread else 0
        place = pp, ep, tp
        if numbers or any(
            size and at >= size for at, size in zip(place, sizes_in_args, strict=True)
        ):
            raise InconsistentCheckpoint(
                "mixed-saves",
                f"{folder} has the folder {name}, but the saved arguments say that the run had no "
                "such rank",
                hint="folders of two runs may be mixed: take another copy",
                file=folder,
                subject=name,
            )
        places[place] = name
    seen = [1 + max(numbers) for numbers in zip(*places, strict=True)]
    sizes = [size or own for size, own in zip(sizes_in_args, seen, strict=True)]
    example = f"mp_rank_00{'_000' * (sizes[0] > 1)}{'_000' * (sizes[1] > 1)}/{LEGACY}"
    there = {_numbers(place, sizes): name for place, name in places.items()}
    wanted = (_numbers(place, sizes) for place in every(*map(range, sizes)))
    missing = gaps(MODEL, there, wanted, os.path.join(folder, example))
    refuse_gaps(folder, missing, hint=EVERY_RANK)
    ranks = [
        RankDirectory(tp, pp, ep, os.path.join(folder, name), files[name])
        for (pp, ep, tp), name in sorted(places.items())
    ]
    refuse_other_writers(folder, [arguments(rank.file.value).get("rank") for rank in ranks])
    _require_known(folder, args, sizes[2], ranks)
    return ranks


def _numbers(place: Numbers, sizes: Sequence[int]) -> Numbers:
    """The numbers in a rank folder's name, from a `place` (stage, expert rank, tensor rank).

    The name has the numbers of stage and expert rank only if the run has several of them.
    """
    (pp, ep, tp), (stages, experts, _) = place, sizes
    return (tp, *[pp] * (stages > 1), *[ep] * (experts > 1))


def _file(folder: str, name: str, parsed: Parsed) -> TorchFile:
    path = os.path.join(folder, name, LEGACY)
    if not sources.is_file(path):
        raise missing_file(path, folder, "every model-parallel rank writes one")
    file = TorchFile(path, parsed)
    if not isinstance(file.value, dict):
        raise CorruptCheckpoint("file-damaged", f"{path} is not a dictionary", file=path)
    return file


def _require_known(
    folder: str, args: Mapping[str, Any], tp: int, ranks: Sequence[RankDirectory]
) -> None:
    """Raises UnsupportedCheckpoint for models that zckpt does not read from these directories."""
    version = ranks[0].file.value.get("checkpoint_version", 0)
    if not isinstance(version, (int, float)) or version < OLDEST:
        raise UnsupportedCheckpoint(
            "engine-fault",
            f"{folder} has the checkpoint_version {version!s:.20}: {OLD_QKV.message}",
            hint=OLD_QKV.hint,
            file=folder,
        )
    require_groups(folder, args, tp)
    for rank in ranks:
        own_chunks, first = len(rank.models), len(ranks[0].models)
        if own_chunks != first:
            raise InconsistentCheckpoint(
                "mixed-saves",
                f"{rank.file.path} has {counted(own_chunks, 'model chunk')}, but "
                f"{ranks[0].file.path} has {first}",
                file=rank.file.path,
            )
        are_core = (isinstance(each, dict) and "language_model" not in each for each in rank.models)
        if not own_chunks or not all(are_core):
            raise UnsupportedCheckpoint(
                "writer-unsupported",
                f"{rank.file.path} has no state dict of a Megatron-Core model, which zckpt "
                "expected under the key model",
                file=rank.file.path,
            )


def extra_states(folder: str, ranks: Sequence[RankDirectory]) -> list[Notice]:
    """Notes on the files and folders of the directory that zckpt does not read."""
    own_folders = {os.path.basename(rank.folder) for rank in ranks}
    inside = [
        f"{os.path.basename(rank.folder)}/{name}"
        for rank in ranks
        for name in os.listdir(rank.folder)
        if name not in (LEGACY, STATES_FILE)
    ]
    names = sorted([name for name in os.listdir(folder) if name not in own_folders] + inside)
    return [stranger(folder, name) for name in names]
