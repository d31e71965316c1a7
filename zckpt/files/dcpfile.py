"""Reads the `.metadata` of torch.distributed.checkpoint, which says where items lie.

    <dir>/.metadata      one pickle, written last: the shape, chunks and location of every item
    <dir>/__R.metadata   instead of `.metadata`: one per rank with that rank's items, if ranks saved
                         without collectives (use_collectives=False)
    <dir>/__R_K.distcp   items in sequence, each a complete file of torch.save; or values stored
                         that way, followed by all tensors as one safetensors file

An item is a tensor or any other value under a key. A tensor is saved in boxes (torch calls them
chunks): a rank's local shard is one box. The fields are those of torch 2.1 to 2.13; only their
classes moved. torch reads `.metadata` with plain pickle. This module imports no class that a pickle
names, and does not interpret keys.

`.metadata` has no checksum, but it states most things twice: the keys of items and the paths that
lead to them, the boxes of tensors and their locations in files. One changed bit in a key would
otherwise turn a moment of the optimizer into a value that nobody reads. So these statements are
compared. zckpt writes a CRC-32 after the pickle. torch (2.13) reads only to the end of the pickle,
so it loads such a file like any other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from operator import add, gt
from typing import Any

from msgspec.structs import replace

from ..core.checkpoint.inert import Foreign, Global, types_in
from ..core.passes.resources import free_memory
from ..core.storage import sources
from ..core.storage.checksum import crc32
from ..core.storage.filenames import path_inside
from ..core.storage.inventory import gaps, parse_name, refuse_gaps, role
from ..errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    UnsupportedCheckpoint,
    listed,
    safe,
    sized,
)
from .dcprows import Rows, Run, Unusual
from .dcptable import (
    METADATA,
    BoxColumns,
    EnteredPlaces,
    ItemBox,
    ItemKey,
    ItemLocation,
    Items,
    ItemTable,
    KeyPath,
    Places,
    Shapes,
    TensorItem,
)
from .unpickle import Unpickler

ITEMS = ".distcp"
MEMORY = 3  # bytes of memory for each byte of metadata; a box has about 130 bytes, and takes 300
AT_ONCE = 1 << 20  # bytes
SEAL = re.compile(rb"\nzckpt-crc32 ([0-9a-f]{8})\n\Z")
OF_RANK = role("metadata", r"__(\d+)\.metadata", "dp")
VERSION = "1.0.0"  # of the metadata, torch 2.13
FIELDS = {"state_dict_metadata", "planner_data", "storage_data"}  # of every version of torch
MAX_AXES = 64  # of a torch.Tensor
MAX_NUMBER = 1 << 60  # elements or bytes
MAX_PATH = 100  # keys that lead to one item
MAX_TEXT = 4096  # characters of a key or a file's name

# -- the pickle


def names_any(folder: str, texts: Sequence[bytes]) -> bool:
    """Whether one of these texts occurs in the `.metadata` of a folder, as a part of a key.

    The file is not unpickled, since keys are plain text in its bytes. False if the file is missing,
    or too large to be read.
    """
    path = os.path.join(folder, METADATA)
    if not sources.is_file(path) or sources.size(path) > most_metadata():
        return False
    rest, longest = b"", max(map(len, texts))
    with sources.opened(path) as file:
        while block := file.read(AT_ONCE):
            rest += block
            if any(text in rest for text in texts):
                return True
            rest = rest[-longest:]
    return False


def most_metadata() -> int:
    """The size in bytes of the largest `.metadata` for which this machine has memory."""
    return free_memory() // MEMORY


def sealed(text: bytes) -> bytes:
    """The bytes of a pickle, followed by the pickle's CRC-32."""
    return text + b"\nzckpt-crc32 %08x\n" % crc32(text)


def check_seal(text: bytes) -> None:
    """Raises CorruptCheckpoint if a CRC-32 follows the pickle and is wrong; torch writes none."""
    match = SEAL.search(text, max(0, len(text) - 32))
    if match and crc32(text[: match.start()]) != int(match[1], 16):
        raise CorruptCheckpoint(
            "record-damaged", "its bytes do not match the CRC-32 stored after them"
        )


