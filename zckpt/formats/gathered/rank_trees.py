"""Merges the files of all ranks, each with its shards, into one tree of state dicts.

torch loads such files only at the world size that wrote them. Any value other than a ShardedTensor
or DTensor should be the same on every rank. If it is not (random states, data loaders), rank 0's
value is kept, and the report states this. Schedulers that differ are an error.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NoReturn

from msgspec import Struct, field
from msgspec.structs import replace

from ...core.checkpoint import agreement
from ...core.checkpoint.dtypes import SIZES
from ...core.checkpoint.inert import Scalar, types_in
from ...core.storage import sources
from ...errors import IncompleteCheckpoint, InconsistentCheckpoint, UnsupportedCheckpoint, brief
from ...files.torchfile import Tensor, TorchFile
from ...naming import peft
from ...training import steps
from ...training.faults import ADAPTER_PART
from ..ranks import require_all
from ..statedict.refusals import refuse_tree
from ..statedict.state_dict_search import MEMBERS
from ..statedict.tree import (
    Difference,
    Leaf,
    StepStatement,
    TreePath,
    assembled,
    dotted,
    leads_to_step,
    leaf,
    leaves,
    memory_of,
    piece_of,
    twin_of,
)
from .sharded_tensors import (
    OF_ITEMS,
    OF_RANKS,
    DistributedTensor,
    LocalPart,
    MeshCache,
    distributed_in,
    is_distributed,
    ranks_of,
    read_distributed,
)

ACCELERATE = "pytorch_model_fsdp"
"""Prefix of accelerate's files of full models under FSDP: with `.bin`, `_1.bin` and so on."""


SCHEDULER = re.compile(r"(lr_)?schedulers?")
"""Keys under which verl, Lightning and other programs save learning rate schedulers."""

Copies = tuple[Leaf, Sequence[tuple[TorchFile, Tensor]]]
"""A tensor that ranks replicate: the first rank's leaf, and the other ranks' files and tensors."""


def merge(
    files: Mapping[int, TorchFile],
    step_policy: str | None,
    place: TreePath,
    by_checksums: bool,
) -> MergedRanks:
    """Merges the files of all ranks, of one kind such as the model's, into one tree.

    `place` is the path of this kind in the tree of all kinds. `step_policy` (--step-policy) chooses
    a step if ranks differ. With `by_checksums`, replicas are compared only by stated checksums.

    Raises IncompleteCheckpoint (a missing rank or shard), InconsistentCheckpoint (ranks contradict
    each other) and UnsupportedCheckpoint (flat parameters, unknown placements).
    """
    for file in files.values():
        refuse_tree(file.value, file.path)
    for file in files.values():
        if (first := next(distributed_in(file.value), None)) is not None:
            refuse_missing(files, ranks_of(first, file)[0])
    files = dict(sorted(files.items()))
    merged = MergedRanks(files, step_policy, by_checksums)
    merged.tree = merged.of({rank: file.value for rank, file in files.items()}, place)
    return merged


def refuse_missing(files: Mapping[int, TorchFile], world: int, are_shares: bool = False) -> None:
    """Raises IncompleteCheckpoint if one of `world` ranks has no file; the error names the ranks.

    `are_shares` is true for ZeroRedundancyOptimizer's files, each of which has the optimizer states
    of different parameters.
    """
    folder, name = os.path.split(files[min(files)].path)
    paths = {rank: file.path for rank, file in files.items()}
    reason, hint = f"{name} is the file of one of {world} ranks", ""
    if are_shares:
        reason += ", and ZeroRedundancyOptimizer saves different parameters' states in each file"
        hint = "add --weights-only to read the weights without the optimizer"
    require_all(paths, world, folder or ".", reason, hint, (*OF_RANKS, *OF_ITEMS))


