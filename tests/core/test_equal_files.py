"""Which equal files are copies of each other, and which are equal by nature: synthetic ones."""

from __future__ import annotations

import random
import zlib
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from zckpt.core.checkpoint.dtypes import SIZES
from zckpt.core.checkpoint.entries import Entry, key_of
from zckpt.core.checkpoint.manifest import Files, Manifest, Run
from zckpt.core.comparison.duplicates import SAMPLE, check_duplicates
from zckpt.core.storage.fragments import Extent, Record, solid
from zckpt.errors import InconsistentCheckpoint

from ..conftest import texts

SOME = random.Random(1).randbytes(64)
OTHER = random.Random(2).randbytes(64)
ZERO = bytes(64)
ONES = b"\0\0\x80\x3f" * 16
LATE = bytes(SAMPLE) + SOME  # what differs lies behind the sample


def manifest(
    root: Path, *tensors: tuple[str, str, bytes], dtype: str = "F32", **more: Any
) -> Manifest:
    """Tensors `file, name, bytes`; the checksum of each file is known."""
    files: dict[str, bytes] = {}
    entries = {}
    for file, name, data in tensors:
        path = str(root / file)
        before = files.get(path, b"")
        numel = len(data) // SIZES[dtype]
        extent = Extent(path, len(before), len(data))
        entries[key_of(name)] = Entry(*key_of(name), dtype, (numel,), solid(numel, extent))
        files[path] = before + data
    for path, data in files.items():
        Path(path).write_bytes(data)
    records = [Record(Extent(path, 0, len(data)), zlib.crc32(data)) for path, data in files.items()]
    return Manifest(
        str(root), "x", Run(), entries, {}, files=Files(records=tuple(records))
    ).replace(**more)


def said(manifest: Manifest) -> list[str]:
    """The warnings, without the paths."""
    return [line.replace(f"{manifest.root}/", "") for line in texts(check_duplicates(manifest))]


COPIED = "one of the files may have been copied over the other"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_files_of_several_weights(count: int, tmp_path: Path) -> None:
    """Two that are equal are copied; one alone may be equal by nature."""
    own = [(f, f"{f}{n}/param", SOME) for f in "fg" for n in range(count)]
    said_of = [line for line in said(manifest(tmp_path, *own)) if "the same weights as" in line]
    assert len(said_of) == (count > 1)
    if said_of:
        assert said_of[0].startswith("g holds the same weights as f: ")


def test_files_with_states_are_refused(tmp_path: Path) -> None:
    own = [(f, f"{f}/{slot}", SOME) for f in "fg" for slot in ("param", "exp_avg")]
    with pytest.raises(InconsistentCheckpoint, match=r"/g holds the same bytes as .*/f, although"):
        check_duplicates(manifest(tmp_path, *own))
    assert said(manifest(tmp_path, *own[:3])) == []
    of_weights = [("g", f"g{n}/param", SOME) for n in range(2)]
    with pytest.raises(InconsistentCheckpoint, match="although"):
        check_duplicates(manifest(tmp_path, *own[:2], *of_weights))
    constant = [(f, f"{f}/{slot}", ONES) for f in "fg" for slot in ("param", "exp_avg")]
    assert said(manifest(tmp_path, *constant)) == []
    random_states = [(f, f"{f}{n}/state", SOME) for f in "fg" for n in range(3)]
    assert said(manifest(tmp_path, *random_states)) == []


@pytest.mark.parametrize("place", ["first", "last"])
def test_files_without_checksums_show_nothing(place: str, tmp_path: Path) -> None:
    own = [(f, f"{f}{n}/param", SOME) for f in "fg" for n in range(2)]
    whole = manifest(tmp_path, *own)
    unknown = [
        Record(record.extent.part(*ends), None if is_unknown else record.crc)
        for record in whole.files.records
        for ends, is_unknown in (((0, 10), place == "first"), ((10, 128), place == "last"))
    ]
    assert said(whole.replace(records=tuple(unknown))) == []
    assert said(whole.replace(records=())) == []


def test_model_ranks_may_have_their_own(tmp_path: Path) -> None:
    own = [(f, f"{f}{n}/param", SOME) for f in "fg" for n in range(2)]
    whole = manifest(tmp_path, *own)
    rank = whole.replace(records=())
    assert said(replace(whole, entries={}, ranks=(rank,))) == said(whole) != []


# -- a file for each tensor


def single(root: Path, *tensors: tuple[str, bytes], dtype: str = "F32") -> list[str]:
    named = ((name.replace("/", "."), name, data) for name, data in tensors)
    return said(manifest(root, *named, dtype=dtype))


