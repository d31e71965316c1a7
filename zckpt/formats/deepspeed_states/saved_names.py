"""Does every file of a directory state the rank that its name says?

All numbers in a name count: of the data rank, the model rank, a layer, an expert. Earlier versions
of zckpt saved several files under one name:

    stage 3               optimizer files            archive, which is no name
                          model files                rank 1's from rank 2 on
    several model ranks   all but files of layers    mp_rank_00

If all files of a directory have these names, they are not compared, and a note says so. If only
some have them, another program saved them, and one was copied. A whole model rank that was copied
over another has these names too: the bytes show it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from ...core.filenames import numbers_of
from ...core.saved_names import Place, SavedName, nameless, refuse_others, saved_names
from ...errors import InconsistentCheckpoint
from ...files.torchfile import TorchFile
from .directories import EXPERT, LAYER, MODEL, MODEL_3, OF_EP, OPTIMIZER

KINDS = (MODEL, MODEL_3, OPTIMIZER, EXPERT, OF_EP, LAYER)


def check_names(files: Iterable[TorchFile]) -> list[str]:
    """Notes on files whose names prove nothing; `files` are all of a directory.

    Raises InconsistentCheckpoint if the file of one rank was saved as that of another one.
    """
    opened = {file.path: file for file in files}
    names = saved_names({path: file.saved_as for path, file in opened.items()}, place_of)
    others = sum(name.is_other for name in names)
    if not others or not _are_as_before(names):
        refuse_others(names)
        return nameless(names)
    _refuse_copied_ranks(names, opened)
    return [
        f"{others} of {len(names)} rank files were saved under the name of another rank, as "
        "earlier versions of zckpt did: if one of these was swapped or copied, no name shows it "
        "(`zckpt reshard` writes files with names of their own)",
        *nameless(names),
    ]


def place_of(name: str) -> Place | None:
    """The kind of a rank's file, and the numbers in its name; None for any other file."""
    for kind in KINDS:
        if numbers := numbers_of(kind, name):
            # without a second number, a layer is of the only tensor rank
            return kind, (*numbers, 0)[:2] if kind is LAYER else numbers
    return None


def _are_as_before(names: Sequence[SavedName]) -> bool:
    """Whether all files have the names that earlier versions of zckpt gave them."""
    in_stage_3 = any(name.place[0] is MODEL_3 for name in names)
    return all(name.stated in (None, _before(name.place, in_stage_3)) for name in names)


def _before(place: Place, in_stage_3: bool) -> Place | None:
    """The place of the name that earlier versions of zckpt gave the file of a place."""
    kind, numbers = place
    if kind is LAYER:
        return place
    if kind is OPTIMIZER and in_stage_3:
        return None
    if kind is MODEL_3:
        return kind, (min(numbers[0], 1), 0)
    return kind, (*numbers[:-1], 0)


def _refuse_copied_ranks(names: Sequence[SavedName], files: Mapping[str, TorchFile]) -> None:
    """Raises InconsistentCheckpoint if two model ranks have the same optimizer, byte by byte."""
    contents: dict[int, list[object]] = {}
    paths: dict[int, str] = {}
    for name in sorted(names, key=lambda name: name.place[1]):
        (kind, numbers), file = name.place, files[name.path]
        if kind is OPTIMIZER or (kind is MODEL and _has_optimizer(file.value)):
            records = sorted(file.records.items())
            # without a checksum, nothing is known to be equal
            contents.setdefault(numbers[-1], []).append(
                [(key, record.crc or name.path) for key, record in records]
            )
            paths.setdefault(numbers[-1], name.path)
    for one, other in combinations(sorted(contents), 2):
        if contents[one] == contents[other]:
            raise InconsistentCheckpoint(
                f"{paths[other]}: model rank {other} has the optimizer of model rank {one}, byte "
                "by byte",
                hint="the files of one model rank seem to be copied over those of another: copy "
                "all files again",
            )


def _has_optimizer(model: Any) -> bool:
    """Whether a model file has the states of an optimizer, as in stage 0."""
    optimizer = model.get("optimizer") if isinstance(model, dict) else None
    return isinstance(optimizer, dict) and bool(optimizer.get("state", optimizer))
