"""Copies of one tensor on several ranks, and slices that are none, of made-up bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from zckpt.core.checkpoint.entries import Entry, Key, key_of
from zckpt.core.checkpoint.facts import UNCUT, TensorParallel
from zckpt.core.checkpoint.manifest import Manifest, Parameter, Run
from zckpt.core.checkpoint.origin import Origin
from zckpt.core.checkpoint.placement import from_text
from zckpt.core.comparison.replicas import (
    OWN,
    SAMPLE,
    averaged,
    check_joined,
    check_slices,
    compare_apart,
    copies_of,
    replicas_of,
)
from zckpt.core.storage.fragments import Extent, solid
from zckpt.errors import InconsistentCheckpoint, Notice, UnsupportedCheckpoint

from ..conftest import texts

HINTS = {"tensor rank": "of tensor ranks take the mean", "ep rank": "of ep ranks take the first"}


def compare_copies(manifest: Manifest, chosen: str | None) -> list[Notice]:
    """What a process says that compares all elements alone."""
    return replicas_of(manifest, chosen, HINTS).compare_all()


def entry(root: Path, name: str, values: list[float], axis: str = "") -> Entry:
    path = root / f"{len(list(root.iterdir()))}.bin"
    path.write_bytes(np.array(values, "<f4").tobytes())
    fragments = solid(len(values), Extent(str(path), 0, 4 * len(values)))
    return Entry(*key_of(name), "F32", (len(values),), fragments, axis=axis)


def manifest(*entries: Entry, rules: dict[str, str] | None = None) -> Manifest:
    """The first entry of a name is taken, the others are copies of it."""
    taken: dict[Key, Entry] = {}
    placements = {name: from_text(rule) for name, rule in (rules or {}).items()}
    copies = [own for own in entries if taken.setdefault(own.key, own) is not own]
    return Manifest(
        root="run",
        format="deepspeed",
        entries=taken,
        parameters={own.parameter: Parameter(own.shape, group=0) for own in taken.values()},
        replicas=tuple(copies),
        run=Run(origin=Origin(tp=2), tensor_parallel=TensorParallel(placements, {})),
    )


def test_copies_of_tensor_ranks_that_differ(tmp_path: Path) -> None:
    pair = entry(tmp_path, "w/master", [1, 2]), entry(tmp_path, "w/master", [1, 4], "tensor rank")
    joined = manifest(*pair)
    with pytest.raises(InconsistentCheckpoint, match=r"of 1 parameter \(w\): w: master in 1 of 2"):
        compare_copies(joined, None)
    assert "rank 0's is used" in compare_copies(joined, "rank0")[0].message
    assert "their mean is used" in compare_copies(joined, "mean")[0].message
    assert averaged(joined).entries["w", "master"].mean == pair
    assert compare_copies(manifest(pair[0], replace(pair[0], axis="tensor rank")), None) == []


def test_copies_of_stages_that_differ(tmp_path: Path) -> None:
    pair = entry(tmp_path, "w/master", [1, 2]), entry(tmp_path, "w/master", [1, 4], "stage")
    (warning,) = texts(compare_copies(manifest(*pair), None))
    assert warning.startswith("the stages' replicas of w differ; the first stage's is used")
    replicas_of(manifest(*pair), None, HINTS).begin()  # raises nothing: they may differ
    assert averaged(manifest(*pair)).entries["w", "master"].mean == ()


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
    with pytest.raises(UnsupportedCheckpoint, match="w is the sum of the tensor ranks' values"):
        check_joined(manifest(rules={"w": "sum", "v": "0"}))


@pytest.mark.parametrize(
    ("axis", "said", "hint"),
    [
        ("tensor rank", "tensor ranks hold different", HINTS["tensor rank"]),
        ("", "tensor ranks hold different", HINTS["tensor rank"]),
        ("ep rank", "ep ranks hold different", HINTS["ep rank"]),
    ],
)
def test_the_axis_says_what_may_be_done(axis: str, said: str, hint: str, tmp_path: Path) -> None:
    joined = manifest(entry(tmp_path, "w/param", [1]), entry(tmp_path, "w/param", [2], axis))
    with pytest.raises(InconsistentCheckpoint, match=said) as raised:
        compare_copies(joined, None)
    assert raised.value.hint == hint
    with pytest.raises(InconsistentCheckpoint, match=said) as early:
        replicas_of(joined, None, HINTS).begin()
    assert str(early.value) == str(raised.value)
    assert early.value.hint == hint
    replicas_of(joined, "rank0", HINTS).begin()
    (warning,) = texts(compare_copies(joined, "rank0"))
    assert warning.startswith(
        f"the {said.partition(' hold')[0]}' replicas of w differ; rank 0's is"
    )


def test_ranks_that_keep_their_own_copies(tmp_path: Path) -> None:
    """Nothing is taken, so that copies of stages need not be compared."""
    joined = manifest(
        entry(tmp_path, "w/param", [1, 1]),
        entry(tmp_path, "w/param", [2, 2], "tensor rank"),
        entry(tmp_path, "v/param", [1]),
        entry(tmp_path, "v/param", [2], "stage"),
    )
    (warning,) = texts(compare_copies(joined, OWN))
    assert warning.endswith("each rank keeps its replica: w: param in 2 of 2 elements by at most 1")


def test_masters_of_stages_that_are_apart(tmp_path: Path) -> None:
    """Those of tensor ranks are no copies that drift by nature: `compare_copies` has them."""
    first, other = entry(tmp_path, "w/master", [1, 2]), entry(tmp_path, "w/master", [1, 3])
    for axis, count in (("stage", 1), ("tensor rank", 0)):
        model = manifest(first, replace(other, axis=axis))
        assert len(compare_apart(replace(manifest(), models=(model, model)))) == count
    apart = replace(manifest(), models=(manifest(first, replace(other, axis="stage")),))
    (warning,) = texts(compare_apart(apart))
    assert warning == "the stages' replicas of w differ, and each stage keeps its replica"
    moments = manifest(
        *(replace(each, parameter="w", slot="exp_avg", axis="stage") for each in (first, other))
    )
    assert compare_apart(replace(apart, models=(moments,))) == []


def test_a_state_is_no_copy_of_a_tensor(tmp_path: Path) -> None:
    """Tensors of a program's state may be a rank's own."""
    pair = (entry(tmp_path, "rng/state", [1]), entry(tmp_path, "rng/state", [2], "tensor rank"))
    assert compare_copies(manifest(*pair), None) == []


def test_a_weight_is_the_rounded_mean_of_the_masters(tmp_path: Path) -> None:
    masters = entry(tmp_path, "w/master", [1]), entry(tmp_path, "w/master", [3], "tensor rank")
    weights = entry(tmp_path, "w/param", [9]), entry(tmp_path, "w/param", [9], "tensor rank")
    entries = averaged(manifest(*masters, *weights)).entries
    assert (entries["w", "master"].mean, entries["w", "param"].mean) == (masters, masters)
    alone = averaged(manifest(*weights)).entries
    assert alone["w", "param"].mean == weights
    for origin in (Origin(tp=1), Origin()):
        one = manifest(*masters).replace(origin=origin)
        assert averaged(one) is one


def test_slices_of_other_shapes_prove_nothing(tmp_path: Path) -> None:
    """Ranks with more elements begin with the same, and need not be copies."""
    counts = SAMPLE, SAMPLE + 1
    ranks = [manifest(entry(tmp_path, "w/exp_avg_sq", [1.0] * count)) for count in counts]
    check_slices(replace(manifest(rules={"w": "0"}), models=tuple(ranks)))
    weights = [manifest(entry(tmp_path, "w/param", [1, 1])) for _ in range(2)]
    check_slices(replace(manifest(rules={"w": "0"}), models=tuple(weights)))


def test_copies_that_drift_by_nature_have_no_mean(tmp_path: Path) -> None:
    """With OWN these are not even read."""
    pair = entry(tmp_path, "w/master", [1, 2]), entry(tmp_path, "w/master", [1, 4], "stage")
    joined = manifest(*pair)
    (warning,) = texts(compare_copies(joined, "mean"))
    assert "; the first stage's is used: master in 1 of 2 elements by at most 2" in warning
    for file in tmp_path.iterdir():
        file.unlink()
    assert compare_copies(joined, OWN) == []


def test_a_copy_of_nothing_is_not_compared(tmp_path: Path) -> None:
    copy = entry(tmp_path, "gone/master", [1], "tensor rank")
    assert [*copies_of(replace(manifest(), replicas=(copy,)))] == []


def test_equal_masters_of_stages_that_are_apart(tmp_path: Path) -> None:
    first = entry(tmp_path, "w/master", [1, 2])
    model = manifest(first, entry(tmp_path, "w/master", [1, 2], "stage"))
    assert compare_apart(replace(manifest(), models=(model,))) == []


def test_copies_that_are_no_numbers(tmp_path: Path) -> None:
    """They differ by no distance."""
    pairs = []
    for values in ([1, 2], [1, 3]):
        path = tmp_path / f"{values[1]}.bin"
        path.write_bytes(np.array(values, "<f4").tobytes())
        fragments = solid(1, Extent(str(path), 0, 8))
        pairs.append(Entry("w", "param", "C64", (1,), fragments, axis="tensor rank"))
    with pytest.raises(InconsistentCheckpoint, match=r"w: param in 1 of 1 elements$"):
        compare_copies(manifest(*pairs), None)


def test_what_has_no_mean(tmp_path: Path) -> None:
    """Buffers, whole numbers, and everything where each rank keeps its own."""
    masters = entry(tmp_path, "w/master", [1]), entry(tmp_path, "w/master", [3], "tensor rank")
    moments = entry(tmp_path, "w/exp_avg", [5]), entry(tmp_path, "w/exp_avg", [7], "tensor rank")
    counts = [
        replace(entry(tmp_path, "w/count", [1], axis), dtype="I32") for axis in ("", "tensor rank")
    ]
    buffers = entry(tmp_path, "b/param", [1]), entry(tmp_path, "b/param", [3], "tensor rank")
    joined = manifest(*masters, *moments, *counts, *buffers)
    joined.parameters.pop("b")
    means = {name: own.mean for name, own in averaged(joined).entries.items()}
    assert means == {
        ("w", "master"): masters,
        ("w", "exp_avg"): moments,
        ("w", "count"): (),
        ("b", "param"): (),
    }
    apart = replace(joined, ranks=(manifest(),))
    assert averaged(apart) is apart


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        (([1, 2], [1, 2]), "sum"),
        (([1, 2], [1, 2], None), "0"),  # a rank has none of it
        ((None, [1, 2], [1, 2]), "0"),
        (([1, 2], [1, 2], [1, 3]), "0"),
    ],
)
def test_slices_of_which_one_differs(
    values: tuple[list[float] | None, ...], rule: str, tmp_path: Path
) -> None:
    names = ("w/exp_avg_sq" if own else "v/exp_avg_sq" for own in values)
    entries = (entry(tmp_path, name, own or [1]) for name, own in zip(names, values, strict=True))
    check_slices(replace(manifest(rules={"w": rule}), models=tuple(map(manifest, entries))))


def test_a_model_without_rules_is_joined(tmp_path: Path) -> None:
    ranks = tuple(manifest(entry(tmp_path, "w/exp_avg_sq", [1])) for _ in range(2))
    for facts in (UNCUT, None):
        check_joined(ranks[0].replace(tensor_parallel=facts, models=ranks))