def test_two_kinds_are_never_equal(tmp_path: Path) -> None:
    assert single(tmp_path, ("w/exp_avg", SOME), ("w/exp_avg_sq", SOME)) == [
        "w.exp_avg_sq holds the same bytes as w.exp_avg, but exp_avg_sq and exp_avg of a trained "
        f"model always differ: {COPIED}"
    ]
    assert len(single(tmp_path, ("w/master", SOME), ("v/sum", SOME))) == 1
    for tensors in ([("w/param", ONES), ("v/sum", ONES)], [("v/sum", ONES), ("w/param", ONES)]):
        assert len(single(tmp_path, *tensors)) == 1
    sparse = bytes(8) + b"\1" + bytes(55)
    assert len(single(tmp_path, ("w/exp_avg", sparse), ("w/exp_avg_sq", sparse))) == 1


def test_kinds_that_may_be_equal(tmp_path: Path) -> None:
    for tensors in (
        [("w/exp_avg", ZERO), ("w/exp_avg_sq", ZERO)],
        [("w/exp_avg", LATE), ("w/exp_avg_sq", LATE)],
        [("w/exp_avg", SOME), ("w/momentum_buffer", SOME)],
        [("w/param", SOME), ("w/master", SOME)],
        [("w/exp_avg", SOME), ("w/odd", SOME)],
        [("w/odd", SOME), ("w/exp_avg", SOME)],
    ):
        assert single(tmp_path, *tensors) == []


def test_a_state_of_two_parameters_whose_others_differ(tmp_path: Path) -> None:
    equal = [("w/exp_avg", SOME), ("v/exp_avg", SOME)]
    rest = [("w/exp_avg_sq", SOME[::-1]), ("v/exp_avg_sq", OTHER)]
    assert single(tmp_path, *equal, *rest) == [
        "v.exp_avg holds the same bytes as w.exp_avg, but optimizer states of v and w in other "
        f"files differ: {COPIED}"
    ]
    same = [("w/exp_avg_sq", OTHER), ("v/exp_avg_sq", OTHER)]
    assert single(tmp_path, *equal, *same) == []  # the same gradients
    assert single(tmp_path, *equal, rest[0]) == []  # one has no other that could differ
    assert single(tmp_path, ("w/exp_avg", ZERO), ("v/exp_avg", ZERO), *rest) == []
    assert len(single(tmp_path, *equal, *rest, dtype="BF16")) == 1  # rounding made no equal ones


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ("w/exp_avg", "w/exp_avg_sq", "exp_avg_sq and exp_avg of a trained model always differ"),
        ("w/param", "v/param", "optimizer states of v and w in other files differ"),
    ],
)
def test_values_may_lie_in_any_record(first: str, second: str, reason: str, tmp_path: Path) -> None:
    """Files of two records, in any order, one of which is zero."""
    tensors = [("f", first, ZERO + SOME), ("g", second, ZERO + SOME)]
    rest = [("h", "w/sum", SOME), ("i", "v/sum", OTHER)]
    whole = manifest(tmp_path, *tensors, *rest)
    records = [
        Record(record.extent.part(start, start + 64), crc)
        for record in whole.files.records[:2]
        for start, crc in ((0, zlib.crc32(ZERO)), (64, zlib.crc32(SOME)))
    ]
    records[2:] = [*records[:1:-1], *whole.files.records[2:]]
    (line,) = said(whole.replace(records=tuple(records)))
    assert line.startswith(f"g holds the same bytes as f, but {reason}: ")


@pytest.mark.parametrize(
    ("data", "dtype", "count"),
    [(SOME, "F32", 1), (ONES, "F32", 0), (SOME, "BF16", 0), (LATE, "F32", 0)],
)
def test_a_weight_of_two_parameters_whose_states_differ(
    data: bytes, dtype: str, count: int, tmp_path: Path
) -> None:
    """Not of constants, and not of weights that were rounded."""
    equal = [("w/param", data), ("v/param", data)]
    rest = [("w/exp_avg", SOME[::-1]), ("v/exp_avg", OTHER)]
    assert len(single(tmp_path, *equal, *rest, dtype=dtype)) == count


def test_a_file_of_several_tensors_is_of_no_single_state(tmp_path: Path) -> None:
    own = [("f", "w/exp_avg", SOME), ("f", "rng/state", ONES)]
    other = [("g", "w/exp_avg_sq", SOME), ("g", "rng2/state", ONES)]
    assert said(manifest(tmp_path, *own, *other)) == []
    two, one = ([(f, f"{f}/{slot}", SOME) for slot in ("param", "exp_avg")] for f in "fg")
    alone = [(f, f"{f}/param", SOME + SOME) for f in "fg"]
    for tensors in ([*two, alone[1]], [alone[0], *one]):
        assert said(manifest(tmp_path, *tensors)) == []
