"""The contents of `.metadata`: tensors, their chunks ("boxes"), and the locations of items.

A checkpoint of many ranks has millions of chunks, and an object for each takes hundreds of bytes.
So chunks and locations are stored as columns of numbers. The objects for the chunks of a tensor, or
for one location, are made when they are read:

    boxes     offsets, sizes                              each the index of a tuple in `Shapes`
    places    key and offsets as one number, in order; file, offset, length
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

from msgspec import Struct, field

from ..core.checkpoint.dtypes import FROM_TORCH
from ..core.storage.fragments import Extent
from ..errors import CorruptCheckpoint, IncompleteCheckpoint, UnsupportedCheckpoint, safe

METADATA = ".metadata"

KeyPath = tuple[str | int, ...]
"""The keys that lead to an item in the program's state dict."""

ItemKey = tuple[str, tuple[int, ...] | None]
"""An item: its key and, for a box (chunk) of a tensor, the box's offsets.

The offsets are None for a value that is not a tensor.
"""


class ItemBox(Struct, frozen=True):
    """Elements [offset, offset + size) of a tensor along every axis; torch calls it a chunk."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        return 0 in self.sizes


class Shapes:
    """The offsets and sizes of boxes (chunks): each different tuple is stored once, in `values`."""

    def __init__(self) -> None:
        self.values: list[tuple[int, ...]] = []
        self._numbers: dict[tuple[int, ...], int] = {}

    def number(self, values: tuple[int, ...]) -> int:
        """The index of a tuple of offsets or sizes in `self.values`; a new tuple is added."""
        number = self._numbers.setdefault(values, len(self.values))
        if number == len(self.values):
            self.values.append(values)
        return number

    def known(self, values: tuple[int, ...]) -> int | None:
        """The index of a tuple of offsets or sizes in `self.values`; None if it was never added."""
        return self._numbers.get(values)


class BoxColumns:
    """The boxes (chunks) of all tensors of a table, in two columns with one row per box.

    The columns have the indices of the box's offsets and sizes in `shapes.values`.
    """

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self.offsets, self.sizes = array("i"), array("i")

    def since(self, start: int) -> BoxRows:
        """The boxes (chunks) from row `start` to the last row: those of the tensor added last."""
        return BoxRows(self, start, len(self.sizes))


class BoxRows(Sequence[ItemBox]):
    """The boxes (chunks) of one tensor: rows [start, stop) of `BoxColumns`."""

    __slots__ = ("columns", "start", "stop")

    def __init__(self, columns: BoxColumns, start: int, stop: int) -> None:
        self.columns, self.start, self.stop = columns, start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return tuple(self)[place]
        row = range(self.start, self.stop)[place]
        columns, values = self.columns, self.columns.shapes.values
        return ItemBox(values[columns.offsets[row]], values[columns.sizes[row]])

    def __iter__(self) -> Iterator[ItemBox]:
        columns, values = self.columns, self.columns.shapes.values
        for row in range(self.start, self.stop):
            yield ItemBox(values[columns.offsets[row]], values[columns.sizes[row]])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(tuple(self))


class TensorItem(Struct, frozen=True):
    """The description of a tensor: its dtype, shape and boxes (chunks).

    `torch_dtype` is torch's name of the dtype, which zckpt may not support.
    """

    torch_dtype: str
    shape: tuple[int, ...]
    boxes: Sequence[ItemBox]

    @property
    def dtype(self) -> str:
        """The dtype's name in a manifest; raises UnsupportedCheckpoint for unsupported types."""
        dtype = FROM_TORCH.get(self.torch_dtype)
        if dtype is None:
            raise UnsupportedCheckpoint(
                "type-unsupported",
                f"zckpt does not read tensors of type torch.{self.torch_dtype}",
                hint="cast them before saving, or leave them out of the checkpoint",
            )
        return dtype


Items = dict[str, TensorItem | None]
"""Items by key, in the order of `.metadata`; None for a value that is not a tensor."""


