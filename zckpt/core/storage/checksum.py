"""Computes the CRC-32 of bytes that arrive in pieces, in any order.

The zip members of a torch file have CRC-32s, and a universal manifest states one for each tensor.
The CRCs of parts combine to the CRC of the complete bytes in 0.14 us. So no piece has to wait for
the piece before it. zlib-ng computes 30 GB/s a core, the standard library's zlib 7 GB/s.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct, field
from zlib_ng.zlib_ng import crc32 as crc32
from zlib_ng.zlib_ng import crc32_combine

combine: Callable[[int, int, int], int] = crc32_combine
"""The CRC-32 of two consecutive pieces, given both CRCs and the length of the second piece."""


def crc_of_zeros(length: int) -> int:
    """The CRC-32 of `length` zero bytes, without allocating them.

    Zero bytes only shift the CRC register, which begins with all bits set and is inverted at the
    end.
    """
    return combine(0xFFFFFFFF, 0xFFFFFFFF, length)


def flipped_bit(stated_crc: int, actual: int, length: int) -> tuple[int, int] | None:
    """Finds the single flipped bit that explains a wrong CRC-32: returns its byte and its bit.

    Bit 0 is the lowest. None if no single bit explains the CRC-32 of these `length` bytes, or if
    several do.
    """
    bits = flipped_bits(stated_crc, actual, length)
    return bits[0] if len(bits) == 1 else None


def flipped_bits(stated_crc: int, actual: int, length: int) -> list[tuple[int, int]]:
    """All single bits whose flip explains a wrong CRC-32, as (byte, bit) in order.

    Below 512 MiB, at most one bit does. Damage of several bits looks like one flipped bit with a
    probability of 8 * length / 2**32.
    """
    # the XOR of two CRCs depends only on the flipped bits: for one bit it is a power of x, and the
    # exponent is the bit's distance from the end. The powers repeat only after 2**32 - 1 bits
    bits = 8 * length
    # the number of powers in the list; the difference is shifted by as many at a time
    steps = 1 << 16
    blocks = -(-bits // steps)
    power = combine(_LAST_BIT, 0, blocks * steps // 8)
    listed = {}
    for distance in range(steps):
        listed[power] = blocks * steps + distance
        power = power >> 1 ^ (_LAST_BIT if power & 1 else 0)
    moved, positions = stated_crc ^ actual, set()
    for block in range(blocks + 1):
        if moved in listed:
            positions.add(bits - 1 - (listed[moved] - block * steps))
        moved = combine(moved, 0, steps // 8)
    return [divmod(position, 8) for position in sorted(positions) if position >= 0]


_LAST_BIT = 0xEDB88320
"""The change of a CRC-32 if the very last bit is flipped: its polynomial, bits reversed."""


class Cover(Struct, eq=False):
    """Computes the CRC-32 of `length` bytes whose pieces may arrive in any order, even twice.

    Neighboring pieces are merged as they arrive, so memory does not grow with the bytes.
    """

    length: int
    seen: int = 0
    _by_start: dict[int, tuple[int, int]] = field(default_factory=dict)  # start -> stop, crc
    _by_stop: dict[int, int] = field(default_factory=dict)  # stop -> start

    def add(self, start: int, stop: int, crc: int) -> None:
        """Adds a piece, bytes [start, stop), with its CRC-32; ignores it if it was added before."""
        if start == stop or start in self._by_start or stop in self._by_stop:
            return
        self.seen += stop - start
        if start in self._by_stop:
            first = self._by_stop.pop(start)
            _, before = self._by_start.pop(first)
            start, crc = first, combine(before, crc, stop - start)
        if stop in self._by_start:
            last, after = self._by_start.pop(stop)
            del self._by_stop[last]
            crc, stop = combine(crc, after, last - stop), last
        self._by_start[start] = stop, crc
        self._by_stop[stop] = start

    def parts(self) -> list[tuple[int, int, int]]:
        """The pieces that were added so far, as arguments of `add`."""
        return [(start, stop, crc) for start, (stop, crc) in self._by_start.items()]

    @property
    def crc(self) -> int | None:
        """The CRC-32 of all bytes; None as long as some bytes were not added."""
        stop, crc = self._by_start.get(0, (0, 0))
        return crc if stop == self.length else None

    def gaps(self) -> list[tuple[int, int]] | None:
        """The byte ranges that are still missing.

        None if pieces overlap: then all bytes must be read again.
        """
        gaps, end = [], 0
        for start in sorted(self._by_start):
            if start < end:
                return None
            if start > end:
                gaps.append((end, start))
            end = self._by_start[start][0]
        if end < self.length:
            gaps.append((end, self.length))
        return gaps


class Scattered(Struct, eq=False):
    """Computes the CRC-32 of `length` bytes from pieces in any order, without storing the pieces.

    No piece may be added twice: this class does not notice that, but `Cover` does.
    """

    # `Cover` stores each piece that touches no other: millions if files have a matrix by columns
    length: int
    seen: int = 0
    _sum: int = 0  # a CRC is linear, so each piece adds its share independently

    def add(self, start: int, stop: int, crc: int) -> None:
        """Adds bytes [start, stop) with their CRC-32."""
        self.add_runs(stop - start, stop, crc)

    def add_runs(self, count: int, stop: int, crc: int) -> None:
        """Adds several byte ranges in one call; `crc` is what `crc_of_runs` returns for them.

        `count` is the number of bytes in all ranges, `stop` the byte at which the last range ends.
        """
        self.seen += count
        self._sum ^= combine(crc, 0, self.length - stop)

    def parts(self) -> list[tuple[int, int, int]]:
        """All pieces so far, as a list of one (start, stop, crc) for `add` of another `Scattered`.

        `crc` is not the CRC-32 of these pieces, but what they contribute to the CRC-32 of all bytes
        (by XOR).
        """
        return [(self.length - self.seen, self.length, self._sum)]

    @property
    def crc(self) -> int | None:
        """The CRC-32 of all bytes; None as long as some bytes were not added."""
        return self._sum if self.seen == self.length else None


def crc_of_runs(data: memoryview, length: int, stride: int) -> int:
    """Computes what byte ranges at equal distances add to the CRC-32 of the complete bytes.

    `data` holds the ranges, of `length` bytes each. In the complete bytes, a range begins every
    `stride` bytes. `Scattered.add_runs` takes the result.
    """
    crc = 0
    for start in range(0, len(data), length):
        crc = combine(crc, crc32(data[start : start + length]), stride)
    return crc
