"""Copies that are stopped and go on, and copies that several processes share."""

from __future__ import annotations

import os
import random
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace as changed

from zckpt.copying import copy as execute
from zckpt.copying import filling
from zckpt.copying.journal import Identity, Journal, Region
from zckpt.copying.journals import PartJournal
from zckpt.copying.sharing import Part, Sharing
from zckpt.core.checkpoint.dtypes import SIZES
from zckpt.core.checkpoint.entries import key_of
from zckpt.core.passes.resources import Copying, Progress
from zckpt.core.storage.fileio import Reader
from zckpt.core.storage.fragments import solid
from zckpt.errors import CorruptCheckpoint, ProcessLost

from .conftest import folder_at
from .test_copy import (
    CHUNK,
    Disk,
    Job,
    Tensor,
    ended,
    flip,
    lay,
    one,
    prepare,
    replace_tensor,
    touched,
    use_chunks,
)


@pytest.fixture(autouse=True)
def small_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions of two chunks; two small files are synced together."""
    use_chunks(monkeypatch, CHUNK)
    monkeypatch.setattr(filling, "REGION", 2 * CHUNK)
    monkeypatch.setattr(execute, "is_small", lambda size: size <= CHUNK)
    monkeypatch.setattr(execute, "UNSYNCED", 2)


def journal_in(root: Path) -> Journal:
    (root / "journals").mkdir(exist_ok=True)
    return Journal(folder_at(root / "journals"), Identity(), CHUNK)


def many_files(root: Path) -> Job:
    """Tensors of which some are cast and hashed before, in files of one chunk and of many."""
    chosen = random.Random(5)
    data = {
        name: torch.rand(numel).numpy().tobytes()
        for name, numel in [("0/exp_avg", 30_000), *((f"{n}/exp_avg", 1200) for n in range(1, 10))]
    }
    tensors = [Tensor(name, "F32", (len(data[name]) // 4,), data[name]) for name in data]
    dtypes = dict.fromkeys(("0/exp_avg", "3/exp_avg"), "BF16")
    disks = Disk(root / "source", chosen), Disk(root / "target", chosen)
    lay(disks[0], tensors, ("runs",))
    disks[0].write()
    wanted = [replace_tensor(item, dtypes.get(item.name, item.dtype)) for item in tensors]
    for item in wanted:
        size = SIZES[item.dtype]
        extent = disks[1].put(f"file {item.name[0]}", item.data, size)
        disks[1].extents.append(extent)
        disks[1].add(item.name, item.dtype, item.shape, solid(len(item.data) // size, extent))
        entry = disks[0].entries[key_of(item.name)]
        disks[0].entries[key_of(item.name)] = changed(entry, digest=zlib.crc32(data[item.name]))
    disks[1].write()
    for extent in disks[1].extents:
        with open(extent.file, "r+b") as file:
            os.pwrite(file.fileno(), bytes(extent.length), extent.offset)
    return Job(*disks, wanted)


class Stopped(Exception):
    """What ends a copy on the way."""


def stopping(chunks: int) -> Progress:
    left = [chunks]

    def progress(_: int) -> None:
        left[0] -= 1
        if not left[0]:
            raise Stopped

    return progress


def regions_in(journal: Journal) -> list[Region]:
    return [region for regions in journal.regions.values() for region in regions]


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("chunks", [1, 4, 9, 12, 17])
def test_a_stopped_copy_goes_on(tmp_path: Path, chunks: int, jobs: int) -> None:
    """No region of the journal is written again, and at most a few others are."""
    job, journal = many_files(tmp_path), journal_in(tmp_path)
    with pytest.raises(Stopped):
        job.copy(Copying(jobs), stopping(chunks), journal=journal)
    journal.close()
    journal = journal_in(tmp_path)
    known = sum(region.stop - region.start for region in regions_in(journal))
    assert len(regions_in(journal)) >= (chunks - 1) // 2 - 2 - jobs
    done: list[int] = []
    outcome = job.copy(Copying(jobs), done.append, journal=journal)
    journal.close()
    job.check(outcome)
    total = sum(size for size, _ in outcome.files.values())
    assert (sum(done), outcome.bytes) == (total, total - known)
    assert (outcome.counts.checked, outcome.counts.unchecked) == (len(touched(job.source)), 0)


class Shown:
    """A progress that shows what is being done."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, _: int) -> None:
        pass

    def describe(self, text: str) -> None:
        self.texts.append(text)


def test_progress_names_the_file(tmp_path: Path) -> None:
    job, shown = many_files(tmp_path), Shown()
    job.copy(Copying(1), shown)
    assert shown.texts == [
        f"writing file {number}, {number + 1} of 10 files" for number in range(10)
    ]


