"""Reads elements of tensors from files into a buffer.

Byte ranges that follow each other both in a file and in the buffer become one read. The small
slices of many tensors (ZeRO-3) become one read per rank, and are then copied to their places one by
one. numpy would copy tiny slices faster. But importing numpy takes 11 MiB, and more time than most
commands need for all of their slices. So numpy is imported for strided tensors only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct

from ..checkpoint.cast import CAST_BLOCK, cast, refuse_overflow
from ..checkpoint.dtypes import SIZES
from ..checkpoint.entries import Entry
from ..storage.fileio import Buffer, Reader
from ..storage.fragments import Extent, Fragment, Slices
from ..storage.records import PassedRecord, RecordChecker

SMALL = 64 << 10  # bytes; a slice below this is read together with its neighbors
SHORT = 4 << 10  # bytes; runs of a strided tensor below this are read together


class ReadRequest(Struct, frozen=True):
    """A request to read elements [start, stop) of a tensor to byte `at` of a buffer.

    check     whether to check the CRC-32 of the record (zip member etc.) with these bytes
    is_cut    whether the edge of a chunk (a step of the copy) may have cut the range

    Small ZeRO-3 slices of several tensors are read together. A request with `is_cut` takes part
    only if it is for a whole tensor.
    """

    entry: Entry
    start: int
    stop: int
    at: int
    check: bool = True
    is_cut: bool = True

    @property
    def is_whole(self) -> bool:
        """Whether the request is for all elements of the tensor."""
        return not self.start and self.stop == self.entry.numel

    @property
    def end(self) -> int:
        return self.at + (self.stop - self.start) * SIZES[self.entry.dtype]


class ElementReader(Struct, eq=False, dict=True):
    """Reads elements of tensors from files into buffers, for one thread.

    If `passed` is a list, each read appends to it which parts of records it has read. A record is a
    byte range with a stated checksum, such as a zip member.
    """

    reader: Reader
    checker: RecordChecker
    memory: int
    passed: list[PassedRecord] | None = None

    def __post_init__(self) -> None:
        # many copies need neither: the system allocates memory when it is first written to
        self.block = Buffer(CAST_BLOCK * 8).view
        """Memory for elements in the source's type, before they are cast."""
        self.scratch = Buffer(self.memory).view
        """Working memory."""

    def _read(self, extent: Extent, into: memoryview, check: bool) -> int | None:
        """Reads a byte range into `into`; returns its CRC-32 if it was computed for a check."""
        self.reader.read(extent, into)
        if not check:
            return None
        return self.checker.passed(extent.file, extent.offset, into, self.passed)

    def read(
        self, requests: Sequence[ReadRequest], view: memoryview
    ) -> Mapping[tuple[int, int], int]:
        """Reads the elements of every request to its place in `view`.

        Returns the CRC-32s that were computed while reading, by bytes (begin, end) of `view`.
        """
        crcs = {}
        for extent, begin, check in self._reads(requests, view):
            end = begin + extent.length
            crc = self._read(extent, view[begin:end], check)
            if crc is not None:
                crcs[begin, end] = crc
        return crcs

    def _reads(
        self, requests: Sequence[ReadRequest], view: memoryview
    ) -> Iterator[tuple[Extent, int, bool]]:
        """Yields the reads to make: a byte range, its position in `view`, and whether to hash it.

        Small slices and short strided runs are read here, and not yielded.
        """
        pending: tuple[Extent, int, bool] | None = None  # the next read may still extend it
        small: dict[int, list[ReadRequest]] = {}  # by their flat buffers, since files may mix slots
        long: list[ReadRequest] = []
        for item in requests:
            fragments = item.entry.fragments
            # isinstance is slow for the abstract class of a sequence
            if type(fragments) is Slices and fragments.width * fragments.size < SMALL:
                small.setdefault(id(fragments.flats), []).append(item)
            else:
                long.append(item)
        for items in small.values():
            place = 0
            while place < len(items):
                if batch := self._batch(items, place):
                    self._read_slices(batch, view)
                else:
                    long.append(items[place])
                place += len(batch) or 1
        for item in long:
            for at, extent in self._long(item, view):
                if pending is None:
                    pending = extent, at, item.check
                    continue
                before, begin, check = pending
                end = Extent(before.file, before.offset + before.length, extent.length)
                if end == extent and begin + before.length == at and check == item.check:
                    joined = Extent(before.file, before.offset, before.length + extent.length)
                    pending = joined, begin, check
                else:
                    yield pending
                    pending = extent, at, item.check
        if pending is not None:
            yield pending

    def read_as(
        self,
        dtype: str,
        request: ReadRequest,
        view: memoryview,
        passed: Callable[[int, int, memoryview], None] | None = None,
        bounded: bool = False,
    ) -> None:
        """Reads elements, converts them to `dtype`, and puts them at byte `request.at` of `view`.

        `passed` is called for each block with its first element, its end, and its bytes before the
        conversion. Raises UnsupportedCheckpoint for types that are not floats. With `bounded`, it
        also raises this error if a finite number becomes infinite.
        """
        if dtype == request.entry.dtype and passed is None:
            self.read([request], view)
            return
        entry, size, cast_size = request.entry, SIZES[request.entry.dtype], SIZES[dtype]
        block = self.block
        for start in range(request.start, request.stop, CAST_BLOCK):
            stop = min(start + CAST_BLOCK, request.stop)
            elements = block[: (stop - start) * size]
            self.read([ReadRequest(entry, start, stop, 0, request.check)], elements)
            if passed is not None:
                passed(start, stop, elements)
            at = request.at + (start - request.start) * cast_size
            result = view[at : at + (stop - start) * cast_size]
            cast(elements, entry.dtype, result, dtype)
            if bounded:
                refuse_overflow(entry.name, elements, entry.dtype, result, dtype)

    def _long(self, item: ReadRequest, view: memoryview) -> Iterator[tuple[int, Extent]]:
        """Yields each long byte range of a request, with the byte in `view` where it belongs.

        Short ranges, as in a strided tensor, are read here and not yielded.
        """
        size = SIZES[item.entry.dtype]
        for fragment in item.entry.fragments.overlapping(item.start, item.stop):
            if fragment.count > 1 and (fragment.stop - fragment.start) * size < SHORT:
                self._read_runs(item, fragment, view)
                continue
            for run in fragment.runs(item.start, item.stop):
                start, stop = max(item.start, run.start), min(item.stop, run.stop)
                first = run.start
                extent = run.extent.part((start - first) * size, (stop - first) * size)
                yield item.at + (start - item.start) * size, extent

    def _batch(self, requests: Sequence[ReadRequest], place: int) -> Sequence[ReadRequest]:
        """Selects requests, from number `place` on, that together need only one read per rank.

        Their ZeRO-3 slices are neighbors in every rank's flat buffer. The result may be empty.
        """
        first = _slices(requests[place])
        room = self.memory // (first.size * len(first.flats))  # elements of each flat buffer
        end, check, stop = first.offset, requests[place].check, place
        while stop < len(requests):
            item, slices = requests[stop], _slices(requests[stop])
            # the gap may hold slices of tensors that are too small for this rank of the target
            is_next = item.check == check and 0 <= (slices.offset - end) * slices.size < SMALL
            end = slices.offset + slices.width
            # slices of a tensor that a chunk's edge cuts would be read twice. Batches end at the
            # same tensors for every target file, so two ranks' files read the same bytes
            if not is_next or end - first.offset > room or (item.is_cut and not item.is_whole):
                break
            stop += 1
        return requests[place:stop]

    def _read_slices(self, batch: Sequence[ReadRequest], view: memoryview) -> None:
        """Reads the slices of a batch, with one read per rank, and copies them to their places."""
        first, last = _slices(batch[0]), _slices(batch[-1])
        size, begin = first.size, first.offset
        width = last.offset + last.width - begin
        needed = [_ranks(item) for item in batch]
        ranks = range(min([each.start for each in needed]), max([each.stop for each in needed]))
        scratch = self.scratch[: len(ranks) * width * size]
        # a slice at the edge of two target ranks is read for both, and counted for one of them
        counted = range(-(-batch[0].start // first.width), -(-batch[0].stop // first.width))
        for place, rank in enumerate(ranks):
            into = scratch[place * width * size : (place + 1) * width * size]
            part = first.flats[rank].part(begin * size, (begin + width) * size)
            self._read(part, into, batch[0].check and (rank in counted or batch[0].is_whole))
        stride = width * size
        for item, ranks_of_item in zip(batch, needed, strict=True):
            slices = _slices(item)
            length = slices.width * size
            row = (ranks_of_item.start - ranks.start) * stride + (slices.offset - begin) * size
            # only a part of the first and of the last slice may be wanted
            skipped = (item.start - ranks_of_item.start * slices.width) * size
            at, end = item.at, item.at + (item.stop - item.start) * size
            stop = min(at + length - skipped, end)
            view[at:stop] = scratch[row + skipped : row + skipped + stop - at]
            while stop < end:
                row, at, stop = row + stride, stop, min(stop + length, end)
                view[at:stop] = scratch[row : row + stop - at]

    def _read_runs(self, item: ReadRequest, fragment: Fragment, view: memoryview) -> None:
        """Reads the requested part of a strided fragment, and copies its elements to their places.

        The bytes go through the working memory `scratch`.
        """
        import numpy as np

        size, length = SIZES[item.entry.dtype], fragment.stop - fragment.start
        target = np.frombuffer(view[item.at : item.end], dtype=f"V{size}")
        first = max(0, (item.start - fragment.stop) // fragment.stride + 1)
        stop = min(fragment.count, -(-(item.stop - fragment.start) // fragment.stride))
        step = max(1, self.memory // (length * size))
        for begin in range(first, stop, step):
            end = min(begin + step, stop)
            extent = fragment.extent.part(begin * length * size, end * length * size)
            scratch = self.scratch[: extent.length]
            self._read(extent, scratch, item.check)
            runs = np.frombuffer(scratch, dtype=f"V{size}").reshape(end - begin, length)
            at = fragment.start + np.arange(begin, end)[:, None] * fragment.stride
            at = at + np.arange(length)[None, :] - item.start
            inside = (at >= 0) & (at < item.stop - item.start)
            target[at[inside]] = runs[inside]


def _ranks(item: ReadRequest) -> range:
    return _slices(item).ranks(item.start, item.stop)


def _slices(item: ReadRequest) -> Slices:
    slices = item.entry.fragments
    assert isinstance(slices, Slices)
    return slices