def read_table(folder: str, is_laid: bool = False) -> ItemTable:
    """Reads the metadata of a folder: one `.metadata`, or those of all ranks combined.

    `is_laid` means that zckpt has just written the folder: its metadata is trusted. Raises as
    `need_agreement`; also CorruptCheckpoint (malformed metadata), IncompleteCheckpoint (missing
    metadata), UnsupportedCheckpoint (compressed or encrypted items, more metadata than memory).
    """
    with os.scandir(folder) as entries:
        files = sorted(entry.path for entry in entries if entry.name.endswith(METADATA))
    name = os.path.join(folder, METADATA)
    if sources.is_file(name):
        table = _read_one(folder, tuple(files), name, is_laid)
        if not is_laid:
            need_agreement(table, name)
        return table
    ranks = {
        own.numbers: path for path in files if (own := parse_name((OF_RANK,), path)) is not None
    }
    if not ranks:
        raise IncompleteCheckpoint(
            "unfinished-save",
            f"{folder} has item files but no {METADATA}, which is written last",
            hint="the save did not finish; take an earlier checkpoint",
            file=folder,
        )
    refuse_gaps(folder, gaps(OF_RANK, ranks, zip(range(max(ranks)[0]))))
    table = _combined([_read_one(folder, tuple(files), ranks[rank]) for rank in sorted(ranks)])
    need_agreement(table, os.path.join(folder, f"__*{METADATA}"))
    return table


def _read_one(folder: str, files: tuple[str, ...], name: str, is_laid: bool = False) -> ItemTable:
    try:
        return _table(folder, files, *_unpickled(name, is_laid))
    except (CorruptCheckpoint, UnsupportedCheckpoint) as error:
        if error.file is not None:
            raise
        raise error.again(message=f"{name}: {error.message}", file=name) from error
    except RecursionError as error:
        raise CorruptCheckpoint(
            "file-damaged", f"{name}: its values are nested too deeply"
        ) from error


def _unpickled(name: str, is_laid: bool) -> tuple[Any, Rows]:
    """Unpickles a metadata file; returns its value, and its frequent objects as columns."""
    with sources.opened(name) as file:
        size = os.fstat(file.fileno()).st_size
        if size > (most := most_metadata()):
            raise UnsupportedCheckpoint(
                "file-too-large",
                f"{name} has {size} bytes, but there is only memory for {most}",
                hint=f"zckpt needs {sized(MEMORY * size)} of free memory for it",
            )
        text = file.read()
    check_seal(text)
    rows = Rows(text)
    try:
        content = Unpickler(text, rows=rows, is_trusted=is_laid).load()
    except Unusual:
        content = Unpickler(text).load()
    rows.forget_numbers()
    return content, rows


def _table(folder: str, files: tuple[str, ...], content: Any, rows: Rows) -> ItemTable:
    fields = dict(attributes(content))
    if missing := FIELDS - fields.keys():
        raise CorruptCheckpoint(
            "file-damaged",
            f"it is not metadata of torch.distributed.checkpoint: no {listed(sorted(missing))}",
        )
    described, stored = fields.pop("state_dict_metadata"), fields.pop("storage_data")
    if not isinstance(described, dict) or not isinstance(stored, dict):
        raise CorruptCheckpoint("file-damaged", "its items or their locations are not a dictionary")
    columns = _Columns(rows)
    locations = columns.locations(folder, stored)
    # every box is stored, so a list that many tensors share cannot be long
    room = len(locations) + MAX_AXES
    items: Items = {}
    known_items: dict[int, TensorItem | None] = {}  # equal tensors may have one record
    for key, record in described.items():
        item = known_items.get(id(record))
        if item is None:
            item = known_items[id(record)] = _item(key, record, room, columns)
        items[_text(key, "a key")] = item
        if (room := room - len(_boxes(item))) < 0:
            raise _too_many_boxes(key)
    return ItemTable(folder, files, items, locations, fields, _paths(fields["planner_data"], items))