class ItemLocation(Struct, frozen=True):
    """The file and the bytes in which an item of torch.distributed.checkpoint was saved."""

    file: str
    offset: int
    length: int
    shared: bool = False  # other tensors begin there too: the bytes are one safetensors file

    @property
    def extent(self) -> Extent:
        return Extent(self.file, self.offset, self.length)


class Places(Mapping[ItemKey, ItemLocation]):
    """The location of each item, as columns of numbers.

    The rows of the columns are sorted by the number of the key in `key_numbers`, and then by the
    offsets of boxes (chunks). For each row, `files` has the index of the item's file in `paths`,
    and `offsets` and `lengths` its bytes in this file.
    """

    def __init__(self, shapes: Shapes, keys: dict[str, int], paths: list[str]) -> None:
        self.shapes, self.key_numbers, self.paths = shapes, keys, paths
        self.base = 0  # a code is the number of a key times the base, plus that of offsets
        self.codes, self.files = array("q"), array("i")
        self.offsets, self.lengths = array("q"), array("q")
        self.shared = bytearray()

    @classmethod
    def of(cls, locations: Mapping[ItemKey, ItemLocation]) -> Places:
        """Makes a `Places` from a dictionary that maps items to their locations.

        An item of a tensor is (key, offsets of one chunk); an item of any other value is (key,
        None).
        """
        entered = EnteredPlaces(Shapes())
        for (key, offsets), location in locations.items():
            number = -1 if offsets is None else entered.shapes.number(offsets)
            entered.enter(key, number, location.file, location.offset, location.length)
        return entered.in_order()

    def row(self, key: str, offsets: tuple[int, ...] | None) -> int | None:
        """The index of the row with an item's location; None if the item has no location."""
        number = self.key_numbers.get(key)
        of_offsets = -1 if offsets is None else self.shapes.known(offsets)
        if number is None or of_offsets is None:
            return None
        code = number * self.base + of_offsets + 1
        row = bisect_left(self.codes, code)
        return row if row < len(self.codes) and self.codes[row] == code else None

    def at(self, row: int) -> ItemLocation:
        path = self.paths[self.files[row]]
        return ItemLocation(path, self.offsets[row], self.lengths[row], bool(self.shared[row]))

    def __getitem__(self, item: ItemKey) -> ItemLocation:
        row = self.row(*item)
        if row is None:
            raise KeyError(item)
        return self.at(row)

    def __len__(self) -> int:
        return len(self.codes)

    def __iter__(self) -> Iterator[ItemKey]:
        yield from self.named(range(len(self.codes)))

    def __repr__(self) -> str:
        return repr(dict(self))

    def named(self, rows: Sequence[int]) -> Iterator[ItemKey]:
        """Yields the items (key and box offsets) whose locations are in the given rows."""
        names, values = [*self.key_numbers], self.shapes.values
        for row in rows:
            key, offsets = divmod(self.codes[row], self.base)
            yield names[key], values[offsets - 1] if offsets else None

    def by_file(self) -> Iterator[tuple[str, list[int]]]:
        """Yields each file with its items, as row numbers sorted by the items' first bytes."""
        in_file = [array("i") for _ in self.paths]
        for row, file in enumerate(self.files):
            in_file[file].append(row)
        for path, rows in zip(self.paths, in_file, strict=True):
            yield path, sorted(rows, key=self.offsets.__getitem__)


