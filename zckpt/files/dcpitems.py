"""What is in the item files of a directory of torch.distributed.checkpoint, and what is not?

An item is a file of torch.save inside of its file, or a tensor of the safetensors file that ends
it. `.metadata` says where it begins; here its bytes are looked at.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from resource import RLIMIT_NOFILE, getrlimit
from weakref import finalize

from ..core import sources
from ..core.dtypes import SIZES
from ..core.elsewhere import Fingerprint
from ..core.fragments import Extent, Record
from ..core.grouping import by_key
from ..core.inventory import missing_file
from ..errors import IncompleteCheckpoint, InconsistentCheckpoint
from .dcpfile import ITEMS, METADATA, ItemBox, ItemLocation, ItemTable
from .safefile import SavedTensor, read_with_metadata
from .torchfile import Parsed, Tensor, TorchFile

ALIGNMENT = 64  # bytes; of items in the files that zckpt writes, all of which are longer


class ItemFiles:
    """The item files of a folder, each opened when one of its items is needed.

    A file has thousands of items, and opening it takes a millisecond on some network filesystems.
    So files stay open while this object lives (`keeps_open`), but at most a quarter of those that
    the process may have open. `sizes` are the bytes of every file that was opened, by path,
    `records` those of all items that were read as files of torch.save.
    """

    def __init__(self, keeps_open: bool = True) -> None:
        self.sizes: dict[str, int] = {}
        self.records: list[Record] = []
        self._parsed = Parsed()
        self._tensors: dict[tuple[str, int], dict[str, SavedTensor]] = {}
        self._open: dict[str, tuple[int, Fingerprint]] = {}
        self._most_open = getrlimit(RLIMIT_NOFILE)[0] // 4 if keeps_open else 0
        finalize(self, _close, self._open)

    def missing(
        self, location: ItemLocation, key: str, dtype: str, sizes: tuple[int, ...]
    ) -> SavedTensor | None:
        """The tensor of an item whose file is lost, so that another one stands in for it."""
        if not sources.is_stand_in(location.file):
            return None
        self.sizes.setdefault(location.file, 0)
        extent = Extent(location.file, location.offset, prod(sizes) * SIZES[dtype])
        return SavedTensor(key, dtype, sizes, extent)

    def stored(self, location: ItemLocation, key: str) -> SavedTensor | None:
        """The tensor `key`, if a safetensors file begins at the location; None if it does not."""
        begin = location.file, location.offset
        if begin not in self._tensors:
            self._require(location, 1)
            with self._opened(location.file) as file:
                is_torch = sources.pread(file, 2, location.offset) == b"PK"
            if is_torch:
                return None
            tensors, _ = read_with_metadata(location.file, location.offset)
            self._tensors[begin] = {stored.name: stored for stored in tensors}
        if key not in self._tensors[begin]:
            raise IncompleteCheckpoint(
                "elements-missing",
                f"{location.file} lacks {key}, which should be there according to {METADATA}",
                file=location.file,
            )
        return self._tensors[begin][key]

    def torch_file(self, location: ItemLocation) -> TorchFile:
        """The item as a file of torch.save, which it is in full."""
        if location.shared:
            raise InconsistentCheckpoint(
                "elements-overlap",
                f"{METADATA} says that two items begin at byte {location.offset} of "
                f"{location.file}",
                file=location.file,
            )
        self._require(location, location.length)
        extent = Extent(location.file, location.offset, location.length)
        with self._opened(location.file) as file:
            item = TorchFile(location.file, self._parsed, extent, file)
        self.records += item.records.values()
        return item

    def boxes(
        self, table: ItemTable, key: str, dtype: str | None = None
    ) -> Iterator[tuple[ItemBox, TorchFile]]:
        """The boxes of a tensor that are not empty, each with the file whose value it is.

        Without `dtype` it is of the type that the metadata states. Raises InconsistentCheckpoint.
        """
        item = table.items[key]
        for box in item.boxes if item is not None else ():
            if item is None or box.is_empty:
                continue
            location, lost_dtype = table.location(key, box), dtype or item.dtype
            if (lost := self.missing(location, key, lost_dtype, box.sizes)) is not None:
                yield box, TorchFile.missing(lost.extent, lost_dtype, box.sizes)
                continue
            file = self.torch_file(location)
            tensor = file.value
            described = (tensor.dtype, tensor.shape) if isinstance(tensor, Tensor) else None
            require_same(location, key, described, (dtype or item.dtype, box.sizes))
            yield box, file

    def unused(self, table: ItemTable) -> list[Extent]:
        """Bytes of the item files that no item covers: something is lost, or left of another save.

        zckpt aligns items, so a gap before an aligned one is no finding if no item fits into it.
        """
        locations = by_key((location.file, location) for location in table.every_location())
        with os.scandir(table.folder) as entries:
            files = {entry.path for entry in entries if entry.name.endswith(ITEMS)}
        unused = []
        for file in sorted(files | locations.keys()):
            if sources.is_stand_in(file):
                continue
            of_file = locations.get(file, [])
            for location in of_file:
                self._require(location, 0)  # also if nothing was read of it
            size, reached = sources.size(file), 0
            for location in sorted(of_file, key=lambda location: location.offset):
                start = location.offset
                if start > reached and (start - reached >= ALIGNMENT or start % ALIGNMENT):
                    unused.append(Extent(file, reached, start - reached))
                reached = max(reached, start + location.length)
                # a safetensors file reaches to the end; its empty tensors were not asked for
                if (file, start) in self._tensors or not location.length:
                    reached = size
            if size > reached:
                unused.append(Extent(file, reached, size - reached))
        return unused

    @contextmanager
    def _opened(self, path: str) -> Iterator[int]:
        """The descriptor of a file, as it is at the path now; raises as `sources.open_file`."""
        with sources.naming(path):
            now = Fingerprint.of(os.stat(path))
            if path in self._open and self._open[path][1] != now:
                sources.close(self._open.pop(path)[0])
            if path not in self._open and len(self._open) < self._most_open:
                self._open[path] = sources.open_file(path), now
            if path in self._open:
                yield self._open[path][0]
                return
        with sources.opened(path) as opened:
            yield opened.fileno()

    def _require(self, location: ItemLocation, length: int) -> None:
        """Raises IncompleteCheckpoint unless the file exists and has these bytes."""
        path, stop = location.file, location.offset + length
        if path not in self.sizes:
            if not sources.is_file(path):
                hint = "copy the whole directory; every rank writes files of its own"
                raise missing_file(path, METADATA, hint)
            self.sizes[path] = sources.size(path)
        if min(location.offset, length) < 0 or stop > self.sizes[path]:
            raise IncompleteCheckpoint(
                "file-cut-short",
                f"{path} has {self.sizes[path]} bytes, but {METADATA} needs at least {stop}",
                hint="it was cut short; take another copy of it",
                file=path,
            )


def _close(files: dict[str, tuple[int, Fingerprint]]) -> None:
    while files:
        sources.close(files.popitem()[1][0])


def require_same(
    location: ItemLocation,
    key: str,
    stored: tuple[str, tuple[int, ...]] | None,
    stated: tuple[str, tuple[int, ...]],
) -> None:
    """Raises InconsistentCheckpoint unless a stored dtype and shape are those of the metadata.

    `stored` is None for an item that is not a tensor.
    """
    if stored != stated:
        raise InconsistentCheckpoint(
            "mixed-saves",
            f"{location.file} should have {stated[0]} {list(stated[1])} of {key} at byte "
            f"{location.offset} according to {METADATA}, but something else is there",
            file=location.file,
        )