def _combined(tables: list[ItemTable]) -> ItemTable:
    """Combines the tables of all ranks into one.

    If several ranks have saved one item, or one part (box) of a tensor, the first rank's location
    is used. Further locations go to `copies`.
    """
    first = tables[0]
    items, locations = dict(first.items), dict[ItemKey, ItemLocation](first.locations)
    copies: dict[ItemKey, list[ItemLocation]] = {}
    paths = {**first.paths}
    known_boxes = {(key, box.offsets) for key, item in items.items() for box in _boxes(item)}
    for table in tables[1:]:
        for place, location in table.locations.items():
            if locations.setdefault(place, location) is not location:
                copies.setdefault(place, []).append(location)
        for key, item in table.items.items():
            if key not in items:
                items[key] = item
                known_boxes |= {(key, box.offsets) for box in _boxes(item)}
                continue
            for box in _boxes(item):
                if (key, box.offsets) not in known_boxes:
                    items[key] = _with_box(items[key], box)
                    known_boxes.add((key, box.offsets))
        paths = {**table.paths, **paths}
    return replace(first, items=items, locations=Places.of(locations), paths=paths, copies=copies)


def _boxes(item: TensorItem | None) -> Sequence[ItemBox]:
    return () if item is None else item.boxes


def _with_box(item: TensorItem | None, box: ItemBox) -> TensorItem:
    if item is None:
        raise CorruptCheckpoint(
            "file-damaged", f"{METADATA} is malformed: ranks disagree on what is a tensor"
        )
    return replace(item, boxes=(*item.boxes, box))


def _item(key: str, record: Any, most: int, columns: _Columns) -> TensorItem | None:
    """Reads the description of a tensor, and adds its boxes (chunks) to `columns`.

    None if the item is not a tensor. `most` is the largest number of boxes that the tensor can
    have. Raises CorruptCheckpoint.
    """
    fields = attributes(record)
    if not fields:  # BytesStorageMetadata
        return None
    if not {"properties", "size", "chunks"} <= fields.keys():
        raise CorruptCheckpoint(
            "file-damaged",
            f"the description of the tensor {safe(key)} lacks its properties, size or chunks",
        )
    # TensorProperties pickles a tuple; the dtype is its first element
    properties = fields["properties"]
    properties = properties.state if isinstance(properties, Foreign) else None
    if isinstance(properties, dict):
        properties = (properties.get("dtype"),)
    dtype = properties[0] if isinstance(properties, tuple) and properties else None
    if not isinstance(dtype, Global):
        raise CorruptCheckpoint(
            "file-damaged", f"{safe(key)} has a {type(dtype).__name__} instead of a dtype"
        )
    chunks = fields["chunks"]
    if not isinstance(chunks, (list, tuple)) or sum(map(_count, chunks)) > most:
        raise _too_many_boxes(key)
    boxes = columns.boxes_of(key, chunks)
    size = _numbers(fields["size"], key)
    if prod(size) >= MAX_NUMBER:
        raise CorruptCheckpoint(
            "file-damaged", f"{safe(key)} has an impossible size: {prod(size)} elements"
        )
    return TensorItem(dtype.name.removeprefix("torch."), size, boxes)


def _too_many_boxes(key: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        "file-damaged", f"the chunks of {safe(key)} are not a list, or outnumber the stored items"
    )


def _count(chunk: Any) -> int:
    return chunk.stop - chunk.start if type(chunk) is Run else 1