class EnteredPlaces:
    """Collects the locations of items in any order; `in_order` sorts them into a `Places`."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self._keys: dict[str, int] = {}
        self._paths: dict[str, int] = {}
        self._of_keys, self._of_offsets, self._files = array("i"), array("i"), array("i")
        self._offsets, self._lengths = array("q"), array("q")

    def enter(self, key: str, offsets: int, path: str, offset: int, length: int) -> None:
        """Adds an item's location: `length` bytes of the file `path`, from byte `offset` on.

        If the item is a chunk of a tensor, `offsets` is the index in `shapes.values` of the chunk's
        offsets; for any other value it is -1.
        """
        self._of_keys.append(self._keys.setdefault(key, len(self._keys)))
        self._of_offsets.append(offsets)
        self._files.append(self._paths.setdefault(path, len(self._paths)))
        self._offsets.append(offset)
        self._lengths.append(length)

    def in_order(self) -> Places:
        """All locations, sorted; raises CorruptCheckpoint if an item has two locations."""
        places = Places(self.shapes, self._keys, [*self._paths])
        base = places.base = len(self.shapes.values) + 1
        pairs = zip(self._of_keys, self._of_offsets, strict=True)
        codes = array("q", (key * base + offsets + 1 for key, offsets in pairs))
        order = sorted(range(len(codes)), key=codes.__getitem__)
        places.codes = array("q", map(codes.__getitem__, order))
        places.files = array("i", map(self._files.__getitem__, order))
        places.offsets = array("q", map(self._offsets.__getitem__, order))
        places.lengths = array("q", map(self._lengths.__getitem__, order))
        for row in range(1, len(codes)):
            if places.codes[row] == places.codes[row - 1]:
                twice = called(*next(places.named([row])))
                raise CorruptCheckpoint("file-damaged", f"it states two locations for {twice}")
        places.shared = bytearray(len(codes))
        for _, rows in places.by_file():
            for row, after in pairwise(rows):
                if places.offsets[row] == places.offsets[after]:
                    places.shared[row] = places.shared[after] = True
        return places


class ItemTable(Struct, frozen=True):
    """The metadata of one folder: its items (tensors and other values) and their locations.

    files    the metadata files themselves
    others   fields that describe no item: `planner_data`, `version`, `storage_meta`, and others
    paths    for each key, the keys that lead to it in the program's state dict, in the order of the
             saved state; empty if the writer kept no paths
    copies   further locations of items that several ranks saved
    unsaved  the keys in `paths` for which no rank saved an item
    """

    folder: str
    files: tuple[str, ...]
    items: Items
    locations: Places
    others: dict[str, Any]
    paths: dict[str, KeyPath]
    copies: dict[ItemKey, list[ItemLocation]] = field(default_factory=dict)

    @property
    def unsaved(self) -> list[str]:
        return [key for key in self.paths if key not in self.items]

    def location(self, key: str, box: ItemBox | None = None) -> ItemLocation:
        """The location of a value or of one box of a tensor; raises IncompleteCheckpoint."""
        return self.locations.at(self.row(key, None if box is None else box.offsets))

    def row(self, key: str, offsets: tuple[int, ...] | None) -> int:
        """The index of the row with an item's location; raises as `location`."""
        row = self.locations.row(key, offsets)
        if row is None:
            raise IncompleteCheckpoint(
                "elements-missing",
                f"{self.folder}: {METADATA} does not say in which file {called(key, offsets)} is",
                file=self.folder,
            )
        return row

    def by_file(self) -> Iterator[tuple[str, list[tuple[int, int]]]]:
        """Yields each file with its items' offsets and lengths, sorted by offset."""
        places, copies = self.locations, dict[str, list[tuple[int, int]]]()
        for copy in chain.from_iterable(self.copies.values()):
            copies.setdefault(copy.file, []).append((copy.offset, copy.length))
        for path, rows in places.by_file():
            own = [(places.offsets[row], places.lengths[row]) for row in rows]
            more = copies.pop(path, ())
            yield path, sorted([*own, *more], key=lambda item: item[0]) if more else own
        for path, of_copies in copies.items():
            yield path, sorted(of_copies, key=lambda item: item[0])


def called(key: str, offsets: tuple[int, ...] | None) -> str:
    """An item's name in messages: its key, and for a box (chunk) of a tensor its offsets."""
    return safe(key) if offsets is None else f"{safe(key)} at {list(offsets)}"