def refuse_part(file: TorchFile) -> None:
    """Raises IncompleteCheckpoint if a file has one rank's shards but a complete file's name."""
    values = list(distributed_in(file.value))
    world, writer = ranks_of(values[0], file) if values else (1, None)
    if world == 1:
        return
    folder, name = os.path.split(file.path)
    rank, meshes = writer or 0, MeshCache()
    cuts = max(read_distributed(value, rank, file, meshes).cuts for value in values)
    is_state_dict = isinstance(file.value, dict) and types_in(file.value) <= {str}
    is_adapter = is_state_dict and bool(peft.module_names(file.value))
    if name.startswith(ACCELERATE) and is_adapter:
        beside = (n for n in peft.WEIGHTS if sources.is_file(os.path.join(folder, n)))
        whole = next(beside, None)
        raise IncompleteCheckpoint(
            "engine-fault",
            f"{file.path} has only 1/{cuts} of the adapter, rank {rank}'s shard: the other ranks "
            f"wrote no file ({ADAPTER_PART.message})",
            hint="use a complete adapter, which trainer.save_model() writes; or save again with "
            "accelerate 1.15, which saves the shards of all ranks"
            if whole is None
            else f"{whole} beside it has the complete adapter: copy the directory without {name}, "
            "and give the copy",
            file=file.path,
        )
    raise IncompleteCheckpoint(
        "missing-rank-file",
        f"{file.path} has only 1/{cuts} of its tensors, rank {rank}'s shards, but its name does "
        "not state a rank",
        hint=f"if all {world} ranks saved such files, put them into one directory as "
        f"model_rank_0.pt to model_rank_{world - 1}.pt; if not, save full tensors "
        "(full_state_dict=True)",
        file=file.path,
    )