class _Columns:
    """Makes the columns of an `ItemTable` from a pickle: parts (boxes) of tensors, and locations.

    The unpickler keeps parts and locations of the usual form in `rows`; all others are objects.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.shapes = Shapes()
        self.boxes = BoxColumns(self.shapes)
        # by the number of a shape in the rows: its number in the columns
        self._numbers: dict[int, int] = {}

    def _number(self, of_rows: int, key: str) -> int:
        """Converts an index in `rows.shapes` to the index of the same shape in `shapes`."""
        number = self._numbers.get(of_rows)
        if number is None:
            number = self.shapes.number(_numbers(self.rows.shapes[of_rows], key))
            self._numbers[of_rows] = number
        return number

    def boxes_of(self, key: str, chunks: Sequence[Any]) -> Sequence[ItemBox]:
        """Adds the parts (boxes) of a tensor to the columns, and returns them.

        `chunks` are the parts as pickled: objects, or a `Run` for a range of parts in `self.rows`.
        """
        boxes, start = self.boxes, len(self.boxes.sizes)
        for chunk in chunks:
            if type(chunk) is Run:
                for offsets, sizes in self.rows.boxes(chunk):
                    boxes.offsets.append(self._number(offsets, key))
                    boxes.sizes.append(self._number(sizes, key))
            else:
                box = attributes(chunk)
                boxes.offsets.append(self.shapes.number(_numbers(box.get("offsets"), key)))
                boxes.sizes.append(self.shapes.number(_numbers(box.get("sizes"), key)))
        return boxes.since(start)

    def locations(self, folder: str, storage: Mapping[Any, Any]) -> Places:
        """Adds the location of every item to the columns; returns all locations, sorted."""
        places = EnteredPlaces(self.shapes)
        paths: dict[str, str] = {}  # paths of files, by their names in the metadata
        for key, offsets, name, offset, length in self._stated(storage):
            if name not in paths:
                if not name.isprintable():
                    raise CorruptCheckpoint("file-damaged", f"not a file name: {name!r}")
                paths[name] = path_inside(folder, name, METADATA)
            places.enter(key, offsets, paths[name], offset, length)
        return places.in_order()

    def _stated(self, storage: Mapping[Any, Any]) -> Iterator[tuple[str, int, str, int, int]]:
        """Yields, for each item: key, index of its offsets, file, first byte and length in bytes.

        The offsets tell where a part (box) of a tensor begins; the index is that in `self.shapes`.
        It is -1 if the item is no such part.
        """
        for index, info in storage.items():
            if type(index) is Run:
                for key, number, name, offset, length in self.rows.places(index):
                    if not 0 < len(key) <= MAX_TEXT or not 0 < len(name) <= MAX_TEXT:
                        _text(key, "a key")
                        _text(name, "the name of a file")
                    if not (0 <= offset < MAX_NUMBER and 0 <= length < MAX_NUMBER):
                        _numbers((offset, length), key)
                    shape_number = self._number(number, key) if number >= 0 else -1
                    yield key, shape_number, name, offset, length
                continue
            item, stored = attributes(index), attributes(info)
            key, offsets = _text(item.get("fqn"), "a key"), item.get("offset")
            if stored.get("transform_descriptors"):
                raise UnsupportedCheckpoint(
                    "storage-unsupported",
                    f"{safe(key)} is stored compressed or encrypted: "
                    f"{_texts(stored['transform_descriptors'])}",
                )
            name = _text(stored.get("relative_path"), "the name of a file")
            offset, length = _numbers((stored.get("offset"), stored.get("length")), key)
            shape_number = -1 if offsets is None else self.shapes.number(_numbers(offsets, key))
            yield key, shape_number, name, offset, length


def _paths(planner_data: Any, items: Items) -> dict[str, KeyPath]:
    """Maps every key to its path in the program's state dict.

    Empty if the writer kept no paths, or wrote something else into `planner_data`.
    """
    if not isinstance(planner_data, dict) or planner_data.keys().isdisjoint(items):
        return {}
    return {_text(key, "a key"): _path(key, path) for key, path in planner_data.items()}


def _path(key: str, path: Any) -> KeyPath:
    is_list = isinstance(path, (tuple, list)) and 0 < len(path) <= MAX_PATH
    kinds = types_in(path) if is_list else set()
    numbers = [step for step in path if type(step) is int] if int in kinds else ()
    if not kinds or not kinds <= {str, int} or not all(0 <= each < MAX_NUMBER for each in numbers):
        raise CorruptCheckpoint(
            "file-damaged", f"the path of {safe(key)} is not a list of up to {MAX_PATH} keys"
        )
    texts = [*map(str, path)] if numbers else path
    # first compare lengths, since many paths may refer to one long text
    if len(path) - 1 + sum(map(len, texts)) != len(key) or ".".join(texts) != key:
        raise CorruptCheckpoint(
            "file-damaged", f"the state dict path of {safe(key)} is that of another item"
        )
    return tuple(path)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT:
        raise CorruptCheckpoint(
            "file-damaged", f"{what} is not a text of up to {MAX_TEXT} characters"
        )
    return value


def _numbers(values: Any, key: str) -> tuple[int, ...]:
    """Returns sizes, offsets or lengths as a tuple; raises CorruptCheckpoint for wrong ones."""
    if isinstance(values, (tuple, list)) and len(values) <= MAX_AXES:
        for value in values:
            if type(value) is not int or not 0 <= value < MAX_NUMBER:
                break
        else:
            return tuple(values)
    raise CorruptCheckpoint(
        "file-damaged",
        f"the sizes or offsets of {safe(key)} are not numbers that a tensor can have",
    )


def _texts(values: Any) -> str:
    """Lists texts for a message; for a value of any other type, returns the name of the type."""
    if isinstance(values, (list, tuple)):
        return listed([str(value)[:80] for value in values[:9] if isinstance(value, str)])
    return type(values).__name__


def attributes(record: Any) -> dict[str, Any]:
    """The attributes of a pickled dataclass; raises CorruptCheckpoint for any other value."""
    state = record.state if isinstance(record, Foreign) else record
    if state is None:  # BytesStorageMetadata has none
        return {}
    if not isinstance(record, Foreign) or not isinstance(state, dict):
        raise CorruptCheckpoint("file-damaged", "a description of an item is malformed")
    return state


# statements that are made twice


def need_agreement(table: ItemTable, name: str) -> None:
    """Raises an error about the file `name` if parts of its table contradict each other.

    CorruptCheckpoint         an item has no path or no description, or a box (chunk) has another
                              number of axes than its tensor
    IncompleteCheckpoint      an item has no location
    InconsistentCheckpoint    a box lies outside of its tensor, or items share bytes
    """
    if table.paths:  # a path without an item is no error: torch before 2.4 wrote some
        pathless = [key for key in table.items if key not in table.paths]
        if pathless:
            raise CorruptCheckpoint(
                "file-damaged", f"{name}: no state dict path is stated for {_all_shown(pathless)}"
            )
    described, checked = bytearray(len(table.locations)), set[int]()
    for key, item in table.items.items():
        if item is None:
            described[table.row(key, None)] = True
            continue
        if id(item) not in checked:  # equal tensors may have one description
            _check_boxes(key, item, name)
            checked.add(id(item))
        for row in _places_of(table, key, item):
            described[row] = True
    if not all(described):
        rows = [row for row, is_known in enumerate(described) if not is_known]
        unlisted_files = dict.fromkeys(key for key, _ in table.locations.named(rows))
        raise CorruptCheckpoint(
            "file-damaged",
            f"{name} states where the data of {_all_shown([*unlisted_files])} lie, "
            "but does not describe all of these data",
        )
    _need_separate(table, name)


def _check_boxes(key: str, item: TensorItem, name: str) -> None:
    """Raises an error if a part (box) of a tensor does not fit into the tensor.

    CorruptCheckpoint for another number of axes; InconsistentCheckpoint for a part that exceeds
    the tensor's shape.
    """
    for box in item.boxes:
        if len(box.offsets) != len(item.shape) or len(box.sizes) != len(item.shape):
            raise CorruptCheckpoint(
                "file-damaged",
                f"{name}: a chunk of {_all_shown([key])} has another number of axes than the "
                f"tensor, whose shape is {list(item.shape)}",
            )
        ends = map(add, box.offsets, box.sizes)
        if not box.is_empty and any(map(gt, ends, item.shape)):
            raise InconsistentCheckpoint(
                "file-damaged",
                f"{name}: a chunk of {_all_shown([key])} of shape {list(box.sizes)} at "
                f"{list(box.offsets)} exceeds the tensor's shape {list(item.shape)}",
            )


def _places_of(table: ItemTable, key: str, item: TensorItem) -> Iterator[int]:
    """Yields the row of `table.locations` for each part (box) of a tensor.

    Raises IncompleteCheckpoint if a part has no location; an empty part needs none.
    """
    for box in item.boxes:
        if not box.is_empty:
            yield table.row(key, box.offsets)
        else:  # several ranks may have an empty box
            row = table.locations.row(key, box.offsets)
            if row is not None:
                yield row


def _all_shown(keys: list[str]) -> str:
    """Lists the first four keys in one line."""
    return listed([*map(safe, keys)], 4)


def _need_separate(table: ItemTable, name: str) -> None:
    """Raises InconsistentCheckpoint if items share bytes, except tensors of one safetensors file.

    `.metadata` gives the tensors of a safetensors file one location, that of the complete file
    (torch 2.13, filesystem.py).
    """
    for file, items in table.by_file():
        stop = begin = 0
        for offset, length in items:
            if offset < stop and offset != begin:
                raise InconsistentCheckpoint(
                    "elements-overlap",
                    f"{name}: two items share byte {offset} of {file}",
                    file=file,
                )
            begin = offset
            stop = max(stop, begin + length)
