"""Checks that all ranks state the same facts, and that files belong to the ranks in their names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, zip_longest
from typing import Any

from ...core.grouping import by_key
from ...core.storage import sources
from ...core.storage.fragments import Record
from ...core.storage.inventory import (
    Numbers,
    ParsedName,
    Role,
    SavedName,
    nameless,
    refuse_others,
    saved_names,
)
from ...errors import InconsistentCheckpoint, Notice, brief, note
from ...files.torchfile import Tensor, TorchFile
from .directories import LAYER, MODEL, MODEL_3, OPTIMIZER, ROLES
from .states import COUNTERS, comparable

OF_MODELS = (
    *COUNTERS,
    *("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_version"),
    *("param_shapes", "frozen_param_shapes", "buffer_names", "num_experts"),
)


def check_models(files: Sequence[TorchFile]) -> None:
    """Raises InconsistentCheckpoint unless all model files state the same sizes and counters."""
    values = [file.value for file in files]
    check_facts(files, values, lambda model: {key: model.get(key) for key in OF_MODELS})


def check_facts(
    files: Sequence[TorchFile],
    states: Sequence[dict[str, Any]],
    facts: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    """Raises InconsistentCheckpoint unless all files state the same facts as the first file.

    `states` has each file's content. `facts` maps such a content to the values that must be equal.
    """
    values = for_each(states, facts)
    _check_tensors(files, values)
    for file, value in zip(files, values, strict=True):
        if (difference := _difference(value, values[0])) is not None:
            fact, value_in_file, first = difference
            raise InconsistentCheckpoint(
                "ranks-disagree",
                f"{file.path} states {fact} {brief(value_in_file)}, but "
                f"{os.path.basename(files[0].path)} states {brief(first)}",
                file=file.path,
            )


def _check_tensors(files: Sequence[TorchFile], values: Sequence[dict[str, Any]]) -> None:
    """Raises InconsistentCheckpoint if tensors that must be equal in all files differ in bytes.

    `values` has each file's content that must be equal, by key. Even if two files have equal
    pickles, the bytes of their tensors can differ.
    """
    for key, first in values[0].items():
        if not any(_tensors(first)):
            continue
        for file, value in zip(files[1:], values[1:], strict=True):
            one, other = files[0].summary(first), file.summary(value.get(key))
            if comparable(first) == comparable(value.get(key)) and one != other:
                named = os.path.basename(files[0].path)
                raise InconsistentCheckpoint(
                    "ranks-disagree",
                    f"{file.path} has other tensors in {key} than {named}",
                    file=file.path,
                )


def _tensors(value: Any) -> Iterator[bool]:
    if isinstance(value, Tensor):
        yield True
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def for_each(states: Sequence[dict[str, Any]], of: Callable[[dict[str, Any]], Any]) -> list[Any]:
    """Applies `of` to each state, but only once to an object that several files share."""
    values: dict[int, Any] = {}
    for state in states:
        if id(state) not in values:
            values[id(state)] = of(state)
    return [values[id(state)] for state in states]


def _difference(value: Any, first: Any, fact: str = "") -> tuple[str, Any, Any] | None:
    """The first value that differs: (its path, value, first value); None if the values are equal.

    A path is like "groups[0].lr". `fact` is the path at which the comparison begins.
    """
    if value is first or value == first:
        return None
    pairs: list[tuple[str, Any, Any]] = []
    if isinstance(value, dict) and isinstance(first, dict):
        pairs = [(f"{fact}.{key}", value.get(key), first.get(key)) for key in {**first, **value}]
    elif isinstance(value, list) and isinstance(first, list):
        pairs = [(f"{fact}[{n}]", *both) for n, both in enumerate(zip_longest(value, first))]
    for inside, a, b in pairs:
        if (difference := _difference(a, b, inside.removeprefix("."))) is not None:
            return difference
    # tensors and objects of two pickles, or dictionaries in another order
    return None if comparable(value) == comparable(first) else (fact, value, first)


# -- whether every file belongs to the rank in its name


def check_names(files: Iterable[TorchFile]) -> list[Notice]:
    """Checks that every file was saved under its present name; returns notes on what is unknown.

    `files` are of one directory. Raises InconsistentCheckpoint for a swapped or copied file. Files
    of earlier zckpt versions may contain names of other ranks' files. For these, it only checks
    that no two model ranks have the same optimizer.
    """
    opened = {file.path: file for file in files}
    # torch.save stores a file's name in the file; earlier versions of zckpt stored one name in the
    # files of several ranks
    names = saved_names(ROLES, {path: file.saved_as for path, file in opened.items()})
    other_count = sum(name.is_other for name in names)
    if not other_count or not _are_named_by_earlier_versions(names):
        refuse_others(names)
        return nameless(names)
    _refuse_copied_ranks(names, opened)
    message = (
        f"{other_count} of {len(names)} rank files contain the name of another rank's file, as "
        "files of earlier versions of zckpt do: the names cannot show whether files were swapped "
        "or copied (`zckpt reshard` stores the right name in every file)"
    )
    return [note("saved-name-unknown", message), *nameless(names)]


def _are_named_by_earlier_versions(names: Sequence[SavedName]) -> bool:
    """Whether the files contain exactly the names that earlier versions of zckpt stored in them.

    These versions stored one name in several ranks' files, so names do not show swapped files.
    """
    in_stage_3 = any(name.parsed_name.role is MODEL_3 for name in names)
    return all(
        name.saved_name is None
        or _place(name.saved_name)
        == _named_by_earlier_versions(*_place(name.parsed_name), in_stage_3)
        for name in names
    )


def _place(name: ParsedName) -> tuple[Role, Numbers]:
    return name.role, name.numbers


def _named_by_earlier_versions(
    role: Role, numbers: Numbers, in_stage_3: bool
) -> tuple[Role, Numbers] | None:
    """The role and numbers in the name that earlier versions of zckpt stored in a file.

    `role` and `numbers` are those in the file's name on disk. None if the stored name was
    `archive`, which states no role and no rank.
    """
    if role is LAYER:
        return role, numbers
    if role is OPTIMIZER and in_stage_3:
        return None
    if role is MODEL_3:  # from rank 2 on, the name of rank 1's file
        return role, (min(numbers[0], 1), 0)
    return role, (*numbers[:-1], 0)  # the name of model rank 0's file


def _refuse_copied_ranks(names: Sequence[SavedName], files: Mapping[str, TorchFile]) -> None:
    """Raises InconsistentCheckpoint if the optimizers of two model ranks have the same bytes.

    One rank's files must have been copied over the other's.
    """
    optimizers = by_key(
        (name.parsed_name.numbers[-1], files[name.row.path])
        for name in sorted(names, key=lambda name: name.parsed_name.numbers)
        if name.parsed_name.role is OPTIMIZER
        or (name.parsed_name.role is MODEL and _has_optimizer(files[name.row.path].value))
    )
    contents = {  # files without a checksum never count as equal
        number: [
            [(k, _crc(file, r) or file.path) for k, r in sorted(file.records.items())]
            for file in files_of_rank
        ]
        for number, files_of_rank in optimizers.items()
    }
    for one, other in combinations(sorted(contents), 2):
        if contents[one] == contents[other]:
            path = optimizers[other][0].path
            raise InconsistentCheckpoint(
                "file-copied-over",
                f"{path}: model rank {other} has the optimizer of model rank {one}, byte by byte",
                hint="the files of one model rank seem to be copied over those of another: copy "
                "all files again",
                file=path,
            )


def _crc(file: TorchFile, record: Record) -> int | None:
    return None if sources.is_stand_in(file.path) else record.crc


def _has_optimizer(model: Any) -> bool:
    optimizer = model.get("optimizer") if isinstance(model, dict) else None
    return isinstance(optimizer, dict) and bool(optimizer.get("state", optimizer))