class MergedRanks(Struct, eq=False):
    """The files of all ranks, merged into one tree of state dicts.

    tree          the merged state dicts, set by `merge`
    different     values that differ between ranks; `tree` has only the first rank's
    of_ranks      the other ranks' values where ranks differ, by file
    steps         the files' values under the key `step`
    copies        plain tensors, which each rank should have completely
    uncompared    the number of tensors that only reading could compare
    """

    files: dict[int, TorchFile]
    step_policy: str | None
    by_checksums: bool = False
    tree: Any = None
    of_ranks: dict[str, dict[str, Any]] = field(default_factory=dict)
    steps: list[StepStatement] = field(default_factory=list)
    copies: list[Copies] = field(default_factory=list)
    different: list[Difference] = field(default_factory=list)
    uncompared: int = 0
    meshes: MeshCache = field(default_factory=dict)

    def of(self, by_rank: dict[int, Any], path: TreePath) -> Any:
        """Merges the values that ranks have at one path of their trees.

        Joins the shards of a tensor, and merges containers item by item. Steps must agree, unless
        `step_policy` chooses one; of other values, the first rank's is taken. Raises
        UnsupportedCheckpoint (different numbers of param groups) and InconsistentCheckpoint (ranks
        contradict each other).
        """
        values = list(by_rank.values())
        kinds = {type(value) for value in values}
        if any(is_distributed(value) for value in values):
            return self._assemble(by_rank, path)
        if kinds <= {dict, OrderedDict}:
            merged = type(values[0])()
            for key in dict.fromkeys(key for value in values for key in value):
                having = {rank: value[key] for rank, value in by_rank.items() if key in value}
                merged[key] = self.of(having, (*path, key))
            return merged
        if (
            path[-3:-2] == ("param_groups",)
            and path[-1] in MEMBERS
            and _are_different_names(values)
        ):
            return list(dict.fromkeys(name for value in values for name in value))
        is_sequence = len(kinds) == 1 and isinstance(values[0], (list, tuple))
        if is_sequence and len(set(map(len, values))) == 1:
            return type(values[0])(
                self.of({rank: value[place] for rank, value in by_rank.items()}, (*path, place))
                for place in range(len(values[0]))
            )
        if is_sequence and path and path[-1] == "param_groups":
            raise UnsupportedCheckpoint(
                "state-unsupported",
                f"{self.files[min(by_rank)].path} has {len(values[0])} parameter groups, but other "
                "ranks have more or fewer",
                hint="save with torch.distributed.checkpoint, which joins the ranks' groups",
            )
        return (
            self._step(by_rank, path)
            if leads_to_step(path)
            else self._first_rank_value(by_rank, path)
        )

    def _first_rank_value(self, by_rank: dict[int, Any], path: TreePath) -> Any:
        """Returns the first rank's value at a path; adds a difference between ranks to `different`.

        Raises InconsistentCheckpoint if a scheduler's state differs and `--step-policy` is not
        given.
        """
        first, *other_ranks = by_rank
        value = leaves(self.files[first], by_rank[first])
        if {type(each) for each in by_rank.values()} == {Tensor}:
            value = replace(value, sharded=False)
            self.copies.append((value, [(self.files[rank], by_rank[rank]) for rank in other_ranks]))
        first_text = cache(partial(text, by_rank[first], self.files[first]))
        equal = [self._are_equal(by_rank, first, rank, first_text) for rank in other_ranks]
        self.uncompared += None in equal
        if wrong := [rank for rank, same in zip(other_ranks, equal, strict=True) if same is False]:
            shapes = {rank: getattr(by_rank[rank], "shape", None) for rank in by_rank}
            other = next((rank for rank in wrong if shapes[rank] != shapes[first]), wrong[0])
            if self.step_policy is None and any(map(_is_scheduler, path)):
                self._refuse_schedulers(by_rank, first, other, path)
            self.different.append(self._difference(path, by_rank, first, other))
            for rank in () if self.by_checksums else other_ranks:
                file = self.files[rank]
                summaries = self.of_ranks.setdefault(os.path.basename(file.path), {})
                summaries[dotted(path)] = file.summary(by_rank[rank])
        return value

    def _refuse_schedulers(
        self, by_rank: Mapping[int, Any], first: int, other: int, path: TreePath
    ) -> NoReturn:
        """Raises InconsistentCheckpoint for a scheduler whose state differs between two ranks.

        A scheduler counts the optimizer's steps, so it must be equal on all ranks.
        """
        values = [
            f"{brief(text(by_rank[rank], self.files[rank]))} in {self.files[rank].path}"
            for rank in (first, other)
        ]
        raise InconsistentCheckpoint(
            "mixed-saves",
            f"ranks disagree on {dotted(path)}: {' and '.join(values)}",
            hint="files of several saves are mixed: copy the files of all ranks from one save",
        )

    def _difference(
        self, path: TreePath, by_rank: Mapping[int, Any], first: int, other: int
    ) -> Difference:
        a, b = by_rank[first], by_rank[other]
        shapes = (a.shape, b.shape) if isinstance(a, Tensor) and isinstance(b, Tensor) else None
        return Difference(path, (self.files[first].path, self.files[other].path), shapes)

    def _are_equal(
        self, by_rank: Mapping[int, Any], first: int, other: int, first_text: Callable[[], str]
    ) -> bool | None:
        """Whether two ranks have the same value; None if only reading the tensors would show it."""
        a, b = by_rank[first], by_rank[other]
        files = self.files[first], self.files[other]
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if (a.dtype, a.shape) != (b.dtype, b.shape):
                return False
            stored = files[0].crc(a)
            if stored[1] is not None and (stored, _place_in_storage(a)) == (
                files[1].crc(b),
                _place_in_storage(b),
            ):
                return True
            if self.by_checksums and not (_states_crc(files[0], a) and _states_crc(files[1], b)):
                return None
        return first_text() == text(b, files[1])

    def _step(self, by_rank: dict[int, Any], path: TreePath) -> Any:
        """The step that all ranks state or, if they disagree, that the step policy chooses.

        Raises InconsistentCheckpoint if ranks disagree and there is no step policy.
        """
        first = min(by_rank)
        numbers = {
            rank: self.files[rank].number(value)
            for rank, value in by_rank.items()
            if not (isinstance(value, Tensor) and value.numel != 1)
        }
        steps_of_files = [
            (f"{self.files[rank].path}: {dotted(path)}", step)
            for rank, number in numbers.items()
            if (step := steps.step_of(number)) is not None
        ]
        agreed = agreement.agree(steps_of_files, self.step_policy)
        paths = tuple(self.files[rank].path for rank in numbers)
        self.steps.append(StepStatement(path, paths, agreed))
        if agreed is None or {step for _, step in steps_of_files} == {agreed}:
            return self._first_rank_value(by_rank, path)
        if not isinstance(by_rank[first], Tensor):
            return agreed
        whole = leaf(self.files[first], by_rank[first])
        number = Scalar(agreed, whole.dtype)
        return replace(whole, number=lambda: number)

    def _assemble(self, by_rank: dict[int, Any], path: TreePath) -> Leaf:
        """Joins all ranks' shards of a tensor into one `Leaf`.

        Raises InconsistentCheckpoint (ranks contradict each other) and IncompleteCheckpoint
        (elements are missing).
        """
        name = dotted(path)
        for rank, value in by_rank.items():
            if not is_distributed(value):
                raise InconsistentCheckpoint(
                    "ranks-disagree",
                    f"{self.files[rank].path} has the full tensor {name}, but other ranks have "
                    "shards of it",
                    file=self.files[rank].path,
                    subject=name,
                )
        tensors = {
            rank: read_distributed(value, rank, self.files[rank], self.meshes)
            for rank, value in by_rank.items()
        }
        first = tensors[min(tensors)]
        for rank, other in tensors.items():
            if (other.dtype, other.shape, other.world) != (first.dtype, first.shape, first.world):
                raise InconsistentCheckpoint(
                    "ranks-disagree",
                    f"ranks disagree on {name}: {other.dtype} {list(other.shape)} over "
                    f"{other.world} ranks in {self.files[rank].path}, {first.dtype} "
                    f"{list(first.shape)} over {first.world} ranks in "
                    f"{self.files[min(tensors)].path}",
                    file=self.files[rank].path,
                    subject=name,
                )
        parts: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, LocalPart]] = {}
        for rank, tensor in tensors.items():
            for part in tensor.parts:
                first_rank, first_part = parts.setdefault((part.offsets, part.sizes), (rank, part))
                if first_part is not part and not self._are_copies(
                    first_rank, first_part, rank, part
                ):
                    raise InconsistentCheckpoint(
                        "copies-differ",
                        f"{name}: {first_part.file.path} and {part.file.path} hold different "
                        "values of the same elements",
                        file=first_part.file.path,
                        subject=name,
                    )
        return joined(name, first, [part for _, part in parts.values()])

    def _are_copies(self, first: int, a: LocalPart, other: int, b: LocalPart) -> bool:
        tensors = {first: a.tensor, other: b.tensor}
        equal = self._are_equal(tensors, first, other, partial(text, a.tensor, a.file))
        self.uncompared += equal is None
        return equal is not False


