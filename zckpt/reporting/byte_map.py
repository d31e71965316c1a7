"""The section `map` of a report: which file stores which elements of which tensor."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

from ..core.checkpoint.entries import Entry
from ..core.checkpoint.manifest import slot_key
from ..core.checkpoint.origin import Origin
from ..core.passes.description import Report
from ..core.storage.fragments import boxes_of
from ..core.storage.inventory import Row, State
from ..judging.damaged_source import Found
from ..judging.inventory import of_engine, of_folder

MOST_PIECES, MOST_SUMS = 20_000, 200_000
COLUMNS = ("file", "tensor", "group", "slot", "start", "stop", "offset", "length")
Key = tuple[int | None, int | None, str]
"""The key of a row that sums up many pieces: (number of a file, number of a layer, slot).

A piece is a contiguous byte range of a tensor. A slot is a kind of tensor, such as `exp_avg`.
"""
AXES = ("dp", "mp", "tp", "pp", "ep")
"""The numbers in file names that are coordinates of ranks."""
Piece = tuple[str, int, int, int, int]
"""A file, elements [start, stop) of a tensor, the first byte in the file, the number of bytes."""


def section(checkpoint: Found, problems: Sequence[Report]) -> Report:
    """Makes the section `map`: the files, the byte ranges of tensors in them, and damaged bytes."""
    manifest, entries, places = checkpoint.known, checkpoint.entries, checkpoint.places
    damaged = [line for line in problems if line.get("file") and "offset" in line]
    numbers = {path: number for number, path in enumerate(manifest.files.paths)}
    states = {line["file"]: "damaged" for line in damaged} | checkpoint.lost
    rows = of_engine(manifest)
    sizes = {row.path: row.size for row in rows}
    for path in checkpoint.lost:  # its own size, and not that of the file that stands in for it
        real_path = checkpoint.real(path)
        sizes[path] = os.path.getsize(real_path) if os.path.isfile(real_path) else None
    groups = [places.row(entry.parameter) for entry in entries]
    files = [
        _file(row, manifest.run.origin, states.get(row.path, "ok"), sizes[row.path]) for row in rows
    ]
    if manifest.notices.lost:  # those of the optimizer, which were not read
        known_files = {file["name"] for file in files}
        unread = files_alone(checkpoint)["files"]
        files += [file for file in unread if file["name"] not in known_files and file["rank"]]
    return {
        "files": files,
        "groups": list(places.rows),
        "of_tensor": groups,
        "pieces": _columns(entries, groups, numbers),
        "damaged": [
            {
                "file": numbers.get(line["file"]),
                "offset": line["offset"],
                "length": line["length"],
                "tensor": checkpoint.numbers.get(line["tensor"] or ""),
            }
            for line in damaged
        ],
    }


def files_alone(checkpoint: Found) -> Report:
    """Makes the section `map` for a checkpoint that could not be read: only the files."""
    wrong: dict[str, State] = {
        checkpoint.real(line["file"]): "missing" if line["kind"] == "missing" else "unreadable"
        for line in checkpoint.faults
        if line["file"]
    }
    files = [_file(row, None, row.state, row.size) for row in of_folder(checkpoint.root, wrong)]
    pieces: Report = {key: [] for key in COLUMNS}
    return {"files": files, "groups": [], "of_tensor": [], "pieces": pieces, "damaged": []}


def _file(row: Row, origin: Origin | None, state: str, size: int | None) -> Report:
    state = state if state in ("ok", "missing") else "damaged"
    return {"name": row.name, "bytes": size, "rank": rank_of(origin, row), "state": state}


def rank_of(origin: Origin | None, row: Row) -> Report | None:
    """The rank that wrote a file, from its name, such as `{"dp": 3, "tp": 0}`.

    `row` describes the file. DeepSpeed's number `mp` of a model-parallel rank is split into `pp`
    and `tp` if `origin`, the facts about the writer, has these sizes. None if the name has no rank.
    """
    numbers = {axis: number for axis, number in row.rank if axis in AXES}
    tp, pp = (origin and origin.tp) or 1, (origin and origin.pp) or 1
    if (model := numbers.pop("mp", None)) is not None and tp * pp > 1:
        numbers |= {"tp": model % tp, "pp": model // tp}
    return numbers or None


# -- pieces


def _columns(entries: Sequence[Entry], groups: Sequence[int], files: dict[str, int]) -> Report:
    """Makes a table of the tensors' pieces (contiguous byte ranges in files), as columns.

    If there are too many pieces, all pieces of one file, layer and slot (kind of tensor, such as
    `exp_avg`) become one row.
    """
    rows: list[tuple[Any, ...]] = []
    sums: dict[Key, list[int]] = {}
    is_summed = sum(map(_count, entries)) > MOST_PIECES
    for number, entry in enumerate(entries):
        slot, group = slot_key(entry.slot), groups[number]
        for file, *piece in _pieces(entry) if is_summed else _merged(_pieces(entry)):
            if is_summed:
                _add(sums, (files.get(file), group, slot), *piece)
            else:
                rows.append((files.get(file), number, group, slot, *piece))
    if len(sums) > MOST_SUMS:
        layers, sums = sums, {}
        for (number_of_file, _, slot), piece_sum in layers.items():
            _add(sums, (number_of_file, None, slot), *piece_sum)
    rows += (
        (number_of_file, None, group, slot, *own)
        for (number_of_file, group, slot), own in sums.items()
    )
    columns = dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True)) if rows else {}
    return {key: columns.get(key, []) for key in COLUMNS} | ({"tensor": None} if is_summed else {})


def _add(sums: dict[Key, list[int]], key: Key, start: int, stop: int, at: int, length: int) -> None:
    total = sums.setdefault(key, [0, 0, at, 0])
    total[:] = 0, total[1] + stop - start, min(total[2], at), total[3] + length


def _count(entry: Entry) -> int:
    return len(boxes_of(entry.fragments) or entry.fragments)


def _pieces(entry: Entry) -> Iterator[Piece]:
    """Yields the pieces of a tensor: file, first element, end, byte offset, and length.

    A box (a rectangular slice of the tensor) is one piece, from its first to its last element.
    """
    for box in boxes_of(entry.fragments):
        if length := prod(box.sizes) * box.size:
            yield box.extent.file, box.start, box.stop, box.reach.offset, length
    for fragment in () if boxes_of(entry.fragments) else entry.fragments:
        extent = fragment.extent
        yield extent.file, fragment.start, fragment.stop, extent.offset, extent.length


def _merged(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Joins pieces that are adjacent both in the file and in the tensor."""
    before: Piece | None = None
    for piece in pieces:
        if before is not None:
            file, start, stop, offset, length = before
            if (file, stop, offset + length) == (piece[0], piece[1], piece[3]):
                before = file, start, piece[2], offset, length + piece[4]
                continue
            yield before
        before = piece
    if before is not None:
        yield before
