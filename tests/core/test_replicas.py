"""Copies of one tensor on several ranks, and slices that are none, of made-up bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from zckpt.core.fragments import Extent, solid
from zckpt.core.manifest import Entry, Manifest, Parameter
from zckpt.core.replicas import averaged, check_joined, check_slices, compare_copies
from zckpt.errors import InconsistentCheckpoint, UnsupportedCheckpoint


def entry(root: Path, name: str, values: list[float], axis: str = "") -> Entry:
    path = root / f"{len(list(root.iterdir()))}.bin"
    path.write_bytes(np.array(values, "<f4").tobytes())
    fragments = solid(len(values), Extent(str(path), 0, 4 * len(values)))
    return Entry(name, "F32", (len(values),), fragments, axis=axis)


def manifest(*entries: Entry, rules: dict[str, str] | None = None) -> Manifest:
    """The first entry of a name is taken, the others are copies of it."""
    taken: dict[str, Entry] = {}
    copies = [own for own in entries if taken.setdefault(own.name, own) is not own]
    return Manifest(
        root="run",
        format="deepspeed",
        source={"tp": 2},
        entries=taken,
        parameters={own.parameter: Parameter(own.shape, group=0) for own in taken.values()},
        replicas=tuple(copies),
        state={"tensor_parallel": {"rules": rules or {}}},
    )


def test_copies_of_tensor_ranks_that_differ(tmp_path: Path) -> None:
    pair = entry(tmp_path, "w/master", [1, 2]), entry(tmp_path, "w/master", [1, 4], "tensor rank")
    joined = manifest(*pair)
    with pytest.raises(InconsistentCheckpoint, match=r"of 1 parameter \(w\): w: master in 1 of 2"):
        compare_copies(joined, None)
    assert "rank 0's is taken" in compare_copies(joined, "rank0")[0]
    assert "their mean is taken" in compare_copies(joined, "mean")[0]
    assert averaged(joined).entries["w/master"].mean == pair
    assert compare_copies(manifest(pair[0], replace(pair[0], axis="tensor rank")), None) == []


def test_copies_of_stages_that_differ(tmp_path: Path) -> None:
    pair = entry(tmp_path, "w/master", [1, 2]), entry(tmp_path, "w/master", [1, 4], "stage")
    (warning,) = compare_copies(manifest(*pair), None)
    assert warning.startswith("the stages' copies of w differ; the first stage's is taken")
    assert averaged(manifest(*pair)).entries["w/master"].mean == ()


@pytest.mark.parametrize(
    ("values", "rule", "wrong"),
    [
        (([1, 2], [1, 2]), "0", True),
        (([1, 2], [1, 2]), "replicated", False),
        (([1, 2], [1, 3]), "0", False),
        (([0, 0], [0, 0]), "0", False),  # never trained: it proves nothing
    ],
)
def test_equal_slices(
    values: tuple[list[float], ...], rule: str, wrong: bool, tmp_path: Path
) -> None:
    ranks = [manifest(entry(tmp_path, "w/exp_avg_sq", own)) for own in values]
    joined = replace(manifest(rules={"w": rule}), models=tuple(ranks))
    if wrong:
        with pytest.raises(InconsistentCheckpoint, match="all ranks hold the same"):
            check_slices(joined)
    else:
        check_slices(joined)
    check_slices(replace(joined, models=tuple(ranks[:1])))


def test_parts_of_a_sum() -> None:
    with pytest.raises(UnsupportedCheckpoint, match="a part of w, and the whole is the sum"):
        check_joined(manifest(rules={"w": "sum", "v": "0"}), None)