def _states_crc(file: TorchFile, tensor: Tensor) -> bool:
    """Whether a file states a CRC-32 of exactly this tensor's elements."""
    length, crc = file.crc(tensor)
    is_whole = tensor.contiguous and length == tensor.numel * SIZES[tensor.dtype]
    return crc is not None and is_whole


def _place_in_storage(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.storage.start, tensor.offset, tensor.strides


def _is_scheduler(key: Any) -> bool:
    return isinstance(key, str) and SCHEDULER.fullmatch(key) is not None


def _are_different_names(values: Sequence[Any]) -> bool:
    are_names = all(isinstance(value, list) and types_in(value) <= {str} for value in values)
    return are_names and any(value != values[0] for value in values)


def joined(name: str, whole: DistributedTensor, parts: Sequence[LocalPart]) -> Leaf:
    """Joins a tensor's shards into one `Leaf`: its type, shape and byte ranges in files.

    `whole` has the full tensor's type and shape, as one rank's file states them. `parts` are the
    shards of all ranks: each element must be in exactly one.
    """
    pieces = [piece_of(part.file, part.tensor, part.offsets) for part in parts]

    def number() -> Scalar:
        return parts[0].file.scalar(parts[0].tensor)

    fragments = assembled(name, whole.dtype, whole.shape, pieces)
    views = [(part.offsets, part.tensor, part.file) for part in parts]
    twin = partial(twin_of, whole.dtype, whole.shape, views)
    shapes = frozenset(part.sizes for part in parts)
    return Leaf(
        whole.dtype, whole.shape, fragments, number, memory_of(views), twin, True, parts=shapes
    )


def text(value: Any, file: TorchFile) -> str:
    """Describes a value by a text for comparisons: equal values have equal texts.

    A tensor is represented by its checksum.
    """
    return repr(file.summary(value))