def test_a_copy_that_is_complete_reads_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, journal = many_files(tmp_path), journal_in(tmp_path)
    whole = job.copy(journal=journal)
    journal.close()
    journal = journal_in(tmp_path)
    monkeypatch.delattr(Reader, "read")
    again = job.copy(journal=journal)
    journal.close()
    job.check(again)
    assert again.bytes == 0
    assert again.counts == whole.counts


class Repeating(Sharing):
    """Says once more what the journal has."""

    def regions_of_others(self, journal: Journal) -> list[Region]:
        return regions_in(journal)


def test_a_region_that_is_known_counts_once(tmp_path: Path) -> None:
    """A tensor that is cut along inner axes keeps nothing by which it could tell."""
    tensors = [
        Tensor(f"{n}/exp_avg", "F32", (70, 60), random.Random(n).randbytes(16800)) for n in range(3)
    ]
    job, journal = prepare(tmp_path, 5, tensors, ("whole",), ("lines",)), journal_in(tmp_path)
    job.copy(journal=journal)
    journal.close()
    journal = journal_in(tmp_path)
    assert len(regions_in(journal)) > 1
    outcome = job.copy_portions(Repeating(), journal=journal)
    journal.close()
    assert outcome is not None
    job.check(outcome)


@pytest.mark.parametrize("place", [0, -1])
def test_damage_of_which_each_run_has_read_a_part(tmp_path: Path, place: int) -> None:
    """The CRC-32 of a record is that of all its bytes, whichever run has read them."""
    job, journal = one(tmp_path), journal_in(tmp_path)
    extent = job.source.extents[0]
    flip(extent, place % extent.length)
    with pytest.raises(Stopped):
        job.copy(Copying(1), stopping(3), journal=journal)
    journal.close()
    journal = journal_in(tmp_path)
    assert regions_in(journal)
    with pytest.raises(CorruptCheckpoint, match="CRC-32"):
        job.copy(journal=journal)
    journal.close()


@pytest.mark.parametrize(
    ("jobs", "chunks", "taken"), [(4, 8, 4), (4, 7, 3), (4, 6, 3), (4, 1, 1), (2, 20, 2)]
)
def test_chunks_of_an_earlier_run_fit_into_the_memory_of_this_one(
    jobs: int, chunks: int, taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That had more memory. There is memory for `chunks` of its chunks, and each thread needs 2."""
    job, earlier = one(tmp_path), 8 << 20
    (tmp_path / "journals").mkdir()
    Journal(folder_at(tmp_path / "journals"), Identity(), earlier).close()
    seen: list[int] = []
    stream = execute.stream

    def counted(tasks: Any, jobs: int, *rest: Any) -> None:
        seen.append(jobs)
        stream(tasks, jobs, *rest)

    monkeypatch.setattr(execute, "stream", counted)
    done: list[int] = []
    journal = journal_in(tmp_path)
    job.check(job.copy(Copying(jobs, chunks * earlier), done.append, journal=journal))
    journal.close()
    assert (seen, done) == ([taken], [len(data) for data in job.target.files.values()])


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2)])
def test_the_last_part_completes_the_target(tmp_path: Path, order: tuple[int, ...]) -> None:
    job = many_files(tmp_path)
    for number in order:
        sharing = Part(number, 3)
        (tmp_path / "journals").mkdir(exist_ok=True)
        journal = PartJournal(folder_at(tmp_path / "journals"), Identity(), CHUNK, sharing.part)
        done: list[int] = []
        outcome = job.copy_portions(sharing, progress=done.append, journal=journal)
        journal.close()
        assert (outcome is None) == (number != order[-1])
        total = sum(map(len, job.target.files.values()))
        assert sum(done) < total or number == order[-1]
    assert outcome is not None
    assert 0 < outcome.bytes < total
    job.check(outcome)


def test_regions_of_a_process_that_was_lost(tmp_path: Path) -> None:
    """The others have ended, and yet not all is there."""

    class Lost(Sharing):
        def mine(self, portions: Any, progress: Any) -> Any:
            return iter(())

    journal = journal_in(tmp_path)
    assert one(tmp_path).copy_portions(Lost(), journal=journal) is None
    journal.close()


def test_a_process_that_must_not_write_any_more(tmp_path: Path) -> None:
    """Others may have written there since: the file keeps what it has."""

    class Left(Sharing):
        def check(self) -> None:
            raise ProcessLost("process-lost", "this process was given up")

    job = one(tmp_path)
    before = [Path(path).read_bytes() for path in job.target.files]
    with pytest.raises(ProcessLost, match="given up"):
        job.copy_portions(Left())
    assert [Path(path).read_bytes() for path in job.target.files] == before
    assert ended(job)
