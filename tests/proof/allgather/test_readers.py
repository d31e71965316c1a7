"""Threads that read: which bytes come to which place, and what is hashed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest
import torch

from zckpt.core.checkpoint.entries import Entry
from zckpt.core.passes.plan import Match
from zckpt.core.ranks.partition import FlatMember
from zckpt.core.storage.fragments import Extent, Fragment, Runs, solid
from zckpt.errors import CorruptCheckpoint
from zckpt.proof.allgather import readers as module
from zckpt.proof.allgather.buckets import Block
from zckpt.proof.allgather.readers import BlockMatch, Readers, memory_of

DATA = bytes(range(100))


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "a"
    path.write_bytes(DATA)
    return str(path)


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Readers]:
    """Their threads read 16 bytes at a time."""
    monkeypatch.setattr(module, "READ", 16)
    opened = Readers(2)
    yield opened
    opened.close()


def test_extents_longer_than_one_read(readers: Readers, file: str) -> None:
    """Each byte comes to its place, and nothing else is written to."""
    into = torch.full((60,), 255, dtype=torch.uint8)
    wanted = [(Extent(file, 10, 40), 5), (Extent(file, 0, 3), 50), (Extent(file, 90, 4), 53)]
    reads = readers.extents(wanted, memory_of(into))
    for read in reads:
        read.result()
    assert len(reads) == 3  # 16, 16 and 8 + 3 + 4 bytes
    free = b"\xff"
    expected = free * 5 + DATA[10:50] + free * 5 + DATA[:3] + DATA[90:94] + free * 3
    assert bytes(memory_of(into)) == expected


def test_elements_longer_than_one_read(readers: Readers, file: str) -> None:
    """Two rows of five elements of a matrix, then six of a vector, which lies in two places."""
    matrix = Entry("w", "param", "F32", (3, 6), solid(18, Extent(file, 4, 72)))
    fragments = Runs([Fragment(0, 2, Extent(file, 92, 4)), Fragment(2, 6, Extent(file, 2, 8))])
    vector = Entry("b", "param", "F16", (6,), fragments)
    rows = Block(FlatMember(("w", "param"), (3, 6), 0), 0, 2, 0, 5, 1, 6)
    line = Block(FlatMember(("b", "param"), (6,), 0), 0, 1, 0, 6, 0, 6)
    items = [
        BlockMatch(rows, 0, Match(matrix, matrix), 8),
        BlockMatch(line, 1, Match(vector, vector), 56),
    ]
    into = torch.full((72,), 255, dtype=torch.uint8)
    reads = readers.elements(items, memory_of(into))
    seen = [seen for read in reads for seen in read.result()]
    own = DATA[4:76]
    parts = own[4:20], own[20:24], own[28:44], own[44:48], DATA[92:96] + DATA[2:10]
    free = b"\xff"
    expected = free * 8 + b"".join(parts[:4]) + free * 8 + parts[4] + free * 4
    assert bytes(memory_of(into)) == expected
    ranges = (1, 5), (5, 6), (7, 11), (11, 12), (0, 6)
    assert [(start, stop, crc) for _, start, stop, crc in seen] == [
        (*bounds, crc32(part)) for bounds, part in zip(ranges, parts, strict=True)
    ]
    assert [item for item, *_ in seen] == [items[0]] * 4 + [items[1]]
    assert len(reads) == 4  # 16, 4, 16 and 4 + 12 bytes


def test_each_thread_opens_a_file_once(readers: Readers, file: str) -> None:
    """And none stays open."""
    before = len(os.listdir("/proc/self/fd"))
    into = memory_of(torch.empty(64, dtype=torch.uint8))
    for _ in range(20):
        for read in readers.extents([(Extent(file, 0, 64), 0)], into):
            read.result()
    assert 0 < len(os.listdir("/proc/self/fd")) - before <= 2
    readers.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_end_waits_for_what_runs_and_drops_the_rest(
    monkeypatch: pytest.MonkeyPatch, readers: Readers, file: str
) -> None:
    """After an error nothing more is read, and no thread reads from a file that is closed."""
    begun, ended = [], []
    go_on = threading.Event()

    def read(*_: object) -> None:
        begun.append(1)
        go_on.wait(0.2)
        ended.append(1)

    monkeypatch.setattr(module.ElementReader, "read", read)
    entry = Entry("w", "param", "F32", (16,), solid(16, Extent(file, 0, 64)))
    block = Block(FlatMember(("w", "param"), (16,), 0), 0, 1, 0, 16, 0, 16)
    into = memory_of(torch.zeros(64, dtype=torch.uint8))
    item = BlockMatch(block, 0, Match(entry, entry), 0)
    reads = [read for _ in range(10) for read in readers.elements([item], into)]
    readers.close()
    assert len(begun) == len(ended) < len(reads) == 40
    assert all(read.done() for read in reads)


def test_a_file_that_ends_too_early_is_named(readers: Readers, file: str) -> None:
    into = memory_of(torch.empty(64, dtype=torch.uint8))
    (*_, last) = readers.extents([(Extent(file, 44, 64), 0)], into)
    with pytest.raises(CorruptCheckpoint, match=r"a ends at byte 100, inside a tensor"):
        last.result()
